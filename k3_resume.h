/* k3_resume.h - how far a verify came, in a small file, so that the next one goes on there.
 *
 * A model has 1.4 TiB, and reading it takes hours. The file says which check it was of (a key), how many
 * stretches of which copy are done, which files they were read from, and the sums made so far. It is
 * written beside its name and renamed, and ends with a checksum: who reads it finds a whole one or none.
 * It is believed only when nobody but this user can have written it.
 */
#ifndef K3_RESUME_H
#define K3_RESUME_H

#include "k3.h"

typedef struct {
    uint64_t key;                 /* of the check: layout of the model, what is compared or made */
    uint64_t i_copy, n_stretches; /* done: all copies before i_copy, n_stretches of that one      */
    bool is_zero;                 /* the tensor at that place was nothing but zeros so far       */
    uint64_t *files, n_files;     /* [n_files] one number for each file: another when it changed */
    uint64_t *values, n_values;   /* [n_values] sums made so far; no values: n_values 0          */
} k3_resume;

/* Read `path` for the check with r->key, r->n_files and r->n_values; fills the rest, `files` and `values`
 * included, which are the caller's.
 * Returns 1: read; 0: there is none that could be used, and `why` (n_why bytes) says why, or "" without a file:
 *         then `files` and `values` hold anything */
int k3_resume_read(const char *path, k3_resume *r, char *why, size_t n_why);

/* Write it, whole or not at all. A process that is writing the same file wins; then nothing is written.
 * Errors  K3_EIO; what was at `path` is then still there */
int k3_resume_write(const char *path, const k3_resume *r, k3_error *err);

/* Remove the file at `path`: the check is complete. */
void k3_resume_remove(const char *path);

#endif
