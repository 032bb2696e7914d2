-- For every worker: could it be chosen for this now, and if not, why.
-- ARGV: queue; task and node, each '' (any) or ':' and the name.
-- Returns {now, queue as in _views.lua, {workers as in _views.lua}}.
local queue, task, node = unpack(ARGV)
settle()
local room = has_room(queue)
local function reason(name, worker) return why_not(name, worker, queue, task, node, room) end
local workers = {}
for _, name in ipairs(call('ZRANGE', PREFIX .. ':workers', 0, -1)) do
  workers[#workers + 1] = show_worker(name, reason)
end
return answer({now, show_queue(queue, waiting_queues()), workers})
