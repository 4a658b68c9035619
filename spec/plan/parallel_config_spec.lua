-- spec/plan/parallel_config_spec.lua - every rule about parallel sizes.
local core = require "weft.core"

local function config(tp, tpa, dcp, rest)
  local t = rest or {}
  t.tensor_parallel_size, t.tensor_parallel_size_attention, t.decode_context_parallel_size = tp, tpa, dcp
  return core.parallel_config(t)
end

local function refuses(text, fn, ...)
  local args, n = { ... }, select("#", ...)
  assert.error_matches(function() fn(unpack(args, 1, n)) end, text, 1, true)
end

describe("weft.parallel_config", function()
  it("holds attention tensor parallelism with the matching context size", function()
    for _, tpa in ipairs { 1, 2 } do
      local c = config(4, tpa, 4 / tpa)
      assert.equal(tpa, c.attention_tp_size)
      assert.equal(4 / tpa, c.decode_context_parallel_size)
      assert.equal(4, c.world_size)
      refuses(("decode_context_parallel_size must equal tensor_parallel_size / tensor_parallel_size_attention (%d), got 1.")
        :format(4 / tpa), config, 4, tpa, 1)
    end
  end)

  it("lets the context size follow when it is not given", function()
    assert.equal(4, config(8, 2).decode_context_parallel_size)
    assert.equal(4, config(8, 2, 0).decode_context_parallel_size)
    assert.equal(1, config(8, 8).decode_context_parallel_size)
    assert.equal(1, config(8).decode_context_parallel_size)
  end)

  it("takes an attention size equal to the tensor size as no override, with any context size", function()
    local c = config(4, 4, 2)
    assert.equal(c.tensor_parallel_size, c.attention_tp_size)
    assert.equal(2, config(4, nil, 2).decode_context_parallel_size)
    assert.equal(4, config(4, nil, 2).attention_tp_size)
    assert.is_nil(config(4).tensor_parallel_size_attention)
  end)

  it("refuses sizes that do not fit together, naming flag and numbers", function()
    refuses("tensor_parallel_size_attention cannot exceed tensor_parallel_size: 8 > 4.", config, 4, 8)
    refuses("tensor_parallel_size must be divisible by tensor_parallel_size_attention: 8 % 3 != 0.", config, 8, 3)
    refuses("tensor_parallel_size must be divisible by decode_context_parallel_size: 8 % 3 != 0 (legal: 1, 2, 4, 8).", config, 8, nil, 3)
    refuses("tensor_parallel_size must be positive, got 0", config, 0)
    refuses("tensor_parallel_size_attention must be positive, got 0", config, 4, 0)
    refuses("decode_context_parallel_size must be positive, got -2", config, 4, nil, -2)
    refuses("tensor_parallel_size must be an integer, got 1.5", config, 1.5)
    refuses("tensor_parallel_size must be an integer, got string", config, "4")
    refuses("expert_parallel_size cannot exceed tensor_parallel_size: 8 > 4.", config, 4, nil, nil, { expert_parallel_size = 8 })
    refuses("tensor_parallel_size must be divisible by expert_parallel_size: 8 % 3 != 0", config, 8, nil, nil, { expert_parallel_size = 3 })
    refuses("the tensor size of mlp: 8 % 5 != 0", config, 8, nil, nil, { tensor_parallel_size_mlp = 5 })
    refuses("parallel_config has no field 'tp'", core.parallel_config, { tp = 4 })
    refuses("at most 1048576 ranks", config, 1024, nil, nil, { pipeline_parallel_size = 1024, data_parallel_size = 2 ^ 30 })
  end)

  it("refuses the a2a exchange without anything to exchange, and unknown exchanges", function()
    refuses("dcp_comm_backend='a2a' requires decode_context_parallel_size > 1.", config, 4, nil, 1, { dcp_comm_backend = "a2a" })
    refuses("dcp_comm_backend='a2a' requires", config, 4, nil, nil, { dcp_comm_backend = "a2a" })
    refuses("dcp_comm_backend must be 'ag_rs' or 'a2a', got 'nccl'", config, 4, 2, 2, { dcp_comm_backend = "nccl" })
    assert.equal("a2a", config(4, 2, nil, { dcp_comm_backend = "a2a" }).dcp_comm_backend)
    assert.equal("ag_rs", config(4, 2).dcp_comm_backend)
  end)

  it("refuses strips that do not fill a block", function()
    refuses("block_size must be divisible by cp_kv_cache_interleave_size: 16 % 3 != 0 (legal: 1, 2, 4, 8, 16).",
      config, 4, nil, nil, { cp_kv_cache_interleave_size = 3 })
    refuses("16 % 32 != 0", config, 4, nil, nil, { cp_kv_cache_interleave_size = 32 })
    assert.equal(32, config(4, nil, nil, { cp_kv_cache_interleave_size = 32, block_size = 64 }).cp_kv_cache_interleave_size)
  end)

  it("holds prefill context ranks to the sizes whose groups exist", function()
    local pcp = function(tp, tpa, dcp, n, dp)
      return config(tp, tpa, dcp, { prefill_context_parallel_size = n, data_parallel_size = dp })
    end
    for _, dcp in ipairs { 1, 2, 8 } do assert.equal(dcp, pcp(4, nil, dcp, 2).decode_context_parallel_size) end
    refuses("must be 1, prefill_context_parallel_size (2) or tensor_parallel_size * prefill_context_parallel_size (8), got 4.",
      pcp, 4, nil, 4, 2)
    refuses("prefill_context_parallel_size (2) cannot be combined with data_parallel_size (2).", pcp, 4, nil, 1, 2, 2)
    refuses("prefill_context_parallel_size (2) cannot be combined with tensor_parallel_size_attention (2) below", pcp, 4, 2, 2, 2)
    assert.equal(8, pcp(4, 4, 1, 2).world_size)
  end)

  it("shows every size and is immutable", function()
    local c = config(8, 2, nil, { dcp_comm_backend = "a2a", cp_kv_cache_interleave_size = 4, expert_parallel_size = 2 })
    assert.equal("tensor_parallel_size=8, tensor_parallel_size_attention=2, pipeline_parallel_size=1, data_parallel_size=1, " ..
      "decode_context_parallel_size=4, prefill_context_parallel_size=1, expert_parallel_size=2, tensor_parallel_size_mlp=none, " ..
      "dcp_comm_backend=a2a, cp_kv_cache_interleave_size=4, block_size=16", tostring(c))
    refuses("immutable", function() c.tensor_parallel_size = 4 end)
  end)
end)

