/* tier_keep.h - what was staged, kept on disk: a slice that grows, for `k3-tier --keep DIR`.
 *
 * A box without a model may keep what is staged. A thread writes experts from their slots, which
 * nobody takes away from them, into shards of about a gigabyte, sooner when nothing more comes:
 * the loop that answers clients never waits for the disk. After each shard k3.slice (slice.h) is
 * written anew, so that a box that is killed has lost the last shard at most, and a restart with
 * the same DIR serves the rest.
 *
 * A shard is called after the number of experts listed before it. It gets its name before the list
 * has its experts: one that was written and never listed is overwritten by the next.
 *
 * The directory is empty at first, or holds nothing but what was written here, and is locked by the
 * box that writes to it (tier_server.c, keep_open).
 *
 * A header because tier_server.c is one program with its tests; it uses that file's fail().
 */
#ifndef K3_TIER_KEEP_H
#define K3_TIER_KEEP_H

#include "experts.h"
#include "slice.h"

#include <dirent.h>
#include <pthread.h>

#define KEEP_SHARD_BYTES 1000000000u
#define KEEP_IDLE_S 2
#define KEEP_MAX_SHARDS 4000u /* a model directory has at most 4096 */

typedef struct {
    const char *dir;
    slice man;             /* list and n: what is on disk; room for all experts */
    slice_expert *queue;   /* [n_queue] to be written, oldest first ...         */
    const uint8_t **bytes; /* ... and where they lie                            */
    uint32_t n_queue, n_shards;
    uint64_t expert_bytes;
    pthread_mutex_t lock;
    pthread_cond_t more;
    pthread_t thread;
    void (*wrote)(void *user, const slice_expert *x, uint32_t n); /* set before the start */
    void *user;
    bool is_running, is_stopping, is_dead; /* is_dead: the disk would not take any more */
} keeper;

static bool keep_shard_write(const keeper *k, const char *path, uint32_t n) {
    char part[4400];
    size_t n_head;
    char *head =
        k3_shard_head(NULL, k->man.latent, k->man.inter, k->man.sampled, k->queue, n, &n_head);
    snprintf(part, sizeof part, "%s.part", path);
    int fd = head ? slice_part_open(part) : -1;
    bool is_ok = fd >= 0 && slice_write_all(fd, head, n_head);
    for (uint32_t i = 0; i < n && is_ok; i++)
        is_ok = slice_write_all(fd, k->bytes[i], (size_t)k->expert_bytes);
    is_ok = is_ok && fsync(fd) == 0;
    is_ok = is_ok && rename(part, path) == 0;
    int why = errno;
    if (fd >= 0) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (fd >= 0) close(fd);
    free(head);
    if (!is_ok) unlink(part);
    if (!is_ok) errno = why;
    return is_ok;
}

/* k3.slice with the first n of the queue as well. */
static bool keep_list_write(const keeper *k, uint32_t n) {
    slice man = k->man;
    char *text = malloc(8 * SLICE_LINE + (k->man.n + n + 1ull) * SLICE_LINE);
    if (!text) return false;
    man.n += n;
    size_t at = slice_head_write(&man, text);
    for (uint32_t i = 0; i < k->man.n; i++) at += slice_expert_write(&man.list[i], text + at);
    for (uint32_t i = 0; i < n; i++) at += slice_expert_write(&k->queue[i], text + at);
    at += slice_end_write(text, at, text + at);
    bool is_ok = slice_file_write(k->dir, SLICE_NAME, text, at);
    free(text);
    return is_ok;
}

/* Write the first n of the queue. Lock not held; nobody else shortens the queue. */
static bool keep_flush(keeper *k, uint32_t n) {
    char path[4352];
    snprintf(path, sizeof path, "%s/kept-%06u.safetensors", k->dir, k->man.n);
    if (k->n_shards >= KEEP_MAX_SHARDS)
        fail(FAIL_IO, "--keep %s: as many files as a slice may have; what comes now is not kept",
             k->dir);
    else if (keep_shard_write(k, path, n) && keep_list_write(k, n))
        return true;
    else
        fail(FAIL_IO,
             "--keep %s: %s; what comes now is not kept: make room, start again, stage again", path,
             strerror(errno));
    return false;
}

