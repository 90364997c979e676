/* gpu_tier.cu - device kernels behind tier_server.c: packed experts in VRAM, the CPU's bits.
 *
 *   1 Errors, constants        4 Moving a request in and out
 *   2 Layout and upload        5 The arm: open, upload, begin, end
 *   3 The kernel               6 Pace of the device
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

#define N_STAGES 2         /* chunks of a ring                                     */
#define WARPS(rows) ((rows) == 1 ? 20 : 12) /* of a block, at most                 */
#define TILE 8             /* weight rows that a warp takes in one load            */
#define TILES 2            /* of a block                                           */
#define SPANS (4 / TILES)  /* of 128 columns, a chunk                              */
#define CHUNK (SPANS * 128)
#define LOW_CODE 128       /* above it a scale needs two factors                   */
#define WAIT_NS 5000000000ull /* what takes longer: the device is lost             */

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
 * A slot is two matrices: `up`, which is w1 and w3 together, and `down`, which is w2. A warp computes
 * a block of TILES tiles of 8 rows, in `up` half of them of w1 and the same rows of w3. Columns are
 * cut in chunks, and what a warp needs for one chunk of a block lies together, 2176 bytes:
 *
 *     [tile][span][thread 32][16 bytes]  thread: row lane / 4 of the tile and, of each of the four
 *                                        groups of a span of 128 columns, the 8 columns from
 *                                        8 (lane % 4): four lanes of dot16
 *     [row 8][tile][span][4 codes]       scales of the four groups
 *
 * Rows and columns are padded with zeros to whole blocks and chunks; K3's need none.
 */
typedef struct {
    uint32_t rows, cols;     /* of w1, or of w2 */
    uint32_t blocks, chunks;
    uint64_t at;             /* where it lies in a slot, bytes */
} matrix;

typedef struct {
    matrix up, down;
    uint64_t bytes; /* of a slot */
} layout;

#define PIECE 2176 /* bytes of one chunk of a block */
static_assert(PIECE == TILE * TILES * CHUNK / 2 + TILE * TILES * CHUNK / 32, "nibbles and scales of a chunk");
static_assert(TILES * SPANS == 4, "a ring's stage is four loads of a warp");

static matrix matrix_place(uint32_t rows, uint32_t cols, uint32_t rows_of_block, uint64_t *at) {
    matrix m = {rows, cols, (rows + rows_of_block - 1) / rows_of_block,
                (cols + CHUNK - 1) / CHUNK, *at};
    *at += (uint64_t)m.blocks * m.chunks * PIECE;
    return m;
}

static layout layout_make(uint32_t latent, uint32_t inter) {
    layout l;
    l.bytes = 0;
    l.up = matrix_place(inter, latent, TILES / 2 * TILE, &l.bytes);
    l.down = matrix_place(latent, inter, TILES * TILE, &l.bytes);
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

/* The row of its matrix that row `row` of tile k of a block is. */
__device__ static inline uint32_t row_of(bool is_up, uint32_t block, uint32_t k, uint32_t row) {
    return (is_up ? block * (TILES / 2) + k % (TILES / 2) : block * TILES + k) * TILE + row;
}

/* One thread writes its 16 bytes of a span of a tile, and one of each quad the four codes of its row;
 * `is_high` is set where a code is above LOW_CODE.
 * Shapes  q: u8[rows][cols / 2]   s: u8[rows][cols / 32]; of w1 and w3, or of w2 twice */
__global__ static void repack(uint8_t *slot, matrix m, bool is_up, const uint8_t *q1,
                              const uint8_t *s1, const uint8_t *q3, const uint8_t *s3,
                              uint32_t *is_high) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (uint64_t)m.blocks * m.chunks * 128) return;
    uint32_t lane = i % 32, part = i / 32 % 4, k = part / SPANS, chunk = i / 128 % m.chunks;
    uint32_t row = row_of(is_up, (uint32_t)(i / 128 / m.chunks), k, lane / 4);
    const bool is_w3 = is_up && k >= TILES / 2;
    const uint8_t *q = is_w3 ? q3 : q1, *s = is_w3 ? s3 : s1;
    uint32_t w[4], codes = 0;
    for (uint32_t g = 0; g < 4; g++) {
        uint32_t group = (chunk * SPANS + part % SPANS) * 4 + g, v = 0, code = 127;
        if (row < m.rows && group < m.cols / 32) {
            memcpy(&v, q + (uint64_t)row * (m.cols / 2) + group * 16 + lane % 4 * 4, 4);
            code = s[(uint64_t)row * (m.cols / 32) + group];
        }
        w[g] = repack_word(v);
        codes |= code << 8 * g;
        if (code > LOW_CODE) *is_high = 1;
    }
    uint8_t *to = slot + m.at + i / 128 * PIECE;
    ((uint4 *)to)[part * 32 + lane] = make_uint4(w[0], w[1], w[2], w[3]);
    if (lane % 4 == 0) ((uint32_t *)(to + 2048))[lane / 4 * 4 + part] = codes;
}

