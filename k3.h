/* k3.h - run Kimi K3, exact, on a machine that holds a few percent of it.
 *
 * This header is the only door into the engine, with k3_pass.h (rows of many sessions together),
 * k3_cache.h (states, snapshots, caches) and k3_text.h (text and ids), which it includes. A model directory as downloaded (config.json,
 * safetensors shards, tiktoken.model, tokenizer_config.json) is opened in place; nothing is
 * repacked. One prompt has one hash: the same bits come out of every kernel set, thread count and
 * chunk size (docs/NUMERICS.md).
 *
 *     k3_options o;      k3_options_default(&o);
 *     k3_error   err;    k3_engine *e;   k3_session *s;
 *     o.model_dir = "demo";
 *     if (k3_engine_open(&e, &o, &err) < 0) die(err.text);
 *     if (k3_session_new(&s, e, 0, &err) < 0) die(err.text);
 *     const k3_shape *shape = k3_engine_shape(e);
 *     uint32_t ids[] = {343, 336, 327, 444, 1489, 311};
 *     float *logits = malloc(shape->vocab_size * sizeof(float));
 *     if (k3_session_feed(s, ids, 6, K3_ROWS_LAST, logits, &err) < 0) die(err.text);
 *     uint32_t next = k3_sample_greedy(logits, shape->vocab_size);
 *     k3_session_free(s);  k3_engine_close(e);
 *
 * Threading: an engine may be shared by many sessions, one step at a time (the
 * step itself uses all threads asked for). A session belongs to one thread at a
 * time. Ownership: `open/close` and `new/free` pair up; whatever a function
 * returns by pointer is borrowed from the object it was asked of. The engine
 * never prints and never exits: it returns a status and fills a k3_error.
 */
#ifndef K3_H
#define K3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define K3_VERSION     "0.1.0"
#define K3_NUMERICS_ID "k3-f32-dot16-q40" /* changes when, and only when, bits change */

/* ---- Status ------------------------------------------------------------------
 * 0 is done, negative is one of these, positive is a count. */
typedef enum {
    K3_OK = 0,
    K3_EIO = -1,      /* a read or write failed, or a file was short          exit 1 */
    K3_ENOMEM = -2,   /* an allocation failed                                 exit 1 */
    K3_EUSAGE = -3,   /* an argument is out of range (id, chunk, kernel name) exit 2 */
    K3_EMODEL = -4,   /* the model directory is refused                       exit 3 */
    K3_EBUDGET = -5,  /* the memory budget is below the floor                 exit 4 */
    K3_ECHECK = -6,   /* a hash or check did not match                        exit 5 */
    K3_EFULL = -7,    /* the context is full                                  exit 1 */
    K3_ECANCEL = -8,  /* the caller's progress function asked to stop       exit 130 */
    K3_ENUMERIC = -9  /* NaN, infinity or overflow; names layer and stage    exit 1 */
} k3_status;

/* One line, noun, place, cause; empty when there was no error. */
typedef struct {
    char text[512];
} k3_error;

/* Short English for a status ("model refused"); never NULL. */
const char *k3_status_name(int status);

/* ---- Options ----------------------------------------------------------------- */

/* What long work is doing. `total` is 0 when unknown; units follow the phase:
 * bytes while loading or verifying, positions x layers while computing. */
typedef enum { K3_PHASE_OPEN, K3_PHASE_LOAD, K3_PHASE_COMPUTE, K3_PHASE_VERIFY } k3_phase;
typedef struct {
    k3_phase phase;
    uint64_t done, total;
    int layer;           /* layer at work, -1 when not in one             */
    uint64_t read_bytes; /* bytes read from disk since open               */
} k3_progress;

#define K3_MAX_COPIES 8 /* the model directory and its mirrors */

typedef enum { K3_POLICY_RANK, K3_POLICY_LRU } k3_policy; /* which expert makes room         */
typedef enum { K3_IO_AUTO, K3_IO_POOL, K3_IO_URING } k3_io; /* how reads are issued           */
typedef enum { K3_AUTO, K3_ON, K3_OFF } k3_switch;

