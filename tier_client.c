/* tier_client.c - asks far boxes for expert sums, keeps a deadline, never fails a token.
 *
 *   1 Boxes: who owns what        4 The background: dial, hello, try again
 *   2 Frames in and out           5 Open and close
 *   3 One layer: ask, send, join
 *
 * What holds everywhere:
 *   - a box's connection, buffers and bitmap belong to its background thread until the box is up, then
 *     to the thread that computes, until it fails; they change hands under the box's lock;
 *   - nothing of an answer is used before all of it was checked;
 *   - a box may cost the computing thread 1/REST of the time, and WASTE_MS at once: who takes more and
 *     gives nothing for it is left alone, however it does that (box_wastes);
 *   - of the calls within a layer none blocks but tier_join with `waits`, to the deadline, and tier_send of a frame that is
 *     longer than the socket's buffer, to an eighth of it.
 */
#include "tier_dial.h"

#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <time.h>

/* ==== 1. Boxes ======================================================================= */

enum {
    FRAMES_AT_ONCE = 256, /* of one box, then something else is looked at */
    FILLS_AT_ONCE = 64,   /* pieces of what comes, the same: TLS gives a record, of one byte perhaps */
    FILLS_OF_HELLO = 4096, /* until a box is up; the longest resident frame in segments, ten times */
    EMPTY_NEWS = 64,      /* resident frames without news, since an answer that served */
    WASTE_MS = 25,        /* what a box may cost at once, beside one wait */
    MISSES = 3,          /* in a row, and a box is left alone; an answer makes up for half a miss */
    REST = 40,           /* times as long as the last miss took, at least: what it costs is 1/40 */
    DIAL_MS = 3000,      /* name, connection, proxy and TLS        */
    FIRST_PAUSE_MS = 50, /* until the next try; doubled each time  */
    LAST_DIAL_MS = 2000, /* longest pause when nobody is there     */
    LAST_PAUSE_MS = 30000, /* longest pause when a box misbehaves    */
    MAX_PATH = 1024        /* bytes of a certificate's file name     */
};

/* What dialling takes for a while, and TLS with its authorities for good. */
#define DIAL_BYTES (256u << 10)
#define LINK_TLS_BYTES (2u << 20)

typedef struct {
    uint32_t ie, n, first; /* pairs [first, first + n) of the list */
} asked;

/* Frames of one connection: one that is sent, those that come. */
typedef struct {
    uint8_t *out, *in;
    size_t n_out, i_out, n_in, i_in, in_cap; /* in: [i_in, n_in) is to be looked at */
    bool is_behind;                          /* more has come than was looked at so far */
} box_frames;

/* What a box was worth so far. */
typedef struct {
    uint32_t misses, troubles, dials; /* misses: in halves */
    bool has_served; /* since the connection began           */
    bool is_doubted; /* its last answer did not come in time: one expert at a time   */
    uint64_t waste_ns, waste_at_ns; /* time it took for nothing, less what was forgiven; as of then */
    uint64_t spent_ns;              /* on what came since the question, before it was waited for    */
    uint32_t n_empty;               /* resident frames without news                                 */
} box_record;

typedef struct box {
    tier *t;
    char name[280];
    tier_addr addr;
    tier_key key;     /* what we prove to it; n 0: nothing            */
    bool must_ask;    /* a box here that asks for no key is not it    */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool is_up;        /* under the lock: whose the rest is    */
    bool is_stopping;  /* under the lock                       */
    bool is_banned;    /* under the lock: never again          */
    bool has_tried;    /* under the lock: the first dial is over */
    uint64_t retry_ns; /* under the lock: not before           */
    char note[400];    /* under the lock; "": none             */

    bool is_mine; /* the computing thread's own view of is_up */
    tier_link link;
    uint32_t max_rows, n_held, capacity, n_readable;
    uint8_t *held; /* [n_layers - n_dense][map bytes]      */
    box_record so_far;
    bool is_sampled; /* its model was compared by samples only */
    uint32_t n_fills;               /* of the hello                                                 */

    box_frames f;
    bool is_out; /* a request of this layer is unanswered */
    uint64_t id; /* of the last request                  */
    uint32_t il; /* its layer                            */
    uint64_t sent_ns, hedge_ns; /* when it was sent; when it goes to a second box as well */
    double usual_ns;            /* running: from sent to answered, for each pair; 0: not known */
    struct box *twin;           /* the other box with the same question out; NULL: none        */
    bool is_second;             /* of the two, the one that was asked later                    */
    uint64_t *figures;          /* where a stats frame goes that was asked for; NULL: none was */
    asked *list;
    uint32_t n_list, n_pairs, n_rows;
    uint32_t *row, *place; /* [pairs] rows of the chunk; [max_rows] their places in the frame */
    float *w;              /* [pairs] */
    uint8_t *n_served;     /* [max_rows] served pairs of each place */
    uint16_t (*wish)[2];   /* [TIER_MAX_WISHES]                    */
    uint32_t n_wishes;
} box;

struct tier {
    tier_model m;
    tier_key key;
    tier_trust trust;
    char path[3][MAX_PATH]; /* what trust points to */
    uint32_t spin_us, max_rows, n_boxes;
    bool is_hedging;
    const float *z; /* of the layer, from tier_send on */
    uint64_t next_id, deadline_ns, wished_ns;
    uint64_t wait_ns; /* since when the layer's answers are waited for; 0: not yet */
    tier_stats stats;
    box boxes[TIER_MAX_BOXES];
};

/* Leave one line for whoever asks; the last one counts. Lock held. */
__attribute__((format(printf, 2, 3))) static void box_say(box *b, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = snprintf(b->note, sizeof b->note, "tier %s: ", b->name);
    if (n > 0 && (size_t)n < sizeof b->note)
        vsnprintf(b->note + n, sizeof b->note - (size_t)n, fmt, ap);
    va_end(ap);
}

/* The pause before try `n`, n counted from 1. */
static uint64_t pause_ns(uint32_t n, uint64_t last_ms) {
    uint64_t ms = n > 16 ? last_ms : (uint64_t)FIRST_PAUSE_MS << (n - 1);
    return (ms < last_ms ? ms : last_ms) * 1000000u;
}

