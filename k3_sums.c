/* k3_sums.c - checksums of the weights, and `verify`, which reads all of them.
 *
 * Sections 6.6 and the end of 17 of the engine (k3.c has the map).
 */
#include "k3_inside.h"

#include "k3_error.h"
#include "k3_fp.h"
#include "k3_resume.h"
#include "k3_temp.h"
#include "slice.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* ---- 6.6 Sums ----
 *
 * XXH3 of every stretch of bytes that is ever read at once: each piece of rows of a trunk matrix,
 * each vector, each row of the embedding, each expert (or its six tensors, where they do not lie
 * together). `k3 verify --write-sums` makes them; with them each read is checked before its use.
 * The file, little-endian:
 *
 *     8     "K3SUMS2\n"
 *     8     fingerprint: XXH3 over shard name, offset and length of all stretches, in order
 *     8     n, the number of sums
 *     8 n   the sums: layers in order and last the head, each with its tensors in the order of
 *           `enum tensor`; then the embedding; then the experts by layer and id, each with one sum
 *           or six for its stretches, and behind them one of its contents: XXH3 of the XXH3 of its
 *           six tensors in slot order
 *     8     XXH3 of all before
 *
 * The sum of contents is the same wherever the six tensors lie. It checks no read: by it, and by
 * the trunk's sums, two copies of the weights are known to be equal (k3_fingerprints.by_sums).
 * "K3SUMS1\n" is the form before, without sums of contents: it checks reads, and by_sums is 0.
 */
#define SUMS_NAME "k3.sums"
#define SUMS_MAGIC "K3SUMS2\n"
#define SUMS_MAGIC_1 "K3SUMS1\n"
#define SUMS_HEAD 24u

/* Bytes that are read at once by verify: `n_parts` equal parts with a sum each. */
typedef struct {
    uint32_t il, ie; /* ie: of an expert; t is N_TENSORS then */
    int t;
    uint16_t i_shard;
    uint64_t offset, n, n_parts, i_sum;
} stretch;
typedef int (*stretch_fn)(void *user, const stretch *x);

/* Visit a trunk tensor piece by piece; x->i_sum moves on. */
static int sums_visit_tensor(const k3_engine *e, uint32_t il, int t, uint64_t *i_sum, stretch_fn fn,
                             void *user) {
    const place *at = trunk_place(e, il, t);
    uint64_t n = tensor_bytes(e->files.dims, (enum tensor)t), each = n, row = n;
    if (!tensor_is_vector((enum tensor)t)) {
        row = tensor_cols(&e->files, t) * sizeof(uint16_t);
        each = piece_bytes(&e->files, t);
    }
    for (uint64_t done = 0; done < n; done += each) {
        stretch x = {.il = il, .t = t, .i_shard = at->shard, .offset = at->offset + done};
        x.n = n - done < each ? n - done : each;
        x.n_parts = t == T_EMBED ? x.n / row : 1;
        x.i_sum = *i_sum;
        *i_sum += x.n_parts;
        int rc = fn(user, &x);
        if (rc != 0) return rc;
    }
    return 0;
}

/* Visit everything that has a sum, in the order of the file. Returns what `fn` said, if not 0. */
static int sums_visit(const k3_engine *e, stretch_fn fn, void *user) {
    const k3_shape *sh = &e->sh;
    uint64_t i_sum = 0;
    int rc = 0;
    for (uint32_t il = 0; il <= sh->n_layers; il++)
        for (int t = 0; t < N_TENSORS; t++)
            if (layer_has_tensor(sh, il, t) &&
                (rc = sums_visit_tensor(e, il, t, &i_sum, fn, user)) != 0)
                return rc;
    if ((rc = sums_visit_tensor(e, sh->n_layers, T_EMBED, &i_sum, fn, user)) != 0) return rc;
    for (uint32_t il = sh->n_dense; il < sh->n_layers; il++)
        for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
            stretch x = {.il = il, .ie = ie, .t = N_TENSORS, .n = sh->expert_bytes};
            x.n_parts = e->sums.per_expert;
            x.i_sum = i_sum;
            i_sum += x.n_parts;
            if ((rc = fn(user, &x)) != 0) return rc;
        }
    return 0;
}

typedef struct {
    k3_engine *e;
    uint64_t n, fingerprint;
} sums_layout;

static void sums_mix(sums_layout *w, uint16_t i_shard, uint64_t offset, uint64_t n) {
    const char *name = w->e->files.shards[i_shard].name;
    uint64_t v[4] = {w->fingerprint, XXH3_64bits(name, strlen(name)), offset, n};
    w->fingerprint = XXH3_64bits(v, sizeof v);
}

