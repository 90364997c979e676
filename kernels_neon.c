/* kernels_neon.c - the kernel table for AArch64 (baseline ARMv8-A: Advanced SIMD).
 *
 * Same bits as the reference kernels of k3.c, other order of work. The 16 lanes of dot16
 * are four q registers; a lane never meets another before the fold, which gives two shapes:
 *
 *   batch 1   four rows x 16 lanes in 16 accumulators, weights decoded in registers.
 *             Bound by memory, so every loop prefetches.
 *   batch > 1 six rows x 512 columns are decoded once to a panel on the stack and used
 *             by up to 32 vectors, in tiles of 6 rows x 4 vectors x *one* quarter of the
 *             lanes: 24 accumulators, 10 loads for 24 fused multiply-adds. The sums rest
 *             in memory between panels.
 *
 * Fused multiply-add only where kernels.h says fma; vmulq and vaddq elsewhere.
 */
#define K3_KERNELS_ELEMENTWISE
#include "k3_common.h"
#include "kernels.h"

#if !defined(__aarch64__) || !defined(__ARM_NEON)
#error "kernels_neon.c is for AArch64 (32-bit NEON flushes subnormals)"
#endif
#ifdef __AARCH64EB__
#error "kernels_neon.c needs little-endian AArch64"
#endif

#include <arm_neon.h>

/* Small loops over registers must unroll at every -O level, or the arrays stay in memory. */
#ifdef __clang__
#define UNROLL    _Pragma("unroll")
#define UNROLL_24 _Pragma("unroll")
#else
#define UNROLL    _Pragma("GCC unroll 8")
#define UNROLL_24 _Pragma("GCC unroll 24")
#endif
#define FLATTEN static inline __attribute__((always_inline))

/* Prefetch, which is only a hint: the address may lie past the end of the array. */
FLATTEN void prefetch(const void *p, size_t ahead_bytes) {
    __builtin_prefetch((const void *)((uintptr_t)p + ahead_bytes));
}

/* Loads before and after this stay apart: compilers otherwise hoist more of x and w into
 * registers than there are, and spill sums. */
FLATTEN void forget_loads(void) { __asm__ volatile("" ::: "memory"); }

/* ---- dot16 in four q registers ---------------------------------------------------- */

/* The 32 weights of one group: lanes 4j .. 4j+3 in [j]. */
typedef struct {
    float32x4_t even[4], odd[4];
} group;

/* acc += group . x, evens, then odds. x: f32[32] packed. */
FLATTEN void group_fma(float32x4_t acc[4], const group *w, const float *x) {
    UNROLL for (int j = 0; j < 4; j++)
        acc[j] = vfmaq_f32(acc[j], w->even[j], vld1q_f32(x + 4 * j));
    UNROLL for (int j = 0; j < 4; j++)
        acc[j] = vfmaq_f32(acc[j], w->odd[j], vld1q_f32(x + 16 + 4 * j));
}

/* Steps 8, 4, 2, 1 of the fold, then + (+0). */
FLATTEN float fold(const float32x4_t acc[4]) {
    float32x4_t s4 = vaddq_f32(vaddq_f32(acc[0], acc[2]), vaddq_f32(acc[1], acc[3]));
    float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return (vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1)) + 0.0f;
}

/* ---- Decoding one group ------------------------------------------------------------ */

/* 32 bf16: a word holds an even element in its low half and an odd one in its high half. */
FLATTEN group bf16_group(const uint16_t *w) {
    group g;
    UNROLL for (int j = 0; j < 4; j++) {
        uint32x4_t word = vreinterpretq_u32_u16(vld1q_u16(w + 8 * j));
        g.even[j] = vreinterpretq_f32_u32(vshlq_n_u32(word, 16));
        g.odd[j] = vreinterpretq_f32_u32(vandq_u32(word, vdupq_n_u32(0xffff0000u)));
    }
    return g;
}

/* The last n < 32 bf16 of a row, padded with +0. */
FLATTEN group bf16_group_tail(const uint16_t *w, size_t n) {
    uint16_t padded[K3_GROUP] = {0};
    memcpy(padded, w, n * sizeof *w);
    return bf16_group(padded);
}

FLATTEN group f32_group(const float *w) {
    group g;
    UNROLL for (int j = 0; j < 4; j++) {
        g.even[j] = vld1q_f32(w + 4 * j);
        g.odd[j] = vld1q_f32(w + 16 + 4 * j);
    }
    return g;
}

