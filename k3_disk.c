/* k3_disk.c - one queue of reads with three urgencies, a pool of readers or a ring (k3_disk.h). */
#include "k3_disk.h"

#include "k3_common.h"
#include "k3_error.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define IO_AGAIN 10000 /* interruptions of one request; one more is an error */
#define RING_NAP_NS 1000000 /* pause before asking a ring again that lacked memory or slots */

static int io_fd(const disk *d, const io_req *r) {
    const shard *s = &d->shards[r->i_shard];
    int direct = s->fd_direct[r->i_copy];
    bool is_aligned = r->got % IO_ALIGN == 0; /* direct I/O goes on at whole blocks only */
    return d->is_direct && direct >= 0 && is_aligned ? direct : s->fd[r->i_copy];
}

/* The copy to ask first, or -1: one in use before one that failed, and of those the one that should
 * answer soonest. The caller holds d->lock, here and in all functions up to the workers but
 * io_advance(). */
static int io_choose_copy(const disk *d, const io_req *r) {
    int best = -1;
    double best_ns = 0;
    for (int i = 0; i < d->n_copies; i++) {
        const io_copy *c = &d->copies[i];
        double ns = (double)(c->queued + r->n) * c->ns_per_byte;
        if (r->tried >> i & 1 || d->shards[r->i_shard].fd[i] < 0) continue;
        if (r->only && r->only != i + 1) continue;
        bool is_best_dead = best >= 0 && d->copies[best].is_dead;
        if (best < 0 || (c->is_dead == is_best_dead ? ns < best_ns : is_best_dead)) {
            best = i;
            best_ns = ns;
        }
    }
    return best;
}

static void io_push(disk *d, io_req *r, enum io_urgency u) {
    r->next = NULL;
    r->urgency = u;
    r->state = IO_QUEUED;
    if (d->last[u])
        d->last[u]->next = r;
    else
        d->first[u] = r;
    d->last[u] = r;
}

static void io_push_first(disk *d, io_req *r, enum io_urgency u) {
    r->next = d->first[u];
    r->urgency = u;
    r->state = IO_QUEUED;
    d->first[u] = r;
    if (!d->last[u]) d->last[u] = r;
}

/* Take a request out of the queue. */
static void io_unlink(disk *d, io_req *r) {
    io_req **at = &d->first[r->urgency], *before = NULL;
    while (*at != r) {
        before = *at;
        at = &before->next;
    }
    *at = r->next;
    if (d->last[r->urgency] == r) d->last[r->urgency] = before;
    r->state = IO_IDLE;
}

static void io_finish(disk *d, io_req *r, enum io_state state) {
    r->state = state;
    d->n_busy--;
    d->n_changes++;
    pthread_cond_broadcast(&d->done);
}

/* Take the most urgent request out of the queue and mark it as begun. NULL: none is queued, or `depth`
 * reads are running. */
static io_req *io_pop(disk *d) {
    for (int u = 0; u < N_URGENCIES && d->n_busy < d->depth;) {
        io_req *r = d->first[u];
        if (!r) {
            u++;
            continue;
        }
        io_unlink(d, r);
        r->state = IO_BUSY;
        r->got = 0;
        r->n_tries = r->n_again = 0;
        r->tried = r->avoid;
        r->why = 0;
        r->start_ns = clock_ns();
        r->i_copy = io_choose_copy(d, r);
        d->n_busy++;
        if (r->i_copy >= 0) {
            d->copies[r->i_copy].queued += r->n;
            return r;
        }
        r->why = ENODEV;
        io_finish(d, r, IO_FAILED);
    }
    return NULL;
}

/* Give a request that failed twice to another copy. Returns false when none is left. A lone copy is
 * never given up: the next request may fare better. */
static bool io_next_copy(disk *d, io_req *r) {
    io_copy *c = &d->copies[r->i_copy];
    c->queued -= r->n;
    if (d->n_copies > 1) c->is_dead = true;
    r->tried |= (uint8_t)(1u << r->i_copy);
    int i = io_choose_copy(d, r);
    if (i < 0) return false;
    r->i_copy = i;
    r->n_tries = 0;
    d->copies[i].queued += r->n;
    return true;
}

/* Fail a request that was begun, with errno `why`; its copy stays in use. */
static void io_give_up(disk *d, io_req *r, int why) {
    d->copies[r->i_copy].queued -= r->n;
    r->why = why;
    io_finish(d, r, IO_FAILED);
}

static void io_done(disk *d, io_req *r) {
    io_copy *c = &d->copies[r->i_copy];
    double ns = (double)(clock_ns() - r->start_ns) / (double)r->n;
    c->queued -= r->n;
    c->ns_per_byte = c->ns_per_byte > 0 ? 0.9 * c->ns_per_byte + 0.1 * ns : ns;
    d->read_bytes += r->n;
    for (int i = 0; i < d->n_copies; i++) /* a slow copy is tried again later */
        if (i != r->i_copy && d->copies[i].queued == 0) d->copies[i].ns_per_byte *= 0.98;
    io_finish(d, r, IO_DONE);
}

