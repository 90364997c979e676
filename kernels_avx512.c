/* kernels_avx512.c - the kernel table for AVX-512 (F, BW, DQ, VL), bits as in kernels.h.
 *
 * One zmm is the 16 accumulators of one dot16 (NUMERICS 2), so every kernel here is the reference
 * loop with "for l in 0..15" turned into one instruction. The rest of the code is there for speed:
 *
 *   batch 1   The weights are read once and never again, so memory sets the pace. Several
 *             rows are computed at a time, because one row alone waits 4 cycles for each fused
 *             multiply-add, and software prefetch walks linearly ahead of them: row
 *             blocks are contiguous, but the hardware prefetchers see many short streams
 *             that stop at every page.
 *   MXFP4     A group of 32 weights is one 16-byte load broadcast to the four quarters of
 *             a zmm, two variable shifts that bring nibbles down to bits 0..3, and two
 *             `vpermps` in a table of 16 floats that already has the scale in it: one
 *             table per scale code, 16 KiB, of which a model touches a few lines. No
 *             multiplication by the scale, and code 0 (subnormal) needs no special case.
 *   2 to 8    Each weight is decoded in registers, once for all vectors, in up to 24
 *             accumulators. Of bf16, 1024 columns of x stay in L1 while 24 rows pass.
 *   more      Rows are widened once into a small f32 panel on the stack that stays in L1,
 *             and a register tile of 6 rows x 4 vectors (24 accumulators, 6 weights, one
 *             x) runs over it. Six rows, so that x, which comes from L2, is read once
 *             per six rows. Accumulators wait in memory between panels. */
#define K3_KERNELS_ELEMENTWISE
#include "k3_common.h"
#include "kernels.h"

/* The register tile over a panel: its most rows and vectors, and every number of rows that it is
 * compiled for. */
#define TILE_ROWS         6
#define TILE_VECS         4
#define EACH_TILE_ROWS(M) M(6) M(4) M(2) M(1)

/* M(V, R): for V vectors R rows at a time. Each pair has one accumulator, and at most 24 fit in the
 * 32 registers beside x and weights. */
#define FEW_VECS          8
#define FEW_GROUPS_BF16   32 /* 1024 columns */
#define FEW_GROUPS_MXFP4  SIZE_MAX
#define EACH_FEW(M)       M(2, 4) M(3, 4) M(4, 4) M(5, 4) M(6, 4) M(7, 3) M(8, 3)

/* M(T, J): tiles of a chain, T vectors and J zmm of columns. */
#define EACH_CHAIN_TILE(M) M(8, 3) M(4, 4) M(1, 8)

#include "kernels_panel.h"

/* ---- Fold, and the MXFP4 tables ---------------------------------------------------- */

/* The fold of dot16: add lanes that are 8, 4, 2, 1 apart, then +0. */
TILE float fold(__m512 acc) {
    return fold_eight(_mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps(acc, 1)));
}

/* The f32 bits of each E2M1 magnitude (M05: 0.5, to M60: 6.0) times 2^(c-127). Only scale codes 0
 * and 1 give subnormals. */
#define M05(c) ((c) > 1 ? ((c) - 1u) << 23 : (c) ? 0x00400000u : 0x00200000u)
#define M10(c) ((c) ? (c) * 0x00800000u : 0x00400000u)
#define M15(c) ((c) ? (c) * 0x00800000u + 0x00400000u : 0x00600000u)
#define M20(c) (((c) + 1u) * 0x00800000u)
#define M30(c) (((c) + 1u) * 0x00800000u + 0x00400000u)
#define M40(c) (((c) + 2u) * 0x00800000u)
#define M60(c) (((c) + 2u) * 0x00800000u + 0x00400000u)
#define NEG    0x80000000u
#define CODE(c)                                                                              \
    { 0, M05(c), M10(c), M15(c), M20(c), M30(c), M40(c), M60(c), NEG, NEG | M05(c),          \
      NEG | M10(c), NEG | M15(c), NEG | M20(c), NEG | M30(c), NEG | M40(c), NEG | M60(c) }
/* mxfp4_table[code][nibble]: the weight's f32. A checked model has no codes 253..255; with their
 * rows a lookup of any byte stays inside the table. */
