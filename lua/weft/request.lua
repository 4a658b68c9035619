--- One request of an engine: its tokens, its place in the cache, what it may draw, what it has said.
local errors = require "weft.errors"
local Request = {}
Request.__index = Request

local function fail(message) errors.raise { message = message, code = "invalid" } end

local function check_prompt(engine, ids)
  if #ids == 0 then
    fail "the prompt is empty: give it at least one token"
  end
  for i = 1, #ids do
    local id = ids[i]
    if type(id) ~= "number" or id ~= math.floor(id) or id < 0 or id >= engine.vocab_size then
      fail(("prompt id %s at place %d is outside the vocabulary: 0 to %d"):format(tostring(id), i - 1, engine.vocab_size - 1))
    end
  end
  if #ids > engine.max_position then
    fail(("the prompt has %d tokens, and the model takes at most %d (max_position_embeddings)"):format(#ids, engine.max_position))
  end
end

local ranges = {
  temperature = { 0, 100 }, top_p = { 0, 1 }, min_p = { 0, 1 }, top_k = { 0, 1e9 }, repetition_penalty = { 0.01, 100 },
  max_tokens = { 0, 1e9 }, seed = { 0, 2 ^ 53 }, logprobs = { 0, 100 },
}

local known = {
  prompt = "string", prompt_ids = "table", stop = "table", stop_ids = "table", ignore_eos = "boolean",
  on_token = "function", on_finish = "function",
}
for name in pairs(ranges) do known[name] = "number" end

--- params: prompt (text) or prompt_ids; max_tokens (128), temperature (0), top_k, top_p, min_p,
-- repetition_penalty, seed, stop (list of texts), stop_ids, ignore_eos, logprobs,
-- on_token(request, id, text), on_finish(request).
function Request.new(engine, params, number)
  for name, range in pairs(ranges) do
    local value = params[name]
    if value ~= nil and not (type(value) == "number" and value >= range[1] and value <= range[2]) then
      fail(("%s must be a number from %.14g to %.14g, got %s"):format(name, range[1], range[2], tostring(value)))
    end
  end
  for key, value in pairs(params) do
    local wanted = known[key]
    if not wanted then fail(("unknown field '%s' of a request"):format(tostring(key))) end
    if type(value) ~= wanted then fail(("%s must be a %s, got %s"):format(key, wanted, type(value))) end
  end
  for i, text in ipairs(params.stop or {}) do
    if type(text) ~= "string" then fail(("stop[%d] must be a text, got %s"):format(i, type(text))) end
  end
  if params.prompt and params.prompt_ids then fail "prompt and prompt_ids exclude one another" end
  local ids = params.prompt_ids
  if not ids then
    if type(params.prompt) ~= "string" then fail "a request needs prompt (a text) or prompt_ids" end
    if not engine.tokenizer then
      fail("no tokenizer.json in " .. engine.model_dir .. "; give the prompt as token ids (--prompt-ids)")
    end
    ids = engine.tokenizer:encode(params.prompt)
  end
  check_prompt(engine, ids)
  local self = setmetatable({
    number = number, params = params, tokens = {}, prompt_length = #ids, prompt = params.prompt,
    computed = 0, blocks = {}, behind = 0, output_ids = {}, text = "", emitted = 0, state = "waiting",
    seed = params.seed or engine.seed, temperature = params.temperature or 0,
    limit = math.min(params.max_tokens or 128, engine.max_position - #ids),
    logprobs = params.logprobs and {} or nil,
  }, Request)
  for i = 1, #ids do self.tokens[i] = ids[i] end
  self.stop_ids = {}
  if not params.ignore_eos then
    for _, id in ipairs(engine.eos_ids) do self.stop_ids[id] = true end
  end
  for _, id in ipairs(params.stop_ids or {}) do self.stop_ids[id] = true end
  if engine.tokenizer then
    self.stream = engine.tokenizer:stream()
    for i = 1, #ids do self.stream:push(ids[i]) end -- so that the first word keeps its space
  end
  return self
end

--- Whether the draw looks at the whole vocabulary (filters, penalties, log-probabilities).
function Request:needs_all_logits()
  local p = self.params
  return self.logprobs ~= nil or (p.repetition_penalty or 1) ~= 1
    or (self.temperature > 0 and ((p.top_k or 0) > 0 or (p.top_p or 1) < 1 or (p.min_p or 0) > 0))
end

-- Where a stop text begins in the text so far, or nil; and how much of the tail may be its beginning.
local function find_stop(text, stops, from)
  local first, held = nil, 0
  for _, stop in ipairs(stops) do
    local at = stop ~= "" and text:find(stop, math.max(1, from - #stop + 1), true)
    if at and (not first or at < first) then first = at end
    for n = math.min(#stop - 1, #text), 1, -1 do
      if text:sub(-n) == stop:sub(1, n) then
        held = math.max(held, n)
        break
      end
    end
  end
  return first, held
end

--- Takes a drawn token; returns the finish reason or nil. Emits the text that is certain.
function Request:push(id)
  self.tokens[#self.tokens + 1] = id
  self.output_ids[#self.output_ids + 1] = id
  local reason
  if self.stop_ids[id] then reason = "stop"
  elseif #self.output_ids >= self.limit then reason = "length" end
  local before = #self.text
  if self.stream then
    self.text = self.text .. self.stream:push(id)
    if reason then self.text = self.text .. self.stream:finish() end
  end
  local held = 0
  if self.params.stop and #self.params.stop > 0 then
    local at
    at, held = find_stop(self.text, self.params.stop, before)
    if at then
      self.text = self.text:sub(1, at - 1)
      reason, held = "stop", 0
    end
  end
  local upto = #self.text - (reason and 0 or held)
  local piece = self.text:sub(self.emitted + 1, upto)
  self.emitted = math.max(self.emitted, upto)
  if self.params.on_token then
    local ok, raised = pcall(self.params.on_token, self, id, piece)
    if not ok then return "error", raised end
  end
  return reason
end

--- Stops the request at the next step; what it has said so far stays.
function Request:cancel()
  self.cancelled = true
end

return Request
