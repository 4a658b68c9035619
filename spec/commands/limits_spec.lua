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

describe("a limit on open files", function()
  it("is what the message says, of a model's files and of weft's own", function()
    local path = files.script(([[
      local held = {}
      repeat held[#held + 1] = io.open "/dev/null" until #held >= 64 or not io.open "/dev/null"
      for _, name in ipairs { "config.json", "model.safetensors", "tokenizer.json" } do held[name] = "%s/" .. name end
      print(select(2, weft.core.checkpoint.open(held["model.safetensors"])))
      print(select(2, weft.core.tokenizer.load(held["tokenizer.json"])))
      print(select(2, pcall(require, "weft.engine")))
      print(select(2, pcall(require, "weft.no_such_module")):match "^[^\n]*")
      held = nil
      collectgarbage()
      return require("weft.engine").new and 0 or 1]]):format(demo))
    local pipe = io.popen(("(ulimit -n 48; env -u LD_PRELOAD %s lua %s) 2>&1; echo $?"):format(program.path, path))
    local text = pipe:read "*a"
    pipe:close()
    files.remove_scripts()
    assert.equal(("%s/model.safetensors: Too many open files\tio\ncannot read %s/tokenizer.json: Too many open files\tio\n"):format(demo, demo)
      .. "cannot open LUA/weft/engine.lua: Too many open files\nmodule 'weft.no_such_module' not found:\n0\n", (text:gsub("cannot open %S*/weft/", "cannot open LUA/weft/")))
  end)
end)

describe("memory that runs out", function()
  it("is no fault of the file that was to be read", function()
    if os.getenv "WEFT_SANITIZED" then return end -- whose memory has no such limit
    local path = files.script(([[
      local ffi = require "ffi"
      ffi.cdef "struct limit { unsigned long now, most; }; int getrlimit(int what, struct limit *limit); int setrlimit(int what, const struct limit *limit);"
      local function starved(fn, ...)
        local before = ffi.new "struct limit"
        ffi.C.getrlimit(9, before) -- RLIMIT_AS
        ffi.C.setrlimit(9, ffi.new("struct limit", 0, before.most))
        local results = { pcall(fn, ...) }
        ffi.C.setrlimit(9, before)
        return results
      end
      local core = weft.core
      local text = "[" .. ('"a string, and one more",'):rep(1e6) .. "1]"
      local decoded = starved(core.json.decode, text)
      print(decoded[2], decoded[3], decoded[4])
      local parsed = starved(core.tokenizer.parse, text, "t.json")
      print(parsed[1], parsed[2].message, parsed[2].code)
      print(unpack(starved(core.checkpoint.open, "%s"), 2, 4))]]):format(demo))
    local code, out, err = program.run { "lua", path }
    files.remove_scripts()
    assert.same({ 0, "nil\tno memory to read 25000003 bytes of JSON\tmemory\nfalse\tno memory to read t.json\tmemory\n"
      .. ("nil\t%s/model.safetensors: Cannot allocate memory\tmemory\n"):format(demo) }, { code, out }, err)
  end)
end)
