/* kernels/cuda/peer_launch.cuh - the host's side of kernels over peer memory. */
#pragma once

#include <type_traits>

#include "kernels/cuda/peer.cuh"

namespace weft {

cudaError_t peer_load_fused(void);  /* peer_fused.cu */
cudaError_t peer_load_linear(void); /* peer_linear.cu */
bool step_possible(int device, int blocks); /* step_run.cu: loads the kernel of a step, which waits for peers too */

/* f(std::integral_constant<int, N>()) with N >= size, of the sizes that kernels are made for. */
template <class F> static inline void by_size(int size, F f)
{
    if (size <= 2) f(std::integral_constant<int, 2>());
    else if (size <= 4) f(std::integral_constant<int, 4>());
    else f(std::integral_constant<int, WEFT_PEER_MAX>());
}

template <class... P> static inline cudaError_t load_kernel(void (*kernel)(P...))
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, (const void *)kernel);
}

static inline weft_status peer_check(const char *op, const weft_peer *p)
{
    if (p->size >= 2 && p->size <= WEFT_PEER_MAX && p->rank >= 0 && p->rank < p->size && p->blocks > 0) return WEFT_OK;
    return weft_fail(WEFT_INVALID, "%s: member %d of %d, wanted 2 to %d members", op, p->rank, p->size, WEFT_PEER_MAX);
}

} // namespace weft
