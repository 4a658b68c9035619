--- spec/support/hetero.lua - hetero attention on every rank of a world against plain float64 Lua.
--
-- A case names sizes, a plan and a scenario (steps of a ragged batch). Values of q, k and v are a
-- function of (request, position, head, element), so each rank makes its own shard and checks the
-- heads that it gives out against a reference over the whole sequence.
local core = require "weft.core"

local hetero = {}

--- A number in [-1, 1] for a place; the same on every rank.
local function value(kind, request, position, head, i)
  local h = kind * 7919 + request * 104729 + position * 1299709 + head * 15485863 + i * 32452843
  h = h % 2147483647
  for _ = 1, 3 do h = (h * 16807 + 12345) % 2147483647 end
  return h / 1073741823.5 - 1
end

--- The float64 result for one query and head: a list of v_head_size numbers.
function hetero.reference(case, request, position, head)
  local d, dv = case.head_size, case.v_head_size or case.head_size
  local kv_head = math.floor(head / (case.heads / case.kv_heads))
  local window, scores, top, sum = case.window or 0, {}, -math.huge, 0
  local first = window > 0 and math.max(0, position - window + 1) or 0
  local last = case.causal == false and case.length - 1 or position
  for j = first, last do
    local s = 0
    for i = 0, d - 1 do s = s + value(1, request, position, head, i) * value(2, request, j, kv_head, i) end
    scores[j] = s * (case.gain or 1) / math.sqrt(d)
    top = math.max(top, scores[j])
  end
  local out = {}
  for i = 1, dv do out[i] = 0 end
  for j = first, last do
    local p = math.exp(scores[j] - top)
    sum = sum + p
    for i = 1, dv do out[i] = out[i] + p * value(3, request, j, kv_head, i - 1) end
  end
  for i = 1, dv do out[i] = out[i] / sum end
  return out
end

--- Where a rank stands: plan, head ranges.
function hetero.place(case, rank)
  local tp, tpa = case.tp, case.tpa or case.tp
  local context = case.dcp or tp / tpa
  local resharding = tpa ~= tp
  local tensor = core.axis(tp, rank, "tensor")
  local input = resharding and core.axis(tpa, math.floor(rank / context), "attention_tensor") or tensor
  local kv_world = math.max(1, input.world_size / case.kv_heads)
  return {
    num_heads = case.heads / input.world_size, first_head = input.rank * case.heads / input.world_size,
    num_kv_heads = math.max(1, case.kv_heads / input.world_size),
    first_kv_head = math.floor(input.rank / kv_world) * math.max(1, case.kv_heads / input.world_size),
    context = context,
    plan = core.plan {
      input = input, output = tensor, context = core.axis(context, rank % context, "context"),
      interleave = case.interleave or 1, exchange = case.exchange or "ag_rs",
    },
  }
end

