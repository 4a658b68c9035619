--- Who holds what under a policy, and what moves, in numbers. Pure arithmetic: no ranks, no weights.
--
-- numbers.of(policy, cfg, details) -> {
--   model, num_ranks, policy, block_size, virtual_block, context, batch, weight_dtype, cache_dtype,
--   parts = { { type, layers, count, plan, ranks = { row, ... }, moves = { move, ... } }, ... },
--   ranks = { { rank, weight_bytes, cache_bytes, cache_bytes_allocated, sent_bytes_per_token }, ... } }
-- details: context, batch, name (of the model, whose script says what its layers are); ranks: only the rows of
-- this many ranks (rank 0 holds the most).
-- A row tells what a rank holds of ONE layer of the part; a move what each rank sends in ONE layer
-- for each token, to the others of its row of move.ranks = { { rank, ... }, ... }, counted as collectives count it (all_reduce of S bytes: 2 S (n-1)/n). Predictions
-- by formula, not measurements. Heads, rows and columns are { first, count }, from 0.
local core = require "weft.core"
local layers = require "weft.plan.layers"
local policies = require "weft.policy"
local Sizes = require "weft.plan.sizes"

local numbers = {}

local function ceil_div(a, b) return math.floor((a + b - 1) / b) end

-- ---- moves ----

local function all_reduce(bytes, n) return 2 * bytes * (n - 1) / n end

