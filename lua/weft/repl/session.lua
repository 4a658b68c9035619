--- What a session at the prompt has at hand: weft, model, engine, policy, generate, bench, quit.
local core = require "weft.core"
local agree = require "weft.agree"

local session = {}

local streamed = { __tostring = function(r)
  return ("-- %d tokens, %s, %.1f tok/s"):format(#r.output_ids, r.finish_reason, r.tok_per_s)
end }

local function no_model() error("no model is loaded: start with weft repl --model DIR", 3) end

-- The job of generate on rank 0.
local function generate(engine, params)
  local given, request = {}, nil
  for key, value in pairs(params) do given[key] = value end
  given.stream = nil
  local streams = params.stream ~= false and not params.on_token
  if streams then
    given.on_token = function(_, id, text)
      io.stdout:write(engine.tokenizer and text or id .. " ")
      io.stdout:flush()
    end
  end
  local began = core.now()
  local ok, err = pcall(function()
    request = engine:submit(given)
    while request.state ~= "finished" do engine:step() end
  end)
  if streams and request and #request.output_ids > 0 then
    io.stdout:write "\n"
    io.stdout:flush()
  end
  if not ok then
    if request then request:cancel() end
    error(err, 0)
  end
  return { text = request.text, output_ids = request.output_ids, finish_reason = request.finish_reason,
    tok_per_s = #request.output_ids / (core.now() - began) }
end

local function with_text(result) return setmetatable(result, streamed) end

-- The job of bench on rank 0, for the plan of now.
local function measure(engine, options)
  return require("weft.commands.bench").measure(engine, options)
end

local function mega(bytes) return ("%.2f MB"):format(bytes / 1e6) end

-- What bench shows of each row.
local shown = {
  { "prefill ms", function(row) return ("%.2f"):format(row.prefill.ms) end },
  { "decode ms a step", function(row) return ("%.3f"):format(row.decode.ms) end },
  { "predicted ms a step", function(row) return row.predicted_ms and ("%.3f"):format(row.predicted_ms) or "-" end },
  { "decode tok/s", function(row) return ("%.1f"):format(row.decode.tok_per_s) end },
  { "weights, rank 0", function(row) return mega(row.weight_bytes) end },
  { "cache a token, rank 0", function(row) return ("%.0f B"):format(row.cache_bytes_per_token) end },
  { "exchange kB a step, rank 0", function(row) return ("%.2f"):format(row.exchange_bytes / 1e3) end },
}

-- The rows of bench as numbered columns that line up, under their policies.
local function comparison(rows)
  local text, lines, widths = {}, { { "" } }, {}
  for i, row in ipairs(rows) do
    text[i] = ("%d: %s"):format(i, row.policy)
    lines[1][i + 1] = tostring(i)
    for k, what in ipairs(shown) do
      lines[k + 1] = lines[k + 1] or { what[1] }
      lines[k + 1][i + 1] = what[2](row)
    end
  end
  for _, line in ipairs(lines) do
    for c, cell in ipairs(line) do widths[c] = math.max(widths[c] or 0, #cell) end
  end
  for _, line in ipairs(lines) do
    for c, cell in ipairs(line) do line[c] = c == 1 and cell .. (" "):rep(widths[1] - #cell) or (" "):rep(widths[c] - #cell) .. cell end
    text[#text + 1] = table.concat(line, "   ")
  end
  return table.concat(text, "\n")
end

local compared = { __tostring = function(rows) return comparison(rows) end }

local function generate_on_all(model, params)
  if type(params) == "string" then params = { prompt = params } end
  if type(params) ~= "table" then error("generate needs a text or a table of parameters, got " .. type(params), 3) end
  return with_text(model:lead(generate, params))
end

local bench_numbers = { batch = 1, context = 128, steps = 16, prefill = false } -- with what they are when left out

local function bench_options(options)
  if type(options) ~= "table" then error("bench needs a table such as { { tensor = 4 }, batch = 8 }, got " .. type(options), 0) end
  local measured, text = { at_prompt = true }, {}
  for key, value in pairs(options) do
    if type(key) ~= "number" and bench_numbers[key] == nil then
      error(("bench has no option '%s'; it knows batch, context, prefill and steps"):format(tostring(key)), 0)
    elseif type(key) ~= "number" and (type(value) ~= "number" or value < 1 or value % 1 ~= 0) then
      error(("%s is a whole number from 1, got %s"):format(key, tostring(value)), 0)
    end
  end
  for name, otherwise in pairs(bench_numbers) do measured[name] = options[name] or otherwise end
  measured.prefill = measured.prefill or measured.context
  for _, name in ipairs { "batch", "context", "prefill", "steps" } do text[#text + 1] = ("%s = %d"):format(name, measured[name]) end
  return measured, table.concat(text, ", ")
end

-- What weft plan says of a step of these numbers on this machine, in ms; nil where it knows no such machine.
local function predicted(model, options)
  local machines, name = require "weft.machines", require("weft.plan.measured").machine(model.device)
  if not machines.has(name) then return nil end
  local n = require("weft.plan_numbers").of(model.policy, model.cfg, { context = options.context, name = model.name, ranks = 1 })
  return require("weft.plan.price").of(n, model.cfg, machines.get(name), options.batch).ms
end

-- The cache of a plan as far as it is known before the plan is built.
local function cache_of(policy, options)
  if options.kv_cache_bytes or options.gpu_memory_utilization then return false end
  local tokens = policy.block_size * policy.context_lcm
  return { block_tokens = tokens, num_blocks = math.ceil(options.cache_tokens / tokens) }
end

-- Rank 0: see bench.check.
local function check(engine, measured, caches) require("weft.commands.bench").check(engine, measured, caches) end

local function bench_on_all(model, options)
  options = options or {}
  local measured = agree.on("measurement", function() return bench_options(options) end)
  local before, rows, plans, caches = model.policy, {}, model:plans(options), {}
  for i, policy in ipairs(plans) do caches[i] = cache_of(policy, model.options) end
  model:lead(check, measured, #plans > 0 and caches or { cache_of(before, model.options) })
  model.plan_before = before -- behind Ctrl-C ranks cannot replan before they have settled: the prompt does it
  local function one(policy)
    if policy then model:replan(policy) end
    local row = model:lead(measure, measured)
    row.policy, row.predicted_ms = tostring(model.policy), predicted(model, measured)
    rows[#rows + 1] = row
  end
  local ok, err = pcall(function()
    for _, policy in ipairs(plans) do one(policy) end
    if #plans == 0 then one() end
  end)
  if model.policy ~= before then model:replan(before) end
  model.plan_before = nil
  if not ok then error(err, 0) end
  return setmetatable(rows, compared)
end

-- `engine` on every rank: rank 0 has the engine, the others execute its steps.
local function engine_of(model)
  local facade = {}
  --- engine:submit(params): adds a request (rank 0 schedules; the handle of other ranks is empty).
  function facade.submit(_, params)
    if model.rank.rank == 0 then return model.engine:submit(params) end
    return {}
  end
  --- engine:run(): steps until nothing is left to do.
  function facade.run() model:lead(function(engine) engine:run() end) end
  --- engine:step(): one step; false when there is nothing to do.
  function facade.step() return model:lead(function(engine) return engine:step() end) end
  return setmetatable(facade, { __index = model.engine, __tostring = function() return "engine of " .. tostring(model) end })
end

--- The table that typed chunks see. model: the built session, or nil.
function session.environment(state, model)
  local weft = require "weft"
  for _, name in ipairs { "nn", "model", "models", "engine", "config" } do local _ = weft[name] end -- loaded, so that they complete
  local env = setmetatable({}, { __index = _G })
  env.weft = weft
  env.model = model
  env.engine = model and engine_of(model)
  env.policy = model and model.policy or state.policy
  --- generate "text" or generate { prompt =, prompt_ids =, max_tokens =, temperature =, ... }: continues a
  -- text and streams it. Parameters are those of a request (request.lua); stream = false is silent; on_token, called on rank 0, takes the
  -- place of streaming. Gives
  -- { text =, output_ids =, finish_reason =, tok_per_s = } on every rank.
  function env.generate(params) return generate_on_all(model or no_model(), params) end
  --- bench { policy, policy, ..., batch = 1, context = 128, prefill = 128, steps = 16 }: replans the model
  -- to each policy (a weft.policy, or its sizes), measures prefill and decode, and shows them side by
  -- side. The plan of before comes back. Without policies: the plan of now. `weft plan` and ,plan show the
  -- measured times beside predicted ones.
  function env.bench(options) return bench_on_all(model or no_model(), options) end
  --- quit([code]): ends the session.
  function env.quit(code)
    state.quitting = tonumber(code) or 0
    error({ message = "all ranks leave together: quit without @", code = "exit" }, 0) -- shown where rank 0 does not leave
  end
  env.os = setmetatable({ exit = env.quit }, { __index = os })
  return env
end

return session
