/* kernels_panel.h - the drivers that the AVX2 and the AVX-512 kernels share. A driver cuts a
 * product into rows and vectors and calls a tile for each part; the tiles are in kernels_<set>.c.
 *
 * kernels_<set>.c includes this file once, and defines before it:
 *
 *   TILE_ROWS, TILE_VECS   most rows and most vectors of a register tile over a panel
 *   EACH_TILE_ROWS(M)      M(R) for every R that tile_rows() returns
 *   FEW_VECS               most vectors that need no panel
 *   EACH_FEW(M)            M(V, R) for V = 2 .. FEW_VECS vectors: R rows are computed at a time
 *   FEW_GROUPS_<KIND>      groups of columns that 2 .. FEW_VECS vectors take at a time
 *   EACH_CHAIN_TILE(M)     M(T, J): T vectors and J registers of columns, most vectors first
 *
 * and after it the functions declared in "What each set defines". */
#ifndef K3_KERNELS_PANEL_H
#define K3_KERNELS_PANEL_H

#include <immintrin.h>

/* A TILE function is inlined into its caller: called with constants, its loops have constant
 * lengths. */
#define TILE static inline __attribute__((always_inline))

/* gcc keeps a small array in registers only where the loops over it are unrolled. clang unrolls
 * them by itself; given a pragma, it leaves the array in memory. */
#ifdef __clang__
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* gcc repeats the load of v in every instruction that uses v, and the loop then waits for its
 * loads. ONE_LOAD(v) makes gcc load v once, into a register. clang does so by itself, and the asm
 * only hinders it. */
#if defined(__GNUC__) && !defined(__clang__)
#define ONE_LOAD(v) __asm__("" : "+v"(v))
#else
#define ONE_LOAD(v) (void)(v)
#endif

/* CODE(c) is a table's entry for scale code c; these are the entries of 4, 16 and 64 codes from c
 * on. */
#define CODE4(c)  CODE((c)), CODE((c) + 1u), CODE((c) + 2u), CODE((c) + 3u)
#define CODE16(c) CODE4((c)), CODE4((c) + 4u), CODE4((c) + 8u), CODE4((c) + 12u)
#define CODE64(c) CODE16((c)), CODE16((c) + 16u), CODE16((c) + 32u), CODE16((c) + 48u)

/* How weights are stored. One driver serves all three kinds. */
enum kind { BF16, F32, MXFP4 };
typedef struct {
    const void *w;    /* bf16, f32 or nibbles   */
    const uint8_t *s; /* scale codes            */
    size_t ldw, n;    /* in elements            */
} weights;

/* Part of a block of rows: the groups [g0, g0 + n_group) of columns, in the rows from `row` on. */
typedef struct {
    const weights *m;
    size_t row, g0, n_group;
    size_t ahead; /* distance, in elements, to the weights of the next part */
} few_part;

/* The end of dot16's fold, from eight sums on: add those that are 4, 2, 1 lanes apart, then +0. */
TILE float fold_eight(__m256 s8) {
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    __m128 s1 = _mm_add_ss(s2, _mm_movehdup_ps(s2));
    return _mm_cvtss_f32(s1) + 0.0f;
}

/* The operands of one head of the KDA recurrence, named as in kernels.h. */
typedef struct {
    size_t d, n_tok, ldv, ldb, ldo;
    const float *a, *k, *q, *val, *beta;
    float *o;
} kda_args;

/* ---- What each set defines ------------------------------------------------------------ */

/* R rows, 1 or 4, against one vector: y[r] = dot16(W[r], x). */
TILE void bf16_rows(const int R, float *y, const uint16_t *w, size_t ldw, size_t n,
                    const float *x);
TILE void mxfp4_rows(const int R, float *y, const uint8_t *q, const uint8_t *s, size_t n,
                     const float *x);

/* Decode one group of weights to f32: to[0..15] are the even columns, to[16..31] the odd ones; `to`
 * is 64-byte aligned. widen_bf16: `left` elements remain in the row, and columns past them become
 * +0. */
