/* k3_cache.h - a timeline on disk, in a cache, in memory: states, snapshots, a directory of states.
 * k3.h includes it, and its conventions hold here.
 */
#ifndef K3_CACHE_H
#define K3_CACHE_H

#include "k3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- State: a timeline on disk, in a cache, in memory --------------------------------
 *
 * A state is for exactly its ids: KDA state cannot be cut back to fewer positions. It goes on,
 * bit for bit, as the session that was saved would have, on every kernel set, thread count,
 * chunk and budget. The file is described byte by byte at the top of k3_state.c. */

/* Every id run so far, borrowed until the session's next call; *n is k3_session_pos. */
const uint32_t *k3_session_ids(const k3_session *s, size_t *n);

/* Two numbers that say which model this is. Both are equal for the same weights, wherever the
 * weights lie and however they are cut into shards. */
typedef struct {
    uint64_t sampled; /* of geometry, constants, and samples of the weights: weights that differ
                       * elsewhere have the same number                                          */
    uint64_t by_sums; /* of geometry and k3.sums: weights that differ anywhere have another. 0: no
                       * sums are known (none there, k3_options.no_check, experts_only, a k3.sums
                       * without sums of contents, or sums written by this very engine)          */
} k3_fingerprints;

/* The first call reads some thousand samples. Errors  K3_EIO: a sample could not be read; K3_ENOMEM */
int k3_engine_fingerprints(k3_engine *e, k3_fingerprints *out, k3_error *err);

typedef struct {
    uint64_t file_bytes, raw_bytes, n_pos; /* on disk; as the session holds it */
    double seconds;
} k3_state_info;

/* Write the session to `path`, whole or not at all: a temporary file (PATH.tmp), fsync, rename,
 * fsync of the directory. `app`: bytes of the caller's (turn boundaries, sampler), at most
 * K3_STATE_APP_MAX, kept in a section of their own. `info` may be NULL. Takes no memory that the
 * plan does not count.
 * Errors  K3_EUSAGE (the session ended with an error; n_app too large), K3_ECHECK (it is unverified, and
 *         this engine has audits: k3_options.tier_audit), K3_EIO; what was at `path` is then still there */
#define K3_STATE_APP_MAX (1u << 20)
int k3_session_save(k3_session *s, const char *path, const void *app, size_t n_app,
                    k3_state_info *info, k3_error *err);

/* Could a state be written to `path` now? Asked before the hours that make it. With a `shape` also whether
 * there is room for one of n_pos positions that does not shrink at all: a state of K3 is written in five
 * sixths of that. A quota is not seen. Errors  K3_EIO, K3_EUSAGE; the text says both sizes */
int k3_state_can_save(const char *path, const k3_shape *shape, uint64_t n_pos, k3_error *err);

/* Put the session where the saved one was. `app`, `n_app` and `info` may be NULL; else *app is
 * the caller's to free(), and NULL when there is none. After an error the session is as new.
 * Errors  K3_ECHECK: no state file, damaged, or of another version, numerics id or model; the
 *         text says what differs; or it is unverified (made with far boxes' answers that nobody compared),
 *         and this engine has audits. K3_EFULL: more positions than the context. K3_EIO, K3_ENOMEM */
int k3_session_load(k3_session *s, const char *path, void **app, size_t *n_app, k3_state_info *info,
                    k3_error *err);

/* Undo. A snapshot holds the fixed part of a session (k3_shape.state_bytes, in the budget); the
 * latent cache is positional and stays where it is. Restoring needs a session that has since
 * only gone on: the ids of the snapshot must be its first ones (K3_EUSAGE). It also heals a
 * session whose last step failed or was cancelled.
 * Errors  K3_EBUDGET: no room (k3_options.snapshots plans for it); K3_EUSAGE; K3_ENOMEM */
typedef struct k3_snapshot k3_snapshot;
int k3_session_snapshot(k3_session *s, k3_snapshot **out, k3_error *err);
int k3_session_restore(k3_session *s, const k3_snapshot *snap, k3_error *err);
void k3_snapshot_free(k3_snapshot *snap); /* before its engine is closed */

/* A directory of states, shared by any number of processes, each of which may be killed at any
 * time. An entry is found by its exact ids, under this engine's numerics id and fingerprint. One
 * k3_cache is for one thread at a time. */
typedef struct k3_cache k3_cache;
typedef struct {
    uint64_t n_entries, bytes; /* in the directory now, of all models                     */
    uint64_t hits, misses, restored_pos, stored, evicted; /* by this k3_cache             */
} k3_cache_stats;

/* Made if absent. A directory that belongs to another user, or that others may write to, is refused
 * (K3_EIO): what is in it is believed. Such entries are passed over with a note. Beyond `max_bytes` (0: no bound) the least recently used go; the entry being
 * written is not counted until it is whole. */
int k3_cache_open(k3_cache **out, k3_engine *e, const char *dir, uint64_t max_bytes, k3_error *err);
void k3_cache_close(k3_cache *c);

/* Put the session at the end of the longest entry whose ids are the first of ids[0, n). Returns
 * the positions restored; 0: no such entry, the session is as new. An entry longer than the
 * context is passed over, a damaged one removed with a note; neither is an error. */
int64_t k3_cache_restore(k3_cache *c, k3_session *s, const uint32_t *ids, size_t n, k3_error *err);

/* Keep the session's present state. 0 also when it is there already, when another process is
 * writing it, when there is nothing to keep or when it could never fit.
 * With k3_options.tier_audit no unverified session is kept and no unverified entry is taken. A verified
 * state replaces an unverified one.
 * Errors  K3_EUSAGE (the session ended with an error), K3_EIO: the session is unharmed */
int k3_cache_store(k3_cache *c, k3_session *s, k3_error *err);

/* The same for the state at `pos`, before the last rows, which the session keeps. pos is k3_session_least() of a session
 * whose last pass was revocable: so a prompt is run whole, and kept without its last id.
 * Errors  K3_EUSAGE: another position */
int k3_cache_store_at(k3_cache *c, k3_session *s, uint64_t pos, k3_error *err);

/* Whether there is now an entry of exactly these ids: one kept before may have been evicted. */
bool k3_cache_has(const k3_cache *c, const uint32_t *ids, size_t n);
void k3_cache_get_stats(const k3_cache *c, k3_cache_stats *out);

/* ---- State files without a model ---- */

typedef struct {
    char numerics[32];
    k3_fingerprints print;
    uint64_t n_pos, file_bytes, raw_bytes, n_app;
    bool is_unverified; /* far boxes gave expert sums for it that nobody compared */
    uint64_t used_s; /* last use: the file's modification time, Unix seconds */
} k3_state_head;

/* Read and check the header; with `all`, every section as well. K3_ECHECK, K3_EIO. */
int k3_state_check(const char *path, bool all, k3_state_head *out, k3_error *err);

/* Visit a cache directory's entries, most recently used first. `rc` and `err` are those of
 * k3_state_check(path, false, ...); a visitor that returns non-zero ends it. Returns how many
 * were visited, or what the visitor returned if that is negative, or K3_EIO. */
typedef int (*k3_cache_fn)(void *user, const char *path, const k3_state_head *head, int rc,
                           const k3_error *err);
int64_t k3_cache_list(const char *dir, k3_cache_fn fn, void *user, k3_error *err);

/* Remove the least recently used until at most `max_bytes` are left, and what killed processes
 * left behind. Returns how many entries went; *bytes (may be NULL): their size. */
int64_t k3_cache_trim(const char *dir, uint64_t max_bytes, uint64_t *bytes, k3_error *err);

#ifdef __cplusplus
}
#endif
#endif
