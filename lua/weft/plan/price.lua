--- What a decode step of a plan should cost on a machine: a roofline and a latency for each operation.
--
-- price.of(n, cfg, machine, batch) -> { label = "predicted", machine, batch, context, ms, parts = { { part, ms }, ... },
--   tok_per_s_user, tok_per_s_gpu, memory = { capacity_bytes, reserve_bytes, weight_bytes, cache_bytes, free_bytes,
--   fits, largest_batch } }
-- n: weft.plan_numbers of the policy for one request (batch 1); machine: weft.machines. Rank 0 is priced:
-- parts are equal, and its share of the sequence is the longest. A step decodes one token of each request.
local policies = require "weft.policy"

local price = {}

local order = { "embedding", "qkv", "attention", "exchange", "o_proj", "mlp", "experts", "lm_head", "collectives", "host" }
local element_size = { float32 = 4, bfloat16 = 2, float16 = 2, float8_e4m3 = 1 }

local Step = {}
Step.__index = Step

--- The roofline: reading at a share of the bandwidth, or arithmetic, whichever takes longer.
function Step:roof(bytes, share, operations, dtype)
  return math.max(bytes / (self.bandwidth * share), operations / (self.machine.flops[dtype] / self.sharers))
end

--- A matrix product: its weights are read once, for all requests.
function Step:product(bytes, dtype)
  local machine = self.machine
  return self:roof(bytes, machine.share.product[dtype], 2 * bytes / element_size[dtype] * self.batch, dtype) + machine.latency.product
end

--- Attention over the cache: it is read once.
function Step:attention(bytes, operations, dtype)
  return self:roof(bytes, self.machine.share.attention, operations, dtype) + self.machine.latency.attention
end

function Step:kernels(count) return count * self.machine.latency.kernel end

-- Bytes that a rank waits for in a collective: of a sum all that the others have (2 S (n - 1) / n bytes are counted).
local function received(move, batch)
  return (move.op == "all_reduce" and move.bytes * move.world_size / 2 or move.bytes) * batch
end

--- One collective: a move of plan_numbers, whose bytes are for each token.
function Step:collective(move)
  local machine, n = self.machine, move.world_size
  local small = machine.collective[move.op]
  local inner = math.min(n, machine.domain)
  local seconds = small[1] + small[2] * (inner - 2)
  if received(move, self.batch) > machine.large.bytes then seconds = seconds + machine.large.latency end
  local bytes = move.bytes * self.batch
  if n <= machine.domain then return seconds + bytes / machine.link end
  return seconds + machine.outer.latency + bytes / machine.outer.link
end

function Step:add(part, seconds) self.seconds[part] = (self.seconds[part] or 0) + seconds end

-- The exchange of partial results in one kernel, with the merge; nil where the machine or its size asks for more.
function Step:exchange(part)
  local machine, bytes = self.machine, 0
  for _, move in ipairs(part.moves) do
    if move.group == "context" and move.what ~= "all_gather of queries" then bytes = bytes + received(move, self.batch) end
  end
  if machine.exchange == 0 or bytes > machine.large.bytes or part.axes.context.world_size > machine.domain then return nil end
  return machine.exchange + bytes / machine.link
end

function Step:moves(part, count)
  local context = part.type == "attention" and part.axes.context.world_size > 1
  local whole = context and self:exchange(part)
  if context then self:add("exchange", count * (whole or self:kernels(2))) end -- packing and merging
  for _, move in ipairs(part.moves) do
    local partial = move.group == "context" and move.what ~= "all_gather of queries"
    if not (partial and whole) then
      self:add(move.group == "context" and "exchange" or "collectives", count * self:collective(move))
    end
  end
end

local function attention(self, part)
  local row, n, cfg = part.ranks[1], self.n, self.cfg
  local count = part.count
  local context = part.axes.context.world_size
  self:add("qkv", count * (self:product(row.qkv_bytes, n.linear_dtype) + self:kernels(cfg.use_qk_norm and 4 or 3)))
  -- Plain context ranks work on the query heads of their whole group.
  local heads = row.q_heads[2] * (part.axes.reshards_output and 1 or context)
  local bytes = row.tokens * row.kv_heads[2] * 2 * cfg.head_dim * element_size[n.cache_dtype] * self.batch
  local operations = row.tokens * heads * 4 * cfg.head_dim * self.batch
  self:add("attention", count * self:attention(bytes, operations, n.cache_dtype))
  self:add("o_proj", count * self:product(row.o_proj_bytes, n.linear_dtype))
