-- reopen_steps: request {run_id, after}; answers the steps to execute again, in order.

return answer_each(function(request)
  local run = request.run_id
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local later = steps_after(run, request.after)
  for position, step in ipairs(later) do
    local present = read_step(run, step)
    if present[2] == 'closed' then write_step(run, step, 'open', '', present[4]) end
    later[position] = read_step(run, step)
  end
  abandon_metrics(run, request.after)
  return later
end)