/* Take the result of one read: its bytes, or -errno. The caller does not hold the lock. Returns whether
 * the request has ended. */
static bool io_advance(disk *d, io_req *r, ssize_t res) {
    uint64_t need = r->offset + r->n - io_base(r);
    bool is_going_on = false;
    if ((res == -EINTR || res == -EAGAIN) && r->n_again++ < IO_AGAIN) return false;
    if (res > 0) r->got += (uint64_t)res;
    if (res > 0 && r->got < need) return false;
    r->at = r->to + (r->offset - io_base(r));
    if (res > 0 && (!r->has_sum || XXH3_64bits(r->at, (size_t)r->n) == r->sum)) {
        pthread_mutex_lock(&d->lock);
        io_done(d, r);
        pthread_mutex_unlock(&d->lock);
        return true;
    }
    r->why = res > 0 ? EBADMSG : (int)-res;
    r->got = 0;
    if (r->n_tries++ == 0) return false;
    pthread_mutex_lock(&d->lock);
    is_going_on = io_next_copy(d, r);
    if (!is_going_on) io_finish(d, r, IO_FAILED);
    pthread_mutex_unlock(&d->lock);
    return !is_going_on;
}

ssize_t plain_pread(void *user, int fd, void *to, size_t n, off_t offset) {
    (void)user;
    return pread(fd, to, n < (1u << 30) ? n : 1u << 30, offset);
}

/* One thread of the pool. It waits for tickets and not on a condition variable: glibc, from 2.25 on and
 * for years, could lose a pthread_cond_signal where several threads wait (its bug 25847), and a read
 * would stay queued for ever. */
static void *pool_main(void *arg) {
    disk *d = arg;
    for (;;) {
        while (sem_wait(&d->tickets) < 0) continue; /* EINTR */
        pthread_mutex_lock(&d->lock);
        bool is_stopping = d->is_stopping;
        io_req *r = is_stopping ? NULL : io_pop(d);
        pthread_mutex_unlock(&d->lock);
        if (is_stopping) return NULL;
        if (!r) continue; /* the request was taken back */
        ssize_t got;
        do {
            got = d->read(d->read_user, io_fd(d, r), r->to + r->got, (size_t)io_left(r),
                          (off_t)(io_base(r) + r->got));
            if (got < 0) got = -errno;
        } while (!io_advance(d, r, got));
    }
}

static void ring_prepare(disk *d, io_req *r) {
    struct io_uring_sqe *sqe =
        io_uring_get_sqe(&d->ring); /* entries exceed the depth: never NULL */
    uint64_t n = io_left(r);
    io_uring_prep_read(sqe, io_fd(d, r), r->to + r->got, n < (1u << 30) ? (unsigned)n : 1u << 30,
                       io_base(r) + r->got);
    io_uring_sqe_set_data(sqe, r);
}

static void ring_arm_wake(disk *d) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
    io_uring_prep_poll_add(sqe, d->wake_fd, POLLIN);
    io_uring_sqe_set_data(sqe, NULL);
}

static void nap(long ns) {
    struct timespec t = {.tv_nsec = ns};
    nanosleep(&t, NULL);
}

/* Hand the prepared entries to the kernel and wait for a completion. Returns 0, also after an
 * interruption, or the errno that makes the ring useless: EPERM where seccomp denies it, EAGAIN or
 * EBUSY after IO_AGAIN times in a row. */
static int ring_enter(struct io_uring *ring, int *n_again) {
    int rc = io_uring_submit_and_wait(ring, 1);
    if (rc >= 0) *n_again = 0;
    if (rc >= 0 || rc == -EINTR) return 0;
    if ((rc != -EAGAIN && rc != -EBUSY) || (*n_again)++ == IO_AGAIN) return -rc;
    nap(RING_NAP_NS);
    return 0;
}

/* Take all completions. Returns 0, or the errno with which the ring refuses to watch wake_fd. */
static int ring_reap(disk *d) {
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&d->ring, &cqe) == 0) {
        io_req *r = io_uring_cqe_get_data(cqe);
        ssize_t res = cqe->res;
        uint64_t n_wakes;
        io_uring_cqe_seen(&d->ring, cqe);
        if (r && !io_advance(d, r, res)) ring_prepare(d, r);
        if (r) continue;
        if (res < 0) return (int)-res;
        if (read(d->wake_fd, &n_wakes, sizeof n_wakes) < 0) n_wakes = 0; /* nothing to read: no wake */
        ring_arm_wake(d);
    }
    return 0;
}

