/* tier.h - the far boxes: what goes over the wire, and the client as the engine sees it.
 *
 * A far box (`k3-tier`) holds experts in memory. Per layer the client sends it one frame: some rows
 * of the latent activation z, and which of its experts they go through with which weight. Back come
 * the exact int64 sums (docs/NUMERICS.md 5) and a bitmap of the experts that are in them. Whatever
 * else happens - no answer, a late one, a wrong one - means "missing", and missing experts are
 * computed here: a far box can change how long a token takes, never its bits.
 *
 *   1. limits, and what both ends must agree on;
 *   2. the client (tier_client.c): never fails a token;
 *   3. the wire, byte by byte; define TIER_WIRE before including for its functions.
 *
 * How bytes get there and back is tier_dial.h's.
 *
 * This header includes nothing of k3.c: the engine, the client and the server meet here.
 */
#ifndef K3_TIER_H
#define K3_TIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- 1. Limits ---------------------------------------------------------------------
 *
 * Both ends enforce all of them before they allocate or believe anything. */
#define TIER_VERSION 2
#define TIER_PORT "7383"
#define TIER_MAX_BOXES 16
#define TIER_MAX_LAYERS 1024
#define TIER_MAX_EXPERTS 4096 /* of one layer                                       */
#define TIER_MAX_LATENT 65536
#define TIER_MAX_TOP_K 32
#define TIER_MAX_ROWS 512           /* of one request; no chunk is longer where there are boxes */
#define TIER_MAX_FRAME (320u << 20) /* the longest payload of any model            */
#define TIER_MAX_EARLY 256u         /* the longest before the welcome                     */
#define TIER_MAX_TEXT 256u          /* reasons                                            */
#define TIER_MAX_WISHES 1024u
#define TIER_MAX_PIECE (1u << 20) /* bytes of an expert in one frame, at most               */
#define TIER_MAX_CONFIG (1u << 18)
#define TIER_MAX_INTER 65536
#define TIER_HELLO_MS 5000 /* who has not been welcomed by then is cut off       */
#define TIER_HASTE_MS 500  /* ... by then, if there is no place for another      */
#define TIER_MAX_KEY 1024u /* bytes of a key file                                */
#define TIER_MIN_KEY 32u
#define TIER_PSK ",psk=" /* behind an address: the file of its key */

/* What both ends must have alike; the hello carries it. */
typedef struct {
    const char *numerics; /* K3_NUMERICS_ID                                          */
    uint64_t sampled;     /* of the experts' geometry and samples of their contents  */
    uint64_t by_sums;     /* k3_fingerprints.by_sums of the whole model; 0: no sums  */
    uint32_t n_layers, n_dense, n_experts, latent, inter, top_k;
} tier_model;

/* ---- 2. The client -----------------------------------------------------------------
 *
 *   - a thread per box dials, says hello and takes in what the box holds; then the socket belongs
 *     to the thread that computes, until the box fails: no lock is held and no thread is woken on
 *     the way of a request;
 *   - an expert is asked of one box at most; with `is_hedging`, a question that is not answered
 *     within twice the box's usual time, or half of the wait, goes as it is to a second box that
 *     has nothing to do and holds all of it: the first answer counts, the other is dropped;
 *   - answers are believed only when frame, hash, id, layer, counts and the range of every sum are
 *     right; one wrong answer closes the connection;
 *   - time that a box takes and serves nothing for, an empty answer waited for or a flood of frames,
 *     is counted against it: one that takes more than 1/40 of the time is closed and left alone;
 *   - after a miss the box is asked for one expert at a time until it answers again; after a few
 *     it is left alone, for 40 times what the last one cost and for a while that doubles each
 *     time, and tried again from the background.
 *
 * All calls but open and close are made by one thread at a time. */
typedef struct tier tier;

/* Whom a tls: box must be, and who we are to it. Files in PEM; NULL: none. */
typedef struct {
    const char *ca;         /* signed the box's certificate, or is it; NULL: the system's trust */
    const char *cert, *key; /* ours, for a box that wants one; key NULL: it is in cert */
    const char *flag;       /* how messages call the options: "--tier", "--tls"        */
} tier_trust;

typedef struct {
    const char *const *boxes; /* NULL-ended: HOST:PORT, [V6]:PORT, tls:HOST:PORT, unix:PATH; each
                               * may end in ,psk=FILE, a key that this box must ask for */
    const char *key_file;     /* key of all other boxes; NULL: none. Plain addresses of other machines
                               * must ask for it, tls:, unix: and loopback ones may       */
    uint32_t spin_us;         /* a wait spins so long before it sleeps                 */
    uint32_t max_rows;        /* most rows of a request, at most TIER_MAX_ROWS         */
    bool is_hedging;          /* a box that is late: ask a second one as well          */
    tier_trust trust;         /* copied                                                */
} tier_options;

