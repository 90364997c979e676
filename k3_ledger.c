/* k3_ledger.c - the byte ceiling. */
#include "k3_ledger.h"

#include "k3_error.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>


static void ledger_lock(const ledger *l) {
    if (l->lock) pthread_mutex_lock(l->lock);
}

static void ledger_unlock(const ledger *l) {
    if (l->lock) pthread_mutex_unlock(l->lock);
}

void *ledger_take(ledger *l, uint64_t n_bytes, const char *what, k3_error *err) {
    void *p = NULL;
    if (n_bytes == 0) n_bytes = 1;
    ledger_lock(l);
    if (n_bytes > l->limit || l->used > l->limit - n_bytes) {
        l->why = fail(err, K3_EBUDGET,
                      "%s: %llu bytes needed, %llu of the budget of %llu taken; give at least %llu "
                      "with --ram",
                      what, (unsigned long long)n_bytes, (unsigned long long)l->used,
                      (unsigned long long)l->limit, (unsigned long long)(l->used + n_bytes));
    } else if ((p = mmap(NULL, (size_t)n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                         -1, 0)) == MAP_FAILED) {
        p = NULL;
        l->why = fail(err, K3_ENOMEM, "%s: %llu bytes: %s", what, (unsigned long long)n_bytes,
                      strerror(errno));
    } else {
        madvise(p, (size_t)n_bytes, MADV_HUGEPAGE); /* only a hint: fewer page faults */
        l->used += n_bytes;
    }
    ledger_unlock(l);
    return p;
}

void ledger_give(ledger *l, void *p, uint64_t n_bytes) {
    if (!p) return;
    if (n_bytes == 0) n_bytes = 1;
    munmap(p, (size_t)n_bytes);
    ledger_lock(l);
    l->used -= n_bytes;
    ledger_unlock(l);
}
