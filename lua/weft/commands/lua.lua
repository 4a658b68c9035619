--- weft lua: a plain script with `weft` at hand. One state, no ranks.
local errors = require "weft.errors"
local lua = {}

function lua.run(options)
  local path = options.args[1]
  if not path or path == "--help" or path == "-h" then
    local out = path and io.stdout or io.stderr
    out:write(require("weft.flags").help "lua")
    return path and 0 or 2
  end
  local chunk, message = loadfile(path)
  if not chunk then errors.raise { message = message, code = "format" } end
  _G.weft = require "weft"
  local args = { [0] = path }
  for i = 2, #options.args do args[i - 1] = options.args[i] end
  _G.arg = args
  local code = chunk(unpack(args))
  return type(code) == "number" and code or 0
end

return lua
