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
-- Where the GPUs choose the tokens, a decode step is launched before those of the step in front are known: it
-- names them by their rows, so the GPUs never wait for this file. A request that turns out to have ended is in
-- one step too many, whose token is dropped. (`ahead = true` does the same on CPUs, for specs.)
local core = require "weft.core"
local errors = require "weft.errors"
local gpu = require "weft.gpu"
local Request = require "weft.request"

local Engine = {}
Engine.__index = Engine

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

-- Gives all pages of a request back; those behind its window went before.
function Engine:release(request)
  local held = {}
  for _, block in ipairs(request.blocks) do
    if block then held[#held + 1] = block end
  end
  if #held > 0 then self.pool:free(held) end
  request.blocks, request.behind = {}, 0
end

-- Gives back the pages that no layer's window can reach any more.
function Engine:release_behind_window(request)
  if not self.window then return end
  local reach = request.computed - self.window + 1 -- first position that the next token sees
  while (request.behind + 1) * self.block_tokens <= reach do
    request.behind = request.behind + 1
    if request.blocks[request.behind] then self.pool:free { request.blocks[request.behind] } end
    request.blocks[request.behind] = false
  end
end

-- Gives the request's pages back, and tells who asked for it.
function Engine:finish(request, reason)
  self:release(request)
  request.state, request.finish_reason = "finished", reason
  if request.params.on_finish then request.params.on_finish(request) end
end

-- Gives the request pages for its first `tokens` tokens; false when there are none left.
function Engine:grow(request, tokens)
  local missing = math.ceil(tokens / self.block_tokens) - #request.blocks
  return missing <= 0 or self.pool:allocate(missing, request.blocks) ~= nil
end

-- How many tokens more the request could hold with every free page.
function Engine:room(request)
  return (#request.blocks + self.pool.free_blocks) * self.block_tokens - request.computed
end

-- Takes the youngest running request's pages away; it waits at the front and is computed again.
function Engine:preempt(victim)
  self.preemptions = self.preemptions + 1
  self.log("the cache is full: request %d waits and is computed again (%d tokens)", victim.number, victim.computed)
  self:release(victim)
  victim.computed, victim.state = 0, "waiting"
  table.insert(self.waiting, 1, victim)
end

-- Starts a waiting request: pages that hold the same first tokens are used again.
function Engine:admit(request, budget)
  if self.prefix_reuse and #request.blocks == 0 then
    request.blocks, request.computed = self.pool:match(request.tokens)
  end
  local n = math.min(#request.tokens - request.computed, self.prefill_chunk, budget)
  -- Alone, a request starts with whatever fits; beside others it waits for room.
  if #self.running == 0 then
    n = math.min(n, self:room(request))
    if n <= 0 then errors.raise { code = "internal", message = "the cache has no free block, and nothing runs" } end
  end
  if self:grow(request, request.computed + n) then return n end
  self:release(request)
  request.computed = 0
  return 0
end

-- Which requests take part in the next step, and with how many tokens.
function Engine:schedule()
  local batch, budget = {}, self.max_batch_tokens
  for i = #self.running, 1, -1 do
    if self.running[i].cancelled then self:finish(table.remove(self.running, i), "cancelled") end
  end
  for i = #self.waiting, 1, -1 do
    if self.waiting[i].cancelled then self:finish(table.remove(self.waiting, i), "cancelled") end
  end
  local i = 1
  while i <= #self.running and budget > 0 do
    local request = self.running[i]
    local n = math.min(#request.tokens - request.computed, self.prefill_chunk, budget)
    local fits = self:grow(request, request.computed + n)
    while not fits and self.running[#self.running] ~= request do
      self:preempt(table.remove(self.running))
      fits = self:grow(request, request.computed + n)
    end
    if not fits and self:room(request) > 0 then -- a part of a chunk
      n = math.min(n, self:room(request))
      fits = self:grow(request, request.computed + n)
    end
    if not fits then -- the youngest of all: it steps back itself
      self:preempt(table.remove(self.running))
      break
    end
    batch[#batch + 1] = { request = request, count = n }
    budget = budget - n
    i = i + 1
  end
  while #self.waiting > 0 and #self.running < self.max_batch and budget > 0 do
    local request = self.waiting[1]
    local n = self:admit(request, budget)
    if n == 0 then break end
    table.remove(self.waiting, 1)
    table.insert(self.running, request)
    request.state = "running"
    batch[#batch + 1] = { request = request, count = n }
    budget = budget - n
  end
  return batch
end

-- Whether every request gives one token and draws one: what a captured graph can run.
local function is_decode(batch)
  for _, entry in ipairs(batch) do
    if entry.count ~= 1 or not entry.samples then return false end
  end
  return true
end

-- The step record's tables, from the batch. An entry with a row gets what that row of the step in flight draws.
function Engine:describe(batch)
  local requests, gather = {}, false
  for i, entry in ipairs(batch) do
    local request, ids, start = entry.request, {}, entry.request.computed
    if entry.row then
      ids[1], start = -entry.row, start + 1
      entry.samples = true
    else
      for k = 1, entry.count do ids[k] = request.tokens[start + k] end
      entry.samples = start + entry.count == #request.tokens
      entry.all_logits = entry.samples and request:needs_all_logits()
    end
    gather = gather or entry.all_logits
    requests[i] = {
      ids = ids, start = start, blocks = request.blocks, sample = entry.samples,
      temperature = request.temperature, seed = request.seed,
    }
  end
  batch.decodes = not gather and is_decode(batch)
  local record = { requests = requests, block_tokens = self.block_tokens, gather_logits = gather }
  if self.session.graphs and batch.decodes then record.graph, record.pad_to = true, gpu.bucket(#batch) end
  return record
end

-- Begins the step of a batch on all ranks; gives the batch.
function Engine:launch(batch)
  self.record, self.spare = self.spare, self.record
  self.record:build(self:describe(batch))
  self.record:publish()
  self.session:launch(self.record)
  return batch
end

-- The step behind the one in flight, begun, when it is certain who takes part in it; else nil.
function Engine:follow(flight)
  if not self.ahead or not flight.decodes or #self.waiting > 0 or #flight ~= #self.running then return nil end
  for _, entry in ipairs(flight) do
    local request = entry.request
    if request.cancelled or request.state ~= "running" or #request.output_ids + 1 >= request.limit then return nil end
  end
  local batch = {}
  for i, entry in ipairs(flight) do
    if not self:grow(entry.request, entry.request.computed + 2) then return nil end
    batch[i] = { request = entry.request, count = 1, row = i }
  end
  return self:launch(batch)
end

-- Draws with filters from the whole row (rank 0 has it).
local function draw(request, row)
  local p = request.params
  if request.logprobs then table.insert(request.logprobs, core.sampler.logprobs(row, p.logprobs)) end
  return core.sampler.draw(row, {
    temperature = request.temperature, top_k = p.top_k or 0, top_p = p.top_p or 1, min_p = p.min_p or 0,
    repetition_penalty = p.repetition_penalty or 1, history = request.tokens,
    seed = request.seed, position = #request.tokens,
  })
end

-- The end of the step in flight: its tokens go to their requests. Gives the tokens of prompts that were computed,
-- how many were drawn, and what a callback raised.
function Engine:settle(flight)
  local ids, logits = self.session:take()
  local prefill, drawn, finished, raised = 0, 0, {}, nil
  for _, entry in ipairs(flight) do
    local request = entry.request
    if entry.samples then drawn = drawn + 1 end
    -- One that ended or was cancelled while the step was in flight is not told what it drew.
    if request.state == "running" and not (entry.row and request.cancelled) then
      if request.computed < request.prompt_length then prefill = prefill + entry.count end
      local before = math.floor(request.computed / self.block_tokens)
      request.computed = request.computed + entry.count
      if self.prefix_reuse and math.floor(request.computed / self.block_tokens) > before then
        self.pool:commit(request.blocks, request.tokens, request.computed)
      end
      self:release_behind_window(request)
      if entry.samples then
        local id = ids and ids[drawn]
        if entry.all_logits then id = draw(request, logits:select(0, drawn - 1)) end
        local reason, failure = request:push(id)
        if reason then finished[request] = reason end
        raised = raised or failure
      end
    end
  end
  for i = #self.running, 1, -1 do
    local reason = finished[self.running[i]]
    if reason then self:finish(table.remove(self.running, i), reason) end
  end
  return prefill, drawn, raised
end

--- Ends the step in flight, if there is one, and begins no other.
function Engine:land()
  local flight = self.flight
  self.flight = nil
  if flight then self:settle(flight) end
end

--- One step. Returns false when there is nothing to do.
function Engine:step()
  local began, flight = core.now(), self.flight
  if not flight then
    local batch = self:schedule()
    if #batch == 0 then return #self.waiting > 0 or #self.running > 0 end
    flight = self:launch(batch)
  end
  self.flight = self:follow(flight)
  local prefill, drawn, raised = self:settle(flight)
  local timing, seconds = self.timing, core.now() - began
  timing.steps = timing.steps + 1
  if prefill > 0 then
    timing.prefill_s, timing.prefill_tokens = timing.prefill_s + seconds, timing.prefill_tokens + prefill
  else
    timing.decode_s, timing.decode_tokens = timing.decode_s + seconds, timing.decode_tokens + drawn
  end
  if raised then error(raised, 0) end -- a callback's: its request has ended, the others go on
  return true
end

--- Steps until nothing is left to do.
function Engine:run()
  while self:step() do end
end

-- Pages for the first `tokens` tokens, or a refusal with the numbers.
function Engine:pages(request, tokens)
  if self:grow(request, tokens) then return end
  errors.raise { code = "memory", message = ("the prompt needs %d tokens of cache, and it holds %d"):format(tokens, self.num_blocks * self.block_tokens) }
end

-- One step of one request by hand: tokens [at, at + #ids), all their logits.
function Engine:feed(request, ids, at)
  self:land()
  self:pages(request, at + #ids)
  self.record:build {
    requests = { { ids = ids, start = at, blocks = request.blocks, logits = "all" } },
    block_tokens = self.block_tokens, gather_logits = true,
  }
  self.record:publish()
  local drawn, logits = self.session:execute(self.record)
  return logits, drawn
end

--- Logits of every position of a prompt: on_rows(first position, float32 [rows, vocab]) per chunk.
-- Gives the token that the last row would draw greedily, and the request (still holding its pages).
function Engine:score(ids, on_rows)
  local request = Request.new(self, { prompt_ids = ids, max_tokens = 0 }, 0)
  local at, drawn = 0, nil
  while at < #ids do
    local chunk = {}
    for k = 1, math.min(self.prefill_chunk, #ids - at) do chunk[k] = ids[at + k] end
    local logits, best = self:feed(request, chunk, at)
    on_rows(at, logits)
    at = at + #chunk
    drawn = best[#best]
    request.computed = at
    self:release_behind_window(request)
  end
  return drawn, request
end

--- The prompt and a continuation of `steps` tokens (forced, or greedy), one decode step each.
-- Gives { ids = continuation, logits = float32 [#prompt + #ids, vocab] }.
function Engine:trace(prompt_ids, forced, steps)
  local total = #prompt_ids + (forced and #forced or steps)
  local all = core.tensor({ total, self.vocab_size }, "float32")
  local ids = {}
  local function keep(at, rows) all:narrow(0, at, rows.shape[1]):copy(rows) end
  local best, request = self:score(prompt_ids, keep)
  for at = #prompt_ids, total - 1 do
    local id = forced and forced[#ids + 1] or best
    ids[#ids + 1] = id
    local logits, drawn = self:feed(request, { id }, at)
    keep(at, logits)
    best = drawn[1]
  end
  self:release(request)
  return { ids = ids, logits = all }
end

return Engine