/* The computing thread gives a box up: close, and let the background try again, not before
 * `rest_ns` are over. */
static void box_drop_for(box *b, const char *why, uint64_t rest_ns) {
    uint64_t pause;
    b->link.by->close(&b->link);
    b->is_mine = false;
    b->so_far.troubles++;
    b->t->stats.lost++;
    if (rest_ns > LAST_PAUSE_MS * 1000000ull) rest_ns = LAST_PAUSE_MS * 1000000ull;
    pause = pause_ns(b->so_far.troubles, LAST_PAUSE_MS);
    pthread_mutex_lock(&b->lock);
    b->is_up = false;
    b->retry_ns = clock_ns() + (pause > rest_ns ? pause : rest_ns);
    box_say(b, "%s; going on without it", why);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void box_drop(box *b, const char *why) { box_drop_for(b, why, 0); }

static const char wasteful[] = "takes more time than it saves";

/* A box took `ns` of the computing thread's time and gave nothing for it. That is forgiven with time,
 * one part in REST. True: it is too much. */
static bool box_wastes(box *b, uint64_t ns) {
    const tier *t = b->t;
    uint64_t now = clock_ns(), forgiven = (now - b->so_far.waste_at_ns) / REST, most = WASTE_MS * 1000000ull;
    b->so_far.waste_ns = (b->so_far.waste_ns > forgiven ? b->so_far.waste_ns - forgiven : 0) + ns;
    b->so_far.waste_at_ns = now;
    if ((b->so_far.troubles == 0 || b->so_far.has_served) && t->deadline_ns > b->sent_ns)
        most += t->deadline_ns - b->sent_ns; /* one answer may come late and empty */
    return b->so_far.waste_ns > most;
}

/* ... so it is left alone for REST times as long. */
static void box_drop_wasteful(box *b) {
    uint64_t waste = b->so_far.waste_ns;
    b->so_far.waste_ns = 0;
    box_drop_for(b, wasteful, waste < UINT64_MAX / REST ? REST * waste : UINT64_MAX);
}

/* ==== 2. Frames in and out =========================================================== */

/* Send what is left of the frame in `out`. False when the connection is over. */
static bool box_flush(box *b) {
    while (b->f.i_out < b->f.n_out) {
        ssize_t n = b->link.by->send(&b->link, b->f.out + b->f.i_out, b->f.n_out - b->f.i_out);
        if (n == 0) return true;
        if (n < 0) return false;
        b->f.i_out += (size_t)n;
    }
    b->f.i_out = b->f.n_out = 0;
    return true;
}

static bool box_begin_frame(box *b, enum tier_type type, uint64_t id, size_t n) {
    b->f.n_out = tier_seal(b->f.out, type, id, (uint32_t)n);
    b->f.i_out = 0;
    return box_flush(b);
}

/* Take in what has come; NULL, or why the connection is over. */
static const char *box_fill(box *b) {
    if (b->f.i_in > 0) memmove(b->f.in, b->f.in + b->f.i_in, b->f.n_in - b->f.i_in);
    b->f.n_in -= b->f.i_in;
    b->f.i_in = 0;
    if (b->f.n_in == b->f.in_cap) return NULL; /* a whole frame is there: to be taken first */
    ssize_t n = b->link.by->recv(&b->link, b->f.in + b->f.n_in, b->f.in_cap - b->f.n_in);
    if (n < 0) return b->link.why;
    b->f.n_in += (size_t)n;
    return NULL;
}

/* The frame at the front of `in`: 1 and its head, 0 not whole yet, -1 and why it is no good. */
static int box_frame(const box *b, size_t most, tier_head *h, const char **why) {
    const uint8_t *in = b->f.in + b->f.i_in;
    size_t n = b->f.n_in - b->f.i_in;
    if (n < TIER_HEAD_BYTES) return 0;
    if ((*why = tier_head_parse(in, h)) != NULL) return -1;
    size_t fit = most ? most : tier_most_bytes(&b->t->m, h->type, false, b->t->max_rows);
    if (h->n > fit) {
        *why = "a frame beyond the limit";
        return -1;
    }
    if (n < TIER_HEAD_BYTES + (size_t)h->n) return 0;
    if (tier_sum(in, h->n) == h->sum) return 1;
    *why = "a frame that does not match its sum";
    return -1;
}

/* The payload of the frame at the front. */
static const uint8_t *box_payload(const box *b) { return b->f.in + b->f.i_in + TIER_HEAD_BYTES; }

/* The front frame was used. */
static void box_pop(box *b, const tier_head *h) {
    b->f.i_in += TIER_HEAD_BYTES + (size_t)h->n;
    if (b->f.i_in == b->f.n_in) b->f.i_in = b->f.n_in = 0;
}

static uint32_t bits(const uint8_t *p, size_t n) {
    uint32_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += (uint32_t)__builtin_popcount(p[i]);
    return sum;
}

/* What the box holds of some layers. Only layers that are named are counted again, and a frame that
 * changes nothing has no news. */
static const char *box_take_resident(box *b, const uint8_t *p, size_t n) {
    const tier_model *m = &b->t->m;
    size_t map = tier_map_bytes(m->n_experts), one = 4 + map;
    const char *why = n % one ? tier_resident_parse(m, p, n, b->held) : NULL;
    bool has_news = false;
    for (; !why && n > 0; n -= one, p += one) {
        uint32_t il = tier_get16(p);
        bool is_layer = il >= m->n_dense && il < m->n_layers;
        uint8_t *held = b->held + (is_layer ? il - m->n_dense : 0) * map;
        uint32_t before = bits(held, map);
        has_news = has_news || (is_layer && memcmp(held, p + 4, map) != 0);
        why = tier_resident_parse(m, p, one, b->held);
        if (!why) b->n_held += bits(held, map) - before;
    }
    b->so_far.n_empty = has_news ? 0 : b->so_far.n_empty + 1;
    return !why && b->so_far.n_empty > EMPTY_NEWS ? "news without end, and nothing new" : why;
}

/* ==== 3. One layer =================================================================== */

/* Tell the fate of everything that was asked of a box. `served` NULL: nothing.
 *
 * Exactly once, also when a second box was asked the same question: the first answer that serves
 * anything ends the question for both, since what is not out is not listened to (box_digest); a box
 * that fails leaves the question to the other; only the last of the two says that all is missing. */
static void box_settle(box *b, const uint8_t *served, tier_settled_fn fn, void *user) {
    box *twin = b->twin;
    b->is_out = false;
    b->twin = NULL;
    if (twin) {
        twin->twin = NULL;
        if (!served && twin->is_out) return;
        twin->is_out = false;
    }
    for (uint32_t x = 0; x < b->n_list; x++) {
        bool is_served = served && (served[x / 8] >> x % 8 & 1);
        b->t->stats.served += is_served;
        if (fn) fn(user, b->list[x].ie, is_served ? (int)(b - b->t->boxes) : -1);
    }
}

/* An answer did not come in time. */
static void box_miss(box *b) {
    uint64_t took = clock_ns() - b->sent_ns;
    b->t->stats.late++;
    b->so_far.is_doubted = true;
    b->so_far.misses += 2;
    if (b->so_far.misses >= (b->so_far.troubles > 0 && !b->so_far.has_served ? 2 : 2 * MISSES))
        box_drop_for(b, "does not answer in time", took < UINT64_MAX / REST ? REST * took : 0);
}

/* Every sum is at most 2^57 for each served pair of its row: then adding all boxes' sums and the
 * rest cannot overflow (NUMERICS 5), whatever a box says. */
static const char *reply_range(const box *b, const tier_reply *r) {
    size_t lat = b->t->m.latent;
    for (uint32_t i = 0; i < r->n_rows; i++) {
        uint64_t most = (uint64_t)b->n_served[i] << 57, n_bad = 0;
        for (size_t k = 0; k < lat; k++) {
            uint64_t q = tier_get64(r->sums + (i * lat + k) * 8);
            n_bad += (q >> 63 ? 0 - q : q) > most;
        }
        if (n_bad) return "a sum out of range";
    }
    return NULL;
}

/* An answer came, and serves n_served of the experts that were asked for: what that says of its box.
 * One that serves nothing clears no doubt, and time waited counts as wasted for the part that is not
 * served. True: it wastes too much. */
static bool box_answered(box *b, uint32_t n_served) {
    uint64_t now = clock_ns(), since = b->t->wait_ns;
    double ns = (double)(now - b->sent_ns) / (b->n_pairs ? b->n_pairs : 1);
    uint64_t waited = since == 0 ? 0 : now - (since > b->sent_ns ? since : b->sent_ns);
    uint32_t n_missing = b->n_list - n_served;
    if (n_served > 0 || n_missing == 0) {
        b->so_far.misses -= b->so_far.misses > 0;
        b->so_far.is_doubted = false;
    }
    if (n_served > 0) {
        b->usual_ns = b->usual_ns > 0 ? 0.8 * b->usual_ns + 0.2 * ns : ns;
        b->so_far.troubles = 0;
        b->so_far.has_served = true;
        b->so_far.n_empty = 0;
    }
    if (n_missing == 0) return false;
    return box_wastes(b, (waited + b->so_far.spent_ns) / b->n_list * n_missing);
}

/* NULL and the sums added to Q, or why the answer is not believed. */
static const char *box_take_reply(box *b, const uint8_t *p, size_t n, int64_t *Q,
                                  tier_settled_fn fn, void *user) {
    tier_reply r;
    size_t lat = b->t->m.latent;
    uint32_t n_served = 0;
    const char *why = tier_reply_parse(&b->t->m, p, n, &r);
    if (why) return why;
    if (r.il != b->il || r.n_experts != b->n_list) return "an answer to another question";
    memset(b->n_served, 0, b->n_rows);
    for (uint32_t x = 0; x < b->n_list; x++) {
        const asked *a = &b->list[x];
        if (!(r.served[x / 8] >> x % 8 & 1)) continue;
        n_served++;
        for (uint32_t j = 0; j < a->n; j++) b->n_served[b->place[b->row[a->first + j]]]++;
    }
    if (r.n_rows != (n_served ? b->n_rows : 0)) return "an answer to another question";
    if ((why = reply_range(b, &r)) != NULL) return why;
    for (uint32_t t = 0; r.n_rows > 0 && t < b->t->max_rows; t++) {
        if (b->place[t] == UINT32_MAX) continue;
        const uint8_t *from = r.sums + b->place[t] * lat * 8;
        for (size_t k = 0; k < lat; k++) Q[t * lat + k] += (int64_t)tier_get64(from + 8 * k);
    }
    b->t->stats.queue_ns = r.queue_ns;
    b->t->stats.compute_ns = r.compute_ns;
    bool is_wasteful = box_answered(b, n_served);
    box *slow = b->is_second ? b->twin : NULL;
    box_settle(b, n_served ? r.served : NULL, fn, user);
    if (slow && n_served) box_miss(slow);
    return is_wasteful ? wasteful : NULL;
}

/* Use the frame at the front, looked at since `start`; NULL, or why the connection is over. */
static const char *box_digest(box *b, const tier_head *h, uint64_t start, int64_t *Q,
                              tier_settled_fn fn, void *user) {
    const uint8_t *p = box_payload(b);
    const char *why;
    switch (h->type) {
    case TIER_RESIDENT: return box_take_resident(b, p, h->n);
    case TIER_STATS:
        if (!b->figures || h->n != TIER_N_STATS * 8) return "a frame out of turn";
        for (int i = 0; i < TIER_N_STATS; i++) b->figures[i] = tier_get64(p + 8 * i);
        b->figures = NULL;
        return NULL;
    case TIER_REPLY: /* an older one came too late, or a second time */
        if (!b->is_out || h->id != b->id)
            return h->id > b->id ? "an answer that nobody asked for" : NULL;
        why = box_take_reply(b, p, h->n, Q, fn, user);
        b->t->stats.join_ns = clock_ns() - start;
        return why;
    case TIER_GOODBYE: return "said goodbye";
    default: return "a frame out of turn";
    }
}

/* Time since `start` went into what a box sent. While its answer is waited for that is part of the wait
 * (box_answered). */
static void box_took(box *b, uint64_t start) {
    uint64_t took = clock_ns() - start;
    if (b->is_out)
        b->so_far.spent_ns += b->t->wait_ns == 0 ? took : 0;
    else if (box_wastes(b, took))
        box_drop_wasteful(b);
}

/* Move bytes both ways and use the frames that are whole; a box that fails is settled and dropped.
 * One that sends without end does not hold us: after so many frames, bytes or pieces it is behind, and
 * what else it sent is looked at the next time. */
static void box_pump(box *b, int64_t *Q, tier_settled_fn fn, void *user) {
    const char *why = box_flush(b) ? NULL : "the connection broke";
    tier_head h;
    size_t n_frames = 0, n_bytes = 0, n_fills = 0;
    bool was_out = b->is_out;
    uint64_t begin = clock_ns();
    while (!why) {
        uint64_t start = clock_ns();
        int rc = box_frame(b, 0, &h, &why);
        b->f.is_behind = (rc > 0 && (n_frames >= FRAMES_AT_ONCE || n_bytes > b->f.in_cap)) ||
                       (rc == 0 && n_fills >= FILLS_AT_ONCE);
        if (b->f.is_behind) break;
        n_frames++;
        n_bytes += rc > 0 ? h.n : 0;
        if (rc > 0 && !(why = box_digest(b, &h, start, Q, fn, user))) box_pop(b, &h);
        if (rc < 0 || (rc > 0 && why && why != wasteful && strcmp(why, "said goodbye") != 0))
            b->t->stats.refused++;
        if (rc != 0) continue;
        size_t before = b->f.n_in - b->f.i_in;
        why = box_fill(b);
        n_fills++;
        if (!why && b->f.n_in == before) break;
    }
    if (!why && (n_frames > 0 || n_fills > 1 || b->link.holds) && was_out == b->is_out)
        box_took(b, begin);
    if (!why) return;
    if (b->is_out) box_settle(b, NULL, fn, user);
    if (why == wasteful)
        box_drop_wasteful(b);
    else
        box_drop(b, why);
}

static void box_send_wishes(box *b) {
    uint8_t *p = b->f.out + TIER_HEAD_BYTES;
    for (uint32_t i = 0; i < b->n_wishes; i++) {
        tier_put16(p + 4 * i, b->wish[i][0]);
        tier_put16(p + 4 * i + 2, b->wish[i][1]);
    }
    size_t n = b->n_wishes * 4;
    b->n_wishes = 0;
    if (!box_begin_frame(b, TIER_WISH, 0, n)) box_drop(b, "the connection broke");
}

void tier_begin(tier *t) {
    uint64_t now = clock_ns();
    bool is_time = now - t->wished_ns > 20000000u;
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[i];
        if (!b->is_mine) {
            pthread_mutex_lock(&b->lock);
            b->is_mine = b->is_up && !b->is_banned;
            pthread_mutex_unlock(&b->lock);
        }
        b->is_out = false; /* still out when the step before ended with an error */
        b->twin = NULL;
        b->n_list = b->n_pairs = 0;
        if (b->is_mine) box_pump(b, NULL, NULL, NULL);
        if (b->is_mine && b->f.n_out > 0) box_miss(b); /* it does not even read */
        if (b->is_mine && b->f.n_out == 0 && b->n_wishes > 0 && (is_time || b->n_wishes >= 64)) {
            box_send_wishes(b);
            t->wished_ns = now;
        }
    }
}

