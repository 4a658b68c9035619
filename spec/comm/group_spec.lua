--- spec/comm/group_spec.lua - how groups are made, found, split and closed, and what they refuse.
local core = require "weft.core"

local function failure(...)
  local ok, err = pcall(core.spawn, ...)
  assert.is_false(ok)
  return err
end

-- Eight ranks, attention at tensor size 2, the cache split over 4: the rows of the rank grid.
local rows = {
  { type = "tensor", world_size = 8, rows = { { 0, 1, 2, 3, 4, 5, 6, 7 } } },
  { type = "context", world_size = 4, rows = { { 0, 1, 2, 3 }, { 4, 5, 6, 7 } } },
  { type = "attention_tensor", world_size = 2, rows = { { 0, 4 }, { 1, 5 }, { 2, 6 }, { 3, 7 } } },
  { type = "expert", world_size = 1, rows = { { 0 }, { 1 }, { 2 }, { 3 }, { 4 }, { 5 }, { 6 }, { 7 } } },
}

describe("weft.group", function()
  it("is found by type and size on each rank, which has its own row of every kind", function()
    local seen = core.spawn(8, function(rows)
      core.groups.create_all(rows)
      local me = core.rank().rank
      local context, attention = core.groups.get("context", 4), core.groups.get "attention_tensor"
      assert(context.rank == me % 4 and attention.rank == math.floor(me / 4))
      assert(core.groups.get("expert", 1).size == 1)
      local t = core.tensor({ 1 }, "int32", { 2 ^ me })
      local got = { context:all_reduce(t):get(0), attention:all_reduce(t):get(0), core.groups.get("tensor", 8):all_reduce(t):get(0) }
      local name = tostring(context)
      core.groups.close()
      return { got, name, pcall(core.groups.get, "context", 4) }
    end, rows)
    for r = 0, 7 do
      local context, attention = r < 4 and 15 or 240, 2 ^ (r % 4) + 2 ^ (r % 4 + 4)
      assert.same({ context, attention, 255 }, seen[r + 1][1])
      assert.equal(r < 4 and "weft.group context {0,1,2,3}" or "weft.group context {4,5,6,7}", seen[r + 1][2])
      assert.is_false(seen[r + 1][3])
    end
  end)

  it("that is missing is an error that lists those there are", function()
    local err = failure(2, function()
      core.groups.create_all { { type = "tensor", world_size = 2, rows = { { 0, 1 } } } }
      core.groups.get("context", 2)
    end)
    assert.matches("rank [01] has no context group of 2 ranks %(it has: tensor 2%)", err.message)
    assert.error_matches(function() core.groups.get("tensor", 4) end, "rank 0 has no tensor group of 4 ranks (it has: none)", 1, true)
    assert.error_matches(function() core.groups.get "tonsor" end, "unknown group type 'tonsor' (known: tensor, ", 1, true)
  end)

  it("of one rank is always there", function()
    local group = core.groups.get("context", 1)
    assert.same({ 1, 0, { 0 }, "context", "context {0}" }, { group.size, group.rank, group.ranks, group.type, group.name })
    assert.equal(1, core.groups.get("tensor").size)
  end)

  it("keeps the order of its list, also when that is not ascending", function()
    local places = core.spawn(4, function()
      local group = core.groups.create("context", { 2, 0, 3, 1 })
      local all = group:all_gather(core.tensor({ 1 }, "int32", { core.rank().rank }), 0)
      return { group.rank, all:totable() }
    end)
    for r, place in ipairs { 1, 3, 0, 2 } do assert.same({ place, { 2, 0, 3, 1 } }, places[r]) end
  end)

  it("refuses lists that cannot be", function()
    local create = core.groups.create
    assert.error_matches(function() create("tensor", { 0, 0 }) end, "needs 1 to 1 ranks, got 2", 1, true)
    assert.error_matches(function() create("tensor", {}) end, "needs 1 to 1 ranks, got 0", 1, true)
    assert.error_matches(function() create("tensor", { 1 }) end, "lists rank 1, the world has ranks 0 to 0", 1, true)
    assert.error_matches(function() create("tensor", { "x" }) end, "entry 1 of the list of ranks is a string", 1, true)
    assert.matches("lists rank 1 twice", failure(2, function() core.groups.create("tensor", { 1, 1 }) end).message, 1, true)
    assert.matches("rank 1 is not in the tensor group that it creates",
      failure(2, function() core.groups.create("tensor", { 0 }) end).message, 1, true)
    assert.matches("tensor {0,1} is already the tensor group of 2", failure(2, function()
      for _ = 1, 2 do core.groups.add(core.groups.create("tensor", { 0, 1 })) end
    end).message, 1, true)
    assert.error_matches(function() core.groups.everyone().size = 2 end, "immutable", 1, true)
  end)

  it("splits by color, ordered by key and then by rank", function()
    local parts = core.spawn(6, function()
      local me = core.rank().rank
      local part = core.groups.everyone():split(me == 5 and -1 or me % 2, me == 0 and 9 or 1)
      if not part then return "none" end
      part:barrier()
      return part.ranks
    end)
    assert.same({ { 2, 4, 0 }, { 1, 3 }, { 2, 4, 0 }, { 1, 3 }, { 2, 4, 0 }, "none" }, parts)
  end)

  it("may be made again from the same ranks, and each talks for itself", function()
    local sums = core.spawn(2, function()
      local a, b = core.groups.create("tensor", { 0, 1 }), core.groups.create("tensor", { 0, 1 })
      local t = core.tensor({ 1 }, "int32", { 1 })
      local total = 0
      for _ = 1, 50 do total = total + a:all_reduce(t):get(0) + b:all_reduce(t):get(0) end
      a:close()
      return total + b:all_reduce(t):get(0)
    end)
    assert.same({ 202, 202 }, sums)
  end)

  it("says closed once it was closed, which may be done again", function()
    local err = failure(2, function()
      local group = core.groups.create("tensor", { 0, 1 })
      group:close()
      group:close()
      group:barrier()
    end)
    assert.equal("closed", err.code)
    assert.matches("group tensor {0,1} is closed", err.message, 1, true)
    local one = core.groups.create("tensor", { 0 })
    one:close()
    for _, call in ipairs { "all_reduce", "broadcast", "all_to_all" } do
      assert.error_matches(function() one[call](one, core.tensor { 1 }) end, "group tensor {0} is closed", 1, true)
    end
  end)

  it("fails on all ranks when their calls differ, naming both and what they called", function()
    local cases = {
      { function(g) g:all_reduce(core.tensor { 64 }) end, function(g) g:all_reduce(core.tensor { 65 }) end,
        "rank 0 calls all_reduce sum of 64 float32, rank 1 calls all_reduce sum of 65 float32" },
      { function(g) g:all_reduce(core.tensor { 64 }, "max") end, function(g) g:all_reduce(core.tensor({ 64 }, "bfloat16"), "max") end,
        "rank 0 calls all_reduce max of 64 float32, rank 1 calls all_reduce max of 64 bfloat16" },
      { function(g) g:barrier() end, function(g) g:broadcast(core.tensor { 3 }, 1) end,
        "rank 0 calls barrier, rank 1 calls broadcast of 3 float32 from member 1" },
      { function(g) g:all_gather(core.tensor { 4, 6 }, 0) end, function(g) g:all_gather(core.tensor { 4, 6 }, 1) end,
        "rank 0 calls all_gather of 24 float32, rank 1 calls all_gather of 24 float32 in 4 rows" },
      { function(g) g:all_reduce(core.tensor { 5 }) end, function(g) g:all_reduce(core.tensor { 50000 }) end,
        "rank 0 calls all_reduce sum of 5 float32, rank 1 calls all_reduce sum of 50000 float32" },
    }
    for _, case in ipairs(cases) do
      local left, right = case[1], case[2]
      local seen = core.spawn(3, function()
        local group = core.groups.everyone()
        group:barrier()
        local ok, err = pcall(core.rank().rank == 0 and left or right, group)
        local later, closed = pcall(group.barrier, group)
        return { ok, err.message, err.code, later, closed.code }
      end)
      for r = 1, 3 do
        assert.same({ false, "collective 2 of world {0,1,2} does not match: " .. case[3], "invalid", false, "closed" }, seen[r])
      end
    end
  end)

  it("refuses tensors that it cannot take", function()
    local group = core.groups.everyone()
    assert.error_matches(function() group:all_gather(core.tensor { 2 }, 1) end, "dimension 1 of a tensor with 1", 1, true)
    assert.error_matches(function() group:all_reduce(core.tensor { 2 }, "min") end, "invalid option 'min'", 1, true)
    assert.error_matches(function() group:broadcast(core.tensor { 2 }, 1) end, "root must be in [0, 1), got 1", 1, true)
    assert.matches("dimension 0 holds 3, which does not divide over the 2 ranks", failure(2, function()
      core.groups.everyone():reduce_scatter(core.tensor { 3 }, 0)
    end).message, 1, true)
    assert.matches("all_reduce on world {0,1} takes float32, bfloat16, float16 or int32, got uint8", failure(2, function()
      core.groups.everyone():all_reduce(core.tensor({ 3 }, "uint8"))
    end).message, 1, true)
  end)

  it("says what carries it; without peer memory a limit for it changes nothing", function()
    assert.equal("none", core.groups.everyone().transport)
    assert.error_matches(function() core.groups.everyone():set_peer_limit(-1) end, "bytes from 0 to 2^30", 1, true)
    local seen = core.spawn(2, function()
      local group = core.groups.everyone()
      group:set_peer_limit(4096)
      return { group.transport, group:all_reduce(core.tensor({ 1 }, "float32", { core.rank().rank + 1 })):get(0) }
    end)
    assert.same({ { "threads", 3 }, { "threads", 3 } }, { seen[1], seen[2] })
  end)
end)
