/* test.h - counting checks for the test programs; one program, one subject.
 *
 *     int main(void) {
 *         test_begin("text");
 *         CHECK(1 + 1 == 2);
 *         CHECK_EQ_INT(n, 3);
 *         CHECK_EQ_STR(err.text, "no such layer");
 *         if (!have_it) SKIP("no real tokenizer: set K3_TOKENIZER_DIR");
 *         return test_finish();
 *     }
 *
 * A failed check prints its place and both values, is counted, and the program goes on.
 * Something missing is a SKIP with its reason, never a pass. Arguments are evaluated once.
 */
#ifndef K3_TEST_H
#define K3_TEST_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static struct {
    const char *name;
    uint64_t n_passed, n_failed, n_skipped;
} test_state = {"test", 0, 0, 0};

/* Name the program's subject. */
static inline void test_begin(const char *name) {
    test_state.name = name;
}

/* Count one check; prints its place when it failed. Returns `ok`. */
static inline bool test_count(bool ok, const char *file, int line, const char *what) {
    if (ok)
        test_state.n_passed++;
    else {
        test_state.n_failed++;
        printf("%s:%d: FAILED %s\n", file, line, what);
    }
    return ok;
}

static inline bool test_eq_int(int64_t got, int64_t want, const char *file, int line,
                               const char *what) {
    bool ok = test_count(got == want, file, line, what);
    if (!ok)
        printf("    got %" PRId64 ", want %" PRId64 "\n", got, want);
    return ok;
}

static inline bool test_eq_str(const char *got, const char *want, const char *file, int line,
                               const char *what) {
    bool ok = test_count(got && want && strcmp(got, want) == 0, file, line, what);
    if (!ok)
        printf("    got  %s\n    want %s\n", got ? got : "(null)", want ? want : "(null)");
    return ok;
}

static inline bool test_eq_mem(const void *got, const void *want, size_t n, const char *file,
                               int line, const char *what) {
    const uint8_t *g = got, *w = want;
    bool ok = test_count(n == 0 || memcmp(g, w, n) == 0, file, line, what);
    for (size_t i = 0; !ok && i < n; i++)
        if (g[i] != w[i]) {
            printf("    byte %zu of %zu: got 0x%02x, want 0x%02x\n", i, n, g[i], w[i]);
            break;
        }
    return ok;
}

#define CHECK(cond)            test_count((cond), __FILE__, __LINE__, #cond)
#define CHECK_EQ_INT(got, want) \
    test_eq_int((int64_t)(got), (int64_t)(want), __FILE__, __LINE__, #got " == " #want)
#define CHECK_EQ_STR(got, want) \
    test_eq_str((got), (want), __FILE__, __LINE__, #got " == " #want)
#define CHECK_EQ_MEM(got, want, n) \
    test_eq_mem((got), (want), (n), __FILE__, __LINE__, #got " == " #want)

/* Say loudly that something could not be tested. */
#define SKIP(reason) \
    (test_state.n_skipped++, (void)printf("%s: SKIP %s\n", test_state.name, (reason)))

/* Print the count; the value to return from main: 0, or 1 when a check failed. */
static inline int test_finish(void) {
    printf("%s: %" PRIu64 " passed, %" PRIu64 " failed, %" PRIu64 " skipped\n", test_state.name,
           test_state.n_passed, test_state.n_failed, test_state.n_skipped);
    return test_state.n_failed > 0;
}

/* A fixed sequence of 64-bit values (splitmix64), so that every run tests the same. */
static inline uint64_t test_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#endif
