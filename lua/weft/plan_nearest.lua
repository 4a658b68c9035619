--- weft.plan_nearest: legal plans close to one that a model refuses, as flags or as sizes of a policy.
--
-- Whether a plan is legal is asked of the validator alone; close means few doublings of the sizes, those
-- of tp counting most, then those of sizes that were asked for.
local core = require "weft.core"
local weft = require "weft"
local policies = require "weft.policy"
local divisors = require("weft.plan_search").divisors

local nearest = {}

local function doublings(a, b) return math.abs(math.log(a / b) / math.log(2)) end

--- What to type for sizes { tp, tpa, dcp, ep }.
function nearest.flags(sizes)
  local words = { "-tp " .. sizes.tp }
  if sizes.tpa ~= sizes.tp then words[#words + 1] = "-tpa " .. sizes.tpa
  elseif sizes.dcp > 1 then words[#words + 1] = "-dcp " .. sizes.dcp end
  if sizes.ep > 1 then words[#words + 1] = "-ep " .. sizes.ep end
  return table.concat(words, " ")
end

-- ---- sizes as a policy writes them ----

local order = { "tensor", "context", "expert", "attention", "mlp", "experts" } -- then the rest, by name
local place = {}
for i, name in ipairs(order) do place[name] = ("%d"):format(i) end

local function key_text(key)
  if type(key) == "string" and key:match "^[%a_][%w_]*$" then return key end
  return ("[%s]"):format(type(key) == "string" and ("%q"):format(key) or tostring(key))
end

local function sizes_text(value)
  if type(value) ~= "table" then return type(value) == "string" and ("%q"):format(value) or tostring(value) end
  local keys, items = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return (place[a] or tostring(a)) < (place[b] or tostring(b)) end)
  for i, key in ipairs(keys) do items[i] = key_text(key) .. " = " .. sizes_text(value[key]) end
  return "{ " .. table.concat(items, ", ") .. " }"
end

-- ---- what was asked for: { tp, tpa, dcp, ep, mlp or nil, <size>_weight, legal(sizes), text(sizes) } ----

local function weights(asked, given)
  for _, name in ipairs { "tpa", "dcp", "ep", "mlp" } do asked[name .. "_weight"] = given[name] and 4 or 1 end
  return asked
end

local function asked_by_flags(options)
  local tp = options.tensor_parallel_size or 1
  local tpa = options.tensor_parallel_size_attention or tp
  local asked = { tp = tp, tpa = tpa, dcp = options.decode_context_parallel_size or math.max(1, tp / tpa),
    ep = options.expert_parallel_size or 1, text = nearest.flags }
  function asked.policy(sizes)
    return policies.from_options { tensor_parallel_size = sizes.tp, tensor_parallel_size_attention = sizes.tpa,
      decode_context_parallel_size = sizes.dcp, expert_parallel_size = sizes.ep }
  end
  return weights(asked, { tpa = options.tensor_parallel_size_attention, dcp = options.decode_context_parallel_size, ep = options.expert_parallel_size })
end

local function whole(value) return type(value) == "number" and value >= 1 and value % 1 == 0 and value end

-- A copy of the table of sizes with these in place of its own.
local function replaced(table_of_sizes, sizes)
  local result, attention = {}, {}
  for key, value in pairs(table_of_sizes) do result[key] = value end
  for key, value in pairs(type(result.attention) == "table" and result.attention or {}) do attention[key] = value end
  attention.tensor = sizes.tpa ~= sizes.tp and sizes.tpa or nil
  attention.context = sizes.tpa == sizes.tp and sizes.dcp > 1 and sizes.dcp or nil
  result.tensor = sizes.tp
  result.attention = next(attention) and attention or nil
  result.experts = sizes.ep > 1 and { expert = sizes.ep } or nil
  result.mlp = sizes.mlp and { tensor = sizes.mlp } or nil
  return result
end

local function asked_by_table(given)
  local function part(name) return type(given[name]) == "table" and given[name] or {} end
  local tp = whole(given.tensor) or 1
  local tpa, ep = whole(part("attention").tensor), whole(part("experts").expert)
  local asked = { tp = tp, tpa = tpa or tp, ep = ep or 1, mlp = whole(part("mlp").tensor) }
  asked.dcp = whole(part("attention").context) or math.max(1, tp / asked.tpa)
  function asked.policy(sizes) return core.policy(replaced(given, sizes)) end
  function asked.text(sizes) return sizes_text(replaced(given, sizes)) end
  return weights(asked, { tpa = tpa, dcp = part("attention").context, ep = ep, mlp = asked.mlp })
end

-- ---- looking around it ----

local function is_legal(asked, sizes, cfg, model)
  local made, policy = pcall(asked.policy, sizes)
  return made and policies.validate(policy, cfg, model)
end

-- Candidates beside the sizes that were asked for: as a list with the distance of each.
local function candidates(asked, cfg, ranks)
  local list = {}
  local function distance(sizes)
    local sum = 8 * doublings(sizes.tp, asked.tp)
    for _, name in ipairs { "tpa", "dcp", "ep", "mlp" } do
      if sizes[name] then sum = sum + asked[name .. "_weight"] * doublings(sizes[name], asked[name]) end
    end
    return sum
  end
  local function add(sizes)
    sizes.order, sizes.distance = #list, distance(sizes)
    list[#list + 1] = sizes
  end
  for tp = ranks or 1, ranks or math.min(2 * asked.tp, cfg.num_attention_heads) do
    if cfg.num_attention_heads % tp == 0 then
      local parts = divisors(tp)
      for _, ep in ipairs(policies.experts_of(cfg) > 0 and parts or { 1 }) do
        for _, tpa in ipairs(parts) do
          for _, dcp in ipairs(tpa == tp and parts or { tp / tpa }) do
            if not asked.mlp then add { tp = tp, tpa = tpa, dcp = dcp, ep = ep } end
            for _, mlp in ipairs(asked.mlp and parts or {}) do add { tp = tp, tpa = tpa, dcp = dcp, ep = ep, mlp = mlp } end
          end
        end
      end
    end
  end
  table.sort(list, function(a, b)
    if a.distance ~= b.distance then return a.distance < b.distance end
    return a.order > b.order
  end)
  return list
end

local function nearest_sizes(asked, cfg, model, count, ranks)
  local list = {}
  for _, sizes in ipairs(candidates(asked, cfg, ranks)) do
    if #list == count then break end
    if is_legal(asked, sizes, cfg, model) then
      list[#list + 1] = { tp = sizes.tp, tpa = sizes.tpa, dcp = sizes.dcp, ep = sizes.ep, mlp = sizes.mlp,
        flags = asked.text == nearest.flags and nearest.flags(sizes) or nil, text = asked.text(sizes), distance = sizes.distance }
    end
  end
  return list
end

-- Legal sizes of attention for entries of `layers` that the rest of the policy does not allow.
local function nearest_layers(given, cfg, model, count)
  local list = {}
  local base = {}
  for key, value in pairs(given) do base[key] = value end
  local function legal(key, entry)
    base.layers = { [key] = entry }
    local made, policy = pcall(core.policy, base)
    return made and policies.validate(policy, cfg, model)
  end
  for key, entry in weft.sorted_pairs(given.layers) do
    local wanted = type(entry) == "table" and type(entry.attention) == "table" and whole(entry.attention.tensor)
    if wanted and not legal(key, entry) then
      local sizes = divisors(given.tensor or 1)
      table.sort(sizes, function(a, b) return doublings(a, wanted) < doublings(b, wanted) end)
      for _, tensor in ipairs(sizes) do
        local other = { attention = { tensor = tensor }, mlp = entry.mlp, experts = entry.experts }
        if #list < count and legal(key, other) then
          list[#list + 1] = { text = ("layers = { %s = %s }"):format(key_text(key), sizes_text(other)), distance = doublings(tensor, wanted) }
        end
      end
    end
  end
  return list
end

--- The `count` legal plans nearest to what the flags, the plan script or the sizes (policy) ask for: { { text, distance, and for
-- whole plans tp, tpa, dcp, ep, mlp, and flags where flags asked }, ... }; none where the sizes are not at fault.
-- model = { name =, supports = function(name, layer_type) }, as of weft.policy's validate; options.ranks: plans
-- for so many only.
function nearest.list(options, cfg, model, count)
  local given = type(options.policy) == "table" and options.policy or nil
  if options.plan then given = policies.sizes_written(options.plan) end
  if not given and (options.plan or options.policy or options.plan_list) then return {} end
  local base = given and replaced(given, asked_by_table(given))
  if base then base.layers = nil end
  local asked = base and asked_by_table(base) or asked_by_flags(options)
  if not is_legal(asked, asked, cfg, model) then return nearest_sizes(asked, cfg, model, count, options.ranks) end
  if given and type(given.layers) == "table" then return nearest_layers(given, cfg, model, count) end
  return {}
end

--- Flags of the nearest legal plan, or nil.
function nearest.of(options, cfg, model)
  local plan = nearest.list(options, cfg, model, 1)[1]
  return plan and plan.flags
end

return nearest
