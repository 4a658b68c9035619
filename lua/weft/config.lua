--- weft.config: config.json as a plain table, every field that changes the result honoured or refused.
--
-- config.load(DIR or a .json file) raises { code =, message = } with one line when it cannot.
-- Fields of the table:
--   architectures, model_type, dtype                  dtype: what the checkpoint says, or nil
--   hidden_size, intermediate_size, num_hidden_layers, vocab_size, max_position_embeddings
--   num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, hidden_act
--   qkv_bias, attention_bias (of o_proj), mlp_bias, is_causal, tie_word_embeddings, logit_scale (or nil)
--   rope_theta, rope_scaling (nil: default; else rope_type and its parameters), rotary_dim
--   window_of(i) -> tokens that layer i sees back, 0 for all; sliding_window (or nil)
--   num_experts, num_experts_per_tok, moe_intermediate_size, scoring_func, use_routing_bias, use_qk_norm,
--   norm_topk_prob                                    num_experts nil: no experts
--   quantization                                      nil, or { method = "fp8_block", block = {128, 128}, skip = {names} }
--   eos_token_ids, bos_token_id, pad_token_id         generation_config.json first, then config.json
--   generation                                        temperature, top_p, top_k, min_p, repetition_penalty, do_sample
local core = require "weft.core"
local errors = require "weft.errors"
local features = require "weft.config.features"
local Reader = require "weft.config.reader"
local rope = require "weft.config.rope"

local config = {}

-- What a file that does not say means, where the families differ.
local families = {
  llama = { max_position_embeddings = 2048 },
  mistral = { max_position_embeddings = 131072 },
  mixtral = { max_position_embeddings = 131072, rope_theta = 1e6, rms_norm_eps = 1e-5 },
  qwen2 = { max_position_embeddings = 32768, qkv_bias = true, use_sliding_window = false, max_window_layers = 28 },
  qwen3 = { max_position_embeddings = 32768, head_dim = 128, use_sliding_window = false, max_window_layers = 28 },
  qwen3_moe = { max_position_embeddings = 32768, use_sliding_window = false, max_window_layers = 0, norm_topk_prob = false },
  minimax_m2 = { rope_theta = 5e6, scoring_func = "sigmoid", use_routing_bias = true, use_qk_norm = true },
}

local function family_of(cfg)
  if cfg.architectures[1] == "MiniMaxM2ForCausalLM" then return families.minimax_m2 end
  return families[cfg.model_type] or {}
end

local function read_names(reader, cfg)
  local names = reader:list("architectures", "a list of names", function(v) return type(v) == "string" end)
  if not names or #names == 0 then reader:refuse "architectures is missing: it says which model this is" end
  cfg.architectures = names
  cfg.model_type = reader:string "model_type"
  local dtype, older = reader:string "dtype", reader:string "torch_dtype"
  if dtype and older and dtype ~= older then reader:refuse("dtype is '%s' and torch_dtype is '%s'", dtype, older) end
  local said = dtype or older
  cfg.dtype = said and said:gsub("^torch%.", "")
  if cfg.dtype == "auto" then cfg.dtype = nil end
  if cfg.dtype and cfg.dtype ~= "float32" and cfg.dtype ~= "bfloat16" and cfg.dtype ~= "float16" then
    reader:wrong(dtype and "dtype" or "torch_dtype", "float32, bfloat16 or float16")
  end
end

