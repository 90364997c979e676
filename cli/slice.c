/* slice.c - `k3 slice` and `k3 stage`: experts for a box that has no checkpoint.
 *
 *   1 Which experts, and reading them ahead
 *   2 k3 slice: where it goes, what is there already
 *   3 k3 slice: shards, index, the end
 *   4 k3 stage: frames
 *   5 k3 stage: hello, experts one by one
 *
 * What holds everywhere:
 *   - experts are read by the engine, so scale codes are checked, and sums where the model has them;
 *   - a slice is unfinished until k3.slice is there, and that is renamed into its place last;
 *   - what was written or sent before an interruption is not written or sent again.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "experts.h"
#include "k3_common.h"
#include "k3_temp.h"
#include "slice.h"
#include "tier_dial.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <sys/statvfs.h>
#include <time.h>

/* ==== 1. Which experts, and reading them ahead ======================================== */

typedef struct {
    slice_expert *at;
    uint32_t n;
} expert_list;

static int pins_add(void *user, uint32_t il, uint32_t ie) {
    expert_list *list = user;
    list->at[list->n++] = (slice_expert){il, ie, 0};
    return 0;
}

/* Experts named in the file of pins; *list is the caller's to free. */
static int pins_read(const char *path, const k3_shape *sh, slice_expert **list, uint32_t *n) {
    size_t n_all = (size_t)(sh->n_layers - sh->n_dense) * sh->n_experts;
    expert_list to = {calloc(n_all, sizeof *to.at), 0};
    k3_error err = {{0}};
    *list = to.at;
    *n = 0;
    if (!to.at) return fail_memory("the pins", n_all * sizeof *to.at);
    int64_t rc = k3_pins_visit(path, sh, pins_add, &to, &err);
    if (rc < 0) return fail_status((int)rc, &err);
    *n = to.n;
    return to.n > 0 ? DONE : fail(FAIL_USAGE, "%s: names no expert", path);
}

/* Every expert, all layers alike. */
static int pins_all(const k3_shape *sh, slice_expert **list, uint32_t *n) {
    size_t n_all = (size_t)(sh->n_layers - sh->n_dense) * sh->n_experts;
    *list = calloc(n_all, sizeof **list);
    *n = 0;
    if (!*list) return fail_memory("a list of experts", n_all * sizeof **list);
    for (uint32_t ie = 0; ie < sh->n_experts; ie++)
        for (uint32_t il = sh->n_dense; il < sh->n_layers; il++)
            (*list)[(*n)++] = (slice_expert){il, ie, 0};
    return DONE;
}

/* One expert being read, by a thread of its own. */
typedef struct {
    k3_engine *e;
    const uint64_t *lengths; /* of its six tensors                  */
    slice_expert x;          /* its sum is known when it was read   */
    uint8_t *room;
    pthread_t thread;
    bool has_thread;
    int status;
    expert_view view;
    k3_error err;
} reading;

#define AHEAD 4

/* Experts of a list in order, AHEAD - 1 of them on their way while one is used. */
typedef struct {
    const slice_expert *list;
    uint32_t n, i_begin, i_take;
    uint64_t lengths[N_EXPERT_TENSORS];
    reading r[AHEAD];
} feed;

static void *reading_main(void *arg) {
    reading *r = arg;
    r->status = k3_expert_read(r->e, r->x.il, r->x.ie, r->room, &r->view, &r->err);
    if (r->status < 0) return NULL;
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) {
        r->status = K3_ENOMEM;
        return NULL;
    }
    XXH3_64bits_reset(hash);
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        XXH3_64bits_update(hash, r->view.p[k], (size_t)r->lengths[k]);
    r->x.sum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return NULL;
}

static int feed_open(feed *f, k3_engine *e) {
    const k3_shape *sh = k3_engine_shape(e);
    memset(f, 0, sizeof *f);
    expert_lengths(sh->latent, sh->expert_inter, f->lengths);
    for (int i = 0; i < AHEAD; i++) {
        void *room = NULL;
        if (posix_memalign(&room, 4096, (size_t)k3_expert_room(e)) != 0)
            return fail_memory("experts to read ahead", AHEAD * (size_t)k3_expert_room(e));
        f->r[i].e = e;
        f->r[i].room = room;
        f->r[i].lengths = f->lengths;
    }
    return DONE;
}

/* Wait for what is being read, and forget the list. */
static void feed_stop(feed *f) {
    for (int i = 0; i < AHEAD; i++)
        if (f->r[i].has_thread) pthread_join(f->r[i].thread, NULL);
    for (int i = 0; i < AHEAD; i++) f->r[i].has_thread = false;
}

static void feed_close(feed *f) {
    feed_stop(f);
    for (int i = 0; i < AHEAD; i++) free(f->r[i].room);
}

static void feed_start(feed *f, const slice_expert *list, uint32_t n) {
    feed_stop(f);
    f->list = list;
    f->n = n;
    f->i_begin = f->i_take = 0;
}

/* The next expert of the list, until the next call; read, or r->status and r->err say why not. */
static const reading *feed_next(feed *f) {
    for (; f->i_begin < f->n && f->i_begin < f->i_take + AHEAD; f->i_begin++) {
        reading *r = &f->r[f->i_begin % AHEAD];
        r->x = f->list[f->i_begin];
        r->has_thread = pthread_create(&r->thread, NULL, reading_main, r) == 0;
        if (!r->has_thread) reading_main(r);
    }
    reading *r = &f->r[f->i_take++ % AHEAD];
    if (r->has_thread) pthread_join(r->thread, NULL);
    r->has_thread = false;
    return r;
}

/* What both commands begin with. */
typedef struct {
    k3_engine *e;
    const k3_shape *sh;
    const char *dir;
    k3_fingerprints print;
    slice_expert *list;
    uint32_t n;
    k3_options o; /* for its progress */
    console con;
    uint64_t base; /* bytes that were done when it began */
    feed feed;
} job;

