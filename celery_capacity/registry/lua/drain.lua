-- Drain a worker, or admit it again.
-- ARGV: worker; '1' = drain, '0' = admit; reason; microseconds until the drain ends by itself, or ''.
-- Returns {1}, or {0} if there is no such worker.
local name, drain, reason, duration = unpack(ARGV)
settle()
local key = worker_key(name)
if call('EXISTS', key) == 0 then return answer({0}) end
call('ZREM', DUE, 'd' .. name)
if drain == '1' then
  if duration ~= '' then call('ZADD', DUE, text(now + duration), 'd' .. name) end
  call('HSET', key, 'drain', reason)
else
  call('HDEL', key, 'drain')
end
refresh(name)
return answer({1})
