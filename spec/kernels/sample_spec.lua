--- spec/kernels/sample_spec.lua - Gumbel-max with a counter-based generator, over shards of a vocabulary.
local core = require "weft.core"
local ref = require "spec.support.ref"
local ops = core.ops

local nan, inf = 0 / 0, math.huge
local function logits(values) return core.tensor({ 1, #values }, "float32", values) end

describe("ops.philox", function()
  it("is Philox4x32-10: the published answer for counter 0 and key 0", function()
    for lane, word in ipairs { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } do
      assert.equal((word + 0.5) / 2 ^ 32, ops.philox(0, 0, lane - 1))
    end
  end)

  it("depends on seed, position and id, and is spread evenly", function()
    assert.not_equal(ops.philox(1, 0, 0), ops.philox(0, 0, 0))
    assert.not_equal(ops.philox(2 ^ 32, 0, 0), ops.philox(0, 0, 0))
    assert.not_equal(ops.philox(0, 1, 0), ops.philox(0, 0, 0))
    local sum, n = 0, 20000
    for i = 1, n do sum = sum + ops.philox(7, 3, i) end
    assert.is_true(math.abs(sum / n - 0.5) < 0.01)
  end)
end)

describe("ops.sample", function()
  local function draw(values, o)
    o.logits = logits(values)
    local id, value = ops.sample(o)
    return id:get(0), value:get(0)
  end

  it("takes the largest logit at temperature 0, the lower id of equals", function()
    assert.same({ 2, 5 }, { draw({ 1, -3, 5, 5 }, {}) })
    assert.same({ 12, 5 }, { draw({ 1, -3, 5, 5 }, { first = 10 }) })
    assert.same({ 1, 2 }, { draw({ nan, 2, nan }, {}) })
  end)

  it("gives the lowest id and -inf for a row of NaN or of -inf", function()
    for _, temperature in ipairs { 0, 1 } do
      assert.same({ 4, -inf }, { draw({ nan, nan }, { first = 4, temperature = temperature }) })
      assert.same({ 4, -inf }, { draw({ -inf, -inf }, { first = 4, temperature = temperature }) })
    end
  end)

  it("adds to each logit / temperature the Gumbel noise of its own (seed, position, id)", function()
    ref.each_isa(function()
      local x, flat = ref.random({ 1, 1000 }, "float32", 4, 2), nil
      flat = x:totable()
      for trial = 0, 20 do
        local best, best_id = -inf, nil
        for id = 0, 999 do
          local score = flat[id + 1] / 0.7 - math.log(-math.log(ops.philox(trial, trial * 3, id)))
          if score > best then best, best_id = score, id end
        end
        local id, value = ops.sample { logits = x, temperature = 0.7, seed = trial, position = trial * 3 }
        assert.equal(best_id, id:get(0))
        assert.is_true(math.abs(best - value:get(0)) < 1e-5)
      end
    end)
  end)

  it("draws the same id from shards as from the whole vocabulary", function()
    local x = ref.random({ 3, 40000 }, "float32", 5, 3)
    local o = { temperature = { 1, 0.5, 0 }, seed = { 1, 2, 3 }, position = { 9, 8, 7 } }
    o.logits = x
    local id, value = ops.sample(o)
    local best_id, best = {}, { -inf, -inf, -inf }
    for _, shard in ipairs { { 0, 7 }, { 7, 13333 }, { 13340, 26660 } } do
      o.logits, o.first = x:narrow(1, shard[1], shard[2]), shard[1]
      local i, v = ops.sample(o)
      for r = 1, 3 do
        if v:get(r - 1) > best[r] then best[r], best_id[r] = v:get(r - 1), i:get(r - 1) end
      end
    end
    assert.same({ best_id, best }, { id:totable(), value:totable() })
  end)

  it("follows softmax: a token of probability 0.25 is drawn a quarter of the time", function()
    local x, hits = logits { math.log(0.25), math.log(0.5), math.log(0.25) }, { 0, 0, 0 }
    for position = 1, 4000 do
      local id = ops.sample { logits = x, temperature = 1, seed = 42, position = position }:get(0)
      hits[id + 1] = hits[id + 1] + 1
    end
    assert.is_true(math.abs(hits[1] - 1000) < 110 and math.abs(hits[2] - 2000) < 130)
  end)

  it("does nothing for no rows and refuses a negative temperature", function()
    assert.same({ 0 }, ops.sample { logits = core.tensor { 0, 5 } }.shape)
    assert.error_matches(function() draw({ 1 }, { temperature = -1 }) end, "temperature must be 0 or more, got -1", 1, true)
    assert.error_matches(function() draw({ 1 }, { temperature = 1, seed = 0.5 }) end, "seed: expected an integer", 1, true)
  end)
end)
