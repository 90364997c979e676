/* k3_common.h - what engine and programs need and no library has: rules for constants, a clock, numbers
 * as people write them. */
#ifndef K3_COMMON_H
#define K3_COMMON_H

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* A coupling between constants, stated where the compiler checks it: `rule` names what must hold and is what
 * the compiler's error shows. Inside and outside of functions; no code, no memory. */
#define STATIC_ASSERT(rule, condition)                                                             \
    extern char rule[(condition) ? 1 : -1] __attribute__((unused))

/* The compiler compares a format with its arguments; `first` is the first argument's place. */
#if defined(__GNUC__)
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#else
#define PRINTF_LIKE(text, first)
#endif

/* CLOCK_MONOTONIC, nanoseconds. */
static inline uint64_t clock_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* One whose timed waits end by CLOCK_MONOTONIC: whoever sets the date does not hold them up. */
static inline void clock_cond_init(pthread_cond_t *c) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

/* Decimal digits only, no sign, no blank, no overflow. */
static inline bool parse_u64(const char *text, size_t n, uint64_t *out) {
    uint64_t value = 0;
    if (n == 0) return false;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (value > (UINT64_MAX - digit) / 10) return false;
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

/* A plain decimal number such as 0.7 or 1e-5: no sign, blank, hex, nan or inf. */
static inline bool parse_real(const char *text, char **end, double *out) {
    if (!isdigit((unsigned char)text[0]) && text[0] != '.') return false;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) return false;
    *out = strtod(text, end);
    return *end != text && isfinite(*out);
}

/* What is opened must never become 0, 1 or 2 for want of them: messages would go into it. */
static inline void stdio_guard(void) {
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == 2 ? O_WRONLY : O_RDONLY) < 0)
            abort();
}

/* 512M, 1.5GiB, 2GB, 1000000: K M G T and KiB.. are powers of 1024, KB.. of 1000. */
static inline bool parse_size(const char *text, uint64_t *out) {
    static const char letters[] = "KMGT";
    char *end;
    double value, base = 1024.0;
    if (parse_u64(text, strlen(text), out)) return true;
    if (!parse_real(text, &end, &value)) return false;
    const char *letter = *end ? strchr(letters, toupper((unsigned char)*end)) : NULL;
    if (letter) {
        end++;
        if (strcasecmp(end, "B") == 0) base = 1000.0;
        if (base == 1024.0 && *end && strcasecmp(end, "iB") != 0) return false;
        for (const char *p = letters; p <= letter; p++) value *= base;
    } else if (*end && strcasecmp(end, "B") != 0) {
        return false;
    }
    if (value >= 0x1p63) return false;
    *out = (uint64_t)value;
    return true;
}

#endif
