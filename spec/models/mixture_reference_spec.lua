--- spec/models/mixture_reference_spec.lua - models with experts under plans against transformers' results.
local reference = require "spec.support.reference"

-- A plan script with experts and attention of their own, and layers that differ.
local path = os.tmpname()
local file = assert(io.open(path, "wb"))
file:write [[
return weft.policy {
  tensor = 4,
  attention = { tensor = 2 },
  experts = { expert = 2, tensor = 2 },
  layers = { [0] = { attention = { tensor = 1 }, experts = { expert = 4 } } },
}
]]
file:close()

local mix = { "--plan", path, label = "a plan with layers of their own" }
local plans = { { "-tp", "1" }, { "-tp", "4" }, { "-tp", "4", "-ep", "2" }, { "-tp", "8", "-tpa", "2", "-ep", "8" }, mix }

local function check(model, list, bound)
  for _, promise in ipairs(reference.promises(model, list, bound)) do it(promise[1], promise[2]) end
end

describe("a model with experts", function()
  teardown(function() os.remove(path) end)
  check("minimax_m2_random", plans)
  check("demo_minimax_m2_fp8", { { "-tp", "4", "-tpa", "1", "-ep", "2" }, { "-tp", "8" }, mix }, 2e-3)
  check("mixtral_random", { { "-tp", "8", "-tpa", "1", "-ep", "2" }, mix })
  check("qwen3_moe_random", { { "-tp", "2", "-ep", "2" }, { "-tp", "8", "-tpa", "4" }, mix })
end)
