/* k3.c - the engine, in the order a token meets it.
 *
 * What stays
 *    1  Status, clock, floating-point state
 *    4  Reference kernels (the definition of the bits) and the picker
 *                      (2, the byte ceiling, is k3_ledger.c; 3 and 5, config.json and shards, k3_model.c)
 *    6  The bytes: (6.1, the disk, is k3_disk.c), 6.2 trunk, 6.3 streamed rows, 6.4 experts in slots, 6.5 pins, 6.6 sums,
 *       6.7 the plan that divides the budget, 6.8 opening the disk
 * What one token does
 *    8  Embedding and norms          (7, text to ids, is k3_text.c)
 *    9  KDA and MLA
 *   10  Router
 *   11  Experts: store, far boxes, exact sum
 *   12  AttnRes, one layer, head
 *   13  Sampling
 * Who asks
 *   14  State: what of a session is saved, snapshots      (its files are k3_state.c)
 *   15  Sessions
 *   16  Oracle
 *   17  Public functions
 *   18  What the tier server shares
 *
 * Invariants
 *   - docs/NUMERICS.md fixes every bit; docs/K3-SPEC.md says what is computed.
 *   - Work is split over threads by output element only, in small pieces (k3_pool.h): which thread
 *     computes a piece is left to chance, what it computes is not.
 *   - A token allocates nothing, starts no thread, builds no string (but for an error).
 *   - The engine never prints and never exits. Functions return 0 or a negative k3_status
 *     and fill one line naming noun, place, cause.
 *   - Sizes are size_t or uint64_t from the first multiplication.
 *   - Naming: il layer, ie expert, lat the latent width, t a position inside a chunk.
 */
#define K3_KERNELS_ELEMENTWISE /* their definition, of which kernels.h has one copy */
#include "k3.h"
#include "k3_common.h"
#include "k3_error.h"
#include "k3_disk.h"
#include "k3_ledger.h"
#include "k3_mla.h"
#include "k3_model.h"
#include "k3_resume.h"
#include "k3_state.h"
#include "k3_temp.h"

#include "kernels.h"
#include "experts.h"
#include "k3_machine.h"
#include "k3_pool.h"
#include "slice.h"
#include "tier.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#if defined(__AVX__) && !defined(K3_ALLOW_AVX)
#error "build k3.c without -march=native or -mavx: the kernel sets are chosen at run time"
#endif

/* ==== 1. Status, clock, floating-point state ========================================
 *
 * One convention everywhere: 0 or a negative k3_status, with the cause in one line. The
 * floating-point state is set by every thread that computes, on entry: another library in
 * the process may have switched on flush-to-zero for all threads.
 */

const char *k3_status_name(int status) {
    static const char *const name[] = {"ok",
                                       "I/O error",
                                       "out of memory",
                                       "bad argument",
                                       "model refused",
                                       "budget too small",
                                       "check failed",
                                       "context full",
                                       "cancelled",
                                       "numeric error"};
    STATIC_ASSERT(every_status_has_a_name, sizeof name / sizeof *name == -K3_ENUMERIC + 1);
    int i = status >= 0 ? 0 : -status;
    return i < (int)(sizeof name / sizeof *name) ? name[i] : "unknown status";
}

/* The caller's own state, given back when a public function returns. */
static uint64_t fp_save(void) {
#if defined(__SSE2__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t v;
    __asm__ volatile("mrs %0, fpcr" : "=r"(v));
    return v;
#else
    return 0;
#endif
}

static void fp_restore(uint64_t saved) {
#if defined(__SSE2__)
    _mm_setcsr((unsigned)saved);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
#else
    (void)saved;
#endif
}

/* Some libms round fmaf twice; such a machine cannot keep the contract. The first two cases
 * lie a hair beside a tie, the third is a tie among subnormals. */
static bool fma_is_exact(void) {
    static const float hard[3][4] = {
        {0x1.001p0f, 0x1.001p0f, 0x1p-80f, 0x1.002002p0f},
        {0x1.001p0f, 0x1.003p0f, -0x1p-80f, 0x1.004002p0f},
        {0x1p-75f, 0x1p-75f, 0x1p-149f, 0x1p-148f},
    };
    for (int i = 0; i < 3; i++) {
        volatile float a = hard[i][0], b = hard[i][1], c = hard[i][2];
        if (fmaf(a, b, c) != hard[i][3]) return false;
    }
    return true;
}

/* ==== 4. Reference kernels ===========================================================
 *
 * The definition of the bits: each function is its formula in NUMERICS.md, one element at
 * a time, with no thought for speed. The SIMD files are tested against these, and the
 * engine works with none of them linked.
 */

/* The fold of dot16: 16 lanes to one, then + (+0) so that the result is never -0. */
static float ref_fold(float acc[16]) {
    for (int s = 8; s >= 1; s /= 2)
        for (int l = 0; l < s; l++) acc[l] = acc[l] + acc[l + s];
    return acc[0] + 0.0f;
}

/* One group of 32: evens, then odds. */
static void ref_group(float acc[16], const float w[32], const float *x_even, const float *x_odd) {
    for (int l = 0; l < 16; l++) acc[l] = k3_fma(w[2 * l], x_even[l], acc[l]);
    for (int l = 0; l < 16; l++) acc[l] = k3_fma(w[2 * l + 1], x_odd[l], acc[l]);
}

static float ref_dot(const float *a, const float *b, size_t n) {
    float acc[16] = {0};
    for (size_t i = 0; i < n; i += K3_GROUP) {
        float wa[K3_GROUP] = {0}, even[16] = {0}, odd[16] = {0};
        for (size_t k = 0; k < K3_GROUP && i + k < n; k++) {
            wa[k] = a[i + k];
            (k & 1 ? odd : even)[k >> 1] = b[i + k];
        }
        ref_group(acc, wa, even, odd);
    }
    return ref_fold(acc);
}

static void ref_matmul_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                            size_t n, const float *xp, size_t batch) {
    size_t npad = k3_pad(n);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t i = 0; i < n; i += K3_GROUP) {
                const float *x = xp + k3_xp_group(npad, batch, t, i / K3_GROUP);
                float wf[K3_GROUP] = {0};
                for (size_t k = 0; k < K3_GROUP && i + k < n; k++)
                    wf[k] = k3_bf16_f32(w[r * ldw + i + k]);
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_matmul_f32(float *y, size_t ldy, const float *w, size_t n_rows, size_t n,
                           const float *xp, size_t batch) {
    size_t npad = k3_pad(n);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t i = 0; i < npad; i += K3_GROUP) {
                const float *x = xp + k3_xp_group(npad, batch, t, i / K3_GROUP);
                const float *packed = w + r * npad + i;
                float wf[K3_GROUP];
                for (size_t k = 0; k < K3_GROUP; k++) wf[k] = packed[k3_xp_lane(k)];
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_matmul_mxfp4(float *y, size_t ldy, const uint8_t *q, const uint8_t *s,
                             size_t n_rows, size_t n, const float *xp, size_t batch) {
    size_t n_group = n / K3_GROUP;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t g = 0; g < n_group; g++) {
                const float *x = xp + k3_xp_group(n, batch, t, g);
                const uint8_t *nib = q + r * (n / 2) + g * (K3_GROUP / 2);
                float scale = k3_e8m0(s[r * n_group + g]), wf[K3_GROUP];
                for (size_t k = 0; k < K3_GROUP; k += 2) {
                    wf[k] = k3_e2m1(nib[k / 2] & 15) * scale;
                    wf[k + 1] = k3_e2m1(nib[k / 2] >> 4) * scale;
                }
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_chain_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_i,
                           size_t n_j, const float *c, size_t ldc, size_t batch) {
    for (size_t t = 0; t < batch; t++)
        for (size_t j = 0; j < n_j; j++) {
            float sum = 0.0f;
            for (size_t i = 0; i < n_i; i++)
                sum = k3_fma(k3_bf16_f32(w[i * ldw + j]), c[t * ldc + i], sum);
            y[t * ldy + j] = sum;
        }
}

static void ref_chain_f32(float *y, size_t ldy, const float *w, size_t ldw, size_t n_i, size_t n_j,
                          const float *c, size_t ldc, size_t batch) {
    for (size_t t = 0; t < batch; t++)
        for (size_t j = 0; j < n_j; j++) {
            float sum = 0.0f;
            for (size_t i = 0; i < n_i; i++) sum = k3_fma(w[i * ldw + j], c[t * ldc + i], sum);
            y[t * ldy + j] = sum;
        }
}

/* Decay, read, delta write, read: the four lines of K3-SPEC 3.3 step 6. */
static void ref_kda(float *S, size_t d, size_t n_tok, const float *a, const float *k,
                    const float *q, const float *val, size_t ldv, const float *beta, size_t ldb,
                    float *o, size_t ldo) {
    for (size_t t = 0; t < n_tok; t++, a += d, k += d, q += d)
        for (size_t v = 0; v < d; v++) {
            float u = 0.0f, sum = 0.0f;
            for (size_t i = 0; i < d; i++) {
                S[i * d + v] = S[i * d + v] * a[i];
                u = k3_fma(S[i * d + v], k[i], u);
            }
            float delta = beta[t * ldb] * (val[t * ldv + v] - u);
            for (size_t i = 0; i < d; i++) {
                S[i * d + v] = k3_fma(k[i], delta, S[i * d + v]);
                sum = k3_fma(S[i * d + v], q[i], sum);
            }
            o[t * ldo + v] = sum;
        }
}

static uint64_t ref_read_stream(const void *p, size_t n_bytes) {
    const uint64_t *w = p;
    uint64_t sum = 0;
    for (size_t i = 0; i < n_bytes / sizeof *w; i++) sum += w[i];
    return sum;
}

static float ref_peak_fma(uint64_t n, uint64_t *flops) {
    float acc[8] = {0};
    for (uint64_t i = 0; i < n; i++)
        for (int l = 0; l < 8; l++) acc[l] = k3_fma(acc[l], 0.5f, 1.0f);
    *flops = n * 8 * 2;
    return ref_fold((float[16]){acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7]});
}

static bool ref_is_supported(void) { return true; }

const k3_kernels k3_kernels_ref = {
    .name = "ref",
    .is_supported = ref_is_supported,
    .matmul_bf16 = ref_matmul_bf16,
    .matmul_f32 = ref_matmul_f32,
    .matmul_mxfp4 = ref_matmul_mxfp4,
    .chain_bf16 = ref_chain_bf16,
    .chain_f32 = ref_chain_f32,
    .kda = ref_kda,
    .dot = ref_dot,
    K3_ELEMENTWISE_KERNELS,
    .read_stream = ref_read_stream,
    .peak_fma = ref_peak_fma,
};

/* ==== 6. Disk, trunk, experts: the bytes =============================================
 *
 * Three parts, each a caller of the one before. The disk (k3_disk.c) serves reads while layers compute. The
 * trunk is resident as far as the budget goes; the rest passes through a ring in the order in
 * which a token uses it. Experts live in slots.
 */

/* ---- 6.2 Trunk ----
 *
 * Vectors are always resident, widened to f32, the two of each AttnRes folded into one. Matrices
 * are resident as the plan says; the others are cut into pieces of whole rows and pass through a
 * ring of memory in the order in which a token uses them, read ahead as far as the ring is free,
 * into the next token if need be. Embedding rows are read as needed.
 */
typedef struct {
    const uint16_t *m[N_TENSORS]; /* resident bf16 matrices; NULL: streamed or not of this layer */
    const float *v[N_TENSORS];    /* vectors and conv weights, f32                               */
    const float *u_att, *u_mlp;   /* AttnRes: res_norm * res_proj                                */
    const float *A;               /* exp(A_log), [kda_heads]                                     */
    bool is_resident[N_TENSORS];
    void *block;
    uint64_t block_bytes;
} layer;

/* Rows of one streamed matrix. */
typedef struct {
    uint32_t il; /* n_layers for the head */
    uint32_t segment;
    uint16_t t, i_shard;
    uint32_t row, n_rows;
    uint64_t offset, n, sum;
    bool has_sum;
} piece;

#define STREAM_LIVE 64
#define PIECE_BYTES (8u << 20) /* a streamed piece, about */
#define PIECE_ROWS  96         /* its rows are a multiple of this     */
STATIC_ASSERT(streamed_pieces_are_whole_tiles, PIECE_ROWS % ROW_TILE == 0);

typedef struct {
    piece *pieces; /* [n_pieces] in order of use; the head's after n_body */
    uint64_t pieces_bytes;
    uint32_t n_pieces, n_body;
    uint32_t *segment; /* [2 x n_layers + 2] the first piece of each segment, and n_pieces */
    uint32_t turns, head_turns; /* how often the pass at work reads a segment; the head's   */
    const k3_pass *owner; /* the pass at work                                           */
    bool is_midway;       /* it has begun and not ended                                 */
    uint8_t *bytes;
    uint64_t cap, at; /* next free byte of the ring */
    struct {
        uint32_t i_piece;
        uint64_t at;
        io_req req;
    } live[STREAM_LIVE];         /* asked for, oldest first, from `first` */
    uint32_t first, n_live, i_read, i_turn; /* i_read: the next piece to ask for, in which turn */
    bool is_next_pass;
} stream;

/* Experts: see the store below. */
enum slot_state { SLOT_FREE, SLOT_READING, SLOT_FULL };
typedef struct {
    uint32_t il, ie;
    float heat;
    uint64_t tick;
    enum slot_state state;
    bool is_pinned, is_guess, is_doomed;
    bool is_kept; /* named in the file of pins: stays for good, beside the quota */
    bool is_fill; /* read because the slot was empty; among the held from the start */
    int n_reqs;
    io_req req[N_EXPERT_TENSORS];
} slot;

typedef struct {
    slot *slots;
    uint8_t *bytes;     /* [n_slots][slot_bytes]                        */
    uint64_t slot_bytes, meta_bytes;
    uint32_t n_slots, quota;
    int32_t *slot_of;   /* [n_moe][n_experts], -1: not here             */
    uint32_t *n_held;   /* [n_moe] full slots that may stay             */
    uint32_t *free, n_free;
    uint32_t *guess, n_guess; /* [n_experts] slots read ahead for the next layer; in scratch */
    uint32_t n_doomed;  /* guesses nobody wants, still being read       */
    uint32_t n_kept;    /* pinned by the file of pins                   */
    uint64_t tick;
} store;

/* Sums of everything that is ever read at once. */
typedef struct {
    const uint64_t *sum; /* NULL: none                                                 */
    uint32_t *first;     /* [n_layers + 1][N_TENSORS] the first sum of a trunk tensor    */
    uint64_t expert0;    /* the first sum of the first expert ...                        */
    uint32_t per_expert; /* ... and how many each has: 1, or 6 where some are not whole, */
    bool has_contents;   /* and, counted in per_expert, a last one of its contents       */
    uint64_t n, block_bytes;
    void *block;
} sums;

struct scratch;

#define ZEROS_NAMED 8

struct k3_engine {
    k3_shape sh;
    k3_options opt;
    char *dir;
    const k3_kernels *kern;
    int n_threads, chunk;
    uint64_t n_scores; /* floats for scores of MLA */
    k3_pool *pool; /* of n_threads; NULL in an engine that computes nothing */
    ledger mem;
    model files;
    disk io;
    layer *layers; /* [n_layers + 1]; the last is the head: lm_head, norm, output u_att */
    stream stream;
    store store;
    sums sums;
    uint8_t *bounce; /* for small reads: vectors, rows of the embedding */
    uint64_t bounce_bytes;
    k3_plan plan;
    struct scratch *scratch;     /* one step at a time uses it */
    k3_pass *passes;             /* that are open              */
    pthread_mutex_t step, accounts; /* the latter guards the ledger and the fingerprint */
    k3_fingerprints print;       /* sampled 0: not yet asked for (section 14)        */
    uint64_t stamp;              /* of the files when they were opened (section 14)  */
    k3_stats stats;
    tier *far; /* the far boxes; NULL: none */
    void *far_block;
    uint64_t far_bytes;
    uint32_t far_rows;       /* longest chunk they are asked about */
    double disk_ns, pair_ns; /* running: one more expert from disk, one (position, expert) */
    int64_t *far_sums; /* [boxes][far_rows][latent] answers that are computed here too, or NULL */
    uint32_t n_far_boxes;
    uint32_t far_dice[64], n_far_dice; /* random numbers; how many are not used yet */
    uint64_t zeros[ZEROS_NAMED];       /* what was told to be nothing but zeros (6.2) */
    uint32_t n_zeros;
    slot *far_fill; /* the last slot that was filled with what a box serves; NULL: none */
};

/* Read n bytes to `to` by way of the bounce buffer; `sum` is their XXH3, or NULL. What is too long
 * for one read is checked as a whole; when it does not match it is read once more, and then from
 * other copies than the first time. */
static int engine_read(k3_engine *e, uint16_t i_shard, void *to, uint64_t n, uint64_t offset,
                       const uint64_t *sum, k3_error *err) {
    uint64_t cap = e->bounce_bytes - IO_ALIGN;
    uint8_t from = 0, avoid = 0;
    for (int i_try = 0; i_try < 3; i_try++) {
        for (uint64_t done = 0, part; done < n; done += part) {
            part = n - done < cap ? n - done : cap;
            io_req r = {.to = e->bounce, .offset = offset + done, .n = part, .i_shard = i_shard};
            r.has_sum = sum && part == n;
            r.sum = r.has_sum ? *sum : 0;
            r.avoid = avoid;
            disk_submit(&e->io, &r, IO_DEMAND);
            disk_wait(&e->io, &r);
            if (r.state == IO_FAILED && avoid)
                return sum_fail(&e->files.shards[i_shard], offset, n, err);
            if (r.state == IO_FAILED) return disk_fail(&e->io, &r, err);
            from |= (uint8_t)(1u << r.i_copy);
            memcpy((uint8_t *)to + done, r.at, (size_t)part);
        }
        if (!sum || n <= cap || XXH3_64bits(to, (size_t)n) == *sum) return 0;
        avoid = i_try == 1 ? from : 0;
    }
    return sum_fail(&e->files.shards[i_shard], offset, n, err);
}

static int engine_progress(k3_engine *e, k3_phase phase, uint64_t done, uint64_t total, int il,
                           k3_error *err) {
    bool is_new[K3_MAX_COPIES] = {false};
    if (e->io.read) pthread_mutex_lock(&e->io.lock);
    k3_progress p = {phase, done, total, il, e->io.read_bytes};
    for (int i = 0; i < e->io.n_copies; i++) { /* said here, not by the thread that saw it */
        io_copy *c = &e->io.copies[i];
        is_new[i] = c->is_dead && !c->is_told;
        if (is_new[i]) c->is_told = true;
    }
    if (e->io.read) pthread_mutex_unlock(&e->io.lock);
    for (int i = 0; i < e->io.n_copies; i++) {
        io_copy *c = &e->io.copies[i];
        if (!is_new[i]) continue;
        char line[4200];
        snprintf(line, sizeof line, "%s: reads fail; it is used only where no other copy is left",
                 c->dir);
        if (e->opt.note) e->opt.note(e->opt.user, line);
    }
    if (e->opt.progress && e->opt.progress(e->opt.user, &p))
        return fail(err, K3_ECANCEL, "cancelled");
    return 0;
}

/* A tensor that is kept as f32: everything that is no bf16 matrix. */
static bool is_vector(enum tensor t) {
    const tensor_def *d = &TENSOR[t];
    return d->dtype == F32 || d->n_dims == 1 || d->dims[0] == D_1;
}

static bool layer_has_tensor(const k3_shape *sh, uint32_t il, int t) {
    if (il == sh->n_layers) return TENSOR[t].part == IN_MODEL && t != T_EMBED;
    return layer_has(sh, il, TENSOR[t].part);
}

static uint64_t resident_bytes(const model *m, enum tensor t) {
    uint64_t n = tensor_elements(m->dims, t);
    return round_up(n * (is_vector(t) ? sizeof(float) : sizeof(uint16_t)), 64);
}

/* Name a trunk tensor before the cause. */
static int fail_tensor(const k3_engine *e, uint32_t il, int t, int rc, k3_error *err) {
    if (il == e->sh.n_layers) return fail_in(err, rc, "%s", TENSOR[t].name);
    return fail_in(err, rc, "%s of layer %u", TENSOR[t].name, il);
}

static const place *trunk_place(const k3_engine *e, uint32_t il, int t) {
    return t < N_MODEL_TENSORS ? &e->files.at_model[t] : &e->files.at[il][t];
}

static uint64_t tensor_rows(const model *m, int t) { return m->dims[TENSOR[t].dims[0]]; }
static uint64_t tensor_cols(const model *m, int t) { return m->dims[TENSOR[t].dims[1]]; }

/* Rows per piece: whole tiles, about PIECE_BYTES. kv_b is used whole. */
static uint64_t piece_rows(const model *m, int t) {
    uint64_t rows = tensor_rows(m, t), n = PIECE_BYTES / (tensor_cols(m, t) * sizeof(uint16_t));
    if (t == T_KV_B) return rows;
    n = n / PIECE_ROWS * PIECE_ROWS;
    if (n < PIECE_ROWS) n = PIECE_ROWS;
    return n < rows ? n : rows;
}

static uint64_t piece_bytes(const model *m, int t) {
    return piece_rows(m, t) * tensor_cols(m, t) * sizeof(uint16_t);
}

/* The sum of part i of a trunk tensor: a piece of a matrix, a whole vector, a row of the embedding;
 * NULL when there are no sums. */
static const uint64_t *trunk_sum(const k3_engine *e, uint32_t il, int t, uint64_t i) {
    return e->sums.sum ? &e->sums.sum[e->sums.first[il * N_TENSORS + (uint32_t)t] + i] : NULL;
}

/* ---- Bytes that were never written ----
 *
 * Tools that make a file in its full size before they fill it leave zeros where they were stopped, and zeros are
 * numbers like others: scale code 0, weights of 0. So a tensor of zeros and nothing else is told: verify refuses it,
 * a run makes a note. What may be zero in a model is a bias, and the trunk of a shard that says so itself
 * (shard.is_sparse). Weights differ from zero in their first bytes, and there the look at them ends. */
static bool is_zeros(const uint8_t *p, uint64_t n) {
    return n > 0 && p[0] == 0 && memcmp(p, p + 1, (size_t)n - 1) == 0;
}

static bool tensor_may_be_zero(const k3_engine *e, uint32_t il, int t) {
    return t == T_ROUTER_BIAS || t == T_DT_BIAS || t == T_A_LOG ||
           e->files.shards[trunk_place(e, il, t)->shard].is_sparse;
}

/* The first of an expert's tensors that is nothing but zeros, or -1. */
static int expert_zeros(const k3_shape *sh, const expert_view *x) {
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        if (is_zeros(x->p[k], expert_tensor_bytes(sh, k))) return k;
    return -1;
}

/* "expert 3 of layer 5: w1.weight_scale has 344064 bytes of zeros and no other (FILE, offset 0x..)": n bytes from
 * `from` on of a tensor. */
static void zeros_text(const k3_engine *e, const name_id *id, uint64_t from, uint64_t n, char *out,
                       size_t cap) {
    char what[160];
    const place *at = id->expert_tensor < 0 ? trunk_place(e, id->il, (int)id->tensor) : NULL;
    const expert_place *x = at ? NULL : model_expert(&e->files, &e->sh, id->il, id->ie);
    uint16_t i_shard = at ? at->shard : x->shard[id->expert_tensor];
    uint64_t offset = (at ? at->offset : x->offset[id->expert_tensor]) + from;
    if (!at)
        snprintf(what, sizeof what, "expert %u of layer %u: %s", id->ie, id->il,
                 EXPERT_TENSOR[id->expert_tensor]);
    else if (id->il == e->sh.n_layers)
        snprintf(what, sizeof what, "%s", TENSOR[id->tensor].name);
    else
        snprintf(what, sizeof what, "%s of layer %u", TENSOR[id->tensor].name, id->il);
    snprintf(out, cap,
             "%s: %llu bytes are zeros and nothing else (%s, offset 0x%llx), as if never written",
             what, (unsigned long long)n, e->files.shards[i_shard].name,
             (unsigned long long)offset);
}

/* Is there still something to tell of it: few were told, and not this one? With `takes` it is told now. Returns 1
 * for yes, 2 for the last one. */
static int zeros_are_news(k3_engine *e, const name_id *id, bool takes) {
    uint64_t key =
        ((uint64_t)id->il << 32 | (id->expert_tensor < 0 ? (uint32_t)id->tensor : id->ie)) << 1;
    key |= id->expert_tensor >= 0;
    pthread_mutex_lock(&e->accounts);
    bool is_new = e->n_zeros < ZEROS_NAMED;
    for (uint32_t i = 0; is_new && i < e->n_zeros; i++) is_new = e->zeros[i] != key;
    if (is_new && takes) e->zeros[e->n_zeros++] = key;
    bool is_last = e->n_zeros == ZEROS_NAMED;
    pthread_mutex_unlock(&e->accounts);
    return is_new ? 1 + is_last : 0;
}

/* A note, once for each tensor of the trunk or expert, of the first few. */
static void zeros_note(k3_engine *e, const name_id *id, uint64_t from, uint64_t n) {
    char line[700], what[512];
    int news = zeros_are_news(e, id, true);
    if (!news || !e->opt.note) return;
    zeros_text(e, id, from, n, what, sizeof what);
    snprintf(line, sizeof line,
             "%s: what is computed with them is worth nothing; `k3 verify` says what to download "
             "again%s",
             what, news == 2 ? " (and no more are named)" : "");
    e->opt.note(e->opt.user, line);
}

/* n bytes from `from` on of a tensor of the trunk were read. */
static void zeros_look(k3_engine *e, uint32_t il, int t, uint64_t from, const uint8_t *p,
                       uint64_t n) {
    const name_id id = {(enum tensor)t, -1, il, 0};
    if (p[0] == 0 && !tensor_may_be_zero(e, il, t) && zeros_are_news(e, &id, false) &&
        is_zeros(p, n))
        zeros_note(e, &id, from, n);
}

/* A piece came by the ring. */
static void zeros_look_piece(k3_engine *e, const piece *p, const uint16_t *w) {
    zeros_look(e, p->il, p->t, p->offset - trunk_place(e, p->il, p->t)->offset, (const uint8_t *)w, p->n);
}

/* An expert was read. */
static void zeros_look_expert(k3_engine *e, uint32_t il, uint32_t ie, const expert_view *x) {
    int k = expert_zeros(&e->sh, x);
    const name_id id = {0, k, il, ie};
    if (k >= 0) zeros_note(e, &id, 0, expert_tensor_bytes(&e->sh, k));
}

/* Read a vector to `to`. bf16 is read into the upper half and widened in place: the read of element
 * i lies at or behind its write. */
static int trunk_read_vector(k3_engine *e, uint32_t il, enum tensor t, void *to, k3_error *err) {
    const place *at = trunk_place(e, il, t);
    uint64_t n = tensor_elements(e->files.dims, t), bytes = tensor_bytes(e->files.dims, t);
    bool is_widened = TENSOR[t].dtype == BF16;
    uint8_t *from = (uint8_t *)to + (is_widened ? bytes : 0);
    int rc = engine_read(e, at->shard, from, bytes, at->offset, trunk_sum(e, il, t, 0), err);
    if (rc < 0) return fail_tensor(e, il, t, rc, err);
    zeros_look(e, il, t, 0, from, bytes);
    if (!is_widened) return 0;
    float *f = to;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        f[i] = k3_bf16_f32(half);
    }
    return 0;
}

#define MATRIX_AHEAD 16

/* Read a matrix to `to`, several pieces at once by way of the still empty expert slots; without
 * room for that, one after another. */
static int trunk_read_matrix(k3_engine *e, uint32_t il, enum tensor t, uint8_t *to, k3_error *err) {
    const place *at = trunk_place(e, il, t);
    io_req req[MATRIX_AHEAD];
    uint64_t n = tensor_bytes(e->files.dims, t), step = piece_bytes(&e->files, t);
    uint64_t n_pieces = (n + step - 1) / step, room = io_room(step);
    uint64_t n_bounce = e->store.n_slots * e->store.slot_bytes / room;
    int rc = 0;
    if (n_bounce > MATRIX_AHEAD) n_bounce = MATRIX_AHEAD;
    for (uint64_t i = 0; n_bounce < 2 && i < n_pieces && rc == 0; i++)
        rc = engine_read(e, at->shard, to + i * step, n - i * step < step ? n - i * step : step,
                         at->offset + i * step, trunk_sum(e, il, t, i), err);
    for (uint64_t i = 0; n_bounce >= 2 && i < n_pieces + n_bounce; i++) {
        io_req *r = &req[i % n_bounce];
        if (i >= n_bounce && r->n > 0) { /* piece i - n_bounce was asked for a round ago */
            disk_wait(&e->io, r);
            if (rc == 0 && r->state == IO_FAILED) rc = disk_fail(&e->io, r, err);
            if (rc == 0) memcpy(to + (r->offset - at->offset), r->at, r->n);
        }
        *r = (io_req){.to = e->store.bytes + (i % n_bounce) * room,
                      .offset = at->offset + i * step,
                      .i_shard = at->shard};
        if (i >= n_pieces || rc < 0) continue;
        const uint64_t *sum = trunk_sum(e, il, t, i);
        r->n = n - i * step < step ? n - i * step : step;
        r->has_sum = sum != NULL;
        r->sum = sum ? *sum : 0;
        disk_submit(&e->io, r, IO_DEMAND);
    }
    if (rc == 0) zeros_look(e, il, t, 0, to, n);
    return rc < 0 ? fail_tensor(e, il, t, rc, err) : 0;
}

/* u = norm.w * proj.w (NUMERICS 3), kept in place of the norm. */
static const float *fold_res(const float *norm, const float *proj, uint64_t n) {
    float *u = (float *)(uintptr_t)norm;
    for (uint64_t i = 0; i < n; i++) u[i] = norm[i] * proj[i];
    return u;
}

static bool is_loaded(const k3_engine *e, uint32_t il, int t) {
    return layer_has_tensor(&e->sh, il, t) &&
           (is_vector((enum tensor)t) || e->layers[il].is_resident[t]);
}

/* What derives from the loaded vectors of a layer. */
static void trunk_derive(k3_engine *e, uint32_t il) {
    const k3_shape *sh = &e->sh;
    layer *ly = &e->layers[il];
    if (il == sh->n_layers) {
        ly->u_att = fold_res(ly->v[T_OUT_RES_NORM], ly->v[T_OUT_RES_PROJ], sh->hidden);
        return;
    }
    ly->u_att = fold_res(ly->v[T_ATT_RES_NORM], ly->v[T_ATT_RES_PROJ], sh->hidden);
    ly->u_mlp = fold_res(ly->v[T_MLP_RES_NORM], ly->v[T_MLP_RES_PROJ], sh->hidden);
    if (sh->is_mla[il]) return;
    float *A = (float *)(uintptr_t)ly->v[T_A_LOG];
    for (uint32_t h = 0; h < sh->kda_heads; h++) A[h] = k3_exp(A[h]);
    ly->A = A;
}

/* Load what is resident of one layer. */
static int trunk_load(k3_engine *e, uint32_t il, uint64_t *done, k3_error *err) {
    layer *ly = &e->layers[il];
    for (int t = 0; t < N_TENSORS; t++)
        if (is_loaded(e, il, t)) ly->block_bytes += resident_bytes(&e->files, (enum tensor)t);
    uint8_t *to = ly->block = ledger_take(&e->mem, ly->block_bytes, "trunk", err);
    if (!to) return e->mem.why;
    for (int t = 0; t < N_TENSORS; t++) {
        if (!is_loaded(e, il, t)) continue;
        int rc = is_vector((enum tensor)t) ? trunk_read_vector(e, il, (enum tensor)t, to, err)
                                           : trunk_read_matrix(e, il, (enum tensor)t, to, err);
        if (rc < 0) return rc;
        if (is_vector((enum tensor)t))
            ly->v[t] = (const float *)(const void *)to;
        else
            ly->m[t] = (const uint16_t *)(const void *)to;
        uint64_t n = resident_bytes(&e->files, (enum tensor)t);
        to += n;
        *done += n;
        rc = engine_progress(e, K3_PHASE_LOAD, *done, e->plan.vector_bytes + e->plan.resident_bytes,
                             (int)il, err);
        if (rc < 0) return rc;
    }
    trunk_derive(e, il);
    return 0;
}

static int trunk_open(k3_engine *e, k3_error *err) {
    uint64_t done = 0;
    int rc = 0;
    for (uint32_t il = 0; rc == 0 && il <= e->sh.n_layers; il++) rc = trunk_load(e, il, &done, err);
    return rc;
}

/* ---- 6.3 The ring of streamed rows ---- */

/* The matrices of a layer in the order of their use; what ORDER lists, forward_layer() asks for. */
static const enum tensor ORDER_KDA[] = {T_KDA_Q, T_KDA_K, T_KDA_V, T_KDA_G,  T_F_A,
                                        T_B,     T_F_B,   T_KDA_O, N_TENSORS};
static const enum tensor ORDER_MLA[] = {T_Q_A, T_KV_A, T_MLA_G, T_Q_B, T_KV_B, T_MLA_O, N_TENSORS};
static const enum tensor ORDER_DENSE[] = {T_GATE, T_UP, T_DOWN, N_TENSORS};
static const enum tensor ORDER_MOE[] = {T_ROUTER,  T_LAT_DOWN, T_SH_GATE, T_SH_UP,
                                        T_SH_DOWN, T_LAT_UP,   N_TENSORS};

