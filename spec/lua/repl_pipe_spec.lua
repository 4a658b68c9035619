--- spec/lua/repl_pipe_spec.lua - weft repl behind a pipe: results only, up to the first failure.
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

local function repl(input, ...)
  return program.run { "repl", input = input, ... }
end

describe("weft repl without a terminal", function()
  it("runs its input as one chunk, without banner or prompt", function()
    local code, out, err = repl("local x = 20\nfor i = 1, 2 do\n  x = x + i\nend\nprint(x)\n")
    assert.same({ 0, "23\n", "" }, { code, out, err })
  end)

  it("shows an expression's results, and lines of , and @ in their place", function()
    local code, out, err = repl("x = 7\n@* x + weft.rank().rank\n@1 print 'one'; return x\n,time off\nx, nil", "-tp", "2")
    assert.equal(0, code, err)
    assert.equal("[0] 7\n[1] 8\n[1] one\n[1] 7\n7\nnil\n", out)
  end)

  it("stops at the first error with its rank, and exits with 1", function()
    local code, out, err = repl("print 'before'\n@1 error { message = 'no luck' }\n@0 print 'behind'\n", "-tp", "2")
    assert.same({ 1, "before\n", "weft: rank 1: no luck\n" }, { code, out, err })
    code, out, err = repl "x = = 1"
    assert.same({ 1, "" }, { code, out })
    assert.matches("^weft: line 1: ", err)
    assert.equal("weft: two lines\n", select(3, repl "error({ message = 'two\\nlines' })"))
    assert.equal(1, (repl ",nonsense"))
    assert.equal(1, (repl "for i = 1, 3 do"))
    assert.equal(1, (repl("@9 1", "-tp", "2")))
  end)

  it("reloads a module in place, and refuses the parts of weft that the session runs on", function()
    local folder = files.folder()
    files.write(folder .. "/mine.lua", "local m = { v = 1 }\nfunction m.a() return m.b() end\nfunction m.b() return m.v end\nreturn m\n")
    local code, out, err = repl(("package.path = '%s/?.lua'; M = require 'mine'\n,reload mine\nM.v = 9\n@0 M.a()\n"):format(folder))
    assert.same({ 0, folder .. "/mine.lua: loaded\n[0] 9\n" }, { code, out }, err)
    for _, name in ipairs { "weft.nn", "weft.session", "weft" } do
      code, out, err = repl(",reload " .. name)
      assert.same({ 1, "" }, { code, out })
      assert.matches("^weft: " .. name:gsub("%.", "%%.") .. " is a part of weft that this session runs on: ", err)
    end
    code, _, err = repl(",reload " .. folder)
    assert.same({ 1, ("weft: cannot read %s: Is a directory\n"):format(folder) }, { code, err })
    files.remove(folder)
  end)

  it("opens no editor, which would read its input", function()
    for flag, expected in pairs { ["--eager"] = 1, ["-i"] = 0 } do
      local code, _, err = program.run { "repl", flag, input = ",edit mine.lua\n", env = "VISUAL=cat EDITOR=cat", limit = 20 }
      assert.equal(expected, code)
      assert.matches(",edit opens an editor, and standard input is not a terminal; change the file, then say ,reload mine.lua\n", err)
    end
  end)

  it("says what start-up says when the model's script returns no model any more", function()
    local folder = files.folder()
    local script = folder .. "/mine.lua"
    files.write(script, files.read "lua/weft/models/llama.lua")
    local code, _, err = repl(("local f = io.open('%s', 'w')\nf:write 'return 3'\nf:close()\n,reload\n"):format(script), script, "--model", demo)
    assert.equal(1, code)
    assert.matches("must return a model made by weft.model .*, got number", err)
    files.remove(folder)
  end)

  it("says that standard input cannot be read", function()
    local err = io.popen(("%s repl 2>&1 </tmp; echo $?"):format(program.path)):read "*a"
    assert.equal("weft: cannot read standard input: Is a directory\n1\n", err)
  end)

  it("says where input ends too early, what takes no @, what needs a model, and skips a byte order mark", function()
    local function refusal(input) return select(3, repl(input, "-tp", "2")) end
    assert.equal("weft: line 4: the input ends in the middle of a statement: 'end' expected (to close 'for' at line 3)\n",
      refusal "x = 1\n@0 1\nfor i = 1, 3 do\nx = i")
    assert.matches("^weft: line 4: ", refusal "x = 1\n@0 1\nx = 2\ny = = 3")
    assert.equal("weft: commands such as ,mem take no @: leave out @1\n", refusal "@1 ,mem")
    for _, text in ipairs { "model:replan {}", "engine:run()", "generate 'x'" } do
      assert.matches("no model is loaded: start with weft repl %-%-model DIR\n$", refusal(text))
    end
    assert.matches("bad argument #1 to 'show' %(number expected", refusal "weft.tensor({ 1 }, 'float32'):show 'x'")
    assert.same({ 0, "2\n", "" }, { repl "\239\187\1911 + 1" })
  end)

  it("calls on_token of generate in place of streaming", function()
    local code, out, err = repl("generate { prompt = 'Once', max_tokens = 2, on_token = function(_, id) io.write('<', type(id), '>') end }",
      "--model", demo, "-tp", "2")
    assert.equal(0, code, err)
    assert.matches("^<number><number>%-%- 2 tokens", out)
  end)

  it("explains parts of layers, methods of types, and the model where there is none", function()
    local function answer(input, ...)
      local code, out, err = repl(input, ...)
      assert.equal(0, code, err)
      return out
    end
    local loaded = answer("model.layers[0].o_proj?\n,help model.layers[0].qkv_proj\n,help model['name']", "--model", demo)
    assert.matches("row_linear.*methods:\n.*:forward .*qkv_linear 192 %-> 512.*:split_qkv.*LlamaForCausalLM, a string\n$", loaded)
    assert.equal("t:show([n])\n", answer ",help tensor:show")
    assert.equal("t:show([n])\n", answer ",help weft.tensor:show")
    assert.equal(":get_output_size(n)\n", answer ",help weft.plan:get_output_size")
    assert.matches("cuts the loaded model another way.*defined at", answer ",help model:replan")
    assert.matches("\nweft.tensor: a small tensor API for scripts, specs and the prompt%.\n.*:view +t:view{...}\n", answer ",help weft.tensor")
    assert.matches("weft.nn.layers +All decoder layers: layer%(cfg", answer ",help weft.nn")
    assert.equal(1, (repl ",help model..x"))
  end)

  it("prompts all the same under -i, and goes on after an error", function()
    local code, out, err = repl("1 +\n2\nerror 'x'\n'still here'\n", "-i")
    assert.equal(0, code)
    assert.matches("weft> ", out)
    assert.matches("%.%.%. 3\n", out)
    assert.matches("still here", out)
    assert.matches("x\n", err)
  end)

  it("refuses a collective that one rank would enter alone, instead of waiting", function()
    local code, _, err = repl("@1 weft.groups.everyone():barrier()", "-tp", "4", "--timeout", "20")
    assert.equal(1, code)
    assert.matches("rank 1: .*only rank 1 evaluates this line", err)
  end)

  it("leaves with the code of quit and os.exit", function()
    assert.equal(3, (repl("quit(3)", "-tp", "2")))
    assert.equal(4, (repl "os.exit(4)"))
    assert.equal(0, (repl ",quit\nerror 'not reached'"))
  end)

  it("says what is wrong with its flags and files before a prompt", function()
    assert.equal(2, (repl("1", "--model", demo, "-tp", "3")))
    assert.equal(1, (repl("1", "no_such_script.lua")))
    assert.equal(2, (repl("1", "--frobnicate")))
  end)
end)

