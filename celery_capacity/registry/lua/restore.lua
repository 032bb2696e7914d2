-- Put back slots that the worker holds and the registry lost.
-- ARGV: worker; epoch; then token and queue of each slot.
-- Returns {how many}.
settle()
if call('HGET', worker_key(ARGV[1]), 'epoch') ~= ARGV[2] then return answer({0}) end
local restored = 0
for i = 3, #ARGV, 2 do
  if put_back(ARGV[1], ARGV[i], ARGV[i + 1]) then restored = restored + 1 end
end
refresh(ARGV[1])
return answer({restored})
