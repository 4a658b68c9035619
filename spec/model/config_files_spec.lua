--- spec/model/config_files_spec.lua - published config files: each loads, or is refused for a reason.
local config = require "weft.config"

-- file (without _config.json) = what refuses it; all others must load.
local refused = {
  ["MiniMaxAI--MiniMax-M3"] = "first_k_dense_replace = 3",
  ["deepseek-ai--DeepSeek-V3"] = "first_k_dense_replace = 3",
  ["hf-internal-testing-tiny-random-MiniMaxForCausalLM"] = "full_attn_alpha_factor",
  ["meta-llama--Llama-4-Maverick-17B-128E-Instruct"] = "nested under text_config",
  ["meta-llama--Llama-4-Scout-17B-16E-Instruct"] = "nested under text_config",
  ["minimax-m1"] = "layernorm_full_attention_alpha",
  ["nvidia--Llama-3.1-70B-Instruct-FP8_hf_quant"] = "architectures is missing",
  ["nvidia--MiniMax-M2.5-NVFP4_hf_quant"] = "architectures is missing",
  ["nvidia--MiniMax-M2.7-NVFP4_hf_quant"] = "architectures is missing",
  ["nvidia--MiniMax-M2.5-NVFP4"] = "quant_method 'modelopt' (NVFP4)",
  ["nvidia--MiniMax-M2.7-NVFP4"] = "quant_method 'modelopt' (NVFP4)",
  ["openai--gpt-oss-120b"] = "swiglu_limit = 7",
  ["openai--gpt-oss-20b"] = "swiglu_limit = 7",
  ["tiny_llama_determined"] = "hidden_size 16 / num_attention_heads 4 is not an integer from 8",
}
-- Transcribed in part: keys are missing.
local partial = {
  ["hf-internal-testing-MiniMax-M2-Small"] = "num_attention_heads is missing",
  ["minimax-m2-thrift-192experts"] = "vocab_size is missing",
  ["minimax-text-01"] = "layernorm_full_attention_alpha",
  ["tiny-random-minimax-m1"] = "layernorm_full_attention_alpha",
}
-- heads, kv heads, head_dim, rotary_dim, rope_theta, rope_type, window, experts
local values = {
  ["llama2-7b"] = { 32, 32, 128, 128, 10000, "default", 0 },
  ["meta-llama--Meta-Llama-3.1-8B"] = { 32, 8, 128, 128, 500000, "llama3", 0 },
  ["meta-llama--Meta-Llama-3.1-405B"] = { 128, 8, 128, 128, 500000, "llama3", 0 },
  ["llama3.2-1b"] = { 32, 8, 64, 64, 500000, "llama3", 0 },
  ["smollm2-135m"] = { 9, 3, 64, 64, 100000, "default", 0 },
  ["mistral-7b-v0.1"] = { 32, 8, 128, 128, 10000, "default", 4096 },
  ["qwen2-0.5b-instruct"] = { 14, 2, 64, 64, 1000000, "default", 0 },
  ["MiniMaxAI--MiniMax-M2.5"] = { 48, 8, 128, 64, 5000000, "default", 0, 256 },
  ["minimax-m2.1-bf16"] = { 48, 8, 128, 64, 5000000, "default", 0, 256 },
}

describe("published config files", function()
  local count = 0
  local list = io.popen "ls spec/fixtures/configs/*.json"
  for path in list:lines() do
    count = count + 1
    local name = path:match "([^/]*)_config[%.%a]*%.json$"
    local reason = path:find(".partial.", 1, true) and partial[name] or refused[name]
    it((reason and "refuses " or "loads ") .. name, function()
      local ok, cfg = pcall(config.load, path)
      if reason then
        assert.is_false(ok)
        assert.is_truthy(cfg.message:find(reason, 1, true), cfg.message)
        return
      end
      assert.is_true(ok, tostring(cfg))
      local wanted = values[name]
      if not wanted then return end
      assert.same(wanted, { cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.rotary_dim, cfg.rope_theta,
        cfg.rope_scaling and cfg.rope_scaling.rope_type or "default", cfg.window_of(0), cfg.num_experts })
    end)
  end
  list:close()

  it("are all there", function() assert.equal(48, count) end)

  for _, model in ipairs { "demo_llama", "demo_minimax_m2_fp8", "llama_mqa_tied", "llama_rope3_bias", "minimax_m2_random",
    "mistral_sliding", "stories260K/hf-f32", "stories260K/hf-bf16" } do
    it("load for the reference model " .. model, function()
      local cfg = config.load("spec/fixtures/models/" .. model)
      assert.equal(1, #cfg.eos_token_ids)
    end)
  end
end)
