-- claim: request {worker, limit, lease_ns, token}; answers {{rollout, token}, ...}.
-- Each lease has a token of its own, made from the random one of the request.

local function give_up_predecessor(worker)
  local seen = worker_seen(worker)
  if not seen or seen[1] ~= worker.host or seen[2] == worker.pid then return end
  local held = call('SMEMBERS', store .. 'held:' .. worker.run_id .. ':' .. worker.id)
  table.sort(held)
  for _, id in ipairs(held) do
    end_rollout(rollout_to_end(id), { state = 'lost', error = reason('restarted_worker', worker.id) })
  end
end

local function start(id, request, token, newest)
  local worker, key = request.worker, store .. 'r:' .. id
  local expires = plus(now, request.lease_ns)
  local attempt = call('HINCRBY', key, 'attempt', 1)
  if attempt == 1 then pin_templates(key, newest) end
  call('HSET', key, 'state', 'running')
  call('HSETNX', key, 'started_ns', now)
  local mode = call('HGET', key, 'mode')
  call('ZREM', state_key(worker.run_id, mode, 'queued'), id)
  call('ZADD', state_key(worker.run_id, mode, 'running'), 0, id)
  call(
    'HSET', store .. 'a:' .. id .. ':' .. attempt, 'state', 'running', 'worker_id', worker.id, 'token', token,
    'lease_expires_ns', expires, 'started_ns', now
  )
  call('ZADD', store .. 'leases', microseconds(expires), id)
  call('SADD', store .. 'held:' .. worker.run_id .. ':' .. worker.id, id)
  return { rollout_of(id), token }
end

return answer_each(function(request)
  local worker = request.worker
  local refusal = refuse_missing_runs({ worker.run_id })
  if refusal then return refusal end
  give_up_predecessor(worker)
  see(worker, worker.host, worker.pid)
  local taken = {}
  local queued = call('ZPOPMIN', store .. 'queue:' .. worker.run_id, request.limit)
  local newest = #queued > 0 and newest_templates(worker.run_id) or {}
  for position = 1, #queued, 2 do
    taken[#taken + 1] = start(queued[position], request, request.token .. string.format('%x', #taken), newest)
  end
  return taken
end)
