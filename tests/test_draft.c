/* test_draft.c - drafts propose what a plain search finds, pay or are left out, and never change a text.
 *
 * The n-gram is compared with a search written without a table. The gate is driven by a model whose costs and acceptance are
 * known, so the best width can be computed. Texts made with drafts are compared with texts made without, on the bundled
 * model, for greedy and sampled draws.
 *
 *     test_draft DEMO_DIR
 */
#include "cli/drafts.h"
#include "draft_gate.h"
#include "draft_ngram.h"

#include "test.h"

#include <math.h>
#include <stdlib.h>

static uint64_t seed = 3;

static uint32_t dice(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* ---- n-gram ---- */

static size_t same_end(const uint32_t *id, size_t n, size_t end) {
    size_t k = 0;
    while (k <= end && id[end - k] == id[n - 1 - k]) k++;
    return k;
}

/* The last earlier place that ends like the text, found by looking at each; as draft_ngram_propose says. */
static size_t search(const uint32_t *id, size_t n, uint32_t *out, size_t most) {
    size_t at[2], n_at = 0, length = 0;
    for (size_t end = n - 1; end-- > 0 && n_at < 2;) {
        size_t k = same_end(id, n, end);
        if (k < NGRAM_LEAST) continue;
        if (n_at == 0) length = k;
        at[n_at++] = end + 1;
    }
    if (n_at == 0 || (length < NGRAM_SURE && (n_at < 2 || id[at[0]] != id[at[1]]))) return 0;
    size_t m = length < NGRAM_MOST ? length : NGRAM_MOST;
    if (m > most) m = most;
    for (size_t i = 0; i < m; i++) out[i] = at[0] + i < n ? id[at[0] + i] : out[at[0] + i - n];
    return m;
}

static void test_ngram(void) {
    enum { CAP = 400 };
    static uint32_t id[CAP];
    static uint64_t mem[CAP * 4];
    draft_ngram g;
    uint64_t n_proposed = 0;
    CHECK(draft_ngram_bytes(CAP) <= sizeof mem);
    draft_ngram_init(&g, mem, CAP);
    for (int round = 0; round < 400; round++) {
        size_t n = 1 + dice(CAP), keep = dice(3) ? 0 : dice((uint32_t)n);
        uint32_t kinds = 1 + dice(6);
        for (size_t i = keep; i < n; i++) /* runs that come again, and noise */
            id[i] = i > 20 && dice(30) ? id[i - 10 - dice(2)] : dice(kinds);
        for (size_t end = 1 + dice((uint32_t)n); end <= n; end += 1 + dice(9)) {
            uint32_t got[NGRAM_MOST], want[NGRAM_MOST];
            size_t match, most = dice(NGRAM_MOST + 1);
            if (end > 1 && dice(2)) {
                draft_ngram_sync(&g, id, end - 1);
                draft_ngram_add(&g, id[end - 1]);
            } else {
                draft_ngram_sync(&g, id, end);
            }
            size_t n_got = draft_ngram_propose(&g, got, most, &match), n_want = search(id, end, want, most);
            CHECK_EQ_INT(n_got, n_want);
            CHECK(n_got != n_want || memcmp(got, want, n_got * sizeof *got) == 0);
            n_proposed += n_got;
        }
    }
    CHECK(n_proposed > 1000);
}

/* ---- The gate ---- */

/* 3,000 ids from a source whose k-th draft is right with chance a, at seconds cost[w]. Returns seconds an id, in those of
 * a pass of one row. */
static double simulate(double a, const double *cost, size_t n_offered, size_t *last) {
    draft_gate g;
    double seconds = 0;
    size_t n_ids = 0;
    draft_gate_init(&g);
    while (n_ids < 3000) {
        size_t n = draft_gate_choose(&g, 1, n_offered), right = 0;
        while (right < n && dice(1000) < a * 1000) right++;
        double s = cost[n + 1] * (0.95 + dice(100) * 0.001);
        draft_gate_count(&g, 1, n, right, s);
        seconds += s;
        n_ids += right + 1;
        *last = n;
    }
    return seconds / (double)n_ids / cost[1];
}

static double best_of(double a, const double *cost, size_t n_offered) {
    double best = 1, expected = 1, chance = 1;
    for (size_t k = 1; k <= n_offered; k++) {
        expected += chance *= a;
        if (cost[k + 1] / cost[1] / expected < best) best = cost[k + 1] / cost[1] / expected;
    }
    return best;
}

static void test_gate(void) {
    double disk[9], memory[9], flat[9], dear[9];
    size_t last;
    for (int w = 1; w < 9; w++) {
        disk[w] = pow(w, 0.74);
        memory[w] = 1 + 0.2 * (w - 1);
        flat[w] = 1 + 0.02 * (w - 1);
        dear[w] = w;
    }
    const struct {
        const double *cost;
        double a, most; /* of the best there is */
    } TRY[] = {{disk, 0.95, 1.15}, {memory, 0.9, 1.15}, {memory, 0.5, 1.1}, {flat, 0.9, 1.15}, {flat, 0.3, 1.15}};
    for (size_t i = 0; i < sizeof TRY / sizeof *TRY; i++) {
        double got = simulate(TRY[i].a, TRY[i].cost, 7, &last), best = best_of(TRY[i].a, TRY[i].cost, 7);
        if (!CHECK(got <= TRY[i].most * best)) printf("    try %zu: %.3f, best %.3f\n", i, got, best);
    }
    const double *bad[] = {disk, memory, flat, dear};
    for (int i = 0; i < 4; i++) { /* drafts that are never right cost at most 3 % */
        double got = simulate(0.02, bad[i], 7, &last);
        if (!CHECK(got <= 1 / 0.97)) printf("    bad drafts, costs %d: %.3f\n", i, got);
    }
    CHECK(simulate(0.9, dear, 7, &last) <= 1 / 0.97);
    CHECK(simulate(0.9, memory, 0, &last) <= 1.01 && last == 0);
}

/* ---- Texts ---- */

enum { N_TEXT = 160 };

static k3_engine *engine(const char *dir, uint32_t revocable) {
    k3_options o;
    k3_error err;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = dir;
    o.context = 400;
    o.revocable = revocable;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) {
        printf("    %s\n", err.text);
        exit(1);
    }
    return e;
}

