/* gpu_bench.c - `k3-tier bench --gpu`: what a request costs on this device, part by part.
 *
 * Experts are random bytes with scales as real ones have them; every request takes other experts
 * than the one before, so that no weights are found in a cache. Tab-separated, as all benches.
 */
#include "gpu_bench.h"
#include "gpu_tier.h"
#include "k3_common.h"
#include "tier.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define N_RUNS 400
#define MAX_ROWS 64
STATIC_ASSERT(bench_rows_fit_a_request, MAX_ROWS <= TIER_MAX_ROWS);
#define N_BANKS 128 /* experts uploaded, when there is room */

typedef struct {
    uint64_t whole, begin, in, kernel, out;
} sample;

static uint64_t seed = 1;

static uint64_t next(void) { /* xorshift64 */
    seed ^= seed << 13;
    seed ^= seed >> 7;
    return seed ^= seed << 17;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* One place of n samples, sorted: its median, or another part of a hundred. */
static double part_us(const sample *s, size_t at, uint32_t n, uint32_t percent) {
    static uint64_t v[N_RUNS];
    for (uint32_t i = 0; i < n; i++) memcpy(&v[i], (const char *)&s[i] + at, sizeof v[i]);
    qsort(v, n, sizeof *v, by_size);
    return (double)v[(n - 1) * percent / 100] * 1e-3;
}

/* Upload n experts. */
static int fill(gpu *g, uint32_t latent, uint32_t inter, uint32_t n, char *why, size_t n_why) {
    uint64_t q = (uint64_t)latent * inter / 2, s = q / 16, start = 0;
    uint8_t *bytes = malloc(3 * (q + s));
    const uint8_t *p[6] = {bytes,           bytes + q,         bytes + q + s,
                           bytes + 2 * q + s, bytes + 2 * (q + s), bytes + 3 * q + 2 * s};
    int rc = 0;
    if (!bytes) {
        snprintf(why, n_why, "out of memory");
        return -1;
    }
    for (uint64_t i = 0; i < 3 * (q + s) / 8; i++) {
        uint64_t v = next();
        memcpy(bytes + 8 * i, &v, 8);
    }
    for (int k = 1; k < 6; k += 2)
        for (uint64_t i = 0; i < s; i++) bytes[p[k] - bytes + i] = 114 + (uint8_t)(next() % 8);
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        if (i == 1) start = clock_ns();
        bytes[i % q] ^= (uint8_t)i;
        rc = gpu_upload(g, i, p, why, n_why);
    }
    if (rc == 0 && n > 1)
        printf("upload\t%u experts\t%.2f GB/s\n", n,
               (double)(n - 1) * 3.0 * (double)(q + s) / (double)(clock_ns() - start));
    free(bytes);
    return rc;
}

