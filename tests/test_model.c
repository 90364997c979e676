/* test_model.c - model files: the table against the release, and every refusal.
 *
 * Someone else's data: the released config.json and index (tests/data). The engine's table of
 * expected tensors must be the index's text tensors, name for name and byte for byte; a set of
 * 96 headers at that geometry (sparse files, no weights) must open within 60 MiB and 5 s.
 * Refusals: copies of demo/ with one thing wrong each; the status, one line that names the
 * place, no descriptor left open. Run from the top of the source tree. By hand:
 *
 *     test_model --make-headers DIR     write the 96 sparse shards and their config into DIR
 *     test_model --open DIR             open DIR headers_only; print time and memory
 *
 * Includes k3.c, to reach its statics, to make its allocations fail and its fault lie; link the
 * kernel sets but not k3.c.
 */
#include "test.h"

#include <errno.h>
#include <json-c/json.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static long alloc_left = -1; /* allocations until one fails; -1: never */

static bool alloc_fails(void) { return alloc_left >= 0 && alloc_left-- == 0; }

/* The disk: honest, a few bytes at a time, interrupted; or failing from read number `disk_left` on. */
static enum { DISK_OK, DISK_SHORT, DISK_EINTR, DISK_EIO, DISK_END } fault = DISK_OK;
static long disk_left;

static ssize_t disk_read(int fd, void *to, size_t n, off_t at) {
    static unsigned turn;
    if (fault == DISK_SHORT) n = n > 1000 ? n / 2 : n > 3 ? 3 : n;
    if (fault == DISK_EINTR && ++turn % 2) return errno = EINTR, -1;
    if (fault >= DISK_EIO && disk_left-- <= 0) return fault == DISK_END ? 0 : (errno = EIO, -1);
    return pread(fd, to, n, at);
}

#define malloc(n)              (alloc_fails() ? NULL : malloc(n))
#define calloc(k, n)           (alloc_fails() ? NULL : calloc(k, n))
#define realloc(p, n)          (alloc_fails() ? NULL : realloc(p, n))
#define strdup(s)              (alloc_fails() ? NULL : strdup(s))
#define RESUME_NS 0 /* 0: write down how far verify came after every stretch */
#define pread(fd, to, n, at)   disk_read(fd, to, n, at)
#include "../k3.c"
#include "../k3_sums.c"

#include "../k3_disk.c"

#include "../k3_model.c"
#undef malloc
#undef calloc
#undef realloc
#undef strdup
#undef pread

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define HAS_SANITIZER 1
#endif
#endif
#ifndef HAS_SANITIZER
#define HAS_SANITIZER 0
#endif

#define INDEX "model.safetensors.index.json"
#define ZST   "tests/data/" INDEX ".zst"

static k3_error err;

static void must(bool ok, const char *what) {
    if (ok) return;
    printf("test_model: cannot go on: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* A whole file, malloc'd, a zero behind it. NULL when it cannot be read. */
static char *file_read(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    struct stat st;
    if (!f) return NULL;
    char *text = fstat(fileno(f), &st) == 0 ? malloc((size_t)st.st_size + 1) : NULL;
    *n = text ? fread(text, 1, (size_t)st.st_size, f) : 0;
    if (text) text[*n] = 0;
    fclose(f);
    return text;
}

/* ---- The released geometry --------------------------------------------------------- */

static k3_shape real;

static void test_real_shape(void) {
    size_t n;
    char *text = file_read("tests/data/k3_config.json", &n);
    must(text != NULL, "tests/data/k3_config.json");
    json_object *top = json_parse(text, n, 32, "config.json", &err);
    if (!CHECK_EQ_INT(shape_from_json(&real, top, 1e-6f, &err), 0)) printf("    %s\n", err.text);
    json_object_put(top);
    free(text);
    const uint32_t want[][2] = {
        {real.vocab_size, 163840}, {real.hidden, 7168},       {real.n_layers, 93},
        {real.n_heads, 96},        {real.q_lora, 1536},       {real.kv_lora, 512},
        {real.nope_dim, 128},      {real.rope_dim, 64},       {real.v_dim, 128},
        {real.kda_heads, 96},      {real.kda_dim, 128},       {real.conv_width, 4},
        {real.block_size, 12},     {real.dense_inter, 33792}, {real.n_dense, 1},
        {real.n_experts, 896},     {real.top_k, 16},          {real.n_shared, 2},
        {real.latent, 3584},       {real.expert_inter, 3072}, {real.shared_inter, 6144},
        {real.max_position, 1048576}, {real.eos_id, 163586},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_EQ_INT(want[i][0], want[i][1]);
    CHECK(real.rms_eps == 1e-5f && real.eps_lora == 1e-6f && real.gate_lower_bound == -5.0f);
    CHECK(real.situ_beta == 4.0f && real.situ_linear_beta == 25.0f && real.routed_scale == 1.0f);
    int n_mla = 0;
    for (uint32_t il = 0; il < 93; il++) {
        n_mla += real.is_mla[il];
        CHECK_EQ_INT(real.is_mla[il], il % 4 == 3 || il == 92);
    }
    CHECK_EQ_INT(n_mla, 24);
}

/* Bytes of all tensors of one kind of layer. */
static uint64_t part_bytes(enum part part) {
    uint64_t dims[N_DIMS], sum = 0;
    shape_dims(&real, dims);
    for (int t = 0; t < N_TENSORS; t++)
        if (TENSOR[t].part == part) sum += tensor_bytes(dims, (enum tensor)t);
    return sum;
}

#define EXPERTS_BYTES 1446456066048
#define TRUNK_BYTES   113509540864
#define TOTAL_BYTES   1560860324864 /* metadata.total_size of the index */

/* K3-SPEC 2.1. A_log is stored padded, 128 entries for 96 heads. */
static void test_real_bytes(void) {
    uint64_t dims[N_DIMS], padding = (128 - 96) * sizeof(float);
    shape_dims(&real, dims);
    CHECK_EQ_INT(real.expert_bytes, 17547264);
    CHECK_EQ_INT(92 * 896 * real.expert_bytes, EXPERTS_BYTES);
    CHECK_EQ_INT(real.trunk_bytes + 69 * padding, TRUNK_BYTES);
    CHECK_EQ_INT(tensor_bytes(dims, T_EMBED), 2348810240);
    CHECK_EQ_INT(tensor_bytes(dims, T_LM_HEAD), 2348810240);
    CHECK_EQ_INT(part_bytes(IN_KDA) + padding, 887800832);
    CHECK_EQ_INT(part_bytes(IN_MLA), 464392192);
    CHECK_EQ_INT(part_bytes(IN_MOE), 379857408);
    CHECK_EQ_INT(part_bytes(IN_DENSE), 1453326336);
    CHECK_EQ_INT(part_bytes(IN_LAYER), 86016);
    CHECK_EQ_INT(real.pos_bytes, 24 * 576 * 4);
    CHECK_EQ_INT(real.state_bytes, 69 * (96 * 128 * 128 + 9 * 12288) * 4);
    /* What is left of total_size is vision: shards 95 and 96 less their headers. */
    int64_t vision = TOTAL_BYTES - EXPERTS_BYTES - TRUNK_BYTES;
    int64_t headers = 92289328 + 802448352 - vision;
    CHECK(headers > 168 * 80 && headers < 168 * 160);
}

/* ---- The released index ------------------------------------------------------------- */

static int count_visit(void *user, const name_id *id) {
    (void)id;
    ++*(uint64_t *)user;
    return 0;
}

/* An empty table for `real`. */
static void table_new(model *m, ledger *mem) {
    static k3_options o;
    memset(m, 0, sizeof *m);
    m->opt = &o;
    m->mem = mem;
    m->dir = "the index";
    m->at_bytes = real.n_layers * sizeof *m->at;
    m->experts_bytes = (uint64_t)(real.n_layers - real.n_dense) * real.n_experts * sizeof *m->experts;
    m->at = ledger_take(mem, m->at_bytes, "table", &err);
    m->experts = ledger_take(mem, m->experts_bytes, "table", &err);
    must(m->at && m->experts, "table");
    memset(m->at_model, 0xff, sizeof m->at_model);
    memset(m->at, 0xff, m->at_bytes);
    memset(m->experts, 0xff, m->experts_bytes);
}

/* K3-SPEC 2.1: the shard of a text tensor. */
static unsigned real_shard(const name_id *id) {
    return id->expert_tensor < 0 && TENSOR[id->tensor].part == IN_MODEL ? 94 : id->il + 1;
}

/* One line `    "name": "shard",` of the index goes into the table. */
static void index_line(model *m, const char *line, uint64_t *n_text, uint64_t *n_vision) {
    char name[256], file[64], again[256], where[64];
    name_id id;
    if (sscanf(line, " \"%255[^\"]\": \"%63[^\"]\"", name, file) != 2) return;
    if (is_vision(name)) {
        ++*n_vision;
        CHECK(strcmp(file, "model-00095-of-000096.safetensors") == 0 ||
              strcmp(file, "model-00096-of-000096.safetensors") == 0);
        return;
    }
    ++*n_text;
    if (!test_count(name_parse(&real, name, &id), __FILE__, __LINE__, name)) return;
    name_write(&id, again, sizeof again);
    if (strcmp(again, name) != 0) CHECK_EQ_STR(again, name);
    snprintf(where, sizeof where, "model-%05u-of-000096.safetensors", real_shard(&id));
    if (strcmp(where, file) != 0) CHECK_EQ_STR(where, file);
    if (model_put(m, &real, &id, 0, 0, name, &err) < 0) CHECK_EQ_STR(err.text, ""); /* a name that is there twice */
}

/* Every name of the index is expected (name_parse), comes once (model_put) and is written the same
 * way (name_write); and every expected name is in the index (model_complete). */
static void test_real_index(void) {
    FILE *f = access(ZST, R_OK) == 0 ? popen("zstd -dcq " ZST " 2>/dev/null", "r") : NULL;
    char line[512];
    unsigned long long total = 0;
    uint64_t n_text = 0, n_vision = 0, n_expected = 0;
    ledger mem = {.limit = 1u << 30};
    shard none = {.name = (char *)"the index", .fd = {-1}};
    model m;
    table_new(&m, &mem);
    m.shards = &none;
    while (f && fgets(line, sizeof line, f))
        if (total || sscanf(line, " \"total_size\": %llu", &total) != 1)
            index_line(&m, line, &n_text, &n_vision);
    if (f && pclose(f) != 0 && n_text == 0) f = NULL;
    if (!f) {
        SKIP("the released index: zstd or " ZST " is not here");
    } else {
        model_expect(&real, count_visit, &n_expected);
        CHECK_EQ_INT(total, TOTAL_BYTES);
        CHECK_EQ_INT(n_vision, 168);
        CHECK_EQ_INT(n_text, n_expected);
        CHECK_EQ_INT(n_text + n_vision, 497220);
        if (!CHECK_EQ_INT(model_complete(&m, &real, &err), 0)) printf("    %s\n", err.text);
    }
    m.shards = NULL;
    model_close(&m);
    CHECK_EQ_INT(mem.used, 0);
}

/* ---- 96 headers at the released geometry --------------------------------------------- */

typedef struct {
    FILE *f; /* header text */
    uint64_t at;
    unsigned i_shard;
} header_writer;

static void header_tensor(header_writer *w, const char *name, const char *dtype, const uint64_t *dims,
                          int n_dims, uint64_t bytes) {
    char shape[128];
    shape_text(dims, n_dims, shape, sizeof shape);
    fprintf(w->f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
            name, dtype, shape, w->at, w->at + bytes);
    w->at += bytes;
}

static void header_known(header_writer *w, const name_id *id) {
    char name[256];
    uint64_t dims[3], all[N_DIMS];
    name_write(id, name, sizeof name);
    if (id->expert_tensor >= 0) {
        expert_dims(&real, id->expert_tensor, &dims[0], &dims[1]);
        header_tensor(w, name, "U8", dims, 2, dims[0] * dims[1]);
        return;
    }
    const tensor_def *d = &TENSOR[id->tensor];
    shape_dims(&real, all);
    all[D_KDA_HEADS] = id->tensor == T_A_LOG ? 128 : all[D_KDA_HEADS];
    for (int i = 0; i < d->n_dims; i++) dims[i] = all[d->dims[i]];
    header_tensor(w, name, DTYPE_NAME[d->dtype], dims, d->n_dims, tensor_bytes(all, id->tensor));
}

/* The experts of a layer in shuffled order, the tensors of each back to back. */
static void header_experts(header_writer *w, uint32_t il) {
    static const int order[N_EXPERT_TENSORS] = {W1_PACKED, W1_SCALE, W2_PACKED,
                                                W2_SCALE,  W3_PACKED, W3_SCALE};
    uint32_t ids[896];
    uint64_t seed = il;
    for (uint32_t i = 0; i < 896; i++) {
        uint32_t j = (uint32_t)(test_random(&seed) % (i + 1));
        ids[i] = ids[j];
        ids[j] = i;
    }
    for (uint32_t i = 0; i < 896; i++)
        for (int k = 0; k < N_EXPERT_TENSORS; k++) {
            name_id id = {0, order[k], il, ids[i]};
            header_known(w, &id);
        }
}

static void header_vision(header_writer *w, unsigned n, const char *name, uint64_t bytes) {
    for (unsigned i = 0; i < n; i++) {
        char full[128];
        uint64_t part = (i < n - 1 ? bytes / n : bytes - w->at) / 2;
        snprintf(full, sizeof full, "%s.%u.weight", name, i);
        header_tensor(w, full, "BF16", &part, 1, 2 * part);
    }
}

static void header_all(header_writer *w) {
    name_id id = {0, -1, w->i_shard - 1, 0};
    bool is_layer = w->i_shard <= real.n_layers;
    int first = is_layer ? N_MODEL_TENSORS : 0, last = is_layer ? N_TENSORS : N_MODEL_TENSORS;
    if (w->i_shard == 95) header_vision(w, 3, "mm_projector.proj", 92288000);
    if (w->i_shard == 96) header_vision(w, 165, "vision_tower.encoder.blocks", 802429952);
    if (w->i_shard > 94) return;
    for (int t = first; t < last; t++) {
        id.tensor = (enum tensor)t;
        if (!is_layer || layer_has(&real, id.il, TENSOR[t].part)) header_known(w, &id);
    }
    if (is_layer && id.il >= real.n_dense) header_experts(w, id.il);
}

/* Write one sparse shard. Returns its size, or 0 with errno when the file system refuses. */
static uint64_t headers_shard(const char *dir, unsigned i_shard) {
    char path[600], *text = NULL;
    size_t n = 0;
    header_writer w = {open_memstream(&text, &n), 0, i_shard};
    must(w.f != NULL, "memory");
    fprintf(w.f, "{\"__metadata__\":{\"format\":\"pt\"}");
    header_all(&w);
    fputc('}', w.f);
    fflush(w.f);
    while (n % 8) { fputc(' ', w.f); fflush(w.f); }
    fclose(w.f);
    uint8_t len[8];
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)((uint64_t)n >> 8 * i);
    snprintf(path, sizeof path, "%s/model-%05u-of-000096.safetensors", dir, i_shard);
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(len, 1, 8, f) == 8 && fwrite(text, 1, n, f) == n && fflush(f) == 0 &&
              ftruncate(fileno(f), (off_t)(8 + n + w.at)) == 0;
    int why = errno;
    if (f) fclose(f);
    free(text);
    errno = why;
    return ok ? 8 + n + w.at : 0;
}

static bool file_copy(const char *from, const char *to) {
    size_t n;
    char *text = file_read(from, &n);
    FILE *f = fopen(to, "wb");
    bool ok = text && f && fwrite(text, 1, n, f) == n;
    if (f && fclose(f) != 0) ok = false;
    free(text);
    return ok;
}

/* Write config, 96 shards, and the index where a zstd program is here (`has_index`). false: no
 * space. */
static bool headers_make(const char *dir, bool *has_index) {
    char path[600], command[700];
    uint64_t total = 0;
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (!file_copy("tests/data/k3_config.json", path)) return false;
    for (unsigned i = 1; i <= 96; i++) {
        uint64_t n = headers_shard(dir, i);
        if (n == 0) return false;
        if (i == 13) printf("model: a made MoE shard has %" PRIu64 " bytes, the release's 16990916912\n", n);
        total += n;
    }
    printf("model: 96 made shards have %" PRIu64 " bytes, the release's 1560936091448\n", total);
    CHECK(total / 1000000 == 1560936);
    snprintf(command, sizeof command, "zstd -dcq " ZST " > '%s/" INDEX "' 2>/dev/null", dir);
    *has_index = system(command) == 0;
    snprintf(path, sizeof path, "%s/" INDEX, dir);
    if (!*has_index) unlink(path);
    return true;
}

static uint64_t peak_kib(void) { return machine_number("/proc/self/status", "VmHWM:", 0); }

/* --open: run in a process of its own, so that the peak of memory is that of this open. */
static int child_open(const char *dir) {
    k3_options o;
    k3_engine *e;
    k3_options_default(&o);
    o.model_dir = dir;
    o.headers_only = true;
    uint64_t before = peak_kib(), start = clock_ns();
    clock_t cpu = clock();
    int rc = k3_engine_open(&e, &o, &err);
    double s = (double)(clock_ns() - start) * 1e-9,
           cpu_s = (double)(clock() - cpu) / CLOCKS_PER_SEC;
    uint64_t after = peak_kib();
    if (rc < 0) {
        printf("%s\n", err.text);
        return 1;
    }
    printf("opened in %.3f s, CPU %.3f s; peak %" PRIu64 " KiB, %" PRIu64 " KiB more than before; table %" PRIu64
           " KiB\n",
           s, cpu_s, after, after - before, e->mem.used / 1024);
    k3_engine_close(e);
    return 0;
}

static void headers_measure(const char *dir, const char *what) {
    char self[512], command[1200], line[600] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0) {
        SKIP("time and memory of the released geometry: no /proc/self/exe");
        return;
    }
    self[n] = 0;
    snprintf(command, sizeof command, "'%s' --open '%s'", self, dir);
    FILE *f = popen(command, "r");
    must(f != NULL, "popen");
    if (!fgets(line, sizeof line, f)) line[0] = 0;
    int status = pclose(f);
    if (WIFEXITED(status) && WEXITSTATUS(status) >= 126) {
        SKIP("time and memory of the released geometry: this program cannot run itself");
        return;
    }
    CHECK_EQ_INT(status, 0);
    printf("model: 96 headers, %s: %s", what, line);
    double s = 0;
    unsigned long long peak = 0, growth = 0;
    if (!CHECK(sscanf(line, "opened in %*f s, CPU %lf s; peak %llu KiB, %llu", &s, &peak, &growth) == 3)) return;
    if (HAS_SANITIZER || peak == 0) {
        SKIP("the 60 MiB and 5 s bounds: a sanitizer, or no VmHWM here");
        return;
    }
    CHECK(growth <= 60 * 1024);
    CHECK(s <= 5.0); /* seconds of CPU: other processes do not count */
}

/* ---- A directory like demo/ with one thing wrong -------------------------------------- */

static char box[256]; /* the directory */
static char demo[4096];
static const char *const BOX_FILE[] = {"config.json", INDEX, "model-00001-of-000003.safetensors",
                                       "model-00002-of-000003.safetensors",
                                       "model-00003-of-000003.safetensors"};
#define S1 BOX_FILE[2]
#define S2 BOX_FILE[3]
#define S3 BOX_FILE[4]

static const char *box_path(const char *file) {
    static char path[600];
    snprintf(path, sizeof path, "%s/%s", box, file);
    return path;
}

static void box_empty(void) {
    DIR *d = opendir(box);
    must(d != NULL, box);
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && unlink(box_path(e->d_name)) != 0)
            rmdir(box_path(e->d_name));
    closedir(d);
}

