-- append_calls: request {{run_id, rollout_id, attempt, id, parent_id}, ...}, one blob each. Ids that exist are ignored.

return answer_each(function(request)
  local blobs = {}
  for position in ipairs(request) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing('calls', request, 5)
  if refusal then return refusal end
  for position, row in ipairs(request) do
    local new = call('HSETNX', store .. 'c:' .. row[2] .. ':' .. row[3], row[4], blobs[position])
    if new == 1 then call('HDEL', store .. 'a:' .. row[2] .. ':' .. row[3], 'last_refused') end
  end
  return 0
end)
