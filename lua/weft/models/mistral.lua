--- Mistral: Llama's layers; every layer sees only the last `sliding_window` tokens.
--
-- A model of its own: it declares what it supports and inherits nothing.
local weft = require "weft"
local Llama = require "weft.models.llama"

local Mistral = weft.model "MistralForCausalLM" { supported_layer_types = { "attention", "mlp" } }

function Mistral.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy)
end

return Mistral
