-- spec/layers/linear_spec.lua - column, merged column, row and replicated linear layers of one rank.
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random, source = fixtures.difference, fixtures.random, fixtures.source

local function replicated(input, output, weight)
  return core.replicated_linear { input_size = input, output_size = output }:load(weight)
end

describe("weft.linear", function()
  it("computes x W^T + b", function()
    local linear = core.replicated_linear { input_size = 2, output_size = 3, bias = true }
    linear:load(core.source("w", core.tensor({ 3, 2 }, "float32", { 1, 2, 3, 4, 5, 6 })))
    linear:load_bias(core.source("b", core.tensor({ 3 }, "float32", { 10, 20, 30 })))
    assert.same({ 15, 31, 47 }, linear:forward(core.tensor({ 1, 2 }, "float32", { 1, 2 })):totable())
    assert.same({ 0, 3 }, linear:forward(core.tensor { 0, 2 }).shape)
    assert.equal(4 * 9, linear.weight_bytes)
  end)

  it("gives each rank of a column layer its own columns of the result", function()
    local weight, x = source("w", { 12, 8 }, 1), random({ 3, 8 }, 2)
    local whole = replicated(8, 12, weight):forward(x)
    for r = 0, 3 do
      local column = core.column_linear { input_size = 8, output_size = 12, axis = core.axis(4, r) }:load(weight)
      assert.equal(3, column.local_output_size)
      assert.is_true(difference(column:forward(x), whole:narrow(1, 3 * r, 3)) < 1e-6)
    end
  end)

  it("sums over the ranks of a row layer to the whole result", function()
    local weight, x = source("w", { 5, 12 }, 1), random({ 3, 12 }, 2)
    local whole = replicated(12, 5, weight):forward(x)
    local sum
    for r = 0, 3 do
      local row = core.row_linear { input_size = 12, output_size = 5, axis = core.axis(4, r), reduce_results = false }
      local part = row:load(weight):forward(x:narrow(1, 3 * r, 3))
      sum = sum and core.add(sum, part) or part
    end
    assert.is_true(difference(sum, whole) < 1e-5)
  end)

  it("shards gate and up each for itself, fused on disk or not", function()
    local function shard(r, fused)
      local gate_up = core.merged_column_linear { input_size = 4, output_sizes = { 8, 8 }, axis = core.axis(2, r) }
      if fused then
        gate_up:load(nil, fixtures.labelled("gate_up", 16, 4))
      else
        gate_up:load(0, fixtures.labelled("gate", 8, 4)):load(1, fixtures.labelled("up", 8, 4))
      end
      return fixtures.rows_of(gate_up, 4)
    end
    assert.same({ 4, 5, 6, 7, 4, 5, 6, 7 }, shard(1, false))
    assert.same({ 0, 1, 2, 3, 8, 9, 10, 11 }, shard(0, true))
    assert.same({ 4, 5, 6, 7, 12, 13, 14, 15 }, shard(1, true))
  end)

  it("applies the scale of the global block to each fp8 row and column, at any phase", function()
    -- 320 rows in two shards of 160: the second begins in the middle of block 1. The columns too.
    local weight = random({ 320, 320 }, 5, 2):clone("fp8")
    local scales = random({ 3, 3 }, 6)
    local dequantised = weight:clone("float32")
    for i = 0, 2 do
      for j = 0, 2 do
        local block = dequantised:narrow(0, 128 * i, math.min(128, 320 - 128 * i)):narrow(1, 128 * j, math.min(128, 320 - 128 * j))
        local s, values = scales:get(i, j), block:totable()
        for n = 1, #values do values[n] = values[n] * s end
        block:copy(core.tensor(block.shape, "float32", values))
      end
    end
    local w, s, x = core.source("w", weight), core.source("w_scale_inv", scales), random({ 2, 320 }, 7)
    local whole = replicated(320, 320, core.source("d", dequantised)):forward(x)
    local sum
    for r = 0, 1 do
      local column = core.column_linear { input_size = 320, output_size = 320, axis = core.axis(2, r) }
      column:load(w):load_scale(s)
      assert.equal("float8_e4m3", column.dtype)
      assert.is_true(difference(column:forward(x), whole:narrow(1, 160 * r, 160)) < 1e-4)
      local row = core.row_linear { input_size = 320, output_size = 320, axis = core.axis(2, r), reduce_results = false }
      local part = row:load(w):load_scale(s):forward(x:narrow(1, 160 * r, 160))
      sum = sum and core.add(sum, part) or part
    end
    assert.is_true(difference(sum, whole) < 1e-4)
  end)

  it("finds the scales of parts that are fused on disk by their rows there", function()
    local weight, scales = random({ 192, 128 }, 5, 2):clone("fp8"), core.tensor({ 2, 1 }, "float32", { 1, 4 })
    local x = random({ 1, 128 }, 6)
    local plain = replicated(128, 192, core.source("d", weight:clone("float32"))):forward(x):totable()
    local merged = core.merged_column_linear { input_size = 128, output_sizes = { 96, 96 }, axis = core.axis(1, 0) }
    merged:load(nil, core.source("w", weight)):load_scale(nil, core.source("s", scales))
    for i = 129, 192 do plain[i] = plain[i] * 4 end
    assert.is_true(difference(merged:forward(x), plain) < 1e-4)
  end)

  it("keeps the dtype of the checkpoint unless another is asked for", function()
    local half = source("w", { 4, 4 }, 1, 1, "bfloat16")
    assert.equal("bfloat16", replicated(4, 4, half).dtype)
    local wide = core.replicated_linear { input_size = 4, output_size = 4, dtype = "float32" }:load(half)
    assert.same({ "float32", 64 }, { wide.dtype, wide.weight_bytes })
    local merged = core.merged_column_linear { input_size = 4, output_sizes = { 4, 4 }, name = "gate_up" }:load(0, half)
    assert.error_matches(function() merged:load(1, source("up", { 4, 4 }, 1)) end,
      "tensor 'up': wanted bfloat16 like the other parts of gate_up, found float32", 1, true)
    assert.error_matches(function() replicated(2, 1, core.source("ids", core.tensor({ 1, 2 }, "int32"))) end,
      "cannot be int32", 1, true)
  end)

  it("says in one line what does not fit", function()
    local function column(t)
      t.input_size, t.output_size = 8, t.output_size or 12
      return core.column_linear(t)
    end
    assert.error_matches(function() column { axis = core.axis(5, 0) } end, "12 output rows do not divide over 5", 1, true)
    assert.error_matches(function() column { dtype = "int32" } end, "dtype must be auto, float32, bfloat16 or float16, got 'int32'", 1, true)
    assert.error_matches(function() column { biass = true } end, "biass", 1, true)
    assert.error_matches(function() column { axis = 3 } end, "axis must be a weft.axis, got number", 1, true)
    assert.error_matches(function()
      core.row_linear { input_size = 8, output_size = 4, bias = true, axis = core.axis(2, 0), reduce_results = false }
    end, "added once per rank", 1, true)
    assert.error_matches(function() core.row_linear { input_size = 8, output_size = 4, axis = core.axis(2, 0) } end, "tensor", 1, true)
    assert.error_matches(function() column({}):forward(core.tensor { 1, 8 }) end, "weights of column_linear were not loaded", 1, true)
    local fp8 = column({}):load(core.source("w", core.tensor({ 12, 8 }, "fp8")))
    assert.error_matches(function() fp8:forward(core.tensor { 1, 8 }) end, "the fp8 scales of column_linear were not loaded", 1, true)
  end)

  it("gives all its memory back", function()
    collectgarbage() collectgarbage()
    local before = core.memory().live_bytes
    local linear = core.replicated_linear { input_size = 64, output_size = 64 }:load(core.source("w", core.tensor { 64, 64 }))
    assert.is_true(core.memory().live_bytes >= before + linear.weight_bytes)
    linear:close()
    assert.error_matches(function() linear:forward(core.tensor { 1, 64 }) end, "closed", 1, true)
    linear = nil
    collectgarbage() collectgarbage()
    assert.equal(before, core.memory().live_bytes)
  end)
end)