describe("a model at the prompt", function()
  it("gives the same tokens after each replan, and other bytes", function()
    local code, out, err = repl([[
ids = { 1, 43, 77, 105, 9, 31 }
function tell() return table.concat(generate { prompt_ids = ids, max_tokens = 12, stream = false, ignore_eos = true }.output_ids, " ") end
first = tell()
print(first, model:bytes()[1].weights)
model:replan { tensor = 4, attention = { tensor = 2 } }
print(tell(), model:bytes()[1].weights)
model:replan { tensor = 4, attention = { tensor = 1 }, exchange = "a2a" }
print(tell(), model:bytes()[1].weights)
model:replan { tensor = 4 }
print(tell(), model:bytes()[1].weights)
]], "--model", demo, "-tp", "4", "--dtype", "float32")
    assert.equal(0, code, err)
    local tokens, bytes = {}, {}
    for ids, count in out:gmatch "([%d ]+)\t(%d+)\n" do
      tokens[#tokens + 1], bytes[#bytes + 1] = ids, tonumber(count)
    end
    assert.equal(4, #tokens)
    for i = 2, 4 do assert.equal(tokens[1], tokens[i]) end
    assert.is_true(bytes[1] < bytes[2] and bytes[2] < bytes[3])
    assert.equal(bytes[1], bytes[4])
  end)

  it("keeps the old plan, its groups and its tokens where the new one is refused or fails on a rank", function()
    local code, out, err = repl([[
before = generate { prompt = "Once", max_tokens = 8, stream = false }.text
print(pcall(model.replan, model, { tensor = 2 }))
print(pcall(model.replan, model, { tensor = 4, attention = { tensor = 3 } }))
print(generate { prompt = "Once", max_tokens = 8, stream = false }.text == before, policy.tensor)
]], "--model", demo, "-tp", "4")
    assert.equal(0, code, err)
    assert.matches("false\t.*for 2 ranks, and there are 4", out)
    assert.matches("true\t4\n$", out)
  end)

  it("goes on after a rank failed in the middle of a replan", function()
    local input = [[
before = generate { prompt = "Once", max_tokens = 8, stream = false }.text
@1 Sources = require "weft.weights"; original = Sources.source
@1 function Sources.source(w, name, ...) if name == "weight" and w.prefix:find "layers.2.mlp.down_proj" then error "bad disk" end return original(w, name, ...) end
model:replan { tensor = 4, attention = { tensor = 2 } }
@1 Sources.source = original
generate { prompt = "Once", max_tokens = 8, stream = false }.text == before, tostring(policy), model:replan { tensor = 4, attention = { tensor = 2 } } == model
generate { prompt = "Once", max_tokens = 8, stream = false }.text == before
,quit
]]
    local code, out, err = repl(input, "-i", "--model", demo, "-tp", "4", "--dtype", "float32")
    assert.equal(0, code, err)
    assert.matches("rank 1: .*bad disk", err)
    assert.matches('true\n"tensor=4 block_size=16"\ntrue\n', out)
    assert.matches("true\nweft> $", out)
  end)

  it("computes requests that run again after a replan, to the same tokens", function()
    local code, out, err = repl([[
function tell(replan)
  local told
  engine:submit { prompt = "Once upon a time", max_tokens = 12, on_finish = function(r) told = r.text end }
  for i = 1, 5 do engine:step() end
  if replan then model:replan { tensor = 2, attention = { tensor = 1 } } end
  engine:run()
  return told
end
print(tell(false))
print(tell(true))
print(tell(false))
]], "--model", demo, "-tp", "2", "--dtype", "float32")
    assert.equal(0, code, err)
    local first, second, third = out:match "^([^\n]+)\n([^\n]+)\n([^\n]+)\n$"
    assert.is_true(first ~= nil and #first > 10)
    assert.equal(first, second)
    assert.equal(first, third)
  end)

  it("gives the memory of old plans back, though steps of theirs were compiled", function()
    local code, out, err = program.run { "repl", "--model", demo, "-tp", "2", input = [[
      live = {}
      for i = 1, 4 do
        model:replan { tensor = 2 }
        generate { prompt = "Once upon a time", max_tokens = 60, stream = false }
        live[i] = weft.memory().live_bytes
      end
      print(model.num_blocks * model.bytes_per_block, live[4] - live[1])]] }
    assert.equal(0, code, err)
    local cache, more = out:match "(%d+)%s+(%-?%d+)"
    assert.is_true(tonumber(more) < tonumber(cache) / 100, out)
  end)

  it("measures nothing else than was asked for", function()
    for line, said in pairs { ["bench { contxt = 4 }"] = "bench has no option 'contxt'", ["bench { steps = 0 }"] = "steps is a whole number from 1, got 0",
      ["bench { batch = 1000 }"] = "a step takes 64 requests, and a batch of 1000 was asked for", ["bench(5)"] = "bench needs a table",
      ["bench { batch = 64, context = 200 }"] = "the cache holds 8192 tokens, and 64 requests of 200 with 16 steps need 15360" } do
      local code, _, err = program.run { "repl", "--model", demo, "-tp", "2", input = line }
      assert.equal(1, code)
      assert.is_truthy(err:find(said, 1, true), err)
    end
  end)

  it("stands engine, requests and bench", function()
    local code, out, err = repl([[
engine:submit { prompt = "Once upon a time", max_tokens = 5, on_finish = function(r) print(#r.output_ids) end }
engine:submit { prompt = "The", max_tokens = 3, on_finish = function(r) print(#r.output_ids) end }
engine:run()
rows = bench { { tensor = 2 }, { tensor = 2, attention = { tensor = 1 } }, steps = 2, context = 16 }
print(rows)
print(tostring(policy))
]], "--model", demo, "-tp", "2")
    assert.equal(0, code, err)
    assert.matches("^3\n5\n", out)
    assert.matches("decode tok/s", out)
    assert.matches("attention={tensor=1,context=2", out)
    assert.matches("\ntensor=2 block_size=16\n$", out)
  end)

  it("reads lines behind a mark of UTF-8, and tells of a piece that the input ends in", function()
    local code, out, err = program.run { "repl", "-i", input = "\239\187\191print(3)\nfor i = 1, 2 do\n" }
    assert.equal(0, code)
    assert.matches("> 3\n", out)
    assert.matches("\n%(dropped: the input ends within this piece%)\n$", err)
  end)

  it("ends at a Ctrl-C that comes while ranks wait for input, all of them", function()
    -- The signal comes while rank 0 reads: the end of input is then not a turn that it interrupts.
    for _, flags in ipairs { "", "-i" } do
      local command = ("(sleep 3) | timeout --preserve-status -s INT 1.5 env WEFT_BENCH_FILE=/dev/null %s repl -tp 2 %s >/dev/null 2>&1"):format(program.path, flags)
      local status = os.execute(("timeout 100 bash -c '%s'"):format(command))
      assert.is_true(status == 130 * 256 or flags == "-i" and status == 0, tostring(status))
    end
  end)
end)