static const uint32_t mxfp4_table[256][16] __attribute__((aligned(64))) = {
    CODE64(0u), CODE64(64u), CODE64(128u), CODE64(192u)};

/* ---- One vector ------------------------------------------------------------------ */

/* A 32-bit word of bf16 is an even and an odd element: shift for one, mask for the other. */
TILE __m512 bf16_even(__m512i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
TILE __m512 bf16_odd(__m512i w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
}

/* How many bytes ahead a row is prefetched: into L2 first, later into L1. */
#define BF16_AHEAD_L1 768
#define BF16_AHEAD_L2 2048

/* y[r] = dot16(W[r], x) for R rows of bf16. Of a last group of fewer than 32 only that many are
 * loaded. */
TILE void bf16_rows(const int R, float *y, const uint16_t *w, size_t ldw, size_t n,
                    const float *x) {
    __m512 acc[8];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    size_t i = 0;
    for (; i + K3_GROUP <= n; i += K3_GROUP) {
        __m512 even = _mm512_load_ps(x + i), odd = _mm512_load_ps(x + i + 16);
        for (int r = 0; r < R; r++) {
            const uint16_t *p = w + (size_t)r * ldw + i;
            _mm_prefetch((const char *)p + BF16_AHEAD_L1, _MM_HINT_T0);
            _mm_prefetch((const char *)p + BF16_AHEAD_L2, _MM_HINT_T1);
            __m512i v = _mm512_loadu_si512(p);
            acc[r] = _mm512_fmadd_ps(bf16_even(v), even, acc[r]);
            acc[r] = _mm512_fmadd_ps(bf16_odd(v), odd, acc[r]);
        }
    }
    if (i < n) {
        __mmask32 m = (__mmask32)((1u << (n - i)) - 1);
        __m512 even = _mm512_load_ps(x + i), odd = _mm512_load_ps(x + i + 16);
        for (int r = 0; r < R; r++) {
            __m512i v = _mm512_maskz_loadu_epi16(m, w + (size_t)r * ldw + i);
            acc[r] = _mm512_fmadd_ps(bf16_even(v), even, acc[r]);
            acc[r] = _mm512_fmadd_ps(bf16_odd(v), odd, acc[r]);
        }
    }
    for (int r = 0; r < R; r++) y[r] = fold(acc[r]);
}

/* Lane 4i + j of the MXFP4 batch-1 accumulators is lane 4j + i of dot16: quarter i of the
 * zmm has byte i of each 32-bit word in its low bits. A transpose is its own inverse, so
 * the same permutation takes x there and the sums back. */
TILE __m512 transpose_lanes(__m512 v) {
    const __m512i idx = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(idx, v);
}

/* Decode the 32 weights of one group of one row and add their products to the row's accumulators. */
TILE __m512 mxfp4_group(__m512 acc, const uint8_t *q, uint8_t code, __m512 even, __m512 odd,
                        __m512i low, __m512i high) {
    __m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)q));
    __m512 table = _mm512_load_ps(mxfp4_table[code]);
    acc = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(v, low), table), even, acc);
    return _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srlv_epi32(v, high), table), odd, acc);
}

/* y[r] = dot16(W[r], x) for R rows of MXFP4; R is 1 or 4. While a block of rows is read, the next
 * block is prefetched line by line into L1, and what lies 8 KiB further on into L2. Prefetches into
 * L1 alone would each wait for memory, and a core has few slots for loads that wait. */