TILE void widen_bf16(float *to, const uint16_t *p, size_t left);
TILE void widen_mxfp4(float *to, const uint8_t *p, uint8_t code);
TILE void widen_f32(float *to, const float *p);

/* The fold of dot16 over 16 floats in memory, 64-byte aligned. */
TILE float fold_lanes(const float *lanes);

/* How many rows the next tile takes when `left` rows are left: one R of EACH_TILE_ROWS. */
TILE size_t tile_rows(size_t left);

/* acc[T][R][16] += panel . x for R rows and T vectors, over n_group groups. From one group of x to
 * the next are x_group floats. */
TILE void tile(const int R, const int T, float *acc, const float *w, const float *x,
               size_t x_group, size_t n_group);

/* acc[R][V][16] += W[p->row + r] . x[t] over the groups of a part. x: f32[n_group][V][32]. */
TILE void few_rows(const enum kind kind, const int R, const int V, float *acc, const few_part *p,
                   const float *x);

/* All columns of W for T vectors, J registers of columns at a time. */
TILE void chain_cols(const enum kind kind, const int T, const int J, float *y, size_t ldy,
                     const void *w, size_t ldw, size_t n_i, size_t n_j, const float *c,
                     size_t ldc);

/* ---- One vector ------------------------------------------------------------------------ */

static void matvec_bf16(float *y, const uint16_t *w, size_t ldw, size_t n_rows, size_t n,
                        const float *x) {
    size_t r = 0;
    for (; r + 4 <= n_rows; r += 4) bf16_rows(4, y + r, w + r * ldw, ldw, n, x);
    for (; r < n_rows; r++) bf16_rows(1, y + r, w + r * ldw, ldw, n, x);
}

/* Out of line, so that the loop has the registers to itself. */
static __attribute__((noinline)) void mxfp4_rows4(float *y, const uint8_t *q, const uint8_t *s,
                                                  size_t n, const float *x) {
    mxfp4_rows(4, y, q, s, n, x);
}

static void matvec_mxfp4(float *y, const uint8_t *q, const uint8_t *s, size_t n_rows, size_t n,
                         const float *x) {
    size_t r = 0, n_group = n / K3_GROUP, row = n / 2;
    for (; r + 4 <= n_rows; r += 4) mxfp4_rows4(y + r, q + r * row, s + r * n_group, n, x);
    for (; r < n_rows; r++) mxfp4_rows(1, y + r, q + r * row, s + r * n_group, n, x);
}

/* ---- Panels --------------------------------------------------------------------------- */

#define PANEL_GROUPS 8  /* 256 columns: L1 holds panel and x     */
#define STRIP        32 /* most vectors at a time                */
STATIC_ASSERT(strip_is_whole_blocks, STRIP % K3_XBLOCK == 0);
STATIC_ASSERT(tiles_fill_the_kernel_rows, K3_KERNEL_ROWS % TILE_ROWS == 0);
STATIC_ASSERT(group_is_two_halves_of_dot16, K3_GROUP == 2 * 16);

/* A panel of widened weights, panel[group][row][16 evens | 16 odds], and accumulators,
 * acc[vector][row][lane]. `row` counts the R rows of the tile at work, at most TILE_ROWS. */
typedef struct {
    float panel[PANEL_GROUPS * TILE_ROWS * K3_GROUP];
    float acc[STRIP * TILE_ROWS * 16];
} __attribute__((aligned(64))) scratch;