/* ==== 3. The kernel ==================================================================
 *
 *     h = SiTU(w1 z, w3 z)            inner_block
 *     Q += q40(weight x (w2 h))       outer_block
 *
 * One launch does all of a request, one block of threads on each multiprocessor. Work is cut in
 * tasks, a block of rows of one expert for up to four of its vectors (a segment), first all of `up`,
 * then all of `down`; a warp begins with a task of its own and then takes the next of all. A task of
 * `down` waits until its segment's h is whole: the tasks of that were taken before it, by warps that
 * are running. That all run is what a cooperative launch asks for: the device runs the blocks together
 * or refuses, also where others have a share of it. Small tasks matter more than anything: every task
 * that is alone at the end costs what five side by side cost.
 *
 * Bytes come through a ring of each warp's own in shared memory, with cp.async past L1: weights,
 * scales and the same columns of the vectors. Only the vector of a request of one row lies in shared
 * memory whole: fetched by each warp it made every multiprocessor read the same lines of L2 at once.
 */

/* Powers of two as the compiler must not know them: a shift to the left is then a multiplication, on
 * the pipe of the products, where there is room; the one for shifts and masks is the busiest. */
typedef struct {
    uint32_t by_2, by_4, by_8, by_64, by_128;
} powers;

/* What the kernel knows of a request. */
typedef struct {
    uint32_t n_segments, n_rows;
    uint64_t number;
    uint64_t pad[6];
} head;

/* Up to ROWS pairs of one expert, which has n_siblings such segments, the first of them i_first. */
typedef struct {
    uint32_t slot, first, n, i_item, i_first, n_siblings, pad[2];
} segment;

#define ROWS 4

typedef struct {
    layout l;
    const uint8_t *slots;
    const uint32_t *is_high; /* [slots] */
    const head *h;
    const segment *segments;
    const uint32_t *row; /* [pairs] */
    const float *w;      /* [pairs] */
    const float *z;      /* [rows][up.chunks * CHUNK]    */
    float *hidden;       /* [pairs][down.chunks * CHUNK] */
    int64_t *Q;          /* [rows][latent]             */
    uint32_t *is_bad;    /* [items]                    */
    uint32_t *next;      /* tasks taken after the first of each warp */
    uint32_t *n_done;    /* [segments] blocks of `up`  */
    float beta, linear_beta;
    powers by;
} task;

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
__device__ static inline uint32_t scale_of(const powers &m, uint32_t codes, int i) {
    uint32_t code = __byte_perm(codes, 0, 0x4044 | i << 8); /* in bits 16..23 */
    if (!HIGH) return code * m.by_128 + 0x3f000000u;
    return code ? code * m.by_128 : 0x00400000u;
}

/* Eight weights of one row and group, exact: w[2p] even, w[2p + 1] odd. The scale's low half is 0 and
 * +0 is added, so that the low half of the product is +0 and the whole is the f32. */
template <bool HIGH>
__device__ static inline void weights_of(const powers &m, uint32_t v, uint32_t scale, float w[8]) {
    uint32_t t[4];
    t[0] = v & 0x81c081c0u;
    t[1] = v * m.by_8 & 0x81c081c0u;
    t[2] = (v * m.by_64 & 0x01c001c0u) | (v * m.by_4 & 0x80008000u);
    t[3] = (v >> 3 & 0x01c001c0u) | (v * m.by_2 & 0x80008000u);
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

#define STAGE_BYTES(rows) (PIECE + (rows) * CHUNK * 4)
#define RING_BYTES(rows) (N_STAGES * STAGE_BYTES(rows)) /* of a warp */

/* Ask for this thread's part of one chunk, 16 bytes at a time: weights and scales, 136 pieces; of a
 * vector 32 or 64. Addresses are those of the thread's first piece. */
__device__ static inline void load_piece(uint32_t to, const uint8_t *from, bool has_scale) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n\t"
                 "cp.async.cg.shared.global [%0 + 512], [%1 + 512], 16;\n\t"
                 "cp.async.cg.shared.global [%0 + 1024], [%1 + 1024], 16;\n\t"
                 "cp.async.cg.shared.global [%0 + 1536], [%1 + 1536], 16;"
                 :
                 : "r"(to), "l"(from)
                 : "memory");
    if (has_scale)
        asm volatile("cp.async.cg.shared.global [%0 + 2048], [%1 + 2048], 16;"
                     :
                     : "r"(to), "l"(from)
                     : "memory");
}

template <int R>
__device__ static inline void load_vectors(uint32_t to, const float *const from[R]) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int k = 0; k < SPANS; k++)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                         :
                         : "r"(to + PIECE + r * CHUNK * 4 + k * 512), "l"(from[r] + k * 128)
                         : "memory");
}

/* One chunk of a block through R vectors.
 * Shapes  p: a piece   x: f32[R][CHUNK], both in shared memory */
