/* tier_server.c - `k3-tier`: holds experts in memory and answers with their exact sums.
 *
 *   1 Messages, clock             6 Connections: hello, frames, residency
 *   2 Experts: slots and heat     7 Listening, metrics, the loop
 *   3 Warming, in the background  8 k3-tier status
 *   4 VRAM                        9 Options and main
 *   5 Computing one request
 *
 * What holds everywhere:
 *   - one thread talks and computes: requests are taken one from each client in turn, and one
 *     request has all cores; threads of the background read the disk, copy to VRAM and write what
 *     --keep keeps;
 *   - a request never waits for the disk: what is not in memory is missing, at once;
 *   - the arithmetic is the engine's own (experts.h), and a sum holds an expert whole or not at
 *     all, so that the bits do not depend on who computed (docs/NUMERICS.md 5);
 *   - whoever connects is believed nothing: a fault in a frame ends that connection only;
 *   - experts come from a model directory, a slice of one (slice.h), or over the wire from whoever
 *     may stage them; every one is checked before it is told to anyone, and of an expert that can be
 *     read here no other bytes are taken, whoever brings them;
 *   - nobody from another machine gets in without a key, or a certificate that we trust, unless
 *     --insecure says so; and nobody stages without a right of its own, whatever --insecure says.
 */
#include "experts.h"

#include "gpu_bench.h"
#include "gpu_tier.h"
#include "cli/place.h"
#include "k3_machine.h"
#include "k3_line.h"
#include "tier_dial.h"
#include "tier_tls.h"
#include "slice.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ==== 1. Messages, clock ============================================================= */

enum { DONE = 0, FAIL_IO = 1, FAIL_USAGE = 2, FAIL_MODEL = 3, FAIL_BUDGET = 4 };

static bool is_quiet;

/* One line on stderr. Names of files and what others said may be in it: it is defused. */
static void line_out(const char *before, const char *fmt, va_list ap) {
    char text[1600];
    vsnprintf(text, sizeof text, fmt, ap);
    one_line(text);
    fprintf(stderr, "k3-tier: %s%s\n", before, text);
}

/* With the time of day: what is said while the box serves is a log. */
__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...) {
    va_list ap;
    char when[32];
    struct tm tm;
    time_t now = time(NULL);
    if (is_quiet) return;
    when[strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ ", gmtime_r(&now, &tm))] = 0;
    va_start(ap, fmt);
    line_out(when, fmt, ap);
    va_end(ap);
}

/* Returns `code`. */
__attribute__((format(printf, 2, 3))) static int fail(int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    line_out("", fmt, ap);
    va_end(ap);
    return code;
}

static int fail_status(int status, const k3_error *err) {
    static const int code[] = {DONE,       FAIL_IO,     FAIL_IO, FAIL_USAGE,
                               FAIL_MODEL, FAIL_BUDGET, 5 /* check */};
    int i = -status;
    return fail(i < (int)COUNT(code) ? code[i] : FAIL_IO, "%s",
                err->text[0] ? err->text : k3_status_name(status));
}

#include "tier_keep.h"

/* ==== 2. Experts: slots and heat =====================================================
 *
 * A slot holds one whole expert, read and checked, or is being filled, or is free. Heat is how
 * often clients wanted an expert, halved every minute. All of it is under one lock, which is held for
 * look-ups only: while a request is computed its slots are pinned.
 */
typedef struct {
    uint32_t il, ie, pins;
    bool is_kept; /* named by --pins, or staged and not to be had again */
    expert_view view;
} slot;

/* A place in VRAM (section 4). */
typedef struct {
    uint32_t index, pins; /* expert */
    bool is_full, is_kept;
} vram_slot;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* for those who warm                         */
    slot *slots;
    uint8_t *bytes; /* [n_slots][slot_bytes]                      */
    uint64_t slot_bytes;
    uint32_t n_slots, n_held;
    uint32_t *free, n_free;
    int32_t *slot_of;   /* [n_moe x n_experts]; NONE, or a slot       */
    float *heat;        /* [n_moe x n_experts]; below 0: unreadable   */
    uint8_t *is_coming; /* [n_moe x n_experts]                        */
    uint8_t *is_written; /* [n_moe x n_experts]; in the --keep directory  */
    uint64_t *sum;       /* [n_moe x n_experts]; XXH3 of one that is here, in slot order; 0: not known */
    uint8_t *held;      /* [n_moe][map bytes], as clients are told    */
    uint32_t *version;  /* [n_moe] counts changes of a layer's map    */
    uint64_t n_changes;
    uint64_t fill_at, fill_n; /* experts nobody asked for: the next, and how many were looked at */
    uint32_t *pins;           /* experts by index, the most wanted first    */
    uint32_t n_pins, i_pin;
    uint32_t *order, n_order; /* those of a slice without a model, the same */
    uint32_t n_readable;      /* experts that can be read here              */
    uint64_t n_warmed, n_evicted;
    bool is_stopping, is_filling;
    bool is_starved; /* somebody waits for what a request has pinned */

    int32_t *vram_of; /* [n_moe x n_experts]; NONE, or a slot in VRAM; all NONE without a GPU */
    vram_slot *vram;
    uint32_t n_vram, n_in_vram, n_twice; /* slots; full ones; experts both here and there */
    bool has_vram, is_uploading;         /* the arm works; it takes an expert just now    */
    bool vram_is_lost;                   /* the arm worked                                */
} store;

#define NONE (-1)
#define PIN_HEAT 0x1p30f /* of what is kept, beside what is wanted */
#define WARMERS 4
#define VRAM_LOOK_S 1

/* ---- One connection (section 6) ---- */

enum conn_state { C_FREE, C_HELLO, C_PROOF, C_UP, C_STATUS, C_STAGE, C_HTTP, C_CLOSING };

/* An expert on its way in over the wire. */
typedef struct {
    bool has_begun; /* begin was said                                        */
    bool is_taking; /* an expert is wanted and not committed: slot and place */
    size_t expert;
    int32_t i_slot;
    uint64_t got, sum;
    XXH3_state_t *hash;
} incoming;

typedef struct {
    enum conn_state state;
    int fd;
    tier_tls_conn *tls;         /* NULL: plain                               */
    uint32_t number;            /* for the dump and the log                  */
    char peer[64];              /* its address, for the log                  */
    uint8_t from[8];            /* whose it is: IPv4, half of IPv6, unix: 0  */
    bool is_known;              /* it was welcome                            */
    uint64_t since_ns, sent_ns; /* accepted; last progress of sending   */
    uint64_t quiet_ns;          /* it is not read before that           */
    uint32_t n_poor;            /* reads that gave next to nothing, since one that gave something */
    uint8_t *in, *out;
    size_t n_in, in_cap, n_out, i_out, out_cap;
    bool has_frame;      /* a whole one lies in `in`                  */
    uint64_t arrived_ns; /* when it was whole                         */
    tier_talk talk; /* what its proof of a key is about */
    uint64_t told_changes;
    uint32_t *told; /* [n_moe] versions                          */
    incoming stage;
} conn;

#define MAX_LISTEN 8
#define MAX_CLIENTS 64
#define MAX_STAGERS 4
#define MAX_LOOKERS 3
#define MAX_STATUS 8 /* connections beyond the clients: status, metrics, those not yet welcome */
#define MAX_CONNS (MAX_CLIENTS + MAX_STATUS)

/* When all who are welcome are there, one place is left for who comes. */
STATIC_ASSERT(one_place_is_left, MAX_STAGERS + MAX_LOOKERS < MAX_STATUS);
STATIC_ASSERT(early_frames_fit,
              TIER_HELLO_BYTES <= TIER_MAX_EARLY && TIER_CHALLENGE_BYTES <= TIER_MAX_EARLY &&
                  TIER_PROOF_BYTES <= TIER_MAX_EARLY && TIER_WELCOME_BYTES <= TIER_MAX_EARLY &&
                  TIER_MAX_TEXT <= TIER_MAX_EARLY);
STATIC_ASSERT(staged_frames_fit, TIER_PIECE_BYTES + TIER_MAX_PIECE <= TIER_MAX_FRAME &&
                                     TIER_BEGIN_BYTES + TIER_MAX_CONFIG <= TIER_MAX_FRAME);
STATIC_ASSERT(hello_has_a_role, TIER_HELLO_ROLE < TIER_HELLO_BYTES);
STATIC_ASSERT(experts_fit_16_bits, TIER_MAX_EXPERTS <= UINT16_MAX && TIER_MAX_LAYERS <= UINT16_MAX);
STATIC_ASSERT(a_kept_directory_can_be_opened, KEEP_MAX_SHARDS < K3_MAX_SHARDS);

/* Lines about connections: so many at once, then one a second; what is left out is counted. Strangers
 * have a share of their own, so that they cannot hide what clients do. */
#define LOG_LINES 20
typedef struct {
    uint64_t since_ns;
    uint32_t n_said, n_left_out;
} log_gate;

typedef struct {
    expert_task task; /* its pairs, and where its weights are while they are pinned */
    uint32_t ie;
    int32_t i_slot, i_vram;
    bool is_bad, on_gpu;
} item;

/* A straight line through what was measured: sums of 1, x, y, xx, xy. */
typedef struct {
    float n, x, y, xx, xy;
} trend;

/* What a key is for. */
enum key_use { KEY_ASKS, KEY_STAGES, N_KEY_USES };
#define MAX_KEYS 16 /* of each */

typedef struct {
    const char *model_dir, *slice_dir, *keep_dir, *kernels, *metrics, *pins, *sums, *dump;
    const char *key_file[N_KEY_USES][MAX_KEYS], *stage_name;
    uint32_t n_keys[N_KEY_USES];
    const char *listen[MAX_LISTEN + 1];
    uint32_t n_listen, threads, spin_us, clients;
    uint32_t gpu_device, linger_s; /* linger 0: for ever */
    uint64_t ram, vram;
    bool ram_has_no_unit;   /* --ram was a bare number */
    tier_trust tls;
    bool is_insecure, is_metrics_insecure, no_fill, has_gpu;
} options;

/* Memory for one request (section 5). */
typedef struct {
    float *zp, *zpair, *hpair, *local;
    uint64_t local_floats;
    item *items;
    expert_task **batch;
    uint32_t *pair_row;
    float *pair_w;
} request_mem;

typedef struct {
    options o;
    k3_engine *e, *part; /* the model, the slice; NULL: none                      */
    slice list;          /* of the slice                                          */
    keeper keep;         /* of what is staged                                     */
    int keep_fd;         /* its directory, locked; 0: none                        */
    bool has_model;      /* m is known: from files, or from the first who staged  */
    tier_model m;
    uint64_t expert_bytes;
    tier_key key[N_KEY_USES][MAX_KEYS]; /* o.n_keys of each */
    tier_tls *tls;                      /* NULL: none is spoken */
    expert_math math;
    store st;
    uint32_t n_moe, n_threads;
    k3_pool *pool; /* of n_threads */

    request_mem mem;
    gpu *gpu; /* NULL: none; turned off it stays open until the end */
    gpu_item *gpu_items;
    uint8_t *gpu_bad;
    trend gpu_time; /* nanoseconds of so many pairs                          */
    float cpu_ns;   /* of one pair, running average; 0: not known yet       */

    conn conns[MAX_CONNS];
    struct {
        int fd;
        bool is_http, is_tls, has_port_0;
        char path[sizeof(((tier_addr *)0)->path)]; /* to unlink, if it is still this one: */
        dev_t dev;
        ino_t ino;
    } listen[MAX_LISTEN + 1];
    uint32_t n_listen, n_clients, n_stagers, next_number;
    int wake_fd;
    FILE *dump;
    uint64_t start_ns, busy_ns; /* busy: last time that something came */
    uint64_t client_ns;         /* last time that a client was there, or one who stages */
    uint64_t full_ns;           /* last time that there was no place                    */
    uint64_t accept_ns;         /* not before that: the system has no descriptor left   */
    uint64_t no_fd_ns;          /* last time that this was said                         */
    log_gate gate[2];           /* of strangers, of those who were welcome              */
    uint64_t stats[TIER_N_STATS];
} server;

static volatile sig_atomic_t is_ending;
static int signal_fd = -1;

static void on_signal(int number) {
    uint64_t one = 1;
    (void)number;
    is_ending = 1;
    if (signal_fd >= 0 && write(signal_fd, &one, sizeof one) < 0) return;
}

static size_t index_of(const server *s, uint32_t il, uint32_t ie) {
    return (size_t)(il - s->m.n_dense) * s->m.n_experts + ie;
}

/* A layer's map changed; lock held. */
static void store_tell(server *s, uint32_t il, uint32_t ie, bool is_held) {
    store *st = &s->st;
    uint32_t i = il - s->m.n_dense;
    uint8_t *at = &st->held[i * tier_map_bytes(s->m.n_experts) + ie / 8],
            bit = (uint8_t)(1u << ie % 8);
    *at = is_held ? *at | bit : *at & (uint8_t)~bit;
    st->version[i]++;
    st->n_changes++;
}

/* Is expert i in memory, of either kind? */
static bool store_has(const store *st, size_t i) {
    return st->slot_of[i] != NONE || st->vram_of[i] != NONE;
}

/* Pin an expert where it lies; false when it is not in memory. */
static bool store_pin(server *s, uint32_t il, item *it) {
    store *st = &s->st;
    size_t i = index_of(s, il, it->ie);
    pthread_mutex_lock(&st->lock);
    if (st->heat[i] >= 0) st->heat[i] += (float)it->task.n;
    it->i_slot = st->slot_of[i];
    it->i_vram = st->vram_of[i];
    if (it->i_slot != NONE) {
        st->slots[it->i_slot].pins++;
        it->task.view = st->slots[it->i_slot].view;
    }
    if (it->i_vram != NONE) st->vram[it->i_vram].pins++;
    bool is_here = it->i_slot != NONE || it->i_vram != NONE;
    if (!is_here) pthread_cond_broadcast(&st->work);
    pthread_mutex_unlock(&st->lock);
    return is_here;
}

static void store_unpin(server *s, const item *items, uint32_t n) {
    pthread_mutex_lock(&s->st.lock);
    for (uint32_t x = 0; x < n; x++) {
        if (items[x].i_slot != NONE) s->st.slots[items[x].i_slot].pins--;
        if (items[x].i_vram != NONE) s->st.vram[items[x].i_vram].pins--;
    }
    if (s->st.is_starved) pthread_cond_broadcast(&s->st.work);
    s->st.is_starved = false;
    pthread_mutex_unlock(&s->st.lock);
}

static void store_wish(server *s, const uint8_t *p, size_t n) {
    store *st = &s->st;
    pthread_mutex_lock(&st->lock);
    for (size_t k = 0; k < n; k += 4) {
        size_t i = index_of(s, tier_get16(p + k), tier_get16(p + k + 2));
        if (st->heat[i] >= 0) st->heat[i] += 1.0f;
    }
    pthread_cond_broadcast(&st->work);
    pthread_mutex_unlock(&st->lock);
}

static void store_cool(server *s) {
    size_t n = (size_t)s->n_moe * s->m.n_experts;
    pthread_mutex_lock(&s->st.lock);
    for (size_t i = 0; i < n; i++)
        if (s->st.heat[i] > 0) s->st.heat[i] *= 0.5f;
    pthread_mutex_unlock(&s->st.lock);
}

/* ==== 3. Warming =====================================================================
 *
 * First what --pins names, then what clients want, hottest first; while nobody wants anything and
 * there is room, anything else, from a place of its own so that boxes beside each other differ. A
 * full store makes room only for an expert clearly hotter than its coldest.
 */

/* The hottest expert that is wanted and not here; lock held. */
static int64_t warm_wanted(const server *s) {
    const store *st = &s->st;
    int64_t best = NONE;
    for (size_t i = 0; i < (size_t)s->n_moe * s->m.n_experts; i++)
        if (!store_has(st, i) && !st->is_coming[i] && st->heat[i] > 0 &&
            (best == NONE || st->heat[i] > st->heat[best]))
            best = (int64_t)i;
    return best;
}

static int64_t warm_pin(store *st) {
    while (st->i_pin < st->n_pins) {
        uint32_t i = st->pins[st->i_pin++];
        if (!store_has(st, i) && !st->is_coming[i] && st->heat[i] >= 0) return i;
    }
    return NONE;
}

static int64_t warm_fill(const server *s, store *st) {
    uint64_t n = (uint64_t)s->n_moe * s->m.n_experts;
    while (st->is_filling && st->fill_n < st->n_order) {
        uint32_t i = st->order[st->fill_n++];
        if (!store_has(st, i) && !st->is_coming[i] && st->heat[i] >= 0) return i;
    }
    while (st->is_filling && st->fill_n < n && st->n_order == 0) {
        uint64_t k = (st->fill_at + st->fill_n++) % n; /* all layers get their share */
        uint64_t i = k % s->n_moe * s->m.n_experts + k / s->n_moe;
        if (!store_has(st, i) && !st->is_coming[i] && st->heat[i] >= 0) return (int64_t)i;
    }
    return NONE;
}

/* May a slot's expert be taken from it for one of that heat, once nobody uses it? Yes when VRAM has it
 * as well. Those that --keep still has to write stay. */
static bool warm_may_evict(const server *s, const slot *x, size_t at, float heat) {
    if (x->is_kept && s->o.keep_dir && !s->st.is_written[at]) return false;
    if (s->st.vram_of[at] != NONE) return true;
    return !x->is_kept && 1.25f * s->st.heat[at] + 1.0f < heat;
}

/* The coldest slot: of those that VRAM has as well any, of the others one that is clearly colder than
 * `heat`. Lock held. */
static int32_t warm_coldest(server *s, float heat) {
    store *st = &s->st;
    int32_t coldest = NONE;
    float least = 0.0f;
    bool is_twice = false, is_in_use = false;
    for (uint32_t i = 0; i < st->n_slots; i++) {
        size_t at = index_of(s, st->slots[i].il, st->slots[i].ie);
        if (st->slot_of[at] != (int32_t)i || !warm_may_evict(s, &st->slots[i], at, heat)) continue;
        bool is_both = st->vram_of[at] != NONE;
        is_in_use = is_in_use || st->slots[i].pins > 0;
        if (st->slots[i].pins > 0 ||
            (coldest != NONE &&
             (is_both < is_twice || (is_both == is_twice && st->heat[at] >= least))))
            continue;
        least = st->heat[at];
        coldest = (int32_t)i;
        is_twice = is_both;
    }
    st->is_starved = st->is_starved || (coldest == NONE && is_in_use);
    return coldest;
}

