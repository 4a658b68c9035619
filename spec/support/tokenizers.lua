--- spec/support/tokenizers.lua: the golden files of tokenizers, and small tokenizers made on the spot.
local core = require "weft.core"

local tokenizers = {}
local fixtures = "spec/fixtures/"

function tokenizers.read(path)
  local file = assert(io.open(fixtures .. path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

function tokenizers.json(path) return (assert(core.json.decode(tokenizers.read(path)))) end

function tokenizers.unhex(hex) return (hex:gsub("%x%x", function(pair) return string.char(tonumber(pair, 16)) end)) end

--- The tokenizers with reference results: { name, folder, golden file }.
tokenizers.golden = {
  { name = "gpt2", dir = "tokenizers/gpt2", golden = "tokenizers/gpt2/golden.json" },
  { name = "mini-llama3", dir = "tokenizers/mini-llama3", golden = "tokenizers/mini-llama3/golden.json" },
  { name = "mini-minimax-m2", dir = "tokenizers/mini-minimax-m2", golden = "tokenizers/mini-minimax-m2/golden.json" },
  { name = "stories260K", dir = "models/stories260K/hf-f32", golden = "models/stories260K/tokenizer_golden.json" },
}

function tokenizers.load(dir) return assert(core.tokenizer.load(fixtures .. dir)) end

function tokenizers.utf8(cp)
  local char, floor = string.char, math.floor
  if cp < 0x80 then return char(cp) end
  if cp < 0x800 then return char(0xc0 + floor(cp / 64), 0x80 + cp % 64) end
  if cp < 0x10000 then return char(0xe0 + floor(cp / 4096), 0x80 + floor(cp / 64) % 64, 0x80 + cp % 64) end
  return char(0xf0 + floor(cp / 262144), 0x80 + floor(cp / 4096) % 64, 0x80 + floor(cp / 64) % 64, 0x80 + cp % 64)
end

--- The printable character of each byte in byte-level vocabularies, by byte from 0.
function tokenizers.byte_characters()
  local characters, others = {}, 0
  for byte = 0, 255 do
    if (byte >= 33 and byte <= 126) or (byte >= 161 and byte <= 172) or byte >= 174 then
      characters[byte] = tokenizers.utf8(byte)
    else
      characters[byte] = tokenizers.utf8(256 + others)
      others = others + 1
    end
  end
  return characters
end

--- A table that decodes into a tokenizer.json: byte-level, ids 0 to 255 are the bytes, no merges.
function tokenizers.bytes_config(changes)
  local vocab = {}
  for byte, character in pairs(tokenizers.byte_characters()) do vocab[character] = byte end
  local config = {
    added_tokens = core.json.array {},
    pre_tokenizer = { type = "ByteLevel", add_prefix_space = false, use_regex = false },
    decoder = { type = "ByteLevel" },
    model = { type = "BPE", vocab = vocab, merges = core.json.array {} },
  }
  for key, value in pairs(changes or {}) do config[key] = value end
  return config
end

--- A tokenizer whose vocabulary is given characters and tokens; ids in the order of the list, from 0.
function tokenizers.plain_config(tokens, changes)
  local vocab = {}
  for i, token in ipairs(tokens) do vocab[token] = i - 1 end
  local config = { model = { type = "BPE", vocab = vocab, merges = core.json.array {} } }
  for key, value in pairs(changes or {}) do config[key] = value end
  return config
end

function tokenizers.parse(config) return core.tokenizer.parse(core.json.encode(config), "made.json") end

--- The token strings that a text is cut into.
function tokenizers.tokens(tokenizer, text, options)
  local tokens = {}
  for i, id in ipairs(tokenizer:encode(text, options)) do tokens[i] = tokenizer:token(id) end
  return tokens
end

return tokenizers
