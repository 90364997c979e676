/* experts.h - one expert's arithmetic and bytes, for the two programs that compute experts.
 *
 * k3.c computes them beside the trunk, tier_server.c for others; a second copy of the arithmetic
 * would sooner or later give a second set of bits. Three parts:
 *   1. the six tensors of an expert and where they lie;
 *   2. one tile of rows of w1, w3 and of w2, inline;
 *   3. what k3.c does for the server: read an expert, checked, and name the model.
 * Internal: nothing here is part of the library's interface.
 */
#ifndef K3_EXPERTS_H
#define K3_EXPERTS_H

#include "k3.h"
#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

/* ---- 1. Six tensors ---------------------------------------------------------------
 *
 * In the order their bytes lie in a slot: w1, w3 [inter][latent], w2 [latent][inter]. */
enum { W1_PACKED, W1_SCALE, W3_PACKED, W3_SCALE, W2_PACKED, W2_SCALE, N_EXPERT_TENSORS };

/* Where they lie in memory. */
typedef struct {
    const uint8_t *p[N_EXPERT_TENSORS];
} expert_view;

/* Their lengths; returns the sum of them, the bytes of one expert. latent, inter % K3_GROUP == 0 */
static inline uint64_t expert_lengths(uint64_t latent, uint64_t inter,
                                      uint64_t n[N_EXPERT_TENSORS]) {
    for (int k = 0; k < N_EXPERT_TENSORS; k++) n[k] = latent * inter / (k % 2 ? K3_GROUP : 2);
    return 3 * (n[W1_PACKED] + n[W1_SCALE]);
}

/* ---- 2. Arithmetic (K3-SPEC 3.5, NUMERICS 2, 3, 5) --------------------------------- */

/* Round to nearest, subnormals kept, no traps (NUMERICS 1): every thread that computes, on entry. A
 * few cycles. */
static inline void fp_default(void) {
#if defined(__SSE2__)
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
}

/* Output rows a thread takes at a time: three packed groups, and a multiple of the 6 rows that the
 * kernels keep in flight. */
#define ROW_TILE 96

static inline size_t tile_count(size_t n_rows) { return (n_rows + ROW_TILE - 1) / ROW_TILE; }

/* Rows of the tile that begins at `row`. */
static inline size_t tile_rows(size_t row, size_t n_rows) {
    return n_rows - row < ROW_TILE ? n_rows - row : ROW_TILE;
}

static inline int thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

typedef struct {
    const k3_kernels *k;
    size_t latent, inter;
    float beta, linear_beta;
} expert_math;

/* h = SiTU(w1 z, w3 z), rows [row, row + rows) of inter, packed as w2's input.
 *
 * Shapes  zp: packed f32[n][latent]   hp: packed f32[n][inter]   local: f32[2 n rows]
 *         row % K3_GROUP == 0; rows % K3_GROUP == 0 */
static inline void expert_inner_rows(const expert_math *m, const expert_view *x, size_t row,
                                     size_t rows, const float *zp, size_t n, float *hp,
                                     float *local) {
    size_t lat = m->latent;
    float *g = local, *u = local + n * rows;
    m->k->matmul_mxfp4(g, rows, x->p[W1_PACKED] + row * (lat / 2),
                       x->p[W1_SCALE] + row * (lat / K3_GROUP), rows, lat, zp, n);
    m->k->matmul_mxfp4(u, rows, x->p[W3_PACKED] + row * (lat / 2),
                       x->p[W3_SCALE] + row * (lat / K3_GROUP), rows, lat, zp, n);
    m->k->situ(g, g, u, m->beta, m->linear_beta, n * rows);
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < rows; i++)
            hp[k3_xp_group(m->inter, n, j, (row + i) / K3_GROUP) + k3_xp_lane(i % K3_GROUP)] =
                g[j * rows + i];
}

/* y = w2 h, rows [row, row + rows) of latent; y: f32[n][rows]. */
static inline void expert_outer_rows(const expert_math *m, const expert_view *x, size_t row,
                                     size_t rows, const float *hp, size_t n, float *y) {
    m->k->matmul_mxfp4(y, rows, x->p[W2_PACKED] + row * (m->inter / 2),
                       x->p[W2_SCALE] + row * (m->inter / K3_GROUP), rows, m->inter, hp, n);
}

/* ---- 3. Bytes ---------------------------------------------------------------------- */

/* Memory, 4096-aligned, that reading one expert of this model needs. */
uint64_t k3_expert_room(const k3_engine *e);

/* What an engine keeps of each expert of its model: where its tensors lie. */
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

/* Are these the bytes that the engine's sums tell of? 1, they are; 0, others; -1, it has no sums that
 * could tell. */
int k3_expert_compare(const k3_engine *e, uint32_t il, uint32_t ie, const expert_view *x);

/* Of an engine that was opened experts_only: is this expert there? Of any other: true. */
bool k3_expert_has(const k3_engine *e, uint32_t il, uint32_t ie);

struct slice_expert;

/* From now on compare each expert that is read with its XXH3 in this list of n; what it does not
 * name is not there any more. For engines opened experts_only.
 * Errors  K3_ENOMEM; K3_EMODEL: an expert that is not there, or not in one piece in slot order */
int k3_expert_use_sums(k3_engine *e, const struct slice_expert *x, uint32_t n, k3_error *err);

/* How a shard with these n experts begins: the length of its header, that, and blanks, so that what
 * follows, six tensors of each expert in slot order, begins at a whole page. malloc'd, *n_head bytes;
 * NULL: no memory. Names are spelled as in e's checkpoint, or with NULL as released. */
char *k3_shard_head(const k3_engine *e, uint64_t latent, uint64_t inter, uint64_t fingerprint,
                    const struct slice_expert *x, uint32_t n, size_t *n_head);

/* Visit the experts that a file of pins names, a line each (layer, expert, whatever follows; # begins a
 * comment): each the first time it is named, until `fn` says other than 0. Of the shape only n_layers,
 * n_dense and n_experts count.
 * Returns how many were visited.
 * Errors  K3_EIO, K3_ENOMEM; K3_EUSAGE: a line that names no expert of this model; what fn says < 0 */
typedef int (*k3_pin_fn)(void *user, uint32_t il, uint32_t ie);
int64_t k3_pins_visit(const char *path, const k3_shape *sh, k3_pin_fn fn, void *user,
                      k3_error *err);

/* The geometry that DIR/config.json states. Errors  K3_EMODEL, K3_EIO */
int k3_config_read(k3_shape *sh, const char *dir, k3_error *err);

/* The name of one of an expert's tensors, as this checkpoint spells it. */
void k3_expert_name(const k3_engine *e, uint32_t il, uint32_t ie, int k, char *out, size_t cap);

/* Whether what is read is compared with sums. */
bool k3_engine_has_sums(const k3_engine *e);

const k3_kernels *k3_engine_table(const k3_engine *e);

/* The same without an engine: the named table or the best there is, and how many threads it has;
 * `asked` 0 is one for each core.
 * Errors  K3_EUSAGE, and NULL: no such table, or a machine that cannot give the bits */
const k3_kernels *k3_machine_table(const char *name, int asked, int *n_threads, k3_error *err);

#endif