static uint64_t piece_max_bytes(const model *m, const k3_shape *sh) {
    uint64_t most = 0;
    for (uint32_t il = 0; il <= sh->n_layers; il++)
        for (int t = 0; t < N_TENSORS; t++) {
            if (!layer_has_tensor(sh, il, t) || is_vector((enum tensor)t)) continue;
            if (piece_bytes(m, t) > most) most = piece_bytes(m, t);
        }
    return most;
}

/* A layer is read in two segments: what is used before the experts of all parts are computed, and what after
 * that. A pass of several parts reads each segment once for each part. The head is the last segment. */
static uint32_t segment_of(const k3_shape *sh, uint32_t il, int t) {
    return 2 * il + (il < sh->n_layers && t == T_LAT_UP);
}

/* Append the pieces of one streamed matrix; with NULL pieces only count. */
static void stream_add(k3_engine *e, uint32_t il, int t) {
    stream *s = &e->stream;
    const place *at = trunk_place(e, il, t);
    uint64_t rows = tensor_rows(&e->files, t), step_rows = piece_rows(&e->files, t);
    uint64_t row_bytes = tensor_cols(&e->files, t) * sizeof(uint16_t);
    for (uint64_t row = 0; row < rows; row += step_rows) {
        uint64_t n = rows - row < step_rows ? rows - row : step_rows;
        const uint64_t *sum = trunk_sum(e, il, t, row / step_rows);
        if (s->pieces)
            s->pieces[s->n_pieces] = (piece){.il = il,
                                             .segment = segment_of(&e->sh, il, t),
                                             .t = (uint16_t)t,
                                             .i_shard = at->shard,
                                             .row = (uint32_t)row,
                                             .n_rows = (uint32_t)n,
                                             .offset = at->offset + row * row_bytes,
                                             .n = n * row_bytes,
                                             .sum = sum ? *sum : 0,
                                             .has_sum = sum != NULL};
        s->n_pieces++;
    }
}

static void stream_list(k3_engine *e) {
    const k3_shape *sh = &e->sh;
    e->stream.n_pieces = 0;
    for (uint32_t il = 0; il < sh->n_layers; il++) {
        const enum tensor *order[] = {sh->is_mla[il] ? ORDER_MLA : ORDER_KDA,
                                      il < sh->n_dense ? ORDER_DENSE : ORDER_MOE};
        for (int o = 0; o < 2; o++)
            for (const enum tensor *t = order[o]; *t != N_TENSORS; t++)
                if (!e->layers[il].is_resident[*t]) stream_add(e, il, *t);
    }
    e->stream.n_body = e->stream.n_pieces;
    if (!e->layers[sh->n_layers].is_resident[T_LM_HEAD]) stream_add(e, sh->n_layers, T_LM_HEAD);
}

static uint64_t stream_pieces_bytes(const k3_shape *sh, uint64_t n_pieces) {
    return n_pieces * sizeof(piece) + (2ull * sh->n_layers + 2) * sizeof(uint32_t);
}

static int stream_open(k3_engine *e, k3_error *err) {
    stream *s = &e->stream;
    stream_list(e);
    if (s->n_pieces == 0) return 0;
    uint32_t n_segments = 2 * e->sh.n_layers + 1, g = 0;
    s->pieces_bytes = stream_pieces_bytes(&e->sh, s->n_pieces);
    s->pieces = ledger_take(&e->mem, s->pieces_bytes, "stream plan", err);
    if (!s->pieces) return e->mem.why;
    stream_list(e);
    s->segment = (uint32_t *)(void *)(s->pieces + s->n_pieces);
    for (uint32_t i = 0; i <= s->n_pieces; i++)
        for (; g <= n_segments && (i == s->n_pieces || g <= s->pieces[i].segment); g++) s->segment[g] = i;
    s->cap = e->plan.ring_bytes;
    s->bytes = ledger_take(&e->mem, s->cap, "trunk ring", err);
    return s->bytes ? 0 : e->mem.why;
}

/* A place for `room` bytes behind the newest piece. */
static bool stream_room(stream *s, uint64_t room, uint64_t *at) {
    if (s->n_live == 0) s->at = 0;
    uint64_t oldest = s->n_live ? s->live[s->first].at : s->cap;
    if (s->n_live && s->at > oldest) { /* free: [at, cap) and [0, oldest) */
        *at = s->cap - s->at >= room ? s->at : 0;
        if (*at == 0 && oldest < room) return false;
    } else { /* free: [at, oldest) */
        *at = s->at;
        if (oldest - s->at < room) return false;
    }
    s->at = *at + room;
    return true;
}

/* Is there a piece to ask for? On to the head when this pass has one, then to the next pass, which is expected to
 * have as many parts, and whose head is not known yet. False at that point. */
static bool stream_next(stream *s) {
    bool is_at_end = s->i_read == s->n_pieces || (s->i_read == s->n_body && s->head_turns == 0);
    if (!s->is_next_pass && is_at_end) {
        s->i_read = s->i_turn = 0;
        s->is_next_pass = true;
    }
    return !(s->is_next_pass && s->i_read == s->n_body);
}

/* A piece was asked for: on to the next one, at the end of a segment to its beginning while turns are left. */
static void stream_advance(stream *s) {
    const piece *p = &s->pieces[s->i_read++];
    if (s->i_read < s->segment[p->segment + 1]) return;
    uint32_t turns = s->i_read > s->n_body ? s->head_turns : s->turns;
    bool is_again = ++s->i_turn < turns;
    if (is_again)
        s->i_read = s->segment[p->segment];
    else
        s->i_turn = 0;
}

/* Ask for as many pieces as the ring has room for. */
static void stream_pump(k3_engine *e) {
    stream *s = &e->stream;
    while (s->n_live < STREAM_LIVE && stream_next(s)) {
        const piece *p = &s->pieces[s->i_read];
        uint64_t at;
        if (!stream_room(s, io_room(p->n), &at)) return;
        uint32_t i = (s->first + s->n_live) % STREAM_LIVE;
        s->live[i].i_piece = s->i_read;
        s->live[i].at = at;
        s->live[i].req = (io_req){.to = s->bytes + at,
                                  .offset = p->offset,
                                  .n = p->n,
                                  .i_shard = p->i_shard,
                                  .sum = p->sum,
                                  .has_sum = p->has_sum};
        s->n_live++;
        stream_advance(s);
        disk_submit(&e->io, &s->live[i].req, IO_TRUNK);
    }
}

/* The oldest piece, which must belong to tensor t of layer il, when its bytes are here. */
static int stream_take(k3_engine *e, uint32_t il, int t, const piece **p, const uint16_t **w,
                       k3_error *err) {
    stream *s = &e->stream;
    io_req *r = &s->live[s->first].req;
    *p = &s->pieces[s->live[s->first].i_piece];
    if (s->n_live == 0 || (*p)->il != il || (*p)->t != t)
        return fail(err, K3_EUSAGE, "internal: %s of layer %u is not next in the stream",
                    TENSOR[t].name, il);
    disk_raise(&e->io, r, true);
    disk_wait(&e->io, r);
    if (r->state == IO_FAILED)
        return fail_tensor(e, il, t, disk_fail(&e->io, r, err), err);
    if ((uintptr_t)r->at % sizeof **w != 0) { /* a tensor at an odd offset: back by one byte */
        memmove(r->at - 1, r->at, r->n);
        r->at--;
    }
    *w = (const uint16_t *)(const void *)r->at;
    return 0;
}

/* The next piece of a matrix of this model, looked at for bytes that were never written. */
static int stream_weights(k3_engine *e, uint32_t il, int t, const piece **p, const uint16_t **w,
                          k3_error *err) {
    int rc = stream_take(e, il, t, p, w, err);
    if (rc == 0) zeros_look_piece(e, *p, *w);
    return rc;
}

static void stream_release(k3_engine *e) {
    stream *s = &e->stream;
    s->first = (s->first + 1) % STREAM_LIVE;
    s->n_live--;
    stream_pump(e);
}

/* Give up what was read ahead: back to the first piece. */
static void stream_reset(k3_engine *e) {
    stream *s = &e->stream;
    for (uint32_t i = 0; i < s->n_live; i++) {
        io_req *r = &s->live[(s->first + i) % STREAM_LIVE].req;
        if (!disk_cancel(&e->io, r)) disk_wait(&e->io, r);
    }
    s->n_live = s->i_read = s->i_turn = 0;
    s->is_next_pass = s->is_midway = false;
}

/* Pass `p` begins, with so many parts and turns of the head. What was read ahead belongs to it, unless another pass
 * rests midway or other turns were expected. */
static void stream_begin(k3_engine *e, const k3_pass *p, uint32_t turns, uint32_t head_turns) {
    stream *s = &e->stream;
    if (s->n_pieces == 0) return;
    if (s->is_midway || s->turns != turns) stream_reset(e);
    if (!s->is_next_pass) s->i_read = s->i_turn = 0;
    s->turns = turns;
    s->head_turns = head_turns;
    s->owner = p;
    s->is_next_pass = false;
    s->is_midway = true;
    stream_pump(e);
}

/* Pass `p` goes on with layer il after a rest. */
static void stream_resume(k3_engine *e, const k3_pass *p, uint32_t il, uint32_t turns, uint32_t head_turns) {
    stream *s = &e->stream;
    if (s->n_pieces == 0 || (s->owner == p && s->is_midway)) return;
    stream_reset(e);
    s->i_read = s->segment[2 * il];
    s->turns = turns;
    s->head_turns = head_turns;
    s->owner = p;
    s->is_midway = true;
    stream_pump(e);
}

static void stream_end(k3_engine *e) { e->stream.is_midway = false; }

/* ---- 6.4 Experts ----
 *
 *   - a slot holds one whole expert or nothing; its bytes are checked when they arrive;
 *   - a pinned slot is readable and stays; any other may be taken back at any fetch;
 *   - each layer may keep `quota` experts; what is left of the slots is shared by all layers for
 *     experts on their way in;
 *   - over quota, the layer's expert with the least decayed router weight goes (or, with the
 *     policy lru, the one used longest ago): a global LRU is a cyclic scan and never hits below
 *     one token's worth of experts;
 *   - a guess for the next layer takes only slots that nobody needs now, and its read waits for
 *     every other read;
 *   - a failed read fails the step: an expert is never zeros.
 */

/* Offsets of the six tensors in the order of the file, when they are back to back there. */
static bool expert_is_whole(const k3_shape *sh, const expert_place *at, uint64_t *lo) {
    uint64_t hi = 0;
    *lo = UINT64_MAX;
    for (int k = 0; k < N_EXPERT_TENSORS; k++) {
        uint64_t end = at->offset[k] + expert_tensor_bytes(sh, k);
        if (at->offset[k] < *lo) *lo = at->offset[k];
        if (end > hi) hi = end;
        if (at->shard[k] != at->shard[0]) return false;
    }
    return hi - *lo == sh->expert_bytes; /* overlaps were refused */
}

static uint64_t expert_sum_index(const k3_engine *e, uint32_t il, uint32_t ie) {
    uint64_t i = (uint64_t)(il - e->sh.n_dense) * e->sh.n_experts + ie;
    return e->sums.expert0 + i * e->sums.per_expert;
}

/* Write the reads of expert (il, ie) into a slot at `to`: one when it is whole, else six. */
static int expert_requests(const k3_engine *e, uint32_t il, uint32_t ie, uint8_t *to, io_req *req) {
    const k3_shape *sh = &e->sh;
    const expert_place *at = model_expert(&e->files, sh, il, ie);
    const uint64_t *sum = e->sums.sum ? e->sums.sum + expert_sum_index(e, il, ie) : NULL;
    uint64_t lo;
    bool is_whole = expert_is_whole(sh, at, &lo);
    int n = is_whole ? 1 : N_EXPERT_TENSORS;
    for (int k = 0; k < n; k++) {
        req[k] = (io_req){.to = to,
                          .offset = is_whole ? lo : at->offset[k],
                          .n = is_whole ? sh->expert_bytes : expert_tensor_bytes(sh, k),
                          .i_shard = at->shard[k],
                          .sum = sum ? sum[k] : 0,
                          .has_sum = sum != NULL};
        to += io_room(req[k].n);
    }
    return n;
}

static uint64_t expert_room(const model *m, const k3_shape *sh) {
    uint64_t whole = io_room(sh->expert_bytes), split = 0, lo;
    for (int k = 0; k < N_EXPERT_TENSORS; k++) split += io_room(expert_tensor_bytes(sh, k));
    for (uint32_t il = sh->n_dense; il < sh->n_layers; il++)
        for (uint32_t ie = 0; ie < sh->n_experts; ie++)
            if (expert_is_here(model_expert(m, sh, il, ie)) &&
                !expert_is_whole(sh, model_expert(m, sh, il, ie), &lo))
                return split;
    return whole;
}

/* Where the six tensors are once the reads are done. */
static void expert_locate(const k3_engine *e, uint32_t il, uint32_t ie, const io_req *req,
                          int n_reqs, expert_view *x) {
    const expert_place *at = model_expert(&e->files, &e->sh, il, ie);
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        x->p[k] = n_reqs == 1 ? req[0].at + (at->offset[k] - req[0].offset) : req[k].at;
}

/* Codes above 252 are refused where the bytes enter (NUMERICS 2). */
static int expert_check(const k3_shape *sh, uint32_t il, uint32_t ie, const expert_view *x,
                        const model *m, k3_error *err) {
    for (int k = W1_SCALE; k < N_EXPERT_TENSORS; k += 2) {
        uint64_t n = expert_tensor_bytes(sh, k), i;
        uint8_t top = 0;
        for (i = 0; i < n; i++) top = x->p[k][i] > top ? x->p[k][i] : top;
        if (top <= K3_SCALE_MAX) continue;
        for (i = 0; x->p[k][i] <= K3_SCALE_MAX; i++) {
        }
        const expert_place *at = model_expert(m, sh, il, ie);
        return fail(err, K3_EMODEL,
                    "expert %u of layer %u: %s has scale code %u at index %llu, above 252 "
                    "(%s, offset 0x%llx); the file is damaged, download it again",
                    ie, il, EXPERT_TENSOR[k], x->p[k][i], (unsigned long long)i,
                    m->shards[at->shard[k]].name, (unsigned long long)(at->offset[k] + i));
    }
    return 0;
}

static int32_t *store_at(const k3_engine *e, uint32_t il, uint32_t ie) {
    return &e->store.slot_of[(size_t)(il - e->sh.n_dense) * e->sh.n_experts + ie];
}

static slot *store_find(const k3_engine *e, uint32_t il, uint32_t ie) {
    int32_t i = *store_at(e, il, ie);
    return i < 0 ? NULL : &e->store.slots[i];
}

static bool slot_is_busy(k3_engine *e, const slot *s) {
    for (int i = 0; i < s->n_reqs; i++) {
        enum io_state state = disk_state(&e->io, &s->req[i]);
        if (state == IO_QUEUED || state == IO_BUSY) return true;
    }
    return false;
}

/* The slot holds nothing any more. */
static void store_free(k3_engine *e, slot *s) {
    store *st = &e->store;
    s->state = SLOT_FREE;
    s->is_pinned = s->is_guess = s->is_doomed = s->is_fill = false;
    st->free[st->n_free++] = (uint32_t)(s - st->slots);
}

/* Drop an expert that may still be on its way. */
static void store_drop(k3_engine *e, slot *s) {
    bool is_mine = true;
    *store_at(e, s->il, s->ie) = -1;
    for (int i = 0; i < s->n_reqs; i++) is_mine = disk_cancel(&e->io, &s->req[i]) && is_mine;
    if (is_mine) {
        store_free(e, s);
    } else {
        s->is_guess = s->is_fill = false; /* its end is nobody's business but store_reap's */
        s->is_doomed = true;
        e->store.n_doomed++;
    }
}

/* Slots of dropped experts whose reads have ended meanwhile. */
static void store_reap(k3_engine *e) {
    store *st = &e->store;
    for (uint32_t i = 0; st->n_doomed > 0 && i < st->n_slots; i++)
        if (st->slots[i].is_doomed && !slot_is_busy(e, &st->slots[i])) {
            st->n_doomed--;
            store_free(e, &st->slots[i]);
        }
}

/* The expert of a layer that goes first, or NULL. */
static slot *store_coldest(const k3_engine *e, uint32_t il) {
    slot *coldest = NULL;
    for (uint32_t ie = 0; ie < e->sh.n_experts; ie++) {
        slot *s = store_find(e, il, ie);
        if (!s || s->state != SLOT_FULL || s->is_pinned || s->is_guess || s->is_kept) continue;
        bool is_colder = !coldest || (e->opt.policy == K3_POLICY_LRU ? s->tick < coldest->tick
                                                                     : s->heat < coldest->heat);
        if (is_colder) coldest = s;
    }
    return coldest;
}

/* Take back the last guess for the next layer: its slot is needed now. */
static void store_drop_guess(k3_engine *e) {
    store *st = &e->store;
    while (st->n_guess > 0) {
        slot *s = &st->slots[st->guess[--st->n_guess]];
        if (s->state == SLOT_FREE || s->is_doomed || !s->is_guess) continue;
        for (int k = 0; k < s->n_reqs; k++)
            if (disk_state(&e->io, &s->req[k]) != IO_QUEUED) e->stats.wasted_bytes += s->req[k].n;
        s->is_guess = false;
        store_drop(e, s);
        return;
    }
}

/* Begin reading an expert into a free slot, or into the place of a colder one of its own layer, or
 * of a guess: what a far box did not answer is fetched when guesses have taken the free ones. False
 * when there is none now. */
static bool store_fetch(k3_engine *e, uint32_t il, uint32_t ie, enum io_urgency u) {
    store *st = &e->store;
    if (st->n_free == 0) store_reap(e);
    if (st->n_free == 0 && u == IO_DEMAND) {
        slot *cold = store_coldest(e, il);
        if (cold) {
            st->n_held[il - e->sh.n_dense]--;
            store_drop(e, cold);
        }
    }
    if (st->n_free == 0 && u == IO_DEMAND && st->n_doomed == 0) store_drop_guess(e);
    if (st->n_free == 0) return false;
    uint32_t i = st->free[--st->n_free];
    slot *s = &st->slots[i];
    s->il = il;
    s->ie = ie;
    s->heat = 0.0f;
    s->state = SLOT_READING;
    s->is_guess = u == IO_GUESS;
    s->is_kept = s->is_fill = false;
    s->n_reqs = expert_requests(e, il, ie, st->bytes + (uint64_t)i * st->slot_bytes, s->req);
    *store_at(e, il, ie) = (int32_t)i;
    for (int k = 0; k < s->n_reqs; k++) disk_submit(&e->io, &s->req[k], u);
    e->stats.expert_loads++;
    return true;
}

/* Is the expert readable? 1 yes, 0 not yet, negative: it never will be. */
static int store_arrived(k3_engine *e, slot *s, expert_view *x, k3_error *err) {
    if (s->state == SLOT_FREE || s->is_doomed)
        return fail(err, K3_EUSAGE, "internal: the slot of expert %u of layer %u was given away",
                    s->ie, s->il);
    if (s->state == SLOT_READING) {
        if (slot_is_busy(e, s)) return 0;
        for (int i = 0; i < s->n_reqs; i++)
            if (s->req[i].state == IO_FAILED)
                return fail_in(err, disk_fail(&e->io, &s->req[i], err), "expert %u of layer %u",
                               s->ie, s->il);
        expert_locate(e, s->il, s->ie, s->req, s->n_reqs, x);
        int rc = expert_check(&e->sh, s->il, s->ie, x, &e->files, err);
        if (rc < 0) return rc;
        zeros_look_expert(e, s->il, s->ie, x);
        s->state = SLOT_FULL;
        if (!s->is_kept && !s->is_fill) e->store.n_held[s->il - e->sh.n_dense]++;
        s->is_fill = false;
    }
    expert_locate(e, s->il, s->ie, s->req, s->n_reqs, x);
    return 1;
}

/* A layer is done: what is over its quota goes, the coldest first. */
static void store_trim(k3_engine *e, uint32_t il) {
    uint32_t *held = &e->store.n_held[il - e->sh.n_dense];
    for (slot *s; *held > e->store.quota && (s = store_coldest(e, il)); (*held)--) store_drop(e, s);
}

/* Once per chunk: old use counts less. */
static void store_cool(k3_engine *e, uint32_t il) {
    e->store.tick++;
    for (uint32_t ie = 0; ie < e->sh.n_experts; ie++) {
        slot *s = store_find(e, il, ie);
        if (s) s->heat *= 0.9f;
    }
}

/* The layer has chosen: guesses it did not choose make room. */
static void store_settle_guesses(k3_engine *e, uint32_t il, const uint32_t *n_of) {
    store *st = &e->store;
    for (uint32_t i = 0; i < st->n_guess; i++) {
        slot *s = &st->slots[st->guess[i]];
        if (s->state == SLOT_FREE || s->is_doomed || !s->is_guess) continue;
        s->is_guess = false;
        if (s->il == il && n_of[s->ie] > 0) {
            e->stats.guess_hits++;
            continue;
        }
        for (int k = 0; k < s->n_reqs; k++) /* what was not begun is taken back and costs nothing */
            if (disk_state(&e->io, &s->req[k]) != IO_QUEUED) e->stats.wasted_bytes += s->req[k].n;
        store_drop(e, s); /* nobody looked at it: it is not among the held */
    }
    st->n_guess = 0;
}

/* After a failed step: nothing pinned, nothing on its way. */
static void store_recover(k3_engine *e) {
    store *st = &e->store;
    for (uint32_t i = 0; i < st->n_slots; i++) {
        slot *s = &st->slots[i];
        s->is_pinned = false;
        if (s->state != SLOT_READING || s->is_doomed) continue;
        e->store.n_held[s->il - e->sh.n_dense] -= s->is_fill;
        store_drop(e, s);
    }
    st->n_guess = 0;
    e->far_fill = NULL;
    for (uint32_t il = e->sh.n_dense; st->n_slots > 0 && il < e->sh.n_layers; il++)
        store_trim(e, il);
}

static uint64_t store_meta_bytes(const k3_shape *sh, uint64_t n_slots) {
    uint64_t n_moe = sh->n_layers - sh->n_dense;
    return round_up(n_slots * sizeof(slot), 64) +
           round_up(n_moe * sh->n_experts * sizeof(int32_t), 64) +
           round_up(n_moe * sizeof(uint32_t), 64) + n_slots * sizeof(uint32_t);
}

static int store_open(k3_engine *e, k3_error *err) {
    const k3_shape *sh = &e->sh;
    store *st = &e->store;
    uint64_t n_moe = sh->n_layers - sh->n_dense;
    if (n_moe == 0) return 0;
    st->slot_bytes = e->plan.slot_bytes;
    st->quota = e->plan.quota;
    st->meta_bytes = store_meta_bytes(sh, e->plan.n_slots);
    uint8_t *meta = ledger_take(&e->mem, st->meta_bytes, "expert slots", err);
    if (!meta) return e->mem.why;
    st->n_slots = e->plan.n_slots; /* from here on there are slots to recover */
    st->slots = (slot *)(void *)meta;
    st->slot_of = (int32_t *)(void *)(meta + round_up(st->n_slots * sizeof(slot), 64));
    st->n_held = (uint32_t *)(void *)((uint8_t *)st->slot_of +
                                      round_up(n_moe * sh->n_experts * sizeof(int32_t), 64));
    st->free = (uint32_t *)(void *)((uint8_t *)st->n_held + round_up(n_moe * sizeof(uint32_t), 64));
    memset(st->slot_of, 0xff, n_moe * sh->n_experts * sizeof(int32_t));
    for (uint32_t i = st->n_slots; i-- > 0;) st->free[st->n_free++] = i;
    st->bytes = ledger_take(&e->mem, st->n_slots * st->slot_bytes, "expert slots", err);
    return st->bytes ? 0 : e->mem.why;
}

/* ---- 6.5 Pins ----
 *
 * A file of pins names experts that are read at open and stay: a line each, layer and expert, and
 * whatever follows; the most wanted first, since only so many fit. # begins a comment. */
static int pins_line(const char *path, const k3_shape *sh, const char *line, int i_line,
                     uint32_t *il, uint32_t *ie, k3_error *err) {
    unsigned long long at[2];
    char *end = (char *)(uintptr_t)line;
    for (int i = 0; i < 2; i++) {
        const char *from = end + strspn(end, " \t");
        at[i] = strtoull(from, &end, 10);
        if (end == from || *from == '-' || !strchr(" \t\r\n", *end))
            return fail(err, K3_EUSAGE, "%s: line %d: not `layer expert`", path, i_line);
    }
    if (sh->n_dense >= sh->n_layers)
        return fail(err, K3_EUSAGE, "%s: line %d: this model has no experts", path, i_line);
    if (at[0] < sh->n_dense || at[0] >= sh->n_layers || at[1] >= sh->n_experts)
        return fail(
            err, K3_EUSAGE,
            "%s: line %d: no expert %llu of layer %llu; this model has layers %u to %u with "
            "%u experts each",
            path, i_line, at[1], at[0], sh->n_dense, sh->n_layers - 1, sh->n_experts);
    *il = (uint32_t)at[0];
    *ie = (uint32_t)at[1];
    return 0;
}

int64_t k3_pins_visit(const char *path, const k3_shape *sh, k3_pin_fn fn, void *user,
                      k3_error *err) {
    char line[256];
    int64_t n = 0;
    int rc = 0;
    FILE *f = fopen(path, "re");
    if (!f) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
    uint8_t *seen = calloc(((size_t)(sh->n_layers - sh->n_dense) * sh->n_experts + 7) / 8 + 1, 1);
    if (!seen) rc = fail(err, K3_ENOMEM, "%s: out of memory", path);
    for (int i_line = 1; rc == 0 && fgets(line, sizeof line, f); i_line++) {
        uint32_t il = 0, ie = 0;
        const char *at = line + strspn(line, " \t\r\n");
        size_t n_line = strlen(line);
        if (n_line == 0 || (line[n_line - 1] != '\n' && !feof(f)))
            rc = fail(err, K3_EUSAGE, "%s: line %d is too long, or no text", path, i_line);
        if (rc < 0 || *at == 0 || *at == '#') continue;
        if ((rc = pins_line(path, sh, at, i_line, &il, &ie, err)) < 0) break;
        size_t i = (size_t)(il - sh->n_dense) * sh->n_experts + ie;
        if (seen[i / 8] >> i % 8 & 1) continue;
        seen[i / 8] |= (uint8_t)(1u << i % 8);
        n++;
        if (fn) rc = fn(user, il, ie);
    }
    if (rc == 0 && ferror(f)) rc = fail(err, K3_EIO, "%s: %s", path, strerror(errno));
    fclose(f);
    free(seen);
    return rc < 0 ? rc : n;
}

/* The file is read once for how many there are, and again for them. */
static int64_t pins_count(const k3_engine *e, k3_error *err) {
    const char *path = e->opt.pins;
    struct stat st;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return fail(err, K3_EIO, "%s: not a regular file", path);
    return k3_pins_visit(path, &e->sh, NULL, NULL, err);
}

/* Begin reading one pinned expert; 1 when there is no room for more. */
static int pins_fetch(void *user, uint32_t il, uint32_t ie) {
    k3_engine *e = user;
    if (e->store.n_kept == e->plan.n_pinned) return 1;
    if (store_find(e, il, ie) || !store_fetch(e, il, ie, IO_TRUNK)) return 0;
    store_find(e, il, ie)->is_kept = true;
    e->store.n_kept++;
    return 0;
}

/* Read the pinned experts into slots of their own. */
static int pins_open(k3_engine *e, k3_error *err) {
    store *st = &e->store;
    uint64_t done = 0;
    if (e->plan.n_pinned == 0) return 0;
    int64_t n = k3_pins_visit(e->opt.pins, &e->sh, pins_fetch, e, err);
    int rc = n < 0 ? (int)n : 0;
    for (uint32_t i = 0; rc == 0 && i < st->n_slots; i++) {
        slot *s = &st->slots[i];
        expert_view x;
        if (!s->is_kept) continue;
        for (int k = 0; k < s->n_reqs; k++) disk_wait(&e->io, &s->req[k]);
        rc = store_arrived(e, s, &x, err);
        if (rc > 0) rc = 0;
        done += e->sh.expert_bytes;
        if (rc == 0)
            rc = engine_progress(e, K3_PHASE_LOAD, done, st->n_kept * e->sh.expert_bytes,
                                 (int)s->il, err);
    }
    return rc;
}

/* ---- 6.6 Sums ----
 *
 * XXH3 of every stretch of bytes that is ever read at once: each piece of rows of a trunk matrix,
 * each vector, each row of the embedding, each expert (or its six tensors, where they do not lie
 * together). `k3 verify --write-sums` makes them; with them each read is checked before its use.
 * The file, little-endian:
 *
 *     8     "K3SUMS2\n"
 *     8     fingerprint: XXH3 over shard name, offset and length of all stretches, in order
 *     8     n, the number of sums
 *     8 n   the sums: layers in order and last the head, each with its tensors in the order of
 *           `enum tensor`; then the embedding; then the experts by layer and id, each with one sum
 *           or six for its stretches, and behind them one of its contents: XXH3 of the XXH3 of its
 *           six tensors in slot order
 *     8     XXH3 of all before
 *
 * The sum of contents is the same wherever the six tensors lie. It checks no read: by it, and by
 * the trunk's sums, two copies of the weights are known to be equal (k3_fingerprints.by_sums).
 * "K3SUMS1\n" is the form before, without sums of contents: it checks reads, and by_sums is 0.
 */
#define SUMS_NAME "k3.sums"
#define SUMS_MAGIC "K3SUMS2\n"
#define SUMS_MAGIC_1 "K3SUMS1\n"
#define SUMS_HEAD 24u

/* Bytes that are read at once by verify: `n_parts` equal parts with a sum each. */
typedef struct {
    uint32_t il, ie; /* ie: of an expert; t is N_TENSORS then */
    int t;
    uint16_t i_shard;
    uint64_t offset, n, n_parts, i_sum;
} stretch;
typedef int (*stretch_fn)(void *user, const stretch *x);

/* Visit a trunk tensor piece by piece; x->i_sum moves on. */
static int sums_visit_tensor(const k3_engine *e, uint32_t il, int t, uint64_t *i_sum, stretch_fn fn,
                             void *user) {
    const place *at = trunk_place(e, il, t);
    uint64_t n = tensor_bytes(e->files.dims, (enum tensor)t), step = n, row = n;
    if (!is_vector((enum tensor)t)) {
        row = tensor_cols(&e->files, t) * sizeof(uint16_t);
        step = piece_bytes(&e->files, t);
    }
    for (uint64_t done = 0; done < n; done += step) {
        stretch x = {.il = il, .t = t, .i_shard = at->shard, .offset = at->offset + done};
        x.n = n - done < step ? n - done : step;
        x.n_parts = t == T_EMBED ? x.n / row : 1;
        x.i_sum = *i_sum;
        *i_sum += x.n_parts;
        int rc = fn(user, &x);
        if (rc != 0) return rc;
    }
    return 0;
}

/* Visit everything that has a sum, in the order of the file. Returns what `fn` said, if not 0. */
static int sums_visit(const k3_engine *e, stretch_fn fn, void *user) {
    const k3_shape *sh = &e->sh;
    uint64_t i_sum = 0;
    int rc = 0;
    for (uint32_t il = 0; il <= sh->n_layers; il++)
        for (int t = 0; t < N_TENSORS; t++)
            if (layer_has_tensor(sh, il, t) &&
                (rc = sums_visit_tensor(e, il, t, &i_sum, fn, user)) != 0)
                return rc;
    if ((rc = sums_visit_tensor(e, sh->n_layers, T_EMBED, &i_sum, fn, user)) != 0) return rc;
    for (uint32_t il = sh->n_dense; il < sh->n_layers; il++)
        for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
            stretch x = {.il = il, .ie = ie, .t = N_TENSORS, .n = sh->expert_bytes};
            x.n_parts = e->sums.per_expert;
            x.i_sum = i_sum;
            i_sum += x.n_parts;
            if ((rc = fn(user, &x)) != 0) return rc;
        }
    return 0;
}

/* The list of all streamed pieces, at most: full ones, and a last one for each matrix. */
static uint64_t plan_pieces(const k3_engine *e) {
    return (e->sh.trunk_bytes / (PIECE_BYTES / 2) + 16 * ((uint64_t)e->sh.n_layers + 1)) *
           sizeof(piece);
}

typedef struct {
    k3_engine *e;
    uint64_t n, fingerprint;
} sums_layout;

static void sums_mix(sums_layout *w, uint16_t i_shard, uint64_t offset, uint64_t n) {
    const char *name = w->e->files.shards[i_shard].name;
    uint64_t v[4] = {w->fingerprint, XXH3_64bits(name, strlen(name)), offset, n};
    w->fingerprint = XXH3_64bits(v, sizeof v);
}

