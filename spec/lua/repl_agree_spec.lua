--- spec/lua/repl_agree_spec.lua - what ranks want differently is refused on all, and what was begun is given back.
local Terminal = require "spec.support.terminal"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

-- What a prompt on four ranks says to the lines: standard output, standard error.
local function say(lines)
  local code, out, err = program.run { "repl", "-i", "--model", demo, "-tp", "4", "--timeout", "30", input = lines .. "\n", limit = 60 }
  assert.equal(0, code, err)
  return out, err
end

describe("ranks that want different things at the prompt", function()
  it("are refused by replan and use before anything is built; the old plan stays and runs", function()
    local began = os.time()
    local out, err = say [[
r = weft.rank().rank
before = generate { prompt = "Once", max_tokens = 8, stream = false }.text
model:replan { tensor = 4, attention = { tensor = 2, interleave = r == 1 and 4 or 1 } }
print(pcall(model.replan, model, { tensor = 4, attention = { tensor = r == 2 and 3 or 1 } }))
llama = require "weft.models.llama"
Mine = weft.model "Mine" { supported_layer_types = { "attention", "mlp" } }
function Mine.build(cfg, weights, policy) if r == 3 then error "no luck" end return llama.build(cfg, weights, policy) end
model:use(r == 1 and Mine or llama)
print(pcall(model.use, model, Mine))
function Mine.build(cfg, weights, policy) if r == 3 then weft.nn.rms_norm(cfg, weights:at "model.norm") end return llama.build(cfg, weights, policy) end
model:use(Mine)
print(generate { prompt = "Once", max_tokens = 8, stream = false }.text == before, tostring(policy))
,quit]]
    assert.matches("rank 1 has another policy than rank 0: .*interleave=4.*interleave=1", err)
    assert.matches("false\trank 2: tensor_parallel_size must be divisible", out)
    assert.matches("rank 1 has another model than rank 0: Mine, .*LlamaForCausalLM", err)
    assert.matches("false\trank 3: .*no luck", out)
    assert.matches("rank 3 has another model than rank 0: norm, not embedding;", err)
    assert.matches("true\ttensor=4 block_size=16\n", out)
    assert.is_true(os.time() - began < 15)
  end)

  it("are refused by bench, which looks at all plans and numbers before it measures one", function()
    local out, err = say [[
r = weft.rank().rank
loads = weft.memory().allocations
bench { { tensor = 4, attention = { tensor = r == 2 and 2 or 1 } }, steps = 2, context = 16 }
bench { steps = r == 2 and 2 or 3, context = 16 }
bench { { tensor = 4 }, { tensor = 4, attention = { tensor = 3 } } }
bench { { tensor = 4 }, steps = 100000 }
bench { { tensor = 4, attention = { tensor = 2 } }, batch = 64, context = 200 }
print(weft.memory().allocations - loads < 20)
,quit]]
    assert.matches("rank 2 has another policy than rank 0", err)
    assert.matches("rank 2 has another measurement than rank 0: .*steps = 2, not .*steps = 3", err)
    assert.matches("4 %% 3 != 0. Nearest legal plans: { tensor = 4 }", err)
    assert.matches("takes %d+ positions, and context = 128 with steps = 100000", err)
    assert.matches("the cache holds 8192 tokens", err)
    assert.is_nil(err:match "%-%-context" or err:match "%-%-prefill ")
    assert.matches("true\n", out)
    assert.is_nil(out:match "decode tok/s")
  end)
end)

describe("a replan that does not come to its end", function()
  local terminal
  after_each(function() if terminal then terminal:kill() end end)

  local function open(model, ...)
    terminal = Terminal.open({ program.path, "repl", "--model", model, "-tp", "4", ... }, { WEFT_HISTORY = "" })
    terminal:expect "weft> "
    terminal:line ",time off"
    return terminal
  end

  local function live(t) return tonumber(t:line "weft.memory().live_bytes":match "\n(%d+)\n") end

  local function interrupt(t, text, seconds)
    t:send(text .. "\n")
    t:expect "\n"
    os.execute("sleep " .. seconds)
    t:send "\3"
    return t:expect "weft> "
  end

  it("gives back what it built, after Ctrl-C", function()
    local t = open("spec/fixtures/configs/Qwen--Qwen3-0.6B_config.json", "--load-format", "dummy", "-tpa", "2")
    local before = live(t)
    for _, seconds in ipairs { 0.3, 0.1, 0.5 } do
      assert.matches("interrupted", interrupt(t, "model:replan { tensor = 4, attention = { tensor = 1 } }", seconds))
      assert.is_true(live(t) - before < 1e6)
    end
  end)

  it("gives back what it built, after an error in the model's script", function()
    local t = open(demo)
    t:line "made = 0; attention = weft.nn.hetero_attention"
    t:line "function weft.nn.hetero_attention(o) made = made + 1; if made == 4 then error 'at the fourth' end return attention(o) end"
    local before = live(t)
    for _ = 1, 2 do
      assert.matches("layer 3: .*at the fourth", t:line "made = 0; model:replan { tensor = 4, attention = { tensor = 2 } }")
      assert.is_true(live(t) - before < 1e5)
    end
    t:line "weft.nn.hetero_attention = attention"
    assert.matches("context=2", t:line "model:replan { tensor = 4, attention = { tensor = 2 } }")
  end)

  it("has the plan of before in force again behind an interrupted bench", function()
    local t = open(demo)
    local shown = interrupt(t, "bench { { tensor = 4, attention = { tensor = 2 } }, steps = 150, batch = 16, context = 300 }", 0.6)
    assert.matches("interrupted", shown)
    assert.matches('"tensor=4 block_size=16"', t:line "tostring(model.policy)")
    assert.matches('"tensor=4 block_size=16"', t:line "tostring(policy)")
    assert.matches("tokens", t:line "generate { prompt = 'Once', max_tokens = 4 }")
  end)
end)
