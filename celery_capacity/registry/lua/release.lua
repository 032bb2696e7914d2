-- Give a slot back; perhaps turn it into a claim for a parked task; perhaps clear the mark of a lot found empty.
-- ARGV: token; epoch of the speaker, or ''; worker and epoch of the claim to make, or ''; '1' = marked lots only; nonce of
-- its token; lot found empty, or ''; version of its mark that was seen; then name, queue and seen version of each lot.
-- Returns {name of a ReleaseOutcome} or {'RELEASED', 1 if the empty lot is still marked, claim as in _lots.lua or nil}.
local token, epoch, name, claim_epoch, marked, nonce, emptied, version = unpack(ARGV, 1, 8)
settle()
local owner, kind, queue, current = find(token)
if not owner then return answer({'ALREADY'}) end
if epoch ~= '' and epoch ~= current then
  count('stale_refused', 1)
  return answer({'STALE'})
end
free(owner, token, kind, queue)

local waiting = emptied ~= '' and still_waiting(emptied, version) or 0
if name ~= owner or claim_epoch ~= current then return answer({'RELEASED', waiting}) end

local skip = emptied ~= '' and emptied or nil
local claimed = claim_from(owner, read_worker(owner), 9, '1', nonce, skip)
if claimed[1] == 0 and marked == '0' then
  claimed = claim_from(owner, read_worker(owner), 9, '0', nonce, skip)
end
return answer({'RELEASED', waiting, claimed[1] == 1 and claimed or nil})
