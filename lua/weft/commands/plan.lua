--- weft plan: who holds what under a plan. Reads config.json, starts no ranks.
local core = require "weft.core"

local plan = {}

function plan.run(options)
  local setup = require("weft.runtime").check(options)
  local text = require "weft.plan_text"
  local details = { context = options.context or setup.cfg.max_position_embeddings, batch = options.batch or 1,
    name = setup.name }
  if options.json then
    io.stdout:write(core.json.encode(text.table(setup.policy, setup.cfg, details)), "\n")
  else
    io.stdout:write(text.explain(setup.policy, setup.cfg, details))
  end
  return 0
end

return plan
