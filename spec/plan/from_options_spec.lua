-- spec/plan/from_options_spec.lua - plan flags, plan scripts, and the check against a config.json.
local core = require "weft.core"
local policies = require "weft.policy"
local files = require "spec.support.files"
local program = require "spec.support.program"

local function refuses(text, fn, ...)
  local args, n = { ... }, select("#", ...)
  assert.error_matches(function() fn(unpack(args, 1, n)) end, text, 1, true)
end

local function script(text) return files.script(text, "") end -- a plan may be named anything
teardown(files.remove_scripts)

local function read_config(name) return files.read("spec/fixtures/configs/" .. name) end

describe("a policy from plan flags", function()
  it("has the sizes of the flags, the context size following", function()
    local p = policies.from_options { tensor_parallel_size = 8, tensor_parallel_size_attention = 2, expert_parallel_size = 4,
      cp_kv_cache_interleave_size = 4, dcp_comm_backend = "a2a", block_size = 32 }
    assert.equal("tensor=8 attention={tensor=2,context=4,interleave=4,exchange=a2a} experts={expert=4,tensor=2} block_size=32", tostring(p))
    assert.equal("tensor=1 block_size=16", tostring(policies.from_options {}))
  end)

  it("refuses with the words of the validator", function()
    refuses("tensor_parallel_size_attention cannot exceed tensor_parallel_size: 8 > 4.", policies.from_options,
      { tensor_parallel_size = 4, tensor_parallel_size_attention = 8 })
  end)

  it("can be given as a table of sizes", function()
    assert.equal(4, policies.from_options({ policy = { tensor = 4, layers = { ["0-1"] = { attention = { tensor = 2 } } } } }).num_ranks)
  end)
end)

describe("a policy from a plan script", function()
  it("is what the script returns", function()
    local path = script [[
      local weft = require "weft"
      return weft.policy { tensor = 8, attention = { tensor = 2 }, layers = { ["0-3"] = { attention = { tensor = 8 } } } }]]
    local p = policies.from_options { plan = path }
    assert.equal("attention_tensor 1/2 -> tensor 5/8, context 1/4 by 1, ag_rs", tostring(p:get("attention", 4, 5)))
    assert.equal("tensor 5/8 -> tensor 5/8", tostring(p:get("attention", 3, 5)))
  end)

  it("is refused beside plan flags, and beside another block size", function()
    local path = script [[return { tensor = 2 }]]
    refuses("--plan cannot be combined with -tpa", policies.from_options, { plan = path, tensor_parallel_size_attention = 2 })
    refuses("--block-size 32, but the plan", policies.from_options, { plan = path, block_size = 32 })
    assert.equal(2, policies.from_options({ plan = path, block_size = 16 }).num_ranks)
  end)

  it("fails in one line when there is no such file, no syntax, no result", function()
    refuses("cannot read the plan no/such/plan.lua: No such file or directory", policies.from_options, { plan = "no/such/plan.lua" })
    refuses("the plan has a syntax error", policies.from_options, { plan = script "return {" })
    refuses("must return a weft.policy{...}, got nothing", policies.from_options, { plan = script "local x = 1" })
    refuses("failed: ", policies.from_options, { plan = script "error 'no'" })
    refuses("8 % 3 != 0", policies.from_options, { plan = script "return require('weft').policy { tensor = 8, attention = { tensor = 3 } }" })
  end)

  it("is heard once, however many ranks run it, legal or not", function()
    local path = script "print 'the plan'\nio.write 'speaks\\n'\nreturn { tensor = 2 }"
    local model = { "--model", "spec/fixtures/models/demo_llama", "--prompt-ids", "5", "--max-tokens", "1" }
    local function heard(...)
      local _, out = program.run { ... }
      return select(2, out:gsub("the plan\nspeaks\n", ""))
    end
    assert.equal(1, heard("run", "--plan", path, unpack(model)))
    assert.equal(1, heard("verify", "--plans", path, unpack(model)))
    assert.equal(1, heard("repl", "--plan", path))
    assert.equal(1, heard("plan", "--model", model[2], "--plan", path))
    path = script "print 'the plan'\nio.write 'speaks\\n'\nreturn { tensor = 3 }"
    assert.equal(1, heard("run", "--plan", path, unpack(model)))
  end)

  it("may be one of a list, for verify", function()
    local list = policies.load_list(script [[return { { tensor = 2 }, require("weft").policy { tensor = 4 } }]])
    assert.same({ 2, 4 }, { list[1].num_ranks, list[2].num_ranks })
    assert.equal(2, policies.load_list(script "return { tensor = 2 }")[1].num_ranks)
  end)
end)

describe("the check against a model", function()
  local function validate(options, cfg, supported)
    return policies.validate(policies.from_options(options), cfg, { name = "TestForCausalLM",
      supports = function(_, layer_type) return supported:find(layer_type, 1, true) ~= nil end })
  end
  local llama = { num_attention_heads = 32, num_key_value_heads = 8, intermediate_size = 1376, vocab_size = 1000, num_hidden_layers = 4 }

  it("says yes, or no and why", function()
    assert.is_true(validate({ tensor_parallel_size = 16, tensor_parallel_size_attention = 8 }, llama, "attention"))
    local ok, why = validate({ tensor_parallel_size = 16, tensor_parallel_size_attention = 8 }, llama, "")
    assert.is_nil(ok)
    assert.matches("ATTENTION layer parallel plan", why, 1, true)
  end)

  it("holds an encoder's default plan to the key/value rule too", function()
    local encoder = { num_attention_heads = 12, num_key_value_heads = 4, intermediate_size = 1200, is_causal = false }
    local ok, why = validate({ tensor_parallel_size = 6, tensor_parallel_size_attention = 2 }, encoder, "attention")
    assert.is_nil(ok)
    assert.matches("tensor_parallel_size (6) must divide num_key_value_heads (4)", why, 1, true)
  end)

  it("finds the experts of real configurations", function()
    local m2 = core.json.decode(read_config "MiniMaxAI--MiniMax-M2.5_config.json")
    assert.same({ 256, 1536 }, { policies.experts_of(m2) })
    assert.equal(0, policies.mlp_width(m2))
    assert.is_true(validate({ tensor_parallel_size = 8, expert_parallel_size = 8 }, m2, "experts"))
    local _, why = validate({ tensor_parallel_size = 16, tensor_parallel_size_attention = 8 }, m2, "experts")
    assert.matches("TestForCausalLM does not", why, 1, true)
    local mixtral = core.json.decode(read_config "mistralai--Mixtral-8x7B-v0.1_config.json")
    assert.same({ 8, 14336 }, { policies.experts_of(mixtral) })
    local dense = core.json.decode(read_config "meta-llama--Meta-Llama-3.1-8B_config.json")
    assert.equal(0, (policies.experts_of(dense)))
    assert.equal(14336, policies.mlp_width(dense))
  end)
end)
