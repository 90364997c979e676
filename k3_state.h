/* k3_state.h - what k3.c shows of a session to k3_state.c, and to nobody else.
 *
 * k3_state.c parses files that it does not trust and knows nothing of layers; k3.c knows what a
 * session holds and nothing of files. Between them: a list of arrays, the ids, and the step's
 * scratch as working memory, which is free while no step runs.
 */
#ifndef K3_STATE_H
#define K3_STATE_H

#include "k3.h"

/* The least scratch that an engine has, whatever its plan: two pieces are written or read at a time
 * (k3_state.c). */
#define K3_STATE_ROOM ((uint64_t)2 << 20)

/* The array that layer il keeps for the first n_pos positions: f32, little-endian as this machine is. */
typedef struct {
    void *p;
    uint64_t n_bytes;
} k3_state_array;
void k3_state_layer(const k3_session *s, uint32_t il, uint64_t n_pos, k3_state_array *out);

bool k3_state_is_broken(const k3_session *s);

/* k3_state_is_unverified: did the session use sums of far boxes that nobody compared?
 * k3_state_has_audits: does this engine compare any? */
bool k3_state_is_unverified(const k3_session *s);
bool k3_state_has_audits(const k3_engine *e);
uint32_t *k3_state_ids(k3_session *s); /* u32[context] */

/* The caller has filled arrays and ids for n_pos positions: the session goes on from there. */
void k3_state_resume(k3_session *s, uint64_t n_pos, bool is_unverified);

/* Set the session's position to `pos`, unchecked; for k3_cache_store_at. */
void k3_state_set_pos(k3_session *s, uint64_t pos);

/* Make rows that could be taken back part of the state, so that it can be read. */
void k3_state_settle(k3_session *s);

/* From k3_state_begin to k3_state_end no step runs, and *room bytes of the engine's scratch (at least
 * K3_STATE_ROOM, page-aligned) are the caller's. */
void *k3_state_begin(k3_engine *e, uint64_t *room);
void k3_state_end(k3_engine *e);

/* One number for the model's files on this machine, equal as long as nobody touched them. 0: unknown,
 * or they were touched since the engine was opened. */
uint64_t k3_state_stamp(const k3_engine *e);

/* The engine's threads; from begin to end they are the caller's. */
struct k3_pool *k3_state_pool(const k3_engine *e);

/* Give one line to the note function of k3_options, if there is one. */
void k3_state_note(const k3_engine *e, const char *line);

#endif
