/* sink.h - who gets a reply as it is made, in place of stdout: an HTTP client, a test. */
#ifndef K3_CLI_SINK_H
#define K3_CLI_SINK_H

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>

struct reply;

/* Called on the thread that makes the reply, in the order of the reply's parts. */
typedef struct {
    /* n new bytes of thinking or answer: whole UTF-8 characters. False: enough, the reply may end here. */
    bool (*text)(void *user, bool is_thinking, const char *p, size_t n);
    /* An element of OpenAI's delta.tool_calls, borrowed. */
    void (*call)(void *user, json_object *part);
    /* The reply is over; `why` as chat.why. `calls`: array of its finished tool calls, borrowed, or NULL. */
    void (*end)(void *user, const char *why, json_object *calls);
    /* Does nobody read any more? Asked four times a second at most. */
    bool (*is_left)(void *user);
} reply_sink;

#endif
