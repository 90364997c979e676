/* test_pass.c - rows of many sessions in one pass give the bits of one session at a time.
 *
 * The rows of each session's ids, fed alone and all at once, are the reference. Then the same ids go through
 * passes of random mixtures: some sessions or all, one id or many, in long and short parts, with rows that are taken
 * back and replaced, with passes that rest between layers while others run, with sessions that fail, leave or are
 * cancelled. Every row that comes out is compared with the reference, bit for bit.
 *
 *     test_pass DEMO_DIR [quick]
 *
 * The engine is included, so that a fault can be planted in one session.
 */
#include "../k3.c"

#include "test.h"

enum { N_SESSIONS = 5, N_POS = 80, W = 7 };

static const char *demo_dir;
static bool is_quick;
static size_t V;
static uint32_t ids[N_SESSIONS][N_POS];
static float *want[N_SESSIONS]; /* f32[N_POS][V] */
static uint64_t seed = 7;
static int cancel_in; /* progress calls until the work is cancelled; 0: never */

static uint32_t dice(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

static int on_progress(void *user, const k3_progress *p) {
    (void)user;
    return p->phase == K3_PHASE_COMPUTE && cancel_in > 0 && --cancel_in == 0;
}

/* ---- Setting up ---- */

typedef struct {
    const char *name, *kernels;
    int n_threads, chunk, part;
    uint64_t ram;
} setup;

typedef struct {
    k3_engine *e;
    k3_session *s[N_SESSIONS];
    float *row; /* f32[N_SESSIONS][N_POS][V] */
    const char *name;
    bool is_slow; /* the scalar kernels: less of everything */
} bench;

static bool bench_open(bench *b, const setup *x) {
    k3_options o;
    k3_error err = {""};
    k3_options_default(&o);
    o.model_dir = demo_dir;
    o.kernels = x->kernels;
    o.n_threads = x->n_threads;
    o.chunk = x->chunk;
    o.part = x->part;
    o.context = N_POS + 16;
    o.sessions = N_SESSIONS - 1;
    o.revocable = W;
    o.snapshots = 1;
    o.ram_bytes = x->ram;
    o.progress = on_progress;
    *b = (bench){.name = x->name, .is_slow = x->kernels && strcmp(x->kernels, "ref") == 0};
    if (!CHECK(k3_engine_open(&b->e, &o, &err) == 0)) {
        printf("    %s: %s\n", x->name, err.text);
        return false;
    }
    V = k3_engine_shape(b->e)->vocab_size;
    for (int i = 0; i < N_SESSIONS; i++)
        if (!CHECK(k3_session_new(&b->s[i], b->e, 0, &err) == 0)) printf("    %s\n", err.text);
    b->row = malloc((size_t)N_SESSIONS * N_POS * V * sizeof *b->row);
    return b->row != NULL;
}

static void bench_close(bench *b) {
    for (int i = 0; i < N_SESSIONS; i++) k3_session_free(b->s[i]);
    k3_engine_close(b->e);
    free(b->row);
}

static float *row_of(const bench *b, int i) { return b->row + (size_t)i * N_POS * V; }

static bool same_rows(const bench *b, int i, uint64_t pos, size_t n, const float *got) {
    bool ok = memcmp(got, want[i] + pos * V, n * V * sizeof *got) == 0;
    if (!CHECK(ok)) printf("    %s: session %d, rows %u+%zu differ\n", b->name, i, (unsigned)pos, n);
    return ok;
}

static void make_reference(void) {
    bench b;
    k3_error err;
    if (!bench_open(&b, &(setup){"reference", is_quick ? NULL : "ref", 1, 0, 0, 0})) return;
    for (int i = 0; i < N_SESSIONS; i++) {
        for (int t = 0; t < N_POS; t++) ids[i][t] = dice((uint32_t)V);
        want[i] = malloc(N_POS * V * sizeof *want[i]);
        CHECK_EQ_INT(k3_session_feed(b.s[i], ids[i], N_POS, K3_ROWS_ALL, want[i], &err), 0);
    }
    bench_close(&b);
}

/* ---- Mixtures ---- */

/* A feed of session i: its next ids, of which some may be wrong and are taken back afterwards. */
typedef struct {
    k3_feed f;
    uint32_t id[N_POS];
    uint64_t pos;
    size_t n_right;
} try;

static bool try_make(try *p, const bench *b, int i) {
    k3_session *s = b->s[i];
    uint64_t pos = k3_session_pos(s);
    size_t left = (size_t)(N_POS - pos), n = 1 + dice(dice(3) ? 4 : 40);
    if (left == 0) return false;
    if (n > left) n = left;
    *p = (try){.pos = pos, .n_right = n};
    memcpy(p->id, ids[i] + pos, n * sizeof *p->id);
    p->f = (k3_feed){.session = s, .ids = p->id, .n = n, .rows = (k3_rows)dice(3), .logits = row_of(b, i)};
    if (dice(2)) return true;
    p->f.revocable = dice((uint32_t)(n < W ? n : W) + 1);
    if (p->f.revocable) p->n_right = n - dice(p->f.revocable + 1);
    for (size_t t = p->n_right; t < n; t++) p->id[t] = (p->id[t] + 1) % (uint32_t)V;
    return true;
}

/* Check the rows as far as the ids were right, and take the wrong ids back. */
static void try_check(const try *p, const bench *b, int i) {
    k3_error err = {""};
    uint64_t end = p->pos + p->n_right;
    CHECK_EQ_INT(p->f.status, 0);
    if (p->f.rows == K3_ROWS_ALL) same_rows(b, i, p->pos, p->n_right, p->f.logits);
    if (p->f.rows == K3_ROWS_LAST && p->n_right == p->f.n) same_rows(b, i, end - 1, 1, p->f.logits);
    CHECK(k3_session_least(b->s[i]) <= p->pos + p->f.n - p->f.revocable);
    if (!CHECK(k3_session_cut(b->s[i], end, &err) == 0)) printf("    %s\n", err.text);
    CHECK_EQ_INT(k3_session_pos(b->s[i]), end);
}

static void reset_all(const bench *b) {
    for (int i = 0; i < N_SESSIONS; i++) k3_session_reset(b->s[i]);
}

/* One pass of some of the sessions; returns how many took part. */
static int mixture(const bench *b, int but) {
    static try p[N_SESSIONS];
    k3_feed f[N_SESSIONS];
    int of[N_SESSIONS], n = 0;
    k3_error err = {""};
    for (int i = 0; i < N_SESSIONS; i++)
        if (i != but && dice(3) && try_make(&p[n], b, i)) of[n++] = i;
    for (int j = 0; j < n; j++) f[j] = p[j].f;
    if (n == 0) return 0;
    if (!CHECK(k3_feed_all(b->e, f, (size_t)n, &err) == 0)) printf("    %s: %s\n", b->name, err.text);
    for (int j = 0; j < n; j++) {
        p[j].f = f[j];
        try_check(&p[j], b, of[j]);
    }
    return n;
}

static void test_mixtures(const bench *b) {
    reset_all(b);
    for (int round = 0; round < (b->is_slow ? 5 : is_quick ? 6 : 40); round++) {
        mixture(b, -1);
        for (int i = 0; i < N_SESSIONS; i++)
            if (k3_session_pos(b->s[i]) == N_POS) k3_session_reset(b->s[i]);
    }
}

/* A long pass rests after every few layers; the other sessions' passes run meanwhile. */
static void test_rests(const bench *b) {
    k3_error err = {""};
    for (int round = 0; round < (is_quick ? 2 : 5); round++) {
        reset_all(b);
        k3_pass *p;
        int rc;
        k3_feed f = {.session = b->s[0], .ids = ids[0], .n = 50, .rows = K3_ROWS_ALL, .logits = row_of(b, 0)};
        if (!CHECK(k3_pass_open(&p, b->e, &f, 1, &err) == 0)) return;
        CHECK_EQ_INT(k3_session_feed(b->s[0], ids[0], 1, K3_ROWS_NONE, NULL, &err), K3_EUSAGE);
        while ((rc = k3_pass_run(p, 1 + dice(4), &err)) == 0)
            for (int i = 1; i < N_SESSIONS; i++) {
                uint64_t pos = k3_session_pos(b->s[i]);
                if (pos == N_POS) k3_session_reset(b->s[i]), pos = 0;
                CHECK_EQ_INT(k3_session_feed(b->s[i], ids[i] + pos, 1, K3_ROWS_LAST, row_of(b, i), &err), 0);
                same_rows(b, i, pos, 1, row_of(b, i));
            }
        CHECK_EQ_INT(rc, 1);
        k3_pass_close(p);
        same_rows(b, 0, 0, 50, row_of(b, 0));
        CHECK_EQ_INT(k3_session_feed(b->s[0], ids[0] + 50, 20, K3_ROWS_ALL, row_of(b, 0), &err), 0);
        same_rows(b, 0, 50, 20, row_of(b, 0));
    }
}

/* ---- One that fails, one that leaves, all that are cancelled ---- */

/* A NaN in one session's state ends that session alone. */
static void test_nan(const bench *b) {
    const k3_shape *sh = k3_engine_shape(b->e);
    k3_error err = {""};
    reset_all(b);
    uint32_t il = 0;
    while (sh->is_mla[il]) il++;
    for (int i = 0; i < N_SESSIONS; i++)
        CHECK_EQ_INT(k3_session_feed(b->s[i], ids[i], 10, K3_ROWS_NONE, NULL, &err), 0);
    k3_feed f[N_SESSIONS];
    for (int i = 0; i < N_SESSIONS; i++)
        f[i] = (k3_feed){.session = b->s[i], .ids = ids[i] + 10, .n = 1 + (size_t)i * 3, .rows = K3_ROWS_ALL,
                         .logits = row_of(b, i)};
    b->s[2]->state[il][0] = NAN;
    CHECK_EQ_INT(k3_feed_all(b->e, f, N_SESSIONS, &err), 0);
    for (int i = 0; i < N_SESSIONS; i++) {
        CHECK_EQ_INT(f[i].status, i == 2 ? K3_ENUMERIC : 0);
        if (i != 2) same_rows(b, i, 10, f[i].n, row_of(b, i));
    }
    CHECK(strstr(f[2].error.text, "NaN") && k3_session_has_ended(b->s[2]));
    CHECK_EQ_INT(k3_session_feed(b->s[2], ids[2], 1, K3_ROWS_NONE, NULL, &err), K3_EUSAGE);
    k3_session_reset(b->s[2]);
    CHECK_EQ_INT(k3_session_feed(b->s[2], ids[2], 20, K3_ROWS_ALL, row_of(b, 2), &err), 0);
    same_rows(b, 2, 0, 20, row_of(b, 2));
    k3_session_reset(b->s[2]);
    b->s[2]->state[il][0] = NAN; /* the only session: the call fails, and the next one is not harmed */
    CHECK_EQ_INT(k3_session_feed(b->s[2], ids[2], 9, K3_ROWS_NONE, NULL, &err), K3_ENUMERIC);
    k3_session_reset(b->s[2]);
    mixture(b, 2);
}

static void test_leave(const bench *b) {
    k3_error err = {""};
    for (int way = 0; way < 2; way++) { /* all of its rows can be taken back: it goes on as before */
        k3_pass *p;
        reset_all(b);
        CHECK_EQ_INT(k3_session_feed(b->s[1], ids[1], 10, K3_ROWS_NONE, NULL, &err), 0);
        k3_feed f[2] = {{.session = b->s[0], .ids = ids[0], .n = 30, .rows = K3_ROWS_ALL, .logits = row_of(b, 0)},
                        {.session = b->s[1], .ids = ids[1] + 10, .n = 5, .revocable = way ? 5 : 4}};
        if (!CHECK(k3_pass_open(&p, b->e, f, 2, &err) == 0)) return;
        CHECK_EQ_INT(k3_pass_run(p, 3, &err), 0);
        k3_pass_drop(p, b->s[1]);
        CHECK_EQ_INT(k3_pass_run(p, UINT32_MAX, &err), 1);
        k3_pass_close(p);
        CHECK(f[0].status == 0 && f[1].status == K3_ECANCEL);
        same_rows(b, 0, 0, 30, row_of(b, 0));
        CHECK_EQ_INT(k3_session_has_ended(b->s[1]), !way);
        if (!way) continue;
        CHECK_EQ_INT(k3_session_feed(b->s[1], ids[1] + 10, 9, K3_ROWS_ALL, row_of(b, 1), &err), 0);
        same_rows(b, 1, 10, 9, row_of(b, 1));
    }
}

/* A pass whose rows can all be taken back is cancelled at any call: its sessions stay where they
 * were. */
static void test_cancel(const bench *b) {
    k3_error err = {""};
    reset_all(b);
    uint64_t pos = 20;
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(k3_session_feed(b->s[i], ids[i], pos, K3_ROWS_NONE, NULL, &err), 0);
    for (int at = 1; at < (is_quick ? 8 : 24) && pos + 4 < N_POS; at++, pos++) {
        k3_feed f[2];
        for (int i = 0; i < 2; i++)
            f[i] = (k3_feed){.session = b->s[i], .ids = ids[i] + pos, .n = 4, .revocable = 4};
        cancel_in = at;
        int rc = k3_feed_all(b->e, f, 2, &err);
        bool is_through = cancel_in > 0;
        cancel_in = 0;
        CHECK_EQ_INT(rc, is_through ? 0 : K3_ECANCEL);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ_INT(k3_session_pos(b->s[i]), is_through ? pos + 4 : pos);
            CHECK_EQ_INT(k3_session_cut(b->s[i], pos, &err), 0);
            CHECK_EQ_INT(k3_session_feed(b->s[i], ids[i] + pos, 1, K3_ROWS_LAST, row_of(b, i), &err), 0);
            same_rows(b, i, pos, 1, row_of(b, i));
        }
    }
    cancel_in = 2;
    CHECK_EQ_INT(k3_session_feed(b->s[0], ids[0] + pos, 3, K3_ROWS_NONE, NULL, &err), K3_ECANCEL);
    cancel_in = 0;
    CHECK(k3_session_has_ended(b->s[0]));
}

