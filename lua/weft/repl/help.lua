--- Help for every function, method and type: the comment above its definition in the Lua files, and
-- docs_core.lua for what is C.
local core = require "weft.core"
local docs = require "weft.repl.docs_core"

local help = {}

local files = {} -- path -> lines

local function lines_of(path)
  if not files[path] then
    local file, lines = io.open(path, "rb"), {}
    if file then
      for line in file:lines() do lines[#lines + 1] = line end
      file:close()
    end
    files[path] = lines
  end
  return files[path]
end

-- The comment that ends on the line before `line`, without its dashes.
local function comment_above(lines, line)
  local found = {}
  for i = line - 1, 1, -1 do
    local text = lines[i]:match "^%s*%-%-%-?%s?(.*)$"
    if not text then break end
    table.insert(found, 1, text)
  end
  return #found > 0 and table.concat(found, "\n") or nil
end

-- The comment at the top of a file.
local function comment_on_top(lines)
  local found = {}
  for i = 1, #lines do
    local text = lines[i]:match "^%-%-%-?%s?(.*)$"
    if not text then break end
    found[#found + 1] = text
  end
  return #found > 0 and table.concat(found, "\n") or nil
end

--- Of a Lua function: its comment or nil, "file:line", its first line.
function help.of_function(fn)
  local about = debug.getinfo(fn, "S")
  if about.what == "C" or about.source:sub(1, 1) ~= "@" then return nil end
  local path = about.source:sub(2)
  local lines = lines_of(path)
  return comment_above(lines, about.linedefined), path .. ":" .. about.linedefined, lines[about.linedefined], comment_on_top(lines)
end

local names -- C function -> its name in docs_core

local function c_names()
  if names then return names end
  names = {}
  local function note(prefix, t)
    for key, value in pairs(t) do
      if type(value) == "function" and not names[value] then names[value] = prefix .. key end
    end
  end
  note("core.", core)
  for key, value in pairs(core) do
    if type(value) == "table" then note("core." .. key .. ".", value) end
  end
  for _, name in ipairs(core._types()) do note(name .. ":", core._methods(name)) end
  return names
end

-- What is written about a function in C, or nil; and the whole comment it stands in.
local function of_c(fn)
  local name = c_names()[fn]
  if not name then return nil end
  local text, page = docs.text(name)
  return text or name, page
end

-- "a.b[0]:c" -> { "a", "b", 0, "c" }; nil when it is no such path.
local function parts_of(path)
  local parts, at = {}, 1
  while at <= #path do
    local index, behind = path:match("^%[(%d+)%]()", at)
    local name, after = path:match("^[.:]?([%a_][%w_]*)()", at)
    if not index and not name then
      name, after = select(2, path:match("^%[([\"'])(.-)%1%]()", at))
    end
    if not index and not name then return nil end
    parts[#parts + 1] = name or tonumber(index)
    at = after or behind
  end
  return parts
end

-- What `model` and `engine` would be, where there is no model.
local function absent(name)
  if name == "model" then return require "weft.live" end
  if name == "engine" then return require "weft.engine" end
end

--- Follows "weft.nn.rms_norm", "model.layers[0].o_proj", "model:replan", "weft.tensor:view" from the session's table. Metamethods
-- of weft's own tables may load a module; nothing else runs.
function help.find(path, env)
  local owner, method = path:match "^(weft%.[%w_]+):([%w_]+)$"
  local methods = owner and core._methods(owner)
  if methods and methods[method] then return methods[method], true end
  local value, parts = env, parts_of(path)
  for i, part in ipairs(parts or {}) do
    local class = type(value) == "userdata" and getmetatable(value)
    local own = type(class) == "string" and core._methods(class)
    local ok, found = true, own and own[part]
    if not found then ok, found = pcall(function(v) return v[part] end, value) end
    if found == nil and i == 1 then found = absent(part) end
    if not ok or found == nil then return nil, false end
    value = found
  end
  return value, parts ~= nil
end

local function first_sentence(text)
  local line = text:gsub("%s+", " ")
  line = line:match "^(.-%.) " or line
  return #line <= 100 and line or line:sub(1, 97):match "^(.*)%s" .. " ..."
end

local function listing(t, prefix)
  local rows, width = {}, 0
  for key, value in pairs(t) do
    if type(key) == "string" and key:sub(1, 1) ~= "_" then
      local text = type(value) == "function" and (help.of_function(value) or of_c(value) or "a function") or type(value)
      rows[#rows + 1] = { prefix .. key, first_sentence(text) }
      width = math.max(width, math.min(32, #prefix + #key))
    end
  end
  table.sort(rows, function(a, b) return a[1] < b[1] end)
  for i, row in ipairs(rows) do rows[i] = ("  %-" .. width .. "s  %s"):format(row[1], row[2]) end
  return table.concat(rows, "\n")
end

local function of_type(name)
  local methods = core._methods(name)
  if not methods then return nil end
  return (docs.text(name) or "a type of weft") .. "\nmethods:\n" .. listing(methods, ":")
end

local function of_module(path, value)
  for module, loaded in pairs(package.loaded) do
    if loaded == value and module:match "^weft" then
      local file = package.searchpath(module, package.path)
      return file and comment_on_top(lines_of(file))
    end
  end
end

--- The text of `,help path`; nil and a message when there is nothing of that name.
function help.text(path, env)
  local value, found = help.find(path, env)
  local kind_text = of_type(path) or of_type("weft." .. path)
  if not found then
    local method = path:match "^weft%.[%w_]+:[%w_]+$" or path:match "^[%w_]+:[%w_]+$" and "weft." .. path
    local written = kind_text or method and docs.text(method)
    if written then return written end
    return nil, ("nothing is called '%s' here; ,help alone lists what there is"):format(path)
  end
  local parts = {}
  if type(value) == "function" then
    local text, place = help.of_function(value)
    parts[1] = text or of_c(value) or of_module(path, value) or place and "no comment stands above it" or "a function of Lua itself: see the manual of Lua 5.1"
    if place then parts[#parts + 1] = "defined at " .. place end
  elseif type(value) == "userdata" then
    local class = getmetatable(value)
    parts[1] = tostring(value)
    parts[2] = type(class) == "string" and of_type(class) or nil
  elseif type(value) == "table" then
    local top = of_module(path, value)
    local meta = debug.getmetatable(value)
    local class = type(meta) == "table" and type(rawget(meta, "__index")) == "table" and rawget(meta, "__index")
    if top then parts[#parts + 1] = top end
    parts[#parts + 1] = listing(value, path .. ".")
    if class and class ~= value then parts[#parts + 1] = "methods:\n" .. listing(class, ":") end
  else
    parts[1] = ("%s, a %s"):format(tostring(value), type(value))
  end
  if kind_text and type(value) == "function" then parts[#parts + 1] = kind_text end
  return table.concat(parts, "\n")
end

--- The text of `,doc path`: its own comment, then the whole comment at the top of its file.
function help.doc(path, env)
  local text, message = help.text(path, env)
  if not text then return nil, message end
  local value = help.find(path, env)
  if type(value) == "function" then
    local _, place, line, top = help.of_function(value)
    if line then text = line:match "^%s*(.-)%s*$" .. "\n" .. text end
    if top then text = text .. "\n\n" .. place:match "^(.*):%d+$" .. "\n" .. top end
    local _, page = of_c(value)
    if page then text = text .. "\n\n" .. page end
  end
  return text
end

return help
