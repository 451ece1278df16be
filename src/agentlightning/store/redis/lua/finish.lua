-- finish: request {{lease, state, error, output, silence, rewards}, ...}; answers 1 where the lease held, else 0.
-- `silence` is the warning of an attempt without a call. A reward that is none has `refusal`, why, for a value.

local function record_rewards(rollout, ending, rewards)
  for _, reward in ipairs(rewards) do
    if reward.refusal then
      fail(ending, reward.refusal)
    elseif reward.call_id ~= '' and not call_recorded(rollout.id, rollout.attempt, reward.call_id) then
      fail(ending, reason('unknown_call', reward.name, reward.call_id))
    else
      add_reward(rollout.run, rollout.id, rollout.attempt, reward)
    end
  end
end

return answer_each(function(request)
  local answers = {}
  for position, finish in ipairs(request) do
    local rollout = rollout_held_by(finish.lease)
    answers[position] = rollout and 1 or 0
    if rollout then
      local ending = { state = finish.state, error = finish.error, output = finish.output }
      record_rewards(rollout, ending, finish.rewards)
      settle(rollout, ending, finish.silence, finish.state == 'failed')
      end_rollout(rollout, ending)
    end
  end
  return answers
end)
