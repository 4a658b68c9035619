-- spec/layers/encoder_attention_spec.lua - both ways, within the step's own tokens.
local core = require "weft.core"
local hetero = require "spec.support.hetero"

describe("encoder attention", function()
  it("sees all tokens of its own request and none of another", function()
    local case = { tp = 1, heads = 4, kv_heads = 2, head_size = 8, v_head_size = 6, causal = false, length = 5 }
    local place, entries = hetero.place(case, 0), {}
    for r = 1, 3 do entries[r] = { request = r, start = 0, count = 5 } end
    local layer = core.encoder_attention { num_heads = 4, num_kv_heads = 2, head_size = 8, v_head_size = 6 }
    local q, k, v = hetero.inputs(case, place, entries)
    local out = layer:forward(q, k, v, hetero.build(core.step(), case, entries))
    assert.equal(4, layer.output_num_heads)
    assert.is_true(hetero.difference(case, entries, out, 0, 4) < 2e-6)
  end)

  it("refuses tokens before the step's own, and plans that move heads or share the sequence", function()
    local layer = core.encoder_attention { num_heads = 2, head_size = 4 }
    local x = core.tensor { 1, 8 }
    assert.error_matches(function() layer:forward(x, x, x, core.step():build { requests = { { ids = 1, start = 3 } } }) end,
      "a request has 3 before them", 1, true)
    local resharding = core.plan { input = core.axis(1, 0, "attention_tensor"), output = core.axis(2, 0) }
    assert.error_matches(function() core.encoder_attention { num_heads = 2, head_size = 4, parallel_plan = resharding } end,
      "does not support layer parallel plan", 1, true)
  end)
end)
