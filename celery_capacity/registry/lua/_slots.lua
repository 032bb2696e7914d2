-- Shared: slots, and what is due.  A slot is a field "slot:<token>" of its worker: "R<deadline> <queue>" while it is
-- reserved, "C<committed at> <queue>" once it is committed.

-- A token names the worker it was made for; one that was put back elsewhere is found through the strays.
local function named_owner(token) return string.match(token, '^[^.]*%.%d+%.(.+)$') end

-- Returns owner, 'R' or 'C', instant, queue; nothing if the token is not held.
local function find(token)
  local owner = named_owner(token)
  local slot = owner and call('HGET', worker_key(owner), 'slot:' .. token)
  if not slot then
    owner = call('HGET', PREFIX .. ':strays', token)
    slot = owner and call('HGET', worker_key(owner), 'slot:' .. token)
  end
  if not slot then return end
  local kind, at, queue = string.match(slot, '^(.)(%d+) (.*)$')
  return owner, kind, tonumber(at), queue
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
  if call('HGET', key, 'listed') == '0' then refresh(owner) end
end

-- Record a slot that the worker really holds, even past its capacity; true unless the token is known.
local function put_back(name, token, queue)
  if find(token) then return false end
  local key = worker_key(name)
  call('HSET', key, 'slot:' .. token, 'C' .. text(now) .. ' ' .. queue)
  call('HINCRBY', key, 'held', 1)
  call('HINCRBY', key, 'committed', 1)
  if named_owner(token) ~= name then call('HSET', PREFIX .. ':strays', token, name) end
  call('HINCRBY', queue_key(queue), 'held', 1)
  call('SADD', PREFIX .. ':queues', queue)
  return true
end

-- Let everything happen that is due: reservations ("s<token>") end at their deadline, drains ("d<worker>") at theirs.
local expired
local function settle()
  local due = call('ZRANGEBYSCORE', DUE, 0, text(now))
  for _, entry in ipairs(due) do
    local what = string.sub(entry, 2)
    call('ZREM', DUE, entry)
    if string.byte(entry) == 115 then
      local owner, kind, _, queue = find(what)
      if kind == 'R' then
        free(owner, what, kind, queue)
        expired = expired or {}
        expired[#expired + 1] = what
        expired[#expired + 1] = owner
      end
    else
      call('HDEL', worker_key(what), 'drain')
      refresh(what)
    end
  end
end

-- Every script's reply goes through here, so that the reservations that it ended are reported.
local function answer(reply)
  if expired then return {'EXPIRED', expired, reply} end
  return reply
end
