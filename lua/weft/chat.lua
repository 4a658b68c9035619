--- Conversations as models read them.
--
--   chat.render(family, messages, options) -> script: a list of { text =, special = bool }
--     messages: { role =, content = text or a list of text parts, tool_calls =, reasoning_content = }
--     options: add_generation_prompt (true), tools (a list, or its JSON text, which keeps the order of
--              keys), date (Llama 3.1 and 3.2), default_system (MiniMax-M2)
--   chat.text(script) -> the whole text
--   chat.encode(tokenizer, script, family) -> ids; plain text never becomes a control token
--   chat.stop_ids(tokenizer, family) -> ids that end an answer
--   chat.own_template(model_dir) -> the text of the checkpoint's template, or nil
--   chat.template(cfg, tokenizer, model_dir) -> an object that knows its family:
--     .family  .note (nil, or what is not as the checkpoint wants it)
--     :render(messages, options)  :encode(tokenizer, messages, options)  :stop_ids(tokenizer)
local core = require "weft.core"
local errors = require "weft.errors"
local Reader = require "weft.config.reader"

local chat = { families = {} }

for _, file in ipairs { "llama3", "minimax_m2", "mistral" } do
  for name, family in pairs(require("weft.chat." .. file)) do chat.families[name] = family end
end

local function fail(message) errors.raise { message = message, code = "invalid" } end

local function family_of(name)
  local family = chat.families[name]
  if family then return family end
  local names = {}
  for known in pairs(chat.families) do names[#names + 1] = known end
  table.sort(names)
  fail(("unknown chat family '%s' (known: %s)"):format(tostring(name), table.concat(names, ", ")))
end

local function check_messages(messages)
  if type(messages) ~= "table" then fail("messages must be a list, got " .. type(messages)) end
  for i, message in ipairs(messages) do
    if type(message) ~= "table" or type(message.role) ~= "string" then fail(("message %d has no role"):format(i)) end
  end
end

function chat.render(name, messages, options)
  local family, given = family_of(name), {}
  for key, value in pairs(options or {}) do given[key] = value end
  if given.add_generation_prompt == nil then given.add_generation_prompt = true end
  check_messages(messages)
  return family.render(messages, given)
end

function chat.text(script)
  local texts = {}
  for i, stretch in ipairs(script) do texts[i] = stretch.text end
  return table.concat(texts)
end

function chat.encode(tokenizer, script, name)
  local ids = {}
  local add_special = name ~= nil and family_of(name).add_special or false
  for i, stretch in ipairs(script) do
    local list
    if stretch.special then
      local id = tokenizer:id(stretch.text)
      if not id then fail(("the tokenizer has no token '%s', which this chat format needs"):format(stretch.text)) end
      list = { id }
    else
      list = tokenizer:encode(stretch.text, { add_special = add_special, match_special = false, continues = i > 1 })
    end
    for k = 1, #list do ids[#ids + 1] = list[k] end
  end
  if #script == 0 and add_special then return tokenizer:encode "" end
  return ids
end

function chat.stop_ids(tokenizer, name)
  local ids = {}
  for _, token in ipairs(family_of(name).stop) do ids[#ids + 1] = tokenizer:id(token) end
  return ids
end

-- ---- which family a checkpoint speaks ----

--- The checkpoint's own template: chat_template.jinja, or a field of tokenizer_config.json; nil where there is none.
-- Raises for a file that is there and cannot be read as such.
function chat.own_template(model_dir)
  if not model_dir then return nil end
  local jinja = model_dir .. "/chat_template.jinja"
  if core.same_file(jinja, jinja) then return errors.read_input(jinja, "the chat template") end
  local config = Reader.open(model_dir .. "/tokenizer_config.json", true)
  local template = config and config:get "chat_template"
  if template == nil or type(template) == "string" then return template end
  local wanted = "a string, or a list of { name, template }"
  local default
  for _, named in ipairs(config:list("chat_template", wanted, function(v) return type(v) == "table" end)) do
    if type(named.template) ~= "string" then config:wrong("chat_template", wanted) end
    if named.name == "default" then default = named.template end
  end
  return default
end

local function by_template(text, tokenizer)
  local function has(word) return text:find(word, 1, true) ~= nil end
  if has "]~b]" then return "minimax_m2" end
  if has "<|start_header_id|>" then
    if not has "Cutting Knowledge Date" then return "llama3" end
    return has "strftime_now" and "llama3.2" or "llama3.1"
  end
  if has "[INST]" then
    if has "<<SYS>>" then return "llama2" end
    return tokenizer:id "[INST]" and "mistral_v3" or "mistral"
  end
  return nil
end

local function by_tokens(cfg, tokenizer)
  if tokenizer:id "]~b]" and tokenizer:id "[e~[" then return "minimax_m2" end
  if tokenizer:id "<|start_header_id|>" and tokenizer:id "<|eot_id|>" then
    return tokenizer:id "<|eom_id|>" and "llama3.1" or "llama3"
  end
  if tokenizer:id "[INST]" and tokenizer:id "[/INST]" then return "mistral_v3" end
  local architecture = cfg and cfg.architectures and cfg.architectures[1] or ""
  if architecture:find "^Mi[sx]tral" and tokenizer:id "<s>" and tokenizer:id "</s>" then return "mistral" end
  return "plain"
end

local Template = {}
Template.__index = Template

function Template:render(messages, options)
  local given = { default_system = self.default_system }
  for key, value in pairs(options or {}) do given[key] = value end
  return chat.render(self.family, messages, given)
end

function Template:encode(tokenizer, messages, options)
  return chat.encode(tokenizer, self:render(messages, options), self.family)
end

function Template:stop_ids(tokenizer) return chat.stop_ids(tokenizer, self.family) end

function chat.template(cfg, tokenizer, model_dir)
  local self, own = setmetatable({}, Template), chat.own_template(model_dir)
  self.family = own and by_template(own, tokenizer)
  if not self.family then
    self.family = by_tokens(cfg, tokenizer)
    if own then self.note = "the checkpoint's own chat template is not one that weft knows; using " .. self.family end
  end
  -- Later releases of MiniMax-M2 name the model in their default system text.
  if own and self.family == "minimax_m2" then self.default_system = own:match 'set%s+model_identity%s*=%s*"([^"]*)"' end
  return self
end

return chat
