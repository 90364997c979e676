/* test_stream.c - one hash from any disk: slow, short, failing, damaged, vanishing.
 *
 * The engine is included, so that a fake disk can stand behind its reads, its slots and its ring can
 * be inspected after every layer, and memory can run out at any allocation. The demo model's
 * published hash must come out of everything that a disk may survive; what it may not survive must
 * end in an error that names the place, never in a hang or in zeros.
 *
 *     test_stream DEMO_DIR [--quick]
 *
 * --quick is for sanitizers: fewer combinations. A test that hangs is ended after a minute.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static int mmaps_left = -1; /* mmaps of the engine that still succeed; -1: all do */
static void *scarce_mmap(void *at, size_t n, int prot, int flags, int fd, long offset) {
    if (mmaps_left == 0) return MAP_FAILED;
    if (mmaps_left > 0) mmaps_left--;
    return mmap(at, n, prot, flags, fd, offset);
}
/* The test's own source of random numbers: the bytes of `given`, or none. */
static const void *given;
static int n_given;
static ssize_t given_random(void *to, size_t n, unsigned flags) {
    (void)flags;
    if (!given) return -1;
    memcpy(to, given, n);
    n_given++;
    return (ssize_t)n;
}
#define mmap scarce_mmap
#define getrandom given_random
#include "../k3.c"

#include "../k3_ledger.c"
#undef getrandom
#undef mmap
#include "greedy.h"
#include "test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define IS_SANITIZED 1
#endif
#endif
#ifndef IS_SANITIZED
#define IS_SANITIZED 0
#endif

#define MIB (1u << 20)

static const char *demo_dir;
static bool is_quick, has_uring;
static char work_dir[] = "/tmp/k3-stream-XXXXXX";
static char sums_file[64]; /* of the demo model */
static char mirror_all[64], mirror_some[64], mirror_bad[64], mirror_none[64], mirror_old[64];
static uint64_t least; /* the demo's floor with a chunk of 1 */

/* ---- Watchdog ---- */

static const char *volatile at_work = "start";

static void on_alarm(int sig) {
    static const char text[] = ": a hang, ended by the watchdog\n";
    (void)sig;
    if (write(1, at_work, strlen(at_work)) < 0 || write(1, text, sizeof text - 1) < 0) _exit(2);
    _exit(1);
}

/* Name what follows, and give it a minute. */
static void begin(const char *name) {
    at_work = name;
    alarm(IS_SANITIZED ? 400 : 200);
}

/* ---- The fake disk ---- */

enum fault { NO_FAULT, FAIL_EIO, FAIL_ZERO, FAIL_EINTR, FAIL_EAGAIN };

#define MAX_FAKE_LAYERS  16
#define MAX_FAKE_EXPERTS 64
#define MAX_LOG          65536

typedef struct {
    void *to;
    uint64_t offset, n;
    int i_shard, i_copy;
} logged;

typedef struct {
    pthread_mutex_t lock;
    k3_engine *e;
    uint64_t seed;
    int slow_every, delay_us, short_max, retry_every; /* 0: off */
    enum fault once;                    /* what each request meets first           */
    void *met[4096];                    /* buffers of requests that have met it    */
    int n_met;
    enum fault always;                  /* on reads that touch byte bad_at of shard i_bad */
    int i_bad, bad_copy;                /* bad_copy -1: on every copy               */
    uint64_t bad_at;
    int i_shrunk;                       /* -1: none */
    uint64_t shrunk_size;
    int flips_left;                     /* of byte bad_at, xor flip; -1: for ever  */
    uint8_t flip;
    int64_t copy_left[K3_MAX_COPIES];   /* reads until the copy fails; -1: never   */
    bool is_gated;                      /* reads wait until the gate opens         */
    uint64_t n_reads, n_faults, copy_reads[K3_MAX_COPIES], copy_faults[K3_MAX_COPIES];
    uint32_t uses[MAX_FAKE_LAYERS][MAX_FAKE_EXPERTS]; /* reads of each expert */
    logged *log;                        /* [MAX_LOG] or NULL */
    int n_log;
} fake;

static void fake_init(fake *f) {
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    f->seed = 7;
    f->i_bad = f->bad_copy = f->i_shrunk = -1;
    for (int c = 0; c < K3_MAX_COPIES; c++) f->copy_left[c] = -1;
}

/* All faults off; counts stay. */
static void fake_heal(fake *f) {
    pthread_mutex_lock(&f->lock);
    f->slow_every = f->delay_us = f->short_max = f->retry_every = 0;
    f->once = f->always = NO_FAULT;
    f->i_bad = f->i_shrunk = -1;
    f->flips_left = 0;
    for (int c = 0; c < K3_MAX_COPIES; c++) f->copy_left[c] = -1;
    pthread_mutex_unlock(&f->lock);
}

/* Aim the fault at one byte of a shard. Reads may be running, so settings change under the lock. */
static void fake_aim(fake *f, int i_shard, uint64_t at, enum fault always, uint8_t flip, int flips) {
    pthread_mutex_lock(&f->lock);
    f->i_bad = i_shard;
    f->bad_at = at;
    f->always = always;
    f->flip = flip;
    f->flips_left = flips;
    pthread_mutex_unlock(&f->lock);
}

static void fake_delay(fake *f, int us) {
    pthread_mutex_lock(&f->lock);
    f->delay_us = us;
    pthread_mutex_unlock(&f->lock);
}

/* While the fake disk is shut no read ends. */
static void fake_shut(fake *f, bool is_shut) {
    pthread_mutex_lock(&f->lock);
    f->is_gated = is_shut;
    pthread_mutex_unlock(&f->lock);
}

static void fake_place(const fake *f, int fd, int *i_shard, int *i_copy) {
    *i_shard = *i_copy = 0;
    for (uint32_t i = 0; i < f->e->files.n_shards; i++)
        for (int c = 0; c < f->e->io.n_copies; c++)
            if (f->e->files.shards[i].fd[c] == fd || f->e->files.shards[i].fd_direct[c] == fd) {
                *i_shard = (int)i;
                *i_copy = c;
            }
}

static void fake_note(fake *f, void *to, uint64_t offset, size_t n, int i_shard, int i_copy) {
    const store *st = &f->e->store;
    uint8_t *at = to;
    f->n_reads++;
    f->copy_reads[i_copy]++;
    if (st->bytes && at >= st->bytes && at < st->bytes + st->n_slots * st->slot_bytes) {
        const slot *s = &st->slots[(uint64_t)(at - st->bytes) / st->slot_bytes];
        if (s->il < MAX_FAKE_LAYERS && s->ie < MAX_FAKE_EXPERTS) f->uses[s->il][s->ie]++;
    }
    if (f->log && f->n_log < MAX_LOG) f->log[f->n_log++] = (logged){to, offset, n, i_shard, i_copy};
}

/* The first read into a buffer meets the fault, the next one does not. */
static bool fake_is_first(fake *f, void *to) {
    for (int i = 0; i < f->n_met; i++)
        if (f->met[i] == to) {
            f->met[i] = f->met[--f->n_met];
            return false;
        }
    if (f->n_met < 4096) f->met[f->n_met++] = to;
    return true;
}

/* Decide what this read meets; `n` becomes how many bytes it delivers. The caller holds the lock. */
static enum fault fake_decide(fake *f, void *to, uint64_t offset, size_t *n, int i_shard, int i_copy, int *us) {
    bool is_bad = f->i_bad == i_shard && (f->bad_copy < 0 || f->bad_copy == i_copy) && offset <= f->bad_at &&
                  f->bad_at < offset + *n;
    if (f->copy_left[i_copy] == 0) {
        f->copy_faults[i_copy]++;
        return FAIL_EIO;
    }
    if (f->copy_left[i_copy] > 0) f->copy_left[i_copy]--;
    if (is_bad && f->always) return f->always;
    if (f->once && fake_is_first(f, to)) return f->once;
    if (f->retry_every && test_random(&f->seed) % (uint64_t)f->retry_every == 0)
        return test_random(&f->seed) % 2 ? FAIL_EINTR : FAIL_EAGAIN;
    if (f->i_shrunk == i_shard && offset + *n > f->shrunk_size) {
        f->n_faults++;
        *n = offset < f->shrunk_size ? (size_t)(f->shrunk_size - offset) : 0;
        if (*n == 0) return FAIL_ZERO;
    }
    if (f->short_max) {
        static const size_t few[] = {1, 7, 511, 4095, 4096, 4097};
        uint64_t x = test_random(&f->seed);
        size_t k = x % 4 == 0 ? few[x / 4 % 6] : 1 + (size_t)(x / 4 % (uint64_t)f->short_max);
        if (k < *n) {
            *n = k;
            f->n_faults++;
        }
    }
    if (f->delay_us) *us = (int)(test_random(&f->seed) % (uint64_t)f->delay_us);
    if (f->slow_every && test_random(&f->seed) % (uint64_t)f->slow_every == 0) {
        *us = 20000;
        f->n_faults++;
    }
    return NO_FAULT;
}

static void fake_gate(fake *f) {
    for (bool is_shut = true; is_shut;) {
        pthread_mutex_lock(&f->lock);
        is_shut = f->is_gated;
        pthread_mutex_unlock(&f->lock);
        if (is_shut) usleep(200);
    }
}

/* Deliver `n` bytes, in whole blocks from a direct descriptor; the rest of the buffer is spoilt. */
static ssize_t fake_deliver(int fd, uint8_t *to, size_t n, size_t asked, off_t offset) {
    size_t want = (size_t)round_up(n, IO_ALIGN) < asked ? (size_t)round_up(n, IO_ALIGN) : asked;
    ssize_t got = pread(fd, to, want, offset);
    if (got <= (ssize_t)n) return got;
    memset(to + n, 0xaa, (size_t)got - n);
    return (ssize_t)n;
}

static ssize_t fake_read(void *user, int fd, void *to, size_t asked, off_t offset) {
    fake *f = user;
    int i_shard, i_copy, us = 0;
    size_t n = asked;
    fake_place(f, fd, &i_shard, &i_copy);
    pthread_mutex_lock(&f->lock);
    fake_note(f, to, (uint64_t)offset, n, i_shard, i_copy);
    enum fault what = fake_decide(f, to, (uint64_t)offset, &n, i_shard, i_copy, &us);
    f->n_faults += what != NO_FAULT;
    pthread_mutex_unlock(&f->lock);
    fake_gate(f);
    if (us) usleep((useconds_t)us);
    if (what == FAIL_ZERO) return 0;
    if (what != NO_FAULT) {
        memset(to, 0xaa, asked < 64 ? asked : 64);
        errno = what == FAIL_EIO ? EIO : what == FAIL_EINTR ? EINTR : EAGAIN;
        return -1;
    }
    ssize_t got = fake_deliver(fd, to, n, asked, offset);
    pthread_mutex_lock(&f->lock);
    uint64_t at = f->bad_at - (uint64_t)offset;
    if (f->flips_left && f->i_bad == i_shard && (f->bad_copy < 0 || f->bad_copy == i_copy) &&
        f->bad_at >= (uint64_t)offset && (ssize_t)at < got) {
        ((uint8_t *)to)[at] ^= f->flip;
        f->flips_left -= f->flips_left > 0;
        f->n_faults++;
    }
    pthread_mutex_unlock(&f->lock);
    return got;
}

/* ---- Running ---- */

