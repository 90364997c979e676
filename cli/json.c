/* json.c - bytes that grow, and JSON as it comes from outside.
 *
 * A buffer that remembers that memory ran out, so that a row of additions is checked once. JSON is
 * read by json-c and written here: the format asks for Python's way of writing it, once compact
 * with sorted keys, once with blanks, and for numbers as they were typed.
 */
#include "cli/json.h"

#include "k3_json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buf_add(buf *b, const char *p, size_t n) {
    if (b->is_short) return;
    if (b->cap - b->n < n + 1) {
        size_t cap = b->cap * 2 + n + 64;
        char *grown = realloc(b->p, cap);
        if (!grown) {
            b->is_short = true;
            return;
        }
        b->p = grown;
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = '\0';
}

void buf_puts(buf *b, const char *text) { buf_add(b, text, strlen(text)); }

void buf_printf(buf *b, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    buf_puts(b, text);
}

const char *buf_text(const buf *b) { return b->p ? b->p : ""; }

void buf_free(buf *b) {
    free(b->p);
    memset(b, 0, sizeof *b);
}

void buf_add_utf8(buf *b, k3_utf8 *u, const char *p, size_t n) {
    char *out = malloc(3 * (n + 3));
    if (!out) b->is_short = true;
    if (out) buf_add(b, out, k3_utf8_push(u, p, n, out));
    free(out);
}

void buf_add_valid(buf *out, const char *p, size_t n) {
    k3_utf8 u = {{0}, 0};
    buf_add_utf8(out, &u, p, n);
    buf_add_utf8(out, &u, "", 0);
}

void buf_clear(buf *b) {
    b->n = 0;
    if (b->p) b->p[0] = '\0';
}

int text_cut(const char *text, int most) {
    int n = 0;
    while (n < most && text[n]) n++;
    if (!text[n]) return n;
    while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80) n--;
    return n;
}

int text_whole(const char *text) {
    size_t n = strlen(text), i = n;
    while (i > 0 && n - i < 3 && ((unsigned char)text[i - 1] & 0xc0) == 0x80) i--;
    if (i == 0) return (int)n;
    unsigned char first = (unsigned char)text[i - 1];
    size_t width = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    return (int)(n - (i - 1) < width ? i - 1 : n);
}

int error_set(k3_error *err, int status, const char *format, ...) {
    char text[sizeof err->text + 8];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(err->text, sizeof err->text, "%.*s", text_cut(text, (int)sizeof err->text - 1), text);
    return status;
}

int error_memory(k3_error *err) { return error_set(err, K3_ENOMEM, "no memory for text"); }

#define INTEGER_MARK "E+0000000" /* on integers: json-c keeps the text of decimals only */

/* Bytes of the UTF-8 character at p, of n bytes, and its code point; 0: not well formed. */
static size_t utf8_read(const char *p, size_t n, uint32_t *point) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const uint8_t *u = (const uint8_t *)p;
    size_t width = u[0] < 0xc0 ? 0 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : u[0] < 0xf8 ? 4 : 0;
    if (width == 0 || width > n) return 0;
    *point = u[0] & (0x7fu >> width);
    for (size_t i = 1; i < width; i++) {
        if ((u[i] & 0xc0) != 0x80) return 0;
        *point = *point << 6 | (u[i] & 0x3fu);
    }
    bool is_surrogate = *point >= 0xd800 && *point <= 0xdfff;
    return *point < least[width] || *point > 0x10ffff || is_surrogate ? 0 : width;
}

/* One character of a string, an escape included, or of what is between values; its bytes, or 0 where
 * a string is not UTF-8 (json-c 0.16 takes characters that are not the shortest). json-c 0.18
 * in its strict mode refuses every byte above 0x7f in a string, so these become escapes. */
