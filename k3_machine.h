/* k3_machine.h - how many threads and how much memory this machine lets one process have, for both programs.
 *
 * Three things bound the threads: the CPUs that the process may run on (sched_getaffinity), the physical
 * cores behind them, and the CPU quota of its control groups. Two things bound the memory: what the system
 * says is available, and what the control groups leave. A control group is bounded by its parents too, so
 * every limit is read from the process's own group up to the root, and the least counts.
 *
 * Everything is read from files below /proc and /sys. `root` is put before their names: "" is this machine,
 * a test names a directory with files of its own. What cannot be read bounds nothing.
 */
#ifndef K3_MACHINE_H
#define K3_MACHINE_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int n_cpus;  /* that the process may run on, at least 1                              */
    int n_cores; /* physical cores behind them, at least 1; of unequal cores all count   */
    int n_quota; /* CPUs that the control groups pay for, rounded up; 0: no quota        */
} machine_cpus;

/* `set` holds the allowed CPUs; it is of `set_bytes` bytes, as sched_getaffinity fills it. */
machine_cpus machine_cpus_read(const char *root, const cpu_set_t *set, size_t set_bytes);
machine_cpus machine_cpus_here(void);

/* Threads that compute: one for each core, but not more than the quota pays for. At least 1. */
int machine_threads(machine_cpus c);

/* Write the figures behind that number, such as "16 CPUs, 8 cores, quota 12", to text[cap]. */
void machine_cpus_say(machine_cpus c, char *text, size_t cap);

typedef struct {
    uint64_t left; /* bytes that this process may still take, cache that can be given up included */
    bool is_group; /* a control group leaves less than the system has                             */
} machine_memory;

machine_memory machine_memory_left(const char *root);

/* A budget in bytes: what is left, less `others` (bytes that others are about to take), less a margin of
 * 1/16 for the rest of the system. */
uint64_t machine_ram_default(const char *root, uint64_t others);

/* Is a budget of `ram` bytes more than what is left, less `others`? If it is, text[cap] says so in one
 * line: both figures, and a --ram that fits where there is one. */
bool machine_ram_is_above(const char *root, uint64_t ram, uint64_t others, char *text, size_t cap);

/* The first number after `key`, at the beginning of a line of a small text file; `otherwise` without
 * one. */
uint64_t machine_number(const char *path, const char *key, uint64_t otherwise);

#endif
