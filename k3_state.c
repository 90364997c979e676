/* k3_state.c - states on disk, and the prefix cache: a directory of them.
 *
 * A file of its own because it reads what somebody else may have written. Nothing in a file is
 * believed: what must come next is known from the session and the header, memory is never taken
 * by a number that a file names (but for the caller's own bytes, at most K3_STATE_APP_MAX), and
 * every byte is under a checksum before it is used.
 *
 * The format, version 1. All numbers are little-endian.
 *
 *   Header, 256 bytes                          Section header, 48 bytes
 *     0   8  "K3STATE\n"                         0   4  u32 kind: 1 ids, 2 app, 3 layer
 *     8   4  u32 version, 1                      4   4  u32 layer; 0 for ids and app
 *    12   4  u32 bytes of this header, 256       8   8  u64 first byte, in the whole array
 *    16  32  numerics id, NUL-padded            16   4  u32 n, bytes unpacked
 *    48   8  u64 model fingerprint              20  16  u32[4] bytes of each plane as stored;
 *    56   8  u64 positions                              n / planes: as it is, less: zstd
 *    64   8  u64 bytes of app                   36   4  0
 *    72   8  u64 sections                       40   8  u64 XXH3-64 of what is stored, seeded
 *    80   8  u64 bytes of the file                      with XXH3-64 of bytes [0, 40)
 *    88   8  u64 bytes unpacked                48       the planes as stored, lowest byte first
 *    96  16  u64[2] key, low half first
 *   112   4  u32 vocab_size                    Sections follow each other without a gap, each
 *   116   4  u32 layers                        at most 262,144 bytes unpacked and all but an
 *   120   4  u32 KDA heads                     array's last exactly that: first the ids, u32;
 *   124   4  u32 KDA head size                 then app, bytes as given; then the layers in
 *   128   4  u32 floats of a latent row        order. Ids and layers are split into four byte
 *   132   4  f32 eps of the lora norms         planes: plane b holds byte b of every element.
 *   136   8  u64 layers in doubt               App is one plane.
 *   144 104  0
 *   248   8  u64 XXH3-64 of bytes [0, 248)
 *
 * Layers in doubt: those for which a far box's sums were taken and compared by nobody.
 * Key: XXH3-128 of numerics id (32 bytes), fingerprint (u64) and ids (u32 each).
 * A KDA layer is f32 [heads][k][v], the state, then f32 [q, k, v][3][heads x d], the last three
 * samples before the convolution, oldest first. An MLA layer is f32 [positions][latent row]:
 * [c | k_pe], padded to groups of 32 with zeros, in each group first the even elements, then the
 * odd ones.
 *
 * The upper plane of f32 holds sign and exponent and shrinks to under a half; mantissas are
 * noise, and zstd says so at once. What costs time is looking for repeats that are not there: a
 * far negative level with Huffman coding of literals finds runs and little else, at three times
 * the speed of level 1 and 1 % more bytes.
 */
#include "k3_error.h"
#include "k3_pool.h"
#include "k3_state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#define ZSTD_STATIC_LINKING_ONLY /* contexts in memory of ours, Huffman at negative levels */
#include <zstd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "states are little-endian, and so are the numbers this file copies"
#endif

/* ==== 1. Errors, numbers ============================================================= */

