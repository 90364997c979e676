/* kernels_avx2.c - the kernel table for AVX2 and FMA, bits as in kernels.h.
 *
 * The 16 accumulators of one dot16 (NUMERICS 2) are two ymm. What shapes the code:
 *
 *   batch 1   Memory sets the pace. Several rows are computed at a time, because one row alone
 *             waits for each fused multiply-add; and software prefetch walks linearly ahead,
 *             because the hardware prefetchers see many short streams that stop at every page.
 *   MXFP4     There is no 16-entry float lookup, but every weight, scale included, is
 *             exact in bf16, and a bf16 is two bytes: two `vpshufb` in byte tables (one
 *             pair per scale code, 8 KiB in all) look up 32 weights. The nibbles are shuffled
 *             first, so that each 32-bit word receives the two bf16 of lanes j and 8 + j. A mask
 *             widens one and a shift the other, eight neighbouring lanes at a time.
 *   2 to 4    Each weight is decoded in registers, once for all vectors; 1024 columns of x stay
 *             in L1 while 24 rows pass.
 *   more      Rows are widened once into a small f32 panel on the stack that stays in L1,
 *             and a register tile of 3 rows x 2 vectors (12 accumulators, 2 x, 1 weight)
 *             runs over it. Accumulators wait in memory between panels. */
#define K3_KERNELS_ELEMENTWISE
#include "k3_common.h"
#include "kernels.h"

/* The register tile over a panel: its most rows and vectors, and every number of rows that it is
 * compiled for. */
#define TILE_ROWS         3
#define TILE_VECS         2
#define EACH_TILE_ROWS(M) M(3) M(2) M(1)

/* M(V, R): for V vectors R rows at a time. Each pair has two accumulators, and at most 12 fit in
 * the 16 registers beside x and weights. From five vectors on the panel is as fast. */
#define FEW_VECS          4
#define FEW_GROUPS_BF16   32 /* 1024 columns */
#define FEW_GROUPS_MXFP4  32
#define EACH_FEW(M)       M(2, 3) M(3, 2) M(4, 1)

/* M(T, J): tiles of a chain, T vectors and J ymm of columns. */
#define EACH_CHAIN_TILE(M) M(4, 2) M(1, 8)

#include "kernels_panel.h"

/* ---- Fold, and the MXFP4 tables ---------------------------------------------------- */

/* The fold of dot16, with lanes 0..7 in `lo` and 8..15 in `hi`: add those that are 8, 4, 2, 1
 * apart, then +0. */
TILE float fold(__m256 lo, __m256 hi) {
    return fold_eight(_mm256_add_ps(lo, hi));
}

/* The bf16 bits of each E2M1 magnitude (M05: 0.5, to M60: 6.0) times 2^(c-127). Only scale codes 0
 * and 1 give subnormals. */
#define M05(c) ((c) > 1 ? ((c) - 1u) * 0x80u : (c) ? 0x40u : 0x20u)
#define M10(c) ((c) ? (c) * 0x80u : 0x40u)
#define M15(c) ((c) ? (c) * 0x80u + 0x40u : 0x60u)
#define M20(c) (((c) + 1u) * 0x80u)
#define M30(c) (((c) + 1u) * 0x80u + 0x40u)
#define M40(c) (((c) + 2u) * 0x80u)
#define M60(c) (((c) + 2u) * 0x80u + 0x40u)
#define LO(b)  ((b) & 0xffu)
#define HI(b)  ((b) >> 8 & 0x7fu)
#define NEG    0x80u
#define LO8(c) \
    0, LO(M05(c)), LO(M10(c)), LO(M15(c)), LO(M20(c)), LO(M30(c)), LO(M40(c)), LO(M60(c))
#define HI8(c, s)                                                                           \
    s, s | HI(M05(c)), s | HI(M10(c)), s | HI(M15(c)), s | HI(M20(c)), s | HI(M30(c)),      \
        s | HI(M40(c)), s | HI(M60(c))