local function read_sizes(reader, cfg, family)
  cfg.hidden_size = reader:integer("hidden_size", 1, 2 ^ 20)
  cfg.intermediate_size = reader:integer("intermediate_size", 1, 2 ^ 24)
  cfg.num_hidden_layers = reader:integer("num_hidden_layers", 1, 4096)
  cfg.vocab_size = reader:integer("vocab_size", 1, 2 ^ 28)
  cfg.num_attention_heads = reader:integer("num_attention_heads", 1, 65536)
  cfg.num_key_value_heads = reader:integer("num_key_value_heads", 1, 65536, cfg.num_attention_heads)
  cfg.max_position_embeddings = reader:integer("max_position_embeddings", 1, 2 ^ 30, family.max_position_embeddings)
  cfg.rms_norm_eps = reader:number("rms_norm_eps", 1e-12, 0.1, family.rms_norm_eps or 1e-6)
  local heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
  if heads % kv_heads ~= 0 then
    reader:refuse("num_attention_heads %d is not a multiple of num_key_value_heads %d", heads, kv_heads)
  end
  cfg.head_dim = reader:integer("head_dim", 8, 256, family.head_dim or false)
  if not cfg.head_dim then
    cfg.head_dim = cfg.hidden_size / heads
    if cfg.hidden_size % heads ~= 0 or cfg.head_dim < 8 or cfg.head_dim > 256 then
      reader:refuse("head_dim is missing, and hidden_size %d / num_attention_heads %d is not an integer from 8 to 256", cfg.hidden_size, heads)
    end
  end
end

local function read_layers(reader, cfg, family)
  cfg.hidden_act = reader:string("hidden_act", { "silu" }, reader:string("hidden_activation", { "silu" }, "silu"))
  cfg.attention_bias = reader:boolean("attention_bias", reader:boolean("bias", false))
  cfg.qkv_bias = reader:boolean("qkv_bias", family.qkv_bias or cfg.attention_bias)
  cfg.mlp_bias = reader:boolean("mlp_bias", false)
  cfg.is_causal = reader:boolean("is_causal", true)
  cfg.tie_word_embeddings = reader:boolean("tie_word_embeddings", false)
  cfg.logit_scale = reader:number("logit_scale", 1e-6, 1e6)
end

