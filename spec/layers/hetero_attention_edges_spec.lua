-- spec/layers/hetero_attention_edges_spec.lua - the places where attention over shares goes wrong.
-- Numbers in brackets are those of the list in SEMANTICS 2.5; 5 to 9 and 13 are promises of the operations
-- themselves, looked at there as well.
local core = require "weft.core"
local hetero = require "spec.support.hetero"

local both = { "ag_rs", "a2a" }

local function run(case)
  local results = hetero.run(hetero.case(case))
  for _, r in ipairs(results) do
    if not (r.worst < 2e-6) then error("largest difference " .. tostring(r.worst)) end
  end
  return results
end

local function tokens(request, start, count) return { request = request, start = start, count = count } end

describe("a share of the context", function()
  for _, exchange in ipairs(both) do
    local function edge(number, promise, fn) it(("%s, by %s (%s)"):format(promise, exchange, number), fn) end
    local function case(t)
      t.heads, t.kv_heads, t.head_size, t.exchange = t.heads or t.tp, t.kv_heads or 1, t.head_size or 4, exchange
      return t
    end

    edge(1, "may lie on one rank only", function()
      run(case { tp = 4, tpa = 1, block_size = 16, interleave = 16, steps = { { tokens(1, 0, 10) }, { tokens(1, 10, 1) }, { tokens(1, 11, 2) } } })
    end)

    edge(2, "may be empty for some requests of a batch", function()
      run(case { tp = 4, tpa = 1, steps = { { tokens(1, 0, 9) }, { tokens(2, 0, 3), tokens(1, 9, 1), tokens(3, 0, 1) } } })
    end)

    edge(3, "is not exchanged when no request has one", function()
      for _, r in ipairs(run(case { tp = 2, tpa = 1, steps = { { tokens(1, 0, 5), tokens(2, 0, 1) } } })) do
        assert.equal(1, r.traffic.steps)
        assert.equal(0, r.traffic.exchanges)
        assert.equal(0, r.traffic.bytes_sent)
      end
    end)

    -- (context size, interleave, context) where some ranks hold no key: none of them may skip.
    for _, t in ipairs { { 2, 16, 10 }, { 4, 16, 10 }, { 8, 16, 10 }, { 4, 1, 2 } } do
      edge("skip gate", ("is exchanged by all of %d ranks when %d tokens in strips of %d leave some without"):format(t[1], t[3], t[2]), function()
        local results = run(case { tp = t[1], tpa = 1, block_size = 16, interleave = t[2], steps = { { tokens(1, 0, t[3]) }, { tokens(1, t[3], 1) } } })
        for _, r in ipairs(results) do
          assert.equal(1, r.traffic.exchanges)
          assert.is_true(r.traffic.bytes_sent > 0)
        end
        run(case { tp = t[1], dcp = t[1], block_size = 16, interleave = t[2], steps = { { tokens(1, 0, t[3]) }, { tokens(1, t[3], 1) } } })
      end)
    end

    edge(4, "takes padding rows, whatever they hold, to zeros", function()
      run(case { tp = 4, tpa = 2, heads = 8, kv_heads = 2, padding = 3 })
      run(case { tp = 4, dcp = 2, heads = 8, kv_heads = 2, padding = 3 })
      run { tp = 1, heads = 2, kv_heads = 1, head_size = 4, padding = 2 }
    end)

    edge(6, "leaves the new tokens alone where no rank has a key in the window", function()
      run(case { tp = 4, tpa = 1, window = 1, steps = { { tokens(1, 0, 9), tokens(2, 0, 2) }, { tokens(1, 9, 1), tokens(2, 2, 4) } } })
    end)

    edge(9, "weighs a dominant key right, near or far", function()
      run(case { tp = 4, tpa = 1, gain = 8, steps = { { tokens(1, 0, 33) }, { tokens(1, 33, 2) } } })
    end)

    edge(10, "divides over three ranks", function() run(case { tp = 3, tpa = 1, kv_heads = 3 }) end)

    edge(11, "takes head sizes 96 and 192", function()
      for _, size in ipairs { 96, 192 } do
        run(case { tp = 2, tpa = 1, head_size = size, steps = { { tokens(1, 0, 7) }, { tokens(1, 7, 2) } } })
      end
    end)

    edge(12, "takes 5 and 7 tokens", function()
      run(case { tp = 4, tpa = 1, steps = { { tokens(1, 0, 5) }, { tokens(1, 5, 7) }, { tokens(1, 12, 5), tokens(2, 0, 2) } } })
    end)

    edge(14, "ends with a strip, a block and a virtual block", function()
      for _, length in ipairs { 8, 32 } do -- N I = 8, V = 32
        run(case { tp = 4, tpa = 1, block_size = 8, interleave = 2, steps = { { tokens(1, 0, length) }, { tokens(1, length, 1) } } })
      end
    end)

    edge(15, "goes on in the next block", function()
      run(case { tp = 2, tpa = 1, block_size = 4, steps = { { tokens(1, 0, 7) }, { tokens(1, 7, 1) }, { tokens(1, 8, 1) }, { tokens(1, 9, 1) } } })
    end)
  end

  it("grows by decoding through three virtual blocks, token by token", function()
    local steps = {}
    for p = 0, 49 do steps[p + 1] = { tokens(1, p, 1) } end
    for _, exchange in ipairs(both) do
      run { tp = 4, tpa = 1, heads = 4, kv_heads = 1, head_size = 4, exchange = exchange, interleave = 2, steps = steps }
    end
  end)

  it("never reads pages that were given back behind the window", function()
    for _, exchange in ipairs(both) do
      run { tp = 4, tpa = 2, heads = 4, kv_heads = 2, head_size = 4, exchange = exchange, window = 5, forget_behind = true }
    end
    run { tp = 1, heads = 2, kv_heads = 1, head_size = 4, window = 5, forget_behind = true }
  end)

  it("gives the heads of the table for tp 8, tpa 2, 16 heads on 4", function()
    local results = run { tp = 8, tpa = 2, heads = 16, kv_heads = 4, head_size = 4 }
    for t = 0, 7 do
      local r, a = results[t + 1], math.floor(t / 4)
      assert.same({ 8 * a, 8 }, { r.first_head, r.num_heads })
      assert.same({ 2 * a, 2 }, { r.first_kv_head, r.num_kv_heads })
      assert.same({ 2 * t, 2 }, { r.output_first_head, r.output_num_heads })
    end
  end)

  it("gives every head and two key heads to each rank at tp 4, tpa 1, 8 heads on 2", function()
    for t, r in ipairs(run { tp = 4, tpa = 1, heads = 8, kv_heads = 2, head_size = 4 }) do
      assert.same({ 0, 8, 2, 2 * (t - 1), 2 }, { r.first_head, r.num_heads, r.num_kv_heads, r.output_first_head, r.output_num_heads })
    end
  end)

  it("takes its share of the tokens in memory: pages of a block divided by the context size", function()
    for _, r in ipairs(run { tp = 4, tpa = 2, heads = 8, kv_heads = 4, head_size = 4, v_head_size = 2, block_tokens = 12, steps = { { tokens(1, 0, 25) } } }) do
      assert.equal(6, r.page_tokens)
      assert.equal(4 * 6 * 2 * (4 + 2) * 4, r.cache_bytes) -- 3 blocks of 12 for 25 tokens, and block 0
    end
  end)

  it("sends what the exchange's arithmetic says", function()
    local steps = { { tokens(1, 0, 9) }, { tokens(1, 9, 3) } }
    local tokens_sent, heads, dim, peers = 3, 8, 4, 3
    local a2a = run { tp = 4, tpa = 1, heads = heads, kv_heads = 1, head_size = dim, steps = steps, exchange = "a2a" }
    for _, r in ipairs(a2a) do assert.equal(peers * tokens_sent * heads / 4 * (dim + 1) * 4, r.traffic.bytes_sent) end
  end)

  it("allocates nothing once warm", function()
    for _, exchange in ipairs(both) do
      local steps = { { tokens(1, 0, 9) }, { tokens(1, 9, 4) } }
      for p = 13, 24 do steps[#steps + 1] = { tokens(1, p, 1) } end
      -- The one allocation of a step is the spec's own packed input.
      local with = run { tp = 2, tpa = 1, heads = 2, kv_heads = 1, head_size = 4, steps = steps, exchange = exchange, warm_step = 3 }
      for _, r in ipairs(with) do assert.equal(#steps - 3, r.allocations) end
    end
  end)
end)
