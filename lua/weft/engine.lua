--- The engine: many requests, one step at a time, on rank 0.
--
--   local engine = weft.engine { model = DIR, tp = 4, tpa = 2, max_batch = 8 }
--   local request = engine:submit { prompt = "Once upon a time", max_tokens = 40,
--                                   on_token = function(request, id, text) io.write(text) end }
--   engine:run()                       -- or engine:step() until it gives false
--   print(request.text, request.finish_reason)
--   engine:close()
--
-- A step is one forward pass of a ragged batch: every running request gives its next token or its
-- next chunk of prompt, within a token budget. Requests join and leave at any step. Rank 0 decides
-- and publishes the step record; all ranks execute it (session.lua).
--
-- engine/pages.lua says who takes part in a step and which pages hold what, engine/steps.lua does a step,
-- engine/score.lua feeds a request by hand.
local core = require "weft.core"
local errors = require "weft.errors"
local Request = require "weft.request"

local Engine = {}
Engine.__index = Engine
for _, part in ipairs { "pages", "steps", "score" } do
  for name, method in pairs(require("weft.engine." .. part)) do Engine[name] = method end
end

local short = { tp = "tensor_parallel_size", tpa = "tensor_parallel_size_attention", dcp = "decode_context_parallel_size",
  ep = "expert_parallel_size" }

local option_names = { policy = true, cache_tokens = true, script = true, prefix_reuse = true, ahead = true }
for _, name in ipairs { "model", "device", "dtype", "load_format", "quantization", "block_size", "kv_cache_bytes",
  "gpu_memory_utilization", "max_batch", "max_batch_tokens", "prefill_chunk", "eager", "oversubscribe", "timeout", "verbose",
  "seed", "plan", "tensor_parallel_size", "tensor_parallel_size_attention", "decode_context_parallel_size", "dcp_comm_backend",
  "cp_kv_cache_interleave_size", "expert_parallel_size" } do
  option_names[name] = true
end

--- An engine for scripts and specs: this Lua state becomes rank 0, the other ranks are threads.
-- options: the flags of `weft run` by their long names with underscores (tp, tpa, dcp and ep for
-- short), `policy` for a weft.policy or its sizes, `script` for a model script.
local function open(_, options)
  if type(options) ~= "table" then error("weft.engine needs a table such as { model = DIR }, got " .. type(options), 2) end
  local given = {}
  for key, value in pairs(options) do
    local name = short[key] or key
    if not option_names[name] then error(("weft.engine has no option '%s'"):format(tostring(key)), 2) end
    given[name] = value
  end
  if type(given.model) ~= "string" then error("weft.engine needs model = DIR", 2) end
  if given.policy and given.tensor_parallel_size then error("weft.engine takes policy or tp, not both", 2) end
  given.cache_tokens = given.cache_tokens or 8192
  local session, finish = require("weft.runtime").lead(given)
  local engine = Engine.new(session, given)
  engine.end_ranks = finish
  return engine
end
setmetatable(Engine, { __call = open })

--- Ends the ranks. Requests that are not finished are cancelled. May be called again.
function Engine:close()
  if not self.end_ranks then return end
  local finish = self.end_ranks
  self.closed = true
  self.end_ranks = nil
  self:land()
  for _, list in ipairs { self.running, self.waiting } do
    for _, request in ipairs(list) do request:cancel() end
  end
  self:schedule()
  self.record:build { kind = "stop" }
  self.record:publish()
  finish()
end

--- session: what session.lua built on this rank. options: max_batch, max_batch_tokens, prefill_chunk.
function Engine.new(session, options)
  local cfg = session.cfg
  return setmetatable({
    session = session, tokenizer = session.tokenizer, model_dir = session.model_dir,
    vocab_size = cfg.vocab_size, max_position = cfg.max_position_embeddings, eos_ids = cfg.eos_token_ids or {},
    seed = options.seed or 0,
    max_batch = options.max_batch or 64, max_batch_tokens = options.max_batch_tokens or 2048,
    prefill_chunk = options.prefill_chunk or 512,
    block_tokens = session.block_tokens,
    pool = core.block_pool { num_blocks = session.num_blocks, block_tokens = session.block_tokens },
    num_blocks = session.num_blocks, window = session.window,
    -- Pages behind a window are given away, so that prefixes do not stay whole.
    wants_prefix_reuse = options.prefix_reuse ~= false,
    prefix_reuse = options.prefix_reuse ~= false and not session.window,
    record = core.step(), spare = core.step(), -- two: the step in flight, and the one that follows it
    ahead = options.ahead or session.graphs ~= nil, -- whether steps follow one in flight
    waiting = {}, running = {}, submitted = 0, preemptions = 0,
    timing = { prefill_s = 0, prefill_tokens = 0, decode_s = 0, decode_tokens = 0, steps = 0 },
    log = session.log,
  }, Engine)
end

--- The session has another cache: what was in the old one is computed again from the tokens.
function Engine:rebind()
  self:land()
  local session = self.session
  for i = #self.running, 1, -1 do
    local request = table.remove(self.running, i)
    request.blocks, request.behind, request.computed, request.state = {}, 0, 0, "waiting"
    table.insert(self.waiting, 1, request)
  end
  self.block_tokens, self.num_blocks, self.window = session.block_tokens, session.num_blocks, session.window
  self.pool = core.block_pool { num_blocks = session.num_blocks, block_tokens = session.block_tokens }
  self.prefix_reuse = self.wants_prefix_reuse and not session.window
end

--- After a failure at the prompt: what was running is cancelled, what waits stays.
function Engine:recover()
  self.flight = nil
  self.session:forget()
  for _, request in ipairs(self.running) do request:cancel() end
  self.prefix_reuse = self.wants_prefix_reuse and not self.window
end

--- Adds a request (see request.lua for params); returns its handle: .output_ids, .text,
-- .finish_reason, .state, :cancel().
function Engine:submit(params)
  if type(params) ~= "table" then error("submit needs a table such as { prompt = \"...\" }, got " .. type(params), 2) end
  if self.closed then errors.raise { code = "closed", message = "the engine is closed" } end
  self.submitted = self.submitted + 1
  local request = Request.new(self, params, self.submitted)
  local tokens = math.max(1, request.prompt_length + request.limit - 1)
  -- With a window in every layer, pages behind it are given back on the way.
  if self.window then tokens = math.min(tokens, self.window + 2 * self.block_tokens) end
  local blocks = math.ceil(tokens / self.block_tokens)
  if blocks > self.num_blocks then
    errors.raise { code = "memory", message = ("the request may reach %d tokens, and the cache holds %d; raise --kv-cache-bytes or lower --max-tokens")
      :format(request.prompt_length + request.limit, self.num_blocks * self.block_tokens) }
  end
  if request.limit <= 0 then
    self:finish(request, "length")
  else
    table.insert(self.waiting, request)
  end
  return request
end

--- Steps until nothing is left to do.
function Engine:run()
  while self:step() do end
end

return Engine
