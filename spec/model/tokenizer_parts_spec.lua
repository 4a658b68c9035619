--- spec/model/tokenizer_parts_spec.lua - normalizers, pre-tokenizers, merges and decoders one by one.
local core = require "weft.core"
local support = require "spec.support.tokenizers"

local array = core.json.array

--- The pieces a pre-tokenizer cuts: every piece of the list is a token, and merges are ignored.
local function pieces(pre_tokenizer, text, wanted)
  local tokens = {}
  for byte = 32, 126 do tokens[#tokens + 1] = string.char(byte) end
  local seen = {}
  for _, piece in ipairs(wanted) do
    if #piece > 1 and not seen[piece] then tokens[#tokens + 1] = piece end
    seen[piece] = true
  end
  local config = support.plain_config(tokens, { pre_tokenizer = pre_tokenizer })
  config.model.ignore_merges = true
  assert.same(wanted, support.tokens(assert(support.parse(config)), text))
end

local function split(behavior, invert, pattern)
  return { type = "Split", pattern = pattern or { String = "-" }, behavior = behavior, invert = invert or false }
end

describe("pre_tokenizer", function()
  it("cuts by all five behaviours of Split", function()
    local text = "the-final--countdown"
    pieces(split "Removed", text, { "the", "final", "countdown" })
    pieces(split "Isolated", text, { "the", "-", "final", "-", "-", "countdown" })
    pieces(split "MergedWithPrevious", text, { "the-", "final-", "-", "countdown" })
    pieces(split "MergedWithNext", text, { "the", "-final", "-", "-countdown" })
    pieces(split "Contiguous", text, { "the", "-", "final", "--", "countdown" })
    pieces(split("Removed", true), text, { "-", "-", "-" })
    pieces(split("Isolated", false, { Regex = "[a-f]+" }), text, { "th", "e", "-", "f", "in", "a", "l--", "c", "ount", "d", "own" })
  end)

  it("knows Digits, Whitespace, WhitespaceSplit and Metaspace", function()
    pieces({ type = "Digits", individual_digits = true }, "a12b", { "a", "1", "2", "b" })
    pieces({ type = "Digits", individual_digits = false }, "a12b", { "a", "12", "b" })
    pieces({ type = "Whitespace" }, "Hi you! ok", { "Hi", "you", "!", "ok" })
    pieces({ type = "WhitespaceSplit" }, "Hi you! ok", { "Hi", "you!", "ok" })
    pieces({ type = "Metaspace", replacement = "_", prepend_scheme = "always" }, "Hi you", { "_Hi", "_you" })
    pieces({ type = "Metaspace", replacement = "_", prepend_scheme = "never" }, "Hi you", { "Hi", "_you" })
    pieces({ type = "Metaspace", replacement = "_", prepend_scheme = "first", split = false }, "Hi you", { "_Hi_you" })
  end)

  it("puts a space in front where ByteLevel asks for one", function()
    local config = support.bytes_config { pre_tokenizer = { type = "ByteLevel", add_prefix_space = true, use_regex = true } }
    local tokenizer = assert(support.parse(config))
    assert.same({ 32, 97 }, tokenizer:encode "a")
    assert.same({ 32, 97 }, tokenizer:encode " a")
    assert.same({}, tokenizer:encode "")
  end)

  it("translates what Ruby's expressions mean to PCRE2", function()
    local function regex(pattern) return split("Isolated", false, { Regex = pattern }) end
    pieces(regex "[^\\S ]|[^a\\P{L}]+", "ab cd", { "a", "b", " ", "cd" })
    pieces(regex "x{,2}y", "xxxyxy", { "x", "xxy", "xy" })
    pieces(regex "\\h+", "fizz", { "f", "izz" })
    pieces(regex "b|(?=c)", "abc", { "a", "b", "c" }) -- an empty match cuts nothing
    for pattern, what in pairs { ["[a[b]]"] = "a class within a class", ["[a&&b]"] = "&& in a class", ["a{2}+"] = "+ behind",
                                 ["\\K"] = "\\K", ["\\p{Klingon}"] = "\\p{Klingon}", ["(*UCP)a"] = "(*", ["(?R)"] = "kind of group" } do
      local _, message, code = support.parse(support.bytes_config { pre_tokenizer = regex(pattern) })
      assert.equal("unsupported", code)
      assert.is_truthy(message:find(what, 1, true), message)
    end
  end)
end)

describe("normalizer", function()
  local function tokens_of(normalizer, text)
    local tokens = {}
    for byte = 32, 126 do tokens[#tokens + 1] = string.char(byte) end
    return table.concat(support.tokens(assert(support.parse(support.plain_config(tokens, { normalizer = normalizer }))), text))
  end

  it("replaces strings and expressions, prepends to what is not empty", function()
    local replace = { type = "Replace", pattern = { String = "ab" }, content = "<>" }
    assert.equal("<>a<>", tokens_of(replace, "abaab"))
    assert.equal("a.b.", tokens_of({ type = "Replace", pattern = { Regex = "[0-9]+" }, content = "." }, "a12b3"))
    local sequence = { type = "Sequence", normalizers = { { type = "Prepend", prepend = "_" }, replace } }
    assert.equal("_<>", tokens_of(sequence, "ab"))
    assert.equal("", tokens_of(sequence, ""))
  end)

  it("composes text under NFC, and leaves other bytes alone", function()
    local tokenizer = assert(support.parse(support.bytes_config { normalizer = { type = "NFC" } }))
    assert.equal("plain Zürich", tokenizer:decode(tokenizer:encode "plain Zürich"))
    -- Builds without utf8proc refuse what they cannot compose.
    local ok, ids = pcall(tokenizer.encode, tokenizer, "u\204\136") -- u and a combining diaeresis
    if not ok then
      assert.is_truthy(tostring(ids):find("normalisation (NFC)", 1, true))
      return
    end
    assert.equal("ü", tokenizer:decode(ids))
    assert.equal("각가a\239\191\189ü", tokenizer:decode(tokenizer:encode "\225\132\128\225\133\161\225\134\168가a\255u\204\136"))
  end)

  it("looks for normalized added tokens in their normalised form", function()
    local config = support.plain_config({ "a", "B", "c" }, {
      normalizer = { type = "Replace", pattern = { String = "b" }, content = "B" },
      added_tokens = { { id = 3, content = "bc", normalized = true, special = false } },
    })
    assert.same({ 0, 3, 0 }, assert(support.parse(config)):encode "aBca")
  end)
end)

describe("model", function()
  it("merges by rank, leftmost first, and lets a repeated pair's last rank win", function()
    local config = support.plain_config { "a", "b", "ab", "ba", "aa" }
    config.model.merges = { "a b", array { "b", "a" } }
    assert.same({ "ab", "ab", "a" }, support.tokens(assert(support.parse(config)), "ababa"))
    config.model.merges = { "a b", array { "b", "a" }, "a b" }
    assert.same({ "a", "ba", "ba" }, support.tokens(assert(support.parse(config)), "ababa"))
    config.model.merges = { "a a" }
    assert.same({ "aa", "aa", "a" }, support.tokens(assert(support.parse(config)), "aaaaa"))
  end)

  it("falls back to bytes, then to the unknown token, fused or not, else drops", function()
    local config = support.plain_config { "<unk>", "a", "<0xC3>", "<0xA9>" }
    local function ids(text) return assert(support.parse(config)):encode(text) end
    assert.same({ 1, 1 }, ids "axya")
    config.model.unk_token = "<unk>"
    assert.same({ 1, 0, 0, 1 }, ids "axya")
    config.model.fuse_unk = true
    assert.same({ 1, 0, 1 }, ids "axya")
    config.model.byte_fallback = true
    assert.same({ 1, 2, 3, 0 }, ids "aéx")
  end)

  it("encodes special text as text when asked to, other added tokens always", function()
    local tokenizer = support.load "tokenizers/mini-llama3"
    local off = { match_special = false, add_special = false }
    local ids = tokenizer:encode("a<|eot_id|>b<norm>", off)
    for _, id in ipairs(ids) do assert.not_equal(tokenizer:id "<|eot_id|>", id) end
    assert.equal(tokenizer:id "<norm>", ids[#ids])
    assert.equal("a<|eot_id|>b<norm>", tokenizer:decode(ids, { skip_special = false }))
    assert.equal("a<|eot_id|>b<norm>", tokenizer:decode(ids))
    for _, id in ipairs(tokenizer:special_ids()) do
      assert.not_same({ id }, tokenizer:encode(tokenizer:token(id), off))
    end
  end)
end)

describe("decoder", function()
  local function decode(decoder, tokens, ids)
    return assert(support.parse(support.plain_config(tokens, { decoder = decoder }))):decode(ids)
  end

  it("joins tokens with spaces when there is none", function()
    assert.equal("a b a", decode(nil, { "a", "b" }, { 0, 1, 0 }))
  end)

  it("strips at both ends, replaces, and reads metaspace", function()
    local strip = { type = "Sequence", decoders = { { type = "Fuse" }, { type = "Strip", content = " ", start = 2, stop = 1 } } }
    assert.equal(" a  ", decode(strip, { " ", "a" }, { 0, 0, 0, 1, 0, 0, 0 }))
    assert.equal("a", decode(strip, { " ", "a" }, { 1 }))
    local meta = { type = "Metaspace", replacement = "_", prepend_scheme = "always" }
    assert.equal("a a", decode(meta, { "_a" }, { 0, 0 }))
  end)

  it("makes a run of byte tokens UTF-8, or one U+FFFD for each byte", function()
    local bytes = { type = "Sequence", decoders = { { type = "ByteFallback" }, { type = "Fuse" } } }
    local tokens, bad = { "<0xC3>", "<0xA9>", "x", "<0x61>" }, "\239\191\189"
    assert.equal("éx", decode(bytes, tokens, { 0, 1, 2 }))
    assert.equal(bad .. bad .. "x", decode(bytes, tokens, { 3, 0, 2 }))
    assert.equal("a" .. "x" .. bad, decode(bytes, tokens, { 3, 2, 1 }))
  end)
end)
