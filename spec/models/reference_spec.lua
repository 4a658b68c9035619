--- spec/models/reference_spec.lua - models under plans against Hugging Face transformers' results.
local core = require "weft.core"
local program = require "spec.support.program"

local plans = {
  { "-tp", "1" }, { "-tp", "2" }, { "-tp", "4" }, { "-tp", "8" },
  { "-tp", "4", "-tpa", "2", "-dcp", "2" }, { "-tp", "8", "-tpa", "2", "-dcp", "4" }, { "-tp", "8", "-tpa", "1", "-dcp", "8" },
}

local function with(words, more)
  for _, word in ipairs(more) do words[#words + 1] = word end
  return words
end

-- tp 8 of 4 KV heads over 8 query heads needs whole parts of everything else too.
local models = {
  { "demo_llama", plans }, { "llama_mqa_tied", plans }, { "llama_rope3_bias", plans }, { "mistral_sliding", plans },
}

for _, entry in ipairs(models) do
  local model, list = entry[1], entry[2]
  describe(model, function()
    local cases = program.expected(model)
    for _, plan in ipairs(list) do
      local name = table.concat(plan, " ")

      it("draws the reference's greedy tokens under " .. name, function()
        for i, case in ipairs(cases) do
          if case.smallest_top2_margin > 1e-3 then
            local got = program.json(with({ "run", "--model", program.models .. model, "--prompt-ids", program.ids(case.prompt_ids),
              "--temperature", "0", "--ignore-eos", "--dtype", "float32", "--json", "--max-tokens", #case.greedy_ids }, plan))
            assert.same(case.greedy_ids, got.output_ids, "case " .. i)
            assert.equal("length", got.finish_reason)
          end
        end
      end)

      it("gives the reference's logits within 1e-4 of the largest under " .. name, function()
        local reference = core.checkpoint.open(program.models .. model .. "/expected.safetensors")
        for i, case in ipairs(cases) do
          local out = os.tmpname()
          local code, _, err = program.run(with({ "logits", "--model", program.models .. model, "--prompt-ids", program.ids(case.prompt_ids),
            "--dtype", "float32", "--out", out }, plan))
          assert.equal(0, code, err)
          local got = core.checkpoint.open(out):source("logits"):tensor()
          os.remove(out)
          local want = reference:source(("case%d.logits"):format(i - 1)):tensor()
          local last = got:narrow(0, #case.prompt_ids - want.shape[1], want.shape[1])
          assert.is_true(core.compare_rows(last, want).max_rel_diff < 1e-4, "case " .. i)
        end
      end)
    end
  end)
end
