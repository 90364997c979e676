/* test_pool.c - k3_pool: every index exactly once, whatever the threads do meanwhile. */
#include "test.h"

#include "../experts.h"
#include "../k3_common.h"
#include "../k3_pool.h"

#include <stdlib.h>
#include <unistd.h>

#define MOST 5000

typedef struct {
    uint32_t times[MOST];
    int n_threads;
    uint32_t n_strange; /* a thread number out of range, or one that two threads have at once */
    uint32_t is_in[64];
    uint64_t sum;
    unsigned sleep_us;
} counter;

static void count(void *ctx, size_t i, int i_thread) {
    counter *c = ctx;
    bool is_strange = i_thread < 0 || i_thread >= c->n_threads;
    if (!is_strange)
        is_strange = __atomic_exchange_n(&c->is_in[i_thread], 1, __ATOMIC_ACQ_REL) != 0;
    c->times[i]++; /* not atomic: two threads on one index would show under ThreadSanitizer */
    __atomic_add_fetch(&c->sum, i, __ATOMIC_RELAXED);
    if (c->sleep_us && i % 7 == 3) usleep(c->sleep_us);
    if (is_strange) __atomic_add_fetch(&c->n_strange, 1, __ATOMIC_RELAXED);
    if (!is_strange) __atomic_store_n(&c->is_in[i_thread], 0, __ATOMIC_RELEASE);
}

/* One loop over n indices; every count must be right. */
static bool run(k3_pool *p, counter *c, size_t n, uint64_t unit_ns) {
    memset(c->times, 0, sizeof c->times);
    c->sum = 0;
    pool_run(p, n, unit_ns, count, c);
    size_t n_wrong = 0;
    for (size_t i = 0; i < MOST; i++) n_wrong += c->times[i] != (i < n);
    return n_wrong == 0 && c->sum == (n ? (uint64_t)n * (n - 1) / 2 : 0) && c->n_strange == 0;
}

/* Run loops of all lengths. Returns how many of them went wrong. */
static size_t loops(int n_threads, int n_loops) {
    counter *c = calloc(1, sizeof *c);
    k3_pool *p = n_threads ? pool_open(n_threads) : NULL;
    size_t n_wrong = 0;
    c->n_threads = n_threads ? n_threads : 1;
    for (int k = 0; k < n_loops; k++) {
        size_t n = (size_t)k * 7919 % (k % 3 ? 40 : MOST);
        uint64_t unit_ns = k % 4 == 0 ? 0 : k % 4 == 1 ? 100 : k % 4 == 2 ? 10000 : 1000000000;
        c->sleep_us = k % 64 == 9 ? 50 : 0;          /* longer than a worker spins before it sleeps */
        if (k % 50 == 0) usleep(POOL_SPIN_NS / 500); /* until all workers sleep */
        n_wrong += !run(p, c, n, unit_ns);
    }
    pool_close(p);
    free(c);
    return n_wrong;
}

/* Pools that end at once, and two that work at the same time. */
static void *other_main(void *arg) {
    *(size_t *)arg = loops(3, 300);
    return NULL;
}

static void test_many(void) {
    for (int i = 0; i < 50; i++) pool_close(pool_open(1 + i % 9));
    for (int i = 0; i < 50; i++) CHECK_EQ_INT(loops(1 + i % 5, 2), 0);
    pthread_t other;
    size_t n_other = 1;
    if (pthread_create(&other, NULL, other_main, &n_other) != 0) return;
    CHECK_EQ_INT(loops(2, 300), 0);
    pthread_join(other, NULL);
    CHECK_EQ_INT(n_other, 0);
}

/* The caller has another rounding mode; the functions of the pool never see it. */
static void rounds(void *ctx, size_t i, int i_thread) {
    volatile float a = 1.0f, b = 0x1p-24f;
    uint32_t *n_wrong = ctx;
    (void)i, (void)i_thread;
    if (a + b != 1.0f) __atomic_add_fetch(n_wrong, 1, __ATOMIC_RELAXED);
}

static void test_rounding(void) {
#if defined(__SSE2__)
    uint32_t n_wrong = 0;
    k3_pool *p = pool_open(3);
    unsigned was = _mm_getcsr();
    _mm_setcsr(was | 0x4000); /* upwards */
    pool_run(p, 1000, 10000, rounds, &n_wrong);
    _mm_setcsr(was | 0x4000);
    pool_run(NULL, 10, 10000, rounds, &n_wrong);
    _mm_setcsr(was);
    CHECK_EQ_INT(n_wrong, 0);
    pool_close(p);
#else
    SKIP("the rounding mode is set for SSE only");
#endif
}

/* Threads that have nothing to do sleep: a pool that waits costs no processor time. */
static void test_idle(void) {
    static counter c;
    struct timespec before, after;
    k3_pool *p = pool_open(4);
    c = (counter){.n_threads = 4};
    run(p, &c, 1000, 10000);
    usleep(20000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double s =
        (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9;
    CHECK(s < 0.02);
    pool_close(p);
}

static void test_min(void) {
    uint64_t least = UINT64_MAX;
    pool_min(&least, 7);
    pool_min(&least, 9);
    CHECK_EQ_INT((int64_t)least, 7);
    pool_min(&least, 0);
    CHECK_EQ_INT((int64_t)least, 0);
}

int main(void) {
    test_begin("pool");
    for (int n = 0; n <= 8; n++) CHECK_EQ_INT(loops(n, 2000), 0);
    CHECK_EQ_INT(loops(33, 300), 0);
    test_many();
    test_rounding();
    test_idle();
    test_min();
    return test_finish();
}
