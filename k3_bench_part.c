/* ==== Kernel bench ===================================================================
 *
 * `k3 bench --kernels-only`: what each kernel set makes of the machine. A matvec reads each
 * weight once, so its measure is the memory bandwidth; a batch reuses weights, so its
 * measure is the peak of fused multiply-adds at the set's own vector width. Both yardsticks
 * are taken by the same set, on the same number of threads, between the runs they judge
 * (read, kernel, read, kernel, ...), and the ratios are medians over the repetitions. The
 * hash of the outputs must be the same in every set.
 *
 * Needs: k3.h, kernels.h, stdio.h, stdlib.h, string.h, time.h, unistd.h. */

#define BENCH_REPS       5
#define BENCH_TILE       64             /* rows of one kernel call, as in the engine          */
#define BENCH_HASH_ROWS  256            /* rows under the hash; all that "ref" runs           */
#define BENCH_POOL_BYTES (1400u << 20)  /* weights: several times the largest cache           */
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

static double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int bench_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double bench_median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, bench_compare);
    return v[n / 2];
}

/* splitmix64 of an index: the same weights at the same place for every pool size. */
static uint64_t bench_mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* What can be taken without swapping: Linux says it in /proc/meminfo, else half of all. */
static uint64_t bench_free_bytes(void) {
    unsigned long long kib = 0;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
    if (f) fclose(f);
    if (kib) return (uint64_t)kib * 1024;
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 2;
}

static const k3_kernels *bench_table(const char *name) {
#if defined(__x86_64__)
    if (!strcmp(name, "avx2")) return &k3_kernels_avx2;
    if (!strcmp(name, "avx512")) return &k3_kernels_avx512;
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return &k3_kernels_neon;
#endif
    return strcmp(name, "ref") ? NULL : &k3_kernels_ref;
}

