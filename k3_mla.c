/* k3_mla.c - attention over the latent cache, by tiles and by blocks. */
#include "k3_mla.h"

#include "k3_common.h"

#define MLA_BLOCK 256 /* positions of a softmax block (NUMERICS 3)  */
#define MLA_TOK   8   /* rows x heads whose queries make a tile     */
#define MLA_HEADS 8
#define MLA_ROWS  (MLA_TOK * MLA_HEADS)
#define MLA_WAVE  32  /* blocks x rows whose sums are held at once, for all heads */
STATIC_ASSERT(mla_block_is_that_of_numerics_3, MLA_BLOCK == 256);
STATIC_ASSERT(mla_block_is_whole_groups, MLA_BLOCK % K3_GROUP == 0);
STATIC_ASSERT(a_wave_holds_a_tile_of_rows, MLA_WAVE >= MLA_TOK);

/* Queries of a group of heads for some rows of one session. Query i is row i / nh, head h0 + i % nh. */
typedef struct {
    const mla_args *a;
    const mla_cut *cut;
    size_t t0, nt;    /* rows of the cut                                */
    size_t h0, nh;
    float *qp;        /* packed queries [nt x nh][row]                  */
    float *score;     /* [blocks][nt x nh][MLA_BLOCK], or one block     */
    bool keeps;       /* all blocks' scores have their place            */
    float *ctx;       /* [nt x nh][lora], in packed order               */
    float *m, *Z;     /* [nt x nh] maximum, sum                         */
} query_group;

static size_t row_floats(const k3_shape *sh) { return k3_pad(sh->kv_lora + sh->rope_dim); }
static size_t lora_floats(const k3_shape *sh) { return k3_pad(sh->kv_lora); }

/* ---- Steps of both ways ---- */

static const uint16_t *head_weights(const mla_args *a, size_t h) {
    return a->kv_b + h * (a->sh->nope_dim + a->sh->v_dim) * a->sh->kv_lora;
}

/* The queries of head h0 + hi: q_abs[j] = sum_i Uk[i][j] q_nope[i], then [q_abs | q_pe] packed.
 * local: f32[MLA_TOK x kv_lora + row] */
static void head_queries(const query_group *g, size_t hi, float *local) {
    const mla_args *a = g->a;
    const k3_shape *sh = a->sh;
    size_t dim = sh->nope_dim + sh->rope_dim, ldq = sh->n_heads * dim, lora = sh->kv_lora;
    const float *q = a->q + (g->cut->t + g->t0) * ldq + (g->h0 + hi) * dim;
    float *qabs = local, *plain = local + MLA_TOK * lora;
    a->k->chain_bf16(qabs, lora, head_weights(a, g->h0 + hi), lora, sh->nope_dim, lora, q, ldq, g->nt);
    for (size_t t = 0; t < g->nt; t++) {
        memcpy(plain, qabs + t * lora, lora * sizeof(float));
        memcpy(plain + lora, q + t * ldq + sh->nope_dim, sh->rope_dim * sizeof(float));
        a->k->pack(g->qp, g->nt * g->nh, t * g->nh + hi, plain, lora + sh->rope_dim);
    }
}

/* How many positions of block b row t of the group may see: 0..256. */
static size_t visible(const query_group *g, size_t t, size_t b) {
    uint64_t end = g->cut->pos + g->t0 + t + 1, begin = (uint64_t)b * MLA_BLOCK;
    if (end <= begin) return 0;
    return end - begin < MLA_BLOCK ? (size_t)(end - begin) : MLA_BLOCK;
}

static size_t block_count(const query_group *g) {
    return (size_t)((g->cut->pos + g->t0 + g->nt - 1) / MLA_BLOCK) + 1;
}

static const float *block_rows(const query_group *g, size_t b) {
    return g->cut->cache + b * MLA_BLOCK * row_floats(g->a->sh);
}

static float *block_scores(const query_group *g, size_t b) {
    return g->score + (g->keeps ? b * g->nt * g->nh * MLA_BLOCK : 0);
}

/* score[q][s] = (row_s . query) * scale over one block. */
static void scores_of(const query_group *g, size_t b) {
    const k3_shape *sh = g->a->sh;
    size_t n = visible(g, g->nt - 1, b), n_q = g->nt * g->nh;
    float scale = (float)(1.0 / sqrt((double)(sh->nope_dim + sh->rope_dim))), *score = block_scores(g, b);
    g->a->k->matmul_f32(score, MLA_BLOCK, block_rows(g, b), n, sh->kv_lora + sh->rope_dim, g->qp, n_q);
    for (size_t q = 0; q < n_q; q++)
        g->a->k->scale(score + q * MLA_BLOCK, score + q * MLA_BLOCK, scale, n);
}

