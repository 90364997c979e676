/* k3_chat.c - K3's chat format, and `k3 chat`: a conversation on a terminal or through pipes.
 *
 *   1 Bytes and JSON             5 The conversation: ids, turns, undo
 *   2 Segments and tags          6 One turn
 *   3 OpenAI messages            7 Showing a reply
 *   4 A reply, read by its ids   8 Commands      9 Lines in      10 The command
 *
 * What holds everywhere: a conversation is one row of ids that only grows at its end. Rendered
 * messages and generated ids are appended and never made anew, so nothing is tokenised twice and a
 * turn computes its new ids only. Text is encoded apart from control tokens (K3-SPEC 4.4): no text,
 * whoever wrote it, becomes one. The ids past the session's position are waiting to be run; that
 * is how a reply that was stopped is closed, and how anything that cost the session its state (a
 * step given up, an undo without a snapshot) is made good with the next turn.
 */
#include "k3_cli.h"

#include "cli/calls.h"
#include "cli/complete.h"
#include "k3_json.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <locale.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#ifdef K3_HAVE_libedit
#include <histedit.h>
#endif

#define NO_ID UINT32_MAX

/* ==== 1. Bytes and JSON ==============================================================
 *
 * A buffer that remembers that memory ran out, so that a row of additions is checked once. JSON is
 * read by json-c and written here: the format asks for Python's way of writing it, once compact
 * with sorted keys, once with blanks, and for numbers as they were typed.
 */
typedef struct {
    char *p;
    size_t n, cap;
    bool is_short; /* memory ran out: what is here is not all */
} buf;

static void buf_add(buf *b, const char *p, size_t n) {
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

static void buf_puts(buf *b, const char *text) { buf_add(b, text, strlen(text)); }

PRINTF_LIKE(2, 3) static void buf_printf(buf *b, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    buf_puts(b, text);
}

static const char *buf_text(const buf *b) { return b->p ? b->p : ""; }

static void buf_free(buf *b) {
    free(b->p);
    memset(b, 0, sizeof *b);
}

/* Bytes of a token or of the user's, as valid UTF-8; n 0 flushes. */
static void buf_add_utf8(buf *b, k3_utf8 *u, const char *p, size_t n) {
    char *out = malloc(3 * (n + 3));
    if (!out) b->is_short = true;
    if (out) buf_add(b, out, k3_utf8_push(u, p, n, out));
    free(out);
}

/* Bytes of the text's first characters, at most `most`: for "%.*s", which knows bytes only. */
static int text_cut(const char *text, int most) {
    int n = 0;
    while (n < most && text[n]) n++;
    if (!text[n]) return n;
    while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80) n--;
    return n;
}

/* Bytes of a text without the part of a character that may be left at its end. */
static int text_whole(const char *text) {
    size_t n = strlen(text), i = n;
    while (i > 0 && n - i < 3 && ((unsigned char)text[i - 1] & 0xc0) == 0x80) i--;
    if (i == 0) return (int)n;
    unsigned char first = (unsigned char)text[i - 1];
    size_t width = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    return (int)(n - (i - 1) < width ? i - 1 : n);
}

PRINTF_LIKE(3, 4) static int error_set(k3_error *err, int status, const char *format, ...) {
    char text[sizeof err->text + 8];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(err->text, sizeof err->text, "%.*s", text_cut(text, (int)sizeof err->text - 1), text);
    return status;
}

static int error_memory(k3_error *err) { return error_set(err, K3_ENOMEM, "no memory for text"); }

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

enum { LINE_DEPTH = 64, NOTES_DEPTH = 80, MOST_VALUES = 20000 };

/* At least as many as the text has values: a tree takes memory that no budget counts, some hundred
 * bytes for each of them. */
