--- spec/comm/interrupt_spec.lua - Ctrl-C while ranks run.
local core = require "weft.core"
local ffi = require "ffi"
ffi.cdef "int kill(int pid, int signal); int getpid(void); void (*signal(int signal, void (*handler)(int)))(int);"

local SIGINT = 2

-- Runs options.fn with Ctrl-C at its default action, also where a shell started us with it ignored.
local function spawn(options)
  local old = ffi.C.signal(SIGINT, nil)
  local began = core.now()
  local ok, result = pcall(core.spawn, options)
  ffi.C.signal(SIGINT, old)
  return ok, result, core.now() - began
end

-- In a rank: presses Ctrl-C.
local function press()
  local f = require "ffi"
  f.cdef "int kill(int pid, int signal); int getpid(void);"
  f.C.kill(f.C.getpid(), 2)
end

describe("Ctrl-C", function()
  it("ends all ranks wherever they wait, with the code interrupted", function()
    local ok, err, seconds = spawn { ranks = 3, fn = function()
      local rank = core.rank().rank
      if rank == 0 then press() end
      if rank == 1 then core.receive() end
      core.groups.everyone():barrier()
    end }
    assert.is_false(ok)
    assert.equal("interrupted", err.code)
    assert.equal("interrupted", tostring(err))
    assert.is_true(seconds < 1)
  end)

  it("only sets a flag in flag mode, which reading clears", function()
    local ok, results = spawn { ranks = 2, on_interrupt = "flag", fn = function()
      local group, seen = core.groups.everyone(), 0
      if core.rank().rank == 0 then
        for _ = 1, 2 do
          assert(not core.interrupted())
          press()
          while not core.interrupted() do end
          seen = seen + 1
        end
      end
      return group:broadcast_value(seen, 0)
    end }
    assert.is_true(ok, tostring(results))
    assert.same({ 2, 2 }, results)
  end)

  it("ends all ranks in flag mode when nobody read the flag before the second one", function()
    local ok, err = spawn { ranks = 2, on_interrupt = "flag", fn = function()
      while core.rank().rank == 0 do
        press()
        local began = core.now() -- a signal that comes before the first was read is lost in it
        while core.now() - began < 0.5 do core.begin_step() end
      end
      core.groups.everyone():barrier()
    end }
    assert.is_false(ok)
    assert.equal("interrupted", err.code)
  end)

  it("reaches the ranks of a spawn inside a rank", function()
    local ok, err, seconds = spawn { ranks = 2, fn = function()
      core.spawn(2, function(outer)
        if core.rank().rank == 1 then core.receive() end -- from rank 0, which never publishes
        if outer == 0 then press() end
        core.groups.everyone():barrier()
      end, core.rank().rank)
    end }
    assert.is_false(ok)
    assert.equal("interrupted", err.code)
    assert.is_true(seconds < 1)
  end)

  it("kills the process the second time, whatever a rank is doing", function()
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write [[
      local ffi, core = require "ffi", require "weft.core"
      ffi.cdef "int kill(int pid, int signal); int getpid(void); void (*signal(int signal, void (*handler)(int)))(int);"
      ffi.C.signal(2, nil)
      core.spawn(1, function()
        local f = require "ffi"
        f.cdef "int kill(int pid, int signal); int getpid(void); int usleep(unsigned us);"
        local function press_for_ever() -- compiled: no hook stops it
          while true do
            f.C.kill(f.C.getpid(), 2)
            f.C.usleep(20000)
          end
        end
        press_for_ever()
      end)]]
    file:close()
    local build = os.getenv "WEFT_BUILD" or "build"
    local status = os.execute(("timeout 20 %s/weft lua %s >/dev/null 2>&1"):format(build, path))
    os.remove(path)
    assert.is_true(status == SIGINT or status == 130 * 256, "exit status " .. tostring(status))
  end)

  it("belongs to the caller again afterwards", function()
    assert.is_false(core.interrupted())
    local hits = 0
    local handler = ffi.cast("void (*)(int)", function() hits = hits + 1 end)
    local old = ffi.C.signal(SIGINT, handler)
    core.spawn(2, function() end)
    ffi.C.kill(ffi.C.getpid(), SIGINT)
    ffi.C.signal(SIGINT, old)
    handler:free()
    assert.equal(1, hits)
  end)
end)
