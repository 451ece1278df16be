-- replace_calls: request {{run_id, rollout_id, attempt, id, parent_id}, ...}, one blob each. Ids that do not exist are ignored.

return answer_each(function(request)
  for _, row in ipairs(request) do
    local key, packed = store .. 'c:' .. row[2] .. ':' .. row[3], blob()
    if call('HEXISTS', key, row[4]) == 1 then call('HSET', key, row[4], packed) end
  end
  return 0
end)
