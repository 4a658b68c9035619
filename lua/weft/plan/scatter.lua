--- The front of a search, as a table and a scatter in characters, and as an SVG picture. Both axes
-- are logarithmic: tokens a second of one user to the right, of one rank upward.
local svg_page = require "weft.plan.svg_page"
local terminal = require "weft.plan.terminal"

local scatter = {}

local x_name, y_name = "tokens/s a user", "tokens/s a rank"

local function round_number(x)
  if x >= 1e4 then return ("%.3gk"):format(x / 1e3) end
  return ("%.4g"):format(x)
end

-- A logarithmic axis over a field of all points: place(value) in [0, 1], and ticks 1, 2, 5, 10, ..., more of them
-- where it spans little.
local function axis_of(points, field)
  local low, high = math.huge, 0
  for _, p in ipairs(points) do low, high = math.min(low, p[field]), math.max(high, p[field]) end
  low, high = low * 0.95, high * 1.05
  local axis = { ticks = {} }
  function axis.place(value) return math.log(value / low) / math.log(high / low) end
  for decade = math.floor(math.log10(low)), math.ceil(math.log10(high)) do
    for _, step in ipairs(high / low > 8 and { 1, 2, 5 } or { 1, 1.5, 2, 3, 4, 5, 6, 8 }) do
      local tick = step * 10 ^ decade
      if tick >= low and tick <= high then axis.ticks[#axis.ticks + 1] = tick end
    end
  end
  return axis
end

local function heading(result)
  return ("%d legal plan%s on up to %d rank%s, %d of them fit; %d points of context %d on %s in %.2f s (predicted, not measured)"):format(
    result.num_plans, result.num_plans == 1 and "" or "s", result.max_ranks, result.max_ranks == 1 and "" or "s", result.num_fitting, result.num_points, result.context, result.machine, result.seconds)
end

local function table_lines(result, lines)
  lines[#lines + 1] = ("  %16s  %16s  %9s  %5s  %5s  %s"):format(x_name, y_name, "ms a step", "ranks", "batch", "plan")
  for _, p in ipairs(result.front) do
    lines[#lines + 1] = ("  %16s  %16s  %9.3f  %5d  %5d  %s"):format(round_number(p.user), round_number(p.rank), p.ms, p.ranks, p.batch, p.label)
  end
end

local function plot_lines(result, colour, lines)
  local width, height = math.min(80, terminal.width() - 12), 18
  local x, y, cells = axis_of(result.points, "user"), axis_of(result.points, "rank"), {}
  local function column(value) return math.floor(x.place(value) * (width - 1) + 0.5) end
  local function row(value) return math.floor((1 - y.place(value)) * (height - 1) + 0.5) end
  for _, p in ipairs(result.points) do
    local at = row(p.rank) * width + column(p.user)
    if p.front or not cells[at] then cells[at] = p.front and "●" or cells[at] or "·" end
  end
  local labels, marks = {}, {}
  for _, tick in ipairs(y.ticks) do labels[row(tick)] = round_number(tick) end
  lines[#lines + 1] = ("%9s"):format(y_name)
  for r = 0, height - 1 do
    local line = {}
    for c = 0, width - 1 do
      local mark = cells[r * width + c]
      line[c + 1] = mark and terminal.paint(mark, mark == "●" and 208 or 245, colour) or " "
    end
    lines[#lines + 1] = (("%8s %s%s"):format(labels[r] or "", labels[r] and "┤" or "│", table.concat(line)):gsub("%s+$", ""))
  end
  local ruler, names, reached = {}, {}, -2
  for c = 0, width - 1 do ruler[c + 1] = "─" end
  for _, tick in ipairs(x.ticks) do
    local at, text = column(tick), round_number(tick)
    ruler[at + 1] = "┬"
    local from = math.max(0, math.min(width - #text, at - math.floor(#text / 2)))
    if from > reached + 1 then
      marks[#marks + 1] = (" "):rep(from - math.max(0, reached)) .. text
      reached = from + #text
    end
  end
  names[1] = table.concat(marks)
  lines[#lines + 1] = (" "):rep(9) .. "└" .. table.concat(ruler)
  lines[#lines + 1] = (" "):rep(10) .. names[1]
  lines[#lines + 1] = (" "):rep(10) .. (" "):rep(width - #x_name) .. x_name
end

--- The front as text. options.colour.
function scatter.text(result, options)
  local lines = { heading(result) }
  if #result.points == 0 then
    lines[2] = ("no legal plan on up to %d rank%s has room for its weights and %d request%s of %d tokens"):format(result.max_ranks,
      result.max_ranks == 1 and "" or "s", result.batch or 1, (result.batch or 1) == 1 and "" or "s", result.context)
    return table.concat(lines, "\n") .. "\n"
  end
  table_lines(result, lines)
  lines[#lines + 1] = ""
  plot_lines(result, options.colour, lines)
  return table.concat(lines, "\n") .. "\n"
end

-- Axes, their ticks and names around the box.
local function frame(page, box, x, y)
  for _, tick in ipairs(x.ticks) do
    local at = box.x + x.place(tick) * box.width
    page:line(at, box.y, at, box.y + box.height, svg_page.pale, 1)
    page:text(at, box.y + box.height + 14, round_number(tick), { size = 9.5, anchor = "middle", fill = svg_page.grey })
  end
  for _, tick in ipairs(y.ticks) do
    local at = box.y + (1 - y.place(tick)) * box.height
    page:line(box.x, at, box.x + box.width, at, svg_page.pale, 1)
    page:text(box.x - 6, at + 3, round_number(tick), { size = 9.5, anchor = "end", fill = svg_page.grey })
  end
  page:line(box.x, box.y + box.height, box.x + box.width, box.y + box.height, svg_page.ink, 1)
  page:line(box.x, box.y, box.x, box.y + box.height, svg_page.ink, 1)
  page:text(box.x + box.width, box.y + box.height + 30, x_name .. " (log)", { size = 10.5, anchor = "end" })
  page:text(box.x - 46, box.y, y_name .. " (log)", { size = 10.5, anchor = "end", turned = true })
end

local function cloud(page, result, place)
  local taken = {}
  for _, p in ipairs(result.points) do -- one grey dot for all that fall together
    local px, py = place(p)
    local key = math.floor(px / 3) * 4096 + math.floor(py / 3)
    if not p.front and not taken[key] then
      taken[key] = true
      page:circle(px, py, 1.6, "#c3cad2")
    end
  end
end

-- Points of the front, numbered where there is room; the table below names them.
local function front_points(page, result, place)
  local line = {}
  for i, p in ipairs(result.front) do line[i] = { place(p) } end
  page:path(line, "#d55e00", 1.5)
  local last
  for i, p in ipairs(result.front) do
    local px, py = line[i][1], line[i][2]
    page:circle(px, py, 3.2, "#d55e00", ("%s, batch %d"):format(p.label, p.batch))
    if not last or math.abs(px - last[1]) + math.abs(py - last[2]) > 16 then
      page:text(px + 5, py - 4, tostring(i), { size = 8.5 })
      last = { px, py }
    end
  end
end

local columns = { { 24, "start" }, { 130, "end" }, { 220, "end" }, { 290, "end" }, { 340, "end" }, { 392, "end" }, { 410, "start" } }

local function rows(page, result, y)
  local function row(cells, options)
    for i, cell in ipairs(cells) do
      page:text(columns[i][1], y, cell, { size = 9, anchor = columns[i][2], fill = options.fill, bold = options.bold })
    end
    y = y + 13
  end
  row({ "", x_name, y_name, "ms a step", "ranks", "batch", "plan" }, { bold = true })
  for i, p in ipairs(result.front) do
    row({ tostring(i), round_number(p.user), round_number(p.rank), ("%.3f"):format(p.ms), tostring(p.ranks), tostring(p.batch), p.label }, { fill = svg_page.grey })
  end
end

--- The front as the text of an SVG file.
function scatter.svg(result)
  local page = svg_page.new(700)
  local title = ("%s: the front of decoding plans"):format(result.model or "model")
  page:text(24, 36, title, { size = 17, bold = true })
  local y = page:paragraph(24, 54, 652, heading(result), { size = 10, fill = svg_page.grey })
  if #result.points == 0 then return page:finish(title) end
  y = page:legend(24, y + 4, 652, { { "#d55e00", "plans that no other beats in both" }, { "#c3cad2", "all others that fit" } }, 9.5)
  local box = { x = 78, y = y + 6, width = 590, height = 380 }
  local x_axis, y_axis = axis_of(result.points, "user"), axis_of(result.points, "rank")
  local function place(p) return box.x + x_axis.place(p.user) * box.width, box.y + (1 - y_axis.place(p.rank)) * box.height end
  frame(page, box, x_axis, y_axis)
  cloud(page, result, place)
  front_points(page, result, place)
  rows(page, result, box.y + box.height + 58)
  return page:finish(title)
end

return scatter
