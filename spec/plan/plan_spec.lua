-- spec/plan/plan_spec.lua - axes, plans and the policy of a Lua state: the seed's promises.
local core = require "weft.core"

local function axis(world_size, rank, group) return core.axis(world_size, rank, group) end

local function refuses(text, fn, ...)
  local args = { ... }
  assert.error_matches(function() fn(unpack(args)) end, text, 1, true)
end

describe("weft.axis", function()
  it("holds world size, rank and group, and compares by value", function()
    local a = axis(8, 5)
    assert.same({ 8, 5, "tensor" }, { a.world_size, a.rank, a.group })
    assert.is_true(a == axis(8, 5, "TENSOR"))
    assert.is_false(a == axis(8, 4))
    assert.is_false(a == axis(8, 5, "attention_tensor"))
    assert.equal("attention_tensor 1/2", tostring(axis(2, 1, "ATTENTION_TENSOR")))
  end)

  it("refuses sizes, ranks and groups that cannot be", function()
    refuses("world_size must be positive, got 0", axis, 0, 0)
    refuses("rank must be in [0, 2), got -1", axis, 2, -1)
    refuses("rank must be in [0, 2), got 2", axis, 2, 2)
    refuses("rank must be an integer, got 0.5", axis, 2, 0.5)
    refuses("world_size must be an integer, got nil", axis)
    refuses("unknown group 'tenser'", axis, 2, 0, "tenser")
  end)

  it("is immutable", function()
    refuses("weft.axis is immutable: cannot set 'rank'", function() axis(4, 2).rank = 1 end)
  end)
end)

describe("weft.plan", function()
  it("reshards when input and output differ in any field", function()
    local tensor = axis(8, 5)
    assert.is_false(core.plan({ input = tensor, output = axis(8, 5) }).reshards_output)
    assert.is_true(core.plan({ input = axis(8, 5, "attention_tensor"), output = tensor }).reshards_output)
    assert.is_true(core.plan({ input = axis(8, 4), output = tensor }).reshards_output)
    assert.is_true(core.plan({ input = axis(2, 1, "attention_tensor"), output = tensor }).reshards_output)
  end)

  it("says how wide the output of a rank is, and refuses a width that does not divide", function()
    local plan = core.plan { input = axis(2, 0, "attention_tensor"), output = axis(8, 0) }
    assert.equal(4, plan:get_output_size(16))
    assert.equal(4, plan.get_output_size(plan, 16))
    refuses("Global input size must be divisible by the output parallel size: global_size=6, output_size=8",
      plan.get_output_size, plan, 3)
  end)

  it("derives the context axis of a resharding attention plan", function()
    local plan = core.plan { input = axis(2, 1, "attention_tensor"), output = axis(8, 6) }
    assert.equal("context 2/4", tostring(plan.context))
    assert.equal("expert 0/1", tostring(plan.expert))
    assert.same({ 1, "ag_rs" }, { plan.interleave, plan.exchange })
    assert.equal("attention_tensor 1/2 -> tensor 6/8, context 2/4 by 1, ag_rs", tostring(plan))
    local plain = core.plan { input = axis(8, 6), output = axis(8, 6), context = axis(2, 0, "context"),
      interleave = 16, exchange = "a2a" }
    assert.equal("tensor 6/8 -> tensor 6/8, context 0/2 by 16, a2a", tostring(plain))
  end)

  it("compares by value in every field", function()
    local a, b = axis(8, 5), axis(2, 1, "attention_tensor")
    local plan = core.plan { input = b, output = a }
    assert.is_true(plan == core.plan { input = axis(2, 1, "attention_tensor"), output = axis(8, 5) })
    assert.is_false(plan == core.plan { input = a, output = a })
    assert.is_false(plan == core.plan { input = b, output = a, interleave = 2 })
    assert.is_false(plan == core.plan { input = b, output = a, exchange = "a2a" })
    assert.is_true(plan.input == b and plan.output == a)
  end)

  it("is immutable", function()
    local plan = core.plan { input = axis(4, 2), output = axis(4, 2) }
    refuses("weft.plan is immutable: cannot set 'input'", function() plan.input = axis(2, 0) end)
  end)

  it("refuses missing axes, unknown fields and axes of the wrong group", function()
    refuses("needs an input axis", core.plan, { output = axis(1, 0) })
    refuses("output must be a weft.axis, got number", core.plan, { input = axis(1, 0), output = 8 })
    refuses("a plan has no field 'ouput'", core.plan, { input = axis(1, 0), ouput = axis(1, 0) })
    refuses("context must be an axis of group 'context', got 'tensor'", core.plan,
      { input = axis(1, 0), output = axis(1, 0), context = axis(1, 0) })
    refuses("exchange must be 'ag_rs' or 'a2a', got 'a2b'", core.plan,
      { input = axis(1, 0), output = axis(1, 0), exchange = "a2b" })
  end)
end)