#define CODE(c)   { LO8(c), LO8(c), HI8(c, 0), HI8(c, NEG) }
/* mxfp4_table[code]: the low bytes of the bf16 of all 16 nibbles, then the high bytes. A checked
 * model has no codes 253..255; with their rows a lookup of any byte stays inside the table. */
static const uint8_t mxfp4_table[256][32] __attribute__((aligned(64))) = {
    CODE64(0u), CODE64(64u), CODE64(128u), CODE64(192u)};

TILE __m128i load16(const void *p) { return _mm_loadu_si128((const __m128i *)p); }

/* A 32-bit word of bf16 is an even and an odd element: shift for one, mask for the other. */
TILE __m256 bf16_even(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
TILE __m256 bf16_odd(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000u)));
}
TILE __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

/* Decode 16 bytes of nibbles. Word j of `even` holds two bf16 of the even columns, that of lane j
 * in its high half and that of lane 8 + j in its low half; `odd` holds the odd columns in the same
 * way. The first shuffle brings the bytes of lanes 0..3 and 8..11 to the low half of the ymm and
 * those of 4..7 and 12..15 to the high half, alternating, and twice: once for the low nibbles and
 * once for the high ones. */
typedef struct {
    __m256i even, odd;
} pairs;

TILE pairs mxfp4_pairs(const uint8_t *q, uint8_t code) {
    const __m256i order = _mm256_setr_epi8(8, 0, 9, 1, 10, 2, 11, 3, 8, 0, 9, 1, 10, 2, 11, 3,
                                           12, 4, 13, 5, 14, 6, 15, 7, 12, 4, 13, 5, 14, 6, 15, 7);
    const __m256i shift = _mm256_setr_epi64x(0, 4, 0, 4);
    const uint8_t *table = mxfp4_table[code];
    __m256i v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(q)), order);
    v = _mm256_and_si256(_mm256_srlv_epi64(v, shift), _mm256_set1_epi8(15));
    __m256i lo = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), v);
    __m256i hi = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table + 16)), v);
    return (pairs){_mm256_unpacklo_epi8(lo, hi), _mm256_unpackhi_epi8(lo, hi)};
}

/* ---- One vector ------------------------------------------------------------------ */

/* Stands between the rows of a block. clang otherwise keeps x in registers from one row to the next
 * and spills weights for that. gcc does not, and the asm only hinders it. */
#ifdef __clang__
#define NEXT_ROW(R) \
    if ((R) > 1) __asm__ volatile("" ::: "memory")
#else
#define NEXT_ROW(R) (void)(R)
#endif

/* acc[t][half] += w * x[t] for V vectors: eight weights of one row, and from each vector the eight
 * floats that they meet. acc[t][0] holds lanes 0..7 of the row's dot16, acc[t][1] lanes 8..15. */
TILE void add(const int V, __m256 acc[][2], const int half, __m256 w, const float *x) {
    UNROLL for (int t = 0; t < V; t++)
        acc[t][half] = _mm256_fmadd_ps(w, _mm256_load_ps(x + t * K3_GROUP), acc[t][half]);
}

/* Add the products of one group of bf16 of one row, at p, for V vectors. */
TILE void bf16_group(const int V, __m256 acc[][2], const uint16_t *p, const float *x) {
    __m256i v0 = load32(p), v1 = load32(p + 16);
    add(V, acc, 0, bf16_even(v0), x);
    add(V, acc, 1, bf16_even(v1), x + 8);
    add(V, acc, 0, bf16_odd(v0), x + 16);
    add(V, acc, 1, bf16_odd(v1), x + 24);
}

#define BF16_AHEAD 1024 /* how many bytes ahead a row is prefetched */

/* y[r] = dot16(W[r], x) for R rows of bf16. A last group of fewer than 32 is copied and padded with
 * +0. */
