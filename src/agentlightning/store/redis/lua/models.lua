-- Model versions, for the scripts that change them. A version is the hash `model:NAME:NUMBER` (`fixed` is JSON that no script
-- looks into), with its tags in `model_tags:NAME:NUMBER` and its leases, holder and end, in `model_leases:NAME:NUMBER`.
-- `models:NAME` has the numbers of a name by number, `model_names` the names, `run_models:RUN` number and name by step and policy,
-- `aliases:NAME` by alias {number or '', previous or '', moved_ns}.

local function model_key(name, number)
  return store .. 'model:' .. name .. ':' .. number
end

local function model_of(name, number)
  return { name, number, call('HGETALL', model_key(name, number)), call('HGETALL', store .. 'model_tags:' .. name .. ':' .. number) }
end

local function refuse_missing_model(name, number)
  if call('EXISTS', model_key(name, number)) == 1 then return nil end
  return refuse('no_model', name .. '@' .. number)
end

local function refuse_deleted_model(name, number)
  if call('HGET', model_key(name, number), 'deleted') ~= '1' then return nil end
  return refuse('model_deleted', name .. '@' .. number)
end

local function sorted_keys(flat)
  local keys = {}
  for position = 1, #flat, 2 do
    keys[#keys + 1] = flat[position]
  end
  table.sort(keys)
  return keys
end

-- Says by what a version's weights are in use, as sentences.in_use; '' where they may be deleted.
local function model_use(name, number)
  local uses = {}
  if call('HGET', model_key(name, number), 'pinned') == '1' then uses[1] = reason('pinned') end
  local aliases = store .. 'aliases:' .. name
  for _, alias in ipairs(sorted_keys(call('HGETALL', aliases))) do
    local moved = cjson.decode(call('HGET', aliases, alias))
    if moved[1] == number then
      uses[#uses + 1] = reason('aliased', alias)
    elseif moved[1] ~= '' and moved[2] == number then
      uses[#uses + 1] = reason('aliased_before', alias)
    end
  end
  local leases = store .. 'model_leases:' .. name .. ':' .. number
  for _, holder in ipairs(sorted_keys(call('HGETALL', leases))) do
    if before(now, call('HGET', leases, holder)) then uses[#uses + 1] = reason('leased', holder) end
  end
  return table.concat(uses, ', ')
end

local function mark_model_deleted(actor, name, number)
  local key = model_key(name, number)
  call('HSET', key, 'deleted', 1)
  local known = call('HMGET', key, 'run_id', 'step')
  note_text(actor, 'delete_model', name .. '@' .. number, known[1], '{"step":' .. known[2] .. '}')
end
