-- append_calls: request {{run_id, rollout_id, attempt, id, parent_id, prompt_tokens, sampled_tokens, forks, agent}, ...},
-- one blob each. Ids that exist are ignored. The last four are what summaries of rollouts count.

local function count(attempt, row)
  call('HINCRBY', attempt, 'turns', 1)
  for position, name in ipairs({ 'prompt_tokens', 'sampled_tokens', 'forks' }) do
    if row[5 + position] ~= 0 then call('HINCRBY', attempt, name, row[5 + position]) end
  end
  local agents = row[9] ~= '' and cjson.decode(call('HGET', attempt, 'agents') or '[]') or {}
  for _, known in ipairs(agents) do
    if known == row[9] then return end
  end
  agents[#agents + 1] = row[9]
  if row[9] ~= '' then call('HSET', attempt, 'agents', cjson.encode(agents)) end
end

return answer_each(function(request)
  local blobs = {}
  for position in ipairs(request) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing('calls', request, 5)
  if refusal then return refusal end
  for position, row in ipairs(request) do
    local new = call('HSETNX', store .. 'c:' .. row[2] .. ':' .. row[3], row[4], blobs[position])
    if new == 1 then
      call('HDEL', store .. 'a:' .. row[2] .. ':' .. row[3], 'last_refused')
      count(store .. 'a:' .. row[2] .. ':' .. row[3], row)
    end
  end
  return 0
end)
