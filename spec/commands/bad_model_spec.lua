--- spec/commands/bad_model_spec.lua - a wrong model folder gets one clear line and exit code 1.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"
local refused = program.refused

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
