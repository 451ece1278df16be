-- add_token: request {actor, id, name, role, run_id or '', secret_hash, lifetime_s, lifetime_ns or ''}; answers {created_ns, expires_ns or ''}.

return answer_each(function(request)
  local run = request.run_id ~= '' and request.run_id or nil
  if run then
    local refusal = refuse_missing_runs({ run })
    if refusal then return refusal end
  end
  local expires_ns = request.lifetime_ns ~= '' and plus(now, request.lifetime_ns) or ''
  local key = store .. 'token:' .. request.id
  call(
    'HSET', key, 'name', request.name, 'role', request.role, 'secret_hash', request.secret_hash, 'created_ns', now
  )
  if expires_ns ~= '' then call('HSET', key, 'expires_ns', expires_ns) end
  if run then
    call('HSET', key, 'run_id', run)
    call('SADD', store .. 'run_tokens:' .. run, request.id)
  end
  call('SADD', store .. 'tokens', request.id)
  call('HSET', store .. 'token_hashes', request.secret_hash, request.id)
  local detail = { name = request.name, role = request.role, lifetime_s = request.lifetime_s }
  note(request.actor, 'create_token', request.id, run, detail)
  return { now, expires_ns }
end)
