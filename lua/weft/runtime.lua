--- From options to running ranks: starts them, builds the model on each, and runs a job on rank 0 while the
-- others execute what it publishes.
local core = require "weft.core"
local Session = require "weft.session"
local setup = require "weft.setup"

local runtime = {}

-- Ranks other than 0: execute what is published until the stop record.
local function follow(session)
  local record
  while true do
    local step = core.step_receive(record)
    record = step
    if step.kind == "stop" then return end
    session:execute(step)
  end
end

--- Options of core.spawn and core.lead for a run.
local function ranks_of(options, num_ranks, name, args)
  return {
    ranks = num_ranks, fn = { module = "weft.runtime", ["function"] = name }, args = args,
    timeout = options.timeout, verbose = options.verbose, on_interrupt = options.on_interrupt,
  }
end

--- What ranks other than 0 run under a script that leads them (weft.engine).
function runtime.follow_main(options)
  local session = Session.open(options)
  follow(session)
  session:close()
  core.groups.close()
end

--- Starts the other ranks and makes this state rank 0 of a built model: for scripts and specs.
-- Returns the session and a function that ends the ranks.
function runtime.lead(options)
  local ranks = core.lead(ranks_of(options, setup.check(options).num_ranks, "follow_main", { options }))
  local session = Session.open(options)
  return session, function()
    session:release()
    core.groups.close()
    core.layer_parallel.clear()
    ranks:close()
  end
end

--- What each rank runs (called by core.spawn): build, then the job on rank 0.
function runtime.rank_main(options, module, name, argument)
  local session = Session.open(options)
  local result
  if session.rank.rank == 0 then
    local engine = require("weft.engine").new(session, options)
    result = require(module)[name](engine, options, argument)
    engine.record:build { kind = "stop" }
    engine.record:publish()
  else
    follow(session)
  end
  session:close()
  core.groups.close()
  return result
end

--- Starts the ranks and gives what the job `module.name(engine, options, argument)` returned.
function runtime.launch(options, module, name, argument)
  local results = core.spawn(ranks_of(options, setup.check(options).num_ranks, "rank_main", { options, module, name, argument }))
  return results[1]
end

return runtime
