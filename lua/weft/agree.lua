--- What all ranks must want alike: a difference, or a failure on one of them, is the same failure on all.
local core = require "weft.core"
local errors = require "weft.errors"

local agree = {}

-- The first lines in which two texts differ.
local function difference(text, other)
  local a, b = (text .. "\n"):gmatch "(.-)\n", (other .. "\n"):gmatch "(.-)\n"
  while true do
    local mine, theirs = a(), b()
    if mine ~= theirs then return mine or "nothing", theirs or "nothing" end
  end
end

-- The failure of another rank, as this one raises it.
local function of_rank(rank, failure)
  failure.message = failure.message:match "^rank %d+[: ]" and failure.message or ("rank %d: %s"):format(rank, failure.message)
  errors.raise(failure)
end

--- agree.on(what, make): every rank calls make() -> value, text, where the text (one line for each thing) says what the
-- value is; gives the value. Raises on all ranks where make fails on one, or texts differ. Collective.
function agree.on(what, make)
  local ok, value, text = pcall(make)
  local everyone = core.groups.everyone()
  local failed = not ok and { message = errors.message(value) } or nil
  if failed and type(value) == "table" then failed.code, failed.usage = value.code, value.usage end
  local all = {}
  for root = 0, everyone.size - 1 do all[root + 1] = everyone:broadcast_value({ failure = failed, text = text }, root) end
  if not ok then error(value, 0) end
  for rank = 0, everyone.size - 1 do
    if all[rank + 1].failure then of_rank(rank, all[rank + 1].failure) end
  end
  for rank = 1, everyone.size - 1 do
    if all[rank + 1].text ~= all[1].text then
      errors.usage(("rank %d has another %s than rank 0: %s, not %s; all ranks must have the same")
        :format(rank, what, difference(all[rank + 1].text, all[1].text)))
    end
  end
  return value
end

return agree
