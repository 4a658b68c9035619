--- Llama: pre-norm decoder layers of grouped-query attention with RoPE and a gated MLP.
--
-- Also the parts that its relatives are made of (mistral.lua). `policy:get(type, i)` is the
-- parallel plan of layer i on this rank; every layer object holds only this rank's shard.
local weft = require "weft"
local nn = weft.nn

local Llama = weft.model "LlamaForCausalLM" { supported_layer_types = { "attention", "mlp" } }

--- Self-attention of layer i: (x, step) -> the attention's part of the residual stream.
-- splitter(qkv, plan), optional, gives what turns the packed product into q, k and v: where relatives
-- put their norms.
function Llama.attention(cfg, weights, policy, i, splitter)
  local encoder_only = cfg.is_causal == false
  local plan = policy:get(encoder_only and "default" or "attention", i)
  local qkv = nn.qkv_linear {
    weights = weights,
    hidden_size = cfg.hidden_size,
    head_size = cfg.head_dim,
    total_num_heads = cfg.num_attention_heads,
    total_num_kv_heads = cfg.num_key_value_heads,
    bias = cfg.qkv_bias,
    parallel_plan = plan,
  }
  local rotary = nn.rotary(cfg)
  local attn = (encoder_only and nn.encoder_attention or nn.hetero_attention) {
    num_heads = qkv.num_heads,
    num_kv_heads = qkv.num_kv_heads,
    total_num_heads = cfg.num_attention_heads,
    total_num_kv_heads = cfg.num_key_value_heads,
    head_size = cfg.head_dim,
    sliding_window = cfg.window_of(i),
    kv_dtype = cfg.compute_dtype,
    parallel_plan = plan,
  }
  local o_proj = nn.row_linear {
    weights = weights:at "o_proj",
    input_size = cfg.num_attention_heads * cfg.head_dim,
    output_size = cfg.hidden_size,
    bias = cfg.attention_bias,
    axis = plan.output,
  }
  local split = splitter and splitter(qkv, plan) or function(packed) return qkv:split_qkv(packed) end
  return function(x, step)
    local q, k, v = split(qkv:forward(x))
    rotary:forward(step.positions, q, k)
    return o_proj:forward(attn:forward(q, k, v, step))
  end
end

--- The gated MLP of layer i: down(silu(gate(x)) * up(x)).
function Llama.mlp(cfg, weights, policy, i)
  local plan = policy:get("mlp", i)
  local gate_up = nn.gate_up_linear {
    weights = weights,
    hidden_size = cfg.hidden_size,
    intermediate_size = cfg.intermediate_size,
    bias = cfg.mlp_bias,
    axis = plan.input,
  }
  local down = nn.row_linear {
    weights = weights:at "down_proj",
    input_size = cfg.intermediate_size,
    output_size = cfg.hidden_size,
    bias = cfg.mlp_bias,
    axis = plan.input,
  }
  return function(x)
    return down:forward(nn.silu_mul(gate_up:forward(x)))
  end
end

--- A decoder layer around an attention and a feed-forward function. x is what the layer before added
-- last and `residual` the sum of all before it:
-- the norms add x into the residual on the way. The first layer gets no x.
function Llama.decoder(cfg, weights, attention, feed_forward)
  local input_norm = nn.rms_norm(cfg, weights:at "input_layernorm")
  local post_norm = nn.rms_norm(cfg, weights:at "post_attention_layernorm")
  return function(x, residual, step)
    local h = input_norm:forward(x or residual, x and residual)
    h = attention(h, step)
    h = post_norm:forward(h, residual)
    return feed_forward(h)
  end
end

--- Decoder layer i.
function Llama.layer(cfg, weights, policy, i)
  return Llama.decoder(cfg, weights, Llama.attention(cfg, weights:at "self_attn", policy, i),
    Llama.mlp(cfg, weights:at "mlp", policy, i))
end

--- The whole model on this rank, from `layer(cfg, weights, policy, i)`.
function Llama.build(cfg, weights, policy, layer)
  layer = layer or Llama.layer
  local body = weights:at "model"
  local embed = nn.vocab_embedding(cfg, body:at "embed_tokens", policy)
  local layers = nn.layers(cfg, body:at "layers", policy, layer)
  local norm = nn.rms_norm(cfg, body:at "norm")
  local lm_head = nn.lm_head(cfg, weights:at "lm_head", policy, embed)

  local model = { lm_head = lm_head, layers = layers }
  function model.forward(step)
    local residual = embed:forward(step.ids)
    local x
    for _, run in layers:each() do
      x = run(x, residual, step)
    end
    return norm:forward(x or residual, x and residual)
  end
  return model
end

return Llama
