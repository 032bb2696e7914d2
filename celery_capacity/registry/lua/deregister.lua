-- ARGV: worker; epoch.
-- Returns {1}, or {0} if the epoch is not current.
settle()
if call('HGET', worker_key(ARGV[1]), 'epoch') ~= ARGV[2] then return answer({0}) end
bury(ARGV[1])
return answer({1})
