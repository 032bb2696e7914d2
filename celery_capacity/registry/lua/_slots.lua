-- Shared: slots, and what is due.  A slot is a field "slot:<token>" of its worker: "R<deadline> <queue>" while it is
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
    if not found then return end
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
  -- One that is listed stays so: it only has more room now.
  if call('HGET', key, 'listed') == '' then refresh(owner) end
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
  return true
end

-- Let everything happen that is due: reservations ("s<token>") end at their deadline, drains ("d<worker>") at theirs, and
-- leases ("l<worker>") when the heartbeat is late.
local expired
local function settle()
  for _, entry in ipairs(call('ZRANGEBYSCORE', DUE, 0, now_text)) do
    local kind, what = string.sub(entry, 1, 1), string.sub(entry, 2)
    call('ZREM', DUE, entry)
    if kind == 's' then
      local owner, _, queue = find(what)
      free(owner, what, 'R', queue)
      expired = expired or {}
      expired[#expired + 1] = what
      expired[#expired + 1] = owner
    else
      if kind == 'd' then call('HDEL', worker_key(what), 'drain') end
      refresh(what)
    end
  end
end

-- Every script's reply goes through here, so that the reservations that it ended are reported.
local function answer(reply)
  if expired then return {'EXPIRED', expired, reply} end
  return reply
end
