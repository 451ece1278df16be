-- append_spans: request {{run_id, rollout_id, attempt, id, warning, started_ns, broken, refused}, ...}, one blob each. Ids that
-- exist are ignored. `warning` is what an attempt without a call is then told, empty for most; the earliest counts.
-- `broken`: counts by cause of what was wrong with spans, empty for most; they are summed. `refused`: counts by field of
-- calls that were refused; that the last call was one holds until a call is recorded.

local OUTGROWN = 'context_length_exceeded' -- as in gateway_events.py

local function warn(row)
  local key = store .. 'a:' .. row[2] .. ':' .. row[3]
  local known = call('HGET', key, 'misled_ns')
  if not known or before(row[6], known) then call('HSET', key, 'misled', row[5], 'misled_ns', row[6]) end
end

local function count_broken(row)
  local key = store .. 'a:' .. row[2] .. ':' .. row[3]
  for cause, count in pairs(row[7]) do
    call('HINCRBY', key, 'broken:' .. cause, count)
  end
end

local function count_refused(row)
  local key = store .. 'a:' .. row[2] .. ':' .. row[3]
  for field, count in pairs(row[8]) do
    call('HINCRBY', key, 'refused:' .. field, count)
    if field ~= OUTGROWN then call('HSET', key, 'last_refused', 1) end
  end
end

return answer_each(function(request)
  local blobs = {}
  for position in ipairs(request) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing('spans', request)
  if refusal then return refusal end
  for position, row in ipairs(request) do
    local new = call('HSETNX', store .. 'sp:' .. row[2] .. ':' .. row[3], row[4], blobs[position])
    if new == 1 and next(row[7]) then count_broken(row) end
    if new == 1 and next(row[8]) then count_refused(row) end
    if row[5] ~= '' then warn(row) end
  end
  return 0
end)
