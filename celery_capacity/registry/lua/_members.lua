-- Shared: workers leave the registry.

-- Until when a reservation may be on its way to a worker: to the registrations before this one, and to this one, of which
-- only those count that are not committed.  To be asked before its slots are freed.
local function settled_at(name)
  local fields, latest = call('HGETALL', worker_key(name)), '0'
  for i = 1, #fields, 2 do
    local at
    if fields[i] == 'inherited_until' then
      at = fields[i + 1]
    elseif string.sub(fields[i], 1, 5) == 'slot:' then
      at = string.match(fields[i + 1], '^R(%d+) ')
    end
    if at and tonumber(at) > tonumber(latest) then latest = at end
  end
  return latest
end

-- Take a worker out, with all its slots; returns how many it held.
local function withdraw(name)
  local key = worker_key(name)
  local fields = call('HGETALL', key)
  local freed = 0
  -- So that nothing lists it while its slots are freed.
  call('HSET', key, 'capacity', '')
  refresh(name)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 5) == 'slot:' then
      local kind, _, queue = string.match(fields[i + 1], '^(.)(%d+) (.*)$')
      free(name, string.sub(fields[i], 6), kind, queue)
      freed = freed + 1
      drop_if_idle(queue)
    end
  end
  local worker = call('HMGET', key, 'queues', 'class', 'node')
  for _, queue in ipairs(cjson.decode(worker[1])) do leave_queue(name, queue, worker[2], worker[3]) end
  if call('HINCRBY', PREFIX .. ':builds', worker[2], -1) == 0 then
    call('HDEL', PREFIX .. ':builds', worker[2])
    call('DEL', PREFIX .. ':tasks:' .. worker[2])
  end
  call('ZREM', DUE, 'd' .. name, 'l' .. name)
  call('ZREM', PREFIX .. ':workers', name)
  call('DEL', key)
  return freed
end

-- The worker is gone: free its slots and leave an entry for the sweepers.  Returns how many slots it held.
local function bury(name)
  local seen = call('HMGET', worker_key(name),
    'epoch', 'node', 'capacity', 'queues', 'late_at', 'lease', 'host', 'pid')
  call('HSET', PREFIX .. ':gone', name, cmsgpack.pack({
    epoch = seen[1], settled_at = settled_at(name), node = seen[2], capacity = seen[3], queues = seen[4],
    beat = text(seen[5] - seen[6]), host = seen[7], pid = seen[8], cleaner = '', till = '0'}))
  return withdraw(name)
end
