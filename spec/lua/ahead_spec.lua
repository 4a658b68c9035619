-- Decode steps that begin before the tokens of the step in front are known.
require "spec.helper"
local weft = require "weft"

local models = "spec/fixtures/models/"

-- Runs the requests of `list`; gives their ends and ids, how many steps began ahead, and the engine's free blocks.
local function serve(model, options, list, on_step)
  options.model, options.device = models .. model, "cpu"
  local engine = weft.engine(options)
  local requests, ahead, steps = {}, 0, 0
  for i, params in ipairs(list) do requests[i] = engine:submit(params) end
  while engine:step() do
    steps = steps + 1
    if engine.flight then ahead = ahead + 1 end
    if on_step then on_step(steps, requests, engine) end
  end
  local told = {}
  for i, request in ipairs(requests) do told[i] = request.finish_reason .. " " .. table.concat(request.output_ids, ",") end
  local free, blocks, flight = engine.pool.free_blocks, engine.num_blocks, engine.flight
  engine:close()
  return { told = told, ahead = ahead, steps = steps, free = free, blocks = blocks, flight = flight, requests = requests }
end

local function both(model, options, list)
  local function copy(extra)
    local t = { ahead = extra }
    for key, value in pairs(options) do t[key] = value end
    return t
  end
  return serve(model, copy(nil), list), serve(model, copy(true), list)
end

local function mixed(count)
  local list = {}
  for i = 1, count do
    list[i] = { prompt = "Once upon a time" .. (" a"):rep(i), max_tokens = 6 + 5 * (i % 4), temperature = i % 2, seed = i }
  end
  return list
end

describe("steps ahead", function()
  it("give the same tokens, on one rank and under plans", function()
    for _, plan in ipairs { {}, { tp = 2 }, { tp = 4, tpa = 2 }, { tp = 2, tpa = 1, dcp_comm_backend = "a2a" } } do
      plan.max_batch = 8
      local plain, ahead = both("demo_llama", plan, mixed(8))
      assert.same(plain.told, ahead.told)
      assert.equal(0, plain.ahead)
      assert.is_true(ahead.ahead > 0)
    end
  end)

  it("drop what a request draws behind its end", function()
    local first = serve("demo_llama", {}, { { prompt = "Once upon a time", max_tokens = 24 } })
    local ids = first.requests[1].output_ids
    local list = { { prompt = "Once upon a time", max_tokens = 24, stop_ids = { ids[9] } }, { prompt = "The cat", max_tokens = 24 } }
    local plain, ahead = both("demo_llama", { max_batch = 2 }, list)
    assert.same(plain.told, ahead.told)
    assert.matches("^stop", ahead.told[1])
    assert.equal(ahead.blocks, ahead.free)
    assert.is_nil(ahead.flight)
  end)

  it("end where a cancel comes, and in a callback too", function()
    local seen = 0
    local list = { { prompt = "Once upon a time", max_tokens = 40, on_token = function(request)
      seen = seen + 1
      if seen == 5 then request:cancel() end
    end } }
    local ahead = serve("demo_llama", { ahead = true }, list)
    assert.equal(5, seen)
    assert.equal(5, #ahead.requests[1].output_ids)
    assert.matches("^cancelled", ahead.told[1])
    assert.equal(ahead.blocks, ahead.free)
  end)

  it("make way for requests that join", function()
    local joined
    local ahead = serve("demo_llama", { ahead = true, max_batch = 4 }, { { prompt = "Once upon a time", max_tokens = 20 } }, function(steps, _, engine)
      if steps == 6 then joined = engine:submit { prompt = "The cat", max_tokens = 8 } end
    end)
    local alone = serve("demo_llama", {}, { { prompt = "Once upon a time", max_tokens = 20 }, { prompt = "The cat", max_tokens = 8 } })
    assert.equal(alone.told[1], ahead.told[1])
    assert.equal(alone.told[2], joined.finish_reason .. " " .. table.concat(joined.output_ids, ","))
  end)

  it("keep to a cache that is too small, and to a window", function()
    local plain, ahead = both("demo_llama", { max_batch = 6, cache_tokens = 160 }, mixed(6))
    assert.same(plain.told, ahead.told)
    local list = {}
    for i = 1, 3 do list[i] = { prompt_ids = { 5, 6, 7 + i }, max_tokens = 60, ignore_eos = true } end
    plain, ahead = both("mistral_sliding", { max_batch = 3 }, list)
    assert.same(plain.told, ahead.told)
    assert.is_true(ahead.ahead > 40)
  end)

  it("wait where a draw needs the whole row", function()
    local list = { { prompt = "Once upon a time", max_tokens = 8, temperature = 1, top_k = 5 }, { prompt = "The cat", max_tokens = 8, logprobs = 2 } }
    local plain, ahead = both("demo_llama", { max_batch = 2 }, list)
    assert.same(plain.told, ahead.told)
    assert.equal(0, ahead.ahead)
  end)
end)
