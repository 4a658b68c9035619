--- Command line flags: one table says what there is; parsing, --help and errors follow from it.
local errors = require "weft.errors"
local flags = {}

-- { names, key, kind, metavar, help, min/max/choices }
local plan_flags = {
  { "-tp", "--tensor-parallel-size", key = "tensor_parallel_size", kind = "int", min = 1, max = 1024, meta = "N",
    help = "ranks that cut each layer (threads of this process)" },
  { "-tpa", "--tensor-parallel-size-attention", key = "tensor_parallel_size_attention", kind = "int", min = 1, max = 1024,
    meta = "N", help = "ranks that cut the heads of attention; the other tp/N share the sequence" },
  { "-dcp", "--decode-context-parallel-size", key = "decode_context_parallel_size", kind = "int", min = 1, max = 1024,
    meta = "N", help = "ranks that share the sequence (default: tp/tpa)" },
  { "--dcp-comm-backend", key = "dcp_comm_backend", kind = "choice", choices = { "ag_rs", "a2a" },
    help = "exchange of partial attention: all-gather + reduce-scatter, or all-to-all" },
  { "--cp-kv-cache-interleave-size", key = "cp_kv_cache_interleave_size", kind = "int", min = 1, max = 65536, meta = "N",
    help = "tokens that stay together on one context rank (default 1)" },
  { "-ep", "--expert-parallel-size", key = "expert_parallel_size", kind = "int", min = 1, max = 1024, meta = "N",
    help = "ranks that share out whole experts" },
  { "--plan", key = "plan", kind = "string", meta = "FILE.lua", help = "a script that returns weft.policy{...}, instead of the flags above" },
}

local model_flags = {
  { "--model", key = "model", kind = "string", meta = "DIR", help = "folder with config.json, weights and tokenizer.json" },
  { "--device", key = "device", kind = "choice", choices = { "cpu", "cuda" }, help = "default: cuda where there is one" },
  { "--dtype", key = "dtype", kind = "choice", choices = { "auto", "float32", "bfloat16", "float16" },
    help = "what activations are computed in (auto: the checkpoint's)" },
  { "--load-format", key = "load_format", kind = "string", meta = "auto|safetensors|dummy", help = "dummy: weights made from their names, no files read" },
  { "--quantization", key = "quantization", kind = "choice", choices = { "none", "fp8_block" }, help = "none: fp8 weights become floats when loaded; fp8_block: activations are rounded to fp8 too, as GPUs do (default: fp8 weights, plain activations)" },
  { "--block-size", key = "block_size", kind = "int", min = 1, max = 65536, meta = "N", help = "tokens of a cache block on each rank (default 16)" },
  { "--kv-cache-bytes", key = "kv_cache_bytes", kind = "bytes", meta = "BYTES", help = "memory for the cache on each rank (K, M, G suffixes)" },
  { "--gpu-memory-utilization", key = "gpu_memory_utilization", kind = "number", min = 0.01, max = 1, meta = "F",
    help = "share of GPU memory that weft may use, the cache what weights leave of it (default: no limit, and a cache for this run's tokens, or 8192)" },
  { "--max-batch", key = "max_batch", kind = "int", min = 1, max = 4096, meta = "N", help = "requests in a step (default 64)" },
  { "--max-batch-tokens", key = "max_batch_tokens", kind = "int", min = 1, max = 1048576, meta = "N", help = "tokens in a step (default 2048)" },
  { "--prefill-chunk", key = "prefill_chunk", kind = "int", min = 1, max = 1048576, meta = "N", help = "prompt tokens of one request in a step (default 512)" },
  { "--eager", key = "eager", kind = "bool", help = "no captured graphs" },
  { "--oversubscribe", key = "oversubscribe", kind = "bool", help = "let ranks share a GPU (for checking)" },
  { "--timeout", key = "timeout", kind = "number", min = 0.01, max = 1e6, meta = "S", help = "seconds a rank waits for a silent one (default 300)" },
  { "-v", "--verbose", key = "verbose", kind = "bool", help = "say more on standard error" },
}

local sampling_flags = {
  { "--max-tokens", key = "max_tokens", kind = "int", min = 0, max = 1e9, meta = "N", help = "tokens to generate (default 128)" },
  { "--temperature", key = "temperature", kind = "number", min = 0, max = 100, meta = "T", help = "0 is greedy (default)" },
  { "--top-p", key = "top_p", kind = "number", min = 0, max = 1, meta = "P", help = "smallest set of tokens with this probability" },
  { "--top-k", key = "top_k", kind = "int", min = 0, max = 1e9, meta = "K", help = "the K likeliest tokens (0: all)" },
  { "--min-p", key = "min_p", kind = "number", min = 0, max = 1, meta = "P", help = "tokens at least P times as likely as the best" },
  { "--repetition-penalty", key = "repetition_penalty", kind = "number", min = 0.01, max = 100, meta = "F", help = "1: none" },
  { "--seed", key = "seed", kind = "int", min = 0, max = 2 ^ 53, meta = "N", help = "of the random draws (default 0)" },
  { "--stop", key = "stop", kind = "strings", meta = "TEXT", help = "stop when this text appears (may be given again)" },
  { "--ignore-eos", key = "ignore_eos", kind = "bool", help = "do not stop at the end-of-text token" },
  { "--logprobs", key = "logprobs", kind = "int", min = 0, max = 100, meta = "N", help = "log-probabilities of the N likeliest tokens" },
}