/* All 16 values E2M1 * 2^(code - 127) of a scale code are exact bf16 numbers, subnormals
 * included, so a group needs no multiplication: two byte look-ups give the low and the
 * high byte of each weight. 8 KiB, of which a real row touches a few hundred bytes.
 *
 *   magnitude   0   0.5   1    1.5   2    3    4    6
 *   exponent    -   -1    0    0     1    1    2    2    (added to the code)
 *   half bit    -    0    0    1     0    1    0    1
 *
 * A biased exponent of 0 or -1 is the subnormal 2^-127 * 1.half or 2^-128. */
typedef struct {
    uint8_t low[16], high[16];
} code_table;

#define BF16_OF(e, half)                                     \
    ((e) > 0 ? ((unsigned)((e) & 511) << 7 | (half) << 6)    \
             : ((0x80u | (half) << 6) >> ((1 - (e)) & 3)))
#define LOW(e, half)        (uint8_t)(BF16_OF(e, half) & 255)
#define HIGH(e, half, sign) (uint8_t)(BF16_OF(e, half) >> 8 | (sign))
#define LOW8(c)                                                                       \
    0, LOW((c)-1, 0), LOW(c, 0), LOW(c, 1), LOW((c) + 1, 0), LOW((c) + 1, 1),         \
        LOW((c) + 2, 0), LOW((c) + 2, 1)
#define HIGH8(c, s)                                                                   \
    s, HIGH((c)-1, 0, s), HIGH(c, 0, s), HIGH(c, 1, s), HIGH((c) + 1, 0, s),          \
        HIGH((c) + 1, 1, s), HIGH((c) + 2, 0, s), HIGH((c) + 2, 1, s)
#define CODE(c)   {{LOW8(c), LOW8(c)}, {HIGH8(c, 0), HIGH8(c, 128)}}
#define CODE4(c)  CODE(c), CODE((c) + 1), CODE((c) + 2), CODE((c) + 3)
#define CODE16(c) CODE4(c), CODE4((c) + 4), CODE4((c) + 8), CODE4((c) + 12)
#define CODE64(c) CODE16(c), CODE16((c) + 16), CODE16((c) + 32), CODE16((c) + 48)

static const code_table code_tables[256] __attribute__((aligned(64))) = {
    CODE64(0), CODE64(64), CODE64(128), CODE64(192), /* beyond K3_SCALE_MAX: never read */
};

/* 16 low and 16 high bytes of bf16 to 16 f32, in order. */
FLATTEN void bytes_f32(float32x4_t f[4], uint8x16_t low, uint8x16_t high) {
    uint16x8_t zero = vdupq_n_u16(0);
    uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    uint16x8_t b = vreinterpretq_u16_u8(vzip2q_u8(low, high));
    f[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, a));
    f[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, a));
    f[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, b));
    f[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, b));
}

/* 16 bytes of nibbles: low nibbles are the evens, high nibbles the odds. */
FLATTEN group mxfp4_group(const uint8_t *q, uint8_t code) {
    group g;
    uint8x16_t raw = vld1q_u8(q);
    uint8x16_t low_table = vld1q_u8(code_tables[code].low);
    uint8x16_t high_table = vld1q_u8(code_tables[code].high);
    uint8x16_t even = vandq_u8(raw, vdupq_n_u8(15)), odd = vshrq_n_u8(raw, 4);
    bytes_f32(g.even, vqtbl1q_u8(low_table, even), vqtbl1q_u8(high_table, even));
    bytes_f32(g.odd, vqtbl1q_u8(low_table, odd), vqtbl1q_u8(high_table, odd));
    return g;
}

/* ---- Batch 1: four rows at a time ---------------------------------------------------
 *
 * With fewer than four rows left, the last one is computed again and not stored. */
#define ROWS 4

/* The row to compute as the i-th of a block in which `left` rows are left: past the end, the last
 * one again. */
FLATTEN size_t row_of(size_t i, size_t left) { return i < left ? i : left - 1; }

FLATTEN void store_rows(float *y, float32x4_t acc[ROWS][4], size_t left) {
    float all[ROWS];
    UNROLL for (int i = 0; i < ROWS; i++) all[i] = fold(acc[i]);
    for (size_t i = 0; i < left; i++) y[i] = all[i];
}

/* Each of the four rows is prefetched 2 KiB ahead; near the end of a row that is in the next four
 * rows. */
#define BF16_AHEAD 32 /* groups of 64 bytes */

