--- The commands of the prompt: lines that begin with a comma, which no Lua does.
--
-- `here` runs on rank 0, with `leads` inside core.evaluate, where Ctrl-C stops it; `everywhere` on all ranks inside core.evaluate, and gives on rank 0 what is
-- to be shown. state: see commands/repl.lua.
local core = require "weft.core"
local errors = require "weft.errors"
local flags = require "weft.flags"
local help = require "weft.repl.help"
local read = require "weft.repl.read"
local setup = require "weft.setup"

local commands = {}

local function refuse(message) error({ message = message, code = "invalid" }, 0) end

local function overview()
  local names, lines = {}, {}
  for name in pairs(commands) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do lines[i] = ("  %-16s %s"):format("," .. name .. " " .. commands[name].arguments, commands[name].about) end
  return table.concat(lines, "\n") .. "\n" .. [[
Anything else is Lua, evaluated by all ranks together; results are shown without `return`, `_` is the
last one. A local lives as long as its line. `@2 expr` runs on rank 2 alone, `@* expr` shows every
rank's answer. Ctrl-C stops what runs on all ranks (a second one ends weft), Ctrl-D leaves.
$WEFT_STARTUP names a file that is run first at a terminal, $WEFT_HISTORY where history is kept.
At hand: weft, model, engine, policy, generate "text", bench { policy, policy }, quit(). ,help NAME says more.
]]
end

commands.help = { arguments = "[NAME]", about = "what NAME is and does (also: NAME?); every function, method and type",
  here = function(state, rest)
    if rest == "" then return overview() end
    local command = commands[rest:match "^,?(%a+)$" or ""]
    if rest:sub(1, 1) == "," and command then return (",%s %s  %s\n"):format(rest:sub(2), command.arguments, command.about) end
    local found, message = help.text(rest, state.env)
    if not found then refuse(message) end
    return found .. "\n"
  end }

commands.doc = { arguments = "NAME", about = "the same with its place and the text at the top of its file",
  here = function(state, rest)
    if rest == "" then refuse ",doc wants a name, such as ,doc weft.nn.rms_norm" end
    local found, message = help.doc(rest, state.env)
    if not found then refuse(message) end
    return found .. "\n"
  end }

