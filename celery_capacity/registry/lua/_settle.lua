-- Shared: what is due, and how a script answers.

-- Let everything happen that is due: reservations ("s<token>") end at their deadline, drains ("d<worker>") at theirs, and
-- leases ("l<worker>") when the heartbeat is late.  A worker whose key was evicted or deleted must stop nobody else.
local expired
local function settle()
  for _, entry in ipairs(call('ZRANGEBYSCORE', DUE, 0, now_text)) do
    local kind, what = string.sub(entry, 1, 1), string.sub(entry, 2)
    call('ZREM', DUE, entry)
    if kind == 's' then
      local owner, _, queue = find(what)
      if owner then
        free(owner, what, 'R', queue)
        expired = expired or {}
        expired[#expired + 1] = what
        expired[#expired + 1] = owner
      end
    elseif call('EXISTS', worker_key(what)) == 1 then
      if kind == 'd' then call('HDEL', worker_key(what), 'drain') end
      refresh(what)
    end
  end
  if expired then count('reservations_expired', #expired / 2) end
end

-- Every script's reply goes through here, so that the reservations that it ended are reported.
local function answer(reply)
  if expired then return {'EXPIRED', expired, reply} end
  return reply
end
