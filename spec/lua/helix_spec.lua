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
  local function both(model)
    return helix.points(model, gpu, "one", 64, tokens), helix.points(model, gpu, "helix", 64, tokens)
  end

  it("lets attention at fewer heads win for Llama-405B beyond 8 GPUs: more speed a user and larger batches", function()
    local one, other = both(helix.llama)
    local result = helix.compare(one, other)
    assert.is_true(result.interactivity > 1 and result.interactivity < 1.3) -- the paper: 1.13
    assert.is_true(result.batch >= 4) -- the paper: 4
    assert.is_true(result.fastest_helix.plan.kvp > 1)
    for _, p in ipairs(one) do assert.is_true(p.plan.gpus > 1) end -- one GPU does not hold the model and a request
  end)

  it("lets it win by far with one effective KV head", function()
    local result = helix.compare(both(helix.deepseek))
    assert.is_true(result.interactivity > 1.2 and result.interactivity < 2.5) -- the paper: 1.5
    assert.is_true(result.batch >= 16) -- the paper: 32
    assert.equal(1, result.fastest_helix.plan.tpa)
  end)

  it("keeps plans within the KV heads, on powers of two, and batches within memory", function()
    for _, p in ipairs(helix.points(helix.llama, gpu, "helix", 64, tokens)) do
      assert.is_true(p.plan.tpa <= 8)
      assert.equal(p.plan.gpus, p.plan.tpa * p.plan.kvp)
      assert.is_true(p.batch <= helix.largest_batch(helix.llama, gpu, p.plan, tokens))
    end
  end)
end)
