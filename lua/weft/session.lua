--- A session: the model as one rank holds it, and its steps. What can be changed while it runs is in live.lua.
local core = require "weft.core"
local errors = require "weft.errors"
local config = require "weft.config"
local gpu = require "weft.gpu"
local policies = require "weft.policy"
local agree = require "weft.agree"
local setup = require "weft.setup"
local Weights = require "weft.weights"
local Parts = require "weft.parts"

local Session = {}
Session.__index = Session

-- On a CPU: the ids that the step before drew take the places that name them.
local function follow(session, step)
  for i = 0, step.num_tokens - 1 do
    local id = step.ids:get(i)
    if id < 0 then step.ids:set(session.drawn[-id], i) end
  end
end

--- Begins one forward pass on this rank. On a GPU it may still run when this returns; session:take() ends it.
-- Another one may begin in between.
function Session:launch(step)
  core.begin_step()
  local launched
  if self.device == "cuda" then
    launched = gpu.launch(self, step)
  else
    if step.follows then follow(self, step) end
    local hidden = self.model.forward(step)
    if type(hidden) ~= "userdata" then
      errors.raise { code = "invalid", message = ("forward of model '%s' must return the hidden states, a tensor [tokens, hidden_size], got %s")
        :format(self.name, type(hidden)) }
    end
    launched = {}
    if step.num_logits > 0 then
      local logits = self.model.lm_head:forward(core.gather_rows(hidden, step.logits_indices))
      if step.gather_logits then launched.logits = self.model.lm_head:gather(logits) end
      launched.ids = self.sampler:forward_step(logits, step)
      self.drawn = launched.ids
    end
  end
  table.insert(self.launched, launched)
end

--- The end of the oldest pass that was begun: ids drawn (rows that need no filters) and, when the record asked,
-- all logits (float32 [rows, vocab]).
function Session:take()
  local launched = table.remove(self.launched, 1)
  if self.device == "cuda" then return gpu.take(self, launched) end
  return launched.ids, launched.logits
end

--- One forward pass, from begin to end.
function Session:execute(step)
  self:launch(step)
  return self:take()
end

--- After a failure: what was begun is not asked for any more.
function Session:forget()
  self.launched = {}
  core.gpu.forget_tokens()
end

--- What nothing names any more goes now: weights and caches are large. Compiled traces name the functions of the
-- model that they were recorded in, and would keep it.
function Session.collect()
  jit.flush()
  collectgarbage()
  collectgarbage()
end

--- The end of a session in a state that goes on: its layers and pages go, whoever still has the session.
function Session:release()
  self:close()
  for _, name in ipairs { "model", "attentions", "layers", "parts", "sampler", "script", "reuse" } do self[name] = nil end
  Session.collect()
end

--- After a build that failed: the layers that it made go now, whatever still names them.
function Session:discard()
  for _, layer in ipairs(self.made or {}) do layer:close() end
  self.made = nil
end

--- Captured graphs go before the groups whose collectives they hold.
function Session:close()
  if self.graphs then gpu.close_graphs(self) end
end

-- Writes a line to standard error on rank 0; with -v only.
local function logger(options, rank)
  return function(format, ...)
    if options.verbose and rank.rank == 0 then io.stderr:write("weft: ", format:format(...), "\n") end
  end
end

-- Progress while weights load, on a terminal: called with each name, and with nil at the end, which ends the line.
local function progress(rank, cfg)
  if rank.rank ~= 0 or not core.isatty(2) then return nil end
  local shown, total = -1, cfg.num_hidden_layers
  return function(name)
    local layer = name and tonumber(name:match "layers%.(%d+)%.")
    local percent = layer and math.floor(100 * (layer + 1) / total)
    if percent and percent ~= shown then
      io.stderr:write(("\rloading weights %3d%%"):format(percent), percent == 100 and "\n" or "")
      shown = percent
    elseif not name and shown >= 0 and shown < 100 then
      io.stderr:write "\n"
      shown = -1
    end
  end
end

-- All ranks must have run the same script and the same model files.
local function compare_scripts(everyone, rank, text)
  local theirs = everyone:broadcast_value(text, 0)
  if theirs ~= text then
    error(("rank %d read another model script than rank 0; all ranks must run the same"):format(rank.rank), 0)
  end
end

-- Tokens that the cache is for: options.cache_tokens, or those of options.cache_requests = { count =, tokens = } that
-- run together, of which none goes beyond the model's positions.
local function cache_tokens(session, options)
  local most, requests = session.cfg.max_position_embeddings, options.cache_requests
  if requests then return requests.count * (math.min(requests.tokens, most) + 64) end
  return options.cache_tokens or math.min(most, 8192)
end

