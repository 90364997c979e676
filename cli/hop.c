/* hop.c - `k3 bench --hop`: what a request to a far box takes, part by part.
 *
 *   1 The box and what it holds      3 One request, timed
 *   2 Questions and their answers    4 Rows, the sustain, the command
 *
 * What is timed is the engine's own client (tier_client.c), asked the way a decode step asks it: one
 * row of z, one layer, 1 to 16 experts. No weight is loaded but the experts of the questions, which
 * are computed here too, once, so that each answer is also compared: a wrong bit is exit 5, as are a
 * request without an answer and a box whose memory grows.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "experts.h"
#include "k3_common.h"
#include "tier.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    WARM_UP = 200,
    N_QUESTIONS = 8, /* of each row, in turn: no expert stays in the box's caches for long */
    MOST_EXPERTS = 16,
    N_CHAIN = 3,
    WAIT_MS = 2000, /* for an answer; none by then is one too many */
    UP_MS = 2000,   /* for a box to be dialled                     */
    WARM_MS = 3000  /* for a box that does not hold enough to get one more */
};

/* Growth of a box's memory that says nothing: the kernel counts pages per thread, in batches. */
#define RSS_NOISE (256u << 10)

/* What a request took, nanoseconds; `reply` is what no part explains: the way, both ways. */
enum part { TOTAL, PACK, SEND, QUEUE, COMPUTE, REPLY, JOIN, N_PARTS };

typedef struct {
    double ns[N_PARTS];
} sample;

/* A row of z, a layer's experts with their weights, and the exact sum. */
typedef struct {
    uint32_t il, n, ie[MOST_EXPERTS];
    float w[MOST_EXPERTS];
    float *z;      /* f32[latent] */
    int64_t *want; /* i64[latent] */
} question;

typedef struct {
    const cli_args *a;
    const char *addr;
    k3_engine *e;
    tier_model m;
    expert_math math;
    tier *far;
    void *block;
    uint64_t seed;
    uint8_t *room;          /* one expert's bytes       */
    float *z;               /* f32[latent], of the next question of a chain */
    float *scratch;         /* of expert_one */
    int64_t *Q;             /* i64[latent], of the last answer */
    question q[N_QUESTIONS * N_CHAIN];
    sample *samples;          /* [requests] */
    double *sorted;           /* [requests] */
    uint64_t n_vain, n_wrong; /* requests without an answer; answers with a wrong bit */
} hop;

/* ==== 1. The box and what it holds =================================================== */

static void hop_sleep(uint32_t ms) {
    struct timespec ts = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&ts, NULL);
}

/* Notes of the client; the last one is kept in `line`. */
static void hop_notes(hop *h, char *line, size_t cap) {
    char note[512];
    while (tier_note(h->far, note, sizeof note)) {
        snprintf(line, cap, "%s", note);
        if (!h->a->quiet) say("%s", note);
    }
}

static bool hop_is_up(hop *h) {
    tier_stats st;
    tier_begin(h->far);
    tier_stats_get(h->far, &st);
    return st.n_up > 0;
}

/* The experts of a layer that the box holds. Returns how many. */
static uint32_t hop_held(const hop *h, uint32_t il, uint32_t *ids) {
    uint32_t n = 0;
    for (uint32_t ie = 0; ie < h->m.n_experts; ie++)
        if (tier_has(h->far, il, ie)) ids[n++] = ie;
    return n;
}

/* How many layers there are of which the box holds `n` experts or more; *held: experts of all. */
static uint32_t hop_layers(const hop *h, uint32_t n, uint32_t *ids, uint32_t *held) {
    uint32_t n_layers = 0;
    *held = 0;
    for (uint32_t il = h->m.n_dense; il < h->m.n_layers; il++) {
        uint32_t n_here = hop_held(h, il, ids);
        *held += n_here;
        n_layers += n_here >= n;
    }
    return n_layers;
}

