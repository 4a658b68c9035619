--- spec/comm/collectives_spec.lua - what each collective gives, for every size, dtype and count.
local core = require "weft.core"

local sizes = { 1, 2, 3, 4, 8 }
local counts = { 0, 1, 2, 63, 64, 65, 10007 } -- up to 32 KiB are staged, above peers read in place
local dtypes = { "float32", "bfloat16", "float16", "int32" }

-- Whole numbers that every dtype holds, and whose sums over 8 ranks it holds too.
local function value(rank, i) return (rank * 7 + i * 3) % 23 - 11 end

-- Runs check(size, group, make, same) on every rank of every world size. make(count, dtype, f):
-- a tensor of f(i), i from 0. same(tensor, f, what): every element is f(i).
local function on_all_sizes(check)
  for _, size in ipairs(sizes) do
    core.spawn(size, function(...)
      local group = core.groups.everyone()
      local function make(count, dtype, f)
        local values = {}
        for i = 0, count - 1 do values[i + 1] = f(i) end
        return core.tensor({ count }, dtype, values)
      end
      local function same(tensor, f, what)
        for i, got in ipairs(tensor:totable()) do
          if got ~= f(i - 1) then error(("%s: element %d is %g, wanted %g"):format(what, i - 1, got, f(i - 1))) end
        end
      end
      check(size, group, make, same, ...)
    end, counts, dtypes)
  end
end

