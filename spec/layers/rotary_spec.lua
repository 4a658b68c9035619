-- spec/layers/rotary_spec.lua - frequencies of each kind of rotary embedding (SEMANTICS 6.3).
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"

local function rotary(dim, theta, max_position, scaling)
  return core.rotary { head_size = dim, max_position = max_position, rope_theta = theta, rope_scaling = scaling }
end

local function close(wanted, found)
  assert.is_true(math.abs(found / wanted - 1) < 2e-9, ("wanted %.10g, found %.10g"):format(wanted, found))
end

describe("weft.rotary", function()
  it("turns the halves of a head by position * theta^(-2i / dim)", function()
    local r = rotary(4, 10000, 16)
    local q = core.tensor({ 2, 8 }, "float32", { 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8 })
    r:forward(core.tensor({ 2 }, "int32", { 0, 3 }), q)
    local expected = { 1, 2, 3, 4, 5, 6, 7, 8 }
    for head = 0, 1 do
      for i = 0, 1 do
        local a = 3 * 10000 ^ (-2 * i / 4)
        local x1, x2 = 4 * head + i + 1, 4 * head + i + 3
        expected[#expected + 1] = x1 * math.cos(a) - x2 * math.sin(a)
      end
      for i = 0, 1 do
        local a = 3 * 10000 ^ (-2 * i / 4)
        local x1, x2 = 4 * head + i + 1, 4 * head + i + 3
        expected[#expected + 1] = x2 * math.cos(a) + x1 * math.sin(a)
      end
    end
    assert.is_true(fixtures.difference(q, expected) < 1e-5)
  end)

  it("turns views of packed qkv in place and nothing beside them", function()
    local packed = fixtures.random({ 3, 20 }, 1)
    local before, positions = packed:clone(), core.tensor({ 3 }, "int32", { 5, 0, 9 })
    local q, k = packed:narrow(1, 0, 8), packed:narrow(1, 8, 4)
    local q_alone, k_alone = q:clone(), k:clone()
    local r = rotary(4, 10000, 16)
    r:forward(positions, q, k)
    r:forward(positions, q_alone)
    r:forward(positions, k_alone:view { 3, 1, 4 })
    assert.same(q_alone:totable(), q:totable())
    assert.same(k_alone:totable(), k:totable())
    assert.same(before:narrow(1, 12, 8):totable(), packed:narrow(1, 12, 8):totable())
    assert.is_true(fixtures.difference(before, packed) > 0.1)
  end)

  it("leaves the dimensions beyond a partial rotary_dim alone", function()
    local r = core.rotary { head_size = 128, rotary_dim = 64, max_position = 16, rope_theta = 5e6 }
    local f = r:inv_freq()
    for i, wanted in pairs { [0] = 1, 6.175287581e-1, 3.813417671e-1, [16] = 4.472135955e-4, [31] = 3.238715564e-7 } do close(wanted, f[i + 1]) end
    local x = fixtures.random({ 1, 128 }, 2)
    local before = x:clone()
    r:forward(core.tensor({ 1 }, "int32", { 7 }), x)
    assert.same(before:narrow(1, 64, 64):totable(), x:narrow(1, 64, 64):totable())
    assert.equal(64, core.rotary { head_size = 128, max_position = 8, rope_scaling = { partial_rotary_factor = 0.5 } }.rotary_dim)
  end)

  it("divides the angles of linear scaling and lengthens its table", function()
    local r = rotary(8, 10000, 100, { type = "linear", factor = 4 })
    close(10000 ^ -0.25 / 4, r:inv_freq()[2])
    assert.equal(400, r.max_positions)
  end)

  it("leaves dynamic scaling alone up to the model's length and refuses what is beyond", function()
    local r = rotary(8, 10000, 64, { rope_type = "dynamic", factor = 2, original_max_position_embeddings = 16 })
    assert.same(rotary(8, 10000, 64):inv_freq(), r:inv_freq())
    r:forward(core.tensor({ 1 }, "int32", { 63 }), core.tensor { 1, 8 })
    assert.error_matches(function() r:forward(core.tensor({ 1 }, "int32", { 64 }), core.tensor { 1, 8 }) end,
      "position 64 is beyond the model's 64", 1, true)
    close((10000 * 3 ^ (8 / 6)) ^ -0.25, rotary(8, 10000, 64, { type = "dynamic", alpha = 3 }):inv_freq()[2])
  end)

  it("ramps llama3 between long and short waves", function()
    local f = rotary(128, 5e5, 131072, { rope_type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4,
      original_max_position_embeddings = 8192 }):inv_freq()
    for i, wanted in pairs { [28] = 3.211445995e-3, [29] = 2.166570764e-3, [31] = 8.567514129e-4, [34] = 1.785078128e-4,
      [35] = 9.556212354e-5 } do
      close(wanted, f[i + 1])
    end
    close(5e5 ^ (-56 / 128), f[29])
    close(5e5 ^ (-70 / 128) / 8, f[36])
  end)

  it("ramps yarn over the dimensions and enlarges cos and sin", function()
    local r = rotary(128, 1e6, 32768, { type = "yarn", factor = 4, original_max_position_embeddings = 32768 })
    local f = r:inv_freq()
    for i, wanted in pairs { [23] = 6.978305849e-3, [30] = 1.064360981e-3, [40] = 4.445698525e-5, [63] = 3.102344402e-7 } do
      close(wanted, f[i + 1])
    end
    assert.is_true(math.abs(r.scale - 1.138629436) < 1e-9)
    assert.equal(131072, r.max_positions)
    local x = core.tensor({ 1, 128 }, "float32")
    x:fill(1)
    r:forward(core.tensor({ 1 }, "int32", { 0 }), x)
    assert.is_true(math.abs(x:get(0, 5) - r.scale) < 1e-6)
    local function scale(t)
      t.type, t.factor = "yarn", 4
      return rotary(128, 1e6, 32768, t).scale
    end
    assert.equal(1.5, scale { attention_factor = 1.5 })
    assert.equal(2, scale { apply_yarn_scaling = false, attn_factor = 2 })
    assert.equal(1, scale { mscale = 1, mscale_all_dim = 1 })
  end)

  it("names an unknown type and the known ones", function()
    assert.error_matches(function() rotary(8, 10000, 16, { type = "longrope" }) end,
      "unknown rope type 'longrope' (known: default, linear, dynamic, llama3, yarn)", 1, true)
    assert.error_matches(function() rotary(8, 10000, 16, { type = "linear", rope_type = "yarn" }) end, "rope_type 'yarn' and type 'linear'", 1, true)
    assert.error_matches(function() rotary(8, 10000, 16, { type = "linear" }) end, "of type 'linear' needs factor", 1, true)
    assert.error_matches(function() rotary(8, 10000, 16, { type = "linear", factor = 2, facto = 2 }) end, "facto", 1, true)
    assert.error_matches(function() rotary(8, 10000, 16, { type = "linear", factor = 0 }) end, "factor must be from 1", 1, true)
  end)

  it("refuses sizes and positions that do not fit", function()
    assert.error_matches(function() core.rotary { head_size = 8, rotary_dim = 7, max_position = 4 } end, "must be even", 1, true)
    assert.error_matches(function() core.rotary { head_size = 8, rotary_dim = 16, max_position = 4 } end, "to head_size 8", 1, true)
    local r = rotary(8, 10000, 4)
    local function forward(positions, x) r:forward(core.tensor({ #positions }, "int32", positions), x) end
    assert.error_matches(function() forward({ -1 }, core.tensor { 1, 8 }) end, "position -1 is negative", 1, true)
    assert.error_matches(function() forward({ 0, 1 }, core.tensor { 1, 8 }) end, "wanted floats [2, heads * 8], found float32[1, 8]", 1, true)
    assert.error_matches(function() forward({ 0 }, core.tensor { 1, 12 }) end, "heads * 8", 1, true)
    forward({}, core.tensor { 0, 8 })
  end)

  it("makes the rows of its table when they are first asked for", function()
    local r = rotary(8, 10000, 2 ^ 20)
    assert.equal(0, r.weight_bytes)
    r:forward(core.tensor({ 1 }, "int32", { 600 }), core.tensor { 1, 8 })
    assert.is_true(r.weight_bytes >= 601 * 32 and r.weight_bytes < 2000 * 32)
    r:reserve(5000)
    assert.is_true(r.weight_bytes >= 5000 * 32)
  end)
end)
