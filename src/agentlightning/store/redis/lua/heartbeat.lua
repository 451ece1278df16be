-- heartbeat: request {worker, leases, lease_ns}; answers 1 for each lease that is held, else 0.

return answer_each(function(request)
  local worker = request.worker
  local refusal = refuse_missing_runs({ worker.run_id })
  if refusal then return refusal end
  local seen = worker_seen(worker) or { worker.host, worker.pid }
  see(worker, seen[1], seen[2]) -- only a claim says who it is, so that a beat never hides a predecessor from it
  local expires = plus(now, request.lease_ns)
  local held = {}
  for position, lease in ipairs(request.leases) do
    local rollout = rollout_held_by(lease)
    held[position] = rollout and 1 or 0
    if rollout then
      call('HSET', attempt_key(rollout), 'lease_expires_ns', expires)
      call('ZADD', store .. 'leases', microseconds(expires), rollout.id)
    end
  end
  return held
end)
