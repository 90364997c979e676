/* test_state.c - a session goes on from a file, the cache or a snapshot as if it had never stopped.
 *
 *     test_state DEMO_DIR DATA_DIR [--quick]
 *     test_state --speed CONFIG_DIR WORK_DIR    save and load at that config's true dimensions
 *
 * The engine is included, so that its budget can be read and an engine of the true dimensions made
 * without weights; k3_state.c is linked, as in the program. Bits are compared with the hashes of
 * demo/bits.tsv (made by two other programs) and with runs that were not interrupted. Files are
 * read back here by the documented offsets, not by the engine's code. --quick is for sanitizers:
 * fewer combinations.
 */
#include "../k3.c"
#include "test.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <zstd.h>

#define N_IDS 200
#define HEAD  256
#define SUM   248

static const char *demo_dir, *data_dir;
static bool is_quick;
static char work_dir[64]; /* on a tmpfs where there is one: every save is fsynced */
static char path_a[80], path_b[80], cache_dir[80];
static uint32_t ids[N_IDS];
static float *rows; /* f32[N_IDS][vocab], of the run that was not interrupted */
static size_t n_vocab;

/* ---- A system that says other things (k3_temp.c and k3_state.c call these) ---- */

static int lock_fails;         /* errno of every flock; 0: the system's answer */
static uint64_t free_bytes;    /* that statvfs reports; 0: the system's answer */

int flock(int fd, int operation) {
    if (lock_fails == 0) return (int)syscall(SYS_flock, fd, operation);
    errno = lock_fails;
    return -1;
}

int statvfs(const char *path, struct statvfs *out) {
    int fd = open(path, O_RDONLY);
    int rc = fd < 0 ? -1 : fstatvfs(fd, out);
    if (fd >= 0) close(fd);
    if (free_bytes) out->f_bavail = free_bytes / out->f_frsize;
    return rc;
}

/* ---- Engines of different ways to the same bits ---- */

static char last_note[700];
static int n_notes, cancel_after = -1;

static void on_note(void *user, const char *line) {
    (void)user;
    n_notes++;
    snprintf(last_note, sizeof last_note, "%s", line);
}

static int on_progress(void *user, const k3_progress *p) {
    (void)user;
    return p->phase == K3_PHASE_COMPUTE && cancel_after >= 0 && cancel_after-- == 0;
}

static k3_engine *engine(const char *kernels, int threads, int chunk, float eps) {
    k3_engine *e;
    k3_error err;
    k3_options o;
    k3_options_default(&o);
    o.model_dir = demo_dir;
    o.kernels = kernels;
    o.n_threads = threads;
    o.chunk = chunk;
    o.context = 256;
    o.note = on_note;
    o.progress = on_progress;
    if (eps > 0) o.eps_lora = eps;
    if (k3_engine_open(&e, &o, &err) == 0) return e;
    printf("%s\n", err.text);
    exit(1);
}

static k3_session *session(k3_engine *e, uint64_t context) {
    k3_session *s;
    k3_error err;
    if (k3_session_new(&s, e, context, &err) == 0) return s;
    printf("%s\n", err.text);
    exit(1);
}

/* The first way: this machine's best kernels, as the program would run. The last: the reference
 * kernels. */
#define MAX_WAYS 6
static k3_engine *way[MAX_WAYS];
static k3_session *at[MAX_WAYS];
static int n_ways;

static void ways_open(void) {
    const char *const *linked = k3_kernels_linked();
    int n = 0;
    while (linked[n]) n++;
    for (int i = n - 1; i >= 0 && n_ways < MAX_WAYS - 1; i--) {
        if (!k3_kernels_is_supported(linked[i])) continue;
        if (n_ways == 0) way[n_ways++] = engine(linked[i], 2, 64, 0);
        way[n_ways] = engine(linked[i], n_ways % 3 + 1, i ? 5 : 33, 0);
        n_ways++;
    }
    for (int i = 0; i < n_ways; i++) at[i] = session(way[i], 0);
    n_vocab = way[0]->sh.vocab_size;
}

static uint64_t sampled(k3_engine *e) {
    k3_fingerprints print = {0, 0};
    CHECK_EQ_INT(k3_engine_fingerprints(e, &print, NULL), 0);
    return print.sampled;
}

static k3_cache *cache_open(k3_engine *e, uint64_t max_bytes) {
    k3_cache *c;
    k3_error err;
    if (k3_cache_open(&c, e, cache_dir, max_bytes, &err) == 0) return c;
    printf("%s\n", err.text);
    exit(1);
}

static uint8_t *file_read(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    uint8_t *p = NULL;
    *n = 0;
    if (f && fseek(f, 0, SEEK_END) == 0) {
        *n = (size_t)ftell(f);
        rewind(f);
        p = malloc(*n + 1);
        if (!p || fread(p, 1, *n, f) != *n) exit(1);
    }
    if (f) fclose(f);
    return p;
}

static void file_write(const char *path, const void *p, size_t n) {
    unlink(path); /* some file systems flush what is truncated and written again */
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f) != 0) {
        printf("%s: %s\n", path, strerror(errno));
        exit(1);
    }
}

static bool is_there(const char *path) { return access(path, F_OK) == 0; }

/* ---- Against hashes that others made ---- */

/* Run a golden prompt and 32 ids, moving to another engine through a file after every position. */
static void hop(uint32_t *list, size_t n, uint64_t *ids_fnv, uint64_t *logits_fnv) {
    float *row = malloc(n_vocab * sizeof *row);
    k3_session *s = at[0];
    k3_error err = {{0}};
    int now = 0;
    *ids_fnv = *logits_fnv = K3_FNV_BASIS;
    k3_session_reset(s);
    for (size_t i = 0, n_said = 0; n_said < 32; i++) {
        if (k3_session_feed(s, list + i, 1, K3_ROWS_LAST, row, &err) < 0) break;
        if (i + 1 >= n) {
            uint32_t id = list[i + 1] = k3_sample_greedy(row, n_vocab);
            *logits_fnv = k3_fnv1a(*logits_fnv, row, n_vocab * sizeof *row);
            *ids_fnv = k3_fnv1a(*ids_fnv, &id, sizeof id);
            n_said++;
        }
        if (k3_session_save(s, path_a, NULL, 0, NULL, &err) < 0) break;
        now = (now + 1) % n_ways;
        s = at[now];
        if (k3_session_load(s, path_a, NULL, NULL, NULL, &err) < 0) break;
    }
    CHECK_EQ_STR(err.text, "");
    free(row);
}

static void test_golden(void) {
    char path[512], line[4096];
    snprintf(path, sizeof path, "%s/golden_prompts.tsv", data_dir);
    FILE *prompts = fopen(path, "r");
    snprintf(path, sizeof path, "%s/bits.tsv", demo_dir);
    FILE *bits = fopen(path, "r");
    int n_done = 0;
    if (!CHECK(prompts && bits)) return;
    while (fgets(line, sizeof line, prompts)) {
        uint32_t list[512];
        size_t n = 0;
        char want[4096];
        unsigned long long want_ids, want_logits;
        if (line[0] == '#') continue;
        for (char *p = strchr(line, '\t'); p && n < 400; p = strchr(p + 1, ','))
            list[n++] = (uint32_t)strtoul(p + 1, NULL, 10);
        do {
            if (!fgets(want, sizeof want, bits)) want[0] = '0';
        } while (want[0] < '0' || want[0] > '9');
        if (!CHECK(sscanf(want, "%*u %llx %llx", &want_ids, &want_logits) == 2)) break;
        if (n_done++ % (is_quick ? 99 : 4)) continue; /* one or four of them */
        uint64_t ids_fnv, logits_fnv;
        hop(list, n, &ids_fnv, &logits_fnv);
        CHECK_EQ_INT(ids_fnv, want_ids);
        CHECK_EQ_INT(logits_fnv, want_logits);
    }
    CHECK(n_done >= 13);
    fclose(prompts);
    fclose(bits);
}

/* ---- Every split point ---- */

static void run_whole(void) {
    uint64_t seed = 7;
    k3_error err;
    for (int i = 0; i < N_IDS; i++) ids[i] = (uint32_t)(test_random(&seed) % 1792);
    rows = malloc(N_IDS * n_vocab * sizeof *rows);
    k3_session_reset(at[0]);
    CHECK_EQ_INT(k3_session_feed(at[0], ids, N_IDS, K3_ROWS_ALL, rows, &err), 0);
    /* The same ids one by one with the reference kernels, so that no path vouches for itself. */
    float *row = malloc(n_vocab * sizeof *row);
    for (size_t i = 0; i < (is_quick ? 10 : 100); i++) {
        k3_session_feed(at[n_ways - 1], ids + i, 1, K3_ROWS_LAST, row, &err);
        CHECK(memcmp(row, rows + i * n_vocab, n_vocab * sizeof *row) == 0);
    }
    free(row);
}

/* Feed ids [from, to) and compare every row. */
static bool goes_on(k3_session *s, size_t from, size_t to) {
    static float *got;
    k3_error err = {{0}};
    if (!got) got = malloc(N_IDS * n_vocab * sizeof *got);
    size_t n;
    const uint32_t *own = k3_session_ids(s, &n);
    if (n != from || memcmp(own, ids, n * sizeof *own) != 0) return false;
    if (from == to) return true;
    return k3_session_feed(s, ids + from, to - from, K3_ROWS_ALL, got, &err) == 0 &&
           memcmp(got, rows + from * n_vocab, (to - from) * n_vocab * sizeof *got) == 0;
}