/* Links to every file of demo/ that the engine reads. */
static void box_fresh(void) {
    char from[4400];
    box_empty();
    for (int i = 0; i < 5; i++) {
        snprintf(from, sizeof from, "%s/%s", demo, BOX_FILE[i]);
        must(symlink(from, box_path(BOX_FILE[i])) == 0, "symlink");
    }
}

static void box_write(const char *file, const void *bytes, size_t n) {
    unlink(box_path(file));
    FILE *f = fopen(box_path(file), "wb");
    must(f && fwrite(bytes, 1, n, f) == n && fclose(f) == 0, file);
}

static void box_text(const char *file, const char *text) { box_write(file, text, strlen(text)); }

static int fd_count(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

static char notes[8192];

static void note_keep(void *user, const char *line) {
    (void)user;
    size_t n = strlen(notes);
    snprintf(notes + n, sizeof notes - n, "%s\n", line);
}

static int box_open(k3_engine **e, bool headers_only) {
    k3_options o;
    k3_options_default(&o);
    o.model_dir = box;
    o.n_threads = 1;
    o.chunk = 4;
    o.ram_bytes = 256u << 20;
    o.headers_only = headers_only;
    o.note = note_keep;
    notes[0] = 0;
    return k3_engine_open(e, &o, &err);
}

static bool is_one_line(const char *s) {
    for (; *s; s++)
        if ((unsigned char)*s < 32 || *s == 127) return false;
    return true;
}

/* The box must be refused: this status, one line holding both words, nothing left behind. */
static void refuse_at(int line, const char *what, int status, const char *word, const char *word2) {
    k3_engine *e = (k3_engine *)&err;
    int n_fds = fd_count(), rc = box_open(&e, true);
    char title[400];
    snprintf(title, sizeof title, "%s", what);
    bool ok = rc == status && e == NULL && strstr(err.text, word) && strstr(err.text, word2) &&
              is_one_line(err.text) && fd_count() == n_fds;
    if (!test_count(ok, __FILE__, line, title))
        printf("    got  %d, %s%s\n    want %d, with \"%s\" and \"%s\"\n", rc, err.text,
               fd_count() == n_fds ? "" : " (and a descriptor left open)", status, word, word2);
    if (rc == 0) k3_engine_close(e);
    if (getenv("K3_TEST_MESSAGES")) printf("%-44.44s | %s\n", what, err.text);
}
#define REFUSE(what, status, word)         refuse_at(__LINE__, what, status, word, "")
#define REFUSE2(what, status, word, word2) refuse_at(__LINE__, what, status, word, word2)

static void accept_at(int line, const char *what) {
    k3_engine *e = NULL;
    int n_fds = fd_count(), rc = box_open(&e, true);
    if (!test_count(rc == 0 && e, __FILE__, line, what)) printf("    %s\n", err.text);
    k3_engine_close(e);
    test_count(fd_count() == n_fds, __FILE__, line, "descriptors");
}
#define ACCEPT(what) accept_at(__LINE__, what)

static const uint32_t IDS[] = {343, 336, 327, 444, 1489, 311};
#define N_IDS (sizeof IDS / sizeof *IDS)

/* Run IDS on the box; *fnv is the hash of the last row of logits. Returns the first failure's
 * status. */
static int box_run(uint64_t *fnv) {
    k3_engine *e = NULL;
    k3_session *s = NULL;
    int rc = box_open(&e, false);
    if (rc == 0) rc = k3_session_new(&s, e, 16, &err);
    if (rc == 0) {
        size_t n = k3_engine_shape(e)->vocab_size * sizeof(float);
        float *logits = malloc(n);
        must(logits != NULL, "memory");
        rc = k3_session_feed(s, IDS, N_IDS, K3_ROWS_LAST, logits, &err);
        *fnv = rc == 0 ? k3_fnv1a(K3_FNV_BASIS, logits, n) : 0;
        free(logits);
    }
    k3_session_free(s);
    k3_engine_close(e);
    return rc;
}

static uint64_t demo_fnv; /* the hash that demo/ itself gives */

static void same_run_at(int line, const char *what) {
    uint64_t fnv = 0;
    int rc = box_run(&fnv);
    if (!test_count(rc == 0 && fnv == demo_fnv, __FILE__, line, what))
        printf("    status %d, hash %016" PRIx64 ", demo's %016" PRIx64 ": %s\n", rc, fnv, demo_fnv, err.text);
}
#define SAME_RUN(what) same_run_at(__LINE__, what)

/* Mutants are JSON texts with one value replaced by any text at all: a placeholder is put in the
 * tree and replaced when it is written. NULL removes the key. The text is malloc'd. */
static char *json_mutant(json_object *top, json_object *at, const char *key, const char *text) {
    static const char mark[] = "\"@mutant@\"";
    if (text)
        json_object_object_add(at, key, json_object_new_string("@mutant@"));
    else
        json_object_object_del(at, key);
    const char *all = json_object_to_json_string_ext(top, JSON_C_TO_STRING_PLAIN);
    const char *hole = text ? strstr(all, mark) : all + strlen(all);
    must(hole != NULL, "mutant");
    const char *rest = text ? hole + sizeof mark - 1 : hole;
    char *out = malloc(strlen(all) + (text ? strlen(text) : 0) + 1);
    must(out != NULL, "memory");
    sprintf(out, "%.*s%s%s", (int)(hole - all), all, text ? text : "", rest);
    return out;
}

/* ---- config.json ----------------------------------------------------------------------- */

static json_object *config_tree(json_object **text) {
    char path[4200];
    snprintf(path, sizeof path, "%s/config.json", demo);
    json_object *top = json_object_from_file(path);
    must(top && json_object_object_get_ex(top, "text_config", text), path);
    return top;
}

/* Write a config whose `field` (dotted; eos_token_id is the top level's) is `value`. */
static void config_mutate(const char *field, const char *value) {
    json_object *at, *top = config_tree(&at);
    char outer[64];
    const char *dot = strchr(field, '.'), *leaf = dot ? dot + 1 : field;
    if (strcmp(field, "eos_token_id") == 0 || strcmp(field, "text_config") == 0) at = top;
    if (dot) {
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - field), field);
        must(json_object_object_get_ex(at, outer, &at), field);
    }
    char *text = json_mutant(top, at, leaf, value);
    box_text("config.json", text);
    free(text);
    json_object_put(top);
}

