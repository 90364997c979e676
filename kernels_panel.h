/* kernels_panel.h - what the AVX2 and the AVX-512 kernels have in common: who calls which
 * tile with which rows and vectors. The tiles themselves are each set's own.
 *
 * Included once by kernels_<set>.c, which defines before it:
 *
 *   TILE_ROWS, TILE_VECS   most rows and most vectors of a register tile over a panel
 *   EACH_TILE_ROWS(M)      M(R) for every R that tile_rows() returns
 *   FEW_VECS               most vectors that need no panel
 *   EACH_FEW(M)            M(V, R): V vectors, of 2 .. FEW_VECS, and rows in flight with them
 *   FEW_GROUPS_<KIND>      groups of columns at a time for these
 *   EACH_CHAIN_TILE(M)     M(T, J): T vectors and J registers of columns, most vectors first
 *
 * and after it the functions declared in "What each set defines". */
#ifndef K3_KERNELS_PANEL_H
#define K3_KERNELS_PANEL_H

#include <immintrin.h>

/* A constant argument makes an instance of such a function. */
#define TILE static inline __attribute__((always_inline))

/* Small loops over registers must unroll, or gcc moves the arrays through memory. clang knows to,
 * and with its pragma leaves them there. */
#ifdef __clang__
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* gcc would fold a load into each of its uses, and the loop would wait for its loads; this makes
 * it one. clang does the right thing and is only disturbed by it. */
#if defined(__GNUC__) && !defined(__clang__)
#define ONE_LOAD(v) __asm__("" : "+v"(v))
#else
#define ONE_LOAD(v) (void)(v)
#endif

/* Tables of 256 scale codes out of CODE(c), the table of one. */
#define CODE4(c)  CODE((c)), CODE((c) + 1u), CODE((c) + 2u), CODE((c) + 3u)
#define CODE16(c) CODE4((c)), CODE4((c) + 4u), CODE4((c) + 8u), CODE4((c) + 12u)
#define CODE64(c) CODE16((c)), CODE16((c) + 16u), CODE16((c) + 32u), CODE16((c) + 48u)

/* What a row of weights is, so that one driver serves all three kinds. */
enum kind { BF16, F32, MXFP4 };
typedef struct {
    const void *w;    /* bf16, f32 or nibbles   */
    const uint8_t *s; /* scale codes            */
    size_t ldw, n;    /* in elements            */
} weights;

/* One step of a block: n_group groups from g0 on, of rows from `row` on. */
typedef struct {
    const weights *m;
    size_t row, g0, n_group;
    size_t ahead; /* weights that far on in memory, in elements, are needed next */
} few_part;

/* The fold of dot16 from eight lanes on: lanes 4, 2, 1 apart, then + (+0). */
TILE float fold_eight(__m256 s8) {
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    __m128 s1 = _mm_add_ss(s2, _mm_movehdup_ps(s2));
    return _mm_cvtss_f32(s1) + 0.0f;
}

/* The operands of one head of the KDA recurrence, as in the contract. */
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

/* One group of weights to 16 evens | 16 odds, 64-byte aligned. Of bf16 `left` elements remain in
 * the row. */
TILE void widen_bf16(float *to, const uint16_t *p, size_t left);
TILE void widen_mxfp4(float *to, const uint8_t *p, uint8_t code);
TILE void widen_f32(float *to, const float *p);

/* The fold of dot16 over 16 floats in memory, 64-byte aligned. */
TILE float fold_lanes(const float *lanes);

/* Rows of the next tile when `left` are left: R of EACH_TILE_ROWS. */
TILE size_t tile_rows(size_t left);

/* acc[T][R][16] += panel . x for R rows and T vectors, over n_group groups; x_group floats from a
 * group of x to the next. */
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

#define PANEL_GROUPS 8  /* 256 columns: panel and x share L1     */
#define STRIP        32 /* most vectors at a time                */
STATIC_ASSERT(strip_is_whole_blocks, STRIP % K3_XBLOCK == 0);
STATIC_ASSERT(tiles_fill_the_kernel_rows, K3_KERNEL_ROWS % TILE_ROWS == 0);
STATIC_ASSERT(group_is_two_halves_of_dot16, K3_GROUP == 2 * 16);

/* Widened weights, panel[group][row][16 evens | 16 odds], and accumulators,
 * acc[vector][row][lane]; as many rows as the tile has. */
typedef struct {
    float panel[PANEL_GROUPS * TILE_ROWS * K3_GROUP];
    float acc[STRIP * TILE_ROWS * 16];
} __attribute__((aligned(64))) scratch;

/* One panel against all vectors of a strip; x points at the strip's first block. */
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

/* Out of line and shared by all kinds of weights, so that the loops have the registers to
 * themselves. */
#define STRIP_FN(R)                                                                          \
    static __attribute__((noinline)) void tile_strip##R(                                     \
        float *acc, const float *w, const float *x, size_t npad, size_t first_group,         \
        size_t n_group, size_t n_vec) {                                                      \
        tile_strip(R, acc, w, x, npad, first_group, n_group, n_vec);                         \
    }
EACH_TILE_ROWS(STRIP_FN)

/* Fill a panel with R rows from `row`. What lies `ahead` bytes on is the next panel: the
 * hardware sees only short runs and would start anew in each. */
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

/* R rows against a strip of n_vec vectors. */
TILE void strip_rows(const enum kind kind, const int R, scratch *sc, float *y, size_t ldy,
                     const weights *m, size_t row, const float *x, size_t n_vec) {
    const size_t npad = k3_pad(m->n), n_group = npad / K3_GROUP;
    const size_t group_bytes = kind == BF16 ? 64 : kind == MXFP4 ? 16 : 128;
    memset(sc->acc, 0, n_vec * (size_t)R * 16 * sizeof(float));
    for (size_t g0 = 0; g0 < n_group; g0 += PANEL_GROUPS) {
        size_t ng = PANEL_GROUPS, ahead = PANEL_GROUPS * group_bytes;
        if (g0 + PANEL_GROUPS >= n_group) { /* the next panel is in the next rows */
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

/* Strips outside, rows inside: a strip of x stays in L2 while the rows pass. */
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
 * For 2 to FEW_VECS vectors a panel costs more than it saves. Here a weight is decoded in
 * registers, once for all vectors, and so many rows are in flight as accumulators fit. The
 * vectors together are larger than L1. Where a block of few rows reads them from L2 too often,
 * columns are the outer loop: so many groups of x stay in L1 while FEW_BLOCK rows pass, and the
 * accumulators rest in memory until the next groups. The set says how many groups
 * (FEW_GROUPS_<KIND>). */
#define FEW_BLOCK 24 /* rows; a multiple of the rows of every instance */

typedef void (*few_fn)(float *acc, const few_part *p, const float *x);

/* An instance for every number of vectors and rows, out of line, so that its loop has the
 * registers to itself. */
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

/* Groups at a time, and the instances for one number of vectors: of the most rows, of two and
 * of one. */
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

/* n_rows rows of a part, which begins at row p.row; row_floats of acc belong to one row. */
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
            if (g0 + step >= n_group) { /* the next part is in the next block */
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
