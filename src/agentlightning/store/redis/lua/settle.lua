-- What is found out about an attempt that ends: its reward, its calls and what was wrong. Shared by finish, expire and
-- record_feedback.

local MAX_REASONS = 16 -- as in gateway_events.py
local NO_CALLS = 'no model call was recorded'

local function fail(ending, why)
  ending.state, ending.error = 'failed', why
end

local function rewards_in_order(rollout)
  local rewards = {}
  for position, row in ipairs(call('HVALS', store .. 'rw:' .. rollout.id .. ':' .. rollout.attempt)) do
    rewards[position] = cjson.decode(row)
  end
  table.sort(rewards, function(one, other)
    if one[2] == other[2] then return one[1] < other[1] end
    return before(one[2], other[2])
  end)
  return rewards
end

-- What counts: see `final_reward` in base.py.
local function settle_reward(rollout, ending)
  local sources, known, last, last_meant = {}, {}, nil, nil
  for _, reward in ipairs(rewards_in_order(rollout)) do
    local value, call_id, source = reward[3], reward[5], reward[6]
    if call_id == '' and source ~= 'air' and source ~= 'rescored' then
      last = value
      if source ~= 'emitted' then
        last_meant = value
        if not known[source] then
          known[source] = true
          sources[#sources + 1] = source
        end
      end
    end
  end
  if #sources > 1 then
    table.sort(sources)
    return fail(ending, reason('two_rewards', table.concat(sources, ', ')))
  end
  ending.reward = last_meant or last
end

local function look_at_calls(rollout, ending, silence)
  ending.calls = call('HLEN', store .. 'c:' .. rollout.id .. ':' .. rollout.attempt)
  if ending.calls == 0 and ending.state ~= 'lost' then
    ending.warning = call('HGET', attempt_key(rollout), 'misled') or silence
  end
end

-- See `refused_warning` in gateway_events.py.
local function look_at_refusals(rollout, ending, failed)
  local known, fields, total = call('HGETALL', attempt_key(rollout)), {}, 0
  local last = false
  for position = 1, #known, 2 do
    local field = string.match(known[position], '^refused:(.*)$')
    if field then
      fields[#fields + 1] = { field, known[position + 1] }
      total = total + tonumber(known[position + 1])
    end
    if known[position] == 'last_refused' then last = true end
  end
  if #fields == 0 then return end
  table.sort(fields, function(one, other) return one[1] < other[1] end)
  local named = {}
  for position = 1, math.min(#fields, MAX_REASONS) do
    named[position] = fields[position][1] .. ' ' .. fields[position][2]
  end
  local told = table.concat(named, ', ') .. (#fields > MAX_REASONS and ', …' or '')
  local said = reason('refused_calls', total .. (total == 1 and ' call' or ' calls'), told)
  if ending.calls == 0 and ending.state ~= 'lost' then
    ending.warning = NO_CALLS .. ': ' .. said
  else
    ending.warning = said
  end
  ending.refused = failed and last
end

-- See `broken_warning` in gateway_events.py.
local function look_at_spans(rollout, ending)
  local known, causes = call('HGETALL', attempt_key(rollout)), {}
  for position = 1, #known, 2 do
    local cause = string.match(known[position], '^broken:(.*)$')
    if cause then causes[#causes + 1] = cause .. ' ' .. known[position + 1] end
  end
  if #causes == 0 then return end
  table.sort(causes)
  local said = reason('broken_spans', table.concat(causes, ', '))
  ending.warning = ending.warning and ending.warning .. '; ' .. said or said
end

local function settle(rollout, ending, silence, failed)
  if ending.state == 'succeeded' then settle_reward(rollout, ending) end
  look_at_calls(rollout, ending, silence)
  look_at_refusals(rollout, ending, failed)
  look_at_spans(rollout, ending)
end
