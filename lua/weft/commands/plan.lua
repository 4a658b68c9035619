--- weft plan: who holds what under a plan, what moves, what a step should cost. Reads config.json,
-- starts no ranks.
local core = require "weft.core"
local errors = require "weft.errors"

local plan = {}

-- Calls check(options), which may refuse the plan; with --json also as an object.
local function checked(check, options)
  local ok, result = pcall(check, options)
  if ok then return result end
  if options.json and type(result) == "table" and result.refused then
    io.stdout:write(core.json.encode { legal = false, rule = result.refused.rule, nearest = core.json.array(result.refused.nearest) }, "\n")
  end
  error(result, 0)
end

local function write_picture(path, text)
  local ok, why = pcall(core.write_file, path, text)
  if not ok then errors.raise { message = (errors.message(why):gsub("^cannot write ", "cannot write the picture: ")), code = why.code } end
end

-- Refuses a picture in the place of a file that this command reads, or that belongs to the model.
local function check_picture(options)
  if not options.svg then return end
  if options.svg == "-" then errors.usage "--svg names a file, not standard output, which has the text" end
  local model = options.model or ""
  local reads = { options.plan or "", options.machine or "", options.script or "", model:match "%.json$" and model or model .. "/config.json" }
  for _, path in ipairs(reads) do
    if core.same_file(options.svg, path) then errors.usage(("--svg %s: this command reads that file; name another"):format(options.svg)) end
  end
  for _, ending in ipairs { "json", "lua", "safetensors", "jinja", "txt" } do
    if options.svg:match("%." .. ending .. "$") then errors.usage(("--svg %s: a picture is not named .%s; name it .svg"):format(options.svg, ending)) end
  end
end

-- Predicted price of one step, and those measured by `weft bench`, on this machine and on others.
local function priced(setup, machine, details)
  local numbers, measured = require "weft.plan_numbers", require "weft.plan.measured"
  local n = numbers.of(setup.policy, setup.cfg, { context = details.context, name = setup.name, ranks = 1 })
  local here, elsewhere, why = measured.find {
    model = measured.model_key(setup.cfg, setup.name), policy = measured.policy_key(setup.policy, setup.cfg), machine = machine.name,
    batch = details.batch, context = details.context }
  if why then io.stderr:write("weft: the measured times are left out: cannot read ", why, " (WEFT_BENCH_FILE names the file)\n") end
  return require("weft.plan.price").of(n, setup.cfg, machine, details.batch), here, elsewhere
end

local function explain(options, setup, machine)
  local text = require "weft.plan_text"
  local details = { context = options.context or setup.cfg.max_position_embeddings, batch = options.batch or 1,
    name = setup.name }
  local price, measured, elsewhere = priced(setup, machine, details)
  local numbers = require("weft.plan_numbers").of(setup.policy, setup.cfg, details)
  if options.svg then write_picture(options.svg, require("weft.plan.svg").draw(numbers, price)) end
  if options.json then
    local result = text.table(setup.policy, setup.cfg, details)
    result.price, result.measured = price, measured
    io.stdout:write(core.json.encode(result), "\n")
    return 0
  end
  if options.draw then
    io.stdout:write(require("weft.plan.draw").text(numbers, { colour = require("weft.plan.terminal").colour() }))
  else
    io.stdout:write(text.explain(setup.policy, setup.cfg, details))
  end
  local lines = require("weft.plan.price_text").lines(price, measured, elsewhere)
  if details.context > setup.cfg.max_position_embeddings then
    lines[#lines + 1] = ("  the model takes %d positions: it cannot run %d tokens of context"):format(setup.cfg.max_position_embeddings, details.context)
  end
  io.stdout:write("\n", table.concat(lines, "\n"), "\n")
  return 0
end

local function search(options, setup, machine)
  local front = require("weft.plan.front")
  local result = front.search(setup.cfg, { name = setup.name, supports = require("weft.models").supports }, machine, {
    max_ranks = options.max_ranks or 8, batch = options.batch, context = options.context or setup.cfg.max_position_embeddings,
    block_size = options.block_size })
  if options.svg then write_picture(options.svg, require("weft.plan.scatter").svg(result)) end
  if options.json then
    io.stdout:write(core.json.encode(front.table(result)), "\n")
  else
    io.stdout:write(require("weft.plan.scatter").text(result, { colour = require("weft.plan.terminal").colour() }))
  end
  return 0
end

-- Flags that belong to the search alone, or have no place in it.
local function check_flags(options)
  check_picture(options)
  if options.search and require("weft.policy").says_how(options) then
    errors.usage "--search prices every plan up to --max-ranks; leave out --search to see the plan of the other flags"
  elseif options.max_ranks and not options.search then
    errors.usage "--max-ranks is the largest number of ranks of --search; add --search, or say -tp N for one plan"
  end
end

-- options: those of the command; setup: { policy =, cfg =, name = }.
local function show(options, setup)
  local machine = require("weft.machines").get(options.machine or "h200")
  return (options.search and search or explain)(options, setup, machine)
end

--- For the prompt: the same of a model that runs (a session), under its plan of now unless flags say otherwise.
function plan.of_session(options, session)
  check_flags(options)
  options.context = options.context or math.min(session.num_blocks * session.block_tokens, session.cfg.max_position_embeddings)
  options.machine = options.machine or require("weft.plan.measured").machine(session.device)
  local policy = require("weft.policy").says_how(options) and checked(function()
    return require("weft.setup").policy(options, session.cfg, session.name)
  end, options)
  return show(options, { policy = policy or session.policy, cfg = session.cfg, name = session.name })
end

function plan.run(options)
  check_flags(options)
  options.plan_only = true -- config.json alone will do
  return show(options, checked(require("weft.setup").check, options))
end

return plan
