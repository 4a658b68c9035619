--- Reading: text to a chunk, and standard input to the chunks and commands it holds.
local read = {}

local function unfinished(message) return message:find("near '<eof>'", 1, true) ~= nil end

local function ends_at(text) return select(2, text:gsub("\n", "\n")) end

--- A function with env as its globals; or "more" and what is missing when the text is unfinished; or nil and the message.
-- An expression is tried first, so that results are shown without `return`.
function read.compile(text, env)
  text = text .. "\n" -- without it an unclosed quote reads as unfinished for ever
  -- Behind the nil a call is no tail call, of which errors would name the wrong function.
  local expression, as_expression = loadstring("return nil, " .. text, "=(expression)")
  local chunk, as_statement = expression, nil
  if not chunk then chunk, as_statement = loadstring(text, "=repl") end
  if chunk then
    jit.off(chunk, true) -- compiled loops never look at hooks: Ctrl-C could not stop them
    setfenv(chunk, env)
    return expression and function() return select(2, expression()) end or chunk
  end
  -- `1 +` is unfinished only as an expression, `for i = 1, 3 do` only as a statement.
  local missing = unfinished(as_statement) and as_statement or unfinished(as_expression) and as_expression
  if missing then return "more", ("line %d: the input ends in the middle of a statement: %s"):format(ends_at(text), missing:match ":%d+: (.*) near '<eof>'") end
  return nil, (as_statement:gsub("^repl:", "line "))
end

local function asks(line) return line:match "^%s*([%a_][%w_%.:%[%]\"']*)%s*%?%s*$" end

--- What a line of its own is: { kind = "command", name, rest }, { kind = "help", name },
-- { kind = "lua", ranks = "2" | "*" | nil, text }.
function read.parse(line)
  local name, rest = line:match "^,(%a*)%s*(.-)%s*$"
  if name then return { kind = "command", name = name, rest = rest } end
  local ranks, text = line:match "^@(%S*)%s*(.*)$"
  if ranks then return { kind = "lua", ranks = ranks, text = text } end
  local asked = asks(line)
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

--- The pieces of a whole input, in order. Lines that begin with `,` or `@` and NAME? stand alone, unless they are
-- inside a longer piece of Lua (a long string, say). Empty lines take the place of what stands above a piece of
-- Lua, so that messages name the line of the input. A byte order mark is skipped.
function read.pieces(input, env)
  local pieces, held, number = {}, {}, 0
  local function finish()
    local text = table.concat(held, "\n")
    held = {}
    if text:match "%S" then pieces[#pieces + 1] = { kind = "lua", text = text } end
  end
  for line in (input:gsub("^\239\187\191", ""):gsub("\n$", "") .. "\n"):gmatch "([^\n]*)\n" do
    number = number + 1
    if (line:match "^[,@]" or asks(line)) and (#held == 0 or read.compile(table.concat(held, "\n"), env) ~= "more") then
      finish()
      local piece = read.parse(line)
      if piece.text then piece.text = ("\n"):rep(number - 1) .. piece.text end
      pieces[#pieces + 1] = piece
      for i = 1, number do held[i] = "" end
    else
      held[#held + 1] = line
    end
  end
  finish()
  return pieces
end

return read
