/* calls.h - the tool calls of one reply, gathered while its ids come.
 *
 * The reader of the chat format reports what begins and ends; this file makes OpenAI's `tool_calls`
 * of it. A call's `arguments` only ever grows at its end: a byte is added when no later id can
 * change it. So what was streamed never has to be taken back, and the deltas of a call, put one
 * behind the other, are the call:
 *
 *   a string argument     grows with its text, character by character;
 *   another argument      is added when it ends: only then is it known whether its text is JSON, and
 *                         what is not becomes a string;
 *   arguments as one text (an element `json`) grow with it.
 *
 * A call has arguments of one kind, that of the first; elements of the other kind are passed over.
 * One call_list belongs to one thread. When memory runs out `is_short` is set and stays set.
 */
#ifndef K3_CALLS_H
#define K3_CALLS_H

#include "k3.h"

#include <json-c/json.h>
#include <json-c/printbuf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Write the JSON value that is the text `body` (n bytes and a NUL) to `out` in the form that the
 * chat format uses. False, and nothing written: the text is no JSON. */
typedef bool (*calls_value_fn)(const char *body, size_t n, struct printbuf *out);

typedef struct {
    json_object *finished; /* array of calls that ended; NULL: none                    */
    uint64_t n_finished;
    uint64_t n_before; /* calls of earlier replies: the first here is call_<n_before + 1> */
    bool is_open;      /* a call began and has not ended                           */
    bool is_short;     /* memory ran out: what is here is not all                  */
    enum { CALL_EMPTY, CALL_KEYS, CALL_RAW } kind;             /* of the open call's arguments */
    enum { VALUE_NONE, VALUE_TEXT, VALUE_JSON, VALUE_RAW } in; /* what text belongs to       */
    struct printbuf *name, *arguments; /* of the open call                         */
    struct printbuf *body;             /* VALUE_JSON: the argument's text so far   */
    k3_utf8 utf8;                      /* half a character of that text            */
    calls_value_fn value;
    uint64_t i_told; /* the call that calls_delta speaks of next ...                 */
    bool has_told;   /* ... its id and name were told                              */
    size_t n_told;   /* ... and so many bytes of its arguments                     */
} call_list;

/* A reply without calls. `n_before`: calls of the conversation so far. */
void calls_init(call_list *c, uint64_t n_before, calls_value_fn value);
void calls_free(call_list *c);

/* What the reply's elements say. A call begins where none is open. Names and keys are valid UTF-8;
 * text is any bytes, cut anywhere, and what is no UTF-8 becomes U+FFFD. */
void calls_begin(call_list *c, const char *name);
void calls_argument(call_list *c, const char *key, const char *type);
void calls_raw(call_list *c);
void calls_text(call_list *c, const char *p, size_t n);
void calls_end_value(call_list *c);
void calls_end(call_list *c);

/* The next thing that is certain and was not told yet, as an element of OpenAI's delta.tool_calls:
 * first {index, id, type, function: {name, arguments: ""}}, then {index, function: {arguments}}
 * with the next piece. The caller's; NULL: nothing more for now. */
json_object *calls_delta(call_list *c);

/* The call that began and did not end, {index, id, type, function: {name, arguments so far}}: the
 * reply was stopped in it, and it must not be executed. The caller's; NULL: none. */
json_object *calls_unfinished(const call_list *c);

#endif
