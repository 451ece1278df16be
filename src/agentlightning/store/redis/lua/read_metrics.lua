-- At most `limit` metrics of `run` after number `after`, then what was undone; an error where there is no such run and
-- `exists` says that it matters, and the number of the last that was looked at. Of those, `names` and `after_step` leave
-- some out.

if asked.exists and call('EXISTS', store .. 'run:' .. asked.run) == 0 then return no_such_run(asked.run) end
local entries = call('XRANGE', store .. 'metrics:' .. asked.run, '(' .. asked.after .. '-0', '+', 'COUNT', asked.limit)
local last = #entries > 0 and entries[#entries][1] or ''
if asked.names or asked.after_step then
  local named, chosen = {}, {}
  for _, name in ipairs(asked.names or {}) do
    named[name] = true
  end
  for _, entry in ipairs(entries) do
    local of = {}
    for place = 1, #entry[2], 2 do
      of[entry[2][place]] = entry[2][place + 1]
    end
    local later = not asked.after_step or tonumber(of.step) > asked.after_step
    if later and (not asked.names or named[of.name]) then chosen[#chosen + 1] = entry end
  end
  entries = chosen
end
return { entries, call('LRANGE', store .. 'undone:' .. asked.run, 0, -1), last }
