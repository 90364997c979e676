/* k3_pool.c - a loop over threads: pieces handed out one after another, short spins, then sleep.
 *
 * `ticket` holds the number of the loop in its upper half and the next index in its lower half. A
 * worker takes indices with a compare-and-swap on the whole word, so it can take one of exactly the loop
 * whose description it has read. Before the caller writes a new description it closes the old loop:
 * an odd number, under which nothing can be taken. A worker that read half of a new description
 * fails in its compare-and-swap and reads again.
 */
#include "k3_pool.h"
#include "experts.h" /* fp_default */
#include "k3_common.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#define POOL_WAKE_NS                                                                               \
    10000u /* less work than this for one more thread does not wake it */
#define POOL_CLAIM_NS 4000u /* indices are taken in pieces of about this length, or single      */

typedef struct {
    k3_pool *pool;
    pthread_t thread;
    int i_thread;
} pool_worker;

struct k3_pool {
    /* The loop at work; written by the caller while it is closed. */
    uint64_t ticket; /* number of the loop << 32 | next index; an odd number: closed */
    pool_fn fn;
    void *ctx;
    size_t n;
    uint64_t unit_ns;
    uint64_t n_done; /* indices whose call has returned */
    /* Who waits for what. */
    uint32_t epoch;      /* futex: changes with each loop, and when the pool ends */
    uint32_t n_sleeping; /* workers that sleep on `epoch`, or are about to        */
    uint32_t is_waiting; /* futex: the caller sleeps until all is done            */
    uint32_t is_closing;
    bool is_timed; /* busy_ns is counted; written while no loop runs */
    uint64_t busy_ns;
    int n_threads;
    pool_worker worker[];
};

static void futex_wait(uint32_t *at, uint32_t value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL,
            0); /* an early return is no harm: callers look again */
}

