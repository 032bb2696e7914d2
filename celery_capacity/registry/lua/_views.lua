-- Shared: what census and overview show.  Both look at every worker.

-- {name, limit or '', held, 1 if a task waits in one of its lots}.
local function waiting_queues()
  local waiting = {}
  for _, mark in ipairs(call('HVALS', PREFIX .. ':marks')) do waiting[string.match(mark, '^%d+ %d+ (.*)$')] = 1 end
  return waiting
end

local function show_queue(queue, waiting)
  local counts = call('HMGET', queue_key(queue), 'limit', 'held')
  return {queue, counts[1] or '', tonumber(counts[2] or 0), waiting[queue] or 0}
end

-- {name, node, epoch, capacity or '', held, committed, queues, beat, host, pid, condition, why it drains, reason}.
local function show_worker(name, reason)
  local worker = read_worker(name)
  local more = call('HMGET', worker_key(name), 'committed', 'queues', 'lease', 'host', 'pid')
  local condition = unfit(worker) or ''
  return {name, worker[2], worker[1], worker[3], tonumber(worker[4]), tonumber(more[1]), cmsgpack.unpack(more[2]),
    worker[5] - more[3], more[4], more[5], condition, worker[7] or '', reason and reason(name, worker) or condition}
end
