--- spec/comm/evaluate_spec.lua - work of all ranks that may fail on any of them, and the world goes on.
local core = require "weft.core"
local ffi = require "ffi"
ffi.cdef "void (*signal(int signal, void (*handler)(int)))(int);"

local function press()
  local f = require "ffi"
  f.cdef "int kill(int pid, int signal); int getpid(void);"
  f.C.kill(f.C.getpid(), 2)
end

-- A sum over a group that was used before, and over a new one, in one evaluation.
local function works()
  local group = core.groups.everyone()
  local ok, sum, count = core.evaluate(function()
    local new = core.groups.create("tensor", group.ranks)
    return group:all_reduce(core.tensor({ 1 }, "float32", { core.rank().rank + 1 })):get(0),
      new:all_reduce(core.tensor({ 1 }, "float32", { 1 })):get(0)
  end)
  return ok and sum == group.size * (group.size + 1) / 2 and count == group.size
end

local function spawn(ranks, fn)
  local old = ffi.C.signal(2, nil)
  local ok, result = pcall(core.spawn, { ranks = ranks, fn = fn, on_interrupt = "evaluate", timeout = 5 })
  ffi.C.signal(2, old)
  assert(ok, tostring(result))
  return result
end

describe("core.evaluate", function()
  it("gives what the function gives when no rank fails", function()
    local results = spawn(2, function()
      local ok, rank, nothing, five = core.evaluate(function(x) return core.rank().rank, nil, x end, 5)
      return { ok, rank, five, nothing == nil }
    end)
    assert.same({ { true, 0, 5, true }, { true, 1, 5, true } }, results)
  end)

  it("makes one rank's error an error of all, frees those that wait, and the world goes on", function()
    local results = spawn(3, function()
      local seen = {}
      for round = 0, 5 do
        local ok, err = core.evaluate(function()
          core.groups.everyone():barrier()
          if core.rank().rank == round % 3 then error({ message = "no luck", code = "invalid" }) end
          if round % 2 == 0 then core.groups.everyone():barrier() end
        end)
        seen[#seen + 1] = ("%s %s %s %d %s"):format(tostring(ok), err.message, err.code, err.rank, tostring(works()))
      end
      return seen
    end)
    for round = 0, 5 do
      for rank = 1, 3 do
        assert.equal(("nil rank %d: no luck invalid %d true"):format(round % 3, round % 3), results[rank][round + 1])
      end
    end
  end)

  it("frees ranks that wait for a step record, and drops the records they did not take", function()
    local results = spawn(3, function()
      local me = core.rank().rank
      local ok, err = core.evaluate(function()
        if me == 0 then
          core.publish "first"
          error "rank 0 is done"
        end
        while me == 1 do core.receive() end
      end)
      local again, text = core.evaluate(function()
        if me == 0 then core.publish "second" else return core.receive() end
      end)
      return { ok == nil, err.rank, again, text or "second", works() }
    end)
    for rank = 1, 3 do assert.same({ true, 0, true, "second", true }, results[rank]) end
  end)

  it("brings back ranks that called different collectives", function()
    local results = spawn(2, function()
      local ok, err = core.evaluate(function()
        local group = core.groups.everyone()
        if core.rank().rank == 0 then group:barrier() else group:all_reduce(core.tensor({ 2 }, "float32", { 1, 2 })) end
      end)
      return { ok == nil, err.message:find("does not match", 1, true) ~= nil, works() }
    end)
    assert.same({ { true, true, true }, { true, true, true } }, results)
  end)

  it("is ended by Ctrl-C on all ranks, in a loop, in a collective and behind a pcall, time and again", function()
    local results = spawn(3, function()
      local seen = {}
      for round = 1, 4 do
        local ok, err = core.evaluate(function()
          local me = core.rank().rank
          local function spin() while true do pcall(function() while true do end end) end end
          jit.off(spin, true)
          core.groups.everyone():barrier() -- rank 0 has begun
          if me == round % 3 then press() end
          if me == 0 then spin() end
          core.groups.everyone():barrier()
        end)
        seen[round] = ("%s %s %s"):format(tostring(ok), err.message, tostring(works()))
      end
      return seen
    end)
    for rank = 1, 3 do
      for round = 1, 4 do assert.equal("nil interrupted true", results[rank][round]) end
    end
  end)

  it("lets Ctrl-C between evaluations end the next one as it begins, unless it was forgotten", function()
    local results = spawn(1, function()
      local function press_and_wait()
        press()
        local began = core.now()
        while core.now() - began < 0.2 do core.begin_step() end
      end
      assert(works())
      press_and_wait()
      local ok, err = core.evaluate(function() while true do core.begin_step() end end)
      local again = works()
      press_and_wait()
      local seen = core.interrupted()
      return { ok == nil and err.message, again, seen, works() }
    end)
    assert.same({ { "interrupted", true, true, true } }, results)
  end)

  it("ends all ranks before the first evaluation: they are still starting", function()
    local old = ffi.C.signal(2, nil)
    local ok, err = pcall(core.spawn, { ranks = 2, on_interrupt = "evaluate", fn = function()
      if core.rank().rank == 1 then press() end
      core.groups.everyone():barrier()
      while true do core.begin_step() end
    end })
    ffi.C.signal(2, old)
    assert.is_false(ok)
    assert.equal("interrupted", err.code)
  end)

  it("refuses collectives of a rank that evaluates alone, instead of waiting", function()
    local results = spawn(2, function()
      local ok, err = core.evaluate(function()
        if core.rank().rank ~= 1 then return end
        core.alone(true)
        core.groups.everyone():barrier()
      end)
      return { ok == nil, err.message:find("only rank 1 evaluates", 1, true) ~= nil, works() }
    end)
    assert.same({ { true, true, true }, { true, true, true } }, results)
  end)

  it("ends all ranks when one is lost outside of an evaluation", function()
    local began = core.now()
    local ok, err = pcall(core.spawn, { ranks = 3, on_interrupt = "evaluate", fn = function()
      if core.rank().rank == 2 then error "gone" end
      core.evaluate(function() core.groups.everyone():barrier() end)
    end })
    assert.is_false(ok)
    assert.matches("rank 2: .*gone", err.message)
    assert.is_true(core.now() - began < 2)
  end)

  it("puts the groups that were registered back, or closes them", function()
    local results = spawn(2, function()
      local ranks = core.groups.everyone().ranks
      core.groups.add(core.groups.create("tensor", ranks))
      local first = core.groups.get "tensor"
      local old = core.take_groups()
      core.groups.add(core.groups.create("tensor", ranks))
      local second = core.groups.get "tensor"
      core.commit(function() old:close() end)
      local closed = not pcall(first.barrier, first)
      second:barrier()
      old = core.take_groups()
      core.groups.add(core.groups.create("tensor", ranks))
      old:restore()
      core.groups.get("tensor"):barrier()
      return { closed, pcall(old.restore, old) }
    end)
    for rank = 1, 2 do
      assert.is_true(results[rank][1])
      assert.is_false(results[rank][2])
    end
  end)
end)
