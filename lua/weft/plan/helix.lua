--- The roofline of the Helix paper (arXiv 2507.07120) and a search with it: attention cut over fewer
-- heads with the sequence shared, against one tensor size for the whole layer. Pure arithmetic.
--
-- A shape: { layers, hidden = H, q_heads = Q, kv_heads = K, kv_size = Hsz (of K and V each), head_size (of q),
--   dense = F, or experts = { total, chosen, width, shared (width) }, attention_weights = { whole, cut } }
-- A plan: { gpus, tpa, kvp, tpf }; times are seconds of one layer and one decode step of B requests.
local helix = {}

helix.llama = { name = "Llama-405B", layers = 126, hidden = 16384, q_heads = 128, kv_heads = 8, kv_size = 128, head_size = 128, dense = 65536 }

-- Latent attention: one KV head for all, a latent of 576 read once for K and V. Weights in elements:
-- down-projections are held whole (7168 x 1536 and 7168 x 576), what is by head is cut.
helix.deepseek = { name = "DeepSeek-R1", layers = 61, hidden = 7168, q_heads = 128, kv_heads = 1, kv_size = 288, head_size = 512,
  experts = { total = 256, chosen = 8, width = 2048, shared = 2048 },
  attention_weights = { whole = 7168 * (1536 + 576), cut = 1536 * 128 * 192 + 512 * 128 * 256, out = 128 * 128 * 7168 } }

--- 4-bit weights and cache on one GPU of a GB200 NVL72. Link as in weft.machines; small sums take what they take
-- on 2 to 8 H200, and no longer on more GPUs, whose switches add up on the way.
helix.gpu = { bandwidth = 8e12, bytes = 0.5, memory = 186e9, link = 5.6e11, exchange_latency = 7.5e-6,
  reduce_latency = function(n) return n == 1 and 0 or 2.5e-6 + 0.17e-6 * (math.min(n, 8) - 2) end }

--- Reading the cache of B requests of S tokens.
function helix.kv_time(shape, gpu, plan, batch, tokens)
  return batch * 2 * math.ceil(shape.kv_heads / plan.tpa) * shape.kv_size * tokens / plan.kvp * gpu.bytes / gpu.bandwidth
end

-- Elements of attention's and of the feed-forward's weights that a GPU reads.
local function attention_elements(shape, plan)
  local own = shape.attention_weights
  if own then return own.whole + own.cut / plan.tpa + own.out / (plan.tpa * plan.kvp) end
  return 2 * shape.hidden * shape.q_heads / plan.tpa * shape.head_size
    + 2 * shape.hidden * math.ceil(shape.kv_heads / plan.tpa) * shape.kv_size
end

local function ffn_elements(shape, plan, batch)
  local e = shape.experts
  if not e then return 3 * shape.hidden * shape.dense / plan.tpf end
  local read = e.total * (1 - (1 - e.chosen / e.total) ^ batch)
  return 3 * shape.hidden * (read * e.width + e.shared) / plan.tpf
end

--- Reading the weights of one layer.
function helix.weight_time(shape, gpu, plan, batch)
  return (attention_elements(shape, plan) + ffn_elements(shape, plan, batch)) * gpu.bytes / gpu.bandwidth
end

--- B requests one after another: compute and exchange of each, or the exchange of one under the
-- compute of the next.
function helix.without_overlap(requests, compute, exchange) return requests * (compute + exchange) end
function helix.with_overlap(requests, compute, exchange)
  return requests * math.max(compute, exchange) + math.min(compute, exchange)
end