describe("weft.layer_parallel", function()
  local lp = core.layer_parallel
  local tensor = core.plan { input = axis(8, 5), output = axis(8, 5) }
  local attention = core.plan { input = axis(2, 1, "attention_tensor"), output = axis(8, 5) }
  local single = core.plan { input = axis(1, 0), output = axis(1, 0) }
  before_each(lp.clear)
  after_each(lp.clear)

  it("gives the single-rank plan before init and after clear", function()
    assert.equal(single, lp.get())
    lp.init(tensor, { attention = attention })
    lp.clear()
    assert.equal(single, lp.get("attention", 3))
  end)

  it("gives the default plan to a layer type without an override", function()
    lp.init(tensor)
    assert.equal(tensor, lp.get())
    assert.equal(tensor, lp.get("attention"))
  end)

  it("gives an override to its layer type only", function()
    lp.init(tensor, { attention = attention })
    assert.equal(tensor, lp.get())
    assert.equal(tensor, lp.get("mlp", 0))
    assert.equal(attention, lp.get("ATTENTION"))
    assert.is_true(lp.get("attention").reshards_output)
    assert.equal(4, lp.get("attention"):get_output_size(16))
  end)

  it("gives single layers and ranges their own plans", function()
    local mixed = core.plan { input = axis(4, 2, "attention_tensor"), output = axis(8, 5) }
    lp.init(tensor, { attention = attention, layers = {
      [17] = { attention = tensor }, ["0-3"] = { attention = mixed, mlp = single } } })
    assert.equal(mixed, lp.get("attention", 0))
    assert.equal(mixed, lp.get("attention", 3))
    assert.equal(single, lp.get("mlp", 2))
    assert.equal(attention, lp.get("attention", 4))
    assert.equal(tensor, lp.get("mlp", 4))
    assert.equal(tensor, lp.get("attention", 17))
    assert.equal(attention, lp.get("attention"))
  end)

  it("refuses ranges that overlap or make no sense, and keeps the old policy", function()
    local function layers(t) return lp.init, tensor, { layers = t } end
    local p = { attention = attention }
    refuses("layers: 0-3 and 3-5 overlap", layers { ["0-3"] = p, ["3-5"] = p })
    refuses("layers: 2-2 and 2-4 overlap", layers { [2] = p, ["2-4"] = { mlp = attention } })
    refuses("layers: 2-2 and 2-2 overlap", layers { [2] = p, ["2-2"] = p })
    refuses("the range \"3-1\" runs backwards", layers { ["3-1"] = p })
    refuses("a layer number or a range \"a-b\", got \"all\"", layers { all = p })
    refuses("counted from 0, got -1", layers { [-1] = p })
    refuses("an entry of layers has no field 'embedding'", layers { [1] = { embedding = tensor } })
    refuses("the entry of 1-1 holds no plan", layers { [1] = {} })
    refuses("the overrides has no field 'attn'", lp.init, tensor, { attn = attention })
    refuses("attention must be a weft.plan, got number", lp.init, tensor, { attention = 2 })
    refuses("unknown layer type 'attn'", lp.get, "attn")
    assert.equal(single, lp.get("attention", 2))
  end)
end)
