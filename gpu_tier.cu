/* gpu_tier.cu - device kernels behind tier_server.c: packed experts in VRAM, the CPU's bits.
 *
 *   1 Errors, constants        4 Moving a request in and out
 *   2 Layout and upload        5 The arm: open, upload, begin, end
 *   3 The two kernels          6 Pace of the device
 *
 * How the bits are kept (NUMERICS 2): the 16 accumulators of a dot16 are shared out to a quad of
 * threads, four lanes each; a thread walks its lanes through all groups in order, evens before odds,
 * with __fmaf_rn; the fold is two shuffles and two adds. A weight is rebuilt exactly: its four bits
 * are put where bf16 has sign, low exponent and top mantissa bits, which is the value times 2^-126,
 * and one bf16 product by a power of two makes it E2M1 x 2^(code - 127), subnormal ones included.
 * Everything else is kernels.h, the same lines that the CPU compiles. Sums are int64, so atomics may
 * add them in any order (NUMERICS 5).
 */
#include "gpu_tier.h"
#include "kernels.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* ==== 1. Errors, constants =========================================================== */

#ifndef WARPS
#define WARPS 4            /* of a block                                          */
#endif
#ifndef ONE_BLOCKS
#define ONE_BLOCKS 6
#endif
#ifndef UNROLL
#define UNROLL 1
#endif
#define BLOCK (WARPS * 32)
#define TILE 8             /* weight rows that a warp takes in one load           */
#define CHUNK 128          /* columns of one load: 16 bytes a thread, four groups */
#define LOW_CODE 128       /* above it a scale needs two factors                  */
#define WAIT_NS 5000000000ull /* a request that takes longer: the device is lost  */

constexpr int n_unroll = UNROLL;
static int failed(cudaError_t rc, const char *what, char *why, size_t n_why) {
    if (rc == cudaSuccess) return 0;
    snprintf(why, n_why, "gpu: %s: %s", what, cudaGetErrorString(rc));
    return -1;
}

/* Run a CUDA call; on an error leave a line in `why` and return -1 from here. */
#define TRY(call)                                              \
    do {                                                       \
        if (failed((call), #call, why, n_why) < 0) return -1;  \
    } while (0)

static uint64_t clock_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

__host__ __device__ static inline uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

/* ==== 2. Layout and upload ===========================================================
 *
 * A slot holds w1, w3, w2, then their scales. Rows lie in tiles of 8, columns in chunks of 128, and
 * one chunk of one tile is 512 bytes: 16 for each thread of a warp, in the order of the threads.
 * Thread `lane` has row lane / 4 and, of each of the four groups, the 8 columns from 8 (lane % 4),
 * which are four lanes of dot16. Their scales are 32 bytes: four codes for each row.
 *
 * Rows and columns are padded with zeros, at most to the next tile and chunk.
 */
typedef struct {
    uint32_t rows, cols; /* as in the model         */
    uint32_t tiles, chunks;
    uint64_t q, s; /* where they lie in a slot, bytes */
} matrix;

typedef struct {
    matrix w1, w3, w2;
    uint32_t lat_pad, inter_pad; /* columns, padded: strides of z and h */
    uint64_t bytes;
} layout;

static matrix matrix_place(uint32_t rows, uint32_t cols, uint32_t tile_multiple) {
    matrix m = {rows, cols, 0, 0, 0, 0};
    m.tiles = (uint32_t)round_up((rows + TILE - 1) / TILE, tile_multiple);
    m.chunks = (cols + CHUNK - 1) / CHUNK;
    return m;
}

static uint64_t matrix_bytes(const matrix *m, bool is_scale) {
    return (uint64_t)m->tiles * m->chunks * (is_scale ? 32 : 512);
}

static layout layout_make(uint32_t latent, uint32_t inter) {
    layout l;
    l.w1 = l.w3 = matrix_place(inter, latent, 1);
    l.w2 = matrix_place(latent, inter, 2); /* a warp takes two tiles of w2 */
    l.lat_pad = l.w1.chunks * CHUNK;
    l.inter_pad = l.w2.chunks * CHUNK;
    matrix *all[3] = {&l.w1, &l.w3, &l.w2};
    l.bytes = 0;
    for (int k = 0; k < 3; k++) {
        all[k]->q = l.bytes;
        l.bytes += matrix_bytes(all[k], false);
    }
    for (int k = 0; k < 3; k++) {
        all[k]->s = l.bytes;
        l.bytes += matrix_bytes(all[k], true);
    }
    l.bytes = round_up(l.bytes, 512);
    return l;
}

extern "C" uint64_t gpu_slot_bytes(uint32_t latent, uint32_t inter) {
    return layout_make(latent, inter).bytes;
}

/* Eight nibbles as a thread wants them: pair p, which is lane p of the four, has its even element in
 * the low half of the word and its odd one in the high half, at these places:
 *
 *     p    magnitude   sign        in each half
 *     0    6..8        15          as bf16 has them
 *     1    3..5        12          shifted by 3
 *     2    0..2        13
 *     3    9..11       14 */
__device__ static uint32_t repack_word(uint32_t v) {
    const uint32_t mag[4] = {6, 3, 0, 9}, sign[4] = {15, 12, 13, 14};
    uint32_t out = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t nibble = v >> 4 * i & 15, p = i / 2, half = i % 2 * 16;
        out |= (nibble & 7) << (mag[p] + half) | nibble >> 3 << (sign[p] + half);
    }
    return out;
}

/* One thread, one 16-byte piece.
 * Shapes  raw: u8[rows][cols / 2]   to: uint4[tiles][chunks][32] */
__global__ static void repack_q(uint4 *to, const uint8_t *raw, matrix m) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)m.tiles * m.chunks * 32) return;
    uint32_t lane = i % 32, chunk = i / 32 % m.chunks, row = i / 32 / m.chunks * TILE + lane / 4;
    uint32_t w[4];
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t group = chunk * 4 + k, v = 0;
        if (row < m.rows && group < m.cols / 32)
            memcpy(&v, raw + (uint64_t)row * (m.cols / 2) + group * 16 + lane % 4 * 4, 4);
        w[k] = repack_word(v);
    }
    to[i] = make_uint4(w[0], w[1], w[2], w[3]);
}

