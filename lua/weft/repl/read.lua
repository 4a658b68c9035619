--- Reading: text to a chunk, and standard input to the chunks and commands it holds.
local read = {}

local function unfinished(message) return message:find("near '<eof>'", 1, true) ~= nil end

--- A function with env as its globals; or "more" when the text is unfinished; or nil and the message.
-- An expression is tried first, so that results are shown without `return`.
function read.compile(text, env)
  text = text .. "\n" -- without it an unclosed quote reads as unfinished for ever
  local chunk, as_expression = loadstring("return " .. text, "=repl")
  local as_statement
  if not chunk then chunk, as_statement = loadstring(text, "=repl") end
  if chunk then
    jit.off(chunk, true) -- compiled loops never look at hooks: Ctrl-C could not stop them
    return setfenv(chunk, env)
  end
  -- `1 +` is unfinished only as an expression, `for i = 1, 3 do` only as a statement.
  if unfinished(as_expression) or unfinished(as_statement) then return "more" end
  return nil, (as_statement:gsub("^repl:", "line "))
end

--- What a line of its own is: { kind = "command", name, rest }, { kind = "help", name },
-- { kind = "lua", ranks = "2" | "*" | nil, text }.
function read.parse(line)
  local name, rest = line:match "^,(%a*)%s*(.-)%s*$"
  if name then return { kind = "command", name = name, rest = rest } end
  local ranks, text = line:match "^@(%S*)%s*(.*)$"
  if ranks then return { kind = "lua", ranks = ranks, text = text } end
  local asked = line:match "^%s*([%a_][%w_%.:]*)%s*%?%s*$"
  if asked then return { kind = "command", name = "help", rest = asked } end
  return { kind = "lua", text = line }
end

--- The words of a command's arguments: split at spaces, "quoted" and 'quoted' ones whole. nil and a message when a
-- quote is not closed.
function read.words(text)
  local words, at = {}, 1
  while true do
    local first = text:find("%S", at)
    if not first then return words end
    local mark = text:sub(first, first):match "[\"']"
    local last = mark and text:find(mark, first + 1, true) or not mark and (text:find("%s", first) or #text + 1)
    if not last then return nil, "a quote is not closed: " .. text:sub(first) end
    words[#words + 1] = text:sub(mark and first + 1 or first, last - 1)
    at = last + 1
  end
end

--- The pieces of a whole input, in order. Lines that begin with `,` or `@` stand alone, unless they are
-- inside a longer piece of Lua (a long string, say).
function read.pieces(input, env)
  local pieces, held = {}, {}
  local function finish()
    local text = table.concat(held, "\n")
    held = {}
    if text:match "%S" then pieces[#pieces + 1] = { kind = "lua", text = text } end
  end
  for line in (input:gsub("\n$", "") .. "\n"):gmatch "([^\n]*)\n" do
    if line:match "^[,@]" and (#held == 0 or read.compile(table.concat(held, "\n"), env) ~= "more") then
      finish()
      pieces[#pieces + 1] = read.parse(line)
    else
      held[#held + 1] = line
    end
  end
  finish()
  return pieces
end

return read
