/* test_engine.c - one hash, end to end.
 *
 * Values by others: demo/bits.tsv (two independent programs), demo/golden.json (a torch forward),
 * and scripts/reference.py (float64, written from the specification) over random checkpoints of
 * several geometries. The engine is included, so that single layers can be fed the reference's
 * own input and a fault can be planted.
 *
 *     test_engine DEMO_DIR SCRIPTS_DIR DATA_DIR [--quick]
 *
 * --quick is for emulators: fewer combinations, no reference runs.
 */
#include <stdlib.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif
#define malloc(n) (n_mallocs++, malloc(n))
#define calloc(n, m) (n_mallocs++, calloc(n, m))
static long n_mallocs; /* allocations by the engine itself */
#include "../k3.c"
#include "../k3_sample.c"

#include <json-c/json.h>
#undef malloc
#undef calloc
#include "greedy.h"
#include "test.h"

static const char *demo_dir, *scripts_dir, *data_dir;
static bool is_quick, is_short; /* is_short: --short, for `make test`: less of what is slow */

#define MAX_IDS 1024

/* ---- Running ---- */

static k3_engine *open_model(const char *dir, const char *kernels, int n_threads, int chunk) {
    k3_options o;
    k3_error err;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = dir;
    o.kernels = kernels;
    o.n_threads = n_threads;
    o.chunk = chunk;
    if (k3_engine_open(&e, &o, &err) < 0) {
        printf("open %s: %s\n", dir, err.text);
        return NULL;
    }
    return e;
}

static int generate(k3_session *s, const uint32_t *prompt, size_t n_prompt, size_t n_gen,
                    uint32_t *out, hashes *h) {
    k3_error err = {""};
    int rc = greedy_run(s, k3_engine_shape(s->e)->vocab_size, prompt, n_prompt, n_gen, out, h, &err);
    if (rc < 0) printf("generate: %s\n", err.text);
    return rc;
}

/* *m = max(*m, v), where a NaN is the largest value. */
static void keep_max(double *m, double v) {
    if (!(v <= *m)) *m = v;
}

/* ---- Golden prompts ---- */

static size_t parse_ids(const char *text, uint32_t *ids) {
    size_t n = 0;
    for (char *end; *text >= '0' && *text <= '9' && n < MAX_IDS; text = *end == ',' ? end + 1 : end)
        ids[n++] = (uint32_t)strtoul(text, &end, 10);
    return n;
}

/* Read line `index` of a TSV; *rest is what follows the tab behind its first column. false: no such
 * line. */
static bool tsv_line(const char *path, int index, char *line, int cap, char **rest) {
    FILE *f = fopen(path, "r");
    bool is_found = false;
    while (f && !is_found && fgets(line, cap, f)) {
        char *tab;
        is_found =
            strtol(line, &tab, 10) == index && *tab == '\t' && line[0] >= '0' && line[0] <= '9';
        *rest = tab + 1;
    }
    if (f) fclose(f);
    return is_found;
}

static size_t golden_prompt(int index, uint32_t *ids) {
    char path[4096], line[8192], *rest;
    snprintf(path, sizeof path, "%s/golden_prompts.tsv", data_dir);
    return tsv_line(path, index, line, sizeof line, &rest) ? parse_ids(rest, ids) : 0;
}

static bool golden_hashes(int index, hashes *h) {
    char path[4096], line[256], *rest;
    snprintf(path, sizeof path, "%s/bits.tsv", demo_dir);
    return tsv_line(path, index, line, sizeof line, &rest) &&
           sscanf(rest, "%llx %llx %llx", (unsigned long long *)&h->ids,
                  (unsigned long long *)&h->logits, (unsigned long long *)&h->trace) == 3;
}

#define N_GOLDEN 13

/* Compare every published hash, with one kernel set, thread count and chunk. */
static void test_golden(const char *kernels, int n_threads, int chunk, int first, int step_by) {
    uint32_t prompt[MAX_IDS], out[32];
    k3_error err;
    k3_session *s;
    k3_engine *e = open_model(demo_dir, kernels, n_threads, chunk);
    if (!CHECK(e && k3_session_new(&s, e, 0, &err) == 0)) return;
    for (int i = first; i < N_GOLDEN; i += step_by) {
        hashes want, got;
        size_t n = golden_prompt(i, prompt);
        if (!CHECK(n > 0 && golden_hashes(i, &want))) break;
        CHECK(generate(s, prompt, n, 32, out, &got) == 0);
        bool is_same = got.ids == want.ids && got.logits == want.logits && got.trace == want.trace;
        if (!CHECK(is_same))
            printf("    prompt %d, %s, %d threads, chunk %d\n", i, kernels, n_threads, chunk);
    }
    k3_session_free(s);
    k3_engine_close(e);
}

static void test_golden_all(void) {
    static const int threads[] = {1, 2, 3}, chunks[] = {1, 7, 64};
    for (const char *const *k = k3_kernels_linked(); *k; k++) {
        if (!k3_kernels_is_supported(*k)) {
            SKIP(*k);
            continue;
        }
        bool is_slow = is_quick || is_short || strcmp(*k, "ref") == 0;
        int n_few = is_short && strcmp(*k, "ref") == 0 ? 4 : 13;
        test_golden(*k, 1, 64, 0, !is_quick ? 1 : strcmp(*k, "ref") == 0 ? 13 : 6);
        for (int t = 0; t < 3; t++)
            for (int c = 0; c < 3; c++)
                if (!is_slow || t == c)
                    test_golden(*k, threads[t], chunks[c], is_slow ? 0 : 2, is_slow ? n_few : 5);
    }
}

