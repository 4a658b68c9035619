--- spec/lua/errors_spec.lua - what messages say of places in Lua files.
local errors = require "weft.errors"
local files = require "spec.support.files"
local program = require "spec.support.program"

teardown(files.remove_scripts)

describe("a message", function()
  local own = debug.getinfo(errors.raise, "S").source:match "^@(.*)errors%.lua$"

  it("names no line of weft that only checked what a script gave", function()
    assert.equal("rank 1: wanted a name", errors.message("rank 1: " .. own .. "setup.lua:31: wanted a name"))
    assert.equal("wanted a name", errors.message("..." .. (own .. "repl/read.lua:19: "):sub(-24) .. "wanted a name"))
    for _, kept in ipairs { "/home/me/weft/mine.lua:3: no", "weft/mine.lua:3: no", own .. "setup.lua:31: attempt to index a nil value" } do
      assert.equal(kept, errors.message(kept))
    end
  end)

  it("is said even of what cannot say what it is", function()
    local mute = setmetatable({}, { __tostring = function() error() end })
    assert.equal("an error that cannot say what it is: its __tostring fails", errors.message(mute))
    local code, out = program.run { "repl", "-i", "-tp", "2", input = "error(setmetatable({}, { __tostring = function() error() end }))\nprint(3)\n" }
    assert.equal(0, code)
    assert.matches("> 3\n", out)
  end)

  it("is so from a model script, from weft lua and at the prompt", function()
    local path = files.script 'local weft = require "weft"\nreturn weft.model(5)'
    for _, words in ipairs { { "run", path, "--model", program.models .. "demo_llama", "--prompt-ids", "5" }, { "lua", path }, { "repl", path },
      { "repl", input = "error('weft.model needs a name, got number', 2)" } } do
      local code, _, err = program.run(words)
      assert.same({ 1, "weft: weft.model needs a name, got number\n" }, { code, err })
    end
    local _, _, err = program.run { "repl", "-i", input = "error('mine', 2)\n" }
    assert.matches("\nmine\n$", err)
  end)
end)
