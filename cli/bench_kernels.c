/* bench_kernels.c - `k3 bench --kernels-only`: what each kernel set makes of the machine.
 *
 * A matvec reads each weight once, so its measure is the memory bandwidth; a batch reuses weights, so
 * its measure is the peak of fused multiply-adds at the set's own vector width. Both yardsticks
 * are taken by the same set, on the same number of threads, between the runs they judge.
 * All lines of one batch size take turns in rounds, and each figure, the yardsticks' too, is
 * its best over the rounds (as STREAM reports): what another tenant of the cores takes away
 * from one round it seldom takes from all. The hash of the outputs must be the same in every
 * set.
 */
#include "cli/commands.h"

#include "cli/inputs.h"
#include "k3_common.h"
#include "experts.h"
#include "k3_pool.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BENCH_ROUNDS 12
#define BENCH_REF_ROUNDS 2
#define BENCH_MAX_LINES 64
#define BENCH_MAX_POOLS 12             /* 1, 2, 4, ... POOL_MAX_THREADS threads */
STATIC_ASSERT(pools_up_to_the_most_threads, 1u << (BENCH_MAX_POOLS - 1) >= POOL_MAX_THREADS);
#define BENCH_TILE ROW_TILE            /* rows of one kernel call, as in the engine          */
#define BENCH_HASH_ROWS 256            /* rows under the hash; all that "ref" runs           */
#define BENCH_POOL_BYTES (1400u << 20) /* weights: several times the largest cache           */
#define BENCH_READ_BYTES ((size_t)128 << 20)

typedef struct {
    const char *name;
    bool is_mxfp4;
    size_t rows, cols;
    size_t w_bytes, s_bytes; /* one matrix: weights, scale codes */
} bench_shape;

/* The weights of one shape, n_mat matrices one after another, and what they meet. */
typedef struct {
    bench_shape shape;
    uint8_t *w, *s;
    size_t n_mat, pool_bytes;
    float *xp, *y; /* packed f32[batch][cols]; f32[matrices of a run][batch][rows] */
    size_t batch;
} bench_data;

/* In seconds. */
static double bench_now(void) { return (double)clock_ns() * 1e-9; }

