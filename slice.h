/* slice.h - the manifest of a slice: which experts a directory holds, of which model, with sums.
 *
 * A slice is a directory with the hottest experts of a model in the official format (config.json,
 * safetensors shards, an index) and this list. `k3 slice` writes it, `k3-tier --slice` serves it.
 * Whoever reads the file trusts nothing in it: this header parses it strictly and in bounded memory.
 *
 * k3.slice is text, a line each, single blanks, no line longer than 127 bytes:
 *
 *     k3-slice 2                                version of this format
 *     numerics k3-f32-dot16-q40                 NUMERICS id of the writer
 *     fingerprint 0123456789abcdef 0123456789abcdef
 *                                               of the model: by samples of its experts (experts.h),
 *                                               and by sums (k3.h), 0 where it has none
 *     geometry 93 1 896 3584 3072 16            layers, of them dense, experts a layer, latent,
 *                                               expert inter, top_k
 *     situ 40800000 41c80000                    bits of the two SiTU betas, f32
 *     config 0123456789abcdef                   XXH3-64 of config.json
 *     experts 3312                              how many; then that many lines, the hottest first,
 *     17 412 0123456789abcdef                   in the order of their bytes in the shards: layer,
 *                                               expert, XXH3-64 of its six tensors in slot order
 *     end 0123456789abcdef                      XXH3-64 of all lines before this one
 *
 * Numbers are decimal without leading zeros, or as many hex digits as shown. Until a slice is whole
 * the file is called k3.slice.part and has the lines of finished shards, and no end. A box
 * that keeps what is staged (tier_keep.h) writes the same, without an index.
 *
 * Version 1 had no fingerprint by sums; it is read, and gone on with, as if of a model without sums.
 */
#ifndef K3_SLICE_H
#define K3_SLICE_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#define SLICE_NAME "k3.slice"
#define SLICE_PART "k3.slice.part"
#define SLICE_MAX_BYTES (256u << 20) /* of a manifest: 4 M experts at 48 bytes, and some */
#define SLICE_LINE 128u
#define SLICE_MAX_LAYERS 1024u /* the limits of the wire (tier.h) */
#define SLICE_MAX_EXPERTS 4096u

typedef struct slice_expert {
    uint32_t il, ie;
    uint64_t sum;
} slice_expert;

typedef struct {
    uint32_t version; /* 1 or 2 */
    char numerics[32];
    uint64_t sampled, by_sums, config_sum; /* by_sums 0: not known; of version 1 always */
    uint32_t n_layers, n_dense, n_experts, latent, inter, top_k;
    uint32_t beta_bits, linear_beta_bits;
    uint32_t n, n_done; /* experts; lines of them, fewer while it is not whole */
    slice_expert *list; /* [n], the caller's to free() */
} slice;

/* The lines before the first expert; how many bytes. `text`: 8 SLICE_LINE bytes. */
static inline size_t slice_head_write(const slice *s, char *text) {
    char by_sums[24] = "";
    if (s->version > 1) snprintf(by_sums, sizeof by_sums, " %016llx", (unsigned long long)s->by_sums);
    int n = snprintf(text, 8 * SLICE_LINE,
                     "k3-slice %u\nnumerics %s\nfingerprint %016llx%s\ngeometry %u %u %u %u %u %u\n"
                     "situ %08x %08x\nconfig %016llx\nexperts %u\n",
                     s->version, s->numerics, (unsigned long long)s->sampled, by_sums, s->n_layers,
                     s->n_dense, s->n_experts, s->latent, s->inter, s->top_k, s->beta_bits,
                     s->linear_beta_bits, (unsigned long long)s->config_sum, s->n);
    return (size_t)n;
}

/* One expert's line; how many bytes. `text`: SLICE_LINE bytes. */
static inline size_t slice_expert_write(const slice_expert *x, char *text) {
    return (size_t)snprintf(text, SLICE_LINE, "%u %u %016llx\n", x->il, x->ie,
                            (unsigned long long)x->sum);
}

