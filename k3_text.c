/* k3_text.c - text to ids and back, exactly as the official tokenizer does.
 *
 * What happens to a text, outermost step first:
 *
 *   bytes     are cut into maximal stretches of valid UTF-8. The official tokenizer
 *             only ever sees valid text; here a byte that is no part of a valid
 *             sequence becomes the id of that single byte, and each stretch is
 *             encoded as if it were the whole text.
 *   parts     a stretch is taken in slices of 400,000 characters, and a slice is cut
 *             again wherever a run of spaces, or of non-spaces, would pass 25,000.
 *   specials  in control mode the special spellings inside a part become their ids.
 *             The official code asks for specials part by part, so a spelling that a
 *             cut goes through is ordinary text. The text between two specials is
 *             encoded alone.
 *   pieces    one regular expression, leftmost-first, splits text into words. It is matched
 *             by hand; the kinds of characters come from k3_unicode.h, whose Unicode version
 *             is that of the official tokenizer and not that of an installed library.
 *   ids       a piece that is a vocabulary entry is that id; any other starts as
 *             single bytes and merges the adjacent pair of lowest rank until none is left.
 *
 * Nothing here is worse than n log n: parts bound the length of a piece, cutting reads
 * each character a bounded number of times, and merging keeps its pairs in a heap.
 * Concatenating the bytes of the ids always gives the text back.
 *
 * Both files of the model directory are untrusted: every line is checked before use.
 * Encoding uses scratch inside the tokenizer, so one thread encodes at a time; the id
 * look-ups only read. Source: K3-SPEC 4.1 to 4.3.
 */
#include "k3_common.h"
#include "k3_error.h"
#include "k3_json.h"
#include "k3_unicode.h"

#include <errno.h>
#include <fcntl.h>
#include <json-c/json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define N_SPECIALS         256u
#define NO_ID              UINT32_MAX
#define TOKEN_MAX_BYTES    4096u       /* longest entry of K3 is far below               */
#define SPECIAL_MAX_BYTES  256u        /* bounds the search for specials per position    */
#define RANKS_FILE_MAX     (64u << 20) /* K3's is 2.8 MB                                 */
#define CONFIG_FILE_MAX    (256u << 10) /* K3's is 3.5 KB; json-c's tree is 260 times as large */
#define CONFIG_MAX_DEPTH   32
#define SLICE_CHARS        400000u
#define RUN_CHARS          25000u
STATIC_ASSERT(a_run_fits_a_slice, RUN_CHARS <= SLICE_CHARS);
STATIC_ASSERT(a_special_fits_a_token, SPECIAL_MAX_BYTES <= TOKEN_MAX_BYTES);
#define RANKS_FILE         "tiktoken.model"
#define CONFIG_FILE        "tokenizer_config.json"

/* One byte of a piece being merged. The live nodes are the starts of the current tokens. */
typedef struct {
    uint32_t prev, next; /* neighbouring starts; next of the last is the piece's length */
    uint32_t id;         /* of the token that starts here                               */
    uint32_t pair;       /* rank of this token joined with the next, or NO_ID           */
} bpe_node;

/* Ids 0..n_ranks-1 are ranks, the next 256 are specials; all their bytes lie in `blob`. */
struct k3_tokenizer {
    uint32_t n_ranks;
    uint32_t max_rank_bytes;
    uint8_t *blob;
    size_t blob_bytes;
    uint32_t *off;   /* [n_ranks + 256]                                            */
    uint16_t *len;   /* [n_ranks + 256] 0 while loading: not seen yet              */
    uint32_t *table; /* [table_mask + 1] rank by hash of its bytes, NO_ID when free */
    size_t table_mask;
    uint32_t byte_id[256];
    uint32_t sorted[N_SPECIALS]; /* special ids by spelling                          */
    uint16_t first[257];         /* those that start with byte b: first[b]..first[b+1] */
    bpe_node *node; /* [scratch_cap]     */
    uint64_t *heap; /* [2 * scratch_cap] rank << 32 | start */
    size_t scratch_cap, n_heap;
};

static int fail_memory(k3_error *err, const char *what) {
    return fail(err, K3_ENOMEM, "tokenizer: out of memory for %s", what);
}

/* ---- UTF-8 ---------------------------------------------------------------------
 * One question, asked byte by byte, defines validity for the encoder and for the
 * streaming decoder alike: may this byte follow that unfinished sequence? It is the
 * table 3-7 of the Unicode standard: no overlong form, no surrogate, nothing past
 * U+10FFFF. Answering it per byte is what makes replacement by maximal subpart right. */