TILE void mxfp4_rows(const int R, float *y, const uint8_t *q, const uint8_t *s, size_t n,
                     const float *x) {
    const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    const size_t n_group = n / K3_GROUP, row = n / 2;
    const uint8_t *q2 = q + 2 * row, *s2 = s + 2 * n_group;
    const char *pf = (const char *)q + (size_t)R * row;
    const char *pfs = (const char *)s + (size_t)R * n_group;
    const float *x_end = x + n;
    __m512 acc[4];
    for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
    for (; x < x_end; x += K3_GROUP, q += 16, q2 += 16, s++, s2++, pf += R * 16, pfs += R) {
        __m512 even = transpose_lanes(_mm512_load_ps(x));
        __m512 odd = transpose_lanes(_mm512_load_ps(x + 16));
        _mm_prefetch(pf, _MM_HINT_T0);
        _mm_prefetch(pf + 8192, _MM_HINT_T1);
        _mm_prefetch(pfs, _MM_HINT_T0);
        acc[0] = mxfp4_group(acc[0], q, *s, even, odd, low, high);
        if (R > 1) {
            acc[1] = mxfp4_group(acc[1], q + row, s[n_group], even, odd, low, high);
            acc[2] = mxfp4_group(acc[2], q2, *s2, even, odd, low, high);
            acc[3] = mxfp4_group(acc[3], q2 + row, s2[n_group], even, odd, low, high);
        }
    }
    for (int r = 0; r < R; r++) y[r] = fold(transpose_lanes(acc[r]));
}

/* ---- Few vectors ------------------------------------------------------------------ */

/* acc[r][t] += w[r] * x[t] for R rows and V vectors, over one half of a group: its evens, or its
 * odds. */
TILE void add(const int R, const int V, __m512 acc[4][8], const __m512 w[4], const float *x) {
    UNROLL for (int t = 0; t < V; t++) {
        __m512 xt = _mm512_load_ps(x + t * K3_GROUP);
        ONE_LOAD(xt);
        UNROLL for (int r = 0; r < R; r++) acc[r][t] = _mm512_fmadd_ps(w[r], xt, acc[r][t]);
    }
}

/* acc += W x over part p, for R rows of bf16 from p->row on. Of a row's last group of fewer than 32
 * only that many are loaded. */
TILE void few_bf16_rows(const int R, const int V, __m512 acc[4][8], const few_part *p,
                        const float *x) {
    const size_t ldw = p->m->ldw, left = p->m->n - p->g0 * K3_GROUP;
    const uint16_t *w = (const uint16_t *)p->m->w + p->row * ldw + p->g0 * K3_GROUP;
    size_t n_full = left < p->n_group * K3_GROUP ? p->n_group - 1 : p->n_group;
    __m512 even[4], odd[4];
    for (const float *end = x + n_full * V * K3_GROUP; x < end; x += V * K3_GROUP, w += K3_GROUP) {
        UNROLL for (int r = 0; r < R; r++) {
            __m512i v = _mm512_loadu_si512(w + (size_t)r * ldw);
            _mm_prefetch((const char *)(w + (size_t)r * ldw + p->ahead), _MM_HINT_T1);
            even[r] = bf16_even(v);
            odd[r] = bf16_odd(v);
        }
        add(R, V, acc, even, x);
        add(R, V, acc, odd, x + 16);
    }
    if (n_full < p->n_group) {
        __mmask32 mask = (__mmask32)((1u << left % K3_GROUP) - 1);
        UNROLL for (int r = 0; r < R; r++) {
            __m512i v = _mm512_maskz_loadu_epi16(mask, w + (size_t)r * ldw);
            even[r] = bf16_even(v);
            odd[r] = bf16_odd(v);
        }
        add(R, V, acc, even, x);
        add(R, V, acc, odd, x + 16);
    }
}

/* The same for MXFP4, whose parts are whole rows (FEW_GROUPS_MXFP4). Each byte is widened to a
 * 32-bit word, so that the lanes come in the order of dot16; as mxfp4_rows() does it, every vector
 * would need two permutations. Prefetches are those of mxfp4_rows(). */
TILE void few_mxfp4_rows(const int R, const int V, __m512 acc[4][8], const few_part *p,
                         const float *x) {
    const size_t row = p->m->n / 2, n_group = p->n_group;
    const uint8_t *q = (const uint8_t *)p->m->w + p->row * row;
    const uint8_t *s = p->m->s + p->row * n_group;
    const char *pf = (const char *)q + (size_t)R * row;
    const char *pfs = (const char *)s + (size_t)R * n_group;
    for (const uint8_t *end = s + n_group; s < end; s++, q += 16, pf += R * 16, pfs += R) {
        __m512 even[4], odd[4];
        _mm_prefetch(pf, _MM_HINT_T0);
        _mm_prefetch(pf + 8192, _MM_HINT_T1);
        _mm_prefetch(pfs, _MM_HINT_T0);
        UNROLL for (int r = 0; r < R; r++) {
            __m512 table = _mm512_load_ps(mxfp4_table[s[(size_t)r * n_group]]);
            __m512i v =
                _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(q + (size_t)r * row)));
            even[r] = _mm512_permutexvar_ps(v, table);
            odd[r] = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table);
        }
        add(R, V, acc, even, x);
        add(R, V, acc, odd, x + 16);
        x += V * K3_GROUP;
    }
}

