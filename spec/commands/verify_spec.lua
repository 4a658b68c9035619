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

  it("feeds the prompts of a file, and refuses several kinds of prompts at once", function()
    local path = files.temporary("Once\nThe dog\n", ".txt")
    local demo = program.models .. "demo_llama"
    local _, out = program.run { "verify", "--model", demo, "--max-ranks", "1", "--max-tokens", "2", "-f", path }
    os.remove(path)
    assert.matches("1 plan, 2 prompts: all agree with one rank", out, 1, true)
    local code, _, err = program.run { "verify", "--model", demo, "--prompt-ids", "1", "--prompt", "x" }
    assert.equal(2, code)
    assert.matches("exclude one another", err, 1, true)
    code, _, err = program.run { "verify", "--model", demo, "-f", "/dev/null" }
    assert.equal(1, code)
    assert.matches("-f /dev/null: it has no prompts", err, 1, true)
  end)

  it("refuses an expected.json without prompts instead of agreeing about none", function()
    local folder = files.folder()
    assert(os.execute(("cp %sdemo_llama/* %s"):format(program.models, folder)) == 0)
    for text, found in pairs { ["[]"] = "no list, or an empty one", ["{"] = "what is not JSON", ["[5]"] = "case 1 without them",
      ['[{"prompt_ids":[5]},{"prompt_ids":["a"]}]'] = "case 2 with a string among them" } do
      files.write(folder .. "/expected.json", text)
      local code, out, err = program.run { "verify", "--model", folder, "--max-ranks", "1" }
      assert.same({ 1, "" }, { code, out })
      assert.matches("expected.json: wanted a list of cases with prompt_ids, found " .. found, err, 1, true)
    end
    files.remove(folder)
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
