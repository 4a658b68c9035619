--- spec/commands/gpu_scripts_spec.lua - scripts/gpu-* refuse what they cannot do in one line, before they build or run anything.
local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

describe("scripts for GPUs", function()
  local folder = os.tmpname()
  setup(function()
    os.remove(folder)
    assert(os.execute("mkdir -p " .. folder .. "/none " .. folder .. "/two"))
    write(folder .. "/none/nvidia-smi", "#!/bin/sh\necho No devices were found\nexit 6\n")
    write(folder .. "/two/nvidia-smi", "#!/bin/sh\nprintf '0\\n1\\n'\n")
    os.execute("chmod +x " .. folder .. "/*/nvidia-smi")
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  -- Exit code, standard output, standard error.
  local function run(gpus, command)
    os.execute(("env -u CUDA_VISIBLE_DEVICES PATH=%s/%s:$PATH %s >%s/out 2>%s/err; echo $? >%s/rc")
      :format(folder, gpus, command, folder, folder, folder))
    local texts = {}
    for i, name in ipairs { "rc", "out", "err" } do
      local file = assert(io.open(folder .. "/" .. name, "rb"))
      texts[i] = file:read "*a"
      file:close()
    end
    return tonumber(texts[1]), texts[2], texts[3]
  end

  local function refused(gpus, command, ...)
    local code, out, err = run(gpus, command)
    assert.equal(2, code, err)
    assert.equal("", out)
    local _, lines = err:gsub("\n", "")
    assert.equal(1, lines, err)
    for _, text in ipairs { ... } do assert.is_truthy(err:find(text, 1, true), ("'%s' is not in: %s"):format(text, err)) end
  end

  local names = { "gpu-check", "gpu-bench", "gpu-faults", "gpu-replan", "gpu-check-kernels", "gpu-bench-kernels" }

  it("say how they are used, and that there is no GPU", function()
    for _, name in ipairs(names) do
      local code, out = run("none", "scripts/" .. name .. " --help")
      assert.equal(0, code)
      assert.is_truthy(out:find("usage: scripts/" .. name, 1, true))
      refused("none", "scripts/" .. name, name .. ": no GPU here")
    end
  end)

  it("do not make a folder that is none", function()
    local missing = folder .. "/missing"
    for _, name in ipairs { "gpu-check", "gpu-bench", "gpu-check-kernels", "gpu-bench-kernels" } do
      refused("two", "scripts/" .. name .. " " .. missing, missing, "is no build folder")
    end
    refused("two", "scripts/gpu-faults " .. missing, "no program " .. missing)
    assert.is_nil(io.open(missing))
  end)

  it("name what is known", function()
    refused("two", "env PARTS=plan scripts/gpu-check " .. folder, "no part 'plan'", "plans")
    refused("two", "env PARTS=plans MODELS=demo_lama scripts/gpu-check " .. folder, "no model 'demo_lama'", "demo_llama")
    refused("two", ("scripts/gpu-bench %s %s T99"):format(folder, folder), "no figure 'T99'", "T13")
    refused("two", "scripts/gpu-replan sh", "LAYOUT", "two-nccl")
    refused("two", "scripts/gpu-replan /bin/sh spec/fixtures/models/demo_llama three", "no layout 'three'", "two-nccl")
    refused("two", "env FAULTS=[ scripts/gpu-faults /bin/true", "no regular expression")
    refused("two", "env FAULTS=nosuch scripts/gpu-faults /bin/true", "matches no case", "Ctrl-C in decode")
  end)
end)
