/* greedy.h - a prompt and greedy ids behind it on an engine, with the three hashes that demo/bits.tsv has. */
#ifndef K3_TEST_GREEDY_H
#define K3_TEST_GREEDY_H

#include "k3.h"

#include <stdlib.h>

typedef struct {
    uint64_t ids, logits, trace;
} hashes;

static inline bool hashes_are_equal(const hashes *a, const hashes *b) {
    return a->ids == b->ids && a->logits == b->logits && a->trace == b->trace;
}

static inline void trace_add(void *user, uint64_t pos, uint32_t il, uint64_t fnv) {
    (void)pos;
    (void)il;
    uint64_t *h = user;
    *h = k3_fnv1a(*h, &fnv, sizeof fnv);
}

/* Run the prompt from the beginning of session s, then n_gen greedy ids without stopping at any.
 *
 * Shapes  prompt: u32[n_prompt]   out: u32[n_gen], or NULL   V: the vocabulary
 * Returns 0, or the status of the feed that failed, with err; *h has what was run until then */
static inline int greedy_run(k3_session *s, size_t V, const uint32_t *prompt, size_t n_prompt, size_t n_gen,
                             uint32_t *out, hashes *h, k3_error *err) {
    float *row = malloc(V * sizeof *row);
    if (!row) return K3_ENOMEM;
    *h = (hashes){K3_FNV_BASIS, K3_FNV_BASIS, K3_FNV_BASIS};
    k3_session_reset(s);
    k3_session_trace(s, trace_add, &h->trace);
    int rc = k3_session_feed(s, prompt, n_prompt, K3_ROWS_LAST, row, err);
    for (size_t i = 0; rc == 0 && i < n_gen; i++) {
        uint32_t id = k3_sample_greedy(row, V);
        if (out) out[i] = id;
        h->ids = k3_fnv1a(h->ids, &id, sizeof id);
        h->logits = k3_fnv1a(h->logits, row, V * sizeof *row);
        if (i + 1 < n_gen) rc = k3_session_feed(s, &id, 1, K3_ROWS_LAST, row, err);
    }
    free(row);
    return rc;
}

#endif
