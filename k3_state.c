/* k3_state.c - states on disk, and the prefix cache: a directory of them.
 *
 * A file of its own because it reads what somebody else may have written. Nothing in a file is
 * believed: what must come next is known from the session and the header, memory is never taken
 * by a number that a file names (but for the caller's own bytes, at most K3_STATE_APP_MAX), and
 * every byte is under a checksum before it is used.
 *
 * The format, version 2. All numbers are little-endian.
 *
 *   Header, 256 bytes                          Table, 64 bytes for each section
 *     0   8  "K3STATE\n"                         0  16  name, NUL-padded
 *     8   4  u32 version, 2                     16   4  u32 flags; 1: required
 *    12   4  u32 bytes of header and table      20   4  u32 planes, 1 or 4
 *    16  32  numerics id, NUL-padded            24   8  u64 first byte in the file
 *    48   8  u64 fingerprint, sampled           32   8  u64 bytes in the file
 *    56   8  u64 the same by sums; 0: none      40   8  u64 bytes unpacked
 *    64   8  u64 stamp of the files; 0: none    48   8  u64 what it is of, besides the model
 *    72   8  u64 pieces                         56   8  0
 *    80   8  u64 bytes of the file
 *    88   8  u64 bytes unpacked               Piece, 48 bytes and what is stored
 *    96  16  u64[2] key, low half first          0   4  u32 section: 1 is the table's first
 *   112   4  u32 vocab_size                      4   4  u32 array of that section
 *   116   4  u32 layers                          8   8  u64 first byte, in the whole array
 *   120   4  u32 KDA heads                      16   4  u32 n, bytes unpacked
 *   124   4  u32 KDA head size                  20  16  u32[4] bytes of each plane as stored;
 *   128   4  u32 floats of a latent row                 n / planes: as it is, less: zstd
 *   132   4  f32 eps of the lora norms          36   4  0
 *   136   8  u64 unverified                     40   8  u64 XXH3-64 of what is stored, seeded
 *   144   8  u64 positions                              with XXH3-64 of bytes [0, 40)
 *   152   4  u32 sections, at most 32           48       the planes as stored, lowest byte first
 *   156  84  0
 *   240   8  u64 XXH3-64 of the table
 *   248   8  u64 XXH3-64 of bytes [0, 248)
 *
 * Sections lie in the table's order behind it, without a gap. Each is one array after another, each array
 * cut into pieces of 262,144 bytes unpacked and a last one with the rest. A reader skips a section whose
 * name it does not know, or that is of something it does not have, unless the section is required: then
 * it refuses the file by that name. Sections are split into byte planes: plane b holds byte b of every
 * element.
 *
 *   "ids"     required  u32[positions]
 *   "app"               the caller's bytes, in one plane; absent when there are none
 *   "layers"  required  an array for each layer, in order. A KDA layer is f32 [heads][k][v], the state,
 *                       then f32 [q, k, v][3][heads x d], the last three samples before the
 *                       convolution, oldest first. An MLA layer is f32 [positions][latent row]:
 *                       [c | k_pe], padded to groups of 32 with zeros, in each group first the even
 *                       elements, then the odd ones.
 *
 * Unverified: not 0 when sums of far boxes that nobody compared went into the state (a count of layers in
 * files of earlier versions).
 * Stamp: XXH3-64 over name, size and time of the last change (ctime) of the model's files as this machine
 * has them; it says that nobody touched them since, where there are no sums to tell.
 * Key: XXH3-128 of numerics id (32 bytes), sampled fingerprint (u64), the fingerprint by sums or, when
 * that is 0, the stamp (u64), and the ids (u32 each).
 *
 * Version 1 is read as well. It has no table: 156 is where its zeros begin, 56 are the positions, 64 the
 * bytes of app, 144 is 0, and the three sections above, numbered 1 to 3, follow the header of 256 bytes.
 * Its key has the sampled fingerprint alone.
 *
 * The upper plane of f32 holds sign and exponent and shrinks to under a half; mantissas are
 * noise, and zstd says so at once. What costs time is looking for repeats that are not there: a
 * far negative level with Huffman coding of literals finds runs and little else, at three times
 * the speed of level 1 and 1 % more bytes.
 */
#include "k3_common.h"
#include "k3_error.h"
#include "k3_pool.h"
#include "k3_state.h"
#include "k3_temp.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
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

/* Read exactly n bytes; the error names the file. */
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
#define HEAD_TABLE_SUM 240
#define HEAD_SUM 248 /* offset of the header's own checksum */
#define ENTRY_BYTES 64
#define MAX_ENTRIES 32
STATIC_ASSERT(sums_end_the_header, HEAD_TABLE_SUM + 8 == HEAD_SUM && HEAD_SUM + 8 == HEAD_BYTES);
#define VERSION 2u
#define OLD_VERSION 1u
static const uint8_t MAGIC[8] = {'K', '3', 'S', 'T', 'A', 'T', 'E', '\n'};

/* The session that a state is written of, or read into. */
typedef struct {
    k3_session *s;
    uint64_t n_pos, n_app;
    uint8_t *app; /* NULL while reading: not wanted */
} source;

static bool ids_array(const source *x, uint32_t i, k3_state_array *out) {
    *out = (k3_state_array){k3_state_ids(x->s), x->n_pos * sizeof(uint32_t)};
    return i == 0;
}

static bool app_array(const source *x, uint32_t i, k3_state_array *out) {
    *out = (k3_state_array){x->app, x->n_app};
    return i == 0;
}

static bool layers_array(const source *x, uint32_t i, k3_state_array *out) {
    if (i >= k3_engine_shape(k3_session_engine(x->s))->n_layers) return false;
    k3_state_layer(x->s, i, x->n_pos, out);
    return true;
}

/* The sections that this program knows, in the order it writes them; one without a byte is left out. A
 * new one is a row here; an older program skips it unless it is required. A file may have others. */
enum { IDS, APP, LAYERS, N_SECTIONS };
typedef struct {
    char name[17];
    uint32_t n_planes;
    bool is_required;
    bool (*array)(const source *x, uint32_t i, k3_state_array *out); /* false: no array i */
} section_kind;
STATIC_ASSERT(sections_fit_the_table, N_SECTIONS <= MAX_ENTRIES);
static const section_kind SECTION[N_SECTIONS] = {[IDS] = {"ids", 4, true, ids_array},
                                                 [APP] = {"app", 1, false, app_array},
                                                 [LAYERS] = {"layers", 4, true, layers_array}};
#define FLAG_REQUIRED 1u

static uint64_t section_raw(const source *x, int kind) {
    k3_state_array a;
    uint64_t n = 0;
    for (uint32_t i = 0; SECTION[kind].array(x, i, &a); i++) n += a.n_bytes;
    return n;
}

/* One line of the file's table of sections. */
typedef struct {
    char name[17];
    bool is_required;
    uint32_t number;   /* its number in the heads of its pieces              */
    uint32_t n_planes;
    uint64_t first, n_stored, n_raw, of; /* first 0: of version 1, unknown   */
    int kind; /* index in SECTION; -1: unknown, or of more than the model */
} section;

