-- drop_credit: request {run_id, before}: the credit of rollouts that earlier steps learned from.

return answer_each(function(request)
  local index, old = store .. 'credit:' .. request.run_id, '(' .. request.before
  for _, id in ipairs(call('ZRANGEBYSCORE', index, '-inf', old)) do
    call('UNLINK', store .. 'cr:' .. id)
  end
  call('ZREMRANGEBYSCORE', index, '-inf', old)
  return 0
end)
