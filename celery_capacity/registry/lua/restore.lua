-- Put back slots that the worker holds and the registry lost.  Where there is no room for them, they push out as many
-- reservations, the latest first.
-- ARGV: worker; epoch; then token and queue of each slot.
-- Returns {how many}.
settle()
local key = worker_key(ARGV[1])
if call('HGET', key, 'epoch') ~= ARGV[2] then return answer({0}) end
local restored = 0
for i = 3, #ARGV, 2 do
  if put_back(ARGV[1], ARGV[i], ARGV[i + 1]) then restored = restored + 1 end
end

local seen = call('HMGET', key, 'held', 'capacity', 'inherited_until')
local surplus = tonumber(seen[2]) and math.min(restored, seen[1] - seen[2]) or 0
if surplus > 0 then
  local reserved, fields = {}, call('HGETALL', key)
  for i = 1, #fields, 2 do
    local token, at, queue = string.match(fields[i], '^slot:(.*)$'), string.match(fields[i + 1], '^R(%d+) (.*)$')
    if token and at then reserved[#reserved + 1] = {token, at, queue} end
  end
  table.sort(reserved, function(a, b) return tonumber(a[2]) > tonumber(b[2]) end)
  for i = 1, math.min(surplus, #reserved) do
    local token, at, queue = unpack(reserved[i])
    -- Its message may still be on its way.
    if i == 1 and tonumber(at) > tonumber(seen[3]) then call('HSET', key, 'inherited_until', at) end
    free(ARGV[1], token, 'R', queue)
  end
end
refresh(ARGV[1])
return answer({restored})
