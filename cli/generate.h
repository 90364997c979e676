/* generate.h - one answer as it is made: a session with its row of logits, its sampler, its two running
 * hashes, and the texts that end it.
 */
#ifndef K3_CLI_GENERATE_H
#define K3_CLI_GENERATE_H

#include "cli/args.h"
#include "cli/drafts.h"
#include "k3.h"

typedef struct {
    const k3_engine *e;
    k3_session *s;
    size_t n_vocab;
    float *row;    /* f32[n_vocab], logits after the last position run       */
    void *scratch; /* for k3_sample                                          */
    drafts d;
    k3_sampler sampler;
    uint64_t ids_fnv, logits_fnv;
    k3_stats before; /* when the session was new: what opening read           */
} timeline;

/* A session with room for the context that the engine planned for. Returns an exit code whose reason is
 * said; timeline_close() in any case. */
int timeline_open(timeline *t, k3_engine *e, const cli_args *a);
void timeline_close(timeline *t);

/* Run ids and hash the row of the last one. A negative return is a k3_status. */
int timeline_feed(timeline *t, const uint32_t *ids, size_t n, k3_error *err);

/* Run the id that was drawn, with what may follow it, and hash its row. A negative return is a k3_status. */
int timeline_run(timeline *t, uint32_t id, k3_error *err);

/* Positions of the text. The session may be ahead of it (drafts.h) until timeline_settle(). */
uint64_t timeline_pos(const timeline *t);
void timeline_settle(timeline *t);

/* Back to position 0, as new. */
void timeline_reset(timeline *t);

/* timeline_feed with the last row revocable, so that the state before it can be kept (k3_cache_store_at). */
int timeline_feed_ahead(timeline *t, const uint32_t *ids, size_t n, k3_error *err);

/* Count t->row into logits_fnv. */
void timeline_hash_row(timeline *t);

/* The id that follows the row at hand; not yet run. */
uint32_t timeline_draw(timeline *t);

/* What was counted since `from`; n_pos and resident_bytes are as they are now. */
k3_stats timeline_stats(const timeline *t, const k3_stats *from);

/* How many of p[0, n) may be shown: those before the first of the stop texts in it, which sets *is_met; or, where
 * none is and more text will come (!is_end), those that cannot be the beginning of one. */
size_t stop_before(const char *p, size_t n, const char *const *stop, size_t n_stop, bool is_end,
                   bool *is_met);

#endif
