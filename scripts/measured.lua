-- Decode steps measured on one and two H200, as scripts/bench.md tells them: scripts/predict.lua holds
-- predictions against them.
--
-- ms: the median of a step, with the digits that bench.md shows (told: what it shows instead). by: what
-- measured it. flags: the plan.
local minimax = { name = "MiniMax-M2.5", config = "MiniMaxAI--MiniMax-M2.5" }
local llama = { name = "Llama-3.1-8B", config = "meta-llama--Meta-Llama-3.1-8B" }

return {
  machine = "h200",
  steps = {
    { model = llama, dtype = "bfloat16", flags = "-tp 1", batch = 1, context = 1024, ms = "3.74", by = "weft bench" },
    { model = llama, dtype = "bfloat16", flags = "-tp 1", batch = 8, context = 1024, ms = "4.27", by = "gpu-bench-kernels" },
    { model = llama, dtype = "bfloat16", flags = "-tp 1", batch = 32, context = 1024, ms = "5.12", by = "weft bench" },
    { model = llama, dtype = "fp8", flags = "-tp 1", batch = 1, context = 1024, ms = "2.29", by = "weft bench" },
    { model = llama, dtype = "bfloat16", flags = "-tp 2", batch = 1, context = 1024, ms = "2.22", by = "weft bench" },
    { model = minimax, dtype = "fp8", flags = "-tp 2", batch = 1, context = 1024, ms = "3.95", by = "weft bench" },
  },
}
