/* k3_state.h - what k3.c shows of a session to k3_state.c, and to nobody else.
 *
 * k3_state.c parses files that it does not trust and knows nothing of layers; k3.c knows what a
 * session holds and nothing of files. Between them: a list of arrays, the ids, and the step's
 * scratch as working memory, which is free while no step runs.
 */
#ifndef K3_STATE_H
#define K3_STATE_H

#include "k3.h"

/* Least scratch there is, whatever the plan: two pieces on their way (k3_state.c). */
#define K3_STATE_ROOM ((uint64_t)2 << 20)

/* What layer il holds of the first n_pos positions, f32, little-endian as the machine is. */
typedef struct {
    void *p;
    uint64_t n_bytes;
} k3_state_array;
void k3_state_layer(const k3_session *s, uint32_t il, uint64_t n_pos, k3_state_array *out);

bool k3_state_is_broken(const k3_session *s);

/* Did far boxes give sums for it that nobody compared? Does this engine compare any? */
bool k3_state_is_unverified(const k3_session *s);
bool k3_state_has_audits(const k3_engine *e);
uint32_t *k3_state_ids(k3_session *s); /* u32[context] */

/* The arrays and ids were filled for n_pos positions: go on from there. */
void k3_state_resume(k3_session *s, uint64_t n_pos, bool is_unverified);

/* Rows that could be taken back become part of the state, which can then be read. */
void k3_state_settle(k3_session *s);

/* No step runs from begin to end, and `*room` bytes of its scratch (at least K3_STATE_ROOM,
 * page-aligned) are the caller's. */
void *k3_state_begin(k3_engine *e, uint64_t *room);
void k3_state_end(k3_engine *e);

/* One number for the model's files as this machine has them: equal while nobody touched them. 0: unknown, or
 * they were touched since the engine was opened. */
uint64_t k3_state_stamp(const k3_engine *e);

/* The threads that compute; between begin and end they are the caller's. */
struct k3_pool *k3_state_pool(const k3_engine *e);

/* One line for the caller's note function, if there is one. */
void k3_state_note(const k3_engine *e, const char *line);

#endif