static double now_s(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static uint32_t get_u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t get_u64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static void put_u32(uint8_t *p, uint32_t v) { memcpy(p, &v, sizeof v); }
static void put_u64(uint8_t *p, uint64_t v) { memcpy(p, &v, sizeof v); }

/* All of it, or an error that names the file. */
static int read_at(int fd, void *to, size_t n, uint64_t at, const char *name, k3_error *err) {
    uint8_t *p = to;
    while (n > 0) {
        ssize_t got = pread(fd, p, n, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(err, K3_EIO, "%s: read of %zu bytes at offset 0x%llx: %s", name, n,
                        (unsigned long long)at, strerror(errno));
        if (got == 0)
            return fail(err, K3_ECHECK, "%s: ends at offset 0x%llx, %zu bytes too early", name,
                        (unsigned long long)at, n);
        p += got;
        n -= (size_t)got;
        at += (uint64_t)got;
    }
    return 0;
}

static int write_at(int fd, const void *from, size_t n, uint64_t at, const char *name,
                    k3_error *err) {
    const uint8_t *p = from;
    while (n > 0) {
        ssize_t put = pwrite(fd, p, n, (off_t)at);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0)
            return fail(err, K3_EIO, "%s: write of %zu bytes at offset 0x%llx: %s", name, n,
                        (unsigned long long)at, put < 0 ? strerror(errno) : "nothing was taken");
        p += put;
        n -= (size_t)put;
        at += (uint64_t)put;
    }
    return 0;
}

/* ==== 2. Header ====================================================================== */

#define HEAD_BYTES 256
#define HEAD_SUM 248 /* where the header's own checksum is */
#define VERSION 1u
static const uint8_t MAGIC[8] = {'K', '3', 'S', 'T', 'A', 'T', 'E', '\n'};

typedef struct {
    char numerics[32];
    uint64_t fingerprint, n_pos, n_app, n_sections, file_bytes, raw_bytes;
    uint64_t key[2], n_doubtful;
    uint32_t vocab_size, n_layers, kda_heads, kda_dim, kv_row;
    float eps_lora;
} head;

/* What a state of this engine says of its model; the rest is 0. */
static int head_of_engine(head *h, const k3_engine *e, k3_error *err) {
    const k3_shape *sh = k3_engine_shape(e);
    uint32_t n_mla = 0;
    memset(h, 0, sizeof *h);
    for (uint32_t il = 0; il < sh->n_layers; il++) n_mla += sh->is_mla[il];
    memcpy(h->numerics, K3_NUMERICS_ID, sizeof K3_NUMERICS_ID);
    h->vocab_size = sh->vocab_size;
    h->n_layers = sh->n_layers;
    h->kda_heads = sh->kda_heads;
    h->kda_dim = sh->kda_dim;
    h->kv_row = n_mla ? (uint32_t)(sh->pos_bytes / n_mla / sizeof(float)) : 0;
    h->eps_lora = sh->eps_lora;
    return k3_state_fingerprint(e, &h->fingerprint, err);
}

static void head_write(const head *h, uint8_t out[HEAD_BYTES]) {
    memset(out, 0, HEAD_BYTES);
    memcpy(out, MAGIC, sizeof MAGIC);
    put_u32(out + 8, VERSION);
    put_u32(out + 12, HEAD_BYTES);
    memcpy(out + 16, h->numerics, sizeof h->numerics);
    const uint64_t wide[] = {h->fingerprint, h->n_pos,     h->n_app,  h->n_sections,
                             h->file_bytes,  h->raw_bytes, h->key[0], h->key[1]};
    for (int i = 0; i < 8; i++) put_u64(out + 48 + 8 * i, wide[i]);
    const uint32_t u[] = {h->vocab_size, h->n_layers, h->kda_heads, h->kda_dim, h->kv_row};
    for (int i = 0; i < 5; i++) put_u32(out + 112 + 4 * i, u[i]);
    memcpy(out + 132, &h->eps_lora, 4);
    put_u64(out + 136, h->n_doubtful);
    put_u64(out + HEAD_SUM, XXH3_64bits(out, HEAD_SUM));
}

/* What of a header can be judged without a model. */
static int head_parse(head *h, const uint8_t in[HEAD_BYTES], uint64_t size, const char *name,
                      k3_error *err) {
    if (memcmp(in, MAGIC, sizeof MAGIC) != 0)
        return fail(err, K3_ECHECK, "%s: not a k3 state file", name);
    if (get_u32(in + 8) != VERSION)
        return fail(err, K3_ECHECK, "%s: a state file of version %u; this program reads version %u",
                    name, get_u32(in + 8), VERSION);
    if (get_u64(in + HEAD_SUM) != XXH3_64bits(in, HEAD_SUM) || get_u32(in + 12) != HEAD_BYTES)
        return fail(err, K3_ECHECK, "%s: damaged: the header's checksum does not match", name);
    memcpy(h->numerics, in + 16, sizeof h->numerics);
    uint64_t *const wide[] = {&h->fingerprint, &h->n_pos,     &h->n_app,  &h->n_sections,
                              &h->file_bytes,  &h->raw_bytes, &h->key[0], &h->key[1]};
    for (int i = 0; i < 8; i++) *wide[i] = get_u64(in + 48 + 8 * i);
    uint32_t *const u[] = {&h->vocab_size, &h->n_layers, &h->kda_heads, &h->kda_dim, &h->kv_row};
    for (int i = 0; i < 5; i++) *u[i] = get_u32(in + 112 + 4 * i);
    memcpy(&h->eps_lora, in + 132, 4);
    h->n_doubtful = get_u64(in + 136);
    bool is_blank = h->numerics[sizeof h->numerics - 1] == 0;
    for (int i = 144; i < HEAD_SUM; i++) is_blank = is_blank && in[i] == 0;
    if (!is_blank || h->n_pos == 0 || h->n_pos > 1u << 30 || h->n_app > K3_STATE_APP_MAX)
        return fail(err, K3_ECHECK, "%s: damaged: the header makes no sense", name);
    if (h->file_bytes != size)
        return fail(err, K3_ECHECK, "%s: %s: %llu bytes, and the header says %llu", name,
                    size < h->file_bytes ? "cut short" : "too long", (unsigned long long)size,
                    (unsigned long long)h->file_bytes);
    return 0;
}

/* Is it a state of this model? Says the first thing that differs. */
static int head_match(const head *h, const head *own, const char *name, k3_error *err) {
    const struct {
        const char *what;
        uint32_t there, here;
    } u[] = {{"vocabulary", h->vocab_size, own->vocab_size},
             {"layers", h->n_layers, own->n_layers},
             {"KDA heads", h->kda_heads, own->kda_heads},
             {"KDA head size", h->kda_dim, own->kda_dim},
             {"latent row", h->kv_row, own->kv_row}};
    if (strcmp(h->numerics, own->numerics) != 0)
        return fail(err, K3_ECHECK, "%s: made under numerics %s, this program computes %s", name,
                    h->numerics, own->numerics);
    for (size_t i = 0; i < sizeof u / sizeof *u; i++)
        if (u[i].there != u[i].here)
            return fail(err, K3_ECHECK, "%s: a state of another model: %s %u there, %u here", name,
                        u[i].what, u[i].there, u[i].here);
    if (memcmp(&h->eps_lora, &own->eps_lora, sizeof h->eps_lora) != 0)
        return fail(err, K3_ECHECK, "%s: made with a lora eps of %g, this run has %g (--lora-eps)",
                    name, (double)h->eps_lora, (double)own->eps_lora);
    if (h->fingerprint != own->fingerprint)
        return fail(err, K3_ECHECK,
                    "%s: a state of another model: same geometry, but fingerprint %016llx there "
                    "and %016llx here: other weights or constants",
                    name, (unsigned long long)h->fingerprint, (unsigned long long)own->fingerprint);
    return 0;
}

/* Start a key; the ids follow. NULL: out of memory. */
static XXH3_state_t *key_begin(const head *h) {
    XXH3_state_t *x = XXH3_createState();
    if (!x) return NULL;
    XXH3_128bits_reset(x);
    XXH3_128bits_update(x, h->numerics, sizeof h->numerics);
    XXH3_128bits_update(x, &h->fingerprint, sizeof h->fingerprint);
    return x;
}

static void key_digest(const XXH3_state_t *x, uint64_t key[2]) {
    XXH128_hash_t k = XXH3_128bits_digest(x);
    key[0] = k.low64;
    key[1] = k.high64;
}

static int key_of(const head *h, const uint32_t *ids, uint64_t n, uint64_t key[2], k3_error *err) {
    XXH3_state_t *x = key_begin(h);
    if (!x) return fail(err, K3_ENOMEM, "state: out of memory");
    XXH3_128bits_update(x, ids, (size_t)n * sizeof *ids);
    key_digest(x, key);
    XXH3_freeState(x);
    return 0;
}

/* ==== 3. Sections ====================================================================
 *
 * A walk gives the pieces of a state in the file's order, the same to the one who writes and the
 * one who reads. A few pieces at a time are packed by as many threads, each in its own part of
 * the step's scratch; a piece never depends on another.
 */
enum { KIND_IDS = 1, KIND_APP = 2, KIND_LAYER = 3 };
#define SECTION_BYTES 48
#define SECTION_SUM 40
#define PIECE_BYTES 262144u
#define ZSTD_LEVEL (-256)
#define CONTEXT_BYTES (384u << 10) /* a zstd context for one plane */
#define MAX_WORKERS 64

typedef struct {
    uint32_t kind, il;
    uint64_t offset;
    uint32_t n;
    uint8_t *p; /* NULL: nobody wants it */
} piece;

typedef struct {
    k3_session *s;
    uint64_t n_pos, n_app;
    uint8_t *app;
    piece at; /* what comes next, but for n */
} walk;

/* The array the walk is in: its start and length. */
static void walk_array(const walk *w, uint8_t **p, uint64_t *n_bytes) {
    k3_state_array a = {k3_state_ids(w->s), w->n_pos * sizeof(uint32_t)};
    if (w->at.kind == KIND_LAYER) k3_state_layer(w->s, w->at.il, w->n_pos, &a);
    *p = w->at.kind == KIND_APP ? w->app : a.p;
    *n_bytes = w->at.kind == KIND_APP ? w->n_app : a.n_bytes;
}

static bool walk_next(walk *w, piece *out) {
    uint32_t n_layers = k3_engine_shape(k3_state_engine(w->s))->n_layers;
    uint8_t *p;
    uint64_t n_bytes;
    if (w->at.kind == 0) w->at.kind = KIND_IDS;
    for (;;) {
        if (w->at.kind == KIND_LAYER && w->at.il == n_layers) return false;
        walk_array(w, &p, &n_bytes);
        if (w->at.offset < n_bytes) break;
        w->at.offset = 0;
        if (w->at.kind == KIND_LAYER)
            w->at.il++;
        else
            w->at.kind++;
    }
    *out = w->at;
    out->n =
        n_bytes - w->at.offset < PIECE_BYTES ? (uint32_t)(n_bytes - w->at.offset) : PIECE_BYTES;
    out->p = p ? p + w->at.offset : NULL;
    w->at.offset += out->n;
    return true;
}

static uint32_t piece_planes(uint32_t kind) { return kind == KIND_APP ? 1 : 4; }

/* One thread's part of the scratch. */
typedef struct {
    uint8_t *stored;   /* [SECTION_BYTES + PIECE_BYTES], section header first */
    uint8_t *planes;   /* [PIECE_BYTES]                                       */
    ZSTD_CCtx *packer; /* one of the two, in CONTEXT_BYTES */
    ZSTD_DCtx *unpacker;
    piece piece;
    uint64_t at, n_stored; /* in the file, with and without the section header */
    int rc;
    k3_error err;
} worker;

#define WORKER_BYTES (2 * PIECE_BYTES + 4096 + CONTEXT_BYTES)
typedef char room_suffices[K3_STATE_ROOM >= WORKER_BYTES ? 1 : -1];

/* zstd for one direction in memory of ours. NULL if a zstd to come should need more of it: then
 * planes are stored as they are, and packed ones cannot be read. */
static ZSTD_CCtx *packer_open(void *context) {
    ZSTD_CCtx *z = ZSTD_initStaticCCtx(context, CONTEXT_BYTES);
    if (!z || ZSTD_isError(ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, ZSTD_LEVEL)) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(z, ZSTD_c_literalCompressionMode, 1)))
        return NULL; /* 1: always Huffman */
    return z;
}

