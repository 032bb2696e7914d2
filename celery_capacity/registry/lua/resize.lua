-- ARGV: worker; epoch; capacity, or '' = not known.
-- Returns {1}, or {0} if the epoch is not current.
settle()
local key = worker_key(ARGV[1])
if call('HGET', key, 'epoch') ~= ARGV[2] then return answer({0}) end
call('HSET', key, 'capacity', ARGV[3])
refresh(ARGV[1])
return answer({1})