static void bf16_vector(float *y, const uint16_t *w, size_t ldw, size_t n_rows, size_t n,
                        const float *x) {
    size_t n_full = n / K3_GROUP;
    for (size_t r = 0; r < n_rows; r += ROWS, w += ROWS * ldw) {
        size_t left = n_rows - r < ROWS ? n_rows - r : ROWS;
        const uint16_t *row[ROWS];
        float32x4_t acc[ROWS][4];
        UNROLL for (size_t i = 0; i < ROWS; i++) {
            row[i] = w + row_of(i, left) * ldw;
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = vdupq_n_f32(0);
        }
        for (size_t g = 0; g < n_full; g++) {
            size_t ahead = g + BF16_AHEAD < n_full ? BF16_AHEAD * K3_GROUP
                                                   : ROWS * ldw + BF16_AHEAD * K3_GROUP - n;
            UNROLL for (size_t i = 0; i < ROWS; i++) {
                group wg = bf16_group(row[i] + g * K3_GROUP);
                prefetch(row[i] + g * K3_GROUP, ahead * sizeof **row);
                group_fma(acc[i], &wg, x + g * K3_GROUP);
                forget_loads();
            }
        }
        if (n_full * K3_GROUP < n) {
            UNROLL for (size_t i = 0; i < ROWS; i++) {
                group wg = bf16_group_tail(row[i] + n_full * K3_GROUP, n % K3_GROUP);
                group_fma(acc[i], &wg, x + n_full * K3_GROUP);
            }
        }
        store_rows(y + r, acc, left);
    }
}

static void f32_vector(float *y, const float *w, size_t n_rows, size_t npad, const float *x) {
    for (size_t r = 0; r < n_rows; r += ROWS, w += ROWS * npad) {
        size_t left = n_rows - r < ROWS ? n_rows - r : ROWS;
        const float *row[ROWS];
        float32x4_t acc[ROWS][4];
        UNROLL for (size_t i = 0; i < ROWS; i++) {
            row[i] = w + row_of(i, left) * npad;
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = vdupq_n_f32(0);
        }
        for (size_t k = 0; k < npad; k += K3_GROUP) {
            UNROLL for (size_t i = 0; i < ROWS; i++) {
                group wg = f32_group(row[i] + k);
                prefetch(row[i] + k, 2048);
                prefetch(row[i] + k, 2048 + 64);
                group_fma(acc[i], &wg, x + k);
                forget_loads();
            }
        }
        store_rows(y + r, acc, left);
    }
}

/* A group's nibbles in four rows are 64 bytes, so one prefetch for each group walks linearly
 * through the matrix: two or three blocks of rows ahead at the widths of an expert. */
#define MXFP4_AHEAD 12288

static void mxfp4_vector(float *y, const uint8_t *q, const uint8_t *s, size_t n_rows, size_t n,
                         const float *x) {
    size_t n_group = n / K3_GROUP, q_row = n / 2;
    for (size_t r = 0; r < n_rows; r += ROWS, q += ROWS * q_row, s += ROWS * n_group) {
        size_t left = n_rows - r < ROWS ? n_rows - r : ROWS;
        const uint8_t *row[ROWS], *scale[ROWS];
        float32x4_t acc[ROWS][4];
        UNROLL for (size_t i = 0; i < ROWS; i++) {
            row[i] = q + row_of(i, left) * q_row;
            scale[i] = s + row_of(i, left) * n_group;
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = vdupq_n_f32(0);
        }
        for (size_t g = 0; g < n_group; g++) {
            prefetch(q + g * 64, MXFP4_AHEAD);
            if (g % 16 == 0) prefetch(s + g * ROWS, MXFP4_AHEAD / 16);
            UNROLL for (size_t i = 0; i < ROWS; i++) {
                group wg = mxfp4_group(row[i] + g * 16, scale[i][g]);
                group_fma(acc[i], &wg, x + g * K3_GROUP);
                forget_loads();
            }
        }
        store_rows(y + r, acc, left);
    }
}

/* ---- Batch > 1: a decoded panel, tiles of 6 rows x 4 vectors x 4 lanes ---------------
 *
 * L1 holds the panel (12 KiB), the sums of 32 vectors (12 KiB) and one tile of x (8 KiB).
 */
#define TILE_ROWS    6
#define TILE_VECS    4
#define PANEL_GROUPS 16 /* 512 columns */
#define CHUNK_VECS   32
STATIC_ASSERT(chunk_is_whole_blocks, CHUNK_VECS % K3_XBLOCK == 0);
STATIC_ASSERT(use_panel_has_every_tile, TILE_VECS == 4 && K3_KERNEL_ROWS % TILE_ROWS == 0);
STATIC_ASSERT(group_is_two_halves_of_dot16, K3_GROUP == 2 * 16);

/* Indexed by quarter of the lanes first: a tile reads one quarter from its beginning to its end. */
typedef float panel[4][PANEL_GROUPS][2][TILE_ROWS][4];
typedef float sums[CHUNK_VECS][TILE_ROWS][16];

/* A weight matrix of any kind, for the decoders: row r starts at w + r * stride. */
typedef struct {
    const uint16_t *bf16;
    const float *f32;
    const uint8_t *mxfp4, *scale;
    size_t stride, n;
} matrix;