/* Multiply one panel into all vectors of a strip; x points at the strip's first block. */
TILE void tile_strip(const int R, float *acc, const float *w, const float *x, size_t npad,
                     size_t first_group, size_t n_group, size_t n_vec) {
    for (size_t t0 = 0; t0 < n_vec; t0 += K3_XBLOCK, acc += K3_XBLOCK * R * 16) {
        size_t in_block = n_vec - t0 < K3_XBLOCK ? n_vec - t0 : K3_XBLOCK, t = 0;
        size_t x_group = in_block * K3_GROUP;
        const float *xb = x + t0 * npad + first_group * x_group;
        for (; t + TILE_VECS <= in_block; t += TILE_VECS)
            tile(R, TILE_VECS, acc + t * (size_t)R * 16, w, xb + t * K3_GROUP, x_group, n_group);
        if (TILE_VECS > 2 && t + 2 <= in_block) {
            tile(R, 2, acc + t * (size_t)R * 16, w, xb + t * K3_GROUP, x_group, n_group);
            t += 2;
        }
        if (t < in_block)
            tile(R, 1, acc + t * (size_t)R * 16, w, xb + t * K3_GROUP, x_group, n_group);
    }
}

/* tile_strip1() and so on: not inlined, one function for all kinds of weights, so that its loops
 * have all registers to themselves. */
#define STRIP_FN(R)                                                                          \
    static __attribute__((noinline)) void tile_strip##R(                                     \
        float *acc, const float *w, const float *x, size_t npad, size_t first_group,         \
        size_t n_group, size_t n_vec) {                                                      \
        tile_strip(R, acc, w, x, npad, first_group, n_group, n_vec);                         \
    }
EACH_TILE_ROWS(STRIP_FN)

/* Fill a panel with R rows from `row` on, and prefetch the next panel, whose weights begin `ahead`
 * bytes on. Without that the hardware's prefetcher starts anew in every row, since a panel takes
 * only a short run of each. */
TILE void fill_panel(const enum kind kind, const int R, float *panel, const weights *m, size_t row,
                     size_t g0, size_t n_group, size_t ahead) {
    for (int r = 0; r < R; r++) {
        size_t at = (row + (size_t)r) * m->ldw + g0 * K3_GROUP;
        for (size_t g = 0; g < n_group; g++, at += K3_GROUP) {
            float *to = panel + (g * (size_t)R + (size_t)r) * K3_GROUP;
            if (kind == BF16) {
                const uint16_t *p = (const uint16_t *)m->w + at;
                _mm_prefetch((const char *)p + ahead, _MM_HINT_T1);
                widen_bf16(to, p, m->n - (g0 + g) * K3_GROUP);
            } else if (kind == MXFP4) {
                const uint8_t *p = (const uint8_t *)m->w + at / 2;
                if (g % 4 == 0) _mm_prefetch((const char *)p + ahead, _MM_HINT_T1);
                widen_mxfp4(to, p, m->s[at / K3_GROUP]);
            } else {
                widen_f32(to, (const float *)m->w + at);
            }
        }
    }
}

/* y = W x for R rows and the n_vec vectors of a strip. */
TILE void strip_rows(const enum kind kind, const int R, scratch *sc, float *y, size_t ldy,
                     const weights *m, size_t row, const float *x, size_t n_vec) {
    const size_t npad = k3_pad(m->n), n_group = npad / K3_GROUP;
    const size_t group_bytes = kind == BF16 ? 64 : kind == MXFP4 ? 16 : 128;
    memset(sc->acc, 0, n_vec * (size_t)R * 16 * sizeof(float));
    for (size_t g0 = 0; g0 < n_group; g0 += PANEL_GROUPS) {
        size_t ng = PANEL_GROUPS, ahead = PANEL_GROUPS * group_bytes;
        if (g0 + PANEL_GROUPS >= n_group) { /* the next panel takes the next rows */
            ng = n_group - g0;
            ahead = ((size_t)R * m->ldw / K3_GROUP - g0) * group_bytes;
        }
        fill_panel(kind, R, sc->panel, m, row, g0, ng, ahead);
#define USE_PANEL(N) \
    if (R == N) tile_strip##N(sc->acc, sc->panel, x, npad, g0, ng, n_vec);
        EACH_TILE_ROWS(USE_PANEL)
    }
    for (size_t t = 0; t < n_vec; t++)
        for (int r = 0; r < R; r++)
            y[t * ldy + row + (size_t)r] = fold_lanes(sc->acc + (t * (size_t)R + (size_t)r) * 16);
}

