-- spec/layers/qkv_linear_spec.lua - queries, keys and values under a plan (SEMANTICS 4.1).
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local range, rows_of = fixtures.range, fixtures.rows_of

local HIDDEN = 4

-- A layer of one rank, loaded with matrices whose rows are numbered within q, k and v.
local function layer(t)
  local p, r = t.P, t.r or 0
  local tp = t.tp or p
  local heads, kv, d, dv = t.H, t.KV, t.D or 2, t.Dv or t.D or 2
  local qkv = core.qkv_linear {
    hidden_size = HIDDEN, head_size = d, v_head_size = t.Dv, total_num_heads = heads, total_num_kv_heads = kv,
    parallel_plan = fixtures.plan(p, r, tp, t.t or r), tensor_parallel_size = tp,
  }
  qkv:load("q", fixtures.labelled("q_proj.weight", heads * d, HIDDEN))
  qkv:load("k", fixtures.labelled("k_proj.weight", kv * d, HIDDEN))
  qkv:load("v", fixtures.labelled("v_proj.weight", kv * dv, HIDDEN))
  return qkv
end

local function held(qkv)
  local rows, parts, at = rows_of(qkv, HIDDEN), {}, 0
  for i, size in ipairs { qkv.q_size, qkv.k_size, qkv.v_size } do
    parts[i] = {}
    for j = 1, size do parts[i][j] = rows[at + j] end
    at = at + size
  end
  return unpack(parts)
end