typedef struct {
    uint64_t asked, served;        /* experts                                               */
    uint64_t late;   /* answers after their deadline, after a second box's, or never */
    uint64_t hedged; /* questions that a second box was asked as well         */
    uint64_t lost;                 /* connections that ended                                */
    uint64_t refused;              /* answers that were not believed                        */
    uint64_t queue_ns, compute_ns; /* of the last answer, as its box says */
    uint64_t pack_ns, send_ns;     /* of the last layer: its frames written and sealed; sent */
    uint64_t join_ns;              /* of the last answer: checked, and added to Q           */
    uint32_t n_up;                 /* boxes that can be asked now                           */
} tier_stats;

/* Memory that a client needs, 64-aligned; all it will ever use but for its threads. The end of it is
 * for what libraries take while they dial and encrypt, and is never touched. */
uint64_t tier_bytes(const tier_model *m, const tier_options *o);

/* Start the client; it dials in the background. `block` is tier_bytes long, zeroed, the caller's.
 * Returns 0; -1 and one line in `why`: an address, the key file, a certificate, no thread. */
int tier_open(tier **out, const tier_model *m, const tier_options *o, void *block, char *why,
              size_t n_why);
void tier_close(tier *t);

/* Give boxes `ms` to answer the first dial; not longer than it takes them to, or to refuse. */
void tier_wait(tier *t, uint32_t ms);

/* A layer begins: what was asked for before is forgotten, news of the boxes is taken in. */
void tier_begin(tier *t);

/* Does a box that is up hold this expert? */
bool tier_has(const tier *t, uint32_t il, uint32_t ie);

/* Put an expert on the list of a box that holds it; false when none can be asked. A box that takes
 * fewer rows is asked for experts whose rows are all below; no box here takes fewer.
 * Shapes  row: u32[n], ascending, below max_rows   w: f32[n] */
bool tier_ask(tier *t, uint32_t il, uint32_t ie, uint32_t n, const uint32_t *row, const float *w);

/* Say that this expert has to be read from disk here: a box may warm it. */
void tier_wish(tier *t, uint32_t il, uint32_t ie);

/* Send all lists. Answers are waited for until `deadline_ns`, CLOCK_MONOTONIC.
 * Shapes  z: f32[rows][latent] */
void tier_send(tier *t, const float *z, uint64_t deadline_ns);

/* Take what has come; with `waits`, wait for the rest until the deadline. Served experts' sums are
 * added to Q, box i's from Q + i x apart on (0: all to the same), and each expert that is settled is
 * told to `fn`: which box served it, or -1, missing. Boxes are counted as in tier_options.
 * Shapes   Q: i64[rows][latent], or one for each box
 * Returns  how many experts are still out; 0 once the deadline is over */
typedef void (*tier_settled_fn)(void *user, uint32_t ie, int box);
uint32_t tier_join(tier *t, bool waits, int64_t *Q, size_t apart, tier_settled_fn fn, void *user);

/* For measuring, instead of tier_ask and tier_send: a question for no experts to each box. After it
 * tier_join as usual. */
void tier_ping(tier *t, uint64_t deadline_ns);

/* The first box's own figures (enum tier_stat, below). Between layers only; false: it is not up, or
 * says nothing until the deadline.
 * Shapes  out: u64[TIER_N_STATS] */
bool tier_figures(tier *t, uint64_t *out, uint64_t deadline_ns);

/* Box i gave wrong sums: it is never asked again. */
void tier_ban(tier *t, uint32_t i);

/* One line about a box that came or went, or false. */
bool tier_note(tier *t, char *line, size_t cap);
void tier_stats_get(const tier *t, tier_stats *out);

