--- weft chat: a conversation at the terminal. Ctrl-C stops an answer, Ctrl-D or ,quit leaves; ,new begins another one,
-- ,drop leaves out the oldest turn, which makes room when the context is used up, ,help says so.
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

-- A conversation on rank 0: engine, template, params, messages; pending: the line that did not fit into the context.
local Talk = {}
Talk.__index = Talk

local function leave_interrupted() errors.raise { code = "interrupted", message = "interrupted" } end

local function complain(message) io.stderr:write("weft: ", message, "\n") end

local way_on = "; ,drop leaves out the oldest turn, ,new begins again"

--- One answer to the messages: streams it and gives its text, and whether the context ended it.
function Talk:answer()
  local engine, given = self.engine, {}
  for key, value in pairs(self.params) do given[key] = value end
  given.prompt_ids = self.template:encode(engine.tokenizer, self.messages)
  if #given.prompt_ids >= engine.max_position then
    errors.raise { code = "memory", message = ("the conversation has %d tokens, and the model takes %d with its answer"):format(#given.prompt_ids, engine.max_position) }
  end
  given.stop_ids = not given.ignore_eos and self.template:stop_ids(engine.tokenizer) or nil
  given.on_token = function(_, _, text)
    io.stdout:write(text)
    io.stdout:flush()
  end
  local request = engine:submit(given)
  while request.state ~= "finished" do
    engine:step()
    if core.interrupted() then request:cancel() end
  end
  io.stdout:write "\n"
  io.stdout:flush()
  return request.text, request.finish_reason == "length" and #request.output_ids < given.max_tokens
end

--- Answers a line; false when it cannot be: it is told why, and the conversation is as before.
function Talk:ask(line)
  local messages = self.messages
  messages[#messages + 1] = { role = "user", content = line }
  local ok, text, full = pcall(self.answer, self)
  if ok then
    messages[#messages + 1] = { role = "assistant", content = text }
    if full then complain(("the context of %d tokens is used up%s"):format(self.engine.max_position, way_on)) end
    self.pending = nil
    return true
  end
  messages[#messages] = nil
  local code = type(text) == "table" and text.code
  if code ~= "invalid" and code ~= "memory" then error(text, 0) end
  self.pending = code == "memory" and line or nil
  complain(text.message .. (code == "memory" and #messages >= self.first and way_on or ""))
  return false
end

--- ,new: what was said is forgotten, but for the system message.
function Talk:new_conversation()
  for i = #self.messages, self.first, -1 do self.messages[i] = nil end
  self.pending = nil
  complain "a new conversation"
end

--- ,drop: the oldest turn goes, and a line that did not fit is asked again.
function Talk:drop()
  if #self.messages < self.first then return complain "there is no turn to leave out" end
  for _ = 1, 2 do table.remove(self.messages, self.first) end
  local turns = (#self.messages - self.first + 1) / 2
  complain(("the oldest turn is left out, %d stay%s"):format(turns, turns == 1 and "s" or ""))
  if self.pending then self:ask(self.pending) end
end

local words = { [",new"] = Talk.new_conversation, [",drop"] = Talk.drop, [",quit"] = function() return "quit" end,
  [",help"] = function() complain(",new begins again, ,drop leaves out the oldest turn, ,quit leaves; a line that is to begin with such a word has a space in front") end }

-- A line that begins with a word of its own: true when it was one, whatever became of it, and what it gave.
local function command(talk, line)
  local name, rest = line:match "^(,%a+)%s*(.-)%s*$"
  if not name then return false end
  if not words[name] then
    complain(("no command %s; ,help lists them"):format(name))
    return true, false
  elseif rest ~= "" then
    complain(("%s takes nothing behind it, got '%s'"):format(name, rest))
    return true, false
  end
  return true, words[name](talk)
end

--- The job on rank 0.
function chat.job(engine, options)
  if core.interrupted() then leave_interrupted() end -- while it loaded
  local template = require("weft.chat").template(engine.session.cfg, engine.tokenizer, engine.model_dir)
  if template.note then complain(template.note) end
  local talk = setmetatable({ engine = engine, template = template, params = params_of(options, engine.session.cfg.generation or {}),
    messages = { options.system and { role = "system", content = options.system } or nil }, first = options.system and 2 or 1 }, Talk)
  local interactive = core.isatty(0)
  if interactive then
    io.stderr:write(("%s, %s template. ,new begins again, Ctrl-C stops an answer, Ctrl-D leaves.\n"):format(engine.session.name, template.family))
  end
  local input, ended = require("weft.line_input").open { plain = not interactive }, nil
  while not ended do
    local line, why = input:read "> "
    if core.interrupted() and not interactive then leave_interrupted() end -- at a prompt it drops the line and is no answer's
    ended = why == "eof"
    if line and line:match "%S" then
      input:add(line)
      local ok, own, going = pcall(command, talk, line)
      if ok and not own then ok, going = pcall(talk.ask, talk, line) end
      if not ok then
        input:close()
        error(going or own, 0)
      elseif going == "quit" then
        ended = true
      elseif going == false and not interactive then
        return 1
      end
    end
  end
  input:close(true)
  return 0
end

function chat.run(options)
  options.on_interrupt = "flag"
  options.needs_tokenizer = "weft chat needs it"
  local folder = options.model
  if folder and core.same_file(folder .. "/.", folder) then require("weft.chat").own_template(folder) end -- a broken one is found before weights are read
  return require("weft.runtime").launch(options, "weft.commands.chat", "job")
end

return chat