static const uint32_t PROMPT[] = {343, 336, 327, 444, 1489, 311};
#define N_GEN 32
static hashes expected[N_GEN + 1]; /* [n]: after n ids; the last are the published ones */

static k3_options options(uint64_t ram, int chunk) {
    k3_options o;
    k3_options_default(&o);
    o.model_dir = demo_dir;
    o.n_threads = 1;
    o.ram_bytes = ram;
    o.chunk = chunk;
    o.io = K3_IO_POOL;
    o.direct = K3_OFF;
    o.io_depth = 8;
    return o;
}

/* An engine and a session; with `f`, the fake disk is behind it. */
static k3_engine *open_both(const k3_options *o, fake *f, k3_session **s) {
    k3_error err = {""};
    k3_engine *e;
    *s = NULL;
    if (k3_engine_open(&e, o, &err) < 0 || k3_session_new(s, e, 0, &err) < 0) {
        printf("open: %s\n", err.text);
        k3_engine_close(e);
        CHECK(!"the engine opens");
        return NULL;
    }
    if (!f) return e;
    f->e = e;
    pthread_mutex_lock(&e->io.lock);
    e->io.read = fake_read;
    e->io.read_user = f;
    pthread_mutex_unlock(&e->io.lock);
    return e;
}

static void close_both(k3_engine *e, k3_session *s) {
    k3_session_free(s);
    k3_engine_close(e);
}

/* Prompt 0 and n_gen greedy ids on a fresh timeline. */
static int generate(k3_session *s, size_t n_gen, hashes *h, k3_error *err) {
    return greedy_run(s, k3_engine_shape(s->e)->vocab_size, PROMPT, 6, n_gen, NULL, h, err);
}

/* Do the first n ids have the right hashes? */
static bool is_right(k3_session *s, size_t n) {
    hashes h;
    k3_error err = {""};
    if (generate(s, n, &h, &err) == 0) return hashes_are_equal(&h, &expected[n]);
    printf("    %s\n", err.text);
    return false;
}

/* Find the expected hashes: the published ones, and those of fewer ids from the run that gives the
 * published ones. */
static bool find_expected(void) {
    char path[4096], line[256];
    hashes want;
    bool is_found = false;
    k3_session *s;
    k3_error err = {""};
    snprintf(path, sizeof path, "%s/bits.tsv", demo_dir);
    FILE *f = fopen(path, "r");
    while (f && !is_found && fgets(line, sizeof line, f))
        is_found = sscanf(line, "0 %llx %llx %llx", (unsigned long long *)&want.ids,
                          (unsigned long long *)&want.logits, (unsigned long long *)&want.trace) == 3;
    if (f) fclose(f);
    k3_options o = options(0, 0);
    k3_engine *e = is_found ? open_both(&o, NULL, &s) : NULL;
    for (size_t n = 1; e && n <= N_GEN; n++)
        if (generate(s, n, &expected[n], &err) < 0) return false;
    if (e) close_both(e, s);
    return e && hashes_are_equal(&want, &expected[N_GEN]);
}

static uint64_t find_floor(int chunk, int n_threads) {
    k3_options o = options((uint64_t)1 << 40, chunk);
    o.n_threads = n_threads;
    k3_engine *e;
    k3_error err;
    o.headers_only = true;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) return 0;
    uint64_t n = k3_engine_plan(e)->floor_bytes;
    k3_engine_close(e);
    return n;
}

/* Wait until every read ahead has ended. */
static void quiesce(k3_engine *e) {
    for (uint32_t i = 0; i < e->stream.n_live; i++)
        disk_wait(&e->io, &e->stream.live[(e->stream.first + i) % STREAM_LIVE].req);
}

/* ---- What must hold of the slots ---- */

/* The rules of the store: every slot is in one place, counts are right, nothing is pinned, no layer
 * keeps more than its quota; experts on their way were guessed for the layer after `il`. Returns
 * the rule that is broken, or NULL. */
static const char *store_fault(const k3_engine *e, int il) {
    const store *st = &e->store;
    const k3_shape *sh = &e->sh;
    static uint8_t seen[4096];
    uint32_t n_doomed = 0, n_mapped = 0;
    memset(seen, 0, sizeof seen);
    if (st->n_slots > sizeof seen) return "too many slots for this test";
    for (uint32_t i = 0; i < st->n_free; i++) {
        if (st->free[i] >= st->n_slots || st->slots[st->free[i]].state != SLOT_FREE) return "a free slot is not free";
        seen[st->free[i]]++;
    }
    for (uint32_t l = sh->n_dense; l < sh->n_layers; l++) {
        uint32_t n_full = 0;
        for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
            int32_t i = *store_at(e, l, ie);
            if (i < 0) continue;
            const slot *s = &st->slots[i];
            if ((uint32_t)i >= st->n_slots || s->il != l || s->ie != ie) return "the map and the slot disagree";
            if (s->state == SLOT_FREE || s->is_doomed) return "the map leads to a dropped slot";
            if (s->state == SLOT_READING && !(s->is_guess && il >= 0 && s->il == (uint32_t)il + 1))
                return "a read is on its way that nobody waits for";
            seen[i]++;
            n_mapped++;
            n_full += s->state == SLOT_FULL;
        }
        if (n_full != st->n_held[l - sh->n_dense]) return "n_held is not the number held";
        if (n_full > st->quota) return "a layer keeps more than its quota";
    }
    for (uint32_t i = 0; i < st->n_slots; i++) {
        seen[i] += st->slots[i].is_doomed;
        n_doomed += st->slots[i].is_doomed;
        if (st->slots[i].is_pinned) return "a slot is pinned";
        if (seen[i] != 1) return "a slot is in no place or in two";
    }
    if (n_doomed != st->n_doomed) return "n_doomed is not the number doomed";
    return n_mapped + st->n_free + n_doomed == st->n_slots ? NULL : "slots are lost";
}

static bool store_holds(const k3_engine *e, int il) {
    const char *fault = store_fault(e, il);
    if (fault) printf("    slots, layer %d: %s\n", il, fault);
    return !fault;
}

/* ---- Faults that a run survives ---- */

typedef struct {
    const char *name;
    int slow_every, delay_us, short_max, retry_every;
    enum fault once;
} survivable;

static void test_survivable(void) {
    static const survivable cases[] = {
        {"slow reads", 300, 0, 0, 0, NO_FAULT},         {"reordering", 0, 400, 0, 0, NO_FAULT},
        {"short reads", 0, 0, 30000, 0, NO_FAULT},      {"EINTR and EAGAIN", 0, 0, 0, 3, NO_FAULT},
        {"EIO once", 0, 0, 0, 0, FAIL_EIO},             {"nothing once", 0, 0, 0, 0, FAIL_ZERO},
        {"everything", 400, 300, 20000, 4, NO_FAULT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int mode = 0; mode < (is_quick ? 1 : 3); mode++) {
            const survivable *c = &cases[i];
            fake f;
            k3_session *s;
            begin(c->name);
            fake_init(&f);
            k3_options o = options(least + (mode == 1 ? 6 : mode) * MIB, mode ? 4 : 1);
            o.direct = (i / 2 + (size_t)mode) % 2 ? K3_ON : K3_OFF;
            o.n_threads = 1 + mode % 2;
            o.policy = mode == 2 ? K3_POLICY_LRU : K3_POLICY_RANK;
            k3_engine *e = open_both(&o, &f, &s);
            if (!e) continue;
            f.slow_every = c->slow_every;
            f.delay_us = c->delay_us;
            f.short_max = c->short_max;
            f.retry_every = c->retry_every;
            f.once = c->once;
            if (!CHECK(is_right(s, mode ? 6 : c->short_max ? N_GEN : 12))) printf("    %s, mode %d\n", c->name, mode);
            CHECK(store_holds(e, -1));
            quiesce(e);
            CHECK(f.n_reads > 100 && (c->delay_us || c->slow_every || f.n_faults > 10));
            close_both(e, s);
        }
}

/* ---- Faults that end a step ---- */

#define N_SHORT 4 /* ids of a short run */

/* The expert of layer il that prompt 0 reads and no other expert evicts, or -1. */
static int used_expert(const fake *f, uint32_t il) {
    for (int ie = 0; ie < MAX_FAKE_EXPERTS; ie++)
        if (f->uses[il][ie] > 0) return ie;
    return -1;
}

/* Aim at a byte of an expert that lies in no other expert's blocks. */
static void aim_expert(fake *f, uint32_t il, uint32_t ie, enum fault always) {
    const expert_place *at = model_expert(&f->e->files, &f->e->sh, il, ie);
    uint64_t lo;
    if (CHECK(expert_is_whole(&f->e->sh, at, &lo)))
        fake_aim(f, at->shard[0], lo + f->e->sh.expert_bytes / 2, always, 0, 0);
}

/* Make a scale code read as `code`, however often it is read. */
static void aim_scale(fake *f, uint32_t il, uint32_t ie, int k, uint64_t index, uint8_t code) {
    const expert_place *at = model_expert(&f->e->files, &f->e->sh, il, ie);
    uint8_t was;
    CHECK(pread(f->e->files.shards[at->shard[k]].fd[0], &was, 1, (off_t)(at->offset[k] + index)) == 1);
    fake_aim(f, at->shard[k], at->offset[k] + index, NO_FAULT, was ^ code, -1);
}

/* A step must fail with this status and these words, and the session stays ended until it is reset.
 * Once the disk is healed the same engine gives the hash again. */
static void expect_failure(k3_engine *e, k3_session *s, fake *f, int status, const char *const *words) {
    hashes h;
    k3_error err = {""};
    float row[4096];
    CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), status);
    for (; *words; words++)
        if (!CHECK(strstr(err.text, *words) != NULL)) printf("    no \"%s\" in: %s\n", *words, err.text);
    CHECK_EQ_INT(k3_session_feed(s, PROMPT, 1, K3_ROWS_LAST, row, &err), K3_EUSAGE);
    CHECK(store_holds(e, -1));
    CHECK_EQ_INT(e->stream.n_live, 0);
    fake_heal(f);
    CHECK(is_right(s, N_SHORT));
}

/* The words that name an expert and its place. */
static const char *const *expert_words(const k3_engine *e, uint32_t il, uint32_t ie, const char *cause) {
    static char who[64], where[64];
    static const char *words[5];
    const expert_place *at = model_expert(&e->files, &e->sh, il, ie);
    uint64_t lo = 0;
    expert_is_whole(&e->sh, at, &lo);
    snprintf(who, sizeof who, "expert %u of layer %u", ie, il);
    snprintf(where, sizeof where, "offset 0x%llx", (unsigned long long)lo);
    words[0] = who;
    words[1] = where;
    words[2] = e->files.shards[at->shard[0]].name;
    words[3] = cause;
    return words;
}

/* One expert of each layer cannot be read, again and again on one engine: slots are not lost. */
static void test_dead_expert(void) {
    for (int mode = 0; mode < 3; mode++) {
        fake f;
        k3_session *s;
        begin("an expert that cannot be read");
        fake_init(&f);
        k3_options o = options(least + (mode == 1 ? 5 : mode) * MIB, mode ? 3 : 1);
        k3_engine *e = open_both(&o, &f, &s);
        if (!e || !CHECK(is_right(s, N_SHORT))) return;
        for (uint32_t il = e->sh.n_dense; il < e->sh.n_layers; il += is_quick ? 3 : 1) {
            int ie = used_expert(&f, il);
            if (!CHECK(ie >= 0)) continue;
            k3_session_reset(s);
            close_both(e, s);
            if (!(e = open_both(&o, &f, &s))) return; /* nothing is resident, so the expert must be read */
            for (int again = 0; again < 2; again++) {
                aim_expert(&f, il, (uint32_t)ie, again ? FAIL_ZERO : FAIL_EIO);
                if (again && e->store.quota > 0) break; /* it is in memory now */
                expect_failure(e, s, &f, K3_EIO, expert_words(e, il, (uint32_t)ie, again ? "short" : strerror(EIO)));
            }
        }
        close_both(e, s);
    }
}