end

local function mlp(self, part)
  local row, dtype = part.ranks[1], self.n.linear_dtype
  self:add("mlp", part.count * (self:product(row.gate_up_bytes, dtype) + self:product(row.down_bytes, dtype) + self:kernels(2)))
end

--- How much more than its even share the busiest of `groups` gets of `draws` independent draws: the
-- largest of as many normal variables.
local function busiest(draws, groups)
  if groups == 1 then return 1 end
  local mean = draws / groups
  local spread = math.sqrt(draws / groups * (1 - 1 / groups))
  return math.min(draws, mean + spread * math.max(0.5, math.sqrt(2 * math.log(groups)) - 0.6)) / mean
end

local function experts(self, part)
  local row, n, cfg = part.ranks[1], self.n, self.cfg
  local total = policies.experts_of(cfg)
  local chosen = cfg.num_experts_per_tok or 1
  local draws = self.batch * chosen
  local load = busiest(draws, part.axes.expert.world_size)
  local held = row.experts[2]
  local read = math.min(held, held * (1 - (1 - chosen / total) ^ self.batch) * load)
  local operations = 2 * row.expert_bytes / element_size[n.linear_dtype] * draws / part.axes.expert.world_size * load
  local seconds = self:roof(read * row.expert_bytes, self.machine.share.experts, operations, n.linear_dtype) + self.machine.latency.experts
  self:add("experts", part.count * (seconds + self:product(row.router_bytes, "float32") + self:kernels(2)))
end

local function embedding(self, part)
  local bytes = self.batch * self.cfg.hidden_size * element_size[self.n.cache_dtype]
  self:add("embedding", bytes / self.bandwidth + self:kernels(1))
end

local function lm_head(self, part)
  self:add("lm_head", self:product(part.ranks[1].table_bytes, self.n.cache_dtype) + self:kernels(2))
end

local handlers = { attention = attention, mlp = mlp, experts = experts, embedding = embedding, lm_head = lm_head }

local function memory_of(n, machine, batch, sharers)
  local total = n.ranks[1]
  local capacity, reserve = machine.memory / sharers, machine.reserve / sharers
  local room = capacity - reserve - total.weight_bytes
  local largest = total.cache_bytes_allocated > 0 and math.max(0, math.floor(room / total.cache_bytes_allocated)) or nil
  local cache = total.cache_bytes_allocated * batch
  return {
    capacity_bytes = capacity, reserve_bytes = reserve, weight_bytes = total.weight_bytes, cache_bytes = cache,
    free_bytes = room - cache, fits = room - cache >= 0, largest_batch = largest,
  }
end

--- A step of `batch` requests to be priced, operation by operation: step:product(bytes, dtype), step:attention(bytes,
-- operations, dtype), step:collective(move) in seconds. num_ranks: those that share the machine, where it is shared.
function price.step(machine, batch, num_ranks)
  local sharers = machine.shared and num_ranks or 1
  return setmetatable({ machine = machine, batch = batch, sharers = sharers, bandwidth = machine.bandwidth / sharers,
    seconds = { host = machine.latency.step } }, Step)
end

function price.of(n, cfg, machine, batch)
  assert(n.batch == 1, "price.of wants the numbers of one request")
  local self = price.step(machine, batch, n.num_ranks)
  self.n, self.cfg = n, cfg
  for _, part in ipairs(n.parts) do
    handlers[part.type](self, part)
    self:moves(part, part.count)
  end
  local parts, total = {}, 0
  for _, name in ipairs(order) do
    local seconds = self.seconds[name]
    if seconds then
      parts[#parts + 1] = { part = name, ms = seconds * 1000 }
      total = total + seconds
    end
  end
  return {
    label = "predicted", machine = machine.name, machine_filled = machine.filled, batch = batch, context = n.context, ms = total * 1000, parts = parts,
    tok_per_s_user = 1 / total, tok_per_s_gpu = batch / total / n.num_ranks, memory = memory_of(n, machine, batch, self.sharers),
  }
end

return price
