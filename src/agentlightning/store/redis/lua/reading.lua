-- How every reading script begins. KEYS[1] is the hash tag of the store; ARGV[1] the question as JSON. The answer is
-- in the server's own words, since what is stored is bytes.

local call = redis.call
local store = KEYS[1] .. ':'
local asked = cjson.decode(ARGV[1])

local function rollout_of(id)
  local row = call('HGETALL', store .. 'r:' .. id)
  table.insert(row, 1, call('GET', store .. 't:' .. id))
  table.insert(row, 1, id)
  return row
end

local function no_such_run(run)
  return redis.error_reply('NOSUCHRUN ' .. run)
end

-- The next ids in any of the sets, in order, after `from`; empty for the beginning.
local function next_ids(sets, from, after, limit, newest_first)
  local found = {}
  for _, set in ipairs(sets) do
    local low, high = after ~= '' and '(' .. after or '-', '+'
    local ids
    if newest_first then
      high = from ~= '' and '(' .. from or high
      ids = call('ZREVRANGEBYLEX', store .. set, high, low, 'LIMIT', 0, limit)
    else
      low = from ~= '' and '(' .. from or low
      ids = call('ZRANGEBYLEX', store .. set, low, high, 'LIMIT', 0, limit)
    end
    for _, id in ipairs(ids) do
      found[#found + 1] = id
    end
  end
  if newest_first then
    table.sort(found, function(one, other) return one > other end)
  else
    table.sort(found)
  end
  for position = #found, limit + 1, -1 do
    found[position] = nil
  end
  return found
end
