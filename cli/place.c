/* place.c - finds what was installed with the program (place.h). The Makefile says where it was built, and
 * for which PREFIX. */
#include "cli/place.h"

#include "k3.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if !defined(K3_BUILD_DIR) || !defined(K3_SOURCE_DIR) || !defined(K3_SHARE_DIR)
#error "the Makefile says where this is built and installed"
#endif
#ifdef K3_COMMIT
#define K3_COMMIT_PART ", commit " K3_COMMIT
#else
#define K3_COMMIT_PART ""
#define K3_COMMIT ""
#endif

static const char *const LEAF_INSTALLED[] = {[PLACE_DEMO] = "demo", [PLACE_RELEASED] = "Kimi-K3"};
static const char *const LEAF_SOURCE[] = {
    [PLACE_DEMO] = "demo", [PLACE_RELEASED] = "share/Kimi-K3"};

/* The directory of this program's file; false where the system does not say. */
static bool own_dir(char *dir, size_t cap) {
    ssize_t n = readlink("/proc/self/exe", dir, cap - 1);
    if (n <= 0 || (size_t)n >= cap - 1) return false;
    dir[n] = 0;
    char *slash = strrchr(dir, '/');
    if (!slash || slash == dir) return false;
    *slash = 0;
    return true;
}

static bool is_same_dir(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bool has_config(const char *dir) {
    char path[4200];
    return snprintf(path, sizeof path, "%s/config.json", dir) < (int)sizeof path &&
           access(path, R_OK) == 0;
}

bool place_find(place_kind kind, char *path, size_t cap) {
    char own[4096] = "", beside[4200] = "";
    bool has_own = own_dir(own, sizeof own);
    if (!has_own || is_same_dir(own, K3_BUILD_DIR)) { /* not installed */
        snprintf(path, cap, "%s/%s", K3_SOURCE_DIR, LEAF_SOURCE[kind]);
        if (has_config(path) || has_own) return has_config(path);
    }
    char *slash = strrchr(own, '/');
    if (slash && strcmp(slash, "/bin") == 0) {
        *slash = 0;
        snprintf(beside, sizeof beside, "%s/share/k3/%s", own, LEAF_INSTALLED[kind]);
        snprintf(path, cap, "%s", beside);
        if (has_config(path)) return true;
    }
    snprintf(path, cap, "%s/%s", K3_SHARE_DIR, LEAF_INSTALLED[kind]);
    if (has_config(path)) return true;
    if (beside[0]) snprintf(path, cap, "%s", beside);
    return false;
}

const char *version_text(void) { return "k3 " K3_VERSION " (" K3_NUMERICS_ID ")" K3_COMMIT_PART; }

const char *version_commit(void) { return K3_COMMIT; }
