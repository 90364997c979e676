/* test_kernels.c - every kernel table against NUMERICS.md, bit for bit.
 *
 *     test_kernels [--quick] [--big] [--data DIR]
 *
 * The oracle in section 1 is written from docs/NUMERICS.md alone and shares no code with
 * the kernels; `ref` is one of the tables under test. Every buffer lies against a
 * PROT_NONE page, once with its end and once with its start, and a third time off its
 * natural alignment; a kernel that touches the page is caught, named and counted. What a
 * kernel may not write must keep its canary.
 *
 *     --quick  fewer shapes, for an emulator
 *     --big    also every f32 bit pattern through the functions of NUMERICS 4 (minutes)
 *     --data   where real_mxfp4_rows.bin is; default tests/data
 *
 * A table that is not linked or that this CPU cannot run is a SKIP. One CHECK stands for
 * one table on one family of shapes.
 */
#include "test.h"

#include "../k3_pool.h"
#include "../kernels.h"

#include <fenv.h>
#include <float.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#pragma weak k3_kernels_ref
#pragma weak k3_kernels_avx2
#pragma weak k3_kernels_avx512
#pragma weak k3_kernels_neon

#define LEN(a)    (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

static bool is_quick, is_big;
static const char *data_dir = "tests/data";

/* ==== 1. Oracle ======================================================================
 *
 * Plain and slow. fmaf is the C library's; test_state_of_floats() tries it first.
 */

/* NUMERICS 2: the fold as a tree. At `step` 16 a leaf is a lane. */
static float oracle_level(const float lane[16], int step, int l) {
    if (step == 16) return lane[l];
    return oracle_level(lane, 2 * step, l) + oracle_level(lane, 2 * step, l + step);
}

/* dot16 before its last step, + (+0). */
static float oracle_sum16(const float *w, const float *x, size_t n) {
    float lane[16];
    for (int l = 0; l < 16; l++) lane[l] = 0.0f;
    for (size_t at = 0; at < n; at += 32)
        for (size_t odd = 0; odd < 2; odd++)
            for (size_t l = 0; l < 16; l++) {
                size_t k = at + 2 * l + odd;
                lane[l] = k < n ? fmaf(w[k], x[k], lane[l]) : fmaf(0.0f, 0.0f, lane[l]);
            }
    return oracle_level(lane, 1, 0);
}

static float oracle_dot16(const float *w, const float *x, size_t n) {
    return oracle_sum16(w, x, n) + 0.0f;
}

static float oracle_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* gcc 12.2 otherwise loses the mask when bits are cut and become a float again (not with
 * -fno-tree-ter); the empty asm keeps it from that. */
static uint32_t oracle_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    __asm__("" : "+r"(bits));
    return bits;
}

static float oracle_bf16(uint16_t b) { return oracle_from_bits((uint32_t)b * 65536u); }

/* E2M1 * 2^(code - 127), through double, which holds it exactly. */
static float oracle_mxfp4(unsigned nibble, unsigned code) {
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    double v = ldexp(magnitude[nibble % 8], (int)code - 127);
    return (float)(nibble >= 8 ? -v : v);
}

/* Place of element k of vector t in a packed batch (the layout of kernels.h). */
static size_t oracle_place(size_t n, size_t batch, size_t t, size_t k) {
    size_t npad = (n + 31) / 32 * 32, block = t / 8;
    size_t in_block = block < batch / 8 ? 8 : batch % 8;
    return block * 8 * npad + (k / 32) * in_block * 32 + (t % 8) * 32 + (k % 2) * 16 + k % 32 / 2;
}

/* NUMERICS 4. */
static float oracle_exp(float x) {
    static const float c[6] = {0x1.123bccp-7f, 0x1.555b98p-5f, 0x1.55548ep-3f,
                               0x1.fffff8p-2f, 1.0f,           1.0f};
    if (x > 89.0f) x = 89.0f;
    if (x < -104.0f) x = -104.0f;
    float n = rintf(x * 0x1.715476p+0f);
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6850e4p-10f;
    for (int j = 0; j < 6; j++) p = fmaf(p, r, c[j]);
    int i = (int)n, h = (int)floor(i / 2.0);
    return (p * ldexpf(1.0f, h)) * ldexpf(1.0f, i - h);
}

static float oracle_sigmoid(float x) {
    float t = oracle_exp(-fabsf(x));
    return (x < 0 ? t : 1.0f) / (1.0f + t);
}

static float oracle_tanh(float x) {
    static const float c[4] = {0x1.52269cp-6f, -0x1.b83c5ap-5f, 0x1.110726p-3f, -0x1.555532p-2f};
    float a = fabsf(x), y;
    if (a < 0.625f) {
        float s = a * a, p = -0x1.75e1d4p-8f;
        for (int j = 0; j < 4; j++) p = fmaf(p, s, c[j]);
        y = fmaf(p * s, a, a);
    } else {
        y = 1.0f - 2.0f / (oracle_exp(a + a) + 1.0f);
    }
    return copysignf(y, x);
}

static float oracle_situ(float g, float u, float b1, float b2) {
    float h = (b1 * oracle_tanh(g / b1)) * oracle_sigmoid(g);
    float v = b2 * oracle_tanh(u / b2);
    return h * v;
}

/* NUMERICS 5 on the integers: |t| < 2^17, t * 2^40 rounded to nearest even. */
static int64_t oracle_q40(float t) {
    uint32_t bits = oracle_bits(t), field = bits >> 23 & 255;
    int64_t m = (int64_t)(bits & 0x7fffff) + (field ? 0x800000 : 0), q;
    int shift = (int)(field ? field : 1) - 150 + 40; /* |t| * 2^40 = m * 2^shift */
    if (shift >= 0) {
        q = m * ((int64_t)1 << shift);
    } else if (shift < -25) {
        q = 0;
    } else {
        int64_t unit = (int64_t)1 << -shift;
        q = m / unit;
        int64_t twice = 2 * (m % unit);
        if (twice > unit || (twice == unit && q % 2 == 1)) q++;
    }
    return bits >> 31 ? -q : q;
}

/* (f32)q * 2^-40, one rounding, on the integers. */
static float oracle_q40_f32(int64_t q) {
    uint64_t m = q < 0 ? (uint64_t)0 - (uint64_t)q : (uint64_t)q;
    int shift = 0;
    while (m >> shift >= 1u << 24) shift++;
    uint64_t kept = m >> shift, lost = m - (kept << shift);
    uint64_t half = shift ? (uint64_t)1 << (shift - 1) : 0;
    if (shift && (lost > half || (lost == half && kept % 2 == 1))) kept++;
    double v = ldexp((double)kept, shift - 40);
    return (float)(q < 0 ? -v : v);
}

/* ==== 2. Harness ===================================================================== */

static const k3_kernels *tables[4];
static size_t n_tables;

/* What a trial is about, for the callbacks and for messages. */
typedef struct {
    size_t n, rows, batch, ldw, ldy, ldc, ldv, ldb, n_i, n_tok;
    float a, b;
    const char *kind;
} shape;

/* One buffer of a trial: `image` is what it holds before, `want` after (NULL: the same). */
typedef struct {
    const void *image, *want;
    size_t n_bytes, align;
} buffer;

#define MAX_BUFFERS 8
typedef void (*call_fn)(const k3_kernels *K, void **p, const shape *s);
typedef struct {
    call_fn call;
    shape s;
    buffer buf[MAX_BUFFERS];
    size_t n_buf;
    bool nan_is_nan; /* any NaN is as good as another */
} trial;

/* A NaN with a mark: fills outputs before a call, and gaps that no kernel may read. */
#define CANARY 0x7fc0dead
#define POISON 0x7fa5

/* -- Memory for images: taken one block after another, all given back at once. */
#define POOL_BYTES ((size_t)48 << 20)
static uint8_t *pool;
static size_t pool_used;

static void *take(size_t n_bytes) {
    size_t at = (pool_used + 63) & ~(size_t)63;
    if (at + n_bytes > POOL_BYTES) {
        fprintf(stderr, "test_kernels: pool too small\n");
        exit(2);
    }
    pool_used = at + n_bytes;
    return pool + at;
}

static float *take_f32(size_t n) { return take(n * sizeof(float)); }

static float *take_canary(size_t n) {
    float *f = take_f32(n);
    uint32_t c = CANARY;
    for (size_t i = 0; i < n; i++) memcpy(f + i, &c, sizeof c);
    return f;
}

/* -- Guarded memory: one arena per buffer of a trial, a PROT_NONE page at both ends. */
#define ARENA_BYTES ((size_t)2 << 20)
#define SLACK       64 /* bytes of canary checked beside a buffer, inside the arena */
static uint8_t *arena[MAX_BUFFERS];
static size_t page_bytes;

static uint8_t *guarded_map(size_t n_bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    uint8_t *p = mmap(NULL, n_bytes + 2 * page_bytes, PROT_NONE, flags, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page_bytes, n_bytes, PROT_READ | PROT_WRITE) != 0) {
        perror("test_kernels: mmap");
        exit(2);
    }
    return p + page_bytes;
}

typedef enum { AT_END, AT_START, OFF_START, N_PLACES } place;
static const char *const place_name[N_PLACES] = {"end", "start", "misaligned"};

/* -- A kernel that touches a guard page comes back here. The signal has reset the floating
 * point state by then: put it back, so that a wrong one is not cured. */
static sigjmp_buf trap;
static fenv_t state_at_start;

static void on_fault(int sig) { siglongjmp(trap, sig); }

static bool run_guarded(call_fn call, const k3_kernels *K, void **p, const shape *s) {
    if (sigsetjmp(trap, 1) != 0) {
        fesetenv(&state_at_start);
        return false;
    }
    call(K, p, s);
    return true;
}

/* -- Families: one CHECK per table. */
static const char *family_kernel, *family_shapes;
static uint64_t family_bad[4], family_runs;

static void family_begin(const char *kernel, const char *shapes) {
    family_kernel = kernel;
    family_shapes = shapes;
    memset(family_bad, 0, sizeof family_bad);
    family_runs = 0;
}

/* Count a mismatch. The first one of a table and family is printed. */
static void family_fail(size_t k, const shape *s, const char *format, ...) {
    if (family_bad[k]++) return;
    printf("MISMATCH %s %s [%s] ", tables[k]->name, family_kernel, family_shapes);
    if (s)
        printf("%s n %zu rows %zu batch %zu ldw %zu ldy %zu n_i %zu n_tok %zu: ",
               s->kind ? s->kind : "", s->n, s->rows, s->batch, s->ldw, s->ldy, s->n_i, s->n_tok);
    va_list ap;
    va_start(ap, format);
    vprintf(format, ap);
    va_end(ap);
    printf("\n");
}

static void family_end(void) {
    for (size_t k = 0; k < n_tables; k++)
        if (!CHECK(family_runs > 0 && family_bad[k] == 0))
            printf("    %s %s [%s]: %" PRIu64 " mismatches in %" PRIu64 " trials\n",
                   tables[k]->name, family_kernel, family_shapes, family_bad[k], family_runs);
    if (n_tables == 0) SKIP(family_kernel);
}

