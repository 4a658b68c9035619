-- spec/plan/plan_counts_spec.lua - the numbers of `weft plan` are what a run with dummy weights
-- allocates and sends.
local core = require "weft.core"
local numbers = require "weft.plan_numbers"
local plan_counts = require "spec.support.plan_counts"

local batch = 3

local function compare(model, policy, more)
  local options = { model = model:match "%.json$" and model or "spec/fixtures/models/" .. model .. "/config.json", load_format = "dummy", policy = policy, cache_tokens = 256 }
  for key, value in pairs(more or {}) do options[key] = value end
  local counted, setup = plan_counts.run(options, batch)
  -- One request as long as the whole cache: all pages.
  local context = counted[1].num_blocks * counted[1].block_tokens
  local said = numbers.of(setup.policy, setup.cfg, { context = context, batch = 1 })
  for r, rank in ipairs(said.ranks) do
    local where = ("%s %s rank %d"):format(model, tostring(setup.policy), r - 1)
    assert.equal(counted[r].weight_bytes, rank.weight_bytes, where .. ": weights")
    assert.equal(counted[r].cache_bytes, rank.cache_bytes_allocated, where .. ": cache")
    assert.equal(counted[r].sent, rank.sent_bytes_per_token * batch, where .. ": sent in a decode step")
  end
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
end)