template <int R, bool HIGH>
__device__ static inline void dot_chunk(const powers &by, const uint8_t *p, const float *x,
                                        float acc[TILES][R][4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint4 *v = (const uint4 *)p + lane;
    const uint4 c = ((const uint4 *)(p + 2048))[lane / 4];
    const float4 *from = (const float4 *)x + lane % 4 * 2;
    const uint32_t codes[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int span = 0; span < SPANS; span++) {
        uint32_t words[TILES][4];
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            const uint4 q = v[(k * SPANS + span) * 32];
            words[k][0] = q.x, words[k][1] = q.y, words[k][2] = q.z, words[k][3] = q.w;
        }
#pragma unroll
        for (int g = 0; g < 4; g++) {
            float a[R][8];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const int at = r * (CHUNK / 4) + (span * 4 + g) * 8;
                const float4 lo = from[at], hi = from[at + 1];
                a[r][0] = lo.x, a[r][1] = lo.y, a[r][2] = lo.z, a[r][3] = lo.w;
                a[r][4] = hi.x, a[r][5] = hi.y, a[r][6] = hi.z, a[r][7] = hi.w;
            }
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                float w[8];
                weights_of<HIGH>(by, words[k][g], scale_of<HIGH>(by, codes[k * SPANS + span], g),
                                 w);
#pragma unroll
                for (int r = 0; r < R; r++)
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        acc[k][r][i / 2] = __fmaf_rn(w[i], a[r][i], acc[k][r][i / 2]);
            }
        }
    }
}

/* Wait until a segment's h is whole; nothing to wait for with n_done NULL. */
__device__ static inline void segment_wait(const uint32_t *n_done, uint32_t n) {
    if (n_done && threadIdx.x % 32 == 0) {
        uint32_t is;
        for (;;) {
            asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(is) : "l"(n_done) : "memory");
            if (is == n) break;
            __nanosleep(50);
        }
    }
    __syncwarp();
}

/* A block through R vectors: y[k][r] is this quad's row of tile k. The weights of the first chunks
 * are asked for before the vectors are waited for.
 * Shapes  p: chunks of the block   ring: N_STAGES stages of this warp
 *         x[r]: f32[chunks * CHUNK]; with WHOLE x[0] is in shared memory, all of it */
template <int R, bool HIGH, bool WHOLE>
__device__ static inline void dot_block(const powers &by, uint8_t *ring, const uint8_t *p,
                                        uint32_t chunks, const float *x[R], const uint32_t *n_done,
                                        uint32_t n, float y[TILES][R]) {
    const uint32_t lane = threadIdx.x % 32, end = N_STAGES * STAGE_BYTES(R),
                   base = (uint32_t)__cvta_generic_to_shared(ring) + lane * 16;
    const bool has_scale = lane < 8;
    const float *whole = x[0];
    float acc[TILES][R][4] = {};
    uint32_t at = 0, left = chunks; /* stage in hand; chunks not asked for yet */
    __syncwarp();
    p += lane * 16;
#pragma unroll
    for (int r = 0; r < R; r++) x[r] += lane * 4;
#pragma unroll
    for (uint32_t c = 0; c < N_STAGES - 1; c++)
        if (c < chunks) load_piece(base + c * STAGE_BYTES(R), p + c * PIECE, has_scale);
    p += (N_STAGES - 1) * PIECE;
    segment_wait(n_done, n);
#pragma unroll
    for (uint32_t c = 0; c < N_STAGES - 1; c++) {
        if (!WHOLE && c < chunks) load_vectors<R>(base + c * STAGE_BYTES(R), x);
#pragma unroll
        for (int r = 0; r < R; r++) x[r] += CHUNK;
        asm volatile("cp.async.commit_group;" : : : "memory");
    }
    left = left > N_STAGES - 1 ? left - (N_STAGES - 1) : 0;
    for (uint32_t c = 0; c < chunks; c++) {
        const uint32_t to = base + (at == 0 ? end : at) - STAGE_BYTES(R);
        asm volatile("cp.async.wait_group %0;" : : "n"(N_STAGES - 2) : "memory");
        __syncwarp();
        if (left > 0) {
            load_piece(to, p, has_scale);
            if (!WHOLE) load_vectors<R>(to, x);
            p += PIECE;
#pragma unroll
            for (int r = 0; r < R; r++) x[r] += CHUNK;
            left--;
        }
        asm volatile("cp.async.commit_group;" : : : "memory");
        dot_chunk<R, HIGH>(by, ring + at, WHOLE ? whole + c * CHUNK : (float *)(ring + at + PIECE),
                           acc);
        at = at + STAGE_BYTES(R) == end ? 0 : at + STAGE_BYTES(R);
    }
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int r = 0; r < R; r++) y[k][r] = fold(acc[k][r]);
}

/* The first chunk of a block. */
__device__ static inline const uint8_t *block_at(const task &t, const matrix &m, uint32_t slot,
                                                 uint32_t block) {
    return t.slots + slot * t.l.bytes + m.at + (uint64_t)block * m.chunks * PIECE;
}

