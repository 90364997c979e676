/* manual.h - man pages and bash's completion, made of the tables that the parser reads. */
#ifndef K3_MANUAL_H
#define K3_MANUAL_H

#include <stdbool.h>
#include <stddef.h>

/* One command and one of its options, as the tables of main.c and args.c have them. Texts are borrowed for ever. */
typedef struct {
    const char *name, *summary, *usage, *about, *examples;
} command_view;

typedef struct {
    const char *name, *value; /* value: NULL for a flag; "a|b" where is_choice        */
    const char *start, *help; /* default as typed, or NULL; lines break at \n         */
    bool is_choice;
} option_view;

typedef struct {
    const char *title;
    size_t n;
    option_view option[64];
} option_section; /* options of one group */

/* False when there is no i-th one. Groups without options are passed over: n is 0. */
bool command_get(size_t i, command_view *out);
bool section_get(const char *command, size_t i, option_section *out);

/* What `k3 help` says to all commands; the man page of k3 says the same. */
extern const char HELP_COMMON[], HELP_EXITS[];

/* A man page to stdout: of one command, or with NULL k3(1). False: no such command. */
bool manual_print(const char *command);
void completion_print(void);

#endif
