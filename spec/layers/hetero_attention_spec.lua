-- spec/layers/hetero_attention_spec.lua - every plan gives what attention over the whole sequence gives.
-- The reference is plain float64 Lua (spec/support/hetero.lua). The batch is ragged: chunked prompts
-- beside decodes, requests that join late, sequences that grow past several virtual blocks.
local hetero = require "spec.support.hetero"

local function worst(case)
  local largest, results = 0, hetero.run(hetero.case(case))
  assert.equal(case.tp, #results)
  for _, r in ipairs(results) do
    if not (r.worst <= largest) then largest = r.worst end
  end
  return largest, results
end

local function exact(case)
  local diff = worst(case)
  assert.is_true(diff < 2e-6, "largest difference " .. tostring(diff))
end

describe("hetero attention", function()
  describe("on one rank", function()
    for _, page in ipairs { 1, 4, 16 } do
      it(("is causal attention over the cache, in pages of %d"):format(page), function()
        exact { tp = 1, heads = 4, kv_heads = 2, head_size = 8, block_size = page }
      end)
    end

    it("takes values of another size than keys", function()
      exact { tp = 1, heads = 4, kv_heads = 4, head_size = 12, v_head_size = 5 }
    end)

    it("keeps half precision keys in half precision", function()
      local diff = worst { tp = 1, heads = 4, kv_heads = 1, head_size = 8, dtype = "bfloat16" }
      assert.is_true(diff < 3e-2)
    end)
  end)

  describe("under a resharding plan", function()
    for _, exchange in ipairs { "ag_rs", "a2a" } do
      -- world, attention tensor size, heads, key heads
      for _, sizes in ipairs {
        { 2, 1, 4, 2 }, { 3, 1, 6, 2 }, { 4, 1, 8, 2 }, { 4, 2, 8, 4 }, { 6, 2, 12, 4 }, { 6, 3, 12, 3 }, { 8, 2, 16, 4 },
      } do
        local tp, tpa, heads, kv_heads = unpack(sizes)
        it(("tp %d, tpa %d, %d heads on %d, by %s"):format(tp, tpa, heads, kv_heads, exchange), function()
          exact { tp = tp, tpa = tpa, heads = heads, kv_heads = kv_heads, head_size = 8, exchange = exchange }
        end)
      end

      for _, interleave in ipairs { 1, 2, 4, 16 } do
        it(("interleaved by %d, by %s"):format(interleave, exchange), function()
          exact { tp = 4, tpa = 2, heads = 4, kv_heads = 2, head_size = 4, block_size = 16, interleave = interleave, exchange = exchange }
        end)
        it(("interleaved by %d over three ranks, by %s"):format(interleave, exchange), function()
          exact { tp = 3, tpa = 1, heads = 3, kv_heads = 1, head_size = 4, block_size = 16, interleave = interleave, exchange = exchange }
        end)
      end

      it("copies key heads when tpa exceeds them, by " .. exchange, function()
        exact { tp = 8, tpa = 4, heads = 16, kv_heads = 2, head_size = 4, exchange = exchange }
        exact { tp = 4, tpa = 2, heads = 8, kv_heads = 1, head_size = 4, exchange = exchange }
      end)

      it("keeps slices that begin inside a group of heads, by " .. exchange, function()
        -- 12 heads on 2 key heads, 3 heads kept: slices begin at 0, 3, 6, 9 and the groups at 0 and 6.
        exact { tp = 4, tpa = 1, heads = 12, kv_heads = 2, head_size = 4, exchange = exchange }
        -- 6 heads on 2 key heads over 3 ranks: the middle slice, heads 2 and 3, lies in both groups.
        exact { tp = 3, tpa = 1, heads = 6, kv_heads = 2, head_size = 4, exchange = exchange }
      end)

      for _, window in ipairs { 1, 5, 17 } do
        it(("sees exactly the last %d positions, by %s"):format(window, exchange), function()
          for _, interleave in ipairs { 1, 4 } do
            exact { tp = 4, tpa = 1, heads = 4, kv_heads = 2, head_size = 4, window = window, interleave = interleave, exchange = exchange }
          end
        end)
      end

      it("stays near in half precision, by " .. exchange, function()
        for _, dtype in ipairs { "bfloat16", "float16" } do
          local diff = worst { tp = 4, tpa = 2, heads = 8, kv_heads = 2, head_size = 8, dtype = dtype, exchange = exchange }
          assert.is_true(diff < 3e-2, dtype .. " differs by " .. tostring(diff))
        end
      end)
    end
  end)

  describe("under plain context parallelism", function()
    for _, exchange in ipairs { "ag_rs", "a2a" } do
      -- world, context size, heads, key heads
      for _, sizes in ipairs { { 2, 2, 4, 1 }, { 3, 3, 6, 1 }, { 4, 2, 8, 2 }, { 4, 4, 8, 1 }, { 6, 3, 6, 2 }, { 8, 4, 8, 2 }, { 8, 2, 16, 2 } } do
        local tp, dcp, heads, kv_heads = unpack(sizes)
        it(("tp %d, dcp %d, %d heads on %d, by %s"):format(tp, dcp, heads, kv_heads, exchange), function()
          exact { tp = tp, dcp = dcp, heads = heads, kv_heads = kv_heads, head_size = 8, exchange = exchange }
        end)
      end

      it("interleaves and sees windows, by " .. exchange, function()
        exact { tp = 4, dcp = 2, heads = 8, kv_heads = 2, head_size = 4, block_size = 16, interleave = 16, exchange = exchange }
        exact { tp = 4, dcp = 4, heads = 4, kv_heads = 1, head_size = 4, window = 6, interleave = 2, exchange = exchange }
      end)
    end
  end)

  describe("in one model", function()
    it("runs layers with different plans over the same block ids", function()
      for _, exchange in ipairs { "ag_rs", "a2a" } do
        local case = hetero.case {
          tp = 4, heads = 8, kv_heads = 2, head_size = 4, block_tokens = 16, exchange = exchange,
          layers = { { tpa = 1 }, { tpa = 2 }, { tpa = 4 }, { dcp = 2 }, { tpa = 1, interleave = 4, window = 6 }, { tpa = 2, interleave = 2 } },
        }
        for _, r in ipairs(hetero.run(case)) do assert.is_true(r.worst < 2e-6, "largest difference " .. tostring(r.worst)) end
      end
    end)

    it("shares blocks between layers with context sizes 2, 3, 6 and 1", function()
      local case = hetero.case {
        tp = 6, heads = 12, kv_heads = 6, head_size = 4, block_tokens = 12,
        layers = { { tpa = 3 }, { tpa = 2 }, { tpa = 1 }, { tpa = 6 } },
      }
      for _, r in ipairs(hetero.run(case)) do assert.is_true(r.worst < 2e-6, "largest difference " .. tostring(r.worst)) end
    end)
  end)
end)
