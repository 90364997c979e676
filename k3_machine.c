/* k3_machine.c - reads CPUs, quotas and memory limits of this machine (k3_machine.h). */
#include "k3_machine.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 9000 /* a root, a mount, a group of up to 4,096 characters, a file name */

uint64_t machine_number(const char *path, const char *key, uint64_t otherwise) {
    FILE *f = fopen(path, "re");
    if (!f) return otherwise;
    char line[256];
    unsigned long long v = 0;
    bool is_found = false;
    while (!is_found && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            is_found = sscanf(line + strlen(key), "%llu", &v) == 1;
    fclose(f);
    return is_found ? v : otherwise;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- Control groups ---- */

/* Called for a group and each of its parents; `dir` is the group's directory. */
typedef void (*group_fn)(void *user, const char *dir, bool is_v2);

/* The first number in file `name` of a group's directory; `otherwise` where there is none. */
static uint64_t group_number(const char *dir, const char *name, uint64_t otherwise) {
    char path[PATH_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return machine_number(path, "", otherwise);
}

/* Call fn for `group` below `mount` and for each of its parents up to the root. The text `group` is
 * shortened on the way. */
static void groups_climb(const char *root, const char *mount, char *group, bool is_v2, group_fn fn,
                         void *user) {
    char dir[PATH_BYTES];
    for (;;) {
        snprintf(dir, sizeof dir, "%s/sys/fs/cgroup%s%s", root, mount, group);
        fn(user, dir, is_v2);
        char *up = strrchr(group, '/');
        if (!up) return;
        *up = 0; /* the root is the empty path */
    }
}

/* Is `name` one of the names in `list`, which commas separate? */
static bool list_has(const char *list, const char *name) {
    for (size_t n; *list; list += n + (list[n] == ',')) {
        n = strcspn(list, ",");
        if (n == strlen(name) && memcmp(list, name, n) == 0) return true;
    }
    return false;
}

/* Call fn for every group of this process that can have limits of `controller`, of version 2 and 1. */
static void groups_visit(const char *root, const char *controller, group_fn fn, void *user) {
    char path[PATH_BYTES], line[4096 + 256], group[sizeof line], mount[sizeof line];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) { /* number:controllers:group */
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':'), *at = list ? strchr(list + 1, ':') : NULL;
        if (!at) continue;
        *at++ = 0;
        list++;
        if (list[0] && !list_has(list, controller)) continue;
        bool is_v2 = list[0] == 0;
        snprintf(mount, sizeof mount, "/%s", is_v2 ? "unified" : controller);
        snprintf(group, sizeof group, "%s", at);
        groups_climb(root, is_v2 ? "" : mount, group, is_v2, fn, user);
        if (!is_v2) snprintf(mount, sizeof mount, "/%s", list); /* "cpu,cpuacct" has no link everywhere */
        if (!is_v2 && strcmp(mount + 1, controller) == 0) continue;
        snprintf(group, sizeof group, "%s", at);
        groups_climb(root, mount, group, is_v2, fn, user);
    }
    if (f) fclose(f);
}

/* ---- CPUs ---- */

/* *user: the least quota seen so far, in CPUs. */
static void quota_visit(void *user, const char *dir, bool is_v2) {
    uint64_t *n_cpus = user, quota = UINT64_MAX, period = 0;
    if (is_v2) { /* "max 100000" or "150000 100000" */
        char path[PATH_BYTES + 64];
        unsigned long long q, p;
        snprintf(path, sizeof path, "%s/cpu.max", dir);
        FILE *f = fopen(path, "re");
        if (f && fscanf(f, "%llu %llu", &q, &p) == 2) quota = q, period = p;
        if (f) fclose(f);
    } else { /* -1, which reads as the largest number, is no quota */
        quota = group_number(dir, "cpu.cfs_quota_us", UINT64_MAX);
        period = group_number(dir, "cpu.cfs_period_us", 0);
    }
    if (period == 0 || quota > UINT64_MAX / 2) return;
    uint64_t n = quota / period + (quota % period != 0);
    *n_cpus = least(*n_cpus, n > 0 ? n : 1);
}

/* The lowest CPU of a list such as "0,64" or "0-1,8-9" that is allowed, or -1. */
static long list_lowest(const char *text, const cpu_set_t *set, size_t set_bytes) {
    const long end_of_set = (long)set_bytes * CHAR_BIT;
    long lowest = -1;
    for (char *end; *text >= '0' && *text <= '9'; text = end + (*end == ',')) {
        long first = strtol(text, &end, 10), last = first;
        if (*end == '-') last = strtol(end + 1, &end, 10);
        for (long i = first; i <= last && i < end_of_set; i++)
            if (CPU_ISSET_S((size_t)i, set_bytes, set) && (lowest < 0 || i < lowest)) lowest = i;
    }
    return lowest;
}

/* Is CPU `i` the one that stands for its core? One whose siblings are unknown stands for itself. */
static bool is_first_of_core(const char *root, long i, const cpu_set_t *set, size_t set_bytes) {
    static const char *const names[] = {"core_cpus_list", "thread_siblings_list"};
    char path[PATH_BYTES], text[4096];
    for (int k = 0; k < 2; k++) {
        snprintf(path, sizeof path, "%s/sys/devices/system/cpu/cpu%ld/topology/%s", root, i,
                 names[k]);
        FILE *f = fopen(path, "re");
        bool is_read = f && fgets(text, sizeof text, f);
        if (f) fclose(f);
        long lowest = is_read ? list_lowest(text, set, set_bytes) : -1;
        if (lowest >= 0) return lowest == i;
    }
    return true;
}

machine_cpus machine_cpus_read(const char *root, const cpu_set_t *set, size_t set_bytes) {
    machine_cpus c = {0};
    uint64_t quota = UINT64_MAX;
    for (long i = 0; i < (long)set_bytes * CHAR_BIT; i++) {
        if (!CPU_ISSET_S((size_t)i, set_bytes, set)) continue;
        c.n_cpus++;
        c.n_cores += is_first_of_core(root, i, set, set_bytes);
    }
    groups_visit(root, "cpu", quota_visit, &quota);
    if (quota <= INT_MAX) c.n_quota = (int)quota;
    if (c.n_cpus < 1) c.n_cpus = 1;
    if (c.n_cores < 1) c.n_cores = 1;
    return c;
}

/* The kernel refuses a set that is smaller than its own, so larger ones are tried. */
machine_cpus machine_cpus_here(void) {
    machine_cpus c = {1, 1, 0};
    bool is_known = false;
    for (size_t n = CPU_SETSIZE; !is_known && n <= CPU_SETSIZE * 64; n *= 8) {
        cpu_set_t *set = CPU_ALLOC(n);
        if (!set) break;
        CPU_ZERO_S(CPU_ALLOC_SIZE(n), set);
        is_known = sched_getaffinity(0, CPU_ALLOC_SIZE(n), set) == 0;
        if (is_known) c = machine_cpus_read("", set, CPU_ALLOC_SIZE(n));
        CPU_FREE(set);
    }
    return c;
}

int machine_threads(machine_cpus c) {
    return c.n_quota && c.n_quota < c.n_cores ? c.n_quota : c.n_cores;
}

void machine_cpus_say(machine_cpus c, char *text, size_t cap) {
    char quota[32] = "";
    if (c.n_quota) snprintf(quota, sizeof quota, ", quota %d", c.n_quota);
    snprintf(text, cap, "%d CPU%s, %d core%s%s", c.n_cpus, c.n_cpus == 1 ? "" : "s", c.n_cores,
             c.n_cores == 1 ? "" : "s", quota);
}

/* ---- Memory ---- */

/* *user: the least that a group seen so far leaves, in bytes. Processes of a group are slowed down at
 * memory.high and ended at memory.max, so the lower one bounds. The system gives up file pages before
 * either, used lately or not, so they do not count as taken. */
static void memory_visit(void *user, const char *dir, bool is_v2) {
    uint64_t *left = user, cap, taken, cache;
    char stat[PATH_BYTES + 64];
    snprintf(stat, sizeof stat, "%s/memory.stat", dir);
    if (is_v2) {
        cap = least(group_number(dir, "memory.max", UINT64_MAX),
                    group_number(dir, "memory.high", UINT64_MAX));
        taken = group_number(dir, "memory.current", 0);
        cache = machine_number(stat, "active_file ", 0) + machine_number(stat, "inactive_file ", 0);
    } else { /* hierarchical_memory_limit is the parents', whom a container may not see */
        cap = least(group_number(dir, "memory.limit_in_bytes", UINT64_MAX),
                    machine_number(stat, "hierarchical_memory_limit ", UINT64_MAX));
        taken = group_number(dir, "memory.usage_in_bytes", 0);
        cache = machine_number(stat, "total_active_file ", 0) +
                machine_number(stat, "total_inactive_file ", 0);
    }
    if (cap == UINT64_MAX) return;
    taken = taken > cache ? taken - cache : 0;
    *left = least(*left, cap > taken ? cap - taken : 0);
}

machine_memory machine_memory_left(const char *root) {
    char path[PATH_BYTES];
    uint64_t group = UINT64_MAX, free_kib;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    free_kib = machine_number(path, "MemAvailable:", UINT64_MAX);
    if (free_kib == UINT64_MAX)
        free_kib = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
    groups_visit(root, "memory", memory_visit, &group);
    bool is_group = group < free_kib * 1024;
    return (machine_memory){is_group ? group : free_kib * 1024, is_group};
}

static uint64_t less_others(machine_memory m, uint64_t others) {
    return m.left - least(others, m.left);
}

uint64_t machine_ram_default(const char *root, uint64_t others) {
    uint64_t bytes = less_others(machine_memory_left(root), others);
    return bytes - bytes / 16;
}

static const char *bytes_say(uint64_t n, char text[32]) {
    if (n >= 1ull << 40)
        snprintf(text, 32, "%.2f TiB", (double)n / 0x1p40);
    else if (n >= 1ull << 30)
        snprintf(text, 32, "%.2f GiB", (double)n / 0x1p30);
    else
        snprintf(text, 32, "%.2f MiB", (double)n / 0x1p20);
    return text;
}

bool machine_ram_is_above(const char *root, uint64_t ram, uint64_t others, char *text, size_t cap) {
    machine_memory m = machine_memory_left(root);
    uint64_t left = less_others(m, others), fit = left - left / 16;
    char asked[32], has[32], advice[96] = "";
    if (ram <= left) return false;
    if (fit >= 8ull << 30)
        snprintf(advice, sizeof advice, "; --ram %lluG fits", (unsigned long long)(fit >> 30));
    else if (fit >= 1u << 20)
        snprintf(advice, sizeof advice, "; --ram %lluM fits", (unsigned long long)(fit >> 20));
    snprintf(text, cap,
             "--ram is %s, but %s %s free%s: once more is in use, the kernel swaps, slows this "
             "program down or ends it%s",
             bytes_say(ram, asked), m.is_group ? "its control group has" : "this machine has",
             bytes_say(left, has), others ? " beside what --gpu takes" : "", advice);
    return true;
}
