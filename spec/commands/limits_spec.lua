--- spec/commands/limits_spec.lua - what the system refuses the program (ulimit) is one line that says what.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

-- Runs under a shell's limits; gives the exit code and standard error, with what the shell says itself.
local function under(limits, command)
  local pipe = io.popen(("(ulimit %s; env -u LD_PRELOAD WEFT_BENCH_FILE= %s %s) 2>&1 >/dev/null; echo $?"):format(limits, program.path, command))
  local text = pipe:read "*a"
  pipe:close()
  local err, code = text:match "^(.*)%f[%d](%d+)\n$"
  return tonumber(code), err
end

describe("a limit on the size of files", function()
  it("is a write that fails: one line, and nothing half-written is left", function()
    local folder = files.folder()
    local out = folder .. "/logits.safetensors"
    local code, err = under("-f 1", ("logits --model %s --prompt-ids 5,6 --out %s"):format(demo, out))
    local left = io.popen("ls " .. folder):read "*a"
    files.remove(folder)
    assert.same({ 1, ("weft: rank 0: cannot write %s: File too large\n"):format(out), "" }, { code, err, left })
  end)
end)
