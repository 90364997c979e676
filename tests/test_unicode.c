/* test_unicode.c - where texts are cut, against the reference tokenizer: every code point, and
 * 100,000 random strings.
 *
 *     test_unicode [--quick]          compare with tests/data/tiktoken_ids.txt; --quick: a quarter
 *     test_unicode --write DIR SEED   vocabularies, texts and this program's hashes of the ids into
 *                                     DIR, for test_unicode.py, which asks tiktoken for the same
 *
 * Ids show where a text was cut when the vocabulary is made for it. Here it holds all bytes and all
 * pairs of bytes. A pair that is merged has no cut inside. A pair that is not merged may have one, or
 * one of its bytes went into the pair beside it. So sixteen vocabularies are used: number 8 v + b
 * gives the lowest ranks to the pairs whose first byte has v as bit b and whose second byte has not.
 * No two such pairs share a byte, so each of them in a text is merged unless the text is cut there.
 * Any two different bytes differ in some bit, so every cut between them shows in some vocabulary.
 *
 * A group is 1,024 code points or 1,000 random strings. The expected value is one hash per group, of
 * all ids of all its texts with all its vocabularies. Run from the top of the source tree.
 */
#include "k3.h"
#include "test.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define N_VOCABULARIES 16
#define N_PAIRS 65536u
#define GROUP_POINTS 1024u
#define GROUP_STRINGS 1000u
#define N_POINT_GROUPS (0x110000u / GROUP_POINTS)
#define N_STRINGS 100000u
#define N_GROUPS (N_POINT_GROUPS + N_STRINGS / GROUP_STRINGS)
#define TEXT_MAX (GROUP_POINTS * 48) /* bytes of a text; the longest has 30 per code point */
#define LINE_MAX_BYTES 64
#define EXPECTED "tests/data/tiktoken_ids.txt"

typedef struct {
    uint8_t s[TEXT_MAX];
    size_t n;
} text;

/* What happens to each text of a group. */
typedef struct {
    k3_tokenizer *t;  /* encode it and hash the ids ...               */
    EVP_MD_CTX *hash; /* ... into this                                */
    FILE *texts;      /* or, when not NULL, write it here, then 0xff  */
} sink;

static k3_tokenizer *vocabulary[N_VOCABULARIES];
static k3_error err;

static void die(const char *what, const char *why) {
    fprintf(stderr, "test_unicode: %s: %s\n", what, why);
    exit(1);
}

/* ---- Vocabularies ------------------------------------------------------------------- */

static int key_compare(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void rank_line(FILE *f, const uint8_t *s, size_t n, uint32_t rank) {
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = (uint32_t)s[0] << 16 | (n > 1 ? (uint32_t)s[1] << 8 : 0);
    fprintf(f, "%c%c%c= %u\n", digit[bits >> 18], digit[bits >> 12 & 63],
            n > 1 ? digit[bits >> 6 & 63] : '=', rank);
}

/* Write DIR/tiktoken.model: the bytes, the pairs that come first, the others; each in random order. */
static void vocabulary_write(int number, const char *dir) {
    static uint64_t key[N_PAIRS];
    char path[256];
    uint32_t bit = (uint32_t)number % 8, value = (uint32_t)number / 8;
    for (uint32_t p = 0; p < N_PAIRS; p++) {
        uint64_t state = (uint64_t)number << 16 | p;
        bool comes_first = (p >> 8 >> bit & 1) == value && (p >> bit & 1) != value;
        key[p] = (comes_first ? 0 : (uint64_t)1 << 63) | test_random(&state) >> 17 << 16 | p;
    }
    qsort(key, N_PAIRS, sizeof *key, key_compare);
    snprintf(path, sizeof path, "%s/tiktoken.model", dir);
    FILE *f = fopen(path, "wb");
    if (!f) die(path, "cannot be written");
    for (uint32_t b = 0; b < 256; b++) rank_line(f, (uint8_t[]){(uint8_t)b}, 1, b);
    for (uint32_t i = 0; i < N_PAIRS; i++)
        rank_line(f, (uint8_t[]){(uint8_t)(key[i] >> 8), (uint8_t)key[i]}, 2, 256 + i);
    if (fclose(f) != 0) die(path, "cannot be written");
}

/* Make and open all vocabularies, in DIR/00, DIR/01 ...; `keep`: leave their files there. */
static void vocabularies_open(const char *dir, bool keep) {
    for (int i = 0; i < N_VOCABULARIES; i++) {
        char sub[128], path[160];
        snprintf(sub, sizeof sub, "%.100s/%02d", dir, i);
        snprintf(path, sizeof path, "%s/tiktoken.model", sub);
        if (mkdir(sub, 0700) != 0) die(sub, "cannot be made");
        vocabulary_write(i, sub);
        if (k3_tokenizer_open(&vocabulary[i], sub, &err) != K3_OK) die(sub, err.text);
        if (!keep && (unlink(path) != 0 || rmdir(sub) != 0)) die(sub, "cannot be removed");
    }
}

/* ---- Texts ---------------------------------------------------------------------------- */

static void put_point(text *x, uint32_t p) {
    size_t n = p < 0x80 ? 1 : p < 0x800 ? 2 : p < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; p >>= 6) x->s[x->n + i] = (uint8_t)(0x80 | (p & 0x3f));
    x->s[x->n] = (uint8_t)(lead[n] | p);
    x->n += n;
}