/* Steps fail in turn in every layer, while other experts are on their way or pinned. Every slot
 * must come back, or a later step would wait for one for ever. */
static void test_failed_steps(void) {
    for (int mode = 0; mode < 4; mode++) {
        fake f, log;
        k3_session *s;
        k3_error err;
        hashes h;
        begin("many failed steps in turn");
        fake_init(&f);
        fake_init(&log);
        k3_options o = options(least + (uint64_t)(mode / 2) * MIB, mode / 2 ? 3 : 1);
        k3_engine *e = open_both(&o, &log, &s);
        if (!e || !CHECK(is_right(s, N_SHORT))) return;
        close_both(e, s);
        if (!(e = open_both(&o, &f, &s))) return;
        for (uint32_t il = e->sh.n_dense; il < e->sh.n_layers; il++)
            for (uint32_t ie = 0, n = 0; ie < e->sh.n_experts && n < (is_quick ? 1 : 4); ie++) {
                if (log.uses[il][ie] == 0) continue;
                n++;
                fake_delay(&f, 20);
                if (mode & 1)
                    aim_scale(&f, il, ie, W2_SCALE, 5, 250); /* a term out of the range of exact sums */
                else
                    aim_expert(&f, il, ie, FAIL_EIO);
                CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), mode & 1 ? K3_ENUMERIC : K3_EIO);
                CHECK(store_holds(e, -1));
                fake_heal(&f);
            }
        CHECK(is_right(s, N_SHORT));
        close_both(e, s);
    }
}

/* A slot is being filled with an expert that a box serves, and the read fails: after the step has
 * failed, or while the layer has come round again and waits for that expert. No slot is freed
 * twice, and no unreadable expert counts as readable. */
static void test_failed_fill(void) {
    for (int is_pinned = 0; is_pinned < 2; is_pinned++) {
        fake f;
        k3_session *s;
        k3_error err = {""};
        expert_view view;
        begin("a slot that does not fill");
        fake_init(&f);
        k3_options o = options(least + 5 * MIB, 1);
        k3_engine *e = open_both(&o, &f, &s);
        if (!e || !CHECK(e->store.quota > 0 && e->store.quota < e->sh.n_experts)) return;
        uint32_t il = e->sh.n_dense, ie = 3;
        step st = {.e = e, .b = e->scratch, .k = e->kern, .err = &err};
        aim_expert(&f, il, ie, FAIL_EIO);
        fake_shut(&f, true);
        CHECK(store_fetch(e, il, ie, IO_GUESS)); /* as k3.c does for e->far_fill */
        slot *x = e->far_fill = store_find(e, il, ie);
        x->is_guess = false;
        x->is_fill = true;
        e->store.n_held[0]++;
        while (disk_state(&e->io, &x->req[0]) != IO_BUSY) usleep(100);
        x->is_pinned = is_pinned;
        if (!is_pinned) store_recover(e);
        fake_shut(&f, false);
        while (slot_is_busy(e, x)) usleep(100);
        far_fill(&st, il);
        if (is_pinned) {
            CHECK_EQ_INT(store_arrived(e, x, &view, &err), K3_EIO);
            store_recover(e);
        }
        CHECK(store_holds(e, -1));
        fake_heal(&f);
        CHECK(is_right(s, N_SHORT));
        CHECK(store_holds(e, -1));
        close_both(e, s);
    }
}

/* A streamed matrix that cannot be read; a shard that shrinks, at the end of a block and inside of
 * one. */
static void test_dead_piece(void) {
    for (int mode = 0; mode < (is_quick ? 4 : 8); mode++) {
        fake f;
        k3_session *s;
        char where[64];
        begin("a matrix that cannot be read");
        fake_init(&f);
        k3_options o = options(least, 1);
        o.direct = mode & 1 ? K3_ON : K3_OFF;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        const piece *p = &e->stream.pieces[(mode / 2 * 37 + 20) % e->stream.n_pieces];
        snprintf(where, sizeof where, "layer %u", p->il);
        if (mode & 2) {
            f.i_shrunk = p->i_shard;
            f.shrunk_size = p->offset + p->n / 2;
            if (mode & 4) f.shrunk_size = round_up(f.shrunk_size, IO_ALIGN);
            const char *words[] = {e->files.shards[p->i_shard].name, "short", "shrink", NULL};
            expect_failure(e, s, &f, K3_EIO, words);
        } else {
            fake_aim(&f, p->i_shard, p->offset + p->n / 2, mode & 4 ? FAIL_ZERO : FAIL_EIO, 0, 0);
            const char *words[] = {e->files.shards[p->i_shard].name, where, TENSOR[p->t].name, NULL};
            expect_failure(e, s, &f, K3_EIO, words);
        }
        close_both(e, s);
    }
}

/* ---- Damage ---- */

/* A scale code above 252 is refused when the expert is read. */
static void test_bad_scale(void) {
    fake f;
    k3_session *s;
    begin("a damaged scale");
    fake_init(&f);
    k3_options o = options(least, 1);
    k3_engine *e = open_both(&o, &f, &s);
    if (!e || !CHECK(is_right(s, N_SHORT))) return;
    for (int k = W1_SCALE; k < N_EXPERT_TENSORS; k += 2) {
        char where[64];
        uint32_t il = e->sh.n_dense + (uint32_t)k;
        int ie = used_expert(&f, il);
        if (!CHECK(ie >= 0)) continue;
        aim_scale(&f, il, (uint32_t)ie, k, 17, 255);
        snprintf(where, sizeof where, "offset 0x%llx", (unsigned long long)f.bad_at);
        const char *const *who = expert_words(e, il, (uint32_t)ie, "scale code 255 at index 17");
        const char *words[] = {who[0], where, who[2], who[3], EXPERT_TENSOR[k], NULL};
        expect_failure(e, s, &f, K3_EMODEL, words);
    }
    close_both(e, s);
}

/* A flipped bit: without sums another hash; with sums the bytes are read again, then refused or
 * taken from another copy. */
static void test_flips(void) {
    for (int mode = 0; mode < (is_quick ? 2 : 4); mode++) {
        fake f;
        k3_session *s;
        k3_error err;
        hashes h;
        char where[64];
        begin("flipped bits");
        fake_init(&f);
        k3_options o = options(least + (mode & 1) * MIB, 4);
        o.direct = mode & 2 ? K3_ON : K3_OFF;
        if (!(mode & 1)) o.chunk = 1;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        const piece *p = &e->stream.pieces[e->stream.n_body / 2 + (uint32_t)mode];
        snprintf(where, sizeof where, "offset 0x%llx", (unsigned long long)p->offset);
        uint64_t at = p->offset + p->n / 2 + 1; /* the upper byte of an element: sign and exponent */
        int p_shard = p->i_shard, p_tensor = p->t;
        fake_aim(&f, p->i_shard, at, NO_FAULT, 0x10, -1);
        int rc = generate(s, N_SHORT, &h, &err); /* without sums the bytes are believed */
        CHECK(rc == K3_ENUMERIC || (rc == 0 && h.logits != expected[N_SHORT].logits));
        close_both(e, s);
        fake_init(&f);
        o.sums = sums_file;
        o.ram_bytes += 96 << 10; /* for the table of sums; no more experts become resident */
        e = open_both(&o, &f, &s);
        if (!e) return;
        fake_aim(&f, p_shard, at, NO_FAULT, 0x10, 1);
        CHECK(is_right(s, N_SHORT)); /* right when read again */
        CHECK_EQ_INT(f.n_faults, 1);
        fake_aim(&f, p_shard, at, NO_FAULT, 0x10, -1);
        const char *words[] = {e->files.shards[p_shard].name, "sum", where, TENSOR[p_tensor].name, NULL};
        expect_failure(e, s, &f, K3_ECHECK, words);
        close_both(e, s);
    }
}

/* Open the demo headers_only. */
static k3_engine *open_headers(const char *dir, const char *file, const char *const *mirrors) {
    k3_error err = {""};
    k3_engine *e;
    k3_options o = options(0, 0);
    o.model_dir = dir;
    o.sums = file;
    o.mirrors = mirrors;
    o.headers_only = true;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) printf("    %s\n", err.text);
    return e;
}

/* The file is what its description says, and its sums are those of the bytes. */
static void test_sums_file(void) {
    k3_error err = {""};
    uint64_t size = 0, n;
    char part[96];
    begin("sums");
    k3_options o = options(0, 0);
    o.sums = sums_file;
    o.headers_only = o.no_check = true; /* the file is not there yet */
    k3_engine *e;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) return;
    if (!CHECK_EQ_INT(k3_engine_write_sums(e, false, &err), 256)) printf("    %s\n", err.text);
    snprintf(part, sizeof part, "%s.part", sums_file);
    CHECK(access(part, F_OK) != 0);
    int fd = file_open(sums_file, &size, &err);
    uint64_t *v = malloc(size + 1), vocab = e->sh.vocab_size;
    if (!CHECK(fd >= 0 && v && read(fd, v, size) == (ssize_t)size)) return;
    n = v[2];
    CHECK(memcmp(v, "K3SUMS2\n", 8) == 0 && size == 8 * (n + 4));
    for (uint32_t i = 0; i < 256; i += 37) { /* experts are the last of all */
        uint32_t il = e->sh.n_dense + i / e->sh.n_experts, ie = i % e->sh.n_experts;
        const expert_place *at = model_expert(&e->files, &e->sh, il, ie);
        uint64_t lo = 0;
        uint8_t bytes[1 << 16];
        CHECK(expert_is_whole(&e->sh, at, &lo) && e->sh.expert_bytes <= sizeof bytes);
        CHECK(pread(e->files.shards[at->shard[0]].fd[0], bytes, e->sh.expert_bytes, (off_t)lo) > 0);
        CHECK(v[3 + n - 512 + 2 * i] == XXH3_64bits(bytes, e->sh.expert_bytes));
        uint64_t six[N_EXPERT_TENSORS]; /* and of the contents, in slot order */
        for (int k = 0; k < N_EXPERT_TENSORS; k++)
            six[k] = XXH3_64bits(bytes + (at->offset[k] - lo), expert_tensor_bytes(&e->sh, k));
        CHECK(v[4 + n - 512 + 2 * i] == XXH3_64bits(six, sizeof six));
    }
    for (uint64_t id = 0; id < vocab; id += 97) { /* before them, the rows of the embedding */
        uint8_t row[8192];
        const place *at = &e->files.at_model[T_EMBED];
        uint64_t row_bytes = e->sh.hidden * 2;
        CHECK(pread(e->files.shards[at->shard].fd[0], row, row_bytes, (off_t)(at->offset + id * row_bytes)) > 0);
        CHECK(v[3 + n - 512 - vocab + id] == XXH3_64bits(row, row_bytes));
    }
    k3_engine_close(e);
    close(fd);
    free(v);
}

