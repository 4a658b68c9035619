--- How Lua code of weft fails: a table { message =, code = } that prints as its message.
--
-- `usage = true` marks what the command line got wrong (exit 2). Codes are those of weft_status
-- ("invalid", "io", "format", "memory", ...).
local core = require "weft.core"

local errors = {}

--- Raises a failure.
function errors.raise(err)
  error(core._as_error(err), 0)
end

--- Raises a mistake of the caller or of the command line.
function errors.usage(message)
  errors.raise { usage = true, message = message, code = "invalid" }
end

-- Bytes that a terminal would obey, as they are written in C: a message may quote a damaged file.
local function visible(text)
  local function escape(bytes) return (bytes:gsub(".", function(byte) return ("\\x%02x"):format(byte:byte()) end)) end
  return (text:gsub("[%z\1-\31\127]", escape):gsub("\194[\128-\159]", escape))
end

local own_folder = debug.getinfo(1, "S").source:match "^@(.*/)errors%.lua$" or "/"

-- Whether the place that a message names, perhaps cut at its left ("...weft/setup.lua"), is a file of weft.
local function is_own(place)
  local path = own_folder .. (place:match ".*weft/(.*)$" or place)
  if place:sub(1, 3) == "..." then return path:sub(3 - #place) == place:sub(4) end
  return path == place
end

--- A message without the lines of weft's own files that a check blames where nothing else is behind it (the script
-- itself, the prompt). What fails within those lines keeps them.
function errors.without_own_lines(text)
  return (text:gsub("([^%s:]+%.lua):%d+: ()", function(place, at)
    if is_own(place) and not text:find("^attempt to ", at) then return "" end
  end))
end

-- tostring() of what a script raised, whose own __tostring may fail.
local function said(value)
  local ok, text = pcall(tostring, value)
  return ok and type(text) == "string" and text or "an error that cannot say what it is: its __tostring fails"
end

--- One line of whatever was raised.
function errors.message(err)
  local text = err
  if type(err) == "table" then text = err.message end
  if type(err) == "table" and text == nil then
    local mt = getmetatable(err)
    text = type(mt) == "table" and mt.__tostring and said(err) or "the error raised was a table without a message"
  elseif text == nil then
    text = "an error without a message"
  end
  return visible((errors.without_own_lines(said(text)):gsub("%s*\n%s*", " "):gsub("\t", " ")))
end

local most_text, piece = 256 * 1024 * 1024, 1024 * 1024

--- The whole of a text file or a pipe, at most 256 MiB, without a mark of UTF-8 at its head. `what` says what it is for: "cannot read the prompts FILE: Is a directory".
function errors.read_file(path, what)
  local file, message = io.open(path, "rb")
  if not file then errors.raise { message = ("cannot read %s %s"):format(what, message), code = "io" } end
  local pieces, bytes, text, why = {}, 0, nil, nil
  repeat
    text, why = file:read(piece)
    pieces[#pieces + 1], bytes = text, bytes + #(text or "")
  until not text or bytes > most_text
  file:close()
  if why then errors.raise { message = ("cannot read %s %s: %s"):format(what, path, why), code = "io" } end
  if bytes > most_text then
    errors.raise { message = ("cannot read %s %s: more than the %d bytes that such a file may have"):format(what, path, most_text), code = "format" }
  end
  return (table.concat(pieces):gsub("^\239\187\191", ""))
end

local most = 64 * 1024 * 1024

--- The same of a plan, a script or a config: a regular file of at most 64 MiB, so that neither a pipe that nobody
-- writes to nor a device without end stops the program.
function errors.read_input(path, what)
  local ok, text = pcall(core.read_file, path, most)
  if not ok then errors.raise { message = ("cannot read %s %s"):format(what, errors.message(text)), code = text.code or "io" } end
  return text
end

return errors
