-- Shared: claims for parked tasks.  A mark is "<version> <parked until> <queue>".

-- Claim for the first of the lots that may be.  Lots are (name, queue, seen) in ARGV from `first` on; seen: a version of
-- the mark that does not count, 0, or -1 for a lot that counts as marked.  marked: '1' = only marked lots, '0' = any, in the
-- order given.  Returns {1, worker, epoch, node, now, queue, lot, mark} or {0, reason, ...}.
local function claim_from(name, worker, first, marked, nonce, skip)
  local reason = unfit(worker)
  if reason then return {0, reason, 1, worker[7] or ''} end
  reason = 'NOT_WAITING'
  for i = first, #ARGV, 3 do
    local lot, queue = ARGV[i], ARGV[i + 1]
    local mark = lot ~= skip and call('HGET', PREFIX .. ':marks', lot)
    local version = mark and string.match(mark, '^%d+') or '0'
    if lot ~= skip and ((mark and version ~= ARGV[i + 2]) or ARGV[i + 2] == '-1' or marked == '0') then
      local why = why_not(name, worker, queue, '', '')
      if not why then
        local token = nonce .. '.' .. worker[1] .. '.' .. name
        claim(name, worker, token, queue)
        call('HINCRBY', queue_key(queue), 'held', 1)
        return {1, name, worker[1], worker[2], now, queue, lot, tonumber(version)}
      end
      if reason == 'NOT_WAITING' then reason = why end
    end
  end
  return {0, reason, 1, ''}
end