/* Compare with the torch logits of three prompts. */
static void test_golden_logits(void) {
    char path[4096];
    k3_error err;
    snprintf(path, sizeof path, "%s/golden.json", demo_dir);
    json_object *top = json_object_from_file(path), *cases, *ids, *row;
    k3_engine *e = open_model(demo_dir, NULL, 0, 0);
    k3_session *s;
    int n_rows = 0;
    if (!CHECK(top && e && json_object_object_get_ex(top, "cases", &cases) &&
               k3_session_new(&s, e, 0, &err) == 0))
        return;
    size_t V = k3_engine_shape(e)->vocab_size;
    float *logits = malloc(V * sizeof *logits);
    for (size_t i = 0; i < json_object_array_length(cases); i++) {
        json_object *c = json_object_array_get_idx(cases, i);
        uint32_t prompt[MAX_IDS];
        if (!json_object_object_get_ex(c, "last_prompt_logits", &row)) continue;
        json_object_object_get_ex(c, "prompt_ids", &ids);
        size_t n = json_object_array_length(ids);
        for (size_t j = 0; j < n; j++)
            prompt[j] = (uint32_t)json_object_get_int64(json_object_array_get_idx(ids, j));
        k3_session_reset(s);
        CHECK(k3_session_feed(s, prompt, n, K3_ROWS_LAST, logits, &err) == 0);
        double worst = 0;
        for (size_t v = 0; v < V; v++)
            keep_max(&worst,
                     fabs(logits[v] - json_object_get_double(json_object_array_get_idx(row, v))));
        if (!CHECK(worst < 5e-5)) printf("    case %zu: %g from the torch logits\n", i, worst);
        n_rows++;
    }
    CHECK_EQ_INT(n_rows, 3);
    free(logits);
    k3_session_free(s);
    k3_engine_close(e);
    json_object_put(top);
}

/* ---- Against the float64 reference ---- */

typedef struct {
    uint32_t n_pos, n_layers, hidden, vocab, n_prompt, n_gen;
    uint32_t ids[MAX_IDS];
    float margin[64];
    float *logits; /* [n_pos][vocab] */
    FILE *f;       /* at the first layer record */
} trace_file;

static bool read_u32(FILE *f, uint32_t *to, size_t n) { return fread(to, 4, n, f) == n; }
static bool read_f32(FILE *f, float *to, size_t n) { return fread(to, 4, n, f) == n; }

static bool trace_open(trace_file *t, const char *path) {
    char magic[4];
    uint32_t version;
    t->f = fopen(path, "rb");
    if (!t->f || fread(magic, 1, 4, t->f) != 4 || memcmp(magic, "K3RT", 4) != 0) return false;
    if (!read_u32(t->f, &version, 1) || version != 1 || !read_u32(t->f, &t->n_pos, 6)) return false;
    if (t->n_prompt + t->n_gen > MAX_IDS || t->n_gen > 64) return false;
    t->logits = malloc((size_t)t->n_pos * t->vocab * sizeof(float));
    return read_u32(t->f, t->ids, t->n_prompt + t->n_gen) && read_f32(t->f, t->margin, t->n_gen) &&
           read_f32(t->f, t->logits, (size_t)t->n_pos * t->vocab);
}

/* Read the next record: blocks and P before a layer, and what the layer must give. */
static bool trace_layer(trace_file *t, stream_bufs *b, uint32_t *n_blocks, float *want) {
    size_t n = (size_t)t->n_pos * t->hidden;
    if (!read_u32(t->f, n_blocks, 1)) return false;
    for (uint32_t j = 0; j < *n_blocks; j++)
        if (!read_f32(t->f, b->blocks + j * b->n * t->hidden, n)) return false;
    return read_f32(t->f, b->P, n) && (!want || read_f32(t->f, want, n));
}

/* Feed each layer the reference's own input: its output must agree to 1e-5 of the largest element. */
static void test_layers(k3_session *s, trace_file *t, const char *name) {
    k3_engine *e = s->e;
    k3_error err = {""};
    size_t n = (size_t)t->n_pos * t->hidden;
    float *want = malloc(n * sizeof *want);
    float *row = malloc(t->vocab * sizeof *row), *head = malloc(t->vocab * sizeof *head);
    k3_feed feed = {.session = s, .ids = t->ids, .n = t->n_pos, .rows = K3_ROWS_LAST, .logits = row};
    k3_pass p;
    k3_session_reset(s);
    if (!CHECK(pass_begin(&p, e, &feed, 1, &err) == 0)) return;
    round_list(&p);
    CHECK_EQ_INT(p.n_rows, t->n_pos);
    step st = {.e = e, .p = &p, .b = e->scratch, .k = e->kern, .err = &err};
    for (uint32_t il = 0; il < t->n_layers; il++) {
        if (!CHECK(trace_layer(t, &e->scratch->rows, &st.n_blocks, want))) break;
        if (!CHECK(forward_layer(&st, il) == 0)) printf("    %s\n", err.text);
        double worst = 0, most = 0;
        for (size_t i = 0; i < n; i++) {
            keep_max(&worst, fabs((double)e->scratch->rows.P[i] - want[i]));
            keep_max(&most, fabs((double)want[i]));
        }
        if (!CHECK(worst <= 1e-5 * most))
            printf("    %s layer %u: %g of %g\n", name, il, worst, most);
    }
    if (CHECK(trace_layer(t, &e->scratch->rows, &st.n_blocks, NULL))) {
        fseek(t->f, (long)((size_t)(t->n_pos - 1) * t->vocab * sizeof(float)), SEEK_CUR);
        CHECK(read_f32(t->f, head, t->vocab) && forward_head(&st) == 0);
        double worst = 0, most = 0;
        for (size_t i = 0; i < t->vocab; i++) {
            keep_max(&worst, fabs((double)row[i] - head[i]));
            keep_max(&most, fabs((double)head[i]));
        }
        if (!CHECK(worst <= 1e-5 * most)) printf("    %s head: %g of %g\n", name, worst, most);
    }
    pass_end(&p);
    k3_session_reset(s);
    free(want);
    free(row);
    free(head);
}