static void text_done(sink *out, text *x) {
    static uint32_t ids[TEXT_MAX];
    static uint8_t bytes[4 * (TEXT_MAX + 1)];
    if (out->texts) {
        fwrite(x->s, 1, x->n, out->texts);
        fputc(0xff, out->texts);
    } else {
        int64_t n = k3_encode(out->t, (char *)x->s, x->n, K3_TEXT, ids, TEXT_MAX, &err);
        if (n < 0 || (size_t)n > x->n) die("k3_encode", n < 0 ? err.text : "more ids than bytes");
        for (size_t i = 0; i <= (size_t)n; i++) {
            uint32_t u = i == 0 ? (uint32_t)n : ids[i - 1];
            for (int k = 0; k < 4; k++) bytes[4 * i + (size_t)k] = (uint8_t)(u >> 8 * k);
        }
        EVP_DigestUpdate(out->hash, bytes, 4 * ((size_t)n + 1));
    }
    x->n = 0;
}

/* Each code point beside what tells its kind: a capital, a small letter, a digit, punctuation and
 * the end of a line. No two characters of one byte are neighbours where a cut is in question. */
static void points_group(sink *out, uint32_t first) {
    static text x;
    for (uint32_t p = first; p < first + GROUP_POINTS; p++) {
        const uint32_t around[] = {p, 0xc9, p, 0xe9, p, '1', p, '!', '!', p, '\n'};
        for (size_t i = 0; i < sizeof around / sizeof *around; i++)
            if (p < 0xd800 || p > 0xdfff) put_point(&x, around[i]);
    }
    text_done(out, &x);
}

static uint32_t random_point(uint64_t *r) {
    static const uint32_t pool[] = {
        'a',    'b',     'A',     'B',     's',     'S',     't',     'T',      'd',    'm',
        'M',    'l',     'L',     'r',     'e',     'E',     'v',     'V',      0x17f,  '\'',
        '\'',   '\'',    ' ',     ' ',     ' ',     '\t',    '\r',    '\n',     '\n',   0x0b,
        0x0c,   0x1c,    0x1f,    0x85,    0xa0,    0x1680,  0x180e,  0x2003,   0x2028, 0x202f,
        0x3000, 0x200b,  0x200d,  0xfeff,  '0',     '9',     0x663,   0x2163,   0xb2,   0xbd,
        0x4e00, 0x6f22,  0x3005,  0x3007,  0x303b,  0x3006,  0x30fc,  0x30c6,   0x53ef, 0x3001,
        0x1c5,  0x2b0,   0xaa,    0xdf,    0x130,   0x212a,  0x301,   0x308,    0x903,  0x20dd,
        0xfe0f, 0x1f468, 0x1f3fd, '!',     '?',     '.',     '_',     '-',      '/',    '<',
        '|',    '>',     '"',     '=',     0,       0x7f,    0xe01,   0xe32,    0xd55c, 0x939,
        0x93f,  0xd7ff,  0xe000,  0x16ff0, 0x16fe3, 0x20000, 0xe0100, 0x10ffff, 0x2e80, 0x3021,
        0x897,  0x1c89,  0x1c8a,  0x10d4a, 0x10d40, 0x1e030, 0x2ebf0, 0x31350,  0x1ccf0};
    uint64_t x = test_random(r);
    if (x % 5 > 0) return pool[(x >> 8) % (sizeof pool / sizeof *pool)];
    uint32_t p = (uint32_t)((x >> 8) % (x % 2 ? 0x3000 : 0x110000));
    return p >= 0xd800 && p < 0xe000 ? 'x' : p;
}

/* Short strings, one in eight up to 32 characters, one in five of three different characters. */
static void strings_group(sink *out, uint64_t seed, uint32_t group) {
    static text x;
    uint64_t r = seed << 32 | group;
    for (uint32_t round = 0; round < GROUP_STRINGS; round++) {
        uint32_t points[32];
        size_t n = 1 + test_random(&r) % (round % 8 ? 8 : 32);
        for (size_t i = 0; i < n; i++) {
            points[i] = i > 2 && round % 5 == 0 ? points[test_random(&r) % 3] : random_point(&r);
            put_point(&x, points[i]);
        }
        text_done(out, &x);
    }
}

/* ---- Groups ---------------------------------------------------------------------------- */

static void group_texts(sink *out, uint32_t group, uint64_t seed) {
    if (group < N_POINT_GROUPS)
        points_group(out, group * GROUP_POINTS);
    else
        strings_group(out, seed, group - N_POINT_GROUPS);
}