static int job_open(job *j, const cli_args *a) {
    k3_error err = {{0}};
    memset(j, 0, sizeof *j);
    console_init(&j->con, a->quiet);
    int rc = model_find(a, &j->dir);
    if (rc != DONE) return rc;
    signals_catch();
    j->o = engine_options(a, j->dir, &j->con);
    j->o.headers_only = true;
    j->o.pins = NULL;
    if ((rc = engine_open(&j->e, &j->o)) != DONE) return rc;
    j->sh = k3_engine_shape(j->e);
    if (j->sh->n_layers == j->sh->n_dense)
        return fail(FAIL_MODEL, "%s: a model without experts", j->dir);
    int status = k3_expert_fingerprints(j->e, &j->print, &err);
    if (status < 0) return fail_status(status, &err);
    rc = a->engine.pins ? pins_read(a->engine.pins, j->sh, &j->list, &j->n)
                        : pins_all(j->sh, &j->list, &j->n);
    return rc == DONE ? feed_open(&j->feed, j->e) : rc;
}

static void job_close(job *j) {
    console_clear(&j->con);
    feed_close(&j->feed);
    free(j->list);
    k3_engine_close(j->e);
}

/* Say how far it is, in bytes; INTERRUPTED when Ctrl-C was pressed. What a run before has done is
 * not this one's speed. */
static int job_progress(job *j, uint64_t done, uint64_t total) {
    done -= j->base;
    const k3_progress p = {K3_PHASE_LOAD, done, total - j->base, -1, done};
    return j->o.progress(j->o.user, &p) ? INTERRUPTED : DONE;
}

/* ==== 2. k3 slice: where it goes, what is there already ===============================
 *
 * k3.slice.part is the list as far as whole shards have been written and are safe on the disk; its
 * lock says that somebody is writing. A run that finds one of the same experts goes on behind the
 * last whole shard, whatever became of the run before. */

#define LIST_ROOM (8 * SLICE_LINE)

typedef struct {
    job *j;
    const char *dir;
    slice man;                           /* the manifest to be; its list is j->list */
    uint32_t per_shard, n_shards, first; /* first: the first shard to write */
    char *config;
    size_t n_config;
    int fd_list;
    uint64_t written, total; /* bytes of experts, those of whole shards included */
} slicing;

static void path_make(const slicing *s, char path[4352], const char *name) {
    snprintf(path, 4352, "%s/%s", s->dir, name);
}

static void shard_name(const slicing *s, uint32_t i, char name[64]) {
    snprintf(name, 64, "model-%05u-of-%06u.safetensors", i + 1, s->n_shards);
}

/* Experts [*first, *first + n) are in shard i. */
static uint32_t shard_experts(const slicing *s, uint32_t i, uint32_t *first) {
    *first = i * s->per_shard;
    return s->man.n - *first < s->per_shard ? s->man.n - *first : s->per_shard;
}

/* How shard i begins (k3_shard_head). */
static char *header_make(const slicing *s, uint32_t i_shard, size_t *n) {
    uint32_t first, n_experts = shard_experts(s, i_shard, &first);
    return k3_shard_head(s->j->e, s->man.latent, s->man.inter, s->man.sampled,
                         s->j->list + first, n_experts, n);
}

/* Bytes of shard i; 0: no memory. */
static uint64_t shard_bytes(const slicing *s, uint32_t i) {
    uint32_t first;
    size_t n;
    char *text = header_make(s, i, &n);
    free(text);
    return text ? n + shard_experts(s, i, &first) * s->j->sh->expert_bytes : 0;
}

/* How many experts fit into `size`, and into how many shards. Headers and lists are counted as long
 * as they can be. */
static int slicing_fit(slicing *s, const cli_args *a) {
    const k3_shape *sh = s->j->sh;
    char name[256];
    k3_expert_name(s->j->e, sh->n_layers - 1, sh->n_experts - 1, 0, name, sizeof name);
    uint64_t each = sh->expert_bytes + N_EXPERT_TENSORS * (2 * strlen(name) + 160) + 48,
             fixed = s->n_config + 16384;
    uint64_t per = a->slice.shard_size / sh->expert_bytes;
    s->per_shard = per < 1 ? 1 : per > 32768 ? 32768 : (uint32_t)per;
    each += 8192 / s->per_shard + 1; /* a shard's own */
    uint64_t n = a->slice.size > fixed ? (a->slice.size - fixed) / each : 0;
    if (n == 0)
        return fail(FAIL_USAGE,
                    "--size of %llu bytes is too small for one expert: give at least %llu",
                    (unsigned long long)a->slice.size, (unsigned long long)(fixed + each));
    if (n > s->j->n && !a->quiet)
        say("note: --pins names %u experts; there would be room for %llu", s->j->n,
            (unsigned long long)n);
    s->man.n = n < s->j->n ? (uint32_t)n : s->j->n;
    s->n_shards = (s->man.n + s->per_shard - 1) / s->per_shard;
    s->total = s->man.n * sh->expert_bytes;
    if (s->n_shards <= 4096) return DONE;
    return fail(FAIL_USAGE, "--shard: %u files are more than a model may have; give a larger one",
                s->n_shards);
}

static int slicing_describe(slicing *s) {
    const k3_shape *sh = s->j->sh;
    char path[4352];
    snprintf(path, sizeof path, "%s/config.json", s->j->dir);
    s->config = slice_file_read(path, 64u << 20, &s->n_config);
    if (!s->config)
        return fail(FAIL_IO, "%s: %s", path, errno ? strerror(errno) : "longer than 64 MiB");
    snprintf(s->man.numerics, sizeof s->man.numerics, "%s", K3_NUMERICS_ID);
    s->man.version = 2;
    s->man.sampled = s->j->print.sampled;
    s->man.by_sums = s->j->print.by_sums;
    s->man.config_sum = XXH3_64bits(s->config, s->n_config);
    s->man.n_layers = sh->n_layers;
    s->man.n_dense = sh->n_dense;
    s->man.n_experts = sh->n_experts;
    s->man.latent = sh->latent;
    s->man.inter = sh->expert_inter;
    s->man.top_k = sh->top_k;
    s->man.beta_bits = k3_f32_bits(sh->situ_beta);
    s->man.linear_beta_bits = k3_f32_bits(sh->situ_linear_beta);
    s->man.list = s->j->list;
    return DONE;
}