static int sums_lay(void *user, const stretch *x) {
    sums_layout *w = user;
    sums *u = &w->e->sums;
    io_req req[N_EXPERT_TENSORS];
    w->n = x->i_sum + x->n_parts;
    if (x->t < N_TENSORS) {
        uint32_t *first = &u->first[x->il * N_TENSORS + (uint32_t)x->t];
        if (*first == UINT32_MAX) *first = (uint32_t)x->i_sum;
        sums_mix(w, x->i_shard, x->offset, x->n);
        return 0;
    }
    if (u->expert0 == 0) u->expert0 = x->i_sum;
    int n = expert_requests(w->e, x->il, x->ie, NULL, req);
    for (int k = 0; k < n; k++) sums_mix(w, req[k].i_shard, req[k].offset, req[k].n);
    return 0;
}

/* Lay out the table of sums, still without a value. */
static int sums_make(k3_engine *e, bool has_contents, uint64_t *fingerprint, k3_error *err) {
    sums *u = &e->sums;
    uint64_t n_first = ((uint64_t)e->sh.n_layers + 1) * N_TENSORS, most = n_first + 1;
    sums_layout w = {.e = e, .fingerprint = 1};
    *u = (sums){.per_expert = 1, .has_contents = has_contents};
    if (e->sh.n_layers > e->sh.n_dense &&
        expert_room(&e->files, &e->sh) > io_room(e->sh.expert_bytes))
        u->per_expert = N_EXPERT_TENSORS;
    u->per_expert += has_contents;
    most += e->sh.vocab_size + plan_pieces(e) / sizeof(piece) + n_first +
            (uint64_t)(e->sh.n_layers - e->sh.n_dense) * e->sh.n_experts * u->per_expert;
    u->block_bytes = round_up(n_first * sizeof *u->first, 64) + most * sizeof *u->sum;
    u->block = ledger_take(&e->mem, u->block_bytes, "sums", err);
    if (!u->block) return e->mem.why;
    u->first = u->block;
    memset(u->first, 0xff, n_first * sizeof *u->first);
    sums_visit(e, sums_lay, &w);
    u->n = w.n;
    *fingerprint = w.fingerprint;
    return 0;
}

static uint64_t *sums_values(const k3_engine *e) {
    uint64_t n_first = ((uint64_t)e->sh.n_layers + 1) * N_TENSORS;
    return (uint64_t *)(void *)((uint8_t *)e->sums.block +
                                round_up(n_first * sizeof(uint32_t), 64));
}

/* One number for the weights that these sums are of: k3_fingerprints.by_sums. */
static uint64_t sums_identity(const k3_engine *e) {
    const sums *u = &e->sums;
    const k3_shape *sh = &e->sh;
    uint64_t n_experts = (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts, h;
    const uint64_t geometry[] = {sh->vocab_size,   sh->hidden,    sh->n_layers, sh->n_dense,
                                 sh->n_experts,    sh->latent,    sh->n_heads,  sh->kda_heads,
                                 sh->expert_inter, sh->n_shared};
    if (!u->has_contents) return 0;
    h = XXH3_64bits_withSeed(sh->is_mla, sh->n_layers, XXH3_64bits(geometry, sizeof geometry));
    h = XXH3_64bits_withSeed(u->sum, (size_t)(n_experts ? u->expert0 : u->n) * sizeof *u->sum, h);
    for (uint64_t i = 0; i < n_experts; i++) {
        const uint64_t *contents = &u->sum[u->expert0 + (i + 1) * u->per_expert - 1];
        h = XXH3_64bits_withSeed(contents, sizeof *contents, h);
    }
    return h ? h : 1; /* 0 says: not known */
}

static void sums_path(const k3_engine *e, char *path, size_t cap) {
    if (e->opt.sums)
        snprintf(path, cap, "%s", e->opt.sums);
    else
        snprintf(path, cap, "%s/%s", e->dir, SUMS_NAME);
}

/* Read all of a file of sums into the table. */
static int sums_load(k3_engine *e, const char *path, int fd, uint64_t size, k3_error *err) {
    static const char again[] = "write it again with `k3 verify --write-sums`, or give --no-check";
    uint64_t fingerprint, head[SUMS_HEAD / 8], end;
    int rc = 0;
    shard file = {.name = (char *)(uintptr_t)path, .size = size};
    file.fd[0] = fd;
    if (size < SUMS_HEAD || (rc = read_copy(&file, 0, head, SUMS_HEAD, 0, err)) < 0 ||
        (memcmp(head, SUMS_MAGIC, 8) != 0 && memcmp(head, SUMS_MAGIC_1, 8) != 0))
        return rc < 0 ? rc : fail(err, K3_EMODEL, "%s: no file of sums; %s", path, again);
    if (size / 8 < (uint64_t)(e->sh.n_layers - e->sh.n_dense) * e->sh.n_experts + e->sh.vocab_size)
        return fail(err, K3_EMODEL, "%s: %llu bytes: cut short, or made for other files; %s", path,
                    (unsigned long long)size, again);
    if ((rc = sums_make(e, memcmp(head, SUMS_MAGIC, 8) == 0, &fingerprint, err)) < 0) return rc;
    uint64_t n_bytes = e->sums.n * sizeof(uint64_t), *values = sums_values(e);
    if (head[1] != fingerprint || head[2] != e->sums.n)
        return fail(err, K3_EMODEL, "%s: made for other files than these; %s", path, again);
    if (size != SUMS_HEAD + n_bytes + 8)
        return fail(err, K3_EMODEL, "%s: %llu bytes, not %llu: cut short; %s", path,
                    (unsigned long long)size, (unsigned long long)(SUMS_HEAD + n_bytes + 8), again);
    if ((rc = read_copy(&file, 0, values, n_bytes, SUMS_HEAD, err)) < 0 ||
        (rc = read_copy(&file, 0, &end, 8, SUMS_HEAD + n_bytes, err)) < 0)
        return rc;
    XXH64_hash_t h = XXH3_64bits(head, SUMS_HEAD);
    if (XXH3_64bits_withSeed(values, (size_t)n_bytes, h) != end)
        return fail(err, K3_EMODEL, "%s: damaged; %s", path, again);
    e->sums.sum = values;
    e->plan.has_sums = true;
    e->print.by_sums = sums_identity(e);
    return 0;
}

/* The sums beside the model, when they are there, or where the caller says. */
static int sums_open(k3_engine *e, k3_error *err) {
    char path[4352];
    uint64_t size;
    if (e->opt.no_check || e->opt.experts_only) return 0;
    sums_path(e, path, sizeof path);
    if (!e->opt.sums && access(path, F_OK) != 0) return 0;
    int fd = file_open(path, &size, err);
    if (fd < 0) return K3_EIO;
    int rc = sums_load(e, path, fd, size, err);
    close(fd);
    return rc;
}


/* A file of sums being made: under another name until it is whole. */
typedef struct {
    char path[4352], part[4360];
    int fd;
} sums_out;

/* Before hours of reading: can it be written? Links are followed, and only a file is replaced. */
static int sums_create(const k3_engine *e, sums_out *o, k3_error *err) {
    struct stat st;
    sums_path(e, o->path, sizeof o->path);
    char *real = realpath(o->path, NULL);
    if (real && strlen(real) < sizeof o->path) strcpy(o->path, real);
    free(real);
    o->fd = -1;
    if (stat(o->path, &st) == 0 && !S_ISREG(st.st_mode))
        return fail(err, K3_EIO, "%s: not a regular file; name another with --sums FILE", o->path);
    snprintf(o->part, sizeof o->part, "%s.part", o->path);
    int rc = k3_temp_open(o->part, K3_TEMP_PUBLIC, &o->fd, err);
    if (rc == 0) return 0;
    size_t n = err ? strlen(err->text) : 0;
    if (err)
        snprintf(err->text + n, sizeof err->text - n, "; --sums FILE names another place");
    return K3_EIO;
}

static void sums_abandon(sums_out *o) {
    if (o->fd < 0) return;
    unlink(o->part);
    close(o->fd);
}

/* How many sums of contents there are; is sum i one? */
static uint64_t sums_n_contents(const k3_engine *e) {
    return e->sums.has_contents ? (e->sums.n - e->sums.expert0) / e->sums.per_expert : 0;
}

static bool sums_is_contents(const sums *u, uint64_t i) {
    return i >= u->expert0 && (i - u->expert0) % u->per_expert == u->per_expert - 1;
}

/* What is there says the same? Sums that differ tell that the weights are not what they were: they are
 * not written over. A file that is damaged or of other weights tells nothing. */
static int sums_compare(const k3_engine *e, const sums_out *o, const uint64_t *head,
                        k3_error *err) {
    uint64_t size, n_bad = 0, n_bytes = e->sums.n * sizeof(uint64_t), end;
    uint64_t was[SUMS_HEAD / 8] = {0, head[1], head[2] - sums_n_contents(e)};
    int fd = access(o->path, F_OK) == 0 ? file_open(o->path, &size, NULL) : -1;
    if (fd < 0) return 0;
    memcpy(was, SUMS_MAGIC_1, 8);
    bool is_old = size == SUMS_HEAD + was[2] * sizeof(uint64_t) + 8 && was[2] < head[2];
    if (is_old) {
        head = was;
        n_bytes = was[2] * sizeof(uint64_t);
    }
    void *p = size == SUMS_HEAD + n_bytes + 8
                  ? mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0)
                  : MAP_FAILED;
    close(fd);
    if (p == MAP_FAILED) return 0;
    const uint64_t *there = (const uint64_t *)(const void *)((const uint8_t *)p + SUMS_HEAD);
    memcpy(&end, (const uint8_t *)p + SUMS_HEAD + n_bytes, 8);
    if (memcmp(p, head, SUMS_HEAD) == 0 &&
        XXH3_64bits_withSeed(there, (size_t)n_bytes, XXH3_64bits(p, SUMS_HEAD)) == end)
        for (uint64_t i = 0, j = 0; i < e->sums.n; i++) {
            if (is_old && sums_is_contents(&e->sums, i)) continue;
            n_bad += there[j++] != e->sums.sum[i];
        }
    munmap(p, (size_t)size);
    if (n_bad == 0) return 0;
    return fail(err, K3_ECHECK,
                "%s: %llu of %llu sums do not match what was read now: the weights were damaged or "
                "replaced since; `k3 verify` names the places, --no-check writes new sums anyway",
                o->path, (unsigned long long)n_bad, (unsigned long long)e->sums.n);
}

static int sums_save(const k3_engine *e, sums_out *o, uint64_t fingerprint, bool compares,
                     k3_error *err) {
    uint64_t head[SUMS_HEAD / 8], n_bytes = e->sums.n * sizeof(uint64_t), end;
    int rc;
    memcpy(head, SUMS_MAGIC, 8);
    head[1] = fingerprint;
    head[2] = e->sums.n;
    if (compares && (rc = sums_compare(e, o, head, err)) < 0) return rc;
    end = XXH3_64bits_withSeed(e->sums.sum, (size_t)n_bytes, XXH3_64bits(head, SUMS_HEAD));
    bool is_ok = ftruncate(o->fd, 0) == 0 && slice_write_all(o->fd, head, SUMS_HEAD) &&
                 slice_write_all(o->fd, e->sums.sum, n_bytes) && slice_write_all(o->fd, &end, 8) &&
                 fsync(o->fd) == 0;
    if (!is_ok) return fail(err, K3_EIO, "%s: %s", o->path, strerror(errno));
    if ((rc = k3_temp_rename(o->fd, o->part, o->path, err)) < 0) return rc;
    close(o->fd);
    o->fd = -1;
    return 0;
}

/* ---- 6.7 The plan: one number of bytes, divided ----
 *
 * First what must be: tables, vectors, scratch, one session, a ring, a few slots; its sum is the
 * floor. Then routers (so that guesses are possible), then whole matrices, spread over the layers
 * so that the disk has work in each of them: a resident byte of the trunk saves a read of it for
 * every token. What is left becomes expert slots: their first gigabyte saves about two thirds of
 * one per token (docs/PERFORMANCE.md).
 */
#define OVERHEAD_BYTES (40u << 20) /* code, libraries, stacks, JSON while opening */

static uint64_t scratch_bytes(const k3_engine *e, uint64_t chunk, uint64_t part);       /* section 8  */
static uint64_t session_bytes(const k3_shape *sh, uint64_t context, uint32_t n_rows); /* section 15 */

/* Room for the largest read that is neither a piece nor an expert. */
static uint64_t plan_bounce(const k3_engine *e) {
    uint64_t most = e->sh.hidden * sizeof(uint16_t);
    for (int t = 0; t < N_TENSORS; t++)
        if (is_vector((enum tensor)t) && tensor_bytes(e->files.dims, (enum tensor)t) > most)
            most = tensor_bytes(e->files.dims, (enum tensor)t);
    return io_room(most);
}

static uint64_t matrices_bytes(const k3_engine *e, bool is_vector_wanted) {
    uint64_t sum = 0;
    for (uint32_t il = 0; il <= e->sh.n_layers; il++)
        for (int t = 0; t < N_TENSORS; t++)
            if (layer_has_tensor(&e->sh, il, t) && is_vector((enum tensor)t) == is_vector_wanted)
                sum += resident_bytes(&e->files, (enum tensor)t);
    return sum;
}

/* Bytes that do not depend on what is left, for passes and parts of this size. */
static uint64_t plan_fixed(const k3_engine *e, uint64_t chunk, uint64_t part) {
    const k3_plan *p = &e->plan;
    uint64_t n_moe = e->sh.n_layers - e->sh.n_dense;
    return e->mem.used + p->vector_bytes + p->session_bytes + p->sessions_bytes + p->snapshot_bytes +
           scratch_bytes(e, chunk, part) + plan_bounce(e) +
           (n_moe ? store_meta_bytes(&e->sh, 2) + 2 * p->slot_bytes : 0);
}

static uint64_t plan_ring_least(const k3_engine *e) {
    return 2 * io_room(piece_max_bytes(&e->files, &e->sh));
}

#define CHUNK_SHORT 512  /* positions: kernels gain nothing from more                    */
#define CHUNK_LONG  4096 /* a prompt of so many reads each expert once                    */
#define PART_LEAST  64   /* positions: fewer give the kernels too little to do            */

STATIC_ASSERT(a_planned_chunk_fits_a_request, CHUNK_SHORT <= TIER_MAX_ROWS);
STATIC_ASSERT(every_reply_fits_a_frame, TIER_FIXED_BYTES + (TIER_MAX_EXPERTS + 63) / 64 * 8 +
                                                (uint64_t)TIER_MAX_ROWS * TIER_MAX_LATENT * 8 <=
                                            TIER_MAX_FRAME);
STATIC_ASSERT(every_request_fits_a_frame,
              TIER_FIXED_BYTES + (uint64_t)TIER_MAX_ROWS * TIER_MAX_LATENT * 4 +
                      TIER_MAX_EXPERTS * 4 + (uint64_t)TIER_MAX_ROWS * TIER_MAX_TOP_K * 6 <=
                  TIER_MAX_FRAME);

/* Floats for scores: all that is of use, within 1/32 of the memory above the floor; or the least that there must be. */
static uint64_t plan_scores(const k3_engine *e, uint64_t floor) {
    uint64_t least = mla_scores_least(&e->sh, e->plan.context), most = e->mem.limit > floor ? (e->mem.limit - floor) / 128 : 0;
    uint64_t useful = mla_scores_most(&e->sh, e->plan.context, e->n_threads > 0 ? e->n_threads : 1);
    if (most > useful) most = useful;
    return most > least ? most : least;
}

/* Bytes that a prompt reads for each position, in passes of `chunk` rows that are computed in parts: experts once a
 * pass, the streamed trunk once a part. `left`: memory above the floor, of which scratch takes a share. Rows choose
 * experts as if at random, which the routing of real prompts follows closely from 64 positions on. */
static double plan_prompt_cost(const k3_engine *e, uint64_t left, uint64_t chunk, uint64_t part) {
    const k3_shape *sh = &e->sh;
    uint64_t taken = scratch_bytes(e, chunk, part) - scratch_bytes(e, 1, 1), all = matrices_bytes(e, false);
    uint64_t kept = left - taken < all ? left - taken : all;
    double miss = pow(1.0 - (double)sh->top_k / sh->n_experts, (double)chunk);
    double experts = (double)(sh->n_layers - sh->n_dense) * sh->n_experts * (1 - miss) * (double)sh->expert_bytes;
    double parts = (double)((chunk + part - 1) / part);
    return (experts + parts * (double)(all - kept)) / (double)chunk;
}

/* How many positions a pass takes, and a part of it: what reads least for each position of a prompt, powers of two,
 * scratch within half of the memory above the floor. Where all weights are resident a short pass serves; far
 * boxes take TIER_MAX_ROWS rows a frame; and no prompt is longer than the context. A part is as long as the pass
 * unless memory forbids it. */
static void plan_rows(const k3_engine *e, uint64_t trunk, uint64_t *chunk, uint64_t *part) {
    const k3_shape *sh = &e->sh;
    uint64_t least = plan_fixed(e, 1, 1) + trunk, base = scratch_bytes(e, 1, 1);
    uint64_t left = e->mem.limit > least ? e->mem.limit - least : 0;
    uint64_t n_experts = (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts;
    bool is_all_here = left / 8 * 7 >= matrices_bytes(e, false) + n_experts * e->plan.slot_bytes;
    bool is_far = e->opt.tiers && e->opt.tiers[0];
    uint64_t most = is_all_here || is_far ? CHUNK_SHORT : CHUNK_LONG, from = *chunk ? *chunk : 1;
    double best = 0;
    while (most > CHUNK_SHORT && most / 2 >= e->plan.context) most /= 2;
    if (*chunk) most = *chunk;
    *chunk = *part = from;
    for (uint64_t c = from; c <= most; c *= 2)
        for (uint64_t t = c; t == c || t >= PART_LEAST; t /= 2) {
            uint64_t taken = scratch_bytes(e, c, t) - base;
            if (taken > left / (c > CHUNK_SHORT || t < c ? 2 : 8)) continue;
            double cost = plan_prompt_cost(e, left, c, t);
            if (best > 0 && cost > 0.99 * best) continue;
            best = cost;
            *chunk = c;
            *part = t;
        }
}

/* Mark matrices resident while `left` lasts; returns what they take. */
static uint64_t plan_residents(k3_engine *e, uint64_t left) {
    static const enum tensor first[] = {T_ROUTER, T_KV_B};
    uint64_t taken = 0;
    for (int pass = 0; pass < N_TENSORS + 2; pass++) {
        int t = pass < 2 ? (int)first[pass] : N_TENSORS + 1 - pass; /* the head comes last */
        if (is_vector((enum tensor)t)) continue;
        for (uint32_t il = 0; il <= e->sh.n_layers; il++) {
            layer *ly = &e->layers[il];
            uint64_t n = resident_bytes(&e->files, (enum tensor)t);
            if (!layer_has_tensor(&e->sh, il, t) || ly->is_resident[t] || taken + n > left)
                continue;
            ly->is_resident[t] = true;
            taken += n;
        }
    }
    return taken;
}

/* Divide what is left among ring, matrices and slots, of which so many are wanted for pins. */
static void plan_divide(k3_engine *e, uint64_t left, uint64_t n_pins) {
    const k3_shape *sh = &e->sh;
    k3_plan *p = &e->plan;
    uint64_t n_moe = sh->n_layers - sh->n_dense,
             per_slot = p->slot_bytes + sizeof(slot) + sizeof(uint32_t);
    uint64_t all = matrices_bytes(e, false), n_all = n_moe * sh->n_experts;
    uint64_t staging = n_all < 2u * sh->top_k ? n_all : 2u * sh->top_k;
    uint64_t least = plan_ring_least(e), room = left > all ? (left - all) / per_slot : 0;
    if (left >= all && room >= n_all) {
        staging = 0; /* everything has its place */
    } else if ((left < all || room < staging) &&
               all > least + plan_pieces(e)) { /* some of the trunk is streamed */
        uint64_t ring = left / 16 < 256u << 20 ? left / 16 : 256u << 20;
        p->ring_bytes = round_up(ring > least ? ring : least, IO_ALIGN);
        uint64_t taken = p->ring_bytes + plan_pieces(e);
        left -= taken < left ? taken : left;
        if (staging > left / 8 / per_slot) staging = left / 8 / per_slot;
        if (staging < 2) staging = n_all < 2 ? n_all : 2;
        all = left > staging * per_slot ? left - staging * per_slot : 0;
    } else if (staging > room) {
        staging = room > 2 ? room : n_all < 2 ? n_all : 2;
    }
    p->resident_bytes = plan_residents(e, all);
    left = left > p->resident_bytes ? left - p->resident_bytes : 0;
    uint64_t n = n_moe ? left / per_slot : 0;
    if (n < staging) n = staging;
    if (n > staging + n_all) n = staging + n_all;
    p->n_pinned = n - staging < n_pins ? (uint32_t)(n - staging) : (uint32_t)n_pins;
    uint64_t shared = n - staging == n_all ? n_all : n - staging - p->n_pinned; /* all: all stay */
    p->quota = n_moe ? (uint32_t)(shared / n_moe) : 0;
    p->n_slots = (uint32_t)n; /* what does not divide evenly serves all layers */
    p->streamed_bytes = matrices_bytes(e, false) - p->resident_bytes;
}

static int plan_make(k3_engine *e, k3_error *err) {
    const k3_shape *sh = &e->sh;
    const k3_options *o = &e->opt;
    k3_plan *p = &e->plan;
    p->ram_bytes = e->mem.limit = o->ram_bytes ? o->ram_bytes : machine_ram_default("", o->others_bytes);
    p->context = o->context ? o->context : sh->max_position < 4096 ? sh->max_position : 4096;
    if (p->context > sh->max_position)
        return fail(err, K3_EUSAGE, "context of %llu exceeds the model's maximum of %u positions",
                    (unsigned long long)p->context, sh->max_position);
    if (sh->pos_bytes > 0 && p->context > (1ull << 60) / sh->pos_bytes)
        return fail(err, K3_EMODEL,
                    "config.json: a context of %llu positions needs more memory than there is",
                    (unsigned long long)p->context);
    p->vector_bytes = matrices_bytes(e, true);
    p->state_bytes = sh->state_bytes;
    p->sessions = o->sessions;
    p->revocable = o->revocable;
    p->session_bytes = session_bytes(sh, p->context, p->revocable);
    p->sessions_bytes = o->sessions * p->session_bytes;
    p->snapshot_bytes = (uint64_t)o->snapshots * sh->state_bytes;
    p->slot_bytes = expert_room(&e->files, sh);
    e->n_scores = mla_scores_least(sh, p->context);
    uint64_t all = matrices_bytes(e, false), trunk = plan_ring_least(e) + plan_pieces(e);
    if (trunk > all) trunk = all; /* small enough to be kept */
    uint64_t chunk = (uint64_t)o->chunk, part;
    plan_rows(e, trunk, &chunk, &part);
    if (o->part) part = (uint64_t)o->part < chunk ? (uint64_t)o->part : chunk;
    p->floor_bytes = plan_fixed(e, o->chunk ? chunk : 1, o->chunk ? part : 1) + trunk;
    e->n_scores = plan_scores(e, p->floor_bytes);
    uint64_t fixed = plan_fixed(e, chunk, part);
    if (e->files.header_bytes > OVERHEAD_BYTES / 2) { /* unusual, and over by now */
        uint64_t open = e->mem.used + e->files.header_bytes;
        if (p->floor_bytes < open) p->floor_bytes = open;
    }
    if (fixed + trunk > e->mem.limit || p->floor_bytes > e->mem.limit)
        return fail(err, K3_EBUDGET,
                    "a budget of %llu bytes is below the floor of this model with a context of "
                    "%llu: give at least "
                    "%llu bytes (%.2f GiB) with --ram, or a smaller --context",
                    (unsigned long long)e->mem.limit, (unsigned long long)p->context,
                    (unsigned long long)p->floor_bytes, (double)p->floor_bytes / 1073741824.0);
    p->chunk = (uint32_t)chunk;
    p->part = (uint32_t)part;
    p->scratch_bytes = scratch_bytes(e, chunk, part);
    e->chunk = (int)chunk;
    int64_t n_pins = o->pins ? pins_count(e, err) : 0;
    if (n_pins < 0) return (int)n_pins;
    plan_divide(e, e->mem.limit - fixed, (uint64_t)n_pins);
    if (n_pins > p->n_pinned && p->n_pinned < p->n_slots && o->note) {
        char line[128];
        snprintf(line, sizeof line, "pins: the first %u of %lld fit; more --ram holds more",
                 p->n_pinned, (long long)n_pins);
        if (p->quota < sh->n_experts) o->note(o->user, line);
    }
    return 0;
}

/* ---- 6.8 Opening the disk: mirrors, and how to read ---- */

#define PROBE_EXPERTS 8

#define COPY_SAMPLES 32

/* Is copy c of a shard the same file? Its head, with the header, and blocks spread to the very end
 * are compared: a copy that stopped half-way, or of another revision, would give other bits. */
static int disk_compare(const shard *s, int c, const char *path, k3_error *err) {
    uint8_t a[IO_ALIGN], b[IO_ALIGN];
    uint64_t n = s->size < IO_ALIGN ? s->size : IO_ALIGN;
    for (int i = 0; i <= COPY_SAMPLES; i++) {
        uint64_t offset = (s->size - n) / COPY_SAMPLES * (uint64_t)i;
        if (i == COPY_SAMPLES) offset = s->size - n;
        int rc;
        if ((rc = read_copy(s, 0, a, n, offset, err)) < 0 ||
            (rc = read_copy(s, c, b, n, offset, err)) < 0)
            return rc;
        if (memcmp(a, b, (size_t)n) != 0)
            return fail(
                err, K3_EMODEL,
                "%s differs from its original near offset 0x%llx: one of the two is damaged or of "
                "another revision; `k3 verify` with sums tells which",
                path, (unsigned long long)offset);
    }
    return 0;
}

/* Open what a directory has of the needed shards, plain and, where the file system can, direct. */
static int disk_add_copy(k3_engine *e, const char *dir, k3_error *err) {
    disk *d = &e->io;
    uint32_t n_found = 0;
    char path[4352];
    if (d->n_copies == K3_MAX_COPIES)
        return fail(err, K3_EUSAGE, "more than %d mirrors", K3_MAX_COPIES - 1);
    int c = d->n_copies;
    if (!(d->copies[c].dir = strdup(dir))) return fail(err, K3_ENOMEM, "out of memory");
    d->n_copies++;
    for (uint32_t i = 0; i < e->files.n_shards; i++) {
        shard *s = &e->files.shards[i];
        uint64_t size = s->size;
        if (!s->is_needed) continue;
        snprintf(path, sizeof path, "%s/%s", dir, s->name);
        if (c > 0 && (s->fd[c] = file_open(path, &size, err)) < 0) {
            s->fd[c] = -1;
            if (errno != ENOENT) return K3_EIO;
            continue;
        }
        if (size != s->size)
            return fail(err, K3_EMODEL, "%s has %llu bytes, its original %llu: not a copy", path,
                        (unsigned long long)size, (unsigned long long)s->size);
        int rc = c > 0 && !e->sums.sum ? disk_compare(s, c, path, err) : 0; /* sums know better */
        if (rc < 0) return rc;
        s->fd_direct[c] = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT); /* -1: read it plainly */
        if (s->fd_direct[c] < 0 && (errno == EMFILE || errno == ENFILE))
            return fail(err, K3_EIO, "%s: %s; raise `ulimit -n`", path, strerror(errno));
        n_found++;
    }
    if (n_found > 0) return 0;
    return fail(err, K3_EMODEL,
                "%s: holds no shard of this model; give a directory with copies of some", dir);
}

static int disk_open(k3_engine *e, k3_error *err) {
    disk *d = &e->io;
    pthread_mutex_init(&d->lock, NULL);
    sem_init(&d->tickets, 0, 0);
    pthread_cond_init(&d->done, NULL);
    d->shards = e->files.shards;
    d->read = plain_pread;
    int rc = disk_add_copy(e, e->dir, err);
    for (const char *const *m = e->opt.mirrors; rc == 0 && m && *m; m++)
        rc = disk_add_copy(e, *m, err);
    return rc < 0 ? rc : disk_mode(d, false, false, 4, err);
}

static void disk_close(k3_engine *e) {
    disk *d = &e->io;
    if (!d->read) return;
    if (d->n_threads > 0) {
        stream_reset(e);
        store_recover(e);
        disk_threads_stop(d);
    }
    if (d->is_uring) {
        io_uring_queue_exit(&d->ring);
        close(d->wake_fd);
    }
    for (int i = 0; i < d->n_copies; i++) free(d->copies[i].dir);
    pthread_mutex_destroy(&d->lock);
    sem_destroy(&d->tickets);
    pthread_cond_destroy(&d->done);
}

/* Bytes per second of whole experts in the present mode: `n` of them, asked for together. Their
 * pages are dropped from the page cache first, or it would be measured in place of the disk. */
static double probe_once(k3_engine *e, uint32_t n, uint64_t *seed) {
    const k3_shape *sh = &e->sh;
    io_req req[PROBE_EXPERTS][N_EXPERT_TENSORS];
    int n_reqs[PROBE_EXPERTS];
    for (uint32_t i = 0; i < n; i++) {
        *seed = *seed * 6364136223846793005u + 1442695040888963407u;
        uint32_t il = sh->n_dense + (uint32_t)(*seed >> 33) % (sh->n_layers - sh->n_dense);
        n_reqs[i] = expert_requests(e, il, (uint32_t)(*seed >> 13) % sh->n_experts,
                                    e->store.bytes + i * e->store.slot_bytes, req[i]);
        for (int k = 0; k < n_reqs[i]; k++)
            posix_fadvise(e->files.shards[req[i][k].i_shard].fd[0], (off_t)io_base(&req[i][k]),
                          (off_t)io_left(&req[i][k]), POSIX_FADV_DONTNEED);
    }
    uint64_t start = clock_ns();
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < n_reqs[i]; k++) disk_submit(&e->io, &req[i][k], IO_DEMAND);
    bool is_bad = false;
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < n_reqs[i]; k++) {
            disk_wait(&e->io, &req[i][k]);
            is_bad = is_bad || req[i][k].state == IO_FAILED;
        }
    return is_bad ? 0 : 1e9 * (double)(n * sh->expert_bytes) / (double)(clock_ns() - start + 1);
}

/* The better of two, since other work disturbs; 0 when this machine cannot read so. */
static double probe(k3_engine *e, bool is_uring, bool is_direct, int depth, uint64_t *seed) {
    uint32_t n = e->store.n_slots < PROBE_EXPERTS ? e->store.n_slots : PROBE_EXPERTS;
    if (disk_mode(&e->io, is_uring, is_direct, depth, NULL) < 0) return 0;
    double a = probe_once(e, n, seed), b = probe_once(e, n, seed);
    for (int i = 0; i < e->io.n_copies; i++) e->io.copies[i].is_dead = false; /* the mode's fault */
    return a <= 0 || b <= 0 ? 0 : a > b ? a : b;
}

/* Plain or direct, pool or ring, how deep: as asked, else as a probe of about a gigabyte says. A
 * model that will be wholly in memory is not probed. What is no faster by 3 % is not worth a
 * change. */
static int disk_choose(k3_engine *e, k3_error *err) {
    const k3_options *o = &e->opt;
    k3_plan *p = &e->plan;
    p->is_uring = o->io == K3_IO_URING;
    p->is_direct = o->direct == K3_ON;
    p->io_depth = o->io_depth ? o->io_depth : 8;
    uint64_t seed = 1;
    bool is_all_here = p->streamed_bytes == 0 && p->quota == e->sh.n_experts;
    if (!is_all_here && p->slot_bytes > (1u << 20) && e->store.n_slots > 0) {
        double best = probe(e, p->is_uring, p->is_direct, p->io_depth, &seed), speed;
        if (o->direct == K3_AUTO &&
            (speed = probe(e, p->is_uring, true, p->io_depth, &seed)) > 1.03 * best) {
            best = speed;
            p->is_direct = true;
        }
        if (o->io == K3_IO_AUTO &&
            (speed = probe(e, true, p->is_direct, p->io_depth, &seed)) > 1.03 * best) {
            best = speed;
            p->is_uring = true;
        }
        for (int depth = 2; !o->io_depth && depth <= 32; depth *= 4) {
            if ((speed = probe(e, p->is_uring, p->is_direct, depth, &seed)) <= 1.03 * best)
                continue;
            best = speed;
            p->io_depth = depth;
        }
        p->disk_bytes_per_s = best;
        e->io.stall_ns = 0;
    }
    return disk_mode(&e->io, p->is_uring, p->is_direct, p->io_depth, err);
}

/* ==== 8. One step: scratch, rows, embedding, norms ===================================
 *
 * A pass is many rows, each one position of some session, that go through the model layer by layer, so that
 * each weight is read once for all of them. What a layer needs of a row while it computes is large (505 KB at
 * K3's dimensions), so rows are computed in parts; what a row carries from layer to layer, its stream, is half
 * of that and stays for the whole pass. Routed experts are computed once for all parts.
 * All buffers are taken at open; the four kinds of sublayer share one arena. `packed` is the layout of kernels.h.
 * Everything that has a row per position is split over threads by row, every matrix by output rows, attention by
 * heads.
 */
#define KDA_TILE  32   /* positions whose q, k, v, a of one head are held at once */

typedef struct { /* [T][.] each; `p` marks packed */
    float *raw[3], *g, *f, *fa, *fap, *b, *att, *attp;
} kda_bufs;

