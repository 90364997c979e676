/* output.c - stdout, JSON and output files of the `k3` program. */
#include "cli/output.h"

#include "cli/console.h"
#include "cli/screen.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int fail_stdout(int error) {
    if (error != EPIPE && error != EBADF) say("stdout: %s", strerror(error));
    return FAIL_IO;
}

int out_write(const char *p, size_t n_bytes) {
    int error = screen_write(p, n_bytes);
    return error ? fail_stdout(error) : DONE;
}

int out_json_line(struct json_object *o) {
    size_t n = 0;
    const char *text = json_object_to_json_string_length(
        o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE, &n);
    int rc = text ? out_write(text, n) : fail_memory("a line of JSON", n);
    if (rc == DONE) rc = out_write("\n", 1);
    json_object_put(o);
    return rc;
}

int outfile_open(outfile *o, const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    o->path = path;
    o->is_begun = false;
    o->is_new = fd >= 0;
    if (fd < 0 && errno == EEXIST) fd = open(path, O_WRONLY | O_CLOEXEC);
    o->f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    return o->f ? DONE : fail(FAIL_IO, "%s: %s", path, strerror(errno));
}

int outfile_begin(outfile *o) {
    struct stat st;
    if (!o->f) return DONE;
    o->is_begun = true;
    if (fstat(fileno(o->f), &st) != 0 || !S_ISREG(st.st_mode)) return DONE;
    return ftruncate(fileno(o->f), 0) == 0 ? DONE
                                           : fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
}

int outfile_differ(const outfile *a, const outfile *b) {
    struct stat x, y;
    if (!a->f || !b->f || fstat(fileno(a->f), &x) != 0 || fstat(fileno(b->f), &y) != 0 ||
        !S_ISREG(x.st_mode) || x.st_dev != y.st_dev || x.st_ino != y.st_ino)
        return DONE;
    return fail(FAIL_USAGE, "%s and %s are one file; two outputs need two", a->path, b->path);
}

int outfile_write(outfile *o, const void *p, size_t n_bytes) {
    if (fwrite(p, 1, n_bytes, o->f) == n_bytes) return DONE;
    return fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
}

int outfile_close(outfile *o, bool keep) {
    struct stat st;
    int rc = DONE;
    if (!o->f) return DONE;
    bool is_file = fstat(fileno(o->f), &st) == 0 && S_ISREG(st.st_mode);
    bool had_error = ferror(o->f) != 0;
    if (fclose(o->f) != 0 && keep && !had_error)
        rc = fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
    else if (had_error)
        rc = keep ? fail(FAIL_IO, "%s: write error; is the disk full?", o->path) : FAIL_IO;
    if ((rc != DONE || !keep) && is_file && (o->is_new || o->is_begun)) remove(o->path);
    o->f = NULL;
    return rc;
}

void json_put(json_object *o, const char *key, json_object *value) {
    json_object_object_add(o, key, value);
}

void json_put_hash(json_object *o, const char *key, uint64_t fnv) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fnv);
    json_put(o, key, json_object_new_string(text));
}

void json_put_real(json_object *o, const char *key, double value) {
    char text[64];
    snprintf(text, sizeof text, "%.6f", value);
    json_put(o, key, json_object_new_double_s(value, text));
}

void json_put_path(json_object *o, const char *key, const char *path) {
    size_t n_bytes = strlen(path);
    char *text = malloc(3 * (n_bytes + 3) + 9);
    k3_utf8 utf8 = {{0}, 0};
    if (!text) return;
    size_t n = k3_utf8_push(&utf8, path, n_bytes, text);
    n += k3_utf8_push(&utf8, "", 0, text + n);
    json_put(o, key, json_object_new_string_len(text, (int)n));
    free(text);
}

void json_put_count(json_object *o, const char *key, uint64_t n) {
    json_put(o, key, json_object_new_int64((int64_t)n));
}

/* Length of the valid UTF-8 sequence at p, 0 when there is none. */
static size_t utf8_length(const unsigned char *p, size_t n) {
    unsigned char lo = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80; /* of the second byte */
    unsigned char hi = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    size_t len = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if ((p[0] >= 0x80 && p[0] < 0xc2) || p[0] > 0xf4 || len > n) return 0;
    for (size_t i = 1; i < len; i++) {
        if (p[i] < lo || p[i] > hi) return 0;
        lo = 0x80;
        hi = 0xbf;
    }
    return len;
}

void put_escaped(const char *bytes, size_t n) {
    static const char plain[] = "\n\t\r\\", letter[] = "ntr\\";
    const unsigned char *p = (const unsigned char *)bytes;
    for (size_t i = 0; i < n;) {
        size_t len = utf8_length(p + i, n - i);
        const char *known = p[i] ? strchr(plain, p[i]) : NULL;
        if (known)
            printf("\\%c", letter[known - plain]);
        else if (len == 0 || p[i] < 0x20 || p[i] == 0x7f)
            printf("\\x%02x", p[i]);
        else
            fwrite(p + i, 1, len, stdout);
        i += len ? len : 1;
    }
}
