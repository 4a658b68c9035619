--- Every legal plan of a model up to a number of ranks, for `weft verify --plans all`.
--
-- legal(cfg, max_ranks, supported [, options]) -> { { label =, sizes =, policy = }, ... } in one order:
-- every legal (tp, tpa, dcp, ep) x strips {1, 4, block size} x exchange where dcp > 1; each own tensor
-- size of mlp; and for each pair of attention plans at one tp one half/half and one alternating mix.
-- supported: a list of layer types, or function(layer_type). sizes is the plain table behind
-- the policy: it can cross to other ranks. Whether a plan is legal is asked of the validator alone.
local core = require "weft.core"
local policies = require "weft.policy"

local plan_search = {}

--- The numbers that divide n, upward.
function plan_search.divisors(n)
  local list = {}
  for k = 1, n do
    if n % k == 0 then list[#list + 1] = k end
  end
  return list
end

local divisors = plan_search.divisors

--- Calls visit { tensor, attention, context, expert } for each legal combination on `tensor` ranks.
-- numbers: policies.model_numbers.
function plan_search.each_legal(tensor, numbers, visit)
  for _, expert in ipairs(numbers.num_experts > 0 and divisors(tensor) or { 1 }) do
    for _, attention in ipairs(divisors(tensor)) do
      for _, context in ipairs(attention == tensor and divisors(tensor) or { tensor / attention }) do
        local made, policy = pcall(core.policy, { tensor = tensor, attention = { tensor = attention, context = context },
          experts = expert > 1 and { expert = expert } or nil })
        if made and pcall(policy.validate_model, policy, numbers) then
          visit { tensor = tensor, attention = attention, context = context, expert = expert }
        end
      end
    end
  end
end

local function supports(supported)
  if type(supported) == "function" then return supported end
  local set = {}
  for _, layer_type in ipairs(supported or {}) do set[layer_type] = true end
  return function(layer_type) return set[layer_type] == true end
end

local Search = {}
Search.__index = Search

--- Adds the plan when sizes and model allow it; says whether they did.
function Search:add(label, sizes)
  sizes.block_size = self.block_size
  local made, policy = pcall(core.policy, sizes)
  if not made or not pcall(policy.validate_model, policy, self.numbers) then return false end
  self.list[#self.list + 1] = { label = label, sizes = sizes, policy = policy }
  return true
end

--- The first expert size that a plan is legal with, or nil.
function Search:legal_experts(tp, attention)
  for _, ep in ipairs(self:expert_sizes(tp)) do
    local made, policy = pcall(core.policy, { tensor = tp, attention = attention, experts = { expert = ep } })
    if made and pcall(policy.validate_model, policy, self.numbers) then return ep end
  end
end

function Search:expert_sizes(tp)
  return self.numbers.num_experts > 0 and divisors(tp) or { 1 }
end

--- Attention plans of a tensor size: { tensor, context } and the smallest expert size beside them.
function Search:attention_plans(tp)
  local plans = {}
  for _, tpa in ipairs(divisors(tp)) do
    for _, dcp in ipairs(tpa == tp and divisors(tp) or { tp / tpa }) do
      local ep = self:legal_experts(tp, { tensor = tpa, context = dcp })
      if ep then plans[#plans + 1] = { tensor = tpa, context = dcp, expert = ep } end
    end
  end
  return plans
end

function Search:strips()
  local strips = {}
  for _, strip in ipairs { 1, 4, self.block_size } do
    if strip <= self.block_size and self.block_size % strip == 0 and strip ~= strips[#strips] then strips[#strips + 1] = strip end
  end
  return strips
end

local function name(tp, plan)
  local text = ("tp%d"):format(tp)
  if plan.tensor ~= tp then text = text .. (" tpa%d"):format(plan.tensor) end
  if plan.context > 1 then text = text .. (" dcp%d"):format(plan.context) end
  return text
end

local function with_experts(label, sizes, ep)
  if ep > 1 then
    sizes.experts = { expert = ep }
    label = label .. (" ep%d"):format(ep)
  end
  return label, sizes
end

function Search:whole_model(tp, plan)
  local exchanges, strips = { "ag_rs", "a2a" }, self:strips()
  if plan.context == 1 then exchanges, strips = { "ag_rs" }, { 1 } end
  for _, ep in ipairs(self:expert_sizes(tp)) do
    for _, strip in ipairs(strips) do
      for _, exchange in ipairs(exchanges) do
        local label = name(tp, plan)
        if plan.context > 1 then label = label .. (" i%d %s"):format(strip, exchange) end
        self:add(with_experts(label, { tensor = tp, attention = { tensor = plan.tensor, context = plan.context,
          interleave = strip, exchange = exchange } }, ep))
      end
    end
  end
end

function Search:own_mlp(tp, plan)
  for _, k in ipairs(divisors(tp)) do
    if k < tp and self.numbers.intermediate_size > 0 then
      self:add(("%s mlp%d"):format(name(tp, plan), k), { tensor = tp, mlp = { tensor = k },
        attention = { tensor = plan.tensor, context = plan.context } })
    end
  end
end

local function sizes_of(plan) return { tensor = plan.tensor, context = plan.context } end

local function short(plan) return ("%d.%d"):format(plan.tensor, plan.context) end

--- Two attention plans in one model: the first half of the layers and the rest; even layers and odd.
function Search:mixes(tp, plans)
  local layers = self.numbers.num_hidden_layers
  if layers < 2 then return end
  for i = 1, #plans do
    for j = i + 1, #plans do
      local a, b = plans[i], plans[j]
      local function mix(kind, chosen)
        local ep = math.max(a.expert, b.expert)
        self:add(with_experts(("tp%d %s %s|%s"):format(tp, kind, short(a), short(b)),
          { tensor = tp, attention = sizes_of(b), layers = chosen }, ep))
      end
      mix("half", { [("0-%d"):format(math.floor(layers / 2) - 1)] = { attention = sizes_of(a) } })
      local even = {}
      for layer = 0, layers - 1, 2 do even[layer] = { attention = sizes_of(a) } end
      mix("alternating", even)
    end
  end
end

function plan_search.legal(cfg, max_ranks, supported, options)
  options = options or {}
  local self = setmetatable({
    list = {}, block_size = options.block_size or 16,
    numbers = policies.model_numbers(cfg, options.name or (cfg.architectures or {})[1], supports(supported)),
  }, Search)
  for tp = 1, max_ranks do
    local plans = self:attention_plans(tp)
    for _, plan in ipairs(plans) do self:whole_model(tp, plan) end
    if plans[1] then self:own_mlp(tp, plans[#plans]) end
    self:mixes(tp, plans)
  end
  return self.list
end

return plan_search