local function cache_blocks(session, options, attentions)
  local per_block = 0
  for _, attention in ipairs(attentions) do per_block = per_block + attention:bytes_per_block(session.block_tokens) end
  local blocks
  local room = session.device == "cuda" and gpu.cache_bytes(session, options)
  if room and not options.kv_cache_bytes and per_block > 0 then
    blocks = gpu.blocks_in(room, attentions, session.block_tokens)
    if blocks < 1 then
      error({ message = ("no room for a cache: %.1f MB are left on the GPU, one block of %d tokens takes %d bytes; raise --gpu-memory-utilization")
        :format(room / 1e6, session.block_tokens, per_block), code = "device_memory" }, 0)
    end
  elseif options.kv_cache_bytes and per_block > 0 then
    blocks = math.floor(options.kv_cache_bytes / per_block)
    if blocks < 1 then
      errors.raise { usage = true, message = ("--kv-cache-bytes %d holds no block: one block of %d tokens takes %d bytes on this rank")
        :format(options.kv_cache_bytes, session.block_tokens, per_block) }
    end
  else
    blocks = math.ceil(cache_tokens(session, options) / session.block_tokens)
  end
  -- Block ids are shared: the rank with the least room decides for all.
  local least = session.everyone:all_reduce(core.tensor({ 1 }, "int32", { -math.min(blocks, 2 ^ 30) }), "max")
  return -least:get(0), per_block
end

-- A list of every rank's value. Collective.
local function on_all_ranks(everyone, value)
  local list = {}
  for root = 0, everyone.size - 1 do list[root + 1] = everyone:broadcast_value(value, root) end
  return list
end

-- Layers behind those of the config are no failure (some are for training), and no secret. Told once by rank 0.
local function tell_layers(checkpoint, options, rank, cfg)
  if rank.rank ~= 0 or options.told_layers or checkpoint.format == "dummy" then return end
  options.told_layers = true
  local first = cfg.num_hidden_layers
  local behind = first
  while checkpoint:has(("model.layers.%d.input_layernorm.weight"):format(behind)) do behind = behind + 1 end
  if behind == first then return end
  local layers = behind == first + 1 and ("layer %d of the checkpoint is"):format(first)
    or ("layers %d to %d of the checkpoint are"):format(first, behind - 1)
  io.stderr:write(("weft: %s not used: num_hidden_layers of config.json is %d\n"):format(layers, first))
end

-- The checkpoint's weights, as this run wants them.
local function open_weights(options, rank, cfg)
  local checkpoint, message, code = core.checkpoint.open(options.model, { format = options.load_format or "auto" })
  if not checkpoint then errors.raise { message = message, code = code } end
  tell_layers(checkpoint, options, rank, cfg)
  return Weights.new(checkpoint, {
    param_dtype = cfg.compute_dtype == "float32" and "auto" or cfg.compute_dtype,
    dummy_dtype = cfg.dtype, on_tensor = progress(rank, cfg), quantization = cfg.quantization,
    dequantize = options.quantization == "none", quantize_activations = options.quantization == "fp8_block",
  })
end

-- The widest window where every layer has one, else nil: pages behind it can be given back.
local function widest_window(attentions)
  local widest = 0
  for _, attention in ipairs(attentions) do
    if attention.sliding_window == 0 then return nil end
    widest = math.max(widest, attention.sliding_window)
  end
  return widest > 0 and widest or nil
end

