--- spec/model/safetensors_spec.lua - hostile and odd files, one line each.
local core = require "weft.core"
local files = require "spec.support.files"
local folder = "spec/fixtures/bad_files/safetensors/"

describe("safetensors", function()
  local path = files.temporary("", ".safetensors")
  teardown(function() os.remove(path) end)

  local function open(header, data_bytes)
    files.write(path, files.safetensors(header, ("\1"):rep(data_bytes or 0)))
    return core.checkpoint.open(path)
  end

  local cases = assert(core.json.decode(files.read(folder .. "cases.json"))).cases
  local stricter = { ["ok-dup-key-last-wins"] = "tensor 'a' is there twice" }
  for name, case in pairs(cases) do
    local refusal = stricter[name] or (case.expect ~= "accept" and ".")
    it((refusal and "refuses " or "reads ") .. name .. ": " .. case.why, function()
      local checkpoint, message, code = core.checkpoint.open(folder .. name .. ".safetensors")
      if not refusal then return assert.is_truthy(checkpoint, message) end
      assert.is_nil(checkpoint)
      assert.equal("format", code)
      assert.equal(1, select(2, (message .. "\n"):gsub("\n", "")))
      assert.is_truthy(message:find(name, 1, true), message)
      if stricter[name] then assert.is_truthy(message:find(refusal, 1, true), message) end
    end)
  end

  it("names the tensor and what is wrong with it", function()
    local function message(header, bytes) return (select(2, open(header, bytes))) end
    local function says(wanted, header, bytes)
      local found = message(header, bytes)
      assert.is_truthy(found and found:find(wanted, 1, true), tostring(found))
    end
    says("tensor 'w': its shape needs 8 bytes, data_offsets hold 4", '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4)
    says("tensor 'w': unknown dtype 'F33'", '{"w":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}', 4)
    says("tensor 'w': shape is missing", '{"w":{"dtype":"F32","data_offsets":[0,4]}}', 4)
    says("tensor 'w': a field that is there twice", '{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4)
    says("tensor 'w' begins at byte 4, but the one before ends at 0 (a hole)", '{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8)
    says("(the file is cut short)", '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 3)
    says("(bytes behind the last tensor)", '{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 5)
    says("text behind the header's last brace", "{} {}")
    says("nested too deeply", '{"w":{"x":' .. ("["):rep(100) .. ("]"):rep(100) .. "}}")
    says("more than 8 numbers", '{"w":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}', 1)
    says("longer than 1024 bytes", '{"' .. ("n"):rep(1025) .. '":{}}')
    says("a bad escape", '{"a\\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)
    says("a string that is not UTF-8", '{"\237\160\128":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)
  end)

  it("says which file is missing", function()
    local checkpoint, message, code = core.checkpoint.open "no/such.safetensors"
    assert.same({ nil, "no/such.safetensors: No such file or directory", "io" }, { checkpoint, message, code })
    assert.is_truthy(select(2, core.checkpoint.open "/dev/null"):find("not a regular file", 1, true))
  end)

  it("reads unaligned tensors and refuses other dtypes only when they are used", function()
    local checkpoint = assert(open('{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},' ..
      '"b":{"dtype":"F16","shape":[2],"data_offsets":[3,7]},"c":{"dtype":"I64","shape":[1],"data_offsets":[7,15]},' ..
      '"d":{"dtype":"U8","shape":[1,1,1,1,1],"data_offsets":[15,16]}}', 16))
    local value = 257 * 2 ^ -24
    assert.same({ value, value }, checkpoint:source("b"):tensor("float32"):totable())
    assert.error_matches(function() checkpoint:source "c" end, "dtype I64 of tensor 'c' is not one weft reads", 1, true)
    assert.error_matches(function() checkpoint:source "d" end, "tensor 'd' has 5 dimensions", 1, true)
  end)

  it("survives a few thousand damaged headers", function()
    local whole = files.read(folder .. "ok-two-zero-same-offset.safetensors") .. ""
    local seed, opened = 12345, 0
    local function random(n)
      seed = (seed * 16807) % 2147483647
      return seed % n
    end
    for _ = 1, 3000 do
      local text = whole
      for _ = 1, 1 + random(3) do
        local at = 1 + random(#text)
        local kind = random(3)
        local byte = string.char(random(256))
        if kind == 0 then text = text:sub(1, at - 1) .. byte .. text:sub(at + 1)
        elseif kind == 1 then text = text:sub(1, at - 1) .. text:sub(at + 1)
        else text = text:sub(1, at) .. byte .. text:sub(at + 1) end
      end
      files.write(path, text)
      local checkpoint, message = core.checkpoint.open(path)
      if checkpoint then
        opened = opened + 1
        for _, name in ipairs(checkpoint:names()) do pcall(function() checkpoint:source(name):tensor() end) end
        checkpoint:close()
      else
        assert.is_truthy(message:find(path, 1, true))
      end
    end
    assert.is_true(opened > 0 and opened < 1500)
  end)
end)
