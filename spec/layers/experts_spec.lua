--- spec/layers/experts_spec.lua - a mixture of experts cut over ranks: loading, sums, refusals.
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random = fixtures.difference, fixtures.random

-- Runs on a rank: 8 experts 24 wide over `expert` parts of the world, loaded in one of two ways.
local function run(expert, style, dtype)
  local world, rank = fixtures.join_tensor_group()
  local cut = world / expert
  local plan = core.plan { input = core.axis(cut, rank % cut, "expert_tensor"), output = core.axis(world, rank),
    expert = core.axis(expert, math.floor(rank / cut), "expert") }
  local experts = core.experts { num_experts = 8, hidden_size = 16, intermediate_size = 24, parallel_plan = plan }
  local gate_up, down = random({ 8, 48, 16 }, 1, 0.5, dtype), random({ 8, 16, 24 }, 2, 0.5, dtype)
  if style == "fused" then
    experts:load("gate_up", core.source("gate_up", gate_up)):load("down", core.source("down", down))
  else
    for e = experts.first_expert, experts.first_expert + experts.num_local_experts - 1 do
      local both = gate_up:select(0, e)
      experts:load("gate", e, core.source("w1", both:narrow(0, 0, 24):clone()))
      experts:load("up", e, core.source("w3", both:narrow(0, 24, 24):clone()))
      experts:load("down", e, core.source("w2", down:select(0, e):clone()))
    end
  end
  local router = core.router { hidden_size = 16, num_experts = 8, num_experts_per_tok = 2, scoring = "sigmoid", bias = true }
  router:load(fixtures.source("gate", { 8, 16 }, 3, 1)):load_bias(fixtures.source("bias", { 8 }, 4, 0.3))
  local x = random({ 9, 16 }, 5, 1, dtype)
  local ids, weights = router:forward(x)
  return { y = experts:forward(x, ids, weights):totable(), ids = ids:totable(), bytes = experts.weight_bytes,
    local_experts = experts.num_local_experts, width = experts.local_intermediate_size }
end

describe("experts over ranks", function()
  local whole = core.spawn(1, run, 1, "single", "float32")[1]

  for _, cut in ipairs { { 2, 1 }, { 2, 2 }, { 4, 2 }, { 8, 8 }, { 8, 4 }, { 8, 1 } } do
    local world, expert = cut[1], cut[2]
    it(("give on %d ranks with %d expert parts what one rank gives"):format(world, expert), function()
      for _, result in ipairs(core.spawn(world, run, expert, world == 8 and "fused" or "single", "float32")) do
        assert.is_true(difference(whole.y, result.y) < 1e-5)
        assert.same(whole.ids, result.ids)
        assert.equal(8 / expert, result.local_experts)
        assert.equal(24 * expert / world, result.width)
        assert.equal(whole.bytes / world, result.bytes)
      end
    end)
  end

  it("are the same from a tensor for all experts and from one for each", function()
    assert.same(whole.y, core.spawn(1, run, 1, "fused", "float32")[1].y)
  end)

  it("agree in bfloat16 within its rounding", function()
    local bf16 = core.spawn(1, run, 1, "fused", "bfloat16")[1]
    for _, result in ipairs(core.spawn(4, run, 2, "single", "bfloat16")) do
      assert.is_true(difference(bf16.y, result.y) < 3e-2)
    end
  end)
end)

describe("fp8 experts", function()
  -- Two experts 200 wide, hidden 140: blocks are cut in both directions.
  local function make(options, style)
    local world, rank = fixtures.join_tensor_group()
    options.num_experts, options.hidden_size, options.intermediate_size = 2, 140, 200
    options.parallel_plan = core.plan { input = core.axis(world, rank, "tensor"), output = core.axis(world, rank) }
    local experts = core.experts(options)
    local gate_up, up_scale = random({ 2, 400, 140 }, 1, 8, "float8_e4m3"), random({ 2, 4, 2 }, 2, 0.1)
    local down, down_scale = random({ 2, 140, 200 }, 3, 8, "float8_e4m3"), random({ 2, 2, 2 }, 4, 0.1)
    if style == "fused" then
      experts:load("gate_up", core.source("gate_up", gate_up)):load("down", core.source("down", down))
      experts:load_scale("gate_up", core.source("gate_up_scale", up_scale)):load_scale("down", core.source("down_scale", down_scale))
    else
      for e = 0, 1 do
        local function part(name, first)
          experts:load(name, e, core.source(name, gate_up:select(0, e):narrow(0, first, 200):clone()))
          experts:load_scale(name, e, core.source(name .. "_scale", up_scale:select(0, e):narrow(0, 0, 2):clone()))
        end
        part("gate", 0)
        part("up", 200)
        experts:load("down", e, core.source("down", down:select(0, e):clone()))
        experts:load_scale("down", e, core.source("down_scale", down_scale:select(0, e):clone()))
      end
    end
    local ids = core.tensor({ 3, 1 }, "int32", { 1, 0, 1 })
    return experts:forward(random({ 3, 140 }, 5), ids, random({ 3, 1 }, 6)):totable()
  end

  for _, style in ipairs { "single", "fused" } do
    it("of " .. style .. " tensors give the same whole, cut inside blocks, and as floats", function()
      local whole = core.spawn(1, make, {}, style)[1]
      local largest = 0
      for _, v in ipairs(whole) do largest = math.max(largest, math.abs(v)) end
      assert.is_true(largest > 0.1)
      for _, world in ipairs { 2, 4, 8 } do
        for _, y in ipairs(core.spawn(world, make, {}, style)) do
          assert.is_true(difference(whole, y) < 1e-5 * largest)
        end
      end
      assert.is_true(difference(whole, core.spawn(2, make, { dequantize = true }, style)[1]) < 1e-5 * largest)
      local rounded = core.spawn(1, make, { quantize_activations = true }, style)[1]
      local change = difference(whole, rounded)
      assert.is_true(change > 1e-5 * largest and change < 0.2 * largest)
    end)
  end
end)

