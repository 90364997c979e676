/* replay.c - `k3 bench --replay`: a routing trace, replayed.
 *
 * Hits of the two slot policies on recorded choices, line by line, each layer on its own, as the
 * engine's store does in decode: what was chosen is in memory or is read; at the end of the layer
 * what is over the quota goes, the coldest first.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/inputs.h"
#include "cli/output.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REPLAY_DECAY 0.9f /* as in the engine's store */

typedef struct {
    uint32_t pos, layer, n;
    uint32_t id[K3_MAX_TOP_K];
    float w[K3_MAX_TOP_K];
} replay_line;

typedef struct {
    unsigned n_layers, n_experts, top_k;
    unsigned long long expert_bytes;
    replay_line *line;
    size_t n;
} replay_trace;

static int replay_parse(replay_trace *t, const char *path, char *text, size_t i_line) {
    replay_line *l = &t->line[t->n];
    unsigned long long v[2];
    char *at = text;
    for (int i = 0; i < 2; i++) {
        char *from = at;
        v[i] = strtoull(from, &at, 10);
        if (at == from)
            return fail(FAIL_USAGE, "%s: line %zu: no position and layer", path, i_line);
    }
    if (v[1] >= t->n_layers)
        return fail(FAIL_USAGE, "%s: line %zu: layer %llu", path, i_line, v[1]);
    *l = (replay_line){.pos = (uint32_t)v[0], .layer = (uint32_t)v[1]};
    while (*at == ' ' && l->n < t->top_k) {
        char *from = at, *colon;
        unsigned long long id = strtoull(from, &colon, 10);
        float w = *colon == ':' ? strtof(colon + 1, &at) : -1.0f;
        if (colon == from || at == colon + 1 || !(w >= 0.0f && w < INFINITY) ||
            id >= t->n_experts || (l->n > 0 && id <= l->id[l->n - 1]))
            return fail(FAIL_USAGE, "%s: line %zu: not expert:weight, ids ascending", path, i_line);
        l->id[l->n] = (uint32_t)id;
        l->w[l->n++] = w;
    }
    if (l->n != t->top_k || *at)
        return fail(FAIL_USAGE, "%s: line %zu: not %u experts", path, i_line, t->top_k);
    t->n++;
    return DONE;
}

static int replay_read(replay_trace *t, const char *path) {
    blob file = {NULL, 0};
    int rc = blob_read(&file, path, SIZE_MAX), n_head = 0;
    size_t n_line = 0;
    if (rc != DONE) return rc;
    for (size_t i = 0; i < file.n; i++) n_line += file.p[i] == '\n';
    char *end = file.n ? memchr(file.p, '\n', file.n) : NULL;
    if (end) *end = 0;
    if (!end ||
        sscanf(file.p, "k3-routing 1 %4u %5u %2u %15llu%n", &t->n_layers, &t->n_experts, &t->top_k,
               &t->expert_bytes, &n_head) != 4 ||
        file.p[n_head] || t->n_layers > K3_MAX_LAYERS || t->n_experts > 65535 || t->top_k == 0 ||
        t->top_k > K3_MAX_TOP_K || t->top_k > t->n_experts) {
        rc = fail(FAIL_USAGE, "%s: no routing trace; make one with `k3 run --trace FILE`", path);
    } else if (!(t->line = malloc((n_line + 1) * sizeof *t->line))) {
        rc = fail_memory("the trace", (n_line + 1) * sizeof *t->line);
    }
    for (size_t i_line = 2; rc == DONE && end && end + 1 < file.p + file.n; i_line++) {
        char *from = end + 1;
        end = memchr(from, '\n', (size_t)(file.p + file.n - from));
        if (!end)
            rc = fail(FAIL_USAGE, "%s: line %zu is cut short", path, i_line);
        else if ((*end = 0, *from))
            rc = replay_parse(t, path, from, i_line);
    }
    if (rc == DONE && t->n == 0) rc = fail(FAIL_USAGE, "%s: no choices in it", path);
    free(file.p);
    return rc;
}

/* One expert of one layer. */
typedef struct {
    float heat;
    uint32_t tick;
    bool is_held;
} replay_slot;

