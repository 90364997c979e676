/* test_text.c - the tokenizer against someone else's answers.
 *
 * Golden: pieces and ids made with the official tokenizer (tests/data/tokenizer_pins.json,
 * special_tokens.json), and prompts of the demo model; test_unicode.c has many more texts. A
 * reference written here, slow and plain: merging by repeated search. Ids of the pins need
 * the real tiktoken.model: name its directory in K3_TOKENIZER_DIR or as the
 * first argument. Run from the top of the source tree. Includes k3_text.c, to reach its
 * statics and to make its allocations fail; link neither it nor k3.c.
 */
#include "test.h"

#include <json-c/json.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static long alloc_left = -1; /* allocations until one fails; -1: never */

static bool alloc_fails(void) {
    return alloc_left >= 0 && alloc_left-- == 0;
}

#define malloc(n)     (alloc_fails() ? NULL : malloc(n))
#define calloc(k, n)  (alloc_fails() ? NULL : calloc(k, n))
#define realloc(p, n) (alloc_fails() ? NULL : realloc(p, n))
#include "../k3_text.c"
#undef malloc
#undef calloc
#undef realloc

static k3_error err;

/* ---- Helpers --------------------------------------------------------------------- */

typedef struct {
    char *s;
    size_t n, cap;
} text_buf;

static void buf_add(text_buf *b, const void *s, size_t n) {
    if (b->n + n + 1 > b->cap) {
        b->cap = 2 * (b->n + n + 1);
        b->s = realloc(b->s, b->cap);
        if (!b->s)
            abort();
    }
    memcpy(b->s + b->n, s, n);
    b->n += n;
    b->s[b->n] = '\0';
}

static void buf_str(text_buf *b, const char *s) {
    buf_add(b, s, strlen(s));
}

/* One line of tiktoken.model. */
static void buf_rank(text_buf *b, const uint8_t *s, size_t n, uint32_t rank, const char *eol) {
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char tail[32];
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = (uint32_t)s[i] << 16 | (i + 1 < n ? (uint32_t)s[i + 1] << 8 : 0) |
                        (i + 2 < n ? s[i + 2] : 0);
        char quad[4] = {digit[bits >> 18], digit[bits >> 12 & 63], digit[bits >> 6 & 63],
                        digit[bits & 63]};
        if (i + 2 >= n)
            quad[3] = '=';
        if (i + 1 >= n)
            quad[2] = '=';
        buf_add(b, quad, 4);
    }
    snprintf(tail, sizeof tail, " %u%s", rank, eol);
    buf_str(b, tail);
}

/* Ranks 0..255 for the bytes in order. */
static text_buf byte_ranks(void) {
    text_buf b = {0};
    for (uint32_t i = 0; i < 256; i++)
        buf_rank(&b, (uint8_t[]){(uint8_t)i}, 1, i, "\n");
    return b;
}

static text_buf repeat(const char *unit, size_t n_unit, size_t n_bytes) {
    text_buf b = {0};
    while (b.n < n_bytes)
        buf_add(&b, unit, n_unit);
    return b;
}

/* Encode all of s[n] and check that the ids spell it again. Returns the ids, which the caller
 * frees. */
static uint32_t *encode_all(k3_tokenizer *t, const char *s, size_t n, k3_text_mode mode,
                            int64_t *n_ids) {
    uint32_t *ids = malloc((n + 1) * sizeof *ids);
    size_t at = 0;
    *n_ids = k3_encode(t, s, n, mode, ids, n, &err);
    bool ok = *n_ids >= 0 && (size_t)*n_ids <= n;
    for (int64_t i = 0; ok && i < *n_ids; i++) {
        size_t k;
        const char *bytes = k3_id_bytes(t, ids[i], &k);
        ok = bytes && k <= n - at && memcmp(bytes, s + at, k) == 0 &&
             (mode == K3_CONTROL || !k3_id_is_special(t, ids[i]));
        at += k;
    }
    CHECK(ok && at == n);
    return ids;
}

static bool ids_equal(const uint32_t *ids, int64_t n, json_object *want) {
    if (n < 0 || (size_t)n != json_object_array_length(want))
        return false;
    for (size_t i = 0; i < (size_t)n; i++)
        if (ids[i] != (uint32_t)json_object_get_int64(json_object_array_get_idx(want, i)))
            return false;
    return true;
}

static const char *str_of(json_object *o, const char *key, size_t *n) {
    json_object *v = key ? json_object_object_get(o, key) : o;
    *n = (size_t)json_object_get_string_len(v);
    return json_object_get_string(v);
}

static void check_ids(k3_tokenizer *t, const char *s, size_t n, k3_text_mode mode,
                      json_object *want) {
    int64_t n_ids;
    uint32_t *ids = encode_all(t, s, n, mode, &n_ids);
    if (!CHECK(ids_equal(ids, n_ids, want)))
        printf("    text: %.*s\n", (int)n, s);
    free(ids);
}

static k3_tokenizer *build(const char *ranks, size_t n, const char *config) {
    k3_tokenizer *t = NULL;
    int rc = tokenizer_build(&t, ranks, n, config, config ? strlen(config) : 0, &err);
    if (!CHECK_EQ_INT(rc, K3_OK))
        printf("    %s\n", err.text);
    return t;
}