static size_t json_count_values(const char *p, size_t n) {
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

static json_object *json_parse_strict(const char *p, size_t n, int depth, size_t *at,
                                      const char **why) {
    return json_parse(p, n, depth, false, at, why);
}

/* A JSON value, every number with its own text. */
static json_object *json_read(const char *p, size_t n, size_t *at, const char **why) {
    return json_parse(p, n, LINE_DEPTH, true, at, why);
}

static int json_key_order(const void *a, const void *b) {
    const struct lh_entry *const *x = a, *const *y = b;
    return strcmp(lh_entry_k(*x), lh_entry_k(*y)); /* bytes of UTF-8 order as code points do */
}

static void json_write_string(buf *out, const char *p, size_t n) {
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

static void json_write(buf *out, json_object *o, bool is_compact);

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

/* As json.dumps of Python writes it without ASCII escapes: keys sorted and no blanks, or keys in
 * order with ", " and ": ". */
static void json_write(buf *out, json_object *o, bool is_compact) {
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

static json_object *json_field(json_object *o, const char *key) {
    json_object *value = NULL;
    if (json_object_is_type(o, json_type_object)) json_object_object_get_ex(o, key, &value);
    return value;
}

static bool json_is(json_object *o, json_type type) { return json_object_is_type(o, type); }

static bool json_equals(json_object *o, const char *text) {
    return json_is(o, json_type_string) && strcmp(json_object_get_string(o), text) == 0;
}

/* The text of a string field, or NULL. */
static const char *json_string(json_object *o, const char *key) {
    json_object *value = json_field(o, key);
    return json_is(value, json_type_string) ? json_object_get_string(value) : NULL;
}

/* ==== 2. Segments and tags ===========================================================
 *
 * K3-SPEC 4.4. A rendered piece is a row of segments, each encoded on its own, so that words never
 * merge across a border and text cannot reach into markup. Control tokens are ids by name.
 */
typedef struct {
    uint32_t open, close, sep, end; /* <|open|> <|close|> <|sep|> <|end_of_msg|>      */
    uint32_t stop[4];               /* end, [EOS], [EOT], the model's eos; NO_ID: none */
} chat_marks;

typedef struct {
    size_t at, n, first_id, n_ids; /* text and ids, in the buffers of xtml */
    bool is_control;
} xtml_segment;

typedef struct {
    buf text;
    xtml_segment *segment;
    size_t n_segment, cap_segment;
    uint32_t *id;
    size_t n_id;
} xtml;

static void xtml_free(xtml *x) {
    buf_free(&x->text);
    free(x->segment);
    free(x->id);
    memset(x, 0, sizeof *x);
}

static void xtml_add(xtml *x, const char *p, size_t n, bool is_control) {
    if (n == 0) return;
    if (x->n_segment == x->cap_segment) {
        size_t cap = x->cap_segment * 2 + 32;
        xtml_segment *grown = realloc(x->segment, cap * sizeof *grown);
        if (!grown) {
            x->text.is_short = true;
            return;
        }
        x->segment = grown;
        x->cap_segment = cap;
    }
    x->segment[x->n_segment++] = (xtml_segment){x->text.n, n, 0, 0, is_control};
    buf_add(&x->text, p, n);
}

static void xtml_text(xtml *x, const char *p, size_t n) { xtml_add(x, p, n, false); }
static void xtml_puts(xtml *x, const char *text) { xtml_add(x, text, strlen(text), false); }
static void xtml_control(xtml *x, const char *name) { xtml_add(x, name, strlen(name), true); }

/* An open tag is xtml_begin, any number of xtml_attribute, xtml_sep. */
static void xtml_begin(xtml *x, const char *tag) {
    xtml_control(x, "<|open|>");
    xtml_puts(x, tag);
}

static void xtml_attribute(xtml *x, const char *key, const char *value, size_t n) {
    buf escaped = {0};
    char spaced[16];
    for (size_t i = 0; i < n; i++) switch (value[i]) {
        case '&': buf_puts(&escaped, "&amp;"); break;
        case '"': buf_puts(&escaped, "&quot;"); break;
        default: buf_add(&escaped, value + i, 1);
        }
    snprintf(spaced, sizeof spaced, " %s", key);
    xtml_puts(x, spaced);
    xtml_puts(x, "=\"");
    xtml_text(x, escaped.p, escaped.n);
    xtml_puts(x, "\"");
    if (escaped.is_short) x->text.is_short = true;
    buf_free(&escaped);
}

static void xtml_attribute_text(xtml *x, const char *key, const char *value) {
    xtml_attribute(x, key, value, strlen(value));
}

static void xtml_sep(xtml *x) { xtml_control(x, "<|sep|>"); }

static void xtml_open(xtml *x, const char *tag) {
    xtml_begin(x, tag);
    xtml_sep(x);
}

static void xtml_close(xtml *x, const char *tag) {
    xtml_control(x, "<|close|>");
    xtml_puts(x, tag);
    xtml_sep(x);
}

static void xtml_end_message(xtml *x) {
    xtml_close(x, "message");
    xtml_control(x, "<|end_of_msg|>");
}

/* message role="system" type="TYPE", its body in one segment. */
static void xtml_system_type(xtml *x, const char *type, const char *body) {
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "system");
    xtml_attribute_text(x, "type", type);
    xtml_sep(x);
    xtml_puts(x, body);
    xtml_end_message(x);
}

/* What the assistant goes on from. */
static void xtml_prompt(xtml *x, bool thinks) {
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "assistant");
    xtml_sep(x);
    xtml_open(x, thinks ? "think" : "response");
}

static void xtml_effort(xtml *x, const char *effort) {
    buf body = {0};
    buf_puts(&body, "`thinking_effort` guides on how much to think in your thinking channel (not "
                    "including the response channel), supported values include `low`, `medium`, "
                    "`high`, and `max`.\nNow the system is invoked with `thinking_effort=");
    buf_printf(&body, "%s`.", effort);
    xtml_system_type(x, "thinking-effort", buf_text(&body));
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

/* A body with JSON inside: before, the value, after. */
static void xtml_system_json(xtml *x, const char *type, const char *before, json_object *value,
                             const char *after) {
    buf body = {0};
    buf_puts(&body, before);
    json_write(&body, value, true);
    buf_puts(&body, after);
    xtml_system_type(x, type, buf_text(&body));
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

/* Ids of all segments. */
static int xtml_encode(xtml *x, k3_tokenizer *t, k3_error *err) {
    if (x->text.is_short) return error_memory(err);
    x->id = malloc((x->text.n + 1) * sizeof *x->id); /* at most one id for each byte */
    if (!x->id) return error_memory(err);
    for (size_t i = 0; i < x->n_segment; i++) {
        xtml_segment *s = &x->segment[i];
        int64_t n = k3_encode(t, x->text.p + s->at, s->n, s->is_control ? K3_CONTROL : K3_TEXT,
                              x->id + x->n_id, x->text.n - x->n_id, err);
        if (n < 0) return (int)n;
        s->first_id = x->n_id;
        s->n_ids = (size_t)n;
        x->n_id += (size_t)n;
    }
    return K3_OK;
}

/* The id of a special by its name, NO_ID when the tokenizer has none of it. */
static uint32_t mark_find(k3_tokenizer *t, const char *name) {
    uint32_t id = NO_ID;
    k3_error err;
    int64_t n = k3_encode(t, name, strlen(name), K3_CONTROL, &id, 1, &err);
    return n == 1 && k3_id_is_special(t, id) ? id : NO_ID;
}

/* All marks of the format, or which one is missing. */
static int marks_find(chat_marks *m, k3_tokenizer *t, k3_error *err) {
    static const char *const name[] = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"};
    uint32_t *const id[] = {&m->open, &m->close, &m->sep, &m->end};
    for (size_t i = 0; i < COUNT(name); i++)
        if ((*id[i] = mark_find(t, name[i])) == NO_ID)
            return error_set(err, K3_EMODEL,
                             "this tokenizer has no special token %s: its model was not made for "
                             "chat; `k3 run` continues a text",
                             name[i]);
    m->stop[0] = m->end;
    m->stop[1] = mark_find(t, "[EOS]");
    m->stop[2] = mark_find(t, "[EOT]");
    m->stop[3] = NO_ID;
    return K3_OK;
}

static bool mark_is_stop(const chat_marks *m, uint32_t id) {
    for (size_t i = 0; i < COUNT(m->stop); i++)
        if (id == m->stop[i] && id != NO_ID) return true;
    return false;
}

/* ==== 3. OpenAI messages =============================================================
 *
 * Messages as the API takes them, to segments. What the format cannot say (pictures, a role it does
 * not have, a tool result that answers no call) is an error that names the place; nothing is
 * dropped in silence.
 */
typedef struct {
    bool thinks;
    const char *effort; /* "max", ...; NULL: no message about it     */
    json_object *calls; /* tool_calls of the last assistant message  */
    unsigned n_tool;    /* tool results since then                   */
} render_state;

/* Text of a content: a string, null, or an array of text parts, which are joined. */
static int content_read(buf *out, json_object *content, const char *where, k3_error *err) {
    if (!content) return K3_OK;
    if (json_is(content, json_type_string)) {
        buf_add(out, json_object_get_string(content), (size_t)json_object_get_string_len(content));
        return out->is_short ? error_memory(err) : K3_OK;
    }
    if (!json_is(content, json_type_array))
        return error_set(err, K3_EUSAGE, "%s.content: neither text nor an array of parts", where);
    for (size_t i = 0; i < json_object_array_length(content); i++) {
        json_object *part = json_object_array_get_idx(content, i), *text = json_field(part, "text");
        const char *type = json_string(part, "type");
        if (!type || strcmp(type, "text") != 0)
            return error_set(err, K3_EUSAGE,
                             "%s.content[%zu]: '%.*s' is not text, and k3 reads "
                             "text only",
                             where, i, text_cut(type ? type : "(no type)", 40),
                             type ? type : "(no type)");
        if (!json_is(text, json_type_string))
            return error_set(err, K3_EUSAGE, "%s.content[%zu]: has no text", where, i);
        buf_add(out, json_object_get_string(text), (size_t)json_object_get_string_len(text));
    }
    return out->is_short ? error_memory(err) : K3_OK;
}

static int field_check(json_object *o, const char *const *known, const char *where, k3_error *err) {
    for (struct lh_entry *e = json_object_get_object(o)->head; e; e = e->next) {
        size_t i = 0;
        while (known[i] && strcmp(known[i], lh_entry_k(e)) != 0) i++;
        if (!known[i] && lh_entry_v(e))
            return error_set(err, K3_EUSAGE, "%s: k3 knows no field '%.*s' here", where,
                             text_cut(lh_entry_k(e), 60), (const char *)lh_entry_k(e));
    }
    return K3_OK;
}

/* user, and system without tools. */
static int render_plain(xtml *x, json_object *m, const char *role, const char *where,
                        k3_error *err) {
    json_object *name = json_field(m, "name");
    buf body = {0};
    int rc = content_read(&body, json_field(m, "content"), where, err);
    if (rc == K3_OK && !json_object_object_get_ex(m, "content", NULL))
        rc = error_set(err, K3_EUSAGE, "%s: a message of role %s without content", where, role);
    if (rc == K3_OK && name && !json_is(name, json_type_string))
        rc = error_set(err, K3_EUSAGE, "%s.name: not a text", where);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", role);
    if (name)
        xtml_attribute(x, "name", json_object_get_string(name),
                       (size_t)json_object_get_string_len(name));
    xtml_sep(x);
    xtml_text(x, body.p, body.n);
    xtml_end_message(x);
    buf_free(&body);
    return rc;
}

static bool has_tools(json_object *tools) {
    return json_is(tools, json_type_array) && json_object_array_length(tools) > 0;
}

static int render_system(xtml *x, json_object *m, const char *where, k3_error *err) {
    json_object *tools = json_field(m, "tools"), *content = json_field(m, "content");
    if (!has_tools(tools)) return render_plain(x, m, "system", where, err);
    if (content && !json_equals(content, ""))
        return error_set(err, K3_EUSAGE,
                         "%s: a system message that declares tools has no content; "
                         "give it in one of its own",
                         where);
    xtml_system_json(x, "tool-declare",
                     "## New Tools Available\nThe system dynamically extends the toolset via "
                     "lazy-loading.\nYou have access to all existing and extended tools.\nHere are "
                     "the specs for the extended tools.\n\n```json\n",
                     tools, "\n```");
    return K3_OK;
}

static void render_argument(xtml *x, const char *key, json_object *value) {
    static const char *const type[] = {
        [json_type_null] = "null",     [json_type_boolean] = "boolean",
        [json_type_double] = "number", [json_type_int] = "number",
        [json_type_object] = "object", [json_type_array] = "array",
        [json_type_string] = "string"};
    buf body = {0};
    xtml_begin(x, "argument");
    xtml_attribute_text(x, "key", key);
    xtml_attribute_text(x, "type", type[json_object_get_type(value)]);
    xtml_sep(x);
    if (json_is(value, json_type_string))
        xtml_text(x, json_object_get_string(value), (size_t)json_object_get_string_len(value));
    else
        json_write(&body, value, false);
    xtml_text(x, body.p, body.n);
    xtml_close(x, "argument");
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

/* call tool="NAME" index="i" with its arguments, or with their text when that is no JSON object. */
static int render_call(xtml *x, json_object *call, size_t i, const char *where, k3_error *err) {
    json_object *function = json_field(call, "function"),
                *given = json_field(function, "arguments");
    const char *name = json_string(function, "name"), *why = NULL;
    char index[24];
    size_t at;
    if (!name)
        return error_set(err, K3_EUSAGE, "%s.tool_calls[%zu]: has no function with a name", where,
                         i);
    if (given && !json_is(given, json_type_string) && !json_is(given, json_type_object))
        return error_set(err, K3_EUSAGE,
                         "%s.tool_calls[%zu]: arguments are neither a text nor an "
                         "object",
                         where, i);
    snprintf(index, sizeof index, "%zu", i + 1);
    xtml_begin(x, "call");
    xtml_attribute_text(x, "tool", name);
    xtml_attribute_text(x, "index", index);
    xtml_sep(x);
    json_object *arguments = json_object_get(given);
    if (json_is(given, json_type_string)) {
        json_object_put(arguments);
        arguments = json_read(json_object_get_string(given),
                              (size_t)json_object_get_string_len(given), &at, &why);
    }
    if (json_is(arguments, json_type_object)) {
        for (struct lh_entry *e = json_object_get_object(arguments)->head; e; e = e->next)
            render_argument(x, lh_entry_k(e), (json_object *)lh_entry_v(e));
    } else if (given) {
        xtml_begin(x, "json");
        xtml_attribute_text(x, "type", "object");
        xtml_sep(x);
        xtml_text(x, json_object_get_string(given), (size_t)json_object_get_string_len(given));
        xtml_close(x, "json");
    }
    json_object_put(arguments);
    xtml_close(x, "call");
    return K3_OK;
}

static int render_assistant(xtml *x, json_object *m, render_state *s, const char *where,
                            k3_error *err) {
    json_object *calls = json_field(m, "tool_calls"), *reason = json_field(m, "reasoning_content");
    buf think = {0}, body = {0};
    if (!reason) reason = json_field(m, "reasoning");
    int rc = content_read(&body, json_field(m, "content"), where, err);
    if (rc == K3_OK) rc = content_read(&think, reason, where, err);
    if (rc == K3_OK && calls && !json_is(calls, json_type_array))
        rc = error_set(err, K3_EUSAGE, "%s.tool_calls: not an array", where);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "assistant");
    xtml_sep(x);
    if (s->thinks) {
        xtml_open(x, "think");
        xtml_text(x, think.p, think.n);
        xtml_close(x, "think");
    }
    xtml_open(x, "response");
    xtml_text(x, body.p, body.n);
    xtml_close(x, "response");
    if (has_tools(calls)) xtml_open(x, "tools");
    for (size_t i = 0; rc == K3_OK && has_tools(calls) && i < json_object_array_length(calls); i++)
        rc = render_call(x, json_object_array_get_idx(calls, i), i, where, err);
    if (has_tools(calls)) xtml_close(x, "tools");
    xtml_end_message(x);
    buf_free(&think);
    buf_free(&body);
    json_object_put(s->calls);
    s->calls = json_object_get(calls);
    s->n_tool = 0;
    return rc;
}

/* Which call of the last assistant message the result `m` answers; -1: none. */
static int call_index(const render_state *s, json_object *m) {
    const char *id = json_string(m, "tool_call_id");
    for (size_t i = 0; id && has_tools(s->calls) && i < json_object_array_length(s->calls); i++) {
        const char *call_id = json_string(json_object_array_get_idx(s->calls, i), "id");
        if (call_id && strcmp(call_id, id) == 0) return (int)i;
    }
    return -1;
}

static int render_tool(xtml *x, json_object *m, render_state *s, const char *where, k3_error *err) {
    int call = call_index(s, m);
    const char *name = json_string(m, "name");
    char index[24];
    buf body = {0};
    if (call >= 0)
        name = json_string(
            json_field(json_object_array_get_idx(s->calls, (size_t)call), "function"), "name");
    if (!name)
        return error_set(err, K3_EUSAGE,
                         "%s: this tool result names no tool, and its tool_call_id "
                         "is none of the calls of the last assistant message",
                         where);
    int rc = content_read(&body, json_field(m, "content"), where, err);
    snprintf(index, sizeof index, "%u", ++s->n_tool);
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "tool");
    xtml_attribute_text(x, "tool", name);
    xtml_attribute_text(x, "index", index);
    xtml_sep(x);
    xtml_text(x, body.p, body.n);
    xtml_end_message(x);
    buf_free(&body);
    return rc;
}

/* Fields that a message of a role may have; null says nothing and may stand anywhere. */
static int message_check(json_object *m, const char *role, const char *where, k3_error *err) {
    static const char *const plain[] = {"role", "content", "name", NULL};
    static const char *const system[] = {"role", "content", "name", "tools", NULL};
    static const char *const assistant[] = {
        "role", "content", "name", "tool_calls", "reasoning_content", "reasoning", NULL};
    static const char *const tool[] = {"role", "content", "name", "tool_call_id", NULL};
    if (strcmp(role, "system") == 0) return field_check(m, system, where, err);
    if (strcmp(role, "assistant") == 0) return field_check(m, assistant, where, err);
    return field_check(m, strcmp(role, "tool") == 0 ? tool : plain, where, err);
}

/* messages[from, to), all of them tool results: in the order of the calls if all answer one. */
static int render_tools(xtml *x, json_object *messages, size_t from, size_t to, render_state *s,
                        k3_error *err) {
    size_t n = to - from;
    size_t *order = malloc(n * sizeof *order);
    bool is_known = true;
    char where[48];
    int rc = K3_OK;
    if (!order) return error_memory(err);
    for (size_t i = 0; i < n; i++) {
        order[i] = from + i;
        if (call_index(s, json_object_array_get_idx(messages, from + i)) < 0) is_known = false;
    }
    for (size_t i = 1; is_known && i < n; i++) { /* few, and stable */
        size_t moved = order[i], j = i;
        int at = call_index(s, json_object_array_get_idx(messages, moved));
        for (; j > 0 && call_index(s, json_object_array_get_idx(messages, order[j - 1])) > at; j--)
            order[j] = order[j - 1];
        order[j] = moved;
    }
    for (size_t i = 0; i < n && rc == K3_OK; i++) {
        snprintf(where, sizeof where, "messages[%zu]", order[i]);
        rc = message_check(json_object_array_get_idx(messages, order[i]), "tool", where, err);
        if (rc == K3_OK)
            rc = render_tool(x, json_object_array_get_idx(messages, order[i]), s, where, err);
    }
    free(order);
    return rc;
}

static int render_messages(xtml *x, json_object *messages, render_state *s, k3_error *err) {
    char where[48];
    int rc = K3_OK;
    if (!json_is(messages, json_type_array))
        return error_set(err, K3_EUSAGE, "messages: not an array");
    size_t n = json_object_array_length(messages);
    for (size_t i = 0, to; i < n && rc == K3_OK; i = to) {
        json_object *m = json_object_array_get_idx(messages, i);
        const char *role = json_string(m, "role");
        snprintf(where, sizeof where, "messages[%zu]", i);
        to = i + 1;
        if (role) rc = message_check(m, role, where, err);
        if (rc != K3_OK) break;
        if (!role)
            rc = error_set(err, K3_EUSAGE, "%s: has no role", where);
        else if (strcmp(role, "user") == 0)
            rc = render_plain(x, m, "user", where, err);
        else if (strcmp(role, "system") == 0)
            rc = render_system(x, m, where, err);
        else if (strcmp(role, "assistant") == 0)
            rc = render_assistant(x, m, s, where, err);
        else if (strcmp(role, "tool") == 0) {
            while (to < n &&
                   json_equals(json_field(json_object_array_get_idx(messages, to), "role"), "tool"))
                to++;
            rc = render_tools(x, messages, i, to, s, err);
        } else
            rc = error_set(err, K3_EUSAGE, "%s: role '%.*s' is not system, user, assistant or tool",
                           where, text_cut(role, 40), role);
    }
    return rc;
}

/* tool_choice and response_format, which hold for one reply and follow the history. */
static int render_choices(xtml *x, json_object *root, k3_error *err) {
    json_object *choice = json_field(root, "tool_choice"), *format;
    if (json_equals(choice, "required"))
        xtml_system_type(x, "tool-choice",
                         "The system is invoked with `tool_choice=required`.\nYou MUST call tools "
                         "in the next message.");
    else if (json_equals(choice, "none"))
        xtml_system_type(x, "tool-choice",
                         "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any "
                         "tools in the next message.");
    else if (choice && !json_equals(choice, "auto"))
        return error_set(err, K3_EUSAGE, "tool_choice: not auto, none or required");
    format = json_field(root, "response_format");
    if (!format || json_equals(json_field(format, "type"), "text")) return K3_OK;
    if (json_equals(json_field(format, "type"), "json_object")) {
        xtml_system_type(x, "response-format",
                         "The system is invoked with `response_format=json_object`.\nYour response "
                         "must be raw JSON data without markdown code blocks (```json) or any "
                         "additional formatting.");
        return K3_OK;
    }
    json_object *schema = json_field(json_field(format, "json_schema"), "schema");
    if (!json_equals(json_field(format, "type"), "json_schema") || !schema)
        return error_set(err, K3_EUSAGE,
                         "response_format: not text, json_object, or json_schema "
                         "with a json_schema.schema");
    xtml_system_json(
        x, "response-format",
        "The system is invoked with `response_format=json_schema`.\nYour response must "
        "be raw JSON data without markdown code blocks (```json) or any additional "
        "formatting.\nThe JSON data must match the following schema:\n```json\n",
        schema, "\n```");
    return K3_OK;
}

/* What stands before the messages. */
static void render_header(xtml *x, json_object *tools, const render_state *s) {
    if (has_tools(tools))
        xtml_system_json(x, "tool-declare",
                         "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
                         "```json\n",
                         tools, "\n```");
    if (s->thinks && s->effort) xtml_effort(x, s->effort);
}

static const char *const EFFORT[] = {"low", "medium", "high", "max", NULL};

static int effort_read(render_state *s, json_object *value, const char *key, k3_error *err) {
    s->effort = NULL;
    if (!value || json_equals(value, "none")) return K3_OK;
    for (size_t i = 0; EFFORT[i]; i++)
        if (json_equals(value, EFFORT[i])) s->effort = EFFORT[i];
    return s->effort ? K3_OK
                     : error_set(err, K3_EUSAGE, "%s: not low, medium, high, max or none", key);
}

/* thinking: true, false, {"type": "enabled"}; thinking_effort or reasoning_effort. */
static int render_settings(render_state *s, json_object *root, k3_error *err) {
    static const char *const key[] = {"reasoning_effort", "thinking_effort"};
    json_object *thinking = json_field(root, "thinking"), *value;
    if (json_is(thinking, json_type_object)) {
        if (!json_equals(json_field(thinking, "type"), "enabled") &&
            !json_equals(json_field(thinking, "type"), "disabled"))
            return error_set(err, K3_EUSAGE, "thinking.type: not enabled or disabled");
        s->thinks = json_equals(json_field(thinking, "type"), "enabled");
    } else if (json_is(thinking, json_type_boolean)) {
        s->thinks = json_object_get_boolean(thinking);
    } else if (thinking) {
        return error_set(err, K3_EUSAGE, "thinking: not true, false or an object");
    }
    for (size_t i = 0; i < COUNT(key); i++) {
        if (!json_object_object_get_ex(root, key[i], &value)) continue;
        int rc = effort_read(s, value, key[i], err);
        if (rc < 0) return rc;
    }
    return K3_OK;
}

/* The messages of what `k3 chat --json` and --render take: a text, a message, an array of messages,
 * or an object with one. *messages is the caller's. */
static int request_messages(json_object *root, json_object **messages, k3_error *err) {
    static const char *const known[] = {
        "messages", "tools",    "tool_choice",     "response_format",
        "stream",   "thinking", "thinking_effort", "reasoning_effort",
        NULL};
    *messages = json_field(root, "messages");
    if (json_is(root, json_type_string)) {
        json_object *m = json_object_new_object();
        json_put(m, "role", json_object_new_string("user"));
        json_put(m, "content", json_object_get(root));
        *messages = json_object_new_array();
        json_object_array_add(*messages, m);
        return K3_OK;
    }
    if (json_string(root, "role")) {
        *messages = json_object_new_array();
        json_object_array_add(*messages, json_object_get(root));
        return K3_OK;
    }
    if (json_is(root, json_type_array)) *messages = root;
    json_object_get(*messages);
    if (!*messages)
        return error_set(err, K3_EUSAGE,
                         "neither a text, a message with a role, an array of "
                         "messages nor an object with one");
    if (!json_is(*messages, json_type_array))
        return error_set(err, K3_EUSAGE, "messages: not an array");
    if (*messages == root) return K3_OK;
    json_object *tools = json_field(root, "tools"), *stream = json_field(root, "stream");
    if (tools && !json_is(tools, json_type_array))
        return error_set(err, K3_EUSAGE, "tools: not an array");
    if (stream && !json_is(stream, json_type_boolean))
        return error_set(err, K3_EUSAGE, "stream: not true or false");
    return field_check(root, known, "request", err);
}

static bool is_request(json_object *root) {
    return json_is(root, json_type_object) && !json_string(root, "role");
}

/* A whole request with the prompt for the reply. */
static int render_request(xtml *x, json_object *root, render_state *s, k3_error *err) {
    json_object *messages = NULL;
    int rc = request_messages(root, &messages, err);
    if (rc == K3_OK && is_request(root)) rc = render_settings(s, root, err);
    if (rc == K3_OK) {
        render_header(x, is_request(root) ? json_field(root, "tools") : NULL, s);
        rc = render_messages(x, messages, s, err);
    }
    if (rc == K3_OK && is_request(root)) rc = render_choices(x, root, err);
    xtml_prompt(x, s->thinks);
    json_object_put(messages);
    return rc;
}

/* ==== 4. A reply, read by its ids ====================================================
 *
 * What the model says has the same shape as what it reads: elements between control ids. They are
 * followed on ids, not on text. The model may break the shape at any point, and a reply may be
 * stopped at any point; reply_close says what is missing to end the message properly.
 */
enum { MAX_DEPTH = 8 };

typedef struct {
    const chat_marks *marks;
    const k3_tokenizer *t;
    char element[MAX_DEPTH][24]; /* open elements, the innermost last                 */
    int depth;
    enum { NO_TAG, OPEN_TAG, CLOSE_TAG } tag; /* inside a tag, and its text so far    */
    buf tag_text;
    bool has_response, is_over; /* is_over: end of message was met                    */
    buf think, answer;          /* valid UTF-8 as far as it goes                      */
    k3_utf8 think_utf8, answer_utf8, tag_utf8;
    call_list call;
    int call_at, value_at; /* depth of the call being read, and of its argument; 0: none */
    bool is_closing;       /* what comes is reply_close's, not the model's           */
} reply;

/* False: the element is too deep to be followed. */
static bool reply_push_element(reply *r, const char *name) {
    if (r->depth == MAX_DEPTH) return false;
    snprintf(r->element[r->depth++], sizeof r->element[0], "%.*s", text_cut(name, 23), name);
    if (strcmp(name, "response") == 0) r->has_response = true;
    return true;
}

/* JSON as the format writes it, for calls_init. */
static bool reply_value(const char *body, size_t n, struct printbuf *out) {
    const char *why;
    size_t at;
    json_object *value = json_read(body, n, &at, &why);
    buf text = {0};
    if (!why) json_write(&text, value, false);
    json_object_put(value);
    bool ok = !why && !text.is_short && text.n < INT_MAX / 2 &&
              printbuf_memappend(out, buf_text(&text), (int)text.n) >= 0;
    buf_free(&text);
    return ok;
}

/* A reply to the prompt of xtml_prompt. */
static void reply_init(reply *r, const chat_marks *marks, const k3_tokenizer *t, bool thinks,
                       uint64_t n_call) {
    memset(r, 0, sizeof *r);
    r->marks = marks;
    r->t = t;
    calls_init(&r->call, n_call, reply_value);
    reply_push_element(r, "message");
    reply_push_element(r, thinks ? "think" : "response");
}

static void reply_free(reply *r) {
    buf *const all[] = {&r->tag_text, &r->think, &r->answer};
    for (size_t i = 0; i < COUNT(all); i++) buf_free(all[i]);
    calls_free(&r->call);
}

/* Memory ran out: what the reply says is not all that it said. */
static bool reply_is_short(const reply *r) {
    return r->tag_text.is_short || r->think.is_short || r->answer.is_short || r->call.is_short;
}

static bool reply_is_in(const reply *r, const char *name) {
    return r->depth > 0 && strcmp(r->element[r->depth - 1], name) == 0;
}

/* The value of an attribute of the tag, unescaped; empty when it is not there. Attributes are read
 * one behind the other: what looks like one inside a value is text. */
static void tag_attribute(const buf *tag, const char *key, buf *value) {
    const char *p = buf_text(tag);
    size_t n_key = strlen(key);
    bool is_it = false;
    value->n = 0;
    buf_puts(value, "");
    for (p += strcspn(p, " "); *p == ' ' && !is_it;) {
        const char *name = ++p;
        p = strstr(p, "=\"");
        if (!p) return;
        is_it = (size_t)(p - name) == n_key && memcmp(name, key, n_key) == 0;
        for (p += 2; *p && *p != '"';) {
            bool is_amp = strncmp(p, "&amp;", 5) == 0, is_quote = strncmp(p, "&quot;", 6) == 0;
            if (is_it) buf_add(value, is_amp ? "&" : is_quote ? "\"" : p, 1);
            p += is_amp ? 5 : is_quote ? 6 : 1;
        }
        p += *p == '"';
    }
}

static void buf_clear(buf *b) {
    b->n = 0;
    if (b->p) b->p[0] = '\0';
}

/* A call counts where none is open, its arguments directly inside it; deeper elements of these names
 * are elements like any other. */
static void reply_open(reply *r) {
    char name[24];
    buf key = {0}, type = {0};
    snprintf(name, sizeof name, "%.*s", (int)strcspn(buf_text(&r->tag_text), " "),
             buf_text(&r->tag_text));
    if (!reply_push_element(r, name) || r->is_closing) return;
    bool is_in_call = r->call_at && r->call_at == r->depth - 1;
    if (strcmp(name, "call") == 0 && !r->call_at) {
        r->call_at = r->depth;
        tag_attribute(&r->tag_text, "tool", &key);
        calls_begin(&r->call, buf_text(&key));
    } else if (strcmp(name, "argument") == 0 && is_in_call) {
        r->value_at = r->depth;
        tag_attribute(&r->tag_text, "key", &key);
        tag_attribute(&r->tag_text, "type", &type);
        calls_argument(&r->call, buf_text(&key), buf_text(&type));
    } else if (strcmp(name, "json") == 0 && is_in_call) {
        r->value_at = r->depth;
        calls_raw(&r->call);
    }
    if (key.is_short || type.is_short) r->call.is_short = true;
    buf_free(&key);
    buf_free(&type);
}

/* Any bytes, as valid UTF-8. */
static void buf_add_valid(buf *out, const char *p, size_t n) {
    k3_utf8 u = {{0}, 0};
    buf_add_utf8(out, &u, p, n);
    buf_add_utf8(out, &u, "", 0);
}

/* The innermost element ends. */
static void reply_pop(reply *r) {
    if (r->depth == r->value_at) {
        calls_end_value(&r->call);
        r->value_at = 0;
    }
    if (r->depth == r->call_at) {
        calls_end(&r->call);
        r->call_at = 0;
    }
    r->depth--;
}

/* A close tag ends its element and what is open inside it; one that fits nothing is passed over. */
static void reply_shut(reply *r) {
    int i = r->depth - 1;
    while (i >= 0 && strcmp(r->element[i], buf_text(&r->tag_text)) != 0) i--;
    while (i >= 0 && r->depth > i) reply_pop(r);
}

static void reply_text(reply *r, const char *p, size_t n) {
    if (reply_is_in(r, "think"))
        buf_add_utf8(&r->think, &r->think_utf8, p, n);
    else if (reply_is_in(r, "response") || reply_is_in(r, "message") || r->depth == 0)
        buf_add_utf8(&r->answer, &r->answer_utf8, p, n);
    else if (r->depth == r->value_at)
        calls_text(&r->call, p, n);
}

/* What no further id will complete. */
static void reply_flush(reply *r) {
    buf_add_utf8(&r->think, &r->think_utf8, "", 0);
    buf_add_utf8(&r->answer, &r->answer_utf8, "", 0);
}

/* The next id of the reply, which is no stop other than the end of the message. */
static void reply_push(reply *r, uint32_t id) {
    size_t n = 0;
    const char *p = k3_id_bytes(r->t, id, &n);
    if (id == r->marks->end) {
        r->is_over = true;
    } else if (id == r->marks->open || id == r->marks->close) {
        reply_flush(r); /* half a character before a mark is never completed behind it */
        r->tag = id == r->marks->open ? OPEN_TAG : CLOSE_TAG;
        r->tag_utf8 = (k3_utf8){{0}, 0};
        buf_clear(&r->tag_text);
    } else if (id == r->marks->sep) {
        buf_add_utf8(&r->tag_text, &r->tag_utf8, "", 0);
        if (r->tag == OPEN_TAG) reply_open(r);
        if (r->tag == CLOSE_TAG) reply_shut(r);
        r->tag = NO_TAG;
    } else if (!p || k3_id_is_special(r->t, id)) {
        return; /* a mark of another kind has no text */
    } else if (r->tag != NO_TAG) {
        buf_add_utf8(&r->tag_text, &r->tag_utf8, p, n);
    } else {
        reply_text(r, p, n);
    }
}

/* The name of a tag that has none yet. */
static const char *reply_tag_name(const reply *r) {
    if (r->tag == CLOSE_TAG) return r->depth ? r->element[r->depth - 1] : "message";
    if (reply_is_in(r, "tools")) return "call";
    if (reply_is_in(r, "call")) return "argument";
    return r->has_response ? "tools" : "response";
}

/* What is missing to end the message: the rest of a tag, close tags, the end itself. */
static void reply_close(reply *r, xtml *x) {
    if (r->is_over) return;
    r->is_closing = true;
    if (r->tag != NO_TAG) {
        const char *name = reply_tag_name(r), *said = buf_text(&r->tag_text);
        if (strncmp(name, said, strlen(said)) == 0) {
            xtml_puts(x, name + strlen(said));
            buf_puts(&r->tag_text, name + strlen(said));
        }
        xtml_sep(x);
        reply_push(r, r->marks->sep);
    }
    while (r->depth > 0) { /* a call that was not finished is none */
        if (r->depth == 1 && reply_is_in(r, "message") && !r->has_response) {
            xtml_open(x, "response");
            xtml_close(x, "response");
        }
        xtml_close(x, r->element[--r->depth]);
    }
    xtml_control(x, "<|end_of_msg|>");
}

/* ==== 5. The conversation ============================================================
 *
 * Ids [0, n) are the conversation, the session has run the first k3_session_pos of them. A turn
 * remembers where it began, and a snapshot of the session there while memory has room for one; the
 * prefix cache on disk is asked next. Without either the ids are still there, to be read again.
 */
typedef struct {
    size_t start;       /* index of its first id; 0 for the first turn           */
    k3_snapshot *snap;  /* at `snap_pos`, at or before its start; NULL: none kept */
    k3_snapshot *after; /* at `after_pos`, behind its prompt; NULL: none kept    */
    float *row;         /* f32[n_vocab], the row there; NULL: none kept          */
    size_t snap_pos, after_pos;
    size_t n_cached;    /* positions of its start the cache had; 0: none         */
    json_object *calls; /* render_state as it was                                */
    unsigned n_tool;
    uint64_t n_call;
} turn;

typedef struct edit_state edit_state;

typedef struct {
    const cli_args *a;
    const char *dir;
    console con;
    k3_engine *e;
    k3_tokenizer *t;
    k3_session *s;
    k3_cache *cache; /* NULL: none                                                 */
    chat_marks marks;
    size_t n_vocab;
    float *row;    /* f32[n_vocab]                                                 */
    void *scratch; /* for k3_sample                                                */
    k3_sampler sampler;
    render_state render;    /* of the conversation as it is                           */
    bool own_thinks;        /* what the command line and commands asked for: a whole  */
    const char *own_effort; /* conversation begins with it                         */
    bool is_whole;          /* the turn at work is a whole conversation               */
    bool has_row;           /* `row` is that of its last id, which need not be run    */
    buf system;             /* the message before the first turn; empty: none          */
    json_object *queue;     /* system messages that go with the next turn              */
    json_object *tools;     /* declared before the first turn                          */
    uint32_t *id;
    size_t n, cap, n_header;
    turn *turns;
    size_t n_turn, cap_turn;
    uint64_t n_reply;
    uint64_t n_call; /* tool calls so far, for their ids                           */
    bool is_stored;  /* the cache has the session's present state                  */
    /* the last reply */
    const char *why; /* "eos" "tokens" "context" "interrupt"                       */
    uint64_t prompt_ns, gen_ns, n_prompt, n_cached, n_gen, n_step; /* n_cached: not run again */
    size_t first_said, n_said; /* its ids                                          */
    uint64_t most;             /* ids of one reply; 0: all that fit                */
    /* in and out */
    bool is_terminal, is_screen; /* stdin is one, and is edited; stdout is one */
    bool has_color, hides_think, streams, is_over;
    edit_state *edit;
    buf notes;          /* the engine's, which wait for the line of text to end    */
    uint64_t n_left;    /* notes that found no room there                          */
    uint64_t looked_ns; /* when stdout was last looked at                          */
    bool is_left;       /* nobody reads stdout any more                            */
    int (*progress)(void *user, const k3_progress *p);
    buf told;  /* what a command said, for --json                                   */
    int worst; /* exit code of the first turn that failed                           */
    enum { SHOW_NOTHING, SHOW_THINK, SHOW_ANSWER } shown;
    size_t n_think_out, n_answer_out;
} chat;

static void put_terminal(buf *out, const char *p, size_t n);

/* A line for the user, whole, valid UTF-8 and printable whoever wrote what it quotes: stderr, or
 * with --json part of the answer to the command. */
static void tell_args(chat *c, bool is_fault, const char *format, va_list args) {
    va_list again;
    buf valid = {0}, line = {0};
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *text = n >= 0 ? malloc((size_t)n + 1) : NULL;
    if (text) vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    buf_add_valid(&valid, text ? text : format, text ? (size_t)n : strlen(format));
    free(text);
    console_clear(&c->con);
    if (c->a->json) {
        if (c->told.n) buf_puts(&c->told, "\n");
        buf_add(&c->told, buf_text(&valid), valid.n);
    } else {
        put_terminal(&line, buf_text(&valid), valid.n);
        fprintf(stderr, "%s%s\n", is_fault ? "k3: " : "", buf_text(&line));
    }
    buf_free(&valid);
    buf_free(&line);
}

/* What no line of --json takes along. */
static void say_told(chat *c) {
    buf line = {0};
    put_terminal(&line, buf_text(&c->told), c->told.n);
    if (line.n) say("%s", line.p);
    buf_free(&line);
    buf_clear(&c->told);
}

PRINTF_LIKE(2, 3) static void tell(chat *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_args(c, false, format, args);
    va_end(args);
}

/* Something did not go as asked; said with -q too. Returns `code`. */
PRINTF_LIKE(3, 4) static int complain(chat *c, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_args(c, true, format, args);
    va_end(args);
    return code;
}

static int complain_status(chat *c, int status, const k3_error *err) {
    if (status == K3_ECANCEL && c->is_left)
        return complain(c, FAIL_IO, "stdout: nobody reads it any more, so the work was given up");
    if (status == K3_ECANCEL) return complain(c, INTERRUPTED, "interrupted");
    const char *text = err->text[0] ? err->text : k3_status_name(status);
    return complain(c, exit_code(status), "%.*s", text_whole(text), text);
}

/* The conversation that a console belongs to, which is all that the engine's callbacks get. */
static chat *chat_of(void *user) { return (chat *)(void *)((char *)user - offsetof(chat, con)); }

enum { MOST_NOTES = 16384 };

/* A note of the engine's: not into the middle of a word of the reply. */
static void chat_note(void *user, const char *line) {
    chat *c = chat_of(user);
    if (!c->con.hides_compute || c->con.is_quiet)
        console_note(user, line);
    else if (c->notes.n + strlen(line) > MOST_NOTES)
        c->n_left++;
    else {
        buf_puts(&c->notes, c->notes.n ? "\nk3: note: " : "note: ");
        buf_puts(&c->notes, line);
    }
}

/* The line of text has ended: what waited for it. */
static void say_notes(chat *c) {
    if (c->notes.n) say("%s", buf_text(&c->notes));
    if (c->n_left) say("note: %llu more that are not shown", (unsigned long long)c->n_left);
    c->n_left = 0;
    buf_clear(&c->notes);
}

/* Whoever reads stdout went away: a pipe's other end was closed, a terminal hung up. */
static bool out_is_left(void) {
    struct pollfd fd = {STDOUT_FILENO, 0, 0};
    return poll(&fd, 1, 0) == 1 && (fd.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
}

enum { LOOK_NS = 250000000 };

/* Work that nobody waits for any more is given up, four times a second at the latest. */
static int chat_progress(void *user, const k3_progress *p) {
    chat *c = chat_of(user);
    uint64_t now = clock_ns();
    if (p->phase == K3_PHASE_COMPUTE && now - c->looked_ns > LOOK_NS) {
        c->looked_ns = now;
        c->is_left = out_is_left();
    }
    return c->is_left ? 1 : c->progress(user, p);
}

enum { MANY_AGAIN = 64 }; /* positions to read again that are worth a word */

static size_t chat_pos(const chat *c) { return (size_t)k3_session_pos(c->s); }

static int chat_reserve(chat *c, size_t n) {
    if (c->cap - c->n >= n) return DONE;
    size_t cap = c->cap * 2 + n + 256;
    uint32_t *grown = realloc(c->id, cap * sizeof *grown);
    if (!grown) return complain(c, FAIL_IO, "no memory for %zu ids", cap);
    c->id = grown;
    c->cap = cap;
    return DONE;
}

static int chat_append(chat *c, const uint32_t *id, size_t n) {
    int rc = chat_reserve(c, n);
    if (rc == DONE && n) memcpy(c->id + c->n, id, n * sizeof *id);
    if (rc == DONE) c->n += n;
    return rc;
}

static void turn_drop_snapshot(turn *u) {
    k3_snapshot_free(u->snap);
    k3_snapshot_free(u->after);
    free(u->row);
    u->snap = u->after = NULL;
    u->row = NULL;
}

static void chat_drop_snapshots(chat *c) {
    c->is_stored = false;
    for (size_t i = 0; i < c->n_turn; i++) {
        turn_drop_snapshot(&c->turns[i]);
        c->turns[i].n_cached = 0;
    }
}

/* Tools are declared with the first turn, and go with it. */
static void chat_drop_tools(chat *c) {
    json_object_put(c->tools);
    c->tools = NULL;
}

/* Forget the last turn and its ids; the session is not touched. */
static void chat_cut_turn(chat *c) {
    turn *u = &c->turns[--c->n_turn];
    c->n = u->start;
    if (c->n < c->n_header) c->n_header = 0;
    json_object_put(c->render.calls);
    c->render.calls = u->calls;
    c->render.n_tool = u->n_tool;
    c->n_call = u->n_call;
    turn_drop_snapshot(u);
    if (c->n_turn == 0) chat_drop_tools(c);
}

/* Put a session that lost its state, or whose ids were cut, where the ids still hold: at `u`'s
 * snapshot, at what the cache has, else at the start. */
static void chat_recover(chat *c, const turn *u) {
    k3_error err = {{0}};
    if (u && u->snap && k3_session_restore(c->s, u->snap, &err) >= 0) return;
    k3_session_reset(c->s);
    if (c->cache && c->n > 0) {
        int64_t got = k3_cache_restore(c->cache, c->s, c->id, c->n, &err);
        if (got < 0) complain_status(c, (int)got, &err);
    }
}

typedef struct {
    k3_snapshot *snap; /* NULL: none                       */
    size_t pos;        /* 0: none                          */
    const float *row;  /* the row there; NULL: not kept    */
} place;

/* The snapshot with the most of the first `most` positions, or one with its row at n_row. */
static place chat_best_place(const chat *c, size_t most, size_t n_row) {
    place best = {NULL, 0, NULL};
    for (size_t i = 0; i < c->n_turn; i++) {
        const turn *u = &c->turns[i];
        const place one[] = {{u->snap, u->snap_pos, NULL}, {u->after, u->after_pos, u->row}};
        for (size_t j = 0; j < COUNT(one); j++)
            if (one[j].snap && one[j].pos > best.pos &&
                (one[j].pos <= most || (one[j].row && one[j].pos == n_row)))
                best = one[j];
    }
    return best;
}

/* A step failed or was given up: back to the last snapshot that the session can go to, all ids
 * kept. */
static void chat_recover_last(chat *c) {
    k3_error err = {{0}};
    place best;
    for (size_t most = c->n; (best = chat_best_place(c, most, 0)).snap; most = best.pos - 1)
        if (k3_session_restore(c->s, best.snap, &err) >= 0) return;
    chat_recover(c, NULL);
}

/* A far box was believed and lied: no state from since then is right. It is not asked again, and
 * what was said is read again without it. */
static void chat_distrust(chat *c) {
    chat_drop_snapshots(c);
    c->has_row = false;
    k3_session_reset(c->s);
}

/* A snapshot of the session as it is; older ones make room. NULL: there is none even so. */
static k3_snapshot *chat_snapshot(chat *c) {
    k3_error err = {{0}};
    k3_snapshot *snap = NULL;
    for (size_t i = 0; k3_session_snapshot(c->s, &snap, &err) < 0; i++) {
        snap = NULL;
        while (i < c->n_turn && !c->turns[i].snap && !c->turns[i].after) i++;
        if (i >= c->n_turn) return NULL;
        turn_drop_snapshot(&c->turns[i]);
    }
    return snap;
}

/* Keep the session's state for /undo. */
static void turn_snapshot(chat *c, turn *u) {
    if (chat_pos(c) == 0 || u->start > chat_pos(c) + MANY_AGAIN) return; /* chat_feed will */
    u->snap = chat_snapshot(c);
    u->snap_pos = chat_pos(c);
}

/* Keep it behind the prompt of a whole conversation, with the row that the reply begins from: the
 * next one, where it is the same or says what the model did not, goes on from here. */
static void turn_snapshot_after(chat *c) {
    size_t i = c->n_turn - 1;
    k3_snapshot *snap = chat_snapshot(c);
    if (!snap) return;
    turn_drop_snapshot(&c->turns[i]);
    c->turns[i].after = snap;
    c->turns[i].after_pos = chat_pos(c);
    c->turns[i].row = malloc(c->n_vocab * sizeof *c->row);
    if (c->turns[i].row) memcpy(c->turns[i].row, c->row, c->n_vocab * sizeof *c->row);
}

/* Whether the directory now has the state of the first n_pos ids: what was kept may be evicted, and
 * what was too large was not kept. */
static bool cache_has(const chat *c, size_t n_pos) {
    return c->cache && k3_cache_has(c->cache, c->id, n_pos);
}

/* Whether the last turn can be taken back with nothing to be read again. */
static bool turn_is_free(const chat *c, const turn *u) {
    return u->start == 0 || u->snap || cache_has(c, u->n_cached);
}

static int turn_reserve(chat *c) {
    if (c->n_turn < c->cap_turn) return DONE;
    size_t cap = c->cap_turn * 2 + 16;
    turn *grown = realloc(c->turns, cap * sizeof *grown);
    if (!grown) return complain(c, FAIL_IO, "no memory for another turn");
    c->turns = grown;
    c->cap_turn = cap;
    return DONE;
}

static int turn_push(chat *c) {
    int rc = turn_reserve(c);
    if (rc != DONE) return rc;
    turn u = {.start = c->n, .calls = json_object_get(c->render.calls)};
    u.n_tool = c->render.n_tool;
    u.n_call = c->n_call;
    turn_snapshot(c, &u);
    if (c->is_stored) u.n_cached = chat_pos(c);
    c->turns[c->n_turn++] = u;
    return DONE;
}

static void chat_reset(chat *c) {
    while (c->n_turn) chat_cut_turn(c);
    chat_drop_tools(c);
    json_object_put(c->queue);
    c->queue = NULL;
    c->n = c->n_header = 0;
    c->is_stored = false;
    c->render.thinks = c->own_thinks;
    c->render.effort = c->own_effort;
    k3_session_reset(c->s);
}

/* Free all that is the conversation's, and forget it; the session is not touched. */
static void chat_forget(chat *c) {
    while (c->n_turn) chat_cut_turn(c);
    chat_drop_tools(c);
    json_object_put(c->queue);
    json_object_put(c->render.calls);
    buf_free(&c->system);
    free(c->turns);
    free(c->id);
    c->queue = c->render.calls = NULL;
    c->turns = NULL;
    c->id = NULL;
    c->n = c->cap = c->n_header = c->cap_turn = 0;
    c->is_stored = false;
}

/* ==== 6. One turn ====================================================================
 *
 * Messages to ids, ids through the session, ids drawn until something ends the reply, and the
 * closing of a reply that did not end itself. A turn whose messages could not be read leaves
 * everything as it was before.
 */
static void show_reply(chat *c, reply *r);
static int show_end(chat *c, reply *r);

static int chat_append_xtml(chat *c, xtml *x) {
    k3_error err = {{0}};
    int status = xtml_encode(x, c->t, &err);
    return status < 0 ? complain_status(c, status, &err) : chat_append(c, x->id, x->n_id);
}

/* What stands before the first turn: tools, effort, the system message. */
static int chat_header(chat *c) {
    xtml x = {0};
    render_header(&x, c->tools, &c->render);
    if (c->system.n) {
        xtml_begin(&x, "message");
        xtml_attribute_text(&x, "role", "system");
        xtml_sep(&x);
        xtml_text(&x, c->system.p, c->system.n);
        xtml_end_message(&x);
    }
    int rc = chat_append_xtml(c, &x);
    c->n_header = c->n;
    xtml_free(&x);
    return rc;
}

/* Queued system messages, the turn's messages, the request's choices, the prompt. */
static int turn_render(chat *c, json_object *messages, json_object *request) {
    xtml x = {0};
    k3_error err = {{0}};
    int status = K3_OK;
    if (c->queue) status = render_messages(&x, c->queue, &c->render, &err);
    if (status >= 0) status = render_messages(&x, messages, &c->render, &err);
    if (status >= 0 && request) status = render_choices(&x, request, &err);
    xtml_prompt(&x, c->render.thinks);
    int rc = status < 0 ? complain_status(c, status, &err) : chat_append_xtml(c, &x);
    xtml_free(&x);
    return rc;
}

static int turn_check_context(chat *c) {
    uint64_t context = k3_session_context(c->s);
    size_t start = c->turns[c->n_turn - 1].start;
    if (c->n < context) return DONE; /* one position is left for the reply */
    return complain(c, FAIL_IO,
                    "context full: %zu positions are taken, this turn needs %zu more, and the "
                    "context holds %llu; /undo or /reset make room, or start with a larger "
                    "--context (the model's maximum is %u)",
                    start, c->n - start, (unsigned long long)context,
                    (unsigned)k3_engine_shape(c->e)->max_position);
}

static void chat_store(chat *c) {
    k3_error err = {{0}};
    k3_cache_stats before, after;
    c->is_stored = false;
    if (!c->cache) return;
    k3_cache_get_stats(c->cache, &before);
    int status = k3_cache_store(c->cache, c->s, &err);
    console_clear(&c->con);
    if (status < 0) complain_status(c, status, &err);
    k3_cache_get_stats(c->cache, &after);
    c->is_stored = status >= 0 && (after.stored > before.stored || cache_has(c, chat_pos(c)));
}

enum { HEADER_WORTH = 32 }; /* positions from which on a header gets a cache entry of its own */

/* Run all ids that wait, so that `row` is that of the last. */
static int chat_feed(chat *c, k3_error *err) {
    int status = K3_OK;
    turn *u = &c->turns[c->n_turn - 1];
    if (c->cache && chat_pos(c) == 0 && c->n > 1) {
        int64_t got = k3_cache_restore(c->cache, c->s, c->id, c->n - 1, err);
        if (got < 0) complain_status(c, (int)got, err);
        if (got > 0) c->n_cached = (uint64_t)got;
    }
    size_t pos = chat_pos(c);
    if (c->has_row && pos == c->n) return K3_OK;
    if (c->cache && pos < c->n_header && c->n_header >= HEADER_WORTH) {
        status = k3_session_feed(c->s, c->id + pos, c->n_header - pos, K3_ROWS_NONE, NULL, err);
        if (status < 0) return status;
        chat_store(c);
    }
    pos = chat_pos(c);
    if (u->start > pos + MANY_AGAIN &&
        !c->is_whole) { /* the state was lost: now it is there to keep */
        status = k3_session_feed(c->s, c->id + pos, u->start - pos, K3_ROWS_NONE, NULL, err);
        if (status < 0) return status;
        turn_snapshot(c, u);
    }
    pos = chat_pos(c);
    status = k3_session_feed(c->s, c->id + pos, c->n - pos, K3_ROWS_LAST, c->row, err);
    if (status >= 0) c->is_stored = false;
    return status;
}

/* The prompt of the turn; what becomes of it when it cannot be run is the caller's. */
static int turn_prompt(chat *c) {
    k3_error err = {{0}};
    turn *u = &c->turns[c->n_turn - 1];
    uint64_t start = clock_ns();
    c->con.hides_compute = false;
    c->con.asked_ns = 0;
    c->con.has_said_wait = false;
    c->con.n_grace = u->snap || chat_pos(c) == 0 ? 0 : 1;
    console_answer(&c->con, 0, 0);
    c->con.start_ns = c->con.last_ns = start;
    c->n_prompt = c->n - chat_pos(c);
    int status;
    while ((status = chat_feed(c, &err)) == K3_EREDO) {
        console_clear(&c->con);
        if (!c->a->quiet) say("note: %s; replies so far may be wrong", err.text);
        chat_distrust(c);
        c->n_prompt = c->n;
        c->n_cached = 0;
    }
    console_clear(&c->con);
    c->prompt_ns = clock_ns() - start;
    c->n_prompt -= c->n_cached;
    if (status >= 0) return DONE;
    if (status == K3_ECANCEL && !c->is_left) {
        c->why = "interrupt";
        return complain(c, INTERRUPTED,
                        "stopped before the reply began; your message was taken "
                        "back");
    }
    return complain_status(c, status, &err);
}

/* Run the id just drawn. DONE, INTERRUPTED (not yet said) or an exit code. */
static int turn_step(chat *c) {
    k3_error err = {{0}};
    uint64_t start = clock_ns();
    uint64_t most = c->most ? c->most : k3_session_context(c->s) - chat_pos(c) + c->n_gen;
    c->con.n_grace = 1; /* a step given up costs the state: the first Ctrl-C lets it end */
    console_answer(&c->con, c->n_gen, most);
    int status = k3_session_feed(c->s, c->id + chat_pos(c), 1, K3_ROWS_LAST, c->row, &err);
    console_clear(&c->con);
    c->gen_ns += clock_ns() - start;
    if (status >= 0) {
        c->n_step++;
        return DONE;
    }
    if (status == K3_EREDO)
        chat_distrust(c);
    else
        chat_recover_last(c);
    return status == K3_ECANCEL && !c->is_left ? INTERRUPTED : complain_status(c, status, &err);
}

static int turn_generate(chat *c, reply *r) {
    int rc = DONE;
    c->why = "tokens";
    while (rc == DONE && (c->n_gen < c->most || c->most == 0)) {
        if (interrupted) {
            rc = INTERRUPTED;
            break;
        }
        uint32_t id = k3_sample(&c->sampler, c->row, c->n_vocab, chat_pos(c) - 1, c->scratch);
        bool is_stop = mark_is_stop(&c->marks, id);
        c->n_gen++;
        if (is_stop) c->why = "eos";
        if (is_stop && id != c->marks.end) break; /* what it ends is closed properly instead */
        rc = chat_append(c, &id, 1);
        if (rc != DONE) break;
        reply_push(r, id);
        c->n_said++;
        if (reply_is_short(r)) rc = complain(c, FAIL_IO, "no memory for the text of this reply");
        if (is_stop || rc != DONE) break;
        show_reply(c, r);
        if (ferror(stdout)) rc = FAIL_IO;
        if (rc == DONE && k3_session_pos(c->s) == k3_session_context(c->s)) {
            c->why = "context";
            break;
        }
        if (rc == DONE) rc = turn_step(c);
    }
    if (rc == INTERRUPTED) {
        c->why = "interrupt";
        rc = DONE;
    }
    return rc;
}

/* Close the message; what that takes is run with the next turn. */
static int turn_close(chat *c, reply *r) {
    xtml x = {0};
    reply_flush(r);
    reply_close(r, &x);
    int rc = chat_append_xtml(c, &x);
    xtml_free(&x);
    json_object_put(c->render.calls);
    c->render.calls = json_object_get(r->call.finished);
    c->render.n_tool = 0;
    c->n_call += r->call.n_finished + r->call.is_open; /* no id is used twice */
    return rc;
}

/* The turn's prompt was run: the reply, shown and closed. */
static int turn_reply(chat *c) {
    reply r;
    c->first_said = c->n;
    c->n_reply++;
    reply_init(&r, &c->marks, c->t, c->render.thinks, c->n_call);
    int rc = turn_generate(c, &r);
    int closed = turn_close(c, &r);
    if (rc == DONE) rc = closed;
    if (rc == DONE || !ferror(stdout)) {
        int shown = show_end(c, &r);
        if (rc == DONE) rc = shown;
    }
    reply_free(&r);
    if (rc == DONE) chat_store(c);
    return rc;
}

static void turn_begin(chat *c, bool is_whole) {
    c->why = "";
    c->n_gen = c->n_step = c->n_cached = c->n_said = c->gen_ns = c->n_prompt = c->prompt_ns = 0;
    c->is_whole = is_whole;
    c->has_row = false;
}

/* One turn: messages in, a reply shown. After it the turn is there, closed, or all is as before. */
static int chat_turn(chat *c, json_object *messages) {
    turn_begin(c, false);
    int rc = turn_push(c);
    if (rc != DONE) return rc;
    if (c->n == 0) rc = chat_header(c);
    if (rc == DONE) rc = turn_render(c, messages, NULL);
    if (rc == DONE) rc = turn_check_context(c);
    if (rc == DONE && (rc = turn_prompt(c)) != DONE) {
        turn *u = &c->turns[c->n_turn - 1];
        c->n = u->start; /* so that the cache is not asked for more */
        chat_recover(c, u);
    }
    if (rc != DONE) {
        chat_cut_turn(c);
        return rc;
    }
    json_object_put(c->queue);
    c->queue = NULL;
    return turn_reply(c);
}

/* What a whole conversation puts aside, to be there again if no reply begins. */
typedef struct {
    uint32_t *id;
    size_t n, cap, n_header;
    turn *cut; /* turns that are not part of the new one */
    size_t n_cut;
    json_object *tools;
    render_state render;
    uint64_t n_call;
    bool is_stored;
} conversation;

/* How many ids both begin with. */
static size_t ids_shared(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b) {
    size_t n = n_a < n_b ? n_a : n_b, i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* Tool calls in a conversation's messages, so that the ids of new ones follow from it alone. */
static uint64_t messages_count_calls(json_object *messages) {
    uint64_t n = 0;
    for (size_t i = 0; i < json_object_array_length(messages); i++) {
        json_object *calls = json_field(json_object_array_get_idx(messages, i), "tool_calls");
        if (has_tools(calls)) n += json_object_array_length(calls);
    }
    return n;
}

/* The conversation of a request, rendered in place of the one that is there. */
static int whole_render(chat *c, conversation *was, json_object *messages, json_object *request) {
    k3_error err = {{0}};
    *was = (conversation){.id = c->id, .n = c->n, .cap = c->cap, .n_header = c->n_header};
    was->tools = c->tools;
    was->render = c->render;
    was->n_call = c->n_call;
    was->is_stored = c->is_stored;
    c->id = NULL;
    c->n = c->cap = c->n_header = 0;
    c->tools = json_object_get(json_field(request, "tools"));
    c->render = (render_state){.thinks = c->own_thinks, .effort = c->own_effort};
    c->n_call = messages_count_calls(messages);
    int status = render_settings(&c->render, request, &err);
    if (status < 0) return complain_status(c, status, &err);
    int rc = chat_header(c);
    if (rc == DONE) rc = turn_render(c, messages, request);
    uint64_t context = k3_session_context(c->s);
    if (rc != DONE || c->n < context) return rc;
    return complain(
        c, FAIL_IO,
        "context full: this conversation needs %zu positions and one for the reply, and "
        "the context holds %llu; send less of it, or start with a larger --context (the "
        "model's maximum is %u)",
        c->n, (unsigned long long)context, (unsigned)k3_engine_shape(c->e)->max_position);
}

/* The session at the most that it has of the new conversation's ids: where it is, at a snapshot, or
 * reset, where the cache has more. `n_shared`: ids that both conversations begin with. One id is
 * left to be run, unless its row was kept. */
static void whole_place(chat *c, size_t n_shared) {
    k3_error err = {{0}};
    size_t pos = chat_pos(c), n_cached = 0;
    size_t most = n_shared < c->n ? n_shared : c->n - 1;
    place best = chat_best_place(c, most, n_shared == c->n ? c->n : 0);
    if (pos <= most && pos >= best.pos) return;
    for (size_t i = 0; i < c->n_turn; i++) {
        size_t n = c->turns[i].n_cached;
        if (n > n_cached && n <= most && cache_has(c, n)) n_cached = n;
    }
    c->is_stored = false;
    if (n_cached > best.pos || !best.snap || k3_session_restore(c->s, best.snap, &err) < 0)
        k3_session_reset(c->s);
    c->has_row = chat_pos(c) == c->n;
    if (c->has_row) memcpy(c->row, best.row, c->n_vocab * sizeof *c->row);
}

/* Turns that both conversations have stay; those behind are put aside, and a turn for the rest
 * begins. */
static int whole_turns(chat *c, conversation *was, size_t n_shared) {
    size_t n_keep = c->n_turn;
    int rc = turn_reserve(c);
    turn *cut = malloc((c->n_turn + 1) * sizeof *cut);
    if (rc == DONE && !cut) rc = complain(c, FAIL_IO, "no memory for %zu turns", c->n_turn);
    if (rc != DONE) {
        free(cut);
        return rc;
    }
    whole_place(c, n_shared);
    turn u = {.start = was->n, .calls = was->render.calls, .n_tool = was->render.n_tool};
    u.n_call = was->n_call;
    while (n_keep > 0 && (u.start > n_shared || u.start >= c->n)) u = c->turns[--n_keep];
    was->cut = cut;
    was->n_cut = c->n_turn - n_keep;
    memcpy(cut, c->turns + n_keep, was->n_cut * sizeof *cut);
    u = (turn){.start = u.start,
               .calls = json_object_get(u.calls),
               .n_tool = u.n_tool,
               .n_call = u.n_call};
    if (c->is_stored && chat_pos(c) <= u.start) u.n_cached = chat_pos(c);
    c->turns[n_keep] = u;
    c->n_turn = n_keep + 1;
    return DONE;
}

/* No reply began: the conversation that was there is there again, to be read again where the session
 * has lost it. */
static void whole_back(chat *c, conversation *was) {
    bool is_touched = was->cut != NULL;
    if (is_touched) {
        turn *u = &c->turns[--c->n_turn];
        json_object_put(u->calls);
        turn_drop_snapshot(u);
        memcpy(u, was->cut, was->n_cut * sizeof *u);
        c->n_turn += was->n_cut;
    }
    free(was->cut);
    free(c->id);
    json_object_put(c->tools);
    json_object_put(c->render.calls);
    c->id = was->id;
    c->n = was->n;
    c->cap = was->cap;
    c->n_header = was->n_header;
    c->tools = was->tools;
    c->render = was->render;
    c->n_call = was->n_call;
    if (!is_touched) return;
    c->is_stored = false;
    chat_recover_last(c);
}

static void whole_forget(conversation *was) {
    for (size_t i = 0; i < was->n_cut; i++) {
        json_object_put(was->cut[i].calls);
        turn_drop_snapshot(&was->cut[i]);
    }
    free(was->cut);
    free(was->id);
    json_object_put(was->tools);
    json_object_put(was->render.calls);
}

/* A whole conversation in place of the one that is there; what both begin with is not run again. After
 * it a reply was shown, or all is as before. Its ids follow from the request, the command line and
 * the commands given, and from no request before. */
static int chat_whole(chat *c, json_object *messages, json_object *request) {
    conversation was;
    if (c->queue)
        return complain(c, FAIL_USAGE,
                        "messages are the whole conversation, and a system message waits for the "
                        "next single one: put it into messages, and let {\"command\":\"/reset\"} "
                        "drop the one that waits");
    turn_begin(c, true);
    int rc = whole_render(c, &was, messages, request);
    if (rc == DONE) rc = whole_turns(c, &was, ids_shared(was.id, was.n, c->id, c->n));
    if (rc == DONE) rc = turn_prompt(c);
    if (rc != DONE) {
        whole_back(c, &was);
        return rc;
    }
    whole_forget(&was);
    turn_snapshot_after(c);
    return turn_reply(c);
}

/* ==== 7. Showing a reply =============================================================
 *
 * A terminal gets thinking dimmed, then the answer, as they are made, and never a control character
 * of the model's. A pipe gets the answer alone. --json gets one line when all is said, or deltas as
 * well if the request has "stream": true.
 */

/* Text for a terminal: control characters are shown, not obeyed. */
static void put_terminal(buf *out, const char *p, size_t n) {
    const unsigned char *s = (const unsigned char *)p;
    for (size_t i = 0; i < n; i++) {
        bool is_c1 = s[i] == 0xc2 && i + 1 < n && s[i + 1] < 0xa0;
        if ((s[i] < 0x20 && s[i] != '\n' && s[i] != '\t') || s[i] == 0x7f)
            buf_printf(out, "^%c", s[i] ^ 0x40);
        else if (is_c1)
            buf_printf(out, "<%02x>", s[++i]);
        else
            buf_add(out, p + i, 1);
    }
}

static const char DIM[] = "\033[2m", PLAIN[] = "\033[0m";

/* Text of one kind to stdout. */
static void show_text(chat *c, int kind, const char *p, size_t n) {
    buf out = {0};
    if (n == 0) return;
    console_clear(&c->con);
    if (c->is_screen && kind != (int)c->shown) {
        if (c->shown == SHOW_THINK) buf_puts(&out, c->has_color ? PLAIN : "");
        if (c->shown == SHOW_THINK) buf_puts(&out, "\n\n");
        if (kind == SHOW_THINK) buf_puts(&out, c->has_color ? DIM : "(thinking) ");
    }
    c->shown = kind;
    if (c->is_screen)
        put_terminal(&out, p, n);
    else
        for (size_t i = 0; i < n; i++) /* with --null a NUL ends the reply, and nothing else */
            if (p[i] || !c->a->null_ends)
                buf_add(&out, p + i, 1);
            else
                buf_puts(&out, "\xef\xbf\xbd");
    out_write(buf_text(&out), out.n);
    if (c->is_screen && c->con.is_tty) c->con.hides_compute = true;
    if (kind == SHOW_ANSWER && p[n - 1] == '\n') say_notes(c);
    buf_free(&out);
}

static void show_delta(const char *key, const char *p, size_t n) {
    buf line = {0};
    if (n == 0) return;
    buf_printf(&line, "{\"delta\":{\"%s\":", key);
    json_write_string(&line, p, n);
    buf_puts(&line, "}}\n");
    out_write(buf_text(&line), line.n);
    buf_free(&line);
}

/* What is new in the tool calls, in the shape of OpenAI's chunks; one thing a line. */
static void show_call_deltas(reply *r) {
    json_object *part;
    while ((part = calls_delta(&r->call)) != NULL) {
        json_object *line = json_object_new_object(), *delta = json_object_new_object();
        json_object *parts = json_object_new_array();
        json_object_array_add(parts, part);
        json_put(delta, "tool_calls", parts);
        json_put(line, "delta", delta);
        out_json_line(line);
    }
}

/* What is new in the reply. */
static void show_reply(chat *c, reply *r) {
    const char *think = buf_text(&r->think) + c->n_think_out;
    const char *answer = buf_text(&r->answer) + c->n_answer_out;
    size_t n_think = r->think.n - c->n_think_out, n_answer = r->answer.n - c->n_answer_out;
    c->n_think_out = r->think.n;
    c->n_answer_out = r->answer.n;
    if (c->a->json) {
        if (c->streams) show_delta("reasoning_content", think, n_think);
        if (c->streams) show_delta("content", answer, n_answer);
        if (c->streams) show_call_deltas(r);
        return;
    }
    if (c->is_terminal && c->is_screen && !c->hides_think) show_text(c, SHOW_THINK, think, n_think);
    show_text(c, SHOW_ANSWER, answer, n_answer);
}

static json_object *json_text(const buf *b) {
    return json_object_new_string_len(buf_text(b), (int)b->n);
}

static int show_json(chat *c, const reply *r) {
    json_object *o = json_object_new_object(), *ids = json_object_new_array();
    for (size_t i = c->first_said; i < c->first_said + c->n_said; i++)
        json_object_array_add(ids, json_object_new_int64(c->id[i]));
    json_put(o, "role", json_object_new_string("assistant"));
    json_put(o, "content", json_text(&r->answer));
    if (c->render.thinks) json_put(o, "reasoning_content", json_text(&r->think));
    if (r->call.finished) json_put(o, "tool_calls", json_object_get(r->call.finished));
    if (r->call.is_open) json_put(o, "unfinished_call", calls_unfinished(&r->call));
    json_put(o, "stop_reason", json_object_new_string(c->why));
    json_put(o, "ids", ids);
    json_put_count(o, "n_prompt", c->n_prompt);
    json_put_count(o, "n_kept", c->first_said - c->n_prompt);
    json_put_count(o, "n_cached", c->n_cached);
    json_put_count(o, "n_gen", c->n_gen);
    json_put_count(o, "n_context", c->n);
    json_put_hash(o, "context_fnv", k3_fnv1a(K3_FNV_BASIS, c->id, c->n * sizeof *c->id));
    json_put_real(o, "prompt_s", (double)c->prompt_ns * 1e-9);
    json_put_real(o, "gen_s", (double)c->gen_ns * 1e-9);
    return out_json_line(o);
}

/* Tool calls, one a line: name and arguments. */
static void show_calls(chat *c, const reply *r) {
    buf out = {0};
    for (size_t i = 0; i < r->call.n_finished; i++) {
        json_object *call = json_field(json_object_array_get_idx(r->call.finished, i), "function");
        buf line = {0};
        buf_puts(&line, i || c->shown == SHOW_ANSWER ? "\n" : "");
        buf_puts(&line, json_string(call, "name"));
        buf_puts(&line, " ");
        buf_puts(&line, json_string(call, "arguments"));
        buf_add(&out, line.p, line.n);
        buf_free(&line);
    }
    show_text(c, SHOW_ANSWER, buf_text(&out), out.n);
    buf_free(&out);
}

static void tell_rates(chat *c) {
    tell(c, "prompt %llu ids, %.1f tok/s; reply %llu ids, %.1f tok/s (%s); context %zu of %llu",
         (unsigned long long)c->n_prompt, per_second(c->n_prompt, c->prompt_ns),
         (unsigned long long)c->n_gen, per_second(c->n_step, c->gen_ns), c->why, c->n,
         (unsigned long long)k3_session_context(c->s));
}

/* The rest of the reply, its end, and why it ended if not by itself. */
static int show_end(chat *c, reply *r) {
    int rc = DONE;
    show_reply(c, r);
    if (c->a->json) {
        rc = show_json(c, r);
    } else {
        show_calls(c, r);
        if (c->shown == SHOW_THINK && c->has_color) rc = out_write(PLAIN, strlen(PLAIN));
        if (rc == DONE) rc = out_write(c->a->null_ends && !c->is_terminal ? "\0" : "\n", 1);
    }
    if (ferror(stdout)) rc = FAIL_IO;
    c->n_think_out = c->n_answer_out = 0;
    c->shown = SHOW_NOTHING;
    c->con.hides_compute = false;
    say_notes(c);
    if (rc != DONE || c->a->json) return rc;
    if (strcmp(c->why, "interrupt") == 0 && !c->a->quiet)
        tell(c, "(stopped; what was said is kept)");
    if (strcmp(c->why, "context") == 0)
        complain(c, DONE,
                 "context full: the reply ends here; /undo or /reset make room, or start "
                 "with a larger --context");
    if (strcmp(c->why, "tokens") == 0 && !c->a->quiet)
        tell(c, "(stopped after %llu ids: /tokens N or --tokens N allows more, 0 all that fit)",
             (unsigned long long)c->most);
    if (c->n - chat_pos(c) > MANY_AGAIN && !c->a->quiet)
        tell(c, "(that step was given up: your next turn reads %zu positions again)",
             c->n - chat_pos(c));
    if (c->a->verbose) tell_rates(c);
    return rc;
}

/* ==== 8. Commands ====================================================================
 *
 * A bad one says what is wrong and the conversation goes on. Whatever a command cannot do for
 * free it says the price of first.
 */
static int help_commands(chat *c, const char *arg);

static int command_reset(chat *c, const char *arg) {
    (void)arg;
    chat_reset(c);
    tell(c, "(a new conversation%s)", c->system.n ? ", with the same system message" : "");
    return DONE;
}

static int command_system(chat *c, const char *arg) {
    if (!*arg) {
        tell(c, c->system.n ? "system message: %s" : "(no system message)%s", buf_text(&c->system));
        return DONE;
    }
    buf text = {0};
    buf_add_valid(&text, arg, strlen(arg));
    if (c->n_turn == 0) {
        buf_free(&c->system);
        c->system = text;
        tell(c, "(stands before the first turn)");
        return DONE;
    }
    json_object *m = json_object_new_object();
    json_put(m, "role", json_object_new_string("system"));
    json_put(m, "content", json_text(&text));
    if (!c->queue) c->queue = json_object_new_array();
    json_object_array_add(c->queue, m);
    buf_free(&text);
    tell(c, "(goes with your next message; the conversation so far stays as it is)");
    return DONE;
}

/* The header as the settings now have it. It stands before everything else, so all of it must be
 * read again, unless it is the one that was there. When it cannot be made, all is as before. */
static int chat_new_header(chat *c) {
    size_t n_old = c->n_header, n_all = c->n;
    uint32_t *old = malloc((n_all + 1) * sizeof *old);
    if (!old) return complain(c, FAIL_IO, "no memory for %zu ids", n_all);
    memcpy(old, c->id, n_all * sizeof *old);
    c->n = 0;
    int rc = chat_header(c);
    size_t n_new = c->n;
    if (rc == DONE) rc = chat_append(c, old + n_old, n_all - n_old);
    bool is_same = n_new == n_old && memcmp(old, c->id, n_old * sizeof *old) == 0;
    if (rc != DONE) {
        memcpy(c->id, old, n_all * sizeof *old);
        c->n = n_all;
        c->n_header = n_old;
    }
    free(old);
    if (rc != DONE || is_same) return rc;
    for (size_t i = 1; i < c->n_turn; i++) c->turns[i].start += n_new - n_old;
    chat_drop_snapshots(c);
    k3_session_reset(c->s);
    return rc;
}

/* What thinking and effort are now was asked for: whole conversations begin with it too. */
static void chat_own_settings(chat *c) {
    c->own_thinks = c->render.thinks;
    c->own_effort = c->render.effort;
}

static const char *effort_name(const chat *c) {
    return c->render.effort ? c->render.effort : "none";
}

/* Let the conversation say what thinking and effort are now; `before` if that fails. A header that
 * speaks of effort stays where it is while thinking is off, and what it costs to go is not paid. */
static int chat_set_render(chat *c, bool thought, const char *before) {
    int rc = c->n_turn && c->render.thinks ? chat_new_header(c) : DONE;
    if (rc != DONE) {
        c->render.thinks = thought;
        c->render.effort = before;
    }
    return rc;
}

/* What a change of the header costs, if it cost anything. */
static void tell_again(chat *c) {
    if (c->n_turn && chat_pos(c) == 0)
        tell(c,
             "(the message about effort stands before the conversation, so your next turn reads "
             "%zu positions again)",
             c->n);
}

static int command_think(chat *c, const char *arg) {
    static const char *const word[] = {"on", "off", "show", "hide"};
    bool before = c->render.thinks;
    size_t i = 0;
    while (i < COUNT(word) && strcmp(word[i], arg) != 0) i++;
    if (*arg && i == COUNT(word))
        return complain(c, FAIL_USAGE, "/think '%.*s': not on, off, show or hide",
                        text_cut(arg, 40), arg);
    if (i < 2) c->render.thinks = i == 0;
    if (i == 2 || i == 3) c->hides_think = i == 3;
    int rc =
        i < 2 && before != c->render.thinks ? chat_set_render(c, before, c->render.effort) : DONE;
    if (rc != DONE) return rc;
    if (i < 2) chat_own_settings(c);
    tell(c, "(thinking is %s, and %s%s)", c->render.thinks ? "on" : "off",
         c->hides_think ? "hidden" : "shown",
         i < 2 && c->n_turn ? "; earlier turns stay as they were" : "");
    if (i == 0) tell_again(c);
    return DONE;
}

static int command_effort(chat *c, const char *arg) {
    k3_error err = {{0}};
    const char *before = c->render.effort;
    if (*arg) {
        json_object *word = json_object_new_string(arg);
        int status = effort_read(&c->render, word, "/effort", &err);
        json_object_put(word);
        if (status < 0) {
            c->render.effort = before;
            return complain_status(c, status, &err);
        }
        int rc = before == c->render.effort ? DONE : chat_set_render(c, c->render.thinks, before);
        if (rc != DONE) return rc;
        chat_own_settings(c);
    }
    tell(c, "(effort is %s%s)", effort_name(c),
         c->render.thinks ? "" : "; it counts while thinking is on, and it is off");
    if (*arg && before != c->render.effort && c->render.thinks) tell_again(c);
    return DONE;
}

static int complain_number(chat *c, const char *name, const char *arg, const char *range) {
    return complain(c, FAIL_USAGE, "%s '%.*s': not %s", name, text_cut(arg, 40), arg, range);
}

static int command_real(chat *c, const char *name, const char *arg, float *value, double most) {
    double given;
    char *end;
    if (*arg && (!parse_real(arg, &end, &given) || *end || given > most))
        return complain_number(c, name, arg,
                               most > 1 ? "a number from 0 to 100" : "a number from 0 to 1");
    if (*arg) *value = (float)given;
    tell(c, "(temperature %g, top-p %g, top-k %u, seed %llu)", (double)c->sampler.temperature,
         (double)c->sampler.top_p, (unsigned)c->sampler.top_k, (unsigned long long)c->sampler.seed);
    return DONE;
}

static int command_temp(chat *c, const char *arg) {
    return command_real(c, "/temp", arg, &c->sampler.temperature, 100);
}

static int command_top_p(chat *c, const char *arg) {
    return command_real(c, "/top-p", arg, &c->sampler.top_p, 1);
}

static int command_top_k(chat *c, const char *arg) {
    uint64_t value = c->sampler.top_k;
    if (*arg && (!parse_u64(arg, strlen(arg), &value) || value > UINT32_MAX))
        return complain_number(c, "/top-k", arg, "a whole number; 0 is off");
    c->sampler.top_k = (uint32_t)value;
    return command_real(c, "/top-k", "", NULL, 0);
}

static int command_seed(chat *c, const char *arg) {
    if (*arg && !parse_u64(arg, strlen(arg), &c->sampler.seed))
        return complain_number(c, "/seed", arg, "a whole number");
    return command_real(c, "/seed", "", NULL, 0);
}

static int command_tokens(chat *c, const char *arg) {
    uint64_t value = c->most;
    if (*arg && (!parse_u64(arg, strlen(arg), &value) || value > UINT32_MAX))
        return complain_number(c, "/tokens", arg, "a whole number; 0: all that the context holds");
    c->most = value;
    tell(c,
         value ? "(at most %llu ids of a reply, thinking included)"
               : "(a reply is as long as the context holds)%.0llu",
         (unsigned long long)value);
    return DONE;
}

/* What a state file needs besides the session to go on with the conversation. */
static json_object *chat_notes(const chat *c) {
    json_object *o = json_object_new_object(), *wait = json_object_new_array();
    json_object *starts = json_object_new_array(), *before = json_object_new_array();
    char seed[24];
    for (size_t i = chat_pos(c); i < c->n; i++)
        json_object_array_add(wait, json_object_new_int64(c->id[i]));
    for (size_t i = 0; i < c->n_turn; i++) {
        json_object *one = json_object_new_object();
        json_put_count(one, "n_call", c->turns[i].n_call);
        json_put_count(one, "n_tool", c->turns[i].n_tool);
        json_put(one, "calls", json_object_get(c->turns[i].calls));
        json_object_array_add(before, one);
        json_object_array_add(starts, json_object_new_int64((int64_t)c->turns[i].start));
    }
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)c->sampler.seed);
    json_put_count(o, "k3_chat", 1);
    json_put(o, "waiting", wait);
    json_put(o, "turns", starts);
    json_put(o, "before", before);
    json_put_count(o, "n_header", c->n_header);
    json_put_count(o, "n_call", c->n_call);
    json_put_count(o, "n_tool", c->render.n_tool);
    json_put(o, "calls", json_object_get(c->render.calls));
    json_put(o, "queue", json_object_get(c->queue));
    json_put(o, "tools", json_object_get(c->tools));
    json_put(o, "system", json_text(&c->system));
    json_put(o, "thinking", json_object_new_boolean(c->render.thinks));
    json_put(o, "effort", json_object_new_string(effort_name(c)));
    json_put(o, "temperature", json_object_new_double((double)c->sampler.temperature));
    json_put(o, "top_p", json_object_new_double((double)c->sampler.top_p));
    json_put_count(o, "top_k", c->sampler.top_k);
    json_put(o, "seed", json_object_new_string(seed));
    return o;
}

/* Read what waits, so that it need not wait again when the state is loaded. */
static int chat_feed_waiting(chat *c) {
    k3_error err = {{0}};
    size_t pos = chat_pos(c), context = (size_t)k3_session_context(c->s);
    size_t most = c->n < context ? c->n : context;
    if (most <= pos) return DONE;
    c->con.start_ns = c->con.last_ns = clock_ns();
    console_answer(&c->con, 0, 0);
    int status = k3_session_feed(c->s, c->id + pos, most - pos, K3_ROWS_NONE, NULL, &err);
    console_clear(&c->con);
    c->is_stored = false;
    if (status >= 0) return DONE;
    chat_recover_last(c);
    return complain_status(c, status, &err);
}

/* ~/ is the user's directory, as in a shell. */
static void path_home(buf *path, const char *arg) {
    const char *home = getenv("HOME");
    bool is_home = arg[0] == '~' && arg[1] == '/' && home && *home;
    if (is_home) buf_puts(path, home);
    buf_puts(path, arg + (is_home ? 1 : 0));
}

static int save_to(chat *c, const char *arg) {
    k3_error err = {{0}};
    k3_state_info info;
    char size[32];
    int status = K3_ENOMEM, rc = DONE;
    if (c->n_turn == 0) return complain(c, FAIL_USAGE, "/save: nothing was said yet");
    if (chat_pos(c) == 0 || c->n > chat_pos(c) + MANY_AGAIN) rc = chat_feed_waiting(c);
    if (rc != DONE) return rc;
    json_object *notes = chat_notes(c);
    size_t n = 0;
    const char *text = json_object_to_json_string_length(notes, JSON_C_TO_STRING_PLAIN, &n);
    if (text && n > K3_STATE_APP_MAX)
        rc = complain(c, FAIL_USAGE,
                      "%s: not saved: turns, tools and messages that wait take %zu bytes beside "
                      "the state, and a state file has room for %u",
                      arg, n, K3_STATE_APP_MAX);
    else if (text && json_count_values(text, n) > MOST_VALUES)
        rc = complain(c, FAIL_USAGE,
                      "%s: not saved: turns, tools and messages that wait have more than %d values",
                      arg, MOST_VALUES);
    else if (text)
        status = k3_session_save(c->s, arg, text, n, &info, &err);
    json_object_put(notes);
    if (rc != DONE) return rc;
    if (status < 0) return complain_status(c, status, &err);
    tell(c, "(saved %zu turns, %zu positions: %s, %s, %.1f s)", c->n_turn, c->n, arg,
         fmt_bytes(size, info.file_bytes), info.seconds);
    return DONE;
}

/* A command that takes the name of a file. */
static int command_file(chat *c, const char *name, const char *arg,
                        int (*run)(chat *c, const char *path)) {
    buf path = {0};
    if (!*arg) return complain(c, FAIL_USAGE, "%s needs a file name", name);
    path_home(&path, arg);
    int rc = run(c, buf_text(&path));
    buf_free(&path);
    return rc;
}

static int command_save(chat *c, const char *arg) { return command_file(c, "/save", arg, save_to); }

/* Notes come from a file that nobody vouches for: everything the code relies on is checked here.
 * Each of these sets *bad to the first key whose value will not do. */
static uint64_t note_count(json_object *o, const char *key, uint64_t most, const char **bad) {
    json_object *value = json_field(o, key);
    int64_t n = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
    if ((n < 0 || (uint64_t)n > most) && !*bad) *bad = key;
    return n < 0 ? 0 : (uint64_t)n;
}

static float note_real(json_object *o, const char *key, double most, const char **bad) {
    json_object *field = json_field(o, key);
    bool is_number = json_is(field, json_type_double) || json_is(field, json_type_int);
    double value = is_number ? json_object_get_double(field) : -1;
    if (!(value >= 0 && value <= most) && !*bad) *bad = key;
    return (float)value;
}

static const char *note_text(json_object *o, const char *key, const char **bad) {
    const char *text = json_string(o, key);
    if (!text && !*bad) *bad = key;
    return text ? text : "";
}

/* An array; of objects, if asked for. NULL is an array of none where there may be none. */
static json_object *note_array(json_object *o, const char *key, bool of_objects, bool may_lack,
                               const char **bad) {
    json_object *value = json_field(o, key);
    bool is_right = value ? json_is(value, json_type_array) : may_lack;
    for (size_t i = 0; is_right && value && of_objects && i < json_object_array_length(value); i++)
        is_right = json_is(json_object_array_get_idx(value, i), json_type_object);
    if (!is_right && !*bad) *bad = key;
    return is_right ? value : NULL;
}

static int notes_take_ids(chat *c, json_object *o, const char **bad) {
    json_object *wait = note_array(o, "waiting", false, false, bad);
    size_t n_run = 0;
    const uint32_t *run = k3_session_ids(c->s, &n_run);
    int rc = chat_append(c, run, n_run);
    for (size_t i = 0; rc == DONE && wait && i < json_object_array_length(wait); i++) {
        json_object *value = json_object_array_get_idx(wait, i);
        int64_t id = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
        uint32_t one = (uint32_t)id;
        if (id < 0 || (uint64_t)id >= c->n_vocab) {
            if (!*bad) *bad = "waiting";
            return rc;
        }
        rc = chat_append(c, &one, 1);
    }
    return rc;
}

/* The first turn begins at 0, each later one behind the one before, all of them among the ids. */
static int notes_take_turns(chat *c, json_object *o, const char **bad) {
    json_object *starts = note_array(o, "turns", false, false, bad);
    json_object *before = note_array(o, "before", true, true, bad);
    size_t n = starts ? json_object_array_length(starts) : 0;
    if (n == 0 && !*bad) *bad = "turns";
    if (before && json_object_array_length(before) != n && !*bad) *bad = "before";
    for (size_t i = 0; i < n && !*bad; i++) {
        json_object *value = json_object_array_get_idx(starts, i);
        int64_t at = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
        bool is_next = i == 0 ? at == 0 : at > (int64_t)c->turns[i - 1].start;
        if (!is_next || (uint64_t)at >= c->n) {
            *bad = "turns";
            return DONE;
        }
        int rc = turn_reserve(c);
        if (rc != DONE) return rc;
        turn u = {.start = (size_t)at};
        if (before) {
            json_object *one = json_object_array_get_idx(before, i);
            u.n_call = note_count(one, "n_call", INT64_MAX / 2, bad);
            u.n_tool = (unsigned)note_count(one, "n_tool", UINT32_MAX / 2, bad);
            u.calls = json_object_get(note_array(one, "calls", true, true, bad));
        }
        c->turns[c->n_turn++] = u;
    }
    c->n_header = (size_t)note_count(o, "n_header", c->n_turn > 1 ? c->turns[1].start : c->n, bad);
    return DONE;
}

/* Messages that wait must be such as a turn can be made of. */
static void notes_take_queue(chat *c, json_object *o, const char **bad) {
    json_object *queue = note_array(o, "queue", true, true, bad);
    k3_error err = {{0}};
    for (size_t i = 0; queue && i < json_object_array_length(queue); i++) {
        json_object *m = json_object_array_get_idx(queue, i);
        xtml x = {0};
        if (!json_equals(json_field(m, "role"), "system") ||
            render_system(&x, m, "queue", &err) < 0)
            if (!*bad) *bad = "queue";
        xtml_free(&x);
    }
    c->queue = json_object_get(queue);
}

static void notes_take_settings(chat *c, json_object *o, const char **bad) {
    json_object *thinking = json_field(o, "thinking");
    k3_error err = {{0}};
    const char *seed = note_text(o, "seed", bad);
    if (!json_is(thinking, json_type_boolean) && !*bad) *bad = "thinking";
    c->render.thinks = json_object_get_boolean(thinking);
    note_text(o, "effort", bad);
    if (effort_read(&c->render, json_field(o, "effort"), "effort", &err) < 0 && !*bad)
        *bad = "effort";
    c->sampler.temperature = note_real(o, "temperature", 100, bad);
    c->sampler.top_p = note_real(o, "top_p", 1, bad);
    c->sampler.top_k = (uint32_t)note_count(o, "top_k", UINT32_MAX, bad);
    if (!parse_u64(seed, strlen(seed), &c->sampler.seed) && !*bad) *bad = "seed";
}

/* Ids, turns and settings from the notes to `c`, which has none; the session is loaded. */
static int notes_take(chat *c, json_object *o, const char **bad) {
    json_object *system = json_field(o, "system");
    if (note_count(o, "k3_chat", INT64_MAX, bad) != 1 && !*bad) *bad = "k3_chat";
    int rc = notes_take_ids(c, o, bad);
    if (rc == DONE) rc = notes_take_turns(c, o, bad);
    if (rc != DONE) return rc;
    c->n_call = note_count(o, "n_call", INT64_MAX / 2, bad);
    c->render.n_tool = (unsigned)note_count(o, "n_tool", UINT32_MAX / 2, bad);
    c->render.calls = json_object_get(note_array(o, "calls", true, true, bad));
    c->tools = json_object_get(note_array(o, "tools", false, true, bad));
    notes_take_queue(c, o, bad);
    note_text(o, "system", bad);
    if (!*bad)
        buf_add_valid(&c->system, json_object_get_string(system),
                      (size_t)json_object_get_string_len(system));
    notes_take_settings(c, o, bad);
    return DONE;
}

/* What can be said of a file while this conversation still has its state. */
static int load_check(chat *c, const char *path) {
    k3_error err = {{0}};
    k3_state_head head;
    uint64_t context = k3_session_context(c->s);
    int status = k3_state_check(path, true, &head, &err);
    if (status < 0) return complain_status(c, status, &err);
    if (head.n_app == 0)
        return complain(c, FAIL_CHECK, "%s: a state, but of no conversation of `k3 chat`", path);
    if (head.n_pos > context)
        return complain(c, FAIL_IO,
                        "%s: holds %llu positions, and the context %llu; start with a "
                        "larger --context",
                        path, (unsigned long long)head.n_pos, (unsigned long long)context);
    return DONE;
}

/* The session was loaded with something else, or with nothing: the ids are still there. */
static void chat_keep(chat *c) {
    chat_drop_snapshots(c);
    k3_session_reset(c->s);
    if (c->n > MANY_AGAIN)
        tell(c, "(the conversation is kept; your next turn reads %zu positions again)", c->n);
}

static int load_from(chat *c, const char *arg) {
    k3_error err = {{0}};
    void *notes = NULL;
    size_t n_notes = 0, at;
    const char *why = "empty", *bad = NULL;
    buf text = {0};
    int rc = load_check(c, arg);
    if (rc != DONE) return rc;
    int status = k3_session_load(c->s, arg, &notes, &n_notes, NULL, &err);
    buf_add(&text, notes, notes ? n_notes : 0); /* with a NUL behind */
    free(notes);
    json_object *o = NULL;
    if (status >= 0 && text.p) o = json_parse_strict(text.p, text.n, NOTES_DEPTH, &at, &why);
    chat fresh = *c;
    fresh.queue = fresh.tools = fresh.render.calls = NULL;
    fresh.id = NULL;
    fresh.turns = NULL;
    fresh.n = fresh.cap = fresh.n_header = fresh.n_turn = fresh.cap_turn = 0;
    fresh.system = (buf){0};
    fresh.is_stored = false;
    if (status < 0)
        rc = complain_status(&fresh, status, &err);
    else if (why)
        rc = complain(&fresh, FAIL_CHECK, "%s: the notes of the conversation: %s", arg, why);
    else
        rc = notes_take(&fresh, o, &bad);
    if (rc == DONE && bad)
        rc = complain(&fresh, FAIL_CHECK,
                      "%s: no conversation of `k3 chat`: the notes' `%s` is missing or wrong", arg,
                      bad);
    json_object_put(o);
    buf_free(&text);
    c->told = fresh.told; /* what was said meanwhile is of both */
    fresh.con = c->con;
    fresh.notes = c->notes;
    chat_forget(rc == DONE ? c : &fresh);
    if (rc == DONE)
        *c = fresh;
    else
        chat_keep(c);
    if (rc == DONE) chat_own_settings(c);
    if (rc == DONE) tell(c, "(loaded %zu turns, %zu positions)", c->n_turn, c->n);
    return rc;
}

static int command_load(chat *c, const char *arg) {
    return command_file(c, "/load", arg, load_from);
}

static int command_undo(chat *c, const char *arg) {
    bool is_anyway = strcmp(arg, "anyway") == 0;
    if (*arg && !is_anyway)
        return complain(c, FAIL_USAGE, "/undo '%.*s': not `anyway`", text_cut(arg, 40), arg);
    if (c->n_turn == 0) return complain(c, FAIL_USAGE, "/undo: there is no turn to take back");
    turn u = c->turns[c->n_turn - 1];
    bool is_free = turn_is_free(c, &u);
    if (!is_free && !is_anyway)
        return complain(c, FAIL_BUDGET,
                        "/undo: no snapshot of that turn's start is in memory%s; `/undo anyway` "
                        "takes it back, and your next turn then reads %zu positions again",
                        c->cache ? " or in the cache"
                                 : " (--undo keeps more, --cache DIR keeps "
                                   "them on disk)",
                        u.start);
    turn *last = &c->turns[c->n_turn - 1];
    last->snap = last->after = NULL; /* needed a moment longer */
    last->row = NULL;
    chat_cut_turn(c);
    chat_recover(c, &u);
    turn_drop_snapshot(&u);
    c->is_stored = u.n_cached && chat_pos(c) == u.n_cached;
    size_t n_again = c->n > chat_pos(c) ? c->n - chat_pos(c) : 0;
    tell(c, "(taken back; %zu turns, %zu positions left%s)", c->n_turn, c->n,
         n_again > MANY_AGAIN ? ", to be read again with your next turn" : "");
    return DONE;
}

static int command_stats(chat *c, const char *arg) {
    k3_stats st;
    char held[32], ram[32], read[32], size[32];
    size_t n_free = 0;
    (void)arg;
    k3_session_stats(c->s, &st);
    while (n_free < c->n_turn && turn_is_free(c, &c->turns[c->n_turn - 1 - n_free])) n_free++;
    tell(c, "context   %zu of %llu positions, %zu turns; %zu can be undone at once", c->n,
         (unsigned long long)k3_session_context(c->s), c->n_turn, n_free);
    if (c->why && *c->why) tell_rates(c);
    tell(c, "experts   %llu used, %.1f %% in memory when wanted",
         (unsigned long long)st.expert_uses, percent(st.expert_hits, st.expert_uses));
    tell(c, "disk      %s read since the start; %.1f s of %.1f s computing spent waiting for it",
         fmt_bytes(read, st.read_bytes), (double)st.stall_ns * 1e-9, (double)st.compute_ns * 1e-9);
    tell(c, "memory    %s of %s", fmt_bytes(held, st.resident_bytes),
         fmt_bytes(ram, k3_engine_plan(c->e)->ram_bytes));
    if (c->cache) {
        k3_cache_stats cs;
        k3_cache_get_stats(c->cache, &cs);
        tell(c, "cache     %llu entries, %s; %llu hits, %llu misses, %llu positions not read again",
             (unsigned long long)cs.n_entries, fmt_bytes(size, cs.bytes),
             (unsigned long long)cs.hits, (unsigned long long)cs.misses,
             (unsigned long long)cs.restored_pos);
    } else {
        tell(c, "cache     off (--cache DIR)");
    }
    tell(c, "context_fnv %016llx",
         (unsigned long long)k3_fnv1a(K3_FNV_BASIS, c->id, c->n * sizeof *c->id));
    return DONE;
}

static int command_quit(chat *c, const char *arg) {
    (void)arg;
    c->is_over = true;
    return DONE;
}

typedef struct {
    const char *name, *arg, *help;
    int (*run)(chat *c, const char *arg);
} chat_command;

static const chat_command COMMAND[] = {
    {"/help", "", "this list", help_commands},
    {"/reset", "", "a new conversation", command_reset},
    {"/system", "[TEXT]", "a system message: before the first turn, or with your next one",
     command_system},
    {"/think", "[on|off|show|hide]", "think before answering; show it", command_think},
    {"/effort", "[low|medium|high|max|none]", "how much to think", command_effort},
    {"/temp", "[T]", "temperature; 0 is greedy", command_temp},
    {"/top-p", "[P]", "draw among the likeliest that hold P; 1 is off", command_top_p},
    {"/top-k", "[N]", "draw among the N likeliest; 0 is off", command_top_k},
    {"/seed", "[N]", "the same seed gives the same reply", command_seed},
    {"/tokens", "[N]", "most ids of a reply, thinking included; 0: all that fit", command_tokens},
    {"/save", "FILE", "write the conversation with its state", command_save},
    {"/load", "FILE", "go on from there", command_load},
    {"/undo", "[anyway]", "take the last turn back", command_undo},
    {"/stats", "", "context, speed, experts, disk, memory, cache", command_stats},
    {"/quit", "", "leave, as Ctrl-D does", command_quit},
};

static int help_commands(chat *c, const char *arg) {
    (void)arg;
    for (size_t i = 0; i < COUNT(COMMAND); i++) {
        char left[48];
        snprintf(left, sizeof left, "%s %s", COMMAND[i].name, COMMAND[i].arg);
        tell(c, "  %-34s %s", left, COMMAND[i].help);
    }
    if (c->is_terminal)
        tell(c, "  Tab completes commands and files. Ctrl-C stops a reply and keeps what was said. "
                "Alt-Enter, or \\ at the end of a "
                "line,\n  goes on with another line; pasted text may have many. // starts a "
                "message with /.");
    else if (!c->a->json)
        tell(c, "  On a pipe each line is a turn, and a newline on stdout (--null: a NUL) ends it, "
                "also\n  one that fails; commands write to stderr only. // starts a message with "
                "/.");
    return DONE;
}

static int chat_command_line(chat *c, const char *line) {
    char name[32];
    const char *best = NULL, *arg = line + strcspn(line, " \t");
    size_t distance = 4;
    int most = arg - line < 31 ? (int)(arg - line) : 31;
    snprintf(name, sizeof name, "%.*s", text_cut(line, most), line);
    arg += strspn(arg, " \t");
    for (size_t i = 0; i < COUNT(COMMAND); i++) {
        if (strcmp(COMMAND[i].name, name) != 0) continue;
        if (*arg && !*COMMAND[i].arg)
            return complain(c, FAIL_USAGE, "%s takes nothing more, '%.*s' was given", name,
                            text_cut(arg, 40), arg);
        return COMMAND[i].run(c, arg);
    }
    if (strcmp(name, "/exit") == 0 || strcmp(name, "/bye") == 0) return command_quit(c, "");
    if (strchr(line + 1, '/'))
        return complain(c, FAIL_USAGE,
                        "no command %s: a line that begins with / is one; // starts a message "
                        "with /",
                        name);
    for (size_t i = 0; i < COUNT(COMMAND); i++) nearest(name, COMMAND[i].name, &best, &distance);
    if (best) return complain(c, FAIL_USAGE, "no command %s: did you mean %s?", name, best);
    return complain(c, FAIL_USAGE, "no command %s: /help lists them, // starts a message with /",
                    name);
}

/* Blanks behind a command are no part of it. */
static int chat_command_run(chat *c, const char *line) {
    buf trimmed = {0};
    size_t n = strlen(line);
    while (n > 0 && strchr(" \t\r\n", line[n - 1])) n--;
    buf_add(&trimmed, line, n);
    int rc = trimmed.is_short ? complain(c, FAIL_IO, "no memory for this line")
                              : chat_command_line(c, buf_text(&trimmed));
    buf_free(&trimmed);
    return rc;
}

/* ==== 9. Lines in ====================================================================
 *
 * All input goes through one reader of bytes, so that what is typed ahead while a reply is made, or
 * pasted, waits here and not in the terminal's line of 4096. On a terminal libedit edits on top of
 * it; a bracketed paste comes in as one piece, newlines and all. While a reply is made the terminal
 * echoes nothing.
 */
enum { LINE_END = 0, LINE_TAKEN = 1, LINE_STOPPED = -1, LEAST_LINE = 1 << 20, MOST_LINE = 8 << 20 };

/* Text on its way to ids takes some ten times its size, which --ram does not count. */
static size_t line_most(const chat *c) {
    uint64_t part = k3_engine_plan(c->e)->ram_bytes / 256;
    if (c->a->json || part < LEAST_LINE) return LEAST_LINE;
    return part < MOST_LINE ? (size_t)part : MOST_LINE;
}

struct edit_state {
    unsigned char bytes[4096];
    size_t at, n;
    size_t most;        /* bytes kept of a line; one that has so many is refused */
    struct termios was; /* the terminal as it was found */
    bool has_termios;
    const char *prompt;
#ifdef K3_HAVE_libedit
    EditLine *el;
    History *history, *mine; /* all lines; those of this session                     */
    char *history_path;      /* NULL: not written                                    */
#endif
};

static volatile sig_atomic_t resized, resumed, terminated;
static struct termios *termios_at_exit; /* what a killing signal puts back */
static struct termios termios_reply;    /* while a reply is made */
static volatile sig_atomic_t is_replying;
static pthread_t main_thread; /* the one that waits for input */

/* Ctrl-C: the first stops the reply, the second gives its step up, the third kills. */
static void on_chat_signal(int number) {
    interrupted++;
    if (number != SIGINT) {
        interrupted += interrupted < 2;
        terminated = 1;
    }
    if (interrupted < 3) return;
    if (termios_at_exit) tcsetattr(STDIN_FILENO, TCSANOW, termios_at_exit);
    signal(number, SIG_DFL);
    raise(number);
}

static void on_resize(int number) {
    (void)number;
    resized = 1;
}

/* Ctrl-Z and fg: a shell leaves the terminal as it had it itself. */
static void on_resume(int number) {
    int error = errno;
    resumed = 1;
    if (!pthread_equal(pthread_self(), main_thread)) { /* all were stopped: any may wake first */
        pthread_kill(main_thread, number);
        return;
    }
    if (is_replying && tcgetpgrp(STDIN_FILENO) == getpgrp())
        tcsetattr(STDIN_FILENO, TCSANOW, &termios_reply);
    errno = error;
}

/* Reads at the prompt end when a signal comes; reads of weights go on. */
static void chat_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    main_thread = pthread_self();
    action.sa_handler = on_chat_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    action.sa_handler = on_resize;
    sigaction(SIGWINCH, &action, NULL);
    action.sa_handler = on_resume;
    sigaction(SIGCONT, &action, NULL);
}

/* After a signal: the line being edited takes the terminal's new size, or takes the terminal again
 * and is drawn anew. */
static void edit_resize(edit_state *in) {
#ifdef K3_HAVE_libedit
    if (resumed && in->el) {
        el_set(in->el, EL_PREP_TERM, 0);
        el_set(in->el, EL_PREP_TERM, 1);
        fputs("\n", stderr);
        el_set(in->el, EL_REFRESH, NULL);
    }
    if (resized && in->el) el_resize(in->el);
#else
    (void)in;
#endif
    resized = resumed = 0;
}

/* Wait for input. False when a signal that stops came first, however close: between looking at
 * `interrupted` and sleeping it is held back. */
static bool edit_await(edit_state *in) {
    static const int number[] = {SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGCONT};
    struct pollfd fd = {STDIN_FILENO, POLLIN, 0};
    sigset_t held, was;
    bool is_there = false;
    sigemptyset(&held);
    for (size_t i = 0; i < COUNT(number); i++) sigaddset(&held, number[i]);
    sigprocmask(SIG_BLOCK, &held, &was);
    while (!interrupted && !is_there) {
        edit_resize(in);
        int rc = ppoll(&fd, 1, NULL, &was);
        if (resumed) continue; /* a change of the terminal's mode looks like input */
        is_there = rc > 0 || (rc < 0 && errno != EINTR); /* read() says what is wrong */
    }
    sigprocmask(SIG_SETMASK, &was, NULL);
    return !interrupted;
}

/* The next byte of stdin; LINE_END, or LINE_STOPPED when a signal came first. */
static int edit_byte(edit_state *in, unsigned char *byte) {
    while (in->at == in->n) {
        if (!edit_await(in)) return LINE_STOPPED;
        ssize_t got = read(STDIN_FILENO, in->bytes, sizeof in->bytes);
        edit_resize(in);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return LINE_END;
        in->at = 0;
        in->n = (size_t)got;
    }
    *byte = in->bytes[in->at++];
    return LINE_TAKEN;
}

/* One line as it is, without its newline. */
static int edit_plain_line(edit_state *in, buf *line) {
    unsigned char byte;
    for (;;) {
        int rc = edit_byte(in, &byte);
        if (rc == LINE_END && line->n) return LINE_TAKEN;
        if (rc != LINE_TAKEN) return rc;
        if (byte == '\n') break;
        if (line->n < in->most) buf_add(line, (const char *)&byte, 1);
    }
    if (line->n && line->p[line->n - 1] == '\r') line->p[--line->n] = '\0';
    return LINE_TAKEN;
}

/* Whether the terminal shows what is typed. Nothing typed is lost either way. */
static void edit_echo(edit_state *in, bool is_on) {
    struct termios now = in->was;
    if (!in->has_termios) return;
    is_replying = 0;
    if (!is_on) {
        now.c_lflag &= ~(tcflag_t)(ECHO | ICANON);
        now.c_cc[VMIN] = 1;
        now.c_cc[VTIME] = 0;
    } else { /* typed ahead: out of the terminal before its mode changes */
        struct pollfd fd = {STDIN_FILENO, POLLIN, 0};
        memmove(in->bytes, in->bytes + in->at, in->n - in->at);
        in->n -= in->at;
        in->at = 0;
        while (in->n < sizeof in->bytes && poll(&fd, 1, 0) > 0) {
            ssize_t got = read(STDIN_FILENO, in->bytes + in->n, sizeof in->bytes - in->n);
            if (got <= 0) break;
            in->n += (size_t)got;
        }
    }
    tcsetattr(STDIN_FILENO, TCSADRAIN, &now);
    termios_reply = now;
    is_replying = !is_on;
}

#ifdef K3_HAVE_libedit

static edit_state *edit_of(EditLine *el) {
    void *data = NULL;
    el_get(el, EL_CLIENTDATA, &data);
    return data;
}

static char *edit_prompt(EditLine *el) { return (char *)(uintptr_t)edit_of(el)->prompt; }

/* One character for libedit; bytes that are no UTF-8 become U+FFFD. */
static int edit_character(EditLine *el, wchar_t *out) {
    edit_state *in = edit_of(el);
    unsigned char byte;
    int rc = edit_byte(in, &byte);
    if (rc != LINE_TAKEN) return rc == LINE_END ? 0 : -1;
    uint32_t width = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    uint32_t point = width == 1 ? byte : byte & (0x7fu >> width);
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    bool is_bad = (byte >= 0x80 && byte < 0xc2) || byte > 0xf4;
    for (uint32_t i = 1; i < width && !is_bad; i++) {
        rc = edit_byte(in, &byte);
        if (rc != LINE_TAKEN) return rc == LINE_END ? 0 : -1;
        is_bad = (byte & 0xc0) != 0x80;
        if (is_bad) in->at--; /* it may begin the next one */
        point = point << 6 | (byte & 0x3f);
    }
    is_bad =
        is_bad || point < least[width] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000);
    *out = is_bad ? 0xfffd : (wchar_t)point;
    return 1;
}