/* splitmix64 of an index: the same weights at the same place for every pool size. */
static uint64_t bench_mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* What can be taken without swapping: Linux says it, else half of all. */
static uint64_t bench_free_bytes(void) {
    uint64_t n = proc_bytes("/proc/meminfo", "MemAvailable");
    return n ? n : (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
}

#define BENCH_FILL 16384 /* words that a thread fills at a time */

static void bench_fill_part(void *ctx, size_t part, int i_thread) {
    const bench_data *d = ctx;
    uint64_t *w = (uint64_t *)(void *)d->w;
    const size_t end = d->pool_bytes / 8;
    (void)i_thread;
    for (size_t i = part * BENCH_FILL; i < end && i < (part + 1) * BENCH_FILL; i++) {
        uint64_t r = bench_mix(i);
        w[i] = d->shape.is_mxfp4 ? r : (r & 0x81ff81ff81ff81ffu) | 0x3c003c003c003c00u;
    }
}

/* Random nibbles and scale codes 118..124, or bf16 of magnitude 2^-7..2^-3. */
static void bench_fill(bench_data *d, k3_pool *pool) {
    const size_t n_code = d->n_mat * d->shape.s_bytes;
    pool_run(pool, (d->pool_bytes / 8 + BENCH_FILL - 1) / BENCH_FILL, 50000, bench_fill_part, d);
    for (size_t i = 0; i < n_code; i++) d->s[i] = (uint8_t)(118 + bench_mix(i) % 7);
}

/* x in [-1, 1). */
static int bench_fill_x(bench_data *d, size_t batch) {
    const size_t n = d->shape.cols;
    float *x = malloc(n * sizeof *x);
    if (!x) return K3_ENOMEM;
    for (size_t t = 0; t < batch; t++) {
        for (size_t i = 0; i < n; i++)
            x[i] = (float)((int32_t)(bench_mix(t * n + i) >> 40) - 0x800000) * 0x1p-23f;
        k3_kernels_ref.pack(d->xp, batch, t, x, n);
    }
    d->batch = batch;
    free(x);
    return K3_OK;
}

/* One measurement: what its threads read, or run. */
typedef struct {
    const k3_kernels *k;
    const bench_data *d;
    size_t first, rows; /* matrix that it starts at; rows of each */
    const uint8_t *at;  /* part i of a read begins at at + i * part */
    size_t part;
    uint64_t n_round;
    uint64_t sum[POOL_MAX_THREADS]; /* of each thread; kept, so that no read is left out */
    uint64_t flops[POOL_MAX_THREADS];
} bench_loop;

static void bench_read_part(void *ctx, size_t i, int i_thread) {
    bench_loop *l = ctx;
    l->sum[i_thread] += l->k->read_stream(l->at + i * l->part, l->part);
}

/* Bytes per second of a read of BENCH_READ_BYTES, the i-th window of the pool. */
static double bench_read(const k3_kernels *k, const bench_data *d, int i, k3_pool *pool) {
    size_t bytes = d->pool_bytes < BENCH_READ_BYTES ? d->pool_bytes : BENCH_READ_BYTES;
    size_t n_window = d->pool_bytes / bytes;
    bench_loop l = {.k = k, .d = d, .part = bytes / 64 & ~(size_t)4095};
    l.at = d->w + ((size_t)i * 3 + 1) % n_window * bytes;
    double t0 = bench_now();
    pool_run(pool, 64, l.part / 10, bench_read_part, &l);
    return (double)(l.part * 64) / (bench_now() - t0);
}

static void bench_peak_part(void *ctx, size_t i, int i_thread) {
    bench_loop *l = ctx;
    uint64_t n = 0;
    (void)i;
    l->sum[i_thread] += l->k->peak_fma(l->n_round, &n) != 0;
    l->flops[i_thread] += n;
}

/* Flops per second of independent multiply-adds. */
static double bench_peak(const k3_kernels *k, int n_threads, k3_pool *pool) {
    bench_loop l = {.k = k, .n_round = k == &k3_kernels_ref ? 25000 : 250000};
    uint64_t flops = 0;
    double t0 = bench_now();
    pool_run(pool, 4 * (size_t)n_threads, 1000000, bench_peak_part, &l);
    double seconds = bench_now() - t0;
    for (int i = 0; i < n_threads; i++) flops += l.flops[i];
    return (double)flops / seconds;
}

static void bench_run_tile(void *ctx, size_t i, int i_thread) {
    const bench_loop *l = ctx;
    const bench_data *d = l->d;
    const bench_shape *s = &d->shape;
    const size_t n_tile = (l->rows + BENCH_TILE - 1) / BENCH_TILE, n = s->cols;
    size_t mat = (l->first + i / n_tile) % d->n_mat, r = i % n_tile * BENCH_TILE;
    size_t n_row = l->rows - r < BENCH_TILE ? l->rows - r : BENCH_TILE;
    float *y = d->y + i / n_tile * s->rows * d->batch + r;
    const uint8_t *w = d->w + mat * s->w_bytes;
    (void)i_thread;
    if (s->is_mxfp4)
        l->k->matmul_mxfp4(y, s->rows, w + r * n / 2, d->s + mat * s->s_bytes + r * n / 32, n_row,
                           n, d->xp, d->batch);
    else
        l->k->matmul_bf16(y, s->rows, (const uint16_t *)(const void *)w + r * n, n, n_row, n, d->xp,
                          d->batch);
}

/* n_mat matrices from `first` on, the first `rows` rows of each, in tiles over threads. */
static void bench_run(const k3_kernels *k, const bench_data *d, size_t first, size_t n_mat,
                      size_t rows, k3_pool *pool) {
    bench_loop l = {.k = k, .d = d, .first = first, .rows = rows};
    size_t tile_bytes = BENCH_TILE * d->shape.w_bytes / d->shape.rows;
    pool_run(pool, n_mat * ((rows + BENCH_TILE - 1) / BENCH_TILE), tile_bytes / 10, bench_run_tile,
             &l);
}

/* FNV-1a over y[t][0..255] of matrix 0. */
static uint64_t bench_hash(const k3_kernels *k, const bench_data *d, k3_pool *pool) {
    uint64_t h = K3_FNV_BASIS;
    bench_run(k, d, 0, 1, BENCH_HASH_ROWS, pool);
    for (size_t t = 0; t < d->batch; t++)
        h = k3_fnv1a(h, d->y + t * d->shape.rows, BENCH_HASH_ROWS * sizeof(float));
    return h;
}

/* Matrices per run: about 100 MB for one vector, less when compute takes longer. */
static size_t bench_n_mat(const bench_data *d, size_t batch) {
    size_t n = ((size_t)100 << 20) / d->shape.w_bytes / (batch < 4 ? 1 : batch < 16 ? 2 : 8);
    n = n < d->n_mat ? n : d->n_mat;
    return n ? n : 1;
}

/* One line of the table: a kernel set on so many threads, and its best rates so far. */
typedef struct {
    const k3_kernels *k;
    int n_threads;
    k3_pool *pool;       /* of n_threads */
    size_t rows, n_mat;  /* "ref" runs BENCH_HASH_ROWS rows of one matrix, and says so */
    size_t first;        /* matrix that the next round starts at */
    double weight, read; /* bytes per second */
    double flop, peak;   /* flops per second */
    uint64_t hash;
} bench_line;

/* One round of one line: read, kernel, peak, kernel, read. */
static void bench_round(bench_line *l, const bench_data *d, int round) {
    const bench_shape *s = &d->shape;
    const double n_row = (double)(l->rows * l->n_mat);
    const double bytes = (double)(s->w_bytes + s->s_bytes) / (double)s->rows * n_row;
    const double flops = 2.0 * n_row * (double)(s->cols * d->batch);
    for (int half = 0; half < 2; half++) {
        double read = 0, peak = 0, seconds, t0;
        if (half == 0) read = bench_read(l->k, d, 2 * round, l->pool);
        t0 = bench_now();
        bench_run(l->k, d, l->first, l->n_mat, l->rows, l->pool);
        seconds = bench_now() - t0;
        l->first = (l->first + l->n_mat) % d->n_mat;
        if (half == 0) peak = bench_peak(l->k, l->n_threads, l->pool);
        if (half == 1) read = bench_read(l->k, d, 2 * round + 1, l->pool);
        if (bytes / seconds > l->weight) l->weight = bytes / seconds;
        if (flops / seconds > l->flop) l->flop = flops / seconds;
        if (read > l->read) l->read = read;
        if (peak > l->peak) l->peak = peak;
    }
}

static void bench_print(const bench_line *l, const bench_data *d, FILE *out) {
    fprintf(out, "%s\t%s\t%zu\t%zu\t%zu\t%d\t", l->k->name, d->shape.name, l->rows, d->shape.cols,
            d->batch, l->n_threads);
    fprintf(out, "%.2f\t%.2f\t%.3f\t%.1f\t%.1f\t%.3f\t%016llx\n", l->weight / 1e9, l->read / 1e9,
            l->weight / l->read, l->flop / 1e9, l->peak / 1e9, l->flop / l->peak,
            (unsigned long long)l->hash);
    fflush(out);
}

/* Every supported set at 1, 2, 4, ... max_threads threads. Returns the number of lines. */
static size_t bench_lines(bench_line *line, const bench_data *d, int max_threads,
                          k3_pool *const *pool, const char *only) {
    size_t n = 0;
    for (const char *const *name = k3_kernels_linked(); *name; name++) {
        const k3_kernels *k = k3_kernels_find(*name);
        const bool is_ref = k == &k3_kernels_ref;
        if (!k || !k3_kernels_is_supported(*name) || (only && strcmp(only, *name))) continue;
        int i_pool = 0;
        for (int t = 1;; t = t * 2 < max_threads ? t * 2 : max_threads, i_pool++) {
            line[n++] = (bench_line){.k = k,
                                     .n_threads = t,
                                     .pool = pool[i_pool],
                                     .rows = is_ref ? BENCH_HASH_ROWS : d->shape.rows,
                                     .n_mat = is_ref ? 1 : bench_n_mat(d, d->batch),
                                     .hash = bench_hash(k, d, pool[i_pool])};
            if (t == max_threads || n == BENCH_MAX_LINES) break;
        }
    }
    return n;
}

/* All sets, batches and thread counts over one shape's weights. */
static int bench_one_shape(const bench_shape *shape, int max_threads, k3_pool *const *pool,
                           const char *only, FILE *out) {
    static const size_t batches[] = {1, 4, 16, 64};
    bench_line line[BENCH_MAX_LINES];
    bench_data d = {.shape = *shape};
    uint64_t want = bench_free_bytes() / 2;
    void *w = NULL, *xp = NULL;
    int rc = K3_ENOMEM;

    if (want > BENCH_POOL_BYTES) want = BENCH_POOL_BYTES;
    d.n_mat = (size_t)(want / (shape->w_bytes + shape->s_bytes));
    if (d.n_mat == 0) d.n_mat = 1;
    d.pool_bytes = d.n_mat * shape->w_bytes;
    if (posix_memalign(&w, 4096, d.pool_bytes)) w = NULL;
    if (posix_memalign(&xp, 64, 64 * shape->cols * sizeof(float))) xp = NULL;
    d.w = w;
    d.xp = xp;
    d.s = malloc(d.n_mat * shape->s_bytes + 1);
    d.y = malloc((bench_n_mat(&d, 1) + 64 * bench_n_mat(&d, 16)) * shape->rows * sizeof(float));
    if (!d.w || !d.xp || !d.s || !d.y) goto done;
    bench_fill(&d, pool[0]);
    fprintf(out, "# %s %zu x %zu: %zu matrices, %.0f MB\n", shape->name, shape->rows, shape->cols,
            d.n_mat, (double)(d.n_mat * (shape->w_bytes + shape->s_bytes)) / 1e6);

    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
        if ((rc = bench_fill_x(&d, batches[b])) < 0) goto done;
        const size_t n_line = bench_lines(line, &d, max_threads, pool, only);
        for (int round = 0; round < BENCH_ROUNDS; round++)
            for (size_t i = 0; i < n_line; i++)
                if (line[i].k != &k3_kernels_ref || round < BENCH_REF_ROUNDS)
                    bench_round(&line[i], &d, round);
        for (size_t i = 0; i < n_line; i++) bench_print(&line[i], &d, out);
    }
    rc = K3_OK;
done:
    free(w);
    free(xp);
    free(d.s);
    free(d.y);
    return rc;
}

