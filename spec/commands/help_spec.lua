--- spec/commands/help_spec.lua - what --help lists is what a command takes.
local flags = require "weft.flags"
local plan = require "weft.commands.plan"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

-- The flags that the text of a command's help names.
local function listed(name)
  local code, out = program.run { name, "--help" }
  assert.equal(0, code)
  local names = {}
  for line in out:gmatch "[^\n]+" do
    local first = line:match "^  (%-.*)" or line:match "^  Taken as well, and without effect here: (.*)"
    while first do
      local flag, rest = first:match "^(%-[%w%-]+),? ?(.*)"
      if flag then names[flag] = true end
      first = flag and rest:sub(1, 1) == "-" and rest or nil
    end
  end
  return names
end

local function takes(name, flag, value)
  local ok, failure = pcall(flags.parse, name, { flag, value }, 1)
  return ok or not failure.message:find("unknown flag", 1, true)
end

describe("weft COMMAND --help", function()
  it("lists every flag that the command takes, and no other", function()
    local all = {}
    for _, name in ipairs(flags.order) do
      for flag in pairs(listed(name)) do all[flag] = true end
    end
    for _, name in ipairs(flags.order) do
      local own = listed(name)
      for flag in pairs(all) do
        if name ~= "lua" then assert.equal(own[flag] or false, takes(name, flag, "1"), ("weft %s %s"):format(name, flag)) end
      end
    end
  end)

  it("of weft plan names those that change nothing: the others are looked at", function()
    local looked = {}
    for _, more in ipairs { {}, { search = true, max_ranks = 2 }, { draw = true, json = false } } do
      local given = { model = demo, json = true, context = 64 }
      for key, value in pairs(more) do given[key] = value end
      local options = setmetatable({}, { __index = function(_, key)
        looked[key] = true
        return given[key]
      end })
      local out = io.stdout
      io.stdout = io.open("/dev/null", "w")
      local ok, failure = pcall(plan.run, options)
      io.stdout = out
      assert.is_true(ok, failure)
    end
    for _, group in ipairs(flags.commands.plan.groups) do
      for _, def in ipairs(group) do assert.is_true(looked[def.key], def[1]) end
    end
  end)

  it("gives no hint where nothing is near, and logits takes one prompt", function()
    local code, _, err = program.run { "logits", "-f", "x" }
    assert.same({ 2, "weft: unknown flag '-f' for weft logits; see weft logits --help\n" }, { code, err })
    code, _, err = program.run { "logits", "--model", demo }
    assert.same({ 2, "weft: a prompt is missing: --prompt TEXT or --prompt-ids 5,6,7\n" }, { code, err })
    code, _, err = program.run { "run", "--model", demo, "--prompt", "x", "-f", "x" }
    assert.same({ 2, "weft: --prompt and -f exclude one another\n" }, { code, err })
    assert.equal(0, (program.run { "lua", "-h" }))
  end)
end)
