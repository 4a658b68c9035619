-- spec/plan/shards_spec.lua - who owns which heads, vocabulary rows and other runs.
local core = require "weft.core"
local layout = core.layout

local function plan(input_world, input_rank, output_world, output_rank)
  local group = input_world == output_world and "tensor" or "attention_tensor"
  return core.plan { input = core.axis(input_world, input_rank, group), output = core.axis(output_world, output_rank) }
end

describe("heads", function()
  local function heads(h, kv, p) return layout.heads { num_heads = h, num_kv_heads = kv, plan = p } end

  it("are those of the worked examples", function()
    local h = heads(8, 2, plan(4, 3, 4, 3))
    assert.same({ 2, 1, 2, 6, 1 }, { h.num_heads, h.num_kv_heads, h.num_kv_head_replicas, h.first_head, h.first_kv_head })
    h = heads(8, 4, plan(2, 1, 2, 1))
    assert.same({ 4, 2, 1, 4, 2 }, { h.num_heads, h.num_kv_heads, h.num_kv_head_replicas, h.first_head, h.first_kv_head })
    h = heads(8, 8, plan(4, 1, 8, 3))
    assert.same({ 2, 2, 1, 3 }, { h.num_heads, h.num_kv_heads, h.output_num_heads, h.output_first_head })
    h = heads(48, 8, plan(16, 5, 16, 5))
    assert.same({ 3, 1, 2, 2 }, { h.num_heads, h.num_kv_heads, h.num_kv_head_replicas, h.first_kv_head })
  end)

  it("are those of the table tp=8, tpa=2, 16 heads, 4 key/value heads", function()
    for t = 0, 7 do
      local a = math.floor(t / 4)
      local h = heads(16, 4, plan(2, a, 8, t))
      assert.same({ 8, 8 * a, 2, 2 * a, 2, 2 * t },
        { h.num_heads, h.first_head, h.num_kv_heads, h.first_kv_head, h.output_num_heads, h.output_first_head })
    end
  end)

  it("cover all query and key/value heads, each query head with its key/value head at hand", function()
    for _, case in ipairs { { 16, 4 }, { 8, 8 }, { 8, 1 }, { 48, 8 }, { 12, 6 } } do
      for _, world in ipairs { 1, 2, 3, 4, 6, 8, 12, 16, 24 } do
        local h, kv = case[1], case[2]
        if h % world == 0 and (kv % world == 0 or world % kv == 0) then
          local next_head = 0
          for r = 0, world - 1 do
            local x = heads(h, kv, plan(world, r, world, r))
            assert.equal(next_head, x.first_head)
            next_head = x.first_head + x.num_heads
            for q = x.first_head, next_head - 1 do
              local k = math.floor(q / (h / kv))
              assert.is_true(k >= x.first_kv_head and k < x.first_kv_head + x.num_kv_heads)
            end
          end
          assert.equal(h, next_head)
        end
      end
    end
  end)

  it("refuse numbers that do not divide, naming them", function()
    local function refused(text, ...)
      local args = { ... }
      assert.error_matches(function() heads(unpack(args)) end, text, 1, true)
    end
    refused("6 key/value heads over 4 ranks: one number must divide the other", 12, 6, plan(4, 0, 4, 0))
    refused("4 key/value heads over 6 ranks", 12, 4, plan(6, 0, 6, 0))
    refused("28 attention heads do not divide over 8 ranks", 28, 4, plan(8, 0, 8, 0))
    refused("12 output heads do not divide over 8 ranks", 12, 4, plan(2, 0, 8, 0))
    refused("7 attention heads do not divide over 2 key/value heads", 7, 2, plan(1, 0, 1, 0))
    refused("output rank 0 of 8 keeps heads 0 to 1, but input rank 1 of 2 computes heads 8 to 15", 16, 4, plan(2, 1, 8, 0))
  end)
end)

describe("vocabulary rows", function()
  local function rows(size, world, rank)
    local v = layout.vocab { vocab_size = size, axis = core.axis(world, rank) }
    return { v.padded_vocab, v.offset, v.count, v.real }
  end

  it("are padded to a multiple of 64 and of the ranks", function()
    assert.same({ 1024, 0, 512, 512 }, rows(1010, 2, 0))
    assert.same({ 1024, 512, 512, 498 }, rows(1010, 2, 1))
    assert.same({ 200064, 175056, 25008, 25008 }, rows(200064, 8, 7))
    assert.same({ 32064, 0, 5344, 5344 }, rows(32000, 6, 0))
  end)

  it("leave ranks without real rows when the vocabulary is tiny", function()
    assert.same({ 64, 0, 8, 8 }, rows(10, 8, 0))
    assert.same({ 64, 8, 8, 2 }, rows(10, 8, 1))
    for r = 2, 7 do assert.same({ 64, 8 * r, 8, 0 }, rows(10, 8, r)) end
  end)

  it("are contiguous, disjoint, and add up", function()
    for _, size in ipairs { 1, 10, 63, 64, 65, 1010, 32000 } do
      for _, world in ipairs { 1, 2, 3, 5, 6, 7, 8, 64, 96 } do
        local next_row, real = 0, 0
        for r = 0, world - 1 do
          local v = rows(size, world, r)
          assert(v[2] == next_row and v[1] % 64 == 0 and v[1] % world == 0)
          next_row, real = next_row + v[3], real + v[4]
        end
        assert(next_row == rows(size, world, 0)[1] and real == size)
      end
    end
  end)
end)

describe("an even shard", function()
  it("is a run of equal length, or a refusal that names the thing", function()
    assert.same({ offset = 6, count = 2 }, layout.shard("rows", 8, core.axis(4, 3)))
    assert.error_matches(function() layout.shard("key heads", 8, core.axis(3, 0)) end,
      "8 key heads do not divide over 3 ranks", 1, true)
  end)
end)
