-- Steps as they are kept, and going back to a checkpoint: what the scripts of steps share.
-- A step is [state, version, created_ns] as JSON, all text; its list of rollouts stands beside it, as it came.

local function read_step(run, step)
  local known = call('HGET', store .. 'steps:' .. run, step)
  if not known then return nil end
  local fields = cjson.decode(known)
  return { step, fields[1], fields[2], fields[3], call('HGET', store .. 'consumed:' .. run, step) }
end

local function write_step(run, step, state, version, created_ns)
  call('HSET', store .. 'steps:' .. run, step, cjson.encode({ state, version, created_ns }))
end

-- Numbers of the steps after this one, in order.
local function steps_after(run, after)
  local later = {}
  for _, step in ipairs(call('HKEYS', store .. 'steps:' .. run)) do
    if tonumber(step) > after then later[#later + 1] = step end
  end
  table.sort(later, function(one, other) return tonumber(one) < tonumber(other) end)
  return later
end

-- Metrics of later steps that were taken in until now are abandoned: an entry says so for all of them.
local function abandon_metrics(run, after)
  local entry = after .. ' ' .. (call('GET', store .. 'metric_seq') or 0)
  if call('LINDEX', store .. 'undone:' .. run, -1) ~= entry then call('RPUSH', store .. 'undone:' .. run, entry) end
end
