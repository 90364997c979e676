/* test_machine.c - threads and memory, read from made-up machines.
 *
 * Each case writes the files of a machine (below a directory that stands for /) and compares with numbers
 * worked out by hand from the kernel's own description of these files (admin-guide/cgroup-v2,
 * cgroup-v1/memory, scheduler/sched-bwc, ABI/stable/sysfs-devices-system-cpu). */
#include "k3_machine.h"
#include "test.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/k3-machine-XXXXXX";

static void shell(const char *fmt, ...) {
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    CHECK_EQ_INT(system(line), 0);
}

static void machine_new(void) { shell("rm -rf %s/proc %s/sys; mkdir -p %s/proc/self", root, root, root); }

/* File `name` of the machine, with all directories above. */
static void put(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + sizeof root; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        mkdir(path, 0700);
    }
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL)) return;
    fputs(text, f);
    fclose(f);
}

/* The CPUs of the machine where the process may run on CPUs `first` .. first + n - 1. */
static machine_cpus cpus(int first, int n) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = first; i < first + n; i++) CPU_SET((size_t)i, &set);
    return machine_cpus_read(root, &set, sizeof set);
}

static void siblings(int i, const char *file, const char *list) {
    char name[128];
    snprintf(name, sizeof name, "sys/devices/system/cpu/cpu%d/topology/%s", i, file);
    put(name, list);
}

static void test_cores(void) {
    machine_new();
    CHECK_EQ_INT(cpus(0, 4).n_cpus, 4); /* nothing is known of siblings: each is a core */
    CHECK_EQ_INT(cpus(0, 4).n_cores, 4);
    CHECK_EQ_INT(cpus(0, 4).n_quota, 0);
    for (int i = 0; i < 16; i++) { /* 8 cores of two, numbered as most machines do: 0,8 1,9 ... */
        char list[32];
        snprintf(list, sizeof list, "%d,%d\n", i % 8, i % 8 + 8);
        siblings(i, "thread_siblings_list", list);
    }
    CHECK_EQ_INT(cpus(0, 16).n_cores, 8);
    CHECK_EQ_INT(machine_threads(cpus(0, 16)), 8);
    CHECK_EQ_INT(cpus(4, 8).n_cpus, 8); /* 4..11: of cores 4..7 one each, of cores 0..3 the other */
    CHECK_EQ_INT(cpus(4, 8).n_cores, 8);
    CHECK_EQ_INT(cpus(8, 8).n_cores, 8); /* only second siblings: each stands for its core */
    CHECK_EQ_INT(cpus(8, 1).n_cores, 1);
    machine_new();
    for (int i = 0; i < 4; i++) siblings(i, "core_cpus_list", i < 2 ? "0-1\n" : "2-3\n");
    for (int i = 4; i < 8; i++) { /* unequal: two cores of two and four of one */
        char list[32];
        snprintf(list, sizeof list, "%d\n", i);
        siblings(i, "core_cpus_list", list);
    }
    CHECK_EQ_INT(cpus(0, 8).n_cores, 6);
    CHECK_EQ_INT(cpus(1, 7).n_cores, 6); /* CPU 0 is not allowed: 1 stands for its core */
    siblings(7, "core_cpus_list", "what\n");
    siblings(7, "thread_siblings_list", "");
    siblings(6, "core_cpus_list", "5000-2,99999999999999999999\n");
    CHECK_EQ_INT(cpus(0, 8).n_cores, 6);
}

static void test_quota(void) {
    machine_new();
    put("proc/self/cgroup", "0::/a/b/c\n");
    put("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 0);
    put("sys/fs/cgroup/a/cpu.max", "800000 100000\n"); /* the quota of a parent */
    CHECK_EQ_INT(cpus(0, 64).n_quota, 8);
    CHECK_EQ_INT(machine_threads(cpus(0, 64)), 8);
    CHECK_EQ_INT(machine_threads(cpus(0, 4)), 4); /* fewer cores than the quota pays for */
    put("sys/fs/cgroup/a/b/cpu.max", "250000 100000\n"); /* the least counts, rounded up */
    CHECK_EQ_INT(cpus(0, 64).n_quota, 3);
    put("sys/fs/cgroup/a/b/c/cpu.max", "1000 100000\n");
    CHECK_EQ_INT(machine_threads(cpus(0, 64)), 1);
    put("sys/fs/cgroup/a/b/c/cpu.max", "1000 0\n"); /* nonsense bounds nothing */
    CHECK_EQ_INT(cpus(0, 64).n_quota, 3);
    put("sys/fs/cgroup/a/b/c/cpu.max", "");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 3);
    put("sys/fs/cgroup/cpu.max", "200000 100000\n"); /* a container sees its own group as the root */
    CHECK_EQ_INT(cpus(0, 64).n_quota, 2);
    machine_new();
    put("proc/self/cgroup", "0::/u\n"); /* both versions at once: 2 is mounted below */
    put("sys/fs/cgroup/unified/u/cpu.max", "500000 100000\n");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 5);
}

static void test_quota_v1(void) {
    machine_new();
    put("proc/self/cgroup", "5:cpuset:/other\n4:cpu,cpuacct:/docker/x\n1:name=cpu:/y\n0::/\n");
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
    put("sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", "1\n"); /* a group of another hierarchy: not looked at */
    put("sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "100000\n");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 0);
    put("sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us", "150000\n");
    put("sys/fs/cgroup/cpu/docker/cpu.cfs_period_us", "50000\n");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 3);
    put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "100001\n"); /* there is no link named cpu */
    put("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n");
    CHECK_EQ_INT(cpus(0, 64).n_quota, 2);
}