/* ---- Golden ------------------------------------------------------------------------ */

static void test_pins(const char *real_dir) {
    json_object *root = json_object_from_file("tests/data/tokenizer_pins.json");
    if (!CHECK(root != NULL))
        return;
    json_object *pins = json_object_object_get(root, "pretokenize");
    json_object *lines = json_object_object_get(root, "lines");
    k3_tokenizer *real = NULL;
    if (real_dir && !CHECK_EQ_INT(k3_tokenizer_open(&real, real_dir, &err), K3_OK))
        printf("    %s\n", err.text);
    CHECK(json_object_array_length(pins) > 0 && json_object_array_length(lines) > 0);
    for (size_t i = 0; i < json_object_array_length(pins); i++) {
        json_object *pin = json_object_array_get_idx(pins, i);
        json_object *pieces = json_object_object_get(pin, "pieces");
        size_t n, at = 0, k = 0, n_piece;
        const char *s = str_of(pin, "text", &n);
        for (size_t end; at < n; at = end, k++) {
            end = pretok_next((const uint8_t *)s, n, at);
            const char *piece = str_of(json_object_array_get_idx(pieces, k), NULL, &n_piece);
            if (!CHECK(piece && n_piece == end - at && memcmp(piece, s + at, n_piece) == 0))
                break;
        }
        CHECK_EQ_INT(k, json_object_array_length(pieces));
        if (real)
            check_ids(real, s, n, K3_TEXT, json_object_object_get(pin, "ids"));
    }
    for (size_t i = 0; real && i < json_object_array_length(lines); i++) {
        json_object *line = json_object_array_get_idx(lines, i);
        size_t n;
        const char *s = str_of(json_object_array_get_idx(line, 0), NULL, &n);
        check_ids(real, s, n, K3_TEXT, json_object_array_get_idx(line, 1));
    }
    if (real)
        CHECK_EQ_INT(k3_tokenizer_size(real), 163840);
    if (!real_dir)
        SKIP("ids of the official pins: name a directory with the real tiktoken.model "
             "in K3_TOKENIZER_DIR");
    k3_tokenizer_close(real);
    json_object_put(root);
}

/* The official 256 names, built in, on a vocabulary of the official size. */
static void test_special_names(void) {
    json_object *root = json_object_from_file("tests/data/special_tokens.json");
    text_buf ranks = byte_ranks();
    for (uint32_t i = 256; i < 163584; i++)
        buf_rank(&ranks, (uint8_t[]){(uint8_t)(i >> 16), (uint8_t)(i >> 8), (uint8_t)i}, 3, i,
                 "\n");
    k3_tokenizer *t = build(ranks.s, ranks.n, NULL);
    if (CHECK(root && t)) {
        json_object *names = json_object_object_get(root, "names");
        CHECK_EQ_INT(k3_tokenizer_size(t), 163840);
        for (uint32_t id = 163584; id < 163840; id++) {
            char key[16];
            size_t n, n_want;
            snprintf(key, sizeof key, "%u", id);
            const char *want = str_of(names, key, &n_want), *got = k3_id_bytes(t, id, &n);
            CHECK(n == n_want && memcmp(got, want, n) == 0 && k3_id_is_special(t, id));
            uint32_t back = 0;
            CHECK_EQ_INT(k3_encode(t, want, n_want, K3_CONTROL, &back, 1, &err), 1);
            CHECK_EQ_INT(back, id);
            CHECK(k3_encode(t, want, n_want, K3_TEXT, NULL, 0, &err) > 1);
        }
        CHECK(!k3_id_is_special(t, 163583) && !k3_id_is_special(t, 163840));
        CHECK(k3_id_bytes(t, 163840, NULL) == NULL && k3_id_bytes(t, UINT32_MAX, NULL) == NULL);
    }
    k3_tokenizer_close(t);
    json_object_put(root);
    free(ranks.s);
}

static void test_demo(k3_tokenizer *t) {
    json_object *root = json_object_from_file("demo/golden.json");
    if (!CHECK(root != NULL))
        return;
    json_object *cases = json_object_object_get(root, "cases");
    CHECK_EQ_INT(k3_tokenizer_size(t), 2048);
    CHECK(json_object_array_length(cases) > 0);
    for (size_t i = 0; i < json_object_array_length(cases); i++) {
        json_object *c = json_object_array_get_idx(cases, i);
        json_object *greedy = json_object_object_get(c, "greedy_ids");
        size_t n;
        const char *kind = str_of(c, "kind", &n), *s = str_of(c, "prompt", &n);
        check_ids(t, s, n, strcmp(kind, "chat") == 0 ? K3_CONTROL : K3_TEXT,
                  json_object_object_get(c, "prompt_ids"));
        text_buf said = {0};
        k3_utf8 u = {{0}, 0};
        char out[3 * (SPECIAL_MAX_BYTES + 3)];
        for (size_t k = 0; k < json_object_array_length(greedy); k++) {
            size_t n_bytes;
            uint32_t id = (uint32_t)json_object_get_int(json_object_array_get_idx(greedy, k));
            const char *bytes = k3_id_bytes(t, id, &n_bytes);
            buf_add(&said, out, k3_utf8_push(&u, bytes, n_bytes, out));
        }
        buf_add(&said, out, k3_utf8_push(&u, NULL, 0, out));
        CHECK_EQ_STR(said.s, str_of(c, "greedy_text", &n));
        free(said.s);
    }
    json_object_put(root);
}

