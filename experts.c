/* experts.c - the arithmetic of routed experts: one format descriptor, one batch.
 *
 * The work of a batch is cut by output row: first rows of h = SiTU(w1 z, w3 z), then rows of w2 h. Each
 * term is rounded to a multiple of 2^-40 and added as an integer, so the sum does not depend on the
 * order of experts, threads or machines (NUMERICS 5).
 */
#include "experts.h"

static uint64_t mxfp4_lengths(uint64_t latent, uint64_t inter, uint64_t n[N_EXPERT_TENSORS]) {
    for (int k = 0; k < N_EXPERT_TENSORS; k++) n[k] = latent * inter / (k % 2 ? K3_GROUP : 2);
    return 3 * (n[W1_PACKED] + n[W1_SCALE]);
}

static void mxfp4_matmul(const k3_kernels *k, float *y, const expert_view *x, enum expert_matrix m,
                         size_t row, size_t n_rows, size_t n_cols, const float *xp, size_t batch) {
    k->matmul_mxfp4(y, n_rows, x->p[2 * m] + row * (n_cols / 2),
                    x->p[2 * m + 1] + row * (n_cols / K3_GROUP), n_rows, n_cols, xp, batch);
}

const expert_format expert_mxfp4 = {
    "MXFP4",
    {"w1.weight_packed", "w1.weight_scale", "w3.weight_packed", "w3.weight_scale",
     "w2.weight_packed", "w2.weight_scale"},
    mxfp4_lengths,
    mxfp4_matmul,
};

/* One parallel loop over a batch. */
typedef struct {
    const expert_batch *b;
    expert_task *const *task;
    uint32_t n_tasks;
    size_t tile; /* rows of a piece */
} batch_loop;

static float *loop_local(const batch_loop *l, int i_thread) {
    return l->b->local + (size_t)i_thread * l->b->local_floats;
}

/* Pack one expert's rows of z side by side. */
static void batch_gather(void *ctx, size_t i, int i_thread) {
    const batch_loop *l = ctx;
    const expert_batch *b = l->b;
    const expert_task *t = l->task[i];
    size_t lat = b->math.latent;
    (void)i_thread;
    for (uint32_t j = 0; j < t->n; j++)
        b->math.k->pack(b->zpair + t->at * lat, t->n, j, b->z + b->pair_row[t->first + j] * lat,
                        lat);
}

/* h = SiTU(w1 z, w3 z) for one tile of rows of one expert, packed as the input of w2. */
static void batch_inner(void *ctx, size_t i, int i_thread) {
    const batch_loop *l = ctx;
    const expert_batch *b = l->b;
    const expert_math *m = &b->math;
    const expert_task *t = l->task[i % l->n_tasks]; /* neighbouring pieces are of different experts */
    size_t row = i / l->n_tasks * l->tile, rows = tile_rows(row, m->inter, l->tile), n = t->n;
    const float *zp = b->n_rows == 1 ? b->zp : b->zpair + t->at * m->latent;
    float *hp = b->hpair + t->at * m->inter, *g = loop_local(l, i_thread), *u = g + n * rows;
    b->format->matmul(m->k, g, &t->view, EXPERT_W1, row, rows, m->latent, zp, n);
    b->format->matmul(m->k, u, &t->view, EXPERT_W3, row, rows, m->latent, zp, n);
    m->k->situ(g, g, u, m->beta, m->linear_beta, n * rows);
    for (size_t j = 0; j < n; j++)
        for (size_t r = 0; r < rows; r++)
            hp[k3_xp_group(m->inter, n, j, (row + r) / K3_GROUP) + k3_xp_lane(r % K3_GROUP)] =
                g[j * rows + r];
}

/* Q += q40(w * (w2 h)) for one tile of rows of every expert: no other piece touches these rows of Q. */
static void batch_outer(void *ctx, size_t i, int i_thread) {
    const batch_loop *l = ctx;
    const expert_batch *b = l->b;
    const expert_math *m = &b->math;
    size_t row = i * l->tile, rows = tile_rows(row, m->latent, l->tile);
    float *y = loop_local(l, i_thread);
    for (uint32_t x = 0; x < l->n_tasks; x++) {
        expert_task *t = l->task[x];
        b->format->matmul(m->k, y, &t->view, EXPERT_W2, row, rows, m->inter,
                          b->hpair + t->at * m->inter, t->n);
        for (uint32_t j = 0; j < t->n; j++) {
            uint32_t pair = t->first + j;
            size_t bad = m->k->add_q40(b->Q + b->pair_row[pair] * m->latent + row, y + j * rows,
                                       b->pair_w[pair], rows);
            if (bad == rows) continue;
            pool_min(&t->bad_row, row + bad);
            if (b->is_bad) __atomic_store_n(&b->is_bad[b->pair_row[pair]], 1, __ATOMIC_RELAXED);
        }
    }
}

/* Nanoseconds that one core takes for one output row: n_cols weights of n_tasks experts, times n_pairs
 * rows of z. Weights come at 8 GB/s, arithmetic is done at 80 GFLOP/s. */
static uint64_t row_ns(size_t n_cols, size_t n_tasks, size_t n_pairs) {
    return n_cols * (2 * n_tasks + n_pairs) / 32;
}

void experts_batch(const expert_batch *b, expert_task *const *task, uint32_t n_tasks) {
    const expert_math *m = &b->math;
    batch_loop l = {b, task, n_tasks, ROW_TILE};
    size_t n_pairs = 0, most = (size_t)b->n_threads * TILES_A_THREAD;
    for (uint32_t x = 0; x < n_tasks; x++) {
        n_pairs += task[x]->n;
        task[x]->bad_row = UINT64_MAX;
    }
    if (b->n_rows > 1) pool_run(b->pool, n_tasks, n_pairs * m->latent / n_tasks, batch_gather, &l);
    if (tile_count(m->inter, l.tile) * n_tasks < most) l.tile = K3_GROUP;
    pool_run(b->pool, tile_count(m->inter, l.tile) * n_tasks,
             2 * l.tile * row_ns(m->latent, 1, n_pairs / n_tasks), batch_inner, &l);
    l.tile = tile_for(m->latent, b->n_threads);
    pool_run(b->pool, tile_count(m->latent, l.tile), l.tile * row_ns(m->inter, n_tasks, n_pairs),
             batch_outer, &l);
}

size_t expert_one_floats(const expert_math *m) {
    return k3_pad(m->latent) + k3_pad(m->inter) + 2 * ROW_TILE;
}

bool expert_one(const expert_math *m, const expert_view *x, const float *z, float w, int64_t *Q,
                float *scratch) {
    static const uint32_t row[1] = {0};
    float *zp = scratch, *hp = zp + k3_pad(m->latent);
    expert_task t = {.view = *x, .n = 1}, *task[1] = {&t};
    const expert_batch one = {.format = &expert_mxfp4,
                              .math = *m,
                              .n_threads = 1,
                              .n_rows = 1,
                              .z = z,
                              .zp = zp,
                              .pair_row = row,
                              .pair_w = &w,
                              .Q = Q,
                              .hpair = hp,
                              .local = hp + k3_pad(m->inter)};
    m->k->pack(zp, 1, 0, z, m->latent);
    experts_batch(&one, task, 1);
    return t.bad_row == UINT64_MAX;
}
