-- Steps of `run` later than `after` (all where it is absent), at most `limit` (0: all), in order: number, fields, list.

local numbers = {}
for _, step in ipairs(call('HKEYS', store .. 'steps:' .. asked.run)) do
  if not asked.after or tonumber(step) > asked.after then numbers[#numbers + 1] = step end
end
table.sort(numbers, function(one, other) return tonumber(one) < tonumber(other) end)
local answer = {}
for position, step in ipairs(numbers) do
  if asked.limit > 0 and position > asked.limit then break end
  local fields = call('HGET', store .. 'steps:' .. asked.run, step)
  answer[position] = { step, fields, call('HGET', store .. 'consumed:' .. asked.run, step) }
end
return answer
