--- weft.nn: the layers a model script composes. Thin Lua over the C objects of weft.core.
--
-- Constructors make this rank's part and load its shard from `weights`; `forward` runs it. Tensors
-- that forward returns live in the rank's arena: through the next decoder layer, not longer
-- (`:clone()` keeps one). Shapes are [tokens, width].
local core = require "weft.core"
local experts = require "weft.nn.experts"
local load = require "weft.nn.load"

local nn = {}

--- The runtime listens here while it builds a model: every layer made is told, with its kind.
function nn.on_layer() end

-- A constructor's one argument; the caller's line is to blame.
local function check_table(name, t)
  if type(t) ~= "table" then error(("nn.%s wants a table such as { weights = ... }, got %s"):format(name, type(t)), 3) end
end

local function check_arguments(name, cfg, weights, policy)
  if type(cfg) ~= "table" then error(("%s: cfg is a table, got %s"):format(name, type(cfg)), 3) end
  if type(weights) ~= "table" or not weights.source then error(("%s: weights is what build was given, got %s"):format(name, type(weights)), 3) end
  if policy == nil then error(("%s: policy is missing"):format(name), 3) end
end

local function made(kind, layer)
  nn.on_layer(kind, layer)
  return layer
end

-- What weights are stored as: "auto" keeps the checkpoint's dtype.
local function param_dtype(weights)
  return weights.options.param_dtype or "auto"
end

-- The tensor axis of this rank: the default plan's.
local function tensor_axis(axis)
  return axis or core.layer_parallel.get().output
end

-- Options of a constructor, with how the layer keeps its weights.
local function stored(t, options)
  if not t.weights then
    options.dtype = t.dtype
    return options
  end
  return load.storage(t.weights, options)
end

--- q, k and v in one product, cut by plan.input (SEMANTICS 4.1). Loads `q_proj`, `k_proj`, `v_proj`,
-- or a fused `qkv_proj` whose rows are all q, all k, all v.
-- { weights, hidden_size, head_size, v_head_size, total_num_heads, total_num_kv_heads, bias, parallel_plan }
-- Fields: num_heads, num_kv_heads (of this rank), q_size, k_size, v_size. forward(x) -> packed;
-- split_qkv(packed) -> q, k, v (views).
function nn.qkv_linear(t)
  check_table("qkv_linear", t)
  local weights = t.weights
  local layer = core.qkv_linear(stored(t, {
    hidden_size = t.hidden_size, head_size = t.head_size, v_head_size = t.v_head_size,
    total_num_heads = t.total_num_heads, total_num_kv_heads = t.total_num_kv_heads,
    bias = t.bias or false, parallel_plan = t.parallel_plan, disable_tp = t.disable_tp,
  }))
  if weights then
    local kv_heads = t.total_num_kv_heads or t.total_num_heads
    local q = t.total_num_heads * t.head_size
    local k, v = kv_heads * t.head_size, kv_heads * (t.v_head_size or t.head_size)
    if weights:has "qkv_proj.weight" then
      load.linear(layer, weights, nil, "qkv_proj", { q + k + v, t.hidden_size }, t.bias)
    else
      load.linear(layer, weights, "q", "q_proj", { q, t.hidden_size }, t.bias)
      load.linear(layer, weights, "k", "k_proj", { k, t.hidden_size }, t.bias)
      load.linear(layer, weights, "v", "v_proj", { v, t.hidden_size }, t.bias)
    end
  end
  return made("qkv_linear", layer)
end

--- Output rows cut over the axis. { weights, input_size, output_size, bias, axis }
function nn.column_linear(t)
  check_table("column_linear", t)
  local layer = core.column_linear(stored(t, {
    input_size = t.input_size, output_size = t.output_size, bias = t.bias or false,
    axis = tensor_axis(t.axis), gather_output = t.gather_output,
  }))
  if t.weights then
    load.linear(layer, t.weights, nil, "", { t.output_size, t.input_size }, t.bias)
  end
  return made("linear", layer)
end

--- gate and up in one product, each cut over the axis. Loads `gate_proj` and `up_proj`, or a fused
-- `gate_up_proj`. { weights, hidden_size, intermediate_size, bias, axis }
function nn.gate_up_linear(t)
  check_table("gate_up_linear", t)
  local weights = t.weights
  local layer = core.merged_column_linear(stored(t, {
    input_size = t.hidden_size, output_sizes = { t.intermediate_size, t.intermediate_size },
    bias = t.bias or false, axis = tensor_axis(t.axis),
  }))
  if weights then
    local shape = { t.intermediate_size, t.hidden_size }
    if weights:has "gate_up_proj.weight" then
      load.linear(layer, weights, nil, "gate_up_proj", { 2 * t.intermediate_size, t.hidden_size }, t.bias)
    else
      load.linear(layer, weights, 0, "gate_proj", shape, t.bias)
      load.linear(layer, weights, 1, "up_proj", shape, t.bias)
    end
  end
  return made("linear", layer)
end

--- Input columns cut over the axis; the parts are summed over its group.
-- { weights, input_size, output_size, bias, axis }
function nn.row_linear(t)
  check_table("row_linear", t)
  local layer = core.row_linear(stored(t, {
    input_size = t.input_size, output_size = t.output_size, bias = t.bias or false,
    axis = tensor_axis(t.axis),
  }))
  if t.weights then
    load.linear(layer, t.weights, nil, "", { t.output_size, t.input_size }, t.bias)
  end
  return made("linear", layer)
end

