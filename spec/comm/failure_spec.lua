--- spec/comm/failure_spec.lua - a rank that fails takes the others down; nobody waits for ever.
local core = require "weft.core"

local function failure(options)
  local began = core.now()
  local ok, err = pcall(core.spawn, options)
  assert.is_false(ok)
  return err, core.now() - began
end

describe("a failing rank", function()
  it("takes the others out of every kind of wait in less than a second, with its message", function()
    local waits = {
      barrier = function() core.groups.everyone():barrier() end,
      all_reduce = function() core.groups.everyone():all_reduce(core.tensor { 50000 }) end,
      gather = function() core.groups.everyone():all_gather(core.tensor { 4 }, 0) end,
      receive = function() if core.rank().rank == 0 then core.groups.everyone():barrier() else core.receive() end end,
      publish = function() for _ = 1, 3 do core.publish "x" end end,
      loop = function() jit.off() while true do end end,
      pcalls = function() jit.off() while true do pcall(function() while true do end end) end end,
    }
    for name, wait in pairs(waits) do
      local err, seconds = failure { ranks = 3, args = { name }, fn = function()
        if core.rank().rank == 2 then error("boom", 0) end
        if core.rank().rank == 1 and name == "publish" then core.receive() core.receive() end
        wait()
      end }
      assert.equal("rank 2: boom", tostring(err))
      assert.equal("aborted", err.code)
      assert.equal(2, err.rank)
      assert.is_true(seconds < 1, name)
    end
  end)

  it("keeps the code and the plain fields of what it raised", function()
    local err = failure { ranks = 2, fn = function()
      if core.rank().rank == 1 then error({ message = "no such flag", code = "usage", usage = true }) end
      core.groups.everyone():barrier()
    end }
    assert.same({ message = "rank 1: no such flag", code = "usage", usage = true, rank = 1 }, { message = err.message, code = err.code, usage = err.usage, rank = err.rank })
    err = failure { ranks = 2, fn = function() core.tensor { -1 } end }
    assert.equal("invalid", err.code)
    err = failure { ranks = 1, fn = function() error() end }
    assert.matches("rank 0: the error is a nil without a message", err.message, 1, true)
  end)

  it("turns os.exit into an error that says the exit code", function()
    local err = failure { ranks = 2, fn = function()
      if core.rank().rank == 1 then os.exit(3) end
      core.groups.everyone():barrier()
    end }
    assert.equal("rank 1: os.exit(3) was called", err.message)
    assert.equal("exit", err.code)
    assert.equal(3, err.exit_code)
  end)

  it("can end all ranks with core.abort", function()
    local err = failure { ranks = 2, fn = function()
      if core.rank().rank == 0 then pcall(core.abort, "enough") end
      core.groups.everyone():barrier()
    end }
    assert.equal("rank 0: enough", err.message)
  end)
end)

describe("WEFT_FAULT", function()
  local function steps()
    for _ = 1, 4 do
      core.begin_step()
      core.groups.everyone():all_reduce(core.tensor { 64 })
      core.fault "exchange"
      core.groups.everyone():barrier()
    end
  end

  it("raises at the rank, step and place it names", function()
    local err, seconds = failure { ranks = 3, fault = "rank=2,step=3,at=exchange,kind=raise", fn = steps }
    assert.equal("rank 2: WEFT_FAULT raised at exchange of step 3", err.message)
    assert.is_true(seconds < 1)
    assert.same({}, core.spawn { ranks = 3, fault = "rank=2,step=9,at=exchange,kind=raise", fn = steps })
  end)

  it("stalls until the timeout names the silent rank and its last collective", function()
    local err, seconds = failure { ranks = 3, timeout = 0.5, fault = "rank=1,step=2,at=exchange,kind=stall", fn = steps }
    assert.equal("timeout", err.code)
    assert.matches("^rank 1: no sign of life for 0.5 s: rank [02] waits in barrier %(number 4 of world {0,1,2}%), " ..
      "and the last collective of rank 1 was all_reduce sum of 64 float32 %(number 3 of world {0,1,2}%); if it is only slow, raise %-%-timeout$", err.message)
    assert.is_true(seconds >= 0.5 and seconds < 1.5)
  end)

  it("names the rank behind a chain of waits", function()
    local err = failure { ranks = 3, timeout = 0.3, fault = "rank=2,kind=stall", fn = function()
      local rank = core.rank().rank
      local near = rank < 2 and core.groups.create("tensor", { 0, 1 })
      local far = rank > 0 and core.groups.create("context", { 1, 2 })
      if rank == 2 then core.fault "step" end
      if far then far:barrier() end
      if near then near:barrier() end
    end }
    assert.matches("^rank 2: no sign of life", err.message)
  end)

  it("does not count a slow rank that shows life as silent", function()
    assert.same({}, core.spawn { ranks = 2, timeout = 0.2, fn = function()
      if core.rank().rank == 1 then
        local began = core.now()
        while core.now() - began < 0.6 do core.fault "elsewhere" end
      end
      core.groups.everyone():barrier()
    end })
  end)

  it("lets receive wait longer than the timeout", function()
    assert.equal("late", core.spawn { ranks = 2, timeout = 0.1, fn = function()
      if core.rank().rank == 1 then return core.receive() end
      local began = core.now()
      while core.now() - began < 0.4 do end
      core.publish "late"
    end }[2])
  end)

  it("refuses a text it does not understand", function()
    local function refused(text) return failure { ranks = 2, fault = text, fn = function() end }.message end
    assert.matches("rank must be 0 to 1, got '2'", refused "rank=2,kind=raise", 1, true)
    assert.matches("kind must be raise, stall or exit, got 'die'", refused "rank=1,kind=die", 1, true)
    assert.matches("unknown key 'when'", refused "rank=1,when=3,kind=raise", 1, true)
    assert.matches("'rank' is not key=value", refused "rank", 1, true)
    assert.matches("needs rank= and kind=", refused "rank=1", 1, true)
    assert.matches("step must be a number from 0, got 'x'", refused "rank=1,step=x,kind=raise", 1, true)
  end)
end)