static void *keep_main(void *arg) {
    keeper *k = arg;
    uint64_t per = KEEP_SHARD_BYTES / k->expert_bytes;
    uint32_t most = per < 1 ? 1 : per > 32768 ? 32768 : (uint32_t)per;
    pthread_mutex_lock(&k->lock);
    while (!k->is_dead) {
        uint32_t before = k->n_queue;
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec += KEEP_IDLE_S;
        if (before == 0 && !k->is_stopping)
            pthread_cond_wait(&k->more, &k->lock);
        else if (before < most && !k->is_stopping)
            pthread_cond_timedwait(&k->more, &k->lock, &until);
        bool is_idle = k->n_queue == before && before > 0;
        if (k->is_stopping && k->n_queue == 0) break;
        if (k->n_queue < most && !is_idle && !k->is_stopping) continue;
        uint32_t n = k->n_queue < most ? k->n_queue : most;
        pthread_mutex_unlock(&k->lock);
        bool is_ok = keep_flush(k, n);
        if (is_ok) k->wrote(k->user, k->queue, n);
        pthread_mutex_lock(&k->lock);
        k->is_dead = !is_ok;
        if (is_ok) {
            memcpy(k->man.list + k->man.n, k->queue, n * sizeof *k->queue);
            k->man.n += n;
            k->n_shards++;
        }
        k->n_queue -= n;
        memmove(k->queue, k->queue + n, k->n_queue * sizeof *k->queue);
        memmove(k->bytes, k->bytes + n, k->n_queue * sizeof *k->bytes);
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

/* The shards of earlier boxes: they count towards KEEP_MAX_SHARDS. */
static uint32_t keep_count(const char *dir) {
    uint32_t n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        n += strncmp(e->d_name, "kept-", 5) == 0 && strstr(e->d_name, ".safetensors");
    if (d) closedir(d);
    return n;
}

/* What keeping takes of memory: for each expert of the model, lists and lines of k3.slice; beside them
 * a shard's header. */
#define KEEP_BYTES (8ull << 20)
static uint64_t keep_bytes_each(void) {
    return 2 * sizeof(slice_expert) + sizeof(uint8_t *) + SLICE_LINE;
}

/* Begin, with what is in `dir` already: man->n experts. False: no memory, no thread. */
static bool keep_start(keeper *k, const char *dir, const slice *man, uint64_t expert_bytes) {
    size_t n_all = (size_t)(man->n_layers - man->n_dense) * man->n_experts;
    k->dir = dir;
    k->man = *man;
    k->expert_bytes = expert_bytes;
    k->n_shards = keep_count(dir);
    k->man.list = calloc(n_all, sizeof *k->man.list);
    k->queue = calloc(n_all, sizeof *k->queue);
    k->bytes = calloc(n_all, sizeof *k->bytes);
    pthread_mutex_init(&k->lock, NULL);
    clock_cond_init(&k->more);
    if (k->man.list && man->n > 0) memcpy(k->man.list, man->list, man->n * sizeof *man->list);
    k->is_running =
        k->man.list && k->queue && k->bytes && pthread_create(&k->thread, NULL, keep_main, k) == 0;
    return k->is_running;
}

/* An expert whose bytes, six tensors in slot order, stay where they are. */
static void keep_add(keeper *k, const slice_expert *x, const uint8_t *bytes) {
    if (!k->is_running) return;
    pthread_mutex_lock(&k->lock);
    if (!k->is_dead) {
        k->queue[k->n_queue] = *x;
        k->bytes[k->n_queue++] = bytes;
        pthread_cond_signal(&k->more);
    }
    pthread_mutex_unlock(&k->lock);
}

/* Somebody waits for a slot: write now. False when nothing is left to write, or can be. */
static bool keep_hurry(keeper *k) {
    if (!k->is_running) return false;
    pthread_mutex_lock(&k->lock);
    bool has_more = !k->is_dead && k->n_queue > 0;
    pthread_cond_signal(&k->more);
    pthread_mutex_unlock(&k->lock);
    return has_more;
}

/* Experts that are not written yet. *is_dead: none of them will be, and no other. */
static uint32_t keep_left(keeper *k, bool *is_dead) {
    *is_dead = false;
    if (!k->is_running) return 0;
    pthread_mutex_lock(&k->lock);
    uint32_t n = k->n_queue;
    *is_dead = k->is_dead;
    pthread_mutex_unlock(&k->lock);
    return n;
}

/* Write what is left, and end. False: something was not kept. */
static bool keep_stop(keeper *k) {
    if (k->is_running) {
        pthread_mutex_lock(&k->lock);
        k->is_stopping = true;
        pthread_cond_signal(&k->more);
        pthread_mutex_unlock(&k->lock);
        pthread_join(k->thread, NULL);
    }
    bool is_whole = !k->is_dead;
    free(k->man.list);
    free(k->queue);
    free(k->bytes);
    memset(k, 0, sizeof *k);
    return is_whole;
}

#endif
