--- Measured times beside predicted ones: `weft bench` appends, `weft plan` reads.
--
-- One JSON object a line in $WEFT_BENCH_FILE, or weft/bench.jsonl under $XDG_STATE_HOME (~/.local/state).
-- The file is a convenience: what cannot be written is told, what cannot be read is left out.
local core = require "weft.core"

local measured = {}

--- Where the file is; nil when there is no home to put it in.
function measured.path()
  local named = os.getenv "WEFT_BENCH_FILE"
  if named and named ~= "" then return named end
  local state, home = os.getenv "XDG_STATE_HOME", os.getenv "HOME"
  if not state or state == "" then state = home and home ~= "" and home .. "/.local/state" or nil end
  return state and state .. "/weft/bench.jsonl"
end

--- A model by what its steps cost: two folders with the same shape have the same times.
function measured.model_key(cfg, name)
  local experts = cfg.num_experts and (" experts %d/%dx%d"):format(cfg.num_experts_per_tok or 0, cfg.num_experts, cfg.moe_intermediate_size or 0) or ""
  return ("%s %dx%d heads %d/%dx%d mlp %d vocab %d%s %s"):format(name, cfg.num_hidden_layers, cfg.hidden_size,
    cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.intermediate_size, cfg.vocab_size, experts,
    cfg.quantization and "fp8_block" or cfg.compute_dtype or cfg.dtype or "float32")
end

local function same(entry, key)
  for _, field in ipairs { "model", "policy", "machine", "batch", "context" } do
    if entry[field] ~= key[field] then return false end
  end
  return true
end

--- The newest entry of a key { model, policy, machine, batch, context }: { ms =, ... } or nil.
function measured.find(key, path)
  path = path or measured.path()
  local file = path and io.open(path, "rb")
  if not file then return nil end
  local found
  for line in file:lines() do
    local ok, entry = pcall(core.json.decode, line)
    if ok and type(entry) == "table" and same(entry, key) and type(entry.ms) == "number" and entry.ms > 0 then found = entry end
  end
  file:close()
  return found
end

local function make_folder(path)
  local folder = path:match "^(.*)/[^/]*$"
  if folder and folder ~= "" then
    os.execute(("mkdir -p '%s' 2>/dev/null"):format(folder:gsub("'", "'\\''")))
  end
end

--- Appends an entry: the key's fields and `ms`. True, or nil and why not.
function measured.append(entry, path)
  path = path or measured.path()
  if not path then return nil, "no HOME and no WEFT_BENCH_FILE" end
  local file, message = io.open(path, "ab")
  if not file then
    make_folder(path)
    file, message = io.open(path, "ab")
  end
  if not file then return nil, message end
  local written, why = file:write(core.json.encode(entry), "\n")
  file:close()
  if not written then return nil, why end
  return true
end

return measured
