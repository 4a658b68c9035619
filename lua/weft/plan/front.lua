--- All legal plans up to a number of ranks, priced; and the front of tokens/s a user against tokens/s
-- a rank: the points that no other beats in both.
--
-- front.search(cfg, model, machine, options) -> { model, machine, context, max_ranks, num_plans, num_points, num_fitting,
--   seconds, points = { point, ... }, front = { point, ... } }
-- options: max_ranks, context, batch (nil: 1, 2, 4, ... up to what fits), block_size
-- point = { label, flags or nil, policy, ranks, batch, ms, user, rank, front = true or nil }
--   user, rank: predicted tokens a second. Points that do not fit in memory are not kept.
-- Strips and mixes of plans by layer are left out: they do not change the price, or lie between two.
local core = require "weft.core"
local nearest = require "weft.plan_nearest"
local numbers = require "weft.plan_numbers"
local plan_search = require "weft.plan_search"
local policies = require "weft.policy"
local price = require "weft.plan.price"

local front = {}

local largest_batch = 4096

-- Sizes, label and flags of every variant of a legal combination.
local function variants(plan, model_numbers, supports, visit)
  for _, exchange in ipairs(plan.context > 1 and { "ag_rs", "a2a" } or { "ag_rs" }) do
    local flags = nearest.flags { tp = plan.tensor, tpa = plan.attention, dcp = plan.context, ep = plan.expert }
    if exchange == "a2a" then flags = flags .. " --dcp-comm-backend a2a" end
    local sizes = { tensor = plan.tensor, attention = { tensor = plan.attention, context = plan.context, exchange = exchange },
      experts = plan.expert > 1 and { expert = plan.expert } or nil }
    visit(sizes, flags, flags)
    if model_numbers.intermediate_size > 0 and supports "mlp" then
      for k = 1, plan.tensor - 1 do
        if plan.tensor % k == 0 then
          visit({ tensor = sizes.tensor, attention = sizes.attention, mlp = { tensor = k } }, ("%s mlp=%d"):format(flags, k))
        end
      end
    end
  end
end

local function batches(memory, wanted)
  local most = memory.largest_batch or largest_batch
  if wanted then return wanted <= most and { wanted } or {} end
  local list, batch = {}, 1
  while batch <= math.min(most, largest_batch) do
    list[#list + 1] = batch
    batch = batch * 2
  end
  return list
end

--- Marks and gives the points that no other beats: fastest for a user first. Pure arithmetic.
function front.pareto(points)
  local sorted = {}
  for i, point in ipairs(points) do sorted[i] = point end
  table.sort(sorted, function(a, b)
    if a.user ~= b.user then return a.user > b.user end
    if a.rank ~= b.rank then return a.rank > b.rank end
    return a.label < b.label
  end)
  local list, best = {}, -math.huge
  for _, point in ipairs(sorted) do
    if point.rank > best then
      best = point.rank
      point.front = true
      list[#list + 1] = point
    end
  end
  return list
end

function front.search(cfg, model, machine, options)
  local began = core.now()
  local function supports(layer_type) return model.supports(model.name, layer_type) end
  local model_numbers = policies.model_numbers(cfg, model.name, supports)
  local result = { model = model.name, machine = machine.name, context = options.context, batch = options.batch, max_ranks = options.max_ranks,
    num_plans = 0, num_fitting = 0, points = {} }
  local function add(sizes, label, flags)
    sizes.block_size = options.block_size
    local made, policy = pcall(core.policy, sizes)
    if not made or not pcall(policy.validate_model, policy, model_numbers) then return end
    result.num_plans = result.num_plans + 1
    local n = numbers.of(policy, cfg, { context = options.context, name = model.name, ranks = 1 })
    local list = batches(price.of(n, cfg, machine, 1).memory, options.batch)
    if #list > 0 then result.num_fitting = result.num_fitting + 1 end
    for _, batch in ipairs(list) do
      local p = price.of(n, cfg, machine, batch)
      result.points[#result.points + 1] = { label = label, flags = flags, policy = tostring(policy), ranks = policy.num_ranks,
        batch = batch, ms = p.ms, user = p.tok_per_s_user, rank = p.tok_per_s_gpu }
    end
  end
  for tensor = 1, math.min(options.max_ranks, model_numbers.num_attention_heads) do
    if model_numbers.num_attention_heads % tensor == 0 then
      plan_search.each_legal(tensor, model_numbers, function(plan) variants(plan, model_numbers, supports, add) end)
    end
  end
  result.front = front.pareto(result.points)
  result.num_points, result.seconds = #result.points, core.now() - began
  return result
end

--- As plain values for --json: the front, without the points behind it.
function front.table(result)
  local rows = {}
  for i, p in ipairs(result.front) do
    rows[i] = { plan = p.label, flags = p.flags, policy = p.policy, ranks = p.ranks, batch = p.batch, ms = p.ms,
      tok_per_s_user = p.user, tok_per_s_gpu = p.rank }
  end
  return { label = "predicted", model = result.model, machine = result.machine, context = result.context,
    max_ranks = result.max_ranks, num_plans = result.num_plans, num_fitting = result.num_fitting, num_points = result.num_points, seconds = result.seconds,
    front = core.json.array(rows) }
end

return front
