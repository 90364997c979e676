/* args.h - what the command line of `k3` said: one struct, filled by one table of options. */
#ifndef K3_CLI_ARGS_H
#define K3_CLI_ARGS_H

#include "cli/options.h"
#include "k3.h"

/* Who takes an option: one bit for each command. */
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
    SERVE = 1024,
    ANY = 2047
};

/* The headings of help, in its order. */
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
    G_SERVE,
    N_GROUP
} option_group;
extern const char *const GROUP_TITLE[N_GROUP];

enum {
    MAX_STOP = 32, /* at most OPTION_MAX_TEXTS, as is MAX_TIER */
    MAX_TIER = 16,
    MAX_REPEAT = 99,
    MAX_CONTEXT = 1 << 30,
    DEFAULT_CONTEXT = 4096
};

typedef enum { EFFORT_LOW, EFFORT_MEDIUM, EFFORT_HIGH, EFFORT_MAX, EFFORT_NONE } effort_level;

typedef struct {
    const char *file, *ids; /* instead of text */
    bool control, decode;
} prompt_args;

typedef struct {
    const char *system, *render, *history;
    uint64_t undo, effort; /* effort: effort_level */
    bool no_think, hide_think, null_ends;
} chat_args;

typedef struct {
    const char *prompts, *replay, *write_pins;
    uint64_t repeats, expect, sessions;
    bool kernels_only;
    text_list hop; /* boxes to measure, with so many requests and for so many seconds: */
    uint64_t requests, sustain;
} bench_args;

typedef struct {
    bool released; /* the released config, no files        */
    float disk;    /* GB/s, 0: not given                   */
    float gflops;  /* of one core, 0: measure one          */
} plan_args;

typedef struct {
    const char *out, *to; /* slice: the directory; stage: the box */
    uint64_t size, shard_size;
} slice_args;

typedef struct {
    bool write_sums, anew, golden;
} verify_args;

typedef struct {
    const char *listen, *keys; /* ADDR:PORT; a file of `name key` lines, NULL: none */
    uint64_t queue;            /* requests that may wait                            */
} serve_args;

/* A field that a command's options do not fill is 0, but in `engine`: there it is k3_options_default's. */
typedef struct {
    option_words words;
    k3_options engine;    /* model_dir as typed, NULL: none was; engine_options() makes the rest */
    const char *model_by; /* what named the model: "--model" or "K3_MODEL"          */
    text_list mirror, tier;
    bool gpu;
    k3_sampler sampler;
    uint64_t draft; /* as chosen: off, auto, 1 .. GATE_DRAFTS; args_draft() says the width */
    prompt_args prompt;
    uint64_t tokens;
    bool no_stop;
    text_list stop;
    const char *dump_logits, *routing;
    const char *trace; /* NULL: off, "": stderr, else a file                  */
    bool json, ids_only, quiet, verbose;
    const char *load, *save, *cache;
    uint64_t cache_size;
    chat_args chat;
    bench_args bench;
    plan_args plan;
    verify_args verify;
    slice_args slice;
    serve_args serve;
    bool reader, kernels_list;
} cli_args;

extern const option_table CLI_OPTIONS;

/* Fill `a` from the words after the command. *wants_help: -h or --help was met. Lists of engine options point
 * into `a`. An exit code, whose reason is said. */
int args_parse(cli_args *a, const option_taker *taker, int argc, char **argv, bool *wants_help);

/* Drafts of a pass: 0, so many, or DRAFT_AUTO. None where every row that is run is written down. */
int args_draft(const cli_args *a);

/* Was the option on the command line? */
bool is_given(const cli_args *a, const char *name);

/* K3_MODEL stands for a --model that was not given; empty it is none. No other variable says what is
 * computed. `who`: the command's bit. */
void args_from_environment(cli_args *a, unsigned who);

/* What is written is written over: it must be nothing that is read, nor what another option writes. A
 * state may go on in place. */
int args_for_files(const cli_args *a);

/* Options about boxes, and no box: a slip, and what it was to protect is not. How long a box is waited
 * for may be said without one: nothing is lost. */
int args_for_boxes(const cli_args *a);

#endif
