-- Applies transactions, each wholly or not at all. KEYS[1] begins every key, ARGV[1] is the transactions as MessagePack:
-- {request or false, seconds for which it is remembered, outcome, checks, commands, notices}. With 'read' for ARGV[2] it is
-- a list of commands, whose replies are of one moment.
--
-- A request that is remembered is not executed again: its outcome is replied. Checks are commands, each followed by the
-- reply that the transaction was computed from; where one has another now, nothing is written and the reply is 'changed'.
-- The second word of a command is its key. FINISH gives a rollout the next place in the order of its run.

local call, prefix = redis.call, KEYS[1] .. ':'
local channel = KEYS[1]

local function run(command)
  command[2] = prefix .. command[2]
  return call(unpack(command))
end

local function finish(run_id, rollout_id)
  local place = call('HINCRBY', prefix .. 'run:' .. run_id, 'finished', 1)
  call('ZADD', prefix .. 'finished:' .. run_id, place, rollout_id)
  call('HSET', prefix .. 'r:' .. rollout_id, 'place', place)
  call('PUBLISH', channel, 'finished ' .. run_id .. ' ' .. place)
end

local function apply(request, kept_s, outcome, checks, commands, notices)
  local remembered = request and call('GET', prefix .. 'request:' .. request)
  if remembered then return { 'known', remembered } end
  for _, check in ipairs(checks) do
    local expected = table.remove(check)
    if run(check) ~= expected then return { 'changed' } end
  end
  for _, command in ipairs(commands) do
    if command[1] == 'FINISH' then
      finish(command[2], command[3])
    else
      run(command)
    end
  end
  if request then call('SET', prefix .. 'request:' .. request, outcome, 'EX', kept_s) end
  for _, notice in ipairs(notices) do
    call('PUBLISH', channel, notice)
  end
  return { 'applied' }
end

local replies = {}
if ARGV[2] == 'read' then
  for position, command in ipairs(cmsgpack.unpack(ARGV[1])) do
    replies[position] = run(command)
  end
  return replies
end
for position, transaction in ipairs(cmsgpack.unpack(ARGV[1])) do
  -- Of one that fails nothing was written: a server without memory refuses its first write, and later ones are let through.
  local done, reply = pcall(apply, unpack(transaction))
  local why = not done and (type(reply) == 'table' and reply.err or tostring(reply))
  if why and string.sub(why, 1, 8) == 'READONLY' then return redis.error_reply(why) end
  replies[position] = done and reply or { 'failed', why }
end
return replies
