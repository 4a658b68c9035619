--- spec/kernels/norms_spec.lua - norms over rows and over groups of ranks, and the rotary embedding.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

local widths = { 1, 3, 8, 15, 16, 17, 33, 1023, 1024, 1025 }

describe("ops.rms_norm", function()
  it("matches its formula at any width and dtype", function()
    ref.each_isa(function()
      for _, cols in ipairs(widths) do
        for _, dtype in ipairs(ref.dtypes) do
          local x, gain = ref.random({ 3, cols }, dtype, cols), ref.random({ cols }, dtype, 5)
          local want = ref.rms_norm(x:totable(), gain:totable(), 3, cols, 1e-5)
          ref.close(ops.rms_norm { x = x, gain = gain, eps = 1e-5 }, want, nil, dtype .. " " .. cols)
        end
      end
    end)
  end)

  it("writes x + residual, rounded, back to the residual and norms that", function()
    for _, dtype in ipairs(ref.dtypes) do
      local x, residual, gain = ref.random({ 5, 70 }, dtype, 1), ref.random({ 5, 70 }, dtype, 2), ref.random({ 70 }, "float32", 3)
      local sum = ops.add { a = x, b = residual }
      local view = ref.strided(residual, 3)
      local y = ops.rms_norm { x = x, gain = gain, residual = view }
      assert.same(sum:totable(), view:totable())
      ref.close(y, ops.rms_norm { x = sum, gain = gain }, 1e-9)
    end
  end)

  it("works in place, on strided rows, on more than two dimensions and on nothing", function()
    local x, gain = ref.random({ 4, 3, 20 }, "bfloat16", 1), ref.random({ 20 }, "bfloat16", 2)
    local want = ops.rms_norm { x = x, gain = gain }
    assert.same({ 4, 3, 20 }, want.shape)
    local y = ref.strided(x:view { 12, 20 }, 5)
    ref.close(ops.rms_norm { x = y, gain = gain, out = y }, want:view { 12, 20 }, 0)
    assert.same({ 0, 20 }, ops.rms_norm { x = core.tensor { 0, 20 }, gain = core.tensor { 20 } }.shape)
    assert.same({ 0, 0 }, ops.rms_norm { x = core.tensor { 1, 2 }, gain = core.tensor({ 2 }):fill(1) }:totable())
  end)

  it("refuses a gain of another width and integer rows", function()
    assert.error_matches(function() ops.rms_norm { x = core.tensor { 2, 3 }, gain = core.tensor { 4 } } end,
      "gain: expected 3 in dimension 0, got float32[4]", 1, true)
    assert.error_matches(function() ops.rms_norm { x = core.tensor({ 2, 3 }, "int32"), gain = core.tensor { 3 } } end,
      "rms_norm: x must be float32, bfloat16 or float16, got int32", 1, true)
  end)
end)

describe("ops.group_norm", function()
  it("gives, over the shards of a row, what rms_norm gives for the whole row", function()
    ref.each_isa(function()
      for _, world in ipairs { 1, 2, 3 } do
        local cols = 48
        local x, gain = ref.random({ 5, cols * world }, "float32", 7), ref.random({ cols * world }, "float32", 8)
        local var, want = {}, ops.rms_norm { x = x, gain = gain }
        for r = 0, world - 1 do
          local sums = ops.group_norm_sums { x = x:narrow(1, r * cols, cols) }:totable()
          for t = 1, 5 do var[t] = (var[t] or 0) + sums[t] end
        end
        for r = 0, world - 1 do
          local y = ops.group_norm_apply { x = x:narrow(1, r * cols, cols), var = core.tensor({ 5 }, "float32", var),
            gain = gain:narrow(0, r * cols, cols), world = world }
          ref.close(y, want:narrow(1, r * cols, cols), 2e-6)
        end
      end
    end)
  end)

  it("stays right when heads are held several times", function()
    local sum = 0
    for _, head in ipairs { { 1, 1 }, { 1, 1 }, { 3, 3 }, { 3, 3 } } do
      sum = sum + ops.group_norm_sums { x = core.tensor({ 1, 2 }, "float32", head) }:get(0)
    end
    assert.equal(5, sum / 4)
  end)

  it("writes the sums of q and k side by side", function()
    local var = core.tensor { 3, 2 }
    ops.group_norm_sums { x = core.tensor({ 3, 4 }):fill(2), out = var:select(1, 0) }
    ops.group_norm_sums { x = core.tensor({ 3, 7 }):fill(3), out = var:select(1, 1) }
    assert.same({ 4, 9, 4, 9, 4, 9 }, var:totable())
  end)
end)

describe("ops.rope", function()
  local function table_of(positions, rotary_dim)
    local t = core.tensor { positions, rotary_dim }
    for p = 0, positions - 1 do
      for i = 0, rotary_dim / 2 - 1 do
        local angle = p * 10000 ^ (-2 * i / rotary_dim)
        t:set(math.cos(angle), p, i)
        t:set(math.sin(angle), p, rotary_dim / 2 + i)
      end
    end
    return t
  end

  it("rotates the halves of the first rotary_dim elements and leaves the rest", function()
    ref.each_isa(function()
      for _, s in ipairs { { 8, 8 }, { 16, 6 }, { 64, 64 }, { 128, 64 }, { 30, 2 }, { 256, 256 }, { 8, 0 } } do
        local dim, rotary = s[1], s[2]
        for _, dtype in ipairs(ref.dtypes) do
          local x, cos_sin, positions = ref.random({ 4, 3, dim }, dtype, 3), table_of(9, rotary), { 0, 8, 3, 3 }
          local before, want = x:totable(), {}
          for i = 1, #before do want[i] = before[i] end
          for t = 0, 3 do
            for h = 0, 2 do
              for i = 0, rotary / 2 - 1 do
                local c, sn = cos_sin:get(positions[t + 1], i), cos_sin:get(positions[t + 1], rotary / 2 + i)
                local a = (t * 3 + h) * dim + i + 1
                want[a] = before[a] * c - before[a + rotary / 2] * sn
                want[a + rotary / 2] = before[a + rotary / 2] * c + before[a] * sn
              end
            end
          end
          ref.close(ops.rope { x = x, positions = positions, cos_sin = cos_sin }, want, nil, dtype .. " " .. dim)
        end
      end
    end)
  end)

  it("reaches heads inside a fused row and refuses positions outside the table", function()
    local qkv, cos_sin = ref.random({ 2, 5, 8 }, "float32", 4), table_of(3, 8)
    local before, q = qkv:clone(), qkv:narrow(1, 1, 2)
    local want = ops.rope { x = q:clone(), positions = { 1, 2 }, cos_sin = cos_sin }
    ops.rope { x = q, positions = { 1, 2 }, cos_sin = cos_sin }
    assert.same(want:totable(), q:clone():totable())
    assert.same(before:select(1, 0):totable(), qkv:select(1, 0):totable())
    assert.same(before:narrow(1, 3, 2):totable(), qkv:narrow(1, 3, 2):totable())
    assert.error_matches(function() ops.rope { x = q, positions = { 1, 3 }, cos_sin = cos_sin } end,
      "position 3 of token 1 is outside the table of 3 positions", 1, true)
    assert.error_matches(function() ops.rope { x = q, positions = { 1, -1 }, cos_sin = cos_sin } end, "position -1", 1, true)
  end)
end)
