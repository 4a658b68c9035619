--- Qwen2 and Qwen2.5: Llama with biases on q, k and v (and none on the output projection), and a
-- sliding window in the upper layers when the config turns it on. Both are the config's: cfg.qkv_bias
-- and cfg.window_of(i).
local weft = require "weft"
local Llama = require "weft.models.llama"

local Qwen2 = weft.model "Qwen2ForCausalLM" { supported_layer_types = { "attention", "mlp" } }

function Qwen2.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy)
end

return Qwen2
