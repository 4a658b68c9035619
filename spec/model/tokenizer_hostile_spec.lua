--- spec/model/tokenizer_hostile_spec.lua - files that are not what they should be.
local core = require "weft.core"
local support = require "spec.support.tokenizers"

local array = core.json.array

local function refused(config, code, ...)
  local tokenizer, message, found = support.parse(config)
  assert.is_nil(tokenizer)
  assert.equal(code, found, message)
  for _, part in ipairs { "made.json: ", ... } do assert.is_truthy(message:find(part, 1, true), message) end
  assert.is_nil(message:find("\n", 1, true), "more than one line")
end

--- A tiny right file with one field of the top or of the model changed.
local function changed(changes, model)
  local config = support.plain_config({ "a", "b", "ab" }, changes)
  config.model.merges = { "a b" }
  for key, value in pairs(model or {}) do config.model[key] = value end
  return config
end

describe("a tokenizer file", function()
  it("that is missing is nil, a message with its name, and a code", function()
    local tokenizer, message, code = core.tokenizer.load "spec/fixtures/no-such-folder"
    assert.is_nil(tokenizer)
    assert.equal("io", code)
    assert.is_truthy(message:find("spec/fixtures/no-such-folder", 1, true))
    _, message, code = core.tokenizer.load "spec/fixtures/models/llama_mqa_tied"
    assert.equal("io", code)
    assert.is_truthy(message:find("llama_mqa_tied/tokenizer.json", 1, true))
  end)

  it("may be named itself", function()
    assert.equal(1032, support.load("tokenizers/mini-llama3/tokenizer.json").vocab_size)
  end)

  it("cut anywhere is refused as no JSON", function()
    local text = support.read "tokenizers/mini-llama3/tokenizer.json"
    for cut = 0, #text - 2, 997 do
      local tokenizer, message, code = core.tokenizer.parse(text:sub(1, cut), "cut.json")
      assert.is_nil(tokenizer)
      assert.equal("format", code)
      assert.is_truthy(message:find("cut.json: not JSON", 1, true))
    end
  end)

  it("nested deeply is refused, not followed", function()
    local deep = ("["):rep(100000) .. ("]"):rep(100000)
    assert.equal("format", select(3, core.tokenizer.parse(deep)))
    local part = '{"type":"ByteLevel"}'
    for _ = 1, 200 do part = '{"type":"Sequence","pretokenizers":[' .. part .. "]}" end
    local _, message, code = core.tokenizer.parse('{"model":{"vocab":{},"merges":[]},"pre_tokenizer":' .. part .. "}")
    assert.equal("format", code)
    assert.is_truthy(message:find("nested more than", 1, true))
  end)

  it("with a field of another type is refused with the field, what was wanted and found", function()
    refused(array { 5 }, "format", "the file: wanted an object, found an array")
    refused({ model = 7 }, "format", "model: wanted an object, found 7")
    refused(changed(nil, { vocab = 3 }), "format", "model.vocab")
    refused(changed(nil, { vocab = { a = -1 } }), "format", 'model.vocab["a"]', "-1")
    refused(changed(nil, { vocab = { a = 2 ^ 40 } }), "format", "from 0 to 4194303")
    refused(changed(nil, { vocab = { a = 0.5 } }), "format", "a number")
    refused(changed(nil, { vocab = { a = 1, b = 1 } }), "format", "id 1 is both")
    refused(changed(nil, { merges = "a b" }), "format", "model.merges", "an array")
    refused(changed(nil, { byte_fallback = "yes" }), "format", "model.byte_fallback: wanted true or false")
    refused(changed(nil, { unk_token = "x" }), "format", "model.unk_token")
    refused(changed { added_tokens = { { id = 9 } } }, "format", "added_tokens[0].content", "nothing")
    refused(changed { added_tokens = { { id = "9", content = "x" } } }, "format", "added_tokens[0].id", '"9"')
    refused(changed { added_tokens = { { id = 9, content = "x", special = 1 } } }, "format", "added_tokens[0].special")
    refused(changed { added_tokens = { { id = 9, content = "a" } } }, "format", "'a' has the ids 0 and 9")
    refused(changed { added_tokens = { { id = 0, content = "x" } } }, "format", "id 0 is both 'a' and 'x'")
    refused(changed { decoder = { type = "Strip", content = " " } }, "unsupported", "decoder")
    refused(changed { pre_tokenizer = { type = "Split", pattern = { String = "" }, behavior = "Isolated" } }, "format", "pattern")
    refused(changed { pre_tokenizer = { type = "Split", pattern = { Regex = "(" }, behavior = "Isolated" } }, "format", "pattern")
    refused(changed { pre_tokenizer = { type = "Split", pattern = { String = "a" }, behavior = "Sideways" } }, "format", "behavior", "Sideways")
  end)

  it("whose merges lack a part or the result is refused with the merge", function()
    refused(changed(nil, { merges = { "a" } }), "format", "model.merges[0]")
    refused(changed(nil, { merges = { "a b", "a b c" } }), "format", "model.merges[1]")
    refused(changed(nil, { merges = { array { "a" } } }), "format", "model.merges[0]")
    refused(changed(nil, { merges = { " b" } }), "format", "its part '' is not in model.vocab")
    refused(changed(nil, { merges = { "x b" } }), "format", "its part 'x' is not in model.vocab")
    refused(changed(nil, { merges = { "b a" } }), "format", "its result 'ba' is not in model.vocab")
  end)

  it("that asks for a part that weft does not have is refused by its name", function()
    refused(changed(nil, { type = "WordPiece" }), "unsupported", "WordPiece")
    refused(changed(nil, { type = "Unigram" }), "unsupported", "Unigram")
    refused(changed(nil, { dropout = 0.1 }), "unsupported", "model.dropout")
    refused(changed(nil, { end_of_word_suffix = "</w>" }), "unsupported", "model.end_of_word_suffix")
    refused(changed { normalizer = { type = "BertNormalizer" } }, "unsupported", "normalizer", "BertNormalizer")
    refused(changed { pre_tokenizer = { type = "UnicodeScripts" } }, "unsupported", "pre_tokenizer", "UnicodeScripts")
    refused(changed { post_processor = { type = "BertProcessing" } }, "unsupported", "post_processor", "BertProcessing")
    refused(changed { decoder = { type = "CTC" } }, "unsupported", "decoder", "CTC")
  end)

  it("whose template does not fit is refused", function()
    local function template(single, tokens)
      return changed { post_processor = { type = "TemplateProcessing", single = array(single), special_tokens = tokens or {} } }
    end
    local text = { Sequence = { id = "A" } }
    refused(template {}, "format", "no Sequence A")
    refused(template { text, text }, "format", "single[1]")
    refused(template { { SpecialToken = { id = "x" } }, text }, "format", 'special_tokens["x"].ids')
    refused(template({ { SpecialToken = { id = "x" } }, text }, { x = { ids = { 70 } } }), "format", "ids of the vocabulary, found 70")
  end)

  it("with an expression that runs away fails on the text, and does not hang", function()
    local tokenizer = assert(support.parse(support.bytes_config {
      pre_tokenizer = { type = "Split", pattern = { Regex = "(a+)+$|(a*)*b" }, behavior = "Isolated" },
    }))
    local ok, failure = pcall(tokenizer.encode, tokenizer, ("a"):rep(200) .. "!")
    if not ok then assert.is_truthy(tostring(failure):find("gave up on this text", 1, true)) end
  end)
end)

