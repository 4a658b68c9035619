/* kernels/cuda/peer_linear.cu - a product of few tokens whose result is summed over the members, as one
 * kernel: each block sends its 16 rows as soon as it has them, and waits for the same of the others.
 * What the last blocks send is the only trip over the link that is not hidden.
 *
 * Packets are those of weft_peer_sum of the dense result: members may take either way. All blocks wait,
 * so all must fit on the GPU at once. */
#include "kernels/cuda/linear_skinny.cuh"
#include "kernels/cuda/peer_launch.cuh"

namespace weft {

enum { PRODUCT_WARPS = 8 };

template <class T, bool FP8, int N>
__global__ void __launch_bounds__(PRODUCT_WARPS * 32) peer_product(const __grid_constant__ weft_peer p, const __grid_constant__ weft_linear_args a)
{
    constexpr int E = PeerRows<T>::E;
    __shared__ SkinnySums<PRODUCT_WARPS> sums;
    const int64_t row0 = (int64_t)blockIdx.x * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    unsigned flag = 0;
    auto begin = [&] { flag = peer_begin(p); };
    if constexpr (FP8) skinny_sums_fp8<T, PRODUCT_WARPS>(a, row0, c, begin);
    else skinny_sums<T, PRODUCT_WARPS>(a, row0, c, begin);
    sums.put(c);
    __syncthreads();
    /* A packet a lane of the first warp: token t, rows from `row` on. */
    const int t = threadIdx.x / (16 / E);
    const int64_t row = row0 + threadIdx.x % (16 / E) * E, packet = (t * a.n + row) / E;
    const bool mine = threadIdx.x < 32 && t < a.tokens && row < a.n;
    uint64_t bits = 0;
    if (mine) {
        float x[E];
#pragma unroll
        for (int j = 0; j < E; j++) {
            x[j] = sums.sum(t, (int)(row - row0) + j);
            if (a.bias != nullptr) x[j] += load(a.bias, a.bias_dtype, row + j);
        }
        bits = peer_narrow<T, float>(x);
        peer_put_all(p, flag, packet, bits);
    }
    peer_counted(p, flag);
    if (!mine) return;
    uint64_t value[N];
    peer_take<N>(p, flag, packet, value);
    dependency_release();
    *(uint64_t *)((T *)a.y + t * a.y_stride + row) = peer_total<T, float, N>(p, value, bits, false);
}

template <class T, bool FP8, int N> static int blocks_at_once(int multiprocessors)
{
    int each = 0;
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, peer_product<T, FP8, N>, PRODUCT_WARPS * 32, 0);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess ? each * multiprocessors : 0;
}

/* f(T(), FP8, N) of the arguments' kernel. */
template <class F> static void by_product(const weft_peer *p, const weft_linear_args *a, F f)
{
    const bool fp8 = a->w_dtype == WEFT_F8E4M3;
    by_size(p->size, [&](auto size) {
        if (a->x_dtype == WEFT_BF16 && fp8) f(bf16(), std::true_type(), size);
        else if (a->x_dtype == WEFT_BF16) f(bf16(), std::false_type(), size);
        else if (fp8) f(__half(), std::true_type(), size);
        else f(__half(), std::false_type(), size);
    });
}

cudaError_t peer_load_linear(void)
{
    cudaError_t error = cudaSuccess;
    auto also = [&](auto kernel) {
        if (error == cudaSuccess) error = load_kernel(kernel);
    };
    auto of_size = [&](auto size) {
        constexpr int N = decltype(size)::value;
        also(peer_product<bf16, false, N>), also(peer_product<bf16, true, N>);
        also(peer_product<__half, false, N>), also(peer_product<__half, true, N>);
    };
    of_size(std::integral_constant<int, 2>()), of_size(std::integral_constant<int, 4>()), of_size(std::integral_constant<int, WEFT_PEER_MAX>());
    return error;
}

} // namespace weft

using namespace weft;

extern "C" int weft_peer_linear_fits(const weft_peer *p, const weft_linear_args *a)
{
    if (a->tokens < 1 || a->tokens > SKINNY_TOKENS || a->k < 1 || a->n < 4 || a->n % 4 != 0 || a->add || a->y_dtype != a->x_dtype) return 0;
    if (a->y_stride != a->n && a->tokens > 1) return 0;
    if (!skinny_fits(a) || !aligned(a->y, 8) || !weft_peer_fits(p, a->tokens * a->n, a->y_dtype)) return 0;
    int at_once = 0;
    by_product(p, a, [&](auto tag, auto fp8, auto size) {
        at_once = blocks_at_once<decltype(tag), decltype(fp8)::value, decltype(size)::value>(p->blocks);
    });
    return div_up(a->n, 16) <= at_once;
}

extern "C" weft_status weft_peer_linear(const weft_peer *p, const weft_linear_args *a, void *stream)
{
    WEFT_TRY(peer_check("a product summed over peers", p));
    if (!weft_peer_linear_fits(p, a)) return weft_fail(WEFT_UNSUPPORTED, "a product summed over peers: weft_peer_linear_fits says no");
    by_product(p, a, [&](auto tag, auto fp8, auto size) {
        launch(peer_product<decltype(tag), decltype(fp8)::value, decltype(size)::value>, (unsigned)div_up(a->n, 16), PRODUCT_WARPS * 32, 0, stream,
               *p, *a);
    });
    return launched("a product summed over peers");
}
