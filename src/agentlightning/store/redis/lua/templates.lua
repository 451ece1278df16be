-- Prompt templates among the resources of a run: what enqueue, claim and open_session share.

local KIND = '["prompt_template",'

local function is_template(run, name, version)
  local row = call('HGET', store .. 'resources:' .. run, version .. ' ' .. name)
  local start = row and string.find(row, ' ', 1, true)
  return start and string.sub(row, start + 1, start + #KIND) == KIND or false
end

-- The newest versions by name.
local function newest_templates(run)
  local versions, found = call('HGETALL', store .. 'versions:' .. run), {}
  for position = 1, #versions, 2 do
    local name, version = versions[position], versions[position + 1]
    if is_template(run, name, version) then found[name] = tonumber(version) end
  end
  return found
end

-- The versions that a rollout keeps: those that it names, and of other templates the newest.
local function pin_templates(key, newest)
  if not next(newest) then return end
  local pins = cjson.decode(call('HGET', key, 'prompts') or '{}')
  for name, version in pairs(newest) do
    pins[name] = pins[name] or version
  end
  call('HSET', key, 'prompts', cjson.encode(pins))
end