/* Bytes of the sequence that `lead` opens; 0 when it opens none. */
static size_t utf8_width(uint8_t lead) {
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

/* May `b` follow the n_held >= 1 bytes of a valid, unfinished sequence? */
static bool utf8_can_follow(const uint8_t *held, size_t n_held, uint8_t b) {
    uint8_t low = 0x80, high = 0xbf;
    if (n_held == 1) {
        switch (held[0]) {
        case 0xe0: low = 0xa0; break;
        case 0xed: high = 0x9f; break;
        case 0xf0: low = 0x90; break;
        case 0xf4: high = 0x8f; break;
        default: break;
        }
    }
    return b >= low && b <= high;
}

/* Bytes of the valid character at the start of s[n], n >= 1; 0 when there is none. */
static size_t utf8_valid(const uint8_t *s, size_t n) {
    size_t width = utf8_width(s[0]);
    if (width > n)
        return 0;
    for (size_t i = 1; i < width; i++)
        if (!utf8_can_follow(s, i, s[i]))
            return 0;
    return width;
}

/* Bytes of the longest valid text at the start of s[n]. */
static size_t utf8_stretch(const uint8_t *s, size_t n) {
    size_t i = 0, width;
    while (i < n && (width = utf8_valid(s + i, n - i)) > 0)
        i += width;
    return i;
}

/* Code point of a character already known to be valid. */
static uint32_t utf8_point(const uint8_t *s, size_t width) {
    static const uint8_t lead_mask[5] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t point = s[0] & lead_mask[width];
    for (size_t i = 1; i < width; i++)
        point = point << 6 | (s[i] & 0x3fu);
    return point;
}

static size_t utf8_replace(char *out) {
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

/* Source  WHATWG Encoding "decode", which is Python's bytes.decode("utf-8", "replace"):
 *         each longest prefix of a valid sequence that cannot go on becomes one U+FFFD. */
size_t k3_utf8_push(k3_utf8 *u, const char *bytes, size_t n_bytes, char *out) {
    size_t n = 0;
    if (n_bytes == 0 && u->n_held > 0) {
        n += utf8_replace(out);
        u->n_held = 0;
    }
    for (size_t i = 0; i < n_bytes; i++) {
        uint8_t b = (uint8_t)bytes[i];
        if (u->n_held > 0 && !utf8_can_follow(u->held, u->n_held, b)) {
            n += utf8_replace(out + n);
            u->n_held = 0;
        }
        if (u->n_held == 0 && utf8_width(b) == 0) {
            n += utf8_replace(out + n);
            continue;
        }
        u->held[u->n_held++] = b;
        if (u->n_held == utf8_width(u->held[0])) {
            memcpy(out + n, u->held, u->n_held);
            n += u->n_held;
            u->n_held = 0;
        }
    }
    return n;
}

/* ---- Vocabulary ------------------------------------------------------------------
 * Every entry's bytes lie in one blob, found by id through off/len and by content
 * through an open-addressing table. For K3 that is about 5 MB in all, against 20 MB
 * and more for a map of strings. */

static uint64_t bytes_hash(const uint8_t *s, size_t n) {
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a, then one mix so that low bits see all */
    for (size_t i = 0; i < n; i++)
        h = (h ^ s[i]) * 0x100000001b3u;
    return h ^ h >> 32;
}

/* The table place that holds these bytes, or the free one where they belong. */
static uint32_t *vocab_place(const k3_tokenizer *t, const uint8_t *s, size_t n) {
    size_t i = (size_t)bytes_hash(s, n) & t->table_mask;
    for (;; i = (i + 1) & t->table_mask) {
        uint32_t id = t->table[i];
        if (id == NO_ID || (t->len[id] == n && memcmp(t->blob + t->off[id], s, n) == 0))
            return &t->table[i];
    }
}

static uint32_t vocab_find(const k3_tokenizer *t, const uint8_t *s, size_t n) {
    return n > t->max_rank_bytes ? NO_ID : *vocab_place(t, s, n);
}

/* Make the next `n` bytes of the blob, where the caller has written them, those of `id`. */
static void vocab_take(k3_tokenizer *t, uint32_t id, size_t n) {
    t->off[id] = (uint32_t)t->blob_bytes;
    t->len[id] = (uint16_t)n;
    t->blob_bytes += n;
}

/* Room for n_ranks entries of `ranks_bytes` bytes in all, and for the specials. */
static int vocab_alloc(k3_tokenizer *t, uint32_t n_ranks, size_t ranks_bytes, k3_error *err) {
    size_t n_ids = (size_t)n_ranks + N_SPECIALS, places = 512;
    while (places < 2 * (size_t)n_ranks)
        places *= 2;
    t->n_ranks = n_ranks;
    t->table_mask = places - 1;
    t->blob = malloc(ranks_bytes + N_SPECIALS * SPECIAL_MAX_BYTES);
    t->off = calloc(n_ids, sizeof *t->off);
    t->len = calloc(n_ids, sizeof *t->len);
    t->table = malloc(places * sizeof *t->table);
    if (!t->blob || !t->off || !t->len || !t->table) return fail_memory(err, "the vocabulary");
    memset(t->table, 0xff, places * sizeof *t->table);
    return K3_OK;
}

/* ---- tiktoken.model ----------------------------------------------------------------
 * Lines `base64 SP rank`. Ranks may come in any order but must be 0..n-1, each once, with
 * no bytes twice: a hole or a repeat is a damaged file, and would shift every id after it.
 * Blank lines and CRLF are tolerated, since editors and downloads add them. */

typedef struct {
    const char *at, *end;
    const char *line; /* the current line, without its end */
    size_t n, i_line; /* its length and its number, from 1 */
} line_reader;

/* Step to the next line that is not blank. */
static bool line_next(line_reader *r) {
    while (r->at < r->end) {
        const char *stop = memchr(r->at, '\n', (size_t)(r->end - r->at));
        if (!stop)
            stop = r->end;
        r->line = r->at;
        r->n = (size_t)(stop - r->at);
        r->at = stop < r->end ? stop + 1 : stop;
        r->i_line++;
        if (r->n > 0 && r->line[r->n - 1] == '\r')
            r->n--;
        if (r->n > 0)
            return true;
    }
    return false;
}

static int base64_digit(char c) {
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decode s[n] into out[n / 4 * 3]; returns the number of bytes, 0 when s is not the one
 * canonical spelling of at least one byte. */
static size_t base64_decode(const char *s, size_t n, uint8_t *out) {
    if (n == 0 || n % 4 != 0)
        return 0;
    size_t n_pad = s[n - 1] != '=' ? 0 : s[n - 2] != '=' ? 1 : 2, n_out = 0;
    uint32_t bits = 0, n_bits = 0;
    for (size_t i = 0; i < n - n_pad; i++) {
        int digit = base64_digit(s[i]);
        if (digit < 0)
            return 0;
        bits = bits << 6 | (uint32_t)digit;
        n_bits += 6;
        if (n_bits >= 8) {
            n_bits -= 8;
            out[n_out++] = (uint8_t)(bits >> n_bits);
            bits &= (1u << n_bits) - 1;
        }
    }
    return bits == 0 ? n_out : 0;
}

/* Digits only, at most UINT32_MAX. */
static bool parse_u32(const char *s, size_t n, uint32_t *out) {
    uint64_t value = 0;
    if (n == 0 || n > 10)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (s[i] < '0' || s[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(s[i] - '0');
    }
    *out = (uint32_t)value;
    return value <= UINT32_MAX;
}

static int ranks_line(k3_tokenizer *t, const line_reader *r, k3_error *err) {
    const char *space = memchr(r->line, ' ', r->n);
    size_t n_base64 = space ? (size_t)(space - r->line) : r->n;
    uint8_t *bytes = t->blob + t->blob_bytes;
    uint32_t rank;
    if (!space || !parse_u32(space + 1, r->n - n_base64 - 1, &rank))
        return fail(err, K3_EMODEL, "%s line %zu: not `base64 rank`", RANKS_FILE, r->i_line);
    size_t n = base64_decode(r->line, n_base64, bytes);
    if (n == 0) return fail(err, K3_EMODEL, "%s line %zu: bad base64", RANKS_FILE, r->i_line);
    if (n > TOKEN_MAX_BYTES)
        return fail(err, K3_EMODEL, "%s line %zu: token of %zu bytes, most is %u", RANKS_FILE,
                    r->i_line, n, TOKEN_MAX_BYTES);
    if (rank >= t->n_ranks)
        return fail(err, K3_EMODEL,
                    "%s line %zu: rank %u, but %u lines can only hold ranks 0 to %u", RANKS_FILE,
                    r->i_line, rank, t->n_ranks, t->n_ranks - 1);
    if (t->len[rank] != 0)
        return fail(err, K3_EMODEL, "%s line %zu: rank %u appears twice", RANKS_FILE, r->i_line,
                    rank);
    uint32_t *place = vocab_place(t, bytes, n);
    if (*place != NO_ID)
        return fail(err, K3_EMODEL, "%s line %zu: the bytes of rank %u are those of rank %u",
                    RANKS_FILE, r->i_line, rank, *place);
    *place = rank;
    vocab_take(t, rank, n);
    if (n > t->max_rank_bytes)
        t->max_rank_bytes = (uint32_t)n;
    return K3_OK;
}

/* Fill the vocabulary from the contents of tiktoken.model. n lines, all ranks below n and
 * none twice: so every rank is there. */
static int ranks_parse(k3_tokenizer *t, const char *text, size_t n_bytes, k3_error *err) {
    uint32_t n_ranks = 0; /* n_bytes <= RANKS_FILE_MAX, so neither count overflows */
    size_t ranks_bytes = 0;
    line_reader count = {text, text + n_bytes, NULL, 0, 0}, r = count;
    while (line_next(&count)) {
        const char *space = memchr(count.line, ' ', count.n);
        ranks_bytes += (space ? (size_t)(space - count.line) : count.n) / 4 * 3;
        n_ranks++;
    }
    int rc = vocab_alloc(t, n_ranks, ranks_bytes, err);
    while (rc == K3_OK && line_next(&r))
        rc = ranks_line(t, &r, err);
    for (uint32_t b = 0; rc == K3_OK && b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        t->byte_id[b] = vocab_find(t, &byte, 1);
        if (t->byte_id[b] == NO_ID)
            rc = fail(err, K3_EMODEL,
                      "%s: byte 0x%02x has no rank; the file is cut or is "
                      "not a byte-level vocabulary",
                      RANKS_FILE, b);
    }
    return rc;
}

/* ---- Specials ----------------------------------------------------------------------
 * The 256 ids after the last rank. Names come from added_tokens_decoder; an id it leaves
 * out is <|reserved_token_ID|>. An id outside that range is refused, not added: it would
 * have no embedding row. No name is registered but these, so K2's <|im_*|> stay text. */

static const struct {
    uint16_t offset;
    const char *name;
} builtin_specials[] = {
    {0, "[BOS]"}, {1, "[EOS]"}, {2, "<|end_of_msg|>"}, {3, "<|open|>"}, {4, "<|close|>"},
    {5, "<|sep|>"}, {6, "[start_header_id]"}, {7, "[end_header_id]"}, {9, "[EOT]"},
    {18, "<|media_begin|>"}, {19, "<|media_content|>"}, {20, "<|media_end|>"},
    {21, "<|media_pad|>"}, {65, "<osagent_mode>"}, {254, "[UNK]"}, {255, "[PAD]"},
};

static int special_set(k3_tokenizer *t, uint32_t id, const char *name, size_t n, k3_error *err) {
    if (t->len[id] != 0)
        return fail(err, K3_EMODEL, "%s: special id %u appears twice", CONFIG_FILE, id);
    if (n == 0 || n > SPECIAL_MAX_BYTES)
        return fail(err, K3_EMODEL, "%s: special id %u has a name of %zu bytes, not 1 to %u",
                    CONFIG_FILE, id, n, SPECIAL_MAX_BYTES);
    memcpy(t->blob + t->blob_bytes, name, n);
    vocab_take(t, id, n);
    return K3_OK;
}

/* One member of added_tokens_decoder: "163587": {"content": "<|open|>", ...}. */
static int special_entry(k3_tokenizer *t, const char *key, json_object *value, k3_error *err) {
    json_object *content = NULL;
    uint32_t id;
    if (!parse_u32(key, strlen(key), &id))
        return fail(err, K3_EMODEL, "%s: added_tokens_decoder key \"%.64s\" is not an id",
                    CONFIG_FILE, key);
    if (!json_object_is_type(value, json_type_object) ||
        !json_object_object_get_ex(value, "content", &content) ||
        !json_object_is_type(content, json_type_string))
        return fail(err, K3_EMODEL, "%s: special id %u has no string `content`", CONFIG_FILE, id);
    const char *name = json_object_get_string(content);
    if (id < t->n_ranks || id - t->n_ranks >= N_SPECIALS)
        return fail(err, K3_EMODEL, "%s: special id %u (%.64s) is outside %u to %u", CONFIG_FILE,
                    id, name, t->n_ranks, t->n_ranks + N_SPECIALS - 1);
    return special_set(t, id, name, (size_t)json_object_get_string_len(content), err);
}

/* Read the names out of the contents of tokenizer_config.json. Not json-c's strict mode:
 * the official file says `"model_max_length": 1000000000000000019884624838656`, a number
 * that newer strict parsers refuse. */
static int specials_parse(k3_tokenizer *t, const char *text, size_t n_bytes, k3_error *err) {
    int rc = K3_OK;
    json_object *root = NULL, *added = NULL;
    json_tokener *tok = json_tokener_new_ex(CONFIG_MAX_DEPTH);
    if (!tok) return fail_memory(err, CONFIG_FILE);
    json_tokener_set_flags(tok, JSON_TOKENER_VALIDATE_UTF8);
    root = json_tokener_parse_ex(tok, text, (int)n_bytes);
    size_t end = json_tokener_get_parse_end(tok);
    enum json_tokener_error fault = json_tokener_get_error(tok);
    if (fault != json_tokener_success) {
        const char *why = json_tokener_error_desc(fault);
        rc = fail(err, K3_EMODEL, "%s: %s at byte %zu", CONFIG_FILE,
                  fault == json_tokener_continue ? "cut short" : why, end);
        goto done;
    }
    while (end < n_bytes && text[end] != '\0' && strchr(" \t\r\n", text[end]))
        end++;
    if (end < n_bytes) {
        rc = fail(err, K3_EMODEL, "%s: more after the end of the object, at byte %zu", CONFIG_FILE,
                  end);
        goto done;
    }
    const char *lie = json_fault(text, n_bytes, root);
    if (lie) {
        rc = fail(err, K3_EMODEL, "%s: not valid JSON: %s; download the file again", CONFIG_FILE, lie);
        goto done;
    }
    if (!json_object_is_type(root, json_type_object) ||
        !json_object_object_get_ex(root, "added_tokens_decoder", &added) ||
        !json_object_is_type(added, json_type_object)) {
        rc = fail(err, K3_EMODEL, "%s: no object `added_tokens_decoder`", CONFIG_FILE);
        goto done;
    }
    for (struct json_object_iterator it = json_object_iter_begin(added),
                                     last = json_object_iter_end(added);
         rc == K3_OK && !json_object_iter_equal(&it, &last); json_object_iter_next(&it))
        rc = special_entry(t, json_object_iter_peek_name(&it), json_object_iter_peek_value(&it),
                           err);
done:
    json_object_put(root);
    json_tokener_free(tok);
    return rc;
}

/* Compare two spellings; a name comes before those it begins. */
static int special_compare(const k3_tokenizer *t, uint32_t a, uint32_t b) {
    uint16_t n = t->len[a] < t->len[b] ? t->len[a] : t->len[b];
    int order = memcmp(t->blob + t->off[a], t->blob + t->off[b], n);
    return order != 0 ? order : (int)t->len[a] - (int)t->len[b];
}

/* Name the ids left over, then sort all names for special_at. */
static int specials_finish(k3_tokenizer *t, k3_error *err) {
    for (uint32_t k = 0; k < N_SPECIALS; k++) {
        char name[64];
        uint32_t id = t->n_ranks + k, i = k;
        int n = snprintf(name, sizeof name, "<|reserved_token_%u|>", id);
        if (t->len[id] == 0 && special_set(t, id, name, (size_t)n, err) < 0)
            return K3_EMODEL;
        for (; i > 0 && special_compare(t, t->sorted[i - 1], id) >= 0; i--) {
            if (special_compare(t, t->sorted[i - 1], id) == 0)
                return fail(err, K3_EMODEL, "%s: specials %u and %u are both %.*s", CONFIG_FILE,
                            t->sorted[i - 1], id, (int)t->len[id],
                            (const char *)t->blob + t->off[id]);
            t->sorted[i] = t->sorted[i - 1];
        }
        t->sorted[i] = id;
    }
    for (uint32_t k = 0; k < N_SPECIALS; k++)
        t->first[t->blob[t->off[t->sorted[k]]] + 1] = (uint16_t)(k + 1);
    for (uint32_t b = 1; b <= 256; b++)
        if (t->first[b] < t->first[b - 1])
            t->first[b] = t->first[b - 1];
    return K3_OK;
}

/* The first of sorted[lo..hi), all longer than `depth` and equal before it, whose byte
 * there is at least `byte`. */
static uint32_t special_bound(const k3_tokenizer *t, uint32_t lo, uint32_t hi, size_t depth,
                              uint32_t byte) {
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (t->blob[t->off[t->sorted[mid]] + depth] < byte)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Longest special spelled at the start of s[n], n >= 1; returns its length, 0 for none. */
static size_t special_at(const k3_tokenizer *t, const uint8_t *s, size_t n, uint32_t *id) {
    uint32_t lo = t->first[s[0]], hi = t->first[s[0] + 1];
    size_t found = 0;
    for (size_t depth = 1; lo < hi; depth++) {
        if (t->len[t->sorted[lo]] == depth) { /* the shortest name left is spelled out */
            found = depth;
            *id = t->sorted[lo++];
        }
        if (depth == n)
            break;
        uint32_t start = special_bound(t, lo, hi, depth, s[depth]);
        hi = special_bound(t, start, hi, depth, s[depth] + 1u);
        lo = start;
    }
    return found;
}

/* ---- Pieces ----------------------------------------------------------------------
 * The official expression (K3-SPEC 4.2), matched by hand. Its alternatives, in order:
 *
 *   1  HAN+
 *   2  PREFIX? A* B+ CONTRACTION?     A: [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
 *   3  PREFIX? A+ B* CONTRACTION?     B: [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
 *   4  NUMBER{1,3}
 *   5  [ ]? LONE+ [\r\n]*             LONE: [^\s\p{L}\p{N}]
 *   6  SPACE* [\r\n]+                 SPACE: \s
 *   7  SPACE+ (?!\S)
 *   8  SPACE+
 *
 * Each class is a union of the kinds of k3_unicode.h, so a class is a set of kinds and
 * "is this character in the class" is one AND. PCRE2 is no choice here: the Unicode version
 * of its tables is that of the installed library, and 8,242 code points were cut
 * differently by the one of Debian 12.
 *
 * Time: no character is read again after a piece has taken it, and what a piece reads and
 * does not take is taken whole by the next piece, or by the one after that. */

#define KIND(name) (1u << UNICODE_##name)

enum {
    HAN = KIND(HAN) | KIND(HAN_LETTER) | KIND(HAN_NUMBER),
    UPPERISH = KIND(UPPER) | KIND(LETTER) | KIND(MARK), /* A */
    LOWERISH = KIND(LOWER) | KIND(LETTER) | KIND(MARK), /* B */
    NUMBER = KIND(NUMBER) | KIND(HAN_NUMBER),
    NEWLINE = KIND(NEWLINE),
    SPACE = KIND(SPACE) | KIND(NEWLINE),
    LONE = KIND(OTHER) | KIND(MARK) | KIND(HAN),
    PREFIX = KIND(OTHER) | KIND(MARK) | KIND(HAN) | KIND(SPACE) /* [^\r\n\p{L}\p{N}] */
};

/* The kind, as a set of one, of the character at s[i], and in *next the place after it.
 * At the end of the text: the empty set. */
static inline unsigned kind_at(const uint8_t *s, size_t n, size_t i, size_t *next) {
    *next = i;
    if (i >= n)
        return 0;
    size_t width = utf8_width(s[i]);
    *next = i + width;
    return 1u << unicode_kind(utf8_point(s + i, width));
}

/* End of the run of characters of one class that starts at s[i]; i when there is none. */
static size_t run_end(const uint8_t *s, size_t n, size_t i, unsigned set) {
    size_t next;
    while (kind_at(s, n, i, &next) & set)
        i = next;
    return i;
}

/* The letter at s[i] without its case, for CONTRACTION; U+017F, the long s, folds to s. */
static uint8_t folded_at(const uint8_t *s, size_t n, size_t i, size_t *next) {
    *next = i + 1;
    if (i + 1 < n && s[i] == 0xc5 && s[i + 1] == 0xbf) {
        *next = i + 2;
        return 's';
    }
    return i >= n ? 0 : s[i] >= 'A' && s[i] <= 'Z' ? (uint8_t)(s[i] + 32) : s[i];
}

/* CONTRACTION? at s[i]: (?i:'s|'t|'re|'ve|'m|'ll|'d). Returns its end, i when there is none. */
static size_t contraction_end(const uint8_t *s, size_t n, size_t i) {
    size_t one, two;
    if (i >= n || s[i] != '\'')
        return i;
    uint8_t a = folded_at(s, n, i + 1, &one), b = folded_at(s, n, one, &two);
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return one;
    bool is_long = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return is_long ? two : i;
}

/* Alternatives 2 and 3 at s[at]: the end of the word, `at` when there is none.
 *
 * A* takes all it can, then B+ must find something: the run of B that follows, or else the
 * last character of the run of A that is in B too, where the word then ends. Without either,
 * alternative 2 is tried again without its prefix, and only a MARK, which is in B, can be
 * both a prefix and a word of its own. What is left is alternative 3, a run of A alone. */
static size_t word_end(const uint8_t *s, size_t n, size_t at) {
    size_t next, after_prefix;
    unsigned first = kind_at(s, n, at, &after_prefix), kind;
    size_t start = first & PREFIX ? after_prefix : at, i = start, after_b = start;
    for (; (kind = kind_at(s, n, i, &next)) & UPPERISH; i = next)
        if (kind & LOWERISH)
            after_b = next;
    for (; kind & LOWERISH; kind = kind_at(s, n, i, &next))
        after_b = i = next;
    if (after_b > start)
        return contraction_end(s, n, after_b);
    if (first & KIND(MARK))
        return contraction_end(s, n, after_prefix);
    return i > start ? contraction_end(s, n, i) : at;
}

/* Alternatives 6 to 8 at s[at], which is a space: up to the last newline of the run; else all
 * of it, without its last character when another character follows and it is not the only one. */
static size_t space_end(const uint8_t *s, size_t n, size_t at) {
    size_t next, i = at, last = at, after_newline = at;
    unsigned kind;
    for (; (kind = kind_at(s, n, i, &next)) & SPACE; i = next) {
        last = i;
        if (kind & NEWLINE)
            after_newline = next;
    }
    if (after_newline > at)
        return after_newline;
    return i == n || last == at ? i : last;
}

/* End of the piece that starts at `at` < n of the valid text s[n]. The expression covers
 * every character, so the end is past `at`. */
static size_t pretok_next(const uint8_t *s, size_t n, size_t at) {
    size_t next, end;
    unsigned first = kind_at(s, n, at, &next);
    if (first & HAN)
        return run_end(s, n, next, HAN);
    if ((end = word_end(s, n, at)) > at)
        return end;
    if (first & NUMBER) {
        for (int digits = 1; digits < 3 && kind_at(s, n, next, &end) & NUMBER; digits++)
            next = end;
        return next;
    }
    size_t start = s[at] == ' ' ? at + 1 : at;
    if ((end = run_end(s, n, start, LONE)) > start)
        return run_end(s, n, end, NEWLINE);
    return space_end(s, n, at);
}

/* ---- Parts -----------------------------------------------------------------------
 * The official code feeds its regular expression slices of 400,000 characters, cut again
 * where 25,000 characters of one kind, space or not, stand in a row. A cut changes the ids
 * around it, so it is part of the format. */

/* Python's str.isspace: White_Space and the four ASCII separators. */
static bool is_python_space(uint32_t point) {
    return (1u << unicode_kind(point) & SPACE) != 0 || (point >= 0x1c && point <= 0x1f);
}

/* Bytes of the part at the start of the valid text s[n]; *slice_left counts the characters
 * that the current slice may still take. */
static size_t part_bytes(const uint8_t *s, size_t n, uint32_t *slice_left) {
    uint32_t run = 0;
    bool run_is_space = false;
    size_t i = 0;
    while (i < n && *slice_left > 0) {
        size_t width = utf8_width(s[i]);
        bool is_space = is_python_space(utf8_point(s + i, width));
        run = is_space == run_is_space ? run + 1 : 1;
        run_is_space = is_space;
        if (run > RUN_CHARS)
            return i;
        i += width;
        --*slice_left;
    }
    if (*slice_left == 0)
        *slice_left = SLICE_CHARS;
    return i;
}

/* ---- Merging ---------------------------------------------------------------------
 * Tokens of the piece form a doubly linked list over its bytes; pairs that exist wait
 * in a heap ordered by rank, then position, which is "lowest rank, leftmost on ties".
 * A heap entry is stale when its node's pair has changed since: lengths only grow, so a
 * pair never comes back to an old rank. Each merge removes an entry and adds at most two,
 * so the heap never holds more than 2n. */

static void heap_push(k3_tokenizer *t, uint64_t key) {
    size_t i = t->n_heap++;
    for (; i > 0 && t->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = key;
}

static uint64_t heap_pop(k3_tokenizer *t) {
    uint64_t top = t->heap[0], key = t->heap[--t->n_heap];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < t->n_heap) {
        if (child + 1 < t->n_heap && t->heap[child + 1] < t->heap[child])
            child++;
        if (t->heap[child] >= key)
            break;
        t->heap[i] = t->heap[child];
        i = child;
    }
    t->heap[i] = key;
    return top;
}

/* Look up the pair of tokens that starts at `i`, and queue it if it has a rank. */
static void bpe_pair(k3_tokenizer *t, const uint8_t *s, size_t n, uint32_t i) {
    bpe_node *a = &t->node[i];
    a->pair = a->next == n ? NO_ID : vocab_find(t, s + i, t->node[a->next].next - i);
    if (a->pair != NO_ID)
        heap_push(t, (uint64_t)a->pair << 32 | i);
}

static int bpe_reserve(k3_tokenizer *t, size_t n, k3_error *err) {
    if (n <= t->scratch_cap)
        return K3_OK;
    size_t cap = n < 256 ? 256 : n + n / 2;
    bpe_node *node = realloc(t->node, cap * sizeof *node);
    if (node)
        t->node = node;
    uint64_t *heap = realloc(t->heap, 2 * cap * sizeof *heap);
    if (heap)
        t->heap = heap;
    if (!node || !heap) return fail_memory(err, "merging");
    t->scratch_cap = cap;
    return K3_OK;
}

/* Merge s[n] as far as the vocabulary goes; node[0], node[node[0].next], ... are the ids.
 * n fits 32 bits: a piece is at most a prefix and two runs of RUN_CHARS characters. */
static int bpe_merge(k3_tokenizer *t, const uint8_t *s, size_t n, k3_error *err) {
    int rc = bpe_reserve(t, n, err);
    if (rc < 0)
        return rc;
    t->n_heap = 0;
    for (uint32_t i = 0; i < n; i++)
        t->node[i] = (bpe_node){i - 1, i + 1, t->byte_id[s[i]], NO_ID};
    for (uint32_t i = 0; i < n; i++)
        bpe_pair(t, s, n, i);
    while (t->n_heap > 0) {
        uint64_t key = heap_pop(t);
        uint32_t i = (uint32_t)key, rank = (uint32_t)(key >> 32);
        bpe_node *a = &t->node[i];
        if (a->pair != rank)
            continue;
        bpe_node *b = &t->node[a->next];
        a->id = rank;
        a->next = b->next;
        b->pair = NO_ID;
        if (a->next < n)
            t->node[a->next].prev = i;
        bpe_pair(t, s, n, i);
        if (i > 0)
            bpe_pair(t, s, n, a->prev);
    }
    return K3_OK;
}

/* ---- Text to ids ------------------------------------------------------------------- */

typedef struct {
    uint32_t *ids;
    size_t cap, n; /* n goes on counting past cap */
} id_sink;

static void sink_put(id_sink *out, uint32_t id) {
    if (out->n < out->cap)
        out->ids[out->n] = id;
    out->n++;
}

/* Encode valid text in which no special counts. */
static int encode_plain(k3_tokenizer *t, const uint8_t *s, size_t n, id_sink *out, k3_error *err) {
    for (size_t at = 0, end; at < n; at = end) {
        end = pretok_next(s, n, at);
        uint32_t id = vocab_find(t, s + at, end - at);
        if (id != NO_ID) {
            sink_put(out, id);
            continue;
        }
        int rc = bpe_merge(t, s + at, end - at, err);
        if (rc < 0)
            return rc;
        for (size_t i = 0; i < end - at; i = t->node[i].next)
            sink_put(out, t->node[i].id);
    }
    return K3_OK;
}

/* Encode one part: plain text, with specials between when `mode` asks for them. */
static int encode_part(k3_tokenizer *t, const uint8_t *s, size_t n, k3_text_mode mode,
                       id_sink *out, k3_error *err) {
    size_t at = 0;
    for (size_t i = 0; mode == K3_CONTROL && i < n;) {
        uint32_t id = NO_ID;
        size_t n_special = special_at(t, s + i, n - i, &id);
        if (n_special == 0) {
            i++;
            continue;
        }
        int rc = encode_plain(t, s + at, i - at, out, err);
        if (rc < 0)
            return rc;
        sink_put(out, id);
        at = i += n_special;
    }
    return encode_plain(t, s + at, n - at, out, err);
}

int64_t k3_encode(k3_tokenizer *t, const char *text, size_t n_bytes, k3_text_mode mode,
                  uint32_t *ids, size_t cap, k3_error *err) {
    const uint8_t *s = (const uint8_t *)text;
    id_sink out = {ids, cap, 0};
    if (err)
        err->text[0] = '\0';
    for (size_t i = 0; i < n_bytes;) {
        size_t stop = i + utf8_stretch(s + i, n_bytes - i);
        uint32_t slice_left = SLICE_CHARS;
        while (i < stop) {
            size_t n_part = part_bytes(s + i, stop - i, &slice_left);
            int rc = encode_part(t, s + i, n_part, mode, &out, err);
            if (rc < 0)
                return rc;
            i += n_part;
        }
        if (i < n_bytes)
            sink_put(&out, t->byte_id[s[i++]]);
    }
    return (int64_t)out.n;
}

/* ---- Opening -------------------------------------------------------------------- */

/* Open a regular file of the model directory; a FIFO is refused, not waited for. An absent one is
 * no error: *f is NULL. */
static int file_open(const char *dir, const char *name, FILE **f, k3_error *err) {
    size_t n_path = strlen(dir) + strlen(name) + 2;
    char *path = malloc(n_path);
    struct stat st;
    *f = NULL;
    if (!path) return fail_memory(err, name);
    snprintf(path, n_path, "%s/%s", dir, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), why = errno;
    free(path);
    if (fd < 0)
        return why == ENOENT || why == ENOTDIR
                   ? K3_OK
                   : fail(err, K3_EIO, "%s: %s (in %s)", name, strerror(why), dir);
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (*f = fdopen(fd, "rb")) != NULL)
        return K3_OK;
    close(fd);
    return fail(err, K3_EIO, "%s: not a regular file (in %s)", name, dir);
}

/* Read a whole file of at most max_bytes. An absent one is no error: *text is NULL. */
static int file_read(const char *dir, const char *name, size_t max_bytes, char **text,
                     size_t *n_bytes, k3_error *err) {
    size_t n = 0, cap = 0;
    char *buffer = NULL;
    FILE *f;
    *text = NULL;
    *n_bytes = 0;
    int rc = file_open(dir, name, &f, err);
    if (!f)
        return rc;
    for (size_t got = 1; got > 0; n += got) {
        if (n > max_bytes) {
            rc = fail(err, K3_EMODEL, "%s: larger than the %zu bytes it can sensibly have", name,
                      max_bytes);
            goto done;
        }
        if (n == cap) {
            cap = cap > 0 ? 2 * cap : 1u << 16;
            char *more = realloc(buffer, cap);
            if (!more) {
                rc = fail_memory(err, name);
                goto done;
            }
            buffer = more;
        }
        got = fread(buffer + n, 1, cap - n, f);
        if (ferror(f)) {
            rc = fail(err, K3_EIO, "%s: %s (in %s)", name, strerror(errno), dir);
            goto done;
        }
    }
    *text = buffer;
    *n_bytes = n;
    buffer = NULL;
done:
    fclose(f);
    free(buffer);
    return rc;
}

/* Make a tokenizer from the contents of the two files; `config` is NULL when absent. */
static int tokenizer_build(k3_tokenizer **out, const char *ranks, size_t n_ranks_bytes,
                           const char *config, size_t n_config_bytes, k3_error *err) {
    *out = NULL;
    k3_tokenizer *t = calloc(1, sizeof *t);
    if (!t) return fail_memory(err, "the tokenizer");
    int rc = ranks_parse(t, ranks, n_ranks_bytes, err);
    if (rc == K3_OK && config)
        rc = specials_parse(t, config, n_config_bytes, err);
    for (size_t i = 0; !config && rc == K3_OK; i++) {
        if (i == sizeof builtin_specials / sizeof *builtin_specials)
            break;
        const char *name = builtin_specials[i].name;
        rc = special_set(t, t->n_ranks + builtin_specials[i].offset, name, strlen(name), err);
    }
    if (rc == K3_OK)
        rc = specials_finish(t, err);
    if (rc < 0) {
        k3_tokenizer_close(t);
        return rc;
    }
    uint8_t *shrunk = realloc(t->blob, t->blob_bytes);
    if (shrunk)
        t->blob = shrunk;
    *out = t;
    return K3_OK;
}

int k3_tokenizer_open(k3_tokenizer **out, const char *model_dir, k3_error *err) {
    char *ranks = NULL, *config = NULL;
    size_t n_ranks_bytes = 0, n_config_bytes = 0;
    *out = NULL;
    if (err)
        err->text[0] = '\0';
    int rc = file_read(model_dir, RANKS_FILE, RANKS_FILE_MAX, &ranks, &n_ranks_bytes, err);
    if (rc == K3_OK && !ranks)
        rc = fail(err, K3_EMODEL, "%s: not in %s; put the file of the model's release there",
                  RANKS_FILE, model_dir);
    if (rc == K3_OK)
        rc = file_read(model_dir, CONFIG_FILE, CONFIG_FILE_MAX, &config, &n_config_bytes, err);
    if (rc == K3_OK)
        rc = tokenizer_build(out, ranks, n_ranks_bytes, config, n_config_bytes, err);
    free(ranks);
    free(config);
    return rc;
}

void k3_tokenizer_close(k3_tokenizer *t) {
    if (!t)
        return;
    free(t->node);
    free(t->heap);
    free(t->table);
    free(t->len);
    free(t->off);
    free(t->blob);
    free(t);
}

uint32_t k3_tokenizer_size(const k3_tokenizer *t) {
    return t->n_ranks + N_SPECIALS;
}

const char *k3_id_bytes(const k3_tokenizer *t, uint32_t id, size_t *n_bytes) {
    bool is_known = id < k3_tokenizer_size(t);
    if (n_bytes)
        *n_bytes = is_known ? t->len[id] : 0;
    return is_known ? (const char *)t->blob + t->off[id] : NULL;
}

bool k3_id_is_special(const k3_tokenizer *t, uint32_t id) {
    return id >= t->n_ranks && id < k3_tokenizer_size(t);
}