/* Take the coldest slot from its expert. Lock held. */
static int32_t warm_evict(server *s, float heat) {
    store *st = &s->st;
    int32_t coldest = warm_coldest(s, heat);
    if (coldest == NONE) return NONE;
    slot *x = &st->slots[coldest];
    size_t at = index_of(s, x->il, x->ie);
    st->slot_of[at] = NONE;
    if (st->vram_of[at] != NONE) { /* it is still here */
        st->n_twice--;
        return coldest;
    }
    store_tell(s, x->il, x->ie, false);
    st->n_held--;
    st->n_evicted++;
    return coldest;
}

/* A slot for an expert of that heat; NONE when there is none. Lock held. */
static int32_t warm_slot(server *s, float heat) {
    store *st = &s->st;
    return st->n_free > 0 ? (int32_t)st->free[--st->n_free] : warm_evict(s, heat);
}

/* The next expert to read and a slot for it; false when there is none now. Those of --pins take any
 * slot of another. Lock held. */
static bool warm_next(server *s, size_t *expert, int32_t *i_slot) {
    store *st = &s->st;
    bool has_room = st->n_free > 0 || st->n_twice > 0;
    const uint32_t i_pin = st->i_pin;
    const uint64_t fill_n = st->fill_n;
    int64_t pin = warm_pin(st), i = pin;
    *i_slot = pin == NONE ? NONE : warm_slot(s, PIN_HEAT);
    if (*i_slot == NONE) {
        if (pin != NONE) st->i_pin = i_pin; /* come again */
        pin = NONE;
        i = warm_wanted(s);
        if (i == NONE && has_room) i = warm_fill(s, st);
        if (i == NONE) return false;
        *i_slot = warm_slot(s, st->heat[i]);
    }
    if (*i_slot == NONE) { /* what is here twice is in use just now: come again */
        st->fill_n = fill_n;
        return false;
    }
    st->slots[*i_slot].is_kept = pin != NONE;
    st->is_coming[i] = 1;
    *expert = (size_t)i;
    return true;
}

static void warm_done(server *s, size_t i, int32_t i_slot, int rc, const expert_view *x) {
    store *st = &s->st;
    slot *to = &st->slots[i_slot];
    st->is_coming[i] = 0;
    if (rc < 0) {
        st->heat[i] = -1.0f;
        st->free[st->n_free++] = (uint32_t)i_slot;
        return;
    }
    to->il = s->m.n_dense + (uint32_t)(i / s->m.n_experts);
    to->ie = (uint32_t)(i % s->m.n_experts);
    to->pins = 0;
    to->view = *x;
    st->slot_of[i] = i_slot;
    st->n_held++;
    st->n_warmed++;
    store_tell(s, to->il, to->ie, true);
    if (st->has_vram) pthread_cond_broadcast(&st->work); /* the arm may want it */
}

/* Read an expert, from the slice if it has it, else or then from the model: of two that differ the
 * model's is right. */
static int warm_read(server *s, uint32_t il, uint32_t ie, uint8_t *room, expert_view *x) {
    k3_error err = {{0}};
    int rc = K3_EMODEL;
    bool is_sliced = s->part && k3_expert_has(s->part, il, ie);
    if (is_sliced) rc = k3_expert_read(s->part, il, ie, room, x, &err);
    if (is_sliced && rc < 0 && s->e) say("%s; it is read from the model", err.text);
    if (is_sliced && rc == 0 && s->e && k3_expert_compare(s->e, il, ie, x) == 0) {
        say("expert %u of layer %u: the slice has another than the model's sums tell of; it is read from "
            "the model", ie, il);
        rc = K3_ECHECK;
    }
    if (rc < 0 && s->e) rc = k3_expert_read(s->e, il, ie, room, x, &err);
    if (rc < 0) say("%s; it is left out", err.text);
    return rc;
}

/* One thread that reads experts. */
static void *warm_main(void *arg) {
    server *s = arg;
    store *st = &s->st;
    size_t i;
    int32_t i_slot;
    pthread_mutex_lock(&st->lock);
    while (!st->is_stopping) {
        if (!warm_next(s, &i, &i_slot)) {
            pthread_cond_wait(&st->work, &st->lock);
            continue;
        }
        pthread_mutex_unlock(&st->lock);
        expert_view x;
        uint64_t one = 1;
        int rc = warm_read(s, s->m.n_dense + (uint32_t)(i / s->m.n_experts),
                           (uint32_t)(i % s->m.n_experts),
                           st->bytes + (uint64_t)i_slot * st->slot_bytes, &x);
        pthread_mutex_lock(&st->lock);
        warm_done(s, i, i_slot, rc, &x);
        if (write(s->wake_fd, &one, sizeof one) < 0) continue; /* it is awake */
    }
    pthread_mutex_unlock(&st->lock);
    return NULL;
}

/* ==== 4. VRAM ========================================================================
 *
 * With --gpu an expert may lie in a slot, in VRAM, or in both. A thread of its own copies the hottest
 * from their slots; a slot whose expert VRAM has as well is the first to make room for another, so
 * that in the end both kinds are full of different ones. When the device fails, the arm is off for
 * good: what only it held is missing, and read again like anything else if it can be read; what was
 * staged is gone until it is staged again.
 */

/* The hottest expert that VRAM lacks, and a place there for it; false when there is none now. Lock
 * held. */
static bool vram_next(server *s, uint32_t *i_slot, uint32_t *i_vram) {
    store *st = &s->st;
    int64_t hottest = NONE, to = NONE;
    float most = 0.0f, least = 0.0f;
    bool is_in_use = false;
    for (uint32_t i = 0; i < st->n_slots; i++) {
        const slot *x = &st->slots[i];
        size_t at = index_of(s, x->il, x->ie);
        if (st->slot_of[at] != (int32_t)i || st->vram_of[at] != NONE) continue;
        float heat = st->heat[at] + (x->is_kept ? PIN_HEAT : 0.0f);
        if (hottest != NONE && heat <= most) continue;
        hottest = i;
        most = heat;
    }
    if (hottest == NONE) return false;
    for (uint32_t i = 0; i < st->n_vram; i++) {
        const vram_slot *x = &st->vram[i];
        float heat = x->is_full ? 1.25f * st->heat[x->index] + 1.0f : -2.0f;
        if (x->is_kept || heat >= most) continue;
        is_in_use = is_in_use || x->pins > 0;
        if (x->pins > 0 || (to != NONE && heat >= least)) continue;
        to = i;
        least = heat;
    }
    st->is_starved = st->is_starved || (to == NONE && is_in_use);
    *i_slot = (uint32_t)hottest;
    *i_vram = (uint32_t)to;
    return to != NONE;
}

/* A place in VRAM loses its expert. Lock held. */
static void vram_evict(server *s, vram_slot *x) {
    store *st = &s->st;
    if (!x->is_full) return;
    st->vram_of[x->index] = NONE;
    st->n_in_vram--;
    x->is_full = x->is_kept = false;
    if (st->slot_of[x->index] != NONE) {
        st->n_twice--;
        return;
    }
    store_tell(s, s->m.n_dense + x->index / s->m.n_experts, x->index % s->m.n_experts, false);
    st->n_held--;
    st->n_evicted++;
}

/* The device failed. */
static void vram_off(server *s, const char *why) {
    store *st = &s->st;
    pthread_mutex_lock(&st->lock);
    if (st->has_vram) say("%s; going on without the GPU", why);
    st->has_vram = false;
    st->vram_is_lost = true;
    for (uint32_t i = 0; i < st->n_vram; i++) vram_evict(s, &st->vram[i]);
    st->i_pin = 0; /* those of --pins that only it held are read again */
    pthread_cond_broadcast(&st->work);
    pthread_mutex_unlock(&st->lock);
}

/* XXH3 of an expert's bytes in slot order, as slices and who stages name it; 0: no memory. */
static uint64_t expert_digest(const server *s, const expert_view *x) {
    uint64_t n[N_EXPERT_TENSORS], sum = 0;
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return 0;
    expert_lengths(s->m.latent, s->m.inter, n);
    XXH3_64bits_reset(hash);
    for (int k = 0; k < N_EXPERT_TENSORS; k++) XXH3_64bits_update(hash, x->p[k], (size_t)n[k]);
    sum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return sum;
}

/* Copy one slot to one place in VRAM; lock held, but not while it is copied. */
static void vram_fill(server *s, slot *from, uint32_t i_vram) {
    store *st = &s->st;
    vram_slot *to = &st->vram[i_vram];
    size_t i = index_of(s, from->il, from->ie);
    expert_view x = from->view;
    char why[512];
    vram_evict(s, to);
    from->pins++;
    to->pins++;
    st->is_uploading = true;
    bool has_sum = st->sum[i] != 0;
    pthread_mutex_unlock(&st->lock);
    if (gpu_upload(s->gpu, i_vram, x.p, why, sizeof why) < 0) vram_off(s, why);
    uint64_t sum = has_sum ? 0 : expert_digest(s, &x);
    pthread_mutex_lock(&st->lock);
    from->pins--;
    to->pins--;
    st->is_uploading = false;
    pthread_cond_broadcast(&st->work); /* its slot may go */
    if (!st->has_vram) return;
    if (st->sum[i] == 0) st->sum[i] = sum; /* its slot may go */
    to->index = (uint32_t)i;
    to->is_full = true;
    to->is_kept = from->is_kept;
    st->vram_of[i] = (int32_t)i_vram;
    st->n_in_vram++;
    st->n_twice++;
}

/* The thread that fills VRAM. Nobody wakes it when an expert that is here is used, so it looks for
 * itself now and then whether another is the hottest. */
static void *vram_main(void *arg) {
    server *s = arg;
    store *st = &s->st;
    uint32_t i_slot, i_vram;
    uint64_t one = 1;
    pthread_mutex_lock(&st->lock);
    while (!st->is_stopping) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += VRAM_LOOK_S;
        if (st->has_vram && vram_next(s, &i_slot, &i_vram)) {
            vram_fill(s, &st->slots[i_slot], i_vram);
            if (write(s->wake_fd, &one, sizeof one) < 0) continue; /* it is awake */
        } else if (st->has_vram) {
            pthread_cond_timedwait(&st->work, &st->lock, &until);
        } else {
            pthread_cond_wait(&st->work, &st->lock);
        }
    }
    pthread_mutex_unlock(&st->lock);
    return NULL;
}

/* One more measurement; the last twenty or so count. */
static void trend_add(trend *l, float x, float y) {
    const float part[] = {1, x, y, x * x, x * y};
    float *sum[] = {&l->n, &l->x, &l->y, &l->xx, &l->xy};
    for (size_t i = 0; i < COUNT(sum); i++) *sum[i] = 0.95f * *sum[i] + part[i];
}

/* The least squares' y at x; all requests alike so far: in proportion. */
static float trend_at(const trend *l, float x) {
    float spread = l->n * l->xx - l->x * l->x, rise = l->n * l->xy - l->x * l->y;
    if (l->n <= 0 || l->x <= 0) return 0;
    if (spread <= 0.01f * l->n * l->xx || rise <= 0) return l->y / l->x * x;
    float slope = rise / spread, base = (l->y - slope * l->x) / l->n;
    return base > 0 ? base + slope * x : l->y / l->x * x;
}

/* A running average of nanoseconds a pair. */
static void average(float *mean, uint64_t ns, uint32_t n_pairs) {
    if (n_pairs == 0) return;
    float now = (float)ns / (float)n_pairs;
    *mean = *mean > 0 ? 0.9f * *mean + 0.1f * now : now;
}

/* Who computes what: VRAM's experts the GPU; but of those that are here as well the CPU takes some,
 * as long as it is done with them before the GPU is with the rest. */
static void vram_share(server *s, uint32_t n_items) {
    uint32_t n_gpu = 0, n_cpu = 0;
    for (uint32_t x = 0; x < n_items; x++) {
        item *it = &s->mem.items[x];
        it->on_gpu = it->i_vram != NONE;
        n_gpu += it->on_gpu ? it->task.n : 0;
        n_cpu += !it->on_gpu && it->i_slot != NONE ? it->task.n : 0;
    }
    for (uint32_t x = 0; x < n_items && s->gpu_time.n > 0 && s->cpu_ns > 0; x++) {
        item *it = &s->mem.items[x];
        if (!it->on_gpu || it->i_slot == NONE || n_gpu == it->task.n || /* it would never be measured */
            s->cpu_ns * (float)(n_cpu + it->task.n) >= trend_at(&s->gpu_time, (float)(n_gpu - it->task.n)))
            continue;
        it->on_gpu = false;
        n_cpu += it->task.n;
        n_gpu -= it->task.n;
    }
}

/* Start what the GPU has; how many experts, 0 also when it fails. */
static uint32_t vram_begin(server *s, const tier_request *r, const float *z) {
    char why[512];
    uint32_t n = 0;
    for (uint32_t x = 0; x < r->n_experts; x++) {
        const item *it = &s->mem.items[x];
        if (it->on_gpu && !it->is_bad)
            s->gpu_items[n++] = (gpu_item){(uint32_t)it->i_vram, it->task.first, it->task.n};
    }
    if (n == 0 || gpu_begin(s->gpu, z, r->n_rows, s->gpu_items, n, s->mem.pair_row, s->mem.pair_w,
                            r->n_pairs, why, sizeof why) == 0)
        return n;
    vram_off(s, why);
    return 0;
}

/* Add the GPU's sums to Q; once more without what went bad there. False when it fails. */
static bool vram_end(server *s, const tier_request *r, const float *z, int64_t *Q,
                     uint64_t *took_ns) {
    char why[512];
    for (;;) {
        int n_bad = gpu_end(s->gpu, Q, s->gpu_bad, took_ns, why, sizeof why);
        if (n_bad < 0) vram_off(s, why);
        if (n_bad <= 0) return n_bad == 0;
        for (uint32_t x = 0, i = 0; x < r->n_experts; x++)
            if (s->mem.items[x].on_gpu && !s->mem.items[x].is_bad) s->mem.items[x].is_bad = s->gpu_bad[i++];
        bool is_any = false;
        for (uint32_t x = 0; x < r->n_experts; x++)
            is_any = is_any || (s->mem.items[x].on_gpu && !s->mem.items[x].is_bad);
        if (vram_begin(s, r, z) == 0) return !is_any;
    }
}

/* ==== 5. Computing one request =======================================================
 *
 * Experts in batches of as many pairs as scratch has room for (experts.c). */
#define BATCH_PAIRS TIER_MAX_ROWS

/* Q = the sum of every item that is here and not bad. Returns whether none went bad in it. */
static bool compute_sum(server *s, const float *z, uint32_t n_rows, uint32_t n_items, int64_t *Q) {
    bool is_good = true;
    const expert_batch all = {.format = &expert_mxfp4,
                              .math = s->math,
                              .pool = s->pool,
                              .n_threads = (int)s->n_threads,
                              .n_rows = n_rows,
                              .z = z,
                              .zp = s->mem.zp,
                              .pair_row = s->mem.pair_row,
                              .pair_w = s->mem.pair_w,
                              .Q = Q,
                              .zpair = s->mem.zpair,
                              .hpair = s->mem.hpair,
                              .local = s->mem.local,
                              .local_floats = s->mem.local_floats};
    memset(Q, 0, n_rows * s->math.latent * sizeof *Q);
    for (uint32_t x = 0; x < n_items;) {
        uint32_t n_batch = 0, n_pairs = 0;
        for (; x < n_items && n_pairs + s->mem.items[x].task.n <= BATCH_PAIRS; x++) {
            item *it = &s->mem.items[x];
            if (it->i_slot == NONE || it->is_bad || it->on_gpu) continue;
            it->task.at = n_pairs;
            n_pairs += it->task.n;
            s->mem.batch[n_batch++] = &it->task;
        }
        if (n_batch > 0) experts_batch(&all, s->mem.batch, n_batch);
    }
    for (uint32_t x = 0; x < n_items; x++) {
        item *it = &s->mem.items[x];
        it->is_bad = it->is_bad || it->task.bad_row != UINT64_MAX;
        is_good = is_good && !it->is_bad;
    }
    return is_good;
}

/* The same, once more without what went bad in it. */
static void compute_cpu(server *s, const tier_request *r, const float *z, int64_t *Q) {
    if (r->n_rows == 1) s->math.k->pack(s->mem.zp, 1, 0, z, s->math.latent);
    if (!compute_sum(s, z, r->n_rows, r->n_experts, Q))
        compute_sum(s, z, r->n_rows, r->n_experts, Q);
}

/* The same of both kinds of memory, at the same time. */
static void compute_both(server *s, const tier_request *r, const float *z, int64_t *Q) {
    uint32_t n_cpu = 0, n_gpu = 0;
    vram_share(s, r->n_experts);
    bool is_on = vram_begin(s, r, z) > 0;
    uint64_t start = clock_ns(), took_ns = 0;
    for (uint32_t x = 0; x < r->n_experts; x++) {
        item *it = &s->mem.items[x];
        it->on_gpu = it->on_gpu && is_on;
        n_gpu += it->on_gpu ? it->task.n : 0;
        n_cpu += !it->on_gpu && it->i_slot != NONE ? it->task.n : 0;
    }
    compute_cpu(s, r, z, Q);
    average(&s->cpu_ns, clock_ns() - start, n_cpu);
    if (!is_on) return;
    is_on = vram_end(s, r, z, Q, &took_ns);
    if (is_on) trend_add(&s->gpu_time, (float)n_gpu, (float)took_ns);
    if (is_on) return;
    for (uint32_t x = 0; x < r->n_experts; x++) s->mem.items[x].on_gpu = false;
    compute_cpu(s, r, z, Q); /* all over again, of what is here */
}

/* Write the payload of the reply to `p`; its length. `z` is aligned as floats are. */
static size_t compute_request(server *s, const tier_request *r, const float *z, bool is_stale,
                              uint8_t *p) {
    uint32_t n_here = 0, first = 0;
    uint8_t *served = p + TIER_FIXED_BYTES;
    int64_t *Q = (int64_t *)(void *)(served + tier_served_bytes(r->n_experts));
    memset(p, 0, TIER_FIXED_BYTES + tier_served_bytes(r->n_experts));
    for (uint32_t x = 0; x < r->n_experts; x++) {
        item *it = &s->mem.items[x];
        *it = (item){.ie = tier_get16(r->experts + 4 * x),
                     .task = {.n = tier_get16(r->experts + 4 * x + 2),
                              .first = first,
                              .bad_row = UINT64_MAX},
                     .i_slot = NONE,
                     .i_vram = NONE};
        first += it->task.n;
        n_here += !is_stale && store_pin(s, r->il, it);
    }
    for (uint32_t i = 0; i < r->n_pairs; i++) s->mem.pair_row[i] = tier_get16(r->rows + 2 * i);
    memcpy(s->mem.pair_w, r->weights, r->n_pairs * sizeof *s->mem.pair_w);
    if (n_here > 0) compute_both(s, r, z, Q);
    store_unpin(s, s->mem.items, r->n_experts);
    n_here = 0;
    for (uint32_t x = 0; x < r->n_experts; x++) {
        const item *it = &s->mem.items[x];
        bool is_in = (it->i_slot != NONE || it->on_gpu) && !it->is_bad;
        served[x / 8] |= (uint8_t)(is_in << x % 8);
        n_here += is_in;
        s->stats[TIER_STAT_GPU_SERVED] += is_in && it->on_gpu;
    }
    tier_put16(p, r->il);
    tier_put16(p + 2, n_here > 0 ? r->n_rows : 0);
    tier_put16(p + 4, r->n_experts);
    s->stats[TIER_STAT_SERVED] += n_here;
    s->stats[TIER_STAT_MISSING] += r->n_experts - n_here;
    s->stats[TIER_STAT_STALE] += is_stale;
    return tier_reply_bytes(&s->m, n_here > 0 ? r->n_rows : 0, r->n_experts);
}

