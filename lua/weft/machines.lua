--- Machine profiles for `weft plan`: what one rank's device can do, as numbers.
--
-- machines.get("h200" | "h100" | "gb200-nvl72" | "cpu" | "FILE.lua") -> a checked profile; raises one line.
-- A file returns such a table; what it leaves out is taken from the profile named by its `base` (h200), and
-- `filled` = { from =, fields = } of the result says what that was.
--
--   name
--   memory                 bytes of a device
--   reserve                bytes that weights and cache cannot have: activations, graphs, libraries
--   bandwidth              bytes a second that a copy reaches, read plus written
--   share                  of the bandwidth, what reading reaches: `product` by dtype of the weights, `attention`, `experts`
--   flops                  by dtype: operations a second that a large product reaches
--   shared                 true: all ranks share memory, bandwidth and flops of one machine
--   link                   bytes a second that a rank sends to others of its domain
--   domain                 ranks that reach each other by `link`; larger groups pay `outer`
--   outer                  { link =, latency = } of the network between domains
--   latency                seconds: `product` (a matrix product beside its bytes), `attention`, `experts`,
--                          `kernel` (norm, rope, activation, sampler), `step` (once a step, on the host)
--   collective             by operation: { base, per_rank } seconds of a small one on n ranks, base + per_rank * (n - 2);
--                          bytes / link come on top
--   large                  { bytes =, latency = }: one in which a rank receives more bytes takes so many seconds longer
--   exchange               seconds of the exchange of attention where it is small and one kernel does it and the
--                          merge; 0 where its collectives do
--
-- An operation is priced at max(bytes / (bandwidth * share), operations / flops) + latency, a collective at its
-- latency + bytes / link (price.lua). `weft lua scripts/predict.lua` holds h200 against measured steps.
local errors = require "weft.errors"

local machines = {}

local us = 1e-6

local profiles = {
  -- Measured on one and two H200 (device copy 4.31 TB/s; bf16 product of 8192^3 784 TFLOP/s, fp8 1156 with
  -- blocks; an all-reduce of 64 MB at 276 GB/s). In a step products take 2 to 4 us beyond their bytes, experts alone 21 us for 57 MB and 124 us for 404; scripts/bench.md
  -- has these figures, scripts/predict.lua what they make of whole steps. Small sums and gathers go over peer memory,
  -- as far as a rank waits for 128 KB; the rest is NCCL's. What a rank more adds, and reduce_scatter and all_to_all,
  -- are published with NVIDIA AIConfigurator.
  h200 = {
    memory = 141e9, reserve = 4e9, bandwidth = 4.31e12,
    share = { product = { float32 = 1, bfloat16 = 1, float16 = 1, float8_e4m3 = 0.9 }, attention = 0.95, experts = 0.59 },
    flops = { float32 = 5.0e13, bfloat16 = 7.84e14, float16 = 7.84e14, float8_e4m3 = 1.156e15 },
    link = 2.8e11, domain = 8, outer = { link = 4.5e10, latency = 15 * us },
    latency = { product = 3 * us, attention = 5.5 * us, experts = 5 * us, kernel = 1 * us, step = 20 * us },
    collective = {
      all_reduce = { 2.3 * us, 0.17 * us }, all_gather = { 2.3 * us, 0.17 * us },
      reduce_scatter = { 6.0 * us, 1.2 * us }, all_to_all = { 7.5 * us, 0 },
    },
    large = { bytes = 131072, latency = 4.2 * us }, exchange = 3.0 * us,
  },
  -- Data sheet: 80 GB, 3.35 TB/s, the same chip; 90% of the bandwidth, as measured on H200.
  h100 = { base = "h200", memory = 80e9, bandwidth = 3.0e12 },
  -- Data sheet of one GPU of 72: 186 GB, 8 TB/s, 2.5 and 5 PFLOP/s dense bf16 and fp8, NVLink 900 GB/s each
  -- way. Of each the share that H200 reaches: 90% of the bandwidth, 79% and 58% of the products, 62% of the link.
  ["gb200-nvl72"] = {
    base = "h200", memory = 186e9, bandwidth = 7.2e12, domain = 72, link = 5.6e11,
    flops = { float32 = 6.4e13, bfloat16 = 1.97e15, float16 = 1.97e15, float8_e4m3 = 2.9e15 },
  },
  -- Two Zen 5 cores, measured: 47 GB/s read, 358 GFLOP/s in bf16 and 134 in float32. The latencies, and
  -- those of collectives through shared memory, are estimates for an idle machine.
  cpu = {
    memory = 16e9, reserve = 5e8, bandwidth = 4.7e10, shared = true,
    share = { product = { float32 = 1, bfloat16 = 0.85, float16 = 0.85, float8_e4m3 = 0.7 }, attention = 0.85, experts = 0.7 },
    flops = { float32 = 1.34e11, bfloat16 = 3.58e11, float16 = 1.34e11, float8_e4m3 = 1.34e11 },
    link = 1e10, domain = 1024, outer = { link = 1e9, latency = 50 * us },
    latency = { product = 4 * us, attention = 6 * us, experts = 8 * us, kernel = 1.5 * us, step = 30 * us },
    collective = {
      all_reduce = { 4 * us, 3 * us }, all_gather = { 3 * us, 2 * us },
      reduce_scatter = { 3 * us, 2 * us }, all_to_all = { 3 * us, 2 * us },
    },
    large = { bytes = 1e15, latency = 0 }, exchange = 0,
  },
}
machines.names = { "h200", "h100", "gb200-nvl72", "cpu" }