static void test_say(void) {
    char text[96];
    machine_cpus_say((machine_cpus){16, 8, 12}, text, sizeof text);
    CHECK_EQ_STR(text, "16 CPUs, 8 cores, quota 12");
    machine_cpus_say((machine_cpus){1, 1, 0}, text, sizeof text);
    CHECK_EQ_STR(text, "1 CPU, 1 core");
    CHECK(machine_threads(machine_cpus_here()) >= 1);
    CHECK(machine_cpus_here().n_cpus >= machine_cpus_here().n_cores);
}

#define MIB 1048576ull
#define LEFT() machine_memory_left(root)

static void test_memory(void) {
    machine_new();
    put("proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 5 kB\nMemAvailable: 20971520 kB\n");
    CHECK_EQ_INT(LEFT().left, 20480 * MIB);
    CHECK(!LEFT().is_group);
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.high", "max\n");
    put("sys/fs/cgroup/a/b/memory.current", "1048576000\n");
    CHECK_EQ_INT(LEFT().left, 20480 * MIB);
    put("sys/fs/cgroup/a/b/memory.max", "1572864000\n"); /* 1500M, 1000M of them taken ... */
    CHECK_EQ_INT(LEFT().left, 500 * MIB);
    CHECK(LEFT().is_group);
    put("sys/fs/cgroup/a/b/memory.stat", /* ... and of these 400M and 550M cache */
        "anon 52428800\nfile 996147200\ninactive_anon 1\nactive_anon 2\ninactive_file 419430400\n"
        "active_file 576716800\nunevictable 0\n");
    CHECK_EQ_INT(LEFT().left, 1450 * MIB);
    put("sys/fs/cgroup/a/b/memory.high", "1048576000\n"); /* lower than max */
    CHECK_EQ_INT(LEFT().left, 950 * MIB);
    put("sys/fs/cgroup/a/memory.high", "314572800\n"); /* a parent's limit, whose usage is unknown */
    CHECK_EQ_INT(LEFT().left, 300 * MIB);
    put("sys/fs/cgroup/a/memory.current", "419430400\n"); /* more than its limit */
    CHECK_EQ_INT(LEFT().left, 0);
    CHECK_EQ_INT(machine_ram_default(root, 0), 0);
}

static void test_memory_v1(void) {
    machine_new();
    put("proc/meminfo", "MemAvailable: 20971520 kB\n");
    put("proc/self/cgroup", "9:memory:/box\n");
    put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    put("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "104857600\n");
    CHECK_EQ_INT(LEFT().left, 20480 * MIB);
    put("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1572864000\n");
    put("sys/fs/cgroup/memory/box/memory.stat",
        "inactive_file 7\nhierarchical_memory_limit 9223372036854771712\n"
        "total_inactive_file 20971520\ntotal_active_file 31457280\n");
    CHECK_EQ_INT(LEFT().left, 1450 * MIB);
    put("sys/fs/cgroup/memory/box/memory.stat",
        "hierarchical_memory_limit 1048576000\ntotal_inactive_file 20971520\n"
        "total_active_file 31457280\n");
    CHECK_EQ_INT(LEFT().left, 950 * MIB); /* the limit of the parent, whose files cannot be seen */
}

static void test_ram(void) {
    char text[320] = "";
    machine_new();
    put("proc/meminfo", "MemAvailable: 20971520 kB\n"); /* 20 GiB */
    CHECK_EQ_INT(machine_ram_default(root, 0), 19200 * MIB);
    CHECK_EQ_INT(machine_ram_default(root, 4096 * MIB), 15360 * MIB);
    CHECK(!machine_ram_is_above(root, 20480 * MIB, 0, text, sizeof text));
    CHECK_EQ_STR(text, "");
    CHECK(machine_ram_is_above(root, 20480 * MIB + 1, 0, text, sizeof text));
    CHECK(machine_ram_is_above(root, 999ull << 40, 0, text, sizeof text));
    CHECK(strstr(text, "--ram is 999.00 TiB, but this machine has 20.00 GiB free") == text);
    CHECK(strstr(text, "--ram 18G fits") != NULL); /* 18.75 */
    CHECK(machine_ram_is_above(root, 18432 * MIB, 4096 * MIB, text, sizeof text));
    CHECK(strstr(text, "--ram 15G fits") != NULL);
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "1572864000\n");
    CHECK(machine_ram_is_above(root, 4096 * MIB, 0, text, sizeof text));
    CHECK(strstr(text, "--ram is 4.00 GiB, but its control group has 1.46 GiB free") == text);
    CHECK(strstr(text, "--ram 1406M fits") != NULL);
    put("sys/fs/cgroup/memory.max", "4096\n");
    CHECK(machine_ram_is_above(root, 4096 * MIB, 0, text, sizeof text));
    CHECK(strstr(text, "fits") == NULL);
}

int main(void) {
    test_begin("machine");
    if (!CHECK(mkdtemp(root) != NULL)) return test_finish();
    test_cores();
    test_quota();
    test_quota_v1();
    test_say();
    test_memory();
    test_memory_v1();
    test_ram();
    shell("rm -rf %s", root);
    return test_finish();
}
