--- spec/device/gpu_spec.lua - what holds of GPUs on a machine without one, and of steps meant for graphs.
local core = require "weft.core"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

describe("GPUs", function()
  it("load none of their libraries where none is used", function()
    local script = os.tmpname()
    local file = assert(io.open(script, "wb"))
    file:write('local model = ...; require("weft").engine { model = model, device = "cpu" }:close()\n' ..
      'for line in io.lines "/proc/self/maps" do print(line) end\n')
    file:close()
    local code, out, err = program.run { "lua", script, demo }
    os.remove(script)
    assert.equal(0, code, err)
    assert.is_truthy(out:find("luajit", 1, true))
    assert.is_nil(out:find("cublas", 1, true))
    assert.is_nil(out:find("nccl", 1, true))
  end)

  if core.gpu.count() == 0 then
    it("are refused in one line where there is none", function()
      local code, out, err = program.run { "run", "--model", demo, "--prompt-ids", "5", "--device", "cuda" }
      assert.equal(2, code)
      assert.equal("", out)
      assert.is_truthy(err:find("--device cuda", 1, true) and err:find("use --device cpu", 1, true), err)
    end)
    it("are not what runs use by default then", function()
      assert.equal("cpu", require("weft.setup").device {})
    end)
    it("cannot be opened by a rank", function()
      assert.has_error(function() core.gpu.use(0) end)
      assert.is_nil(core.gpu.index())
    end)
  end

  it("leave tensors of the host as they are", function()
    local t = core.tensor({ 2, 2 }, "float32", { 1, 2, 3, 4 })
    assert.equal("cpu", t.device)
    assert.same({ 1, 2, 3, 4 }, core.to_host(t):totable())
    core.to_host(t):set(9, 0, 1)
    assert.equal(9, t:get(0, 1))
  end)
  it("are needed for graphs", function()
    assert.has_error(function() core.graph.capture(function() end) end, nil)
    assert.has_error(function() core.graph.join(function() end) end, nil)
  end)
end)

describe("a step for a graph", function()
  local function build(requests, pad_to)
    return core.step():build { requests = requests, block_tokens = 16, graph = true, pad_to = pad_to }
  end
  local function one(start)
    return { ids = 7, start = start, blocks = { 0 }, sample = true }
  end

  it("takes one token and one row of logits for each request, and padding", function()
    local step = build({ one(3), one(5), one(2) }, 4)
    assert.equal(4, step.num_tokens)
    assert.equal(3, step.num_logits)
    assert.same({ 0, 1, 2 }, step.rows:totable())
  end)
  it("refuses longer requests and rows without logits", function()
    assert.has_error(function() build { one(3), { ids = { 1, 2 }, start = 0, blocks = { 0 }, sample = true } } end)
    assert.has_error(function() build { one(3), { ids = 1, start = 0, blocks = { 0 } } } end)
  end)
  it("has no graph on a CPU", function()
    assert.is_nil(build({ one(3) }):upload().graph_key)
  end)
end)
