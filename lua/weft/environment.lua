--- The variables that switch weft: wrong values are refused before any work. And how many GPUs the process sees, in words.
local core = require "weft.core"
local errors = require "weft.errors"

local environment = {}

-- Those that are off or on; not set and empty are off, but for WEFT_PEER, which is on unless it says 0.
local switches = { "WEFT_CHECK", "WEFT_DEBUG", "WEFT_NO_PEER", "WEFT_PEER", "WEFT_SYNC" }
local choices = { WEFT_CPU_ISA = { "avx512", "avx2", "scalar" } }
for _, name in ipairs(switches) do choices[name] = { "0", "1" } end

local function check(name)
  local value = os.getenv(name)
  if not value or value == "" then return end
  for _, choice in ipairs(choices[name]) do
    if value == choice then return end
  end
  errors.usage(("%s is one of %s, got '%s'"):format(name, table.concat(choices[name], ", "), value))
end

--- Raises a usage error for a variable with a value that means nothing.
function environment.check()
  for _, name in ipairs(switches) do check(name) end
  check "WEFT_CPU_ISA"
end

--- "CUDA_VISIBLE_DEVICES=0,5", or nil where it is not set.
function environment.visible()
  local value = os.getenv "CUDA_VISIBLE_DEVICES"
  return value and "CUDA_VISIBLE_DEVICES=" .. value
end

--- "this machine has 2 GPUs", "this process sees 1 GPU (CUDA_VISIBLE_DEVICES=0,5)".
function environment.gpus()
  local count, visible = core.gpu.count(), environment.visible()
  local gpus = ("%d GPU%s"):format(count, count == 1 and "" or "s")
  return visible and ("this process sees %s (%s)"):format(gpus, visible) or "this machine has " .. gpus
end

return environment
