-- Shared beginning of every script.
-- KEYS[1]: "{capacity:<namespace>}", with which every key begins; the braces keep all of them in one cluster slot.
-- All instants and durations are microseconds, on the clock of this server.
local PREFIX, call = KEYS[1], redis.call
local DUE = PREFIX .. ':due'
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Lua's own conversion would round an instant to 14 digits.
local function text(instant) return string.format('%.0f', instant) end

local function worker_key(name) return PREFIX .. ':worker:' .. name end

local function queue_key(queue) return PREFIX .. ':queue:' .. queue end

-- The workers of one class that have a free slot for a queue, on one node or (nil) on any.
local function free_key(queue, class, node)
  if node then return PREFIX .. ':free:' .. class .. ':' .. #queue .. ':' .. queue .. ':' .. node end
  return PREFIX .. ':free:' .. class .. '::' .. queue
end

-- Fields of a worker, by position: 1 epoch, 2 node, 3 capacity ('' = not known), 4 held, 5 late_at, 6 lapse_at, 7 drain
-- (its reason, or false), 8 last_deadline, 9 listed ('1' while it is in the free sets).  1 is false if there is none.
local function read_worker(name)
  return call('HMGET', worker_key(name),
    'epoch', 'node', 'capacity', 'held', 'late_at', 'lapse_at', 'drain', 'last_deadline', 'listed')
end

-- What keeps a worker from taking anything now, or nil: the one derivation, of which the free sets are only an index.
local function unfit(worker)
  if now >= tonumber(worker[5]) then return now >= tonumber(worker[6]) and 'LAPSED' or 'LATE' end
  if worker[7] then return 'DRAINING' end
  local capacity = tonumber(worker[3])
  if not capacity then return 'UNKNOWN_CAPACITY' end
  if tonumber(worker[4]) >= capacity then return 'FULL' end
end

-- Put a worker into the free sets of all its queues, or take it out.
local function set_listed(name, listed)
  local key = worker_key(name)
  local worker = call('HMGET', key, 'queues', 'class', 'node')
  for _, queue in ipairs(cmsgpack.unpack(worker[1])) do
    local any, here = free_key(queue, worker[2]), free_key(queue, worker[2], worker[3])
    if listed then
      call('ZADD', any, 0, name)
      call('ZADD', here, 0, name)
    else
      call('ZREM', any, name)
      call('ZREM', here, name)
    end
  end
  call('HSET', key, 'listed', listed and '1' or '0')
end

-- Bring the index up to date after anything about the worker has changed.
local function refresh(name)
  local worker = read_worker(name)
  local ready = not unfit(worker)
  if ready ~= (worker[9] == '1') then set_listed(name, ready) end
end