static int sums_lay(void *user, const stretch *x) {
    sums_layout *w = user;
    sums *u = &w->e->sums;
    io_req req[N_EXPERT_TENSORS];
    w->n = x->i_sum + x->n_parts;
    if (x->t < N_TENSORS) {
        uint32_t *first = &u->first[x->il * N_TENSORS + (uint32_t)x->t];
        if (*first == UINT32_MAX) *first = (uint32_t)x->i_sum;
        sums_mix(w, x->i_shard, x->offset, x->n);
        return 0;
    }
    if (u->expert0 == 0) u->expert0 = x->i_sum;
    int n = expert_requests(w->e, x->il, x->ie, NULL, req);
    for (int k = 0; k < n; k++) sums_mix(w, req[k].i_shard, req[k].offset, req[k].n);
    return 0;
}

/* Lay out the table of sums, still without a value. */
static int sums_make(k3_engine *e, bool has_contents, uint64_t *fingerprint, k3_error *err) {
    sums *u = &e->sums;
    uint64_t n_first = ((uint64_t)e->sh.n_layers + 1) * N_TENSORS, most = n_first + 1;
    sums_layout w = {.e = e, .fingerprint = 1};
    *u = (sums){.per_expert = 1, .has_contents = has_contents};
    if (e->sh.n_layers > e->sh.n_dense &&
        expert_room(&e->files, &e->sh) > io_room(e->sh.expert_bytes))
        u->per_expert = N_EXPERT_TENSORS;
    u->per_expert += has_contents;
    most += e->sh.vocab_size + plan_pieces(e) / sizeof(piece) + n_first +
            (uint64_t)(e->sh.n_layers - e->sh.n_dense) * e->sh.n_experts * u->per_expert;
    u->block_bytes = round_up(n_first * sizeof *u->first, 64) + most * sizeof *u->sum;
    u->block = ledger_take(&e->mem, u->block_bytes, "sums", err);
    if (!u->block) return e->mem.why;
    u->first = u->block;
    memset(u->first, 0xff, n_first * sizeof *u->first);
    sums_visit(e, sums_lay, &w);
    u->n = w.n;
    *fingerprint = w.fingerprint;
    return 0;
}

static uint64_t *sums_values(const k3_engine *e) {
    uint64_t n_first = ((uint64_t)e->sh.n_layers + 1) * N_TENSORS;
    return (uint64_t *)(void *)((uint8_t *)e->sums.block +
                                round_up(n_first * sizeof(uint32_t), 64));
}

