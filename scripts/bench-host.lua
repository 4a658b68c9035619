--- scripts/bench-host.lua - what a decode step costs the host beside the device: the engine's own path, a step ahead
-- as on a GPU, with a session that computes nothing. Medians of nine rounds, in microseconds.
--
--   build/weft lua scripts/bench-host.lua [MODEL [CONTEXT]]
local weft = require "weft"
local core = require "weft.core"

local model, context = (arg or {})[1] or "spec/fixtures/models/demo_llama", tonumber((arg or {})[2] or 64)
local STEPS = 150

-- The median of nine of fn's figures; the first one compiles.
local function median(fn)
  local times = {}
  for round = 0, 9 do times[round] = fn() end
  table.sort(times)
  return times[5]
end

local function timed(calls, fn)
  local began = core.now()
  for _ = 1, calls do fn() end
  return (core.now() - began) / calls * 1e6
end

print "requests   record, us   record behind another, us   whole step, us"
for _, batch in ipairs { 1, 8, 32 } do
  local engine = weft.engine { model = model, device = "cpu", max_batch = batch, cache_tokens = batch * (context + 512), ahead = true, prefix_reuse = false }
  local ids, drawn, entries = {}, {}, {}
  for k = 1, context do ids[k] = 3 + k % 90 end
  for i = 1, batch do drawn[i] = 5 end
  function engine.session.launch() end
  function engine.session.take() return drawn end
  local record, behind
  local whole = median(function()
    local requests = {}
    for i = 1, batch do requests[i] = engine:submit { prompt_ids = ids, max_tokens = 400, ignore_eos = true } end
    while #requests[batch].output_ids < 20 do engine:step() end
    local us = timed(STEPS, function() engine:step() end)
    engine:land()
    for i = 1, batch do entries[i] = { request = requests[i], count = 1 } end
    record = median(function() return timed(100, function() engine.record:build(engine:describe(entries)) end) end)
    behind = median(function() return timed(100, function() engine.spare:follow(engine.record) end) end)
    for i = 1, batch do requests[i]:cancel() end
    engine:run()
    return us
  end)
  engine.session.launch, engine.session.take = nil, nil
  print(("%8d %12.1f %27.1f %16.1f"):format(batch, record, behind, whole))
  engine:close()
end
