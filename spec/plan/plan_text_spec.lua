-- spec/plan/plan_text_spec.lua - what `weft plan` says, held against checkpoints and formulas.
local core = require "weft.core"
local config = require "weft.config"
local policies = require "weft.policy"
local plan_text = require "weft.plan_text"

local models = { "demo_llama", "llama_mqa_tied", "llama_rope3_bias", "mistral_sliding", "minimax_m2_random" }
local function folder(model) return "spec/fixtures/models/" .. model end

local function policy(tp, tpa, rest)
  local options = { tensor_parallel_size = tp, tensor_parallel_size_attention = tpa }
  for k, v in pairs(rest or {}) do options[k] = v end
  return policies.from_options(options)
end

--- Bytes of all tensors in the folder, from the headers.
local function checkpoint_bytes(model)
  local names, total = {}, 0
  local index = io.open(folder(model) .. "/model.safetensors.index.json", "rb")
  if index then
    for _, file in pairs(core.json.decode(index:read "*a").weight_map) do names[file] = true end
    index:close()
  else names["model.safetensors"] = true end
  for name in pairs(names) do
    local file = assert(io.open(folder(model) .. "/" .. name, "rb"))
    local a, b, c = file:read(8):byte(1, 3)
    for tensor, info in pairs(core.json.decode(file:read(a + b * 256 + c * 65536))) do
      if tensor ~= "__metadata__" then
        local bytes = info.data_offsets[2] - info.data_offsets[1]
        total = total + bytes
      end
    end
    file:close()
  end
  return total
end

describe("the bytes of a plan", function()
  it("are those of the checkpoint on one rank", function()
    for _, model in ipairs(models) do
      local cfg = config.load(folder(model))
      local n = plan_text.table(policy(1), cfg, { context = 0 })
      assert.equal(checkpoint_bytes(model), n.ranks[1].weight_bytes, model)
      assert.equal(0, n.ranks[1].sent_bytes_per_token)
    end
  end)

  it("add up over ranks when nothing is held twice", function()
    local cfg = config.load(folder "demo_llama")
    local one = plan_text.table(policy(1), cfg, { context = 100 })
    local four = plan_text.table(policy(4), cfg, { context = 100 })
    local cache, weights = 0, 0
    for _, rank in ipairs(four.ranks) do cache, weights = cache + rank.cache_bytes, weights + rank.weight_bytes end
    local norms = (2 * cfg.num_hidden_layers + 1) * cfg.hidden_size * 2
    assert.equal(one.ranks[1].cache_bytes, cache)
    assert.equal(one.ranks[1].weight_bytes, weights - 3 * norms)
  end)

  it("of the cache are local_len * kv heads * (D + Dv) * element, for each rank and layer", function()
    local cfg = config.load(folder "demo_llama")
    for _, length in ipairs { 0, 1, 15, 16, 17, 63, 64, 300 } do
      for _, p in ipairs { policy(4, 2), policy(8, 2, { cp_kv_cache_interleave_size = 4 }), policy(4), policy(8, nil, { decode_context_parallel_size = 2 }) } do
        local n = plan_text.table(p, cfg, { context = length, batch = 3 })
        for rank = 0, p.num_ranks - 1 do
          local plan = p:get("attention", 0, rank)
          local kv = math.max(1, cfg.num_key_value_heads / plan.input.world_size)
          local held = core.layout.local_len(length, plan.context.rank, plan.context.world_size, plan.interleave)
          local bytes = held * kv * 2 * cfg.head_dim * 2 * cfg.num_hidden_layers * 3
          assert.equal(bytes, n.ranks[rank + 1].cache_bytes)
          assert.equal(bytes, n.kv_bytes_per_rank[rank + 1])
          local page = n.virtual_block / plan.context.world_size * kv * 2 * cfg.head_dim * 2 * cfg.num_hidden_layers * 3
          assert.equal(math.ceil(length / n.virtual_block) * page, n.ranks[rank + 1].cache_bytes_allocated)
          assert.is_true(n.ranks[rank + 1].cache_bytes_allocated >= bytes)
        end
      end
    end
  end)

  it("count only the window where no layer sees further", function()
    local cfg = config.load(folder "mistral_sliding")
    local function cache(length) return plan_text.table(policy(2, 1), cfg, { context = length }).ranks[1].cache_bytes end
    assert.equal(cache(10 * cfg.sliding_window), cache(20 * cfg.sliding_window))
    assert.is_true(cache(2) < cache(cfg.sliding_window))
  end)

  it("that move follow the exchange", function()
    local cfg = config.load(folder "demo_llama")
    local function moves(p)
      local text = {}
      for _, part in ipairs(plan_text.table(p, cfg, {}).parts) do
        if part.type == "attention" then
          for i, m in ipairs(part.moves) do text[i] = ("%s %d %d"):format(m.group, m.world_size, m.bytes) end
        end
      end
      return text
    end
    -- 8 heads of 32, hidden 192, bfloat16; 4 heads are worked on and 2 kept on each of 2 context ranks
    assert.same({ 8, 32, 192 }, { cfg.num_attention_heads, cfg.head_dim, cfg.hidden_size })
    assert.same({ "context 2 16", "context 2 256", "tensor 4 576" }, moves(policy(4, 2)))
    assert.same({ "context 2 136", "tensor 4 576" }, moves(policy(4, 2, { dcp_comm_backend = "a2a" })))
    assert.same({ "tensor 4 576" }, moves(policy(4)))
    -- plain: each rank's head travels to the other of its group, then both work on 2 heads
    assert.same({ "context 2 64", "context 2 8", "context 2 128", "tensor 8 672" }, moves(policy(8, nil, { decode_context_parallel_size = 2 })))
  end)
end)

