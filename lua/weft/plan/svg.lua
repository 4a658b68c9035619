--- A plan as an SVG picture for a paper: the ranks of each layer type as a grid of cells, what moves,
-- and what a step should cost.
local picture = require "weft.plan.picture"
local svg_page = require "weft.plan.svg_page"

local svg = {}

local page_width, margin, gap = 700, 24, 4
local padding = 6 -- of a cell, left and right
local text_size, line_height, bar_height = 8.8, 11.5, 5
-- Told apart also by readers who see colours otherwise (Okabe and Ito).
local colours = { heads = "#0072b2", tokens = "#e69f00", out = "#56b4e9", columns = "#8f6bb3", experts = "#009e73", rows = "#7b8794" }
-- Of the step's parts: none is a colour of the cells, which mean something else.
local part_colours = { embedding = "#3d4451", qkv = "#c9a24d", attention = "#7a1f5c", exchange = "#d55e00", o_proj = "#e8d3a2", mlp = "#1f5c66",
  experts = "#a3b545", lm_head = "#e3a1b3", collectives = "#a12222", host = "#d9dde2" }
local narrowest = 3 -- a part of a bar that can be seen

-- Where a mark of `wide` of a bar of `width` stands, made wide enough to be seen and kept within the bar.
local function seen(from, wide, width)
  local shown = math.min(width, math.max(narrowest, wide))
  return math.max(0, math.min(from + wide / 2 - shown / 2, width - shown)), shown
end

local function draw_bar(page, bar, x, y, width)
  page:rect(x, y, width, bar_height, svg_page.pale)
  if bar.kind ~= "tokens" then
    local from, wide = seen(width * bar.from / bar.total, width * (bar.to - bar.from) / bar.total, width)
    if bar.to > bar.from then page:rect(x + from, y, wide, bar_height, colours[bar.kind]) end
    return
  end
  local periods = math.max(1, math.floor(16 / bar.strips))
  local strip = width / (periods * bar.strips)
  for i = 0, periods - 1 do
    local from, wide = seen((i * bar.strips + bar.mine) * strip, strip - (periods > 1 and 0.5 or 0), width)
    page:rect(x + from, y, wide, bar_height, colours.tokens)
  end
end

-- A cell with one line needs no word before its numbers: the panel says what they are.
local function line_text(cell, line)
  if #cell.lines == 1 then line = line:gsub("^%a+ ", "") end
  return (line:gsub("%-", "–"))
end

local function cell_height(cell) return 17 + #cell.lines * line_height + #cell.bars * (bar_height + 3) + 3 end

local function draw_cell(page, cell, x, y, width)
  page:rect(x, y, width, cell_height(cell), "#ffffff", { stroke = svg_page.edge, radius = 3, stroke_width = 0.8 })
  page:text(x + padding, y + 12.5, ("rank %d"):format(cell.rank), { size = text_size, bold = true })
  local at = y + 12.5
  for _, line in ipairs(cell.lines) do
    at = at + line_height
    page:text(x + padding, at, line_text(cell, line), { size = text_size, fill = svg_page.grey })
  end
  at = at + 5
  for _, bar in ipairs(cell.bars) do
    draw_bar(page, bar, x + padding, at, width - 2 * padding)
    at = at + bar_height + 3
  end
end

-- How many cells stand beside one another: as many as their text allows, in bands of equal length.
local function band_of(panel, width)
  local widest = 56
  for _, cell in ipairs(panel.cells) do
    for _, line in ipairs(cell.lines) do widest = math.max(widest, svg_page.text_width(line_text(cell, line), text_size)) end
  end
  local fit = math.max(1, math.min(8, math.floor((width + gap) / (widest + 2 * padding + gap))))
  local bands = math.ceil(panel.columns / fit)
  return math.ceil(panel.columns / bands)
end

local function draw_grid(page, panel, y)
  local left = margin + (panel.y_label and 16 or 0)
  local width = page_width - margin - left
  local band = band_of(panel, width)
  local wide = math.min(170, (width - (band - 1) * gap) / band)
  local height = cell_height(panel.cells[1])
  if panel.x_label then
    page:text(left, y + 8, panel.x_label .. " →", { size = text_size, fill = svg_page.grey })
    y = y + 14
  end
  for first = 0, panel.columns - 1, band do
    if panel.y_label then page:text(margin + 8, y + math.min(panel.rows * (height + gap), 150), "← " .. panel.y_label, { size = text_size, fill = svg_page.grey, turned = true }) end
    for row = 0, panel.rows - 1 do
      for c = first, math.min(panel.columns, first + band) - 1 do
        draw_cell(page, panel.cells[row * panel.columns + c + 1], left + (c - first) * (wide + gap), y, wide)
      end
      y = y + height + gap
    end
    if panel.rows > 1 and first + band < panel.columns then y = y + gap end
  end
  return y
end

local function draw_panel(page, panel, y)
  page:line(margin, y, page_width - margin, y, svg_page.edge, 0.8)
  y = y + 18
  page:text(margin, y, panel.title, { size = 12, bold = true })
  y = page:paragraph(margin, y + 14, page_width - 2 * margin, table.concat(panel.notes, " · "), { size = 9.5, fill = svg_page.grey })
  y = draw_grid(page, panel, y - 4)
  for _, move in ipairs(panel.moves) do
    page:text(margin, y + 8, "↔ " .. move, { size = 9.5 })
    y = y + 13
  end
  return y + 10
end

local function draw_price(page, price, y)
  page:line(margin, y, page_width - margin, y, svg_page.edge, 0.8)
  y = y + 18
  page:text(margin, y, ("one decode step on %s, predicted: %.3g ms"):format(price.machine, price.ms), { size = 12, bold = true })
  y = page:paragraph(margin, y + 14, page_width - 2 * margin, ("%d request%s of %d tokens; %.4g tokens/s a user, %.4g tokens/s a rank; roofline and latencies")
    :format(price.batch, price.batch == 1 and "" or "s", price.context, price.tok_per_s_user, price.tok_per_s_gpu), { size = 9.5, fill = svg_page.grey })
  local x, entries = margin, {}
  for i, part in ipairs(price.parts) do
    local wide = (page_width - 2 * margin) * part.ms / price.ms
    page:rect(x, y - 4, wide, 16, part_colours[part.part])
    x = x + wide
    entries[i] = { part_colours[part.part], ("%s %.3g ms"):format(part.part, part.ms) }
  end
  return page:legend(margin, y + 28, page_width - 2 * margin, entries, 9.5)
end

--- numbers: weft.plan_numbers of all ranks; price: weft.plan.price, or nil. The text of a file.
function svg.draw(numbers, price)
  local p, page = picture.of(numbers), svg_page.new(page_width)
  page:text(margin, 36, p.title, { size = 17, bold = true })
  local y = page:paragraph(margin, 54, page_width - 2 * margin, p.subtitle, { size = 10, fill = svg_page.grey })
  local entries = {}
  for i, kind in ipairs(p.kinds) do entries[i] = { colours[kind], picture.meaning[kind] } end
  y = page:legend(margin, y + 6, page_width - 2 * margin, entries, 9.5)
  for _, panel in ipairs(p.panels) do y = draw_panel(page, panel, y) end
  if price then draw_price(page, price, y) end
  return page:finish(p.title)
end

return svg
