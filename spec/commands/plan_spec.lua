-- spec/commands/plan_spec.lua - weft plan at the prompt: checks, draws, prices, searches.
local core = require "weft.core"
local files = require "spec.support.files"
local program = require "spec.support.program"

local llama = "spec/fixtures/configs/meta-llama--Meta-Llama-3.1-8B_config.json"
local demo = program.models .. "demo_llama"

-- The text of a file, which goes.
local function take(path)
  local text = files.read(path)
  os.remove(path)
  return text
end

describe("weft plan", function()
  it("names the rule that refuses a plan and the nearest legal ones, from a config file alone", function()
    local code, out, err = program.run { "plan", "--model", llama, "-tp", "3" }
    assert.same({ 2, "" }, { code, out })
    assert.equal("weft: Total number of attention heads (32) must be divisible by tensor parallel size (3). "
      .. "Nearest legal plans: -tp 4, -tp 4 -tpa 2, -tp 2\n", err)
    code, out, err = program.run { "plan", "--model", llama, "-tp", "8", "-tpa", "3", "--json" }
    local said = core.json.decode(out)
    assert.same({ 2, false, "-tp 8 -tpa 4" }, { code, said.legal, said.nearest[1].flags })
    assert.matches("8 % 3 ~= 0", (err:gsub("!=", "~=")), 1, true)
  end)

  it("names the nearest plans in a plan script's own words, entries of layers too", function()
    local function refused(text, ...)
      local path = files.temporary(text, ".lua")
      local code, out, err = program.run { "plan", "--model", llama, "--plan", path }
      os.remove(path)
      assert.same({ 2, "" }, { code, out })
      for _, part in ipairs { ... } do assert.is_truthy(err:find(part, 1, true), err) end
      return err
    end
    refused("return weft.policy { tensor = 8, attention = { tensor = 3 }, interleave = 4 }", "8 % 3 != 0",
      "Nearest legal plans: { tensor = 8, attention = { tensor = 4 }, interleave = 4 }, ")
    refused("return { tensor = 8, mlp = { tensor = 3 } }", "Nearest legal plans: { tensor = 8, mlp = { tensor = 4 } }, ")
    refused("return { tensor = 4, layers = { ['0-1'] = { attention = { tensor = 3 } } } }", 'Nearest legal plans: layers = { ["0-1"] = { attention = { tensor = 4 } } }, ')
    assert.is_nil(refused("return { tensor = 4, interleave = 3 }", "interleave"):find("Nearest", 1, true))
    assert.is_nil(refused("return { tesnor = 8 }", "a policy has no field 'tesnor'"):find("%.lua:%d+"))
    refused("error {}", "failed: the error raised was a table without a message")
    refused("return setmetatable({}, { __index = function() error 'trap' end })", "trap")
  end)

  it("refuses flags that have no place beside others", function()
    for said, words in pairs { ["--search prices every plan"] = { "--search", "-tp", "4" }, ["--max-ranks is the largest"] = { "--max-ranks", "4" },
      ["--svg wants a name, got ''"] = { "--svg", "" } } do
      local code, _, err = program.run { "plan", "--model", llama, unpack(words) }
      assert.equal(2, code)
      assert.is_truthy(err:find(said, 1, true), err)
    end
  end)

  it("writes no picture over a file that it reads", function()
    local folder = files.folder { ["config.json"] = files.read(llama), ["plan.lua"] = "return { tensor = 2 }", ["m.lua"] = "return { memory = 8e10 }" }
    os.execute(("ln -s config.json %s/picture.svg"):format(folder))
    local function refused(said, name, ...)
      local path = name == "-" and name or folder .. "/" .. name
      local code, out, err = program.run { "plan", "--model", folder, "--svg", path, ... }
      assert.same({ 2, "" }, { code, out }, err)
      assert.is_truthy(err:find(said, 1, true), err)
    end
    refused("this command reads that file", "config.json")
    refused("this command reads that file", "picture.svg")
    refused("this command reads that file", "plan.lua", "--plan", folder .. "/plan.lua")
    refused("this command reads that file", "m.lua", "--machine", folder .. "/m.lua")
    refused("a picture is not named .json", "tokenizer.json")
    refused("not standard output", "-")
    assert.equal(files.read(llama), files.read(folder .. "/config.json"))
    files.remove(folder)
  end)

  it("says what a machine file leaves to its base, and what context the model cannot take", function()
    local path = files.temporary("return { name = 'mine', memory = 8e10 }", ".lua")
    local _, out = program.run { "plan", "--model", llama, "--machine", path, "--context", "1000000" }
    os.remove(path)
    local text = out:gsub("%s+", " ")
    assert.is_truthy(text:find("mine leaves out bandwidth, collective, domain, ", 1, true), out)
    assert.is_truthy(text:find(": those are h200's", 1, true), out)
    assert.is_truthy(text:find("the model takes 131072 positions: it cannot run 1000000 tokens of context", 1, true), out)
  end)

  it("prices a step, and shows the time that weft bench measured beside it", function()
    local bench = os.tmpname()
    local words = { "--model", demo, "-tp", "2", "-tpa", "1", "--batch", "2", "--context", "32" }
    local function with(command, ...)
      local list = { command, env = "WEFT_BENCH_FILE=" .. bench }
      for _, word in ipairs(words) do list[#list + 1] = word end
      for _, word in ipairs { ... } do list[#list + 1] = word end
      return list
    end
    assert.is_nil(program.json(with("plan", "--json", "--machine", "cpu")).measured)
    local ms = program.json(with("bench", "--steps", "2", "--json")).decode.ms
    local said = program.json(with("plan", "--json", "--machine", "cpu"))
    assert.near(ms, said.measured.ms, 1e-6)
    assert.same({ "predicted", "cpu", 2, 32 }, { said.price.label, said.price.machine, said.price.batch, said.price.context })
    local _, text = program.run(with("plan", "--machine", "cpu"))
    assert.matches("not measured", text, 1, true)
    assert.matches("by weft bench", text, 1, true)
    assert.is_nil(program.json(with("plan", "--json", "--machine", "h200")).measured)
    os.remove(bench)
  end)

  it("draws into a pipe without colour, and into an SVG file", function()
    local path = os.tmpname()
    local code, out = program.run { "plan", "--model", llama, "-tp", "8", "-tpa", "2", "--draw", "--svg", path }
    assert.equal(0, code)
    assert.matches("│ rank 7 ", out, 1, true)
    assert.is_nil(out:find("\27", 1, true))
    assert.matches("</svg>\n$", take(path))
    local failed, _, err = program.run { "plan", "--model", llama, "--svg", "/nowhere/at/all.svg" }
    assert.equal(1, failed)
    assert.matches("cannot write the picture", err, 1, true)
  end)

  it("leaves no half of a picture, and nothing beside it", function()
    local code, _, err = program.run { "plan", "--model", llama, "--svg", "/dev/full" }
    assert.equal(1, code)
    assert.matches("cannot write the picture: /dev/full: No space left on device", err, 1, true)
    local folder = files.folder()
    code, _, err = program.run { "plan", "--model", llama, "--svg", folder }
    assert.equal(1, code)
    assert.matches("cannot write the picture: " .. folder .. ": ", err, 1, true)
    assert.is_nil(io.open(folder .. ".part"))
    files.remove(folder)
  end)

  it("searches the legal plans for the front", function()
    local path = os.tmpname()
    local words = { "plan", "--model", llama, "--search", "--max-ranks", "8", "--context", "8192", "--svg", path, "--json" }
    local said = program.json(words)
    assert.is_true(said.num_plans > 20 and #said.front > 3)
    assert.matches("the front of decoding plans", take(path), 1, true)
    local code, text = program.run { "plan", "--model", llama, "--search", "--max-ranks", "8", "--context", "8192" }
    assert.equal(0, code)
    assert.matches("ranks  batch  plan", text, 1, true)
  end)

  it("refuses an unknown machine", function()
    local code, _, err = program.run { "plan", "--model", llama, "--machine", "abacus" }
    assert.equal(2, code)
    assert.matches("--machine is one of h200, h100, gb200-nvl72, cpu, or FILE.lua; got 'abacus'", err, 1, true)
  end)
end)
