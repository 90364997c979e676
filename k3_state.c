/* k3_state.c - states on disk and the prefix cache. Not built yet. */
#include "k3_state.h"

#include <stdio.h>
#include <string.h>

static int not_yet(k3_error *err) {
    if (err) snprintf(err->text, sizeof err->text, "states on disk are not built yet");
    return K3_EUSAGE;
}

int k3_session_save(k3_session *s, const char *path, const void *app, size_t n_app,
                    k3_state_info *info, k3_error *err) {
    (void)s, (void)path, (void)app, (void)n_app, (void)info;
    return not_yet(err);
}

int k3_session_load(k3_session *s, const char *path, void **app, size_t *n_app, k3_state_info *info,
                    k3_error *err) {
    (void)s, (void)path, (void)app, (void)n_app, (void)info;
    return not_yet(err);
}

int k3_cache_open(k3_cache **out, k3_engine *e, const char *dir, uint64_t max_bytes,
                  k3_error *err) {
    (void)out, (void)e, (void)dir, (void)max_bytes;
    return not_yet(err);
}

void k3_cache_close(k3_cache *c) { (void)c; }

int64_t k3_cache_restore(k3_cache *c, k3_session *s, const uint32_t *ids, size_t n, k3_error *err) {
    (void)c, (void)s, (void)ids, (void)n;
    return not_yet(err);
}

int k3_cache_store(k3_cache *c, k3_session *s, k3_error *err) {
    (void)c, (void)s;
    return not_yet(err);
}

void k3_cache_get_stats(const k3_cache *c, k3_cache_stats *out) {
    (void)c;
    memset(out, 0, sizeof *out);
}

int k3_state_check(const char *path, bool all, k3_state_head *out, k3_error *err) {
    (void)path, (void)all, (void)out;
    return not_yet(err);
}

int64_t k3_cache_list(const char *dir, k3_cache_fn fn, void *user, k3_error *err) {
    (void)dir, (void)fn, (void)user;
    return not_yet(err);
}

int64_t k3_cache_trim(const char *dir, uint64_t max_bytes, uint64_t *bytes, k3_error *err) {
    (void)dir, (void)max_bytes, (void)bytes;
    return not_yet(err);
}