typedef struct {
    float *cq, *cqp, *kv, *q, *g, *att, *attp;
    float *work, *scores; /* of k3_mla.c, not for each row */
} mla_bufs;

typedef struct {
    float *g, *u, *hp;
} dense_bufs;

typedef struct {
    float *router, *zp, *sg, *su, *shp, *r, *rp;
    float *zpair, *hpair;   /* [max_pairs][latent], [..][inter], packed per expert */
} moe_bufs;

/* Of the MoE layer at work, for all parts: [rows of the pass][.] */
typedef struct {
    float *z, *up;    /* [latent] what experts read; [hidden] the shared expert's output */
    int64_t *Q;       /* [latent] the exact sum             */
    uint32_t *pick;   /* [top_k] ids, ascending             */
    float *pick_w;    /* [top_k]                            */
    uint8_t *is_bad;  /* an expert's output was out of range */
    uint32_t *pair_t; /* [rows x top_k] row, by expert      */
    float *pair_w;
} pair_bufs;

/* What rows carry from layer to layer: [rows of all open passes][.] */
typedef struct {
    uint64_t n;      /* rows in all                                               */
    float *P;        /* [hidden] running sum                                      */
    float *blocks;   /* [n_blocks][n][hidden]                                     */
    uint64_t *trace; /* [n_layers]                                                */
    uint16_t *owner; /* the span of its pass                                      */
} stream_bufs;

typedef struct {
    expert_task task;      /* its pairs, and where its weights are while they are pinned */
    uint32_t ie;
    float weight;          /* sum of its router weights in the chunk       */
    bool is_computed, is_far; /* is_far: a box was asked                   */
    bool is_audit;            /* answered, to be computed here to compare ... */
    int box;                  /* ... with what this box says                  */
    slot *slot;            /* NULL: not asked for yet                      */
} routed;

struct scratch {
    stream_bufs rows;
    float *x, *f;      /* [part][hidden]: mixed input, sublayer output               */
    float *xp;         /* packed normed input                                        */
    pair_bufs pair;
    kda_bufs kda;
    mla_bufs mla;
    dense_bufs dense;
    moe_bufs moe;
    float *local;      /* [n_threads][local_floats] */
    uint64_t local_floats;
    uint16_t *embed;   /* [hidden] one bf16 row     */
    uint32_t *n_of;    /* [n_experts] pairs of each expert   */
    routed *routed;    /* [n_experts] distinct, by id        */
    routed **batch;    /* [n_experts] those to compute now ... */
    expert_task **task; /* [n_experts] ... and their tasks     */
    uint32_t *queue;   /* [n_experts] routed[] still to be fetched, by place in the file */
    float **to;        /* [part] where a row of logits goes  */
    uint32_t *row_at;  /* [part] which row of the pass it is */
    uint32_t max_pairs; /* most pairs computed together      */
    float *guess;       /* [n_experts] weight that the next layer is expected to give */
    uint32_t *ahead;    /* [n_experts] experts of the next layer to read ahead, in order */
    uint32_t *ahead_slot; /* [n_experts] the slots they are read into                 */
    uint8_t *work;        /* all but the rows' streams, which passes at rest need: for states, between steps */
    uint64_t work_bytes;
    void *block;
    uint64_t block_bytes;
};

/* Rows of one session in a pass: its next n positions. */
typedef struct {
    k3_session *s;
    k3_feed *feed;     /* status and error go there: below 0, and the rows are worth nothing any more */
    const uint32_t *ids;
    size_t n, row;     /* rows [row, row + n) of the pass            */
    uint64_t pos;      /* position of the first                      */
    size_t n_logits;   /* of the last so many rows                   */
    float *logits;
    uint64_t kept;     /* positions from here on can be taken back   */
} pass_span;

/* The rows of one span in the part at work: rows [t, t + n) of the part, at positions pos.. */
typedef struct {
    const pass_span *x;
    size_t t, n;
    uint64_t pos;
} part_cut;

struct k3_pass {
    k3_engine *e;
    k3_feed *feed;
    size_t n_feeds;
    size_t fed[K3_MAX_FEEDS]; /* ids of each feed that ran                                    */
    size_t at, n_room;        /* its rows of the streams: [at, at + n_room)                   */
    pass_span spans[K3_MAX_FEEDS]; /* of the round at work                                         */
    uint32_t n_spans;
    size_t n_rows, n_part;    /* rows of this round; of a part                                */
    size_t n_head;            /* rows whose logits are wanted                                 */
    uint32_t il, n_blocks;    /* the next layer; AttnRes blocks so far                        */
    bool is_round;            /* a round has begun and not ended                              */
    uint64_t done, total;     /* rows x layers                                                */
    uint64_t start_ns;
    k3_pass *next; /* of those that are open                                                  */
};

/* One step at work: some layers of a pass. */
typedef struct {
    k3_engine *e;
    k3_pass *p;
    struct scratch *b;
    const k3_kernels *k;
    size_t t0, T;      /* rows [t0, t0 + T) of the pass: the part at work */
    part_cut cuts[K3_MAX_FEEDS]; /* the part by sessions, as far as they have not ended ... */
    uint32_t n_cuts;
    uint32_t n_blocks; /* AttnRes blocks so far           */
    const uint16_t *kv_b; /* of the MLA layer at work     */
    uint32_t n_routed;    /* distinct experts of the MoE layer at work ... */
    uint32_t n_queue, i_queue; /* ... of them queue[i_queue..n_queue) not asked for yet */
    uint32_t n_ahead, i_ahead; /* ... of the next layer ahead[i_ahead..n_ahead) to read ahead */
    uint32_t n_far, far_pairs; /* ... asked of far boxes and not settled; their pairs */
    uint32_t n_audit;     /* ... answered, and still to be computed here to compare */
    int i_audit;          /* ... the box whose answer is being computed here; -1: none yet */
    bool is_unseen;       /* ... answered, and used as it was */
    bool is_audit;        /* ... answers are computed here too */
    bool is_timed;        /* ... what is not here is read from disk, since begun_ns */
    uint64_t begun_ns;
    k3_error *err;
} step;

struct k3_session {
    k3_engine *e;
    uint64_t pos, context;
    float **state; /* [n_layers]: KDA: S [heads][d][d], then history [3][3][heads x d];
                      MLA: cache [context][k3_pad(kv_lora + rope)], packed rows */
    uint32_t *ids; /* [context]: those run so far */
    /* The KDA state of layer il is that of position state_pos[il]. Rows from there to `pos` can still be taken back, and
     * journal[il] has what the state needs of them: raw q, k, v and f [4][journal_rows][heads x d], b [..][heads] */
    uint64_t *state_pos; /* [n_layers] */
    float **journal;     /* [n_layers] */
    uint32_t journal_rows;
    void *block;
    uint64_t block_bytes;
    k3_pass *pass; /* the open pass that it is in, or NULL */
    bool is_broken;
    bool is_unverified; /* far boxes gave sums that nobody compared: since reset, or in the loaded state */
    k3_trace_fn trace;
    void *trace_user;
    k3_route_fn route;
    void *route_user;
    uint32_t tap[K3_MAX_TAPS], n_taps;
    bool taps_mix; /* the next layer's mixture, not P */
    k3_tap_fn on_tap;
    void *tap_user;
    uint64_t compute_ns;
};

/* A bump allocator that also measures: with base NULL only `used` counts. */
typedef struct {
    uint8_t *base;
    uint64_t used;
} bump;

static void *bump_take(bump *b, uint64_t n, size_t size) {
    void *p = b->base ? b->base + b->used : NULL;
    b->used += round_up(n * size, 64);
    return p;
}

static float *bump_f32(bump *b, uint64_t n) { return bump_take(b, n, sizeof(float)); }

static void kda_carve(kda_bufs *k, bump *b, const k3_shape *sh, uint64_t T) {
    uint64_t n = (uint64_t)sh->kda_heads * sh->kda_dim;
    for (int c = 0; c < 3; c++) k->raw[c] = bump_f32(b, T * n);
    k->g = bump_f32(b, T * n);
    k->f = bump_f32(b, T * n);
    k->att = bump_f32(b, T * n);
    k->attp = bump_f32(b, T * k3_pad(n));
    k->fa = bump_f32(b, T * sh->kda_dim);
    k->fap = bump_f32(b, T * k3_pad(sh->kda_dim));
    k->b = bump_f32(b, T * sh->kda_heads);
}

static void mla_carve(mla_bufs *m, bump *b, const k3_shape *sh, uint64_t T, uint64_t n_scores) {
    uint64_t n = (uint64_t)sh->n_heads * sh->v_dim;
    m->cq = bump_f32(b, T * sh->q_lora);
    m->cqp = bump_f32(b, T * k3_pad(sh->q_lora));
    m->kv = bump_f32(b, T * (sh->kv_lora + sh->rope_dim));
    m->q = bump_f32(b, T * sh->n_heads * (sh->nope_dim + sh->rope_dim));
    m->g = bump_f32(b, T * n);
    m->att = bump_f32(b, T * n);
    m->attp = bump_f32(b, T * k3_pad(n));
    m->work = bump_f32(b, mla_work_floats(sh));
    m->scores = bump_f32(b, n_scores);
}

static void dense_carve(dense_bufs *d, bump *b, const k3_shape *sh, uint64_t T) {
    d->g = bump_f32(b, T * sh->dense_inter);
    d->u = bump_f32(b, T * sh->dense_inter);
    d->hp = bump_f32(b, T * k3_pad(sh->dense_inter));
}

static void moe_carve(moe_bufs *m, bump *b, const k3_shape *sh, uint64_t T, uint64_t max_pairs) {
    m->router = bump_f32(b, T * sh->n_experts);
    m->zp = bump_f32(b, sh->latent); /* of a pass of one row */
    m->sg = bump_f32(b, T * sh->shared_inter);
    m->su = bump_f32(b, T * sh->shared_inter);
    m->shp = bump_f32(b, T * sh->shared_inter);
    m->r = bump_f32(b, T * sh->latent);
    m->rp = bump_f32(b, T * sh->latent);
    m->zpair = bump_f32(b, max_pairs * sh->latent);
    m->hpair = bump_f32(b, max_pairs * sh->expert_inter);
}

/* Floats one thread needs for its heads (section 9) or expert rows (section 11). */
static uint64_t local_floats(const k3_shape *sh, uint64_t T) {
    uint64_t d = sh->kda_dim, kda = KDA_TILE * (5 * d + 1) + d * d + 128; /* kda_rows, a second state */
    uint64_t mla = mla_local_floats(sh);
    uint64_t moe = 2 * T * ROW_TILE;
    uint64_t n = kda > mla ? kda : mla;
    return round_up(n > moe ? n : moe, 1024);
}

static uint32_t block_count(const k3_shape *sh) {
    return (sh->n_layers + sh->block_size - 1) / sh->block_size;
}

static void rows_carve(stream_bufs *r, bump *b, const k3_shape *sh, uint64_t n) {
    r->n = n;
    r->P = bump_f32(b, n * sh->hidden);
    r->blocks = bump_f32(b, n * sh->hidden * block_count(sh));
    r->trace = bump_take(b, n * sh->n_layers, sizeof(uint64_t));
    r->owner = bump_take(b, n, sizeof(uint16_t));
    b->used = round_up(b->used, IO_ALIGN);
}

static void pair_carve(pair_bufs *p, bump *b, const k3_shape *sh, uint64_t n) {
    p->z = bump_f32(b, n * sh->latent);
    p->up = bump_f32(b, n * sh->hidden);
    p->Q = bump_take(b, n * sh->latent, sizeof(int64_t));
    p->pick = bump_take(b, n * sh->top_k, sizeof(uint32_t));
    p->pick_w = bump_f32(b, n * sh->top_k);
    p->is_bad = bump_take(b, n, 1);
    p->pair_t = bump_take(b, n * sh->top_k, sizeof(uint32_t));
    p->pair_w = bump_f32(b, n * sh->top_k);
}

/* How many rows there are: of all open passes, of the longest pass, of a part. */
typedef struct {
    uint64_t rows, pass, part, n_threads, n_scores;
} scratch_size;

static void scratch_carve(struct scratch *s, bump *b, const k3_shape *sh, const scratch_size *size) {
    uint64_t T = size->part, n_pairs = size->pass * sh->top_k, most = size->pass > 1024 ? size->pass : 1024;
    rows_carve(&s->rows, b, sh, size->rows);
    s->work = b->base ? b->base + b->used : NULL;
    s->work_bytes = b->used;
    s->max_pairs = (uint32_t)(n_pairs < most ? n_pairs : most);
    s->x = bump_f32(b, T * sh->hidden);
    s->f = bump_f32(b, T * sh->hidden);
    s->xp = bump_f32(b, T * k3_pad(sh->hidden));
    s->local_floats = local_floats(sh, s->max_pairs < size->pass ? s->max_pairs : size->pass);
    s->local = bump_f32(b, size->n_threads * s->local_floats);
    s->embed = bump_take(b, sh->hidden, sizeof(uint16_t));
    s->n_of = bump_take(b, sh->n_experts, sizeof(uint32_t));
    s->routed = bump_take(b, sh->n_experts, sizeof(routed));
    s->batch = bump_take(b, sh->n_experts, sizeof(routed *));
    s->task = bump_take(b, sh->n_experts, sizeof(expert_task *));
    s->queue = bump_take(b, sh->n_experts, sizeof(uint32_t));
    s->guess = bump_f32(b, sh->n_experts);
    s->ahead = bump_take(b, sh->n_experts, sizeof(uint32_t));
    s->ahead_slot = bump_take(b, sh->n_experts, sizeof(uint32_t));
    s->to = bump_take(b, T, sizeof(float *));
    s->row_at = bump_take(b, T, sizeof(uint32_t));
    pair_carve(&s->pair, b, sh, size->pass);
    bump arena[4] = {*b, *b, *b, *b};
    kda_carve(&s->kda, &arena[0], sh, T);
    mla_carve(&s->mla, &arena[1], sh, T, size->n_scores);
    dense_carve(&s->dense, &arena[2], sh, T);
    moe_carve(&s->moe, &arena[3], sh, T, s->max_pairs);
    for (int i = 0; i < 4; i++)
        if (arena[i].used > b->used) b->used = arena[i].used;
    if (b->used < s->work_bytes + K3_STATE_ROOM) b->used = s->work_bytes + K3_STATE_ROOM; /* for states */
    s->work_bytes = b->used - s->work_bytes;
}

/* Rows of small passes, of sessions beside the first, that run while a long pass rests. */
static uint64_t rows_beside(const k3_engine *e) {
    return (uint64_t)e->opt.sessions * (1 + e->opt.revocable);
}

static scratch_size size_for(const k3_engine *e, uint64_t chunk, uint64_t part) {
    uint64_t beside = rows_beside(e);
    return (scratch_size){chunk + beside, chunk > beside ? chunk : beside, part, (uint64_t)e->n_threads, e->n_scores};
}

static uint64_t scratch_bytes(const k3_engine *e, uint64_t chunk, uint64_t part) {
    struct scratch s;
    bump b = {NULL, 0};
    scratch_size size = size_for(e, chunk, part);
    scratch_carve(&s, &b, &e->sh, &size);
    return b.used;
}

static int scratch_open(k3_engine *e, k3_error *err) {
    struct scratch *s = e->scratch = calloc(1, sizeof *s);
    if (!s) return fail(err, K3_ENOMEM, "scratch: out of memory");
    s->block_bytes = scratch_bytes(e, e->plan.chunk, e->plan.part);
    s->block = ledger_take(&e->mem, s->block_bytes, "scratch", err);
    if (!s->block) return e->mem.why;
    bump b = {s->block, 0};
    scratch_size size = size_for(e, e->plan.chunk, e->plan.part);
    scratch_carve(s, &b, &e->sh, &size);
    e->store.guess = s->ahead_slot;
    return 0;
}

/* ---- Loops ---- */

/* A part of the step is over that began at `start`, when the threads had been busy for `busy`. */
static void part_note(k3_engine *e, k3_part part, uint64_t start, uint64_t busy) {
    e->stats.part_ns[part] += clock_ns() - start;
    e->stats.part_busy_ns[part] += pool_busy_ns(e->pool) - busy;
}

/* pool_run, and with k3_options.is_timed what it took. */
static void loop_run(k3_engine *e, k3_part part, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx) {
    uint64_t start = e->opt.is_timed ? clock_ns() : 0, busy = pool_busy_ns(e->pool);
    pool_run(e->pool, n, unit_ns, fn, ctx);
    if (start) part_note(e, part, start, busy);
}

/* ---- Rows through matrices ---- */

/* y[t][r] = W[r] . x[t] for all rows of matrix t of a layer. */
typedef struct {
    float *y;        /* [T][rows]; of the head NULL: rows go where scratch.to says */
    enum tensor t;
    const float *xp; /* packed [T][cols] */
} job;

#define MAX_JOBS 8

/* Nanoseconds that one row of n weights times T vectors takes one core: the bytes at 10 GB/s, the
 * arithmetic at 80 GFLOP/s. Pieces of work are cut and threads are woken by it. */
static uint64_t row_ns(size_t n, size_t T) { return n * (8 + T) / 40; }

/* The resident matrices of a list of jobs: all rows of all of them in one loop. */
typedef struct {
    const step *st;
    const job *jobs;
    uint32_t il;
    size_t T;
    size_t first[MAX_JOBS + 1]; /* job j has pieces [first[j], first[j + 1]) */
    size_t tile[MAX_JOBS];
} linear_loop;

/* Rows [row, row + n_rows) of a job, whose weights begin at w. */
static void job_rows(const step *st, const job *b, const uint16_t *w, size_t row, size_t n_rows, size_t T,
                     int i_thread) {
    size_t n = tensor_cols(&st->e->files, b->t), ldy = tensor_rows(&st->e->files, b->t);
    if (b->t != T_LM_HEAD) {
        st->k->matmul_bf16(b->y + row, ldy, w, n, n_rows, n, b->xp, T);
        return;
    }
    float *y = st->b->local + (size_t)i_thread * st->b->local_floats;
    st->k->matmul_bf16(y, n_rows, w, n, n_rows, n, b->xp, T);
    for (size_t t = 0; t < T; t++) memcpy(st->b->to[t] + row, y + t * n_rows, n_rows * sizeof *y);
}

static void linear_piece(void *ctx, size_t i, int i_thread) {
    const linear_loop *l = ctx;
    const k3_engine *e = l->st->e;
    int j = 0;
    while (i >= l->first[j + 1]) j++;
    const job *b = &l->jobs[j];
    size_t row = (i - l->first[j]) * l->tile[j];
    job_rows(l->st, b, e->layers[l->il].m[b->t] + row * tensor_cols(&e->files, b->t), row,
             tile_rows(row, tensor_rows(&e->files, b->t), l->tile[j]), l->T, i_thread);
}

static void linear_resident(const step *st, uint32_t il, size_t T, const job *jobs, int n_jobs) {
    k3_engine *e = st->e;
    linear_loop l = {.st = st, .jobs = jobs, .il = il, .T = T};
    size_t n_rows = 0;
    uint64_t ns = 0;
    for (int j = 0; j < n_jobs; j++) n_rows += tensor_rows(&e->files, jobs[j].t);
    for (int j = 0; j < n_jobs; j++) {
        bool is_here = e->layers[il].m[jobs[j].t] != NULL;
        size_t rows = tensor_rows(&e->files, jobs[j].t);
        l.tile[j] = tile_for(n_rows, e->n_threads);
        l.first[j + 1] = l.first[j] + (is_here ? tile_count(rows, l.tile[j]) : 0);
        ns += is_here ? rows * row_ns(tensor_cols(&e->files, jobs[j].t), T) : 0;
    }
    size_t n = l.first[n_jobs];
    if (n) loop_run(e, K3_PART_MATRIX, n, ns / n, linear_piece, &l);
}

/* Say where the step is, and hear whether to go on. */
static int step_progress(step *st, uint32_t il) {
    return engine_progress(st->e, K3_PHASE_COMPUTE, st->p->done, st->p->total,
                           il < st->e->sh.n_layers ? (int)il : -1, st->err);
}

/* A stretch of rows of a streamed matrix, cut in pieces of `tile` rows. */
typedef struct {
    const step *st;
    const job *b;
    const uint16_t *w;
    const piece *p;
    size_t T, tile;
} stream_loop;

static void stream_piece(void *ctx, size_t i, int i_thread) {
    const stream_loop *l = ctx;
    size_t row = i * l->tile;
    job_rows(l->st, l->b, l->w + row * tensor_cols(&l->st->e->files, l->b->t), l->p->row + row,
             tile_rows(row, l->p->n_rows, l->tile), l->T, i_thread);
}

/* A streamed matrix, stretch by stretch as its rows arrive. */
static int linear_streamed(step *st, uint32_t il, size_t T, const job *b) {
    size_t n = tensor_cols(&st->e->files, b->t);
    for (size_t done = 0; done < tensor_rows(&st->e->files, b->t);) {
        stream_loop l = {.st = st, .b = b, .T = T};
        int rc = stream_weights(st->e, il, b->t, &l.p, &l.w, st->err);
        if (rc < 0) return rc;
        l.tile = tile_for(l.p->n_rows, st->e->n_threads);
        loop_run(st->e, K3_PART_MATRIX, tile_count(l.p->n_rows, l.tile), l.tile * row_ns(n, T), stream_piece,
                 &l);
        done += l.p->n_rows;
        stream_release(st->e);
        if ((rc = step_progress(st, il)) < 0) return rc;
    }
    return 0;
}

/* All jobs, in any order but that of the streamed ones. */
static int linear(step *st, uint32_t il, size_t T, const job *jobs, int n_jobs) {
    int rc = 0;
    linear_resident(st, il, T, jobs, n_jobs);
    for (int j = 0; rc == 0 && j < n_jobs; j++)
        if (!st->e->layers[il].m[jobs[j].t]) rc = linear_streamed(st, il, T, &jobs[j]);
    return rc;
}

/* The work of a loop over rows: what each of the loops below needs of it. */
typedef struct {
    const k3_engine *e;
    size_t T, n, ldx;
    float *x, *xp; /* rows, and where they are packed */
    const float *w, *u;
    float eps;
} row_loop;

static void pack_row(void *ctx, size_t t, int i_thread) {
    const row_loop *l = ctx;
    (void)i_thread;
    l->e->kern->pack(l->xp, l->T, t, l->x + t * l->ldx, l->n);
}

/* xp = packed x[t][0..n), rows ldx apart. */
static void pack_rows(k3_engine *e, size_t T, float *xp, float *x, size_t ldx, size_t n) {
    row_loop l = {.e = e, .T = T, .n = n, .ldx = ldx, .x = x, .xp = xp};
    loop_run(e, K3_PART_ROW, T, n / 4, pack_row, &l);
}

/* 1 / sqrt(mean x^2 + eps), n being the true length (NUMERICS 3). */
static float rms_scale(const k3_kernels *k, const float *x, size_t n, float eps) {
    return 1.0f / sqrtf(k->dot(x, x, n) / (float)n + eps);
}

static void rms(const k3_kernels *k, float *x, const float *w, size_t n, float eps) {
    k->scale2(x, x, rms_scale(k, x, n, eps), w, n);
}

static void rms_pack_row(void *ctx, size_t t, int i_thread) {
    const row_loop *l = ctx;
    float *x = l->x + t * l->ldx;
    (void)i_thread;
    rms(l->e->kern, x, l->w, l->n, l->eps);
    l->e->kern->pack(l->xp, l->T, t, x, l->n);
}

/* Normalise each row in place and pack it. */
static void rms_pack_rows(k3_engine *e, size_t T, float *xp, float *x, size_t ldx,
                          const float *w, size_t n, float eps) {
    row_loop l = {.e = e, .T = T, .n = n, .ldx = ldx, .x = x, .xp = xp, .w = w, .eps = eps};
    loop_run(e, K3_PART_ROW, T, n / 2, rms_pack_row, &l);
}

static void situ_pack_row(void *ctx, size_t t, int i_thread) {
    const row_loop *l = ctx;
    float *g = l->x + t * l->n;
    (void)i_thread;
    l->e->kern->situ(g, g, l->u + t * l->n, l->e->sh.situ_beta, l->e->sh.situ_linear_beta, l->n);
    l->e->kern->pack(l->xp, l->T, t, g, l->n);
}

/* h = SiTU(g, u), packed: the inside of every gated MLP. g is overwritten. */
static void situ_pack_rows(k3_engine *e, size_t T, float *hp, float *g, const float *u,
                           size_t n) {
    row_loop l = {.e = e, .T = T, .n = n, .x = g, .xp = hp, .u = u};
    loop_run(e, K3_PART_ROW, T, 2 * n, situ_pack_row, &l);
}

/* ---- Rows and spans ---- */

/* The running sum of row t of the part, and its block j. */
static float *row_P(const step *st, size_t t) {
    return st->b->rows.P + (st->p->at + st->t0 + t) * st->e->sh.hidden;
}

static float *row_block(const step *st, size_t j, size_t t) {
    const stream_bufs *r = &st->b->rows;
    return r->blocks + (j * r->n + st->p->at + st->t0 + t) * st->e->sh.hidden;
}

/* The span that a row of the pass belongs to. */
static pass_span *row_span(const step *st, size_t row) {
    return &st->p->spans[st->b->rows.owner[st->p->at + row]];
}

static uint64_t row_pos(const pass_span *x, size_t row) { return x->pos + (row - x->row); }

static bool span_is_alive(const pass_span *x) { return x->feed->status == 0; }

/* One session's part of the pass is over; the others go on. Its rows are computed on, which changes no other row. */
PRINTF_LIKE(3, 4) static void span_fail(const pass_span *x, int status, const char *format, ...) {
    va_list args;
    if (!span_is_alive(x)) return;
    va_start(args, format);
    vsnprintf(x->feed->error.text, sizeof x->feed->error.text, format, args);
    va_end(args);
    x->feed->status = status;
}

static bool pass_is_alive(const k3_pass *p) {
    for (uint32_t i = 0; i < p->n_spans; i++)
        if (span_is_alive(&p->spans[i])) return true;
    return false;
}

/* After a loop in which spans may have failed: is there one left? */
static int pass_check(const step *st) {
    if (pass_is_alive(st->p)) return 0;
    const k3_feed *f = st->p->spans[0].feed;
    return fail(st->err, f->status, "%s", f->error.text);
}

/* The part at work becomes rows [t0, t0 + n) of the pass. */
static void part_begin(step *st, size_t t0, size_t n) {
    st->t0 = t0;
    st->T = n;
    st->n_cuts = 0;
    for (uint32_t i = 0; i < st->p->n_spans; i++) {
        const pass_span *x = &st->p->spans[i];
        size_t from = x->row > t0 ? x->row : t0, end = x->row + x->n < t0 + n ? x->row + x->n : t0 + n;
        if (from >= end || !span_is_alive(x)) continue;
        st->cuts[st->n_cuts++] = (part_cut){x, from - t0, end - from, row_pos(x, from)};
    }
}

/* Rows of the part that begins at row t0. */
static size_t part_rows(const k3_pass *p, size_t t0) {
    return p->n_rows - t0 < p->n_part ? p->n_rows - t0 : p->n_part;
}

/* P = the bf16 row of each id's embedding, widened, unscaled. Rows are read from disk. */
static int embed(step *st) {
    k3_engine *e = st->e;
    uint64_t n = e->sh.hidden;
    const place *at = &e->files.at_model[T_EMBED];
    st->t0 = 0;
    for (uint32_t i = 0; i < st->p->n_spans; i++) {
        const pass_span *x = &st->p->spans[i];
        for (size_t t = 0; t < x->n; t++) {
            int rc = engine_read(e, at->shard, st->b->embed, n * sizeof(uint16_t),
                                 at->offset + x->ids[t] * n * sizeof(uint16_t),
                                 trunk_sum(e, e->sh.n_layers, T_EMBED, x->ids[t]), st->err);
            if (rc < 0) return fail_in(st->err, rc, "embedding of id %u", x->ids[t]);
            st->k->widen(row_P(st, x->row + t), st->b->embed, n);
        }
    }
    return 0;
}

/* ==== 9. KDA and MLA =================================================================
 *
 * KDA carries a d x d state and three conv samples per channel; prefill runs the same recurrence
 * as decode, head by head. MLA is always the absorbed form over a cache of latent rows, whose
 * softmax is cut in blocks of 256 absolute positions so that chunking cannot show (k3_mla.c).
 *
 * Rows that can be taken back (k3_session_cut) are not added to the KDA state but kept in the session's journal: what
 * the state needs of them. Their outputs come from a copy of the state. The next pass first adds those that
 * stayed. So cutting back copies nothing, and costs the recurrence twice, which is 0.4 % of a prompt.
 */

/* ---- KDA ---- */

/* Channels of one projection, all heads. */
static size_t kda_width(const k3_shape *sh) { return (size_t)sh->kda_heads * sh->kda_dim; }

static float *kda_history(const k3_session *s, uint32_t il) {
    const k3_shape *sh = &s->e->sh;
    return s->state[il] + kda_width(sh) * sh->kda_dim;
}

/* The inputs of one layer's recurrence for one session: first the rows of its journal, then those of the part. */
typedef struct {
    const k3_session *s;
    const float *history; /* [3][3][n], the three samples before the first row */
    size_t n_old, n_new;  /* rows of the journal, of the part                  */
    const float *raw[3], *f, *b; /* the part's: [n_new][n], [n_new][n], [n_new][heads] */
    size_t n, heads;      /* channels                                          */
    uint32_t il;
    size_t n_kept;        /* rows that go into the state for good; the others can be taken back */
} kda_rows;

static float *journal_raw(const k3_session *s, uint32_t il, int c, size_t n) {
    return s->journal[il] + (size_t)c * s->journal_rows * n;
}

static float *journal_f(const k3_session *s, uint32_t il, size_t n) { return journal_raw(s, il, 3, n); }
static float *journal_b(const k3_session *s, uint32_t il, size_t n) { return journal_raw(s, il, 4, n); }

/* Raw sample i of projection c: below 0 from before the first row. */
static const float *kda_sample(const kda_rows *r, int c, int64_t i) {
    if (i < 0) return r->history + ((size_t)c * 3 + (size_t)(i + 3)) * r->n;
    if ((size_t)i < r->n_old) return journal_raw(r->s, r->il, c, r->n) + (size_t)i * r->n;
    return r->raw[c] + ((size_t)i - r->n_old) * r->n;
}

static const float *kda_f(const kda_rows *r, size_t i) {
    return i < r->n_old ? journal_f(r->s, r->il, r->n) + i * r->n : r->f + (i - r->n_old) * r->n;
}

static float kda_b(const kda_rows *r, size_t i, size_t h) {
    return i < r->n_old ? journal_b(r->s, r->il, r->n)[i * r->heads + h] : r->b[(i - r->n_old) * r->heads + h];
}

/* The cut's rows of session s, and those of its journal before them. `x` NULL: the journal up to its position. */
static kda_rows kda_rows_of(const step *st, uint32_t il, k3_session *s, const part_cut *x) {
    const kda_bufs *b = &st->b->kda;
    uint64_t base = s->state_pos[il];
    size_t n = kda_width(&st->e->sh), heads = st->e->sh.kda_heads, n_old = (size_t)((x ? x->pos : s->pos) - base);
    kda_rows r = {.s = s, .history = kda_history(s, il), .n_old = n_old, .n = n, .heads = heads, .il = il};
    r.n_kept = n_old;
    if (!x) return r;
    r.n_new = x->n;
    for (int c = 0; c < 3; c++) r.raw[c] = b->raw[c] + x->t * n;
    r.f = b->f + x->t * n;
    r.b = b->b + x->t * heads;
    uint64_t kept = x->x->kept;
    r.n_kept = kept <= base ? 0 : kept - base < n_old + x->n ? (size_t)(kept - base) : n_old + x->n;
    return r;
}

/* Up to KDA_TILE rows of one head, made ready for the recurrence; and a second state. */
typedef struct {
    float *q, *k, *v, *a, *out; /* [KDA_TILE][d] */
    float *beta;                /* [KDA_TILE]    */
    float *S;                   /* [d][d]        */
} kda_tile;

static void kda_tile_carve(kda_tile *k, float *local, size_t d) {
    k->q = local;
    k->k = k->q + KDA_TILE * d;
    k->v = k->k + KDA_TILE * d;
    k->a = k->v + KDA_TILE * d;
    k->out = k->a + KDA_TILE * d;
    k->S = k->out + KDA_TILE * d;
    k->beta = k->S + d * d;
}

/* silu(causal conv) of head h at row i (K3-SPEC 3.3 step 2). */
static void kda_conv(const step *st, const kda_rows *r, int c, size_t i, size_t h, float *y) {
    static const enum tensor conv[3] = {T_CONV_Q, T_CONV_K, T_CONV_V};
    size_t d = st->e->sh.kda_dim;
    const float *w[4];
    for (int j = 0; j < 4; j++) w[j] = kda_sample(r, c, (int64_t)i - 3 + j) + h * d;
    st->k->conv_silu(y, w, st->e->layers[r->il].v[conv[c]] + h * d * 4, d);
}

