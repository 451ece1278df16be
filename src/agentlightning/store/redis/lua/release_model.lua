-- release_model: request {name, number, holder}; answers 0.

return answer_each(function(request)
  call('HDEL', store .. 'model_leases:' .. request.name .. ':' .. request.number, request.holder)
  return 0
end)
