--- spec/commands/run_spec.lua - what `weft run` and its neighbours print.
local json = require("weft.core").json
local files = require "spec.support.files"
local program = require "spec.support.program"

local demo = program.models .. "demo_llama"

describe("weft run", function()
  it("continues a text as the reference does, and stops at the end of the text", function()
    for _, case in ipairs(program.expected "demo_llama") do
      if case.smallest_top2_margin > 1e-3 then
        local got = program.json { "run", "--model", demo, "--prompt", case.prompt, "--dtype", "float32", "--json", "-tp", "4", "-tpa", "2" }
        assert.equal(case.greedy_text, got.text)
        assert.same(case.greedy_ids, got.output_ids)
        assert.equal("stop", got.finish_reason)
        for _, key in ipairs { "load_ms", "prefill_ms", "decode_ms", "prefill_tok_per_s", "decode_tok_per_s" } do
          assert.is_number(got.timing[key])
        end
      end
    end
  end)

  it("tells the same story from three forms of one checkpoint under three plans", function()
    local file = io.open(program.models .. "stories260K/expected_greedy.txt", "rb")
    local story = file:read("*a"):gsub("%s+$", "")
    file:close()
    for _, form in ipairs { "hf-f32", "hf-bf16", "hf-f32-3shards" } do
      for _, plan in ipairs { { "-tp", "1" }, { "-tp", "4" }, { "-tp", "4", "-tpa", "2" } } do
        local words = { "run", "--model", program.models .. "stories260K/" .. form, "--prompt", "", "--max-tokens", "200", "--json", "--ignore-eos",
          "--dtype", "float32" }
        for _, word in ipairs(plan) do words[#words + 1] = word end
        local text = program.json(words).text
        -- Weights rounded to bf16 tell the last sentence another way, on one rank as on four.
        local length = math.min(#text, form == "hf-bf16" and 425 or #story)
        assert.is_true(length > 400)
        assert.equal(story:sub(1, length), text:sub(1, length), form .. " " .. table.concat(plan, " "))
      end
    end
  end)

  it("serves a file of prompts in its order, whatever finishes first", function()
    local path = files.temporary('"One rainy day, Tom went to the lake. He had a"\n"At the farm, he saw a bear."\n"Once upon a time"\n', ".jsonl")
    local code, out, err = program.run { "run", "--model", demo, "-f", path, "--max-batch", "2", "--max-tokens", "20", "-tp", "2" }
    os.remove(path)
    assert.equal(0, code, err)
    local lines = {}
    for line in out:gmatch "[^\n]+" do lines[#lines + 1] = json.decode(line) end
    assert.equal(3, #lines)
    for i, prompt in ipairs { "One rainy day, Tom went to the lake. He had a", "At the farm, he saw a bear.", "Once upon a time" } do
      local single = program.json { "run", "--model", demo, "--prompt", prompt, "--max-tokens", "20", "--json" }
      assert.same(single.output_ids, lines[i].output_ids)
      assert.same(single.prompt_ids, lines[i].prompt_ids)
    end
  end)

  it("says that a file has no prompts", function()
    assert.same({ 0, "", "weft: -f /dev/null: it has no prompts\n" }, { program.run { "run", "--model", demo, "-f", "/dev/null" } })
  end)

  it("makes no more cache than the model has positions, however many tokens are asked for", function()
    local few = program.json { "run", "--model", demo, "--prompt", "Once upon a time", "--json" }
    local many = program.json { "run", "--model", demo, "--prompt", "Once upon a time", "--json", "--max-tokens", "1e9" }
    assert.same({ "stop", few.output_ids }, { many.finish_reason, many.output_ids })
  end)

  it("draws the same text from the same seed, under any plan, and another from another", function()
    local function draw(seed, ...)
      return program.json { "run", "--model", demo, "--prompt", "Once upon a time", "--temperature", "1", "--seed", seed, "--dtype", "float32",
        "--max-tokens", "30", "--json", ... }.output_ids
    end
    local one = draw(7)
    assert.same(one, draw(7, "-tp", "4", "-tpa", "1"))
    assert.same(draw(7, "--top-k", "40"), draw(7, "--top-k", "40", "-tp", "2"))
    assert.not_same(one, draw(8))
  end)

  it("gives log-probabilities when asked", function()
    local got = program.json { "run", "--model", demo, "--prompt", "Once upon a time", "--logprobs", "3", "--max-tokens", "4", "--json" }
    assert.equal(4, #got.logprobs)
    assert.equal(3, #got.logprobs[1])
    assert.equal(got.output_ids[1], got.logprobs[1][1].id)
    assert.is_true(got.logprobs[1][1].logprob < 0)
  end)
end)

describe("weft plan", function()
  it("counts the cache bytes that a run allocates", function()
    for _, plan in ipairs { { "-tp", "1" }, { "-tp", "4", "-tpa", "2" }, { "-tp", "8", "-tpa", "2" }, { "-tp", "4", "-tpa", "1" } } do
      local words = { "bench", "--model", demo, "--context", "32", "--steps", "2", "--kv-cache-bytes", "1M", "--json" }
      for _, word in ipairs(plan) do words[#words + 1] = word end
      local bench = program.json(words)
      local said = { "plan", "--model", demo, "--context", bench.block_tokens, "--json" }
      for _, word in ipairs(plan) do said[#said + 1] = word end
      local counted = program.json(said).kv_bytes_per_rank
      for rank, bytes in ipairs(bench.kv_bytes_per_rank) do
        assert.equal(bytes, counted[rank] * bench.num_blocks, table.concat(plan, " "))
      end
    end
  end)
end)

describe("weft bench", function()
  it("counts the exchange of a decode step, however many are timed and whatever came before them", function()
    for _, case in ipairs { { 2, 16, 1 }, { 9, 300, 1 }, { 3, 40, 4 } } do
      local words = { "bench", "--model", demo, "--device", "cpu", "-tp", "4", "-tpa", "2", "--steps", case[1], "--context", case[2], "--batch", case[3], "--json" }
      local r = program.json(words)
      assert.same({ 4, 4 * 272 * case[3] }, { #r.exchange, r.exchange_bytes })
      for _, layer in ipairs(r.exchange) do assert.equal(272 * case[3], layer.bytes_per_step) end
    end
  end)

  -- Bytes of one decode step of `batch` requests of 32 tokens, from the rate and the time.
  local function step_bytes(model, batch)
    local words = { "bench", "--model", model, "--context", "32", "--steps", "2", "--batch", batch, "--json", "--device", "cpu" }
    local r = program.json(words)
    return r.decode.gb_per_s * r.decode.ms * 1e6 - batch * 32 * r.cache_bytes_per_token, r.weight_bytes
  end

  it("counts a tied table once and leaves out one that is only looked up in", function()
    local tied, all = step_bytes("spec/fixtures/models/llama_mqa_tied", 1)
    assert.near(all, tied, 1)
    local some, whole = step_bytes(demo, 1)
    assert.near(whole - 1024 * 192 * 2, some, 1)
  end)

  it("counts of the experts those that the tokens are likely to choose", function()
    local one, all = step_bytes("spec/fixtures/models/minimax_m2_random", 1)
    local many = step_bytes("spec/fixtures/models/minimax_m2_random", 16)
    assert.is_true(one < many and many < all)
  end)
end)

describe("a failing rank", function()
  it("ends the others within a second, in the middle of an exchange", function()
    local began = os.time()
    local code, _, err = program.run { "run", "--model", demo, "-tp", "4", "-tpa", "2", "--prompt-ids", "5,6,7",
      env = "WEFT_FAULT=rank=2,step=5,at=exchange,kind=raise" }
    assert.equal(1, code)
    assert.equal("weft: rank 2: WEFT_FAULT raised at exchange of step 5\n", err)
    assert.is_true(os.time() - began <= 3)
  end)

  it("is named when it falls silent", function()
    local code, _, err = program.run { "run", "--model", demo, "-tp", "4", "-tpa", "2", "--prompt-ids", "5,6,7", "--timeout", "1",
      env = "WEFT_FAULT=rank=2,step=5,at=exchange,kind=stall" }
    assert.equal(1, code)
    assert.is_truthy(err:find("rank 2: no sign of life for 1 s", 1, true), err)
  end)
end)