/* Until the disk is closed: fill the ring, wait for a completion or a new request, take completions.
 * Returns 0, or the errno that ended it. */
static int ring_serve(disk *d) {
    int why = 0, n_again = 0;
    ring_arm_wake(d);
    while (why == 0) {
        pthread_mutex_lock(&d->lock);
        for (io_req *r; (r = io_pop(d));) ring_prepare(d, r);
        bool is_over = d->is_stopping && d->n_busy == 0;
        pthread_mutex_unlock(&d->lock);
        if (is_over) return 0;
        why = ring_enter(&d->ring, &n_again);
        if (why == 0) why = ring_reap(d);
    }
    return why;
}

/* Fail the requests whose entries the kernel has not taken: the last io_uring_sq_ready() entries. */
static void ring_drop(disk *d, int why) {
    const struct io_uring_sq *sq = &d->ring.sq;
    pthread_mutex_lock(&d->lock);
    d->ring_why = why;
    for (unsigned n = io_uring_sq_ready(&d->ring); n > 0; n--) {
        const struct io_uring_sqe *sqe = &sq->sqes[(sq->sqe_tail - n) & *sq->kring_mask];
        io_req *r = (io_req *)(uintptr_t)sqe->user_data;
        if (r) io_give_up(d, r, why);
    }
    pthread_mutex_unlock(&d->lock);
}

/* The ring has become useless: fail every request at once, until the disk is closed. Reads that the
 * kernel has begun are waited for, since it writes to their memory; their completions arrive without
 * the ring's own system call. */
static void ring_refuse(disk *d, int why) {
    struct pollfd at[] = {{.fd = d->wake_fd, .events = POLLIN},
                          {.fd = d->ring.ring_fd, .events = POLLIN}};
    struct io_uring_cqe *cqe;
    uint64_t n_wakes;
    ring_drop(d, why);
    for (;;) {
        pthread_mutex_lock(&d->lock);
        for (io_req *r; (r = io_pop(d));) io_give_up(d, r, why);
        bool is_over = d->is_stopping && d->n_busy == 0;
        pthread_mutex_unlock(&d->lock);
        if (is_over) return;
        if (poll(at, 2, -1) < 0 && errno != EINTR) nap(RING_NAP_NS);
        if (read(d->wake_fd, &n_wakes, sizeof n_wakes) < 0) n_wakes = 0; /* the ring woke poll() */
        while (io_uring_peek_cqe(&d->ring, &cqe) == 0) {
            io_req *r = io_uring_cqe_get_data(cqe);
            ssize_t res = cqe->res;
            io_uring_cqe_seen(&d->ring, cqe);
            if (!r || io_advance(d, r, res)) continue;
            pthread_mutex_lock(&d->lock);
            io_give_up(d, r, why); /* the rest cannot be asked for */
            pthread_mutex_unlock(&d->lock);
        }
    }
}

/* The thread of the ring. */
static void *ring_main(void *arg) {
    disk *d = arg;
    int why = ring_serve(d);
    if (why) ring_refuse(d, why);
    return NULL;
}

/* Submit a request that does nothing: some systems let a ring be set up and deny its use. Returns its
 * errno, or 0. */
static int ring_try(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    int n_again = 0, why;
    io_uring_prep_nop(io_uring_get_sqe(ring));
    for (int i = 0; i < IO_AGAIN; i++) {
        if ((why = ring_enter(ring, &n_again)) != 0) return why;
        if (io_uring_peek_cqe(ring, &cqe) != 0) continue; /* wait was interrupted */
        why = -cqe->res;
        io_uring_cqe_seen(ring, cqe);
        return why;
    }
    return ETIMEDOUT;
}

static void disk_wake(disk *d) {
    uint64_t one = 1;
    if (!d->is_uring)
        sem_post(&d->tickets);
    else if (write(d->wake_fd, &one, sizeof one) < 0)
        return; /* the counter is full: the thread is awake */
}

void disk_submit(disk *d, io_req *r, enum io_urgency u) {
    pthread_mutex_lock(&d->lock);
    io_push(d, r, u);
    disk_wake(d);
    pthread_mutex_unlock(&d->lock);
}

/* A request still queued becomes demand. is_first: it goes before all other demand. */
void disk_raise(disk *d, io_req *r, bool is_first) {
    pthread_mutex_lock(&d->lock);
    if (r->state == IO_QUEUED && (is_first || r->urgency != IO_DEMAND)) {
        io_unlink(d, r);
        if (is_first)
            io_push_first(d, r, IO_DEMAND);
        else
            io_push(d, r, IO_DEMAND);
    }
    pthread_mutex_unlock(&d->lock);
}

/* Take back a request, unless its read is running. Returns whether it is the caller's again. */
bool disk_cancel(disk *d, io_req *r) {
    pthread_mutex_lock(&d->lock);
    if (r->state == IO_QUEUED) io_unlink(d, r);
    bool is_mine = r->state != IO_BUSY;
    pthread_mutex_unlock(&d->lock);
    return is_mine;
}