/* Load the accumulators of R rows and V vectors, add part p, store them. */
TILE void few_rows(const enum kind kind, const int R, const int V, float *acc, const few_part *p,
                   const float *x) {
    __m512 a[4][8];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < V; t++) a[r][t] = _mm512_load_ps(acc + (r * V + t) * 16);
    if (kind == BF16) few_bf16_rows(R, V, a, p, x);
    else few_mxfp4_rows(R, V, a, p, x);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int t = 0; t < V; t++) _mm512_store_ps(acc + (r * V + t) * 16, a[r][t]);
}

/* ---- More vectors ----------------------------------------------------------------- */

TILE size_t tile_rows(size_t left) {
    return left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* One register tile: R rows x T vectors over n_group groups of the panel. */
TILE void tile(const int R, const int T, float *acc, const float *w, const float *x,
               size_t x_group, size_t n_group) {
    __m512 a[4][6];
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) a[t][r] = _mm512_load_ps(acc + (t * R + r) * 16);
    for (size_t g = 0; g < n_group; g++, w += R * K3_GROUP, x += x_group)
        for (int half = 0; half < 32; half += 16) {
            __m512 wr[6];
            for (int r = 0; r < R; r++) wr[r] = _mm512_load_ps(w + r * K3_GROUP + half);
            for (int t = 0; t < T; t++) {
                __m512 xt = _mm512_load_ps(x + t * K3_GROUP + half);
                for (int r = 0; r < R; r++) a[t][r] = _mm512_fmadd_ps(wr[r], xt, a[t][r]);
            }
        }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) _mm512_store_ps(acc + (t * R + r) * 16, a[t][r]);
}

/* Widen one group of bf16 to evens and odds; `left` elements remain in the row. */
TILE void widen_bf16(float *to, const uint16_t *p, size_t left) {
    __m512i v = left >= K3_GROUP
                    ? _mm512_loadu_si512(p)
                    : _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), p);
    _mm512_store_ps(to, bf16_even(v));
    _mm512_store_ps(to + 16, bf16_odd(v));
}

TILE void widen_mxfp4(float *to, const uint8_t *p, uint8_t code) {
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512 table = _mm512_load_ps(mxfp4_table[code]);
    _mm512_store_ps(to, _mm512_permutexvar_ps(v, table));
    _mm512_store_ps(to + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table));
}

TILE void widen_f32(float *to, const float *p) {
    _mm512_store_ps(to, _mm512_loadu_ps(p));
    _mm512_store_ps(to + 16, _mm512_loadu_ps(p + 16));
}

TILE float fold_lanes(const float *lanes) { return fold(_mm512_load_ps(lanes)); }

/* ---- Chains ----------------------------------------------------------------------- */

/* 16 weights from element `at` on; those outside of the mask are 0. */
TILE __m512 chain_load(const enum kind kind, const void *w, size_t at, __mmask16 mask) {
    if (kind == F32) return _mm512_maskz_loadu_ps(mask, (const float *)w + at);
    __m256i v = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)w + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/* T vectors x J zmm of columns; where J is 1, `mask` says which columns there are. A weight is
 * loaded once for T vectors, a coefficient once for J zmm. */
