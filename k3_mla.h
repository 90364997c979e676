/* k3_mla.h - attention over the latent cache (NUMERICS 3, K3-SPEC 3.4): what MLA does between its matrices.
 *
 * The cache has one row [c | k_pe] a position, shared by all heads. Two ways give the same bits:
 *   - tiles: a thread takes 8 rows x 8 heads over all blocks of the cache, for prompts;
 *   - blocks: threads take blocks of 256 positions, for all heads at once, so that each cache row is loaded
 *     once and all threads work however few rows there are; for single rows over long contexts.
 * Scores are kept between the search for their maximum and the sums where there is room for them.
 */
#ifndef K3_MLA_H
#define K3_MLA_H

#include "k3.h"
#include "k3_pool.h"
#include "kernels.h"

/* Rows of one session in the part at work: rows [t, t + n), the first at position pos. */
typedef struct {
    const float *cache; /* f32[context][k3_pad(kv_lora + rope)], packed rows, those of this part included */
    uint64_t pos;
    size_t t, n;
} mla_cut;

typedef struct {
    const k3_shape *sh;
    const k3_kernels *k;
    int n_threads;
    /* Run fn for 0..n-1 on all threads, as pool_run. */
    void (*loop)(void *user, size_t n, uint64_t unit_ns, pool_fn fn, void *ctx);
    void *user;
    const uint16_t *kv_b; /* bf16[heads x (nope + v)][kv_lora]                       */
    const float *q, *g;   /* f32[T][heads][nope + rope], f32[T][heads][v]            */
    float *att;           /* out: f32[T][heads][v]                                   */
    float *local;         /* f32[n_threads][local_floats], at least mla_local_floats */
    size_t local_floats;
    float *work;          /* f32[mla_work_floats]                                    */
    float *scores;        /* f32[n_scores], at least mla_scores_least                */
    size_t n_scores;
} mla_args;

/* Memory in floats: of each thread; for the way by blocks; the least for scores, one row over `context` positions; and the
 * most that is of use with n_threads. */
size_t mla_local_floats(const k3_shape *sh);
size_t mla_work_floats(const k3_shape *sh);
size_t mla_scores_least(const k3_shape *sh, uint64_t context);
size_t mla_scores_most(const k3_shape *sh, uint64_t context, int n_threads);

/* att = (Uv (softmax(scores) c)) * sigmoid(G) for all rows of all cuts. */
void mla_attend(const mla_args *a, const mla_cut *cut, size_t n_cuts);

#endif