/* ---- Merging against repeated search ---------------------------------------------------- */

#define TINY_MAX 400u

typedef struct {
    uint8_t bytes[TINY_MAX][8];
    size_t n[TINY_MAX];
    uint32_t n_ranks;
} tiny_vocab;

static uint32_t tiny_find(const tiny_vocab *v, const uint8_t *s, size_t n) {
    for (uint32_t id = 0; id < v->n_ranks; id++)
        if (v->n[id] == n && memcmp(v->bytes[id], s, n) == 0)
            return id;
    return NO_ID;
}

/* All single bytes and some words of a, b, c, in random order. */
static void tiny_make(tiny_vocab *v, uint64_t *r) {
    v->n_ranks = 0;
    for (uint32_t b = 0; b < 256; b++) {
        v->bytes[v->n_ranks][0] = (uint8_t)b;
        v->n[v->n_ranks++] = 1;
    }
    uint32_t n_words = (uint32_t)(test_random(r) % (TINY_MAX - 256));
    while (n_words-- > 0) {
        uint8_t word[8];
        size_t n = 2 + test_random(r) % (n_words % 2 ? 2 : 7);
        for (size_t i = 0; i < n; i++)
            word[i] = (uint8_t)('a' + test_random(r) % 3);
        if (tiny_find(v, word, n) != NO_ID)
            continue;
        memcpy(v->bytes[v->n_ranks], word, n);
        v->n[v->n_ranks++] = n;
    }
    for (uint32_t i = v->n_ranks; i-- > 1;) {
        uint32_t j = (uint32_t)(test_random(r) % (i + 1));
        uint8_t word[8];
        size_t n = v->n[i];
        memcpy(word, v->bytes[i], 8);
        memcpy(v->bytes[i], v->bytes[j], 8);
        memcpy(v->bytes[j], word, 8);
        v->n[i] = v->n[j];
        v->n[j] = n;
    }
}

static size_t tiny_encode(const tiny_vocab *v, const uint8_t *s, size_t n, uint32_t *ids) {
    size_t start[65], n_ids = n;
    uint32_t whole = tiny_find(v, s, n);
    if (whole != NO_ID) {
        ids[0] = whole;
        return 1;
    }
    for (size_t i = 0; i <= n; i++)
        start[i] = i;
    for (;;) {
        uint32_t best = NO_ID;
        size_t best_at = 0;
        for (size_t i = 0; i + 1 < n_ids; i++) {
            uint32_t rank = tiny_find(v, s + start[i], start[i + 2] - start[i]);
            if (rank < best) {
                best = rank;
                best_at = i;
            }
        }
        if (best == NO_ID)
            break;
        memmove(start + best_at + 1, start + best_at + 2, (n_ids - best_at - 1) * sizeof *start);
        n_ids--;
    }
    for (size_t i = 0; i < n_ids; i++)
        ids[i] = tiny_find(v, s + start[i], start[i + 1] - start[i]);
    return n_ids;
}

static void test_merging(void) {
    static tiny_vocab v;
    uint64_t r = 2;
    for (int round = 0; round < 60; round++) {
        text_buf ranks = {0};
        tiny_make(&v, &r);
        for (uint32_t id = v.n_ranks; id-- > 0;) /* any order will do */
            buf_rank(&ranks, v.bytes[id], v.n[id], id, id % 2 ? "\r\n" : "\n");
        k3_tokenizer *t = build(ranks.s, ranks.n, NULL);
        for (int k = 0; t && k < 60; k++) {
            uint8_t s[64];
            uint32_t got[64], want[64];
            size_t n = 1 + test_random(&r) % 64;
            for (size_t i = 0; i < n; i++)
                s[i] = (uint8_t)('a' + test_random(&r) % (k % 3 + 1));
            size_t n_want = tiny_encode(&v, s, n, want);
            int64_t n_got = k3_encode(t, (const char *)s, n, K3_TEXT, got, 64, &err);
            if (CHECK_EQ_INT(n_got, n_want))
                CHECK_EQ_MEM(got, want, n_want * sizeof *want);
        }
        k3_tokenizer_close(t);
        free(ranks.s);
    }
}

/* ---- Round trips, capacity, cuts, specials ------------------------------------------------ */

static void test_round_trip(k3_tokenizer *t) {
    uint64_t r = 3;
    for (int round = 0; round < 3000; round++) {
        char s[300];
        size_t n = test_random(&r) % sizeof s;
        for (size_t i = 0; i < n; i++) {
            uint64_t x = test_random(&r);
            s[i] = (char)(x % 3 ? x >> 8 : (x >> 8) % 96 + 32);
        }
        for (size_t i = 0; round % 3 == 0 && i + 12 < n; i += 12 + test_random(&r) % 40)
            memcpy(s + i, i % 2 ? "<|open|>" : "<|close|>", i % 2 ? 8 : 9);
        for (int mode = K3_TEXT; mode <= K3_CONTROL; mode++) {
            int64_t n_ids;
            free(encode_all(t, s, n, (k3_text_mode)mode, &n_ids));
        }
    }
}

