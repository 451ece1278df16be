-- Two-turn conversations over many keys: wrk … -s load.lua URL -- FOLDER FIRST
--
-- FOLDER holds `keys` (a line each: path, tab, API key) and the bodies `turn1` and `turn2`, in which the mark ######## stands
-- for the number of the conversation, counted from FIRST. All keys have their first turn, then all their second, then all
-- begin another conversation; with more keys than connections, a first turn is answered before its second goes out.

local heads, befores, afters = {{}, {}}, {}, {}
local count, sent, first = 0, -1, 0  -- wrk asks for one request ahead of all others and throws it away

local function text(path)
  local file = assert(io.open(path, "rb"))
  local all = file:read("*a")
  file:close()
  return all
end

function init(args)
  first = tonumber(args[2])
  for turn = 1, 2 do
    local body = text(args[1] .. "/turn" .. turn)
    local at = assert(body:find("########", 1, true))
    befores[turn], afters[turn] = body:sub(1, at - 1), body:sub(at + 8)
    count = 0
    for line in io.lines(args[1] .. "/keys") do
      local path, key = line:match("^(.-)\t(.*)$")
      count = count + 1
      heads[turn][count] = "POST " .. path .. " HTTP/1.1\r\nHost: " .. wrk.host .. ":" .. wrk.port
        .. "\r\nAuthorization: Bearer " .. key .. "\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\n\r\n"
    end
  end
end

function request()
  local round = math.floor(sent / count)
  local turn = round % 2 + 1
  local key = sent % count
  local number = first + math.floor(round / 2) * count + key
  sent = sent + 1
  return heads[turn][key + 1] .. befores[turn] .. string.format("%08d", number) .. afters[turn]
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "broken": %d, "refused": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1000,
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
