--- From what was typed to a policy: plan flags, or --plan FILE.lua; and its check against a model.
local core = require "weft.core"
local errors = require "weft.errors"

local policies = {}

local error_meta = { __tostring = function(err) return err.message end }

local function raise(code, format, ...)
  error(setmetatable({ code = code, message = format:format(...) }, error_meta), 0)
end

local function fail(format, ...) raise("invalid", format, ...) end

-- Flags that say how the model is cut; --plan stands for all of them.
local plan_flags = {
  { "tensor_parallel_size", "-tp" }, { "tensor_parallel_size_attention", "-tpa" },
  { "decode_context_parallel_size", "-dcp" }, { "dcp_comm_backend", "--dcp-comm-backend" },
  { "cp_kv_cache_interleave_size", "--cp-kv-cache-interleave-size" }, { "expert_parallel_size", "-ep" },
}

--- Whether options (of weft.flags) say how the model is cut.
function policies.says_how(options)
  for _, flag in ipairs(plan_flags) do
    if options[flag[1]] ~= nil then return true end
  end
  return options.plan ~= nil
end

--- Whether a plan script stands beside flags that say it too.
function policies.says_twice(options)
  for _, flag in ipairs(plan_flags) do
    if options.plan and options[flag[1]] ~= nil then return flag[2] end
  end
end

local function is_policy(value)
  return type(value) == "userdata" and getmetatable(value) == "weft.policy"
end

--- The parallel sizes of flags, checked together: a weft.parallel_config.
function policies.parallel_config(options)
  local given = { block_size = options.block_size }
  for _, flag in ipairs(plan_flags) do given[flag[1]] = options[flag[1]] end
  return core.parallel_config(given)
end

--- A policy with the same sizes. Attention that is cut as all else is not said again.
function policies.from_config(config)
  local own = config.attention_tp_size ~= config.tensor_parallel_size or config.decode_context_parallel_size > 1
  return core.policy {
    tensor = config.tensor_parallel_size,
    attention = own and { tensor = config.attention_tp_size, context = config.decode_context_parallel_size } or nil,
    mlp = config.tensor_parallel_size_mlp and { tensor = config.tensor_parallel_size_mlp },
    experts = config.expert_parallel_size > 1 and { expert = config.expert_parallel_size } or nil,
    interleave = config.cp_kv_cache_interleave_size,
    exchange = config.dcp_comm_backend,
    block_size = config.block_size,
  }
end

--- fn(...) where print and io.write do nothing: a script that runs again, or will, has its output shown once.
function policies.in_silence(fn, ...)
  local shown, write = print, io.write
  print, io.write = function() end, function() return io.stdout end
  local results = { pcall(fn, ...) }
  print, io.write = shown, write
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2, table.maxn(results))
end

-- Runs a plan script: what it returns, raising one line when it cannot be run.
local function run_script(path)
  local text = errors.read_input(path, "the plan")
  local chunk, syntax = loadstring(text, "@" .. path)
  if not chunk then fail("the plan has a syntax error: %s", syntax) end
  setfenv(chunk, setmetatable({ weft = require "weft" }, { __index = _G })) -- a plan needs no require
  local ok, result = pcall(chunk)
  if not ok then fail("the plan %s failed: %s", path, errors.message(result)) end
  return result
end

-- Without metatables, so that looking at it runs nothing.
local function plain_copy(t, depth)
  local copy = {}
  for key, value in next, t do copy[key] = type(value) == "table" and depth > 0 and plain_copy(value, depth - 1) or value end
  return copy
end

--- Raises what one of these functions raised, as a mistake of the command line unless a file could not be read.
function policies.refuse(failure)
  if type(failure) == "table" and failure.code ~= "invalid" then error(failure, 0) end
  errors.usage(errors.message(failure))
end

--- The sizes that a plan script writes down, legal or not: the table it gives to weft.policy, or returns; nil
-- when there is none.
function policies.sizes_written(path)
  local weft, written = require "weft", nil
  local make = weft.policy
  weft.policy = function(sizes)
    written = written or sizes
    return make(sizes)
  end
  local ok, result = pcall(policies.in_silence, run_script, path)
  weft.policy = make
  if not written and ok and not is_policy(result) then written = result end
  return type(written) == "table" and plain_copy(written, 4) or nil
end

-- A policy, or the table of sizes that makes one.
local function as_policy(value, path)
  if is_policy(value) then return value end
  if type(value) == "table" then
    local ok, policy = pcall(core.policy, value)
    if ok then return policy end
    fail("the plan %s: %s", path, (errors.message(policy):gsub("^%S+:%d+: ", "")))
  end
  fail("the plan %s must return a weft.policy{...}, got %s", path, value == nil and "nothing" or type(value))
end

--- The policy that a plan script returns.
function policies.load(path)
  return as_policy(run_script(path), path)
end

