--- spec/kernels/router_spec.lua - which experts a token gets, and with what weights.
local core = require "weft.core"
local ref = require "spec.support.ref"

-- A plain reference over one row of finite logits.
local function route(logits, bias, k, scoring, renormalize)
  local score, sum = {}, 0
  for e, x in ipairs(logits) do
    score[e] = scoring == "sigmoid" and 1 / (1 + math.exp(-x)) or math.exp(x)
    sum = sum + score[e]
  end
  if scoring ~= "sigmoid" then
    for e in ipairs(score) do score[e] = score[e] / sum end
  end
  local ids, weights, total = {}, {}, 0
  for i = 1, k do
    local best
    for e = 1, #score do
      local taken = false
      for _, id in ipairs(ids) do taken = taken or id == e - 1 end
      if not taken and (not best or score[e] + (bias and bias[e] or 0) > score[best] + (bias and bias[best] or 0)) then best = e end
    end
    ids[i], weights[i] = best - 1, score[best]
    total = total + score[best]
  end
  if renormalize then
    for i in ipairs(weights) do weights[i] = weights[i] / total end
  end
  return ids, weights
end

local function run(rows, options)
  local flat = {}
  for _, row in ipairs(rows) do
    for _, x in ipairs(row) do flat[#flat + 1] = x end
  end
  options.logits = core.tensor({ #rows, #rows[1] }, "float32", flat)
  options.bias = options.bias and core.tensor({ #options.bias }, "float32", options.bias)
  local ids, weights = core.ops.router(options)
  return ids:totable(), weights:totable()
end

local nan, inf = 0 / 0, math.huge

describe("the router", function()
  it("chooses by score plus bias and weighs by the score alone", function()
    local ids, weights = run({ { 2, -1, .5, 0 } }, { bias = { 0, .6, .1, -2 }, top_k = 2, scoring = "sigmoid" })
    assert.same({ 0, 1 }, ids)
    assert.near(.766085, weights[1], 1e-6)
    assert.near(.233915, weights[2], 1e-6)
  end)

  for _, scoring in ipairs { "sigmoid", "softmax" } do
    it("gives what a plain " .. scoring .. " router gives over many rows", function()
      local logits, bias = ref.random({ 33, 16 }, "float32", 3, 4), ref.random({ 16 }, "float32", 4, 0.5)
      local flat, shifts = logits:totable(), bias:totable()
      for _, case in ipairs { { true, shifts }, { false, shifts }, { true } } do
        local ids, weights = core.ops.router { logits = logits, bias = case[2] and bias, top_k = 3, scoring = scoring, renormalize = case[1] }
        for t = 0, 32 do
          local want_ids, want_weights = route(ref.slice(flat, t * 16 + 1, 16), case[2], 3, scoring, case[1])
          assert.same(want_ids, ref.slice(ids:totable(), t * 3 + 1, 3))
          ref.close(ref.slice(weights:totable(), t * 3 + 1, 3), want_weights, 1e-6)
        end
      end
    end)
  end

  it("weighs the chosen logits against each other with softmax_topk", function()
    local ids, weights = run({ { 1, 3, 2, 90 - 88 } }, { top_k = 2, scoring = "softmax_topk" })
    assert.same({ 1, 2 }, ids)
    assert.near(1 / (1 + math.exp(-1)), weights[1], 1e-6)
    assert.near(1 - 1 / (1 + math.exp(-1)), weights[2], 1e-6)
  end)

  it("breaks ties in favour of the lower id", function()
    assert.same({ 0, 1, 2 }, (run({ { 1, 1, 1, 1 } }, { top_k = 3, scoring = "sigmoid" })))
    assert.same({ 1, 3 }, (run({ { 0, 2, 0, 2 } }, { top_k = 2, scoring = "softmax" })))
  end)

  it("chooses distinct experts when every choice is far below zero", function()
    local ids = run({ { 0, 1, 2, 3 } }, { bias = { -20000, -20001, -20002, -20003 }, top_k = 4, scoring = "sigmoid" })
    assert.same({ 0, 1, 2, 3 }, ids)
  end)

  it("counts scores of NaN and infinite ones as zero, and still gives distinct ids", function()
    for _, bad in ipairs { { nan, nan, nan, nan }, { nan, 1, 2, 3 }, { inf, inf, 1, 0 } } do
      local ids, weights = run({ bad }, { top_k = 2, scoring = "softmax" })
      assert.same({ 0, 1 }, ids)
      assert.same({ 0, 0 }, weights)
    end
    local ids, weights = run({ { nan, 1, nan, 3 } }, { top_k = 3, scoring = "sigmoid" })
    assert.same({ 3, 1, 0 }, ids)
    assert.equal(0, weights[3])
    assert.near(1, weights[1] + weights[2], 1e-6)
    assert.same({ 2, 1 }, (run({ { nan, nan, nan } }, { bias = { -1, 0, 1 }, top_k = 2, scoring = "sigmoid" })))
  end)

  it("finds an expert for every choice when the bias is no number", function()
    assert.same({ 2, 0, 1 }, (run({ { 0, 0, 0 } }, { bias = { nan, nan, 0 }, top_k = 3, scoring = "sigmoid" })))
  end)

  it("divides by one when the scores sum to nothing", function()
    local _, weights = run({ { -200, -200 } }, { top_k = 2, scoring = "sigmoid" })
    for _, w in ipairs(weights) do assert.is_true(w >= 0 and w < 1e-30) end
  end)

  it("takes all experts of all when asked, and refuses more", function()
    assert.same({ 1, 0 }, (run({ { 0, 1 } }, { top_k = 2 })))
    assert.has_error(function() run({ { 0, 1 } }, { top_k = 3 }) end, "router: cannot choose 3 of 2 experts")
    assert.has_error(function() run({ { 0, 1 } }, { top_k = 1, scoring = "relu" }) end,
      "scoring must be sigmoid, softmax or softmax_topk, got 'relu'")
  end)

  it("does nothing for no tokens", function()
    local ids = core.ops.router { logits = core.tensor({ 0, 4 }, "float32"), top_k = 2 }
    assert.same({ 0, 2 }, ids.shape)
  end)
end)