/* As many as there are threads and room for, to pack or to unpack. */
static int workers_open(worker *w, uint8_t *room, uint64_t n_bytes, int n_threads, bool packs) {
    int n = 0;
    for (; n < MAX_WORKERS && n < 4 * n_threads && n_bytes >= WORKER_BYTES; n++) {
        w[n].packer = packs ? packer_open(room) : NULL;
        w[n].unpacker = packs ? NULL : ZSTD_initStaticDCtx(room, CONTEXT_BYTES);
        w[n].planes = room + CONTEXT_BYTES;
        w[n].stored = room + CONTEXT_BYTES + PIECE_BYTES;
        room += WORKER_BYTES;
        n_bytes -= WORKER_BYTES;
    }
    return n;
}

static void planes_split(uint8_t *out, const uint8_t *in, size_t n) {
    uint8_t *a = out, *b = a + n, *c = b + n, *d = c + n;
    for (size_t i = 0; i < n; i++) {
        uint32_t v = get_u32(in + 4 * i);
        a[i] = (uint8_t)v;
        b[i] = (uint8_t)(v >> 8);
        c[i] = (uint8_t)(v >> 16);
        d[i] = (uint8_t)(v >> 24);
    }
}

static void planes_join(uint8_t *out, const uint8_t *const plane[4], size_t n) {
    const uint8_t *a = plane[0], *b = plane[1], *c = plane[2], *d = plane[3];
    for (size_t i = 0; i < n; i++)
        put_u32(out + 4 * i,
                a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24);
}

/* w->piece into w->stored, section header and all. Cannot fail: what zstd will not shrink is
 * stored as it is. */
static void section_pack(worker *w) {
    const piece *p = &w->piece;
    uint32_t n_planes = piece_planes(p->kind), n = p->n / n_planes;
    uint8_t *head48 = w->stored, *out = w->stored + SECTION_BYTES;
    const uint8_t *in = p->p;
    if (n_planes == 4) {
        planes_split(w->planes, p->p, n);
        in = w->planes;
    }
    memset(head48, 0, SECTION_BYTES);
    put_u32(head48, p->kind);
    put_u32(head48 + 4, p->il);
    put_u64(head48 + 8, p->offset);
    put_u32(head48 + 16, p->n);
    for (uint32_t b = 0; b < n_planes; b++) {
        size_t got = w->packer ? ZSTD_compress2(w->packer, out, n - 1, in + (size_t)b * n, n) : n;
        if (ZSTD_isError(got) || got >= n) {
            memcpy(out, in + (size_t)b * n, n);
            got = n;
        }
        put_u32(head48 + 20 + 4 * b, (uint32_t)got);
        out += got;
    }
    w->n_stored = (uint64_t)(out - w->stored) - SECTION_BYTES;
    put_u64(head48 + SECTION_SUM,
            XXH3_64bits_withSeed(w->stored + SECTION_BYTES, (size_t)w->n_stored,
                                 XXH3_64bits(head48, SECTION_SUM)));
}

/* Take a section header, already in w->stored, as that of w->piece: n_stored follows from it.
 * False when it is not one. */
static bool section_measure(worker *w) {
    const uint8_t *in = w->stored;
    const piece *p = &w->piece;
    uint32_t n_planes = piece_planes(p->kind), n = p->n / n_planes;
    w->n_stored = 0;
    if (get_u32(in) != p->kind || get_u32(in + 4) != p->il || get_u64(in + 8) != p->offset ||
        get_u32(in + 16) != p->n || get_u32(in + 36) != 0)
        return false;
    for (uint32_t b = 0; b < 4; b++) {
        uint32_t got = get_u32(in + 20 + 4 * b);
        if (b < n_planes ? got == 0 || got > n : got != 0) return false;
        w->n_stored += got;
    }
    return true;
}

static int section_damaged(const worker *w, const char *name, k3_error *err) {
    static const char *const kind[] = {"", "ids", "app", "layer"};
    char which[24] = "";
    if (w->piece.kind == KIND_LAYER) snprintf(which, sizeof which, " %u", w->piece.il);
    return fail(err, K3_ECHECK, "%s: damaged: %s%s, section at offset 0x%llx", name,
                kind[w->piece.kind], which, (unsigned long long)w->at);
}

