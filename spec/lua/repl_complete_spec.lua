--- spec/lua/repl_complete_spec.lua - completion and help.
local core = require "weft.core"
local complete = require "weft.repl.complete"
local help = require "weft.repl.help"
local docs = require "weft.repl.docs_core"

local env = setmetatable({ weft = require "weft", t = core.tensor({ 2 }, "float32"), obj = setmetatable({ name = 1 }, { __index = { run = print } }) },
  { __index = _G })
local commands = { help = {}, history = {}, mem = {} }

local function names(text) return (complete.candidates(text, env, commands)) end

describe("completion", function()
  it("walks a.b and a:b through tables and the class tables behind them", function()
    assert.same({ "layer_parallel", "layout" }, names "weft.la")
    assert.same({ "name" }, names "obj.na")
    assert.same({ "run" }, names "print(obj:")
    assert.same({ "narrow" }, names "x = t:nar")
    assert.same({ "rep", "reverse" }, names "string.re")
  end)

  it("offers commands behind a comma, words of Lua and globals elsewhere", function()
    assert.same({ "help", "history" }, names ",h")
    assert.same({ "while" }, names "whi")
    assert.same({ "setfenv", "setmetatable" }, names "y = set")
  end)

  it("inserts what all choices share, and lists them when that is nothing", function()
    local insert, shown = complete.line("weft.la", env, commands)
    assert.same({ "y", "" }, { insert, shown })
    insert, shown = complete.line("weft.lay", env, commands)
    assert.same({ "", "layer_parallel  layout" }, { insert, shown })
  end)

  it("hides names that begin with _ until they are asked for", function()
    assert.is_nil((table.concat(names "weft.core.", " ")):find("_methods", 1, true))
    assert.same({ "_methods" }, names "weft.core._me")
  end)

  it("never runs a metamethod", function()
    local ran = false
    env.trap = setmetatable({}, { __index = function() ran = true end })
    names "trap.a.b"
    names "trap.x"
    assert.is_false(ran)
  end)
end)

describe("help", function()
  it("shows the comment above a Lua function and where it is", function()
    local text = help.text("weft.nn.rms_norm", env)
    assert.matches("RMSNorm over the hidden size", text)
    assert.matches("nn%.lua:%d+", text)
    assert.matches("function nn.rms_norm%(cfg, weights, size%)", (help.doc("weft.nn.rms_norm", env)))
  end)

  it("shows what the C source says of its functions, methods and types", function()
    assert.matches("core%.tensor%({2, 3}", (help.text("weft.core.tensor", env)))
    assert.matches("t:narrow%(dim, start, n%)", (help.text("weft.tensor:narrow", env)))
    assert.matches("methods:.*:all_reduce", (help.text("weft.group", env)))
    assert.matches("rms_norm{x, gain", (help.text("weft.ops.rms_norm", env)))
  end)

  it("lists a module with a line for each member", function()
    local text = help.text("weft.nn", env)
    assert.matches("the layers a model script composes", text)
    assert.matches("weft.nn.row_linear%s+Input columns cut over the axis", text)
  end)

  it("has a text for every function of weft, its model and its engine in Lua: write it above the function", function()
    local session = require "weft.session"
    require "weft.live"
    local said = { weft = env.weft, nn = require "weft.nn", models = require "weft.models", engine = require "weft.engine", config = require "weft.config", model = session }
    local missing, at = {}, require("weft.repl.session").environment({ policy = core.policy {} }, nil)
    for module, functions in pairs(said) do
      for name, value in pairs(functions) do
        if type(value) == "function" and name:sub(1, 1) ~= "_" then
          local text = help.text(module == "weft" and "weft." .. name or "it." .. name, { weft = env.weft, it = functions })
          if text:find("no comment", 1, true) then missing[#missing + 1] = module .. "." .. name end
        end
      end
    end
    for _, name in ipairs { "generate", "bench", "quit" } do
      if help.text(name, at):find("no comment", 1, true) then missing[#missing + 1] = name end
    end
    assert.same({}, missing)
  end)

  it("survives names that the registry of Lua keeps for other things", function()
    for _, name in ipairs { "weft.rank", "_LOADED", "weft.no_such_type" } do assert.is_nil(core._methods(name)) end
    assert.is_string((help.text("weft.rank", env)))
  end)

  it("refuses an unknown name in one line", function()
    local text, message = help.text("weft.nothing", env)
    assert.is_nil(text)
    assert.matches("nothing is called 'weft.nothing'", message)
  end)

  it("has a text for every function and method in C: write it into the comment at the top of its file", function()
    local missing = {}
    local function check(name)
      if not docs.text(name) then missing[#missing + 1] = name end
    end
    for key, value in pairs(core) do
      if type(value) == "function" and key:sub(1, 1) ~= "_" then check("core." .. key) end
      for name, fn in pairs(type(value) == "table" and value or {}) do
        if type(fn) == "function" then check("core." .. key .. "." .. name) end
      end
    end
    for _, class in ipairs(core._types()) do
      check(class)
      for method in pairs(core._methods(class)) do check(class .. ":" .. method) end
    end
    table.sort(missing)
    assert.same({}, missing)
  end)
end)
