--- Methods of the engine: one request fed by hand, for the logits of every position (engine.lua).
local core = require "weft.core"
local Request = require "weft.request"

local Engine = {}

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
