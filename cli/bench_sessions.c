/* bench_sessions.c - `k3 bench --sessions N`: N conversations in one pass against one alone, in paired rounds. */
#include "cli/bench_sessions.h"

#include "cli/console.h"
#include "cli/output.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 3 };

typedef struct {
    k3_session *s[K3_MAX_FEEDS];
    float *row; /* f32[n][n_vocab] */
    uint32_t id[K3_MAX_FEEDS];
    uint64_t fnv[K3_MAX_FEEDS]; /* over the ids of each session */
    size_t n_vocab;
} crowd;

/* Run what each of the first n sessions has to say next, all in one pass; then draw. A k3_status. */
static int crowd_feed(crowd *c, size_t n, const id_list *prompt, size_t n_prompt, k3_error *err) {
    k3_feed f[K3_MAX_FEEDS];
    for (size_t i = 0; i < n; i++) {
        const id_list *p = prompt ? &prompt[i % n_prompt] : NULL;
        f[i] = (k3_feed){.session = c->s[i], .ids = p ? p->id : &c->id[i], .n = p ? p->n : 1, .rows = K3_ROWS_LAST,
                         .logits = c->row + i * c->n_vocab};
    }
    int status = k3_feed_all(k3_session_engine(c->s[0]), f, n, err);
    for (size_t i = 0; status >= 0 && i < n; i++) {
        if (f[i].status < 0) {
            *err = f[i].error;
            return f[i].status;
        }
        c->id[i] = k3_sample_greedy(f[i].logits, c->n_vocab);
        c->fnv[i] = k3_fnv1a(c->fnv[i], &c->id[i], sizeof c->id[i]);
    }
    return status;
}

/* n sessions from their prompts on, `tokens` ids each; *seconds: of the steps after the prompts. */
static int crowd_run(crowd *c, size_t n, const id_list *prompt, size_t n_prompt, uint64_t tokens, double *seconds,
                     k3_error *err) {
    for (size_t i = 0; i < n; i++) {
        k3_session_reset(c->s[i]);
        c->fnv[i] = K3_FNV_BASIS;
    }
    int status = crowd_feed(c, n, prompt, n_prompt, err);
    uint64_t start = clock_ns();
    for (uint64_t t = 1; t < tokens && status >= 0; t++) status = crowd_feed(c, n, NULL, 0, err);
    *seconds = (double)(clock_ns() - start) * 1e-9;
    return status;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int crowd_measure(crowd *c, size_t n, const id_list *prompt, size_t n_prompt, uint64_t tokens) {
    double alone[ROUNDS], together[ROUNDS], ratio[ROUNDS], steps = (double)(tokens - 1);
    uint64_t fnv = 0;
    k3_error err = {{0}};
    for (int r = 0; r < ROUNDS; r++) {
        int status = crowd_run(c, 1, prompt, n_prompt, tokens, &alone[r], &err);
        fnv = c->fnv[0];
        if (status >= 0) status = crowd_run(c, n, prompt, n_prompt, tokens, &together[r], &err);
        if (status < 0) return fail_status(status, &err);
        if (c->fnv[0] != fnv)
            return fail(FAIL_CHECK, "--sessions: ids together have hash %016llx, alone %016llx",
                        (unsigned long long)c->fnv[0], (unsigned long long)fnv);
        ratio[r] = (double)n * alone[r] / together[r];
    }
    qsort(alone, ROUNDS, sizeof *alone, compare_doubles);
    qsort(together, ROUNDS, sizeof *together, compare_doubles);
    qsort(ratio, ROUNDS, sizeof *ratio, compare_doubles);
    printf("# sessions: %zu together %.3f tok/s, one alone %.3f tok/s: %.2f x (medians of %d pairs), ids of the first "
           "the same\n",
           n, (double)n * steps / together[ROUNDS / 2], steps / alone[ROUNDS / 2], ratio[ROUNDS / 2], ROUNDS);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

int bench_sessions(k3_engine *e, size_t n, const id_list *prompt, size_t n_prompt, uint64_t tokens) {
    crowd c = {.n_vocab = k3_engine_shape(e)->vocab_size};
    k3_error err = {{0}};
    int rc = DONE;
    if (tokens < 2) return fail(FAIL_USAGE, "--sessions needs --tokens 2 or more");
    c.row = malloc(n * c.n_vocab * sizeof *c.row);
    if (!c.row) rc = fail_memory("rows of logits", n * c.n_vocab * sizeof *c.row);
    for (size_t i = 0; i < n && rc == DONE; i++) {
        int status = k3_session_new(&c.s[i], e, 0, &err);
        if (status < 0) rc = fail_status(status, &err);
    }
    if (rc == DONE) rc = crowd_measure(&c, n, prompt, n_prompt, tokens);
    for (size_t i = 0; i < n; i++) k3_session_free(c.s[i]);
    free(c.row);
    return rc;
}
