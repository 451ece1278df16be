-- update_run: request {actor, run_id, state, summary = {name, JSON, ...}}; answers the run's fields and its summary's.

return answer_each(function(request)
  local run = request.run_id
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local key, summary = store .. 'run:' .. run, store .. 'summary:' .. run
  call('HSET', key, 'updated_ns', now)
  if request.state then
    local before = call('HGET', key, 'state')
    if before ~= request.state then
      note(request.actor, 'update_run', run, run, { from = before, to = request.state })
    end
    call('HSET', key, 'state', request.state)
    call(request.state == 'running' and 'SADD' or 'SREM', store .. 'active', run)
  end
  for position = 1, #request.summary, 2 do
    call('HSET', summary, request.summary[position], request.summary[position + 1])
  end
  return { call('HGETALL', key), call('HGETALL', summary) }
end)
