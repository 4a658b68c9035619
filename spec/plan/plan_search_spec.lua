-- spec/plan/plan_search_spec.lua - the list of plans behind `weft verify --plans all`.
local config = require "weft.config"
local policies = require "weft.policy"
local plan_search = require "weft.plan_search"

local function load(model) return config.load("spec/fixtures/models/" .. model) end

local function labels(list)
  local set, n = {}, 0
  for _, entry in ipairs(list) do
    assert(not set[entry.label], "twice: " .. entry.label)
    set[entry.label], n = entry, n + 1
  end
  return set, n
end

describe("the search for legal plans", function()
  it("finds the plans of the demo model on up to 4 ranks", function()
    local set, count = labels(plan_search.legal(load "demo_llama", 4, { "attention" }))
    -- tp1; tp2: plain, tpa1 x 6, 2 mixes; tp4: plain, tpa1 x 6, tpa2 x 6, 3 pairs x 2 mixes
    assert.equal(1 + 1 + 6 + 2 + 1 + 12 + 6, count)
    for _, label in ipairs { "tp1", "tp4", "tp4 tpa2 dcp2 i4 a2a", "tp4 tpa1 dcp4 i16 ag_rs", "tp4 half 1.4|2.2", "tp4 alternating 2.2|4.1" } do
      assert.is_truthy(set[label], label)
    end
    assert.equal(2, set["tp4 half 1.4|2.2"].policy:sizes("attention", 3).tensor)
    assert.equal(1, set["tp4 half 1.4|2.2"].policy:sizes("attention", 1).tensor)
    assert.same({ 1, 4, 1, 4 }, (function()
      local t = {}
      for layer = 0, 3 do t[layer + 1] = set["tp4 alternating 1.4|4.1"].policy:sizes("attention", layer).tensor end
      return t
    end)())
  end)

  it("leaves attention alone where the model does not take a plan for it", function()
    for label in pairs(labels(plan_search.legal(load "demo_llama", 4, {}))) do assert.is_nil(label:match "tpa") end
    assert.is_truthy(labels(plan_search.legal(load "llama_mqa_tied", 4, {}))["tp2 dcp2 i1 a2a"])
  end)

  it("gives only plans that the validator takes, in one order, with sizes that make them again", function()
    for _, model in ipairs { "demo_llama", "llama_mqa_tied", "llama_rope3_bias", "mistral_sliding", "minimax_m2_random" } do
      local cfg = load(model)
      local yes = function() return true end
      local list = plan_search.legal(cfg, 8, yes)
      local again = plan_search.legal(cfg, 8, yes)
      labels(list)
      for i, entry in ipairs(list) do
        assert(policies.validate(entry.policy, cfg, { name = "any", supports = yes }))
        assert.equal(tostring(entry.policy), tostring(policies.from_options { policy = entry.sizes }))
        assert.equal(entry.label, again[i].label)
      end
    end
  end)

  it("misses no (tp, tpa, dcp, ep) that the flags could give", function()
    for _, model in ipairs { "llama_mqa_tied", "llama_rope3_bias", "minimax_m2_random" } do
      local cfg = load(model)
      local yes = function() return true end
      local found = {}
      for _, entry in ipairs(plan_search.legal(cfg, 8, yes)) do
        if not entry.sizes.layers and not entry.sizes.mlp then
          local a, e = entry.policy:sizes "attention", entry.policy:sizes "experts"
          found[table.concat({ entry.policy.tensor, a.tensor, a.context, e.expert }, " ")] = true
        end
      end
      local count = 0
      for tp = 1, 8 do for tpa = 1, tp do for dcp = 1, tp do for ep = 1, tp do
        local ok, policy = pcall(policies.from_options, { tensor_parallel_size = tp, tensor_parallel_size_attention = tpa,
          decode_context_parallel_size = dcp, expert_parallel_size = ep })
        local legal = ok and policies.validate(policy, cfg, { name = "any", supports = yes }) or false
        local key = table.concat({ tp, tpa, dcp, ep }, " ")
        if legal then count = count + 1 end
        if legal ~= (found[key] or false) then error(model .. ": " .. key .. " legal: " .. tostring(legal)) end
      end end end end
      assert.is_true(count > 5)
    end
  end)

  it("takes experts over ranks, and strips that fill the block size asked for", function()
    local set = labels(plan_search.legal(load "minimax_m2_random", 4, { "attention", "experts" }, { block_size = 8 }))
    assert.is_truthy(set["tp4 ep2"])
    assert.is_truthy(set["tp4 tpa2 dcp2 i8 a2a ep4"])
    assert.is_nil(set["tp4 tpa2 dcp2 i16 a2a"])
    assert.equal(8, set["tp4 ep2"].policy.block_size)
    assert.is_nil(labels(plan_search.legal(load "minimax_m2_random", 4, { "attention" }))["tp4 ep2"])
  end)
end)