static unsigned char edit_newline(EditLine *el, int key) {
    (void)key;
    return el_insertstr(el, "\n") == 0 ? CC_REFRESH : CC_ERROR;
}

/* ESC [ 200 ~ was read: everything up to ESC [ 201 ~ is text. */
static unsigned char edit_paste(EditLine *el, int key) {
    static const wchar_t end[] = L"\033[201~";
    enum { N_END = 6 };
    wchar_t *text = NULL;
    size_t n = 0, cap = 0;
    unsigned char result = CC_ERROR;
    (void)key;
    for (;;) {
        wchar_t one;
        if (n + 2 > cap) {
            wchar_t *grown = realloc(text, (cap = cap * 2 + 256) * sizeof *grown);
            if (!grown) goto done;
            text = grown;
        }
        if (edit_character(el, &one) != 1) goto done;
        if (one == L'\r') one = L'\n';
        if (one == 0) continue;
        text[n++] = one;
        if (n >= N_END && memcmp(text + n - N_END, end, N_END * sizeof *end) == 0) break;
        if (n >= MOST_LINE) goto done;
    }
    text[n - N_END] = 0;
    result = n == N_END || el_winsertstr(el, text) == 0 ? CC_REFRESH : CC_ERROR;
done:
    free(text);
    return result;
}

