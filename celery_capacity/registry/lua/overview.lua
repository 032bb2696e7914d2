-- All workers, gone ones too, all queues, and all counters.
-- Returns {now, {queues as in _views.lua}, {workers as in _views.lua}, {gone workers: name, node, epoch, capacity or '',
-- queues as JSON, beat, host, pid}, {counter, total, ...}, {lot, its mark as in _marks.lua, ...}}.
settle()
local workers, gone, queues, names = {}, {}, {}, waiting_queues()
for _, name in ipairs(call('ZRANGE', PREFIX .. ':workers', 0, -1)) do workers[#workers + 1] = show_worker(name) end
local entries = call('HGETALL', PREFIX .. ':gone')
for i = 1, #entries, 2 do
  local entry = cmsgpack.unpack(entries[i + 1])
  gone[#gone + 1] = {entries[i], entry.node, entry.epoch, entry.capacity, entry.queues, tonumber(entry.beat), entry.host,
    entry.pid}
end
local waiting = waiting_queues()
for _, queue in ipairs(call('SMEMBERS', PREFIX .. ':queues')) do names[queue] = 1 end
for queue in pairs(names) do
  local shown = show_queue(queue, waiting)
  if shown[2] ~= '' or shown[3] > 0 or shown[4] == 1 or call('EXISTS', PREFIX .. ':serving:' .. queue) == 1 then
    queues[#queues + 1] = shown
  end
end
return answer({now, queues, workers, gone, call('HGETALL', PREFIX .. ':counters'), call('HGETALL', PREFIX .. ':marks')})
