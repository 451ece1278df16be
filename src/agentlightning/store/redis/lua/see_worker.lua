-- Workers as they are seen: what claim and heartbeat share. A worker is [host, pid, running, seen_ns] as JSON.

local function worker_seen(worker)
  local known = call('HGET', store .. 'workers:' .. worker.run_id, worker.id)
  return known and cjson.decode(known)
end

local function see(worker, host, pid)
  local seen = cjson.encode({ host, pid, worker.running, now })
  call('HSET', store .. 'workers:' .. worker.run_id, worker.id, seen)
end
