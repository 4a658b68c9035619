--- weft.model "Name" { supported_layer_types = {...} }: declares a model.
--
-- Gives the model's own table, to which the script adds `build(cfg, weights, policy)`, which makes
-- the layers of this rank and returns an object with
--   forward(step) -> hidden states, [tokens, hidden_size] after the final norm
--   lm_head       -> the vocabulary-parallel head (nn.lm_head)
-- Capability belongs to the concrete model: a table that borrows functions of another declares its
-- own supported_layer_types, and nothing is inherited.
local models = require "weft.models"

local known_types = { attention = true, mlp = true, experts = true }

return function(name)
  if type(name) ~= "string" or name == "" then error("weft.model needs a name, got " .. type(name), 2) end
  return function(declaration)
    if type(declaration) ~= "table" then error("weft.model '" .. name .. "' needs a table, got " .. type(declaration), 2) end
    local supported = declaration.supported_layer_types or {}
    if type(supported) ~= "table" then error("supported_layer_types must be a list of layer types", 2) end
    local set = {}
    for i, layer_type in ipairs(supported) do
      if not known_types[layer_type] then
        error(("supported_layer_types[%d] of '%s' is '%s'; a plan can be given to attention, mlp and experts")
          :format(i, name, tostring(layer_type)), 2)
      end
      set[layer_type] = true
    end
    local model = {}
    for k, v in pairs(declaration) do model[k] = v end
    model.name = name
    model.supported_layer_types = supported
    return models.register(name, model, set)
  end
end
