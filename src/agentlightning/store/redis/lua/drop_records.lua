-- drop_records: request {actor, ids}, rollouts distinct and sorted; answers how many calls are gone.

local function drop(id, attempt)
  local calls, rewards = store .. 'c:' .. id .. ':' .. attempt, store .. 'rw:' .. id .. ':' .. attempt
  local count = call('HLEN', calls)
  call('UNLINK', calls, store .. 'sp:' .. id .. ':' .. attempt)
  local known = call('HGETALL', rewards)
  for position = 1, #known, 2 do
    local reward = cjson.decode(known[position + 1])
    if reward[5] ~= '' then
      reward[5] = ''
      call('HSET', rewards, known[position], cjson.encode(reward))
    end
  end
  return count
end

return answer_each(function(request)
  local by_run = {}
  for _, id in ipairs(request.ids) do
    local found = call('HMGET', store .. 'r:' .. id, 'state', 'run')
    local state, run = found[1], found[2]
    if state == 'queued' or state == 'running' then
      return refuse('has_records_to_come', id, state)
    end
    if run then
      by_run[run] = by_run[run] or {}
      table.insert(by_run[run], id)
    end
  end
  local count = 0
  for _, id in ipairs(request.ids) do
    for attempt = 1, tonumber(call('HGET', store .. 'r:' .. id, 'attempt') or 0) do
      count = count + drop(id, attempt)
    end
    local run = call('HGET', store .. 'r:' .. id, 'run')
    if run then
      drop_files(id, run)
      call('UNLINK', store .. 'cr:' .. id)
      call('ZREM', store .. 'credit:' .. run, id)
    end
  end
  note_rollouts(request.actor, 'drop_records', by_run)
  return count
end)