-- Every context group of the world, cut in runs of `size`. Collective.
local function create_context_groups(tp, size)
  if size == 1 then return end
  local rows = {}
  for first = 0, tp - 1, size do
    rows[#rows + 1] = {}
    for r = first, first + size - 1 do table.insert(rows[#rows], r) end
  end
  core.groups.create_all { { type = "context", world_size = size, rows = rows } }
end

-- A hetero attention of this rank, its pages bound and full of NaN: whatever reads a slot that was
-- not written, or a masked one, shows.
local function new_layer(case, place)
  local layer = core.hetero_attention {
    num_heads = place.num_heads, num_kv_heads = place.num_kv_heads, head_size = case.head_size, v_head_size = case.v_head_size,
    total_num_heads = case.heads, total_num_kv_heads = case.kv_heads, parallel_plan = place.plan,
    sliding_window = case.window, kv_dtype = case.dtype, scale = (case.gain or 1) / math.sqrt(case.head_size),
  }
  layer:bind_cache(case.num_blocks, case.block_tokens)
  local k, v = layer:cache()
  k:fill(0 / 0)
  v:fill(0 / 0)
  return layer
end

--- q, k, v of a step as views of one packed tensor, for the heads of a place.
function hetero.inputs(case, place, entries)
  local d, dv, values = case.head_size, case.v_head_size or case.head_size, {}
  local parts = {
    { 1, place.first_head, place.num_heads, d }, { 2, place.first_kv_head, place.num_kv_heads, d },
    { 3, place.first_kv_head, place.num_kv_heads, dv },
  }
  local tokens = 0
  for _, entry in ipairs(entries) do
    for position = entry.start, entry.start + entry.count - 1 do
      tokens = tokens + 1
      for _, part in ipairs(parts) do
        for head = part[2], part[2] + part[3] - 1 do
          for i = 0, part[4] - 1 do values[#values + 1] = value(part[1], entry.request, position, head, i) end
        end
      end
    end
  end
  local padding = case.padding or 0
  local width = #values / tokens
  for _ = 1, padding * width do values[#values + 1] = 0 / 0 end -- padding rows may hold anything
  local packed = core.tensor({ tokens + padding, width }, case.dtype or "float32", values)
  local q, k = place.num_heads * d, place.num_kv_heads * d
  return packed:narrow(1, 0, q), packed:narrow(1, q, k), packed:narrow(1, q + k, width - q - k)
end

--- Builds the record of a step: entries {request, start, count}.
function hetero.build(step, case, entries)
  local requests, tokens = {}, 0
  for i, entry in ipairs(entries) do
    local ids = {}
    for n = 1, entry.count do ids[n] = n end
    tokens = tokens + entry.count
    local blocks = case.blocks and { unpack(case.blocks[entry.request]) }
    if case.forget_behind then -- pages that this step's window cannot reach have been given back
      for b = 1, math.floor((entry.start - case.window + 1) / case.block_tokens) do blocks[b] = false end
    end
    requests[i] = { ids = ids, start = entry.start, blocks = blocks, sample = true }
  end
  return step:build { block_tokens = case.blocks and case.block_tokens, requests = requests, pad_to = tokens + (case.padding or 0) }
end

--- The largest difference of an output from the reference. first_head: absolute.
function hetero.difference(case, entries, out, first_head, num_heads)
  local dv, got, worst, t = case.v_head_size or case.head_size, out:totable(), 0, 0
  for _, entry in ipairs(entries) do
    for position = entry.start, entry.start + entry.count - 1 do
      for head = 0, num_heads - 1 do
        local want = hetero.reference(case, entry.request, position, first_head + head)
        for i = 1, dv do
          local diff = math.abs(got[(t * num_heads + head) * dv + i] - want[i])
          if not (diff <= worst) then worst = diff end -- a NaN stays
        end
      end
      t = t + 1
    end
  end
  for i = t * num_heads * dv + 1, #got do
    if got[i] ~= 0 then return 0 / 0 end -- padding rows leave as zeros
  end
  return worst
end

--- What a rank does (called through core.spawn): all steps of a case, over all its layers' plans.
-- Returns the worst difference and what specs ask about.
function hetero.rank_main(case)
  local rank = core.rank().rank
  local variants, made = case.layers or { {} }, {}
  local layers, worst, warm = {}, 0, 0
  for i, variant in ipairs(variants) do
    setmetatable(variant, { __index = case })
    local place = hetero.place(variant, rank)
    if not made[place.context] then
      create_context_groups(case.tp, place.context)
      made[place.context] = true
    end
    layers[i] = { case = variant, place = place, layer = new_layer(variant, place) }
  end
  local step = core.step()
  for n, entries in ipairs(case.steps) do
    core.begin_step()
    if rank == 0 then
      hetero.build(step, case, entries):publish()
    else
      core.step_receive(step)
    end
    for _, l in ipairs(layers) do
      core.arena.next_layer()
      local q, k, v = hetero.inputs(l.case, l.place, entries)
      local out = l.layer:forward(q, k, v, step)
      local diff = hetero.difference(l.case, entries, out, l.layer.output_first_head, l.layer.output_num_heads)
      if not (diff <= worst) then worst = diff end
    end
    if n == case.warm_step then warm = core.memory().allocations end
  end
  local first = layers[1].layer
  local result = {
    worst = worst, output_first_head = first.output_first_head, output_num_heads = first.output_num_heads,
    num_heads = first.num_heads, first_head = layers[1].place.first_head, num_kv_heads = first.num_kv_heads,
    first_kv_head = layers[1].place.first_kv_head, page_tokens = first.page_tokens, cache_bytes = first.cache_bytes,
    traffic = first:traffic(), allocations = core.memory().allocations - warm,
  }
  core.groups.close()
  return result
end

--- Runs a case on case.tp ranks; returns the results of all ranks, from index 1.
function hetero.run(case)
  return core.spawn { ranks = case.tp, fn = { module = "spec.support.hetero", ["function"] = "rank_main" }, args = { case } }
end

--- Blocks in a scattered order for requests of the given lengths, and how many the cache needs. Block 0
-- stays unused: it is what a record has in the place of a block that was given back.
function hetero.blocks(lengths, block_tokens)
  local total, rows, n = 0, {}, 0
  for _, length in ipairs(lengths) do total = total + math.ceil(length / block_tokens) end
  local stride = total % 7 == 0 and 5 or 7 -- without a common divisor, so that every id comes once
  if total % 35 == 0 then stride = 1 end
  for r, length in ipairs(lengths) do
    rows[r] = {}
    for b = 1, math.ceil(length / block_tokens) do
      rows[r][b] = 1 + (n * stride + 3) % total
      n = n + 1
    end
  end
  return rows, total + 1
end

--- A life of four requests: prompts at once, in chunks, of one token and of a whole block, joining one
-- after another and decoding side by side past the end of their blocks.
function hetero.mixed_steps(block_tokens)
  local prompts, chunks = { 10, 2 * block_tokens + 3, 1, block_tokens }, { 10, 7, 1, block_tokens }
  local joins, at, steps = { 1, 2, 3, 3 }, { 0, 0, 0, 0 }, {}
  local n = 0
  repeat
    n = n + 1
    local entries = {}
    for r = 1, 4 do
      if n >= joins[r] then
        local count = math.max(1, math.min(chunks[r], prompts[r] - at[r]))
        entries[#entries + 1] = { request = r, start = at[r], count = count }
        at[r] = at[r] + count
      end
    end
    steps[n] = entries
  until at[3] > block_tokens + 1 and at[2] > prompts[2] + 1
  return steps, at
end

--- The sizes of a case filled in: page of block_size tokens per rank, blocks, steps.
function hetero.case(t)
  local context = t.dcp or t.tp / (t.tpa or t.tp)
  t.block_tokens = t.block_tokens or (t.block_size or 4) * context
  local lengths
  if not t.steps then
    t.steps, lengths = hetero.mixed_steps(t.block_tokens)
  else
    lengths = {}
    for _, entries in ipairs(t.steps) do
      for _, e in ipairs(entries) do lengths[e.request] = math.max(lengths[e.request] or 0, e.start + e.count) end
    end
  end
  t.blocks, t.num_blocks = hetero.blocks(lengths, t.block_tokens)
  return t
end

return hetero
