--- A conversation as a model reads it: stretches of plain text between control tokens.
local errors = require "weft.errors"
local Script = {}
Script.__index = Script

function Script.new() return setmetatable({}, Script) end

--- Control tokens: only what the format itself writes comes through here.
function Script:control(token)
  self[#self + 1] = { text = token, special = true }
  return self
end

--- Plain text; whatever is in it stays text.
function Script:text(text)
  local last = self[#self]
  if last and not last.special then last.text = last.text .. text
  elseif text ~= "" then self[#self + 1] = { text = text, special = false } end
  return self
end

local content = {}

local function fail(message) errors.raise { message = message, code = "invalid" } end
content.fail = fail

--- The text of a message: a string, a list of text parts, or nothing.
function content.of(message)
  local value = message.content
  if type(value) == "string" then return value end
  if value == nil or type(value) == "userdata" then return "" end -- userdata: JSON's null
  if type(value) ~= "table" then fail(("content of a message must be a string or a list of parts, got %s"):format(type(value))) end
  local parts = {}
  for i, part in ipairs(value) do
    if type(part) == "string" then parts[i] = part
    elseif type(part) == "table" and part.type == "text" and type(part.text) == "string" then parts[i] = part.text
    else fail(("part %d of a message's content is not text: this chat format takes text only"):format(i)) end
  end
  return table.concat(parts)
end

-- White space of two and three bytes, as \s sees it.
local wide = {}
for space in ("\194\133 \194\160 \225\154\128 \226\128\168 \226\128\169 \226\128\175 \226\129\159 \227\128\128"):gmatch "[^ ]+" do wide[space] = true end
for last = 128, 138 do wide["\226\128" .. string.char(last)] = true end

--- Without white space at both ends, Unicode's too.
function content.trim(text)
  local first, last = 1, #text
  local function size(from, to)
    if text:find("^[\9-\13\28-\32]", from) then return 1 end
    for bytes = 2, 3 do
      if wide[text:sub(from, from + bytes - 1)] and from + bytes - 1 <= to then return bytes end
    end
    return 0
  end
  while first <= last and size(first, last) > 0 do first = first + size(first, last) end
  while last >= first do
    if text:find("^[\9-\13\28-\32]", last) then last = last - 1
    elseif last - first >= 1 and wide[text:sub(last - 1, last)] then last = last - 2
    elseif last - first >= 2 and wide[text:sub(last - 2, last)] then last = last - 3
    else break end
  end
  return text:sub(first, last)
end

--- Calls of an assistant's message, as { name =, arguments = JSON text }. Both the nested form of
-- the OpenAI interface and a flat one are read; `nested_only` refuses the flat one.
function content.calls(message, nested_only)
  local calls = {}
  for i, call in ipairs(type(message.tool_calls) == "table" and message.tool_calls or {}) do
    local fn = type(call) == "table" and call["function"]
    if not fn and nested_only then fail(("tool_calls[%d] has no 'function'"):format(i)) end
    fn = fn or call
    if type(fn) ~= "table" or type(fn.name) ~= "string" then fail(("tool_calls[%d] has no name"):format(i)) end
    calls[i] = { name = fn.name, arguments = fn.arguments == nil and {} or fn.arguments }
  end
  return calls
end

--- tools is a list of tools or its JSON text; gives the JSON text of each, or nil without tools.
function content.tools(tools)
  local json_text = require "weft.chat.json_text"
  if tools == nil or type(tools) == "userdata" then return nil end
  local members = json_text.members(json_text.of(tools, "tools"))
  if not members then fail "tools must be a list of tools" end
  local texts = {}
  for i, member in ipairs(members) do
    if member.key ~= nil then fail "tools must be a list of tools, got an object" end
    texts[i] = member.text
  end
  return #texts > 0 and texts or nil
end

Script.content = content

return Script
