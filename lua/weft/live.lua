--- A model that runs: what can be changed while its ranks stay. Methods of the session (`model` at
-- the prompt); all are collective: every rank calls them with the same arguments.
local core = require "weft.core"
local agree = require "weft.agree"
local policies = require "weft.policy"
local Session = require "weft.session"
local setup = require "weft.setup"
local Reuse = require "weft.reuse"

local function sizes_of(bytes)
  if bytes < 1e6 then return ("%.1f kB"):format(bytes / 1e3) end
  if bytes < 1e9 then return ("%.2f MB"):format(bytes / 1e6) end
  return ("%.2f GB"):format(bytes / 1e9)
end

function Session:__tostring()
  local n = self.rank.world_size
  return ("%s on %d rank%s, %s; rank %d holds %s of weights and %s of cache (%d tokens)"):format(self.name, n, n == 1 and "" or "s",
    tostring(self.policy), self.rank.rank, sizes_of(self.weight_bytes), sizes_of(self.num_blocks * self.bytes_per_block),
    self.num_blocks * self.block_tokens)
end

--- model:lead(job, ...): rank 0 runs job(engine, ...) and every rank executes the steps that it
-- publishes; what job gives (a plain value) comes back on all, and so does its failure.
function Session:lead(job, ...)
  if self.rank.world_size == 1 then return job(self.engine, ...) end
  local ok, result = true, nil
  if self.rank.rank == 0 then
    ok, result = pcall(job, self.engine, ...)
    self.engine.record:build { kind = "command" }
    self.engine.record:publish()
  else
    local step = core.step_receive()
    while step.kind == "forward" do
      self:execute(step)
      step = core.step_receive(step)
    end
  end
  local failure = not ok and { message = type(result) == "table" and result.message or tostring(result), code = type(result) == "table" and result.code or nil }
  local answer = self.everyone:broadcast_value({ failure = failure or nil, result = ok and result or nil }, 0)
  if answer.failure then error(setmetatable(answer.failure, { __tostring = function(e) return e.message end }), 0) end
  return answer.result
end

--- model:bytes(): of every rank, { rank =, weights =, cache =, live = } in bytes; live is all memory
-- that tensors of the rank hold now, measured.
function Session:bytes()
  local mine = { rank = self.rank.rank, weights = self.weight_bytes, cache = self.num_blocks * self.bytes_per_block,
    live = core.memory().live_bytes }
  local list = {}
  for root = 0, self.everyone.size - 1 do list[root + 1] = self.everyone:broadcast_value(mine, root) end
  return list
end

-- Builds beside what there is, and swaps when all ranks have built. prepare() and undo() frame it. What is not used
-- afterwards is given back, the new layers or the old ones.
local function rebuild(session, change, prepare, undo)
  local committed, fresh = false, nil
  core.attempt(function()
    if prepare then prepare() end
    fresh = setmetatable({}, Session)
    for key, value in pairs(session) do fresh[key] = value end
    for key, value in pairs(change) do fresh[key] = value end
    Session.build_model(fresh, fresh.script, fresh.options, true)
    return core.commit(function()
      committed, fresh.made = true, nil
      for key, value in pairs(fresh) do session[key] = value end
      if session.reuse then session.reuse:keep() end
      if session.engine then session.engine:rebind() end
      Session.collect()
    end)
  end, function()
    if committed then return end
    if fresh then fresh:discard() end
    fresh = nil
    if undo then undo() end
    Session.collect()
  end)
end

-- The policy that a value is or makes, legal for the model and these ranks.
local function legal(session, value, name)
  if not (type(value) == "userdata" and getmetatable(value) == "weft.policy") and type(value) ~= "table" then
    error("replan needs a weft.policy or its sizes such as { tensor = 4 }, got " .. type(value), 0)
  end
  local n = session.rank.world_size
  local policy = setup.policy({ policy = value, ranks = n }, session.cfg, name)
  if policy.num_ranks ~= n then
    error(("the policy %s is for %d rank%s, and there are %d; start weft with -tp %d for it"):format(tostring(policy), policy.num_ranks,
      policy.num_ranks == 1 and "" or "s", n, policy.num_ranks), 0)
  end
  return policy
end

--- model:plans(values [, count]): the policies that the values are or make, the same on all ranks and legal for the model.
function Session:plans(values, count)
  return agree.on("policy", function()
    local list, texts = {}, {}
    for i = 1, count or #values do
      list[i] = legal(self, values[i], self.name)
      texts[i] = policies.text(list[i], self.cfg.num_hidden_layers)
    end
    return list, table.concat(texts, "\n")
  end)
end

--- model:replan(policy): cuts the loaded model another way on the same ranks. Groups and shards are
-- made beside the old ones and take their place when every rank has them; when one fails, or Ctrl-C
-- comes, the old plan stays. The cache is dropped: requests that run compute their tokens again.
-- policy: a weft.policy, or its sizes: model:replan { tensor = 4, attention = { tensor = 2 } }.
function Session:replan(policy)
  policy = self:plans({ policy }, 1)[1]
  local rank, before, old = self.rank.rank, self.policy, nil
  rebuild(self, { policy = policy, reuse = self.reuse and Reuse.new() or nil, num_blocks = false }, function()
    old = core.take_groups()
    core.groups.create_all(policy:groups())
    core.layer_parallel.init(policies.lowered(policy, rank))
  end, function()
    if old then old:restore() end
    core.layer_parallel.init(policies.lowered(before, rank))
  end)
  old:close()
  return self
end

--- model:use(script): the forward pass of another model script's table (weft.model "Name" {...}), over
-- the weights that are loaded: layers that it makes with the same arguments are the ones there are.
-- The old one stays when the new one cannot be built.
function Session:use(script)
  local name = agree.on("model", function()
    if type(script) ~= "table" or type(script.build) ~= "function" then
      error("model:use needs a model with a build function (weft.model \"Name\" {...}), got " .. type(script), 0)
    end
    local name, build = script.name or self.name, debug.getinfo(script.build, "S")
    legal(self, self.policy, name)
    return name, ("%s, built by %s:%d"):format(name, build.short_src, build.linedefined)
  end)
  rebuild(self, { script = script, name = name })
  return self
end

return Session