--- Seconds of a whole step: reading, two sums over the layer's GPUs, and the exchange, of which only
-- what is left after the overlap with attention shows.
function helix.step_time(shape, gpu, plan, batch, tokens)
  local kv = helix.kv_time(shape, gpu, plan, batch, tokens)
  local layer = kv + helix.weight_time(shape, gpu, plan, batch)
  local vector = batch * shape.hidden * 2
  layer = layer + 2 * gpu.reduce_latency(plan.tpf) + (plan.tpf > 1 and 4 * vector / gpu.link or 0)
  if plan.kvp > 1 then
    local sent = batch * shape.q_heads / plan.tpa * shape.head_size * 2 * (plan.kvp - 1) / plan.kvp / gpu.link
    layer = layer + gpu.exchange_latency + (helix.with_overlap(batch, kv / batch, sent / batch) - kv)
  end
  return layer * shape.layers
end

--- Requests whose cache a GPU has room for beside its weights.
function helix.largest_batch(shape, gpu, plan, tokens)
  local e = shape.experts
  local ffn = e and 3 * shape.hidden * (e.total * e.width + e.shared) / plan.tpf or ffn_elements(shape, plan, 1)
  local weights = (attention_elements(shape, plan) + ffn) * gpu.bytes * shape.layers
  local cache = 2 * math.ceil(shape.kv_heads / plan.tpa) * shape.kv_size * tokens / plan.kvp * gpu.bytes * shape.layers
  return math.max(0, math.floor((gpu.memory - weights) / cache))
end

--- Plans on 1, 2, 4, ... max_gpus. "one": one tensor size for the layer, caches copied past K heads. "earlier":
-- these, and the sequence shared while the feed-forward stays on the tensor size of attention (as Medha does).
-- "helix": attention over at most K heads, the sequence over the rest, the feed-forward over all.
function helix.plans(shape, family, max_gpus)
  local list, gpus = {}, 1
  while gpus <= max_gpus do
    local tpa = family == "one" and gpus or 1
    while tpa <= (family == "helix" and math.min(gpus, shape.kv_heads) or gpus) do
      list[#list + 1] = { gpus = gpus, tpa = tpa, kvp = gpus / tpa, tpf = family == "helix" and gpus or tpa }
      tpa = tpa * 2
    end
    gpus = gpus * 2
  end
  return list
end

--- Points { plan, batch, seconds, user, gpu } of a family for batches 1, 2, 4, ... that fit.
function helix.points(shape, gpu, family, max_gpus, tokens)
  local points = {}
  for _, plan in ipairs(helix.plans(shape, family, max_gpus)) do
    local most, batch = helix.largest_batch(shape, gpu, plan, tokens), 1
    while batch <= most do
      local seconds = helix.step_time(shape, gpu, plan, batch, tokens)
      points[#points + 1] = { plan = plan, batch = batch, seconds = seconds, user = 1 / seconds, gpu = batch / seconds / plan.gpus }
      batch = batch * 2
    end
  end
  return points
end

-- The largest batch among points on as many GPUs and no slower than p, as a point.
local function largest_within(points, p)
  local best
  for _, q in ipairs(points) do
    if q.plan.gpus == p.plan.gpus and q.seconds <= p.seconds * (1 + 1e-9) and (not best or q.batch > best.batch) then best = q end
  end
  return best
end

local function fastest(points)
  local best = points[1]
  for _, p in ipairs(points) do best = p.user > best.user and p or best end
  return best
end

--- Points of `other` over points of `one`: { interactivity = ratio of the best tokens/s a user, fastest_one,
-- fastest_other = these points; batch = the largest ratio of batches on as many GPUs within as long a step,
-- within = that step, batch_one, batch_other = these points }.
function helix.compare(one, other)
  local a, b = fastest(one), fastest(other)
  local result = { interactivity = b.user / a.user, fastest_one = a, fastest_other = b, batch = 0 }
  for _, p in ipairs(one) do
    local mine, theirs = largest_within(one, p), largest_within(other, p)
    if theirs and theirs.batch / mine.batch > result.batch then
      result.batch, result.within, result.batch_one, result.batch_other = theirs.batch / mine.batch, p.seconds, mine, theirs
    end
  end
  return result
end

return helix