/* h of a segment for one block of w1 and w3; its n <= R. `whole`: the one row, in shared memory. */
template <int R, bool HIGH, bool WHOLE>
__device__ static inline void inner_block(const task &t, uint8_t *ring, const segment &g,
                                          uint32_t block, const float *whole) {
    const matrix &m = t.l.up;
    const float *x[R];
    float y[TILES][R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        uint32_t pair = g.first + (r < (int)g.n ? r : g.n - 1);
        x[r] = WHOLE ? whole : t.z + (uint64_t)t.row[pair] * m.chunks * CHUNK;
    }
    dot_block<R, HIGH, WHOLE>(t.by, ring, block_at(t, m, g.slot, block), m.chunks, x, NULL, 0, y);
#pragma unroll
    for (int i = 0; i < TILES / 2 * R; i++) {
        const int k = i / R, r = i % R;
        const uint32_t row = row_of(true, block, k, threadIdx.x % 32 / 4);
        if (threadIdx.x % 4 == (uint32_t)i % 4 && r < (int)g.n && row < m.rows)
            t.hidden[(uint64_t)(g.first + r) * t.l.down.chunks * CHUNK + row] =
                k3_situ(y[k][r], y[TILES / 2 + k][r], t.beta, t.linear_beta);
    }
}

/* Add one term; false when it is not below 2^17 in size. */
__device__ static inline bool add_term(int64_t *Q, float w, float y) {
    float v = w * y;
    if (!(fabsf(v) < 0x1p17f)) return false;
    atomicAdd((unsigned long long *)Q, (unsigned long long)k3_q40(v));
    return true;
}

/* Terms of a segment for one block of w2. */
template <int R, bool HIGH>
__device__ static inline void outer_block(const task &t, uint8_t *ring, const segment &g,
                                          uint32_t block, const uint32_t *n_done) {
    const matrix &m = t.l.down;
    const float *x[R];
    float y[TILES][R];
    bool is_good = true;
#pragma unroll
    for (int r = 0; r < R; r++)
        x[r] = t.hidden + (uint64_t)(g.first + (r < (int)g.n ? r : g.n - 1)) * m.chunks * CHUNK;
    dot_block<R, HIGH, false>(t.by, ring, block_at(t, m, g.slot, block), m.chunks, x, n_done,
                              t.l.up.blocks, y);
#pragma unroll
    for (int i = 0; i < TILES * R; i++) {
        const int k = i / R, r = i % R;
        const uint32_t row = row_of(false, block, k, threadIdx.x % 32 / 4);
        if (threadIdx.x % 4 == (uint32_t)i % 4 && r < (int)g.n && row < m.rows)
            is_good = add_term(t.Q + (uint64_t)t.row[g.first + r] * m.rows + row, t.w[g.first + r],
                               y[k][r]) &&
                      is_good;
    }
    if (!is_good) t.is_bad[g.i_item] = 1;
}

/* Say that a block of a segment's h is written. */
__device__ static inline void segment_done(const task &t, uint32_t i) {
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(&t.n_done[i], 1);
}

template <int R, bool HIGH, bool WHOLE>
__device__ static inline void run_task(const task &t, uint8_t *ring, const segment &g,
                                       uint32_t block, bool is_up, const float *whole,
                                       const uint32_t *n_done) {
    if (is_up)
        inner_block<R, HIGH, WHOLE>(t, ring, g, block, whole);
    else
        outer_block<R, HIGH>(t, ring, g, block, n_done);
}

/* Task i of one matrix. The segments of an expert take one block of it after another side by side, so
 * that its weights come from VRAM once. */
__device__ static inline void task_place(const task &t, uint32_t blocks, uint32_t i,
                                         uint32_t *i_segment, uint32_t *block) {
    const segment &one = t.segments[i / blocks]; /* of the right expert, if not the right one */
    const uint32_t k = i - one.i_first * blocks;
    *i_segment = one.i_first + k % one.n_siblings;
    *block = k / one.n_siblings;
}

/* One block a multiprocessor. MOST: vectors of a segment at most. */
template <int MOST>
__global__ static void __launch_bounds__(32 * WARPS(MOST), 1) experts(const task t) {
    extern __shared__ uint4 shared[];
    const uint32_t n_warps = blockDim.x / 32;
    uint8_t *ring = (uint8_t *)shared + threadIdx.x / 32 * RING_BYTES(MOST);
    const float *whole = MOST == 1 ? (float *)((uint8_t *)shared + n_warps * RING_BYTES(1)) : NULL;
    const uint32_t n_up = t.h->n_segments * t.l.up.blocks,
                   n_tasks = n_up + t.h->n_segments * t.l.down.blocks;
    if (MOST == 1) /* the one row, for all tasks of `up` */
        for (uint32_t k = threadIdx.x; k < t.l.up.chunks * (CHUNK / 4); k += blockDim.x)
            ((float4 *)whole)[k] = ((const float4 *)t.z)[k];
    __syncthreads();
    for (uint32_t i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < n_tasks;) {
        const bool is_up = i < n_up;
        const uint32_t blocks = is_up ? t.l.up.blocks : t.l.down.blocks;
        uint32_t i_segment, block;
        task_place(t, blocks, is_up ? i : i - n_up, &i_segment, &block);
        const segment g = t.segments[i_segment];
        const uint32_t *n_done = &t.n_done[i_segment];
        if (t.is_high[g.slot])
            for (uint32_t r = 0; r < g.n; r++) {
                const segment one = {g.slot, g.first + r, 1, g.i_item, 0, 0, {0, 0}};
                run_task<1, true, MOST == 1>(t, ring, one, block, is_up, whole, n_done);
            }
        else if (MOST > 1 && g.n > 2)
            run_task<MOST, false, false>(t, ring, g, block, is_up, whole, n_done);
        else if (MOST > 1 && g.n > 1)
            run_task<2, false, false>(t, ring, g, block, is_up, whole, n_done);
        else
            run_task<1, false, MOST == 1>(t, ring, g, block, is_up, whole, n_done);
        if (is_up) segment_done(t, i_segment);
        if (threadIdx.x % 32 == 0) i = gridDim.x * n_warps + atomicAdd(t.next, 1);
        i = __shfl_sync(0xffffffffu, i, 0);
    }
}

