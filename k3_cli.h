/* k3_cli.h - what the files of the `k3` program share; nothing of the engine's is in here.
 *
 * k3_cli.c holds the option parser, messages, progress and the commands that have no file of their
 * own. A function that returns an exit code has already said why.
 */
#ifndef K3_CLI_H
#define K3_CLI_H

#include "k3.h"
#include "k3_common.h"

#include <json-c/json.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

#if defined(__GNUC__)
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#else
#define PRINTF_LIKE(text, first)
#endif

/* ---- Exit codes and messages ------------------------------------------------------ */

enum {
    DONE = 0,
    FAIL_IO = 1,
    FAIL_USAGE = 2,
    FAIL_MODEL = 3,
    FAIL_BUDGET = 4,
    FAIL_CHECK = 5,
    INTERRUPTED = 130 /* as a shell reports SIGINT */
};

int exit_code(int status);
PRINTF_LIKE(1, 2) void say(const char *format, ...);
PRINTF_LIKE(2, 3) int fail(int code, const char *format, ...);
int fail_memory(const char *what, size_t n_bytes);
int fail_status(int status, const k3_error *err);
int fail_stdout(int error);
int out_write(const char *p, size_t n_bytes);
struct json_object;
int out_json_line(struct json_object *o); /* one line; the object is given up */

const char *fmt_bytes(char text[32], uint64_t n_bytes);
double per_second(uint64_t n, uint64_t ns);
double percent(uint64_t part, uint64_t whole);

/* ---- Options ----------------------------------------------------------------------- */

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
    bool no_look_ahead, no_check, write_sums, reader, where;
    const char *sums, *pins, *routing, *replay, *write_pins;
    float disk; /* GB/s                                                       */
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

bool is_given(const cli_args *a, const char *name);
void nearest(const char *typed, const char *name, const char **best, size_t *distance);

/* ---- Terminal ------------------------------------------------------------------------ */

extern volatile sig_atomic_t interrupted; /* how often Ctrl-C asked */

typedef struct {
    bool is_tty, is_quiet;
    bool is_shown;      /* a progress line is on the screen                      */
    bool is_below;      /* ... on the row below the answer                       */
    bool hides_compute; /* text is streaming: only a slow token shows its status */
    int n_grace;        /* so many Ctrl-C do not yet cancel the step             */
    uint64_t asked_ns;  /* when one did not                                      */
    bool has_said_wait;
    uint64_t n_said, n_want; /* ids of the answer: so far, 0 in the prompt; at most   */
    uint64_t said_ns;        /* when the answer began                                 */
    uint64_t step_ns;        /* when the step at work began ...                       */
    uint64_t step_read_bytes, seen_bytes; /* ... what was read before it; and so far  */
    const char *verb;        /* what loading is called, if not that                    */
    k3_phase phase;
    uint64_t done, start_ns, last_ns;
    uint64_t read_bytes; /* at the last line                                          */
    double read_speed;   /* bytes per second, smoothed over lines                     */
    uint32_t n_layers;   /* 0 until the model is open                                 */
} console;

void signals_catch(void);
void console_init(console *c, const cli_args *a);
void console_clear(console *c);
void console_note(void *user, const char *line);
void console_answer(console *c, uint64_t n_said, uint64_t n_want);

/* ---- Text, models, files --------------------------------------------------------------- */

typedef struct {
    char *p;
    size_t n;
} blob;

typedef struct {
    uint32_t *id;
    size_t n;
} id_list;

int blob_read(blob *b, const char *path, size_t most);
void put_escaped(const char *bytes, size_t n);
int dir_check(const char *option, const char *dir, const char *holds);
int model_find(const cli_args *a, const char **dir);
k3_options engine_options(const cli_args *a, const char *dir, console *con);
int engine_open(k3_engine **e, const k3_options *o);

/* With --gpu, our own box is one of the tiers; where it cannot be had, a line says why. */
void engine_gpu(const cli_args *a, k3_options *o);
bool is_streaming(const k3_engine *e);

/* Notes of one line, none with -q: OMP_NUM_THREADS was not heeded; boxes were named, experts were read,
 * and no box was ever asked (`st`: what was counted since the session was new); --ram is above what is free
 * here (to be called before the engine is opened). */
void threads_say(const console *con, const k3_engine *e, const k3_options *o);
bool tiers_say_silent(const cli_args *a, const k3_stats *st); /* whether it said so */
void ram_say(const console *con, const k3_options *o);
void plan_say(const k3_engine *e);

void json_put(json_object *o, const char *key, json_object *value);
void json_put_hash(json_object *o, const char *key, uint64_t fnv);
void json_put_real(json_object *o, const char *key, double value);
void json_put_count(json_object *o, const char *key, uint64_t n);

/* ---- Commands in files of their own ----------------------------------------------------- */

int cmd_chat(const cli_args *a);

/* Ids that the chat format adds to an empty first message, at the default settings of `k3 chat`; 0: this
 * tokenizer has no chat format. */
uint64_t chat_template_ids(k3_tokenizer *t);
int cmd_slice(const cli_args *a);
int cmd_stage(const cli_args *a);
int bench_hop(const cli_args *a); /* k3 bench --hop */

#define GPU_RAM_BYTES (2ull << 30) /* what that box may take of this machine's memory */

/* --gpu: the address of a k3-tier on this machine that serves this model from VRAM, started if there
 * is none: *is_new. False and one line in `why` when it cannot be had. */
bool gpu_join(const char *model_dir, const char *pins, const char *key_file, char *address,
              size_t cap, bool *is_new, char *why, size_t n_why);

#endif
