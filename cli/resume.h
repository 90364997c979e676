/* resume.h - where `k3 verify` keeps how far it came. */
#ifndef K3_CLI_RESUME_H
#define K3_CLI_RESUME_H

#include "cli/args.h"

/* Beside the sums, where that directory can be written to: k3.verify in the model directory, FILE.verify with
 * --sums FILE. Else XDG_CACHE_HOME/k3 (~/.cache/k3), made if absent, under a name made of that place.
 * False: nowhere, and `path` says why. */
bool resume_place(const cli_args *a, const char *dir, char *path, size_t cap);

#endif
