/* k3_disk.h - reads of weights, served while layers compute. Internal to the engine.
 *
 * One queue with three urgencies. Either a pool of threads serves it with pread, or one thread that
 * keeps an io_uring full: the same requests, the same checks.
 *
 *   - whoever needs bytes submits a request and waits for it; from submission until the request is
 *     done or failed, it and its memory belong to the disk;
 *   - demand overtakes trunk rows, and trunk rows overtake guesses; a request can be taken back as
 *     long as its read has not begun;
 *   - short reads go on, EINTR and EAGAIN are retried; an error, a file that ends early and a sum
 *     that does not match are tried once more, then on the next copy of the shard; a copy that
 *     failed twice is not asked again;
 *   - a request that nobody can serve fails with its cause: no hang, no zeros.
 *
 * Reads cover whole 4096-byte blocks, as direct I/O wants it; buffers have room for that.
 */
#ifndef K3_DISK_H
#define K3_DISK_H

#include "k3_model.h"

#include <liburing.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/types.h>

#define IO_ALIGN 4096u
#define IO_MAX_DEPTH 64
STATIC_ASSERT(io_align_is_a_block, IO_ALIGN % 4096 == 0 && (IO_ALIGN & (IO_ALIGN - 1)) == 0);
STATIC_ASSERT(copies_fit_a_byte_of_bits, K3_MAX_COPIES <= 8);

enum io_urgency { IO_DEMAND, IO_TRUNK, IO_GUESS, N_URGENCIES };
enum io_state { IO_IDLE, IO_QUEUED, IO_BUSY, IO_DONE, IO_FAILED };

typedef struct io_req {
    uint8_t *to;        /* io_room(n) bytes, IO_ALIGN-aligned        */
    uint8_t *at;        /* when done: where the n bytes begin        */
    uint64_t offset, n;
    uint64_t sum;       /* XXH3 of the n bytes, if has_sum           */
    uint16_t i_shard;
    bool has_sum;
    uint8_t tried;      /* copies that failed to read it, by bit     */
    uint8_t only;       /* 1 + the copy that must answer; 0: any     */
    uint8_t avoid;      /* copies not to be asked, by bit            */
    enum io_state state;
    enum io_urgency urgency;
    int i_copy, n_tries, n_again;
    int why;            /* errno of a failure; 0: the file ended     */
    uint64_t got, start_ns;
    struct io_req *next;
} io_req;

/* A directory that holds shards: the model's own, or a mirror. */
typedef struct {
    char *dir;
    bool is_dead, is_told;
    uint64_t queued;
    double ns_per_byte; /* running average of its reads */
} io_copy;

/* How bytes are read; tests put a faulty disk here. */
typedef ssize_t (*pread_fn)(void *user, int fd, void *to, size_t n, off_t offset);
ssize_t plain_pread(void *user, int fd, void *to, size_t n, off_t offset); /* pread itself */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    sem_t tickets; /* of the pool: one for each request ever queued, even if taken back */
    io_req *first[N_URGENCIES], *last[N_URGENCIES];
    pthread_t threads[IO_MAX_DEPTH];
    int n_threads, depth, n_busy;
    bool is_stopping, is_direct, is_uring;
    pread_fn read;
    void *read_user;
    const shard *shards;
    io_copy copies[K3_MAX_COPIES];
    int n_copies;
    uint64_t read_bytes, stall_ns, n_changes; /* n_changes: requests that have ended */
    struct io_uring ring;
    int wake_fd;
    int ring_why; /* errno that made the ring useless; 0: it serves */
} disk;

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static inline uint64_t io_room(uint64_t n) { return round_up(n, IO_ALIGN) + IO_ALIGN; }
static inline uint64_t io_base(const io_req *r) { return r->offset / IO_ALIGN * IO_ALIGN; }

/* Bytes still to be read, in whole blocks. */
static inline uint64_t io_left(const io_req *r) {
    return round_up(r->offset + r->n - io_base(r), IO_ALIGN) - r->got;
}

/* Queue a read. The caller has filled in r->to, offset, n, i_shard, and sum where has_sum is set. The
 * request and r->to belong to the disk until disk_state() returns IO_DONE or IO_FAILED. */
void disk_submit(disk *d, io_req *r, enum io_urgency u);
enum io_state disk_state(disk *d, const io_req *r);

/* Sleep until a request has ended. The time slept is added to stall_ns: how long the step waited for
 * the disk. */
void disk_wait(disk *d, const io_req *r);

/* disk_changes: how many requests have ended so far. disk_wait_change: sleep until more than `seen`
 * have. Read the count first and the states of requests after it, so that no end is missed in between. */
uint64_t disk_changes(disk *d);
void disk_wait_change(disk *d, uint64_t seen);

/* A request still queued becomes demand. is_first: it goes before all other demand. */
void disk_raise(disk *d, io_req *r, bool is_first);

/* Take back a request. Returns false when its read is running: the request is then still the disk's. */
bool disk_cancel(disk *d, io_req *r);

/* Write the message for a failed request. Returns K3_EIO, or K3_ECHECK where its sum does not match. */
int disk_fail(const disk *d, const io_req *r, k3_error *err);
int sum_fail(const shard *s, uint64_t offset, uint64_t n, k3_error *err);

/* Start the readers, or change how they read: is_uring, with a ring instead of a pool; is_direct, past
 * the page cache; `depth` reads at a time. No request may be queued.
 * Errors  K3_EIO: no ring is to be had here; K3_ENOMEM: no thread */
int disk_mode(disk *d, bool is_uring, bool is_direct, int depth, k3_error *err);
void disk_threads_stop(disk *d);

#endif