TILE void chain_tile(const enum kind kind, const int T, const int J, __mmask16 mask, float *y,
                     size_t ldy, const void *w, size_t ldw, size_t j, size_t n_i, const float *c,
                     size_t ldc) {
    __m512 a[8][8];
    for (int t = 0; t < T; t++)
        for (int v = 0; v < J; v++) a[t][v] = _mm512_setzero_ps();
    for (size_t i = 0; i < n_i; i++) {
        __m512 wv[8];
        for (int v = 0; v < J; v++)
            wv[v] = chain_load(kind, w, i * ldw + j + (size_t)v * 16, J == 1 ? mask : 0xffff);
        for (int t = 0; t < T; t++) {
            __m512 ct = _mm512_set1_ps(c[(size_t)t * ldc + i]);
            for (int v = 0; v < J; v++) a[t][v] = _mm512_fmadd_ps(wv[v], ct, a[t][v]);
        }
    }
    for (int t = 0; t < T; t++)
        for (int v = 0; v < J; v++)
            _mm512_mask_storeu_ps(y + (size_t)t * ldy + j + (size_t)v * 16,
                                  J == 1 ? mask : 0xffff, a[t][v]);
}

/* All columns for T vectors. */
TILE void chain_cols(const enum kind kind, const int T, const int J, float *y, size_t ldy,
                     const void *w, size_t ldw, size_t n_i, size_t n_j, const float *c,
                     size_t ldc) {
    size_t j = 0, step = (size_t)J * 16;
    for (; j + step <= n_j; j += step)
        chain_tile(kind, T, J, 0xffff, y, ldy, w, ldw, j, n_i, c, ldc);
    for (; j < n_j; j += 16) {
        __mmask16 mask = n_j - j < 16 ? (__mmask16)((1u << (n_j - j)) - 1) : 0xffff;
        chain_tile(kind, T, 1, mask, y, ldy, w, ldw, j, n_i, c, ldc);
    }
}

/* ---- KDA -------------------------------------------------------------------------- */

/* Columns v .. v + 16 J - 1 of S over all tokens. One sweep over k per token: the second
 * half of token t (write delta, read o) and the first half of token t + 1 (decay, read u)
 * touch the same S[k], so it is loaded and stored once. The tile of S, d x 64 floats for
 * J = 4, stays in L1 from the first token to the last. */
TILE void kda_cols(const int J, __mmask16 mask, float *S, size_t v, const kda_args *p) {
    const size_t d = p->d;
    __m512 u[4];
    for (int j = 0; j < J; j++) u[j] = _mm512_setzero_ps();
    for (size_t i = 0; i < d; i++)
        for (int j = 0; j < J; j++) {
            float *at = S + i * d + v + (size_t)j * 16;
            __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, at), _mm512_set1_ps(p->a[i]));
            u[j] = _mm512_fmadd_ps(s, _mm512_set1_ps(p->k[i]), u[j]);
            _mm512_mask_storeu_ps(at, mask, s);
        }
    for (size_t t = 0; t < p->n_tok; t++) {
        const float *k = p->k + t * d, *q = p->q + t * d;
        const bool more = t + 1 < p->n_tok;
        __m512 delta[4], o[4];
        for (int j = 0; j < J; j++) {
            __m512 val = _mm512_maskz_loadu_ps(mask, p->val + t * p->ldv + v + (size_t)j * 16);
            delta[j] = _mm512_mul_ps(_mm512_set1_ps(p->beta[t * p->ldb]), _mm512_sub_ps(val, u[j]));
            o[j] = u[j] = _mm512_setzero_ps();
        }
        for (size_t i = 0; i < d; i++)
            for (int j = 0; j < J; j++) {
                float *at = S + i * d + v + (size_t)j * 16;
                __m512 s = _mm512_maskz_loadu_ps(mask, at);
                s = _mm512_fmadd_ps(_mm512_set1_ps(k[i]), delta[j], s);
                o[j] = _mm512_fmadd_ps(s, _mm512_set1_ps(q[i]), o[j]);
                if (more) {
                    s = _mm512_mul_ps(s, _mm512_set1_ps(p->a[(t + 1) * d + i]));
                    u[j] = _mm512_fmadd_ps(s, _mm512_set1_ps(k[d + i]), u[j]);
                }
                _mm512_mask_storeu_ps(at, mask, s);
            }
        for (int j = 0; j < J; j++)
            _mm512_mask_storeu_ps(p->o + t * p->ldo + v + (size_t)j * 16, mask, o[j]);
    }
}

