-- Choose a worker and claim one of its slots.
-- ARGV: queue; task and node, each '' (any) or ':' and the name; ttl in microseconds; nonce of the token; lot to mark, or ''.
-- Returns {1, worker, epoch, node, deadline}, or {0, reason, served, detail}.
local queue, task, node, ttl, nonce, lot = unpack(ARGV)
settle()
local key = queue_key(queue)
local pinned = node ~= '' and string.sub(node, 2) or nil
local turn_field = 'turn' .. task
local seen = call('HMGET', key, 'limit', 'held', 'generation', turn_field)
local held = tonumber(seen[2] or 0)
if not seen[3] then return answer(refuse(queue, 'NO_WORKER', nil, '', ttl)) end
if seen[1] and held >= tonumber(seen[1]) then return answer(refuse(queue, 'LIMIT', nil, lot, ttl, 'NO_WORKER')) end

local turns_key, turn = key, seen[4]
if pinned then
  turns_key = turns_of(queue, pinned)
  turn = call('HGET', turns_key, turn_field)
end
-- A turn keeps, with the name of the worker chosen last, which classes know the task: "<generation> <classes> <name>".
local generation, classes, cursor = string.match(turn or '', '^(%S+) (%S*) (.*)$')
if generation ~= seen[3] then classes = classes_of(queue, task) end
cursor = cursor or ''

local name, worker, reason
repeat
  name = next_after(queue, classes, pinned, cursor)
  if not name and cursor ~= '' then name = next_after(queue, classes, pinned, '') end
  if not name then
    return answer(refuse(queue, why_nobody(queue, task, pinned, classes), nil, lot, ttl, 'NO_WORKER'))
  end
  worker = read_worker(name)
  reason = unfit(worker)
  -- Late: only time makes it so, and time keeps no index.  Its heartbeat lists it again.
  if reason then set_listed(name, false) end
until not reason

local token = nonce .. '.' .. worker[1] .. '.' .. name
local deadline = claim(name, worker, token, queue, ttl)
if pinned and not turn then call('SADD', PREFIX .. ':pinned:' .. queue, pinned) end
if name == cursor and generation == seen[3] then
  call('HSET', key, 'held', held + 1)
else
  turn = seen[3] .. ' ' .. classes .. ' ' .. name
  if pinned then
    call('HSET', turns_key, turn_field, turn)
    call('HSET', key, 'held', held + 1)
  else
    call('HSET', key, 'held', held + 1, turn_field, turn)
  end
end
return answer({1, name, worker[1], worker[2], deadline})