static void futex_wake(uint32_t *at, int n) {
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Wait a few dozen nanoseconds without slowing the other hyperthread of this core. */
static void spin_pause(void) {
#if defined(__SSE2__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

void pool_min(uint64_t *least, uint64_t value) {
    uint64_t now = __atomic_load_n(least, __ATOMIC_RELAXED);
    while (value < now && !__atomic_compare_exchange_n(least, &now, value, false, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
    }
}

/* How many of `left` indices to take at once: enough for POOL_CLAIM_NS of work, and never so many that
 * other threads find none while this one still has several. */
static size_t claim_size(const k3_pool *p, size_t left, uint64_t unit_ns) {
    size_t most = left / (4 * (size_t)p->n_threads), want = POOL_CLAIM_NS / (unit_ns + 1);
    if (want > most) want = most;
    return want ? want : 1;
}

/* Wake one more sleeping worker, if left_ns of work are enough for it. */
static void pool_wake_one(k3_pool *p, uint64_t left_ns) {
    if (left_ns >= POOL_WAKE_NS && __atomic_load_n(&p->n_sleeping, __ATOMIC_SEQ_CST) > 0)
        futex_wake(&p->epoch, 1);
}

/* Take pieces of the open loop until none is left. `wakes`: wake other workers meanwhile. Returns
 * whether this thread took anything. */
static bool pool_work(k3_pool *p, int i_thread, bool wakes) {
    bool has_worked = false;
    for (;;) {
        uint64_t ticket = __atomic_load_n(&p->ticket, __ATOMIC_ACQUIRE);
        size_t i = (uint32_t)ticket, n = __atomic_load_n(&p->n, __ATOMIC_ACQUIRE);
        if ((ticket >> 32) % 2 != 0 || i >= n) return has_worked;
        pool_fn fn = __atomic_load_n(&p->fn, __ATOMIC_ACQUIRE);
        void *ctx = __atomic_load_n(&p->ctx, __ATOMIC_ACQUIRE);
        uint64_t unit_ns = __atomic_load_n(&p->unit_ns, __ATOMIC_ACQUIRE);
        size_t take = claim_size(p, n - i, unit_ns);
        if (!__atomic_compare_exchange_n(&p->ticket, &ticket, ticket + take, false,
                                         __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        has_worked = true;
        if (wakes) pool_wake_one(p, (n - i - take) * unit_ns);
        fp_default();
        uint64_t start = p->is_timed ? clock_ns() : 0;
        for (size_t k = i; k < i + take; k++) fn(ctx, k, i_thread);
        if (start) __atomic_add_fetch(&p->busy_ns, clock_ns() - start, __ATOMIC_RELAXED);
        uint64_t done = __atomic_add_fetch(&p->n_done, take, __ATOMIC_SEQ_CST);
        if (done == n && __atomic_exchange_n(&p->is_waiting, 0, __ATOMIC_SEQ_CST))
            futex_wake(&p->is_waiting, 1);
    }
}

/* Wait until `epoch` is no longer `seen`: spin, then sleep. */
static void worker_wait(k3_pool *p, uint32_t seen) {
    for (uint64_t until = clock_ns() + POOL_SPIN_NS; clock_ns() < until;)
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(&p->epoch, __ATOMIC_ACQUIRE) != seen) return;
            spin_pause();
        }
    __atomic_add_fetch(&p->n_sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&p->epoch, __ATOMIC_SEQ_CST) == seen) futex_wait(&p->epoch, seen);
    __atomic_sub_fetch(&p->n_sleeping, 1, __ATOMIC_SEQ_CST);
}

static void *worker_main(void *arg) {
    pool_worker *w = arg;
    k3_pool *p = w->pool;
    for (;;) {
        uint32_t seen = __atomic_load_n(&p->epoch, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&p->is_closing, __ATOMIC_ACQUIRE)) return NULL;
        pool_work(p, w->i_thread, true);
        worker_wait(p, seen);
    }
}

void pool_time(k3_pool *p, bool is_timed) {
    if (p) p->is_timed = is_timed;
}

uint64_t pool_busy_ns(const k3_pool *p) { return p ? p->busy_ns : 0; }

k3_pool *pool_open(int n_threads) {
    if (n_threads < 1) n_threads = 1;
    if (n_threads > POOL_MAX_THREADS) n_threads = POOL_MAX_THREADS;
    k3_pool *p = calloc(1, sizeof *p + (size_t)n_threads * sizeof *p->worker);
    if (!p) return NULL;
    p->n_threads = n_threads;
    int n = 1; /* the caller */
    for (; n < n_threads; n++) {
        p->worker[n] = (pool_worker){.pool = p, .i_thread = n};
        if (pthread_create(&p->worker[n].thread, NULL, worker_main, &p->worker[n]) != 0) break;
    }
    __atomic_store_n(&p->n_threads, n, __ATOMIC_RELEASE);
    return p;
}

void pool_close(k3_pool *p) {
    if (!p) return;
    __atomic_store_n(&p->is_closing, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&p->epoch, 1, __ATOMIC_SEQ_CST);
    futex_wake(&p->epoch, POOL_MAX_THREADS);
    for (int i = 1; i < p->n_threads; i++) pthread_join(p->worker[i].thread, NULL);
    free(p);
}

/* All indices are taken; wait until the last call has returned. */
static void caller_wait(k3_pool *p, size_t n) {
    for (uint64_t until = clock_ns() + POOL_SPIN_NS; clock_ns() < until;)
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(&p->n_done, __ATOMIC_ACQUIRE) == n) return;
            spin_pause();
        }
    for (;;) {
        __atomic_store_n(&p->is_waiting, 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&p->n_done, __ATOMIC_SEQ_CST) == n) break;
        futex_wait(&p->is_waiting, 1);
    }
    __atomic_store_n(&p->is_waiting, 0, __ATOMIC_SEQ_CST);
}

void pool_run(k3_pool *p, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx) {
    if (n == 0) return;
    if (!p || p->n_threads == 1 || n == 1 || n >= UINT32_MAX) {
        fp_default();
        uint64_t start = p && p->is_timed ? clock_ns() : 0;
        for (size_t i = 0; i < n; i++) fn(ctx, i, 0);
        if (start) p->busy_ns += clock_ns() - start;
        return;
    }
    uint64_t loop = (__atomic_load_n(&p->ticket, __ATOMIC_RELAXED) >> 32) + 1;
    __atomic_store_n(&p->ticket, (loop << 32) | UINT32_MAX, __ATOMIC_SEQ_CST); /* closed */
    __atomic_store_n(&p->fn, fn, __ATOMIC_RELEASE);
    __atomic_store_n(&p->ctx, ctx, __ATOMIC_RELEASE);
    __atomic_store_n(&p->n, n, __ATOMIC_RELEASE);
    __atomic_store_n(&p->unit_ns, unit_ns, __ATOMIC_RELEASE);
    __atomic_store_n(&p->n_done, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&p->ticket, (loop + 1) << 32, __ATOMIC_RELEASE);
    __atomic_add_fetch(&p->epoch, 1, __ATOMIC_SEQ_CST);
    pool_wake_one(p, n * unit_ns);
    pool_work(p, 0, true);
    caller_wait(p, n);
}