typedef struct {
    uint32_t version, n_sections;
    char numerics[32];
    k3_fingerprints print;
    uint64_t stamp, n_pos, n_app, n_pieces, file_bytes, raw_bytes;
    uint64_t key[2], n_unverified;
    uint32_t vocab_size, n_layers, kda_heads, kda_dim, kv_row;
    float eps_lora;
    section section[MAX_ENTRIES];
} head;

/* Fill what a state of this engine says of its model; the rest is 0. */
static int head_of_engine(head *h, k3_engine *e, k3_error *err) {
    const k3_shape *sh = k3_engine_shape(e);
    uint32_t n_mla = 0;
    memset(h, 0, sizeof *h);
    for (uint32_t il = 0; il < sh->n_layers; il++) n_mla += sh->is_mla[il];
    h->version = VERSION;
    memcpy(h->numerics, K3_NUMERICS_ID, sizeof K3_NUMERICS_ID);
    h->vocab_size = sh->vocab_size;
    h->n_layers = sh->n_layers;
    h->kda_heads = sh->kda_heads;
    h->kda_dim = sh->kda_dim;
    h->kv_row = n_mla ? (uint32_t)(sh->pos_bytes / n_mla / sizeof(float)) : 0;
    h->eps_lora = sh->eps_lora;
    h->stamp = k3_state_stamp(e);
    return k3_engine_fingerprints(e, &h->print, err);
}

/* The offset of a number of the header in this version and in the one before; 0: not there. */
typedef struct {
    uint32_t at, at_old;
    void *p;
} head_field;
enum { N_WIDE = 11, N_NARROW = 6 };

static void head_fields(head *h, head_field wide[N_WIDE], head_field narrow[N_NARROW]) {
    const head_field w[] = {
        {48, 48, &h->print.sampled}, {56, 0, &h->print.by_sums}, {64, 0, &h->stamp},
        {72, 72, &h->n_pieces},      {80, 80, &h->file_bytes},   {88, 88, &h->raw_bytes},
        {96, 96, &h->key[0]},        {104, 104, &h->key[1]},     {136, 136, &h->n_unverified},
        {144, 56, &h->n_pos},        {0, 64, &h->n_app}};
    const head_field n[] = {{112, 112, &h->vocab_size}, {116, 116, &h->n_layers},
                            {120, 120, &h->kda_heads},  {124, 124, &h->kda_dim},
                            {128, 128, &h->kv_row},     {152, 0, &h->n_sections}};
    STATIC_ASSERT(every_number_has_its_place,
                  sizeof w / sizeof *w == N_WIDE && sizeof n / sizeof *n == N_NARROW);
    memcpy(wide, w, sizeof w);
    memcpy(narrow, n, sizeof n);
}

static void table_write(const head *h, uint8_t *out) {
    memset(out, 0, (size_t)h->n_sections * ENTRY_BYTES);
    for (uint32_t i = 0; i < h->n_sections; i++, out += ENTRY_BYTES) {
        const section *x = &h->section[i];
        memcpy(out, x->name, strlen(x->name));
        put_u32(out + 16, x->is_required ? FLAG_REQUIRED : 0);
        put_u32(out + 20, x->n_planes);
        put_u64(out + 24, x->first);
        put_u64(out + 32, x->n_stored);
        put_u64(out + 40, x->n_raw);
        put_u64(out + 48, x->of);
    }
}

/* Write header and table. Returns their length, HEAD_BYTES + n_sections x ENTRY_BYTES. */
static size_t head_write(head *h, uint8_t out[HEAD_BYTES + MAX_ENTRIES * ENTRY_BYTES]) {
    head_field wide[N_WIDE], narrow[N_NARROW];
    size_t n = HEAD_BYTES + (size_t)h->n_sections * ENTRY_BYTES;
    head_fields(h, wide, narrow);
    memset(out, 0, HEAD_BYTES);
    memcpy(out, MAGIC, sizeof MAGIC);
    put_u32(out + 8, VERSION);
    put_u32(out + 12, (uint32_t)n);
    memcpy(out + 16, h->numerics, sizeof h->numerics);
    for (int i = 0; i < N_WIDE; i++)
        if (wide[i].at) memcpy(out + wide[i].at, wide[i].p, 8);
    for (int i = 0; i < N_NARROW; i++) memcpy(out + narrow[i].at, narrow[i].p, 4);
    memcpy(out + 132, &h->eps_lora, 4);
    table_write(h, out + HEAD_BYTES);
    put_u64(out + HEAD_TABLE_SUM, XXH3_64bits(out + HEAD_BYTES, n - HEAD_BYTES));
    put_u64(out + HEAD_SUM, XXH3_64bits(out, HEAD_SUM));
    return n;
}

static int head_senseless(const char *name, k3_error *err) {
    return fail(err, K3_ECHECK, "%s: damaged: the header makes no sense", name);
}

/* Read a section's name, which must be printable and have only zeros behind its end. */
static bool entry_name(char to[17], const uint8_t *in) {
    memcpy(to, in, 16);
    to[16] = 0;
    size_t n = strlen(to);
    for (size_t i = 0; i < n; i++)
        if (to[i] <= ' ' || to[i] > '~') return false;
    for (size_t i = n; i < 16; i++)
        if (in[i]) return false;
    return n > 0;
}

static int section_kind_of(const char *name) {
    for (int k = 0; k < N_SECTIONS; k++)
        if (strcmp(SECTION[k].name, name) == 0) return k;
    return -1;
}

/* Read one line of the table; its section must begin where the one before ends. */
static int entry_parse_section(head *h, uint32_t i, const uint8_t *in, const char *name,
                               k3_error *err) {
    section *x = &h->section[i];
    uint32_t flags = get_u32(in + 16);
    uint64_t at = i ? x[-1].first + x[-1].n_stored : HEAD_BYTES + h->n_sections * ENTRY_BYTES;
    *x = (section){.number = i + 1,
                   .is_required = flags & FLAG_REQUIRED,
                   .n_planes = get_u32(in + 20),
                   .first = get_u64(in + 24),
                   .n_stored = get_u64(in + 32),
                   .n_raw = get_u64(in + 40),
                   .of = get_u64(in + 48)};
    if (!entry_name(x->name, in)) return head_senseless(name, err);
    x->kind = section_kind_of(x->name);
    if (flags > FLAG_REQUIRED || get_u64(in + 56) || (x->n_planes != 1 && x->n_planes != 4) ||
        x->first != at || x->n_stored > h->file_bytes - at || x->n_raw % x->n_planes ||
        (x->kind >= 0 && x->n_planes != SECTION[x->kind].n_planes))
        return head_senseless(name, err);
    for (uint32_t j = 0; j < i; j++)
        if (strcmp(h->section[j].name, x->name) == 0)
            return fail(err, K3_ECHECK, "%s: damaged: section %s is there twice", name, x->name);
    if (x->of != 0) x->kind = -1; /* all known sections are of the model alone */
    if (x->kind == APP) h->n_app = x->n_raw;
    if (x->kind >= 0) return 0;
    if (!x->is_required) return 0;
    return fail(err, K3_ECHECK,
                "%s: needs section %s, which this program does not know: a newer one wrote it",
                name, x->name);
}

