--- spec/lua/environment_spec.lua - what is said of GPUs that are there, named or missing.
local core = require "weft.core"
local ffi = require "ffi"
local environment = require "weft.environment"
local setup = require "weft.setup"
local verify = require "weft.commands.verify"
require "spec.support.ref" -- declares setenv

local demo = "spec/fixtures/models/demo_llama"

describe("the GPUs of this process", function()
  local count, why_none, built, stderr = core.gpu.count, core.gpu.why_none, core.gpu.built, io.stderr
  local named, said = os.getenv "CUDA_VISIBLE_DEVICES", nil

  local function see(gpus, visible)
    core.gpu.count = function() return gpus end
    core.gpu.why_none = function() return "none in this spec" end
    core.gpu.built = true
    said = ""
    io.stderr = { write = function(_, ...) said = said .. table.concat { ... } end }
    if visible then ffi.C.setenv("CUDA_VISIBLE_DEVICES", visible, 1) else ffi.C.unsetenv "CUDA_VISIBLE_DEVICES" end
  end

  after_each(function()
    core.gpu.count, core.gpu.why_none, core.gpu.built, io.stderr = count, why_none, built, stderr
    if named then ffi.C.setenv("CUDA_VISIBLE_DEVICES", named, 1) else ffi.C.unsetenv "CUDA_VISIBLE_DEVICES" end
  end)

  local function refused(text, fn, ...)
    local ok, err = pcall(fn, ...)
    assert.is_false(ok)
    assert.is_true(err.usage)
    assert.is_truthy(err.message:find(text, 1, true), err.message)
  end

  it("are counted with the variable that names them", function()
    see(1)
    assert.equal("this machine has 1 GPU", environment.gpus())
    see(1, "0,5")
    assert.equal("this process sees 1 GPU (CUDA_VISIBLE_DEVICES=0,5)", environment.gpus())
    refused("the plan needs 2 ranks, and this process sees 1 GPU (CUDA_VISIBLE_DEVICES=0,5); --oversubscribe", setup.check,
      { model = demo, tensor_parallel_size = 2 })
    see(0, "abc")
    refused("this process sees no GPU (CUDA_VISIBLE_DEVICES=abc: none in this spec)", setup.check, { model = demo, device = "cuda" })
  end)

  it("are missed aloud where they were named, once", function()
    local options = { model = demo }
    see(0, "7")
    setup.check(options)
    setup.check(options)
    assert.equal("weft: no GPU is seen with CUDA_VISIBLE_DEVICES=7: running on the CPU; --device cpu says so in silence\n", said)
    for _, quiet in ipairs { { model = demo, device = "cpu" }, { model = demo, plan_only = true } } do
      see(0, "7")
      setup.check(quiet)
      assert.equal("", said)
    end
    for _, visible in ipairs { "", false } do
      see(0, visible)
      setup.check { model = demo }
      assert.equal("", said)
    end
  end)

  it("bound the plans that weft verify tries", function()
    see(1)
    assert.equal(1, verify.max_ranks {})
    assert.equal("weft: plans of up to 1 rank: this machine has 1 GPU; --oversubscribe --max-ranks 8 lets ranks share\n", said)
    refused("--max-ranks 4 needs 4 ranks, and this machine has 1 GPU; --oversubscribe", verify.max_ranks, { max_ranks = 4 })
    see(1)
    assert.equal(8, verify.max_ranks { oversubscribe = true })
    assert.equal(4, verify.max_ranks { oversubscribe = true, max_ranks = 4 })
    assert.equal(8, verify.max_ranks { device = "cpu" })
    see(16)
    assert.equal(8, verify.max_ranks {})
    assert.equal(16, verify.max_ranks { max_ranks = 16 })
    assert.equal("", said)
  end)
end)
