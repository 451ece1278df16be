-- expire: requests {until_ns, silence}, '' for no limit; answers how many leases had run out, to the first who asks, or 0
-- where it is later than that. `silence` is the warning of a session without a call.

-- Ends every attempt whose lease has run out, as lost unless it is a session; how many.
local function end_overdue(silence)
  local count = 0
  for _, id in ipairs(call('ZRANGEBYSCORE', store .. 'leases', '-inf', microseconds(now))) do
    local rollout = rollout_to_end(id)
    local lease = call('HMGET', attempt_key(rollout), 'lease_expires_ns', 'worker_id')
    if not before(now, lease[1]) then
      local ending = { state = 'lost', error = reason('silent_worker', lease[2]) }
      if rollout.is_session then
        ending = { state = 'succeeded' }
        settle(rollout, ending, silence, false)
      end
      end_rollout(rollout, ending)
      count = count + 1
    end
  end
  return count
end

return answer_each(function(request)
  if request.until_ns ~= '' and before(request.until_ns, now) then return 0 end
  return end_overdue(request.silence)
end)
