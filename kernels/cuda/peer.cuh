/* kernels/cuda/peer.cuh - the protocol of kernels/weft_peer.h for device code.
 *
 *     unsigned flag = peer_begin(p);                 in place of dependency_wait()
 *     peer_put(peer_box(p, m, p.rank, flag) + i, value, flag);          for all packets and members
 *     peer_counted(p, flag);                         every block of the grid, every thread, once
 *     peer_take<N>(p, flag, i, value);               8 bytes of packet i from all members at once
 *     dependency_release();                          once the last has come
 *
 * A packet is two 8-byte words, each with 4 bytes of data and the flag, each written and read as one
 * access: no fence stands between data and flag. Blocks wait, so all blocks of a grid must fit on the
 * GPU at once (weft_peer.blocks), and each must have put everything before it takes. A flag comes again
 * after 2^32 calls: by then a packet of before would have to lie untouched for all of them.
 *
 * Who is early asks for its packets again and again, and that keeps the other's writes out when there are
 * many: from 24576 packets on they came in at 0.45 GB/s in half of the runs, from 16384 down never (two
 * GPUs). So nobody waits for more than about 16384 at once (comm/group_peer.c). */
#pragma once

#include "kernels/cuda/cuda.cuh"
extern "C" {
#include "kernels/weft_peer.h"
}

