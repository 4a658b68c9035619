--- weights: a place in a checkpoint. `weights:at "self_attn"` goes down, `:source` names a tensor.
--
-- Layers ask for sources with the shape that the model says; a checkpoint of dummy weights makes
-- them of that shape. Progress goes to standard error.
local Weights = {}
Weights.__index = Weights

--- checkpoint: core.checkpoint; options: { dtype = "auto"|..., on_tensor = function(name) }.
function Weights.new(checkpoint, options)
  return setmetatable({ checkpoint = checkpoint, prefix = "", options = options or {} }, Weights)
end

function Weights:at(name)
  local prefix = self.prefix == "" and name or self.prefix .. "." .. name
  return setmetatable({ checkpoint = self.checkpoint, prefix = prefix, options = self.options }, Weights)
end

function Weights:name(name)
  if name == "" then return self.prefix end
  return self.prefix == "" and name or self.prefix .. "." .. name
end

--- Whether the checkpoint holds the tensor. Dummy weights hold whatever the model's shape needs:
-- `optional` says what to answer for them.
function Weights:has(name, optional)
  if self.checkpoint.format == "dummy" then return optional == true end
  return self.checkpoint:has(self:name(name))
end

-- Whether a name of modules_to_not_convert stands in the path: whole words of it between dots.
local function skipped(path, skip)
  for _, name in ipairs(skip) do
    if ("." .. path .. "."):find("." .. name .. ".", 1, true) then return true end
  end
  return false
end

--- What dummy weights make a matrix of: fp8 where the config says that it is quantised, else nil.
function Weights:quantized_dtype(name)
  local quantization = self.options.quantization
  if not quantization or skipped(self:name(name), quantization.skip) then return nil end
  return "float8_e4m3"
end

--- The source of a tensor of this global shape. Raises when it is missing.
function Weights:source(name, shape, dtype)
  local full = self:name(name)
  self.options.last_tensor = full -- names the layer that asked (parts.lua)
  if self.options.on_tensor then self.options.on_tensor(full) end
  return self.checkpoint:source(full, { shape = shape, dtype = dtype or self.options.dummy_dtype })
end

return Weights
