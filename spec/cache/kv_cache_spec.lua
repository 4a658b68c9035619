-- spec/cache/kv_cache_spec.lua - each rank writes what it owns, at the slot of the worked example.
local core = require "weft.core"

-- What lies in the pages of context rank `rank` after 12 positions (values 1 to 12), by slot; 0: never written.
local function written(size, rank, interleave, last)
  local k_cache, v_cache = core.tensor { 8, 1, 4, 1 }, core.tensor { 8, 1, 4, 1 }
  local values, positions = {}, {}
  for p = 0, last do
    values[p + 1], positions[p + 1] = p + 1, p
  end
  local x = core.tensor({ last + 1, 1, 1 }, "float32", values)
  core.ops.kv_write {
    k = x, v = x, k_cache = k_cache, v_cache = v_cache, positions = positions, query_start_loc = { 0, last + 1 },
    block_table = { 7, 3 }, context_size = size, context_rank = rank, interleave = interleave,
  }
  assert.same(k_cache:totable(), v_cache:totable())
  local by_position = {}
  for p = 0, last do by_position[p + 1] = "-" end
  for slot, value in ipairs(k_cache:totable()) do
    if value ~= 0 then by_position[value] = slot - 1 end
  end
  return table.concat(by_position, " ")
end

describe("keys and values of a step", function()
  it("go to the slots of the worked example: page 4, 2 ranks, blocks 7 and 3", function()
    assert.equal("28 - 29 - 30 - 31 - 12 - 13 -", written(2, 0, 1, 11))
    assert.equal("- 28 - 29 - 30 - 31 - 12 - 13", written(2, 1, 1, 11))
    assert.equal("28 29 - - 30 31 - - 12 13 - -", written(2, 0, 2, 11))
    assert.equal("- - 28 29 - - 30 31 - - 12 13", written(2, 1, 2, 11))
  end)

  it("go block by block where the strip is a page: 4 ranks", function()
    assert.equal("28 29 30 31 - - - - - - - - - - - - 12 13 14 15", written(4, 0, 4, 19))
    assert.equal("- - - - 28 29 30 31 - - - - - - - - - - - -", written(4, 1, 4, 19))
    assert.equal("- - - - - - - - 28 29 30 31 - - - - - - - -", written(4, 2, 4, 19))
    assert.equal("- - - - - - - - - - - - 28 29 30 31 - - - -", written(4, 3, 4, 19))
  end)
end)

describe("pages", function()
  it("need a block that is a multiple of context size times interleave", function()
    local tensor = core.axis(1, 0, "tensor")
    local layer = core.hetero_attention {
      num_heads = 1, head_size = 4, parallel_plan = core.plan { input = tensor, output = tensor, interleave = 3 },
    }
    assert.error_matches(function() layer:bytes_per_block(16) end,
      "a block of 16 tokens must be a multiple of context size 1 times interleave size 3 = 3", 1, true)
    assert.error_matches(function() core.kv_block_tokens(16, { layer }) end, "block size 16 must be a multiple of interleave size 3", 1, true)
    assert.equal(15 * 8 * 4, layer:bytes_per_block(15))
  end)
end)
