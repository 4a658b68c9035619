--- spec/kernels/linear_spec.lua - y = x w^T + bias at odd sizes, in every dtype and instruction set.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

describe("ops.linear", function()
  it("matches the plain product at sizes around every block edge", function()
    ref.each_isa(function()
      for _, s in ipairs { { 1, 1, 1 }, { 1, 3, 7 }, { 2, 5, 8 }, { 3, 4, 17 }, { 4, 9, 33 }, { 8, 65, 31 }, { 15, 63, 64 },
        { 16, 64, 65 }, { 17, 49, 127 }, { 31, 47, 129 }, { 33, 48, 255 }, { 49, 6, 257 }, { 70, 13, 300 } } do
        local tokens, n, k = s[1], s[2], s[3]
        local x, w = ref.random({ tokens, k }, "float32", 3), ref.random({ n, k }, "float32", 4)
        ref.close(ops.linear { x = x, w = w }, ref.linear(x:totable(), w:totable(), tokens, n, k), 3e-6,
          ("%dx%dx%d"):format(tokens, n, k))
      end
    end)
  end)

  it("matches it for every dtype of x and w, and for outputs of another dtype", function()
    ref.each_isa(function()
      for _, tokens in ipairs { 1, 2, 5, 20 } do
        for _, xd in ipairs(ref.dtypes) do
          for _, wd in ipairs(ref.dtypes) do
            local x, w, bias = ref.random({ tokens, 75 }, xd, 5), ref.random({ 11, 75 }, wd, 6), ref.random({ 11 }, wd, 7)
            local want = ref.linear(x:totable(), w:totable(), tokens, 11, 75, bias:totable())
            ref.close(ops.linear { x = x, w = w, bias = bias }, want, nil, xd .. " x " .. wd)
            ref.close(ops.linear { x = x, w = w, bias = bias, dtype = "float32" }, want, 3e-6, xd .. " x " .. wd)
          end
        end
      end
    end)
  end)

  it("does nothing for no tokens or rows, and gives the bias alone for no columns", function()
    assert.same({ 0, 4 }, ops.linear { x = core.tensor { 0, 3 }, w = core.tensor { 4, 3 } }.shape)
    assert.same({ 5, 0 }, ops.linear { x = core.tensor { 5, 3 }, w = core.tensor { 0, 3 } }.shape)
    local bias = core.tensor({ 2 }, "float32", { 3, -4 })
    assert.same({ 3, -4 }, ops.linear { x = core.tensor { 1, 0 }, w = core.tensor { 2, 0 }, bias = bias }:totable())
    assert.equal(-4, ops.linear { x = core.tensor { 40, 0 }, w = core.tensor { 2, 0 }, bias = bias }:get(39, 1))
  end)

  it("reads and writes strided, unaligned rows and leaves what lies between them", function()
    for _, tokens in ipairs { 2, 19 } do
      for _, dtype in ipairs(ref.dtypes) do
        local x, w = ref.random({ tokens, 45 }, dtype, 8), ref.random({ 21, 45 }, dtype, 9)
        local y, wide = ref.strided(core.tensor({ tokens, 21 }, dtype), 3)
        local out = ops.linear { x = ref.strided(x, 5), w = ref.strided(w, 2), out = y }
        ref.close(out, ops.linear { x = x, w = w }, 1e-9)
        assert.equal(ref.random({ 1 }, dtype):fill(777):get(0), wide:get(0, 0))
        assert.equal(wide:get(0, 0), wide:get(tokens - 1, 22))
      end
    end
  end)

  it("adds to y when asked", function()
    local x, w = ref.random({ 3, 10 }, "float32", 1), ref.random({ 7, 10 }, "float32", 2)
    local y = core.tensor({ 3, 7 }):fill(2)
    local want = ref.linear(x:totable(), w:totable(), 3, 7, 10)
    for i = 1, #want do want[i] = want[i] + 2 end
    ref.close(ops.linear { x = x, w = w, out = y, add = true }, want, 3e-6)
  end)

  it("gives a row the same result in any batch, but for rounding", function()
    local x, w = ref.random({ 600, 130 }, "bfloat16", 1), ref.random({ 50, 130 }, "bfloat16", 2)
    local all = ops.linear { x = x, w = w, dtype = "float32" }
    for _, t in ipairs { 0, 1, 15, 16, 511, 512, 599 } do
      ref.close(ops.linear { x = x:narrow(0, t, 1), w = w, dtype = "float32" }, all:narrow(0, t, 1), 2e-6)
    end
    local few, one = ops.linear { x = x:narrow(0, 0, 8), w = w }, ops.linear { x = x:narrow(0, 7, 1), w = w }
    assert.same(few:narrow(0, 7, 1):totable(), one:totable())
  end)

  it("gives the same bits on one thread as on all", function()
    for _, tokens in ipairs { 1, 7, 40 } do
      local x, w = ref.random({ tokens, 200 }, "bfloat16", 1), ref.random({ 301, 200 }, "bfloat16", 2)
      assert.same(ops.linear { x = x, w = w, threads = 1 }:totable(), ops.linear { x = x, w = w }:totable())
    end
  end)

  it("refuses shapes and dtypes that do not fit", function()
    local x, w = core.tensor { 2, 3 }, core.tensor { 4, 5 }
    assert.error_matches(function() ops.linear { x = x, w = w } end, "x: expected as many columns as w", 1, true)
    assert.error_matches(function() ops.linear { x = x } end, "w is missing", 1, true)
    assert.error_matches(function() ops.linear { x = x, w = core.tensor({ 4, 3 }, "int32") } end,
      "w must be float32, bfloat16 or float16, got int32", 1, true)
    assert.error_matches(function() ops.linear { x = x, w = core.tensor({ 4, 3 }, "fp8") } end, "scale is missing", 1, true)
  end)
end)

