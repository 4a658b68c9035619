-- spec/layers/vocab_spec.lua - the vocabulary cut over ranks: embedding and head (SEMANTICS 4.3).
local core = require "weft.core"
local fixtures = require "spec.layers.fixtures"
local difference, random = fixtures.difference, fixtures.random

local HIDDEN = 6

-- On each rank: embedding of ids, this shard's logits of x, all logits of x.
local function run(vocab, tied)
  local world = fixtures.join_tensor_group()
  local table_source = fixtures.source("embed_tokens.weight", { vocab, HIDDEN }, 1)
  local embedding = core.vocab_embedding { vocab_size = vocab, hidden_size = HIDDEN }:load(table_source)
  local head
  if tied then
    head = core.lm_head { embedding = embedding, logit_scale = 0.5 }
  else
    head = core.lm_head { vocab_size = vocab, hidden_size = HIDDEN, logit_scale = 0.5 }
    head:load(fixtures.source("lm_head.weight", { vocab, HIDDEN }, 2))
  end
  local ids = core.tensor({ 4 }, "int32", { 0, vocab - 1, math.floor(vocab / 2), 3 })
  local logits = head:forward(random({ 3, HIDDEN }, 3))
  return {
    embedded = embedding:forward(ids):totable(), local_logits = logits:totable(), logits = head:gather(logits):totable(),
    shape = head:gather(logits).shape, world = world, padded = head.padded_vocab_size, count = head.local_size,
    real = head.local_real_size, offset = head.offset, bytes = embedding.weight_bytes, head_bytes = head.weight_bytes,
  }
end

describe("the vocabulary over ranks", function()
  it("pads 1010 rows to 1024 over two ranks, and stores none of the padding", function()
    local results = core.spawn(2, run, 1010, false)
    assert.same({ 1024, 512, 0, 512 }, { results[1].padded, results[1].count, results[1].offset, results[1].real })
    assert.same({ 1024, 512, 512, 498 }, { results[2].padded, results[2].count, results[2].offset, results[2].real })
    assert.equal(498 * HIDDEN * 4, results[2].bytes)
    assert.equal(-math.huge, results[2].local_logits[512])
  end)

  for _, case in ipairs { { 1010, 2 }, { 10, 8 }, { 257, 4 }, { 200, 1 } } do
    local vocab, world = unpack(case)
    it(("gives with %d rows on %d ranks what one rank gives"):format(vocab, world), function()
      for _, tied in ipairs { false, true } do
        local whole = core.spawn(1, run, vocab, tied)[1]
        assert.same({ 3, vocab }, whole.shape)
        for _, result in ipairs(core.spawn(world, run, vocab, tied)) do
          assert.same(whole.embedded, result.embedded)
          assert.same(whole.shape, result.shape)
          assert.is_true(difference(whole.logits, result.logits) < 1e-6)
        end
      end
    end)
  end

  it("leaves most ranks without a row when there are few", function()
    for r, result in ipairs(core.spawn(8, run, 10, false)) do
      assert.equal(8, result.count)
      assert.equal(({ 8, 2 })[r] or 0, result.real)
      assert.equal((({ 8, 2 })[r] or 0) * HIDDEN * 4, result.bytes)
    end
  end)

  it("shares the rows of a tied embedding, and scales the logits", function()
    local rows = core.source("w", core.tensor({ 3, 2 }, "float32", { 1, 0, 0, 1, 2, 2 }))
    local embedding = core.vocab_embedding { vocab_size = 3, hidden_size = 2 }:load(rows)
    local head = core.lm_head { embedding = embedding, logit_scale = 0.5 }
    assert.same({ true, 0 }, { head.tied, head.weight_bytes })
    local logits = head:gather(head:forward(core.tensor({ 1, 2 }, "float32", { 4, 6 })))
    assert.same({ 2, 3, 10 }, logits:totable())
    assert.error_matches(function() head:load(rows) end, "tied", 1, true)
    embedding:close()
    assert.same({ 2, 3, 10 }, head:gather(head:forward(core.tensor({ 1, 2 }, "float32", { 4, 6 }))):totable())
  end)

  it("gives float32 logits from bfloat16 weights, and embeddings in the dtype that is asked for", function()
    local rows = fixtures.source("w", { 8, 4 }, 1, 1, "bfloat16")
    local embedding = core.vocab_embedding { vocab_size = 8, hidden_size = 4 }:load(rows)
    local ids = core.tensor({ 1 }, "int32", { 2 })
    assert.equal("bfloat16", embedding:forward(ids).dtype)
    local wide = core.vocab_embedding { vocab_size = 8, hidden_size = 4, output_dtype = "float32" }:load(rows)
    assert.same({ "bfloat16", "float32" }, { wide.dtype, wide:forward(ids).dtype })
    local head = core.lm_head { embedding = embedding }
    assert.equal("float32", head:forward(embedding:forward(ids)).dtype)
  end)

  it("refuses ids outside the vocabulary and work before the weights are there", function()
    local embedding = core.vocab_embedding { vocab_size = 8, hidden_size = 4 }
    local function embed(id) embedding:forward(core.tensor({ 1 }, "int32", { id })) end
    assert.error_matches(function() embed(0) end, "weights of vocab_embedding were not loaded", 1, true)
    assert.error_matches(function() embed(8) end, "token id 8 is outside the vocabulary of 8", 1, true)
    assert.error_matches(function() embed(-1) end, "token id -1", 1, true)
    assert.error_matches(function() embedding:load(fixtures.source("embed_tokens.weight", { 9, 4 }, 1)) end,
      "tensor 'embed_tokens.weight': wanted [8, 4], found [9, 4]", 1, true)
    assert.error_matches(function() core.lm_head { embedding = 3 } end, "embedding must be", 1, true)
  end)
end)
