/* fuzz_state.c - a state file, for libFuzzer or a replay of tests/corpus/state.
 *
 * The input is the file, behind one byte: when its lowest bit is set, the checksums of header and
 * sections are made right first, as far as there are any, so that what lies behind them is
 * reached. The session is that of an engine of two small layers with no weights (the seeds are its
 * own states). Whatever comes, loading and checking end in a status with one line that says why,
 * or in a session of exactly the positions and ids of the file. Includes k3.c; link k3_state.c.
 */
#include "../k3.c"
#include "fuzz.h"

#define HEAD_BYTES 256

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static k3_engine *e;
static k3_session *s;
static int fd;
static char path[64];

/* Make an engine of one KDA layer with 2 heads of 4, and one MLA layer with rows of 32. */
static void setup(void) {
    k3_error err = {""};
    e = calloc(1, sizeof *e);
    must(e != NULL, "memory");
    k3_shape *sh = &e->sh;
    sh->vocab_size = 100;
    sh->n_layers = 2;
    sh->is_mla[1] = 1;
    sh->kda_heads = 2;
    sh->kda_dim = 4;
    sh->conv_width = 4;
    sh->kv_lora = 24;
    sh->rope_dim = 8;
    sh->block_size = 1;
    sh->max_position = 64;
    sh->eps_lora = 1e-6f;
    shape_sizes(sh);
    pthread_mutex_init(&e->step, NULL);
    pthread_mutex_init(&e->accounts, NULL);
    e->mem = (ledger){.limit = 64u << 20, .lock = &e->accounts};
    e->n_threads = e->chunk = 1;
    e->plan.chunk = e->plan.part = 1;
    e->plan.context = 16;
    e->print.sampled = 0x1234;
    must(scratch_open(e, &err) == 0 && k3_session_new(&s, e, 0, &err) == 0, "setup");
    fd = memfd_create("state", 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    must(fd >= 0, "memfd_create");
}

static uint32_t u32_at(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Make the checksums of header and table right, and of every piece that lies inside of the file. */
static void repair(uint8_t *f, size_t n) {
    if (n < HEAD_BYTES) return;
    uint64_t sum, all = n;
    size_t n_table = u32_at(f + 8) == 2 ? (size_t)u32_at(f + 152) * 64 : 0;
    memcpy(f + 80, &all, sizeof all);
    if (n_table > n - HEAD_BYTES) n_table = 0;
    if (n_table) {
        sum = XXH3_64bits(f + HEAD_BYTES, n_table);
        memcpy(f + 240, &sum, sizeof sum);
    }
    sum = XXH3_64bits(f, 248);
    memcpy(f + 248, &sum, sizeof sum);
    for (size_t at = HEAD_BYTES + n_table; n - at >= 48;) {
        uint64_t stored = 0;
        for (int b = 0; b < 4; b++) stored += u32_at(f + at + 20 + 4 * b);
        if (stored > n - at - 48) return;
        sum = XXH3_64bits_withSeed(f + at + 48, (size_t)stored, XXH3_64bits(f + at, 40));
        memcpy(f + at + 40, &sum, sizeof sum);
        at += 48 + (size_t)stored;
    }
}

/* Has the file sections that loading skips? Only checking looks at their bytes. */
static bool has_strangers(const uint8_t *f, size_t n) {
    static const uint8_t known[3][16] = {"ids", "app", "layers"};
    bool is_any = false;
    if (n < HEAD_BYTES || u32_at(f + 8) != 2) return false;
    for (size_t i = 0; i < u32_at(f + 152) && HEAD_BYTES + 64 * (i + 1) <= n; i++) {
        const uint8_t *x = f + HEAD_BYTES + 64 * i;
        bool is_known = false;
        for (int k = 0; k < 3; k++) is_known = is_known || memcmp(x, known[k], 16) == 0;
        is_any = is_any || !is_known || u32_at(x + 48) || u32_at(x + 52);
    }
    return is_any;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    k3_error err = {""}, why = {""};
    k3_state_head h;
    void *app = NULL;
    size_t n_app = 0, n;
    if (!s) setup();
    if (size == 0 || size > (1u << 20)) return 0;
    uint8_t *f = malloc(size);
    must(f != NULL, "memory");
    memcpy(f, data + 1, size - 1);
    if (data[0] & 1) repair(f, size - 1);
    must(ftruncate(fd, 0) == 0 && pwrite(fd, f, size - 1, 0) == (ssize_t)size - 1, "pwrite");
    bool is_strange = has_strangers(f, size - 1);
    free(f);
    int rc = k3_session_load(s, path, &app, &n_app, NULL, &err);
    int checked = k3_state_check(path, true, &h, &why);
    const uint32_t *ids = k3_session_ids(s, &n);
    if (rc < 0) {
        must(rc == K3_ECHECK || rc == K3_EFULL, "a refusal of another kind");
        must_be_line(err.text);
        k3_state_array a;
        k3_state_layer(s, 0, 0, &a);
        for (uint64_t i = 0; i < a.n_bytes; i++) must(!((uint8_t *)a.p)[i], "half a layer");
        must(n == 0 && !app && n_app == 0, "half a state");
    } else {
        must((checked == 0 || is_strange) && n == h.n_pos && n_app == h.n_app && n > 0 && n <= 16,
             "not what it says");
        for (size_t i = 0; i < n; i++) must(ids[i] < 100, "an id outside the vocabulary");
        must((app != NULL) == (n_app > 0), "app");
    }
    if (checked < 0) {
        must(checked == K3_ECHECK, "a refusal of another kind");
        must_be_line(why.text);
    }
    free(app);
    return 0;
}
