-- Shared: who comes next.

-- The turns of the demands that are pinned to a node; those of the others are in the queue's own hash.  A turn is the field
-- "turn<task>": "<generation of the queue's classes> <classes that know the task> <name of the last worker chosen>".
local function turns_of(queue, node) return PREFIX .. ':turns:' .. #queue .. ':' .. queue .. ':' .. node end

-- The classes that serve the queue and know the task, as "class,class": as many as there are builds.
local function classes_of(queue, task)
  local found = {}
  for _, class in ipairs(call('HKEYS', PREFIX .. ':classes:' .. queue)) do
    if task == '' or knows(class, string.sub(task, 2)) then found[#found + 1] = class end
  end
  return table.concat(found, ',')
end

-- By code point, as names are ordered everywhere; Lua's own comparison follows the server's locale.
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The first entry after the name, over the free sets of all these classes.
local function next_after(queue, classes, node, name)
  local first
  for class in string.gmatch(classes, '[^,]+') do
    local entry = call('ZRANGEBYLEX', free_key(queue, class, node), '(' .. name .. '\1', '+', 'LIMIT', 0, 1)[1]
    if entry and (not first or before(entry, first)) then first = entry end
  end
  return first
end

-- An entry of a worker that is not there any more: its key was evicted or deleted, for nothing here leaves one.
local function drop_entry(queue, classes, entry)
  local node = string.match(entry, '^[^%z]*%z%d+%z%d+/?%z(.*)$')
  for class in string.gmatch(classes, '[^,]+') do
    call('ZREM', free_key(queue, class), entry)
    call('ZREM', free_key(queue, class, node), entry)
  end
end

-- The most useful reason why there is nobody, from at most 64 workers, so that refusing does not cost more in a
-- larger fleet; those whose leases are newest come first.
local USEFUL = {'FULL', 'WORKER_LIMIT', 'DRAINING', 'UNKNOWN_CAPACITY', 'LATE', 'LAPSED'}
local function why_nobody(queue, task, node, classes)
  if classes == '' then return 'UNKNOWN_TASK' end
  local names
  if node then
    names = call('SRANDMEMBER', PREFIX .. ':node:' .. #queue .. ':' .. queue .. ':' .. node, 64)
    if #names == 0 then return 'OTHER_NODE' end
  else
    names = call('ZREVRANGE', PREFIX .. ':serving:' .. queue, 0, 63)
  end
  local found, any = {}, false
  for _, name in ipairs(names) do
    local worker = read_worker(name)
    if worker[1] and string.find(classes, worker[9], 1, true) then
      local reason = unfit(worker)
      if reason == 'FULL' then return reason end
      local limit = not reason and share_limit(worker[10], queue)
      if limit and share_held(name, queue) >= limit then reason = 'WORKER_LIMIT' end
      found[reason or ''], any = true, true
    end
  end
  for _, reason in ipairs(USEFUL) do
    if found[reason] then return reason end
  end
  return node and 'OTHER_NODE' or 'FULL'
end
