--- Methods of the engine: who takes part in a step, and which pages hold what (engine.lua).
local errors = require "weft.errors"

local Engine = {}

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

-- Pages for the first `tokens` tokens, or a refusal with the numbers.
function Engine:pages(request, tokens)
  if self:grow(request, tokens) then return end
  errors.raise { code = "memory", message = ("the prompt needs %d tokens of cache, and it holds %d"):format(tokens, self.num_blocks * self.block_tokens) }
end

return Engine
