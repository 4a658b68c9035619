--- Printing: any value as a text of bounded length. Tensors show what they are, never their values.
local core = require "weft.core"

local show = {}

local limits = { depth = 4, items = 30, string = 200, width = 100 }
show.limits = limits

local short = { float32 = "f32", bfloat16 = "bf16", float16 = "f16", float8_e4m3 = "fp8", int32 = "i32", int64 = "i64", uint8 = "u8" }

--- "bf16[8, 3072 @tensor/4] cpu:0": dtype, shape with the axis that cuts a dimension where it is known,
-- and the device of this rank.
function show.tensor(tensor)
  local ok, dtype, shape, cut, device = pcall(function() return tensor.dtype, tensor.shape, tensor.cut, tensor.device end)
  if not ok then return "a tensor that is gone (of an earlier step, or closed)" end
  local sizes = {}
  for i, size in ipairs(shape) do
    sizes[i] = ("%d"):format(size)
    if cut and cut.dim == i - 1 then sizes[i] = ("%s @%s/%d"):format(sizes[i], cut.axis, cut.size) end
  end
  local index = device == "cuda" and core.gpu.index() or core.rank().rank
  return ("%s[%s] %s:%d"):format(short[dtype] or dtype, table.concat(sizes, ", "), device, index)
end

-- Fields worth seeing of objects that have no text of their own.
local fields = { "num_heads", "num_kv_heads", "head_size", "output_num_heads", "sliding_window", "page_tokens", "num_blocks", "cache_bytes",
  "vocab_size", "hidden_size", "size", "eps", "first", "count", "weight_bytes", "parallel_plan" }

local function userdata(value)
  local name = getmetatable(value)
  if type(name) == "table" then name = nil end
  if name == "weft.tensor" then return show.tensor(value) end
  local ok, text = pcall(tostring, value)
  if not ok then return ("%s whose __tostring failed: %s"):format(name or "userdata", tostring(text)) end
  if not text:match "^[%w_.]+: 0x%x+$" then return text end
  if not name then return text end
  local shown = {}
  for _, field in ipairs(fields) do
    local has, v = pcall(function() return value[field] end)
    if has and v ~= nil and type(v) ~= "function" then shown[#shown + 1] = field .. " " .. (type(v) == "number" and ("%.6g"):format(v) or tostring(v)) end
  end
  return #shown > 0 and ("%s {%s}"):format(name, table.concat(shown, ", ")) or name
end

local function quoted(text)
  local cut = #text > limits.string
  local body = ("%q"):format(cut and text:sub(1, limits.string) or text):gsub("\\\n", "\\n"):gsub("\r", "\\r"):gsub("%z", "\\0")
  return cut and ("%s .. (%d bytes)"):format(body, #text) or body
end

local keywords = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true until while"):gmatch "%a+" do
  keywords[word] = true
end

local function before(a, b)
  local ta, tb = type(a), type(b)
  if ta ~= tb then return ta == "number" or tb ~= "number" and ta < tb end
  if ta == "number" or ta == "string" then return a < b end
  return tostring(a) < tostring(b)
end

local format

local function key_text(key, state)
  if type(key) == "string" and key:match "^[%a_][%w_]*$" and not keywords[key] then return key end
  return "[" .. format(key, state, limits.depth) .. "]"
end

local function table_text(t, state, depth)
  local meta = debug.getmetatable(t)
  local own = type(meta) == "table" and rawget(meta, "__tostring")
  if own then
    local ok, text = pcall(own, t)
    if ok and type(text) == "string" then return text end
    return "a table whose __tostring failed: " .. tostring(text)
  end
  if state.open[t] then return "<cycle>" end
  if next(t) == nil then return "{}" end
  if depth >= limits.depth then return "{...}" end
  state.open[t] = true
  local items, keys, length = {}, {}, 0
  while rawget(t, length + 1) ~= nil do length = length + 1 end
  for key in next, t do
    if not (type(key) == "number" and key >= 1 and key <= length and key % 1 == 0) then keys[#keys + 1] = key end
  end
  table.sort(keys, before)
  for i = 1, math.min(length, limits.items) do items[i] = format(rawget(t, i), state, depth + 1) end
  for i = 1, math.min(#keys, limits.items - #items) do
    items[#items + 1] = key_text(keys[i], state) .. " = " .. format(rawget(t, keys[i]), state, depth + 1)
  end
  local left = length + #keys - #items
  if left > 0 then items[#items + 1] = ("... %d more"):format(left) end
  state.open[t] = nil
  local total, lines = 0, false
  for _, item in ipairs(items) do
    total = total + #item + 2
    lines = lines or item:find("\n", 1, true) ~= nil
  end
  if not lines and total + 2 * depth <= limits.width then return "{ " .. table.concat(items, ", ") .. " }" end
  local indent = ("  "):rep(depth + 1)
  return "{\n" .. indent .. table.concat(items, ",\n" .. indent) .. "\n" .. ("  "):rep(depth) .. "}"
end

local function function_text(fn)
  local about = debug.getinfo(fn, "S")
  if about.what == "C" then return "function (C)" end
  return ("function (%s:%d)"):format(about.short_src, about.linedefined)
end

function format(value, state, depth)
  local kind = type(value)
  if kind == "string" then return quoted(value) end
  if kind == "table" then return table_text(value, state, depth) end
  if kind == "userdata" then return userdata(value) end
  if kind == "function" then return function_text(value) end
  return tostring(value)
end

--- Any value as text.
function show.value(value)
  if type(value) == "string" and #value <= limits.string and not value:find "[%c]" then return ("%q"):format(value) end
  return format(value, { open = {} }, 0)
end

--- The results of a line: one a line. "" when there are none.
function show.results(results)
  local lines = {}
  for i = 1, results.n do lines[i] = show.value(results[i]) end
  return table.concat(lines, "\n")
end

return show
