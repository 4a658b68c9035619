--- spec/model/tokenizer_stream_spec.lua - decoding one id at a time.
local core = require "weft.core"
local support = require "spec.support.tokenizers"

-- Whole characters only? U+FFFD stands for broken ones.
local function is_utf8(text)
  local at = 1
  while at <= #text do
    local lead = text:byte(at)
    local size = lead < 0x80 and 1 or lead >= 0xf0 and 4 or lead >= 0xe0 and 3 or lead >= 0xc0 and 2 or 0
    if size == 0 or at + size - 1 > #text then return false end
    at = at + size
  end
  return true
end

local function streamed(stream, ids)
  local pieces = {}
  for _, id in ipairs(ids) do
    pieces[#pieces + 1] = stream:push(id)
    assert.is_true(is_utf8(pieces[#pieces]), "a piece ends within a character")
  end
  pieces[#pieces + 1] = stream:finish()
  return table.concat(pieces)
end

describe("weft.token_stream", function()
  for _, entry in ipairs(support.golden) do
    it("gives the text of the whole list, whatever the list: " .. entry.name, function()
      local tokenizer = support.load(entry.dir)
      for _, skip in ipairs { true, false } do
        local stream = tokenizer:stream { skip_special = skip }
        for _, case in ipairs(support.json(entry.golden).cases) do
          assert.equal(tokenizer:decode(case.ids, { skip_special = skip }), streamed(stream, case.ids), case.name)
        end
      end
    end)

    it("gives the text of every beginning of a list: " .. entry.name, function()
      local tokenizer = support.load(entry.dir)
      local stream = tokenizer:stream { skip_special = false }
      for _, case in ipairs(support.json(entry.golden).cases) do
        local ids = {}
        for k = 1, math.min(#case.ids, 24) do
          ids[k] = case.ids[k]
          assert.equal(tokenizer:decode(ids, { skip_special = false }), streamed(stream, ids), case.name)
        end
      end
    end)

    it("gives the text of random ids, known and unknown: " .. entry.name, function()
      local tokenizer = support.load(entry.dir)
      local stream = tokenizer:stream()
      math.randomseed(7)
      for _ = 1, 200 do
        local ids = {}
        for k = 1, math.random(12) do ids[k] = math.random(0, math.min(tokenizer.vocab_size + 4, 300)) end
        assert.equal(tokenizer:decode(ids), streamed(stream, ids))
      end
    end)
  end

  it("takes off the leading space at the very start only", function()
    local tokenizer = support.load "models/stories260K/hf-f32"
    local ids = tokenizer:encode("once once", { add_special = false })
    local stream = tokenizer:stream()
    assert.equal("once once", streamed(stream, ids))
    assert.equal("once once", streamed(stream, ids)) -- finish makes it new again
  end)

  it("holds a character back until its last byte, and gives it then", function()
    local tokenizer = support.load "tokenizers/mini-llama3"
    local stream = tokenizer:stream()
    local ids = tokenizer:encode("é", { add_special = false })
    assert.equal(2, #ids)
    assert.equal("", stream:push(ids[1]))
    assert.equal("é", stream:push(ids[2]))
    assert.equal("", stream:push(ids[1]))
    assert.equal("\239\191\189", stream:finish())
  end)

  it("keeps its tokenizer alive, and gives back every object", function()
    collectgarbage() collectgarbage()
    local before = core.live_objects()
    local tokenizer = support.load "models/demo_llama"
    local ids = tokenizer:encode "abc"
    local stream = tokenizer:stream()
    tokenizer:close()
    assert.error_matches(function() tokenizer:encode "x" end, "closed", 1, true)
    assert.equal("abc", streamed(stream, ids))
    stream:close()
    assert.equal(before, core.live_objects())
  end)

  it("says what came instead of an id", function()
    local tokenizer = support.load "models/demo_llama"
    assert.error_matches(function() tokenizer:decode { "a" } end, "wanted token ids, found string", 1, true)
    assert.error_matches(function() tokenizer:stream():push {} end, "wanted token ids, found table", 1, true)
    assert.error_matches(function() tokenizer:encode(5) end, "string expected, got number", 1, true)
    assert.error_matches(function() tokenizer:encode("a", { add_special = 1 }) end, "add_special must be true or false", 1, true)
    assert.equal("", tokenizer:decode { -1, 2 ^ 40, 0.5, 100000 })
  end)
end)