/* Random nibbles and scale codes 118..124, or bf16 of magnitude 2^-7..2^-3. */
static void bench_fill(bench_data *d, int n_threads) {
    const size_t n_word = d->pool_bytes / 8, n_code = d->n_mat * d->shape.s_bytes;
    uint64_t *w = (uint64_t *)(void *)d->w;
    const bool is_mxfp4 = d->shape.is_mxfp4;
    (void)n_threads;
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (size_t i = 0; i < n_word; i++) {
        uint64_t r = bench_mix(i);
        w[i] = is_mxfp4 ? r : (r & 0x81ff81ff81ff81ffu) | 0x3c003c003c003c00u;
    }
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

/* Bytes per second of a read of BENCH_READ_BYTES, the i-th window of the pool. */
static double bench_read(const k3_kernels *k, const bench_data *d, int i, int n_threads) {
    size_t bytes = d->pool_bytes < BENCH_READ_BYTES ? d->pool_bytes : BENCH_READ_BYTES;
    size_t n_window = d->pool_bytes / bytes, part = bytes / 64 & ~(size_t)4095;
    const uint8_t *at = d->w + ((size_t)i * 3 + 1) % n_window * bytes;
    uint64_t sum = 0;
    (void)n_threads;
    double t0 = bench_now();
#pragma omp parallel for schedule(static) num_threads(n_threads) reduction(+ : sum)
    for (int j = 0; j < 64; j++) sum += k->read_stream(at + (size_t)j * part, part);
    double seconds = bench_now() - t0;
    return (double)(part * 64) / (seconds + (sum == 1 ? 1e-9 : 0)); /* sum is used */
}

/* Flops per second of independent multiply-adds. */
static double bench_peak(const k3_kernels *k, int n_threads) {
    const uint64_t n_round = k == &k3_kernels_ref ? 100000 : 1000000;
    uint64_t flops = 0;
    float sum = 0;
    double t0 = bench_now();
#pragma omp parallel for schedule(static) num_threads(n_threads) reduction(+ : flops, sum)
    for (int j = 0; j < n_threads; j++) {
        uint64_t n = 0;
        sum += k->peak_fma(n_round, &n);
        flops += n;
    }
    return (double)flops / (bench_now() - t0 + (sum == 1.0f ? 1e-9 : 0));
}

/* n_mat matrices from `first` on, the first `rows` rows of each, in tiles over threads. */
static void bench_run(const k3_kernels *k, const bench_data *d, size_t first, size_t n_mat,
                      size_t rows, int n_threads) {
    const bench_shape *s = &d->shape;
    const size_t n_tile = (rows + BENCH_TILE - 1) / BENCH_TILE, n = s->cols;
    (void)n_threads;
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (size_t i = 0; i < n_mat * n_tile; i++) {
        size_t mat = (first + i / n_tile) % d->n_mat, r = i % n_tile * BENCH_TILE;
        size_t n_row = rows - r < BENCH_TILE ? rows - r : BENCH_TILE;
        float *y = d->y + i / n_tile * s->rows * d->batch + r;
        const uint8_t *w = d->w + mat * s->w_bytes;
        if (s->is_mxfp4)
            k->matmul_mxfp4(y, s->rows, w + r * n / 2, d->s + mat * s->s_bytes + r * n / 32, n_row,
                            n, d->xp, d->batch);
        else
            k->matmul_bf16(y, s->rows, (const uint16_t *)(const void *)w + r * n, n, n_row, n,
                           d->xp, d->batch);
    }
}

/* FNV-1a over y[t][0..255] of matrix 0. */
static uint64_t bench_hash(const k3_kernels *k, const bench_data *d, int n_threads) {
    uint64_t h = K3_FNV_BASIS;
    bench_run(k, d, 0, 1, BENCH_HASH_ROWS, n_threads);
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

/* One line of the table. "ref" runs BENCH_HASH_ROWS rows only, and says so. */
static void bench_line(const k3_kernels *k, const bench_data *d, int n_threads, FILE *out) {
    const bench_shape *s = &d->shape;
    const bool is_ref = k == &k3_kernels_ref;
    const size_t rows = is_ref ? BENCH_HASH_ROWS : s->rows;
    const size_t n_mat = is_ref ? 1 : bench_n_mat(d, d->batch);
    const double row_bytes = (double)(s->w_bytes + s->s_bytes) / (double)s->rows;
    const double bytes = row_bytes * (double)(rows * n_mat);
    const double flops = 2.0 * (double)(rows * s->cols * n_mat * d->batch);
    double weight[BENCH_REPS], read[BENCH_REPS], of_read[BENCH_REPS];
    double flop[BENCH_REPS], peak[BENCH_REPS], of_peak[BENCH_REPS];
    const int n_rep = is_ref ? 3 : BENCH_REPS;
    size_t first = 0;
    const uint64_t hash = bench_hash(k, d, n_threads);
    double read0 = bench_read(k, d, 0, n_threads);
    for (int i = 0; i < n_rep; i++) {
        double t0 = bench_now();
        bench_run(k, d, first, n_mat, rows, n_threads);
        double seconds = bench_now() - t0, read1 = bench_read(k, d, i + 1, n_threads);
        first = (first + n_mat) % d->n_mat;
        weight[i] = bytes / seconds;
        read[i] = (read0 + read1) / 2;
        of_read[i] = weight[i] / read[i];
        flop[i] = flops / seconds;
        peak[i] = bench_peak(k, n_threads);
        of_peak[i] = flop[i] / peak[i];
        read0 = read1;
    }
    fprintf(out, "%s\t%s\t%zu\t%zu\t%zu\t%d\t", k->name, s->name, rows, s->cols, d->batch,
            n_threads);
    fprintf(out, "%.2f\t%.2f\t%.3f\t%.1f\t%.1f\t%.3f\t%016llx\n",
            bench_median(weight, n_rep) / 1e9, bench_median(read, n_rep) / 1e9,
            bench_median(of_read, n_rep), bench_median(flop, n_rep) / 1e9,
            bench_median(peak, n_rep) / 1e9, bench_median(of_peak, n_rep),
            (unsigned long long)hash);
    fflush(out);
}

/* All sets, batches and thread counts over one shape's weights. */
static int bench_one_shape(const bench_shape *shape, int max_threads, const char *only, FILE *out) {
    static const size_t batches[] = {1, 4, 16, 64};
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
    bench_fill(&d, max_threads);
    fprintf(out, "# %s %zu x %zu: %zu matrices, %.0f MB\n", shape->name, shape->rows, shape->cols,
            d.n_mat, (double)(d.n_mat * (shape->w_bytes + shape->s_bytes)) / 1e6);

    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
        if ((rc = bench_fill_x(&d, batches[b])) < 0) goto done;
        for (const char *const *name = k3_kernels_linked(); *name; name++) {
            const k3_kernels *k = bench_table(*name);
            if (!k || !k3_kernels_is_supported(*name) || (only && strcmp(only, *name))) continue;
            for (int t = 1; t < max_threads; t *= 2) bench_line(k, &d, t, out);
            bench_line(k, &d, max_threads, out);
        }
    }
    rc = K3_OK;
done:
    free(w);
    free(xp);
    free(d.s);
    free(d.y);
    return rc;
}

/* The TSV table for thread counts 1, 2, 4, ... max_threads; `only` names one kernel set or is
 * NULL for all that are linked and supported.
 * Returns K3_OK, K3_ENOMEM, or K3_EUSAGE when `only` cannot run here. */
static int bench_kernels(int max_threads, const char *only, FILE *out) {
    static const bench_shape shapes[] = {
        {"bf16", false, 12288, 7168, (size_t)12288 * 7168 * 2, 0},
        {"mxfp4", true, 3072, 3584, 3072 * 3584 / 2, 3072 * 3584 / 32},
        {"mxfp4", true, 3584, 3072, 3584 * 3072 / 2, 3584 * 3072 / 32},
    };
    if (only && (!bench_table(only) || !k3_kernels_is_supported(only))) return K3_EUSAGE;
    fprintf(out, "kernels\tkernel\trows\tcols\tbatch\tthreads\tweight_GB/s\tread_GB/s\tof_read\t"
                 "GFLOP/s\tpeak_GFLOP/s\tof_peak\tfnv_%d_rows\n", BENCH_HASH_ROWS);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int rc = bench_one_shape(&shapes[i], max_threads, only, out);
        if (rc < 0) return rc;
    }
    return K3_OK;
}
