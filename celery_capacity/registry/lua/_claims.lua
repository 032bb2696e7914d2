-- Shared: claiming a slot, and refusing one.

-- Take one slot of a worker that was just found ready; ttl nil = committed.  Counting it for the queue is left to the
-- caller.  Returns the deadline.
local function claim(name, worker, token, queue, ttl)
  local key, held = worker_key(name), worker[4] + 1
  local deadline = now
  if ttl then
    deadline = now + ttl
    local at = text(deadline)
    call('ZADD', DUE, at, 's' .. token)
    call('HSET', key, 'slot:' .. token, 'R' .. at .. ' ' .. queue, 'held', held)
  else
    call('HSET', key, 'slot:' .. token, 'C' .. now_text .. ' ' .. queue, 'held', held)
    call('HINCRBY', key, 'committed', 1)
  end
  if worker[10] ~= '' then count_share(name, queue, 1, worker[10], worker[8], worker[9], worker[2]) end
  if held >= tonumber(worker[3]) then set_listed(name, worker[8], '') end
  return deadline
end

local function has_room(queue)
  local counts = call('HMGET', queue_key(queue), 'limit', 'held')
  return not counts[1] or tonumber(counts[2] or 0) < tonumber(counts[1])
end

local known = {}
local function knows(class, task)
  local key = class .. task
  if known[key] == nil then known[key] = call('SISMEMBER', PREFIX .. ':tasks:' .. class, task) == 1 end
  return known[key]
end

-- Why this worker could not be chosen for this now, or nil.  task and node: '' = any, else ':' and the name.
-- room: whether the queue has room, if that has been asked already.
local function why_not(name, worker, queue, task, node, room)
  if not call('ZSCORE', PREFIX .. ':serving:' .. queue, name) then return 'OTHER_QUEUE' end
  if task ~= '' and not knows(worker[9], string.sub(task, 2)) then return 'UNKNOWN_TASK' end
  if node ~= '' and node ~= ':' .. worker[2] then return 'OTHER_NODE' end
  if room == nil then room = has_room(queue) end
  local limit = share_limit(worker[10], queue)
  return unfit(worker) or (limit and share_held(name, queue) >= limit and 'WORKER_LIMIT') or (not room and 'LIMIT') or nil
end

-- Refuse; if the caller will park, set the lot's mark.  A version is never used twice, not even after a flush.
-- unserved: the reason when no live worker serves the queue.
local function refuse(queue, reason, detail, lot, ttl, unserved)
  local latest = call('ZREVRANGE', PREFIX .. ':serving:' .. queue, 0, 0, 'WITHSCORES')
  local served = latest[2] and tonumber(latest[2]) > now
  if served and lot ~= '' then
    local marks, last = PREFIX .. ':marks', PREFIX .. ':last'
    local mark = call('HGET', marks, lot)
    local version = text(math.max(tonumber(call('HGET', last, 'mark') or 0) + 1, now))
    local till = math.max(now + ttl, mark and tonumber(string.match(mark, '^%d+ (%d+)')) or 0)
    call('HSET', last, 'mark', version)
    call('HSET', marks, lot, version .. ' ' .. text(till) .. ' ' .. queue)
  end
  return {0, not served and unserved or reason, served and 1 or 0, detail or ''}
end
