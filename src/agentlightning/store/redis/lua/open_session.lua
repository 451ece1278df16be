-- open_session: request {rollout, token, lease_ns, holder}, and one blob: what never changes of it, as JSON. Answers the group's
-- running rollout, whose lease is extended, or the new one.

local function extend(id, lease_ns)
  local expires = plus(now, lease_ns)
  call('HSET', store .. 'a:' .. id .. ':' .. call('HGET', store .. 'r:' .. id, 'attempt'), 'lease_expires_ns', expires)
  call('ZADD', store .. 'leases', microseconds(expires), id)
end

local function begin(new, replica, unchanging, request)
  local id, key = new.id, store .. 'r:' .. new.id
  call(
    'HSET', key, 'run', new.run_id, 'group_id', new.group_id, 'replica', replica, 'mode', new.mode, 'step', new.step,
    'priority', new.priority, 'max_attempts', new.max_attempts, 'max_lost', new.max_lost, 'retry_on', new.retry_on,
    'state', 'running', 'attempt', 1, 'lost', 0, 'created_ns', now, 'started_ns', now, 'calls', 0, 'title', new.title,
    'task_key', new.task_key, 'kind', new.kind
  )
  if new.prompts then call('HSET', key, 'prompts', new.prompts) end
  pin_templates(key, newest_templates(new.run_id))
  call('SET', store .. 't:' .. id, unchanging)
  call('ZADD', state_key(new.run_id, new.mode, 'running'), 0, id)
  call(
    'HSET', store .. 'a:' .. id .. ':1', 'state', 'running', 'worker_id', request.holder, 'token', request.token,
    'started_ns', now
  )
  call('SADD', store .. 'held:' .. new.run_id .. ':' .. request.holder, id)
  extend(id, request.lease_ns)
end

return answer_each(function(request)
  local new, unchanging = request.rollout, blob()
  local refusal = refuse_missing_runs({ new.run_id })
  if refusal then return refusal end
  for _, named in ipairs(request.templates) do
    if not is_template(unpack(named)) then return refuse('no_template', unpack(named)) end
  end
  local group = store .. 'g:' .. new.run_id .. ':' .. new.group_id
  local replica = call('HLEN', group) -- of sessions they are numbered without a gap
  local last = replica > 0 and call('HGET', group, replica - 1) or nil
  if last and call('HGET', store .. 'r:' .. last, 'state') == 'running' then
    extend(last, request.lease_ns)
    return rollout_of(last)
  end
  call('HSET', group, replica, new.id)
  begin(new, replica, unchanging, request)
  return rollout_of(new.id)
end)