describe("a group's collectives", function()
  it("all_reduce sums, or takes the largest, of every dtype and count", function()
    on_all_sizes(function(size, group, make, same, counts, dtypes)
      for _, dtype in ipairs(dtypes) do
        for _, count in ipairs(counts) do
          if count > 100 and size == 3 then count = 20011 end -- above the limit for two-byte dtypes too
          local t = make(count, dtype, function(i) return value(group.rank, i) end)
          local what = ("%d %s over %d"):format(count, dtype, size)
          local sum, max = group:all_reduce(t), group:all_reduce(t, "max")
          assert(sum.dtype == dtype and sum.numel == count)
          same(sum, function(i)
            local total = 0
            for r = 0, size - 1 do total = total + value(r, i) end
            return total
          end, "sum of " .. what)
          same(max, function(i)
            local largest = -99
            for r = 0, size - 1 do largest = math.max(largest, value(r, i)) end
            return largest
          end, "max of " .. what)
          same(t, function(i) return value(group.rank, i) end, "input of " .. what)
        end
      end
    end)
  end)

  it("all_gather and all_to_all put the parts in the order of the list", function()
    on_all_sizes(function(size, group, make, same, counts, dtypes)
      for _, dtype in ipairs { dtypes[1], dtypes[2], "uint8" } do
        for _, count in ipairs(counts) do
          local function byte(r, i) return value(r, i) + 11 end
          local what = ("%d %s over %d"):format(count, dtype, size)
          local t = make(count, dtype, function(i) return byte(group.rank, i) end)
          same(group:all_gather(t, 0), function(i) return byte(math.floor(i / count), i % count) end, "all_gather of " .. what)
          local part = count > 100 and math.floor(count / size) or count
          local parts = make(part * size, dtype, function(i) return byte(group.rank, i) end)
          same(group:all_to_all(parts), function(i) return byte(math.floor(i / part), group.rank * part + i % part) end,
            "all_to_all of " .. what)
        end
      end
    end)
  end)

  it("reduce_scatter leaves each rank its part of the sum", function()
    on_all_sizes(function(size, group, make, same, counts, dtypes)
      for _, dtype in ipairs(dtypes) do
        for _, count in ipairs(counts) do
          if count > 100 then count = math.floor(count / size) end
          local t = make(count * size, dtype, function(i) return value(group.rank, i) end)
          same(group:reduce_scatter(t, 0), function(i)
            local total = 0
            for r = 0, size - 1 do total = total + value(r, group.rank * count + i) end
            return total
          end, ("%d %s over %d"):format(count, dtype, size))
        end
      end
    end)
  end)

  it("broadcast fills every rank's tensor from any root, and carries plain values", function()
    on_all_sizes(function(size, group, make, same, counts, dtypes)
      for root = 0, size - 1 do
        for _, count in ipairs(counts) do
          local t = make(count, dtypes[1 + count % 4], function(i) return value(group.rank, i) end)
          assert(group:broadcast(t, root) == t)
          same(t, function(i) return value(root, i) end, "broadcast")
        end
        local got = group:broadcast_value({ "from", group.rank, deep = { ("z"):rep(100000) } }, root)
        assert(got[2] == root and #got.deep[1] == 100000)
      end
    end)
  end)

  it("work along any dimension and on strided tensors", function()
    on_all_sizes(function(size, group, make, same)
      local function cell(r, a, b, c) return (r * 31 + a * 15 + b * 5 + c) % 97 end
      for dim = 0, 2 do
        local shape = { 3, 3, 5 }
        local t = core.tensor(shape)
        local swapped = core.tensor({ 5, 3, 3 }):transpose(0, 2)
        for a = 0, 2 do for b = 0, 2 do for c = 0, 4 do
          t:set(cell(group.rank, a, b, c), a, b, c)
          swapped:set(cell(group.rank, a, b, c), a, b, c)
        end end end
        for _, input in ipairs { t, swapped } do
          local all = group:all_gather(input, dim)
          assert(all.shape[dim + 1] == shape[dim + 1] * size)
          local back = group:reduce_scatter(all, dim)
          for a = 0, 2 do for b = 0, 2 do for c = 0, 4 do
            for r = 0, size - 1 do
              local at = { a, b, c }
              at[dim + 1] = at[dim + 1] + r * shape[dim + 1]
              assert(all:get(unpack(at)) == cell(r, a, b, c))
            end
            assert(back:get(a, b, c) == cell(group.rank, a, b, c) * size)
          end end end
        end
      end
    end)
  end)

  it("give every rank the same bits, summed in list order and rounded once", function()
    for _, size in ipairs { 2, 3, 8 } do
      for _, count in ipairs { 100, 30000 } do
        core.spawn(size, function(count, size)
          local group = core.groups.everyone()
          local values = {}
          for i = 1, count do values[i] = math.sin(i * 12.9898 + group.rank * 78.233) * 10 ^ (i % 7) end
          for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
            local sum = group:all_reduce(core.tensor({ count }, dtype, values))
            local first = group:broadcast(sum:clone(), 0)
            local mine, theirs = sum:totable(), first:totable()
            for i = 1, count do assert(mine[i] == theirs[i] or mine[i] ~= mine[i]) end
          end
        end, count, size)
      end
    end
    assert.equal(1.015625, core.spawn(8, function() -- 1 + 7/512: seven roundings would give 1
      local group = core.groups.everyone()
      return group:all_reduce(core.tensor({ 1 }, "bfloat16", { group.rank == 0 and 1 or 2 ^ -9 })):get(0)
    end)[5])
  end)

  it("give the same tensor back in a group of one", function()
    local group, t = core.groups.get("context", 1), core.tensor { 3 }
    assert.equal(t, group:all_reduce(t))
    assert.equal(t, group:all_gather(t, 0))
    assert.equal(t, group:reduce_scatter(t, 0))
    assert.equal(t, group:broadcast(t, 0))
    assert.equal("v", group:broadcast_value "v")
    group:barrier()
  end)

  it("count calls and the bytes for other ranks", function()
    local traffic = core.spawn(4, function()
      local group = core.groups.everyone()
      group:all_reduce(core.tensor { 100 })
      group:all_gather(core.tensor({ 10 }, "bfloat16"), 0)
      group:broadcast(core.tensor { 5 }, 2)
      return group:traffic()
    end)
    assert.equal(3, traffic[1].calls)
    assert.equal(2 * 400 * 3 / 4 + 20 * 3, traffic[1].bytes_sent)
    assert.equal(2 * 400 * 3 / 4 + 20 * 3 + 20 * 3, traffic[3].bytes_sent)
    assert.is_true(traffic[1].seconds > 0 and traffic[1].seconds < 5)
  end)
end)
