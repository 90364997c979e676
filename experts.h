/* experts.h - one expert's arithmetic and bytes, for the two programs that compute experts.
 *
 * k3.c computes experts beside the trunk, tier_server.c for other machines; a second copy of the
 * arithmetic would sooner or later give a second set of bits. Three parts:
 *   1. the format of an expert: its tensors, their lengths, the product of some rows with vectors;
 *   2. a batch: several experts, each for the rows that want it, into one exact sum (experts.c);
 *   3. what k3.c does for the server: read an expert, checked, and name the model.
 * Internal: nothing here is part of the library's interface.
 */
#ifndef K3_EXPERTS_H
#define K3_EXPERTS_H

#include "k3.h"
#include "k3_common.h"
#include "k3_pool.h"
#include "kernels.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#define K3_MAX_SHARDS 4096 /* of a model directory */

/* ---- 1. The format ------------------------------------------------------------------
 *
 * An expert is three matrices: w1 and w3 [inter][latent], w2 [latent][inter]. MXFP4 stores each as
 * packed nibbles and scale codes. The six tensors are listed in the order their bytes lie in a slot. */
enum { W1_PACKED, W1_SCALE, W3_PACKED, W3_SCALE, W2_PACKED, W2_SCALE, N_EXPERT_TENSORS };
enum expert_matrix { EXPERT_W1, EXPERT_W3, EXPERT_W2 };

/* Where the tensors of one expert lie in memory. */
typedef struct {
    const uint8_t *p[N_EXPERT_TENSORS];
} expert_view;

/* One way to store experts, as far as a batch has to know it. Another format is another value of this. */
typedef struct {
    const char *name;
    const char *tensor[N_EXPERT_TENSORS]; /* names in a checkpoint, after "experts.N." */
    /* Length of each tensor; returns their sum, the bytes of one expert. */
    uint64_t (*lengths)(uint64_t latent, uint64_t inter, uint64_t n[N_EXPERT_TENSORS]);
    /* y[t][r] = dot16(row `row` + r of one matrix with n_cols columns, x[t]) for r < n_rows.
     * Shapes  y: f32[batch][n_rows]   xp: packed f32[batch][n_cols]   row % K3_GROUP == 0 */
    void (*matmul)(const k3_kernels *k, float *y, const expert_view *x, enum expert_matrix m,
                   size_t row, size_t n_rows, size_t n_cols, const float *xp, size_t batch);
} expert_format;

extern const expert_format expert_mxfp4;

static inline uint64_t expert_lengths(uint64_t latent, uint64_t inter,
                                      uint64_t n[N_EXPERT_TENSORS]) {
    return expert_mxfp4.lengths(latent, inter, n);
}

/* Set this thread's floating-point state to that of NUMERICS 1: round to nearest, subnormals kept, no
 * traps. Every thread that computes calls it on entry; it takes a few cycles. */
static inline void fp_default(void) {
#if defined(__SSE2__)
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
}

/* ---- 2. A batch (K3-SPEC 3.5, NUMERICS 2, 3, 5) -------------------------------------- */

/* Most output rows of one piece of work: three packed groups, and a multiple of K3_KERNEL_ROWS. Where a
 * thread would get fewer than 8 pieces of that size, pieces are smaller. */
#define ROW_TILE 96
#define TILES_A_THREAD 8

/* So two threads never write one packed group of h, and a piece is whole tiles of every kernel. */
STATIC_ASSERT(row_tile_is_whole_groups, ROW_TILE % K3_GROUP == 0);
STATIC_ASSERT(row_tile_is_whole_kernel_rows, ROW_TILE % K3_KERNEL_ROWS == 0);
STATIC_ASSERT(each_packed_has_its_scale, N_EXPERT_TENSORS == 6 && W1_SCALE == W1_PACKED + 1 &&
                                             W3_SCALE == W3_PACKED + 1 &&
                                             W2_SCALE == W2_PACKED + 1 && W1_PACKED % 2 == 0);
STATIC_ASSERT(matrices_follow_their_tensors, W1_PACKED == 2 * EXPERT_W1 &&
                                                 W3_PACKED == 2 * EXPERT_W3 &&
                                                 W2_PACKED == 2 * EXPERT_W2);
/* Rows of a piece of n_rows output rows that are not packed: ROW_TILE halved, as often as needed, to a
 * multiple of K3_KERNEL_ROWS that need not be one of K3_GROUP. */
#define LEAST_TILE (2 * K3_KERNEL_ROWS)
STATIC_ASSERT(halves_of_row_tile_are_whole_kernel_rows,
              ROW_TILE % LEAST_TILE == 0 &&
                  (ROW_TILE / LEAST_TILE & (ROW_TILE / LEAST_TILE - 1)) == 0);

static inline size_t tile_for(size_t n_rows, int n_threads) {
    size_t tile = ROW_TILE, most = (size_t)n_threads * TILES_A_THREAD;
    while (tile > LEAST_TILE && n_rows < most * tile) tile /= 2;
    return tile;
}

static inline size_t tile_count(size_t n_rows, size_t tile) { return (n_rows + tile - 1) / tile; }

/* Rows of the tile that begins at `row`. */
static inline size_t tile_rows(size_t row, size_t n_rows, size_t tile) {
    return n_rows - row < tile ? n_rows - row : tile;
}

typedef struct {
    const k3_kernels *k;
    size_t latent, inter;
    float beta, linear_beta;
} expert_math;

/* One expert of a batch: it is applied to the rows of pairs [first, first + n). */
typedef struct {
    expert_view view;
    uint32_t first, n;
    uint32_t at;      /* index of its first pair in zpair, hpair                         */
    uint64_t bad_row; /* out: least output row whose term is out of range; UINT64_MAX: none */
} expert_task;

