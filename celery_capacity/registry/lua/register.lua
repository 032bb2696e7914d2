-- Register a worker, or register it anew.
-- ARGV: worker; node; class; capacity, or ''; lease and lapse in microseconds; host; pid; queues as JSON; as JSON, the
-- limits of queues on this worker, or ''; the same over the fleet; how many tasks; then the tasks, and token and queue of
-- each slot that the worker holds.
-- Returns {epoch, how many slots of an older registration were freed, its epoch or ''}.
local name, node, class, capacity, lease, lapse, host, pid, queues, shares, limits, task_count = unpack(ARGV, 1, 12)
settle()
local key = worker_key(name)
local older = call('HGET', key, 'epoch')
local gone = call('HGET', PREFIX .. ':gone', name)
local freed, inherited_until = 0, '0'
if older then
  inherited_until = settled_at(name)
  freed = withdraw(name)
elseif gone then
  inherited_until = cmsgpack.unpack(gone).settled_at
end
call('HDEL', PREFIX .. ':gone', name)

-- Rises also after the store was lost.
local epoch = math.max(tonumber(call('HGET', PREFIX .. ':last', 'epoch') or 0) + 1, math.floor(now / 1000))
call('HSET', PREFIX .. ':last', 'epoch', text(epoch))
call('HSET', key, 'epoch', text(epoch), 'node', node, 'capacity', capacity, 'held', 0, 'committed', 0,
  'lease', lease, 'lapse', lapse, 'late_at', text(now + lease), 'lapse_at', text(now + lapse),
  'inherited_until', inherited_until, 'listed', '', 'queues', queues, 'class', class, 'shares', shares,
  'host', host, 'pid', pid)
call('ZADD', DUE, text(now + lease), 'l' .. name)
call('ZADD', PREFIX .. ':workers', text(now + lapse), name)
if call('HINCRBY', PREFIX .. ':builds', class, 1) == 1 then
  for i = 13, 12 + task_count do call('SADD', PREFIX .. ':tasks:' .. class, ARGV[i]) end
end
limits = limits ~= '' and cjson.decode(limits) or {}
for _, queue in ipairs(cjson.decode(queues)) do
  join_queue(name, queue, class, node, text(now + lapse))
  limit_queue(queue, 'declared', limits[queue])
end
for i = 13 + task_count, #ARGV, 2 do put_back(name, ARGV[i], ARGV[i + 1]) end
refresh(name)
return answer({text(epoch), freed, older or ''})