/* The largest score of each query in block b; what a row does not see counts as -inf. */
static void maxima_of(const query_group *g, size_t b, float *m) {
    for (size_t q = 0; q < g->nt * g->nh; q++) {
        const float *score = block_scores(g, b) + q * MLA_BLOCK;
        size_t n = visible(g, q / g->nh, b);
        float most = n ? score[0] : -INFINITY;
        for (size_t s = 1; s < n; s++) most = score[s] > most ? score[s] : most;
        m[q] = most;
    }
}

/* Of block b for the heads of row t: Z_b[nh], and ctx_b[nh][lora]. Nothing where the row sees none of it. */
static void sums_of(const query_group *g, size_t t, size_t b, float *Z, float *ctx) {
    static const float ones[MLA_BLOCK] = {
#define ONES8 1, 1, 1, 1, 1, 1, 1, 1
#define ONES64 ONES8, ONES8, ONES8, ONES8, ONES8, ONES8, ONES8, ONES8
        ONES64, ONES64, ONES64, ONES64};
    STATIC_ASSERT(ones_fill_a_block, MLA_BLOCK == 4 * 64);
    const k3_kernels *k = g->a->k;
    size_t n = visible(g, t, b), q0 = t * g->nh, lora = lora_floats(g->a->sh);
    if (n == 0) return;
    float *e = block_scores(g, b) + q0 * MLA_BLOCK;
    for (size_t hi = 0; hi < g->nh; hi++) {
        float *eh = e + hi * MLA_BLOCK;
        k->exp_sub(eh, eh, g->m[q0 + hi], n);
        Z[hi] = k->dot(eh, ones, n);
    }
    k->chain_f32(ctx, lora, block_rows(g, b), row_floats(g->a->sh), n, lora, e, MLA_BLOCK, g->nh);
}

/* att = (Uv (ctx / Z)) * sigmoid(G) of head h0 + hi. local: f32[row + MLA_TOK x lora] */
static void head_output(const query_group *g, size_t hi, float *local) {
    const mla_args *a = g->a;
    const k3_shape *sh = a->sh;
    size_t ldo = (size_t)sh->n_heads * sh->v_dim, n = sh->kv_lora, lora = lora_floats(sh), h = g->h0 + hi;
    size_t at = (g->cut->t + g->t0) * ldo + h * sh->v_dim;
    float *plain = local, *ctxp = local + row_floats(sh);
    for (size_t t = 0; t < g->nt; t++) {
        float *ctx = g->ctx + (t * g->nh + hi) * lora;
        a->k->divide(ctx, ctx, g->Z[t * g->nh + hi], lora);
        for (size_t j = 0; j < n; j++) plain[j] = ctx[j / K3_GROUP * K3_GROUP + k3_xp_lane(j % K3_GROUP)];
        a->k->pack(ctxp, g->nt, t, plain, n);
    }
    a->k->matmul_bf16(a->att + at, ldo, head_weights(a, h) + sh->nope_dim * n, n, sh->v_dim, n, ctxp, g->nt);
    for (size_t t = 0; t < g->nt; t++)
        a->k->mul_sigmoid(a->att + at + t * ldo, a->att + at + t * ldo, a->g + at + t * ldo, sh->v_dim);
}

/* Lay n_parts arrays of n[i] floats out one behind the other, 64-byte aligned; with base NULL only count. Returns floats. */
static size_t carve(float *base, const size_t *n, float **const *to, size_t n_parts) {
    size_t used = 0;
    for (size_t i = 0; i < n_parts; i++) {
        *to[i] = base ? base + used : NULL;
        used += (n[i] + 15) / 16 * 16;
    }
    return used;
}

/* ---- By tiles: one thread, MLA_TOK rows x MLA_HEADS heads, block after block ---- */

typedef struct {
    float *head;         /* what head_queries and head_output need */
    float *qp, *ctx, *ctx_b, *m, *Z, *score;
} tile_mem;

