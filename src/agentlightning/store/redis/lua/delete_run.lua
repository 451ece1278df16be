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

return answer_each(function(request)
  local run = request.run_id
  if call('EXISTS', store .. 'run:' .. run) == 0 then return { 0, 0 } end
  call('SREM', store .. 'active', run) -- a server without memory lets scripts write that remove something first
  if call('HSET', store .. 'run:' .. run, 'deleting', 1) == 1 then -- from now on nobody writes to it
    note(request.actor, 'delete_runs', run, run, {})
  end
  if delete_portion(run, request.portion) then return { 1, 1 } end
  delete_rest(run)
  return { 1, 0 }
end)
