--- spec/comm/process_spec.lua - what ranks do to the process: output, exit, memory, one by one.
local program = require "spec.support.program"

local function run(text, env)
  local path = os.tmpname()
  local file = assert(io.open(path, "w"))
  file:write('local core = require "weft.core"\n', text)
  file:close()
  local code, out, err = program.run { "lua", path, env = env, limit = 60 }
  os.remove(path)
  return code, out, err
end

describe("the process of the ranks", function()
  it("has one standard output, rank 0's; prints of others are dropped", function()
    local code, out, err = run [[
      core.spawn(3, function()
        print("hello from", core.rank().rank, nil)
        core.groups.everyone():barrier()
      end)]]
    assert.same({ 0, "hello from\t0\tnil\n", "" }, { code, out, err })
  end)

  it("shows the prints of others on standard error with the rank in front when asked to", function()
    local code, out, err = run [[
      core.spawn { ranks = 3, verbose = true, fn = function()
        for r = 0, 2 do
          if core.rank().rank == r then print("hello", r) end
          core.groups.everyone():barrier()
        end
      end }]]
    assert.same({ 0, "hello\t0\n", "[rank 1] hello\t1\n[rank 2] hello\t2\n" }, { code, out, err })
  end)

  it("ends at once with code 1 under kind=exit, which reads WEFT_FAULT", function()
    local code = run([[
      core.spawn(2, function()
        core.begin_step()
        core.groups.everyone():barrier()
      end)]], "WEFT_FAULT=rank=1,step=1,at=step,kind=exit")
    assert.equal(1, code)
  end)

  it("marks when a fault strikes, for those who time what follows", function()
    local mark = os.tmpname()
    os.remove(mark)
    local steps = "core.spawn(2, function() core.begin_step() end)"
    run(steps, "WEFT_FAULT_MARK=" .. mark .. " WEFT_FAULT=rank=1,step=2,at=step,kind=raise")
    assert.is_nil(io.open(mark))
    local code = run(steps, "WEFT_FAULT_MARK=" .. mark .. " WEFT_FAULT=rank=1,step=1,at=step,kind=raise")
    assert.equal(1, code)
    assert(io.open(mark)):close()
    os.remove(mark)
  end)

  it("keeps its exit code when a rank asks for it with os.exit", function()
    local code, _, err = run "core.spawn(2, function() os.exit(7) end)"
    assert.equal(7, code)
    assert.matches("os.exit(7) was called", err, 1, true)
  end)
end)