/* ==== 4. Moving a request in and out =================================================
 *
 * A request is one block of pinned memory, and so is its answer:
 *
 *     in     head | segments | row of each pair | weight of each pair | z, rows padded
 *     out    sums | bad items | how long it took, nanoseconds | number of the request, written last
 *
 * The device reads and writes them itself (mapped memory): a kernel that copies 14 KB across the bus
 * starts sooner than a copy engine, and the host sees the number change sooner than it would hear of
 * the end of the stream.
 */
__device__ static inline uint64_t device_ns(void) {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__global__ static void stage_in(uint4 *to, const uint4 *from, uint64_t n, uint4 *clear,
                                uint64_t n_clear, uint64_t *begun) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x,
             step = (uint64_t)gridDim.x * blockDim.x;
    if (i == 0) *begun = device_ns();
    for (uint64_t k = i; k < n; k += step) to[k] = from[k];
    for (uint64_t k = i; k < n_clear; k += step) clear[k] = make_uint4(0, 0, 0, 0);
}

/* `n_done` counts blocks; the last one says that all is there, and leaves it at 0.
 * Shapes  answer: u64[2], time and number */
__global__ static void stage_out(uint4 *to, const uint4 *from, uint64_t n, const head *h,
                                 const uint64_t *begun, volatile uint64_t *answer,
                                 uint32_t *n_done) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t k = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; k < n; k += step)
        to[k] = from[k];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(n_done, 1) + 1 < gridDim.x) return;
    *n_done = 0;
    answer[0] = device_ns() - *begun;
    __threadfence_system();
    answer[1] = h->number;
}

/* ==== 5. The arm ===================================================================== */