/* Are these the experts that are wanted, as far as they are there? Their sums are taken over. */
static bool slicing_same(slicing *s, const slice *there) {
    char a[LIST_ROOM], b[LIST_ROOM];
    size_t n = slice_head_write(&s->man, a);
    if (slice_head_write(there, b) != n || memcmp(a, b, n) != 0) return false;
    for (uint32_t i = 0; i < there->n_done; i++)
        if (there->list[i].il != s->j->list[i].il || there->list[i].ie != s->j->list[i].ie)
            return false;
    for (uint32_t i = 0; i < there->n_done; i++) s->j->list[i].sum = there->list[i].sum;
    return true;
}

/* 1: the very slice is there and whole; 0: none is. */
static int dir_finished(slicing *s, int *rc) {
    char path[4352];
    size_t n;
    slice there;
    path_make(s, path, SLICE_NAME);
    if (access(path, F_OK) != 0) return 0;
    char *text = slice_file_read(path, SLICE_MAX_BYTES, &n);
    bool is_same = text && !slice_parse(text, n, false, &there, NULL) && slicing_same(s, &there);
    if (text) free(there.list);
    free(text);
    if (!is_same)
        *rc = fail(FAIL_USAGE, "--out %s: there is another slice; name another directory", s->dir);
    return 1;
}

static bool is_shard_name(const char *name) {
    size_t n = strlen(name);
    if (n > 5 && strcmp(name + n - 5, ".part") == 0) n -= 5;
    return n == strlen("model-00001-of-000001.safetensors") && strncmp(name, "model-", 6) == 0 &&
           strspn(name + 6, "0123456789") == 5 && strncmp(name + 11, "-of-", 4) == 0 &&
           strspn(name + 15, "0123456789") == 6 && strncmp(name + 21, ".safetensors", 12) == 0;
}

/* Only an empty directory, or one with our own unfinished work, is written to. */
static int dir_is_ours(const slicing *s) {
    char path[4352];
    int rc = DONE;
    path_make(s, path, SLICE_PART);
    bool has_part = access(path, F_OK) == 0;
    DIR *d = opendir(s->dir);
    if (!d) return fail(FAIL_IO, "--out %s: %s", s->dir, strerror(errno));
    for (struct dirent *e; !has_part && rc == DONE && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            strcmp(e->d_name, "lost+found") != 0)
            rc = fail(FAIL_USAGE,
                      "--out %s: not empty, and no unfinished slice; name another directory",
                      s->dir);
    closedir(d);
    return rc;
}

/* Whole shards that are there, by the list and by their size. */
static uint32_t shards_whole(const slicing *s, uint32_t n_listed) {
    uint32_t i = 0, first;
    for (; i < s->n_shards; i++) {
        char name[64], path[4352];
        struct stat st;
        uint32_t n = shard_experts(s, i, &first);
        shard_name(s, i, name);
        path_make(s, path, name);
        if (first + n > n_listed || stat(path, &st) != 0 ||
            (uint64_t)st.st_size != shard_bytes(s, i))
            break;
    }
    return i;
}

/* Remove shards, and parts of some, that a run before left and this one does not want. */
static void shards_sweep(const slicing *s) {
    DIR *d = opendir(s->dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        char name[64], path[4352];
        bool is_wanted = false;
        if (!is_shard_name(e->d_name)) continue;
        for (uint32_t i = 0; i < s->first && !is_wanted; i++) {
            shard_name(s, i, name);
            is_wanted = strcmp(name, e->d_name) == 0;
        }
        path_make(s, path, e->d_name);
        if (!is_wanted) unlink(path);
    }
    if (d) closedir(d);
}

/* The list so far, locked; what it says beyond whole shards is forgotten. */
static int list_open(slicing *s) {
    char path[4352], whole[4352], head[LIST_ROOM];
    size_t n = 0, n_head = slice_head_write(&s->man, head);
    slice there = {.n_done = 0};
    k3_error err = {{0}};
    path_make(s, path, SLICE_PART);
    int taken = k3_temp_open(path, K3_TEMP_PUBLIC, &s->fd_list, &err);
    if (taken > 0) return fail(FAIL_IO, "%s: another process is writing this slice", path);
    if (taken < 0) return fail_status(taken, &err);
    path_make(s, whole, SLICE_NAME);
    if (access(whole, F_OK) == 0) { /* another process was, until just now */
        unlink(path);
        return fail(FAIL_IO, "%s: was just finished by another process; start again to see", whole);
    }
    char *text = slice_file_read(path, SLICE_MAX_BYTES, &n);
    if (!text)
        return fail(FAIL_IO, "%s: %s", path, errno ? strerror(errno) : "longer than it can be");
    bool is_begun = n >= n_head || memcmp(text, head, n) != 0;
    const char *why = is_begun ? slice_parse(text, n, true, &there, NULL) : NULL;
    bool is_same = !is_begun || (!why && slicing_same(s, &there));
    s->first = is_begun && is_same ? shards_whole(s, there.n_done) : 0;
    if (is_begun) free(there.list);
    free(text);
    if (!is_same)
        return fail(FAIL_USAGE,
                    "--out %s: there is an unfinished slice of other experts or another model; "
                    "remove it, or name another directory",
                    s->dir);
    uint32_t keep = s->first == s->n_shards ? s->man.n : s->first * s->per_shard;
    s->written = keep * s->j->sh->expert_bytes;
    bool is_ok = ftruncate(s->fd_list, 0) == 0 && lseek(s->fd_list, 0, SEEK_SET) == 0 &&
                 slice_write_all(s->fd_list, head, n_head);
    for (uint32_t i = 0; i < keep && is_ok; i++)
        is_ok = slice_write_all(s->fd_list, head, slice_expert_write(&s->j->list[i], head));
    if (!is_ok || fsync(s->fd_list) != 0) return fail(FAIL_IO, "%s: %s", path, strerror(errno));
    shards_sweep(s);
    return DONE;
}