/* Do two sessions hold the same, to the last byte? */
static bool is_same(const k3_session *a, const k3_session *b) {
    k3_state_array x, y;
    if (a->pos != b->pos || memcmp(a->ids, b->ids, a->pos * sizeof *a->ids) != 0) return false;
    for (uint32_t il = 0; il < a->e->sh.n_layers; il++) {
        k3_state_layer(a, il, a->pos, &x);
        k3_state_layer(b, il, b->pos, &y);
        if (x.n_bytes != y.n_bytes || memcmp(x.p, y.p, (size_t)x.n_bytes) != 0) return false;
    }
    return true;
}

/* Save at every position of a run. What an engine of another way loads must be the same to the last
 * byte, must be saved as the same file again, and must go on to the same rows: for a few ids at
 * most positions, to the end at some. */
static void test_splits(void) {
    k3_session *from = session(way[0], 0);
    k3_error err = {{0}};
    int stride = is_quick ? 23 : 1;
    for (int i = 0; i < n_ways; i++) k3_session_reset(at[i]);
    for (int k = stride; k < N_IDS; k += stride) {
        k3_state_info info;
        size_t n_a, n_b, end = (size_t)k + 2;
        if (end > N_IDS || (k % 67 == 23 && !is_quick)) end = N_IDS;
        uint64_t used = way[0]->mem.used;
        CHECK(goes_on(from, (size_t)(k - stride), (size_t)k));
        CHECK_EQ_INT(k3_session_save(from, path_a, NULL, 0, &info, &err), 0);
        CHECK_EQ_INT(way[0]->mem.used, used);
        CHECK_EQ_INT(info.n_pos, k);
        k3_session *to = at[k % n_ways];
        CHECK_EQ_INT(k3_session_load(to, path_a, NULL, NULL, &info, &err), 0);
        CHECK(is_same(from, to));
        k3_session_save(to, path_b, NULL, 0, NULL, &err);
        uint8_t *a = file_read(path_a, &n_a), *b = file_read(path_b, &n_b);
        CHECK(n_a == n_b && info.file_bytes == n_a && memcmp(a, b, n_a) == 0);
        free(a);
        free(b);
        CHECK(goes_on(to, (size_t)k, end));
    }
    k3_session_free(from);
}

/* All splits in one run: after each id to the next way, through the cache at every other id. */
static void test_chain(void) {
    k3_error err = {{0}};
    k3_cache *c[MAX_WAYS];
    int n = is_quick ? 30 : N_IDS, now = 0;
    for (int i = 0; i < n_ways; i++) {
        c[i] = cache_open(way[i], 0);
        k3_session_reset(at[i]);
    }
    for (int k = 0; k < n; k++) {
        int next = (now + 1) % n_ways;
        CHECK(goes_on(at[now], (size_t)k, (size_t)k + 1));
        if (k % 2) {
            CHECK_EQ_INT(k3_cache_store(c[now], at[now], &err), 0);
            CHECK_EQ_INT(k3_cache_restore(c[next], at[next], ids, (size_t)k + 1, &err), k + 1);
        } else {
            CHECK_EQ_INT(k3_session_save(at[now], path_a, NULL, 0, NULL, &err), 0);
            CHECK_EQ_INT(k3_session_load(at[next], path_a, NULL, NULL, NULL, &err), 0);
        }
        now = next;
    }
    for (int i = 0; i < n_ways; i++) k3_cache_close(c[i]);
    CHECK_EQ_INT(k3_cache_trim(cache_dir, 0, NULL, &err), n / 2);
}

/* ---- The file as documented ---- */

static uint64_t u64_at(const uint8_t *p) {
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

static uint32_t u32_at(const uint8_t *p) { return (uint32_t)(u64_at(p) & 0xffffffffu); }

/* Unpack a piece by the description at the top of k3_state.c; returns what follows it. */
static const uint8_t *piece_decode(const uint8_t *p, uint32_t n_planes, uint8_t *out) {
    uint32_t n = u32_at(p + 16);
    const uint8_t *in = p + 48;
    uint8_t *plane = malloc(n);
    for (uint32_t b = 0; b < n_planes; b++) {
        uint32_t stored = u32_at(p + 20 + 4 * b), whole = n / n_planes;
        if (stored == whole)
            memcpy(plane, in, whole);
        else if (ZSTD_decompress(plane, whole, in, stored) != whole)
            CHECK(!"zstd");
        for (uint32_t i = 0; i < whole; i++) out[(size_t)i * n_planes + b] = plane[i];
        in += stored;
    }
    CHECK_EQ_INT(u64_at(p + 40), XXH3_64bits_withSeed(p + 48, (size_t)(in - p) - 48,
                                                     XXH3_64bits(p, 40)));
    free(plane);
    return in;
}

/* Check one line of the table of sections: it must begin where the one before ends. Returns where
 * it ends. */
static uint64_t entry_check(const uint8_t *f, int i, const char *name, bool is_required,
                            uint32_t n_planes, uint64_t first, uint64_t n_raw) {
    char padded[17] = {0};
    const uint8_t *x = f + HEAD + 64 * i;
    memcpy(padded, name, strlen(name));
    CHECK_EQ_MEM(x, padded, 16);
    CHECK(u32_at(x + 16) == is_required && u32_at(x + 20) == n_planes);
    CHECK_EQ_INT(u64_at(x + 24), first);
    CHECK_EQ_INT(u64_at(x + 40), n_raw);
    CHECK(u64_at(x + 48) == 0 && u64_at(x + 56) == 0);
    return first + u64_at(x + 32);
}

static void header_check(const uint8_t *f, size_t n, const k3_state_info *info, size_t n_app) {
    const k3_shape *sh = &way[0]->sh;
    uint8_t key[48 + 150 * 4];
    CHECK_EQ_MEM(f, "K3STATE\n\2\0\0\0\xc0\1\0\0", 16); /* 256 + 3 x 64 */
    CHECK_EQ_STR((const char *)f + 16, K3_NUMERICS_ID);
    CHECK_EQ_INT(u64_at(f + 48), sampled(way[0]));
    CHECK_EQ_INT(u64_at(f + 56), 0); /* the demo has no sums */
    CHECK(u64_at(f + 64) == k3_state_stamp(way[0]) && u64_at(f + 64) != 0);
    CHECK_EQ_INT(u64_at(f + 72), 2 + sh->n_layers); /* one piece each here */
    CHECK_EQ_INT(u64_at(f + 80), n);
    CHECK_EQ_INT(u64_at(f + 88), info->raw_bytes);
    CHECK_EQ_INT(info->raw_bytes, sh->state_bytes + 150 * sh->pos_bytes + 150 * 4 + n_app);
    CHECK_EQ_INT(u64_at(f + 144), 150);
    CHECK_EQ_INT(u32_at(f + 152), 3);
    CHECK_EQ_INT(u64_at(f + 240), XXH3_64bits(f + HEAD, 3 * 64));
    CHECK_EQ_INT(u64_at(f + SUM), XXH3_64bits(f, SUM));
    memcpy(key, f + 16, 40);
    memcpy(key + 40, f + 64, 8);
    memcpy(key + 48, ids, 150 * 4);
    XXH128_hash_t k = XXH3_128bits(key, sizeof key);
    CHECK(u64_at(f + 96) == k.low64 && u64_at(f + 104) == k.high64);
}

static void test_format(void) {
    static const char app[] = "what a chat keeps with it";
    k3_session *s = at[0];
    k3_error err;
    k3_state_info info;
    size_t n;
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 150));
    CHECK_EQ_INT(k3_session_save(s, path_a, app, sizeof app, &info, &err), 0);
    uint8_t *f = file_read(path_a, &n), *out = malloc(1 << 20);
    header_check(f, n, &info, sizeof app);
    uint64_t end = entry_check(f, 0, "ids", true, 4, HEAD + 3 * 64, 150 * 4);
    end = entry_check(f, 1, "app", false, 1, end, sizeof app);
    end = entry_check(f, 2, "layers", true, 4, end, info.raw_bytes - 150 * 4 - sizeof app);
    CHECK_EQ_INT(end, n);
    const uint8_t *p = f + HEAD + 3 * 64;
    CHECK(u32_at(p) == 1 && u32_at(p + 4) == 0);
    p = piece_decode(p, 4, out);
    CHECK_EQ_MEM(out, ids, 150 * 4);
    CHECK(u32_at(p) == 2 && u32_at(p + 4) == 0);
    p = piece_decode(p, 1, out);
    CHECK_EQ_MEM(out, app, sizeof app);
    for (uint32_t il = 0; il < way[0]->sh.n_layers; il++) {
        CHECK(u32_at(p) == 3 && u32_at(p + 4) == il && u64_at(p + 8) == 0);
        k3_state_array a;
        k3_state_layer(s, il, 150, &a);
        CHECK_EQ_INT(u32_at(p + 16), a.n_bytes);
        p = piece_decode(p, 4, out);
        CHECK_EQ_MEM(out, a.p, (size_t)a.n_bytes);
    }
    CHECK(p == f + n);
    CHECK(info.file_bytes < info.raw_bytes * 95 / 100); /* something must shrink */

    void *back = NULL;
    size_t n_back = 0;
    n_notes = 0;
    CHECK_EQ_INT(k3_session_load(at[1], path_a, &back, &n_back, NULL, &err), 0);
    CHECK(n_back == sizeof app && back && memcmp(back, app, sizeof app) == 0);
    CHECK_EQ_INT(n_notes, 0); /* the model's files are untouched */
    free(back);
    CHECK_EQ_INT(k3_session_load(at[1], path_a, NULL, &n_back, NULL, &err), 0);
    k3_state_head h;
    CHECK_EQ_INT(k3_state_check(path_a, true, &h, &err), 0);
    CHECK(h.n_pos == 150 && h.n_app == sizeof app && h.file_bytes == n);
    CHECK(h.print.sampled == sampled(way[0]) && h.print.by_sums == 0);
    free(f);
    free(out);
}