local function fail(format, ...)
  error({ message = format:format(...), usage = true }, 0)
end

-- Keys of `over` replace those of `base`; tables with names as keys are merged.
local function merge(base, over)
  local result = {}
  for key, value in pairs(base) do result[key] = value end
  for key, value in pairs(over) do
    local both = type(value) == "table" and type(base[key]) == "table" and value[1] == nil
    result[key] = both and merge(base[key], value) or value
  end
  return result
end

-- The first key, by name, whose value is no positive number (zero where it may be); nil when all is well.
local function wrong_number(place, values, keys, zero)
  for _, key in ipairs(keys) do
    local value = values[key]
    if type(value) ~= "number" or value ~= value or value == math.huge or value < 0 or (value == 0 and not zero) then
      return place .. key, value
    end
  end
end

local dtypes = { "float32", "bfloat16", "float16", "float8_e4m3" }
local ops = { "all_reduce", "all_gather", "reduce_scatter", "all_to_all" }

local function set(...)
  local result = {}
  for _, name in ipairs { ... } do result[name] = true end
  return result
end

-- Fields that a profile may have; those of a table within it by name.
local known = {
  name = true, base = true, memory = true, reserve = true, bandwidth = true, shared = true, link = true, domain = true, exchange = true,
  share = { product = set(unpack(dtypes)), attention = true, experts = true }, flops = set(unpack(dtypes)), outer = set("link", "latency"),
  latency = set("product", "attention", "experts", "kernel", "step"), collective = set(unpack(ops)), large = set("bytes", "latency"),
}