/* ---- 3. The wire -------------------------------------------------------------------
 *
 * All integers and floats little-endian, all reserved bytes 0. A frame:
 *
 *      0   3  "K3T"
 *      3   1  version, 2
 *      4   1  type
 *      5   3  0
 *      8   4  n, bytes of the payload
 *     12   4  0
 *     16   8  id: a reply has its request's; else 0
 *     24   8  XXH3-64 of the payload, seeded with the XXH3-64 of bytes 0..23
 *     32   n  payload
 *
 * The head, and what a refusal is, are the same in all versions: a server tells a client of another
 * version why in a frame of the client's own version.
 *
 * A connection begins with the client's hello. The server answers with a welcome and a resident
 * frame, or with a refusal. When the server has keys for the client's role, a challenge comes first:
 * the client proves that it knows one of the keys, then the server proves that it knows the same,
 * then comes the welcome. Then the client sends requests, wishes, stats and goodbye; the server
 * replies, stats, resident frames at any time, goodbye. Any fault in a frame ends that connection and
 * nothing else.
 *
 * Both proofs are about the hello, the server's nonce and, over TLS, that very connection (the
 * exporter's channel binding, RFC 9266): a proof that is passed on over another connection is none. The
 * client goes first, so that a stranger who dials a server learns nothing to try keys on.
 *
 * Who stages (role 2) brings experts to a box, if the box lets it (tier_server.c, stage_right). After
 * the welcome it says begin; a box that has no model yet takes geometry and fingerprints of the hello and
 * of this for its own. The server answers
 * with another welcome and a resident frame. Then, expert by expert: the client offers one, the
 * server's verdict is that it wants it, the client sends its pieces in order and commits, the
 * server's verdict is that it has it. With any other verdict the client goes on to the next expert.
 * What is not committed when the connection ends is forgotten. Between experts the client may ask for
 * stats; a box with --keep then writes at once what it has not written (TIER_STAT_UNWRITTEN).
 *
 * hello, 112 bytes                         client to server
 *      0  32  numerics id, padded with 0
 *     32   8  fingerprint of geometry and samples
 *     40   8  fingerprint by sums, or 0: no sums
 *     48   4  layers            52   4  of them dense, the first
 *     56   4  experts a layer   60   4  latent
 *     64   4  expert inter      68   4  top_k
 *     72   1  role: 0 asks for experts, 1 for stats only (the model does not matter), 2 stages
 *     73   7  0
 *     80  32  nonce
 * challenge, 32 bytes                      server to client
 *      0  32  nonce
 * proof, 32 bytes                          client to server, answered by server to client
 *      0  32  HMAC-SHA256 of "k3-tier client" or "k3-tier server", the hello, the challenge's nonce, and
 *             the 32 bytes of the channel binding, 0 without TLS
 * welcome, 32 bytes                        server to client
 *      0   4  experts it has room for       4   4  experts it holds
 *      8   4  rows of a request at most    12   4  experts it can read for itself
 *     16   8  its fingerprint of geometry and samples; both are 0 while it has no model
 *     24   8  its fingerprint by sums, or 0: no sums
 * refuse, goodbye, 0..256 bytes            a reason, as text
 * resident, any number of                  server to client
 *      0   2  layer              2   2  0
 *      4   .  bitmap of the layer's experts, bit ie % 8 of byte ie / 8
 * request                                  client to server
 *      0   2  layer              2   2  rows
 *      4   2  experts            6   2  0
 *      8   4  pairs             12   4  microseconds until the answer is of no more use
 *     16   .  z: f32[rows][latent], finite
 *      .   .  experts: u16 id, ascending, u16 number of pairs, at least 1
 *      .   .  weights: f32[pairs], finite, expert by expert
 *      .   .  row of each pair: u16[pairs], ascending in an expert
 *   A request for no experts and no rows is answered like any other: a round trip.
 * reply                                    server to client
 *      0   2  layer              2   2  rows: the request's, or 0 when nothing is served
 *      4   2  experts            6   2  0
 *      8   4  nanoseconds from arrival to the start, saturated
 *     12   4  nanoseconds of computing, saturated
 *     16   .  bitmap of the request's experts, in its order, padded with 0 to 8 bytes: bit set,
 *             every one of its pairs is in the sums; not set, none is
 *      .   .  sums: i64[rows][latent], each at most 2^57 per served pair of its row in size
 * wish, at most 1024 of                    client to server, no answer
 *      0   2  layer              2   2  expert
 * begin, 16..16 + 2^18 bytes               client to server, of role 2 like the next three
 *      0   4  SiTU beta, f32     4   4  SiTU linear beta, f32; both finite and above 0
 *      8   8  bytes of one expert, all six tensors
 *     16   .  config.json, or nothing: only a box that keeps what is staged wants it
 * offer, 24 bytes
 *      0   2  layer              2   2  expert
 *      4   4  0                  8   8  its bytes
 *     16   8  XXH3-64 of them: the six tensors in slot order (experts.h)
 * piece, 9..8 + 2^20 bytes
 *      0   8  where in the expert it begins: the end of the piece before
 *      8   .  bytes
 * commit, 16 bytes
 *      0   2  layer              2   2  expert
 *      4   4  0                  8   8  XXH3-64 of the whole expert, as offered
 * verdict, 8 bytes                         server to client, answers offer and commit
 *      0   2  layer              2   2  expert
 *      4   1  0 has it, 1 wants it, 2 no room, 3 it is coming from elsewhere just now
 *      5   3  0
 * stats                                    empty from the client; from the server u64[TIER_N_STATS], below
 */
enum tier_type {
    TIER_HELLO = 1,
    TIER_CHALLENGE,
    TIER_PROOF,
    TIER_WELCOME,
    TIER_REFUSE,
    TIER_RESIDENT,
    TIER_REQUEST,
    TIER_REPLY,
    TIER_WISH,
    TIER_STATS,
    TIER_GOODBYE,
    TIER_BEGIN,
    TIER_OFFER,
    TIER_PIECE,
    TIER_COMMIT,
    TIER_VERDICT,
    TIER_N_TYPES
};

enum tier_role { TIER_ASKS, TIER_LOOKS, TIER_STAGES, TIER_N_ROLES };
enum tier_verdict { TIER_HAS, TIER_WANTS, TIER_FULL, TIER_BUSY, TIER_N_VERDICTS };

#define TIER_HEAD_BYTES 32u
#define TIER_HELLO_BYTES 112u
#define TIER_HELLO_ROLE 72u /* where its role is */
#define TIER_CHALLENGE_BYTES 32u
#define TIER_PROOF_BYTES 32u
#define TIER_WELCOME_BYTES 32u
#define TIER_NONCE_BYTES 32u
#define TIER_BINDING_BYTES 32u /* of a TLS connection: 0 without TLS */
#define TIER_BINDING "EXPORTER-Channel-Binding"
#define TIER_FIXED_BYTES 16u /* of a request, of a reply */
#define TIER_BEGIN_BYTES 16u /* and config.json */
#define TIER_OFFER_BYTES 24u
#define TIER_PIECE_BYTES 8u /* and what it brings */
#define TIER_COMMIT_BYTES 16u
#define TIER_VERDICT_BYTES 8u

