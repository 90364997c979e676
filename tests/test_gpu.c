/* test_gpu.c - the GPU arm against the CPU's bits. Prints SKIP (exit 77) where there is no device.
 *
 *   test_gpu              every case
 *   test_gpu --quick      a few of each
 *   test_gpu --tiny       fewer still, for compute-sanitizer
 *   test_gpu --million    a million requests; memory of the device and of the process must not grow
 *   test_gpu --lost       the device faults: errors with a reason, no hang
 *   test_gpu --once ROWS  one request, 16 experts of K3 for ROWS rows, for a profiler to look at
 *
 * The expected sums come from experts.h with the CPU's kernels: the reference table at small widths,
 * the fastest one (which test_kernels holds against the reference) at K3's.
 */
#include "../experts.h"
#include "../gpu_tier.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static uint64_t n_passed, n_failed, seed = 1;
static char why[512];

static void check(bool is_good, const char *what, uint64_t at) {
    n_passed += is_good;
    n_failed += !is_good;
    if (!is_good && n_failed < 20) printf("FAIL %s (%llu)\n", what, (unsigned long long)at);
}

static uint64_t next(void) { /* splitmix64 */
    uint64_t x = seed += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint32_t below(uint32_t n) { return (uint32_t)(next() % n); }
static float uniform(void) { return (float)(next() >> 40) * 0x1p-23f - 1.0f; }

/* Most near 1, some of any size from 2^-40 to 2^12, some zero, some subnormal. */
static float heavy(void) {
    uint32_t k = below(100);
    if (k < 2) return 0.0f;
    if (k < 4) return uniform() * 0x1p-130f;
    if (k < 20) return ldexpf(uniform(), (int)below(53) - 40);
    return uniform();
}

/* ---- The model: experts in memory as on disk ---- */

typedef struct {
    uint32_t latent, inter, n;
    uint8_t *bytes;
    uint64_t one; /* bytes of an expert */
    expert_math math;
} model;

static uint64_t part(const model *m, int k) {
    uint64_t q = (uint64_t)m->latent * m->inter / 2;
    return k % 2 ? q / 16 : q;
}

static expert_view expert_of(const model *m, uint32_t e) {
    expert_view x;
    const uint8_t *p = m->bytes + e * m->one;
    for (int k = 0; k < N_EXPERT_TENSORS; p += part(m, k++)) x.p[k] = p;
    return x;
}

/* Scale codes: `spread` 0 as real experts have them, else any code in w1 and w3 of every other
 * expert (252 overflows: then the term is bad on both sides), and up to 128, which the common kernel
 * takes, in the rest. */
static void fill_expert(model *m, uint32_t e, int spread) {
    uint8_t *p = m->bytes + e * m->one;
    for (int k = 0; k < N_EXPERT_TENSORS; k++) {
        for (uint64_t i = 0; i < part(m, k); i++)
            if (k % 2 == 0)
                p[i] = (uint8_t)next();
            else if (spread && e % 2 && k < W2_PACKED)
                p[i] = below(16) ? (uint8_t)(100 + below(30)) : (uint8_t)below(253);
            else if (spread)
                p[i] = (uint8_t)(below(4) ? 90 + below(38) : below(129));
            else
                p[i] = (uint8_t)(114 + below(8));
        p += part(m, k);
    }
}

static void model_make(model *m, const char *kernels, uint32_t latent, uint32_t inter, uint32_t n,
                       int spread) {
    *m = (model){.latent = latent, .inter = inter, .n = n};
    for (int k = 0; k < N_EXPERT_TENSORS; k++) m->one += part(m, k);
    m->bytes = malloc(n * m->one);
    m->math = (expert_math){k3_kernels_find(kernels), latent, inter, 4.0f, 25.0f};
    for (uint32_t e = 0; e < n; e++) fill_expert(m, e, spread);
}

static void model_free(model *m) { free(m->bytes); }

/* ---- A request and its sums ---- */

typedef struct {
    uint32_t n_rows, n_items, n_pairs;
    float *z, *w;
    uint32_t *row;
    gpu_item *items;
    int64_t *Q, *want;
    uint8_t *bad, *want_bad;
} request;

static void request_make(request *r, uint32_t latent, uint32_t rows, uint32_t items,
                         uint32_t pairs) {
    r->z = malloc(rows * (uint64_t)latent * 4);
    r->w = malloc(pairs * 4ull);
    r->row = malloc(pairs * 4ull);
    r->items = malloc(items * sizeof *r->items);
    r->Q = malloc(rows * (uint64_t)latent * 8);
    r->want = malloc(rows * (uint64_t)latent * 8);
    r->bad = malloc(items);
    r->want_bad = malloc(items);
}

static void request_free(request *r) {
    free(r->z);
    free(r->w);
    free(r->row);
    free(r->items);
    free(r->Q);
    free(r->want);
    free(r->bad);
    free(r->want_bad);
}

/* Every row takes top_k experts of the first `n_experts`, at random; `is_all`: the same ones. */
static void request_fill(request *r, const model *m, uint32_t n_rows, uint32_t n_experts,
                         uint32_t top_k, bool is_all) {
    static uint8_t takes[512][1024];
    memset(takes, 0, sizeof takes);
    r->n_rows = n_rows;
    r->n_items = r->n_pairs = 0;
    for (uint64_t i = 0; i < (uint64_t)n_rows * m->latent; i++) r->z[i] = heavy();
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t k = 0; k < top_k;) {
            uint32_t e = is_all ? k : below(n_experts);
            k += !takes[t][e];
            takes[t][e] = 1;
        }
    for (uint32_t e = 0; e < n_experts; e++) {
        gpu_item it = {m->n - 1 - e, r->n_pairs, 0}; /* experts in slots in reverse order */
        for (uint32_t t = 0; t < n_rows; t++)
            if (takes[t][e]) {
                r->row[r->n_pairs] = t;
                r->w[r->n_pairs++] = uniform() * 2.5f;
                it.n++;
            }
        if (it.n) r->items[r->n_items++] = it;
    }
}

