/* fuzz_text.c - the tokenizer's three doors, for libFuzzer or a replay of its corpus.
 *
 * The first byte says what the rest is: '0' tiktoken.model, '1' tokenizer_config.json for a
 * vocabulary of the 256 bytes, anything else a text for the demo tokenizer. Run from the top
 * of the source tree. Includes k3_text.c; link neither it nor k3.c. The corpus lies in
 * tests/corpus/text.
 */
#include "../k3_text.c"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* In both modes the ids must spell the text, at most one id for each byte. */
static void check_text(k3_tokenizer *t, const char *s, size_t n) {
    k3_error err;
    uint32_t *ids = malloc((n + 1) * sizeof *ids);
    must(ids != NULL, "no memory");
    for (int mode = K3_TEXT; mode <= K3_CONTROL; mode++) {
        size_t at = 0, k = 0;
        int64_t n_ids = k3_encode(t, s, n, (k3_text_mode)mode, ids, n, &err);
        must(n_ids >= 0 && (size_t)n_ids <= n, "count");
        for (int64_t i = 0; i < n_ids; i++, at += k) {
            const char *bytes = k3_id_bytes(t, ids[i], &k);
            must(bytes && k > 0 && k <= n - at && memcmp(bytes, s + at, k) == 0, "round trip");
            must(mode == K3_CONTROL || !k3_id_is_special(t, ids[i]), "a special in text mode");
        }
        must(at == n, "round trip is short");
    }
    free(ids);
}

/* Decoding byte by byte must give what decoding at once gives, and valid UTF-8. */
static void check_decode(const char *s, size_t n) {
    k3_utf8 u = {{0}, 0}, v = {{0}, 0};
    char *whole = malloc(3 * (n + 3)), *cut = malloc(3 * (n + 3)), small[16];
    size_t n_whole = 0, n_cut = 0;
    must(whole && cut, "no memory");
    if (n > 0)
        n_whole = k3_utf8_push(&u, s, n, whole);
    n_whole += k3_utf8_push(&u, NULL, 0, whole + n_whole);
    for (size_t i = 0; i <= n; i++) {
        size_t k = k3_utf8_push(&v, i < n ? s + i : NULL, i < n, small);
        memcpy(cut + n_cut, small, k);
        n_cut += k;
    }
    must(n_whole == n_cut && memcmp(whole, cut, n_cut) == 0, "decode depends on the cut");
    must(utf8_stretch((const uint8_t *)whole, n_whole) == n_whole, "decode is not UTF-8");
    free(whole);
    free(cut);
}

/* A tokenizer that opened must work; a refusal must say why. */
static void check_opened(k3_tokenizer *t, int rc, const k3_error *err) {
    must((rc == K3_OK) == (t != NULL), "status and pointer disagree");
    must(rc == K3_OK || err->text[0] != '\0', "a refusal without a reason");
    if (t)
        check_text(t, "a <|open|>b\xc3\xa9\xff", 13);
    k3_tokenizer_close(t);
}

/* Write a tiktoken.model of the 256 single bytes: "AA== 0", "AQ== 1" and so on. */
static size_t byte_ranks(char text[256 * 16]) {
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0;
    for (unsigned b = 0; b < 256; b++)
        n += (size_t)snprintf(text + n, 16, "%c%c== %u\n", digit[b >> 2], digit[(b & 3) << 4], b);
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static k3_tokenizer *demo;
    k3_tokenizer *t = NULL;
    k3_error err = {""};
    if (size == 0)
        return 0;
    const char *s = (const char *)data + 1;
    size_t n = size - 1;
    if (data[0] == '0') {
        int rc = tokenizer_build(&t, s, n, NULL, 0, &err);
        check_opened(t, rc, &err);
    } else if (data[0] == '1') {
        char ranks[256 * 16];
        int rc = tokenizer_build(&t, ranks, byte_ranks(ranks), s, n, &err);
        check_opened(t, rc, &err);
    } else {
        if (!demo)
            must(k3_tokenizer_open(&demo, "demo", &err) == K3_OK, err.text);
        check_text(demo, s, n);
        check_decode(s, n);
    }
    return 0;
}