static size_t json_mark_char(buf *out, const char *p, size_t n, bool is_string) {
    uint32_t c;
    bool is_ascii = !is_string || !(p[0] & 0x80);
    size_t width = is_ascii ? 0 : utf8_read(p, n, &c);
    if (is_ascii) {
        width = is_string && p[0] == '\\' && n > 1 && !(p[1] & 0x80) ? 2 : 1;
        buf_add(out, p, width);
    } else if (width && c < 0x10000) {
        buf_printf(out, "\\u%04x", (unsigned)c);
    } else if (width) {
        c -= 0x10000;
        buf_printf(out, "\\u%04x\\u%04x", (unsigned)(0xd800 | c >> 10),
                   (unsigned)(0xdc00 | (c & 0x3ff)));
    }
    return width;
}

/* Write the text as every json-c reads it: strings in ASCII and, where `is_marked`, integers marked.
 * Stops early where `out` reaches `most` bytes, and where a string is not UTF-8. Returns the bytes
 * of p that were taken. */
static size_t json_mark(buf *out, const char *p, size_t n, bool is_marked, size_t most) {
    bool is_string = false;
    size_t i = 0;
    while (i < n && out->n < most && !out->is_short) {
        size_t from = i;
        if (is_string || !strchr("-0123456789", p[i]) || !p[i]) {
            if (p[i] == '"') is_string = !is_string;
            i += json_mark_char(out, p + i, n - i, is_string);
            if (i == from) break;
            continue;
        }
        bool is_integer = is_marked;
        for (; i < n && p[i] && strchr("+-.eE0123456789", p[i]); i++)
            if (strchr("+.eE", p[i])) is_integer = false;
        size_t sign = p[from] == '-';
        bool is_zero_first = i - from > sign + 1 && p[from + sign] == '0'; /* 01 is no number */
        buf_add(out, p + from, i - from);
        if (is_integer && !is_zero_first) buf_puts(out, INTEGER_MARK);
    }
    return i;
}

size_t json_count_values(const char *p, size_t n) {
    size_t n_values = 1;
    bool is_string = false;
    for (size_t i = 0; i < n; i++) {
        if (is_string && p[i] == '\\')
            i++;
        else if (p[i] == '"')
            is_string = !is_string;
        else if (!is_string && (p[i] == ',' || p[i] == ':' || p[i] == '[' || p[i] == '{'))
            n_values++;
    }
    return n_values;
}

/* Text of json_mark's; p[n] is 0. */
static json_object *json_parse_ascii(const char *p, size_t n, int depth, size_t *at,
                                     const char **why) {
    *why = "no memory";
    json_tokener *k = json_tokener_new_ex(depth);
    json_object *o = NULL;
    if (!k) return NULL;
    json_tokener_set_flags(k, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8);
    if (n < INT32_MAX - 1) o = json_tokener_parse_ex(k, p, (int)n + 1); /* the NUL ends numbers */
    enum json_tokener_error e = json_tokener_get_error(k);
    *at = json_tokener_get_parse_end(k);
    *why = n >= INT32_MAX - 1 ? "too long" : json_tokener_error_desc(e);
    while (e == json_tokener_success && *at < n && strchr(" \t\r\n", p[*at]) && p[*at]) ++*at;
    if (e == json_tokener_success && *at < n) {
        *why = "something follows the value";
        e = json_tokener_error_parse_unexpected;
    }
    json_tokener_free(k);
    if (e == json_tokener_success) *why = json_fault(p, n, o);
    if (!*why) return o; /* NULL is the JSON null */
    json_object_put(o);
    return NULL;
}

/* NULL with *why NULL is the JSON null. *why: NULL, or what is wrong at byte *at. */
static json_object *json_parse(const char *p, size_t n, int depth, bool is_marked, size_t *at,
                               const char **why) {
    buf text = {0}, before = {0};
    json_object *o = NULL;
    *at = 0;
    *why = "more than 20000 values";
    if (json_count_values(p, n) > MOST_VALUES) return NULL;
    *why = "no memory";
    size_t taken = json_mark(&text, p, n, is_marked, SIZE_MAX);
    if (!text.is_short && taken < n) {
        *at = taken;
        *why = "invalid UTF-8";
    } else if (!text.is_short) {
        o = json_parse_ascii(buf_text(&text), text.n, depth, at, why);
    }
    if (*why && *at > 0 && taken == n)
        *at = json_mark(&before, p, n, is_marked, *at); /* that place in p */
    buf_free(&text);
    buf_free(&before);
    return o;
}