/* Read what is stored of w->piece, check it, and unpack it to where it belongs. */
static void section_unpack(worker *w, int fd, const char *name) {
    const piece *p = &w->piece;
    uint32_t n_planes = piece_planes(p->kind), n = p->n / n_planes;
    const uint8_t *in = w->stored + SECTION_BYTES, *plane[4];
    w->rc = read_at(fd, w->stored + SECTION_BYTES, (size_t)w->n_stored, w->at + SECTION_BYTES, name,
                    &w->err);
    if (w->rc < 0) return;
    bool is_whole =
        get_u64(w->stored + SECTION_SUM) ==
        XXH3_64bits_withSeed(in, (size_t)w->n_stored, XXH3_64bits(w->stored, SECTION_SUM));
    for (uint32_t b = 0; is_whole && b < n_planes; b++) {
        uint32_t n_stored = get_u32(w->stored + 20 + 4 * b);
        plane[b] = in;
        if (n_stored < n) {
            plane[b] = w->planes + (size_t)b * n;
            is_whole = w->unpacker && ZSTD_decompressDCtx(w->unpacker, w->planes + (size_t)b * n, n,
                                                          in, n_stored) == n;
        }
        in += n_stored;
    }
    if (!is_whole)
        w->rc = section_damaged(w, name, &w->err);
    else if (p->p && n_planes == 4)
        planes_join(p->p, plane, n);
    else if (p->p)
        memcpy(p->p, plane[0], n);
}

/* ==== 4. A whole state ===============================================================
 *
 * Reading and writing of a batch are spread over the workers as well: both are copies to and
 * from the page cache, and one core copies no faster than a good drive.
 */

#define SECTION_NS 1000000 /* what a section roughly takes one thread */

/* Sections that are packed, written or read at the same time. */
typedef struct {
    worker *w;
    int fd;
    const char *name;
} section_loop;

static void pack_one(void *ctx, size_t i, int i_thread) {
    const section_loop *l = ctx;
    (void)i_thread;
    section_pack(&l->w[i]);
}

static void write_one(void *ctx, size_t i, int i_thread) {
    const section_loop *l = ctx;
    worker *w = &l->w[i];
    (void)i_thread;
    w->rc = write_at(l->fd, w->stored, SECTION_BYTES + (size_t)w->n_stored, w->at, l->name, &w->err);
}

static void unpack_one(void *ctx, size_t i, int i_thread) {
    const section_loop *l = ctx;
    (void)i_thread;
    section_unpack(&l->w[i], l->fd, l->name);
}

/* Section by section to `fd`, over what an earlier writer left there, then the header, which makes it a
 * state. `h` is that of the engine; what the writing finds out is filled in. */
static int state_write(k3_session *s, int fd, const char *name, const void *app, uint64_t n_app,
                       head *h, k3_error *err) {
    k3_engine *e = k3_state_engine(s);
    k3_pool *pool = k3_state_pool(e);
    worker w[MAX_WORKERS];
    section_loop all = {w, fd, name};
    size_t n_ids;
    const uint32_t *ids = k3_session_ids(s, &n_ids);
    h->n_pos = n_ids;
    h->n_app = n_app;
    h->n_doubtful = k3_state_doubtful(s);
    h->file_bytes = HEAD_BYTES;
    int rc = key_of(h, ids, n_ids, h->key, err);
    if (rc < 0) return rc;
    if (ftruncate(fd, 0) != 0)
        return fail(err, K3_EIO, "%s: cannot be written anew: %s", name, strerror(errno));
    uint64_t room;
    uint8_t *scratch = k3_state_begin(e, &room);
    int n_workers = workers_open(w, scratch, room, k3_engine_threads(e), true), n = n_workers;
    walk at = {.s = s, .n_pos = n_ids, .n_app = n_app, .app = (uint8_t *)app}; /* read only */
    while (rc == 0 && n == n_workers) {
        for (n = 0; n < n_workers && walk_next(&at, &w[n].piece); n++) w[n].rc = 0;
        pool_run(pool, (size_t)n, SECTION_NS, pack_one, &all);
        uint64_t from = h->file_bytes;
        for (int i = 0; i < n; i++) {
            w[i].at = h->file_bytes;
            h->file_bytes += SECTION_BYTES + w[i].n_stored;
            h->raw_bytes += w[i].piece.n;
        }
        pool_run(pool, (size_t)n, SECTION_NS, write_one, &all);
        for (int i = n - 1; i >= 0; i--)
            if (w[i].rc < 0) rc = fail(err, w[i].rc, "%s", w[i].err.text);
        h->n_sections += (uint64_t)n;
#ifdef SYNC_FILE_RANGE_WRITE
        /* The drive begins now, not at the fsync. */
        if (n)
            sync_file_range(fd, (off_t)from, (off_t)(h->file_bytes - from), SYNC_FILE_RANGE_WRITE);
#else
        (void)from;
#endif
    }
    k3_state_end(e);
    uint8_t head256[HEAD_BYTES];
    head_write(h, head256);
    return rc < 0 ? rc : write_at(fd, head256, sizeof head256, 0, name, err);
}

/* The sections behind a header that matches, into a session that was reset. */
static int state_read(k3_session *s, int fd, const char *name, const head *h, void *app,
                      k3_error *err) {
    k3_engine *e = k3_state_engine(s);
    k3_pool *pool = k3_state_pool(e);
    worker w[MAX_WORKERS];
    section_loop all = {w, fd, name};
    uint64_t room, at = HEAD_BYTES, raw = 0, n_sections = 0;
    uint8_t *scratch = k3_state_begin(e, &room);
    int n_workers = workers_open(w, scratch, room, k3_engine_threads(e), false), n = n_workers;
    int rc = 0;
    walk next = {.s = s, .n_pos = h->n_pos, .n_app = h->n_app, .app = app};
    while (rc == 0 && n == n_workers) {
        for (n = 0; rc == 0 && n < n_workers && walk_next(&next, &w[n].piece); n++) {
            w[n].at = at;
            rc = read_at(fd, w[n].stored, SECTION_BYTES, at, name, err);
            if (rc == 0 && !section_measure(&w[n])) rc = section_damaged(&w[n], name, err);
            at += SECTION_BYTES + w[n].n_stored;
            raw += w[n].piece.n;
            n_sections++;
        }
        if (rc < 0) break;
        pool_run(pool, (size_t)n, SECTION_NS, unpack_one, &all);
        for (int i = n - 1; i >= 0; i--)
            if (w[i].rc < 0) rc = fail(err, w[i].rc, "%s", w[i].err.text);
    }
    k3_state_end(e);
    if (rc < 0) return rc;
    uint64_t key[2] = {0, 0};
    const uint32_t *ids = k3_state_ids(s);
    for (uint64_t i = 0; i < h->n_pos; i++)
        if (ids[i] >= h->vocab_size)
            return fail(err, K3_ECHECK, "%s: damaged: id %u at position %llu", name, ids[i],
                        (unsigned long long)i);
    if ((rc = key_of(h, ids, h->n_pos, key, err)) < 0) return rc;
    if (at != h->file_bytes || raw != h->raw_bytes || n_sections != h->n_sections ||
        key[0] != h->key[0] || key[1] != h->key[1])
        return fail(err, K3_ECHECK, "%s: damaged: header and sections do not fit together", name);
    return 0;
}