/* What Tab completes: the name of a command behind a / that begins the line, then the file or the
 * words that its row in COMMAND names. Anything else is a message, where Tab has nothing to add. */
static completion edit_complete(const char *line) {
    const char *arg = line + strcspn(line, " \t");
    const char *word[COUNT(COMMAND) + 1] = {NULL};
    char words[64], *rest = words;
    size_t n = 0, i = 0;
    if (line[0] != '/') return (completion){NULL, NULL, 0};
    if (!*arg) {
        for (; i < COUNT(COMMAND); i++) word[n++] = COMMAND[i].name;
        return complete_word(line, word);
    }
    while (i < COUNT(COMMAND) && (strncmp(COMMAND[i].name, line, (size_t)(arg - line)) != 0 ||
                                  COMMAND[i].name[arg - line]))
        i++;
    arg += strspn(arg, " \t");
    if (i == COUNT(COMMAND)) return (completion){NULL, NULL, 0};
    if (strcmp(COMMAND[i].arg, "FILE") == 0) return complete_path(arg);
    snprintf(words, sizeof words, "%s", COMMAND[i].arg); /* "[on|off]", "[TEXT]" */
    while (n < COUNT(COMMAND) && (word[n] = strsep(&rest, "[|]")) != NULL)
        if (word[n][0] >= 'a' && word[n][0] <= 'z') n++;
    word[n] = NULL;
    return complete_word(arg, word);
}