/* Requests of one shape share a graph. */
typedef struct {
    uint32_t rows, segments, pairs;
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
    uint64_t *begun; /* when the request began, by the device's clock */
    uint32_t *n_done;
    uint32_t n_warps[2], n_shared[2]; /* of a block, for one row and for more */
    uint8_t *host_in, *host_out; /* pinned, mapped */
    volatile uint64_t *host_answer; /* [2] how long it took, its number */
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

/* Offsets in the blocks of a shape. What lies at `work` is cleared with the sums and stays on the
 * device: how much of each segment is done. */
typedef struct {
    uint64_t segments, row, w, z, in_bytes, bad, work, out_bytes;
} places;

static places places_of(const gpu *g, const shape *s) {
    places p;
    p.segments = sizeof(head);
    p.row = p.segments + s->segments * sizeof(segment);
    p.w = round_up(p.row + s->pairs * 4ull, 16);
    p.z = round_up(p.w + s->pairs * 4ull, 16);
    p.in_bytes = p.z + (uint64_t)s->rows * g->l.up.chunks * CHUNK * 4;
    p.bad = (uint64_t)s->rows * g->o.latent * 8;
    p.work = round_up(p.bad + s->segments * 4ull, 16);
    p.out_bytes = round_up(p.work + 4 + s->segments * 4ull, 16);
    return p;
}

/* The shape of the largest request. */
static shape shape_largest(const gpu_options *o) {
    shape s = {o->max_rows, o->max_items + o->max_pairs / ROWS, o->max_pairs, false, NULL};
    return s;
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
    g->info.is_shared = prop.integrated;
    if (prop.major < 8) {
        snprintf(why, n_why, "gpu: %s has compute capability %d.%d; 8.0 is the least", prop.name,
                 prop.major, prop.minor);
        return -1;
    }
    return 0;
}

static int gpu_buffers(gpu *g, char *why, size_t n_why) {
    const gpu_options *o = &g->o;
    shape largest = shape_largest(o);
    places p = places_of(g, &largest);
    uint64_t weights = (uint64_t)o->latent * o->inter, hidden = o->max_pairs * 4ull * g->l.down.chunks * CHUNK;
    g->in_bytes = p.in_bytes;
    g->out_bytes = p.out_bytes;
    g->raw_bytes = 3 * (weights / 2 + weights / 32);
    TRY(cudaMalloc(&g->in, g->in_bytes));
    TRY(cudaMalloc(&g->out, g->out_bytes));
    TRY(cudaMalloc(&g->hidden, hidden));
    TRY(cudaMemset(g->hidden, 0, hidden)); /* its padding stays 0 */
    TRY(cudaMalloc(&g->begun, sizeof *g->begun));
    TRY(cudaMalloc(&g->n_done, sizeof *g->n_done));
    TRY(cudaMemset(g->n_done, 0, sizeof *g->n_done));
    TRY(cudaMalloc(&g->raw, g->raw_bytes));
    TRY(cudaHostAlloc(&g->host_in, g->in_bytes, cudaHostAllocMapped));
    TRY(cudaHostAlloc(&g->host_out, g->out_bytes + 64, cudaHostAllocMapped));
    TRY(cudaHostAlloc(&g->host_raw, g->raw_bytes, cudaHostAllocDefault));
    g->host_answer = (volatile uint64_t *)(g->host_out + g->out_bytes);
    g->host_answer[1] = 0;
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
    if (g->info.is_shared && g->o.vram_bytes == 0) room /= 2;
    if (g->o.vram_bytes > room) {
        snprintf(why, n_why, "gpu: %llu MiB of VRAM are asked for, and %llu are free, less a margin",
                 (unsigned long long)(g->o.vram_bytes >> 20), (unsigned long long)(room >> 20));
        return -1;
    }
    if (g->o.vram_bytes > 0) room = g->o.vram_bytes;
    uint64_t n = room / (g->l.bytes + 4);
    if (n == 0) {
        snprintf(why, n_why,
                 "gpu: %llu MiB of VRAM for experts is less than one takes (%llu MiB); %llu of %llu "
                 "MiB are free: another program holds the rest",
                 (unsigned long long)(room >> 20), (unsigned long long)(g->l.bytes >> 20) + 1,
                 (unsigned long long)(n_free >> 20), (unsigned long long)(n_total >> 20));
        return -1;
    }
    g->info.slot_bytes = g->l.bytes;
    g->info.n_slots = n < g->o.max_slots ? (uint32_t)n : g->o.max_slots;
    g->info.vram_bytes = g->info.n_slots * g->l.bytes;
    TRY(cudaMalloc(&g->slots, g->info.vram_bytes));
    TRY(cudaMalloc(&g->is_high, g->info.n_slots * 4ull));
    return 0;
}

/* As many warps as the multiprocessor's shared memory has rings for. */
template <int MOST> static int gpu_warps(gpu *g, int which, uint32_t whole, char *why, size_t n_why) {
    int most = 0;
    TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, g->o.device));
    uint32_t n = (uint32_t)most > whole ? ((uint32_t)most - whole) / RING_BYTES(MOST) : 0;
    g->n_warps[which] = n < WARPS(MOST) ? n : WARPS(MOST);
    g->n_shared[which] = whole + g->n_warps[which] * RING_BYTES(MOST);
    if (n == 0) {
        snprintf(why, n_why, "gpu: latent %u is too wide for the device's shared memory",
                 g->o.latent);
        return -1;
    }
    TRY(cudaFuncSetAttribute(experts<MOST>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)g->n_shared[which]));
    return 0;
}

static int gpu_shapes(gpu *g, char *why, size_t n_why);

