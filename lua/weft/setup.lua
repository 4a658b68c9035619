--- What can be refused before weights are read: the model's config and script, the plan and its rules, the
-- device. Starts nothing.
local core = require "weft.core"
local errors = require "weft.errors"
local config = require "weft.config"
local environment = require "weft.environment"
local models = require "weft.models"
local policies = require "weft.policy"

local setup = {}

local function usage(message) errors.raise { usage = true, message = message } end

--- Raises unless what the script of that path returned is a model.
function setup.check_script(path, model)
  if type(model) == "table" and type(model.build) == "function" then return end
  errors.raise { message = ("%s must return a model made by weft.model \"Name\" {...} with a build function, got %s")
    :format(path, type(model) == "table" and "a table without build" or type(model)), code = "invalid" }
end

--- Runs SCRIPT.lua (or finds the registered model) in this state: the model's table, its name, its text.
function setup.load_model(options, cfg)
  if not options.script then
    local model, message = models.find(cfg.architectures[1])
    if not model then errors.raise { message = message, code = "unsupported" } end
    return model, cfg.architectures[1], cfg.architectures[1]
  end
  local text = errors.read_input(options.script, "the model script")
  local chunk, syntax = loadstring(text, "@" .. options.script)
  if not chunk then errors.raise { message = "the model script has a syntax error: " .. syntax, code = "format" } end
  local model = chunk()
  setup.check_script(options.script, model)
  return model, model.name, text
end

--- The dtype that activations are computed in.
function setup.compute_dtype(options, cfg)
  local dtype = options.dtype or "auto"
  if dtype == "auto" then dtype = cfg.dtype or (cfg.quantization and "bfloat16") or "float32" end
  return dtype
end

--- Where the ranks of these options compute: "cpu" or "cuda", the default where there is a GPU.
function setup.device(options)
  if options.device == "cpu" then return "cpu" end
  local gpus = core.gpu.count()
  if gpus > 0 then return "cuda" end
  if options.device == "cuda" then
    local visible = environment.visible()
    usage(core.gpu.built and ("--device cuda: this process sees no GPU (%s%s); use --device cpu")
        :format(visible and visible .. ": " or "", core.gpu.why_none())
      or "--device cuda: this build of weft has no CUDA kernels; use --device cpu")
  end
  return "cpu"
end

--- The most ranks that may run: as many as there are GPUs, or nil where there is no such bound.
function setup.most_ranks(options)
  if setup.device(options) == "cuda" and not options.oversubscribe then return core.gpu.count() end
end

--- Raises where `what`, "the plan" say, needs more ranks than may run.
function setup.check_gpus(options, num_ranks, what)
  local most = setup.most_ranks(options)
  if most and num_ranks > most then
    usage(("%s needs %d ranks, and %s; --oversubscribe lets ranks share one, --device cpu uses threads"):format(what, num_ranks, environment.gpus()))
  end
end

-- A CPU in place of the GPUs that were named is no surprise to be left in silence; "" is how one asks for it.
local function tell_device(options)
  local visible = environment.visible()
  if options.device or options.told or not core.gpu.built or core.gpu.count() > 0 then return end
  if not visible or visible == "CUDA_VISIBLE_DEVICES=" then return end
  options.told = true
  io.stderr:write(("weft: no GPU is seen with %s: running on the CPU; --device cpu says so in silence\n"):format(visible))
end

-- A fault that was asked for at a place that the run never comes to would look like one that did no harm.
local function check_fault(options)
  if not ("," .. (os.getenv "WEFT_FAULT" or "") .. ","):find(",at=capture,", 1, true) then return end
  local why = setup.device(options) == "cpu" and "it is on the CPU" or options.eager and "--eager" or options.oversubscribe and "--oversubscribe"
  if why then usage(("WEFT_FAULT: at=capture strikes where graphs are captured, and this run captures none (%s)"):format(why)) end
end

