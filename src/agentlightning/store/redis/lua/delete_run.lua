-- delete_run: request {actor, run_id, portion}: deletes some of a run; answers {was there, there is more}. The run goes last.

local FOR_EVER = '4611686018427387904' -- rings every notifier, whatever number its listener waits for

local MODES = { 'train', 'eval' }
local STATES = { 'queued', 'running', 'succeeded', 'failed', 'cancelled' }

local function delete_rollout(id, index)
  local key = store .. 'r:' .. id
  local found = call('HMGET', key, 'run', 'group_id', 'replica', 'attempt')
  for attempt = 1, tonumber(found[4]) do
    local which = id .. ':' .. attempt
    call('UNLINK', store .. 'a:' .. which, store .. 'c:' .. which, store .. 'sp:' .. which, store .. 'rw:' .. which)
  end
  drop_files(id, found[1])
  call('HDEL', store .. 'g:' .. found[1] .. ':' .. found[2], found[3])
  call('ZREM', store .. 'leases', id)
  call('ZREM', store .. 'queue:' .. found[1], id)
  call('ZREM', store .. 'finished:' .. found[1], id)
  call('ZREM', index, id)
  call('UNLINK', key, store .. 't:' .. id, store .. 'cr:' .. id)
end

local function delete_portion(run, portion)
  local left = portion
  for _, mode in ipairs(MODES) do
    for _, state in ipairs(STATES) do
      local index = state_key(run, mode, state)
      local ids = left > 0 and call('ZRANGE', index, 0, left - 1) or {}
      for _, id in ipairs(ids) do
        delete_rollout(id, index)
      end
      left = left - #ids
    end
  end
  return left < portion
end

local function delete_rest(run)
  for _, worker in ipairs(call('HKEYS', store .. 'workers:' .. run)) do
    call('UNLINK', store .. 'held:' .. run .. ':' .. worker)
  end
  for _, token in ipairs(call('SMEMBERS', store .. 'run_tokens:' .. run)) do
    call('HDEL', store .. 'token_hashes', call('HGET', store .. 'token:' .. token, 'secret_hash'))
    call('SREM', store .. 'tokens', token)
    call('UNLINK', store .. 'token:' .. token)
  end
  local created_ns = call('HGET', store .. 'run:' .. run, 'created_ns')
  call('ZREM', store .. 'runs', string.rep('0', 20 - #created_ns) .. created_ns .. ':' .. run)
  for _, what in ipairs({
    'workers', 'queue', 'finished', 'versions', 'resources', 'metrics', 'undone', 'steps', 'consumed',
    'checkpoints', 'credit', 'summary', 'run_tokens', 'files', 'run',
  }) do
    call('UNLINK', store .. what .. ':' .. run)
  end
  for _, about in ipairs({ 'queued', 'finished', 'resources', 'metrics' }) do
    tell(about, run, FOR_EVER)
  end
end

-- Marks the run's model versions as deleted; refuses where one of them is in use. They stay as entries.
local function delete_models(actor, run)
  local found, used = {}, {}
  for _, place in ipairs(call('HVALS', store .. 'run_models:' .. run)) do
    local number, name = string.match(place, '^(%d+) (.*)$')
    if call('HGET', model_key(name, number), 'deleted') ~= '1' then found[#found + 1] = { name, number } end
  end
  table.sort(found, function(one, other)
    if one[1] ~= other[1] then return one[1] < other[1] end
    return tonumber(one[2]) < tonumber(other[2])
  end)
  for _, version in ipairs(found) do
    local use = model_use(version[1], version[2])
    if use ~= '' then used[#used + 1] = version[1] .. '@' .. version[2] .. ' is ' .. use end
  end
  if #used > 0 then return refuse('run_has_models', run, table.concat(used, '; ')) end
  for _, version in ipairs(found) do
    mark_model_deleted(actor, version[1], version[2])
  end
end

return answer_each(function(request)
  local run = request.run_id
  if call('EXISTS', store .. 'run:' .. run) == 0 then return { 0, 0 } end
  if call('HEXISTS', store .. 'run:' .. run, 'deleting') == 0 then
    local refusal = delete_models(request.actor, run)
    if refusal then return refusal end
  end
  call('SREM', store .. 'active', run) -- a server without memory lets scripts write that remove something first
  if call('HSET', store .. 'run:' .. run, 'deleting', 1) == 1 then -- from now on nobody writes to it
    note(request.actor, 'delete_runs', run, run, {})
  end
  if delete_portion(run, request.portion) then return { 1, 1 } end
  delete_rest(run)
  return { 1, 0 }
end)