/* One thread, four codes of a row. `is_high` is set where a code is above LOW_CODE.
 * Shapes  raw: u8[rows][cols / 32]   to: u32[tiles][chunks][8] */
__global__ static void repack_s(uint32_t *to, const uint8_t *raw, matrix m, uint32_t *is_high) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)m.tiles * m.chunks * 8) return;
    uint32_t chunk = i / 8 % m.chunks, row = i / 8 / m.chunks * TILE + i % 8, v = 0;
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t group = chunk * 4 + k, code = 127;
        if (row < m.rows && group < m.cols / 32)
            code = raw[(uint64_t)row * (m.cols / 32) + group];
        if (code > LOW_CODE) *is_high = 1;
        v |= code << 8 * k;
    }
    to[i] = v;
}

/* ==== 3. The two kernels =============================================================
 *
 *     h = SiTU(w1 z, w3 z)        inner_*: a warp takes a tile of w1 and the same rows of w3
 *     Q += q40(weight x (w2 h))   outer_*: a warp takes two tiles of w2
 *
 * so that every activation which is loaded meets two weights. `_one` is for requests of one row, the
 * way of a token: few registers, many warps. `_many` walks the rows of an expert in blocks of up to
 * 8; weights come from VRAM for the first block and from the cache for the rest.
 */

/* What the kernels know of a request. */
typedef struct {
    uint32_t n_items, n_rows;
    uint64_t number;
    uint64_t pad[6];
} head;

typedef struct {
    layout l;
    const uint8_t *slots;
    const uint32_t *is_high; /* [slots] */
    const head *h;
    const gpu_item *items;
    const uint32_t *row; /* [pairs] */
    const float *w;      /* [pairs] */
    const float *z;      /* [rows][lat_pad]    */
    float *hidden;       /* [pairs][inter_pad] */
    int64_t *Q;          /* [rows][latent]     */
    uint32_t *is_bad;    /* [items]            */
    float beta, linear_beta;
} task;

/* Weights are read once: they need no place in L1, which is for the activations. */
__device__ static inline uint4 load_weights(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* a x b + c in either half, one rounding each; here always exact. */
__device__ static inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* Low half, twice. */
__device__ static inline uint32_t low_twice(uint32_t v) {
    uint32_t d;
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {lo, lo}; }" : "=r"(d) : "r"(v));
    return d;
}

/* The scale of group i of four, bf16 in the high half: 2^(code - 1); or 2^(code - 127), whose other
 * factor is 2^126, when codes may be high. */
template <bool HIGH>
__device__ static inline uint32_t scale_of(uint32_t codes, int i) {
    uint32_t code = __byte_perm(codes, 0, 0x4044 | i << 8); /* in bits 16..23 */
    if (!HIGH) return code * 0x80u + 0x3f000000u;
    return code ? code * 0x80u : 0x00400000u;
}

/* Eight weights of one row and group, exact: w[2p] even, w[2p + 1] odd. The scale's low half is 0 and
 * +0 is added, so that the low half of the product is +0 and the whole is the f32. */
template <bool HIGH>
__device__ static inline void weights_of(uint32_t v, uint32_t scale, float w[8]) {
    uint32_t t[4];
    t[0] = v & 0x81c081c0u;
    t[1] = v << 3 & 0x81c081c0u;
    t[2] = (v << 6 & 0x01c001c0u) | (v << 2 & 0x80008000u);
    t[3] = (v >> 3 & 0x01c001c0u) | (v << 1 & 0x80008000u);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        if (HIGH) t[p] = fma_bf16x2(t[p], 0x7e807e80u, 0x80008000u);
        w[2 * p] = __uint_as_float(fma_bf16x2(low_twice(t[p]), scale, 0));
        w[2 * p + 1] = __uint_as_float(fma_bf16x2(t[p], scale, 0));
    }
}

