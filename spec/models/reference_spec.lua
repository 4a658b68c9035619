--- spec/models/reference_spec.lua - models under plans against Hugging Face transformers' results.
local reference = require "spec.support.reference"

local plans = {
  { "-tp", "1" }, { "-tp", "2" }, { "-tp", "4" }, { "-tp", "8" },
  { "-tp", "4", "-tpa", "2", "-dcp", "2" }, { "-tp", "8", "-tpa", "2", "-dcp", "4" }, { "-tp", "8", "-tpa", "1", "-dcp", "8" },
}

local function check(model, list)
  for _, promise in ipairs(reference.promises(model, list)) do it(promise[1], promise[2]) end
end

describe("a dense model", function()
  for _, model in ipairs { "demo_llama", "llama_mqa_tied", "llama_rope3_bias", "mistral_sliding" } do check(model, plans) end
  for _, model in ipairs { "qwen2_random", "qwen3_random" } do check(model, { plans[1], plans[3], plans[6] }) end
end)