static const char *const INT_FIELD[] = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "linear_attn_config.num_heads", "linear_attn_config.head_dim",
    "linear_attn_config.short_conv_kernel_size", "attn_res_block_size", "intermediate_size",
    "first_k_dense_replace", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "routed_expert_hidden_size", "max_position_embeddings", "eos_token_id",
    "moe_layer_freq", "num_expert_group", "topk_group"};
static const char *const FLOAT_FIELD[] = {
    "rms_norm_eps", "linear_attn_config.gate_lower_bound", "activation_situ_beta",
    "activation_situ_linear_beta", "routed_scaling_factor"};
static const char *const OTHER_FIELD[] = {
    "hidden_act", "mla_use_nope", "mla_use_output_gate", "linear_attn_config.use_full_rank_gate",
    "moe_router_activation_func", "moe_renormalize", "latent_moe_use_norm", "tie_word_embeddings",
    "linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers", "linear_attn_config"};

/* Every value of `value` in every field of `field` is refused, and the line names the field. */
static void config_sweep(const char *const *field, size_t n_fields, const char *const *value,
                         size_t n_values) {
    for (size_t i = 0; i < n_fields; i++)
        for (size_t k = 0; k < n_values; k++) {
            char what[200];
            const char *dot = strchr(field[i], '.');
            snprintf(what, sizeof what, "%s: %s", field[i], value[k] ? value[k] : "removed");
            config_mutate(field[i], value[k]);
            REFUSE2(what, K3_EMODEL, "config.json", dot ? dot + 1 : field[i]);
        }
}
#define SWEEP(field, value) \
    config_sweep(field, sizeof(field) / sizeof *(field), value, sizeof(value) / sizeof *(value))

static void test_config_fields(void) {
    static const char *const any[] = {NULL, "null", "\"x\"", "[]", "{}", "[1]"};
    static const char *const not_int[] = {
        "true", "NaN", "Infinity", "-Infinity", "1.5", "4.0", "1e400", "-1", "4294967296", "4294967300",
        "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775808",
        "99999999999999999999999", "\"4\""};
    static const char *const not_float[] = {"true", "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e39"};
    static const char *const not_other[] = {"\"relu\"", "0", "2", "NaN", "\"true\""};
    box_fresh();
    SWEEP(INT_FIELD, any);
    SWEEP(INT_FIELD, not_int);
    SWEEP(FLOAT_FIELD, any);
    SWEEP(FLOAT_FIELD, not_float);
    SWEEP(OTHER_FIELD, not_other);
    for (size_t i = 0; i < sizeof OTHER_FIELD / sizeof *OTHER_FIELD; i++) {
        const char *name = OTHER_FIELD[i], *dot = strchr(name, '.');
        config_mutate(name, NULL);
        REFUSE2(name, K3_EMODEL, "config.json", dot ? dot + 1 : name);
    }
    for (size_t i = 0; i < sizeof INT_FIELD / sizeof *INT_FIELD; i++) {
        if (strcmp(INT_FIELD[i], "first_k_dense_replace") == 0 || strcmp(INT_FIELD[i], "eos_token_id") == 0)
            continue; /* 0 is allowed there */
        config_mutate(INT_FIELD[i], "0");
        REFUSE2(INT_FIELD[i], K3_EMODEL, "is 0", "");
    }
}

typedef struct {
    const char *field, *value, *word, *word2;
} mutant;

static void test_config_values(void) {
    static const mutant m[] = {
        {"hidden_act", "\"silu\"", "hidden_act is silu", "situ"},
        {"num_key_value_heads", "2", "num_key_value_heads is 2", "num_attention_heads is 4"},
        {"moe_renormalize", "false", "moe_renormalize is false", "true"},
        {"moe_router_activation_func", "\"softmax\"", "moe_router_activation_func", "softmax"},
        {"mla_use_nope", "false", "mla_use_nope is false", ""},
        {"tie_word_embeddings", "true", "tie_word_embeddings is true", ""},
        {"num_expert_group", "2", "num_expert_group is 2", "1"},
        {"topk_group", "2", "topk_group is 2", "1"},
        {"moe_layer_freq", "2", "moe_layer_freq is 2", "1"},
        {"moe_layer_freq", "[1,1]", "moe_layer_freq", "[ 1, 1 ]"},
        {"linear_attn_config.short_conv_kernel_size", "3", "short_conv_kernel_size is 3", "4"},
        {"linear_attn_config.use_full_rank_gate", "false", "use_full_rank_gate is false", ""},
        {"num_experts_per_token", "33", "num_experts_per_token is 33", "1..32"},
        {"num_experts", "3", "num_experts_per_token 4", "num_experts 3"},
        {"num_experts", "65536", "num_experts is 65536", "65535"},
        {"num_hidden_layers", "1025", "num_hidden_layers is 1025", "1024"},
        {"routed_expert_hidden_size", "80", "routed_expert_hidden_size 80", "multiples of 32"},
        {"moe_intermediate_size", "48", "moe_intermediate_size 48", "multiples of 32"},
        {"first_k_dense_replace", "10", "first_k_dense_replace 10", "num_hidden_layers 9"},
        {"eos_token_id", "2048", "eos_token_id is 2048", "0..2047"},
        {"eos_token_id", "[1,2]", "eos_token_id", "[ 1, 2 ]"},
        {"rms_norm_eps", "0", "rms_norm_eps", "above 0"},
        {"rms_norm_eps", "-1", "rms_norm_eps", "above 0"},
        {"rms_norm_eps", "1e-60", "rms_norm_eps", "above 0"},
        {"activation_situ_beta", "0.0", "activation_situ_beta", "above 0"},
        {"activation_situ_linear_beta", "-25", "activation_situ_linear_beta", "above 0"},
        {"linear_attn_config.gate_lower_bound", "0", "gate_lower_bound", "below 0"},
        {"linear_attn_config.gate_lower_bound", "5.0", "gate_lower_bound", "below 0"},
        {"hidden_size", "16777217", "hidden_size is 16777217", "16777216"},
        {"num_attention_heads", "65535", "num_attention_heads", ""},
        {"linear_attn_config.head_dim", "65535", "shape", "config.json asks for"},
        {"quantization_config", "{\"format\":\"nvfp4-pack-quantized\"}", "quantization_config.format is nvfp4", ""},
        {"quantization_config", "{\"format\":4}", "quantization_config.format is 4", ""},
        {"quantization_config", "{}", "quantization_config.format is missing", ""},
        {"quantization_config", "3", "quantization_config", ""},
        {"text_config", "3", "text_config is not an object", ""},
        {"text_config", "null", "text_config is not an object", ""},
        {"text_config", "[{}]", "text_config is not an object", ""},
        {"linear_attn_config", "3", "linear_attn_config is missing or not an object", ""},
        {"hidden_act", "\"a\\nb\\u001b[31mc\"", "hidden_act", ""}, /* its message is one line without escapes */
    };
    box_fresh();
    for (size_t i = 0; i < sizeof m / sizeof *m; i++) {
        char what[300];
        snprintf(what, sizeof what, "%s: %s", m[i].field, m[i].value);
        config_mutate(m[i].field, m[i].value);
        REFUSE2(what, K3_EMODEL, m[i].word, m[i].word2);
    }
    config_mutate("quantization_config", NULL); /* then the headers decide */
    ACCEPT("no quantization_config");
    config_mutate("num_shared_experts", "262144"); /* 2^18 x 64 */
    REFUSE2("num_shared_experts: 262144", K3_EMODEL, "num_shared_experts", "1..1024");
}

/* demo: full 4 8 9, kda 1 2 3 5 6 7. */
static void test_config_layers(void) {
    static const mutant m[] = {
        {"full_attn_layers", "[4,8]", "layer 9 of 9", "neither"},
        {"kda_layers", "[2,3,5,6,7]", "layer 1 of 9", "neither"},
        {"kda_layers", "[]", "layer 1 of 9", "neither"},
        {"kda_layers", "[1,2,3,5,6,7,10]", "kda_layers[6] is 10", "1..9"},
        {"kda_layers", "[0,1,2,3,5,6,7]", "kda_layers[0] is 0", "1..9"},
        {"full_attn_layers", "[4,8,9,-1]", "full_attn_layers[3] is -1", "1..9"},
        {"full_attn_layers", "[4,8,9,4294967297]", "full_attn_layers[3] is 4294967297", "1..9"},
        {"full_attn_layers", "[4,8,9.0]", "full_attn_layers[2] is 9.0", "1..9"},
        {"full_attn_layers", "[4,8,\"9\"]", "full_attn_layers[2] is \"9\"", "1..9"},
        {"full_attn_layers", "[4,8,null]", "full_attn_layers[2] is null", "1..9"},
        {"full_attn_layers", "[4,8,[9]]", "full_attn_layers[2] is", "1..9"},
        {"full_attn_layers", "[4,8,9,9]", "layer 9 is listed twice", "full_attn_layers"},
        {"kda_layers", "[1,2,3,4,5,6,7]", "layer 4 is listed twice", "kda_layers"},
        {"kda_layers", "{\"1\":1}", "kda_layers", "array"},
    };
    box_fresh();
    for (size_t i = 0; i < sizeof m / sizeof *m; i++) {
        char what[200], field[80];
        snprintf(what, sizeof what, "%s: %s", m[i].field, m[i].value);
        snprintf(field, sizeof field, "linear_attn_config.%s", m[i].field);
        config_mutate(field, m[i].value);
        REFUSE2(what, K3_EMODEL, m[i].word, m[i].word2);
    }
}

