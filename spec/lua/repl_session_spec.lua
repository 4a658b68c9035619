--- spec/lua/repl_session_spec.lua - ten minutes at a terminal, on four CPU ranks.
local Terminal = require "spec.support.terminal"
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"
local terminal, scratch

describe("weft repl at a terminal", function()
  before_each(function()
    scratch = os.tmpname()
    terminal = nil
  end)
  after_each(function()
    if terminal then terminal:kill() end
    os.execute("rm -f " .. scratch .. "*")
  end)

  it("does the ten minutes: look, replan, see bytes change, run, write a layer, run again, survive", function()
    terminal = Terminal.open({ program.path, "repl", "--model", demo, "-tp", "4", "--dtype", "float32" }, { WEFT_HISTORY = scratch .. ".history" })
    local t = terminal
    assert.matches("LlamaForCausalLM on 4 ranks", t:expect "weft> ")

    -- a layer, its parts, and what each rank holds of one
    assert.matches("attention = weft.hetero_attention.*qkv_proj = qkv_linear", t:line "model.layers[0]")
    local held = t:line "@* model.layers[0].qkv_proj"
    assert.matches("%[0%] qkv_linear 192 .*heads 0 to 1 of 8.*%[3%] qkv_linear 192 .*heads 6 to 7 of 8", held)
    assert.matches(" ms, .* MB on rank 0", held)
    assert.matches("bf16%[192, 64 @tensor/4%] cpu:0", t:line "model.layers[0].o_proj.weight")
    assert.matches("f32%[2, 128 @tensor/4%] cpu:0", t:line "model.layers[0].qkv_proj:forward(weft.tensor({2, 192}, 'float32'))")
    assert.matches("i32%[3%] cpu:0", t:line "weft.tensor({3}, 'int32')")

    -- a story, another plan, other bytes, the same story
    local ask = 'generate { prompt = "Once upon a time", max_tokens = 24 }'
    local story = t:line(ask):match ".*= 24 }\n(.-)\n%-%- 24 tokens"
    assert.matches("there was a", story)
    local before = t:line ",mem":match "0%s+(%S+) MB"
    assert.matches("attention={tensor=2,context=2", t:line "model:replan { tensor = 4, attention = { tensor = 2 } }")
    local after = t:line ",mem":match "0%s+(%S+) MB"
    assert.is_true(tonumber(after) > tonumber(before))
    assert.matches("context 2 in strips of 1", t:line ",plan")
    assert.equal(story, t:line(ask):match ".*= 24 }\n(.-)\n%-%- 24 tokens")

    -- a layer written in Lua: the last one without its MLP
    t:line "llama = require 'weft.models.llama'"
    t:send "function layer(cfg, weights, policy, i)\n"
    t:expect "%.%.%. "
    t:line("if i < 3 then return llama.layer(cfg, weights, policy, i) end", "%.%.%. ")
    t:line("local attention = llama.attention(cfg, weights:at 'self_attn', policy, i)", "%.%.%. ")
    t:line("return llama.decoder(cfg, weights, attention, function(h) return h end)", "%.%.%. ")
    t:line "end"
    t:line "Mine = weft.model 'Mine' { supported_layer_types = { 'attention', 'mlp' } }"
    t:line "function Mine.build(cfg, weights, policy) return llama.build(cfg, weights, policy, layer) end"
    assert.matches("Mine on 4 ranks", t:line "model:use(Mine)")
    assert.is_nil(t:line "model.layers[3]":match "down_proj =")
    local other = t:line(ask):match ".*= 24 }\n(.-)\n%-%- 24 tokens"
    assert.not_equal(story, other)
    t:line "model:use(llama)"
    assert.equal(story, t:line(ask):match ".*= 24 }\n(.-)\n%-%- 24 tokens")

    -- Ctrl-C in a loop, in a generation, at the prompt; an error on one rank
    t:send "while true do end\n"
    t:expect "true do end"
    os.execute "sleep 0.3"
    t:send "\3"
    assert.matches("interrupted\n", t:expect "weft> ")
    t:send "for i = 1, 1e9 do generate { prompt = 'Once', max_tokens = 50, stream = false } end\n"
    t:expect "false } end"
    os.execute "sleep 0.4"
    t:send "\3"
    assert.matches("interrupted\n", t:expect "weft> ")
    t:send "half a line\3"
    t:expect "weft> "
    assert.matches("rank 2: no luck\n", t:line "@2 error { message = 'no luck' }")
    assert.matches("rank %d: .*is an error", t:line "error 'this is an error'")
    assert.equal(story, t:line(ask):match ".*= 24 }\n(.-)\n%-%- 24 tokens")

    -- two plans side by side
    assert.matches("decode tok/s", t:line "bench { { tensor = 4 }, { tensor = 4, attention = { tensor = 2 } }, steps = 2, context = 32 }")
    t:send "\4"
    assert.equal(0, t:finish())
  end)

  it("does what the README's first ten minutes say, word for word", function()
    local section = files.read "README.md":match "## The first ten minutes(.-)\n## "
    terminal = Terminal.open({ program.path, "repl", "--model", demo, "-tp", "4" }, { WEFT_HISTORY = "" })
    local t, typed, refused = terminal, 0, {}
    t:expect "weft> "
    for line, behind in section:gmatch "\n([w ][ef ][f.][t.][>.] [^\n]*)()" do
      local text = line:sub(7)
      local more = section:sub(behind):match "^\n  %.%.%. "
      if text == ",quit" then break end
      local shown = t:line(text, more and "  %.%.%. " or "weft> ")
      typed = typed + 1
      if shown:match "\nrank %d: " or shown:match "nothing is called" or shown:match "\nline %d+: " then refused[#refused + 1] = text end
    end
    assert.is_true(typed >= 20)
    assert.same({ '@2 error "no luck"' }, refused)
    t:send ",quit\n"
    assert.equal(0, t:finish())
    local stories, seen = {}, 0
    for story in t.screen:gmatch "max_tokens = 40 }\n(.-)\n%-%- %d+ tokens" do
      seen = seen + 1
      stories[seen] = story:match "[^\n]*$"
    end
    assert.equal(3, seen)
    assert.equal(stories[1], stories[2])
    assert.not_equal(stories[1], stories[3])
  end)

  it("takes a blank line into a statement, drops it at two, recalls its lines, and gives the terminal back at SIGTERM", function()
    terminal = Terminal.open({ program.path, "repl", "--model", demo, "-tp", "2" }, { WEFT_HISTORY = "" })
    local t = terminal
    t:expect "weft> "
    t:send "function f()\n\n  return 42\nend\n"
    t:expect "weft> "
    assert.matches("\n42\n", t:line "f()")
    t:send "function g()\n\n\n"
    assert.matches("%(dropped%)\n", t:expect "weft> ")
    t:send "function g()\n"
    t:expect "%.%.%. "
    t:send "\3"
    assert.matches("%(dropped%)\n", t:expect "weft> ")
    t:send "s = [[a\nb]]\n"
    t:expect "on rank 0.-weft> "
    t:line "s = nil"
    t:send "\27[A\27[A\n"
    t:expect "on rank 0.-weft> "
    assert.matches('"a\\nb"', t:line "s")
    t:send ",plan --model spec/fixtures/configs/Qwen--Qwen3-235B-A22B_config.json --search --max-ranks 1024\n"
    t:expect "1024\n"
    t:send "\3"
    assert.matches("interrupted\n", t:expect "weft> ")
    assert.is_false(t:edits_lines())
    t:signal(15)
    assert.is_true(t:waits_until_it_edits_lines())
    assert.equal("signal 15", t:finish())
  end)

  it("reloads a changed script over the loaded weights, and keeps the old one when it cannot be loaded", function()
    local script = scratch .. ".lua"
    local llama = files.read "lua/weft/models/llama.lua"
    files.write(script, llama)
    terminal = Terminal.open({ program.path, "repl", script, "--model", demo, "-tp", "4" },
      { WEFT_HISTORY = "", EDITOR = "sed -i s/silu_mul/silu_mul/" })
    local t = terminal
    t:expect "weft> "
    local ask = 'generate { prompt = "The farm", max_tokens = 16 }'
    local function story() return t:line(ask):match ".*= 16 }\n(.-)\n%-%- %d+ tokens" end
    local first = story()
    t:line "loads = weft.memory().allocations"
    files.write(script, (llama:gsub('Llama.mlp%(cfg, weights:at "mlp", policy, i%)', "function(h) return h end")))
    assert.matches("the model runs it now", t:line ",reload")
    assert.not_equal(first, story())
    files.write(script, "this is no Lua")
    assert.matches("=.* expected", t:line ",reload")
    files.write(script, (llama:gsub("local o_proj = nn.row_linear {", "error 'half way' local o_proj = nn.row_linear {")))
    assert.matches("layer 0: .*half way", t:line ",reload")
    assert.not_equal(first, story())
    files.write(script, llama)
    assert.matches("the model runs it now", t:line(",edit " .. script))
    assert.equal(first, story())
    t:send ",quit\n"
    assert.equal(0, t:finish())
  end)

  it("keeps no history where that is no file to keep", function()
    local pipe = scratch .. ".pipe"
    os.execute("mkfifo " .. pipe)
    terminal = Terminal.open({ program.path, "repl" }, { WEFT_HISTORY = pipe })
    assert.matches("no history is kept: cannot read " .. pipe:gsub("%p", "%%%0") .. ": not a regular file %(WEFT_HISTORY names the file%)\n", terminal:expect "weft> ")
    terminal:send "\4"
    assert.equal(0, terminal:finish())
    os.remove(pipe)
  end)

  it("edits lines: history without repeats and lines that begin with a space, completion, more lines", function()
    terminal = Terminal.open({ program.path, "repl" }, { WEFT_HISTORY = scratch .. ".history" })
    local t = terminal
    t:expect "weft> "
    t:line "x = 41"
    t:line "x = 41"
    t:line " secret = 1"
    t:send "if x then\n"
    t:expect "%.%.%. "
    assert.matches("\n42\n", t:line "print(x + 1) end")
    t:send "weft.layer_p\t"
    t:expect "layer_parallel"
    t:send ".get()\n"
    assert.matches("tensor 0/1", t:expect "on rank 0")
    t:send "print('in' .. 'step')\n" -- completion may have shown the prompt again
    t:expect "\ninstep\n"
    t:expect "weft> "
    assert.matches("a local lives as long as its line", t:line "local y = 1")
    assert.is_nil(t:line "local y = 2":match "a local lives")
    assert.matches("RMSNorm over the hidden size", t:line "weft.nn.rms_norm?")
    t:line ",time off"
    assert.is_nil(t:line "1":match " ms, ")
    t:send "\4"
    assert.equal(0, t:finish())
    local history = files.read(scratch .. ".history"):gsub("\\040", " ")
    local _, count = history:gsub("x = 41", "")
    assert.equal(1, count)
    assert.is_nil(history:match "secret")
    assert.matches("if x then print%(x %+ 1%) end", history)
  end)

  it("says so when a call of C cannot be stopped, and ends at the second Ctrl-C", function()
    terminal = Terminal.open({ program.path, "repl", "-tp", "2" }, { WEFT_HISTORY = "" })
    local t = terminal
    t:expect "weft> "
    t:send "(function() return string.rep('a', 5000):find(string.rep('a-', 8) .. 'b') end)()\n"
    t:expect "end%)%(%)\n"
    os.execute "sleep 0.3"
    t:send "\3"
    t:expect("Ctrl%-C again ends weft\n", 10)
    t:send "\3"
    assert.equal(130, t:finish())
  end)

  it("knows the keys that terminals send: Delete, Home, End, Control with arrows, letters of more than one byte", function()
    terminal = Terminal.open({ program.path, "repl" }, { TERM = "xterm", WEFT_HISTORY = "" })
    local t = terminal
    t:expect "weft> "
    for keys, shown in pairs { ["123\27[D\27[D\27[3~"] = "13", ["23\27[H1"] = "123", ["23\27[1~1"] = "123", ["12\27[D\27[F3"] = "123", ["13\27[D\27[4~5"] = "135",
      ["10 + 20\27[1;5D3"] = "330", ["'äöü€\127\127x'"] = '"äöx"' } do
      t:send(keys .. "\n")
      assert.is_truthy(t:expect("on rank 0"):find("\n" .. shown .. "\n", 1, true), keys)
      t:expect "weft> "
    end
    t:send "\4"
    assert.equal(0, t:finish())
  end)
end)