static int table_parse(head *h, const uint8_t *in, const char *name, k3_error *err) {
    uint64_t raw = 0, end = HEAD_BYTES + h->n_sections * ENTRY_BYTES;
    uint32_t there = 0;
    for (uint32_t i = 0; i < h->n_sections; i++, in += ENTRY_BYTES) {
        const section *x = &h->section[i];
        int rc = entry_parse_section(h, i, in, name, err);
        if (rc < 0) return rc;
        raw += x->n_raw;
        end = x->first + x->n_stored;
        if (x->kind >= 0) there |= 1u << x->kind;
    }
    for (int k = 0; k < N_SECTIONS; k++)
        if (SECTION[k].is_required && !(there & 1u << k))
            return fail(err, K3_ECHECK, "%s: damaged: section %s is missing", name,
                        SECTION[k].name);
    if (end != h->file_bytes || raw != h->raw_bytes || h->n_app > K3_STATE_APP_MAX)
        return head_senseless(name, err);
    return 0;
}

/* Make the table that a file of version 1 does not have. */
static int table_of_old(head *h, const char *name, k3_error *err) {
    uint64_t n_ids = h->n_pos * sizeof(uint32_t);
    const uint64_t raw[N_SECTIONS] = {n_ids, h->n_app, h->raw_bytes - n_ids - h->n_app};
    if (h->n_app > K3_STATE_APP_MAX || h->raw_bytes < n_ids + h->n_app || raw[LAYERS] % 4)
        return head_senseless(name, err);
    for (int k = 0; k < N_SECTIONS; k++) {
        if (raw[k] == 0) continue;
        section *x = &h->section[h->n_sections++];
        *x = (section){.number = (uint32_t)k + 1,
                       .is_required = SECTION[k].is_required,
                       .n_planes = SECTION[k].n_planes,
                       .n_raw = raw[k],
                       .kind = k};
        memcpy(x->name, SECTION[k].name, sizeof x->name);
    }
    return 0;
}

/* Check all of a header that can be checked without a model, except for the table. */
static int head_parse(head *h, const uint8_t in[HEAD_BYTES], uint64_t size, const char *name,
                      k3_error *err) {
    head_field wide[N_WIDE], narrow[N_NARROW];
    memset(h, 0, sizeof *h);
    head_fields(h, wide, narrow);
    if (memcmp(in, MAGIC, sizeof MAGIC) != 0)
        return fail(err, K3_ECHECK, "%s: not a k3 state file", name);
    h->version = get_u32(in + 8);
    bool is_old = h->version == OLD_VERSION;
    if (h->version != VERSION && !is_old)
        return fail(err, K3_ECHECK,
                    "%s: a state file of version %u; this program reads versions %u and %u", name,
                    h->version, OLD_VERSION, VERSION);
    if (get_u64(in + HEAD_SUM) != XXH3_64bits(in, HEAD_SUM))
        return fail(err, K3_ECHECK, "%s: damaged: the header's checksum does not match", name);
    memcpy(h->numerics, in + 16, sizeof h->numerics);
    for (int i = 0; i < N_WIDE; i++) {
        uint32_t at = is_old ? wide[i].at_old : wide[i].at;
        if (at) memcpy(wide[i].p, in + at, 8);
    }
    for (int i = 0; i < N_NARROW; i++) {
        uint32_t at = is_old ? narrow[i].at_old : narrow[i].at;
        if (at) memcpy(narrow[i].p, in + at, 4);
    }
    memcpy(&h->eps_lora, in + 132, 4);
    bool is_blank = h->numerics[sizeof h->numerics - 1] == 0;
    for (int i = is_old ? 144 : 156; i < (is_old ? HEAD_SUM : HEAD_TABLE_SUM); i++)
        is_blank = is_blank && in[i] == 0;
    if (!is_blank || h->n_pos == 0 || h->n_pos > 1u << 30 || h->n_sections > MAX_ENTRIES ||
        get_u32(in + 12) != HEAD_BYTES + h->n_sections * ENTRY_BYTES)
        return head_senseless(name, err);
    if (h->file_bytes != size)
        return fail(err, K3_ECHECK, "%s: %s: %llu bytes, and the header says %llu", name,
                    size < h->file_bytes ? "cut short" : "too long", (unsigned long long)size,
                    (unsigned long long)h->file_bytes);
    return h->file_bytes < get_u32(in + 12) ? head_senseless(name, err) : 0;
}

/* Read header and table of an open file of `size` bytes. */
static int head_read(head *h, int fd, uint64_t size, const char *name, k3_error *err) {
    uint8_t in[HEAD_BYTES], table[MAX_ENTRIES * ENTRY_BYTES];
    int rc = read_at(fd, in, sizeof in, 0, name, err);
    if (rc == 0) rc = head_parse(h, in, size, name, err);
    if (rc < 0) return rc;
    if (h->version == OLD_VERSION) return table_of_old(h, name, err);
    size_t n = h->n_sections * (size_t)ENTRY_BYTES;
    if ((rc = read_at(fd, table, n, HEAD_BYTES, name, err)) < 0) return rc;
    if (XXH3_64bits(table, n) != get_u64(in + HEAD_TABLE_SUM))
        return fail(err, K3_ECHECK, "%s: damaged: the table's checksum does not match", name);
    return table_parse(h, table, name, err);
}

/* Is it a state of this model? If not, the message says the first thing that differs. */
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
    if (h->print.sampled != own->print.sampled)
        return fail(err, K3_ECHECK,
                    "%s: a state of another model: same geometry, but fingerprint %016llx there "
                    "and %016llx here: other weights or constants",
                    name, (unsigned long long)h->print.sampled,
                    (unsigned long long)own->print.sampled);
    if (h->print.by_sums && own->print.by_sums && h->print.by_sums != own->print.by_sums)
        return fail(err, K3_ECHECK,
                    "%s: a state of other weights: the sums say %016llx there and %016llx here. "
                    "They differ where no sample looks: damaged weights, perhaps, then or now; "
                    "`k3 verify` tells, and make the state again",
                    name, (unsigned long long)h->print.by_sums,
                    (unsigned long long)own->print.by_sums);
    return 0;
}

/* The note for a state of which nobody knows whether its weights are this engine's; NULL: they are
 * known to be. */
static const char *head_unknown(const head *h, const head *own) {
    if (h->print.by_sums && own->print.by_sums) return NULL;
    if (h->stamp && h->stamp == own->stamp) return NULL;
    if (h->version == OLD_VERSION) return "it is of an older form, which has no sums";
    if (!h->print.by_sums) return "it was made without sums, from files changed or copied since";
    return "this run has no sums, and the files are not those it was made from";
}

