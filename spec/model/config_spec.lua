--- spec/model/config_spec.lua - config.json: honoured or refused, field by field.
local config = require "weft.config"
local core = require "weft.core"
local files = require "spec.support.files"
local configs = "spec/fixtures/configs/"

describe("weft.config", function()
  local folder = os.tmpname()
  os.remove(folder)
  setup(function() os.execute("mkdir -p " .. folder) end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  local function write(name, text) files.write(folder .. "/" .. name, text) end

  local base = {
    architectures = { "LlamaForCausalLM" }, model_type = "llama", hidden_size = 64, intermediate_size = 128,
    num_hidden_layers = 4, num_attention_heads = 8, vocab_size = 100, rms_norm_eps = 1e-5, max_position_embeddings = 256,
  }
  --- A small Llama with these fields changed; core.json.null empties one.
  local function load(changes)
    local object = {}
    for key, value in pairs(base) do object[key] = value end
    for key, value in pairs(changes or {}) do object[key] = value end
    write("config.json", core.json.encode(object))
    return config.load(folder)
  end

  it("fills in what a file may leave out", function()
    local cfg = load()
    assert.same({ 8, 8, 8, 10000, true, false, false, false, false },
      { cfg.num_key_value_heads, cfg.head_dim, cfg.rotary_dim, cfg.rope_theta, cfg.is_causal, cfg.qkv_bias, cfg.attention_bias,
        cfg.mlp_bias, cfg.tie_word_embeddings })
    assert.same({}, cfg.eos_token_ids)
    assert.is_nil(cfg.rope_scaling)
    assert.equal(0, cfg.window_of(3))
  end)

  it("takes biases by their old and new names", function()
    assert.is_true(load { bias = true }.qkv_bias)
    assert.is_true(load { attention_bias = true }.attention_bias)
    local cfg = load { qkv_bias = true }
    assert.same({ true, false }, { cfg.qkv_bias, cfg.attention_bias })
    cfg = load { attention_bias = true, qkv_bias = false }
    assert.same({ false, true }, { cfg.qkv_bias, cfg.attention_bias })
  end)

  it("knows each layer's window", function()
    local function windows(changes)
      local cfg, list = load(changes), {}
      for i = 0, 3 do list[i + 1] = cfg.window_of(i) end
      return list
    end
    assert.same({ 16, 16, 16, 16 }, windows { sliding_window = 16 })
    assert.same({ 0, 0, 0, 0 }, windows { sliding_window = 16, use_sliding_window = false })
    assert.same({ 0, 0, 0, 16 }, windows { sliding_window = 16, use_sliding_window = true, max_window_layers = 3 })
    assert.same({ 16, 0, 16, 0 }, windows { sliding_window = 16,
      layer_types = { "sliding_attention", "full_attention", "sliding_attention", "full_attention" } })
  end)

  it("reads the rotary embedding from old and new files alike", function()
    local llama3 = { rope_type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 64 }
    assert.same(llama3, load { rope_scaling = llama3, rope_theta = 5e5 }.rope_scaling)
    assert.same({ rope_type = "linear", factor = 2 }, load { rope_scaling = { type = "linear", factor = 2 } }.rope_scaling)
    local cfg = load { rope_parameters = { rope_type = "default", rope_theta = 7e4, partial_rotary_factor = 0.5 } }
    assert.same({ 7e4, 4 }, { cfg.rope_theta, cfg.rotary_dim })
    assert.equal(4, load { rotary_dim = 4, partial_rotary_factor = 0.5 }.rotary_dim)
  end)

  it("takes end-of-text ids from generation_config.json first, one or many", function()
    assert.same({ 5 }, load { eos_token_id = 5 }.eos_token_ids)
    assert.same({ 5, 6 }, load { eos_token_id = { 5, 6 } }.eos_token_ids)
    write("generation_config.json", '{"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "do_sample": true}')
    local cfg = load { eos_token_id = 5 }
    os.remove(folder .. "/generation_config.json")
    assert.same({ 7, 8 }, cfg.eos_token_ids)
    assert.same({ temperature = 0.6, top_p = 0.9, do_sample = true }, cfg.generation)
  end)

  it("keeps fp8 blocks and reads the dtype by either name", function()
    local q = config.load(configs .. "MiniMaxAI--MiniMax-M2.5_config.json").quantization
    assert.same({ "fp8_block", 128 }, { q.method, q.block[1] })
    assert.is_truthy(table.concat(q.skip, " "):find "lm_head")
    assert.equal("bfloat16", load { torch_dtype = "torch.bfloat16" }.dtype)
    assert.equal("float16", load { dtype = "float16" }.dtype)
  end)

  local null = core.json.null
  local refusals = {
    { { hidden_size = -3 }, "hidden_size must be an integer from 1 to 1048576, found -3" },
    { { hidden_size = "64" }, "hidden_size must be an integer from 1 to 1048576, found '64'" },
    { { vocab_size = 0 }, "vocab_size must be an integer from 1" },
    { { vocab_size = null }, "vocab_size is missing" },
    { { num_hidden_layers = 2.5 }, "num_hidden_layers must be an integer from 1 to 4096, found 2.5" },
    { { num_hidden_layers = 1e12 }, "found 1000000000000" },
    { { num_key_value_heads = 3 }, "num_attention_heads 8 is not a multiple of num_key_value_heads 3" },
    { { num_attention_heads = 7 }, "hidden_size 64 / num_attention_heads 7 is not an integer" },
    { { rms_norm_eps = { 1 } }, "rms_norm_eps must be a number" },
    { { architectures = null }, "architectures is missing" },
    { { architectures = "LlamaForCausalLM" }, "architectures must be a list of names, found 'LlamaForCausalLM'" },
    { { hidden_act = "gelu" }, "hidden_act must be one of silu, found 'gelu'" },
    { { tie_word_embeddings = 1 }, "tie_word_embeddings must be true or false, found 1" },
    { { rope_theta = -1 }, "rope_theta must be a number" },
    { { rope_scaling = { type = "linear", rope_type = "yarn", factor = 2 } }, "rope_scaling.rope_type is 'yarn' and rope_scaling.type is 'linear'" },
    { { rope_scaling = { type = "longrope" } }, "rope_scaling.rope_type 'longrope' is not known" },
    { { rope_scaling = { type = "linear" } }, "rope_scaling.factor is missing" },
    { { rope_scaling = { type = "linear", factor = 2, short_factor = 1 } }, "rope_scaling.short_factor is not a parameter" },
    { { rope_scaling = "linear" }, "rope_scaling must be an object, found 'linear'" },
    { { rope_theta = 1e4, rope_parameters = { rope_theta = 2e4 } }, "rope_theta is 10000 and rope_parameters.rope_theta is 20000" },
    { { rope_scaling = { type = "linear", factor = 2 }, rope_parameters = { rope_type = "default" } }, "rope_scaling says" },
    { { rotary_dim = 8, partial_rotary_factor = 0.5 }, "rotary_dim is 8 and partial_rotary_factor 0.5 of head_dim 8 is 4" },
    { { rotary_dim = 5 }, "rotary_dim must be even" },
    { { layer_types = { "full_attention" } }, "layer_types has 1 entries, num_hidden_layers is 4" },
    { { sliding_window = 0 }, "sliding_window must be an integer from 1" },
    { { use_sliding_window = true }, "use_sliding_window is true and sliding_window is missing" },
    { { final_logit_softcapping = 30 }, "final_logit_softcapping = 30 changes what the model computes" },
    { { text_config = {} }, "nested under text_config" },
    { { torch_dtype = "float64" }, "torch_dtype must be float32, bfloat16 or float16, found 'float64'" },
    { { eos_token_id = "</s>" }, "eos_token_id must be a token id or a list of them, found '</s>'" },
    { { quantization_config = { quant_method = "awq" } }, "quant_method 'awq' are not read by weft" },
    { { quantization_config = { quant_method = "fp8" } }, "quantization_config.weight_block_size must be [128, 128]" },
    { { attn_type_list = { 1, 0 } }, "attn_type_list: layer 1 is 0" },
  }
  for _, case in ipairs(refusals) do
    it("refuses: " .. case[2], function()
      local ok, message = pcall(load, case[1])
      assert.is_false(ok)
      assert.is_truthy(message.message:find(case[2], 1, true), message.message)
      assert.is_truthy(message.message:find(folder .. "/config.json: ", 1, true), message.message)
      assert.is_nil(message.message:find "\n")
    end)
  end

  it("refuses weights whose quantisation only a file beside config.json tells", function()
    write("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}')
    local ok, e = pcall(load)
    os.remove(folder .. "/hf_quant_config.json")
    assert.is_false(ok)
    assert.equal(folder .. "/hf_quant_config.json: weights quantised as 'FP8' (modelopt) are not read by weft", e.message)
  end)

  it("ignores what does not change the result", function()
    load { pretraining_tp = 4, attention_dropout = 0.1, use_cache = false, my_note = { 1, 2 }, final_logit_softcapping = null, n_group = 1 }
  end)

  it("says when there is no file, half a file or no object", function()
    assert.error_matches(function() config.load "/no/where" end, "cannot read /no/where/config.json: No such file", 1, true)
    for text, wanted in pairs { ['{"hidden_size": 6'] = "is not JSON (cut short?)", [""] = "is empty", ["[1]"] = "must hold a JSON object", ["null"] = "must hold" } do
      write("config.json", text)
      assert.error_matches(function() config.load(folder) end, wanted, 1, true)
    end
    os.remove(folder .. "/config.json")
    os.execute("mkdir " .. folder .. "/config.json")
    assert.error_matches(function() config.load(folder) end, "cannot read", 1, true)
    os.execute("rmdir " .. folder .. "/config.json")
  end)
end)
