-- For each run of `ids`: names and values of its fields, and of its summary's.

local answer = {}
for position, run in ipairs(asked.ids) do
  answer[position] = { call('HGETALL', store .. 'run:' .. run), call('HGETALL', store .. 'summary:' .. run) }
end
return answer
