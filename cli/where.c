/* where.c - the time of a pass, divided: what the engine noted (k3_stats.part_ns) beside what memory gives. */
#include "cli/where.h"

#include "cli/console.h"
#include "cli/output.h"
#include "experts.h"
#include "k3_common.h"
#include "k3_pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const PART[K3_N_PARTS] = {"matrices", "attention", "experts", "rows"};

void where_add(where_sum *w, const k3_stats *from, const k3_stats *to) {
    w->n_pos += to->n_pos - from->n_pos;
    w->wall_ns += to->compute_ns - from->compute_ns;
    w->stall_ns += to->stall_ns - from->stall_ns;
    w->expert_uses += to->expert_uses - from->expert_uses;
    for (int i = 0; i < K3_N_PARTS; i++) {
        w->part_ns[i] += to->part_ns[i] - from->part_ns[i];
        w->part_busy_ns[i] += to->part_busy_ns[i] - from->part_busy_ns[i];
    }
}

#define READ_BYTES ((size_t)256 << 20) /* more than caches hold */
#define READ_PART ((size_t)1 << 20)

typedef struct {
    const k3_kernels *k;
    const uint8_t *at;
    uint64_t sum[POOL_MAX_THREADS]; /* kept, so that no read is left out */
} read_loop;

static void read_part(void *ctx, size_t i, int i_thread) {
    read_loop *l = ctx;
    l->sum[i_thread] += l->k->read_stream(l->at + i * READ_PART, READ_PART);
}

/* Bytes per second that n_threads read from memory, the best of five; 0: no memory for it. */
static double read_rate(const k3_kernels *k, int n_threads) {
    read_loop *l = calloc(1, sizeof *l);
    uint8_t *block = aligned_alloc(4096, READ_BYTES);
    k3_pool *pool = pool_open(n_threads);
    double best = 0;
    for (int i = 0; l && block && pool && i < 5; i++) {
        if (i == 0) memset(block, 1, READ_BYTES);
        l->k = k;
        l->at = block;
        uint64_t start = clock_ns();
        pool_run(pool, READ_BYTES / READ_PART, 100000, read_part, l);
        double rate = (double)READ_BYTES / (double)(clock_ns() - start) * 1e9;
        best = rate > best ? rate : best;
    }
    pool_close(pool);
    free(block);
    free(l);
    return best;
}

static void line_print(const char *phase, const char *part, double ns, double wall, double threads,
                       double rate, double read) {
    printf("# where\t%s\t%s\t%.6f\t%.3f\t", phase, part, ns * 1e-9, wall > 0 ? ns / wall : 0);
    if (threads > 0) printf("%.1f", threads);
    printf("\t");
    if (rate > 0)
        printf("%.1f\t%.2f\n", rate, read > 0 ? rate / read : 0);
    else
        printf("\t\n");
}

/* Weights go by once for each decoded token; in a prompt once for a chunk, which says nothing of memory. */
static void sum_print(const char *phase, const where_sum *w, const k3_shape *sh, double read,
                      bool is_decode) {
    double wall = (double)w->wall_ns, rest = wall - (double)w->stall_ns;
    uint64_t embed = 2ull * sh->vocab_size * sh->hidden;
    double bytes[K3_N_PARTS] = {
        [K3_PART_MATRIX] = (double)(sh->trunk_bytes - embed) * (double)w->n_pos,
        [K3_PART_EXPERT] = (double)sh->expert_bytes * (double)w->expert_uses};
    if (w->n_pos == 0) return;
    for (int i = 0; i < K3_N_PARTS; i++) {
        double ns = (double)w->part_ns[i];
        line_print(phase, PART[i], ns, wall, ns > 0 ? (double)w->part_busy_ns[i] / ns : 0,
                   is_decode && ns > 0 ? bytes[i] / ns : 0, read * 1e-9);
        rest -= ns;
    }
    line_print(phase, "disk", (double)w->stall_ns, wall, 0, 0, 0);
    line_print(phase, "serial", rest > 0 ? rest : 0, wall, 1, 0, 0);
    line_print(phase, "all", wall, wall, 0, 0, 0);
}

int where_print(const where *w, const k3_engine *e) {
    const k3_shape *sh = k3_engine_shape(e);
    double read = read_rate(k3_engine_table(e), k3_engine_threads(e));
    printf("# where\tphase\tpart\tseconds\tshare\tthreads_busy\tweight_GB/s\tof_read (%.1f GB/s)\n",
           read * 1e-9);
    sum_print("prompt", &w->prompt, sh, read, false);
    sum_print("decode", &w->decode, sh, read, true);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}