/* One number for the weights that these sums are of: k3_fingerprints.by_sums. */
static uint64_t sums_identity(const k3_engine *e) {
    const sums *u = &e->sums;
    const k3_shape *sh = &e->sh;
    uint64_t n_experts = (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts, h;
    const uint64_t geometry[] = {sh->vocab_size,   sh->hidden,    sh->n_layers, sh->n_dense,
                                 sh->n_experts,    sh->latent,    sh->n_heads,  sh->kda_heads,
                                 sh->expert_inter, sh->n_shared};
    if (!u->has_contents) return 0;
    h = XXH3_64bits_withSeed(sh->is_mla, sh->n_layers, XXH3_64bits(geometry, sizeof geometry));
    h = XXH3_64bits_withSeed(u->sum, (size_t)(n_experts ? u->expert0 : u->n) * sizeof *u->sum, h);
    for (uint64_t i = 0; i < n_experts; i++) {
        const uint64_t *contents = &u->sum[u->expert0 + (i + 1) * u->per_expert - 1];
        h = XXH3_64bits_withSeed(contents, sizeof *contents, h);
    }
    return h ? h : 1; /* 0 says: not known */
}

static void sums_path(const k3_engine *e, char *path, size_t cap) {
    if (e->opt.sums)
        snprintf(path, cap, "%s", e->opt.sums);
    else
        snprintf(path, cap, "%s/%s", e->dir, SUMS_NAME);
}

/* Read all of a file of sums into the table. */
static int sums_load(k3_engine *e, const char *path, int fd, uint64_t size, k3_error *err) {
    static const char again[] = "write it again with `k3 verify --write-sums`, or give --no-check";
    uint64_t fingerprint, head[SUMS_HEAD / 8], end;
    int rc = 0;
    shard file = {.name = (char *)(uintptr_t)path, .size = size};
    file.fd[0] = fd;
    if (size < SUMS_HEAD || (rc = read_copy(&file, 0, head, SUMS_HEAD, 0, err)) < 0 ||
        (memcmp(head, SUMS_MAGIC, 8) != 0 && memcmp(head, SUMS_MAGIC_1, 8) != 0))
        return rc < 0 ? rc : fail(err, K3_EMODEL, "%s: no file of sums; %s", path, again);
    if (size / 8 < (uint64_t)(e->sh.n_layers - e->sh.n_dense) * e->sh.n_experts + e->sh.vocab_size)
        return fail(err, K3_EMODEL, "%s: %llu bytes: cut short, or made for other files; %s", path,
                    (unsigned long long)size, again);
    if ((rc = sums_make(e, memcmp(head, SUMS_MAGIC, 8) == 0, &fingerprint, err)) < 0) return rc;
    uint64_t n_bytes = e->sums.n * sizeof(uint64_t), *values = sums_values(e);
    if (head[1] != fingerprint || head[2] != e->sums.n)
        return fail(err, K3_EMODEL, "%s: made for other files than these; %s", path, again);
    if (size != SUMS_HEAD + n_bytes + 8)
        return fail(err, K3_EMODEL, "%s: %llu bytes, not %llu: cut short; %s", path,
                    (unsigned long long)size, (unsigned long long)(SUMS_HEAD + n_bytes + 8), again);
    if ((rc = read_copy(&file, 0, values, n_bytes, SUMS_HEAD, err)) < 0 ||
        (rc = read_copy(&file, 0, &end, 8, SUMS_HEAD + n_bytes, err)) < 0)
        return rc;
    XXH64_hash_t h = XXH3_64bits(head, SUMS_HEAD);
    if (XXH3_64bits_withSeed(values, (size_t)n_bytes, h) != end)
        return fail(err, K3_EMODEL, "%s: damaged; %s", path, again);
    e->sums.sum = values;
    e->plan.has_sums = true;
    e->print.by_sums = sums_identity(e);
    return 0;
}

/* The sums beside the model, when they are there, or where the caller says. */
int sums_open(k3_engine *e, k3_error *err) {
    char path[4352];
    uint64_t size;
    if (e->opt.no_check || e->opt.experts_only) return 0;
    sums_path(e, path, sizeof path);
    if (!e->opt.sums && access(path, F_OK) != 0) return 0;
    int fd = file_open(path, &size, err);
    if (fd < 0) return K3_EIO;
    int rc = sums_load(e, path, fd, size, err);
    close(fd);
    return rc;
}


/* A file of sums being made: under another name until it is whole. */
typedef struct {
    char path[4352], part[4360];
    int fd;
} sums_out;

/* Before hours of reading: can it be written? Links are followed, and only a file is replaced. */
static int sums_create(const k3_engine *e, sums_out *o, k3_error *err) {
    struct stat st;
    sums_path(e, o->path, sizeof o->path);
    char *real = realpath(o->path, NULL);
    if (real && strlen(real) < sizeof o->path) strcpy(o->path, real);
    free(real);
    o->fd = -1;
    if (stat(o->path, &st) == 0 && !S_ISREG(st.st_mode))
        return fail(err, K3_EIO, "%s: not a regular file; name another with --sums FILE", o->path);
    snprintf(o->part, sizeof o->part, "%s.part", o->path);
    int rc = k3_temp_open(o->part, K3_TEMP_PUBLIC, &o->fd, err);
    if (rc == 0) return 0;
    size_t n = err ? strlen(err->text) : 0;
    if (err)
        snprintf(err->text + n, sizeof err->text - n, "; --sums FILE names another place");
    return K3_EIO;
}

static void sums_abandon(sums_out *o) {
    if (o->fd < 0) return;
    unlink(o->part);
    close(o->fd);
}

/* How many sums of contents there are; is sum i one? */
static uint64_t sums_n_contents(const k3_engine *e) {
    return e->sums.has_contents ? (e->sums.n - e->sums.expert0) / e->sums.per_expert : 0;
}

static bool sums_is_contents(const sums *u, uint64_t i) {
    return i >= u->expert0 && (i - u->expert0) % u->per_expert == u->per_expert - 1;
}

/* What is there says the same? Sums that differ tell that the weights are not what they were: they are
 * not written over. A file that is damaged or of other weights tells nothing. */
static int sums_compare(const k3_engine *e, const sums_out *o, const uint64_t *head,
                        k3_error *err) {
    uint64_t size, n_bad = 0, n_bytes = e->sums.n * sizeof(uint64_t), end;
    uint64_t was[SUMS_HEAD / 8] = {0, head[1], head[2] - sums_n_contents(e)};
    int fd = access(o->path, F_OK) == 0 ? file_open(o->path, &size, NULL) : -1;
    if (fd < 0) return 0;
    memcpy(was, SUMS_MAGIC_1, 8);
    bool is_old = size == SUMS_HEAD + was[2] * sizeof(uint64_t) + 8 && was[2] < head[2];
    if (is_old) {
        head = was;
        n_bytes = was[2] * sizeof(uint64_t);
    }
    void *p = size == SUMS_HEAD + n_bytes + 8
                  ? mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0)
                  : MAP_FAILED;
    close(fd);
    if (p == MAP_FAILED) return 0;
    const uint64_t *there = (const uint64_t *)(const void *)((const uint8_t *)p + SUMS_HEAD);
    memcpy(&end, (const uint8_t *)p + SUMS_HEAD + n_bytes, 8);
    if (memcmp(p, head, SUMS_HEAD) == 0 &&
        XXH3_64bits_withSeed(there, (size_t)n_bytes, XXH3_64bits(p, SUMS_HEAD)) == end)
        for (uint64_t i = 0, j = 0; i < e->sums.n; i++) {
            if (is_old && sums_is_contents(&e->sums, i)) continue;
            n_bad += there[j++] != e->sums.sum[i];
        }
    munmap(p, (size_t)size);
    if (n_bad == 0) return 0;
    return fail(err, K3_ECHECK,
                "%s: %llu of %llu sums do not match what was read now: the weights were damaged or "
                "replaced since; `k3 verify` names the places, --no-check writes new sums anyway",
                o->path, (unsigned long long)n_bad, (unsigned long long)e->sums.n);
}

