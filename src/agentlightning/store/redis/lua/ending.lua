-- How attempts end: what claim, finish, cancel and expire share.

local function rollout_to_end(id)
  local found = call(
    'HMGET', store .. 'r:' .. id, 'run', 'mode', 'state', 'attempt', 'lost', 'priority', 'max_attempts', 'max_lost',
    'retry_on', 'kind'
  )
  if not found[1] then return nil end
  return {
    id = id,
    run = found[1],
    mode = found[2],
    state = found[3],
    attempt = tonumber(found[4]),
    lost = tonumber(found[5]),
    priority = tonumber(found[6]),
    max_attempts = tonumber(found[7]),
    max_lost = tonumber(found[8]),
    retry_on = found[9],
    is_session = found[10] == 'session',
  }
end

local function attempt_key(rollout)
  return store .. 'a:' .. rollout.id .. ':' .. rollout.attempt
end

-- Every attempt that ended and was not lost used one of max_attempts.
local function next_state(rollout, how, refused)
  if refused then return 'failed' end -- the same program would be refused again
  if how == 'succeeded' then return 'succeeded' end
  if how == 'lost' then return rollout.lost + 1 < rollout.max_lost and 'queued' or 'failed' end
  local again = string.find(rollout.retry_on, ' ' .. how .. ' ', 1, true)
  return again and rollout.attempt - rollout.lost < rollout.max_attempts and 'queued' or 'failed'
end

local function end_attempt(rollout, ending, error)
  local attempt = attempt_key(rollout)
  call('HSET', attempt, 'state', ending.state, 'finished_ns', now)
  put(attempt, 'error', error)
  put(attempt, 'output', ending.output)
  call('ZREM', store .. 'leases', rollout.id)
  call('SREM', store .. 'held:' .. rollout.run .. ':' .. call('HGET', attempt, 'worker_id'), rollout.id)
end

-- `ending`: state of the attempt, and where known error, output, reward, calls, warning, refused. A rollout that is then finished
-- gets its place in the order of its run.
local function end_rollout(rollout, ending, cancelled)
  local key = store .. 'r:' .. rollout.id
  local state = cancelled and 'cancelled' or next_state(rollout, ending.state, ending.refused)
  local error = ending.state ~= 'succeeded' and ending.error or nil
  if rollout.state == 'running' then
    end_attempt(rollout, ending, error)
    if ending.state == 'lost' then call('HINCRBY', key, 'lost', 1) end
  else
    call('ZREM', store .. 'queue:' .. rollout.run, rollout.id)
  end
  if state == 'queued' then
    call('ZADD', store .. 'queue:' .. rollout.run, -rollout.priority, rollout.id)
    tell('queued', rollout.run)
  else
    local place = call('HINCRBY', store .. 'run:' .. rollout.run, 'finished', 1)
    call('ZADD', store .. 'finished:' .. rollout.run, place, rollout.id)
    call('HSET', key, 'finished_ns', now, 'finished_seq', place)
    tell('finished', rollout.run, place)
  end
  call('ZREM', state_key(rollout.run, rollout.mode, rollout.state), rollout.id)
  call('ZADD', state_key(rollout.run, rollout.mode, state), 0, rollout.id)
  call('HSET', key, 'state', state, 'calls', ending.calls or 0)
  put(key, 'reward', ending.reward)
  put(key, 'error', error)
  put(key, 'warning', ending.warning)
  put(key, 'refused', ending.refused and 1 or nil)
end

-- The rollout of a lease, where it is the running attempt's; else nil.
local function rollout_held_by(lease)
  local rollout = rollout_to_end(lease.rollout_id)
  if not rollout or rollout.state ~= 'running' or rollout.attempt ~= lease.attempt then return nil end
  if call('HGET', attempt_key(rollout), 'token') ~= lease.token then return nil end
  return rollout
end
