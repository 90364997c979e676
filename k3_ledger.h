/* k3_ledger.h - the byte ceiling: every allocation above a page is taken here, so that one number
 * bounds the process. Blocks are zeroed memory from mmap: a page that is never touched takes no memory,
 * and a block that is given back is the system's again at once. Internal to the engine.
 */
#ifndef K3_LEDGER_H
#define K3_LEDGER_H

#include "k3.h"

#include <pthread.h>

typedef struct {
    uint64_t limit, used;
    int why;              /* status of the last refusal                    */
    pthread_mutex_t *lock; /* held in both functions; NULL: one thread */
} ledger;

/* Take a block of n_bytes, page-aligned and zeroed; `what` names its use. Returns NULL, with err and
 * l->why filled, when the budget (K3_EBUDGET) or the system (K3_ENOMEM) refuses. */
void *ledger_take(ledger *l, uint64_t n_bytes, const char *what, k3_error *err);

/* Give back a block p of n_bytes, the number that was taken. p NULL: nothing to do. */
void ledger_give(ledger *l, void *p, uint64_t n_bytes);

#endif