/* Hits with `quota` slots a layer. `slot` is [n_layers][n_experts], cleared here. */
static uint64_t replay_hits(const replay_trace *t, k3_policy policy, uint32_t quota,
                            replay_slot *slot) {
    uint64_t n_hit = 0;
    memset(slot, 0, (size_t)t->n_layers * t->n_experts * sizeof *slot);
    for (size_t i = 0; i < t->n; i++) {
        const replay_line *l = &t->line[i];
        replay_slot *s = slot + (size_t)l->layer * t->n_experts;
        uint32_t n_held = 0;
        for (uint32_t ie = 0; ie < t->n_experts; ie++)
            s[ie].heat = s[ie].is_held ? s[ie].heat * REPLAY_DECAY : 0.0f;
        for (uint32_t k = 0; k < l->n; k++) {
            n_hit += s[l->id[k]].is_held;
            s[l->id[k]].is_held = true;
            s[l->id[k]].heat += l->w[k];
            s[l->id[k]].tick = (uint32_t)i + 1;
        }
        for (uint32_t ie = 0; ie < t->n_experts; ie++) n_held += s[ie].is_held;
        for (; n_held > quota; n_held--) {
            replay_slot *cold = NULL;
            for (uint32_t ie = 0; ie < t->n_experts; ie++)
                if (s[ie].is_held && (!cold || (policy == K3_POLICY_LRU ? s[ie].tick < cold->tick
                                                                        : s[ie].heat < cold->heat)))
                    cold = &s[ie];
            cold->is_held = false;
        }
    }
    return n_hit;
}

/* Experts by the sum of their weights, those never chosen left out. */
typedef struct {
    uint32_t layer, ie;
    double weight;
} replay_pin;

static int compare_pins(const void *a, const void *b) {
    const replay_pin *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->ie < y->ie ? -1 : x->ie > y->ie;
}

static int replay_write_pins(const replay_trace *t, const char *path) {
    size_t n = (size_t)t->n_layers * t->n_experts;
    outfile out = {0};
    replay_pin *pin = calloc(n, sizeof *pin);
    if (!pin) return fail_memory("the pins", n * sizeof *pin);
    for (size_t i = 0; i < n; i++) {
        pin[i].layer = (uint32_t)(i / t->n_experts);
        pin[i].ie = (uint32_t)(i % t->n_experts);
    }
    for (size_t i = 0; i < t->n; i++)
        for (uint32_t k = 0; k < t->line[i].n; k++)
            pin[(size_t)t->line[i].layer * t->n_experts + t->line[i].id[k]].weight +=
                (double)t->line[i].w[k];
    qsort(pin, n, sizeof *pin, compare_pins);
    int rc = outfile_open(&out, path);
    if (rc == DONE) rc = outfile_begin(&out);
    for (size_t i = 0; rc == DONE && i < n && pin[i].weight > 0; i++)
        fprintf(out.f, "%u %u %.6g\n", (unsigned)pin[i].layer, (unsigned)pin[i].ie, pin[i].weight);
    free(pin);
    if (rc != DONE) return rc;
    if (ferror(out.f)) rc = fail(FAIL_IO, "%s: write error", path);
    int closed = outfile_close(&out, rc == DONE);
    return rc != DONE ? rc : closed;
}

int bench_replay(const cli_args *a) {
    replay_trace t = {0};
    uint64_t n_use = 0;
    bool is_seen[K3_MAX_LAYERS] = {false};
    uint32_t n_moe = 0;
    int rc = replay_read(&t, a->bench.replay);
    replay_slot *slot = rc == DONE ? malloc((size_t)t.n_layers * t.n_experts * sizeof *slot) : NULL;
    if (rc == DONE && !slot) rc = fail_memory("the slots", (size_t)t.n_layers * t.n_experts);
    for (size_t i = 0; rc == DONE && i < t.n; i++) {
        n_use += t.line[i].n;
        n_moe += !is_seen[t.line[i].layer];
        is_seen[t.line[i].layer] = true;
    }
    if (rc == DONE)
        puts("slots_per_layer\tbytes\tof_token\tuses\trank_hits\tlru_hits\trank_rate\tlru_rate");
    for (uint32_t q = 1; rc == DONE && q <= t.n_experts; q += q < 4 ? 1 : q / 2) {
        uint64_t rank = replay_hits(&t, K3_POLICY_RANK, q, slot);
        uint64_t lru = replay_hits(&t, K3_POLICY_LRU, q, slot);
        printf("%u\t%llu\t%.3f\t%llu\t%llu\t%llu\t%.4f\t%.4f\n", (unsigned)q,
               (unsigned long long)q * n_moe * t.expert_bytes, (double)q / t.top_k,
               (unsigned long long)n_use, (unsigned long long)rank, (unsigned long long)lru,
               share(rank, n_use), share(lru, n_use));
    }
    if (rc == DONE && fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && a->bench.write_pins) rc = replay_write_pins(&t, a->bench.write_pins);
    free(slot);
    free(t.line);
    return rc;
}
