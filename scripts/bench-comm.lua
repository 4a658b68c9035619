--- scripts/bench-comm.lua: latency of collectives, in microseconds a call.
-- weft lua scripts/bench-comm.lua [RANKS...]          (default: 2 4)     the thread transport
-- weft lua scripts/bench-comm.lua gpu [RANKS]         (default: all GPUs) peer memory beside NCCL, in graphs
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

-- On GPUs: microseconds of one of many calls in a graph, the median of its launches, with all of them over
-- peer memory (as far as its inboxes hold them) and all of them over NCCL.
local function measure_gpus(sizes)
  local rank, everyone = core.rank(), core.groups.everyone()
  core.gpu.use(rank.rank, 0)
  local ranks = {}
  for r = 0, rank.world_size - 1 do ranks[#ranks + 1] = r end
  local group = core.groups.create("tensor", ranks)
  local CALLS, LAUNCHES = 50, 21

  local function time(limit, call)
    group:set_peer_limit(limit)
    call() -- NCCL connects with the first
    core.gpu.synchronize()
    everyone:barrier()
    local graph = core.graph.capture(function() for _ = 1, CALLS do call() end end)
    local times = {}
    for i = 1, LAUNCHES do
      everyone:barrier()
      local began = core.now()
      graph:launch()
      core.gpu.synchronize()
      times[i] = (core.now() - began) * 1e6
    end
    graph:close()
    table.sort(times)
    return times[math.ceil(LAUNCHES / 2)] / CALLS
  end

  local rows = {}
  for _, bytes in ipairs(sizes) do
    local values = {}
    for i = 1, bytes / 2 do values[i] = (i * 7919 + rank.rank * 104729) % 1013 / 512 - 1 end
    local x = core.arena.tensor({ bytes / 2 }, "bfloat16")
    x:copy(core.tensor({ bytes / 2 }, "bfloat16", values))
    for _, op in ipairs { "all_reduce", "all_gather" } do
      local function call()
        if op == "all_reduce" then group:all_reduce(x):close() else group:all_gather(x, 0):close() end
      end
      rows[#rows + 1] = { op = op, bytes = bytes, peer = time(2 ^ 30, call), nccl = time(0, call) }
    end
    x:close()
  end
  local transport = group.transport
  group:close()
  return { rows = rows, transport = transport }
end

if arg[1] == "gpu" then
  local gpus = tonumber(arg[2]) or core.gpu.count()
  if gpus < 2 then error("bench-comm.lua gpu needs two GPUs, and this machine has " .. core.gpu.count(), 0) end
  local sizes = { 512, 2048, 8192, 16384, 32768, 65536, 131072, 262144, 1048576 }
  local result = core.spawn(gpus, measure_gpus, sizes)[1]
  print(("%d ranks: %s"):format(gpus, result.transport))
  print "  collective       KB a rank   peer us   NCCL us"
  for _, row in ipairs(result.rows) do
    print(("  %-14s %11.1f %9.2f %9.2f"):format(row.op, row.bytes / 1024, row.peer, row.nccl))
  end
  return
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
