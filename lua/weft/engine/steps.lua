--- Methods of the engine: one step, from its batch to the tokens of its requests (engine.lua).
--
-- Where the GPUs choose the tokens, a decode step is launched before those of the step in front are known: it
-- names them by their rows, so the GPUs never wait for this file. A request that turns out to have ended is in
-- one step too many, whose token is dropped. (`ahead = true` does the same on CPUs, for specs.)
local core = require "weft.core"
local gpu = require "weft.gpu"

local Engine = {}

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

-- Begins the step of a batch on all ranks; gives the batch. follows: it is what is behind the step in flight, and
-- grown[i] the pages of a request that has got more since.
function Engine:launch(batch, follows, grown)
  self.record, self.spare = self.spare, self.record
  if not (follows and self.record:follow(self.spare, grown)) then self.record:build(self:describe(batch)) end
  self.record:publish()
  self.session:launch(self.record)
  return batch
end

-- A batch of the same requests, one token each. The tables of the step before, which has ended, are used again.
local function batch_behind(flight)
  local batch = flight.spare or {}
  for i = 1, #flight do
    local entry = batch[i] or {}
    entry.request, entry.count, entry.row, entry.samples, entry.all_logits = flight[i].request, 1, i, true, false
    batch[i] = entry
  end
  for i = #flight + 1, #batch do batch[i] = nil end
  batch.decodes, batch.spare, flight.spare = true, nil, nil
  return batch
end

-- The step behind the one in flight, begun, when it is certain who takes part in it; else nil.
function Engine:follow(flight)
  if not self.ahead or not flight.decodes or #self.waiting > 0 or #flight ~= #self.running then return nil end
  for i = 1, #flight do
    local request = flight[i].request
    if request.cancelled or request.state ~= "running" or #request.output_ids + 1 >= request.limit then return nil end
  end
  local grown
  for i = 1, #flight do
    local request = flight[i].request
    local had = #request.blocks
    if not self:grow(request, request.computed + 2) then return nil end
    if #request.blocks > had then
      grown = grown or {}
      grown[i] = request.blocks
    end
  end
  return self:launch(batch_behind(flight), true, grown)
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
  if self.flight then self.flight.spare = flight end
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

return Engine
