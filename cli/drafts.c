/* drafts.c - rows that were run ahead, and the draws that accept them. */
#include "cli/drafts.h"

#include "cli/console.h"
#include "k3_common.h"

#include <stdlib.h>
#include <string.h>

STATIC_ASSERT(a_pass_can_be_taken_back, GATE_DRAFTS + 1 <= K3_MAX_REVOCABLE);

uint32_t drafts_revocable(int width) { return width == 0 ? 0 : GATE_DRAFTS + 1; }

uint64_t drafts_bytes(int width, uint64_t n_pos, size_t n_vocab) {
    return width == 0 ? 0 : draft_ngram_bytes(n_pos) + (GATE_DRAFTS + 1) * n_vocab * sizeof(float);
}

int drafts_open(drafts *d, k3_session *s, int width, size_t n_vocab) {
    size_t n_pos = (size_t)k3_session_context(s);
    *d = (drafts){.s = s, .n_vocab = n_vocab, .width = width};
    draft_gate_init(&d->gate);
    if (k3_engine_plan(k3_session_engine(s))->revocable < drafts_revocable(width)) d->width = 0;
    if (d->width == 0) return DONE;
    d->mem = malloc(draft_ngram_bytes(n_pos));
    d->rows = malloc((GATE_DRAFTS + 1) * n_vocab * sizeof *d->rows);
    if (!d->mem || !d->rows) return fail_memory("rows of drafts", (size_t)drafts_bytes(width, n_pos, n_vocab));
    draft_ngram_init(&d->text, d->mem, n_pos);
    return DONE;
}

void drafts_close(drafts *d) {
    free(d->mem);
    free(d->rows);
    d->mem = d->rows = NULL;
}

uint64_t drafts_pos(const drafts *d) { return k3_session_pos(d->s) - (d->n_ahead - d->i_ahead); }

/* The last pass is done with: i_ahead of its drafts were right. */
static void pass_count(drafts *d) {
    if (!d->is_open) return;
    d->is_open = false;
    d->drafted += d->n_ahead;
    d->accepted += d->i_ahead;
    draft_gate_count(&d->gate, d->class, d->n_ahead, d->i_ahead, d->pass_s);
}

void drafts_settle(drafts *d) {
    uint64_t pos = drafts_pos(d);
    pass_count(d);
    if (d->n_ahead > d->i_ahead && !k3_session_has_ended(d->s)) k3_session_cut(d->s, pos, NULL);
    d->n_ahead = d->i_ahead = 0;
}

/* What may follow the text and `id`; returns how many ids are worth a try. */
static size_t propose(drafts *d, uint32_t id, uint32_t *out) {
    size_t n, match, room = (size_t)(k3_session_context(d->s) - k3_session_pos(d->s)), most = GATE_DRAFTS;
    const uint32_t *ids = k3_session_ids(d->s, &n);
    if (room < 2 || n + 1 > d->text.cap) return 0;
    if (most > room - 1) most = room - 1;
    draft_ngram_sync(&d->text, ids, n);
    draft_ngram_add(&d->text, id);
    n = draft_ngram_propose(&d->text, out, most, &match);
    d->class = draft_gate_class(match);
    if (d->width == DRAFT_AUTO) return draft_gate_choose(&d->gate, d->class, n);
    return n < (size_t)d->width ? n : (size_t)d->width;
}

int drafts_run(drafts *d, uint32_t id, float *row, k3_error *err) {
    if (d->i_ahead < d->n_ahead && d->ahead[d->i_ahead] == id) { /* it was run already */
        memcpy(row, d->rows + ++d->i_ahead * d->n_vocab, d->n_vocab * sizeof *row);
        return 0;
    }
    uint32_t run[GATE_DRAFTS + 1] = {id};
    drafts_settle(d);
    size_t n = d->width ? propose(d, id, run + 1) : 0;
    k3_feed f = {.session = d->s, .ids = run, .n = n + 1, .rows = K3_ROWS_ALL, .logits = n ? d->rows : row};
    f.revocable = d->width ? (uint32_t)n + 1 : 0; /* all of it: a pass that is cancelled leaves the text as it was */
    uint64_t start = clock_ns();
    int status = k3_feed_all(k3_session_engine(d->s), &f, 1, err);
    if (status < 0) return status;
    d->pass_s = (double)(clock_ns() - start) * 1e-9;
    d->is_open = true;
    d->passes++;
    d->n_ahead = n;
    memcpy(d->ahead, run + 1, n * sizeof *run);
    if (n) memcpy(row, d->rows, d->n_vocab * sizeof *row);
    return status;
}