typedef struct {
    const char *model_dir; /* required                                                     */
    const char *kernels;   /* "ref" "avx2" "avx512" "neon"; NULL: the best this CPU has    */
    int n_threads;         /* 0: one per core this process may use, within its CPU quota; fewer
                            * for a small model                                            */
    int chunk;             /* most positions of one pass over the weights, 1..4096; 0: by the budget;
                            * at most 512 where there are tiers                            */
    int part;              /* of them computed together, 1..chunk; 0: by the budget        */
    float eps_lora;        /* q_a and kv_a layernorm eps; K3-SPEC 3.6 default 1e-6         */
    uint64_t ram_bytes;    /* bound of the process's peak RSS; 0: what is free, less 1/16  */
    uint64_t others_bytes; /* of what is free, what others are about to take               */
    uint64_t caller_bytes; /* what the caller itself holds, counted in ram_bytes           */
    uint64_t context;      /* positions planned for; 0: 4096, or the model's maximum if less */
    uint32_t snapshots;    /* undo snapshots to leave room for, in the plan; 0: none       */
    uint32_t sessions;     /* sessions to leave room for beside the first, and rows of theirs beside a long
                            * pass that rests; at most 63                                  */
    uint32_t revocable;    /* rows of a pass that k3_session_cut() can take back, for each session in the
                            * plan; at most K3_MAX_REVOCABLE                               */
    bool headers_only;     /* check every header, load no weight: for info, plan, verify   */
    bool config_only;      /* read config.json and nothing else: a plan before the weights are
                              there. k3_engine_shape and k3_engine_plan answer; what needs weights
                              is refused (K3_EUSAGE, K3_EMODEL)                            */
    bool experts_only;     /* of a slice: the experts that are there, and no trunk; no more than
                              headers_only can be done with it                             */

    /* Reading weights that do not fit. None of these changes a bit. */
    const char *const *mirrors; /* NULL-ended directories with copies of some shards       */
    k3_io io;              /* pool of pread threads or io_uring; auto: a short probe       */
    k3_switch direct;      /* O_DIRECT; auto: if the probe says it is faster               */
    int io_depth;          /* reads in flight, 1..64; 0: by the probe                      */
    k3_policy policy;      /* least router weight, or least recently used                  */
    bool no_look_ahead;    /* do not read the next layer's likely experts                  */
    const char *pins;      /* file of experts to keep, `layer expert` a line, hottest first */
    const char *sums;      /* file of sums; NULL: k3.sums in model_dir, if it is there     */
    bool no_check;         /* do not compare what is read with sums                        */
    const char *resume;    /* verify and write_sums keep in this file how far they came, go on
                            * from there the next time, with a note, and remove it when they are
                            * through; NULL: they begin at the beginning                   */

    /* Far boxes that hold experts in memory (`k3-tier`). None of these changes a bit either: what
     * a box does not answer, or not in time, is computed here. */
    const char *const *tiers; /* NULL-ended: HOST:PORT, [V6]:PORT, tls:HOST:PORT, unix:PATH */
    const char *tier_key;  /* file with a key that boxes must know and want to be shown    */
    const char *tier_ca;   /* PEM: who signed the tls: boxes' certificates, or these; NULL:
                            * the system's authorities                                     */
    const char *tier_cert, *tier_cert_key; /* PEM: ours, for boxes that want one; the key
                            * NULL: it is in tier_cert                                     */
    uint32_t spin_us;      /* a wait for a box spins so long before it sleeps              */
    uint32_t tier_wait_us; /* wait at least so long; 0: no longer than it would take here  */
    bool tier_hedge;       /* a box that is late: ask a second one as well                 */
    /* Compute the answers of one layer in so many here as well; 0: none. A box that lied is never
     * asked again. With 1 no answer is used before it was compared. With more, sessions that used
     * answers which nobody compared are unverified: once a lie is caught their next step fails with
     * K3_ECHECK, from then on every layer is compared, and a session that is reset comes out right.
     * With audits an unverified session is neither saved nor kept in a k3_cache. */
    uint32_t tier_audit;

    bool is_timed;         /* keep k3_stats.part_ns: two looks at the clock for each piece of work */

    /* Notes the caller may show, one line each (a tensor nobody knows, a fallback). */
    void (*note)(void *user, const char *line);
    /* Called between layers and between pieces of loading; a non-zero return cancels the work.
     * A session whose step was cancelled or failed can only be reset, restored, loaded or freed. */
    int (*progress)(void *user, const k3_progress *p);
    void *user;
} k3_options;

void k3_options_default(k3_options *o);

/* ---- Engine ------------------------------------------------------------------ */

typedef struct k3_engine k3_engine;

/* The geometry, read from config.json. Nothing here is ever defaulted. */
#define K3_MAX_LAYERS 1024
#define K3_MAX_TOP_K  32
typedef struct {
    uint32_t vocab_size, hidden, n_layers;
    uint32_t n_heads, q_lora, kv_lora, nope_dim, rope_dim, v_dim; /* MLA                 */
    uint32_t kda_heads, kda_dim, conv_width;                      /* KDA; conv_width 4   */
    uint32_t block_size;                                          /* AttnRes             */
    uint32_t dense_inter, n_dense;                                /* layers [0, n_dense) */
    uint32_t n_experts, top_k, n_shared, latent, expert_inter;    /* LatentMoE           */
    uint32_t shared_inter;                                        /* n_shared x inter    */
    uint32_t max_position, eos_id;
    float rms_eps, eps_lora, gate_lower_bound, situ_beta, situ_linear_beta, routed_scale;
    uint8_t is_mla[K3_MAX_LAYERS]; /* 1: MLA, 0: KDA */
    /* Bytes, from the geometry. */
    uint64_t expert_bytes; /* one routed expert, packed         */
    uint64_t trunk_bytes;  /* all weights but routed experts    */
    uint64_t state_bytes;  /* fixed part of one session's state */
    uint64_t pos_bytes;    /* latent cache per position         */
} k3_shape;

