--- Models on a GPU against the CPU: logits of forced tokens, and greedy ids of a batch (scripts/gpu-check).
-- weft lua scripts/gpu_check.lua FOLDER [NAME...]: the models of the folder, or those named; "join" is a
-- thousand steps of requests that join and leave. Its ranks load it as a module for the jobs.
local core = require "weft.core"

local jobs = {}

--- All prompts together, greedily: the ids of each.
function jobs.generate(engine, _, prompts)
  local requests, lists = {}, {}
  for i, ids in ipairs(prompts) do requests[i] = engine:submit { prompt_ids = ids, max_tokens = 24 - i, ignore_eos = true } end
  engine:run()
  for i, request in ipairs(requests) do lists[i] = request.output_ids end
  local graphs = 0
  for _, graph in pairs(engine.session.graphs or {}) do graphs = graphs + (graph ~= "warm" and 1 or 0) end
  return { ids = lists, graphs = graphs }
end

--- `count` requests that join while others run and leave: a checksum of all ids, and what memory did. A request
-- follows from its number, and the sum from what each drew: not from when it came and went.
function jobs.churn(engine, _, count)
  local state, submitted, sum, done = 0, 0, 0, 0
  local function random(n)
    state = (state * 1103515245 + 12345) % 2147483648
    return math.floor(state / 65536) % n
  end
  local function submit()
    submitted = submitted + 1
    state = submitted * 7919
    local ids = {}
    for i = 1, 1 + random(submitted % 9 == 0 and 360 or 60) do ids[i] = random(engine.vocab_size) end -- some have tables that stay on the GPU
    engine:submit { prompt_ids = ids, max_tokens = 1 + random(60), ignore_eos = true, temperature = submitted % 3 == 0 and 0.8 or 0,
      seed = submitted, on_finish = function(request)
        local mine = request.number
        for i, id in ipairs(request.output_ids) do mine = (mine * 31 + id * i) % 2147483647 end
        sum, done = (sum + mine) % 2147483647, done + 1
      end }
  end
  for _ = 1, 10 do submit() end -- more at once than ever behind: the largest steps come first
  local first, step = nil, 0
  while submitted < count do
    step = step + 1
    if #engine.running + #engine.waiting < 1 + step * step % 7 then submit() end
    engine:step()
    if submitted >= count / 2 then first = first or core.memory() end
  end
  engine:run()
  local last = core.memory()
  return { sum = sum, done = done, steps = engine.timing.steps, allocations = last.allocations - first.allocations,
    grown = last.live_bytes - first.live_bytes, seconds = engine.timing.decode_s + engine.timing.prefill_s }
end

