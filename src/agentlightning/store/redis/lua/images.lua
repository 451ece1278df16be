-- Shared by what deletes records: images go with the last rollout that uses them.

local function drop_images(rollout, run)
  for _, hash in ipairs(call('SMEMBERS', store .. 'image_uses:' .. rollout)) do
    local users = store .. 'image_users:' .. run .. ':' .. hash
    call('SREM', users, rollout)
    if call('EXISTS', users) == 0 then call('HDEL', store .. 'images:' .. run, hash) end
  end
  call('UNLINK', store .. 'image_uses:' .. rollout)
end
