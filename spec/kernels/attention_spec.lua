--- spec/kernels/attention_spec.lua - ragged attention with its LSE, against a query-by-query reference.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

--- A batch with made-up keys for every position of every request, written into pages on each context rank.
local function batch(o)
  local b = { o = o, requests = #o.seq_lens, qsl = { 0 } }
  for r = 1, b.requests do b.qsl[r + 1] = b.qsl[r] + o.query_lens[r] end
  b.tokens = b.qsl[#b.qsl] + (o.padding or 0)
  b.q = ref.random({ b.tokens, o.heads, o.dim }, o.dtype, 21)
  b.keys, b.values = {}, {}
  for r = 1, b.requests do
    b.keys[r] = ref.random({ o.seq_lens[r], o.kv_heads, o.dim }, o.kv_dtype or o.dtype, 100 + r)
    b.values[r] = ref.random({ o.seq_lens[r], o.kv_heads, o.dim_v or o.dim }, o.kv_dtype or o.dtype, 200 + r)
  end
  return b
end

local function write_pages(b, context_rank)
  local o = b.o
  local page, size, interleave = o.page or 4, o.context_size or 1, o.interleave or 1
  local width = 0
  for r = 1, b.requests do width = math.max(width, math.ceil(o.seq_lens[r] / (page * size))) end
  local shape = { b.requests * width + 1, o.kv_heads, page, o.dim }
  local k_cache = core.tensor(shape, o.kv_dtype or o.dtype):fill(0 / 0)
  shape[4] = o.dim_v or o.dim
  local v_cache = core.tensor(shape, o.kv_dtype or o.dtype):fill(0 / 0)
  local table = {}
  for i = 1, b.requests * width do table[i] = b.requests * width - i + 1 end
  for r = 1, b.requests do
    local positions = {}
    for p = 1, o.seq_lens[r] do positions[p] = p - 1 end
    ops.kv_write { k = b.keys[r], v = b.values[r], k_cache = k_cache, v_cache = v_cache, positions = positions,
      query_start_loc = { 0, o.seq_lens[r] }, block_table = ref.slice(table, (r - 1) * width + 1, width),
      context_size = size, context_rank = context_rank, interleave = interleave }
  end
  return k_cache, v_cache, table
end

local function new_tensors(b, which)
  local o, shape = b.o, { b.tokens, b.o.kv_heads, which == "keys" and b.o.dim or b.o.dim_v or b.o.dim }
  local all = core.tensor(shape, o.kv_dtype or o.dtype)
  for r = 1, b.requests do
    local n = o.query_lens[r]
    if n > 0 then all:narrow(0, b.qsl[r], n):copy(b[which][r]:narrow(0, o.seq_lens[r] - n, n)) end
  end
  return all
end

local function run(b, keys, context_rank)
  local o, k, v, table = b.o, nil, nil, nil
  if keys == "new" then k, v = new_tensors(b, "keys"), new_tensors(b, "values")
  else k, v, table = write_pages(b, context_rank or 0) end
  return ops.attention { q = b.q, k = k, v = v, keys = keys, query_start_loc = b.qsl, seq_lens = o.seq_lens, block_table = table,
    group_size = o.group_size, first_head = o.first_head, causal = o.causal, window = o.window,
    context_size = o.context_size, context_rank = context_rank, interleave = o.interleave }
end

--- The same by the definition.
local function expected(b, keys, context_rank)
  local o, out, lse = b.o, {}, {}
  local size, interleave, dim_v = o.context_size or 1, o.interleave or 1, o.dim_v or o.dim
  local q, group = b.q:totable(), o.group_size or o.heads / o.kv_heads
  for r = 1, b.requests do
    local flat_k, flat_v, context = b.keys[r]:totable(), b.values[r]:totable(), o.seq_lens[r] - o.query_lens[r]
    for i = context, o.seq_lens[r] - 1 do
      for h = 0, o.heads - 1 do
        local g, ks, vs = math.floor(((o.first_head or 0) + h) / group), {}, {}
        for j = keys == "new" and context or 0, keys == "context" and context - 1 or o.seq_lens[r] - 1 do
          local mine = keys == "new" or math.floor(j / interleave) % size == (context_rank or 0)
          local seen = (o.causal == false or j <= i) and ((o.window or 0) == 0 or j > i - o.window)
          if mine and seen then
            ks[#ks + 1] = ref.slice(flat_k, (j * o.kv_heads + g) * o.dim + 1, o.dim)
            vs[#vs + 1] = ref.slice(flat_v, (j * o.kv_heads + g) * dim_v + 1, dim_v)
          end
        end
        local t = b.qsl[r] + i - context
        local row, s = ref.attend(ref.slice(q, (t * o.heads + h) * o.dim + 1, o.dim), ks, vs, 1 / math.sqrt(o.dim), dim_v)
        for d = 1, dim_v do out[#out + 1] = row[d] end
        lse[#lse + 1] = s
      end
    end
  end
  for _ = 1, (o.padding or 0) * o.heads do
    for _ = 1, dim_v do out[#out + 1] = 0 end
    lse[#lse + 1] = -math.huge
  end
  return out, lse
end

local function check(o, keys, context_rank, tolerance)
  local b = batch(o)
  local out, lse = run(b, keys, context_rank)
  local want, want_lse = expected(b, keys, context_rank)
  ref.close(out, want, tolerance or ref.tolerance[o.dtype] * 2, keys .. " out")
  ref.close(lse, want_lse, 1e-5, keys .. " lse")
end

local mixed = { seq_lens = { 1, 13, 70, 5, 9 }, query_lens = { 1, 13, 3, 0, 1 }, heads = 4, kv_heads = 2, dim = 16, dtype = "float32" }
local function with(changes)
  local o = {}
  for k, v in pairs(mixed) do o[k] = v end
  for k, v in pairs(changes) do o[k] = v end
  return o
end

describe("ops.attention", function()
  it("matches the definition for ragged batches over all keys, the context and new tokens", function()
    ref.each_isa(function()
      for _, keys in ipairs { "all", "context", "new" } do check(with {}, keys) end
    end)
  end)

  it("takes any head size, values of another size, and any grouping of heads", function()
    ref.each_isa(function()
      for _, s in ipairs { { 8, 8, 1, 1 }, { 24, 40, 6, 2 }, { 96, 96, 3, 3 }, { 192, 128, 5, 1 }, { 256, 256, 2, 1 }, { 9, 7, 4, 4 } } do
        check(with { dim = s[1], dim_v = s[2], heads = s[3], kv_heads = s[4] }, "all")
      end
    end)
  end)

  it("rounds once in 16-bit types, with a cache of another type", function()
    ref.each_isa(function()
      for _, dtype in ipairs { "bfloat16", "float16" } do
        for _, keys in ipairs { "all", "new" } do check(with { dtype = dtype }, keys) end
        check(with { dtype = dtype, kv_dtype = "float32" }, "all")
        check(with { dtype = "float32", kv_dtype = dtype }, "all")
      end
    end)
  end)

  it("covers prompts and contexts around tile edges", function()
    for _, n in ipairs { 63, 64, 65, 127, 129 } do
      check(with { seq_lens = { n }, query_lens = { n }, heads = 2, kv_heads = 1, dim = 8, page = 16 }, "all")
      check(with { seq_lens = { n }, query_lens = { 1 }, heads = 2, kv_heads = 1, dim = 8, page = 16 }, "all")
    end
  end)

  it("masks by global position on every context rank, windows included", function()
    for _, c in ipairs { { 2, 1 }, { 3, 4 }, { 4, 2 } } do
      for rank = 0, c[1] - 1 do
        local o = with { context_size = c[1], interleave = c[2], page = 4, window = 6 }
        check(o, "all", rank)
        o.window = 0
        check(o, "context", rank)
        check(o, "all", rank)
      end
    end
    check(with { window = 1 }, "all")
    check(with { window = 3 }, "new")
    check(with { causal = false, window = 4 }, "all")
    check(with { causal = false }, "new")
  end)

  it("gives 0 and -inf to ranks without keys and to padded rows", function()
    check(with { seq_lens = { 10, 3 }, query_lens = { 1, 3 }, context_size = 4, interleave = 16, page = 16, padding = 3 }, "context", 1)
    check(with { seq_lens = { 3 }, query_lens = { 3 }, padding = 2 }, "context")
  end)

  it("indexes KV heads by the absolute query head, so a slice may begin inside a group", function()
    check(with { heads = 4, kv_heads = 3, group_size = 3, first_head = 2 }, "all")
    assert.error_matches(function() check(with { heads = 4, kv_heads = 1, group_size = 3, first_head = 0 }, "new") end,
      "heads 0 to 3 need KV heads 0 to 1 of 1 here", 1, true)
  end)

  it("splits a long decode without changing the result", function()
    ref.each_isa(function()
      check(with { seq_lens = { 1500, 7 }, query_lens = { 1, 1 }, page = 16, heads = 3, kv_heads = 1, dtype = "bfloat16" }, "all")
      check(with { seq_lens = { 900 }, query_lens = { 2 }, page = 16, heads = 8, kv_heads = 2, context_size = 2 }, "context", 1)
    end)
  end)

  it("reads a window of a long decode only", function()
    for _, window in ipairs { 1, 64, 700 } do
      check(with { seq_lens = { 1500, 900 }, query_lens = { 1, 2 }, page = 16, window = window }, "all")
      check(with { seq_lens = { 1500 }, query_lens = { 1 }, page = 16, window = window, context_size = 2, interleave = 4 }, "all", 1)
    end
  end)

  it("refuses ragged batches, tables and pages that do not fit", function()
    local q = core.tensor { 2, 1, 8 }
    local function refused(message, changes)
      local o = { q = q, k = core.tensor { 3, 1, 4, 8 }, v = core.tensor { 3, 1, 4, 8 }, query_start_loc = { 0, 2 }, seq_lens = { 6 },
        block_table = { 0, 1 } }
      for k, v in pairs(changes) do o[k] = v end
      assert.error_matches(function() ops.attention(o) end, message, 1, true)
    end
    refused("request 0 has 2 new tokens but a sequence length of 1", { seq_lens = { 1 } })
    refused("request 0 has tokens 0 to 3 of 2", { query_start_loc = { 0, 3 } })
    refused("needs 3 blocks, its table has 2", { seq_lens = { 9 } })
    refused("no block for its page 1", { block_table = { 0, -1 } })
    refused("block 3 of a cache of 3", { block_table = { 0, 3 } })
    refused("no multiple of the interleave 3", { context_size = 2, interleave = 3 })
    refused("expected 'all', 'context' or 'new'", { keys = "some" })
  end)
end)