local function table_text(rows)
  local widths, lines = {}, {}
  for _, row in ipairs(rows) do
    for c, cell in ipairs(row) do widths[c] = math.max(widths[c] or 0, #cell) end
  end
  for i, row in ipairs(rows) do
    local cells = {}
    for c, cell in ipairs(row) do cells[c] = (" "):rep(widths[c] - #cell) .. cell end
    lines[i] = table.concat(cells, "  ")
  end
  return table.concat(lines, "\n") .. "\n"
end

local function mega(bytes) return ("%.3f MB"):format(bytes / 1e6) end

commands.mem = { arguments = "", about = "memory of every rank: weights, cache, all tensors now and at most (measured)",
  everywhere = function(state)
    local memory, model = core.memory(), state.model
    local mine = { tostring(core.rank().rank), model and mega(model.weight_bytes) or "-",
      model and mega(model.num_blocks * model.bytes_per_block) or "-", mega(memory.live_bytes), mega(memory.peak_bytes) }
    local rows, everyone = { { "rank", "weights", "cache", "tensors", "peak" } }, core.groups.everyone()
    for root = 0, everyone.size - 1 do rows[root + 2] = everyone:broadcast_value(mine, root) end
    return table_text(rows)
  end }

commands.plan = { arguments = "[FLAGS]",
  about = "who holds what, what moves and what a step should cost, now or under other flags: those of weft plan (,plan --help)",
  leads = true,
  here = function(state, rest)
    local words, message = read.words(rest)
    if not words then refuse(message) end
    local options = flags.parse("plan", words, 1)
    if options.help then return flags.help "plan" end
    local plan = require "weft.commands.plan"
    if options.model or options.script then
      plan.run(options)
    elseif state.model then
      plan.of_session(options, state.model)
    else
      refuse "no model is loaded: start with weft repl --model DIR, or name one: ,plan --model DIR"
    end
  end }

-- Functions of a module that was run again see its old table, which takes the place of the new one.
local function adopt(value, new, old, seen)
  if seen[value] then return end
  seen[value] = true
  if type(value) == "table" then
    if value ~= new and debug.getmetatable(value) then adopt(debug.getmetatable(value), new, old, seen) end
    for key, item in next, value do
      if item == new then rawset(value, key, old)
      elseif type(item) == "function" or type(item) == "table" and value == new then adopt(item, new, old, seen) end
    end
  elseif type(value) == "function" and debug.getinfo(value, "S").what ~= "C" and debug.getinfo(value, "S").source == seen.source then
    local i, name, held = 1, debug.getupvalue(value, 1)
    while name do
      if held == new then debug.setupvalue(value, i, old)
      elseif type(held) == "function" then adopt(held, new, old, seen) end
      i = i + 1
      name, held = debug.getupvalue(value, i)
    end
  end
end

-- New fields into the old table, so that what runs sees them.
local function replace_fields(old, new, source)
  adopt(new, new, old, { source = source })
  for key in pairs(old) do
    if new[key] == nil then old[key] = nil end
  end
  for key, value in pairs(new) do old[key] = value end
end

-- The file of a loaded module, or of that name; and whether it is a module. What the session itself is made of stays.
local function file_of(name)
  local module = package.loaded[name] ~= nil and name
  if not module then return name end
  if module == "weft" or module:match "^weft%." and not module:match "^weft%.models%." then
    refuse(("%s is a part of weft that this session runs on: leave and start weft again for it; ,reload takes model scripts, weft.models.NAME and modules of yours"):format(name))
  end
  local path = package.searchpath(name, package.path)
  if not path then refuse(("module %s has no file of Lua to load again"):format(name)) end
  return path, module
end

-- A file, or a module's file, as text that all ranks agree on.
local function source_of(name)
  local path, module = file_of(name)
  local ok, text = pcall(errors.read_file, path, "")
  local theirs = core.groups.everyone():broadcast_value(ok and { text = text } or { message = errors.message(text) }, 0)
  if not theirs.text then refuse((theirs.message:gsub("^cannot read%s+", "cannot read "))) end
  return theirs.text, path, module
end

commands.reload = { arguments = "[FILE]", about = "loads a model script or a module again, in place; without FILE: the model's script",
  everywhere = function(state, rest)
    local name = rest ~= "" and rest or state.script_path
    if not name then refuse ",reload wants a file: the model's script, or a module such as weft.models.llama" end
    local text, path, module = source_of(name)
    local chunk, syntax = loadstring(text, "@" .. path)
    if not chunk then refuse(syntax) end
    local result = chunk()
    local is_model = type(result) == "table" and type(result.build) == "function"
    if state.model and path == state.script_path then setup.check_script(path, result) end
    if is_model and state.model then
      state.model:use(result)
      state.script_path = module and state.script_path or path
    end
    if module then
      if type(result) ~= "table" then refuse(("module %s gives a %s, not a table"):format(name, type(result))) end
      replace_fields(package.loaded[name], result, "@" .. path)
      if is_model and state.model then
        state.model.script = package.loaded[name]
      end
    end
    if is_model then return ("%s: %s\n"):format(path, state.model and "the model runs it now, over the same weights" or "loaded") end
    if result ~= nil then state.env._ = result end
    return path .. ": loaded\n"
  end }

commands.edit = { arguments = "[FILE]", about = "opens FILE in $EDITOR, then loads it again",
  here = function(state, rest)
    local name = rest ~= "" and rest or state.script_path
    if not name then refuse ",edit wants a file" end
    if not core.isatty(0) then refuse((",edit opens an editor, and standard input is not a terminal; change the file, then say ,reload %s"):format(name)) end
    local editor = os.getenv "VISUAL" or os.getenv "EDITOR" or "vi"
    local status = os.execute(editor .. " '" .. file_of(name):gsub("'", "'\\''") .. "'")
    if status ~= 0 and status ~= true then
      local code = type(status) == "number" and status > 255 and status / 256 or status -- as wait gives it
      refuse(("%s ended with status %s; nothing is loaded"):format(editor, tostring(code)))
    end
    return nil, { name = "reload", rest = name }
  end }

commands.time = { arguments = "on|off", about = "whether the time and the memory of each line are shown (on at a terminal)",
  here = function(state, rest)
    if rest ~= "on" and rest ~= "off" then refuse((",time is on or off, got '%s'"):format(rest)) end
    state.time = rest == "on"
    return ""
  end }

commands.forget = { arguments = "", about = "drops `_` and collects what nothing names any more",
  everywhere = function(state)
    local before = core.memory().live_bytes
    state.env._ = nil
    jit.flush() -- traces keep the functions that they were recorded in
    collectgarbage()
    collectgarbage()
    return ("%.3f MB given back on rank 0\n"):format((before - core.memory().live_bytes) / 1e6)
  end }

commands.quit = { arguments = "", about = "leaves (Ctrl-D does too)", here = function(state)
  state.quitting = 0
  return ""
end }

return commands