/* How reasons to refuse begin that `k3 stage` acts on; all others are for people only. */
#define TIER_WHY_MODEL "another model: "
#define TIER_WHY_ROOM "too little memory: " /* for one expert */
#define TIER_WHY_SUM "damaged: "            /* an expert      */

/* Of a proof by no key that counts; over TLS it may be that two connections were tied together. */
#define TIER_WHY_KEY "another key, or somebody between us"

/* The places of a stats frame. */
enum tier_stat {
    TIER_STAT_UPTIME_MS,
    TIER_STAT_CAPACITY, /* experts there is room for */
    TIER_STAT_HELD,
    TIER_STAT_TOTAL, /* experts of the model      */
    TIER_STAT_CLIENTS,
    TIER_STAT_REQUESTS,
    TIER_STAT_SERVED, /* experts                   */
    TIER_STAT_MISSING,
    TIER_STAT_STALE, /* requests whose time was over before they began */
    TIER_STAT_BAD,   /* connections ended for a fault                  */
    TIER_STAT_IN_BYTES,
    TIER_STAT_OUT_BYTES,
    TIER_STAT_COMPUTE_NS,
    TIER_STAT_WARMED,
    TIER_STAT_EVICTED,
    TIER_STAT_RSS_BYTES,
    TIER_STAT_STAGED, /* experts that came over the wire */
    TIER_STAT_VRAM_CAPACITY,
    TIER_STAT_VRAM_HELD,
    TIER_STAT_GPU_SERVED,
    TIER_STAT_REFUSED, /* connections that were no good for a welcome */
    TIER_STAT_UNWRITTEN, /* staged experts that --keep has not written yet */
    TIER_STAT_UNKEPT,    /* 1: --keep cannot write any more                */
    TIER_N_STATS
};

#ifdef TIER_WIRE

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are written from memory: this needs a little-endian machine"
#endif

static inline void tier_put16(uint8_t *p, uint32_t v) {
    uint16_t w = (uint16_t)v;
    memcpy(p, &w, sizeof w);
}
static inline void tier_put32(uint8_t *p, uint32_t v) { memcpy(p, &v, sizeof v); }
static inline void tier_put64(uint8_t *p, uint64_t v) { memcpy(p, &v, sizeof v); }
static inline uint32_t tier_get16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint32_t tier_get32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint64_t tier_get64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* ---- Frames ---- */

typedef struct {
    enum tier_type type;
    uint32_t n;
    uint64_t id, sum;
} tier_head;

static inline uint64_t tier_sum(const uint8_t *frame, uint32_t n) {
    return XXH3_64bits_withSeed(frame + TIER_HEAD_BYTES, n, XXH3_64bits(frame, 24));
}

/* Write the head of a frame whose n bytes of payload are in their place. Returns its length. */
static inline size_t tier_seal(uint8_t *frame, enum tier_type type, uint64_t id, uint32_t n) {
    memset(frame, 0, TIER_HEAD_BYTES);
    memcpy(frame, "K3T", 3);
    frame[3] = TIER_VERSION;
    frame[4] = (uint8_t)type;
    tier_put32(frame + 8, n);
    tier_put64(frame + 16, id);
    tier_put64(frame + 24, tier_sum(frame, n));
    return TIER_HEAD_BYTES + (size_t)n;
}

#define TIER_WHY_VERSION                                                                             \
    "another version of the protocol than 2: install the same release of k3 and k3-tier at both ends"

/* Read a head; NULL, or what is wrong with it. The length is within TIER_MAX_FRAME. */
static inline const char *tier_head_parse(const uint8_t *p, tier_head *h) {
    if (memcmp(p, "K3T", 3) != 0) return "not a frame";
    if (p[3] != TIER_VERSION) return TIER_WHY_VERSION;
    if (p[4] == 0 || p[4] >= TIER_N_TYPES) return "a frame of no known type";
    if (p[5] | p[6] | p[7] | tier_get32(p + 12)) return "reserved bytes are not 0";
    h->type = (enum tier_type)p[4];
    h->n = tier_get32(p + 8);
    h->id = tier_get64(p + 16);
    h->sum = tier_get64(p + 24);
    return h->n <= TIER_MAX_FRAME ? NULL : "a frame beyond the limit";
}

/* ---- Hello ---- */

typedef struct {
    char numerics[33];
    tier_model model; /* numerics points into this struct's own text */
    uint8_t role;
} tier_hello;

