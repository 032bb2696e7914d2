-- Shared: keys and workers.

-- Lua's own conversion would round an instant to 14 digits.
local function text(instant) return string.format('%.0f', instant) end

-- What only a store sees.  A server that cannot write it down must not keep anybody from the answer.
local function count(what, n) redis.pcall('HINCRBY', PREFIX .. ':counters', what, n) end

local function worker_key(name) return PREFIX .. ':worker:' .. name end

local function queue_key(queue) return PREFIX .. ':queue:' .. queue end

-- The workers of one class that may be chosen for a queue, on one node or (nil) on any.  Each is there as
-- "<name>\0<epoch>\0<capacity>\0<node>", so that a choice need not read the worker; in that order names sort as names do.
-- "<capacity>/": some of its queues have a limit on this worker.
local function free_key(queue, class, node)
  if node then return PREFIX .. ':free:' .. class .. ':' .. #queue .. ':' .. queue .. ':' .. node end
  return PREFIX .. ':free:' .. class .. '::' .. queue
end

-- Fields of a worker, by position: 1 epoch, 2 node, 3 capacity ('' = not known), 4 held, 5 late_at, 6 lapse_at, 7 drain
-- (its reason, or false), 8 listed: as it is in the free sets, or '', 9 class, 10 shares: as JSON, the limits of queues on
-- this worker, or ''; then those asked for.  1 is false if there is no such worker.
local function read_worker(name, ...)
  return call('HMGET', worker_key(name),
    'epoch', 'node', 'capacity', 'held', 'late_at', 'lapse_at', 'drain', 'listed', 'class', 'shares', ...)
end

-- What keeps a worker from taking anything now, or nil: the one derivation of who may be chosen.
local function unfit(worker)
  if now >= tonumber(worker[5]) then return now >= tonumber(worker[6]) and 'LAPSED' or 'LATE' end
  if worker[7] then return 'DRAINING' end
  local capacity = tonumber(worker[3])
  if not capacity then return 'UNKNOWN_CAPACITY' end
  if tonumber(worker[4]) >= capacity then return 'FULL' end
end
