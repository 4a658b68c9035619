--- Evaluation: one line of Lua on all ranks, on one, or on all with each one's answer.
--
-- These functions run on every rank inside core.evaluate with what rank 0 published, so an error or
-- Ctrl-C on one is one for all (loop in commands/repl.lua).
local core = require "weft.core"
local read = require "weft.repl.read"
local show = require "weft.repl.print"

local eval = {}

--- A checksum of a text, to compare what ranks evaluate.
function eval.checksum(text)
  local sum = 5381
  for i = 1, #text do sum = (sum * 33 + text:byte(i)) % 4294967296 end
  return sum
end

local function collect(...) return { n = select("#", ...), ... } end

-- Runs the text here; keeps what it prints when `captured` is a list.
local function run(state, text, captured)
  local chunk, message = read.compile(text, state.env)
  if type(chunk) ~= "function" then error({ message = message or "the line is unfinished", code = "invalid" }, 0) end
  state.captured = captured
  local results = collect(chunk())
  state.captured = nil
  if results.n > 0 then state.env._ = results[1] end
  return results
end

-- With the rank in front of each line.
local function with_rank(rank, text)
  if text == "" then return "" end
  local lines = {}
  for line in (text .. "\n"):gmatch "([^\n]*)\n" do lines[#lines + 1] = ("[%d] %s"):format(rank, line) end
  return table.concat(lines, "\n") .. "\n"
end

-- Printed text and results as one text.
local function answer(captured, results)
  local text = table.concat(captured)
  local shown = show.results(results)
  if shown ~= "" then text = text .. shown .. "\n" end
  return (text:gsub("\n$", ""))
end

--- request: { text =, sum =, ranks = nil | "*" | number }. Gives on rank 0 what is to be shown.
function eval.run(state, request)
  if eval.checksum(request.text) ~= request.sum then
    error(("rank %d received another line than rank 0 sent"):format(core.rank().rank), 0)
  end
  local me, everyone = core.rank().rank, core.groups.everyone()
  state.captured = nil
  if request.ranks == nil then
    local shown = show.results(run(state, request.text))
    return shown ~= "" and shown .. "\n" or ""
  elseif request.ranks == "*" then
    local captured = {}
    local mine = with_rank(me, answer(captured, run(state, request.text, captured)))
    local all = {}
    for root = 0, everyone.size - 1 do all[root + 1] = everyone:broadcast_value(mine, root) end
    return table.concat(all)
  end
  local mine
  if me == request.ranks then
    local captured = {}
    core.alone(true)
    mine = with_rank(me, answer(captured, run(state, request.text, captured)))
    core.alone(false)
  end
  return everyone:broadcast_value(mine, request.ranks)
end

--- Only rank 0 has standard output; under @ every rank's is kept for rank 0 to show.
function eval.redirect(state)
  local write = io.write
  local function sink(text)
    if state.captured then
      table.insert(state.captured, text)
    elseif state.rank == 0 then
      write(text)
    end
  end
  _G.print = function(...)
    local parts = {}
    for i = 1, select("#", ...) do parts[i] = tostring((select(i, ...))) end
    sink(table.concat(parts, "\t") .. "\n")
  end
  io.write = function(...)
    for i = 1, select("#", ...) do sink(tostring((select(i, ...)))) end
    return true
  end
end

return eval
