/* reader.c - `--reader`: what the disk gives to a program that does nothing else.
 *
 * Threads read blocks of one expert's size at random places of the shards, past the page cache. The
 * best depth is looked for first; bench measures it again when the runs are over.
 */
#include "cli/reader.h"

#include "cli/console.h"
#include "k3_common.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define READER_SECONDS 2.0
#define READER_DEPTH 32

typedef struct {
    const reader *r;
    uint64_t seed, bytes, end_ns;
    int why;
} reader_thread;

static void *reader_main(void *arg) {
    reader_thread *t = arg;
    const reader *r = t->r;
    void *buf = NULL;
    if (posix_memalign(&buf, 4096, r->block) != 0) {
        t->why = ENOMEM;
        return NULL;
    }
    while (clock_ns() < t->end_ns && t->why == 0) {
        t->seed = t->seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = (t->seed >> 20) % r->n_all;
        size_t i = 0;
        for (; at >= r->n_block[i]; i++) at -= r->n_block[i];
        ssize_t got = pread(r->fd[i], buf, r->block, (off_t)(at * r->block));
        if (got < 0 && errno != EINTR) t->why = errno;
        if (got > 0) t->bytes += (uint64_t)got;
    }
    free(buf);
    return NULL;
}

double reader_measure(const reader *r, int depth) {
    pthread_t id[READER_DEPTH];
    reader_thread t[READER_DEPTH];
    uint64_t start = clock_ns(), bytes = 0;
    int n = 0;
    bool is_bad = false;
    for (; n < depth; n++) {
        t[n] = (reader_thread){r, start + (uint64_t)n * 7919, 0, 0, 0};
        t[n].end_ns = start + (uint64_t)(READER_SECONDS * 1e9);
        if (pthread_create(&id[n], NULL, reader_main, &t[n]) != 0) break;
    }
    for (int i = 0; i < n; i++) {
        pthread_join(id[i], NULL);
        bytes += t[i].bytes;
        is_bad = is_bad || t[i].why != 0;
    }
    return is_bad || n < depth ? 0 : 1e9 * (double)bytes / (double)(clock_ns() - start);
}

void reader_close(reader *r) {
    for (size_t i = 0; i < r->n_file; i++) close(r->fd[i]);
    free(r->fd);
    free(r->n_block);
}

int reader_open(reader *r, const char *dir, uint64_t block) {
    char path[4352];
    struct dirent *d;
    DIR *list = opendir(dir);
    if (!list) return fail(FAIL_IO, "%s: %s", dir, strerror(errno));
    r->block = (size_t)(block + 4095) / 4096 * 4096;
    while ((d = readdir(list))) {
        size_t n = strlen(d->d_name);
        struct stat st;
        if (n < 12 || strcmp(d->d_name + n - 12, ".safetensors") != 0) continue;
        snprintf(path, sizeof path, "%s/%s", dir, d->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        int *more = realloc(r->fd, (r->n_file + 1) * sizeof *more);
        if (more) r->fd = more;
        uint64_t *counts = realloc(r->n_block, (r->n_file + 1) * sizeof *counts);
        if (counts) r->n_block = counts;
        if (fd < 0 || !more || !counts || fstat(fd, &st) != 0) {
            closedir(list);
            return fail(FAIL_IO, "--reader: %s: %s", path, strerror(errno));
        }
        r->fd[r->n_file] = fd;
        r->n_block[r->n_file] = (uint64_t)st.st_size / r->block;
        r->n_all += r->n_block[r->n_file++];
    }
    closedir(list);
    return r->n_all ? DONE
                    : fail(FAIL_USAGE, "--reader: %s has no block of %zu bytes", dir, r->block);
}

int reader_find(reader *r, uint64_t ram) {
    for (int depth = 1; depth <= READER_DEPTH; depth *= 2) {
        if (ram && depth > 1 && (uint64_t)depth * r->block > ram / 2) break;
        double speed = reader_measure(r, depth);
        if (speed <= r->before) continue;
        r->before = speed;
        r->best_depth = depth;
    }
    return r->before > 0 ? DONE : fail(FAIL_IO, "--reader: this file system has no direct reads");
}
