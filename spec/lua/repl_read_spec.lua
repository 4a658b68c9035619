--- spec/lua/repl_read_spec.lua - reading at the prompt: what is complete, what wants more, what is wrong.
local read = require "weft.repl.read"

local function value(text) return read.compile(text, setmetatable({}, { __index = _G }))() end

describe("reading a line", function()
  it("takes an expression first, so that its value is the result", function()
    assert.equal(3, value "1 + 2")
    assert.equal("b", select(2, value "'a', 'b'"))
    assert.is_nil(value "x = 5")
  end)

  it("asks for more where the text ends too early, as an expression or as a statement", function()
    for _, text in ipairs { "1 +", "f(", "{ 1,", "for i = 1, 3 do", "if x then", "function f()", "x = [[", "--[[ a", "repeat" } do
      assert.equal("more", (read.compile(text, {})), text)
    end
  end)

  it("says what is wrong where more lines would not help", function()
    for _, text in ipairs { "x = = 2", "'abc", "for in do end", ")", "end", "1 2" } do
      local chunk, message = read.compile(text, {})
      assert.is_nil(chunk, text)
      assert.matches("^line 1: ", message)
    end
  end)

  it("keeps what a line assigns in the session's table and not in Lua's globals", function()
    local env = setmetatable({}, { __index = _G })
    read.compile("repl_spec_name = 7", env)()
    assert.equal(7, env.repl_spec_name)
    assert.is_nil(rawget(_G, "repl_spec_name"))
  end)

  it("knows commands, ranks and questions by their first or last sign", function()
    assert.same({ kind = "command", name = "help", rest = "weft.nn" }, read.parse ",help weft.nn ")
    assert.same({ kind = "lua", ranks = "2", text = "x + 1" }, read.parse "@2 x + 1")
    assert.same({ kind = "lua", ranks = "*", text = "x" }, read.parse "@* x")
    assert.same({ kind = "command", name = "help", rest = "weft.nn.rms_norm" }, read.parse "weft.nn.rms_norm?")
    assert.same({ kind = "lua", text = "x = 1" }, read.parse "x = 1")
  end)
end)

describe("reading a whole input", function()
  it("makes one chunk of consecutive lines, and commands of those that begin with , or @", function()
    assert.same({
      { kind = "lua", text = "local x = 1\nprint(x)" },
      { kind = "command", name = "mem", rest = "" },
      { kind = "lua", ranks = "1", text = "\n\n\n2" },
      { kind = "lua", text = "\n\n\n\ny = 3" },
    }, read.pieces("local x = 1\nprint(x)\n,mem\n@1 2\ny = 3\n", {}))
  end)

  it("leaves a comma inside a longer piece of Lua alone", function()
    local pieces = read.pieces("t = { 1\n, 2 }\ns = [[\n@1 x\n]]", {})
    assert.equal(1, #pieces)
  end)

  it("finds nothing in nothing", function()
    assert.same({}, read.pieces("\n  \n", {}))
  end)
end)