static void test_config_text(void) {
    size_t n;
    box_fresh();
    char *text = file_read(box_path("config.json"), &n);
    must(text != NULL, "demo/config.json");
    const size_t cut[] = {1, n / 3, n / 2, n - 4, n - 2};
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        box_write("config.json", text, cut[i]);
        REFUSE2("truncated config", K3_EMODEL, "config.json: not valid JSON: ends too early", "download");
    }
    char *more = malloc(n + 8);
    must(more != NULL, "memory");
    sprintf(more, "%s", text);
    memcpy(more + n, "  {}", 5);
    box_write("config.json", more, n + 4);
    REFUSE("trailing garbage", K3_EMODEL, "config.json: not valid JSON: has text after its end");
    memcpy(more + n, "\0\0\0", 4);
    box_write("config.json", more, n + 3);
    REFUSE("trailing zeros", K3_EMODEL, "config.json: not valid JSON");
    memcpy(more + n, " \r\n", 4);
    box_write("config.json", more, n + 3);
    ACCEPT("trailing white space");
    more[n / 2] = 0;
    box_write("config.json", more, n);
    REFUSE("a zero byte inside", K3_EMODEL, "config.json: not valid JSON");
    free(more);
    free(text);
    static const char *const no_object[] = {"[]", "3", "null", "\"text\"", "true", "NaN"};
    for (size_t i = 0; i < sizeof no_object / sizeof *no_object; i++) {
        box_text("config.json", no_object[i]);
        REFUSE(no_object[i], K3_EMODEL, "config.json: not");
    }
    static const char *const no_json[] = {"nonsense", "{", "{\"a\"}", "{\"a\":}", "\xef\xbb\xbf{}", "\xff\xfe{",
                                          "<html>404</html>", "version https://git-lfs.github.com/spec/v1"};
    for (size_t i = 0; i < sizeof no_json / sizeof *no_json; i++) {
        box_text("config.json", no_json[i]);
        REFUSE(no_json[i], K3_EMODEL, "config.json: not valid JSON");
    }
    static const char *const twice[] = {"{\"a\":1,\"a\":1}", "{\"b\":[{\"a\":1,\"\\u0061\":2}]}",
                                        "{\"a:\\\":\":{\"a\":1,\"b\":2,\"a\":3}}"};
    for (size_t i = 0; i < sizeof twice / sizeof *twice; i++) {
        box_text("config.json", twice[i]);
        REFUSE(twice[i], K3_EMODEL, "config.json: not valid JSON: an object has a key twice");
    }
    /* texts that only json-c reads, or that hide a key that is there twice */
    static const char *const odd[] = {"{'\"':1,'c\"':2,\"a\":1,\"a\":2}", "{/*\"*/\"a\":1,/*\"*/\"a\":2}",
                                      "{\"a\":1 // \"\n}"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        box_text("config.json", odd[i]);
        REFUSE(odd[i], K3_EMODEL, "config.json: not valid JSON: a comment or a single quote");
    }
    box_text("config.json", "{\"a:\\\":\":[{\"a\":\"b:c'/\"},{\"a\":{}}]}");
    REFUSE("no key twice", K3_EMODEL, "is missing");
    box_text("config.json", "");
    REFUSE("empty config", K3_EMODEL, "config.json: empty");
    box_text("config.json", "{}");
    REFUSE("config {}", K3_EMODEL, "is missing");
}

static void test_config_deep(void) {
    enum { DEEP = 100000 };
    char *deep = malloc(2 * DEEP + 1);
    must(deep != NULL, "memory");
    memset(deep, '[', DEEP);
    memset(deep + DEEP, ']', DEEP);
    box_fresh();
    box_write("config.json", deep, 2 * DEEP);
    REFUSE2("100,000 brackets", K3_EMODEL, "config.json: not valid JSON", "nesting");
    deep[2 * DEEP] = 0;
    config_mutate("rms_norm_eps", deep);
    REFUSE2("100,000 brackets inside", K3_EMODEL, "config.json: not valid JSON", "nesting");
    free(deep);
    must(unlink(box_path("config.json")) == 0, "unlink");
    FILE *f = fopen(box_path("config.json"), "wb");
    must(f && ftruncate(fileno(f), 64 << 20) == 0 && fclose(f) == 0, "config.json of 64 MiB");
    REFUSE2("a config of 64 MiB", K3_EMODEL, "config.json", "67108864 bytes");
}

static void alarm_rings(int sig) { (void)sig; }

/* A FIFO must be refused at once: were it waited for, the alarm would end the test. */
static void refuse_fifo(const char *file) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = alarm_rings;
    sigaction(SIGALRM, &a, NULL);
    unlink(box_path(file));
    if (mkfifo(box_path(file), 0600) != 0) {
        SKIP("a FIFO in place of a file: mkfifo fails here");
        return;
    }
    alarm(1);
    REFUSE2(file, K3_EIO, file, "not a regular file");
    alarm(0);
    unlink(box_path(file));
}

static void test_config_file(void) {
    char keep[sizeof box];
    memcpy(keep, box, sizeof box);
    strcat(box, "/absent");
    REFUSE2("absent directory", K3_EMODEL, "/absent", "no such model directory");
    memcpy(box, keep, sizeof box);
    box_empty();
    REFUSE("empty directory", K3_EMODEL, "no config.json");
    must(mkdir(box_path("config.json"), 0700) == 0, "mkdir");
    REFUSE2("config.json is a directory", K3_EIO, "config.json", "not a regular file");
    box_fresh();
    box_text("config.json", "{}");
    chmod(box_path("config.json"), 0);
    if (access(box_path("config.json"), R_OK) == 0)
        SKIP("unreadable config.json: this user reads everything");
    else
        REFUSE2("unreadable config.json", K3_EIO, "config.json", strerror(EACCES));
    box_fresh();
    refuse_fifo("config.json");
    box_fresh();
    strcat(box, "/config.json");
    REFUSE2("a file for a directory", K3_EMODEL, "config.json", "no such model directory");
    memcpy(box, keep, sizeof box);
    k3_engine *e = NULL;
    k3_options o;
    k3_options_default(&o);
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), K3_EUSAGE);
    CHECK(e == NULL && strstr(err.text, "model directory") != NULL);
    CHECK_EQ_INT(k3_engine_open(&e, &o, NULL), K3_EUSAGE);
}

/* A config of another architecture is refused by that name; a kimi_k3 config keeps the message
 * about its field. */
static void test_config_stranger(void) {
    static const char *const text[][3] = {
        {"{\"model_type\":\"qwen3_moe\",\"architectures\":[\"Qwen3MoeForCausalLM\"]}",
         "Qwen3MoeForCausalLM (model_type qwen3_moe)", "k3 runs Kimi K3"},
        {"{\"architectures\":[\"LlamaForCausalLM\"]}", "this model is LlamaForCausalLM;", "hidden_act"},
        {"{\"model_type\":\"gpt_oss\",\"text_config\":{}}", "of another type (model_type gpt_oss)",
         "no other architecture"},
        {"{\"model_type\":\"\\u001b[31m\\nx y\",\"architectures\":\"\"}", "?[31m?x?y", "Kimi K3"},
        {"{\"model_type\":\"kimi_k3\"}", "config.json: field hidden_act is missing", "released"},
        {"{\"architectures\":[\"KimiK3ForConditionalGeneration\"]}", "config.json: field hidden_act",
         "missing"},
        {"{\"architectures\":[]}", "config.json: field hidden_act", "missing"},
        {"{\"model_type\":7}", "config.json: field hidden_act", "missing"},
    };
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        box_empty();
        box_text("config.json", text[i][0]);
        REFUSE2(text[i][0], K3_EMODEL, text[i][1], text[i][2]);
    }
    box_fresh();
}

/* config.json alone gives the shape and the plan that all headers give, and nothing that needs weights. */
static void test_config_only(void) {
    k3_options o;
    k3_engine *e = NULL, *whole = NULL;
    k3_session *s = NULL;
    k3_options_default(&o);
    o.model_dir = box;
    o.ram_bytes = 60u << 20;
    o.headers_only = true;
    box_fresh();
    CHECK_EQ_INT(k3_engine_open(&whole, &o, &err), 0);
    for (int i = 1; i < 5; i++) must(unlink(box_path(BOX_FILE[i])) == 0, "unlink");
    o.headers_only = false;
    o.config_only = true;
    int n_fds = fd_count();
    CHECK_EQ_INT(k3_engine_open(&e, &o, &err), 0);
    if (e && whole) {
        CHECK(memcmp(k3_engine_plan(e), k3_engine_plan(whole), sizeof(k3_plan)) == 0);
        CHECK(memcmp(k3_engine_shape(e), k3_engine_shape(whole), sizeof(k3_shape)) == 0);
        CHECK_EQ_INT(k3_engine_verify(e, &err), K3_EUSAGE);
        CHECK_EQ_INT(k3_engine_write_sums(e, true, &err), K3_EUSAGE);
        CHECK_EQ_INT(k3_session_new(&s, e, 16, &err), K3_EUSAGE);
        k3_fingerprints print;
        CHECK_EQ_INT(k3_engine_fingerprints(e, &print, &err), K3_EUSAGE);
        CHECK(!k3_expert_has(e, 1, 0));
    }
    k3_engine_close(e);
    CHECK_EQ_INT(fd_count(), n_fds);
    k3_engine_close(whole);
    box_fresh();
}

/* ---- Headers ---------------------------------------------------------------------------- */

typedef struct {
    uint8_t *bytes;
    size_t size, header; /* whole file; header text begins at 8 */
} demo_shard;
static demo_shard shard_of[3];

static void demo_load(void) {
    for (int i = 0; i < 3; i++) {
        char path[4400];
        demo_shard *d = &shard_of[i];
        snprintf(path, sizeof path, "%s/%s", demo, BOX_FILE[2 + i]);
        d->bytes = (uint8_t *)file_read(path, &d->size);
        must(d->bytes != NULL, path);
        for (int k = 7; k >= 0; k--) d->header = d->header << 8 | d->bytes[k];
    }
}

static uint64_t data_bytes(int i) { return shard_of[i].size - 8 - shard_of[i].header; }

static json_object *header_tree(int i) {
    char *text = strndup((char *)shard_of[i].bytes + 8, shard_of[i].header);
    json_object *top = text ? json_tokener_parse(text) : NULL;
    must(top != NULL, "header");
    free(text);
    return top;
}

/* Write shard i with another header. The data follow it (`has_data`) or are a hole; `extra` bytes
 * more. */
static void shard_write(int i, const char *header, bool has_data, int64_t extra) {
    const char *file = BOX_FILE[2 + i];
    uint64_t n = strlen(header), total = 8 + n + data_bytes(i);
    uint8_t len[8];
    for (int k = 0; k < 8; k++) len[k] = (uint8_t)(n >> 8 * k);
    unlink(box_path(file));
    FILE *f = fopen(box_path(file), "wb");
    must(f && fwrite(len, 1, 8, f) == 8 && fwrite(header, 1, n, f) == n, file);
    if (has_data)
        must(fwrite(shard_of[i].bytes + 8 + shard_of[i].header, 1, data_bytes(i), f) == data_bytes(i), file);
    must(fflush(f) == 0 && ftruncate(fileno(f), (off_t)((int64_t)total + extra)) == 0, file);
    fclose(f);
}

#define LM "language_model.model."
#define Q_PROJ LM "layers.0.self_attn.q_proj.weight" /* BF16 [128,192], [640,49792] */
#define A_LOG  LM "layers.0.self_attn.A_log"         /* F32 [32], [0,128]            */
#define W1     LM "layers.1.block_sparse_moe.experts.0.w1." /* [64,48] at 1377600       */

/* In shard i, set `field` of tensor `name` (the whole entry when NULL) to `value`. */
static void header_mutate(int i, const char *name, const char *field, const char *value) {
    json_object *top = header_tree(i), *at = top;
    if (field) must(json_object_object_get_ex(top, name, &at), name);
    char *text = json_mutant(top, at, field ? field : name, value);
    shard_write(i, text, false, 4096);
    free(text);
    json_object_put(top);
}

static void header_cases(const char *name, const mutant *m, size_t n, const char *file) {
    box_fresh();
    for (size_t i = 0; i < n; i++) {
        char what[300];
        snprintf(what, sizeof what, "%s %s: %s", name, m[i].field ? m[i].field : "entry",
                 m[i].value ? m[i].value : "removed");
        header_mutate(0, name, m[i].field, m[i].value);
        refuse_at(__LINE__, what, K3_EMODEL, m[i].word, m[i].word2);
        if (file && !CHECK(strstr(err.text, file) != NULL)) printf("    %s\n", err.text);
    }
}
#define HEADER_CASES(name, m) header_cases(name, m, sizeof(m) / sizeof *(m), S1)