static bool box_has(const box *b, uint32_t il, uint32_t ie) {
    const tier_model *m = &b->t->m;
    const uint8_t *map = b->held + (size_t)(il - m->n_dense) * tier_map_bytes(m->n_experts);
    return b->is_mine && b->f.n_out == 0 && (map[ie / 8] >> ie % 8 & 1);
}

bool tier_has(const tier *t, uint32_t il, uint32_t ie) {
    for (uint32_t i = 0; i < t->n_boxes; i++)
        if (box_has(&t->boxes[i], il, ie)) return true;
    return false;
}

bool tier_ask(tier *t, uint32_t il, uint32_t ie, uint32_t n, const uint32_t *row, const float *w) {
    box *b = NULL;
    for (uint32_t i = 0; i < t->n_boxes; i++) { /* the one with the least to do */
        box *c = &t->boxes[i];
        if (!box_has(c, il, ie) || row[n - 1] >= c->max_rows) continue;
        if (c->so_far.is_doubted && c->n_list > 0) continue;
        if (!b || c->n_pairs < b->n_pairs) b = c;
    }
    if (!b || b->n_pairs + n > t->max_rows * t->m.top_k) return false;
    if (b->n_list == 0) {
        memset(b->place, 0xff, t->max_rows * sizeof *b->place);
        b->il = il;
    }
    b->list[b->n_list++] = (asked){ie, n, b->n_pairs};
    for (uint32_t j = 0; j < n; j++) {
        b->row[b->n_pairs] = row[j];
        b->w[b->n_pairs++] = w[j];
        b->place[row[j]] = 0;
    }
    t->stats.asked++;
    return true;
}

