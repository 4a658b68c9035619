--- weft run: text or ids in, text or ids out.
local core = require "weft.core"
local errors = require "weft.errors"
local json = core.json

local run = {}

local function usage(message) errors.raise { usage = true, message = message } end

--- Prompts of a file: a line each; JSON strings in a .jsonl file.
function run.read_prompts(path)
  local text = errors.read_file(path, "the prompts")
  local prompts, number = {}, 0
  if text == "" then return prompts end
  for line in (text:gsub("\n$", "") .. "\n"):gmatch "(.-)\n" do
    number = number + 1
    line = line:gsub("\r$", "")
    if path:match "%.jsonl$" then
      local ok, value = pcall(json.decode, line)
      if not ok or type(value) ~= "string" then
        errors.raise { message = ("%s line %d: wanted a JSON string, found %s"):format(path, number,
          line == "" and "an empty line" or line:sub(1, 60)), code = "format" }
      end
      line = value
    end
    prompts[#prompts + 1] = line
  end
  return prompts
end

local sampling = { "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos", "logprobs" }

--- The request parameters that flags give.
function run.params(options)
  local params = {}
  for _, key in ipairs(sampling) do params[key] = options[key] end
  return params
end

local function rate(tokens, seconds)
  return seconds > 0 and tokens / seconds or 0
end

--- What `timing` holds (DESIGN 10).
function run.timing(engine)
  local t = engine.timing
  return {
    load_ms = engine.session.load_ms, prefill_ms = t.prefill_s * 1000, decode_ms = t.decode_s * 1000,
    prefill_tok_per_s = rate(t.prefill_tokens, t.prefill_s), decode_tok_per_s = rate(t.decode_tokens, t.decode_s),
  }
end

local function result_of(request, engine)
  local prompt_ids = {}
  for i = 1, request.prompt_length do prompt_ids[i] = request.tokens[i] end
  return {
    prompt_ids = json.array(prompt_ids), output_ids = json.array(request.output_ids), text = request.text,
    finish_reason = request.finish_reason, timing = engine and run.timing(engine) or nil,
    logprobs = request.logprobs and json.array(request.logprobs) or nil,
  }
end

-- One prompt: its text streams as it comes.
local function single(engine, options)
  local params = run.params(options)
  params.prompt, params.prompt_ids = options.prompt, options.prompt_ids
  local streams = not options.json
  if streams then
    params.on_token = function(_, id, text)
      if engine.tokenizer then io.stdout:write(text) else io.stdout:write(id, " ") end
      io.stdout:flush()
    end
  end
  local request = engine:submit(params)
  local ok, failure = pcall(engine.run, engine)
  if not ok then
    if streams and #request.output_ids > 0 then io.stdout:write "\n" end -- the message is not to stick to the text
    error(failure, 0)
  end
  if streams then io.stdout:write "\n" else io.stdout:write(json.encode(result_of(request, engine)), "\n") end
  io.stdout:flush()
end

-- A file of prompts: a JSON object a line, in the file's order, as soon as all before are done.
local function many(engine, options)
  local requests, shown = {}, 0
  local function show()
    while requests[shown + 1] and requests[shown + 1].state == "finished" do
      shown = shown + 1
      io.stdout:write(json.encode(result_of(requests[shown])), "\n")
    end
    io.stdout:flush()
  end
  local counter = core.isatty(2) and not options.verbose
  for i, prompt in ipairs(options.prompts) do
    local params = run.params(options)
    params.prompt = prompt
    local ok, request = pcall(engine.submit, engine, params)
    if not ok then
      errors.raise { message = ("%s line %d: %s"):format(options.file, i, type(request) == "table" and request.message or request), code = "invalid" }
    end
    requests[i] = request
  end
  while engine:step() do
    show()
    if counter then io.stderr:write(("\r%d of %d prompts"):format(shown, #requests)) end
  end
  show()
  if counter then io.stderr:write "\n" end
end

--- The job on rank 0.
function run.job(engine, options)
  if options.prompts then many(engine, options) else single(engine, options) end
  local t = run.timing(engine)
  engine.log("load %.0f ms, prefill %.1f ms (%.0f tok/s), decode %.1f ms (%.1f tok/s), %d preemptions",
    t.load_ms, t.prefill_ms, t.prefill_tok_per_s, t.decode_ms, t.decode_tok_per_s, engine.preemptions)
  return 0
end

--- Raises unless exactly one of the flags that give a prompt was given, or at most one where none are `wanted`.
function run.check_prompt(options, wanted)
  local given = {}
  for _, flag in ipairs { "--prompt", "--prompt-ids", "-f" } do
    if options[flag == "-f" and "file" or flag:sub(3):gsub("-", "_")] then given[#given + 1] = flag end
  end
  if #given == 0 and wanted then usage("a prompt is missing: " .. wanted) end
  if #given > 1 then usage(table.concat(given, " and ") .. " exclude one another") end
end

function run.run(options)
  run.check_prompt(options, "--prompt TEXT, --prompt-ids 5,6,7 or -f FILE")
  if options.file then
    options.prompts = run.read_prompts(options.file)
    if #options.prompts == 0 then
      io.stderr:write(("weft: -f %s: it has no prompts\n"):format(options.file))
      return 0
    end
  end
  options.needs_tokenizer = not options.prompt_ids and "give the prompt as token ids (--prompt-ids)" or nil
  -- Room for the prompt and its continuation; text is at most one token a byte.
  local longest = options.prompt_ids and #options.prompt_ids or 0
  for _, text in ipairs(options.prompts or { options.prompt or "" }) do longest = math.max(longest, #text + 8) end
  local together = options.prompts and math.min(#options.prompts, options.max_batch or 64) or 1
  options.cache_requests = { count = together, tokens = longest + (options.max_tokens or 128) }
  return require("weft.runtime").launch(options, "weft.commands.run", "job")
end

return run