static int gpu_prepare(gpu *g, char *why, size_t n_why) {
    if (gpu_device(g, why, n_why) < 0 || gpu_buffers(g, why, n_why) < 0) return -1;
    if (gpu_warps<1>(g, 0, g->l.up.chunks * CHUNK * 4, why, n_why) < 0 ||
        gpu_warps<ROWS>(g, 1, 0, why, n_why) < 0)
        return -1;
    if (gpu_room(g, why, n_why) < 0 || gpu_shapes(g, why, n_why) < 0) return -1;
    TRY(cudaDeviceSynchronize()); /* what was cleared is clear before another stream looks */
    return 0;
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

/* Also after an error: then what can be freed is. On a device that hangs it may never return. */
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
    cudaFree(g->begun);
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

static unsigned blocks_of(const matrix *m) {
    return (unsigned)(((uint64_t)m->blocks * m->chunks * 128 + 255) / 256);
}

/* Until all of an upload is done; a device that hangs is not waited for for ever. */
static int upload_wait(gpu *g, char *why, size_t n_why) {
    const struct timespec pause = {0, 20000};
    uint64_t start = clock_ns();
    for (;;) {
        cudaError_t rc = cudaStreamQuery(g->upload_stream);
        if (rc != cudaErrorNotReady) return failed(rc, "an upload", why, n_why);
        if (clock_ns() - start >= WAIT_NS) break;
        nanosleep(&pause, NULL);
    }
    snprintf(why, n_why, "gpu: an upload is not done after %u s", (unsigned)(WAIT_NS / 1000000000u));
    return -1;
}

extern "C" int gpu_upload(gpu *g, uint32_t slot, const uint8_t *const p[6], char *why,
                          size_t n_why) {
    uint8_t *to = g->slots + (uint64_t)slot * g->l.bytes;
    uint64_t at = 0, n_q = (uint64_t)g->o.latent * g->o.inter / 2, n_s = n_q / 16;
    TRY(cudaSetDevice(g->o.device));
    for (int k = 0; k < 6; k++) {
        memcpy(g->host_raw + at, p[k], k % 2 ? n_s : n_q);
        at += k % 2 ? n_s : n_q;
    }
    TRY(cudaMemcpyAsync(g->raw, g->host_raw, at, cudaMemcpyHostToDevice, g->upload_stream));
    TRY(cudaMemsetAsync(&g->is_high[slot], 0, 4, g->upload_stream));
    const uint8_t *w1 = g->raw, *w3 = w1 + n_q + n_s, *w2 = w3 + n_q + n_s;
    repack<<<blocks_of(&g->l.up), 256, 0, g->upload_stream>>>(to, g->l.up, true, w1, w1 + n_q, w3,
                                                              w3 + n_q, &g->is_high[slot]);
    TRY(cudaGetLastError());
    repack<<<blocks_of(&g->l.down), 256, 0, g->upload_stream>>>(
        to, g->l.down, false, w2, w2 + n_q, w2, w2 + n_q, &g->is_high[slot]);
    TRY(cudaGetLastError());
    return upload_wait(g, why, n_why);
}

static unsigned blocks_for(uint64_t n_tasks, uint32_t n_sm) {
    uint64_t n = (n_tasks + 255) / 256;
    return (unsigned)(n < 1 ? 1 : n < n_sm ? n : n_sm);
}

/* Note the time in timed graphs. */
static int gpu_mark(gpu *g, const shape *s, int i, char *why, size_t n_why) {
    if (s->is_timed)
        TRY(cudaEventRecordWithFlags(g->event[i], g->stream, cudaEventRecordExternal));
    return 0;
}

/* The launches of one shape, into the stream. */
static int gpu_launch(gpu *g, const shape *s, char *why, size_t n_why) {
    places p = places_of(g, s);
    task t = {g->l,
              g->slots,
              g->is_high,
              (const head *)g->in,
              (const segment *)(g->in + p.segments),
              (const uint32_t *)(g->in + p.row),
              (const float *)(g->in + p.w),
              (const float *)(g->in + p.z),
              g->hidden,
              (int64_t *)g->out,
              (uint32_t *)(g->out + p.bad),
              (uint32_t *)(g->out + p.work),
              (uint32_t *)(g->out + p.work) + 1,
              g->o.beta,
              g->o.linear_beta,
              {2, 4, 8, 64, 128}};
    uint64_t n_in = p.in_bytes / 16, n_clear = p.out_bytes / 16, n_out = p.work / 16;
    bool is_one = s->rows == 1;
    if (gpu_mark(g, s, EV_BEGIN, why, n_why) < 0) return -1;
    stage_in<<<blocks_for(n_in > n_clear ? n_in : n_clear, g->info.n_sm), 256, 0, g->stream>>>(
        (uint4 *)g->in, (const uint4 *)g->host_in, n_in, (uint4 *)g->out, n_clear, g->begun);
    TRY(cudaGetLastError());
    if (gpu_mark(g, s, EV_IN, why, n_why) < 0) return -1;
    cudaLaunchAttribute together = {};
    cudaLaunchConfig_t c = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    c.gridDim = dim3(g->info.n_sm);
    c.blockDim = dim3(32 * g->n_warps[!is_one]);
    c.dynamicSmemBytes = g->n_shared[!is_one];
    c.stream = g->stream;
    c.attrs = &together;
    c.numAttrs = 1;
    TRY(is_one ? cudaLaunchKernelEx(&c, experts<1>, t) : cudaLaunchKernelEx(&c, experts<ROWS>, t));
    if (gpu_mark(g, s, EV_KERNELS, why, n_why) < 0) return -1;
    stage_out<<<blocks_for(n_out, g->info.n_sm), 256, 0, g->stream>>>(
        (uint4 *)g->host_out, (const uint4 *)g->out, n_out, (const head *)g->in, g->begun,
        g->host_answer, g->n_done);
    TRY(cudaGetLastError());
    return gpu_mark(g, s, EV_OUT, why, n_why);
}

/* Make the graph of a shape. */
static int shape_make(gpu *g, shape s, char *why, size_t n_why) {
    if (g->n_shapes == GPU_MAX_SHAPES) {
        snprintf(why, n_why, "gpu: more shapes of requests than there can be");
        return -1;
    }
    cudaGraph_t graph = NULL;
    TRY(cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal));
    int rc = gpu_launch(g, &s, why, n_why);
    cudaError_t end = cudaStreamEndCapture(g->stream, &graph);
    if (rc == 0) rc = failed(end, "cudaStreamEndCapture", why, n_why);
    if (rc == 0)
        rc = failed(cudaGraphInstantiate(&s.exec, graph, 0), "cudaGraphInstantiate", why, n_why);
    cudaError_t gone = graph ? cudaGraphDestroy(graph) : cudaSuccess;
    if (rc == 0) rc = failed(gone, "cudaGraphDestroy", why, n_why);
    if (rc == 0) rc = failed(cudaGraphUpload(s.exec, g->stream), "cudaGraphUpload", why, n_why);
    if (rc == 0) g->shapes[g->n_shapes++] = s;
    return rc;
}

