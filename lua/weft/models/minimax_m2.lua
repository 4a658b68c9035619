--- MiniMax-M2: attention with a norm of q and k over all heads of the model and a rotation of a part
-- of each head, and a mixture of experts chosen by sigmoid scores plus a bias.
--
-- Layers from num_hidden_layers on (the draft modules of some checkpoints) are never asked for.
local weft = require "weft"
local Llama = require "weft.models.llama"
local Mixtral = require "weft.models.mixtral"
local nn = weft.nn

local MiniMaxM2 = weft.model "MiniMaxM2ForCausalLM" { supported_layer_types = { "attention", "experts" } }

--- Attention of layer i. The norms' statistics span the plan's input group; with more ranks than key
-- heads, several ranks hold the same head and the same part of k_norm.
function MiniMaxM2.attention(cfg, weights, policy, i)
  local splitter = cfg.use_qk_norm and function(qkv, plan)
    local replicas = qkv.num_kv_head_replicas
    local q_norm = nn.minimax_rms_norm {
      weights = weights:at "q_norm",
      hidden_size = cfg.num_attention_heads * cfg.head_dim,
      eps = cfg.rms_norm_eps,
      parallel_plan = plan,
    }
    local k_norm = nn.minimax_rms_norm {
      weights = weights:at "k_norm",
      hidden_size = cfg.num_key_value_heads * cfg.head_dim,
      eps = cfg.rms_norm_eps,
      parallel_plan = plan,
      weight_shard_world_size = plan.input.world_size / replicas,
      weight_shard_rank = math.floor(plan.input.rank / replicas),
    }
    return function(packed)
      local q, k = q_norm:forward_qk(k_norm, packed)
      local _, _, v = qkv:split_qkv(packed)
      return q, k, v
    end
  end
  return Llama.attention(cfg, weights, policy, i, splitter or nil)
end

function MiniMaxM2.layer(cfg, weights, policy, i)
  return Llama.decoder(cfg, weights, MiniMaxM2.attention(cfg, weights:at "self_attn", policy, i),
    Mixtral.experts(cfg, weights, policy, i))
end

function MiniMaxM2.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy, MiniMaxM2.layer)
end

return MiniMaxM2
