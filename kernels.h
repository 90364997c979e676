/* kernels.h - the kernel contract: what every instruction set must compute, to the bit.
 *
 * docs/NUMERICS.md is the law; this header is its C. Three parts:
 *   1. exp, sigmoid, tanh and the int64 expert term, inline, for C and CUDA alike;
 *   2. the packed layout of activations and the table of functions;
 *   3. the elementwise kernels, written once here and compiled by each kernels_*.c
 *      with that file's flags (define K3_KERNELS_ELEMENTWISE before including).
 *
 * Kernels cannot fail and own nothing: no malloc, no errno, no threads, sizes checked
 * by the caller. They may read exactly the bytes named, never past them.
 */
#ifndef K3_KERNELS_H
#define K3_KERNELS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "k3 promises one hash on every machine: build without -ffast-math and -Ofast"
#endif
#if !defined(__CUDACC__) && defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "k3 needs FLT_EVAL_METHOD 0 (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

#ifdef __CUDACC__
#define K3_INLINE __host__ __device__ static inline
#else
#define K3_INLINE static inline
#endif

/* ---- 1. Scalar definitions (NUMERICS 4, 5) --------------------------------------- */

K3_INLINE float k3_fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

K3_INLINE float k3_bits_f32(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    union { uint32_t u; float f; } v;
    v.u = u;
    return v.f;
#endif
}

K3_INLINE uint32_t k3_f32_bits(float f) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    union { float f; uint32_t u; } v;
    v.f = f;
    return v.u;
#endif
}

/* bf16 is the upper half of an f32. */
K3_INLINE float k3_bf16_f32(uint16_t b) { return k3_bits_f32((uint32_t)b << 16); }

/* 2^e as an f32, for -126 <= e <= 127. */
K3_INLINE float k3_pow2(int e) { return k3_bits_f32((uint32_t)(e + 127) << 23); }

/* e^x to 0.9 ulp: x = n ln 2 + r, a polynomial in r, and 2^n in two factors so that
 * the ends stay exact: exp(0) = 1, exp(89) = inf, exp(-104) = 0. No NaN may enter. */