/* First wrong 32-bit word (or the byte tail) of got against want; n_bytes when equal. */
static size_t first_difference(const uint8_t *got, const uint8_t *want, size_t n_bytes,
                               bool nan_is_nan) {
    if (memcmp(got, want, n_bytes) == 0) return n_bytes;
    size_t i = 0;
    for (; i + 4 <= n_bytes; i += 4) {
        uint32_t g, w;
        memcpy(&g, got + i, 4);
        memcpy(&w, want + i, 4);
        bool both_nan = (g & 0x7fffffff) > 0x7f800000 && (w & 0x7fffffff) > 0x7f800000;
        if (g != w && !(nan_is_nan && both_nan)) return i;
    }
    return memcmp(got + i, want + i, n_bytes - i) == 0 ? n_bytes : i;
}

/* Where a buffer lies in its arena. */
static uint8_t *place_of(size_t i, const buffer *b, place where) {
    if (where == AT_START) return arena[i];
    if (where == OFF_START) return arena[i] + b->align;
    return arena[i] + (ARENA_BYTES - b->n_bytes) / b->align * b->align;
}

static void check_buffer(size_t k, const trial *t, size_t i, place where) {
    const buffer *b = &t->buf[i];
    const uint8_t *p = place_of(i, b, where), *want = b->want ? b->want : b->image;
    size_t at = first_difference(p, want, b->n_bytes, t->nan_is_nan);
    if (at < b->n_bytes) {
        uint32_t g = 0, w = 0;
        size_t n = MIN((size_t)4, b->n_bytes - at);
        memcpy(&g, p + at, n);
        memcpy(&w, want + at, n);
        family_fail(k, &t->s, "buffer %zu word %zu is %08x, want %08x (%s)", i, at / 4, g, w,
                    place_name[where]);
    }
    size_t before = (size_t)(p - arena[i]), after = ARENA_BYTES - before - b->n_bytes;
    for (size_t j = 1; j <= MIN(before, (size_t)SLACK); j++)
        if (p[-(ptrdiff_t)j] != 0xa5) family_fail(k, &t->s, "wrote %zu before buffer %zu", j, i);
    for (size_t j = 0; j < MIN(after, (size_t)SLACK); j++)
        if (p[b->n_bytes + j] != 0xa5) family_fail(k, &t->s, "wrote %zu past buffer %zu", j, i);
}

static void fill_buffer(size_t i, const buffer *b, place where) {
    uint8_t *p = place_of(i, b, where);
    size_t before = MIN((size_t)(p - arena[i]), (size_t)SLACK);
    size_t after = MIN((size_t)(arena[i] + ARENA_BYTES - p) - b->n_bytes, (size_t)SLACK);
    memset(p - before, 0xa5, before);
    memset(p + b->n_bytes, 0xa5, after);
    memcpy(p, b->image, b->n_bytes);
}

/* Run one trial on every table at every place. */
static void run_trial(const trial *t) {
    family_runs++;
    for (size_t k = 0; k < n_tables; k++)
        for (place where = AT_END; where < N_PLACES; where++) {
            void *p[MAX_BUFFERS];
            for (size_t i = 0; i < t->n_buf; i++) {
                if (t->buf[i].n_bytes + t->buf[i].align > ARENA_BYTES) exit(2);
                fill_buffer(i, &t->buf[i], where);
                p[i] = place_of(i, &t->buf[i], where);
            }
            if (!run_guarded(t->call, tables[k], p, &t->s)) {
                family_fail(k, &t->s, "touched a guard page (%s)", place_name[where]);
                continue;
            }
            for (size_t i = 0; i < t->n_buf; i++) check_buffer(k, t, i, where);
        }
}

static void add_buffer(trial *t, const void *image, const void *want, size_t n_bytes,
                       size_t align) {
    t->buf[t->n_buf++] = (buffer){image, want, n_bytes, align};
}

/* -- Random values. */
static uint64_t seed = 1;

static uint64_t rnd(void) { return test_random(&seed); }
static size_t rnd_below(size_t n) { return (size_t)(rnd() >> 11) % n; }

/* A float of random sign and mantissa, exponent low .. high; subnormal below the normal range. */
static float rnd_f32(int low, int high) {
    float m = 1.0f + (float)(rnd() >> 41) * 0x1p-23f;
    m = ldexpf(m, low + (int)rnd_below((size_t)(high - low + 1)));
    return rnd() & 1 ? -m : m;
}

/* Any f32 but NaN and infinity. */
static float rnd_finite(void) {
    uint32_t bits;
    do bits = (uint32_t)rnd();
    while ((bits & 0x7f800000) == 0x7f800000);
    return oracle_from_bits(bits);
}

/* Kinds of data: how weights and inputs are drawn. */
typedef enum { PLAIN, WIDE, TINY, VANISH, ZEROS, N_KINDS } kind;
static const char *const kind_name[N_KINDS] = {
    "plain",  /* near 1                                                           */
    "wide",   /* 40 binades, so that every order gives other bits                 */
    "tiny",   /* subnormal weights and products                                   */
    "vanish", /* all products round to -0: only the final +0 of dot16 hides it    */
    "zeros",  /* half of all values +0 or -0                                      */
};

static float draw_w(kind k) {
    switch (k) {
    case PLAIN: return rnd_f32(-4, 1);
    case WIDE: return rnd_f32(-20, 20);
    case TINY: return rnd_f32(-140, -120);
    case VANISH: return -fabsf(rnd_f32(-110, -100));
    default: return rnd() & 1 ? rnd_f32(-2, 2) : copysignf(0.0f, rnd_f32(0, 0));
    }
}

static float draw_x(kind k) {
    switch (k) {
    case PLAIN: return rnd_f32(-4, 1);
    case WIDE: return rnd_f32(-20, 20);
    case TINY: return rnd() % 8 ? rnd_f32(-20, 3) : rnd_f32(-149, -127);
    case VANISH: return fabsf(rnd_f32(-70, -60));
    default: return rnd() & 1 ? rnd_f32(-2, 2) : copysignf(0.0f, rnd_f32(0, 0));
    }
}

/* ==== 3. Inner products ============================================================== */

static const size_t row_counts[] = {1, 2, 3, 5, 7, 8, 9, 31, 33};
static const size_t batches[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 64};

typedef enum { BF16, F32, MXFP4 } format;
static const char *const format_name[] = {"matmul_bf16", "matmul_f32", "matmul_mxfp4"};

/* W, x and y = W x of the largest shape; trials take the first rows and vectors of it. */
typedef struct {
    format f;
    const char *kind;
    size_t n, rows, batch;
    float *w, *x, *y; /* [rows][n], [batch][n], [batch][rows] */
    uint8_t *q, *scale;
} sample;

static void sample_solve(sample *s) {
    s->y = take_f32(s->batch * s->rows);
    for (size_t t = 0; t < s->batch; t++)
        for (size_t r = 0; r < s->rows; r++)
            s->y[t * s->rows + r] = oracle_dot16(s->w + r * s->n, s->x + t * s->n, s->n);
}

static sample sample_new(format f, kind k, size_t n, size_t rows, size_t batch) {
    sample s = {.f = f, .kind = kind_name[k], .n = n, .rows = rows, .batch = batch};
    s.w = take_f32(rows * n);
    s.x = take_f32(batch * n);
    for (size_t i = 0; i < rows * n; i++) {
        s.w[i] = draw_w(k);
        if (f == BF16) s.w[i] = oracle_bf16((uint16_t)(oracle_bits(s.w[i]) >> 16));
    }
    for (size_t i = 0; i < batch * n; i++) s.x[i] = draw_x(k);
    sample_solve(&s);
    return s;
}

/* Packed image of the first `batch` of the vectors v: f32[][n]. */
static float *pack_image(const float *v, size_t n, size_t batch) {
    float *xp = take_f32(batch * ((n + 31) / 32 * 32));
    memset(xp, 0, batch * ((n + 31) / 32 * 32) * sizeof *xp);
    for (size_t t = 0; t < batch; t++)
        for (size_t k = 0; k < n; k++) xp[oracle_place(n, batch, t, k)] = v[t * n + k];
    return xp;
}

static void call_matmul_bf16(const k3_kernels *K, void **p, const shape *s) {
    K->matmul_bf16(p[0], s->ldy, p[1], s->ldw, s->rows, s->n, p[2], s->batch);
}

static void call_matmul_f32(const k3_kernels *K, void **p, const shape *s) {
    K->matmul_f32(p[0], s->ldy, p[1], s->rows, s->n, p[2], s->batch);
}

static void call_matmul_mxfp4(const k3_kernels *K, void **p, const shape *s) {
    K->matmul_mxfp4(p[0], s->ldy, p[1], p[3], s->rows, s->n, p[2], s->batch);
}

/* bf16 rows at stride ldw; the gaps are NaN. */
static uint16_t *bf16_image(const float *w, size_t rows, size_t n, size_t ldw) {
    uint16_t *image = take(((rows - 1) * ldw + n) * sizeof *image);
    for (size_t i = 0; i < (rows - 1) * ldw + n; i++) {
        size_t r = i / ldw, k = i % ldw;
        image[i] = k < n ? (uint16_t)(oracle_bits(w[r * n + k]) >> 16) : POISON;
    }
    return image;
}

/* Rows at stride ld in a field of canaries. */
static float *strided_image(const float *v, size_t ldv, size_t rows, size_t n, size_t ld) {
    float *image = take_canary((rows - 1) * ld + n);
    for (size_t r = 0; r < rows; r++) memcpy(image + r * ld, v + r * ldv, n * sizeof *v);
    return image;
}

static void try_matmul(const sample *m, size_t rows, size_t batch, size_t more_w, size_t more_y) {
    static const call_fn call[] = {call_matmul_bf16, call_matmul_f32, call_matmul_mxfp4};
    size_t mark = pool_used, n = m->n, npad = (n + 31) / 32 * 32;
    size_t ldw = n + more_w, ldy = rows + more_y, n_y = (batch - 1) * ldy + rows;
    trial t = {.call = call[m->f], .s = {.n = n, .rows = rows, .batch = batch, .ldw = ldw,
                                         .ldy = ldy, .kind = m->kind}};
    add_buffer(&t, take_canary(n_y), strided_image(m->y, m->rows, batch, rows, ldy), n_y * 4, 4);
    if (m->f == BF16)
        add_buffer(&t, bf16_image(m->w, rows, n, ldw), NULL, ((rows - 1) * ldw + n) * 2, 2);
    else if (m->f == F32) { /* a packed row is a packed batch of one */
        float *image = take_f32(rows * npad);
        memset(image, 0, rows * npad * sizeof *image);
        for (size_t i = 0; i < rows * n; i++)
            image[i / n * npad + oracle_place(n, 1, 0, i % n)] = m->w[i];
        add_buffer(&t, image, NULL, rows * npad * 4, 4);
    } else
        add_buffer(&t, m->q, NULL, rows * n / 2, 1);
    add_buffer(&t, pack_image(m->x, n, batch), NULL, batch * npad * 4, 64);
    if (m->f == MXFP4) add_buffer(&t, m->scale, NULL, rows * n / 32, 1);
    run_trial(&t);
    pool_used = mark;
}

