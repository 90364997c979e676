/* k3_pool.h - the threads that compute, for the engine, the tier server and the kernel bench.
 *
 * A pool is one caller and n - 1 workers. pool_run() hands out the indices 0..n-1 of a loop in small
 * pieces: a thread that is fast, or undisturbed, takes more of them. No result depends on which thread
 * takes which index, because work is split by output element only (docs/NUMERICS.md 1).
 *
 * Waiting. A worker without work spins for POOL_SPIN_NS and then sleeps on a futex. The caller waits
 * in the same way for the last pieces. A loop shorter than the waking of a thread wakes nobody; whoever
 * happens to be awake helps. OpenMP would be the library for this, but libgomp reads its wait policy
 * before main() and spins for milliseconds by default: docs/LAB.md has what that costs.
 *
 * One pool_run() at a time for each pool; the function that it calls must not call pool_run().
 */
#ifndef K3_POOL_H
#define K3_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define POOL_MAX_THREADS 1024
#define POOL_SPIN_NS 30000u /* about the longest serial step between two loops of a token */

typedef struct k3_pool k3_pool;

/* Compute index `i`. `i_thread` is 0..n_threads-1: which scratch memory is this thread's own. The
 * floating-point state is the default (NUMERICS 1) whenever this is called by pool_run(). */
typedef void (*pool_fn)(void *ctx, size_t i, int i_thread);

/* n_threads 1..POOL_MAX_THREADS, the caller included. When the system refuses a thread the pool has
 * fewer. NULL: out of memory. */
k3_pool *pool_open(int n_threads);
void pool_close(k3_pool *p); /* NULL is nothing to do */

/* Call fn(ctx, i, ...) once for each i in [0, n), and return when all calls have returned.
 * `unit_ns` is roughly what one call costs in nanoseconds; it decides how many threads are woken and how
 * many indices a thread takes at once, never what is computed. p NULL: the caller does everything. */
void pool_run(k3_pool *p, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx);

/* pool_time: begin or stop counting the time that threads spend in fn. pool_busy_ns: that time, summed
 * over all threads, in nanoseconds. Call neither while a loop runs. p NULL: nothing, and 0. */
void pool_time(k3_pool *p, bool is_timed);
uint64_t pool_busy_ns(const k3_pool *p);

/* *least = min(*least, value), from any number of threads at once. */
void pool_min(uint64_t *least, uint64_t value);

#endif
