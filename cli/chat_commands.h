/* chat_commands.h - the commands of `k3 chat`: /help lists them. */
#ifndef K3_CLI_CHAT_COMMANDS_H
#define K3_CLI_CHAT_COMMANDS_H

#include "cli/talk.h"
#include "k3.h"

#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name, *arg, *help;
    int (*run)(chat *c, const char *arg);
} chat_command;

enum { N_CHAT_COMMAND = 15 };
extern const chat_command CHAT_COMMAND[N_CHAT_COMMAND];

/* What thinking and effort are now was asked for: whole conversations begin with it too. */
void chat_own_settings(chat *c);
const char *effort_name(const chat *c);

/* Let the conversation say what thinking and effort are now; `before` if that fails. A header that
 * speaks of effort stays where it is while thinking is off, and what it costs to go is not paid. */
int chat_set_render(chat *c, bool thought, const char *before);

/* What a change of the header costs, if it cost anything. */
void tell_again(chat *c);
int load_from(chat *c, const char *arg);

/* Blanks behind a command are no part of it. */
int chat_command_run(chat *c, const char *line);

#endif
