--- Files that weft keeps for its user: history.txt of the prompt, bench.jsonl of measured times.
local core = require "weft.core"
local errors = require "weft.errors"

local state_file = {}

local most = 64 * 1024 * 1024

--- Where the file is: what the environment variable says ("" for nowhere), or NAME in weft/ under
-- $XDG_STATE_HOME (~/.local/state); nil when there is no place for it.
function state_file.path(variable, name)
  local named = os.getenv(variable)
  if named then return named ~= "" and named or nil end
  local state, home = os.getenv "XDG_STATE_HOME", os.getenv "HOME"
  if not state or state == "" then state = home and home ~= "" and home .. "/.local/state" or nil end
  return state and ("%s/weft/%s"):format(state, name)
end

--- The file's text, "" where there is none (or /dev/null, for nobody to keep); nil and why for what cannot be read or
-- is no regular file: a pipe or a device could stop the program.
function state_file.read(path)
  if path == "/dev/null" then return "" end
  local ok, text = pcall(core.read_file, path, most)
  if ok then return text end
  local why = errors.message(text)
  if why:find("No such file or directory", 1, true) or why:find("Not a directory", 1, true) then return "" end
  return nil, why
end

--- Makes the folder that the file is in, where it can.
function state_file.make_folder(path)
  local folder = path:match "^(.*)/[^/]*$"
  if folder and folder ~= "" then os.execute(("mkdir -p '%s' 2>/dev/null"):format((folder:gsub("'", "'\\''")))) end
end

return state_file
