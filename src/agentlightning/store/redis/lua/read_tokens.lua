-- Tokens of a run, or that of a hash, or all: of each its id, then names and values of its fields.

local ids
if asked.hash then
  ids = { call('HGET', store .. 'token_hashes', asked.hash) or nil }
elseif asked.run then
  ids = call('SMEMBERS', store .. 'run_tokens:' .. asked.run)
else
  ids = call('SMEMBERS', store .. 'tokens')
end
local answer = {}
for position, id in ipairs(ids) do
  answer[position] = { id, call('HGETALL', store .. 'token:' .. id) }
end
return answer
