--- weft.models: which models there are and which layer types take plans of their own.
local models = {}

-- Architectures of config.json and the scripts that declare them.
local shipped = {
  LlamaForCausalLM = "weft.models.llama",
  MistralForCausalLM = "weft.models.mistral",
  MixtralForCausalLM = "weft.models.mixtral",
  MiniMaxM2ForCausalLM = "weft.models.minimax_m2",
  Qwen2ForCausalLM = "weft.models.qwen2",
  Qwen3ForCausalLM = "weft.models.qwen3",
  Qwen3MoeForCausalLM = "weft.models.qwen3_moe",
}

local registered = {} -- name -> { model =, supported = set }

--- Called by weft.model. A script may declare a shipped name again: its own model is used then.
function models.register(name, model, supported)
  registered[name] = { model = model, supported = supported }
  return model
end

--- The model of an architecture, or nil and a line that lists the known ones.
function models.find(name)
  if not registered[name] and shipped[name] then require(shipped[name]) end
  if registered[name] then return registered[name].model end
  return nil, ("no model for architecture '%s'; known: %s. Write a model script and name it: weft run MODEL.lua --model DIR")
    :format(tostring(name), table.concat(models.list(), ", "))
end

--- Whether a model takes a plan for a layer type ("attention", "mlp", "experts").
function models.supports(name, layer_type)
  models.find(name)
  local entry = registered[name]
  return entry ~= nil and entry.supported[layer_type] == true
end

--- Names of all shipped and declared models, sorted.
function models.list()
  local seen, names = {}, {}
  for _, set in ipairs { shipped, registered } do
    for name in pairs(set) do
      if not seen[name] then names[#names + 1] = name end
      seen[name] = true
    end
  end
  table.sort(names)
  return names
end

return models
