--- What a drawing of a plan shows, before anyone decides on characters or pixels.
--
-- picture.of(numbers) -> { title, subtitle, panels = { panel, ... }, kinds = { kind, ... } }
-- panel = { title, notes = { text, ... }, x_label, y_label (or nil), columns, rows, cells = { cell, ... }, moves = { text, ... } }
--   cells in reading order, rows * columns of them; columns are the ranks that cut heads or columns,
--   rows those that share a sequence, experts or hold copies. A table taller than wide is
--   turned.
-- cell = { rank, lines = { text, ... }, strip = text or nil, bars = { bar, ... } }   strip: which of the sequence it holds
-- bar = { kind, total, from, to }             the part [from, to) of total
--     | { kind = "tokens", strips = N, mine = d }   every N-th strip, beginning with the d-th
-- kinds: "heads", "tokens", "out", "columns", "experts", "rows" (those that appear, in this order)
local plan_text = require "weft.plan_text"

local picture = {}

local run, bytes = plan_text.run, plan_text.bytes

picture.meaning = {
  heads = "query heads worked on", tokens = "strips of the sequence held in the KV cache", out = "heads after the exchange",
  columns = "columns of the MLP or of each expert", experts = "experts held", rows = "rows of the vocabulary",
}
local order = { "heads", "tokens", "out", "columns", "experts", "rows" }

local function part_of(kind, pair, total) return { kind = kind, total = total, from = pair[1], to = pair[1] + pair[2] } end

local function total_of(rows, field)
  local total = 0
  for _, row in ipairs(rows) do total = math.max(total, row[field][1] + row[field][2]) end
  return total
end

local function plural(pair, one) return pair[2] == 1 and one or one .. "s" end

local function attention_cell(row, part, totals)
  local context = part.axes.context
  local cell = { rank = row.rank, lines = { ("q %s"):format(run(row.q_heads)), ("kv %s"):format(run(row.kv_heads)) },
    bars = { part_of("heads", row.q_heads, totals.q) } }
  if context.world_size > 1 then
    cell.lines[3] = ("out %s"):format(run(row.output_heads))
    cell.strip = ("strip %d of %d"):format(row.context_rank, context.world_size)
    cell.bars[2] = { kind = "tokens", strips = context.world_size, mine = row.context_rank }
    cell.bars[3] = part_of("out", row.output_heads, totals.q)
  end
  return cell
end

local function mlp_cell(row, _, totals)
  return { rank = row.rank, lines = { ("col %s"):format(run(row.columns)) }, bars = { part_of("columns", row.columns, totals.columns) } }
end

local function experts_cell(row, _, totals)
  return { rank = row.rank, lines = { ("%s %s"):format(plural(row.experts, "expert"), run(row.experts)), ("col %s"):format(run(row.columns)) },
    bars = { part_of("experts", row.experts, totals.experts), part_of("columns", row.columns, totals.columns) } }
end

local function vocab_cell(row, _, totals)
  return { rank = row.rank, lines = { ("row %s"):format(run(row.rows)) }, bars = { part_of("rows", row.rows, totals.rows) } }
end

-- Rows of the table (how many ranks stand below one another) and whether ranks that follow each
-- other go down a column first.
local function shape(part, num_ranks)
  local axes = part.axes
  if part.type == "attention" and axes.reshards_output then return axes.context.world_size, true end
  if part.type == "experts" then return axes.expert.world_size, false end
  if part.type == "mlp" then return num_ranks / axes.input.world_size, true end
  return 1, false
end

