--- spec/commands/chat_spec.lua - weft chat behind a pipe and at a terminal.
local files = require "spec.support.files"
local program = require "spec.support.program"
local Terminal = require "spec.support.terminal"

local demo = program.models .. "demo_llama"

describe("weft chat", function()
  it("answers each line of standard input and leaves at its end", function()
    local code, out, err = program.run { "chat", "--model", demo, "--max-tokens", "8", input = "Once upon a time\n\nAt the farm\n" }
    assert.equal(0, code, err)
    local _, answers = out:gsub("\n", "")
    assert.equal(2, answers)
  end)

  it("goes on behind the end of an answer under --ignore-eos", function()
    local lengths = {}
    for i, flag in ipairs { "--timeout=60", "--ignore-eos" } do
      local code, out, err = program.run { "chat", "--model", demo, "--max-tokens", "200", flag, input = "hi\n" }
      assert.equal(0, code, err)
      lengths[i] = #out
    end
    assert.is_true(lengths[2] > 2 * lengths[1])
  end)

  it("edits lines at a terminal: Ctrl-C drops one, and stops an answer; Ctrl-D leaves", function()
    local t = Terminal.open({ program.path, "chat", "--model", demo, "--max-tokens", "100000", "--ignore-eos", "--timeout", "60" }, {})
    t:expect "leaves%.\n> "
    t:send "half a line\3"
    assert.equal("half a line\n> ", t:expect "> ")
    t:send "Once upon a time\n"
    t:expect "girl"
    t:send "\3"
    t:expect "\n> "
    t:send "a mark\3" -- on a slow machine the answer may have ended before the Ctrl-C, which then dropped a line
    t:expect "a mark\n> "
    t:send "\27[A\3" -- the line from before, in the history
    assert.matches("Once upon a time\n> ", t:expect "\n> ")
    t:send "\4"
    assert.equal(0, t:finish())
  end)
end)

describe("weft chat with a context of 48 tokens", function()
  local folder

  setup(function()
    folder = files.folder()
    os.execute(("cp %s/* %s"):format(demo, folder))
    files.write(folder .. "/config.json", (files.read(demo .. "/config.json"):gsub('"max_position_embeddings": 2048', '"max_position_embeddings": 48')))
  end)
  teardown(function() files.remove(folder) end)

  local line = "Once upon a time there was a little girl who went to the farm. She saw a bear there and it was sad."

  it("goes on where it is used up: ,drop makes room for the line that did not fit, ,new begins again", function()
    local t = Terminal.open({ program.path, "chat", "--model", folder, "--max-tokens", "2", "--ignore-eos" }, {})
    t:expect "leaves%.\n> "
    assert.matches("weft: there is no turn to leave out\n", t:line(",drop", "\n> "))
    assert.is_nil(t:line(line, "\n[^>]*\n> "):find("weft:", 1, true))
    assert.matches("weft: the conversation has %d+ tokens, and the model takes 48 with its answer; ,drop leaves out the oldest turn, ,new begins again\n",
      t:line(line, "weft: .*\n> "))
    local told = t:line(",drop", "stay\n[^>]*\n> ")
    assert.matches("weft: the oldest turn is left out, 0 stay\n", told)
    assert.is_nil(told:find("tokens", 1, true))
    assert.matches("weft: a new conversation\n", t:line(",new", "conversation\n> "))
    assert.is_nil(t:line(line, "\n[^>]*\n> "):find("weft:", 1, true))
    t:send "\4"
    assert.equal(0, t:finish())
  end)

  it("refuses a file that is no model by what it is", function()
    local path = files.temporary "GGUF"
    os.rename(path, path .. ".gguf")
    program.refused(1, { "chat", "--model", path .. ".gguf" }, "does not read GGUF files")
    os.remove(path .. ".gguf")
  end)

  it("takes no other line that begins with such a word, and leaves with ,quit", function()
    local t = Terminal.open({ program.path, "chat", "--model", folder, "--max-tokens", "2", "--ignore-eos" }, {})
    t:expect "leaves%.\n> "
    assert.matches("weft: no command ,hlep; ,help lists them\n", t:line(",hlep", "them\n> "))
    assert.matches("weft: ,drop takes nothing behind it, got 'two'\n", t:line(",drop two", "two'\n> "))
    assert.matches("weft: ,new begins again, ,drop leaves out the oldest turn, ,quit leaves; [^\n]*\n", t:line(",help", "front\n> "))
    t:send ",quit\n"
    assert.equal(0, t:finish())
    local code, out, err = program.run { "chat", "--model", folder, input = ",hlep\n" }
    assert.same({ 1, "", "weft: no command ,hlep; ,help lists them\n" }, { code, out, err })
  end)

  it("says where an answer ends because the context does, and ends behind a pipe", function()
    local code, _, err = program.run { "chat", "--model", folder, "--ignore-eos", input = "Once\nmore\n" }
    assert.equal(1, code)
    assert.matches("^weft: the context of 48 tokens is used up; ,drop leaves out the oldest turn, ,new begins again\nweft: the conversation has", err)
  end)
end)
