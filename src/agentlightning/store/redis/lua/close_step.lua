-- close_step: request {run_id, step, version}; answers the step.

return answer_each(function(request)
  local run, step = request.run_id, request.step
  local present = read_step(run, step)
  if not present then return refuse('no_step', step, run) end
  if present[2] == 'closed' then
    if present[3] == request.version then return present end
    return refuse('step_closed_otherwise', step, run, present[3], request.version)
  end
  write_step(run, step, 'closed', request.version, present[4])
  return read_step(run, step)
end)