/* Q[pair_row[j]] += q40(pair_w[j] * expert(z[pair_row[j]])) for all pairs of all tasks.
 *
 * Shapes  z: f32[n_rows][latent]      zp: packed f32[1][latent], used where n_rows is 1
 *         Q: i64[n_rows][latent]      zpair, hpair: f32[pairs of the batch][latent], [..][inter]
 *         local: f32[n_threads][2 x the most pairs of one task x ROW_TILE], local_floats a thread
 * Errors  bad_row of a task whose term is NaN or not below 2^17: its terms in Q are then worth nothing */
typedef struct {
    const expert_format *format;
    expert_math math;
    k3_pool *pool;
    int n_threads;
    size_t n_rows;
    const float *z, *zp;
    const uint32_t *pair_row;
    const float *pair_w;
    int64_t *Q;
    uint8_t *is_bad; /* [n_rows] set for a row with a term out of range; NULL: not wanted */
    float *zpair, *hpair, *local;
    size_t local_floats;
} expert_batch;

void experts_batch(const expert_batch *b, expert_task *const *task, uint32_t n_tasks);

/* expert_one: the same for one expert and one row, by the calling thread: Q += q40(w * expert(z)).
 * Shapes  z: f32[latent]   Q: i64[latent]   scratch: f32[expert_one_floats(m)], 64-aligned
 * Returns false when a term is out of range; Q is then worth nothing */
size_t expert_one_floats(const expert_math *m);
bool expert_one(const expert_math *m, const expert_view *x, const float *z, float w, int64_t *Q,
                float *scratch);

/* ---- 3. Bytes ---------------------------------------------------------------------- */

/* Bytes of memory, 4096-aligned, that reading one expert of this model needs. */
uint64_t k3_expert_room(const k3_engine *e);

/* Bytes that an engine keeps for each expert of its model: where its tensors lie. */
uint64_t k3_expert_place_bytes(void);

/* Read expert `ie` of layer `il` into `room` and say where its tensors are. Sums are compared if
 * the model has any, scale codes are checked. Any number of threads may call this at once.
 * Errors  K3_EIO, K3_EMODEL, K3_ECHECK: as a step of the engine would say them */
int k3_expert_read(k3_engine *e, uint32_t il, uint32_t ie, uint8_t *room, expert_view *x,
                   k3_error *err);

/* Which model it is, for far boxes. sampled: XXH3 over the geometry that experts depend on and over
 * samples of their bytes, four of each layer, which misses most of what can differ. by_sums: as
 * k3_engine_fingerprints says. Both are the same for every copy of a model however its shards are cut.
 * Errors  K3_EIO; K3_EMODEL: a sampled expert is not there */
int k3_expert_fingerprints(k3_engine *e, k3_fingerprints *out, k3_error *err);

/* Compare an expert's bytes with the engine's sums. Returns 1: they match; 0: they differ; -1: the
 * engine has no sums of this expert. */
int k3_expert_compare(const k3_engine *e, uint32_t il, uint32_t ie, const expert_view *x);

/* Is this expert in the model's directory? true unless the engine was opened experts_only. */
bool k3_expert_has(const k3_engine *e, uint32_t il, uint32_t ie);

struct slice_expert;

/* From now on compare each expert that is read with its XXH3 in this list of n. An expert that the list
 * does not name counts as absent. For engines opened experts_only.
 * Errors  K3_ENOMEM; K3_EMODEL: an expert that is not there, or not in one piece in slot order */
int k3_expert_use_sums(k3_engine *e, const struct slice_expert *x, uint32_t n, k3_error *err);

/* Make the first bytes of a shard that holds these n experts: the length of its header, the header, and
 * blanks up to a whole page, where the six tensors of each expert follow in slot order. Names are
 * spelled as in e's checkpoint; e NULL: as released. Returns malloc'd bytes, *n_head of them; NULL: no
 * memory. */
char *k3_shard_head(const k3_engine *e, uint64_t latent, uint64_t inter, uint64_t fingerprint,
                    const struct slice_expert *x, uint32_t n, size_t *n_head);

/* Read a file of pins: a line names a layer and an expert, whatever follows; # begins a comment. fn is
 * called for each expert the first time it is named, until it returns other than 0. Of the shape only
 * n_layers, n_dense and n_experts count. Returns how many experts fn was called for.
 * Errors  K3_EIO, K3_ENOMEM; K3_EUSAGE: a line that names no expert of this model; what fn returns < 0 */
typedef int (*k3_pin_fn)(void *user, uint32_t il, uint32_t ie);
int64_t k3_pins_visit(const char *path, const k3_shape *sh, k3_pin_fn fn, void *user,
                      k3_error *err);

/* The geometry that DIR/config.json states. Errors  K3_EMODEL, K3_EIO */
int k3_config_read(k3_shape *sh, const char *dir, k3_error *err);

/* The name of one of an expert's tensors, as this checkpoint spells it. */
void k3_expert_name(const k3_engine *e, uint32_t il, uint32_t ie, int k, char *out, size_t cap);

/* Are the experts that this engine reads compared with sums? */
bool k3_engine_has_sums(const k3_engine *e);

const k3_kernels *k3_engine_table(const k3_engine *e);

/* The table of kernels without an engine: the named one, or the best that this machine has. *n_threads:
 * how many threads to compute with, `asked`, or where that is 0 one for each core within the CPU quota.
 * Errors  K3_EUSAGE, and NULL: no such table, or a machine that cannot give the bits */
const k3_kernels *k3_machine_table(const char *name, int asked, int *n_threads, k3_error *err);

#endif
