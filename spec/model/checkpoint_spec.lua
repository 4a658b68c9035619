--- spec/model/checkpoint_spec.lua - folders of shards, sources and their boxes.
local core = require "weft.core"
local files = require "spec.support.files"
local models = "spec/fixtures/models/"

local function one_tensor(name)
  return files.safetensors(('{"%s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'):format(name), "\1")
end

describe("weft.checkpoint", function()
  it("finds every tensor of a folder by name, in one file or in shards", function()
    local whole = assert(core.checkpoint.open(models .. "stories260K/hf-f32"))
    local shards = assert(core.checkpoint.open(models .. "stories260K/hf-f32-3shards/"))
    assert.same(whole:names(), shards:names())
    assert.equal(whole.bytes_total, shards.bytes_total)
    assert.is_true(shards:has "model.norm.weight")
    assert.is_false(shards:has "model.norm.bias")
    for _, name in ipairs { "model.norm.weight", "model.layers.4.mlp.down_proj.weight" } do
      local a, b = whole:source(name), shards:source(name)
      assert.same(a.shape, b.shape)
      assert.same(a:tensor():totable(), b:tensor():totable())
    end
  end)

  it("says which tensor is missing and what there is instead", function()
    local checkpoint = assert(core.checkpoint.open(models .. "stories260K/hf-f32"))
    assert.error_matches(function() checkpoint:source "norm.weight" end,
      "tensor 'norm.weight' is not in spec/fixtures/models/stories260K/hf-f32; 'model.norm.weight' is", 1, true)
    assert.error_matches(function() checkpoint:source "x" end, "it holds 47 tensors, from 'model.embed_tokens.weight' to", 1, true)
    assert.error_matches(function() checkpoint:source("model.norm.weight", { shape = { 65 } }) end,
      "tensor 'model.norm.weight': wanted [65], found [64]", 1, true)
  end)

  it("keeps a file mapped while a source of it lives, and gives everything back", function()
    core.tensor { 1 } -- this state's rank is there from here on
    collectgarbage() collectgarbage()
    local before = core.live_objects()
    local checkpoint = assert(core.checkpoint.open(models .. "stories260K/hf-bf16"))
    local source = checkpoint:source "model.norm.weight"
    checkpoint:close()
    assert.equal(64, source:tensor().numel)
    source:close()
    assert.error_matches(function() source:tensor() end, "closed", 1, true)
    assert.error_matches(function() checkpoint:names() end, "closed", 1, true)
    collectgarbage() collectgarbage()
    assert.equal(before, core.live_objects())
  end)

  describe("index", function()
    local folder = os.tmpname()
    os.remove(folder)
    setup(function() os.execute("mkdir -p " .. folder) end)
    teardown(function() os.execute("rm -rf " .. folder) end)

    local function refusal(index)
      files.write(folder .. "/model.safetensors.index.json", index)
      local checkpoint, message = core.checkpoint.open(folder)
      assert.is_nil(checkpoint)
      return message
    end

    local cases = {
      { '{"weight_map":{"x":"../s1.safetensors"}}', "tensor 'x' is mapped to '../s1.safetensors', which is not the name of a file in this folder" },
      { '{"weight_map":{"x":"/etc/passwd"}}', "not the name of a file in this folder" },
      { '{"weight_map":{"x":"c:s1.safetensors"}}', "not the name of a file in this folder" },
      { '{"weight_map":{"x":"gone.safetensors"}}', "shard 'gone.safetensors' (which holds tensor 'x') is not there" },
      { '{"weight_map":{"y":"s1.safetensors"}}', "tensor 'y' is mapped to 's1.safetensors', which does not hold it" },
      { '{"weight_map":{"x":"s1.safetensors","x":"s1.safetensors"}}', "tensor 'x' is mapped twice" },
      { '{"weight_map":{"x":"s1.safetensors","z":"s3.safetensors"}}', "tensor 'x' is in two shards" },
      { '{"weight_map":{}}', "weight_map is empty" },
      { '{"metadata":{}}', "weight_map is missing" },
      { '{"weight_map":{"x":1}}', "expected a file's name as a string" },
      { '{"weight_map":{"x":"s1.safe', "a string without an end" },
    }
    for _, case in ipairs(cases) do
      it("refuses " .. case[1], function()
        files.write(folder .. "/s1.safetensors", one_tensor "x")
        files.write(folder .. "/s3.safetensors", files.safetensors('{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},' ..
          '"z":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', "\1\1"))
        local message = refusal(case[1])
        assert.is_truthy(message:find(case[2], 1, true), message)
        assert.is_truthy(message:find(folder, 1, true), message)
      end)
    end

    it("names a damaged shard", function()
      files.write(folder .. "/s1.safetensors", "short")
      assert.is_truthy(refusal('{"weight_map":{"x":"s1.safetensors"}}'):find(folder .. "/s1.safetensors: 5 bytes are too few", 1, true))
    end)

    it("says what a folder without weights lacks", function()
      os.remove(folder .. "/model.safetensors.index.json")
      local _, message = core.checkpoint.open(folder)
      assert.equal(folder .. ": neither model.safetensors nor model.safetensors.index.json is there", message)
      files.write(folder .. "/pytorch_model.bin", "")
      assert.is_truthy(select(2, core.checkpoint.open(folder)):find("holds pytorch_model.bin, which weft does not read", 1, true))
    end)
  end)
end)