/* Where the budget goes. Bytes unless named otherwise. */
typedef struct {
    uint64_t ram_bytes, floor_bytes; /* the ceiling, and the least that this model could run in */
    uint64_t context;                /* positions planned for                                    */
    uint64_t state_bytes, session_bytes; /* fixed state; with the latent cache and the ids      */
    uint64_t snapshot_bytes; /* of k3_options.snapshots                                  */
    uint64_t sessions_bytes; /* of k3_options.sessions, beside the first                 */
    uint64_t scratch_bytes, vector_bytes;
    uint64_t resident_bytes, streamed_bytes; /* trunk matrices kept; read again for each chunk   */
    uint64_t ring_bytes, slot_bytes;
    uint32_t n_slots, quota;         /* expert slots in all; that each layer may keep            */
    uint32_t n_pinned;               /* of them, for pinned experts                              */
    uint32_t chunk;                  /* most positions of a pass: each expert is read once for them ... */
    uint32_t part;                   /* ... and most computed together: the trunk is read once for these */
    uint32_t sessions, revocable;    /* as asked for                                             */
    bool has_sums;                   /* every read is compared with its sum                      */
    bool is_uring, is_direct;        /* how weights are read ...                                 */
    int io_depth;
    double disk_bytes_per_s;         /* ... and what the probe measured; 0: not probed           */
} k3_plan;

/* Open a model directory: parse and check every header, then load the trunk. What `o` points to must
 * outlive the engine.
 * Errors  K3_EMODEL names the file, tensor or field; K3_EBUDGET: ram_bytes is below the floor, which
 *         the text says; K3_EIO; K3_ENOMEM; K3_ECHECK: a sum; K3_ECANCEL: the progress function;
 *         K3_EUSAGE for a kernel set this CPU lacks (the text lists what it has). */
int k3_engine_open(k3_engine **out, const k3_options *o, k3_error *err);
void k3_engine_close(k3_engine *e);

const k3_shape *k3_engine_shape(const k3_engine *e);
const char *k3_engine_kernels(const k3_engine *e); /* the chosen table's name */
int k3_engine_threads(const k3_engine *e);
int k3_engine_chunk(const k3_engine *e);
const k3_plan *k3_engine_plan(const k3_engine *e); /* headers_only: n_slots 0 below the floor */

/* Read every copy of every expert and every trunk tensor once and check what can be checked:
 * lengths, scale codes (at most 252), finite trunk values, sums if there are any. Works headers_only.
 * Returns the number of experts checked, or K3_EMODEL, K3_ECHECK (a sum), K3_EIO naming the first fault. */
int64_t k3_engine_verify(k3_engine *e, k3_error *err);

/* The same with no_check, and keep an XXH3 of everything as k3_options.sums says. Sums that are there,
 * of the same files, must say the same (K3_ECHECK, and they stay) unless is_anew. Mirrors are compared
 * with model_dir's copy. Engines opened later check each read with it. */
int64_t k3_engine_write_sums(k3_engine *e, bool is_anew, k3_error *err);

/* The kernel sets this build links, best last, in a NULL-ended array, and whether
 * this CPU can run one. */
const char *const *k3_kernels_linked(void);
bool k3_kernels_is_supported(const char *name);

/* ---- Session: one timeline ---------------------------------------------------- */

typedef struct k3_session k3_session;

/* A timeline with room for `context` positions (0: the context planned for). All memory it will
 * ever use is taken here. */
int k3_session_new(k3_session **out, k3_engine *e, uint64_t context, k3_error *err);
void k3_session_free(k3_session *s);

/* Back to position 0, as new. */
void k3_session_reset(k3_session *s);

typedef enum { K3_ROWS_NONE, K3_ROWS_LAST, K3_ROWS_ALL } k3_rows;

