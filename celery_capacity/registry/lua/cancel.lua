-- Give back a reservation, unless the worker has committed it.
-- ARGV: token.
-- Returns {name of a ReleaseOutcome}.
settle()
local owner, kind, queue = find(ARGV[1])
if not owner then return answer({'ALREADY'}) end
if kind == 'C' then return answer({'COMMITTED'}) end
free(owner, ARGV[1], kind, queue)
return answer({'RELEASED'})
