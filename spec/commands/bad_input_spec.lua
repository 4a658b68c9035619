--- spec/commands/bad_input_spec.lua - wrong flags, plans and files get one clear line and the right exit code.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

local refused = program.refused

local function run(...)
  return { "run", "--model", demo, "--prompt-ids", "5,6,7", "--max-tokens", "2", ... }
end

local script = files.script
teardown(files.remove_scripts)

describe("wrong usage (exit 2)", function()
  it("names an unknown flag and the nearest known one", function()
    refused(2, run("--max-token", "3"), "unknown flag '--max-token'", "did you mean --max-tokens?")
  end)
  it("names an unknown command and lists the known ones", function()
    refused(2, { "runn" }, "unknown command 'runn'", "run, chat")
  end)
  it("says what a flag wants", function()
    refused(2, run("-tp", "two"), "-tp wants a whole number, got 'two'")
    refused(2, run("-tp"), "-tp needs a value")
    refused(2, run("--top-p", "1.5"), "--top-p must be from 0 to 1, got 1.5")
    refused(2, run("--dcp-comm-backend", "nccl"), "--dcp-comm-backend is one of ag_rs, a2a, got 'nccl'")
    refused(2, run("--prompt", "x"), "exclude one another")
    refused(2, { "run", "--prompt", "x" }, "--model is missing")
    refused(2, { "run", "--model", demo, "--prompt-ids", "1,x" }, "--prompt-ids wants token ids", "'x'")
    refused(2, run("-pp", "2"), "-pp: weft does not run pipeline parallelism yet")
  end)
  it("refuses a tp that does not divide the heads", function()
    refused(2, run("-tp", "3"), "attention heads", "8", "3")
  end)
  it("refuses a tpa above tp, one that does not divide it, and a wrong dcp", function()
    refused(2, run("-tp", "2", "-tpa", "4"), "4 > 2")
    refused(2, run("-tp", "4", "-tpa", "3"), "4 % 3")
    refused(2, run("-tp", "4", "-tpa", "2", "-dcp", "4"), "decode_context_parallel_size", "(2)", "4")
  end)
  it("refuses a plan that is another policy on each rank, and one for other ranks than were started", function()
    refused(2, run("--plan", script "return weft.policy { tensor = 4, attention = { tensor = 2, interleave = weft.rank().rank == 1 and 4 or 1 } }"),
      "weft: rank 1 has another policy than rank 0: ", "interleave=4", "interleave=1")
    refused(2, run("--plan", script "return weft.policy { tensor = 4, layers = { [1] = { attention = { tensor = weft.rank().rank == 3 and 1 or 2 } } } }"),
      "weft: rank 3 has another policy than rank 0: ")
    refused(2, run("--plan", script "return weft.policy { tensor = weft.rank().world_size == 4 and 2 or 4 }"), "for 2 ranks", "4 before")
  end)
  it("refuses an exchange without context ranks", function()
    refused(2, run("--dcp-comm-backend", "a2a"), "a2a", "decode_context_parallel_size")
  end)
  it("refuses variables that switch weft where they say what means nothing", function()
    for _, name in ipairs { "WEFT_PEER", "WEFT_NO_PEER", "WEFT_SYNC", "WEFT_CHECK", "WEFT_CPU_ISA" } do
      local words = run()
      words.env = name .. "=foo"
      refused(2, words, name .. " is one of ", "got 'foo'")
    end
    local words = run()
    words.env = "WEFT_CPU_ISA=scalar WEFT_CHECK=1 WEFT_SYNC=0 WEFT_PEER="
    assert.equal(0, (program.run(words)))
  end)
  it("refuses sizes that no number holds, and a GPU's memory on a CPU", function()
    refused(2, run("--kv-cache-bytes", "99999999999999999999G"), "--kv-cache-bytes must be at most 8192T, got '99999999999999999999G'")
    refused(2, run("--device", "cpu", "--gpu-memory-utilization", "0.5"), "this run is on the CPU")
    refused(2, { "chat", "--model", demo, "--logprobs", "3" }, "unknown flag '--logprobs' for weft chat")
  end)
  it("refuses a hidden width that does not divide", function()
    refused(2, { "run", "--model", program.models .. "stories260K/hf-f32", "--prompt-ids", "1", "-tp", "8" }, "172", "8")
  end)
  it("refuses -tpa for a model that does not list attention", function()
    local path = script [[local weft = require "weft"
      local Llama = require "weft.models.llama"
      local Mine = weft.model "MineForCausalLM" {}
      function Mine.build(...) return Llama.build(...) end
      return Mine]]
    local words = run("-tp", "4", "-tpa", "2")
    table.insert(words, 2, path)
    refused(2, words, "ATTENTION layer parallel plan", "MineForCausalLM")
    os.remove(path)
  end)
end)