TILE void bf16_rows(const int R, float *y, const uint16_t *w, size_t ldw, size_t n,
                    const float *x) {
    __m256 acc[4][1][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0][0] = acc[r][0][1] = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + K3_GROUP <= n; i += K3_GROUP)
        UNROLL for (int r = 0; r < R; r++) {
            const uint16_t *p = w + (size_t)r * ldw + i;
            _mm_prefetch((const char *)p + BF16_AHEAD, _MM_HINT_T0);
            bf16_group(1, acc[r], p, x + i);
        }
    if (i < n)
        UNROLL for (int r = 0; r < R; r++) {
            uint16_t last[K3_GROUP] = {0};
            memcpy(last, w + (size_t)r * ldw + i, (n - i) * sizeof *last);
            bf16_group(1, acc[r], last, x + i);
        }
    UNROLL for (int r = 0; r < R; r++) y[r] = fold(acc[r][0][0], acc[r][0][1]);
}

/* The same for one group of MXFP4. */
TILE void mxfp4_group(const int V, __m256 acc[][2], const uint8_t *q, uint8_t code,
                      const float *x) {
    pairs w = mxfp4_pairs(q, code);
    add(V, acc, 0, bf16_odd(w.even), x);
    add(V, acc, 1, bf16_even(w.even), x + 8);
    add(V, acc, 0, bf16_odd(w.odd), x + 16);
    add(V, acc, 1, bf16_even(w.odd), x + 24);
}

/* y[r] = dot16(W[r], x) for R rows of MXFP4; R is 1 or 4. While a block of rows is read, the next
 * block is prefetched line by line into L1, and what lies 8 KiB further on into L2. Prefetches into
 * L1 alone would each wait for memory, and a core has few slots for loads that wait. */
TILE void mxfp4_rows(const int R, float *y, const uint8_t *q, const uint8_t *s, size_t n,
                     const float *x) {
    const size_t n_group = n / K3_GROUP, row = n / 2;
    const char *pf = (const char *)q + (size_t)R * row;
    const char *pfs = (const char *)s + (size_t)R * n_group;
    const float *x_end = x + n;
    __m256 acc[4][1][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0][0] = acc[r][0][1] = _mm256_setzero_ps();
    for (; x < x_end; x += K3_GROUP, q += 16, s++, pf += R * 16, pfs += R) {
        _mm_prefetch(pf, _MM_HINT_T0);
        _mm_prefetch(pf + 8192, _MM_HINT_T1);
        _mm_prefetch(pfs, _MM_HINT_T0);
        UNROLL for (int r = 0; r < R; r++) {
            mxfp4_group(1, acc[r], q + (size_t)r * row, s[(size_t)r * n_group], x);
            NEXT_ROW(R);
        }
    }
    UNROLL for (int r = 0; r < R; r++) y[r] = fold(acc[r][0][0], acc[r][0][1]);
}

/* ---- Few vectors ------------------------------------------------------------------ */

/* acc += W x over part p, for R rows of bf16 from p->row on. A row's last group of fewer than 32 is
 * copied and padded with +0. */
TILE void few_bf16_rows(const int R, const int V, __m256 acc[4][4][2], const few_part *p,
                        const float *x) {
    const size_t ldw = p->m->ldw, left = p->m->n - p->g0 * K3_GROUP;
    const uint16_t *w = (const uint16_t *)p->m->w + p->row * ldw + p->g0 * K3_GROUP;
    size_t n_full = left < p->n_group * K3_GROUP ? p->n_group - 1 : p->n_group;
    for (const float *end = x + n_full * V * K3_GROUP; x < end; x += V * K3_GROUP, w += K3_GROUP)
        UNROLL for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)(w + (size_t)r * ldw + p->ahead), _MM_HINT_T1);
            bf16_group(V, acc[r], w + (size_t)r * ldw, x);
            NEXT_ROW(R);
        }
    if (n_full < p->n_group)
        UNROLL for (int r = 0; r < R; r++) {
            uint16_t last[K3_GROUP] = {0};
            memcpy(last, w + (size_t)r * ldw, left % K3_GROUP * sizeof *last);
            bf16_group(V, acc[r], last, x);
        }
}

