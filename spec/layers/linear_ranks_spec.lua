-- spec/layers/linear_ranks_spec.lua - linear layers on 2, 4 and 8 ranks give what one rank gives.
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random = fixtures.difference, fixtures.random

-- gate_up -> silu_mul -> down with biases, and a gathered column layer behind them.
local function run(dtype)
  local world, rank = fixtures.join_tensor_group()
  local gate_up = core.merged_column_linear { input_size = 16, output_sizes = { 24, 24 }, bias = true }
  gate_up:load(0, fixtures.source("gate", { 24, 16 }, 1, 0.5, dtype)):load(1, fixtures.source("up", { 24, 16 }, 2, 0.5, dtype))
  gate_up:load_bias(0, fixtures.source("gb", { 24 }, 3, 0.5, dtype)):load_bias(1, fixtures.source("ub", { 24 }, 4, 0.5, dtype))
  local down = core.row_linear { input_size = 24, output_size = 16, bias = true }
  down:load(fixtures.source("down", { 16, 24 }, 5, 0.5, dtype)):load_bias(fixtures.source("db", { 16 }, 6, 1, dtype))
  local column = core.column_linear { input_size = 16, output_size = 40, gather_output = true }
  column:load(fixtures.source("c", { 40, 16 }, 7, 0.5, dtype))
  local hidden = core.silu_mul(gate_up:forward(random({ 5, 16 }, 8, 1, dtype)))
  local y = down:forward(hidden)
  return { y = y:totable(), z = column:forward(y):totable(), width = hidden.shape[2], bytes = down.weight_bytes, rank = rank, world = world }
end

describe("linear layers over ranks", function()
  for _, world in ipairs { 2, 4, 8 } do
    it(("give on %d ranks what one gives, a row layer's bias added once"):format(world), function()
      local whole = core.spawn(1, run, "float32")[1]
      local results = core.spawn(world, run, "float32")
      for _, result in ipairs(results) do
        assert.equal(24 / world, result.width)
        assert.is_true(difference(whole.y, result.y) < 1e-5)
        assert.is_true(difference(whole.z, result.z) < 1e-5)
        assert.same(results[1].y, result.y)
      end
      assert.equal(results[2].bytes + 16 * 4, results[1].bytes)
    end)
  end

  it("agree in bfloat16 within its rounding", function()
    local whole = core.spawn(1, run, "bfloat16")[1]
    for _, result in ipairs(core.spawn(4, run, "bfloat16")) do
      assert.is_true(difference(whole.y, result.y) < 3e-2)
    end
  end)

  it("refuse an axis that is not this rank's place in its group", function()
    local ok, err = pcall(core.spawn, 2, function()
      local world = fixtures.join_tensor_group()
      core.row_linear { input_size = 8, output_size = 8, axis = core.axis(world, 0) }
    end)
    assert.is_false(ok)
    assert.matches("the plan says rank 0 of tensor 2, but this rank is number 1", tostring(err), 1, true)
  end)

  it("never sum over another group when theirs is missing", function()
    local ok, err = pcall(core.spawn, 2, function()
      fixtures.join_tensor_group()
      core.row_linear { input_size = 8, output_size = 8, axis = core.axis(2, core.rank().rank, "attention_tensor") }
    end)
    assert.is_false(ok)
    assert.matches("attention_tensor", tostring(err), 1, true)
  end)
end)
