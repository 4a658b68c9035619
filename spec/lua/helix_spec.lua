-- spec/lua/helix_spec.lua - the figures of the Helix paper come out of the roofline.
local helix = require "weft.plan.helix"

local shape, gpu, tokens = helix.llama, helix.gpu, 1e6

local function microseconds(sizes, time)
  local list = {}
  for i, n in ipairs(sizes) do list[i] = math.floor(time(n) * 1e7 + 0.5) / 10 end
  return list
end

describe("the Helix roofline", function()
  it("reads the cache in 1024 us on one GPU, and in 128 us from 8 KV heads on, however many hold copies", function()
    local kv = microseconds({ 1, 2, 4, 8, 16, 32, 64 }, function(n) return helix.kv_time(shape, gpu, { tpa = n, kvp = 1, tpf = n }, 8, tokens) end)
    assert.same({ 1024, 512, 256, 128, 128, 128, 128 }, kv)
  end)

  it("reads it in 128 to 8 us when 1 to 16 GPUs share the sequence at 8 heads", function()
    local kv = microseconds({ 1, 2, 4, 8, 16 }, function(n) return helix.kv_time(shape, gpu, { tpa = 8, kvp = n, tpf = 8 * n }, 8, tokens) end)
    assert.same({ 128, 64, 32, 16, 8 }, kv)
  end)

  it("reads the weights in 237 to 3.9 us on 1 to 64 GPUs", function()
    local weights = microseconds({ 1, 2, 4, 8, 16, 32, 64 }, function(n) return helix.weight_time(shape, gpu, { tpa = n, kvp = 1, tpf = n }, 8) end)
    for i, figure in ipairs { 237, 118.5, 59.2, 29.6, 14.9, 7.6, 3.9 } do assert.near(figure, weights[i], 0.06) end
  end)

  it("hides the exchange of each request under the attention of the next", function()
    assert.near(25.6, helix.without_overlap(8, 2, 1.2), 1e-9)
    assert.near(17.2, helix.with_overlap(8, 2, 1.2), 1e-9)
    assert.near(25, helix.with_overlap(8, 1, 3), 1e-9) -- an exchange longer than the attention shows
  end)
end)

describe("the search with it", function()
  local function over(family, model)
    return helix.compare(helix.points(model, gpu, family, 64, tokens), helix.points(model, gpu, "helix", 64, tokens))
  end

  it("gives the paper's ratios for Llama-405B: 1.13 times interactivity, 4 times the batch", function()
    for _, family in ipairs { "one", "earlier" } do
      local result = over(family, helix.llama)
      assert.near(1.13, result.interactivity, 0.05)
      assert.equal(4, result.batch)
      assert.same({ 64, 8, 8 }, { result.fastest_other.plan.gpus, result.fastest_other.plan.tpa, result.fastest_other.plan.kvp })
      assert.equal(result.batch_one.plan.gpus, result.batch_other.plan.gpus)
    end
    for _, p in ipairs(helix.points(helix.llama, gpu, "one", 64, tokens)) do
      assert.is_true(p.plan.gpus > 1) -- one GPU does not hold the model and a request
    end
  end)

  it("gives 32 times the batch with one effective KV head, and interactivity on both sides of the paper's 1.5", function()
    local one, earlier = over("one", helix.deepseek), over("earlier", helix.deepseek)
    assert.equal(32, one.batch)
    assert.is_true(earlier.interactivity > 1.1 and earlier.interactivity < 1.5 and one.interactivity > 1.5)
    assert.equal(1, one.fastest_other.plan.tpa)
  end)

  it("keeps plans within the KV heads, on powers of two, and batches within memory", function()
    for _, p in ipairs(helix.points(helix.llama, gpu, "helix", 64, tokens)) do
      assert.is_true(p.plan.tpa <= 8)
      assert.equal(p.plan.gpus, p.plan.tpa * p.plan.kvp)
      assert.is_true(p.batch <= helix.largest_batch(helix.llama, gpu, p.plan, tokens))
    end
  end)
end)