json_object *json_parse_strict(const char *p, size_t n, int depth, size_t *at, const char **why) {
    return json_parse(p, n, depth, false, at, why);
}

json_object *json_read(const char *p, size_t n, size_t *at, const char **why) {
    return json_parse(p, n, LINE_DEPTH, true, at, why);
}

static int json_key_order(const void *a, const void *b) {
    const struct lh_entry *const *x = a, *const *y = b;
    return strcmp(lh_entry_k(*x), lh_entry_k(*y)); /* bytes of UTF-8 order as code points do */
}

void json_write_string(buf *out, const char *p, size_t n) {
    buf_puts(out, "\"");
    for (size_t i = 0; i < n; i++) {
        const char *known = p[i] ? strchr("\"\\\n\r\t\f\b", p[i]) : NULL;
        if (known)
            buf_printf(out, "\\%c", "\"\\nrtfb"[known - strchr("\"\\\n\r\t\f\b", '"')]);
        else if ((unsigned char)p[i] < 0x20)
            buf_printf(out, "\\u%04x", (unsigned)(unsigned char)p[i]);
        else
            buf_add(out, p + i, 1);
    }
    buf_puts(out, "\"");
}

static void json_write_object(buf *out, json_object *o, bool is_compact) {
    size_t n = (size_t)json_object_object_length(o), i = 0;
    struct lh_entry **entry = malloc((n + 1) * sizeof *entry);
    if (!entry) {
        out->is_short = true;
        return;
    }
    for (struct lh_entry *e = json_object_get_object(o)->head; e; e = e->next) entry[i++] = e;
    if (is_compact) qsort(entry, n, sizeof *entry, json_key_order);
    buf_puts(out, "{");
    for (i = 0; i < n; i++) {
        const char *key = lh_entry_k(entry[i]);
        if (i) buf_puts(out, is_compact ? "," : ", ");
        json_write_string(out, key, strlen(key));
        buf_puts(out, is_compact ? ":" : ": ");
        json_write(out, (json_object *)lh_entry_v(entry[i]), is_compact);
    }
    buf_puts(out, "}");
    free(entry);
}

void json_write(buf *out, json_object *o, bool is_compact) {
    const char *text;
    size_t n;
    switch (json_object_get_type(o)) {
    case json_type_null: buf_puts(out, "null"); return;
    case json_type_boolean: buf_puts(out, json_object_get_boolean(o) ? "true" : "false"); return;
    case json_type_string:
        json_write_string(out, json_object_get_string(o), (size_t)json_object_get_string_len(o));
        return;
    case json_type_object: json_write_object(out, o, is_compact); return;
    case json_type_array:
        buf_puts(out, "[");
        for (size_t i = 0; i < json_object_array_length(o); i++) {
            if (i) buf_puts(out, is_compact ? "," : ", ");
            json_write(out, json_object_array_get_idx(o, i), is_compact);
        }
        buf_puts(out, "]");
        return;
    default:
        text = json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN);
        n = strlen(text);
        size_t n_mark = strlen(INTEGER_MARK);
        if (n > n_mark && strcmp(text + n - n_mark, INTEGER_MARK) == 0) n -= n_mark;
        buf_add(out, text, n);
    }
}

json_object *json_field(json_object *o, const char *key) {
    json_object *value = NULL;
    if (json_object_is_type(o, json_type_object)) json_object_object_get_ex(o, key, &value);
    return value;
}

bool json_is(json_object *o, json_type type) { return json_object_is_type(o, type); }

bool json_equals(json_object *o, const char *text) {
    return json_is(o, json_type_string) && strcmp(json_object_get_string(o), text) == 0;
}

const char *json_string(json_object *o, const char *key) {
    json_object *value = json_field(o, key);
    return json_is(value, json_type_string) ? json_object_get_string(value) : NULL;
}
