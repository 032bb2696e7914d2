-- Shared: workers leave the registry.

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
    'epoch', 'last_deadline', 'node', 'capacity', 'queues', 'late_at', 'lease', 'host', 'pid')
  call('HSET', PREFIX .. ':gone', name, cmsgpack.pack({
    epoch = seen[1], settled_at = seen[2], node = seen[3], capacity = seen[4], queues = seen[5],
    beat = text(seen[6] - seen[7]), host = seen[8], pid = seen[9], cleaner = '', till = '0'}))
  return withdraw(name)
end
