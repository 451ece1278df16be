-- revoke_token: request {actor, id}; answers names and values of the token's fields.

return answer_each(function(request)
  local key = store .. 'token:' .. request.id
  if call('EXISTS', key) == 0 then return refuse('no_token', request.id) end
  if call('HSETNX', key, 'revoked_ns', now) == 1 then
    local known = call('HMGET', key, 'name', 'role', 'run_id')
    note(request.actor, 'revoke_token', request.id, known[3], { name = known[1], role = known[2] })
  end
  return call('HGETALL', key)
end)
