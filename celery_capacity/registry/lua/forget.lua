-- The clean-up after a gone worker is finished.
-- ARGV: worker; epoch.
-- Returns {1}, or {0} if there is no such entry.
local entry = call('HGET', PREFIX .. ':gone', ARGV[1])
if not entry or cmsgpack.unpack(entry).epoch ~= ARGV[2] then return {0} end
call('HDEL', PREFIX .. ':gone', ARGV[1])
return {1}