/* Is there room on the disk for what is still to be written? */
static int dir_has_room(const slicing *s) {
    struct statvfs v;
    char want[32], has[32];
    uint64_t n = s->n_config + 65536 + (uint64_t)s->man.n * (N_EXPERT_TENSORS * 160 + 48);
    for (uint32_t i = s->first; i < s->n_shards; i++) n += shard_bytes(s, i);
    if (statvfs(s->dir, &v) != 0) return fail(FAIL_IO, "--out %s: %s", s->dir, strerror(errno));
    uint64_t room = (uint64_t)v.f_bavail * v.f_frsize;
    if (room >= n) return DONE;
    char path[4352];
    path_make(s, path, SLICE_PART);
    if (s->first == 0) unlink(path); /* nothing was written */
    return fail(FAIL_IO, "--out %s: %s to write, %s free; make room, or give a smaller --size",
                s->dir, fmt_bytes(want, n), fmt_bytes(has, room));
}

/* ==== 3. k3 slice: shards, index, the end ============================================= */

static int fail_write(const char *path) {
    return fail(FAIL_IO, "%s: %s; whole shards stay: run it again to go on", path, strerror(errno));
}

/* The experts of a shard behind its header. Its sums are then known. */
static int shard_fill(slicing *s, int fd, uint32_t i_shard, const char *path) {
    uint32_t first, n = shard_experts(s, i_shard, &first);
    for (uint32_t i = first; i < first + n; i++) {
        const reading *r = feed_next(&s->j->feed);
        if (r->status < 0) {
            console_clear(&s->j->con);
            return fail_status(r->status, &r->err);
        }
        for (int k = 0; k < N_EXPERT_TENSORS; k++)
            if (!slice_write_all(fd, r->view.p[k], (size_t)s->j->feed.lengths[k])) {
                console_clear(&s->j->con);
                return fail_write(path);
            }
        s->j->list[i].sum = r->x.sum;
        s->written += s->j->sh->expert_bytes;
        if (job_progress(s->j, s->written, s->total) != DONE) {
            console_clear(&s->j->con);
            return fail(INTERRUPTED, "interrupted; the same command goes on");
        }
    }
    return DONE;
}

/* A whole shard, or nothing. */
static int shard_write(slicing *s, uint32_t i_shard) {
    char name[64], path[4352], part[4360], line[SLICE_LINE];
    uint32_t first, n = shard_experts(s, i_shard, &first);
    size_t n_head;
    char *head = header_make(s, i_shard, &n_head);
    if (!head) return fail_memory("the header of a shard", n * 2000);
    shard_name(s, i_shard, name);
    path_make(s, path, name);
    snprintf(part, sizeof part, "%s.part", path);
    int rc = DONE, fd = slice_part_open(part);
    if (fd < 0 || !slice_write_all(fd, head, n_head)) rc = fail_write(part);
    free(head);
    if (rc == DONE) rc = shard_fill(s, fd, i_shard, part);
    if (rc == DONE && fsync(fd) != 0) rc = fail_write(part);
    if (rc == DONE) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (fd >= 0) close(fd);
    if (rc == DONE && rename(part, path) != 0) rc = fail_write(path);
    if (rc != DONE) {
        unlink(part);
        return rc;
    }
    slice_dir_sync(s->dir);
    for (uint32_t i = first; i < first + n && rc == DONE; i++)
        if (!slice_write_all(s->fd_list, line, slice_expert_write(&s->j->list[i], line)))
            rc = fail_write(SLICE_PART);
    if (rc == DONE && fsync(s->fd_list) != 0) rc = fail_write(SLICE_PART);
    return rc;
}

static int file_write(const slicing *s, const char *name, const char *text, size_t n) {
    char path[4352];
    path_make(s, path, name);
    return slice_file_write(s->dir, name, text, n) ? DONE : fail_write(path);
}

static int index_write(const slicing *s) {
    size_t cap = 4096 + (size_t)s->man.n * N_EXPERT_TENSORS * 320, n;
    char name[256], file[64], *text = malloc(cap);
    if (!text) return fail_memory("the index", cap);
    n = (size_t)snprintf(text, cap,
                         "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n"
                         "  \"weight_map\": {",
                         (unsigned long long)s->total);
    for (uint32_t i = 0; i < s->man.n; i++)
        for (int k = 0; k < N_EXPERT_TENSORS; k++) {
            shard_name(s, i / s->per_shard, file);
            k3_expert_name(s->j->e, s->j->list[i].il, s->j->list[i].ie, k, name, sizeof name);
            n += (size_t)snprintf(text + n, cap - n, "%s\n    \"%s\": \"%s\"",
                                  i + (uint32_t)k ? "," : "", name, file);
        }
    n += (size_t)snprintf(text + n, cap - n, "\n  }\n}\n");
    int rc = file_write(s, "model.safetensors.index.json", text, n);
    free(text);
    return rc;
}

/* All is written: close the list with its sum and give it its name. */
static int slicing_finish(slicing *s) {
    char part[4352], path[4352], end[SLICE_LINE];
    size_t n = 0;
    int rc = file_write(s, "config.json", s->config, s->n_config);
    if (rc == DONE) rc = index_write(s);
    if (rc != DONE) return rc;
    slice_dir_sync(s->dir);
    path_make(s, part, SLICE_PART);
    path_make(s, path, SLICE_NAME);
    char *text = slice_file_read(part, SLICE_MAX_BYTES, &n);
    bool is_ok = text && slice_write_all(s->fd_list, end, slice_end_write(text, n, end)) &&
                 fsync(s->fd_list) == 0 && rename(part, path) == 0;
    free(text);
    slice_dir_sync(s->dir);
    return is_ok ? DONE : fail_write(path);
}