/* ==== 6. Connections =================================================================
 *
 * A connection is asked who it is, then sends frames. One frame is taken at a time; while a reply
 * is not all sent nothing more is read, so that a client that does not read holds up nobody else.
 */

/* The expert on its way in, if there is one, does not arrive. */
static void stage_drop(server *s, conn *c) {
    store *st = &s->st;
    if (!c->stage.is_taking) return;
    c->stage.is_taking = false;
    pthread_mutex_lock(&st->lock);
    st->is_coming[c->stage.expert] = 0;
    st->free[st->n_free++] = (uint32_t)c->stage.i_slot;
    pthread_cond_broadcast(&st->work);
    pthread_mutex_unlock(&st->lock);
}

/* No longer a client, no longer one who stages. */
static void conn_leave(server *s, conn *c) {
    if (c->state == C_UP) s->n_clients--;
    if (c->state == C_STAGE) s->n_stagers--;
    stage_drop(s, c);
}

/* May one more line be said? Those that were not are told as soon as one may. */
static bool log_may(log_gate *g, const char *of_whom) {
    uint64_t now = clock_ns(), paid = (now - g->since_ns) / 1000000000u;
    if (paid > 0) {
        g->n_said -= paid < g->n_said ? (uint32_t)paid : g->n_said;
        g->since_ns = now;
        if (g->n_left_out > 0) say("%u more lines about %s were left out", g->n_left_out, of_whom);
        g->n_left_out = 0;
    }
    if (g->n_said == LOG_LINES) {
        g->n_left_out++;
        return false;
    }
    g->n_said++;
    return true;
}

static void conn_say(server *s, const conn *c, const char *what) {
    if (log_may(&s->gate[c->is_known], c->is_known ? "clients" : "strangers"))
        say("client %u, %s: %s", c->number, c->peer, what);
}

static void conn_close(server *s, conn *c, const char *why) {
    conn_leave(s, c);
    if (why && *why) {
        s->stats[TIER_STAT_BAD]++;
        conn_say(s, c, why);
    }
    if (c->tls) tier_tls_end(c->tls);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c->told);
    XXH3_freeState(c->stage.hash);
    memset(c, 0, sizeof *c);
    c->fd = -1;
}

/* How many bytes went or came, with TLS or without; 0, none now; -1, the connection is over. */
static ssize_t conn_send(conn *c, const uint8_t *p, size_t n) {
    if (c->tls) return tier_tls_send(c->tls, p, n);
    ssize_t put = send(c->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
    return put < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : put;
}

static ssize_t conn_recv(conn *c, uint8_t *p, size_t n) {
    if (c->tls) return tier_tls_recv(c->tls, p, n);
    ssize_t got = recv(c->fd, p, n, MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    return got > 0 ? got : -1;
}

/* Room for frames both ways; false when there is no memory. */
static bool conn_room(conn *c, size_t in, size_t out) {
    uint8_t *a = realloc(c->in, in), *b = realloc(c->out, out);
    if (a) c->in = a;
    if (b) c->out = b;
    if (!a || !b) return false;
    c->in_cap = in;
    c->out_cap = out;
    return true;
}

static const char *const FRAME_NAME[TIER_N_TYPES] = {
    "?",    "hello", "challenge", "proof", "welcome", "refuse", "resident", "request", "reply",
    "wish", "stats", "goodbye",   "begin", "offer",   "piece",  "commit",   "verdict"};

/* One frame for the dump: a line of what it says, then its bytes, the first 256 of them. */
static void dump_frame(server *s, const conn *c, bool is_in, const uint8_t *frame) {
    uint32_t n = TIER_HEAD_BYTES + tier_get32(frame + 8), type = frame[4];
    const uint8_t *p = frame + TIER_HEAD_BYTES;
    if (!s->dump) return;
    fprintf(s->dump, "%.6f client %u %s %s, %u bytes, id %llu",
            (double)(clock_ns() - s->start_ns) * 1e-9, c->number, is_in ? "->" : "<-",
            FRAME_NAME[type], n, (unsigned long long)tier_get64(frame + 16));
    if (type == TIER_REQUEST || type == TIER_REPLY)
        fprintf(s->dump, ", layer %u, rows %u, experts %u, %u %s, %u %s", tier_get16(p),
                tier_get16(p + 2), tier_get16(p + 4), tier_get32(p + 8),
                type == TIER_REQUEST ? "pairs" : "ns queued", tier_get32(p + 12),
                type == TIER_REQUEST ? "us to wait" : "ns computed");
    for (uint32_t i = 0; i < n && i < 256; i += 16) {
        fprintf(s->dump, "\n  %06x ", i);
        for (uint32_t k = i; k < i + 16 && k < n; k++) fprintf(s->dump, " %02x", frame[k]);
        fprintf(s->dump, "%*s", (int)(i + 16 > n ? 3 * (i + 16 - n) + 2 : 2), "");
        for (uint32_t k = i; k < i + 16 && k < n; k++)
            fputc(frame[k] >= 0x20 && frame[k] < 0x7f ? frame[k] : '.', s->dump);
    }
    fputc('\n', s->dump);
}

/* Send what is left in `out`; false when the connection was closed. */
static bool conn_flush(server *s, conn *c) {
    while (c->i_out < c->n_out) {
        ssize_t n = conn_send(c, c->out + c->i_out, c->n_out - c->i_out);
        if (n == 0) return true;
        if (n < 0) {
            conn_close(s, c, c->tls ? tier_tls_why(c->tls) : NULL);
            return false;
        }
        c->i_out += (size_t)n;
        c->sent_ns = clock_ns();
        s->stats[TIER_STAT_OUT_BYTES] += (uint64_t)n;
    }
    c->i_out = c->n_out = 0;
    if (c->state != C_CLOSING) return true;
    conn_close(s, c, NULL);
    return false;
}

/* Add a frame whose payload of n bytes lies at the end of `out`. */
static void conn_add(server *s, conn *c, enum tier_type type, uint64_t id, size_t n) {
    uint8_t *frame = c->out + c->n_out;
    c->n_out += tier_seal(frame, type, id, (uint32_t)n);
    c->sent_ns = clock_ns();
    dump_frame(s, c, false, frame);
}

/* Where the payload of the next frame goes. */
static uint8_t *conn_payload(conn *c) { return c->out + c->n_out + TIER_HEAD_BYTES; }

/* Say why, then close. */
static bool conn_refuse(server *s, conn *c, enum tier_type type, const char *why) {
    size_t n = strlen(why);
    if (n > TIER_MAX_TEXT) n = TIER_MAX_TEXT;
    if (c->n_out + TIER_HEAD_BYTES + n > c->out_cap) {
        conn_close(s, c, why);
        return false;
    }
    memcpy(conn_payload(c), why, n);
    conn_add(s, c, type, 0, n);
    conn_leave(s, c);
    c->state = C_CLOSING;
    if (type == TIER_REFUSE) {
        char said[TIER_MAX_TEXT + 16];
        snprintf(said, sizeof said, "refused: %s", why);
        s->stats[TIER_STAT_BAD]++;
        s->stats[TIER_STAT_REFUSED]++;
        conn_say(s, c, said);
    }
    return conn_flush(s, c);
}

/* Tell a client of layers that changed since it was told last. */
static bool conn_tell(server *s, conn *c) {
    store *st = &s->st;
    size_t map = tier_map_bytes(s->m.n_experts), n = 0;
    uint8_t *p = conn_payload(c);
    pthread_mutex_lock(&st->lock);
    for (uint32_t i = 0; i < s->n_moe; i++) {
        if (c->told[i] == st->version[i]) continue;
        c->told[i] = st->version[i];
        tier_put16(p + n, s->m.n_dense + i);
        tier_put16(p + n + 2, 0);
        memcpy(p + n + 4, st->held + i * map, map);
        n += 4 + map;
    }
    c->told_changes = st->n_changes;
    pthread_mutex_unlock(&st->lock);
    conn_add(s, c, TIER_RESIDENT, 0, n);
    return conn_flush(s, c);
}

/* Experts there is room for, of either kind of memory; lock held. */
static uint32_t capacity(const server *s) {
    uint64_t n = (uint64_t)s->st.n_slots + (s->st.has_vram ? s->st.n_vram : 0),
             all = (uint64_t)s->n_moe * s->m.n_experts;
    return (uint32_t)(n < all ? n : all);
}

static void conn_add_welcome(server *s, conn *c) {
    uint8_t *p = conn_payload(c);
    pthread_mutex_lock(&s->st.lock);
    tier_put32(p, capacity(s));
    tier_put32(p + 4, s->st.n_held);
    pthread_mutex_unlock(&s->st.lock);
    tier_put32(p + 8, TIER_MAX_ROWS);
    tier_put32(p + 12, s->st.n_readable);
    tier_put64(p + 16, s->has_model ? s->m.sampled : 0);
    tier_put64(p + 24, s->has_model ? s->m.by_sums : 0);
    conn_add(s, c, TIER_WELCOME, 0, TIER_WELCOME_BYTES);
}

static bool stage_welcome(server *s, conn *c, const tier_model *m);

/* Connections of that address that are welcome to look. */
static uint32_t lookers_from(const server *s, const uint8_t from[8]) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < MAX_CONNS; i++)
        n += s->conns[i].state == C_STATUS && memcmp(s->conns[i].from, from, 8) == 0;
    return n;
}

/* One more wants to look: when there are as many as there may be, one goes, of the address that has
 * most, who has said nothing for longest. */
static void lookers_thin(server *s) {
    conn *last = NULL;
    uint32_t n_all = 0, most = 0;
    for (uint32_t i = 0; i < MAX_CONNS; i++) {
        conn *c = &s->conns[i];
        if (c->state != C_STATUS) continue;
        uint32_t n = lookers_from(s, c->from);
        n_all++;
        if (n > most || (n == most && c->since_ns < last->since_ns)) last = c;
        if (n > most) most = n;
    }
    if (n_all >= MAX_LOOKERS) conn_refuse(s, last, TIER_GOODBYE, "others want to look: places are few");
}

/* Known and fit: the client learns what is here. */
static bool conn_welcome(server *s, conn *c) {
    tier_hello h = {.role = TIER_LOOKS};
    char why[TIER_MAX_TEXT];
    if (tier_hello_parse(c->talk.hello, TIER_HELLO_BYTES, &h) == NULL && h.role == TIER_STAGES)
        return stage_welcome(s, c, &h.model);
    bool is_client = h.role == TIER_ASKS;
    if (is_client && !s->has_model)
        return conn_refuse(s, c, TIER_REFUSE, "no experts yet: `k3 stage` brings some");
    if (is_client && tier_model_differs(&s->m, &h.model, why, sizeof why))
        return conn_refuse(s, c, TIER_REFUSE, why);
    if (is_client && s->n_clients == s->o.clients)
        return conn_refuse(s, c, TIER_REFUSE, "as many clients as it takes; see --clients");
    size_t in = TIER_HEAD_BYTES + tier_most_bytes(&s->m, TIER_REQUEST, true, TIER_MAX_ROWS),
           reply = TIER_HEAD_BYTES + tier_most_bytes(&s->m, TIER_REPLY, false, TIER_MAX_ROWS),
           first = 2 * TIER_HEAD_BYTES + TIER_WELCOME_BYTES + tier_resident_bytes(&s->m, s->n_moe);
    if (in < TIER_HEAD_BYTES + TIER_MAX_WISHES * 4) in = TIER_HEAD_BYTES + TIER_MAX_WISHES * 4;
    if (is_client && (!(c->told = malloc(s->n_moe * sizeof *c->told)) ||
                      !conn_room(c, in, (reply > first ? reply : first) + 1024)))
        return conn_refuse(s, c, TIER_REFUSE, "no memory for another client");
    if (!is_client) lookers_thin(s);
    conn_add_welcome(s, c);
    c->is_known = true;
    c->state = is_client ? C_UP : C_STATUS;
    if (!is_client) return conn_flush(s, c);
    s->n_clients++;
    memset(c->told, 0xff, s->n_moe * sizeof *c->told);
    return conn_tell(s, c);
}

/* Is a key of this use good for a client of that role? Who stages proves a key to stage, where there is
 * any, else one to ask; who only looks proves either, where there is one to ask. A role that no key is
 * good for is let in without. */
static bool key_counts(const server *s, uint8_t role, enum key_use use) {
    const uint32_t *n = s->o.n_keys;
    if (role == TIER_STAGES) return n[use] > 0 && (use == KEY_STAGES || n[KEY_STAGES] == 0);
    if (role == TIER_LOOKS) return n[use] > 0 && n[KEY_ASKS] > 0;
    return n[use] > 0 && use == KEY_ASKS;
}

static bool conn_hello(server *s, conn *c, const uint8_t *p, size_t n) {
    tier_hello h;
    const char *why = tier_hello_parse(p, n, &h);
    if (why) return conn_refuse(s, c, TIER_REFUSE, why);
    memcpy(c->talk.hello, p, TIER_HELLO_BYTES);
    memset(c->talk.binding, 0, sizeof c->talk.binding);
    if (!key_counts(s, h.role, KEY_ASKS) && !key_counts(s, h.role, KEY_STAGES))
        return conn_welcome(s, c);
    if (c->tls && !tier_tls_binding(c->tls, c->talk.binding))
        return conn_refuse(s, c, TIER_REFUSE, "no key over TLS: OpenSSL has no exporter here");
    if (!tier_nonce(c->talk.nonce)) return conn_refuse(s, c, TIER_REFUSE, "no random bytes");
    memcpy(conn_payload(c), c->talk.nonce, TIER_NONCE_BYTES);
    conn_add(s, c, TIER_CHALLENGE, 0, TIER_CHALLENGE_BYTES);
    c->state = C_PROOF;
    return conn_flush(s, c);
}

/* The key of a proof, among those that count for the connection's role; NULL and why: none of them. */
static const tier_key *key_find(const server *s, const conn *c, const uint8_t *proof,
                                const char **why) {
    uint8_t want[TIER_PROOF_BYTES], role = c->talk.hello[TIER_HELLO_ROLE];
    const tier_key *found = NULL;
    *why = TIER_WHY_KEY;
    for (int use = 0; use < N_KEY_USES; use++)
        for (uint32_t i = 0; key_counts(s, role, (enum key_use)use) && i < s->o.n_keys[use]; i++) {
            if (!tier_proof(&s->key[use][i], TIER_CLIENT, &c->talk, want)) *why = TIER_NO_HMAC;
            else if (CRYPTO_memcmp(want, proof, sizeof want) == 0) found = &s->key[use][i];
        }
    return found;
}

static bool conn_proof(server *s, conn *c, const uint8_t *p, size_t n) {
    const char *why = TIER_WHY_KEY;
    const tier_key *key = n == TIER_PROOF_BYTES ? key_find(s, c, p, &why) : NULL;
    if (!key) return conn_refuse(s, c, TIER_REFUSE, why);
    if (!tier_proof(key, TIER_SERVER, &c->talk, conn_payload(c)))
        return conn_refuse(s, c, TIER_REFUSE, TIER_NO_HMAC);
    conn_add(s, c, TIER_PROOF, 0, TIER_PROOF_BYTES);
    return conn_welcome(s, c);
}

static uint64_t rss_bytes(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*s %llu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void stats_take(server *s, uint64_t out[TIER_N_STATS]) {
    pthread_mutex_lock(&s->st.lock);
    s->stats[TIER_STAT_CAPACITY] = capacity(s);
    s->stats[TIER_STAT_VRAM_CAPACITY] = s->st.has_vram ? s->st.n_vram : 0;
    s->stats[TIER_STAT_HELD] = s->st.n_held;
    s->stats[TIER_STAT_VRAM_HELD] = s->st.n_in_vram;
    s->stats[TIER_STAT_WARMED] = s->st.n_warmed;
    s->stats[TIER_STAT_EVICTED] = s->st.n_evicted;
    pthread_mutex_unlock(&s->st.lock);
    s->stats[TIER_STAT_UPTIME_MS] = (clock_ns() - s->start_ns) / 1000000u;
    s->stats[TIER_STAT_TOTAL] = (uint64_t)s->n_moe * s->m.n_experts;
    s->stats[TIER_STAT_CLIENTS] = s->n_clients;
    s->stats[TIER_STAT_RSS_BYTES] = rss_bytes();
    bool is_dead;
    s->stats[TIER_STAT_UNWRITTEN] = keep_left(&s->keep, &is_dead);
    s->stats[TIER_STAT_UNKEPT] = is_dead;
    memcpy(out, s->stats, sizeof s->stats);
}

static uint32_t saturate(uint64_t ns) { return ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX; }

static bool conn_request(server *s, conn *c, const tier_head *h, const uint8_t *p) {
    tier_request r;
    const char *why = tier_request_parse(&s->m, TIER_MAX_ROWS, p, h->n, &r);
    if (why) {
        conn_close(s, c, why);
        return false;
    }
    uint64_t start = clock_ns(), queued = start - c->arrived_ns;
    uint8_t *to = conn_payload(c);
    size_t n = compute_request(s, &r, (const float *)(const void *)r.z,
                               r.n_experts > 0 && queued / 1000 > r.wait_us, to);
    uint64_t took = clock_ns() - start;
    tier_put32(to + 8, saturate(queued));
    tier_put32(to + 12, saturate(took));
    s->stats[TIER_STAT_REQUESTS]++;
    s->stats[TIER_STAT_COMPUTE_NS] += took;
    conn_add(s, c, TIER_REPLY, h->id, n);
    return conn_flush(s, c);
}

static bool conn_wish(server *s, conn *c, const uint8_t *p, size_t n) {
    bool is_good = n % 4 == 0;
    for (size_t k = 0; is_good && k < n; k += 4) {
        uint32_t il = tier_get16(p + k), ie = tier_get16(p + k + 2);
        is_good = il >= s->m.n_dense && il < s->m.n_layers && ie < s->m.n_experts;
    }
    if (is_good)
        store_wish(s, p, n);
    else
        conn_close(s, c, "a wish for no expert");
    return is_good;
}

/* ---- Staging ----
 *
 * Experts that come over the wire, one from each connection at a time, piece by piece straight into
 * a slot of their own. The sum is taken as pieces come, so that no frame takes longer than one
 * request. What is whole and right becomes resident; anything else ends that connection, and its
 * slot is free again. An expert that could not be read again here is kept for good.
 *
 * Files of one's own win. An expert that can be read here is read here: the offer makes it wanted, and
 * once it is here the sum that was offered must be its own, or the stager has another model. So bytes
 * are taken only of experts that cannot be read here; where sums tell of those all the same (a damaged
 * file), they must fit. What is taken makes room for itself only where nothing is lost.
 */

/* Experts that are offered, and can be read here, count as wanted so often: they make room where hardly
 * anybody wants what is there. */
#define STAGE_HEAT 16.0f

/* Is the other end of a unix socket a process of our own user, or root? */
static bool is_own_user(int fd) {
    struct ucred who = {.pid = 0};
    int domain = 0;
    socklen_t n = sizeof domain, n_who = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) == 0 && domain == AF_UNIX &&
           getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n_who) == 0 &&
           (who.uid == geteuid() || who.uid == 0);
}

