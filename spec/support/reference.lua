--- spec/support/reference.lua: a model under plans against its expected.json and expected.safetensors.
local assert = require "luassert"
local core = require "weft.core"
local program = require "spec.support.program"

local reference = {}

local function with(words, more)
  for _, word in ipairs(more) do words[#words + 1] = word end
  return words
end

-- Runs the greedy continuation of every case whose best two logits are never too close to call.
local function greedy(folder, cases, plan)
  for i, case in ipairs(cases) do
    if not case.smallest_top2_margin or case.smallest_top2_margin > 1e-3 then
      local got = program.json(with({ "run", "--model", folder, "--prompt-ids", program.ids(case.prompt_ids),
        "--temperature", "0", "--ignore-eos", "--dtype", "float32", "--json", "--max-tokens", #case.greedy_ids }, plan))
      assert.same(case.greedy_ids, got.output_ids, "case " .. i)
      assert.equal("length", got.finish_reason)
    end
  end
end

local function logits(folder, cases, plan, bound)
  local expected = core.checkpoint.open(folder .. "/expected.safetensors")
  for i, case in ipairs(cases) do
    local out = os.tmpname()
    local code, _, err = program.run(with({ "logits", "--model", folder, "--prompt-ids", program.ids(case.prompt_ids),
      "--dtype", "float32", "--out", out }, plan))
    assert.equal(0, code, err)
    local got = core.checkpoint.open(out):source("logits"):tensor()
    os.remove(out)
    local want = expected:source(("case%d.logits"):format(i - 1)):tensor()
    local last = got:narrow(0, #case.prompt_ids - want.shape[1], want.shape[1])
    local found = core.compare_rows(last, want).max_rel_diff
    assert.is_true(found < bound, ("case %d: %g"):format(i, found))
  end
end

--- Two promises for each plan (a list of words of the command line; `label` names it), as { name, function }.
-- bound: of the logits' difference over the largest logit, default 1e-4.
function reference.promises(model, plans, bound)
  bound = bound or 1e-4
  local folder, cases, list = program.models .. model, program.expected(model), {}
  for _, plan in ipairs(plans) do
    local name = plan.label or table.concat(plan, " ")
    list[#list + 1] = { model .. ": draws the reference's greedy tokens under " .. name, function() greedy(folder, cases, plan) end }
    list[#list + 1] = { ("%s: gives the reference's logits within %g of the largest under %s"):format(model, bound, name),
      function() logits(folder, cases, plan, bound) end }
  end
  return list
end

return reference
