--- A plan drawn in characters: one box for each rank, with what it holds as text and as bars; a table where
-- there are too many ranks for boxes.
local grid = require "weft.plan.grid"
local picture = require "weft.plan.picture"
local terminal = require "weft.plan.terminal"

local draw = {}

-- Of the 256 colours: readable on dark and on light.
local colours = { heads = 33, tokens = 208, out = 38, columns = 134, experts = 35, rows = 245 }
local bar_width = 12
local most_boxes = 16

-- Whether the part from..to of total touches cell i (from 0) of the bar.
local function touches(bar, i)
  return bar.from * bar_width < (i + 1) * bar.total and bar.to * bar_width > i * bar.total
end

-- Whether cell i shows the rank's strips: as many whole rounds of all strips as there is room for.
local function holds(bar, i)
  local rounds = math.max(1, math.floor(bar_width / bar.strips))
  return math.floor(i * rounds * bar.strips / bar_width) % bar.strips == math.min(bar.mine, bar.strips - 1)
end

local function bar_text(bar, colour)
  local text = {}
  for i = 0, bar_width - 1 do
    local filled
    if bar.kind ~= "tokens" then filled = touches(bar, i)
    elseif bar.strips <= bar_width then filled = holds(bar, i)
    else filled = i == math.floor(bar.mine * bar_width / bar.strips) end
    text[i + 1] = terminal.paint(filled and "█" or "░", filled and colours[bar.kind] or 240, colour)
  end
  return table.concat(text)
end

-- The inside of a box: lines of the same width; the first names the rank.
local function inside(cell, width, colour)
  local lines = {}
  local function add(text, shown)
    lines[#lines + 1] = (shown or text) .. (" "):rep(width - terminal.length(text))
  end
  add(("rank %d"):format(cell.rank))
  for _, line in ipairs(cell.lines) do add(line) end
  for _, bar in ipairs(cell.bars) do add(("x"):rep(bar_width), bar_text(bar, colour)) end
  return lines
end

local function width_of(panel)
  local width = bar_width
  for _, cell in ipairs(panel.cells) do
    for _, line in ipairs(cell.lines) do width = math.max(width, terminal.length(line)) end
  end
  return width
end

-- One row of boxes, columns first..last.
local function boxes(panel, row, first, last, width, options, lines)
  local columns = {}
  for c = first, last do
    columns[#columns + 1] = inside(panel.cells[(row - 1) * panel.columns + c], width, options.colour)
  end
  local edge = ("─"):rep(width + 2)
  local top, bottom = {}, {}
  for i = 1, #columns do top[i], bottom[i] = "┌" .. edge .. "┐", "└" .. edge .. "┘" end
  lines[#lines + 1] = table.concat(top, " ")
  for i = 1, #columns[1] do
    local pieces = {}
    for c, column in ipairs(columns) do pieces[c] = "│ " .. column[i] .. " │" end
    lines[#lines + 1] = table.concat(pieces, " ")
  end
  lines[#lines + 1] = table.concat(bottom, " ")
end

local function box_lines(panel, options, lines)
  local width = width_of(panel)
  local fit = math.max(1, math.floor(options.width / (width + 5)))
  fit = math.ceil(panel.columns / math.ceil(panel.columns / fit)) -- bands of equal length
  for first = 1, panel.columns, fit do
    for row = 1, panel.rows do boxes(panel, row, first, math.min(panel.columns, first + fit - 1), width, options, lines) end
  end
end

local function panel_lines(panel, options, lines)
  lines[#lines + 1] = ""
  terminal.wrap(("%s: %s"):format(panel.title, table.concat(panel.notes, ", ")), options.width, lines, "  ")
  if #panel.cells > most_boxes then grid.lines(panel, options, lines) else box_lines(panel, options, lines) end
  if #panel.moves == 0 then lines[#lines + 1] = "  nothing moves" end
  for _, move in ipairs(panel.moves) do lines[#lines + 1] = "  ↔ " .. move end
end

--- numbers: weft.plan_numbers of all ranks. options: colour, width (columns).
function draw.text(numbers, options)
  local p = picture.of(numbers)
  local lines, boxes_too = {}, numbers.num_ranks <= most_boxes
  options = { colour = options.colour, width = options.width or terminal.width() }
  terminal.wrap(p.title .. ": " .. p.subtitle, options.width, lines, "  ")
  for _, panel in ipairs(p.panels) do panel_lines(panel, options, lines) end
  if not boxes_too then return table.concat(lines, "\n") .. "\n" end
  local legend = {}
  for i, kind in ipairs(p.kinds) do
    legend[i] = (options.colour and terminal.paint("█", colours[kind], true) .. " " or "") .. picture.meaning[kind]
  end
  lines[#lines + 1] = ""
  if options.colour then
    for _, entry in ipairs(legend) do lines[#lines + 1] = entry end
  else
    terminal.wrap("bars, in this order: " .. table.concat(legend, "; "), options.width, lines, "  ")
  end
  return table.concat(lines, "\n") .. "\n"
end

return draw
