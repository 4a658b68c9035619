--- weft.config.rope: rope_theta, rope_scaling (or rope_parameters) and the rotary width, as one.
local rope = {}

-- Parameters of each type: name -> { low, high, required }.
local count, factor = { 1, 2 ^ 30 }, { 1, 65536, true }
local types = {
  default = {},
  linear = { factor = factor },
  dynamic = { factor = factor, alpha = { 1e-6, 1e6 }, original_max_position_embeddings = count },
  llama3 = {
    factor = factor, low_freq_factor = { 1e-6, 1e6, true }, high_freq_factor = { 1e-6, 1e6, true },
    original_max_position_embeddings = { 1, 2 ^ 30, true },
  },
  yarn = {
    factor = factor, original_max_position_embeddings = count, beta_fast = { 1e-6, 1e6 }, beta_slow = { 1e-6, 1e6 },
    extrapolation_factor = { 0, 1 }, attention_factor = { 1e-6, 1e6 }, attn_factor = { 1e-6, 1e6 }, mscale = { 0, 1e6 },
    mscale_all_dim = { 0, 1e6 }, apply_yarn_scaling = "boolean", truncate = "boolean",
  },
}
-- Stand beside the parameters in newer files.
local beside = { type = true, rope_type = true, rope_theta = true, partial_rotary_factor = true }

local function type_of(reader)
  local modern, legacy = reader:string "rope_type", reader:string "type"
  if modern and legacy and modern ~= legacy then
    reader:refuse("%srope_type is '%s' and %stype is '%s'; they mean the same and must agree", reader.prefix, modern, reader.prefix, legacy)
  end
  local name = modern or legacy or "default"
  if not types[name] then
    reader:refuse("%srope_type '%s' is not known; weft knows default, dynamic, linear, llama3, yarn", reader.prefix, name)
  end
  return name
end

local function parameters(reader)
  local name = type_of(reader)
  local known, result, keys = types[name], { rope_type = name }, {}
  for key in pairs(reader.object) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do
    if not known[key] and not beside[key] and reader:get(key) ~= nil and name ~= "default" then
      reader:refuse("%s%s is not a parameter of rope_type '%s'", reader.prefix, key, name)
    end
    if type(reader:get(key)) == "table" then
      reader:refuse("%s%s is a table: different rotations for different layers, which weft does not do", reader.prefix, key)
    end
  end
  for key, limits in pairs(known) do
    if limits == "boolean" then
      result[key] = reader:boolean(key)
    else
      result[key] = reader:number(key, limits[1], limits[2])
      if limits[3] and result[key] == nil then reader:refuse("%s%s is missing (rope_type '%s')", reader.prefix, key, name) end
    end
  end
  if name == "llama3" and result.low_freq_factor > result.high_freq_factor then
    reader:refuse("%slow_freq_factor %g is above high_freq_factor %g", reader.prefix, result.low_freq_factor, result.high_freq_factor)
  end
  return result
end

-- The two tables mean the same; where both are there, they must say the same.
local function check_agreement(config, older, newer)
  for key, value in pairs(older) do
    if newer[key] ~= nil and newer[key] ~= value then
      config:refuse("rope_scaling says %s = %s and rope_parameters says %s", key, tostring(value), tostring(newer[key]))
    end
  end
end

-- A number that may stand at the top or in rope_parameters; both must agree.
local function either(config, inner, name, low, high)
  local outer = config:number(name, low, high)
  local nested = inner and inner:number(name, low, high)
  if outer and nested and outer ~= nested then
    config:refuse("%s is %.14g and %s%s is %.14g", name, outer, inner.prefix, name, nested)
  end
  return nested or outer
end

--- Fills cfg.rope_theta, cfg.rope_scaling (nil: default) and cfg.rotary_dim; cfg.head_dim is there.
function rope.read(config, cfg, default_theta)
  local older, newer = config:sub "rope_scaling", config:sub "rope_parameters"
  local scaling = newer and parameters(newer) or older and parameters(older) or { rope_type = "default" }
  if older and newer then check_agreement(config, parameters(older), scaling) end
  local inner = newer or older
  cfg.rope_theta = either(config, inner, "rope_theta", 1.0001, 1e15) or default_theta
  if scaling.rope_type ~= "default" then cfg.rope_scaling = scaling end

  local part = either(config, inner, "partial_rotary_factor", 1e-6, 1)
  local from_part = part and math.floor(cfg.head_dim * part)
  local given = config:integer("rotary_dim", 2, cfg.head_dim, false)
  if given and from_part and given ~= from_part then
    config:refuse("rotary_dim is %d and partial_rotary_factor %g of head_dim %d is %d", given, part, cfg.head_dim, from_part)
  end
  cfg.rotary_dim = given or from_part or cfg.head_dim
  if cfg.rotary_dim < 2 or cfg.rotary_dim % 2 ~= 0 then
    config:refuse("rotary_dim must be even and at least 2, found %d (head_dim %d)", cfg.rotary_dim, cfg.head_dim)
  end
end

return rope
