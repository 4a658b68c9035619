--- Chat formats of Llama 3, 3.1 and 3.2.
local Script = require "weft.chat.script"
local json_text = require "weft.chat.json_text"

local content = Script.content

local function open(script, role)
  script:control "<|start_header_id|>":text(role):control "<|end_header_id|>":text "\n\n"
end

local function say(script, role, text)
  open(script, role)
  script:text(text):control "<|eot_id|>"
end

local llama3 = { stop = { "<|eot_id|>", "<|end_of_text|>" } }

function llama3.render(messages, options)
  local script = Script.new():control "<|begin_of_text|>"
  for _, message in ipairs(messages) do say(script, message.role, content.trim(content.of(message))) end
  if options.add_generation_prompt then open(script, "assistant") end
  return script
end

-- ---- 3.1 and later: a system message always, and tools ----

local tool_prompt = "Given the following functions, please respond with a JSON for a function call with its proper"
  .. " arguments that best answers the given prompt.\n\n"
  .. 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
  .. "Do not use variables.\n\n"

local function system_text(first, tools, date)
  return (tools and "Environment: ipython\n" or "") .. "Cutting Knowledge Date: December 2023\nToday Date: " .. date .. "\n\n" .. first
end

local function user_with_tools(message, tools)
  if not message or message.role ~= "user" then content.fail "tools go into the first user message, and there is none" end
  local texts = { tool_prompt }
  for _, tool in ipairs(tools) do texts[#texts + 1] = json_text.layout(tool, 4) .. "\n\n" end
  return table.concat(texts) .. content.trim(content.of(message))
end

local function call_text(message)
  local calls = content.calls(message, true)
  if #calls == 0 then return nil end
  if #calls > 1 then content.fail "this model only supports single tool-calls at once" end
  local arguments = json_text.layout(json_text.of(calls[1].arguments, "arguments of a tool call"))
  return ('{"name": "%s", "parameters": %s}'):format(calls[1].name, arguments)
end

local function result_text(message)
  if type(message.content) == "table" then return json_text.layout(json_text.of(message.content)) end
  return json_text.quote(content.of(message))
end

local function add_message(script, message)
  local call = call_text(message)
  if call then say(script, "assistant", call)
  elseif message.role == "tool" or message.role == "ipython" then say(script, "ipython", result_text(message))
  else say(script, message.role, content.trim(content.of(message))) end
end

local function render_tools(messages, options, date)
  local script, at, system = Script.new():control "<|begin_of_text|>", 1, ""
  local tools = content.tools(options.tools)
  if messages[1] and messages[1].role == "system" then
    system = content.trim(content.of(messages[1]))
    at = 2
  end
  say(script, "system", system_text(system, tools, date))
  if tools then
    say(script, "user", user_with_tools(messages[at], tools))
    at = at + 1
  end
  for i = at, #messages do add_message(script, messages[i]) end
  if options.add_generation_prompt then open(script, "assistant") end
  return script
end

-- eom: the model waits for the result of a tool.
local stop = { "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>" }

return {
  llama3 = llama3,
  ["llama3.1"] = { stop = stop, render = function(messages, options) return render_tools(messages, options, options.date or "26 Jul 2024") end },
  ["llama3.2"] = { stop = stop, render = function(messages, options) return render_tools(messages, options, options.date or os.date "%d %b %Y") end },
}