describe("the text of a plan", function()
  it("says the axes, heads, copies and what each rank keeps", function()
    local cfg = config.load(folder "llama_mqa_tied")
    local text = plan_text.explain(policy(4, 2), cfg, { context = 64, name = "LlamaForCausalLM" })
    assert.matches("LlamaForCausalLM on 4 ranks: tensor=4 attention={tensor=2,context=2,interleave=1,exchange=ag_rs}", text, 1, true)
    assert.matches("attention_tensor in 2 -> tensor out 4, context 2 in strips of 1, ag_rs", text, 1, true)
    assert.matches("tied to the embedding", text, 1, true)
    assert.matches("\n%s+3%s+1/2%s+1/2%s+3/4%s+%S+%s+0%s+2%s", text)
    assert.matches("predicted from the plan, not measured", text, 1, true)
    assert.matches("over context 2 %(ranks 0%-1, 2%-3%)", (text:gsub("%s+", " ")))
  end)

  it("names the ranks that a move is among, rows in steps and many rows in short", function()
    assert.equal("ranks 0-7", plan_text.rows { { 0, 1, 2, 3, 4, 5, 6, 7 } })
    assert.equal("ranks 0 4, 1 5, 2 6, 3 7", plan_text.rows { { 0, 4 }, { 1, 5 }, { 2, 6 }, { 3, 7 } })
    assert.equal("ranks 0-1, 2-3 .. 8-9", plan_text.rows { { 0, 1 }, { 2, 3 }, { 4, 5 }, { 6, 7 }, { 8, 9 } })
    assert.equal("ranks 0 8 .. 56", plan_text.rows { { 0, 8, 16, 24, 32, 40, 48, 56 } })
  end)

  it("shows layers with plans of their own apart", function()
    local cfg = config.load(folder "demo_llama")
    local p = core.policy { tensor = 4, attention = { tensor = 2 }, layers = { [0] = { attention = { tensor = 4 } }, [2] = { attention = { tensor = 4 } } } }
    local text = plan_text.explain(p, cfg, {})
    assert.matches("attention, layers 0, 2: tensor in 4 -> tensor out 4\n", text, 1, true)
    assert.matches("attention, layers 1, 3: attention_tensor in 2", text, 1, true)
  end)

  it("says which experts and columns a rank holds", function()
    local cfg = config.load(folder "minimax_m2_random")
    local count, width = policies.experts_of(cfg)
    local n = plan_text.table(policy(4, nil, { expert_parallel_size = 2 }), cfg, {})
    for _, part in ipairs(n.parts) do
      if part.type == "experts" then
        for r, row in ipairs(part.ranks) do
          assert.same({ math.floor((r - 1) / 2) * count / 2, count / 2 }, row.experts)
          assert.same({ (r - 1) % 2 * width / 2, width / 2 }, row.columns)
        end
      end
    end
    assert.is_string(core.json.encode(n))
  end)
end)
