--- Measured times beside predicted ones: `weft bench` and the prompt's bench append, `weft plan` reads.
--
-- One JSON object a line in $WEFT_BENCH_FILE, or weft/bench.jsonl under $XDG_STATE_HOME (~/.local/state; state_file.lua).
-- The file is a convenience: what cannot be written is told, and so is a file that cannot be read; lines of it that say nothing are left out.
local core = require "weft.core"
local state_file = require "weft.state_file"

local measured = {}

--- Where the file is; nil when there is no place for it.
function measured.path() return state_file.path("WEFT_BENCH_FILE", "bench.jsonl") end

--- A model by what its steps cost: two folders with the same shape have the same times. plain: weights that
-- are quantised in the checkpoint are floats in the run.
function measured.model_key(cfg, name, plain)
  local experts = cfg.num_experts and (" experts %d/%dx%d"):format(cfg.num_experts_per_tok or 0, cfg.num_experts, cfg.moe_intermediate_size or 0) or ""
  return ("%s %dx%d heads %d/%dx%d mlp %d vocab %d%s %s"):format(name, cfg.num_hidden_layers, cfg.hidden_size,
    cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.intermediate_size, cfg.vocab_size, experts,
    cfg.quantization and not plain and "fp8_block" or cfg.compute_dtype or cfg.dtype or "float32")
end

--- A policy by what it does to each layer of the model, however it was written.
function measured.policy_key(policy, cfg)
  local function text(layer)
    local attention, mlp, experts = policy:sizes("attention", layer), policy:sizes("mlp", layer), policy:sizes("experts", layer)
    local shared = attention.context > 1 and (" context %d %s strips %d"):format(attention.context, attention.exchange, attention.interleave) or ""
    return ("attention %d%s mlp %d experts %dx%d"):format(attention.tensor, shared, mlp.tensor, experts.expert, experts.tensor)
  end
  local parts, last = { ("tensor %d block %d"):format(policy.tensor, policy.block_size) }, nil
  for layer = 0, cfg.num_hidden_layers - 1 do
    local now = text(layer)
    if now ~= last then parts[#parts + 1] = ("from %d: %s"):format(layer, now) end
    last = now
  end
  return table.concat(parts, "; ")
end

local function same(entry, key)
  for _, field in ipairs { "model", "policy", "batch", "context" } do
    if entry[field] ~= key[field] then return false end
  end
  return type(entry.machine) == "string" and type(entry.ms) == "number" and entry.ms > 0
end

--- The machine of a rank that computes on `device`, as `weft plan --machine` calls it.
function measured.machine(device)
  if device ~= "cuda" then return "cpu" end
  local name = core.gpu.describe(core.gpu.index() or 0)
  for _, known in ipairs { "H200", "H100" } do
    if name:find(known, 1, true) then return known:lower() end
  end
  return name:find("GB200", 1, true) and "gb200-nvl72" or name
end

--- The newest entries of a key { model, policy, machine, batch, context }: { ms =, machine =, ... } or nil of
-- its machine, a list of those of other machines, by name, and why a file that is there could not be read.
function measured.find(key, path)
  path = path or measured.path()
  if not path then return nil, {} end
  local text, why = state_file.read(path)
  if not text then return nil, {}, why end
  local newest, others = {}, {}
  for line in text:gmatch "[^\n]+" do
    local ok, entry = pcall(core.json.decode, line)
    if ok and type(entry) == "table" and same(entry, key) then newest[entry.machine] = entry end
  end
  for machine, entry in pairs(newest) do
    if machine ~= key.machine then others[#others + 1] = entry end
  end
  table.sort(others, function(a, b) return a.machine < b.machine end)
  return newest[key.machine], others
end

--- Appends an entry: the key's fields and `ms`. True, or nil and why not.
function measured.append(entry, path)
  path = path or measured.path()
  if not path then return nil, "there is no HOME, and WEFT_BENCH_FILE names no file" end
  local before, unreadable = state_file.read(path)
  if not before then return nil, unreadable end
  local file, message = io.open(path, "ab")
  if not file then
    state_file.make_folder(path)
    file, message = io.open(path, "ab")
  end
  if not file then return nil, message end
  local written, why = file:write(before:match "[^\n]$" and "\n" or "", core.json.encode(entry), "\n") -- behind a line that was left half-written
  local closed, closed_why = file:close()
  if not written or not closed then return nil, why or closed_why end
  return true
end

return measured
