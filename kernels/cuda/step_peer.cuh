/* kernels/cuda/step_peer.cuh - sums over two GPUs inside a step.
 *
 * A product whose result is summed (weft_peer_linear) sends its rows as packets (peer.cuh), to the other
 * GPU's inbox and to the own one, as soon as a tile is finished. What reads the sum takes both GPUs' packets
 * from its own inbox and adds them in rank order. A packet tells that it has come, so the blocks of a GPU
 * do not wait for one another there. Packets and their numbers are those of the launched kernels: one
 * GPU may send from a step while the other launches its operations one by one.
 *
 * But tens of thousands of threads that ask for packets keep them from coming in (peer.cuh). So behind its last
 * tile of a product a block also leaves the number of the call in a word of its own in both inboxes; one warp of
 * each block looks at these words, and all threads read packets when all blocks of both GPUs have left theirs. The words are
 * only a sign: what a packet's flag does not confirm is read again, and where they do not come (the other
 * GPU launches its operations one by one) the warp looks at the packets themselves, a few at a time.
 *
 * An inbox has two halves, used in turns. A packet is written again two sums later, when all who read it
 * must be past it: blocks wait for one another between taking one sum and sending the next, and a block
 * sends only when it has taken, or follows all that have taken, what the other GPU sent in between. */
#pragma once

#include "kernels/cuda/step_product.cuh"

namespace weft {

#ifdef WEFT_HOPPER

/* The number of call `call` of a launch before which `base` were made, as peer_flag() counts. */
__device__ __forceinline__ unsigned step_flag(unsigned base, int call)
{
    const unsigned flag = base + 1 + (unsigned)call;
    return flag > (unsigned)call ? flag : flag + 2;
}

/* Packets of member m's rows in an inbox. */
__device__ __forceinline__ PeerPacket *step_box(const StepGroup &g, PeerPacket *inbox, int m, unsigned flag)
{
    return inbox + ((flag & 1) * 2 + m) * g.capacity;
}

/* The words of member m's blocks in an inbox. */
__device__ __forceinline__ unsigned *step_signs(const StepGroup &g, PeerPacket *inbox, int m)
{
    return (unsigned *)(inbox + 4 * g.capacity) + m * WEFT_PEER_BLOCKS;
}

/* The warp that finishes: every tile of this block is sent. turn: tiles finished before. */
template <class T>
__device__ __noinline__ int step_send(const StepProduct &p, const StepGroup &g, unsigned flag, const StepRing &ring, int turn, const float *sums_at)
{
    const int lane = threadIdx.x % 32, tokens = (int)p.linear.tokens, tiles = p.tiles, n = (int)p.linear.n;
    const T *bias = (const T *)p.linear.bias;
    PeerPacket *own = step_box(g, g.own, g.rank, flag), *other = step_box(g, g.other, g.rank, flag);
    for (int tile = step_first_tile(p.first); tile < tiles; tile += gridDim.x, turn++) {
        const int buffer = turn % STEP_SUMS;
        const float *sums = sums_at + buffer * STEP_WARPS * tokens * 16;
        step_barrier_wait(ring.summed + 8 * buffer, turn / STEP_SUMS % 2, ring);
        for (int first = 0; first < tokens * 16; first += 32) { /* whole warps: lanes join their rows */
            const int i = min(first + lane, tokens * 16 - 1), row = 16 * tile + i % 16;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < STEP_WARPS; w++) sum += sums[w * tokens * 16 + i];
            if (bias != nullptr && row < n) sum += widen(bias[row]);
            uint32_t low = pair<T>(sum, __shfl_down_sync(~0u, sum, 1));
            const uint32_t high = __shfl_down_sync(~0u, low, 2);
            if (lane % 4 == 0 && first + lane < tokens * 16 && row < n) {
                const int64_t to = ((int64_t)(i / 16) * n + row) / 4;
                const uint64_t value = low | (uint64_t)high << 32;
                peer_put(other + to, value, flag);
                peer_put(own + to, value, flag);
            }
        }
        barrier_arrive(ring.finished + 8 * buffer);
    }
    __syncwarp();
    if (lane < 2) {
        unsigned *sign = step_signs(g, lane == 0 ? g.other : g.own, g.rank) + blockIdx.x;
        asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(sign), "r"(flag) : "memory");
    }
    return turn;
}

