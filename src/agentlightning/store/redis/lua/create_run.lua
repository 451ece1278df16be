-- create_run: request {ids, name, config, created_ns, binds}: binds, where given, is the token that gets the run. The first of the ids that is free is taken, and answered as {run}.
-- Where none is: {} if they were made from the time, so that others are tried; else a refusal.

return answer_each(function(request)
  local token = request.binds and store .. 'token:' .. request.binds
  if token then
    local known = call('HMGET', token, 'name', 'run_id', 'revoked_ns')
    if not known[1] or known[2] or known[3] then return refuse('token_has_run', request.binds) end
  end
  for _, id in ipairs(request.ids) do
    local key = store .. 'run:' .. id
    if call('EXISTS', key) == 0 then
      call(
        'HSET', key, 'name', request.name, 'state', 'running', 'config', request.config,
        'created_ns', request.created_ns, 'updated_ns', request.created_ns, 'finished', 0
      )
      call('ZADD', store .. 'runs', 0, string.rep('0', 20 - #request.created_ns) .. request.created_ns .. ':' .. id)
      call('SADD', store .. 'active', id)
      if token then
        call('HSET', token, 'run_id', id)
        call('SADD', store .. 'run_tokens:' .. id, request.binds)
      end
      return { id }
    end
  end
  if request.given then return refuse('run_exists', request.ids[1]) end
  return {}
end)
