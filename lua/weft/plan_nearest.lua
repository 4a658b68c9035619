--- weft.plan_nearest: plan flags close to ones that a model refuses.
--
-- Whether flags are legal is asked of the validator alone; close means few doublings of the sizes, those
-- of tp counting most, then those of sizes that were asked for.
local policies = require "weft.policy"

local nearest = {}

local function divisors(n)
  local list = {}
  for k = 1, n do
    if n % k == 0 then list[#list + 1] = k end
  end
  return list
end

local function doublings(a, b) return math.abs(math.log(a / b) / math.log(2)) end

--- What to type for sizes { tp, tpa, dcp, ep }.
function nearest.flags(sizes)
  local words = { "-tp " .. sizes.tp }
  if sizes.tpa ~= sizes.tp then words[#words + 1] = "-tpa " .. sizes.tpa
  elseif sizes.dcp > 1 then words[#words + 1] = "-dcp " .. sizes.dcp end
  if sizes.ep > 1 then words[#words + 1] = "-ep " .. sizes.ep end
  return table.concat(words, " ")
end

local function is_legal(sizes, cfg, model)
  local made, policy = pcall(policies.from_options, {
    tensor_parallel_size = sizes.tp, tensor_parallel_size_attention = sizes.tpa,
    decode_context_parallel_size = sizes.dcp, expert_parallel_size = sizes.ep,
  })
  return made and policies.validate(policy, cfg, model)
end

-- Candidates beside the sizes that were asked for: as a list with the distance of each.
local function candidates(asked, cfg)
  local list = {}
  for tp = 1, math.min(2 * asked.tp, cfg.num_attention_heads) do
    if cfg.num_attention_heads % tp == 0 then
      local parts = divisors(tp)
      for _, ep in ipairs(policies.experts_of(cfg) > 0 and parts or { 1 }) do
        for _, tpa in ipairs(parts) do
          for _, dcp in ipairs(tpa == tp and parts or { tp / tpa }) do
            list[#list + 1] = { tp = tp, tpa = tpa, dcp = dcp, ep = ep, order = #list,
              distance = 8 * doublings(tp, asked.tp) + asked.tpa_weight * doublings(tpa, asked.tpa)
                + asked.dcp_weight * doublings(dcp, asked.dcp) + asked.ep_weight * doublings(ep, asked.ep) }
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

--- The `count` legal plans nearest to what the flags ask for: { { tp, tpa, dcp, ep, flags, distance }, ... }; none
-- where a plan script was given, or where the sizes are not at fault.
-- model = { name =, supports = function(name, layer_type) }, as of weft.policy's validate.
function nearest.list(options, cfg, model, count)
  if options.plan or options.policy or options.plan_list then return {} end
  local tp = options.tensor_parallel_size or 1
  local tpa = options.tensor_parallel_size_attention or tp
  local function weight(flag) return options[flag] and 4 or 1 end
  local asked = {
    tp = tp,
    tpa = tpa, tpa_weight = weight "tensor_parallel_size_attention",
    dcp = options.decode_context_parallel_size or math.max(1, tp / tpa), dcp_weight = weight "decode_context_parallel_size",
    ep = options.expert_parallel_size or 1, ep_weight = weight "expert_parallel_size",
  }
  local list = {}
  if is_legal(asked, cfg, model) then return list end
  for _, sizes in ipairs(candidates(asked, cfg)) do
    if #list == count then break end
    if is_legal(sizes, cfg, model) then
      list[#list + 1] = { tp = sizes.tp, tpa = sizes.tpa, dcp = sizes.dcp, ep = sizes.ep, flags = nearest.flags(sizes), distance = sizes.distance }
    end
  end
  return list
end

--- Flags of the nearest legal plan, or nil.
function nearest.of(options, cfg, model)
  local plan = nearest.list(options, cfg, model, 1)[1]
  return plan and plan.flags
end

return nearest