/* ---- Cutting back beside snapshots and states ---- */

/* A prompt is run whole, and kept in a cache without its last id, which stays in the session. */
static void test_kept_before_last(const bench *b) {
    char dir[] = "/tmp/k3-pass-cache-XXXXXX";
    k3_error err = {""};
    k3_cache *c;
    reset_all(b);
    if (!CHECK(mkdtemp(dir) && k3_cache_open(&c, b->e, dir, 0, &err) == 0)) return;
    k3_feed f = {.session = b->s[0], .ids = ids[0], .n = 30, .rows = K3_ROWS_LAST, .logits = row_of(b, 0), .revocable = 1};
    CHECK_EQ_INT(k3_feed_all(b->e, &f, 1, &err), 0);
    same_rows(b, 0, 29, 1, row_of(b, 0));
    CHECK_EQ_INT(k3_cache_store_at(c, b->s[0], 20, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_cache_store_at(c, b->s[0], 29, &err), 0);
    CHECK_EQ_INT(k3_session_pos(b->s[0]), 30);
    CHECK_EQ_INT(k3_session_feed(b->s[0], ids[0] + 30, 8, K3_ROWS_ALL, row_of(b, 0), &err), 0);
    same_rows(b, 0, 30, 8, row_of(b, 0));
    CHECK_EQ_INT(k3_cache_restore(c, b->s[1], ids[0], 40, &err), 29);
    CHECK_EQ_INT(k3_session_feed(b->s[1], ids[0] + 29, 8, K3_ROWS_ALL, row_of(b, 0), &err), 0);
    same_rows(b, 0, 29, 8, row_of(b, 0));
    k3_cache_trim(dir, 0, NULL, &err);
    k3_cache_close(c);
    rmdir(dir);
}

static void test_states(const bench *b) {
    k3_session *s = b->s[0], *to = b->s[1];
    k3_snapshot *snap;
    k3_error err = {""};
    char path[] = "/tmp/k3-pass-XXXXXX";
    int fd = mkstemp(path);
    reset_all(b);
    k3_feed f = {.session = s, .ids = ids[0], .n = 30, .revocable = W};
    CHECK_EQ_INT(k3_feed_all(b->e, &f, 1, &err), 0);
    CHECK_EQ_INT(k3_session_least(s), 30 - W);
    CHECK_EQ_INT(k3_session_cut(s, 30 - W - 1, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "can be cut to 23..30"));
    CHECK_EQ_INT(k3_session_cut(s, 26, &err), 0);
    CHECK_EQ_INT(k3_session_snapshot(s, &snap, &err), 0);
    CHECK_EQ_INT(k3_session_least(s), 26); /* a snapshot makes what it holds final */
    CHECK_EQ_INT(k3_session_feed(s, ids[0] + 26, 14, K3_ROWS_ALL, row_of(b, 0), &err), 0);
    same_rows(b, 0, 26, 14, row_of(b, 0));
    CHECK_EQ_INT(k3_session_restore(s, snap, &err), 0);
    k3_snapshot_free(snap);
    f = (k3_feed){.session = s, .ids = ids[0] + 26, .n = 9, .revocable = 5};
    CHECK_EQ_INT(k3_feed_all(b->e, &f, 1, &err), 0);
    CHECK_EQ_INT(k3_session_cut(s, 32, &err), 0);
    CHECK_EQ_INT(k3_session_save(s, path, NULL, 0, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_load(to, path, NULL, NULL, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_pos(to), 32);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(k3_session_feed(b->s[i], ids[0] + 32, 10, K3_ROWS_ALL, row_of(b, 0), &err), 0);
        same_rows(b, 0, 32, 10, row_of(b, 0));
    }
    close(fd);
    unlink(path);
    test_kept_before_last(b);
}

/* Wrong calls are refused, and nothing is run. */
static void test_refusals(const bench *b) {
    k3_error err = {""};
    reset_all(b);
    k3_feed f[2] = {{.session = b->s[0], .ids = ids[0], .n = 3}, {.session = b->s[0], .ids = ids[0], .n = 3}};
    CHECK_EQ_INT(k3_feed_all(b->e, f, 2, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "twice"));
    f[1] = (k3_feed){.session = b->s[1], .ids = ids[1], .n = N_POS, .revocable = W + 1};
    CHECK_EQ_INT(k3_feed_all(b->e, f, 2, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "8 rows to take back, and 7 are planned for"));
    f[1].n = 0;
    CHECK_EQ_INT(k3_feed_all(b->e, f, 2, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_feed_all(b->e, f, 0, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_session_pos(b->s[0]), 0);
    mixture(b, -1);
}

/* ---- Taps ---- */

typedef struct {
    uint64_t trace[N_POS][64], tapped[N_POS][64];
    float last[N_POS][2048];
    size_t n_last, hidden;
    uint32_t n_taps;
} tap_test;

static void on_trace(void *user, uint64_t pos, uint32_t il, uint64_t fnv) {
    ((tap_test *)user)->trace[pos][il] = fnv;
}

static void on_prefix(void *user, uint64_t pos, uint32_t i, const float *x) {
    tap_test *t = user;
    t->tapped[pos][i] = k3_fnv1a(K3_FNV_BASIS, x, t->hidden * sizeof *x);
}

static void on_mix(void *user, uint64_t pos, uint32_t i, const float *x) {
    tap_test *t = user;
    if (i + 1 == t->n_taps) memcpy(t->last[pos], x, t->hidden * sizeof *x);
    t->n_last += i + 1 == t->n_taps;
}

/* The tap of P is what the trace hashes; the last mixture, normalised and multiplied in float64, is the logits. */
static void test_taps(const bench *b) {
    static tap_test t;
    const k3_shape *sh = k3_engine_shape(b->e);
    k3_session *s = b->s[0];
    k3_error err = {""};
    uint32_t at[] = {0, 3, sh->n_layers - 1};
    reset_all(b);
    t = (tap_test){.hidden = sh->hidden, .n_taps = 3};
    k3_session_trace(s, on_trace, &t);
    CHECK_EQ_INT(k3_session_on_taps(s, at, 3, false, on_prefix, &t, &err), 0);
    k3_feed f[2] = {{.session = b->s[1], .ids = ids[1], .n = 7}, {.session = s, .ids = ids[0], .n = 40}};
    CHECK_EQ_INT(k3_feed_all(b->e, f, 2, &err), 0);
    for (int pos = 0; pos < 40; pos++)
        for (int i = 0; i < 3; i++) CHECK(t.tapped[pos][i] == t.trace[pos][at[i]]);
    CHECK_EQ_INT(k3_session_on_taps(s, at, 3, true, on_mix, &t, &err), 0);
    CHECK_EQ_INT(k3_session_feed(s, ids[0] + 40, 8, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(t.n_last, 8);
    const layer *head = &b->e->layers[sh->n_layers];
    for (int pos = 40; head->m[T_LM_HEAD] && pos < 48; pos++) {
        double sum = 0, worst = 0;
        for (size_t i = 0; i < sh->hidden; i++) sum += (double)t.last[pos][i] * t.last[pos][i];
        double scale = 1 / sqrt(sum / (double)sh->hidden + (double)sh->rms_eps);
        for (size_t v = 0; v < V; v++) {
            double y = 0;
            for (size_t i = 0; i < sh->hidden; i++)
                y += (double)k3_bf16_f32(head->m[T_LM_HEAD][v * sh->hidden + i]) * t.last[pos][i] * scale *
                     (double)head->v[T_NORM][i];
            if (fabs(y - (double)want[0][(size_t)pos * V + v]) > worst) worst = fabs(y - (double)want[0][(size_t)pos * V + v]);
        }
        if (!CHECK(worst < 1e-3)) printf("    position %d: %g\n", pos, worst);
    }
    at[1] = 0;
    CHECK_EQ_INT(k3_session_on_taps(s, at, 3, true, on_mix, &t, &err), K3_EUSAGE);
    k3_session_trace(s, NULL, NULL);
    CHECK_EQ_INT(k3_session_on_taps(s, NULL, 0, false, NULL, NULL, &err), 0);
}

/* Two threads feed sessions of one engine: one waits for the other. */
static void *other_thread(void *user) {
    const bench *b = user;
    k3_error err;
    for (int pos = 0; pos < 40; pos++)
        if (k3_session_feed(b->s[1], ids[1] + pos, 1, K3_ROWS_LAST, row_of(b, 1) + (size_t)pos * V, &err) < 0) return user;
    return NULL;
}

static void test_threads(bench *b) {
    pthread_t other;
    k3_error err;
    void *failed = NULL;
    reset_all(b);
    CHECK(pthread_create(&other, NULL, other_thread, b) == 0);
    for (int pos = 0; pos < 60; pos += 3)
        CHECK_EQ_INT(k3_session_feed(b->s[0], ids[0] + pos, 3, K3_ROWS_ALL, row_of(b, 0) + (size_t)pos * V, &err), 0);
    pthread_join(other, &failed);
    CHECK(!failed);
    same_rows(b, 0, 0, 60, row_of(b, 0));
    same_rows(b, 1, 0, 40, row_of(b, 1));
}

int main(int argc, char **argv) {
    static const setup SETUP[] = {
        {"one part", NULL, 2, 0, 0, 0},      {"parts of 8 rows", NULL, 2, 64, 8, 0},
        {"chunks of 16", "ref", 1, 16, 5, 0}, {"one row at a time", NULL, 2, 1, 1, 0},
        {"streamed", NULL, 2, 40, 16, 1},     {"avx2", "avx2", 1, 0, 0, 0},
    };
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_begin("pass");
    demo_dir = argc > 1 ? argv[1] : "demo";
    is_quick = argc > 2;
    make_reference();
    for (size_t i = 0; i < sizeof SETUP / sizeof *SETUP; i++) {
        bench b;
        setup x = SETUP[i];
        if (x.kernels && !k3_kernels_is_supported(x.kernels)) continue;
        if (is_quick && i != 1 && i != 4) continue; /* parts, and streamed: a sanitizer is slow */
        if (x.ram) { /* the least memory: all that can be streamed is streamed */
            k3_options o;
            k3_error err;
            k3_options_default(&o);
            o.model_dir = demo_dir;
            o.context = N_POS + 16;
            o.sessions = N_SESSIONS - 1;
            o.revocable = W;
            o.snapshots = 1;
            o.chunk = x.chunk;
            o.part = x.part;
            o.headers_only = true;
            k3_engine *e;
            if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) continue;
            x.ram = k3_engine_plan(e)->floor_bytes + k3_engine_plan(e)->state_bytes + (4u << 20);
            k3_engine_close(e);
        }
        if (!bench_open(&b, &x)) continue;
        test_mixtures(&b);
        test_states(&b);
        if (b.is_slow) {
            bench_close(&b);
            continue;
        }
        test_rests(&b);
        test_nan(&b);
        test_leave(&b);
        test_cancel(&b);
        test_refusals(&b);
        test_taps(&b);
        test_threads(&b);
        bench_close(&b);
    }
    for (int i = 0; i < N_SESSIONS; i++) free(want[i]);
    return test_finish();
}
