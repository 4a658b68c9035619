--- Tensors that several layer specs need: the same values in every Lua state.
local core = require "weft.core"

local fixtures = {}

--- Values in [-scale, scale), a fixed sequence per seed.
function fixtures.random(shape, seed, scale, dtype)
  local count, values, state = 1, {}, seed * 7919 + 17
  for _, n in ipairs(shape) do count = count * n end
  for i = 1, count do
    state = (state * 16807) % 2147483647
    values[i] = (state / 2147483647 * 2 - 1) * (scale or 1)
  end
  return core.tensor(shape, dtype or "float32", values)
end

function fixtures.source(name, shape, seed, scale, dtype)
  return core.source(name, fixtures.random(shape, seed, scale, dtype))
end

--- A matrix whose element (i, j) is 100 i + j, so that a value says where it came from.
function fixtures.labelled(name, rows, columns)
  local values = {}
  for i = 0, rows - 1 do
    for j = 0, columns - 1 do values[#values + 1] = 100 * i + j end
  end
  return core.source(name, core.tensor({ rows, columns }, "float32", values))
end

--- The rows of a labelled matrix that a layer holds, by its product with the first unit vector.
function fixtures.rows_of(layer, columns)
  local unit = core.tensor({ 1, columns })
  unit:set(1, 0, 0)
  local rows = layer:forward(unit):totable()
  for i = 1, #rows do rows[i] = rows[i] / 100 end
  return rows
end

function fixtures.range(first, last)
  local list = {}
  for i = first, last do list[#list + 1] = i end
  return list
end

--- The largest |a - b| over two flat tables or tensors.
function fixtures.difference(a, b)
  if type(a) ~= "table" then a = a:totable() end
  if type(b) ~= "table" then b = b:totable() end
  if #a ~= #b then return math.huge end
  local largest = 0
  for i = 1, #a do
    local d = math.abs(a[i] - b[i])
    if not (d <= largest) then largest = d end
  end
  return largest
end

--- plan with this input axis and output cut tp ways.
function fixtures.plan(input_size, input_rank, tp, tp_rank)
  tp, tp_rank = tp or input_size, tp_rank or input_rank
  local group = input_size ~= tp and "attention_tensor" or "tensor"
  return core.plan { input = core.axis(input_size, input_rank, group), output = core.axis(tp, tp_rank) }
end

--- On a rank of core.spawn: the tensor group of all ranks and the plan that cuts by it.
function fixtures.join_tensor_group()
  local rank = core.rank()
  if rank.world_size > 1 then
    core.groups.create_all { { type = "tensor", world_size = rank.world_size, rows = { fixtures.range(0, rank.world_size - 1) } } }
  end
  core.layer_parallel.init(fixtures.plan(rank.world_size, rank.rank))
  return rank.world_size, rank.rank
end

return fixtures