/* Ids and the hash of all rows; d NULL: without drafts. */
static uint64_t write_text(k3_session *s, drafts *d, const k3_sampler *sp, const uint32_t *prompt, size_t n,
                           uint32_t *out) {
    const k3_engine *e = k3_session_engine(s);
    size_t V = k3_engine_shape(e)->vocab_size;
    float *row = malloc(V * sizeof *row);
    void *scratch = malloc(k3_sample_scratch(V));
    uint64_t fnv = K3_FNV_BASIS;
    k3_error err = {""};
    if (d) drafts_settle(d);
    k3_session_reset(s);
    int rc = k3_session_feed(s, prompt, n, K3_ROWS_LAST, row, &err);
    for (size_t i = 0; rc == 0 && i < N_TEXT; i++) {
        uint64_t pos = d ? drafts_pos(d) : k3_session_pos(s);
        CHECK_EQ_INT(pos, n + i);
        out[i] = k3_sample(e, sp, row, V, pos - 1, scratch);
        rc = d ? drafts_run(d, out[i], row, &err) : k3_session_feed(s, &out[i], 1, K3_ROWS_LAST, row, &err);
        fnv = k3_fnv1a(fnv, row, V * sizeof *row);
    }
    if (!CHECK(rc == 0)) printf("    %s\n", err.text);
    free(row);
    free(scratch);
    return fnv;
}

static void test_texts(const char *dir) {
    static uint32_t want[N_TEXT], got[N_TEXT];
    k3_engine *plain = engine(dir, 0), *e = engine(dir, drafts_revocable(DRAFT_AUTO));
    uint32_t prompt[60], V = k3_engine_shape(e)->vocab_size;
    uint64_t accepted = 0, drafted = 0;
    k3_session *a, *b;
    k3_error err;
    drafts d;
    for (int i = 0; i < 60; i++) prompt[i] = i < 12 ? dice(V) : prompt[i - 12];
    CHECK(k3_session_new(&a, plain, 0, &err) == 0 && k3_session_new(&b, e, 0, &err) == 0);
    for (int t = 0; t < 12; t++) {
        const int width[] = {DRAFT_AUTO, 1, 3, 7};
        k3_sampler sp = {.temperature = t / 4 * 0.4f, .top_p = 1, .seed = (uint64_t)t};
        size_t n = 30 + dice(31);
        uint64_t rows = write_text(a, NULL, &sp, prompt, n, want);
        CHECK_EQ_INT(drafts_open(&d, b, width[t % 4], V), 0);
        for (int twice = 0; twice < 2; twice++) {
            CHECK(write_text(b, &d, &sp, prompt, n, got) == rows);
            CHECK(memcmp(got, want, sizeof want) == 0);
        }
        drafts_settle(&d);
        CHECK_EQ_INT(k3_session_pos(b), n + N_TEXT);
        CHECK(d.passes + d.accepted >= 2 * N_TEXT);
        accepted += d.accepted;
        drafted += d.drafted;
        drafts_close(&d);
    }
    CHECK(accepted > 200 && drafted >= accepted);
    k3_session_free(a);
    CHECK(k3_session_new(&a, plain, 0, &err) == 0 && drafts_open(&d, a, 7, V) == 0);
    CHECK_EQ_INT(d.width, 0); /* an engine that cannot take rows back */
    drafts_close(&d);
    k3_session_free(a);
    k3_session_free(b);
    k3_engine_close(plain);
    k3_engine_close(e);
}

int main(int argc, char **argv) {
    test_begin("draft");
    test_ngram();
    test_gate();
    test_texts(argc > 1 ? argv[1] : "demo");
    return test_finish();
}
