-- Shared: the mark of a lot that was found empty.  A mark is "<version> <parked until> <queue>".

-- Clear it, unless somebody has parked since or the last parked message may still be on its way; then it stays, as
-- "<version> <parked until>e <queue>", if nobody has parked since.  Returns 1 if it is still set.
local function still_waiting(lot, version)
  local mark = call('HGET', PREFIX .. ':marks', lot)
  local seen, till = string.match(mark or '', '^(%d+) (%d+)')
  if seen == version and now >= tonumber(till) then
    call('HDEL', PREFIX .. ':marks', lot)
    return 0
  end
  if seen == version then call('HSET', PREFIX .. ':marks', lot, (string.gsub(mark, '^(%d+ %d+) ', '%1e '))) end
  return mark and 1 or 0
end