static size_t tile_carve(tile_mem *t, float *base, const k3_shape *sh) {
    size_t row = row_floats(sh), lora = lora_floats(sh);
    const size_t n[] = {MLA_TOK * lora + row, MLA_ROWS * row, MLA_ROWS * lora, MLA_HEADS * lora,
                        MLA_ROWS, MLA_ROWS, MLA_ROWS * MLA_BLOCK};
    float **const to[] = {&t->head, &t->qp, &t->ctx, &t->ctx_b, &t->m, &t->Z, &t->score};
    return carve(base, n, to, sizeof n / sizeof *n);
}

size_t mla_local_floats(const k3_shape *sh) {
    tile_mem t;
    return tile_carve(&t, NULL, sh);
}

/* m of all blocks, then Z and ctx block by block, in order. */
static void tile_attend(const query_group *g, const tile_mem *mem) {
    size_t n_blocks = block_count(g), n_q = g->nt * g->nh, lora = lora_floats(g->a->sh);
    float most[MLA_ROWS], Z[MLA_HEADS];
    for (size_t b = 0; b < n_blocks; b++) {
        scores_of(g, b);
        maxima_of(g, b, most);
        for (size_t q = 0; q < n_q; q++) g->m[q] = b == 0 || most[q] > g->m[q] ? most[q] : g->m[q];
    }
    for (size_t b = 0; b < n_blocks; b++) {
        if (!g->keeps && n_blocks > 1) scores_of(g, b);
        for (size_t t = 0; t < g->nt; t++) {
            float *ctx = g->ctx + t * g->nh * lora;
            if (visible(g, t, b) == 0) continue;
            sums_of(g, t, b, Z, b == 0 ? ctx : mem->ctx_b);
            if (b > 0) g->a->k->add(ctx, mem->ctx_b, g->nh * lora);
            for (size_t hi = 0; hi < g->nh; hi++)
                g->Z[t * g->nh + hi] = b == 0 ? Z[hi] : g->Z[t * g->nh + hi] + Z[hi];
        }
    }
}

typedef struct {
    const mla_args *a;
    const mla_cut *cut;
    size_t n_cuts, n_tiles;
} tile_loop;

static size_t cut_tiles(const mla_cut *c) { return (c->n + MLA_TOK - 1) / MLA_TOK; }

/* Tile i % n_tiles of all cuts' rows, heads of group i / n_tiles. */
static void tile_one(void *ctx, size_t i, int i_thread) {
    const tile_loop *l = ctx;
    const mla_args *a = l->a;
    const mla_cut *c = l->cut;
    size_t i_tile = i % l->n_tiles, share = a->n_scores / (size_t)a->n_threads;
    tile_mem mem;
    tile_carve(&mem, a->local + (size_t)i_thread * a->local_floats, a->sh);
    for (; i_tile >= cut_tiles(c); c++) i_tile -= cut_tiles(c);
    query_group g = {.a = a, .cut = c, .t0 = i_tile * MLA_TOK, .h0 = i / l->n_tiles * MLA_HEADS, .qp = mem.qp,
                     .ctx = mem.ctx, .m = mem.m, .Z = mem.Z, .score = mem.score};
    g.nt = c->n - g.t0 < MLA_TOK ? c->n - g.t0 : MLA_TOK;
    g.nh = a->sh->n_heads - g.h0 < MLA_HEADS ? a->sh->n_heads - g.h0 : MLA_HEADS;
    g.keeps = block_count(&g) * g.nt * g.nh * MLA_BLOCK <= share;
    if (g.keeps) g.score = a->scores + (size_t)i_thread * share;
    for (size_t hi = 0; hi < g.nh; hi++) head_queries(&g, hi, mem.head);
    tile_attend(&g, &mem);
    for (size_t hi = 0; hi < g.nh; hi++) head_output(&g, hi, mem.head);
}

static void attend_tiles(const mla_args *a, const mla_cut *cut, size_t n_cuts) {
    size_t n_groups = (a->sh->n_heads + MLA_HEADS - 1) / MLA_HEADS;
    tile_loop l = {a, cut, n_cuts, 0};
    for (size_t i = 0; i < n_cuts; i++) l.n_tiles += cut_tiles(&cut[i]);
    a->loop(a->user, n_groups * l.n_tiles, 100000, tile_one, &l);
}

/* ---- By blocks: all heads, a few rows of one session, threads over blocks ---- */

typedef struct {
    float *qp, *ctx, *ctx_b, *m, *Z; /* of all heads; ctx_b: of the wave's blocks */
    float *most, *Z_b;               /* [MLA_TOK x heads] of each block of a wave */
} block_mem;