/* A flipped bit in any kind of stretch is found; --no-check computes with it. */
static void test_sums_find(void) {
    for (int mode = 0; mode < 3; mode++) {
        static const char *const kind[] = {"embedding of id 343", "expert ", "lm_head.weight: "};
        fake f;
        k3_session *s;
        hashes h;
        k3_error err = {""};
        begin("flipped bits and sums");
        fake_init(&f);
        k3_options o = options(least + MIB, 4);
        o.sums = sums_file;
        o.no_look_ahead = true;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        CHECK(e->plan.has_sums);
        const place *head = &e->files.at_model[T_LM_HEAD], *embed = &e->files.at_model[T_EMBED];
        uint64_t at = mode == 0 ? embed->offset + PROMPT[0] * e->sh.hidden * 2 + 5 : head->offset + 77777;
        int i_shard = mode == 0 ? embed->shard : head->shard;
        if (mode == 1) {
            CHECK(is_right(s, N_SHORT));
            const expert_place *x =
                model_expert(&e->files, &e->sh, e->sh.n_dense, (uint32_t)used_expert(&f, e->sh.n_dense));
            at = x->offset[W1_PACKED] + 100;
            i_shard = x->shard[W1_PACKED];
        }
        const char *words[] = {kind[mode], "do not match their sum", e->files.shards[i_shard].name, NULL};
        fake_aim(&f, i_shard, at, NO_FAULT, 0x01, 1);
        CHECK(is_right(s, N_SHORT));
        CHECK_EQ_INT(f.n_faults, 1);
        fake_aim(&f, i_shard, at, NO_FAULT, 0x01, -1);
        expect_failure(e, s, &f, K3_ECHECK, words);
        close_both(e, s);
        fake_init(&f);
        o.no_check = true;
        e = open_both(&o, &f, &s);
        if (!e) return;
        fake_aim(&f, i_shard, at, NO_FAULT, 0x01, -1);
        CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), 0);
        CHECK(h.logits != expected[N_SHORT].logits);
        close_both(e, s);
    }
}

/* A copy with one bit of one tensor flipped: named at open where it is loaded then, and by verify. */
static void test_sums_on_disk(void) {
    static const enum tensor which[] = {T_NORM, T_CONV_Q, T_LM_HEAD, T_EMBED, T_ROUTER};
    const char *const mirrors[] = {mirror_all, NULL};
    for (size_t i = 0; i < sizeof which / sizeof *which; i++) {
        k3_error err = {""};
        k3_engine *e;
        uint8_t byte = 0;
        char path[256];
        begin("sums of damaged files");
        e = open_headers(mirror_all, sums_file, NULL);
        if (!e) return;
        const place *at = TENSOR[which[i]].part == IN_MODEL ? &e->files.at_model[which[i]] : &e->files.at[1][which[i]];
        off_t offset = (off_t)at->offset + 34; /* low bits of a fraction, in no sample */
        snprintf(path, sizeof path, "%s/%s", mirror_all, e->files.shards[at->shard].name);
        k3_engine_close(e);
        int fd = open(path, O_RDWR);
        CHECK(fd >= 0 && pread(fd, &byte, 1, offset) == 1);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, offset) == 1);
        k3_options o = options(0, 4);
        o.model_dir = mirror_all;
        o.sums = sums_file;
        int rc = k3_engine_open(&e, &o, &err);
        if (which[i] == T_EMBED)
            CHECK_EQ_INT(rc, 0);
        else if (!CHECK(rc == K3_ECHECK && strstr(err.text, TENSOR[which[i]].name) &&
                        strstr(err.text, "sum")))
            printf("    %s\n", err.text);
        if (rc == 0) k3_engine_close(e);
        e = open_headers(mirror_all, sums_file, NULL);
        CHECK_EQ_INT(k3_engine_verify(e, &err), K3_ECHECK);
        if (!CHECK(strstr(err.text, TENSOR[which[i]].name) && strstr(err.text, "sum"))) printf("    %s\n", err.text);
        k3_engine_close(e);
        k3_options good = options(0, 0); /* the same copy as a mirror: found too, and named */
        good.sums = sums_file;
        good.mirrors = mirrors;
        good.headers_only = true;
        rc = k3_engine_open(&e, &good, &err); /* where a sample has the bit, opening fails */
        if (rc == 0) {
            CHECK_EQ_INT(k3_engine_verify(e, &err), K3_ECHECK);
            if (!CHECK(strstr(err.text, mirror_all) && strstr(err.text, "sum"))) printf("    %s\n", err.text);
            k3_engine_close(e);
        }
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, offset) == 1);
        close(fd);
    }
    k3_error err = {""};
    k3_engine *e = open_headers(demo_dir, sums_file, mirrors);
    if (!CHECK_EQ_INT(k3_engine_verify(e, &err), 256)) printf("    %s\n", err.text);
    k3_engine_close(e);
}

/* A file of sums that is damaged, cut, empty or of another model is refused; no file is no fault. */
static void test_sums_refused(void) {
    k3_error err = {""};
    k3_engine *e;
    uint64_t size = 0;
    char bad[96];
    begin("files of sums");
    snprintf(bad, sizeof bad, "%s/bad.sums", work_dir);
    int fd = file_open(sums_file, &size, &err);
    uint8_t *bytes = malloc(size + 1);
    if (!CHECK(fd >= 0 && bytes && read(fd, bytes, size) == (ssize_t)size)) return;
    close(fd);
    for (uint64_t at = 0; at < size + 6; at++) {
        if (is_quick && at % 53 != 0 && at < size) continue;
        if (at >= 40 && at < size - 8 && at % 11 != 0) continue;
        uint64_t n = at < size ? size : at == size ? 0 : at == size + 1 ? 7 : at == size + 2 ? 30 : at == size + 3 ? size - 1 : at == size + 4 ? size + 1 : size - 8;
        bytes[size] = 0;
        if (at < size) bytes[at] ^= 4;
        fd = open(bad, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        CHECK(write(fd, bytes, n) == (ssize_t)n && close(fd) == 0);
        if (at < size) bytes[at] ^= 4;
        k3_options o = options(0, 4);
        o.sums = bad;
        int rc = k3_engine_open(&e, &o, &err);
        if (!CHECK(rc == K3_EMODEL && strstr(err.text, bad) && strstr(err.text, "--write-sums")))
            printf("    byte %llu: %d %s\n", (unsigned long long)at, rc, err.text);
        if (rc == 0) k3_engine_close(e);
    }
    k3_options o = options(0, 4);
    o.sums = "/nowhere/k3.sums";
    CHECK(k3_engine_open(&e, &o, &err) == K3_EIO && strstr(err.text, "/nowhere/k3.sums"));
    free(bytes);
}

/* ---- The queue by itself ---- */

#define N_REQS 6

static void req_init(io_req *r, uint8_t *to, const k3_engine *e, uint64_t offset, uint64_t n) {
    *r = (io_req){.to = to, .offset = offset, .n = n, .i_shard = 0};
    uint8_t *bytes = malloc(n);
    CHECK(bytes && pread(e->files.shards[0].fd[0], bytes, n, (off_t)offset) == (ssize_t)n);
    r->sum = XXH3_64bits(bytes, n);
    free(bytes);
}

/* With one read at a time: demand first, a raised guess like demand, then trunk, then guesses; a
 * request that was taken back is never read. A sum that does not match fails as that. */
static void test_queue(void) {
    static const enum io_urgency urgency[N_REQS] = {IO_DEMAND, IO_GUESS, IO_TRUNK, IO_DEMAND, IO_GUESS, IO_GUESS};
    static const int order[] = {0, 2, 3, 4, 1};
    fake f;
    k3_session *s;
    k3_error err;
    io_req r[N_REQS];
    begin("the queue");
    fake_init(&f);
    k3_options o = options(0, 4);
    o.io_depth = 1;
    k3_engine *e = open_both(&o, &f, &s);
    uint8_t *room = aligned_alloc(IO_ALIGN, N_REQS * 4 * IO_ALIGN);
    if (!e || !CHECK((f.log = malloc(MAX_LOG * sizeof *f.log)) && room)) return;
    for (int i = 0; i < N_REQS; i++) req_init(&r[i], room + i * 4 * IO_ALIGN, e, 5000u + 7001u * (uint64_t)i, 6000);
    fake_shut(&f, true);
    for (int i = 0; i < N_REQS; i++) {
        disk_submit(&e->io, &r[i], urgency[i]);
        while (i == 0 && disk_state(&e->io, &r[0]) != IO_BUSY) usleep(100);
    }
    disk_raise(&e->io, &r[4], false); /* behind the demand */
    disk_raise(&e->io, &r[2], true);  /* before it */
    CHECK(disk_cancel(&e->io, &r[5]) && !disk_cancel(&e->io, &r[0]));
    fake_shut(&f, false);
    for (int i = 0; i < N_REQS - 1; i++) disk_wait(&e->io, &r[i]);
    CHECK_EQ_INT(f.n_log, 5);
    for (int i = 0; i < 5 && i < f.n_log; i++) CHECK(f.log[i].to == r[order[i]].to);
    for (int i = 0; i < 5; i++) CHECK(r[i].state == IO_DONE && XXH3_64bits(r[i].at, r[i].n) == r[i].sum);
    CHECK_EQ_INT(r[5].state, IO_IDLE);
    for (int i = 0; i < 2; i++) {
        r[i].has_sum = true;
        r[i].sum ^= (uint64_t)i; /* for request 1 the sum is wrong */
        disk_submit(&e->io, &r[i], IO_DEMAND);
        disk_wait(&e->io, &r[i]);
    }
    CHECK(r[0].state == IO_DONE && r[1].state == IO_FAILED && r[1].why == EBADMSG);
    CHECK_EQ_INT(f.n_log, 8); /* a wrong sum is read twice */
    CHECK(disk_fail(&e->io, &r[1], &err) == K3_ECHECK && strstr(err.text, "offset 0x2ee1") &&
          strstr(err.text, "sum"));
    close_both(e, s);
    free(f.log);
    free(room);
}

/* Random requests, some taken back, with both ways of reading: each gets the right bytes. */
static void test_queue_random(void) {
    enum { N = 48, ROOM = 16 };
    io_req r[N];
    k3_session *s;
    k3_error err;
    uint64_t seed = 3;
    begin("random requests");
    k3_options o = options(0, 4);
    k3_engine *e = open_both(&o, NULL, &s);
    uint8_t *room = aligned_alloc(IO_ALIGN, N * ROOM * IO_ALIGN);
    if (!e || !CHECK(room)) return;
    for (int round = 0; round < (is_quick ? 8 : 80); round++) {
        int n_wrong = 0;
        if (round % 4 == 0)
            CHECK(disk_mode(&e->io, has_uring && round / 4 & 1, round / 8 & 1, 1 + (int)(test_random(&seed) % 40), &err) == 0);
        for (int i = 0; i < N; i++) {
            uint64_t n = 1 + test_random(&seed) % ((ROOM - 1) * IO_ALIGN), size = e->files.shards[0].size;
            uint64_t at = i == 0 ? size - n : test_random(&seed) % (size - n);
            req_init(&r[i], room + i * ROOM * IO_ALIGN, e, at, n);
            disk_submit(&e->io, &r[i], (enum io_urgency)(test_random(&seed) % 3));
            if (test_random(&seed) % 4 == 0) disk_raise(&e->io, &r[test_random(&seed) % (uint64_t)(i + 1)], i & 1);
            if (test_random(&seed) % 4 == 0) disk_cancel(&e->io, &r[test_random(&seed) % (uint64_t)(i + 1)]);
        }
        for (int i = 0; i < N; i++) {
            disk_wait(&e->io, &r[i]);
            n_wrong += r[i].state == IO_IDLE ? 0 : r[i].state != IO_DONE || XXH3_64bits(r[i].at, r[i].n) != r[i].sum;
        }
        CHECK_EQ_INT(n_wrong, 0);
        CHECK(e->io.n_busy == 0 && !e->io.first[0] && !e->io.first[1] && !e->io.first[2] && !e->io.last[0]);
    }
    close_both(e, s);
    free(room);
}

/* ---- A ring that may be set up and not used ---- */

/* From now on io_uring_enter() fails in every thread of this process, as under a service manager's or a
 * container's filter of system calls. */
static bool ring_deny(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0;
}

/* io_uring_enter denied from the start: the mode is refused, the probe returns 0, and the way that
 * is chosen reads. */
static void denied_before(void) {
    k3_session *s;
    k3_error err = {""};
    uint64_t seed = 1;
    k3_options o = options(0, 4);
    if (!ring_deny()) _exit(77);
    k3_engine *e = open_both(&o, NULL, &s);
    if (!e) return;
    CHECK(probe(e, true, false, 8, &seed) == 0);
    CHECK(probe(e, false, false, 8, &seed) > 0);
    CHECK_EQ_INT(disk_mode(&e->io, true, false, 8, &err), K3_EIO);
    CHECK_EQ_STR(err.text, "io_uring: Operation not permitted; use --io pool");
    CHECK(disk_mode(&e->io, false, false, 8, &err) == 0);
    CHECK(is_right(s, N_SHORT));
    close_both(e, s);
    o.io = K3_IO_URING;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EIO);
    CHECK(strstr(err.text, "use --io pool") != NULL);
    o.io = K3_IO_AUTO;
    if (!(e = open_both(&o, NULL, &s))) return;
    CHECK(!e->plan.is_uring);
    CHECK(is_right(s, N_SHORT));
    close_both(e, s);
}