/* May this connection stage? What the options ask of it must hold; where they ask nothing, it must come
 * from our own user through a unix socket. NULL, or why not. */
static const char *stage_right(const server *s, const conn *c) {
    const char *name = s->o.stage_name;
    if (name && (!c->tls || !tier_tls_is_named(c->tls, name)))
        return "may not stage: this box wants a certificate of the name that its --stage-name gives";
    if (name || s->o.n_keys[KEY_STAGES] > 0 || is_own_user(c->fd)) return NULL; /* a key was proven */
    return "may not stage: start this box with --stage-psk-file FILE or --stage-name NAME, or stage "
           "through its unix: socket as its own user";
}

static int memory_open(server *s);
static void memory_close(server *s);

/* Known; what it wants to bring is another matter. */
static bool stage_welcome(server *s, conn *c, const tier_model *m) {
    char why[TIER_MAX_TEXT];
    const char *wrong = stage_right(s, c);
    if (wrong) return conn_refuse(s, c, TIER_REFUSE, wrong);
    if (s->has_model && tier_model_differs(&s->m, m, why, sizeof why))
        return conn_refuse(s, c, TIER_REFUSE, why);
    if (!s->has_model && strcmp(m->numerics, K3_NUMERICS_ID) != 0)
        return conn_refuse(s, c, TIER_REFUSE, TIER_WHY_MODEL "numerics " K3_NUMERICS_ID " here");
    if (!s->has_model && !tier_model_is_stageable(m))
        return conn_refuse(s, c, TIER_REFUSE, TIER_WHY_MODEL "a geometry that none has");
    if (s->n_stagers == MAX_STAGERS)
        return conn_refuse(s, c, TIER_REFUSE, "four are staging already; come back later");
    size_t out = 4096 + tier_resident_bytes(m, m->n_layers - m->n_dense);
    if (!conn_room(c, TIER_HEAD_BYTES + tier_stage_bytes(TIER_PIECE), out) ||
        !(c->told = malloc((m->n_layers - m->n_dense) * sizeof *c->told)) ||
        !(c->stage.hash = XXH3_createState()))
        return conn_refuse(s, c, TIER_REFUSE, "no memory for who stages");
    conn_add_welcome(s, c);
    c->is_known = true;
    c->state = C_STAGE;
    s->n_stagers++;
    return conn_flush(s, c);
}

static float as_float(const uint8_t *p) {
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

/* Is config.json there? 1, this one; 0, none; -1, another one: it may be somebody's. */
static int stage_config_there(const char *path, const uint8_t *config, size_t n) {
    size_t n_there = 0;
    if (access(path, F_OK) != 0) return 0;
    char *there = slice_file_read(path, TIER_MAX_CONFIG, &n_there);
    bool is_same = there && n_there == n && memcmp(there, config, n) == 0;
    free(there);
    return is_same ? 1 : -1;
}

/* Keep config.json, if it describes what is brought. NULL, or why not. */
static const char *stage_config(server *s, const uint8_t *config, size_t n) {
    char path[4352];
    k3_shape sh;
    k3_error err = {{0}};
    if (n == 0) return "it keeps what is staged, and no config.json came along";
    snprintf(path, sizeof path, "%s/config.json", s->o.keep_dir);
    int there = stage_config_there(path, config, n);
    if (there < 0) {
        say("--keep %s: of something else; empty the directory, or name another", path);
        return TIER_WHY_MODEL "its --keep directory has another config.json; empty it there";
    }
    if (!there && !slice_file_write(s->o.keep_dir, "config.json", (const char *)config, n)) {
        say("--keep %s: %s", path, strerror(errno));
        return "it cannot write to its --keep directory";
    }
    const tier_model *m = &s->m;
    if (k3_config_read(&sh, s->o.keep_dir, &err) == 0 && sh.n_layers == m->n_layers &&
        sh.n_dense == m->n_dense && sh.n_experts == m->n_experts && sh.latent == m->latent &&
        sh.expert_inter == m->inter && sh.top_k == m->top_k && sh.situ_beta == s->math.beta &&
        sh.situ_linear_beta == s->math.linear_beta)
        return NULL;
    if (!there) unlink(path);
    return TIER_WHY_MODEL "its config.json describes another than it brings";
}

/* Experts were written, for the thread that does it: when VRAM has them as well their slots may go. */
static void stage_wrote(void *user, const slice_expert *x, uint32_t n) {
    server *s = user;
    uint64_t one = 1;
    pthread_mutex_lock(&s->st.lock);
    for (uint32_t k = 0; k < n; k++) s->st.is_written[index_of(s, x[k].il, x[k].ie)] = 1;
    pthread_cond_broadcast(&s->st.work);
    pthread_mutex_unlock(&s->st.lock);
    if (write(s->wake_fd, &one, sizeof one) < 0) return; /* it is awake */
}

/* From now on what is staged is kept. */
static void stage_keep(server *s, const slice *man) {
    for (uint32_t k = 0; k < man->n; k++)
        s->st.is_written[index_of(s, man->list[k].il, man->list[k].ie)] = 1;
    s->keep.wrote = stage_wrote;
    s->keep.user = s;
    if (!keep_start(&s->keep, s->o.keep_dir, man, s->expert_bytes))
        say("--keep %s: no memory or no thread for it; nothing is kept", s->o.keep_dir);
}

/* Of a model that was just taken: kept from its first expert on. */
static void stage_keep_first(server *s, const uint8_t *config, size_t n) {
    slice man = {.version = 2,
                 .sampled = s->m.sampled,
                 .by_sums = s->m.by_sums,
                 .config_sum = XXH3_64bits(config, n),
                 .n_layers = s->m.n_layers,
                 .n_dense = s->m.n_dense,
                 .n_experts = s->m.n_experts,
                 .latent = s->m.latent,
                 .inter = s->m.inter,
                 .top_k = s->m.top_k,
                 .beta_bits = k3_f32_bits(s->math.beta),
                 .linear_beta_bits = k3_f32_bits(s->math.linear_beta)};
    snprintf(man.numerics, sizeof man.numerics, "%s", K3_NUMERICS_ID);
    stage_keep(s, &man);
}

/* A box without a model takes this one. NULL, or why not. */
static const char *stage_adopt(server *s, const tier_model *m, const uint8_t *p, size_t n_p) {
    uint64_t n[N_EXPERT_TENSORS];
    const char *why = NULL;
    s->m = *m;
    s->m.numerics = K3_NUMERICS_ID;
    s->n_moe = m->n_layers - m->n_dense;
    s->expert_bytes = expert_lengths(m->latent, m->inter, n);
    s->math.latent = m->latent;
    s->math.inter = m->inter;
    s->math.beta = as_float(p);
    s->math.linear_beta = as_float(p + 4);
    int rc = memory_open(s);
    if (rc == DONE && s->o.keep_dir)
        why = stage_config(s, p + TIER_BEGIN_BYTES, n_p - TIER_BEGIN_BYTES);
    s->has_model = rc == DONE && !why;
    if (s->has_model && s->o.keep_dir)
        stage_keep_first(s, p + TIER_BEGIN_BYTES, n_p - TIER_BEGIN_BYTES);
    if (s->has_model) {
        say("takes %llu experts of the model with fingerprint %016llx; room for %u",
            (unsigned long long)s->n_moe * m->n_experts, (unsigned long long)m->sampled,
            s->st.n_slots + s->st.n_vram);
        return NULL;
    }
    memory_close(s);
    s->n_moe = 0;
    if (why) return why;
    if (rc != FAIL_BUDGET) return "this box cannot hold experts: what its k3-tier printed says why";
    return TIER_WHY_ROOM "this box holds not one expert: give its k3-tier more --ram";
}

static bool stage_begin(server *s, conn *c, const uint8_t *p, size_t n) {
    tier_hello h;
    uint64_t lengths[N_EXPERT_TENSORS];
    char text[TIER_MAX_TEXT];
    const char *why = NULL;
    tier_hello_parse(c->talk.hello, TIER_HELLO_BYTES, &h);
    if (n < TIER_BEGIN_BYTES || c->stage.has_begun || !tier_is_finite(p, 2) || !(as_float(p) > 0) ||
        !(as_float(p + 4) > 0) ||
        tier_get64(p + 8) != expert_lengths(h.model.latent, h.model.inter, lengths)) {
        conn_close(s, c, "a begin that makes no sense");
        return false;
    }
    if (!s->has_model) why = stage_adopt(s, &h.model, p, n);
    if (!why) why = tier_model_differs(&s->m, &h.model, text, sizeof text);
    if (!why && (as_float(p) != s->math.beta || as_float(p + 4) != s->math.linear_beta))
        why = TIER_WHY_MODEL "its SiTU betas differ";
    if (why) return conn_refuse(s, c, TIER_REFUSE, why);
    c->stage.has_begun = true;
    conn_add_welcome(s, c);
    memset(c->told, 0xff, s->n_moe * sizeof *c->told);
    return conn_tell(s, c);
}

static bool stage_answer(server *s, conn *c, uint64_t id, size_t i, enum tier_verdict v) {
    uint8_t *p = conn_payload(c);
    memset(p, 0, TIER_VERDICT_BYTES);
    tier_put16(p, s->m.n_dense + (uint32_t)(i / s->m.n_experts));
    tier_put16(p + 2, (uint32_t)(i % s->m.n_experts));
    p[4] = (uint8_t)v;
    conn_add(s, c, TIER_VERDICT, id, TIER_VERDICT_BYTES);
    return conn_flush(s, c);
}

/* An expert that can be read here is offered, and is not here: it is wanted. Lock held. */
static enum tier_verdict stage_wish(server *s, size_t i) {
    store *st = &s->st;
    if (st->heat[i] < STAGE_HEAT) {
        if (st->n_free == 0 && warm_coldest(s, STAGE_HEAT) == NONE) return TIER_FULL;
        st->heat[i] = STAGE_HEAT;
    }
    pthread_cond_broadcast(&st->work);
    return TIER_BUSY;
}

/* Is what is here of expert i what was offered, by its sum? Lock held. */
static bool stage_is_same(server *s, size_t i, uint64_t sum) {
    store *st = &s->st;
    if (st->sum[i] == 0 && st->slot_of[i] != NONE)
        st->sum[i] = expert_digest(s, &st->slots[st->slot_of[i]].view);
    return st->sum[i] == 0 || st->sum[i] == sum;
}

/* Room for expert i, or why there is none. False: what is here is another expert than the one of that
 * sum. */
static bool stage_room(server *s, size_t i, uint64_t sum, int32_t *i_slot, enum tier_verdict *v) {
    store *st = &s->st;
    bool is_same = true;
    *v = TIER_WANTS;
    pthread_mutex_lock(&st->lock);
    if (store_has(st, i)) {
        is_same = stage_is_same(s, i, sum);
        *v = TIER_HAS;
    } else if (st->is_coming[i]) {
        *v = TIER_BUSY;
    } else if (st->heat[i] >= 0) {
        *v = stage_wish(s, i);
    } else if ((*i_slot = warm_slot(s, 0)) == NONE) {
        *v = TIER_FULL;
    } else {
        st->is_coming[i] = 1;
    }
    pthread_mutex_unlock(&st->lock);
    return is_same;
}

/* Is there a slot whose expert VRAM has, and that stays only until --keep has written it? Lock held. */
static bool stage_has_unwritten(const server *s) {
    const store *st = &s->st;
    for (uint32_t i = 0; s->o.keep_dir && i < st->n_slots; i++) {
        size_t at = index_of(s, st->slots[i].il, st->slots[i].ie);
        if (st->slot_of[at] == (int32_t)i && st->slots[i].is_kept && st->vram_of[at] != NONE &&
            !st->is_written[at])
            return true;
    }
    return false;
}

/* Is the frame at the front of `in` an offer for which there is room as soon as VRAM, and the disk
 * with --keep, have taken what lies in a slot? */
static bool stage_must_wait(server *s, const conn *c) {
    store *st = &s->st;
    uint32_t i_slot, i_vram;
    if (c->state != C_STAGE || !c->stage.has_begun || c->in[4] != TIER_OFFER) return false;
    pthread_mutex_lock(&st->lock);
    bool is_full = st->has_vram && st->n_free == 0 && warm_coldest(s, 0) == NONE,
         is_coming = is_full && (st->is_uploading || vram_next(s, &i_slot, &i_vram)),
         is_unwritten = is_full && !is_coming && stage_has_unwritten(s);
    pthread_mutex_unlock(&st->lock);
    return is_coming || (is_unwritten && keep_hurry(&s->keep));
}

static bool stage_offer(server *s, conn *c, uint64_t id, const uint8_t *p, size_t n) {
    uint32_t il, ie;
    bool is_good = c->stage.has_begun && !c->stage.is_taking &&
                   tier_expert_parse(&s->m, p, n, TIER_OFFER_BYTES, &il, &ie);
    if (!is_good || tier_get32(p + 4) || tier_get64(p + 8) != s->expert_bytes) {
        conn_close(s, c, "an offer of no expert");
        return false;
    }
    size_t i = index_of(s, il, ie);
    enum tier_verdict v;
    if (!stage_room(s, i, tier_get64(p + 16), &c->stage.i_slot, &v)) {
        char why[TIER_MAX_TEXT];
        snprintf(why, sizeof why, TIER_WHY_MODEL "expert %u of layer %u is not the one here", ie, il);
        return conn_refuse(s, c, TIER_REFUSE, why);
    }
    if (v == TIER_WANTS) {
        c->stage.is_taking = true;
        c->stage.expert = i;
        c->stage.got = 0;
        c->stage.sum = tier_get64(p + 16);
        XXH3_64bits_reset(c->stage.hash);
    }
    return stage_answer(s, c, id, i, v);
}

static bool stage_piece(server *s, conn *c, const uint8_t *p, size_t n) {
    incoming *g = &c->stage;
    if (!g->is_taking || n <= TIER_PIECE_BYTES || tier_get64(p) != g->got ||
        n - TIER_PIECE_BYTES > s->expert_bytes - g->got) {
        conn_close(s, c, "a piece of no expert");
        return false;
    }
    n -= TIER_PIECE_BYTES;
    memcpy(s->st.bytes + (uint64_t)g->i_slot * s->st.slot_bytes + g->got, p + TIER_PIECE_BYTES, n);
    XXH3_64bits_update(g->hash, p + TIER_PIECE_BYTES, n);
    g->got += n;
    return true;
}

/* Scale codes are checked where bytes enter (NUMERICS 2), and whatever sums of our own there are of an
 * expert that cannot be read. NULL, or what is wrong. */
static const char *stage_check(const server *s, uint32_t il, uint32_t ie, const expert_view *x) {
    uint64_t n[N_EXPERT_TENSORS];
    uint8_t top = 0;
    expert_lengths(s->m.latent, s->m.inter, n);
    for (int k = W1_SCALE; k < N_EXPERT_TENSORS; k += 2)
        for (uint64_t i = 0; i < n[k]; i++) top = x->p[k][i] > top ? x->p[k][i] : top;
    if (top > K3_SCALE_MAX) return "has a scale code above 252: the model it is from is damaged";
    if ((s->part && k3_expert_compare(s->part, il, ie, x) == 0) ||
        (s->e && k3_expert_compare(s->e, il, ie, x) == 0))
        return "does not match the sum that this box has of it";
    return NULL;
}

/* Whole and right: expert i is here. */
static void stage_done(server *s, size_t i, int32_t i_slot, const expert_view *x, uint64_t sum) {
    store *st = &s->st;
    slot *to = &st->slots[i_slot];
    pthread_mutex_lock(&st->lock);
    st->is_coming[i] = 0;
    to->il = s->m.n_dense + (uint32_t)(i / s->m.n_experts);
    to->ie = (uint32_t)(i % s->m.n_experts);
    to->pins = 0;
    to->is_kept = st->heat[i] < 0;
    to->view = *x;
    st->sum[i] = sum;
    st->slot_of[i] = i_slot;
    st->n_held++;
    s->stats[TIER_STAT_STAGED]++;
    store_tell(s, to->il, to->ie, true);
    const slice_expert kept = {to->il, to->ie, sum};
    bool is_kept = to->is_kept && !st->is_written[i];
    pthread_cond_broadcast(&st->work); /* VRAM may want it, or another its slot */
    pthread_mutex_unlock(&st->lock);
    if (is_kept) keep_add(&s->keep, &kept, x->p[0]); /* its slot stays its own until then */
}

static bool stage_commit(server *s, conn *c, uint64_t id, const uint8_t *p, size_t n) {
    incoming *g = &c->stage;
    uint32_t il, ie;
    uint64_t lengths[N_EXPERT_TENSORS];
    expert_view x;
    char why[TIER_MAX_TEXT];
    if (!tier_expert_parse(&s->m, p, n, TIER_COMMIT_BYTES, &il, &ie) || tier_get32(p + 4) ||
        !g->is_taking || index_of(s, il, ie) != g->expert || g->got != s->expert_bytes) {
        conn_close(s, c, "a commit of what is not there");
        return false;
    }
    x.p[0] = s->st.bytes + (uint64_t)g->i_slot * s->st.slot_bytes;
    expert_lengths(s->m.latent, s->m.inter, lengths);
    for (int k = 1; k < N_EXPERT_TENSORS; k++) x.p[k] = x.p[k - 1] + lengths[k - 1];
    bool is_right = XXH3_64bits_digest(g->hash) == g->sum && tier_get64(p + 8) == g->sum;
    const char *wrong = is_right ? stage_check(s, il, ie, &x) : "does not match its sum";
    if (wrong) {
        snprintf(why, sizeof why, TIER_WHY_SUM "expert %u of layer %u %s", ie, il, wrong);
        return conn_refuse(s, c, TIER_REFUSE, why);
    }
    g->is_taking = false;
    stage_done(s, g->expert, g->i_slot, &x, g->sum);
    return stage_answer(s, c, id, g->expert, TIER_HAS);
}

static bool conn_stats(server *s, conn *c, uint64_t id) {
    stats_take(s, (uint64_t *)(void *)conn_payload(c));
    conn_add(s, c, TIER_STATS, id, TIER_N_STATS * 8);
    return conn_flush(s, c);
}

static bool stage_act(server *s, conn *c, const tier_head *h, const uint8_t *p) {
    if (h->type == TIER_STATS && c->stage.has_begun && !c->stage.is_taking) {
        keep_hurry(&s->keep);
        return conn_stats(s, c, h->id);
    }
    switch (h->type) {
    case TIER_BEGIN: return stage_begin(s, c, p, h->n);
    case TIER_OFFER: return stage_offer(s, c, h->id, p, h->n);
    case TIER_PIECE: return stage_piece(s, c, p, h->n);
    case TIER_COMMIT: return stage_commit(s, c, h->id, p, h->n);
    default: conn_close(s, c, h->type == TIER_GOODBYE ? NULL : "a frame out of turn"); return false;
    }
}

/* Act on the frame at the front of `in`; false when the connection was closed. */
static bool conn_act(server *s, conn *c) {
    tier_head h;
    const uint8_t *p = c->in + TIER_HEAD_BYTES;
    const char *why = tier_head_parse(c->in, &h);
    bool is_open = false;
    if (!why && tier_sum(c->in, h.n) != h.sum) why = "a frame that does not match its sum";
    if (why) {
        conn_close(s, c, why);
        return false;
    }
    dump_frame(s, c, true, c->in);
    if (c->state == C_HELLO && h.type == TIER_HELLO) {
        is_open = conn_hello(s, c, p, h.n);
    } else if (c->state == C_PROOF && h.type == TIER_PROOF) {
        is_open = conn_proof(s, c, p, h.n);
    } else if (c->state == C_UP && h.type == TIER_REQUEST) {
        is_open = conn_request(s, c, &h, p);
    } else if (c->state == C_STAGE) {
        is_open = stage_act(s, c, &h, p);
    } else if (c->state == C_UP && h.type == TIER_WISH) {
        is_open = conn_wish(s, c, p, h.n);
    } else if ((c->state == C_UP || c->state == C_STATUS) && h.type == TIER_STATS) {
        is_open = conn_stats(s, c, h.id);
    } else {
        conn_close(s, c, h.type == TIER_GOODBYE ? NULL : "a frame out of turn");
    }
    if (!is_open) return false;
    size_t n = TIER_HEAD_BYTES + (size_t)h.n;
    c->n_in -= n;
    memmove(c->in, c->in + n, c->n_in);
    return true;
}

/* Tell a client of another version what to do, in a frame that it can read. */
static bool conn_refuse_version(server *s, conn *c) {
    const size_t n = strlen(TIER_WHY_VERSION);
    memcpy(conn_payload(c), TIER_WHY_VERSION, n);
    tier_seal(c->out, TIER_REFUSE, 0, (uint32_t)n);
    c->out[3] = c->in[3];
    tier_put64(c->out + 24, tier_sum(c->out, (uint32_t)n));
    c->n_out = TIER_HEAD_BYTES + n;
    c->sent_ns = clock_ns();
    conn_say(s, c, "refused: " TIER_WHY_VERSION);
    conn_leave(s, c);
    s->stats[TIER_STAT_BAD]++;
    s->stats[TIER_STAT_REFUSED]++;
    c->state = C_CLOSING;
    for (int i = 0; i < 16 && recv(c->fd, c->in, c->in_cap, MSG_DONTWAIT) > 0; i++) {
    } /* or a reset overtakes our last words */
    return conn_flush(s, c);
}

/* Is the frame at the front of `in` whole? False, and closed, when it cannot become one. */
static bool conn_look(server *s, conn *c) {
    tier_head h = {.n = 0};
    c->has_frame = false;
    if (c->n_in < TIER_HEAD_BYTES) return true;
    const char *why = tier_head_parse(c->in, &h);
    size_t most = c->state == C_UP      ? tier_most_bytes(&s->m, h.type, true, TIER_MAX_ROWS)
                  : c->state == C_STAGE ? tier_stage_bytes(h.type)
                                        : TIER_MAX_EARLY;
    if (!why && h.n > most) why = "a frame beyond the limit";
    if (c->state == C_HELLO && why && strcmp(why, TIER_WHY_VERSION) == 0)
        return conn_refuse_version(s, c);
    if (why) {
        conn_close(s, c, why);
        return false;
    }
    c->has_frame = c->n_in >= TIER_HEAD_BYTES + (size_t)h.n;
    if (c->has_frame) c->arrived_ns = clock_ns();
    return true;
}

#define FILL_NS 500000u /* of one connection, then others have their turn */

/* Records without data and of a few bytes cost us more than whoever sends them. No k3 sends many: a
 * frame has 32 bytes, and what the network cuts comes to more. Who does is read slowly. */
#define POOR_BYTES 16
#define RICH_BYTES 1024
#define POOR_READS 64
#define QUIET_NS 2000000u

/* n bytes came of a read. Was it one too many of the kind? */
static bool conn_is_poor(conn *c, size_t n) {
    if (n >= RICH_BYTES || c->has_frame) c->n_poor = 0;
    if (!c->tls || n >= POOR_BYTES || (n == 0 && !tier_tls_was_vain(c->tls))) return false;
    if (++c->n_poor <= POOR_READS) return false;
    c->quiet_ns = clock_ns() + QUIET_NS;
    return true;
}

/* Tell a client in its own words, since it would not understand an alert, and be done with it. */
static bool conn_refuse_plain(server *s, conn *c) {
    tier_tls_end(c->tls);
    c->tls = NULL;
    for (int i = 0; i < 16 && recv(c->fd, c->in, c->in_cap, MSG_DONTWAIT) > 0; i++) {
    }
    return conn_refuse(s, c, TIER_REFUSE, "it speaks TLS: write tls: before its address");
}

/* Take in what has come; false when the connection was closed. TLS gives it in records of 16 KiB, or of
 * one byte: after a while others have their turn. */
static bool conn_fill(server *s, conn *c) {
    uint64_t start = clock_ns();
    if (c->tls && tier_tls_is_plain(c->tls)) return conn_refuse_plain(s, c);
    ssize_t n_got;
    do {
        ssize_t n = n_got = conn_recv(c, c->in + c->n_in, c->in_cap - c->n_in);
        if (n == 0) {
            conn_is_poor(c, 0);
            return true;
        }
        if (n < 0) {
            const char *why = c->tls ? tier_tls_why(c->tls) : NULL;
            bool is_cut = (c->state == C_UP || c->state == C_STAGE) && c->n_in > 0;
            conn_close(s, c, !why && is_cut ? "left in the middle of a frame" : why);
            return false;
        }
        c->n_in += (size_t)n;
        s->stats[TIER_STAT_IN_BYTES] += (uint64_t)n;
        s->busy_ns = clock_ns();
        if (c->state == C_STAGE || c->state == C_STATUS) c->since_ns = s->busy_ns;
        if (!conn_look(s, c)) return false;
    } while (c->tls && !conn_is_poor(c, (size_t)n_got) && !c->has_frame &&
             s->busy_ns - start < FILL_NS);
    return true;
}

/* ==== 7. Listening, metrics, the loop ================================================ */

static bool is_loopback(const struct sockaddr *sa) {
    if (sa->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)sa)->sin_addr.s_addr) >> 24 == 127;
    const struct in6_addr *a = &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(a) || (IN6_IS_ADDR_V4MAPPED(a) && a->s6_addr[12] == 127);
}