static int slicing_write(slicing *s) {
    uint64_t start = clock_ns(), before = s->written;
    char size[32];
    int rc = DONE;
    s->j->con.verb = "writing";
    s->j->base = before;
    job_progress(s->j, before, s->total);
    uint32_t skip = s->first * s->per_shard < s->man.n ? s->first * s->per_shard : s->man.n;
    feed_start(&s->j->feed, s->j->list + skip, s->man.n - skip);
    for (uint32_t i = s->first; i < s->n_shards && rc == DONE; i++) rc = shard_write(s, i);
    if (rc == DONE) rc = slicing_finish(s);
    console_clear(&s->j->con);
    if (rc != DONE) return rc;
    printf("%s: %u experts (%s) in %u shard%s%s", s->dir, s->man.n, fmt_bytes(size, s->total),
           s->n_shards, s->n_shards == 1 ? "" : "s",
           k3_engine_has_sums(s->j->e) ? ", checked with the model's sums" : "");
    if (s->first > 0) printf("; %u shard%s there", s->first, s->first == 1 ? " was" : "s were");
    printf("; %.2f GB/s\n", per_second(s->written - before, clock_ns() - start) * 1e-9);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

int cmd_slice(const cli_args *a) {
    static job j;
    slicing s = {.j = &j, .dir = a->slice.out, .fd_list = -1};
    if (!a->engine.pins)
        return fail(FAIL_USAGE,
                    "slice: which experts? --pins FILE says; `k3 run --trace T ...`, then "
                    "`k3 bench --replay T --write-pins FILE` make it");
    if (!a->slice.size) return fail(FAIL_USAGE, "slice: --size SIZE: how many bytes may it take?");
    if (!a->slice.out || !a->slice.out[0]) return fail(FAIL_USAGE, "slice: --out DIR: where to?");
    if (strlen(a->slice.out) > 4000) return fail(FAIL_USAGE, "--out: a name of 4000 bytes at most");
    int rc = job_open(&j, a);
    if (rc == DONE) rc = slicing_describe(&s);
    if (rc == DONE) rc = slicing_fit(&s, a);
    if (rc == DONE && mkdir(a->slice.out, 0777) != 0 && errno != EEXIST)
        rc = fail(FAIL_IO, "--out %s: %s", a->slice.out, strerror(errno));
    if (rc == DONE && dir_finished(&s, &rc)) {
        if (rc == DONE && !a->quiet) say("%s: this slice is there, whole", a->slice.out);
        goto done;
    }
    if (rc == DONE && s.man.by_sums == 0 && !a->quiet)
        say("note: %s has no sums: clients will compare this slice with their model by samples only; "
            "`k3 verify --write-sums` makes them", j.dir);
    if (rc == DONE) rc = dir_is_ours(&s);
    if (rc == DONE) rc = list_open(&s);
    if (rc == DONE) rc = dir_has_room(&s);
    if (rc == DONE) rc = slicing_write(&s);
done:
    if (s.fd_list >= 0) close(s.fd_list);
    free(s.config);
    job_close(&j);
    return rc;
}

/* ==== 4. k3 stage: frames ============================================================
 *
 * One connection, by whatever way tier_dial.h knows; one frame out, one back, each waited for:
 * TIER_HELLO_MS without a byte in the hello, half a minute in anything later. */

#define STAGE_WAIT_MS 30000

typedef struct {
    const char *addr;
    tier_addr to;
    tier_trust trust;
    tier_link link;
    bool is_open;
    uint32_t wait_ms;
    tier_model m;
    tier_key key;
    uint8_t *out, *in;
    size_t in_cap;
    uint64_t until_ns; /* the frame that is being read must be whole by then */
    uint64_t id;
    uint8_t *held; /* [n_layers - n_dense][map bytes] */
    uint32_t capacity;
    bool is_sampled; /* the box and we have not both sums: samples were compared, and offered experts */
    char *config; /* config.json, for a box that keeps what comes */
    size_t n_config;
    char why[TIER_MAX_TEXT + 64]; /* of a call that returned false */
    int code;                     /* and how the program ends      */
} wire;

static bool wire_fail(wire *w, const char *why) {
    if (!w->why[0]) snprintf(w->why, sizeof w->why, "%s", why);
    return false;
}

static bool wire_stops(void *user) {
    (void)user;
    return interrupted;
}

/* Whom to dial and how; before anything is read, since some of it may be a slip. */
static int wire_address(wire *w, const cli_args *a) {
    char why[400];
    w->trust =
        (tier_trust){a->engine.tier_ca, a->engine.tier_cert, a->engine.tier_cert_key, "--tier"};
    if (!w->addr || !w->addr[0]) return fail(FAIL_USAGE, "stage: --to ADDR: which box?");
    if (!tier_addr_parse(w->addr, &w->to))
        return fail(FAIL_USAGE, "--to: '%s' is no address; %s", w->addr, tier_addr_advice(w->addr));
    if (!w->to.is_tls && (a->engine.tier_ca || a->engine.tier_cert || a->engine.tier_cert_key))
        return fail(FAIL_USAGE, "--tier-%s: --to is not dialled with TLS: write tls:ADDR",
                    a->engine.tier_ca     ? "ca"
                    : a->engine.tier_cert ? "cert"
                                          : "key");
    if (w->to.is_tls && !tier_dial_has_tls())
        return fail(FAIL_USAGE, "--to: built without libcurl (make CURL=0), so without TLS");
    if (tier_trust_check(&w->trust, why, sizeof why) < 0) return fail(FAIL_USAGE, "%s", why);
    return DONE;
}

static int wire_dial(wire *w) {
    w->is_open = tier_dial(&w->link, &w->to, &w->trust, TIER_HELLO_MS, wire_stops, NULL) == 0;
    if (w->is_open) return DONE;
    if (interrupted) return fail(INTERRUPTED, "interrupted");
    return fail(FAIL_IO, "stage %s: %s%s", w->addr, w->link.why,
                w->link.was_there ? "" : "; is its k3-tier running?");
}

/* Wait until bytes can go; false when that takes too long, or Ctrl-C was pressed. */
static bool wire_wait_out(wire *w) {
    uint64_t until = clock_ns() + w->wait_ms * 1000000ull;
    return tier_link_wait(&w->link, POLLOUT, until, wire_stops, NULL) ||
           wire_fail(w, "does not read");
}

/* n bytes, whole; false on a timeout, an error or the end. A byte now and then is no way around the
 * timeout. */
static bool wire_get(wire *w, uint8_t *to, size_t n) {
    while (n > 0) {
        ssize_t got = w->link.by->recv(&w->link, to, n);
        if (got < 0) return wire_fail(w, w->link.why);
        if ((got == 0 &&
             !tier_link_wait(&w->link, POLLIN, w->until_ns, wire_stops, NULL)) ||
            clock_ns() >= w->until_ns)
            return wire_fail(w, "no answer in time");
        to += got;
        n -= (size_t)got;
    }
    return true;
}

/* How the program ends for a reason that a box gave. */
static int refusal_code(const char *said) {
    static const struct {
        const char *begins;
        int code;
    } kind[] = {
        {TIER_WHY_MODEL, FAIL_MODEL}, {TIER_WHY_ROOM, FAIL_BUDGET}, {TIER_WHY_SUM, FAIL_CHECK}};
    for (size_t i = 0; i < COUNT(kind); i++)
        if (strncmp(said, kind[i].begins, strlen(kind[i].begins)) == 0) return kind[i].code;
    return FAIL_IO;
}

/* The next frame, checked, of a type that is wanted; a reason that the box gives instead is kept. */
static bool wire_read(wire *w, enum tier_type a, enum tier_type b, tier_head *h) {
    uint8_t *p = w->in + TIER_HEAD_BYTES;
    char said[TIER_MAX_TEXT + 1];
    w->until_ns = clock_ns() + w->wait_ms * 1000000ull;
    if (!wire_get(w, w->in, TIER_HEAD_BYTES)) return false;
    const char *why = tier_head_parse(w->in, h);
    if (why) return wire_fail(w, why);
    if (TIER_HEAD_BYTES + (size_t)h->n > w->in_cap) return wire_fail(w, "a frame beyond the limit");
    if (!wire_get(w, p, h->n)) return false;
    if (tier_sum(w->in, h->n) != h->sum) return wire_fail(w, "a frame that does not match its sum");
    if (h->type == a || h->type == b) return true;
    if (h->type != TIER_REFUSE && h->type != TIER_GOODBYE)
        return wire_fail(w, "a frame out of turn");
    tier_text(said, sizeof said, p, h->n);
    if (h->type == TIER_REFUSE) w->code = refusal_code(said);
    snprintf(w->why, sizeof w->why, "%s: %s", h->type == TIER_REFUSE ? "refused" : "said goodbye",
             said);
    return false;
}

/* Send a frame whose payload of n bytes is in `out`. */
static bool wire_send(wire *w, enum tier_type type, size_t n) {
    size_t all = tier_seal(w->out, type, w->id, (uint32_t)n);
    char broke[sizeof w->link.why];
    tier_head h;
    for (size_t at = 0; at < all;) {
        ssize_t put = w->link.by->send(&w->link, w->out + at, all - at);
        if (put < 0) {
            snprintf(broke, sizeof broke, "%s", w->link.why);
            wire_read(w, TIER_WELCOME, TIER_VERDICT, &h); /* its reason, if it gave one */
            return wire_fail(w, broke);
        }
        if (put == 0 && !wire_wait_out(w)) return false;
        at += (size_t)put;
    }
    return true;
}

/* ==== 5. k3 stage: hello, experts one by one ========================================== */

/* Prove that both know the key, we first; then the welcome is in `in`. */
static bool stage_prove(wire *w, tier_talk *talk, tier_head *h) {
    const uint8_t *in = w->in + TIER_HEAD_BYTES;
    const char *why = tier_link_binding(&w->link, talk->binding);
    if (!why) why = tier_answer(&w->key, talk, in, h->n, w->out + TIER_HEAD_BYTES);
    if (why) return wire_fail(w, why);
    if (!wire_send(w, TIER_PROOF, TIER_PROOF_BYTES) || !wire_read(w, TIER_PROOF, TIER_PROOF, h))
        return false;
    if ((why = tier_believe(&w->key, talk, in, h->n)) != NULL) return wire_fail(w, why);
    return wire_read(w, TIER_WELCOME, TIER_WELCOME, h);
}

/* What the box holds of each layer. */
static bool stage_resident(wire *w, const uint8_t *p, size_t n) {
    const char *why = tier_resident_parse(&w->m, p, n, w->held);
    return why ? wire_fail(w, why) : true;
}

/* From hello to what the box holds. */
static bool stage_hello(wire *w, const k3_shape *sh) {
    uint8_t nonce[TIER_NONCE_BYTES], *p = w->out + TIER_HEAD_BYTES;
    tier_talk talk;
    tier_head h;
    if (!tier_nonce(nonce)) return wire_fail(w, "no random bytes");
    tier_hello_pack(talk.hello, &w->m, TIER_STAGES, nonce);
    memcpy(p, talk.hello, sizeof talk.hello);
    if (!wire_send(w, TIER_HELLO, sizeof talk.hello) ||
        !wire_read(w, TIER_WELCOME, TIER_CHALLENGE, &h))
        return false;
    bool is_asked = h.type == TIER_CHALLENGE;
    if (is_asked && !stage_prove(w, &talk, &h)) return false;
    if (w->key.n > 0 && !is_asked)
        return wire_fail(w, "the box does not ask for the key: not the one meant");
    const float beta[2] = {sh->situ_beta, sh->situ_linear_beta};
    memcpy(p, beta, sizeof beta);
    tier_put64(p + 8, sh->expert_bytes);
    memcpy(p + TIER_BEGIN_BYTES, w->config, w->n_config);
    if (!wire_send(w, TIER_BEGIN, TIER_BEGIN_BYTES + w->n_config) ||
        !wire_read(w, TIER_WELCOME, TIER_WELCOME, &h))
        return false;
    if (h.n != TIER_WELCOME_BYTES) return wire_fail(w, "a welcome of the wrong length");
    w->capacity = tier_get32(w->in + TIER_HEAD_BYTES);
    w->is_sampled = !w->m.by_sums || !tier_get64(w->in + TIER_HEAD_BYTES + 24);
    w->wait_ms = STAGE_WAIT_MS;
    return wire_read(w, TIER_RESIDENT, TIER_RESIDENT, &h) &&
           stage_resident(w, w->in + TIER_HEAD_BYTES, h.n);
}

/* The box's word on an expert. */
static bool stage_verdict(wire *w, const slice_expert *x, enum tier_verdict *v) {
    tier_head h;
    uint32_t il, ie;
    const uint8_t *p = w->in + TIER_HEAD_BYTES;
    if (!wire_read(w, TIER_VERDICT, TIER_VERDICT, &h)) return false;
    if (h.id != w->id || !tier_expert_parse(&w->m, p, h.n, TIER_VERDICT_BYTES, &il, &ie) ||
        il != x->il || ie != x->ie || p[4] >= TIER_N_VERDICTS)
        return wire_fail(w, "a verdict on something else");
    *v = (enum tier_verdict)p[4];
    return true;
}

/* The six tensors as one row of bytes, cut into pieces. */
static bool stage_pieces(wire *w, const reading *r) {
    uint8_t *p = w->out + TIER_HEAD_BYTES;
    uint64_t at = 0;
    size_t n = 0;
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        for (uint64_t i = 0, step; i < r->lengths[k]; i += step) {
            step = r->lengths[k] - i < TIER_MAX_PIECE - n ? r->lengths[k] - i : TIER_MAX_PIECE - n;
            memcpy(p + TIER_PIECE_BYTES + n, r->view.p[k] + i, (size_t)step);
            n += (size_t)step;
            bool is_last = k + 1 == N_EXPERT_TENSORS && i + step == r->lengths[k];
            if (n < TIER_MAX_PIECE && !is_last) continue;
            tier_put64(p, at);
            if (!wire_send(w, TIER_PIECE, TIER_PIECE_BYTES + n)) return false;
            at += n;
            n = 0;
        }
    return true;
}

/* Offer one expert, and bring it if it is wanted. *v is TIER_WANTS when it was brought. */
static bool stage_one(wire *w, const reading *r, uint64_t n_bytes, enum tier_verdict *v) {
    uint8_t *p = w->out + TIER_HEAD_BYTES;
    enum tier_verdict end = TIER_FULL;
    w->id++;
    memset(p, 0, TIER_OFFER_BYTES);
    tier_put16(p, r->x.il);
    tier_put16(p + 2, r->x.ie);
    tier_put64(p + 8, n_bytes);
    tier_put64(p + 16, r->x.sum);
    if (!wire_send(w, TIER_OFFER, TIER_OFFER_BYTES) || !stage_verdict(w, &r->x, v)) return false;
    if (*v != TIER_WANTS) return true;
    if (!stage_pieces(w, r)) return false;
    memset(p, 0, TIER_COMMIT_BYTES);
    tier_put16(p, r->x.il);
    tier_put16(p + 2, r->x.ie);
    tier_put64(p + 8, r->x.sum);
    if (!wire_send(w, TIER_COMMIT, TIER_COMMIT_BYTES) || !stage_verdict(w, &r->x, &end))
        return false;
    return end == TIER_HAS ? true : wire_fail(w, "an expert was brought and not taken");
}

typedef struct {
    uint32_t n, n_sent, n_had, n_busy; /* of the list */
    bool is_full;
} staging;

/* Bring experts [0, n) of the list. Those that come from elsewhere just now are moved to its
 * front; n_busy says how many. */
static int stage_list(job *j, wire *w, slice_expert *list, uint32_t n, staging *g) {
    uint64_t bytes = j->sh->expert_bytes;
    g->n_busy = 0;
    feed_start(&j->feed, list, n);
    for (uint32_t i = 0; i < n && !g->is_full; i++) {
        const reading *r = feed_next(&j->feed);
        enum tier_verdict v;
        if (r->status < 0) {
            console_clear(&j->con);
            return fail_status(r->status, &r->err);
        }
        if (!stage_one(w, r, bytes, &v)) {
            console_clear(&j->con);
            if (interrupted) return fail(INTERRUPTED, "interrupted; the same command goes on");
            return fail(w->code, "stage %s: %s; what it has is not sent again: start it once more",
                        w->addr, w->why);
        }
        g->n_sent += v == TIER_WANTS;
        g->n_had += v == TIER_HAS;
        g->is_full = v == TIER_FULL;
        if (v == TIER_BUSY) list[g->n_busy++] = r->x;
        if (job_progress(j, (g->n_sent + g->n_had) * bytes, g->n * bytes) != DONE) {
            console_clear(&j->con);
            return fail(INTERRUPTED, "interrupted; the same command goes on");
        }
    }
    return DONE;
}

/* The list less what the box has; how many are left. */
static uint32_t stage_missing(const wire *w, slice_expert *list, uint32_t n) {
    size_t map = tier_map_bytes(w->m.n_experts);
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *at = w->held + (list[i].il - w->m.n_dense) * map;
        if (!(at[list[i].ie / 8] >> list[i].ie % 8 & 1)) list[n_left++] = list[i];
    }
    return n_left;
}

