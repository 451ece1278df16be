-- The time, then for each run of state running: its id, how many are queued and running, when the one that was queued
-- first was made, when leases that run out soon do, and its workers. `now` is empty where the server's clock counts, `run`
-- where all runs are asked for.

local time = call('TIME')
local now = asked.now ~= '' and asked.now or time[1] .. string.format('%06d', time[2]) .. '000'
local soon_us = tonumber(string.sub(now, 1, -4)) + asked.soon_us
local expiring = {}
for _, id in ipairs(call('ZRANGEBYSCORE', store .. 'leases', '-inf', string.format('%.0f', soon_us))) do
  local run = call('HGET', store .. 'r:' .. id, 'run')
  if run then expiring[run] = (expiring[run] or 0) + 1 end
end

local function in_state(run, state)
  local train, eval = store .. 's:' .. run .. ':train:' .. state, store .. 's:' .. run .. ':eval:' .. state
  local first = {}
  for _, key in ipairs({ train, eval }) do
    first[#first + 1] = call('ZRANGE', key, 0, 0)[1]
  end
  table.sort(first)
  return call('ZCARD', train) + call('ZCARD', eval), first[1]
end

local runs
if asked.run == '' then
  runs = call('SMEMBERS', store .. 'active')
  table.sort(runs)
else
  runs = call('SISMEMBER', store .. 'active', asked.run) == 1 and { asked.run } or {}
end
local answer = { now }
for _, run in ipairs(runs) do
  local queued, first = in_state(run, 'queued')
  local created_ns = first and call('HGET', store .. 'r:' .. first, 'created_ns') or ''
  local workers = call('HVALS', store .. 'workers:' .. run)
  answer[#answer + 1] = { run, queued, created_ns, in_state(run, 'running'), expiring[run] or 0, workers }
end
return answer