static int listen_on(server *s, const char *text, int fd, const struct sockaddr *sa, socklen_t n,
                     bool is_http) {
    int one = 1;
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (fd < 0 || bind(fd, sa, n) != 0 || listen(fd, 16) != 0) {
        int why = errno;
        if (fd >= 0) close(fd);
        return fail(FAIL_IO, "listen %s: %s", text, strerror(why));
    }
    s->listen[s->n_listen].fd = fd;
    s->listen[s->n_listen].is_http = is_http;
    s->n_listen++;
    return DONE;
}

/* A socket in the file system, for this user only; one that nobody serves any more is replaced. */
static int listen_unix(server *s, const char *text, const tier_addr *a, bool is_http) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct stat st;
    strcpy(sa.sun_path, a->path);
    if (lstat(a->path, &st) == 0 && !S_ISSOCK(st.st_mode)) /* connect would say the same of both */
        return fail(FAIL_USAGE, "listen %s: there is a file, and no socket; give another name",
                    text);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&sa, sizeof sa) == 0) {
        close(fd);
        return fail(FAIL_IO, "listen %s: in use by another k3-tier; give another name", text);
    }
    if (fd >= 0 && errno == ECONNREFUSED) unlink(a->path);
    if (fd >= 0) close(fd);
    mode_t mask = umask(077);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int rc = listen_on(s, text, fd, (struct sockaddr *)&sa, sizeof sa, is_http);
    umask(mask);
    if (rc != DONE || lstat(a->path, &st) != 0) return rc;
    strcpy(s->listen[s->n_listen - 1].path, a->path);
    s->listen[s->n_listen - 1].dev = st.st_dev;
    s->listen[s->n_listen - 1].ino = st.st_ino;
    return DONE;
}

/* Port 0: say which one the system chose. */
static void listen_say_ports(const server *s) {
    for (uint32_t i = 0; i < s->n_listen; i++) {
        struct sockaddr_storage sa;
        socklen_t n = sizeof sa;
        char port[8];
        if (s->listen[i].has_port_0 &&
            getsockname(s->listen[i].fd, (struct sockaddr *)&sa, &n) == 0 &&
            getnameinfo((struct sockaddr *)&sa, n, NULL, 0, port, sizeof port, NI_NUMERICSERV) == 0)
            say("listening on port %s", port);
    }
}

static int listen_open(server *s, const char *text, bool is_http) {
    tier_addr a;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    if (!tier_addr_parse(text, &a))
        return fail(FAIL_USAGE, "'%s' is no address; %s", text, tier_addr_advice(text));
    if (a.is_tls && is_http) return fail(FAIL_USAGE, "metrics %s: served without TLS only", text);
    if (a.is_tls && !s->tls)
        return fail(FAIL_USAGE, "listen %s: give --tls-cert FILE and --tls-key FILE", text);
    if (a.is_unix) return listen_unix(s, text, &a, is_http);
    int rc = getaddrinfo(a.host, a.port, &hints, &list);
    if (rc != 0) return fail(FAIL_IO, "listen %s: %s", text, gai_strerror(rc));
    bool is_guarded = !is_http && (s->o.n_keys[KEY_ASKS] > 0 || (a.is_tls && s->o.tls.ca));
    for (struct addrinfo *i = list; i; i = i->ai_next)
        if (!is_loopback(i->ai_addr) && !is_guarded && is_http && !s->o.is_metrics_insecure) {
            freeaddrinfo(list);
            return fail(FAIL_USAGE,
                        "metrics %s: other machines can reach it; give --metrics-insecure if all of "
                        "them may read figures",
                        text);
        } else if (!is_loopback(i->ai_addr) && !is_guarded && !is_http && !s->o.is_insecure) {
            freeaddrinfo(list);
            return fail(FAIL_USAGE,
                        "listen %s: other machines can reach it; give %s--insecure if all of them "
                        "may come in",
                        text,
                        a.is_tls ? "--tls-ca FILE, --psk-file FILE, or "
                                   : "--psk-file FILE, tls: with --tls-ca FILE, or ");
        }
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    rc = listen_on(s, text, fd, list->ai_addr, list->ai_addrlen, is_http);
    if (rc == DONE) s->listen[s->n_listen - 1].is_tls = a.is_tls;
    if (rc == DONE) s->listen[s->n_listen - 1].has_port_0 = strcmp(a.port, "0") == 0;
    freeaddrinfo(list);
    return rc;
}

#define HTTP_BYTES (16u << 10) /* the longest head of a request: tokens and cookies are long */

/* Who has not said who it is. */
static bool conn_is_early(const conn *c) {
    return c->state == C_HELLO || c->state == C_PROOF || c->state == C_HTTP;
}

/* Of those the one that has been here longest, if it has had time for a hello. */
static conn *conn_oldest_early(server *s) {
    conn *oldest = NULL;
    uint64_t now = clock_ns();
    for (uint32_t i = 0; i < s->o.clients + MAX_STATUS; i++) {
        conn *c = &s->conns[i];
        if (conn_is_early(c) && now - c->since_ns > TIER_HASTE_MS * 1000000ull &&
            (!oldest || c->since_ns < oldest->since_ns))
            oldest = c;
    }
    return oldest;
}

/* Whose address has most of them, and two or more: its oldest. A newcomer from another address is not
 * made to wait for it; who floods takes places from himself. */
static conn *conn_greedy(server *s, const uint8_t from[8]) {
    conn *greedy = NULL;
    uint32_t most = 1;
    for (uint32_t i = 0; i < s->o.clients + MAX_STATUS; i++) {
        conn *c = &s->conns[i];
        uint32_t n = 0;
        if (!conn_is_early(c) || memcmp(c->from, from, 8) == 0) continue;
        for (uint32_t k = 0; k < s->o.clients + MAX_STATUS; k++)
            n += conn_is_early(&s->conns[k]) && memcmp(s->conns[k].from, c->from, 8) == 0;
        if (n > most || (n == most && greedy && c->since_ns < greedy->since_ns)) greedy = c;
        if (n > most) most = n;
    }
    return greedy;
}

/* There is no place for another. Whoever floods must not fill the log as well. */
static void conn_crowd(server *s) {
    uint64_t now = clock_ns();
    s->stats[TIER_STAT_BAD]++;
    if (now - s->full_ns > 10 * 1000000000ull)
        say("no place for one more beside %u clients and %u others: who said no hello is closed; "
            "see --clients",
            s->o.clients, MAX_STATUS);
    s->full_ns = now;
}

/* The system has no descriptor, or no memory, for one who is waiting, or does not let us accept; poll would
 * say at once that he still is. Who said no hello makes room, and nobody is accepted for a moment. */
static void accept_later(server *s) {
    int why = errno;
    uint64_t now = clock_ns();
    conn *c = conn_oldest_early(s);
    if (c) conn_close(s, c, NULL);
    s->accept_ns = now + 100000000u;
    if (s->no_fd_ns == 0 || now - s->no_fd_ns > 10 * 1000000000ull) {
        say("cannot accept a connection: %s%s", strerror(why),
            why == EMFILE ? "; raise `ulimit -n`" : "");
        s->no_fd_ns = now;
    }
}

