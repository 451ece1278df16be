-- open_step: request {run_id, step, consumed = {{rollout_id, outcome}, ...}, list = the same with inputs, as JSON}; answers
-- the step.

local function refuse_unfit(request)
  local step, run = request.step, request.run_id
  local listed = {}
  for _, each in ipairs(request.consumed) do
    if listed[each[1]] then return refuse('listed_twice', step, run) end
    listed[each[1]] = true
  end
  for _, each in ipairs(request.consumed) do
    local id = each[1]
    local found = call('HMGET', store .. 'r:' .. id, 'run', 'mode', 'state', 'consumed_by')
    if not found[1] then return refuse('no_rollout', step, run, id) end
    if found[1] ~= run then return refuse('of_other_run', step, run, id, found[1]) end
    if found[2] ~= 'train' then return refuse('is_evaluation', step, run, id) end
    if found[3] == 'queued' or found[3] == 'running' then
      return refuse('not_finished', step, run, id, found[3])
    end
    if found[4] then return refuse('consumed', step, run, id, found[4]) end
  end
end

return answer_each(function(request)
  local run, step = request.run_id, request.step
  local refusal = refuse_missing_runs({ run })
  if refusal then return refusal end
  local present = read_step(run, step)
  if present and present[2] == 'open' and present[5] == request.list then return present end
  if present then return refuse('step_' .. present[2], step, run) end
  refusal = refuse_unfit(request)
  if refusal then return refusal end
  write_step(run, step, 'open', '', now)
  call('HSET', store .. 'consumed:' .. run, step, request.list)
  for _, each in ipairs(request.consumed) do
    call('HSET', store .. 'r:' .. each[1], 'consumed_by', step, 'outcome', each[2])
  end
  return read_step(run, step)
end)
