--- The layers of a model as the parts of a plan: those that are cut alike together.
local policies = require "weft.policy"
local sketch = require "weft.plan.sketch"

local layers = {}

-- What layer i is: as its script says, or as the config does.
local function layer_of(said, cfg, i)
  if said then return said[i] end
  local experts = policies.experts_of(cfg) > 0
  return { attention = true, mlp = not experts, experts = experts }
end

-- Elements of the norms that are attention's: all of the layer, but for one before each feed-forward part.
local function attention_norms(layer, cfg)
  if not layer.norms then return cfg.hidden_size end
  return layer.norms - (layer.mlp and cfg.hidden_size or 0) - (layer.experts and cfg.hidden_size or 0)
end

--- Layers that have such a part and whose plan (and window, and norms) read the same, as one part each, in the
-- order of first appearance: { { layers = { i, ... }, window =, norms = elements beside attention, or nil }, ... }.
function layers.group(policy, cfg, layer_type, name)
  local parts, by_key, said = {}, {}, sketch.of(name, cfg)
  for i = 0, cfg.num_hidden_layers - 1 do
    local layer = layer_of(said, cfg, i)
    local attention = layer_type == "attention"
    local window = attention and cfg.window_of and cfg.window_of(i) or 0
    local norms = attention and attention_norms(layer, cfg) or nil
    local key = ("%s %d %s"):format(tostring(policy:get(layer_type, i, 0)), window, tostring(norms))
    if layer[layer_type] and not by_key[key] then
      by_key[key] = { layers = {}, window = window, norms = norms }
      parts[#parts + 1] = by_key[key]
    end
    if layer[layer_type] then table.insert(by_key[key].layers, i) end
  end
  return parts
end

--- "0-3, 7": layer numbers as ranges.
function layers.ranges(list)
  local text, i = {}, 1
  while i <= #list do
    local last = i
    while list[last + 1] == list[last] + 1 do last = last + 1 end
    text[#text + 1] = last > i and ("%d-%d"):format(list[i], list[last]) or tostring(list[i])
    i = last + 1
  end
  return table.concat(text, ", ")
end

return layers
