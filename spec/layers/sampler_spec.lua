-- spec/layers/sampler_spec.lua - drawing tokens: filters, distribution, and the cut vocabulary (DESIGN 10).
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"

local sampler = core.sampler

local function row(values) return core.tensor({ #values }, "float32", values) end

-- How often each id is drawn over the seeds 1 .. n.
local function counts(logits, params, n)
  local found = {}
  for seed = 1, n do
    params.seed, params.position = seed, seed % 7
    local id = sampler.draw(logits, params)
    found[id] = (found[id] or 0) + 1
  end
  return found
end

local function drawn_ids(logits, params, n)
  local ids = {}
  for id in pairs(counts(logits, params, n)) do ids[#ids + 1] = id end
  table.sort(ids)
  return ids
end

describe("core.sampler.draw", function()
  it("takes the largest logit at temperature 0, the lower id of equal ones, never a NaN", function()
    assert.equal(2, sampler.draw(row { 1, 3, 5, 5, 0 / 0, 2 }, {}))
    assert.equal(1, sampler.draw(row { -math.huge, -5 }, { temperature = 0, top_k = 1, top_p = 0.1 }))
  end)

  it("follows softmax(logits / temperature)", function()
    local logits, n = { 1, 0, 2, -1, 0.5 }, 4000
    for _, temperature in ipairs { 1, 0.5 } do
      local found, total = counts(row(logits), { temperature = temperature }, n), 0
      for _, x in ipairs(logits) do total = total + math.exp(x / temperature) end
      for i, x in ipairs(logits) do
        local p = math.exp(x / temperature) / total
        local sigma = math.sqrt(n * p * (1 - p))
        assert.is_true(math.abs((found[i - 1] or 0) - n * p) < 4.5 * sigma + 1)
      end
    end
  end)

  it("keeps the k largest, and those equal to the last of them", function()
    local logits = row { 1, 1.2, 0.9, 1.1, 1, 0.5 }
    assert.same({ 1 }, drawn_ids(logits, { temperature = 1, top_k = 1 }, 50))
    assert.same({ 1, 3 }, drawn_ids(logits, { temperature = 1, top_k = 2 }, 100))
    assert.same({ 0, 1, 3, 4 }, drawn_ids(logits, { temperature = 1, top_k = 3 }, 300))
    assert.same({ 0, 1, 2, 3, 4, 5 }, drawn_ids(logits, { temperature = 1, top_k = 99 }, 500))
  end)

  it("keeps the fewest ids that have the probability top_p together", function()
    local p = { 0.1, 0.4, 0.3, 0.2 }
    for i = 1, 4 do p[i] = math.log(p[i]) end
    assert.same({ 1 }, drawn_ids(row(p), { temperature = 1, top_p = 0 }, 100))
    assert.same({ 1 }, drawn_ids(row(p), { temperature = 1, top_p = 0.39 }, 100))
    assert.same({ 1, 2 }, drawn_ids(row(p), { temperature = 1, top_p = 0.5 }, 200))
    assert.same({ 1, 2, 3 }, drawn_ids(row(p), { temperature = 1, top_p = 0.85 }, 300))
  end)

  it("finds the same nucleus in a long row as by sorting all of it", function()
    local logits = fixtures.random({ 3000 }, 5, 3)
    local values, order, total, sum, kept = logits:totable(), {}, 0, 0, {}
    for i, x in ipairs(values) do order[i], total = i, total + math.exp(x) end
    table.sort(order, function(a, b) return values[a] > values[b] end)
    for _, i in ipairs(order) do
      if sum >= 0.3 * total then break end
      kept[i - 1], sum = true, sum + math.exp(values[i])
    end
    for _, id in ipairs(drawn_ids(logits, { temperature = 1, top_p = 0.3 }, 300)) do assert.is_true(kept[id]) end
  end)

  it("drops what has less than min_p of the largest probability", function()
    local logits = row { 0, math.log(0.5), math.log(0.2), math.log(0.05) }
    assert.same({ 0, 1 }, drawn_ids(logits, { temperature = 1, min_p = 0.3 }, 200))
    assert.same({ 0, 1, 2 }, drawn_ids(logits, { temperature = 1, min_p = 0.1 }, 300))
  end)

  it("penalises ids of the history once, towards less likely", function()
    assert.equal(1, sampler.draw(row { 4, 3, 1 }, { repetition_penalty = 2, history = { 0, 0, 0 } }))
    assert.equal(0, sampler.draw(row { 4, 1.9, 1 }, { repetition_penalty = 2, history = { 0, 0, 0 } }))
    assert.equal(1, sampler.draw(row { -1, -1.5 }, { repetition_penalty = 2, history = { 0, 77 } }))
  end)

  it("applies temperature before top-p: a hotter row keeps more", function()
    local logits = row { 3, 2, 1, 0 }
    assert.equal(1, #drawn_ids(logits, { temperature = 0.2, top_p = 0.9 }, 200))
    assert.equal(4, #drawn_ids(logits, { temperature = 50, top_p = 0.9 }, 300))
  end)

  it("refuses parameters out of range", function()
    local logits = row { 1, 2 }
    assert.error_matches(function() sampler.draw(logits, { top_p = 1.5 }) end, "top_p must be from 0 to 1", 1, true)
    assert.error_matches(function() sampler.draw(logits, { temperature = -1 }) end, "temperature", 1, true)
    assert.error_matches(function() sampler.draw(logits, { repetition_penalty = 0 }) end, "repetition_penalty", 1, true)
    assert.error_matches(function() sampler.draw(logits, { topk = 3 }) end, "topk", 1, true)
    assert.error_matches(function() sampler.draw(core.tensor { 2, 2 }, {}) end, "one dense row", 1, true)
  end)
end)

describe("core.sampler.logprobs", function()
  it("gives the best of a row, best first, and any id's own", function()
    local top, own = sampler.logprobs(row { 0, math.log(3), math.log(4) }, 2, 0)
    assert.same({ 2, 1 }, { top[1].id, top[2].id })
    assert.is_true(fixtures.difference({ math.log(4 / 8), math.log(3 / 8), math.log(1 / 8) }, { top[1].logprob, top[2].logprob, own }) < 1e-6)
    assert.same({}, (sampler.logprobs(row { 1 }, 0)))
  end)
end)

describe("weft.sampler", function()
  local VOCAB, HIDDEN, ROWS = 1010, 8, 6

  local function run(vocab)
    fixtures.join_tensor_group()
    local head = core.lm_head { vocab_size = vocab, hidden_size = HIDDEN }:load(fixtures.source("w", { vocab, HIDDEN }, 1))
    local drawer = core.sampler.new(head)
    local logits = head:forward(fixtures.random({ ROWS, HIDDEN }, 2, 2))
    local params = { temperature = { 0, 0, 1, 1, 0.5, 2 }, seed = { 1, 2, 3, 4, 5, 6 }, position = { 0, 1, 2, 3, 4, 5 } }
    local ids, all, full = drawer:forward(logits, params), head:gather(logits), {}
    for r = 1, ROWS do
      full[r] = core.sampler.draw(all:select(0, r - 1), { temperature = params.temperature[r], seed = params.seed[r], position = params.position[r] })
    end
    return { ids = ids, full = full }
  end

  it("draws from a cut vocabulary what one rank draws from all of it", function()
    for _, case in ipairs { { VOCAB, 2 }, { VOCAB, 4 }, { 10, 8 } } do
      local vocab, world = unpack(case)
      local whole = core.spawn(1, run, vocab)[1]
      assert.same(whole.full, whole.ids)
      for _, result in ipairs(core.spawn(world, run, vocab)) do assert.same(whole.ids, result.ids) end
    end
  end)

  it("breaks ties between ranks towards the lower id", function()
    for _, ids in ipairs(core.spawn(2, function()
      fixtures.join_tensor_group()
      local logits = core.tensor { 2, 64 }
      return core.sampler.new { vocab_size = 128 }:forward(logits, { temperature = { 0, 0 }, seed = { 1, 2 }, position = { 0, 0 } })
    end)) do
      assert.same({ 0, 0 }, ids)
    end
  end)

  it("takes temperatures, seeds and positions from a step", function()
    local drawer, logits = core.sampler.new { vocab_size = 64 }, fixtures.random({ 2, 64 }, 9)
    local step = core.step():build { requests = {
      { ids = { 1, 2, 3 }, start = 0, sample = true, temperature = 1, seed = 5 },
      { ids = { 4 }, start = 7, sample = true, temperature = 0, seed = 6 },
    } }
    local wanted = drawer:forward(logits, { temperature = { 1, 0 }, seed = { 5, 6 }, position = { 3, 8 } })
    assert.same(wanted, drawer:forward_step(logits, step))
    assert.error_matches(function() drawer:forward_step(core.tensor { 3, 64 }, step) end, "logits of the step's 2 rows", 1, true)
  end)

  it("wants one temperature, seed and position for each row", function()
    local drawer = core.sampler.new { vocab_size = 64 }
    local function forward(t) return drawer:forward(core.tensor { 2, 64 }, t) end
    assert.same({ 0, 0 }, forward { temperature = { 0, 0 }, seed = { 0, 0 }, position = { 0, 0 } })
    assert.error_matches(function() forward { temperature = { 0 }, seed = { 0, 0 }, position = { 0, 0 } } end,
      "temperature must be a table of 2 numbers", 1, true)
    assert.error_matches(function() forward { temperature = { 0, -1 }, seed = { 0, 0 }, position = { 0, 0 } } end, "0 or more", 1, true)
    assert.error_matches(function() forward { temperature = { 0, 0 }, seed = { 0, 0.5, 1 }, position = { 0, 0 } } end, "seed must be", 1, true)
  end)
end)
