-- spec/plan/price_spec.lua - predicted times, machine profiles and the file of measured times.
local config = require "weft.config"
local files = require "spec.support.files"
local machines = require "weft.machines"
local measured = require "weft.plan.measured"
local numbers = require "weft.plan_numbers"
local policies = require "weft.policy"
local price = require "weft.plan.price"
local program = require "spec.support.program"

local function load(name)
  local cfg = config.load("spec/fixtures/configs/" .. name .. "_config.json")
  cfg.compute_dtype = cfg.dtype or "bfloat16"
  return cfg
end

local llama8, llama405, minimax = "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-405B", "MiniMaxAI--MiniMax-M2.5"

local function priced(name, sizes, machine, batch, context)
  local cfg = load(name)
  local n = numbers.of(policies.from_options { policy = sizes }, cfg, { context = context, ranks = 1 })
  return price.of(n, cfg, type(machine) == "table" and machine or machines.get(machine), batch), n
end

local function ms_of(p, name)
  for _, part in ipairs(p.parts) do
    if part.part == name then return part.ms end
  end
end

describe("the price of a step", function()
  it("is within 25% of every decode step measured on one and two H200, as scripts/bench.md has them", function()
    local code, out = program.run { "lua", "scripts/predict.lua" }
    assert.equal(0, code, out)
    assert.matches("within 25%%", out)
    local told = files.read "scripts/bench.md"
    local steps = dofile("scripts/measured.lua").steps
    assert.is_true(#steps >= 5)
    for _, step in ipairs(steps) do
      assert.is_truthy(told:find(step.told or step.ms, 1, true), step.ms .. " is not in scripts/bench.md")
      assert.is_truthy(out:find(step.ms, 1, true))
    end
  end)

  it("is bytes over bandwidth where nothing else costs anything", function()
    local free = { product = 0, attention = 0, experts = 0, kernel = 0, step = 0 }
    local path = files.temporary("return { bandwidth = 1e12, share = { product = { bfloat16 = 1 }, attention = 1 }, latency = { product = 0, attention = 0, experts = 0, kernel = 0, step = 0 } }", ".lua")
    local machine = machines.get(path)
    os.remove(path)
    assert.same(free, machine.latency)
    local p, n = priced(llama8, { tensor = 1 }, machine, 1, 4096)
    local embedding = n.parts[1].ranks[1].weight_bytes
    local norms = (2 * 32 + 1) * 4096 * 2
    local bytes = n.ranks[1].weight_bytes - embedding - norms + n.ranks[1].cache_bytes + 4096 * 2
    assert.near(bytes / 1e12 * 1000, p.ms, 1e-6)
    local sum = 0
    for _, part in ipairs(p.parts) do sum = sum + part.ms end
    assert.near(sum, p.ms, 1e-9)
  end)

  it("halves attention when two ranks share the sequence of one KV head, and pays the exchange", function()
    local plain = priced(llama405, { tensor = 16 }, "gb200-nvl72", 8, 1000000)
    local shared = priced(llama405, { tensor = 16, attention = { tensor = 8, exchange = "a2a" } }, "gb200-nvl72", 8, 1000000)
    assert.near(0.5, ms_of(shared, "attention") / ms_of(plain, "attention"), 0.01)
    assert.is_nil(ms_of(plain, "exchange"))
    assert.is_true(ms_of(shared, "exchange") > 0 and shared.ms < plain.ms)
  end)

  it("reads more experts for more requests, up to all that a rank holds", function()
    local times = {}
    for i, batch in ipairs { 1, 8, 64, 1024 } do times[i] = ms_of(priced(minimax, { tensor = 8, experts = { expert = 8 } }, "h200", batch, 1024), "experts") end
    for i = 2, #times do assert.is_true(times[i] > times[i - 1]) end
    local _, n = priced(minimax, { tensor = 8, experts = { expert = 8 } }, "h200", 1, 1024)
    local h200 = machines.get "h200"
    local rate = h200.bandwidth * h200.share.experts
    for _, part in ipairs(n.parts) do
      if part.type == "experts" then assert.is_true(times[4] < part.count * (part.ranks[1].weight_bytes / rate * 1e3 + 0.1)) end
    end
  end)

  it("counts memory: the largest batch fits and one more does not", function()
    local p = priced(llama8, { tensor = 2, attention = { tensor = 1 } }, "h200", 1, 8192)
    local most = p.memory.largest_batch
    assert.is_true(priced(llama8, { tensor = 2, attention = { tensor = 1 } }, "h200", most, 8192).memory.fits)
    assert.is_false(priced(llama8, { tensor = 2, attention = { tensor = 1 } }, "h200", most + 1, 8192).memory.fits)
    assert.is_false(priced(llama405, { tensor = 1 }, "h200", 1, 1024).memory.fits)
  end)

  it("shares memory, bandwidth and arithmetic of a CPU among its ranks", function()
    local one, two = priced(llama8, { tensor = 1 }, "cpu", 1, 128), priced(llama8, { tensor = 2 }, "cpu", 1, 128)
    assert.near(1, ms_of(two, "mlp") / ms_of(one, "mlp"), 0.01)
    assert.equal(one.memory.capacity_bytes / 2, two.memory.capacity_bytes)
  end)
end)

describe("the price of what moves", function()
  local h200 = machines.get "h200"

  local function sum(ranks, bytes)
    return price.step(h200, 1):collective { op = "all_reduce", world_size = ranks, bytes = 2 * bytes * (ranks - 1) / ranks }
  end

  it("is what sums over peer memory were measured to take on two H200, and NCCL's beyond 128 KB", function()
    for bytes, us in pairs { [512] = 2.01, [8192] = 2.28, [65536] = 2.69, [131072] = 2.99, [1048576] = 13.65 } do
      assert.is_true(math.abs(sum(2, bytes) * 1e6 / us - 1) < 0.25, ("%d bytes: %.2f us"):format(bytes, sum(2, bytes) * 1e6))
    end
    assert.is_true(sum(4, 65536) - sum(4, 32768) > 4e-6) -- more ranks wait for more
  end)

  it("takes one kernel for a small exchange of attention, its collectives for a large one", function()
    local small = priced(llama8, { tensor = 2, attention = { tensor = 1 } }, "h200", 1, 1024)
    assert.near(32 * h200.exchange * 1e3, ms_of(small, "exchange"), 0.02)
    local large = priced(llama8, { tensor = 2, attention = { tensor = 1 } }, "h200", 256, 1024)
    assert.is_true(ms_of(large, "exchange") > 4 * ms_of(small, "exchange"))
  end)
end)

describe("a machine", function()
  it("is a shipped profile or a file whose numbers replace those of its base", function()
    for _, name in ipairs(machines.names) do assert.equal(name, machines.get(name).name) end
    local path = files.temporary("return { name = 'mine', base = 'h100', memory = 1e9, latency = { kernel = 5e-6 } }", ".lua")
    local mine, base = machines.get(path), machines.get "h100"
    os.remove(path)
    assert.equal("h100", mine.filled.from)
    local said = {}
    for _, name in ipairs(mine.filled.fields) do said[name] = true end
    assert.is_true(said["latency.product"] and said.bandwidth and not said.memory and not said["latency.kernel"])
    assert.same({ "mine", 1e9, 5e-6, base.latency.product, base.bandwidth }, { mine.name, mine.memory, mine.latency.kernel, mine.latency.product, mine.bandwidth })
  end)

  it("is refused in one line when unknown, unreadable or out of numbers", function()
    local function refused(name, text)
      local ok, err = pcall(machines.get, name)
      assert.is_false(ok)
      assert.is_truthy(err.message:find(text, 1, true), err.message)
    end
    refused("abacus", "--machine is one of h200, h100, gb200-nvl72, cpu, or FILE.lua; got 'abacus'")
    refused("/nowhere/at/all.lua", "cannot read the machine")
    for text, message in pairs { ["return 1"] = "must return a table, got number", ["return { bandwidth = -1 }"] = "bandwidth is a positive number, got -1",
      ["return { latency = { kernel = 'x' } }"] = "latency.kernel is a non-negative number, got x", ["return { flops = 3 }"] = "flops is a table, got number",
      ["return { base = 'abacus' }"] = "base is one of", ["error 'no'"] = "failed",
      ["return { bandwith = 3e12 }"] = "a machine has no field 'bandwith' (known: bandwidth, base, collective, domain, ",
      ["return { latency = { kernal = 1 } }"] = "its latency has no field 'kernal' (known: attention, experts, kernel, product, step)",
      ["return { share = { product = { fp8 = 1 } } }"] = "its share.product has no field 'fp8'", ["return { name = 3 }"] = "name is a string",
      ["return { share = { attention = 1.5 } }"] = "share.attention is a share of the bandwidth, at most 1, got 1.5",
      ["return { collective = 3 }"] = "collective is a table, got number", ["return { collective = { all_reduce = 1e-6 } }"] = "collective.all_reduce is a table",
      ["return { memory = '80GB' }"] = "memory is a positive number, got 80GB", ["return { domain = 1.5 }"] = "domain is a whole number",
      ["return { link = 0 }"] = "link is a positive number, got 0", ["return { bandwidth = 1/0 }"] = "bandwidth is a positive number, got inf" } do
      local path = files.temporary(text, ".lua")
      refused(path, message)
      os.remove(path)
    end
  end)
end)

describe("the file of measured times", function()
  local key = { model = "M", policy = "tensor=1", machine = "cpu", batch = 1, context = 128 }
  local function entry(ms)
    return { model = key.model, policy = key.policy, machine = key.machine, batch = key.batch, context = key.context, ms = ms }
  end

  it("gives the newest time of a key and nothing for another", function()
    local path = files.temporary ""
    assert(measured.append(entry(5), path))
    assert(measured.append(entry(4), path))
    assert.equal(4, measured.find(key, path).ms)
    assert.is_nil(measured.find({ model = "M", policy = "tensor=2", machine = "cpu", batch = 1, context = 128 }, path))
    os.remove(path)
  end)

  it("may be missing, garbled, or in a folder that is not there yet", function()
    assert.is_nil(measured.find(key, "/nowhere/bench.jsonl"))
    local path = files.temporary "{\n[1,2\n\0\255nothing\n{\"model\":\"M\"}\n7\n\n{\"ms\":\"soon\"}\n"
    assert.is_nil(measured.find(key, path))
    assert(measured.append(entry(3), path))
    assert.equal(3, measured.find(key, path).ms)
    os.remove(path)
    local folder = files.folder()
    local deep = folder .. "/state/weft/bench.jsonl" -- in folders that append makes
    assert(measured.append(entry(2), deep))
    assert.equal(2, measured.find(key, deep).ms)
    files.remove(folder)
    local ok, why = measured.append(entry(1), "/proc/nowhere/bench.jsonl")
    assert.is_nil(ok)
    assert.is_string(why)
  end)

  it("is a regular file: what never ends or answers is not read", function()
    local folder = files.folder()
    os.execute(("mkfifo %s/pipe"):format(folder))
    for _, path in ipairs { folder .. "/pipe", "/dev/zero" } do
      local here, others, why = measured.find(key, path)
      assert.same({ nil, {}, path .. ": not a regular file" }, { here, others, why })
      assert.same({ nil, path .. ": not a regular file" }, { measured.append(entry(1), path) })
    end
    assert.is_true(measured.append(entry(1), "/dev/null"))
    files.remove(folder)
  end)

  it("goes on behind a line that was left half-written", function()
    local path = files.temporary '{"batch":1,"context":128'
    assert(measured.append(entry(5), path))
    assert.equal(5, measured.find(key, path).ms)
    os.remove(path)
  end)

  it("is told of on one line where it is there and cannot be read, and the plan is shown all the same", function()
    local folder = files.folder()
    local here, others, why = measured.find(key, folder)
    assert.same({ nil, {}, folder .. ": Is a directory" }, { here, others, why })
    local code, out, err = program.run { "plan", "--model", "spec/fixtures/models/demo_llama", env = "WEFT_BENCH_FILE=" .. folder }
    local timed, _, told = program.run { "bench", "--model", "spec/fixtures/models/demo_llama", "--context", "8", "--steps", "1",
      env = "WEFT_BENCH_FILE=" .. folder }
    files.remove(folder)
    assert.same({ 0, ("weft: the figures were not written down: %s: Is a directory (WEFT_BENCH_FILE names the file)\n"):format(folder) }, { timed, told })
    assert.equal(0, code)
    assert.matches("not measured", out, 1, true)
    assert.equal(("weft: the measured times are left out: cannot read %s: Is a directory (WEFT_BENCH_FILE names the file)\n"):format(folder), err)
  end)
end)
