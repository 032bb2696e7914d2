-- Free the slots of lapsed workers, and hand out the gone ones to clean up after.
-- ARGV: cleaner; microseconds that they stay its.
-- Returns {{worker, epoch, slots freed, ... of those that lapsed just now}, {worker, epoch, 1 if settled, ... handed out}}.
local cleaner, lease = unpack(ARGV)
settle()
local lapsed, mine, freed = {}, {}, 0
for _, name in ipairs(call('ZRANGEBYSCORE', PREFIX .. ':workers', 0, now_text)) do
  local epoch = call('HGET', worker_key(name), 'epoch')
  if epoch then
    local held = bury(name)
    freed = freed + held
    for _, value in ipairs({name, epoch, held}) do lapsed[#lapsed + 1] = value end
  else
    call('ZREM', PREFIX .. ':workers', name) -- its key was evicted or deleted
  end
end
if lapsed[1] then count('workers_lapsed', #lapsed / 3) end
if freed > 0 then count('slots_freed_by_lapse', freed) end
local gone = call('HGETALL', PREFIX .. ':gone')
for i = 1, #gone, 2 do
  local entry = cmsgpack.unpack(gone[i + 1])
  if entry.cleaner == '' or entry.cleaner == 'c' .. cleaner or now >= tonumber(entry.till) then
    entry.cleaner, entry.till = 'c' .. cleaner, text(now + lease)
    call('HSET', PREFIX .. ':gone', gone[i], cmsgpack.pack(entry))
    local settled = now >= tonumber(entry.settled_at) and 1 or 0
    for _, value in ipairs({gone[i], entry.epoch, settled}) do mine[#mine + 1] = value end
  end
end
for _, queue in ipairs(call('SMEMBERS', PREFIX .. ':queues')) do drop_if_idle(queue) end
return answer({lapsed, mine})
