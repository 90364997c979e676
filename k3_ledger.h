/* k3_ledger.h - the byte ceiling: every allocation above a page is taken here, so that one number bounds
 * the process. Memory comes zeroed from mmap: a page that is never touched costs nothing, and what is
 * given back goes back to the system at once. Internal to the engine.
 */
#ifndef K3_LEDGER_H
#define K3_LEDGER_H

#include "k3.h"

#include <pthread.h>

typedef struct {
    uint64_t limit, used;
    int why;              /* status of the last refusal                    */
    pthread_mutex_t *lock; /* sessions come and go on any thread; may be NULL */
} ledger;

/* A block of n_bytes, page-aligned and zeroed; `what` names its use. NULL, a filled `err` and `why` when
 * the budget (K3_EBUDGET) or the system (K3_ENOMEM) says no. */
void *ledger_take(ledger *l, uint64_t n_bytes, const char *what, k3_error *err);

/* Give back a block of as many bytes as were asked for. NULL is nothing to give. */
void ledger_give(ledger *l, void *p, uint64_t n_bytes);

#endif
