-- Predicted decode steps beside measured ones: weft lua scripts/predict.lua [parts]
--
-- Predictions are those of `weft plan` (lua/weft/machines.lua, lua/weft/plan/price.lua), measurements those of
-- scripts/measured.lua. `parts` shows what each prediction is made of: where to turn when one is off. Ends
-- with 1 when a prediction is more than 25% off.
local flags = require "weft.flags"
local machines = require "weft.machines"
local numbers = require "weft.plan_numbers"
local policies = require "weft.policy"
local price = require "weft.plan.price"

if arg[2] or (arg[1] and arg[1] ~= "parts") then
  io.stderr:write(("predict.lua takes the word parts, or nothing, got '%s'\n"):format(arg[2] or arg[1]))
  return 2
end
local most = 0.25
local here = arg[0]:match "^(.*)/[^/]*$" or "."
local measured = dofile(here .. "/measured.lua")
local machine = machines.get(measured.machine)

local function predict(step)
  local cfg = require("weft.config").load(("%s/../spec/fixtures/configs/%s_config.json"):format(here, step.model.config))
  cfg.compute_dtype = "bfloat16"
  if step.dtype == "fp8" then cfg.quantization = { method = "fp8_block", block = { 128, 128 }, skip = {} } end
  local words = {}
  for word in step.flags:gmatch "%S+" do words[#words + 1] = word end
  local policy = policies.from_options(flags.parse("plan", words, 1))
  return price.of(numbers.of(policy, cfg, { context = step.context, ranks = 1 }), cfg, machine, step.batch)
end

local format = "%-13s %-9s %-12s %5s %8s %9s %10s %6s  %s"
print(("Decode steps on %s, ms:"):format(measured.machine))
print(format:format("model", "weights", "plan", "batch", "context", "measured", "predicted", "ratio", "measured by"))
local worst = 0
for _, step in ipairs(measured.steps) do
  local predicted = predict(step)
  local ratio = predicted.ms / tonumber(step.ms)
  worst = math.max(worst, math.abs(ratio - 1))
  print(format:format(step.model.name, step.dtype, step.flags, step.batch, step.context, step.ms,
    ("%.2f"):format(predicted.ms), ("%.2f"):format(ratio), step.by))
  if arg[1] == "parts" then
    local parts = {}
    for i, part in ipairs(predicted.parts) do parts[i] = ("%s %.3f"):format(part.part, part.ms) end
    print("    " .. table.concat(parts, ", "))
  end
end
print(("The largest difference is %.0f%%, %s %.0f%%."):format(100 * worst, worst <= most and "within" or "beyond", 100 * most))
return worst <= most and 0 or 1
