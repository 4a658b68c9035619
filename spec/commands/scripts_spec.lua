--- spec/commands/scripts_spec.lua - the first scripts of a newcomer say what they do, and what they take.
local files = require "spec.support.files"

describe("scripts that install and build", function()
  local folder
  setup(function()
    folder = files.folder {
      cmake = "#!/bin/sh\n[ \"$1\" != --build ] || for i in 1 20 40; do echo \"[$i/40] cc\"; done\n[ ! -e \"$0.fails\" ] || { echo a broken line; exit 1; }\n",
      ["dpkg-query"] = "#!/bin/sh\nexit 1\n", ["apt-get"] = "#!/bin/sh\necho noise\n", id = "#!/bin/sh\necho 0\n",
    }
    os.execute("chmod +x " .. folder .. "/*")
  end)
  teardown(function() files.remove(folder) end)

  -- Exit code, standard output, standard error.
  local function run(command)
    local code = os.execute(("env PATH=%s:$PATH %s >%s.out 2>%s.err"):format(folder, command, folder, folder)) / 256
    local out, err = files.read(folder .. ".out"), files.read(folder .. ".err")
    os.remove(folder .. ".out")
    os.remove(folder .. ".err")
    return code, out, err
  end

  it("show with --help what they do and refuse what they do not take", function()
    for name, taken in pairs { quickstart = "x", setup = "x", build = "-DWEFT_CUDA=OFF" } do
      local code, out, err = run("scripts/" .. name .. " --help")
      assert.same({ 0, "" }, { code, err })
      assert.matches("^scripts/" .. name .. "[ :]", out)
      code, out, err = run(("scripts/%s %s"):format(name, taken))
      assert.same({ 2, "" }, { code, out })
      assert.matches(("^%s: [^\n]*'%s'; scripts/%s %%-%%-help says what it [a-z]+\n$"):format(name, taken:gsub("%-", "%%-"), name), err)
    end
  end)

  it("build into a new folder or that of an earlier build, and nowhere else", function()
    for words, said in pairs { scripts = "a new folder or that of an earlier build, got 'scripts'", ["README.md"] = "a new folder or that of an earlier build, got 'README.md'",
      ["there more"] = "CMake options follow the folder, got 'more'; scripts/build --help says what it takes" } do
      assert.same({ 2, "", "build: " .. said .. "\n" }, { run("scripts/build " .. words) })
    end
  end)

  it("that test say with --help what they do, and do nothing then", function()
    for _, name in ipairs { "test", "specs", "sanitize", "cuda-compile" } do
      local code, out, err = run("scripts/" .. name .. " --help")
      assert.same({ 0, "" }, { code, err })
      assert.matches("^scripts/" .. name:gsub("%-", "%%-") .. "[ :]", out)
    end
  end)

  it("say on standard error what takes its time", function()
    local code, out, err = run "scripts/setup"
    assert.same({ 0, "noise\n" }, { code, out })
    assert.matches("^setup: installing gcc .*\nsetup: apt%-get reads the lists of packages\nsetup: apt%-get fetches and installs", err)
    code, out, err = run "scripts/build there"
    assert.same({ 0, "", "build: there \nbuild: 50%, step 20 of 40\nbuild: 100%, step 40 of 40\n" }, { code, out, err })
  end)

  it("show what failed of a build", function()
    files.write(folder .. "/cmake.fails", "")
    local code, _, err = run "scripts/build there"
    assert.equal(1, code)
    assert.matches("\na broken line\nbuild: failed\n$", err)
  end)
end)