/* Decode group `g` of row `r`. */
typedef group (*decode_group)(const matrix *m, size_t r, size_t g);

FLATTEN group decode_bf16(const matrix *m, size_t r, size_t g) {
    const uint16_t *w = m->bf16 + r * m->stride + g * K3_GROUP;
    size_t left = m->n - g * K3_GROUP;
    return left < K3_GROUP ? bf16_group_tail(w, left) : bf16_group(w);
}

FLATTEN group decode_f32(const matrix *m, size_t r, size_t g) {
    return f32_group(m->f32 + r * m->stride + g * K3_GROUP);
}

FLATTEN group decode_mxfp4(const matrix *m, size_t r, size_t g) {
    return mxfp4_group(m->mxfp4 + r * m->stride + g * 16,
                       m->scale[r * (m->n / K3_GROUP) + g]);
}

/* Decode rows r .. r + left - 1, groups g0 .. g0 + n_group - 1; the panel's rows beyond repeat the
 * last. */
FLATTEN void fill_panel(panel p, const matrix *m, size_t r, size_t left, size_t g0,
                        size_t n_group, const decode_group decode) {
    for (size_t i = 0; i < TILE_ROWS; i++)
        for (size_t g = 0; g < n_group; g++) {
            group w = decode(m, r + row_of(i, left), g0 + g);
            UNROLL for (int j = 0; j < 4; j++) {
                vst1q_f32(p[j][g][0][i], w.even[j]);
                vst1q_f32(p[j][g][1][i], w.odd[j]);
            }
        }
}

/* tile_1 .. tile_4: one quarter of the lanes of that many vectors, sum += panel . x over
 * n_group groups. The 24 sums, 4 x and 6 w are spelled out as variables a<vector><row>,
 * x<vector>, w<row>: arrays of them do not reach registers with every compiler.
 *
 * Shapes  sum: first vector, at the quarter's lanes   w: panel[j]
 *         x: first vector, first group, at the quarter's lanes; the next vector is 32
 *         floats on, the next group x_step floats */
#define EACH_ROW(M, v)  M(0, v) M(1, v) M(2, v) M(3, v) M(4, v) M(5, v)
#define EACH_SUM_1(M)   EACH_ROW(M, 0)
#define EACH_SUM_2(M)   EACH_SUM_1(M) EACH_ROW(M, 1)
#define EACH_SUM_3(M)   EACH_SUM_2(M) EACH_ROW(M, 2)
#define EACH_SUM_4(M)   EACH_SUM_3(M) EACH_ROW(M, 3)
#define LOAD_X_1        float32x4_t x0 = vld1q_f32(x);
#define LOAD_X_2        LOAD_X_1 float32x4_t x1 = vld1q_f32(x + 32);
#define LOAD_X_3        LOAD_X_2 float32x4_t x2 = vld1q_f32(x + 64);
#define LOAD_X_4        LOAD_X_3 float32x4_t x3 = vld1q_f32(x + 96);
#define LOAD_W(i)       float32x4_t w##i = vld1q_f32(w + 4 * (i));
#define LOAD_SUM(i, v)  float32x4_t a##v##i = vld1q_f32(sum[v][i]);
#define ADD_TO(i, v)    a##v##i = vfmaq_f32(a##v##i, w##i, x##v);
#define ADD_ROW_1(i)    LOAD_W(i) ADD_TO(i, 0)
#define ADD_ROW_2(i)    ADD_ROW_1(i) ADD_TO(i, 1)
#define ADD_ROW_3(i)    ADD_ROW_2(i) ADD_TO(i, 2)
#define ADD_ROW_4(i)    ADD_ROW_3(i) ADD_TO(i, 3)
#define STORE_SUM(i, v) vst1q_f32(sum[v][i], a##v##i);