/* The box keeps what came on its disk (--keep): wait until it says that all is written. It may write
 * as long as it gets on; with no progress for STAGE_WRITE_MS that is said. */
#define STAGE_WRITE_MS 120000u
static int stage_written(job *j, wire *w) {
    const uint8_t *p = w->in + TIER_HEAD_BYTES;
    const struct timespec pause = {.tv_nsec = 20000000};
    uint64_t most = 0, least = UINT64_MAX, until = 0;
    tier_head h;
    for (;;) {
        w->id++;
        if (!wire_send(w, TIER_STATS, 0) || !wire_read(w, TIER_STATS, TIER_STATS, &h))
            return interrupted
                       ? fail(INTERRUPTED, "interrupted; the box goes on writing")
                       : fail(w->code, "stage %s: has the box written all? %s", w->addr, w->why);
        uint64_t left = tier_get64(p + 8 * TIER_STAT_UNWRITTEN);
        if (tier_get64(p + 8 * TIER_STAT_UNKEPT))
            return fail(FAIL_IO,
                        "stage %s: the box serves what came but could not write it (--keep): "
                        "it says why; make room there, start it again, stage again",
                        w->addr);
        if (left == 0) return DONE;
        if (left > most) most = left;
        if (left < least) least = left, until = clock_ns() + STAGE_WRITE_MS * 1000000ull;
        if (clock_ns() >= until)
            return fail(FAIL_IO,
                        "stage %s: the box has not written %llu experts (--keep) and gets no "
                        "further; is its disk well?",
                        w->addr, (unsigned long long)left);
        j->con.verb = "the box writes";
        j->base = 0;
        if (job_progress(j, (most - left) * j->sh->expert_bytes, most * j->sh->expert_bytes) !=
            DONE)
            return fail(INTERRUPTED, "interrupted; the box goes on writing");
        nanosleep(&pause, NULL);
    }
}

