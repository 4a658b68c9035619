--- spec/lua/tokenize_spec.lua - the command weft tokenize.
local core = require "weft.core"
local support = require "spec.support.tokenizers"

local program = (os.getenv "WEFT_BUILD" or "build") .. "/weft tokenize "

--- Standard output, standard error and exit code of the command.
local function run(arguments)
  local out, err = os.tmpname(), os.tmpname()
  local code = os.execute(program .. arguments .. " >" .. out .. " 2>" .. err)
  local function take(path)
    local file = io.open(path, "rb")
    local text = file:read "*a"
    file:close()
    os.remove(path)
    return text
  end
  return take(out), take(err), code >= 256 and code / 256 or code
end

describe("weft tokenize", function()
  local model = "--model spec/fixtures/tokenizers/mini-llama3 "

  it("prints the ids of a prompt as one JSON array, with and without special tokens", function()
    assert.equal("[1018,39,327,289,11,867,383,0]\n", (run(model .. "--prompt 'Hello, world!'")))
    assert.equal("[39,327,289,11,867,383,0]\n", (run(model .. "--no-special --prompt 'Hello, world!'")))
    assert.equal("[]\n", (run(model .. "--no-special --prompt ''")))
  end)

  it("reads a JSON string a line and prints an array a line", function()
    local cases = support.json "tokenizers/mini-llama3/golden.json".cases
    local path, wanted = os.tmpname(), {}
    local file = assert(io.open(path, "wb"))
    for _, case in ipairs(cases) do
      file:write(core.json.encode(case.text), "\n")
      wanted[#wanted + 1] = core.json.encode(core.json.array(case.ids))
    end
    file:close()
    assert.equal(table.concat(wanted, "\n") .. "\n", (run(model .. "--no-special -f " .. path)))
    os.remove(path)
  end)

  it("prints the text of ids", function()
    assert.equal("<|begin_of_text|>Hel\n", (run(model .. "--decode 1018,39,327")))
    assert.equal("Hel\n", (run(model .. "--no-special --decode 1018,39,327")))
  end)

  it("says what is wrong in one line: 2 for usage, 1 for files", function()
    local function fails(arguments, wanted_code, part)
      local out, err, code = run(arguments)
      assert.equal(wanted_code, code)
      assert.equal("", out)
      assert.is_truthy(err:find(part, 1, true), err)
      assert.equal(1, select(2, err:gsub("\n", "")))
    end
    fails(model, 2, "wants one of --prompt TEXT")
    fails(model .. "--prompt a --decode 1", 2, "wants one of --prompt TEXT")
    fails(model .. "--decode 1,x", 2, "found 'x'")
    fails(model .. "--decode 5000", 2, "no token 5000")
    fails("--model spec/fixtures/configs --prompt a", 1, "spec/fixtures/configs/tokenizer.json")
    fails(model .. "-f spec/helper.lua", 1, "line 1 of spec/helper.lua: wanted a JSON string")
    fails(model .. "-f spec/no-such-file", 1, "spec/no-such-file")
  end)
end)