/* Tab: what is certain is added; where more than one fits they are listed and the line stays. */
static unsigned char edit_tab(EditLine *el, int key) {
    const LineInfo *info = el_line(el);
    buf line = {0}, list = {0};
    enum { MOST_LISTED = 100 };
    (void)key;
    buf_add(&line, info->buffer, (size_t)(info->cursor - info->buffer));
    completion c = edit_complete(buf_text(&line));
    buf_free(&line);
    bool is_added = c.n && c.add[0] && el_insertstr(el, c.add) == 0;
    if (c.n > 1 && !is_added) {
        for (size_t i = 0; i < c.n && i < MOST_LISTED; i++) {
            buf name = {0};
            buf_add_valid(&name, c.word[i], strlen(c.word[i]));
            buf_puts(&list, i ? "  " : "");
            put_terminal(&list, buf_text(&name), name.n);
            buf_free(&name);
        }
        if (c.n > MOST_LISTED) buf_printf(&list, "  and %zu more", c.n - MOST_LISTED);
        fprintf(stderr, "\n%s\n", buf_text(&list));
    }
    unsigned char result = is_added ? CC_REFRESH : c.n > 1 ? CC_REDISPLAY : CC_REFRESH_BEEP;
    buf_free(&list);
    completion_free(&c);
    return result;
}