--- RMSNorm over the hidden size. forward(x [, residual]): with a residual, residual += x first and
-- the sum is normalised. `weights` is the norm's own place; size defaults to cfg.hidden_size.
function nn.rms_norm(cfg, weights, size)
  check_arguments("nn.rms_norm(cfg, weights [, size])", cfg, weights, true)
  size = size or cfg.hidden_size
  local layer = core.rms_norm { hidden_size = size, eps = cfg.rms_norm_eps }
  layer:load(weights:source("weight", { size }))
  return made("norm", layer)
end

--- RMSNorm of q or k over all heads of the model; statistics are summed over the plan's input group.
-- { weights, hidden_size = of all heads, eps, parallel_plan, weight_shard_world_size, weight_shard_rank }
-- q_norm:forward_qk(k_norm, packed) -> q, k normalises both around one sum.
function nn.minimax_rms_norm(t)
  check_table("minimax_rms_norm", t)
  local layer = core.minimax_rms_norm {
    hidden_size = t.hidden_size, eps = t.eps, parallel_plan = t.parallel_plan,
    weight_shard_world_size = t.weight_shard_world_size, weight_shard_rank = t.weight_shard_rank,
  }
  layer:load(t.weights:source("weight", { t.hidden_size }))
  return made("minimax_rms_norm", layer)
end

--- Which experts each token gets (weft.nn.experts): forward(x) -> ids, weights.
function nn.router(t)
  check_table("router", t)
  return made("router", experts.router(t))
end

--- The experts of this rank (weft.nn.experts): forward(x, ids, weights) -> y, summed over the ranks.
function nn.experts(t)
  check_table("experts", t)
  return made("experts", experts.experts(t))
end

--- The vocabulary's rows cut over the tensor group; forward(ids) sums over it.
function nn.vocab_embedding(cfg, weights, policy)
  check_arguments("nn.vocab_embedding(cfg, weights, policy)", cfg, weights, policy)
  local layer = core.vocab_embedding {
    vocab_size = cfg.vocab_size, hidden_size = cfg.hidden_size, parallel_plan = policy:get "embedding",
    dtype = param_dtype(weights), output_dtype = cfg.compute_dtype,
  }
  layer:load(weights:source("weight", { cfg.vocab_size, cfg.hidden_size }))
  return made("embedding", layer)
end

--- The head: float32 logits of this rank's part of the vocabulary. With tied embeddings it shares
-- the embedding's weights.
function nn.lm_head(cfg, weights, policy, embedding)
  check_arguments("nn.lm_head(cfg, weights, policy [, embedding])", cfg, weights, policy)
  local layer = core.lm_head {
    vocab_size = cfg.vocab_size, hidden_size = cfg.hidden_size, parallel_plan = policy:get "lm_head",
    embedding = cfg.tie_word_embeddings and embedding or nil, logit_scale = cfg.logit_scale,
    dtype = param_dtype(weights),
  }
  if not cfg.tie_word_embeddings then
    layer:load(weights:source("weight", { cfg.vocab_size, cfg.hidden_size }))
  end
  return made("lm_head", layer)
end

local rotaries = setmetatable({}, { __mode = "k" }) -- one table of cosines for all layers of a model

--- Rotary position embedding by the config: forward(positions, q, k) turns views in place.
function nn.rotary(cfg)
  local rotary = rotaries[cfg]
  if not rotary then
    rotary = core.rotary {
      head_size = cfg.head_dim, rotary_dim = cfg.rotary_dim, max_position = cfg.max_position_embeddings,
      rope_theta = cfg.rope_theta, rope_scaling = cfg.rope_scaling,
    }
    rotaries[cfg] = rotary
  end
  return rotary
end

--- Attention with a plan of its own, over the paged cache.
-- { num_heads, num_kv_heads, total_num_heads, total_num_kv_heads, head_size, v_head_size,
--   sliding_window, scale, parallel_plan }. forward(q, k, v, step) -> [tokens, output_num_heads * v_head_size]
function nn.hetero_attention(t)
  check_table("hetero_attention", t)
  return made("attention", core.hetero_attention(t))
end

--- Attention that sees both ways within the step's own tokens and keeps no cache.
function nn.encoder_attention(t)
  return core.encoder_attention(t)
end

--- silu(x[:, :n]) * x[:, n:] for the packed gate and up of nn.gate_up_linear.
nn.silu_mul = core.silu_mul
--- x + y, a new tensor.
nn.add = core.add

local Layers = {}
Layers.__index = Layers

--- All decoder layers: layer(cfg, weights:at(i), policy, i) for i = 0 .. num_hidden_layers - 1.
function nn.layers(cfg, weights, policy, layer)
  check_arguments("nn.layers(cfg, weights, policy, layer)", cfg, weights, policy)
  if type(layer) ~= "function" then error("nn.layers: layer is a function(cfg, weights, policy, i), got " .. type(layer), 2) end
  local list = setmetatable({}, Layers)
  for i = 0, cfg.num_hidden_layers - 1 do
    local ok, built = pcall(layer, cfg, weights:at(tostring(i)), policy, i)
    if not ok then error(("layer %d: %s"):format(i, tostring(built)), 0) end
    list[i + 1] = built
  end
  return list
end

--- for i, layer in layers:each() do ... end. Each turn takes the other half of the arena: what a
-- layer returns stays valid through the next one.
function Layers:each()
  local i = 0
  return function()
    i = i + 1
    if self[i] then
      core.arena.next_layer()
      return i - 1, self[i]
    end
    core.arena.end_layers()
  end
end

return nn
