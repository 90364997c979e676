/* test_mla.c - attention over the latent cache: every way gives the bits that NUMERICS 3 spells out.
 *
 * The reference below is written from NUMERICS 2 to 4, one row and one head at a time, with fmaf and loops; it shares
 * exp and sigmoid with the engine, which tests/test_kernels.c checks. Compared are tiles and blocks, with room for
 * scores and without, all kernel sets, rows cut in any way, several sessions together.
 *
 *     test_mla [quick]                    quick: fewer of all, for sanitizers
 *     test_mla --speed [POSITIONS]        the time of one token at K3's dimensions, both ways
 */
#include "k3_mla.h"

#include "k3_common.h"
#include "test.h"

#include <unistd.h>

typedef struct {
    k3_shape sh;
    size_t context, n_rows;
    uint16_t *kv_b;
    float *cache, *plain, *q, *g; /* plain: f32[context][kv_lora + rope], the cache before it was packed */
    float *want, *got;
} problem;

static uint64_t seed = 1;

static uint32_t dice(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static float noise(float size) { return ((float)(dice() % 20001) / 10000 - 1) * size; }

static uint16_t noise_bf16(float size) { return (uint16_t)(k3_f32_bits(noise(size)) >> 16); }

static void *take(size_t n_bytes) {
    void *p = aligned_alloc(64, (n_bytes + 63) / 64 * 64 + 64);
    if (!p) exit(1);
    return p;
}

static void problem_make(problem *p, uint32_t heads, uint32_t lora, uint32_t nope, uint32_t rope, uint32_t v,
                         size_t context) {
    *p = (problem){.context = context, .n_rows = context};
    p->sh.n_heads = heads;
    p->sh.kv_lora = lora;
    p->sh.nope_dim = nope;
    p->sh.rope_dim = rope;
    p->sh.v_dim = v;
    size_t n = lora + rope, row = k3_pad(n), n_w = (size_t)heads * (nope + v) * lora;
    p->kv_b = take(n_w * sizeof *p->kv_b);
    for (size_t i = 0; i < n_w; i++) p->kv_b[i] = noise_bf16(0.3f);
    p->plain = take(context * n * sizeof(float));
    p->cache = take(context * row * sizeof(float));
    for (size_t i = 0; i < context * n; i++) p->plain[i] = noise(1);
    for (size_t s = 0; s < context; s++) k3_kernels_ref.pack(p->cache + s * row, 1, 0, p->plain + s * n, n);
}

static void problem_rows(problem *p, size_t n_rows) {
    size_t n_q = n_rows * p->sh.n_heads * (p->sh.nope_dim + p->sh.rope_dim), n_o = n_rows * p->sh.n_heads * p->sh.v_dim;
    p->n_rows = n_rows;
    p->q = take(n_q * sizeof(float));
    p->g = take(n_o * sizeof(float));
    p->want = take(n_o * sizeof(float));
    p->got = take(n_o * sizeof(float));
    for (size_t i = 0; i < n_q; i++) p->q[i] = noise(2);
    for (size_t i = 0; i < n_o; i++) p->g[i] = noise(3);
}

static void problem_free(problem *p) {
    free(p->kv_b);
    free(p->plain);
    free(p->cache);
    free(p->q);
    free(p->g);
    free(p->want);
    free(p->got);
}

/* ---- NUMERICS, one row and one head ---- */

/* NUMERICS 2: sixteen sums over groups of 32, evens and then odds, folded in halves. */
static float dot16(const float *a, const float *b, size_t n) {
    float acc[16] = {0};
    for (size_t g = 0; g < n; g += 32)
        for (size_t odd = 0; odd < 2; odd++)
            for (size_t l = 0; l < 16; l++) {
                size_t i = g + 2 * l + odd;
                acc[l] = fmaf(i < n ? a[i] : 0.0f, i < n ? b[i] : 0.0f, acc[l]);
            }
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++) acc[l] = acc[l] + acc[l + half];
    return acc[0];
}

static float bf16(uint16_t x) { return k3_bf16_f32(x); }

static void reference_head(const problem *p, size_t pos, size_t t, size_t h) {
    const k3_shape *sh = &p->sh;
    size_t lora = sh->kv_lora, n = lora + sh->rope_dim, dim = sh->nope_dim + sh->rope_dim;
    const uint16_t *w = p->kv_b + h * (sh->nope_dim + sh->v_dim) * lora;
    const float *q = p->q + (t * sh->n_heads + h) * dim;
    float *query = take(n * 4), *score = take((pos + 1) * 4), *ctx = take(lora * 4), *part = take(lora * 4);
    float *row = take(lora * 4), scale = (float)(1.0 / sqrt((double)dim)), m = -INFINITY, Z = 0, ones[256];
    for (size_t i = 0; i < 256; i++) ones[i] = 1;
    for (size_t j = 0; j < lora; j++) {
        query[j] = 0;
        for (size_t i = 0; i < sh->nope_dim; i++) query[j] = fmaf(bf16(w[i * lora + j]), q[i], query[j]);
    }
    memcpy(query + lora, q + sh->nope_dim, sh->rope_dim * sizeof *q);
    for (size_t s = 0; s <= pos; s++) {
        score[s] = dot16(p->plain + s * n, query, n) * scale;
        m = score[s] > m ? score[s] : m;
    }
    for (size_t s = 0; s <= pos; s++) score[s] = k3_exp(score[s] - m);
    for (size_t b = 0; b <= pos / 256; b++) {
        size_t end = (b + 1) * 256 < pos + 1 ? (b + 1) * 256 : pos + 1, n_b = end - b * 256;
        float Z_b = dot16(score + b * 256, ones, n_b);
        for (size_t j = 0; j < lora; j++) {
            part[j] = 0;
            for (size_t s = b * 256; s < end; s++) part[j] = fmaf(score[s], p->plain[s * n + j], part[j]);
            ctx[j] = b == 0 ? part[j] : ctx[j] + part[j];
        }
        Z = b == 0 ? Z_b : Z + Z_b;
    }
    for (size_t j = 0; j < lora; j++) ctx[j] = ctx[j] / Z;
    for (size_t i = 0; i < sh->v_dim; i++) {
        size_t at = (t * sh->n_heads + h) * sh->v_dim + i;
        for (size_t j = 0; j < lora; j++) row[j] = bf16(w[(sh->nope_dim + i) * lora + j]);
        p->want[at] = dot16(row, ctx, lora) * k3_sigmoid(p->g[at]);
    }
    free(query);
    free(score);
    free(ctx);
    free(part);
    free(row);
}