/* Every n, every batch at it, row counts in turn. */
static void test_matmul_lengths(format f) {
    family_begin(format_name[f], "n 1..200");
    size_t step = is_quick ? 7 : 1;
    for (size_t n = 1; n <= 200; n += step) {
        size_t mark = pool_used;
        sample s = sample_new(f, (kind)(n % N_KINDS), n, 33, is_quick ? 17 : 64);
        for (size_t b = 0; b < LEN(batches); b++)
            if (batches[b] <= s.batch && (batches[b] <= 9 || (n + b) % 3 == 0))
                try_matmul(&s, row_counts[(n + b) % LEN(row_counts)], batches[b], n % 4, b % 3);
        pool_used = mark;
    }
    family_end();
}

/* Every row count at every batch, for a few lengths. */
static void test_matmul_shapes(format f) {
    static const size_t lengths[] = {33, 1, 31, 64, 95};
    family_begin(format_name[f], "rows x batch");
    for (size_t i = 0; i < (is_quick ? 1 : LEN(lengths)); i++) {
        size_t mark = pool_used;
        sample s = sample_new(f, PLAIN, lengths[i], 33, 64);
        for (size_t r = 0; r < LEN(row_counts); r++)
            for (size_t b = 0; b < LEN(batches); b++)
                try_matmul(&s, row_counts[r], batches[b], r, b % 2);
        pool_used = mark;
    }
    family_end();
}

/* The widths of the model, and one column more and less. */
static void test_matmul_wide(format f) {
    static const size_t lengths[] = {7168, 1536, 7167, 3601};
    static const size_t rows[] = {1, 3, 9, 33}, batch[] = {1, 2, 9, 17};
    family_begin(format_name[f], "n 1536..7168");
    for (size_t i = 0; i < (is_quick ? 1 : LEN(lengths)); i++) {
        size_t mark = pool_used, most = is_quick ? 9 : 33;
        sample s = sample_new(f, i % 2 ? WIDE : PLAIN, lengths[i], most, is_quick ? 3 : 17);
        for (size_t r = 0; r < LEN(rows); r++)
            for (size_t b = 0; b < LEN(batch); b++)
                if (rows[r] <= s.rows && batch[b] <= s.batch && (r + b + i) % 2 == 0)
                    try_matmul(&s, rows[r], batch[b], 0, 1);
        pool_used = mark;
    }
    family_end();
}

static void test_matmul_kinds(format f) {
    static const size_t batch[] = {1, 3, 8, 17};
    for (kind k = PLAIN; k < N_KINDS; k++) {
        family_begin(format_name[f], kind_name[k]);
        for (size_t n = 32; n <= 131; n += 33) { /* 32 65 98 131 */
            size_t mark = pool_used;
            sample s = sample_new(f, k, n, 9, 17);
            for (size_t b = 0; b < LEN(batch); b++) try_matmul(&s, 5 + b, batch[b], 1, 0);
            pool_used = mark;
        }
        sample s = sample_new(f, k, 256, 9, 17);
        for (size_t b = 0; b < LEN(batch); b++) try_matmul(&s, 9, batch[b], 0, 0);
        pool_used = 0;
        family_end();
    }
}

/* -- MXFP4: how scales and nibbles are drawn. */
typedef enum { FLAT, NINE, FULL, ENDS, LOW0, LOW_VANISH, TOP, NOTHING, N_SCALES } scale_kind;
static const char *const scale_name[N_SCALES] = {
    "code 127",        "nine binades",      "codes 0..252", "codes 0 and 252", "code 0",
    "code 0 vanishes", "code 252", "nibbles 0 and 8"};

static unsigned draw_scale(scale_kind k) {
    switch (k) {
    case FLAT: return 127;
    case NINE: return 118 + (unsigned)rnd_below(9);
    case FULL: return (unsigned)rnd_below(K3_SCALE_MAX + 1);
    case ENDS: return rnd() & 1 ? K3_SCALE_MAX : 0;
    case LOW0: return rnd() % 4 ? 0 : (unsigned)rnd_below(4);
    case LOW_VANISH: return 0;
    case TOP: return K3_SCALE_MAX;
    default: return 120 + (unsigned)rnd_below(9);
    }
}

static float draw_scale_x(scale_kind k) {
    switch (k) {
    case FULL:
    case ENDS:
    case TOP: return rnd_f32(-30, -20);
    case LOW0: return rnd() & 1 ? rnd_f32(-10, 20) : rnd_f32(60, 100);
    case LOW_VANISH: return fabsf(rnd_f32(-60, -50));
    default: return rnd() % 16 ? rnd_f32(-4, 3) : copysignf(0.0f, rnd_f32(0, 0));
    }
}

static sample mxfp4_new(scale_kind k, size_t n, size_t rows, size_t batch) {
    sample s = {.f = MXFP4, .kind = scale_name[k], .n = n, .rows = rows, .batch = batch};
    s.q = take(rows * n / 2);
    s.scale = take(rows * n / 32);
    s.w = take_f32(rows * n);
    s.x = take_f32(batch * n);
    for (size_t i = 0; i < rows * n / 32; i++) s.scale[i] = (uint8_t)draw_scale(k);
    for (size_t i = 0; i < rows * n / 2; i++) {
        s.q[i] = (uint8_t)rnd();
        if (k == LOW_VANISH) s.q[i] = (uint8_t)(0x99 + 0x11 * rnd_below(7)); /* negative */
        if (k == NOTHING) s.q[i] &= 0x88;
    }
    for (size_t i = 0; i < rows * n; i++) {
        unsigned nibble = i % 2 ? s.q[i / 2] >> 4 : s.q[i / 2] & 15;
        s.w[i] = oracle_mxfp4(nibble, s.scale[i / 32]);
    }
    for (size_t i = 0; i < batch * n; i++) s.x[i] = draw_scale_x(k);
    sample_solve(&s);
    return s;
}

static void test_mxfp4(void) {
    static const size_t groups[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33};
    for (scale_kind k = FLAT; k < N_SCALES; k++) {
        family_begin("matmul_mxfp4", scale_name[k]);
        for (size_t i = is_quick ? k % 4 : 0; i < LEN(groups); i += is_quick ? 4 : 1) {
            size_t mark = pool_used;
            sample s = mxfp4_new(k, groups[i] * 32, 33, is_quick ? 17 : 64);
            for (size_t b = 0; b < LEN(batches); b++)
                if (batches[b] <= s.batch && (groups[i] < 16 || (i + b + k) % 3 == 0))
                    try_matmul(&s, row_counts[(i + b + k) % LEN(row_counts)], batches[b], 0, b % 3);
            pool_used = mark;
        }
        family_end();
    }
    family_begin("matmul_mxfp4", "n 3072, 3584");
    for (size_t n = 3072; n <= 3584; n += 512) {
        sample s = mxfp4_new(n == 3072 ? NINE : FULL, n, is_quick ? 9 : 33, is_quick ? 3 : 33);
        for (size_t b = 0; b < LEN(batches); b++) {
            size_t rows = MIN(s.rows, row_counts[LEN(row_counts) - 1 - b % 5]);
            if (batches[b] <= s.batch) try_matmul(&s, rows, batches[b], 0, 0);
        }
        pool_used = 0;
    }
    family_end();
    family_begin("matmul_mxfp4", "rows x batch");
    sample s = mxfp4_new(NINE, 96, 33, 64);
    for (size_t r = 0; r < LEN(row_counts); r++)
        for (size_t b = 0; b < LEN(batches); b++)
            if (!is_quick || (r + b) % 3 == 0) try_matmul(&s, row_counts[r], batches[b], 0, 2);
    pool_used = 0;
    family_end();
}

/* -- Few vectors, where each number of vectors has tiles of its own: 1 to 9 vectors against 1 to 13
 * rows, and against two row counts just past the blocks of rows that a set makes. */
static void try_few(const sample *s, size_t n_skip) {
    for (size_t batch = 1; batch <= 9; batch++)
        for (size_t rows = 1; rows <= 15; rows++)
            if (!is_quick || (batch + rows + n_skip) % 3 == 0)
                try_matmul(s, rows < 14 ? rows : rows == 14 ? 25 : 51, batch, rows % 2, batch % 2);
}

/* Short rows; rows that end at every place in a group; one column and one group more than the 1024
 * columns that stay in L1, and twice as many. */
static void test_few_bf16(void) {
    static const size_t lengths[] = {1, 31, 32, 33, 65, 127, 1024, 1025, 1056, 2079};
    family_begin("matmul_bf16", "1..9 vectors x 1..13 rows");
    for (size_t i = 0; i < LEN(lengths); i++) {
        sample s = sample_new(BF16, (kind)(i % N_KINDS), lengths[i], 51, 9);
        try_few(&s, i);
        pool_used = 0;
    }
    family_end();
}

/* The same for MXFP4: every way of drawing scales, with one group, with a last group that is first,
 * second, third or fourth of its cache line, and with more than 1024 columns. */
static void test_few_mxfp4(void) {
    static const size_t groups[] = {1, 2, 3, 4, 5, 32, 33, 67};
    for (scale_kind k = FLAT; k < N_SCALES; k++) {
        family_begin("matmul_mxfp4 1..9 x 1..13", scale_name[k]);
        for (size_t i = k % 2; i < LEN(groups); i += is_quick ? 4 : 2) {
            sample s = mxfp4_new(k, groups[i] * 32, 51, 9);
            try_few(&s, i + k);
            pool_used = 0;
        }
        family_end();
    }
}

/* Between other rows, some whose weights are all -0, whose code is 0, or whose weights are all the
 * largest: a tile that takes the scale, sign or sum of a neighbouring row gives other bits. */
static void test_few_rows_apart(void) {
    family_begin("matmul_mxfp4", "rows of -0, of code 0 and 252");
    for (size_t batch = 1; batch <= 9; batch++)
        for (size_t first = 0; first < 4; first++) {
            const size_t n = 96, rows = 13;
            sample s = mxfp4_new(NINE, n, rows, batch);
            for (size_t r = 0; r < rows; r++) {
                size_t what = (r + first) % 4;
                if (what == 1) memset(s.q + r * n / 2, 0x88, n / 2);
                if (what == 2) memset(s.scale + r * n / 32, 0, n / 32);
                if (what == 3) memset(s.scale + r * n / 32, K3_SCALE_MAX, n / 32);
            }
            for (size_t i = 0; i < rows * n; i++)
                s.w[i] = oracle_mxfp4(i % 2 ? s.q[i / 2] >> 4 : s.q[i / 2] & 15, s.scale[i / 32]);
            for (size_t i = 0; i < batch * n; i++) s.x[i] = rnd_f32(-30, -20);
            sample_solve(&s);
            try_matmul(&s, rows, batch, 0, 0);
            pool_used = 0;
        }
    family_end();
}

/* Each of the 253 x 16 weights alone, read back through an x that is 2^k in one place. */
static void test_mxfp4_values(void) {
    family_begin("matmul_mxfp4", "every code and nibble");
    for (unsigned code = 0; code <= K3_SCALE_MAX; code += is_quick ? 4 : 1) {
        sample s = {.f = MXFP4, .kind = "one value", .n = 32, .rows = 16, .batch = 2};
        s.q = take(16 * 16);
        s.scale = take(16);
        s.w = take_f32(16 * 32);
        s.x = take_f32(2 * 32);
        memset(s.scale, (int)code, 16);
        for (size_t r = 0; r < 16; r++) memset(s.q + r * 16, (int)(r | (15 - r) << 4), 16);
        for (size_t i = 0; i < 16 * 32; i++)
            s.w[i] = oracle_mxfp4((unsigned)(i % 2 ? 15 - i / 32 : i / 32), code);
        memset(s.x, 0, 2 * 32 * sizeof *s.x);
        s.x[code % 32] = 1.0f;
        s.x[32 + (code + 1) % 32] = code < 128 ? 0x1p126f : 0x1p-126f;
        sample_solve(&s);
        try_matmul(&s, 16, 2, 0, 0);
        try_matmul(&s, 16, 1, 0, 0);
        pool_used = 0;
    }
    family_end();
}

