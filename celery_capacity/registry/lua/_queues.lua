-- Shared: workers join queues and leave them.

local function node_key(queue, node) return PREFIX .. ':node:' .. #queue .. ':' .. queue .. ':' .. node end

-- What limits a queue over the fleet: what was ordered, else what a worker declared.
local function limit_queue(queue, what, limit)
  local key = queue_key(queue)
  if limit then call('HSET', key, what, limit) else call('HDEL', key, what) end
  local said = call('HMGET', key, 'ordered', 'declared')
  if said[1] or said[2] then call('HSET', key, 'limit', said[1] or said[2]) else call('HDEL', key, 'limit') end
end

local function drop_if_idle(queue)
  if call('EXISTS', PREFIX .. ':classes:' .. queue) == 1 then return end
  local counts = call('HMGET', queue_key(queue), 'ordered', 'held', 'declared')
  -- What workers have declared holds as long as there are any.
  if counts[3] then limit_queue(queue, 'declared') end
  if counts[1] or tonumber(counts[2] or 0) > 0 then return end
  call('DEL', queue_key(queue))
  call('SREM', PREFIX .. ':queues', queue)
end

-- Forget the turns, in one hash, of tasks that no class of the queue knows any more.
local function prune_turns(key, queue)
  for _, field in ipairs(call('HKEYS', key)) do
    if string.sub(field, 1, 4) == 'turn' and classes_of(queue, string.sub(field, 5)) == '' then
      call('HDEL', key, field)
    end
  end
end

local function join_queue(name, queue, class, node, lapse_at)
  call('SADD', PREFIX .. ':queues', queue)
  call('ZADD', PREFIX .. ':serving:' .. queue, lapse_at, name)
  call('SADD', node_key(queue, node), name)
  if call('HINCRBY', PREFIX .. ':classes:' .. queue, class, 1) == 1 then
    call('HINCRBY', queue_key(queue), 'generation', 1)
  end
end

local function leave_queue(name, queue, class, node)
  call('ZREM', PREFIX .. ':serving:' .. queue, name)
  call('SREM', node_key(queue, node), name)
  local pinned = PREFIX .. ':pinned:' .. queue
  if call('EXISTS', node_key(queue, node)) == 0 then
    call('DEL', turns_of(queue, node))
    call('SREM', pinned, node)
  end
  if call('HINCRBY', PREFIX .. ':classes:' .. queue, class, -1) == 0 then
    call('HDEL', PREFIX .. ':classes:' .. queue, class)
    call('HINCRBY', queue_key(queue), 'generation', 1)
    prune_turns(queue_key(queue), queue)
    for _, other in ipairs(call('SMEMBERS', pinned)) do
      prune_turns(turns_of(queue, other), queue)
      if call('EXISTS', turns_of(queue, other)) == 0 then call('SREM', pinned, other) end
    end
  end
  drop_if_idle(queue)
end