/* The end of a dot16 whose lanes lie four to a thread of the quad: 8, 4, 2, 1, then + (+0). */
__device__ static inline float fold(const float acc[4]) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __fadd_rn(acc[i], __shfl_xor_sync(0xffffffffu, acc[i], 2));
        v[i] = __fadd_rn(v[i], __shfl_xor_sync(0xffffffffu, v[i], 1));
    }
    return __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[2]), __fadd_rn(v[1], v[3])), 0.0f);
}

/* Two tiles of rows through R vectors: ya[r] and yb[r] are this quad's rows of either tile.
 * Shapes  qa, qb: uint4[chunks][32]   sa, sb: u32[chunks][8]   x[r]: f32[chunks * 128] */
template <int R, bool HIGH>
__device__ static inline void dot_tiles(const uint4 *qa, const uint4 *qb, const uint32_t *sa,
                                        const uint32_t *sb, uint32_t chunks,
                                        const float *const x[R], float ya[R], float yb[R]) {
    const uint32_t lane = threadIdx.x % 32;
    float a[R][4], b[R][4];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) a[r][i] = b[r][i] = 0.0f;
    qa += lane;
    qb += lane;
    sa += lane / 4;
    sb += lane / 4;
    uint4 va = load_weights(qa), vb = load_weights(qb);
    uint32_t ca = __ldg(sa), cb = __ldg(sb);
#pragma unroll n_unroll
    for (uint32_t c = 0; c < chunks; c++) {
        const uint32_t wa[4] = {va.x, va.y, va.z, va.w}, wb[4] = {vb.x, vb.y, vb.z, vb.w};
        const uint32_t codes_a = ca, codes_b = cb;
        if (c + 1 < chunks) {
            va = load_weights(qa + (c + 1) * 32);
            vb = load_weights(qb + (c + 1) * 32);
            ca = __ldg(sa + (c + 1) * 8);
            cb = __ldg(sb + (c + 1) * 8);
        }
#pragma unroll
        for (int g = 0; g < 4; g++) {
            float fa[8], fb[8];
            weights_of<HIGH>(wa[g], scale_of<HIGH>(codes_a, g), fa);
            weights_of<HIGH>(wb[g], scale_of<HIGH>(codes_b, g), fb);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 *p =
                    (const float4 *)(x[r] + c * CHUNK + g * 32 + lane % 4 * 8);
                const float4 lo = p[0], hi = p[1];
                const float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    a[r][k / 2] = __fmaf_rn(fa[k], v[k], a[r][k / 2]);
                    b[r][k / 2] = __fmaf_rn(fb[k], v[k], b[r][k / 2]);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        ya[r] = fold(a[r]);
        yb[r] = fold(b[r]);
    }
}

/* Rows [first, first + n) of h for one tile of w1 and w3; n <= R. */
template <int R, bool HIGH>
__device__ static inline void inner_block(const task &t, const uint8_t *slot, uint32_t tile,
                                          uint32_t first, uint32_t n) {
    const matrix &m1 = t.l.w1, &m3 = t.l.w3;
    const uint64_t q = (uint64_t)tile * m1.chunks * 512, s = (uint64_t)tile * m1.chunks * 32;
    const float *x[R];
    float g[R], u[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        uint32_t pair = first + (r < (int)n ? r : n - 1);
        x[r] = t.z + (uint64_t)t.row[pair] * t.l.lat_pad;
    }
    dot_tiles<R, HIGH>((const uint4 *)(slot + m1.q + q), (const uint4 *)(slot + m3.q + q),
                       (const uint32_t *)(slot + m1.s + s), (const uint32_t *)(slot + m3.s + s),
                       m1.chunks, x, g, u);
    const uint32_t i = tile * TILE + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < R; r++)
        if (threadIdx.x % 4 == (uint32_t)r % 4 && r < (int)n && i < m1.rows)
            t.hidden[(uint64_t)(first + r) * t.l.inter_pad + i] =
                k3_situ(g[r], u[r], t.beta, t.linear_beta);
}

/* Add one term; false when it is not below 2^17 in size. */
__device__ static inline bool add_term(int64_t *Q, float w, float y) {
    float v = w * y;
    if (!(fabsf(v) < 0x1p17f)) return false;
    atomicAdd((unsigned long long *)Q, (unsigned long long)k3_q40(v));
    return true;
}

