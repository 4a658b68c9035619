--- spec/commands/bad_files_spec.lua - scripts, plans and texts that cannot be read, or are something else.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"
local refused = program.refused

local script = files.script
teardown(files.remove_scripts)

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
      refused(2, { "run", "--model", demo, "--prompt-ids", "5", "--plan", script(text) }, why)
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