/* q, k, v, a and beta of rows [i0, i0 + n) of head h (K3-SPEC 3.3 steps 2 to 5). */
static void kda_prepare(const step *st, const kda_rows *r, size_t h, size_t i0, size_t n, const kda_tile *to) {
    const k3_shape *sh = &st->e->sh;
    const k3_kernels *k = st->k;
    const layer *ly = &st->e->layers[r->il];
    size_t d = sh->kda_dim;
    float q_scale = (float)(1.0 / sqrt((double)d));
    for (size_t i = 0; i < n; i++) {
        float *q = to->q + i * d, *key = to->k + i * d;
        kda_conv(st, r, 0, i0 + i, h, q);
        kda_conv(st, r, 1, i0 + i, h, key);
        kda_conv(st, r, 2, i0 + i, h, to->v + i * d);
        k->scale(q, q, 1.0f / sqrtf(k->dot(q, q, d) + 1e-6f), d);
        k->scale(q, q, q_scale, d);
        k->scale(key, key, 1.0f / sqrtf(k->dot(key, key, d) + 1e-6f), d);
        k->kda_decay(to->a + i * d, kda_f(r, i0 + i) + h * d, ly->v[T_DT_BIAS] + h * d, ly->A[h],
                     sh->gate_lower_bound, d);
        to->beta[i] = k3_sigmoid(kda_b(r, i0 + i, h));
    }
}

/* The recurrence over rows [i0, end) of head h (step 6), S carried. `o`: the outputs of the part's rows, kda_width
 * floats apart; rows of the journal have given theirs before. */
static void kda_scan(const step *st, const kda_rows *r, size_t h, size_t i0, size_t end, float *S, float *o,
                     const kda_tile *b) {
    size_t d = st->e->sh.kda_dim;
    for (size_t i = i0, n; i < end; i += n) {
        size_t stop = i < r->n_old && end > r->n_old ? r->n_old : end;
        n = stop - i < KDA_TILE ? stop - i : KDA_TILE;
        kda_prepare(st, r, h, i, n, b);
        bool is_old = i < r->n_old;
        st->k->kda(S, d, n, b->a, b->k, b->q, b->v, d, b->beta, 1, is_old ? b->out : o + (i - r->n_old) * r->n,
                   is_old ? d : r->n);
    }
}

/* One head: the rows that are kept into the state, the others from a copy of it. */
static void kda_head(const step *st, const kda_rows *r, size_t h, float *o, float *local) {
    size_t d = st->e->sh.kda_dim, n = r->n_old + r->n_new;
    float *S = r->s->state[r->il] + h * d * d;
    kda_tile b;
    kda_tile_carve(&b, local, d);
    kda_scan(st, r, h, 0, r->n_kept, S, o, &b);
    if (r->n_kept == n) return;
    memcpy(b.S, S, d * d * sizeof *S);
    kda_scan(st, r, h, r->n_kept, n, b.S, o, &b);
}

/* What the next rows need: the last three samples before the rows that can be taken back, and those rows. */
static void kda_remember(const kda_rows *r, k3_session *s) {
    float *history = kda_history(s, r->il);
    size_t n = r->n_old + r->n_new, first = r->n_kept > r->n_old ? r->n_kept : r->n_old;
    size_t at = r->n_kept > r->n_old ? 0 : r->n_old - r->n_kept;
    for (int c = 0; r->n_kept > 0 && c < 3; c++)
        for (int i = 0; i < 3; i++)
            memmove(history + ((size_t)c * 3 + (size_t)i) * r->n, kda_sample(r, c, (int64_t)r->n_kept - 3 + i),
                    r->n * sizeof(float));
    for (size_t i = first; i < n; i++, at++) { /* none of these is in the journal yet */
        for (int c = 0; c < 3; c++)
            memcpy(journal_raw(s, r->il, c, r->n) + at * r->n, kda_sample(r, c, (int64_t)i), r->n * sizeof(float));
        memcpy(journal_f(s, r->il, r->n) + at * r->n, kda_f(r, i), r->n * sizeof(float));
        memcpy(journal_b(s, r->il, r->n) + at * r->heads, r->b + (i - r->n_old) * r->heads,
               r->heads * sizeof(float));
    }
    s->state_pos[r->il] += r->n_kept;
}

/* The work of a loop over heads, or over tiles of heads and positions. */
typedef struct {
    step *st;
    uint32_t il;
} head_loop;

static float *step_local(const step *st, int i_thread) {
    return st->b->local + (size_t)i_thread * st->b->local_floats;
}

/* Head i % heads of cut i / heads. */
static void kda_one_head(void *ctx, size_t i, int i_thread) {
    const head_loop *l = ctx;
    const step *st = l->st;
    const k3_shape *sh = &st->e->sh;
    const kda_bufs *b = &st->b->kda;
    const part_cut *x = &st->cuts[i / sh->kda_heads];
    size_t h = i % sh->kda_heads, d = sh->kda_dim, n = kda_width(sh), at = x->t * n + h * d;
    kda_rows r = kda_rows_of(st, l->il, x->x->s, x);
    kda_head(st, &r, h, b->att + at, step_local(st, i_thread));
    for (size_t t = 0; t < x->n; t++) {
        float *o = b->att + at + t * n;
        rms(st->k, o, st->e->layers[l->il].v[T_O_NORM], d, sh->rms_eps);
        st->k->mul_sigmoid(o, o, b->g + at + t * n, d);
    }
}

/* What the journal of a session holds goes into its state; what could be taken back no longer can. */
typedef struct {
    const step *st;
    k3_session *s;
    uint32_t il;
} settle_loop;

static void settle_head(void *ctx, size_t h, int i_thread) {
    const settle_loop *l = ctx;
    kda_rows r = kda_rows_of(l->st, l->il, l->s, NULL);
    kda_head(l->st, &r, h, NULL, step_local(l->st, i_thread));
}

static void session_settle(k3_session *s) {
    k3_engine *e = s->e;
    const k3_shape *sh = &e->sh;
    step st = {.e = e, .b = e->scratch, .k = e->kern};
    for (uint32_t il = 0; il < sh->n_layers; il++) {
        if (sh->is_mla[il] || s->state_pos[il] >= s->pos) continue;
        pool_run(e->pool, sh->kda_heads, (uint64_t)sh->kda_dim * sh->kda_dim, settle_head,
                 &(settle_loop){&st, s, il});
        kda_rows r = kda_rows_of(&st, il, s, NULL);
        kda_remember(&r, s);
    }
}

/* f = KDA(xp). Shapes: xp packed [T][hidden], f [T][hidden]. */
static int kda(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const kda_bufs *b = &st->b->kda;
    size_t T = st->T, d = e->sh.kda_dim, n = kda_width(&e->sh);
    const float *xp = st->b->xp;
    const job in[] = {{b->raw[0], T_KDA_Q, xp}, {b->raw[1], T_KDA_K, xp}, {b->raw[2], T_KDA_V, xp},
                      {b->g, T_KDA_G, xp},      {b->fa, T_F_A, xp},       {b->b, T_B, xp}};
    int rc = linear(st, il, T, in, 6);
    if (rc < 0) return rc;
    pack_rows(e, T, b->fap, b->fa, d, d);
    if ((rc = linear(st, il, T, &(job){b->f, T_F_B, b->fap}, 1)) < 0) return rc;
    loop_run(e, K3_PART_ATTENTION, st->n_cuts * e->sh.kda_heads, T / (st->n_cuts + !st->n_cuts) * d * d, kda_one_head,
             &(head_loop){st, il});
    for (uint32_t i = 0; i < st->n_cuts; i++) {
        k3_session *s = st->cuts[i].x->s;
        kda_rows r = kda_rows_of(st, il, s, &st->cuts[i]);
        kda_remember(&r, s);
    }
    pack_rows(e, T, b->attp, b->att, n, n);
    return linear(st, il, T, &(job){st->b->f, T_KDA_O, b->attp}, 1);
}

/* ---- MLA ---- */

/* Norm one new cache row [c | k_pe] and store it packed. */
static void mla_latent(void *ctx, size_t t, int i_thread) {
    const head_loop *l = ctx;
    const step *st = l->st;
    const k3_shape *sh = &st->e->sh;
    size_t n = sh->kv_lora + sh->rope_dim, row = k3_pad(n);
    float *kv = st->b->mla.kv + t * n;
    const pass_span *x = row_span(st, st->t0 + t);
    (void)i_thread;
    if (!span_is_alive(x)) return;
    rms(st->k, kv, st->e->layers[l->il].v[T_KV_A_NORM], sh->kv_lora, sh->eps_lora);
    st->k->pack(x->s->state[l->il] + row_pos(x, st->t0 + t) * row, 1, 0, kv, n);
}

/* Norm the query latent and the new cache rows. */
static void mla_latents(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const k3_shape *sh = &e->sh;
    const layer *ly = &e->layers[il];
    const mla_bufs *b = &st->b->mla;
    rms_pack_rows(e, st->T, b->cqp, b->cq, sh->q_lora, ly->v[T_Q_A_NORM], sh->q_lora, sh->eps_lora);
    loop_run(e, K3_PART_ROW, st->T, sh->kv_lora, mla_latent, &(head_loop){st, il});
}

static void mla_loop(void *user, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx) {
    loop_run(user, K3_PART_ATTENTION, n, unit_ns, fn, ctx);
}

/* All heads over all rows of the part. */
static void mla_heads(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const mla_bufs *b = &st->b->mla;
    mla_cut cut[K3_MAX_FEEDS];
    for (uint32_t i = 0; i < st->n_cuts; i++) {
        const part_cut *x = &st->cuts[i];
        cut[i] = (mla_cut){x->x->s->state[il], x->pos, x->t, x->n};
    }
    const mla_args a = {.sh = &e->sh,
                        .k = st->k,
                        .n_threads = e->n_threads,
                        .loop = mla_loop,
                        .user = e,
                        .kv_b = st->kv_b,
                        .q = b->q,
                        .g = b->g,
                        .att = b->att,
                        .local = st->b->local,
                        .local_floats = st->b->local_floats,
                        .work = b->work,
                        .scores = b->scores,
                        .n_scores = (size_t)e->n_scores};
    mla_attend(&a, cut, st->n_cuts);
}

/* f = MLA(xp). Shapes as kda(). */
static int mla(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const mla_bufs *b = &st->b->mla;
    size_t T = st->T, n_o = (size_t)e->sh.n_heads * e->sh.v_dim;
    const job in[] = {
        {b->cq, T_Q_A, st->b->xp}, {b->kv, T_KV_A, st->b->xp}, {b->g, T_MLA_G, st->b->xp}};
    const piece *p;
    int rc = linear(st, il, T, in, 3);
    if (rc < 0) return rc;
    mla_latents(st, il);
    if ((rc = linear(st, il, T, &(job){b->q, T_Q_B, b->cqp}, 1)) < 0) return rc;

    st->kv_b = e->layers[il].m[T_KV_B];
    bool is_streamed = !st->kv_b; /* used at both ends of the attention: held as a whole */
    if (is_streamed && (rc = stream_weights(e, il, T_KV_B, &p, &st->kv_b, st->err)) < 0) return rc;
    mla_heads(st, il);
    if (is_streamed) stream_release(e);
    pack_rows(e, T, b->attp, b->att, n_o, n_o);
    return linear(st, il, T, &(job){st->b->f, T_MLA_O, b->attp}, 1);
}

/* ==== 10. Router =====================================================================
 *
 * Sigmoid scores over all experts; the bias takes part in the choice only. Ties go to the lower
 * id, and the weights are normalised by a sum in ascending id order, so that neither depends on
 * how the choice was made.
 */

/* Choose top_k of score + bias for one row; `logit` becomes the scores. Returns the first expert
 * whose value is not finite, or -1. */
static int64_t route(const k3_kernels *k, const k3_shape *sh, float *logit, const float *bias,
                     uint32_t *id, float *w) {
    float best[K3_MAX_TOP_K]; /* values of id[], descending, ties by id */
    uint32_t n = 0;
    for (uint32_t ie = 0; ie < sh->n_experts; ie++)
        if (!isfinite(logit[ie])) return ie;
    k->sigmoid(logit, logit, sh->n_experts);
    for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
        float v = logit[ie] + bias[ie];
        if (!isfinite(v)) return ie;
        if (n == sh->top_k && !(v > best[n - 1])) continue;
        uint32_t at = n < sh->top_k ? n++ : n - 1;
        for (; at > 0 && v > best[at - 1]; at--) {
            best[at] = best[at - 1];
            id[at] = id[at - 1];
        }
        best[at] = v;
        id[at] = ie;
    }
    for (uint32_t i = 1; i < n; i++) /* into ascending id order */
        for (uint32_t j = i; j > 0 && id[j] < id[j - 1]; j--) {
            uint32_t swap = id[j];
            id[j] = id[j - 1];
            id[j - 1] = swap;
        }
    float total = logit[id[0]];
    for (uint32_t i = 1; i < n; i++) total = total + logit[id[i]];
    for (uint32_t i = 0; i < n; i++) w[i] = (logit[id[i]] / (total + 1e-20f)) * sh->routed_scale;
    return -1;
}

static void router_row(void *ctx, size_t t, int i_thread) {
    const head_loop *l = ctx;
    const step *st = l->st;
    const k3_shape *sh = &st->e->sh;
    const pair_bufs *b = &st->b->pair;
    size_t row = st->t0 + t;
    (void)i_thread;
    if (!span_is_alive(row_span(st, row))) return;
    int64_t ie =
        route(st->k, sh, st->b->moe.router + t * sh->n_experts, st->e->layers[l->il].v[T_ROUTER_BIAS],
              b->pick + row * sh->top_k, b->pick_w + row * sh->top_k);
    b->is_bad[row] = ie >= 0;
    if (ie >= 0) b->pick[row * sh->top_k] = (uint32_t)ie; /* for who says so */
}

/* Choose the experts of each row of the part. */
static int router(step *st, uint32_t il) {
    const k3_shape *sh = &st->e->sh;
    const pair_bufs *b = &st->b->pair;
    loop_run(st->e, K3_PART_ROW, st->T, 4 * sh->n_experts, router_row, &(head_loop){st, il});
    for (size_t row = st->t0; row < st->t0 + st->T; row++) {
        const pass_span *x = row_span(st, row);
        if (!span_is_alive(x)) continue;
        if (b->is_bad[row])
            span_fail(x, K3_ENUMERIC,
                      "layer %u, router: the score of expert %u at position %llu is NaN or infinite", il,
                      b->pick[row * sh->top_k], (unsigned long long)row_pos(x, row));
        else if (x->s->route)
            x->s->route(x->s->route_user, row_pos(x, row), il, sh->top_k, b->pick + row * sh->top_k,
                        b->pick_w + row * sh->top_k);
    }
    return pass_check(st);
}

/* ==== 11. Experts ====================================================================
 *
 * The chunk's (position, expert) pairs are sorted by expert, so that each distinct expert is read
 * once. Reads begin the moment the router has spoken; what is here is computed at once, the rest as
 * it arrives. Each pair's output is weighted, rounded to steps of 2^-40 and added as an integer:
 * the sum does not depend on who computed what, in which order (NUMERICS 5).
 *
 * What becomes of a routed expert, once in each layer:
 *
 *     in a slot, or being read into one ------------------------> slot
 *     held by a box: is_far ---- answered ----------------------> is_computed: its terms are in Q
 *                         |         `-- in a layer of audits ---> is_audit, then queue[]: both do it
 *                         `----- late, or missing there --------> queue[]
 *     neither ---------------------------------------------------> queue[]
 *     queue[] ---- a slot is free: read -------------------------> slot
 *     slot ------- arrived: computed ----------------------------> is_computed
 */

/* Sort the picks of the pass by expert, without the rows of sessions that have ended. Returns the number of distinct
 * experts; n_of[] becomes each expert's number of pairs. */
static uint32_t experts_sort(step *st) {
    const k3_shape *sh = &st->e->sh;
    struct scratch *b = st->b;
    const pair_bufs *p = &b->pair;
    uint32_t n = 0, first = 0;
    memset(b->n_of, 0, sh->n_experts * sizeof *b->n_of);
    for (size_t row = 0; row < st->p->n_rows; row++) {
        p->is_bad[row] = !span_is_alive(row_span(st, row));
        for (uint32_t j = 0; !p->is_bad[row] && j < sh->top_k; j++) b->n_of[p->pick[row * sh->top_k + j]]++;
    }
    for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
        if (b->n_of[ie] == 0) continue;
        b->routed[n] = (routed){.ie = ie, .task.first = first};
        first += b->n_of[ie];
        b->n_of[ie] = n++; /* for now: the expert's place in routed[] */
    }
    for (size_t i = 0; i < st->p->n_rows * sh->top_k; i++) {
        if (p->is_bad[i / sh->top_k]) continue;
        routed *r = &b->routed[b->n_of[p->pick[i]]];
        p->pair_t[r->task.first + r->task.n] = (uint32_t)(i / sh->top_k);
        p->pair_w[r->task.first + r->task.n++] = p->pick_w[i];
        r->weight += p->pick_w[i];
    }
    memset(b->n_of, 0, sh->n_experts * sizeof *b->n_of);
    for (uint32_t x = 0; x < n; x++) b->n_of[b->routed[x].ie] = b->routed[x].task.n;
    return n;
}

/* Compute the pinned experts of batch[] and add them to Q. */
static int experts_compute(step *st, uint32_t il, uint32_t n_batch) {
    const k3_engine *e = st->e;
    const k3_shape *sh = &e->sh;
    const struct scratch *b = st->b;
    const moe_bufs *m = &b->moe;
    const pair_bufs *p = &b->pair;
    bool has_bad = false;
    expert_batch all = {.format = FORMAT,
                        .math = {st->k, sh->latent, sh->expert_inter, sh->situ_beta, sh->situ_linear_beta},
                        .pool = e->pool,
                        .n_threads = e->n_threads,
                        .n_rows = st->p->n_rows,
                        .z = p->z,
                        .zp = m->zp,
                        .pair_row = p->pair_t,
                        .pair_w = p->pair_w,
                        .Q = p->Q,
                        .is_bad = p->is_bad,
                        .zpair = m->zpair,
                        .hpair = m->hpair,
                        .local = b->local,
                        .local_floats = b->local_floats};
    for (uint32_t x = 0; x < n_batch; x++) b->task[x] = &b->batch[x]->task;
    uint64_t start = e->opt.is_timed ? clock_ns() : 0, busy = pool_busy_ns(e->pool);
    experts_batch(&all, b->task, n_batch);
    if (start) part_note(st->e, K3_PART_EXPERT, start, busy);
    for (uint32_t x = 0; x < n_batch; x++) {
        const expert_task *t = &b->batch[x]->task;
        has_bad = has_bad || t->bad_row != UINT64_MAX;
        for (uint32_t j = 0; t->bad_row != UINT64_MAX && j < t->n; j++) {
            uint32_t row = p->pair_t[t->first + j];
            if (p->is_bad[row])
                span_fail(row_span(st, row), K3_ENUMERIC,
                          "layer %u, expert %u: output %llu is NaN or not below 2^17 in size", il,
                          b->batch[x]->ie, (unsigned long long)t->bad_row);
        }
    }
    return has_bad ? pass_check(st) : 0;
}

/* ---- Far boxes ----
 *
 * What is not here, and a box has it in memory, is asked of the box in place of the disk
 * (tier_client.c). Its sums are added to Q like our own; what does not come before reading and
 * computing it here would have taken as long is read and computed here after all. So boxes change
 * how long a layer takes, and never its bits. What is here stays here: a hop costs more than a
 * resident expert (docs/PERFORMANCE.md). */

/* A layer begins; what boxes have to say is passed on. */
static void far_begin(step *st) {
    const k3_options *o = &st->e->opt;
    char line[512];
    st->n_far = st->far_pairs = st->n_audit = 0;
    st->is_audit = st->is_unseen = false;
    st->i_audit = -1;
    st->is_timed = st->e->far != NULL;
    if (!st->e->far) return;
    st->begun_ns = clock_ns();
    tier_begin(st->e->far);
    while (tier_note(st->e->far, line, sizeof line))
        if (o->note) o->note(o->user, line);
}

/* An expert that is not here: does a box take it? */
static bool far_ask(step *st, uint32_t il, routed *r) {
    tier *far = st->e->far;
    const pair_bufs *b = &st->b->pair;
    if (!far) return false;
    r->is_far = tier_ask(far, il, r->ie, r->task.n, b->pair_t + r->task.first,
                         b->pair_w + r->task.first);
    if (!r->is_far) tier_wish(far, il, r->ie);
    st->n_far += r->is_far;
    st->far_pairs += r->is_far ? r->task.n : 0;
    st->is_timed = st->is_timed && !r->is_far;
    return r->is_far;
}

/* What one box says, where it is computed here too. */
static int64_t *far_sums(const k3_engine *e, uint32_t i_box) {
    return e->far_sums + (size_t)i_box * e->far_rows * e->sh.latent;
}

#define FAR_MOST_NS 10000000000ull /* no box is waited for longer, whatever the disk costs */

/* Is this layer one that is computed here as well? The numbers come from the system's random source, so that
 * no box can foretell them. Without that source, and once a box was caught lying, every layer is. */
static bool far_draw(k3_engine *e) {
    if (!e->far_sums) return false;
    if (e->stats.far_lies > 0) return true;
    if (e->n_far_dice == 0 &&
        getrandom(e->far_dice, sizeof e->far_dice, 0) != (ssize_t)sizeof e->far_dice)
        return true;
    if (e->n_far_dice == 0) e->n_far_dice = sizeof e->far_dice / sizeof *e->far_dice;
    return e->far_dice[--e->n_far_dice] % e->opt.tier_audit == 0;
}

/* z is there: all boxes are sent their parts. They may take as long as we would. */
static void far_send(step *st) {
    k3_engine *e = st->e;
    if (st->n_far == 0) return;
    uint64_t here = (uint64_t)(st->n_far * e->disk_ns + st->far_pairs * e->pair_ns),
             least = e->opt.tier_wait_us * 1000ull;
    if (here > FAR_MOST_NS) here = FAR_MOST_NS;
    st->is_audit = far_draw(e);
    for (uint32_t i = 0; st->is_audit && i < e->n_far_boxes; i++)
        memset(far_sums(e, i), 0, st->p->n_rows * e->sh.latent * sizeof *e->far_sums);
    e->stats.far_audits += st->is_audit;
    tier_send(e->far, st->b->pair.z, clock_ns() + (here > least ? here : least));
}

/* Slots that are empty fill up with what boxes serve, one at a time and when the disk is asked for
 * nothing else: what is here is computed sooner than a box answers. */
static void far_fill(step *st, uint32_t il) {
    k3_engine *e = st->e;
    store *s = &e->store;
    slot *last = e->far_fill;
    const routed *best = NULL;
    if (last && last->is_fill && last->state == SLOT_READING) {
        if (last->is_pinned || slot_is_busy(e, last)) return; /* pinned: this layer waits for it */
        for (int i = 0; i < last->n_reqs; i++)
            if (last->req[i].state == IO_FAILED) { /* not asked for: no error */
                s->n_held[last->il - e->sh.n_dense]--;
                store_drop(e, last);
                e->far_fill = NULL;
                return;
            }
    }
    if (st->n_far == 0 || s->n_free == 0 || s->n_held[il - e->sh.n_dense] >= s->quota) return;
    for (uint32_t x = 0; x < st->n_routed; x++) {
        const routed *r = &st->b->routed[x];
        if (r->is_far && (!best || r->weight > best->weight)) best = r;
    }
    if (!best || !store_fetch(e, il, best->ie, IO_GUESS)) return;
    e->far_fill = store_find(e, il, best->ie);
    e->far_fill->is_guess = false;
    e->far_fill->is_fill = true;
    s->n_held[il - e->sh.n_dense]++;
}

/* What a box was asked for is in Q, or must be read after all. */
static void far_settled(void *user, uint32_t ie, int box) {
    step *st = user;
    uint32_t lo = 0, hi = st->n_routed - 1;
    while (lo < hi) { /* routed[] is sorted by id */
        uint32_t mid = (lo + hi) / 2;
        if (st->b->routed[mid].ie < ie)
            lo = mid + 1;
        else
            hi = mid;
    }
    routed *r = &st->b->routed[lo];
    r->is_far = false;
    r->box = box;
    r->is_audit = box >= 0 && st->is_audit;
    r->is_computed = box >= 0 && !st->is_audit;
    st->is_unseen = st->is_unseen || r->is_computed;
    st->n_audit += r->is_audit;
    st->n_far--;
    if (box < 0) st->b->queue[st->n_queue++] = lo;
}

/* Take what boxes have answered; with `waits`, until all is settled. Returns how many are done. */
static uint32_t far_join(step *st, bool waits) {
    uint32_t n_far = st->n_far, n_rest = st->n_queue + st->n_audit;
    const k3_engine *e = st->e;
    int64_t *Q = st->is_audit ? e->far_sums : st->b->pair.Q;
    size_t apart = st->is_audit ? (size_t)e->far_rows * e->sh.latent : 0;
    if (n_far > 0) tier_join(e->far, waits, Q, apart, far_settled, st);
    return n_far - st->n_far - (st->n_queue + st->n_audit - n_rest);
}

/* One box's experts are all in Q, computed here. Not what it should have become? Then it lied. */
static void far_compare(step *st) {
    const k3_engine *e = st->e;
    size_t n = st->p->n_rows * e->sh.latent * sizeof *e->far_sums;
    if (st->i_audit < 0 || memcmp(far_sums(e, (uint32_t)st->i_audit), st->b->pair.Q, n) == 0) return;
    tier_ban(e->far, (uint32_t)st->i_audit);
    st->e->stats.far_lies++;
}

/* K3_ECHECK when a box was caught lying and this session used answers that nobody compared. */
static int far_trust(const k3_session *s, k3_error *err) {
    if (!s->is_unverified || s->e->stats.far_lies == 0) return 0;
    return fail(err, K3_ECHECK,
                "a far box gives wrong expert sums and is not asked again; earlier layers used answers "
                "that were not compared, so text and state may be wrong: begin again, without that box "
                "or comparing every answer");
}

/* All is in Q but what boxes answered. Box after box: what Q must become with its sums is known, now
 * compute its experts here. One at a time, so that it is known which of them lied. */
static void far_audit(step *st) {
    const struct scratch *b = st->b;
    far_compare(st);
    st->i_audit = -1;
    for (uint32_t x = 0; x < st->n_routed; x++) {
        routed *r = &b->routed[x];
        if (!r->is_audit || (st->i_audit >= 0 && r->box != st->i_audit)) continue;
        st->i_audit = r->box;
        b->queue[st->n_queue++] = x;
        r->is_audit = false;
        st->n_audit--;
    }
    int64_t *said = far_sums(st->e, (uint32_t)st->i_audit);
    for (size_t i = 0; i < st->p->n_rows * st->e->sh.latent; i++) said[i] += b->pair.Q[i];
}

/* All sums of an audited layer are computed here, so this layer is right: ban boxes that said otherwise. An
 * earlier layer of an unverified session may have used wrong answers, which nothing can mend afterwards. */
static int far_judge(step *st, uint32_t il) {
    far_compare(st);
    for (uint32_t i = 0; i < st->p->n_spans; i++) {
        const pass_span *x = &st->p->spans[i];
        k3_error why;
        x->s->is_unverified = x->s->is_unverified || st->is_unseen;
        if (far_trust(x->s, &why) < 0)
            span_fail(x, K3_ECHECK, "layer %u at position %llu: %s", il, (unsigned long long)x->pos, why.text);
    }
    return pass_check(st);
}

/* The mean with one more sample in it. A program that was stopped for an hour learns nothing by it. */
static double far_learn(double mean, double sample) {
    if (mean <= 0) return sample;
    return 0.8 * mean + 0.2 * (sample < 8 * mean ? sample : 8 * mean);
}

/* A layer's last expert from disk is here: what one costs, when all came from there. */
static void far_time_disk(step *st) {
    if (!st->is_timed || st->n_queue == 0) return;
    double ns = (double)(clock_ns() - st->begun_ns) / st->n_queue;
    st->e->disk_ns = far_learn(st->e->disk_ns, ns);
}

static void far_time_pairs(step *st, uint64_t start, uint32_t n_batch) {
    uint32_t n = 0;
    if (!st->e->far) return;
    for (uint32_t x = 0; x < n_batch; x++) n += st->b->batch[x]->task.n;
    double ns = (double)(clock_ns() - start) / n;
    st->e->pair_ns = far_learn(st->e->pair_ns, ns);
}

static uint64_t far_sums_bytes(const k3_engine *e) {
    return (uint64_t)e->n_far_boxes * e->far_rows * e->sh.latent * sizeof *e->far_sums;
}

static int far_open(k3_engine *e, k3_error *err) {
    const k3_shape *sh = &e->sh;
    const k3_options *o = &e->opt;
    char why[400];
    if (!o->tiers || !o->tiers[0] || o->headers_only || sh->n_dense == sh->n_layers) return 0;
    k3_fingerprints print;
    int rc = k3_expert_fingerprints(e, &print, err);
    if (rc < 0) return rc;
    tier_model m = {K3_NUMERICS_ID, print.sampled, print.by_sums,    sh->n_layers, sh->n_dense,
                    sh->n_experts,  sh->latent,    sh->expert_inter, sh->top_k};
    e->far_rows = o->chunk ? (uint32_t)o->chunk : TIER_MAX_ROWS;
    tier_options to = {.boxes = o->tiers,
                       .key_file = o->tier_key,
                       .spin_us = o->spin_us,
                       .max_rows = e->far_rows,
                       .is_hedging = o->tier_hedge,
                       .trust = {o->tier_ca, o->tier_cert, o->tier_cert_key, "--tier"}};
    e->far_bytes = tier_bytes(&m, &to);
    e->far_block = ledger_take(&e->mem, e->far_bytes, "frames of far boxes", err);
    if (!e->far_block) return e->mem.why;
    if (tier_open(&e->far, &m, &to, e->far_block, why, sizeof why) < 0)
        return fail(err, K3_EUSAGE, "%s", why);
    e->disk_ns = (double)sh->expert_bytes; /* 1 GB/s, until a layer says */
    if (o->tier_audit == 0) return 0;
    while (o->tiers[e->n_far_boxes]) e->n_far_boxes++;
    e->far_sums = ledger_take(&e->mem, far_sums_bytes(e), "answers of far boxes", err);
    return e->far_sums ? 0 : e->mem.why;
}

/* All is loaded: what the disk gives is known, and boxes had time to answer, with a real model. */
static void far_ready(k3_engine *e) {
    if (!e->far) return;
    if (e->plan.disk_bytes_per_s > 0)
        e->disk_ns = 1e9 * (double)e->sh.expert_bytes / e->plan.disk_bytes_per_s;
    tier_wait(e->far, 300);
}

static void far_close(k3_engine *e) {
    tier_close(e->far);
    ledger_give(&e->mem, e->far_block, e->far_bytes);
    ledger_give(&e->mem, e->far_sums, far_sums_bytes(e));
}

/* ---- Here ---- */

/* Pin what is here or on its way; queue the rest by place in the files. Returns how many are
 * queued. */
static uint32_t experts_pin(step *st, uint32_t il, uint32_t n_routed) {
    k3_engine *e = st->e;
    struct scratch *b = st->b;
    uint32_t n_queue = 0;
    for (uint32_t x = 0; x < n_routed; x++) {
        routed *r = &b->routed[x];
        r->slot = store_find(e, il, r->ie);
        if (r->slot) {
            r->slot->is_pinned = true;
            for (int i = 0; r->slot->state == SLOT_READING && i < r->slot->n_reqs; i++)
                disk_raise(&e->io, &r->slot->req[i], false);
            e->stats.expert_hits += r->slot->state == SLOT_FULL;
            continue;
        }
        if (far_ask(st, il, r)) continue;
        const expert_place *at = model_expert(&e->files, &e->sh, il, r->ie);
        uint32_t q = n_queue++; /* insertion: usually 16, in no order */
        for (; q > 0; q--) {
            const expert_place *o =
                model_expert(&e->files, &e->sh, il, b->routed[b->queue[q - 1]].ie);
            if (o->shard[0] < at->shard[0] ||
                (o->shard[0] == at->shard[0] && o->offset[0] < at->offset[0]))
                break;
            b->queue[q] = b->queue[q - 1];
        }
        b->queue[q] = x;
    }
    return n_queue;
}

/* Collect what has arrived and was not computed yet into batch[], as many pairs as scratch has room
 * for. Returns the number of experts, or an error. */
static int experts_collect(step *st, uint32_t n_routed) {
    struct scratch *b = st->b;
    uint32_t n_pairs = 0;
    int n_batch = 0;
    for (uint32_t x = 0; x < n_routed; x++) {
        routed *r = &b->routed[x];
        if (!r->slot || r->is_computed || n_pairs + r->task.n > b->max_pairs) continue;
        int rc = store_arrived(st->e, r->slot, &r->task.view, st->err);
        if (rc < 0) return rc;
        if (rc == 0) continue;
        r->task.at = n_pairs;
        n_pairs += r->task.n;
        b->batch[n_batch++] = r;
    }
    return n_batch;
}

/* Does it make sense to look ahead at layer il? Not where all of its experts are here. */
static bool ahead_is_useful(const step *st, uint32_t il) {
    const k3_engine *e = st->e;
    const k3_shape *sh = &e->sh;
    if (e->opt.no_look_ahead || il >= sh->n_layers || il < sh->n_dense || sh->n_dense == sh->n_layers)
        return false;
    return e->layers[il].m[T_ROUTER] && e->store.n_held[il - sh->n_dense] < sh->n_experts;
}

