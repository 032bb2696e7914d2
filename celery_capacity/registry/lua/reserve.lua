-- Choose a worker and claim one of its slots.  What happens at most dispatches is here in one line, without a function, and
-- whatever is rarer is in rarely(): even to define a function costs time.
-- ARGV: queue; task and node, each '' (any) or ':' and the name; ttl in microseconds; nonce of the token; lot to mark, or '';
-- the preferred node, or ''.
-- Returns {entry of the worker as in _base.lua, deadline}, or {0, reason, served, detail}.
local queue, task, node, lib = ARGV[1], ARGV[2], ARGV[3], nil
if call('ZRANGEBYSCORE', DUE, '0', now_text)[1] then
  lib = rarely()
  lib.settle()
end
local key, turn_field = PREFIX .. ':queue:' .. queue, 'turn' .. task
local seen = call('HMGET', key, 'held', turn_field, 'generation', 'limit')
local held, turn, generation, limit = seen[1] or 0, seen[2], seen[3], seen[4]
local function refused(...)
  lib = lib or rarely()
  return lib.answer(lib.refuse(queue, ...))
end
if not generation then return refused('NO_WORKER', nil, '', 0) end
if limit and tonumber(held) >= tonumber(limit) then return refused('LIMIT', nil, ARGV[6], ARGV[4], 'NO_WORKER') end

local pinned = node ~= '' and string.sub(node, 2) or nil
if ARGV[7] ~= '' and not pinned then
  lib = lib or rarely()
  if lib.next_after(queue, lib.classes_of(queue, task), ARGV[7], '') then pinned = ARGV[7] end
end
local turns_key = key
if pinned then
  lib = lib or rarely()
  turns_key = lib.turns_of(queue, pinned)
  turn = call('HGET', turns_key, turn_field)
end
local known, classes, last = string.match(turn or '', '^(%d+) (%S*) (.*)$')
if known ~= generation then
  lib = lib or rarely()
  classes, last = lib.classes_of(queue, task), last or ''
end

local entry, name, epoch, capacity, shares, worker, count
repeat
  if pinned or #classes ~= 16 then
    lib = lib or rarely()
    entry = lib.next_after(queue, classes, pinned, last) or lib.next_after(queue, classes, pinned, '')
  else
    local free = PREFIX .. ':free:' .. classes .. '::' .. queue
    entry = call('ZRANGEBYLEX', free, '(' .. last .. '\1', '+', 'LIMIT', '0', '1')[1]
      or call('ZRANGEBYLEX', free, '-', '+', 'LIMIT', '0', '1')[1]
  end
  if not entry then
    lib = lib or rarely()
    return refused(lib.why_nobody(queue, task, pinned, classes), nil, ARGV[6], ARGV[4], 'NO_WORKER')
  end
  name, epoch, capacity, shares = string.match(entry, '^([^%z]*)%z(%d+)%z(%d+)(/?)')
  worker = PREFIX .. ':worker:' .. name
  count = call('HMGET', worker, 'held', 'listed')
  if count[2] ~= entry then
    lib = lib or rarely()
    lib.drop_entry(queue, classes, entry)
  end
until count[2] == entry

local deadline = now + ARGV[4]
local at, token = string.format('%.0f', deadline), ARGV[5] .. '.' .. epoch .. '.' .. name
call('ZADD', DUE, at, 's' .. token)
call('HSET', worker, 'slot:' .. token, 'R' .. at .. ' ' .. queue, 'held', count[1] + 1)
if shares ~= '' then
  lib = lib or rarely()
  local has = call('HMGET', worker, 'shares', 'class', 'node')
  lib.count_share(name, queue, 1, has[1], entry, has[2], has[3])
end
if count[1] + 1 >= tonumber(capacity) then
  lib = lib or rarely()
  lib.set_listed(name, entry, '')
end
if known == generation and name == last then
  call('HSET', key, 'held', held + 1)
else
  turn = generation .. ' ' .. classes .. ' ' .. name
  if pinned then
    call('SADD', PREFIX .. ':pinned:' .. queue, pinned)
    call('HSET', turns_key, turn_field, turn)
    call('HSET', key, 'held', held + 1)
  else
    call('HSET', key, 'held', held + 1, turn_field, turn)
  end
end
if lib then return lib.answer({entry, deadline}) end
return {entry, deadline}