static bool hop_is_tls(const char *addr) { return strncmp(addr, "tls:", 4) == 0; }

/* Dial, and wait until the box holds `n` experts of some layer. */
static int hop_dial(hop *h, uint32_t n, uint32_t *ids) {
    const char *boxes[2] = {h->addr, NULL};
    tier_options o = {.boxes = boxes,
                      .key_file = h->a->engine.tier_key,
                      .spin_us = (uint32_t)h->a->engine.spin_us,
                      .max_rows = 1};
    char why[512];
    uint32_t held = 0, before = 0;
    uint64_t start = clock_ns();
    if (hop_is_tls(h->addr))
        o.trust = (tier_trust){h->a->engine.tier_ca, h->a->engine.tier_cert,
                               h->a->engine.tier_cert_key, "--tier"};
    h->block = calloc(1, tier_bytes(&h->m, &o));
    if (!h->block) return fail_memory("frames", tier_bytes(&h->m, &o));
    if (tier_open(&h->far, &h->m, &o, h->block, why, sizeof why) < 0)
        return fail(FAIL_USAGE, "%s", why);
    snprintf(why, sizeof why, "no answer in %d s", UP_MS / 1000);
    while (!hop_is_up(h)) {
        hop_notes(h, why, sizeof why);
        if (clock_ns() - start > UP_MS * 1000000ull || interrupted)
            return fail(FAIL_IO,
                        "%s: cannot be asked (%s); `k3-tier status` tells of a box that is "
                        "there",
                        h->addr, why);
        hop_sleep(10);
    }
    for (start = clock_ns(); hop_layers(h, n, ids, &held) == 0; tier_begin(h->far)) {
        if (held > before) start = clock_ns(); /* it is warming */
        before = held;
        if (clock_ns() - start > WARM_MS * 1000000ull || interrupted)
            return fail(FAIL_IO,
                        "%s holds %u experts, of no layer the %u that a request asks for: wait "
                        "until it is warm, or start it with more --ram, with --pins, or without "
                        "--no-fill",
                        h->addr, held, n);
        hop_sleep(50);
    }
    hop_notes(h, why, sizeof why);
    return DONE;
}

/* ==== 2. Questions and their answers ================================================= */

static uint32_t hop_random(hop *h) {
    h->seed = h->seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(h->seed >> 32);
}

static float hop_uniform(hop *h) { /* in [-1, 1), exact */
    return (float)((int32_t)(hop_random(h) >> 8) - (1 << 23)) * 0x1p-23f;
}

/* Heavy tails, as real activations have: the quotient of two, at most 32 in size. */
static void hop_fill(hop *h, float *z) {
    for (uint32_t i = 0; i < h->m.latent; i++) {
        float u = hop_uniform(h), v = hop_uniform(h);
        z[i] = u / (fabsf(v) + 0x1p-5f);
    }
}

/* Q = the sum over the question's experts, as the engine computes it (NUMERICS 2, 3, 5). */
static int question_solve(hop *h, const question *q, const float *z, int64_t *Q) {
    const expert_math *m = &h->math;
    k3_error err = {{0}};
    memset(Q, 0, m->latent * sizeof *Q);
    for (uint32_t i = 0; i < q->n; i++) {
        expert_view x;
        int rc = k3_expert_read(h->e, q->il, q->ie[i], h->room, &x, &err);
        if (rc < 0) return fail_status(rc, &err);
        if (!expert_one(m, &x, z, q->w[i], Q, h->scratch))
            return fail(FAIL_MODEL, "layer %u, expert %u: an output is NaN or not below 2^17 in size",
                        q->il, q->ie[i]);
    }
    return DONE;
}

