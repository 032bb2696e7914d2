-- The worker takes a reservation over; no count changes.
-- ARGV: token; worker; epoch.
-- Returns {name of a CommitOutcome}.
local token, name, epoch = unpack(ARGV)
settle()
local current = call('HGET', worker_key(name), 'epoch')
if current and current ~= epoch then return answer({'STALE'}) end
local owner, kind, queue = find(token)
if not owner then return answer({'GONE'}) end
if owner ~= name then return answer({'STALE'}) end
if kind == 'C' then return answer({'ALREADY'}) end
call('ZREM', DUE, 's' .. token)
call('HSET', worker_key(name), 'slot:' .. token, 'C' .. now_text .. ' ' .. queue)
call('HINCRBY', worker_key(name), 'committed', 1)
return answer({'COMMITTED'})
