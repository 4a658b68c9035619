--- scripts/bench-comm.lua: latency of the thread transport, in microseconds a call.
-- weft lua scripts/bench-comm.lua [RANKS...]          (default: 2 4)
local core = require "weft.core"

local function measure(sizes)
  local group, rank = core.groups.everyone(), core.rank().rank
  local rows = {}

  -- The slowest rank counts; runs until it took a while.
  local function time(name, bytes, call)
    local calls, seconds = 50, 0
    while true do
      group:barrier()
      local began = core.now()
      for _ = 1, calls do call() end
      seconds = group:all_reduce(core.tensor({ 1 }, "float32", { core.now() - began }), "max"):get(0)
      if seconds > 0.2 then break end
      calls = calls * 2
    end
    rows[#rows + 1] = { name = name, us = seconds / calls * 1e6, gb_per_s = bytes * calls / seconds / 1e9 }
  end

  time("barrier", 0, function() group:barrier() end)
  for _, count in ipairs(sizes) do
    local t = core.tensor { count }
    time(("all_reduce %d float32"):format(count), count * 4, function() group:all_reduce(t):close() end)
  end
  local part = core.tensor { 1024 }
  time("all_gather 1024 float32", 4096, function() group:all_gather(part, 0):close() end)
  local record = ("r"):rep(1024)
  time("publish 1 KiB", 1024, function()
    if rank == 0 then core.publish(record) else core.receive() end
  end)
  return rows
end

local ranks = {}
for _, text in ipairs(arg) do ranks[#ranks + 1] = tonumber(text) end
if #ranks == 0 then ranks = { 2, 4 } end
print(("%d cores"):format(core.cpu_cores()))
for _, n in ipairs(ranks) do
  print(("%d ranks"):format(n))
  for _, row in ipairs(core.spawn(n, measure, { 1, 256, 4096, 65536, 1048576 })[1]) do
    print(("  %-28s %9.2f us  %7.3f GB/s"):format(row.name, row.us, row.gb_per_s))
  end
end
