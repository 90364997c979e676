/* draft_ngram.c - a table of the last occurrence of every NGRAM_LEAST ids, and a chain to those before. */
#include "draft_ngram.h"

#include <string.h>

static size_t table_size(size_t cap) {
    size_t n = 64;
    while (n < cap) n *= 2;
    return n;
}

size_t draft_ngram_bytes(size_t cap) { return (2 * cap + table_size(cap)) * sizeof(uint32_t); }

void draft_ngram_init(draft_ngram *g, void *mem, size_t cap) {
    *g = (draft_ngram){.id = mem, .cap = cap, .n_table = table_size(cap)};
    g->prev = g->id + cap;
    g->last = g->prev + cap;
    memset(g->last, 0, g->n_table * sizeof *g->last);
}

/* Place in the table of the NGRAM_LEAST ids that end at `end`. */
static size_t slot_of(const draft_ngram *g, size_t end) {
    uint64_t h = 0;
    for (size_t i = end + 1 - NGRAM_LEAST; i <= end; i++) h = (h ^ g->id[i]) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 32) & (g->n_table - 1);
}

/* Occurrences that end before `to`. */
static void index_to(draft_ngram *g, size_t to) {
    for (; g->n_indexed < to; g->n_indexed++) {
        if (g->n_indexed + 1 < NGRAM_LEAST) continue;
        uint32_t *last = &g->last[slot_of(g, g->n_indexed)];
        g->prev[g->n_indexed] = *last;
        *last = (uint32_t)g->n_indexed + 1;
    }
}

void draft_ngram_sync(draft_ngram *g, const uint32_t *ids, size_t n) {
    size_t kept = g->n < n ? g->n : n;
    if (n < g->n_indexed || (kept && memcmp(g->id, ids, kept * sizeof *ids) != 0)) {
        memset(g->last, 0, g->n_table * sizeof *g->last);
        g->n_indexed = kept = 0;
    }
    memcpy(g->id + kept, ids + kept, (n - kept) * sizeof *ids);
    g->n = n;
    index_to(g, n > 0 ? n - 1 : 0); /* the end of the text is what is looked for */
}

void draft_ngram_add(draft_ngram *g, uint32_t id) {
    if (g->n == g->cap) return;
    g->id[g->n++] = id;
    index_to(g, g->n - 1);
}

/* How many ids before and at `at` are those at the end of the text. */
static size_t match_at(const draft_ngram *g, size_t at) {
    size_t n = 0;
    while (n <= at && n < g->n && g->id[at - n] == g->id[g->n - 1 - n]) n++;
    return n;
}

size_t draft_ngram_propose(const draft_ngram *g, uint32_t *out, size_t most, size_t *match) {
    *match = 0;
    if (g->n < NGRAM_LEAST + 1) return 0;
    size_t found[2], n_found = 0, length = 0;
    uint32_t at = g->last[slot_of(g, g->n - 1)];
    for (int i = 0; at && n_found < 2 && i < 64; i++, at = g->prev[at - 1]) {
        size_t n = match_at(g, at - 1);
        if (n < NGRAM_LEAST) continue; /* another one of the same place in the table */
        if (n_found == 0) length = n;
        found[n_found++] = at; /* what follows it */
    }
    if (n_found == 0) return 0;
    if (length < NGRAM_SURE && (n_found < 2 || g->id[found[0]] != g->id[found[1]])) return 0;
    size_t n = length < NGRAM_MOST ? length : NGRAM_MOST;
    if (n > most) n = most;
    for (size_t i = 0; i < n; i++) /* a copy that reaches the end goes on with what it proposed */
        out[i] = found[0] + i < g->n ? g->id[found[0] + i] : out[found[0] + i - g->n];
    *match = length;
    return n;
}