describe("results that cannot be written (exit 1)", function()
  it("says so when standard output is full or closed", function()
    for _, to in ipairs { ">/dev/full", ">&-" } do
      local err = os.tmpname()
      local status = os.execute(("%s run --model %s --prompt-ids 5,6 --max-tokens 2 2>%s %s"):format(program.path, demo, err, to))
      local file = io.open(err)
      assert.is_truthy(file:read("*a"):find("could not be written to standard output", 1, true), to)
      file:close()
      os.remove(err)
      assert.equal(256, status)
    end
  end)
  it("writes logits into regular files alone, and never over the model's", function()
    refused(1, { "logits", "--model", demo, "--prompt-ids", "5", "--out", "/dev/null" }, "/dev/null: it is not a regular file")
    refused(1, { "logits", "--model", demo, "--prompt-ids", "5", "--out", "/no/such/folder/x" }, "cannot write /no/such/folder/x")
    refused(2, { "logits", "--model", demo, "--prompt-ids", "5", "--out", demo .. "/model.safetensors" }, "is a file of the model")
  end)
end)

describe("limits", function()
  it("refuses a bench beyond the model's positions", function()
    refused(2, { "bench", "--model", demo, "--context", "2040", "--steps", "50" }, "2048 positions", "--context 2040")
  end)
  it("refuses a verify beyond them before any work", function()
    refused(2, { "verify", "--model", demo, "--max-tokens", "5000" }, "2048 positions")
    refused(2, { "verify", "--model", demo, "--plans", "" }, "--plans is all")
  end)
  it("refuses a fault that names no place, and a folder where a file is wanted", function()
    local words = run("-tp", "2")
    words.env = "WEFT_FAULT=rank=1,at=bogus,kind=raise"
    refused(2, words, "at must be load, step, exchange or capture, got 'bogus'")
    words = run("--device", "cpu")
    words.env = "WEFT_FAULT=rank=0,at=capture,kind=raise"
    refused(2, words, "at=capture strikes where graphs are captured, and this run captures none (it is on the CPU)")
    refused(1, { "run", "--model", demo, "-f", "spec" }, "cannot read the prompts spec: Is a directory")
  end)
end)

describe("a wrong prompt or script", function()
  it("refuses ids outside the vocabulary and prompts that are too long", function()
    refused(1, { "run", "--model", demo, "--prompt-ids", "5,1024" }, "1024", "outside the vocabulary: 0 to 1023")
    local ids = {}
    for i = 1, 2049 do ids[i] = 5 end
    refused(1, { "run", "--model", demo, "--prompt-ids", program.ids(ids) }, "2049", "2048")
    refused(1, { "run", "--model", demo, "--prompt-ids", "" }, "empty")
  end)
  it("names the file and line of a script with a syntax error", function()
    local path = script "local x = = 1"
    local words = run()
    table.insert(words, 2, path)
    refused(1, words, "syntax error", path:match "[^/]+$" .. ":1:")
    os.remove(path)
  end)
  it("says what a script that returns nothing should return", function()
    local path = script "local x = 1"
    local words = run()
    table.insert(words, 2, path)
    refused(1, words, "must return a model made by weft.model")
    os.remove(path)
  end)
  it("ends with the message of the rank that fails, and of that one alone", function()
    local path = script [[local weft = require "weft"
      local Llama = require "weft.models.llama"
      local Mine = weft.model "MineForCausalLM" { supported_layer_types = { "attention" } }
      function Mine.build(...)
        local model = Llama.build(...)
        local forward = model.forward
        function model.forward(step)
          if weft.rank().rank == 2 then error "the third rank has had enough" end
          return forward(step)
        end
        return model
      end
      return Mine]]
    local words = run("-tp", "4")
    table.insert(words, 2, path)
    refused(1, words, "rank 2", "the third rank has had enough")
    os.remove(path)
  end)
end)