-- The window of each layer: layer_types when given, else max_window_layers, else one for all.
local function read_windows(reader, cfg, family)
  local window = reader:integer("sliding_window", 1, 2 ^ 30, 0)
  local used = reader:boolean("use_sliding_window", family.use_sliding_window)
  local types = reader:list("layer_types", "a list of names", function(v) return type(v) == "string" end)
  local windows, first = {}, 0
  if used and not types then
    if window == 0 then reader:refuse "use_sliding_window is true and sliding_window is missing" end
    first = reader:integer("max_window_layers", 0, 4096, family.max_window_layers)
  end
  if types and #types ~= cfg.num_hidden_layers then
    reader:refuse("layer_types has %d entries, num_hidden_layers is %d", #types, cfg.num_hidden_layers)
  end
  for i = 0, cfg.num_hidden_layers - 1 do
    local kind = types and types[i + 1]
    if kind and kind ~= "full_attention" and kind ~= "sliding_attention" then
      reader:refuse("layer_types: layer %d is '%s'; weft knows full_attention and sliding_attention", i, kind)
    end
    if kind == "sliding_attention" and window == 0 then
      reader:refuse("layer_types: layer %d is sliding_attention, and sliding_window is missing", i)
    end
    local slides = kind == "sliding_attention" or (not kind and used ~= false and i >= first)
    windows[i] = slides and window or 0
    if windows[i] > 0 then cfg.sliding_window = window end
  end
  function cfg.window_of(i) return windows[i] end
end

local function read_experts(reader, cfg, family)
  local local_experts = reader:integer("num_local_experts", 1, 65536, false)
  cfg.num_experts = reader:integer("num_experts", 1, 65536, local_experts) or nil
  if not cfg.num_experts then return end
  if local_experts and local_experts ~= cfg.num_experts then
    reader:refuse("num_local_experts is %d and num_experts is %d", local_experts, cfg.num_experts)
  end
  cfg.num_experts_per_tok = reader:integer("num_experts_per_tok", 1, cfg.num_experts)
  cfg.moe_intermediate_size = reader:integer("moe_intermediate_size", 1, 2 ^ 24, cfg.intermediate_size)
  cfg.scoring_func = reader:string("scoring_func", { "sigmoid", "softmax" }, family.scoring_func or "softmax")
  cfg.use_routing_bias = reader:boolean("use_routing_bias", family.use_routing_bias or false)
  cfg.use_qk_norm = reader:boolean("use_qk_norm", family.use_qk_norm or false)
  cfg.norm_topk_prob = reader:boolean("norm_topk_prob", family.norm_topk_prob ~= false)
end

local function read_quantization(reader, cfg, folder)
  local q = reader:sub "quantization_config"
  if not q then
    local other = Reader.open(folder .. "/hf_quant_config.json", true)
    local inner = other and other:sub "quantization"
    if inner then inner:refuse("weights quantised as %s (modelopt) are not read by weft", inner.show(inner:get "quant_algo")) end
    return
  end
  local method = q:string "quant_method" or q:string "quant_algo" or "nothing"
  if method ~= "fp8" then
    local algo = q:string "quant_algo"
    q:refuse("weights quantised with quant_method '%s'%s are not read by weft; it reads fp8 with blocks of 128x128, and plain weights",
      method, algo and " (" .. algo .. ")" or "")
  end
  local block = q:list("weight_block_size", "[128, 128]", function(v) return v == 128 end)
  if not block or #block ~= 2 then q:wrong("weight_block_size", "[128, 128] (one scale for a whole tensor is not read by weft)") end
  q:string("activation_scheme", { "dynamic" })
  q:string("fmt", { "e4m3", "float8_e4m3fn" })
  cfg.quantization = {
    method = "fp8_block", block = { 128, 128 },
    skip = q:list("modules_to_not_convert", "a list of names", function(v) return type(v) == "string" end) or {},
  }
end

local function read_generation(reader, cfg, folder)
  local generation = Reader.open(folder .. "/generation_config.json", true) or Reader.new("generation_config.json", {})
  cfg.eos_token_ids = generation:ids "eos_token_id" or reader:ids "eos_token_id" or {}
  cfg.bos_token_id = (generation:ids "bos_token_id" or reader:ids "bos_token_id" or {})[1]
  cfg.pad_token_id = (generation:ids "pad_token_id" or {})[1]
  cfg.generation = {
    temperature = generation:number("temperature", 0, 1e6), top_p = generation:number("top_p", 0, 1),
    top_k = generation:number("top_k", -1, 2 ^ 31), min_p = generation:number("min_p", 0, 1),
    repetition_penalty = generation:number("repetition_penalty", 1e-6, 1e6), do_sample = generation:boolean "do_sample",
  }
end

-- A GGUF file holds its config itself; what stands in the place of config.json is to be said, not what is missing.
local function refuse_gguf(path, file)
  local name = path:match "%.gguf$" and path or not core.same_file(file, file) and core.file_ending(path, ".gguf")
  if not name then return end
  errors.raise { code = "unsupported", message = ("%s: weft does not read GGUF files; give the folder of the same model with config.json and model.safetensors")
    :format(name == path and path or path .. " holds " .. name .. " and no config.json") }
end

--- DIR, or the path of a config file (for plans and dummy weights).
function config.load(path)
  local is_file = path:match "%.json$" ~= nil
  local file = is_file and path or path:gsub("/+$", "") .. "/config.json"
  if not is_file then refuse_gguf(path, file) end
  local folder = file:match "^(.*)/[^/]*$" or "."
  local reader = Reader.open(file)
  local cfg = {}
  features.check(reader)
  read_names(reader, cfg)
  local family = family_of(cfg)
  read_sizes(reader, cfg, family)
  read_layers(reader, cfg, family)
  read_windows(reader, cfg, family)
  rope.read(reader, cfg, family.rope_theta or 10000)
  read_experts(reader, cfg, family)
  read_quantization(reader, cfg, folder)
  read_generation(reader, cfg, folder)
  return cfg
end

return config
