-- Claim a committed slot, to fetch one parked task with.
-- ARGV: worker; epoch; nonce of the token; '1' = marked lots only; then name, queue and seen version of each lot.
-- Returns as claim_from in _lots.lua.
local name, epoch, nonce, marked = unpack(ARGV, 1, 4)
settle()
local worker = read_worker(name)
if not worker[1] then return answer({0, 'NO_WORKER', 0, ''}) end
if worker[1] ~= epoch then return answer({0, 'REPLACED', 1, ''}) end
return answer(claim_from(name, worker, 5, marked, nonce))
