--- Layers that were made already, found again by what made them, so that a changed script takes
-- effect on the loaded weights: nothing is read from the checkpoint twice.
--
-- While a model is built, nn's constructors look here first. A layer is found by its constructor,
-- its place in the checkpoint and its arguments; the n-th call with the same is the n-th layer.
local core = require "weft.core"
local Weights = require "weft.weights"

local Reuse = {}
Reuse.__index = Reuse

function Reuse.new() return setmetatable({ made = {} }, Reuse) end

local not_layers = { layers = true, on_layer = true, rotary = true, silu_mul = true, add = true }

local describe

local function describe_table(self, t)
  if getmetatable(t) == Weights then return "weights " .. t.prefix end
  local parts = {}
  for k, v in pairs(t) do parts[#parts + 1] = tostring(k) .. "=" .. describe(self, v) end
  table.sort(parts)
  return "{" .. table.concat(parts, ",") .. "}"
end

function describe(self, value)
  local kind = type(value)
  if value == self.cfg then return "cfg" end
  if self.numbers[value] then return "layer " .. self.numbers[value] end
  if kind == "table" then return describe_table(self, value) end
  if kind == "function" or kind == "userdata" and getmetatable(value) ~= "weft.plan" and getmetatable(value) ~= "weft.axis" then
    return kind
  end
  return kind .. " " .. tostring(value)
end

-- A constructor that looks for its layer first.
local function seeking(self, nn, name, make)
  return function(...)
    if not self.active then return make(...) end -- a script may keep the function for later
    local key = name
    for i = 1, select("#", ...) do key = key .. "|" .. describe(self, (select(i, ...))) end
    local count = (self.count[key] or 0) + 1
    self.count[key] = count
    key = key .. "#" .. count
    local entry = self.made[key]
    local listener = nn.on_layer
    if entry then
      for _, told in ipairs(entry.told) do
        self.options.last_tensor = told[3]
        listener(told[1], told[2], true)
      end
    else
      entry = { told = {} }
      nn.on_layer = function(kind, layer)
        table.insert(entry.told, { kind, layer, self.options.last_tensor })
        listener(kind, layer)
      end
      local arguments = { n = select("#", ...), ... }
      core.attempt(function()
        entry.layer = make(unpack(arguments, 1, arguments.n))
        nn.on_layer = listener
      end, function() nn.on_layer = listener end)
    end
    if type(entry.layer) ~= "userdata" then return entry.layer end
    self.used[key] = entry
    self.total = self.total + 1
    self.numbers[entry.layer] = self.total
    return entry.layer
  end
end

--- Calls build(cfg, weights, policy). When it succeeds, layers that it did not ask for are let go at
-- `keep`; when it fails, those of before stay.
function Reuse:build(nn, weights, build, cfg, ...)
  self.cfg, self.options = cfg, weights.options
  self.count, self.used, self.numbers, self.total = {}, {}, setmetatable({}, { __mode = "k" }), 0
  local originals = {}
  for name, fn in pairs(nn) do
    if type(fn) == "function" and not not_layers[name] then originals[name] = fn end
  end
  self.active = true
  local arguments, built = { n = select("#", ...), ... }, nil
  local function restore()
    self.active = false
    for name, fn in pairs(originals) do nn[name] = fn end
  end
  core.attempt(function() -- Ctrl-C must not leave a constructor of ours behind
    for name, fn in pairs(originals) do nn[name] = seeking(self, nn, name, fn) end
    built = build(cfg, unpack(arguments, 1, arguments.n))
    restore()
  end, function()
    restore()
    self.used, self.numbers = {}, {}
  end)
  return built
end

--- The last build is in use: what it did not ask for goes.
function Reuse:keep()
  self.made, self.used, self.numbers = self.used, {}, {}
end

return Reuse
