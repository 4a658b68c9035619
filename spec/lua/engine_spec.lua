--- spec/lua/engine_spec.lua - many requests at once give what each gives alone.
local core = require "weft.core"
local weft = require "weft"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

-- Prompts of 1 to 60 ids, seeded; each asks for 3 to 30 tokens, some by drawing.
local function requests(count)
  local list, state = {}, 12345
  local function random(n)
    state = (state * 1103515245 + 12345) % 2147483648
    return math.floor(state / 65536) % n
  end
  for i = 1, count do
    local ids = {}
    for k = 1, 1 + random(60) do ids[k] = 3 + random(1000) end
    -- Pairs share a beginning longer than a block, so that prefixes are used again.
    if i % 4 == 0 then
      ids = {}
      for k = 1, 40 do ids[k] = 3 + (k * 37) % 1000 end
      ids[41] = 3 + i
    end
    list[i] = { prompt_ids = ids, max_tokens = 3 + random(28), ignore_eos = true, seed = i,
      temperature = i % 3 == 0 and 0.8 or 0, top_k = i % 6 == 0 and 20 or nil }
  end
  return list
end

local function engine(options)
  options.model, options.dtype = demo, "float32"
  return weft.engine(options)
end

local function alone(list)
  local e, outputs = engine {}, {}
  for i, params in ipairs(list) do
    local request = e:submit(params)
    e:run()
    outputs[i] = request.output_ids
  end
  e:close()
  return outputs
end

-- All requests, some from the start and the rest while others run.
local function together(list, options)
  local e, handles = engine(options), {}
  for i, params in ipairs(list) do
    handles[i] = e:submit(params)
    if i > 8 then e:step() end
  end
  e:run()
  local outputs, stats, preemptions = {}, e.pool:stats(), e.preemptions
  for i, handle in ipairs(handles) do outputs[i] = handle.output_ids end
  e:close()
  return outputs, stats, preemptions
end

describe("engine", function()
  local list = requests(40)
  local expected

  setup(function() expected = alone(list) end)

  local plans = {
    ["one rank"] = {},
    ["-tp 4 -tpa 2"] = { tp = 4, tpa = 2 },
    ["plain -tp 8 -dcp 2"] = { tp = 8, dcp = 2 }, -- four KV heads: what -tp 4 -dcp 2 is to a model with one
    ["-tp 8 -tpa 2 with an all-to-all"] = { tp = 8, tpa = 2, dcp_comm_backend = "a2a", cp_kv_cache_interleave_size = 4 },
    ["a per-layer mix"] = { policy = { tensor = 4, attention = { tensor = 2 },
      layers = { [0] = { attention = { tensor = 4 } }, ["2-3"] = { attention = { tensor = 1 } } } } },
  }
  for name, options in pairs(plans) do
    it("gives 40 requests that join and leave their one-at-a-time tokens under " .. name, function()
      -- A cache too small for all: about 6 requests' worth.
      options.cache_tokens, options.max_batch, options.prefill_chunk = 384, 16, 17
      local outputs, stats, preemptions = together(list, options)
      assert.same(expected, outputs)
      assert.equal(0, stats.used)
      assert.is_true(preemptions > 0)
      assert.is_true(stats.hit_tokens > 0)
    end)
  end

  it("serves plain context parallelism where it is legal", function()
    local model = program.models .. "llama_mqa_tied" -- one KV head
    local ids = { 193, 377, 432, 208, 301, 499, 303 }
    local e = weft.engine { model = model, dtype = "float32" }
    local one = e:submit { prompt_ids = ids, max_tokens = 40, ignore_eos = true, temperature = 1, seed = 9 }
    e:run()
    e:close()
    e = weft.engine { model = model, dtype = "float32", tp = 4, dcp = 2 }
    local two = e:submit { prompt_ids = ids, max_tokens = 40, ignore_eos = true, temperature = 1, seed = 9 }
    e:submit { prompt_ids = { 5 }, max_tokens = 20, ignore_eos = true }
    e:run()
    e:close()
    assert.same(one.output_ids, two.output_ids)
  end)

  it("stops at stop texts, which the output does not hold, and streams nothing that could be one", function()
    local e, streamed = engine {}, {}
    local request = e:submit { prompt = "Once upon a time, there was a girl named Ruby.", stop = { " library" },
      on_token = function(_, _, text) streamed[#streamed + 1] = text end }
    e:run()
    e:close()
    assert.equal(" She had a golden hat. Ruby wanted to go to the", request.text)
    assert.equal(request.text, table.concat(streamed))
    assert.equal("stop", request.finish_reason)
  end)

  it("cancels a running request and gives its pages back", function()
    local e = engine {}
    local request = e:submit { prompt_ids = { 5, 6, 7 }, max_tokens = 1000, ignore_eos = true }
    for _ = 1, 5 do e:step() end
    request:cancel()
    e:run()
    assert.equal("cancelled", request.finish_reason)
    assert.equal(5, #request.output_ids)
    assert.equal(0, e.pool:stats().used)
    e:close()
  end)

  it("refuses what cannot be served, with the numbers, and goes on", function()
    local e = engine { cache_tokens = 64 }
    local function message(params)
      local ok, err = pcall(e.submit, e, params)
      assert.is_false(ok)
      return err.message
    end
    assert.is_truthy(message { prompt_ids = { 5 }, max_tokens = 100 }:find("101 tokens, and the cache holds 64", 1, true))
    assert.is_truthy(message { prompt_ids = { 5 }, temperature = -1 }:find("temperature must be a number from 0", 1, true))
    assert.is_truthy(message {}:find("prompt", 1, true))
    local request = e:submit { prompt_ids = { 5 }, max_tokens = 3, ignore_eos = true }
    e:run()
    assert.equal(3, #request.output_ids)
    e:close()
  end)

  it("goes on behind a callback that fails: its request ends, the others do not", function()
    local e = engine {}
    local bad = e:submit { prompt_ids = { 5 }, max_tokens = 5, on_token = function() error "mine" end }
    local good = e:submit { prompt_ids = { 6 }, max_tokens = 5, ignore_eos = true }
    assert.error_matches(function() e:run() end, "mine", 1, true)
    e:run()
    e:close()
    assert.equal("error", bad.finish_reason)
    assert.equal(5, #good.output_ids)
  end)

  it("leads one world at a time, and takes no field that it does not know", function()
    local e = engine { tp = 2 }
    assert.error_matches(function() engine { tp = 2 } end, "leads ranks already", 1, true)
    assert.error_matches(function() e:submit { prompt = "x", temprature = 1 } end, "unknown field 'temprature'", 1, true)
    e:close()
    assert.error_matches(function() e:submit { prompt_ids = { 5 } } end, "the engine is closed", 1, true)
    assert.error_matches(function() engine { tpx = 2 } end, "weft.engine has no option 'tpx'", 1, true)
  end)

  it("allocates nothing once warm", function()
    local e = engine {}
    e:submit { prompt_ids = { 5, 6, 7 }, max_tokens = 60, ignore_eos = true }
    for _ = 1, 5 do e:step() end
    local before = core.memory().allocations
    for _ = 1, 40 do e:step() end
    assert.equal(before, core.memory().allocations)
    e:close()
  end)

  it("leaves no object behind", function()
    collectgarbage() collectgarbage()
    local before = core.live_objects()
    local e = engine { tp = 2 }
    e:submit { prompt_ids = { 5 }, max_tokens = 3 }
    e:run()
    e:close()
    e = nil
    collectgarbage() collectgarbage()
    assert.equal(before, core.live_objects())
  end)
end)