/* -- Rows whose ends all lie against a guard page: the gap up to ldw is not touched. */
static void *gap_rows(const void *rows, size_t row_bytes, size_t n_rows, size_t *stride) {
    size_t used = (row_bytes + page_bytes - 1) / page_bytes * page_bytes;
    *stride = used + page_bytes;
    uint8_t *base = guarded_map(n_rows * *stride);
    for (size_t r = 0; r < n_rows; r++) {
        memcpy(base + r * *stride + used - row_bytes, (const uint8_t *)rows + r * row_bytes,
               row_bytes);
        if (mprotect(base + r * *stride + used, page_bytes, PROT_NONE) != 0) exit(2);
    }
    return base + used - row_bytes;
}

static void gap_free(void *first, size_t row_bytes, size_t n_rows) {
    size_t used = (row_bytes + page_bytes - 1) / page_bytes * page_bytes;
    munmap((uint8_t *)first - (used - row_bytes) - page_bytes,
           n_rows * (used + page_bytes) + 2 * page_bytes);
}

static void test_matmul_gaps(void) {
    static const size_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 200, 1000, 2048, 2049};
    static const size_t batch[] = {1, 2, 3, 4, 5, 8, 11};
    family_begin("matmul_bf16", "guard page after every row");
    for (size_t i = 0; i < LEN(lengths); i++)
        for (size_t b = 0; b < LEN(batch); b++) {
            size_t n = lengths[i], rows = 7, stride;
            sample m = sample_new(BF16, PLAIN, n, rows, batch[b]);
            void *w = gap_rows(bf16_image(m.w, rows, n, n), n * 2, rows, &stride);
            shape s = {.n = n, .rows = rows, .batch = m.batch, .ldw = stride / 2, .ldy = rows};
            void *p[3] = {take_f32(rows * m.batch), w, pack_image(m.x, n, m.batch)};
            family_runs++;
            for (size_t k = 0; k < n_tables; k++) {
                if (!run_guarded(call_matmul_bf16, tables[k], p, &s))
                    family_fail(k, &s, "touched the gap after a row");
                else if (memcmp(p[0], m.y, rows * m.batch * 4) != 0)
                    family_fail(k, &s, "wrong values");
            }
            gap_free(w, n * 2, rows);
            pool_used = 0;
        }
    family_end();
}

/* n_rows 0, as a thread may get: nothing is written. */
static void test_matmul_no_rows(void) {
    family_begin("matmul_*", "no rows");
    float x[64] __attribute__((aligned(64))) = {0}, y[2];
    uint32_t before[2] = {CANARY, CANARY};
    uint8_t w[256] __attribute__((aligned(64))) = {0};
    family_runs++;
    for (size_t k = 0; k < n_tables; k++)
        for (size_t batch = 1; batch <= 2; batch++) {
            memcpy(y, before, sizeof y);
            tables[k]->matmul_bf16(y, 1, (const uint16_t *)(const void *)w, 32, 0, 32, x, batch);
            tables[k]->matmul_f32(y, 1, (const float *)(const void *)w, 0, 32, x, batch);
            tables[k]->matmul_mxfp4(y, 1, w, w, 0, 32, x, batch);
            if (memcmp(y, before, sizeof y) != 0) family_fail(k, NULL, "wrote");
        }
    family_end();
}

static void call_dot(const k3_kernels *K, void **p, const shape *s) {
    float r = K->dot(p[1], p[2], s->n);
    memcpy(p[0], &r, sizeof r);
}

static void test_dot(void) {
    for (kind kd = PLAIN; kd < N_KINDS; kd++) {
        family_begin("dot", kind_name[kd]);
        for (size_t i = 1; i <= 206; i++) {
            size_t n = i <= 200 ? i : (size_t[]){256, 512, 576, 1536, 7167, 7168}[i - 201];
            float *a = take_f32(n), *b = take_f32(n);
            for (size_t j = 0; j < n; j++) a[j] = draw_w(kd), b[j] = draw_x(kd);
            float want = oracle_dot16(a, b, n);
            if (kd == VANISH && n % 32 == 0) /* the sum is -0, as this kind wants */
                CHECK(oracle_bits(oracle_sum16(a, b, n)) == 0x80000000);
            trial t = {.call = call_dot, .s = {.n = n, .kind = kind_name[kd]}};
            add_buffer(&t, take_canary(1), &want, 4, 4);
            add_buffer(&t, a, NULL, n * 4, 4);
            add_buffer(&t, b, NULL, n * 4, 4);
            run_trial(&t);
            pool_used = 0;
        }
        family_end();
    }
}

/* -- Published bytes and published values. */
typedef struct {
    uint32_t rows, cols, n_values;
    float *value;      /* the distinct published values */
    uint8_t *q, *s, *i; /* i: u8[rows][cols], index of the published value */
} real_rows;

static bool real_open(real_rows *r) {
    char path[1024];
    snprintf(path, sizeof path, "%s/real_mxfp4_rows.bin", data_dir);
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    char magic[8];
    uint32_t head[3];
    bool ok = fread(magic, 8, 1, f) == 1 && memcmp(magic, "k3mxfp4", 8) == 0 &&
              fread(head, sizeof head, 1, f) == 1 && head[0] <= 64 && head[1] <= 3584 &&
              head[1] % 32 == 0 && head[2] <= 256;
    if (ok) {
        size_t all = (size_t)head[0] * head[1];
        *r = (real_rows){.rows = head[0], .cols = head[1], .n_values = head[2]};
        r->value = take_f32(256);
        r->q = take(all / 2);
        r->s = take(all / 32);
        r->i = take(all);
        ok = fread(r->value, 4, head[2], f) == head[2] && fread(r->q, 1, all / 2, f) == all / 2 &&
             fread(r->s, 1, all / 32, f) == all / 32 && fread(r->i, 1, all, f) == all;
    }
    fclose(f);
    return ok;
}

/* One-hot vectors read the weights back. -0 comes back as +0 (fma from +0). All columns
 * as rows of 32; then, at full width, a sample of columns. */
static void test_real_rows(void) {
    real_rows r;
    if (!real_open(&r)) {
        SKIP("real MXFP4 rows: no real_mxfp4_rows.bin (run from the top, or --data DIR)");
        pool_used = 0;
        return;
    }
    family_begin("matmul_mxfp4", "real rows, published values");
    size_t groups = (size_t)r.rows * r.cols / 32;
    float *one_hot = take_f32(32 * 32), *y = take_f32(32 * groups), *xp;
    memset(one_hot, 0, 32 * 32 * sizeof *one_hot);
    for (size_t k = 0; k < 32; k++) one_hot[k * 33] = 1.0f;
    xp = pack_image(one_hot, 32, 32);
    float *wide = take_f32(9 * r.cols), *wide_xp, *wide_y = take_f32(9 * r.rows);
    memset(wide, 0, 9 * r.cols * sizeof *wide);
    for (size_t t = 0; t < 9; t++) wide[t * r.cols + t * 397 % r.cols] = 1.0f;
    wide_xp = pack_image(wide, r.cols, 9);
    for (size_t k = 0; k < n_tables; k++) {
        family_runs++;
        tables[k]->matmul_mxfp4(y, groups, r.q, r.s, groups, 32, xp, 32);
        for (size_t i = 0; i < groups * 32; i++)
            if (oracle_bits(y[i % 32 * groups + i / 32]) != oracle_bits(r.value[r.i[i]] + 0.0f))
                family_fail(k, NULL, "row %zu column %zu", i / r.cols, i % r.cols);
        tables[k]->matmul_mxfp4(wide_y, r.rows, r.q, r.s, r.rows, r.cols, wide_xp, 9);
        for (size_t i = 0; i < 9 * r.rows; i++) {
            size_t column = i / r.rows * 397 % r.cols, row = i % r.rows;
            float want = r.value[r.i[row * r.cols + column]] + 0.0f;
            if (oracle_bits(wide_y[i]) != oracle_bits(want))
                family_fail(k, NULL, "full width, row %zu column %zu", row, column);
        }
    }
    pool_used = 0;
    family_end();
}

/* ==== 4. Chains and KDA ============================================================== */

static void call_chain_bf16(const k3_kernels *K, void **p, const shape *s) {
    K->chain_bf16(p[0], s->ldy, p[1], s->ldw, s->n_i, s->n, p[2], s->ldc, s->batch);
}

static void call_chain_f32(const k3_kernels *K, void **p, const shape *s) {
    K->chain_f32(p[0], s->ldy, p[1], s->ldw, s->n_i, s->n, p[2], s->ldc, s->batch);
}

static float oracle_chain(const float *w, size_t n_j, size_t j, const float *c, size_t n_i) {
    float y = 0.0f;
    for (size_t i = 0; i < n_i; i++) y = fmaf(w[i * n_j + j], c[i], y);
    return y;
}

static void try_chain(bool is_bf16, kind kd, size_t n_i, size_t n_j, size_t batch, size_t more) {
    size_t ldw = n_j + more, ldy = n_j + more % 3, ldc = n_i + more % 2;
    size_t n_y = (batch - 1) * ldy + n_j, n_c = n_i ? (batch - 1) * ldc + n_i : 0;
    size_t n_w = n_i ? (n_i - 1) * ldw + n_j : 0;
    float *w = take_f32(n_i * n_j), *c = take_f32(batch * n_i), *y = take_f32(batch * n_j);
    for (size_t i = 0; i < n_i * n_j; i++) {
        w[i] = draw_w(kd);
        if (is_bf16) w[i] = oracle_bf16((uint16_t)(oracle_bits(w[i]) >> 16));
    }
    for (size_t i = 0; i < batch * n_i; i++) c[i] = draw_x(kd);
    for (size_t t = 0; t < batch; t++)
        for (size_t j = 0; j < n_j; j++)
            y[t * n_j + j] = oracle_chain(w, n_j, j, c + t * n_i, n_i);
    trial t = {.call = is_bf16 ? call_chain_bf16 : call_chain_f32,
               .s = {.n = n_j, .n_i = n_i, .batch = batch, .ldw = ldw, .ldy = ldy, .ldc = ldc,
                     .kind = kind_name[kd]}};
    add_buffer(&t, take_canary(n_y), strided_image(y, n_j, batch, n_j, ldy), n_y * 4, 4);
    if (n_i == 0) {
        add_buffer(&t, w, NULL, 0, 2);
        add_buffer(&t, c, NULL, 0, 4);
    } else {
        if (is_bf16)
            add_buffer(&t, bf16_image(w, n_i, n_j, ldw), NULL, n_w * 2, 2);
        else
            add_buffer(&t, strided_image(w, n_j, n_i, n_j, ldw), NULL, n_w * 4, 4);
        add_buffer(&t, strided_image(c, n_i, batch, n_i, ldc), NULL, n_c * 4, 4);
    }
    run_trial(&t);
    pool_used = 0;
}