static void test_header_entries(void) {
    static const mutant m[] = {
        {"dtype", "\"F16\"", Q_PROJ, "dtype F16, expected BF16"},
        {"dtype", "\"bf16\"", Q_PROJ, "dtype bf16"},
        {"dtype", "3", Q_PROJ, "dtype"},
        {"dtype", NULL, Q_PROJ, "dtype"},
        {"shape", NULL, Q_PROJ, "shape"},
        {"data_offsets", NULL, Q_PROJ, "data_offsets"},
        {NULL, "3", Q_PROJ, ""},
        {NULL, "null", Q_PROJ, ""},
        {NULL, "[]", Q_PROJ, ""},
        {NULL, "{}", Q_PROJ, ""},
        {"shape", "[192,128]", Q_PROJ, "shape [192,128], but config.json asks for [128,192]"},
        {"shape", "[128,191]", Q_PROJ, "[128,191]"},
        {"shape", "[24576]", Q_PROJ, "[24576]"},
        {"shape", "[]", Q_PROJ, "[]"},
        {"shape", "[128,192,1]", Q_PROJ, "[128,192,1]"},
        {"shape", "[1,1,1,1,1,1,1,1]", Q_PROJ, "[1,1,1,1,1,1,1,1]"},
        {"shape", "[1,1,1,1,1,1,1,1,1]", Q_PROJ, "shape"},
        {"shape", "128", Q_PROJ, "shape"},
        {"shape", "[-1,192]", Q_PROJ, "shape"},
        {"shape", "[128.0,192]", Q_PROJ, "shape"},
        {"shape", "[null,192]", Q_PROJ, "shape"},
        {"shape", "[4294967296,4294967296]", Q_PROJ, "impossible shape"},
        {"shape", "[18446744073709551615,2]", Q_PROJ, "impossible shape"},
        {"shape", "[0,18446744073709551615]", Q_PROJ, "shape"},
        {"shape", "[99999999999999999999]", Q_PROJ, "impossible shape"},
        {"data_offsets", "[640,49791]", Q_PROJ, "span 49151 bytes, its shape needs 49152"},
        {"data_offsets", "[640,49793]", Q_PROJ, "span 49153 bytes, its shape needs 49152"},
        {"data_offsets", "[640,640]", Q_PROJ, "span 0 bytes"},
        {"data_offsets", "[49792,640]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[-1,49151]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[-49152,0]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[640.5,49792]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[\"640\",\"49792\"]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[640]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "[640,49792,1]", Q_PROJ, "impossible data_offsets"},
        {"data_offsets", "{}", Q_PROJ, "data_offsets"},
        {"data_offsets", "[9999999360,10000048512]", Q_PROJ, "truncated"},
        {"data_offsets", "[18446744073709502463,18446744073709551615]", Q_PROJ, "truncated"},
        {"data_offsets", "[9223372036854775807,9223372036854824959]", Q_PROJ, "truncated"},
        {"data_offsets", "[99999999999999999999,99999999999999999999]", Q_PROJ, ""},
        {"data_offsets", "[642,49794]", Q_PROJ, "overlap"},
        {"data_offsets", "[0,49152]", Q_PROJ, "overlap"},
        {"data_offsets", "[638,49790]", Q_PROJ, "overlap"},
    };
    HEADER_CASES(Q_PROJ, m);
}

/* The same for a vector of f32 and for packed bytes. */
static void test_header_kinds(void) {
    static const mutant a_log[] = {
        {NULL, "{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}", A_LOG, "[3]"},
        {NULL, "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", A_LOG, "[0]"},
        {NULL, "{\"dtype\":\"F32\",\"shape\":[4,8],\"data_offsets\":[0,128]}", A_LOG, "[4,8]"},
        {NULL, "{\"dtype\":\"BF16\",\"shape\":[64],\"data_offsets\":[0,128]}", A_LOG, "dtype BF16, expected F32"},
    };
    static const mutant packed[] = {
        {"dtype", "\"I8\"", W1 "weight_packed", "dtype I8, expected U8"},
        {"shape", "[48,64]", W1 "weight_packed", "[48,64]"},
        {"shape", "[3072]", W1 "weight_packed", "[3072]"},
        {"data_offsets", "[1377600,1380671]", W1 "weight_packed", "span 3071"},
    };
    HEADER_CASES(A_LOG, a_log);
    HEADER_CASES(W1 "weight_packed", packed);
}

static void test_header_missing(void) {
    static const char *const name[] = {Q_PROJ, A_LOG, W1 "weight_packed", W1 "weight_scale",
                                       LM "layers.3.self_attn.kv_b_proj.weight"};
    box_fresh();
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        header_mutate(0, name[i], NULL, NULL);
        REFUSE2(name[i], K3_EMODEL, name[i], "in no shard");
    }
    box_fresh();
    header_mutate(2, "language_model.lm_head.weight", NULL, NULL);
    REFUSE2("lm_head", K3_EMODEL, "language_model.lm_head.weight", "in no shard");
    box_fresh();
    shard_write(0, "{}", false, 0);
    REFUSE2("an empty header", K3_EMODEL, "layers.0.", "in no shard");
}

/* A tensor that is there twice: the final norm again in shard 1, and again in its own shard without
 * prefix. */
static void test_header_twice(void) {
    char entry[200];
    box_fresh();
    snprintf(entry, sizeof entry, "{\"dtype\":\"BF16\",\"shape\":[192],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
             data_bytes(0), data_bytes(0) + 384);
    header_mutate(0, LM "norm.weight", NULL, entry);
    REFUSE2("a tensor in two shards", K3_EMODEL, S1, S3);
    CHECK(strstr(err.text, LM "norm.weight") != NULL);
    box_fresh();
    snprintf(entry, sizeof entry, "{\"dtype\":\"BF16\",\"shape\":[192],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
             data_bytes(2), data_bytes(2) + 384);
    header_mutate(2, "model.norm.weight", NULL, entry);
    REFUSE2("a tensor twice in one shard", K3_EMODEL, "model.norm.weight is twice in", S3);
    box_fresh();
    static const char *const field[] = {"\"dtype\":\"U8\"", "\"shape\":[1]", "\"data_offsets\":[0,0]"};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) { /* json-c writes no key twice */
        snprintf(entry, sizeof entry, "{\"x\":{%s,\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", field[i]);
        shard_write(0, entry, false, 0);
        REFUSE2(field[i], K3_EMODEL, "has dtype, shape or data_offsets twice", S1);
    }
}

/* What else a header may hold. */
static void test_header_accepted(void) {
    char entry[200];
    uint64_t at = data_bytes(0);
    box_fresh();
    ACCEPT("demo");
    CHECK_EQ_STR(notes, "");
    snprintf(entry, sizeof entry, "{\"dtype\":\"F8_E4M3\",\"shape\":[2,3],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
             at, at + 6);
    header_mutate(0, LM "layers.0.self_attn.sink", NULL, entry);
    ACCEPT("an unknown tensor");
    CHECK(strstr(notes, LM "layers.0.self_attn.sink") && strstr(notes, S1));
    header_mutate(0, "evil\\n\\u001b[31mname", NULL, entry); /* json-c escapes the backslash again */
    ACCEPT("an unknown tensor with a strange name");
    header_mutate(0, "evil\n\x1b[31mname", NULL, entry);
    ACCEPT("an unknown tensor with control characters");
    CHECK(strlen(notes) > 0 && is_one_line(strtok(notes, "\n")) && strtok(NULL, "\n") == NULL);
    header_mutate(0, "\xc2\x9b" "31m \x9b" "2J \xe0\x82\x9b \xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80 \xc3", NULL, entry);
    ACCEPT("an unknown tensor with control characters of eight bits");
    CHECK(strstr(notes, " ??31m ?2J ??? \xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80 ? ") != NULL);
    header_mutate(0, "vision_tower.patch_embed.proj.weight", NULL, entry);
    ACCEPT("a vision tensor");
    CHECK_EQ_STR(notes, "");
    header_mutate(0, "mm_projector.proj.0.weight", NULL, entry);
    ACCEPT("a projector tensor");
    CHECK_EQ_STR(notes, "");
    header_mutate(0, "__metadata__", NULL, "7");
    ACCEPT("any __metadata__");
    header_mutate(0, "__metadata__", NULL, NULL);
    ACCEPT("no __metadata__");
    snprintf(entry, sizeof entry, "{\"dtype\":\"F32\",\"shape\":[200],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
             at, at + 800);
    header_mutate(0, A_LOG, NULL, entry);
    ACCEPT("a longer A_log");
    header_mutate(0, A_LOG, NULL, "{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}");
    ACCEPT("an A_log of exactly the heads");
    header_mutate(0, "empty", NULL, "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[640,640]}");
    ACCEPT("an empty tensor between two");
}

/* Twenty unknown tensors: eight lines name one each, another says that there are more. */
static void test_header_notes(void) {
    json_object *top = header_tree(0);
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof name, "stranger.%d", i);
        json_object_object_add(top, name,
                               json_tokener_parse("{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}"));
    }
    box_fresh();
    shard_write(0, json_object_to_json_string(top), false, 0);
    json_object_put(top);
    ACCEPT("twenty strangers");
    int n = 0;
    for (const char *p = notes; (p = strchr(p, '\n')); p++) n++;
    CHECK_EQ_INT(n, 8);
    CHECK(strstr(notes, "stranger.7") && strstr(notes, "no more"));
}

/* The first bytes of a shard, then a hole up to `size`. */
static void shard_raw(const char *file, const void *bytes, size_t n, uint64_t size) {
    box_write(file, bytes, n);
    must(truncate(box_path(file), (off_t)size) == 0, file);
}

static void test_header_length(void) {
    static const struct {
        uint64_t length, size;
        const char *word;
    } c[] = {
        {10000000000u, 4096, "header of 10000000000 bytes is larger than the file"},
        {10000000000u, 20000000000u, "header of 10000000000 bytes"},
        {100000001, 200000000, "more than the format's limit"},
        {UINT64_MAX, 4096, "larger than the file"},
        {UINT64_MAX - 7, 4096, "larger than the file"},
        {(uint64_t)1 << 63, 4096, "larger than the file"},
        {4089, 4096, "larger than the file"},
        {0, 4096, "header"},
        {0, 8, "header"},
        {4088, 4096, "header"}, /* zeros */
        {90000000, 90000008, "header"},
    };
    box_fresh();
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        uint8_t len[8];
        char what[100];
        for (int k = 0; k < 8; k++) len[k] = (uint8_t)(c[i].length >> 8 * k);
        shard_raw(S2, len, 8, c[i].size);
        snprintf(what, sizeof what, "header of %" PRIu64 " in %" PRIu64, c[i].length, c[i].size);
        REFUSE2(what, K3_EMODEL, S2, c[i].word);
    }
    for (size_t n = 0; n < 8; n++) {
        shard_raw(S2, "\1\0\0\0\0\0\0", n, n);
        REFUSE2("a shard below 8 bytes", K3_EMODEL, S2, "safetensors");
    }
    static const char *const text[] = {"[]", "3", "{\"a\":", "nonsense", "{\"a\":1}", "{}{}",
                                       "{\"a\":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}"};
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        shard_write(1, text[i], false, 0);
        REFUSE2(text[i], K3_EMODEL, S2, "");
    }
}

static void test_shard_truncated(void) {
    for (int i = 0; i < 3; i++) {
        const demo_shard *d = &shard_of[i];
        const size_t size[] = {d->size - 1, d->size / 2, 8 + d->header, 8 + d->header - 1, 4096 - 3000, 8, 0};
        box_fresh();
        for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
            char what[100];
            if (size[k] > d->size) continue;
            snprintf(what, sizeof what, "%s cut to %zu", BOX_FILE[2 + i], size[k]);
            box_write(BOX_FILE[2 + i], d->bytes, size[k]);
            REFUSE2(what, K3_EMODEL, BOX_FILE[2 + i], "download");
        }
    }
}

/* Many tiny values must not become gigabytes of tree. */
static void test_bomb(const char *file) {
    static const char *const part[] = {"\"\",", "[],", "{},"}; /* each worse than the last */
    size_t cap = strcmp(file, "config.json") == 0 ? 250u << 10 : 2u << 20;
    char *text = malloc(cap + 64);
    must(text != NULL, "memory");
    box_fresh();
    for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
        size_t n = (size_t)sprintf(text, "{\"a\":["), k = strlen(part[i]);
        for (; n + k < cap; n += k) memcpy(text + n, part[i], k);
        sprintf(text + n - 1, "]}");
        if (strcmp(file, S2) == 0)
            shard_write(1, text, false, 0);
        else
            box_text(file, text);
        uint64_t before = peak_kib();
        REFUSE2("megabytes of small values", K3_EMODEL, file, "");
        if (!HAS_SANITIZER && !CHECK(peak_kib() - before < 96 * 1024))
            printf("    %s in %s took %" PRIu64 " MiB\n", part[i], file, (peak_kib() - before) / 1024);
    }
    free(text);
}

