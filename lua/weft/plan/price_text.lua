--- The price of a plan as text: predicted time by part, a measured time beside it, memory.
local machines = require "weft.machines"
local plan_text = require "weft.plan_text"
local terminal = require "weft.plan.terminal"

local price_text = {}

local function count(n, thing) return ("%d %s%s"):format(n, thing, n == 1 and "" or "s") end

local function memory_line(price)
  local m, bytes = price.memory, plan_text.bytes
  local line = ("  memory of a rank: weights %s + cache %s + %s kept free, of %s"):format(bytes(m.weight_bytes),
    bytes(m.cache_bytes), bytes(m.reserve_bytes), bytes(m.capacity_bytes))
  if not m.fits then return line .. "; it does not fit" end
  if not m.largest_batch then return line end
  return line .. ("; up to %s of %d tokens fit"):format(count(m.largest_batch, "request"), price.context)
end

--- price: weft.plan.price; measured, elsewhere: what weft.plan.measured found on this machine (or nil) and on others.
function price_text.lines(price, measured, elsewhere)
  local lines, width = {}, terminal.width()
  terminal.wrap(("predicted for one decode step on %s, %s of %d tokens (roofline and latencies, not measured):")
    :format(price.machine, count(price.batch, "request"), price.context), width, lines, "  ")
  for _, part in ipairs(price.parts) do
    local share = part.ms / price.ms
    lines[#lines + 1] = (("  %-12s %10.3f ms  %4.1f%%  %s"):format(part.part, part.ms, 100 * share, ("█"):rep(math.floor(40 * share + 0.5)))
      :gsub("%s+$", ""))
  end
  lines[#lines + 1] = ("  %-12s %10.3f ms  %.4g tokens/s a user, %.4g tokens/s a rank"):format("step", price.ms, price.tok_per_s_user, price.tok_per_s_gpu)
  if measured then
    lines[#lines + 1] = ("  measured     %10.3f ms  by weft bench; predicted / measured = %.2f"):format(measured.ms, price.ms / measured.ms)
  end
  for _, entry in ipairs(elsewhere or {}) do
    local hint = machines.has(entry.machine) and (" (--machine %s predicts for it)"):format(entry.machine) or ""
    lines[#lines + 1] = ("  measured     %10.3f ms  by weft bench on %s%s"):format(entry.ms, entry.machine, hint)
  end
  terminal.wrap(memory_line(price), width, lines, "    ")
  local filled = price.machine_filled
  if filled then
    terminal.wrap(("  %s leaves out %s: those are %s's"):format(price.machine, table.concat(filled.fields, ", "), filled.from), width, lines, "    ")
  end
  return lines
end

return price_text