static void test_chains(bool is_bf16) {
    static const size_t n_i[] = {0, 1, 5, 128, 256};
    static const size_t n_j[] = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 65, 127, 129};
    const char *kernel = is_bf16 ? "chain_bf16" : "chain_f32";
    for (size_t i = 0; i < LEN(n_i); i++) {
        static const char *const name[] = {"n_i 0", "n_i 1", "n_i 5", "n_i 128", "n_i 256"};
        family_begin(kernel, name[i]);
        for (size_t j = 0; j < LEN(n_j); j++)
            for (size_t b = 0; b < LEN(batches); b++)
                if ((!is_quick && n_i[i] < 128) || (i + j + b) % (is_quick ? 7 : 3) == 0) {
                    kind k = (kind)((j + b) % N_KINDS);
                    try_chain(is_bf16, k, n_i[i], n_j[j], batches[b], j + b);
                }
        family_end();
    }
    family_begin(kernel, "512 columns");
    try_chain(is_bf16, PLAIN, 128, 512, 9, 0);
    try_chain(is_bf16, WIDE, 256, 511, 5, 1);
    try_chain(is_bf16, WIDE, 64, 512, 1, 64);
    family_end();
}

static void test_chain_gaps(void) {
    static const size_t n_j[] = {1, 3, 7, 8, 15, 17, 31, 33, 511};
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        family_begin(is_bf16 ? "chain_bf16" : "chain_f32", "guard page after every row");
        for (size_t j = 0; j < LEN(n_j); j++)
            for (size_t batch = 1; batch <= 9; batch += 2) {
                size_t n = n_j[j], n_i = 5, size = is_bf16 ? 2 : 4, stride;
                sample m = sample_new(is_bf16 ? BF16 : F32, PLAIN, n, n_i, batch);
                float *c = take_f32(batch * n_i), *want = take_f32(batch * n);
                for (size_t i = 0; i < batch * n_i; i++) c[i] = draw_x(WIDE);
                for (size_t i = 0; i < batch * n; i++)
                    want[i] = oracle_chain(m.w, n, i % n, c + i / n * n_i, n_i);
                const void *rows = is_bf16 ? (void *)bf16_image(m.w, n_i, n, n) : (void *)m.w;
                void *p[3] = {take_f32(batch * n), gap_rows(rows, n * size, n_i, &stride), c};
                shape s = {.n = n, .n_i = n_i, .batch = batch, .ldw = stride / size, .ldy = n,
                           .ldc = n_i};
                family_runs++;
                for (size_t k = 0; k < n_tables; k++) {
                    call_fn call = is_bf16 ? call_chain_bf16 : call_chain_f32;
                    if (!run_guarded(call, tables[k], p, &s))
                        family_fail(k, &s, "touched the gap after a row");
                    else if (memcmp(p[0], want, batch * n * 4) != 0)
                        family_fail(k, &s, "wrong values");
                }
                gap_free(p[1], n * size, n_i);
                pool_used = 0;
            }
        family_end();
    }
}

/* -- KDA. */
static void oracle_kda(float *S, size_t d, const float *a, const float *khat, const float *qhat,
                       const float *val, float beta, float *o) {
    for (size_t v = 0; v < d; v++) {
        float u = 0.0f, out = 0.0f;
        for (size_t k = 0; k < d; k++) S[k * d + v] = S[k * d + v] * a[k];
        for (size_t k = 0; k < d; k++) u = fmaf(S[k * d + v], khat[k], u);
        float delta = beta * (val[v] - u);
        for (size_t k = 0; k < d; k++) S[k * d + v] = fmaf(khat[k], delta, S[k * d + v]);
        for (size_t k = 0; k < d; k++) out = fmaf(S[k * d + v], qhat[k], out);
        o[v] = out;
    }
}

static void call_kda(const k3_kernels *K, void **p, const shape *s) {
    K->kda(p[0], s->n, s->n_tok, p[1], p[2], p[3], p[4], s->ldv, p[5], s->ldb, p[6], s->ldy);
}

/* The same tokens, one call each. */
static void call_kda_steps(const k3_kernels *K, void **p, const shape *s) {
    const float *a = p[1], *k = p[2], *q = p[3], *val = p[4], *beta = p[5];
    float *o = p[6];
    for (size_t t = 0; t < s->n_tok; t++)
        K->kda(p[0], s->n, 1, a + t * s->n, k + t * s->n, q + t * s->n, val + t * s->ldv, s->ldv,
               beta + t * s->ldb, s->ldb, o + t * s->ldy, s->ldy);
}

static void try_kda(size_t d, size_t n_tok, kind kd) {
    float *S = take_f32(d * d), *want = take_f32(d * d), *a = take_f32(n_tok * d);
    float *k = take_f32(n_tok * d), *q = take_f32(n_tok * d), *val = take_f32(n_tok * d);
    float *beta = take_f32(n_tok), *o = take_f32(n_tok * d);
    for (size_t i = 0; i < d * d; i++) S[i] = draw_w(kd);
    for (size_t i = 0; i < n_tok * d; i++) {
        a[i] = oracle_exp(-fabsf(rnd_f32(-6, 1)));
        k[i] = rnd_f32(-8, -2);
        q[i] = rnd_f32(-8, -2);
        val[i] = draw_x(kd);
    }
    for (size_t t = 0; t < n_tok; t++) beta[t] = fabsf(rnd_f32(-3, -1));
    memcpy(want, S, d * d * sizeof *S);
    for (size_t t = 0; t < n_tok; t++)
        oracle_kda(want, d, a + t * d, k + t * d, q + t * d, val + t * d, beta[t], o + t * d);
    for (int steps = 0; steps < 2; steps++) {
        size_t ldv = d + (d + n_tok) % 3, ldb = 1 + n_tok % 3, ldo = d + n_tok % 2;
        trial t = {.call = steps ? call_kda_steps : call_kda,
                   .s = {.n = d, .n_tok = n_tok, .ldv = ldv, .ldb = ldb, .ldy = ldo,
                         .kind = kind_name[kd]}};
        size_t n_o = (n_tok - 1) * ldo + d;
        add_buffer(&t, S, want, d * d * 4, 4);
        add_buffer(&t, a, NULL, n_tok * d * 4, 4);
        add_buffer(&t, k, NULL, n_tok * d * 4, 4);
        add_buffer(&t, q, NULL, n_tok * d * 4, 4);
        add_buffer(&t, strided_image(val, d, n_tok, d, ldv), NULL, ((n_tok - 1) * ldv + d) * 4, 4);
        add_buffer(&t, strided_image(beta, 1, n_tok, 1, ldb), NULL, (n_tok * ldb - ldb + 1) * 4, 4);
        add_buffer(&t, take_canary(n_o), strided_image(o, d, n_tok, d, ldo), n_o * 4, 4);
        run_trial(&t);
    }
    pool_used = 0;
}

static void test_kda(void) {
    static const size_t d[] = {8, 16, 24, 32, 64, 128}, n_tok[] = {1, 2, 5, 17};
    for (size_t j = 0; j < LEN(n_tok); j++) {
        static const char *const name[] = {"1 token", "2 tokens", "5 tokens", "17 tokens"};
        family_begin("kda", name[j]);
        for (size_t i = 0; i < LEN(d); i++)
            for (kind kd = PLAIN; kd < N_KINDS; kd++)
                if (!is_quick || (d[i] < 64 ? kd % 2 == 0 : kd == WIDE))
                    try_kda(d[i], n_tok[j], kd);
        family_end();
    }
}

/* ==== 5. Elementwise ================================================================= */

/* Packing: vector t of a batch, into a field of canaries. */
static void call_pack(const k3_kernels *K, void **p, const shape *s) {
    K->pack(p[0], s->batch, s->n_tok, p[1], s->n);
}

static void test_pack(void) {
    family_begin("pack", "every place");
    for (size_t n = 1; n <= 260; n += n < 70 ? 1 : 37)
        for (size_t b = 0; b < LEN(batches); b++) {
            size_t batch = batches[b], npad = (n + 31) / 32 * 32, one = (n + b) % batch;
            for (size_t t = 0; t < batch; t++) {
                if (batch > 9 && t != one && t != batch - 1) continue;
                float *x = take_f32(n), *want = take_canary(batch * npad);
                for (size_t k = 0; k < npad; k++) {
                    if (k < n) x[k] = rnd_finite();
                    want[oracle_place(n, batch, t, k)] = k < n ? x[k] : 0.0f;
                }
                trial tr = {.call = call_pack, .s = {.n = n, .batch = batch, .n_tok = t}};
                add_buffer(&tr, take_canary(batch * npad), want, batch * npad * 4, 64);
                add_buffer(&tr, x, NULL, n * 4, 4);
                if (!is_quick || (n + b) % 5 == 0) run_trial(&tr);
                pool_used = 0;
            }
        }
    family_end();
}

static void call_widen(const k3_kernels *K, void **p, const shape *s) {
    K->widen(p[0], p[1], s->n);
}

static void test_widen(void) {
    family_begin("widen", "all bf16");
    for (size_t n = 1; n <= 70; n++) {
        bool is_all = n == 70;
        size_t m = is_all ? 65536 : n;
        uint16_t *x = take(m * 2);
        float *want = take_f32(m);
        for (size_t i = 0; i < m; i++) {
            x[i] = is_all ? (uint16_t)i : (uint16_t)rnd();
            uint32_t bits = (uint32_t)x[i] * 65536u; /* NaNs keep their bits */
            memcpy(want + i, &bits, 4);
        }
        trial t = {.call = call_widen, .s = {.n = m}};
        add_buffer(&t, take_canary(m), want, m * 4, 4);
        add_buffer(&t, x, NULL, m * 2, 2);
        run_trial(&t);
        pool_used = 0;
    }
    family_end();
}

/* Kernels of the form y = f(x, g; a, b), y perhaps x. p[0] is y, p[1] x, p[2] g. */
static void call_add(const k3_kernels *K, void **p, const shape *s) { K->add(p[0], p[1], s->n); }
static void call_scale(const k3_kernels *K, void **p, const shape *s) {
    K->scale(p[0], p[1], s->a, s->n);
}
static void call_scale2(const k3_kernels *K, void **p, const shape *s) {
    K->scale2(p[0], p[1], s->a, p[2], s->n);
}
static void call_divide(const k3_kernels *K, void **p, const shape *s) {
    K->divide(p[0], p[1], s->a, s->n);
}
static void call_axpy(const k3_kernels *K, void **p, const shape *s) {
    K->axpy(p[0], s->a, p[1], s->n);
}
static void call_exp_sub(const k3_kernels *K, void **p, const shape *s) {
    K->exp_sub(p[0], p[1], s->a, s->n);
}
static void call_sigmoid(const k3_kernels *K, void **p, const shape *s) {
    K->sigmoid(p[0], p[1], s->n);
}
static void call_mul_sigmoid(const k3_kernels *K, void **p, const shape *s) {
    K->mul_sigmoid(p[0], p[1], p[2], s->n);
}
static void call_situ(const k3_kernels *K, void **p, const shape *s) {
    K->situ(p[0], p[1], p[2], s->a, s->b, s->n);
}
static void call_kda_decay(const k3_kernels *K, void **p, const shape *s) {
    K->kda_decay(p[0], p[1], p[2], s->a, s->b, s->n);
}