/* A config.json of n_layers KDA layers with so many experts each. */
static void config_counts(int n_layers, int n_experts) {
    json_object *text, *linear, *list = json_object_new_array(), *top = config_tree(&text);
    must(json_object_object_get_ex(text, "linear_attn_config", &linear), "linear_attn_config");
    for (int i = 1; i <= n_layers; i++) json_object_array_add(list, json_object_new_int(i));
    json_object_object_add(linear, "kda_layers", list);
    json_object_object_add(linear, "full_attn_layers", json_object_new_array());
    json_object_object_add(text, "num_hidden_layers", json_object_new_int(n_layers));
    json_object_object_add(text, "num_experts", json_object_new_int(n_experts));
    box_text("config.json", json_object_to_json_string(top));
    json_object_put(top);
}

/* Open the box with a small budget that its tables would exceed by far: refused, and no memory is
 * taken. */
static void refuse_counts(const char *what, bool experts_only, bool config_only, int status, const char *word,
                          const char *word2) {
    k3_engine *e = NULL;
    k3_options o;
    uint64_t before = peak_kib();
    k3_options_default(&o);
    o.model_dir = box;
    o.ram_bytes = 64u << 20;
    o.headers_only = true;
    o.experts_only = experts_only;
    o.config_only = config_only;
    int rc = k3_engine_open(&e, &o, &err);
    if (!test_count(rc == status && strstr(err.text, word) && strstr(err.text, word2) && is_one_line(err.text), __FILE__,
                    __LINE__, what))
        printf("    got %d, %s\n", rc, err.text);
    k3_engine_close(e);
    if (!HAS_SANITIZER && !test_count(peak_kib() - before < 32 * 1024, __FILE__, __LINE__, what))
        printf("    took %" PRIu64 " MiB\n", (peak_kib() - before) / 1024);
}

/* Counts of config.json are compared with the headers before a table is made, and all tables keep to the budget. */
static void test_counts(void) {
    box_fresh();
    config_counts(1024, 65535);
    refuse_counts("counts beyond the headers", false, false, K3_EMODEL, "1024 layers, 1023 of them with 65535 experts",
                  "name at most");
    refuse_counts("counts of a slice", true, false, K3_EBUDGET, "1023 layers with 65535 experts", "--ram");
    refuse_counts("counts of a config alone", false, true, K3_EBUDGET, "1023 layers with 65535 experts", "--ram");
    box_fresh(); /* a header that is a hole, longer than the budget */
    must(unlink(box_path(S2)) == 0, S2); /* a link to demo's */
    FILE *f = fopen(box_path(S2), "wb");
    const uint8_t length[8] = {0, 0, 0x90, 5}; /* 93 MB */
    must(f && fwrite(length, 1, 8, f) == 8 && fclose(f) == 0 && truncate(box_path(S2), 120 << 20) == 0, S2);
    refuse_counts("a header longer than the budget", false, false, K3_EBUDGET, S2, "its header");
    box_fresh(); /* each entry is counted, wherever the pieces that are read end */
    char *text = malloc(400000), *p = text;
    must(text != NULL, "memory");
    for (int i = 0; i < 5000; i++) p += sprintf(p, "{\"data_offsets\":[%d,%d]},%.*s", i, i, i % 17, "                 ");
    shard_write(1, text, false, 0);
    shard s = {.name = (char *)(uintptr_t)S2, .fd = {-1, -1, -1, -1, -1, -1, -1, -1}};
    must((s.fd[0] = file_open(box_path(S2), &s.size, &err)) >= 0, S2);
    CHECK_EQ_INT(header_count(&s), 5000);
    close(s.fd[0]);
    free(text);
    box_fresh();
}

/* ---- The index, and shards as files ------------------------------------------------------ */

static void index_map(const char *pairs) {
    char *text = malloc(strlen(pairs) + 100);
    must(text != NULL, "memory");
    sprintf(text, "{\"metadata\":{\"total_size\":1},\"weight_map\":{%s}}", pairs);
    box_text(INDEX, text);
    free(text);
}

#define PAIR(name, file) "\"" name "\": \"" file "\""
#define ALL_SHARDS                                                                                 \
    PAIR("a", "model-00001-of-000003.safetensors") "," PAIR("b", "model-00002-of-000003.safetensors") "," \
    PAIR("c", "model-00003-of-000003.safetensors")

static void test_index_shards(void) {
    box_fresh();
    must(unlink(box_path(S2)) == 0, S2);
    REFUSE2("absent shard", K3_EMODEL, S2, "named by the index");
    must(unlink(box_path(INDEX)) == 0, INDEX);
    REFUSE2("absent shard, no index", K3_EMODEL, LM "layers.5.", "in no shard");
    box_fresh();
    must(unlink(box_path(INDEX)) == 0, INDEX);
    ACCEPT("no index");
    for (int i = 2; i < 5; i++) must(unlink(box_path(BOX_FILE[i])) == 0, "unlink");
    REFUSE("no shards, no index", K3_EMODEL, "no *.safetensors files");
    box_fresh();
    index_map(ALL_SHARDS "," PAIR("vision_tower.x", "model-00004-of-000004.safetensors"));
    ACCEPT("absent vision shard");
    index_map(ALL_SHARDS "," PAIR("vision_tower.x", "v.safetensors") "," PAIR("mm_projector.y", "p.safetensors"));
    ACCEPT("two absent vision shards");
    index_map(ALL_SHARDS "," PAIR("vision_tower.x", "v.safetensors") "," PAIR("model.norm.weight", "v.safetensors"));
    REFUSE2("a shard of vision and text", K3_EMODEL, "v.safetensors", "named by the index");
    index_map(ALL_SHARDS "," PAIR("d", ""));
    REFUSE2("a shard without a name", K3_EMODEL, INDEX, "plain file name");
    index_map(ALL_SHARDS "," PAIR("d", ".."));
    REFUSE2("a shard named ..", K3_EMODEL, INDEX, "plain file name");
    index_map(PAIR("a", "model-00001-of-000003.safetensors") "," PAIR("b", "model-00002-of-000003.safetensors"));
    REFUSE2("an index of some shards", K3_EMODEL, "language_model.", "in no shard");
    index_map("");
    REFUSE2("an index of nothing", K3_EMODEL, "language_model.model.", "in no shard");
    index_map(ALL_SHARDS "," PAIR("d", "evil\\n\x1b[31m"));
    REFUSE("a shard with control characters", K3_EMODEL, "named by the index");
}

/* A download that stopped: one message names all shards that are absent or cut short. */
static void test_index_incomplete(void) {
    char map[4096] = ALL_SHARDS, two[200];
    box_fresh();
    must(unlink(box_path(S1)) == 0 && unlink(box_path(S3)) == 0, S1);
    snprintf(two, sizeof two, "nor is one more (%s): 1 of 3", S3);
    REFUSE2("two absent shards", K3_EMODEL, S1, two);
    box_fresh();
    for (int i = 0; i < 40; i++) {
        char pair[96];
        snprintf(pair, sizeof pair, ",\"x%d\":\"s%02d.safetensors\"", i, i);
        strcat(map, pair);
    }
    index_map(map);
    REFUSE2("forty absent shards", K3_EMODEL, "s00.safetensors: named by the index",
            "nor are 39 others (s01.safetensors, s02.safetensors, s03.safetensors, s04.safetensors, "
            "s05.safetensors, ...): 3 of 43");
    box_fresh();
    box_write(S1, "\x20\0\0\0\0\0\0\0{", 9);
    box_write(S3, "\x20", 1);
    snprintf(two, sizeof two, "one more shard is refused too: %s", S3);
    REFUSE2("two shards cut short", K3_EMODEL, "is larger than the file", two);
    box_fresh();
    box_write(S2, "\x20", 1);
    REFUSE2("one shard cut short", K3_EMODEL, S2, "is no safetensors file; download it again");
    CHECK(strstr(err.text, "refused too") == NULL);
    box_fresh();
}

static void test_index_text(void) {
    static const char *const bad[] = {
        "", "{", "[]", "nonsense", "{}", "{\"metadata\":{}}", "{\"metadata\":{}", "{\"weight_map\":[]}",
        "{\"weight_map\":3}", "{\"weight_map\":null}", "{\"weight_map\":\"x\"}", "{\"weight_map\":{",
        "{\"weight_map\":{\"a\"", "{\"weight_map\":{\"a\":", "{\"weight_map\":{\"a\":3}}",
        "{\"weight_map\":{\"a\":\"x.safetensors\"", "{\"weight_map\":{\"a\":\"x.safetensors\"}",
        "{\"weight_map\":{\"a\":\"x.safetensors\",}}", "{\"weight_map\":{a:\"x\"}}", "{\"metadata\":{\"a\":\"",
        "{\"metadata\":[[[[", "{\"weight_map\":{\"a\":\"x\\", "{1:2}", "{\"weight_map\" {}}",
        "{\"weight_map\":{},\"weight_map\":{}}", "{\"weight_map\":{},\"weight_map\":3}",
        "version https://git-lfs.github.com/spec/v1"};
    static const char *const outside[] = {"../x.safetensors", "/etc/passwd", "a/b.safetensors"};
    box_fresh();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        box_text(INDEX, bad[i]);
        REFUSE(bad[i], K3_EMODEL, INDEX);
    }
    for (size_t i = 0; i < 3; i++) {
        char pair[100];
        snprintf(pair, sizeof pair, "\"a\":\"%s\"", outside[i]);
        index_map(pair);
        REFUSE2(outside[i], K3_EMODEL, INDEX, "not a plain file name");
    }
    char longer[4000];
    memset(longer, 'n', sizeof longer);
    memcpy(longer, "\"a\":\"", 5);
    memcpy(longer + 3998, "\"", 2);
    index_map(longer);
    REFUSE2("a shard name of 4,000 letters", K3_EMODEL, INDEX, "malformed");
    size_t n;
    box_fresh();
    char *text = file_read(box_path(INDEX), &n);
    must(text != NULL, INDEX);
    for (size_t k = 1; k < 8; k++) {
        box_write(INDEX, text, n * k / 8);
        REFUSE2("a truncated index", K3_EMODEL, INDEX, "download");
    }
    free(text);
}

static void test_index_many(void) {
    size_t n = 0;
    char *pairs = malloc(5000 * 40);
    must(pairs != NULL, "memory");
    for (int i = 0; i < 5000; i++)
        n += (size_t)sprintf(pairs + n, "%s\"t%d\":\"s%d.safetensors\"", i ? "," : "", i, i);
    box_fresh();
    index_map(pairs);
    REFUSE("5,000 shards", K3_EMODEL, "more than 4096 shards");
    free(pairs);
}

static void test_shard_files(void) {
    box_fresh();
    must(unlink(box_path(S2)) == 0 && mkdir(box_path(S2), 0700) == 0, S2);
    REFUSE2("a shard that is a directory", K3_EIO, S2, "not a regular file");
    box_fresh();
    refuse_fifo(S2);
    box_fresh();
    refuse_fifo(INDEX);
    box_fresh();
    must(unlink(box_path(INDEX)) == 0 && mkdir(box_path(INDEX), 0700) == 0, INDEX);
    REFUSE2("an index that is a directory", K3_EIO, INDEX, "not a regular file");
    box_fresh();
    box_write(S2, "x", 1);
    chmod(box_path(S2), 0);
    if (access(box_path(S2), R_OK) == 0)
        SKIP("unreadable shard: this user reads everything");
    else
        REFUSE2("unreadable shard", K3_EIO, S2, strerror(EACCES));
    box_fresh();
    must(unlink(box_path(S2)) == 0 && symlink("/nonexistent", box_path(S2)) == 0, S2);
    REFUSE2("a dangling link", K3_EMODEL, S2, "");
}

/* ---- What is only seen when the data are read ------------------------------------------- */

/* Shard i as demo's, with the n bytes at `offset` replaced. */
static void shard_patch(int i, uint64_t offset, const void *bytes, size_t n) {
    box_write(BOX_FILE[2 + i], shard_of[i].bytes, shard_of[i].size);
    FILE *f = fopen(box_path(BOX_FILE[2 + i]), "r+b");
    must(f && fseek(f, (long)offset, SEEK_SET) == 0 && fwrite(bytes, 1, n, f) == n && fclose(f) == 0, "patch");
}

