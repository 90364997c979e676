/* k3_pass.h - one pass over the weights for the rows of many sessions. k3.h includes it, and its conventions
 * hold here.
 *
 * A row is one position of one session. All rows of a pass go through a layer together, so each matrix and each
 * distinct expert is read once for all of them; the bits of a row do not depend on the others. k3_session_feed()
 * is a pass of one session.
 *
 *     k3_feed f[2] = {{.session = a, .ids = &next_a, .n = 1, .rows = K3_ROWS_LAST, .logits = row_a},
 *                     {.session = b, .ids = prompt, .n = 900, .rows = K3_ROWS_NONE}};
 *     if (k3_feed_all(e, f, 2, &err) < 0) ...    // all failed; or look at f[i].status
 */
#ifndef K3_PASS_H
#define K3_PASS_H

#include "k3.h"

#ifdef __cplusplus
extern "C" {
#endif

#define K3_MAX_FEEDS     64 /* sessions of one pass                                  */
#define K3_MAX_REVOCABLE 32 /* rows of one session that a pass can keep revocable    */

/* What one session runs in a pass: `n` ids at its next positions, as k3_session_feed says of ids, rows, logits.
 * A session may stand in one feed of a pass, and in one pass at a time. */
typedef struct {
    k3_session *session;
    const uint32_t *ids; /* u32[n]                                                    */
    size_t n;
    k3_rows rows;
    float *logits;
    uint32_t revocable; /* of the last rows so many can be taken back (k3_session_cut); at most
                         * k3_plan.revocable and n                                    */
    int status;         /* out: 0, or why this session's part failed; the others go on */
    k3_error error;     /* out: the same as a line                                    */
} k3_feed;

/* Run all feeds to their ends. More rows than k3_plan.chunk take several passes over the weights.
 * Returns 0 when at least one feed succeeded, else the first feed's status, with `err` its line. Errors that concern
 * no single session (K3_EIO, K3_ECANCEL from the progress function) are every unfinished feed's.
 * A feed whose rows were all revocable leaves its session where it was when it fails; any other failed
 * session can only be reset, restored, loaded or freed. */
int k3_feed_all(k3_engine *e, k3_feed *feed, size_t n_feeds, k3_error *err);

/* ---- The same in steps: a pass can rest between two layers while passes of other sessions run ---- */

typedef struct k3_pass k3_pass;

/* `feed` must outlive the pass. Errors  K3_EUSAGE: a feed that could not be run, or no room beside the passes that
 * are at rest (k3_options.sessions plans for small ones beside a long one); K3_EFULL; K3_ENOMEM. After an
 * error there is no pass and nothing was run. */
int k3_pass_open(k3_pass **out, k3_engine *e, k3_feed *feed, size_t n_feeds, k3_error *err);

/* Run at most `n_layers` layers. Returns 1: all feeds are done; 0: the pass rests; or as k3_feed_all when
 * every feed has failed. */
int k3_pass_run(k3_pass *p, uint32_t n_layers, k3_error *err);

/* Take a session out: its feed ends with K3_ECANCEL, the others go on. */
void k3_pass_drop(k3_pass *p, k3_session *s);

/* How far it is, in positions x layers. */
void k3_pass_progress(const k3_pass *p, uint64_t *done, uint64_t *total);

/* Unfinished feeds end with K3_ECANCEL. NULL is nothing to do. */
void k3_pass_close(k3_pass *p);

/* ---- Cutting back ---- */

/* Set the session to its first `pos` positions, bit for bit as if the rest had never been fed. Costs nothing; the rows
 * that stay are added to the KDA state by the next pass.
 * Errors  K3_EUSAGE: below k3_session_least() or above k3_session_pos(), or the session has ended */
int k3_session_cut(k3_session *s, uint64_t pos, k3_error *err);

/* The least position that k3_session_cut() can go back to. */
uint64_t k3_session_least(const k3_session *s);

/* Did its last step fail, so that it can only be reset, restored, loaded or freed? */
bool k3_session_has_ended(const k3_session *s);

/* ---- Taps: hidden states for models that draft ---- */

#define K3_MAX_TAPS 16

/* Called for each tap layer and each row that a pass ran, layer by layer, within one by position, on the thread that
 * runs the pass. x: f32[hidden], borrowed for the call. */
typedef void (*k3_tap_fn)(void *user, uint64_t pos, uint32_t i_tap, const float *x);

/* After each of `layers` (ascending, at most K3_MAX_TAPS): with attn_res false the running sum P, with attn_res
 * true the mixture that the next layer is about to normalise, which after the last layer is the output mixture before
 * the final norm. fn NULL: no taps. Errors  K3_EUSAGE */
int k3_session_on_taps(k3_session *s, const uint32_t *layers, uint32_t n, bool attn_res, k3_tap_fn fn,
                       void *user, k3_error *err);

#ifdef __cplusplus
}
#endif
#endif