/* Where lines are kept: --history, or k3/history in the user's state directory. */
static char *history_find(const char *given) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char path[4096], *slash;
    if (given) return *given ? strdup(given) : NULL;
    if (state && *state == '/')
        snprintf(path, sizeof path, "%s/k3/history", state);
    else if (home && *home == '/')
        snprintf(path, sizeof path, "%s/.local/state/k3/history", home);
    else
        return NULL;
    for (slash = path; (slash = strchr(slash + 1, '/')) != NULL; *slash = '/') {
        *slash = '\0';
        mkdir(path, 0700); /* there already, or the history is not written */
    }
    return strdup(path);
}

/* A new list of at most 1000 lines, with those of the file: false when it is no history. */
static History *history_read(const char *path, bool *is_history) {
    HistEvent event;
    struct stat st;
    History *h = history_init();
    *is_history = true;
    if (!h) return NULL;
    history(h, &event, H_SETSIZE, 1000);
    history(h, &event, H_SETUNIQUE, 1);
    if (!path || stat(path, &st) != 0 || (S_ISREG(st.st_mode) && st.st_size == 0)) return h;
    *is_history = S_ISREG(st.st_mode) && history(h, &event, H_LOAD, path) >= 0;
    return h;
}

/* What is there is read first: a file that is something else is never written. */
static void history_begin(chat *c) {
    edit_state *in = c->edit;
    struct stat st;
    bool is_history, is_mine;
    in->history = history_read(in->history_path, &is_history);
    in->mine = history_read(NULL, &is_mine);
    if (is_history) return;
    if (stat(in->history_path, &st) == 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)))
        complain(c, DONE, "--history %s: is no history; it is left alone, and lines are not kept",
                 in->history_path);
    free(in->history_path);
    in->history_path = NULL;
}

