/* k3_sample.c - section 13: the draw of an id from a row of logits. */
#include "k3.h"

#include "k3_common.h"
#include "k3_fp.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    sample_row r = {.k = k3_engine_table(e), .l = kept, .e = (float *)(void *)id, .n = vocab_size};
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

