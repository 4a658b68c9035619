--- weft.config.features: fields that change a model's result and that weft does not do.
--
-- Each is refused by name unless its value is one of those that change nothing. Fields that are in
-- neither list nor in config.lua do not change the result (dropout, initialisers, versions, names).
local features = {}

local off = { false, 0 }
local one = { 1 }

local neutral = {
  -- attention
  attn_logit_softcapping = off, attn_output_gate = off, attention_output_gate = off, attention_chunk_size = off,
  attn_window_size = off, attention_multiplier = {}, query_pre_attn_scalar = {}, clip_qkv = {}, qk_layernorm = off,
  sparse_attention_config = {}, attn_temperature_tuning = off, alibi = off, use_bidirectional_attention = off,
  kv_lora_rank = off, q_lora_rank = off, qk_rope_head_dim = off, v_head_dim = {}, num_kv_shared_layers = off,
  qk_norm_type = { "per_layer" }, use_mrope = off, rope_interleaved = off, no_rope_layers = {}, no_rope_layer_interval = off,
  position_embedding_type = { "rope", "rotary" }, add_cross_attention = off, is_encoder_decoder = off, pruned_heads = {},
  -- norms, residuals and multipliers
  use_gemma_norm = off, postnorm = off, use_parallel_residual = off, parallel_attn = off, scale_depth = {}, scale_emb = one,
  dim_model_base = {}, embedding_multiplier = one, residual_multiplier = one, logits_scaling = one,
  final_logit_softcapping = off, scale_embeddings = off, layernorm_mlp_alpha = one, layernorm_mlp_beta = one,
  layernorm_full_attention_alpha = one, layernorm_full_attention_beta = one, layernorm_linear_attention_alpha = one,
  layernorm_linear_attention_beta = one, full_attn_alpha_factor = one, full_attn_beta_factor = one,
  linear_attn_alpha_factor = one, linear_attn_beta_factor = one, mlp_alpha_factor = one, mlp_beta_factor = one,
  -- feed-forward
  swiglu_limit = off, swiglu_alpha = {}, n_shared_experts = off, num_shared_experts = off, first_k_dense_replace = off,
  shared_intermediate_size = off, shared_expert_intermediate_size = off, moe_layer_freq = one, interleave_moe_layer_step = one,
  decoder_sparse_step = one, mlp_only_layers = {}, n_group = one, topk_group = one, num_expert_group = one,
  routed_scaling_factor = one, moe_router_activation_func = {}, compression_config = {},
  -- other modalities
  vision_config = {}, audio_config = {}, speech_config = {},
}

local names = {}
for name in pairs(neutral) do names[#names + 1] = name end
table.sort(names)

local function changes_nothing(value, values)
  if type(value) == "table" then return next(value) == nil end
  for _, known in ipairs(values) do
    if value == known then return true end
  end
  return false
end

--- Refuses the first such field that is set. reader: weft.config.reader over config.json.
function features.check(reader)
  local family = reader:get "text_config" or reader:get "llm_config" or reader:get "language_config"
  if family ~= nil then
    reader:refuse("the model's fields are nested under text_config (a model with other inputs than text); weft reads text models")
  end
  for _, name in ipairs(names) do
    local value = reader:get(name)
    if value ~= nil and not changes_nothing(value, neutral[name]) then
      reader:refuse("%s = %s changes what the model computes, and weft does not do that", name, reader.show(value))
    end
  end
  local kinds = reader:list("attn_type_list", "a list of 0 and 1", function(v) return v == 0 or v == 1 end)
  for i, kind in ipairs(kinds or {}) do
    if kind == 0 then
      reader:refuse("attn_type_list: layer %d is 0 (lightning attention); weft does softmax attention (1) only", i - 1)
    end
  end
  local layers = reader:get "num_hidden_layers"
  if kinds and #kinds ~= layers then
    reader:refuse("attn_type_list has %d entries for %s layers", #kinds, tostring(layers))
  end
end

return features