void tier_wish(tier *t, uint32_t il, uint32_t ie) {
    uint64_t home = ((uint64_t)il * t->m.n_experts + ie) * 0x9e3779b97f4a7c15u >> 33;
    uint32_t n_all = t->m.n_experts * (t->m.n_layers - t->m.n_dense);
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[(home + i) % t->n_boxes];
        if (!b->is_mine || b->n_readable < n_all) continue; /* it may not have it to read */
        if (b->n_held < b->capacity || b->capacity < n_all)
            if (b->n_wishes < TIER_MAX_WISHES) {
                b->wish[b->n_wishes][0] = (uint16_t)il;
                b->wish[b->n_wishes++][1] = (uint16_t)ie;
            }
        return;
    }
}

/* Write the request that a box's list stands for. Returns the bytes of its payload. */
static size_t box_write_request(box *b, const float *z, uint32_t wait_us) {
    size_t lat = b->t->m.latent;
    uint8_t *p = b->f.out + TIER_HEAD_BYTES, *to = p + TIER_FIXED_BYTES;
    b->n_rows = 0;
    for (uint32_t t = 0; t < b->t->max_rows; t++) {
        if (b->place[t] == UINT32_MAX) continue;
        b->place[t] = b->n_rows++;
        memcpy(to, z + t * lat, lat * sizeof *z);
        to += lat * sizeof *z;
    }
    memset(p, 0, TIER_FIXED_BYTES);
    tier_put16(p, b->il);
    tier_put16(p + 2, b->n_rows);
    tier_put16(p + 4, b->n_list);
    tier_put32(p + 8, b->n_pairs);
    tier_put32(p + 12, wait_us);
    for (uint32_t x = 0; x < b->n_list; x++, to += 4) {
        tier_put16(to, b->list[x].ie);
        tier_put16(to + 2, b->list[x].n);
    }
    memcpy(to, b->w, b->n_pairs * sizeof *b->w);
    to += b->n_pairs * sizeof *b->w;
    for (uint32_t j = 0; j < b->n_pairs; j++, to += 2) tier_put16(to, b->place[b->row[j]]);
    return (size_t)(to - p);
}

