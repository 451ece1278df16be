-- For each attempt of `ids`: rollout, number, ids and blobs of its records of a `kind` (c, sp, rw).
-- `attempt`: a number, or latest, or all.

local answer = {}
for _, id in ipairs(asked.ids) do
  local last = tonumber(call('HGET', store .. 'r:' .. id, 'attempt') or 0)
  local first = 1
  if asked.attempt == 'latest' then
    first = last
  elseif asked.attempt ~= 'all' then
    first, last = asked.attempt, math.min(last, asked.attempt)
  end
  for attempt = math.max(first, 1), last do
    local records = call('HGETALL', store .. asked.kind .. ':' .. id .. ':' .. attempt)
    if #records > 0 then answer[#answer + 1] = { id, attempt, records } end
  end
end
return answer