/* Open a state and take its header. Returns a descriptor. */
static int state_open(const char *path, head *h, struct stat *st, k3_error *err) {
    uint8_t head256[HEAD_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = 0;
    if (fd < 0) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
    if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode))
        rc = fail(err, K3_EIO, "%s: not a regular file", path);
    else if (st->st_size < HEAD_BYTES)
        rc = fail(err, K3_ECHECK, "%s: not a k3 state file: %llu bytes", path,
                  (unsigned long long)st->st_size);
    if (rc == 0) rc = read_at(fd, head256, sizeof head256, 0, path, err);
    if (rc == 0) rc = head_parse(h, head256, (uint64_t)st->st_size, path, err);
    if (rc == 0) return fd;
    close(fd);
    return rc;
}

/* Everything from an open file, all or nothing. *app is malloc'd when `app` is given. */
static int state_take(k3_session *s, int fd, const char *path, const head *h, void **app,
                      k3_error *err) {
    head own;
    int rc = head_of_engine(&own, k3_state_engine(s), err);
    if (rc == 0) rc = head_match(h, &own, path, err);
    if (rc < 0) return rc;
    if (h->n_pos > k3_session_context(s))
        return fail(err, K3_EFULL,
                    "%s: a state of %llu positions, more than the context of %llu; give a larger "
                    "--context",
                    path, (unsigned long long)h->n_pos, (unsigned long long)k3_session_context(s));
    if (app && h->n_app && !(*app = malloc((size_t)h->n_app)))
        return fail(err, K3_ENOMEM, "%s: out of memory", path);
    rc = state_read(s, fd, path, h, app ? *app : NULL, err);
    return rc < 0 ? rc : k3_state_resume(s, h->n_pos, h->n_doubtful, path, err);
}

int k3_session_load(k3_session *s, const char *path, void **app, size_t *n_app, k3_state_info *info,
                    k3_error *err) {
    struct stat st;
    head h;
    void *bytes = NULL;
    double start = now_s();
    k3_session_reset(s);
    int fd = state_open(path, &h, &st, err), rc = fd;
    if (fd >= 0) {
        rc = state_take(s, fd, path, &h, app ? &bytes : NULL, err);
        close(fd);
    }
    if (rc < 0) {
        k3_session_reset(s);
        free(bytes);
        bytes = NULL;
    } else if (info) {
        *info = (k3_state_info){h.file_bytes, h.raw_bytes, h.n_pos, now_s() - start};
    }
    if (app) *app = bytes;
    if (n_app) *n_app = rc < 0 ? 0 : (size_t)h.n_app;
    return rc < 0 ? rc : 0;
}

/* ==== 5. Temporary files =============================================================
 *
 * A file being written has a name of its own, its final one with ".tmp" behind it, and its writer
 * holds a lock on it, which the system drops with the process: whoever can take the lock of such
 * a file knows that its owner is gone, and may use or remove it. Names stay few, and no process
 * number is believed.
 */
#define PATH_BYTES 4352

/* Did a writer of ours leave this? Its header comes last, so it begins with ours or with zeros. */
static bool temp_is_ours(int fd, uint64_t size) {
    uint8_t in[sizeof MAGIC] = {0};
    static const uint8_t zeros[sizeof MAGIC];
    if (size == 0) return true;
    return pread(fd, in, sizeof in, 0) == (ssize_t)sizeof in &&
           (memcmp(in, MAGIC, sizeof in) == 0 || memcmp(in, zeros, sizeof in) == 0);
}

/* Create or take over `path`: *fd is locked, with what an owner who is gone has left in it. *fd < 0 with
 * 0 returned: another process is writing it. */
static int temp_open(const char *path, int *fd_out, k3_error *err) {
    *fd_out = -1;
    for (int tries = 0; tries < 100; tries++) {
        struct stat a, b;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (fd < 0) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
            int why = errno;
            close(fd);
            if (why == EINTR) continue;
            return why == EWOULDBLOCK ? 0 : fail(err, K3_EIO, "%s: lock: %s", path, strerror(why));
        }
        /* Renamed or removed by its owner between open and lock? Then it is not ours. */
        if (fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev &&
            a.st_ino == b.st_ino) {
            *fd_out = fd;
            if (S_ISREG(a.st_mode) && temp_is_ours(fd, (uint64_t)a.st_size)) return 0;
            *fd_out = -1;
            close(fd);
            return fail(err, K3_EIO,
                        "%s: is in the way, and no state that was being written; move it", path);
        }
        close(fd);
    }
    return fail(err, K3_EIO, "%s: comes and goes", path);
}

/* Remove a temporary file that nobody is writing any more. */
static void temp_remove_dead(const char *path) {
    struct stat a, b;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &a) == 0 && lstat(path, &b) == 0 &&
        a.st_dev == b.st_dev && a.st_ino == b.st_ino && S_ISREG(a.st_mode))
        unlink(path);
    close(fd);
}

