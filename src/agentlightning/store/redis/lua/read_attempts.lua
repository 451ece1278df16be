-- For each attempt of `ids`: rollout, number, names and values of its fields.

local answer = {}
for _, id in ipairs(asked.ids) do
  for attempt = 1, tonumber(call('HGET', store .. 'r:' .. id, 'attempt') or 0) do
    answer[#answer + 1] = { id, attempt, call('HGETALL', store .. 'a:' .. id .. ':' .. attempt) }
  end
end
return answer
