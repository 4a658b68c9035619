--- A panel of a plan's picture as a table of characters, for many ranks: what all ranks of a column or of a
-- row have in common stands at its head, what is left in the cells.
local terminal = require "weft.plan.terminal"

local grid = {}

-- The texts of a cell: what boxes show, and which strips of the sequence it holds.
local function texts_of(cell)
  local list = {}
  for i, line in ipairs(cell.lines) do list[i] = line end
  if cell.strip then list[#list + 1] = cell.strip end
  return list
end

-- Whether text k is the same in all cells of a column (down) or of a row.
local function shared(panel, texts, k, down)
  local outer, inner = panel.columns, panel.rows
  if not down then outer, inner = inner, outer end
  if inner == 1 then return false end
  for o = 0, outer - 1 do
    for i = 1, inner - 1 do
      local first = down and o or o * panel.columns
      local other = down and i * panel.columns + o or o * panel.columns + i
      if texts[first + 1][k] ~= texts[other + 1][k] then return false end
    end
  end
  return true
end

-- Which texts go to the heads of columns, to the heads of rows, and into the cells.
local function places(panel, texts)
  local place = { column = {}, row = {}, cell = {} }
  for k = 1, #texts[1] do
    local where = shared(panel, texts, k, true) and "column" or shared(panel, texts, k, false) and "row" or "cell"
    table.insert(place[where], k)
  end
  return place
end

local function joined(texts, list)
  local words = {}
  for i, k in ipairs(list) do words[i] = texts[k] end
  return table.concat(words, " ")
end

local function padded(text, width) return text .. (" "):rep(width - terminal.length(text)) end

local function widest(list)
  local width = 0
  for _, text in ipairs(list) do width = math.max(width, terminal.length(text)) end
  return width
end

local head_colour = 33

-- One line: the row's head where there is one, then the columns first..last, which are heads too or not.
local function line(head, head_width, cells, width, first, last, colour, heads)
  local parts = { head_width > 0 and terminal.paint(padded(head, head_width), head_colour, colour) or nil }
  for c = first, last do
    local text = c < last and padded(cells[c], width) or cells[c]
    parts[#parts + 1] = terminal.paint(text, head_colour, colour and heads)
  end
  return "  " .. (table.concat(parts, "  "):gsub("%s+$", ""))
end

--- Adds the panel's lines. options: width (columns of the terminal), colour.
function grid.lines(panel, options, lines)
  local texts, cells, heads, rows = {}, {}, {}, {}
  for i, cell in ipairs(panel.cells) do texts[i] = texts_of(cell) end
  local place = places(panel, texts)
  local alone = #texts[1] == 1 and panel.rows == 1 -- needs no word before its numbers: the panel says what they are
  local name = ("rank %%-%dd  "):format(#tostring(#panel.cells - 1))
  for i, cell in ipairs(panel.cells) do
    local text = joined(texts[i], place.cell)
    cells[i] = ((name:format(cell.rank) .. (alone and text:gsub("^%a+ ", "") or text)):gsub("%s+$", ""))
  end
  for r = 0, panel.rows - 1 do rows[r + 1] = joined(texts[r * panel.columns + 1], place.row) end
  for c = 1, panel.columns do
    for i, k in ipairs(place.column) do
      heads[i] = heads[i] or {}
      heads[i][c] = texts[c][k]
    end
  end
  local width, head_width = widest(cells), widest(rows)
  for _, list in ipairs(heads) do width = math.max(width, widest(list)) end
  local fit = math.max(1, math.floor((options.width - head_width - (head_width > 0 and 2 or 0)) / (width + 2)))
  fit = math.ceil(panel.columns / math.ceil(panel.columns / fit)) -- bands of equal length
  for first = 1, panel.columns, fit do
    local last = math.min(panel.columns, first + fit - 1)
    if first > 1 and panel.rows > 1 then lines[#lines + 1] = "" end
    for _, list in ipairs(heads) do lines[#lines + 1] = line("", head_width, list, width, first, last, options.colour, true) end
    for r = 0, panel.rows - 1 do
      local list = {}
      for c = first, last do list[c] = cells[r * panel.columns + c] end
      lines[#lines + 1] = line(rows[r + 1], head_width, list, width, first, last, options.colour)
    end
  end
end

return grid