/* List what the router of layer il says of the inputs of the layer before it, T positions, the experts
 * with the most weight first: ahead[i_ahead .. n_ahead). Measured elsewhere on K3, for one position:
 * right for 92 % of the first choices and 59 % of all 16. */
static void ahead_list(step *st, uint32_t il) {
    const k3_engine *e = st->e;
    const k3_shape *sh = &e->sh;
    struct scratch *b = st->b;
    float *logit = b->moe.router; /* this layer has been routed already */
    st->n_ahead = st->i_ahead = 0;
    if (!ahead_is_useful(st, il)) return;
    linear_resident(st, il, st->T, &(job){logit, T_ROUTER, b->xp}, 1);
    memset(b->guess, 0, sh->n_experts * sizeof *b->guess);
    for (size_t t = 0; t < st->T; t++) {
        uint32_t id[K3_MAX_TOP_K];
        float w[K3_MAX_TOP_K];
        if (!span_is_alive(row_span(st, st->t0 + t))) continue;
        if (route(st->k, sh, logit + t * sh->n_experts, e->layers[il].v[T_ROUTER_BIAS], id, w) >= 0)
            continue; /* the step itself will say so, if it is still there */
        for (uint32_t i = 0; i < sh->top_k; i++) b->guess[id[i]] += w[i];
    }
    for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
        if (b->guess[ie] <= 0 || store_find(e, il, ie) || (e->far && tier_has(e->far, il, ie)))
            continue;
        uint32_t at = st->n_ahead++;
        for (; at > 0 && b->guess[ie] > b->guess[b->ahead[at - 1]]; at--)
            b->ahead[at] = b->ahead[at - 1];
        b->ahead[at] = ie;
    }
}

/* While the disk would be idle: read ahead as many of the list as there are free slots. A guess that is
 * right saves a wait, a wrong one only wastes idle time. */
static void ahead_fetch(step *st, uint32_t il) {
    k3_engine *e = st->e;
    store *s = &e->store;
    for (; st->i_ahead < st->n_ahead && s->n_free > 0; st->i_ahead++) {
        uint32_t i_slot = s->free[s->n_free - 1];
        if (!store_fetch(e, il, st->b->ahead[st->i_ahead], IO_GUESS)) return;
        s->guess[s->n_guess++] = i_slot;
        e->stats.guesses++;
    }
}

/* Ask for as many of the queued experts as there are slots. */
static void experts_fetch(step *st, uint32_t il) {
    struct scratch *b = st->b;
    for (; st->i_queue < st->n_queue; st->i_queue++) {
        routed *r = &b->routed[b->queue[st->i_queue]];
        slot *s = store_find(st->e, il, r->ie); /* on its way already (far_fill)? */
        if (!s && !store_fetch(st->e, il, r->ie, IO_DEMAND)) return;
        for (int i = 0; s && s->state == SLOT_READING && i < s->n_reqs; i++)
            disk_raise(&st->e->io, &s->req[i], false);
        r->slot = store_find(st->e, il, r->ie);
        r->slot->is_pinned = true;
    }
}

/* The router has spoken: the disk begins, before anything else is computed. */
static void experts_begin(step *st, uint32_t il) {
    store_cool(st->e, il);
    far_begin(st);
    st->n_routed = experts_sort(st);
    st->n_queue = experts_pin(st, il, st->n_routed);
    st->i_queue = 0;
    store_settle_guesses(st->e, il, st->b->n_of);
    st->e->stats.expert_uses += st->n_routed;
    experts_fetch(st, il);
}

/* Q = the weighted expert sum of every row of the pass. */
static int experts(step *st, uint32_t il) {
    k3_engine *e = st->e;
    struct scratch *b = st->b;
    bool has_listed = false;
    memset(b->pair.Q, 0, st->p->n_rows * e->sh.latent * sizeof *b->pair.Q);
    for (uint32_t n_left = st->n_routed; n_left > 0;) {
        uint64_t seen = disk_changes(&e->io);
        experts_fetch(st, il);
        if (st->i_queue == st->n_queue && !has_listed) {
            has_listed = true;
            ahead_list(st, il + 1);
            if (e->far) far_fill(st, il);
        }
        if (st->i_queue == st->n_queue) ahead_fetch(st, il + 1);
        uint32_t n_queue = st->n_queue;
        n_left -= far_join(st, n_left == st->n_far + st->n_audit);
        if (st->n_audit > 0 && n_left == st->n_audit) far_audit(st);
        if (st->n_queue > n_queue) continue; /* to be read after all */
        int n_batch = experts_collect(st, st->n_routed), rc;
        if (n_batch < 0) return n_batch;
        if (n_batch == 0 && n_left == st->n_far + st->n_audit) continue;
        if (n_batch == 0) {
            if ((rc = step_progress(st, il)) < 0) return rc;
            disk_wait_change(&e->io, seen);
            continue;
        }
        if (n_left - st->n_far == (uint32_t)n_batch) far_time_disk(st);
        uint64_t start = e->far ? clock_ns() : 0;
        if ((rc = experts_compute(st, il, (uint32_t)n_batch)) < 0) return rc;
        far_time_pairs(st, start, (uint32_t)n_batch);
        for (int x = 0; x < n_batch; x++) {
            routed *r = b->batch[x];
            r->is_computed = true;
            r->slot->heat += r->weight;
            r->slot->tick = e->store.tick;
            r->slot->is_pinned = false;
        }
        n_left -= (uint32_t)n_batch;
        store_trim(e, il); /* room for what is queued, then for the next layer */
    }
    if (has_listed) ahead_fetch(st, il + 1);
    store_trim(e, il);
    return far_judge(st, il);
}

/* r = Q as floats, for one row. */
static void moe_sum_row(void *ctx, size_t t, int i_thread) {
    const step *st = ctx;
    size_t lat = st->e->sh.latent;
    (void)i_thread;
    st->k->q40_f32(st->b->moe.r + t * lat, st->b->pair.Q + (st->t0 + t) * lat, lat);
}

/* f = f + shared(x), for one row. */
static void moe_add_row(void *ctx, size_t t, int i_thread) {
    const step *st = ctx;
    size_t H = st->e->sh.hidden;
    (void)i_thread;
    st->k->add(st->b->f + t * H, st->b->pair.up + (st->t0 + t) * H, H);
}

/* K3-SPEC 3.5 up to the experts: each row's choice, z = down(x) and shared(x). After the last part the pass's experts
 * are asked for before anything else is computed. */
static int moe_begin(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const moe_bufs *b = &st->b->moe;
    const pair_bufs *p = &st->b->pair;
    size_t T = st->T, lat = e->sh.latent, H = e->sh.hidden;
    bool is_last = st->t0 + T == st->p->n_rows;
    const float *xp = st->b->xp;
    int rc = linear(st, il, T, &(job){b->router, T_ROUTER, xp}, 1);
    if (rc < 0 || (rc = router(st, il)) < 0) return rc;
    if (is_last) experts_begin(st, il);
    const job in[] = {{p->z + st->t0 * lat, T_LAT_DOWN, xp}, {b->sg, T_SH_GATE, xp}, {b->su, T_SH_UP, xp}};
    int n_first = is_last && st->n_far > 0 ? 1 : 3; /* boxes are waiting for z */
    if ((rc = linear(st, il, T, in, n_first)) < 0) return rc;
    if (is_last) far_send(st);
    if ((rc = linear(st, il, T, in + n_first, 3 - n_first)) < 0) return rc;
    situ_pack_rows(e, T, b->shp, b->sg, b->su, e->sh.shared_inter);
    return linear(st, il, T, &(job){p->up + st->t0 * H, T_SH_DOWN, b->shp}, 1);
}

/* The experts of all parts. */
static int moe_experts(step *st, uint32_t il) {
    if (st->p->n_rows == 1) pack_rows(st->e, 1, st->b->moe.zp, st->b->pair.z, st->e->sh.latent, st->e->sh.latent);
    return experts(st, il);
}

/* f = up(rms(r)) + shared(x), r the experts' sum. */
static int moe_end(step *st, uint32_t il) {
    k3_engine *e = st->e;
    const moe_bufs *b = &st->b->moe;
    size_t T = st->T, lat = e->sh.latent;
    loop_run(e, K3_PART_ROW, T, lat / 4, moe_sum_row, st);
    rms_pack_rows(e, T, b->rp, b->r, lat, e->layers[il].v[T_LAT_NORM], lat, e->sh.rms_eps);
    int rc = linear(st, il, T, &(job){st->b->f, T_LAT_UP, b->rp}, 1);
    if (rc < 0) return rc;
    loop_run(e, K3_PART_ROW, T, e->sh.hidden / 8, moe_add_row, st);
    return 0;
}

/* f = down(SiTU(gate x, up x)): the dense MLP of the first layers. */
static int dense(step *st, uint32_t il) {
    const dense_bufs *b = &st->b->dense;
    const job in[] = {{b->g, T_GATE, st->b->xp}, {b->u, T_UP, st->b->xp}};
    int rc = linear(st, il, st->T, in, 2);
    if (rc < 0) return rc;
    situ_pack_rows(st->e, st->T, b->hp, b->g, b->u, st->e->sh.dense_inter);
    return linear(st, il, st->T, &(job){st->b->f, T_DOWN, b->hp}, 1);
}

/* ==== 12. AttnRes, one layer, head ===================================================
 *
 * There is no ordinary residual. P is the running sum of sublayer outputs since the last block
 * boundary; every sublayer reads a softmax mix of the finished blocks and P.
 */

/* out = MIX(blocks, P; u) for row t of the part (K3-SPEC 3.1). out must not be P. */
static void mix(const step *st, size_t t, const float *u, float *out) {
    const k3_kernels *k = st->k;
    size_t H = st->e->sh.hidden, n = st->n_blocks;
    const float *P = row_P(st, t);
    if (n == 0) {
        memcpy(out, P, H * sizeof *out);
        return;
    }
    float p[K3_MAX_LAYERS + 1];
    for (size_t j = 0; j <= n; j++) {
        const float *V = j < n ? row_block(st, j, t) : P;
        p[j] = k->dot(V, u, H) * rms_scale(k, V, H, st->e->sh.rms_eps);
    }
    float m = p[0];
    for (size_t j = 1; j <= n; j++) m = p[j] > m ? p[j] : m;
    float total = 0.0f;
    for (size_t j = 0; j <= n; j++) {
        p[j] = k3_exp(p[j] - m);
        total = j == 0 ? p[0] : total + p[j];
    }
    for (size_t j = 0; j <= n; j++) {
        const float *V = j < n ? row_block(st, j, t) : P;
        if (j == 0)
            k->scale(out, V, p[0] / total, H);
        else
            k->axpy(out, p[j] / total, V, H);
    }
}

/* The work of a loop over the part's rows, or over those that `at` lists. */
typedef struct {
    const step *st;
    const uint32_t *at; /* rows of the part; NULL: all of them */
    size_t n_rows;
    const float *u, *norm;
    bool is_first;
    uint32_t il;
} pos_loop;

static void mix_pack_row(void *ctx, size_t i, int i_thread) {
    const pos_loop *l = ctx;
    const step *st = l->st;
    size_t H = st->e->sh.hidden;
    float *x = st->b->x + i * H;
    (void)i_thread;
    mix(st, l->at ? l->at[i] : i, l->u, x);
    rms(st->k, x, l->norm, H, st->e->sh.rms_eps);
    st->k->pack(st->b->xp, l->n_rows, i, x, H);
}

/* xp = packed rms(MIX(blocks, P; u); norm): the input of a sublayer, for the part's rows, or n_rows that are listed. */
static void mix_pack_rows(const step *st, const uint32_t *at, size_t n_rows, const float *u,
                          const float *norm) {
    pos_loop l = {.st = st, .at = at, .n_rows = n_rows, .u = u, .norm = norm};
    loop_run(st->e, K3_PART_ROW, n_rows, (st->n_blocks + 2) * st->e->sh.hidden / 2, mix_pack_row, &l);
}

static void residual_row(void *ctx, size_t t, int i_thread) {
    const pos_loop *l = ctx;
    size_t H = l->st->e->sh.hidden;
    float *P = row_P(l->st, t);
    (void)i_thread;
    if (l->is_first)
        memcpy(P, l->st->b->f + t * H, H * sizeof *P);
    else
        l->st->k->add(P, l->st->b->f + t * H, H);
}

/* P = P + f, or P = f just after a push. */
static void residual(const step *st, bool is_first) {
    pos_loop l = {.st = st, .is_first = is_first};
    loop_run(st->e, K3_PART_ROW, st->T, st->e->sh.hidden / 8, residual_row, &l);
}

/* The part's rows of P become block n_blocks, which counts once all parts have it. */
static void push_block(const step *st) {
    memcpy(row_block(st, st->n_blocks, 0), row_P(st, 0), st->T * st->e->sh.hidden * sizeof(float));
}

static void layer_check_row(void *ctx, size_t t, int i_thread) {
    const pos_loop *l = ctx;
    const step *st = l->st;
    size_t H = st->e->sh.hidden, row = st->t0 + t;
    const float *P = row_P(st, t);
    (void)i_thread;
    st->b->pair.is_bad[row] = !st->k->is_finite(P, H);
    if (row_span(st, row)->s->trace)
        st->b->rows.trace[(st->p->at + row) * st->e->sh.n_layers + l->il] =
            k3_fnv1a(K3_FNV_BASIS, P, H * sizeof *P);
}

/* P is finite in every row, or its session ends; with tracing on, its hash is kept. */
static int layer_check(step *st, uint32_t il) {
    pos_loop l = {.st = st, .il = il};
    loop_run(st->e, K3_PART_ROW, st->T, st->e->sh.hidden / 8, layer_check_row, &l);
    for (size_t row = st->t0; row < st->t0 + st->T; row++) {
        const pass_span *x = row_span(st, row);
        if (st->b->pair.is_bad[row])
            span_fail(x, K3_ENUMERIC, "layer %u: the residual at position %llu is NaN or infinite", il,
                      (unsigned long long)row_pos(x, row));
    }
    return pass_check(st);
}

/* Hand out the part's rows after layer il to sessions that have a tap there. */
static void layer_taps(const step *st, uint32_t il) {
    for (uint32_t i = 0; i < st->n_cuts; i++) {
        const k3_session *s = st->cuts[i].x->s;
        for (uint32_t j = 0; s->on_tap && j < s->n_taps; j++) {
            for (size_t t = st->cuts[i].t, n = 0; s->tap[j] == il && n < st->cuts[i].n; t++, n++) {
                float *x = s->taps_mix ? st->b->x : row_P(st, t);
                if (s->taps_mix) mix(st, t, st->e->layers[il + 1].u_att, x);
                s->on_tap(s->tap_user, st->cuts[i].pos + n, j, x);
            }
        }
    }
}

/* One part through the first half of a layer and, where it is dense, through the second; up to the experts where it is
 * not. As K3-SPEC 3.0 writes it. */
static int layer_part(step *st, uint32_t il) {
    const k3_shape *sh = &st->e->sh;
    const layer *ly = &st->e->layers[il];
    bool is_push = il % sh->block_size == 0, is_dense = il < sh->n_dense;
    uint32_t n_blocks = st->n_blocks;
    int rc;

    mix_pack_rows(st, NULL, st->T, ly->u_att, ly->v[T_IN_NORM]); /* x = rms(MIX(blocks, P))  */
    if (is_push) push_block(st);                                 /* the raw P, not x         */
    rc = sh->is_mla[il] ? mla(st, il) : kda(st, il);             /* f = attention(x)         */
    if (rc < 0) return rc;
    residual(st, is_push);                                       /* P = f, or P + f          */

    st->n_blocks += is_push;
    mix_pack_rows(st, NULL, st->T, ly->u_mlp, ly->v[T_POST_NORM]);
    st->n_blocks = n_blocks;
    rc = is_dense ? dense(st, il) : moe_begin(st, il);           /* f = FFN(x), or its begin */
    if (rc == 0 && is_dense) residual(st, false);                /* P = P + f                */
    return rc;
}

/* One layer over all parts of the pass. */
static int forward_layer(step *st, uint32_t il) {
    const k3_shape *sh = &st->e->sh;
    const k3_pass *p = st->p;
    bool is_dense = il < sh->n_dense;
    int rc = 0;
    for (size_t t0 = 0; rc == 0 && t0 < p->n_rows; t0 += st->T) {
        part_begin(st, t0, part_rows(p, t0));
        rc = layer_part(st, il);
    }
    st->n_blocks += il % sh->block_size == 0;
    if (rc == 0 && !is_dense) rc = moe_experts(st, il);
    for (size_t t0 = 0; rc == 0 && t0 < p->n_rows; t0 += st->T) {
        part_begin(st, t0, part_rows(p, t0));
        if (!is_dense && (rc = moe_end(st, il)) == 0) residual(st, false); /* P = P + f */
        if (rc == 0) rc = layer_check(st, il);
        if (rc == 0) layer_taps(st, il);
    }
    return rc;
}

/* The rows whose logits are wanted, up to a part of them from number *at on: row_at[] and to[]. */
static size_t head_list(const step *st, size_t *at) {
    size_t n = 0, seen = 0, V = st->e->sh.vocab_size;
    for (uint32_t i = 0; i < st->p->n_spans; i++) {
        const pass_span *x = &st->p->spans[i];
        size_t first = x->row + x->n - x->n_logits;
        for (size_t j = 0; j < x->n_logits; j++, seen++) {
            if (seen < *at || n == st->p->n_part) continue;
            st->b->row_at[n] = (uint32_t)(first + j);
            st->b->to[n++] = x->logits + j * V;
        }
    }
    *at += n;
    return n;
}

/* logits = lm_head . rms(MIX(blocks, P)) of the rows that are wanted. */
static int forward_head(step *st) {
    const k3_shape *sh = &st->e->sh;
    const layer *head = &st->e->layers[sh->n_layers];
    size_t V = sh->vocab_size;
    for (size_t at = 0; at < st->p->n_head;) {
        part_begin(st, 0, 0); /* rows are counted from the pass's first */
        size_t n = head_list(st, &at);
        mix_pack_rows(st, st->b->row_at, n, head->u_att, head->v[T_NORM]);
        int rc = linear(st, sh->n_layers, n, &(job){NULL, T_LM_HEAD, st->b->xp}, 1);
        if (rc < 0) return rc;
        for (size_t i = 0; i < n; i++) {
            const pass_span *x = row_span(st, st->b->row_at[i]);
            if (!st->k->is_finite(st->b->to[i], V))
                span_fail(x, K3_ENUMERIC, "head: a logit at position %llu is NaN or infinite",
                          (unsigned long long)row_pos(x, st->b->row_at[i]));
        }
    }
    return pass_check(st);
}

/* ==== 13. Sampling ===================================================================
 *
 * NUMERICS 6. The draw depends on the logits, the seed and the position alone, so the same seed
 * gives the same text on every machine and however the work was cut.
 *
 * The page sorts all pairs and sums along the sorted row. A vocabulary of 163,840 is not sorted
 * here, with the same sums to the last bit:
 *   - the largest e is 1, so the sum is at least 1 from its first term on, and a term below 2^-24,
 *     half its last place, leaves it as it is;
 *   - while the sum stays between two powers of two, 2^k <= S < 2^(k+1), adding e adds e rounded to
 *     a multiple of S's last place, whatever S is, unless e lies half-way between two multiples.
 *     Such additions are exact and may come in any order.
 * So l are dealt into bins, from the largest down, and only a bin that takes the sum past a power
 * of two, that holds a half-way term, or in which the cut falls, is sorted.
 */
#define SAMPLE_BINS 1024u
#define SAMPLE_FAR  16.7f /* exp(-16.7) and all below is less than 2^-24: the last bin begins */
#define RADIX_BITS  11
#define RADIX_BINS  (1u << RADIX_BITS)
STATIC_ASSERT(a_bin_fits_its_number, SAMPLE_BINS <= UINT16_MAX + 1u);

uint32_t k3_sample_greedy(const float *logits, size_t vocab_size) {
    size_t best = 0;
    uint64_t fp = fp_save();
    fp_default(); /* subnormal logits are no ties */
    for (size_t i = 1; i < vocab_size; i++)
        if (logits[i] > logits[best]) best = i;
    fp_restore(fp);
    return (uint32_t)best;
}

/* l, l dealt into bins, and e of those. */
size_t k3_sample_scratch(size_t vocab_size) { return vocab_size * 3 * sizeof(float); }