static void avx512_kda(float *S, size_t d, size_t n_tok, const float *a, const float *k,
                       const float *q, const float *val, size_t ldv, const float *beta,
                       size_t ldb, float *o, size_t ldo) {
    kda_args p = {d, n_tok, ldv, ldb, ldo, a, k, q, val, beta, o};
    size_t v = 0;
    if (n_tok == 0) return;
    for (; v + 64 <= d; v += 64) kda_cols(4, 0xffff, S, v, &p);
    for (; v < d; v += 16)
        kda_cols(1, d - v < 16 ? (__mmask16)((1u << (d - v)) - 1) : 0xffff, S, v, &p);
}

/* ---- dot --------------------------------------------------------------------------- */

/* Evens and odds of 32 plain floats. */
TILE __m512 pick_even(__m512 lo, __m512 hi) {
    const __m512i idx =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(lo, idx, hi);
}
TILE __m512 pick_odd(__m512 lo, __m512 hi) {
    const __m512i idx =
        _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(lo, idx, hi);
}

static float avx512_dot(const float *a, const float *b, size_t n) {
    __m512 acc = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += K3_GROUP) {
        uint32_t m = n - i < K3_GROUP ? (1u << (n - i)) - 1 : 0xffffffffu;
        __mmask16 m_lo = (__mmask16)m, m_hi = (__mmask16)(m >> 16);
        __m512 a_lo = _mm512_maskz_loadu_ps(m_lo, a + i);
        __m512 a_hi = m_hi ? _mm512_maskz_loadu_ps(m_hi, a + i + 16) : _mm512_setzero_ps();
        __m512 b_lo = _mm512_maskz_loadu_ps(m_lo, b + i);
        __m512 b_hi = m_hi ? _mm512_maskz_loadu_ps(m_hi, b + i + 16) : _mm512_setzero_ps();
        acc = _mm512_fmadd_ps(pick_even(a_lo, a_hi), pick_even(b_lo, b_hi), acc);
        acc = _mm512_fmadd_ps(pick_odd(a_lo, a_hi), pick_odd(b_lo, b_hi), acc);
    }
    return fold(acc);
}

/* ---- For `k3 bench` ----------------------------------------------------------------- */

static uint64_t avx512_read_stream(const void *p, size_t n_bytes) {
    const char *at = p;
    __m512i sum[8];
    uint64_t lane[8], total = 0;
    for (int j = 0; j < 8; j++) sum[j] = _mm512_setzero_si512();
    for (size_t i = 0; i < n_bytes; i += 512)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm512_add_epi64(sum[j], _mm512_load_si512(at + i + j * 64));
    for (int j = 1; j < 8; j++) sum[0] = _mm512_add_epi64(sum[0], sum[j]);
    _mm512_storeu_si512(lane, sum[0]);
    for (int j = 0; j < 8; j++) total += lane[j];
    return total;
}

/* 16 independent chains: two FMA ports of 4 cycles need 8; with twice as many neither ever waits. */
static float avx512_peak_fma(uint64_t n, uint64_t *flops) {
    const __m512 m = _mm512_set1_ps(0.5f), c = _mm512_set1_ps(1.0f);
    __m512 a[16];
    for (int j = 0; j < 16; j++) a[j] = _mm512_set1_ps((float)(j + 3)); /* not 2: 2 stays 2 */
    for (uint64_t i = 0; i < n; i++)
        for (int j = 0; j < 16; j++) a[j] = _mm512_fmadd_ps(a[j], m, c);
    for (int j = 1; j < 16; j++) a[0] = _mm512_add_ps(a[0], a[j]);
    *flops = n * 16 * 16 * 2;
    return fold(a[0]);
}

static bool avx512_is_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const k3_kernels k3_kernels_avx512 = {
    .name = "avx512",
    .is_supported = avx512_is_supported,
    .matmul_bf16 = matmul_bf16,
    .matmul_f32 = matmul_f32,
    .matmul_mxfp4 = matmul_mxfp4,
    .chain_bf16 = chain_bf16,
    .chain_f32 = chain_f32,
    .kda = avx512_kda,
    .dot = avx512_dot,
    K3_ELEMENTWISE_KERNELS,
    .read_stream = avx512_read_stream,
    .peak_fma = avx512_peak_fma,
};
