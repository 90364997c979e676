/* commands.h - the commands of `k3`. Each returns an exit code, and has then said why.
 *
 * A new command is a file with its function, a prototype here, a row of the table in main.c, and a bit in args.h for
 * its options.
 */
#ifndef K3_CLI_COMMANDS_H
#define K3_CLI_COMMANDS_H

#include "cli/args.h"
#include "k3.h"

#include <stdio.h>

int cmd_run(const cli_args *a);
int cmd_chat(const cli_args *a);
#ifdef K3_HTTP
int cmd_serve(const cli_args *a);
#endif
int cmd_tokenize(const cli_args *a);
int cmd_bench(const cli_args *a);
int cmd_verify(const cli_args *a);
int cmd_plan(const cli_args *a);
int cmd_info(const cli_args *a);
int cmd_cache(const cli_args *a);
int cmd_slice(const cli_args *a);
int cmd_stage(const cli_args *a);

/* What one wants to do: the headings of `k3 help`. */
typedef enum { TASK_TEXT, TASK_KNOW, TASK_MEASURE, TASK_KEEP, TASK_BRING, N_TASK } command_task;

typedef struct {
    const char *name;
    unsigned bit; /* its bit in the table of options (args.h) */
    command_task task;
    const char *arg; /* the positional argument, or two words for two; or NULL */
    int (*run)(const cli_args *a);
    const char *summary, *usage, *about, *examples;
} cli_command;

/* The table: its i-th row, NULL behind the last one; and a row by its name, NULL where there is none. */
const cli_command *command_at(size_t i);
const cli_command *command_find(const char *name);

/* ---- Parts of commands ---- */

int bench_hop(const cli_args *a);    /* k3 bench --hop */
int bench_replay(const cli_args *a); /* k3 bench --replay */

/* k3 bench --kernels-only: the TSV table for thread counts 1, 2, 4, ... max_threads; `only` names one kernel
 * set or is NULL for all that are linked and supported; that it can run here is known.
 * Returns K3_OK or K3_ENOMEM. */
int bench_kernels(int max_threads, const char *only, FILE *out);

/* Ids that the chat format adds to an empty first message, at the default settings of `k3 chat`; 0: this
 * tokenizer has no chat format. */
uint64_t chat_template_ids(k3_tokenizer *t);

#endif