--- The list of policies that a plan script returns, for `verify --plans FILE.lua`: a list of
-- policies or tables of sizes, or a single one.
function policies.load_list(path)
  local result = run_script(path)
  if type(result) ~= "table" or result[1] == nil then return { as_policy(result, path) } end
  local list = {}
  for i, value in ipairs(result) do list[i] = as_policy(value, path) end
  return list
end

--- The policy of parsed flags (weft.flags): `policy` (a table of sizes, from a program), the
-- `plan_number`th of a `plan_list` (a script), `plan` (a script) or the plan flags.
function policies.from_options(options)
  if options.plan_list then return policies.in_silence(policies.load_list, options.plan_list)[options.plan_number] end
  if options.policy then return is_policy(options.policy) and options.policy or core.policy(options.policy) end
  if not options.plan then return policies.from_config(policies.parallel_config(options)) end
  local flag = policies.says_twice(options)
  if flag then fail("--plan cannot be combined with %s: the plan says how the model is cut", flag) end
  local policy = policies.load(options.plan)
  if options.block_size and options.block_size ~= policy.block_size then
    fail("--block-size %d, but the plan %s has block_size %d; set it there", options.block_size, options.plan, policy.block_size)
  end
  return policy
end

--- Experts of a model under the names that checkpoints use: how many, and the width of one.
function policies.experts_of(cfg)
  local count = cfg.num_local_experts or cfg.num_experts or cfg.n_routed_experts or 0
  if count == 0 then return 0, 0 end
  return count, cfg.moe_intermediate_size or cfg.intermediate_size
end

--- Width of the dense MLP; 0 when every layer has experts.
function policies.mlp_width(cfg)
  local count = policies.experts_of(cfg)
  local dense = (cfg.first_k_dense_replace or 0) > 0 or (type(cfg.mlp_only_layers) == "table" and #cfg.mlp_only_layers > 0)
  if count > 0 and not dense then return 0 end
  return cfg.intermediate_size or 0
end

--- What the rules need to know of a model. `supports(type)` tells which layer types take plans.
function policies.model_numbers(cfg, name, supports)
  local types = {}
  for _, layer_type in ipairs { "attention", "mlp", "experts" } do
    if supports(layer_type) then types[#types + 1] = layer_type end
  end
  local num_experts, expert_width = policies.experts_of(cfg)
  return {
    architecture = name, supported_layer_types = types,
    num_attention_heads = cfg.num_attention_heads, num_key_value_heads = cfg.num_key_value_heads,
    intermediate_size = supports "mlp" and cfg.intermediate_size or policies.mlp_width(cfg), vocab_size = cfg.vocab_size,
    num_hidden_layers = cfg.num_hidden_layers, num_experts = num_experts, moe_intermediate_size = expert_width,
  }
end

--- Whether the model can be cut so: true, or nil and one line.
-- model = { name =, supports = function(name, layer_type) }
function policies.validate(policy, cfg, model)
  local numbers = policies.model_numbers(cfg, model.name, function(layer_type) return model.supports(model.name, layer_type) end)
  local ok, err = pcall(policy.validate_model, policy, numbers)
  -- An encoder takes the default plan whatever attention is given.
  if ok and cfg.is_causal == false then
    local plain = core.policy { tensor = policy.tensor }
    ok, err = pcall(plain.validate_model, plain, numbers)
  end
  if ok then return true end
  return nil, type(err) == "table" and err.message or tostring(err)
end

local cut_types = { "attention", "mlp", "experts", "embedding", "lm_head" }

--- All that a policy says, a line for each thing, so that ranks can compare: also what tostring leaves out.
function policies.text(policy, num_layers)
  local lines = { tostring(policy) }
  for _, layer_type in ipairs(cut_types) do
    local function sizes(layer)
      local s = policy:sizes(layer_type, layer)
      return ("%s={tensor=%d,context=%d,expert=%d,interleave=%d,exchange=%s}")
        :format(layer_type, s.tensor, s.context, s.expert, s.interleave, s.exchange)
    end
    local common = sizes()
    lines[#lines + 1] = common
    for i = 0, num_layers - 1 do
      local own = sizes(i)
      if own ~= common then lines[#lines + 1] = ("layer %d %s"):format(i, own) end
    end
  end
  return table.concat(lines, "\n")
end

--- The policy that options give on this rank, the same on all. Collective; num_layers: of the model, or 0.
function policies.of_ranks(options, num_layers)
  local ranks = core.rank().world_size
  local policy = require("weft.agree").on("policy", function()
    local again = core.rank().rank == 0 and policies.in_silence or function(fn, ...) return fn(...) end -- it was looked at before
    local policy = again(policies.from_options, options)
    return policy, policies.text(policy, num_layers)
  end)
  if policy.num_ranks ~= ranks then
    errors.usage(("the plan gives a policy for %d ranks when ranks run it, and gave one for %d before they were started")
      :format(policy.num_ranks, ranks))
  end
  return policy
end

--- The plans of a rank, as layer_parallel.init takes them: default plan, overrides.
function policies.lowered(policy, rank)
  return policy:lower(rank)
end

return policies
