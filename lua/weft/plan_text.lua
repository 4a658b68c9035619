--- Explains a policy for a model: text for people, a plain table for --json.
local core = require "weft.core"
local numbers = require "weft.plan_numbers"
local terminal = require "weft.plan.terminal"

local plan_text = {}

--- "1.5 GB", in powers of ten.
function plan_text.bytes(n)
  if n < 1000 then return ("%d B"):format(n) end
  for _, unit in ipairs { "kB", "MB", "GB" } do
    n = n / 1000
    if n < 1000 then return ("%.3g %s"):format(n, unit) end
  end
  return ("%.4g TB"):format(n / 1000)
end

local bytes = plan_text.bytes

--- "0-7", "5", or "none" of { first, count }.
function plan_text.run(pair)
  if pair[2] == 0 then return "none" end
  if pair[2] == 1 then return tostring(pair[1]) end
  return ("%d-%d"):format(pair[1], pair[1] + pair[2] - 1)
end

local run = plan_text.run

local function place(axis) return axis:match "%S+$" end -- "attention_tensor 1/2" -> "1/2"

-- What a part's table shows: heading and text of each column.
local columns = {
  rank = { "rank", function(row) return tostring(row.rank) end },
  input = { "in", function(row) return place(row.input) end },
  output = { "out", function(row) return place(row.output) end },
  context = { "context", function(row) return place(row.context) end },
  q = { "q heads", function(row) return run(row.q_heads) end },
  kv = { "kv heads", function(row) return run(row.kv_heads) end },
  copies = { "kv copies", function(row) return tostring(row.kv_head_replicas) end },
  keeps = { "heads out", function(row) return run(row.output_heads) end },
  mlp_columns = { "columns", function(row) return run(row.columns) end },
  experts = { "experts", function(row) return run(row.experts) end },
  rows = { "rows", function(row) return run(row.rows) end },
  real = { "real", function(row) return tostring(row.real_rows) end },
  weights = { "weights", function(row) return bytes(row.weight_bytes) end },
  per_token = { "cache/token", function(row) return bytes(row.cache_bytes_per_token) end },
  cache = { "cache", function(row) return bytes(row.cache_bytes) end },
  sent = { "sent/token", function(row) return bytes(row.sent_bytes_per_token) end },
}
local shown = {
  embedding = { "rank", "input", "rows", "real", "weights" },
  attention = { "rank", "input", "context", "output", "q", "kv", "copies", "keeps", "weights", "per_token", "cache" },
  mlp = { "rank", "input", "output", "mlp_columns", "weights" },
  experts = { "rank", "input", "output", "experts", "mlp_columns", "weights" },
  lm_head = { "rank", "input", "rows", "real", "weights" },
  total = { "rank", "weights", "cache", "sent" },
}