static float want_add(float y, float x, float g, const shape *s) {
    (void)g, (void)s;
    return y + x;
}
static float want_scale(float y, float x, float g, const shape *s) {
    (void)y, (void)g;
    return x * s->a;
}
static float want_scale2(float y, float x, float g, const shape *s) {
    (void)y;
    float once = x * s->a;
    return once * g;
}
static float want_divide(float y, float x, float g, const shape *s) {
    (void)y, (void)g;
    return x / s->a;
}
static float want_axpy(float y, float x, float g, const shape *s) {
    (void)g;
    return fmaf(s->a, x, y);
}
static float want_exp_sub(float y, float x, float g, const shape *s) {
    (void)y, (void)g;
    return oracle_exp(x - s->a);
}
static float want_sigmoid(float y, float x, float g, const shape *s) {
    (void)y, (void)g, (void)s;
    return oracle_sigmoid(x);
}
static float want_mul_sigmoid(float y, float x, float g, const shape *s) {
    (void)y, (void)s;
    return x * oracle_sigmoid(g);
}
static float want_situ(float y, float x, float g, const shape *s) {
    (void)y;
    return oracle_situ(x, g, s->a, s->b);
}
static float want_kda_decay(float y, float x, float g, const shape *s) {
    (void)y;
    float t = x + g;
    return oracle_exp(s->b * oracle_sigmoid(s->a * t));
}

typedef struct {
    const char *name;
    call_fn call;
    float (*want)(float y, float x, float g, const shape *s);
    float a, b;
    bool has_g, may_alias; /* y may be x, says kernels.h; add and axpy read y */
} map_kernel;

static const map_kernel map_kernels[] = {
    {"add", call_add, want_add, 0, 0, false, true},
    {"scale", call_scale, want_scale, 0x1.8p-3f, 0, false, true},
    {"scale2", call_scale2, want_scale2, 0x1.5p-5f, 0, true, true},
    {"divide", call_divide, want_divide, 3.1f, 0, false, true},
    {"axpy", call_axpy, want_axpy, 0x1.357p-2f, 0, false, true},
    {"exp_sub", call_exp_sub, want_exp_sub, 1.7f, 0, false, true},
    {"sigmoid", call_sigmoid, want_sigmoid, 0, 0, false, true},
    {"mul_sigmoid", call_mul_sigmoid, want_mul_sigmoid, 0, 0, true, true},
    {"situ", call_situ, want_situ, 4.0f, 25.0f, true, true},
    {"kda_decay", call_kda_decay, want_kda_decay, 2.7f, -5.0f, true, true},
};

/* In place: y and x are one buffer. */
static const map_kernel *alias_kernel;
static void call_alias(const k3_kernels *K, void **p, const shape *s) {
    void *q[3] = {p[0], p[0], p[1]};
    alias_kernel->call(K, q, s);
}

/* A value an activation might have, or once in a while any finite one. */
static float draw_any(void) {
    switch (rnd() % 8) {
    case 0: return rnd_finite();
    case 1: return rnd_f32(-149, -120);
    case 2: return copysignf(0.0f, rnd_f32(0, 0));
    case 3: return rnd_f32(3, 7);
    default: return rnd_f32(-10, 4);
    }
}

static void try_map(const map_kernel *m, size_t n, bool is_alias) {
    float *y = take_f32(n), *x = take_f32(n), *g = take_f32(n), *want = take_f32(n);
    trial t = {.call = is_alias ? call_alias : m->call, .s = {.n = n, .a = m->a, .b = m->b},
               .nan_is_nan = true};
    for (size_t i = 0; i < n; i++) {
        x[i] = draw_any();
        y[i] = is_alias ? x[i] : draw_any();
        g[i] = draw_any();
        want[i] = m->want(y[i], x[i], g[i], &t.s);
    }
    alias_kernel = m;
    add_buffer(&t, y, want, n * 4, 4);
    if (!is_alias) add_buffer(&t, x, NULL, n * 4, 4);
    if (m->has_g) add_buffer(&t, g, NULL, n * 4, 4);
    run_trial(&t);
    pool_used = 0;
}

static void test_maps(void) {
    for (size_t m = 0; m < LEN(map_kernels); m++)
        for (int is_alias = 0; is_alias <= map_kernels[m].may_alias; is_alias++) {
            family_begin(map_kernels[m].name, is_alias ? "in place" : "n 0..70 and long");
            for (size_t n = 0; n <= 70; n++) try_map(&map_kernels[m], n, is_alias);
            for (size_t n = 71; n <= (is_quick ? 1000 : 40000); n = n * 3 + 1)
                try_map(&map_kernels[m], n, is_alias);
            family_end();
        }
}

static void call_conv(const k3_kernels *K, void **p, const shape *s) {
    const float *r[4] = {p[2], p[3], p[4], p[5]};
    K->conv_silu(p[0], r, p[1], s->n);
}

static void call_conv_alias(const k3_kernels *K, void **p, const shape *s) {
    const float *r[4] = {p[2], p[3], p[4], p[0]};
    K->conv_silu(p[0], r, p[1], s->n);
}

static void test_conv_silu(void) {
    for (int is_alias = 0; is_alias < 2; is_alias++) {
        family_begin("conv_silu", is_alias ? "in place" : "n 0..70 and long");
        for (size_t n = 0; n <= 1000; n += n < 70 ? 1 : 310) {
            float *w = take_f32(4 * n), *r[4], *want = take_f32(n);
            for (size_t i = 0; i < 4 * n; i++) w[i] = i % 9 ? rnd_f32(-4, 1) : draw_any();
            for (size_t j = 0; j < 4; j++) {
                r[j] = take_f32(n);
                for (size_t i = 0; i < n; i++) r[j][i] = i % 7 ? rnd_f32(-8, 4) : draw_any();
            }
            for (size_t i = 0; i < n; i++) {
                float c = w[4 * i] * r[0][i];
                for (size_t j = 1; j < 4; j++) c = fmaf(w[4 * i + j], r[j][i], c);
                want[i] = c * oracle_sigmoid(c);
            }
            trial t = {.call = is_alias ? call_conv_alias : call_conv, .s = {.n = n},
                       .nan_is_nan = true};
            add_buffer(&t, is_alias ? r[3] : take_canary(n), want, n * 4, 4);
            add_buffer(&t, w, NULL, 4 * n * 4, 4);
            for (size_t j = 0; j < (is_alias ? 3 : 4); j++) add_buffer(&t, r[j], NULL, n * 4, 4);
            run_trial(&t);
            pool_used = 0;
        }
        family_end();
    }
}

/* -- The int64 expert sum. p[0] q, p[1] y, p[2] the returned size_t. */
static void call_add_q40(const k3_kernels *K, void **p, const shape *s) {
    size_t r = K->add_q40(p[0], p[1], s->a, s->n);
    memcpy(p[2], &r, sizeof r);
}

/* With a term out of range only the return value counts; q is unspecified. */
static void call_bad_q40(const k3_kernels *K, void **p, const shape *s) {
    int64_t q[256] = {0};
    size_t r = K->add_q40(q, p[0], s->a, s->n);
    memcpy(p[1], &r, sizeof r);
}

/* Terms that make rounding choose: k + 1/2 steps of 2^-40, of both parities and signs. */
static float draw_term(size_t i) {
    switch (i % 4) {
    case 0: return ldexpf((float)(2 * rnd_below(1 << 22) + 1), -41) * (rnd() & 1 ? -1.0f : 1.0f);
    case 1: return rnd_f32(-45, -18);
    case 2: return rnd_f32(-18, 16);
    default:
        if (rnd() % 3) return draw_w(TINY);
        return rnd() & 1 ? 0x1.fffffep16f : -0x1.fffffep16f; /* the largest */
    }
}

static void try_add_q40(size_t n, float w) {
    int64_t *q = take(n * 8), *want = take(n * 8);
    float *y = take_f32(n);
    for (size_t i = 0; i < n; i++) {
        do y[i] = draw_term(i);
        while (!(fabsf(w * y[i]) < 131072.0f));
        q[i] = (int64_t)rnd() / 64;
        want[i] = q[i] + oracle_q40(w * y[i]);
    }
    size_t zero = 0;
    trial t = {.call = call_add_q40, .s = {.n = n, .a = w}};
    add_buffer(&t, q, want, n * 8, 8);
    add_buffer(&t, y, NULL, n * 4, 4);
    add_buffer(&t, &zero, &n, sizeof n, sizeof n);
    run_trial(&t);
    pool_used = 0;
}

static void test_add_q40(void) {
    static const float w[] = {1.0f, 0.5f, 0.3f, 1.7f, 0x1p-20f};
    family_begin("add_q40", "terms, half-way cases");
    for (size_t n = 0; n <= 70; n++) try_add_q40(n, w[n % LEN(w)]);
    for (size_t i = 0; i < LEN(w); i++) try_add_q40(is_quick ? 400 : 20000, w[i]);
    family_end();

    family_begin("add_q40", "index of a bad term");
    static const uint32_t bad[] = {0x48000000, 0xc8000000, 0x7f800000, 0xff800000,
                                   0x7fc00000, 0xffc12345, 0x7f7fffff, 0x48000001};
    for (size_t n = 1; n <= 67; n += is_quick ? 11 : 1)
        for (size_t i = 0; i < n; i++) {
            float *y = take_f32(n);
            for (size_t j = 0; j < n; j++) y[j] = rnd_f32(-20, 10);
            y[i] = oracle_from_bits(bad[(n + i) % LEN(bad)]);
            if (i + 3 < n) y[i + 3] = oracle_from_bits(0x7fc00000); /* the answer is the first bad term */
            size_t zero = 0;
            trial t = {.call = call_bad_q40, .s = {.n = n, .a = 1.0f}};
            add_buffer(&t, y, NULL, n * 4, 4);
            add_buffer(&t, &zero, &i, sizeof i, sizeof i);
            run_trial(&t);
            pool_used = 0;
        }
    family_end();
}

static void call_q40_f32(const k3_kernels *K, void **p, const shape *s) {
    K->q40_f32(p[0], p[1], s->n);
}

/* Ties of the 24-bit rounding, and sums that a rounding through double gets wrong. */
static int64_t draw_q(size_t i) {
    int bits = 25 + (int)rnd_below(38);                           /* the top bit is 2^bits */
    int64_t unit = (int64_t)1 << (bits - 23), q = (int64_t)1 << bits;
    q += (int64_t)rnd_below(1 << 23) * unit;
    switch (i % 5) {
    case 0: q += unit / 2; break;                                 /* a tie            */
    case 1: q += unit / 2 + 1; break;                             /* just above it    */
    case 2: q += unit / 2 - 1; break;                             /* just below it    */
    case 3: q = (int64_t)rnd() >> rnd_below(64); break;           /* any              */
    default: q = ((int64_t)1 << 24) - 2 + (int64_t)rnd_below(5);  /* near 2^24        */
    }
    return rnd() & 1 ? q : -q;
}