static void sleep_on(struct pollfd *fds, nfds_t n, uint64_t ns) {
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
    ppoll(fds, n, &ts, NULL);
}

/* Send the question that a box's list stands for. Of a box that is gone tier_join takes notice. */
static void box_ask(box *b, uint64_t now) {
    tier *t = b->t;
    uint64_t wait = t->deadline_ns > now ? t->deadline_ns - now : 0;
    double usual = 2 * b->usual_ns * b->n_pairs;
    b->is_out = true;
    b->is_second = false;
    b->id = t->next_id++;
    b->sent_ns = now;
    b->so_far.spent_ns = 0;
    b->hedge_ns = now + (usual > 0 && usual < (double)wait / 2 ? (uint64_t)usual : wait / 2);
    if (!b->is_mine) return;
    size_t n =
        box_write_request(b, t->z, wait / 1000 < UINT32_MAX ? (uint32_t)(wait / 1000) : UINT32_MAX);
    b->f.n_out = tier_seal(b->f.out, TIER_REQUEST, b->id, (uint32_t)n);
    b->f.i_out = 0;
    uint64_t packed = clock_ns();
    bool is_ok = box_flush(b);
    while (is_ok && b->f.n_out > 0 && clock_ns() - now < wait / 8) { /* a long frame */
        sleep_on(&(struct pollfd){.fd = b->link.fd, .events = POLLOUT}, 1, wait / 32);
        is_ok = box_flush(b);
    }
    t->stats.pack_ns += packed - now;
    t->stats.send_ns += clock_ns() - packed;
    if (!is_ok) box_drop(b, "the connection broke");
}

void tier_send(tier *t, const float *z, uint64_t deadline_ns) {
    t->z = z;
    t->deadline_ns = deadline_ns;
    t->wait_ns = 0;
    t->stats.pack_ns = t->stats.send_ns = 0;
    for (uint32_t i = 0; i < t->n_boxes; i++)
        if (t->boxes[i].n_list > 0) box_ask(&t->boxes[i], clock_ns());
}

void tier_ping(tier *t, uint64_t deadline_ns) {
    t->deadline_ns = deadline_ns;
    t->wait_ns = 0;
    t->stats.pack_ns = t->stats.send_ns = 0;
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[i];
        if (!b->is_mine || b->f.n_out > 0) continue;
        memset(b->place, 0xff, t->max_rows * sizeof *b->place);
        b->n_list = b->n_pairs = 0;
        b->il = t->m.n_dense;
        box_ask(b, clock_ns());
    }
}

/* Can this box be asked b's question? It must have nothing to do and hold all of it. */
static bool box_can_second(const box *c, const box *b) {
    if (c == b || !c->is_mine || c->is_out || c->so_far.is_doubted) return false;
    if (c->max_rows < b->max_rows) return false;
    for (uint32_t x = 0; x < b->n_list; x++)
        if (!box_has(c, b->il, b->list[x].ie)) return false;
    return true;
}

/* Box b is later than usual: its question goes, as it is and once, to a second box. A sum cannot be
 * taken apart, so it is the whole question or nothing. */
static void box_hedge(box *b, uint64_t now) {
    tier *t = b->t;
    b->hedge_ns = UINT64_MAX;
    for (uint32_t i = 0; i < t->n_boxes && b->n_list > 0; i++) {
        box *c = &t->boxes[i];
        if (!box_can_second(c, b)) continue;
        memcpy(c->list, b->list, b->n_list * sizeof *b->list);
        memcpy(c->row, b->row, b->n_pairs * sizeof *b->row);
        memcpy(c->w, b->w, b->n_pairs * sizeof *b->w);
        memcpy(c->place, b->place, t->max_rows * sizeof *b->place);
        c->n_list = b->n_list;
        c->n_pairs = b->n_pairs;
        c->il = b->il;
        c->twin = b;
        b->twin = c;
        t->stats.hedged++;
        box_ask(c, now);
        c->is_second = true;
        c->hedge_ns = UINT64_MAX;
        return;
    }
}

/* The deadline is over: what is out is missing. */
static void join_late(tier *t, tier_settled_fn fn, void *user) {
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[i];
        if (!b->is_out) continue;
        box_settle(b, NULL, fn, user);
        if (b->is_mine) box_miss(b);
    }
}

