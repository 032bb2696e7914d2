-- The beginning of every script.
-- KEYS[1]: "{capacity:<namespace>}", with which every key begins; the braces keep all of them in one cluster slot.
-- All instants and durations are microseconds, on the clock of this server.
local PREFIX, call = KEYS[1], redis.call
local DUE = PREFIX .. ':due'
local clock = call('TIME')
local now, now_text = clock[1] * 1000000 + clock[2], clock[1] .. string.sub('00000' .. clock[2], -6)
