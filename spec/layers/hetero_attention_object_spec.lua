-- spec/layers/hetero_attention_object_spec.lua - what the object says, refuses, and leaves behind.
local core = require "weft.core"
local hetero = require "spec.support.hetero"

local function attention(t)
  local options = { num_heads = 4, num_kv_heads = 2, head_size = 8 }
  for k, v in pairs(t or {}) do options[k] = v end
  return core.hetero_attention(options)
end

local function plan(input_world, input_rank, output_world, output_rank, more)
  local t = { input = core.axis(input_world, input_rank, "attention_tensor"), output = core.axis(output_world, output_rank, "tensor") }
  for k, v in pairs(more or {}) do t[k] = v end
  return core.plan(t)
end

local function forward(layer, step, tokens)
  local packed = core.tensor { tokens, 64 }
  return layer:forward(packed:narrow(1, 0, 32), packed:narrow(1, 32, 16), packed:narrow(1, 48, 16), step)
end

describe("a hetero attention", function()
  it("takes the attention plan of its Lua state when none is given", function()
    assert.equal(core.layer_parallel.get "attention", attention().parallel_plan)
  end)

  it("says its sizes and the bytes of its pages", function()
    local layer = attention { v_head_size = 4, kv_dtype = "bfloat16", sliding_window = 7 }
    assert.same({ 4, 2, 4, 0, 8, 4, 7 }, {
      layer.num_heads, layer.num_kv_heads, layer.output_num_heads, layer.output_first_head, layer.head_size, layer.v_head_size,
      layer.sliding_window,
    })
    assert.equal(16 * 2 * (8 + 4) * 2, layer:bytes_per_block(16))
    assert.equal(0, layer.cache_bytes)
    collectgarbage() collectgarbage()
    local before = core.memory().live_bytes
    layer:bind_cache(10, 16)
    assert.equal(10 * layer:bytes_per_block(16), layer.cache_bytes)
    assert.equal(before + layer.cache_bytes, core.memory().live_bytes)
    assert.same({ 16, 10 }, { layer.page_tokens, layer.num_blocks })
    local k, v = layer:cache()
    assert.equal("bfloat16[10, 2, 16, 8]", tostring(k))
    assert.equal("bfloat16[10, 2, 16, 4]", tostring(v))
  end)

  it("refuses plans that its backend cannot run, by name", function()
    local function refused(p)
      assert.error_matches(function() attention { parallel_plan = p } end, "cpu paged does not support layer parallel plan", 1, true)
    end
    refused(plan(4, 0, 2, 0))                                                -- heads would have to be gathered
    refused(plan(2, 0, 4, 1, { context = core.axis(1, 0, "context") }))      -- a slice without shares
    refused(plan(2, 0, 8, 1, { context = core.axis(2, 1, "context") }))      -- 2 * 2 is not 8
    refused(plan(2, 0, 4, 3, { context = core.axis(2, 1, "context") }))      -- the wrong slice: 0 * 2 + 1 is not 3
    refused(plan(2, 1, 2, 0))                                                -- another rank's heads
  end)

  it("needs the context group of its plan and no other", function()
    assert.has_error(function() attention { parallel_plan = plan(1, 0, 2, 0) } end)
  end)

  it("refuses plain context parallelism over ranks with different key heads", function()
    local tensor = core.axis(6, 2, "tensor")
    local p = core.plan { input = tensor, output = tensor, context = core.axis(2, 0, "context") }
    -- 12 heads on 2 key heads over 6 ranks: ranks 2 and 3 hold different ones.
    assert.error_matches(function()
      core.hetero_attention { num_heads = 2, num_kv_heads = 1, total_num_heads = 12, total_num_kv_heads = 2, head_size = 8, parallel_plan = p }
    end, "needs 2 ranks with the same key head", 1, true)
  end)

  it("refuses sizes that do not fit together", function()
    local function refused(message, t) assert.error_matches(function() attention(t) end, message, 1, true) end
    refused("4 query heads do not divide over 3 key heads", { num_kv_heads = 3 })
    refused("num_heads must be an integer from 1", { num_heads = 0 })
    refused("hetero_attention has no field 'window'", { window = 4 })
    refused("8 heads and 2 key heads over 1 ranks are 8 and 2 on each, got 4 and 2", { total_num_heads = 8, total_num_kv_heads = 2 })
    refused("4 heads and 4 key heads over 1 ranks are 4 and 4 on each, got 4 and 2", { total_num_heads = 4, total_num_kv_heads = 4 })
    refused("scale -1", { scale = -1 })
    refused("cpu paged keeps float32, bfloat16 or float16 keys, not float8_e4m3", { kv_dtype = "fp8" })
  end)

  it("refuses inputs, steps and caches that do not fit", function()
    local layer, step = attention(), core.step():build { block_tokens = 4, requests = { { ids = { 1, 2 }, blocks = { 3 } } } }
    local function refused(message, fn) assert.error_matches(fn, message, 1, true) end
    refused("has no cache: call bind_cache first", function() forward(layer, step, 2) end)
    layer:bind_cache(3, 4)
    refused("names block 3, the cache has 3", function() forward(layer, step, 2) end)
    layer:bind_cache(4, 8)
    refused("blocks of 4 tokens, the cache of 8", function() forward(layer, step, 2) end)
    layer:bind_cache(4, 4)
    refused("q must be float32[2, 4 * 8], got float32[3, 32]", function() forward(layer, step, 3) end)
    refused("the step was not built", function() forward(layer, core.step(), 2) end)
    refused("side by side", function()
      local t = core.tensor({ 32, 2 }):transpose(0, 1)
      layer:forward(t, core.tensor { 2, 16 }, core.tensor { 2, 16 }, step)
    end)
    assert.same({ 2, 32 }, forward(layer, step, 2).shape)
    refused("num_blocks must be a positive integer", function() layer:bind_cache(0, 4) end)
  end)

  it("gives back its pages and its step's memory", function()
    collectgarbage() collectgarbage()
    local bytes, objects = core.memory().live_bytes, core.live_objects()
    local layer, step = attention(), core.step():build { requests = { { ids = { 1 } } } }
    layer:bind_cache(100, 16)
    layer:bind_cache(200, 16)
    assert.is_true(core.memory().live_bytes >= bytes + layer.cache_bytes)
    layer:close()
    step:close()
    assert.equal(bytes, core.memory().live_bytes)
    assert.equal(objects, core.live_objects())
    assert.error_matches(function() layer:bind_cache(1, 16) end, "closed", 1, true)
  end)
end)