static inline void spin_once(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

uint32_t tier_join(tier *t, bool waits, int64_t *Q, size_t apart, tier_settled_fn fn, void *user) {
    struct pollfd fds[TIER_MAX_BOXES];
    if (waits && t->wait_ns == 0) t->wait_ns = clock_ns();
    for (uint64_t spin_end = 0;;) {
        uint32_t n_out = 0, n_fds = 0;
        uint64_t now = clock_ns(), next = t->deadline_ns;
        bool is_behind = false;
        for (uint32_t i = 0; i < t->n_boxes; i++) {
            box *b = &t->boxes[i];
            if (b->is_out && b->is_mine) box_pump(b, Q + i * apart, fn, user);
            if (b->is_out && !b->is_mine) box_settle(b, NULL, fn, user);
            if (b->is_out && t->is_hedging && now >= b->hedge_ns) box_hedge(b, now);
        }
        for (uint32_t i = 0; i < t->n_boxes; i++) {
            box *b = &t->boxes[i];
            if (!b->is_out) continue;
            if (!b->twin || b->is_second) n_out += b->n_list;
            is_behind = is_behind || b->f.is_behind;
            if (t->is_hedging && b->hedge_ns < next) next = b->hedge_ns;
            fds[n_fds++] = (struct pollfd){
                .fd = b->link.fd, .events = (short)(POLLIN | (b->f.n_out > 0 ? POLLOUT : 0))};
        }
        if (n_fds == 0) return 0;
        now = clock_ns();
        if (now >= t->deadline_ns) {
            join_late(t, fn, user);
            return 0;
        }
        if (!waits) return n_out;
        if (spin_end == 0) spin_end = now + t->spin_us * 1000u;
        if (now < spin_end)
            spin_once();
        else if (next > now && !is_behind)
            sleep_on(fds, n_fds, next - now);
    }
}

bool tier_figures(tier *t, uint64_t *out, uint64_t deadline_ns) {
    box *b = &t->boxes[0];
    if (!b->is_mine || b->f.n_out > 0) return false;
    b->figures = out;
    if (!box_begin_frame(b, TIER_STATS, 0, 0)) box_drop(b, "the connection broke");
    while (b->is_mine && b->figures && clock_ns() < deadline_ns) {
        box_pump(b, NULL, NULL, NULL);
        if (b->is_mine && b->figures && !b->f.is_behind)
            sleep_on(&(struct pollfd){.fd = b->link.fd, .events = POLLIN}, 1, 1000000);
    }
    bool has = b->figures == NULL;
    b->figures = NULL;
    return has;
}

void tier_ban(tier *t, uint32_t i) {
    box *b = &t->boxes[i];
    t->stats.refused++;
    pthread_mutex_lock(&b->lock);
    b->is_banned = true;
    pthread_mutex_unlock(&b->lock);
    if (b->is_mine) box_drop(b, "its sums are wrong: never asked again");
}

/* ==== 4. The background ============================================================== */

static bool box_is_stopping(void *arg) {
    box *b = arg;
    pthread_mutex_lock(&b->lock);
    bool is_stopping = b->is_stopping;
    pthread_mutex_unlock(&b->lock);
    return is_stopping;
}

/* Take in some of the hello: what comes may be without end, or a byte at a time. */
static const char *hello_fill(box *b) {
    return ++b->n_fills > FILLS_OF_HELLO ? "it talks without end" : box_fill(b);
}

/* Send the frame in `out` and wait for the next; NULL, or why not. */
static const char *hello_turn(box *b, uint64_t until_ns, size_t most, tier_head *h) {
    const char *why = NULL;
    int rc;
    while (b->f.n_out > 0) {
        if (!box_flush(b)) return (why = hello_fill(b)) ? why : b->link.why; /* its last words */
        if (b->f.n_out > 0 && !tier_link_wait(&b->link, POLLOUT, until_ns, box_is_stopping, b))
            return "no answer";
    }
    while ((rc = box_frame(b, most, h, &why)) == 0) {
        if (!tier_link_wait(&b->link, POLLIN, until_ns, box_is_stopping, b))
            return "no answer to the hello";
        if ((why = hello_fill(b)) != NULL) return why;
    }
    return rc < 0 ? why : NULL;
}

/* A challenge is at the front: we prove that we know the key, then the box does. The frame behind its
 * proof, or instead of that, is then at the front. */
static const char *hello_prove(box *b, tier_talk *talk, uint64_t until_ns, bool *is_proven,
                               tier_head *h) {
    const char *why = tier_link_binding(&b->link, talk->binding);
    if (!why)
        why = tier_answer(&b->key, talk, box_payload(b), h->n, b->f.out + TIER_HEAD_BYTES);
    if (why) return why;
    box_pop(b, h);
    b->f.n_out = tier_seal(b->f.out, TIER_PROOF, 0, TIER_PROOF_BYTES);
    b->f.i_out = 0;
    if ((why = hello_turn(b, until_ns, TIER_MAX_EARLY, h)) != NULL || h->type != TIER_PROOF)
        return why;
    if ((why = tier_believe(&b->key, talk, box_payload(b), h->n)) != NULL) return why;
    *is_proven = true;
    box_pop(b, h);
    return hello_turn(b, until_ns, TIER_MAX_EARLY, h);
}

/* What a welcome says. NULL, or why this box is none of ours: its fingerprints are compared here as
 * well. */
static const char *hello_welcome(box *b, const tier_head *h, char *text, size_t cap) {
    const uint8_t *p = box_payload(b);
    tier_model there = b->t->m;
    if (h->type == TIER_REFUSE) {
        char said[TIER_MAX_TEXT + 1];
        tier_text(said, sizeof said, p, h->n);
        snprintf(text, cap, "refused: %s", said);
        return text;
    }
    if (h->type != TIER_WELCOME || h->n != TIER_WELCOME_BYTES) return "an odd answer to the hello";
    uint32_t rows = tier_get32(p + 8);
    b->capacity = tier_get32(p);
    b->n_readable = tier_get32(p + 12);
    b->max_rows = rows < b->t->max_rows ? rows : b->t->max_rows;
    there.sampled = tier_get64(p + 16);
    there.by_sums = tier_get64(p + 24);
    b->is_sampled = !there.by_sums || !b->t->m.by_sums;
    return tier_model_differs(&b->t->m, &there, text, cap);
}

/* From hello to the first resident frame; NULL, or why not. `text` is for the box's own words. */
static const char *hello(box *b, char *text, size_t cap) {
    uint8_t nonce[TIER_NONCE_BYTES];
    tier_talk talk;
    uint64_t until = clock_ns() + TIER_HELLO_MS * 1000000ull;
    const tier_model *m = &b->t->m;
    const char *why;
    bool is_proven = false;
    tier_head h;
    if (!tier_nonce(nonce)) return "no random bytes";
    tier_hello_pack(talk.hello, m, TIER_ASKS, nonce);
    memcpy(b->f.out + TIER_HEAD_BYTES, talk.hello, sizeof talk.hello);
    b->f.n_in = b->f.i_in = b->f.i_out = 0;
    b->n_fills = b->so_far.n_empty = 0;
    b->f.n_out = tier_seal(b->f.out, TIER_HELLO, 0, sizeof talk.hello);
    if ((why = hello_turn(b, until, TIER_MAX_EARLY, &h)) != NULL)
        return strcmp(why, "closed the connection") == 0
                   ? "closed the connection at the hello: an older k3-tier does, and what is none; install "
                     "the same release at both ends"
                   : why;
    if (h.type == TIER_CHALLENGE && (why = hello_prove(b, &talk, until, &is_proven, &h)) != NULL)
        return why;
    if (b->must_ask && !is_proven && h.type == TIER_WELCOME)
        return "the box does not ask for the key: not the one meant";
    if ((why = hello_welcome(b, &h, text, cap)) != NULL) return why;
    box_pop(b, &h);
    memset(b->held, 0, (m->n_layers - m->n_dense) * tier_map_bytes(m->n_experts));
    b->n_held = 0;
    if ((why = hello_turn(b, until, 0, &h)) != NULL) return why;
    if (h.type != TIER_RESIDENT) return "no word of what it holds";
    why = box_take_resident(b, box_payload(b), h.n);
    if (!why) box_pop(b, &h);
    return why;
}

/* One try: dial, hello, hand over. Returns whether the box is up. */
static bool box_try(box *b) {
    char text[TIER_MAX_TEXT + 32];
    const char *why = NULL;
    bool is_there = tier_dial(&b->link, &b->addr, &b->t->trust, DIAL_MS, box_is_stopping, b) == 0;
    if (!is_there)
        why = b->link.why;
    else if ((why = hello(b, text, sizeof text)) != NULL)
        b->link.by->close(&b->link);
    bool is_up = is_there && !why;
    is_there = is_there || b->link.was_there;
    b->so_far.dials = is_up ? 0 : b->so_far.dials + 1;
    b->so_far.misses = 0;
    b->so_far.has_served = false;
    b->so_far.is_doubted = b->so_far.troubles > 0;
    pthread_mutex_lock(&b->lock);
    b->is_up = is_up;
    b->has_tried = true;
    pthread_cond_broadcast(&b->changed);
    if (is_up)
        box_say(b, "up, holds %u experts of %u it has room for%s", b->n_held, b->capacity,
                !b->is_sampled        ? ""
                : b->t->m.by_sums ? "; its model was compared by samples only, since it has no sums: "
                                        "`k3 verify --write-sums` there"
                                      : "; its model was compared by samples only, since ours has no "
                                        "sums: `k3 verify --write-sums`");
    else if (b->so_far.dials == 1 && !b->is_stopping)
        box_say(b, "%s; trying again in the background", why);
    b->retry_ns =
        clock_ns() + pause_ns(b->so_far.dials ? b->so_far.dials : 1, is_there ? LAST_PAUSE_MS : LAST_DIAL_MS);
    pthread_mutex_unlock(&b->lock);
    return is_up;
}

static void *box_main(void *arg) {
    box *b = arg;
    pthread_mutex_lock(&b->lock);
    while (!b->is_stopping) {
        uint64_t now = clock_ns();
        if (b->is_up || b->is_banned) {
            pthread_cond_wait(&b->changed, &b->lock);
        } else if (now < b->retry_ns) {
            struct timespec ts = {.tv_sec = (time_t)(b->retry_ns / 1000000000u),
                                  .tv_nsec = (long)(b->retry_ns % 1000000000u)};
            pthread_cond_timedwait(&b->changed, &b->lock, &ts);
        } else {
            pthread_mutex_unlock(&b->lock);
            box_try(b);
            pthread_mutex_lock(&b->lock);
        }
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

/* ==== 5. Open and close ============================================================== */

/* Take n x size bytes of the block; with `base` NULL only count. */
static void *carve(uint8_t *base, uint64_t *used, uint64_t n, uint64_t size) {
    void *p = base ? base + *used : NULL;
    *used += (n * size + 63) / 64 * 64;
    return p;
}

static void box_carve(box *b, uint8_t *base, uint64_t *used, const tier_model *m, uint32_t rows) {
    uint64_t n_moe = m->n_layers - m->n_dense, pairs = (uint64_t)rows * m->top_k;
    size_t most = tier_most_bytes(m, TIER_REPLY, false, rows),
           resident = tier_most_bytes(m, TIER_RESIDENT, false, rows),
           out = tier_most_bytes(m, TIER_REQUEST, true, rows);
    if (most < resident) most = resident;
    if (out < TIER_MAX_WISHES * 4) out = TIER_MAX_WISHES * 4;
    b->f.in_cap = TIER_HEAD_BYTES + most;
    b->f.in = carve(base, used, b->f.in_cap, 1);
    b->f.out = carve(base, used, TIER_HEAD_BYTES + out, 1);
    b->held = carve(base, used, n_moe, tier_map_bytes(m->n_experts));
    b->list = carve(base, used, m->n_experts, sizeof *b->list);
    b->row = carve(base, used, pairs, sizeof *b->row);
    b->place = carve(base, used, rows, sizeof *b->place);
    b->w = carve(base, used, pairs, sizeof *b->w);
    b->n_served = carve(base, used, rows, 1);
    b->wish = carve(base, used, TIER_MAX_WISHES, sizeof *b->wish);
}

uint64_t tier_bytes(const tier_model *m, const tier_options *o) {
    uint64_t used = 0;
    box b;
    carve(NULL, &used, 1, sizeof(tier));
    for (uint32_t i = 0; o->boxes[i] && i < TIER_MAX_BOXES; i++)
        box_carve(&b, NULL, &used, m, o->max_rows);
    for (uint32_t i = 0; o->boxes[i] && i < TIER_MAX_BOXES; i++)
        used += strncmp(o->boxes[i], "tls:", 4) == 0 ? LINK_TLS_BYTES : DIAL_BYTES;
    return used;
}

static int box_start(box *b) {
    pthread_mutex_init(&b->lock, NULL);
    clock_cond_init(&b->changed);
    return pthread_create(&b->thread, NULL, box_main, b);
}

/* Take a copy of where certificates are, if all is well with them. */
static int tier_open_trust(tier *t, const tier_options *o, char *why, size_t n_why) {
    const char *from[3] = {o->trust.ca, o->trust.cert, o->trust.key};
    const char **to[3] = {&t->trust.ca, &t->trust.cert, &t->trust.key};
    bool has_tls = false;
    t->trust.flag = o->trust.flag ? o->trust.flag : "--tier";
    for (uint32_t i = 0; o->boxes[i]; i++)
        has_tls = has_tls || strncmp(o->boxes[i], "tls:", 4) == 0;
    for (int i = 0; i < 3; i++) {
        if (!from[i]) continue;
        if (strlen(from[i]) >= MAX_PATH || !has_tls) {
            snprintf(why, n_why, "tier: %s-%s %.200s: %s", t->trust.flag,
                     ((const char *[]){"ca", "cert", "key"})[i], from[i],
                     has_tls ? "too long a name" : "no box is dialled with TLS: write tls:ADDR");
            return -1;
        }
        *to[i] = strcpy(t->path[i], from[i]);
    }
    if (has_tls && !tier_dial_has_tls()) {
        snprintf(why, n_why, "tier: tls: built without libcurl (make CURL=0), so without TLS");
        return -1;
    }
    int n = snprintf(why, n_why, "tier: ");
    return tier_trust_check(&t->trust, why + n, n_why - (size_t)n);
}

/* The address of a box, and the key that belongs to it: ADDR or ADDR,psk=FILE. Who states a key for a
 * box means one that asks for it. The key of all boxes is for those that ask; only a plain address of
 * another machine, where anybody on the way could answer instead, must ask. False, and why. */
static bool box_address(box *b, const char *text, char *why, size_t n_why) {
    const char *psk = strstr(text, TIER_PSK);
    size_t n = psk ? (size_t)(psk - text) : strlen(text);
    if (n < sizeof b->name) snprintf(b->name, sizeof b->name, "%.*s", (int)n, text);
    if (n >= sizeof b->name || !tier_addr_parse(b->name, &b->addr)) {
        snprintf(why, n_why, "tier: '%s' is no address; %s", text, tier_addr_advice(text));
        return false;
    }
    const char *fault = psk ? tier_key_read(psk + strlen(TIER_PSK), &b->key) : NULL;
    if (fault) snprintf(why, n_why, "tier: key file %s: %s", psk + strlen(TIER_PSK), fault);
    if (!psk) b->key = b->t->key;
    b->must_ask = psk || (b->key.n > 0 && !b->addr.is_tls && !tier_addr_is_loopback(&b->addr));
    return !fault;
}

int tier_open(tier **out, const tier_model *m, const tier_options *o, void *block, char *why,
              size_t n_why) {
    uint64_t used = 0;
    tier *t = carve(block, &used, 1, sizeof *t);
    *out = NULL;
    t->m = *m;
    t->spin_us = o->spin_us;
    t->is_hedging = o->is_hedging;
    t->max_rows = o->max_rows;
    t->next_id = 1;
    const char *fault = o->key_file ? tier_key_read(o->key_file, &t->key) : NULL;
    if (fault) {
        snprintf(why, n_why, "tier: key file %s: %s", o->key_file, fault);
        return -1;
    }
    if (tier_open_trust(t, o, why, n_why) < 0) {
        tier_close(t);
        return -1;
    }
    for (uint32_t i = 0; o->boxes[i]; i++) {
        box *b = &t->boxes[i];
        if (i == TIER_MAX_BOXES)
            snprintf(why, n_why, "tier: %s is one box too many; 16 is the most", o->boxes[i]);
        else
            b->t = t;
        if (i == TIER_MAX_BOXES || !box_address(b, o->boxes[i], why, n_why)) {
            tier_close(t);
            return -1;
        }
        box_carve(b, block, &used, m, o->max_rows);
        if (box_start(b) != 0) {
            snprintf(why, n_why, "tier: cannot start a thread for %s", b->name);
            tier_close(t);
            return -1;
        }
        t->n_boxes++;
    }
    *out = t;
    return 0;
}

void tier_wait(tier *t, uint32_t ms) {
    uint64_t until = clock_ns() + ms * 1000000ull;
    struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u),
                          .tv_nsec = (long)(until % 1000000000u)};
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[i];
        int rc = 0;
        pthread_mutex_lock(&b->lock);
        while (!b->has_tried && rc == 0) rc = pthread_cond_timedwait(&b->changed, &b->lock, &ts);
        pthread_mutex_unlock(&b->lock);
    }
}

