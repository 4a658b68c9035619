--- weft verify: every legal plan of a model against one rank.
--
-- One rank first: its logits at every position of each prompt and of its greedy continuation are the
-- reference. Each plan is fed the same tokens (so that one near-tie cannot hide all that follows),
-- once for each way of cutting the prompt into chunks. A plan fails where its logits differ by more
-- than the bound, or its best token differs where the reference's best two are further apart than
-- `margin`.
local core = require "weft.core"
local errors = require "weft.errors"
local json = core.json

local random_ids = require("weft.commands.bench").random_ids
local run = require "weft.commands.run"

local verify = {}

-- Largest difference over the largest logit; and what counts as a tie (DESIGN 8 and 10).
local bounds = { float32 = { diff = 1e-4, margin = 1e-3 }, bfloat16 = { diff = 2e-2, margin = math.huge },
  float16 = { diff = 2e-2, margin = math.huge } }

--- The job on rank 0: cases of { prompt_ids, forced (or nil: greedy, `steps` of them), chunk }.
-- Gives for each { ids = continuation, logits = float32 [positions, vocab] }.
function verify.trace(engine, options, cases)
  local results = {}
  for i, case in ipairs(cases) do
    engine.prefill_chunk = case.chunk
    results[i] = engine:trace(case.prompt_ids, case.forced, case.steps)
  end
  return results
end

-- The prompts of expected.json: a list of cases with `prompt_ids`.
local function expected_prompts(path, text)
  local function refuse(found)
    errors.raise { message = ("%s: wanted a list of cases with prompt_ids, found %s; give --prompt-ids, or leave the file out"):format(path, found), code = "format" }
  end
  local cases = json.decode(text)
  if cases == nil then refuse "what is not JSON" end
  if type(cases) ~= "table" or #cases == 0 then refuse "no list, or an empty one" end
  local prompts = {}
  for i, case in ipairs(cases) do
    local ids = type(case) == "table" and case.prompt_ids
    if type(ids) ~= "table" or #ids == 0 then refuse(("case %d without them"):format(i)) end
    for _, id in ipairs(ids) do
      if type(id) ~= "number" then refuse(("case %d with a %s among them"):format(i, type(id))) end
    end
    prompts[i] = ids
  end
  return prompts
end

