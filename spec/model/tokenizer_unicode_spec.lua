--- spec/model/tokenizer_unicode_spec.lua - character classes are Oniguruma's, and any bytes are a text.
local core = require "weft.core"
local support = require "spec.support.tokenizers"

-- Where the classes change: the insides of the large blocks of ideographs and syllables are left out.
local spans = {
  { 1, 0x34ff }, { 0x4d00, 0x4eff }, { 0x9f00, 0xacff }, { 0xd700, 0xd7ff }, { 0xe000, 0xe0ff }, { 0xf800, 0x170ff },
  { 0x18700, 0x200ff }, { 0x2a600, 0x2a7ff }, { 0x2b700, 0x2b8ff }, { 0x2ce00, 0x2cfff }, { 0x2eb00, 0x2efff },
  { 0x2f700, 0x300ff }, { 0x31300, 0x324ff }, { 0xe0000, 0xe01ff },
}

local function all_characters()
  local list = {}
  for _, span in ipairs(spans) do
    for cp = span[1], span[2] do list[#list + 1] = support.utf8(cp) end
  end
  return table.concat(list)
end

--- What `pattern` leaves of the text when its matches are removed.
local function removed(pattern, text)
  local tokenizer = assert(support.parse(support.bytes_config {
    pre_tokenizer = {
      type = "Sequence",
      pretokenizers = {
        { type = "Split", pattern = { Regex = pattern }, behavior = "Removed", invert = false },
        { type = "ByteLevel", add_prefix_space = false, use_regex = false },
      },
    },
  }))
  return tokenizer:decode(tokenizer:encode(text))
end

describe("character classes", function()
  local classes = support.json "tokenizers/unicode_classes_onig.json".classes
  local text = all_characters()
  local names = { space = "\\s" }
  for _, name in ipairs { "L", "N", "M", "Lu", "Ll", "Lt", "Lm", "Lo", "P", "S" } do names[name] = "\\p{" .. name .. "}" end
  for _, letter in ipairs { "s", "t", "r", "e", "v", "m", "l", "d" } do names["ci_" .. letter] = "(?i:" .. letter .. ")" end

  for name, pattern in pairs(names) do
    it("hold exactly the reference's code points: " .. pattern, function()
      local inside = {}
      for _, range in ipairs(classes[name]) do
        for cp = range[1], range[2] do inside[cp] = true end
      end
      local left = {}
      for _, span in ipairs(spans) do
        for cp = span[1], span[2] do
          if not inside[cp] then left[#left + 1] = support.utf8(cp) end
        end
      end
      assert.is_true(table.concat(left) == removed(pattern .. "+", text))
      if name == "space" then assert.is_true(table.concat(left) == removed("[^\\S]", text)) end
    end)
  end
end)

describe("bytes", function()
  local characters = support.byte_characters()

  it("of any text all come back from a byte-level vocabulary", function()
    local bytes_of = {}
    for byte, character in pairs(characters) do bytes_of[character] = string.char(byte) end
    math.randomseed(11)
    for _, name in ipairs { "gpt2", "mini-llama3", "mini-minimax-m2" } do
      local tokenizer = support.load("tokenizers/" .. name)
      for _ = 1, 150 do
        local bytes = {}
        for i = 1, math.random(40) do bytes[i] = string.char(math.random() < 0.5 and math.random(32, 126) or math.random(0, 255)) end
        local text = table.concat(bytes)
        local back = {}
        for _, id in ipairs(tokenizer:encode(text, { add_special = false })) do
          for character in tokenizer:token(id):gmatch "[%z\1-\127\194-\244][\128-\191]*" do back[#back + 1] = bytes_of[character] end
        end
        assert.equal(text, table.concat(back))
      end
    end
  end)

  it("that are no UTF-8 become byte tokens under byte fallback too", function()
    local tokenizer = support.load "models/stories260K/hf-f32"
    assert.same({ "▁", "<0xFF>", "<0xC3>" }, support.tokens(tokenizer, "\255\195", { add_special = false }))
  end)

  it("are decoded with one U+FFFD for each maximal bad part", function()
    local tokenizer = assert(support.parse(support.bytes_config()))
    assert.equal("a\239\191\189b\239\191\189", tokenizer:decode(tokenizer:encode "a\226\130b\255"))
  end)
end)

describe("long texts", function()
  it("of one piece take less than a second", function()
    for _, name in ipairs { "tokenizers/gpt2", "tokenizers/mini-llama3", "tokenizers/mini-minimax-m2", "models/stories260K/hf-f32" } do
      local tokenizer = support.load(name)
      for _, unit in ipairs { "a", " ", "\n", "的", "!", "A1", "é" } do
        local text, began = unit:rep(20000), os.clock()
        local ids = tokenizer:encode(text, { add_special = false })
        assert.is_true(os.clock() - began < 1, name .. " " .. unit)
        assert.equal(text, tokenizer:decode(ids))
      end
    end
  end)

  it("are refused by nothing but memory: 4 MB in one call", function()
    local tokenizer = support.load "tokenizers/mini-llama3"
    local text = ("The quick brown fox, 1234 jumps.\n"):rep(130000)
    assert.equal(text, tokenizer:decode(tokenizer:encode(text)))
  end)
end)