/* What the device must compute, expert by expert, so that one out of range is known. */
typedef struct {
    request *r;
    model *m;
    float *scratch; /* [threads][floats] */
    int64_t *term;  /* [threads][latent] */
    size_t floats;
    pthread_mutex_t lock;
} expect_loop;

static void expect_expert(void *ctx, size_t x, int i_thread) {
    expect_loop *l = ctx;
    request *r = l->r;
    const gpu_item *it = &r->items[x];
    size_t lat = l->m->latent;
    expert_view v = expert_of(l->m, it->slot);
    int64_t *term = l->term + (size_t)i_thread * lat;
    r->want_bad[x] = 0;
    for (uint32_t j = it->first; j < it->first + it->n; j++) {
        memset(term, 0, lat * 8);
        if (!expert_one(&l->m->math, &v, r->z + r->row[j] * lat, r->w[j], term,
                        l->scratch + (size_t)i_thread * l->floats))
            r->want_bad[x] = 1;
        pthread_mutex_lock(&l->lock);
        for (size_t i = 0; i < lat; i++) r->want[r->row[j] * lat + i] += term[i];
        pthread_mutex_unlock(&l->lock);
    }
}

static void request_expect(request *r, model *m) {
    static k3_pool *pool;
    int n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    expect_loop l = {.r = r, .m = m, .floats = (expert_one_floats(&m->math) + 15) / 16 * 16};
    if (!pool) pool = pool_open(n);
    memset(r->want, 0, r->n_rows * (size_t)m->latent * 8);
    l.scratch = aligned_alloc(64, (size_t)n * l.floats * 4);
    l.term = malloc((size_t)n * m->latent * 8);
    pthread_mutex_init(&l.lock, NULL);
    pool_run(pool, r->n_items, 1000000, expect_expert, &l);
    pthread_mutex_destroy(&l.lock);
    free(l.scratch);
    free(l.term);
}

static bool request_run(gpu *g, request *r, uint32_t latent) {
    uint64_t took_ns;
    int n_bad = 0;
    memset(r->Q, 0, r->n_rows * (uint64_t)latent * 8);
    if (gpu_begin(g, r->z, r->n_rows, r->items, r->n_items, r->row, r->w, r->n_pairs, why,
                  sizeof why) < 0 ||
        (n_bad = gpu_end(g, r->Q, r->bad, &took_ns, why, sizeof why)) < 0) {
        printf("%s\n", why);
        return false;
    }
    return true;
}