/* One word of 4 bytes of a packet, twice. */
__device__ __forceinline__ void step_peek(const PeerPacket *p, uint64_t &a, uint64_t &b)
{
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ __forceinline__ bool step_came(uint64_t a, uint64_t b, unsigned flag) { return (unsigned)(a >> 32) == flag && (unsigned)(b >> 32) == flag; }

enum { STEP_SIGN_TURNS = 256 }; /* of looking at signs alone */

/* Until a sum's packets have come, as far as signs tell. By all warps that compute. packets: of one member. */
__device__ static __noinline__ void step_await(const StepGroup &g, unsigned flag, int packets)
{
    const int thread = step_thread(), lane = thread % 32, fours = ((int)gridDim.x + 3) / 4;
    if (thread < 32) {
        const unsigned *signs = step_signs(g, g.own, 0);
        uint64_t since = 0;
        int seen = 0; /* packets that were looked at and had come */
        for (unsigned turn = 1; seen < packets; turn++) {
            bool here = true;
            for (int i = lane; i < 2 * fours; i += 32) {
                const int m = i >= fours, at = 4 * (m ? i - fours : i);
                uint4 v;
                asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(signs + m * WEFT_PEER_BLOCKS + at) : "memory");
#pragma unroll
                for (int k = 0; k < 4; k++) here = here && (at + k >= (int)gridDim.x || (int)((&v.x)[k] - flag) >= 0);
            }
            if (__all_sync(~0u, here)) break;
            if (turn > STEP_SIGN_TURNS) {
                uint64_t a, b, c, d;
                const int i = min(seen + lane, packets - 1);
                step_peek(step_box(g, g.own, 0, flag) + i, a, b), step_peek(step_box(g, g.own, 1, flag) + i, c, d);
                if (__all_sync(~0u, step_came(a, b, flag) && step_came(c, d, flag))) seen += 32;
            }
            if (turn % PEER_TURNS == 0) {
                since = peer_waited(g.halt, (uint64_t)g.patience, since);
                if (__any_sync(~0u, since == PEER_OVER)) break;
            }
        }
    }
    step_sync();
}

/* Between looks at packets whose signs have come. */
__device__ __forceinline__ bool step_given_up(const StepGroup &g, unsigned turn)
{
    __nanosleep(100); /* leaves room for those that are on their way */
    if (turn % PEER_TURNS != 0) return false;
    volatile unsigned *halt = g.halt; /* step_await has given up; or this is broken: a packet comes no later than its sign */
    if (turn >> 22 != 0) halt[1] = 1;
    return halt[0] != 0 || halt[1] != 0;
}

/* The sums of packs of 8 elements, PACKS at once, behind step_await; index: a pack's first packet. */
template <class T, int PACKS>
__device__ __forceinline__ void step_take(const StepGroup &g, unsigned flag, const int (&index)[PACKS], uint4 (&sum)[PACKS])
{
    const PeerPacket *first = step_box(g, g.own, 0, flag), *second = step_box(g, g.own, 1, flag);
    for (unsigned turn = 1;; turn++) {
        uint64_t a[PACKS][2][2], b[PACKS][2][2];
        bool here = true;
#pragma unroll
        for (int k = 0; k < PACKS; k++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 2; i++) step_peek((m == 0 ? first : second) + index[k] + i, a[k][m][i], b[k][m][i]);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            uint4 v[2];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) here = here && step_came(a[k][m][i], b[k][m][i], flag);
                v[m] = make_uint4((uint32_t)a[k][m][0], (uint32_t)b[k][m][0], (uint32_t)a[k][m][1], (uint32_t)b[k][m][1]);
            }
            sum[k] = step_add8<T>(v[0], v[1]);
        }
        if (here || step_given_up(g, turn)) return;
    }
}

/* StepInput::normalised with the sum as the norm's x. The sum itself and the norm's result are written too, by
 * every block its share. With keeps the residual sum stays in shared memory, where the next such product finds it. */
template <class T> __device__ __noinline__ void step_summed(const StepProduct &p, const StepPlaces &places, const StepGroup &g, unsigned flag)
{
    const weft_rms_norm_args n = p.norm;
    const int size = n.rows == 1 ? STEP_WARPS * 32 : 32, thread = step_thread(), me = thread % size;
    const int packs = (int)n.cols / 8, pitch = step_pitch((int)n.cols);
    const StepPacks mine = step_mine(packs);
    const bool sums = n.residual != nullptr, keeps = p.keeps != 0, kept = p.kept != 0;
    const uint4 *gain = (const uint4 *)n.gain;
    step_await(g, flag, (int)n.rows * packs * 2);
    for (int t = thread / size; t < (int)n.rows; t += STEP_WARPS * 32 / size) {
        uint4 *row = (uint4 *)(places.x + t * pitch), *held = (uint4 *)places.held + (keeps ? t * packs : t * (mine.end - mine.first) - mine.first);
        uint4 *x = (uint4 *)((T *)n.x + t * n.x_stride), *y = (uint4 *)((T *)n.y + t * n.y_stride);
        const uint4 *residual = sums ? (const uint4 *)((const T *)n.residual + t * n.residual_stride) : nullptr;
        uint4 first_gain[STEP_KEPT];
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++) first_gain[i] = __ldg(gain + min(me + i * size, packs - 1));
        float sum = 0.0f;
        for (int first = me; first < packs; first += STEP_KEPT * size) {
            int index[STEP_KEPT];
            uint4 v[STEP_KEPT], r[STEP_KEPT];
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = min(first + i * size, packs - 1);
                index[i] = 2 * (t * packs + pack);
                if (sums) r[i] = kept ? held[pack] : __ldcg(residual + pack);
            }
            step_take<T, STEP_KEPT>(g, flag, index, v);
#pragma unroll
            for (int i = 0; i < STEP_KEPT; i++) {
                const int pack = first + i * size;
                if (pack >= packs) continue;
                const bool own = pack >= mine.first && pack < mine.end;
                if (own) x[pack] = v[i];
                if (sums) {
                    v[i] = step_add8<T>(v[i], r[i]);
                    if (keeps || own) held[pack] = v[i];
                }
                sum += step_squares8<T>(v[i]);
                row[pack] = v[i];
            }
        }
        sum = warp_sum(sum);
        if (size > 32) {
            float *part = places.sums;
            if (thread % 32 == 0) part[thread / 32] = sum;
            step_sync();
            sum = 0.0f;
            for (int w = 0; w < STEP_WARPS; w++) sum += part[w];
        }
        const float factor = 1.0f / sqrtf(sum / (float)n.cols + n.eps);
        auto scale = [&](int pack, uint4 by) {
            const uint4 w = step_scale8<T>(row[pack], by, factor);
            row[pack] = w;
            if (pack >= mine.first && pack < mine.end) y[pack] = w;
        };
