-- Finished rollouts with the totals of their last attempts: those of `ids`, or `limit` of `run` that finished after place
-- `after`, or before it where `newest_first`. First comes the last place, empty at the end.

local ids, cursor = asked.ids, ''
if not ids then
  local key = store .. 'finished:' .. asked.run
  if asked.newest_first then
    ids = call('ZREVRANGEBYSCORE', key, '(' .. asked.after, '-inf', 'LIMIT', 0, asked.limit)
  else
    ids = call('ZRANGEBYSCORE', key, '(' .. asked.after, '+inf', 'LIMIT', 0, asked.limit)
  end
  cursor = #ids == asked.limit and call('ZSCORE', key, ids[#ids]) or ''
end
local answer = { cursor }
for _, id in ipairs(ids) do
  local row = call('HGETALL', store .. 'r:' .. id)
  local known = call('HMGET', store .. 'r:' .. id, 'finished_seq', 'attempt', 'run')
  if known[1] and known[3] == asked.run then
    local attempt = store .. 'a:' .. id .. ':' .. known[2]
    local totals = call('HMGET', attempt, 'turns', 'prompt_tokens', 'sampled_tokens', 'forks', 'agents')
    answer[#answer + 1] = { id, row, totals }
  end
end
return answer
