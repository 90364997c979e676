/* k3_resume.c - how far a verify came (k3_resume.h). The file, in bytes, all numbers little-endian:
 *
 *     8          "K3VERIF1"
 *     8          key
 *     8  8       i_copy, n_stretches
 *     8          is_zero, 0 or 1
 *     8  8       n_files, n_values
 *     8 n_files  files[]
 *     8 n_values values[]
 *     8          XXH3 of all before
 *
 * None of these is an address, a length of memory or a name: n_files and n_values must be those that
 * the caller expects.
 */
#include "k3_resume.h"
#include "k3_common.h"
#include "k3_error.h"
#include "k3_temp.h"
#include "slice.h"

#include <sys/stat.h>
#include <unistd.h>

#define MAGIC "K3VERIF1"
enum { HEAD_WORDS = 7 };
STATIC_ASSERT(magic_is_a_word, sizeof MAGIC - 1 == sizeof(uint64_t));

static void head_make(const k3_resume *r, uint64_t head[HEAD_WORDS]) {
    memcpy(head, MAGIC, sizeof *head);
    head[1] = r->key;
    head[2] = r->i_copy;
    head[3] = r->n_stretches;
    head[4] = r->is_zero;
    head[5] = r->n_files;
    head[6] = r->n_values;
}

static uint64_t resume_sum(const uint64_t *head, const k3_resume *r) {
    uint64_t h = XXH3_64bits(head, HEAD_WORDS * sizeof *head);
    h = XXH3_64bits_withSeed(r->files, (size_t)r->n_files * sizeof *r->files, h);
    return XXH3_64bits_withSeed(r->values, (size_t)r->n_values * sizeof *r->values, h);
}

/* Read exactly n words of 8 bytes. */
static bool words_read(int fd, uint64_t *to, uint64_t n) {
    uint8_t *p = (uint8_t *)to;
    for (size_t left = (size_t)n * sizeof *to; left > 0;) {
        ssize_t got = read(fd, p, left);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        p += got;
        left -= (size_t)got;
    }
    return true;
}

/* Read and check the file. Returns NULL, or why it is not believed. */
static const char *resume_look(int fd, k3_resume *r) {
    struct stat st;
    uint64_t head[HEAD_WORDS], want[HEAD_WORDS], sum;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return "is no regular file";
    if (st.st_uid != geteuid() || (st.st_mode & 022))
        return "belongs to, or can be written by, others";
    if (!words_read(fd, head, HEAD_WORDS)) return "is cut short";
    head_make(r, want);
    if (head[0] != want[0]) return "is no such file";
    if (head[1] != want[1] || head[5] != want[5] || head[6] != want[6])
        return "is of another check or of other files";
    if (!words_read(fd, r->files, r->n_files) || !words_read(fd, r->values, r->n_values) ||
        !words_read(fd, &sum, 1))
        return "is cut short";
    if (sum != resume_sum(head, r) || head[4] > 1) return "is damaged";
    r->i_copy = head[2];
    r->n_stretches = head[3];
    r->is_zero = head[4];
    return NULL;
}

int k3_resume_read(const char *path, k3_resume *r, char *why, size_t n_why) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    why[0] = 0;
    if (fd < 0) {
        if (errno != ENOENT) snprintf(why, n_why, "%s", strerror(errno));
        return 0;
    }
    const char *wrong = resume_look(fd, r);
    close(fd);
    if (wrong) snprintf(why, n_why, "%s", wrong);
    return !wrong;
}

static void temp_name(const char *path, char *temp, size_t cap) {
    snprintf(temp, cap, "%s.tmp", path);
}

int k3_resume_write(const char *path, const k3_resume *r, k3_error *err) {
    char temp[4400];
    uint64_t head[HEAD_WORDS];
    int fd;
    temp_name(path, temp, sizeof temp);
    int rc = k3_temp_open(temp, K3_TEMP_PRIVATE, &fd, err);
    if (rc != 0) return rc < 0 ? rc : 0;
    head_make(r, head);
    uint64_t sum = resume_sum(head, r);
    bool is_ok = ftruncate(fd, 0) == 0 && slice_write_all(fd, head, sizeof head) &&
                 slice_write_all(fd, r->files, (size_t)r->n_files * sizeof *r->files) &&
                 slice_write_all(fd, r->values, (size_t)r->n_values * sizeof *r->values) &&
                 slice_write_all(fd, &sum, sizeof sum);
    rc = is_ok ? k3_temp_rename(fd, temp, path, err)
               : fail(err, K3_EIO, "%s: %s", temp, strerror(errno));
    if (rc < 0) unlink(temp);
    close(fd);
    return rc;
}

void k3_resume_remove(const char *path) {
    char temp[4400];
    temp_name(path, temp, sizeof temp);
    unlink(path);
    k3_temp_sweep(temp);
}
