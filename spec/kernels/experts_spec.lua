--- spec/kernels/experts_spec.lua - experts over their tokens against a plain reference.
local core = require "weft.core"
local ref = require "spec.support.ref"

-- y[t] = sum of weight * down(silu(gate x) * (up x)) over flat tables; w given expert by expert.
local function plain(x, ids, weights, gate_up, down, d)
  local y = {}
  for i = 1, d.tokens * d.hidden do y[i] = 0 end
  for t = 0, d.tokens - 1 do
    local row = ref.slice(x, t * d.hidden + 1, d.hidden)
    for k = 1, d.top_k do
      local e = ids[t * d.top_k + k] - d.first
      if e >= 0 and e < d.count then
        local both = ref.linear(row, ref.slice(gate_up, e * 2 * d.width * d.hidden + 1, 2 * d.width * d.hidden), 1, 2 * d.width, d.hidden)
        local act = {}
        for i = 1, d.width do act[i] = both[i] / (1 + math.exp(-both[i])) * both[d.width + i] end
        local out = ref.linear(act, ref.slice(down, e * d.hidden * d.width + 1, d.hidden * d.width), 1, d.hidden, d.width)
        for i = 1, d.hidden do y[t * d.hidden + i] = y[t * d.hidden + i] + weights[t * d.top_k + k] * out[i] end
      end
    end
  end
  return y
end

local function sizes(t)
  t.first = t.first or 0
  return t
end

local function make(d, dtype, seed)
  return {
    x = ref.random({ d.tokens, d.hidden }, dtype == "float8_e4m3" and "float32" or dtype, seed),
    weights = ref.random({ d.tokens, d.top_k }, "float32", seed + 1),
    gate_up = ref.random({ d.count, 2 * d.width, d.hidden }, dtype, seed + 2, 0.5),
    down = ref.random({ d.count, d.hidden, d.width }, dtype, seed + 3, 0.5),
    first = d.first,
  }
end