static int sums_save(const k3_engine *e, sums_out *o, uint64_t fingerprint, bool compares,
                     k3_error *err) {
    uint64_t head[SUMS_HEAD / 8], n_bytes = e->sums.n * sizeof(uint64_t), end;
    int rc;
    memcpy(head, SUMS_MAGIC, 8);
    head[1] = fingerprint;
    head[2] = e->sums.n;
    if (compares && (rc = sums_compare(e, o, head, err)) < 0) return rc;
    end = XXH3_64bits_withSeed(e->sums.sum, (size_t)n_bytes, XXH3_64bits(head, SUMS_HEAD));
    bool is_ok = ftruncate(o->fd, 0) == 0 && slice_write_all(o->fd, head, SUMS_HEAD) &&
                 slice_write_all(o->fd, e->sums.sum, n_bytes) && slice_write_all(o->fd, &end, 8) &&
                 fsync(o->fd) == 0;
    if (!is_ok) return fail(err, K3_EIO, "%s: %s", o->path, strerror(errno));
    if ((rc = k3_temp_rename(o->fd, o->part, o->path, err)) < 0) return rc;
    close(o->fd);
    o->fd = -1;
    return 0;
}

/* ---- verify ----
 *
 * Every copy of every stretch is read once, a few ahead of the one being looked at. Stretches have one order, so a
 * number says how far it came; with k3_options.resume that number is kept every few seconds and when it stops. What
 * was read from a file that is another one since is read again. */
#define VERIFY_AHEAD 4
#ifndef RESUME_NS
#define RESUME_NS 5000000000u /* so much work, and what is being read, is lost by SIGKILL */
#endif

typedef struct {
    k3_engine *e;
    struct {
        stretch x;
        io_req req[N_EXPERT_TENSORS];
        int n_reqs;
        uint64_t i;        /* the stretch's number */
    } ahead[VERIFY_AHEAD]; /* asked for, oldest first, from `first` */
    uint32_t first, n_ahead;
    int i_copy;
    uint64_t i_visit; /* of this copy: stretches visited                        */
    k3_resume from;   /* where it goes on; copy 0, stretch 0: at the beginning   */
    k3_resume now;    /* how far it is: every stretch before this one is done    */
    bool *is_changed; /* [n_files] read again, whatever `from` says; NULL: none  */
    uint64_t kept_ns; /* when `now` was last kept; 0: it cannot be               */
    uint64_t skipped; /* bytes that are done already                             */
    uint64_t *values; /* where sums go that are being made, else NULL */
    uint8_t *buf;
    uint64_t room, done, total;
    int64_t n_experts;
    bool is_zero; /* all pieces so far of the tensor at work */
    k3_error *err;
} verify;

/* The number of a file among all copies of all shards. */
static uint64_t verify_file(const verify *v, int i_copy, uint16_t i_shard) {
    return (uint64_t)i_copy * v->e->files.n_shards + i_shard;
}

/* Is a stretch done that is read by these requests? */
static bool verify_is_done(const verify *v, uint64_t i, const io_req *req, int n_reqs) {
    uint64_t i_copy = (uint64_t)v->i_copy;
    bool is_before =
        i_copy < v->from.i_copy || (i_copy == v->from.i_copy && i < v->from.n_stretches);
    for (int k = 0; is_before && v->is_changed && k < n_reqs; k++)
        is_before = !v->is_changed[verify_file(v, v->i_copy, req[k].i_shard)];
    return is_before;
}

