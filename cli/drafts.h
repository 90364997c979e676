/* drafts.h - ids of an answer run ahead of the draw: proposed from the text, verified by the model.
 *
 * Every id is still drawn from its own row, so text and hashes are those without drafts. A pass runs the id
 * that was drawn and some that may follow; their rows wait here until the draw says which of them were right, and the
 * session is cut back to those (k3_session_cut).
 */
#ifndef K3_CLI_DRAFTS_H
#define K3_CLI_DRAFTS_H

#include "draft_gate.h"
#include "draft_ngram.h"
#include "k3.h"

enum { DRAFT_AUTO = -1 };

typedef struct {
    k3_session *s;
    size_t n_vocab;
    int width;               /* drafts of a pass: 0, so many, or DRAFT_AUTO             */
    draft_ngram text;
    draft_gate gate;
    void *mem;               /* of `text`                                               */
    float *rows;             /* f32[1 + GATE_DRAFTS][n_vocab]                           */
    uint32_t ahead[GATE_DRAFTS]; /* drafts of the last pass, of which [i_ahead, n_ahead) wait */
    size_t n_ahead, i_ahead;
    int class;               /* of the last pass: what the gate is told when it is settled */
    double pass_s;
    bool is_open;            /* a pass waits to be counted                              */
    uint64_t passes, drafted, accepted;
} drafts;

/* What drafting adds to the program's own memory for texts of n_pos ids, and the rows that the engine must be able to
 * take back; both 0 with width 0. */
uint64_t drafts_bytes(int width, uint64_t n_pos, size_t n_vocab);
uint32_t drafts_revocable(int width);

/* For session s. Where the engine planned for no rows to take back, width becomes 0. Returns an exit code whose reason
 * is said; drafts_close() in any case. */
int drafts_open(drafts *d, k3_session *s, int width, size_t n_vocab);
void drafts_close(drafts *d);

/* Run `id`, which was drawn at the end of the text, and copy its row to `row`: f32[n_vocab]. A k3_status; after
 * K3_ECANCEL the text is as it was, if k3_session_has_ended() does not say otherwise. */
int drafts_run(drafts *d, uint32_t id, float *row, k3_error *err);

/* Positions of the text; the session itself may be ahead. */
uint64_t drafts_pos(const drafts *d);

/* The session becomes exactly the text: before it is saved, fed or shown in any other way. */
void drafts_settle(drafts *d);

#endif