#pragma unroll
        for (int i = 0; i < STEP_KEPT; i++)
            if (me + i * size < packs) scale(me + i * size, first_gain[i]);
        for (int pack = me + STEP_KEPT * size; pack < packs; pack += size) scale(pack, __ldg(gain + pack));
    }
}

/* step_summed of one row of at most STEP_ONE_NORM columns, behind step_await. Neighbouring lanes take neighbouring packets, or the L2 is
 * asked for twice as many sectors. */
template <class T> __device__ __forceinline__ void step_one_summed(const StepProduct &p, const StepPlaces &places, const StepGroup &g, unsigned flag)
{
    enum { THREADS = STEP_WARPS * 32, QUADS = STEP_ONE_NORM / 4 / THREADS };
    const weft_rms_norm_args &n = p.norm;
    const int thread = step_thread(), quads = (int)n.cols / 4;
    const StepPacks mine = step_mine(quads / 2);
    const bool sums = n.residual != nullptr, kept = p.kept != 0;
    const PeerPacket *first = step_box(g, g.own, 0, flag), *second = step_box(g, g.own, 1, flag);
    uint2 *const held = &step_shared(*(uint2 *)places.held), *const row = &step_shared(*(uint2 *)places.x);
    uint2 v[QUADS], gain[QUADS];
    for (unsigned turn = 1;; turn++) {
        uint64_t a[QUADS][2], b[QUADS][2];
        bool here = true;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const int quad = min(thread + i * THREADS, quads - 1);
            step_peek(first + quad, a[i][0], b[i][0]), step_peek(second + quad, a[i][1], b[i][1]);
            gain[i] = __ldg((const uint2 *)n.gain + quad);
        }
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            here = here && step_came(a[i][0], b[i][0], flag) && step_came(a[i][1], b[i][1], flag);
            v[i] = make_uint2(step_add2<T>((uint32_t)a[i][0], (uint32_t)a[i][1]), step_add2<T>((uint32_t)b[i][0], (uint32_t)b[i][1]));
        }
        if (here) break;
        if (step_given_up(g, turn)) break;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = thread + i * THREADS;
        if (quad >= quads) continue;
        if (quad / 2 >= mine.first && quad / 2 < mine.end) ((uint2 *)n.x)[quad] = v[i];
        if (sums) {
            const uint2 r = kept ? held[quad] : __ldcg((const uint2 *)n.residual + quad);
            held[quad] = v[i] = make_uint2(step_add2<T>(v[i].x, r.x), step_add2<T>(v[i].y, r.y));
        }
        const float2 x = widen_pair<T>(v[i].x), y = widen_pair<T>(v[i].y);
        sum += x.x * x.x + x.y * x.y + y.x * y.x + y.y * y.y;
    }
    const float factor = rsqrtf(step_block_sum(sum, &step_shared(*places.sums)) / (float)n.cols + n.eps);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int quad = thread + i * THREADS;
        if (quad >= quads) continue;
        const uint2 w = make_uint2(step_scale2<T>(v[i].x, gain[i].x, factor), step_scale2<T>(v[i].y, gain[i].y, factor));
        row[quad] = w;
        if (quad / 2 >= mine.first && quad / 2 < mine.end) ((uint2 *)n.y)[quad] = w;
    }
}

/* A sum that is not part of a product's input, spread over all threads of the kernel. */
template <class T> __device__ __noinline__ void step_sum(const StepTake &take, const StepGroup &g, unsigned flag)
{
    const int packs = (int)(take.count / 8);
    step_await(g, flag, 2 * packs);
    for (int i = (int)blockIdx.x * (STEP_WARPS * 32) + step_thread(); i < packs; i += (int)gridDim.x * (STEP_WARPS * 32)) {
        const int index[1] = {2 * i};
        uint4 sum[1];
        step_take<T, 1>(g, flag, index, sum);
        ((uint4 *)take.y)[i] = sum[0];
    }
}

#endif

} // namespace weft