static void test_q40_f32(void) {
    family_begin("q40_f32", "one rounding");
    for (size_t n = 0; n <= 20000; n = n < 70 ? n + 1 : n * 4) {
        int64_t *q = take(n * 8);
        float *want = take_f32(n);
        for (size_t i = 0; i < n; i++) {
            q[i] = i == 3 ? INT64_MIN : i == 4 ? INT64_MAX : draw_q(i);
            want[i] = oracle_q40_f32(q[i]);
        }
        trial t = {.call = call_q40_f32, .s = {.n = n}};
        add_buffer(&t, take_canary(n), want, n * 4, 4);
        add_buffer(&t, q, NULL, n * 8, 8);
        run_trial(&t);
        pool_used = 0;
    }
    family_end();
}

static void call_is_finite(const k3_kernels *K, void **p, const shape *s) {
    *(uint8_t *)p[1] = K->is_finite(p[0], s->n);
}

static void test_is_finite(void) {
    static const uint32_t bad[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff};
    family_begin("is_finite", "each place");
    for (size_t n = 0; n <= 70; n++)
        for (size_t i = 0; i <= n; i++) { /* i == n: none is bad */
            float *x = take_f32(n);
            for (size_t j = 0; j < n; j++) x[j] = j % 3 ? rnd_finite() : FLT_MAX;
            if (i < n) memcpy(x + i, &bad[(n + i) % LEN(bad)], 4);
            uint8_t before = 7, want = i == n;
            trial t = {.call = call_is_finite, .s = {.n = n, .n_i = i}};
            add_buffer(&t, x, NULL, n * 4, 4);
            add_buffer(&t, &before, &want, 1, 1);
            if (!is_quick || (n + i) % 7 == 0 || i == n) run_trial(&t);
            pool_used = 0;
        }
    family_end();
}

/* ==== 6. exp, sigmoid, tanh ========================================================== */

/* Distance of `got` from the exact value, in units of the f32 spacing there. */
static double ulps(float got, double exact) {
    if (isinf(got)) return fabs(exact) >= FLT_MAX ? 0 : 1e9;
    int e;
    frexp(exact, &e);
    if (exact == 0 || e < -125) e = -125; /* subnormal: 2^-149 */
    return fabs((double)got - exact) / ldexp(1.0, e - 24);
}

/* Worst errors seen, and mismatches per table and kernel. */
enum { SWEEP_EXP, SWEEP_SIGMOID, SWEEP_G, SWEEP_U, SWEEP_MUL, SWEEP_CONV, SWEEP_DECAY, N_SWEEPS };
#define N_SWEEPS_ALL (SWEEP_U + 1) /* the sweep over all patterns has only these: the others are made of them */
static const char *const sweep_name[N_SWEEPS] = {"exp_sub",     "sigmoid",   "situ (g)", "situ (u)",
                                                 "mul_sigmoid", "conv_silu", "kda_decay"};
typedef struct {
    double exp_max, exp_low_max, sigmoid_max, tanh_max;
    uint64_t bad[4][N_SWEEPS], inline_bad, n;
    int n_sweeps;
} sweep_result;

#define SWEEP 4096
typedef struct {
    float x[SWEEP], exp[SWEEP], sigmoid[SWEEP], tanh[SWEEP], want[SWEEP], got[SWEEP], zero[SWEEP];
    float g[SWEEP], w[SWEEP][4]; /* every g is SWEEP_CONST */
} sweep_block;
#define SWEEP_CONST 1.375f

static void sweep_bounds(const sweep_block *b, size_t n, sweep_result *res) {
    for (size_t i = 0; i < n; i++) {
        double x = (double)b->x[i], e = exp(x), err = ulps(b->exp[i], e);
        double *worst = e >= FLT_MIN ? &res->exp_max : &res->exp_low_max;
        if (e < 0x1p128 && err > *worst) *worst = err;
        err = ulps(b->sigmoid[i], 1 / (1 + exp(-x)));
        if (err > res->sigmoid_max) res->sigmoid_max = err;
        err = ulps(b->tanh[i], tanh(x));
        if (err > res->tanh_max) res->tanh_max = err;
    }
}

static void sweep_table(const k3_kernels *K, sweep_block *b, size_t n, int which) {
    const float *r[4] = {b->zero, b->zero, b->zero, b->x};
    switch (which) {
    case SWEEP_EXP: K->exp_sub(b->got, b->x, 0.0f, n); break;
    case SWEEP_SIGMOID: K->sigmoid(b->got, b->x, n); break;
    case SWEEP_MUL: K->mul_sigmoid(b->got, b->g, b->x, n); break;
    case SWEEP_G: K->situ(b->got, b->x, b->g, 4.0f, 25.0f, n); break;
    case SWEEP_U: K->situ(b->got, b->g, b->x, 1.0f, 1.0f, n); break;
    case SWEEP_CONV: K->conv_silu(b->got, r, b->w[0], n); break;
    default: K->kda_decay(b->got, b->x, b->zero, 1.0f, -5.0f, n); break;
    }
}

static void sweep_want(sweep_block *b, size_t n, int which) {
    const float gate = oracle_tanh(SWEEP_CONST) * oracle_sigmoid(SWEEP_CONST);
    const float up = 25.0f * oracle_tanh(SWEEP_CONST / 25.0f);
    for (size_t i = 0; i < n; i++) {
        float x = b->x[i], *y = &b->want[i];
        switch (which) {
        case SWEEP_EXP: *y = b->exp[i]; break;
        case SWEEP_SIGMOID: *y = b->sigmoid[i]; break;
        case SWEEP_MUL: *y = SWEEP_CONST * b->sigmoid[i]; break;
        case SWEEP_G: *y = ((4.0f * oracle_tanh(x / 4.0f)) * b->sigmoid[i]) * up; break;
        case SWEEP_U: *y = gate * b->tanh[i]; break;
        case SWEEP_CONV: x = fmaf(1.0f, x, 0.0f); *y = x * b->sigmoid[i]; break;
        default: *y = oracle_exp(-5.0f * oracle_sigmoid(x + 0.0f)); break;
        }
    }
}

/* Count the differences to the inline definitions of kernels.h, which k3.c and CUDA use. */
static uint64_t sweep_inline(const sweep_block *b, size_t n) {
    uint64_t n_bad = 0;
    for (size_t i = 0; i < n; i++) {
        n_bad += oracle_bits(k3_exp(b->x[i])) != oracle_bits(b->exp[i]);
        n_bad += oracle_bits(k3_sigmoid(b->x[i])) != oracle_bits(b->sigmoid[i]);
        n_bad += oracle_bits(k3_tanh(b->x[i])) != oracle_bits(b->tanh[i]);
    }
    return n_bad;
}

/* Run every table on the n <= SWEEP inputs in b->x. */
static void sweep_run(sweep_block *b, size_t n, sweep_result *res) {
    res->n += n;
    for (size_t i = 0; i < n; i++) {
        b->exp[i] = oracle_exp(b->x[i]);
        b->sigmoid[i] = oracle_sigmoid(b->x[i]);
        b->tanh[i] = oracle_tanh(b->x[i]);
    }
    sweep_bounds(b, n, res);
    if (res->n_sweeps == N_SWEEPS) res->inline_bad += sweep_inline(b, n);
    for (int which = 0; which < res->n_sweeps; which++) {
        sweep_want(b, n, which);
        for (size_t k = 0; k < n_tables; k++) {
            sweep_table(tables[k], b, n, which);
            const uint8_t *got = (const uint8_t *)b->got, *want = (const uint8_t *)b->want;
            if (first_difference(got, want, n * 4, true) < n * 4) res->bad[k][which]++;
        }
    }
}

static void sweep_init(sweep_block *b) {
    memset(b, 0, sizeof *b);
    for (size_t i = 0; i < SWEEP; i++) b->g[i] = SWEEP_CONST, b->w[i][3] = 1.0f;
}

static void sweep_add(sweep_result *sum, const sweep_result *r) {
    sum->exp_max = fmax(sum->exp_max, r->exp_max);
    sum->exp_low_max = fmax(sum->exp_low_max, r->exp_low_max);
    sum->sigmoid_max = fmax(sum->sigmoid_max, r->sigmoid_max);
    sum->tanh_max = fmax(sum->tanh_max, r->tanh_max);
    sum->inline_bad += r->inline_bad;
    sum->n += r->n;
    for (size_t k = 0; k < 4; k++)
        for (int w = 0; w < N_SWEEPS; w++) sum->bad[k][w] += r->bad[k][w];
}

/* One sweep over bit patterns; each thread has a block and a result of its own. */
typedef struct {
    uint64_t stride;
    sweep_block *block;
    sweep_result *result;
} sweep_loop;

static void sweep_one_block(void *ctx, size_t i_block, int i_thread) {
    const sweep_loop *l = ctx;
    sweep_block *b = &l->block[i_thread];
    size_t n = 0;
    for (uint64_t i = 0; i < SWEEP; i++) {
        uint64_t bits = ((uint64_t)i_block * SWEEP + i) * l->stride;
        if (bits < (uint64_t)1 << 32 && (bits & 0x7fffffff) <= 0x7f800000)
            b->x[n++] = oracle_from_bits((uint32_t)bits);
    }
    sweep_run(b, n, &l->result[i_thread]);
}

/* Every stride-th bit pattern but the NaNs; all of them on all cores. */
static void sweep_patterns(uint64_t stride, sweep_result *sum) {
    uint64_t n_patterns = (((uint64_t)1 << 32) + stride - 1) / stride;
    int n_threads = stride == 1 ? (int)sysconf(_SC_NPROCESSORS_ONLN) : 1;
    k3_pool *threads = n_threads > 1 ? pool_open(n_threads) : NULL;
    sweep_loop l = {stride, malloc((size_t)n_threads * sizeof *l.block),
                    calloc((size_t)n_threads, sizeof *l.result)};
    if (!l.block || !l.result) abort();
    for (int i = 0; i < n_threads; i++) {
        sweep_init(&l.block[i]);
        l.result[i].n_sweeps = sum->n_sweeps;
    }
    pool_run(threads, (n_patterns + SWEEP - 1) / SWEEP, 100000, sweep_one_block, &l);
    for (int i = 0; i < n_threads; i++) sweep_add(sum, &l.result[i]);
    pool_close(threads);
    free(l.block);
    free(l.result);
}

static void sweep_report(const char *patterns, uint64_t stride) {
    sweep_result r = {.n_sweeps = stride == 1 ? N_SWEEPS_ALL : N_SWEEPS};
    sweep_patterns(stride, &r);
    for (int which = 0; which < r.n_sweeps; which++) {
        family_begin(sweep_name[which], patterns);
        family_runs = r.n;
        for (size_t k = 0; k < n_tables; k++) family_bad[k] = r.bad[k][which];
        family_end();
    }
    printf("kernels: %s, %" PRIu64 " inputs: exp %.3f ulp (subnormal results %.3f), "
           "sigmoid %.3f, tanh %.3f\n", patterns, r.n, r.exp_max, r.exp_low_max, r.sigmoid_max,
           r.tanh_max);
    CHECK(r.inline_bad == 0);
    CHECK(r.exp_max > 0.5 && r.exp_max <= 0.9);
    CHECK(r.exp_low_max <= 1.0);
    CHECK(r.sigmoid_max > 0.5 && r.sigmoid_max <= 2.402); /* 2.4019 at -0x1.0a111ap+2 */
    CHECK(r.tanh_max > 0.5 && r.tanh_max <= 1.4);
}