/* Groups of MLA_HEADS heads, each with its queries packed by itself. */
typedef struct {
    const mla_args *a;
    query_group all;            /* rows, and where the group of head 0 has its memory */
    block_mem mem;
    size_t n_blocks, b0, n_wave; /* blocks [b0, b0 + n_wave) are at work             */
    size_t n_groups;
} block_loop;

static size_t block_carve(block_mem *m, float *base, const k3_shape *sh) {
    size_t n_q = (size_t)MLA_TOK * sh->n_heads, row = row_floats(sh), lora = lora_floats(sh);
    size_t wave_q = (size_t)MLA_WAVE * sh->n_heads;
    const size_t n[] = {n_q * row, n_q * lora, wave_q * lora, n_q, n_q, wave_q, wave_q};
    float **const to[] = {&m->qp, &m->ctx, &m->ctx_b, &m->m, &m->Z, &m->most, &m->Z_b};
    return carve(base, n, to, sizeof n / sizeof *n);
}

size_t mla_work_floats(const k3_shape *sh) {
    block_mem m;
    return block_carve(&m, NULL, sh);
}

static size_t context_blocks(uint64_t context) { return (size_t)((context + MLA_BLOCK - 1) / MLA_BLOCK); }

size_t mla_scores_least(const k3_shape *sh, uint64_t context) {
    return context_blocks(context) * MLA_BLOCK * sh->n_heads;
}

size_t mla_scores_most(const k3_shape *sh, uint64_t context, int n_threads) {
    size_t tiles = context_blocks(context) * MLA_BLOCK * MLA_ROWS * (size_t)n_threads;
    size_t least = mla_scores_least(sh, context);
    return tiles > least ? tiles : least;
}

/* The queries of group i: those of MLA_HEADS heads for all rows. */
static query_group group_of(const block_loop *l, size_t i) {
    const k3_shape *sh = l->a->sh;
    query_group g = l->all;
    g.h0 = i * MLA_HEADS;
    g.nh = sh->n_heads - g.h0 < MLA_HEADS ? sh->n_heads - g.h0 : MLA_HEADS;
    size_t q0 = g.h0 * g.nt;
    g.qp = l->mem.qp + q0 * row_floats(sh);
    g.score = l->a->scores + q0 * l->n_blocks * MLA_BLOCK;
    g.ctx = l->mem.ctx + q0 * lora_floats(sh);
    g.m = l->mem.m + q0;
    g.Z = l->mem.Z + q0;
    return g;
}

static void blocks_queries(void *ctx, size_t h, int i_thread) {
    const block_loop *l = ctx;
    query_group g = group_of(l, h / MLA_HEADS);
    head_queries(&g, h % MLA_HEADS, l->a->local + (size_t)i_thread * l->a->local_floats);
}

/* Scores of one block and one group, group after group, so that a block stays in the processor's cache; and the largest
 * score of each query in it. */
static void blocks_scores(void *ctx, size_t i, int i_thread) {
    const block_loop *l = ctx;
    query_group g = group_of(l, i % l->n_groups);
    size_t b = l->b0 + i / l->n_groups;
    (void)i_thread;
    scores_of(&g, b);
    maxima_of(&g, b, l->mem.most + (b - l->b0) * g.nt * l->a->sh->n_heads + g.h0 * g.nt);
}

static void blocks_sums(void *ctx, size_t i, int i_thread) {
    const block_loop *l = ctx;
    query_group g = group_of(l, i % l->n_groups);
    size_t w = i / l->n_groups, q0 = w * g.nt * l->a->sh->n_heads + g.h0 * g.nt;
    (void)i_thread;
    for (size_t t = 0; t < g.nt; t++)
        sums_of(&g, t, l->b0 + w, l->mem.Z_b + q0 + t * g.nh,
                l->mem.ctx_b + (q0 + t * g.nh) * lora_floats(l->a->sh));
}

/* Add the wave's sums to those before, block after block, for the queries of one group. */
static void blocks_add(void *ctx, size_t i, int i_thread) {
    const block_loop *l = ctx;
    query_group g = group_of(l, i);
    size_t lora = lora_floats(l->a->sh);
    (void)i_thread;
    for (size_t w = 0; w < l->n_wave; w++)
        for (size_t q = 0; q < g.nt * g.nh; q++) {
            size_t from = w * g.nt * l->a->sh->n_heads + g.h0 * g.nt + q;
            float *to = g.ctx + q * lora;
            if (visible(&g, q / g.nh, l->b0 + w) == 0) continue;
            bool is_first = l->b0 + w == 0;
            g.Z[q] = is_first ? l->mem.Z_b[from] : g.Z[q] + l->mem.Z_b[from];
            if (is_first)
                memcpy(to, l->mem.ctx_b + from * lora, lora * sizeof *to);
            else
                l->a->k->add(to, l->mem.ctx_b + from * lora, lora);
        }
}

