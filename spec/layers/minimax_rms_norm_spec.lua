-- spec/layers/minimax_rms_norm_spec.lua - q and k norm over all heads of the model (SEMANTICS 5).
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random = fixtures.difference, fixtures.random

local D, V = 4, 2 -- head size; width of v beside it in qkv

-- The columns of q and k that a rank of P holds out of (T, H * D) and (T, KV * D).
local function shards(q, k, H, KV, P, r)
  local nq, nkv = H / P, math.max(1, KV / P)
  local kv_rank = P > KV and math.floor(r / (P / KV)) or r
  return q:narrow(1, r * nq * D, nq * D), k:narrow(1, kv_rank * nkv * D, nkv * D), math.min(P, KV), kv_rank
end

-- This rank's normalised q and k: fused, and one by one.
local function run(H, KV, tokens, dtype)
  local P, r = fixtures.join_tensor_group()
  local q, k, kv_shards, kv_rank = shards(random({ tokens, H * D }, 1, 2), random({ tokens, KV * D }, 2, 3), H, KV, P, r)
  local q_size, k_size = q.shape[2], k.shape[2]
  local qkv = core.tensor({ tokens, q_size + k_size + V }, dtype)
  qkv:narrow(1, 0, q_size):copy(q)
  qkv:narrow(1, q_size, k_size):copy(k)
  local q_norm = core.minimax_rms_norm { hidden_size = H * D, eps = 1e-3 }:load(fixtures.source("q_norm.weight", { H * D }, 3))
  local k_norm = core.minimax_rms_norm { hidden_size = KV * D, eps = 1e-3, weight_shard_world_size = kv_shards, weight_shard_rank = kv_rank }
  k_norm:load(fixtures.source("k_norm.weight", { KV * D }, 4))
  local yq, yk = q_norm:forward_qk(k_norm, qkv, q_size, k_size)
  local q1, k1 = q_norm:forward(qkv:narrow(1, 0, q_size)), k_norm:forward(qkv:narrow(1, q_size, k_size))
  return { q = yq:totable(), k = yk:totable(), q1 = q1:totable(), k1 = k1:totable() }
end

-- The columns of one rank's whole result that rank r of P must have.
local function expected(whole, H, KV, tokens, P, r)
  local q, k = shards(core.tensor({ tokens, H * D }, "float32", whole.q), core.tensor({ tokens, KV * D }, "float32", whole.k), H, KV, P, r)
  return q:totable(), k:totable()
end

describe("weft.minimax_rms_norm", function()
  for _, case in ipairs { { H = 8, KV = 4, P = 2 }, { H = 8, KV = 4, P = 4 }, { H = 8, KV = 2, P = 4 }, { H = 16, KV = 2, P = 8 } } do
    it(("gives %d heads, %d KV heads on %d ranks the statistics of all heads"):format(case.H, case.KV, case.P), function()
      for _, tokens in ipairs { 1, 5 } do
        local whole = core.spawn(1, run, case.H, case.KV, tokens, "float32")[1]
        for i, result in ipairs(core.spawn(case.P, run, case.H, case.KV, tokens, "float32")) do
          local q, k = expected(whole, case.H, case.KV, tokens, case.P, i - 1)
          assert.is_true(difference(q, result.q) < 1e-5)
          assert.is_true(difference(k, result.k) < 1e-5)
          assert.is_true(difference(result.q, result.q1) < 1e-6)
          assert.is_true(difference(result.k, result.k1) < 1e-6)
        end
      end
    end)
  end

  it("is right when KV heads A, B are held as A, A, B, B: mean 5", function()
    local results = core.spawn(4, function()
      local P, r = fixtures.join_tensor_group()
      local value = r < 2 and 1 or 3
      local norm = core.minimax_rms_norm { hidden_size = 4, eps = 0, weight_shard_world_size = 2, weight_shard_rank = math.floor(r / 2) }
      norm:load(core.source("k_norm.weight", core.tensor({ 4 }, "float32", { 1, 1, 1, 1 })))
      return norm:forward(core.tensor({ 1, 2 }, "float32", { value, value })):totable()
    end)
    for i, value in ipairs { 1, 1, 3, 3 } do
      assert.is_true(difference({ value / math.sqrt(5), value / math.sqrt(5) }, results[i]) < 1e-6)
    end
  end)

  it("talks once for q and k together, and not at all with one input rank", function()
    local results = core.spawn(2, function()
      local _, r = fixtures.join_tensor_group()
      local group = core.groups.get("tensor", 2)
      local function calls(plan)
        local q = core.minimax_rms_norm { hidden_size = 8, parallel_plan = plan }:load(fixtures.source("q", { 8 }, 1))
        local k = core.minimax_rms_norm { hidden_size = 8, parallel_plan = plan }:load(fixtures.source("k", { 8 }, 1))
        local before = group:traffic().calls
        q:forward_qk(k, core.tensor { 3, 16 })
        return group:traffic().calls - before
      end
      return { calls(nil), calls(core.plan { input = core.axis(1, 0, "attention_tensor"), output = core.axis(2, r) }) }
    end)
    assert.same({ { 1, 0 }, { 1, 0 } }, results)
  end)

  it("cuts its gain like the input axis, or as it is told", function()
    local plan = fixtures.plan(1, 0)
    local whole = core.minimax_rms_norm { hidden_size = 12, parallel_plan = plan }
    assert.same({ 12, 0 }, { whole.local_size, whole.offset })
    assert.error_matches(function()
      core.minimax_rms_norm { hidden_size = 12, parallel_plan = plan, weight_shard_world_size = 2, weight_shard_rank = 0 }
    end, "2 shards of the gain on 1 ranks", 1, true)
    assert.error_matches(function() core.minimax_rms_norm { hidden_size = 12, weight_shard_world_size = 1 } end, "go together", 1, true)
  end)

  it("refuses q and k with different eps, sizes that are not its own, and missing weights", function()
    local function norm(eps, loaded)
      local n = core.minimax_rms_norm { hidden_size = 4, eps = eps, name = "q_norm" }
      return loaded and n:load(fixtures.source("q_norm.weight", { 4 }, 1)) or n
    end
    local qkv = core.tensor { 2, 10 }
    assert.error_matches(function() norm(1e-6, true):forward_qk(norm(1e-5, true), qkv) end, "must have one eps", 1, true)
    assert.error_matches(function() norm(1e-6, true):forward_qk(norm(1e-6, true), qkv, 4, 3) end, "k_size is 3", 1, true)
    assert.error_matches(function() norm(1e-6):forward(core.tensor { 1, 4 }) end, "weights of q_norm were not loaded", 1, true)
    assert.error_matches(function() norm(1e-6, true):forward_qk(norm(1e-6, true), core.tensor { 2, 7 }) end, "wanted floats [tokens, 8]", 1, true)
    local q, k = norm(1e-6, true):forward_qk(norm(1e-6, true), core.tensor { 0, 10 })
    assert.same({ { 0, 4 }, { 0, 4 } }, { q.shape, k.shape })
  end)
end)