/* Begin to hash a key, to which the caller adds the ids. NULL: out of memory. */
static XXH3_state_t *key_begin(const head *h) {
    XXH3_state_t *x = XXH3_createState();
    if (!x) return NULL;
    XXH3_128bits_reset(x);
    const uint64_t best = h->print.by_sums ? h->print.by_sums : h->stamp;
    XXH3_128bits_update(x, h->numerics, sizeof h->numerics);
    XXH3_128bits_update(x, &h->print.sampled, sizeof h->print.sampled);
    if (h->version != OLD_VERSION) XXH3_128bits_update(x, &best, sizeof best);
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

/* ==== 3. Pieces ======================================================================
 *
 * A walk gives the pieces of a section in the file's order, the same when writing and when reading.
 * Several pieces at a time are packed by as many threads, each in its own part of the step's scratch;
 * no piece depends on another.
 */
#define PIECE_HEAD 48
#define PIECE_SUM 40
#define PIECE_BYTES 262144u
#define ZSTD_LEVEL (-256)
#define CONTEXT_BYTES (384u << 10) /* a zstd context for one plane */
#define MAX_WORKERS 64
STATIC_ASSERT(sum_ends_the_piece_head, PIECE_SUM + 8 == PIECE_HEAD);

typedef struct {
    uint32_t section, array; /* section: its number in the heads of pieces */
    uint64_t offset;
    uint32_t n, n_planes;
    uint8_t *p; /* NULL: not wanted */
} piece;

typedef struct {
    const source *from;
    const section *of;
    piece at; /* the next piece, except for its n */
} walk;

static walk walk_begin(const source *from, const section *of) {
    return (walk){from, of, {.section = of->number, .n_planes = of->n_planes}};
}

static bool walk_next(walk *w, piece *out) {
    k3_state_array a;
    for (;;) {
        if (!SECTION[w->of->kind].array(w->from, w->at.array, &a)) return false;
        if (w->at.offset < a.n_bytes) break;
        w->at.offset = 0;
        w->at.array++;
    }
    uint64_t left = a.n_bytes - w->at.offset;
    *out = w->at;
    out->n = left < PIECE_BYTES ? (uint32_t)left : PIECE_BYTES;
    out->p = a.p ? (uint8_t *)a.p + w->at.offset : NULL;
    w->at.offset += out->n;
    return true;
}

/* One thread's part of the scratch. */
typedef struct {
    uint8_t *stored;   /* [PIECE_HEAD + PIECE_BYTES], piece header first  */
    uint8_t *planes;   /* [PIECE_BYTES]                                       */
    ZSTD_CCtx *packer; /* one of the two, in CONTEXT_BYTES */
    ZSTD_DCtx *unpacker;
    piece piece;
    uint64_t at, n_stored; /* at: in the file; n_stored: without the piece's header */
    int rc;
    k3_error err;
} worker;

#define WORKER_BYTES (2 * PIECE_BYTES + 4096 + CONTEXT_BYTES)
STATIC_ASSERT(room_suffices, K3_STATE_ROOM >= WORKER_BYTES);

/* Open zstd, to pack or to unpack, in memory of the caller's. NULL if a later zstd needs more than
 * CONTEXT_BYTES: then planes are stored as they are, and packed ones cannot be read. */
static ZSTD_CCtx *packer_open(void *context) {
    ZSTD_CCtx *z = ZSTD_initStaticCCtx(context, CONTEXT_BYTES);
    if (!z || ZSTD_isError(ZSTD_CCtx_setParameter(z, ZSTD_c_compressionLevel, ZSTD_LEVEL)) ||
        ZSTD_isError(ZSTD_CCtx_setParameter(z, ZSTD_c_literalCompressionMode, 1)))
        return NULL; /* 1: always Huffman */
    return z;
}

/* Make as many workers as there are threads and room for, to pack or to unpack. Returns how many. */
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

/* Pack w->piece into w->stored, its header included. Cannot fail: planes that zstd does not shrink are
 * stored as they are. */
static void piece_pack(worker *w) {
    const piece *p = &w->piece;
    uint32_t n_planes = p->n_planes, n = p->n / n_planes;
    uint8_t *head48 = w->stored, *out = w->stored + PIECE_HEAD;
    const uint8_t *in = p->p;
    if (n_planes == 4) {
        planes_split(w->planes, p->p, n);
        in = w->planes;
    }
    memset(head48, 0, PIECE_HEAD);
    put_u32(head48, p->section);
    put_u32(head48 + 4, p->array);
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
    w->n_stored = (uint64_t)(out - w->stored) - PIECE_HEAD;
    put_u64(head48 + PIECE_SUM,
            XXH3_64bits_withSeed(w->stored + PIECE_HEAD, (size_t)w->n_stored,
                                 XXH3_64bits(head48, PIECE_SUM)));
}

/* Read a piece's header, already in w->stored, as that of w->piece, and set n_stored from it. Returns
 * false when it is no such header. */
static bool piece_measure(worker *w) {
    const uint8_t *in = w->stored;
    const piece *p = &w->piece;
    uint32_t n_planes = p->n_planes, n = p->n / n_planes;
    w->n_stored = 0;
    if (get_u32(in) != p->section || get_u32(in + 4) != p->array || get_u64(in + 8) != p->offset ||
        get_u32(in + 16) != p->n || get_u32(in + 36) != 0)
        return false;
    for (uint32_t b = 0; b < 4; b++) {
        uint32_t got = get_u32(in + 20 + 4 * b);
        if (b < n_planes ? got == 0 || got > n : got != 0) return false;
        w->n_stored += got;
    }
    return true;
}

static int piece_damaged(const worker *w, const section *x, const char *name, k3_error *err) {
    const char *noun = x->kind == LAYERS ? "layer" : x->name;
    char which[24] = "";
    if (x->kind == LAYERS) snprintf(which, sizeof which, " %u", w->piece.array);
    return fail(err, K3_ECHECK, "%s: damaged: %s%s, section at offset 0x%llx", name, noun, which,
                (unsigned long long)w->at);
}

/* Read the stored bytes of w->piece, check them, and unpack them to w->piece's memory. */
static void piece_unpack(worker *w, int fd, const section *x, const char *name) {
    const piece *p = &w->piece;
    uint32_t n_planes = p->n_planes, n = p->n / n_planes;
    const uint8_t *in = w->stored + PIECE_HEAD, *plane[4];
    w->rc = read_at(fd, w->stored + PIECE_HEAD, (size_t)w->n_stored, w->at + PIECE_HEAD, name,
                    &w->err);
    if (w->rc < 0) return;
    bool is_whole =
        get_u64(w->stored + PIECE_SUM) ==
        XXH3_64bits_withSeed(in, (size_t)w->n_stored, XXH3_64bits(w->stored, PIECE_SUM));
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
        w->rc = piece_damaged(w, x, name, &w->err);
    else if (p->p && n_planes == 4)
        planes_join(p->p, plane, n);
    else if (p->p)
        memcpy(p->p, plane[0], n);
}

/* ==== 4. A whole state ===============================================================
 *
 * The workers read and write, too: both are copies to and from the page cache, and one core copies no
 * faster than a good drive.
 */

typedef struct {
    worker w[MAX_WORKERS];
    int n;
    int fd;
    const char *name;
    const section *section; /* that is being read or written */
    k3_pool *pool;
    k3_error *err;
} crew;

#define PIECE_NS 1000000 /* roughly what one thread takes for a piece */

static void crew_pack(void *ctx, size_t i, int i_thread) {
    crew *c = ctx;
    (void)i_thread;
    piece_pack(&c->w[i]);
}

static void crew_write(void *ctx, size_t i, int i_thread) {
    crew *c = ctx;
    worker *w = &c->w[i];
    (void)i_thread;
    w->rc = write_at(c->fd, w->stored, PIECE_HEAD + (size_t)w->n_stored, w->at, c->name, &w->err);
}

static void crew_unpack(void *ctx, size_t i, int i_thread) {
    crew *c = ctx;
    (void)i_thread;
    piece_unpack(&c->w[i], c->fd, c->section, c->name);
}

/* Make a crew. The step's scratch is its own until k3_state_end(). */
static void crew_open(crew *c, k3_engine *e, bool packs, int fd, const char *name, k3_error *err) {
    uint64_t room;
    uint8_t *scratch = k3_state_begin(e, &room);
    c->n = workers_open(c->w, scratch, room, k3_engine_threads(e), packs);
    c->fd = fd;
    c->name = name;
    c->pool = k3_state_pool(e);
    c->err = err;
}

/* The first error of the first n workers, or 0. */
static int crew_status(const crew *c, int n) {
    for (int i = 0; i < n; i++)
        if (c->w[i].rc < 0) return fail(c->err, c->w[i].rc, "%s", c->w[i].err.text);
    return 0;
}

/* Let the drive begin to write now, not at the fsync. */
static void write_begin(int fd, uint64_t from, uint64_t n) {
#ifdef SYNC_FILE_RANGE_WRITE
    if (n) sync_file_range(fd, (off_t)from, (off_t)n, SYNC_FILE_RANGE_WRITE);
#else
    (void)fd, (void)from, (void)n;
#endif
}

/* Write one section at the end of the file. */
static int section_write(crew *c, const source *from, head *h, section *x) {
    walk at = walk_begin(from, x);
    int rc = 0;
    x->first = h->file_bytes;
    for (int n = c->n; rc == 0 && n == c->n;) {
        for (n = 0; n < c->n && walk_next(&at, &c->w[n].piece); n++) c->w[n].rc = 0;
        pool_run(c->pool, (size_t)n, PIECE_NS, crew_pack, c);
        uint64_t begin = h->file_bytes;
        for (int i = 0; i < n; i++) {
            c->w[i].at = h->file_bytes;
            h->file_bytes += PIECE_HEAD + c->w[i].n_stored;
        }
        pool_run(c->pool, (size_t)n, PIECE_NS, crew_write, c);
        rc = crew_status(c, n);
        h->n_pieces += (uint64_t)n;
        write_begin(c->fd, begin, h->file_bytes - begin);
    }
    x->n_stored = h->file_bytes - x->first;
    h->raw_bytes += x->n_raw;
    return rc;
}

/* Plan the table of a state, without places and lengths. */
static void table_plan(head *h, const source *from) {
    h->n_sections = 0;
    for (int k = 0; k < N_SECTIONS; k++) {
        uint64_t n = section_raw(from, k);
        if (n == 0) continue;
        section *x = &h->section[h->n_sections++];
        *x = (section){.number = h->n_sections,
                       .is_required = SECTION[k].is_required,
                       .n_planes = SECTION[k].n_planes,
                       .n_raw = n,
                       .kind = k};
        memcpy(x->name, SECTION[k].name, sizeof x->name);
    }
    h->file_bytes = HEAD_BYTES + (uint64_t)h->n_sections * ENTRY_BYTES;
}

/* Write section by section to `fd`, over what an earlier writer left there, then header and table,
 * which make it a state. `h` is that of the engine; places, lengths and sums are filled in. */
static int state_write(k3_session *s, int fd, const char *name, const void *app, uint64_t n_app,
                       head *h, k3_error *err) {
    k3_engine *e = k3_session_engine(s);
    crew c;
    size_t n_ids;
    const uint32_t *ids = k3_session_ids(s, &n_ids);
    const source from = {s, n_ids, n_app, (uint8_t *)app}; /* only read through this pointer */
    k3_state_settle(s);
    h->n_pos = n_ids;
    h->n_app = n_app;
    h->n_unverified = k3_state_is_unverified(s);
    int rc = key_of(h, ids, n_ids, h->key, err);
    if (rc < 0) return rc;
    if (ftruncate(fd, 0) != 0)
        return fail(err, K3_EIO, "%s: cannot be written anew: %s", name, strerror(errno));
    table_plan(h, &from);
    crew_open(&c, e, true, fd, name, err);
    for (uint32_t i = 0; i < h->n_sections && rc == 0; i++)
        rc = section_write(&c, &from, h, &h->section[i]);
    k3_state_end(e);
    uint8_t bytes[HEAD_BYTES + MAX_ENTRIES * ENTRY_BYTES];
    size_t n = head_write(h, bytes);
    return rc < 0 ? rc : write_at(fd, bytes, n, 0, name, err);
}

/* How far a state has been read. */
typedef struct {
    uint64_t at, raw, n_pieces;
} reading;

static int reading_misfit(const char *name, k3_error *err) {
    return fail(err, K3_ECHECK, "%s: damaged: header and sections do not fit together", name);
}

/* Read one section into the session's arrays, ids or the caller's bytes. */
static int section_read(crew *c, const source *to, const section *x, reading *r) {
    walk next = walk_begin(to, x);
    int rc = 0;
    if (x->n_raw != section_raw(to, x->kind)) return reading_misfit(c->name, c->err);
    for (int n = c->n; rc == 0 && n == c->n;) {
        for (n = 0; rc == 0 && n < c->n && walk_next(&next, &c->w[n].piece); n++) {
            worker *w = &c->w[n];
            w->at = r->at;
            rc = read_at(c->fd, w->stored, PIECE_HEAD, r->at, c->name, c->err);
            if (rc == 0 && !piece_measure(w)) rc = piece_damaged(w, x, c->name, c->err);
            if (rc < 0) return rc;
            r->at += PIECE_HEAD + w->n_stored;
            r->raw += w->piece.n;
            r->n_pieces++;
        }
        c->section = x;
        pool_run(c->pool, (size_t)n, PIECE_NS, crew_unpack, c);
        rc = crew_status(c, n);
    }
    if (rc == 0 && x->first && r->at != x->first + x->n_stored) rc = reading_misfit(c->name, c->err);
    return rc;
}

/* Read all sections that this program knows, and skip the others. */
static int sections_read(crew *c, const source *to, const head *h) {
    reading r = {.at = HEAD_BYTES};
    bool is_all = true;
    int rc = 0;
    for (uint32_t i = 0; i < h->n_sections && rc == 0; i++) {
        const section *x = &h->section[i];
        if (x->first) r.at = x->first;
        if (x->kind >= 0)
            rc = section_read(c, to, x, &r);
        else
            is_all = false;
    }
    if (rc == 0 && is_all &&
        (r.at != h->file_bytes || r.raw != h->raw_bytes || r.n_pieces != h->n_pieces))
        rc = reading_misfit(c->name, c->err);
    return rc;
}

/* Read the sections behind a header that matches, into a session that was reset. */
static int state_read(k3_session *s, int fd, const char *name, const head *h, void *app,
                      k3_error *err) {
    k3_engine *e = k3_session_engine(s);
    const source to = {s, h->n_pos, h->n_app, app};
    crew c;
    crew_open(&c, e, false, fd, name, err);
    int rc = sections_read(&c, &to, h);
    k3_state_end(e);
    if (rc < 0) return rc;
    uint64_t key[2] = {0, 0};
    const uint32_t *ids = k3_state_ids(s);
    for (uint64_t i = 0; i < h->n_pos; i++)
        if (ids[i] >= h->vocab_size)
            return fail(err, K3_ECHECK, "%s: damaged: id %u at position %llu", name, ids[i],
                        (unsigned long long)i);
    if ((rc = key_of(h, ids, h->n_pos, key, err)) < 0) return rc;
    return key[0] == h->key[0] && key[1] == h->key[1] ? 0 : reading_misfit(name, err);
}

/* Open a state and read its header. Returns a descriptor. */
static int state_open(const char *path, head *h, struct stat *st, k3_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = 0;
    if (fd < 0) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
    if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode))
        rc = fail(err, K3_EIO, "%s: not a regular file", path);
    else if (st->st_size < HEAD_BYTES)
        rc = fail(err, K3_ECHECK, "%s: not a k3 state file: %llu bytes", path,
                  (unsigned long long)st->st_size);
    if (rc == 0) rc = head_read(h, fd, (uint64_t)st->st_size, path, err);
    if (rc == 0) return fd;
    close(fd);
    return rc;
}

