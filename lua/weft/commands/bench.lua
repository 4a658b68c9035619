--- weft bench: prefill and decode, timed apart on the engine's own path.
local core = require "weft.core"
local errors = require "weft.errors"
local policies = require "weft.policy"

local bench = {}

--- Ids without meaning, the same each time; never all equal.
function bench.random_ids(count, vocab, seed)
  local ids, state = {}, seed * 2654435761 % 4294967296
  for i = 1, count do
    state = (state * 1664525 + 1013904223) % 4294967296
    ids[i] = math.floor(state / 65536) % vocab
  end
  return ids
end

-- Tokens that the first requests may decode while the prompts of others still run.
local function head_start(options, chunk, budget)
  if options.batch == 1 then return 0 end
  return 2 + math.ceil(options.batch * options.context / math.max(1, budget - options.batch)) + math.ceil(options.context / chunk)
end

local function requests_of(n) return n == 1 and "1 request" or ("%d requests"):format(n) end

-- Tokens that each request of the decode may come to.
local function longest(engine, options)
  return options.context + options.steps + 8 + head_start(options, engine.prefill_chunk, engine.max_batch_tokens)
end

-- Bytes a decode step reads on this rank: every weight once (of the experts those that `batch` tokens
-- are likely to choose), and the cache of each request.
local function step_bytes(engine, batch, context)
  local session, cfg = engine.session, engine.session.cfg
  local chosen = 1
  if session.expert_bytes > 0 then chosen = 1 - (1 - (cfg.num_experts_per_tok or 1) / policies.experts_of(cfg)) ^ batch end
  return session.dense_bytes + chosen * session.expert_bytes + batch * context / session.block_tokens * session.bytes_per_block
end

