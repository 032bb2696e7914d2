-- Claim a slot on one named worker, checking all of its eligibility.
-- ARGV: worker; epoch; queue; task and node, each '' (any) or ':' and the name; ttl in microseconds; nonce of the token;
-- lot to mark, or ''; '1' = commit at once.
-- Returns as reserve.lua.
local name, epoch, queue, task, node, ttl, nonce, lot, commit = unpack(ARGV)
settle()
local worker = read_worker(name)
if not worker[1] then return answer(refuse(queue, 'NO_WORKER', nil, lot, ttl)) end
if worker[1] ~= epoch then return answer(refuse(queue, 'REPLACED', nil, lot, ttl)) end
local reason = why_not(name, worker, queue, task, node)
if reason then return answer(refuse(queue, reason, worker[7] or '', lot, ttl)) end
local deadline = claim(name, worker, nonce .. '.' .. epoch .. '.' .. name, queue, commit ~= '1' and ttl or nil)
call('HINCRBY', queue_key(queue), 'held', 1)
if commit == '1' then deadline = now + ttl end
return answer({1, name, epoch, worker[2], deadline})
