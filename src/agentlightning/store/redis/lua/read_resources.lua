-- Names and newest versions of resources of `run`, each with the newest value where it is later than `after` says; with
-- `exists`, an error where there is no such run.

if asked.exists and call('EXISTS', store .. 'run:' .. asked.run) == 0 then return no_such_run(asked.run) end
local versions = call('HGETALL', store .. 'versions:' .. asked.run)
local answer = {}
for position = 1, #versions, 2 do
  local name, version = versions[position], versions[position + 1]
  if tonumber(version) > tonumber(asked.after[name] or 0) then
    answer[#answer + 1] = { name, version, call('HGET', store .. 'resources:' .. asked.run, version .. ' ' .. name) }
  end
end
return answer