/* End to end: logits must agree to 2e-4 of their range, and greedy ids unless the margin is less. */
static void test_end_to_end(k3_session *s, const trace_file *t, const char *name) {
    size_t V = t->vocab;
    float *row = malloc((size_t)t->n_pos * V * sizeof *row);
    k3_error err = {""};
    k3_session_reset(s);
    if (!CHECK(k3_session_feed(s, t->ids, t->n_prompt, K3_ROWS_ALL, row, &err) == 0))
        printf("    %s\n", err.text);
    for (uint32_t p = t->n_prompt; p < t->n_pos; p++)
        CHECK(k3_session_feed(s, &t->ids[p], 1, K3_ROWS_LAST, row + p * V, &err) == 0);
    double lo = INFINITY, hi = -INFINITY, worst = 0;
    for (size_t i = 0; i < t->n_pos * V; i++) {
        lo = t->logits[i] < lo ? t->logits[i] : lo;
        keep_max(&hi, t->logits[i]);
        keep_max(&worst, fabs((double)row[i] - t->logits[i]));
    }
    if (!CHECK(worst <= 2e-4 * (hi - lo)))
        printf("    %s: logits %g apart, range %g\n", name, worst, hi - lo);
    for (uint32_t i = 0; i < t->n_gen; i++) {
        uint32_t id = k3_sample_greedy(row + (t->n_prompt - 1 + i) * V, V);
        if (t->margin[i] > 2e-4 * (hi - lo)) CHECK_EQ_INT(id, t->ids[t->n_prompt + i]);
    }
    free(row);
}

/* Run the same model and prompt with every kernel set, thread count and chunk. */
static void test_same_bits(const char *dir, const uint32_t *prompt, size_t n, size_t n_gen,
                           const char *name) {
    static const int threads[] = {1, 2, 3}, chunks[] = {1, 7, 64};
    hashes first = {0, 0, 0};
    for (const char *const *k = k3_kernels_linked(); *k; k++)
        for (int t = 0; k3_kernels_is_supported(*k) && t < 3; t++)
            for (int c = 0; c < 3; c++) {
                uint32_t out[64];
                k3_error err;
                hashes h;
                k3_session *s;
                bool is_slow = is_quick || is_short || strcmp(*k, "ref") == 0;
                if (is_slow && (t != c || (t == 1 && n > 200))) continue;
                if ((is_quick || is_short) && n > 200 && strcmp(*k, "ref") == 0) continue;
                k3_engine *e = open_model(dir, *k, threads[t], chunks[c]);
                if (!CHECK(e && k3_session_new(&s, e, 0, &err) == 0)) return;
                CHECK(generate(s, prompt, n, n_gen, out, &h) == 0);
                if (first.ids == 0) first = h;
                if (!CHECK(memcmp(&h, &first, sizeof h) == 0))
                    printf("    %s: %s, %d threads, chunk %d\n", name, *k, threads[t], chunks[c]);
                k3_session_free(s);
                k3_engine_close(e);
            }
}

