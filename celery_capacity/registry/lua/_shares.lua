-- Shared: the free sets, and the limits of queues on single workers.

-- The limit of a queue on one worker, or nil; and what that worker holds for a queue which has one.
local function share_limit(shares, queue)
  return shares and shares ~= '' and cjson.decode(shares)[queue] or nil
end

local function share_held(name, queue) return tonumber(call('HGET', worker_key(name), 'share:' .. queue) or 0) end

-- Count a slot more or less for a queue, if it has a limit on this worker; a worker that is listed is listed for the queue
-- while there is room.
local function count_share(name, queue, n, shares, listed, class, node)
  local limit = share_limit(shares, queue)
  if not limit then return end
  local held = call('HINCRBY', worker_key(name), 'share:' .. queue, n)
  if listed == '' then return end
  for _, free in ipairs({free_key(queue, class), free_key(queue, class, node)}) do
    if held < limit then call('ZADD', free, 0, listed) else call('ZREM', free, listed) end
  end
end

-- Replace a worker's entry in the free sets of all its queues; '' = none.
local function set_listed(name, old, new)
  local key = worker_key(name)
  local worker = call('HMGET', key, 'queues', 'class', 'node', 'shares')
  for _, queue in ipairs(cjson.decode(worker[1])) do
    local limit = new ~= '' and share_limit(worker[4], queue)
    local room = new ~= '' and (not limit or share_held(name, queue) < limit)
    for _, free in ipairs({free_key(queue, worker[2]), free_key(queue, worker[2], worker[3])}) do
      if old ~= '' then call('ZREM', free, old) end
      if room then call('ZADD', free, 0, new) end
    end
  end
  call('HSET', key, 'listed', new)
end

-- Bring the free sets up to date after anything about the worker has changed.  What changes by time alone has an entry in
-- DUE, so that after settle() they are exact.
local function refresh(name)
  local worker = read_worker(name)
  local new = ''
  if not unfit(worker) then
    new = table.concat({name, worker[1], worker[3] .. (worker[10] ~= '' and '/' or ''), worker[2]}, '\0')
  end
  if new ~= worker[8] then set_listed(name, worker[8], new) end
end