/* Note that only samples of the weights were compared. */
static void state_note_unknown(const k3_engine *e, const head *h, const head *own,
                               const char *path) {
    const char *why = head_unknown(h, own);
    char line[640];
    if (!why) return;
    snprintf(line, sizeof line,
             "%.300s: nobody can tell whether it was made with exactly these weights (%s): only "
             "samples were compared. `k3 verify --write-sums` before a state is made, and the sums "
             "tell",
             path, why);
    k3_state_note(e, line);
}

/* Read a whole state from an open file, all or nothing. *app is malloc'd when `app` is given. */
static int state_take(k3_session *s, int fd, const char *path, const head *h, void **app,
                      k3_error *err) {
    head own;
    int rc = head_of_engine(&own, k3_session_engine(s), err);
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
    if (rc == 0) k3_state_resume(s, h->n_pos, h->n_unverified > 0);
    if (rc == 0) state_note_unknown(k3_session_engine(s), h, &own, path);
    return rc;
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

/* ==== 5. Writing a file ==============================================================
 *
 * A state being written has its final name with ".tmp" behind it (k3_temp.h).
 */
#define PATH_BYTES 4352

/* Has a writer of states left this file? A header is written last, so the file begins with one or with
 * zeros. */
static bool temp_is_ours(int fd) {
    uint8_t in[sizeof MAGIC] = {0};
    static const uint8_t zeros[sizeof MAGIC];
    ssize_t n = pread(fd, in, sizeof in, 0);
    if (n == 0) return true;
    return n == (ssize_t)sizeof in &&
           (memcmp(in, MAGIC, sizeof in) == 0 || memcmp(in, zeros, sizeof in) == 0);
}

/* k3_temp_open() for a state. */
static int temp_open(const char *path, int *fd, k3_error *err) {
    int rc = k3_temp_open(path, K3_TEMP_PRIVATE, fd, err);
    if (rc != 0 || temp_is_ours(*fd)) return rc;
    close(*fd);
    *fd = -1;
    return fail(err, K3_EIO, "%s: is in the way, and no state that was being written; move it",
                path);
}

static int session_check(const k3_session *s, k3_error *err) {
    if (k3_state_is_broken(s))
        return fail(err, K3_EUSAGE, "this session ended with an error: it has no state to save");
    if (k3_session_pos(s) == 0)
        return fail(err, K3_EUSAGE, "this session is empty: there is no state to save");
    if (k3_state_is_unverified(s) && k3_state_has_audits(k3_session_engine(s)))
        return fail(err, K3_ECHECK,
                    "far boxes gave expert sums for this session that nobody compared: with audits of only "
                    "some answers no state of it is saved");
    return 0;
}

/* Write the name of the directory that `path` is in. */
static void dir_of(const char *path, char dir[PATH_BYTES]) {
    const char *slash = strrchr(path, '/');
    snprintf(dir, PATH_BYTES, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
}

/* fsync the directory, so that the file's new name survives a power cut. */
static int dir_sync(const char *path, k3_error *err) {
    char dir[PATH_BYTES];
    dir_of(path, dir);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
                 ? fail(err, K3_EIO, "%s: fsync: %s", dir, strerror(errno))
                 : 0;
    if (fd >= 0) close(fd);
    return rc;
}

/* Can a rename replace the file at `path`? Not where it is another user's and its directory lets only
 * owners replace files (/tmp). */
static int can_replace(const char *path, k3_error *err) {
    char dir[PATH_BYTES];
    struct stat st, d;
    uid_t self = geteuid();
    dir_of(path, dir);
    if (self == 0 || stat(path, &st) != 0 || stat(dir, &d) != 0) return 0;
    if (!(d.st_mode & S_ISVTX) || st.st_uid == self || d.st_uid == self) return 0;
    return fail(err, K3_EIO, "%s: belongs to user %lu; name another file", path,
                (unsigned long)st.st_uid);
}

/* Make or take over the temporary file beside `path`. Returns a descriptor, or an error. */
static int save_begin(const char *path, char temp[PATH_BYTES], k3_error *err) {
    struct stat st;
    if (path[0] == 0) return fail(err, K3_EUSAGE, "a state needs a file with a name");
    if (snprintf(temp, PATH_BYTES, "%s.tmp", path) >= PATH_BYTES)
        return fail(err, K3_EUSAGE, "%.200s...: the name is too long", path);
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return fail(err, K3_EIO, "%s: not a regular file", path);
    int fd, rc = can_replace(path, err);
    if (rc == 0) rc = temp_open(temp, &fd, err);
    return rc != 0 ? K3_EIO : fd;
}

/* The most bytes that a state of n_pos positions can take: nothing shrinks, and the caller's bytes are
 * as many as can be. */
static uint64_t state_most_bytes(const k3_shape *sh, uint64_t n_pos) {
    uint64_t raw = sh->state_bytes + n_pos * (sh->pos_bytes + sizeof(uint32_t)) + K3_STATE_APP_MAX;
    uint64_t n_pieces = raw / PIECE_BYTES + N_SECTIONS + sh->n_layers;
    return HEAD_BYTES + N_SECTIONS * ENTRY_BYTES + raw + n_pieces * PIECE_HEAD;
}

/* Is there room for `need` bytes beside the open file? The file that will be replaced stays until then. */
static int room_check(const char *temp, const k3_shape *sh, uint64_t n_pos, k3_error *err) {
    struct statvfs fs;
    uint64_t need = state_most_bytes(sh, n_pos);
    if (statvfs(temp, &fs) != 0 || fs.f_blocks == 0) return 0; /* the file system does not say */
    uint64_t there = (uint64_t)fs.f_bavail * (fs.f_frsize ? fs.f_frsize : fs.f_bsize);
    if (need <= there) return 0;
    return fail(err, K3_EIO,
                "%s: a state of %llu positions can take %.1f MiB, and %.1f MiB are free there; make "
                "room, or name another place",
                temp, (unsigned long long)n_pos, (double)need / 1048576, (double)there / 1048576);
}

int k3_state_can_save(const char *path, const k3_shape *shape, uint64_t n_pos, k3_error *err) {
    char temp[PATH_BYTES], *real = realpath(path, NULL);
    struct stat st;
    int fd = save_begin(real ? real : path, temp, err);
    free(real);
    if (fd < 0) return fd;
    int rc = shape ? room_check(temp, shape, n_pos, err) : 0;
    if (fstat(fd, &st) == 0 && st.st_size == 0) unlink(temp); /* bytes of an earlier writer may be wanted */
    close(fd);
    return rc;
}

/* Save to `path`, which is resolved: the file that a link leads to is replaced, not the link. */
static int save_to(k3_session *s, const char *path, const void *app, size_t n_app, head *h,
                   k3_error *err) {
    char temp[PATH_BYTES];
    int fd = save_begin(path, temp, err), rc;
    if (fd < 0) return fd;
    rc = state_write(s, fd, temp, app, n_app, h, err);
    if (rc == 0 && fsync(fd) != 0) rc = fail(err, K3_EIO, "%s: fsync: %s", temp, strerror(errno));
    if (rc == 0) rc = k3_temp_rename(fd, temp, path, err);
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
    if (rc == 0) rc = head_of_engine(&h, k3_session_engine(s), err);
    if (rc < 0) return rc;
    char *real = realpath(path, NULL);
    rc = save_to(s, real ? real : path, app, n_app, &h, err);
    free(real);
    if (rc == 0 && info)
        *info = (k3_state_info){h.file_bytes, h.raw_bytes, h.n_pos, now_s() - start};
    return rc;
}

/* ==== 6. Without a model ============================================================= */

/* Check one piece by its own header, in memory of the caller's. Arrays must not go backwards. */
static int check_piece(worker *w, int fd, const char *name, const section *x, uint64_t left,
                       k3_error *err) {
    uint8_t *in = w->stored;
    uint32_t last = w->piece.array;
    int rc = read_at(fd, in, PIECE_HEAD, w->at, name, err);
    if (rc < 0) return rc;
    w->piece = (piece){x->number,         get_u32(in + 4), get_u64(in + 8),
                       get_u32(in + 16), x->n_planes,     w->piece.p};
    const piece *p = &w->piece;
    if (p->array < last || p->n == 0 || p->n > PIECE_BYTES || p->n > left || p->n % p->n_planes ||
        !piece_measure(w))
        return fail(err, K3_ECHECK, "%s: damaged: section header at offset 0x%llx", name,
                    (unsigned long long)w->at);
    w->rc = 0;
    piece_unpack(w, fd, x, name);
    return w->rc < 0 ? fail(err, w->rc, "%s", w->err.text) : 0;
}

/* Check one section, known or not: every byte of it is under a checksum. */
static int check_section(worker *w, int fd, const char *name, const section *x, XXH3_state_t *key,
                         reading *r, k3_error *err) {
    uint64_t left = x->n_raw;
    int rc = 0;
    w->piece.array = 0;
    while (left > 0 && rc == 0) {
        w->at = r->at;
        if ((rc = check_piece(w, fd, name, x, left, err)) < 0) return rc;
        if (x->kind == IDS) XXH3_128bits_update(key, w->piece.p, w->piece.n);
        left -= w->piece.n;
        r->raw += w->piece.n;
        r->n_pieces++;
        r->at += PIECE_HEAD + w->n_stored;
    }
    return x->first && r->at != x->first + x->n_stored ? reading_misfit(name, err) : 0;
}

static int check_sections(int fd, const char *name, const head *h, uint8_t *room, k3_error *err) {
    worker w;
    reading r = {.at = HEAD_BYTES + (h->version == OLD_VERSION ? 0 : h->n_sections * ENTRY_BYTES)};
    XXH3_state_t *x = key_begin(h);
    uint64_t n_ids = 0, key[2] = {0, 0};
    int rc = x ? 0 : fail(err, K3_ENOMEM, "%s: out of memory", name);
    memset(&w, 0, sizeof w);
    workers_open(&w, room, WORKER_BYTES, 1, false);
    w.piece.p = room + WORKER_BYTES;
    for (uint32_t i = 0; i < h->n_sections && rc == 0; i++) {
        rc = check_section(&w, fd, name, &h->section[i], x, &r, err);
        if (h->section[i].kind == IDS) n_ids = h->section[i].n_raw / sizeof(uint32_t);
    }
    if (x) key_digest(x, key);
    XXH3_freeState(x);
    if (rc == 0 && (r.at != h->file_bytes || r.n_pieces != h->n_pieces || r.raw != h->raw_bytes ||
                    n_ids != h->n_pos || key[0] != h->key[0] || key[1] != h->key[1]))
        rc = reading_misfit(name, err);
    return rc;
}

int k3_state_check(const char *path, bool all, k3_state_head *out, k3_error *err) {
    struct stat st;
    head h;
    memset(out, 0, sizeof *out);
    int fd = state_open(path, &h, &st, err), rc = 0;
    if (fd < 0) return fd;
    memcpy(out->numerics, h.numerics, sizeof out->numerics);
    out->print = h.print;
    out->n_pos = h.n_pos;
    out->file_bytes = h.file_bytes;
    out->raw_bytes = h.raw_bytes;
    out->n_app = h.n_app;
    out->is_unverified = h.n_unverified > 0;
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
    bool is_told; /* whether it was noted that entries do not fit */
    bool is_told_unsure;
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

/* Is this the name of an entry, exactly as entry_path() writes it, with or without ".tmp"? */
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

/* List the entries of a directory. `cleans`: also remove what killed writers left. */
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
            if (cleans) k3_temp_sweep(path);
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

/* Order: least recently used first. */
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

/* Remove the least recently used entries beyond max_bytes, never the entry `kept` (may be NULL). */
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
        if (status == K3_EIO && access(path, F_OK) != 0) continue; /* another process evicted it */
        rc = fn(user, path, &h, status, &why);
        n++;
    }
    free(l.at);
    return rc < 0 ? rc : n;
}

/* Could another user have written or changed it? NULL: no; else how. */
static const char *foreign(const struct stat *st, char *text, size_t cap) {
    if (st->st_uid != geteuid())
        snprintf(text, cap, "belongs to user %lu", (unsigned long)st->st_uid);
    else if (st->st_mode & 022)
        snprintf(text, cap, "others may write to it (mode %04o)", (unsigned)(st->st_mode & 07777));
    else
        return NULL;
    return text;
}

int k3_cache_open(k3_cache **out, k3_engine *e, const char *dir, uint64_t max_bytes,
                  k3_error *err) {
    struct stat st;
    char why[64];
    *out = NULL;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return fail(err, K3_EIO, "cache %s: %s", dir, strerror(errno));
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode) || access(dir, R_OK | W_OK | X_OK) != 0)
        return fail(err, K3_EIO, "cache %s: not a directory that can be written to", dir);
    const char *fault = foreign(&st, why, sizeof why);
    if (fault)
        return fail(err, K3_EIO,
                    "cache %s: %s: a state that somebody puts there would be believed; name a "
                    "directory of your own, or chmod go-w it",
                    dir, fault);
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

