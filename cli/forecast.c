/* forecast.c - bytes, operations and seconds to the first token (forecast.h). */
#include "cli/forecast.h"

#include "cli/console.h"
#include "cli/inputs.h"
#include "experts.h"
#include "kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const uint64_t PROMPT[] = {100, 1000, 10000};

/* ---- Bytes ---- */

double forecast_distinct(uint32_t n_experts, uint32_t top_k, uint64_t n_pos) {
    if (n_experts == 0) return 0;
    double miss = 1.0 - (double)top_k / (double)n_experts;
    return (double)n_experts * (1.0 - pow(miss, (double)n_pos));
}

uint64_t forecast_bytes(const k3_shape *sh, const k3_plan *p, uint64_t n_pos) {
    const double E = (double)sh->n_experts, n_moe = (double)moe_layers(sh);
    const uint64_t head = (uint64_t)sh->vocab_size * sh->hidden * sizeof(uint16_t);
    const uint64_t chunk = p->chunk ? p->chunk : 1, part = p->part ? p->part : chunk;
    const uint64_t last = p->streamed_bytes < head ? p->streamed_bytes : head; /* the head is kept last of all */
    double pinned = n_moe > 0 ? (double)p->n_pinned / n_moe : 0, chosen = 0, experts = 0;
    uint64_t trunk = 0;
    for (uint64_t at = 0, n; at < n_pos; at += n) {
        n = n_pos - at < chunk ? n_pos - at : chunk;
        bool is_last = at + n == n_pos;
        double wanted = forecast_distinct(sh->n_experts, sh->top_k, n);
        double held = pinned + fmin(chosen, (double)p->quota);
        experts += wanted * (1.0 - fmin(held, E) / (E > 0 ? E : 1));
        chosen += wanted * (1.0 - chosen / (E > 0 ? E : 1)); /* distinct over all chunks so far */
        trunk += (p->streamed_bytes - last) * ((n + part - 1) / part) + (is_last ? last : 0);
    }
    return trunk + (uint64_t)(experts * n_moe * (double)sh->expert_bytes);
}

uint64_t forecast_open_bytes(const k3_shape *sh, const k3_plan *p) {
    return p->resident_bytes + p->vector_bytes + p->n_pinned * sh->expert_bytes;
}

/* ---- Arithmetic ---- */

void forecast_flops(const k3_shape *sh, uint64_t n_pos, double *trunk, double *experts) {
    const double n = (double)n_pos, table = (double)sh->vocab_size * (double)sh->hidden;
    double weights = (double)sh->trunk_bytes / sizeof(uint16_t) - 2 * table, n_mla = 0;
    for (uint32_t il = 0; il < sh->n_layers; il++) n_mla += sh->is_mla[il];
    double scores = (double)sh->n_heads * (2.0 * sh->kv_lora + sh->rope_dim) * n_mla;
    *trunk = 2 * (weights * n + table + scores * n * (n + 1) / 2); /* the head runs once */
    *experts = 2 * n * (double)moe_layers(sh) * sh->top_k * 3.0 * sh->latent * sh->expert_inter;
}

/* ---- How fast a core is ----
 *
 * One thread, one matrix as wide as K3's and larger than its caches, the best of several runs, by the
 * processor time of this thread: on a busy machine the clock would measure the others' work. */
#define PACE_COLS ((size_t)3584)
#define PACE_ROWS ((size_t)3072)
#define PACE_RUNS 4

/* Processor time of this thread, nanoseconds. */
static uint64_t own_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Operations per second of one thread; 0: no memory. */
static double pace_measure(const k3_kernels *k, bool is_mxfp4, size_t batch) {
    const size_t n_w = PACE_ROWS * PACE_COLS, bytes = is_mxfp4 ? n_w / 2 : n_w * 2;
    uint8_t *w = malloc(bytes), *scale = malloc(n_w / K3_GROUP);
    float *y = malloc(batch * PACE_ROWS * sizeof *y);
    void *xp = NULL;
    double best = 0;
    if (posix_memalign(&xp, 64, batch * PACE_COLS * sizeof(float)) != 0) xp = NULL;
    if (w && scale && y && xp) {
        for (size_t i = 0; i < batch * PACE_COLS; i++) ((float *)xp)[i] = 1.0f;
        for (size_t i = 0; i < bytes; i++) w[i] = i & 1 ? 0x3e : (uint8_t)i;
        memset(scale, 120, n_w / K3_GROUP);
        for (int i = 0; i < PACE_RUNS; i++) {
            uint64_t t0 = own_ns();
            if (is_mxfp4)
                k->matmul_mxfp4(y, PACE_ROWS, w, scale, PACE_ROWS, PACE_COLS, xp, batch);
            else
                k->matmul_bf16(y, PACE_ROWS, (const uint16_t *)(const void *)w, PACE_COLS,
                               PACE_ROWS, PACE_COLS, xp, batch);
            best = fmax(best, 2e9 * (double)n_w * (double)batch / (double)(own_ns() - t0 + 1));
        }
    }
    free(w);
    free(scale);
    free(y);
    free(xp);
    return best;
}