/* Run the request; run it again without the experts that were out of range, as the server does. */
static void request_check(gpu *g, request *r, model *m, const char *what) {
    uint32_t n = 0;
    bool is_any = false;
    request_expect(r, m);
    check(request_run(g, r, m->latent), what, 0);
    for (uint32_t x = 0; x < r->n_items; x++) {
        check(r->bad[x] == r->want_bad[x], what, x);
        is_any = is_any || r->want_bad[x];
        if (!r->want_bad[x]) r->items[n++] = r->items[x];
    }
    for (size_t i = 0; is_any && i < r->n_rows * (size_t)m->latent; i++) r->Q[0] |= r->Q[i];
    if (is_any) check(r->Q[0] == 0, "nothing is added", 0);
    if (is_any) {
        uint32_t n_pairs = r->n_pairs;
        r->n_items = n;
        if (n == 0) return;
        request_expect(r, m);
        check(request_run(g, r, m->latent), what, 1);
        r->n_pairs = n_pairs;
    }
    check(memcmp(r->Q, r->want, r->n_rows * (uint64_t)m->latent * 8) == 0, what, 2);
}

/* ---- Cases ---- */

static gpu *open_for(const model *m, uint32_t max_rows, uint32_t top_k) {
    gpu *g;
    gpu_options o = {.latent = m->latent,
                     .inter = m->inter,
                     .max_rows = max_rows,
                     .max_items = 1024,
                     .max_pairs = max_rows * top_k,
                     .max_slots = m->n,
                     .beta = 4.0f,
                     .linear_beta = 25.0f};
    if (gpu_open(&g, &o, why, sizeof why) < 0) {
        printf("FAIL open: %s\n", why);
        exit(1);
    }
    for (uint32_t e = 0; e < m->n; e++) {
        expert_view x = expert_of(m, e);
        if (gpu_upload(g, e, x.p, why, sizeof why) < 0) {
            printf("FAIL upload: %s\n", why);
            exit(1);
        }
    }
    return g;
}

/* Widths that fill no tile or chunk, and every scale code. */
static void test_small(bool is_quick, bool is_tiny) {
    static const uint32_t width[][2] = {{32, 32},   {64, 96},   {96, 32},  {128, 128}, {160, 416},
                                        {352, 128}, {512, 288}, {32, 800}, {288, 64}};
    for (size_t i = 0; i < (is_tiny ? 2 : sizeof width / sizeof *width); i++) {
        model m;
        request r;
        uint32_t n_experts = i == 1 && !is_quick ? 896 : 48;
        model_make(&m, "ref", width[i][0], width[i][1], n_experts, 1);
        request_make(&r, m.latent, 64, n_experts, 64 * 32);
        gpu *g = open_for(&m, 64, 32);
        for (uint32_t rows = 1; rows <= 64; rows += is_quick || i > 1 ? 21 : 1) {
            request_fill(&r, &m, rows, n_experts, 1 + below(32), false);
            request_check(g, &r, &m, "small");
        }
        for (uint32_t top_k = 1; top_k <= 32; top_k += is_quick ? 15 : 1) {
            request_fill(&r, &m, 1, n_experts, top_k, top_k % 2);
            request_check(g, &r, &m, "top_k");
        }
        gpu_close(g);
        request_free(&r);
        model_free(&m);
    }
}

/* One weight a row: with z = 1 in one place, h = SiTU of single weights, for every code and nibble.
 * Seen whole in Q: w2 picks one of them. */
static void test_codes(void) {
    model m;
    request r;
    model_make(&m, "ref", 512, 512, 1, 0);
    request_make(&r, 512, 1, 1, 1);
    uint64_t q = part(&m, 0), s = part(&m, 1);
    for (int pass = 0; pass < 64; pass++) {
        const uint64_t n_codes = pass % 2 ? 253 : 129; /* one pass for each of the two kernels */
        uint8_t *b = m.bytes;
        for (uint64_t row = 0; row < 512; row++)
            for (uint64_t i = 0; i < 256; i++) {
                b[row * 256 + i] = (uint8_t)(row * 7 + i + pass * 5);
                b[q + s + row * 256 + i] = (uint8_t)(row * 3 + i * 11 + pass);
            }
        for (uint64_t i = 0; i < s; i++) {
            b[q + i] = (uint8_t)((i * 31 + pass * 8) % n_codes);
            b[2 * q + s + i] = (uint8_t)((i * 17 + pass * 8 + 3) % n_codes);
            b[3 * q + 2 * s + i] = (uint8_t)((i + pass * 8) % 125); /* w2 */
        }
        gpu *g = open_for(&m, 1, 1);
        for (int k = 0; k < 64; k++) {
            uint32_t at = (uint32_t)(k * 8 + pass % 8);
            r.n_rows = r.n_items = r.n_pairs = 1;
            r.items[0] = (gpu_item){0, 0, 1};
            r.row[0] = 0;
            r.w[0] = 1.0f;
            for (int i = 0; i < 512; i++)
                r.z[i] = i == (int)at ? 1.0f : pass / 2 % 2 ? 0.0f : -0.0f;
            request_check(g, &r, &m, "codes");
        }
        gpu_close(g);
    }
    request_free(&r);
    model_free(&m);
}

