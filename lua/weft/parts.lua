--- The layers that a model's build made, by place and name, to look at: session.layers[0].o_proj.
--
-- Scripts may hide their layers in closures; the constructors of nn tell of each, and the tensor that
-- was asked for last says where in the checkpoint it belongs.
local Parts = {}
Parts.__index = Parts

function Parts.new(cfg)
  local layers = {}
  for i = 0, cfg.num_hidden_layers - 1 do layers[i] = {} end
  return setmetatable({ layers = layers, others = {} }, Parts)
end

local by_kind = { qkv_linear = "qkv_proj", embedding = "embedding", lm_head = "lm_head", attention = "attention" }
local by_tensor = { up_proj = "gate_up_proj" } -- the last of those that one layer holds

local function free_name(list, name)
  local n, free = 1, name
  while list[free] do
    n = n + 1
    free = name .. "_" .. n
  end
  return free
end

--- kind: what nn calls the layer; tensor: the checkpoint's tensor that was asked for last, or nil.
function Parts:add(kind, layer, tensor)
  tensor = tensor or ""
  local index, path = tensor:match "layers%.(%d+)%.(.+)$"
  local owner = (path or tensor):match "([^.]+)%.[^.]+$"
  local name = by_kind[kind] or (kind == "linear" or kind == "norm") and (by_tensor[owner] or owner) or kind
  local outside = kind == "embedding" or kind == "lm_head" or not index or not self.layers[tonumber(index)]
  local list = outside and self.others or self.layers[tonumber(index)]
  list[free_name(list, name or kind)] = layer
end

return Parts