#define DEFINE_TILE(n)                                                                       \
    FLATTEN void tile_##n(float(*sum)[TILE_ROWS][16], const float *w, const float *x,         \
                          size_t x_step, size_t n_group) {                                    \
        EACH_SUM_##n(LOAD_SUM)                                                               \
        for (size_t half = 0; half < 2 * n_group; half++, w += TILE_ROWS * 4) {               \
            LOAD_X_##n ADD_ROW_##n(0) ADD_ROW_##n(1) ADD_ROW_##n(2) forget_loads();           \
            ADD_ROW_##n(3) ADD_ROW_##n(4) ADD_ROW_##n(5)                                      \
            x += half & 1 ? x_step - 16 : 16; /* odds of this group, evens of the next */     \
        }                                                                                    \
        EACH_SUM_##n(STORE_SUM)                                                              \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)

/* Multiply the panel, whose first group is g0, into vectors t0 .. t0 + n_vec - 1. */
__attribute__((noinline)) static void use_panel(sums sum, panel p, const float *xp, size_t npad,
                                                size_t batch, size_t t0, size_t n_vec, size_t g0,
                                                size_t n_group) {
    for (size_t t = 0, step; t < n_vec; t += step) {
        size_t block = (t0 + t) / K3_XBLOCK * K3_XBLOCK;
        size_t in_block = batch - block < K3_XBLOCK ? batch - block : K3_XBLOCK;
        size_t left = block + in_block - (t0 + t);
        step = left < TILE_VECS ? left : TILE_VECS;
        const float *x = xp + k3_xp_group(npad, batch, t0 + t, g0);
        for (size_t j = 0; j < 4; j++) {
            float(*s)[TILE_ROWS][16] = (float(*)[TILE_ROWS][16]) & sum[t][0][4 * j];
            const float *w = p[j][0][0][0], *xj = x + 4 * j;
            switch (step) {
            case 4: tile_4(s, w, xj, in_block * K3_GROUP, n_group); break;
            case 3: tile_3(s, w, xj, in_block * K3_GROUP, n_group); break;
            case 2: tile_2(s, w, xj, in_block * K3_GROUP, n_group); break;
            default: tile_1(s, w, xj, in_block * K3_GROUP, n_group); break;
            }
        }
    }
}

FLATTEN void matmul_batch(float *y, size_t ldy, const matrix *m, size_t n_rows, const float *xp,
                          size_t batch, const decode_group decode) {
    panel p;
    sums sum;
    size_t npad = k3_pad(m->n), all = npad / K3_GROUP;
    for (size_t r = 0; r < n_rows; r += TILE_ROWS) {
        size_t left = n_rows - r < TILE_ROWS ? n_rows - r : TILE_ROWS;
        for (size_t t = 0; t < batch; t += CHUNK_VECS) {
            size_t n_vec = batch - t < CHUNK_VECS ? batch - t : CHUNK_VECS;
            memset(sum, 0, n_vec * sizeof sum[0]);
            for (size_t g = 0; g < all; g += PANEL_GROUPS) {
                size_t n_group = all - g < PANEL_GROUPS ? all - g : PANEL_GROUPS;
                fill_panel(p, m, r, left, g, n_group, decode);
                use_panel(sum, p, xp, npad, batch, t, n_vec, g, n_group);
            }
            for (size_t v = 0; v < n_vec; v++)
                for (size_t i = 0; i < left; i++) {
                    float32x4_t acc[4];
                    UNROLL for (int j = 0; j < 4; j++) acc[j] = vld1q_f32(sum[v][i] + 4 * j);
                    y[(t + v) * ldy + r + i] = fold(acc);
                }
        }
    }
}

static void neon_matmul_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                             size_t n, const float *xp, size_t batch) {
    matrix m = {.bf16 = w, .stride = ldw, .n = n};
    if (batch == 1)
        bf16_vector(y, w, ldw, n_rows, n, xp);
    else
        matmul_batch(y, ldy, &m, n_rows, xp, batch, decode_bf16);
}

static void neon_matmul_f32(float *y, size_t ldy, const float *w, size_t n_rows, size_t n,
                            const float *xp, size_t batch) {
    matrix m = {.f32 = w, .stride = k3_pad(n), .n = n};
    if (batch == 1)
        f32_vector(y, w, n_rows, k3_pad(n), xp);
    else
        matmul_batch(y, ldy, &m, n_rows, xp, batch, decode_f32);
}

static void neon_matmul_mxfp4(float *y, size_t ldy, const uint8_t *q, const uint8_t *s,
                              size_t n_rows, size_t n, const float *xp, size_t batch) {
    matrix m = {.mxfp4 = q, .scale = s, .stride = n / 2, .n = n};
    if (batch == 1)
        mxfp4_vector(y, q, s, n_rows, n, xp);
    else
        matmul_batch(y, ldy, &m, n_rows, xp, batch, decode_mxfp4);
}

/* dot16 of two plain vectors: vld2q splits evens from odds. */
static float neon_dot(const float *a, const float *b, size_t n) {
    float32x4_t acc[4];
    UNROLL for (int j = 0; j < 4; j++) acc[j] = vdupq_n_f32(0);
    size_t n_full = n / K3_GROUP * K3_GROUP;
    float a_end[K3_GROUP] = {0}, b_end[K3_GROUP] = {0};
    if (n_full < n) {
        memcpy(a_end, a + n_full, (n - n_full) * sizeof *a);
        memcpy(b_end, b + n_full, (n - n_full) * sizeof *b);
    }
    for (size_t i = 0; i < n; i += K3_GROUP) {
        const float *pa = i < n_full ? a + i : a_end, *pb = i < n_full ? b + i : b_end;
        UNROLL for (int j = 0; j < 4; j++) {
            float32x4x2_t wa = vld2q_f32(pa + 8 * j), wb = vld2q_f32(pb + 8 * j);
            acc[j] = vfmaq_f32(acc[j], wa.val[0], wb.val[0]);
            acc[j] = vfmaq_f32(acc[j], wa.val[1], wb.val[1]);
        }
    }
    return fold(acc);
}

