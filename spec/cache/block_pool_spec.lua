-- spec/cache/block_pool_spec.lua - blocks are counted, shared by content and never lost.
local core = require "weft.core"

local function range(first, last, value)
  local t = {}
  for i = first, last do t[#t + 1] = value or i end
  return t
end

local function join(...)
  local t = {}
  for _, list in ipairs { ... } do
    for _, v in ipairs(list) do t[#t + 1] = v end
  end
  return t
end

describe("a block pool", function()
  it("gives each block once and says nil, taking none, when there are not enough", function()
    local pool = core.block_pool { num_blocks = 5, block_tokens = 4 }
    local a = pool:allocate(3)
    assert.equal(3, #a)
    assert.is_nil(pool:allocate(3))
    assert.equal(2, pool.free_blocks)
    local b = pool:allocate(2)
    local seen = {}
    for _, id in ipairs(join(a, b)) do
      assert.is_nil(seen[id])
      assert.is_true(id >= 0 and id < 5)
      seen[id] = true
    end
    assert.is_nil(pool:allocate(1))
    assert.same({}, pool:allocate(0))
    pool:free(a)
    assert.equal(3, pool.free_blocks)
    assert.equal(2, pool:stats().refusals)
  end)

  it("grows a request's list in place and leaves it alone when refused", function()
    local pool = core.block_pool { num_blocks = 3, block_tokens = 4 }
    local list = pool:allocate(2)
    local before = join(list)
    assert.equal(list, pool:allocate(1, list))
    assert.equal(3, #list)
    assert.is_nil(pool:allocate(1, list))
    assert.equal(3, #list)
    assert.same(before, { list[1], list[2] })
  end)

  it("frees a shared block with its last reference only", function()
    local pool = core.block_pool { num_blocks = 2, block_tokens = 4 }
    local a = pool:allocate(1)
    pool:retain(a)
    pool:free(a)
    assert.equal(1, pool.free_blocks)
    pool:free(a)
    assert.equal(2, pool.free_blocks)
  end)

  it("refuses to free what is free, all or none", function()
    local pool = core.block_pool { num_blocks = 4, block_tokens = 4 }
    local a = pool:allocate(2)
    assert.error_matches(function() pool:free { a[1], a[2], a[1] } end, "cannot free block " .. a[1] .. ": it is free", 1, true)
    assert.equal(2, pool.free_blocks)
    assert.error_matches(function() pool:free { 9 } end, "the pool has blocks 0 to 3", 1, true)
    assert.error_matches(function() pool:retain { 3 } end, "cannot retain block 3: it is free", 1, true)
    assert.error_matches(function() pool:free { "x" } end, "blocks must be an integer, got string", 1, true)
    pool:free(a)
    assert.equal(4, pool.free_blocks)
  end)

  it("finds the blocks of a known beginning, and leaves a token to compute", function()
    local pool = core.block_pool { num_blocks = 8, block_tokens = 4 }
    local ids = range(1, 12)
    local blocks = pool:allocate(3)
    pool:commit(blocks, ids)
    local found, tokens = pool:match(join(ids, { 99 }))
    assert.same(blocks, found)
    assert.equal(12, tokens)
    found, tokens = pool:match(ids)
    assert.same({ blocks[1], blocks[2] }, found)
    assert.equal(8, tokens)
    assert.same({}, (pool:match { 2, 3, 4, 5, 6 }))
    assert.same({}, (pool:match(range(5, 12)))) -- the second block does not stand first
    assert.same({}, (pool:match { 1, 2, 3 }))
  end)

  it("keeps committed blocks after their request and gives them to the next", function()
    local pool = core.block_pool { num_blocks = 4, block_tokens = 2 }
    local blocks = pool:allocate(2)
    pool:commit(blocks, { 1, 2, 3, 4 })
    pool:free(blocks)
    assert.equal(4, pool.free_blocks)
    local found = pool:match { 1, 2, 3, 4, 5 }
    assert.same(blocks, found)
    assert.equal(2, pool.free_blocks)
    local other = pool:allocate(2)
    for _, id in ipairs(other) do assert.is_true(id ~= blocks[1] and id ~= blocks[2]) end
  end)

  it("gives up the least recently used first, and a request's tail before its head", function()
    local pool = core.block_pool { num_blocks = 4, block_tokens = 2 }
    local a, b = pool:allocate(2), pool:allocate(2)
    pool:commit(a, { 1, 2, 3, 4 })
    pool:commit(b, { 5, 6, 7, 8 })
    pool:free(a)
    pool:free(b)
    assert.same({ a[2] }, pool:allocate(1))
    assert.same({ a[1] }, (pool:match { 1, 2, 3, 4, 0 }))
    assert.same(b, (pool:match { 5, 6, 7, 8, 0 }))
    assert.equal(1, pool:stats().evictions)
  end)

  it("never shares blocks of prompts that differ before or inside them", function()
    -- Virtual blocks of 32: 150 common tokens are 4 whole blocks and a part.
    local pool = core.block_pool { num_blocks = 40, block_tokens = 32 }
    local b, c = join(range(1, 150, 7), range(1, 400, 8)), join(range(1, 150, 7), range(1, 400, 9))
    local blocks = pool:allocate(18)
    pool:commit(blocks, b)
    local found, tokens = pool:match(c)
    assert.equal(4, #found)
    assert.equal(128, tokens)
    assert.equal(0, select(2, pool:match(join({ 1 }, b))))
  end)

  it("does not trust a block whose beginning was given up and computed anew", function()
    local pool = core.block_pool { num_blocks = 3, block_tokens = 2 }
    local a = pool:allocate(2)
    pool:commit(a, { 1, 2, 3, 4 })
    pool:free { a[1] } -- the head goes first here, against the usual order
    local others = pool:allocate(2) -- one never used, and a[1]
    pool:commit(others, { 9, 9, 9, 9 })
    assert.equal(0, select(2, pool:match { 1, 2, 3, 4, 5 }))
    assert.equal(2, #(pool:match { 9, 9, 9, 9, 3, 4 }))
  end)

  it("commits block by block as a request grows, and twice without harm", function()
    local pool = core.block_pool { num_blocks = 8, block_tokens = 2 }
    local blocks, ids = pool:allocate(1), { 1, 2, 3 }
    pool:commit(blocks, { 1, 2 })
    pool:allocate(1, blocks)
    pool:commit(blocks, ids)
    ids[4] = 4
    pool:commit(blocks, ids)
    pool:commit(blocks, ids)
    assert.equal(2, pool:stats().cached)
    assert.same(blocks, (pool:match { 1, 2, 3, 4, 5 }))
    -- A second request that computed the same goes on behind the first one's blocks.
    local twin = pool:allocate(3)
    pool:commit(twin, { 1, 2, 3, 4, 5, 6 })
    assert.equal(3, pool:stats().cached)
    assert.same({ blocks[1], blocks[2], twin[3] }, (pool:match { 1, 2, 3, 4, 5, 6, 7 }))
    assert.error_matches(function() pool:commit({ blocks[1] }, { 1, 2, 3, 4, 5, 6 }) end, "fill 3 blocks, and 1 were given", 1, true)
  end)

  it("commits only what is in the cache already", function()
    local pool = core.block_pool { num_blocks = 4, block_tokens = 2 }
    local blocks = pool:allocate(2)
    pool:commit(blocks, { 1, 2, 3, 4 }, 3)
    assert.equal(1, pool:stats().cached)
    pool:commit(blocks, { 1, 2, 3, 4 }, 4)
    assert.equal(2, pool:stats().cached)
    pool:commit(blocks, { 1, 2, 3, 4 }, 1)
    assert.equal(2, pool:stats().cached)
  end)

  it("loses nothing over a long random life", function()
    local pool, seed = core.block_pool { num_blocks = 13, block_tokens = 3 }, 1
    local function random(n)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return math.floor(seed / 65536) % n
    end
    local live = {}
    for _ = 1, 3000 do
      if random(2) == 0 then
        local ids = {}
        for i = 1, 1 + random(14) do ids[i] = random(2) end
        local blocks = pool:match(ids)
        if pool:allocate(math.ceil(#ids / 3) - #blocks, blocks) then
          pool:commit(blocks, ids)
          live[#live + 1] = blocks
        else
          pool:free(blocks)
        end
      elseif #live > 0 then
        pool:free(table.remove(live, 1 + random(#live)))
      end
      local held = {}
      for _, blocks in ipairs(live) do
        for _, id in ipairs(blocks) do held[id] = true end
      end
      local count = 0
      for _ in pairs(held) do count = count + 1 end
      if pool.free_blocks ~= 13 - count then error(("%d free, %d held"):format(pool.free_blocks, count)) end
    end
    for _, blocks in ipairs(live) do pool:free(blocks) end
    assert.equal(13, pool.free_blocks)
    assert.equal(0, pool:stats().used)
  end)

  it("names what is wrong with its arguments", function()
    assert.error_matches(function() core.block_pool { block_tokens = 4 } end, "num_blocks is missing", 1, true)
    assert.error_matches(function() core.block_pool { num_blocks = 0, block_tokens = 4 } end, "num_blocks must be an integer from 1", 1, true)
    assert.error_matches(function() core.block_pool { num_blocks = 1, block_token = 4 } end, "no field 'block_token'", 1, true)
  end)
end)