--- Logits of forced tokens with the choice of experts taken down (no `chosen`), or given: every router then
-- gives what it gave in the run that took it down, call by call. -> { traces, chosen, changed = tokens that
-- would have chosen other experts }
function jobs.routed_trace(engine, options, argument)
  local class = debug.getregistry()["weft.router"].__methods
  local forward, chosen, calls, changed = class.forward, argument.chosen, {}, 0
  function class.forward(router, x)
    local ids, weights = forward(router, x)
    local own = { tokens = ids.shape[1], k = ids.shape[2], ids = ids:totable(), weights = weights:totable() }
    calls[#calls + 1] = own
    local given = chosen and chosen[#calls]
    if not given then return ids, weights end
    assert(given.tokens == own.tokens and given.k == own.k, "the runs ask their routers differently")
    for t = 0, own.tokens - 1 do
      local set, other = {}, false
      for i = t * own.k + 1, (t + 1) * own.k do set[given.ids[i]] = true end
      for i = t * own.k + 1, (t + 1) * own.k do other = other or not set[own.ids[i]] end
      changed = changed + (other and 1 or 0)
    end
    return ids:copy(core.tensor({ own.tokens, own.k }, "int32", given.ids)), weights:copy(core.tensor({ own.tokens, own.k }, "float32", given.weights))
  end
  local fine, traces = pcall(require("weft.commands.verify").trace, engine, options, argument.cases)
  class.forward = forward
  if not fine then error(traces, 0) end
  return { traces = traces, chosen = chosen or calls, changed = changed }
end

if ... == "gpu_check" then return jobs end

package.path = arg[0]:match "^(.*)/" .. "/?.lua;" .. package.path
local runtime = require "weft.runtime"
local folder = ...

local function prompts_of(model)
  local file = assert(io.open(model .. "/expected.json", "rb"))
  local prompts = {}
  for i, case in ipairs(core.json.decode(file:read "*a")) do
    if i <= 4 then prompts[i] = case.prompt_ids end
  end
  file:close()
  return prompts
end

local function launch(model, device, dtype, module, name, argument, eager)
  return runtime.launch({ model = model, device = device, dtype = dtype, cache_tokens = 4096, eager = eager }, module, name, argument)
end

-- chunks: as a GPU's checks cut prompts, or whole.
local function cases_of(prompts, reference, cut)
  local cases = {}
  for i, ids in ipairs(prompts) do
    cases[i] = { prompt_ids = ids, forced = reference and reference[i].ids, chunk = cut and 7 + i or 512, steps = 10 }
  end
  return cases
end

local function traces(model, device, dtype, prompts, reference)
  return launch(model, device, dtype, "weft.commands.verify", "trace", cases_of(prompts, reference, device == "cuda"))
end

-- bfloat16 on the GPU against bfloat16 on the CPU, with the CPU's choice of experts in both: rounding makes near
-- ties fall either way, and another expert is another sum, not an error. float32 compares the choices, too.
local function rounded_difference(model, prompts, reference, difference)
  local cases = cases_of(prompts, reference, true)
  local cpu = launch(model, "cpu", "bfloat16", "gpu_check", "routed_trace", { cases = cases }, true)
  local gpu = launch(model, "cuda", "bfloat16", "gpu_check", "routed_trace", { cases = cases, chosen = cpu.chosen }, true)
  return difference(cpu.traces, gpu.traces, math.huge), gpu.changed
end

local function difference(reference, got, margin)
  local worst, differs = 0, false
  for i = 1, #reference do
    local r = core.compare_rows(got[i].logits, reference[i].logits, margin)
    worst = math.max(worst, r.max_rel_diff == r.max_rel_diff and r.max_rel_diff or math.huge)
    differs = differs or r.first_diff >= 0
  end
  return worst, differs
end

local function same(a, b)
  return core.json.encode(core.json.array(a)) == core.json.encode(core.json.array(b))
end

local function check(model)
  local prompts = prompts_of(model)
  local exact = traces(model, "cpu", "float32", prompts)
  local diff32, differs = difference(exact, traces(model, "cuda", "float32", prompts, exact), 1e-3)
  local diff16, changed = rounded_difference(model, prompts, exact, difference)
  local cpu = launch(model, "cpu", "float32", "gpu_check", "generate", prompts)
  local eager = launch(model, "cuda", "float32", "gpu_check", "generate", prompts, true)
  local graphs = launch(model, "cuda", "float32", "gpu_check", "generate", prompts)
  local ids_ok = true
  for i = 1, #prompts do ids_ok = ids_ok and same(cpu.ids[i], eager.ids[i]) and same(cpu.ids[i], graphs.ids[i]) end
  local ok = diff32 <= 1e-4 and not differs and diff16 <= 2e-2 and ids_ok and graphs.graphs > 0
  return ok, ("float32 %.1e  bfloat16 %.1e (%d other choices of experts)  ids %s  %d graphs"):format(diff32, diff16, changed, ids_ok and "equal" or "DIFFER", graphs.graphs)
end

-- A thousand steps: memory stays, and graphs draw what eager mode draws.
local function join_and_leave()
  local function churn(eager)
    return runtime.launch({ model = folder .. "/demo_llama", device = "cuda", dtype = "float32", cache_tokens = 8192, eager = eager },
      "gpu_check", "churn", 200)
  end
  local graphs, eager = churn(), churn(true)
  local same_sums = graphs.sum == eager.sum and graphs.done == eager.done
  local flat = graphs.grown == 0 and graphs.allocations == 0
  return same_sums and flat, ("%d requests in %d steps, ids %s eager mode; second half: %d allocations, %d bytes; %.1f s, eager %.1f s")
    :format(graphs.done, graphs.steps, same_sums and "as in" or "OTHER than in", graphs.allocations, graphs.grown, graphs.seconds, eager.seconds)
end

local names, failed = { select(2, ...) }, 0
if #names == 0 then
  for name in io.popen(("ls '%s'"):format(folder)):lines() do
    local file = io.open(folder .. "/" .. name .. "/expected.json", "rb")
    if file then
      file:close()
      names[#names + 1] = name
    end
  end
  names[#names + 1] = "join"
end
for _, name in ipairs(names) do
  local began = core.now()
  local fine, ok, text
  if name == "join" then fine, ok, text = pcall(join_and_leave) else fine, ok, text = pcall(check, folder .. "/" .. name) end
  if not fine then ok, text = false, type(ok) == "table" and ok.message or tostring(ok) end
  if not ok then failed = failed + 1 end
  print(("%-24s %-6s %5.1f s  %s"):format(name == "join" and "join and leave" or name, ok and "ok" or "FAILED", core.now() - began, text))
end
return failed == 0 and 0 or 1