/* Who is it? For the log, and for how many places he has. */
static void conn_name(conn *c, const struct sockaddr_storage *sa, socklen_t n) {
    char host[48] = "", port[8] = "";
    memset(c->from, 0, sizeof c->from);
    if (sa->ss_family == AF_INET)
        memcpy(c->from, &((const struct sockaddr_in *)(const void *)sa)->sin_addr, 4);
    if (sa->ss_family == AF_INET6)
        memcpy(c->from, &((const struct sockaddr_in6 *)(const void *)sa)->sin6_addr, 8);
    if (sa->ss_family != AF_INET && sa->ss_family != AF_INET6)
        snprintf(c->peer, sizeof c->peer, "unix");
    else if (getnameinfo((const struct sockaddr *)sa, n, host, sizeof host, port, sizeof port,
                         NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(c->peer, sizeof c->peer, "%s port %s", host, port);
}

static void conn_accept(server *s, uint32_t i_listen) {
    struct sockaddr_storage sa = {.ss_family = AF_UNIX};
    socklen_t n_sa = sizeof sa;
    int fd = accept4(s->listen[i_listen].fd, (struct sockaddr *)&sa, &n_sa,
                     SOCK_NONBLOCK | SOCK_CLOEXEC);
    bool is_http = s->listen[i_listen].is_http;
    conn *c = NULL, who;
    if (fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR &&
        errno != ECONNABORTED && errno != EPROTO) /* else he left meanwhile */
        accept_later(s);
    if (fd < 0) return;
    conn_name(&who, &sa, n_sa);
    for (uint32_t i = 0; i < s->o.clients + MAX_STATUS && !c; i++)
        if (s->conns[i].state == C_FREE) c = &s->conns[i];
    if (!c) {
        conn_crowd(s);
        if ((c = conn_greedy(s, who.from)) || (c = conn_oldest_early(s))) conn_close(s, c, NULL);
    }
    if (!c || !conn_room(c, is_http ? HTTP_BYTES : TIER_HEAD_BYTES + 2 * TIER_MAX_EARLY, 4096) ||
        (s->listen[i_listen].is_tls && !(c->tls = tier_tls_accept(s->tls, fd)))) {
        close(fd);
        return;
    }
    tier_socket_tune(fd);
    c->fd = fd;
    memcpy(c->peer, who.peer, sizeof c->peer);
    memcpy(c->from, who.from, sizeof c->from);
    c->state = is_http ? C_HTTP : C_HELLO;
    c->number = ++s->next_number;
    c->since_ns = c->sent_ns = s->busy_ns = clock_ns();
    c->n_in = c->n_out = c->i_out = 0;
}

/* Prometheus text: one metric for each place of the stats frame. */
static const struct {
    const char *name, *type, *help;
} METRIC[TIER_N_STATS] = {
    {"uptime_milliseconds", "counter", "since the start"},
    {"experts_capacity", "gauge", "experts there is room for"},
    {"experts_held", "gauge", "experts in memory"},
    {"experts_total", "gauge", "experts of the model"},
    {"clients", "gauge", "clients now"},
    {"requests_total", "counter", "requests answered"},
    {"experts_served_total", "counter", "experts in sums"},
    {"experts_missing_total", "counter", "experts asked for and not here"},
    {"requests_stale_total", "counter", "requests whose time was over before they began"},
    {"connections_bad_total", "counter", "connections ended for a fault"},
    {"received_bytes_total", "counter", "bytes from clients"},
    {"sent_bytes_total", "counter", "bytes to clients"},
    {"compute_nanoseconds_total", "counter", "time spent on requests"},
    {"experts_warmed_total", "counter", "experts read from disk"},
    {"experts_evicted_total", "counter", "experts that made room"},
    {"resident_memory_bytes", "gauge", "memory of the process"},
    {"experts_staged_total", "counter", "experts that came over the wire"},
    {"vram_experts_capacity", "gauge", "experts there is room for in VRAM"},
    {"vram_experts_held", "gauge", "experts in VRAM"},
    {"gpu_experts_served_total", "counter", "experts in sums that the GPU computed"},
    {"connections_refused_total", "counter", "connections refused: another key, model, no place"},
    {"experts_unwritten", "gauge", "staged experts that --keep has not written yet"},
    {"keep_failed", "gauge", "1: --keep cannot write any more"},
};

/* The figures, as Prometheus reads them; how many bytes. */
static size_t metrics_write(server *s, char *body, size_t cap) {
    char *to = body, *end = body + cap;
    uint64_t v[TIER_N_STATS];
    stats_take(s, v);
    for (int i = 0; i < TIER_N_STATS; i++)
        to += snprintf(to, (size_t)(end - to),
                       "# HELP k3_tier_%s %s\n# TYPE k3_tier_%s %s\nk3_tier_%s %llu\n",
                       METRIC[i].name, METRIC[i].help, METRIC[i].name, METRIC[i].type,
                       METRIC[i].name, (unsigned long long)v[i]);
    return (size_t)(to - body);
}

/* Any request for a page gets the metrics, once, and the connection ends. Nothing unread may be left
 * then, or a reset overtakes the answer. */
static bool conn_http(server *s, conn *c) {
    char body[8192], away[4096];
    size_t n_body = 0;
    ssize_t n = recv(c->fd, c->in + c->n_in, c->in_cap - c->n_in, MSG_DONTWAIT);
    if (n > 0) c->n_in += (size_t)n;
    bool is_whole = c->n_in >= 4 && memmem(c->in, c->n_in, "\r\n\r\n", 4);
    bool is_long = !is_whole && c->n_in == c->in_cap;
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        conn_close(s, c, NULL);
        return false;
    }
    if (!is_whole && !is_long) return true;
    for (int i = 0; i < 16 && recv(c->fd, away, sizeof away, MSG_DONTWAIT) > 0; i++) {
    }
    bool is_get = memcmp(c->in, "GET ", 4) == 0,
         is_known =
             is_get && (memcmp(c->in, "GET / ", 6) == 0 || memcmp(c->in, "GET /metrics", 12) == 0);
    if (is_known && !is_long) n_body = metrics_write(s, body, sizeof body);
    if (!conn_room(c, c->in_cap, n_body + 256)) {
        conn_close(s, c, NULL);
        return false;
    }
    c->n_out = (size_t)snprintf((char *)c->out, 256,
                                "HTTP/1.0 %s\r\nContent-Type: text/plain; version=0.0.4\r\n"
                                "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                                is_long    ? "431 Request Header Fields Too Large"
                                : is_known ? "200 OK"
                                : is_get   ? "404 Not Found"
                                           : "405 Method Not Allowed",
                                n_body);
    memcpy(c->out + c->n_out, body, n_body);
    c->n_out += n_body;
    c->state = C_CLOSING;
    return conn_flush(s, c);
}

/* Who looks or stages has one of few places, and keeps it while something comes. A slow disk there
 * may take its time over an expert. */
#define IDLE_NS (120 * 1000000000ull)

/* Cut off who does not say hello, does not read, does nothing, or does not leave. */
static void conn_check_time(server *s, conn *c, uint64_t now) {
    if (conn_is_early(c) && now - c->since_ns > TIER_HELLO_MS * 1000000ull)
        conn_close(s, c, "no hello in time");
    else if (c->stage.is_taking && now - c->since_ns > 30 * 1000000000ull)
        conn_close(s, c, "stopped in the middle of an expert");
    else if ((c->state == C_STATUS || c->state == C_STAGE) && now - c->since_ns > IDLE_NS)
        conn_refuse(s, c, TIER_GOODBYE, "idle for too long: places are few");
    else if (c->n_out > 0 && now - c->sent_ns > 30 * 1000000000ull)
        conn_close(s, c, "does not read");
    else if (c->state == C_CLOSING && now - c->sent_ns > 2 * 1000000000ull)
        conn_close(s, c, NULL);
}

/* One frame of each connection in turn. Returns whether there is more to do. */
static bool serve_round(server *s) {
    bool has_more = false;
    for (uint32_t i = 0; i < MAX_CONNS; i++) {
        conn *c = &s->conns[i];
        if (c->state == C_FREE || c->state == C_HTTP || c->state == C_CLOSING) continue;
        if (c->has_frame && stage_must_wait(s, c)) continue;
        if (c->has_frame && c->n_out == 0 && (!conn_act(s, c) || !conn_look(s, c))) continue;
        has_more = has_more || (c->has_frame && c->n_out == 0);
        if (c->state != C_UP || c->n_out > 0) continue;
        pthread_mutex_lock(&s->st.lock);
        bool has_news = c->told_changes != s->st.n_changes;
        pthread_mutex_unlock(&s->st.lock);
        if (has_news) conn_tell(s, c);
    }
    return has_more;
}

/* Wait for something, at most `ms`, and take it in. */
static void poll_round(server *s, int ms) {
    struct pollfd fds[1 + MAX_LISTEN + 1 + MAX_CONNS];
    bool holds[COUNT(fds)] = {false};
    uint32_t who[COUNT(fds)], n = 0;
    uint64_t n_wakes;
    fds[n++] = (struct pollfd){.fd = s->wake_fd, .events = POLLIN};
    uint64_t now = clock_ns();
    bool may_accept = now >= s->accept_ns;
    if (!may_accept && ms > 100) ms = 100;
    for (uint32_t i = 0; i < s->n_listen; i++)
        fds[n++] = (struct pollfd){.fd = s->listen[i].fd, .events = may_accept ? POLLIN : 0};
    for (uint32_t i = 0; i < MAX_CONNS; i++) {
        const conn *c = &s->conns[i];
        if (c->state == C_FREE) continue;
        short more = c->tls ? tier_tls_wants(c->tls) : 0;
        bool wants = c->n_out == 0 && !c->has_frame && c->state != C_CLOSING && c->quiet_ns <= now;
        if (c->quiet_ns > now && ms > 2) ms = 2;
        who[n] = i;
        holds[n] = wants && c->tls && tier_tls_holds(c->tls);
        if (holds[n]) ms = 0;
        fds[n++] = (struct pollfd){
            .fd = c->fd,
            .events = (short)((wants ? POLLIN | more : 0) | (c->n_out > 0 ? POLLOUT : 0))};
    }
    if (poll(fds, n, ms) < 0) { /* EINVAL: fewer descriptors are allowed than are open */
        if (errno != EINTR) nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        return;
    }
    if (fds[0].revents && read(s->wake_fd, &n_wakes, sizeof n_wakes) < 0) errno = 0;
    for (uint32_t i = 0; i < s->n_listen; i++)
        if (fds[1 + i].revents && clock_ns() >= s->accept_ns) conn_accept(s, i);
    for (uint32_t i = 1 + s->n_listen; i < n; i++) {
        conn *c = &s->conns[who[i]];
        short got = fds[i].revents;
        if ((got == 0 && !holds[i]) || c->state == C_FREE || c->fd != fds[i].fd) continue;
        if (c->n_out > 0 && !conn_flush(s, c)) continue;
        if (c->state == C_HTTP)
            conn_http(s, c);
        else if (c->n_out == 0 && !c->has_frame && c->state != C_CLOSING && c->quiet_ns <= now)
            conn_fill(s, c);
        else if (got & (POLLHUP | POLLERR) && (!c->has_frame || stage_must_wait(s, c)))
            conn_close(s, c, NULL);
    }
}

/* With --linger: has nobody asked or staged for so long? Who lost the device that it was started for,
 * and holds nothing that it did not read itself when asked, makes room for another at once. */
static bool is_lonely(server *s, uint64_t now) {
    if (s->n_clients + s->n_stagers > 0) s->client_ns = now;
    if (s->o.linger_s == 0 || s->client_ns == now) return false;
    pthread_mutex_lock(&s->st.lock);
    bool is_of_no_use = s->st.vram_is_lost && s->o.model_dir && s->o.no_fill;
    uint64_t linger_s = is_of_no_use ? 0 : s->o.linger_s;
    pthread_mutex_unlock(&s->st.lock);
    return now - s->client_ns > linger_s * 1000000000ull;
}

/* Serve until a signal; then finish what was begun, say goodbye, and leave. */
static void serve(server *s) {
    uint64_t checked = clock_ns(), cooled = checked, left = 0;
    for (;;) {
        bool has_more = serve_round(s);
        uint64_t now = clock_ns();
        bool is_spinning = now - s->busy_ns < s->o.spin_us * 1000ull;
        poll_round(s, has_more || is_spinning ? 0 : 500);
        now = clock_ns();
        if (now - checked > 500000000u) {
            for (uint32_t i = 0; i < MAX_CONNS; i++)
                if (s->conns[i].state != C_FREE) conn_check_time(s, &s->conns[i], now);
            checked = now;
        }
        if (now - cooled > 60000000000u) {
            store_cool(s);
            cooled = now;
        }
        if (is_lonely(s, now)) is_ending = 1;
        if (!is_ending) continue;
        if (left == 0) left = now + 2000000000u;
        bool is_empty = true;
        for (uint32_t i = 0; i < MAX_CONNS; i++) {
            conn *c = &s->conns[i];
            if (c->state == C_FREE) continue;
            if (c->state == C_HELLO && c->tls) /* perhaps it never will shake hands */
                conn_close(s, c, NULL);
            else if (c->state != C_CLOSING && !c->has_frame && c->n_out == 0)
                conn_refuse(s, c, TIER_GOODBYE, "ending");
            is_empty = is_empty && c->state == C_FREE;
        }
        if (is_empty || now > left) return;
    }
}

/* ==== 8. k3-tier status ==============================================================*/

/* All n bytes, one way or the other. */
static bool status_bytes(tier_link *l, uint8_t *p, size_t n, bool is_out) {
    uint64_t until = clock_ns() + TIER_HELLO_MS * 1000000ull;
    while (n > 0) {
        ssize_t k = is_out ? l->by->send(l, p, n) : l->by->recv(l, p, n);
        if (k < 0) return false;
        if (k == 0 && !tier_link_wait(l, is_out ? POLLOUT : POLLIN, until, NULL, NULL)) {
            snprintf(l->why, sizeof l->why, "no answer");
            return false;
        }
        p += k;
        n -= (size_t)k;
    }
    return true;
}

/* Read one frame of at most 256 bytes; false when it is no good. */
static bool status_read(tier_link *l, uint8_t *frame, tier_head *h) {
    if (!status_bytes(l, frame, TIER_HEAD_BYTES, false)) return false;
    const char *why = tier_head_parse(frame, h);
    if (!why && h->n > TIER_MAX_EARLY) why = "a frame too long";
    if (!why && !status_bytes(l, frame + TIER_HEAD_BYTES, h->n, false)) return false;
    if (!why && tier_sum(frame, h->n) != h->sum) why = "a damaged frame";
    if (why) snprintf(l->why, sizeof l->why, "%s; is it a k3-tier?", why);
    return !why;
}

static bool status_send(tier_link *l, uint8_t *frame, enum tier_type type, uint32_t n) {
    return status_bytes(l, frame, tier_seal(frame, type, 0, n), true);
}

/* From hello to the first frame behind it; false when it is no good. */
static bool status_hello(tier_link *l, const tier_key *key, uint8_t *frame, tier_head *h) {
    uint8_t nonce[TIER_NONCE_BYTES], *p = frame + TIER_HEAD_BYTES;
    tier_model none = {.numerics = ""};
    tier_talk talk;
    if (!tier_nonce(nonce)) return false;
    tier_hello_pack(talk.hello, &none, TIER_LOOKS, nonce);
    memcpy(p, talk.hello, sizeof talk.hello);
    if (!status_send(l, frame, TIER_HELLO, TIER_HELLO_BYTES) || !status_read(l, frame, h))
        return false;
    if (key->n > 0 && h->type == TIER_WELCOME) {
        snprintf(l->why, sizeof l->why, "the box does not ask for the key: not the one meant");
        return false;
    }
    if (h->type != TIER_CHALLENGE || key->n == 0) return true;
    const char *why = tier_link_binding(l, talk.binding);
    if (!why) why = tier_answer(key, &talk, p, h->n, p);
    if (why) return snprintf(l->why, sizeof l->why, "%s", why), false;
    if (!status_send(l, frame, TIER_PROOF, TIER_PROOF_BYTES) || !status_read(l, frame, h)) return false;
    if (h->type == TIER_WELCOME)
        return snprintf(l->why, sizeof l->why, "the box did not prove the key: not the one meant"), false;
    if (h->type != TIER_PROOF) return true;
    if ((why = tier_believe(key, &talk, p, h->n)) != NULL)
        return snprintf(l->why, sizeof l->why, "%s", why), false;
    return status_read(l, frame, h);
}

/* Ask a running server for its figures and print them, a name and a number a line. */
static int status(const char *text, const tier_key *key, tier_trust *trust) {
    uint8_t frame[TIER_HEAD_BYTES + TIER_MAX_EARLY], *p = frame + TIER_HEAD_BYTES;
    tier_head h = {.n = 0};
    tier_addr a;
    tier_link l;
    char why[400];
    int rc = FAIL_IO;
    trust->flag = "--tls";
    if (!tier_addr_parse(text, &a))
        return fail(FAIL_USAGE, "status: '%s' is no address; %s", text, tier_addr_advice(text));
    if (!a.is_tls && (trust->ca || trust->cert || trust->key))
        return fail(FAIL_USAGE, "--tls-%s: status is not dialled with TLS: write tls:ADDR",
                    trust->ca     ? "ca"
                    : trust->cert ? "cert"
                                  : "key");
    if (tier_trust_check(trust, why, sizeof why) < 0) return fail(FAIL_USAGE, "%s", why);
    if (tier_dial(&l, &a, trust, TIER_HELLO_MS, NULL, NULL) < 0)
        return fail(FAIL_IO, "status %s: %s", text, l.why);
    bool is_ok = status_hello(&l, key, frame, &h);
    if (is_ok && h.type == TIER_CHALLENGE) {
        fail(rc, "status %s: it wants a key: give --psk-file", text);
    } else if (!is_ok || h.type != TIER_WELCOME) {
        if (is_ok && h.type == TIER_REFUSE) tier_text(l.why, sizeof l.why, p, h.n);
        fail(rc, "status %s: %s%s", text, is_ok ? "refused: " : "",
             l.why[0] ? l.why : "the connection ended");
    } else if (!status_send(&l, frame, TIER_STATS, 0) || !status_read(&l, frame, &h) ||
               h.type != TIER_STATS || h.n != TIER_N_STATS * 8) {
        fail(rc, "status %s: no answer", text);
    } else {
        for (int i = 0; i < TIER_N_STATS; i++)
            printf("%s\t%llu\n", METRIC[i].name, (unsigned long long)tier_get64(p + 8 * i));
        rc = fflush(stdout) == 0 ? DONE : FAIL_IO;
    }
    l.by->close(&l);
    return rc;
}

/* ==== 9. Options and main ============================================================ */

static const char HELP[] =
    "usage: k3-tier --model DIR --ram SIZE [options]     hold experts, answer for them\n"
    "       k3-tier --slice DIR --ram SIZE [options]     the same without the whole model\n"
    "       k3-tier --ram SIZE --stage-psk-file FILE [options]\n"
    "                                                    wait for `k3 stage` to bring them\n"
    "       k3-tier status ADDR [--psk-file FILE] [--tls-ca FILE] [--tls-cert FILE]\n"
    "                                                    figures of a running one\n"
    "       k3-tier bench --gpu [--vram SIZE] [--gpu-device N]\n"
    "                                                    what a request costs there\n"
    "\n"
    "Holds experts of a model in memory and answers clients (k3 run --tier ADDR) with their exact\n"
    "weighted sums. What is not in memory is \"missing\" at once and read in the background.\n"
    "\n"
    "  --model DIR       a model directory as downloaded\n"
    "  --slice DIR       what `k3 slice` wrote: some experts, every read checked; with --model it\n"
    "                    is read first, the rest from there\n"
    "  --keep DIR        write what is staged to DIR as well; started again, serve that; DIR is\n"
    "                    absent, empty, or from --keep, and one box's only\n"
    "  --ram SIZE        bound for the whole process: 64G, 512M, 1.5GiB, or bytes\n"
    "  --gpu             hold the hottest experts in a GPU's memory and compute them there: same\n"
    "                    bits (built with `make gpu`)\n"
    "  --vram SIZE       of it, for experts (default: what is free, less 1 GiB)\n"
    "  --gpu-device N    which GPU, as CUDA counts them (default 0)\n"
    "  --listen ADDR     HOST:PORT, [V6]:PORT, :PORT, tls:HOST:PORT or unix:PATH (repeatable;\n"
    "                    default 127.0.0.1:" TIER_PORT
    "); one that other machines can reach needs a\n"
    "                    key, or tls: with --tls-ca\n"
    "  --psk-file FILE   a key that clients must know, 32 random bytes or more (repeatable, 16 at\n"
    "                    most: a key for each client); make one with\n"
    "                    (umask 077; openssl rand -base64 32 >FILE)\n"
    "  --stage-psk-file FILE\n"
    "                    another key, that who stages must know (repeatable); without it and\n"
    "                    --stage-name only its own user may, through a unix: socket\n"
    "  --stage-name NAME who stages must show a certificate with this common name: tls: with\n"
    "                    --tls-ca\n"
    "  --tls-cert FILE   our certificate, and those between it and its authority, in PEM\n"
    "  --tls-key FILE    its private key (default: in the same file)\n"
    "  --tls-ca FILE     let in only clients whose certificate this one signed, or is; with\n"
    "                    status: the same of the box (default there: the system's authorities)\n"
    "  --insecure        let in whoever can reach a --listen address\n"
    "  --pins FILE       experts to read first and keep, `layer expert` a line\n"
    "  --no-fill         read only pins and what clients want\n"
    "  --clients N       most clients at once, 1 to 64 (default 8)\n"
    "  --threads N       threads that compute (default: one for each core, within the CPU quota)\n"
    "  --kernels NAME    ref, avx2, avx512 or neon: same bits (default: the best here)\n"
    "  --spin-us N       look for the next request so long before sleeping (default 50)\n"
    "  --sums FILE       checksums (default: k3.sums in the model directory, if there)\n"
    "  --linger SECONDS  end when nobody asked or staged for so long (default: stay)\n"
    "  --metrics ADDR    figures over HTTP, as Prometheus reads them\n"
    "  --metrics-insecure  whoever can reach that address may read them\n"
    "  --dump FILE       every frame, in words and bytes, for you alone to read; - is stderr\n"
    "  -q                errors only      -h  this help      -V  version\n"
    "\n"
    "Exit codes: 0 done, 1 I/O or memory, 2 usage, 3 model refused, 4 --ram too small.\n";

static bool parse_count(const char *text, uint64_t lo, uint64_t hi, uint32_t *out) {
    uint64_t v;
    if (!parse_u64(text, strlen(text), &v) || v < lo || v > hi) return false;
    *out = (uint32_t)v;
    return true;
}

typedef struct {
    const char *name;
    enum { O_FLAG, O_TEXT, O_COUNT, O_SIZE, O_LISTEN, O_KEY } kind;
    size_t at;
    uint32_t lo, hi;
} option;

#define AT(field) offsetof(options, field)
static const option OPTION[] = {
    {"--model", O_TEXT, AT(model_dir), 0, 0},
    {"--slice", O_TEXT, AT(slice_dir), 0, 0},
    {"--keep", O_TEXT, AT(keep_dir), 0, 0},
    {"--ram", O_SIZE, AT(ram), 0, 0},
    {"--gpu", O_FLAG, AT(has_gpu), 0, 0},
    {"--vram", O_SIZE, AT(vram), 0, 0},
    {"--gpu-device", O_COUNT, AT(gpu_device), 0, 63},
    {"--linger", O_COUNT, AT(linger_s), 1, 86400},
    {"--listen", O_LISTEN, 0, 0, 0},
    {"--psk-file", O_KEY, 0, KEY_ASKS, 0},
    {"--stage-psk-file", O_KEY, 0, KEY_STAGES, 0},
    {"--stage-name", O_TEXT, AT(stage_name), 0, 0},
    {"--tls-cert", O_TEXT, AT(tls.cert), 0, 0},
    {"--tls-key", O_TEXT, AT(tls.key), 0, 0},
    {"--tls-ca", O_TEXT, AT(tls.ca), 0, 0},
    {"--insecure", O_FLAG, AT(is_insecure), 0, 0},
    {"--pins", O_TEXT, AT(pins), 0, 0},
    {"--no-fill", O_FLAG, AT(no_fill), 0, 0},
    {"--clients", O_COUNT, AT(clients), 1, MAX_CLIENTS},
    {"--threads", O_COUNT, AT(threads), 1, 1024},
    {"--kernels", O_TEXT, AT(kernels), 0, 0},
    {"--spin-us", O_COUNT, AT(spin_us), 0, 1000000},
    {"--sums", O_TEXT, AT(sums), 0, 0},
    {"--metrics", O_TEXT, AT(metrics), 0, 0},
    {"--metrics-insecure", O_FLAG, AT(is_metrics_insecure), 0, 0},
    {"--dump", O_TEXT, AT(dump), 0, 0},
};

static int option_set(options *o, const option *k, const char *text) {
    void *field = (char *)o + k->at;
    switch (k->kind) {
    case O_FLAG: *(bool *)field = true; return DONE;
    case O_TEXT: *(const char **)field = text; return DONE;
    case O_COUNT:
        if (parse_count(text, k->lo, k->hi, field)) return DONE;
        return fail(FAIL_USAGE, "%s: '%s' is not a whole number from %u to %u", k->name, text,
                    k->lo, k->hi);
    case O_SIZE:
        if (k->at == AT(ram)) o->ram_has_no_unit = text[strspn(text, "0123456789")] == 0;
        if (parse_size(text, field) && *(uint64_t *)field > 0) return DONE;
        return fail(FAIL_USAGE, "%s: '%s' is not a size such as 64G, 512M or 1.5GiB", k->name,
                    text);
    case O_LISTEN:
        if (o->n_listen == MAX_LISTEN)
            return fail(FAIL_USAGE, "--listen: at most %d addresses", MAX_LISTEN);
        o->listen[o->n_listen++] = text;
        return DONE;
    case O_KEY:
        if (o->n_keys[k->lo] == MAX_KEYS)
            return fail(FAIL_USAGE, "%s: at most %d keys", k->name, MAX_KEYS);
        o->key_file[k->lo][o->n_keys[k->lo]++] = text;
        return DONE;
    }
    return DONE;
}

/* Options from argv[from]; `arg` is the one thing that is none, where it is wanted. */
static int options_parse(options *o, int argc, char **argv, int from, const char **arg) {
    for (int i = from; i < argc; i++) {
        const option *k = NULL;
        const char *eq = strchr(argv[i], '=');
        size_t n = eq ? (size_t)(eq - argv[i]) : strlen(argv[i]);
        for (size_t j = 0; j < COUNT(OPTION); j++)
            if (strlen(OPTION[j].name) == n && memcmp(OPTION[j].name, argv[i], n) == 0)
                k = &OPTION[j];
        if (strcmp(argv[i], "-q") == 0) {
            is_quiet = true;
            continue;
        }
        if (!k && argv[i][0] != '-' && arg && !*arg) {
            *arg = argv[i];
            continue;
        }
        if (!k) return fail(FAIL_USAGE, "unknown option '%s'; see k3-tier -h", argv[i]);
        if (k->kind == O_FLAG && eq) return fail(FAIL_USAGE, "%s takes no value", k->name);
        if (k->kind != O_FLAG && !eq && i + 1 == argc)
            return fail(FAIL_USAGE, "%s needs a value", k->name);
        const char *text = k->kind == O_FLAG ? "" : eq ? eq + 1 : argv[++i];
        int rc = option_set(o, k, text);
        if (rc != DONE) return rc;
    }
    return DONE;
}

static void note(void *user, const char *line) {
    (void)user;
    say("%s", line);
}

static int pins_add(void *user, uint32_t il, uint32_t ie) {
    server *s = user;
    if (s->st.n_pins < capacity(s)) s->st.pins[s->st.n_pins++] = (uint32_t)index_of(s, il, ie);
    return 0;
}

/* Experts of the file of pins, checked, the most wanted first. */
static int pins_read(server *s) {
    const k3_shape sh = {
        .n_layers = s->m.n_layers, .n_dense = s->m.n_dense, .n_experts = s->m.n_experts};
    k3_error err = {{0}};
    int64_t n = k3_pins_visit(s->o.pins, &sh, pins_add, s, &err);
    return n < 0 ? fail_status((int)n, &err) : DONE;
}

#define OVERHEAD_BYTES (48u << 20) /* code, libraries, stacks, JSON while opening */
#define GPU_BYTES (768ull << 20)    /* what CUDA takes of this machine's memory     */
#define TLS_SHARED_BYTES (2u << 20) /* what all connections share                  */

static void *take(size_t n, size_t size) {
    void *p = mmap(NULL, n * size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* Which experts can be read here; the others are never asked of a disk. */
static void memory_readable(server *s) {
    store *st = &s->st;
    for (uint32_t il = s->m.n_dense; il < s->m.n_layers; il++)
        for (uint32_t ie = 0; ie < s->m.n_experts; ie++) {
            bool can_read = s->e || (s->part && k3_expert_has(s->part, il, ie));
            st->heat[index_of(s, il, ie)] = can_read ? 0.0f : -1.0f;
            st->n_readable += can_read;
        }
}

static int vram_fail(server *s, const char *why) {
    gpu_close(s->gpu);
    s->gpu = NULL;
    return fail(FAIL_IO, "%s", why);
}

/* The GPU, and a list of what it holds. */
static int vram_open(server *s) {
    store *st = &s->st;
    gpu_options o = {.latent = s->m.latent,
                     .inter = s->m.inter,
                     .max_rows = TIER_MAX_ROWS,
                     .max_items = s->m.n_experts,
                     .max_pairs = TIER_MAX_ROWS * s->m.top_k,
                     .max_slots = s->n_moe * s->m.n_experts,
                     .beta = s->math.beta,
                     .linear_beta = s->math.linear_beta,
                     .device = (int)s->o.gpu_device,
                     .vram_bytes = s->o.vram};
    gpu_info info;
    char why[512];
    if (gpu_open(&s->gpu, &o, why, sizeof why) < 0) return vram_fail(s, why);
    gpu_info_get(s->gpu, &info);
    st->vram = calloc(info.n_slots, sizeof *st->vram);
    s->gpu_items = calloc(s->m.n_experts, sizeof *s->gpu_items);
    s->gpu_bad = calloc(s->m.n_experts, 1);
    if (!st->vram || !s->gpu_items || !s->gpu_bad) return vram_fail(s, "out of memory for --gpu");
    say("%s: room for %u experts in %.1f GiB of VRAM", info.name, info.n_slots,
        (double)info.vram_bytes / 0x1p30);
    pthread_mutex_lock(&st->lock); /* of an empty box, the thread is there already */
    st->n_vram = info.n_slots;
    st->has_vram = true;
    pthread_mutex_unlock(&st->lock);
    return DONE;
}

/* A box without a model learns later what it holds, but now whether there is a GPU for it. */
static int vram_probe(const server *s) {
    gpu_options o = {.latent = 32,
                     .inter = 32,
                     .max_rows = 1,
                     .max_items = 1,
                     .max_pairs = 1,
                     .max_slots = 1,
                     .device = (int)s->o.gpu_device};
    char why[512];
    gpu *g;
    if (gpu_open(&g, &o, why, sizeof why) < 0) return fail(FAIL_IO, "%s", why);
    gpu_close(g);
    return DONE;
}

/* What tables take for every expert of the model: ours, the engines', a slice's list with its order
 * and its sums. */
static uint64_t memory_tables(const server *s) {
    const store *st = &s->st;
    uint64_t place = k3_expert_place_bytes(),
             sliced = place + sizeof *s->list.list + sizeof *st->order + sizeof(uint64_t);
    return sizeof *st->slot_of + sizeof *st->vram_of + sizeof *st->heat + sizeof *st->pins +
           sizeof *st->is_coming + sizeof *st->is_written + sizeof *st->sum + place + (s->part ? sliced : 0) +
           (s->o.keep_dir ? keep_bytes_each() : 0);
}

/* Divide --ram: tables, clients, scratch, and slots with what is left. */
static int memory_plan(server *s) {
    store *st = &s->st;
    size_t lat = s->m.latent, n = (size_t)s->n_moe * s->m.n_experts,
           pairs = (size_t)TIER_MAX_ROWS * s->m.top_k;
    uint64_t client = tier_most_bytes(&s->m, TIER_REQUEST, true, TIER_MAX_ROWS) +
                      tier_most_bytes(&s->m, TIER_REPLY, false, TIER_MAX_ROWS) + 65536,
             stager = TIER_MAX_PIECE + tier_resident_bytes(&s->m, s->n_moe) + 8192,
             scratch = (BATCH_PAIRS * (lat + s->m.inter) + lat) * sizeof(float) +
                       s->n_threads * s->mem.local_floats * sizeof(float) +
                       pairs * (sizeof *s->mem.pair_row + sizeof *s->mem.pair_w) +
                       s->m.n_experts * (sizeof(item) + sizeof(expert_task *)),
             tls = s->tls ? TLS_SHARED_BYTES + TIER_TLS_BYTES * (s->o.clients + MAX_STATUS) : 0,
             fixed = OVERHEAD_BYTES + n * memory_tables(s) + client * s->o.clients +
                     stager * MAX_STAGERS + scratch + tls + (s->o.has_gpu ? GPU_BYTES : 0) +
                     (s->o.keep_dir ? KEEP_BYTES : 0),
             per = st->slot_bytes + sizeof(slot) + sizeof *st->free;
    if (s->o.ram < fixed + per)
        return fail(FAIL_BUDGET, "--ram of %llu bytes is below what one expert needs: give %llu",
                    (unsigned long long)s->o.ram, (unsigned long long)(fixed + per));
    uint64_t room = (s->o.ram - fixed) / per;
    st->n_slots = room < n ? (uint32_t)room : (uint32_t)n;
    return DONE;
}

static int memory_take(server *s) {
    store *st = &s->st;
    size_t lat = s->m.latent, n = (size_t)s->n_moe * s->m.n_experts,
           pairs = (size_t)TIER_MAX_ROWS * s->m.top_k;
    st->bytes = take(st->n_slots, st->slot_bytes);
    st->slots = calloc(st->n_slots, sizeof *st->slots);
    st->free = calloc(st->n_slots, sizeof *st->free);
    st->pins = calloc(n, sizeof *st->pins);
    st->slot_of = malloc(n * sizeof *st->slot_of);
    st->vram_of = malloc(n * sizeof *st->vram_of);
    st->heat = calloc(n, sizeof *st->heat);
    st->is_coming = calloc(n, sizeof *st->is_coming);
    st->is_written = calloc(n, sizeof *st->is_written);
    st->sum = calloc(n, sizeof *st->sum);
    st->held = calloc(s->n_moe, tier_map_bytes(s->m.n_experts));
    st->version = calloc(s->n_moe, sizeof *st->version);
    s->mem.zp = take(lat, sizeof(float));
    s->mem.zpair = take(BATCH_PAIRS * lat, sizeof(float));
    s->mem.hpair = take(BATCH_PAIRS * (size_t)s->m.inter, sizeof(float));
    s->mem.local = take(s->n_threads * s->mem.local_floats, sizeof(float));
    s->mem.items = calloc(s->m.n_experts, sizeof *s->mem.items);
    s->mem.batch = calloc(s->m.n_experts, sizeof(expert_task *));
    s->mem.pair_row = calloc(pairs, sizeof *s->mem.pair_row);
    s->mem.pair_w = calloc(pairs, sizeof *s->mem.pair_w);
    if (!s->pool) s->pool = pool_open((int)s->n_threads);
    if (!st->bytes || !st->slots || !st->free || !st->pins || !st->slot_of || !st->vram_of ||
        !st->heat || !st->is_coming || !st->is_written || !st->sum || !st->held || !st->version || !s->mem.zp ||
        !s->mem.zpair || !s->mem.hpair || !s->mem.local || !s->mem.items || !s->mem.batch || !s->mem.pair_row || !s->mem.pair_w ||
        !s->pool)
        return fail(FAIL_IO, "out of memory for %u experts", st->n_slots);
    return DONE;
}

/* Slots, tables and scratch for the model that is known now; none of its experts is here. */
static int memory_open(server *s) {
    store *st = &s->st;
    const k3_engine *const from[] = {s->e, s->part};
    st->slot_bytes = (s->expert_bytes + 4095) / 4096 * 4096;
    for (int k = 0; k < 2; k++)
        if (from[k] && st->slot_bytes < k3_expert_room(from[k]))
            st->slot_bytes = k3_expert_room(from[k]);
    s->mem.local_floats = 2 * (size_t)TIER_MAX_ROWS * ROW_TILE;
    int rc = memory_plan(s);
    if (rc == DONE) rc = memory_take(s);
    if (rc != DONE) return rc;
    memory_readable(s);
    for (size_t i = 0; i < (size_t)s->n_moe * s->m.n_experts; i++)
        st->slot_of[i] = st->vram_of[i] = NONE;
    for (uint32_t i = st->n_slots; i-- > 0;) {
        st->free[st->n_free++] = i;
        st->slots[i].il = s->m.n_dense; /* an expert there is, though not this slot's */
    }
    rc = s->o.has_gpu ? vram_open(s) : DONE;
    if (rc == DONE || s->o.model_dir || s->o.slice_dir) return rc;
    say("going on without the GPU"); /* whoever stages is not to blame */
    return DONE;
}

/* Files and geometry of a directory; of a slice with experts_only. */
static int files_open(server *s, const char *dir, bool experts_only, k3_engine **e) {
    k3_options o;
    k3_error err = {{0}};
    k3_options_default(&o);
    o.model_dir = dir;
    o.kernels = s->o.kernels;
    o.n_threads = (int)s->o.threads;
    o.sums = experts_only ? NULL : s->o.sums;
    o.ram_bytes = s->o.ram; /* the engine's tables are in it */
    o.headers_only = true;
    o.experts_only = experts_only;
    o.note = note;
    int rc = k3_engine_open(e, &o, &err);
    if (rc < 0) return fail_status(rc, &err);
    const k3_shape *sh = k3_engine_shape(*e);
    s->n_moe = sh->n_layers - sh->n_dense;
    s->n_threads = (uint32_t)k3_engine_threads(*e);
    s->expert_bytes = sh->expert_bytes;
    s->math = (expert_math){k3_engine_table(*e), sh->latent, sh->expert_inter, sh->situ_beta,
                            sh->situ_linear_beta};
    s->m = (tier_model){K3_NUMERICS_ID, s->m.sampled, s->m.by_sums,     sh->n_layers, sh->n_dense,
                        sh->n_experts,  sh->latent,   sh->expert_inter, sh->top_k};
    s->has_model = true;
    if (!tier_model_is_fit(&s->m))
        return fail(FAIL_MODEL, "%s: no experts, or more than a frame can name", dir);
    return DONE;
}

static int model_open(server *s) {
    k3_error err = {{0}};
    int rc = files_open(s, s->o.model_dir, false, &s->e);
    if (rc != DONE) return rc;
    k3_fingerprints print;
    rc = k3_expert_fingerprints(s->e, &print, &err);
    if (rc < 0) return fail_status(rc, &err);
    s->m.sampled = print.sampled;
    s->m.by_sums = print.by_sums;
    return DONE;
}

/* The manifest of the slice, and that config.json is its own. */
static int slice_read(server *s) {
    char path[4352];
    size_t n = 0, most = s->o.ram / 4 < SLICE_MAX_BYTES ? s->o.ram / 4 : SLICE_MAX_BYTES;
    if (most < 1u << 20) most = 1u << 20;
    snprintf(path, sizeof path, "%s/" SLICE_NAME, s->o.slice_dir);
    char *text = slice_file_read(path, most, &n); /* a good one is far shorter than its tables */
    if (!text)
        return fail(FAIL_MODEL, "%s: %s; is the slice whole? `k3 slice` goes on where it was", path,
                    errno ? strerror(errno) : "longer than it can be, or a quarter of --ram");
    const char *why = slice_parse(text, n, false, &s->list, NULL);
    free(text);
    if (why) return fail(FAIL_MODEL, "%s: %s; copy it again", path, why);
    if (strcmp(s->list.numerics, K3_NUMERICS_ID) != 0)
        return fail(FAIL_MODEL, "%s: of numerics %s, not " K3_NUMERICS_ID, path, s->list.numerics);
    snprintf(path, sizeof path, "%s/config.json", s->o.slice_dir);
    text = slice_file_read(path, most, &n);
    bool is_same = text && XXH3_64bits(text, n) == s->list.config_sum;
    free(text);
    if (is_same) return DONE;
    return fail(FAIL_MODEL, "%s: absent, or not the one that " SLICE_NAME " was written with",
                path);
}

/* Manifest, config.json and shards must be of one mind. The sums of the manifest are compared with
 * whatever is read; what it does not name is not served. */
static int slice_check(server *s) {
    const slice *l = &s->list;
    const char *dir = s->o.slice_dir;
    k3_error err = {{0}};
    const tier_model listed = {K3_NUMERICS_ID, s->m.sampled, s->m.by_sums, l->n_layers, l->n_dense,
                               l->n_experts,   l->latent,    l->inter,     l->top_k};
    char why[TIER_MAX_TEXT];
    if (tier_model_differs(&s->m, &listed, why, sizeof why) ||
        k3_f32_bits(s->math.beta) != l->beta_bits ||
        k3_f32_bits(s->math.linear_beta) != l->linear_beta_bits)
        return fail(FAIL_MODEL, "%s: " SLICE_NAME " is not of the model that config.json describes",
                    dir);
    int rc = k3_expert_use_sums(s->part, l->list, l->n, &err);
    return rc < 0 ? fail_status(rc, &err) : DONE;
}

/* A slice, beside the model or without it. */
static int slice_open(server *s) {
    const tier_model model = s->m;
    char why[TIER_MAX_TEXT];
    int rc = slice_read(s);
    if (rc == DONE) rc = files_open(s, s->o.slice_dir, true, &s->part);
    if (rc == DONE) rc = slice_check(s);
    if (rc != DONE) return rc;
    s->m.sampled = s->list.sampled;
    s->m.by_sums = s->list.by_sums;
    if (!s->e) return DONE;
    if (tier_model_differs(&model, &s->m, why, sizeof why))
        return fail(FAIL_MODEL, "--slice %s: not of the model in %s: %s", s->o.slice_dir,
                    s->o.model_dir, why);
    s->m = model; /* its files are read for what the slice lacks */
    return DONE;
}

/* Is there a way to bring experts here? */
static bool stage_is_possible(const server *s) {
    bool is_possible = s->o.n_keys[KEY_STAGES] > 0 || s->o.stage_name;
    for (uint32_t i = 0; i < s->o.n_listen; i++)
        is_possible = is_possible || strncmp(s->o.listen[i], "unix:", 5) == 0;
    return is_possible;
}

/* Without a model: only what computes. Whoever stages first says which. */
static int empty_open(server *s) {
    k3_error err = {{0}};
    int n_threads = 1;
    s->math.k = k3_machine_table(s->o.kernels, (int)s->o.threads, &n_threads, &err);
    if (!s->math.k) return fail_status(K3_EUSAGE, &err);
    s->n_threads = (uint32_t)n_threads;
    if (s->o.pins) return fail(FAIL_USAGE, "--pins: there is no --model to read them from");
    if (!stage_is_possible(s))
        return fail(FAIL_USAGE,
                    "no --model and no --slice, and nobody may stage: give --stage-psk-file FILE, "
                    "--stage-name NAME, or --listen unix:PATH");
    if (s->o.ram < OVERHEAD_BYTES)
        return fail(FAIL_BUDGET, "--ram of %llu bytes: without any expert the program needs %u",
                    (unsigned long long)s->o.ram, OVERHEAD_BYTES);
    return s->o.has_gpu ? vram_probe(s) : DONE;
}

/* One box a directory: two would write the same files. The lock goes with the process. */
static int keep_dir_lock(server *s, const char *dir) {
    s->keep_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->keep_fd < 0) return fail(FAIL_IO, "--keep %s: %s", dir, strerror(errno));
    if (flock(s->keep_fd, LOCK_EX | LOCK_NB) == 0) return DONE;
    if (errno != EWOULDBLOCK)
        return fail(FAIL_IO, "--keep %s: cannot be locked (%s); name another directory", dir,
                    strerror(errno));
    return fail(FAIL_IO, "--keep %s: another k3-tier keeps experts there; name another directory",
                dir);
}

/* Only an empty directory, or what --keep has written, is written to. Without k3.slice that is what
 * was left when a box was killed early: k3.slice.part comes only after the first shard. */
static int keep_dir_is_ours(const char *dir) {
    char path[4352];
    const char *strange = NULL;
    snprintf(path, sizeof path, "%s/kept-000000.safetensors", dir);
    bool has_shard = access(path, F_OK) == 0;
    snprintf(path, sizeof path, "%s/" SLICE_NAME, dir);
    if (has_shard && access(path, F_OK) == 0) return DONE;
    DIR *d = opendir(dir);
    if (!d) return fail(FAIL_IO, "--keep %s: %s", dir, strerror(errno));
    for (struct dirent *e; !strange && (e = readdir(d));) {
        const char *name = e->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strcmp(name, "lost+found") != 0 &&
            strncmp(name, "config.json", 11) != 0 && strncmp(name, "kept-", 5) != 0 &&
            !(has_shard && strncmp(name, SLICE_NAME, strlen(SLICE_NAME)) == 0))
            strange = strcpy(path, name);
    }
    closedir(d);
    if (!strange) return DONE;
    return fail(FAIL_USAGE,
                "--keep %s: there is %s, which --keep has not written; name another directory", dir,
                strange);
}

/* What was kept before is a slice; else there is room for one. */
static int keep_open(server *s) {
    char path[4352];
    const char *dir = s->o.keep_dir;
    if (s->o.model_dir || s->o.slice_dir)
        return fail(FAIL_USAGE,
                    "--keep: for a box that has no other files; without --model, --slice");
    if (strlen(dir) > 4000) return fail(FAIL_USAGE, "--keep: a name of 4000 bytes at most");
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return fail(FAIL_IO, "--keep %s: %s", dir, strerror(errno));
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (access(path, F_OK) == 0)
        return fail(FAIL_USAGE, "--keep %s: not written by --keep; serve it with --slice", dir);
    int rc = keep_dir_lock(s, dir);
    if (rc == DONE) rc = keep_dir_is_ours(dir);
    if (rc != DONE) return rc;
    snprintf(path, sizeof path, "%s/" SLICE_NAME, dir);
    if (access(path, F_OK) == 0) s->o.slice_dir = dir;
    return access(dir, W_OK) == 0 ? DONE : fail(FAIL_IO, "--keep %s: %s", dir, strerror(errno));
}

/* All there is to read experts from, and memory for them. */
static int sources_open(server *s) {
    store *st = &s->st;
    if (s->o.sums && !s->o.model_dir)
        return fail(FAIL_USAGE,
                    "--sums: there is no --model that they are of; a slice has its own");
    int rc = s->o.keep_dir ? keep_open(s) : DONE;
    if (rc != DONE) return rc;
    if (!s->o.model_dir && !s->o.slice_dir) return empty_open(s);
    if (s->o.model_dir) rc = model_open(s);
    if (rc == DONE && s->o.slice_dir) rc = slice_open(s);
    if (rc == DONE) rc = memory_open(s);
    if (rc == DONE && s->o.keep_dir) stage_keep(s, &s->list);
    if (rc != DONE || s->e) return rc;
    if (!(st->order = calloc(s->list.n, sizeof *st->order)))
        return fail(FAIL_IO, "out of memory for a list of %u experts", s->list.n);
    for (st->n_order = 0; st->n_order < s->list.n; st->n_order++)
        st->order[st->n_order] =
            (uint32_t)index_of(s, s->list.list[st->n_order].il, s->list.list[st->n_order].ie);
    return DONE;
}

/* Certificates, and addresses that they are for. */
static int tls_open(server *s) {
    tier_trust *t = &s->o.tls;
    char why[400];
    bool has_address = false;
    if (s->o.stage_name && !t->ca)
        return fail(FAIL_USAGE, "--stage-name: give --tls-ca FILE, who signs such certificates");
    if (!t->cert && !t->key && !t->ca) return DONE;
    t->flag = "--tls";
    for (uint32_t i = 0; i < s->o.n_listen; i++)
        has_address = has_address || strncmp(s->o.listen[i], "tls:", 4) == 0;
    if (!has_address)
        return fail(FAIL_USAGE, "--tls-cert, --tls-key, --tls-ca: no --listen begins with tls:");
    if (!t->cert) return fail(FAIL_USAGE, "--tls-cert FILE: which certificate is ours?");
    return tier_tls_open(&s->tls, t, why, sizeof why) < 0 ? fail(FAIL_USAGE, "%s", why) : DONE;
}

/* All keys; no two may be the same, or who has the one has the other's right. */
static int keys_read(server *s) {
    static const char *const name[] = {"--psk-file", "--stage-psk-file"};
    const tier_key *all[N_KEY_USES * MAX_KEYS];
    uint32_t n = 0;
    for (int use = 0; use < N_KEY_USES; use++)
        for (uint32_t i = 0; i < s->o.n_keys[use]; i++) {
            const char *path = s->o.key_file[use][i];
            tier_key *key = &s->key[use][i];
            const char *why = tier_key_read(path, key);
            for (uint32_t k = 0; k < n && !why; k++)
                if (all[k]->n == key->n && CRYPTO_memcmp(all[k]->bytes, key->bytes, key->n) == 0)
                    why = "the same key was given before: each has a right of its own";
            if (why) return fail(FAIL_USAGE, "%s %s: %s", name[use], path, why);
            all[n++] = key;
        }
    return DONE;
}

/* Activations of other people's texts go in there: a file that is ours alone to read, whatever the
 * umask says and whatever it was before. NULL and errno. */
static FILE *dump_open(const char *path) {
    struct stat st;
    if (strcmp(path, "-") == 0) return stderr;
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY, 0600);
    bool is_ok = fd >= 0 && fstat(fd, &st) == 0 &&
                 (!S_ISREG(st.st_mode) || (fchmod(fd, 0600) == 0 && ftruncate(fd, 0) == 0));
    FILE *f = is_ok ? fdopen(fd, "w") : NULL;
    int why = errno;
    if (!f && fd >= 0) close(fd);
    errno = why;
    return f;
}

