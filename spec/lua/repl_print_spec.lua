--- spec/lua/repl_print_spec.lua - results as text of bounded length.
local core = require "weft.core"
local show = require "weft.repl.print"

describe("printing", function()
  it("sorts keys, lists first, and quotes what is no name", function()
    assert.equal('{ 1, 2, a = "x", ["b c"] = true, ["end"] = 1, z = {} }', show.value { 1, 2, z = {}, a = "x", ["b c"] = true, ["end"] = 1 })
  end)

  it("shows every result, also nil", function()
    assert.equal("1\nnil\n\"a\\nb\"", show.results { n = 3, 1, nil, "a\nb" })
    assert.equal("", show.results { n = 0 })
  end)

  it("marks cycles, and no repetition that is none", function()
    local t, twice = {}, { 1 }
    t.me = t
    assert.equal("{ me = <cycle> }", show.value(t))
    assert.equal("{ { 1 }, { 1 } }", show.value { twice, twice })
  end)

  it("limits depth, items and strings", function()
    assert.matches("{%.%.%.}", show.value { { { { { 1 } } } } })
    local long = {}
    for i = 1, 100 do long[i] = i end
    assert.matches("%.%.%. 70 more", show.value(long))
    assert.matches("%.%. %(1000 bytes%)$", show.value(("x"):rep(1000)))
    assert.is_true(#show.value(("x"):rep(1000)) < 230)
  end)

  it("breaks what is wide into lines", function()
    assert.matches("^{\n  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa = \".-\",\n", show.value { aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa = ("x"):rep(50), b = ("y"):rep(50) })
  end)

  it("tells what a tensor is and never its values", function()
    local t = core.tensor({ 8, 768 }, "bfloat16")
    assert.equal("bf16[8, 768] cpu:0", show.value(t))
    assert.equal("f32[] cpu:0", show.value(core.tensor({}, "float32")))
    t:close()
    assert.matches("gone", show.value(t))
  end)

  it("survives a __tostring that fails", function()
    assert.matches("whose __tostring failed: .*no", show.value(setmetatable({}, { __tostring = function() error "no" end })))
  end)

  it("says where a Lua function is defined", function()
    assert.matches("^function %(.*print%.lua:%d+%)$", show.value(show.value))
  end)
end)
