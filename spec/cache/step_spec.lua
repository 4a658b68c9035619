-- spec/cache/step_spec.lua - one step as one flat record, checked where it is made and where it is read.
local core = require "weft.core"

local function two_requests()
  return {
    block_tokens = 4,
    requests = {
      { ids = { 11, 12, 13 }, start = 6, blocks = { 5, 2, 9 }, logits = "last", temperature = 0.5, seed = 77 },
      { ids = 21, start = 0, blocks = { 1 }, sample = true },
    },
  }
end

-- Replaces the 32-bit little-endian word at byte offset `at` of a record.
local function patch(record, at, value)
  local bytes = {}
  for i = 0, 3 do bytes[i + 1] = string.char(math.floor(value / 256 ^ i) % 256) end
  return record:sub(1, at) .. table.concat(bytes) .. record:sub(at + 5)
end

describe("a step", function()
  it("lays a ragged batch out flat", function()
    local step = core.step():build(two_requests())
    assert.equal("forward", step.kind)
    assert.same({ 4, 2, 2 }, { step.num_tokens, step.num_requests, step.num_logits })
    assert.same({ 11, 12, 13, 21 }, step.ids:totable())
    assert.same({ 6, 7, 8, 0 }, step.positions:totable())
    assert.same({ 0, 3, 4 }, step.query_start_loc:totable())
    assert.same({ 9, 1 }, step.seq_lens:totable())
    assert.same({ 5, 2, 9, 1, 0, 0 }, step.block_table:totable())
    assert.same({ 2, 3 }, step.logits_indices:totable())
    assert.same({ 9, 1 }, step.sample_positions:totable())
    assert.same({ 0.5, 0 }, step.temperature:totable())
    assert.same({ 77, 0 }, step.seeds)
    assert.equal(6, step.max_context_len)
    assert.equal("int32[4]", tostring(step.ids))
  end)

  it("is the same from flat lists", function()
    local by_request = core.step():build(two_requests())
    local by_list = core.step():build {
      ids = { 11, 12, 13, 21 }, query_start_loc = { 0, 3, 4 }, seq_lens = { 9, 1 }, positions = { 6, 7, 8, 0 },
      block_table = { { 5, 2, 9 }, { 1 } }, block_tokens = 4, logits_indices = { 2, 3 }, temperature = { 0.5, 0 }, seed = { 77, 0 },
    }
    assert.equal(by_request:record(), by_list:record())
  end)

  it("takes false for a block that was given back, and keeps its place", function()
    local step = core.step():build { block_tokens = 4, requests = { { ids = 1, start = 9, blocks = { false, 6, 2 } } } }
    assert.same({ 0, 6, 2 }, step.block_table:totable())
    assert.has_error(function() core.step():build { block_tokens = 4, requests = { { ids = 1, blocks = { true } } } } end)
  end)

  it("gives logits of the last row, of all rows or of none", function()
    local function rows(logits)
      return core.step():build({ requests = { { ids = { 1, 2, 3 }, logits = logits } } }).logits_indices:totable()
    end
    assert.same({ 2 }, rows "last")
    assert.same({ 0, 1, 2 }, rows "all")
    assert.same({}, rows "none")
    assert.same({}, rows())
  end)

  it("carries flags, a bucket, padding and a payload", function()
    local step = core.step():build {
      requests = { { ids = { 1 } } }, pad_to = 3, bucket = 8, gather_logits = true, want_hidden = true, payload = "a\0b",
    }
    assert.same({ 3, 8, true, true, "a\0b" }, { step.num_tokens, step.bucket, step.gather_logits, step.want_hidden, step.payload })
    assert.same({ 1, 0, 0 }, step.ids:totable())
    assert.equal("stop", core.step():build({ kind = "stop" }).kind)
    assert.equal("replan", core.step():build({ kind = "command", payload = "replan" }).payload)
  end)

  it("crosses as bytes and comes out equal", function()
    local step = core.step():build(two_requests())
    local copy = core.step():decode(step:record())
    assert.equal(step:record(), copy:record())
    assert.same(step.block_table:totable(), copy.block_table:totable())
    assert.equal(6, copy.max_context_len)
  end)

  it("allocates nothing once it was as large before", function()
    local step = core.step()
    local request = { ids = {}, start = 0, blocks = {}, sample = true }
    local options = { block_tokens = 16, requests = { request } }
    for i = 1, 2000 do request.ids[i] = i end
    for i = 1, 125 do request.blocks[i] = i end
    step:build(options)
    local before = core.memory().allocations
    for _ = 1, 5 do step:build(options) end
    step:build(two_requests())
    assert.equal(before, core.memory().allocations)
  end)

  it("keeps the memory of a view that outlives it", function()
    local step = core.step():build { requests = { { ids = { 4, 5, 6 } } } }
    local ids = step.ids
    local big = { ids = {} }
    for i = 1, 5000 do big.ids[i] = i end
    step:build { requests = { big } }
    step:close()
    collectgarbage() collectgarbage()
    assert.same({ 4, 5, 6 }, ids:totable())
  end)

  describe("behind another one", function()
    -- Three requests at 7, 3 and 11 tokens and one more in each step; blocks of 4 tokens.
    local function decode(step, ids, tables)
      local requests = {}
      for i, start in ipairs { 7, 3, 11 } do
        requests[i] = { ids = { ids[i] }, start = start + step, blocks = tables[i], sample = true, temperature = i / 2, seed = 10 + i }
      end
      return { block_tokens = 4, pad_to = 4, graph = true, requests = requests }
    end

    it("is what a build of one more token for each would be, with the blocks that requests have got", function()
      local tables = { { 5, 2 }, { 1 }, { 4, 9, 7 } }
      local steps = { core.step():build(decode(0, { 21, 22, 23 }, tables)), core.step() }
      for n = 1, 6 do
        local grown
        for i, start in ipairs { 7, 3, 11 } do
          if math.ceil((start + n + 1) / 4) > #tables[i] then
            table.insert(tables[i], 10 * n + i)
            grown = grown or {}
            grown[i] = tables[i]
          end
        end
        local previous, step = steps[2 - n % 2], steps[1 + n % 2]
        assert.is_true(step:follow(previous, grown))
        assert.equal(core.step():build(decode(n, { -1, -2, -3 }, tables)):record(), step:record())
      end
    end)

    it("needs a record whose requests draw one token each, and blocks as many as tokens ask for", function()
      local step, ready = core.step(), core.step():build(decode(0, { 1, 2, 3 }, { { 5, 2 }, { 1 }, { 4, 9, 7 } }))
      assert.is_false(step:follow(core.step():build(two_requests())))
      assert.is_false(step:follow(core.step():build { kind = "command", payload = "x" }))
      assert.is_false(step:follow(core.step()))
      assert.has_error(function() step:follow(step) end)
      local _, raised = pcall(step.follow, step, ready)
      assert.equal("request 2 has 13 tokens, which need 4 blocks of 4, and its table holds 3", raised.message)
      assert.has_error(function() step:follow(ready, { { 5, 2, -8 }, { 1, 3 }, { 4, 9, 7, 6 } }) end)
      assert.has_error(function() step:follow(ready, { 7 }) end, "the blocks of row 1 must be a list, got number")
    end)
  end)

  it("refuses a batch that is not sound, and says where", function()
    local function refused(message, change)
      local t = two_requests()
      change(t)
      assert.error_matches(function() core.step():build(t) end, message, 1, true)
    end
    refused("request 0 has 9 tokens, which need 3 blocks of 4, and its table holds 2", function(t) t.requests[1].blocks = { 5, 2 } end)
    refused("request 1 has no tokens", function(t) t.requests[2].ids = {} end)
    refused("ids must be an integer, got string", function(t) t.requests[1].ids[2] = "x" end)
    refused("block 1 of request 0 has id -3", function(t) t.requests[1].blocks[2] = -3 end)
    refused("a request has no field 'strat'", function(t) t.requests[1].strat = 4 end)
    refused("temperature of row 2 is -1", function(t) t.requests[1].temperature = -1 end)
    refused("logits must be 'none', 'last' or 'all', got 'some'", function(t) t.requests[1].logits = "some" end)
    refused("unknown kind of step 'walk'", function(t) t.kind = "walk" end)
    refused("a step of 4 tokens in a bucket of 2", function(t) t.bucket = 2 end)
    refused("pad_to must be an integer from 4", function(t) t.pad_to = 3 end)
    assert.error_matches(function() core.step():build { ids = { 1, 2 }, query_start_loc = { 0, 2 }, seq_lens = { 4 }, positions = { 2, 2 } } end,
      "token 1 of request 0 is at position 2, wanted 3", 1, true)
    assert.error_matches(function() core.step():build { ids = { 1 }, query_start_loc = { 0, 2 }, seq_lens = { 4 } } end,
      "request 0 of a step has tokens 0 to 2 of 1", 1, true)
  end)

  it("refuses work until it is built, also after a build that failed", function()
    local step = core.step()
    assert.error_matches(function() step:record() end, "the step was not built", 1, true)
    assert.equal("weft.step (not built)", tostring(step))
    pcall(step.build, step, { requests = { { ids = { 1, "x" } } } })
    assert.error_matches(function() return step.ids end, "the step was not built", 1, true)
    step:build { requests = { { ids = 1 } } }
    assert.equal(1, step.num_tokens)
  end)

  it("refuses a malformed record, wherever it is cut or changed", function()
    local record = core.step():build(two_requests()):record()
    local step = core.step()
    for _, bytes in ipairs { 0, 10, 63, 64, #record - 1 } do
      assert.has_error(function() step:decode(record:sub(1, bytes)) end)
    end
    assert.has_error(function() step:decode(record .. "x") end)
    assert.error_matches(function() step:decode(patch(record, 0, 1)) end, "format", 1, true)
    -- Every word of the header and arrays set to something huge, negative or merely other.
    for at = 0, #record - 4, 4 do
      for _, value in ipairs { 0x7fffffff, 0xffffffff, 0x80000000, 3 } do
        pcall(step.decode, step, patch(record, at, value))
      end
    end
    assert.error_matches(function() step:decode(patch(record, 32, 0)) end, "reading a step record", 1, true) -- max_context_len
    assert.equal("weft.step (not built)", tostring(step))
    assert.equal(4, step:decode(record).num_tokens)
  end)

  it("publishes to nobody in a world of one", function()
    assert.has_no.errors(function() core.step():build({ kind = "stop" }):publish() end)
  end)
end)
