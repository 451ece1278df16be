-- record_feedback: request {{run_id, rollout_id, attempt, id, call_id, reward}, ...}. Ids that exist are ignored. Sessions that
-- have succeeded get the reward that is final then.

return answer_each(function(request)
  for _, row in ipairs(request) do
    local known = rollout_to_end(row[2])
    if not known or known.run ~= row[1] or not known.is_session then return refuse('no_session', row[2], row[1]) end
  end
  local refusal = refuse_missing('rewards', request, 5)
  if refusal then return refusal end
  for _, row in ipairs(request) do
    add_reward(row[1], row[2], row[3], row[6])
    local session, ending = rollout_to_end(row[2]), { state = 'succeeded' }
    if session.state == 'succeeded' then
      settle_reward(session, ending)
      put(store .. 'r:' .. row[2], 'reward', ending.reward)
    end
  end
  return 0
end)
