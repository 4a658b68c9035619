--- spec/plan/plan_nearest_spec.lua - full-size models under plans: bytes of each rank, and what is legal instead.
local config = require "weft.config"
local models = require "weft.models"
local nearest = require "weft.plan_nearest"
local numbers = require "weft.plan_numbers"
local policies = require "weft.policy"
local program = require "spec.support.program"

local m2, llama = "MiniMaxAI--MiniMax-M2.5", "meta-llama--Meta-Llama-3.1-405B"

local function path(name) return "spec/fixtures/configs/" .. name .. "_config.json" end

local function refusal(name, ...)
  local code, _, err = program.run { "plan", "--model", path(name), ... }
  assert.equal(2, code)
  return err
end

local function weight_bytes(name, sizes)
  local cfg = config.load(path(name))
  local policy = require("weft.core").policy(sizes)
  assert(policies.validate(policy, cfg, { name = cfg.architectures[1], supports = models.supports }))
  return numbers.of(policy, cfg, {}).ranks[1].weight_bytes
end

describe("a full-size model's plan", function()
  it("tells the bytes of each rank of MiniMax-M2 and of Llama 3.1 405B", function()
    for _, case in ipairs {
      { m2, { tensor = 1 }, 229e9 }, { m2, { tensor = 8 }, 29.2e9 }, { m2, { tensor = 8, experts = { expert = 8 } }, 29.2e9 },
      { m2, { tensor = 16, attention = { tensor = 8 }, experts = { expert = 4 } }, 14.8e9 },
      { llama, { tensor = 1 }, 811e9 }, { llama, { tensor = 8 }, 101e9 }, { llama, { tensor = 16, attention = { tensor = 8 } }, 54e9 },
    } do
      local found = weight_bytes(case[1], case[2])
      assert.is_true(math.abs(found / case[3] - 1) < 0.03, ("%s: %.4g bytes, wanted about %.4g"):format(case[1], found, case[3]))
    end
  end)

  it("is refused with the rule's numbers and the nearest legal flags", function()
    for _, case in ipairs {
      { m2, "attention heads (48) must be divisible by tensor parallel size (7). Nearest legal plans: -tp 8,", "-tp", "7" },
      { m2, "Nearest legal plans: -tp 8 -ep 4,", "-tp", "8", "-ep", "3" },
      { m2, "divisible by tensor_parallel_size_attention: 8 % 3 != 0. Nearest legal plans: -tp 8 -tpa 4 -ep 4,", "-tp", "8", "-ep", "4", "-tpa", "3" },
      { m2, "Nearest legal plans: -tp 24 -tpa 8,", "-tp", "32", "-tpa", "8" },
      { llama, "needs a model with experts; LlamaForCausalLM has none. Nearest legal plans: -tp 8,", "-tp", "8", "-ep", "8" },
      { llama, "Nearest legal plans: -tp 8 -tpa 2,", "-tp", "8", "-dcp", "4" },
    } do
      local text = refusal(case[1], unpack(case, 3))
      assert.is_truthy(text:find(case[2], 1, true), text)
    end
  end)

  it("has no nearest plan where the sizes are not at fault or a script gave them", function()
    local cfg = config.load(path(m2))
    local model = { name = "MiniMaxM2ForCausalLM", supports = models.supports }
    assert.is_nil(nearest.of({ plan = "p.lua" }, cfg, model))
    local text = refusal(m2, "-tp", "2", "-tpa", "1", "--cp-kv-cache-interleave-size", "3")
    assert.is_truthy(text:find("block_size must be divisible by cp_kv_cache_interleave_size", 1, true), text)
    assert.is_nil(text:find("Nearest", 1, true))
  end)
end)