static void test_capacity(k3_tokenizer *t) {
    const char s[] = "Hello, <|open|> world";
    uint32_t all[32], some[32];
    int64_t n = k3_encode(t, s, strlen(s), K3_CONTROL, NULL, 0, &err);
    CHECK(n > 3 && n <= (int64_t)strlen(s));
    CHECK_EQ_INT(k3_encode(t, s, strlen(s), K3_CONTROL, all, 32, &err), n);
    for (size_t cap = 0; cap <= (size_t)n; cap++) {
        memset(some, 0xee, sizeof some);
        CHECK_EQ_INT(k3_encode(t, s, strlen(s), K3_CONTROL, some, cap, &err), n);
        CHECK_EQ_MEM(some, all, cap * sizeof *all);
        CHECK_EQ_INT(some[cap], 0xeeeeeeee);
    }
    CHECK_EQ_INT(k3_encode(t, NULL, 0, K3_TEXT, NULL, 0, NULL), 0);
}

/* Invalid bytes stand alone; the valid text around them is encoded as if by itself. */
static void test_invalid(k3_tokenizer *t) {
    static const char *const bad[] = {
        "\x80",
        "\xff",
        "\xc0\xaf",
        "\xc1\xbf",
        "\xe0\x80\xaf",
        "\xe0\x9f\xbf",
        "\xed\xa0\x80",
        "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80",
        "\xf5\x80",
        "\xe4\xb8",
        "\xf0\x9f\xa4",
        "\xc3",
        "\xf8\x88\x80\x80\x80",
    };
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        const char *before = "The capital", *after = " of France";
        uint32_t got[64], want[64];
        char s[64];
        size_t n_bad = strlen(bad[k]),
               n = (size_t)snprintf(s, sizeof s, "%s%s%s", before, bad[k], after);
        int64_t n_want = k3_encode(t, before, strlen(before), K3_TEXT, want, 64, &err);
        for (size_t i = 0; i < n_bad; i++)
            want[n_want++] = t->byte_id[(uint8_t)bad[k][i]];
        n_want += k3_encode(t, after, strlen(after), K3_TEXT, want + n_want, 32, &err);
        if (CHECK_EQ_INT(k3_encode(t, s, n, K3_TEXT, got, 64, &err), n_want))
            CHECK_EQ_MEM(got, want, (size_t)n_want * sizeof *want);
    }
}

/* Check the parts of s, given as lengths in characters; s has characters of one byte only. */
static void check_parts(const text_buf *b, const size_t *want, size_t n_want) {
    uint32_t slice_left = SLICE_CHARS;
    size_t at = 0, k = 0;
    for (; at < b->n; k++) {
        size_t n = part_bytes((const uint8_t *)b->s + at, b->n - at, &slice_left);
        if (!CHECK(k < n_want) || !CHECK_EQ_INT(n, want[k]))
            break;
        at += n;
    }
    CHECK_EQ_INT(k, n_want);
}

static void test_parts(k3_tokenizer *t) {
    text_buf a = repeat("a", 1, 60000), mixed = repeat("a ", 2, 800001),
             sep = repeat("\x1c\t", 2, 25002);
    check_parts(&a, (size_t[]){25000, 25000, 10000}, 3);
    check_parts(&mixed, (size_t[]){400000, 400000, 2}, 3);
    check_parts(&sep, (size_t[]){25000, 2}, 2); /* U+001C is space to Python, not to the pattern */
    a.n = 50000; /* a cut inside a slice does not move the slice's end */
    buf_add(&a, mixed.s + 1, 800000);
    check_parts(&a, (size_t[]){25000, 375000, 400000, 50000}, 4);
    memset(a.s, 'a', a.n);
    mixed.n = 390000;
    buf_add(&mixed, a.s, 60000); /* the slice ends before the run does; the count starts anew */
    check_parts(&mixed, (size_t[]){400000, 25000, 25000}, 3);
    text_buf wide = repeat("\xe3\x80\x80", 3, 3 * 25001);
    uint32_t slice_left = SLICE_CHARS;
    CHECK_EQ_INT(part_bytes((const uint8_t *)wide.s, wide.n, &slice_left), 75000);
    CHECK_EQ_INT(slice_left, 375000);
    /* A special that ends with the part is one; a special that the cut goes through is text. */
    uint32_t open = NO_ID;
    CHECK_EQ_INT(k3_encode(t, "<|open|>", 8, K3_CONTROL, &open, 1, &err), 1);
    for (size_t extra = 0; extra < 2; extra++) {
        int64_t n_ids;
        a.n = 24992 + extra;
        buf_str(&a, "<|open|>");
        uint32_t *ids = encode_all(t, a.s, a.n, K3_CONTROL, &n_ids);
        CHECK_EQ_INT(ids[n_ids - 1] == open, extra == 0);
        free(ids);
    }
    free(a.s);
    free(mixed.s);
    free(sep.s);
    free(wide.s);
}