local function spread(d, experts)
  local ids = {}
  for i = 0, d.tokens * d.top_k - 1 do ids[i + 1] = experts[i * 7 % #experts + 1] end
  return core.tensor({ d.tokens, d.top_k }, "int32", ids)
end

local function check(d, dtype, ids, tolerance)
  local args = make(d, dtype, 11)
  args.ids = ids
  local y = core.ops.experts(args)
  ref.close(y, plain(args.x:totable(), ids:totable(), args.weights:totable(), args.gate_up:totable(), args.down:totable(), d), tolerance)
  return y
end

describe("experts", function()
  for _, dtype in ipairs(ref.dtypes) do
    it("give what a plain reference gives in " .. dtype .. ", for few and for many tokens of an expert", function()
      ref.each_isa(function()
        for _, tokens in ipairs { 1, 5, 70 } do
          local d = sizes { tokens = tokens, top_k = 2, hidden = 33, width = 19, count = 5 }
          check(d, dtype, spread(d, { 0, 3, 4, 1, 2 }), dtype == "float32" and 1e-5)
        end
      end)
    end)
  end

  it("cost nothing for experts that get no token, and are right when one gets all", function()
    local d = sizes { tokens = 40, top_k = 1, hidden = 24, width = 16, count = 8 }
    check(d, "float32", spread(d, { 6 }), 1e-5)
    local args = make(d, "float32", 11)
    args.ids = spread(d, { 6 })
    local want = core.ops.experts(args):totable()
    for e = 0, 7 do -- what is never used may hold anything
      if e ~= 6 then args.gate_up:narrow(0, e, 1):fill(0 / 0); args.down:narrow(0, e, 1):fill(0 / 0) end
    end
    assert.same(want, core.ops.experts(args):totable())
  end)

  it("leave out experts of other ranks and give zeros to a token without one here", function()
    local d = sizes { tokens = 6, top_k = 2, hidden = 16, width = 8, count = 3, first = 4 }
    local ids = core.tensor({ 6, 2 }, "int32", { 4, 0, 1, 2, 6, 5, 3, 7, -1, 4, 5, 4 })
    local y = check(d, "float32", ids, 1e-5):totable()
    assert.same(ref.slice(ref.random({ 16 }, "float32", 1, 0):totable(), 1, 16), ref.slice(y, 17, 16))
  end)

  it("agree over more pairs than one round holds", function()
    local d = sizes { tokens = 600, top_k = 4, hidden = 8, width = 4, count = 3 }
    check(d, "float32", spread(d, { 0, 2, 1 }), 1e-5)
  end)

  it("give a token the same bits alone and in a batch of few", function()
    local d = sizes { tokens = 12, top_k = 2, hidden = 40, width = 24, count = 4 }
    local args = make(d, "float32", 3)
    args.ids = spread(d, { 1, 0, 3 })
    local all = core.ops.experts(args):totable()
    for t = 0, 11 do
      local one = core.ops.experts { x = args.x:narrow(0, t, 1), ids = args.ids:narrow(0, t, 1), weights = args.weights:narrow(0, t, 1),
        gate_up = args.gate_up, down = args.down }
      assert.same(ref.slice(all, t * 40 + 1, 40), one:totable())
    end
  end)

  it("scale fp8 weights by the block of their global row and column, wherever the shard begins", function()
    -- columns 60 .. 199 of an expert 200 wide; hidden 140
    local whole, first, width, hidden, count = 200, 60, 140, 140, 2
    local function codes(shape, seed) return core.ops.quantize_groups { x = ref.random(shape, "float32", seed, 4) } end
    local gate_up, down = codes({ count, 2 * whole, hidden }, 1):totable(), codes({ count, hidden, whole }, 2):totable()
    local up_scale, down_scale = ref.random({ count, 4, 2 }, "float32", 5):totable(), ref.random({ count, 2, 2 }, "float32", 6):totable()
    local local_up, local_down, local_scale, want_up, want_down, row_of = {}, {}, up_scale, {}, {}, {}
    for e = 0, count - 1 do
      for part = 0, 1 do
        for i = first, first + width - 1 do
          if e == 0 then row_of[#row_of + 1] = part * 2 + math.floor(i / 128) end
          for j = 0, hidden - 1 do
            local code = gate_up[((e * 2 + part) * whole + i) * hidden + j + 1]
            local_up[#local_up + 1] = code
            want_up[#want_up + 1] = code * up_scale[(e * 4 + part * 2 + math.floor(i / 128)) * 2 + math.floor(j / 128) + 1]
          end
        end
      end
      for i = 0, hidden - 1 do
        for j = first, first + width - 1 do
          local code = down[(e * hidden + i) * whole + j + 1]
          local_down[#local_down + 1] = code
          want_down[#want_down + 1] = code * down_scale[(e * 2 + math.floor(i / 128)) * 2 + math.floor(j / 128) + 1]
        end
      end
    end
    local function fp8(shape, values) return core.tensor(shape, "float8_e4m3", values) end
    local a, b = fp8({ count, 2 * width, hidden }, local_up), fp8({ count, hidden, width }, local_down)
    -- what fp8 holds of them
    local ua, ub = a:totable(), b:totable()
    for i in ipairs(want_up) do want_up[i] = local_up[i] == 0 and 0 or want_up[i] / local_up[i] * ua[i] end
    for i in ipairs(want_down) do want_down[i] = local_down[i] == 0 and 0 or want_down[i] / local_down[i] * ub[i] end
    for _, tokens in ipairs { 3, 40 } do
      local d = { tokens = tokens, top_k = 1, hidden = hidden, width = width, count = count, first = 0 }
      local x, weights, ids = ref.random({ tokens, hidden }, "float32", 8), ref.random({ tokens, 1 }, "float32", 9), spread(d, { 1, 0 })
      local y = core.ops.experts { x = x, ids = ids, weights = weights, gate_up = a, down = b,
        gate_up_scale = core.tensor({ count, 4, 2 }, "float32", local_scale), gate_up_scale_row = row_of,
        down_scale = core.tensor({ count, 2, 2 }, "float32", down_scale), down_scale_col_phase = first }
      ref.close(y, plain(x:totable(), ids:totable(), weights:totable(), want_up, want_down, d), 1e-5)
    end
  end)

  it("refuse fp8 weights without scales and weights of another shape", function()
    local d = sizes { tokens = 2, top_k = 1, hidden = 8, width = 4, count = 2 }
    local args = make(d, "float8_e4m3", 1)
    args.ids = spread(d, { 0 })
    assert.has_error(function() core.ops.experts(args) end, "gate_up_scale is missing")
    args.down = core.tensor({ 2, 9, 4 }, "float8_e4m3")
    assert.has_error(function() core.ops.experts(args) end)
  end)
end)

describe("quantize_groups", function()
  it("rounds each 128 columns of a token to e4m3 with a scale of its own", function()
    local values = {}
    for i = 1, 200 do values[i] = (i <= 128 and 1 or 1000) * ((i * 37 % 64) - 32) / 32 end
    local y = core.ops.quantize_groups { x = core.tensor({ 1, 200 }, "float32", values) }:totable()
    for group, bounds in ipairs { { 1, 128 }, { 129, 200 } } do
      local amax = 0
      for i = bounds[1], bounds[2] do amax = math.max(amax, math.abs(values[i])) end
      local scale = amax / 448
      for i = bounds[1], bounds[2] do
        local code = core.tensor({ 1 }, "float8_e4m3", { values[i] / scale }):get(0)
        assert.near(code * scale, y[i], amax * 1e-6, ("group %d, column %d"):format(group, i))
      end
    end
  end)

  it("keeps zeros, and keeps a group that holds NaN as it is", function()
    assert.same({ 0, 0, 0 }, core.ops.quantize_groups { x = core.tensor({ 1, 3 }, "float32", { 0, 0, 0 }) }:totable())
    local y = core.ops.quantize_groups { x = core.tensor({ 1, 2 }, "float32", { 0.3, 0 / 0 }) }:totable()
    assert.near(0.3, y[1], 1e-7)
    assert.is_true(y[2] ~= y[2])
  end)
end)