template <int R, bool HIGH>
__device__ static inline void outer_block(const task &t, const uint8_t *slot, uint32_t tile,
                                          uint32_t first, uint32_t n, uint32_t *is_bad) {
    const matrix &m = t.l.w2;
    const uint64_t q = (uint64_t)tile * m.chunks * 512, s = (uint64_t)tile * m.chunks * 32;
    const float *x[R];
    float y[2][R];
#pragma unroll
    for (int r = 0; r < R; r++)
        x[r] = t.hidden + (uint64_t)(first + (r < (int)n ? r : n - 1)) * t.l.inter_pad;
    const uint4 *at = (const uint4 *)(slot + m.q + q);
    const uint32_t *codes = (const uint32_t *)(slot + m.s + s);
    dot_tiles<R, HIGH>(at, at + m.chunks * 32, codes, codes + m.chunks * 8, m.chunks, x, y[0],
                       y[1]);
    const uint32_t i = tile * TILE + threadIdx.x % 32 / 4;
#pragma unroll
    for (int k = 0; k < 2 * R; k++) {
        const int r = k / 2, half = k % 2;
        if (threadIdx.x % 4 != (uint32_t)k % 4 || r >= (int)n || i + half * TILE >= m.rows) continue;
        uint64_t to = (uint64_t)t.row[first + r] * m.rows + i + half * TILE;
        if (!add_term(t.Q + to, t.w[first + r], y[half][r])) *is_bad = 1;
    }
}

/* This warp's expert and tile; false when there is none. */
__device__ static inline bool warp_place(const task &t, uint32_t n_tiles, uint32_t step,
                                         uint32_t *tile, gpu_item *it) {
    *tile = (blockIdx.x * WARPS + threadIdx.x / 32) * step;
    if (*tile >= n_tiles || blockIdx.y >= t.h->n_items) return false;
    *it = t.items[blockIdx.y];
    return true;
}

__global__ static void __launch_bounds__(BLOCK, ONE_BLOCKS) inner_one(const task t) {
    uint32_t tile;
    gpu_item it;
    if (!warp_place(t, t.l.w1.tiles, 1, &tile, &it)) return;
    const uint8_t *slot = t.slots + (uint64_t)it.slot * t.l.bytes;
    if (t.is_high[it.slot])
        inner_block<1, true>(t, slot, tile, it.first, 1);
    else
        inner_block<1, false>(t, slot, tile, it.first, 1);
}

__global__ static void __launch_bounds__(BLOCK, ONE_BLOCKS) outer_one(const task t) {
    uint32_t tile;
    gpu_item it;
    if (!warp_place(t, t.l.w2.tiles, 2, &tile, &it)) return;
    const uint8_t *slot = t.slots + (uint64_t)it.slot * t.l.bytes;
    if (t.is_high[it.slot])
        outer_block<1, true>(t, slot, tile, it.first, 1, &t.is_bad[blockIdx.y]);
    else
        outer_block<1, false>(t, slot, tile, it.first, 1, &t.is_bad[blockIdx.y]);
}

__global__ static void __launch_bounds__(BLOCK, 3) inner_many(const task t) {
    uint32_t tile;
    gpu_item it;
    if (!warp_place(t, t.l.w1.tiles, 1, &tile, &it)) return;
    const uint8_t *slot = t.slots + (uint64_t)it.slot * t.l.bytes;
    for (uint32_t at = 0; at < it.n; at += 8) {
        const uint32_t n = it.n - at < 8 ? it.n - at : 8;
        if (t.is_high[it.slot])
            for (uint32_t r = 0; r < n; r++)
                inner_block<1, true>(t, slot, tile, it.first + at + r, 1);
        else if (n > 4)
            inner_block<8, false>(t, slot, tile, it.first + at, n);
        else if (n > 2)
            inner_block<4, false>(t, slot, tile, it.first + at, n);
        else if (n > 1)
            inner_block<2, false>(t, slot, tile, it.first + at, n);
        else
            inner_block<1, false>(t, slot, tile, it.first + at, n);
    }
}

__global__ static void __launch_bounds__(BLOCK, 3) outer_many(const task t) {
    uint32_t tile;
    gpu_item it;
    if (!warp_place(t, t.l.w2.tiles, 2, &tile, &it)) return;
    const uint8_t *slot = t.slots + (uint64_t)it.slot * t.l.bytes;
    uint32_t *is_bad = &t.is_bad[blockIdx.y];
    for (uint32_t at = 0; at < it.n; at += 8) {
        const uint32_t n = it.n - at < 8 ? it.n - at : 8;
        if (t.is_high[it.slot])
            for (uint32_t r = 0; r < n; r++)
                outer_block<1, true>(t, slot, tile, it.first + at + r, 1, is_bad);
        else if (n > 4)
            outer_block<8, false>(t, slot, tile, it.first + at, n, is_bad);
        else if (n > 2)
            outer_block<4, false>(t, slot, tile, it.first + at, n, is_bad);
        else if (n > 1)
            outer_block<2, false>(t, slot, tile, it.first + at, n, is_bad);
        else
            outer_block<1, false>(t, slot, tile, it.first + at, n, is_bad);
    }
}

/* ==== 4. Moving a request in and out =================================================
 *
 * A request is one block of pinned memory, and so is its answer:
 *
 *     in     head | items | row of each pair | weight of each pair | z, rows padded
 *     out    sums | bad items | number of the request, written last
 *
 * The device reads and writes them itself (mapped memory): a kernel that copies 14 KB across the bus
 * starts sooner than a copy engine, and the host sees the number change sooner than it would hear of
 * the end of the stream.
 */
