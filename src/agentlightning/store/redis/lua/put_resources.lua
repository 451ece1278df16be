-- put_resources: request {actor, rows = {{run_id, name, created_ns, kind if it is audited else '', what the log notes beside
-- kind and version}, ...}, after = {name = the version, as text, that must be the newest}}, one blob each; answers
-- {{version, created_ns}, ...}.

return answer_each(function(request)
  local runs, blobs, stored = {}, {}, {}
  for position, row in ipairs(request.rows) do
    runs[position] = row[1]
    blobs[position] = blob()
  end
  local refusal = refuse_missing_runs(runs)
  if refusal then return refusal end
  for _, row in ipairs(request.rows) do
    local expected = request.after[row[2]]
    if expected then
      local newest = call('HGET', store .. 'versions:' .. row[1], row[2]) or '0'
      if newest ~= expected then return refuse('resource_changed', row[2], row[1], newest, expected) end
    end
  end
  for position, row in ipairs(request.rows) do
    local run, name = row[1], row[2]
    local created_ns = row[3] ~= '' and row[3] or now
    local version = call('HINCRBY', store .. 'versions:' .. run, name, 1)
    call('HSET', store .. 'resources:' .. run, version .. ' ' .. name, created_ns .. ' ' .. blobs[position])
    stored[position] = { version, created_ns }
    tell('resources', run)
    if row[4] ~= '' then
      local detail = cjson.decode(row[5])
      detail.kind, detail.version = row[4], version
      note(request.actor, 'put_resources', name, run, detail)
    end
  end
  return stored
end)