static bool run_reference(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static bool run_reference(const char *fmt, ...) {
    char args[8192], command[12800];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(args, sizeof args, fmt, ap);
    va_end(ap);
    snprintf(command, sizeof command, "%s '%s/reference.py' %s >/dev/null 2>&1",
             getenv("PYTHON") ? getenv("PYTHON") : "/usr/bin/python3", scripts_dir, args);
    return system(command) == 0;
}

static void test_preset(const char *tmp, const char *preset) {
    char dir[4096], trace[4200];
    trace_file t = {.f = NULL};
    k3_error err;
    k3_session *s;
    snprintf(dir, sizeof dir, "%s/%s", tmp, preset);
    snprintf(trace, sizeof trace, "%s/trace.bin", dir);
    if (!CHECK(run_reference("make '%s' --preset %s", dir, preset)) ||
        !CHECK(run_reference("run '%s' --ids 3,7,11,5,9,200,17,42,99,3,250,8 --tokens 4 --out '%s'",
                             dir, trace)))
        return;
    k3_engine *e = open_model(dir, NULL, 0, 0);
    if (!CHECK(e && trace_open(&t, trace) && k3_session_new(&s, e, 0, &err) == 0)) return;
    test_layers(s, &t, preset);
    test_end_to_end(s, &t, preset);
    k3_session_free(s);
    k3_engine_close(e);
    test_same_bits(dir, t.ids, t.n_prompt, 8, preset);
    fclose(t.f);
    free(t.logits);
}

/* The demo over 300 positions: a second softmax block in MLA. */
static void test_second_block(const char *tmp) {
    char trace[4200], list[4096] = "";
    uint32_t ids[300];
    uint64_t seed = 7;
    size_t at = 0;
    for (size_t i = 0; i < 300; i++) {
        ids[i] = (uint32_t)(test_random(&seed) % 1700);
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%u", i ? "," : "", ids[i]);
    }
    test_same_bits(demo_dir, ids, is_quick ? 260 : 300, 4, "two MLA blocks");
    snprintf(trace, sizeof trace, "%s/long.bin", tmp);
    if (is_quick || is_short ||
        !CHECK(run_reference("run '%s' --ids %s --tokens 2 --out '%s'", demo_dir, list, trace)))
        return;
    trace_file t = {.f = NULL};
    k3_session *s;
    k3_error err;
    k3_engine *e = open_model(demo_dir, NULL, 0, 512);
    if (!CHECK(e && trace_open(&t, trace) && k3_session_new(&s, e, 0, &err) == 0)) return;
    test_layers(s, &t, "two MLA blocks");
    test_end_to_end(s, &t, "two MLA blocks");
    k3_session_free(s);
    k3_engine_close(e);
    fclose(t.f);
    free(t.logits);
}

static void test_reference(void) {
    static const char *const preset[] = {"short", "odd", "wide", "pad", "heavy", "flat"};
    char tmp[] = "/tmp/k3-test-XXXXXX", command[64];
    if (!is_quick && !run_reference("--help")) {
        SKIP("reference.py: python3 with numpy is missing (install python3-numpy)");
        return;
    }
    if (!CHECK(mkdtemp(tmp) != NULL)) return;
    test_second_block(tmp);
    for (size_t i = 0; !is_quick && i < (is_short ? 1 : sizeof preset / sizeof *preset); i++)
        test_preset(tmp, preset[i]);
    snprintf(command, sizeof command, "rm -rf '%s'", tmp);
    CHECK(system(command) == 0);
}

/* ---- The engine as an object ---- */

typedef struct {
    uint64_t fnv[MAX_IDS];
    size_t n;
} trace_list;

static void trace_keep(void *user, uint64_t pos, uint32_t il, uint64_t fnv) {
    (void)pos;
    (void)il;
    trace_list *t = user;
    if (t->n < MAX_IDS) t->fnv[t->n++] = fnv;
}

static void trace_run(k3_session *s, trace_list *t) {
    static const uint32_t ids[] = {343, 336, 327, 444};
    k3_error err;
    t->n = 0;
    k3_session_reset(s);
    k3_session_trace(s, trace_keep, t);
    CHECK(k3_session_feed(s, ids, 4, K3_ROWS_NONE, NULL, &err) == 0);
}

/* One flipped bit of a weight must show first in the trace of its own layer. */
static void test_planted_fault(void) {
    static const struct {
        uint32_t il;
        enum tensor t;
    } plant[] = {{0, T_UP}, {2, T_KDA_O}, {4, T_F_B}, {7, T_MLA_G}, {8, T_SH_DOWN}};
    k3_engine *e = open_model(demo_dir, NULL, 1, 0);
    k3_session *s;
    k3_error err;
    trace_list good, bad;
    if (!CHECK(e && k3_session_new(&s, e, 0, &err) == 0)) return;
    uint32_t L = k3_engine_shape(e)->n_layers;
    trace_run(s, &good);
    CHECK_EQ_INT(good.n, 4 * L);
    for (size_t i = 0; i < sizeof plant / sizeof *plant; i++) {
        uint16_t *w = (uint16_t *)(uintptr_t)e->layers[plant[i].il].m[plant[i].t];
        size_t at = 0;
        while ((w[at] & 0x7f80) < 0x3c00) at++; /* a weight not near zero */
        w[at] ^= 1;
        trace_run(s, &bad);
        w[at] ^= 1;
        uint32_t first = L;
        for (uint32_t il = L; il-- > 0;)
            for (size_t t = 0; t < 4; t++)
                if (good.fnv[t * L + il] != bad.fnv[t * L + il]) first = il;
        CHECK_EQ_INT(first, plant[i].il);
    }
    k3_session_free(s);
    k3_engine_close(e);
}

/* Two sessions of one engine, fed in turn, must each give what it gives alone. */
static void test_sessions(void) {
    uint32_t a[MAX_IDS], b[MAX_IDS], out[32];
    size_t na = golden_prompt(0, a), nb = golden_prompt(7, b);
    k3_error err;
    hashes want, got;
    k3_session *s[2];
    k3_engine *e = open_model(demo_dir, NULL, 0, 5);
    if (!CHECK(e && golden_hashes(7, &want) && k3_session_new(&s[0], e, 0, &err) == 0 &&
               k3_session_new(&s[1], e, 200, &err) == 0))
        return;
    CHECK(k3_session_feed(s[0], a, na, K3_ROWS_NONE, NULL, &err) == 0);
    CHECK(generate(s[1], b, nb, 32, out, &got) == 0 && got.logits == want.logits);
    CHECK(golden_hashes(0, &want) && generate(s[0], a, na, 32, out, &got) == 0 &&
          got.logits == want.logits);
    CHECK_EQ_INT(k3_session_pos(s[0]), na + 31);

    k3_session_free(s[0]);
    k3_session_free(s[1]);
    CHECK(e->mem.used > 0);
    k3_engine_close(e);
}

/* Misuse is refused before anything is run, and the session goes on. */
static void test_misuse(void) {
    uint32_t ids[MAX_IDS] = {0}, big = 2048, out[32];
    size_t n = golden_prompt(0, ids);
    k3_error err;
    hashes want, got;
    k3_session *s;
    k3_engine *e = open_model(demo_dir, NULL, 0, 0);
    if (!CHECK(e && k3_session_new(&s, e, 40, &err) == 0 && golden_hashes(0, &want))) return;
    CHECK_EQ_INT(k3_session_feed(s, ids, 0, K3_ROWS_NONE, NULL, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_session_feed(s, &big, 1, K3_ROWS_NONE, NULL, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "2048") != NULL);
    CHECK_EQ_INT(k3_session_feed(s, ids, 41, K3_ROWS_NONE, NULL, &err), K3_EFULL);
    CHECK(strstr(err.text, "--context") != NULL);
    CHECK(generate(s, ids, n, 32, out, &got) == 0 && got.logits == want.logits);
    k3_session_free(s);
    CHECK_EQ_INT(k3_session_new(&s, e, 1 << 20, &err), K3_EUSAGE);
    k3_engine_close(e);

    k3_options o;
    k3_options_default(&o);
    o.model_dir = demo_dir;
    o.kernels = "avx99";
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "ref") != NULL);
    o.kernels = NULL;
    o.ram_bytes = 1 << 20;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EBUDGET);
    CHECK(strstr(err.text, "--ram") != NULL);
}

