/* xtml.h - K3's chat format: segments and tags, and a reply read by its ids. */
#ifndef K3_CLI_XTML_H
#define K3_CLI_XTML_H

#include "cli/calls.h"
#include "cli/json.h"
#include "k3.h"

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NO_ID UINT32_MAX

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

void xtml_free(xtml *x);
void xtml_text(xtml *x, const char *p, size_t n);

/* An open tag is xtml_begin, any number of xtml_attribute, xtml_sep. */
void xtml_begin(xtml *x, const char *tag);
void xtml_attribute(xtml *x, const char *key, const char *value, size_t n);
void xtml_attribute_text(xtml *x, const char *key, const char *value);
void xtml_sep(xtml *x);
void xtml_open(xtml *x, const char *tag);
void xtml_close(xtml *x, const char *tag);
void xtml_end_message(xtml *x);

/* message role="system" type="TYPE", its body in one segment. */
void xtml_system_type(xtml *x, const char *type, const char *body);

/* What the assistant goes on from. */
void xtml_prompt(xtml *x, bool thinks);
void xtml_effort(xtml *x, const char *effort);

/* A body with JSON inside: before, the value, after. */
void xtml_system_json(xtml *x, const char *type, const char *before, json_object *value,
                      const char *after);

/* Ids of all segments. */
int xtml_encode(xtml *x, k3_tokenizer *t, k3_error *err);

/* All marks of the format, or which one is missing. */
int marks_find(chat_marks *m, k3_tokenizer *t, k3_error *err);
bool mark_is_stop(const chat_marks *m, uint32_t id);

/* A reply to the prompt of xtml_prompt. */
void reply_init(reply *r, const chat_marks *marks, const k3_tokenizer *t, bool thinks,
                uint64_t n_call);
void reply_free(reply *r);

/* Memory ran out: what the reply says is not all that it said. */
bool reply_is_short(const reply *r);

/* What no further id will complete. */
void reply_flush(reply *r);

/* The next id of the reply, which is no stop other than the end of the message. */
void reply_push(reply *r, uint32_t id);

/* What is missing to end the message: the rest of a tag, close tags, the end itself. */
void reply_close(reply *r, xtml *x);

#endif
