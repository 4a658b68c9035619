--- Chat formats with [INST]: Mistral's two, Llama 2's; and plain text for models without a format.
local Script = require "weft.chat.script"

local content = Script.content

--- Users and assistants by turns; a system message goes in front of the first user's text.
local function turns(messages, join_system)
  local system, list = nil, {}
  for i, message in ipairs(messages) do
    if message.role == "system" and i == 1 then
      system = content.of(message)
    else
      local wanted = #list % 2 == 0 and "user" or "assistant"
      if message.role ~= wanted then
        content.fail(("message %d has the role %s: this format wants user and assistant by turns, here %s"):format(i, message.role, wanted))
      end
      list[#list + 1] = content.of(message)
    end
  end
  if system and list[1] then list[1] = join_system(system, list[1]) end
  return list
end

local function after_blank_line(system, text) return system .. "\n\n" .. text end

--- [INST] is text.
local mistral = { stop = { "</s>" } }
function mistral.render(messages)
  local script = Script.new():control "<s>"
  for i, text in ipairs(turns(messages, after_blank_line)) do
    if i % 2 == 1 then script:text("[INST] " .. text .. " [/INST]") else script:text(" " .. text):control "</s>" end
  end
  return script
end

--- [INST] is a control token (version 3 of the vocabulary).
local mistral_v3 = { stop = { "</s>" } }
function mistral_v3.render(messages)
  local script = Script.new():control "<s>"
  for i, text in ipairs(turns(messages, after_blank_line)) do
    if i % 2 == 1 then script:control "[INST]":text(" " .. text):control "[/INST]" else script:text(" " .. text):control "</s>" end
  end
  return script
end

local llama2 = { stop = { "</s>" } }
function llama2.render(messages)
  local script = Script.new()
  local list = turns(messages, function(system, text) return "<<SYS>>\n" .. system .. "\n<</SYS>>\n\n" .. text end)
  for i, text in ipairs(list) do
    if i % 2 == 1 then script:control "<s>":text("[INST] " .. content.trim(text) .. " [/INST]")
    else script:text(" " .. content.trim(text) .. " "):control "</s>" end
  end
  return script
end

--- No format: what was said, line after line; the tokenizer adds its first token.
local plain = { stop = { "<|end_of_text|>", "<|endoftext|>", "</s>" }, add_special = true }
function plain.render(messages)
  local script, texts = Script.new(), {}
  for i, message in ipairs(messages) do texts[i] = content.of(message) end
  return script:text(table.concat(texts, "\n"))
end

return { mistral = mistral, ["mistral_v3"] = mistral_v3, llama2 = llama2, plain = plain }