static inline void tier_hello_pack(uint8_t *p, const tier_model *m, uint8_t role,
                                   const uint8_t nonce[TIER_NONCE_BYTES]) {
    size_t n = strlen(m->numerics);
    memset(p, 0, TIER_HELLO_BYTES);
    memcpy(p, m->numerics, n < 32 ? n : 32);
    tier_put64(p + 32, m->sampled);
    tier_put64(p + 40, m->by_sums);
    const uint32_t v[6] = {m->n_layers, m->n_dense, m->n_experts, m->latent, m->inter, m->top_k};
    memcpy(p + 48, v, sizeof v);
    p[TIER_HELLO_ROLE] = role;
    memcpy(p + 80, nonce, TIER_NONCE_BYTES);
}

/* NULL, or what is wrong with it. */
static inline const char *tier_hello_parse(const uint8_t *p, size_t n, tier_hello *h) {
    uint32_t v[6];
    if (n != TIER_HELLO_BYTES) return "a hello of the wrong length";
    memcpy(h->numerics, p, 32);
    h->numerics[32] = 0;
    memcpy(v, p + 48, sizeof v);
    h->model = (tier_model){h->numerics, tier_get64(p + 32), tier_get64(p + 40), v[0], v[1], v[2],
                            v[3],        v[4],               v[5]};
    h->role = p[TIER_HELLO_ROLE];
    for (const char *c = h->numerics; *c; c++)
        if (*c < 0x21 || *c > 0x7e) return "a numerics id that is no text";
    for (int i = 73; i < 80; i++)
        if (p[i]) return "reserved bytes are not 0";
    return h->role >= TIER_N_ROLES ? "a hello of no known role" : NULL;
}

/* Fingerprints say one model? By sums, where both ends have sums; else by samples, which miss most of
 * what can differ. Of two ends that must say so `*by_sums` tells which it was; NULL: nobody asks. */
static inline bool tier_prints_agree(const tier_model *a, const tier_model *b, bool *by_sums) {
    bool has_both = a->by_sums != 0 && b->by_sums != 0;
    if (by_sums) *by_sums = has_both;
    return has_both ? a->by_sums == b->by_sums : a->sampled == b->sampled;
}

/* Why two ends cannot work together, or NULL. `text` is written for it, and begins TIER_WHY_MODEL. */
static inline const char *tier_model_differs(const tier_model *here, const tier_model *there,
                                             char *text, size_t cap) {
    const uint32_t a[6] = {here->n_layers, here->n_dense, here->n_experts,
                           here->latent,   here->inter,   here->top_k};
    const uint32_t b[6] = {there->n_layers, there->n_dense, there->n_experts,
                           there->latent,   there->inter,   there->top_k};
    static const char *const what[6] = {"layers", "dense layers", "experts a layer",
                                        "latent", "expert width", "experts a token"};
    if (strcmp(here->numerics, there->numerics) != 0) {
        snprintf(text, cap, TIER_WHY_MODEL "numerics %s here, %s there", here->numerics,
                 there->numerics);
        return text;
    }
    for (int i = 0; i < 6; i++)
        if (a[i] != b[i]) {
            snprintf(text, cap, TIER_WHY_MODEL "%u %s here, %u there", a[i], what[i], b[i]);
            return text;
        }
    bool by_sums;
    if (tier_prints_agree(here, there, &by_sums)) return NULL;
    snprintf(text, cap, TIER_WHY_MODEL "fingerprint %s%016llx here, %016llx there",
             by_sums ? "by sums " : "",
             (unsigned long long)(by_sums ? here->by_sums : here->sampled),
             (unsigned long long)(by_sums ? there->by_sums : there->sampled));
    return text;
}

/* ---- Sizes for a model ---- */

static inline size_t tier_map_bytes(uint32_t n_experts) { return (n_experts + 7u) / 8u; }
static inline size_t tier_served_bytes(uint32_t n) { return (n + 63u) / 64u * 8u; }

static inline size_t tier_request_bytes(const tier_model *m, size_t rows, size_t experts,
                                        size_t pairs) {
    return TIER_FIXED_BYTES + rows * m->latent * 4 + experts * 4 + pairs * 6;
}

static inline size_t tier_reply_bytes(const tier_model *m, size_t rows, uint32_t experts) {
    return TIER_FIXED_BYTES + tier_served_bytes(experts) + rows * m->latent * 8;
}

static inline size_t tier_resident_bytes(const tier_model *m, uint32_t n_layers) {
    return n_layers * (4 + tier_map_bytes(m->n_experts));
}

/* The longest payload of each type once the model is known; the sender is a client or a server. */
static inline size_t tier_most_bytes(const tier_model *m, enum tier_type type, bool is_client,
                                     uint32_t rows) {
    uint32_t n = m->n_experts < rows * m->top_k ? m->n_experts : rows * m->top_k;
    switch (type) {
    case TIER_REQUEST: return is_client ? tier_request_bytes(m, rows, n, rows * m->top_k) : 0;
    case TIER_WISH: return is_client ? TIER_MAX_WISHES * 4 : 0;
    case TIER_STATS: return is_client ? 0 : TIER_N_STATS * 8;
    case TIER_REPLY: return is_client ? 0 : tier_reply_bytes(m, rows, n);
    case TIER_RESIDENT: return is_client ? 0 : tier_resident_bytes(m, m->n_layers - m->n_dense);
    case TIER_REFUSE:
    case TIER_GOODBYE: return TIER_MAX_TEXT;
    default: return 0;
    }
}

