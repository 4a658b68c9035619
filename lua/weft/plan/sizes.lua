--- Bytes of matrices as the layers store them, plain or in fp8 with scales of 128x128 blocks.
local element_size = { float32 = 4, bfloat16 = 2, float16 = 2 }

local function ceil_div(a, b) return math.floor((a + b - 1) / b) end

local Sizes = {}
Sizes.__index = Sizes

--- The dtypes of a run of this config: weight, compute, and bytes of an element of each.
function Sizes.of(cfg)
  local compute = cfg.compute_dtype or cfg.dtype or "float32"
  local weight = compute == "float32" and cfg.dtype or compute -- exact mode keeps what the checkpoint has
  return setmetatable({ cfg = cfg, compute = compute, weight = weight, element = element_size[weight],
    activation = element_size[compute] }, Sizes)
end

local function blocks(count) return ceil_div(count, 128) end
-- Blocks that the run { offset, count } lies in.
local function blocks_in(run)
  if run[2] == 0 then return 0 end
  return math.floor((run[1] + run[2] - 1) / 128) - math.floor(run[1] / 128) + 1
end

--- Bytes of a matrix that quantisation applies to: parts of so many rows under one another, and the run
-- of columns { offset, count }. In fp8 beside it: scales, with a block to spare where a part may begin
-- inside one, and for each row the number of its scales.
function Sizes:linear(parts, columns)
  local rows, scale_rows = 0, 0
  for _, count in ipairs(parts) do rows, scale_rows = rows + count, scale_rows + blocks(count) + 1 end
  if not self.cfg.quantization then return rows * columns[2] * self.element end
  return rows * columns[2] + scale_rows * blocks_in(columns) * 4 + rows * 4
end

--- Bytes of one expert, and those that all experts of a layer share.
function Sizes:expert(hidden, width)
  local elements = 3 * hidden * width[2]
  if not self.cfg.quantization then return elements * self.element, 0 end
  local up = 2 * (blocks(width[2]) + 1) * blocks(hidden)
  return elements + (up + blocks(hidden) * blocks_in(width)) * 4, (2 * width[2] + hidden) * 4
end

function Sizes:vector(count) return count * self.element end

return Sizes