/* Keep how far it is. That it cannot be kept is told once and no reason to stop. */
static void verify_keep(verify *v) {
    const k3_options *o = &v->e->opt;
    char line[1024];
    k3_error why = {{0}};
    bool is_behind = v->now.i_copy < v->from.i_copy ||
                     (v->now.i_copy == v->from.i_copy && v->now.n_stretches <= v->from.n_stretches);
    if (!v->kept_ns || is_behind)
        return; /* behind: changed files are read again, and `from` is still right */
    v->kept_ns = clock_ns();
    if (k3_resume_write(o->resume, &v->now, &why) == 0) return;
    v->kept_ns = 0;
    snprintf(line, sizeof line, "how far this came is not kept: %s", why.text);
    if (o->note) o->note(o->user, line);
}

/* Stretch i of the present copy was found good. */
static void verify_advance(verify *v, uint64_t i) {
    v->now.i_copy = (uint64_t)v->i_copy;
    v->now.n_stretches = i + 1;
    v->now.is_zero = v->is_zero;
    if (v->kept_ns && clock_ns() - v->kept_ns > RESUME_NS) verify_keep(v);
}

/* Every value of a trunk tensor's piece is finite. */
static int verify_finite(const verify *v, const stretch *x, const uint8_t *at) {
    uint64_t width = DTYPE_BYTES[TENSOR[x->t].dtype];
    for (uint64_t i = 0; i < x->n; i += width) {
        uint16_t top; /* sign, exponent and the start of the fraction: little-endian */
        memcpy(&top, at + i + width - 2, sizeof top);
        if ((top & 0x7f80) != 0x7f80) continue;
        const place *tensor = trunk_place(v->e, x->il, x->t);
        const shard *file = &v->e->files.shards[x->i_shard];
        name_id id = {(enum tensor)x->t, -1, x->il, 0};
        char name[256];
        name_write(&id, name, sizeof name);
        return fail(v->err, K3_EMODEL,
                    "%s: element %llu is NaN or infinite (%s, offset 0x%llx); download it again",
                    name, (unsigned long long)((x->offset + i - tensor->offset) / width),
                    file->name, (unsigned long long)(x->offset + i));
    }
    return 0;
}

static int verify_fail_zeros(const verify *v, const name_id *id, uint64_t n) {
    char what[sizeof v->err->text];
    zeros_text(v->e, id, 0, n, what, sizeof what);
    return fail(v->err, K3_ECHECK, "%s; download the file again", what);
}

/* No tensor of the trunk is nothing but zeros: its pieces come in order, and its last one tells. */
static int verify_zeros(verify *v, const stretch *x, const uint8_t *at) {
    const k3_engine *e = v->e;
    uint64_t from = x->offset - trunk_place(e, x->il, x->t)->offset,
             all = tensor_bytes(e->files.dims, (enum tensor)x->t);
    const name_id id = {(enum tensor)x->t, -1, x->il, 0};
    v->is_zero = (from == 0 || v->is_zero) && bytes_are_zeros(at, x->n);
    if (from + x->n < all || !v->is_zero || tensor_may_be_zero(e, x->il, x->t)) return 0;
    return verify_fail_zeros(v, &id, all);
}

/* Parts whose sums the disk did not look at: made here, or compared. */
static int verify_parts(const verify *v, const stretch *x, const io_req *r, int i_req) {
    uint64_t n_parts = x->t < N_TENSORS ? x->n_parts : 1, n = r->n / n_parts;
    for (uint64_t i = 0; i < n_parts; i++) {
        uint64_t i_sum = x->i_sum + i + (uint64_t)i_req;
        if (!v->values && (!v->e->sums.sum || r->has_sum)) return 0;
        uint64_t sum = XXH3_64bits(r->at + i * n, (size_t)n);
        if (v->values)
            v->values[i_sum] = sum;
        else if (sum != v->e->sums.sum[i_sum])
            return sum_fail(&v->e->files.shards[r->i_shard], r->offset + i * n, n, v->err);
    }
    return 0;
}

/* The sum of an expert's contents, wherever its tensors lie (6.6). */
uint64_t expert_contents(const k3_shape *sh, const expert_view *x) {
    uint64_t sum[N_EXPERT_TENSORS];
    for (int k = 0; k < N_EXPERT_TENSORS; k++)
        sum[k] = XXH3_64bits(x->p[k], (size_t)expert_tensor_bytes(sh, k));
    return XXH3_64bits(sum, sizeof sum);
}

