-- What records of attempts refer to: shared by calls, spans, rewards and finish.

local attempts_seen = {}
local function attempt_exists(rollout, attempt)
  local key = store .. 'a:' .. rollout .. ':' .. attempt
  if attempts_seen[key] == nil then attempts_seen[key] = call('EXISTS', key) == 1 end
  return attempts_seen[key]
end

-- Whether the rollout has this call, in this attempt or another.
local function call_recorded(rollout, attempt, id)
  if call('HEXISTS', store .. 'c:' .. rollout .. ':' .. attempt, id) == 1 then return true end
  for other = 1, tonumber(call('HGET', store .. 'r:' .. rollout, 'attempt') or 0) do
    if call('HEXISTS', store .. 'c:' .. rollout .. ':' .. other, id) == 1 then return true end
  end
  return false
end

-- Rows are {run_id, rollout_id, attempt, id, ...}; `named` is the position of the call that a row names, empty for none.
local function refuse_missing(what, rows, named)
  local runs = {}
  for position, row in ipairs(rows) do
    runs[position] = row[1]
  end
  local refusal = refuse_missing_runs(runs)
  if refusal then return refusal end
  for _, row in ipairs(rows) do
    if not attempt_exists(row[2], row[3]) then
      return refuse('no_attempt', what, row[2], row[3])
    end
  end
  local coming = {}
  for _, row in ipairs(rows) do
    local id = named and row[named] or ''
    if id ~= '' and coming[id] ~= row[2] and not call_recorded(row[2], row[3], id) then
      return refuse('no_call', what)
    end
    if what == 'calls' then coming[row[4]] = row[2] end
  end
  return nil
end

-- A reward is [place, created_ns, value, name, call_id, source, run_id] as JSON, all of them text but the place.
local function add_reward(run, rollout, attempt, reward)
  local key = store .. 'rw:' .. rollout .. ':' .. attempt
  local created_ns = reward.created_ns ~= '' and reward.created_ns or now
  local row = { call('HLEN', key), created_ns, reward.value, reward.name, reward.call_id, reward.source, run }
  call('HSETNX', key, reward.id, cjson.encode(row))
end