-- Those of `defs` whose key is to be kept; help: other words for some keys.
local function some(defs, keep, help)
  local list = {}
  for _, def in ipairs(defs) do
    local copy = {}
    for key, value in pairs(def) do copy[key] = value end
    copy.help = help and help[def.key] or def.help
    if keep(def.key) then list[#list + 1] = copy end
  end
  return list
end

local chat_sampling = some(sampling_flags, function(key) return key ~= "logprobs" end,
  { max_tokens = "tokens of an answer (default 512)", temperature = "0 is greedy (default: what generation_config.json says)" })
local seed_flag = some(sampling_flags, function(key) return key == "seed" end)
local verify_model = some(model_flags, function() return true end,
  { dtype = "what activations are computed in (default float32, the exact mode; auto: the checkpoint's)" })

-- Where no rank is started: what is counted with, and the rest.
local counted = { model = true, dtype = true, quantization = true, block_size = true }
local counted_flags = some(model_flags, function(key) return counted[key] end)
local run_flags = some(model_flags, function(key) return not counted[key] end)
local verbose_flag = some(model_flags, function(key) return key == "verbose" end)

local one_prompt_flags = {
  { "--prompt", key = "prompt", kind = "string", meta = "TEXT", help = "the prompt" },
  { "--prompt-ids", key = "prompt_ids", kind = "ids", meta = "5,6,7", help = "the prompt as token ids" },
}
local prompt_flags = { one_prompt_flags[1], one_prompt_flags[2],
  { "-f", "--file", key = "file", kind = "string", meta = "FILE", help = "one prompt a line (.jsonl: JSON strings)" },
}
local json_flag = { "--json", key = "json", kind = "bool", help = "one JSON object on the last line of standard output" }
local out_flag = { "--out", key = "out", kind = "string", meta = "FILE", help = "where to write" }

-- groups: the flags of a command; without_effect: those that it takes and that change nothing, so that the flags of a
-- run may stay when the command is changed.
local commands = {
  run = { groups = { prompt_flags, { json_flag }, model_flags, plan_flags, sampling_flags }, script = true,
    usage = "weft run [SCRIPT.lua] --model DIR (--prompt TEXT | --prompt-ids 5,6,7 | -f FILE) [plan] [sampling]",
    about = "Generates text." },
  chat = { groups = { { { "--system", key = "system", kind = "string", meta = "TEXT", help = "the system message" } }, model_flags, plan_flags, chat_sampling },
    script = true, usage = "weft chat [SCRIPT.lua] --model DIR [plan] [sampling]", about = "Talks with a model; Ctrl-C stops an answer, Ctrl-D leaves, ,new begins again, ,drop leaves out the oldest turn." },
  logits = { groups = { one_prompt_flags, { out_flag, json_flag }, model_flags, plan_flags }, script = true,
    usage = "weft logits [SCRIPT.lua] --model DIR (--prompt TEXT | --prompt-ids 5,6,7) --out FILE.safetensors [plan]",
    about = "Writes tensor `logits`, float32 [tokens, vocab]." },
  bench = { groups = { {
      { "--batch", key = "batch", kind = "int", min = 1, max = 4096, meta = "N", help = "requests that decode together (default 1)" },
      { "--context", key = "context", kind = "int", min = 1, max = 1e8, meta = "N", help = "tokens in the cache when decoding starts (default 128)" },
      { "--prefill", key = "prefill", kind = "int", min = 1, max = 1e8, meta = "N", help = "tokens of the timed prefill (default: --context)" },
      { "--steps", key = "steps", kind = "int", min = 1, max = 1e6, meta = "N", help = "timed decode steps (default 32)" },
      { "--machine", key = "machine", kind = "string", meta = "NAME", help = "name under which weft plan finds the figures (default: cpu, or the GPU's)" }, json_flag,
    }, model_flags, plan_flags }, without_effect = seed_flag, script = true,
    usage = "weft bench [SCRIPT.lua] --model DIR [--batch N --context N --prefill N] [plan] [--json]",
    about = "Times prefill and decode." },
  verify = { groups = { prompt_flags, {
      { "--plans", key = "plans", kind = "string", meta = "all|FILE.lua", help = "which plans (default all)" },
      { "--max-ranks", key = "max_ranks", kind = "int", min = 1, max = 1024, meta = "N", help = "largest number of ranks (default 8, and at most the GPUs there are)" },
      { "--max-tokens", key = "max_tokens", kind = "int", min = 1, max = 1e6, meta = "N", help = "decode steps after each prompt" }, json_flag,
    }, verify_model }, without_effect = seed_flag, script = true,
    usage = "weft verify [SCRIPT.lua] --model DIR [--plans all] [--max-ranks N]",
    about = "Runs every legal plan against one rank." },
  plan = { groups = { {
      { "--context", key = "context", kind = "int", min = 0, max = 1e9, meta = "N", help = "tokens of context of each request (default: the model's)" },
      { "--batch", key = "batch", kind = "int", min = 1, max = 1e6, meta = "N", help = "requests (default 1; --search: 1, 2, 4, ... that fit)" },
      { "--machine", key = "machine", kind = "string", meta = "h200|h100|gb200-nvl72|cpu|FILE.lua", help = "what a step is priced for (default h200)" },
      { "--draw", key = "draw", kind = "bool", help = "draw the ranks: heads, tokens, columns, experts" },
      { "--svg", key = "svg", kind = "string", meta = "FILE", help = "the same picture (--search: the front) as SVG" },
      { "--search", key = "search", kind = "bool", help = "price all legal plans; the front of speed a user against speed a rank" },
      { "--max-ranks", key = "max_ranks", kind = "int", min = 1, max = 1024, meta = "N", help = "largest number of ranks of --search (default 8)" },
      json_flag,
    }, counted_flags, plan_flags }, without_effect = run_flags, script = true,
    usage = "weft plan [SCRIPT.lua] --model DIR|config.json [plan] [--machine M --batch N --context N] [--draw] [--svg FILE]\n"
      .. "  weft plan [SCRIPT.lua] --model DIR|config.json --search [--max-ranks N] [--machine M --batch N --context N] [--svg FILE]",
    about = "Says who holds what under a plan, what moves, and what a step should cost; starts no ranks." },
  repl = { groups = { { { "-i", "--interactive", key = "interactive", kind = "bool", help = "a prompt also where standard input is no terminal" } },
      model_flags, plan_flags, seed_flag }, script = true,
    usage = "weft repl [SCRIPT.lua] [--model DIR] [plan]",
    about = "A prompt over all ranks: look at layers, change the plan, run." },
  lua = { groups = {}, raw = true, usage = "weft lua FILE.lua [args]", about = "Runs a plain script with `weft` at hand." },
  tokenize = { groups = { { prompt_flags[1],
      { "-f", "--file", key = "file", kind = "string", meta = "FILE.jsonl", help = "one JSON string a line" },
      { "--decode", key = "decode", kind = "string", meta = "5,6,7", help = "ids to text" },
      { "--no-special", key = "no_special", kind = "bool", help = "add no special tokens" },
      { "--model", key = "model", kind = "string", meta = "DIR", help = "folder with tokenizer.json" } } },
    without_effect = verbose_flag,
    usage = "weft tokenize --model DIR (--prompt TEXT | -f FILE.jsonl | --decode 5,6,7) [--no-special]",
    about = "Text to token ids and back; needs only tokenizer.json." },
}
flags.commands = commands
flags.order = { "run", "chat", "logits", "bench", "verify", "plan", "repl", "lua", "tokenize" }

-- Known to exist elsewhere in the field, and not run by weft yet: refused by name.
local refused = {}
for _, entry in ipairs {
  { "pipeline parallelism", "-pp", "--pipeline-parallel-size" },
  { "data parallelism", "-dp", "--data-parallel-size" },
  { "prefill context parallelism", "-pcp", "--prefill-context-parallel-size" },
} do
  for i = 2, #entry do refused[entry[i]] = entry[1] end
end

local function fail(message)
  errors.raise { usage = true, message = message }
end

local function distance(a, b) -- edits between two short words
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local before = row[0]
    row[0] = i
    for j = 1, #b do
      local cost = math.min(row[j] + 1, row[j - 1] + 1, before + (a:byte(i) == b:byte(j) and 0 or 1))
      before, row[j] = row[j], cost
    end
  end
  return row[#b]
end

local function number(flag, text, def)
  local value = tonumber(text)
  local whole = def.kind == "int"
  if not value or value ~= value or (whole and value ~= math.floor(value)) then
    fail(("%s wants %s, got '%s'"):format(flag, whole and "a whole number" or "a number", text))
  end
  if value < def.min or value > def.max then
    fail(("%s must be from %.14g to %.14g, got %s"):format(flag, def.min, def.max, text))
  end
  return value
end

local parsers = {
  int = number,
  number = number,
  string = function(flag, text, def)
    if text == "" and ((def.meta or ""):find "^FILE" or def.meta == "DIR") then fail(("%s wants a name, got ''"):format(flag)) end
    return text
  end,
  choice = function(flag, text, def)
    for _, choice in ipairs(def.choices) do
      if choice == text then return text end
    end
    fail(("%s is one of %s, got '%s'"):format(flag, table.concat(def.choices, ", "), text))
  end,
  ids = function(flag, text)
    local ids = {}
    if text:match "^%s*$" then return ids end
    for piece in (text .. ","):gmatch "([^,]*)," do
      local id = piece:match "^%s*(%d+)%s*$"
      if not id or tonumber(id) > 2147483647 then
        fail(("%s wants token ids separated by commas, got '%s'"):format(flag, piece))
      end
      ids[#ids + 1] = tonumber(id)
    end
    return ids
  end,
  bytes = function(flag, text)
    local digits, unit = text:match "^(%d+%.?%d*)%s*([KMGT]?)i?[Bb]?$"
    if not digits then fail(("%s wants a number of bytes such as 512M, got '%s'"):format(flag, text)) end
    local shift = { [""] = 0, K = 10, M = 20, G = 30, T = 40 }
    local bytes = tonumber(digits) * 2 ^ shift[unit]
    if bytes > 2 ^ 53 then fail(("%s must be at most 8192T, got '%s'"):format(flag, text)) end
    return math.floor(bytes)
  end,
}

local function index_of(command)
  local index, names = {}, {}
  local function add(defs)
    for _, def in ipairs(defs) do
      for i = 1, #def do
        index[def[i]] = def
        names[#names + 1] = def[i]
      end
    end
  end
  for _, group in ipairs(command.groups) do add(group) end
  add(command.without_effect or {})
  return index, names
end

local function unknown(flag, names, command_name)
  if refused[flag] then fail(("%s: weft does not run %s yet"):format(flag, refused[flag])) end
  local best, best_distance
  for _, name in ipairs(names) do
    local d = distance(flag, name)
    if not best or d < best_distance then best, best_distance = name, d end
  end
  local hint = best and best_distance <= math.min(3, (#flag - 1) / 2) and (" (did you mean %s?)"):format(best) or ""
  fail(("unknown flag '%s' for weft %s%s; see weft %s --help"):format(flag, command_name, hint, command_name))
end

--- Parses args[first..] of a command. Returns options: flags by key, `script` for SCRIPT.lua, and
-- `given` (which flags were typed). Raises { usage = true, message = } for wrong usage.
function flags.parse(name, args, first)
  local command = commands[name]
  local options = { given = {} }
  if command.raw then
    options.args = {}
    for i = first, #args do options.args[#options.args + 1] = args[i] end
    return options
  end
  local index, names = index_of(command)
  local i = first
  while i <= #args do
    local word = args[i]
    if word == "--help" or word == "-h" then return { help = true } end
    if word:sub(1, 1) == "-" and word ~= "-" then
      local flag, value = word:match "^(%-%-[^=]+)=(.*)$"
      flag = flag or word
      local def = index[flag] or unknown(flag, names, name)
      if def.kind == "bool" then
        if value then fail(("%s takes no value, got '%s'"):format(flag, value)) end
        options[def.key] = true
      else
        if not value then
          i = i + 1
          value = args[i]
          if value == nil then fail(("%s needs a value: %s %s"):format(flag, flag, def.meta or table.concat(def.choices or {}, "|"))) end
        end
        if def.kind == "strings" then
          options[def.key] = options[def.key] or {}
          table.insert(options[def.key], value)
        else
          if options.given[def.key] then fail(("%s is given twice"):format(flag)) end
          options[def.key] = parsers[def.kind](flag, value, def)
        end
      end
      options.given[def.key] = true
    elseif command.script and not options.script then
      options.script = word
    else
      fail(("unexpected '%s'; see weft %s --help"):format(word, name))
    end
    i = i + 1
  end
  return options
end

--- The text of `weft COMMAND --help`.
function flags.help(name)
  local command = commands[name]
  local lines = { command.about, "", "  " .. command.usage, "" }
  for _, group in ipairs(command.groups) do
    for _, def in ipairs(group) do
      local left = table.concat(def, ", ")
      local value = def.choices and table.concat(def.choices, "|") or def.meta
      if value then left = left .. " " .. value end
      if #left > 34 then
        lines[#lines + 1] = "  " .. left
        left = ""
      end
      lines[#lines + 1] = ("  %-34s  %s"):format(left, def.help)
    end
  end
  local names = {}
  for i, def in ipairs(command.without_effect or {}) do names[i] = table.concat(def, ", ") end
  if #names > 0 then lines[#lines + 1] = "\n  Taken as well, and without effect here: " .. table.concat(names, ", ") end
  return table.concat(lines, "\n") .. "\n"
end

return flags
