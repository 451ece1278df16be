-- cancel: request {rollout ids}, distinct and sorted; answers how many were queued or running.

return answer_each(function(request)
  local count = 0
  for _, id in ipairs(request) do
    local rollout = rollout_to_end(id)
    if rollout and (rollout.state == 'queued' or rollout.state == 'running') then
      end_rollout(rollout, { state = 'lost', error = reason('cancelled') }, true)
      count = count + 1
    end
  end
  return count
end)