/* The same for MXFP4. Four groups of a row are one cache line, so every fourth group is prefetched. */
TILE void few_mxfp4_rows(const int R, const int V, __m256 acc[4][4][2], const few_part *p,
                         const float *x) {
    const size_t n = p->m->n, row = n / 2, s_row = n / K3_GROUP;
    const uint8_t *q = (const uint8_t *)p->m->w + p->row * row + p->g0 * K3_GROUP / 2;
    const uint8_t *s = p->m->s + p->row * s_row + p->g0, *end = s + p->n_group;
    UNROLL for (int r = 0; r < R; r++)
        _mm_prefetch((const char *)s + (size_t)r * s_row + p->ahead / K3_GROUP, _MM_HINT_T0);
    while (s < end) {
        const uint8_t *stop = end - s < 4 ? end : s + 4;
        UNROLL for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)q + (size_t)(R + r) * row, _MM_HINT_T0);
            _mm_prefetch((const char *)q + (size_t)r * row + p->ahead / 2, _MM_HINT_T1);
        }
        for (; s < stop; s++, q += K3_GROUP / 2, x += V * K3_GROUP)
            UNROLL for (int r = 0; r < R; r++) {
                mxfp4_group(V, acc[r], q + (size_t)r * row, s[(size_t)r * s_row], x);
                NEXT_ROW(R);
            }
    }
}

/* Load the accumulators of R rows and V vectors, add part p, store them. */
TILE void few_rows(const enum kind kind, const int R, const int V, float *acc, const few_part *p,
                   const float *x) {
    __m256 a[4][4][2];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < V; t++)
            UNROLL for (int h = 0; h < 2; h++)
                a[r][t][h] = _mm256_load_ps(acc + (r * V + t) * 16 + h * 8);
    if (kind == BF16) few_bf16_rows(R, V, a, p, x);
    else few_mxfp4_rows(R, V, a, p, x);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < V; t++)
            UNROLL for (int h = 0; h < 2; h++)
                _mm256_store_ps(acc + (r * V + t) * 16 + h * 8, a[r][t][h]);
}

/* ---- More vectors ----------------------------------------------------------------- */

TILE size_t tile_rows(size_t left) { return left < TILE_ROWS ? left : TILE_ROWS; }

/* One register tile: R rows x T vectors over n_group groups of the panel. */
TILE void tile(const int R, const int T, float *acc, const float *w, const float *x,
               size_t x_group, size_t n_group) {
    __m256 a[2][3][2];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) a[t][r][h] = _mm256_load_ps(acc + (t * R + r) * 16 + h * 8);
    for (size_t g = 0; g < n_group; g++, w += R * K3_GROUP, x += x_group)
        for (int part = 0; part < 4; part++) { /* evens 0..7, 8..15, odds 0..7, 8..15 */
            const int h = part & 1;
            __m256 xt[2];
            for (int t = 0; t < T; t++) xt[t] = _mm256_load_ps(x + t * K3_GROUP + part * 8);
            for (int r = 0; r < R; r++) {
                __m256 wr = _mm256_load_ps(w + r * K3_GROUP + part * 8);
                ONE_LOAD(wr);
                for (int t = 0; t < T; t++) a[t][r][h] = _mm256_fmadd_ps(wr, xt[t], a[t][r][h]);
            }
        }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++) _mm256_store_ps(acc + (t * R + r) * 16 + h * 8, a[t][r][h]);
}