__global__ static void stage_in(uint4 *to, const uint4 *from, uint64_t n, uint4 *clear,
                                uint64_t n_clear) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x,
             step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t k = i; k < n; k += step) to[k] = from[k];
    for (uint64_t k = i; k < n_clear; k += step) clear[k] = make_uint4(0, 0, 0, 0);
}

/* `n_done` counts blocks; the last one says that all is there, and leaves it at 0. */
__global__ static void stage_out(uint4 *to, const uint4 *from, uint64_t n, const head *h,
                                 uint64_t *number, uint32_t *n_done) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t k = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; k < n; k += step)
        to[k] = from[k];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(n_done, 1) + 1 < gridDim.x) return;
    *n_done = 0;
    __threadfence_system();
    *(volatile uint64_t *)number = h->number;
}

/* ==== 5. The arm ===================================================================== */

/* Requests of one shape share a graph. One row: exact number of items; more: powers of two. */
typedef struct {
    uint32_t rows, items, pairs;
    bool is_timed;
    cudaGraphExec_t exec;
} shape;

enum { EV_BEGIN, EV_IN, EV_KERNELS, EV_OUT, N_EVENTS };

struct gpu {
    gpu_options o;
    gpu_info info;
    layout l;
    uint8_t *slots;
    uint32_t *is_high;
    uint8_t *in, *out; /* on the device           */
    float *hidden;
    uint32_t *n_done;
    uint8_t *host_in, *host_out; /* pinned, mapped */
    volatile uint64_t *host_number;
    uint64_t in_bytes, out_bytes;
    uint8_t *raw, *host_raw; /* an expert as on disk */
    uint64_t raw_bytes;
    cudaStream_t stream, upload_stream;
    cudaEvent_t event[N_EVENTS];
    shape shapes[GPU_MAX_SHAPES];
    uint32_t n_shapes;
    const shape *now; /* the request that is out */
    uint32_t n_rows, n_items;
    uint64_t number;
    bool is_timed;
};

/* Offsets in the blocks of a shape. */
typedef struct {
    uint64_t items, row, w, z, in_bytes, bad, out_bytes;
} places;

static places places_of(const gpu *g, uint32_t rows, uint32_t items, uint32_t pairs) {
    places p;
    p.items = sizeof(head);
    p.row = p.items + items * sizeof(gpu_item);
    p.w = round_up(p.row + pairs * 4ull, 16);
    p.z = round_up(p.w + pairs * 4ull, 16);
    p.in_bytes = p.z + (uint64_t)rows * g->l.lat_pad * 4;
    p.bad = (uint64_t)rows * g->o.latent * 8;
    p.out_bytes = round_up(p.bad + items * 4ull, 16);
    return p;
}

static uint32_t power_of_two(uint32_t n, uint32_t most) {
    uint32_t p = 1;
    while (p < n) p *= 2;
    return p < most ? p : most;
}

static int gpu_device(gpu *g, char *why, size_t n_why) {
    cudaDeviceProp prop;
    TRY(cudaSetDevice(g->o.device));
    TRY(cudaGetDeviceProperties(&prop, g->o.device));
    snprintf(g->info.name, sizeof g->info.name, "%s", prop.name);
    g->info.sm_major = prop.major;
    g->info.sm_minor = prop.minor;
    g->info.n_sm = prop.multiProcessorCount;
    if (prop.major < 8) {
        snprintf(why, n_why, "gpu: %s has compute capability %d.%d; 8.0 is the least", prop.name,
                 prop.major, prop.minor);
        return -1;
    }
    return 0;
}

