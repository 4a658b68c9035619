-- spec/plan/layout_spec.lua - who owns which token, and in which slot.
local core = require "weft.core"
local layout = core.layout
local owner, local_index, local_len = layout.owner, layout.local_index, layout.local_len

describe("the share of a sequence", function()
  it("holds the lengths of the table for 4 ranks", function()
    local table_of = {
      [0] = { { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } },
      [1] = { { 1, 0, 0, 0 }, { 1, 0, 0, 0 }, { 1, 0, 0, 0 } },
      [5] = { { 2, 1, 1, 1 }, { 4, 1, 0, 0 }, { 5, 0, 0, 0 } },
      [6] = { { 2, 2, 1, 1 }, { 4, 2, 0, 0 }, { 6, 0, 0, 0 } },
      [13] = { { 4, 3, 3, 3 }, { 4, 4, 4, 1 }, { 13, 0, 0, 0 } },
      [16] = { { 4, 4, 4, 4 }, { 4, 4, 4, 4 }, { 16, 0, 0, 0 } },
      [25] = { { 7, 6, 6, 6 }, { 8, 8, 5, 4 }, { 16, 9, 0, 0 } },
      [64] = { { 16, 16, 16, 16 }, { 16, 16, 16, 16 }, { 16, 16, 16, 16 } },
    }
    for length, rows in pairs(table_of) do
      for n, i in ipairs { 1, 4, 16 } do
        local got = {}
        for d = 0, 3 do got[d + 1] = local_len(length, d, 4, i) end
        assert.same(rows[n], got, ("L=%d I=%d"):format(length, i))
      end
    end
  end)

  it("does not fall for the length that divides evenly", function()
    for d = 0, 3 do
      assert.equal(2, local_len(8, d, 4))
      assert.equal(0, local_len(0, d, 4))
    end
  end)

  it("agrees with dealing the tokens out one by one", function()
    for _, n in ipairs { 1, 2, 3, 4, 8 } do
      for _, i in ipairs { 1, 2, 4, 16 } do
        local held, turn = {}, 0
        for d = 0, n - 1 do held[d] = 0 end
        for p = 0, 199 do
          local sum = 0
          for d = 0, n - 1 do
            local len = local_len(p, d, n, i)
            if len ~= held[d] then error(("local_len(%d, %d) of %d by %d is %d, dealt %d"):format(p, d, n, i, len, held[d])) end
            if d > 0 and len > local_len(p, d - 1, n, i) then error "lengths must not increase with the rank" end
            if len > math.ceil(p / (n * i)) * i then error "a share is longer than the bound" end
            sum = sum + len
          end
          assert(sum == p)
          assert(owner(p, n, i) == turn)
          assert(local_index(p, n, i) == held[turn])
          assert(layout.global(held[turn], turn, n, i) == p)
          held[turn] = held[turn] + 1
          if (p + 1) % i == 0 then turn = (turn + 1) % n end
        end
      end
    end
  end)

  it("counts what each token of a query may see from the global length", function()
    -- N=2, I=1, history 5, two new tokens: rank 0 sees 3 then 4, rank 1 sees 3 and 3
    assert.same({ 3, 4, 3, 3 }, { local_len(6, 0, 2), local_len(7, 0, 2), local_len(6, 1, 2), local_len(7, 1, 2) })
  end)

  it("refuses arguments that cannot be", function()
    assert.error_matches(function() owner(0, 0) end, "world_size must be positive, got 0", 1, true)
    assert.error_matches(function() local_len(4, 2, 2) end, "rank must be in [0, 2), got 2", 1, true)
    assert.error_matches(function() local_len(4, 0, 2, 0) end, "interleave must be positive, got 0", 1, true)
    assert.error_matches(function() owner(-1, 2) end, "position must be a whole number", 1, true)
  end)
end)

describe("slots", function()
  local function slots(n, rank, i, last, stride)
    local got = {}
    for p = 0, last do
      got[#got + 1] = layout.slot { position = p, size = n, rank = rank, interleave = i, page = 4, table = { 7, 3 } }
    end
    return got
  end

  it("are those of the worked example: pages of 4, 2 ranks, table 7, 3", function()
    assert.same({ 28, -1, 29, -1, 30, -1, 31, -1, 12, -1, 13, -1 }, slots(2, 0, 1, 11))
    assert.same({ -1, 28, -1, 29, -1, 30, -1, 31, -1, 12, -1, 13 }, slots(2, 1, 1, 11))
    assert.same({ 28, 29, -1, -1, 30, 31, -1, -1, 12, 13, -1, -1 }, slots(2, 0, 2, 11))
    assert.same({ -1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 12, 13 }, slots(2, 1, 2, 11))
  end)

  it("fill a whole page on one rank when the strip is a page", function()
    for d = 0, 3 do
      local got, want = slots(4, d, 4, 19), {}
      for p = 0, 19 do want[p + 1] = -1 end
      for k = 0, 3 do want[d * 4 + k + 1] = 28 + k end
      if d == 0 then for k = 0, 3 do want[16 + k + 1] = 12 + k end end
      assert.same(want, got)
    end
  end)

  it("agree with filling pages token by token", function()
    local page, ids = 8, { 5, 2, 9, 0, 7, 1, 4, 11, 3, 6, 8, 10, 13, 12, 15, 14, 17, 16, 19, 18, 21, 20, 23, 22, 24 }
    for _, n in ipairs { 1, 2, 3, 4, 8 } do
      for _, i in ipairs { 1, 2, 4, 8 } do
        local held = {}
        for d = 0, n - 1 do held[d] = 0 end
        for p = 0, 199 do
          local o = owner(p, n, i)
          for d = 0, n - 1 do
            local slot = layout.slot { position = p, size = n, rank = d, interleave = i, page = page, table = ids }
            local want = d == o and ids[math.floor(held[d] / page) + 1] * page + held[d] % page or -1
            if slot ~= want then error(("slot of %d on %d of %d by %d: %d, wanted %d"):format(p, d, n, i, slot, want)) end
          end
          held[o] = held[o] + 1
        end
      end
    end
  end)

  it("refuse a page that strips do not fill, and a position behind the table", function()
    assert.error_matches(function() layout.slot { position = 0, size = 2, rank = 0, interleave = 3, page = 4, table = { 0 } } end,
      "page (4 tokens) must be a multiple of interleave (3)", 1, true)
    assert.error_matches(function() layout.slot { position = 8, size = 2, rank = 0, page = 4, table = { 0 } } end,
      "position 8 lies in block 1 of a table of 1", 1, true)
  end)
end)
