-- describe_model: request {name, number, tags, notes or absent, pinned ('0', '1') or absent}, tags names and values, '' to
-- remove one; answers {name, number, fields, tags}.

return answer_each(function(request)
  local name, number = request.name, request.number
  local refusal = refuse_missing_model(name, number)
  if not refusal and request.pinned == '1' then refusal = refuse_deleted_model(name, number) end
  if refusal then return refusal end
  local key, tags = model_key(name, number), store .. 'model_tags:' .. name .. ':' .. number
  for position = 1, #request.tags, 2 do
    local value = request.tags[position + 1]
    put(tags, request.tags[position], value ~= '' and value or nil)
  end
  if request.notes then call('HSET', key, 'notes', request.notes) end
  if request.pinned then call('HSET', key, 'pinned', request.pinned) end
  return model_of(name, number)
end)