describe("a damaged tokenizer file", function()
  local function use(tokenizer)
    local ok, ids = pcall(tokenizer.encode, tokenizer, "<|eot_id|> The word's 12345 <both> \195\169 \255 <norm>")
    if ok then
      local stream, pieces = tokenizer:stream(), {}
      for _, id in ipairs(ids) do pieces[#pieces + 1] = stream:push(id) end
      pieces[#pieces + 1] = stream:finish()
      assert.equal(tokenizer:decode(ids), table.concat(pieces))
    end
    tokenizer:close()
  end

  for _, path in ipairs { "tokenizers/mini-llama3/tokenizer.json", "models/stories260K/hf-f32/tokenizer.json" } do
    it("is refused or works, and never crashes: " .. path, function()
      collectgarbage() collectgarbage()
      local before, text = core.live_objects(), support.read(path)
      local pieces = { '"', "{", "}", "[", "]", ",", ":", "null", "true", "-1", "99999999999", '"type"', "\\u0000", "\\", "(", "1e400", "\255" }
      math.randomseed(20240726)
      local worked = 0
      for _ = 1, 600 do
        local damaged = text
        for _ = 1, math.random(3) do
          -- Half of the damage falls on the parts before and behind the long lists.
          local at = math.random() < 0.5 and math.random(#text) or math.random(math.min(#text, 3000))
          local gone = math.random() < 0.5 and math.random(0, 3) or math.random(0, 60)
          damaged = damaged:sub(1, at - 1) .. (math.random() < 0.6 and pieces[math.random(#pieces)] or "") .. damaged:sub(at + gone)
        end
        local tokenizer, message = core.tokenizer.parse(damaged, "damaged.json")
        if tokenizer then
          worked = worked + 1
          use(tokenizer)
        else
          assert.is_truthy(message:find("^damaged.json: [^%c]+$"), message)
        end
      end
      assert.is_true(worked > 0 and worked < 600)
      collectgarbage() collectgarbage()
      assert.equal(before, core.live_objects())
    end)

    it("is refused or works when a value is of another kind: " .. path, function()
      local values = { core.json.null, true, -1, 3, 0.5, "", "x", array {}, {}, { type = "Sequence" }, 2 ^ 52 }
      local function damage(value)
        if type(value) ~= "table" then return end
        local keys = {}
        for key in pairs(value) do keys[#keys + 1] = key end
        table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
        for n, key in ipairs(keys) do
          if n > 20 then break end
          local kept = value[key]
          damage(kept)
          value[key] = values[math.random(#values)]
          coroutine.yield(true)
          value[key] = kept
        end
      end
      math.randomseed(5)
      local config, tries = assert(core.json.decode(support.read(path))), 0
      for _ in coroutine.wrap(function() damage(config) end) do
        local tokenizer, message = support.parse(config)
        tries = tries + 1
        if tokenizer then use(tokenizer) else assert.is_truthy(message:find("^made.json: "), message) end
      end
      assert.is_true(tries > 40)
    end)
  end
end)