static int verify_expert(verify *v, const stretch *x, const io_req *req, int n_reqs) {
    k3_engine *e = v->e;
    expert_view view;
    expert_locate(e, x->il, x->ie, req, n_reqs, &view);
    if (v->values) v->values[x->i_sum + x->n_parts - 1] = expert_contents(&e->sh, &view);
    int rc = expert_check(&e->sh, x->il, x->ie, &view, &e->files, v->err);
    const name_id id = {0, expert_zeros(&e->sh, &view), x->il, x->ie};
    if (rc == 0 && id.expert_tensor >= 0)
        rc = verify_fail_zeros(v, &id, expert_tensor_bytes(&e->sh, id.expert_tensor));
    v->n_experts += v->i_copy == 0;
    return rc;
}

/* Wait for the oldest stretch and look at it. */
static int verify_oldest(verify *v) {
    k3_engine *e = v->e;
    const stretch *x = &v->ahead[v->first].x;
    io_req *req = v->ahead[v->first].req;
    uint64_t i = v->ahead[v->first].i;
    int n_reqs = v->ahead[v->first].n_reqs, rc = 0;
    for (int k = 0; k < n_reqs; k++) disk_wait(&e->io, &req[k]);
    bool is_first = (uint64_t)v->i_copy == v->from.i_copy && i == v->from.n_stretches;
    if (is_first && !(v->is_changed && v->is_changed[verify_file(v, v->i_copy, req[0].i_shard)]))
        v->is_zero = v->from.is_zero; /* of the tensor that it is in */
    for (int k = 0; k < n_reqs && rc == 0; k++) {
        rc = req[k].state == IO_FAILED ? disk_fail(&e->io, &req[k], v->err)
                                       : verify_parts(v, x, &req[k], k);
        if (rc == 0) continue;
        if (x->t < N_TENSORS)
            fail_tensor(e, x->il, x->t, rc, v->err);
        else
            fail_in(v->err, rc, "expert %u of layer %u", x->ie, x->il);
    }
    if (rc == 0 && x->t < N_TENSORS) rc = verify_finite(v, x, req[0].at);
    if (rc == 0 && x->t < N_TENSORS) rc = verify_zeros(v, x, req[0].at);
    if (rc == 0 && x->t == N_TENSORS) rc = verify_expert(v, x, req, n_reqs);
    if (rc < 0 && v->i_copy > 0) fail_in(v->err, rc, "mirror %s", e->io.copies[v->i_copy].dir);
    if (rc == 0) verify_advance(v, i);
    v->done += x->n;
    v->first = (v->first + 1) % VERIFY_AHEAD;
    v->n_ahead--;
    return rc < 0 ? rc
                  : engine_progress(e, K3_PHASE_VERIFY, v->done, v->total,
                                    x->il < e->sh.n_layers ? (int)x->il : -1, v->err);
}

/* Ask for a stretch, if this copy has it. */
static int verify_visit(void *user, const stretch *x) {
    verify *v = user;
    k3_engine *e = v->e;
    int rc = v->n_ahead == VERIFY_AHEAD ? verify_oldest(v) : 0;
    uint64_t i_visit = v->i_visit++;
    if (rc < 0) return rc;
    uint32_t i = (v->first + v->n_ahead) % VERIFY_AHEAD;
    io_req *req = v->ahead[i].req;
    uint8_t *to = v->buf + i * v->room;
    v->ahead[i].x = *x;
    v->ahead[i].n_reqs = 1;
    if (x->t == N_TENSORS) {
        v->ahead[i].n_reqs = expert_requests(e, x->il, x->ie, to, req);
    } else {
        req[0] = (io_req){.to = to, .offset = x->offset, .n = x->n, .i_shard = x->i_shard};
        req[0].has_sum = e->sums.sum && x->n_parts == 1;
        req[0].sum = req[0].has_sum ? e->sums.sum[x->i_sum] : 0;
    }
    for (int k = 0; k < v->ahead[i].n_reqs; k++)
        if (e->files.shards[req[k].i_shard].fd[v->i_copy] < 0) return 0;
    if (verify_is_done(v, i_visit, req, v->ahead[i].n_reqs)) {
        v->done += x->n;
        v->n_experts += x->t == N_TENSORS && v->i_copy == 0;
        return 0;
    }
    v->ahead[i].i = i_visit;
    for (int k = 0; k < v->ahead[i].n_reqs; k++) {
        req[k].only = (uint8_t)(v->i_copy + 1);
        if (v->values) req[k].has_sum = false;
        disk_submit(&e->io, &req[k], IO_DEMAND);
    }
    v->n_ahead++;
    return 0;
}

