-- record_rewards: request {{run_id, rollout_id, attempt, id, call_id, reward}, ...}. Ids that exist are ignored.

return answer_each(function(request)
  local refusal = refuse_missing('rewards', request, 5)
  if refusal then return refusal end
  for _, row in ipairs(request) do
    add_reward(row[1], row[2], row[3], row[6])
  end
  return 0
end)
