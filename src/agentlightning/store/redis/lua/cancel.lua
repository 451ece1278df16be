-- cancel: request {actor, ids}, rollouts distinct and sorted; answers how many were queued or running.

return answer_each(function(request)
  local count, by_run = 0, {}
  for _, id in ipairs(request.ids) do
    local rollout = rollout_to_end(id)
    if rollout and (rollout.state == 'queued' or rollout.state == 'running') then
      end_rollout(rollout, { state = 'lost', error = reason('cancelled') }, true)
      count = count + 1
      by_run[rollout.run] = by_run[rollout.run] or {}
      table.insert(by_run[rollout.run], id)
    end
  end
  note_rollouts(request.actor, 'cancel', by_run)
  return count
end)
