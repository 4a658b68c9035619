-- spec/plan/plan_counts_spec.lua - the numbers of `weft plan` are what a run with dummy weights
-- allocates and sends.
local core = require "weft.core"
local files = require "spec.support.files"
local numbers = require "weft.plan_numbers"
local plan_counts = require "spec.support.plan_counts"
local program = require "spec.support.program"

local batch = 3

-- What a plan says of a decode step of the batch: by group, how many collectives and bytes.
local function said_sent(said)
  local list = {}
  for _, part in ipairs(said.parts) do
    for _, move in ipairs(part.moves) do
      local name = ("%s %d"):format(move.group, move.world_size)
      list[name] = list[name] or { calls = 0, bytes = 0 }
      list[name].calls = list[name].calls + part.count
      list[name].bytes = list[name].bytes + part.count * move.bytes * batch
    end
  end
  return list
end

local function compare(model, policy, more)
  local options = { model = model:match "/" and model or "spec/fixtures/models/" .. model .. "/config.json", load_format = "dummy", policy = policy, cache_tokens = 1024 }
  for key, value in pairs(more or {}) do options[key] = value end
  local counted, setup = plan_counts.run(options, batch)
  -- One request as long as the whole cache: all pages.
  local context = counted[1].num_blocks * counted[1].block_tokens
  local said = numbers.of(setup.policy, setup.cfg, { context = context, batch = 1, name = setup.name })
  for r, rank in ipairs(said.ranks) do
    local where = ("%s %s rank %d"):format(model, tostring(setup.policy), r - 1)
    assert.equal(counted[r].weight_bytes, rank.weight_bytes, where .. ": weights")
    assert.equal(counted[r].cache_bytes, rank.cache_bytes_allocated, where .. ": cache")
    assert.same(said_sent(said), counted[r].sent, where .. ": sent in a decode step")
  end
end

-- A folder with the config of a real model made small: its heads, its experts, its features; 2 layers of
-- narrow heads.
local function twin(name, more)
  local cfg = core.json.decode(files.read("spec/fixtures/configs/" .. name .. "_config.json"))
  cfg.num_hidden_layers, cfg.head_dim, cfg.vocab_size, cfg.hidden_size = 2, 8, 1009, cfg.num_attention_heads * 4
  cfg.intermediate_size, cfg.rotary_dim, cfg.max_position_embeddings = 256, cfg.rotary_dim and 4, 1024
  if cfg.num_local_experts then cfg.num_local_experts = 16 end
  for key, value in pairs(more or {}) do cfg[key] = value end
  return files.folder { ["config.json"] = core.json.encode(cfg) }
end

local function compare_twin(name, policies)
  local folder = twin(name)
  for _, policy in ipairs(policies) do compare(folder .. "/config.json", policy) end
  files.remove(folder)
end

describe("the numbers of a plan", function()
  it("are what a Llama allocates and sends: weights, cache and traffic of every rank", function()
    for _, policy in ipairs {
      { tensor = 1 }, { tensor = 4 }, { tensor = 4, attention = { tensor = 2 } },
      { tensor = 4, attention = { tensor = 1, exchange = "a2a", interleave = 4 } },
      { tensor = 4, attention = { tensor = 2 }, mlp = { tensor = 2 } },
      { tensor = 4, attention = { tensor = 2 }, layers = { ["0-1"] = { attention = { tensor = 4 } } } },
    } do compare("demo_llama", policy) end
  end)

  it("are so with biases, tied embeddings, copied KV heads and plain context parallelism", function()
    compare("llama_rope3_bias", { tensor = 2, attention = { tensor = 1 } })
    for _, policy in ipairs { { tensor = 4, attention = { tensor = 4, context = 2 } },
      { tensor = 4, attention = { tensor = 4, context = 4, exchange = "a2a" } }, { tensor = 4, attention = { tensor = 2 } } } do
      compare("llama_mqa_tied", policy)
      compare("llama_mqa_tied", policy, { dtype = "float32" })
    end
  end)

  it("are so with experts", function()
    for _, policy in ipairs { { tensor = 2 }, { tensor = 4, experts = { expert = 2 } },
      { tensor = 4, attention = { tensor = 2 }, experts = { expert = 4 } } } do
      compare("minimax_m2_random", policy)
    end
  end)

  it("are so for every other family: norms inside heads, windows, biases of q, k and v", function()
    for _, model in ipairs { "qwen2_random", "qwen3_random", "qwen3_moe_random", "mixtral_random", "mistral_sliding", "demo_minimax_m2_fp8" } do
      for _, policy in ipairs { { tensor = 1 }, { tensor = 4, attention = { tensor = 2 } } } do compare(model, policy) end
    end
  end)

  it("follow a script whose layers differ: dense ones among experts, one without a feed-forward part", function()
    local script = files.temporary([[
      local weft = require "weft"
      local Llama, Mixtral, M2 = require "weft.models.llama", require "weft.models.mixtral", require "weft.models.minimax_m2"
      local Mixed = weft.model "Mixed" { supported_layer_types = { "attention", "mlp", "experts" } }
      local function layer(cfg, weights, policy, i)
        local attention = M2.attention(cfg, weights:at "self_attn", policy, i)
        if i == 0 then return Llama.decoder(cfg, weights, attention, Llama.mlp(cfg, weights:at "mlp", policy, i)) end
        if i == 1 then return Llama.decoder(cfg, weights, attention, function(h) return h end) end
        return Llama.decoder(cfg, weights, attention, Mixtral.experts(cfg, weights, policy, i))
      end
      function Mixed.build(cfg, weights, policy) return Llama.build(cfg, weights, policy, layer) end
      return Mixed]], ".lua")
    local folder = twin("MiniMaxAI--MiniMax-M2.5", { num_hidden_layers = 4 })
    for _, policy in ipairs { { tensor = 1 }, { tensor = 4, attention = { tensor = 2 }, mlp = { tensor = 2 }, experts = { expert = 2 } } } do
      compare(folder .. "/config.json", policy, { script = script })
    end
    local said = program.json { "plan", script, "--model", folder .. "/config.json", "--json", "-tp", "2" }
    local layers = {}
    for _, part in ipairs(said.parts) do layers[#layers + 1] = part.layer_ranges and part.type .. " " .. part.layer_ranges end
    assert.same({ "attention 0, 2-3", "attention 1", "mlp 0", "experts 2-3" }, layers) -- layer 1 has a norm that nothing follows
    os.remove(script)
    files.remove(folder)
  end)

  it("are so for small twins of Llama-3.1-8B, 70B and 405B, up to 8 ranks", function()
    local shared = { tensor = 8, attention = { tensor = 2 } }
    compare_twin("meta-llama--Meta-Llama-3.1-8B", { { tensor = 8 }, shared, { tensor = 8, attention = { tensor = 1, exchange = "a2a" } } })
    compare_twin("meta-llama--Meta-Llama-3.1-70B", { { tensor = 1 }, { tensor = 8, attention = { tensor = 4, exchange = "a2a", interleave = 16 } } })
    compare_twin("meta-llama--Meta-Llama-3.1-405B", { { tensor = 8, attention = { tensor = 8, context = 1 } }, shared })
  end)

  it("are so for a small twin of MiniMax-M2, fp8 with scales", function()
    compare_twin("MiniMaxAI--MiniMax-M2.5", { { tensor = 1 }, { tensor = 8, experts = { expert = 8 } },
      { tensor = 8, attention = { tensor = 4 }, experts = { expert = 4 } }, { tensor = 8, attention = { tensor = 2, exchange = "a2a" }, experts = { expert = 2 } } })
  end)
end)