/* Note, once for each cache, that an entry does not fit. */
static void cache_note_size(k3_cache *c, uint64_t n_bytes) {
    char line[160];
    if (c->is_told) return;
    c->is_told = true;
    snprintf(line, sizeof line,
             "cache: a state of about %llu bytes is more than the whole cache may hold (%llu)",
             (unsigned long long)n_bytes, (unsigned long long)c->max_bytes);
    k3_state_note(c->e, line);
}

/* Is an entry with this engine's key sure to be of exactly its weights? Yes with sums, or when nobody
 * touched the files since they were opened. */
static bool cache_is_sure(k3_cache *c) {
    if (c->own.print.by_sums) return true;
    if (c->own.stamp && k3_state_stamp(c->e) == c->own.stamp) return true;
    if (!c->is_told_unsure)
        k3_state_note(c->e, "cache: not used: the model's files were changed while they are in use, "
                            "and without sums nobody can tell of which weights a state is (`k3 "
                            "verify --write-sums`)");
    c->is_told_unsure = true;
    return false;
}

/* Mark the entries of a prefix of ids[0, n). The list is then sorted by length. */
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

/* Is this an entry that can be read, and unverified? */
static bool cache_is_unverified(const char *path) {
    struct stat st;
    head h = {.n_unverified = 0};
    int fd = state_open(path, &h, &st, NULL);
    if (fd < 0) return false;
    close(fd);
    return h.n_unverified > 0;
}

