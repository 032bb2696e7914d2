-- Add to the totals of the namespace.
-- ARGV: name and count of each.
-- Returns {}.
for i = 1, #ARGV, 2 do call('HINCRBY', PREFIX .. ':counters', ARGV[i], ARGV[i + 1]) end
return {}
