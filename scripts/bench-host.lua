--- scripts/bench-host.lua - what a decode step costs the host beside the device: the engine's own path with a session
-- that computes nothing. Medians of nine rounds, in microseconds.
--
--   build/weft lua scripts/bench-host.lua [MODEL]
local weft = require "weft"
local core = require "weft.core"

local model = (arg or {})[1] or "spec/fixtures/models/demo_llama"

-- The median of the rounds' microseconds a call of fn.
local function median(calls, fn)
  local times = {}
  for round = 1, 10 do
    local began = core.now()
    for _ = 1, calls do fn() end
    times[round] = (core.now() - began) / calls * 1e6
  end
  table.remove(times, 1) -- compiles
  table.sort(times)
  return times[5]
end

print "requests   record, us   whole step, us"
for _, batch in ipairs { 1, 8, 32 } do
  local engine = weft.engine { model = model, device = "cpu", max_batch = batch, cache_tokens = 16384 }
  local requests, entries, drawn = {}, {}, {}
  for i = 1, batch do
    requests[i] = engine:submit { prompt_ids = { 1, 2, 3 }, max_tokens = 400, ignore_eos = true }
    entries[i], drawn[i] = { request = requests[i], count = 1 }, 5
  end
  for _ = 1, 20 do engine:step() end
  local record = median(500, function() engine.record:build(engine:describe(entries)) end)
  function engine.session.launch() end
  function engine.session.take() return drawn end
  local whole = median(200, function()
    engine:step()
    for i = 1, batch do -- as long as before
      local request = requests[i]
      request.computed = request.computed - 1
      request.tokens[#request.tokens], request.output_ids[#request.output_ids] = nil, nil
    end
  end)
  engine.session.launch, engine.session.take = nil, nil
  print(("%8d %12.1f %16.1f"):format(batch, record, whole))
  for _, request in ipairs(requests) do request:cancel() end
  engine:close()
end
