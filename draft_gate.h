/* draft_gate.h - whether drafts pay: a width chosen by measured cost and measured acceptance.
 *
 * A pass of width w runs the id that is certain and w - 1 drafts. It costs C(w) seconds and gives E(w) ids. The gate
 * keeps a decayed mean of the seconds at each width, and of how often the k-th draft was right, for each class of
 * drafts; it takes the width with the largest E(w) / C(w), if that is 5 % better than no draft. It looks at no clock
 * itself, so tests are exact. Source: docs/DESIGN.md, Drafting.
 */
#ifndef K3_DRAFT_GATE_H
#define K3_DRAFT_GATE_H

#include <stddef.h>
#include <stdint.h>

enum {
    GATE_DRAFTS = 7,  /* most drafts of a pass                                               */
    GATE_CLASSES = 4, /* of drafts: for the n-gram, by how many ids matched (gate_class)     */
    GATE_WINDOW = 64, /* ids after which it is asked whether drafting was slower than none   */
    GATE_TEST = 32    /* drafts declined before one is tried, to learn what it costs         */
};

typedef struct {
    double trials[GATE_CLASSES][GATE_DRAFTS], hits[GATE_CLASSES][GATE_DRAFTS];
    double seconds[GATE_DRAFTS + 2], n_timed[GATE_DRAFTS + 2]; /* by width 1..GATE_DRAFTS + 1 */
    double window_s;
    uint32_t window_ids, n_paused; /* n_paused: ids until drafts are tried again */
    uint32_t n_declined;
} draft_gate;

void draft_gate_init(draft_gate *g);

/* The class of an n-gram draft of which so many ids matched. */
int draft_gate_class(size_t match);

/* How many of n drafts of a class to run. */
size_t draft_gate_choose(draft_gate *g, int class, size_t n);

/* A pass of n_drafts is over: it took so many seconds, and the first n_right drafts were right. `class` counts only
 * where n_drafts > 0. */
void draft_gate_count(draft_gate *g, int class, size_t n_drafts, size_t n_right, double seconds);

#endif
