-- lease_model: request {name, number, holder, lifetime_ns}; answers 0. Leases that ended, of holders that were killed, go.

return answer_each(function(request)
  local name, number = request.name, request.number
  local refusal = refuse_missing_model(name, number) or refuse_deleted_model(name, number)
  if refusal then return refusal end
  local leases = store .. 'model_leases:' .. name .. ':' .. number
  call('HSET', leases, request.holder, plus(now, request.lifetime_ns))
  local flat = call('HGETALL', leases)
  for position = 1, #flat, 2 do
    if not before(now, flat[position + 1]) then call('HDEL', leases, flat[position]) end
  end
  return 0
end)