/* Can nobody else have written this entry? Its directory is this user's now (k3_cache_open) and may not
 * always have been. */
static bool entry_is_ours(const char *path, k3_error *err) {
    struct stat st;
    char text[64];
    if (lstat(path, &st) != 0) return true; /* it is gone: opening it will say so */
    const char *fault = S_ISREG(st.st_mode) ? foreign(&st, text, sizeof text) : "no regular file";
    if (fault) fail(err, 0, "%s: %s", path, fault);
    return !fault;
}

/* Refuse an unverified state where the engine has audits. */
static int cache_is_fit(const k3_cache *c, const char *path, k3_error *err) {
    if (!entry_is_ours(path, err)) return K3_EIO;
    if (!k3_state_has_audits(c->e) || !cache_is_unverified(path)) return 0;
    return fail(err, K3_EUSAGE, "%s: far boxes gave expert sums for it that nobody compared", path);
}

/* Read one entry into the session. Returns 0, or why the entry cannot be used. */
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
        utimensat(AT_FDCWD, path, NULL, 0); /* mark it as used now; if that fails only its age is wrong */
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
    if (!cache_is_sure(c)) return 0;
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

/* Write an entry under a temporary name and rename it; *is_kept says whether the entry is there then. */
static int cache_write(k3_cache *c, k3_session *s, const char *path, const char *temp,
                       bool *is_kept, k3_error *err) {
    head h = c->own;
    int fd, rc = temp_open(temp, &fd, err);
    *is_kept = false;
    if (rc != 0) return rc > 0 ? 0 : rc; /* above 0: another process is writing the same entry */
    rc = state_write(s, fd, temp, NULL, 0, &h, err);
    bool fits = h.file_bytes <= c->max_bytes;
    if (rc == 0 && fits) rc = k3_temp_rename(fd, temp, path, err);
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
    bool is_unverified = k3_state_is_unverified(s);
    if ((n == 0 || (is_unverified && k3_state_has_audits(c->e))) && !k3_state_is_broken(s)) return 0;
    int rc = session_check(s, err);
    if (rc == 0 && !cache_is_sure(c)) return 0;
    if (rc == 0) rc = key_of(&c->own, ids, n, key, err);
    if (rc < 0) return rc;
    if (entry_path(path, c->dir, n, key, "") < 0 || entry_path(temp, c->dir, n, key, ".tmp") < 0)
        return fail(err, K3_EUSAGE, "cache %.200s...: the name is too long", c->dir);
    if (entry_is_ours(path, NULL) && utimensat(AT_FDCWD, path, NULL, 0) == 0 &&
        (is_unverified || !cache_is_unverified(path)))
        return 0; /* it is there and marked as used; a verified state replaces an unverified one */
    uint64_t raw = sh->state_bytes + n * sh->pos_bytes;
    if (raw / 2 > c->max_bytes) { /* half of a state is mantissas, which do not shrink */
        cache_note_size(c, raw);
        return 0;
    }
    rc = cache_write(c, s, path, temp, &is_kept, err);
    c->stats.stored += is_kept;
    return is_kept ? cache_evict(c->dir, c->max_bytes, key, &c->stats.evicted, &gone, err) : rc;
}

int k3_cache_store_at(k3_cache *c, k3_session *s, uint64_t pos, k3_error *err) {
    uint64_t now = k3_session_pos(s);
    if (pos > now || (pos < now && pos != k3_session_least(s)))
        return fail(err, K3_EUSAGE, "a state at position %llu cannot be kept: the session is at %llu, and can go back to %llu",
                    (unsigned long long)pos, (unsigned long long)now, (unsigned long long)k3_session_least(s));
    k3_state_set_pos(s, pos);
    int rc = k3_cache_store(c, s, err);
    k3_state_set_pos(s, now);
    return rc;
}