static int verify_measure(void *user, const stretch *x) {
    verify *v = user;
    uint64_t i_visit = v->i_visit++;
    io_req req[N_EXPERT_TENSORS] = {{.i_shard = x->i_shard}};
    int n = x->t == N_TENSORS ? expert_requests(v->e, x->il, x->ie, NULL, req) : 1;
    for (int k = 0; k < n; k++)
        if (v->e->files.shards[req[k].i_shard].fd[v->i_copy] < 0) return 0;
    v->total += x->n;
    if (verify_is_done(v, i_visit, req, n)) v->skipped += x->n;
    return 0;
}

/* What every stretch is: another layout is another check. */
static int verify_mix(void *user, const stretch *x) {
    verify *v = user;
    io_req req[N_EXPERT_TENSORS] = {{.i_shard = x->i_shard, .offset = x->offset, .n = x->n}};
    int n = x->t == N_TENSORS ? expert_requests(v->e, x->il, x->ie, NULL, req) : 1;
    for (int k = 0; k < n; k++) {
        const uint64_t where[] = {v->now.key, req[k].i_shard, req[k].offset, req[k].n};
        v->now.key = XXH3_64bits(where, sizeof where);
    }
    return 0;
}

/* One number for a file as it is now: its name, size and times. 0: it is not there. */
static uint64_t verify_file_now(const shard *s, int i_copy) {
    struct stat st;
    if (s->fd[i_copy] < 0 || fstat(s->fd[i_copy], &st) != 0) return 0;
    const uint64_t v[] = {(uint64_t)st.st_size, (uint64_t)st.st_mtim.tv_sec,
                          (uint64_t)st.st_mtim.tv_nsec, (uint64_t)st.st_ctim.tv_sec,
                          (uint64_t)st.st_ctim.tv_nsec};
    return XXH3_64bits_withSeed(v, sizeof v, XXH3_64bits(s->name, strlen(s->name))) | 1;
}

/* Which check this is, and the files it reads. */
static int verify_identify(verify *v, bool is_writing) {
    k3_engine *e = v->e;
    const sums *u = &e->sums;
    uint32_t n_shards = e->files.n_shards;
    v->now.n_files = v->from.n_files = (uint64_t)e->io.n_copies * n_shards;
    v->now.files = calloc(v->now.n_files + 1, sizeof *v->now.files);
    v->from.files = calloc(v->now.n_files + 1, sizeof *v->now.files);
    v->is_changed = calloc(v->now.n_files + 1, sizeof *v->is_changed);
    if (!v->now.files || !v->from.files || !v->is_changed)
        return fail(v->err, K3_ENOMEM, "out of memory for %u shards", n_shards);
    for (int c = 0; c < e->io.n_copies; c++)
        for (uint32_t i = 0; i < n_shards; i++)
            v->now.files[verify_file(v, c, (uint16_t)i)] = verify_file_now(&e->files.shards[i], c);
    v->now.key = 1 + is_writing;
    if (!is_writing && u->sum)
        v->now.key = XXH3_64bits_withSeed(u->sum, (size_t)u->n * sizeof *u->sum, 3);
    sums_visit(e, verify_mix, v);
    v->from.key = v->now.key;
    v->from.values = v->now.values = is_writing ? sums_values(e) : NULL;
    v->from.n_values = v->now.n_values = is_writing ? u->n : 0;
    return 0;
}

/* "goes on where it was stopped, at 62.0 % of 1560.86 GB (FILE)". */
static void verify_say_from(const verify *v, const char *why, uint64_t n_changed) {
    const k3_options *o = &v->e->opt;
    char line[1024], changed[96] = "";
    if (n_changed)
        snprintf(changed, sizeof changed, "; %llu file%s changed since and %s read again",
                 (unsigned long long)n_changed, n_changed > 1 ? "s" : "",
                 n_changed > 1 ? "are" : "is");
    if (why[0])
        snprintf(line, sizeof line, "begins at the beginning: %.400s %s", o->resume, why);
    else
        snprintf(line, sizeof line,
                 "goes on where it was stopped, at %.1f %% of %.2f GB%s (%.400s)",
                 100.0 * (double)v->skipped / (double)(v->total + !v->total),
                 (double)v->total * 1e-9, changed, o->resume);
    if (o->note) o->note(o->user, line);
}

