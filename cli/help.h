/* help.h - `k3 help`, and what is said of a word that is no command. */
#ifndef K3_CLI_HELP_H
#define K3_CLI_HELP_H

#include "cli/commands.h"

/* `k3 help ...`: argv without the first two words. */
int cmd_help(int argc, char **argv);
int help_all(void);
int help_command(const cli_command *cmd);

int fail_unknown_command(const char *name);

/* An option where the command should be. */
int fail_no_command(const char *arg);

#endif
