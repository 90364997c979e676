/* k3_inside.h - the inside of an engine, for k3.c and the files that are cut out of it: k3_sums.c.
 *
 * Nobody else includes it: programs see k3.h, states k3_state.h, the tier server experts.h.
 */
#ifndef K3_INSIDE_H
#define K3_INSIDE_H

#include "k3.h"

#include "experts.h"
#include "k3_common.h"
#include "k3_disk.h"
#include "k3_ledger.h"
#include "k3_model.h"
#include "kernels.h"
#include "tier.h"

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


/* ---- What k3.c lends: where tensors and experts lie, and what their bytes must be ---- */

/* A tensor that is kept as f32: everything that is no bf16 matrix. */
bool tensor_is_vector(enum tensor t);
bool layer_has_tensor(const k3_shape *sh, uint32_t il, int t);

/* Rows and columns of a matrix; bytes of its pieces, those that are read at once. */
uint64_t tensor_rows(const model *m, int t);
uint64_t tensor_cols(const model *m, int t);
uint64_t piece_bytes(const model *m, int t);
const place *trunk_place(const k3_engine *e, uint32_t il, int t);

/* Where an expert's bytes lie: the reads that bring it to `to`, at most N_EXPERT_TENSORS; its tensors once they are there, and
 * whether their scale codes are valid; memory that one read needs. */
int expert_requests(const k3_engine *e, uint32_t il, uint32_t ie, uint8_t *to, io_req *req);
void expert_locate(const k3_engine *e, uint32_t il, uint32_t ie, const io_req *req,
                          int n_reqs, expert_view *x);
int expert_check(const k3_shape *sh, uint32_t il, uint32_t ie, const expert_view *x,
                        const model *m, k3_error *err);
uint64_t expert_room(const model *m, const k3_shape *sh);

/* Bytes that were never written (section 6.2): are n bytes zeros; which tensor of an expert is nothing but zeros, -1: none;
 * may this tensor be; a line that says so. */
bool bytes_are_zeros(const uint8_t *p, uint64_t n);
int expert_zeros(const k3_shape *sh, const expert_view *x);
bool tensor_may_be_zero(const k3_engine *e, uint32_t il, int t);
void zeros_text(const k3_engine *e, const name_id *id, uint64_t from, uint64_t n, char *out,
                       size_t cap);

/* The longest read that is neither a piece nor an expert; the table of pieces, at most. */
uint64_t plan_bounce(const k3_engine *e);
uint64_t plan_pieces(const k3_engine *e);

/* The longest piece. */
uint64_t piece_max_bytes(const model *m, const k3_shape *sh);

/* An error with the tensor's name before it; a look at the caller's progress function (K3_ECANCEL). */
int fail_tensor(const k3_engine *e, uint32_t il, int t, int rc, k3_error *err);
int engine_progress(k3_engine *e, k3_phase phase, uint64_t done, uint64_t total, int il,
                           k3_error *err);

/* ---- What k3_sums.c lends ---- */

/* Find and read the sums, if there are any, for an engine whose tables are there. Errors  K3_ECHECK, K3_EIO, K3_EBUDGET */
int sums_open(k3_engine *e, k3_error *err);

/* XXH3 of the XXH3 of an expert's six tensors in slot order. */
uint64_t expert_contents(const k3_shape *sh, const expert_view *x);

#endif
