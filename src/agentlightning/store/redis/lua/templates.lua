-- Prompt templates among the resources of a run: what enqueue and claim share.

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
