--- Colour and width of the terminal on standard output.
local core = require "weft.core"

local terminal = {}

--- Colour only on a terminal, and not where NO_COLOR is set.
function terminal.colour()
  local refused = os.getenv "NO_COLOR"
  return core.isatty(1) and (refused == nil or refused == "") and os.getenv "TERM" ~= "dumb"
end

--- text in one of the 256 colours.
function terminal.paint(text, number, colour)
  if not colour then return text end
  return ("\27[38;5;%dm%s\27[0m"):format(number, text)
end

--- Columns that text may take.
function terminal.width()
  return math.max(60, math.min(200, tonumber(os.getenv "COLUMNS") or 100))
end

--- Characters of UTF-8 text, each one column wide.
function terminal.length(text)
  return select(2, text:gsub("[^\128-\191]", ""))
end

return terminal
