-- Shared: what census and overview show.  Both look at every worker.

-- {name, limit or '', held, 1 if a task waits in one of its lots}.
local function waiting_queues()
  local waiting = {}
  for _, mark in ipairs(call('HVALS', PREFIX .. ':marks')) do
    local queue = string.match(mark, '^%d+ %d+ (.*)$') -- not of one that was found empty
    if queue then waiting[queue] = 1 end
  end
  return waiting
end

local function show_queue(queue, waiting)
  local counts = call('HMGET', queue_key(queue), 'limit', 'held')
  return {queue, counts[1] or '', tonumber(counts[2] or 0), waiting[queue] or 0}
end

-- nil if its key is gone, else {the fields of read_worker, committed, queues as JSON, lease, host, pid, name, condition or '',
-- reason or '', and of each queue that has a limit on the worker: queue, held, limit}.
local function show_worker(name, reason)
  local worker = read_worker(name, 'committed', 'queues', 'lease', 'host', 'pid')
  if not worker[1] then return end
  local condition, why = unfit(worker), nil
  if reason then why = reason(name, worker) else why = condition end
  worker[7] = worker[7] or ''
  worker[16], worker[17], worker[18] = name, condition or '', why or ''
  for queue, limit in pairs(worker[10] and worker[10] ~= '' and cjson.decode(worker[10]) or {}) do
    for _, value in ipairs({queue, share_held(name, queue), limit}) do worker[#worker + 1] = value end
  end
  return worker
end