/* A geometry within the limits of the wire. */
static inline bool tier_model_is_fit(const tier_model *m) {
    return m->n_dense < m->n_layers && m->n_layers <= TIER_MAX_LAYERS && m->n_experts >= 1 &&
           m->n_experts <= TIER_MAX_EXPERTS && m->latent >= 1 && m->latent <= TIER_MAX_LATENT &&
           m->top_k >= 1 && m->top_k <= TIER_MAX_TOP_K;
}

/* ---- Staging ---- */

/* The longest payload that a client of role 2 may send. */
static inline size_t tier_stage_bytes(enum tier_type type) {
    switch (type) {
    case TIER_BEGIN: return TIER_BEGIN_BYTES + TIER_MAX_CONFIG;
    case TIER_OFFER: return TIER_OFFER_BYTES;
    case TIER_PIECE: return TIER_PIECE_BYTES + TIER_MAX_PIECE;
    case TIER_COMMIT: return TIER_COMMIT_BYTES;
    case TIER_GOODBYE: return TIER_MAX_TEXT;
    default: return 0;
    }
}

/* A geometry that a box without a model may take for its own. */
static inline bool tier_model_is_stageable(const tier_model *m) {
    return tier_model_is_fit(m) && m->latent % 32 == 0 && m->inter >= 32 && m->inter % 32 == 0 &&
           m->inter <= TIER_MAX_INTER;
}

/* The expert that an offer, a commit or a verdict of n bytes, `want` of them due, is about; false
 * when it is none of this model's. */
static inline bool tier_expert_parse(const tier_model *m, const uint8_t *p, size_t n, size_t want,
                                     uint32_t *il, uint32_t *ie) {
    if (n != want) return false;
    *il = tier_get16(p);
    *ie = tier_get16(p + 2);
    return *il >= m->n_dense && *il < m->n_layers && *ie < m->n_experts;
}

/* ---- Requests and replies: views of a payload that was checked ---- */

typedef struct {
    uint32_t il, n_rows, n_experts, n_pairs, wait_us;
    const uint8_t *z, *experts, *weights, *rows;
} tier_request;

static inline bool tier_is_finite(const uint8_t *p, size_t n) {
    uint32_t n_bad = 0;
    for (size_t i = 0; i < n; i++) n_bad += (tier_get32(p + 4 * i) & 0x7f800000u) == 0x7f800000u;
    return n_bad == 0;
}

/* Experts ascend, pairs add up, rows ascend in each expert. */
static inline const char *tier_request_lists(const tier_model *m, const tier_request *r) {
    uint32_t at = 0;
    int64_t last = -1;
    for (uint32_t x = 0; x < r->n_experts; x++) {
        uint32_t ie = tier_get16(r->experts + 4 * x), n = tier_get16(r->experts + 4 * x + 2);
        if ((int64_t)ie <= last || ie >= m->n_experts) return "experts out of order or range";
        if (n == 0 || n > r->n_pairs - at) return "pairs that do not add up";
        last = ie;
        for (uint32_t j = 0; j < n; j++, at++) {
            uint32_t row = tier_get16(r->rows + 2 * at);
            if (row >= r->n_rows || (j > 0 && row <= tier_get16(r->rows + 2 * (at - 1))))
                return "rows out of order or range";
        }
    }
    return at == r->n_pairs ? NULL : "pairs that do not add up";
}

/* NULL, or what is wrong with it. */
static inline const char *tier_request_parse(const tier_model *m, uint32_t max_rows,
                                             const uint8_t *p, size_t n, tier_request *r) {
    if (n < TIER_FIXED_BYTES || tier_get16(p + 6)) return "a request cut short";
    *r = (tier_request){.il = tier_get16(p),
                        .n_rows = tier_get16(p + 2),
                        .n_experts = tier_get16(p + 4),
                        .n_pairs = tier_get32(p + 8),
                        .wait_us = tier_get32(p + 12)};
    if (r->il < m->n_dense || r->il >= m->n_layers) return "a layer without experts";
    if (r->n_rows > max_rows || r->n_experts > m->n_experts) return "more rows than agreed";
    if (r->n_pairs > (uint64_t)r->n_rows * m->top_k) return "more pairs than rows have";
    if (n != tier_request_bytes(m, r->n_rows, r->n_experts, r->n_pairs))
        return "a request of the wrong length";
    r->z = p + TIER_FIXED_BYTES;
    r->experts = r->z + (size_t)r->n_rows * m->latent * 4;
    r->weights = r->experts + (size_t)r->n_experts * 4;
    r->rows = r->weights + (size_t)r->n_pairs * 4;
    if (!tier_is_finite(r->z, (size_t)r->n_rows * m->latent) ||
        !tier_is_finite(r->weights, r->n_pairs))
        return "a value that is NaN or infinite";
    return tier_request_lists(m, r);
}

typedef struct {
    uint32_t il, n_rows, n_experts, queue_ns, compute_ns;
    const uint8_t *served, *sums;
} tier_reply;

