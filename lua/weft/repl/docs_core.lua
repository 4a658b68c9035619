--- Texts of what is C: found in the comments at the top of the files of src/bind, which core._docs()
-- gives. docs.text("core.sampler.draw") or docs.text("weft.tensor:narrow") -> its lines, the whole comment.
local core = require "weft.core"

local docs = {}

local pages -- { { file =, about = first sentence, head = first line, lines = {...}, text = } }

local function read()
  if pages then return pages end
  pages = {}
  for _, comment in ipairs(core._docs()) do
    local lines = {}
    for line in (comment:gsub("%s*%*/%s*$", "") .. "\n"):gmatch "([^\n]*)\n" do
      lines[#lines + 1] = (line:gsub("^/%*%s?", ""):gsub("^ %*%s?", ""))
    end
    local paragraph = (table.concat(lines, "\n") .. "\n\n"):match "^(.-)\n%s*\n":gsub("%s+", " "):gsub("^bind/%S+ %- ", "")
    pages[#pages + 1] = { about = paragraph:match "^(.-%.)%s" or paragraph, head = table.concat(lines, " "):match "^(.-[.:])%s" or lines[1], lines = lines, text = table.concat(lines, "\n"),
      file = lines[1]:match "^bind/(%S+)" }
  end
  return pages
end

local function escaped(text) return (text:gsub("[%p]", "%%%0")) end

local function indent(line) return #line:match "^%s*" end

-- Of a line that lists several functions, the call of one with what is said of it; and whether more stands behind it.
local function call_of(line, name)
  local at, last = line:find(name .. "%f[^%w_]")
  if not at then return line, false end
  local first = name:match "^:" and #line:sub(1, at):match "^(.-)[%w_]*:$" + 1 or at
  local _, closed = line:find("^%b()", last + 1)
  if not closed then _, closed = line:find("^%b{}", last + 1) end
  closed = closed or last
  local rest = line:sub(closed + 1)
  local cut = rest:find "^%s+%a*[:.][%l_]+" or rest:find "%s%s+%a*[:.][%l_]+"
  return line:sub(first, cut and closed + cut - 1 or nil), cut ~= nil
end

-- The line that names it, and those that go on with it (deeper, or the text's own column).
local function entry(page, pattern, name)
  for i, line in ipairs(page.lines) do
    if i > 1 and line:find(pattern) then
      local found, depth = { line }, indent(line)
      for k = i + 1, #page.lines do
        local next_line = page.lines[k]
        if not next_line:match "%S" or indent(next_line) <= depth then break end
        found[#found + 1] = next_line
      end
      for k, text in ipairs(found) do found[k] = text:sub(depth + 1) end
      if name then
        local call, more = call_of(found[1], name)
        if more then return call end
        found[1] = call
      end
      return table.concat(found, "\n")
    end
  end
end

-- Whether a page is about a type: its first sentence names it.
local function names_type(page, class)
  return page.lines[1]:find(escaped(class) .. "%f[^%w_]") ~= nil or page.head:find(escaped(class) .. "%f[^%w_]") ~= nil
end

--- Lines about a function ("core.x", "core.x.y"), a method ("weft.type:m") or a type ("weft.type"), and
-- the whole comment they stand in; nil when there is no such text.
function docs.text(name)
  local class, method = name:match "^(weft%.[%w_]+):([%w_]+)$"
  local short = name:match "([%w_]+)$"
  local tail = "%f[%w_]" .. short .. "%f[^%w_]"
  for _, page in ipairs(read()) do
    local found
    if class then
      found = names_type(page, class) and (entry(page, ":" .. method .. "%f[^%w_]", ":" .. method) or method == "close" and "close(): lets go of the object; may be called again")
    elseif name:match "^core%." then
      found = page.text:find(escaped(name) .. "%f[^%w_]") and entry(page, escaped(name) .. "%f[^%w_]", escaped(name))
    elseif names_type(page, name) then
      found = page.about
    end
    if found then return found, page.text end
  end
  local space = name:match "^core%.([%w_]+)%.[%w_]+$" -- core.layout.owner: a line of the page about core.layout
  for _, page in ipairs(read()) do
    if space and page.text:find("core." .. space, 1, true) then
      local found = entry(page, "%f[%w_]" .. short .. "[({]") or entry(page, tail)
      if found then return found, page.text end
    end
  end
  for _, page in ipairs(read()) do
    if name:match "^core%." and not space then
      local found = entry(page, tail)
      if found then return found, page.text end
    end
  end
end

return docs
