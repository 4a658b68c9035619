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

--- Columns that text may take: the terminal's, or $COLUMNS, or 100.
function terminal.width()
  return math.max(60, math.min(200, core.terminal_width() or tonumber(os.getenv "COLUMNS") or 100))
end

--- Characters of UTF-8 text, each one column wide.
function terminal.length(text)
  return select(2, text:gsub("[^\128-\191]", ""))
end

--- Adds text to lines, broken at spaces so that none is wider; lines after the first begin with `indent`.
function terminal.wrap(text, width, lines, indent)
  local line
  for word in text:gmatch "%S+" do
    local longer = line and line .. " " .. word or (text:match "^%s*" .. word)
    if line and terminal.length(longer) > width then
      lines[#lines + 1] = line
      longer = (indent or "") .. word
    end
    line = longer
  end
  lines[#lines + 1] = line
end

return terminal
