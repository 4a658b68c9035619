--- spec/model/tokenizer_golden_spec.lua - what the reference tokenizers give, case by case.
local support = require "spec.support.tokenizers"

local function join(ids) return table.concat(ids, ",") end

for _, entry in ipairs(support.golden) do
  describe("tokenizer " .. entry.name, function()
    local tokenizer = support.load(entry.dir)
    local golden = support.json(entry.golden)

    it("has the reference's vocabulary", function()
      assert.equal(golden.vocab_size_with_added, tokenizer.vocab_size)
      for _, case in ipairs(golden.cases) do
        for i, id in ipairs(case.ids) do
          local token = tokenizer:token(id)
          assert.equal(id, tokenizer:id(token))
          -- The reference prints the stretch of text where a token swallowed white space.
          if case.tokens and not case.name:find "^added" then assert.equal(case.tokens[i], token) end
        end
      end
    end)

    it("encodes every golden text to the reference's ids", function()
      assert.is_true(#golden.cases > 80)
      for _, case in ipairs(golden.cases) do
        local text = support.unhex(case.text_hex)
        assert.equal(join(case.ids), join(tokenizer:encode(text, { add_special = false })), case.name)
        assert.equal(join(case.ids_with_special), join(tokenizer:encode(text)), case.name)
      end
    end)

    it("decodes every golden list of ids to the reference's text", function()
      for _, case in ipairs(golden.cases) do
        assert.equal(case.decoded, tokenizer:decode(case.ids, { skip_special = false }), case.name)
        assert.equal(case.decoded_skip_special, tokenizer:decode(case.ids), case.name)
      end
    end)
  end)
end

for _, name in ipairs { "gpt2", "mini-llama3", "mini-minimax-m2" } do
  it("encodes 400 texts of random characters as the reference: " .. name, function()
    local tokenizer = support.load("tokenizers/" .. name)
    local cases = support.json("tokenizers/" .. name .. "/fuzz400.json")
    assert.equal(400, #cases)
    for i, case in ipairs(cases) do
      assert.equal(join(case.ids), join(tokenizer:encode(support.unhex(case.h), { add_special = false })), "text " .. i)
    end
  end)
end

for _, name in ipairs { "mini-llama3", "mini-minimax-m2" } do
  it("decodes unfinished and broken characters as the reference: " .. name, function()
    local tokenizer = support.load("tokenizers/" .. name)
    local golden = support.json("tokenizers/" .. name .. "/decode_golden.json")
    for _, case in ipairs(golden.bytes) do
      assert.equal(case.decoded, tokenizer:decode(case.ids), case.bytes)
    end
    for _, case in ipairs(golden.prefix) do
      local ids = {}
      for k = 0, #case.ids do
        ids[k] = case.ids[k]
        assert.equal(case.decode_of_prefix[k + 1], tokenizer:decode(ids, { skip_special = false }), case.name)
      end
    end
  end)
end

it("gives MiniMax-M2's splits", function()
  local known = support.json("tokenizers/minimax-m2/special_tokens.json")
  local config = support.bytes_config {
    pre_tokenizer = {
      type = "Sequence",
      pretokenizers = {
        { type = "Split", pattern = { Regex = known.pre_tokenizer_regex }, behavior = known.split.behavior, invert = known.split.invert },
        { type = "ByteLevel", add_prefix_space = false, use_regex = false },
      },
    },
  }
  -- Whole pieces become visible when they are tokens and merges are ignored.
  local characters = support.byte_characters()
  config.model.ignore_merges = true
  for text, pieces in pairs(known.known_splits) do
    for i, piece in ipairs(pieces) do
      local mapped = piece:gsub(".", function(byte) return characters[byte:byte()] end)
      config.model.vocab[mapped] = config.model.vocab[mapped] or 1000 + i
      pieces[i] = mapped
    end
    local tokenizer = assert(support.parse(config))
    assert.same(pieces, support.tokens(tokenizer, text))
  end
end)
