-- How many members each of `sets` has, all at one moment.

local counts = {}
for position, set in ipairs(asked.sets) do
  counts[position] = call('ZCARD', store .. set)
end
return counts
