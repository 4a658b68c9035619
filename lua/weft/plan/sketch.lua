--- What the layers of a model are, asked of its script: its build is run with stand-ins for weights and layers, so
-- nothing is read and nothing allocated.
--
-- sketch.of(name, cfg) -> { [i] = { attention = true or nil, mlp = true or nil, experts = true or nil, norms = elements }, ... }
--   for layer i from 0; nil where the script cannot be followed so (it makes its layers another way, or fails):
--   then the config alone says what a layer is.
local core = require "weft.core"
local models = require "weft.models"

local sketch = {}

local stand_in = {}
local meta = { __index = function() return stand_in end, __call = function() return stand_in end }
for _, name in ipairs { "__add", "__sub", "__mul", "__div", "__unm", "__mod", "__pow" } do meta[name] = function() return 1 end end
setmetatable(stand_in, meta)

local kind_of = { hetero_attention = "attention", encoder_attention = "attention", gate_up_linear = "mlp", experts = "experts" }

-- nn's functions that only write down what they are asked for, into layers[current].
local function recorders(nn, layers)
  local current, replaced = nil, {}
  for name, original in pairs(nn) do
    local kind = kind_of[name]
    if name == "layers" then
      replaced[name] = function(cfg, weights, policy, layer)
        return original(cfg, weights, policy, function(c, w, p, i)
          current = { norms = 0 }
          layers[i] = current
          local made = layer(c, w, p, i)
          current = nil
          return made
        end)
      end
    elseif type(original) == "function" then
      replaced[name] = function(first, _, size)
        if current and kind then current[kind] = true end
        if current and name == "rms_norm" then current.norms = current.norms + (tonumber(size) or first.hidden_size) end
        if current and name == "column_linear" then layers.unknown = true end -- a layer of its own making
        return stand_in
      end
    end
  end
  return replaced
end

-- Plans of rank 0 of one rank: models look at their sizes.
local plans = { get = function(_, layer_type, layer) return core.policy({}):get(layer_type, layer, 0) end }

local function run(model, cfg)
  local nn, layers, originals = require "weft.nn", {}, {}
  for name, fn in pairs(recorders(nn, layers)) do originals[name], nn[name] = nn[name], fn end
  local shown, written = print, io.write
  print, io.write = function() end, function() end -- what a script says is for its real runs
  local ok = pcall(model.build, cfg, stand_in, plans)
  print, io.write = shown, written
  for name, fn in pairs(originals) do nn[name] = fn end
  local unknown = layers.unknown
  layers.unknown = nil
  for i = 0, cfg.num_hidden_layers - 1 do unknown = unknown or not layers[i] end
  return ok and not unknown and layers or nil
end

local known = setmetatable({}, { __mode = "k" }) -- cfg -> { build -> sketch or false }: ,reload changes a model in place

function sketch.of(name, cfg)
  local model = name and models.find(name)
  if not model or type(model.build) ~= "function" then return nil end
  known[cfg] = known[cfg] or {}
  local mine, build = known[cfg], model.build
  if mine[build] == nil then mine[build] = run(model, cfg) or false end
  return mine[build] or nil
end

return sketch