/* NaN, overflow of the exact sum: named, never hashed; the session is over until reset. */
static void test_numeric_errors(void) {
    static const uint32_t ids[] = {343, 336};
    k3_error err;
    k3_session *s;
    float row[2048];
    k3_engine *e = open_model(demo_dir, NULL, 2, 0);
    if (!CHECK(e && k3_session_new(&s, e, 0, &err) == 0)) return;
    uint16_t *w = (uint16_t *)(uintptr_t)e->layers[3].m[T_MLA_O], keep = w[0];
    w[0] = 0x7fc0;
    CHECK_EQ_INT(k3_session_feed(s, ids, 2, K3_ROWS_LAST, row, &err), K3_ENUMERIC);
    CHECK(strstr(err.text, "layer 3") != NULL);
    w[0] = keep;
    CHECK_EQ_INT(k3_session_feed(s, ids, 2, K3_ROWS_LAST, row, &err), K3_EUSAGE);
    k3_session_reset(s);
    CHECK_EQ_INT(k3_session_feed(s, ids, 2, K3_ROWS_LAST, row, &err), 0);

    float *bias = (float *)(uintptr_t)e->layers[5].v[T_ROUTER_BIAS];
    float keep_bias = bias[9];
    bias[9] = INFINITY;
    k3_session_reset(s);
    CHECK_EQ_INT(k3_session_feed(s, ids, 2, K3_ROWS_LAST, row, &err), K3_ENUMERIC);
    CHECK(strstr(err.text, "layer 5, router") && strstr(err.text, "expert 9"));
    bias[9] = keep_bias;

    for (uint32_t ie = 0; ie < e->sh.n_experts; ie++) { /* w2's scales at 2^73: terms over 2^17 */
        slot *sl = store_find(e, 6, ie);
        expert_view x;
        if (!sl || store_arrived(e, sl, &x, &err) != 1) continue;
        memset((uint8_t *)(uintptr_t)x.p[W2_SCALE], 200, expert_tensor_bytes(&e->sh, W2_SCALE));
    }
    k3_session_reset(s);
    CHECK_EQ_INT(k3_session_feed(s, ids, 2, K3_ROWS_LAST, row, &err), K3_ENUMERIC);
    CHECK(strstr(err.text, "layer 6, expert ") && strstr(err.text, "2^17"));
    k3_session_free(s);
    k3_engine_close(e);
}

/* A caller with flush-to-zero on gets the same bits, and its own state back; a token allocates
 * nothing. */
static void test_state_and_allocations(void) {
    uint32_t ids[MAX_IDS], out[32];
    size_t n = golden_prompt(3, ids);
    k3_error err;
    hashes want, got;
    k3_session *s;
    k3_engine *e = open_model(demo_dir, NULL, 2, 3);
    if (!CHECK(e && k3_session_new(&s, e, 0, &err) == 0 && golden_hashes(3, &want))) return;
    uint64_t plain = fp_save();
#if defined(__SSE2__)
    uint64_t ftz = plain | 0x8040;
#else
    uint64_t ftz = plain | 1u << 24;
#endif
    fp_restore(ftz);
    CHECK(generate(s, ids, n, 32, out, &got) == 0);
    CHECK_EQ_INT(fp_save() & ~0x3fu, ftz & ~0x3fu); /* without the sticky flags */
    fp_restore(plain);
    CHECK(got.logits == want.logits && got.trace == want.trace);

    float row[2048];
    k3_session_trace(s, NULL, NULL);
    long before = n_mallocs;
    for (int i = 0; i < 8; i++) CHECK(k3_session_feed(s, ids, 1, K3_ROWS_LAST, row, &err) == 0);
    CHECK_EQ_INT(n_mallocs, before);
    k3_session_free(s);
    k3_engine_close(e);
}

/* ---- Streaming: any budget, any way of reading ---- */

/* One golden prompt under these options; the ledger never passes the ceiling. */
static void run_budget(const k3_options *o, int index, const char *name) {
    uint32_t ids[MAX_IDS], out[32];
    size_t n = golden_prompt(index, ids);
    k3_error err = {""};
    hashes want, got;
    k3_session *s = NULL;
    k3_engine *e;
    if (!CHECK(k3_engine_open(&e, o, &err) == 0) || !CHECK(k3_session_new(&s, e, 0, &err) == 0)) {
        printf("    %s: %s\n", name, err.text);
        return;
    }
    CHECK(golden_hashes(index, &want));
    CHECK(generate(s, ids, n, 32, out, &got) == 0);
    if (!CHECK(got.logits == want.logits && got.trace == want.trace))
        printf("    %s: ram %llu, uring %d, direct %d, policy %d, chunk %d\n", name,
               (unsigned long long)o->ram_bytes, o->io == K3_IO_URING, o->direct == K3_ON,
               o->policy, o->chunk);
    CHECK(e->mem.used <= e->mem.limit);
    k3_session_free(s);
    CHECK(e->store.n_doomed == 0 || e->store.n_slots > 0);
    k3_engine_close(e);
}

