--- weft.nn.load: a matrix from the checkpoint into a layer, with its bias, and its scales when it is fp8.
--
-- A layer keeps fp8 as fp8 unless the weights' options say `dequantize`; with `quantize_activations`
-- it also rounds what it takes in to fp8, as GPUs with fp8 products do.
local load = {}

local function ceil_div(a, b) return math.ceil(a / b) end

--- The options of core's constructors that say how a layer keeps its weights.
function load.storage(weights, options)
  options.dtype = weights.options.param_dtype or "auto" -- "auto" keeps the checkpoint's dtype
  options.dequantize = weights.options.dequantize
  options.quantize_activations = weights.options.quantize_activations
  return options
end

--- The source of a matrix (or of one for each expert) and, when it is fp8, of its scales.
function load.matrix(weights, name, shape)
  local weight = weights:source(name, shape, weights:quantized_dtype(name))
  if weight.dtype ~= "float8_e4m3" then return weight end
  local blocks = {}
  for d, size in ipairs(shape) do blocks[d] = d > #shape - 2 and ceil_div(size, 128) or size end
  local scale_name = name .. "_scale_inv"
  if not weights:has(scale_name, true) then
    error(("tensor '%s' is float8_e4m3, and its scales '%s' are not in the checkpoint"):format(weight.name, weights:name(scale_name)), 0)
  end
  return weight, weights:source(scale_name, blocks, "float32")
end

--- Loads NAME.weight (shape { out, in }) into a linear layer; shard: its part of the layer, or nil.
function load.linear(layer, weights, shard, name, shape, bias)
  local prefix = name == "" and "" or name .. "."
  local weight, scale = load.matrix(weights, prefix .. "weight", shape)
  layer:load(shard, weight)
  if scale then layer:load_scale(shard, scale) end
  if bias then layer:load_bias(shard, weights:source(prefix .. "bias", { shape[1] })) end
end

return load
