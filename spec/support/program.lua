--- spec/support/program.lua: runs the program as a user does.
local assert = require "luassert"
local json = require("weft.core").json

local program = {}
program.path = (os.getenv "WEFT_BUILD" or "build") .. "/weft"
program.models = "spec/fixtures/models/"

local function quote(word)
  return "'" .. tostring(word):gsub("'", "'\\''") .. "'"
end

local function slurp(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a" or ""
  if file then file:close() end
  os.remove(path)
  return text
end

--- program.run{ "run", "--model", dir, ... , input = text, env = "A=b" } -> exit code, stdout, stderr
function program.run(words)
  local out, err, input = os.tmpname(), os.tmpname(), os.tmpname()
  local file = io.open(input, "wb")
  file:write(words.input or "")
  file:close()
  local line = { "WEFT_BENCH_FILE=/dev/null " .. (words.env or ""), "env -u LD_PRELOAD", quote(program.path) }
  for _, word in ipairs(words) do line[#line + 1] = quote(word) end
  local status = os.execute(("timeout %d env %s %s <%s >%s 2>%s"):format(words.limit or (os.getenv "WEFT_SANITIZED" and 900 or 120), line[1],
    table.concat(line, " ", 2), input, out, err))
  os.remove(input)
  local code = type(status) == "number" and (status > 255 and math.floor(status / 256) or status) or (status and 0 or 1)
  return code, slurp(out), slurp(err)
end

--- Runs, expects the exit code, no output, exactly one line on standard error, and every text in it.
function program.refused(code, words, ...)
  local got, out, err = program.run(words)
  assert.equal(code, got, err)
  assert.equal("", out)
  local _, lines = err:gsub("\n", "")
  assert.equal(1, lines, err)
  assert.equal("weft: ", err:sub(1, 6))
  for _, text in ipairs { ... } do
    assert.is_truthy(err:find(text, 1, true), ("'%s' is not in: %s"):format(text, err))
  end
end

--- Runs and decodes the last line of standard output.
function program.json(words)
  local code, out, err = program.run(words)
  assert(code == 0, ("exit %d: %s"):format(code, err))
  return json.decode(out:match "([^\n]+)\n*$")
end

--- expected.json of a model folder under spec/fixtures/models.
function program.expected(model)
  local file = assert(io.open(program.models .. model .. "/expected.json", "rb"))
  local cases = json.decode(file:read "*a")
  file:close()
  return cases
end

function program.ids(list)
  return table.concat(list, ",")
end

return program
