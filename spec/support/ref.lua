--- spec/support/ref.lua - plain float64 references, seeded tensors and scaled comparisons.
local core = require "weft.core"
local ffi = require "ffi"

ffi.cdef "int setenv(const char *, const char *, int); int unsetenv(const char *);"

local ref = {}

--- Relative error allowed after one rounding to this dtype.
ref.tolerance = { float32 = 2e-6, bfloat16 = 4e-3, float16 = 5e-4 }
ref.dtypes = { "float32", "bfloat16", "float16" }

--- The instruction sets that this machine runs, widest first.
function ref.isas()
  local all, seen = {}, {}
  for _, name in ipairs { "avx512", "avx2", "scalar" } do
    ffi.C.setenv("WEFT_CPU_ISA", name, 1)
    local found = core.ops.isa()
    if not seen[found] then all[#all + 1], seen[found] = found, true end
  end
  ffi.C.unsetenv "WEFT_CPU_ISA"
  return all
end

--- Runs fn(isa) under each of them.
function ref.each_isa(fn)
  for _, isa in ipairs(ref.isas()) do
    ffi.C.setenv("WEFT_CPU_ISA", isa, 1)
    local ok, message = pcall(fn, isa)
    ffi.C.unsetenv "WEFT_CPU_ISA"
    if not ok then error(type(message) == "string" and (isa .. ": " .. message) or message, 0) end
  end
end

local function numel(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

--- Uniform in [-scale, scale], the same for the same seed.
function ref.random(shape, dtype, seed, scale)
  local state, values = (seed or 1) * 7919 % 2147483647, {}
  for i = 1, numel(shape) do
    state = state * 16807 % 2147483647
    values[i] = (state / 1073741823.5 - 1) * (scale or 1)
  end
  return core.tensor(shape, dtype or "float32", values)
end

--- The same values inside a wider, padded tensor: rows `pad` elements further apart, at an odd offset.
function ref.strided(tensor, pad)
  local shape = tensor.shape
  shape[#shape] = shape[#shape] + pad
  local wide = core.tensor(shape, tensor.dtype):fill(777)
  local view = wide:narrow(#shape - 1, 1, tensor.shape[#shape])
  return view:copy(tensor), wide
end

--- ||out - want|| / ||want|| over flat tables; NaN and infinite values must be equal.
function ref.error(out, want)
  assert(#out == #want, ("%d values, wanted %d"):format(#out, #want))
  local difference, norm = 0, 0
  for i = 1, #want do
    local a, b = out[i], want[i]
    if a ~= b and not (a ~= a and b ~= b) then difference = difference + (a - b) ^ 2 end
    if b == b and math.abs(b) ~= math.huge then norm = norm + b * b end
  end
  return math.sqrt(difference) / math.max(math.sqrt(norm), 1e-30)
end

function ref.close(out, want, tolerance, what)
  if type(out) ~= "table" then tolerance, out = tolerance or ref.tolerance[out.dtype], out:totable() end
  if type(want) ~= "table" then want = want:totable() end
  local found = #want == 0 and #out == 0 and 0 or ref.error(out, want)
  if not (found <= tolerance) then
    error(("%s: relative error %g, allowed %g"):format(what or "values", found, tolerance), 2)
  end
end

--- y[t][i] = sum x[t][j] w[i][j] + bias[i], over flat tables
function ref.linear(x, w, tokens, n, k, bias)
  local y = {}
  for t = 0, tokens - 1 do
    for i = 0, n - 1 do
      local sum = bias and bias[i + 1] or 0
      for j = 0, k - 1 do sum = sum + x[t * k + j + 1] * w[i * k + j + 1] end
      y[#y + 1] = sum
    end
  end
  return y
end

function ref.rms_norm(x, gain, rows, cols, eps)
  local y = {}
  for r = 0, rows - 1 do
    local sum = 0
    for i = 1, cols do sum = sum + x[r * cols + i] ^ 2 end
    for i = 1, cols do y[r * cols + i] = x[r * cols + i] / math.sqrt(sum / cols + eps) * gain[i] end
  end
  return y
end

--- One query over lists of keys and values (tables of numbers): output, lse.
function ref.attend(q, keys, values, scale, dim_v)
  local scores, max, out, sum = {}, -math.huge, {}, 0
  for j, key in ipairs(keys) do
    local dot = 0
    for i = 1, #q do dot = dot + q[i] * key[i] end
    scores[j] = dot * scale
    max = math.max(max, scores[j])
  end
  for i = 1, dim_v do out[i] = 0 end
  if #keys == 0 then return out, -math.huge end
  for j = 1, #keys do
    local p = math.exp(scores[j] - max)
    sum = sum + p
    for i = 1, dim_v do out[i] = out[i] + p * values[j][i] end
  end
  for i = 1, dim_v do out[i] = out[i] / sum end
  return out, math.log(sum) + max
end

--- The flat table from `first`, `count` long.
function ref.slice(flat, first, count)
  local out = {}
  for i = 1, count do out[i] = flat[first + i - 1] end
  return out
end

return ref
