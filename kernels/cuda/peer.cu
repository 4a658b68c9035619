/* kernels/cuda/peer.cu - sums and moves over peer memory, one shot: everyone sends to everyone.
 * What norms and attention do with them is in peer_fused.cu. */
#include "kernels/cuda/peer.cuh"
#include "kernels/cuda/peer_launch.cuh"

namespace weft {

/* Chunk m of the input, as packets. */
template <class T> __device__ __forceinline__ PeerRows<T> chunk(const weft_peer_args &a, int m)
{
    return peer_rows<T>((const T *)a.in + m * a.in_member_stride, a.count, a.piece, a.in_row_stride);
}

/* Every member's chunk goes into its inbox. */
template <class T> __device__ __forceinline__ void send(const weft_peer &p, const weft_peer_args &a, unsigned flag, int64_t packets)
{
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    if (a.in_member_stride == 0) {
        const PeerRows<T> rows = chunk<T>(a, 0);
        for (int64_t i = first; i < packets; i += step) peer_put_all(p, flag, i, rows.get(i));
        return;
    }
    for (int k = 1; k < p.size; k++) {
        const int m = p.rank + k < p.size ? p.rank + k : p.rank + k - p.size;
        const PeerRows<T> rows = chunk<T>(a, m);
        for (int64_t i = first; i < packets; i += step) peer_put(peer_box(p, m, p.rank, flag) + i, rows.get(i), flag);
    }
}

template <class T, class S, int N> __global__ void __launch_bounds__(1024) peer_sum(const __grid_constant__ weft_peer p, const __grid_constant__ weft_peer_args a)
{
    const unsigned flag = peer_begin(p);
    const int64_t packets = (a.count + PeerRows<T>::E - 1) / PeerRows<T>::E;
    send<T>(p, a, flag, packets);
    peer_counted(p, flag);
    const PeerRows<T> rows = chunk<T>(a, p.rank), out = peer_rows<T>(a.out, a.count, a.count, 0);
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packets; i += step) {
        uint64_t value[N] = {};
        const uint64_t mine = rows.get(i);
        peer_take<N>(p, flag, i, value);
        if (i + step >= packets) dependency_release();
        out.set(i, peer_total<T, S, N>(p, value, mine, a.max));
    }
}

template <class T, int N> __global__ void __launch_bounds__(1024) peer_move(const __grid_constant__ weft_peer p, const __grid_constant__ weft_peer_args a)
{
    const unsigned flag = peer_begin(p);
    const int64_t packets = (a.count + PeerRows<T>::E - 1) / PeerRows<T>::E;
    send<T>(p, a, flag, packets);
    peer_counted(p, flag);
    const PeerRows<T> rows = chunk<T>(a, p.rank);
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < packets; i += step) {
        uint64_t value[N] = {};
        const uint64_t mine = rows.get(i);
        peer_take<N>(p, flag, i, value);
        if (i + step >= packets) dependency_release();
#pragma unroll
        for (int m = 0; m < N; m++) {
            if (m >= p.size) break;
            const PeerRows<T> out = peer_rows<T>((T *)a.out + m * a.out_member_stride, a.count, a.piece, a.out_row_stride);
            out.set(i, m == p.rank ? mine : value[m]);
        }
    }
}

static int64_t packets_of(int64_t count, weft_dtype dtype)
{
    const int64_t each = 8 / (int64_t)weft_dtype_size(dtype);
    return count / each + (count % each != 0);
}

static weft_status check(const char *op, const weft_peer *p, const weft_peer_args *a)
{
    const int64_t sizes[] = {a->count, a->piece};
    WEFT_TRY(weft__check_sizes(op, "count, piece", sizes, 2));
    WEFT_TRY(peer_check(op, p));
    if (packets_of(a->count, a->dtype) > p->capacity)
        return weft_fail(WEFT_UNSUPPORTED, "%s: %lld %s to each member are more than an inbox of %lld packets holds", op, (long long)a->count,
                         weft_dtype_name(a->dtype), (long long)p->capacity);
    return WEFT_OK;
}