describe("ops.linear with float8 block scales", function()
  -- w[i][j] stands for e4m3 * scale[(row0 + i) / 128][(phase + j) / 128]
  local function case(tokens, n, k, row0, phase)
    local codes = ref.random({ n, k }, "fp8", 11, 400)
    local rows, cols = math.floor((row0 + n - 1) / 128) + 1, math.floor((phase + k - 1) / 128) + 1
    local scale, x, scale_row = ref.random({ rows, cols }, "float32", 12), ref.random({ tokens, k }, "bfloat16", 13), {}
    local w, flat, scales = {}, codes:totable(), scale:totable()
    for i = 0, n - 1 do
      scale_row[i + 1] = math.floor((row0 + i) / 128)
      for j = 0, k - 1 do
        w[i * k + j + 1] = flat[i * k + j + 1] * scales[scale_row[i + 1] * cols + math.floor((phase + j) / 128) + 1]
      end
    end
    local y = ops.linear { x = x, w = codes, scale = scale, scale_row = scale_row, scale_col_phase = phase, dtype = "float32" }
    ref.close(y, ref.linear(x:totable(), w, tokens, n, k), 3e-6, ("%d %d %d %d %d"):format(tokens, n, k, row0, phase))
  end

  it("is right at any row and column phase", function()
    ref.each_isa(function()
      for _, tokens in ipairs { 1, 3, 18 } do
        case(tokens, 5, 128, 0, 0)
        case(tokens, 130, 129, 126, 0)
        case(tokens, 7, 300, 64, 64)
        case(tokens, 3, 20, 127, 120)
      end
    end)
  end)

  it("turns the two NaN codes into NaN, and only in their row", function()
    ref.each_isa(function()
      for _, tokens in ipairs { 1, 20 } do
        local w = ref.random({ 6, 40 }, "fp8", 3)
        w:set(0 / 0, 4, 37)
        local y = ops.linear { x = ref.random({ tokens, 40 }, "float32", 4), w = w, scale = core.tensor({ 1, 1 }):fill(1) }
        for i = 0, 5 do assert.equal(i == 4, y:get(tokens - 1, i) ~= y:get(tokens - 1, i)) end
      end
    end)
  end)

  it("knows every one of the 256 codes, subnormals included", function()
    ref.each_isa(function()
      local codes = core.tensor({ 1, 256 }, "fp8")
      local values, at = {}, 0
      for exponent = 0, 15 do
        for mantissa = 0, 7 do
          if exponent < 15 or mantissa < 7 then
            local value = exponent == 0 and mantissa * 2 ^ -9 or (1 + mantissa / 8) * 2 ^ (exponent - 7)
            codes:set(value, 0, at)
            codes:set(-value, 0, at + 1)
            values[#values + 1], at = value, at + 2
          end
        end
      end
      for i, value in ipairs(values) do
        local x = core.tensor { 1, 256 }
        x:set(1, 0, 2 * i - 2)
        assert.equal(value, ops.linear { x = x, w = codes, scale = core.tensor({ 1, 2 }):fill(1) }:get(0, 0))
      end
    end)
  end)
end)