describe("the rules that need a model", function()
  local function check(c, heads, kv, rest)
    local t = { num_attention_heads = heads, num_key_value_heads = kv, intermediate_size = 1024, architecture = "TestForCausalLM",
      supported_layer_types = { "attention", "mlp", "experts" } }
    for k, v in pairs(rest or {}) do t[k] = v end
    return c:validate_model(t)
  end

  it("refuse heads that do not divide over the tensor ranks, whatever attention does", function()
    refuses("Total number of attention heads (30) must be divisible by tensor parallel size (4).", check, config(4), 30, 30)
    refuses("Total number of attention heads (30) must be divisible by tensor parallel size (4).", check, config(4, 2), 30, 30)
    refuses("num_attention_heads (12) must be a multiple of num_key_value_heads (8)", check, config(4), 12, 8)
    assert.is_truthy(check(config(4, 2), 32, 8))
  end)

  it("refuse an attention plan for a model that does not list attention, naming the model", function()
    local none = { supported_layer_types = {}, architecture = "UnsupportedForCausalLM" }
    refuses("Attention tensor parallelism requires a model that supports the ATTENTION layer parallel plan. UnsupportedForCausalLM does not.",
      check, config(4, 2, 2), 32, 8, none)
    assert.is_truthy(check(config(4, 4, 1), 32, 8, none))
    assert.is_truthy(check(config(16, nil, 2), 32, 8, none))
  end)

  it("refuse key/value heads that neither divide nor multiply the attention ranks", function()
    refuses("tensor_parallel_size (6) must divide num_key_value_heads (4) or be a multiple of it.", check, config(6), 12, 4)
    refuses("tensor_parallel_size_attention (6) must divide num_key_value_heads (4)", check, config(12, 6), 12, 4,
      { intermediate_size = 1200 })
    assert.is_truthy(check(config(12, 4), 12, 4, { intermediate_size = 1200 }))
    assert.is_truthy(check(config(8), 32, 2))
  end)

  it("hold plain context parallelism to ranks that share a key/value head", function()
    assert.is_truthy(check(config(8, nil, 4), 32, 2))
    refuses("decode_context_parallel_size (2) needs tensor_parallel_size (4) greater than num_key_value_heads (8)",
      check, config(4, nil, 2), 32, 8)
    refuses("Use tensor_parallel_size_attention = 2 instead.", check, config(4, nil, 2), 32, 8)
    refuses("decode_context_parallel_size (8) must divide the 4 ranks that hold one key/value head", check, config(8, nil, 8), 32, 2)
    refuses("(tensor_parallel_size 6 / num_key_value_heads 2; legal: 1, 3)", check, config(6, nil, 2), 12, 2, { intermediate_size = 1200 })
    assert.is_truthy(check(config(4, 2, 2), 32, 8))
  end)

  it("refuse MLP columns that do not divide", function()
    refuses("intermediate_size (172) must be divisible by tensor_parallel_size (8).", check, config(8), 8, 8, { intermediate_size = 172 })
    local four = config(8, nil, nil, { tensor_parallel_size_mlp = 4 })
    assert.is_truthy(check(four, 8, 8, { intermediate_size = 172 }))
    refuses("supports the MLP layer parallel plan", check, four, 8, 8, { supported_layer_types = { "attention" } })
  end)

  it("refuse experts that do not divide, and experts that are not there", function()
    local ep = function(n) return config(8, nil, nil, { expert_parallel_size = n }) end
    local moe = { num_experts = 12, moe_intermediate_size = 96, intermediate_size = 0 }
    assert.is_truthy(check(ep(4), 8, 8, moe))
    refuses("num_experts (12) must be divisible by expert_parallel_size (8).", check, ep(8), 8, 8, moe)
    refuses("the width of an expert (100) must be divisible by tensor_parallel_size / expert_parallel_size (8 / 1)", check, ep(1), 8, 8,
      { num_experts = 12, moe_intermediate_size = 100, intermediate_size = 0 })
    refuses("expert_parallel_size (4) needs a model with experts; TestForCausalLM has none.", check, ep(4), 8, 8)
  end)
end)