local function arrange(cells, rows, down)
  local columns = #cells / rows
  local list = {}
  for r = 0, rows - 1 do
    for c = 0, columns - 1 do list[#list + 1] = cells[(down and c * rows + r or r * columns + c) + 1] end
  end
  if rows > columns then -- turned: what stood below stands beside
    local turned = {}
    for c = 0, columns - 1 do
      for r = 0, rows - 1 do turned[#turned + 1] = list[r * columns + c + 1] end
    end
    return turned, rows, columns
  end
  return list, columns, rows
end

-- What changes from left to right and from top to bottom, where both do.
local function labels(part, rows)
  if rows == 1 then return nil, nil end
  if part.type == "attention" then return "heads", "sequence" end
  if part.type == "experts" then return "columns of each expert", "experts" end
  return "columns", "copies"
end

local function where(part)
  if not part.layer_ranges then return "" end
  return (" · layer%s %s"):format(part.count > 1 and "s" or "", part.layer_ranges)
end

local names = { attention = "attention", mlp = "MLP", experts = "experts", embedding = "embedding", lm_head = "output head" }

local function cut(ways) return ways == 1 and "whole" or ("cut %d ways"):format(ways) end

local function notes_of(part)
  local axes, notes = part.axes, {}
  local row = part.ranks[1]
  if part.type == "attention" then
    notes[1] = axes.context.world_size > 1
      and ("heads %s, sequence shared by %d in strips of %d"):format(cut(axes.input.world_size), axes.context.world_size, axes.interleave)
      or "heads " .. cut(axes.input.world_size)
    if row.kv_head_replicas > 1 then notes[#notes + 1] = ("each KV head held %d times"):format(row.kv_head_replicas) end
    if part.window > 0 then notes[#notes + 1] = ("window of %d tokens"):format(part.window) end
  elseif part.type == "experts" then
    notes[1] = (axes.expert.world_size > 1 and ("experts over %d groups, each "):format(axes.expert.world_size) or "every expert ") .. cut(axes.input.world_size)
  elseif part.type == "mlp" then
    notes[1] = cut(axes.input.world_size)
    if axes.input.world_size < #part.ranks then notes[2] = ("%d copies"):format(#part.ranks / axes.input.world_size) end
  else
    notes[1] = "vocabulary " .. cut(axes.output.world_size)
    if part.tied then notes[2] = "tied to the embedding" end
  end
  notes[#notes + 1] = ("%s of weights a rank%s"):format(bytes(row.weight_bytes), part.count > 1 and " and layer" or "")
  if part.type == "attention" and row.cache_bytes_per_token > 0 then
    notes[#notes + 1] = ("%s of cache a token"):format(bytes(row.cache_bytes_per_token))
  end
  return notes
end

local makers = { attention = attention_cell, mlp = mlp_cell, experts = experts_cell, embedding = vocab_cell, lm_head = vocab_cell }
local fields = { attention = { q = "q_heads" }, mlp = { columns = "columns" }, experts = { experts = "experts", columns = "columns" },
  embedding = { rows = "rows" }, lm_head = { rows = "rows" } }

local function panel_of(part, num_ranks)
  local totals, cells = {}, {}
  for name, field in pairs(fields[part.type]) do totals[name] = total_of(part.ranks, field) end
  for i, row in ipairs(part.ranks) do cells[i] = makers[part.type](row, part, totals) end
  local rows, down = shape(part, num_ranks)
  local panel = { title = names[part.type] .. where(part), notes = notes_of(part), moves = {} }
  panel.cells, panel.columns, panel.rows = arrange(cells, rows, down)
  panel.x_label, panel.y_label = labels(part, rows)
  if panel.rows ~= rows then -- turned
    panel.x_label, panel.y_label = panel.y_label, panel.rows > 1 and panel.x_label or nil
  end
  for i, move in ipairs(part.moves) do
    panel.moves[i] = ("%s over %s of %d: %s a token"):format(move.what, (move.group:gsub("_", " ")), move.world_size, bytes(move.bytes))
  end
  return panel
end

--- n: weft.plan_numbers with the rows of all ranks.
function picture.of(n)
  local result = {
    title = ("%s on %d rank%s"):format(n.model or "model", n.num_ranks, n.num_ranks == 1 and "" or "s"),
    subtitle = n.policy, panels = {}, kinds = {},
  }
  local seen, vocabulary = {}, nil
  for _, part in ipairs(n.parts) do
    local panel = panel_of(part, n.num_ranks)
    if part.type == "embedding" then -- the head is cut in the same way: one picture, at the end
      vocabulary = panel
    else
      result.panels[#result.panels + 1] = panel
      if part.type == "lm_head" then
        panel.title = "embedding and output head"
        for i, move in ipairs(vocabulary.moves) do table.insert(panel.moves, i, move) end
      end
    end
    for _, bar in ipairs(panel.cells[1].bars) do seen[bar.kind] = true end
  end
  for _, kind in ipairs(order) do
    if seen[kind] then result.kinds[#result.kinds + 1] = kind end
  end
  return result
end

return picture
