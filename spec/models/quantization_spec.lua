--- spec/models/quantization_spec.lua - fp8 checkpoints: as they are, as floats, with activations rounded too.
local core = require "weft.core"
local program = require "spec.support.program"

local folder = program.models .. "demo_minimax_m2_fp8"

-- Logits of the first case with more options.
local function logits(...)
  local out = os.tmpname()
  local words = { "logits", "--model", folder, "--prompt-ids", program.ids(program.expected("demo_minimax_m2_fp8")[1].prompt_ids),
    "--out", out }
  for _, word in ipairs { ... } do words[#words + 1] = word end
  local code, _, err = program.run(words)
  assert.equal(0, code, err)
  local got = core.checkpoint.open(out):source("logits"):tensor()
  os.remove(out)
  return got
end

local function difference(a, b) return core.compare_rows(a, b).max_rel_diff end

describe("an fp8 checkpoint", function()
  local plain = logits("--dtype", "float32")

  it("gives the same as floats, under any cut", function()
    assert.is_true(difference(logits("--dtype", "float32", "--quantization", "none"), plain) < 1e-5)
    assert.is_true(difference(logits("--dtype", "float32", "--quantization", "none", "-tp", "8", "-ep", "2"), plain) < 1e-5)
  end)

  it("stays close in bfloat16, whole and as floats", function()
    for _, options in ipairs { {}, { "--quantization", "none" }, { "-tp", "4", "-ep", "2" } } do
      assert.is_true(difference(logits("--dtype", "bfloat16", unpack(options)), plain) < 3e-2)
    end
  end)

  it("changes a little, but not much, when activations are rounded to fp8 as well", function()
    local rounded = difference(logits("--dtype", "float32", "--quantization", "fp8_block"), plain)
    assert.is_true(rounded > 1e-4 and rounded < 0.2, tostring(rounded))
  end)

  it("is what --quantization fp8_block needs", function()
    local code, _, err = program.run { "run", "--model", program.models .. "demo_llama", "--prompt-ids", "5", "--quantization", "fp8_block" }
    assert.equal(2, code)
    assert.is_truthy(err:find("--quantization fp8_block: the model's config.json names no fp8 quantisation", 1, true), err)
  end)

  it("gives dummy weights in fp8 too, one model for every plan", function()
    local whole = logits("--dtype", "float32", "--load-format", "dummy")
    assert.is_true(difference(logits("--dtype", "float32", "--load-format", "dummy", "-tp", "4", "-tpa", "2", "-ep", "2"), whole) < 1e-4)
  end)
end)
