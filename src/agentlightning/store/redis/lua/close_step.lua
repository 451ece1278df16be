-- close_step: request {run_id, step, version}; answers the step.

return answer_each(function(request)
  local run, step = request.run_id, request.step
  local where = 'step ' .. step .. ' of run ' .. run
  local present = read_step(run, step)
  if not present then return refuse('NotFoundError', 'no such step: ' .. where) end
  if present[2] == 'closed' then
    if present[3] == request.version then return present end
    local closed = where .. ' was closed with version ' .. present[3]
    return refuse('ConflictError', closed .. ', not ' .. request.version)
  end
  write_step(run, step, 'closed', request.version, present[4])
  return read_step(run, step)
end)
