-- Rollouts of a portion, either `ids` or the next of `sets`, that match; first where the next portion begins, empty
-- at the end. Fields of the question that do not matter are absent.

local function as_set(values)
  if not values then return nil end
  local set = {}
  for _, value in ipairs(values) do
    set[value] = true
  end
  return set
end

local states, groups = as_set(asked.states), as_set(asked.groups)

local function matches(id)
  local found = call('HMGET', store .. 'r:' .. id, 'run', 'mode', 'state', 'step', 'outcome', 'group_id')
  return found[1]
    and (not asked.run or found[1] == asked.run)
    and (not asked.mode or found[2] == asked.mode)
    and (not states or states[found[3]])
    and (not asked.step or found[4] == asked.step)
    and (not asked.unconsumed or not found[5])
    and (not groups or groups[found[6]])
end

local ids, cursor = asked.ids, ''
if not ids then
  ids = next_ids(asked.sets, asked.from, asked.after, asked.portion, asked.newest_first)
  cursor = #ids == asked.portion and ids[#ids] or ''
end
local answer = { cursor }
for _, id in ipairs(ids) do
  if matches(id) then answer[#answer + 1] = rollout_of(id) end
end
return answer
