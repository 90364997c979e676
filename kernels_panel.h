/* kernels_panel.h - what the AVX2 and the AVX-512 kernels have in common: who calls which
 * tile with which rows and vectors. The tiles themselves are each set's own.
 *
 * Included once, in the middle of kernels_<set>.c, which defines before it:
 *
 *   TILE                  static inline, always inlined: a constant argument makes an instance
 *   TILE_ROWS, TILE_VECS  most rows and most vectors of a register tile
 *   EACH_TILE_ROWS(M)     M(R) for every R that tile_rows() returns
 *   tile_rows(left)       rows of the next tile when `left` rows are left
 *   tile(R, T, ...)       R rows x T vectors over n_group groups of the panel
 *   widen_bf16, widen_mxfp4, widen_f32    one group of weights to 16 evens | 16 odds
 *   fold_lanes(lanes)     the fold of dot16 over 16 floats in memory, 64-byte aligned
 *   matvec_bf16, matvec_mxfp4             one vector
 */
#ifndef K3_KERNELS_PANEL_H
#define K3_KERNELS_PANEL_H

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
 * Up to FEW_VECS vectors: a block of rows is decoded in registers, each weight once, and
 * multiplied into all vectors at once; nothing is stored and read again. An instance for
 * every number of vectors and rows, out of line, so that its loop has the registers to
 * itself. */
typedef void (*few_fn)(float *y, size_t ldy, const weights *m, size_t row, const float *x);

#define FEW_FN(KIND, V, NAME, R)                                                             \
    static __attribute__((noinline)) void few_##KIND##_##V##_##NAME(                         \
        float *y, size_t ldy, const weights *m, size_t row, const float *x) {                \
        few_rows(KIND, R, V, y + row, ldy, m, row, x);                                       \
    }
#define FEW_FNS(V, R)                                                                        \
    FEW_FN(BF16, V, most, R) FEW_FN(BF16, V, two, 2) FEW_FN(BF16, V, one, 1)                 \
    FEW_FN(MXFP4, V, most, R) FEW_FN(MXFP4, V, two, 2) FEW_FN(MXFP4, V, one, 1)
EACH_FEW(FEW_FNS)

/* The instances for one number of vectors: of the most rows, of two and of one. */
typedef struct {
    size_t most_rows;
    few_fn most, two, one;
} few_set;
#define FEW_SET(KIND, V, R) \
    [V] = {R, few_##KIND##_##V##_most, few_##KIND##_##V##_two, few_##KIND##_##V##_one},
#define FEW_BF16(V, R)  FEW_SET(BF16, V, R)
#define FEW_MXFP4(V, R) FEW_SET(MXFP4, V, R)
static const few_set few_bf16[FEW_VECS + 1] = {EACH_FEW(FEW_BF16)};
static const few_set few_mxfp4[FEW_VECS + 1] = {EACH_FEW(FEW_MXFP4)};

static void few_vectors(const few_set *f, float *y, size_t ldy, const weights *m, size_t n_rows,
                        const float *x) {
    size_t r = 0;
    for (; r + f->most_rows <= n_rows; r += f->most_rows) f->most(y, ldy, m, r, x);
    for (; r + 2 <= n_rows; r += 2) f->two(y, ldy, m, r, x);
    if (r < n_rows) f->one(y, ldy, m, r, x);
}

/* ---- The table's functions ------------------------------------------------------------ */

static void matmul_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                        size_t n, const float *xp, size_t batch) {
    weights m = {w, NULL, ldw, n};
    if (batch == 1)
        matvec_bf16(y, w, ldw, n_rows, n, xp);
    else if (batch <= FEW_VECS)
        few_vectors(&few_bf16[batch], y, ldy, &m, n_rows, xp);
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
        few_vectors(&few_mxfp4[batch], y, ldy, &m, n_rows, xp);
    else
        matmul(MXFP4, y, ldy, &m, n_rows, xp, batch);
}

/* ---- What chains and the KDA recurrence share ----------------------------------------- */

/* All columns of W for T vectors, J registers of columns at a time; each set's own. */
TILE void chain_cols(const enum kind kind, const int T, const int J, float *y, size_t ldy,
                     const void *w, size_t ldw, size_t n_i, size_t n_j, const float *c,
                     size_t ldc);

/* EACH_CHAIN_TILE(M): M(T, J) for every T of a tile, most vectors first, 1 last. */
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

/* The operands of one head, as in the contract. */
typedef struct {
    size_t d, n_tok, ldv, ldb, ldo;
    const float *a, *k, *q, *val, *beta;
    float *o;
} kda_args;

#endif