namespace weft {

enum { PEER_TURNS = 1024 }; /* of polling, between looks at the host's word */
static constexpr uint64_t PEER_OVER = ~0ull;

typedef ulonglong2 PeerPacket;

/* The number of this call, never 0: what an untouched inbox holds. */
__device__ __forceinline__ unsigned peer_flag(const weft_peer &p)
{
    const unsigned next = *(volatile unsigned *)p.counters + 1;
    return next != 0 ? next : 2;
}

__device__ __forceinline__ unsigned peer_begin(const weft_peer &p)
{
    dependency_wait_only();
    return peer_flag(p);
}

/* Where the packets of `from` lie in the inbox of member m. */
__device__ __forceinline__ PeerPacket *peer_box(const weft_peer &p, int m, int from, unsigned flag)
{
    return (PeerPacket *)p.inbox[m] + ((int64_t)(flag & 1) * p.size + from) * p.capacity;
}

__device__ __forceinline__ void peer_put(PeerPacket *to, uint64_t value, unsigned flag)
{
    const uint64_t high = (uint64_t)flag << 32, a = high | (uint32_t)value, b = high | (value >> 32);
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ void peer_put_all(const weft_peer &p, unsigned flag, int64_t i, uint64_t value)
{
    for (int k = 1; k < p.size; k++) { /* each member begins with another one */
        const int m = p.rank + k < p.size ? p.rank + k : p.rank + k - p.size;
        peer_put(peer_box(p, m, p.rank, flag) + i, value, flag);
    }
}

/* One thread of each of `blocks` blocks, once its whole block has read the flag: the last one counts the call. */
__device__ __forceinline__ void peer_count(const weft_peer &p, unsigned flag, unsigned blocks)
{
    if (blocks == 1 || atomicInc(p.counters + 1, blocks - 1) == blocks - 1) *(volatile unsigned *)p.counters = flag;
}

/* The same for a whole grid. The barrier depends on the flag: who passes has read it. */
__device__ __forceinline__ void peer_counted(const weft_peer &p, unsigned flag)
{
    const int read = __syncthreads_and(flag != 0);
    if (threadIdx.x == blockDim.x - 1 && read) peer_count(p, flag, gridDim.x);
}

__device__ __forceinline__ uint64_t peer_clock()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* When this wait began (0: now), or PEER_OVER: leave without the data. */
__device__ static __noinline__ uint64_t peer_waited(volatile unsigned *halt, uint64_t patience, uint64_t since)
{
    if (halt[0] != 0 || halt[1] != 0) return PEER_OVER; /* also where a kernel before has given up */
    const uint64_t now = peer_clock();
    if (since == 0) return now;
    if (now - since < patience) return since;
    halt[1] = 1;
    return PEER_OVER;
}

/* value[k][m] = packet index[k] of member m, for all m < size (this one only with SELF: it must have put
 * to itself). N: at least size. All are in flight at once. */
template <int N, int K, bool SELF>
__device__ __forceinline__ void peer_take_each(const weft_peer &p, unsigned flag, const int64_t (&index)[K], uint64_t (&value)[K][N])
{
    const PeerPacket *box = peer_box(p, p.rank, 0, flag);
    uint64_t since = 0;
    for (unsigned turn = 1;; turn++) {
        uint64_t a[K][N], b[K][N];
        bool here = true;
#pragma unroll
        for (int k = 0; k < K; k++) {
#pragma unroll
            for (int m = 0; m < N; m++) {
                a[k][m] = b[k][m] = (uint64_t)flag << 32;
                if (m < p.size && (SELF || m != p.rank))
                    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                                 : "=l"(a[k][m]), "=l"(b[k][m])
                                 : "l"(box + m * p.capacity + index[k])
                                 : "memory");
            }
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
#pragma unroll
            for (int m = 0; m < N; m++) {
                here = here && (unsigned)(a[k][m] >> 32) == flag && (unsigned)(b[k][m] >> 32) == flag;
                value[k][m] = (uint32_t)a[k][m] | b[k][m] << 32;
            }
        }
        if (here) return;
        if (turn % PEER_TURNS == 0 && (since = peer_waited(p.halt, (uint64_t)p.patience, since)) == PEER_OVER) return;
    }
}

template <int N> __device__ __forceinline__ void peer_take(const weft_peer &p, unsigned flag, int64_t i, uint64_t (&value)[N])
{
    const int64_t index[1] = {i};
    uint64_t all[1][N];
    peer_take_each<N, 1, false>(p, flag, index, all);
#pragma unroll
    for (int m = 0; m < N; m++) value[m] = all[0][m];
}

/* ---- 8 bytes of elements ---- */

/* Element e of a chunk in rows of `piece` lies at e / piece * row_stride + e % piece. */
template <class T> struct PeerRows {
    T *base;
    int64_t count, piece, row_stride;
    bool whole; /* packets lie together and aligned */

    static constexpr int E = 8 / sizeof(T);

    __device__ __forceinline__ int64_t place(int64_t e) const { return piece < count ? e / piece * row_stride + e % piece : e; }
    __device__ __forceinline__ uint64_t get(int64_t i) const
    {
        if (whole && (i + 1) * E <= count) return *(const uint64_t *)(base + place(i * E));
        union {
            uint64_t bits;
            T v[E];
        };
        bits = 0;
        for (int j = 0; j < E; j++)
            if (i * E + j < count) v[j] = base[place(i * E + j)];
        return bits;
    }
    __device__ __forceinline__ void set(int64_t i, uint64_t value) const
    {
        if (whole && (i + 1) * E <= count) {
            *(uint64_t *)(base + place(i * E)) = value;
            return;
        }
        union {
            uint64_t bits;
            T v[E];
        };
        bits = value;
        for (int j = 0; j < E; j++)
            if (i * E + j < count) base[place(i * E + j)] = v[j];
    }
};

template <class T> __device__ __forceinline__ PeerRows<T> peer_rows(const void *base, int64_t count, int64_t piece, int64_t row_stride)
{
    constexpr int E = PeerRows<T>::E;
    const bool even = piece >= count || (piece % E == 0 && row_stride % E == 0);
    return PeerRows<T>{(T *)base, count, piece, row_stride, even && (uintptr_t)base % 8 == 0};
}

/* Elements of 8 bytes as float32 (int32 as it is) and back. */
template <class T, class S> __device__ __forceinline__ void peer_widen(uint64_t bits, S (&x)[8 / sizeof(T)])
{
    for (int j = 0; j < (int)(8 / sizeof(T)); j++) {
        if constexpr (sizeof(T) == 4) {
            const uint32_t word = (uint32_t)(bits >> (32 * j));
            memcpy(&x[j], &word, 4);
        } else {
            const uint16_t half = (uint16_t)(bits >> (16 * j));
            T t;
            memcpy(&t, &half, 2);
            x[j] = widen(t);
        }
    }
}
template <class T, class S> __device__ __forceinline__ uint64_t peer_narrow(const S (&x)[8 / sizeof(T)])
{
    uint64_t bits = 0;
    for (int j = 0; j < (int)(8 / sizeof(T)); j++) {
        if constexpr (sizeof(T) == 4) {
            uint32_t word;
            memcpy(&word, &x[j], 4);
            bits |= (uint64_t)word << (32 * j);
        } else {
            const T t = narrow<T>(x[j]);
            uint16_t half;
            memcpy(&half, &t, 2);
            bits |= (uint64_t)half << (16 * j);
        }
    }
    return bits;
}

/* The sum over the members of one packet, in their order: value[m], and `mine` for this one. */
template <class T, class S, int N>
__device__ __forceinline__ uint64_t peer_total(const weft_peer &p, const uint64_t (&value)[N], uint64_t mine, bool max)
{
    constexpr int E = 8 / sizeof(T);
    S sum[E], x[E];
#pragma unroll
    for (int m = 0; m < N; m++) {
        if (m >= p.size) break;
        peer_widen<T, S>(m == p.rank ? mine : value[m], x);
#pragma unroll
        for (int j = 0; j < E; j++) {
            if (m == 0) sum[j] = x[j];
            else if (!max) sum[j] = (S)(sum[j] + x[j]);
            else sum[j] = x[j] > sum[j] || x[j] != x[j] ? x[j] : sum[j];
        }
    }
    return peer_narrow<T, S>(sum);
}

} // namespace weft
