-- Of the next portion of rollouts in `sets`: where the next begins (empty at the end), how many rollouts, calls and spans,
-- and the bytes of them all.

local bytes = 0

local function size_of(key)
  local ids = call('HKEYS', key)
  for _, id in ipairs(ids) do
    bytes = bytes + #id + call('HSTRLEN', key, id)
  end
  return #ids
end

local ids = next_ids(asked.sets, asked.from, '', asked.portion, false)
if asked.from == '' then size_of(store .. 'files:' .. asked.run) end
local calls, spans = 0, 0
for _, id in ipairs(ids) do
  size_of(store .. 'r:' .. id)
  size_of(store .. 'cr:' .. id)
  bytes = bytes + call('STRLEN', store .. 't:' .. id)
  for attempt = 1, tonumber(call('HGET', store .. 'r:' .. id, 'attempt') or 0) do
    calls = calls + size_of(store .. 'c:' .. id .. ':' .. attempt)
    spans = spans + size_of(store .. 'sp:' .. id .. ':' .. attempt)
  end
end
return { #ids == asked.portion and ids[#ids] or '', #ids, calls, spans, string.format('%.0f', bytes) }