/* The last line, for n bytes before it. */
static inline size_t slice_end_write(const char *before, size_t n, char *text) {
    return (size_t)snprintf(text, SLICE_LINE, "end %016llx\n",
                            (unsigned long long)XXH3_64bits(before, n));
}

/* The line at *at, newline included, as a string; its length, or 0 when there is none that ends. */
static inline size_t slice_line(const char *text, size_t n, size_t at, char line[SLICE_LINE]) {
    const char *end =
        at < n ? memchr(text + at, '\n', n - at < SLICE_LINE ? n - at : SLICE_LINE - 1) : NULL;
    if (!end) return 0;
    size_t len = (size_t)(end - (text + at)) + 1;
    memcpy(line, text + at, len);
    line[len] = 0;
    return strlen(line) == len ? len : 0;
}

/* The head. Whatever it says must, written again, give the same bytes: there is one way to say
 * it. Returns its length, or 0. */
static inline size_t slice_head_parse(const char *text, size_t n, slice *s) {
    char head[8 * SLICE_LINE], again[8 * SLICE_LINE];
    unsigned long long sampled, by_sums = 0, config;
    int n_used = 0;
    size_t n_head = n < sizeof head - 1 ? n : sizeof head - 1;
    memcpy(head, text, n_head);
    head[n_head] = 0;
    if (sscanf(head, "k3-slice %10u\nnumerics %31s\nfingerprint %16llx%n", &s->version, s->numerics,
               &sampled, &n_used) != 3 ||
        s->version < 1 || s->version > 2)
        return 0;
    for (const char *c = s->numerics; *c; c++) /* it is printed */
        if (*c < 0x21 || *c > 0x7e) return 0;
    const char *rest = head + n_used;
    n_used = 0;
    if (s->version > 1 && (sscanf(rest, " %16llx%n", &by_sums, &n_used) != 1 || n_used == 0)) return 0;
    if (sscanf(rest + n_used,
               "\ngeometry %10u %10u %10u %10u %10u %10u\nsitu %8x %8x\nconfig %16llx\nexperts %10u\n",
               &s->n_layers, &s->n_dense, &s->n_experts, &s->latent, &s->inter, &s->top_k,
               &s->beta_bits, &s->linear_beta_bits, &config, &s->n) != 10)
        return 0;
    s->sampled = sampled;
    s->by_sums = by_sums;
    s->config_sum = config;
    n = slice_head_write(s, again);
    return n <= n_head && memcmp(head, again, n) == 0 ? n : 0;
}

static inline bool slice_head_is_fit(const slice *s) {
    return s->n_dense < s->n_layers && s->n_layers <= SLICE_MAX_LAYERS && s->n_experts >= 1 &&
           s->n_experts <= SLICE_MAX_EXPERTS && s->n >= 1 &&
           s->n <= (s->n_layers - s->n_dense) * s->n_experts;
}

/* The lines of experts, from *at on; NULL, or what is wrong with one. Stops before the first that
 * is not whole. */
static inline const char *slice_list_parse(const char *text, size_t n, size_t *at, slice *s,
                                           uint8_t *seen) {
    char line[SLICE_LINE], again[SLICE_LINE];
    for (size_t len; s->n_done < s->n; s->n_done++, *at += len) {
        slice_expert *x = &s->list[s->n_done];
        unsigned long long sum;
        if ((len = slice_line(text, n, *at, line)) == 0) return NULL;
        if (sscanf(line, "%10u %10u %16llx", &x->il, &x->ie, &sum) != 3)
            return "a line that is no `layer expert sum`";
        x->sum = sum;
        if (slice_expert_write(x, again) != len || memcmp(line, again, len) != 0)
            return "a line that is no `layer expert sum`";
        if (x->il < s->n_dense || x->il >= s->n_layers || x->ie >= s->n_experts)
            return "an expert that the model does not have";
        size_t i = (size_t)(x->il - s->n_dense) * s->n_experts + x->ie;
        if (seen[i / 8] >> i % 8 & 1) return "an expert that is named twice";
        seen[i / 8] |= (uint8_t)(1u << i % 8);
    }
    return NULL;
}

