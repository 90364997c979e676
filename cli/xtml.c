/* xtml.c - K3's chat format: segments and tags, and a reply read by its ids.
 *
 * K3-SPEC 4.4. A rendered piece is a row of segments, each encoded on its own, so that words never
 * merge across a border and text cannot reach into markup. Control tokens are ids by name.
 */
#include "cli/xtml.h"

#include "cli/calls.h"
#include "cli/console.h"
#include "cli/json.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void xtml_free(xtml *x) {
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

void xtml_text(xtml *x, const char *p, size_t n) { xtml_add(x, p, n, false); }
static void xtml_puts(xtml *x, const char *text) { xtml_add(x, text, strlen(text), false); }
static void xtml_control(xtml *x, const char *name) { xtml_add(x, name, strlen(name), true); }

void xtml_begin(xtml *x, const char *tag) {
    xtml_control(x, "<|open|>");
    xtml_puts(x, tag);
}

void xtml_attribute(xtml *x, const char *key, const char *value, size_t n) {
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

void xtml_attribute_text(xtml *x, const char *key, const char *value) {
    xtml_attribute(x, key, value, strlen(value));
}

void xtml_sep(xtml *x) { xtml_control(x, "<|sep|>"); }

void xtml_open(xtml *x, const char *tag) {
    xtml_begin(x, tag);
    xtml_sep(x);
}

void xtml_close(xtml *x, const char *tag) {
    xtml_control(x, "<|close|>");
    xtml_puts(x, tag);
    xtml_sep(x);
}

void xtml_end_message(xtml *x) {
    xtml_close(x, "message");
    xtml_control(x, "<|end_of_msg|>");
}

void xtml_system_type(xtml *x, const char *type, const char *body) {
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "system");
    xtml_attribute_text(x, "type", type);
    xtml_sep(x);
    xtml_puts(x, body);
    xtml_end_message(x);
}

void xtml_prompt(xtml *x, bool thinks) {
    xtml_begin(x, "message");
    xtml_attribute_text(x, "role", "assistant");
    xtml_sep(x);
    xtml_open(x, thinks ? "think" : "response");
}

void xtml_effort(xtml *x, const char *effort) {
    buf body = {0};
    buf_puts(&body, "`thinking_effort` guides on how much to think in your thinking channel (not "
                    "including the response channel), supported values include `low`, `medium`, "
                    "`high`, and `max`.\nNow the system is invoked with `thinking_effort=");
    buf_printf(&body, "%s`.", effort);
    xtml_system_type(x, "thinking-effort", buf_text(&body));
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

void xtml_system_json(xtml *x, const char *type, const char *before, json_object *value,
                      const char *after) {
    buf body = {0};
    buf_puts(&body, before);
    json_write(&body, value, true);
    buf_puts(&body, after);
    xtml_system_type(x, type, buf_text(&body));
    if (body.is_short) x->text.is_short = true;
    buf_free(&body);
}

int xtml_encode(xtml *x, k3_tokenizer *t, k3_error *err) {
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

int marks_find(chat_marks *m, k3_tokenizer *t, k3_error *err) {
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

bool mark_is_stop(const chat_marks *m, uint32_t id) {
    for (size_t i = 0; i < COUNT(m->stop); i++)
        if (id == m->stop[i] && id != NO_ID) return true;
    return false;
}

/* ---- A reply, read by its ids ----
 *
 * What the model says has the same shape as what it reads: elements between control ids. They are
 * followed on ids, not on text. The model may break the shape at any point, and a reply may be
 * stopped at any point; reply_close says what is missing to end the message properly.
 */

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

void reply_init(reply *r, const chat_marks *marks, const k3_tokenizer *t, bool thinks,
                uint64_t n_call) {
    memset(r, 0, sizeof *r);
    r->marks = marks;
    r->t = t;
    calls_init(&r->call, n_call, reply_value);
    reply_push_element(r, "message");
    reply_push_element(r, thinks ? "think" : "response");
}

void reply_free(reply *r) {
    buf *const all[] = {&r->tag_text, &r->think, &r->answer};
    for (size_t i = 0; i < COUNT(all); i++) buf_free(all[i]);
    calls_free(&r->call);
}

bool reply_is_short(const reply *r) {
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

void reply_flush(reply *r) {
    buf_add_utf8(&r->think, &r->think_utf8, "", 0);
    buf_add_utf8(&r->answer, &r->answer_utf8, "", 0);
}

void reply_push(reply *r, uint32_t id) {
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

void reply_close(reply *r, xtml *x) {
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