/* The state file in tests/data, made by the first version that wrote any: it must stay readable, or
 * be refused for its version. */
static void test_old_file(void) {
    char path[512];
    k3_error err = {{0}};
    float *row = malloc(n_vocab * sizeof *row);
    uint32_t next = 311; /* the last id of the first golden prompt */
    snprintf(path, sizeof path, "%s/state_v1.k3s", data_dir);
    n_notes = 0;
    CHECK_EQ_INT(k3_session_load(at[0], path, NULL, NULL, NULL, &err), 0);
    CHECK_EQ_STR(err.text, "");
    CHECK(n_notes == 1 && strstr(last_note, "of an older form"));
    CHECK_EQ_INT(k3_session_pos(at[0]), 5);
    CHECK_EQ_INT(k3_session_feed(at[0], &next, 1, K3_ROWS_LAST, row, &err), 0);
    CHECK_EQ_INT(k3_sample_greedy(row, n_vocab), 1379); /* " Paris" of demo/golden.json */
    free(row);
}

/* ---- What must be refused ---- */

/* Is the session as k3_session_new() made it? All but cache rows is 0; those are written before
 * they are read. */
static bool is_new(const k3_session *s) {
    for (uint32_t il = 0; il < s->e->sh.n_layers; il++) {
        k3_state_array a;
        k3_state_layer(s, il, 0, &a);
        const float *p = a.p;
        for (uint64_t i = 0; i < a.n_bytes / sizeof *p; i++)
            if (p[i] != 0.0f) return false;
    }
    return s->pos == 0 && !s->is_broken;
}

/* Make the checksums of table and header right. */
static void sums_repair(uint8_t *f, size_t n) {
    uint64_t n_table = 64 * (uint64_t)u32_at(f + 152), sum = 0;
    if (u32_at(f + 8) == 2 && n_table <= n - HEAD) {
        sum = XXH3_64bits(f + HEAD, (size_t)n_table);
        memcpy(f + SUM - 8, &sum, 8);
    }
    sum = XXH3_64bits(f, SUM);
    memcpy(f + SUM, &sum, 8);
}

/* Write n bytes of f, with its header's checksum made right where `repairs`. Loading must fail with
 * `want`, say `why`, and leave the session new. */
static bool refused(uint8_t *f, size_t n, bool repairs, int want, const char *why) {
    k3_error err = {{0}};
    k3_state_head h;
    void *app = &err;
    size_t n_app = 9;
    uint8_t was[16];
    if (n >= HEAD) memcpy(was, f + SUM - 8, 16);
    if (n >= HEAD && repairs) sums_repair(f, n);
    file_write(path_b, f, n);
    if (n >= HEAD) memcpy(f + SUM - 8, was, 16);
    int rc = k3_session_load(at[1], path_b, &app, &n_app, NULL, &err);
    bool ok = rc == want && strstr(err.text, why) && !app && n_app == 0 && is_new(at[1]);
    if (!ok) printf("    got %d '%s', want %d '%s'\n", rc, err.text, want, why);
    /* Without a model only the bytes are checked, not whose they are. */
    if (want == K3_ECHECK && !repairs && k3_state_check(path_b, true, &h, &err) != K3_ECHECK)
        ok = false;
    return ok;
}

/* Change one header field and make the checksum right: the message must say what differs. */
static void refuse_field(uint8_t *f, size_t n, size_t offset, uint8_t flip, int want,
                         const char *why) {
    f[offset] ^= flip;
    CHECK(refused(f, n, true, want, why));
    f[offset] ^= flip;
}

/* Make the first plane of the first piece one byte longer than it can be, with all lengths and
 * checksums right. Sizes are used before a checksum can be compared, so they must be checked
 * themselves. */
static void refuse_long_plane(const uint8_t *f, size_t n) {
    const size_t p = HEAD + 3 * 64;
    uint8_t *g = malloc(n + 1);
    uint32_t stored = u32_at(f + p + 20), longer = stored + 1;
    uint64_t size = n + 1, payload = 1;
    for (int b = 0; b < 4; b++) payload += u32_at(f + p + 20 + 4 * b);
    CHECK_EQ_INT(stored, u32_at(f + p + 16) / 4); /* stored unpacked */
    memcpy(g, f, p + 48 + stored);
    g[p + 48 + stored] = 1;
    memcpy(g + p + 49 + stored, f + p + 48 + stored, n - p - 48 - stored);
    memcpy(g + 80, &size, 8);
    memcpy(g + p + 20, &longer, 4);
    for (int i = 0; i < 3; i++) { /* the section is longer, those behind it begin later */
        uint64_t v = u64_at(g + HEAD + 64 * i + (i ? 24 : 32)) + 1;
        memcpy(g + HEAD + 64 * i + (i ? 24 : 32), &v, 8);
    }
    uint64_t sum = XXH3_64bits_withSeed(g + p + 48, (size_t)payload, XXH3_64bits(g + p, 40));
    memcpy(g + p + 40, &sum, 8);
    CHECK(refused(g, n + 1, true, K3_ECHECK, "damaged: ids"));
    free(g);
}

/* A section that this program does not know is skipped, unless the file says that it is required.
 * The app section of `f` plays that part. */
static void test_unknown_section(uint8_t *f, size_t n) {
    k3_error err = {{0}};
    k3_state_head h;
    void *app = &err;
    size_t n_app = 9;
    uint8_t *entry = f + HEAD + 64;
    memcpy(entry, "draft", 5);
    sums_repair(f, n);
    file_write(path_b, f, n);
    CHECK_EQ_INT(k3_session_load(at[1], path_b, &app, &n_app, NULL, &err), 0);
    CHECK(!app && n_app == 0 && is_same(at[1], at[0]));
    CHECK_EQ_INT(k3_state_check(path_b, true, &h, &err), 0);
    CHECK_EQ_INT(h.n_app, 0);
    f[n / 2] ^= 1; /* its bytes are under checksums too */
    file_write(path_b, f, n);
    CHECK_EQ_INT(k3_state_check(path_b, true, &h, &err), K3_ECHECK);
    f[n / 2] ^= 1;
    entry[16] = 1;
    CHECK(refused(f, n, true, K3_ECHECK, "needs section draft, which this program does not know"));
    entry[16] = 0;
    memcpy(entry, "app\0\0", 5);
    entry[48] = 7; /* a section number that is not there */
    sums_repair(f, n);
    file_write(path_b, f, n);
    CHECK_EQ_INT(k3_session_load(at[1], path_b, &app, &n_app, NULL, &err), 0);
    CHECK(!app && n_app == 0);
    entry[48] = 0;
    sums_repair(f, n);
}

static void refuse_tables(uint8_t *f, size_t n) {
    const size_t table = HEAD;
    refuse_field(f, n, table + 2, 1, K3_ECHECK, "needs section idr");
    f[table + 16] = 0; /* then it is not required, and missing */
    refuse_field(f, n, table + 2, 1, K3_ECHECK, "section ids is missing");
    f[table + 16] = 1;
    refuse_field(f, n, table + 5, 1, K3_ECHECK, "makes no sense"); /* behind the name's end */
    refuse_field(f, n, table, 0x80, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 16, 2, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 20, 8, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 24, 1, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 32, 1, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 39, 0x80, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 40, 4, K3_ECHECK, "makes no sense");
    refuse_field(f, n, table + 48, 1, K3_ECHECK, "needs section ids");
    refuse_field(f, n, table + 56, 1, K3_ECHECK, "makes no sense");
    memcpy(f + table + 64, "layers", 6); /* as one plane, so no second section `layers` */
    f[table + 64 + 20] = 4;
    CHECK(refused(f, n, true, K3_ECHECK, "")); /* 3 bytes cannot be four planes */
    memcpy(f + table + 64, "app\0\0\0", 6);
    f[table + 64 + 20] = 1;
}

