--- weft.config.reader: fields of a JSON object, each checked when it is read.
--
-- A refusal is one line: the file, the field, what was wanted, what was found.
local core = require "weft.core"

local Reader = {}
Reader.__index = Reader

local most = 64 * 1024 * 1024 -- bytes of a file

local Refusal = { __tostring = function(e) return e.message end }

--- Raises { code = "format"|"io", message = } (tostring gives the message).
local function raise(code, format, ...)
  error(setmetatable({ code = code, message = format:format(...) }, Refusal), 0)
end

--- path: named in messages. object: what core.json.decode gave. prefix: "rope_scaling." for nested ones.
function Reader.new(path, object, prefix)
  return setmetatable({ path = path, object = object, prefix = prefix or "" }, Reader)
end

--- Reads and parses a file that must hold one JSON object. missing_ok: nil when there is none.
function Reader.open(path, missing_ok)
  local ok, text = pcall(core.read_file, path, most)
  if not ok then
    if missing_ok and text.message:find("No such file", 1, true) then return nil end
    raise(text.code or "io", "cannot read %s", text.message)
  end
  text = text:gsub("^\239\187\191", "") -- the mark of UTF-8 that some editors write
  if not text:find "%S" then raise("format", "%s is empty", path) end
  local object, message, code = core.json.decode(text)
  if code == "memory" then raise(code, "cannot read %s: %s", path, message) end
  if object == nil then raise("format", "%s is not JSON (cut short?): %s", path, message) end
  if type(object) ~= "table" or #object > 0 or getmetatable(object) then
    raise("format", "%s must hold a JSON object with the model's fields", path)
  end
  return Reader.new(path, object)
end

local function show(value)
  if type(value) == "string" then return ("'%s'"):format(#value > 60 and value:sub(1, 60) .. "..." or value) end
  if value == nil then return "nothing" end
  local ok, text = pcall(core.json.encode, value)
  if not ok then return tostring(value) end
  return #text > 80 and text:sub(1, 80) .. "..." or text
end
Reader.show = show

function Reader:refuse(format, ...) raise("format", "%s: " .. format, self.path, ...) end

function Reader:wrong(name, wanted)
  self:refuse("%s%s must be %s, found %s", self.prefix, name, wanted, show(self.object[name]))
end

--- The raw value, or nil for null and missing.
function Reader:get(name)
  local value = self.object[name]
  if value ~= core.json.null then return value end
end

local function wanted_range(kind, low, high)
  return ("%s from %.14g to %.14g"):format(kind, low, high)
end

--- An integer in [low, high]; default when it is missing (no default: the field is required).
function Reader:integer(name, low, high, default)
  local value = self:get(name)
  if value == nil then
    if default == nil then self:refuse("%s%s is missing (wanted %s)", self.prefix, name, wanted_range("an integer", low, high)) end
    return default
  end
  if type(value) ~= "number" or value ~= math.floor(value) or value < low or value > high then
    self:wrong(name, wanted_range("an integer", low, high))
  end
  return value
end

--- A number in [low, high]; nil when missing and no default.
function Reader:number(name, low, high, default)
  local value = self:get(name)
  if value == nil then return default end
  if type(value) ~= "number" or not (value >= low and value <= high) then self:wrong(name, wanted_range("a number", low, high)) end
  return value
end

function Reader:boolean(name, default)
  local value = self:get(name)
  if value == nil then return default end
  if type(value) ~= "boolean" then self:wrong(name, "true or false") end
  return value
end

--- A string, one of `choices` (a list) when given.
function Reader:string(name, choices, default)
  local value = self:get(name)
  if value == nil then return default end
  if type(value) ~= "string" then self:wrong(name, "a string") end
  for _, choice in ipairs(choices or { value }) do
    if choice == value then return value end
  end
  self:wrong(name, "one of " .. table.concat(choices, ", "))
end

--- A list; nil when missing. check(item) says whether an item is right, wanted describes the list.
function Reader:list(name, wanted, check)
  local value = self:get(name)
  if value == nil then return nil end
  local ok = type(value) == "table" and (#value > 0 or next(value) == nil)
  for _, item in ipairs(ok and value or {}) do ok = ok and check(item) end
  if not ok then self:wrong(name, wanted) end
  return value
end

--- A nested object as a reader of its own; nil when missing.
function Reader:sub(name)
  local value = self:get(name)
  if value == nil then return nil end
  if type(value) ~= "table" or #value > 0 then self:wrong(name, "an object") end
  return Reader.new(self.path, value, self.prefix .. name .. ".")
end

--- One token id or a list of them, as a list; nil when missing.
function Reader:ids(name)
  local function is_id(v) return type(v) == "number" and v >= 0 and v < 2 ^ 31 and v == math.floor(v) end
  local value = self:get(name)
  if value == nil then return nil end
  if is_id(value) then return { value } end
  if type(value) ~= "table" then self:wrong(name, "a token id or a list of them") end
  return self:list(name, "a token id or a list of them", is_id)
end

return Reader
