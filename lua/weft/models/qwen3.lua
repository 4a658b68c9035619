--- Qwen3: Llama with a norm of its own for each query and key head, before the rotation.
local weft = require "weft"
local Llama = require "weft.models.llama"
local nn = weft.nn

local Qwen3 = weft.model "Qwen3ForCausalLM" { supported_layer_types = { "attention", "mlp" } }

--- Attention of layer i. Statistics stay inside a head, so no plan changes them.
function Qwen3.attention(cfg, weights, policy, i)
  return Llama.attention(cfg, weights, policy, i, function(qkv)
    local q_norm = nn.rms_norm(cfg, weights:at "q_norm", cfg.head_dim)
    local k_norm = nn.rms_norm(cfg, weights:at "k_norm", cfg.head_dim)
    return function(packed)
      local q, k, v = qkv:split_qkv(packed)
      q_norm:forward_heads(q)
      k_norm:forward_heads(k)
      return q, k, v
    end
  end)
end

function Qwen3.layer(cfg, weights, policy, i)
  return Llama.decoder(cfg, weights, Qwen3.attention(cfg, weights:at "self_attn", policy, i),
    Llama.mlp(cfg, weights:at "mlp", policy, i))
end

function Qwen3.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy, Qwen3.layer)
end

return Qwen3
