/* calls.c - see calls.h. */
#include "cli/calls.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void text_add(call_list *c, struct printbuf *to, const char *p, size_t n) {
    if (n == 0) return;
    if (!to || n > INT_MAX / 2 || printbuf_memappend(to, p, (int)n) < 0) c->is_short = true;
}

/* The inside of a JSON string: no quotes around it. */
static void text_add_escaped(call_list *c, const char *p, size_t n) {
    json_object *o = n < INT_MAX ? json_object_new_string_len(p, (int)n) : NULL;
    size_t n_text = 0;
    const char *text = NULL;
    if (o)
        text = json_object_to_json_string_length(
            o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE, &n_text);
    if (text)
        text_add(c, c->arguments, text + 1, n_text - 2);
    else
        c->is_short = true;
    json_object_put(o);
}

/* Bytes as far as they are whole characters; n 0: what is held is no character any more. */
static void text_add_valid(call_list *c, const char *p, size_t n, bool is_escaped) {
    char *valid = malloc(3 * (n + 3));
    if (!valid) {
        c->is_short = true;
        return;
    }
    size_t n_valid = k3_utf8_push(&c->utf8, p, n, valid);
    if (is_escaped)
        text_add_escaped(c, valid, n_valid);
    else
        text_add(c, c->arguments, valid, n_valid);
    free(valid);
}

void calls_init(call_list *c, uint64_t n_before, calls_value_fn value) {
    memset(c, 0, sizeof *c);
    c->n_before = n_before;
    c->value = value;
    c->name = printbuf_new();
    c->arguments = printbuf_new();
    c->body = printbuf_new();
    c->is_short = !c->name || !c->arguments || !c->body;
}

void calls_free(call_list *c) {
    struct printbuf *const all[] = {c->name, c->arguments, c->body};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]) printbuf_free(all[i]);
    json_object_put(c->finished);
    memset(c, 0, sizeof *c);
}

void calls_begin(call_list *c, const char *name) {
    if (c->is_open || !c->name || !c->arguments) return;
    printbuf_reset(c->name);
    printbuf_reset(c->arguments);
    text_add(c, c->name, name, strlen(name));
    c->kind = CALL_EMPTY;
    c->in = VALUE_NONE;
    c->is_open = true;
}

void calls_argument(call_list *c, const char *key, const char *type) {
    if (!c->is_open || !c->body || c->kind == CALL_RAW) return;
    text_add(c, c->arguments, c->kind == CALL_EMPTY ? "{\"" : ", \"",
             c->kind == CALL_EMPTY ? 2 : 3);
    text_add_escaped(c, key, strlen(key));
    text_add(c, c->arguments, "\": ", 3);
    c->kind = CALL_KEYS;
    c->in = strcmp(type, "string") == 0 ? VALUE_TEXT : VALUE_JSON;
    if (c->in == VALUE_TEXT) text_add(c, c->arguments, "\"", 1);
    printbuf_reset(c->body);
    c->utf8 = (k3_utf8){{0}, 0};
}

void calls_raw(call_list *c) {
    if (!c->is_open || c->kind != CALL_EMPTY) return;
    c->kind = CALL_RAW;
    c->in = VALUE_RAW;
    c->utf8 = (k3_utf8){{0}, 0};
}

void calls_text(call_list *c, const char *p, size_t n) {
    if (c->in == VALUE_JSON) text_add(c, c->body, p, n);
    if ((c->in == VALUE_TEXT || c->in == VALUE_RAW) && n > 0)
        text_add_valid(c, p, n, c->in == VALUE_TEXT);
}

void calls_end_value(call_list *c) {
    if (c->in == VALUE_TEXT || c->in == VALUE_RAW) text_add_valid(c, "", 0, c->in == VALUE_TEXT);
    if (c->in == VALUE_TEXT) text_add(c, c->arguments, "\"", 1);
    if (c->in == VALUE_JSON) {
        size_t n = (size_t)printbuf_length(c->body);
        const char *body = n ? c->body->buf : "";
        if (!c->value(body, n, c->arguments)) {
            text_add(c, c->arguments, "\"", 1);
            if (n) text_add_valid(c, body, n, true);
            text_add_valid(c, "", 0, true);
            text_add(c, c->arguments, "\"", 1);
        }
    }
    c->in = VALUE_NONE;
}

