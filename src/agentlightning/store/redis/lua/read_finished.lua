-- How many rollouts of `run` have finished, then at most `limit` of those after place `after`, in order; 0 for none.

local finished = call('HGET', store .. 'run:' .. asked.run, 'finished')
if not finished then return no_such_run(asked.run) end
local answer = { finished }
if asked.limit > 0 then
  local key = store .. 'finished:' .. asked.run
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '(' .. asked.after, '+inf', 'LIMIT', 0, asked.limit)) do
    answer[#answer + 1] = rollout_of(id)
  end
end
return answer
