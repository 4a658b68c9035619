--- spec/model/source_spec.lua - boxes of one weight, from memory and from nothing.
local core = require "weft.core"

local function ramp(shape, dtype)
  local n, values = 1, {}
  for _, size in ipairs(shape) do n = n * size end
  for i = 1, n do values[i] = i - 1 end
  return core.tensor(shape, dtype or "float32", values)
end

describe("weft.source", function()
  it("reads boxes of one to four dimensions", function()
    local source = core.source("w", ramp { 2, 3, 4, 5 })
    assert.same({ 2, 3, 4, 5 }, source.shape)
    assert.same({ 86, 87, 91, 92, 106, 107, 111, 112 }, source:read({ 1, 1, 1, 1 }, { 1, 2, 2, 2 }):totable())
    assert.same({ 60, 61, 62, 63 }, source:read({ 1, 0, 0, 0 }, { 1, 1, 1, 4 }):totable())
    assert.same({ 7, 8 }, core.source("v", ramp { 9 }):read({ 7 }, { 2 }):totable())
    assert.same({ 0 }, core.source("s", core.tensor {}):tensor():totable())
    assert.same({ 4, 5, 7, 8 }, core.source("m", ramp { 3, 3 }):read({ 1, 1 }, { 2, 2 }):totable())
    assert.same({ 3, 4, 5, 6, 7, 8 }, core.source("m", ramp { 3, 3 }):read({ 1, 0 }, { 2, 3 }):totable())
    assert.equal(0, core.source("m", ramp { 3, 3 }):read({ 3, 0 }, { 0, 3 }).numel)
  end)

  it("converts while it reads", function()
    for _, from in ipairs { "float32", "bfloat16", "float16", "float8_e4m3", "int32", "uint8" } do
      for _, to in ipairs { "float32", "bfloat16", "float16" } do
        local t = core.source("w", ramp({ 3, 5 }, from)):read({ 1, 1 }, { 2, 3 }, to)
        assert.equal(to, t.dtype)
        assert.same({ 6, 7, 8, 11, 12, 13 }, t:totable())
      end
    end
  end)

  it("refuses boxes outside, and dtypes that cannot hold the values", function()
    local source = core.source("w", ramp { 3, 4 })
    assert.error_matches(function() source:read({ 2, 0 }, { 2, 4 }) end, "tensor 'w': 2 from 2 of dimension 0, which has 3", 1, true)
    assert.error_matches(function() source:read({ 0 }, { 2 }) end, "has 2 dimensions, got 1 starts", 1, true)
    assert.error_matches(function() source:read({ -1, 0 }, { 1, 1 }) end, "integer from 0 up", 1, true)
    assert.error_matches(function() source:tensor "fp8" end, "holds float32 and cannot be read as float8_e4m3", 1, true)
    assert.error_matches(function() source:tensor "int32" end, "cannot be read as int32", 1, true)
    assert.error_matches(function() core.source("w", ramp({ 3, 4 }):transpose(0, 1)) end, "contiguous tensor expected", 1, true)
  end)

  it("keeps the tensor that it was made of", function()
    local source = core.source("w", ramp { 4 })
    collectgarbage() collectgarbage()
    assert.same({ 0, 1, 2, 3 }, source:tensor():totable())
  end)
end)

describe("dummy weights", function()
  local dummy = assert(core.checkpoint.open(nil, { format = "dummy" }))

  local function moments(values)
    local sum, squares = 0, 0
    for _, v in ipairs(values) do
      sum = sum + v
      squares = squares + v * v
    end
    local mean = sum / #values
    return mean, math.sqrt(squares / #values - mean * mean)
  end

  it("are spread by 0.02, and norms lie near 1", function()
    local mean, spread = moments(dummy:source("a.weight", { shape = { 100, 301 }, dtype = "float32" }):tensor():totable())
    assert.is_true(math.abs(mean) < 5e-4 and math.abs(spread - 0.02) < 3e-4)
    mean = moments(dummy:source("x.input_layernorm.weight", { shape = { 5000 } }):tensor():totable())
    assert.is_true(math.abs(mean - 1) < 1e-3)
    for _, v in ipairs(dummy:source("q_norm.weight", { shape = { 5000 } }):tensor():totable()) do assert.is_true(v >= 0.97 and v <= 1.03) end
  end)

  it("are the same for every cut", function()
    local source = dummy:source("model.layers.3.mlp.down_proj.weight", { shape = { 7, 5000 }, dtype = "float32" })
    local whole = source:tensor()
    local box = source:read({ 2, 1111 }, { 4, 3001 })
    assert.same(whole:narrow(0, 2, 4):narrow(1, 1111, 3001):clone():totable(), box:totable())
    assert.same(whole:narrow(0, 5, 2):clone():totable(), source:read({ 5, 0 }, { 2, 5000 }):totable())
    local again = dummy:source("model.layers.3.mlp.down_proj.weight", { shape = { 7, 5000 }, dtype = "float32" })
    assert.equal(whole:get(6, 4999), again:read({ 6, 4999 }, { 1, 1 }):get(0, 0))
  end)

  it("differ between names and rows", function()
    local a = dummy:source("a", { shape = { 2, 64 } }):tensor()
    local b = dummy:source("b", { shape = { 2, 64 } }):tensor()
    assert.are_not.same(a:totable(), b:totable())
    assert.are_not.same(a:select(0, 0):totable(), a:select(0, 1):totable())
  end)

  it("round to their own dtype first, whatever they are read as", function()
    local source = dummy:source("a", { shape = { 300 }, dtype = "bfloat16" })
    assert.same(source:tensor():totable(), source:tensor("float32"):totable())
    source = dummy:source("a.weight", { shape = { 300 }, dtype = "fp8" })
    assert.equal("float8_e4m3", source.dtype)
    assert.same(source:tensor():totable(), source:tensor("float32"):totable())
  end)

  it("are near 0.02 as fp8 times their scales, without a NaN", function()
    local values = dummy:source("w.weight", { shape = { 64, 500 }, dtype = "fp8" }):tensor():totable()
    local _, spread = moments(values)
    for _, v in ipairs(values) do assert.is_true(v >= -448 and v <= 448) end
    local scales = dummy:source("w.weight_scale_inv", { shape = { 30, 30 } })
    assert.equal("float32", scales.dtype)
    local scale = moments(scales:tensor():totable())
    for _, v in ipairs(scales:tensor():totable()) do assert.is_true(v > 1e-4 and v < 3e-4) end
    assert.is_true(math.abs(spread * scale - 0.02) < 0.004, spread * scale)
  end)

  it("ask for a shape, and have every name but scales", function()
    assert.error_matches(function() dummy:source "a" end, "a dummy weight needs its shape", 1, true)
    assert.is_true(dummy:has "lm_head.weight")
    assert.is_false(dummy:has "a.weight_scale_inv")
  end)
end)
