-- release_steps: request {run_id, after}; answers how many rollouts are free again. The steps go to the abandoned ones.

return answer_each(function(request)
  local run = request.run_id
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local freed = 0
  for _, step in ipairs(steps_after(run, request.after)) do
    local present = read_step(run, step)
    for _, each in ipairs(cjson.decode(present[5])) do
      freed = freed + 1
      call('HDEL', store .. 'r:' .. each[1], 'consumed_by', 'outcome')
    end
    call('RPUSH', store .. 'abandoned:' .. run, cjson.encode(present))
    call('HDEL', store .. 'steps:' .. run, step)
    call('HDEL', store .. 'consumed:' .. run, step)
  end
  abandon_metrics(run, request.after)
  return freed
end)