/* The directory's entry survives a power cut from here on. */
static int dir_sync(const char *path, k3_error *err) {
    char dir[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof dir, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
                 ? fail(err, K3_EIO, "%s: fsync: %s", dir, strerror(errno))
                 : 0;
    if (fd >= 0) close(fd);
    return rc;
}

static int session_check(const k3_session *s, k3_error *err) {
    if (k3_state_is_broken(s))
        return fail(err, K3_EUSAGE, "this session ended with an error: it has no state to save");
    if (k3_session_pos(s) == 0)
        return fail(err, K3_EUSAGE, "this session is empty: there is no state to save");
    return 0;
}

/* The temporary file beside `path`: a descriptor, or an error. */
static int save_begin(const char *path, char temp[PATH_BYTES], k3_error *err) {
    struct stat st;
    if (path[0] == 0) return fail(err, K3_EUSAGE, "a state needs a file with a name");
    if (snprintf(temp, PATH_BYTES, "%s.tmp", path) >= PATH_BYTES)
        return fail(err, K3_EUSAGE, "%.200s...: the name is too long", path);
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return fail(err, K3_EIO, "%s: not a regular file", path);
    int fd, rc = temp_open(temp, &fd, err);
    if (rc == 0 && fd < 0) rc = fail(err, K3_EIO, "%s: another process is writing it", temp);
    return rc < 0 ? rc : fd;
}

int k3_state_can_save(const char *path, k3_error *err) {
    char temp[PATH_BYTES], *real = realpath(path, NULL);
    struct stat st;
    int fd = save_begin(real ? real : path, temp, err);
    free(real);
    if (fd < 0) return fd;
    if (fstat(fd, &st) == 0 && st.st_size == 0) unlink(temp); /* what somebody left may be wanted */
    close(fd);
    return 0;
}

/* `path` is resolved: what it links to is replaced, not the link. */
static int save_to(k3_session *s, const char *path, const void *app, size_t n_app, head *h,
                   k3_error *err) {
    char temp[PATH_BYTES];
    int fd = save_begin(path, temp, err), rc;
    if (fd < 0) return fd;
    rc = state_write(s, fd, temp, app, n_app, h, err);
    if (rc == 0 && fsync(fd) != 0) rc = fail(err, K3_EIO, "%s: fsync: %s", temp, strerror(errno));
    if (rc == 0 && rename(temp, path) != 0)
        rc = fail(err, K3_EIO, "%s: rename: %s", path, strerror(errno));
    if (rc < 0) unlink(temp);
    close(fd);
    return rc < 0 ? rc : dir_sync(path, err);
}

int k3_session_save(k3_session *s, const char *path, const void *app, size_t n_app,
                    k3_state_info *info, k3_error *err) {
    head h;
    double start = now_s();
    int rc = session_check(s, err);
    if (rc == 0 && n_app > K3_STATE_APP_MAX)
        rc = fail(err, K3_EUSAGE, "%zu bytes to keep with the state, more than %u", n_app,
                  K3_STATE_APP_MAX);
    if (rc == 0) rc = head_of_engine(&h, k3_state_engine(s), err);
    if (rc < 0) return rc;
    char *real = realpath(path, NULL);
    rc = save_to(s, real ? real : path, app, n_app, &h, err);
    free(real);
    if (rc == 0 && info)
        *info = (k3_state_info){h.file_bytes, h.raw_bytes, h.n_pos, now_s() - start};
    return rc;
}

/* ==== 6. Without a model ============================================================= */

/* One section by its own header, into memory of the caller's. Its kind may not step back. */
static int check_section(worker *w, int fd, const char *name, const head *h, k3_error *err) {
    uint8_t *in = w->stored;
    uint32_t last = w->piece.kind;
    int rc = read_at(fd, in, SECTION_BYTES, w->at, name, err);
    if (rc < 0) return rc;
    w->piece = (piece){get_u32(in), get_u32(in + 4), get_u64(in + 8), get_u32(in + 16), w->piece.p};
    const piece *p = &w->piece;
    if (p->kind < KIND_IDS || p->kind > KIND_LAYER || p->kind < last || p->il >= h->n_layers ||
        p->n == 0 || p->n > PIECE_BYTES || p->n % piece_planes(p->kind) || !section_measure(w)) {
        w->piece.kind = 0;
        return fail(err, K3_ECHECK, "%s: damaged: section header at offset 0x%llx", name,
                    (unsigned long long)w->at);
    }
    w->rc = 0;
    section_unpack(w, fd, name);
    return w->rc < 0 ? fail(err, w->rc, "%s", w->err.text) : 0;
}

static int check_sections(int fd, const char *name, const head *h, uint8_t *room, k3_error *err) {
    worker w;
    XXH3_state_t *x = key_begin(h);
    uint64_t raw = 0, n_ids = 0, n_app = 0, n_sections = 0, key[2] = {0, 0};
    int rc = x ? 0 : fail(err, K3_ENOMEM, "%s: out of memory", name);
    memset(&w, 0, sizeof w);
    workers_open(&w, room, WORKER_BYTES, 1, false);
    w.piece.p = room + WORKER_BYTES;
    w.at = HEAD_BYTES;
    while (rc == 0 && w.at < h->file_bytes && n_sections < h->n_sections) {
        if ((rc = check_section(&w, fd, name, h, err)) < 0) break;
        if (w.piece.kind == KIND_IDS) {
            XXH3_128bits_update(x, w.piece.p, w.piece.n);
            n_ids += w.piece.n / sizeof(uint32_t);
        }
        if (w.piece.kind == KIND_APP) n_app += w.piece.n;
        raw += w.piece.n;
        n_sections++;
        w.at += SECTION_BYTES + w.n_stored;
    }
    if (x) key_digest(x, key);
    XXH3_freeState(x);
    if (rc == 0 &&
        (w.at != h->file_bytes || n_sections != h->n_sections || raw != h->raw_bytes ||
         n_ids != h->n_pos || n_app != h->n_app || key[0] != h->key[0] || key[1] != h->key[1]))
        rc = fail(err, K3_ECHECK, "%s: damaged: header and sections do not fit together", name);
    return rc;
}

int k3_state_check(const char *path, bool all, k3_state_head *out, k3_error *err) {
    struct stat st;
    head h;
    memset(out, 0, sizeof *out);
    int fd = state_open(path, &h, &st, err), rc = 0;
    if (fd < 0) return fd;
    memcpy(out->numerics, h.numerics, sizeof out->numerics);
    out->fingerprint = h.fingerprint;
    out->n_pos = h.n_pos;
    out->file_bytes = h.file_bytes;
    out->raw_bytes = h.raw_bytes;
    out->n_app = h.n_app;
    out->n_doubtful = h.n_doubtful;
    out->used_s = (uint64_t)st.st_mtime;
    uint8_t *room = all ? malloc(WORKER_BYTES + PIECE_BYTES) : NULL;
    if (all)
        rc = room ? check_sections(fd, path, &h, room, err)
                  : fail(err, K3_ENOMEM, "%s: out of memory", path);
    free(room);
    close(fd);
    return rc;
}

/* ==== 7. The prefix cache ============================================================
 *
 * One file for each state, POSITIONS-KEY.k3s, and nothing besides: no index that could be wrong.
 * What is there is what the directory lists; the key says of which ids, so finding the longest
 * prefix is one pass of hashing and no file is opened in vain. Use is the modification time.
 *
 * Safe with any number of processes because each step is one system call that happens or does
 * not: an entry appears by rename, whole; it goes by unlink, and who has it open reads on. Two
 * that evict at once see the same list and choose the same entries. Entries are not fsynced: a
 * power cut may tear one, which its checksums tell, and waiting for the drive at every turn would
 * be the price. Files with other names are never touched.
 */
struct k3_cache {
    k3_engine *e;
    char *dir;
    uint64_t max_bytes;
    head own;
    k3_cache_stats stats;
    bool is_told; /* that entries do not fit */
};

typedef struct {
    uint64_t n_pos, key[2], bytes, used_ns;
    bool is_match;
} entry;

typedef struct {
    entry *at;
    size_t n, cap;
    uint64_t bytes;
} entry_list;

static int entry_path(char out[PATH_BYTES], const char *dir, uint64_t n_pos, const uint64_t key[2],
                      const char *end) {
    int n =
        snprintf(out, PATH_BYTES, "%s/%llu-%016llx%016llx.k3s%s", dir, (unsigned long long)n_pos,
                 (unsigned long long)key[1], (unsigned long long)key[0], end);
    return n < PATH_BYTES ? 0 : K3_EUSAGE;
}

static bool hex_u64(const char *s, uint64_t *out) {
    *out = 0;
    for (int i = 0; i < 16; i++) {
        const char *digits = "0123456789abcdef", *at = s[i] ? strchr(digits, s[i]) : NULL;
        if (!at) return false;
        *out = *out << 4 | (uint64_t)(at - digits);
    }
    return true;
}

/* A name of ours? Exactly as entry_path writes it, with or without ".tmp". */
static bool entry_parse(const char *name, entry *out, bool *is_temp) {
    size_t n = strspn(name, "0123456789");
    char again[128];
    if (n == 0 || n > 10 || name[n] != '-' || strlen(name) > 100) return false;
    out->n_pos = strtoull(name, NULL, 10);
    if (!hex_u64(name + n + 1, &out->key[1]) || !hex_u64(name + n + 17, &out->key[0])) return false;
    *is_temp = strcmp(name + n + 33, ".k3s.tmp") == 0;
    snprintf(again, sizeof again, "%llu", (unsigned long long)out->n_pos);
    return out->n_pos > 0 && strlen(again) == n && (*is_temp || strcmp(name + n + 33, ".k3s") == 0);
}

static int entry_add(entry_list *l, const entry *x, k3_error *err) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 64;
        entry *grown = realloc(l->at, cap * sizeof *grown);
        if (!grown) return fail(err, K3_ENOMEM, "cache: out of memory");
        l->at = grown;
        l->cap = cap;
    }
    l->at[l->n++] = *x;
    l->bytes += x->bytes;
    return 0;
}

