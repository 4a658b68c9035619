--- spec/kernels/merge_spec.lua - partial attention results and their log-sum-exps put together.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

local inf, nan = math.huge, 0 / 0

local function tensor(shape, values) return core.tensor(shape, "float32", values) end
local function near(want, got, tolerance) assert.is_true(math.abs(want - got) <= (tolerance or 1e-6), want .. " expected, got " .. got) end

describe("ops.merge_attn_states", function()
  local function merge(p, s, po, so)
    local out, lse = ops.merge_attn_states { prefix = tensor({ 1, 1, 2 }, { po or 1, po or 1 }), prefix_lse = tensor({ 1, 1 }, { p }),
      suffix = tensor({ 1, 1, 2 }, { so or 0, so or 0 }), suffix_lse = tensor({ 1, 1 }, { s }) }
    return out:get(0, 0, 1), lse:get(0, 0)
  end

  it("weighs by the sums of exps", function()
    local out, lse = merge(1, 2)
    near(0.268941, out)
    near(2.313262, lse)
    near(0.731059, merge(1, 2, 0, 1))
    near(0.5, (merge(3, 3)))
    near(1, (merge(0, -100)))
  end)

  it("counts -inf, +inf and NaN as empty and does not read an empty side", function()
    for _, empty in ipairs { -inf, inf, nan } do
      local out, lse = merge(empty, 0.5, nan, 7)
      assert.same({ 7, 0.5 }, { out, lse })
      out, lse = merge(0.5, empty, 7, nan)
      assert.same({ 7, 0.5 }, { out, lse })
      out, lse = merge(empty, empty, nan, nan)
      assert.same({ 0, -inf }, { out, lse })
    end
  end)

  it("matches the formula in every dtype, in place and with strided rows", function()
    ref.each_isa(function()
      for _, dim in ipairs { 1, 96, 192, 33 } do
        for _, dtype in ipairs(ref.dtypes) do
          local prefix, suffix = ref.random({ 7, 3, dim }, dtype, 1), ref.random({ 7, 3, dim }, dtype, 2)
          local pl, sl, want = ref.random({ 7, 3 }, "float32", 3, 5), ref.random({ 7, 3 }, "float32", 4, 5), {}
          for t = 0, 6 do
            for h = 0, 2 do
              local w = 1 / (1 + math.exp(sl:get(t, h) - pl:get(t, h)))
              for i = 0, dim - 1 do want[#want + 1] = w * prefix:get(t, h, i) + (1 - w) * suffix:get(t, h, i) end
            end
          end
          local out, lse = ops.merge_attn_states { prefix = prefix, prefix_lse = pl, suffix = suffix, suffix_lse = sl, out = suffix, lse = pl }
          ref.close(out, want, nil, dtype)
          assert.equal(tostring(pl), tostring(lse))
        end
      end
    end)
  end)
end)

describe("ops.dcp_combine", function()
  local function two(lse0, lse1, base2)
    local out = ops.dcp_combine { partial = tensor({ 2, 1, 1, 1 }, { 0, 1 }), lse = tensor({ 2, 1, 1 }, { lse0, lse1 }), base2 = base2 }
    return out:get(0, 0, 0)
  end

  it("combines sums of 2 and 8 to 0.8, in either base, and differently when the base is mixed up", function()
    local log2 = 1 / math.log(2)
    near(0.8, two(math.log(2), math.log(8)))
    near(0.8, two(1, 3, true))
    near(0.723303, two(math.log(2), math.log(8), true), 1e-5)
    near(0.880797, two(math.log(2) * log2, math.log(8) * log2, false), 1e-5)
  end)

  it("gives what attention over all keys gives, for any number of parts", function()
    ref.each_isa(function()
      for _, s in ipairs { { 1, 5, 1, 96 }, { 2, 7, 3, 192 }, { 3, 5, 2, 33 }, { 4, 1, 2, 1100 } } do
        local n, t, h, d = s[1], s[2], s[3], s[4]
        for _, dtype in ipairs(ref.dtypes) do
          local partial, lse = ref.random({ n, t, h, d }, dtype, 5), ref.random({ n, t, h }, "float32", 6, 4)
          local want = {}
          for i = 0, t * h - 1 do
            local sum = 0
            for p = 0, n - 1 do sum = sum + math.exp(lse:get(p, math.floor(i / h), i % h)) end
            for x = 0, d - 1 do
              local value = 0
              for p = 0, n - 1 do
                value = value + math.exp(lse:get(p, math.floor(i / h), i % h)) / sum * partial:get(p, math.floor(i / h), i % h, x)
              end
              want[#want + 1] = value
            end
          end
          ref.close((ops.dcp_combine { partial = partial, lse = lse }), want)
        end
      end
    end)
  end)

  it("lets empty parts contribute exactly nothing, whatever their payload", function()
    for _, empty in ipairs { -inf, inf, nan } do
      local partial = tensor({ 3, 1, 1, 2 }, { nan, inf, 2, 3, nan, nan })
      local out, lse = ops.dcp_combine { partial = partial, lse = tensor({ 3, 1, 1 }, { empty, 1.5, empty }) }
      assert.same({ 2, 3, 1.5 }, { out:get(0, 0, 0), out:get(0, 0, 1), lse:get(0, 0) })
      out, lse = ops.dcp_combine { partial = partial, lse = tensor({ 3, 1, 1 }, { empty, empty, empty }) }
      assert.same({ 0, 0, -inf }, { out:get(0, 0, 0), out:get(0, 0, 1), lse:get(0, 0) })
    end
  end)

  it("treats rows from valid_rows on as empty", function()
    local out, lse = ops.dcp_combine { partial = tensor({ 1, 2, 1, 1 }, { 4, nan }), lse = tensor({ 1, 2, 1 }, { 1, 1 }), valid_rows = 1 }
    assert.same({ { 4, 0 }, { 1, -inf } }, { out:totable(), lse:totable() })
  end)
end)

describe("the a2a exchange", function()
  it("carries the bits of the LSE behind each row, low half first in 16-bit types", function()
    local lse = tensor({ 1, 2 }, { 0.1, -inf })
    for _, dtype in ipairs { "bfloat16", "float16" } do
      local buffer = ops.dcp_pack { out = core.tensor({ 1, 2, 3 }, dtype), lse = lse, parts = 2 }
      assert.same({ 2, 1, 1, 5 }, buffer.shape)
      assert.same({ 0.10000000149011612, -inf }, ops.dcp_unpack_lse { buffer = buffer }:totable())
    end
    local words = ops.dcp_pack { out = core.tensor({ 1, 1, 1 }, "bfloat16"), lse = tensor({ 1, 1 }, { 0.1 }), parts = 1 }
    local low, high = words:get(0, 0, 0, 1), words:get(0, 0, 0, 2) -- 0x3DCCCCCD -> CCCD, 3DCC
    assert.same({ -107479040, 0.099609375 }, { low, high })
    assert.same({ 1, 2, 1, 2 }, ops.dcp_pack { out = core.tensor { 2, 1, 1 }, lse = core.tensor { 2, 1 }, parts = 1 }.shape)
  end)

  it("unpacked, gives each rank the combination of its own heads", function()
    for _, dtype in ipairs(ref.dtypes) do
      local n, tokens, heads, dim = 3, 5, 2, 24
      local outs, lses, buffers = {}, {}, {}
      for r = 1, n do
        outs[r], lses[r] = ref.random({ tokens, n * heads, dim }, dtype, r), ref.random({ tokens, n * heads }, "float32", 10 + r, 3)
        buffers[r] = ops.dcp_pack { out = outs[r], lse = lses[r], parts = n }
      end
      for mine = 0, n - 1 do
        local received = core.tensor({ n, tokens, heads, buffers[1].shape[4] }, dtype)
        local partial, lse = core.tensor({ n, tokens, heads, dim }, dtype), core.tensor { n, tokens, heads }
        for from = 0, n - 1 do
          received:select(0, from):copy(buffers[from + 1]:select(0, mine))
          partial:select(0, from):copy(outs[from + 1]:narrow(1, mine * heads, heads))
          lse:select(0, from):copy(lses[from + 1]:narrow(1, mine * heads, heads))
        end
        local out, s = ops.dcp_unpack { buffer = received }
        local want, want_s = ops.dcp_combine { partial = partial, lse = lse }
        assert.same({ want:totable(), want_s:totable() }, { out:totable(), s:totable() })
      end
    end
  end)

  it("refuses heads that do not divide over the ranks", function()
    assert.error_matches(function() ops.dcp_pack { out = core.tensor { 1, 3, 4 }, lse = core.tensor { 1, 3 }, parts = 2 } end,
      "3 heads do not divide over 2 ranks", 1, true)
  end)
end)

describe("the ag_rs exchange", function()
  it("scales each part so that their sum is the combination", function()
    ref.each_isa(function()
      local n, t, h, d = 3, 5, 4, 40
      local partial, lse = ref.random({ n, t, h, d }, "float32", 5), ref.random({ n, t, h }, "float32", 6, 4)
      lse:set(-inf, 1, 2, 3)
      partial:select(0, 1):select(0, 2):select(0, 3):fill(nan)
      local want, want_lse = ops.dcp_combine { partial = partial, lse = lse }
      local sum, s = core.tensor { h, t, d }, nil
      for r = 0, n - 1 do
        local scaled
        scaled, s = ops.dcp_scale { out = partial:select(0, r), lses = lse, part = r, lse_first = 1, lse_heads = 2 }
        ops.add { a = sum, b = scaled, out = sum }
      end
      ref.close(sum:transpose(0, 1):clone(), want, 2e-6)
      ref.close(s, want_lse:narrow(1, 1, 2), 1e-6)
    end)
  end)
end)

describe("ops.mask_dcp_empty_shards", function()
  it("empties padded rows and rows of requests without local keys", function()
    local lse = core.tensor({ 7, 2 }):fill(1)
    ops.mask_dcp_empty_shards { lse = lse, seq_lens = { 0, 2 }, query_start_loc = { 0, 1, 5 } }
    for row = 0, 6 do assert.equal((row == 0 or row > 4) and -inf or 1, lse:get(row, 1)) end
  end)

  it("skips requests without rows and needs one length for each request", function()
    local lse = core.tensor({ 2, 1 }):fill(1)
    ops.mask_dcp_empty_shards { lse = lse, seq_lens = { 3, 0, 3 }, query_start_loc = { 0, 1, 1, 2 } }
    assert.same({ 1, 1 }, lse:totable())
    assert.error_matches(function() ops.mask_dcp_empty_shards { lse = lse, seq_lens = { 3 }, query_start_loc = { 0, 1, 2 } } end,
      "seq_lens: expected 2 numbers, one for each request, got 1", 1, true)
  end)
end)
