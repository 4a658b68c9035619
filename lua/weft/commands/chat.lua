--- weft chat: a conversation at the terminal. Ctrl-C stops an answer, Ctrl-D leaves.
local core = require "weft.core"
local errors = require "weft.errors"
local run = require "weft.commands.run"

local chat = {}

-- The sampling that the checkpoint recommends, under what flags say.
local function params_of(options, generation)
  local params = run.params(options)
  for _, key in ipairs { "temperature", "top_p", "top_k", "min_p", "repetition_penalty" } do
    if params[key] == nil then params[key] = generation[key] end
  end
  if generation.do_sample == false and options.temperature == nil then params.temperature = 0 end
  params.max_tokens = params.max_tokens or 512
  return params
end

--- One answer: streams it and gives its text.
local function answer(engine, template, messages, params)
  local request_params = {}
  for key, value in pairs(params) do request_params[key] = value end
  request_params.prompt_ids = template:encode(engine.tokenizer, messages)
  request_params.stop_ids = not params.ignore_eos and template:stop_ids(engine.tokenizer) or nil
  request_params.on_token = function(_, _, text)
    io.stdout:write(text)
    io.stdout:flush()
  end
  local request = engine:submit(request_params)
  while request.state ~= "finished" do
    engine:step()
    if core.interrupted() then request:cancel() end
  end
  io.stdout:write "\n"
  io.stdout:flush()
  return request.text
end

--- The job on rank 0.
function chat.job(engine, options)
  if core.interrupted() then errors.raise { code = "interrupted", message = "interrupted" } end -- while it loaded
  local template = require("weft.chat").template(engine.session.cfg, engine.tokenizer, engine.model_dir)
  if template.note then io.stderr:write("weft: ", template.note, "\n") end
  local params = params_of(options, engine.session.cfg.generation or {})
  local messages = {}
  if options.system then messages[1] = { role = "system", content = options.system } end
  local interactive = core.isatty(0)
  if interactive then
    io.stderr:write(("%s, %s template. Ctrl-C stops an answer, Ctrl-D leaves.\n"):format(engine.session.name, template.family))
  end
  local input, ended = require("weft.line_input").open { plain = not interactive }, nil
  while not ended do
    local line, why = input:read "> "
    core.interrupted() -- Ctrl-C at the prompt drops the line and is no answer's
    ended = why == "eof"
    if line and line:match "%S" then
      input:add(line)
      messages[#messages + 1] = { role = "user", content = line }
      local ok, text = pcall(answer, engine, template, messages, params)
      if ok then
        messages[#messages + 1] = { role = "assistant", content = text }
      elseif type(text) == "table" and text.code == "invalid" or text.code == "memory" then
        io.stderr:write("weft: ", text.message, "\n") -- the history is too long, say: the conversation goes on
        messages[#messages] = nil
        if not interactive then return 1 end
      else
        input:close()
        error(text, 0)
      end
    end
  end
  input:close(true)
  return 0
end

function chat.run(options)
  options.on_interrupt = "flag"
  options.needs_tokenizer = "weft chat needs it"
  if options.model then require("weft.chat").own_template(options.model) end -- a broken one is found before weights are read
  return require("weft.runtime").launch(options, "weft.commands.chat", "job")
end

return chat