/* The entries of a directory. With `cleans`, what killed writers left is removed. */
static int cache_scan(const char *dir, bool cleans, entry_list *out, k3_error *err) {
    memset(out, 0, sizeof *out);
    DIR *d = opendir(dir);
    if (!d) return fail(err, K3_EIO, "%s: %s", dir, strerror(errno));
    int rc = 0;
    for (struct dirent *f; rc == 0 && (f = readdir(d));) {
        struct stat st;
        char path[PATH_BYTES];
        bool is_temp;
        entry x = {.is_match = false};
        if (!entry_parse(f->d_name, &x, &is_temp) ||
            snprintf(path, sizeof path, "%s/%s", dir, f->d_name) >= (int)sizeof path)
            continue;
        if (is_temp) {
            if (cleans) temp_remove_dead(path);
        } else if (lstat(path, &st) == 0 && S_ISREG(st.st_mode)) {
            x.bytes = (uint64_t)st.st_size;
            x.used_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec;
            rc = entry_add(out, &x, err);
        }
    }
    closedir(d);
    return rc;
}

static int order(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

/* Least recently used first. */
static int entry_by_use(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int o = order(x->used_ns, y->used_ns);
    if (o == 0) o = order(x->key[1], y->key[1]);
    return o ? o : order(x->key[0], y->key[0]);
}

static int entry_by_length(const void *a, const void *b) {
    return order(((const entry *)a)->n_pos, ((const entry *)b)->n_pos);
}

static void entries_sort(entry_list *l, int (*by)(const void *, const void *)) {
    if (l->n) qsort(l->at, l->n, sizeof *l->at, by);
}

/* Remove the least recently used beyond max_bytes, never the entry `kept` (may be NULL). */
static int cache_evict(const char *dir, uint64_t max_bytes, const uint64_t *kept, uint64_t *n_gone,
                       uint64_t *bytes_gone, k3_error *err) {
    entry_list l;
    int rc = cache_scan(dir, true, &l, err);
    entries_sort(&l, entry_by_use);
    for (size_t i = 0; rc == 0 && i < l.n && l.bytes > max_bytes; i++) {
        char path[PATH_BYTES];
        const entry *x = &l.at[i];
        if (kept && x->key[0] == kept[0] && x->key[1] == kept[1]) continue;
        if (entry_path(path, dir, x->n_pos, x->key, "") < 0) continue;
        if (unlink(path) == 0) {
            ++*n_gone;
            *bytes_gone += x->bytes;
        } else if (errno != ENOENT) {
            rc = fail(err, K3_EIO, "%s: %s", path, strerror(errno));
        }
        l.bytes -= x->bytes;
    }
    free(l.at);
    return rc;
}

int64_t k3_cache_trim(const char *dir, uint64_t max_bytes, uint64_t *bytes, k3_error *err) {
    uint64_t n = 0, gone = 0;
    int rc = cache_evict(dir, max_bytes, NULL, &n, &gone, err);
    if (bytes) *bytes = gone;
    return rc < 0 ? rc : (int64_t)n;
}

int64_t k3_cache_list(const char *dir, k3_cache_fn fn, void *user, k3_error *err) {
    entry_list l;
    int64_t rc = cache_scan(dir, false, &l, err), n = 0;
    entries_sort(&l, entry_by_use);
    for (size_t i = l.n; rc == 0 && i-- > 0;) {
        char path[PATH_BYTES];
        k3_state_head h;
        k3_error why = {{0}};
        if (entry_path(path, dir, l.at[i].n_pos, l.at[i].key, "") < 0) continue;
        int status = k3_state_check(path, false, &h, &why);
        if (status == K3_EIO && access(path, F_OK) != 0) continue; /* evicted meanwhile */
        rc = fn(user, path, &h, status, &why);
        n++;
    }
    free(l.at);
    return rc < 0 ? rc : n;
}

int k3_cache_open(k3_cache **out, k3_engine *e, const char *dir, uint64_t max_bytes,
                  k3_error *err) {
    struct stat st;
    *out = NULL;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return fail(err, K3_EIO, "cache %s: %s", dir, strerror(errno));
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode) || access(dir, R_OK | W_OK | X_OK) != 0)
        return fail(err, K3_EIO, "cache %s: not a directory that can be written to", dir);
    k3_cache *c = calloc(1, sizeof *c);
    if (!c || !(c->dir = strdup(dir))) {
        free(c);
        return fail(err, K3_ENOMEM, "cache: out of memory");
    }
    c->e = e;
    c->max_bytes = max_bytes ? max_bytes : UINT64_MAX;
    int rc = head_of_engine(&c->own, e, err);
    if (rc == 0) rc = cache_evict(dir, c->max_bytes, NULL, &c->stats.evicted, &(uint64_t){0}, err);
    if (rc < 0)
        k3_cache_close(c);
    else
        *out = c;
    return rc;
}

void k3_cache_close(k3_cache *c) {
    if (!c) return;
    free(c->dir);
    free(c);
}

void k3_cache_get_stats(const k3_cache *c, k3_cache_stats *out) {
    entry_list l;
    cache_scan(c->dir, false, &l, NULL);
    *out = c->stats;
    out->n_entries = l.n;
    out->bytes = l.bytes;
    free(l.at);
}

static void cache_note(const k3_cache *c, const char *what, const k3_error *why) {
    char line[640];
    snprintf(line, sizeof line, "%s%s", why->text, what);
    k3_state_note(c->e, line);
}

/* Said once: it would be said at every turn. */
static void cache_note_size(k3_cache *c, uint64_t n_bytes) {
    char line[160];
    if (c->is_told) return;
    c->is_told = true;
    snprintf(line, sizeof line,
             "cache: a state of about %llu bytes is more than the whole cache may hold (%llu)",
             (unsigned long long)n_bytes, (unsigned long long)c->max_bytes);
    k3_state_note(c->e, line);
}

