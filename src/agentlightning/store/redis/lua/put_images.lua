-- put_images: requests {run_id, rollout_id, {hash, ...}}, one blob each hash: files of images, once a run, and who uses them.

return answer_each(function(request)
  local run, rollout, blobs = request[1], request[2], {}
  for position in ipairs(request[3]) do
    blobs[position] = blob()
  end
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  if call('HGET', store .. 'r:' .. rollout, 'run') ~= run then return refuse('no_image_user', rollout, run) end
  for position, hash in ipairs(request[3]) do
    call('HSETNX', store .. 'images:' .. run, hash, blobs[position])
    call('SADD', store .. 'image_users:' .. run .. ':' .. hash, rollout)
    call('SADD', store .. 'image_uses:' .. rollout, hash)
  end
  return 0
end)
