-- The prices of single operations on H200 beside published ones: weft lua scripts/second_opinion.lua FOLDER
--
-- FOLDER holds tables of NVIDIA AIConfigurator for H200 (gemm.tsv, attention_decode.tsv, all_reduce_small.tsv;
-- times in ms, one line an operation and serving system). The best of the systems counts. They are replays of
-- small weights back to back: what a step adds is in our figures alone.
local price = require "weft.plan.price"
local machine = require("weft.machines").get "h200"
local folder = arg[1]
if not folder then
  io.stderr:write "weft lua scripts/second_opinion.lua FOLDER (with gemm.tsv, attention_decode.tsv, all_reduce_small.tsv)\n"
  return 2
end

-- Rows of a table as { column = text }.
local function rows(name)
  local file, message = io.open(("%s/%s.tsv"):format(folder, name))
  if not file then error(message, 0) end
  local names
  return function()
    for line in file:lines() do
      local cells = {}
      for cell in line:gmatch "[^\t]+" do cells[#cells + 1] = cell end
      if names then
        local row = {}
        for i, column in ipairs(names) do row[column] = cells[i] end
        return row
      end
      names = cells
    end
  end
end

-- The best published time of each operation, and ours: key(row) -> name or nil, ours(row) -> seconds.
local function compare(title, name, key, ours)
  local best, predicted, ratios = {}, {}, {}
  for row in rows(name) do
    local operation = key(row)
    if operation then
      best[operation] = math.min(best[operation] or math.huge, tonumber(row.latency) / 1e3)
      predicted[operation] = ours(row)
    end
  end
  for operation, seconds in pairs(best) do ratios[#ratios + 1] = predicted[operation] / seconds end
  table.sort(ratios)
  if #ratios == 0 then return end
  local function at(share) return ratios[math.max(1, math.ceil(share * #ratios))] end
  print(("%-44s %5d %10.2f %10.2f %10.2f"):format(title, #ratios, at(0.1), at(0.5), at(0.9)))
end

print(("%-44s %5s %10s %10s %10s"):format("predicted / published", "rows", "10%", "median", "90%"))
for _, dtype in ipairs { { "bfloat16", "bfloat16", 2 }, { "fp8_block", "float8_e4m3", 1 } } do
  compare("product of one token, " .. dtype[1], "gemm", function(row)
    return row.gemm_dtype == dtype[1] and row.m == "1" and row.n .. "x" .. row.k
  end, function(row) return price.step(machine, 1):product(row.n * row.k * dtype[3], dtype[2]) end)
end
compare("decode attention, 1 to 32 requests, 1k to 128k", "attention_decode", function(row)
  local batch, context = tonumber(row.batch_size), tonumber(row.context)
  return row.kv_cache_dtype == "bfloat16" and batch <= 32 and context >= 1024 and context <= 131072
    and table.concat({ row.num_heads, row.num_key_value_heads, batch, context }, " ")
end, function(row)
  local tokens = row.batch_size * row.context
  return price.step(machine, 1):attention(tokens * row.num_key_value_heads * 2 * 128 * 2, tokens * row.num_heads * 4 * 128, "bfloat16")
end)
for _, ranks in ipairs { 2, 4, 8 } do
  compare(("all_reduce of 1 to 64 KB on %d GPUs"):format(ranks), "all_reduce_small", function(row)
    local bytes = 2 * row.message_size
    return tonumber(row.num_gpus) == ranks and bytes >= 1024 and bytes <= 65536 and row.message_size
  end, function(row)
    return price.step(machine, 1):collective { op = "all_reduce", world_size = ranks, bytes = 2 * 2 * row.message_size * (ranks - 1) / ranks }
  end)
end