/* Denied while the ring serves: waiting requests fail with that errno, reads that the kernel has
 * begun end as they will, and the engine closes. The read that the kernel has begun is one of a
 * pipe that is not written to yet. */
static void denied_later(void) {
    enum { N = 12 };
    io_req r[N + 1];
    hashes h;
    int fd[2];
    k3_session *s;
    k3_error err = {""};
    k3_options o = options(least, 1);
    o.io = K3_IO_URING;
    k3_engine *e = open_both(&o, NULL, &s);
    uint8_t *room = aligned_alloc(IO_ALIGN, (N + 1) * 2 * IO_ALIGN);
    if (!e || !CHECK(room) || !CHECK(pipe(fd) == 0)) return;
    CHECK(is_right(s, N_SHORT));
    shard *sh = (shard *)&e->io.shards[0];
    int file = sh->fd[0];
    quiesce(e);
    usleep(50000); /* time for reads ahead to end */
    sh->fd[0] = fd[0];
    r[N] = (io_req){.to = room + N * 2 * IO_ALIGN, .n = IO_ALIGN};
    disk_submit(&e->io, &r[N], IO_DEMAND);
    while (disk_state(&e->io, &r[N]) != IO_BUSY) usleep(1000); /* the watchdog bounds it */
    usleep(50000);
    sh->fd[0] = file;
    if (!ring_deny()) _exit(77);
    for (int i = 0; i < N; i++) {
        r[i] = (io_req){.to = room + i * 2 * IO_ALIGN, .offset = (uint64_t)i * 100, .n = 100};
        disk_submit(&e->io, &r[i], (enum io_urgency)(i % 3));
    }
    for (int i = 0; i < N; i++) {
        disk_wait(&e->io, &r[i]);
        CHECK(r[i].state == IO_FAILED && r[i].why == EPERM);
    }
    CHECK_EQ_INT(disk_fail(&e->io, &r[0], &err), K3_EIO);
    CHECK(strstr(err.text, "io_uring: Operation not permitted; use --io pool") != NULL);
    CHECK_EQ_INT(disk_state(&e->io, &r[N]), IO_BUSY);
    memset(room, 7, IO_ALIGN);
    CHECK(write(fd[1], room, IO_ALIGN) == IO_ALIGN);
    disk_wait(&e->io, &r[N]);
    CHECK(r[N].state == IO_DONE && r[N].at[0] == 7 && r[N].at[IO_ALIGN - 1] == 7);
    CHECK(e->io.n_busy == 0 && e->io.copies[0].queued == 0 && !e->io.copies[0].is_dead);
    CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), K3_EIO);
    CHECK(strstr(err.text, "use --io pool") != NULL);
    close_both(e, s);
    free(room);
}

/* In a process of its own: a filter cannot be taken off again. */
static void test_ring_denied(void (*run)(void), const char *name) {
    int status = 0;
    begin(name);
    if (!has_uring) return;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        begin(name); /* alarms are not inherited */
        test_state.n_failed = 0;
        run();
        fflush(stdout);
        _exit(test_state.n_failed > 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        SKIP("io_uring denied: this system filters no calls");
    else
        CHECK_EQ_INT(WEXITSTATUS(status), 0);
}

/* ---- Mirrors ---- */

static int n_notes;
static char last_note[4200];

static void keep_note(void *user, const char *line) {
    (void)user;
    n_notes++;
    snprintf(last_note, sizeof last_note, "%s", line);
}

static bool shell(const char *fmt, ...) {
    char command[8192];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(command, sizeof command, fmt, ap);
    va_end(ap);
    return CHECK(system(command) == 0);
}

static bool make_mirrors(void) {
    snprintf(sums_file, sizeof sums_file, "%s/k3.sums", work_dir);
    snprintf(mirror_all, sizeof mirror_all, "%s/all", work_dir);
    snprintf(mirror_some, sizeof mirror_some, "%s/some", work_dir);
    snprintf(mirror_bad, sizeof mirror_bad, "%s/bad", work_dir);
    snprintf(mirror_none, sizeof mirror_none, "%s/none", work_dir);
    snprintf(mirror_old, sizeof mirror_old, "%s/old", work_dir);
    return shell("mkdir %s && cp '%s'/model-00003* %s && printf x | dd of=%s/model-00003-of-000003.safetensors "
                 "bs=1 seek=1574591 conv=notrunc 2>/dev/null",
                 mirror_old, demo_dir, mirror_old, mirror_old) &&
           shell("cp -r '%s' %s && mkdir %s %s %s && cp '%s'/model-00002* %s && cp '%s'/model-00001* %s && "
                 "truncate -s -1 %s/model-00001*",
                 demo_dir, mirror_all, mirror_some, mirror_bad, mirror_none, demo_dir, mirror_some, demo_dir,
                 mirror_bad, mirror_bad);
}

/* No mirror, one, two: one hash, and each of them is asked. */
static void test_mirrors(void) {
    const char *const one[] = {mirror_all, NULL}, *const two[] = {mirror_some, mirror_all, NULL};
    const char *const *const lists[] = {NULL, one, two};
    for (int mode = 0; mode < (is_quick ? 3 : 6); mode++) {
        fake f;
        k3_session *s;
        begin("mirrors");
        fake_init(&f);
        k3_options o = options(least, 1);
        o.mirrors = lists[mode % 3];
        o.direct = mode / 3 ? K3_ON : K3_OFF;
        o.note = keep_note;
        n_notes = 0;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        f.delay_us = 200;
        CHECK(is_right(s, N_SHORT));
        CHECK_EQ_INT(n_notes, 0);
        for (int c = 0; c <= mode % 3; c++)
            if (!CHECK(f.copy_reads[c] > 20))
                printf("    copy %d of %d: %llu\n", c, mode % 3, (unsigned long long)f.copy_reads[c]);
        close_both(e, s);
    }
}

/* A copy fails after some reads: the other copies go on, it is named once and not asked again. */
static void test_failing_mirror(void) {
    static const int after[] = {0, 1, 30, 100};
    const char *const one[] = {mirror_all, NULL}, *const two[] = {mirror_some, mirror_all, NULL};
    int n_failed = 0, n_modes = is_quick ? 4 : 16;
    for (int mode = 0; mode < n_modes; mode++) {
        fake f;
        k3_session *s;
        unsigned bad = mode & 1 ? 2 * (mode / 2 % 2) : mode / 2 % 2, depth = mode % 3 ? 8 : 1;
        begin("a failing mirror");
        fake_init(&f);
        k3_options o = options(least + (mode & 4 ? MIB : 0), 1);
        o.mirrors = mode & 1 ? two : one;
        o.direct = mode & 8 ? K3_ON : K3_OFF;
        o.io_depth = (int)depth;
        o.note = keep_note;
        n_notes = 0;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        f.copy_left[bad] = after[mode / 2 % 4];
        f.delay_us = 40; /* so that no copy looks much faster than the others */
        if (!CHECK(is_right(s, N_SHORT))) printf("    mode %d\n", mode);
        if (f.copy_faults[bad] > 0) { /* it was asked, and failed */
            n_failed++;
            CHECK(f.copy_faults[bad] >= 2 && f.copy_faults[bad] <= 2 * depth);
            CHECK_EQ_INT(n_notes, 1);
            CHECK(strncmp(last_note, e->io.copies[bad].dir, strlen(e->io.copies[bad].dir)) == 0);
            uint64_t before = f.copy_reads[bad];
            CHECK(is_right(s, N_SHORT));
            CHECK_EQ_INT(f.copy_reads[bad], before);
            CHECK_EQ_INT(n_notes, 1);
        }
        close_both(e, s);
    }
    CHECK(n_failed > n_modes / 2);
}

/* A place that one copy cannot read is read from another; what only the first copy has is still
 * read from it. */
static void test_bad_place(void) {
    const char *const some[] = {mirror_some, NULL};
    for (int kind = 0; kind < 2; kind++) {
        fake f;
        k3_session *s;
        begin("one bad place");
        fake_init(&f);
        k3_options o = options(least + MIB, 1);
        o.mirrors = some;
        o.sums = sums_file;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        uint32_t i = 0;
        while (i < e->stream.n_pieces && strstr(e->files.shards[e->stream.pieces[i].i_shard].name, "00002") == NULL) i++;
        if (!CHECK(i < e->stream.n_pieces)) return;
        f.bad_copy = 0;
        e->io.copies[0].ns_per_byte = 1; /* so that the failing copy is asked first */
        e->io.copies[1].ns_per_byte = 1e9;
        fake_aim(&f, e->stream.pieces[i].i_shard, e->stream.pieces[i].offset + e->stream.pieces[i].n / 2,
                 kind ? NO_FAULT : FAIL_EIO, 0x20, kind ? -1 : 0);
        CHECK(is_right(s, N_SHORT));
        CHECK(f.n_faults >= 2);
        close_both(e, s);
    }
}

/* Every copy fails: every waiting request ends with an error, none hangs. Healed, the run goes on. */
static void test_all_fail(void) {
    const char *const one[] = {mirror_all, NULL};
    for (int depth = 1; depth <= 16; depth *= 4) {
        fake f;
        k3_session *s;
        k3_error err;
        hashes h;
        begin("all copies fail");
        fake_init(&f);
        k3_options o = options(least + MIB, 4);
        o.mirrors = one;
        o.io_depth = depth;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        f.copy_left[0] = 40;
        f.copy_left[1] = 10;
        for (int i = 0; i < 3; i++) {
            CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), K3_EIO);
            CHECK(strstr(err.text, ".safetensors") != NULL);
            CHECK(store_holds(e, -1));
        }
        fake_heal(&f);
        CHECK(is_right(s, N_SHORT));
        close_both(e, s);
    }
}

