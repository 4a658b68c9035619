--- The prompt at a terminal: banner, lines, pieces of more than one line, history, completion.
local core = require "weft.core"
local commands = require "weft.repl.commands"
local complete = require "weft.repl.complete"
local line_input = require "weft.line_input"
local read = require "weft.repl.read"
local state_file = require "weft.state_file"

local prompt = {}

--- Messages go to standard error; standard output holds results.
function prompt.complain(message) io.stderr:write(message, "\n") end

local function note_local(state, text)
  if state.told_local or not text:match "^%s*local%s" then return end
  state.told_local = true
  prompt.complain "(a local lives as long as its line; without `local` the name stays for the session)"
end

-- One piece, however many lines it takes; nil and why not. One blank line may stand in a piece, as in any program;
-- a second one behind it, or Ctrl-C, drops the piece.
local function read_piece(state, input)
  core.interrupted() -- a Ctrl-C that came too late for the line before is not for the next
  local line, why = input:read "weft> "
  if not line then return nil, why end
  local piece = read.parse(line)
  local text, blank = line, false
  while piece.kind == "lua" and piece.text:match "%S" and read.compile(piece.text, state.env) == "more" do
    line, why = input:read "  ... "
    if not line and why == "eof" then
      if not input.editor then prompt.complain "(dropped: the input ends within this piece)" end
      return nil, why
    end
    if not line or blank and not line:match "%S" then
      prompt.complain "(dropped)"
      return nil, "dropped"
    end
    blank = not line:match "%S"
    piece.text, text = piece.text .. "\n" .. line, text .. "\n" .. line
  end
  input:add(text)
  return piece
end

local function banner(state)
  local n = core.rank().world_size
  prompt.complain(("weft %s. %s"):format(core.version, state.model and tostring(state.model) or
    ("%d rank%s, no model"):format(n, n == 1 and "" or "s")))
  prompt.complain "Lua on all ranks; ,help lists the commands, Ctrl-D leaves."
end

--- Reads and acts until the end of input or `quit`: act(state, piece) of commands/repl.lua. The file that $WEFT_STARTUP
-- names is run first, on all ranks. Gives the exit code.
function prompt.converse(state, act)
  state.time = core.isatty(1)
  local history = state_file.path("WEFT_HISTORY", "history")
  if history then
    local text, why = state_file.read(history)
    if text then
      state_file.make_folder(history)
    else
      prompt.complain(("no history is kept: cannot read %s (WEFT_HISTORY names the file)"):format(why))
      history = nil
    end
  end
  local input = line_input.open { history = history, complete = function(text)
    return complete.line(text, state.env, commands)
  end }
  banner(state)
  local startup, ended = os.getenv "WEFT_STARTUP", nil
  if startup and startup ~= "" then act(state, { kind = "command", name = "reload", rest = startup }) end
  while not state.quitting and not ended do
    local piece, why = read_piece(state, input)
    if piece and (piece.kind == "command" or piece.text:match "%S") then
      if piece.text then note_local(state, piece.text) end
      act(state, piece)
    elseif not piece then
      ended = why == "eof"
    end
  end
  input:close(ended)
  return state.quitting or 0
end

return prompt