/* u in [0, 1), 24 bits of the splitmix64 output number `pos` of stream `seed`. */
static float sample_uniform(uint64_t seed, uint64_t pos) {
    uint64_t x = seed + (pos + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x = x ^ (x >> 31);
    return (float)(x >> 40) * 0x1p-24f;
}

static float sample_max(const float *l, size_t n) {
    enum { N_LANES = 8 };
    float lane[N_LANES], top = l[0];
    size_t i = 0;
    for (int j = 0; j < N_LANES; j++) lane[j] = top;
    for (; i + N_LANES <= n; i += N_LANES)
        for (int j = 0; j < N_LANES; j++) lane[j] = l[i + j] > lane[j] ? l[i + j] : lane[j];
    for (; i < n; i++) lane[0] = l[i] > lane[0] ? l[i] : lane[0];
    for (int j = 0; j < N_LANES; j++) top = lane[j] > top ? lane[j] : top;
    return top;
}

typedef struct {
    const k3_kernels *k;
    float top;
    float *l, *e; /* both [n], in bins; e is exp(l - top)                     */
    size_t n;
    uint32_t at[SAMPLE_BINS + 1]; /* where each bin starts                    */
} sample_row;

/* Deal l[r->n] into bins, the largest first; each bin keeps its order. */
static void sample_deal(sample_row *r, const float *l) {
    uint16_t *bin = (uint16_t *)(void *)r->e;
    uint32_t next[SAMPLE_BINS];
    memset(r->at, 0, sizeof r->at);
    for (size_t i = 0; i < r->n; i++) {
        float x = (r->top - l[i]) * ((float)(SAMPLE_BINS - 1) / SAMPLE_FAR);
        bin[i] = (uint16_t)(int)(x < (float)(SAMPLE_BINS - 1) ? x : (float)(SAMPLE_BINS - 1));
    }
    for (size_t i = 0; i < r->n; i++) r->at[bin[i] + 1]++;
    for (uint32_t b = 0; b < SAMPLE_BINS; b++) {
        next[b] = r->at[b];
        r->at[b + 1] += r->at[b];
    }
    for (size_t i = 0; i < r->n; i++) r->l[next[bin[i]]++] = l[i];
}

/* A number that is the smaller, the larger l is; -0 is +0. */
static uint32_t sample_key(float l) {
    uint32_t bits = k3_f32_bits(l + 0.0f);
    return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}

/* Sort l[n] downwards, a digit of 11 bits of the keys at a time from the last. */
static void sample_radix(float *l, float *spare, size_t n) {
    enum { N_DIGITS = 3 };
    STATIC_ASSERT(digits_cover_a_key, N_DIGITS * RADIX_BITS >= 32);
    uint32_t count[N_DIGITS][RADIX_BINS];
    float *from = l, *to = spare;
    memset(count, 0, sizeof count);
    for (size_t i = 0; i < n; i++)
        for (int d = 0; d < N_DIGITS; d++)
            count[d][sample_key(l[i]) >> (d * RADIX_BITS) & (RADIX_BINS - 1)]++;
    for (int d = 0; d < N_DIGITS; d++) {
        uint32_t *next = count[d], at = 0;
        if (next[sample_key(from[0]) >> (d * RADIX_BITS) & (RADIX_BINS - 1)] == n) continue;
        for (uint32_t b = 0; b < RADIX_BINS; b++) {
            uint32_t n_here = next[b];
            next[b] = at;
            at += n_here;
        }
        for (size_t i = 0; i < n; i++)
            to[next[sample_key(from[i]) >> (d * RADIX_BITS) & (RADIX_BINS - 1)]++] = from[i];
        float *sorted = to;
        to = from;
        from = sorted;
    }
    if (from != l) memcpy(l, from, n * sizeof *l);
}

/* Bin b in order, l and e. */
static void sample_sort(sample_row *r, uint32_t b) {
    float *l = r->l + r->at[b], *e = r->e + r->at[b];
    size_t n = r->at[b + 1] - r->at[b];
    if (n > 48) sample_radix(l, e, n);
    for (size_t i = 1; n <= 48 && i < n; i++) {
        float moved = l[i];
        size_t j = i;
        for (; j > 0 && l[j - 1] < moved; j--) l[j] = l[j - 1];
        l[j] = moved;
    }
    r->k->exp_sub(e, l, r->top, n);
}

/* Add e[n], none above e_max, to `sum` in any order. False: the order matters here. */
static bool sample_add(float *sum, const float *e, size_t n, float e_max) {
    enum { N_LANES = 8 };
    float floor = k3_bits_f32(k3_f32_bits(*sum) & 0x7f800000u), half = floor * 0x1p-24f;
    float lane[N_LANES] = {0}, most = *sum + (float)n * (e_max * 1.0001f + half);
    int n_half = 0;
    size_t i = 0;
    if (!(most < 2.0f * floor)) return false;
    for (; i + N_LANES <= n; i += N_LANES)
        for (int j = 0; j < N_LANES; j++) {
            float rounded = (floor + e[i + j]) - floor;
            n_half += fabsf(e[i + j] - rounded) == half;
            lane[j] = lane[j] + rounded;
        }
    for (; i < n; i++) {
        float rounded = (floor + e[i]) - floor;
        n_half += fabsf(e[i] - rounded) == half;
        lane[0] = lane[0] + rounded;
    }
    for (int j = 0; j < N_LANES; j++) most = j == 0 ? lane[0] : most + lane[j];
    if (n_half == 0) *sum = *sum + most;
    return n_half == 0;
}

/* How many of the first n_most terms top-p keeps. */
static size_t sample_top_p(sample_row *r, float top_p, size_t n_most) {
    float before[SAMPLE_BINS + 1], sum = 0.0f; /* before[b]: the sum when bin b begins */
    uint32_t b = 0, n_bins = 0;
    for (; b < SAMPLE_BINS - 1 && r->at[b] < n_most; b++, n_bins++) {
        size_t n = r->at[b + 1] - r->at[b];
        bool is_part = r->at[b + 1] > n_most;
        const float *e = r->e + r->at[b];
        before[b] = sum;
        if (n == 0) continue;
        float x = (float)b * (SAMPLE_FAR / (float)(SAMPLE_BINS - 1)) * 0.9999f;
        if (b > 0 && !is_part && sample_add(&sum, e, n, k3_exp(-x))) continue;
        sample_sort(r, b);
        if (is_part) n = n_most - r->at[b];
        for (size_t i = 0; i < n; i++) sum = b + i == 0 ? e[0] : sum + e[i];
    }
    before[n_bins] = sum;
    float target = top_p * sum;
    for (b = 0; b + 1 < n_bins && !(before[b + 1] >= target);) b++;
    sample_sort(r, b);
    sum = before[b];
    for (size_t i = r->at[b];; i++) {
        sum = i == 0 ? r->e[0] : sum + r->e[i];
        if (sum >= target || i + 1 == n_most) return i + 1;
    }
}

typedef struct {
    float last;    /* ids of a larger l are kept,               */
    size_t n_last; /* and the first n_last that have this one   */
} sample_cut;

/* What top-k and top-p keep of l[r->n]. */
static sample_cut sample_keep(sample_row *r, const k3_sampler *sp, const float *l) {
    size_t n_kept = sp->top_k > 0 && sp->top_k < r->n ? sp->top_k : r->n;
    uint32_t b = 0;
    sample_deal(r, l);
    if (sp->top_p < 1.0f) {
        r->k->exp_sub(r->e, r->l, r->top, r->at[SAMPLE_BINS - 1]);
        n_kept = sample_top_p(r, sp->top_p, n_kept);
    }
    while (r->at[b + 1] < n_kept) b++;
    sample_sort(r, b);
    sample_cut cut = {r->l[n_kept - 1], 0};
    while (cut.n_last < n_kept - r->at[b] && r->l[n_kept - 1 - cut.n_last] == cut.last)
        cut.n_last++;
    return cut;
}

uint32_t k3_sample(const k3_engine *e, const k3_sampler *sp, const float *logits, size_t vocab_size,
                   uint64_t pos, void *scratch) {
    if (!(sp->temperature > 0.0f)) return k3_sample_greedy(logits, vocab_size);
    uint64_t fp = fp_save();
    fp_default();
    float *l = scratch, *kept = l + vocab_size, total;
    uint32_t *id = (uint32_t *)(void *)(kept + vocab_size);
    sample_row r = {.k = e->kern, .l = kept, .e = (float *)(void *)id, .n = vocab_size};
    sample_cut cut = {-INFINITY, vocab_size};
    size_t n = 0, pick = 0;
    r.k->divide(l, logits, sp->temperature, vocab_size);
    r.top = sample_max(l, vocab_size);
    if (!isfinite(r.top)) { /* so small a temperature that logits overflow: its limit is greedy */
        fp_restore(fp);
        return k3_sample_greedy(logits, vocab_size);
    }
    if (sp->top_p < 1.0f || (sp->top_k > 0 && sp->top_k < vocab_size)) cut = sample_keep(&r, sp, l);
    for (size_t i = 0; i < vocab_size; i++) {
        bool is_last = l[i] == cut.last && cut.n_last > 0;
        kept[n] = l[i];
        id[n] = (uint32_t)i;
        n += l[i] > cut.last || is_last;
        cut.n_last -= is_last;
    }
    r.k->exp_sub(kept, kept, r.top, n);
    total = kept[0];
    for (size_t i = 1; i < n; i++) total = total + kept[i];
    float target = sample_uniform(sp->seed, pos) * total, sum = kept[0];
    while (pick + 1 < n && !(sum > target)) sum = sum + kept[++pick];
    fp_restore(fp);
    return id[pick];
}

/* ==== 14. State ======================================================================
 *
 * What a session holds, for k3_state.c to write and read; the files themselves are parsed there,
 * since they are not to be trusted. And undo: KDA state cannot be cut back to fewer positions, so
 * a snapshot keeps the fixed part. The latent cache needs no copy: a row depends on the ids up to
 * its position only, so rows written since are written over, and rows before are the same.
 */
static uint64_t layer_state_bytes(const k3_shape *sh, uint32_t il, uint64_t context); /* 15 */

const uint32_t *k3_session_ids(const k3_session *s, size_t *n) {
    if (n) *n = (size_t)s->pos;
    return s->ids;
}

k3_engine *k3_session_engine(const k3_session *s) { return s->e; }
k3_pool *k3_state_pool(const k3_engine *e) { return e->pool; }
bool k3_state_is_broken(const k3_session *s) { return s->is_broken; }
uint32_t *k3_state_ids(k3_session *s) { return s->ids; }

void k3_state_layer(const k3_session *s, uint32_t il, uint64_t n_pos, k3_state_array *out) {
    const k3_shape *sh = &s->e->sh;
    out->p = s->state[il];
    out->n_bytes = layer_floats(sh, il, n_pos) * sizeof(float);
}

/* All of the session is that of its first n_pos positions. */
static void session_set_pos(k3_session *s, uint64_t n_pos) {
    s->pos = n_pos;
    for (uint32_t il = 0; il < s->e->sh.n_layers; il++) s->state_pos[il] = n_pos;
}

void k3_state_resume(k3_session *s, uint64_t n_pos, bool is_unverified) {
    session_set_pos(s, n_pos);
    s->is_unverified = is_unverified;
    s->is_broken = false;
}

bool k3_state_is_unverified(const k3_session *s) { return s->is_unverified; }
bool k3_state_has_audits(const k3_engine *e) { return e->opt.tier_audit > 0; }

void k3_state_set_pos(k3_session *s, uint64_t pos) { s->pos = pos; }

void k3_state_settle(k3_session *s) {
    pthread_mutex_lock(&s->e->step);
    uint64_t fp = fp_save();
    fp_default();
    session_settle(s);
    fp_restore(fp);
    pthread_mutex_unlock(&s->e->step);
}

void *k3_state_begin(k3_engine *e, uint64_t *room) {
    pthread_mutex_lock(&e->step);
    *room = e->scratch->work_bytes;
    return e->scratch->work;
}

void k3_state_end(k3_engine *e) { pthread_mutex_unlock(&e->step); }

void k3_state_note(const k3_engine *e, const char *line) {
    if (e->opt.note) e->opt.note(e->opt.user, line);
}

/* ---- Fingerprint ---- */

#define PRINT_SAMPLE_BYTES 64
#define PRINT_EXPERTS 1024 /* expert tensors sampled, about */

typedef struct {
    const k3_engine *e;
    XXH3_state_t *hash;
    uint64_t n_expert_tensors, seed;
    k3_error *err;
} print_walk;

/* Every number that the bits depend on; not the bytes of the struct, which has holes. */
static void print_shape(XXH3_state_t *hash, const k3_shape *sh) {
    const uint32_t u[] = {sh->vocab_size, sh->hidden,      sh->n_layers, sh->n_heads,
                          sh->q_lora,     sh->kv_lora,     sh->nope_dim, sh->rope_dim,
                          sh->v_dim,      sh->kda_heads,   sh->kda_dim,  sh->conv_width,
                          sh->block_size, sh->dense_inter, sh->n_dense,  sh->n_experts,
                          sh->top_k,      sh->n_shared,    sh->latent,   sh->expert_inter};
    const float f[] = {sh->rms_eps,   sh->eps_lora,         sh->gate_lower_bound,
                       sh->situ_beta, sh->situ_linear_beta, sh->routed_scale};
    XXH3_64bits_update(hash, u, sizeof u);
    XXH3_64bits_update(hash, f, sizeof f);
    XXH3_64bits_update(hash, sh->is_mla, sh->n_layers);
}

/* One sample of a tensor: of every trunk tensor, and of about PRINT_EXPERTS of the experts'. The
 * place in it is drawn from what was hashed so far: the same for the same model. */
static int print_visit(void *user, const name_id *id) {
    print_walk *w = user;
    const k3_engine *e = w->e;
    w->seed = w->seed * 6364136223846793005u + 1442695040888963407u;
    uint64_t stride = w->n_expert_tensors / PRINT_EXPERTS + 1, n, offset;
    uint16_t i_shard;
    char name[256];
    uint8_t sample[PRINT_SAMPLE_BYTES];
    if (id->expert_tensor >= 0) {
        if ((w->seed >> 33) % stride != 0) return 0;
        const expert_place *at = model_expert(&e->files, &e->sh, id->il, id->ie);
        i_shard = at->shard[id->expert_tensor];
        offset = at->offset[id->expert_tensor];
        n = expert_tensor_bytes(&e->sh, id->expert_tensor);
    } else {
        const place *at = TENSOR[id->tensor].part == IN_MODEL ? &e->files.at_model[id->tensor]
                                                              : &e->files.at[id->il][id->tensor];
        i_shard = at->shard;
        offset = at->offset;
        n = tensor_bytes(e->files.dims, id->tensor);
    }
    uint64_t len = n < sizeof sample ? n : sizeof sample;
    offset += (w->seed >> 20) % (n - len + 1);
    int rc = read_exact(&e->files.shards[i_shard], sample, len, offset, w->err);
    if (rc < 0) return rc;
    name_write(id, name, sizeof name);
    XXH3_64bits_update(w->hash, name, strlen(name));
    XXH3_64bits_update(w->hash, sample, (size_t)len);
    return 0;
}

int k3_engine_fingerprints(k3_engine *e, k3_fingerprints *out, k3_error *err) {
    pthread_mutex_lock(&e->accounts);
    *out = e->print;
    pthread_mutex_unlock(&e->accounts);
    if (out->sampled) return 0;
    if (e->opt.config_only)
        return fail(err, K3_EUSAGE, "the engine was opened config_only: it has no weights");
    print_walk w = {.e = e, .hash = XXH3_createState(), .seed = 1, .err = err};
    if (!w.hash) return fail(err, K3_ENOMEM, "fingerprint: out of memory");
    w.n_expert_tensors =
        (uint64_t)(e->sh.n_layers - e->sh.n_dense) * e->sh.n_experts * N_EXPERT_TENSORS;
    XXH3_64bits_reset(w.hash);
    print_shape(w.hash, &e->sh);
    int rc = model_expect(&e->sh, print_visit, &w);
    if (rc == 0) {
        out->sampled = XXH3_64bits_digest(w.hash);
        if (out->sampled == 0) out->sampled = 1; /* 0 says: not known */
        pthread_mutex_lock(&e->accounts);
        e->print.sampled = out->sampled;
        pthread_mutex_unlock(&e->accounts);
    }
    XXH3_freeState(w.hash);
    return rc;
}

/* XXH3 over name, size and time of the last change of every file of weights, mirrors included. Nobody can
 * write to a file, or put another in its place, without a new ctime; a copy has another too. 0: unknown. */
static uint64_t files_stamp(const k3_engine *e) {
    uint64_t h = 1;
    for (uint32_t i = 0; i < e->files.n_shards; i++)
        for (int k = 0; k < e->io.n_copies; k++) {
            const shard *x = &e->files.shards[i];
            struct stat st;
            if (x->fd[k] < 0) continue;
            if (fstat(x->fd[k], &st) != 0) return 0;
            const uint64_t v[] = {(uint64_t)st.st_size, (uint64_t)st.st_ctim.tv_sec,
                                  (uint64_t)st.st_ctim.tv_nsec, (uint64_t)k};
            h = XXH3_64bits_withSeed(x->name, strlen(x->name), h);
            h = XXH3_64bits_withSeed(v, sizeof v, h);
        }
    return e->files.n_shards ? h : 0;
}

uint64_t k3_state_stamp(const k3_engine *e) {
    return e->stamp && files_stamp(e) == e->stamp ? e->stamp : 0;
}

/* ---- Snapshots ---- */

struct k3_snapshot {
    k3_engine *e;
    uint64_t pos, ids_hash;
    bool is_unverified;
    uint8_t *block; /* the KDA layers' arrays, one after the other */
    uint64_t block_bytes;
};

/* Copy the KDA layers out to `block`, or back from it. */
static void snapshot_copy(k3_session *s, uint8_t *block, bool is_back) {
    for (uint32_t il = 0; il < s->e->sh.n_layers; il++) {
        k3_state_array a;
        if (s->e->sh.is_mla[il]) continue;
        k3_state_layer(s, il, 0, &a);
        memcpy(is_back ? a.p : block, is_back ? block : a.p, (size_t)a.n_bytes);
        block += a.n_bytes;
    }
}

int k3_session_snapshot(k3_session *s, k3_snapshot **out, k3_error *err) {
    k3_engine *e = s->e;
    *out = NULL;
    if (s->is_broken)
        return fail(err, K3_EUSAGE,
                    "this session ended with an error: it has no state to take a snapshot of");
    k3_snapshot *snap = calloc(1, sizeof *snap);
    if (!snap) return fail(err, K3_ENOMEM, "snapshot: out of memory");
    k3_state_settle(s);
    snap->e = e;
    snap->pos = s->pos;
    snap->is_unverified = s->is_unverified;
    snap->ids_hash = XXH3_64bits(s->ids, (size_t)s->pos * sizeof *s->ids);
    snap->block_bytes = e->sh.state_bytes;
    snap->block = ledger_take(&e->mem, snap->block_bytes, "snapshot", err);
    if (!snap->block) {
        free(snap);
        return e->mem.why;
    }
    snapshot_copy(s, snap->block, false);
    *out = snap;
    return 0;
}

int k3_session_restore(k3_session *s, const k3_snapshot *snap, k3_error *err) {
    if (snap->e != s->e) return fail(err, K3_EUSAGE, "snapshot: taken of another engine's session");
    if (snap->pos > s->pos ||
        snap->ids_hash != XXH3_64bits(s->ids, (size_t)snap->pos * sizeof *s->ids))
        return fail(err, K3_EUSAGE,
                    "snapshot: its %llu ids are not the first of this session's %llu",
                    (unsigned long long)snap->pos, (unsigned long long)s->pos);
    snapshot_copy(s, snap->block, true);
    /* Latent rows before snap->pos may have been written again since, so both count. */
    s->is_unverified = s->is_unverified || snap->is_unverified;
    session_set_pos(s, snap->pos);
    s->is_broken = false;
    return 0;
}

void k3_snapshot_free(k3_snapshot *snap) {
    if (!snap) return;
    ledger_give(&snap->e->mem, snap->block, snap->block_bytes);
    free(snap);
}

/* ==== 15. Sessions ===================================================================
 *
 * A session is what one timeline carries from position to position: for KDA layers the state and
 * three samples of each convolution, for MLA layers the latent cache; and the ids, which say what
 * that state is of. Everything is taken when the session is made; pages of the cache cost nothing
 * until they are written.
 */
static uint64_t layer_state_bytes(const k3_shape *sh, uint32_t il, uint64_t context) {
    return round_up(layer_floats(sh, il, context) * sizeof(float), 64);
}

/* Of one KDA layer, for rows that can be taken back. */
static uint64_t layer_journal_bytes(const k3_shape *sh, uint32_t n_rows) {
    return round_up(n_rows * (4 * (uint64_t)kda_width(sh) + sh->kda_heads) * sizeof(float), 64);
}

/* Lay the session's arrays out in `b`. */
static void session_carve(k3_session *s, bump *b, const k3_shape *sh, uint64_t context, uint32_t n_rows) {
    for (uint32_t il = 0; il < sh->n_layers; il++) {
        float *state = bump_take(b, layer_state_bytes(sh, il, context), 1), *journal = NULL;
        if (!sh->is_mla[il] && n_rows > 0) journal = bump_take(b, layer_journal_bytes(sh, n_rows), 1);
        if (!s) continue;
        s->state[il] = state;
        s->journal[il] = journal;
    }
    uint32_t *ids = bump_take(b, context, sizeof *ids);
    if (s) s->ids = ids;
}

static uint64_t session_bytes(const k3_shape *sh, uint64_t context, uint32_t n_rows) {
    bump b = {NULL, 0};
    session_carve(NULL, &b, sh, context, n_rows);
    return b.used;
}

static int session_check_context(const k3_engine *e, uint64_t context, k3_error *err) {
    const k3_shape *sh = &e->sh;
    if (e->opt.headers_only)
        return fail(err, K3_EUSAGE, "the engine was opened headers_only: it cannot run a session");
    if (context > sh->max_position)
        return fail(err, K3_EUSAGE, "context of %llu exceeds the model's maximum of %u positions",
                    (unsigned long long)context, sh->max_position);
    if (sh->pos_bytes > 0 && context > (1ull << 60) / sh->pos_bytes)
        return fail(err, K3_EBUDGET, "a context of %llu positions needs more memory than there is",
                    (unsigned long long)context);
    return 0;
}

static void session_give_tables(k3_session *s) {
    free(s->state);
    free(s->journal);
    free(s->state_pos);
    free(s);
}

int k3_session_new(k3_session **out, k3_engine *e, uint64_t context, k3_error *err) {
    const k3_shape *sh = &e->sh;
    *out = NULL;
    if (context == 0) context = e->plan.context;
    int rc = session_check_context(e, context, err);
    if (rc < 0) return rc;
    k3_session *s = calloc(1, sizeof *s);
    if (!s) return fail(err, K3_ENOMEM, "session: out of memory");
    s->state = calloc(sh->n_layers, sizeof *s->state);
    s->journal = calloc(sh->n_layers, sizeof *s->journal);
    s->state_pos = calloc(sh->n_layers, sizeof *s->state_pos);
    s->e = e;
    s->context = context;
    s->journal_rows = e->plan.revocable;
    s->block_bytes = session_bytes(sh, context, s->journal_rows);
    if (!s->state || !s->journal || !s->state_pos)
        rc = fail(err, K3_ENOMEM, "session: out of memory");
    else if (!(s->block = ledger_take(&e->mem, s->block_bytes, "session state and latent cache", err)))
        rc = e->mem.why;
    if (rc < 0) {
        session_give_tables(s);
        return rc;
    }
    session_carve(s, &(bump){s->block, 0}, sh, context, s->journal_rows);
    *out = s;
    return 0;
}

void k3_session_free(k3_session *s) {
    if (!s) return;
    ledger_give(&s->e->mem, s->block, s->block_bytes);
    session_give_tables(s);
}

void k3_session_reset(k3_session *s) {
    for (uint32_t il = 0; il < s->e->sh.n_layers;
         il++) /* cache rows are written before they are read */
        if (!s->e->sh.is_mla[il]) memset(s->state[il], 0, layer_state_bytes(&s->e->sh, il, 0));
    session_set_pos(s, 0);
    s->is_unverified = false;
    s->is_broken = false;
}

/* ---- Cutting back ---- */

bool k3_session_has_ended(const k3_session *s) { return s->is_broken; }

uint64_t k3_session_least(const k3_session *s) {
    uint64_t least = 0;
    for (uint32_t il = 0; il < s->e->sh.n_layers; il++)
        if (!s->e->sh.is_mla[il] && s->state_pos[il] > least) least = s->state_pos[il];
    return least;
}

int k3_session_cut(k3_session *s, uint64_t pos, k3_error *err) {
    if (s->is_broken)
        return fail(err, K3_EUSAGE, "this session ended with an error; reset it or make a new one");
    if (pos > s->pos || pos < k3_session_least(s))
        return fail(err, K3_EUSAGE, "position %llu: this session can be cut to %llu..%llu", (unsigned long long)pos,
                    (unsigned long long)k3_session_least(s), (unsigned long long)s->pos);
    s->pos = pos;
    return 0;
}

/* ---- Passes ----
 *
 * A pass goes through its feeds in rounds: as many rows as it has room for, through all layers. Between two layers it
 * can rest; its rows' streams stay where they are, and everything else is free for passes of other sessions.
 */
static int feed_check(const k3_engine *e, const k3_feed *f, k3_error *err) {
    const k3_session *s = f->session;
    if (s->e != e) return fail(err, K3_EUSAGE, "a session of another engine");
    if (s->pass) return fail(err, K3_EUSAGE, "this session is in a pass already");
    if (s->is_broken)
        return fail(err, K3_EUSAGE, "this session ended with an error; reset it or make a new one");
    if (f->n == 0) return fail(err, K3_EUSAGE, "no ids: there is nothing to continue");
    for (size_t i = 0; i < f->n; i++)
        if (f->ids[i] >= e->sh.vocab_size)
            return fail(err, K3_EUSAGE, "id %u at index %zu is not below the vocabulary of %u",
                        f->ids[i], i, e->sh.vocab_size);
    if (f->n > s->context - s->pos)
        return fail(
            err, K3_EFULL,
            "context full: %zu more positions after %llu exceed the context of %llu; give a "
            "larger --context",
            f->n, (unsigned long long)s->pos, (unsigned long long)s->context);
    if (f->revocable > s->journal_rows)
        return fail(err, K3_EUSAGE, "%u rows to take back, and %u are planned for", f->revocable, s->journal_rows);
    return 0;
}

/* The longest stretch of free rows in [from, end), at most `want`. */
static size_t rows_gap(const k3_engine *e, size_t from, size_t end, size_t want, size_t *at) {
    size_t best = 0;
    for (size_t i = from; i < end && best < want;) {
        size_t stop = end, next = 0;
        for (const k3_pass *p = e->passes; p; p = p->next) {
            if (i >= p->at && i < p->at + p->n_room) next = p->at + p->n_room;
            if (p->at > i && p->at < stop) stop = p->at;
        }
        if (next) {
            i = next;
            continue;
        }
        if (stop - i > best) {
            best = stop - i < want ? stop - i : want;
            *at = i;
        }
        i = stop;
    }
    return best;
}

/* Rows of the streams for a pass of `want` rows: those kept for small passes first, if it is one. */
static size_t rows_find(const k3_engine *e, size_t want, size_t *at) {
    size_t chunk = (size_t)e->chunk, all = (size_t)e->scratch->rows.n, n = 0;
    if (want <= all - chunk) n = rows_gap(e, chunk, all, want, at);
    return n == want ? n : rows_gap(e, 0, chunk, want < chunk ? want : chunk, at);
}

static int pass_begin(k3_pass *p, k3_engine *e, k3_feed *feed, size_t n_feeds, k3_error *err) {
    size_t total = 0;
    int rc = 0;
    *p = (k3_pass){.e = e, .feed = feed, .n_feeds = n_feeds};
    if (e->opt.headers_only)
        return fail(err, K3_EUSAGE, "the engine was opened headers_only: it runs nothing");
    if (n_feeds == 0 || n_feeds > K3_MAX_FEEDS)
        return fail(err, K3_EUSAGE, "%zu sessions in a pass, outside 1..%d", n_feeds, K3_MAX_FEEDS);
    for (size_t i = 0; rc == 0 && i < n_feeds; i++) {
        rc = feed_check(e, &feed[i], err);
        for (size_t j = 0; rc == 0 && j < i; j++)
            if (feed[j].session == feed[i].session) rc = fail(err, K3_EUSAGE, "a session twice in one pass");
        total += feed[i].n;
    }
    if (rc < 0) return rc;
    if (e->far && total > e->far_rows) total = e->far_rows; /* a request to a box has no more */
    p->n_room = rows_find(e, total, &p->at);
    if (p->n_room == 0)
        return fail(err, K3_EUSAGE, "passes at rest take all %llu rows: close one, or plan for more sessions",
                    (unsigned long long)e->scratch->rows.n);
    for (size_t i = 0; i < n_feeds; i++) {
        p->total += (uint64_t)feed[i].n * e->sh.n_layers;
        feed[i].status = 0;
        feed[i].error.text[0] = 0;
        feed[i].session->pass = p;
    }
    p->next = e->passes;
    e->passes = p;
    return 0;
}

/* A feed is over. Its session is where it was when all its rows could be taken back, and ended when it failed otherwise. */
static void feed_end(k3_pass *p, size_t i) {
    k3_feed *f = &p->feed[i];
    k3_session *s = f->session;
    if (s->pass != p) return;
    s->pass = NULL;
    if (f->status == 0) return;
    if (f->revocable >= f->n && k3_session_least(s) <= s->pos - p->fed[i])
        s->pos -= p->fed[i];
    else
        s->is_broken = true;
}

/* Every feed that is not over fails with `status`. */
static void pass_fail(k3_pass *p, int status, const k3_error *why) {
    for (size_t i = 0; i < p->n_feeds; i++) {
        if (p->feed[i].session->pass != p || p->feed[i].status < 0) continue;
        p->feed[i].status = status;
        p->feed[i].error = *why;
    }
}

/* The next rows of the feeds, in their order. */
static void round_list(k3_pass *p) {
    size_t V = p->e->sh.vocab_size;
    p->n_rows = p->n_head = p->n_spans = p->il = p->n_blocks = 0;
    for (size_t i = 0; i < p->n_feeds && p->n_rows < p->n_room; i++) {
        k3_feed *f = &p->feed[i];
        size_t left = f->n - p->fed[i], n = left < p->n_room - p->n_rows ? left : p->n_room - p->n_rows;
        if (f->status < 0 || left == 0) continue;
        pass_span *x = &p->spans[p->n_spans];
        *x = (pass_span){.s = f->session, .feed = f, .ids = f->ids + p->fed[i], .n = n, .row = p->n_rows};
        x->pos = f->session->pos;
        x->kept = x->pos + left - f->revocable;
        x->n_logits = f->rows == K3_ROWS_ALL ? n : f->rows == K3_ROWS_LAST && n == left ? 1 : 0;
        x->logits = f->rows == K3_ROWS_ALL ? f->logits + p->fed[i] * V : f->logits;
        for (size_t t = 0; t < n; t++)
            p->e->scratch->rows.owner[p->at + p->n_rows + t] = (uint16_t)p->n_spans;
        p->n_rows += n;
        p->n_head += x->n_logits;
        p->n_spans++;
    }
    p->n_part = p->n_rows < p->e->plan.part ? p->n_rows : p->e->plan.part;
}

static uint32_t turns_of(size_t n_rows, size_t n_part) { return (uint32_t)((n_rows + n_part - 1) / n_part); }

static int round_begin(step *st) {
    k3_pass *p = st->p;
    round_list(p);
    p->is_round = true;
    st->n_blocks = 0;
    int rc = embed(st);
    if (rc == 0) stream_begin(st->e, p, turns_of(p->n_rows, p->n_part), turns_of(p->n_head, p->n_part));
    return rc;
}

/* The round's rows are part of their sessions now. */
static void round_end(k3_pass *p) {
    const k3_shape *sh = &p->e->sh;
    const uint64_t *trace = p->e->scratch->rows.trace + p->at * sh->n_layers;
    for (uint32_t i = 0; i < p->n_spans; i++) {
        const pass_span *x = &p->spans[i];
        k3_session *s = x->s;
        size_t i_feed = (size_t)(x->feed - p->feed);
        if (!span_is_alive(x)) continue;
        memmove(s->ids + s->pos, x->ids, x->n * sizeof *x->ids); /* may be the session's own */
        s->pos += x->n;
        p->fed[i_feed] += x->n;
        for (size_t t = 0; s->trace && t < x->n; t++)
            for (uint32_t il = 0; il < sh->n_layers; il++)
                s->trace(s->trace_user, x->pos + t, il, trace[(x->row + t) * sh->n_layers + il]);
    }
    stream_end(p->e);
}

/* Rounds and layers until `n_layers` are done or nothing is left to do. */
static int pass_go(step *st, uint32_t n_layers) {
    k3_pass *p = st->p;
    uint32_t n = st->e->sh.n_layers;
    int rc = 0;
    if (p->is_round)
        stream_resume(st->e, p, p->il, turns_of(p->n_rows, p->n_part), turns_of(p->n_head, p->n_part));
    else
        rc = round_begin(st);
    for (; rc == 0 && p->il < n && n_layers > 0; n_layers--) {
        uint32_t il = p->il;
        rc = forward_layer(st, il);
        p->n_blocks = st->n_blocks;
        p->il++;
        p->done += p->n_rows;
        if (rc == 0) rc = step_progress(st, il);
    }
    if (rc == 0 && p->il < n) return 0; /* rests */
    if (rc == 0 && p->n_head > 0) rc = forward_head(st);
    if (rc < 0) return rc;
    round_end(p);
    p->is_round = false;
    return 0;
}

static bool pass_is_over(const k3_pass *p) {
    for (size_t i = 0; i < p->n_feeds; i++)
        if (p->feed[i].status == 0 && p->fed[i] < p->feed[i].n) return false;
    return true;
}

static int pass_result(const k3_pass *p, k3_error *err) {
    if (!pass_is_over(p)) return 0;
    for (size_t i = 0; i < p->n_feeds; i++)
        if (p->feed[i].status == 0) return 1;
    return fail(err, p->feed[0].status, "%s", p->feed[0].error.text);
}

/* At most n_layers layers; see k3_pass_run. */
static int pass_run(k3_pass *p, uint32_t n_layers, k3_error *err) {
    k3_engine *e = p->e;
    k3_error why = {{0}};
    uint64_t fp = fp_save(), start = clock_ns();
    fp_default();
    step st = {.e = e, .p = p, .b = e->scratch, .k = e->kern, .n_blocks = p->n_blocks, .err = &why};
    for (size_t i = 0; i < p->n_feeds; i++) /* another session of this engine may have caught a box */
        if (p->feed[i].status == 0 && far_trust(p->feed[i].session, &p->feed[i].error) < 0)
            p->feed[i].status = K3_ECHECK;
    bool is_whole = n_layers >= e->sh.n_layers;
    while (!pass_is_over(p)) {
        int rc = p->is_round && !pass_is_alive(p) ? K3_ECANCEL : pass_go(&st, n_layers);
        if (rc < 0) { /* of the whole pass; or the sessions of this round have all failed by themselves */
            if (pass_is_alive(p)) pass_fail(p, rc, &why);
            p->is_round = false;
            stream_reset(e);
            store_recover(e);
        }
        if (!is_whole) break;
    }
    for (size_t i = 0; i < p->n_feeds; i++) {
        k3_feed *f = &p->feed[i];
        if (f->session->pass != p) continue;
        f->session->compute_ns += clock_ns() - start;
        if (f->status < 0 && far_trust(f->session, &f->error) < 0)
            f->status = K3_ECHECK; /* a lie was caught, then something else failed */
        if (f->status < 0 || p->fed[i] == f->n) feed_end(p, i);
    }
    fp_restore(fp);
    return pass_result(p, err);
}

static void pass_end(k3_pass *p) {
    static const k3_error why = {"the pass was closed"};
    pass_fail(p, K3_ECANCEL, &why);
    for (size_t i = 0; i < p->n_feeds; i++) {
        if (p->fed[i] == p->feed[i].n) p->feed[i].status = 0;
        feed_end(p, i);
    }
    for (k3_pass **at = &p->e->passes; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
}

int k3_feed_all(k3_engine *e, k3_feed *feed, size_t n_feeds, k3_error *err) {
    k3_pass p;
    pthread_mutex_lock(&e->step);
    int rc = pass_begin(&p, e, feed, n_feeds, err);
    if (rc == 0) {
        rc = pass_run(&p, UINT32_MAX, err);
        pass_end(&p);
    }
    pthread_mutex_unlock(&e->step);
    return rc > 0 ? 0 : rc;
}

int k3_session_feed(k3_session *s, const uint32_t *ids, size_t n, k3_rows rows, float *logits,
                    k3_error *err) {
    k3_feed feed = {.session = s, .ids = ids, .n = n, .rows = rows, .logits = logits};
    return k3_feed_all(s->e, &feed, 1, err);
}

int k3_pass_open(k3_pass **out, k3_engine *e, k3_feed *feed, size_t n_feeds, k3_error *err) {
    *out = NULL;
    k3_pass *p = malloc(sizeof *p);
    if (!p) return fail(err, K3_ENOMEM, "pass: out of memory");
    pthread_mutex_lock(&e->step);
    int rc = pass_begin(p, e, feed, n_feeds, err);
    pthread_mutex_unlock(&e->step);
    if (rc == 0)
        *out = p;
    else
        free(p);
    return rc;
}

int k3_pass_run(k3_pass *p, uint32_t n_layers, k3_error *err) {
    pthread_mutex_lock(&p->e->step);
    int rc = n_layers > 0 ? pass_run(p, n_layers, err) : pass_result(p, err);
    pthread_mutex_unlock(&p->e->step);
    return rc;
}

void k3_pass_drop(k3_pass *p, k3_session *s) {
    static const k3_error why = {"taken out of the pass"};
    for (size_t i = 0; i < p->n_feeds; i++) {
        k3_feed *f = &p->feed[i];
        if (f->session != s || s->pass != p || f->status < 0) continue;
        f->status = K3_ECANCEL;
        f->error = why;
    }
}

void k3_pass_progress(const k3_pass *p, uint64_t *done, uint64_t *total) {
    *done = p->done;
    *total = p->total;
}

void k3_pass_close(k3_pass *p) {
    if (!p) return;
    k3_engine *e = p->e;
    pthread_mutex_lock(&e->step);
    pass_end(p);
    pthread_mutex_unlock(&e->step);
    free(p);
}

uint64_t k3_session_pos(const k3_session *s) { return s->pos; }
uint64_t k3_session_context(const k3_session *s) { return s->context; }

void k3_session_trace(k3_session *s, k3_trace_fn fn, void *user) {
    s->trace = fn;
    s->trace_user = user;
}

void k3_session_on_route(k3_session *s, k3_route_fn fn, void *user) {
    s->route = fn;
    s->route_user = user;
}

int k3_session_on_taps(k3_session *s, const uint32_t *layers, uint32_t n, bool attn_res, k3_tap_fn fn,
                       void *user, k3_error *err) {
    s->on_tap = NULL;
    if (!fn) return 0;
    if (n > K3_MAX_TAPS) return fail(err, K3_EUSAGE, "%u taps, more than %d", n, K3_MAX_TAPS);
    for (uint32_t i = 0; i < n; i++)
        if (layers[i] >= s->e->sh.n_layers || (i > 0 && layers[i] <= layers[i - 1]))
            return fail(err, K3_EUSAGE, "tap %u: layer %u of %u, or not above the one before", i, layers[i],
                        s->e->sh.n_layers);
    memcpy(s->tap, layers, n * sizeof *layers);
    s->n_taps = n;
    s->taps_mix = attn_res;
    s->on_tap = fn;
    s->tap_user = user;
    return 0;
}

void k3_session_stats(const k3_session *s, k3_stats *out) {
    k3_engine *e = s->e;
    *out = e->stats;
    out->n_pos = s->pos;
    out->compute_ns = s->compute_ns;
    pthread_mutex_lock(&e->io.lock);
    out->read_bytes = e->io.read_bytes;
    out->stall_ns = e->io.stall_ns;
    pthread_mutex_unlock(&e->io.lock);
    out->resident_bytes = e->mem.used;
    if (!e->far) return;
    tier_stats far;
    tier_stats_get(e->far, &far);
    out->far_asked = far.asked;
    out->far_served = far.served;
    out->far_late = far.late;
    out->far_hedged = far.hedged;
}

/* ==== 16. Oracle ===================================================================== */

uint64_t k3_fnv1a(uint64_t h, const void *bytes, size_t n_bytes) {
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n_bytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

/* ==== 17. Public functions =========================================================== */

static const k3_kernels *const LINKED[] = {
    &k3_kernels_ref,
#ifdef K3_HAVE_avx2
    &k3_kernels_avx2,
#endif
#ifdef K3_HAVE_avx512
    &k3_kernels_avx512,
#endif
#ifdef K3_HAVE_neon
    &k3_kernels_neon,
#endif
};
#define N_LINKED (sizeof LINKED / sizeof *LINKED)

const char *const *k3_kernels_linked(void) {
    static const char *const name[] = {"ref",
#ifdef K3_HAVE_avx2
                                       "avx2",
#endif
#ifdef K3_HAVE_avx512
                                       "avx512",
#endif
#ifdef K3_HAVE_neon
                                       "neon",
#endif
                                       NULL};
    return name;
}

const k3_kernels *k3_kernels_find(const char *name) {
    for (size_t i = 0; i < N_LINKED; i++)
        if (strcmp(LINKED[i]->name, name) == 0) return LINKED[i];
    return NULL;
}

bool k3_kernels_is_supported(const char *name) {
    const k3_kernels *k = k3_kernels_find(name);
    return k && k->is_supported();
}

/* The named table, or the best this CPU has. */
static const k3_kernels *kernels_pick(const char *name, k3_error *err) {
    char have[128] = "";
    const k3_kernels *best = NULL;
    for (size_t i = 0; i < N_LINKED; i++) {
        if (!LINKED[i]->is_supported()) continue;
        best = LINKED[i];
        if (name && strcmp(name, best->name) == 0) return best;
        size_t n = strlen(have);
        snprintf(have + n, sizeof have - n, "%s%s", n ? " " : "", best->name);
    }
    if (!name) return best;
    fail(err, K3_EUSAGE, "kernels %s: %s; this one has: %s", name,
         k3_kernels_find(name) ? "this CPU cannot run them" : "this build does not have them",
         have);
    return NULL;
}

void k3_options_default(k3_options *o) {
    memset(o, 0, sizeof *o);
    o->eps_lora = 1e-6f;
    o->spin_us = 50;
}

/* 0: one for each core that this process may use, within its CPU quota. */
static int engine_threads(int asked) {
    if (asked > 0) return asked;
    int n = machine_threads(machine_cpus_here());
    return n < POOL_MAX_THREADS ? n : POOL_MAX_THREADS;
}

/* A token of a small model is over before so many threads have met: at most one more for each 400 us that it takes
 * one core, by the bytes it reads at 10 GB/s (docs/LAB.md, Threads of our own). */
static int model_threads(const k3_shape *sh, int n_threads) {
    uint64_t n_moe = sh->n_layers - sh->n_dense;
    uint64_t most = 1 + (sh->trunk_bytes + n_moe * sh->top_k * sh->expert_bytes) / 4000000;
    return most < (uint64_t)n_threads ? (int)most : n_threads;
}

static int machine_check(k3_error *err) {
    if (fma_is_exact()) return 0;
    return fail(err, K3_EUSAGE,
                "this machine's fmaf rounds twice or flushes subnormals: it cannot give the hash");
}

/* Options and machine, before any file is touched. */
static int engine_setup(k3_engine *e, const k3_options *o, k3_error *err) {
    e->opt = *o;
    if (o->config_only) { /* nothing to read, so nothing to check or to mirror */
        e->opt.headers_only = e->opt.no_check = true;
        e->opt.mirrors = NULL;
    }
    if (!o->model_dir) return fail(err, K3_EUSAGE, "no model directory given");
    if (o->n_threads < 0 || o->n_threads > POOL_MAX_THREADS)
        return fail(err, K3_EUSAGE, "threads is %d, outside 0..%d", o->n_threads, POOL_MAX_THREADS);
    if (o->chunk < 0 || o->chunk > 4096)
        return fail(err, K3_EUSAGE, "chunk is %d, outside 0..4096", o->chunk);
    if (o->part < 0 || o->part > 4096) return fail(err, K3_EUSAGE, "part is %d, outside 0..4096", o->part);
    if (o->sessions >= K3_MAX_FEEDS)
        return fail(err, K3_EUSAGE, "sessions is %u, more than %d beside the first", o->sessions, K3_MAX_FEEDS - 1);
    if (o->revocable > K3_MAX_REVOCABLE)
        return fail(err, K3_EUSAGE, "revocable is %u rows, more than %d", o->revocable, K3_MAX_REVOCABLE);
    if (o->io_depth < 0 || o->io_depth > IO_MAX_DEPTH)
        return fail(err, K3_EUSAGE, "io depth is %d, outside 0..%d", o->io_depth, IO_MAX_DEPTH);
    if (!(o->eps_lora > 0.0f) || !isfinite(o->eps_lora))
        return fail(err, K3_EUSAGE, "lora eps must be a number above 0");
    if (machine_check(err) < 0) return K3_EUSAGE;
    if (o->tiers && o->tiers[0] && o->chunk > (int)TIER_MAX_ROWS) e->opt.chunk = TIER_MAX_ROWS;
    e->dir = strdup(o->model_dir);
    e->kern = kernels_pick(o->kernels, err);
    if (!e->kern) return K3_EUSAGE;
    if (!e->dir) return fail(err, K3_ENOMEM, "out of memory");
    e->opt.model_dir = e->dir;
    e->n_threads = engine_threads(o->n_threads);
    e->mem.used = OVERHEAD_BYTES + o->caller_bytes;
    return 0;
}

/* Tables are sized by what files say: they keep to the budget from the start. Below SMALL_TABLES the plan speaks,
 * which knows the floor. */
static uint64_t tables_limit(const k3_engine *e) {
    const k3_options *o = &e->opt;
    uint64_t least = e->mem.used + SMALL_TABLES,
             ram = o->ram_bytes ? o->ram_bytes : machine_ram_default("", o->others_bytes);
    return ram > least ? ram : least;
}

/* Memory, trunk, slots, disk: everything a step needs. */
static int engine_load(k3_engine *e, k3_error *err) {
    int rc;
    if (e->opt.experts_only) return 0;
    rc = plan_make(e, err);
    if (rc == K3_EBUDGET && e->opt.headers_only) return 0; /* the plan names the floor */
    if (rc < 0 || e->opt.headers_only) return rc;
    e->pool = pool_open(e->n_threads);
    pool_time(e->pool, e->opt.is_timed);
    if (!e->pool) return fail(err, K3_ENOMEM, "out of memory for %d threads", e->n_threads);
    e->bounce_bytes = plan_bounce(e);
    e->bounce = ledger_take(&e->mem, e->bounce_bytes, "bounce buffer", err);
    if (!e->bounce) return e->mem.why;
    if ((rc = scratch_open(e, err)) < 0 || (rc = store_open(e, err)) < 0 ||
        (rc = stream_open(e, err)) < 0 || (rc = disk_choose(e, err)) < 0)
        return rc;
    rc = trunk_open(e, err); /* by way of the empty slots, so before the pins */
    return rc < 0 ? rc : pins_open(e, err);
}

int k3_engine_open(k3_engine **out, const k3_options *o, k3_error *err) {
    *out = NULL;
    if (err) err->text[0] = 0;
    k3_engine *e = calloc(1, sizeof *e);
    if (!e) return fail(err, K3_ENOMEM, "out of memory");
    uint64_t fp = fp_save();
    fp_default();
    pthread_mutex_init(&e->step, NULL);
    pthread_mutex_init(&e->accounts, NULL);
    e->mem.lock = &e->accounts;
    int rc = engine_setup(e, o, err);
    if (rc == 0) rc = shape_read(&e->sh, e->dir, o->eps_lora, err);
    if (rc == 0 && o->n_threads == 0) e->n_threads = model_threads(&e->sh, e->n_threads);
    if (rc == 0) e->mem.limit = tables_limit(e);
    if (rc == 0) rc = model_open(&e->files, &e->sh, &e->opt, &e->mem, err);
    if (rc == 0 && !(e->layers = calloc(e->sh.n_layers + 1, sizeof *e->layers)))
        rc = fail(err, K3_ENOMEM, "out of memory for %u layers", e->sh.n_layers);
    if (rc == 0) rc = sums_open(e, err);
    e->mem.limit = UINT64_MAX; /* until the plan: it names the floor, tables included */
    if (rc == 0 && !o->config_only) rc = disk_open(e, err);
    if (rc == 0 && !o->config_only) e->stamp = files_stamp(e); /* before any weight is read */
    if (rc == 0) rc = far_open(e, err);
    if (rc == 0) rc = engine_load(e, err);
    if (rc == 0) far_ready(e);
    fp_restore(fp);
    if (rc < 0) {
        k3_engine_close(e);
    } else {
        if (err)
            err->text[0] = 0; /* a mirror without a shard, a mode that the probe could not have */
        *out = e;
    }
    return rc;
}

void k3_engine_close(k3_engine *e) {
    if (!e) return;
    far_close(e);
    disk_close(e);
    pool_close(e->pool);
    ledger_give(&e->mem, e->store.bytes, e->store.n_slots * e->store.slot_bytes);
    ledger_give(&e->mem, e->store.slots, e->store.meta_bytes);
    ledger_give(&e->mem, e->stream.bytes, e->stream.cap);
    ledger_give(&e->mem, e->stream.pieces, e->stream.pieces_bytes);
    for (uint32_t il = 0; e->layers && il <= e->sh.n_layers; il++)
        ledger_give(&e->mem, e->layers[il].block, e->layers[il].block_bytes);
    if (e->scratch) ledger_give(&e->mem, e->scratch->block, e->scratch->block_bytes);
    ledger_give(&e->mem, e->bounce, e->bounce_bytes);
    ledger_give(&e->mem, e->sums.block, e->sums.block_bytes);
    model_close(&e->files);
    pthread_mutex_destroy(&e->step);
    pthread_mutex_destroy(&e->accounts);
    free(e->scratch);
    free(e->layers);
    free(e->dir);
    free(e);
}

const k3_shape *k3_engine_shape(const k3_engine *e) { return &e->sh; }
const char *k3_engine_kernels(const k3_engine *e) { return e->kern->name; }
int k3_engine_threads(const k3_engine *e) { return e->n_threads; }
int k3_engine_chunk(const k3_engine *e) { return e->chunk; }
const k3_plan *k3_engine_plan(const k3_engine *e) { return &e->plan; }

/* ---- verify ----
 *
 * Every copy of every stretch is read once, a few ahead of the one being looked at. Stretches have one order, so a
 * number says how far it came; with k3_options.resume that number is kept every few seconds and when it stops. What
 * was read from a file that is another one since is read again. */
#define VERIFY_AHEAD 4
#ifndef RESUME_NS
#define RESUME_NS 5000000000u /* so much work, and what is being read, is lost by SIGKILL */
#endif

typedef struct {
    k3_engine *e;
    struct {
        stretch x;
        io_req req[N_EXPERT_TENSORS];
        int n_reqs;
        uint64_t i;        /* the stretch's number */
    } ahead[VERIFY_AHEAD]; /* asked for, oldest first, from `first` */
    uint32_t first, n_ahead;
    int i_copy;
    uint64_t i_visit; /* of this copy: stretches visited                        */
    k3_resume from;   /* where it goes on; copy 0, stretch 0: at the beginning   */
    k3_resume now;    /* how far it is: every stretch before this one is done    */
    bool *is_changed; /* [n_files] read again, whatever `from` says; NULL: none  */
    uint64_t kept_ns; /* when `now` was last kept; 0: it cannot be               */
    uint64_t skipped; /* bytes that are done already                             */
    uint64_t *values; /* where sums go that are being made, else NULL */
    uint8_t *buf;
    uint64_t room, done, total;
    int64_t n_experts;
    bool is_zero; /* all pieces so far of the tensor at work */
    k3_error *err;
} verify;

/* The number of a file among all copies of all shards. */
static uint64_t verify_file(const verify *v, int i_copy, uint16_t i_shard) {
    return (uint64_t)i_copy * v->e->files.n_shards + i_shard;
}

/* Is a stretch done that is read by these requests? */
static bool verify_is_done(const verify *v, uint64_t i, const io_req *req, int n_reqs) {
    uint64_t i_copy = (uint64_t)v->i_copy;
    bool is_before =
        i_copy < v->from.i_copy || (i_copy == v->from.i_copy && i < v->from.n_stretches);
    for (int k = 0; is_before && v->is_changed && k < n_reqs; k++)
        is_before = !v->is_changed[verify_file(v, v->i_copy, req[k].i_shard)];
    return is_before;
}

/* Keep how far it is. That it cannot be kept is told once and no reason to stop. */
static void verify_keep(verify *v) {
    const k3_options *o = &v->e->opt;
    char line[1024];
    k3_error why = {{0}};
    bool is_behind = v->now.i_copy < v->from.i_copy ||
                     (v->now.i_copy == v->from.i_copy && v->now.n_stretches <= v->from.n_stretches);
    if (!v->kept_ns || is_behind)
        return; /* behind: changed files are read again, and `from` is still right */
    v->kept_ns = clock_ns();
    if (k3_resume_write(o->resume, &v->now, &why) == 0) return;
    v->kept_ns = 0;
    snprintf(line, sizeof line, "how far this came is not kept: %s", why.text);
    if (o->note) o->note(o->user, line);
}

/* Stretch i of the present copy was found good. */
static void verify_advance(verify *v, uint64_t i) {
    v->now.i_copy = (uint64_t)v->i_copy;
    v->now.n_stretches = i + 1;
    v->now.is_zero = v->is_zero;
    if (v->kept_ns && clock_ns() - v->kept_ns > RESUME_NS) verify_keep(v);
}

/* Every value of a trunk tensor's piece is finite. */
static int verify_finite(const verify *v, const stretch *x, const uint8_t *at) {
    uint64_t width = DTYPE_BYTES[TENSOR[x->t].dtype];
    for (uint64_t i = 0; i < x->n; i += width) {
        uint16_t top; /* sign, exponent and the start of the fraction: little-endian */
        memcpy(&top, at + i + width - 2, sizeof top);
        if ((top & 0x7f80) != 0x7f80) continue;
        const place *tensor = trunk_place(v->e, x->il, x->t);
        const shard *file = &v->e->files.shards[x->i_shard];
        name_id id = {(enum tensor)x->t, -1, x->il, 0};
        char name[256];
        name_write(&id, name, sizeof name);
        return fail(v->err, K3_EMODEL,
                    "%s: element %llu is NaN or infinite (%s, offset 0x%llx); download it again",
                    name, (unsigned long long)((x->offset + i - tensor->offset) / width),
                    file->name, (unsigned long long)(x->offset + i));
    }
    return 0;
}

static int verify_fail_zeros(const verify *v, const name_id *id, uint64_t n) {
    char what[sizeof v->err->text];
    zeros_text(v->e, id, 0, n, what, sizeof what);
    return fail(v->err, K3_ECHECK, "%s; download the file again", what);
}

/* No tensor of the trunk is nothing but zeros: its pieces come in order, and its last one tells. */
static int verify_zeros(verify *v, const stretch *x, const uint8_t *at) {
    const k3_engine *e = v->e;
    uint64_t from = x->offset - trunk_place(e, x->il, x->t)->offset,
             all = tensor_bytes(e->files.dims, (enum tensor)x->t);
    const name_id id = {(enum tensor)x->t, -1, x->il, 0};
    v->is_zero = (from == 0 || v->is_zero) && is_zeros(at, x->n);
    if (from + x->n < all || !v->is_zero || tensor_may_be_zero(e, x->il, x->t)) return 0;
    return verify_fail_zeros(v, &id, all);
}

/* Parts whose sums the disk did not look at: made here, or compared. */
static int verify_parts(const verify *v, const stretch *x, const io_req *r, int i_req) {
    uint64_t n_parts = x->t < N_TENSORS ? x->n_parts : 1, n = r->n / n_parts;
    for (uint64_t i = 0; i < n_parts; i++) {
        uint64_t i_sum = x->i_sum + i + (uint64_t)i_req;
        if (!v->values && (!v->e->sums.sum || r->has_sum)) return 0;
        uint64_t sum = XXH3_64bits(r->at + i * n, (size_t)n);
        if (v->values)
            v->values[i_sum] = sum;
        else if (sum != v->e->sums.sum[i_sum])
            return sum_fail(&v->e->files.shards[r->i_shard], r->offset + i * n, n, v->err);
    }
    return 0;
}

/* The sum of an expert's contents, wherever its tensors lie (6.6). */
static uint64_t verify_contents(const k3_shape *sh, const expert_view *x) {
    uint64_t sum[N_EXPERT_TENSORS];
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        sum[k] = XXH3_64bits(x->p[k], (size_t)expert_tensor_bytes(sh, k));
    return XXH3_64bits(sum, sizeof sum);
}

static int verify_expert(verify *v, const stretch *x, const io_req *req, int n_reqs) {
    k3_engine *e = v->e;
    expert_view view;
    expert_locate(e, x->il, x->ie, req, n_reqs, &view);
    if (v->values) v->values[x->i_sum + x->n_parts - 1] = verify_contents(&e->sh, &view);
    int rc = expert_check(&e->sh, x->il, x->ie, &view, &e->files, v->err);
    const name_id id = {0, expert_zeros(&e->sh, &view), x->il, x->ie};
    if (rc == 0 && id.expert_tensor >= 0)
        rc = verify_fail_zeros(v, &id, expert_tensor_bytes(&e->sh, id.expert_tensor));
    v->n_experts += v->i_copy == 0;
    return rc;
}

/* Wait for the oldest stretch and look at it. */
static int verify_oldest(verify *v) {
    k3_engine *e = v->e;
    const stretch *x = &v->ahead[v->first].x;
    io_req *req = v->ahead[v->first].req;
    uint64_t i = v->ahead[v->first].i;
    int n_reqs = v->ahead[v->first].n_reqs, rc = 0;
    for (int k = 0; k < n_reqs; k++) disk_wait(&e->io, &req[k]);
    bool is_first = (uint64_t)v->i_copy == v->from.i_copy && i == v->from.n_stretches;
    if (is_first && !(v->is_changed && v->is_changed[verify_file(v, v->i_copy, req[0].i_shard)]))
        v->is_zero = v->from.is_zero; /* of the tensor that it is in */
    for (int k = 0; k < n_reqs && rc == 0; k++) {
        rc = req[k].state == IO_FAILED ? disk_fail(&e->io, &req[k], v->err)
                                       : verify_parts(v, x, &req[k], k);
        if (rc == 0) continue;
        if (x->t < N_TENSORS)
            fail_tensor(e, x->il, x->t, rc, v->err);
        else
            fail_in(v->err, rc, "expert %u of layer %u", x->ie, x->il);
    }
    if (rc == 0 && x->t < N_TENSORS) rc = verify_finite(v, x, req[0].at);
    if (rc == 0 && x->t < N_TENSORS) rc = verify_zeros(v, x, req[0].at);
    if (rc == 0 && x->t == N_TENSORS) rc = verify_expert(v, x, req, n_reqs);
    if (rc < 0 && v->i_copy > 0) fail_in(v->err, rc, "mirror %s", e->io.copies[v->i_copy].dir);
    if (rc == 0) verify_advance(v, i);
    v->done += x->n;
    v->first = (v->first + 1) % VERIFY_AHEAD;
    v->n_ahead--;
    return rc < 0 ? rc
                  : engine_progress(e, K3_PHASE_VERIFY, v->done, v->total,
                                    x->il < e->sh.n_layers ? (int)x->il : -1, v->err);
}

/* Ask for a stretch, if this copy has it. */
static int verify_visit(void *user, const stretch *x) {
    verify *v = user;
    k3_engine *e = v->e;
    int rc = v->n_ahead == VERIFY_AHEAD ? verify_oldest(v) : 0;
    uint64_t i_visit = v->i_visit++;
    if (rc < 0) return rc;
    uint32_t i = (v->first + v->n_ahead) % VERIFY_AHEAD;
    io_req *req = v->ahead[i].req;
    uint8_t *to = v->buf + i * v->room;
    v->ahead[i].x = *x;
    v->ahead[i].n_reqs = 1;
    if (x->t == N_TENSORS) {
        v->ahead[i].n_reqs = expert_requests(e, x->il, x->ie, to, req);
    } else {
        req[0] = (io_req){.to = to, .offset = x->offset, .n = x->n, .i_shard = x->i_shard};
        req[0].has_sum = e->sums.sum && x->n_parts == 1;
        req[0].sum = req[0].has_sum ? e->sums.sum[x->i_sum] : 0;
    }
    for (int k = 0; k < v->ahead[i].n_reqs; k++)
        if (e->files.shards[req[k].i_shard].fd[v->i_copy] < 0) return 0;
    if (verify_is_done(v, i_visit, req, v->ahead[i].n_reqs)) {
        v->done += x->n;
        v->n_experts += x->t == N_TENSORS && v->i_copy == 0;
        return 0;
    }
    v->ahead[i].i = i_visit;
    for (int k = 0; k < v->ahead[i].n_reqs; k++) {
        req[k].only = (uint8_t)(v->i_copy + 1);
        if (v->values) req[k].has_sum = false;
        disk_submit(&e->io, &req[k], IO_DEMAND);
    }
    v->n_ahead++;
    return 0;
}

static int verify_measure(void *user, const stretch *x) {
    verify *v = user;
    uint64_t i_visit = v->i_visit++;
    io_req req[N_EXPERT_TENSORS] = {{.i_shard = x->i_shard}};
    int n = x->t == N_TENSORS ? expert_requests(v->e, x->il, x->ie, NULL, req) : 1;
    for (int k = 0; k < n; k++)
        if (v->e->files.shards[req[k].i_shard].fd[v->i_copy] < 0) return 0;
    v->total += x->n;
    if (verify_is_done(v, i_visit, req, n)) v->skipped += x->n;
    return 0;
}

/* What every stretch is: another layout is another check. */
static int verify_mix(void *user, const stretch *x) {
    verify *v = user;
    io_req req[N_EXPERT_TENSORS] = {{.i_shard = x->i_shard, .offset = x->offset, .n = x->n}};
    int n = x->t == N_TENSORS ? expert_requests(v->e, x->il, x->ie, NULL, req) : 1;
    for (int k = 0; k < n; k++) {
        const uint64_t where[] = {v->now.key, req[k].i_shard, req[k].offset, req[k].n};
        v->now.key = XXH3_64bits(where, sizeof where);
    }
    return 0;
}

/* One number for a file as it is now: its name, size and times. 0: it is not there. */
static uint64_t verify_file_now(const shard *s, int i_copy) {
    struct stat st;
    if (s->fd[i_copy] < 0 || fstat(s->fd[i_copy], &st) != 0) return 0;
    const uint64_t v[] = {(uint64_t)st.st_size, (uint64_t)st.st_mtim.tv_sec,
                          (uint64_t)st.st_mtim.tv_nsec, (uint64_t)st.st_ctim.tv_sec,
                          (uint64_t)st.st_ctim.tv_nsec};
    return XXH3_64bits_withSeed(v, sizeof v, XXH3_64bits(s->name, strlen(s->name))) | 1;
}

/* Which check this is, and the files it reads. */
static int verify_identify(verify *v, bool is_writing) {
    k3_engine *e = v->e;
    const sums *u = &e->sums;
    uint32_t n_shards = e->files.n_shards;
    v->now.n_files = v->from.n_files = (uint64_t)e->io.n_copies * n_shards;
    v->now.files = calloc(v->now.n_files + 1, sizeof *v->now.files);
    v->from.files = calloc(v->now.n_files + 1, sizeof *v->now.files);
    v->is_changed = calloc(v->now.n_files + 1, sizeof *v->is_changed);
    if (!v->now.files || !v->from.files || !v->is_changed)
        return fail(v->err, K3_ENOMEM, "out of memory for %u shards", n_shards);
    for (int c = 0; c < e->io.n_copies; c++)
        for (uint32_t i = 0; i < n_shards; i++)
            v->now.files[verify_file(v, c, (uint16_t)i)] = verify_file_now(&e->files.shards[i], c);
    v->now.key = 1 + is_writing;
    if (!is_writing && u->sum)
        v->now.key = XXH3_64bits_withSeed(u->sum, (size_t)u->n * sizeof *u->sum, 3);
    sums_visit(e, verify_mix, v);
    v->from.key = v->now.key;
    v->from.values = v->now.values = is_writing ? sums_values(e) : NULL;
    v->from.n_values = v->now.n_values = is_writing ? u->n : 0;
    return 0;
}

/* "goes on where it was stopped, at 62.0 % of 1560.86 GB (FILE)". */
static void verify_say_from(const verify *v, const char *why, uint64_t n_changed) {
    const k3_options *o = &v->e->opt;
    char line[1024], changed[96] = "";
    if (n_changed)
        snprintf(changed, sizeof changed, "; %llu file%s changed since and %s read again",
                 (unsigned long long)n_changed, n_changed > 1 ? "s" : "",
                 n_changed > 1 ? "are" : "is");
    if (why[0])
        snprintf(line, sizeof line, "begins at the beginning: %.400s %s", o->resume, why);
    else
        snprintf(line, sizeof line,
                 "goes on where it was stopped, at %.1f %% of %.2f GB%s (%.400s)",
                 100.0 * (double)v->skipped / (double)(v->total + !v->total),
                 (double)v->total * 1e-9, changed, o->resume);
    if (o->note) o->note(o->user, line);
}

/* Before anything is read: what is to be read, and what of it is done. */
static int verify_begin(verify *v, bool is_writing) {
    const k3_options *o = &v->e->opt;
    char why[128] = "";
    bool is_resumed = false;
    uint64_t n_changed = 0;
    int rc = o->resume ? verify_identify(v, is_writing) : 0;
    if (rc == 0 && o->resume) {
        is_resumed = k3_resume_read(o->resume, &v->from, why, sizeof why) > 0;
        if (!is_resumed) v->from.i_copy = v->from.n_stretches = 0;
        v->kept_ns = clock_ns();
    }
    for (uint64_t i = 0; is_resumed && i < v->now.n_files; i++) {
        v->is_changed[i] = v->from.files[i] != v->now.files[i];
        n_changed += v->is_changed[i];
    }
    for (v->i_copy = 0; rc == 0 && v->i_copy < v->e->io.n_copies; v->i_copy++) {
        v->i_visit = 0;
        sums_visit(v->e, verify_measure, v);
    }
    if (is_resumed || why[0]) verify_say_from(v, why, n_changed);
    return rc;
}

/* It is through, or keeps how far it came. */
static void verify_end(verify *v, bool is_through) {
    if (v->e->opt.resume && is_through) k3_resume_remove(v->e->opt.resume);
    if (!is_through && v->now.key) verify_keep(v);
    free(v->now.files);
    free(v->from.files);
    free(v->is_changed);
}

/* All copies, one after another. */
static int verify_copies(verify *v) {
    int rc = 0;
    for (v->i_copy = 0; rc == 0 && v->i_copy < v->e->io.n_copies; v->i_copy++) {
        v->i_visit = 0;
        rc = sums_visit(v->e, verify_visit, v);
        while (v->n_ahead > 0) {
            int rest = rc == 0 ? verify_oldest(v) : 0;
            if (rest < 0) rc = rest;
            if (rc == 0 || rest < 0) continue;
            for (int k = 0; k < v->ahead[v->first].n_reqs; k++)
                disk_wait(&v->e->io, &v->ahead[v->first].req[k]);
            v->first = (v->first + 1) % VERIFY_AHEAD;
            v->n_ahead--;
        }
        if (v->values) { /* the other copies are compared with the first */
            v->e->sums.sum = rc == 0 ? v->values : NULL;
            v->values = NULL;
        }
    }
    return rc;
}

static int64_t verify_all(k3_engine *e, bool is_writing, bool compares, k3_error *err) {
    const k3_options *o = &e->opt;
    uint64_t room = io_room(piece_max_bytes(&e->files, &e->sh)), fingerprint = 0;
    if (room < plan_bounce(e)) room = plan_bounce(e);
    uint64_t embed = io_room(piece_bytes(&e->files, T_EMBED));
    if (room < embed) room = embed;
    if (e->sh.n_layers > e->sh.n_dense && room < expert_room(&e->files, &e->sh))
        room = expert_room(&e->files, &e->sh);
    verify v = {.e = e, .room = room, .err = err};
    int rc = 0;
    if (o->headers_only)
        rc = disk_mode(&e->io, o->io == K3_IO_URING, o->direct == K3_ON,
                       o->io_depth ? o->io_depth : 8, err);
    sums_out out = {.fd = -1};
    if (rc == 0 && is_writing) rc = sums_create(e, &out, err);
    if (rc == 0 && is_writing) {
        ledger_give(&e->mem, e->sums.block, e->sums.block_bytes);
        e->print.by_sums = 0; /* an engine opened from now on may say */
        rc = sums_make(e, true, &fingerprint, err);
        v.values = rc == 0 ? sums_values(e) : NULL;
    }
    v.buf = rc == 0 ? ledger_take(&e->mem, VERIFY_AHEAD * room, "verify", err) : NULL;
    if (rc == 0 && !v.buf) rc = e->mem.why;
    if (rc == 0) rc = verify_begin(&v, is_writing);
    if (rc == 0) rc = verify_copies(&v);
    ledger_give(&e->mem, v.buf, VERIFY_AHEAD * room);
    bool is_read = rc == 0;
    if (rc == 0 && is_writing) rc = sums_save(e, &out, fingerprint, compares, err);
    verify_end(&v, is_read && rc != K3_EIO);
    if (rc < 0 && is_writing) e->sums.sum = NULL; /* of what was just read: they would bless it */
    sums_abandon(&out);
    return rc < 0 ? rc : v.n_experts;
}

/* Sums change hands: no step meanwhile. */
static int64_t verify_alone(k3_engine *e, bool is_writing, bool compares, k3_error *err) {
    if (e->opt.config_only)
        return fail(err, K3_EUSAGE, "the engine was opened config_only: it has no weights");
    pthread_mutex_lock(&e->step);
    int64_t rc = verify_all(e, is_writing, compares, err);
    pthread_mutex_unlock(&e->step);
    return rc;
}

int64_t k3_engine_verify(k3_engine *e, k3_error *err) { return verify_alone(e, false, false, err); }

int64_t k3_engine_write_sums(k3_engine *e, bool is_anew, k3_error *err) {
    return verify_alone(e, true, !is_anew, err);
}

/* ==== 18. What the tier server shares ================================================
 *
 * `k3-tier` opens the same files with the same checks, but keeps experts only (experts.h).
 */
uint64_t k3_expert_room(const k3_engine *e) { return expert_room(&e->files, &e->sh); }
uint64_t k3_expert_place_bytes(void) { return sizeof(expert_place); }

const k3_kernels *k3_engine_table(const k3_engine *e) { return e->kern; }

const k3_kernels *k3_machine_table(const char *name, int asked, int *n_threads, k3_error *err) {
    if (machine_check(err) < 0) return NULL;
    *n_threads = engine_threads(asked);
    return kernels_pick(name, err);
}

int k3_expert_read(k3_engine *e, uint32_t il, uint32_t ie, uint8_t *room, expert_view *x,
                   k3_error *err) {
    io_req req[N_EXPERT_TENSORS];
    if (!k3_expert_has(e, il, ie))
        return fail(err, K3_EMODEL, "expert %u of layer %u is not in %s", ie, il, e->dir);
    int n = expert_requests(e, il, ie, room, req), i_bad = -1;
    for (int k = 0; k < n; k++) disk_submit(&e->io, &req[k], IO_DEMAND);
    for (int k = 0; k < n; k++) {
        disk_wait(&e->io, &req[k]);
        if (req[k].state == IO_FAILED && i_bad < 0) i_bad = k;
    }
    if (i_bad >= 0)
        return fail_in(err, disk_fail(&e->io, &req[i_bad], err), "expert %u of layer %u", ie, il);
    expert_locate(e, il, ie, req, n, x);
    int rc = expert_check(&e->sh, il, ie, x, &e->files, err);
    if (rc == 0) zeros_look_expert(e, il, ie, x);
    return rc;
}

bool k3_expert_has(const k3_engine *e, uint32_t il, uint32_t ie) {
    return expert_is_here(model_expert(&e->files, &e->sh, il, ie));
}

void k3_expert_name(const k3_engine *e, uint32_t il, uint32_t ie, int k, char *out, size_t cap) {
    char name[256];
    const name_id id = {0, k, il, ie};
    name_write(&id, name, sizeof name);
    snprintf(out, cap, "%s", name + (e && e->files.is_flat ? strlen("language_model.") : 0));
}

bool k3_engine_has_sums(const k3_engine *e) { return e->sums.sum != NULL; }

/* Is it there, in one piece, in slot order? */
static bool expert_is_piece(const k3_shape *sh, const expert_place *at) {
    if (!expert_is_here(at)) return false;
    for (int k = 1; k < N_EXPERT_TENSORS; k++)
        if (at->shard[k] != at->shard[0] ||
            at->offset[k] != at->offset[k - 1] + expert_tensor_bytes(sh, k - 1))
            return false;
    return true;
}

int k3_expert_use_sums(k3_engine *e, const slice_expert *x, uint32_t n, k3_error *err) {
    const k3_shape *sh = &e->sh;
    uint64_t n_all = (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts;
    e->sums = (sums){.per_expert = 1, .n = n_all, .block_bytes = n_all * sizeof *e->sums.sum};
    uint64_t *sum = e->sums.block = ledger_take(&e->mem, e->sums.block_bytes, "sums", err);
    uint8_t *is_named = calloc(n_all, 1);
    int rc = !sum ? e->mem.why : is_named ? 0 : fail(err, K3_ENOMEM, "out of memory for sums");
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        uint64_t k = (uint64_t)(x[i].il - sh->n_dense) * sh->n_experts + x[i].ie;
        if (!expert_is_piece(sh, &e->files.experts[k]))
            rc = fail(err, K3_EMODEL,
                      "%s: expert %u of layer %u is in no shard, or in pieces; copy it again",
                      e->dir, x[i].ie, x[i].il);
        sum[k] = x[i].sum;
        is_named[k] = 1;
    }
    for (uint64_t k = 0; k < n_all && rc == 0; k++)
        if (!is_named[k]) memset(&e->files.experts[k], 0xff, sizeof *e->files.experts);
    free(is_named);
    e->sums.sum = rc == 0 ? sum : NULL;
    return rc;
}

char *k3_shard_head(const k3_engine *e, uint64_t latent, uint64_t inter, uint64_t fingerprint,
                    const slice_expert *x, uint32_t n, size_t *n_head) {
    size_t cap = 8192 + (size_t)n * N_EXPERT_TENSORS * 320, at = 8;
    uint64_t lengths[N_EXPERT_TENSORS], offset = 0, len;
    char name[256], *text = malloc(cap);
    if (!text) return NULL;
    expert_lengths(latent, inter, lengths);
    at += (size_t)snprintf(text + at, cap - at,
                           "{\"__metadata__\":{\"format\":\"pt\",\"k3_experts\":\"%016llx\"}",
                           (unsigned long long)fingerprint);
    for (uint64_t i = 0; i < (uint64_t)n * N_EXPERT_TENSORS; i++) {
        int k = (int)(i % N_EXPERT_TENSORS);
        bool is_w2 = k >= W2_PACKED;
        k3_expert_name(e, x[i / N_EXPERT_TENSORS].il, x[i / N_EXPERT_TENSORS].ie, k, name,
                       sizeof name);
        at += (size_t)snprintf(
            text + at, cap - at,
            ",\"%s\":{\"dtype\":\"U8\",\"shape\":[%llu,%llu],\"data_offsets\":[%llu,%llu]}", name,
            (unsigned long long)(is_w2 ? latent : inter),
            (unsigned long long)((is_w2 ? inter : latent) / (k % 2 ? K3_GROUP : 2)),
            (unsigned long long)offset, (unsigned long long)(offset + lengths[k]));
        offset += lengths[k];
    }
    text[at++] = '}';
    while (at % IO_ALIGN) text[at++] = ' ';
    len = at - 8;
    memcpy(text, &len, 8);
    *n_head = at;
    return text;
}

int k3_config_read(k3_shape *sh, const char *dir, k3_error *err) {
    k3_options o;
    k3_options_default(&o);
    return shape_read(sh, dir, o.eps_lora, err);
}

#define PRINT_SAMPLES 4
#define PRINT_BYTES 64

int k3_expert_compare(const k3_engine *e, uint32_t il, uint32_t ie, const expert_view *x) {
    const sums *u = &e->sums;
    if (!u->sum || !k3_expert_has(e, il, ie)) return -1;
    const uint64_t *sum = u->sum + expert_sum_index(e, il, ie);
    if (u->has_contents) return sum[u->per_expert - 1] == verify_contents(&e->sh, x);
    if (!e->opt.experts_only) return -1; /* of bytes in the order of their file */
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) return -1;
    XXH3_64bits_reset(hash);
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        XXH3_64bits_update(hash, x->p[k], (size_t)expert_tensor_bytes(&e->sh, k));
    uint64_t got = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return got == sum[0];
}

int k3_expert_fingerprints(k3_engine *e, k3_fingerprints *out, k3_error *err) {
    const k3_shape *sh = &e->sh;
    uint32_t geometry[8] = {sh->n_layers, sh->n_dense,      sh->n_experts,
                            sh->latent,   sh->expert_inter, sh->top_k};
    geometry[6] = k3_f32_bits(sh->situ_beta);
    geometry[7] = k3_f32_bits(sh->situ_linear_beta);
    uint64_t h = XXH3_64bits(geometry, sizeof geometry), seed = 1;
    for (uint64_t i = 0; i < (uint64_t)(sh->n_layers - sh->n_dense) * PRINT_SAMPLES; i++) {
        uint8_t sample[PRINT_BYTES] = {0};
        uint32_t il = sh->n_dense + (uint32_t)(i / PRINT_SAMPLES);
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint32_t ie = (uint32_t)((seed >> 33) % sh->n_experts);
        int k = (int)((seed >> 13) % N_EXPERT_TENSORS);
        uint64_t n = expert_tensor_bytes(sh, k),
                 at = n > PRINT_BYTES ? seed % (n - PRINT_BYTES) : 0;
        const expert_place *p = model_expert(&e->files, sh, il, ie);
        if (!expert_is_here(p))
            return fail(err, K3_EMODEL, "expert %u of layer %u is not in %s", ie, il, e->dir);
        int rc = read_exact(&e->files.shards[p->shard[k]], sample,
                            n < PRINT_BYTES ? n : PRINT_BYTES, p->offset[k] + at, err);
        if (rc < 0) return rc;
        h = XXH3_64bits_withSeed(sample, sizeof sample, h);
    }
    out->sampled = h;
    pthread_mutex_lock(&e->accounts);
    out->by_sums = e->print.by_sums;
    pthread_mutex_unlock(&e->accounts);
    return 0;
}