/* Widen one group of bf16 to evens and odds; `left` elements remain in the row. */
TILE void widen_bf16(float *to, const uint16_t *p, size_t left) {
    uint16_t last[K3_GROUP] = {0};
    if (left < K3_GROUP) {
        memcpy(last, p, left * sizeof *last);
        p = last;
    }
    __m256i v0 = load32(p), v1 = load32(p + 16);
    _mm256_store_ps(to, bf16_even(v0));
    _mm256_store_ps(to + 8, bf16_even(v1));
    _mm256_store_ps(to + 16, bf16_odd(v0));
    _mm256_store_ps(to + 24, bf16_odd(v1));
}

TILE void widen_mxfp4(float *to, const uint8_t *p, uint8_t code) {
    pairs w = mxfp4_pairs(p, code);
    _mm256_store_ps(to, bf16_odd(w.even));
    _mm256_store_ps(to + 8, bf16_even(w.even));
    _mm256_store_ps(to + 16, bf16_odd(w.odd));
    _mm256_store_ps(to + 24, bf16_even(w.odd));
}

TILE void widen_f32(float *to, const float *p) {
    for (int k = 0; k < K3_GROUP; k += 8) _mm256_store_ps(to + k, _mm256_loadu_ps(p + k));
}

TILE float fold_lanes(const float *lanes) {
    return fold(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
}

/* ---- Chains ----------------------------------------------------------------------- */

TILE __m256 chain_load(const enum kind kind, const void *w, size_t at) {
    if (kind == F32) return _mm256_loadu_ps((const float *)w + at);
    __m256i v = _mm256_cvtepu16_epi32(load16((const uint16_t *)w + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
}

/* T vectors x J ymm of columns. A weight is loaded once for T vectors, a coefficient once
 * for J ymm. */
TILE void chain_tile(const enum kind kind, const int T, const int J, float *y, size_t ldy,
                     const void *w, size_t ldw, size_t j, size_t n_i, const float *c, size_t ldc) {
    __m256 a[4][8];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < J; v++) a[t][v] = _mm256_setzero_ps();
    for (size_t i = 0; i < n_i; i++) {
        __m256 ct[4];
        for (int t = 0; t < T; t++) ct[t] = _mm256_broadcast_ss(c + (size_t)t * ldc + i);
        for (int v = 0; v < J; v++) {
            __m256 wv = chain_load(kind, w, i * ldw + j + (size_t)v * 8);
            for (int t = 0; t < T; t++) a[t][v] = _mm256_fmadd_ps(wv, ct[t], a[t][v]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int v = 0; v < J; v++)
            _mm256_storeu_ps(y + (size_t)t * ldy + j + (size_t)v * 8, a[t][v]);
}

/* One column of one vector, for the last n_j % 8. */
TILE float chain_one(const enum kind kind, const void *w, size_t ldw, size_t j, size_t n_i,
                     const float *c) {
    float sum = 0.0f;
    for (size_t i = 0; i < n_i; i++) {
        float wi = kind == F32 ? ((const float *)w)[i * ldw + j]
                               : k3_bf16_f32(((const uint16_t *)w)[i * ldw + j]);
        sum = k3_fma(wi, c[i], sum);
    }
    return sum;
}

/* All columns for T vectors. */
TILE void chain_cols(const enum kind kind, const int T, const int J, float *y, size_t ldy,
                     const void *w, size_t ldw, size_t n_i, size_t n_j, const float *c,
                     size_t ldc) {
    size_t j = 0, step = (size_t)J * 8;
    for (; j + step <= n_j; j += step) chain_tile(kind, T, J, y, ldy, w, ldw, j, n_i, c, ldc);
    for (; j + 8 <= n_j; j += 8) chain_tile(kind, T, 1, y, ldy, w, ldw, j, n_i, c, ldc);
    for (; j < n_j; j++)
        for (int t = 0; t < T; t++)
            y[(size_t)t * ldy + j] = chain_one(kind, w, ldw, j, n_i, c + (size_t)t * ldc);
}

/* ---- KDA -------------------------------------------------------------------------- */

/* Columns v .. v + 8 J - 1 of S over all tokens. One sweep over k per token: the second
 * half of token t (write delta, read o) and the first half of token t + 1 (decay, read u)
 * touch the same S[k], so it is loaded and stored once. The tile of S, d x 32 floats for
 * J = 4, stays in L1 from the first token to the last. */
TILE void kda_cols(const int J, float *S, size_t v, const kda_args *p) {
    const size_t d = p->d;
    __m256 u[4];
    for (int j = 0; j < J; j++) u[j] = _mm256_setzero_ps();
    for (size_t i = 0; i < d; i++)
        for (int j = 0; j < J; j++) {
            float *at = S + i * d + v + (size_t)j * 8;
            __m256 s = _mm256_mul_ps(_mm256_loadu_ps(at), _mm256_broadcast_ss(p->a + i));
            u[j] = _mm256_fmadd_ps(s, _mm256_broadcast_ss(p->k + i), u[j]);
            _mm256_storeu_ps(at, s);
        }
    for (size_t t = 0; t < p->n_tok; t++) {
        const float *k = p->k + t * d, *q = p->q + t * d;
        const bool more = t + 1 < p->n_tok;
        __m256 delta[4], o[4];
        for (int j = 0; j < J; j++) {
            __m256 val = _mm256_loadu_ps(p->val + t * p->ldv + v + (size_t)j * 8);
            delta[j] = _mm256_mul_ps(_mm256_broadcast_ss(p->beta + t * p->ldb),
                                     _mm256_sub_ps(val, u[j]));
            o[j] = u[j] = _mm256_setzero_ps();
        }
        for (size_t i = 0; i < d; i++)
            for (int j = 0; j < J; j++) {
                float *at = S + i * d + v + (size_t)j * 8;
                __m256 s = _mm256_loadu_ps(at);
                s = _mm256_fmadd_ps(_mm256_broadcast_ss(k + i), delta[j], s);
                o[j] = _mm256_fmadd_ps(s, _mm256_broadcast_ss(q + i), o[j]);
                if (more) {
                    s = _mm256_mul_ps(s, _mm256_broadcast_ss(p->a + (t + 1) * d + i));
                    u[j] = _mm256_fmadd_ps(s, _mm256_broadcast_ss(k + d + i), u[j]);
                }
                _mm256_storeu_ps(at, s);
            }
        for (int j = 0; j < J; j++)
            _mm256_storeu_ps(p->o + t * p->ldo + v + (size_t)j * 8, o[j]);
    }
}

/* One column, for the last d % 8: the formula of NUMERICS 3 as it stands. */
static void kda_one(float *S, size_t v, const kda_args *p) {
    const size_t d = p->d;
    for (size_t t = 0; t < p->n_tok; t++) {
        const float *a = p->a + t * d, *k = p->k + t * d, *q = p->q + t * d;
        float u = 0.0f, sum = 0.0f;
        for (size_t i = 0; i < d; i++) {
            S[i * d + v] = S[i * d + v] * a[i];
            u = k3_fma(S[i * d + v], k[i], u);
        }
        float delta = p->beta[t * p->ldb] * (p->val[t * p->ldv + v] - u);
        for (size_t i = 0; i < d; i++) {
            S[i * d + v] = k3_fma(k[i], delta, S[i * d + v]);
            sum = k3_fma(S[i * d + v], q[i], sum);
        }
        p->o[t * p->ldo + v] = sum;
    }
}

static void avx2_kda(float *S, size_t d, size_t n_tok, const float *a, const float *k,
                     const float *q, const float *val, size_t ldv, const float *beta, size_t ldb,
                     float *o, size_t ldo) {
    kda_args p = {d, n_tok, ldv, ldb, ldo, a, k, q, val, beta, o};
    size_t v = 0;
    if (n_tok == 0) return;
    for (; v + 32 <= d; v += 32) kda_cols(4, S, v, &p);
    for (; v + 8 <= d; v += 8) kda_cols(1, S, v, &p);
    for (; v < d; v++) kda_one(S, v, &p);
}

/* ---- dot --------------------------------------------------------------------------- */

/* One group. A shuffle of two ymm picks evens or odds in the lane order 0 1 4 5 2 3 6 7,
 * the same for a and b; the caller sorts the sums. */
TILE void dot_group(__m256 acc[2], const float *a, const float *b) {
    for (int h = 0; h < 2; h++) {
        __m256 a0 = _mm256_loadu_ps(a + h * 16), a1 = _mm256_loadu_ps(a + h * 16 + 8);
        __m256 b0 = _mm256_loadu_ps(b + h * 16), b1 = _mm256_loadu_ps(b + h * 16 + 8);
        acc[h] = _mm256_fmadd_ps(_mm256_shuffle_ps(a0, a1, 0x88), _mm256_shuffle_ps(b0, b1, 0x88),
                                 acc[h]);
        acc[h] = _mm256_fmadd_ps(_mm256_shuffle_ps(a0, a1, 0xdd), _mm256_shuffle_ps(b0, b1, 0xdd),
                                 acc[h]);
    }
}

TILE __m256 sort_lanes(__m256 v) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8));
}

static float avx2_dot(const float *a, const float *b, size_t n) {
    __m256 acc[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    size_t i = 0;
    for (; i + K3_GROUP <= n; i += K3_GROUP) dot_group(acc, a + i, b + i);
    if (i < n) {
        float la[K3_GROUP] = {0}, lb[K3_GROUP] = {0};
        memcpy(la, a + i, (n - i) * sizeof *la);
        memcpy(lb, b + i, (n - i) * sizeof *lb);
        dot_group(acc, la, lb);
    }
    return fold(sort_lanes(acc[0]), sort_lanes(acc[1]));
}

/* ---- For `k3 bench` ----------------------------------------------------------------- */

static uint64_t avx2_read_stream(const void *p, size_t n_bytes) {
    const char *at = p;
    __m256i sum[8];
    uint64_t lane[4];
    for (int j = 0; j < 8; j++) sum[j] = _mm256_setzero_si256();
    for (size_t i = 0; i < n_bytes; i += 256)
        for (int j = 0; j < 8; j++) sum[j] = _mm256_add_epi64(sum[j], load32(at + i + j * 32));
    for (int j = 1; j < 8; j++) sum[0] = _mm256_add_epi64(sum[0], sum[j]);
    _mm256_storeu_si256((__m256i *)lane, sum[0]);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

/* 12 independent chains: two FMA ports of 4 or 5 cycles need 8 to 10, and 12 fit in the registers. */
static float avx2_peak_fma(uint64_t n, uint64_t *flops) {
    const __m256 m = _mm256_set1_ps(0.5f), c = _mm256_set1_ps(1.0f);
    __m256 a[12];
    for (int j = 0; j < 12; j++) a[j] = _mm256_set1_ps((float)(j + 3)); /* not 2: 2 stays 2 */
    for (uint64_t i = 0; i < n; i++)
        for (int j = 0; j < 12; j++) a[j] = _mm256_fmadd_ps(a[j], m, c);
    for (int j = 1; j < 12; j++) a[0] = _mm256_add_ps(a[0], a[j]);
    *flops = n * 12 * 8 * 2;
    return fold(a[0], a[1]);
}

static bool avx2_is_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const k3_kernels k3_kernels_avx2 = {
    .name = "avx2",
    .is_supported = avx2_is_supported,
    .matmul_bf16 = matmul_bf16,
    .matmul_f32 = matmul_f32,
    .matmul_mxfp4 = matmul_mxfp4,
    .chain_bf16 = chain_bf16,
    .chain_f32 = chain_f32,
    .kda = avx2_kda,
    .dot = avx2_dot,
    K3_ELEMENTWISE_KERNELS,
    .read_stream = avx2_read_stream,
    .peak_fma = avx2_peak_fma,
};
