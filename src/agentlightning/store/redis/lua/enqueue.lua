-- enqueue: request {runs, templates = {{run, name, version}, ...}, rollouts = {{run_id, group_id, replica, ...}, ...}}, one blob each: what never changes, as JSON.
-- Nothing is written unless all of `runs` and `templates` exist, be they named by these rollouts or by the caller's other portions. Answers the time, and for each an empty text where it is new, else the rollout that exists.

local function create(new, unchanging)
  local id = new.id
  call(
    'HSET', store .. 'r:' .. id, 'run', new.run_id, 'group_id', new.group_id, 'replica', new.replica, 'mode', new.mode,
    'step', new.step, 'priority', new.priority, 'max_attempts', new.max_attempts, 'max_lost', new.max_lost,
    'retry_on', new.retry_on, 'state', 'queued', 'attempt', 0, 'lost', 0, 'created_ns', now, 'calls', 0, 'title', new.title,
    'task_key', new.task_key, 'kind', new.kind
  )
  if new.prompts then call('HSET', store .. 'r:' .. id, 'prompts', new.prompts) end
  call('SET', store .. 't:' .. id, unchanging)
  call('ZADD', state_key(new.run_id, new.mode, 'queued'), 0, id)
  call('ZADD', store .. 'queue:' .. new.run_id, -tonumber(new.priority), id)
end

return answer_each(function(request)
  local blobs = {}
  for position in ipairs(request.rollouts) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing_runs(request.runs)
  if refusal then return refusal end
  for _, named in ipairs(request.templates) do
    if not is_template(unpack(named)) then return refuse('no_template', unpack(named)) end
  end
  local found = {}
  for position, new in ipairs(request.rollouts) do
    local group = store .. 'g:' .. new.run_id .. ':' .. new.group_id
    if call('HSETNX', group, new.replica, new.id) == 1 then
      create(new, blobs[position])
      found[position] = ''
    else
      found[position] = rollout_of(call('HGET', group, new.replica))
    end
    tell('queued', new.run_id)
  end
  return { now, found }
end)