local function check_flags(options)
  if not options.model or options.model == "" then usage "--model is missing: a folder with config.json and weights" end
  local load_format = options.load_format or "auto"
  if load_format == "gguf" then usage "--load-format gguf: weft does not read GGUF files yet" end
  if load_format ~= "auto" and load_format ~= "safetensors" and load_format ~= "dummy" then
    usage(("--load-format is one of auto, safetensors, dummy, got '%s'"):format(load_format))
  end
  if options.plan_only then return end
  check_fault(options)
  if setup.device(options) == "cpu" and options.gpu_memory_utilization then
    usage "--gpu-memory-utilization is a share of a GPU's memory, and this run is on the CPU; --kv-cache-bytes sizes its cache"
  end
  if options.model:match "%.json$" and load_format ~= "dummy" then
    usage(("--model %s: a config.json alone is for weft plan and --load-format dummy; give the folder"):format(options.model))
  end
end

local function load_config(options)
  local cfg = config.load(options.model)
  cfg.compute_dtype = setup.compute_dtype(options, cfg)
  if options.quantization == "fp8_block" and not cfg.quantization then
    usage "--quantization fp8_block: the model's config.json names no fp8 quantisation, its weights are plain"
  end
  return cfg
end

-- Text needs a tokenizer; options.needs_tokenizer says what to do without one.
local function check_tokenizer(options)
  local path = options.model .. "/tokenizer.json"
  if not options.needs_tokenizer or core.same_file(path, path) then return end
  errors.raise { message = ("no tokenizer.json in %s; %s"):format(options.model, options.needs_tokenizer), code = "io" }
end

-- The name of the model, whose script is run in silence: it runs again on each rank, and what it prints is
-- rank 0's to say.
local function name_of_model(options, cfg)
  local _, name = policies.in_silence(setup.load_model, options, cfg)
  if models.supports(name, "experts") and not cfg.num_experts then
    errors.raise { code = "format", message = ("%s: num_local_experts (or num_experts) is missing, and %s has experts")
      :format(options.model:match "%.json$" and options.model or options.model .. "/config.json", name) }
  end
  return name
end

--- The policy of the options, legal for the model; raises { usage = true, message =, refused = { rule =, nearest = } }.
function setup.policy(options, cfg, name)
  local known = { name = name, supports = models.supports }
  local made, policy = pcall(policies.from_options, options)
  if not made and type(policy) == "table" and policy.code ~= "invalid" then error(policy, 0) end -- a file that cannot be read
  local rule = not made and (errors.message(policy):gsub("^%S+%.lua:%d+: ", ""))
  if made then rule = select(2, policies.validate(policy, cfg, known)) end
  if not rule then return policy end
  if made and options.plan then rule = ("the plan %s: %s"):format(options.plan, rule) end
  local list, texts = policies.says_twice(options) and {} or require("weft.plan_nearest").list(options, cfg, known, 3), {}
  for i, plan in ipairs(list) do texts[i] = plan.text end
  local near = #texts > 0 and (" Nearest legal plan%s: %s"):format(#texts > 1 and "s" or "", table.concat(texts, ", "))
  errors.raise { usage = true, message = near and rule:gsub("%.?$", ".", 1) .. near or rule, refused = { rule = rule, nearest = list } }
end

--- Everything that can be refused before weights are read: { cfg =, policy =, num_ranks =, name = }.
function setup.check(options)
  check_flags(options)
  local cfg = load_config(options)
  check_tokenizer(options)
  local name = name_of_model(options, cfg)
  local policy = setup.policy(options, cfg, name)
  if not options.plan_only then
    setup.check_gpus(options, policy.num_ranks, "the plan")
    tell_device(options)
  elseif options.quantization == "none" then cfg.quantization = nil end -- counted as the run will hold them
  return { cfg = cfg, policy = policy, num_ranks = policy.num_ranks, name = name }
end

return setup
