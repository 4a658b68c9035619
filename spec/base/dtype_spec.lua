--- spec/base/dtype_spec.lua - runs of elements convert as single elements do.
local core = require "weft.core"
local files = require "spec.support.files"

--- A source of every bit pattern of a dtype, from a file.
local function all_patterns(dtype, bytes, count)
  local header = ('{"x":{"dtype":"%s","shape":[%d],"data_offsets":[0,%d]}}'):format(dtype, count, count * bytes)
  local text = { string.char(#header, 0, 0, 0, 0, 0, 0, 0), header }
  for i = 0, count - 1 do
    text[#text + 1] = bytes == 1 and string.char(i) or string.char(i % 256, math.floor(i / 256))
  end
  local path = files.temporary(table.concat(text), ".safetensors")
  local source = assert(core.checkpoint.open(path)):source "x"
  os.remove(path)
  return source
end

local function same(a, b) return a == b or (a ~= a and b ~= b) end

describe("weft_convert", function()
  for _, case in ipairs { { "F16", 2, 65536 }, { "BF16", 2, 65536 }, { "F8_E4M3", 1, 256 } } do
    it("widens every " .. case[1] .. " exactly, subnormals, infinities and NaN included", function()
      local source = all_patterns(case[1], case[2], case[3])
      local single, run, wrong = source:tensor():totable(), source:tensor("float32"):totable(), 0
      for i = 1, case[3] do
        if not same(single[i], run[i]) then wrong = wrong + 1 end
      end
      assert.equal(0, wrong)
    end)
  end

  it("narrows to the nearest, ties to even, as one element does", function()
    local values = { 0, -0.0, 1, 65504, 65519.99, 65520, 1e30, -1e-8, 2 ^ -24, 2 ^ -25, 1.5 * 2 ^ -25, 2 ^ -14, 2 ^ -14 - 2 ^ -26, math.huge, 0 / 0 }
    for i = 1, 4000 do values[#values + 1] = (i * 7919 % 10007 - 5000) * 2 ^ (i % 40 - 30) end
    local t = core.tensor({ #values }, "float32", values)
    for _, dtype in ipairs { "float16", "bfloat16" } do
      local run, one = t:clone(dtype):totable(), core.tensor({ #values }, dtype, values):totable()
      for i = 1, #values do assert.is_true(same(run[i], one[i]), dtype .. " of " .. values[i]) end
    end
  end)

  it("goes between narrow types through float32", function()
    local source = all_patterns("F8_E4M3", 1, 256)
    local wide, half = source:tensor("float32"):totable(), source:tensor("float16"):totable()
    for i = 1, 256 do assert.is_true(same(wide[i], half[i])) end
  end)
end)