/* Longest match at the leftmost position, and no more than that. */
static void test_special_match(void) {
    text_buf ranks = byte_ranks();
    k3_tokenizer *t = build(ranks.s, ranks.n,
                            "{\"added_tokens_decoder\":{\"256\":{\"content\":\"<a>\"},"
                            "\"257\":{\"content\":\"<a>b\"},\"258\":{\"content\":\"a>b<a\"},"
                            "\"259\":{\"content\":\"\\u00e9\"},\"260\":{\"content\":\"<\"}}}");
    static const struct {
        const char *text;
        size_t n;
        uint32_t ids[8];
    } cases[] = {
        {"<a>", 1, {256}},
        {"<a>b<a>", 2, {257, 256}},
        {"<a>c", 2, {256, 'c'}},
        {"<a", 2, {260, 'a'}},
        {"xa>b<a>b", 4, {'x', 258, '>', 'b'}},
        {"<\xc3\xa9", 2, {260, 259}},
        {"\xc3\xa9\xc3", 2, {259, 0xc3}},
        {"<|reserved_token_300|>", 1, {300}},
        {"<|reserved_token_261|", 0, {0}}, /* only counted: every byte but < is itself */
    };
    for (size_t k = 0; t && k < sizeof cases / sizeof *cases; k++) {
        uint32_t ids[32];
        size_t n = cases[k].n ? cases[k].n : strlen(cases[k].text);
        int64_t got = k3_encode(t, cases[k].text, strlen(cases[k].text), K3_CONTROL, ids, 32, &err);
        if (CHECK_EQ_INT(got, n) && cases[k].n)
            CHECK_EQ_MEM(ids, cases[k].ids, n * sizeof *ids);
    }
    k3_tokenizer_close(t);
    free(ranks.s);
}

/* ---- Hostile texts ------------------------------------------------------------------------
 * A megabyte of each, and of some ten, cut into pieces as one run. A quadratic step anywhere would
 * take minutes here, and in a run of ten megabytes days. */

static void test_hostile(k3_tokenizer *t) {
    static const char *const unit[] = {
        "a",
        " ",
        "\xcc\x81",
        "\xe4\xb8\xad",
        "aA",
        "Aa",
        "'",
        "'s",
        "A",
        "<",
        "<|open|>",
        "<|open|",
        "\n",
        "\r\n",
        " \n",
        "a ",
        "1",
        "!",
        "\xff",
        "\xc3",
        "\xe4\xb8",
        "\xe3\x80\x80",
        "\x1c",
        "abcdefghij",
        "<|reserved_token_",
        "\xf0\x9f\xa4\x96",
        "\xce\xa9\xcc\x81",
    };
    static const char *const ten_megabytes[] = {
        "a",          " ", "\n",  "1",            "A",  "\xcc\x81",    "aA",
        "A\xcc\x81", "!", " \n", "\xcc\x81\x41", "'s", "\xe4\xb8\xad",
    };
    for (size_t k = 0; k < sizeof unit / sizeof *unit; k++) {
        text_buf b = repeat(unit[k], strlen(unit[k]), 1u << 20);
        for (int mode = K3_TEXT; mode <= K3_CONTROL; mode++) {
            int64_t n_ids;
            free(encode_all(t, b.s, b.n, (k3_text_mode)mode, &n_ids));
            CHECK(n_ids > 0);
        }
        free(b.s);
    }
    for (size_t k = 0; k < sizeof ten_megabytes / sizeof *ten_megabytes; k++) {
        text_buf b = repeat(ten_megabytes[k], strlen(ten_megabytes[k]), 10u << 20);
        size_t n_pieces = 0;
        for (size_t at = 0; at < b.n; n_pieces++) /* one run, which k3_encode would cut */
            at = pretok_next((const uint8_t *)b.s, b.n, at);
        CHECK(n_pieces > 0);
        if (k < 4) {
            int64_t n_ids;
            free(encode_all(t, b.s, b.n, K3_TEXT, &n_ids));
            CHECK(n_ids > 0);
        }
        free(b.s);
    }
}

/* ---- Streaming decode ----------------------------------------------------------------------- */

/* Push s[n] in pieces of at most `step` bytes, 0 for random ones, then flush. */
static text_buf push_all(const char *s, size_t n, size_t step, uint64_t *r) {
    text_buf b = {0};
    k3_utf8 u = {{0}, 0};
    char out[3 * (64 + 3)];
    buf_str(&b, "");
    for (size_t at = 0; at < n;) {
        size_t k = step ? step : 1 + test_random(r) % 5;
        k = k > n - at ? n - at : k;
        size_t n_out = k3_utf8_push(&u, s + at, k, out);
        CHECK(n_out <= 3 * (k + 3));
        buf_add(&b, out, n_out);
        at += k;
    }
    buf_add(&b, out, k3_utf8_push(&u, NULL, 0, out));
    CHECK_EQ_INT(k3_utf8_push(&u, NULL, 0, out), 0);
    return b;
}

#define R "\xef\xbf\xbd"