static void test_refusals(void) {
    k3_error err;
    size_t n;
    uint64_t seed = 3;
    k3_session_reset(at[0]);
    CHECK(goes_on(at[0], 0, 60));
    k3_session_save(at[0], path_a, "app", 3, NULL, &err);
    uint8_t *f = file_read(path_a, &n);
    CHECK(refused(f, 0, false, K3_ECHECK, "not a k3 state file: 0 bytes"));
    CHECK(refused(f, HEAD - 1, false, K3_ECHECK, "not a k3 state file"));
    for (size_t cut = HEAD; cut < n; cut += is_quick ? n / 17 : n / 211)
        CHECK(refused(f, cut, false, K3_ECHECK, "cut short"));
    CHECK(refused(f, n - 1, false, K3_ECHECK, "cut short"));
    for (size_t i = 0; i < n;) { /* every byte of the header, many of the rest */
        uint8_t flip = (uint8_t)(1u << (test_random(&seed) & 7));
        f[i] ^= flip;
        CHECK(refused(f, n, false, K3_ECHECK, path_b));
        f[i] ^= flip;
        i += i < HEAD + 3 * 64 + 48 ? 1 : 1 + test_random(&seed) % (is_quick ? 3000 : 200);
    }
    refuse_field(f, n, 8, 2, K3_ECHECK, "version 0; this program reads versions 1 and 2");
    refuse_field(f, n, 8, 1, K3_ECHECK, "version 3; this program reads versions 1 and 2");
    refuse_field(f, n, 8, 3, K3_ECHECK, "makes no sense"); /* it is no version 1 */
    refuse_field(f, n, 16, 1, K3_ECHECK, "numerics j3-f32-dot16-q40, this program computes k3-");
    refuse_field(f, n, 48, 1, K3_ECHECK, "other weights");
    refuse_field(f, n, 56, 1, K3_ECHECK, "do not fit together");
    refuse_field(f, n, 64, 1, K3_ECHECK, "do not fit together");
    refuse_field(f, n, 113, 1, K3_ECHECK, "vocabulary 2304 there, 2048 here");
    refuse_field(f, n, 116, 1, K3_ECHECK, "layers 8 there, 9 here");
    refuse_field(f, n, 120, 8, K3_ECHECK, "KDA heads 12 there, 4 here");
    refuse_field(f, n, 124, 64, K3_ECHECK, "KDA head size 96 there, 32 here");
    refuse_field(f, n, 128, 1, K3_ECHECK, "latent row 97 there, 96 here");
    refuse_field(f, n, 156, 1, K3_ECHECK, "makes no sense");
    refuse_field(f, n, 145, 1, K3_EFULL, "state of 316 positions, more than the context of 256");
    refuse_field(f, n, 144, 1, K3_ECHECK, "do not fit together"); /* one position more */
    refuse_field(f, n, 72, 1, K3_ECHECK, "do not fit together");
    refuse_field(f, n, 80, 1, K3_ECHECK, "the header says");
    refuse_field(f, n, 88, 1, K3_ECHECK, "makes no sense");
    refuse_field(f, n, 96, 1, K3_ECHECK, "do not fit together");
    refuse_field(f, n, 152, 1, K3_ECHECK, "makes no sense");
    refuse_field(f, n, 12, 64, K3_ECHECK, "makes no sense");
    refuse_tables(f, n);
    test_unknown_section(f, n);
    refuse_long_plane(f, n);
    at[0]->ids[3] = 2048; /* a right file with an id that does not exist */
    k3_session_save(at[0], path_b, NULL, 0, NULL, &err);
    CHECK_EQ_INT(k3_session_load(at[1], path_b, NULL, NULL, NULL, &err), K3_ECHECK);
    CHECK(strstr(err.text, "id 2048 at position 3") && is_new(at[1]));
    k3_session *small = session(way[1], 59);
    CHECK_EQ_INT(k3_session_load(small, path_a, NULL, NULL, NULL, &err), K3_EFULL);
    k3_session_free(small);
    CHECK_EQ_INT(k3_session_load(at[1], work_dir, NULL, NULL, NULL, &err), K3_EIO);
    CHECK(strstr(err.text, "not a regular file"));
    CHECK_EQ_INT(k3_session_load(at[1], "/nowhere/x", NULL, NULL, NULL, &err), K3_EIO);
    CHECK(goes_on(at[1], 0, 30)); /* the session still goes on */
    free(f);
}

/* Other constants, other weights; the same model behind another name. */
static void test_fingerprint(void) {
    char dir[128], link_path[128], command[1024];
    k3_error err = {{0}};
    k3_engine *eps = engine(NULL, 1, 8, 1e-5f), *other;
    k3_session *s = session(eps, 0);
    uint64_t own = sampled(way[0]);
    CHECK(own != 0 && own == sampled(way[n_ways - 1]));
    CHECK(own != sampled(eps));
    CHECK_EQ_INT(k3_session_load(s, path_a, NULL, NULL, NULL, &err), K3_ECHECK);
    CHECK(strstr(err.text, "lora eps of 1e-06, this run has 1e-05"));
    k3_session_free(s);
    k3_engine_close(eps);
    k3_options o;
    k3_options_default(&o);
    o.headers_only = true;
    o.model_dir = link_path;
    snprintf(link_path, sizeof link_path, "%s/link", work_dir);
    snprintf(dir, sizeof dir, "%s/other", work_dir);
    char *real = realpath(demo_dir, NULL);
    CHECK(symlink(real, link_path) == 0 && k3_engine_open(&other, &o, &err) == 0);
    free(real);
    CHECK_EQ_INT(sampled(other), own);
    k3_engine_close(other);
    snprintf(command, sizeof command, "cp -r '%s' '%s' && chmod -R u+w '%s'", demo_dir, dir, dir);
    CHECK(system(command) == 0);
    snprintf(command, sizeof command, "%s/model-00003-of-000003.safetensors", dir);
    FILE *f = fopen(command, "r+b"); /* most of a shard is of other weights */
    if (CHECK(f != NULL)) {
        fseek(f, 0, SEEK_END);
        long n = ftell(f);
        uint8_t noise[4096];
        for (size_t i = 0; i < sizeof noise; i++) noise[i] = (uint8_t)(i * 37);
        for (long i = n / 10; i < n / 10 * 9; i += (long)sizeof noise) {
            fseek(f, i, SEEK_SET);
            fwrite(noise, 1, sizeof noise, f);
        }
        fclose(f);
        o.model_dir = dir;
        CHECK_EQ_INT(k3_engine_open(&other, &o, &err), 0);
        CHECK(sampled(other) != own);
        k3_engine_close(other);
    }
}

/* The fingerprints of a directory; where `writes`, after its sums were written. */
static k3_fingerprints prints_of(const char *dir, bool writes) {
    k3_fingerprints print = {0, 0};
    k3_error err = {{0}};
    k3_options o;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = dir;
    o.headers_only = true;
    if (writes && CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0)) {
        CHECK_EQ_INT(k3_engine_write_sums(e, true, &err), 256);
        CHECK_EQ_INT(k3_engine_fingerprints(e, &print, &err), 0);
        CHECK_EQ_INT(print.by_sums, 0); /* the engine was opened before there were sums */
        k3_engine_close(e);
    }
    if (CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0)) {
        CHECK_EQ_INT(k3_engine_fingerprints(e, &print, &err), 0);
        k3_engine_close(e);
    }
    return print;
}

/* Flip a bit in the middle of an expert that no sample looks at. */
static void expert_flip(const char *dir, uint32_t il, uint32_t ie) {
    k3_engine *e = way[0];
    const expert_place *x = model_expert(&e->files, &e->sh, il, ie);
    char path[256];
    uint8_t byte;
    snprintf(path, sizeof path, "%s/%s", dir, e->files.shards[x->shard[W3_PACKED]].name);
    int fd = open(path, O_RDWR);
    off_t where = (off_t)(x->offset[W3_PACKED] + expert_tensor_bytes(&e->sh, W3_PACKED) / 2 + 77);
    CHECK(fd >= 0 && pread(fd, &byte, 1, where) == 1);
    byte ^= 0x11;
    CHECK(fd >= 0 && pwrite(fd, &byte, 1, where) == 1);
    close(fd);
}

static void copy_demo(const char *dir) {
    char command[1024];
    snprintf(command, sizeof command, "rm -rf '%s' && cp -r '%s' '%s' && chmod -R u+w '%s'", dir,
             demo_dir, dir, dir);
    CHECK(system(command) == 0);
}

/* k3.sums of `dir` in its first form: without the last sum of each of the 256 experts. */
static void sums_first_form(const char *dir) {
    char path[256];
    size_t n;
    snprintf(path, sizeof path, "%s/k3.sums", dir);
    uint8_t *f = file_read(path, &n);
    uint64_t *v = (uint64_t *)(void *)f, n_new = v[2], m = 3 + n_new - 512;
    memcpy(v, "K3SUMS1\n", 8);
    v[2] = n_new - 256;
    for (uint64_t i = 0; i < 256; i++) v[m + i] = v[m + 2 * i];
    v[3 + v[2]] = XXH3_64bits_withSeed(v + 3, (size_t)v[2] * 8, XXH3_64bits(v, 24));
    file_write(path, f, (size_t)(v[2] + 4) * 8);
    free(f);
}

/* Fingerprints by sums are equal for the same weights in other shards, also with experts in pieces,
 * and differ when one expert differs where no sample looks. */
static void test_prints_by_sums(void) {
    char dir[128], recut[128], command[2048];
    snprintf(dir, sizeof dir, "%s/sums", work_dir);
    snprintf(recut, sizeof recut, "%s/recut", work_dir);
    copy_demo(dir);
    CHECK_EQ_INT(prints_of(dir, false).by_sums, 0);
    k3_fingerprints own = prints_of(dir, true);
    CHECK(own.by_sums != 0 && own.sampled == sampled(way[0]));
    snprintf(command, sizeof command, "python3 %s/recut.py '%s' '%s'", "tests", demo_dir, recut);
    if (CHECK(system(command) == 0)) {
        k3_fingerprints cut = prints_of(recut, true);
        CHECK(cut.by_sums == own.by_sums && cut.sampled == own.sampled);
    }
    expert_flip(dir, 3, 5);
    k3_fingerprints other = prints_of(dir, true);
    CHECK(other.sampled == own.sampled); /* samples cannot tell the two apart */
    CHECK(other.by_sums != 0 && other.by_sums != own.by_sums);
    expert_flip(dir, 3, 5);
    CHECK(prints_of(dir, true).by_sums == own.by_sums);
    sums_first_form(dir);
    CHECK_EQ_INT(prints_of(dir, false).by_sums, 0);
    k3_error err = {{0}};
    k3_options o;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = dir;
    o.headers_only = true;
    for (int i = 0; i < 2; i++) { /* the damage is found, and the list is not written over */
        expert_flip(dir, 3, 5);
        if (!CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0)) return;
        CHECK_EQ_INT(k3_engine_verify(e, &err), i ? 256 : K3_ECHECK);
        CHECK_EQ_INT(k3_engine_write_sums(e, false, &err), i ? 256 : K3_ECHECK);
        k3_engine_close(e);
    }
    CHECK(prints_of(dir, false).by_sums == own.by_sums);
}