/* The clamps, the ends, both sides of each branch, signed zeros and subnormals. */
static void test_edges(void) {
    static const float at[] = {0.0f,      0.625f,  89.0f,    88.0f,     88.72284f, 104.0f,
                               103.97f,   87.3366f, 44.5f,   FLT_MAX,   FLT_MIN,   0x1p-149f,
                               0x1p-140f, 1.0f,    9.01f,    INFINITY,  0x1p-12f,  103.279f};
    static float x[LEN(at) * 6];
    for (size_t i = 0; i < LEN(at); i++)
        for (size_t j = 0; j < 6; j++) {
            float v = j % 3 == 1 ? nextafterf(at[i], INFINITY) : at[i];
            if (j % 3 == 2) v = nextafterf(at[i], 0.0f);
            x[6 * i + j] = j < 3 ? v : -v;
        }
    sweep_block *b = malloc(sizeof *b);
    sweep_result r = {.n_sweeps = N_SWEEPS};
    if (!b) abort();
    sweep_init(b);
    memcpy(b->x, x, sizeof x);
    sweep_run(b, LEN(x), &r);
    for (int which = 0; which < N_SWEEPS; which++) {
        family_begin(sweep_name[which], "edges");
        family_runs = r.n;
        for (size_t k = 0; k < n_tables; k++) family_bad[k] = r.bad[k][which];
        family_end();
    }
    free(b);
    CHECK(r.inline_bad == 0);

    family_begin("exp_sub, sigmoid", "pins");
    for (size_t k = 0; k < n_tables; k++) {
        const float in[5] = {0.0f, 89.0f, -104.0f, -0.0f, INFINITY};
        const uint32_t exp_is[5] = {0x3f800000, 0x7f800000, 0, 0x3f800000, 0x7f800000};
        const uint32_t sigmoid_is[5] = {0x3f000000, 0x3f800000, 0, 0x3f000000, 0x3f800000};
        float e[5], s[5];
        tables[k]->exp_sub(e, in, 0.0f, 5);
        tables[k]->sigmoid(s, in, 5);
        family_runs++;
        if (memcmp(e, exp_is, sizeof e) != 0) family_fail(k, NULL, "exp pins");
        if (memcmp(s, sigmoid_is, sizeof s) != 0) family_fail(k, NULL, "sigmoid pins");
    }
    family_end();
    CHECK(k3_exp(0.0f) == 1.0f);
    CHECK(isinf(k3_exp(89.0f)));
    CHECK(oracle_bits(k3_exp(-104.0f)) == 0);
    CHECK(oracle_bits(k3_tanh(-0.0f)) == 0x80000000);
    CHECK(oracle_bits(k3_tanh(INFINITY)) == 0x3f800000);
}

/* ==== 7. State, inline definitions, benchmarks ======================================= */

/* Rounding to nearest even, subnormals neither flushed nor taken as zero. */
static bool is_default_state(void) {
    volatile float least = FLT_MIN, half = 0.5f, tiny = 0x1p-149f, big = 0x1p126f;
    volatile float one = 1.0f, tie = 0x1p-24f, more = 0x1.8p-23f;
    return fegetround() == FE_TONEAREST && least * half != 0.0f && tiny * big != 0.0f &&
           one + tie == 1.0f && one + more == 1.0f + 0x1p-22f && -one - tie == -1.0f;
}

static void test_state_of_floats(void) {
    CHECK(is_default_state());
    /* A product just above and just below a tie: rounding first to double goes wrong. The
     * last one is a tie of subnormal spacing. */
    volatile float a = 4097.0f, b = 4097.0f, c = 0x1p-30f;
    CHECK(fmaf(a, b, c) == 16785410.0f);
    a = 3.0f, b = 5595137.0f, c = -0x1p-30f;
    CHECK(fmaf(a, b, c) == 16785410.0f);
    a = 0x1.000002p-75f, b = 0x1.fffffcp-76f, c = 0x1p-126f + 0x1p-149f;
    CHECK(fmaf(a, b, c) == 0x1p-126f + 0x1p-149f);
    a = 0x1.001p0f, b = 0x1.001p0f, c = -0x1.002p0f; /* an unfused one gives 0 */
    CHECK(fmaf(a, b, c) == 0x1p-24f);
    a = 4097.0f, b = 4097.0f, c = 0x1p-30f;
    CHECK(k3_fma(a, b, c) == 16785410.0f);
}

static void test_inline_definitions(void) {
    size_t n_bad = 0;
    for (size_t n = 1; n <= 100; n += 3)
        for (size_t b = 0; b < LEN(batches); b++)
            for (size_t t = 0; t < batches[b]; t++)
                for (size_t k = 0; k < n; k++)
                    n_bad += k3_xp_group(k3_pad(n), batches[b], t, k / 32) + k3_xp_lane(k % 32) !=
                             oracle_place(n, batches[b], t, k);
    CHECK(n_bad == 0);
    for (unsigned code = 0; code <= K3_SCALE_MAX; code++)
        for (unsigned nibble = 0; nibble < 16; nibble++)
            n_bad += oracle_bits(k3_e2m1(nibble) * k3_e8m0((uint8_t)code)) !=
                     oracle_bits(oracle_mxfp4(nibble, code));
    CHECK(n_bad == 0);
    for (size_t i = 0; i < 100000; i++) {
        float t;
        do t = draw_term(i);
        while (!(fabsf(t) < 131072.0f));
        n_bad += k3_q40(t) != oracle_q40(t);
        float g = draw_any(), u = draw_any();
        float have = k3_situ(g, u, 4.0f, 25.0f), want = oracle_situ(g, u, 4.0f, 25.0f);
        n_bad += oracle_bits(have) != oracle_bits(want);
        have = k3_silu(g), want = g * oracle_sigmoid(g);
        n_bad += oracle_bits(have) != oracle_bits(want);
    }
    CHECK(n_bad == 0);
}

static void call_read_stream(const k3_kernels *K, void **p, const shape *s) {
    uint64_t sum = K->read_stream(p[0], s->n);
    memcpy(p[1], &sum, sizeof sum);
}

/* The answer depends on every byte; nothing beyond the last is read. */
static void test_bench_kernels(void) {
    family_begin("read_stream, peak_fma", "depend on everything");
    for (size_t k = 0; k < n_tables; k++) {
        family_runs++;
        for (size_t n = 4096; n <= 16384; n *= 2) {
            uint8_t *data = arena[0] + ARENA_BYTES - n;
            for (size_t i = 0; i < n; i++) data[i] = (uint8_t)rnd();
            shape s = {.n = n};
            uint64_t before = 0, after = 0;
            void *p[2] = {data, &before}, *q[2] = {data, &after};
            if (!run_guarded(call_read_stream, tables[k], p, &s))
                family_fail(k, NULL, "read_stream touched a guard page");
            for (size_t i = 0; i < n; i += i < 512 || i + 512 >= n ? 1 : 61) {
                data[i] ^= 1;
                run_guarded(call_read_stream, tables[k], q, &s);
                data[i] ^= 1;
                if (before == after) family_fail(k, NULL, "byte %zu of %zu does not count", i, n);
            }
        }
        for (uint64_t n = 1; n <= 100000; n *= 10) {
            uint64_t flops = 0;
            float r = tables[k]->peak_fma(n, &flops);
            if (flops == 0 || flops % (2 * n) != 0) family_fail(k, NULL, "peak_fma flops");
            if (!isfinite(r)) family_fail(k, NULL, "peak_fma overflows");
        }
    }
    family_end();
}

/* ==== 8. Main ======================================================================== */

static void open_table(const k3_kernels *K, const char *name) {
    char line[64];
    snprintf(line, sizeof line, "table %s: %s", name, K ? "not on this CPU" : "not linked");
    if (!K || !K->is_supported())
        SKIP(line);
    else {
        CHECK_EQ_STR(K->name, name);
        tables[n_tables++] = K;
    }
}

static void open_tables(void) {
    open_table(&k3_kernels_ref, "ref");
#if defined(__x86_64__)
    open_table(&k3_kernels_avx2, "avx2");
    open_table(&k3_kernels_avx512, "avx512");
#elif defined(__aarch64__)
    open_table(&k3_kernels_neon, "neon");
#endif
    printf("kernels: tables");
    for (size_t k = 0; k < n_tables; k++) printf(" %s", tables[k]->name);
    printf("%s\n", is_quick ? ", quick" : "");
    CHECK(n_tables > 0);
    for (size_t k = 0; k < n_tables; k++) { /* no member of a table is empty */
        void *const *field = (void *const *)(const void *)tables[k];
        size_t n_empty = 0;
        for (size_t i = 0; i < sizeof *tables[k] / sizeof *field; i++) n_empty += !field[i];
        CHECK_EQ_INT(n_empty, 0);
    }
}

static void open_memory(void) {
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < MAX_BUFFERS; i++) arena[i] = guarded_map(ARENA_BYTES);
    pool = guarded_map(POOL_BYTES);
    struct sigaction act = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &act, NULL);
    sigaction(SIGBUS, &act, NULL);
}

static bool read_arguments(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            is_quick = true;
        else if (strcmp(argv[i], "--big") == 0)
            is_big = true;
        else if (strcmp(argv[i], "--data") == 0 && i + 1 < argc)
            data_dir = argv[++i];
        else
            return false;
    }
    return true;
}

/* Does the harness see a fault? A kernel that reads past its buffer must not pass. */
static void touch_guard(const k3_kernels *K, void **p, const shape *s) {
    (void)K, (void)s;
    *(volatile uint8_t *)p[0] = 1;
}

int main(int argc, char **argv) {
    test_begin("kernels");
    if (!read_arguments(argc, argv)) {
        fprintf(stderr, "usage: test_kernels [--quick] [--big] [--data DIR]\n");
        return 2;
    }
    fegetenv(&state_at_start);
    test_state_of_floats();
    open_memory();
    void *past = arena[0] + ARENA_BYTES, *before = arena[0] - 1;
    CHECK(!run_guarded(touch_guard, NULL, &past, NULL));
    CHECK(!run_guarded(touch_guard, NULL, &before, NULL));
    open_tables();
    test_inline_definitions();
    for (format f = BF16; f <= F32; f++) {
        test_matmul_lengths(f);
        test_matmul_shapes(f);
        test_matmul_wide(f);
        test_matmul_kinds(f);
    }
    test_matmul_gaps();
    test_matmul_no_rows();
    test_mxfp4();
    test_few_bf16();
    test_few_mxfp4();
    test_few_rows_apart();
    test_mxfp4_values();
    test_real_rows();
    test_dot();
    test_chains(true);
    test_chains(false);
    test_chain_gaps();
    test_kda();
    test_pack();
    test_widen();
    test_maps();
    test_conv_silu();
    test_add_q40();
    test_q40_f32();
    test_is_finite();
    test_edges();
    sweep_report("strided f32 patterns", is_quick ? 65537 : 4099);
    if (is_big) sweep_report("every f32 pattern", 1);
    test_bench_kernels();
    CHECK(is_default_state());
    return test_finish();
}
