-- register_model: request {name, run_id, policy, step, fixed, weights, manifest_hash, tags, notes, pinned}, numbers as text, tags
-- names and values; answers {name, number, fields, tags}.

local function next_number(name, own, step)
  local last = call('ZREVRANGE', store .. 'models:' .. name, 0, 0)[1]
  local highest = tonumber(last or 0)
  local offset = own and own.number - own.step or highest
  local number = offset + step
  if number < 0 or call('ZSCORE', store .. 'models:' .. name, string.format('%.0f', number)) then return highest + 1 end
  return number
end

-- Number and step of the last version that the run registered of this policy under this name.
local function last_own(name, run, policy)
  local flat, own = call('HGETALL', store .. 'run_models:' .. run), nil
  for position = 1, #flat, 2 do
    local step, its_policy = string.match(flat[position], '^(%d+) (.*)$')
    local number, its_name = string.match(flat[position + 1], '^(%d+) (.*)$')
    if its_policy == policy and its_name == name and (not own or tonumber(number) > own.number) then
      own = { number = tonumber(number), step = tonumber(step) }
    end
  end
  return own
end

local function put_weights(key, request)
  call('HSET', key, 'weights', request.weights, 'manifest_hash', request.manifest_hash)
end

return answer_each(function(request)
  local run, name = request.run_id, request.name
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local place = request.step .. ' ' .. request.policy
  local known = call('HGET', store .. 'run_models:' .. run, place)
  if known then
    local number, its_name = string.match(known, '^(%d+) (.*)$')
    local key = model_key(its_name, number)
    if call('HGET', key, 'deleted') == '1' then
      call('HDEL', key, 'deleted')
      call('HSET', key, 'fixed', request.fixed, 'created_ns', now)
      put_weights(key, request)
    elseif request.manifest_hash ~= '' and call('HGET', key, 'manifest_hash') == request.manifest_hash then
      put_weights(key, request)
    end
    return model_of(its_name, number)
  end
  local number = string.format('%.0f', next_number(name, last_own(name, run, request.policy), tonumber(request.step)))
  call(
    'HSET', model_key(name, number), 'run_id', run, 'policy', request.policy, 'step', request.step,
    'fixed', request.fixed, 'notes', request.notes, 'pinned', request.pinned, 'created_ns', now
  )
  put_weights(model_key(name, number), request)
  for position = 1, #request.tags, 2 do
    call('HSET', store .. 'model_tags:' .. name .. ':' .. number, request.tags[position], request.tags[position + 1])
  end
  call('SADD', store .. 'model_names', name)
  call('ZADD', store .. 'models:' .. name, number, number)
  call('HSET', store .. 'run_models:' .. run, place, number .. ' ' .. name)
  return model_of(name, number)
end)
