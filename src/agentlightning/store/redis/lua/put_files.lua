-- put_files: requests {run_id, rollout_id or empty, {hash, ...}}, one blob each hash: files, once a run, and who uses them.

return answer_each(function(request)
  local run, rollout, blobs = request[1], request[2], {}
  for position in ipairs(request[3]) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  if rollout ~= '' and call('HGET', store .. 'r:' .. rollout, 'run') ~= run then
    return refuse('no_file_user', rollout, run)
  end
  for position, hash in ipairs(request[3]) do
    call('HSETNX', store .. 'files:' .. run, hash, blobs[position])
    if rollout ~= '' then
      call('SADD', store .. 'file_users:' .. run .. ':' .. hash, rollout)
      call('SADD', store .. 'file_uses:' .. rollout, hash)
    end
  end
  return 0
end)
