-- ARGV: queue; limit, or '' = none.
-- Returns {}.
settle()
local queue, limit = ARGV[1], ARGV[2]
if limit ~= '' then
  call('HSET', queue_key(queue), 'limit', limit)
  call('SADD', PREFIX .. ':queues', queue)
else
  call('HDEL', queue_key(queue), 'limit')
  drop_if_idle(queue)
end
return answer({})