/* NULL, or what is wrong with it. That it fits the request is the client's to check. */
static inline const char *tier_reply_parse(const tier_model *m, const uint8_t *p, size_t n,
                                           tier_reply *r) {
    if (n < TIER_FIXED_BYTES || tier_get16(p + 6)) return "a reply cut short";
    *r = (tier_reply){tier_get16(p),
                      tier_get16(p + 2),
                      tier_get16(p + 4),
                      tier_get32(p + 8),
                      tier_get32(p + 12),
                      p + TIER_FIXED_BYTES,
                      NULL};
    if (r->n_rows > TIER_MAX_ROWS || r->n_experts > m->n_experts) return "more rows than agreed";
    if (n != tier_reply_bytes(m, r->n_rows, r->n_experts)) return "a reply of the wrong length";
    r->sums = r->served + tier_served_bytes(r->n_experts);
    for (uint32_t x = r->n_experts; x < 8 * tier_served_bytes(r->n_experts); x++)
        if (r->served[x / 8] >> x % 8 & 1) return "a bit for no expert";
    return NULL;
}

/* What a resident frame says, taken into held, u8[n_layers - n_dense][map bytes]; NULL, or what is
 * wrong with it. */
static inline const char *tier_resident_parse(const tier_model *m, const uint8_t *p, size_t n,
                                              uint8_t *held) {
    size_t map = tier_map_bytes(m->n_experts), one = 4 + map;
    if (n % one) return "a resident frame of the wrong length";
    for (; n > 0; n -= one, p += one) {
        uint32_t il = tier_get16(p);
        if (il < m->n_dense || il >= m->n_layers || tier_get16(p + 2))
            return "a resident frame for no layer";
        if (m->n_experts % 8 && p[4 + map - 1] >> m->n_experts % 8)
            return "a resident frame with more experts than there are";
        memcpy(held + (il - m->n_dense) * map, p + 4, map);
    }
    return NULL;
}

/* ---- Addresses ---- */

typedef struct {
    bool is_unix, is_tls;
    char host[256], port[8]; /* or: */
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
} tier_addr;

/* HOST, HOST:PORT, [V6]:PORT, :PORT (loopback), any of these behind tls:, unix:PATH. False when it is
 * none of them. A host is letters, digits and -._ only, in brackets also : and %. */
static inline bool tier_addr_parse(const char *text, tier_addr *a) {
    memset(a, 0, sizeof *a);
    a->is_tls = strncmp(text, "tls:", 4) == 0;
    if (a->is_tls) text += 4;
    if (a->is_tls && strspn(text, "0123456789") == strlen(text)) return false; /* a lone port */
    if (text[0] == 0) return false;
    if (strncmp(text, "unix:", 5) == 0) {
        a->is_unix = true;
        if (a->is_tls || text[5] == 0 || strlen(text + 5) >= sizeof a->path) return false;
        strcpy(a->path, text + 5);
        return true;
    }
    const char *end = text[0] == '[' ? strchr(text, ']') : NULL, *host = text, *port = NULL;
    size_t n;
    if (text[0] == '[') {
        if (!end || (end[1] && end[1] != ':')) return false;
        host = text + 1;
        n = (size_t)(end - host);
        port = end[1] ? end + 2 : NULL;
    } else {
        const char *colon = strchr(text, ':');
        if (colon && strchr(colon + 1, ':')) return false; /* IPv6 wants its brackets */
        n = colon ? (size_t)(colon - text) : strlen(text);
        port = colon ? colon + 1 : NULL;
    }
    if (n >= sizeof a->host || (port && (!*port || strlen(port) > 5))) return false;
    for (const char *p = port; p && *p; p++)
        if (*p < '0' || *p > '9') return false;
    if (port && atoi(port) > 65535) return false;
    for (size_t i = 0; i < n; i++) /* it may become part of a URL */
        if (!((host[i] | 32) >= 'a' && (host[i] | 32) <= 'z') &&
            !(host[i] >= '0' && host[i] <= '9') &&
            !(host[i] && strchr(text[0] == '[' ? "-._:%" : "-._", host[i])))
            return false;
    memcpy(a->host, host, n);
    if (n == 0) strcpy(a->host, "127.0.0.1");
    strcpy(a->port, port ? port : TIER_PORT);
    return true;
}