typedef struct {
    char path[32][256];
    uint64_t n_pos[32];
    int n, n_bad;
} listing;

static int list_one(void *user, const char *path, const k3_state_head *h, int rc,
                    const k3_error *err) {
    listing *l = user;
    (void)err;
    if (rc < 0) l->n_bad++;
    if (l->n == 32) return 1;
    snprintf(l->path[l->n], sizeof l->path[0], "%s", path);
    l->n_pos[l->n++] = h->n_pos;
    return 0;
}

static listing cache_list(void) {
    listing l;
    k3_error err = {{0}};
    memset(&l, 0, sizeof l);
    CHECK(k3_cache_list(cache_dir, list_one, &l, &err) >= 0);
    return l;
}

static k3_engine *engine_of(const char *dir) {
    k3_engine *e = NULL;
    k3_error err = {{0}};
    k3_options o;
    k3_options_default(&o);
    o.model_dir = dir;
    o.n_threads = 1;
    o.context = 256;
    o.note = on_note;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0);
    return e;
}

/* Run ids [0, 50) on the weights of `dir`; `path` and the cache get the state. */
static void state_make(const char *dir, const char *path) {
    k3_engine *e = engine_of(dir);
    k3_session *s = session(e, 0);
    k3_cache *c = cache_open(e, 0);
    k3_error err = {{0}};
    CHECK_EQ_INT(k3_session_feed(s, ids, 50, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_save(s, path, NULL, 0, NULL, &err), 0);
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK(k3_cache_has(c, ids, 50));
    k3_cache_close(c);
    k3_session_free(s);
    k3_engine_close(e);
}

/* Use that state with `dir`: how many positions the cache gives, what loading returns, how many
 * notes come. */
static void state_try(const char *dir, const char *path, int64_t cached, int loads, int notes,
                      const char *says) {
    k3_engine *e = engine_of(dir);
    k3_session *s = session(e, 0);
    k3_cache *c = cache_open(e, 0);
    k3_error err = {{0}};
    last_note[0] = 0;
    n_notes = 0;
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 60, &err), cached);
    CHECK_EQ_INT(n_notes, 0);
    CHECK_EQ_INT(k3_session_load(s, path, NULL, NULL, NULL, &err), loads);
    CHECK_EQ_INT(n_notes, notes);
    CHECK(strstr(loads ? err.text : last_note, says));
    k3_cache_close(c);
    k3_session_free(s);
    k3_engine_close(e);
}

/* Weights were damaged where no sample looks, and repaired: a state made with the damage must not
 * be used. Without sums the stamps of the files tell; with sums, the sums. */
static void test_repaired(void) {
    char dir[128], path[160], list_path[192];
    k3_error err;
    snprintf(dir, sizeof dir, "%s/repaired", work_dir);
    snprintf(path, sizeof path, "%s/repaired.k3s", work_dir);
    snprintf(list_path, sizeof list_path, "%s/k3.sums", dir);
    copy_demo(dir);
    expert_flip(dir, 2, 7); /* now it is damaged */
    state_make(dir, path);
    state_try(dir, path, 50, 0, 0, "");
    expert_flip(dir, 2, 7);
    state_try(dir, path, 0, 0, 1, "made without sums, from files changed or copied since");
    prints_of(dir, true); /* sums that were written later cannot tell */
    state_try(dir, path, 0, 0, 1, "made without sums");
    state_make(dir, path);
    state_try(dir, path, 50, 0, 0, "");
    expert_flip(dir, 2, 7);
    prints_of(dir, true); /* sums of the damaged weights */
    state_try(dir, path, 0, K3_ECHECK, 0, "a state of other weights: the sums say");
    expert_flip(dir, 2, 7);
    prints_of(dir, true);
    state_try(dir, path, 50, 0, 0, ""); /* the sums are equal, though the files were touched */
    CHECK(unlink(list_path) == 0);
    state_try(dir, path, 0, 0, 1, "this run has no sums");
    k3_cache_trim(cache_dir, 0, NULL, &err);
}

/* The files change under a run that has no sums: nobody can say which weights its state is of. */
static void test_touched(void) {
    char dir[128];
    k3_error err = {{0}};
    snprintf(dir, sizeof dir, "%s/touched", work_dir);
    copy_demo(dir);
    k3_engine *e = engine_of(dir);
    k3_session *s = session(e, 0);
    k3_cache *c = cache_open(e, 0);
    CHECK_EQ_INT(k3_session_feed(s, ids, 20, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK_EQ_INT(k3_session_feed(s, ids + 20, 20, K3_ROWS_NONE, NULL, &err), 0);
    struct timespec pause = {0, 12000000}; /* file times move in steps of the system's tick */
    nanosleep(&pause, NULL);
    expert_flip(dir, 2, 7);
    n_notes = 0;
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 60, &err), 0);
    CHECK(n_notes == 1 && strstr(last_note, "changed while they are in use"));
    CHECK_EQ_INT(cache_list().n, 1);
    k3_cache_close(c);
    k3_session_free(s);
    k3_engine_close(e);
    k3_cache_trim(cache_dir, 0, NULL, &err);
}

/* ---- Saving that fails ---- */

static void test_save_errors(void) {
    char temp[96];
    k3_error err;
    k3_session *s = at[0];
    size_t n, n_now;
    snprintf(temp, sizeof temp, "%s.tmp", path_a);
    k3_session_reset(s);
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), K3_EUSAGE);
    CHECK(goes_on(s, 0, 80));
    CHECK_EQ_INT(k3_session_save(s, "/nowhere/x", NULL, 0, NULL, &err), K3_EIO);
    CHECK_EQ_INT(k3_session_save(s, work_dir, NULL, 0, NULL, &err), K3_EIO);
    CHECK_EQ_INT(k3_session_save(s, "/dev/null", NULL, 0, NULL, &err), K3_EIO);
    CHECK(strstr(err.text, "not a regular file"));
    CHECK_EQ_INT(k3_session_save(s, path_a, temp, K3_STATE_APP_MAX + 1, NULL, &err), K3_EUSAGE);

    /* A drive that fills up: the old file stays, the half-written one is removed. */
    struct rlimit full = {60000, RLIM_INFINITY}, old;
    uint8_t *before = file_read(path_a, &n);
    getrlimit(RLIMIT_FSIZE, &old);
    full.rlim_max = old.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &full);
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), K3_EIO);
    setrlimit(RLIMIT_FSIZE, &old);
    CHECK(strstr(err.text, "write of") && strstr(err.text, "too large"));
    uint8_t *after = file_read(path_a, &n_now);
    CHECK(n == n_now && memcmp(before, after, n) == 0 && !is_there(temp));
    free(before);
    free(after);

    /* Another process is writing the file; or was, and died. A link is followed, not replaced. */
    int fd = open(temp, O_RDWR | O_CREAT, 0600);
    CHECK(flock(fd, LOCK_EX) == 0);
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), K3_EIO);
    CHECK(strstr(err.text, "another process is writing it"));
    close(fd);
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), 0);
    CHECK(!is_there(temp));
    struct stat st;
    unlink(path_b);
    CHECK(symlink(path_a, path_b) == 0);
    CHECK_EQ_INT(k3_session_save(s, path_b, NULL, 0, NULL, &err), 0);
    CHECK(lstat(path_b, &st) == 0 && S_ISLNK(st.st_mode));
    CHECK(lstat(path_a, &st) == 0 && (st.st_mode & 0777) == 0600);
    unlink(path_b);

    /* After a cancelled step there is nothing to save; loading makes the session whole. */
    cancel_after = 3;
    CHECK_EQ_INT(k3_session_feed(s, ids + 80, 20, K3_ROWS_NONE, NULL, &err), K3_ECANCEL);
    cancel_after = -1;
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), K3_EUSAGE);
    CHECK(strstr(err.text, "ended with an error"));
    CHECK_EQ_INT(k3_session_load(s, path_a, NULL, NULL, NULL, &err), 0);
    CHECK(goes_on(s, 80, N_IDS));
}

/* Saving must fail with `why` before anything is written, and leave the old file. */
static void save_refused(const char *temp, const char *why) {
    k3_error err = {{0}};
    struct stat before, after;
    lstat(temp, &before);
    CHECK_EQ_INT(k3_state_can_save(path_a, NULL, 0, &err), K3_EIO);
    if (!CHECK(strstr(err.text, why))) printf("    %s\n", err.text);
    CHECK_EQ_INT(k3_session_save(at[0], path_a, NULL, 0, NULL, &err), K3_EIO);
    CHECK(strstr(err.text, why));
    CHECK(lstat(temp, &after) == 0 && before.st_ino == after.st_ino &&
          before.st_size == after.st_size);
}