local function add_move(moves, what, axis, bytes)
  if axis.world_size == 1 then return end
  moves[#moves + 1] = { op = what:match "^%S+", what = what, group = axis.group, world_size = axis.world_size, bytes = bytes }
end

local function attention_moves(cfg, sizes, plan, heads)
  local moves, n = {}, plan.context.world_size
  local dim, element = cfg.head_dim, sizes.activation
  local worked = heads.num_heads
  if cfg.use_qk_norm then add_move(moves, "all_reduce of q and k variances", plan.input, all_reduce(8, plan.input.world_size)) end
  if n > 1 then
    if not plan.reshards_output then -- plain context parallelism: every rank works on the heads of its group
      add_move(moves, "all_gather of queries", plan.context, (n - 1) * worked * dim * element)
      worked = worked * n
    end
    local own = worked / n
    if plan.exchange == "a2a" then
      add_move(moves, "all_to_all of partial outputs", plan.context, (n - 1) * own * (dim * element + 4))
    else
      add_move(moves, "all_gather of log-sum-exps", plan.context, (n - 1) * worked * 4)
      add_move(moves, "reduce_scatter of partial outputs", plan.context, (n - 1) * own * dim * 4)
    end
  end
  add_move(moves, "all_reduce of o_proj", plan.output, all_reduce(cfg.hidden_size * element, plan.output.world_size))
  return moves
end

-- ---- parts ----

-- Tokens of a context that a rank keeps; where no layer sees further than a window, only those.
local function tokens_kept(cfg, plan, context)
  local function held(length)
    return core.layout.local_len(length, plan.context.rank, plan.context.world_size, plan.interleave)
  end
  local widest = 0
  for i = 0, cfg.num_hidden_layers - 1 do
    local window = cfg.window_of and cfg.window_of(i) or 0
    if window == 0 then return held(context) end
    widest = math.max(widest, window)
  end
  return held(context) - held(math.max(0, context - widest))
end

-- Tokens that a decode step reads on this rank.
local function tokens_held(part, plan, context)
  local function held(length)
    return core.layout.local_len(length, plan.context.rank, plan.context.world_size, plan.interleave)
  end
  if part.window == 0 then return held(context) end
  return held(context) - held(math.max(0, context - part.window))
end

local function attention_part(part, policy, cfg, sizes, details)
  local encoder = cfg.is_causal == false
  local kind = encoder and "default" or "attention"
  local dim, hidden = cfg.head_dim, cfg.hidden_size
  part.type, part.ranks = "attention", {}
  for rank = 0, sizes.ranks - 1 do
    local plan = policy:get(kind, part.layers[1], rank)
    local h = core.layout.heads { num_heads = cfg.num_attention_heads, num_kv_heads = cfg.num_key_value_heads, plan = plan }
    local rows = (h.num_heads + 2 * h.num_kv_heads) * dim
    local qkv = sizes:linear({ h.num_heads * dim, h.num_kv_heads * dim, h.num_kv_heads * dim }, { 0, hidden }) + (cfg.qkv_bias and sizes:vector(rows) or 0)
    local o_proj = sizes:linear({ hidden }, { h.output_first_head * dim, h.output_num_heads * dim })
    if cfg.attention_bias and plan.output.rank == 0 then o_proj = o_proj + sizes:vector(hidden) end
    local norms = sizes:vector(part.norms)
    if cfg.use_qk_norm then norms = norms + sizes:vector((h.num_heads + h.num_kv_heads) * dim) end
    local per_token = encoder and 0 or h.num_kv_heads * 2 * dim * sizes.activation
    local n, virtual = plan.context.world_size, policy.block_size * policy.context_lcm
    part.ranks[rank + 1] = {
      rank = rank, input = tostring(plan.input), output = tostring(plan.output), context = tostring(plan.context),
      q_heads = { h.first_head, h.num_heads }, kv_heads = { h.first_kv_head, h.num_kv_heads },
      kv_head_replicas = h.num_kv_head_replicas, output_heads = { h.output_first_head, h.output_num_heads },
      weight_bytes = qkv + o_proj + norms, qkv_bytes = qkv, o_proj_bytes = o_proj,
      tokens = tokens_held(part, plan, details.context), context_rank = plan.context.rank,
      cache_bytes_per_token = per_token / n,
      cache_bytes = tokens_kept(cfg, plan, details.context) * per_token * details.batch,
      cache_bytes_allocated = ceil_div(details.context, virtual) * (virtual / n) * per_token * details.batch,
    }
    if rank == 0 then
      part.plan, part.axes = tostring(plan), plan
      part.moves = attention_moves(cfg, sizes, plan, h)
    end
  end
end

local function columns_of(shard) return { shard.offset, shard.count } end

local function mlp_part(part, policy, cfg, sizes)
  local hidden, width = cfg.hidden_size, cfg.intermediate_size
  part.type, part.ranks = "mlp", {}
  for rank = 0, sizes.ranks - 1 do
    local plan = policy:get("mlp", part.layers[1], rank)
    local shard = core.layout.shard("columns of the MLP", width, plan.input)
    local gate_up = sizes:linear({ shard.count, shard.count }, { 0, hidden })
    local down = sizes:linear({ hidden }, columns_of(shard))
    if cfg.mlp_bias then
      gate_up, down = gate_up + sizes:vector(2 * shard.count), down + sizes:vector(plan.input.rank == 0 and hidden or 0)
    end
    part.ranks[rank + 1] = { rank = rank, input = tostring(plan.input), output = tostring(plan.output),
      columns = columns_of(shard), weight_bytes = gate_up + down + sizes:vector(hidden), gate_up_bytes = gate_up, down_bytes = down }
    if rank == 0 then
      part.plan, part.axes, part.moves = tostring(plan), plan, {}
      add_move(part.moves, "all_reduce of down_proj", plan.input, all_reduce(hidden * sizes.activation, plan.input.world_size))
    end
  end
end

local function experts_part(part, policy, cfg, sizes)
  local hidden = cfg.hidden_size
  local count, width = policies.experts_of(cfg)
  part.type, part.ranks = "experts", {}
  for rank = 0, sizes.ranks - 1 do
    local plan = policy:get("experts", part.layers[1], rank)
    local held = core.layout.shard("experts", count, plan.expert)
    local shard = core.layout.shard("columns of an expert", width, plan.input)
    local each, shared = sizes:expert(hidden, columns_of(shard))
    local router = count * (hidden + (cfg.use_routing_bias and 1 or 0)) * 4 -- float32 on every rank
    part.ranks[rank + 1] = { rank = rank, input = tostring(plan.input), output = tostring(plan.output), expert = tostring(plan.expert),
      experts = columns_of(held), columns = columns_of(shard), expert_bytes = each, router_bytes = router,
      weight_bytes = held.count * each + shared + router + sizes:vector(hidden) }
    if rank == 0 then
      part.plan, part.axes, part.moves = tostring(plan), plan, {}
      add_move(part.moves, "all_reduce of the experts' sum", plan.output, all_reduce(hidden * sizes.activation, plan.output.world_size))
    end
  end
end

local function vocab_part(policy, cfg, sizes, layer_type)
  local head = layer_type == "lm_head"
  local part = { type = layer_type, count = 1, ranks = {}, moves = {} }
  for rank = 0, sizes.ranks - 1 do
    local plan = policy:get(layer_type, nil, rank)
    local v = core.layout.vocab { vocab_size = cfg.vocab_size, axis = plan.output }
    local weights = v.real * cfg.hidden_size * sizes.element -- rows of padding are not stored
    local table_bytes = weights
    if head and cfg.tie_word_embeddings then weights = 0 end -- the embedding's own rows
    if head then weights = weights + sizes:vector(cfg.hidden_size) end -- and the last norm
    part.ranks[rank + 1] = { rank = rank, input = tostring(plan.input), output = tostring(plan.output),
      rows = { v.offset, v.count }, real_rows = v.real, weight_bytes = weights, table_bytes = table_bytes }
    if rank == 0 then
      part.plan, part.axes, part.tied = tostring(plan), plan, head and cfg.tie_word_embeddings or nil
      local n = plan.output.world_size
      if head then add_move(part.moves, "all_gather of (value, id)", plan.output, (n - 1) * 8)
      else add_move(part.moves, "all_reduce of embeddings", plan.output, all_reduce(cfg.hidden_size * sizes.activation, n)) end
    end
  end
  return part
end

-- Sums over all layers of all parts.
local function totals(parts, num_ranks)
  local ranks = {}
  for r = 1, num_ranks do
    local total = { rank = r - 1, weight_bytes = 0, cache_bytes = 0, cache_bytes_allocated = 0, sent_bytes_per_token = 0 }
    for _, part in ipairs(parts) do
      local row = part.ranks[r]
      for _, key in ipairs { "weight_bytes", "cache_bytes", "cache_bytes_allocated" } do
        total[key] = total[key] + (row[key] or 0) * part.count
      end
      for _, move in ipairs(part.moves) do total.sent_bytes_per_token = total.sent_bytes_per_token + move.bytes * part.count end
    end
    ranks[r] = total
  end
  return ranks
end

-- Which ranks each move is among: the rows of its group.
local function add_rows(parts, policy)
  local rows = {}
  for _, group in ipairs(policy:groups()) do rows[group.type .. group.world_size] = group.rows end
  for _, part in ipairs(parts) do
    for _, move in ipairs(part.moves) do move.ranks = rows[move.group .. move.world_size] end
  end
end

--- See the top. details: context (tokens of each request), batch (requests), name (the model's).
function numbers.of(policy, cfg, details)
  local sizes = Sizes.of(cfg)
  local asked = { context = details.context or 0, batch = details.batch or 1 }
  sizes.ranks = details.ranks or policy.num_ranks
  local parts, name = { vocab_part(policy, cfg, sizes, "embedding") }, details.name or (cfg.architectures or {})[1]
  for _, kind in ipairs { { "attention", attention_part }, { "mlp", mlp_part }, { "experts", experts_part } } do
    for _, part in ipairs(layers.group(policy, cfg, kind[1], name)) do
      part.count = #part.layers
      kind[2](part, policy, cfg, sizes, asked)
      part.layer_ranges = layers.ranges(part.layers)
      parts[#parts + 1] = part
    end
  end
  parts[#parts + 1] = vocab_part(policy, cfg, sizes, "lm_head")
  add_rows(parts, policy)
  return {
    model = name, num_ranks = policy.num_ranks, policy = tostring(policy),
    block_size = policy.block_size, virtual_block = policy.block_size * policy.context_lcm,
    context = asked.context, batch = asked.batch, num_layers = cfg.num_hidden_layers,
    weight_dtype = cfg.quantization and "float8_e4m3" or sizes.weight, cache_dtype = sizes.compute,
    linear_dtype = cfg.quantization and "float8_e4m3" or sizes.weight,
    parts = parts, ranks = totals(parts, sizes.ranks),
  }
end

return numbers
