-- The worker takes a reservation over; no count changes.
-- ARGV: token; worker; epoch.
-- Returns {name of a CommitOutcome}.
local token, name, epoch = unpack(ARGV)
settle()
local current = call('HGET', worker_key(name), 'epoch')
local owner, kind, queue = find(token)
local stale = current and current ~= epoch
if not stale and not owner then return answer({'GONE'}) end
if stale or owner ~= name then
  count('stale_refused', 1)
  return answer({'STALE'})
end
if kind == 'C' then return answer({'ALREADY'}) end
call('ZREM', DUE, 's' .. token)
call('HSET', worker_key(name), 'slot:' .. token, 'C' .. now_text .. ' ' .. queue)
call('HINCRBY', worker_key(name), 'committed', 1)
return answer({'COMMITTED'})