/* A file under the temporary name is taken over only if nobody else can have put it there. */
static void test_save_foreign(void) {
    char temp[96], other[96];
    k3_error err = {{0}};
    snprintf(temp, sizeof temp, "%s.tmp", path_a);
    snprintf(other, sizeof other, "%s/second", work_dir);
    k3_session_reset(at[0]);
    CHECK(goes_on(at[0], 0, 20));
    file_write(temp, "", 0);
    CHECK(chmod(temp, 0666) == 0);
    save_refused(temp, "in the way: its mode 0666 gives rights to others");
    CHECK(chmod(temp, 0640) == 0);
    save_refused(temp, "its mode 0640");
    CHECK(chmod(temp, 0600) == 0 && link(temp, other) == 0);
    save_refused(temp, "it has 2 names");
    CHECK(unlink(other) == 0);
    if (geteuid() == 0) { /* only root can give a file away */
        CHECK(chown(temp, 12345, (gid_t)-1) == 0);
        save_refused(temp, "it belongs to user 12345");
    }
    unlink(temp);
    file_write(other, "", 0);
    CHECK(symlink(other, temp) == 0);
    save_refused(temp, "it is a link");
    unlink(temp);
    CHECK(mkfifo(temp, 0600) == 0);
    save_refused(temp, "no regular file");
    unlink(temp);
    unlink(other);
    file_write(temp, "", 0);
    CHECK(chmod(temp, 0600) == 0); /* empty, ours: its writer is gone */
    CHECK_EQ_INT(k3_session_save(at[0], path_a, NULL, 0, NULL, &err), 0);
    CHECK(!is_there(temp));
}

/* Saving asks for free space first; the message has both sizes. */
static void test_save_room(void) {
    const k3_shape *sh = &way[0]->sh;
    k3_error err = {{0}};
    k3_state_info info;
    char temp[96];
    uint64_t raw = sh->state_bytes + 100 * (sh->pos_bytes + 4);
    snprintf(temp, sizeof temp, "%s.tmp", path_a);
    free_bytes = raw;
    CHECK_EQ_INT(k3_state_can_save(path_a, NULL, 0, &err), 0);
    CHECK_EQ_INT(k3_state_can_save(path_a, sh, 100, &err), K3_EIO);
    CHECK(strstr(err.text, "a state of 100 positions can take 1.2 MiB, and 0.2 MiB are free") ||
          !printf("    %s\n", err.text));
    CHECK(!is_there(temp));
    free_bytes = raw + K3_STATE_APP_MAX + (64 << 10);
    CHECK_EQ_INT(k3_state_can_save(path_a, sh, 100, &err), 0);
    free_bytes = 0;
    k3_session_reset(at[0]);
    CHECK(goes_on(at[0], 0, 100));
    CHECK_EQ_INT(k3_session_save(at[0], path_a, NULL, 0, &info, &err), 0);
    CHECK(info.file_bytes <= raw + K3_STATE_APP_MAX + (64 << 10));
}

/* A file system without locks: the message names that reason; a file made just now is written, one
 * that was there is left alone. */
static void test_no_locks(void) {
    char temp[96];
    k3_error err = {{0}};
    k3_cache_stats st;
    snprintf(temp, sizeof temp, "%s.tmp", path_a);
    k3_session_reset(at[0]);
    CHECK(goes_on(at[0], 0, 20));
    for (int i = 0; i < 2; i++) {
        lock_fails = i ? EOPNOTSUPP : ENOLCK;
        unlink(path_a);
        CHECK_EQ_INT(k3_state_can_save(path_a, NULL, 0, &err), 0);
        CHECK(!is_there(temp));
        CHECK_EQ_INT(k3_session_save(at[0], path_a, NULL, 0, NULL, &err), 0);
        CHECK(!is_there(temp) && is_there(path_a));
        CHECK_EQ_INT(k3_session_load(at[1], path_a, NULL, NULL, NULL, &err), 0);
        file_write(temp, "", 0);
        chmod(temp, 0600);
        save_refused(temp, strerror(lock_fails));
        unlink(temp);
        k3_cache *c = cache_open(way[0], 0);
        CHECK_EQ_INT(k3_cache_store(c, at[0], &err), 0);
        k3_cache_get_stats(c, &st);
        CHECK(st.stored == 1 && st.n_entries == 1);
        k3_cache_close(c);
        lock_fails = 0;
        CHECK_EQ_INT(k3_cache_trim(cache_dir, 0, NULL, &err), 1);
    }
}

/* A cache directory is trusted, so nobody else may be able to write to it. */
static void test_cache_foreign(void) {
    k3_error err = {{0}};
    k3_cache *c = cache_open(way[0], 0);
    k3_session_reset(at[0]);
    CHECK(goes_on(at[0], 0, 20));
    CHECK_EQ_INT(k3_cache_store(c, at[0], &err), 0);
    listing l = cache_list();
    CHECK_EQ_INT(l.n, 1);
    for (int i = 0; i < 2 && l.n == 1; i++) {
        bool is_foreign = i ? geteuid() == 0 && chown(l.path[0], 12345, (gid_t)-1) == 0
                            : chmod(l.path[0], 0666) == 0;
        if (!is_foreign) continue;
        n_notes = 0;
        CHECK(!k3_cache_has(c, ids, 20));
        CHECK_EQ_INT(k3_cache_restore(c, at[1], ids, 30, &err), 0);
        CHECK(n_notes == 1 && strstr(last_note, i ? "belongs to user 12345" : "mode 0666"));
        CHECK_EQ_INT(k3_cache_store(c, at[0], &err), 0); /* this process's entry replaces it */
        CHECK_EQ_INT(k3_cache_restore(c, at[1], ids, 30, &err), 20);
    }
    k3_cache_close(c);
    CHECK(chmod(cache_dir, 0777) == 0);
    CHECK_EQ_INT(k3_cache_open(&c, way[0], cache_dir, 0, &err), K3_EIO);
    CHECK(strstr(err.text, "others may write to it (mode 0777)"));
    CHECK(chmod(cache_dir, 0700) == 0);
    if (geteuid() == 0 && CHECK(chown(cache_dir, 12345, (gid_t)-1) == 0)) {
        CHECK_EQ_INT(k3_cache_open(&c, way[0], cache_dir, 0, &err), K3_EIO);
        CHECK(strstr(err.text, "belongs to user 12345"));
        CHECK(chown(cache_dir, 0, (gid_t)-1) == 0);
    }
    k3_cache_trim(cache_dir, 0, NULL, &err);
}

/* Kill a process that only saves, at any moment: the file is always a whole one, and the next save
 * takes over the half-written one. */
static void test_save_killed(void) {
    k3_engine *e = engine(NULL, 1, 8, 0);
    k3_session *s = session(e, 0);
    k3_error err;
    char temp[96];
    uint64_t seed = 5;
    int n_half = 0;
    snprintf(temp, sizeof temp, "%s.tmp", path_a);
    CHECK(goes_on(s, 0, 100));
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), 0);
    for (int i = 0; i < 40; i++) {
        pid_t child = fork();
        if (child == 0) {
            while (k3_session_save(s, path_a, NULL, 0, NULL, NULL) == 0) continue;
            _exit(1);
        }
        struct timespec a_while = {0, (long)(2000000 + test_random(&seed) % 6000000)};
        nanosleep(&a_while, NULL);
        int status;
        CHECK(child > 0 && kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status)); /* it died by the signal: no save had failed */
        n_half += is_there(temp);
        CHECK_EQ_INT(k3_session_load(at[0], path_a, NULL, NULL, NULL, &err), 0);
        CHECK(is_same(at[0], s));
    }
    CHECK(n_half > 0); /* some died while they wrote */
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), 0);
    CHECK(!is_there(temp));
    k3_session_free(s);
    k3_engine_close(e);
}

/* ---- Snapshots ---- */

static void test_snapshots(void) {
    k3_engine *e = way[0];
    k3_session *s = at[0];
    k3_snapshot *a, *b;
    k3_error err;
    uint64_t used = e->mem.used, limit = e->mem.limit;
    uint32_t other[40];
    for (int i = 0; i < 40; i++) other[i] = (ids[i] + 1) % 1792;
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 70));
    CHECK_EQ_INT(k3_session_snapshot(s, &a, &err), 0);
    CHECK_EQ_INT(e->mem.used - used, e->sh.state_bytes); /* the fixed part, and no more */
    CHECK(goes_on(s, 70, 130));
    CHECK_EQ_INT(k3_session_snapshot(s, &b, &err), 0);
    CHECK_EQ_INT(k3_session_feed(s, other, 40, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_restore(s, b, &err), 0);
    CHECK(goes_on(s, 130, 150));
    CHECK_EQ_INT(k3_session_restore(s, a, &err), 0); /* and on another way from there */
    CHECK_EQ_INT(k3_session_feed(s, other, 40, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_restore(s, b, &err), K3_EUSAGE); /* its latent rows were overwritten */
    CHECK_EQ_INT(k3_session_feed(s, other, 40, K3_ROWS_NONE, NULL, &err), 0);
    CHECK_EQ_INT(k3_session_restore(s, b, &err), K3_EUSAGE); /* long enough, other ids */
    CHECK(strstr(err.text, "not the first of this session's 150"));
    cancel_after = 4;
    CHECK_EQ_INT(k3_session_feed(s, ids, 30, K3_ROWS_NONE, NULL, &err), K3_ECANCEL);
    cancel_after = -1;
    k3_snapshot *none;
    CHECK_EQ_INT(k3_session_snapshot(s, &none, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_session_restore(s, a, &err), 0); /* restoring makes the session whole */
    CHECK(goes_on(s, 70, N_IDS));
    k3_session_reset(s);
    CHECK_EQ_INT(k3_session_restore(s, a, &err), K3_EUSAGE);
    CHECK_EQ_INT(k3_session_restore(at[1], a, &err), K3_EUSAGE);
    k3_snapshot_free(a);
    k3_snapshot_free(b);
    CHECK_EQ_INT(e->mem.used, used);
    e->mem.limit = e->mem.used + e->sh.state_bytes - 1;
    CHECK_EQ_INT(k3_session_snapshot(s, &a, &err), K3_EBUDGET);
    e->mem.limit = limit;
    k3_snapshot_free(NULL);
}

/* The plan counts ids and snapshots: with the budget of its floor all that it promised fits. */
static void test_plan(void) {
    k3_options o;
    k3_engine *e;
    k3_error err = {{0}};
    k3_options_default(&o);
    o.model_dir = demo_dir;
    o.n_threads = 1;
    o.chunk = 1;
    o.context = 300;
    o.headers_only = true;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0);
    uint64_t floor = e->plan.floor_bytes, state = e->sh.state_bytes;
    CHECK(e->plan.session_bytes >= state + 300 * (e->sh.pos_bytes + 4));
    k3_engine_close(e);
    o.snapshots = 2;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0);
    CHECK_EQ_INT(e->plan.floor_bytes, floor + 2 * state);
    o.ram_bytes = e->plan.floor_bytes;
    k3_engine_close(e);
    o.headers_only = false;
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0);
    k3_session *s = session(e, 0);
    k3_snapshot *a, *b;
    CHECK(goes_on(s, 0, 10));
    CHECK_EQ_INT(k3_session_snapshot(s, &a, &err), 0);
    CHECK(goes_on(s, 10, 20));
    CHECK_EQ_INT(k3_session_snapshot(s, &b, &err), 0);
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), 0); /* saving works at the floor */
    CHECK_EQ_INT(k3_session_load(s, path_a, NULL, NULL, NULL, &err), 0);
    CHECK(e->mem.used <= e->mem.limit && goes_on(s, 20, 40));
    CHECK_EQ_INT(k3_session_restore(s, a, &err), 0);
    CHECK(goes_on(s, 10, 15));
    k3_snapshot_free(a);
    k3_snapshot_free(b);
    k3_session_free(s);
    k3_engine_close(e);
}