static int gpu_buffers(gpu *g, char *why, size_t n_why) {
    const gpu_options *o = &g->o;
    places p = places_of(g, o->max_rows, o->max_items, o->max_pairs);
    uint64_t weights = (uint64_t)o->latent * o->inter, hidden = o->max_pairs * 4ull * g->l.inter_pad;
    g->in_bytes = p.in_bytes;
    g->out_bytes = p.out_bytes;
    g->raw_bytes = 3 * (weights / 2 + weights / 32);
    TRY(cudaMalloc(&g->in, g->in_bytes));
    TRY(cudaMalloc(&g->out, g->out_bytes));
    TRY(cudaMalloc(&g->hidden, hidden));
    TRY(cudaMemset(g->hidden, 0, hidden)); /* its padding stays 0 */
    TRY(cudaMalloc(&g->n_done, sizeof *g->n_done));
    TRY(cudaMemset(g->n_done, 0, sizeof *g->n_done));
    TRY(cudaMalloc(&g->raw, g->raw_bytes));
    TRY(cudaHostAlloc(&g->host_in, g->in_bytes, cudaHostAllocMapped));
    TRY(cudaHostAlloc(&g->host_out, g->out_bytes + 64, cudaHostAllocMapped));
    TRY(cudaHostAlloc(&g->host_raw, g->raw_bytes, cudaHostAllocDefault));
    g->host_number = (volatile uint64_t *)(g->host_out + g->out_bytes);
    *g->host_number = 0;
    memset(g->host_in, 0, g->in_bytes); /* the padding of z */
    TRY(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    TRY(cudaStreamCreateWithFlags(&g->upload_stream, cudaStreamNonBlocking));
    for (int i = 0; i < N_EVENTS; i++) TRY(cudaEventCreate(&g->event[i]));
    return 0;
}

static int gpu_room(gpu *g, char *why, size_t n_why) {
    size_t n_free, n_total;
    TRY(cudaMemGetInfo(&n_free, &n_total));
    uint64_t room = n_free > GPU_MARGIN_BYTES ? n_free - GPU_MARGIN_BYTES : 0;
    if (g->o.vram_bytes > 0 && g->o.vram_bytes < room) room = g->o.vram_bytes;
    uint64_t n = room / (g->l.bytes + 4);
    g->info.slot_bytes = g->l.bytes;
    g->info.n_slots = n < UINT32_MAX / 2 ? (uint32_t)n : UINT32_MAX / 2;
    g->info.vram_bytes = g->info.n_slots * g->l.bytes;
    if (n == 0) {
        snprintf(why, n_why, "gpu: %llu MiB for experts is less than one takes (%llu MiB)",
                 (unsigned long long)(room >> 20), (unsigned long long)(g->l.bytes >> 20) + 1);
        return -1;
    }
    TRY(cudaMalloc(&g->slots, g->info.vram_bytes));
    TRY(cudaMalloc(&g->is_high, g->info.n_slots * 4ull));
    return 0;
}

static int gpu_prepare(gpu *g, char *why, size_t n_why) {
    if (gpu_device(g, why, n_why) < 0 || gpu_buffers(g, why, n_why) < 0) return -1;
    return gpu_room(g, why, n_why);
}

extern "C" int gpu_open(gpu **out, const gpu_options *o, char *why, size_t n_why) {
    *out = NULL;
    if (o->latent % 32 || o->inter % 32 || o->latent == 0 || o->inter == 0) {
        snprintf(why, n_why, "gpu: latent %u and expert width %u must be multiples of 32", o->latent,
                 o->inter);
        return -1;
    }
    gpu *g = (gpu *)calloc(1, sizeof *g);
    if (!g) {
        snprintf(why, n_why, "gpu: out of memory");
        return -1;
    }
    g->o = *o;
    g->l = layout_make(o->latent, o->inter);
    if (gpu_prepare(g, why, n_why) < 0) {
        gpu_close(g);
        return -1;
    }
    *out = g;
    return 0;
}

/* Also after the device was lost: then what can be freed is. */
extern "C" void gpu_close(gpu *g) {
    if (!g) return;
    cudaSetDevice(g->o.device);
    for (uint32_t i = 0; i < g->n_shapes; i++) cudaGraphExecDestroy(g->shapes[i].exec);
    for (int i = 0; i < N_EVENTS; i++)
        if (g->event[i]) cudaEventDestroy(g->event[i]);
    if (g->stream) cudaStreamDestroy(g->stream);
    if (g->upload_stream) cudaStreamDestroy(g->upload_stream);
    cudaFree(g->slots);
    cudaFree(g->is_high);
    cudaFree(g->in);
    cudaFree(g->out);
    cudaFree(g->hidden);
    cudaFree(g->n_done);
    cudaFree(g->raw);
    cudaFreeHost(g->host_in);
    cudaFreeHost(g->host_out);
    cudaFreeHost(g->host_raw);
    free(g);
}

extern "C" void gpu_info_get(const gpu *g, gpu_info *out) { *out = g->info; }

extern "C" uint64_t gpu_free_bytes(const gpu *g) {
    size_t n_free = 0, n_total;
    return cudaSetDevice(g->o.device) == cudaSuccess &&
                   cudaMemGetInfo(&n_free, &n_total) == cudaSuccess
               ? n_free
               : 0;
}

extern "C" int gpu_upload(gpu *g, uint32_t slot, const uint8_t *const p[6], char *why,
                          size_t n_why) {
    const matrix *m[3] = {&g->l.w1, &g->l.w3, &g->l.w2};
    uint8_t *to = g->slots + (uint64_t)slot * g->l.bytes;
    uint64_t at = 0, n_q = (uint64_t)g->o.latent * g->o.inter / 2, n_s = n_q / 16;
    TRY(cudaSetDevice(g->o.device));
    for (int k = 0; k < 6; k++) {
        memcpy(g->host_raw + at, p[k], k % 2 ? n_s : n_q);
        at += k % 2 ? n_s : n_q;
    }
    TRY(cudaMemcpyAsync(g->raw, g->host_raw, at, cudaMemcpyHostToDevice, g->upload_stream));
    TRY(cudaMemsetAsync(&g->is_high[slot], 0, 4, g->upload_stream));
    for (int k = 0; k < 3; k++) {
        uint64_t n = (uint64_t)m[k]->tiles * m[k]->chunks;
        const uint8_t *raw = g->raw + k * (n_q + n_s);
        repack_q<<<(unsigned)((n * 32 + 255) / 256), 256, 0, g->upload_stream>>>(
            (uint4 *)(to + m[k]->q), raw, *m[k]);
        TRY(cudaGetLastError());
        repack_s<<<(unsigned)((n * 8 + 255) / 256), 256, 0, g->upload_stream>>>(
            (uint32_t *)(to + m[k]->s), raw + n_q, *m[k], &g->is_high[slot]);
        TRY(cudaGetLastError());
    }
    TRY(cudaStreamSynchronize(g->upload_stream));
    return 0;
}

static unsigned blocks_for(uint64_t n_tasks, uint32_t n_sm) {
    uint64_t n = (n_tasks + 255) / 256;
    return (unsigned)(n < 1 ? 1 : n < n_sm ? n : n_sm);
}

/* The launches of one shape, into the stream. */
static int gpu_launch(gpu *g, const shape *s, char *why, size_t n_why) {
    places p = places_of(g, s->rows, s->items, s->pairs);
    task t = {g->l,
              g->slots,
              g->is_high,
              (const head *)g->in,
              (const gpu_item *)(g->in + p.items),
              (const uint32_t *)(g->in + p.row),
              (const float *)(g->in + p.w),
              (const float *)(g->in + p.z),
              g->hidden,
              (int64_t *)g->out,
              (uint32_t *)(g->out + p.bad),
              g->o.beta,
              g->o.linear_beta};
    dim3 inner((g->l.w1.tiles + WARPS - 1) / WARPS, s->items),
        outer((g->l.w2.tiles / 2 + WARPS - 1) / WARPS, s->items);
    uint64_t n_in = p.in_bytes / 16, n_out = p.out_bytes / 16;
    bool is_one = s->rows == 1;
    if (s->is_timed) TRY(cudaEventRecordWithFlags(g->event[EV_BEGIN], g->stream, cudaEventRecordExternal));
    stage_in<<<blocks_for(n_in > n_out ? n_in : n_out, g->info.n_sm), 256, 0, g->stream>>>(
        (uint4 *)g->in, (const uint4 *)g->host_in, n_in, (uint4 *)g->out, n_out);
    TRY(cudaGetLastError());
    if (s->is_timed) TRY(cudaEventRecordWithFlags(g->event[EV_IN], g->stream, cudaEventRecordExternal));
    is_one ? inner_one<<<inner, BLOCK, 0, g->stream>>>(t)
           : inner_many<<<inner, BLOCK, 0, g->stream>>>(t);
    TRY(cudaGetLastError());
    is_one ? outer_one<<<outer, BLOCK, 0, g->stream>>>(t)
           : outer_many<<<outer, BLOCK, 0, g->stream>>>(t);
    TRY(cudaGetLastError());
    if (s->is_timed) TRY(cudaEventRecordWithFlags(g->event[EV_KERNELS], g->stream, cudaEventRecordExternal));
    stage_out<<<blocks_for(n_out, g->info.n_sm), 256, 0, g->stream>>>(
        (uint4 *)g->host_out, (const uint4 *)g->out, n_out, (const head *)g->in,
        (uint64_t *)g->host_number, g->n_done);
    TRY(cudaGetLastError());
    if (s->is_timed) TRY(cudaEventRecordWithFlags(g->event[EV_OUT], g->stream, cudaEventRecordExternal));
    return 0;
}

/* The graph of a shape, made when the shape is first seen. */
static int gpu_shape(gpu *g, uint32_t n_rows, uint32_t n_items, const shape **out, char *why,
                     size_t n_why) {
    shape s = {1, n_items, 0, g->is_timed, NULL};
    if (n_rows > 1) {
        s.rows = power_of_two(n_rows, g->o.max_rows);
        s.items = power_of_two(n_items, g->o.max_items);
    }
    s.pairs = s.rows * (g->o.max_pairs / g->o.max_rows);
    for (uint32_t i = 0; i < g->n_shapes; i++) {
        const shape *x = &g->shapes[i];
        *out = x;
        if (x->rows == s.rows && x->items == s.items && x->is_timed == s.is_timed) return 0;
    }
    if (g->n_shapes == GPU_MAX_SHAPES) {
        snprintf(why, n_why, "gpu: more shapes of requests than there can be");
        return -1;
    }
    cudaGraph_t graph = NULL;
    TRY(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal));
    int rc = gpu_launch(g, &s, why, n_why);
    cudaError_t end = cudaStreamEndCapture(g->stream, &graph);
    if (rc < 0) return -1;
    TRY(end);
    cudaError_t made = cudaGraphInstantiate(&s.exec, graph, 0);
    cudaGraphDestroy(graph);
    TRY(made);
    g->shapes[g->n_shapes] = s;
    *out = &g->shapes[g->n_shapes++];
    return 0;
}

