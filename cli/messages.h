/* messages.h - OpenAI's messages, rendered in K3's chat format. */
#ifndef K3_CLI_MESSAGES_H
#define K3_CLI_MESSAGES_H

#include "cli/xtml.h"
#include "k3.h"

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    bool thinks;
    const char *effort; /* "max", ...; NULL: no message about it     */
    json_object *calls; /* tool_calls of the last assistant message  */
    unsigned n_tool;    /* tool results since then                   */
} render_state;

bool has_tools(json_object *tools);
int render_system(xtml *x, json_object *m, const char *where, k3_error *err);

/* Fields that a message of a role may have; null says nothing and may stand anywhere. */
int message_check(json_object *m, const char *role, const char *where, k3_error *err);
int render_messages(xtml *x, json_object *messages, render_state *s, k3_error *err);

/* tool_choice and response_format, which hold for one reply and follow the history. */
int render_choices(xtml *x, json_object *root, k3_error *err);

/* What stands before the messages. */
void render_header(xtml *x, json_object *tools, const render_state *s);
extern const char *const EFFORT[];
int effort_read(render_state *s, json_object *value, const char *key, k3_error *err);

/* thinking: true, false, {"type": "enabled"}; thinking_effort or reasoning_effort. */
int render_settings(render_state *s, json_object *root, k3_error *err);

/* The messages of what `k3 chat --json` and --render take: a text, a message, an array of messages,
 * or an object with one. *messages is the caller's. */
int request_messages(json_object *root, json_object **messages, k3_error *err);
bool is_request(json_object *root);

/* A whole request with the prompt for the reply. */
int render_request(xtml *x, json_object *root, render_state *s, k3_error *err);

#endif
