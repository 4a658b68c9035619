-- spec/plan/front_spec.lua - the search over legal plans, and the legal plans near a refused one.
local config = require "weft.config"
local core = require "weft.core"
local front = require "weft.plan.front"
local machines = require "weft.machines"
local nearest = require "weft.plan_nearest"
local policies = require "weft.policy"
local scatter = require "weft.plan.scatter"

local function load(name) return config.load("spec/fixtures/configs/" .. name .. "_config.json") end
local all = function() return true end

local function search(name, options)
  return front.search(load(name), { name = "any", supports = all }, machines.get(options.machine or "h200"), options)
end

describe("the search", function()
  it("prices every legal plan of Llama and MiniMax-M2 on up to 64 ranks within seconds", function()
    for _, name in ipairs { "meta-llama--Meta-Llama-3.1-405B", "meta-llama--Meta-Llama-3.1-70B", "MiniMaxAI--MiniMax-M2.5" } do
      local result = search(name, { max_ranks = 64, context = 32768 })
      assert.is_true(result.num_plans > 100 and result.num_points > 500)
      assert.is_true(result.seconds < 10)
      assert.is_string(core.json.encode(front.table(result)))
    end
  end)

  it("keeps the points that no other beats in both, fastest for a user first", function()
    local result = search("meta-llama--Meta-Llama-3.1-70B", { max_ranks = 8, context = 8192 })
    local on_front = 0
    for _, p in ipairs(result.points) do
      local beaten = false
      for _, q in ipairs(result.points) do
        if q.user >= p.user and q.rank >= p.rank and (q.user > p.user or q.rank > p.rank) then beaten = true end
      end
      if p.front then on_front = on_front + 1 end
      assert.is_false((p.front or false) and beaten)
      if not beaten then -- it, or one as good in both, is there
        local found = false
        for _, q in ipairs(result.front) do found = found or (q.user == p.user and q.rank == p.rank) end
        assert.is_true(found)
      end
    end
    assert.equal(on_front, #result.front)
    for i = 2, #result.front do assert.is_true(result.front[i].user < result.front[i - 1].user) end
  end)

  it("finds that a long context wants its sequence shared by the ranks that would hold the same KV heads", function()
    local long = search("meta-llama--Meta-Llama-3.1-405B", { max_ranks = 32, context = 1000000, batch = 8, machine = "gb200-nvl72" })
    local label = long.front[1].label -- by fewer heads (-tpa 8), or with the queries gathered (-dcp 4)
    assert.is_truthy(label:find("-tpa 8", 1, true) or label:find("-dcp 4", 1, true), label)
  end)

  it("takes one batch when asked, keeps none that does not fit, and draws either way", function()
    for _, p in ipairs(search("meta-llama--Meta-Llama-3.1-8B", { max_ranks = 4, context = 1024, batch = 5 }).points) do assert.equal(5, p.batch) end
    local none = search("meta-llama--Meta-Llama-3.1-405B", { max_ranks = 2, context = 1024 })
    assert.equal(0, #none.front)
    assert.matches("no legal plan on up to 2 ranks has room", scatter.text(none, {}), 1, true)
    assert.matches("</svg>", scatter.svg(none), 1, true)
    local some = search("meta-llama--Meta-Llama-3.1-8B", { max_ranks = 4, context = 1024 })
    assert.matches("tokens/s a user", scatter.text(some, {}), 1, true)
    assert.is_nil(scatter.text(some, {}):find("\27", 1, true))
    assert.is_truthy(scatter.text(some, { colour = true }):find("\27[38;5;208m●", 1, true))
    assert.matches("plans that no other beats in both", scatter.svg(some), 1, true)
  end)
end)

describe("the plans near a refused one", function()
  local model = { name = "any", supports = all }

  it("are legal, near ones first, and none for what is legal itself", function()
    for _, name in ipairs { "meta-llama--Meta-Llama-3.1-8B", "MiniMaxAI--MiniMax-M2.5" } do
      local cfg = load(name)
      for _, wanted in ipairs { { 3, 3, 1, 1 }, { 16, 3, 5, 1 }, { 48, 48, 1, 7 }, { 1024, 1, 1024, 1 } } do
        local list = nearest.list({ tensor_parallel_size = wanted[1], tensor_parallel_size_attention = wanted[2],
          decode_context_parallel_size = wanted[3], expert_parallel_size = wanted[4] }, cfg, model, 3)
        assert.equal(3, #list)
        for i, plan in ipairs(list) do
          local policy = policies.from_options { tensor_parallel_size = plan.tp, tensor_parallel_size_attention = plan.tpa,
            decode_context_parallel_size = plan.dcp, expert_parallel_size = plan.ep }
          assert(policies.validate(policy, cfg, model))
          assert.is_true(i == 1 or plan.distance >= list[i - 1].distance)
        end
      end
      assert.same({}, nearest.list({ tensor_parallel_size = 8, tensor_parallel_size_attention = 4 }, cfg, model, 3)) -- legal itself
    end
  end)
end)
