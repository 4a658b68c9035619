--- weft repl: a prompt over all ranks. Rank 0 reads; all evaluate together (DESIGN 10, "REPL").
--
-- Each turn is one core.evaluate on every rank: rank 0 publishes a command record with the line, the
-- others wait for it inside, so that a failure or Ctrl-C anywhere ends the turn everywhere and the
-- prompt comes back.
local core = require "weft.core"
local errors = require "weft.errors"
local prompt = require "weft.repl.prompt"
local Session = require "weft.session"
local setup = require "weft.setup"
local json, complain = core.json, prompt.complain

local repl = {}

-- state, on every rank: rank, env (the session's table), model (session or nil), policy, script_path,
-- captured (see eval.redirect); on rank 0 also record, engine, time, converses (at a prompt), quitting, failure.

-- Rank 0: what went wrong, on one line as from other commands; at a prompt who says it is no question.
local function refuse(state, message) complain(state.converses and errors.without_own_lines(message) or "weft: " .. errors.message(message)) end

-- One turn of a rank: what rank 0 sends is done here. Gives on rank 0 what is to be shown.
local function perform(state, request)
  local shown
  if state.model and not request.restore then state.model.plan_before = nil end -- of a turn that was left
  if request.restore then
    state.model:replan(state.model.plan_before)
    shown = ""
  elseif request.command and request.leads then
    shown = state.rank == 0 and require("weft.repl.commands")[request.command].here(state, request.rest) or nil
  elseif request.command then
    shown = require("weft.repl.commands")[request.command].everywhere(state, request.rest)
  else
    shown = require("weft.repl.eval").run(state, request)
  end
  if state.model and state.model.policy ~= state.policy then
    state.policy = state.model.policy
    state.env.policy = state.policy
  end
  return shown
end

-- Rank 0: sends the request and does its own part.
local function lead(state, request)
  state.record:build { kind = "command", payload = json.encode(request) }
  state.record:publish()
  return perform(state, request)
end

local function follow(state)
  local step = core.step_receive()
  if step.kind == "stop" then
    state.stopped = true
    return
  end
  perform(state, json.decode(step.payload))
end

-- Shows the time and the memory of a turn.
local function account(state, began, before)
  if not state.time then return end
  local live = core.memory().live_bytes
  local change = live - before
  complain(("   %.1f ms, %.2f MB on rank 0%s"):format((core.now() - began) * 1000, live / 1e6,
    change ~= 0 and (" (%+.1f kB)"):format(change / 1e3) or ""))
end

-- What a failure shows. Ranks that fail alike are told of as rank 0, whichever was first; `own` is rank 0's failure.
local function failure_text(state, failure, own)
  if failure.code == "interrupted" then return "interrupted" end
  local text = failure.message:gsub("%(expression%):%d+: ", "")
  local mine = own and errors.message(own):gsub("%(expression%):%d+: ", "")
  local absent = not state.model and text:match "attempt to index global '(%l+)' %(a nil value%)"
  if absent == "model" or absent == "engine" then return "no model is loaded: start with weft repl --model DIR" end
  return mine and text:match "^rank %d+: (.*)$" == mine and "rank 0: " .. mine or text
end

-- Rank 0: sends one request to all. Gives whether it went well.
local function turn(state, request)
  local began, before, own = core.now(), core.memory().live_bytes, nil
  local ok, shown = core.evaluate(function()
    local fine, result = pcall(lead, state, request)
    if fine then return result end
    own = result
    error(result, 0)
  end)
  state.captured = nil
  if ok then
    if shown and shown ~= "" then state.write(shown) end
    io.stdout:flush()
    account(state, began, before)
    return true
  end
  io.stdout:flush()
  if state.engine then state.engine:recover() end
  if state.quitting then return true end
  local plain = request.leads and own and shown.code ~= "interrupted"
  refuse(state, plain and (type(own) == "table" and own.message or tostring(own)) or failure_text(state, shown, own))
  state.failure = shown
  return false
end

-- Rank 0: one command.
local function command(state, name, rest)
  local known = require "weft.repl.commands"
  local entry = known[name]
  if not entry then
    refuse(state, ("no command ,%s; ,help lists them"):format(name))
    return false
  end
  if entry.everywhere or entry.leads then return turn(state, { command = name, rest = rest, leads = entry.leads }) end
  local ok, shown, more = pcall(entry.here, state, rest)
  if not ok then
    refuse(state, type(shown) == "table" and shown.message or tostring(shown))
    return false
  end
  if shown then state.write(shown) end
  io.stdout:flush()
  if more then return command(state, more.name, more.rest) end
  return true
end

-- Rank 0: a turn that was left between plans (bench) gets the plan of before back.
local function restore_plan(state)
  local model = state.model
  if model and model.plan_before and model.policy ~= model.plan_before and not state.quitting then turn(state, { restore = true }) end
end

-- "2" or "*" behind the @, as a request has it; nil and a message otherwise.
local function which_ranks(text)
  if text == "*" then return "*" end
  local rank, size = tonumber(text:match "^%d+$"), core.rank().world_size
  if rank and rank < size then return rank end
  return nil, ("@ wants a rank from 0 to %d, or *, got '%s'"):format(size - 1, text)
end

-- Rank 0: one piece of input, whole.
local function act(state, piece)
  if piece.kind == "command" then return command(state, piece.name, piece.rest) end
  local ranks, message
  if piece.ranks then
    ranks, message = which_ranks(piece.ranks)
    local named = piece.text:match "^%s*(,%a*)"
    if ranks == nil then
      refuse(state, message)
      return false
    elseif named then
      refuse(state, ("commands such as %s take no @: leave out @%s"):format(named, piece.ranks))
      return false
    elseif not piece.text:match "%S" then
      refuse(state, ("@%s wants Lua to evaluate, such as @%s weft.rank()"):format(piece.ranks, piece.ranks))
      return false
    end
  end
  local chunk, syntax = require("weft.repl.read").compile(piece.text, state.env)
  if type(chunk) ~= "function" then
    refuse(state, syntax)
    return false
  end
  return turn(state, { text = piece.text, sum = require("weft.repl.eval").checksum(piece.text), ranks = ranks })
end

-- A piece at a prompt that goes on behind failures.
local function converse(state, piece)
  local fine = act(state, piece)
  if not fine then restore_plan(state) end
  return fine
end

-- Standard input as a whole, up to the first failure.
local function run_input(state)
  local input, message = io.stdin:read "*a"
  if not input then
    refuse(state, "cannot read standard input: " .. message)
    return 1
  end
  if core.interrupted() then -- while it was read
    refuse(state, "interrupted")
    return 130
  end
  for _, piece in ipairs(require("weft.repl.read").pieces(input, state.env)) do
    if not act(state, piece) then return state.failure and state.failure.code == "interrupted" and 130 or 1 end
    if state.quitting then return state.quitting end
  end
  return 0
end

-- The ranks, and the model when there is one.
local function build(options)
  local state = { rank = core.rank().rank, write = function(text) io.stdout:write(text) end }
  if options.model then
    options.reuse = require("weft.reuse").new()
    require "weft.live"
    state.model = Session.open(options)
    options.reuse = nil -- the session has it, until a plan replaces it
    state.model.options = options
    state.model.reuse:keep()
    state.script_path = options.script
    if state.rank == 0 then
      state.engine = require("weft.engine").new(state.model, options)
      state.model.engine = state.engine
    end
  else
    local policies = require "weft.policy"
    local policy = policies.of_ranks(options, 0)
    core.groups.create_all(policy:groups())
    core.layer_parallel.init(policies.lowered(policy, state.rank))
    state.policy = policy
  end
  state.policy = state.policy or state.model.policy
  state.env = require("weft.repl.session").environment(state, state.model)
  require("weft.repl.eval").redirect(state)
  return state
end

-- Without a model the script is plain Lua, run by all ranks before the prompt.
local function run_script(state, options)
  if options.model or not options.script then return true end
  return act(state, { kind = "command", name = "reload", rest = options.script })
end

--- What each rank runs.
function repl.rank_main(options)
  local state = build(options)
  if state.rank ~= 0 then
    while not state.stopped do core.evaluate(follow, state) end
    if state.model then state.model:close() end
    core.groups.close()
    return 0
  end
  state.record = core.step()
  state.converses = options.interactive or core.isatty(0)
  local code = 1
  if run_script(state, options) then
    code = state.converses and prompt.converse(state, converse) or run_input(state)
  end
  local told, failure, left
  repeat -- a Ctrl-C since the last turn, or now, is not for this one: the others would wait for the stop for ever
    told, failure = core.evaluate(function()
      state.record:build { kind = "stop" }
      state.record:publish()
    end)
    left = left or not told and failure.code == "interrupted"
  until told or failure.code ~= "interrupted"
  if left and code == 0 and not state.converses then
    refuse(state, "interrupted")
    code = 130
  end
  if state.model then state.model:close() end
  core.groups.close()
  return code
end

function repl.run(options)
  options.cache_tokens = options.cache_tokens or 8192
  local ranks
  if options.model then
    ranks = setup.check(options).num_ranks
  else
    local policies = require "weft.policy"
    local ok, policy = pcall(policies.from_options, options)
    if not ok then policies.refuse(policy) end
    ranks = policy.num_ranks
  end
  local results = core.spawn { ranks = ranks, fn = { module = "weft.commands.repl", ["function"] = "rank_main" }, args = { options },
    timeout = options.timeout, verbose = options.verbose, on_interrupt = "evaluate" }
  return results[1]
end

return repl
