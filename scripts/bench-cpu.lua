--- scripts/bench-cpu.lua - what the CPU kernels reach against what this machine gives, in one run.
--
--   build/weft lua scripts/bench-cpu.lua [--quick] [--only read,gemv,product,attention]
--
-- Each figure is the best of several runs; percentages compare figures of this run only. Weights are
-- rotated, so that none of them is found in a cache.
local ffi = require "ffi"
if not package.preload["weft.core"] then dofile "spec/helper.lua" end
local core = require "weft.core"
local ops = core.ops

ffi.cdef [[
typedef struct { long seconds, nanoseconds; } bench_time;
int clock_gettime(int clock, bench_time *time);
void *malloc(size_t bytes);
void free(void *block);
void omp_set_num_threads(int threads);
typedef struct { int arg; void *memory; } bench_exec_arg;
int dnnl_engine_create(void **engine, int kind, size_t index);
int dnnl_stream_create(void **stream, void *engine, unsigned flags);
int dnnl_stream_wait(void *stream);
int dnnl_memory_desc_init_by_strides(void *desc, int ndims, const int64_t *dims, int type, const int64_t *strides);
int dnnl_memory_create(void **memory, const void *desc, void *engine, void *data);
int dnnl_matmul_desc_init(void *desc, const void *src, const void *weights, const void *bias, const void *dst);
int dnnl_primitive_desc_create(void **primitive_desc, const void *desc, const void *attr, void *engine, const void *hint);
int dnnl_primitive_create(void **primitive, const void *primitive_desc);
int dnnl_primitive_execute(void *primitive, void *stream, int count, const bench_exec_arg *args);
int dnnl_sgemm(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
]]

local quick, only = false, nil
for i = 1, #(arg or {}) do
  if arg[i] == "--quick" then quick = true end
  if arg[i] == "--only" then only = arg[i + 1] end
end
local function wanted(part) return not only or only:find(part, 1, true) end

local clock = ffi.new "bench_time"
local function now()
  ffi.C.clock_gettime(1, clock)
  return tonumber(clock.seconds) + tonumber(clock.nanoseconds) * 1e-9
end

--- The shortest of `runs` calls of fn(i), in seconds.
local function best(runs, fn)
  local shortest = math.huge
  fn(0)
  for i = 1, runs do
    local began = now()
    fn(i)
    shortest = math.min(shortest, now() - began)
  end
  return shortest
end

--- A tensor of made-up values: a pattern repeated, cheap to fill.
local function filled(shape, dtype)
  local t = core.tensor(shape, dtype)
  local seed = 1
  local rows = t:view { shape[1], -1 }
  local first = rows:narrow(0, 0, 1)
  for i = 0, first.numel - 1 do
    seed = seed * 16807 % 2147483647
    first:set(seed / 1073741823.5 - 1, 0, i)
  end
  for r = 1, shape[1] - 1 do rows:narrow(0, r, 1):copy(first) end
  return t
end

local function line(what, ...) print(("%-46s " .. (...)):format(what, select(2, ...))) end

--- Bytes of the last cache, or 32 MiB.
local function cache_bytes()
  local file = io.open "/sys/devices/system/cpu/cpu0/cache/index3/size"
  local kilobytes = file and file:read "*l":match "^(%d+)K"
  if file then file:close() end
  return (tonumber(kilobytes) or 32768) * 1024
end
local beyond_caches = math.max(2 ^ 27, math.min(3 * cache_bytes(), 2 ^ 31))

local cores = core.cpu_cores()
local runs = quick and 5 or 15
print(("instruction set %s, %d cores"):format(ops.isa(), cores))

-- ---- reading ----
local read = {}
if wanted "read" or wanted "gemv" or wanted "attention" then
  local block = core.tensor({ beyond_caches / 4 }, "float32")
  for _, threads in ipairs { 1, 0 } do
    read[threads] = block:bytes() / best(runs, function() ops.checksum { x = block, threads = threads } end) / 1e9
    line("read, " .. (threads == 1 and "1 thread" or "all cores"), "%7.1f GB/s", read[threads])
  end
end

-- ---- few tokens ----
local function gemv(dtype, n, k, tokens)
  local weights = { filled({ n, k }, dtype) }
  local sets = math.max(2, math.ceil(beyond_caches / weights[1]:bytes()))
  for i = 2, sets do weights[i] = weights[1]:clone() end
  local x, scale = filled({ tokens, k }, "bfloat16"), nil
  if dtype == "fp8" then scale = core.tensor({ math.ceil(n / 128), math.ceil(k / 128) }):fill(1) end
  local y, rows = core.tensor({ tokens, n }, "bfloat16"), {}
  for i = 1, n do rows[i] = math.floor((i - 1) / 128) end
  local scale_row = core.tensor({ n }, "int32", rows)
  for _, threads in ipairs { 1, 0 } do
    local seconds = best(math.max(runs * 2, sets), function(i)
      ops.linear { x = x, w = weights[i % sets + 1], scale = scale, scale_row = scale and scale_row, out = y, threads = threads }
    end)
    local gbs = weights[1]:bytes() / seconds / 1e9
    line(("linear %s %dx%d, %d token%s, %s"):format(dtype, n, k, tokens, tokens > 1 and "s" or "", threads == 1 and "1 thread" or "all cores"),
      "%7.1f GB/s  %3.0f%% of reading", gbs, 100 * gbs / read[threads])
  end
end
if wanted "gemv" then
  for _, dtype in ipairs { "bfloat16", "float32", "fp8" } do gemv(dtype, 4096, 4096, 1) end
  gemv("bfloat16", 2048, 8192, 1)
  gemv("bfloat16", 4096, 4096, 4)
  gemv("bfloat16", 4096, 4096, 8)
end

-- ---- many tokens ----
local have_dnnl, dnnl = pcall(ffi.load, "dnnl")
if not have_dnnl then have_dnnl, dnnl = pcall(ffi.load, "libdnnl.so.2") end

--- Our workers tell OpenMP to stay alone in their threads; oneDNN by itself gets all cores.
local have_omp, omp = pcall(ffi.load, "libgomp.so.1")
local function all_cores()
  if have_omp then omp.omp_set_num_threads(cores) end
end

local function sgemm_gflops(tokens, n, k)
  if not have_dnnl then return nil end
  all_cores()
  local a, b, c = ffi.C.malloc(tokens * k * 4), ffi.C.malloc(n * k * 4), ffi.C.malloc(tokens * n * 4)
  ffi.fill(a, tokens * k * 4, 0x3f)
  ffi.fill(b, n * k * 4, 0x3f)
  local seconds = best(runs, function()
    dnnl.dnnl_sgemm(("N"):byte(), ("T"):byte(), tokens, n, k, 1, ffi.cast("float *", a), k, ffi.cast("float *", b), k, 0,
      ffi.cast("float *", c), n)
  end)
  for _, block in ipairs { a, b, c } do ffi.C.free(block) end
  return 2 * tokens * n * k / seconds / 1e9
end

--- oneDNN's bfloat16 product (its matmul primitive, weights as a checkpoint holds them), or nil where
--- this processor has none.
local function bf16_gflops(tokens, n, k)
  if not have_dnnl then return nil end
  all_cores()
  local pointer = function() return ffi.new "void *[1]" end
  local engine, stream, primitive_desc, primitive = pointer(), pointer(), pointer(), pointer()
  assert(dnnl.dnnl_engine_create(engine, 1, 0) == 0 and dnnl.dnnl_stream_create(stream, engine[0], 1) == 0)
  local descs, memories = {}, {}
  for i, d in ipairs { { tokens, k, k, 1, 2 }, { k, n, 1, k, 2 }, { tokens, n, n, 1, 2 } } do
    descs[i], memories[i] = ffi.new("char[?]", 4096), pointer()
    assert(dnnl.dnnl_memory_desc_init_by_strides(descs[i], 2, ffi.new("int64_t[2]", d[1], d[2]), d[5], ffi.new("int64_t[2]", d[3], d[4])) == 0)
    local data = ffi.C.malloc(d[1] * d[2] * 2)
    ffi.fill(data, d[1] * d[2] * 2, 0x3f)
    assert(dnnl.dnnl_memory_create(memories[i], descs[i], engine[0], data) == 0)
  end
  local desc = ffi.new("char[?]", 65536)
  assert(dnnl.dnnl_matmul_desc_init(desc, descs[1], descs[2], nil, descs[3]) == 0)
  if dnnl.dnnl_primitive_desc_create(primitive_desc, desc, nil, engine[0], nil) ~= 0 then return nil end
  assert(dnnl.dnnl_primitive_create(primitive, primitive_desc[0]) == 0)
  local args = ffi.new("bench_exec_arg[3]", { { 1, memories[1][0] }, { 33, memories[2][0] }, { 17, memories[3][0] } })
  local seconds = best(runs, function()
    dnnl.dnnl_primitive_execute(primitive[0], stream[0], 3, args)
    dnnl.dnnl_stream_wait(stream[0])
  end)
  return 2 * tokens * n * k / seconds / 1e9
end

local function product(tokens, n, k)
  local theirs = { float32 = sgemm_gflops(tokens, n, k), bfloat16 = bf16_gflops(tokens, n, k) }
  local shape = ("%d x %d x %d"):format(tokens, n, k)
  if theirs.float32 then line("oneDNN float32 " .. shape, "%7.1f GFLOP/s", theirs.float32) end
  if theirs.bfloat16 then line("oneDNN bfloat16 " .. shape, "%7.1f GFLOP/s", theirs.bfloat16) end
  local x, y = filled({ tokens, k }, "bfloat16"), core.tensor({ tokens, n }, "bfloat16")
  for _, dtype in ipairs { "float32", "bfloat16" } do
    local w = filled({ n, k }, dtype)
    local seconds = best(runs, function() ops.linear { x = x, w = w, out = y } end)
    local gflops = 2 * tokens * n * k / seconds / 1e9
    local other = theirs[dtype] and dtype or theirs.float32 and "float32"
    line(("linear %s %s"):format(dtype, shape), "%7.1f GFLOP/s  %s", gflops,
      other and ("%3.0f%% of oneDNN's %s"):format(100 * gflops / theirs[other], other) or "")
  end
end
if wanted "product" then
  product(16, 2048, 2048)
  product(32, 2048, 2048)
  product(64, 2048, 2048)
  product(512, 2048, 2048)
  if not quick then product(2048, 2048, 2048) end
end

-- ---- attention ----
local function pages(requests, length, page)
  local width = math.ceil(length / page)
  local table, qsl, lens = {}, { 0 }, {}
  for i = 1, requests * width do table[i] = i - 1 end
  for r = 1, requests do lens[r] = length end
  return width * requests, table, qsl, lens
end

local function decode(requests, context, dtype)
  local heads, kv, dim, page = 32, 8, 128, 16
  local blocks, table, qsl, lens = pages(requests, context, page)
  for r = 1, requests do qsl[r + 1] = r end
  local k, v = filled({ blocks, kv, page, dim }, dtype), filled({ blocks, kv, page, dim }, dtype)
  local q = filled({ requests, heads, dim }, "bfloat16")
  local block_table = core.tensor({ requests, blocks / requests }, "int32", table)
  local seconds = best(runs, function()
    ops.attention { q = q, k = k, v = v, query_start_loc = qsl, seq_lens = lens, block_table = block_table }
  end)
  local gbs = (k:bytes() + v:bytes()) / seconds / 1e9
  line(("decode %s %d x %d, 32/8 heads of 128"):format(dtype, requests, context), "%7.1f GB/s  %3.0f%% of reading", gbs, 100 * gbs / read[0])
end

local function prefill(tokens)
  local heads, kv, dim = 16, 4, 128
  local q, k, v = filled({ tokens, heads, dim }, "bfloat16"), filled({ tokens, kv, dim }, "bfloat16"), filled({ tokens, kv, dim }, "bfloat16")
  local seconds = best(quick and 3 or runs, function()
    ops.attention { q = q, k = k, v = v, keys = "new", query_start_loc = { 0, tokens }, seq_lens = { tokens } }
  end)
  line(("prefill of %d, causal, 16/4 heads of 128"):format(tokens), "%7.1f GFLOP/s", 2 * tokens * tokens * heads * dim / seconds / 1e9)
end
if wanted "attention" then
  decode(1, 32768, "bfloat16")
  decode(16, 2048, "bfloat16")
  decode(1, 32768, "float32")
  prefill(512)
  prefill(2048)
end