-- Refuses a field that no profile has: a misspelt one would be its base's in silence.
local function check_fields(values, fields, place, from)
  for key, value in pairs(values) do
    if not fields[key] then
      local names = {}
      for name in pairs(fields) do names[#names + 1] = name end
      table.sort(names)
      fail("the machine %s: %s has no field '%s' (known: %s)", from, place and "its " .. place or "a machine", tostring(key), table.concat(names, ", "))
    end
    if type(fields[key]) == "table" and type(value) == "table" then
      check_fields(value, fields[key], (place and place .. "." or "") .. key, from)
    end
  end
end

local function check(profile, from)
  local function demand(place, values, keys, zero)
    if type(values) ~= "table" then fail("the machine %s: %s is a table, got %s", from, place, type(values)) end
    local key, value = wrong_number(place == "" and "" or place .. ".", values, keys, zero)
    if key then fail("the machine %s: %s is a %s number, got %s", from, key, zero and "non-negative" or "positive", tostring(value)) end
  end
  demand("", profile, { "memory", "bandwidth", "link", "domain" })
  demand("", profile, { "reserve" }, true)
  demand("flops", profile.flops, dtypes)
  demand("share", profile.share, { "attention", "experts" })
  demand("share.product", profile.share.product, dtypes)
  demand("outer", profile.outer, { "link" })
  demand("outer", profile.outer, { "latency" }, true)
  demand("latency", profile.latency, { "product", "attention", "experts", "kernel", "step" }, true)
  demand("large", profile.large, { "bytes" })
  demand("large", profile.large, { "latency" }, true)
  demand("", profile, { "exchange" }, true)
  if type(profile.collective) ~= "table" then fail("the machine %s: collective is a table, got %s", from, type(profile.collective)) end
  for _, op in ipairs(ops) do demand("collective." .. op, profile.collective[op], { 1, 2 }, true) end
  for name, value in pairs(profile.share.product) do
    if value > 1 then fail("the machine %s: share.product.%s is a share of the bandwidth, at most 1, got %g", from, name, value) end
  end
  for _, name in ipairs { "attention", "experts" } do
    if profile.share[name] > 1 then fail("the machine %s: share.%s is a share of the bandwidth, at most 1, got %g", from, name, profile.share[name]) end
  end
  if profile.domain ~= math.floor(profile.domain) then fail("the machine %s: domain is a whole number of ranks, got %g", from, profile.domain) end
  if type(profile.shared) ~= "boolean" and profile.shared ~= nil then fail("the machine %s: shared is true or false, got %s", from, tostring(profile.shared)) end
  return profile
end

local function complete(profile, name)
  if profile.base then
    if not profiles[profile.base] then
      fail("the machine %s: base is one of %s, got '%s'", name, table.concat(machines.names, ", "), tostring(profile.base))
    end
    profile = merge(complete(profiles[profile.base], profile.base), profile)
  end
  profile = merge(profile, { name = profile.name or name })
  profile.base = nil
  return profile
end

-- Fields of `known` that a file does not say, "latency.step" within tables, by name.
local function left_out(values, fields, place)
  local list = {}
  for name, within in pairs(fields) do
    if values[name] == nil then
      if name ~= "base" and name ~= "name" and name ~= "shared" then list[#list + 1] = place .. name end
    elseif type(within) == "table" and type(values[name]) == "table" then
      for _, inner in ipairs(left_out(values[name], within, place .. name .. ".")) do list[#list + 1] = inner end
    end
  end
  table.sort(list)
  return list
end

local function from_file(path)
  local text = errors.read_input(path, "the machine")
  local chunk, message = loadstring(text, "@" .. path)
  if not chunk then fail("the machine has a syntax error: %s", message) end
  local ok, result = pcall(setfenv(chunk, setmetatable({}, { __index = _G })))
  if not ok then fail("the machine %s failed: %s", path, errors.message(result)) end
  if type(result) ~= "table" then fail("the machine %s must return a table, got %s", path, type(result)) end
  check_fields(result, known, nil, path)
  if type(result.name) ~= "string" and result.name ~= nil then fail("the machine %s: name is a string, got %s", path, type(result.name)) end
  local base = result.base or "h200"
  local whole = merge(result, { base = base, name = result.name or path:match "([^/]+)%.lua$" })
  local profile = check(complete(whole, path), path)
  local fields = left_out(result, known, "")
  if #fields > 0 then profile.filled = { from = base, fields = fields } end
  return profile
end

--- Whether there is a profile of this name.
function machines.has(name) return profiles[name] ~= nil end

--- The profile of a name or of a file, checked.
function machines.get(name)
  if profiles[name] then
    local profile = complete(profiles[name], name)
    profile.name = name
    return check(profile, name)
  end
  if name:match "%.lua$" then return from_file(name) end
  fail("--machine is one of %s, or FILE.lua; got '%s'", table.concat(machines.names, ", "), name)
end

return machines
