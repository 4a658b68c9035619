--- weft.nn.experts: the gate of a mixture of experts, and the experts of this rank.
local core = require "weft.core"
local load = require "weft.nn.load"

local experts = {}

--- Which experts each token gets: forward(x) -> ids, weights. All ranks choose the same.
-- { weights = the gate's place, hidden_size, num_experts, num_experts_per_tok,
--   scoring = "sigmoid"|"softmax"|"softmax_topk", renormalize, bias = source of a bias on the choice, or nil }
function experts.router(t)
  local layer = core.router {
    name = t.weights:name "", hidden_size = t.hidden_size, num_experts = t.num_experts,
    num_experts_per_tok = t.num_experts_per_tok, scoring = t.scoring, renormalize = t.renormalize, bias = t.bias ~= nil,
  }
  load.linear(layer, t.weights, nil, "", { t.num_experts, t.hidden_size })
  if t.bias then layer:load_bias(t.bias) end
  return layer
end

-- Names of gate, up and down in checkpoints that have a matrix for each expert.
local styles = { { "w1", "w3", "w2" }, { "gate_proj", "up_proj", "down_proj" } }
local parts = { "gate", "up", "down" }

-- The first style that any expert of the checkpoint is named in.
local function style_of(weights, num_experts)
  for _, style in ipairs(styles) do
    for e = 0, num_experts - 1 do
      if weights:has(("%d.%s.weight"):format(e, style[1])) then return style end
    end
  end
  return styles[1]
end

local function load_part(layer, weights, part, expert, name, shape)
  local weight, scale = load.matrix(weights, name, shape)
  if expert then
    layer:load(part, expert, weight)
    if scale then layer:load_scale(part, expert, scale) end
  else
    layer:load(part, weight)
    if scale then layer:load_scale(part, scale) end
  end
end

--- The experts that plan.expert gives this rank, each cut by plan.input; forward(x, ids, weights) sums
-- over plan.output. Loads `E.w1`, `E.w3`, `E.w2`, or `E.gate_proj`, `E.up_proj`, `E.down_proj`, or
-- `gate_up_proj` and `down_proj` of all experts.
-- { weights = the place of the experts, num_experts, hidden_size, intermediate_size, parallel_plan }
function experts.experts(t)
  local weights, hidden, width = t.weights, t.hidden_size, t.intermediate_size
  local layer = core.experts(load.storage(weights, {
    name = weights:name "", num_experts = t.num_experts, hidden_size = hidden, intermediate_size = width,
    parallel_plan = t.parallel_plan,
  }))
  if weights:has "gate_up_proj" then
    load_part(layer, weights, "gate_up", nil, "gate_up_proj", { t.num_experts, 2 * width, hidden })
    load_part(layer, weights, "down", nil, "down_proj", { t.num_experts, hidden, width })
    return layer
  end
  local style = style_of(weights, t.num_experts)
  for e = layer.first_expert, layer.first_expert + layer.num_local_experts - 1 do
    for i, part in ipairs(parts) do
      local shape = part == "down" and { hidden, width } or { width, hidden }
      load_part(layer, weights, part, e, ("%d.%s.weight"):format(e, style[i]), shape)
    end
  end
  return layer
end

return experts
