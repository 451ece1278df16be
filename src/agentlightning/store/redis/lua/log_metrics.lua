-- log_metrics: request {{run_id, step, name, value, created_ns, abandoned}, ...}, all text; created_ns empty for now.
-- Each gets the next number of all metrics, which is its place in its run's stream.

return answer_each(function(request)
  local runs = {}
  for position, row in ipairs(request) do
    runs[position] = row[1]
  end
  local refusal = refuse_missing_runs(runs)
  if refusal then return refusal end
  for _, row in ipairs(request) do
    local seq = call('INCR', store .. 'metric_seq')
    call(
      'XADD', store .. 'metrics:' .. row[1], seq .. '-0', 'step', row[2], 'name', row[3], 'value', row[4],
      'created_ns', row[5] ~= '' and row[5] or now, 'abandoned', row[6]
    )
    tell('metrics', row[1])
  end
  return 0
end)