/* The floor of a model for these options, from its plan. */
static uint64_t find_floor(k3_options o) {
    k3_engine *e;
    k3_error err;
    o.headers_only = true;
    o.ram_bytes = (uint64_t)1 << 40;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) return 0;
    uint64_t floor_bytes = k3_engine_plan(e)->floor_bytes;
    k3_engine_close(e);
    return floor_bytes;
}

static void test_budgets(void) {
    k3_options o;
    k3_error err;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = demo_dir;
    uint64_t least = find_floor(o);
    o.ram_bytes = least - 1;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EBUDGET);
    CHECK(strstr(err.text, "floor") && strstr(err.text, "--ram"));
    struct io_uring ring;
    bool has_uring = io_uring_queue_init(4, &ring, 0) == 0;
    if (has_uring)
        io_uring_queue_exit(&ring);
    else
        SKIP("io_uring: this system has none, the pool is tested alone");
    const uint64_t budgets[] = {least, least + (1 << 20), least + (5 << 20), least + (64 << 20), 0};
    for (int i = 0; i < 5; i++)
        for (int mode = 0; mode < (is_quick ? 2 : 8); mode++) {
            o.ram_bytes = budgets[i];
            o.io = mode & 1 && has_uring ? K3_IO_URING : K3_IO_POOL;
            o.direct = mode & 2 ? K3_ON : K3_OFF;
            o.policy = mode & 4 ? K3_POLICY_LRU : K3_POLICY_RANK;
            o.no_look_ahead = (mode + i) % 3 == 0;
            o.io_depth = 1 + mode * 3;
            o.chunk = i == 0 ? 1 : mode % 3 == 0 ? 0 : 7; /* the floor is for a chunk of 1 */
            run_budget(&o, (mode * 5 + i) % N_GOLDEN, "budget");
        }
}

/* ---- Small parts ---- */

static void test_oracle(void) {
    CHECK(k3_fnv1a(K3_FNV_BASIS, "", 0) == 0xcbf29ce484222325u);
    CHECK(k3_fnv1a(K3_FNV_BASIS, "a", 1) == 0xaf63dc4c8601ec8cu);
    CHECK(k3_fnv1a(K3_FNV_BASIS, "foobar", 6) == 0x85944171f73967e8u);
    CHECK(fma_is_exact());
}

/* Exact ties go to the lower id; the weights are normalised in ascending id order. */
static void test_router(void) {
    k3_shape sh = {.n_experts = 40, .top_k = 4, .routed_scale = 1.0f};
    float logit[40] = {0}, bias[40] = {0}, w[4];
    uint32_t id[4];
    logit[30] = 1.0f;
    logit[12] = logit[20] = logit[25] = 0.5f;
    CHECK_EQ_INT(route(&k3_kernels_ref, &sh, logit, bias, id, w), -1);
    CHECK(id[0] == 12 && id[1] == 20 && id[2] == 25 && id[3] == 30);
    memset(logit, 0, sizeof logit);
    CHECK_EQ_INT(route(&k3_kernels_ref, &sh, logit, bias, id, w), -1);
    CHECK(id[0] == 0 && id[1] == 1 && id[2] == 2 && id[3] == 3);
    CHECK(w[0] == 0.5f / (2.0f + 1e-20f));
    memset(logit, 0, sizeof logit);
    bias[3] = -0.0f; /* -0 equals +0 */
    bias[39] = 0.2f; /* sigmoid(-1) + 0.2 is below 0.5 */
    logit[39] = -1.0f;
    CHECK_EQ_INT(route(&k3_kernels_ref, &sh, logit, bias, id, w), -1);
    CHECK(id[0] == 0 && id[1] == 1 && id[2] == 2 && id[3] == 3);
    bias[39] = 0.5f; /* chosen by its bias, weighted without it */
    memset(logit, 0, sizeof logit);
    logit[39] = -1.0f;
    CHECK_EQ_INT(route(&k3_kernels_ref, &sh, logit, bias, id, w), -1);
    CHECK(id[3] == 39 && w[3] < w[0]);
    logit[7] = NAN;
    CHECK_EQ_INT(route(&k3_kernels_ref, &sh, logit, bias, id, w), 7);
}

/* NUMERICS 6 written naively: repeated selection instead of a sort. */
static uint32_t sample_naive(const k3_sampler *sp, const float *logits, uint32_t V, uint64_t pos) {
    static float l[512], e[512];
    static uint32_t order[512];
    static bool is_used[512], is_kept[512];
    memset(is_used, 0, sizeof is_used);
    memset(is_kept, 0, sizeof is_kept);
    for (uint32_t i = 0; i < V; i++) l[i] = logits[i] / sp->temperature;
    uint32_t n = sp->top_k && sp->top_k < V ? sp->top_k : V;
    for (uint32_t r = 0; r < n; r++) {
        uint32_t best = V;
        for (uint32_t i = 0; i < V; i++)
            if (!is_used[i] && (best == V || l[i] > l[best])) best = i;
        is_used[best] = true;
        order[r] = best;
        e[best] = k3_exp(l[best] - l[order[0]]);
    }
    float total = e[order[0]], sum = e[order[0]], kept = 0;
    for (uint32_t r = 1; r < n; r++) total = total + e[order[r]];
    uint32_t n_kept = 1;
    while (sp->top_p < 1.0f && n_kept < n && !(sum >= sp->top_p * total))
        sum = sum + e[order[n_kept++]];
    if (!(sp->top_p < 1.0f)) n_kept = n;
    for (uint32_t r = 0; r < n_kept; r++) is_kept[order[r]] = true;
    bool is_first = true;
    for (uint32_t i = 0; i < V; i++)
        if (is_kept[i]) kept = is_first ? e[i] : kept + e[i], is_first = false;
    uint64_t state = sp->seed + pos * 0x9e3779b97f4a7c15u; /* test_random adds the last step */
    float u = (float)(test_random(&state) >> 40) * 0x1p-24f;
    float target = u * kept, run = 0;
    uint32_t last = 0;
    is_first = true;
    for (uint32_t i = 0; i < V; i++) {
        if (!is_kept[i]) continue;
        run = is_first ? e[i] : run + e[i];
        is_first = false;
        last = i;
        if (run > target) return i;
    }
    return last;
}