/* ---- Chains: vectors over j, one accumulator per output ------------------------------ */

typedef struct {
    const uint16_t *bf16; /* one of the two is set */
    const float *f32;
    size_t ldw, n_i, ldc, ldy;
} chain;

/* Four weights of row i, columns j .. j+3. */
FLATTEN float32x4_t chain_weights(const chain *ch, size_t i, size_t j, const bool is_bf16) {
    size_t at = i * ch->ldw + j;
    if (is_bf16) return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(ch->bf16 + at), 16));
    return vld1q_f32(ch->f32 + at);
}

/* 4 * n_q columns of one vector, at column j; n_q <= 8. */
FLATTEN void chain_tile_1(float *y, const chain *ch, const float *c, size_t j, const int n_q,
                          const bool is_bf16) {
    float32x4_t acc[8];
    UNROLL for (int k = 0; k < n_q; k++) acc[k] = vdupq_n_f32(0);
    for (size_t i = 0; i < ch->n_i; i++) {
        float32x4_t ci = vdupq_n_f32(c[i]);
        UNROLL for (int k = 0; k < n_q; k++)
            acc[k] = vfmaq_f32(acc[k], chain_weights(ch, i, j + 4 * (size_t)k, is_bf16), ci);
    }
    UNROLL for (int k = 0; k < n_q; k++) vst1q_f32(y + j + 4 * k, acc[k]);
}

/* 16 columns of four vectors, at column j. Spelled out for the reason given at tile_1:
 * s<vector><k> is the sum of columns j + 4k .. j + 4k + 3. */
#define EACH_K(M)      M(0) M(1) M(2) M(3)
#define CHAIN_ZERO(k)  float32x4_t s0##k = zero, s1##k = zero, s2##k = zero, s3##k = zero;
#define CHAIN_ADD(k)                                                                 \
    float32x4_t w##k = chain_weights(ch, i, j + 4 * k, is_bf16);                     \
    s0##k = vfmaq_f32(s0##k, w##k, c0), s1##k = vfmaq_f32(s1##k, w##k, c1);          \
    s2##k = vfmaq_f32(s2##k, w##k, c2), s3##k = vfmaq_f32(s3##k, w##k, c3);
