-- Renew a lease, and compare what the worker holds with what is recorded as committed.
-- ARGV: worker; epoch; instant before which a slot must have been committed to be healed; then the tokens it holds.
-- Returns {name of a Standing, now, by whom it was replaced, 1 if draining, why, healed tokens, missing tokens}.
local name, epoch, since = unpack(ARGV, 1, 3)
settle()
local key = worker_key(name)
local worker = call('HMGET', key, 'epoch', 'lease', 'lapse', 'host', 'pid', 'queues', 'drain')
if not worker[1] then return answer({'GONE', now, ''}) end
if worker[1] ~= epoch then
  count('stale_refused', 1)
  return answer({'REPLACED', now, 'host=' .. worker[4] .. ' pid=' .. worker[5]})
end

local late_at, lapse_at = text(now + worker[2]), text(now + worker[3])
call('HSET', key, 'late_at', late_at, 'lapse_at', lapse_at)
call('ZADD', DUE, late_at, 'l' .. name)
call('ZADD', PREFIX .. ':workers', lapse_at, name)
for _, queue in ipairs(cjson.decode(worker[6])) do call('ZADD', PREFIX .. ':serving:' .. queue, lapse_at, name) end

local holding, healed, missing = {}, {}, {}
for i = 4, #ARGV do holding[ARGV[i]] = true end
local fields = call('HGETALL', key)
for i = 1, #fields, 2 do
  local token = string.match(fields[i], '^slot:(.*)$')
  if token and holding[token] then
    holding[token] = false
  elseif token then
    local kind, at, queue = string.match(fields[i + 1], '^(.)(%d+) (.*)$')
    if kind == 'C' and tonumber(at) < tonumber(since) then
      free(name, token, kind, queue)
      healed[#healed + 1] = token
    end
  end
end
for i = 4, #ARGV do
  if holding[ARGV[i]] and not find(ARGV[i]) then missing[#missing + 1] = ARGV[i] end
end
refresh(name)
return answer({'CURRENT', now, '', worker[7] and 1 or 0, worker[7] or '', healed, missing})