-- Columns that say something of this part: copies where there are any.
local function columns_of(kind, rows)
  local list, copied = {}, false
  for _, row in ipairs(rows) do copied = copied or (row.kv_head_replicas or 1) > 1 end
  for _, key in ipairs(shown[kind]) do
    if key ~= "copies" or copied then list[#list + 1] = key end
  end
  return list
end

-- The rows' cells; ranks that follow one another and differ in nothing else are one row, "0-7".
local function cells_of(keys, rows)
  local list, last = {}, nil
  for _, row in ipairs(rows) do
    local cells = { first = row.rank, last = row.rank }
    for c, key in ipairs(keys) do cells[c] = columns[key][2](row) end
    cells.text = table.concat(cells, "\0", 2)
    if last and last.text == cells.text then
      last.last = row.rank
      last[1] = ("%d-%d"):format(last.first, last.last)
    else
      list[#list + 1], last = cells, cells
    end
  end
  return list
end

-- Columns padded to their widest cell.
local function table_lines(kind, rows, lines)
  local keys, widths = columns_of(kind, rows), {}
  local cells, heads = cells_of(keys, rows), {}
  for c, key in ipairs(keys) do heads[c] = columns[key][1] end
  table.insert(cells, 1, heads)
  for _, line in ipairs(cells) do
    for c, cell in ipairs(line) do widths[c] = math.max(widths[c] or 0, #cell) end
  end
  for _, line in ipairs(cells) do
    for c, cell in ipairs(line) do line[c] = (" "):rep(widths[c] - #cell) .. cell end
    lines[#lines + 1] = "  " .. table.concat(line, "  ")
  end
end

-- "0-7", "0 2 4 6" or "0 8 .. 56" of ranks in equal steps.
local function row_text(row)
  local first, step, last = row[1], #row > 1 and row[2] - row[1] or 1, row[#row]
  if step == 1 then return first == last and tostring(first) or ("%d-%d"):format(first, last) end
  return #row <= 4 and table.concat(row, " ") or ("%d %d .. %d"):format(first, first + step, last)
end

--- The rows of a move as text: all of them when they are few.
function plan_text.rows(ranks)
  local texts = {}
  for i = 1, math.min(#ranks, #ranks > 4 and 2 or 4) do texts[i] = row_text(ranks[i]) end
  if #ranks > 4 then texts[#texts + 1] = ".. " .. row_text(ranks[#ranks]) end
  return "ranks " .. table.concat(texts, ", "):gsub(", %.%.", " ..")
end

local function heading(part)
  local axes = part.axes
  local text = ("%s in %d -> %s out %d"):format(axes.input.group, axes.input.world_size, axes.output.group, axes.output.world_size)
  if axes.context.world_size > 1 then
    text = text .. (", context %d in strips of %d, %s"):format(axes.context.world_size, axes.interleave, axes.exchange)
  end
  if axes.expert.world_size > 1 then text = text .. (", expert %d"):format(axes.expert.world_size) end
  local where = part.layer_ranges and (", layer%s %s"):format(part.count > 1 and "s" or "", part.layer_ranges) or ""
  local window = (part.window or 0) > 0 and (", window %d"):format(part.window) or ""
  return ("%s%s: %s%s%s"):format(part.type, where, text, window, part.tied and ", tied to the embedding" or "")
end

local function part_lines(part, lines)
  lines[#lines + 1] = ""
  terminal.wrap(heading(part), terminal.width(), lines, "  ")
  table_lines(part.type, part.ranks, lines)
  if #part.moves == 0 then
    lines[#lines + 1] = "  nothing moves"
    return
  end
  for _, move in ipairs(part.moves) do
    terminal.wrap(("  each rank sends %s a token: %s over %s %d (%s)"):format(bytes(move.bytes), move.what, move.group, move.world_size,
      plan_text.rows(move.ranks)), terminal.width(), lines, "    ")
  end
end

--- Text: for each layer type the axes, who holds which heads, rows, columns and key/value heads,
-- bytes on each rank and what moves; per layer, then sums over the model.
function plan_text.explain(policy, cfg, details)
  local n = numbers.of(policy, cfg, details or {})
  local lines, width = {}, terminal.width()
  terminal.wrap(("%s on %d rank%s: %s"):format(n.model or "model", n.num_ranks, n.num_ranks == 1 and "" or "s", n.policy), width, lines, "  ")
  terminal.wrap(("weights %s, cache %s, blocks of %d tokens in the model; cache counted for %d request%s of %d tokens"):format(
    n.weight_dtype, n.cache_dtype, n.virtual_block, n.batch, n.batch == 1 and "" or "s", n.context), width, lines, "  ")
  for _, part in ipairs(n.parts) do part_lines(part, lines) end
  lines[#lines + 1] = ""
  lines[#lines + 1] = ("%s, embedding and head (predicted from the plan, not measured):"):format(
    n.num_layers == 1 and "the layer" or ("all %d layers"):format(n.num_layers))
  table_lines("total", n.ranks, lines)
  return table.concat(lines, "\n") .. "\n"
end

--- The same as plain values, for --json.
function plan_text.table(policy, cfg, details)
  local n = numbers.of(policy, cfg, details or {})
  n.kv_bytes_per_rank = {}
  for r, rank in ipairs(n.ranks) do n.kv_bytes_per_rank[r] = rank.cache_bytes end
  for _, part in ipairs(n.parts) do
    part.axes = nil
    core.json.array(part.moves)
  end
  return n
end

return plan_text