describe("weft.qkv_linear", function()
  it("gives a rank its query rows, and one KV head to several ranks when there are more ranks", function()
    local qkv = layer { H = 8, KV = 2, P = 4, r = 3 }
    assert.same({ 2, 1, 2 }, { qkv.num_heads, qkv.num_kv_heads, qkv.num_kv_head_replicas })
    assert.same({ 6, 1 }, { qkv.first_head, qkv.first_kv_head })
    local q, k, v = held(qkv)
    assert.same(range(12, 15), q)
    assert.same(range(2, 3), k)
    assert.same(range(2, 3), v)
  end)

  it("divides the KV heads when there are as many as ranks or more", function()
    local q, k = held(layer { H = 8, KV = 4, P = 2, r = 1 })
    assert.same({ range(8, 15), range(4, 7) }, { q, k })
    local even = layer { H = 8, KV = 8, P = 4, r = 0, tp = 8, t = 0 }
    assert.same({ 2, 2, 1 }, { even.num_heads, even.num_kv_heads, even.num_kv_head_replicas })
    local equal = layer { H = 8, KV = 4, P = 4, r = 2 }
    assert.same({ 2, 1, 1, 2 }, { equal.num_heads, equal.num_kv_heads, equal.num_kv_head_replicas, equal.first_kv_head })
  end)

  it("takes its rows by the input axis, whatever the output axis is", function()
    for t = 0, 7 do
      local q, k = held(layer { H = 16, KV = 4, P = 2, r = math.floor(t / 4), tp = 8, t = t })
      local a = math.floor(t / 4)
      assert.same(range(16 * a, 16 * a + 15), q)
      assert.same(range(4 * a, 4 * a + 3), k)
    end
  end)

  it("replicates KV heads for 48 heads over 16 ranks", function()
    local qkv = layer { H = 48, KV = 8, P = 16, r = 5 }
    assert.same({ 3, 1, 2, 15, 2 },
      { qkv.num_heads, qkv.num_kv_heads, qkv.num_kv_head_replicas, qkv.first_head, qkv.first_kv_head })
  end)

  it("refuses heads that do not divide and plans that do not match", function()
    assert.has_error(function() layer { H = 6, KV = 4, P = 3 } end)
    assert.has_error(function() layer { H = 7, KV = 7, P = 2 } end)
    assert.error_matches(function()
      core.qkv_linear { hidden_size = 4, head_size = 2, total_num_heads = 8, total_num_kv_heads = 8,
        parallel_plan = fixtures.plan(4, 0), tensor_parallel_size = 8 }
    end, "QKV output plan must match tensor parallelism: plan=4, tp=8", 1, true)
  end)

  it("compares the plan with the tensor parallelism of this state's policy", function()
    finally(core.layer_parallel.clear)
    core.layer_parallel.init(fixtures.plan(8, 3))
    local t = { hidden_size = 4, head_size = 2, total_num_heads = 8, total_num_kv_heads = 4 }
    assert.equal(3, core.qkv_linear(t).first_head)
    t.parallel_plan = fixtures.plan(4, 0)
    assert.error_matches(function() core.qkv_linear(t) end, "plan=4, tp=8", 1, true)
    t.disable_tp = true
    assert.same({ 8, 4, 0 }, { core.qkv_linear(t).num_heads, core.qkv_linear(t).num_kv_heads, core.qkv_linear(t).first_head })
  end)

  it("splits by the widths of q, k and v, which may differ", function()
    local qkv = layer { H = 4, KV = 2, P = 2, r = 1, D = 4, Dv = 3 }
    assert.same({ 8, 4, 3, 15 }, { qkv.q_size, qkv.k_size, qkv.v_size, qkv.output_size })
    local packed = qkv:forward(fixtures.random({ 3, HIDDEN }, 1))
    local q, k, v = qkv:split_qkv(packed)
    assert.same({ { 3, 8 }, { 3, 4 }, { 3, 3 } }, { q.shape, k.shape, v.shape })
    assert.equal(packed:get(2, 12), v:get(2, 0))
    v:set(42, 1, 2)
    assert.equal(42, packed:get(1, 14))
    local _, _, rows = held(qkv)
    assert.same(range(3, 5), rows)
  end)

  it("cuts a fused tensor into q, k and v before it shards them", function()
    for r = 0, 3 do
      local apart = layer { H = 8, KV = 2, P = 4, r = r, Dv = 3 }
      local fused = core.qkv_linear { hidden_size = HIDDEN, head_size = 2, v_head_size = 3, total_num_heads = 8,
        total_num_kv_heads = 2, parallel_plan = fixtures.plan(4, r), tensor_parallel_size = 4 }
      fused:load(nil, fixtures.labelled("qkv_proj.weight", 16 + 4 + 6, HIDDEN))
      local q, k, v = held(apart)
      local fq, fk, fv = held(fused)
      for i = 1, #k do k[i] = k[i] + 16 end
      for i = 1, #v do v[i] = v[i] + 20 end
      assert.same({ q, k, v }, { fq, fk, fv })
    end
  end)

  it("adds to each row its own bias", function()
    local function biased(r, P)
      local qkv = core.qkv_linear { hidden_size = HIDDEN, head_size = 2, total_num_heads = 4, total_num_kv_heads = 2,
        bias = true, parallel_plan = fixtures.plan(P, r), tensor_parallel_size = P }
      qkv:load(nil, fixtures.source("qkv.weight", { 16, HIDDEN }, 3))
      for i, id in ipairs { "q", "k", "v" } do
        qkv:load_bias(id, fixtures.source(id .. ".bias", { id == "q" and 8 or 4 }, 10 + i))
      end
      return qkv:forward(fixtures.random({ 2, HIDDEN }, 4)):narrow(0, 1, 1):totable()
    end
    local whole = biased(0, 1)
    local first, second = biased(0, 2), biased(1, 2)
    assert.is_true(fixtures.difference(first, { whole[1], whole[2], whole[3], whole[4], whole[9], whole[10], whole[13], whole[14] }) < 1e-6)
    assert.is_true(fixtures.difference(second, { whole[5], whole[6], whole[7], whole[8], whole[11], whole[12], whole[15], whole[16] }) < 1e-6)
  end)

  it("names what is wrong with a weight", function()
    local qkv = core.qkv_linear { hidden_size = 4, head_size = 2, total_num_heads = 4, total_num_kv_heads = 2,
      name = "layers.3.qkv_proj", disable_tp = true }
    local x = core.tensor { 1, 4 }
    assert.error_matches(function() qkv:load("z", fixtures.labelled("z", 8, 4)) end,
      "layers.3.qkv_proj: unknown shard id 'z' (known: q, k, v)", 1, true)
    assert.error_matches(function() qkv:load("k", fixtures.labelled("k_proj.weight", 8, 4)) end,
      "tensor 'k_proj.weight': wanted [4, 4], found [8, 4]", 1, true)
    qkv:load("q", fixtures.labelled("q_proj.weight", 8, 4))
    assert.error_matches(function() qkv:forward(x) end, "weights of layers.3.qkv_proj were not loaded (missing: k, v)", 1, true)
    assert.error_matches(function() qkv:load_bias("q", fixtures.source("b", { 8 }, 1)) end, "made without a bias", 1, true)
    assert.error_matches(function() qkv:forward(core.tensor { 1, 5 }) end, "wanted floats [tokens, 4], found float32[1, 5]", 1, true)
  end)
end)