/* ---- Running it ---- */

static void loop(void *user, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx) { pool_run(user, n, unit_ns, fn, ctx); }

/* Compute rows pos.. of the problem, as cuts of `step` rows each of one session. */
static void attend(const problem *p, const k3_kernels *k, k3_pool *pool, int n_threads, size_t pos, size_t step,
                   size_t n_scores) {
    mla_args a = {.sh = &p->sh, .k = k, .n_threads = n_threads, .loop = loop, .user = pool, .kv_b = p->kv_b, .q = p->q,
                  .g = p->g, .att = p->got, .local_floats = mla_local_floats(&p->sh), .n_scores = n_scores};
    a.local = take((size_t)n_threads * a.local_floats * 4);
    a.work = take(mla_work_floats(&p->sh) * 4);
    a.scores = take(n_scores * 4 + 64);
    mla_cut cut[8];
    size_t n = 0;
    for (size_t t = 0; t < p->n_rows; t += step) {
        cut[n++] = (mla_cut){p->cache, pos + t, t, p->n_rows - t < step ? p->n_rows - t : step};
        if (n < 8 && t + step < p->n_rows) continue;
        mla_attend(&a, cut, n);
        n = 0;
    }
    free(a.local);
    free(a.work);
    free(a.scores);
}

static void test_bits(bool is_quick) {
    static const uint32_t DIM[][5] = {{4, 64, 32, 16, 32}, {11, 96, 16, 8, 24}, {9, 512, 24, 64, 40}};
    static const size_t AT[] = {0, 250, 1024, 1300};
    static const char *const SET[] = {"ref", "avx2", "avx512", "neon"};
    k3_pool *pool = pool_open(3);
    for (int d = 0; d < (is_quick ? 2 : 3); d++)
        for (size_t i = is_quick; i < sizeof AT / sizeof *AT - is_quick; i++) {
            problem p;
            size_t n_rows = 1 + dice() % (d == 2 ? 9 : 21), pos = AT[i], context = pos + n_rows;
            problem_make(&p, DIM[d][0], DIM[d][1], DIM[d][2], DIM[d][3], DIM[d][4], context);
            problem_rows(&p, n_rows);
            for (size_t t = 0; t < n_rows; t++)
                for (size_t h = 0; h < p.sh.n_heads; h++) reference_head(&p, pos + t, t, h);
            size_t bytes = n_rows * p.sh.n_heads * p.sh.v_dim * 4;
            for (size_t k = is_quick; k < sizeof SET / sizeof *SET; k++) {
                const k3_kernels *set = k3_kernels_find(SET[k]);
                if (!set || !set->is_supported()) continue;
                for (int way = k == 0 ? 5 : 0; way < 8; way++) {
                    size_t most = mla_scores_most(&p.sh, context, 3), least = mla_scores_least(&p.sh, context);
                    size_t step = way & 1 ? 1 + dice() % 8 : n_rows, n_scores = way & 2 ? most : way & 4 ? least : 64;
                    memset(p.got, 0x7f, bytes);
                    attend(&p, set, way & 4 ? pool : NULL, 3, pos, step, n_scores);
                    if (!CHECK(memcmp(p.got, p.want, bytes) == 0))
                        printf("    %s: shape %d, position %zu, %zu rows, way %d\n", SET[k], d, pos, n_rows, way);
                }
            }
            problem_free(&p);
        }
    pool_close(pool);
}

/* One token at K3's dimensions: scores computed twice by tiles, and by blocks. */
static int speed(size_t n_pos) {
    problem p;
    const k3_kernels *k = k3_kernels_find("avx512");
    if (!k || !k->is_supported()) k = k3_kernels_find("avx2");
    if (!k || !k->is_supported()) k = &k3_kernels_ref;
    int n_threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    k3_pool *pool = pool_open(n_threads);
    problem_make(&p, 96, 512, 128, 64, 128, n_pos + 8);
    problem_rows(&p, 1);
    for (int round = 0; round < 3; round++)
        for (int way = 0; way < 2; way++) {
            clock_t cpu = clock();
            uint64_t start = clock_ns();
            attend(&p, k, pool, n_threads, n_pos, 1, way ? mla_scores_least(&p.sh, n_pos + 8) : 64);
            printf("mla: %s, %zu positions, %s: %.3f s, %.3f CPU s\n", k->name, n_pos, way ? "blocks" : "tiles, scores twice",
                   (double)(clock_ns() - start) * 1e-9, (double)(clock() - cpu) / CLOCKS_PER_SEC);
        }
    problem_free(&p);
    pool_close(pool);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--speed") == 0) return speed(argc > 2 ? strtoull(argv[2], NULL, 10) : 32768);
    test_begin("mla");
    test_bits(argc > 1);
    return test_finish();
}