static void test_refused_mirrors(void) {
    const char *list[K3_MAX_COPIES + 1] = {NULL};
    k3_engine *e;
    k3_error err;
    begin("refused mirrors");
    k3_options o = options(0, 1);
    o.mirrors = list;
    list[0] = mirror_none;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EMODEL);
    CHECK(strstr(err.text, mirror_none) && strstr(err.text, "no shard"));
    list[0] = mirror_bad;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EMODEL);
    CHECK(strstr(err.text, mirror_bad) && strstr(err.text, "not a copy"));
    list[0] = mirror_old;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EMODEL);
    CHECK(strstr(err.text, mirror_old) && strstr(err.text, "differs"));
    list[0] = "/nonexistent/k3";
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EMODEL);
    for (int i = 0; i < K3_MAX_COPIES; i++) list[i] = mirror_some;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EUSAGE);
}

/* ---- Real files that vanish and shrink, both ways of reading ---- */

static k3_engine *vanish_engine;
static int vanish_at, vanish_copy, vanish_count;

/* From now on every read of one copy fails in the kernel. */
static int vanish(void *user, const k3_progress *p) {
    (void)user;
    if (p->phase != K3_PHASE_COMPUTE || vanish_count++ != vanish_at || !vanish_engine) return 0;
    int dir = open("/", O_RDONLY);
    for (uint32_t i = 0; dir >= 0 && i < vanish_engine->files.n_shards; i++) {
        const shard *sh = &vanish_engine->files.shards[i];
        if (sh->fd[vanish_copy] >= 0) CHECK(dup2(dir, sh->fd[vanish_copy]) >= 0);
        if (sh->fd_direct[vanish_copy] >= 0) CHECK(dup2(dir, sh->fd_direct[vanish_copy]) >= 0);
    }
    if (CHECK(dir >= 0)) close(dir);
    return 0;
}

static void test_vanish(void) {
    const char *const two[] = {mirror_some, mirror_all, NULL};
    for (int mode = 0; mode < 8; mode++) {
        k3_session *s;
        begin("a mirror that vanishes");
        k3_options o = options(least, 1);
        o.mirrors = two;
        o.io = mode & 1 && has_uring ? K3_IO_URING : K3_IO_POOL;
        o.direct = mode & 2 ? K3_ON : K3_OFF;
        o.note = keep_note;
        o.progress = vanish;
        n_notes = vanish_count = 0;
        vanish_engine = NULL;
        k3_engine *e = open_both(&o, NULL, &s);
        if (!e) return;
        vanish_engine = e;
        vanish_at = mode * 7;
        vanish_copy = mode % 3;
        if (!CHECK(is_right(s, N_SHORT))) printf("    mode %d\n", mode);
        CHECK(n_notes <= 1);
        if (e->io.copies[vanish_copy].is_dead) CHECK(n_notes == 1 && strstr(last_note, e->io.copies[vanish_copy].dir));
        close_both(e, s);
    }
}

/* Cut the files while they are open, then make them whole again. */
static void test_shrink(void) {
    for (int mode = 0; mode < 4; mode++) {
        k3_session *s;
        k3_error err = {""};
        hashes h;
        char path[256];
        begin("a file that shrinks");
        k3_options o = options(least, 1);
        o.model_dir = mirror_all;
        o.io = mode & 1 && has_uring ? K3_IO_URING : K3_IO_POOL;
        o.direct = mode & 2 ? K3_ON : K3_OFF;
        k3_engine *e = open_both(&o, NULL, &s);
        if (!e) return;
        const piece *p = &e->stream.pieces[e->stream.n_body / 2];
        const char *name = e->files.shards[p->i_shard].name;
        snprintf(path, sizeof path, "%s/%s", mirror_all, name);
        CHECK(truncate(path, (off_t)(p->offset + p->n / 2 + 1)) == 0);
        CHECK_EQ_INT(generate(s, N_SHORT, &h, &err), K3_EIO);
        if (!CHECK(strstr(err.text, name) && strstr(err.text, "short"))) printf("    %s\n", err.text);
        shell("cat '%s/%s' > %s", demo_dir, name, path);
        CHECK(is_right(s, N_SHORT));
        close_both(e, s);
    }
}

/* ---- Cancelling ---- */

static int calls_left;

static int cancel_later(void *user, const k3_progress *p) {
    (void)user;
    (void)p;
    return calls_left >= 0 && calls_left-- == 0;
}

static void test_cancel(void) {
    for (int mode = 0; mode < 3; mode++) {
        fake f;
        k3_session *s;
        k3_error err;
        hashes h;
        begin("cancelling");
        fake_init(&f);
        k3_options o = options(least + (mode == 1 ? 5 : mode) * MIB, mode ? 4 : 1);
        o.progress = cancel_later;
        calls_left = -1;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e) return;
        int n_calls = (int)e->sh.n_layers * ((mode ? 2 : 6) + 1); /* at least so many: waits call it too */
        for (int at = 0; at < n_calls; at += is_quick ? 7 : 1 + mode % 2) {
            calls_left = at;
            fake_delay(&f, at % 3 ? 0 : 60);
            CHECK_EQ_INT(generate(s, 2, &h, &err), K3_ECANCEL);
            CHECK(store_holds(e, -1) && e->stream.n_live == 0);
            fake_delay(&f, 0);
            CHECK(is_right(s, 2));
        }
        calls_left = -1;
        CHECK(is_right(s, N_SHORT));
        close_both(e, s);
    }
}

/* Cancel opening at every progress call; refuse each of its blocks of memory in turn. */
static void test_open_fails(void) {
    k3_engine *e = NULL;
    k3_error err;
    int n = 0;
    begin("opening that fails");
    k3_options o = options(least + MIB, 4);
    o.progress = cancel_later;
    for (calls_left = n; k3_engine_open(&e, &o, &err) == K3_ECANCEL; calls_left = ++n) {}
    CHECK(e && n > 5);
    k3_engine_close(e);
    calls_left = -1;
    n = 0;
    for (mmaps_left = n; k3_engine_open(&e, &o, &err) == K3_ENOMEM; mmaps_left = ++n) CHECK(!e);
    mmaps_left = -1;
    CHECK(e && n > 10);
    k3_engine_close(e);
}

/* ---- Prefill counts ---- */

#define N_PREFILL 24

static void random_ids(uint32_t *ids, int n, uint64_t seed) {
    for (int i = 0; i < n; i++) ids[i] = (uint32_t)(test_random(&seed) % 1700);
}

static uint64_t piece_base(const piece *p) { return p->offset / IO_ALIGN * IO_ALIGN; }

/* How often the blocks of a piece were read into the ring, and how many pieces have these blocks. */
static int count_reads(const fake *f, const piece *p, int *n_same) {
    const stream *st = &f->e->stream;
    uint64_t n = round_up(p->offset + p->n - piece_base(p), IO_ALIGN);
    int n_reads = 0;
    for (int i = 0; i < f->n_log; i++) {
        uint8_t *to = f->log[i].to;
        n_reads += to >= st->bytes && to < st->bytes + st->cap && f->log[i].i_shard == p->i_shard &&
                   f->log[i].offset == piece_base(p) && f->log[i].n == n;
    }
    *n_same = 0;
    for (uint32_t i = 0; i < st->n_pieces; i++) {
        const piece *o = &st->pieces[i];
        *n_same += o->i_shard == p->i_shard && piece_base(o) == piece_base(p) &&
                   round_up(o->offset + o->n - piece_base(o), IO_ALIGN) == n;
    }
    return n_reads;
}

/* Check that each piece was read once for each chunk, and at most once more for the next. Returns
 * the bytes that these reads of the ring had. */
static uint64_t check_pieces(const fake *f, int n_chunks) {
    const stream *st = &f->e->stream;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < st->n_pieces; i++) {
        const piece *p = &st->pieces[i];
        int n_same, n_ahead = 0;
        for (uint32_t k = 0; k < st->n_live; k++)
            n_ahead += st->live[(st->first + k) % STREAM_LIVE].i_piece == i;
        int n_reads = count_reads(f, p, &n_same);
        CHECK(n_reads >= n_chunks * n_same && n_reads <= (n_chunks + 1) * n_same);
        if (n_same == 1) CHECK_EQ_INT(n_reads, n_chunks + n_ahead);
        bytes += p->n * (uint64_t)(n_chunks + n_ahead);
    }
    return bytes;
}

/* The experts that these ids need in each layer, from a run of single positions that keeps no
 * slots. */
static void distinct_experts(const uint32_t *ids, bool need[MAX_FAKE_LAYERS][MAX_FAKE_EXPERTS]) {
    fake f;
    k3_session *s;
    k3_error err;
    fake_init(&f);
    k3_options o = options(least, 1);
    o.no_look_ahead = true;
    k3_engine *e = open_both(&o, &f, &s);
    if (!e) return;
    CHECK(k3_session_feed(s, ids, N_PREFILL, K3_ROWS_NONE, NULL, &err) == 0);
    for (int il = 0; il < MAX_FAKE_LAYERS; il++)
        for (int ie = 0; ie < MAX_FAKE_EXPERTS; ie++) need[il][ie] = f.uses[il][ie] > 0;
    close_both(e, s);
}

static void test_prefill(void) {
    static bool need[MAX_FAKE_LAYERS][MAX_FAKE_EXPERTS];
    static float row[4096];
    uint32_t ids[N_PREFILL];
    random_ids(ids, N_PREFILL, 5);
    begin("prefill counts");
    distinct_experts(ids, need);
    uint64_t low = find_floor(N_PREFILL, 1);
    for (int mode = 0; mode < 4; mode++) {
        fake f;
        k3_session *s;
        k3_error err;
        k3_stats st;
        uint32_t n_need = 0, n_wrong = 0;
        fake_init(&f);
        k3_options o = options(low + (uint64_t)mode * 2 * MIB, N_PREFILL);
        o.no_look_ahead = true; /* each expert is read exactly once; test_prefill_ahead() looks ahead */
        k3_engine *e = open_both(&o, &f, &s);
        if (!e || !CHECK((f.log = malloc(MAX_LOG * sizeof *f.log)) != NULL)) return;
        k3_session_stats(s, &st);
        uint64_t before = st.read_bytes;
        for (int n_chunks = 1; n_chunks <= 2; n_chunks++) {
            k3_session_reset(s);
            CHECK(k3_session_feed(s, ids, N_PREFILL, K3_ROWS_LAST, row, &err) == 0);
            quiesce(e);
            k3_session_stats(s, &st);
            n_need = n_wrong = 0;
            uint64_t n_loads = 0;
            for (int il = 0; il < MAX_FAKE_LAYERS; il++)
                for (int ie = 0; ie < MAX_FAKE_EXPERTS; ie++) {
                    n_need += need[il][ie];
                    n_loads += f.uses[il][ie];
                    n_wrong += need[il][ie] ? f.uses[il][ie] < 1 || f.uses[il][ie] > (uint32_t)n_chunks : f.uses[il][ie] > 0;
                    n_wrong += e->store.quota == 0 && need[il][ie] && f.uses[il][ie] != (uint32_t)n_chunks;
                }
            CHECK_EQ_INT(n_wrong, 0);
            CHECK_EQ_INT(st.expert_uses, n_chunks * n_need);
            CHECK_EQ_INT(st.expert_loads, n_loads);
            CHECK_EQ_INT(st.expert_loads + st.expert_hits, st.expert_uses);
            CHECK_EQ_INT(st.guesses, 0);
            uint64_t bytes = check_pieces(&f, n_chunks) + n_loads * e->sh.expert_bytes +
                             (uint64_t)n_chunks * N_PREFILL * e->sh.hidden * sizeof(uint16_t);
            CHECK_EQ_INT(st.read_bytes - before, bytes);
        }
        CHECK(n_need > 8 * 4 && (mode > 0 || e->stream.n_pieces > 20));
        close_both(e, s);
        free(f.log);
    }
}

