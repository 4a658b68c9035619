--- spec/commands/bad_input_spec.lua - wrong flags, plans and files get one clear line and the right exit code.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

-- Runs, expects the exit code, exactly one line on standard error, and every text in it.
local function refused(code, words, ...)
  local got, out, err = program.run(words)
  assert.equal(code, got, err)
  assert.equal("", out)
  local _, lines = err:gsub("\n", "")
  assert.equal(1, lines, err)
  assert.equal("weft: ", err:sub(1, 6))
  for _, text in ipairs { ... } do
    assert.is_truthy(err:find(text, 1, true), ("'%s' is not in: %s"):format(text, err))
  end
end

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

describe("a wrong model folder (exit 1)", function()
  local config = files.read(demo .. "/config.json")
  local function with_config(text, ...)
    local path = files.folder { ["config.json"] = text }
    refused(1, { "run", "--model", path, "--prompt-ids", "5" }, ...)
    files.remove(path)
  end

  it("says that config.json is missing, or cut off", function()
    local path = files.folder {}
    refused(1, { "run", "--model", path, "--prompt-ids", "5" }, "config.json")
    files.remove(path)
    with_config(config:sub(1, 200), "config.json")
  end)
  it("names a GGUF file in its place, and says what to give instead", function()
    local path = files.folder { ["b.gguf"] = "GGUF", ["a.gguf"] = "GGUF" }
    local wanted = "weft does not read GGUF files; give the folder of the same model with config.json and model.safetensors"
    refused(1, { "run", "--model", path, "--prompt", "x" }, path .. " holds a.gguf and no config.json: " .. wanted)
    refused(1, { "plan", "--model", path .. "/b.gguf" }, path .. "/b.gguf: " .. wanted)
    files.write(path .. "/config.json", config)
    refused(1, { "run", "--model", path, "--prompt-ids", "5" }, path .. ": holds a.gguf, and weft does not read GGUF files; it wants model.safetensors or")
    files.remove(path)
  end)
  it("lists the known architectures when it does not know one", function()
    with_config(config:gsub("LlamaForCausalLM", "NoSuchForCausalLM"), "NoSuchForCausalLM", "LlamaForCausalLM, ", "MistralForCausalLM")
  end)
  it("says that the weights are missing, cut off or of another shape, by name", function()
    with_config(config, "model.safetensors")
    local weights = files.read(demo .. "/model.safetensors")
    local path = files.folder { ["config.json"] = config, ["model.safetensors"] = weights:sub(1, 1000000) }
    refused(1, { "run", "--model", path, "--prompt-ids", "5" }, "model.safetensors")
    files.remove(path)
    path = files.folder { ["config.json"] = config:gsub('"intermediate_size": 512', '"intermediate_size": 256'), ["model.safetensors"] = weights }
    refused(1, { "run", "--model", path, "--prompt-ids", "5" }, "gate_proj.weight", "wanted [256, 192], found [512, 192]")
    files.remove(path)
    path = files.folder { ["config.json"] = config:gsub('"num_hidden_layers": 4', '"num_hidden_layers": 5'), ["model.safetensors"] = weights }
    refused(1, { "run", "--model", path, "--prompt-ids", "5", "-tp", "2" }, "model.layers.4.", "layer 4")
    files.remove(path)
  end)
  it("has layers that the config leaves out: one line says which", function()
    local path = files.folder { ["model.safetensors"] = files.read(demo .. "/model.safetensors") }
    local function tells(layers, said, command, ...)
      files.write(path .. "/config.json", (config:gsub('"num_hidden_layers": 4', '"num_hidden_layers": ' .. layers)))
      local code, _, err = program.run { command, "--model", path, "--prompt-ids", "5", "--max-tokens", "1", ... }
      assert.same({ 0, said and ("weft: %s not used: num_hidden_layers of config.json is %d\n"):format(said, layers) or "" }, { code, err })
    end
    tells(4, false, "run")
    tells(3, "layer 3 of the checkpoint is", "run", "-tp", "2")
    tells(2, "layers 2 to 3 of the checkpoint are", "verify", "--max-ranks", "2")
    files.remove(path)
  end)
  it("runs ids without a tokenizer, and says that text needs one", function()
    local path = files.folder { ["config.json"] = config, ["model.safetensors"] = files.read(demo .. "/model.safetensors") }
    local code, out, err = program.run { "run", "--model", path, "--prompt-ids", "0,402", "--max-tokens", "3", "--json" }
    assert.equal(0, code, err)
    assert.is_truthy(out:find('"output_ids":[', 1, true))
    refused(1, { "run", "--model", path, "--prompt", "hello" }, "tokenizer.json", "--prompt-ids")
    files.remove(path)
  end)
  it("is found before its weights are read, and so is what cannot be done with it", function()
    local path = files.folder { ["config.json"] = config }
    refused(1, { "run", "--model", path, "--prompt", "hello" }, "no tokenizer.json in " .. path, "--prompt-ids")
    refused(1, { "chat", "--model", path }, "no tokenizer.json in " .. path .. "; weft chat needs it")
    refused(1, { "logits", "--model", path, "--prompt", "hello", "--out", "none.safetensors" }, "no tokenizer.json in " .. path, "--prompt-ids")
    refused(1, { "logits", "--model", path, "--prompt-ids", "5", "--out", "/no/such/folder/x" }, "cannot write /no/such/folder/x: No such")
    refused(1, { "logits", "--model", path, "--prompt-ids", "5", "--out", "/dev" }, "cannot write /dev: it is not a regular file")
    refused(2, { "bench", "--model", path, "--context", "99999" }, "2048 positions", "--context 99999")
    files.remove(path)
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

describe("scripts that come in", function()
  it("end with 1 where they cannot be read, wherever they are named", function()
    for path, why in pairs { ["/no/such.lua"] = "No such file or directory", ["spec"] = "Is a directory" } do
      local model = { "--model", demo, "--prompt-ids", "5" }
      refused(1, { "run", "--plan", path, unpack(model) }, "cannot read the plan " .. path .. ": " .. why)
      refused(1, { "plan", "--model", demo, "--plan", path }, "cannot read the plan " .. path .. ": " .. why)
      refused(1, { "verify", "--plans", path, unpack(model) }, "cannot read the plan " .. path .. ": " .. why)
      refused(1, { "repl", "--plan", path }, "cannot read the plan " .. path .. ": " .. why)
      refused(1, { "run", path, unpack(model) }, "cannot read the model script " .. path .. ": " .. why)
      refused(1, { "repl", path }, "cannot read " .. path .. ": " .. why)
      refused(1, { "lua", path }, path .. ": " .. why)
    end
    refused(1, { "plan", "--model", demo, "--machine", "/no/such.lua" }, "cannot read the machine /no/such.lua: No such file")
  end)

  it("end with 2 where they are plans that say nothing", function()
    for text, why in pairs { ["return {"] = "the plan has a syntax error", ["error 'no'"] = "failed: ", ["return 5"] = "must return a weft.policy{...}, got number" } do
      refused(2, run("--plan", script(text)), why)
      refused(2, { "verify", "--model", demo, "--prompt-ids", "5", "--plans", script(text) }, why)
      refused(2, { "repl", "--plan", script(text) }, why)
    end
  end)
end)

describe("files that come in", function()
  local config = files.read(demo .. "/config.json")

  local function plan(said, ...)
    local code, out, err = program.run { "plan", limit = 20, ... }
    assert.is_true(code == 1 or code == 2, err)
    assert.equal("", out)
    assert.is_truthy(err:find(said, 1, true), err)
  end

  it("must be regular and of a size that such a file has, and are named", function()
    local folder = files.folder()
    os.execute(("cd %s && mkfifo pipe pipe.json pipe.lua && truncate -s 100M huge.lua && mkdir model && mkfifo model/config.json"):format(folder))
    local model = { "--model", demo }
    plan("cannot read the plan " .. folder .. "/pipe: not a regular file", "--plan", folder .. "/pipe", unpack(model))
    plan("cannot read the plan /dev/zero: not a regular file", "--plan", "/dev/zero", unpack(model))
    plan("cannot read the plan " .. folder .. "/huge.lua: 104857600 bytes, more than", "--plan", folder .. "/huge.lua", unpack(model))
    plan("cannot read the machine " .. folder .. "/pipe.lua: not a regular file", "--machine", folder .. "/pipe.lua", unpack(model))
    plan("cannot read the model script " .. folder .. "/pipe.lua: not a regular file", folder .. "/pipe.lua", unpack(model))
    os.execute(("mkfifo %s/tokenizer.json"):format(folder))
    local _, _, err = program.run { "tokenize", "--model", folder, "--prompt", "x", limit = 20 }
    assert.is_truthy(err:find(folder .. "/tokenizer.json is not a file", 1, true), err)
    plan("cannot read " .. folder .. "/pipe.json: not a regular file", "--model", folder .. "/pipe.json")
    plan("cannot read " .. folder .. "/model/config.json: not a regular file", "--model", folder .. "/model")
    files.remove(folder)
  end)

  it("that are texts may be pipes, with an end", function()
    local code, _, err = program.run { "tokenize", "--model", demo, "-f", "/dev/zero", limit = 60 }
    assert.equal(1, code)
    assert.is_truthy(err:find("cannot read the texts /dev/zero: more than the 268435456 bytes", 1, true), err)
    assert.equal(0, (program.run { "tokenize", "--model", demo, "-f", "/dev/stdin", input = '"Once"\n' }))
  end)

  it("are not where the logits go", function()
    local path = files.temporary("return { tensor = 2 }", ".lua")
    local code, _, err = program.run { "logits", "--model", demo, "--plan", path, "--prompt-ids", "5", "--out", path }
    assert.equal("return { tensor = 2 }", files.read(path))
    os.remove(path)
    assert.equal(2, code)
    assert.is_truthy(err:find("this command reads that file", 1, true), err)
  end)

  it("are named where the model refuses a plan", function()
    local path = files.temporary("return { tensor = 2, layers = { ['0-99'] = { attention = { tensor = 1 } } } }", ".lua")
    plan("the plan " .. path .. ": layers: 0-99, but the model has 4 layers", "--model", demo, "--plan", path)
    os.remove(path)
  end)

  it("may begin with the mark of UTF-8", function()
    local mark, story = "\239\187\191", program.models .. "stories260K/hf-f32-3shards"
    local path = files.folder()
    os.execute(("cp %s/* %s"):format(story, path))
    for _, name in ipairs { "config.json", "tokenizer.json", "model.safetensors.index.json" } do
      files.write(path .. "/" .. name, mark .. files.read(path .. "/" .. name))
    end
    files.write(path .. "/prompts.jsonl", mark .. '"Once upon"\n')
    local words = { "--max-tokens", "4" }
    local expected = program.json { "run", "--model", story, "--prompt", "Once upon", "--json", unpack(words) }
    local got = program.json { "run", "--model", path, "-f", path .. "/prompts.jsonl", unpack(words) }
    files.remove(path)
    assert.same({ expected.prompt_ids, expected.output_ids }, { got.prompt_ids, got.output_ids })
  end)

  it("never reach the terminal as control bytes", function()
    for text, said in pairs { ["\27[31m{"] = "near '\\x1b'", ['{"architectures": ["A"], "hidden_size": "\194\155\\u001b[2J"}'] = "\\x1b[2J" } do
      local path = files.temporary(text, ".json")
      local code, _, err = program.run { "plan", "--model", path }
      os.remove(path)
      assert.equal(1, code)
      assert.is_nil(err:gsub("\n$", ""):find "[%z\1-\31\127]")
      assert.is_nil(err:find("\194\155", 1, true))
      assert.is_truthy(err:find(said, 1, true), err)
    end
  end)

  it("of ours that are scripts refuse arguments that they do not know", function()
    for _, name in ipairs { "helix", "predict" } do
      local code, _, err = program.run { "lua", "scripts/" .. name .. ".lua", "--frob" }
      assert.equal(2, code)
      assert.is_truthy(err:find("--frob", 1, true))
    end
  end)
end)