#define CHAIN_STORE(k)                                                               \
    vst1q_f32(y + j + 4 * k, s0##k), vst1q_f32(y + ch->ldy + j + 4 * k, s1##k);      \
    vst1q_f32(y + 2 * ch->ldy + j + 4 * k, s2##k);                                   \
    vst1q_f32(y + 3 * ch->ldy + j + 4 * k, s3##k);

FLATTEN void chain_tile_4(float *y, const chain *ch, const float *c, size_t j,
                          const bool is_bf16) {
    float32x4_t zero = vdupq_n_f32(0);
    EACH_K(CHAIN_ZERO)
    for (size_t i = 0; i < ch->n_i; i++) {
        float32x4_t c0 = vdupq_n_f32(c[i]), c1 = vdupq_n_f32(c[i + ch->ldc]);
        float32x4_t c2 = vdupq_n_f32(c[i + 2 * ch->ldc]), c3 = vdupq_n_f32(c[i + 3 * ch->ldc]);
        EACH_K(CHAIN_ADD)
    }
    EACH_K(CHAIN_STORE)
}

/* One output element, in the order of NUMERICS 3. */
FLATTEN float chain_element(const chain *ch, const float *c, size_t j, const bool is_bf16) {
    float sum = 0.0f;
    for (size_t i = 0; i < ch->n_i; i++) {
        size_t at = i * ch->ldw + j;
        sum = k3_fma(is_bf16 ? k3_bf16_f32(ch->bf16[at]) : ch->f32[at], c[i], sum);
    }
    return sum;
}

/* Columns j .. n_j - 1 of one vector: 32 at a time, then 4, then one. */
FLATTEN void chain_vector(float *y, const chain *ch, size_t j, size_t n_j, const float *c,
                          const bool is_bf16) {
    for (; j + 32 <= n_j; j += 32) chain_tile_1(y, ch, c, j, 8, is_bf16);
    for (; j + 4 <= n_j; j += 4) chain_tile_1(y, ch, c, j, 1, is_bf16);
    for (; j < n_j; j++) y[j] = chain_element(ch, c, j, is_bf16);
}

FLATTEN void chain_batch(float *y, const chain *ch, size_t n_j, const float *c, size_t batch,
                         const bool is_bf16) {
    size_t t = 0;
    for (; t + 4 <= batch; t += 4, y += 4 * ch->ldy, c += 4 * ch->ldc) {
        size_t j = 0;
        for (; j + 16 <= n_j; j += 16) chain_tile_4(y, ch, c, j, is_bf16);
        for (size_t v = 0; v < 4; v++)
            chain_vector(y + v * ch->ldy, ch, j, n_j, c + v * ch->ldc, is_bf16);
    }
    for (; t < batch; t++, y += ch->ldy, c += ch->ldc) chain_vector(y, ch, 0, n_j, c, is_bf16);
}

static void neon_chain_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_i,
                            size_t n_j, const float *c, size_t ldc, size_t batch) {
    chain ch = {.bf16 = w, .ldw = ldw, .n_i = n_i, .ldc = ldc, .ldy = ldy};
    chain_batch(y, &ch, n_j, c, batch, true);
}

static void neon_chain_f32(float *y, size_t ldy, const float *w, size_t ldw, size_t n_i,
                           size_t n_j, const float *c, size_t ldc, size_t batch) {
    chain ch = {.f32 = w, .ldw = ldw, .n_i = n_i, .ldc = ldc, .ldy = ldy};
    chain_batch(y, &ch, n_j, c, batch, false);
}

/* ---- KDA: vectors over the value columns v -------------------------------------------
 *
 * A block of columns goes through all tokens before the next, so its part of S (16 KiB
 * at d = 128) stays in L1. */
typedef struct {
    float *S, *o;
    const float *a, *k, *q, *val, *beta;
    size_t d, n_tok, ldv, ldb, ldo;
} kda_head;

/* Columns v .. v + 4 * n_q - 1 of one head, over all tokens. */
FLATTEN void kda_columns(const kda_head *h, size_t v, const int n_q) {
    size_t d = h->d;
    for (size_t t = 0; t < h->n_tok; t++) {
        const float *a = h->a + t * d, *k = h->k + t * d, *q = h->q + t * d;
        float32x4_t u[8], o[8], delta[8], beta = vdupq_n_f32(h->beta[t * h->ldb]);
        UNROLL for (int c = 0; c < n_q; c++) u[c] = o[c] = vdupq_n_f32(0);
        for (size_t i = 0; i < d; i++) {
            float *row = h->S + i * d + v;
            UNROLL for (int c = 0; c < n_q; c++) {
                float32x4_t s = vmulq_f32(vld1q_f32(row + 4 * c), vdupq_n_f32(a[i]));
                u[c] = vfmaq_f32(u[c], s, vdupq_n_f32(k[i]));
                vst1q_f32(row + 4 * c, s);
            }
        }
        UNROLL for (int c = 0; c < n_q; c++)
            delta[c] = vmulq_f32(beta, vsubq_f32(vld1q_f32(h->val + t * h->ldv + v + 4 * c), u[c]));
        for (size_t i = 0; i < d; i++) {
            float *row = h->S + i * d + v;
            UNROLL for (int c = 0; c < n_q; c++) {
                float32x4_t s = vfmaq_f32(vld1q_f32(row + 4 * c), vdupq_n_f32(k[i]), delta[c]);
                o[c] = vfmaq_f32(o[c], s, vdupq_n_f32(q[i]));
                vst1q_f32(row + 4 * c, s);
            }
        }
        UNROLL for (int c = 0; c < n_q; c++) vst1q_f32(h->o + t * h->ldo + v + 4 * c, o[c]);
    }
}

/* One column over all tokens, for a d that is no multiple of 4. */
static void kda_column(const kda_head *h, size_t v) {
    size_t d = h->d;
    for (size_t t = 0; t < h->n_tok; t++) {
        const float *a = h->a + t * d, *k = h->k + t * d, *q = h->q + t * d;
        float *S = h->S + v, u = 0.0f, o = 0.0f;
        for (size_t i = 0; i < d; i++) {
            S[i * d] = S[i * d] * a[i];
            u = k3_fma(S[i * d], k[i], u);
        }
        float delta = h->beta[t * h->ldb] * (h->val[t * h->ldv + v] - u);
        for (size_t i = 0; i < d; i++) {
            S[i * d] = k3_fma(k[i], delta, S[i * d]);
            o = k3_fma(S[i * d], q[i], o);
        }
        h->o[t * h->ldo + v] = o;
    }
}

static void neon_kda(float *S, size_t d, size_t n_tok, const float *a, const float *k,
                     const float *q, const float *val, size_t ldv, const float *beta, size_t ldb,
                     float *o, size_t ldo) {
    kda_head h = {.S = S, .o = o, .a = a, .k = k, .q = q, .val = val, .beta = beta,
                  .d = d, .n_tok = n_tok, .ldv = ldv, .ldb = ldb, .ldo = ldo};
    size_t v = 0;
    for (; v + 32 <= d; v += 32) kda_columns(&h, v, 8);
    for (; v + 8 <= d; v += 8) kda_columns(&h, v, 2);
    for (; v + 4 <= d; v += 4) kda_columns(&h, v, 1);
    for (; v < d; v++) kda_column(&h, v);
}

/* ---- The rest ------------------------------------------------------------------------ */

/* f32 to f64 is exact and fcvtns rounds to nearest even, so two lanes at a time equal llrintf.
 * Where a term is out of range ew_add_q40 goes over the rest again and finds the first. */
static size_t neon_add_q40(int64_t *q, const float *y, float w, size_t n) {
    float32x4_t limit = vdupq_n_f32(0x1p17f), unit = vdupq_n_f32(0x1p40f);
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t t = vmulq_n_f32(vld1q_f32(y + i), w);
        if (vminvq_u32(vcaltq_f32(t, limit)) == 0) break;
        t = vmulq_f32(t, unit);
        int64x2_t low = vcvtnq_s64_f64(vcvt_f64_f32(vget_low_f32(t)));
        int64x2_t high = vcvtnq_s64_f64(vcvt_high_f64_f32(t));
        vst1q_s64(q + i, vaddq_s64(vld1q_s64(q + i), low));
        vst1q_s64(q + i + 2, vaddq_s64(vld1q_s64(q + i + 2), high));
    }
    return i + ew_add_q40(q + i, y + i, w, n - i);
}

/* (float)int64 rounds once, so each element takes one scalar conversion: clang before 21 vectorises
 * it through f64, which rounds twice (llvm-project pull 130665). The empty asm keeps it from that. */
static void neon_q40_f32(float *y, const int64_t *q, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int64_t whole = q[i];
        __asm__("" : "+r"(whole));
        y[i] = (float)whole * 0x1p-40f;
    }
}