/* The file at `path`, made if absent, locked until it is closed. Others write it by rename: a lock
 * of a file that is no longer there is not the one. */
static int history_lock(const char *path) {
    for (int tries = 0; tries < 100; tries++) {
        struct stat a, b;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) return -1;
        if (flock(fd, LOCK_EX) == 0 && fstat(fd, &a) == 0 && stat(path, &b) == 0 &&
            a.st_dev == b.st_dev && a.st_ino == b.st_ino)
            return fd;
        close(fd);
    }
    return -1;
}

/* This session's lines behind what the file now has, which another terminal may have written;
 * whole or not at all. */
static void history_write(edit_state *in) {
    HistEvent event;
    char path[PATH_MAX], temporary[PATH_MAX + 8];
    bool is_history = false;
    int fd = history_lock(in->history_path);
    if (fd < 0 || !realpath(in->history_path, path)) goto done;
    History *all = history_read(path, &is_history);
    for (int rc = history(in->mine, &event, H_LAST); all && rc >= 0;
         rc = history(in->mine, &event, H_PREV)) {
        HistEvent ignored;
        history(all, &ignored, H_ENTER, event.str);
    }
    snprintf(temporary, sizeof temporary, "%s.k3tmp", path);
    if (all && is_history) {
        mode_t mask = umask(077);
        unlink(temporary); /* under the lock it is nobody's */
        if (history(all, &event, H_SAVE, temporary) < 0 || rename(temporary, path) != 0)
            unlink(temporary);
        umask(mask);
    }
    if (all) history_end(all);
done:
    if (fd >= 0) close(fd);
}

static void edit_open(chat *c) {
    edit_state *in = c->edit;
    in->el =
        el_init("k3", stdin, c->con.is_tty && !isatty(STDOUT_FILENO) ? stderr : stdout, stderr);
    if (!in->el) return;
    el_set(in->el, EL_CLIENTDATA, in);
    el_set(in->el, EL_PROMPT, edit_prompt);
    el_set(in->el, EL_EDITOR, "emacs");
    el_set(in->el, EL_SIGNAL, 0);
    el_wset(in->el, EL_GETCFN, edit_character);
    el_wset(in->el, EL_ADDFN, L"k3-newline", L"insert a newline", edit_newline);
    el_wset(in->el, EL_ADDFN, L"k3-paste", L"insert pasted text", edit_paste);
    el_set(in->el, EL_BIND, "\\e\r", "k3-newline", NULL);
    el_set(in->el, EL_BIND, "\\e\n", "k3-newline", NULL);
    el_set(in->el, EL_BIND, "\\e[200~", "k3-paste", NULL);
    el_wset(in->el, EL_ADDFN, L"k3-complete", L"complete commands and files", edit_tab);
    el_set(in->el, EL_BIND, "\t", "k3-complete", NULL);
    el_set(in->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    in->history_path = history_find(c->a->history);
    history_begin(c);
    if (in->history) el_set(in->el, EL_HIST, history, in->history);
    el_source(in->el, NULL);
}

static void edit_close(edit_state *in) {
    HistEvent event;
    if (in->mine && in->history_path && history(in->mine, &event, H_FIRST) >= 0) history_write(in);
    if (in->el) el_end(in->el);
    if (in->history) history_end(in->history);
    if (in->mine) history_end(in->mine);
    free(in->history_path);
}

/* One line by libedit. */
static int edit_terminal_line(chat *c, buf *line) {
    edit_state *in = c->edit;
    int n = 0;
    const char *text;
    if (!in->el) {
        fputs(in->prompt, stderr);
        return edit_plain_line(in, line);
    }
    edit_resize(in);
    if (c->has_color) fputs("\033[?2004h", stderr); /* pastes come in brackets */
    text = el_gets(in->el, &n);
    if (c->has_color) fputs("\033[?2004l", stderr);
    if (interrupted) {
        el_reset(in->el);
        return LINE_STOPPED;
    }
    if (!text || n <= 0) return LINE_END;
    buf_add(line, text, (size_t)n);
    if (line->n && line->p[line->n - 1] == '\n') line->p[--line->n] = '\0';
    return LINE_TAKEN;
}

static void edit_remember(chat *c, const buf *line) {
    HistEvent event;
    if (line->n == 0 || line->n >= 65536) return;
    if (c->edit->history) history(c->edit->history, &event, H_ENTER, line->p);
    if (c->edit->mine) history(c->edit->mine, &event, H_ENTER, line->p);
}

#else

static void edit_open(chat *c) { (void)c; }
static void edit_close(edit_state *in) { (void)in; }
static void edit_remember(chat *c, const buf *line) { (void)c, (void)line; }

static int edit_terminal_line(chat *c, buf *line) {
    fputs(c->edit->prompt, stderr);
    return edit_plain_line(c->edit, line);
}

#endif

/* What is one turn or command: on a terminal a \ at a line's end goes on with the next. */
static int edit_line(chat *c, buf *line) {
    buf_clear(line);
    if (!c->is_terminal) return edit_plain_line(c->edit, line);
    c->edit->prompt = "> ";
    edit_echo(c->edit, true);
    int rc;
    for (;;) {
        buf part = {0};
        rc = edit_terminal_line(c, &part);
        buf_add(line, buf_text(&part), part.n);
        buf_free(&part);
        if (rc != LINE_TAKEN || line->n == 0 || line->p[line->n - 1] != '\\') break;
        line->p[line->n - 1] = '\n';
        c->edit->prompt = ". ";
    }
    if (rc == LINE_TAKEN) edit_remember(c, line);
    edit_echo(c->edit, false);
    return rc;
}

/* ==== 10. The command ================================================================
 *
 * Everything is checked before weights are read: options, tokenizer, marks, a file to render.
 */

/* --render: a line of ids and a line for each segment; --ids-only the first, --json all in one. */
static int render_print(const cli_args *a, const xtml *x) {
    json_object *o = json_object_new_object(), *ids = json_object_new_array();
    json_object *segments = json_object_new_array();
    int rc = DONE;
    for (size_t i = 0; i < x->n_id && a->json; i++)
        json_object_array_add(ids, json_object_new_int64(x->id[i]));
    for (size_t i = 0; i < x->n_id && !a->json; i++)
        printf("%s%u", i ? "," : "", (unsigned)x->id[i]);
    if (!a->json) puts("");
    for (size_t i = 0; i < x->n_segment && !a->ids_only; i++) {
        const xtml_segment *s = &x->segment[i];
        const char *mode = s->is_control ? "control" : "text";
        if (a->json) {
            json_object *one = json_object_new_object(), *of = json_object_new_array();
            for (size_t j = 0; j < s->n_ids; j++)
                json_object_array_add(of, json_object_new_int64(x->id[s->first_id + j]));
            json_put(one, "mode", json_object_new_string(mode));
            json_put(one, "text", json_object_new_string_len(x->text.p + s->at, (int)s->n));
            json_put(one, "ids", of);
            json_object_array_add(segments, one);
            continue;
        }
        printf("%s\t", mode);
        for (size_t j = 0; j < s->n_ids; j++)
            printf("%s%u", j ? "," : "", (unsigned)x->id[s->first_id + j]);
        putchar('\t');
        put_escaped(x->text.p + s->at, s->n);
        puts("");
    }
    json_put(o, "ids", ids);
    if (!a->ids_only) json_put(o, "segments", json_object_get(segments));
    json_object_put(segments);
    if (a->json)
        rc = out_json_line(o);
    else
        json_object_put(o);
    return rc != DONE ? rc : fflush(stdout) != 0 ? fail_stdout(errno) : DONE;
}

/* Line and column of an error in JSON. */
static int fail_json(const char *name, const char *p, size_t at, const char *why) {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        column = p[i] == '\n' ? 1 : column + 1;
        line += p[i] == '\n';
    }
    return fail(FAIL_USAGE, "%s: line %zu, column %zu: %s", name, line, column, why);
}

