--- Chat format of MiniMax-M2: blocks "]~b]ROLE, text, [e~[", thoughts, and calls as XML.
local Script = require "weft.chat.script"
local json_text = require "weft.chat.json_text"
local core = require "weft.core"

local content = Script.content

local default_system = "You are a helpful assistant."

local tools_before = "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
  .. "Here are the tools available in JSONSchema format:\n\n<tools>\n"
local tools_after = "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
  .. '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
  .. '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'

local function open(script, role) return script:control "]~b]":text(role) end
local function close(script) return script:control "[e~[":text "\n" end

local function add_system(script, message, options)
  local text = message and content.of(message) or ""
  open(script, "system"):text("\n" .. (text ~= "" and text or options.default_system or default_system))
  for _, line in ipairs { { "current_date", "Current date: " }, { "current_location", "Current location: " } } do
    local value = message and message[line[1]]
    if type(value) == "string" and value ~= "" then script:text("\n" .. line[2] .. value) end
  end
  local tools = content.tools(options.tools)
  if tools then
    script:text(tools_before)
    for _, tool in ipairs(tools) do
      script:text("<tool>" .. json_text.layout(json_text.member(tool, "function") or tool) .. "</tool>\n")
    end
    script:text(tools_after)
  end
  close(script)
end

--- The thought and the visible text of an assistant's message.
local function thought_and_text(message)
  local text = content.of(message)
  if type(message.reasoning_content) == "string" then return message.reasoning_content, text end
  local before = text:match "^(.-)</think>"
  if not before then return "", text end
  local thought = before:gsub("^\n+", ""):gsub("\n+$", ""):gsub("^.*<think>", ""):gsub("^\n+", "")
  return thought, (text:gsub("^.*</think>", ""):gsub("^\n+", ""):gsub("\n+$", ""))
end

local function parameter(member)
  local value = core.json.decode("[" .. member.text .. "]")[1]
  -- Strings stand as they are; everything else is JSON.
  local text = type(value) == "string" and value or json_text.layout(member.text)
  return '<parameter name="' .. member.key .. '">' .. text .. "</parameter>\n"
end

local function add_calls(script, calls)
  if #calls == 0 then return end
  script:text "<minimax:tool_call>\n"
  for _, call in ipairs(calls) do
    script:text('<invoke name="' .. call.name .. '">\n')
    local members = json_text.members(json_text.of(call.arguments, "arguments of a tool call"))
    for _, member in ipairs(members or {}) do
      if member.key == nil then content.fail "arguments of a tool call must be an object" end
      script:text(parameter(member))
    end
    script:text "</invoke>\n"
  end
  script:text "</minimax:tool_call>"
end

local function add_assistant(script, message, keep_thought)
  local thought, text = thought_and_text(message)
  open(script, "ai"):text "\n"
  if keep_thought and thought ~= "" then script:text("<think>\n" .. thought .. "\n</think>\n\n") end
  script:text(text)
  local calls = content.calls(message)
  add_calls(script, calls)
  close(script)
  return #calls > 0
end

--- One result; a list of parts gives a response each.
local function add_result(script, message)
  if type(message.content) ~= "table" then
    script:text("\n<response>" .. content.of(message) .. "</response>")
    return
  end
  for _, part in ipairs(message.content) do
    script:text("\n<response>" .. content.of { content = { part } } .. "\n</response>")
  end
end

local function last_user(messages)
  for i = #messages, 1, -1 do
    if messages[i].role == "user" then return i end
  end
  return 0
end

local minimax_m2 = { stop = { "[e~[" } }

function minimax_m2.render(messages, options)
  local script, at, called = Script.new():control "]~!b[", 1, false
  local system = messages[1] and messages[1].role == "system" and messages[1] or nil
  add_system(script, system, options)
  if system then at = 2 end
  local user = last_user(messages)
  for i = at, #messages do
    local message = messages[i]
    if message.role == "assistant" then
      called = add_assistant(script, message, i > user)
    elseif message.role == "tool" then
      if not called then content.fail "a message has the role tool, but there was no assistant message with a tool call before" end
      if i == at or messages[i - 1].role ~= "tool" then open(script, "tool") end
      add_result(script, message)
      if not messages[i + 1] or messages[i + 1].role ~= "tool" then close(script) end
    elseif message.role == "user" then
      open(script, "user"):text("\n" .. content.of(message))
      close(script)
    else
      content.fail(("role '%s' at message %d: this format knows system (first only), user, assistant and tool"):format(message.role, i))
    end
  end
  -- The answer begins within the thought.
  if options.add_generation_prompt then open(script, "ai"):text "\n<think>\n" end
  return script
end

return { minimax_m2 = minimax_m2 }
