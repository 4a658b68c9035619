--- spec/support/files.lua: files and folders that specs read and make.
local files = {}

function files.read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

function files.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

--- The path of a new file with this text, whose name ends so. The spec removes it.
function files.temporary(text, suffix)
  local path = os.tmpname()
  if suffix then os.remove(path) end
  path = path .. (suffix or "")
  files.write(path, text)
  return path
end

local scripts = {}

--- The path of a new Lua script, whose name ends so (.lua). A spec file that makes such has `teardown(files.remove_scripts)`.
function files.script(text, suffix)
  scripts[#scripts + 1] = files.temporary(text, suffix or ".lua")
  return scripts[#scripts]
end

function files.remove_scripts()
  while #scripts > 0 do os.remove(table.remove(scripts)) end
end

--- A new folder with { name = text, ... } in it. The spec removes it (files.remove).
function files.folder(texts)
  local path = os.tmpname()
  os.remove(path)
  assert(os.execute("mkdir " .. path) == 0)
  for name, text in pairs(texts or {}) do files.write(path .. "/" .. name, text) end
  return path
end

function files.remove(path) os.execute("rm -rf '" .. path .. "'") end

--- The bytes of a safetensors file: its header's length, its header (JSON text), its data.
function files.safetensors(header, data)
  local n, length = #header, {}
  for i = 1, 8 do
    length[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  return table.concat(length) .. header .. data
end

return files
