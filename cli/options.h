/* options.h - the options of `k3`: their values, their table, their parser. */
#ifndef K3_CLI_OPTIONS_H
#define K3_CLI_OPTIONS_H

#include "k3.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAX_OPTION = 128,
    MAX_STOP = 32,
    MAX_TIER = 16,
    MAX_REPEAT = 99,
    MAX_CONTEXT = 1 << 30,
    DEFAULT_CONTEXT = 4096
};

typedef enum { EFFORT_LOW, EFFORT_MEDIUM, EFFORT_HIGH, EFFORT_MAX, EFFORT_NONE } effort_level;

typedef struct {
    const char *arg;  /* PROMPT, TEXT or a command's name                      */
    const char *arg2; /* the second, where a command takes two                */
    const char *prompt_file, *ids;
    bool control;
    const char *model, *kernels;
    const char *model_by; /* what named the model: "--model" or "K3_MODEL"          */
    bool released;        /* plan: the released config, no files                    */
    uint64_t threads, chunk, context, ram;
    uint64_t io, direct, policy; /* k3_io, k3_switch, k3_policy               */
    uint64_t io_depth;
    const char *mirror[K3_MAX_COPIES]; /* NULL-ended                          */
    size_t n_mirror;
    const char *tier[MAX_TIER + 1]; /* NULL-ended                             */
    size_t n_tier;
    const char *psk_file, *tier_ca, *tier_cert, *tier_key;
    uint64_t spin_us, tier_wait, tier_audit;
    bool tier_hedge, gpu;
    const char *hop[MAX_TIER + 1]; /* NULL-ended                              */
    size_t n_hop;
    uint64_t requests, sustain;
    bool no_look_ahead, no_check, write_sums, anew, reader, where;
    const char *sums, *pins, *routing, *replay, *write_pins;
    float disk;   /* GB/s                                                       */
    float gflops; /* of one core                                              */
    float lora_eps;
    uint64_t tokens;
    bool no_stop;
    const char *stop[MAX_STOP];
    size_t n_stop;
    float temperature, top_p;
    uint64_t top_k, seed;
    const char *dump_logits;
    const char *trace; /* NULL: off, "": stderr, else a file                  */
    bool json, quiet, verbose;
    bool decode, ids_only;
    const char *prompts;
    uint64_t repeats, expect;
    bool kernels_only, kernels_list, golden;
    const char *out, *to; /* slice, stage                                     */
    uint64_t size, shard_size;
    const char *load, *save, *cache;
    uint64_t cache_size;
    const char *system, *render, *history; /* chat                            */
    uint64_t undo, effort;                 /* effort: effort_level            */
    bool no_think, hide_think, null_ends;
    bool given[MAX_OPTION]; /* row i of the table was on the command line         */
} cli_args;

typedef enum {
    KIND_FLAG,     /* bool, takes no value                                    */
    KIND_TEXT,     /* const char *                                            */
    KIND_READ,     /* the same: a file that is read                           */
    KIND_WRITE,    /* the same: a file that is written                        */
    KIND_STOP,     /* appended to stop[]                                      */
    KIND_MIRROR,   /* appended to mirror[]                                    */
    KIND_TIER,     /* appended to tier[]                                      */
    KIND_HOP,      /* appended to hop[]                                       */
    KIND_PART,     /* uint64_t: N of 1/N                                      */
    KIND_CHOICE,   /* uint64_t: which of the words in `value`, from 0         */
    KIND_OPTIONAL, /* the same, "" unless given as --name=FILE                */
    KIND_COUNT,    /* uint64_t in [lo, hi]                                    */
    KIND_REAL,     /* float in [lo, hi]                                       */
    KIND_SIZE,     /* uint64_t bytes: 8G, 512M, 1.5GiB                        */
    KIND_HASH      /* uint64_t from 16 hex digits                             */
} option_kind;

enum {
    RUN = 1,
    TOKENIZE = 2,
    BENCH = 4,
    VERIFY = 8,
    INFO = 16,
    PLAN = 32,
    CACHE = 64,
    CHAT = 128,
    SLICE = 256,
    STAGE = 512,
    ANY = 1023
};

typedef enum {
    G_PROMPT,
    G_TEXT,
    G_SAMPLE,
    G_STATE,
    G_MEASURE,
    G_OUTPUT,
    G_MODEL,
    G_DISK,
    G_TIER,
    N_GROUP
} option_group;

typedef struct {
    const char *name, *value; /* value: what help calls it, NULL for a flag   */
    option_kind kind;
    size_t at; /* offset in cli_args                                          */
    unsigned who;
    option_group group;
    const char *start; /* default, as it would be typed; NULL: off or 0       */
    uint64_t lo, hi;
    const char *help; /* lines break at \n                                    */
} cli_option;

typedef struct {
    const char *name;
    unsigned bit;
    const char *arg; /* the positional argument, or two words for two; or NULL */
    int (*run)(const cli_args *a);
    const char *summary, *usage, *about, *examples;
} cli_command;

extern const char *const GROUP_TITLE[N_GROUP];

extern const cli_option OPTION[];
extern const size_t N_OPTION;

/* The row of an option that a command in `who` takes; NULL: none does. */
const cli_option *option_find(const char *name, size_t n, unsigned who);

/* Was the option on the command line? */
bool is_given(const cli_args *a, const char *name);

/* Keep `name` in *best when it is nearer to `typed` than what is there. */
void nearest(const char *typed, const char *name, const char **best, size_t *distance);

/* Fill `a` from the words after the command. *wants_help: -h or --help was met. */
int args_parse(cli_args *a, const cli_command *cmd, int argc, char **argv, bool *wants_help);

/* K3_MODEL stands for a --model that was not given; empty it is none. No other variable says what is
 * computed. */
void args_from_environment(cli_args *a, const cli_command *cmd);

/* What is written is written over: it must be nothing that is read, nor what another option writes. A
 * state may go on in place. */
int args_for_files(const cli_args *a);

/* Options about boxes, and no box: a slip, and what it was to protect is not. How long a box is waited
 * for may be said without one: nothing is lost. */
int args_for_boxes(const cli_args *a);

#endif
