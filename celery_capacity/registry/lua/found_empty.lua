-- A lot was found empty.
-- ARGV: lot; version of its mark that was seen.
-- Returns {1 if it is still marked}.
return {still_waiting(ARGV[1], ARGV[2])}