static void group_name(char *name, size_t cap, uint32_t group) {
    if (group < N_POINT_GROUPS)
        snprintf(name, cap, "U+%04X", group * GROUP_POINTS);
    else
        snprintf(name, cap, "strings_%u", (group - N_POINT_GROUPS) * GROUP_STRINGS);
}

/* The vocabularies of a group. Past the first 1,024 code points, which hold ASCII, three show
 * every cut: bit 7 tells ASCII from the rest, bit 6 the first byte of a character from its last.
 * From U+40000 on, where almost all is unassigned, number 15 is enough: with it the ids of a
 * code point that is none of letter, mark, number, space or Han differ from those of the others. */
static size_t group_vocabularies(uint32_t group, uint8_t number[N_VOCABULARIES]) {
    bool all = group == 0 || group >= N_POINT_GROUPS;
    size_t n = all ? N_VOCABULARIES : group * GROUP_POINTS < 0x40000 ? 3 : 1;
    for (size_t i = 0; i < n; i++) number[i] = all ? (uint8_t)i : (uint8_t[]){15, 7, 6}[i];
    return n;
}

/* "NAME HASH": the first 16 hex digits of SHA-256 over each text's number of ids and its ids, as
 * little-endian u32, text after text, vocabulary after vocabulary. */
static void group_line(char line[LINE_MAX_BYTES], uint32_t group, uint64_t seed) {
    uint8_t number[N_VOCABULARIES], digest[EVP_MAX_MD_SIZE];
    sink out = {NULL, EVP_MD_CTX_new(), NULL};
    if (!out.hash || EVP_DigestInit_ex(out.hash, EVP_sha256(), NULL) != 1)
        die("SHA-256", "not there");
    size_t n = group_vocabularies(group, number);
    for (size_t i = 0; i < n; i++) {
        out.t = vocabulary[number[i]];
        group_texts(&out, group, seed);
    }
    EVP_DigestFinal_ex(out.hash, digest, NULL);
    EVP_MD_CTX_free(out.hash);
    group_name(line, LINE_MAX_BYTES, group);
    size_t at = strlen(line);
    line[at++] = ' ';
    for (int i = 0; i < 8; i++, at += 2)
        snprintf(line + at, LINE_MAX_BYTES - at, "%02x", digest[i]);
}

/* ---- Modes ------------------------------------------------------------------------------ */

/* DIR/NN/tiktoken.model, DIR/hashes, and DIR/texts: for each group its name, a space, its
 * vocabularies' numbers with commas, 0xff, then its texts, 0xff behind each; 0xfe behind a group. */
static int write_all(const char *dir, uint64_t seed) {
    char path[128], name[32], line[LINE_MAX_BYTES];
    vocabularies_open(dir, true);
    snprintf(path, sizeof path, "%.100s/texts", dir);
    sink out = {NULL, NULL, fopen(path, "wb")};
    snprintf(path, sizeof path, "%.100s/hashes", dir);
    FILE *hashes = fopen(path, "wb");
    if (!out.texts || !hashes) die(dir, "cannot be written");
    for (uint32_t group = 0; group < N_GROUPS; group++) {
        uint8_t number[N_VOCABULARIES];
        size_t n = group_vocabularies(group, number);
        group_name(name, sizeof name, group);
        fprintf(out.texts, "%s ", name);
        for (size_t i = 0; i < n; i++) fprintf(out.texts, i ? ",%u" : "%u", number[i]);
        fputc(0xff, out.texts);
        group_texts(&out, group, seed);
        fputc(0xfe, out.texts);
        group_line(line, group, seed);
        fprintf(hashes, "%s\n", line);
    }
    if (fclose(out.texts) != 0 || fclose(hashes) != 0) die(dir, "cannot be written");
    return 0;
}

/* Groups 0, step, 2 step, ... against the file, whose lines are in order behind its comments. */
static void check_all(uint32_t step) {
    char line[LINE_MAX_BYTES], want[256];
    uint32_t group = 0;
    FILE *f = fopen(EXPECTED, "rb");
    if (!CHECK(f != NULL)) return;
    while (fgets(want, sizeof want, f)) {
        if (want[0] == '#') continue;
        want[strcspn(want, "\n")] = '\0';
        if (group < N_GROUPS && group % step == 0) {
            group_line(line, group, 1);
            CHECK_EQ_STR(line, want);
        }
        group++;
    }
    CHECK_EQ_INT(group, N_GROUPS);
    fclose(f);
}

int main(int argc, char **argv) {
    char dir[] = "/tmp/k3-test-unicode-XXXXXX";
    int rc = 0;
    test_begin("unicode");
    if (argc == 4 && strcmp(argv[1], "--write") == 0)
        rc = write_all(argv[2], strtoull(argv[3], NULL, 10));
    else {
        if (!mkdtemp(dir)) die(dir, "cannot be made");
        vocabularies_open(dir, false);
        rmdir(dir);
        check_all(argc == 2 && strcmp(argv[1], "--quick") == 0 ? 4 : 1);
        rc = test_finish();
    }
    for (int i = 0; i < N_VOCABULARIES; i++) k3_tokenizer_close(vocabulary[i]);
    return rc;
}