enum io_state disk_state(disk *d, const io_req *r) {
    pthread_mutex_lock(&d->lock);
    enum io_state state = r->state;
    pthread_mutex_unlock(&d->lock);
    return state;
}

/* How many requests have ended so far; the caller reads this before it looks at their states. */
uint64_t disk_changes(disk *d) {
    pthread_mutex_lock(&d->lock);
    uint64_t n = d->n_changes;
    pthread_mutex_unlock(&d->lock);
    return n;
}

/* Sleep until more than `seen` requests have ended. */
void disk_wait_change(disk *d, uint64_t seen) {
    uint64_t start = clock_ns();
    pthread_mutex_lock(&d->lock);
    while (d->n_changes == seen) pthread_cond_wait(&d->done, &d->lock);
    d->stall_ns += clock_ns() - start;
    pthread_mutex_unlock(&d->lock);
}

/* Sleep until a request has ended, and add the time to stall_ns. */
void disk_wait(disk *d, const io_req *r) {
    uint64_t start = clock_ns();
    pthread_mutex_lock(&d->lock);
    while (r->state == IO_QUEUED || r->state == IO_BUSY) pthread_cond_wait(&d->done, &d->lock);
    d->stall_ns += clock_ns() - start;
    pthread_mutex_unlock(&d->lock);
}

int sum_fail(const shard *s, uint64_t offset, uint64_t n, k3_error *err) {
    return fail(err, K3_ECHECK,
                "%s: %llu bytes at offset 0x%llx do not match their sum; the file is damaged, "
                "download it again",
                s->name, (unsigned long long)n, (unsigned long long)offset);
}

/* Write the message for a failed request. */
int disk_fail(const disk *d, const io_req *r, k3_error *err) {
    const char *name = d->shards[r->i_shard].name;
    unsigned long long n = r->n, offset = r->offset;
    if (r->why == EBADMSG) return sum_fail(&d->shards[r->i_shard], r->offset, r->n, err);
    if (r->why == 0)
        return fail(
            err, K3_EIO,
            "%s: short: %llu bytes at offset 0x%llx are not all there; did the file shrink?", name,
            n, offset);
    bool is_ring = d->is_uring && r->why == d->ring_why;
    return fail(err, K3_EIO, "%s: read of %llu bytes at offset 0x%llx: %s%s%s", name, n, offset,
                is_ring ? "io_uring: " : "",
                r->why == ENODEV ? "no copy of the shard is left" : strerror(r->why),
                is_ring ? "; use --io pool" : "");
}

static int disk_threads_start(disk *d, k3_error *err) {
    void *(*run)(void *) = d->is_uring ? ring_main : pool_main;
    d->is_stopping = false;
    for (d->n_threads = 0; d->n_threads < (d->is_uring ? 1 : d->depth); d->n_threads++)
        if (pthread_create(&d->threads[d->n_threads], NULL, run, d) != 0) {
            if (d->n_threads > 0) break;
            return fail(err, K3_ENOMEM, "cannot start a thread for reading");
        }
    return 0;
}

void disk_threads_stop(disk *d) {
    pthread_mutex_lock(&d->lock);
    d->is_stopping = true;
    for (int i = 0; i < d->n_threads; i++) disk_wake(d);
    pthread_mutex_unlock(&d->lock);
    for (int i = 0; i < d->n_threads; i++) pthread_join(d->threads[i], NULL);
    d->n_threads = 0;
}

static int ring_open(disk *d, k3_error *err) {
    int rc = io_uring_queue_init(2 * IO_MAX_DEPTH, &d->ring, 0);
    if (rc < 0) return fail(err, K3_EIO, "io_uring: %s; use --io pool", strerror(-rc));
    d->ring_why = 0;
    int why = ring_try(&d->ring);
    d->wake_fd = why ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->wake_fd >= 0) return 0;
    rc = fail(err, K3_EIO, "%s: %s; use --io pool", why ? "io_uring" : "eventfd",
              strerror(why ? why : errno));
    io_uring_queue_exit(&d->ring);
    return rc;
}

/* Start the readers, or change how they read. No request may be queued. */
int disk_mode(disk *d, bool is_uring, bool is_direct, int depth, k3_error *err) {
    if (d->n_threads > 0) disk_threads_stop(d);
    if (d->is_uring) {
        io_uring_queue_exit(&d->ring);
        close(d->wake_fd);
    }
    d->is_uring = d->is_direct = false;
    if (is_uring) {
        int rc = ring_open(d, err);
        if (rc < 0) return rc;
    }
    d->is_uring = is_uring;
    d->is_direct = is_direct;
    d->depth = depth;
    return disk_threads_start(d, err);
}