-- Runs the model script's build, listening to every layer it makes.
local function build_layers(session, model, weights)
  local attentions, nn, parts, table_bytes, order = {}, require "weft.nn", Parts.new(session.cfg), 0, {}
  session.made = {} -- what this build made itself, for Session:discard
  session.weight_bytes, session.dense_bytes, session.expert_bytes = 0, 0, 0
  -- Hears of every layer that nn makes: session.layers names it, weights are counted, attentions get their pages.
  nn.on_layer = function(kind, layer, known)
    local tensor = weights.options.last_tensor
    local index = tensor and tensor:match "layers%.(%d+)%." -- not the whole name: ranks ask for experts of their own
    order[#order + 1] = index and ("%s of layer %s"):format(kind, index) or kind
    if not known then session.made[#session.made + 1] = layer end
    parts:add(kind, layer, tensor)
    if kind == "attention" then
      attentions[#attentions + 1] = layer
    elseif not (kind == "lm_head" and layer.tied) then
      session.weight_bytes = session.weight_bytes + layer.weight_bytes
    end
    -- What a step reads whole: not the table, of which it takes rows, unless that is the head too.
    if kind == "embedding" then table_bytes = layer.weight_bytes
    elseif kind == "experts" then session.expert_bytes = session.expert_bytes + layer.weight_bytes
    elseif kind ~= "attention" then
      session.dense_bytes = session.dense_bytes + (kind == "lm_head" and layer.tied and table_bytes or layer.weight_bytes)
    end
  end
  local policy = { get = function(_, ...) return core.layer_parallel.get(...) end }
  local make = model.build
  if session.reuse then make = function(...) return session.reuse:build(nn, weights, model.build, ...) end end
  local built
  local function hear_no_more()
    nn.on_layer = function() end
    if weights.options.on_tensor then weights.options.on_tensor(nil) end
  end
  core.attempt(function()
    built = make(session.cfg, weights, policy)
    hear_no_more()
  end, hear_no_more)
  if type(built) ~= "table" or type(built.forward) ~= "function" or type(built.lm_head) ~= "userdata" then
    error(("build of model '%s' must return a table with forward(step) and lm_head"):format(session.name), 0)
  end
  session.model, session.attentions = built, attentions
  session.layers, session.parts = parts.layers, parts.others
  return table.concat(order, "\n")
end

-- Gives each attention its pages.
local function bind_pages(session, options)
  local had = session.num_blocks
  session.window = widest_window(session.attentions)
  session.block_tokens = session.policy.block_size * session.policy.context_lcm
  session.num_blocks, session.bytes_per_block = cache_blocks(session, options, session.attentions)
  for _, attention in ipairs(session.attentions) do
    local keeps = had == session.num_blocks and attention.num_blocks == had -- of a layer that is used again
    if not keeps then attention:bind_cache(session.num_blocks, session.block_tokens) end
  end
  session.kv_bytes_per_rank = on_all_ranks(session.everyone, session.num_blocks * session.bytes_per_block)
end

--- This rank's model from a script's table: layers, pages, sampler, into the session. Collective. together: a rank
-- whose build fails waits for the others, and all fail; else it fails at once, and the world with it.
function Session.build_model(session, model, options, together)
  session:close() -- what was captured belongs to the layers of before
  local function build() return nil, build_layers(session, model, open_weights(options, session.rank, session.cfg)) end
  if not together then
    local _, order = build()
    build = function() return nil, order end
  end
  agree.on("model", build)
  bind_pages(session, options)
  session.sampler = core.sampler.new(session.model.lm_head)
end

-- A model may come without a tokenizer; a broken one is no reason to run without.
local function load_tokenizer(folder)
  if folder:match "%.json$" then return nil end
  local tokenizer, message, code = core.tokenizer.load(folder)
  local path = folder .. "/tokenizer.json"
  if not tokenizer and (code ~= "io" or core.same_file(path, path)) then errors.raise { message = message, code = code } end
  return tokenizer
end

-- Each rank's place in every group, a line a rank.
local function log_places(session)
  local groups = session.policy:groups()
  for r = 0, session.rank.world_size - 1 do
    local places = {}
    for _, group in ipairs(groups) do
      for _, row in ipairs(group.rows) do
        for place, rank in ipairs(row) do
          if rank == r then places[#places + 1] = ("%s %d/%d"):format(group.type, place - 1, group.world_size) end
        end
      end
    end
    session.log("rank %d: %s", r, #places > 0 and table.concat(places, ", ") or "alone")
  end
  for _, group in ipairs(groups) do
    if group.world_size > 1 then
      local own = core.groups.get(group.type, group.world_size)
      session.log("%s: %s", own.name, own.transport)
    end
  end
end

--- Builds this rank's model. Collective.
function Session.open(options)
  local rank, began = core.rank(), core.now()
  local device = setup.device(options)
  if device == "cuda" then gpu.open(options, rank) end
  local cfg = config.load(options.model)
  cfg.compute_dtype = setup.compute_dtype(options, cfg)
  local model, name, text = setup.load_model(options, cfg)
  local policy = policies.of_ranks(options, cfg.num_hidden_layers)
  core.groups.create_all(policy:groups())
  core.layer_parallel.init(policies.lowered(policy, rank.rank))
  local session = setmetatable({
    cfg = cfg, name = name, policy = policy, rank = rank, model_dir = options.model,
    device = device, dequantizes = options.quantization == "none", everyone = core.groups.everyone(), log = logger(options, rank),
    waited = 0, -- seconds that this rank waited for its GPU at the ends of steps
    launched = {}, -- passes that were begun and not ended
  }, Session)
  compare_scripts(session.everyone, rank, name .. "\0" .. text)
  core.fault "load"
  session.script, session.reuse = model, options.reuse
  if device == "cuda" and not options.eager and not options.oversubscribe then session.graphs, session.captured = {}, {} end
  Session.build_model(session, model, options)
  session.made = nil
  if rank.rank == 0 then session.tokenizer = load_tokenizer(options.model) end
  session.load_ms = (core.now() - began) * 1000
  session.log("%s on %d rank%s of %d thread%s (%s): %.1f MB of weights on rank 0 in %.0f ms, %.2f GB/s", name, rank.world_size,
    rank.world_size == 1 and "" or "s", rank.threads, rank.threads == 1 and "" or "s", device == "cuda" and core.gpu.describe(core.gpu.index()) or core.cpu_isa(),
    session.weight_bytes / 1e6, session.load_ms, session.weight_bytes / session.load_ms / 1e6)
  log_places(session)
  session.log("cache: %d blocks of %d tokens, %.1f MB on rank 0", session.num_blocks, session.block_tokens,
    session.num_blocks * session.bytes_per_block / 1e6)
  return session
end

return Session
