--- Completion: what can follow the text before the cursor. Only raw access, so nothing runs.
local core = require "weft.core"

local complete = {}

local MOST_STEPS, MOST_NAMES = 10, 2000

local words = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true until while"):gmatch "%a+" do
  words[#words + 1] = word
end

-- What value[key] is by raw access: in the table, or behind __index tables.
local function raw(value, key)
  for _ = 1, MOST_STEPS do
    if type(value) == "userdata" then
      local name = getmetatable(value)
      value = type(name) == "string" and core._methods(name) or nil
    end
    if type(value) ~= "table" then return nil end
    local found = rawget(value, key)
    if found ~= nil then return found end
    local meta = debug.getmetatable(value)
    value = type(meta) == "table" and rawget(meta, "__index") or nil
  end
end

-- Every name of a value, with whether it is a function.
local function names_of(value)
  local names, count = {}, 0
  for _ = 1, MOST_STEPS do
    if type(value) == "string" then value = string end
    if type(value) == "userdata" then
      local name = getmetatable(value)
      value = type(name) == "string" and core._methods(name) or nil
    end
    if type(value) ~= "table" then break end
    for key, item in next, value do
      if type(key) == "string" and key:match "^[%a_][%w_]*$" and names[key] == nil and count < MOST_NAMES then
        names[key] = type(item) == "function"
        count = count + 1
      end
    end
    local meta = debug.getmetatable(value)
    value = type(meta) == "table" and rawget(meta, "__index") or nil
  end
  return names
end

local function sorted(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  return list
end

--- The whole names that the last word of `text` may become, sorted, and that word.
function complete.candidates(text, env, commands)
  local command = text:match "^,(%a*)$"
  if command then
    local found = {}
    for name in pairs(commands) do
      if name:sub(1, #command) == command then found[name] = true end
    end
    return sorted(found), command
  end
  local path = text:match "[%a_][%w_%.:]*$" or ""
  local owner, separator, word = path:match "^(.*)([.:])([%w_]*)$"
  word = word or path
  local value = env
  if owner then
    for part in owner:gmatch "[^.:]+" do value = raw(value, part) end
    if value == nil then return {}, word end
  elseif path == "" then
    return {}, word
  end
  local found = {}
  for name, callable in pairs(names_of(value)) do
    local hidden = name:sub(1, 1) == "_" and word:sub(1, 1) ~= "_"
    if name:sub(1, #word) == word and not hidden and (separator ~= ":" or callable) then found[name] = true end
  end
  if not owner then
    for _, name in ipairs(words) do
      if name:sub(1, #word) == word then found[name] = true end
    end
  end
  return sorted(found), word
end

-- The longest beginning that all names share.
local function common(names)
  local first = names[1]
  for i = 2, #names do
    while names[i]:sub(1, #first) ~= first do first = first:sub(1, -2) end
  end
  return first
end

--- For the line editor: text to insert, and the choices as text when there is nothing to insert.
function complete.line(text, env, commands)
  local names, word = complete.candidates(text, env, commands)
  if #names == 0 then return "", "" end
  local insert = common(names):sub(#word + 1)
  if insert ~= "" or #names == 1 then return insert, "" end
  local shown = {}
  for i = 1, math.min(#names, 100) do shown[i] = names[i] end
  if #names > 100 then shown[#shown + 1] = ("... %d more"):format(#names - 100) end
  return "", table.concat(shown, "  ")
end

return complete