static int stage_run(job *j, wire *w) {
    staging g = {.n = j->n};
    char size[32];
    uint64_t start = clock_ns();
    uint32_t n = stage_missing(w, j->list, j->n);
    g.n_had = j->n - n;
    if (g.n > w->capacity && w->capacity >= g.n_had) g.n = w->capacity; /* for the time left */
    j->con.verb = "staging";
    j->base = g.n_had * j->sh->expert_bytes;
    job_progress(j, j->base, g.n * j->sh->expert_bytes);
    int rc = stage_list(j, w, j->list, n, &g);
    for (int i = 0; i < 300 && rc == DONE && g.n_busy > 0 && !g.is_full; i++) {
        const struct timespec pause = {.tv_nsec = 100000000};
        nanosleep(&pause, NULL);
        rc = stage_list(j, w, j->list, g.n_busy, &g);
    }
    uint64_t took = clock_ns() - start;
    if (rc == DONE) rc = stage_written(j, w);
    console_clear(&j->con);
    uint64_t bytes = g.n_sent * j->sh->expert_bytes;
    printf("%s: %u experts sent (%s), %u skipped, %u left out%s; %.2f GB/s\n", w->addr, g.n_sent,
           fmt_bytes(size, bytes), g.n_had, j->n - g.n_sent - g.n_had,
           g.is_full ? ", the box is full" : "", per_second(bytes, took) * 1e-9);
    if (fflush(stdout) != 0 && rc == DONE) rc = fail_stdout(errno);
    return rc;
}