/* n of the experts that the box holds of some layer, by chance; ascending. */
static int question_draw(hop *h, question *q, uint32_t n, uint32_t *ids) {
    uint32_t held, n_layers = hop_layers(h, n, ids, &held), il = h->m.n_dense, n_held;
    if (n_layers == 0)
        return fail(FAIL_IO, "%s: lost, or holds too little by now: run again", h->addr);
    uint32_t pick = hop_random(h) % n_layers;
    while ((n_held = hop_held(h, il, ids)) < n || pick-- > 0) il++;
    q->il = il;
    q->n = 0;
    for (uint32_t i = 0; i < n_held && q->n < n; i++) /* selection in order */
        if (hop_random(h) % (n_held - i) < n - q->n) {
            q->ie[q->n] = ids[i];
            q->w[q->n++] = 0.0625f + fabsf(hop_uniform(h));
        }
    return DONE;
}

/* What a hop of a chain hands to the next: the sum, made as large as z was. */
static void chain_next(const hop *h, const int64_t *Q, float *z) {
    const k3_kernels *k = h->math.k;
    float most = 0;
    k->q40_f32(z, Q, h->m.latent);
    for (uint32_t i = 0; i < h->m.latent; i++)
        if (fabsf(z[i]) > most) most = fabsf(z[i]);
    for (uint32_t i = 0; i < h->m.latent && most > 0; i++) z[i] = z[i] / most * 8.0f;
}

/* N_QUESTIONS chains of n_chain questions for n experts, with their answers. */
static int questions_make(hop *h, uint32_t n, uint32_t n_chain, uint32_t *ids) {
    for (uint32_t i = 0; i < N_QUESTIONS; i++)
        for (uint32_t k = 0; k < n_chain; k++) {
            question *q = &h->q[i * n_chain + k];
            int rc = question_draw(h, q, n, ids);
            if (rc != DONE) return rc;
            if (k == 0)
                hop_fill(h, q->z);
            else
                chain_next(h, q[-1].want, q->z);
            if ((rc = question_solve(h, q, q->z, q->want)) != DONE) return rc;
            tier_begin(h->far); /* residency may have changed */
        }
    return DONE;
}

/* ==== 3. One request, timed ========================================================== */

static void hop_settled(void *user, uint32_t ie, int box) {
    (void)ie;
    *(uint32_t *)user += box >= 0;
}

/* Ask q with z, or nothing at all when q asks for no experts; add what it took to `s`. The sum is in
 * h->Q. False when the answer is not whole. */
static bool hop_ask(hop *h, const question *q, const float *z, sample *s) {
    static const uint32_t row[1] = {0};
    tier_stats st;
    uint32_t n_served = 0, n_asked = 0;
    memset(h->Q, 0, h->m.latent * sizeof *h->Q);
    uint64_t start = clock_ns();
    tier_begin(h->far);
    for (uint32_t i = 0; i < q->n; i++)
        n_asked += tier_ask(h->far, q->il, q->ie[i], 1, row, &q->w[i]);
    if (q->n)
        tier_send(h->far, z, start + WAIT_MS * 1000000ull);
    else
        tier_ping(h->far, start + WAIT_MS * 1000000ull);
    tier_join(h->far, true, h->Q, 0, hop_settled, &n_served);
    double total = (double)(clock_ns() - start);
    tier_stats_get(h->far, &st);
    const double part[N_PARTS] = {[TOTAL] = total,
                                  [PACK] = (double)st.pack_ns,
                                  [SEND] = (double)st.send_ns,
                                  [QUEUE] = (double)st.queue_ns,
                                  [COMPUTE] = (double)st.compute_ns,
                                  [JOIN] = (double)st.join_ns};
    for (int i = 0; i < N_PARTS; i++) s->ns[i] += part[i];
    double reply = total - part[PACK] - part[SEND] - part[QUEUE] - part[COMPUTE] - part[JOIN];
    s->ns[REPLY] += reply > 0 ? reply : 0; /* the box may begin before all of it is sent */
    return n_asked == q->n && n_served == q->n && st.n_up > 0;
}

