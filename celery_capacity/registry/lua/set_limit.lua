-- ARGV: queue; limit, or '' = what the workers declare.
-- Returns {}.
settle()
local queue, limit = ARGV[1], ARGV[2]
limit_queue(queue, 'ordered', limit ~= '' and limit)
if limit ~= '' then call('SADD', PREFIX .. ':queues', queue) else drop_if_idle(queue) end
return answer({})