static int stage_room(wire *w, const job *j, const cli_args *a) {
    const k3_shape *sh = j->sh;
    char path[4096];
    const char *why = a->engine.tier_key ? tier_key_read(a->engine.tier_key, &w->key) : NULL;
    if (why) return fail(FAIL_USAGE, "--psk-file %s: %s", a->engine.tier_key, why);
    w->m = (tier_model){K3_NUMERICS_ID, j->print.sampled, j->print.by_sums, sh->n_layers, sh->n_dense,
                        sh->n_experts,  sh->latent,       sh->expert_inter, sh->top_k};
    if (!tier_model_is_stageable(&w->m))
        return fail(FAIL_MODEL, "%s: more than a frame can name", j->dir);
    size_t resident = tier_resident_bytes(&w->m, sh->n_layers - sh->n_dense);
    w->in_cap = TIER_HEAD_BYTES + (resident > TIER_MAX_EARLY ? resident : TIER_MAX_EARLY);
    w->in = malloc(w->in_cap);
    w->out = malloc(TIER_HEAD_BYTES + TIER_PIECE_BYTES + TIER_MAX_PIECE);
    w->held = calloc(sh->n_layers - sh->n_dense, tier_map_bytes(sh->n_experts));
    snprintf(path, sizeof path, "%.4000s/config.json", j->dir);
    w->config = slice_file_read(path, TIER_MAX_CONFIG, &w->n_config);
    if (!w->config)
        return fail(FAIL_IO, "%s: %s", path, errno ? strerror(errno) : "longer than 256 KiB");
    return w->in && w->out && w->held ? DONE : fail_memory("frames", w->in_cap);
}

int cmd_stage(const cli_args *a) {
    static job j;
    wire w = {.addr = a->slice.to, .wait_ms = TIER_HELLO_MS, .code = FAIL_IO};
    int rc = wire_address(&w, a);
    if (rc != DONE) return rc;
    rc = job_open(&j, a);
    if (rc == DONE && a->slice.size / j.sh->expert_bytes < j.n && is_given(a, "--size"))
        j.n = (uint32_t)(a->slice.size / j.sh->expert_bytes);
    if (rc == DONE && j.n == 0)
        rc = fail(FAIL_USAGE, "--size of %llu bytes is too small for one expert of %llu",
                  (unsigned long long)a->slice.size, (unsigned long long)j.sh->expert_bytes);
    if (rc == DONE) rc = stage_room(&w, &j, a);
    if (rc == DONE) rc = wire_dial(&w);
    if (rc == DONE && !stage_hello(&w, j.sh))
        rc = interrupted ? fail(INTERRUPTED, "interrupted")
                         : fail(w.code, "stage %s: %s", w.addr, w.why);
    if (rc == DONE && w.is_sampled && !a->quiet)
        say("note: %s: models were compared by samples only, since %s has no sums; `k3 verify "
            "--write-sums` makes them", w.addr, w.m.by_sums ? "its model" : "this one");
    if (rc == DONE) rc = stage_run(&j, &w);
    if (rc == DONE) wire_send(&w, TIER_GOODBYE, 0);
    if (w.is_open) w.link.by->close(&w.link);
    free(w.in);
    free(w.out);
    free(w.held);
    free(w.config);
    OPENSSL_cleanse(&w.key, sizeof w.key);
    job_close(&j);
    return rc;
}