describe("sizes over a model's layers", function()
  it("a virtual block is the block size times what all context sizes divide", function()
    assert.equal(16, core.kv_block_tokens(16, { attention() }))
    assert.error_matches(function() core.kv_block_tokens(16, {}) end, "list of weft.hetero_attention", 1, true)
  end)

  it("as many blocks as a budget holds, and a refusal with the numbers when that is none", function()
    local layers = { attention(), attention { kv_dtype = "bfloat16" } }
    local block = layers[1]:bytes_per_block(16) + layers[2]:bytes_per_block(16)
    assert.equal(3, core.kv_num_blocks(4 * block - 1, layers, 16))
    assert.error_matches(function() core.kv_num_blocks(block - 1, layers, 16) end,
      ("one block of 16 tokens over 2 layers takes %d bytes"):format(block), 1, true)
  end)
end)

describe("a fault in the exchange", function()
  for _, exchange in ipairs { "ag_rs", "a2a" } do
    it("takes all ranks down with the first one's message, and leaves nothing, by " .. exchange, function()
      collectgarbage() collectgarbage()
      local before = core.live_objects()
      local case = hetero.case { tp = 4, tpa = 1, heads = 4, kv_heads = 1, head_size = 4, exchange = exchange }
      local ok, message = pcall(core.spawn, {
        ranks = 4, fn = { module = "spec.support.hetero", ["function"] = "rank_main" }, args = { case },
        fault = "rank=2,step=4,at=exchange,kind=raise",
      })
      assert.is_false(ok)
      assert.matches("rank 2", tostring(message))
      assert.matches("exchange", tostring(message))
      message = nil
      collectgarbage() collectgarbage()
      assert.equal(before, core.live_objects())
    end)
  end
end)