/* An engine as far as a draw looks at it: with the kernels `name`, NULL for the best. */
static const k3_engine *sampler_engine(const char *name) {
    static k3_engine e;
    e.kern = kernels_pick(name, NULL);
    return &e;
}

/* A draw uses the kernels of its engine, whatever else this CPU has, and gives the same id with each set. */
static int n_fake_calls;
static void fake_exp_sub(float *y, const float *x, float m, size_t n) {
    n_fake_calls++;
    k3_kernels_ref.exp_sub(y, x, m, n);
}

static void test_sampler_kernels(void) {
    enum { V = 5000 };
    float *logits = malloc(V * sizeof *logits);
    void *scratch = malloc(k3_sample_scratch(V));
    k3_sampler sp = {0.8f, 0.9f, 0, 3};
    k3_kernels fake = k3_kernels_ref;
    k3_engine with = {.kern = &fake};
    uint64_t seed = 2;
    fake.exp_sub = fake_exp_sub;
    for (uint64_t pos = 0; pos < 20; pos++) {
        for (int i = 0; i < V; i++) logits[i] = (float)(test_random(&seed) % 4096) / 512.0f;
        int n_before = n_fake_calls;
        uint32_t want = k3_sample(&with, &sp, logits, V, pos, scratch);
        CHECK(n_fake_calls > n_before);
        for (const char *const *set = k3_kernels_linked(); *set; set++)
            if (k3_kernels_is_supported(*set))
                CHECK_EQ_INT(k3_sample(sampler_engine(*set), &sp, logits, V, pos, scratch), want);
    }
    free(logits);
    free(scratch);
}

static void test_sampler(void) {
    enum { V = 300 };
    const k3_engine *e = sampler_engine(NULL);
    float logits[V];
    void *scratch = malloc(k3_sample_scratch(V));
    uint64_t seed = 11;
    int n_same = 0, n_varied = 0;
    CHECK(sample_uniform(0, 0) ==
          (float)(0xe220a8397b1dcdafu >> 40) * 0x1p-24f); /* splitmix64(0) */
    for (uint64_t pos = 0; pos < 400; pos++) {
        k3_sampler sp = {0.3f + (float)(pos % 5) * 0.4f, pos % 3 ? 0.9f : 1.0f, pos % 4 ? 0 : 17,
                         pos / 7};
        for (int i = 0; i < V; i++)
            logits[i] = (float)(test_random(&seed) % 64) / 8.0f; /* many ties */
        uint32_t got = k3_sample(e, &sp, logits, V, pos, scratch);
        n_same += got == sample_naive(&sp, logits, V, pos);
        n_varied += got != k3_sample_greedy(logits, V);
    }
    CHECK_EQ_INT(n_same, 400);
    CHECK(n_varied > 100);
    k3_sampler greedy = {0.0f, 1.0f, 0, 5};
    logits[7] = logits[9] = 1000.0f;
    CHECK_EQ_INT(k3_sample(e, &greedy, logits, V, 3, scratch), 7);
    free(scratch);
}

/* ---- Sampling against a plain full sort (NUMERICS 6 line by line) ---- */

typedef struct {
    float l, e;
    uint32_t id;
} candidate;

