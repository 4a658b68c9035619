-- spec/layers/norm_spec.lua - RMSNorm: fused residual, per head, and the pieces between products.
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random = fixtures.difference, fixtures.random

local function norm_of(values, gains, eps)
  local sum, y = 0, {}
  for _, x in ipairs(values) do sum = sum + x * x end
  local scale = 1 / math.sqrt(sum / #values + eps)
  for i, x in ipairs(values) do y[i] = x * scale * gains[i] end
  return y
end

describe("weft.rms_norm", function()
  local gains = { 1, 2, 0.5, -1 }
  local function layer(eps, name)
    return core.rms_norm { hidden_size = 4, eps = eps, name = name }:load(core.source("norm.weight", core.tensor({ 4 }, "float32", gains)))
  end

  it("divides by the root of the mean square plus eps", function()
    local x = core.tensor({ 2, 4 }, "float32", { 1, 2, 3, 4, 0, 0, 0, 0 })
    local y = layer(0.5):forward(x):totable()
    assert.is_true(difference(norm_of({ 1, 2, 3, 4 }, gains, 0.5), { y[1], y[2], y[3], y[4] }) < 1e-6)
    assert.same({ 0, 0, 0, 0 }, { y[5], y[6], y[7], -y[8] })
  end)

  it("adds x into the residual first, and leaves the sum there", function()
    local x, residual = core.tensor({ 1, 4 }, "float32", { 1, 2, 3, 4 }), core.tensor({ 1, 4 }, "float32", { 1, 1, -1, 0 })
    local y = layer(0):forward(x, residual)
    assert.same({ 2, 3, 2, 4 }, residual:totable())
    assert.same({ 1, 2, 3, 4 }, x:totable())
    assert.is_true(difference(norm_of({ 2, 3, 2, 4 }, gains, 0), y) < 1e-6)
  end)

  it("normalises each head of packed qkv in place, few tokens or many", function()
    for _, tokens in ipairs { 1, 2, 9 } do
      local packed = random({ tokens, 20 }, 3)
      local before = packed:clone()
      layer(1e-6):forward_heads(packed:narrow(1, 4, 12))
      for t = 0, tokens - 1 do
        for h = 0, 2 do
          local head = before:select(0, t):narrow(0, 4 + 4 * h, 4):totable()
          assert.is_true(difference(norm_of(head, gains, 1e-6), packed:select(0, t):narrow(0, 4 + 4 * h, 4):totable()) < 1e-5)
        end
      end
      assert.same(before:narrow(1, 0, 4):totable(), packed:narrow(1, 0, 4):totable())
      assert.same(before:narrow(1, 16, 4):totable(), packed:narrow(1, 16, 4):totable())
    end
  end)

  it("computes in float32 from bfloat16", function()
    local x = random({ 3, 4 }, 5, 1, "bfloat16")
    local y = layer(1e-6):forward(x)
    assert.equal("bfloat16", y.dtype)
    assert.is_true(difference(y, layer(1e-6):forward(x:clone("float32"))) < 2e-2)
  end)

  it("names itself when something does not fit", function()
    local bare = core.rms_norm { hidden_size = 4, name = "model.norm" }
    assert.error_matches(function() bare:forward(core.tensor { 1, 4 }) end, "weights of model.norm were not loaded", 1, true)
    assert.error_matches(function() bare:load(fixtures.source("model.norm.weight", { 3 }, 1)) end,
      "tensor 'model.norm.weight': wanted [4], found [3]", 1, true)
    local ready = layer(0, "model.norm")
    assert.error_matches(function() ready:forward(core.tensor { 1, 5 }) end, "model.norm: wanted floats [tokens, 4], found float32[1, 5]", 1, true)
    assert.error_matches(function() ready:forward(core.tensor { 1, 4 }, core.tensor { 2, 4 }) end, "wanted a residual like x", 1, true)
    assert.error_matches(function() ready:forward_heads(core.tensor { 1, 6 }) end, "model.norm", 1, true)
    assert.error_matches(function() core.rms_norm { hidden_size = 4, eps = -1 } end, "eps", 1, true)
  end)
end)

describe("core.silu_mul", function()
  it("gates the second half with the first", function()
    local y = core.silu_mul(core.tensor({ 1, 4 }, "float32", { 1, -2, 3, 5 })):totable()
    assert.is_true(difference({ 3 / (1 + math.exp(-1)), -10 / (1 + math.exp(2)) }, y) < 1e-6)
    assert.error_matches(function() core.silu_mul(core.tensor { 1, 3 }) end, "silu_mul", 1, true)
  end)
end)

describe("core.add", function()
  it("gives a new tensor and leaves both summands", function()
    local a, b = core.tensor({ 1, 2 }, "float32", { 1, 2 }), core.tensor({ 1, 2 }, "float32", { 10, 20 })
    assert.same({ 11, 22 }, core.add(a, b):totable())
    assert.same({ 1, 2, 10, 20 }, { a:get(0, 0), a:get(0, 1), b:get(0, 0), b:get(0, 1) })
    assert.error_matches(function() core.add(a, core.tensor { 2, 2 }) end, "add: wanted two tensors of one shape", 1, true)
  end)
end)