/* Verify must fail, naming both words. */
static void refuse_verify(const char *what, int status, const char *word, const char *word2) {
    k3_engine *e = NULL;
    if (!CHECK_EQ_INT(box_open(&e, true), 0)) return;
    uint64_t used = e->mem.used;
    int64_t rc = k3_engine_verify(e, &err);
    bool ok = rc == status && strstr(err.text, word) && strstr(err.text, word2) && is_one_line(err.text);
    if (!test_count(ok, __FILE__, __LINE__, what))
        printf("    got  %d, %s\n    want %d, with \"%s\" and \"%s\"\n", (int)rc, err.text, status, word, word2);
    CHECK_EQ_INT(e->mem.used, used);
    if (getenv("K3_TEST_MESSAGES")) printf("%-44.44s | %s\n", what, err.text);
    k3_engine_close(e);
}

/* Two experts of layer 5: one that IDS use, one that they do not. */
static void pick_experts(uint32_t *used, uint32_t *unused, expert_place at[2]) {
    k3_engine *e = NULL;
    k3_session *s = NULL;
    box_fresh();
    must(box_open(&e, false) == 0 && k3_session_new(&s, e, 16, &err) == 0 &&
         k3_session_feed(s, IDS, N_IDS, K3_ROWS_NONE, NULL, &err) == 0, "demo");
    *used = *unused = UINT32_MAX;
    for (uint32_t ie = 0; ie < e->sh.n_experts; ie++)
        *(store_find(e, 5, ie) ? used : unused) = ie;
    must(*used != UINT32_MAX && *unused != UINT32_MAX, "experts of layer 5");
    at[0] = *model_expert(&e->files, &e->sh, 5, *used);
    at[1] = *model_expert(&e->files, &e->sh, 5, *unused);
    k3_session_free(s);
    k3_engine_close(e);
}

static void test_scale_codes(void) {
    static const uint8_t code[] = {253, 254, 255};
    uint32_t used, unused;
    uint64_t fnv;
    expert_place at[2];
    char expert[64], where[96];
    pick_experts(&used, &unused, at);
    snprintf(expert, sizeof expert, "expert %u of layer 5: ", used);
    for (int i = 0; i < 3; i++)
        for (int k = W1_SCALE; k < N_EXPERT_TENSORS; k += 2) {
            uint64_t offset = at[0].offset[k] + 7u * (unsigned)i;
            shard_patch(1, offset, &code[i], 1);
            snprintf(where, sizeof where, "%s has scale code %u at index %d", EXPERT_TENSOR[k], code[i], 7 * i);
            refuse_verify("scale code", K3_EMODEL, expert, where);
            snprintf(where, sizeof where, "(%s, offset 0x%llx)", S2, (unsigned long long)offset);
            CHECK(strstr(err.text, where) != NULL);
            CHECK_EQ_INT(box_run(&fnv), K3_EMODEL);
            CHECK(strstr(err.text, expert) && strstr(err.text, where));
        }
    shard_patch(1, at[0].offset[W1_SCALE], "\xfc", 1); /* a scale code above 252 */
    k3_engine *e = NULL;
    CHECK(box_open(&e, true) == 0 && k3_engine_verify(e, &err) == 8 * 32);
    k3_engine_close(e);
    shard_patch(1, at[1].offset[W2_SCALE], "\xff", 1);
    SAME_RUN("a damaged expert that is not used");
    snprintf(expert, sizeof expert, "expert %u of layer 5: w2", unused);
    refuse_verify("scale code of an unused expert", K3_EMODEL, expert, "code 255");
}

/* Where the data of a tensor of demo's shard i begins in its file. */
static uint64_t tensor_begin(int i, const char *name) {
    json_object *top = header_tree(i), *at, *offsets;
    must(json_object_object_get_ex(top, name, &at) && json_object_object_get_ex(at, "data_offsets", &offsets), name);
    uint64_t begin = 8 + shard_of[i].header + json_object_get_uint64(json_object_array_get_idx(offsets, 0));
    json_object_put(top);
    return begin;
}

static void shard_zero(int i, uint64_t offset, uint64_t n) {
    uint8_t *zeros = calloc((size_t)n, 1);
    must(zeros != NULL, "memory");
    shard_patch(i, offset, zeros, (size_t)n);
    free(zeros);
}

static int count_in(const char *text, const char *word) {
    int n = 0;
    for (; (text = strstr(text, word)); text++) n++;
    return n;
}

/* Bytes that were never written are zeros. verify refuses a tensor of nothing but zeros; a run
 * notes it once. */
static void test_zeros(void) {
    uint32_t used, unused;
    uint64_t fnv, n;
    expert_place at[2];
    char expert[64], where[96];
    k3_engine *e = NULL;
    pick_experts(&used, &unused, at);
    must(box_open(&e, true) == 0, "box");
    const k3_shape sh = e->sh;
    k3_engine_close(e);
    for (int k = 0; k < N_EXPERT_TENSORS; k++) {
        snprintf(expert, sizeof expert, "expert %u of layer 5: %s", used, EXPERT_TENSOR[k]);
        snprintf(where, sizeof where, "zeros and nothing else (%s, offset 0x%llx)", S2, (unsigned long long)at[0].offset[k]);
        n = expert_tensor_bytes(&sh, k);
        shard_zero(1, at[0].offset[k], n);
        refuse_verify("an expert's tensor of zeros", K3_ECHECK, expert, where);
        CHECK(box_run(&fnv) == 0 && strstr(notes, expert) && strstr(notes, where) && strstr(notes, "k3 verify"));
        CHECK_EQ_INT(count_in(notes, "zeros and nothing else"), 1);
        shard_zero(1, at[0].offset[k] + 1, n - 1); /* all but one byte */
        if (shard_of[1].bytes[at[0].offset[k]]) {
            CHECK(box_open(&e, true) == 0 && k3_engine_verify(e, &err) == 8 * 32);
            k3_engine_close(e);
            CHECK(box_run(&fnv) == 0 && !strstr(notes, "zeros"));
        }
    }
    shard_zero(1, at[1].offset[W1_SCALE], expert_tensor_bytes(&sh, W1_SCALE)); /* no id uses it: it is not read */
    SAME_RUN("an expert of zeros that is not used");
    CHECK(!strstr(notes, "zeros"));
    shard_zero(0, tensor_begin(0, Q_PROJ), 128 * 192 * 2);
    refuse_verify("a matrix of zeros", K3_ECHECK, "self_attn.q_proj.weight of layer 0: 49152 bytes are zeros", S1);
    CHECK(box_run(&fnv) == 0 && strstr(notes, "self_attn.q_proj.weight of layer 0: 49152 bytes are zeros"));
    box_fresh();
    shard_zero(0, tensor_begin(0, LM "layers.0.self_attn.dt_bias"), 128 * 4); /* a bias may be all zeros */
    CHECK(box_open(&e, true) == 0 && k3_engine_verify(e, &err) == 8 * 32);
    k3_engine_close(e);
    box_fresh(); /* half of a shard cut off, and the file as long as it was */
    box_write(S2, shard_of[1].bytes, shard_of[1].size);
    must(truncate(box_path(S2), (off_t)(shard_of[1].size / 2)) == 0 &&
         truncate(box_path(S2), (off_t)shard_of[1].size) == 0, S2);
    refuse_verify("half of a shard", K3_ECHECK, "zeros and nothing else", S2);
    CHECK(box_run(&fnv) == 0 || notes[0]);
    CHECK_EQ_INT(count_in(notes, "zeros and nothing else"), ZEROS_NAMED);
    CHECK_EQ_INT(count_in(notes, "no more are named"), 1);
}

/* A trunk that was left empty on purpose is noted and not refused; its experts are checked. */
static void test_zeros_on_purpose(void) {
    k3_engine *e = NULL;
    char name[200];
    uint64_t fnv;
    box_fresh();
    json_object *top = header_tree(0);
    char *text = json_mutant(top, top, "__metadata__", "{\"format\":\"pt\",\"k3_sparse\":\"trunk\"}");
    shard_write(0, text, true, 0);
    free(text);
    json_object_put(top);
    struct stat st;
    must(stat(box_path(S1), &st) == 0, S1);
    uint64_t shift = (uint64_t)st.st_size - shard_of[0].size;
    FILE *f = fopen(box_path(S1), "r+b");
    uint8_t *zeros = calloc(128 * 192, 2);
    must(f && zeros && fseek(f, (long)(tensor_begin(0, Q_PROJ) + shift), SEEK_SET) == 0 &&
         fwrite(zeros, 2, 128 * 192, f) == 128 * 192 && fclose(f) == 0, S1);
    CHECK(box_open(&e, true) == 0 && k3_engine_verify(e, &err) == 8 * 32);
    CHECK_EQ_INT(count_in(notes, "left empty on purpose"), 1);
    k3_engine_close(e);
    CHECK(box_run(&fnv) == 0 && count_in(notes, "on purpose") == 1 && !strstr(notes, "zeros"));
    snprintf(name, sizeof name, LM "layers.1." MOE "experts.3.w2.weight_scale");
    f = fopen(box_path(S1), "r+b");
    must(f && fseek(f, (long)(tensor_begin(0, name) + shift), SEEK_SET) == 0 &&
         fwrite(zeros, 1, 96 * 2, f) == 96 * 2 && fclose(f) == 0, S1);
    free(zeros);
    refuse_verify("an expert of zeros in a sparse shard", K3_ECHECK, "expert 3 of layer 1: w2.weight_scale", S1);
}

