--- spec/commands/verify_spec.lua - every legal plan against one rank, and what a wrong one looks like.
local files = require "spec.support.files"
local program = require "spec.support.program"

describe("weft verify", function()
  it("finds that all plans up to 4 ranks agree, prompts cut into chunks of 1, 7 and 64", function()
    local ranks = os.getenv "WEFT_SANITIZED" and 2 or 4 -- a sanitizer makes every step ten times as long
    for _, model in ipairs { "llama_mqa_tied", "mistral_sliding" } do
      local rows = program.json { "verify", "--model", program.models .. model, "--max-ranks", ranks, "--max-tokens", "4", "--json" }
      assert.is_true(#rows > (ranks == 4 and 20 or 3))
      for _, row in ipairs(rows) do
        assert.is_true(row.ok, row.plan)
        assert.is_true(row.max_rel_diff < 1e-4, row.plan)
      end
    end
  end)

  it("takes a list of plans from a file", function()
    local path = files.temporary([[return { weft.policy { tensor = 2 }, { tensor = 4, attention = { tensor = 1 }, layers = { ["1-2"] = { attention = { tensor = 2 } } } } }]], ".lua")
    local rows = program.json { "verify", "--model", program.models .. "demo_llama", "--plans", path, "--prompt-ids", "0,402,401", "--json" }
    os.remove(path)
    assert.equal(2, #rows)
    assert.is_true(rows[1].ok and rows[2].ok)
  end)

  it("exits 1 and says where when a plan differs", function()
    -- A model that is wrong on rank 1 alone: its attention loses a sign there.
    local path = files.temporary([[local weft = require "weft"
      local Llama = require "weft.models.llama"
      local Mine = weft.model "MineForCausalLM" { supported_layer_types = { "attention" } }
      function Mine.build(cfg, weights, policy)
        return Llama.build(cfg, weights, policy, function(c, w, p, i)
          local run = Llama.layer(c, w, p, i)
          return function(x, residual, step)
            local y = run(x, residual, step)
            if i == 2 and weft.rank().rank == 1 then y:fill(0) end
            return y
          end
        end)
      end
      return Mine]], ".lua")
    local code, out = program.run { "verify", path, "--model", program.models .. "demo_llama", "--max-ranks", "2", "--prompt-ids", "0,402,401" }
    os.remove(path)
    assert.equal(1, code)
    assert.is_truthy(out:find("DIFFERS", 1, true))
  end)
end)
