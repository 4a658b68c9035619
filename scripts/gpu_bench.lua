--- The targets of weft on H200 and what this machine reaches (scripts/gpu-bench): runs `weft bench`, the kernels' own bench
-- and PyTorch, and puts their figures into one table. Every time is a median of at least five. One thing runs after the
-- other; with two GPUs PyTorch has the second one while weft is timed on the first, but not while the host's part of a step
-- is: PyTorch compiles on all cores.
local core = require "weft.core"

local build, logs = arg[1], arg[2]
local only = {}
for i = 3, #arg do only[arg[i]] = true end
local function wanted(...)
  if not next(only) then return true end
  for _, name in ipairs { ... } do if only[name] then return true end end
  return false
end

local gpus = core.gpu.count()
if gpus == 0 then
  io.stderr:write "gpu-bench: this process sees no GPU\n"
  return 2
end
local configs = "spec/fixtures/configs/"
local llama, minimax = configs .. "meta-llama--Meta-Llama-3.1-8B_config.json", configs .. "MiniMaxAI--MiniMax-M2.5_config.json"

-- ---- running things ----

local number = 0

local function slurp(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- Starts a command; its output goes to a file in LOGS. done(): the output, or nil and a reason; waits for the end.
-- gpu: the one that it sees as its only one; nil: all.
local function start(what, seconds, command, gpu)
  number = number + 1
  local path, began = ("%s/%02d.log"):format(logs, number), core.now()
  local file = assert(io.open(path .. ".command", "wb"))
  file:write(command, "\n")
  file:close()
  io.stderr:write(("gpu-bench: %s\n"):format(what))
  os.remove(path .. ".exit")
  os.execute(("(%s timeout %d %s >'%s' 2>'%s.err'; echo $? >'%s.exit.part'; mv '%s.exit.part' '%s.exit') &")
    :format(gpu and "CUDA_VISIBLE_DEVICES=" .. gpu or "", seconds, command, path, path, path, path, path))
  return function()
    while not slurp(path .. ".exit") and core.now() - began < seconds + 10 do os.execute "sleep 0.1" end
    if slurp(path .. ".exit") == "0\n" then return slurp(path) end
    return nil, (slurp(path .. ".err") or ""):match "[^\n]+" or "it did not end in time"
  end
end

local function run(what, seconds, command) return start(what, seconds, command)() end

local function bench(what, seconds, flags)
  local text, why = run(what, seconds, ("%s/weft bench --load-format dummy --dtype bfloat16 --steps 64 --json %s"):format(build, flags))
  if not text then return nil, why end
  return core.json.decode(text:match "([^\n]+)\n*$")
end

--- A config.json with some fields of its own, in LOGS.
local function derived(path, name, fields)
  local file = assert(io.open(path, "rb"))
  local config = core.json.decode(file:read "*a")
  file:close()
  for key, value in pairs(fields) do config[key] = value end
  local target = ("%s/%s.json"):format(logs, name)
  file = assert(io.open(target, "wb"))
  file:write(core.json.encode(config), "\n")
  file:close()
  return target
end

-- ---- the table ----

local rows = {}

-- peer: a text, or a function that gives one at the end.
local function row(name, what, target, measured, peer)
  rows[#rows + 1] = { name, what, target, measured, peer or "-" }
  io.stderr:write(("  %-4s %-58s %-20s %s\n"):format(name, what, target, measured)) -- also of a run that is stopped
end

local function missing(name, what, target, why) row(name, what, target, "not measured: " .. why:gsub("^weft: ", ""):sub(1, 60)) end

--- "line's time" of the kernels' table: us, percent of copy, TFLOP/s.
local function line(text, name)
  for l in text:gmatch "[^\n]+" do
    if l:sub(1, #name) == name then
      local us = tonumber(l:match "([%d.]+) us")
      return us and { us = us, percent = tonumber(l:match "([%d.]+)%% of copy"), tflops = tonumber(l:match "([%d.]+) TFLOP/s") }
    end
  end
end

local peer = {}

-- Both begin; what is returned waits for them and fills `peer`.
local function start_peers(gpu)
  local llama_done = io.open "scripts/peer_llama.py" and wanted("T1", "T4", "T5")
    and start("PyTorch: a step of Llama-3.1-8B's shape, and transformers' prefill", 170, "python3 scripts/peer_llama.py --batch 1 32", gpu)
  local function finish()
    for l in (llama_done and llama_done() or ""):gmatch "[^\n]+" do
      local ok, value = pcall(core.json.decode, l)
      if ok and value.decode_batch then peer["batch" .. value.decode_batch] = value.ms end
      if ok and value.prefill then peer.prefill = value.ms end
    end
    local text = io.open "scripts/peer_attention.py" and wanted "T6" and run("PyTorch: attention", 60, "python3 scripts/peer_attention.py 8192 32768")
    for name, queries, tflops in (text or ""):gmatch "([%w-]+) attention, (%d+) queries%s+[%d.]+ us%s+([%d.]+) TFLOP/s" do
      local key = "attention" .. queries
      if not peer[key] or tonumber(tflops) > peer[key].tflops then peer[key] = { name = name, tflops = tonumber(tflops) } end
    end
  end
  return finish
end

local function decode_text(d)
  return ("%.2f ms, %.0f tok/s, %.0f%% of copy"):format(d.ms, d.tok_per_s, d.percent_of_copy)
end

-- PyTorch's milliseconds under `key`, and how many times ours they are.
local function peer_text(key, mine)
  return function() return peer[key] and ("%.2f ms (%.2f x)"):format(peer[key], peer[key] / mine) or "-" end
end

local function decode_row(name, what, target, seconds, flags, peer_key)
  local r, why = bench(what, seconds, flags)
  if not r then return missing(name, what, target, why) end
  row(name, what, target, decode_text(r.decode), peer_key and peer_text(peer_key, r.decode.ms))
  return r
end

local of_one = "--model " .. llama .. " --context 1024 "

local function measure_llama_alone()
  if not wanted("T1", "T5", "T13") then return end
  local r = decode_row("T1", "Llama-3.1-8B, bf16, batch 1, one GPU", "3.75 ms, 267 tok/s", 60,
    of_one .. "--batch 1 --prefill 8192 --prefill-chunk 8192 --max-batch-tokens 8192", "batch1")
  if not r then return end
  row("T5", "same, prefill of 8192", "215 ms", ("%.0f ms, %.0f tok/s"):format(r.prefill.ms, r.prefill.tok_per_s), peer_text("prefill", r.prefill.ms))
  row("T13", "same, a step's Lua and record on the host", "20 us", ("%.1f us; with the driver's %.1f: %.1f us")
    :format(r.decode.host_us - r.decode.driver_us, r.decode.driver_us, r.decode.host_us))
end

local function measure_llama()
  if wanted "T2" then
    local fp8 = derived(llama, "llama-8b-fp8", { quantization_config = { quant_method = "fp8", fmt = "float8_e4m3fn", activation_scheme = "dynamic",
      weight_block_size = core.json.array { 128, 128 }, modules_to_not_convert = core.json.array { "lm_head" } } })
    decode_row("T2", "same, fp8 blocks, batch 1", "2.30 ms, 435 tok/s", 60, "--model " .. fp8 .. " --context 1024 --batch 1")
  end
  if wanted "T4" then decode_row("T4", "same, bf16, batch 32", "1.15 x PyTorch", 60, of_one .. "--batch 32", "batch32") end
end

local function measure_kernels()
  local text, why = run("the kernels' own bench", 120, build .. "/weft_gpu_bench attention experts")
  local function from(name, what, target, prefix, show)
    local found = text and line(text, prefix)
    if found then row(name, what, target, show(found)) else missing(name, what, target, why or "no such line") end
    return found
  end
  local function rate(f) return ("%.1f us%s"):format(f.us, f.percent and (", %.0f%% of copy"):format(f.percent) or "") end
  for _, queries in ipairs { 8192, 32768 } do
    local found = from("T6", ("causal attention, 32/8 heads, %d"):format(queries), "PyTorch's best", ("attention 1 x %d queries over %d,"):format(queries, queries),
      function(f) return ("%.0f TFLOP/s"):format(f.tflops) end)
    if found then
      rows[#rows][5] = function()
        local best = peer["attention" .. queries]
        return best and ("%.0f TFLOP/s (%s; %.2f x)"):format(best.tflops, best.name, found.tflops / best.tflops) or "-"
      end
    end
  end
  from("T7", "decode attention, 1 x 1024", "8 us", "attention 1 x 1 queries over 1024, page 16", rate)
  from("T7", "same, 1 x 131072", "90% of copy", "attention 1 x 1 queries over 131072, page 16", rate)
  from("T7", "same, 32 x 8192", "90% of copy", "attention 32 x 1 queries over 8192, page 16", rate)
  from("T10", "MiniMax-M2 experts, 1 token, one of two ranks", "20 us", "experts", rate)
end

-- Small collectives: over peer memory by their own bench, over NCCL by bench-comm.lua.
local function measure_collectives()
  local text, why = run("collectives over peer memory", 30, build .. "/weft_gpu_peer time")
  local nccl = run("collectives over NCCL", 30, ("%s/weft lua scripts/bench-comm.lua gpu 2"):format(build)) or ""
  local function us(name) return text and line(text, name .. " ") and line(text, name .. " ").us end
  local function both(kilobytes)
    local own, other = nccl:match("all_reduce%s+" .. kilobytes .. "%s+([%d.]+)%s+([%d.]+)")
    return tonumber(own), tonumber(other)
  end
  local own, other = both "8%.0"
  local sum, exchange = us "sum of 8 KB" or own, us "exchange and merge, 32 heads, 1 tokens"
  if not sum then return missing("T8", "sum of 8 KB, two GPUs", "2.6 us", why or "no such line") end
  row("T8", "sum of 8 KB, two GPUs", "2.6 us", ("%.2f us%s"):format(sum, other and (", NCCL %.2f us"):format(other) or ""))
  if exchange then row("T8", "exchange and merge of one token, 32 heads", "3.5 us", ("%.2f us"):format(exchange))
  else missing("T8", "exchange and merge of one token, 32 heads", "3.5 us", why or "no such line") end
  local _, small = both "0%.5"
  for _, tokens in ipairs { 1, 128 } do
    local fused, pieces = us(("norms of q and k, %d tokens"):format(tokens)), us(("their four kernels alone, %d tokens"):format(tokens))
    if fused and pieces and small then
      row("T9", ("MiniMax-M2's QK norm over two GPUs, %d tokens"):format(tokens), "0.5 x NCCL's",
        ("%.2f / %.2f us, %.2f x"):format(fused, pieces + small, fused / (pieces + small)))
    end
  end
end

local function measure_two()
  if wanted "T3" then
    decode_row("T3", "Llama-3.1-8B, bf16, batch 1, two GPUs", "2.15 ms, 465 tok/s", 60, "--model " .. llama .. " --context 1024 --batch 1 -tp 2")
  end
  if wanted("T8", "T9") then measure_collectives() end
  if wanted "T11" then
    local what, target = "MiniMax-M2.5, fp8, two GPUs, batch 1", "5.0 ms, 200 tok/s"
    local best, why, label
    for _, plan in ipairs { "-tp 2", "-tp 2 -ep 2" } do
      local r, message = bench(what .. ", " .. plan, 90, ("--model %s --context 1024 --batch 1 --prefill 512 %s"):format(minimax, plan))
      if r and (not best or r.decode.ms < best.decode.ms) then best, label = r, plan end
      why = message or why
    end
    if best then row("T11", what .. ", " .. label, target, decode_text(best.decode)) else missing("T11", what, target, why) end
  end
  if wanted "T12" then
    local what, target, ms = "one KV head, 8 x 131072: attention, -tpa 1 / -tp 2", "0.55 x", {}
    local config = derived(llama, "one-kv-head", { num_key_value_heads = 1, num_hidden_layers = 1, vocab_size = 1024, intermediate_size = 512,
      max_position_embeddings = 262144 })
    local why
    for _, plan in ipairs { "-tp 2", "-tp 2 -tpa 1" } do
      for _, context in ipairs { 16, 131072 } do
        local r, message = bench(("%s: %s, context %d"):format(what, plan, context), 90,
          ("--model %s --context %d --batch 8 --prefill 16 --prefill-chunk 16384 --max-batch-tokens 16384 %s"):format(config, context, plan))
        ms[plan .. context], why = r and r.decode.ms, message or why
      end
    end
    if why then return missing("T12", what, target, why) end
    local plain, split = ms["-tp 2131072"] - ms["-tp 216"], ms["-tp 2 -tpa 1131072"] - ms["-tp 2 -tpa 116"]
    row("T12", what, target, ("%.0f / %.0f us, %.2f x"):format(split * 1000, plain * 1000, split / plain))
  end
end

local began = core.now()
local visible = {}
for id in (os.getenv "CUDA_VISIBLE_DEVICES" or "0,1"):gmatch "[^,]+" do visible[#visible + 1] = id end
measure_llama_alone()
local finish_peers = start_peers(gpus >= 2 and visible[2] or nil)
if gpus < 2 then finish_peers() end
measure_llama()
if wanted("T6", "T7", "T10") then measure_kernels() end
if gpus >= 2 then
  finish_peers()
  measure_two()
end
local rank_of = function(name) return tonumber(name:match "%d+") end
for i, r in ipairs(rows) do r.place = i end
table.sort(rows, function(a, b)
  local x, y = rank_of(a[1]), rank_of(b[1])
  if x ~= y then return x < y end
  return a.place < b.place
end)
if #rows == 0 then
  io.stderr:write(("gpu-bench: no figure was measured: those of two GPUs (T3, T8, T9, T11, T12) need two, this process sees %d\n"):format(gpus))
  return 2
end
local name = core.gpu.describe(0)
print(("%-4s %-58s %-20s %-40s %s"):format("", name .. (gpus > 1 and (" x %d"):format(gpus) or ""), "target (H200)", "measured", "PyTorch, same run"))
for _, r in ipairs(rows) do
  if type(r[5]) == "function" then r[5] = r[5]() end
  print(("%-4s %-58s %-20s %-40s %s"):format(unpack(r, 1, 5)))
end
print(("gpu-bench: %d figures in %.0f s; full outputs in %s"):format(#rows, core.now() - began, logs))
return 0
