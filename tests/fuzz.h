/* fuzz.h - what the fuzz targets share: a promise that must hold, or the program aborts. */
#ifndef K3_FUZZ_H
#define K3_FUZZ_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static inline void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

/* A message must be one line of printable characters, and not empty. */
static inline void must_be_line(const char *s) {
    must(*s != 0, "a refusal without a reason");
    for (; *s; s++) must((unsigned char)*s >= 32 && *s != 127, "a refusal of more than one line");
}

#endif