K3_INLINE float k3_exp(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float n = rintf(x * 0x1.715476p+0f);
    float r = k3_fma(n, -0x1.62e400p-1f, x);
    r = k3_fma(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6850e4p-10f;
    p = k3_fma(p, r, 0x1.123bccp-7f);
    p = k3_fma(p, r, 0x1.555b98p-5f);
    p = k3_fma(p, r, 0x1.55548ep-3f);
    p = k3_fma(p, r, 0x1.fffff8p-2f);
    p = k3_fma(p, r, 1.0f);
    p = k3_fma(p, r, 1.0f);
    int i = (int)n;
    int h = (i - (i & 1)) / 2; /* floor(i / 2) */
    return (p * k3_pow2(h)) * k3_pow2(i - h);
}

/* 1 / (1 + e^-x) to 2.4 ulp. */
K3_INLINE float k3_sigmoid(float x) {
    float t = k3_exp(-fabsf(x));
    return (x < 0.0f ? t : 1.0f) / (1.0f + t);
}

/* tanh to 1.4 ulp: odd polynomial below 0.625, 1 - 2 / (e^2a + 1) above. Both are computed for
 * every x, so that the loop vectorises. */
K3_INLINE float k3_tanh(float x) {
    float a = fabsf(x);
    float s = a * a;
    float p = -0x1.75e1d4p-8f;
    p = k3_fma(p, s, 0x1.52269cp-6f);
    p = k3_fma(p, s, -0x1.b83c5ap-5f);
    p = k3_fma(p, s, 0x1.110726p-3f);
    p = k3_fma(p, s, -0x1.555532p-2f);
    float low = k3_fma(p * s, a, a);
    float high = 1.0f - 2.0f / (k3_exp(a + a) + 1.0f);
    return copysignf(a < 0.625f ? low : high, x);
}

K3_INLINE float k3_silu(float x) { return x * k3_sigmoid(x); }

/* SiTU-GLU (K3-SPEC 3.2): b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2). */
K3_INLINE float k3_situ(float g, float u, float b1, float b2) {
    float h = (b1 * k3_tanh(g / b1)) * k3_sigmoid(g);
    float v = b2 * k3_tanh(u / b2);
    return h * v;
}

/* One expert term in steps of 2^-40 (NUMERICS 5). The caller has checked |t| < 2^17, so the product
 * is exact and fits an int64; llrintf rounds it to nearest even. */
K3_INLINE int64_t k3_q40(float t) {
#ifdef __CUDA_ARCH__
    return __float2ll_rn(t * 0x1p40f);
#else
    return (int64_t)llrintf(t * 0x1p40f);
#endif
}

/* The value of one E2M1 nibble; 8 is -0. */
K3_INLINE float k3_e2m1(unsigned nibble) {
    static const float mag[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float m = mag[nibble & 7];
    return nibble & 8 ? -m : m;
}

/* 2^(code-127) for an E8M0 code of at most 252; code 0 is the subnormal 2^-127. */
K3_INLINE float k3_e8m0(uint8_t code) {
    return k3_bits_f32(code ? (uint32_t)code << 23 : 0x00400000u);
}
#define K3_SCALE_MAX 252

#ifndef __CUDACC__

/* ---- 2. Layout and table ----------------------------------------------------------
 *
 * Packed activations. dot16 (NUMERICS 2) takes 32 elements at a time, evens then odds.
 * A batch of `batch` vectors of length n is therefore stored in groups of 32 floats:
 * 16 evens, 16 odds, padded with +0 to npad = k3_pad(n), and interleaved by vector in
 * blocks of K3_XBLOCK, so that a register tile of several vectors reads one line of
 * memory after another:
 *
 *     xp[block of 8 vectors][group of 32 elements][vector in block][16 evens | 16 odds]
 *
 * The last block holds batch % 8 vectors when that is not 0. A batch of one is the plain
 * evens-and-odds split. Total size: batch * npad floats; xp is 64-byte aligned. */
#define K3_GROUP  32
#define K3_XBLOCK 8

/* A multiple of the number of rows that any kernel computes at a time. Callers cut work into
 * multiples of it, so that only the last piece of a matrix ends inside a tile. */
#define K3_KERNEL_ROWS 6

static inline size_t k3_pad(size_t n) { return (n + (K3_GROUP - 1)) & ~(size_t)(K3_GROUP - 1); }

/* Offset of the 32 floats of group `g` of vector `t`. */
static inline size_t k3_xp_group(size_t npad, size_t batch, size_t t, size_t g) {
    size_t t0 = t - t % K3_XBLOCK;
    size_t in_block = batch - t0 < K3_XBLOCK ? batch - t0 : K3_XBLOCK;
    return t0 * npad + (g * in_block + (t - t0)) * K3_GROUP;
}

/* Place of element k (0..31) inside its group. */
static inline size_t k3_xp_lane(size_t k) { return (k & 1) * 16 + (k >> 1); }

typedef struct k3_kernels {
    const char *name;
    bool (*is_supported)(void); /* can this CPU run these kernels */

    /* Inner products, NUMERICS 2. One call is one thread's rows.
     *
     *   y[t * ldy + r] = dot16(W[r], x[t])          r < n_rows, t < batch
     *
     * Shapes  xp: packed f32[batch][n] (above), 64-byte aligned
     *         y:  f32, ldy >= n_rows
     *   bf16  w: u16[n_rows][ldw], ldw >= n, 2-byte aligned; only [r][0..n) is read
     *   f32   w: packed rows, f32[n_rows][k3_pad(n)] in evens-and-odds groups
     *   mxfp4 q: u8[n_rows][n/2], s: u8[n_rows][n/32], any alignment; n % 32 == 0;
     *         low nibble = even column; s <= K3_SCALE_MAX
     * Source  K3-SPEC 2.5, NUMERICS 2 */
    void (*matmul_bf16)(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                        size_t n, const float *xp, size_t batch);
    void (*matmul_f32)(float *y, size_t ldy, const float *w, size_t n_rows, size_t n,
                       const float *xp, size_t batch);
    void (*matmul_mxfp4)(float *y, size_t ldy, const uint8_t *q, const uint8_t *s, size_t n_rows,
                         size_t n, const float *xp, size_t batch);

    /* Chains (NUMERICS 3): one accumulator per output, rows in order, from +0.
     *
     *   y[t * ldy + j] = fma(W[i][j], c[t * ldc + i], y[t * ldy + j])   i = 0 .. n_i - 1
     *
     * Shapes  w: [n_i][ldw], j < n_j <= ldw   c: f32[batch][ldc >= n_i]   y: f32[batch][ldy]
     *         n_i may be 0: y is +0
     * Source  q_abs and ctx of the absorbed MLA */
    void (*chain_bf16)(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_i, size_t n_j,
                       const float *c, size_t ldc, size_t batch);
    void (*chain_f32)(float *y, size_t ldy, const float *w, size_t ldw, size_t n_i, size_t n_j,
                      const float *c, size_t ldc, size_t batch);

    /* The KDA recurrence of one head over n_tok tokens (NUMERICS 3), S carried.
     *
     * Shapes  S: f32[d][d], S[k][v]
     *         a, k, q: f32[n_tok][d] decay, khat, qhat   val: f32[n_tok][ldv], o: f32[n_tok][ldo]
     *         beta: f32[n_tok][ldb], element 0 of each row is read
     * Source  K3-SPEC 3.3 step 6 */
    void (*kda)(float *S, size_t d, size_t n_tok, const float *a, const float *k, const float *q,
                const float *val, size_t ldv, const float *beta, size_t ldb, float *o, size_t ldo);

    /* dot16 of two plain (unpacked) vectors. */
    float (*dot)(const float *a, const float *b, size_t n);

    /* Elementwise, f32[n] each; y may be x. */
    void (*pack)(float *xp, size_t batch, size_t t, const float *x, size_t n); /* vector t of xp */
    void (*widen)(float *y, const uint16_t *x, size_t n);                 /* bf16 to f32        */
    void (*add)(float *y, const float *x, size_t n);                      /* y = y + x          */
    void (*scale)(float *y, const float *x, float r, size_t n);           /* y = x * r          */
    void (*scale2)(float *y, const float *x, float r, const float *w, size_t n); /* (x * r) * w */
    void (*divide)(float *y, const float *x, float z, size_t n);          /* y = x / z          */
    void (*axpy)(float *y, float p, const float *x, size_t n);            /* y = fma(p, x, y)   */
    void (*exp_sub)(float *y, const float *x, float m, size_t n);         /* y = exp(x - m)     */
    void (*sigmoid)(float *y, const float *x, size_t n);
    void (*mul_sigmoid)(float *y, const float *x, const float *g, size_t n); /* x * sigmoid(g) */
    void (*situ)(float *y, const float *g, const float *u, float b1, float b2, size_t n);

    /* silu of the causal conv: w: f32[n][4]; r[j]: the row j - 3 positions away, oldest first. */
    void (*conv_silu)(float *y, const float *const r[4], const float *w, size_t n);
    /* KDA decay: y = exp(lower_bound * sigmoid(A * (f + dt_bias))). */
    void (*kda_decay)(float *y, const float *f, const float *dt_bias, float A, float lower_bound,
                      size_t n);

    /* q[i] += q40(w * y[i]) (NUMERICS 5). Returns n, or the first i with |w * y[i]| not below
     * 2^17; then q is unspecified. */
    size_t (*add_q40)(int64_t *q, const float *y, float w, size_t n);
    void (*q40_f32)(float *y, const int64_t *q, size_t n); /* y = (f32)q * 2^-40 */

    bool (*is_finite)(const float *x, size_t n);

    /* For `k3 bench`. read_stream reads `n_bytes` (a multiple of 4096, 64-byte aligned) with loads
     * of the set's full width. peak_fma runs n independent rounds of full-width FMAs and writes the
     * floating-point operations done to *flops. Both return a value that depends on all of the
     * work, so that the compiler leaves none out. */
    uint64_t (*read_stream)(const void *p, size_t n_bytes);
    float (*peak_fma)(uint64_t n, uint64_t *flops);
} k3_kernels;

extern const k3_kernels k3_kernels_ref;
extern const k3_kernels k3_kernels_avx2;   /* linked on x86-64  */
extern const k3_kernels k3_kernels_avx512; /* linked on x86-64  */
extern const k3_kernels k3_kernels_neon;   /* linked on aarch64 */

/* A linked table by name, supported or not; NULL when this build lacks it. */
const k3_kernels *k3_kernels_find(const char *name);

/* ---- 3. Elementwise kernels ------------------------------------------------------- */

#ifdef K3_KERNELS_ELEMENTWISE

static void ew_pack(float *xp, size_t batch, size_t t, const float *x, size_t n) {
    size_t npad = k3_pad(n), n_full = n / K3_GROUP;
    for (size_t g = 0; g < n_full; g++) {
        float *to = xp + k3_xp_group(npad, batch, t, g);
        const float *from = x + g * K3_GROUP;
        for (size_t l = 0; l < 16; l++) to[l] = from[2 * l];
        for (size_t l = 0; l < 16; l++) to[16 + l] = from[2 * l + 1];
    }
    if (n_full * K3_GROUP < n) {
        float *to = xp + k3_xp_group(npad, batch, t, n_full);
        memset(to, 0, K3_GROUP * sizeof(float));
        for (size_t k = 0; n_full * K3_GROUP + k < n; k++)
            to[k3_xp_lane(k)] = x[n_full * K3_GROUP + k];
    }
}

static void ew_widen(float *y, const uint16_t *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = k3_bf16_f32(x[i]);
}

static void ew_add(float *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = y[i] + x[i];
}

static void ew_scale(float *y, const float *x, float r, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = x[i] * r;
}

static void ew_scale2(float *y, const float *x, float r, const float *w, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = (x[i] * r) * w[i];
}

static void ew_divide(float *y, const float *x, float z, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = x[i] / z;
}

static void ew_axpy(float *y, float p, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = k3_fma(p, x[i], y[i]);
}

static void ew_exp_sub(float *y, const float *x, float m, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = k3_exp(x[i] - m);
}

static void ew_sigmoid(float *y, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = k3_sigmoid(x[i]);
}

static void ew_mul_sigmoid(float *y, const float *x, const float *g, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = x[i] * k3_sigmoid(g[i]);
}

static void ew_situ(float *y, const float *g, const float *u, float b1, float b2, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] = k3_situ(g[i], u[i], b1, b2);
}

static void ew_conv_silu(float *y, const float *const r[4], const float *w, size_t n) {
    const float *r0 = r[0], *r1 = r[1], *r2 = r[2], *r3 = r[3];
    for (size_t i = 0; i < n; i++) {
        float c = w[4 * i] * r0[i];
        c = k3_fma(w[4 * i + 1], r1[i], c);
        c = k3_fma(w[4 * i + 2], r2[i], c);
        c = k3_fma(w[4 * i + 3], r3[i], c);
        y[i] = k3_silu(c);
    }
}

static void ew_kda_decay(float *y, const float *f, const float *dt_bias, float A,
                         float lower_bound, size_t n) {
    for (size_t i = 0; i < n; i++)
        y[i] = k3_exp(lower_bound * k3_sigmoid(A * (f[i] + dt_bias[i])));
}

/* All terms are checked first, so that the loop that adds them has no branch. */
static size_t ew_add_q40(int64_t *q, const float *y, float w, size_t n) {
    int n_bad = 0;
    for (size_t i = 0; i < n; i++) n_bad += !(fabsf(w * y[i]) < 0x1p17f);
    if (n_bad) {
        size_t i = 0;
        while (fabsf(w * y[i]) < 0x1p17f) i++;
        return i;
    }
    for (size_t i = 0; i < n; i++) q[i] += k3_q40(w * y[i]);
    return n;
}

static void ew_q40_f32(float *y, const int64_t *q, size_t n) {
    for (size_t i = 0; i < n; i++) {
        int64_t whole = q[i];
#if defined(__clang__) && defined(__aarch64__)
        __asm__("" : "+r"(whole)); /* LLVM before 21 would go through f64 here, and round twice */
#endif
        y[i] = (float)whole * 0x1p-40f;
    }
}

/* Exponent all ones is NaN or infinity. */
static bool ew_is_finite(const float *x, size_t n) {
    uint32_t n_bad = 0;
    for (size_t i = 0; i < n; i++) n_bad += (k3_f32_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return n_bad == 0;
}

#define K3_ELEMENTWISE_KERNELS                                                                  \
    .pack = ew_pack, .widen = ew_widen, .add = ew_add, .scale = ew_scale, .scale2 = ew_scale2,  \
    .divide = ew_divide, .axpy = ew_axpy, .exp_sub = ew_exp_sub, .sigmoid = ew_sigmoid,         \
    .mul_sigmoid = ew_mul_sigmoid, .situ = ew_situ, .conv_silu = ew_conv_silu,                  \
    .kda_decay = ew_kda_decay, .add_q40 = ew_add_q40, .q40_f32 = ew_q40_f32,                    \
    .is_finite = ew_is_finite

#endif /* K3_KERNELS_ELEMENTWISE */
#endif /* !__CUDACC__ */
#endif