/* Positions that share one expert of a chunk, on average: the batch its weights are read for. */
static size_t expert_share(const k3_shape *sh, uint64_t n_pos) {
    double distinct = forecast_distinct(sh->n_experts, sh->top_k, n_pos);
    double n = distinct > 0 ? (double)n_pos * sh->top_k / distinct : 1;
    return n < 1 ? 1 : n > 64 ? 64 : (size_t)(n + 0.5);
}

/* Seconds of computing; 0: the cores are not known. */
static double compute_seconds(const forecast *f, const k3_kernels *k, double bf16, uint64_t n_pos) {
    double trunk, experts, rate = f->core_flops * f->n_threads, n = f->n_threads;
    uint64_t chunk = f->p->chunk && f->p->chunk < n_pos ? f->p->chunk : n_pos;
    forecast_flops(f->sh, n_pos, &trunk, &experts);
    if (rate > 0) return (trunk + experts) / rate;
    double mxfp4 = k ? pace_measure(k, true, expert_share(f->sh, chunk)) : 0;
    return bf16 > 0 && mxfp4 > 0 ? (trunk / bf16 + experts / mxfp4) / n : 0;
}

/* ---- The table ---- */

static const char *fmt_seconds(char text[24], double s) {
    if (s < 1)
        snprintf(text, 24, "%.2f s", s);
    else if (s < 120)
        snprintf(text, 24, "%.0f s", s);
    else if (s < 7200)
        snprintf(text, 24, "%.0f min", s / 60);
    else if (s < 172800)
        snprintf(text, 24, "%.1f h", s / 3600);
    else
        snprintf(text, 24, "%.1f days", s / 86400);
    return text;
}

static void print_row(const forecast *f, const k3_kernels *k, double bf16, uint64_t n_pos,
                      bool is_chat) {
    char read[32], text[24];
    uint64_t n_bytes = forecast_bytes(f->sh, f->p, n_pos),
             opening = forecast_open_bytes(f->sh, f->p);
    double compute = compute_seconds(f, k, bf16, n_pos);
    printf("  %9llu ids %14s %10s", (unsigned long long)n_pos, fmt_bytes(read, n_bytes),
           compute > 0 ? fmt_seconds(text, compute) : "?");
    for (size_t i = 0; i < f->n_disk; i++)
        printf(" %10s", fmt_seconds(text, (double)opening / f->disk[i] +
                                              fmax((double)n_bytes / f->disk[i], compute)));
    if (is_chat)
        printf("  chat's own%s", f->is_pinned_chat ? ", by the released tokenizer" : "");
    else if (n_pos > f->p->context)
        printf("  with --context %llu or more", (unsigned long long)n_pos);
    puts("");
}

int forecast_print(const forecast *f) {
    const k3_shape *sh = f->sh;
    k3_error err = {{0}};
    char text[32];
    int n_cores = f->n_threads, rc = K3_OK;
    const k3_kernels *k =
        f->core_flops > 0 ? NULL : k3_machine_table(NULL, n_cores, &n_cores, &err);
    double bf16 = k ? pace_measure(k, false, 16) : 0;
    if (f->core_flops <= 0 && bf16 <= 0) rc = k ? K3_ENOMEM : K3_EUSAGE;
    printf("\nfirst token          opening reads %s, then the prompt\n  %13s %14s %10s",
           fmt_bytes(text, forecast_open_bytes(sh, f->p)), "prompt", "reads", "computes");
    for (size_t i = 0; i < f->n_disk; i++) {
        snprintf(text, sizeof text, "%.3g GB/s", f->disk[i] * 1e-9);
        printf(" %10s", text);
    }
    puts("");
    if (f->n_chat) print_row(f, k, bf16, f->n_chat, true);
    for (size_t i = 0; i < COUNT(PROMPT); i++)
        if (PROMPT[i] <= sh->max_position) print_row(f, k, bf16, PROMPT[i], false);
    if (moe_layers(sh) > 0)
        printf(
            "  reads: at most, as if each position chose %u of %u experts evenly and anew; a real "
            "prompt of 12\n  ids chose 0.62 of that\n",
            (unsigned)sh->top_k, (unsigned)sh->n_experts);
    printf("  computes: %d thread%s, %.0f GFLOP/s each, %s; it runs beside the reads\n",
           f->n_threads, f->n_threads == 1 ? "" : "s",
           (f->core_flops > 0 ? f->core_flops : bf16) * 1e-9,
           f->core_flops > 0 ? "as given" : "as one was measured now (--gflops N: other cores)");
    return rc;
}
