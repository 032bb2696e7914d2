-- Count one more.
-- ARGV: key; for how long it is remembered, 0 = forget it.
-- Returns {how many}.
local key = PREFIX .. ':strike:' .. ARGV[1]
if ARGV[2] == '0' then
  call('DEL', key)
  return {0}
end
local count = call('INCR', key)
call('PEXPIRE', key, text(math.ceil(ARGV[2] / 1000)))
return {count}