static int server_open(server *s) {
    int rc = keys_read(s);
    if (rc == DONE) rc = tls_open(s);
    if (rc == DONE) rc = sources_open(s);
    if (rc == DONE && s->o.pins) rc = pins_read(s);
    if (s->o.n_listen == 0) s->o.listen[s->o.n_listen++] = "127.0.0.1:" TIER_PORT;
    for (uint32_t i = 0; rc == DONE && i < s->o.n_listen; i++)
        rc = listen_open(s, s->o.listen[i], false);
    if (rc == DONE && s->o.metrics) rc = listen_open(s, s->o.metrics, true);
    if (rc == DONE && s->o.dump && !(s->dump = dump_open(s->o.dump)))
        rc = fail(FAIL_IO, "--dump %s: %s", s->o.dump, strerror(errno));
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    signal_fd = s->wake_fd;
    s->st.is_filling = !s->o.no_fill;
    s->st.fill_at = XXH3_64bits(s->o.listen[0], strlen(s->o.listen[0])) % (1u << 30);
    s->start_ns = s->client_ns = clock_ns();
    return rc;
}

/* Give back all that memory_open took. */
static void memory_close(server *s) {
    store *st = &s->st;
    struct {
        void *p;
        size_t n;
    } region[] = {{st->bytes, st->n_slots * st->slot_bytes},
                  {s->mem.zp, s->m.latent * sizeof(float)},
                  {s->mem.zpair, BATCH_PAIRS * (size_t)s->m.latent * sizeof(float)},
                  {s->mem.hpair, BATCH_PAIRS * (size_t)s->m.inter * sizeof(float)},
                  {s->mem.local, s->n_threads * s->mem.local_floats * sizeof(float)}};
    void *block[] = {st->slots,      st->free,     st->pins,    st->slot_of, st->heat,
                     st->is_coming,  st->held,     st->version, st->order,   s->mem.items,
                     st->is_written, s->mem.batch,     s->mem.pair_row, s->mem.pair_w,   st->vram_of,
                     st->vram,       s->gpu_items, s->gpu_bad,  st->sum};
    pthread_mutex_lock(&st->lock); /* the thread that fills VRAM may be at work */
    bool had_vram = st->has_vram;
    st->has_vram = false;
    while (st->is_uploading) pthread_cond_wait(&st->work, &st->lock);
    pthread_mutex_unlock(&st->lock);
    for (size_t i = 0; i < COUNT(region); i++)
        if (region[i].p) munmap(region[i].p, region[i].n + 1);
    for (size_t i = 0; i < COUNT(block); i++) free(block[i]);
    st->bytes = NULL;
    s->mem.zp = s->mem.zpair = s->mem.hpair = s->mem.local = NULL;
    st->slots = NULL;
    st->free = st->pins = st->order = st->version = NULL;
    st->slot_of = st->vram_of = NULL;
    st->vram = NULL;
    st->n_vram = st->n_in_vram = st->n_twice = 0;
    s->gpu_items = NULL;
    s->gpu_bad = NULL;
    if (had_vram) { /* a device that hangs would never let it go */
        gpu_close(s->gpu);
        s->gpu = NULL;
    }
    st->heat = NULL;
    st->is_coming = st->is_written = st->held = NULL;
    st->sum = NULL;
    s->mem.items = NULL;
    s->mem.batch = NULL;
    s->mem.pair_row = NULL;
    s->mem.pair_w = NULL;
    st->n_slots = st->n_free = st->n_readable = st->n_order = 0;
}