/* ---- The cache ---- */

/* Entries at 20, 40 .. 180; every length finds the longest not above it, and goes on from there. */
static void test_cache_prefix(void) {
    k3_cache *c = cache_open(way[0], 0), *d = cache_open(way[n_ways - 1], 0);
    k3_session *s = session(way[0], 0), *to = at[n_ways - 1];
    k3_error err;
    k3_cache_stats st;
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, N_IDS, &err), 0);
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0); /* empty: nothing to keep */
    for (size_t k = 20; k < N_IDS; k += 20) {
        CHECK(goes_on(s, k - 20, k));
        CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
        CHECK_EQ_INT(k3_cache_store(d, s, &err), 0); /* there already */
    }
    for (size_t n = 0; n <= N_IDS; n += is_quick ? 19 : 1) {
        size_t want = n < 20 ? 0 : n == N_IDS ? 180 : n / 20 * 20;
        CHECK_EQ_INT(k3_cache_restore(d, to, ids, n, &err), want);
        CHECK(goes_on(to, want, n % 50 == 19 && !is_quick ? n : want));
    }
    /* Ids that differ from 117 on: entries past that must not be found. */
    uint32_t other[N_IDS];
    memcpy(other, ids, sizeof ids);
    other[117] ^= 1;
    CHECK_EQ_INT(k3_cache_restore(d, to, other, N_IDS, &err), 100);
    other[117] ^= 1;
    other[0] ^= 1;
    CHECK_EQ_INT(k3_cache_restore(d, to, other, N_IDS, &err), 0);
    CHECK_EQ_INT(k3_session_pos(to), 0);
    k3_session *small = session(way[0], 70); /* entries longer than its context are passed over */
    CHECK_EQ_INT(k3_cache_restore(c, small, ids, N_IDS, &err), 60);
    k3_session_free(small);
    k3_cache_get_stats(c, &st);
    CHECK(st.n_entries == 9 && st.stored == 9 && st.hits == 1 && st.misses == 1 &&
          st.restored_pos == 60 && st.evicted == 0);
    k3_cache_get_stats(d, &st);
    CHECK(st.stored == 0 && st.misses > 1 && st.hits > 5);
    /* An engine with another constant finds nothing here. */
    k3_engine *eps = engine(NULL, 1, 8, 1e-5f);
    k3_session *stranger = session(eps, 0);
    k3_cache *x = cache_open(eps, 0);
    CHECK_EQ_INT(k3_cache_restore(x, stranger, ids, N_IDS, &err), 0);
    k3_cache_close(x);
    k3_session_free(stranger);
    k3_engine_close(eps);
    k3_session_free(s);
    k3_cache_close(c);
    k3_cache_close(d);
}

/* A damaged entry: a note, a shorter entry is used, and the damaged one is removed. */
static void test_cache_damage(void) {
    k3_cache *c = cache_open(way[0], 0);
    k3_error err;
    size_t n;
    listing l = cache_list();
    CHECK_EQ_INT(l.n, 9);
    for (int i = 0; i < l.n; i++) {
        if (l.n_pos[i] != 180 && l.n_pos[i] != 160) continue;
        uint8_t *f = file_read(l.path[i], &n);
        f[n - 9] ^= 4;
        file_write(l.path[i], f, l.n_pos[i] == 160 ? n / 2 : n);
        free(f);
    }
    n_notes = 0;
    CHECK_EQ_INT(k3_cache_restore(c, at[0], ids, N_IDS, &err), 140);
    CHECK_EQ_INT(n_notes, 2);
    CHECK(strstr(last_note, "the cache entry was removed"));
    CHECK(goes_on(at[0], 140, N_IDS));
    CHECK_EQ_INT(cache_list().n, 7);
    /* The name of one entry on the bytes of another. */
    l = cache_list();
    char *to = NULL, *from = NULL;
    for (int i = 0; i < l.n; i++) {
        if (l.n_pos[i] == 140) to = l.path[i];
        if (l.n_pos[i] == 120) from = l.path[i];
    }
    uint8_t *f = to && from ? file_read(from, &n) : NULL;
    if (CHECK(f != NULL)) file_write(to, f, n);
    free(f);
    CHECK_EQ_INT(k3_cache_restore(c, at[0], ids, N_IDS, &err), 120);
    CHECK(goes_on(at[0], 120, N_IDS));
    /* Files that are no entries stay, whatever they are called. */
    char strange[128], left[128];
    snprintf(strange, sizeof strange, "%s/notes.k3s", cache_dir);
    file_write(strange, "mine", 4);
    snprintf(left, sizeof left, "%s/77-00000000000000000000000000000001.k3s.tmp", cache_dir);
    file_write(left, "half", 4);
    k3_cache_close(c);
    int fd = open(left, O_RDWR);
    CHECK(flock(fd, LOCK_EX) == 0);
    k3_cache_close(cache_open(way[0], 0));
    CHECK(is_there(left)); /* its writer still runs */
    close(fd);
    k3_cache_close(cache_open(way[0], 0));
    CHECK(!is_there(left) && is_there(strange));
    uint64_t bytes;
    CHECK_EQ_INT(k3_cache_trim(cache_dir, 0, &bytes, &err), 6);
    CHECK(bytes > 0 && cache_list().n == 0 && is_there(strange));
}

/* The least recently used go first; use is a restore or a second store. */
static void test_cache_size(void) {
    k3_cache *c = cache_open(way[0], 0);
    k3_session *s = session(way[0], 0);
    k3_error err;
    k3_cache_stats st;
    struct timespec pause = {0, 12000000}; /* file times move in steps of the system's tick */
    for (size_t k = 10; k <= 50; k += 10) {
        CHECK(goes_on(s, k - 10, k));
        CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
        nanosleep(&pause, NULL);
    }
    CHECK_EQ_INT(k3_cache_restore(c, at[0], ids, 10, &err), 10); /* the oldest, used again */
    k3_cache_get_stats(c, &st);
    CHECK_EQ_INT(st.n_entries, 5);
    k3_cache_close(c);
    nanosleep(&pause, NULL);
    c = cache_open(way[0], st.bytes * 2 / 3); /* three of five */
    listing l = cache_list();
    CHECK_EQ_INT(l.n, 3);
    CHECK(l.n_pos[0] == 10 && l.n_pos[1] == 50 && l.n_pos[2] == 40);
    CHECK(goes_on(s, 50, 60));
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    l = cache_list();
    CHECK(l.n == 3 && l.n_pos[0] == 60 && l.n_pos[1] == 10 && l.n_pos[2] == 50);
    k3_cache_get_stats(c, &st);
    CHECK(st.evicted == 3 && st.stored == 1);
    k3_cache_close(c);
    c = cache_open(way[0], 60000); /* room for none */
    CHECK_EQ_INT(cache_list().n, 0);
    n_notes = 0;
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK(n_notes == 1 && strstr(last_note, "more than the whole cache may hold"));
    CHECK_EQ_INT(cache_list().n, 0);
    k3_cache_close(c);
    /* The directory is removed under a run: nothing is found, nothing breaks. */
    char command[256];
    c = cache_open(way[0], 0);
    snprintf(command, sizeof command, "rm -rf '%s'", cache_dir);
    CHECK(system(command) == 0);
    CHECK_EQ_INT(k3_cache_restore(c, at[0], ids, N_IDS, &err), 0);
    CHECK_EQ_INT(k3_cache_store(c, s, &err), K3_EIO);
    CHECK(goes_on(at[0], 0, 20) && goes_on(s, 60, 80));
    k3_cache_close(c);
    CHECK_EQ_INT(k3_cache_open(&c, way[0], path_a, 0, &err), K3_EIO);
    CHECK(strstr(err.text, "not a directory"));
    CHECK_EQ_INT(k3_cache_open(&c, way[0], "/nowhere/x", 0, &err), K3_EIO);
    k3_session_free(s);
}

