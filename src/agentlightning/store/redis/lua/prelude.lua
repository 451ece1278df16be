-- How every writing script begins: who asks, what time it is, what is remembered, and how it answers.
--
-- KEYS[1] is the hash tag of the store, with which every key begins.
-- ARGV: lane, number, now, requests, blobs. A lane is one client's calls of one method, one at a time, numbered upwards:
-- a call that is sent again, since its answer was lost, gets the answer that is remembered, and one that was overtaken is
-- refused. `now` is empty where the server's clock counts. Requests are a JSON list, one a caller; so is the answer.
--
-- Times are decimal text, since Lua's numbers hold 53 bits and nanoseconds need 61. Nothing is written before a request is
-- known to be good: what a script has written when it fails stays.

local call = redis.call
local store = KEYS[1] .. ':'
local lane = store .. 'lane:' .. ARGV[1]
local number = ARGV[2]
local now = ARGV[3]

local remembered = call('HMGET', lane, 'number', 'answer')
if remembered[1] == number then return remembered[2] end
if remembered[1] and tonumber(remembered[1]) > tonumber(number) then
  return redis.error_reply('OVERTAKEN this request was given up by its sender')
end
if now == '' then
  local time = call('TIME')
  now = time[1] .. string.format('%06d', time[2]) .. '000'
end

local next_blob = 4
local function blob()
  next_blob = next_blob + 1
  return ARGV[next_blob]
end

local news = {}
local function tell(about, run, value)
  news[about .. ' ' .. run] = value or 0
end

-- A refusal and a reason are sentences of sentences.py: by code, with what they are about.
local function refuse(code, ...)
  return { refused = code, about = { ... } }
end

local function reason(code, ...)
  local about = { ... }
  return (string.gsub(REASONS[code], '{(%d)}', function(place) return tostring(about[place + 1]) end))
end

local function plus(ns, more_ns)
  local low = tonumber(string.sub(ns, -9)) + tonumber(string.sub('000000000' .. more_ns, -9))
  local high = (tonumber(string.sub(ns, 1, -10)) or 0) + (tonumber(string.sub(more_ns, 1, -10)) or 0)
  if low >= 1e9 then
    low, high = low - 1e9, high + 1
  end
  return string.format('%.0f%09.0f', high, low)
end

local function before(ns, other_ns)
  if #ns ~= #other_ns then return #ns < #other_ns end
  return ns < other_ns
end

local function microseconds(ns)
  return string.sub(ns, 1, -4)
end

local function put(key, field, value)
  if value then
    call('HSET', key, field, value)
  else
    call('HDEL', key, field)
  end
end

local runs_seen = {}
local function run_exists(run)
  if runs_seen[run] == nil then
    local found = call('HMGET', store .. 'run:' .. run, 'created_ns', 'deleting')
    runs_seen[run] = found[1] and not found[2] and true or false
  end
  return runs_seen[run]
end

local function refuse_missing_runs(runs)
  local missing, listed = {}, {}
  for _, run in ipairs(runs) do
    if not run_exists(run) and not listed[run] then
      listed[run] = true
      missing[#missing + 1] = run
    end
  end
  if #missing == 0 then return nil end
  table.sort(missing)
  return refuse('no_run', table.concat(missing, ', '))
end

-- A rollout as it is read: its id, what never changes of it as JSON, then names and values of its fields.
local function rollout_of(id)
  local row = call('HGETALL', store .. 'r:' .. id)
  table.insert(row, 1, call('GET', store .. 't:' .. id))
  table.insert(row, 1, id)
  return row
end

-- An entry of the audit log, in the script of the act. The detail is JSON, or (note) a table; the log is only ever added to.
local function note_text(actor, action, subject, run, detail)
  call('RPUSH', store .. 'audit', cjson.encode({ now, actor, action, subject, run or '', detail }))
end

local function note(actor, action, subject, run, detail)
  note_text(actor, action, subject, run, cjson.encode(detail))
end

-- The same for rollouts, by run: {run = {ids}}.
local MAX_IDS_NAMED = 20
local function note_rollouts(actor, action, by_run)
  local runs = {}
  for run in pairs(by_run) do
    runs[#runs + 1] = run
  end
  table.sort(runs)
  for _, run in ipairs(runs) do
    local ids = by_run[run]
    note(actor, action, run, run, { rollouts = #ids, ids = { unpack(ids, 1, math.min(#ids, MAX_IDS_NAMED)) } })
  end
end

local function state_key(run, mode, state)
  return store .. 's:' .. run .. ':' .. mode .. ':' .. state
end

local function answer_each(verb)
  local answers = {}
  for position, request in ipairs(cjson.decode(ARGV[4])) do
    answers[position] = verb(request)
  end
  for topic, value in pairs(news) do
    call('PUBLISH', KEYS[1], topic .. ' ' .. value)
  end
  local answer = cjson.encode(answers)
  call('HSET', lane, 'number', number, 'answer', answer)
  call('EXPIRE', lane, 3600)
  return answer
end