/* The arguments of call i, finished or open, and how long they are. */
static const char *call_arguments(const call_list *c, uint64_t i, size_t *n) {
    if (i < c->n_finished) {
        json_object *function = NULL, *text = NULL;
        json_object *call = json_object_array_get_idx(c->finished, (size_t)i);
        json_object_object_get_ex(call, "function", &function);
        json_object_object_get_ex(function, "arguments", &text);
        *n = (size_t)json_object_get_string_len(text);
        return json_object_get_string(text);
    }
    *n = c->arguments ? (size_t)printbuf_length(c->arguments) : 0;
    return *n ? c->arguments->buf : "";
}

/* {arguments: text}, as `function` of an object. */
static json_object *function_new(const char *p, size_t n) {
    json_object *function = json_object_new_object();
    json_object_object_add(function, "arguments", json_object_new_string_len(p, (int)n));
    return function;
}

/* The open call with its id and name, and the first n bytes of its arguments. */
static json_object *call_new(const call_list *c, size_t n) {
    json_object *call = json_object_new_object(), *function = json_object_new_object();
    char id[32];
    size_t n_all;
    const char *arguments = call_arguments(c, c->n_finished, &n_all);
    snprintf(id, sizeof id, "call_%llu", (unsigned long long)(c->n_before + c->n_finished + 1));
    json_object_object_add(function, "name",
                           json_object_new_string(printbuf_length(c->name) ? c->name->buf : ""));
    json_object_object_add(function, "arguments", json_object_new_string_len(arguments, (int)n));
    json_object_object_add(call, "id", json_object_new_string(id));
    json_object_object_add(call, "type", json_object_new_string("function"));
    json_object_object_add(call, "function", function);
    return call;
}

void calls_end(call_list *c) {
    if (!c->is_open) return;
    if (c->in != VALUE_NONE) calls_end_value(c);
    if (c->kind == CALL_EMPTY) text_add(c, c->arguments, "{}", 2);
    if (c->kind == CALL_KEYS) text_add(c, c->arguments, "}", 1);
    if (!c->finished) c->finished = json_object_new_array();
    json_object *call = call_new(c, (size_t)printbuf_length(c->arguments));
    if (!c->finished || json_object_array_add(c->finished, call) != 0) {
        json_object_put(call);
        c->is_short = true;
    } else {
        c->n_finished++;
    }
    c->is_open = false;
}

/* Id and name of call i, as they are told first. */
static json_object *delta_begin(const call_list *c, uint64_t i) {
    if (i == c->n_finished) return call_new(c, 0);
    json_object *call = NULL, *function = NULL;
    if (json_object_deep_copy(json_object_array_get_idx(c->finished, (size_t)i), &call, NULL) != 0)
        return NULL;
    json_object_object_get_ex(call, "function", &function);
    json_object_object_add(function, "arguments", json_object_new_string(""));
    return call;
}

/* The same with its place, which comes first. */
static json_object *delta_place(uint64_t i, json_object *call) {
    json_object *o = json_object_new_object();
    json_object_object_add(o, "index", json_object_new_int64((int64_t)i));
    struct lh_entry *e = call ? json_object_get_object(call)->head : NULL;
    for (; e; e = e->next)
        json_object_object_add(o, lh_entry_k(e), json_object_get((json_object *)lh_entry_v(e)));
    json_object_put(call);
    return o;
}

json_object *calls_delta(call_list *c) {
    while (c->i_told < c->n_finished || (c->is_open && c->i_told == c->n_finished)) {
        size_t n;
        const char *arguments = call_arguments(c, c->i_told, &n);
        if (!c->has_told) {
            c->has_told = true;
            return delta_place(c->i_told, delta_begin(c, c->i_told));
        }
        if (n > c->n_told) {
            json_object *call = json_object_new_object();
            json_object_object_add(call, "function",
                                   function_new(arguments + c->n_told, n - c->n_told));
            c->n_told = n;
            return delta_place(c->i_told, call);
        }
        if (c->i_told == c->n_finished) return NULL;
        c->i_told++;
        c->has_told = false;
        c->n_told = 0;
    }
    return NULL;
}

json_object *calls_unfinished(const call_list *c) {
    if (!c->is_open) return NULL;
    return delta_place(c->n_finished, call_new(c, (size_t)printbuf_length(c->arguments)));
}
