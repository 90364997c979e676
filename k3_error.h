/* k3_error.h - how the engine's files fill a k3_error. Internal: a static inline copy for each. */
#ifndef K3_ERROR_H
#define K3_ERROR_H

#include "k3.h"
#include "k3_line.h"

#include <stdarg.h>
#include <stdio.h>

/* Fill `err` (which may be NULL) and return `status`. Names quoted from a file stay on one line. */
static inline int fail(k3_error *err, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static inline int fail(k3_error *err, int status, const char *fmt, ...) {
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
        one_line(err->text);
    }
    return status;
}

/* Put `what: ` before the cause a callee gave; `status` again. */
static inline int fail_in(k3_error *err, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static inline int fail_in(k3_error *err, int status, const char *fmt, ...) {
    char what[160];
    va_list ap;
    if (!err) return status;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    k3_error cause = *err;
    snprintf(err->text, sizeof err->text, "%s: %.*s", what,
             (int)(sizeof err->text - sizeof what - 3), cause.text);
    return status;
}

#endif