/* The shape that a request fits in; powers of two, so that there are few. */
static shape shape_for(const gpu *g, uint32_t n_rows, uint32_t n_segments) {
    shape most = shape_largest(&g->o), s = {0, 0, 0, g->is_timed, NULL};
    s.rows = power_of_two(n_rows, most.rows);
    s.segments = power_of_two(n_segments, most.segments);
    s.pairs = s.rows * (most.pairs / most.rows);
    return s;
}

static const shape *shape_find(const gpu *g, const shape *s) {
    for (uint32_t i = 0; i < g->n_shapes; i++) {
        const shape *x = &g->shapes[i];
        if (x->rows == s->rows && x->segments == s->segments && x->is_timed == s->is_timed) return x;
    }
    return NULL;
}

/* Every shape that a request may have: no more segments than pairs. */
static int gpu_shapes(gpu *g, char *why, size_t n_why) {
    const uint32_t most = shape_largest(&g->o).segments;
    for (uint32_t rows = 1; rows < 2 * g->o.max_rows; rows *= 2)
        for (uint32_t segments = 1; segments < 2 * most; segments *= 2) {
            shape s = shape_for(g, rows, segments);
            if (!shape_find(g, &s) && shape_make(g, s, why, n_why) < 0) return -1;
            if (segments >= s.pairs) break;
        }
    return 0;
}

/* The graph of a request. Those that are timed are made when the shape is first seen. */
static int gpu_shape(gpu *g, uint32_t n_rows, uint32_t n_segments, char *why, size_t n_why) {
    shape s = shape_for(g, n_rows, n_segments);
    g->now = shape_find(g, &s);
    if (g->now) return 0;
    if (shape_make(g, s, why, n_why) < 0) return -1;
    g->now = &g->shapes[g->n_shapes - 1];
    return 0;
}

/* Cut the pairs of each item in segments; returns how many. */
static uint32_t cut_items(segment *to, const gpu_item *items, uint32_t n_items) {
    uint32_t n = 0;
    for (uint32_t x = 0; x < n_items; x++) {
        const uint32_t i_first = n, n_siblings = (items[x].n + ROWS - 1) / ROWS;
        for (uint32_t at = 0; at < items[x].n; at += ROWS, n++) {
            uint32_t left = items[x].n - at;
            segment g = {items[x].slot, items[x].first + at, left < ROWS ? left : ROWS, x,
                         i_first,       n_siblings,          {0, 0}};
            if (to) to[n] = g;
        }
    }
    return n;
}

extern "C" int gpu_begin(gpu *g, const float *z, uint32_t n_rows, const gpu_item *items,
                         uint32_t n_items, const uint32_t *row, const float *w, uint32_t n_pairs,
                         char *why, size_t n_why) {
    uint32_t n_segments = cut_items(NULL, items, n_items);
    uint64_t stride = (uint64_t)g->l.up.chunks * CHUNK;
    TRY(cudaSetDevice(g->o.device));
    if (gpu_shape(g, n_rows, n_segments, why, n_why) < 0) return -1;
    places p = places_of(g, g->now);
    head h = {n_segments, n_rows, ++g->number, {0}};
    g->n_rows = n_rows;
    g->n_items = n_items;
    memcpy(g->host_in, &h, sizeof h);
    cut_items((segment *)(g->host_in + p.segments), items, n_items);
    memcpy(g->host_in + p.row, row, n_pairs * sizeof *row);
    memcpy(g->host_in + p.w, w, n_pairs * sizeof *w);
    for (uint32_t r = 0; r < n_rows; r++) {
        float *to = (float *)(g->host_in + p.z) + r * stride;
        memcpy(to, z + (uint64_t)r * g->o.latent, g->o.latent * 4ull);
        memset(to + g->o.latent, 0, (stride - g->o.latent) * 4);
    }
    TRY(cudaGraphLaunch(g->now->exec, g->stream));
    return 0;
}

/* Until the device has written the number; the stream is asked now and then whether it lives. */
static int gpu_wait(gpu *g, char *why, size_t n_why) {
    uint64_t start = clock_ns();
    for (uint32_t i = 1; g->host_answer[1] != g->number; i++) {
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

extern "C" int gpu_end(gpu *g, int64_t *Q, uint8_t *is_bad, uint64_t *took_ns, char *why,
                       size_t n_why) {
    if (gpu_wait(g, why, n_why) < 0) return -1;
    if (took_ns) *took_ns = g->host_answer[0];
    places p = places_of(g, g->now);
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

/* Past L1. */
__device__ static inline uint4 load_past(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__global__ static void read_all(const uint4 *p, uint64_t n, uint32_t *sum) {
    uint32_t v = 0;
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
#pragma unroll 8
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint4 x = load_past(p + i);
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