/* Is it this very machine, whatever a resolver says? A number, or the one name. */
static inline bool tier_addr_is_loopback(const tier_addr *a) {
    uint8_t v4[4];
    struct in6_addr v6;
    return a->is_unix || strcasecmp(a->host, "localhost") == 0 ||
           (inet_pton(AF_INET, a->host, v4) == 1 && v4[0] == 127) ||
           (inet_pton(AF_INET6, a->host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

/* What to write instead of a text that is no address. */
static inline const char *tier_addr_advice(const char *text) {
    const tier_addr *a = NULL;
    if (strncmp(text, "unix:", 5) == 0 && strlen(text + 5) >= sizeof a->path)
        return "the path of a socket has at most 107 bytes";
    return "give HOST:PORT, [V6]:PORT, tls:HOST:PORT or unix:PATH";
}

/* Small frames at once, and large buffers. */
static inline void tier_socket_tune(int fd) {
    int one = 1, room = 4 << 20, idle = 30, pause = 10, tries = 3; /* seconds */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* no TCP: no matter */
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one); /* who vanished leaves its place */
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &pause, sizeof pause);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
}

/* ---- Credentials ----
 *
 * Both ends prove that they know a key; neither sends it. This keeps strangers out. It does not hide
 * what is sent, nor guard it against someone on the path who can alter it: TLS does. Whoever knows a
 * key can pretend to be a box to those who have the same, and whoever pretends to be a box gets a proof
 * on which keys can be tried: so a key is 32 random bytes, and short or plain ones are refused. */
typedef struct {
    uint8_t bytes[TIER_MAX_KEY];
    size_t n; /* 0: none */
} tier_key;

#define TIER_MAKE_KEY "make one: (umask 077; openssl rand -base64 32 >FILE)"

/* How many different bytes there are. 32 random bytes as hex digits have 13 of 16, but for one key in
 * millions 8 or more. */
static inline unsigned tier_key_kinds(const tier_key *key) {
    uint8_t seen[256] = {0};
    unsigned n = 0;
    for (size_t i = 0; i < key->n; i++) {
        n += !seen[key->bytes[i]];
        seen[key->bytes[i]] = 1;
    }
    return n;
}

/* Read a key: the whole file, less the newline at its end. NULL, or why not. */
static inline const char *tier_key_read(const char *path, tier_key *key) {
    struct stat st;
    const char *why = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return strerror(errno);
    ssize_t got = 0;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        why = "not a regular file";
    else if (st.st_mode & 077)
        why = "others may read it; chmod 600";
    else if (st.st_size > (off_t)sizeof key->bytes)
        why = "longer than 1024 bytes";
    else if ((got = read(fd, key->bytes, sizeof key->bytes)) < 0)
        why = strerror(errno);
    close(fd);
    if (why) return why;
    key->n = (size_t)got;
    while (key->n > 0 && (key->bytes[key->n - 1] == '\n' || key->bytes[key->n - 1] == '\r'))
        key->n--;
    if (key->n < TIER_MIN_KEY) return "shorter than 32 bytes, so it can be guessed; " TIER_MAKE_KEY;
    return tier_key_kinds(key) < 8 ? "not random, so it can be guessed; " TIER_MAKE_KEY : NULL;
}

/* What a proof is about, as each end saw it. */
typedef struct {
    uint8_t hello[TIER_HELLO_BYTES], nonce[TIER_NONCE_BYTES], binding[TIER_BINDING_BYTES];
} tier_talk;

#define TIER_CLIENT "k3-tier client"
#define TIER_SERVER "k3-tier server"

/* HMAC-SHA256 of who, one of the two above, and the talk. False when libcrypto has none: then nobody is
 * believed. */
static inline bool tier_proof(const tier_key *key, const char *who, const tier_talk *talk,
                              uint8_t out[TIER_PROOF_BYTES]) {
    uint8_t text[14 + sizeof *talk];
    unsigned n = TIER_PROOF_BYTES;
    memcpy(text, who, 14);
    memcpy(text + 14, talk, sizeof *talk);
    return HMAC(EVP_sha256(), key->bytes, (int)key->n, text, sizeof text, out, &n) && n == 32;
}

#define TIER_NO_HMAC "libcrypto has no HMAC-SHA256 here: see OPENSSL_CONF"

/* The client's answer to a challenge of n bytes: NULL and the proof, which may be written over the
 * challenge; or why there is none. */
static inline const char *tier_answer(const tier_key *key, tier_talk *talk,
                                      const uint8_t *challenge, size_t n, uint8_t *proof) {
    if (key->n == 0) return "the box wants a key: give --psk-file";
    if (n != TIER_CHALLENGE_BYTES) return "a challenge of the wrong length";
    memcpy(talk->nonce, challenge, TIER_NONCE_BYTES);
    return tier_proof(key, TIER_CLIENT, talk, proof) ? NULL : TIER_NO_HMAC;
}

/* Does the box know the key as well? NULL, or why it is not believed. */
static inline const char *tier_believe(const tier_key *key, const tier_talk *talk,
                                       const uint8_t *proof, size_t n) {
    uint8_t want[TIER_PROOF_BYTES];
    if (!tier_proof(key, TIER_SERVER, talk, want)) return TIER_NO_HMAC;
    if (n == sizeof want && CRYPTO_memcmp(want, proof, sizeof want) == 0) return NULL;
    return "the box has another key";
}

static inline bool tier_nonce(uint8_t out[TIER_NONCE_BYTES]) {
    return getrandom(out, TIER_NONCE_BYTES, 0) == (ssize_t)TIER_NONCE_BYTES;
}

/* Text from the other end: one line, no escapes. */
static inline void tier_text(char *to, size_t cap, const uint8_t *from, size_t n) {
    if (n > cap - 1) n = cap - 1;
    for (size_t i = 0; i < n; i++) to[i] = from[i] < 0x20 || from[i] >= 0x7f ? '?' : (char)from[i];
    to[n] = 0;
}

#endif /* TIER_WIRE */
#endif
