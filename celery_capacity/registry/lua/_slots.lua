-- Shared: slots.  A slot is a field "slot:<token>" of its worker: "R<deadline> <queue>" while it is
-- reserved, "C<committed at> <queue>" once it is committed.

-- A token names the worker it was made for; one that was put back elsewhere is found through the strays.
local function named_owner(token) return string.match(token, '^[^.]*%.%d+%.(.+)$') end

-- Returns owner, 'R' or 'C', queue, the owner's epoch; nothing if the token is not held.
local function find(token)
  local owner, field = named_owner(token), 'slot:' .. token
  local found = owner and call('HMGET', worker_key(owner), field, 'epoch')
  if not found or not found[1] then
    owner = call('HGET', PREFIX .. ':strays', token)
    found = owner and call('HMGET', worker_key(owner), field, 'epoch')
    if not found or not found[1] then return end
  end
  local kind, queue = string.match(found[1], '^(.)%d+ (.*)$')
  return owner, kind, queue, found[2]
end

-- Give a slot back.  It deletes first: when the server is out of memory, only what comes first may be refused.
local function free(owner, token, kind, queue)
  local key = worker_key(owner)
  call('HDEL', key, 'slot:' .. token)
  if kind == 'R' then
    call('ZREM', DUE, 's' .. token)
  else
    call('HINCRBY', key, 'committed', -1)
  end
  if named_owner(token) ~= owner then call('HDEL', PREFIX .. ':strays', token) end
  call('HINCRBY', key, 'held', -1)
  call('HINCRBY', queue_key(queue), 'held', -1)
  local now_has = call('HMGET', key, 'shares', 'listed', 'class', 'node')
  if now_has[1] ~= '' then count_share(owner, queue, -1, unpack(now_has)) end
  -- One that is listed stays so: it only has more room now.
  if now_has[2] == '' then refresh(owner) end
end

-- Record a slot that the worker really holds, even past its capacity; true unless the token is known.
local function put_back(name, token, queue)
  if find(token) then return false end
  local key = worker_key(name)
  call('HSET', key, 'slot:' .. token, 'C' .. now_text .. ' ' .. queue)
  call('HINCRBY', key, 'held', 1)
  call('HINCRBY', key, 'committed', 1)
  if named_owner(token) ~= name then call('HSET', PREFIX .. ':strays', token, name) end
  call('HINCRBY', queue_key(queue), 'held', 1)
  call('SADD', PREFIX .. ':queues', queue)
  count_share(name, queue, 1, unpack(call('HMGET', key, 'shares', 'listed', 'class', 'node')))
  return true
end
