/* generate.c - a session with its row of logits, its sampler and its hashes; the texts that end an answer. */
#include "cli/generate.h"

#include "cli/args.h"
#include "cli/console.h"

#include <stdlib.h>
#include <string.h>

int timeline_open(timeline *t, k3_engine *e, const cli_args *a) {
    k3_error err = {{0}};
    t->e = e;
    t->n_vocab = k3_engine_shape(e)->vocab_size;
    t->sampler = a->sampler;
    t->ids_fnv = t->logits_fnv = K3_FNV_BASIS;
    t->row = malloc(t->n_vocab * sizeof *t->row);
    t->scratch = malloc(k3_sample_scratch(t->n_vocab) + 1);
    if (!t->row || !t->scratch) return fail_memory("a row of logits", t->n_vocab * sizeof *t->row);
    int status = k3_session_new(&t->s, e, 0, &err);
    if (status < 0) return fail_status(status, &err);
    k3_session_stats(t->s, &t->before);
    return drafts_open(&t->d, t->s, args_draft(a), t->n_vocab);
}

void timeline_close(timeline *t) {
    drafts_close(&t->d);
    k3_session_free(t->s);
    free(t->row);
    free(t->scratch);
}

k3_stats timeline_stats(const timeline *t, const k3_stats *from) {
    k3_stats st;
    k3_session_stats(t->s, &st);
    st.compute_ns -= from->compute_ns;
    st.stall_ns -= from->stall_ns;
    st.expert_uses -= from->expert_uses;
    st.expert_hits -= from->expert_hits;
    st.expert_loads -= from->expert_loads;
    st.guesses -= from->guesses;
    st.guess_hits -= from->guess_hits;
    st.wasted_bytes -= from->wasted_bytes;
    st.read_bytes -= from->read_bytes;
    return st;
}

void timeline_hash_row(timeline *t) {
    t->logits_fnv = k3_fnv1a(t->logits_fnv, t->row, t->n_vocab * sizeof *t->row);
}

int timeline_feed(timeline *t, const uint32_t *ids, size_t n, k3_error *err) {
    timeline_settle(t);
    int status = k3_session_feed(t->s, ids, n, K3_ROWS_LAST, t->row, err);
    if (status >= 0) timeline_hash_row(t);
    return status;
}

int timeline_feed_ahead(timeline *t, const uint32_t *ids, size_t n, k3_error *err) {
    k3_feed f = {.session = t->s, .ids = ids, .n = n, .rows = K3_ROWS_LAST, .logits = t->row, .revocable = 1};
    timeline_settle(t);
    int status = k3_feed_all(k3_session_engine(t->s), &f, 1, err);
    if (status >= 0) timeline_hash_row(t);
    return status;
}

int timeline_run(timeline *t, uint32_t id, k3_error *err) {
    int status = drafts_run(&t->d, id, t->row, err);
    if (status >= 0) timeline_hash_row(t);
    return status;
}

uint64_t timeline_pos(const timeline *t) { return drafts_pos(&t->d); }

void timeline_settle(timeline *t) { drafts_settle(&t->d); }

void timeline_reset(timeline *t) {
    timeline_settle(t);
    k3_session_reset(t->s);
    t->ids_fnv = t->logits_fnv = K3_FNV_BASIS;
}

uint32_t timeline_draw(timeline *t) {
    uint64_t pos = timeline_pos(t) - 1;
    uint32_t id = k3_sample(t->e, &t->sampler, t->row, t->n_vocab, pos, t->scratch);
    t->ids_fnv = k3_fnv1a(t->ids_fnv, &id, sizeof id);
    return id;
}

/* Bytes at the end of p[0, n) that could be the start of `stop`. */
static size_t stop_prefix(const char *p, size_t n, const char *stop) {
    size_t most = strlen(stop) - 1;
    for (size_t k = n < most ? n : most; k > 0; k--)
        if (memcmp(p + n - k, stop, k) == 0) return k;
    return 0;
}

size_t stop_before(const char *p, size_t n, const char *const *stop, size_t n_stop, bool is_end,
                   bool *is_met) {
    size_t n_held = 0;
    *is_met = false;
    for (size_t i = 0; i < n_stop; i++) {
        const char *hit = memmem(p, n, stop[i], strlen(stop[i]));
        if (!hit) continue;
        n = (size_t)(hit - p); /* later ones must come earlier still */
        *is_met = true;
    }
    for (size_t i = 0; i < n_stop && !is_end && !*is_met; i++) {
        size_t k = stop_prefix(p, n, stop[i]);
        if (k > n_held) n_held = k;
    }
    return n - n_held;
}
