--- Files that weft keeps for its user: history.txt of the prompt, bench.jsonl of measured times.
local state_file = {}

--- Where the file is: what the environment variable says ("" for nowhere), or NAME in weft/ under
-- $XDG_STATE_HOME (~/.local/state); nil when there is no place for it.
function state_file.path(variable, name)
  local named = os.getenv(variable)
  if named then return named ~= "" and named or nil end
  local state, home = os.getenv "XDG_STATE_HOME", os.getenv "HOME"
  if not state or state == "" then state = home and home ~= "" and home .. "/.local/state" or nil end
  return state and ("%s/weft/%s"):format(state, name)
end

--- Makes the folder that the file is in, where it can.
function state_file.make_folder(path)
  local folder = path:match "^(.*)/[^/]*$"
  if folder and folder ~= "" then os.execute(("mkdir -p '%s' 2>/dev/null"):format((folder:gsub("'", "'\\''")))) end
end

return state_file