/* Blocks of one packet a thread, as far as all fit on the GPU at once. */
static void shape(const weft_peer *p, const weft_peer_args *a, int64_t packets, unsigned *blocks, unsigned *threads)
{
    enum { THREADS = 256 };
    *threads = a->threads > 0 ? (unsigned)a->threads : (unsigned)least(THREADS, div_up(packets, 32) * 32);
    while (*threads <= 512 && div_up(packets, *threads) > p->blocks) *threads *= 2;
    *blocks = (unsigned)least(p->blocks, div_up(packets, *threads));
}

template <class T, class S> static void launch_sum(const weft_peer *p, const weft_peer_args *a, void *stream)
{
    unsigned blocks, threads;
    shape(p, a, packets_of(a->count, a->dtype), &blocks, &threads);
    by_size(p->size, [&](auto size) { launch(peer_sum<T, S, decltype(size)::value>, blocks, threads, 0, stream, *p, *a); });
}

template <class T> static void launch_move(const weft_peer *p, const weft_peer_args *a, void *stream)
{
    unsigned blocks, threads;
    shape(p, a, packets_of(a->count, a->dtype), &blocks, &threads);
    by_size(p->size, [&](auto size) { launch(peer_move<T, decltype(size)::value>, blocks, threads, 0, stream, *p, *a); });
}

} // namespace weft

using namespace weft;

extern "C" int weft_peer_fits(const weft_peer *p, int64_t count, weft_dtype dtype) { return packets_of(count, dtype) <= p->capacity; }

extern "C" weft_status weft_peer_sum(const weft_peer *p, const weft_peer_args *a, void *stream)
{
    WEFT_TRY(check("a sum over peers", p, a));
    if (a->count == 0) return WEFT_OK;
    switch (a->dtype) {
    case WEFT_F32: launch_sum<float, float>(p, a, stream); break;
    case WEFT_BF16: launch_sum<bf16, float>(p, a, stream); break;
    case WEFT_F16: launch_sum<__half, float>(p, a, stream); break;
    case WEFT_I32: launch_sum<int32_t, int32_t>(p, a, stream); break;
    default: return weft_fail(WEFT_INVALID, "a sum over peers of %s", weft_dtype_name(a->dtype));
    }
    return launched("a sum over peers");
}

extern "C" weft_status weft_peer_move(const weft_peer *p, const weft_peer_args *a, void *stream)
{
    WEFT_TRY(check("a move between peers", p, a));
    if (a->count == 0) return WEFT_OK;
    switch (weft_dtype_size(a->dtype)) {
    case 4: launch_move<uint32_t>(p, a, stream); break;
    case 2: launch_move<uint16_t>(p, a, stream); break;
    default: launch_move<uint8_t>(p, a, stream);
    }
    return launched("a move between peers");
}

template <int N> static cudaError_t load_all()
{
    cudaError_t error = load_kernel(peer_sum<float, float, N>);
    if (error == cudaSuccess) error = load_kernel(peer_sum<bf16, float, N>);
    if (error == cudaSuccess) error = load_kernel(peer_sum<__half, float, N>);
    if (error == cudaSuccess) error = load_kernel(peer_sum<int32_t, int32_t, N>);
    if (error == cudaSuccess) error = load_kernel(peer_move<uint32_t, N>);
    if (error == cudaSuccess) error = load_kernel(peer_move<uint16_t, N>);
    if (error == cudaSuccess) error = load_kernel(peer_move<uint8_t, N>);
    return error;
}

extern "C" weft_status weft_peer_prepare(void)
{
    cudaError_t error = load_all<2>();
    if (error == cudaSuccess) error = load_all<4>();
    if (error == cudaSuccess) error = load_all<8>();
    if (error == cudaSuccess) error = peer_load_fused();
    if (error == cudaSuccess) error = peer_load_linear();
    int device = 0;
    if (error == cudaSuccess && cudaGetDevice(&device) == cudaSuccess) (void)step_possible(device, 1);
    return error == cudaSuccess ? WEFT_OK : failed("loading the kernels of peer memory", error);
}
