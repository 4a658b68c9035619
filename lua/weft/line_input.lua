--- Lines from standard input: edited, with history, at a terminal; read plainly elsewhere.
local core = require "weft.core"

local Input = {}
Input.__index = Input

local line_input = {}

--- options: history = FILE or nil, complete = function or nil (see src/bind/lua_line_editor.c); plain = true: no
-- editing at a terminal either, no prompt.
function line_input.open(options)
  local self = setmetatable({ plain = options.plain }, Input)
  if not options.plain and core.line_editor and core.isatty(0) and core.isatty(1) then
    self.editor = core.line_editor { history = options.history, complete = options.complete }
  end
  return self
end

--- A line; nil and "eof", or nil and "interrupt" when Ctrl-C dropped it.
function Input:read(prompt)
  if self.editor then return self.editor:read(prompt) end
  if not self.plain then
    io.stdout:write(prompt)
    io.stdout:flush()
  end
  local line = io.stdin:read "*l"
  if line then return line end
  return nil, "eof"
end

--- Keeps an entry for later; not one that begins with a space, nor the same again.
function Input:add(entry)
  if not self.editor or not entry:match "^%S" or entry == self.last then return end
  self.editor:add(entry:find("--", 1, true) and entry or (entry:gsub("\n", " "))) -- a comment ends with its line
  self.last = entry
end

--- The terminal as it was. ended: by the end of input, whose line is still open.
function Input:close(ended)
  if not self.editor then return end
  self.editor:close()
  self.editor = nil
  if ended then io.stdout:write "\n" end
end

return line_input
