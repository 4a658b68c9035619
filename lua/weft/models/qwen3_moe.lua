--- Qwen3 with experts: Qwen3's attention, Mixtral's mixture.
local weft = require "weft"
local Llama = require "weft.models.llama"
local Mixtral = require "weft.models.mixtral"
local Qwen3 = require "weft.models.qwen3"

local Qwen3Moe = weft.model "Qwen3MoeForCausalLM" { supported_layer_types = { "attention", "experts" } }

function Qwen3Moe.layer(cfg, weights, policy, i)
  return Llama.decoder(cfg, weights, Qwen3.attention(cfg, weights:at "self_attn", policy, i), Mixtral.experts(cfg, weights, policy, i))
end

function Qwen3Moe.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy, Qwen3Moe.layer)
end

return Qwen3Moe