-- Prompts: given, else expected.json of the folder, else random ids of the lengths where pages and
-- shares of the sequence begin and end.
local function prompts_of(options, setup)
  if options.prompt_ids then return { options.prompt_ids } end
  local texts = options.prompt and { options.prompt } or options.file and run.read_prompts(options.file)
  if texts then
    local tokenizer, prompts = assert(core.tokenizer.load(options.model)), {}
    for i, text in ipairs(texts) do prompts[i] = tokenizer:encode(text) end
    if #prompts == 0 then errors.raise { message = ("-f %s: it has no prompts"):format(options.file), code = "format" } end
    return prompts
  end
  local path = options.model .. "/expected.json"
  local file = io.open(path, "rb")
  if file then
    file:close()
    return expected_prompts(path, errors.read_input(path, "the prompts"))
  end
  local block = options.block_size or 16
  local widest = block * options.max_ranks
  local prompts, seen = {}, {}
  for _, length in ipairs { 1, 3, 4, block - 1, block, 4 * 8 + 1, widest - 1, widest, widest + 1 } do
    if length >= 1 and not seen[length] and length + options.steps < setup.cfg.max_position_embeddings then
      seen[length] = true
      prompts[#prompts + 1] = random_ids(length, setup.cfg.vocab_size, 7 + length)
    end
  end
  return prompts
end

-- Compares two traces of the same tokens.
local function compare(reference, got, bound)
  local worst, first = 0, nil
  for i, ref in ipairs(reference) do
    local r = core.compare_rows(got[i].logits, ref.logits, bound.margin)
    worst = math.max(worst, r.max_rel_diff ~= r.max_rel_diff and math.huge or r.max_rel_diff)
    if r.first_diff >= 0 and not first then first = { prompt = i - 1, position = r.first_diff } end
  end
  return { max_rel_diff = worst, first_diff_token = first, ok = worst <= bound.diff and first == nil }
end

local function cases_for(prompts, reference, chunk, steps)
  local cases = {}
  for i, ids in ipairs(prompts) do
    cases[i] = { prompt_ids = ids, forced = reference and reference[i].ids, chunk = chunk, steps = steps }
  end
  return cases
end

local function run_plan(options, plan, cases)
  local o = {}
  for k, v in pairs(options) do o[k] = v end
  options.told_layers = true -- by the first run
  o.policy = plan.sizes
  if plan.number then o.plan_list, o.plan_number = options.plans, plan.number end
  return require("weft.runtime").launch(o, "weft.commands.verify", "trace", cases)
end

local function plans_of(options, setup)
  if options.plans and options.plans ~= "all" then
    local plans, policies = {}, require "weft.policy"
    local ok, list = pcall(policies.load_list, options.plans)
    if not ok then policies.refuse(list) end
    for i, policy in ipairs(list) do
      require("weft.setup").check_gpus(options, policy.num_ranks, ("plan %d of %s"):format(i, options.plans))
      plans[i] = { label = tostring(policy), number = i }
    end
    return plans
  end
  local models = require "weft.models"
  return require("weft.plan_search").legal(setup.cfg, options.max_ranks,
    function(layer_type) return models.supports(setup.name, layer_type) end, { block_size = options.block_size })
end

--- The largest number of ranks of a plan: 8 if nobody says, and no more than there are GPUs.
function verify.max_ranks(options)
  local setup = require "weft.setup"
  if options.max_ranks then setup.check_gpus(options, options.max_ranks, "--max-ranks " .. options.max_ranks) end
  local most = setup.most_ranks(options)
  if options.max_ranks or not most or most >= 8 then return options.max_ranks or 8 end
  if not options.plans or options.plans == "all" then
    io.stderr:write(("weft: plans of up to %d rank%s: %s; --oversubscribe --max-ranks 8 lets ranks share\n"):format(most, most == 1 and "" or "s",
      require("weft.environment").gpus()))
  end
  return most
end

local function row_text(row)
  local first = row.first_diff_token
  return ("%-44s %10.2e  %-12s %s"):format(row.plan, row.max_rel_diff,
    first and ("%d:%d"):format(first.prompt, first.position) or "-", row.ok and "ok" or (row.error or "DIFFERS"))
end

function verify.run(options)
  run.check_prompt(options)
  options.needs_tokenizer = (options.prompt or options.file) and "give the prompt as token ids (--prompt-ids)" or nil
  options.dtype = options.dtype or "float32" -- the exact mode: rounding hides nothing
  options.steps = options.max_tokens or 12
  local setup = require("weft.setup").check(options)
  options.max_ranks = verify.max_ranks(options)
  local bound = bounds[setup.cfg.compute_dtype]
  local prompts = prompts_of(options, setup)
  if options.plans == "" then errors.usage "--plans is all, or a Lua file that returns a list of plans" end
  local plans = plans_of(options, setup) -- before any work: a wrong file is refused at once
  local longest = 0
  for _, ids in ipairs(prompts) do longest = math.max(longest, #ids) end
  if longest + options.steps > setup.cfg.max_position_embeddings then
    errors.usage(("a prompt of %d tokens and %d steps (--max-tokens) are more than the %d positions that the model takes")
      :format(longest, options.steps, setup.cfg.max_position_embeddings))
  end
  options.cache_tokens = longest + options.steps + 256
  local chunks = options.prefill_chunk and { options.prefill_chunk } or { 1, 7, 64 }
  local reference = run_plan(options, { sizes = { tensor = 1 } }, cases_for(prompts, nil, 512, options.steps))
  local rows, failed = {}, 0
  if not options.json then
    io.stdout:write(("%-44s %10s  %-12s\n"):format("plan", "rel diff", "first token"))
  end
  for i, plan in ipairs(plans) do
    -- Each plan takes one way of cutting prompts; neighbours take different ones.
    local chunk = chunks[(i - 1) % #chunks + 1]
    local ok, got = pcall(run_plan, options, plan, cases_for(prompts, reference, chunk, options.steps))
    local row = ok and compare(reference, got, bound)
      or { max_rel_diff = math.huge, ok = false, error = type(got) == "table" and got.message or tostring(got) }
    if not ok and type(got) == "table" and got.code == "interrupted" then error(got, 0) end
    row.plan = plan.label
    rows[i] = row
    if not row.ok then failed = failed + 1 end
    if not options.json then
      io.stdout:write(row_text(row), "\n")
      io.stdout:flush()
    elseif core.isatty(2) then
      io.stderr:write(("\r%d plans"):format(i))
    end
  end
  if options.json then
    for _, row in ipairs(rows) do
      if row.max_rel_diff == math.huge then row.max_rel_diff = json.null end
      row.first_diff_token = row.first_diff_token and row.first_diff_token.position or json.null
    end
    io.stdout:write(json.encode(json.array(rows)), "\n")
  else
    io.stdout:write(("%d plan%s, %d prompt%s: %s\n"):format(#rows, #rows == 1 and "" or "s", #prompts, #prompts == 1 and "" or "s",
      failed == 0 and "all agree with one rank" or failed .. " differ"))
  end
  return failed == 0 and 0 or 1
end

return verify
