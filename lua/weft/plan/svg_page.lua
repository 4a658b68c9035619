--- A page of SVG: rectangles, lines, text, and the estimate of how wide text is.
--
-- No fonts are brought along: the viewer's sans-serif is used, and room is left for a wide one.
local svg_page = {}

local Page = {}
Page.__index = Page

svg_page.ink, svg_page.grey, svg_page.pale, svg_page.edge = "#1f2933", "#5c6773", "#e9edf1", "#c3cad2"

--- width in user units; the height is what was drawn.
function svg_page.new(width)
  return setmetatable({ width = width, height = 0, items = {} }, Page)
end

local entities = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }
local function escape(text) return (text:gsub('[&<>"]', entities)) end

-- "12.5" rather than "12.500000001".
local function number(x) return (("%.2f"):format(x):gsub("%.?0+$", "")) end

-- Ems that characters take in the wider sans-serifs; 0.6 for all others.
local ems = {}
for character in ("ijl.,:;|'! "):gmatch "." do ems[character] = 0.31 end
for character in ("tfr()-/"):gmatch "." do ems[character] = 0.4 end
for character in ("mwMW"):gmatch "." do ems[character] = 0.95 end

function svg_page.text_width(text, size)
  local width = 0
  for character in text:gmatch "[^\128-\191]" do width = width + (ems[character] or 0.6) end
  return width * size
end

function Page:reach(y) self.height = math.max(self.height, y) end

function Page:rect(x, y, width, height, fill, options)
  options = options or {}
  self.items[#self.items + 1] = ('<rect x="%s" y="%s" width="%s" height="%s" fill="%s"%s%s/>'):format(number(x), number(y),
    number(width), number(height), fill, options.radius and (' rx="%s"'):format(number(options.radius)) or "",
    options.stroke and (' stroke="%s" stroke-width="%s"'):format(options.stroke, number(options.stroke_width or 1)) or "")
  self:reach(y + height)
end

function Page:line(x1, y1, x2, y2, stroke, width, dash)
  self.items[#self.items + 1] = ('<line x1="%s" y1="%s" x2="%s" y2="%s" stroke="%s" stroke-width="%s"%s/>'):format(number(x1),
    number(y1), number(x2), number(y2), stroke, number(width or 1), dash and (' stroke-dasharray="%s"'):format(dash) or "")
  self:reach(math.max(y1, y2))
end

function Page:circle(x, y, radius, fill, title)
  self.items[#self.items + 1] = ('<circle cx="%s" cy="%s" r="%s" fill="%s">%s</circle>'):format(number(x), number(y), number(radius),
    fill, title and ("<title>%s</title>"):format(escape(title)) or "")
  self:reach(y + radius)
end

function Page:path(points, stroke, width)
  local text = {}
  for i, p in ipairs(points) do text[i] = ("%s%s %s"):format(i == 1 and "M" or "L", number(p[1]), number(p[2])) end
  self.items[#self.items + 1] = ('<path d="%s" fill="none" stroke="%s" stroke-width="%s"/>'):format(table.concat(text, " "), stroke, number(width or 1))
end

--- y is the baseline. options: size (10), fill, bold, anchor (start, middle, end), turned (reads upward).
function Page:text(x, y, text, options)
  options = options or {}
  local place = options.turned and ('transform="translate(%s %s) rotate(-90)"'):format(number(x), number(y))
    or ('x="%s" y="%s"'):format(number(x), number(y))
  self.items[#self.items + 1] = ('<text %s font-size="%s" fill="%s"%s%s>%s</text>'):format(place, number(options.size or 10),
    options.fill or svg_page.ink, options.bold and ' font-weight="600"' or "",
    options.anchor and options.anchor ~= "start" and (' text-anchor="%s"'):format(options.anchor) or "", escape(text))
  if not options.turned then self:reach(y + 2) end
end

--- Text over as many lines as it needs; gives the baseline after the last.
function Page:paragraph(x, y, width, text, options)
  local size, line = options.size or 10, ""
  for word in text:gmatch "%S+" do
    local longer = line == "" and word or line .. " " .. word
    if line ~= "" and svg_page.text_width(longer, size) > width then
      self:text(x, y, line, options)
      y, longer = y + size * 1.35, word
    end
    line = longer
  end
  self:text(x, y, line, options)
  return y + size * 1.35
end

--- Swatches { { colour, text }, ... } in a row, wrapped; gives the y after them.
function Page:legend(x, y, width, entries, size)
  local at = x
  for _, entry in ipairs(entries) do
    local wide = 14 + svg_page.text_width(entry[2], size) + 14
    if at > x and at + wide > x + width then at, y = x, y + size * 1.6 end
    self:rect(at, y - size * 0.75, 9, size * 0.75, entry[1], { radius = 1 })
    self:text(at + 14, y, entry[2], { size = size, fill = svg_page.grey })
    at = at + wide
  end
  return y + size * 1.6
end

function Page:finish(title)
  local height = math.ceil(self.height + 20)
  return table.concat {
    ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Helvetica, Arial, \'Liberation Sans\', sans-serif">\n')
      :format(self.width, height, self.width, height),
    ("<title>%s</title>\n"):format(escape(title)),
    ('<rect width="%d" height="%d" fill="#ffffff"/>\n'):format(self.width, height),
    table.concat(self.items, "\n"), "\n</svg>\n",
  }
end

return svg_page
