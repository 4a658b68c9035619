--- Models on a GPU against the CPU: logits of forced tokens, and greedy ids of a batch (scripts/gpu-check).
-- Run by `weft lua`; its ranks load it as a module for the jobs.
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

local function traces(model, device, dtype, prompts, reference)
  local cases = {}
  for i, ids in ipairs(prompts) do
    cases[i] = { prompt_ids = ids, forced = reference and reference[i].ids, chunk = device == "cuda" and 7 + i or 512, steps = 10 }
  end
  return launch(model, device, dtype, "weft.commands.verify", "trace", cases)
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
  local rough = traces(model, "cpu", "bfloat16", prompts, exact)
  local diff16 = difference(rough, traces(model, "cuda", "bfloat16", prompts, exact), math.huge)
  local cpu = launch(model, "cpu", "float32", "gpu_check", "generate", prompts)
  local eager = launch(model, "cuda", "float32", "gpu_check", "generate", prompts, true)
  local graphs = launch(model, "cuda", "float32", "gpu_check", "generate", prompts)
  local ids_ok = true
  for i = 1, #prompts do ids_ok = ids_ok and same(cpu.ids[i], eager.ids[i]) and same(cpu.ids[i], graphs.ids[i]) end
  local ok = diff32 <= 1e-4 and not differs and diff16 <= 2e-2 and ids_ok and graphs.graphs > 0
  return ok, ("float32 %.1e  bfloat16 %.1e  ids %s  %d graphs"):format(diff32, diff16, ids_ok and "equal" or "DIFFER", graphs.graphs)
end

local names, rows, failed = {}, {}, 0
for name in io.popen(("ls '%s'"):format(folder)):lines() do
  local file = io.open(folder .. "/" .. name .. "/expected.json", "rb")
  if file then
    file:close()
    names[#names + 1] = name
  end
end
for _, name in ipairs(names) do
  local began = core.now()
  local fine, ok, text = pcall(check, folder .. "/" .. name)
  if not fine then
    text = type(ok) == "table" and ok.message or tostring(ok)
    ok = false
    if text:find("on a GPU yet", 1, true) then ok, text = true, "skipped: " .. text end
  end
  if not ok then failed = failed + 1 end
  rows[#rows + 1] = ("%-24s %-6s %5.1f s  %s"):format(name, ok and "ok" or "FAILED", core.now() - began, text)
  io.stderr:write(rows[#rows], "\n")
end
print(table.concat(rows, "\n"))
return failed == 0 and 0 or 1