/* One request, or a chain of them. Returns DONE or an exit code: nothing goes on after a lost box. */
static int hop_chain(hop *h, const question *q, uint32_t n_chain, sample *s) {
    *s = (sample){{0}};
    for (uint32_t k = 0; k < n_chain; k++) {
        if (k > 0) chain_next(h, h->Q, h->z); /* from the answer */
        tier_stats before, after;
        tier_stats_get(h->far, &before);
        bool is_whole = hop_ask(h, &q[k], k > 0 ? h->z : q[0].z, s);
        tier_stats_get(h->far, &after);
        if (after.refused > before.refused || after.lost > before.lost) {
            char why[512] = "the connection is lost";
            hop_notes(h, why, sizeof why);
            return fail(FAIL_IO, "%s: %s", h->addr, why);
        }
        h->n_vain += !is_whole;
        if (!is_whole || q[k].n == 0) return DONE;
        if (memcmp(h->Q, q[k].want, h->m.latent * sizeof *h->Q) == 0) continue;
        h->n_wrong++;
        return fail(FAIL_CHECK, "%s: layer %u, %u experts from %u on: a sum differs from ours",
                    h->addr, q[k].il, q[k].n, q[k].ie[0]);
    }
    return DONE;
}

/* ==== 4. Rows, the sustain, the command ============================================== */

static int hop_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The p-quantile of one part, microseconds. */
static double hop_quantile(hop *h, enum part part, double p) {
    size_t n = (size_t)h->a->bench.requests, at = (size_t)(p * (double)n);
    for (size_t i = 0; i < n; i++) h->sorted[i] = h->samples[i].ns[part];
    qsort(h->sorted, n, sizeof *h->sorted, hop_compare);
    return h->sorted[at < n ? at : n - 1] * 1e-3;
}