extern "C" int gpu_begin(gpu *g, const float *z, uint32_t n_rows, const gpu_item *items,
                         uint32_t n_items, const uint32_t *row, const float *w, uint32_t n_pairs,
                         char *why, size_t n_why) {
    TRY(cudaSetDevice(g->o.device));
    if (gpu_shape(g, n_rows, n_items, &g->now, why, n_why) < 0) return -1;
    places p = places_of(g, g->now->rows, g->now->items, g->now->pairs);
    head h = {n_items, n_rows, ++g->number, {0}};
    g->n_rows = n_rows;
    g->n_items = n_items;
    memcpy(g->host_in, &h, sizeof h);
    memcpy(g->host_in + p.items, items, n_items * sizeof *items);
    memcpy(g->host_in + p.row, row, n_pairs * sizeof *row);
    memcpy(g->host_in + p.w, w, n_pairs * sizeof *w);
    for (uint32_t r = 0; r < n_rows; r++) {
        float *to = (float *)(g->host_in + p.z) + (uint64_t)r * g->l.lat_pad;
        memcpy(to, z + (uint64_t)r * g->o.latent, g->o.latent * 4ull);
        memset(to + g->o.latent, 0, (g->l.lat_pad - g->o.latent) * 4ull);
    }
    TRY(cudaGraphLaunch(g->now->exec, g->stream));
    return 0;
}