static int candidate_order(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->l != y->l) return x->l > y->l ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int candidate_id_order(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The id drawn; *n_kept: how many were drawn from; *edge: the share of the whole that the first
 * n_edge hold, for a top_p that hangs on the last bit of both sums. */
static uint32_t sample_plain(const k3_sampler *sp, const float *logits, size_t V, uint64_t pos,
                             size_t *n_kept, size_t n_edge, float *edge) {
    candidate *c = malloc(V * sizeof *c);
    size_t n = V, pick;
    float total = 0, sum = 0;
    for (size_t i = 0; i < V; i++) c[i] = (candidate){logits[i] / sp->temperature, 0, (uint32_t)i};
    qsort(c, n, sizeof *c, candidate_order);
    if (sp->top_k > 0 && sp->top_k < n) n = sp->top_k;
    for (size_t i = 0; i < n; i++) {
        c[i].e = k3_exp(c[i].l - c[0].l);
        total = i == 0 ? c[i].e : total + c[i].e;
        if (i + 1 == n_edge) *edge = total;
    }
    if (edge) *edge = *edge / total;
    size_t kept = sp->top_p < 1.0f ? 0 : n;
    while (kept < n) {
        sum = kept == 0 ? c[0].e : sum + c[kept].e;
        kept++;
        if (sum >= sp->top_p * total) break;
    }
    *n_kept = kept;
    qsort(c, kept, sizeof *c, candidate_id_order);
    total = c[0].e;
    for (size_t i = 1; i < kept; i++) total = total + c[i].e;
    float target = sample_uniform(sp->seed, pos) * total;
    sum = c[0].e;
    for (pick = 0; pick + 1 < kept && !(sum > target);) sum = sum + c[++pick].e;
    uint32_t id = c[pick].id;
    free(c);
    return id;
}

/* Logits of several shapes: near normal, as a model's; full of ties; flat; two values; zeros of
 * both signs among subnormals; spread far beyond what exp can hold. */
static void sample_logits(float *logits, size_t V, int shape, uint64_t *seed) {
    static const float few[] = {0.0f, -0.0f, 1e-40f, -1e-40f};
    for (size_t i = 0; i < V; i++) {
        float near = 0;
        for (int j = 0; j < 6; j++) near += (float)(test_random(seed) >> 40) * 0x1p-24f - 0.5f;
        switch (shape) {
        case 0: logits[i] = near * 3.5f + (i % 9973 == 7 ? 9.0f : 0.0f); break;
        case 1: logits[i] = (float)(test_random(seed) % 64) / 8.0f; break;
        case 2: logits[i] = 1.25f; break;
        case 3: logits[i] = test_random(seed) % 5 ? -3.0f : 2.0f; break;
        case 4: logits[i] = few[test_random(seed) % 4]; break;
        default: logits[i] = near * 1e4f; break;
        }
    }
}

/* One row, drawn both ways; the cut has to be the same one, not only the draw. */
static bool sample_agrees(const k3_sampler *sp, const float *logits, size_t V, uint64_t pos,
                          void *scratch, float *edge, size_t n_edge) {
    sample_row r = {.k = kernels_pick(NULL, NULL), .n = V};
    float *l = scratch;
    size_t n_kept = 0, n_got = 0;
    uint32_t want = sample_plain(sp, logits, V, pos, &n_kept, n_edge, edge);
    if (k3_sample(sampler_engine(NULL), sp, logits, V, pos, scratch) != want) return false;
    if (!(sp->top_p < 1.0f) && !(sp->top_k > 0 && sp->top_k < V)) return n_kept == V;
    r.l = l + V;
    r.e = r.l + V;
    r.k->divide(l, logits, sp->temperature, V);
    r.top = sample_max(l, V);
    sample_cut cut = sample_keep(&r, sp, l);
    for (size_t i = 0; i < V; i++) n_got += l[i] > cut.last;
    return n_got + cut.n_last == n_kept;
}

static void test_sampler_plain(void) {
    static const size_t size[] = {1, 2, 7, 300, 5000, 163840};
    const size_t most = 163840;
    float *logits = malloc(most * sizeof *logits);
    void *scratch = malloc(k3_sample_scratch(most));
    uint64_t seed = 5;
    int n_case = 0, n_same = 0;
    for (size_t z = 0; z < sizeof size / sizeof *size; z++) {
        size_t V = size[z];
        int n_round = V == most ? (is_quick ? 1 : 3) : V == 5000 ? 12 : 60;
        for (int round = 0; round < n_round; round++) {
            int shape = V == most ? round % 2 : round % 6;
            float edge = 0;
            k3_sampler sp = {round % 4 == 3 ? 0.35f : 1.0f, 0.95f, 0, (uint64_t)round};
            sample_logits(logits, V, shape, &seed);
            size_t n_edge = 1 + test_random(&seed) % (V < 400 ? V : 400);
            for (int way = 0; way < 6; way++) {
                if (way == 1) sp.top_p = edge; /* hangs on the last bit of two sums */
                if (way == 2) sp.top_p = 1.0f;
                if (way == 3) sp.top_k = 40;
                if (way == 4) sp.top_p = 0.5f;
                if (way == 5) sp.top_k = 0, sp.top_p = 0.0f;
                n_same += sample_agrees(&sp, logits, V, (uint64_t)(round * 6 + way), scratch, &edge,
                                        n_edge < V ? n_edge : V);
                n_case++;
            }
        }
    }
    CHECK_EQ_INT(n_same, n_case);
    int n_large = 0; /* the last bin relies on this */
    for (float x = SAMPLE_FAR * 0.999f; x < 120.0f; x *= 1.000244140625f)
        n_large += !(k3_exp(-x) < 0x1p-24f);
    CHECK_EQ_INT(n_large, 0);
    k3_sampler sp = {1.0f, 0.95f, 0, 1};
    for (int shape = 0; shape < 2; shape++) {
        uint64_t best = UINT64_MAX;
        sample_logits(logits, most, shape, &seed);
        for (int i = 0; i < 9; i++) {
            uint64_t start = clock_ns();
            k3_sample(sampler_engine(NULL), &sp, logits, most, (uint64_t)i, scratch);
            uint64_t ns = clock_ns() - start;
            best = ns < best ? ns : best;
        }
        printf("engine: top-p 0.95 over %zu logits, %s: %.2f ms\n", most,
               shape ? "ties" : "near normal", (double)best * 1e-6);
    }
    free(logits);
    free(scratch);
}

int main(int argc, char **argv) {
    test_begin("engine");
    if (argc < 4)
        return fprintf(stderr, "usage: test_engine DEMO_DIR SCRIPTS_DIR DATA_DIR [--quick | --short]\n"), 2;
    demo_dir = argv[1];
    scripts_dir = argv[2];
    data_dir = argv[3];
    is_quick = argc > 4 && strcmp(argv[4], "--quick") == 0;
    is_short = argc > 4 && strcmp(argv[4], "--short") == 0;
    test_oracle();
    test_router();
    test_sampler();
    test_sampler_kernels();
    test_sampler_plain();
    test_golden_all();
    test_golden_logits();
    test_planted_fault();
    test_sessions();
    test_budgets();
    test_misuse();
    test_numeric_errors();
    test_state_and_allocations();
    test_reference();
    return test_finish();
}