/* One format for people, one for programs: padded on a terminal, else TSV. */
static int hop_print(const char *addr, const char *what, const char *const *cell, size_t n) {
    bool is_tty = isatty(STDOUT_FILENO) == 1;
    printf(is_tty ? "%-24s %-22s" : "%s\t%s", addr, what);
    for (size_t i = 0; i < n; i++) printf(is_tty ? " %8s" : "\t%s", cell[i]);
    putchar('\n');
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

static int hop_head(void) {
    static const char *const cell[] = {"p50_us", "p95_us",  "p99_us", "pack", "send",
                                       "queue",  "compute", "reply",  "join"};
    return hop_print("address", "request", cell, COUNT(cell));
}

static int hop_row(hop *h, const char *what, uint32_t n, uint32_t n_chain, uint32_t *ids) {
    static const double p[3] = {0.5, 0.95, 0.99};
    char text[3 + N_PARTS - 1][24];
    const char *cell[COUNT(text)];
    sample s;
    int rc = DONE;
    if (n > 0)
        rc = questions_make(h, n, n_chain, ids);
    else
        h->q[0].n = 0;
    for (uint64_t i = 0; i < WARM_UP + h->a->bench.requests && rc == DONE; i++) {
        rc = hop_chain(h, &h->q[n ? i % N_QUESTIONS * n_chain : 0], n_chain, &s);
        if (i >= WARM_UP) h->samples[i - WARM_UP] = s;
        if (interrupted) rc = INTERRUPTED;
    }
    if (rc != DONE) return rc;
    for (size_t i = 0; i < 3; i++)
        snprintf(text[i], sizeof text[i], "%.1f", hop_quantile(h, TOTAL, p[i]));
    for (int i = 1; i < N_PARTS; i++)
        snprintf(text[2 + i], sizeof text[2 + i], "%.1f", hop_quantile(h, (enum part)i, 0.5));
    for (size_t i = 0; i < COUNT(text); i++) cell[i] = text[i];
    return hop_print(h->addr, what, cell, COUNT(cell));
}

/* ---- The yardstick: as many bytes there and back over bare TCP, both ends spinning ---- */

enum { BARE_BYTES = 48 }; /* of an empty request, and of its reply: a head and the fixed part */
STATIC_ASSERT(bare_is_head_and_fixed, BARE_BYTES == TIER_HEAD_BYTES + TIER_FIXED_BYTES);
STATIC_ASSERT(all_boxes_can_be_named, MAX_TIER == TIER_MAX_BOXES);
#define BARE_NS 1000000000ull /* the other end is this process, over loopback: later is never */

/* All bytes, one way or the other, without ever sleeping, for BARE_NS at most. */
static bool bare_move(int fd, char *p, bool is_out) {
    uint64_t until = 0;
    for (size_t n = 0, i = 1; n < BARE_BYTES; i++) {
        ssize_t k = is_out ? send(fd, p + n, BARE_BYTES - n, MSG_DONTWAIT | MSG_NOSIGNAL)
                           : recv(fd, p + n, BARE_BYTES - n, MSG_DONTWAIT);
        if (k == 0 || (k < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
            return false;
        if (i % 4096 == 0 && until == 0) until = clock_ns() + BARE_NS;
        if (i % 4096 == 0 && clock_ns() > until) return false;
        n += k > 0 ? (size_t)k : 0;
    }
    return true;
}

/* The other end: accept one, send back what it sends. */
static void *bare_echo(void *arg) {
    char bytes[BARE_BYTES];
    int one = 1, fd = accept(*(int *)arg, NULL, NULL);
    if (fd < 0) return NULL;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (bare_move(fd, bytes, false) && bare_move(fd, bytes, true)) continue;
    close(fd);
    return NULL;
}

/* The median and more of one round trip; false where there is no loopback. */
static bool bare_times(hop *h, int ear) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof sa;
    pthread_t echo;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char bytes[BARE_BYTES] = {0};
    bool is_ok = fd >= 0 && bind(ear, (struct sockaddr *)&sa, n) == 0 && listen(ear, 1) == 0 &&
                 getsockname(ear, (struct sockaddr *)&sa, &n) == 0 &&
                 connect(fd, (struct sockaddr *)&sa, n) == 0 &&
                 setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0;
    bool has_echo = is_ok && pthread_create(&echo, NULL, bare_echo, &ear) == 0;
    is_ok = has_echo;
    for (uint64_t i = 0; i < WARM_UP + h->a->bench.requests && is_ok; i++) {
        uint64_t start = clock_ns();
        is_ok = bare_move(fd, bytes, true) && bare_move(fd, bytes, false);
        if (i >= WARM_UP)
            h->samples[i - WARM_UP] = (sample){.ns[TOTAL] = (double)(clock_ns() - start)};
    }
    if (fd >= 0) close(fd);
    if (has_echo) pthread_join(echo, NULL);
    return is_ok;
}

static int hop_yardstick(hop *h) {
    static const double p[3] = {0.5, 0.95, 0.99};
    char text[3][24];
    const char *cell[COUNT(text)];
    int ear = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_ok = ear >= 0 && bare_times(h, ear);
    if (ear >= 0) close(ear);
    if (!is_ok) return DONE; /* then there is none to compare with */
    for (size_t i = 0; i < COUNT(text); i++) {
        snprintf(text[i], sizeof text[i], "%.1f", hop_quantile(h, TOTAL, p[i]));
        cell[i] = text[i];
    }
    return hop_print("(no box)", "bare loopback TCP", cell, COUNT(cell));
}

static bool hop_rss(hop *h, uint64_t *rss) {
    uint64_t figures[TIER_N_STATS] = {0};
    tier_begin(h->far);
    if (!tier_figures(h->far, figures, clock_ns() + WAIT_MS * 1000000ull)) return false;
    *rss = figures[TIER_STAT_RSS_BYTES];
    return true;
}

/* Requests without a pause for a.sustain seconds; the box must not grow by what it answers. The
 * questions are those of the last row. */
static int hop_sustain(hop *h, uint32_t n_chain) {
    uint64_t n = 0, n_vain = h->n_vain, before = 0, after = 0, start = clock_ns(),
             end = start + h->a->bench.sustain * 1000000000ull;
    sample s;
    int rc = DONE;
    if (!h->a->bench.sustain) return DONE;
    if (!hop_rss(h, &before)) return fail(FAIL_IO, "%s: does not say its figures", h->addr);
    for (; clock_ns() < end && rc == DONE; n++) {
        rc = hop_chain(h, &h->q[n % N_QUESTIONS * n_chain], n_chain, &s);
        if (interrupted) rc = INTERRUPTED;
    }
    if (rc != DONE) return rc;
    double seconds = (double)(clock_ns() - start) * 1e-9;
    if (!hop_rss(h, &after)) return fail(FAIL_IO, "%s: does not say its figures", h->addr);
    uint64_t grown = after > before ? after - before : 0;
    n *= n_chain;
    bool is_noise = grown <= RSS_NOISE;
    printf(
        "# %s: sustain %.1f s, %llu requests, %.0f a second, box memory %llu before, %llu after: "
        "%.3f bytes a request; %llu timeouts\n",
        h->addr, seconds, (unsigned long long)n, (double)n / seconds, (unsigned long long)before,
        (unsigned long long)after, n && !is_noise ? (double)grown / (double)n : 0.0,
        (unsigned long long)(h->n_vain - n_vain));
    if (!is_noise && grown >= n)
        return fail(FAIL_CHECK, "%s: its memory grew by %llu bytes in %llu requests", h->addr,
                    (unsigned long long)grown, (unsigned long long)n);
    return DONE;
}

/* All rows of one box. */
static int hop_box(hop *h, uint32_t *ids) {
    static const uint32_t n_experts[] = {0, 1, 2, 3, MOST_EXPERTS};
    uint32_t top = h->m.top_k < MOST_EXPERTS ? h->m.top_k : MOST_EXPERTS, last = UINT32_MAX;
    char what[32];
    int rc = hop_dial(h, top, ids);
    for (size_t i = 0; i < COUNT(n_experts) && rc == DONE; i++) {
        uint32_t n = n_experts[i] < top ? n_experts[i] : top;
        if (n == last) break;
        last = n;
        snprintf(what, sizeof what, n ? "%u expert%s" : "empty", n, n == 1 ? "" : "s");
        rc = hop_row(h, what, n, 1, ids);
    }
    if (rc == DONE) rc = hop_row(h, "3 in a chain, 1 each", 1, N_CHAIN, ids);
    if (rc == DONE) rc = hop_sustain(h, N_CHAIN);
    if (rc != DONE) return rc;
    printf("# %s: %llu requests without a whole answer, %llu wrong\n", h->addr,
           (unsigned long long)h->n_vain, (unsigned long long)h->n_wrong);
    if (h->n_vain)
        return fail(FAIL_CHECK, "%s: %llu requests had no whole answer within %d ms", h->addr,
                    (unsigned long long)h->n_vain, WAIT_MS);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

/* Geometry and fingerprint from the headers; no weight is read but samples. */
static int hop_open(hop *h, console *con) {
    const char *dir;
    k3_error err = {{0}};
    int rc = model_find(h->a, &dir);
    if (rc != DONE) return rc;
    signals_catch();
    k3_options o = engine_options(h->a, dir, con);
    o.headers_only = true;
    if ((rc = engine_open(&h->e, &o)) != DONE) return rc;
    const k3_shape *sh = k3_engine_shape(h->e);
    h->math = (expert_math){k3_engine_table(h->e), sh->latent, sh->expert_inter, sh->situ_beta,
                            sh->situ_linear_beta};
    if (sh->n_dense == sh->n_layers) return fail(FAIL_MODEL, "%s: a model without experts", dir);
    k3_fingerprints print;
    int status = k3_expert_fingerprints(h->e, &print, &err);
    if (status < 0) return fail_status(status, &err);
    h->m = (tier_model){K3_NUMERICS_ID, print.sampled, print.by_sums,    sh->n_layers, sh->n_dense,
                        sh->n_experts,  sh->latent,    sh->expert_inter, sh->top_k};
    return DONE;
}

static void *hop_take(uint64_t n, size_t size, bool *is_ok) {
    void *p = aligned_alloc(4096, (size_t)((n * size + 4095) / 4096 * 4096));
    *is_ok = *is_ok && p;
    return p;
}

static int hop_memory(hop *h) {
    bool is_ok = true;
    h->room = hop_take(k3_expert_room(h->e), 1, &is_ok);
    h->z = hop_take(h->m.latent, sizeof *h->z, &is_ok);
    h->scratch = hop_take(expert_one_floats(&h->math), sizeof *h->scratch, &is_ok);
    h->Q = hop_take(h->m.latent, sizeof *h->Q, &is_ok);
    h->samples = hop_take(h->a->bench.requests, sizeof *h->samples, &is_ok);
    h->sorted = hop_take(h->a->bench.requests, sizeof *h->sorted, &is_ok);
    for (size_t i = 0; i < COUNT(h->q); i++) {
        h->q[i].z = hop_take(h->m.latent, sizeof(float), &is_ok);
        h->q[i].want = hop_take(h->m.latent, sizeof(int64_t), &is_ok);
    }
    return is_ok ? DONE : fail_memory("questions", k3_expert_room(h->e));
}

static void hop_free(hop *h) {
    for (size_t i = 0; i < COUNT(h->q); i++) {
        free(h->q[i].z);
        free(h->q[i].want);
    }
    free(h->room);
    free(h->z);
    free(h->scratch);
    free(h->Q);
    free(h->samples);
    free(h->sorted);
    k3_engine_close(h->e);
}

static int hop_check(const cli_args *a) {
    size_t n_tls = 0;
    for (size_t i = 0; i < a->bench.hop.n; i++) n_tls += hop_is_tls(a->bench.hop.text[i]);
    if (a->tier.n)
        return fail(FAIL_USAGE, "bench: --tier runs the model with boxes, --hop measures the boxes "
                                "alone; give one of them");
    if (a->engine.tier_hedge || a->engine.tier_audit || a->engine.tier_wait_us)
        return fail(FAIL_USAGE,
                    "bench: --tier-hedge, --tier-audit and --tier-wait are for --tier; --hop "
                    "asks one box and compares all it says");
    if (n_tls == 0 && (a->engine.tier_ca || a->engine.tier_cert || a->engine.tier_cert_key))
        return fail(FAIL_USAGE, "bench: --tier-ca, --tier-cert and --tier-key are for tls: boxes; "
                                "write --hop tls:ADDR");
    return DONE;
}

int bench_hop(const cli_args *a) {
    static hop h;
    console con;
    uint32_t *ids = NULL;
    h = (hop){.a = a};
    console_init(&con, a->quiet);
    int rc = hop_check(a);
    if (rc == DONE) rc = hop_open(&h, &con);
    if (rc == DONE) rc = hop_memory(&h);
    if (rc == DONE && !(ids = malloc(h.m.n_experts * sizeof *ids)))
        rc = fail_memory("ids of experts", h.m.n_experts * sizeof *ids);
    if (rc == DONE) rc = hop_head();
    if (rc == DONE) rc = hop_yardstick(&h);
    for (size_t i = 0; i < a->bench.hop.n && rc == DONE; i++) {
        h.addr = a->bench.hop.text[i];
        h.seed = 1;
        h.n_vain = h.n_wrong = 0;
        rc = hop_box(&h, ids);
        tier_close(h.far);
        free(h.block);
        h.far = h.block = NULL;
    }
    free(ids);
    hop_free(&h);
    return rc == INTERRUPTED ? fail(INTERRUPTED, "interrupted") : rc;
}
