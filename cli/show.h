/* show.h - a reply, shown as it is made. */
#ifndef K3_CLI_SHOW_H
#define K3_CLI_SHOW_H

#include "cli/json.h"
#include "cli/talk.h"
#include "cli/xtml.h"
#include "k3.h"

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Text for a terminal: control characters are shown, not obeyed. */
void put_terminal(buf *out, const char *p, size_t n);

/* What is new in the reply. */
void show_reply(chat *c, reply *r);
json_object *json_text(const buf *b);
void tell_rates(chat *c);

/* The rest of the reply, its end, and why it ended if not by itself. */
int show_end(chat *c, reply *r);

#endif
