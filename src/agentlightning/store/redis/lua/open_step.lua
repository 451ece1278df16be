-- open_step: request {run_id, step, consumed = {{rollout_id, outcome}, ...}, list = the same as JSON}; answers the step.

local function refuse_unfit(request, where)
  local listed = {}
  for _, each in ipairs(request.consumed) do
    if listed[each[1]] then return refuse('ConflictError', where .. ': a rollout is listed twice') end
    listed[each[1]] = true
  end
  for _, each in ipairs(request.consumed) do
    local id = each[1]
    local found = call('HMGET', store .. 'r:' .. id, 'run', 'mode', 'state', 'consumed_by')
    local what = where .. ': rollout ' .. id
    if not found[1] then return refuse('NotFoundError', where .. ': no such rollout: ' .. id) end
    if found[1] ~= request.run_id then return refuse('ConflictError', what .. ' belongs to run ' .. found[1]) end
    if found[2] ~= 'train' then
      return refuse('ConflictError', what .. ' is an evaluation rollout, which is never learned from')
    end
    if found[3] == 'queued' or found[3] == 'running' then
      return refuse('ConflictError', what .. ' is ' .. found[3] .. ', not finished')
    end
    if found[4] then
      return refuse('ConflictError', what .. ' was consumed by step ' .. found[4] .. ' already')
    end
  end
end

return answer_each(function(request)
  local run, step = request.run_id, request.step
  local where = 'step ' .. step .. ' of run ' .. run
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local present = read_step(run, step)
  if present and present[2] == 'open' and present[5] == request.list then return present end
  if present then
    local held = present[2] == 'closed' and 'closed' or 'open with another list of rollouts'
    return refuse('ConflictError', where .. ' is ' .. held .. ' already')
  end
  refusal = refuse_unfit(request, where)
  if refusal then return refusal end
  write_step(run, step, 'open', '', now)
  call('HSET', store .. 'consumed:' .. run, step, request.list)
  for _, each in ipairs(request.consumed) do
    call('HSET', store .. 'r:' .. each[1], 'consumed_by', step, 'outcome', each[2])
  end
  return read_step(run, step)
end)