static uint64_t neon_read_stream(const void *p, size_t n_bytes) {
    const uint64_t *w = p;
    uint64x2_t sum[8];
    UNROLL for (int j = 0; j < 8; j++) sum[j] = vdupq_n_u64(0);
    for (size_t i = 0; i < n_bytes / sizeof *w; i += 16) {
        prefetch(w + i, 4096);
        prefetch(w + i, 4096 + 64);
        UNROLL for (int j = 0; j < 8; j++) sum[j] = vaddq_u64(sum[j], vld1q_u64(w + i + 2 * j));
    }
    UNROLL for (int j = 1; j < 8; j++) sum[0] = vaddq_u64(sum[0], sum[j]);
    return vaddvq_u64(sum[0]);
}

/* 24 chains, each from its own start and with a step the compiler cannot know, so that
 * none is merged or folded away. */
static float neon_peak_fma(uint64_t n, uint64_t *flops) {
    float32x4_t acc[24], a = vdupq_n_f32((float)n), b = vdupq_n_f32(0x1p-100f);
    UNROLL_24 for (int j = 0; j < 24; j++) acc[j] = vdupq_n_f32((float)(j + 1));
    for (uint64_t i = 0; i < n; i++)
        UNROLL_24 for (int j = 0; j < 24; j++) acc[j] = vfmaq_f32(acc[j], a, b);
    *flops = n * 24 * 4 * 2;
    UNROLL_24 for (int j = 1; j < 24; j++) acc[0] = vaddq_f32(acc[0], acc[j]);
    return vaddvq_f32(acc[0]);
}

/* Advanced SIMD is part of the AArch64 baseline. */
static bool neon_is_supported(void) { return true; }

#ifdef __clang__
#pragma clang diagnostic ignored "-Winitializer-overrides"
#else
#pragma GCC diagnostic ignored "-Woverride-init"
#endif
const k3_kernels k3_kernels_neon = {
    .name = "neon",
    .is_supported = neon_is_supported,
    .matmul_bf16 = neon_matmul_bf16,
    .matmul_f32 = neon_matmul_f32,
    .matmul_mxfp4 = neon_matmul_mxfp4,
    .chain_bf16 = neon_chain_bf16,
    .chain_f32 = neon_chain_f32,
    .kda = neon_kda,
    .dot = neon_dot,
    K3_ELEMENTWISE_KERNELS,
    .add_q40 = neon_add_q40,
    .q40_f32 = neon_q40_f32,
    .read_stream = neon_read_stream,
    .peak_fma = neon_peak_fma,
};
