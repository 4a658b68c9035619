--- spec/lua/repl_recorded_spec.lua - one session at a pseudo-terminal, on four CPU ranks, that does all that the
-- prompt can do, from the banner to the end of input.
local Terminal = require "spec.support.terminal"
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"
local ask = 'generate { prompt = "Once upon a time", max_tokens = 20 }'
local terminal, folder

describe("one session on four ranks", function()
  before_each(function()
    folder = files.folder()
  end)
  after_each(function()
    terminal:kill()
    files.remove(folder)
  end)

  it("evaluates, completes, explains, changes plans and scripts, stops, fails and goes on", function()
    local script, llama = folder .. "/mine.lua", files.read "lua/weft/models/llama.lua"
    files.write(script, llama)
    files.write(folder .. "/startup.lua", "function twice(x) return 2 * x end")
    terminal = Terminal.open({ program.path, "repl", script, "--model", demo, "-tp", "4", "--dtype", "float32" },
      { XDG_STATE_HOME = folder, WEFT_STARTUP = folder .. "/startup.lua", WEFT_BENCH_FILE = folder .. "/bench.jsonl", VISUAL = "sed -i s/silu_mul/silu_mul/" })
    local t = terminal
    local function story() return t:line(ask):match "max_tokens = 20 }\n(.-)\n%-%- 20 tokens" end
    local function shows(line, pattern) assert.matches(pattern, t:line(line)) end
    assert.matches("LlamaForCausalLM on 4 ranks.*,help lists the commands", t:expect "weft> ")

    -- rank 0 reads, all evaluate: results without `return`, tables and tensors as what they are
    shows("@3 twice(weft.rank().rank)", "%[3%] 6\n")
    shows("1 + 1, nil, 'x'", "\n2\nnil\n\"x\"\n")
    shows("{ b = { 1, 2 }, a = weft.tensor({ 8, 3072 }, 'bfloat16') }", "\n{ a = bf16%[8, 3072%] cpu:0, b = { 1, 2 } }\n")
    shows("model.layers[0].o_proj.weight", "bf16%[192, 64 @tensor/4%] cpu:0")
    shows("@2 weft.rank().rank", "\n%[2%] 2\n")
    shows("@* weft.rank().rank * 10", "\n%[0%] 0\n%[1%] 10\n%[2%] 20\n%[3%] 30\n")
    shows("_ == nil", "\nfalse\n")
    shows("@9 1", "@ wants a rank from 0 to 3, or %*, got '9'")

    -- time and memory of each line, and without
    shows("2", "\n2\n +[%d.]+ ms, [%d.]+ MB on rank 0")
    shows(",time off", "weft> $")
    assert.is_nil(t:line "3":match " ms, ")
    t:line ",time on"

    -- more than one line, a line again, completion
    t:send "for i = 1, 2 do\n"
    t:expect "%.%.%. "
    shows("print('line ' .. i) end", "\nline 1\nline 2\n")
    t:send "\27[A\n" -- the last entry, whole
    assert.matches("\nline 1\nline 2\n", t:expect "on rank 0")
    t:expect "weft> "
    t:send "weft.layer_p\t.get()\n"
    assert.matches("tensor 0/4", t:expect "on rank 0")
    t:expect "weft> "
    t:send "weft.la\t\t\n" -- two that begin so
    t:expect "layer_parallel  layout"
    t:send "\3print('in' .. 'step')\n" -- completion has shown the prompt again
    t:expect "\ninstep\n"
    t:expect "weft> "

    -- help, doc, mem, plan: from the texts of the sources
    shows(",help", ",reload %[FILE%]")
    shows(",help model:replan", "cuts the loaded model another way.*defined at .*live%.lua:%d+")
    shows("weft.nn.rms_norm?", "RMSNorm over the hidden size")
    shows(",help weft.tensor", "methods:.*:narrow")
    shows(",doc weft.nn.rms_norm", "function nn%.rms_norm%(cfg, weights, size%)")
    shows(",mem", "rank +weights +cache +tensors +peak\n +0 .*\n +3 ")
    shows(",plan", "attention, layers 0%-3: tensor in 4 .*predicted for one decode step on cpu")
    shows(",plan --draw -tp 8 -tpa 2", "│ rank 7 ")
    shows(",plan -tp 3", "Nearest legal plans: %-tp 4, ")
    shows(",plan --search --max-ranks 2", "legal plans on up to 2 ranks")

    -- another plan on the same ranks: other bytes, the same story; two plans side by side, and the times stay
    local first = story()
    assert.matches("there was a", first)
    local before = t:line ",mem":match "0%s+(%S+) MB"
    shows("model:replan { tensor = 4, attention = { tensor = 2 } }", "attention={tensor=2,context=2")
    assert.is_true(tonumber((t:line ",mem":match "0%s+(%S+) MB")) > tonumber(before))
    assert.equal(first, story())
    shows("model:replan { tensor = 8 }", "is for 8 ranks, and there are 4")
    shows("model:replan { tensor = 4, attention = { tensor = 3 } }", "4 %% 3 != 0. Nearest legal plans: { tensor = 4 }, ")
    local compared = t:line "bench { { tensor = 4 }, { tensor = 4, attention = { tensor = 1 } }, steps = 2, context = 32 }"
    assert.matches("tensor=4 block_size=16.*attention={tensor=1,context=4.*decode ms a step +[%d.]+ +[%d.]+\npredicted ms a step +[%d.]+ +[%d.]+\n", compared)
    shows(",plan -tp 4 --context 32", "measured +[%d.]+ ms  by weft bench")
    assert.equal(first, story())

    -- a changed script over the loaded weights; one that cannot be loaded
    files.write(script, (llama:gsub('Llama.mlp%(cfg, weights:at "mlp", policy, i%)', "function(h) return h end")))
    shows(",reload", "the model runs it now")
    assert.not_equal(first, story())
    files.write(script, "this is no Lua")
    shows(",reload", "=.* expected")
    assert.not_equal(first, story())
    files.write(script, llama)
    shows(",edit " .. script, "the model runs it now")
    assert.equal(first, story())

    -- an error on one rank, Ctrl-C on one rank and on all: one for all, and the prompt comes back
    shows("@2 error 'no luck'", "rank 2: .*no luck\n")
    shows("@1 weft.groups.everyone():barrier()", "rank 1: .*")
    for _, line in ipairs { "@3 while true do end", "while true do end", "for i = 1, 1e9 do generate { prompt = 'Once', max_tokens = 30, stream = false } end" } do
      t:send(line .. "\n")
      t:expect "end\n"
      os.execute "sleep 0.3"
      t:send "\3"
      assert.matches("interrupted\n", t:expect "weft> ")
    end
    assert.equal(first, story())

    -- the end of input; history is one entry a statement
    t:send "\4"
    assert.equal(0, t:finish())
    local history = files.read(folder .. "/weft/history"):gsub("\\040", " ")
    assert.matches("for i = 1, 2 do print%('line ' %.%. i%) end", history)
    assert.matches("@%* weft.rank%(%).rank %* 10", history)
  end)
end)