-- The median of five prompts, or of those that fit into three seconds.
local function prefill(engine, options)
  local times, total = {}, 0
  while #times < 5 and total < 3000 do
    local request = engine:submit { prompt_ids = bench.random_ids(options.prefill, engine.vocab_size, #times + 1), max_tokens = 1, ignore_eos = true }
    local began = core.now()
    engine:run()
    times[#times + 1] = (core.now() - began) * 1000
    total = total + times[#times]
    assert(request.finish_reason == "length")
  end
  table.sort(times)
  local ms = times[math.ceil(#times / 2)]
  return { tokens = options.prefill, ms = ms, tok_per_s = options.prefill / ms * 1000 }
end

-- Bytes a second that this rank's memory copies, reading and writing.
local function copy_speed(session)
  if session.device == "cuda" then return core.gpu.copy_speed() end
  return core.copy_speed() / session.rank.world_size
end

-- Tokens that requests have, to see that every step gave one to each.
local function count_tokens(requests)
  local count = 0
  for _, request in ipairs(requests) do count = count + #request.output_ids end
  return count
end

-- What the exchange of attention came to so far, by layer, on rank 0: bytes and seconds.
local function traffic_of(session)
  local list, bytes = {}, session.graphs and require("weft.gpu").sent(session)
  for i, attention in ipairs(session.attentions) do
    local traffic = attention:traffic()
    list[i] = { bytes = bytes and bytes[i] or traffic.bytes_sent, seconds = not bytes and traffic.exchange_seconds or nil }
  end
  return list
end

-- Bytes and time of the exchange between two counts that lie `steps` decode steps apart, per layer and step.
-- Within a graph it is not timed.
local function exchange(before, after, steps)
  local list = {}
  for i, traffic in ipairs(after) do
    list[i] = { bytes_per_step = (traffic.bytes - before[i].bytes) / steps,
      ms_per_step = traffic.seconds and (traffic.seconds - before[i].seconds) * 1000 / steps }
  end
  return list
end

local function decode(engine, options)
  local requests = {}
  for i = 1, options.batch do
    requests[i] = engine:submit { prompt_ids = bench.random_ids(options.context, engine.vocab_size, i + 1), ignore_eos = true,
      max_tokens = longest(engine, options) - options.context }
  end
  while true do -- the prompts, and two steps to warm up
    local ready = true
    for _, request in ipairs(requests) do ready = ready and #request.output_ids >= 2 end
    if ready then break end
    engine:step()
  end
  local times, host, driver, had, sent = {}, {}, {}, count_tokens(requests), traffic_of(engine.session)
  for i = 1, options.steps do
    local began, waited, inside = core.now(), engine.session.waited, core.gpu.driver_seconds()
    engine:step()
    times[i] = (core.now() - began) * 1000
    host[i] = times[i] - (engine.session.waited - waited) * 1000 -- what is not waiting for the GPU
    driver[i] = (core.gpu.driver_seconds() - inside) * 1000
  end
  local gained, moved = count_tokens(requests) - had, exchange(sent, traffic_of(engine.session), options.steps)
  for _, request in ipairs(requests) do request:cancel() end
  engine:run()
  if gained ~= options.batch * options.steps then -- some waited for room: the times are those of smaller batches
    errors.raise { code = "memory", message = ("%s of %d tokens did not decode together (%d tokens in %d steps); the cache is too small")
      :format(requests_of(options.batch), options.context, gained, options.steps) }
  end
  table.sort(times)
  table.sort(host)
  table.sort(driver)
  local ms, middle = times[math.ceil(#times / 2)], math.ceil(#times / 2)
  local bytes = step_bytes(engine, options.batch, options.context) / (ms / 1000)
  return { batch = options.batch, context = options.context, ms = ms, tok_per_s = options.batch / ms * 1000,
    gb_per_s = bytes / 1e9, percent_of_copy = 100 * bytes / copy_speed(engine.session),
    host_us = engine.session.device == "cuda" and host[middle] * 1000 or nil,
    driver_us = engine.session.device == "cuda" and driver[middle] * 1000 or nil },
    moved
end

-- Writes the decode time down for `weft plan`; a file that cannot be written is no failure.
local function remember(engine, options, decode)
  local measured, session = require "weft.plan.measured", engine.session
  if session.device == "cuda" and not session.graphs then return end -- launch by launch, or sharing a GPU: not what a plan costs
  local ok, why = measured.append {
    model = measured.model_key(session.cfg, session.name, session.dequantizes), policy = measured.policy_key(session.policy, session.cfg),
    machine = options.machine or measured.machine(session.device), batch = decode.batch, context = decode.context,
    ms = decode.ms, time = os.time(),
  }
  if not ok and (os.getenv "WEFT_BENCH_FILE" or "") ~= "" then -- a file that was asked for
    io.stderr:write(("weft: the figures were not written down: %s (WEFT_BENCH_FILE names the file)\n"):format(why))
  elseif not ok then
    engine.log("the figures were not written down: %s", why)
  end
end

-- Refuses what would be measured otherwise than it was asked for. cache = { num_blocks, block_tokens }: a plan's, or
-- false where its size is not known yet.
local function check_room(engine, options, cache)
  if options.batch > engine.max_batch then
    errors.usage(("a step takes %d requests, and a batch of %d was asked for; start weft with --max-batch %d")
      :format(engine.max_batch, options.batch, options.batch))
  end
  if math.max(longest(engine, options), options.prefill + 1) > engine.max_position then
    errors.usage((options.at_prompt and "the model takes %d positions, and context = %d with steps = %d or prefill = %d needs more"
      or "the model takes %d positions, and --context %d with %d steps or --prefill %d needs more")
      :format(engine.max_position, options.context, options.steps, options.prefill))
  end
  local blocks = cache and options.batch * math.ceil(longest(engine, options) / cache.block_tokens)
  if cache and blocks > cache.num_blocks and not engine.window then
    errors.usage(("the cache holds %d tokens, and %s of %d with %d steps need%s %d; start weft with more --kv-cache-bytes")
      :format(cache.num_blocks * cache.block_tokens, requests_of(options.batch), options.context, options.steps, options.batch == 1 and "s" or "",
        blocks * cache.block_tokens))
  end
end

--- On rank 0: refuses numbers that cannot be measured under plans with these caches, before any is.
function bench.check(engine, options, caches)
  for _, cache in ipairs(caches) do check_room(engine, options, cache) end
end

--- One measurement on rank 0: options = { batch =, context =, prefill =, steps = [, machine =] }. Plain values.
-- The time of a decode step is written down for `weft plan`.
function bench.measure(engine, options)
  local reuse = engine.prefix_reuse
  check_room(engine, options, engine)
  engine.prefix_reuse = false
  local ok, result = pcall(function()
    prefill(engine, { prefill = math.min(options.prefill, 64) }) -- warm
    local r = { prefill = prefill(engine, options) }
    r.decode, r.exchange = decode(engine, options)
    return r
  end)
  engine.prefix_reuse = reuse
  if not ok then error(result, 0) end
  local session = engine.session
  result.kv_bytes_per_rank, result.num_blocks, result.block_tokens = session.kv_bytes_per_rank, session.num_blocks, session.block_tokens
  result.weight_bytes = session.weight_bytes
  result.cache_bytes_per_token = session.bytes_per_block / session.block_tokens
  result.exchange_bytes = 0
  for _, layer in ipairs(result.exchange) do result.exchange_bytes = result.exchange_bytes + layer.bytes_per_step end
  remember(engine, options, result.decode)
  return result
end

--- The job on rank 0.
function bench.job(engine, options)
  local result = bench.measure(engine, options)
  result.kv_bytes_per_rank, result.exchange = core.json.array(result.kv_bytes_per_rank), core.json.array(result.exchange)
  if options.json then
    io.stdout:write(core.json.encode(result), "\n")
    return 0
  end
  local p, d = result.prefill, result.decode
  io.stdout:write(("prefill  %6d tokens             %9.2f ms  %9.1f tok/s\n"):format(p.tokens, p.ms, p.tok_per_s))
  io.stdout:write(("decode   batch %-4d context %-7d %9.3f ms  %9.1f tok/s  %6.2f GB/s  %5.1f%% of copy speed\n")
    :format(d.batch, d.context, d.ms, d.tok_per_s, d.gb_per_s, d.percent_of_copy))
  if d.host_us then
    io.stdout:write(("host     %.1f us a step: %.1f in Lua and the record, %.1f in the driver\n"):format(d.host_us, d.host_us - d.driver_us, d.driver_us))
  end
  local first = result.exchange[1]
  if first and first.bytes_per_step > 0 then
    local ms = first.ms_per_step and (" and %.3f ms"):format(first.ms_per_step) or ""
    io.stdout:write(("exchange %.3g kB%s a layer and step on rank 0\n"):format(first.bytes_per_step / 1e3, ms))
  end
  io.stdout:write("cache    ")
  for rank, bytes in ipairs(result.kv_bytes_per_rank) do io.stdout:write(("rank %d %.2f MB  "):format(rank - 1, bytes / 1e6)) end
  io.stdout:write "\n"
  return 0
end

function bench.run(options)
  options.batch, options.context, options.steps = options.batch or 1, options.context or 128, options.steps or 32
  options.prefill = options.prefill or options.context
  options.max_batch = math.max(options.batch, options.max_batch or 64)
  options.prefill_chunk = options.prefill_chunk or 2048
  local each = options.context + options.steps + 16 + head_start(options, options.prefill_chunk, options.max_batch_tokens or 2048)
  options.cache_tokens = math.max(options.prefill + 64, options.batch * (each + 1024))
  local found = require("weft.setup").check(options)
  check_room({ max_batch = options.max_batch, max_position = found.cfg.max_position_embeddings, prefill_chunk = options.prefill_chunk,
    max_batch_tokens = options.max_batch_tokens or 2048 }, options, false) -- before weights are read
  return require("weft.runtime").launch(options, "weft.commands.bench", "job")
end

return bench