/* With look-ahead: the same row, most guesses are right, and reads beyond what was needed are
 * counted. */
static void test_prefill_ahead(void) {
    static float want[4096], row[4096];
    uint32_t ids[N_PREFILL];
    random_ids(ids, N_PREFILL, 5);
    begin("prefill ahead");
    uint64_t low = find_floor(N_PREFILL, 1);
    for (int mode = 0; mode < 8; mode++) {
        fake f;
        k3_session *s;
        k3_error err;
        k3_stats st;
        fake_init(&f);
        k3_options o = options(low + (uint64_t)(mode / 2) * 2 * MIB, N_PREFILL);
        o.no_look_ahead = mode % 2 == 0;
        k3_engine *e = open_both(&o, &f, &s);
        if (!e || !CHECK((f.log = malloc(MAX_LOG * sizeof *f.log)) != NULL)) return;
        k3_session_stats(s, &st);
        uint64_t before = st.read_bytes, n_pieces = 0;
        CHECK(k3_session_feed(s, ids, N_PREFILL, K3_ROWS_LAST, mode == 0 ? want : row, &err) == 0);
        if (mode > 0) CHECK(memcmp(want, row, e->sh.vocab_size * sizeof *row) == 0);
        quiesce(e);
        k3_session_stats(s, &st);
        uint64_t needed = 0, more = 0;
        for (int il = 0; il < MAX_FAKE_LAYERS; il++)
            for (int ie = 0; ie < MAX_FAKE_EXPERTS; ie++) {
                needed += f.uses[il][ie] > 0;
                more += f.uses[il][ie] > 1 ? f.uses[il][ie] - 1 : 0;
            }
        n_pieces = check_pieces(&f, 1);
        CHECK_EQ_INT(st.read_bytes - before,
                     n_pieces + (needed + more) * e->sh.expert_bytes +
                         (uint64_t)N_PREFILL * e->sh.hidden * sizeof(uint16_t));
        if (o.no_look_ahead) CHECK(st.guesses == 0 && more == 0);
        if (!o.no_look_ahead && mode > 2) /* at the floor itself no slot is ever free */
            CHECK(st.guesses > 20 && st.guess_hits * 3 > st.guesses * 2);
        CHECK(more * e->sh.expert_bytes <= st.wasted_bytes);
        free(f.log);
        close_both(e, s);
    }
}

/* ---- Slots after every layer ---- */

#define N_TOKENS 200

static k3_engine *watched;

/* Between layers, when work has been done. */
static int watch(void *user, const k3_progress *p) {
    static uint64_t last;
    (void)user;
    if (p->phase == K3_PHASE_COMPUTE && watched && p->done > 0 && p->done != last)
        CHECK(store_holds(watched, p->layer));
    last = p->done;
    return 0;
}

/* Run all tokens in pieces of random length; *trace hashes every layer of every position and the
 * stats. */
static bool run_tokens(k3_session *s, const uint32_t *ids, uint64_t seed, uint64_t *trace) {
    k3_error err = {""};
    int rc = 0;
    *trace = K3_FNV_BASIS;
    k3_session_reset(s);
    k3_session_trace(s, trace_add, trace);
    for (int at = 0, n; rc == 0 && at < N_TOKENS; at += n) {
        n = test_random(&seed) % 4 ? 1 : 1 + (int)(test_random(&seed) % 20);
        if (n > N_TOKENS - at) n = N_TOKENS - at;
        rc = k3_session_feed(s, ids + at, (size_t)n, K3_ROWS_NONE, NULL, &err);
    }
    if (rc < 0) printf("    %s\n", err.text);
    return rc == 0;
}

static void test_slots(void) {
    uint32_t ids[N_TOKENS];
    uint64_t seed = 77, want, got, n_guess_hits = 0, n_wasted = 0, n_hits = 0;
    k3_session *s;
    random_ids(ids, N_TOKENS, 9);
    begin("slots after every layer");
    k3_options o = options(0, 16);
    watched = NULL;
    k3_engine *e = open_both(&o, NULL, &s);
    if (!e || !CHECK(run_tokens(s, ids, 1, &want))) return;
    close_both(e, s);
    for (int i = 0; i < (is_quick ? 3 : 8); i++) {
        fake f;
        k3_stats st;
        static const int chunks[] = {1, 3, 16, 16};
        fake_init(&f);
        watched = NULL;
        int chunk = i == 0 ? 1 : chunks[i % 4];
        o = options(find_floor(chunk, 1 + (i & 1)) + (i == 0 ? 0 : test_random(&seed) % (9 * MIB)), chunk);
        o.policy = i & 1 ? K3_POLICY_LRU : K3_POLICY_RANK;
        o.no_look_ahead = i % 3 == 1;
        o.n_threads = 1 + (i & 1);
        o.progress = watch;
        o.io_depth = 1 + (int)(test_random(&seed) % 12);
        if (!(e = open_both(&o, &f, &s))) return;
        watched = e;
        f.delay_us = i % 5 == 1 ? 60 : 0;
        begin("slots after every layer");
        CHECK(run_tokens(s, ids, seed, &got));
        if (!CHECK(got == want)) printf("    ram floor + %llu\n", (unsigned long long)(o.ram_bytes - least));
        CHECK(store_holds(e, -1));
        k3_session_stats(s, &st);
        CHECK(e->mem.used <= e->mem.limit && st.guess_hits <= st.guesses);
        CHECK(!o.no_look_ahead || st.guesses == 0);
        n_guess_hits += st.guess_hits;
        n_wasted += st.wasted_bytes;
        n_hits += st.expert_hits;
        close_both(e, s);
    }
    watched = NULL;
    CHECK(n_guess_hits > 0 && n_wasted > 0 && n_hits > 0);
}

/* ---- The ring by itself ---- */

typedef struct {
    k3_engine *e;
    uint64_t seed, most;
    uint8_t *file;
    uint64_t file_bytes;
    uint64_t n_ahead;
    uint32_t n_segments;
} ring_test;

/* Make random pieces of a file; the last few may be the head's. */
/* Cut the pieces into segments, some of them empty; those of the head are one. */
static void ring_segments(ring_test *r, stream *st) {
    uint32_t g = 0;
    for (uint32_t i = 0; i < st->n_pieces; i++) {
        if (i == st->n_body)
            g += 1 + (uint32_t)(test_random(&r->seed) % 2);
        else if (i < st->n_body && i > 0 && test_random(&r->seed) % 4 == 0)
            g += 1 + (uint32_t)(test_random(&r->seed) % 3);
        st->pieces[i].segment = g;
    }
    r->n_segments = g + 1;
    st->segment = calloc(r->n_segments + 1, sizeof *st->segment);
    for (uint32_t i = 0; i <= r->n_segments; i++)
        while (st->segment[i] < st->n_pieces && st->pieces[st->segment[i]].segment < i) st->segment[i]++;
}

static void ring_setup(ring_test *r, stream *st) {
    *st = (stream){.n_pieces = 1 + (uint32_t)(test_random(&r->seed) % 90)};
    st->n_body = st->n_pieces - (uint32_t)(test_random(&r->seed) % 4) % (st->n_pieces + 1);
    if (test_random(&r->seed) % 8 == 0) st->n_body = 0;
    st->pieces = calloc(st->n_pieces, sizeof *st->pieces);
    r->most = 0;
    for (uint32_t i = 0; st->pieces && i < st->n_pieces; i++) {
        uint64_t n = 1 + test_random(&r->seed) % (test_random(&r->seed) % 3 ? 3000 : 60000);
        st->pieces[i] = (piece){.il = i, .t = T_KDA_Q, .n = n, .offset = test_random(&r->seed) % (r->file_bytes - n)};
        if (io_room(n) > r->most) r->most = io_room(n);
    }
    ring_segments(r, st);
    st->cap = 2 * r->most + test_random(&r->seed) % 3 * 5 * IO_ALIGN;
    st->bytes = aligned_alloc(IO_ALIGN, st->cap + IO_ALIGN);
    if (CHECK(st->pieces && st->bytes)) memset(st->bytes, 0x5a, st->cap + IO_ALIGN);
}

/* Do no two live pieces share a byte, does none leave the ring, do they follow each other in order
 * of use? */
static bool ring_holds(const stream *st) {
    for (uint32_t i = 0; i < st->n_live; i++) {
        uint32_t a = (st->first + i) % STREAM_LIVE;
        uint64_t lo = st->live[a].at, hi = lo + io_room(st->pieces[st->live[a].i_piece].n);
        if (hi > st->cap || st->live[a].req.to != st->bytes + lo || lo % IO_ALIGN) return false;
        for (uint32_t k = i + 1; k < st->n_live; k++) {
            uint32_t b = (st->first + k) % STREAM_LIVE;
            uint64_t lo2 = st->live[b].at, hi2 = lo2 + io_room(st->pieces[st->live[b].i_piece].n);
            if (lo < hi2 && lo2 < hi) return false;
        }
    }
    for (uint64_t i = 0; i < IO_ALIGN; i++)
        if (st->bytes[st->cap + i] != 0x5a) return false;
    return true;
}

/* Write the pieces in the order in which a pass of so many turns uses them, from segment `g` on. */
static uint32_t ring_order(const ring_test *r, uint32_t g, uint32_t turns, uint32_t head_turns, uint32_t *order) {
    const stream *st = &r->e->stream;
    uint32_t n = 0;
    for (; g < r->n_segments; g++) {
        bool is_head = st->segment[g] >= st->n_body;
        for (uint32_t turn = 0; turn < (is_head ? head_turns : turns); turn++)
            for (uint32_t i = st->segment[g]; i < st->segment[g + 1]; i++) order[n++] = i;
    }
    return n;
}

/* Run one pass over the pieces; or a part of it, then a reset or another pass, after which it goes
 * on. */
static bool ring_pass(ring_test *r, const k3_pass *owner, uint32_t turns, uint32_t head_turns, uint32_t from,
                      uint32_t stop_at) {
    stream *st = &r->e->stream;
    uint32_t order[4 * 100], n = ring_order(r, from, turns, head_turns, order);
    k3_error err = {""};
    bool is_right = true;
    if (from > 0)
        stream_resume(r->e, owner, from / 2, turns, head_turns);
    else
        stream_begin(r->e, owner, turns, head_turns);
    for (uint32_t i = 0; i < n && is_right; i++) {
        const piece *p;
        const uint16_t *w;
        if (i == stop_at) {
            if (i % 2) return true; /* rests */
            stream_reset(r->e);
            return st->n_live == 0;
        }
        is_right = ring_holds(st) && stream_take(r->e, order[i], T_KDA_Q, &p, &w, &err) == 0 &&
                   p == &st->pieces[order[i]] && memcmp(w, r->file + p->offset, p->n) == 0;
        r->n_ahead += st->n_live > 1;
        if (test_random(&r->seed) % 16 == 0)
            is_right = is_right && stream_take(r->e, order[i] + 1, T_KDA_Q, &p, &w, NULL) < 0;
        if (is_right) stream_release(r->e);
    }
    if (!is_right) printf("    ring: %s\n", err.text);
    stream_end(r->e);
    return is_right;
}

