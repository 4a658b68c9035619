--- spec/models/router_spec.lua - checkpoints with experts whose numbers cannot be right.
local core = require "weft.core"
local program = require "spec.support.program"

-- A copy of a checkpoint with one tensor changed by `change`.
local function damaged(model, name, change)
  local from, folder = program.models .. model, os.tmpname()
  os.remove(folder)
  os.execute("mkdir -p " .. folder .. " && cp " .. from .. "/config.json " .. folder)
  local checkpoint, tensors = core.checkpoint.open(from), {}
  for _, each in ipairs(checkpoint:names()) do tensors[each] = checkpoint:source(each):tensor() end
  assert(tensors[name], name)
  tensors[name] = change(tensors[name]) or tensors[name]
  core.save_safetensors(folder .. "/model.safetensors", tensors)
  return folder
end

local function refused(folder, ...)
  local code, _, err = program.run { "run", "--model", folder, "--prompt-ids", "5,6", "--max-tokens", "2", "-tp", "2" }
  os.execute("rm -r " .. folder)
  assert.equal(1, code, err)
  for _, text in ipairs { ... } do assert.is_truthy(err:find(text, 1, true), err) end
end

describe("a checkpoint with experts", function()
  it("is refused when a router's weight is NaN, which scores would hide", function()
    local name = "model.layers.1.mlp.gate.weight"
    refused(damaged("qwen3_moe_random", name, function(t) t:set(0 / 0, 1, 3) end), name, "holds NaN or infinity")
  end)

  it("is refused when a routing bias is infinite", function()
    local name = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    refused(damaged("minimax_m2_random", name, function(t) t:set(1 / 0, 0) end), name, "holds NaN or infinity")
  end)

  it("is refused when scales are integers", function()
    local name = "model.layers.0.self_attn.k_proj.weight_scale_inv"
    refused(damaged("demo_minimax_m2_fp8", name, function(t) return core.tensor(t.shape, "int32") end), name, "wanted floats")
  end)

  it("is refused when config.json does not count its experts", function()
    local folder = damaged("mixtral_random", "model.norm.weight", function() end)
    local file = io.open(folder .. "/config.json")
    local text = file:read "*a"
    file:close()
    file = io.open(folder .. "/config.json", "w")
    file:write((text:gsub('"num_local_experts"', '"forgotten"')))
    file:close()
    refused(folder, "config.json: num_local_experts (or num_experts) is missing")
  end)
end)