static void test_true(bool is_quick) {
    static const uint32_t rows[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64};
    model m;
    request r;
    const char *best = "ref";
    for (const char *const *k = k3_kernels_linked(); *k; k++)
        if (k3_kernels_is_supported(*k)) best = *k; /* the last is the fastest */
    model_make(&m, best, 3584, 3072, is_quick ? 4 : 40, 0);
    request_make(&r, 3584, 64, 40, 64 * 16);
    gpu *g = open_for(&m, 64, 16);
    for (size_t i = 0; i < (is_quick ? 3 : sizeof rows / sizeof *rows); i++) {
        request_fill(&r, &m, rows[i], m.n, is_quick ? 2 : rows[i] > 16 ? 4 : 16, false);
        request_check(g, &r, &m, "true widths");
    }
    for (int again = 0; again < 20 && !is_quick; again++) {
        request_fill(&r, &m, 1, m.n, 1 + below(16), false);
        request_check(g, &r, &m, "true widths, one row");
    }
    r.w[0] = 1e30f; /* a term out of range */
    request_check(g, &r, &m, "bad term");
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

/* Requests of more rows than one chunk of the bench: as long as the wire allows. */
static void test_long(bool is_tiny) {
    static const uint32_t rows[] = {65, 130, 511, 512, 256};
    model m;
    request r;
    model_make(&m, "ref", 64, 96, 48, 1);
    request_make(&r, 64, 512, 48, 512 * 16);
    gpu *g = open_for(&m, 512, 16);
    for (size_t i = 0; i < (is_tiny ? 1 : sizeof rows / sizeof *rows); i++) {
        request_fill(&r, &m, rows[i], 48, 16, i % 2);
        request_check(g, &r, &m, "long");
    }
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

/* Fill slots while other requests compute. */
typedef struct {
    gpu *g;
    const model *m;
    volatile bool is_over;
    uint64_t n, n_failed;
} uploads;

static void *upload_main(void *user) {
    uploads *u = user;
    char fault[512];
    for (; !u->is_over; u->n++) {
        expert_view x = expert_of(u->m, (uint32_t)(u->n % (u->m->n / 2)));
        u->n_failed +=
            gpu_upload(u->g, (uint32_t)(u->n % (u->m->n / 2)), x.p, fault, sizeof fault) < 0;
    }
    return NULL;
}

static void test_uploads(bool is_quick) {
    model m;
    request r;
    pthread_t thread;
    model_make(&m, "ref", 352, 128, 48, 0);
    request_make(&r, 352, 16, 48, 16 * 16);
    gpu *g = open_for(&m, 16, 16);
    uploads u = {.g = g, .m = &m};
    check(pthread_create(&thread, NULL, upload_main, &u) == 0, "thread", 0);
    for (int i = 0; i < (is_quick ? 3 : 200); i++) {
        request_fill(&r, &m, 1 + (uint32_t)i % 16, m.n / 2, 16, false);
        request_check(g, &r, &m, "beside uploads");
    }
    u.is_over = true;
    pthread_join(thread, NULL);
    check(u.n > 0 && u.n_failed == 0, "uploads", u.n_failed);
    request_fill(&r, &m, 16, m.n, 16, false);
    request_check(g, &r, &m, "after uploads");
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

/* No device: SKIP. Any other fault of the device is no reason to skip: the cases below then fail. */
static void skip_without_device(void) {
    gpu *g;
    gpu_options o = {
        .latent = 32, .inter = 32, .max_rows = 1, .max_items = 1, .max_pairs = 1, .max_slots = 1};
    if (gpu_open(&g, &o, why, sizeof why) == 0) {
        gpu_close(g);
    } else if (strstr(why, "cudaSetDevice")) {
        printf("SKIP GPU: %s\n", why);
        exit(77);
    }
}

static uint64_t rss_bytes(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%*s %llu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void test_million(void) {
    model m;
    request r;
    uint64_t rss = 0, vram = 0;
    int64_t grown = 0, taken = 0;
    model_make(&m, "ref", 128, 128, 64, 0);
    request_make(&r, 128, 8, 64, 8 * 16);
    gpu *g = open_for(&m, 8, 16);
    for (uint32_t rows = 1; rows <= 8; rows++) /* every shape has its graph before memory counts */
        for (uint32_t top_k = 1; top_k <= 16; top_k++)
            for (int again = 0; again < 8; again++) {
                request_fill(&r, &m, rows, 64, top_k, again % 2);
                check(request_run(g, &r, 128), "shapes", rows);
            }
    printf("requests, memory of the process, free VRAM:\n");
    for (int i = 0; i < 1000000; i++) {
        if (i % 1000 == 0) request_fill(&r, &m, 1 + below(8), 64, 1 + below(16), false);
        if (i % 1000 == 0 && (i < 100000 || i == 999000)) /* comparing takes memory of its own */
            request_check(g, &r, &m, "million");
        else if (!request_run(g, &r, 128))
            check(false, "million", (uint64_t)i);
        if (i % 100000 == 98999)
            printf("%d %llu %llu\n", i, (unsigned long long)rss_bytes(),
                   (unsigned long long)gpu_free_bytes(g));
        if (i == 498999) {
            rss = rss_bytes();
            vram = gpu_free_bytes(g);
        }
        if (i == 998999) {
            grown = (int64_t)(rss_bytes() - rss);
            taken = (int64_t)(vram - gpu_free_bytes(g));
        }
    }
    /* Pages that are touched late, by a driver's thread for example, count once; a leak counts in
     * every half. */
    printf("in the last 500,000: memory of the process %+lld bytes, VRAM %+lld\n", (long long)grown,
           (long long)taken);
    check(grown <= 64 << 10, "memory of the process grew", (uint64_t)grown);
    check(taken <= 0, "memory of the device grew", (uint64_t)taken);
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

/* A slot number out of range makes the kernel read unmapped memory. From then on the device is lost
 * to this process, and every call has to return an error, and return. */
static void test_lost(void) {
    model m;
    request r;
    model_make(&m, "ref", 352, 128, 4, 0);
    request_make(&r, 352, 2, 4, 2 * 4);
    gpu *g = open_for(&m, 2, 4);
    request_fill(&r, &m, 2, 4, 4, false);
    request_check(g, &r, &m, "before");
    r.items[0].slot = 1u << 30;
    bool is_begun = gpu_begin(g, r.z, r.n_rows, r.items, r.n_items, r.row, r.w, r.n_pairs, why,
                              sizeof why) == 0;
    check(is_begun && gpu_end(g, r.Q, r.bad, NULL, why, sizeof why) == -1, "a fault is seen", 0);
    check(strncmp(why, "gpu: a request: ", 16) == 0, "and named", 0);
    printf("%s\n", why);
    why[0] = 0;
    r.items[0].slot = 0;
    check(gpu_begin(g, r.z, r.n_rows, r.items, r.n_items, r.row, r.w, r.n_pairs, why, sizeof why) ==
                  -1 &&
              why[0],
          "no further request", 0);
    why[0] = 0;
    expert_view x = expert_of(&m, 0);
    check(gpu_upload(g, 0, x.p, why, sizeof why) == -1 && why[0], "no further upload", 0);
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

/* ncu --metrics dram__bytes_read.sum -k regex:experts: are the weights read once for all rows? */
static void test_once(uint32_t rows) {
    model m;
    request r;
    model_make(&m, "ref", 3584, 3072, 16, 0);
    request_make(&r, 3584, 64, 16, 64 * 16);
    gpu *g = open_for(&m, 64, 16);
    request_fill(&r, &m, rows < 64 ? rows : 64, 16, 16, true);
    check(request_run(g, &r, 3584), "once", 0);
    gpu_close(g);
    request_free(&r);
    model_free(&m);
}

int main(int argc, char **argv) {
    bool is_tiny = argc > 1 && strcmp(argv[1], "--tiny") == 0,
         is_quick = is_tiny || (argc > 1 && strcmp(argv[1], "--quick") == 0);
    fp_default();
    skip_without_device();
    if (argc > 1 && strcmp(argv[1], "--million") == 0) {
        test_million();
    } else if (argc > 1 && strcmp(argv[1], "--lost") == 0) {
        test_lost();
    } else if (argc > 2 && strcmp(argv[1], "--once") == 0) {
        test_once((uint32_t)atoi(argv[2]));
    } else {
        test_small(is_quick, is_tiny);
        if (!is_quick) test_codes();
        test_long(is_tiny);
        test_uploads(is_quick);
        if (!is_tiny) test_true(is_quick);
    }
    printf("test_gpu: %llu passed, %llu failed, 0 skipped\n", (unsigned long long)n_passed,
           (unsigned long long)n_failed);
    return n_failed > 0;
}
