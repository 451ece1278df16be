-- set_alias: request {actor, name, alias, number or '' to remove it, reason}, the reason as JSON; answers {number or '', previous or '', moved_ns}.

return answer_each(function(request)
  local name, alias, number = request.name, request.alias, request.number
  local key = store .. 'aliases:' .. name
  local text = call('HGET', key, alias)
  local known = text and cjson.decode(text) or { '', '' }
  if number == '' and known[1] == '' then return refuse('no_alias', name .. '@' .. alias) end
  local whose = number ~= '' and number or known[1]
  local refusal = refuse_missing_model(name, whose) or (number ~= '' and refuse_deleted_model(name, whose))
  if refusal then return refusal end
  if number == known[1] then return known end
  local previous = known[1] ~= '' and known[1] or known[2]
  local moved = { number, previous, now }
  call('HSET', key, alias, cjson.encode(moved))
  local function json(value) return value ~= '' and value or 'null' end
  local detail = '{"number":' .. json(number) .. ',"previous":' .. json(previous) .. ',"reason":' .. request.reason .. '}'
  note_text(request.actor, 'set_alias', name .. '@' .. alias, call('HGET', model_key(name, whose), 'run_id'), detail)
  tell('aliases', name)
  return moved
end)
