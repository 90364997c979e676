/* json.h - bytes that grow, and JSON as it comes from outside. */
#ifndef K3_CLI_JSON_H
#define K3_CLI_JSON_H

#include "cli/console.h"
#include "k3.h"

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    char *p;
    size_t n, cap;
    bool is_short; /* memory ran out: what is here is not all */
} buf;

enum { LINE_DEPTH = 64, NOTES_DEPTH = 80, MOST_VALUES = 20000 };

void buf_add(buf *b, const char *p, size_t n);
void buf_puts(buf *b, const char *text);
PRINTF_LIKE(2, 3) void buf_printf(buf *b, const char *format, ...);
const char *buf_text(const buf *b);
void buf_free(buf *b);

/* Bytes of a token or of the user's, as valid UTF-8; n 0 flushes. */
void buf_add_utf8(buf *b, k3_utf8 *u, const char *p, size_t n);

/* Bytes of the text's first characters, at most `most`: for "%.*s", which knows bytes only. */
int text_cut(const char *text, int most);

/* Bytes of a text without the part of a character that may be left at its end. */
int text_whole(const char *text);
PRINTF_LIKE(3, 4) int error_set(k3_error *err, int status, const char *format, ...);
int error_memory(k3_error *err);

/* At least as many as the text has values: a tree takes memory that no budget counts, some hundred
 * bytes for each of them. */
size_t json_count_values(const char *p, size_t n);
json_object *json_parse_strict(const char *p, size_t n, int depth, size_t *at, const char **why);

/* A JSON value, every number with its own text. */
json_object *json_read(const char *p, size_t n, size_t *at, const char **why);
void json_write_string(buf *out, const char *p, size_t n);

/* As json.dumps of Python writes it without ASCII escapes: keys sorted and no blanks, or keys in
 * order with ", " and ": ". */
void json_write(buf *out, json_object *o, bool is_compact);
json_object *json_field(json_object *o, const char *key);
bool json_is(json_object *o, json_type type);
bool json_equals(json_object *o, const char *text);

/* The text of a string field, or NULL. */
const char *json_string(json_object *o, const char *key);
void buf_clear(buf *b);

/* Any bytes, as valid UTF-8. */
void buf_add_valid(buf *out, const char *p, size_t n);

#endif
