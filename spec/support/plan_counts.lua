--- spec/support/plan_counts.lua: what ranks of a run hold and send, counted by the run itself.
local core = require "weft.core"

local plan_counts = {}

-- Of each group: { calls =, bytes = } so far.
local function sent(policy)
  local list = {}
  for _, group in ipairs(policy:groups()) do
    local traffic = core.groups.get(group.type, group.world_size):traffic()
    list[("%s %d"):format(group.type, group.world_size)] = { calls = traffic.calls, bytes = traffic.bytes_sent }
  end
  return list
end

local function difference(now, before)
  local list = {}
  for name, count in pairs(now) do
    local calls, bytes = count.calls - before[name].calls, count.bytes - before[name].bytes
    if calls > 0 then list[name] = { calls = calls, bytes = bytes } end
  end
  return list
end

--- Runs on each rank: builds the model, decodes `batch` requests together, gives { weight_bytes, cache_bytes
-- (of all pages), sent = { ["tensor 4"] = { calls =, bytes = }, ... } (in the last decode step) }.
function plan_counts.rank_main(options, batch)
  local session = require("weft.session").open(options)
  local result = { weight_bytes = session.weight_bytes, cache_bytes = session.num_blocks * session.bytes_per_block,
    block_tokens = session.block_tokens, num_blocks = session.num_blocks }
  local function count(run)
    local before = sent(session.policy)
    run()
    result.sent = difference(sent(session.policy), before)
  end
  if core.rank().rank == 0 then
    local engine = require("weft.engine").new(session, options)
    for i = 1, batch do engine:submit { prompt_ids = { i, i + 1, i + 2 }, max_tokens = 4, ignore_eos = true } end
    for _ = 1, 3 do count(function() engine:step() end) end
    engine.record:build { kind = "stop" }
    engine.record:publish()
  else
    while true do
      local step = core.step_receive()
      if step.kind == "stop" then break end
      count(function() session:execute(step) end)
    end
  end
  core.groups.close()
  return result
end

--- The counts of every rank, in order.
function plan_counts.run(options, batch)
  local setup = require("weft.setup").check(options)
  return core.spawn { ranks = setup.num_ranks, fn = { module = "spec.support.plan_counts", ["function"] = "rank_main" },
    args = { options, batch } }, setup
end

return plan_counts
