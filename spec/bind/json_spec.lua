--- spec/bind/json_spec.lua - JSON in and out of scripts.
local json = require "weft.core".json

describe("weft.core.json", function()
  it("reads every kind of value", function()
    local v = assert(json.decode '{"a": [1, 2.5, -3e2], "b": {"c": null}, "d": [true, false], "e": "x\\u00e9\\n\\ud83d\\ude00", "f": 9007199254740993000}')
    assert.same({ 1, 2.5, -300 }, v.a)
    assert.equal(json.null, v.b.c)
    assert.same({ true, false }, v.d)
    assert.equal("x\195\169\n\240\159\152\128", v.e)
    assert.equal(9007199254740993000, v.f)
    assert.equal(7, json.decode "7")
    assert.equal("a\0b", json.decode '"a\\u0000b"')
  end)

  it("says where text is not JSON", function()
    local value, message, code = json.decode '{"a": 1,}'
    assert.is_nil(value)
    assert.equal("format", code)
    assert.is_truthy(message:find("line 1, column", 1, true), message)
    assert.is_nil((json.decode ""))
    assert.is_nil((json.decode(("["):rep(100000))))
    local deep, why = json.decode(("["):rep(300) .. ("]"):rep(300))
    assert.same({ nil, "more than 256 levels" }, { deep, why })
  end)

  it("writes sorted keys, whole numbers and marked arrays", function()
    assert.equal('{"a":{},"b":[],"c":[1,2.5,-3],"d":null,"e":true}',
      json.encode { e = true, a = {}, b = json.array {}, c = { 1, 2.5, -3 }, d = json.null })
    assert.equal("[1000000,0.1,1e+300,123456789012345680,0]", json.encode { 1e6, 0.1, 1e300, 123456789012345678, -0.0 })
    assert.equal(0.1 + 0.2, json.decode(json.encode(0.1 + 0.2)))
    local keys = {}
    for i = 1, 50 do keys["k" .. i % 50 .. "\195\169"] = i end
    local text = json.encode(keys)
    assert.equal(text, json.encode(json.decode(text)))
  end)

  it("writes back what it read", function()
    local text = '{"empty":[],"list":[[],{},"\\u0001\\\\\\"/"],"text":"\227\129\130"}'
    assert.equal(text, json.encode(json.decode(text)))
  end)

  it("replaces bytes that are not UTF-8", function()
    assert.equal('"a\239\191\189b\239\191\189"', json.encode "a\255b\226\130")
    assert.equal('"\239\191\189\239\191\189\239\191\189"', json.encode "\237\160\128")
  end)

  it("refuses what JSON cannot say", function()
    local loop = {}
    loop[1] = loop
    for wanted, value in pairs {
      ["JSON has no NaN"] = { 0 / 0 }, ["JSON has no infinity"] = { math.huge }, ["JSON has no function"] = { print },
      ["holds itself"] = loop, ["neither array nor object"] = { [true] = 1 }, ["an array with holes"] = { 1, 2, x = 3 },
    } do
      assert.error_matches(function() json.encode(value) end, wanted, 1, true)
    end
  end)
end)