/* Mark the entries that are of a prefix of ids[0, n); the list is sorted by length after. */
static int cache_match(const k3_cache *c, entry_list *l, const uint32_t *ids, size_t n,
                       k3_error *err) {
    XXH3_state_t *x = key_begin(&c->own);
    uint64_t done = 0, key[2] = {0, 0};
    if (!x) return fail(err, K3_ENOMEM, "cache: out of memory");
    entries_sort(l, entry_by_length);
    for (size_t i = 0; i < l->n && l->at[i].n_pos <= n; i++) {
        entry *at = &l->at[i];
        if (at->n_pos > done) {
            XXH3_128bits_update(x, ids + done, (size_t)(at->n_pos - done) * sizeof *ids);
            done = at->n_pos;
            key_digest(x, key);
        }
        at->is_match = at->key[0] == key[0] && at->key[1] == key[1];
    }
    XXH3_freeState(x);
    return 0;
}

/* Layers of an entry that are in doubt; an entry that cannot be read has none. */
static uint64_t cache_doubtful(const char *path) {
    struct stat st;
    head h = {.n_doubtful = 0};
    int fd = state_open(path, &h, &st, NULL);
    if (fd < 0) return 0;
    close(fd);
    return h.n_doubtful;
}

/* Who compares what boxes answer does not go on from answers that nobody compared. */
static int cache_is_fit(const k3_cache *c, const char *path, k3_error *err) {
    uint64_t n = k3_state_has_audits(c->e) ? cache_doubtful(path) : 0;
    if (n == 0) return 0;
    return fail(err, K3_EREDO, "%s: far boxes answered in %llu layers and nobody compared", path,
                (unsigned long long)n);
}

/* One entry into the session. 0: it is there; else what it was no good for. */
static int cache_take(k3_cache *c, k3_session *s, const entry *x, const uint32_t *ids) {
    char path[PATH_BYTES];
    k3_error why = {{0}};
    size_t n;
    if (entry_path(path, c->dir, x->n_pos, x->key, "") < 0) return K3_EUSAGE;
    int rc = cache_is_fit(c, path, &why);
    if (rc == 0) rc = k3_session_load(s, path, NULL, NULL, NULL, &why);
    if (rc == 0) {
        const uint32_t *own = k3_session_ids(s, &n);
        if (n != x->n_pos || memcmp(own, ids, n * sizeof *ids) != 0)
            rc = fail(&why, K3_ECHECK, "%s: not of the ids its name says", path);
    }
    if (rc == 0) {
        utimensat(AT_FDCWD, path, NULL, 0); /* used now; a failure costs only its place in line */
    } else if (access(path, F_OK) == 0) {   /* else another process evicted it */
        bool is_gone = rc == K3_ECHECK && unlink(path) == 0;
        cache_note(c, is_gone ? "; the cache entry was removed" : "; the cache entry was not used",
                   &why);
    }
    return rc;
}

int64_t k3_cache_restore(k3_cache *c, k3_session *s, const uint32_t *ids, size_t n, k3_error *err) {
    entry_list l;
    k3_error why = {{0}};
    k3_session_reset(s);
    if (cache_scan(c->dir, false, &l, &why) < 0) cache_note(c, "; the cache is not used", &why);
    int64_t rc = cache_match(c, &l, ids, n, err), found = 0;
    for (size_t i = l.n; rc == 0 && found == 0 && i-- > 0;) {
        const entry *x = &l.at[i];
        if (x->is_match && x->n_pos <= k3_session_context(s) && cache_take(c, s, x, ids) == 0)
            found = (int64_t)x->n_pos;
    }
    free(l.at);
    if (found == 0) k3_session_reset(s);
    c->stats.hits += found > 0;
    c->stats.misses += found == 0;
    c->stats.restored_pos += (uint64_t)found;
    return rc < 0 ? rc : found;
}

bool k3_cache_has(const k3_cache *c, const uint32_t *ids, size_t n) {
    char path[PATH_BYTES];
    uint64_t key[2] = {0, 0};
    return n > 0 && key_of(&c->own, ids, n, key, NULL) == 0 &&
           entry_path(path, c->dir, n, key, "") == 0 && access(path, R_OK) == 0 &&
           cache_is_fit(c, path, NULL) == 0;
}

/* Write an entry and give it its name; *is_kept says whether it is there then. */
static int cache_write(k3_cache *c, k3_session *s, const char *path, const char *temp,
                       bool *is_kept, k3_error *err) {
    head h = c->own;
    int fd, rc = temp_open(temp, &fd, err);
    *is_kept = false;
    if (fd < 0) return rc; /* 0: another process is writing the same */
    rc = state_write(s, fd, temp, NULL, 0, &h, err);
    bool fits = h.file_bytes <= c->max_bytes;
    if (rc == 0 && fits && rename(temp, path) != 0)
        rc = fail(err, K3_EIO, "%s: rename: %s", path, strerror(errno));
    *is_kept = rc == 0 && fits;
    if (!*is_kept) unlink(temp);
    if (rc == 0 && !fits) cache_note_size(c, h.file_bytes);
    close(fd);
    return rc;
}

int k3_cache_store(k3_cache *c, k3_session *s, k3_error *err) {
    char path[PATH_BYTES], temp[PATH_BYTES];
    size_t n;
    uint64_t key[2] = {0, 0}, gone = 0;
    const uint32_t *ids = k3_session_ids(s, &n);
    const k3_shape *sh = k3_engine_shape(c->e);
    bool is_kept = false;
    bool is_doubtful = k3_state_doubtful(s) > 0;
    if ((n == 0 || (is_doubtful && k3_state_has_audits(c->e))) && !k3_state_is_broken(s)) return 0;
    int rc = session_check(s, err);
    if (rc == 0) rc = key_of(&c->own, ids, n, key, err);
    if (rc < 0) return rc;
    if (entry_path(path, c->dir, n, key, "") < 0 || entry_path(temp, c->dir, n, key, ".tmp") < 0)
        return fail(err, K3_EUSAGE, "cache %.200s...: the name is too long", c->dir);
    if (utimensat(AT_FDCWD, path, NULL, 0) == 0 && (is_doubtful || cache_doubtful(path) == 0))
        return 0; /* there, and used now; one in doubt makes room for one that is not */
    uint64_t raw = sh->state_bytes + n * sh->pos_bytes;
    if (raw / 2 > c->max_bytes) { /* half of it is mantissas, which do not shrink */
        cache_note_size(c, raw);
        return 0;
    }
    rc = cache_write(c, s, path, temp, &is_kept, err);
    c->stats.stored += is_kept;
    return is_kept ? cache_evict(c->dir, c->max_bytes, key, &c->stats.evicted, &gone, err) : rc;
}
