-- The figures of the Helix paper (arXiv 2507.07120) from its roofline: weft lua scripts/helix.lua
local helix = require "weft.plan.helix"
if arg[1] then
  io.stderr:write(("helix.lua takes no arguments, got '%s'\n"):format(arg[1]))
  return 2
end
local tokens, us = 1e6, 1e6
local shape, gpu = helix.llama, helix.gpu

local function heading(text) print(("\n%s"):format(text)) end

local function row(name, values, format)
  local cells = {}
  for i, value in ipairs(values) do cells[i] = ("%9s"):format((format or "%.1f"):format(value)) end
  print(("  %-26s%s"):format(name, table.concat(cells)))
end

print("Roofline of one layer: batch 8, 128 query and 8 KV heads of 128, H 16384, F 65536, 4 bit, 8 TB/s, S = 1,000,000")

heading "KV cache, one tensor size for the layer: microseconds stop falling at 8 KV heads"
local sizes, kv, weights = { 1, 2, 4, 8, 16, 32, 64 }, {}, {}
for i, n in ipairs(sizes) do
  local plan = { tpa = n, kvp = 1, tpf = n }
  kv[i], weights[i] = helix.kv_time(shape, gpu, plan, 8, tokens) * us, helix.weight_time(shape, gpu, plan, 8) * us
end
row("TP", sizes, "%d")
row("KV us", kv)
row("weights us", weights)

heading "KV cache, attention over 8 heads and the sequence over the rest: it keeps falling"
local parts, shared = { 1, 2, 4, 8, 16 }, {}
for i, kvp in ipairs(parts) do shared[i] = helix.kv_time(shape, gpu, { tpa = 8, kvp = kvp }, 8, tokens) * us end
row("KVP, at TPA 8", parts, "%d")
row("KV us", shared)

heading "8 requests of 2 units of attention and 1.2 of exchange"
print(("  one after another %.1f, the exchange under the next request's attention %.1f"):format(
  helix.without_overlap(8, 2, 1.2), helix.with_overlap(8, 2, 1.2)))

local function describe(p)
  return ("%d GPUs, TPA %d, KVP %d, batch %d: %.2f ms"):format(p.plan.gpus, p.plan.tpa, p.plan.kvp, p.batch, p.seconds * 1e3)
end

-- The best of both families on the same GPUs, at each batch that both can hold.
local function where_it_wins(model)
  heading(("%s at 1,000,000 tokens, 4 bit: ms a step, one tensor size / attention at fewer heads (* wins)"):format(model.name))
  local batches, gpus = { 1, 2, 4, 8, 16, 32, 64 }, { 1, 2, 4, 8, 16, 32, 64 }
  local best = {}
  for _, family in ipairs { "one", "helix" } do
    for _, p in ipairs(helix.points(model, gpu, family, 64, tokens)) do
      local key = family .. p.plan.gpus .. "," .. p.batch
      if not best[key] or p.seconds < best[key].seconds then best[key] = p end
    end
  end
  local head = {}
  for i, b in ipairs(batches) do head[i] = ("%16s"):format("batch " .. b) end
  print("  GPUs" .. table.concat(head))
  for _, n in ipairs(gpus) do
    local cells = {}
    for i, b in ipairs(batches) do
      local one, other = best["one" .. n .. "," .. b], best["helix" .. n .. "," .. b]
      local wins = other and (not one or other.seconds < one.seconds * 0.999)
      cells[i] = ("%16s"):format(not one and not other and "-"
        or ("%s/%s%s"):format(one and ("%.1f"):format(one.seconds * 1e3) or "full", other and ("%.1f"):format(other.seconds * 1e3) or "full", wins and "*" or " "))
    end
    print(("  %4d%s"):format(n, table.concat(cells)))
  end
end

local function ratios(model, paper_interactivity, paper_batch)
  local ours = helix.points(model, gpu, "helix", 64, tokens)
  heading(("%s: attention at fewer heads, up to 64 GPUs, over              one tensor size   any earlier plan   the paper"):format(model.name))
  local one = helix.compare(helix.points(model, gpu, "one", 64, tokens), ours)
  local all = helix.compare(helix.points(model, gpu, "earlier", 64, tokens), ours)
  print(("  best tokens/s a user, times                         %24.2f %18.2f %11.4g"):format(one.interactivity, all.interactivity, paper_interactivity))
  print(("  batch on as many GPUs within as long a step, times  %24.4g %18.4g %11.4g"):format(one.batch, all.batch, paper_batch))
  print(("    fastest:  %s | %s | %s"):format(describe(one.fastest_one), describe(all.fastest_one), describe(one.fastest_other)))
  print(("    batches:  within %.2f ms: %s | %s"):format(one.within * 1e3, describe(one.batch_one), describe(one.batch_other)))
end

where_it_wins(helix.llama)
ratios(helix.llama, 1.13, 4)
where_it_wins(helix.deepseek)
ratios(helix.deepseek, 1.5, 32)
print [[

The tables are arithmetic; the ratios are predictions of this roofline with latencies of collectives. The paper's
come from a simulator. What decides them:
* Speed of one user at batch 1 is all latency: where a small sum takes longer on more GPUs (0.17 us each, as between
  2 and 8 H200), Llama's ratio is 1.04; where switches add up, as here, 1.12; without any latency 2.05.
* Batches are compared on the same GPUs. Over all numbers of GPUs, 64 against 8 would win twice as much.
* Earlier plans that share the sequence, with the feed-forward on few GPUs, leave DeepSeek-R1 less to gain than one
  tensor size does; the paper's 1.5 lies between. It also weighs expert parallelism and data-parallel attention, whose
  exchange and uneven load this roofline does not have.]]
