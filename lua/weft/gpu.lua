--- Sessions on a GPU: opening it, the room for the cache, steps that run as captured graphs.
--
-- A decode step whose batch fits a bucket is padded to it (engine.lua). The first step of its kind
-- runs launch by launch, the second is captured, all others replay what was captured. Its record lies in
-- memory that the graph reads, and the tokens, chosen on the GPUs, in memory that it writes: a replayed step is one
-- call into the driver. The one place where rank 0 waits is for the tokens, and by then the next step is on its
-- way. Steps that are not captured join operations to the products in front of them (core.graph.join). Eager sessions do
-- neither, and choose on the host.
local core = require "weft.core"

local gpu = {}

--- This rank's GPU: one each, or shared under --oversubscribe.
function gpu.open(options, rank)
  local gpus = core.gpu.count()
  local index = rank.rank % gpus
  local limit = 0
  if options.gpu_memory_utilization then
    local _, _, total = core.gpu.describe(index)
    limit = math.floor(total * options.gpu_memory_utilization / math.ceil(rank.world_size / gpus))
  end
  core.gpu.use(index, limit)
end

-- What the largest step needs beside weights and cache.
local function step_bytes(session, options)
  local cfg = session.cfg
  local tokens = options.max_batch_tokens or 2048
  local width = 8 * cfg.hidden_size + 4 * (cfg.intermediate_size or cfg.hidden_size) + 4 * cfg.num_attention_heads * cfg.head_dim
  return tokens * width * 4 + (options.max_batch or 64) * cfg.vocab_size * 8 + 2 ^ 28
end

--- Bytes for the cache under --gpu-memory-utilization; nil without it.
function gpu.cache_bytes(session, options)
  if not options.gpu_memory_utilization then return nil end
  local index = core.gpu.index()
  local _, free, total = core.gpu.describe(index)
  local sharers = math.ceil(session.rank.world_size / core.gpu.count())
  local limit = total * options.gpu_memory_utilization / sharers
  local left = math.min(limit - core.memory().live_bytes, free / sharers)
  return math.max(0, left - step_bytes(session, options))
end

--- Blocks of a cache that fit into `room` bytes of a GPU: keys and values of each attention are two blocks of its memory.
function gpu.blocks_in(room, attentions, block_tokens)
  local function taken(blocks)
    local bytes = 0
    for _, attention in ipairs(attentions) do bytes = bytes + 2 * core.gpu.block_bytes(attention:bytes_per_block(block_tokens) * blocks / 2) end
    return bytes
  end
  local low, high = 0, 1 -- fits, does not
  while taken(high) <= room do low, high = high, 2 * high end
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if taken(middle) <= room then low = middle else high = middle end
  end
  return low
end

--- The rows of the graph that runs `count` requests.
function gpu.bucket(count)
  local rows = 1
  while rows < count do rows = rows * 2 end
  return rows
end

local function forward(session, step)
  if session.graphs and step.graph_key then session.sampler:follow(step) end
  local hidden = session.model.forward(step)
  if step.num_logits == 0 then return nil end
  local logits = session.model.lm_head:forward(core.gather_rows(hidden, step.rows))
  session.sampler:launch(logits, step)
  if session.graphs then session.sampler:decide() end
  return logits
end

-- Bytes that each attention has sent in steps that ran launch by launch, and in captures.
local function sent(session)
  local list = {}
  for i, attention in ipairs(session.attentions) do list[i] = attention:traffic().bytes_sent end
  return list
end

-- The graph of the step's kind, ready to launch; nil when the step must run launch by launch.
local function graph_for(session, step)
  local key = session.graphs and not step.gather_logits and step.graph_key
  if not key then return nil end
  local graph = session.graphs[key]
  if graph and graph ~= "warm" and not graph.fresh then
    graph:close()
    graph = nil
  end
  if not graph then
    session.graphs[key] = "warm"
    return nil
  end
  if graph == "warm" then
    local alone, before = session.rank.world_size <= core.gpu.count(), sent(session) -- what runs as one launch keeps others out
    graph = core.graph.capture(function()
      forward(session, step)
      core.fault "capture"
    end, alone)
    session.graphs[key] = graph
    local after, launch = sent(session), {}
    for i, bytes in ipairs(after) do launch[i] = bytes - before[i] end
    local counted = { launches = -1, bytes = launch } -- the capture itself was counted, and ran nothing
    table.insert(session.captured, counted)
    session.captured[key] = counted
    session.log("captured a decode step of %s", key)
  end
  local counted = session.captured[key]
  counted.launches = counted.launches + 1
  return graph
end

--- Bytes that the exchange of each attention has sent on this rank, captured steps included.
function gpu.sent(session)
  local list = sent(session)
  for _, counted in ipairs(session.captured) do
    for i, bytes in ipairs(counted.bytes) do list[i] = list[i] + counted.launches * bytes end
  end
  return list
end

--- Session:launch on a GPU. Gives what gpu.take wants.
function gpu.launch(session, step)
  step:upload()
  local graph, logits = graph_for(session, step), nil
  if graph then graph:launch()
  elseif session.graphs then logits = core.graph.join(forward, session, step)
  else logits = forward(session, step) end
  local launched = { step = step, rows = step.num_logits }
  if launched.rows == 0 then return launched end
  if step.gather_logits then launched.logits = core.to_host(session.model.lm_head:gather(logits)) end
  return launched
end

--- Session:take on a GPU. Ranks other than 0 learn no ids where the GPUs choose.
function gpu.take(session, launched)
  local began, ids = core.now(), nil
  if session.graphs and session.rank.rank ~= 0 then core.gpu.pace()
  elseif launched.rows == 0 then return nil
  elseif session.graphs then ids = session.sampler:told(launched.rows)
  else ids = session.sampler:take(launched.step) end
  session.waited = session.waited + core.now() - began
  return ids, launched.logits
end

--- In place: a session that is being rebuilt shares the table with the one it replaces.
function gpu.close_graphs(session)
  for key, graph in pairs(session.graphs) do
    if graph ~= "warm" then graph:close() end
    session.graphs[key] = nil
  end
  session.captured = {}
end

return gpu