/* The outer loop takes strips of vectors and the inner one rows, so that a strip of x stays in L2
 * while all rows pass. */
TILE void matmul(const enum kind kind, float *y, size_t ldy, const weights *m, size_t n_rows,
                 const float *xp, size_t batch) {
    scratch sc;
    for (size_t t0 = 0; t0 < batch; t0 += STRIP) {
        size_t n_vec = batch - t0 < STRIP ? batch - t0 : STRIP;
        const float *x = xp + t0 * k3_pad(m->n);
        float *yt = y + t0 * ldy;
        for (size_t r = 0, step; r < n_rows; r += step) {
            step = tile_rows(n_rows - r);
#define STRIP_OF(N) \
    if (step == N) strip_rows(kind, N, &sc, yt, ldy, m, r, x, n_vec);
            EACH_TILE_ROWS(STRIP_OF)
        }
    }
}

/* ---- Few vectors ------------------------------------------------------------------------
 *
 * For 2 to FEW_VECS vectors filling a panel takes longer than it saves. Here each weight is decoded
 * in registers, once for all vectors, and as many rows are computed at a time as their accumulators
 * fit in registers. The vectors together are larger than L1, and a few rows at a time would read
 * them from L2 over and over. So the outer loop takes FEW_GROUPS_<KIND> groups of columns at a
 * time: that part of x stays in L1 while FEW_BLOCK rows pass, and the accumulators wait in memory
 * for the next groups. A set whose rows come fast enough all the same says SIZE_MAX: all columns at
 * a time. */
#define FEW_BLOCK 24 /* rows; a multiple of the rows of every instance */

typedef void (*few_fn)(float *acc, const few_part *p, const float *x);

/* One function for each kind of weights and number of vectors and rows, not inlined, so that its
 * loop has all registers to itself. */
#define FEW_FN(KIND, V, NAME, R)                                                             \
    static __attribute__((noinline)) void few_##KIND##_##V##_##NAME(                         \
        float *acc, const few_part *p, const float *x) {                                     \
        few_rows(KIND, R, V, acc, p, x);                                                     \
    }
#define FEW_FNS(V, R)                                                                        \
    FEW_FN(BF16, V, most, R) FEW_FN(BF16, V, two, 2) FEW_FN(BF16, V, one, 1)                 \
    FEW_FN(MXFP4, V, most, R) FEW_FN(MXFP4, V, two, 2) FEW_FN(MXFP4, V, one, 1)
EACH_FEW(FEW_FNS)
#define FEW_FITS(V, R) \
    typedef char few_##V##_fits[(V) >= 2 && (V) <= FEW_VECS && FEW_BLOCK % (R) == 0 ? 1 : -1];
EACH_FEW(FEW_FITS)
typedef char few_is_one_block[FEW_VECS <= K3_XBLOCK ? 1 : -1]; /* so that x is one block */

/* What few_vectors() uses for one number of vectors: how many groups of columns at a time, and the
 * functions for most_rows rows, for two rows and for one. */
