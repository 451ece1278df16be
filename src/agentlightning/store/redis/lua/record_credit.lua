-- record_credit: requests {{run_id, rollout_id, step, call_id}, ...}, one blob each. `credit:RUN` has rollouts by step.

return answer_each(function(request)
  local blobs, refusal = {}, nil
  for position, row in ipairs(request) do
    blobs[position] = blob()
    if not refusal and (not run_exists(row[1]) or call('HGET', store .. 'r:' .. row[2], 'run') ~= row[1]) then
      refusal = refuse('no_credited_rollout', row[2], row[1])
    end
  end
  if refusal then return refusal end
  for position, row in ipairs(request) do
    call('HSET', store .. 'cr:' .. row[2], row[4], blobs[position])
    call('ZADD', store .. 'credit:' .. row[1], row[3], row[2])
  end
  return 0
end)