/* ---- Speed at true dimensions ---- */

/* An engine with geometry and budget but no weights. */
static k3_engine *engine_hollow(const char *config_dir, uint64_t context) {
    k3_engine *e = calloc(1, sizeof *e);
    k3_error err;
    if (!e || shape_read(&e->sh, config_dir, 1e-6f, &err) < 0) return NULL;
    pthread_mutex_init(&e->step, NULL);
    pthread_mutex_init(&e->accounts, NULL);
    e->mem = (ledger){.limit = 64ull << 30, .lock = &e->accounts};
    e->n_threads = engine_threads(0);
    e->chunk = 64;
    e->plan.chunk = e->plan.part = 64;
    e->plan.context = context;
    e->print.sampled = 1;
    return scratch_open(e, &err) < 0 ? NULL : e;
}

/* Fill a session with values like a state's: normal, with a scale that differs from row to row. */
static void session_fill(k3_session *s, uint64_t n_pos) {
    uint64_t seed = 11;
    static float noise[1 << 16];
    for (size_t i = 0; i < sizeof noise / sizeof *noise; i++) {
        double u = ((double)(test_random(&seed) >> 11) + 0.5) * 0x1p-53,
               v = (double)(test_random(&seed) >> 11) * 0x1p-53;
        noise[i] = (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    }
    for (uint32_t il = 0; il < s->e->sh.n_layers; il++) {
        k3_state_array a;
        k3_state_layer(s, il, n_pos, &a);
        float *p = a.p;
        for (uint64_t i = 0; i < a.n_bytes / 4; i += 128) {
            float scale = expf(noise[test_random(&seed) & 65535]) * 0.02f;
            const float *from = noise + (test_random(&seed) & 65535 & ~127ull);
            for (uint64_t j = i; j < i + 128 && j < a.n_bytes / 4; j++)
                p[j] = from[j - i] * scale * (1 + 0x1p-20f * (float)(i & 4095));
        }
    }
    for (uint64_t i = 0; i < n_pos; i++) s->ids[i] = (uint32_t)(test_random(&seed) % 160000);
    s->pos = n_pos;
}

static int speed(const char *config_dir, const char *dir) {
    const uint64_t lengths[] = {64, 4096};
    k3_engine *e = engine_hollow(config_dir, 4200);
    char path[4096];
    snprintf(path, sizeof path, "%s/speed.k3s", dir);
    if (!e) return 1;
    k3_session *s = session(e, 0), *t = session(e, 0);
    for (int i = 0; i < 2; i++) {
        k3_session_reset(s);
        session_fill(s, lengths[i]);
        for (int r = 0; r < 3; r++) {
            k3_state_info in, out;
            k3_error err = {{0}};
            if (k3_session_save(s, path, NULL, 0, &out, &err) < 0 ||
                k3_session_load(t, path, NULL, NULL, &in, &err) < 0) {
                printf("%s\n", err.text);
                return 1;
            }
            if (!is_same(s, t)) return 1;
            printf("%llu positions: %.1f MB in memory, %.1f MB on disk (%.3f); save %.3f s, %.2f "
                   "GB/s; load %.3f s, %.2f GB/s; %d threads\n",
                   (unsigned long long)lengths[i], (double)out.raw_bytes * 1e-6,
                   (double)out.file_bytes * 1e-6,
                   (double)out.file_bytes / (double)out.raw_bytes, out.seconds,
                   (double)out.raw_bytes * 1e-9 / out.seconds, in.seconds,
                   (double)in.raw_bytes * 1e-9 / in.seconds, e->n_threads);
        }
    }
    unlink(path);
    return 0;
}

/* ---- Sums of far boxes that nobody compared: no box answers here, so the test sets the mark
 * itself ---- */

static bool fails_as_lied(k3_session *s) {
    k3_error err = {{0}};
    return k3_session_feed(s, ids + s->pos, 1, K3_ROWS_NONE, NULL, &err) == K3_ECHECK &&
           strstr(err.text, "gives wrong expert sums");
}

/* A caught lie ends unverified sessions and no others; snapshots keep the mark. */
static void test_unverified_snapshots(void) {
    k3_session *s = at[0];
    k3_snapshot *a, *b;
    k3_error err;
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 70));
    CHECK_EQ_INT(k3_session_snapshot(s, &a, &err), 0);
    CHECK(goes_on(s, 70, 90));
    s->is_unverified = true;
    CHECK(goes_on(s, 90, 95));
    CHECK_EQ_INT(k3_session_snapshot(s, &b, &err), 0);
    way[0]->stats.far_lies = 1;
    CHECK(fails_as_lied(s));
    CHECK_EQ_INT(k3_session_restore(s, b, &err), 0);
    CHECK(fails_as_lied(s));
    CHECK_EQ_INT(k3_session_restore(s, a, &err), 0); /* its latent rows may have been overwritten */
    CHECK(fails_as_lied(s));
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 100));
    CHECK_EQ_INT(k3_session_restore(s, b, &err), 0);
    CHECK(fails_as_lied(s));
    k3_session_reset(s);
    CHECK(goes_on(s, 0, N_IDS));
    k3_snapshot_free(a);
    k3_snapshot_free(b);
    way[0]->stats.far_lies = 0;
}

/* The mark is saved and loaded with the state; with audits such a file is not written. */
static void test_unverified_saved(void) {
    k3_session *s = at[0];
    k3_error err;
    k3_state_head h;
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 70));
    s->is_unverified = true;
    CHECK_EQ_INT(k3_session_save(s, path_a, NULL, 0, NULL, &err), 0);
    CHECK_EQ_INT(k3_state_check(path_a, true, &h, &err), 0);
    CHECK(h.is_unverified);
    k3_session_reset(s);
    CHECK(!s->is_unverified);
    CHECK_EQ_INT(k3_session_load(s, path_a, NULL, NULL, NULL, &err), 0);
    CHECK(s->is_unverified);
    CHECK(goes_on(s, 70, 80));
    way[0]->stats.far_lies = 1;
    CHECK(fails_as_lied(s));
    way[0]->stats.far_lies = 0;
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 70));
    s->is_unverified = true;
    way[0]->opt.tier_audit = 4;
    CHECK_EQ_INT(k3_session_save(s, path_b, NULL, 0, NULL, &err), K3_ECHECK);
    CHECK(strstr(err.text, "nobody compared"));
    way[0]->opt.tier_audit = 0;
}

/* An engine with audits takes no unverified entry from the cache, and a verified state replaces
 * one. */
static void test_unverified_cached(void) {
    k3_cache *c = cache_open(way[0], 0);
    k3_session *s = at[0];
    k3_error err;
    k3_state_head h;
    k3_cache_trim(cache_dir, 0, NULL, &err);
    k3_session_reset(s);
    CHECK(goes_on(s, 0, 70));
    s->is_unverified = true;
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0);
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 80, &err), 70);
    CHECK(s->is_unverified);
    way[0]->opt.tier_audit = 1;
    n_notes = 0;
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 80, &err), 0);
    CHECK(n_notes == 1 && strstr(last_note, "nobody compared; the cache entry was not used"));
    CHECK(goes_on(s, 0, 70));
    s->is_unverified = true;
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0); /* not with audits: the old entry stays */
    k3_session_reset(s);
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 80, &err), 0);
    CHECK(goes_on(s, 0, 70));
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0); /* verified: replaces the entry */
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 80, &err), 70);
    CHECK(!s->is_unverified);
    listing l = cache_list();
    CHECK_EQ_INT(l.n, 1);
    CHECK_EQ_INT(k3_state_check(l.path[0], true, &h, &err), 0);
    CHECK(!h.is_unverified);
    way[0]->opt.tier_audit = 0;
    s->is_unverified = true;
    CHECK_EQ_INT(k3_cache_store(c, s, &err), 0); /* the verified one stays */
    CHECK_EQ_INT(k3_cache_restore(c, s, ids, 80, &err), 70);
    CHECK(!s->is_unverified);
    k3_cache_close(c);
}

int main(int argc, char **argv) {
    char command[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 4 && strcmp(argv[1], "--speed") == 0) return speed(argv[2], argv[3]);
    test_begin("state");
    demo_dir = argc > 1 ? argv[1] : "demo";
    data_dir = argc > 2 ? argv[2] : "tests/data";
    is_quick = argc > 3 && strcmp(argv[3], "--quick") == 0;
    snprintf(work_dir, sizeof work_dir, "%s/k3-state-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(work_dir)) return 1;
    snprintf(path_a, sizeof path_a, "%s/a.k3s", work_dir);
    snprintf(path_b, sizeof path_b, "%s/b.k3s", work_dir);
    snprintf(cache_dir, sizeof cache_dir, "%s/cache", work_dir);
    ways_open();
    run_whole();
    test_golden();
    test_splits();
    test_chain();
    test_format();
    test_old_file();
    test_refusals();
    test_fingerprint();
    test_prints_by_sums();
    test_repaired();
    test_touched();
    test_save_errors();
    test_save_foreign();
    test_save_room();
    test_no_locks();
    test_cache_foreign();
    test_save_killed();
    test_snapshots();
    test_plan();
    test_cache_prefix();
    test_cache_damage();
    test_cache_size();
    test_unverified_snapshots();
    test_unverified_saved();
    test_unverified_cached();
    for (int i = 0; i < n_ways; i++) {
        k3_session_free(at[i]);
        k3_engine_close(way[i]);
    }
    free(rows);
    snprintf(command, sizeof command, "rm -rf '%s'", work_dir);
    CHECK(system(command) == 0);
    return test_finish();
}