static void test_not_finite(void) {
    static const struct {
        const char *name;
        int i_shard;
        uint64_t element;
        unsigned width;
        const char *bits;
    } c[] = {
        {Q_PROJ, 0, 0, 2, "\xc0\x7f"},
        {Q_PROJ, 0, 128 * 192 - 1, 2, "\x80\x7f"},
        {LM "layers.0.self_attn.dt_bias", 0, 127, 4, "\x01\x00\x80\xff"},
        {LM "layers.0.self_attn.A_log", 0, 3, 4, "\x00\x00\xc0\x7f"},
        {LM "layers.7.self_attn.q_a_layernorm.weight", 1, 5, 2, "\xff\xff"},
        {LM "embed_tokens.weight", 2, 2048 * 192 - 1, 2, "\x80\xff"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char where[96];
        uint64_t begin = tensor_begin(c[i].i_shard, c[i].name);
        box_fresh();
        shard_patch(c[i].i_shard, begin + c[i].element * c[i].width, c[i].bits, c[i].width);
        snprintf(where, sizeof where, "element %" PRIu64 " is NaN or infinite", c[i].element);
        refuse_verify(c[i].name, K3_EMODEL, c[i].name, where);
        CHECK(strstr(err.text, BOX_FILE[2 + c[i].i_shard]) != NULL);
    }
    box_fresh();
    shard_patch(0, 8 + shard_of[0].header + 640, "\xc0\x7f", 2); /* q_proj of layer 0 */
    uint64_t fnv;
    CHECK_EQ_INT(box_run(&fnv), K3_ENUMERIC);
}

/* ---- Verify goes on where it was stopped ---- */

static long calls_left; /* progress calls until the work is stopped */
static bool kills;      /* ... by SIGKILL */

static int stop_progress(void *user, const k3_progress *p) {
    (void)user;
    if (p->phase != K3_PHASE_VERIFY || calls_left < 0 || calls_left-- > 0) return 0;
    if (kills) raise(SIGKILL);
    return 1;
}

/* Verify the box, from the beginning or where it was stopped, and stop after `calls` stretches.
 * *bytes: how many were read. */
static int64_t resumed(const char *file, bool writes, long calls, uint64_t *bytes) {
    static char path[600];
    k3_engine *e = NULL;
    k3_options o;
    snprintf(path, sizeof path, "%s/k3.verify", box);
    k3_options_default(&o);
    o.model_dir = box;
    o.headers_only = true;
    o.ram_bytes = 256u << 20;
    o.note = note_keep;
    o.progress = stop_progress;
    o.resume = path;
    o.sums = file;
    o.no_check = writes;
    notes[0] = 0;
    calls_left = -1;
    must(k3_engine_open(&e, &o, &err) == 0, err.text);
    calls_left = calls;
    int64_t rc = writes ? k3_engine_write_sums(e, true, &err) : k3_engine_verify(e, &err);
    if (bytes) *bytes = e->io.read_bytes;
    k3_engine_close(e);
    return rc;
}

static void test_resume(void) {
    uint64_t all, part, rest;
    char path[600], first[600], again[600];
    struct stat st;
    snprintf(path, sizeof path, "%s/k3.verify", box);
    snprintf(first, sizeof first, "%s/a.sums", box);
    snprintf(again, sizeof again, "%s/b.sums", box);
    box_fresh();
    for (int i = 0; i < 3; i++) { /* files of its own, not links to demo */
        must(unlink(box_path(BOX_FILE[2 + i])) == 0, "box");
        box_write(BOX_FILE[2 + i], shard_of[i].bytes, shard_of[i].size);
    }
    CHECK(resumed(NULL, false, -1, &all) == 8 * 32 && !notes[0] && access(path, F_OK) != 0);
    CHECK_EQ_INT(resumed(NULL, false, 300, &part), K3_ECANCEL);
    CHECK(stat(path, &st) == 0 && (st.st_mode & 077) == 0 && part > all / 4 && part < all);
    CHECK(resumed(NULL, false, -1, &rest) == 8 * 32 && strstr(notes, "goes on where it was stopped, at "));
    CHECK(part + rest <= all + VERIFY_AHEAD * 65536 && rest < all * 3 / 4); /* reads ahead are repeated */
    CHECK(access(path, F_OK) != 0);

    pid_t child = fork(); /* killed: it goes on from the last number that was written */
    if (child == 0) kills = true, resumed(NULL, false, 300, NULL), _exit(0);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && access(path, F_OK) == 0);
    CHECK(resumed(NULL, false, -1, &rest) == 8 * 32 && rest < all * 3 / 4 && strstr(notes, "goes on"));

    CHECK_EQ_INT(resumed(NULL, false, 300, NULL), K3_ECANCEL); /* a file that changes is read again */
    shard_zero(0, tensor_begin(0, Q_PROJ), 128 * 192 * 2);
    CHECK_EQ_INT(resumed(NULL, false, -1, NULL), K3_ECHECK);
    CHECK(strstr(err.text, "q_proj.weight of layer 0") && strstr(notes, "1 file changed since and is read again"));
    CHECK_EQ_INT(resumed(NULL, false, -1, NULL), K3_ECHECK); /* and again, until it is good */
    box_write(S1, shard_of[0].bytes, shard_of[0].size);
    CHECK_EQ_INT(resumed(NULL, false, -1, &rest), 8 * 32);
    CHECK(rest > shard_of[0].size - 100000 && access(path, F_OK) != 0);

    CHECK_EQ_INT(resumed(first, true, -1, NULL), 8 * 32); /* sums so far are kept */
    CHECK_EQ_INT(resumed(again, true, 200, NULL), K3_ECANCEL);
    CHECK(access(again, F_OK) != 0);
    CHECK_EQ_INT(resumed(again, true, 150, NULL), K3_ECANCEL);
    CHECK(resumed(again, true, -1, &rest) == 8 * 32 && rest < all * 2 / 3 && strstr(notes, "goes on"));
    size_t n_a, n_b;
    char *a = file_read(first, &n_a), *b = file_read(again, &n_b);
    CHECK(a && b && n_a == n_b && memcmp(a, b, n_a) == 0);
    free(a);
    free(b);

    CHECK_EQ_INT(resumed(first, false, 300, NULL), K3_ECANCEL); /* another check begins at the beginning */
    CHECK(resumed(NULL, false, 10, NULL) == K3_ECANCEL && strstr(notes, "begins at the beginning"));
    for (int way = 0; way < 4; way++) { /* and so does a check whose file cannot be believed */
        CHECK(resumed(NULL, false, 300, NULL) == K3_ECANCEL && stat(path, &st) == 0);
        FILE *f = fopen(path, "r+b");
        must(f && fseek(f, 24, SEEK_SET) == 0 && (way != 0 || fputc(77, f) >= 0) && fclose(f) == 0, path);
        if (way == 1) must(truncate(path, st.st_size - 1) == 0, path);
        if (way == 2) must(chmod(path, 0666) == 0, path);
        if (way == 3) must(rename(path, again) == 0 && symlink(again, path) == 0, path);
        CHECK(resumed(NULL, false, -1, &rest) == 8 * 32 && rest == all && strstr(notes, "begins at the beginning"));
        unlink(path);
    }
}

/* The shard with layers 5.. shrinks after open: the next expert read says so. */
static void test_shard_shrinks(void) {
    k3_engine *e = NULL;
    k3_session *s = NULL;
    box_fresh();
    box_write(S2, shard_of[1].bytes, shard_of[1].size);
    must(box_open(&e, false) == 0 && k3_session_new(&s, e, 16, &err) == 0, "box");
    must(truncate(box_path(S2), (off_t)(8 + shard_of[1].header)) == 0, S2);
    CHECK_EQ_INT(k3_session_feed(s, IDS, N_IDS, K3_ROWS_NONE, NULL, &err), K3_EIO);
    if (!CHECK(strstr(err.text, S2) && strstr(err.text, "expert ") && strstr(err.text, "of layer 5")))
        printf("    %s\n", err.text);
    CHECK_EQ_INT(k3_session_feed(s, IDS, 1, K3_ROWS_NONE, NULL, &err), K3_EUSAGE);
    k3_session_free(s);
    k3_engine_close(e);
    box_write(S2, shard_of[1].bytes, shard_of[1].size);
    must(box_open(&e, true) == 0, "box");
    must(truncate(box_path(S2), (off_t)(shard_of[1].size - 1)) == 0, S2);
    CHECK_EQ_INT(k3_engine_verify(e, &err), K3_EIO);
    CHECK(strstr(err.text, S2) != NULL);
    k3_engine_close(e);
}

/* Reads that are short or interrupted change nothing; EIO and an early end are errors. */
static void test_disk(void) {
    uint64_t fnv;
    box_fresh();
    fault = DISK_SHORT;
    SAME_RUN("short reads");
    fault = DISK_EINTR;
    SAME_RUN("interrupted reads");
    for (int kind = DISK_EIO; kind <= DISK_END; kind++) {
        int rc = K3_EIO;
        for (long k = 0; rc == K3_EIO && k < 4000; k = k < 8 ? k + 1 : k * 5 / 4) {
            disk_left = k;
            fault = (unsigned char)kind;
            int n_fds = fd_count();
            rc = box_run(&fnv);
            fault = DISK_OK;
            if (rc == K3_EIO) CHECK(strstr(err.text, ".safetensors") && is_one_line(err.text));
            CHECK_EQ_INT(fd_count(), n_fds);
        }
        CHECK_EQ_INT(rc, 0); /* in the end there were no more reads */
    }
    fault = DISK_OK;
}

/* Each allocation of the engine fails in turn: K3_ENOMEM, and nothing is left behind. */
static void test_no_memory(void) {
    for (int pass = 0; pass < 2; pass++) {
        int rc = K3_ENOMEM;
        long k = 0;
        box_fresh();
        if (pass == 1) must(unlink(box_path(INDEX)) == 0, INDEX);
        for (; rc == K3_ENOMEM && k < 500; k++) {
            k3_engine *e = NULL;
            int n_fds = fd_count();
            alloc_left = k;
            rc = box_open(&e, false);
            alloc_left = -1;
            k3_engine_close(e);
            CHECK_EQ_INT(fd_count(), n_fds);
            if (rc == K3_ENOMEM) CHECK(strstr(err.text, "out of memory") && e == NULL);
        }
        if (!CHECK_EQ_INT(rc, 0)) printf("    allocation %ld: %s\n", k - 1, err.text);
        CHECK(k > 10);
    }
}

/* ---- The same model told otherwise ------------------------------------------------------- */

/* Flat config, names without a prefix, no index: what small checkpoints look like. */
static void test_flat(void) {
    json_object *text, *top = config_tree(&text);
    box_fresh();
    must(unlink(box_path(INDEX)) == 0, INDEX);
    box_text("config.json", json_object_to_json_string(text));
    json_object_put(top);
    ACCEPT("flat config");
    for (int i = 0; i < 3; i++) {
        json_object *from = header_tree(i), *to = json_object_new_object();
        json_object_object_foreach(from, name, v) {
            const char *plain = name;
            skip_prefix(&plain, "language_model.");
            json_object_object_add(to, plain, json_object_get(v));
        }
        shard_write(i, json_object_to_json_string_ext(to, JSON_C_TO_STRING_PLAIN), true, 0);
        json_object_put(from);
        json_object_put(to);
    }
    SAME_RUN("flat config, names without prefix, no index");
}

/* A_log moved to the end of its shard and padded: only the first entries count. */
static void test_padded_a_log(void) {
    json_object *top = header_tree(0);
    char entry[200];
    uint64_t at = data_bytes(0);
    box_fresh();
    snprintf(entry, sizeof entry, "{\"dtype\":\"F32\",\"shape\":[300],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
             at, at + 1200);
    char *text = json_mutant(top, top, A_LOG, entry);
    shard_write(0, text, true, 1200);
    FILE *f = fopen(box_path(S1), "r+b");
    must(f && fseek(f, (long)(8 + strlen(text) + at), SEEK_SET) == 0 &&
         fwrite(shard_of[0].bytes + 8 + shard_of[0].header, 1, 16, f) == 16, S1);
    for (int i = 4; i < 300; i++) must(fwrite("\0\0\xc0\x7f", 1, 4, f) == 4, S1); /* never read */
    fclose(f);
    free(text);
    json_object_put(top);
    SAME_RUN("a padded A_log");
    k3_engine *e = NULL;
    CHECK(box_open(&e, true) == 0 && k3_engine_verify(e, &err) == 8 * 32);
    k3_engine_close(e);
}

static void test_headers(const char *dir) {
    bool has_index = false;
    char path[600];
    if (!headers_make(dir, &has_index)) {
        SKIP("96 headers at the released geometry: no space for sparse files");
        return;
    }
    headers_measure(dir, "every *.safetensors read");
    if (has_index)
        headers_measure(dir, "with the released index");
    else
        SKIP("96 headers with the released index: no zstd");
    snprintf(path, sizeof path, "%s/" INDEX, dir);
    if (!has_index) return;
    for (unsigned i = 95; i <= 96; i++) { /* vision shards may be absent */
        snprintf(path, sizeof path, "%s/model-%05u-of-000096.safetensors", dir, i);
        unlink(path);
    }
    headers_measure(dir, "without the vision shards");
}

static void test_refusals(void) {
    test_config_fields();
    test_config_values();
    test_config_layers();
    test_config_text();
    test_config_deep();
    test_config_file();
    test_config_stranger();
    test_config_only();
    test_header_entries();
    test_header_kinds();
    test_header_missing();
    test_header_twice();
    test_header_accepted();
    test_header_notes();
    test_header_length();
    test_shard_truncated();
    test_index_shards();
    test_index_incomplete();
    test_index_text();
    test_index_many();
    test_shard_files();
    test_scale_codes();
    test_zeros();
    test_zeros_on_purpose();
    test_resume();
    test_not_finite();
    test_shard_shrinks();
    test_disk();
    test_no_memory();
    test_flat();
    test_padded_a_log();
    test_bomb("config.json");
    test_bomb(INDEX);
    test_bomb(S2);
    test_counts();
}

static void box_new(void) {
    const char *tmp = getenv("TMPDIR");
    snprintf(box, sizeof box - 16, "%.200s/k3-test-model-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    must(mkdtemp(box) != NULL, box);
    must(realpath("demo", demo) != NULL, "demo: run from the top of the source tree");
}

int main(int argc, char **argv) {
    bool has_index;
    if (argc == 3 && strcmp(argv[1], "--open") == 0) return child_open(argv[2]);
    test_begin("model");
    test_real_shape();
    if (argc == 3 && strcmp(argv[1], "--make-headers") == 0) return !headers_make(argv[2], &has_index);
    test_real_bytes();
    test_real_index();
    box_new();
    test_headers(box);
    demo_load();
    box_fresh();
    if (CHECK_EQ_INT(box_run(&demo_fnv), 0)) test_refusals();
    else printf("    %s\n", err.text);
    box_empty();
    rmdir(box);
    for (int i = 0; i < 3; i++) free(shard_of[i].bytes);
    return test_finish();
}
