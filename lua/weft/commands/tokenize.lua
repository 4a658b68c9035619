--- weft tokenize: text to token ids and back; needs only tokenizer.json.
local core = require "weft.core"
local errors = require "weft.errors"

local tokenize = {}

local function usage(message) errors.raise { message = message, code = "invalid", usage = true } end

local function print_ids(tokenizer, text, encode_options)
  io.stdout:write(core.json.encode(core.json.array(tokenizer:encode(text, encode_options))), "\n")
end

--- One JSON string a line in, one JSON array a line out.
local function encode_file(tokenizer, path, encode_options)
  local whole, number = errors.read_file(path, "the texts"), 0
  if whole == "" then return end
  for line in (whole:gsub("\n$", "") .. "\n"):gmatch "(.-)\n" do
    number = number + 1
    local text = core.json.decode(line)
    if type(text) ~= "string" then
      errors.raise { message = ("line %d of %s: wanted a JSON string, found %s"):format(number, path,
        line == "" and "an empty line" or line:sub(1, 60)), code = "format" }
    end
    print_ids(tokenizer, text, encode_options)
  end
end

--- "5,6,7" -> {5, 6, 7}
local function parse_ids(text, tokenizer)
  local ids = {}
  for field in (text .. ","):gmatch "([^,]*)," do
    local id = field:match "^%s*(%d+)%s*$"
    if not id then usage(("--decode wants ids as 5,6,7; found '%s'"):format(field)) end
    if not tokenizer:token(tonumber(id)) then
      usage(("--decode: the tokenizer has no token %s (ids go from 0 to %d)"):format(id, tokenizer.vocab_size - 1))
    end
    ids[#ids + 1] = tonumber(id)
  end
  return ids
end

--- options: model, one of prompt, file and decode, no_special. Decoding shows special tokens
-- unless no_special.
function tokenize.run(options)
  local asked = (options.prompt and 1 or 0) + (options.file and 1 or 0) + (options.decode and 1 or 0)
  if asked ~= 1 then usage "weft tokenize wants one of --prompt TEXT, -f FILE.jsonl and --decode 5,6,7" end
  if not options.model then usage "weft tokenize wants --model DIR, the folder with tokenizer.json" end
  local tokenizer, message, code = core.tokenizer.load(options.model)
  if not tokenizer then errors.raise { message = message, code = code } end
  local encode_options = { add_special = not options.no_special }
  if options.prompt then
    print_ids(tokenizer, options.prompt, encode_options)
  elseif options.file then
    encode_file(tokenizer, options.file, encode_options)
  else
    local ids = parse_ids(options.decode, tokenizer)
    io.stdout:write(tokenizer:decode(ids, { skip_special = options.no_special or false }), "\n")
  end
  return 0
end

return tokenize
