/* cache.c - `k3 cache`: what --cache keeps, listed, removed, checked. */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t n, n_bytes, n_bad, n_closed; /* damaged; not to be opened */
    bool checks;                          /* every byte */
} cache_walk;

static int cache_visit(void *user, const char *path, const k3_state_head *head, int rc,
                       const k3_error *why) {
    cache_walk *w = user;
    k3_state_head again;
    k3_error err = *why;
    const char *slash = strrchr(path, '/');
    char size[32], used[32] = "?";
    time_t at = (time_t)head->used_s;
    struct tm tm;
    if (interrupted) return K3_ECANCEL;
    if (rc >= 0 && w->checks) rc = k3_state_check(path, true, &again, &err);
    if (rc == K3_EIO && access(path, F_OK) != 0) return 0; /* evicted meanwhile: no fault */
    w->n++;
    w->n_bytes += head->file_bytes;
    w->n_bad += rc < 0 && rc != K3_EIO;
    w->n_closed += rc == K3_EIO;
    if (rc < 0) {
        say("%s", err.text);
    } else if (!w->checks) {
        if (localtime_r(&at, &tm)) strftime(used, sizeof used, "%Y-%m-%d %H:%M:%S", &tm);
        printf("%10llu positions %12s  %s  model %016llx  %s%s\n", (unsigned long long)head->n_pos,
               fmt_bytes(size, head->file_bytes), used, (unsigned long long)head->print.sampled,
               slash ? slash + 1 : path,
               head->is_unverified ? "  with far answers that nobody compared" : "");
    }
    return 0;
}

static int cache_remove(const cli_args *a) {
    k3_error err = {{0}};
    uint64_t bytes = 0;
    char size[32];
    int64_t n = k3_cache_trim(a->words.arg2, a->cache_size, &bytes, &err);
    if (n < 0) return fail_status((int)n, &err);
    printf("%lld removed, %s\n", (long long)n, fmt_bytes(size, bytes));
    return DONE;
}

int cmd_cache(const cli_args *a) {
    static const char *const verb[] = {"ls", "rm", "verify"};
    cache_walk w = {.n = 0};
    k3_error err = {{0}};
    char size[32];
    size_t i = 0;
    while (i < COUNT(verb) && (!a->words.arg || strcmp(a->words.arg, verb[i]) != 0)) i++;
    if (i == COUNT(verb) || !a->words.arg2)
        return fail(FAIL_USAGE, "cache takes ls, rm or verify, and a directory: `k3 cache ls DIR`");
    if (is_given(a, "--cache-size") && i != 1)
        return fail(FAIL_USAGE, "--cache-size goes with `k3 cache rm`");
    if (i == 1) return cache_remove(a);
    signals_catch();
    w.checks = i == 2;
    int64_t n = k3_cache_list(a->words.arg2, cache_visit, &w, &err);
    if (n < 0) return fail_status((int)n, &err);
    printf("%llu entries, %s%s\n", (unsigned long long)w.n, fmt_bytes(size, w.n_bytes),
           w.checks && !w.n_bad && !w.n_closed ? ", every byte checked: no fault" : "");
    if (w.n_closed && !w.n_bad)
        return fail(FAIL_IO, "%llu cannot be read", (unsigned long long)w.n_closed);
    if (w.n_bad)
        return fail(FAIL_CHECK, "%llu damaged; the next run that wants one removes it",
                    (unsigned long long)w.n_bad);
    return DONE;
}
