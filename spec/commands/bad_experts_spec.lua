--- spec/commands/bad_experts_spec.lua - checkpoints of experts with something wrong: one line that names it.
local core = require "weft.core"
local program = require "spec.support.program"

local demo = program.models .. "demo_minimax_m2_fp8"
local experts = "model.layers.2.block_sparse_moe.experts.5."

-- The demo's weights, all but what `change(name, source)` leaves out (false) or replaces (a tensor), and `more`.
local function folder(change, more)
  local path = os.tmpname()
  os.remove(path)
  os.execute(("mkdir %s && cp %s/config.json %s"):format(path, demo, path))
  local checkpoint, tensors = core.checkpoint.open(demo), more or {}
  for _, name in ipairs(checkpoint:names()) do
    local source = checkpoint:source(name)
    local changed = change(name, source)
    if changed ~= false then tensors[name] = changed or source:tensor() end
  end
  core.save_safetensors(path .. "/model.safetensors", tensors)
  return path
end

local function refused(path, options, ...)
  local words = { "run", "--model", path, "--prompt-ids", "5", "--max-tokens", "2" }
  for _, word in ipairs(options) do words[#words + 1] = word end
  local code, _, err = program.run(words)
  assert.equal(1, code, err)
  assert.equal(1, select(2, err:gsub("\n", "\n")), err)
  for _, text in ipairs { ... } do assert.is_truthy(err:find(text, 1, true), ("'%s' is not in: %s"):format(text, err)) end
  os.execute("rm -r " .. path)
end

local function without(name) return function(n) if n == name then return false end end end

describe("a checkpoint of experts", function()
  it("names the expert's tensor that is missing, on one rank and on the rank that needs it", function()
    for _, options in ipairs { {}, { "-tp", "4", "-ep", "4" } } do
      refused(folder(without(experts .. "w3.weight")), options, "layer 2", experts .. "w3.weight")
    end
    refused(folder(without "model.layers.0.block_sparse_moe.gate.weight"), {}, "layer 0", "block_sparse_moe.gate.weight")
  end)

  it("names scales that are missing", function()
    refused(folder(without(experts .. "w2.weight_scale_inv")), { "-tp", "2" }, "layer 2",
      ("tensor '%sw2.weight' is float8_e4m3, and its scales '%sw2.weight_scale_inv' are not in the checkpoint"):format(experts, experts))
    refused(folder(without "model.layers.1.self_attn.k_proj.weight_scale_inv"), {}, "layer 1", "self_attn.k_proj.weight_scale_inv")
  end)

  it("names scales and weights of another shape, with what was wanted and found", function()
    local function reshaped(name, shape)
      return function(n, source) if n == name then return core.tensor(shape, source.dtype) end end
    end
    refused(folder(reshaped(experts .. "w1.weight_scale_inv", { 2, 2 })), {},
      "tensor '" .. experts .. "w1.weight_scale_inv': wanted [1, 2], found [2, 2]")
    refused(folder(reshaped(experts .. "w1.weight", { 127, 192 })), {}, "tensor '" .. experts .. "w1.weight': wanted [128, 192], found [127, 192]")
  end)

  it("is refused when the config asks for more experts per token than there are", function()
    local path = folder(function() end)
    local file = assert(io.open(path .. "/config.json", "rb"))
    local text = file:read "*a"
    file:close()
    file = assert(io.open(path .. "/config.json", "wb"))
    file:write((text:gsub('"num_experts_per_tok": %d+', '"num_experts_per_tok": 9')))
    file:close()
    refused(path, {}, "num_experts_per_tok", "9", "8")
  end)

  it("runs beside tensors of layers that the model does not have", function()
    local path = folder(function() end, { ["model.layers.4.self_attn.q_proj.weight"] = core.tensor { 1 }, ["model.mtp.norm.weight"] = core.tensor { 1 } })
    local code, _, err = program.run { "run", "--model", path, "--prompt-ids", "5", "--max-tokens", "2" }
    assert.equal(0, code, err)
    os.execute("rm -r " .. path)
  end)
end)