static void test_ring(void) {
    static const k3_pass owners[12]; /* only their addresses count */
    ring_test r = {.seed = 21};
    k3_session *s;
    k3_error err;
    begin("the ring");
    k3_options o = options(0, 4);
    r.e = open_both(&o, NULL, &s);
    if (!r.e) return;
    CHECK_EQ_INT(r.e->stream.n_pieces, 0);
    r.file_bytes = r.e->files.shards[0].size;
    r.file = malloc(r.file_bytes);
    CHECK(r.file && pread(r.e->files.shards[0].fd[0], r.file, r.file_bytes, 0) == (ssize_t)r.file_bytes);
    for (int i = 0; i < (is_quick ? 20 : 100); i++) {
        bool is_right = true;
        if (i % 5 == 0) CHECK(disk_mode(&r.e->io, has_uring && i / 5 & 1, i / 10 & 1, 1 + i % 9, &err) == 0);
        ring_setup(&r, &r.e->stream);
        for (int pass = 0; pass < 12 && is_right; pass++) {
            bool is_cut = test_random(&r.seed) % 6 == 0;
            uint32_t turns = 1 + test_random(&r.seed) % 4 / 3 * (uint32_t)(test_random(&r.seed) % 3);
            uint32_t from = test_random(&r.seed) % 4 ? 0 : 2 * (uint32_t)(test_random(&r.seed) % (r.n_segments / 2 + 1));
            const k3_pass *owner = &owners[from ? pass : 0];
            is_right = ring_pass(&r, owner, turns, (uint32_t)(test_random(&r.seed) % 3), from < r.n_segments ? from : 0,
                                 is_cut ? (uint32_t)(test_random(&r.seed) % 60) : UINT32_MAX);
        }
        if (!CHECK(is_right)) printf("    setup %d\n", i);
        stream_reset(r.e);
        free(r.e->stream.pieces);
        free(r.e->stream.segment);
        free(r.e->stream.bytes);
    }
    r.e->stream = (stream){.n_pieces = 0};
    CHECK(r.n_ahead > 500);
    free(r.file);
    close_both(r.e, s);
}

/* Cut every streamed matrix into pieces of a few rows: a matrix in many pieces is the same matrix. */
static void test_small_pieces(void) {
    for (int mode = 0; mode < (is_quick ? 2 : 4); mode++) {
        k3_session *s;
        begin("matrices in many pieces");
        k3_options o = options(least, 1);
        o.io = mode & 1 && has_uring ? K3_IO_URING : K3_IO_POOL;
        o.direct = mode & 2 ? K3_ON : K3_OFF;
        k3_engine *e = open_both(&o, NULL, &s);
        if (!e) return;
        stream *st = &e->stream, was = *st;
        st->pieces = calloc(40 * (size_t)was.n_pieces, sizeof *st->pieces);
        st->n_pieces = st->n_body = 0;
        for (uint32_t i = 0; st->pieces && i < was.n_pieces; i++) {
            piece p = was.pieces[i];
            uint64_t row_bytes = p.n / p.n_rows;
            uint32_t step_rows = p.t == T_KV_B ? p.n_rows : K3_GROUP * (1 + i % 3);
            if (i == was.n_body) st->n_body = st->n_pieces;
            for (uint32_t row = 0; row < p.n_rows; row += step_rows) {
                uint32_t n = p.n_rows - row < step_rows ? p.n_rows - row : step_rows;
                piece *q = &st->pieces[st->n_pieces++];
                *q = p;
                q->row = row;
                q->n_rows = n;
                q->offset = p.offset + row * row_bytes;
                q->n = n * row_bytes;
            }
        }
        CHECK(st->n_pieces > 2 * was.n_pieces && st->n_body > was.n_body);
        CHECK(is_right(s, N_SHORT));
        quiesce(e);
        stream_reset(e);
        free(st->pieces);
        st->pieces = was.pieces;
        close_both(e, s);
    }
}

/* ---- Child processes ---- */

/* The child processes that this program starts. `run`: one golden prompt, then KiB of memory before
 * opening, at the peak, and by the ledger. `loop`: the prompt for ever, with a byte on stdout at
 * each beginning. */
static int child_main(const char *what, const char *ram) {
    unsigned long long before = machine_number("/proc/self/status", "VmHWM:", 0);
    k3_options o = options(strtoull(ram, NULL, 10), 0);
    k3_session *s;
    k3_error err = {""};
    hashes h;
    o.n_threads = 2;
    k3_engine *e = open_both(&o, NULL, &s);
    if (!e) return 1;
    bool is_loop = strcmp(what, "loop") == 0;
    if (is_loop && write(1, "x", 1) != 1) return 1;
    do
        if (generate(s, N_GEN, &h, &err) < 0) return fprintf(stderr, "%s\n", err.text), 1;
    while (is_loop);
    printf("before %llu peak %llu counted %llu hash %llx\n", before,
           (unsigned long long)machine_number("/proc/self/status", "VmHWM:", 0),
           (unsigned long long)(e->mem.used - OVERHEAD_BYTES) / 1024, (unsigned long long)h.logits);
    close_both(e, s);
    return 0;
}

/* Start this program again; its stdout is the returned descriptor. */
static int child_start(const char *what, uint64_t ram, pid_t *pid) {
    int fd[2];
    char number[32];
    if (pipe(fd) < 0) return -1;
    snprintf(number, sizeof number, "%llu", (unsigned long long)ram);
    fflush(stdout);
    *pid = fork();
    if (*pid == 0) {
        dup2(fd[1], 1);
        close(fd[0]);
        close(fd[1]);
        execl("/proc/self/exe", "test_stream", demo_dir, "--child", what, number, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    if (*pid < 0) close(fd[0]);
    return *pid < 0 ? -1 : fd[0];
}

/* The budget bounds the process: the peak of a whole run, and what the ledger does not count must
 * be far less than the overhead allowed for it. */
static void test_peak(void) {
    static const uint64_t more[] = {0, 1, 4, 8};
    if (IS_SANITIZED) {
        SKIP("peak memory: a sanitizer's own memory would be counted");
        return;
    }
    for (int i = 0; i < 4; i++) {
        char line[256] = "";
        unsigned long long before, peak, counted, hash;
        pid_t pid;
        int status = -1;
        begin("peak memory");
        uint64_t ram = find_floor(0, 2) + more[i] * MIB;
        int fd = child_start("run", ram, &pid);
        FILE *f = fd < 0 ? NULL : fdopen(fd, "r");
        if (!CHECK(f != NULL)) return;
        CHECK(fgets(line, sizeof line, f) != NULL);
        fclose(f);
        waitpid(pid, &status, 0);
        CHECK_EQ_INT(status, 0);
        if (!CHECK(sscanf(line, "before %llu peak %llu counted %llu hash %llx", &before, &peak, &counted, &hash) == 4))
            continue;
        CHECK(hash == expected[N_GEN].logits);
        if (!CHECK(peak * 1024 <= ram && peak <= before + counted + 4096))
            printf("    budget %llu KiB: %s", (unsigned long long)ram / 1024, line);
    }
}

static uint64_t list_hash(const char *dir) {
    char command[4096], line[4096];
    uint64_t h = K3_FNV_BASIS;
    snprintf(command, sizeof command, "ls -la '%s' && cat '%s'/* | cksum", dir, dir);
    FILE *f = popen(command, "r");
    while (f && fgets(line, sizeof line, f)) h = k3_fnv1a(h, line, strlen(line));
    if (f) pclose(f);
    return h;
}

/* Kill a run at any moment: nothing is left that a later run trips over. */
static void test_kill(void) {
    uint64_t seed = 4, before = list_hash(demo_dir);
    for (int i = 0; i < (is_quick ? 3 : 16); i++) {
        pid_t pid;
        char byte;
        int status = 0;
        begin("killing");
        int fd = child_start("loop", find_floor(0, 2) + (uint64_t)(i % 3) * 4 * MIB, &pid);
        if (!CHECK(fd >= 0)) return;
        CHECK(i % 4 == 0 || (read(fd, &byte, 1) == 1 && byte == 'x')); /* sometimes killed while it opens */
        usleep((useconds_t)(test_random(&seed) % 25000));
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        close(fd);
    }
    k3_session *s;
    k3_options o = options(least, 1);
    k3_engine *e = open_both(&o, NULL, &s);
    if (!e) return;
    CHECK(is_right(s, N_SHORT));
    CHECK(list_hash(demo_dir) == before);
    close_both(e, s);
}

/* Which layers are compared with the answers of boxes depends on the system's random numbers, each
 * used once, and on nothing else. Without any, every layer is compared. */
static void test_dice(void) {
    static uint32_t dice[64];
    k3_engine e = {.opt.tier_audit = 4};
    int64_t answers;
    uint64_t seed = 11;
    begin("which layers are compared");
    CHECK(!far_draw(&e)); /* without audits no layer is compared */
    e.far_sums = &answers;
    for (int i = 0; i < 3; i++) CHECK(far_draw(&e));
    given = dice;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 64; i++) dice[i] = (uint32_t)(test_random(&seed) >> 13);
        for (int i = 64; i-- > 0;) CHECK_EQ_INT(far_draw(&e), dice[i] % 4 == 0);
        CHECK_EQ_INT(n_given, round + 1);
    }
    given = NULL;
    CHECK(far_draw(&e) && far_draw(&e));
}

int main(int argc, char **argv) {
    struct io_uring ring;
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_begin("stream");
    if (argc < 2) return fprintf(stderr, "usage: test_stream DEMO_DIR [--quick]\n"), 2;
    demo_dir = argv[1];
    if (argc == 5 && strcmp(argv[2], "--child") == 0) return child_main(argv[3], argv[4]);
    is_quick = argc > 2 && strcmp(argv[2], "--quick") == 0;
    signal(SIGALRM, on_alarm);
    begin("the published hashes");
    has_uring = io_uring_queue_init(4, &ring, 0) == 0;
    if (has_uring)
        io_uring_queue_exit(&ring);
    else
        SKIP("io_uring: this system has none, the pool is tested alone");
    if (!CHECK(find_expected()) || !CHECK(mkdtemp(work_dir) != NULL) || !make_mirrors()) return test_finish();
    least = find_floor(1, 1);
    test_survivable();
    test_dead_expert();
    test_failed_steps();
    test_failed_fill();
    test_dead_piece();
    test_bad_scale();
    test_sums_file();
    test_flips();
    test_sums_find();
    test_sums_on_disk();
    test_sums_refused();
    test_queue();
    test_queue_random();
    test_ring_denied(denied_before, "io_uring denied");
    test_ring_denied(denied_later, "io_uring denied while it reads");
    test_mirrors();
    test_failing_mirror();
    test_bad_place();
    test_all_fail();
    test_refused_mirrors();
    test_vanish();
    test_shrink();
    test_cancel();
    test_open_fails();
    test_prefill();
    test_prefill_ahead();
    test_slots();
    test_ring();
    test_dice();
    test_small_pieces();
    test_peak();
    test_kill();
    alarm(0);
    shell("rm -rf %s", work_dir);
    return test_finish();
}