void tier_close(tier *t) {
    if (!t) return;
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        pthread_mutex_lock(&t->boxes[i].lock);
        t->boxes[i].is_stopping = true;
        pthread_cond_signal(&t->boxes[i].changed);
        pthread_mutex_unlock(&t->boxes[i].lock);
    }
    for (uint32_t i = 0; i < t->n_boxes; i++) {
        box *b = &t->boxes[i];
        pthread_join(b->thread, NULL);
        if (b->is_up && b->f.n_out == 0) box_begin_frame(b, TIER_GOODBYE, 0, 0);
        if (b->is_up) b->link.by->close(&b->link);
        pthread_mutex_destroy(&b->lock);
        pthread_cond_destroy(&b->changed);
    }
    OPENSSL_cleanse(&t->key, sizeof t->key);
    for (uint32_t i = 0; i < TIER_MAX_BOXES; i++)
        OPENSSL_cleanse(&t->boxes[i].key, sizeof t->boxes[i].key);
}

bool tier_note(tier *t, char *line, size_t cap) {
    bool has = false;
    for (uint32_t i = 0; i < t->n_boxes && !has; i++) {
        box *b = &t->boxes[i];
        pthread_mutex_lock(&b->lock);
        has = b->note[0] != 0;
        if (has) snprintf(line, cap, "%s", b->note);
        b->note[0] = 0;
        pthread_mutex_unlock(&b->lock);
    }
    return has;
}

void tier_stats_get(const tier *t, tier_stats *out) {
    *out = t->stats;
    for (uint32_t i = 0; i < t->n_boxes; i++) out->n_up += t->boxes[i].is_mine;
}
