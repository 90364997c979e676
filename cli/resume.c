/* resume.c - where `k3 verify` keeps how far it came. */
#include "cli/resume.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The directory of a file's name, into `out`. */
static void directory_of(const char *path, char *out, size_t cap) {
    const char *slash = strrchr(path, '/');
    if (!slash)
        snprintf(out, cap, ".");
    else
        snprintf(out, cap, "%.*s", slash > path ? (int)(slash - path) : 1, path);
}

/* The user's cache directory of k3, made if absent; false, and a reason, when it cannot be had. */
static bool cache_directory(char *out, size_t cap) {
    const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    char parent[4200];
    bool is_xdg = base && base[0] == '/'; /* the specification: a relative one is none */
    if (!is_xdg && (!home || home[0] != '/')) {
        snprintf(out, cap, "neither XDG_CACHE_HOME nor HOME is set");
        return false;
    }
    snprintf(parent, sizeof parent, "%s%s", is_xdg ? base : home, is_xdg ? "" : "/.cache");
    snprintf(out, cap, "%s/k3", parent);
    bool is_made = mkdir(parent, 0700) == 0 || errno == EEXIST;
    is_made = is_made && (mkdir(out, 0700) == 0 || errno == EEXIST);
    if (is_made && access(out, W_OK) == 0) return true;
    size_t n = strlen(out);
    if (n < cap) snprintf(out + n, cap - n, ": %s", strerror(errno));
    return false;
}

bool resume_place(const cli_args *a, const char *dir, char *path, size_t cap) {
    char beside[4352], parent[4352], cache[4352];
    if (a->engine.sums)
        snprintf(beside, sizeof beside, "%.4300s.verify", a->engine.sums);
    else
        snprintf(beside, sizeof beside, "%.4300s/k3.verify", dir);
    directory_of(beside, parent, sizeof parent);
    if (access(parent, W_OK) == 0) {
        snprintf(path, cap, "%s", beside);
        return true;
    }
    if (!cache_directory(cache, sizeof cache)) {
        snprintf(path, cap, "%s", cache);
        return false;
    }
    char *real = realpath(parent, NULL);
    const char *name = strrchr(beside, '/');
    uint64_t h = real ? k3_fnv1a(K3_FNV_BASIS, real, strlen(real)) : K3_FNV_BASIS;
    free(real);
    h = k3_fnv1a(h, name ? name : beside, strlen(name ? name : beside));
    snprintf(path, cap, "%s/verify-%016llx", cache, (unsigned long long)h);
    return true;
}
