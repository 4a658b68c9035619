--- weft: models, plans, groups and generation, in Lua over the C core.
--
-- `require "weft"` is what model scripts, policies, specs and the prompt see. Parts that cost
-- something to load (engine, commands) load on first use.
local core = require "weft.core"

local weft = {
  core = core,
  version = core.version,
  json = core.json,
  tensor = core.tensor,
  memory = core.memory,
  ops = core.ops,
  axis = core.axis,
  plan = core.plan,
  layer_parallel = core.layer_parallel,
  parallel_config = core.parallel_config,
  rank_grid = core.rank_grid,
  layout = core.layout,
  groups = core.groups,
  spawn = core.spawn,
  rank = core.rank,
  policy = core.policy,
}

local lazy = {
  nn = "weft.nn",
  model = "weft.model",
  models = "weft.models",
  engine = "weft.engine",
  config = "weft.config",
}

setmetatable(weft, {
  __index = function(t, key)
    local name = lazy[key]
    if not name then return nil end
    local value = require(name)
    rawset(t, key, value)
    return value
  end,
})

--- Iterates over a table in one order in every Lua state: integers upward, then strings.
-- The order of `pairs` differs between states, so nothing that creates groups, loads weights,
-- draws random numbers or calls collectives may follow it.
function weft.sorted_pairs(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys, function(a, b)
    local ta, tb = type(a), type(b)
    if ta ~= tb then return ta == "number" end
    if ta == "number" then return a < b end
    return tostring(a) < tostring(b)
  end)
  local i = 0
  return function()
    i = i + 1
    if keys[i] ~= nil then return keys[i], t[keys[i]] end
  end
end

package.loaded["weft"] = weft
return weft