/* Until the device has written the number; the stream is asked now and then whether it lives. */
static int gpu_wait(gpu *g, char *why, size_t n_why) {
    uint64_t start = clock_ns();
    for (uint32_t i = 1; *g->host_number != g->number; i++) {
        if (i % 4096) continue;
        cudaError_t rc = cudaStreamQuery(g->stream);
        if (rc != cudaSuccess && rc != cudaErrorNotReady)
            return failed(rc, "a request", why, n_why);
        if (clock_ns() - start < WAIT_NS) continue;
        snprintf(why, n_why, "gpu: no answer for %u s", (unsigned)(WAIT_NS / 1000000000u));
        return -1;
    }
    __sync_synchronize();
    return 0;
}

extern "C" int gpu_end(gpu *g, int64_t *Q, uint8_t *is_bad, char *why, size_t n_why) {
    if (gpu_wait(g, why, n_why) < 0) return -1;
    places p = places_of(g, g->now->rows, g->now->items, g->now->pairs);
    const uint32_t *bad = (const uint32_t *)(g->host_out + p.bad);
    const int64_t *sums = (const int64_t *)g->host_out;
    int n_bad = 0;
    for (uint32_t x = 0; x < g->n_items; x++) {
        is_bad[x] = bad[x] != 0;
        n_bad += is_bad[x];
    }
    for (uint64_t i = 0; n_bad == 0 && i < (uint64_t)g->n_rows * g->o.latent; i++) Q[i] += sums[i];
    return n_bad;
}

extern "C" void gpu_timing(gpu *g, int is_on) { g->is_timed = is_on; }

extern "C" int gpu_times_get(gpu *g, gpu_times *out, char *why, size_t n_why) {
    float ms[3];
    TRY(cudaStreamSynchronize(g->stream));
    for (int i = 0; i < 3; i++) TRY(cudaEventElapsedTime(&ms[i], g->event[i], g->event[i + 1]));
    out->in_ns = (uint64_t)(ms[0] * 1e6);
    out->kernel_ns = (uint64_t)(ms[1] * 1e6);
    out->out_ns = (uint64_t)(ms[2] * 1e6);
    return 0;
}

/* ==== 6. Pace of the device ========================================================== */

__global__ static void read_all(const uint4 *p, uint64_t n, uint32_t *sum) {
    uint32_t v = 0;
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
#pragma unroll 8
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint4 x = load_weights(p + i);
        v ^= x.x ^ x.y ^ x.z ^ x.w;
    }
    if (v == 0x5a17c0de) *sum = v; /* so that the loads are not left out */
}

extern "C" int gpu_bandwidth(gpu *g, double *read, double *copy, char *why, size_t n_why) {
    uint64_t n = g->info.vram_bytes / 2 < 4ull << 30 ? g->info.vram_bytes / 2 : 4ull << 30;
    n = n / 4096 * 4096;
    float ms[2], best[2] = {1e30f, 1e30f};
    TRY(cudaSetDevice(g->o.device));
    TRY(cudaMemsetAsync(g->slots, 0x35, n, g->stream));
    for (int round = 0; round < 5; round++) {
        TRY(cudaEventRecord(g->event[0], g->stream));
        read_all<<<g->info.n_sm * 16, 256, 0, g->stream>>>((const uint4 *)g->slots, n / 16,
                                                          (uint32_t *)g->raw);
        TRY(cudaGetLastError());
        TRY(cudaEventRecord(g->event[1], g->stream));
        TRY(cudaMemcpyAsync(g->slots + n, g->slots, n, cudaMemcpyDeviceToDevice, g->stream));
        TRY(cudaEventRecord(g->event[2], g->stream));
        TRY(cudaStreamSynchronize(g->stream));
        for (int i = 0; i < 2; i++) {
            TRY(cudaEventElapsedTime(&ms[i], g->event[i], g->event[i + 1]));
            if (ms[i] < best[i]) best[i] = ms[i];
        }
    }
    *read = (double)n / (best[0] * 1e-3);
    *copy = 2.0 * (double)n / (best[1] * 1e-3);
    return 0;
}
