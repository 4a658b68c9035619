-- spec/plan/policy_spec.lua - from sizes to plans, per layer type and per layer.
local core = require "weft.core"
local lp = core.layer_parallel

local function refuses(text, fn, ...)
  local args, n = { ... }, select("#", ...)
  assert.error_matches(function() fn(unpack(args, 1, n)) end, text, 1, true)
end

local function example()
  return core.policy {
    tensor = 8,
    attention = { tensor = 2 },
    experts = { expert = 4, tensor = 2 },
    mlp = { tensor = 4 },
    layers = { ["0-3"] = { attention = { tensor = 8 } }, [5] = { attention = { tensor = 4, interleave = 4, exchange = "a2a" } } },
  }
end

describe("weft.policy", function()
  after_each(lp.clear)

  it("lowers to the plans of each rank", function()
    local policy = example()
    for t = 0, 7 do
      local tensor = core.axis(8, t)
      assert.equal(core.plan { input = tensor, output = tensor }, policy:get("default", nil, t))
      assert.equal(core.plan { input = core.axis(2, math.floor(t / 4), "attention_tensor"), output = tensor,
        context = core.axis(4, t % 4, "context") }, policy:get("attention", 4, t))
      assert.equal(policy:get("default", 0, t), policy:get("attention", 3, t))
      assert.equal(core.plan { input = core.axis(4, math.floor(t / 2), "attention_tensor"), output = tensor,
        context = core.axis(2, t % 2, "context"), interleave = 4, exchange = "a2a" }, policy:get("attention", 5, t))
      assert.equal(core.plan { input = core.axis(2, t % 2, "expert_tensor"), output = tensor,
        expert = core.axis(4, math.floor(t / 2), "expert") }, policy:get("experts", 0, t))
      local columns = core.axis(4, math.floor(t / 2), "mlp_tensor")
      assert.equal(core.plan { input = columns, output = columns }, policy:get("mlp", 0, t))
      assert.equal(policy:get("default", 0, t), policy:get("embedding", 0, t))
    end
  end)

  it("installs what it lowers: layer_parallel gives the same plans", function()
    local policy = example()
    for t = 0, 7 do
      lp.init(policy:lower(t))
      local by_init = {}
      for _, kind in ipairs { "default", "attention", "mlp", "experts", "lm_head" } do
        for layer = 0, 6 do
          assert.equal(policy:get(kind, layer, t), lp.get(kind, layer))
          by_init[#by_init + 1] = lp.get(kind, layer)
        end
      end
      lp.clear()
      policy:install(t)
      local n = 0
      for _, kind in ipairs { "default", "attention", "mlp", "experts", "lm_head" } do
        for layer = 0, 6 do n = n + 1 assert.equal(by_init[n], lp.get(kind, layer)) end
      end
    end
  end)

  it("has no override where a layer type is cut like the default", function()
    local _, overrides = core.policy({ tensor = 4, attention = { tensor = 4 }, mlp = { tensor = 4 }, experts = { expert = 1 } }):lower(1)
    assert.is_nil(next(overrides))
    local _, plain = core.policy({ tensor = 4, attention = { context = 2 } }):lower(3)
    assert.equal("tensor 3/4 -> tensor 3/4, context 1/2 by 1, ag_rs", tostring(plain.attention))
  end)

  it("lists the groups it needs once each, in one order", function()
    local seen = {}
    for i, g in ipairs(example():groups()) do
      local text = {}
      for r, row in ipairs(g.rows) do text[r] = table.concat(row, ",") assert.equal(g.world_size, #row) end
      seen[i] = g.type .. " " .. table.concat(text, " ")
    end
    assert.same({
      "tensor 0,1,2,3,4,5,6,7",
      "attention_tensor 0,4 1,5 2,6 3,7",
      "attention_tensor 0,2,4,6 1,3,5,7",
      "context 0,1 2,3 4,5 6,7",
      "context 0,1,2,3 4,5,6,7",
      "expert 0,2,4,6 1,3,5,7",
      "expert_tensor 0,1 2,3 4,5 6,7",
      "mlp_tensor 0,2,4,6 1,3,5,7",
    }, seen)
    assert.same({}, core.policy({ tensor = 1 }):groups())
  end)

  it("finds each axis of each plan as this rank's place in a listed group", function()
    local policy = example()
    local groups = policy:groups()
    local function check(axis, t)
      if axis.world_size == 1 then return end
      for _, g in ipairs(groups) do
        if g.type == axis.group and g.world_size == axis.world_size then
          for _, row in ipairs(g.rows) do
            if row[axis.rank + 1] == t then return end
          end
        end
      end
      error(("no group for %s of rank %d"):format(tostring(axis), t))
    end
    for t = 0, 7 do
      for _, kind in ipairs { "default", "attention", "mlp", "experts" } do
        for layer = 0, 6 do
          local plan = policy:get(kind, layer, t)
          check(plan.input, t) check(plan.output, t) check(plan.context, t) check(plan.expert, t)
        end
      end
    end
  end)

  it("knows the least common multiple of all context sizes", function()
    assert.equal(4, example().context_lcm)
    assert.equal(1, core.policy({ tensor = 8 }).context_lcm)
    assert.equal(6, core.policy({ tensor = 12, attention = { tensor = 4 }, layers = { [0] = { attention = { tensor = 6 } } } }).context_lcm)
  end)

  it("reads as what it is", function()
    assert.equal("tensor=8 attention={tensor=2,context=4,interleave=1,exchange=ag_rs} mlp={tensor=4} experts={expert=4,tensor=2} " ..
      "layers 0-3 attention={tensor=8} layer 5 attention={tensor=4,context=2,interleave=4,exchange=a2a} block_size=16", tostring(example()))
    assert.same({ tensor = 4, context = 2, expert = 1, interleave = 4, exchange = "a2a" }, example():sizes("attention", 5))
    assert.equal(8, example().num_ranks)
  end)

  it("gives the rank of this state when none is named", function()
    assert.equal(core.policy({ tensor = 2 }):get("default", 0, 0), core.policy({ tensor = 2 }):get())
  end)

  it("refuses sizes that do not fit, saying where", function()
    refuses("tensor_parallel_size must be divisible by tensor_parallel_size_attention: 8 % 3 != 0.", core.policy, { tensor = 8, attention = { tensor = 3 } })
    refuses("(while checking layers 0-3)", core.policy, { tensor = 8, layers = { ["0-3"] = { attention = { tensor = 16 } } } })
    refuses("(while checking layer 7)", core.policy, { tensor = 8, layers = { [7] = { mlp = { tensor = 3 } } } })
    refuses("decode_context_parallel_size must equal", core.policy, { tensor = 8, attention = { tensor = 2, context = 2 } })
    refuses("experts: expert (4) * tensor (4) must equal the tensor size of the policy (8)", core.policy, { tensor = 8, experts = { expert = 4, tensor = 4 } })
    refuses("lm_head follows the tensor size of the policy (8), got 4", core.policy, { tensor = 8, lm_head = { tensor = 4 } })
    refuses("block_size must be divisible by cp_kv_cache_interleave_size: 16 % 32 != 0", core.policy, { tensor = 8, attention = { tensor = 2, interleave = 32 } })
    refuses("dcp_comm_backend='a2a' requires", core.policy, { tensor = 8, exchange = "a2a" })
    refuses("a policy has no field 'atention'", core.policy, { tensor = 8, atention = { tensor = 2 } })
    refuses("attention must be a table such as {tensor = 2}, got number", core.policy, { tensor = 8, attention = 2 })
    refuses("attention has no field 'expert'", core.policy, { tensor = 8, attention = { expert = 2 } })
    refuses("layers: 0-3 and 2-2 overlap", core.policy, { tensor = 8, layers = { ["0-3"] = { mlp = { tensor = 4 } }, [2] = { attention = { tensor = 2 } } } })
    refuses("rank 8 is outside of the 8 ranks of the policy", example().get, example(), "attention", 0, 8)
    refuses("immutable", function() example().tensor = 4 end)
  end)

  it("is checked against a model, single layers included", function()
    local numbers = { architecture = "TestForCausalLM", num_attention_heads = 16, num_key_value_heads = 4, intermediate_size = 64,
      num_hidden_layers = 6, supported_layer_types = { "attention" } }
    local function check(t) return core.policy(t):validate_model(numbers) end
    assert.is_truthy(check { tensor = 8, attention = { tensor = 2 }, layers = { ["0-3"] = { attention = { tensor = 8, context = 2 } } } })
    refuses("must divide the 2 ranks that hold one key/value head", check, { tensor = 8, layers = { ["0-3"] = { attention = { context = 4 } } } })
    refuses("layers: 4-6, but the model has 6 layers, 0 to 5", check, { tensor = 8, layers = { ["4-6"] = { attention = { tensor = 2 } } } })
    refuses("supports the MLP layer parallel plan. TestForCausalLM does not.", check, { tensor = 8, mlp = { tensor = 4 } })
    refuses("needs a model with experts", check, { tensor = 8, experts = { expert = 2 } })
    refuses("attention heads (16) must be divisible by tensor parallel size (3)", check, { tensor = 3 })
  end)

  it("leaves nothing behind", function()
    collectgarbage() collectgarbage()
    local before = core.live_objects()
    local policy = example()
    policy:lower(3)
    policy:groups()
    pcall(core.policy, { tensor = 8, attention = { tensor = 3 } })
    policy:close()
    policy:close()
    assert.equal(before, core.live_objects())
    refuses("object is closed", policy.lower, policy, 0)
  end)
end)
