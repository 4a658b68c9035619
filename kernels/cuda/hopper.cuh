/* kernels/cuda/hopper.cuh - instructions of compute capability 9.0 (sm_90a): barriers in shared memory,
 * the tensor copy engine, products of a warpgroup.
 *
 * A tile in shared memory has rows of 128 bytes (64 elements of 16 bits) and begins at a multiple of
 * 1024; the copy engine stores its 16-byte pieces permuted (piece ^ row % 8), which the products'
 * descriptors undo. Rows wider than 64 elements are several such tiles, one behind the other.
 * Products are asynchronous: registers given to one belong to it until products_wait() has passed and
 * hold() has named them. */
#pragma once

#include "kernels/cuda/cuda.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WEFT_HOPPER 1
#endif

namespace weft {

#ifdef WEFT_HOPPER

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- barriers: 8 bytes of shared memory each, given as its address ---- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* After the barriers' initialisation, by the thread that did it. */
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives, and tells how many bytes the copy engine will bring. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Until the phase of this parity is over. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!over);
}

/* ---- clusters of blocks: the shared memory of a neighbour ---- */

__device__ __forceinline__ uint32_t neighbour_address(uint32_t address, int rank)
{
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(address), "r"(rank));
    return at;
}
/* 16 bytes into a neighbour's shared memory, whose barrier counts them as the copy engine's. */
__device__ __forceinline__ void neighbour_send(uint32_t to, float4 v, uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void neighbour_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* The same without an order of memory, which takes a fence: for a place that products have read. */
__device__ __forceinline__ void neighbour_leave(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"); }
/* barrier_wait() for what neighbours did. */
__device__ __forceinline__ void barrier_wait_neighbours(uint32_t barrier, uint32_t parity)
{
    uint32_t over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!over);
}
/* All threads of all blocks of a cluster, in whole warps. */
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ bool barrier_over(uint32_t barrier, uint32_t parity)
{
    uint32_t over;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}

/* Ordinary writes to shared memory are seen by the copy engine and the products that follow. */
__device__ __forceinline__ void writes_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A barrier of named warps: id 1 to 15. */
__device__ __forceinline__ void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

/* ---- the copy engine; map: a CUtensorMap of three dimensions in parameter space ---- */

__device__ __forceinline__ void copy_box(uint32_t to, const void *map, int x, int y, int z, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
/* copy_box() of what no one reads again. policy: streamed(). */
__device__ __forceinline__ void copy_box_once(uint32_t to, const void *map, int x, int y, int z, uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
                 : "memory");
}
/* The same to this place of every block of the cluster that `blocks` has a bit for, and their barriers. */
__device__ __forceinline__ void copy_box_to(uint32_t to, const void *map, int x, int y, int z, uint32_t barrier, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
                 : "memory");
}
/* What the multiprocessor may remember of a map in memory is not used any more. */
__device__ __forceinline__ void map_arrived(const void *map) { asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory"); }
__device__ __forceinline__ void map_prefetch(const void *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

/* ---- products of a warpgroup ---- */

/* A tile as an operand in shared memory. group: bytes between tiles of 64 elements where the inner (summed)
 * index runs down the rows, ignored elsewhere. eight: bytes between eights of rows. Adding bytes / 16 moves a
 * descriptor. */
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, uint32_t group, uint32_t eight = 1024)
{
    return (uint64_t)(address >> 4) | (uint64_t)(group >> 4) << 16 | (uint64_t)(eight >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory"); }
/* Orders the compiler's use of registers against products. */
template <int N> __device__ __forceinline__ void hold(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

/* Operand lists of N / 2 accumulators: their names in the text, and the registers. */
#define WEFT_NAMES_4 "%0,%1,%2,%3"
#define WEFT_NAMES_8 WEFT_NAMES_4 ",%4,%5,%6,%7"
#define WEFT_NAMES_12 WEFT_NAMES_8 ",%8,%9,%10,%11"
#define WEFT_NAMES_16 WEFT_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WEFT_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WEFT_NAMES_48 WEFT_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WEFT_NAMES_56 WEFT_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WEFT_NAMES_64 WEFT_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WEFT_NAMES_128 WEFT_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"                    \
                                      ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WEFT_FOUR(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define WEFT_4(r) WEFT_FOUR(r, 0)
#define WEFT_8(r) WEFT_FOUR(r, 0), WEFT_FOUR(r, 4)
#define WEFT_12(r) WEFT_FOUR(r, 0), WEFT_FOUR(r, 4), WEFT_FOUR(r, 8)
#define WEFT_16(r, i) WEFT_FOUR(r, i), WEFT_FOUR(r, i + 4), WEFT_FOUR(r, i + 8), WEFT_FOUR(r, i + 12)
#define WEFT_FIRST_16(r) WEFT_16(r, 0)
#define WEFT_32(r) WEFT_16(r, 0), WEFT_16(r, 16)
#define WEFT_48(r) WEFT_32(r), WEFT_16(r, 32)
#define WEFT_56(r) WEFT_48(r), WEFT_FOUR(r, 48), WEFT_FOUR(r, 52)
#define WEFT_64(r) WEFT_48(r), WEFT_16(r, 48)
#define WEFT_128(r) WEFT_64(r), WEFT_16(r, 64), WEFT_16(r, 80), WEFT_16(r, 96), WEFT_16(r, 112)

/* d (+)= a b^T with 64 rows, N columns and 16 inner elements, which lie along the rows of both tiles. */
template <class T, int N> __device__ __forceinline__ void product_shared(float (&d)[N / 2], uint64_t a, uint64_t b, int add)
{
    static_assert(N == 8 || N == 16 || N == 24 || N == 32 || N == 64 || N == 96 || N == 112 || N == 128 || N == 256, "columns of a product");
#define WEFT_PRODUCT(COLUMNS, TYPE, NAMES, A, B, ADD, REGISTERS)                                                                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES "}, " A ", " B ", p, 1, 1, 0, 0; }"       \
                 : REGISTERS(d)                                                                                                           \
                 : "l"(a), "l"(b), "r"(add)                                                                                               \
                 : "memory")
    constexpr bool brain = __is_same(T, bf16);
    if constexpr (N == 8 && brain) WEFT_PRODUCT("8", "bf16", WEFT_NAMES_4, "%4", "%5", "%6", WEFT_4);
    if constexpr (N == 8 && !brain) WEFT_PRODUCT("8", "f16", WEFT_NAMES_4, "%4", "%5", "%6", WEFT_4);
    if constexpr (N == 16 && brain) WEFT_PRODUCT("16", "bf16", WEFT_NAMES_8, "%8", "%9", "%10", WEFT_8);
    if constexpr (N == 16 && !brain) WEFT_PRODUCT("16", "f16", WEFT_NAMES_8, "%8", "%9", "%10", WEFT_8);
    if constexpr (N == 24 && brain) WEFT_PRODUCT("24", "bf16", WEFT_NAMES_12, "%12", "%13", "%14", WEFT_12);
    if constexpr (N == 24 && !brain) WEFT_PRODUCT("24", "f16", WEFT_NAMES_12, "%12", "%13", "%14", WEFT_12);
    if constexpr (N == 32 && brain) WEFT_PRODUCT("32", "bf16", WEFT_NAMES_16, "%16", "%17", "%18", WEFT_FIRST_16);
    if constexpr (N == 32 && !brain) WEFT_PRODUCT("32", "f16", WEFT_NAMES_16, "%16", "%17", "%18", WEFT_FIRST_16);
    if constexpr (N == 64 && brain) WEFT_PRODUCT("64", "bf16", WEFT_NAMES_32, "%32", "%33", "%34", WEFT_32);
    if constexpr (N == 64 && !brain) WEFT_PRODUCT("64", "f16", WEFT_NAMES_32, "%32", "%33", "%34", WEFT_32);
    if constexpr (N == 96 && brain) WEFT_PRODUCT("96", "bf16", WEFT_NAMES_48, "%48", "%49", "%50", WEFT_48);
    if constexpr (N == 96 && !brain) WEFT_PRODUCT("96", "f16", WEFT_NAMES_48, "%48", "%49", "%50", WEFT_48);
    if constexpr (N == 112 && brain) WEFT_PRODUCT("112", "bf16", WEFT_NAMES_56, "%56", "%57", "%58", WEFT_56);
    if constexpr (N == 112 && !brain) WEFT_PRODUCT("112", "f16", WEFT_NAMES_56, "%56", "%57", "%58", WEFT_56);
    if constexpr (N == 128 && brain) WEFT_PRODUCT("128", "bf16", WEFT_NAMES_64, "%64", "%65", "%66", WEFT_64);
    if constexpr (N == 128 && !brain) WEFT_PRODUCT("128", "f16", WEFT_NAMES_64, "%64", "%65", "%66", WEFT_64);
    if constexpr (N == 256 && brain) WEFT_PRODUCT("256", "bf16", WEFT_NAMES_128, "%128", "%129", "%130", WEFT_128);
    if constexpr (N == 256 && !brain) WEFT_PRODUCT("256", "f16", WEFT_NAMES_128, "%128", "%129", "%130", WEFT_128);
#undef WEFT_PRODUCT
}

/* The same of e4m3 values, 32 inner elements. Sums keep about 14 bits. */
template <int N> __device__ __forceinline__ void product_e4m3(float (&d)[N / 2], uint64_t a, uint64_t b, int add)
{
    static_assert(N == 8 || N == 16 || N == 32 || N == 64, "columns of a product");
#define WEFT_PRODUCT(COLUMNS, NAMES, A, B, ADD, REGISTERS)                                                                                \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3 {" NAMES "}, " A ", " B ", p, 1, 1; }"                     \
                 : REGISTERS(d)                                                                                                           \
                 : "l"(a), "l"(b), "r"(add)                                                                                               \
                 : "memory")
    if constexpr (N == 8) WEFT_PRODUCT("8", WEFT_NAMES_4, "%4", "%5", "%6", WEFT_4);
    if constexpr (N == 16) WEFT_PRODUCT("16", WEFT_NAMES_8, "%8", "%9", "%10", WEFT_8);
    if constexpr (N == 32) WEFT_PRODUCT("32", WEFT_NAMES_16, "%16", "%17", "%18", WEFT_FIRST_16);
    if constexpr (N == 64) WEFT_PRODUCT("64", WEFT_NAMES_32, "%32", "%33", "%34", WEFT_32);
#undef WEFT_PRODUCT
}

/* d (+)= a b with a in registers. DOWN: b's 16 inner elements lie down the rows of its tile, else along them. */
template <class T, int N, int DOWN = 1>
__device__ __forceinline__ void product_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add = 1)
{
    static_assert(N == 64 || N == 128, "columns of a product");
#define WEFT_PRODUCT(COLUMNS, TYPE, NAMES, A, B, ADD, TURNED, REGISTERS)                                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1, " TURNED "; }" \
                 : REGISTERS(d)                                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(DOWN)                                                 \
                 : "memory")
    constexpr bool brain = __is_same(T, bf16);
    if constexpr (N == 64 && brain) WEFT_PRODUCT("64", "bf16", WEFT_NAMES_32, "%32,%33,%34,%35", "%36", "%37", "%38", WEFT_32);
    if constexpr (N == 64 && !brain) WEFT_PRODUCT("64", "f16", WEFT_NAMES_32, "%32,%33,%34,%35", "%36", "%37", "%38", WEFT_32);
    if constexpr (N == 128 && brain) WEFT_PRODUCT("128", "bf16", WEFT_NAMES_64, "%64,%65,%66,%67", "%68", "%69", "%70", WEFT_64);
    if constexpr (N == 128 && !brain) WEFT_PRODUCT("128", "f16", WEFT_NAMES_64, "%64,%65,%66,%67", "%68", "%69", "%70", WEFT_64);
#undef WEFT_PRODUCT
}

/* A warpgroup takes or gives registers; every warp of it must come here. */
template <int REGISTERS> __device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

#endif /* WEFT_HOPPER */

} // namespace weft
