-- Shared by what deletes records: files go with the last rollout that uses them.

local function drop_files(rollout, run)
  for _, hash in ipairs(call('SMEMBERS', store .. 'file_uses:' .. rollout)) do
    local users = store .. 'file_users:' .. run .. ':' .. hash
    call('SREM', users, rollout)
    if call('EXISTS', users) == 0 then call('HDEL', store .. 'files:' .. run, hash) end
  end
  call('UNLINK', store .. 'file_uses:' .. rollout)
end
