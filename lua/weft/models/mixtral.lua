--- Mixtral: Llama's attention, and a mixture of experts in place of the MLP.
--
-- Also the mixture that its relatives use (minimax_m2.lua, qwen3_moe.lua): how scores are made, whether
-- a bias joins the choice and whether weights are divided by their sum are the config's.
local weft = require "weft"
local Llama = require "weft.models.llama"
local nn = weft.nn

local Mixtral = weft.model "MixtralForCausalLM" { supported_layer_types = { "attention", "experts" } }

--- The mixture of layer i: every rank chooses experts for all tokens and runs those that it holds.
-- `weights` is the layer's place: checkpoints call the mixture `block_sparse_moe` or `mlp`.
function Mixtral.experts(cfg, weights, policy, i)
  local moe = weights:at(weights:has "mlp.gate.weight" and "mlp" or "block_sparse_moe")
  local router = nn.router {
    weights = moe:at "gate",
    hidden_size = cfg.hidden_size,
    num_experts = cfg.num_experts,
    num_experts_per_tok = cfg.num_experts_per_tok,
    scoring = cfg.scoring_func,
    renormalize = cfg.norm_topk_prob,
    bias = cfg.use_routing_bias and moe:source("e_score_correction_bias", { cfg.num_experts }, "float32") or nil,
  }
  local experts = nn.experts {
    weights = moe:at "experts",
    num_experts = cfg.num_experts,
    hidden_size = cfg.hidden_size,
    intermediate_size = cfg.moe_intermediate_size,
    parallel_plan = policy:get("experts", i),
  }
  return function(x)
    return experts:forward(x, router:forward(x))
  end
end

function Mixtral.layer(cfg, weights, policy, i)
  return Llama.decoder(cfg, weights, Llama.attention(cfg, weights:at "self_attn", policy, i), Mixtral.experts(cfg, weights, policy, i))
end

function Mixtral.build(cfg, weights, policy)
  return Llama.build(cfg, weights, policy, Mixtral.layer)
end

return Mixtral