/* False: --keep could not keep everything. */
static bool server_close(server *s) {
    for (uint32_t i = 0; i < MAX_CONNS; i++)
        if (s->conns[i].state != C_FREE) conn_close(s, &s->conns[i], NULL);
    for (uint32_t i = 0; i < s->n_listen; i++) {
        struct stat st; /* the name goes before another takes it, and if it is still our socket's */
        if (s->listen[i].path[0] && lstat(s->listen[i].path, &st) == 0 &&
            st.st_dev == s->listen[i].dev && st.st_ino == s->listen[i].ino)
            unlink(s->listen[i].path);
        close(s->listen[i].fd);
    }
    bool is_kept = keep_stop(&s->keep);
    if (s->keep_fd > 0) close(s->keep_fd);
    tier_tls_close(s->tls);
    k3_engine_close(s->e);
    k3_engine_close(s->part);
    free(s->list.list);
    memory_close(s);
    pool_close(s->pool);
    if (s->dump && s->dump != stderr) fclose(s->dump);
    OPENSSL_cleanse(s->key, sizeof s->key);
    return is_kept;
}

static int cmd_serve(server *s) {
    pthread_t warmers[WARMERS + 1]; /* the last one fills VRAM */
    uint32_t n = 0;
    struct sigaction sa = {.sa_handler = on_signal};
    pthread_mutex_init(&s->st.lock, NULL);
    clock_cond_init(&s->st.work);
    int rc = server_open(s);
    if (rc == DONE) {
        sigaction(SIGTERM, &sa, NULL);
        sigaction(SIGINT, &sa, NULL);
        if (signal(SIGHUP, SIG_IGN) != SIG_IGN) sigaction(SIGHUP, &sa, NULL); /* not under nohup */
        for (; s->has_model && n < WARMERS; n++)
            if (pthread_create(&warmers[n], NULL, warm_main, s) != 0) break;
        if (s->o.has_gpu && pthread_create(&warmers[n], NULL, vram_main, s) == 0) n++;
        if (s->has_model)
            say("%s: %u experts, room for %u; %s, %u threads; listening on %s",
                s->o.model_dir ? s->o.model_dir : s->o.slice_dir, s->st.n_readable, s->st.n_slots,
                s->math.k->name, s->n_threads, s->o.listen[0]);
        else
            say("no model: `k3 stage --to ADDR` brings experts; %s, %u threads; listening on %s",
                s->math.k->name, s->n_threads, s->o.listen[0]);
        listen_say_ports(s);
        serve(s);
    }
    pthread_mutex_lock(&s->st.lock);
    s->st.is_stopping = true;
    pthread_cond_broadcast(&s->st.work);
    pthread_mutex_unlock(&s->st.lock);
    while (n > 0) pthread_join(warmers[--n], NULL);
    return server_close(s) || rc != DONE ? rc : FAIL_IO;
}

#ifndef TIER_SERVER_TEST
/* Serve, with a word before on a --ram above what is free here, and one after on a --ram that is so small
 * that a unit was meant. */
static int cmd_serve_ram(server *s) {
    char text[320];
    unsigned long long n = s->o.ram;
    if (n == 0) return fail(FAIL_USAGE, "--ram SIZE: how much memory may experts take?");
    if (machine_ram_is_above("", n, 0, text, sizeof text)) say("note: %s", text);
    int rc = cmd_serve(s);
    if (rc == DONE || !s->o.ram_has_no_unit || n >= 1u << 20) return rc;
    return fail(rc, "--ram %llu was read as %llu bytes: did you mean --ram %lluG?", n, n, n);
}

static int version_say(void) {
    const char *commit = version_commit();
    return printf("k3-tier %s (%s)%s%s\n", K3_VERSION, K3_NUMERICS_ID, commit[0] ? ", commit " : "",
                  commit) < 0 || fflush(stdout) != 0;
}

/* At K3's dimensions. */
static int bench(const options *o) {
    char why[512];
    if (!o->has_gpu) return fail(FAIL_USAGE, "bench: of what? give --gpu");
    if (gpu_bench(3584, 3072, (int)o->gpu_device, o->vram, why, sizeof why) == 0) return DONE;
    return fail(FAIL_IO, "%s", why);
}

int main(int argc, char **argv) {
    static server s; /* over a hundred connections' worth: not for a stack */
    const char *addr = NULL;
    bool is_status = argc > 1 && strcmp(argv[1], "status") == 0;
    bool is_bench = argc > 1 && strcmp(argv[1], "bench") == 0;
    s.o = (options){.spin_us = 50, .clients = 8};
    stdio_guard();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a write that says so is better */
    for (int i = 1; i < argc; i++) {
        bool is_help = strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0;
        bool is_version = strcmp(argv[i], "-V") == 0 || strcmp(argv[i], "--version") == 0;
        if (is_help || is_version) return is_help ? puts(HELP) < 0 : version_say();
    }
    int rc = options_parse(&s.o, argc, argv, is_status || is_bench ? 2 : 1, is_status ? &addr : NULL);
    if (rc != DONE) return rc;
    if (is_status) {
        if (s.o.n_keys[KEY_ASKS] + s.o.n_keys[KEY_STAGES] > 1)
            return fail(FAIL_USAGE, "status: one key is enough");
        if ((rc = keys_read(&s)) != DONE) return rc;
        return addr ? status(addr, &s.key[s.o.n_keys[KEY_STAGES] > 0][0], &s.o.tls)
                    : fail(FAIL_USAGE, "status: which ADDR?");
    }
    if (is_bench) return bench(&s.o);
#ifndef K3_HAVE_GPU
    if (s.o.has_gpu)
        return fail(FAIL_IO, "gpu: this k3-tier was built without it; `make gpu` needs nvcc");
#endif
    if ((s.o.vram || s.o.gpu_device) && !s.o.has_gpu)
        return fail(FAIL_USAGE, "--vram and --gpu-device are for --gpu");
    return cmd_serve_ram(&s);
}
#endif
