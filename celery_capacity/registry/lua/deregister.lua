-- ARGV: worker; epoch.
-- Returns {1}, {0} if there is no such worker, or {-1} if the epoch is not current.
settle()
local current = call('HGET', worker_key(ARGV[1]), 'epoch')
if not current then return answer({0}) end
if current ~= ARGV[2] then
  count('stale_refused', 1)
  return answer({-1})
end
bury(ARGV[1])
return answer({1})