/* Run `n` ids at the next positions, in chunks of at most the engine's `chunk`.
 * Any way of cutting the same ids gives the same bits.
 *
 * Shapes  ids: u32[n], each < vocab_size
 *         logits: f32[vocab_size] for K3_ROWS_LAST, f32[n][vocab_size] for
 *         K3_ROWS_ALL, ignored for K3_ROWS_NONE
 * Errors  K3_EUSAGE (n is 0, an id out of range: nothing was run); K3_EFULL (nothing
 *         was run); K3_EIO, K3_EMODEL, K3_ENUMERIC, K3_ECHECK, K3_ECANCEL end the session until it is reset,
 *         restored or loaded */
int k3_session_feed(k3_session *s, const uint32_t *ids, size_t n, k3_rows rows, float *logits,
                    k3_error *err);

uint64_t k3_session_pos(const k3_session *s);     /* positions run so far  */
uint64_t k3_session_context(const k3_session *s); /* positions it can hold */
k3_engine *k3_session_engine(const k3_session *s); /* what it was made with */

/* Hash of the hidden_size f32 of P after each layer (docs/NUMERICS.md 7), called in
 * position-major, then layer order after each chunk. NULL turns it off. */
typedef void (*k3_trace_fn)(void *user, uint64_t pos, uint32_t layer, uint64_t fnv);
void k3_session_trace(k3_session *s, k3_trace_fn fn, void *user);

/* The router's choice for one position: ids u32[n] ascending, weights f32[n] as they enter the
 * expert sum. Called layer by layer, within one by position. NULL turns it off. */
typedef void (*k3_route_fn)(void *user, uint64_t pos, uint32_t layer, uint32_t n,
                            const uint32_t *ids, const float *weights);
void k3_session_on_route(k3_session *s, k3_route_fn fn, void *user);

/* What a step spends its time on: the trunk's matrices; attention, KDA and MLA; experts; what is done
 * row by row (norms, mixes, router). The rest is serial, or waits for the disk or a box. */
typedef enum { K3_PART_MATRIX, K3_PART_ATTENTION, K3_PART_EXPERT, K3_PART_ROW, K3_N_PARTS } k3_part;

typedef struct {
    uint64_t n_pos;          /* positions run                               */
    uint64_t compute_ns;     /* wall time inside feed                       */
    uint64_t stall_ns;       /* of it, time spent waiting for the disk      */
    uint64_t expert_uses;    /* distinct experts computed, chunk by chunk   */
    uint64_t expert_hits;    /* of them, in memory when wanted              */
    uint64_t expert_loads;   /* experts whose reading began                 */
    uint64_t guesses, guess_hits; /* of them, read ahead; and then used     */
    uint64_t wasted_bytes;   /* read ahead and not used                     */
    uint64_t read_bytes;     /* bytes read from disk since open             */
    uint64_t resident_bytes; /* what the ledger counts                      */
    uint64_t far_asked, far_served; /* experts asked of far boxes; and in their sums */
    uint64_t far_late;       /* times that a box did not answer in time     */
    uint64_t far_hedged;     /* questions that a second box was asked too   */
    uint64_t far_audits;     /* layers whose answers were computed here too */
    uint64_t far_lies;       /* boxes that were found to lie, and banned    */
    uint64_t part_ns[K3_N_PARTS];      /* wall time of each part                          */
    uint64_t part_busy_ns[K3_N_PARTS]; /* what all threads computed meanwhile: with n threads
                              * n x part_ns where none of them waited                        */
} k3_stats;

/* Figures of the session and of its engine; while a step runs, only from its progress function. */
void k3_session_stats(const k3_session *s, k3_stats *out);

/* ---- Sampling (docs/NUMERICS.md 6) --------------------------------------------- */

typedef struct {
    float temperature; /* 0: greedy                               */
    float top_p;       /* 1: off                                  */
    uint32_t top_k;    /* 0: off                                  */
    uint64_t seed;
} k3_sampler;

/* Lowest id among the largest logits. */
uint32_t k3_sample_greedy(const float *logits, size_t vocab_size);

/* Draw the id that follows `pos`, the 0-based position whose row `logits` is, with the kernels of `e`.
 * `scratch` is caller's memory: k3_sample_scratch(vocab_size) bytes. Any number of threads may draw at once. */
size_t k3_sample_scratch(size_t vocab_size);
uint32_t k3_sample(const k3_engine *e, const k3_sampler *sp, const float *logits, size_t vocab_size,
                   uint64_t pos, void *scratch);

/* ---- Oracle (docs/NUMERICS.md 7) ------------------------------------------------ */

#define K3_FNV_BASIS 0xcbf29ce484222325u
uint64_t k3_fnv1a(uint64_t h, const void *bytes, size_t n_bytes);

#ifdef __cplusplus
}
#endif

#include "k3_cache.h" /* the rest of the door: states and caches, ...          */
#include "k3_pass.h"  /* ... rows of many sessions together, cutting back, ... */
#include "k3_text.h"  /* ... text and ids                                      */

#endif