/* One line of the table. */
static int measure(gpu *g, uint32_t latent, uint32_t experts, uint32_t rows, uint32_t banks,
                   double read, char *why, size_t n_why) {
    static float w[MAX_ROWS * TIER_MAX_TOP_K];
    static uint32_t row[MAX_ROWS * TIER_MAX_TOP_K];
    static sample s[N_RUNS];
    gpu_item items[TIER_MAX_TOP_K];
    uint8_t bad[TIER_MAX_TOP_K];
    gpu_info info;
    uint32_t n_runs = rows > 16 ? N_RUNS / 4 : N_RUNS, slot = 0;
    float *z = malloc((size_t)rows * latent * 4);
    int64_t *Q = calloc((size_t)rows * latent, 8);
    int rc = z && Q ? 0 : -1;
    if (rc < 0) snprintf(why, n_why, "out of memory");
    gpu_info_get(g, &info);
    for (size_t i = 0; rc == 0 && i < (size_t)rows * latent; i++)
        z[i] = (float)(next() >> 40) * 0x1p-23f - 1.0f;
    for (uint32_t i = 0; i < experts * rows; i++) {
        row[i] = i % rows;
        w[i] = 0.15f;
    }
    for (uint32_t i = 0; rc == 0 && i < 2 * n_runs + 40; i++) {
        bool is_timed = i >= n_runs + 20;
        uint32_t at = i % (n_runs + 20);
        if (at == 0) gpu_timing(g, is_timed);
        for (uint32_t x = 0; x < experts; x++) items[x] = (gpu_item){slot++ % banks, x * rows, rows};
        uint64_t start = clock_ns();
        rc = gpu_begin(g, z, rows, items, experts, row, w, experts * rows, why, n_why);
        uint64_t begun = clock_ns();
        if (rc == 0) rc = gpu_end(g, Q, bad, NULL, why, n_why);
        uint64_t end = clock_ns();
        if (rc > 0) snprintf(why, n_why, "a sum out of range");
        if (rc == 0 && at >= 20) {
            sample *to = &s[at - 20];
            gpu_times t = {0};
            if (is_timed && (rc = gpu_times_get(g, &t, why, n_why)) < 0) break;
            if (!is_timed) to->whole = end - start, to->begin = begun - start;
            to->in = t.in_ns;
            to->kernel = t.kernel_ns;
            to->out = t.out_ns;
        }
    }
    free(z);
    free(Q);
    if (rc != 0) return -1;
    double whole = part_us(s, offsetof(sample, whole), n_runs, 50),
           kernel = part_us(s, offsetof(sample, kernel), n_runs, 50),
           pace = (double)experts * (double)info.slot_bytes / kernel * 1e-3;
    printf("%u\t%u\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%.2f\n", experts, rows, whole,
           part_us(s, offsetof(sample, whole), n_runs, 95),
           part_us(s, offsetof(sample, begin), n_runs, 50),
           part_us(s, offsetof(sample, in), n_runs, 50), kernel,
           part_us(s, offsetof(sample, out), n_runs, 50), whole - kernel, pace, pace * 1e9 / read);
    fflush(stdout);
    return 0;
}

int gpu_bench(uint32_t latent, uint32_t inter, int device, uint64_t vram, char *why,
              size_t n_why) {
    static const uint32_t experts[] = {1, 3, 16}, rows[] = {1, 4, 16, 64};
    gpu_options o = {.latent = latent,
                     .inter = inter,
                     .max_rows = MAX_ROWS,
                     .max_items = TIER_MAX_TOP_K,
                     .max_pairs = MAX_ROWS * TIER_MAX_TOP_K,
                     .max_slots = UINT32_MAX,
                     .beta = 4.0f,
                     .linear_beta = 25.0f,
                     .device = device,
                     .vram_bytes = vram};
    gpu *g;
    gpu_info info;
    double read = 0, copy = 0;
    if (gpu_open(&g, &o, why, n_why) < 0) return -1;
    gpu_info_get(g, &info);
    int rc = gpu_bandwidth(g, &read, &copy, why, n_why);
    uint32_t banks = info.n_slots < N_BANKS ? info.n_slots : N_BANKS;
    printf("device\t%s, sm_%d%d, %d multiprocessors\nexperts held\t%u of %u x %u, %.1f GiB\n"
           "read\t%.0f GB/s\ncopy\t%.0f GB/s, read and written counted\n",
           info.name, info.sm_major, info.sm_minor, info.n_sm, info.n_slots, latent, inter,
           (double)info.vram_bytes / 0x1p30, read * 1e-9, copy * 1e-9);
    if (rc == 0) rc = fill(g, latent, inter, banks, why, n_why);
    printf("experts\trows\tus\tp95\tlaunch\tin\tkernels\tout\tstaging\tGB/s\tof read\n");
    for (int e = 0; e < 3 && rc == 0; e++)
        for (int r = 0; r < 4 && rc == 0; r++)
            if (experts[e] <= banks)
                rc = measure(g, latent, experts[e], rows[r], banks, read, why, n_why);
    gpu_close(g);
    return rc;
}