/* Before anything is read: what is to be read, and what of it is done. */
static int verify_begin(verify *v, bool is_writing) {
    const k3_options *o = &v->e->opt;
    char why[128] = "";
    bool is_resumed = false;
    uint64_t n_changed = 0;
    int rc = o->resume ? verify_identify(v, is_writing) : 0;
    if (rc == 0 && o->resume) {
        is_resumed = k3_resume_read(o->resume, &v->from, why, sizeof why) > 0;
        if (!is_resumed) v->from.i_copy = v->from.n_stretches = 0;
        v->kept_ns = clock_ns();
    }
    for (uint64_t i = 0; is_resumed && i < v->now.n_files; i++) {
        v->is_changed[i] = v->from.files[i] != v->now.files[i];
        n_changed += v->is_changed[i];
    }
    for (v->i_copy = 0; rc == 0 && v->i_copy < v->e->io.n_copies; v->i_copy++) {
        v->i_visit = 0;
        sums_visit(v->e, verify_measure, v);
    }
    if (is_resumed || why[0]) verify_say_from(v, why, n_changed);
    return rc;
}

/* It is through, or keeps how far it came. */
static void verify_end(verify *v, bool is_through) {
    if (v->e->opt.resume && is_through) k3_resume_remove(v->e->opt.resume);
    if (!is_through && v->now.key) verify_keep(v);
    free(v->now.files);
    free(v->from.files);
    free(v->is_changed);
}

/* All copies, one after another. */
static int verify_copies(verify *v) {
    int rc = 0;
    for (v->i_copy = 0; rc == 0 && v->i_copy < v->e->io.n_copies; v->i_copy++) {
        v->i_visit = 0;
        rc = sums_visit(v->e, verify_visit, v);
        while (v->n_ahead > 0) {
            int rest = rc == 0 ? verify_oldest(v) : 0;
            if (rest < 0) rc = rest;
            if (rc == 0 || rest < 0) continue;
            for (int k = 0; k < v->ahead[v->first].n_reqs; k++)
                disk_wait(&v->e->io, &v->ahead[v->first].req[k]);
            v->first = (v->first + 1) % VERIFY_AHEAD;
            v->n_ahead--;
        }
        if (v->values) { /* the other copies are compared with the first */
            v->e->sums.sum = rc == 0 ? v->values : NULL;
            v->values = NULL;
        }
    }
    return rc;
}

static int64_t verify_all(k3_engine *e, bool is_writing, bool compares, k3_error *err) {
    const k3_options *o = &e->opt;
    uint64_t room = io_room(piece_max_bytes(&e->files, &e->sh)), fingerprint = 0;
    if (room < plan_bounce(e)) room = plan_bounce(e);
    uint64_t embed = io_room(piece_bytes(&e->files, T_EMBED));
    if (room < embed) room = embed;
    if (e->sh.n_layers > e->sh.n_dense && room < expert_room(&e->files, &e->sh))
        room = expert_room(&e->files, &e->sh);
    verify v = {.e = e, .room = room, .err = err};
    int rc = 0;
    if (o->headers_only)
        rc = disk_mode(&e->io, o->io == K3_IO_URING, o->direct == K3_ON,
                       o->io_depth ? o->io_depth : 8, err);
    sums_out out = {.fd = -1};
    if (rc == 0 && is_writing) rc = sums_create(e, &out, err);
    if (rc == 0 && is_writing) {
        ledger_give(&e->mem, e->sums.block, e->sums.block_bytes);
        e->print.by_sums = 0; /* an engine opened from now on may say */
        rc = sums_make(e, true, &fingerprint, err);
        v.values = rc == 0 ? sums_values(e) : NULL;
    }
    v.buf = rc == 0 ? ledger_take(&e->mem, VERIFY_AHEAD * room, "verify", err) : NULL;
    if (rc == 0 && !v.buf) rc = e->mem.why;
    if (rc == 0) rc = verify_begin(&v, is_writing);
    if (rc == 0) rc = verify_copies(&v);
    ledger_give(&e->mem, v.buf, VERIFY_AHEAD * room);
    bool is_read = rc == 0;
    if (rc == 0 && is_writing) rc = sums_save(e, &out, fingerprint, compares, err);
    verify_end(&v, is_read && rc != K3_EIO);
    if (rc < 0 && is_writing) e->sums.sum = NULL; /* of what was just read: they would bless it */
    sums_abandon(&out);
    return rc < 0 ? rc : v.n_experts;
}

/* Sums change hands: no step meanwhile. */
static int64_t verify_alone(k3_engine *e, bool is_writing, bool compares, k3_error *err) {
    if (e->opt.config_only)
        return fail(err, K3_EUSAGE, "the engine was opened config_only: it has no weights");
    pthread_mutex_lock(&e->step);
    int64_t rc = verify_all(e, is_writing, compares, err);
    pthread_mutex_unlock(&e->step);
    return rc;
}

int64_t k3_engine_verify(k3_engine *e, k3_error *err) { return verify_alone(e, false, false, err); }

int64_t k3_engine_write_sums(k3_engine *e, bool is_anew, k3_error *err) {
    return verify_alone(e, true, !is_anew, err);
}

