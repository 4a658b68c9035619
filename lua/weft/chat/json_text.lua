--- JSON texts with the order of their keys, which Lua tables lose and chat formats show.
--
-- A value is given as JSON text (its order is kept) or as a Lua value (keys sorted).
local core = require "weft.core"
local errors = require "weft.errors"

local json_text = {}

local function fail(message) errors.raise { message = message, code = "invalid" } end

local function quote(text)
  local named = { ['"'] = '\\"', ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }
  return '"' .. text:gsub('[%z\1-\31"\\]', function(c) return named[c] or ("\\u%04x"):format(c:byte()) end) .. '"'
end
json_text.quote = quote

--- Checked JSON text of a value; `what` names it in messages. A string is JSON text already.
function json_text.of(value, what)
  if type(value) ~= "string" then return core.json.encode(value) end
  local decoded, message = core.json.decode(value)
  if decoded == nil then fail(("%s is a string, so it must be JSON: %s"):format(what, message)) end
  return value
end

--- Words of a JSON text that is known to be right: punctuation, strings, numbers and names.
local function words(text)
  local list, at = {}, text:find "%S"
  while at do
    local stop
    if text:sub(at, at) == '"' then
      stop = at + 1
      while text:sub(stop, stop) ~= '"' do stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1) end
    else
      stop = select(2, text:find("^[%w%+%-%.]+", at)) or at
    end
    list[#list + 1] = text:sub(at, stop)
    at = text:find("%S", stop + 1)
  end
  return list
end

local opening, closing = { ["{"] = true, ["["] = true }, { ["}"] = true, ["]"] = true }

--- The text laid out as Python's json.dumps does: on one line with ", " and ": ", or indented.
function json_text.layout(text, indent)
  local out, list, depth = {}, words(text), 0
  local function line() out[#out + 1] = "\n" .. (" "):rep(depth * indent) end
  for i, word in ipairs(list) do
    if opening[word] then
      out[#out + 1] = word
      depth = depth + 1
      if indent and not closing[list[i + 1]] then line() end
    elseif closing[word] then
      depth = depth - 1
      if indent and not opening[list[i - 1]] then line() end
      out[#out + 1] = word
    elseif word == "," then
      out[#out + 1] = indent and "," or ", "
      if indent then line() end
    elseif word == ":" then
      out[#out + 1] = ": "
    elseif word:sub(1, 1) == '"' then
      out[#out + 1] = word:find("\\", 1, true) and quote(core.json.decode("[" .. word .. "]")[1]) or word
    else
      out[#out + 1] = word
    end
  end
  return table.concat(out)
end

--- The members of an object or array: a list of { key = string or nil, text = JSON text }; nil for other values.
function json_text.members(text)
  local list = words(text)
  if not opening[list[1]] then return nil end
  local members, depth, current = {}, 0, nil
  for i, word in ipairs(list) do
    if closing[word] then depth = depth - 1 end
    if depth == 0 or (depth == 1 and word == ",") then
      if current then
        current.text = table.concat(current.words, " ")
        current.words = nil
        members[#members + 1] = current
        current = nil
      end
    elseif depth == 1 and list[i + 1] == ":" and not current then
      current = { key = core.json.decode("[" .. word .. "]")[1], words = {} }
    elseif not (depth == 1 and word == ":") then
      current = current or { words = {} }
      current.words[#current.words + 1] = word
    end
    if opening[word] then depth = depth + 1 end
  end
  return members
end

--- The text of one member; nil when there is none.
function json_text.member(text, key)
  for _, member in ipairs(json_text.members(text) or {}) do
    if member.key == key then return member.text end
  end
end

return json_text
