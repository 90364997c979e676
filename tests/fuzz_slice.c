/* fuzz_slice.c - manifests of slices from strangers, for libFuzzer or a replay of
 * tests/corpus/slice.
 *
 * Each input is read as a whole manifest and as an unfinished one. A manifest that is taken must,
 * written again, be the same bytes.
 */
#include "../slice.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Write the lines of a manifest that was taken again, and compare them with its bytes. */
static void check(const slice *s, const char *text, size_t n_good) {
    char line[8 * SLICE_LINE];
    size_t at = slice_head_write(s, line);
    bool is_same = at <= n_good && memcmp(line, text, at) == 0;
    for (uint32_t i = 0; is_same && i < s->n_done; i++) {
        size_t n = slice_expert_write(&s->list[i], line);
        is_same = at + n <= n_good && memcmp(line, text + at, n) == 0;
        at += n;
    }
    if (is_same && at == n_good) return;
    fprintf(stderr, "fuzz_slice: taken for something else\n");
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    for (int is_part = 0; is_part < 2; is_part++) {
        slice s;
        size_t n_good = 0;
        const char *text = (const char *)data;
        if (!slice_parse(text, size, is_part, &s, &n_good)) check(&s, text, n_good);
        free(s.list);
    }
    return 0;
}
