--- spec/comm/spawn_spec.lua - ranks as threads: what crosses to them and what comes back.
local core = require "weft.core"
local files = require "spec.support.files"
local program = require "spec.support.program"

local function failure(...)
  local ok, err = pcall(core.spawn, ...)
  assert.is_false(ok)
  return err
end

describe("core.spawn", function()
  it("calls the function on every rank and gives the results in rank order", function()
    local results = core.spawn(4, function(a, b)
      local me = core.rank()
      return { me.rank, me.world_size, a, b.deep[2] }
    end, "x", { deep = { 1, "two" } })
    assert.same({ { 0, 4, "x", "two" }, { 1, 4, "x", "two" }, { 2, 4, "x", "two" }, { 3, 4, "x", "two" } }, results)
  end)

  it("carries nil, booleans, numbers, binary strings and nested tables both ways", function()
    local values = { true, false, -0.5, 2 ^ 53, "a\0b", { [3] = "x", y = { z = 1 } } }
    assert.same(values, core.spawn(1, function(v) return v end, values)[1])
    assert.same({}, core.spawn(2, function() end))
    assert.equal(3, core.spawn(1, function(...) return select("#", ...) end, nil, 1, nil)[1])
    local json = core.json.decode '{"a":null,"b":[]}'
    assert.equal('{"a":null,"b":[]}', core.spawn(1, function(v) return core.json.encode(v) end, json)[1])
  end)

  it("copies tensors by value, strided ones and those inside tables too", function()
    local t = core.tensor({ 2, 3 }, "bfloat16", { 1, 2, 3, 4, 5, 6 })
    local results = core.spawn(2, function(x, list)
      x:fill(core.rank().rank)
      return { x, list.part }
    end, t, { part = t:transpose(0, 1) })
    assert.same({ 1, 2, 3, 4, 5, 6 }, t:totable())
    assert.same({ 1, 1, 1, 1, 1, 1 }, results[2][1]:totable())
    assert.equal("bfloat16[3, 2]", tostring(results[2][2]))
    assert.same({ 1, 4, 2, 5, 3, 6 }, results[1][2]:totable())
  end)

  it("takes upvalues that are plain, tensors, modules or Lua functions, recursive ones too", function()
    local scale, t = 3, core.tensor({ 1 }, "float32", { 4 })
    local function factorial(n) return n <= 1 and 1 or n * factorial(n - 1) end
    local function scaled(n) return scale * factorial(n) end
    local strings = string
    assert.equal("18 4", core.spawn(1, function()
      return strings.format("%d %d", scaled(3), t:get(0))
    end)[1])
  end)

  it("refuses other upvalues and arguments by name", function()
    local group, file, co = core.groups.everyone(), io.stdout, coroutine.create(function() end)
    local format, inner, looped = string.format, { a = { b = print } }, {}
    looped.again = { looped }
    local meta = setmetatable({}, { __index = {} })
    assert.matches("upvalue 'group' is a userdata (weft.group): only plain values and tensors", failure(1, function() return group end), 1, true)
    assert.matches("upvalue 'file' is a userdata", failure(1, function() return file end), 1, true)
    assert.matches("upvalue 'co' is a thread", failure(1, function() return co end), 1, true)
    assert.matches("upvalue 'format' is a C function", failure(1, function() return format end), 1, true)
    assert.matches("upvalue 'inner'.a.b is a C function", failure(1, function() return inner end), 1, true)
    assert.matches("argument 2.again[1] is a table that contains itself", failure(1, function() end, 1, looped), 1, true)
    assert.matches("argument 1 is a table with a metatable", failure(1, function() end, meta), 1, true)
    assert.matches("argument 1 is a function: only plain values and tensors cross", failure(1, function() end, function() end), 1, true)
    assert.matches("rank 0: the result is a function", failure(1, function() return function() end end).message, 1, true)
    assert.matches("the function is a C function", failure(1, print), 1, true)
  end)

  it("runs a function of a module by name, with the caller's package paths", function()
    local path = os.tmpname()
    local folder, name = path:match "^(.*)/([^/]+)$"
    os.rename(path, path .. ".lua")
    local file = assert(io.open(path .. ".lua", "w"))
    file:write "return { f = function(x) return x * 2 end }"
    file:close()
    local old = package.path
    package.path = folder .. "/?.lua"
    local results = core.spawn(2, { module = name, ["function"] = "f" }, 21)
    local missing = failure { ranks = 2, fn = { module = name, ["function"] = "g" } }
    package.path = old
    os.remove(path .. ".lua")
    assert.same({ 42, 42 }, results)
    assert.matches("has no function 'g'", missing.message, 1, true)
  end)

  it("has the `weft` at hand that a script of weft lua has, in functions and modules, and the prompt's", function()
    local folder = files.folder { ["ranks.lua"] = "return { f = function() return weft and weft.rank().rank end }" }
    files.write(folder .. "/main.lua", ([[package.path = "%s/?.lua;" .. package.path
      local ranks = weft.spawn(3, function() return weft.rank().rank end)
      local named = weft.spawn(2, { module = "ranks", ["function"] = "f" })
      weft = nil
      print(ranks[1], ranks[3], named[2], require("weft").spawn(1, function() return weft end)[1])]]):format(folder))
    local code, out, err = program.run { "lua", folder .. "/main.lua" }
    files.remove(folder)
    assert.same({ 0, "0\t2\t1\tnil\n" }, { code, out }, err)
    code, out, err = program.run { "repl", input = "weft.spawn(2, function() return weft.rank().rank end)[2]" }
    assert.same({ 0, "1\n" }, { code, out }, err)
  end)

  it("refuses wrong options in one line", function()
    assert.matches("ranks is missing", failure { fn = function() end }, 1, true)
    assert.matches("ranks must be an integer from 1 to 1024, got 0", failure { ranks = 0, fn = function() end }, 1, true)
    assert.matches("unknown option 'rank'", failure { rank = 2 }, 1, true)
    assert.matches("on_interrupt must be abort, flag or evaluate, got 'x'", failure { ranks = 1, fn = function() end, on_interrupt = "x" }, 1, true)
    assert.matches("a world has 1 to 1024 ranks, got 0", failure(0, function() end).message, 1, true)
    assert.matches("a function or {module =, [\"function\"] =} expected, got number", failure(1, 2), 1, true)
  end)

  it("shares the cores out over the ranks", function()
    local function threads() return core.rank().threads end
    assert.same({ 3, 3 }, core.spawn { ranks = 2, total_threads = 7, fn = threads })
    assert.same({ 1, 1 }, core.spawn { ranks = 2, total_threads = 1, fn = threads })
    assert.equal(math.max(1, math.floor(core.cpu_cores() / 2)), core.spawn(2, threads)[1])
  end)

  it("starts ranks inside a rank, and the outer ones see the inner failure", function()
    local nested = core.spawn(2, function()
      local inner = core.spawn(2, function() return core.groups.everyone():broadcast_value(core.rank().rank, 1) end)
      return inner[1] + inner[2]
    end)
    assert.same({ 2, 2 }, nested)
    local err = failure(2, function()
      if core.rank().rank == 1 then core.spawn(2, function() error("deep", 0) end) end
      core.groups.everyone():barrier()
    end)
    assert.matches("^rank 1: rank %d: deep$", err.message)
  end)

  it("sends records from rank 0 to all others, each once and in order", function()
    local sums = core.spawn(3, function()
      local total = 0
      for i = 1, 200 do
        if core.rank().rank == 0 then
          core.publish(("%d\0"):format(i) .. ("x"):rep(i * 7))
          total = total + i
        else
          local text = core.receive()
          local n = tonumber(text:match "^(%d+)%z")
          assert(#text == #tostring(n) + 1 + n * 7)
          total = total + n
        end
      end
      return total
    end)
    assert.same({ 20100, 20100, 20100 }, sums)
    assert.matches("only rank 0 publishes", failure(2, function() if core.rank().rank == 1 then core.publish "" end end).message, 1, true)
  end)

  it("gives every object back", function()
    collectgarbage() collectgarbage()
    local before = core.live_objects()
    for _ = 1, 3 do
      core.spawn(4, function(t)
        local g = core.groups.create("context", { 0, 1, 2, 3 })
        core.groups.add(g)
        return g:all_reduce(t):get(0)
      end, core.tensor({ 5 }))
      pcall(core.spawn, 3, function() core.groups.everyone():all_reduce(core.tensor { 1 }) error "x" end)
    end
    collectgarbage() collectgarbage()
    assert.equal(before, core.live_objects())
  end)
end)