int bench_kernels(int max_threads, const char *only, FILE *out) {
    static const bench_shape shapes[] = {
        {"bf16", false, 12288, 7168, (size_t)12288 * 7168 * 2, 0},
        {"mxfp4", true, 3072, 3584, 3072 * 3584 / 2, 3072 * 3584 / 32},
        {"mxfp4", true, 3584, 3072, 3584 * 3072 / 2, 3584 * 3072 / 32},
    };
    fprintf(out,
            "kernels\tkernel\trows\tcols\tbatch\tthreads\tweight_GB/s\tread_GB/s\tof_read\t"
            "GFLOP/s\tpeak_GFLOP/s\tof_peak\tfnv_%d_rows\n",
            BENCH_HASH_ROWS);
    k3_pool *pool[BENCH_MAX_POOLS] = {NULL};
    int rc = K3_OK, n = 0;
    for (int t = 1; rc == K3_OK; t = t * 2 < max_threads ? t * 2 : max_threads) {
        if (!(pool[n++] = pool_open(t))) rc = K3_ENOMEM;
        if (t == max_threads) break;
    }
    for (size_t i = 0; rc == K3_OK && i < sizeof shapes / sizeof *shapes; i++)
        rc = bench_one_shape(&shapes[i], max_threads, pool, only, out);
    for (int i = 0; i < n; i++) pool_close(pool[i]);
    return rc;
}