static void blocks_output(void *ctx, size_t h, int i_thread) {
    const block_loop *l = ctx;
    query_group g = group_of(l, h / MLA_HEADS);
    head_output(&g, h % MLA_HEADS, l->a->local + (size_t)i_thread * l->a->local_floats);
}

/* What a wave found: the largest scores so far. */
static void blocks_raise(const block_loop *l) {
    size_t n_q = l->all.nt * l->a->sh->n_heads;
    for (size_t w = 0; w < l->n_wave; w++)
        for (size_t q = 0; q < n_q; q++) {
            float most = l->mem.most[w * n_q + q];
            l->mem.m[q] = l->b0 + w == 0 || most > l->mem.m[q] ? most : l->mem.m[q];
        }
}

/* Rows [t0, t0 + nt) of one cut. */
static void attend_blocks(const mla_args *a, const mla_cut *cut, size_t t0, size_t nt) {
    const k3_shape *sh = a->sh;
    block_loop l = {.a = a, .all = {.a = a, .cut = cut, .t0 = t0, .nt = nt, .keeps = true}};
    uint64_t row_ns = MLA_HEADS * nt * row_floats(sh) / 30;
    size_t most = MLA_WAVE / nt;
    l.n_groups = (sh->n_heads + MLA_HEADS - 1) / MLA_HEADS;
    l.n_blocks = block_count(&l.all);
    block_carve(&l.mem, a->work, sh);
    a->loop(a->user, sh->n_heads, nt * sh->nope_dim * sh->kv_lora / 20, blocks_queries, &l);
    for (l.b0 = 0; l.b0 < l.n_blocks; l.b0 += l.n_wave) {
        l.n_wave = l.n_blocks - l.b0 < most ? l.n_blocks - l.b0 : most;
        a->loop(a->user, l.n_wave * l.n_groups, MLA_BLOCK * row_ns, blocks_scores, &l);
        blocks_raise(&l);
    }
    for (l.b0 = 0; l.b0 < l.n_blocks; l.b0 += l.n_wave) {
        l.n_wave = l.n_blocks - l.b0 < most ? l.n_blocks - l.b0 : most;
        a->loop(a->user, l.n_wave * l.n_groups, MLA_BLOCK * row_ns, blocks_sums, &l);
        a->loop(a->user, l.n_groups, l.n_wave * row_ns, blocks_add, &l);
    }
    a->loop(a->user, sh->n_heads, nt * sh->v_dim * sh->kv_lora / 20, blocks_output, &l);
}

/* ---- Which way ---- */

/* How many rows of a cut, from t0 on, have room for their scores together; at least one. */
static size_t rows_by_blocks(const mla_args *a, const mla_cut *c, size_t t0) {
    size_t n = c->n - t0 < MLA_TOK ? c->n - t0 : MLA_TOK, blocks = (size_t)((c->pos + t0 + n - 1) / MLA_BLOCK) + 1;
    size_t room = a->n_scores / (blocks * MLA_BLOCK * a->sh->n_heads);
    return n < room ? n : room;
}

/* Few rows over several blocks, with room for the scores of the last one. */
static bool goes_by_blocks(const mla_args *a, const mla_cut *c) {
    size_t blocks = (size_t)((c->pos + c->n - 1) / MLA_BLOCK) + 1;
    return c->n <= MLA_TOK && c->pos >= 4 * MLA_BLOCK && a->n_scores >= blocks * MLA_BLOCK * a->sh->n_heads;
}

void mla_attend(const mla_args *a, const mla_cut *cut, size_t n_cuts) {
    for (size_t i = 0; i < n_cuts;) {
        bool is_long = goes_by_blocks(a, &cut[i]);
        size_t n = 1, nt;
        if (!is_long) { /* this one and those that follow, together */
            while (i + n < n_cuts && !goes_by_blocks(a, &cut[i + n])) n++;
            attend_tiles(a, &cut[i], n);
        }
        for (size_t t = 0; is_long && t < cut[i].n; t += nt) {
            nt = rows_by_blocks(a, &cut[i], t);
            attend_blocks(a, &cut[i], t, nt);
        }
        i += n;
    }
}
