--- spec/device/tensor_spec.lua - shapes, views and accounted memory.
local core = require "weft.core"

describe("weft.tensor", function()
  it("holds values in row-major order and says its shape and dtype", function()
    local t = core.tensor({ 2, 3 }, "float32", { 1, 2, 3, 4, 5, 6 })
    assert.same({ 2, 3 }, t.shape)
    assert.equal("float32[2, 3]", tostring(t))
    assert.matches("^f32%[2, 3%] ", t:show(2)) -- as the prompt names dtypes
    assert.equal(6, t:get(1, 2))
  end)

  it("shares memory between a tensor and its views", function()
    local t = core.tensor({ 4, 3 }, "float32")
    t:narrow(0, 1, 2):fill(7)
    t:transpose(0, 1):select(0, 2):set(5, 3)
    assert.same({ 0, 0, 0, 7, 7, 7, 7, 7, 7, 0, 0, 5 }, t:totable())
    assert.same({ 2, 6 }, t:view({ 2, -1 }).shape)
  end)

  it("refuses indices, ranges and shapes that do not fit", function()
    local t = core.tensor { 2, 3 }
    assert.error_matches(function() t:get(2, 0) end, "index 2 of dimension 0, which has 2", 1, true)
    assert.error_matches(function() t:narrow(1, 2, 2) end, "rows 2 to 4 of dimension 1, which has 3", 1, true)
    assert.error_matches(function() t:view { 4 } end, "a view of 4 elements over 6", 1, true)
    assert.error_matches(function() core.tensor({ 2 ^ 40, 2 ^ 40 }) end, "more bytes", 1, true)
    assert.error_matches(function() t.x = 1 end, "immutable", 1, true)
    assert.error_matches(function() core.tensor({ 1 }, "int7") end, "unknown dtype 'int7'", 1, true)
  end)

  it("converts between dtypes, rounding to nearest even", function()
    local t = core.tensor({ 4 }, "float32", { 1, 1.00390625, 3.0e38, -0.1 })
    assert.same({ 1, 1, t:clone("bfloat16"):get(2), -0.10009765625 }, t:clone("bfloat16"):totable())
    assert.equal(math.huge, t:clone("float16"):get(2))
    assert.equal(448, t:clone("fp8"):get(2))
  end)

  it("gives back every byte", function()
    collectgarbage() collectgarbage()
    local before = core.memory().live_bytes
    local t = core.tensor { 1000 }
    assert.equal(before + 4000, core.memory().live_bytes)
    local view = t:narrow(0, 0, 10)
    t:close()
    t:close()
    assert.equal(before + 4000, core.memory().live_bytes)
    assert.error_matches(function() t:fill(1) end, "closed", 1, true)
    view:close()
    assert.equal(before, core.memory().live_bytes)
  end)
end)