typedef struct {
    size_t n_group, most_rows;
    few_fn most, two, one;
} few_set;
#define FEW_SET(KIND, V, R)                                                                  \
    [V] = {FEW_GROUPS_##KIND, R, few_##KIND##_##V##_most, few_##KIND##_##V##_two,            \
           few_##KIND##_##V##_one},
#define FEW_BF16(V, R)  FEW_SET(BF16, V, R)
#define FEW_MXFP4(V, R) FEW_SET(MXFP4, V, R)
static const few_set few_bf16[FEW_VECS + 1] = {EACH_FEW(FEW_BF16)};
static const few_set few_mxfp4[FEW_VECS + 1] = {EACH_FEW(FEW_MXFP4)};

/* Compute part p for n_rows rows from p.row on. Each row has row_floats floats of acc. */
static void few_block(const few_set *f, float *acc, size_t row_floats, few_part p, size_t n_rows,
                      const float *x) {
    size_t step;
    for (; n_rows; n_rows -= step, p.row += step, acc += step * row_floats) {
        few_fn fn = n_rows >= f->most_rows ? f->most : n_rows >= 2 ? f->two : f->one;
        step = n_rows >= f->most_rows ? f->most_rows : n_rows >= 2 ? 2 : 1;
        fn(acc, &p, x);
    }
}

static void few_vectors(const few_set *f, float *y, size_t ldy, const weights *m, size_t n_rows,
                        const float *x, size_t batch) {
    float acc[FEW_BLOCK * FEW_VECS * 16] __attribute__((aligned(64)));
    const size_t n_group = k3_pad(m->n) / K3_GROUP;
    const size_t step = f->n_group < n_group ? f->n_group : n_group;
    for (size_t r0 = 0; r0 < n_rows; r0 += FEW_BLOCK) {
        size_t n_block = n_rows - r0 < FEW_BLOCK ? n_rows - r0 : FEW_BLOCK;
        memset(acc, 0, n_block * batch * 16 * sizeof *acc);
        for (size_t g0 = 0; g0 < n_group; g0 += step) {
            few_part p = {m, r0, g0, step, step * K3_GROUP};
            if (g0 + step >= n_group) { /* the next part is the first of the next block */
                p.n_group = n_group - g0;
                p.ahead = FEW_BLOCK * m->ldw - g0 * K3_GROUP;
            }
            few_block(f, acc, batch * 16, p, n_block, x + g0 * batch * K3_GROUP);
        }
        for (size_t t = 0; t < batch; t++)
            for (size_t r = 0; r < n_block; r++)
                y[t * ldy + r0 + r] = fold_lanes(acc + (r * batch + t) * 16);
    }
}

/* ---- The table's functions ------------------------------------------------------------ */

static void matmul_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                        size_t n, const float *xp, size_t batch) {
    weights m = {w, NULL, ldw, n};
    if (batch == 1)
        matvec_bf16(y, w, ldw, n_rows, n, xp);
    else if (batch <= FEW_VECS)
        few_vectors(&few_bf16[batch], y, ldy, &m, n_rows, xp, batch);
    else
        matmul(BF16, y, ldy, &m, n_rows, xp, batch);
}

static void matmul_f32(float *y, size_t ldy, const float *w, size_t n_rows, size_t n,
                       const float *xp, size_t batch) {
    weights m = {w, NULL, k3_pad(n), n};
    matmul(F32, y, ldy, &m, n_rows, xp, batch);
}

static void matmul_mxfp4(float *y, size_t ldy, const uint8_t *q, const uint8_t *s, size_t n_rows,
                         size_t n, const float *xp, size_t batch) {
    weights m = {q, s, n, n};
    if (batch == 1)
        matvec_mxfp4(y, q, s, n_rows, n, xp);
    else if (batch <= FEW_VECS)
        few_vectors(&few_mxfp4[batch], y, ldy, &m, n_rows, xp, batch);
    else
        matmul(MXFP4, y, ldy, &m, n_rows, xp, batch);
}

TILE void chain(const enum kind kind, float *y, size_t ldy, const void *w, size_t ldw, size_t n_i,
                size_t n_j, const float *c, size_t ldc, size_t batch) {
    size_t t = 0;
#define CHAIN_OF(T, J)              \
    for (; t + T <= batch; t += T) \
        chain_cols(kind, T, J, y + t * ldy, ldy, w, ldw, n_i, n_j, c + t * ldc, ldc);
    EACH_CHAIN_TILE(CHAIN_OF)
}

static void chain_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_i, size_t n_j,
                       const float *c, size_t ldc, size_t batch) {
    chain(BF16, y, ldy, w, ldw, n_i, n_j, c, ldc, batch);
}

static void chain_f32(float *y, size_t ldy, const float *w, size_t ldw, size_t n_i, size_t n_j,
                      const float *c, size_t ldc, size_t batch) {
    chain(F32, y, ldy, w, ldw, n_i, n_j, c, ldc, batch);
}

#endif