/* Read the n bytes of a manifest; with is_part one that is not finished: then *n_good is how many
 * of its bytes are good lines. NULL, or what is wrong with it. `s->list` is the caller's to free,
 * also after an error. */
static inline const char *slice_parse(const char *text, size_t n, bool is_part, slice *s,
                                      size_t *n_good) {
    char line[SLICE_LINE], end[SLICE_LINE];
    memset(s, 0, sizeof *s);
    size_t at = slice_head_parse(text, n, s);
    if (at == 0) return "not a k3.slice of version 1 or 2";
    if (!slice_head_is_fit(s)) return "an impossible geometry";
    uint8_t *seen = calloc(((size_t)(s->n_layers - s->n_dense) * s->n_experts + 7) / 8, 1);
    s->list = calloc(s->n, sizeof *s->list);
    const char *why = seen && s->list ? slice_list_parse(text, n, &at, s, seen) : "out of memory";
    free(seen);
    if (n_good) *n_good = at;
    if (why || is_part) return why;
    if (s->n_done < s->n) return "cut short";
    size_t len = slice_line(text, n, at, line);
    if (len == 0 || at + len != n) return "cut short, or more than there should be";
    return slice_end_write(text, at, end) == len && memcmp(line, end, len) == 0
               ? NULL
               : "damaged: its sum does not match";
}

/* A regular file for reading, without waiting for a writer; NULL and errno. */
static inline FILE *slice_file_open(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool is_file = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    FILE *f = is_file ? fdopen(fd, "rb") : NULL;
    if (f || fd < 0) return f;
    close(fd);
    errno = !is_file && S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
    return NULL;
}

/* A whole small file, NUL behind it; NULL and errno, or NULL and errno 0 when it is longer than
 * `most`. The caller's to free(). */
static inline char *slice_file_read(const char *path, size_t most, size_t *n) {
    FILE *f = slice_file_open(path);
    char *text = NULL;
    size_t cap = 0, got = 1;
    int why = f ? 0 : errno;
    *n = 0;
    while (f && got > 0 && why == 0 && *n <= most) {
        if (*n + 1 >= cap) {
            size_t want = cap ? 2 * cap : 65536;
            char *grown = realloc(text, want < most + 2 ? want : most + 2);
            if (!grown) {
                why = ENOMEM;
                break;
            }
            cap = want < most + 2 ? want : most + 2;
            text = grown;
        }
        got = fread(text + *n, 1, cap - 1 - *n, f);
        *n += got;
        if (ferror(f)) why = errno ? errno : EIO;
    }
    if (f) fclose(f);
    if (f && why == 0 && *n <= most) {
        text[*n] = 0;
        return text;
    }
    free(text);
    errno = why;
    return NULL;
}

static inline bool slice_write_all(int fd, const void *from, size_t n) {
    const uint8_t *p = from;
    while (n > 0) {
        ssize_t put = write(fd, p, n < (1u << 30) ? n : 1u << 30);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        p += put;
        n -= (size_t)put;
    }
    return true;
}

/* What was renamed stays so. Where directories cannot be synced, nothing is lost but time. */
static inline void slice_dir_sync(const char *dir) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) fsync(fd);
    if (fd >= 0) close(fd);
}

/* A file that is being written by who has the directory to himself (a lock says so): never one that is
 * there, whoever put it there. A descriptor, or -1 and errno. */
static inline int slice_part_open(const char *part) {
    if (unlink(part) != 0 && errno != ENOENT) return -1;
    return open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
}

/* A small file, whole or as it was; false and errno. */
static inline bool slice_file_write(const char *dir, const char *name, const char *text, size_t n) {
    char path[4352], part[4360];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    snprintf(part, sizeof part, "%s.part", path);
    int fd = slice_part_open(part);
    bool is_ok = fd >= 0 && slice_write_all(fd, text, n) && fsync(fd) == 0;
    if (fd >= 0 && close(fd) != 0) is_ok = false;
    is_ok = is_ok && rename(part, path) == 0;
    if (is_ok) slice_dir_sync(dir);
    return is_ok;
}

#endif
