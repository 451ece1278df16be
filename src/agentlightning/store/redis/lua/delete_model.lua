-- delete_model: request {actor, name, number}; answers 0.

return answer_each(function(request)
  local name, number = request.name, request.number
  local refusal = refuse_missing_model(name, number)
  if refusal then return refusal end
  if call('HGET', model_key(name, number), 'deleted') == '1' then return 0 end
  local use = model_use(name, number)
  if use ~= '' then return refuse('model_in_use', name .. '@' .. number, use) end
  mark_model_deleted(request.actor, name, number)
  return 0
end)