describe("experts refuse", function()
  local function refused(text, fn)
    local ok, err = pcall(fn)
    assert.is_false(ok)
    assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
  end
  local function new(options)
    options = options or {}
    options.num_experts, options.hidden_size, options.intermediate_size = 4, 8, 6
    return core.experts(options)
  end

  it("more choices than experts", function()
    refused("num_experts_per_tok (5) exceeds num_experts (4)", function()
      core.router { hidden_size = 8, num_experts = 4, num_experts_per_tok = 5 }
    end)
  end)

  it("to run when a part of an expert is missing, by its number and part", function()
    local experts = new()
    local x, ids, weights = random({ 1, 8 }, 1), core.tensor({ 1, 1 }, "int32", { 0 }), random({ 1, 1 }, 1)
    for e = 0, 3 do experts:load("gate", e, fixtures.source("w1", { 6, 8 }, 1)):load("down", e, fixtures.source("w2", { 8, 6 }, 1)) end
    for e = 0, 2 do experts:load("up", e, fixtures.source("w3", { 6, 8 }, 1)) end
    refused("weights of expert 3 of experts were not loaded (missing: up)", function() experts:forward(x, ids, weights) end)
    experts:load("up", 3, fixtures.source("w3", { 6, 8 }, 1))
    experts:forward(x, ids, weights)
  end)

  it("shapes, experts and dtypes that are not theirs", function()
    local experts = new()
    refused("tensor 'w1': wanted [6, 8], found [8, 6]", function() experts:load("gate", 0, fixtures.source("w1", { 8, 6 }, 1)) end)
    refused("holds experts 0 to 3, not 4", function() experts:load("gate", 4, fixtures.source("w1", { 6, 8 }, 1)) end)
    refused("tensor 'gate_up': wanted [4, 12, 8], found [3, 12, 8]", function()
      experts:load("gate_up", fixtures.source("gate_up", { 3, 12, 8 }, 1))
    end)
    experts:load("gate", 0, fixtures.source("w1", { 6, 8 }, 1))
    refused("wanted float32 like the other weights of experts, found bfloat16", function()
      experts:load("gate", 1, fixtures.source("w1", { 6, 8 }, 1, 1, "bfloat16"))
    end)
  end)

  it("fp8 weights whose scales are missing or of another shape", function()
    local experts = new()
    for e = 0, 3 do
      for part, shape in pairs { gate = { 6, 8 }, up = { 6, 8 }, down = { 8, 6 } } do
        experts:load(part, e, fixtures.source(part, shape, 1, 1, "float8_e4m3"))
        if e < 3 then experts:load_scale(part, e, fixtures.source(part, { 1, 1 }, 1)) end
      end
    end
    refused("tensor 'w1_scale': wanted [1, 1], found [2, 1]", function() experts:load_scale("gate", 3, fixtures.source("w1_scale", { 2, 1 }, 1)) end)
    refused("the fp8 scales of expert 3 of experts were not loaded (missing: gate, up, down)", function()
      experts:forward(random({ 1, 8 }, 1), core.tensor({ 1, 1 }, "int32", { 0 }), random({ 1, 1 }, 1))
    end)
  end)

  it("a width that does not divide over the ranks", function()
    refused("6 columns of each expert do not divide over 4 ranks", function()
      new { parallel_plan = core.plan { input = core.axis(4, 0, "expert_tensor"), output = core.axis(4, 0) } }
    end)
  end)
end)
