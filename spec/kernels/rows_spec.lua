--- spec/kernels/rows_spec.lua - silu, sums, embedding, gathering and checksums of rows.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

local widths = { 1, 3, 8, 15, 16, 17, 33, 1023, 1024, 1025 }

describe("ops.silu_mul", function()
  it("matches silu(gate) * up over the whole range of floats", function()
    ref.each_isa(function()
      for _, cols in ipairs(widths) do
        for _, dtype in ipairs(ref.dtypes) do
          local x, want = ref.random({ 2, 2 * cols }, dtype, cols, 12), {}
          for r = 0, 1 do
            for i = 0, cols - 1 do
              local g = x:get(r, i)
              want[#want + 1] = g / (1 + math.exp(-g)) * x:get(r, cols + i)
            end
          end
          ref.close(ops.silu_mul { x = x }, want, nil, dtype .. " " .. cols)
        end
      end
      local far = core.tensor({ 6, 2 }, "float32", { 200, 1, -200, 1, -88, 1, 3e38, 1, -3e38, 1, -100, 1 })
      local y = ops.silu_mul { x = far }:totable()
      assert.same({ 200, 3e38 }, { y[1], math.floor(y[4] / 1e38 + 0.5) * 1e38 })
      assert.is_true(y[2] == 0 and y[5] == 0 and math.abs(y[3] / (-88 * math.exp(-88)) - 1) < 1e-5)
      assert.is_true(math.abs(y[6]) < 1e-41)
    end)
  end)
end)

describe("ops.checksum", function()
  it("sums all words of a tensor, a last part of one too", function()
    ref.each_isa(function()
      for _, n in ipairs { 0, 1, 2, 7, 8, 63, 64, 65, 20001 } do
        assert.equal(n, ops.checksum { x = core.tensor({ 2 * n }, "int32", (function()
          local words = {}
          for i = 1, n do words[2 * i - 1], words[2 * i] = 1, 0 end
          return words
        end)()) })
      end
      assert.equal(2 ^ 32 + 7, ops.checksum { x = core.tensor({ 3 }, "int32", { 6, 1, 1 }) })
    end)
  end)
end)

describe("ops.add, ops.embedding and ops.gather_rows", function()
  it("adds tensors or one row to all, in place or not", function()
    ref.each_isa(function()
      for _, dtype in ipairs(ref.dtypes) do
        local a, b = ref.random({ 3, 41 }, dtype, 1), ref.random({ 3, 41 }, dtype, 2)
        local want, row = {}, {}
        for i, v in ipairs(a:totable()) do want[i] = v + b:totable()[i] end
        for i, v in ipairs(a:totable()) do row[i] = v + b:get(0, (i - 1) % 41) end
        ref.close(ops.add { a = a, b = b }, want)
        ref.close(ops.add { a = a, b = b:select(0, 0) }, row)
        ref.close(ops.add { a = a, b = ref.strided(b, 2), out = a }, want)
      end
    end)
  end)

  it("gives the rows of ids that this rank holds and zeros for others", function()
    for _, dtype in ipairs(ref.dtypes) do
      local w = ref.random({ 5, 37 }, dtype, 9)
      local y = ops.embedding { w = w, ids = { 10, 14, 9, 15, 12 }, first = 10 }
      assert.same(w:select(0, 0):totable(), y:select(0, 0):totable())
      assert.same(w:select(0, 4):totable(), y:select(0, 1):totable())
      assert.same(core.tensor({ 2, 37 }):totable(), y:narrow(0, 2, 2):totable())
      assert.equal("float32", ops.embedding { w = w, ids = { 10 }, first = 10, dtype = "float32" }.dtype)
    end
    assert.same({ 0, 4 }, ops.embedding { w = core.tensor { 2, 4 }, ids = {} }.shape)
    assert.same({ 0, 0 }, ops.embedding { w = core.tensor { 0, 2 }, ids = { 3 } }:totable())
  end)

  it("gathers whole rows of any dtype and refuses indices outside", function()
    local x = core.tensor({ 3, 2 }, "int32", { 1, 2, 3, 4, 5, 2 ^ 30 + 1 })
    assert.same({ 5, 2 ^ 30 + 1, 1, 2, 5, 2 ^ 30 + 1 }, ops.gather_rows { x = x, indices = { 2, 0, 2 } }:totable())
    assert.error_matches(function() ops.gather_rows { x = x, indices = { 3 } } end, "index 3 of 3 rows", 1, true)
  end)
end)