static void test_utf8(void) {
    static const char *const pairs[][2] = {
        /* what Python's bytes.decode("utf-8", "replace") gives */
        {"caf\xc3\xa9", "caf\xc3\xa9"},
        {"\xf0\x9f\xa4\x96", "\xf0\x9f\xa4\x96"},
        {"\xf0\x9f\xa4", R},
        {"\xf0\x9f\xa4x", R "x"},
        {"\xf0\x9f\xf0\x9f\xa4\x96", R "\xf0\x9f\xa4\x96"},
        {"\xe4\xb8\xc3\xa9", R "\xc3\xa9"},
        {"\x80\x80", R R},
        {"\xc0\xaf", R R},
        {"\xe0\x80\xaf", R R R},
        {"\xed\xa0\x80", R R R},
        {"\xf0\x80\x80\x80", R R R R},
        {"\xf4\x90\x80\x80", R R R R},
        {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
        {"\xf5\xff\xfe", R R R},
        {"\xc3\xc3\xa9\xc3", R "\xc3\xa9" R},
        {"a\xf1\x80\x80\xe1\x80\xc2z\x80y\x80\xbfx", "a" R R R "z" R "y" R R "x"},
    };
    uint64_t r = 4;
    for (size_t k = 0; k < sizeof pairs / sizeof *pairs; k++)
        for (size_t step = 1; step < 7; step++) {
            text_buf b = push_all(pairs[k][0], strlen(pairs[k][0]), step, &r);
            CHECK_EQ_STR(b.s, pairs[k][1]);
            free(b.s);
        }
    for (int round = 0; round < 3000; round++) {
        char s[64];
        static const uint8_t pool[] = {'a',  0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc2,
                                       0xe0, 0xe4, 0xed, 0xf0, 0xf1, 0xf4, 0xf5, 0xff};
        size_t n = test_random(&r) % sizeof s;
        for (size_t i = 0; i < n; i++)
            s[i] = (char)pool[test_random(&r) % sizeof pool];
        text_buf whole = push_all(s, n, 64, &r), cut = push_all(s, n, round % 2, &r);
        CHECK_EQ_INT(cut.n, whole.n);
        CHECK_EQ_STR(cut.s, whole.s);
        CHECK_EQ_INT(utf8_stretch((const uint8_t *)whole.s, whole.n), whole.n);
        free(whole.s);
        free(cut.s);
    }
}

/* ---- Files that must be refused ----------------------------------------------------------------
 */

static void check_refused(const text_buf *ranks, const char *config, size_t n_config,
                          const char *want) {
    k3_tokenizer *t = NULL;
    CHECK_EQ_INT(tokenizer_build(&t, ranks->s, ranks->n, config, n_config, &err), K3_EMODEL);
    CHECK(t == NULL);
    size_t n = strlen(want); /* a * at the end stands for anything */
    if (n > 0 && want[n - 1] == '*') {
        if (!CHECK(strncmp(err.text, want, n - 1) == 0))
            printf("    got %s\n    want %s\n", err.text, want);
    } else
        CHECK_EQ_STR(err.text, want);
}

static void test_bad_ranks(void) {
    static const char *const lines[][2] = {
        {"YWI= 5", "tiktoken.model line 257: rank 5 appears twice"},
        {"YWI= 256\nYWI= 257",
         "tiktoken.model line 258: the bytes of rank 257 are those of rank 256"},
        {"YQ== 256", "tiktoken.model line 257: the bytes of rank 256 are those of rank 97"},
        {"\r\n\nYWI= 300",
         "tiktoken.model line 259: rank 300, but 257 lines can only hold ranks 0 to 256"},
        {"YWI=", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI= ", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI=  256", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI= 256 ", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI= -1", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI= 4294967296", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI= 99999999999", "tiktoken.model line 257: not `base64 rank`"},
        {"YWI=\t256", "tiktoken.model line 257: not `base64 rank`"},
        {" 256", "tiktoken.model line 257: bad base64"},
        {"YWI 256", "tiktoken.model line 257: bad base64"},
        {"YWJ= 256", "tiktoken.model line 257: bad base64"},
        {"Y*I= 256", "tiktoken.model line 257: bad base64"},
        {"Y=I= 256", "tiktoken.model line 257: bad base64"},
        {"Y=== 256", "tiktoken.model line 257: bad base64"},
        {"==== 256", "tiktoken.model line 257: bad base64"},
    };
    for (size_t k = 0; k < sizeof lines / sizeof *lines; k++) {
        text_buf ranks = byte_ranks();
        buf_str(&ranks, lines[k][0]);
        check_refused(&ranks, NULL, 0, lines[k][1]);
        free(ranks.s);
    }
    text_buf ranks = byte_ranks(), empty = {0}, big = repeat("a", 1, TOKEN_MAX_BYTES + 1);
    buf_rank(&ranks, (uint8_t *)big.s, big.n, 256, "");
    check_refused(&ranks, NULL, 0, "tiktoken.model line 257: token of 4097 bytes, most is 4096");
    text_buf cut = byte_ranks();
    cut.n -= strlen("/w== 255\n");
    check_refused(&cut, NULL, 0,
                  "tiktoken.model: byte 0xff has no rank; the file is cut or is not "
                  "a byte-level vocabulary");
    buf_str(&empty, "\n\n");
    check_refused(&empty, NULL, 0,
                  "tiktoken.model: byte 0x00 has no rank; the file is cut or is not a "
                  "byte-level vocabulary");
    free(ranks.s);
    free(cut.s);
    free(empty.s);
    free(big.s);
}

static void test_good_ranks(void) {
    text_buf ranks = {0};
    for (uint32_t i = 256; i-- > 0;)
        buf_rank(&ranks, (uint8_t[]){(uint8_t)~i}, 1, i, i % 3 ? "\r\n" : "\n");
    buf_str(&ranks, "\r\n");
    text_buf big = repeat("a", 1, TOKEN_MAX_BYTES);
    buf_rank(&ranks, (uint8_t *)big.s, big.n, 256, ""); /* no end of line after the last */
    k3_tokenizer *t = build(ranks.s, ranks.n, NULL);
    uint32_t id = 0;
    if (t) {
        CHECK_EQ_INT(k3_tokenizer_size(t), 513);
        CHECK_EQ_INT(k3_encode(t, big.s, big.n, K3_TEXT, &id, 1, &err), 1);
        CHECK_EQ_INT(id, 256);
        CHECK_EQ_INT(k3_encode(t, "b", 1, K3_TEXT, &id, 1, &err), 1);
        CHECK_EQ_INT(id, 255 - 'b');
    }
    k3_tokenizer_close(t);
    free(ranks.s);
    free(big.s);
}

#define ADDED(members) "{\"added_tokens_decoder\":{" members "}}"

static void test_bad_config(void) {
    static const char *const cases[][2] = {
        {"", "tokenizer_config.json: cut short at byte 0"},
        {"{\"added_tokens_decoder\":{", "tokenizer_config.json: cut short at byte *"},
        {"nonsense", "tokenizer_config.json: *"},
        {"{\"a\":1,}x", "tokenizer_config.json: *"},
        {"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
         "tokenizer_config.json: nesting*"},
        {"[]", "tokenizer_config.json: no object `added_tokens_decoder`"},
        {"null", "tokenizer_config.json: *"},
        {"{}", "tokenizer_config.json: no object `added_tokens_decoder`"},
        {"{\"added_tokens_decoder\":[]}",
         "tokenizer_config.json: no object `added_tokens_decoder`"},
        {ADDED("") " {}", "tokenizer_config.json: more after the end of the object, at byte *"},
        {"{\"a\":1,\"\\u0061\":2}",
         "tokenizer_config.json: not valid JSON: an object has a key twice; download the file again"},
        {"{'\"':1,'c\"':2,\"a\":1,\"a\":2}",
         "tokenizer_config.json: not valid JSON: a comment or a single quote; download the file again"},
        {ADDED("\"256\":{\"content\":\"\xff\"}"), "tokenizer_config.json: *"},
    };
    text_buf ranks = byte_ranks();
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        check_refused(&ranks, cases[k][0], strlen(cases[k][0]), cases[k][1]);
    k3_tokenizer *t = build(ranks.s, ranks.n, ADDED("") "\r\n\t ");
    k3_tokenizer_close(t);
    /* What the official file holds: a number no integer can. */
    t = build(ranks.s, ranks.n,
              "{\"model_max_length\":1000000000000000019884624838656,"
              "\"added_tokens_decoder\":{\"511\":{\"content\":\"[PAD]\"}}}");
    k3_tokenizer_close(t);
    free(ranks.s);
}

/* Special ids and their names. */
static void test_bad_specials(void) {
    static const char *const cases[][2] = {
        {ADDED("\"x\":{\"content\":\"y\"}"),
         "tokenizer_config.json: added_tokens_decoder key \"x\" is not an id"},
        {ADDED("\"-1\":{\"content\":\"y\"}"),
         "tokenizer_config.json: added_tokens_decoder key \"-1\" is not an id"},
        {ADDED("\"300\":{}"), "tokenizer_config.json: special id 300 has no string `content`"},
        {ADDED("\"300\":\"y\""), "tokenizer_config.json: special id 300 has no string `content`"},
        {ADDED("\"300\":null"), "tokenizer_config.json: special id 300 has no string `content`"},
        {ADDED("\"300\":{\"content\":7}"),
         "tokenizer_config.json: special id 300 has no string `content`"},
        {ADDED("\"255\":{\"content\":\"y\"}"),
         "tokenizer_config.json: special id 255 (y) is outside 256 to 511"},
        {ADDED("\"512\":{\"content\":\"<|im_end|>\"}"),
         "tokenizer_config.json: special id 512 (<|im_end|>) is outside 256 to 511"},
        {ADDED("\"512\":{\"content\":\"two\\nlines\\u001b\"}"),
         "tokenizer_config.json: special id 512 (two?lines?) is outside 256 to 511"},
        {ADDED("\"300\":{\"content\":\"\"}"),
         "tokenizer_config.json: special id 300 has a name of 0 bytes, not 1 to 256"},
        {ADDED("\"300\":{\"content\":\"y\"},\"0300\":{\"content\":\"z\"}"),
         "tokenizer_config.json: special id 300 appears twice"},
        {ADDED("\"300\":{\"content\":\"y\"},\"301\":{\"content\":\"y\"}"),
         "tokenizer_config.json: specials 300 and 301 are both y"},
        {ADDED("\"300\":{\"content\":\"<|reserved_token_301|>\"}"),
         "tokenizer_config.json: specials 300 and 301 are both <|reserved_token_301|>"},
    };
    text_buf ranks = byte_ranks(), config = {0}, name = repeat("n", 1, SPECIAL_MAX_BYTES + 1);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        check_refused(&ranks, cases[k][0], strlen(cases[k][0]), cases[k][1]);
    buf_str(&config, "{\"added_tokens_decoder\":{\"511\":{\"content\":\"");
    buf_str(&config, name.s);
    buf_str(&config, "\"}}}");
    check_refused(&ranks, config.s, config.n,
                  "tokenizer_config.json: special id 511 has a name of 257 bytes, not 1 to 256");
    free(ranks.s);
    free(config.s);
    free(name.s);
}

static void file_write(const char *dir, const char *name, const char *s, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (CHECK(f != NULL)) {
        CHECK_EQ_INT(fwrite(s, 1, n, f), n);
        fclose(f);
    }
}

static void test_files(void) {
    char dir[] = "/tmp/k3-test-text-XXXXXX", path[256], config[256], want[512];
    text_buf ranks = byte_ranks();
    k3_tokenizer *t = NULL;
    if (!CHECK(mkdtemp(dir) != NULL))
        return;
    snprintf(path, sizeof path, "%s/%s", dir, RANKS_FILE);
    snprintf(config, sizeof config, "%s/%s", dir, CONFIG_FILE);
    snprintf(want, sizeof want,
             "tiktoken.model: not in %s; put the file of the model's release there", dir);
    CHECK_EQ_INT(k3_tokenizer_open(&t, dir, &err), K3_EMODEL);
    CHECK_EQ_STR(err.text, want);
    CHECK(t == NULL);
    CHECK_EQ_INT(k3_tokenizer_open(&t, "/nonexistent/model", NULL), K3_EMODEL);
    CHECK_EQ_INT(mkdir(path, 0700), 0);
    snprintf(want, sizeof want, "tiktoken.model: not a regular file (in %s)", dir);
    CHECK_EQ_INT(k3_tokenizer_open(&t, dir, &err), K3_EIO);
    CHECK_EQ_STR(err.text, want);
    CHECK_EQ_INT(rmdir(path), 0);
    file_write(dir, RANKS_FILE, ranks.s, ranks.n);
    CHECK_EQ_INT(k3_tokenizer_open(&t, dir, &err), K3_OK); /* no config: built-in names */
    CHECK_EQ_STR(err.text, "");
    if (t) {
        size_t n;
        CHECK_EQ_MEM(k3_id_bytes(t, 259, &n), "<|open|>", 8);
        CHECK_EQ_INT(n, 8);
    }
    k3_tokenizer_close(t);
    file_write(dir, CONFIG_FILE, "{}", 2);
    CHECK_EQ_INT(k3_tokenizer_open(&t, dir, &err), K3_EMODEL);
    CHECK_EQ_STR(err.text, "tokenizer_config.json: no object `added_tokens_decoder`");
    CHECK_EQ_INT(truncate(config, (off_t)CONFIG_FILE_MAX + 1), 0);
    CHECK_EQ_INT(k3_tokenizer_open(&t, dir, &err), K3_EMODEL);
    CHECK_EQ_STR(err.text, "tokenizer_config.json: larger than the 262144 bytes it can sensibly have");
    CHECK(unlink(path) == 0 && unlink(config) == 0 && rmdir(dir) == 0);
    free(ranks.s);
}

/* Each allocation of the tokenizer fails in turn: K3_ENOMEM, and nothing is left behind. */
static void test_no_memory(void) {
    text_buf ranks = byte_ranks(), word = repeat("ab", 2, 600);
    k3_tokenizer *t = NULL;
    int rc = K3_ENOMEM, n_failures = 0;
    for (; rc == K3_ENOMEM && n_failures < 100; n_failures++) {
        alloc_left = n_failures;
        rc = k3_tokenizer_open(&t, "demo", &err);
        bool was_used = alloc_left < 0;
        alloc_left = -1;
        if (rc == K3_OK && was_used) { /* only the shrinking realloc may fail unnoticed */
            k3_tokenizer_close(t);
            rc = K3_ENOMEM;
        } else if (rc != K3_OK)
            CHECK(t == NULL && strstr(err.text, "out of memory") != NULL);
    }
    CHECK_EQ_INT(rc, K3_OK);
    CHECK(n_failures > 8);
    for (int k = 0; t && k < 2; k++) {
        alloc_left = k;
        CHECK_EQ_INT(k3_encode(t, word.s, word.n, K3_TEXT, NULL, 0, &err), K3_ENOMEM);
        CHECK_EQ_STR(err.text, "tokenizer: out of memory for merging");
        alloc_left = -1;
    }
    if (t)
        CHECK(k3_encode(t, word.s, word.n, K3_TEXT, NULL, 0, &err) > 0);
    CHECK_EQ_STR(err.text, "");
    k3_tokenizer_close(t);
    k3_tokenizer_close(NULL);
    free(ranks.s);
    free(word.s);
}

int main(int argc, char **argv) {
    test_begin("text");
    k3_tokenizer *demo = NULL;
    if (!CHECK_EQ_INT(k3_tokenizer_open(&demo, "demo", &err), K3_OK)) {
        printf("    %s\n", err.text);
        return test_finish();
    }
    test_pins(argc > 1 ? argv[1] : getenv("K3_TOKENIZER_DIR"));
    test_special_names();
    test_demo(demo);
    test_merging();
    test_round_trip(demo);
    test_capacity(demo);
    test_invalid(demo);
    test_parts(demo);
    test_special_match();
    test_hostile(demo);
    test_utf8();
    test_bad_ranks();
    test_good_ranks();
    test_bad_config();
    test_bad_specials();
    test_files();
    test_no_memory();
    k3_tokenizer_close(demo);
    return test_finish();
}