static int render_file(const cli_args *a, k3_tokenizer *t) {
    const char *name = strcmp(a->render, "-") == 0 ? "stdin" : a->render, *why = NULL;
    render_state s = {.thinks = !a->no_think, .effort = EFFORT[a->effort]};
    blob file = {0};
    xtml x = {0};
    k3_error err = {{0}};
    buf text = {0};
    size_t at = 0;
    int rc = blob_read(&file, a->render, SIZE_MAX), status = K3_OK;
    buf_add(&text, file.p, file.n); /* with a NUL behind */
    free(file.p);
    if (rc == DONE && text.is_short) rc = fail_memory(name, file.n);
    json_object *root = rc == DONE ? json_read(text.p, text.n, &at, &why) : NULL;
    if (why) rc = fail_json(name, text.p, at, why);
    if (rc == DONE) status = render_request(&x, root, &s, &err);
    if (rc == DONE && status >= 0) status = xtml_encode(&x, t, &err);
    if (status < 0) rc = fail(exit_code(status), "%s: %s", name, err.text);
    if (rc == DONE) rc = render_print(a, &x);
    json_object_put(root);
    json_object_put(s.calls);
    xtml_free(&x);
    buf_free(&text);
    return rc;
}

uint64_t chat_template_ids(k3_tokenizer *t) {
    render_state s = {.thinks = true, .effort = EFFORT[EFFORT_MAX]};
    chat_marks marks;
    xtml x = {0};
    k3_error err = {{0}};
    uint64_t n = 0;
    const char *text = "[{\"role\":\"user\",\"content\":\"\"}]", *why = NULL;
    size_t at = 0;
    json_object *root = json_read(text, strlen(text), &at, &why);
    if (!why && marks_find(&marks, t, &err) >= 0 && render_request(&x, root, &s, &err) >= 0 &&
        xtml_encode(&x, t, &err) >= 0)
        n = x.n_id;
    json_object_put(root);
    json_object_put(s.calls);
    xtml_free(&x);
    return n;
}

/* A system message of --json waits for the next turn. */
static int chat_json_system(chat *c, json_object *m) {
    k3_error err = {{0}};
    xtml x = {0};
    int status = message_check(m, "system", "message", &err);
    if (status >= 0)
        status = render_system(&x, m, "message", &err); /* now, so that the turn cannot fail */
    xtml_free(&x);
    if (status < 0) return complain_status(c, status, &err);
    if (!c->queue) c->queue = json_object_new_array();
    json_object_array_add(c->queue, json_object_get(m));
    tell(c, "(goes with your next message)");
    return DONE;
}

/* A line of --json. An object with `messages` is a whole conversation, as OpenAI's API means it; a
 * text, a message or an array of messages is an addition to the one that is there, whatever made it.
 * An object with `command` is a command. */
static int chat_json(chat *c, const buf *line) {
    k3_error err = {{0}};
    const char *why;
    size_t at;
    json_object *root = json_read(buf_text(line), line->n, &at, &why), *messages = NULL;
    if (why) return complain(c, FAIL_USAGE, "this line is no JSON: column %zu: %s", at + 1, why);
    const char *command = json_string(root, "command");
    int rc = DONE, status = K3_OK;
    c->streams = false;
    if (command && json_object_object_length(root) == 1) {
        rc = chat_command_run(c, command);
    } else if (json_equals(json_field(root, "role"), "system")) {
        rc = chat_json_system(c, root);
    } else if ((status = request_messages(root, &messages, &err)) < 0) {
        rc = complain_status(c, status, &err);
    } else if (is_request(root)) {
        c->streams = json_object_get_boolean(json_field(root, "stream"));
        rc = chat_whole(c, messages, root);
    } else {
        rc = chat_turn(c, messages);
    }
    json_object_put(messages);
    json_object_put(root);
    return rc;
}

/* With --json every line in gets a line out: a reply wrote its own. */
static int chat_json_answer(chat *c, int rc, bool is_command) {
    if (rc == DONE && !is_command) return DONE;
    json_object *o = json_object_new_object(), *error = json_object_new_object();
    if (rc == DONE) {
        json_put(o, "done", json_text(&c->told));
    } else {
        json_put(error, "message", json_text(&c->told));
        json_put(error, "code", json_object_new_int(rc));
        json_put(o, "error", json_object_get(error));
    }
    json_object_put(error);
    return out_json_line(o);
}

static int chat_text_turn(chat *c, const char *p, size_t n) {
    json_object *messages = json_object_new_array(), *m = json_object_new_object();
    json_put(m, "role", json_object_new_string("user"));
    json_put(m, "content", json_object_new_string_len(p, (int)n));
    json_object_array_add(messages, m);
    int rc = chat_turn(c, messages);
    json_object_put(messages);
    return rc;
}

/* Why a line cannot be taken at all. */
static int line_check(chat *c, const buf *line) {
    if (line->is_short) return complain(c, FAIL_IO, "no memory for this line");
    if (line->n < c->edit->most) return DONE;
    return complain(c, FAIL_USAGE, "a line of %zu KiB or more is no message%s", c->edit->most >> 10,
                    c->a->json ? "" : " with this --ram");
}

/* Whatever becomes of a line: with --json it gets a line, and on a pipe a turn its end. */
static int chat_line(chat *c, const buf *line) {
    const char *p = buf_text(line);
    uint64_t n_before = c->n_reply;
    int rc = line_check(c, line);
    if (c->a->json) {
        if (rc == DONE) rc = chat_json(c, line);
        int answered = chat_json_answer(c, rc, c->n_reply == n_before);
        if (rc != DONE || c->n_reply == n_before) buf_clear(&c->told);
        say_told(c);
        return answered != DONE ? answered : rc;
    }
    if (p[0] == '/' && p[1] != '/') return rc == DONE ? chat_command_run(c, p) : rc;
    size_t skip = p[0] == '/' ? 1 : 0;
    if (rc == DONE) rc = chat_text_turn(c, p + skip, line->n - skip);
    if (c->n_reply == n_before && !c->is_terminal) {
        int ended = out_write(c->a->null_ends ? "\0" : "\n", 1);
        if (rc == DONE) rc = ended;
    }
    return rc;
}

static bool is_blank(const buf *line) {
    for (size_t i = 0; i < line->n; i++)
        if (!strchr(" \t\r\n", line->p[i]) || !line->p[i]) return false;
    return true;
}

/* Lines until there are no more. The exit code: that of the first that failed, on a pipe. */
static int chat_loop(chat *c) {
    buf line = {0};
    int rc = DONE;
    while (!c->is_over && !terminated && !ferror(stdout)) {
        if (c->is_terminal) interrupted = 0; /* on a pipe it ends everything, whenever it came */
        int got = interrupted ? LINE_STOPPED : edit_line(c, &line);
        if (got == LINE_STOPPED && c->is_terminal && !terminated) {
            fputs("\n(Ctrl-D or /quit leaves)\n", stderr);
            continue;
        }
        if (got == LINE_STOPPED) terminated = 1;
        if (got == LINE_END && c->is_terminal) fputs("\n", stderr);
        if (got != LINE_TAKEN) break;
        if (!line.is_short && is_blank(&line)) continue;
        int failed = chat_line(c, &line);
        if (line.is_short) buf_free(&line);
        if (failed != DONE && c->worst == DONE) c->worst = failed;
    }
    buf_free(&line);
    if (terminated) rc = INTERRUPTED;
    if (rc == DONE && !c->is_terminal) rc = c->worst;
    return ferror(stdout) ? FAIL_IO : rc;
}

/* The engine with room for snapshots, or, where the budget has none for them, without. */
static int chat_engine(chat *c) {
    k3_options o = engine_options(c->a, c->dir, &c->con);
    c->progress = o.progress;
    o.progress = chat_progress;
    o.note = chat_note;
    k3_error err = {{0}};
    engine_gpu(c->a, &o);
    o.snapshots = (uint32_t)c->a->undo;
    int status = k3_engine_open(&c->e, &o, &err);
    console_clear(&c->con);
    if (status == K3_EBUDGET && o.snapshots && !is_given(c->a, "--undo")) {
        o.snapshots = 0;
        status = k3_engine_open(&c->e, &o, &err);
        console_clear(&c->con);
        if (status >= 0 && !c->a->quiet)
            say("note: --ram has no room for a snapshot: /undo has to read again%s",
                c->a->cache ? " what the cache does not have" : ", or needs --cache DIR");
    }
    if (status < 0) return fail_status(status, &err);
    c->con.n_layers = k3_engine_shape(c->e)->n_layers;
    threads_say(&c->con, c->e, &o);
    return DONE;
}

static int chat_check_vocabulary(const chat *c) {
    const uint32_t id[] = {c->marks.open, c->marks.close, c->marks.sep, c->marks.end};
    for (size_t i = 0; i < COUNT(id); i++)
        if (id[i] >= c->n_vocab)
            return fail(FAIL_MODEL,
                        "the chat format needs id %u, and this model's vocabulary has "
                        "%zu: it was not made for chat; `k3 run` continues a text",
                        (unsigned)id[i], c->n_vocab);
    return DONE;
}

/* What was asked for on the command line wins over what --load brought. */
static int chat_apply_given(chat *c) {
    const cli_args *a = c->a;
    bool thought = c->render.thinks;
    const char *before = c->render.effort;
    if (is_given(a, "--temperature")) c->sampler.temperature = a->temperature;
    if (is_given(a, "--top-p")) c->sampler.top_p = a->top_p;
    if (is_given(a, "--top-k")) c->sampler.top_k = (uint32_t)a->top_k;
    if (is_given(a, "--seed")) c->sampler.seed = a->seed;
    if (is_given(a, "--no-think")) c->render.thinks = !a->no_think;
    if (is_given(a, "--effort")) c->render.effort = EFFORT[a->effort];
    if (before == c->render.effort) return DONE;
    int rc = chat_set_render(c, thought, before);
    if (rc == DONE) tell_again(c);
    return rc;
}

/* Defaults that follow from the model alone, never from the machine: the same command says the same
 * everywhere. A model of this size is read from disk again for each id, and what suits a small one
 * (all the thinking it wants, no limit) would be hours. */
#define LARGE_MODEL_BYTES (64ull << 30)
enum { LARGE_MODEL_TOKENS = 2048 };

static bool is_large_model(const k3_shape *s) {
    uint64_t n_experts = (uint64_t)(s->n_layers - s->n_dense) * s->n_experts;
    return s->trunk_bytes + n_experts * s->expert_bytes >= LARGE_MODEL_BYTES;
}

static void chat_defaults(chat *c) {
    bool is_large = is_large_model(k3_engine_shape(c->e));
    c->most = c->a->tokens;
    if (is_large && !is_given(c->a, "--tokens")) c->most = LARGE_MODEL_TOKENS;
    if (is_large && !is_given(c->a, "--effort")) c->render.effort = EFFORT[EFFORT_LOW];
    chat_own_settings(c);
}

/* Bytes read from disk for one id of a reply, by the plan. Experts are taken to be wanted evenly: hot
 * ones that stay in memory make it less, checks and far boxes are not counted. */
static double reply_id_bytes(const k3_shape *s, const k3_plan *p) {
    double wanted = (double)(s->n_layers - s->n_dense) * s->top_k * (double)s->expert_bytes;
    double kept = s->n_experts && p->quota < s->n_experts ? (double)p->quota / s->n_experts : 1;
    return (double)p->streamed_bytes + wanted * (1 - kept);
}

static const char *fmt_time(char text[32], double seconds) {
    if (seconds < 120)
        snprintf(text, 32, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
    else if (seconds < 7200)
        snprintf(text, 32, "%.0f min", seconds / 60);
    else
        snprintf(text, 32, seconds < 360000 ? "%.1f h" : "%.0f h", seconds / 3600);
    return text;
}

/* What a reply may take, said before the first one: a line about the settings and, where weights are
 * read again and again, one about bytes and time. */
static void replies_describe(buf *out, const chat *c, const k3_shape *s, const k3_plan *p) {
    enum { SHORT_REPLY = 200 };
    char id[32], some[32], all[32], bytes[32];
    uint64_t most = c->most && c->most < p->context ? c->most : p->context;
    double n_bytes = reply_id_bytes(s, p);
    buf_printf(out, "replies: thinking %s, effort %s, ", c->render.thinks ? "on" : "off",
               effort_name(c));
    if (c->most)
        buf_printf(out, "at most %llu ids, thinking included", (unsigned long long)c->most);
    buf_puts(out, c->most ? "" : "as long as the context holds");
    buf_puts(out, " (--effort, --no-think, --tokens; /effort, /think, /tokens)");
    if (n_bytes <= 0) return;
    buf_printf(out, "\nk3: time: %s read for each id of a reply",
               fmt_bytes(bytes, (uint64_t)n_bytes));
    if (p->disk_bytes_per_s <= 0) {
        buf_puts(out, "; how fast the disk gives them was not measured (--io auto measures)");
        return;
    }
    double seconds = n_bytes / p->disk_bytes_per_s;
    buf_printf(out,
               ", about %s: a reply of %d ids %s, the longest of %llu %s; less where experts "
               "stay in memory, and the prompt comes first (`k3 plan`)",
               fmt_time(id, seconds), SHORT_REPLY, fmt_time(some, seconds * SHORT_REPLY),
               (unsigned long long)most, fmt_time(all, seconds * (double)most));
}

static void chat_say_replies(const chat *c) {
    buf text = {0};
    if (c->a->quiet || !(c->is_terminal || c->a->verbose || is_streaming(c->e))) return;
    replies_describe(&text, c, k3_engine_shape(c->e), k3_engine_plan(c->e));
    say("%s", buf_text(&text));
    buf_free(&text);
}

static int chat_open(chat *c) {
    const cli_args *a = c->a;
    k3_error err = {{0}};
    int rc = chat_engine(c);
    if (rc != DONE) return rc;
    c->n_vocab = k3_engine_shape(c->e)->vocab_size;
    c->marks.stop[3] = k3_engine_shape(c->e)->eos_id;
    rc = chat_check_vocabulary(c);
    if (rc != DONE) return rc;
    c->row = malloc(c->n_vocab * sizeof *c->row);
    c->scratch = malloc(k3_sample_scratch(c->n_vocab) + 1);
    if (!c->row || !c->scratch) return fail_memory("a row of logits", c->n_vocab * sizeof *c->row);
    int status = k3_session_new(&c->s, c->e, 0, &err);
    if (status >= 0 && a->cache)
        status = k3_cache_open(&c->cache, c->e, a->cache, a->cache_size, &err);
    if (status < 0) return fail_status(status, &err);
    if (a->verbose || (is_streaming(c->e) && !a->quiet)) plan_say(c->e);
    chat_defaults(c);
    if (a->load) {
        rc = load_from(c, a->load);
        if (rc == DONE) rc = chat_apply_given(c);
        chat_own_settings(c);
        if (rc == DONE && a->quiet) buf_clear(&c->told);
        say_told(c);
    }
    if (rc == DONE) chat_say_replies(c);
    return rc;
}

static void chat_close(chat *c) {
    if (c->s && c->e) {
        chat_forget(c);
        k3_cache_close(c->cache);
        k3_session_free(c->s);
    }
    k3_engine_close(c->e);
    k3_tokenizer_close(c->t);
    chat_forget(c);
    buf_free(&c->told);
    buf_free(&c->notes);
    free(c->row);
    free(c->scratch);
}

static void chat_settings(chat *c, const cli_args *a) {
    const char *terminal = getenv("TERM");
    c->a = a;
    c->render = (render_state){.thinks = !a->no_think, .effort = EFFORT[a->effort]};
    chat_own_settings(c);
    c->sampler = (k3_sampler){a->temperature, a->top_p, (uint32_t)a->top_k, a->seed};
    if (a->system) buf_add_valid(&c->system, a->system, strlen(a->system));
    c->is_terminal = !a->json && isatty(STDIN_FILENO) == 1 &&
                     (isatty(STDOUT_FILENO) == 1 || isatty(STDERR_FILENO) == 1);
    c->is_screen = !a->json && isatty(STDOUT_FILENO) == 1;
    c->has_color =
        c->is_terminal && c->is_screen && terminal && *terminal && strcmp(terminal, "dumb") != 0;
    c->hides_think = a->hide_think;
    console_init(&c->con, a);
}

/* Locale for libedit: its characters are UTF-8 wherever the user is. Numbers stay in C's. */
static void chat_locale(void) {
    const char *set = setlocale(LC_CTYPE, "");
    if (!set || (!strstr(set, "UTF-8") && !strstr(set, "utf8"))) setlocale(LC_CTYPE, "C.UTF-8");
}

static int chat_run(chat *c) {
    edit_state in;
    memset(&in, 0, sizeof in);
    c->edit = &in;
    chat_signals();
    int rc = chat_open(c);
    if (rc != DONE) return interrupted ? INTERRUPTED : rc;
    if (c->is_terminal) {
        chat_locale();
        in.has_termios = tcgetattr(STDIN_FILENO, &in.was) == 0;
        if (in.has_termios) termios_at_exit = &in.was;
        edit_open(c);
        if (!c->a->quiet)
            fprintf(stderr, "k3 %s: /help lists the commands, Ctrl-D leaves\n", K3_VERSION);
    }
    in.most = line_most(c);
    rc = chat_loop(c);
    if (c->is_terminal) {
        edit_echo(&in, true);
        edit_close(&in);
        if (in.has_termios) tcsetattr(STDIN_FILENO, TCSADRAIN, &in.was);
        termios_at_exit = NULL;
    }
    return rc;
}

int cmd_chat(const cli_args *a) {
    chat c;
    k3_error err = {{0}};
    memset(&c, 0, sizeof c);
    chat_settings(&c, a);
    int rc = DONE;
    c.dir = a->model;
    if (a->null_ends && a->json) rc = fail(FAIL_USAGE, "--null and --json: a line ends each reply");
    if (a->load && a->system && !a->render)
        rc = fail(FAIL_USAGE, "--system and --load: a conversation that is loaded has its own; "
                              "/system adds to it");
    if (a->ids_only && !a->render) rc = fail(FAIL_USAGE, "--ids-only goes with --render");
    if (rc == DONE && a->render && a->model) /* the tokenizer is all that it needs */
        rc = dir_check("--model", a->model, "tiktoken.model");
    else if (rc == DONE)
        rc = model_find(a, &c.dir);
    int status = rc == DONE ? k3_tokenizer_open(&c.t, c.dir, &err) : K3_OK;
    if (rc == DONE && status >= 0) status = marks_find(&c.marks, c.t, &err);
    if (status < 0)
        rc = fail_status(status, &err);
    else if (rc == DONE)
        rc = a->render ? render_file(a, c.t) : chat_run(&c);
    chat_close(&c);
    return rc;
}
