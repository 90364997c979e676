/* k3_disk.h - reads of weights, served while layers compute. Internal to the engine.
 *
 * One queue with three urgencies, served by a pool of threads in pread or by one thread that keeps
 * an io_uring full: the same requests, the same checks.
 *
 *   - whoever wants bytes submits a request and waits for it; the request is the disk's from
 *     submission until it is done or failed;
 *   - demand overtakes trunk rows, trunk rows overtake guesses; what is not begun can be taken
 *     back;
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
    uint8_t tried;      /* copies that failed it, by bit             */
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
    double ns_per_byte; /* running estimate */
} io_copy;

/* How bytes are read; tests put a faulty disk here. */
typedef ssize_t (*pread_fn)(void *user, int fd, void *to, size_t n, off_t offset);
ssize_t plain_pread(void *user, int fd, void *to, size_t n, off_t offset); /* pread itself */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t done;
    sem_t tickets; /* the pool: one for each request that was queued, taken back or not */
    io_req *first[N_URGENCIES], *last[N_URGENCIES];
    pthread_t threads[IO_MAX_DEPTH];
    int n_threads, depth, n_busy;
    bool is_stopping, is_direct, is_uring;
    pread_fn read;
    void *read_user;
    const shard *shards;
    io_copy copies[K3_MAX_COPIES];
    int n_copies;
    uint64_t read_bytes, stall_ns, n_changes; /* n_changes: requests that are over */
    struct io_uring ring;
    int wake_fd;
    int ring_why; /* errno by which the ring became useless; 0: it serves */
} disk;

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static inline uint64_t io_room(uint64_t n) { return round_up(n, IO_ALIGN) + IO_ALIGN; }
static inline uint64_t io_base(const io_req *r) { return r->offset / IO_ALIGN * IO_ALIGN; }

/* Bytes still to be read, in whole blocks. */
static inline uint64_t io_left(const io_req *r) {
    return round_up(r->offset + r->n - io_base(r), IO_ALIGN) - r->got;
}

/* Ask for a read: r->to, offset, n, i_shard, and sum with has_sum, are filled in. The request and r->to are the
 * disk's until disk_state() says IO_DONE or IO_FAILED. */
void disk_submit(disk *d, io_req *r, enum io_urgency u);
enum io_state disk_state(disk *d, const io_req *r);

/* Sleep until a request is over. The time is what the disk cost this step (stall_ns). */
void disk_wait(disk *d, const io_req *r);

/* How many requests are over so far, to be read before looking at their states; sleep until more than
 * `seen` are. */
uint64_t disk_changes(disk *d);
void disk_wait_change(disk *d, uint64_t seen);

/* A read ahead became a need; with is_first, one that all else waits for. */
void disk_raise(disk *d, io_req *r, bool is_first);

/* Take back what is not begun. Returns whether the request is the caller's again. */
bool disk_cancel(disk *d, io_req *r);

/* The line for a failed request; K3_EIO, or K3_ECHECK where its sum does not match. */
int disk_fail(const disk *d, const io_req *r, k3_error *err);
int sum_fail(const shard *s, uint64_t offset, uint64_t n, k3_error *err);

/* Begin to serve, or change how: a ring or a pool, past the page cache or not, `depth` reads at a time.
 * Nothing may be queued.
 * Errors  K3_EIO: no ring is to be had here; K3_ENOMEM: no thread */
int disk_mode(disk *d, bool is_uring, bool is_direct, int depth, k3_error *err);
void disk_threads_stop(disk *d);

#endif
