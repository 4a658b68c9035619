--- Lines from standard input: edited, with history, at a terminal; read plainly elsewhere.
local core = require "weft.core"
local errors = require "weft.errors"

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
  local line, message = io.stdin:read "*l"
  if line and not self.begun then line = line:gsub("^\239\187\191", "") end -- the mark of UTF-8 that some editors write
  self.begun = true
  if line then return line end
  if message then errors.raise { message = "cannot read standard input: " .. message, code = "io" } end
  return nil, "eof"
end

--- Keeps an entry for later; not one that begins with a space, nor the same again.
function Input:add(entry)
  if not self.editor or not entry:match "^%S" or entry == self.last then return end
  -- Lines that may end a comment or stand in a string stay lines; others come back as one, which edits better.
  local keeps = entry:find("--", 1, true) or entry:find "%[=*%[" or entry:find("\\\n", 1, true)
  self.editor:add(keeps and entry or (entry:gsub("\n", " ")))
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
