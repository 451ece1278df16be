-- put_checkpoint: request {run_id, step, path, version, created_ns}, all text, created_ns empty for now.

return answer_each(function(request)
  local refusal = refuse_missing_runs({ request.run_id })
  if refusal then return refusal end
  if tonumber(request.step) < 0 then return refuse('negative_step', request.step, request.run_id) end
  local created_ns = request.created_ns ~= '' and request.created_ns or now
  local fields = cjson.encode({ request.path, request.version, created_ns })
  call('HSET', store .. 'checkpoints:' .. request.run_id, request.step, fields)
  return 0
end)
