--- The program's commands. main(arg) returns the exit code: 0 fine, 1 the work failed, 2 wrong
-- usage, 130 Ctrl-C. A failure is one line on standard error.
local flags = require "weft.flags"
local core = require "weft.core"
local errors = require "weft.errors"

local commands = {}

local function overview()
  local lines = { "weft " .. core.version .. ": large language models whose parallel layout is a Lua script", "" }
  for _, name in ipairs(flags.order) do
    lines[#lines + 1] = ("  weft %-9s %s"):format(name, flags.commands[name].about)
  end
  lines[#lines + 1] = ""
  lines[#lines + 1] = "weft COMMAND --help lists the flags of a command. weft --version prints the version."
  return table.concat(lines, "\n") .. "\n"
end

local message_of = errors.message

local exit_codes = { interrupted = 130 }

--- Runs a function; prints its failure as one line; gives the exit code.
local function guarded(fn, ...)
  local ok, result = xpcall(fn, function(err)
    if os.getenv "WEFT_DEBUG" == "1" then io.stderr:write(debug.traceback(message_of(err), 2), "\n") end
    return err
  end, ...)
  if ok then return result or 0 end
  io.stdout:flush()
  io.stderr:write("weft: ", message_of(result), "\n")
  if type(result) == "table" then
    if result.usage then return 2 end
    return result.exit_code or exit_codes[result.code] or 1
  end
  return 1
end

function commands.main(args)
  local name = args[1]
  if name == nil then
    io.stderr:write(overview())
    return 2
  elseif name == "--help" or name == "-h" or name == "help" then
    io.write(overview())
    return 0
  elseif name == "--version" then
    io.write("weft ", core.version, "\n")
    return 0
  end
  if not flags.commands[name] then
    io.stderr:write(("weft: unknown command '%s'; known: %s\n"):format(name, table.concat(flags.order, ", ")))
    return 2
  end
  return guarded(function()
    local options = flags.parse(name, args, 2)
    if options.help then
      io.write(flags.help(name))
      return 0
    end
    require("weft.environment").check()
    return require("weft.commands." .. name).run(options)
  end)
end

return commands
