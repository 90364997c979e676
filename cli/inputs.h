/* inputs.h - what the commands of `k3` read: prompts, ids, the model directory; and opening the engine.
 *
 * A function that returns an exit code has already said why.
 */
#ifndef K3_CLI_INPUTS_H
#define K3_CLI_INPUTS_H

#include "cli/args.h"
#include "cli/console.h"
#include "k3.h"

/* ---- Files, ids, prompts ---- */

typedef struct {
    char *p;
    size_t n;
} blob;

typedef struct {
    uint32_t *id;
    size_t n;
} id_list;

/* The whole of a file, of at most so many bytes; "-" is stdin. The caller frees b->p, also after a failure. */
int blob_read(blob *b, const char *path, size_t most);

/* "1,2,3", blanks around a number allowed. `what` names the source in a message. */
int ids_parse(id_list *out, const char *text, size_t n_bytes, const char *what);

/* Text to ids; `control`: spellings such as <|open|> become control tokens. */
int ids_encode(id_list *out, k3_tokenizer *t, const char *text, size_t n_bytes, bool control);

/* One prompt, and not two? */
int prompt_check(const cli_args *a, const char *command);

/* --save with audits of only some answers: no state could be saved at the end. An exit code. */
int audit_check_save(const cli_args *a);

/* Bytes that a file may have before it is known how many ids they are: as many as the longest ids for
 * all positions, and with its ids in a part of --ram. What config.json lacks is said later. */
size_t prompt_most(const cli_args *a, const char *dir, const k3_tokenizer *t);

/* The prompt as given: exactly one of the argument, --prompt-file and --ids. Text goes to
 * `text`; with --ids `text` stays empty and `ids` is filled. */
int prompt_read(const cli_args *a, blob *text, size_t most, id_list *ids, const char *command);

/* ---- The model directory ---- */

/* Is `dir` a directory? `holds` says what one of the option's holds, for the message. */
int dir_check(const char *option, const char *dir, const char *holds);

/* The directory to open: --model, K3_MODEL, or the bundled model. */
int model_locate(const cli_args *a, const char **dir);

/* Which model, where the command line does not say; with the bundled one, what comes after it. */
void model_say(const cli_args *a, const char *dir);

/* Both of them. */
int model_find(const cli_args *a, const char **dir);

/* Open the tokenizer. Ids can do without one (checkpoints made for tests have none): then
 * *t stays NULL, which is noted, and the answer has ids but no text. */
int tokenizer_open(k3_tokenizer **t, const cli_args *a, const char *dir);

/* ---- The engine ---- */

/* The engine's options as the command line has them; notes and progress go to `con`. */
k3_options engine_options(const cli_args *a, const char *dir, console *con);

/* With --gpu, our own box is one of the tiers; where it cannot be had, a line says why. */
void engine_gpu(const cli_args *a, k3_options *o);

/* Open with these options, whose `user` is the console. */
int engine_open(k3_engine **e, const k3_options *o);

/* k3_engine_open; where the budget has no room for rows that drafts need, without them. A k3_status. */
int engine_open_drafts(k3_engine **e, const k3_options *o, k3_error *err);

/* Open for questions: headers only. Sums are looked at only where has_use_for_sums. `resume` is the file of a check
 * that goes on (k3_options.resume), or NULL. */
int engine_open_headers(k3_engine **e, const cli_args *a, const char *dir, console *con,
                        bool has_use_for_sums, const char *resume);

/* Weights are read again and again: not all of them have a place in memory. */
bool is_streaming(const k3_engine *e);
uint64_t moe_layers(const k3_shape *s);
uint64_t expert_count(const k3_shape *s);

/* A note, none with -q, when OMP_NUM_THREADS was not heeded. */
void threads_say(const console *con, const k3_engine *e, const k3_options *o);

/* A note, none with -q, when boxes were named, experts were read, and no box was ever asked; `st` is what
 * was counted since the session was new. */
bool tiers_say_silent(const cli_args *a, const k3_stats *st); /* whether it said so */

/* --ram is above what is free here: a note of one line, none with -q. To be called before the engine is opened. */
void ram_say(const console *con, const k3_options *o);

/* The plan of `k3 plan` in two lines. */
void plan_say(const k3_engine *e);

/* ---- Memory ---- */

/* A line such as "VmHWM:  1234 kB" of a file in /proc, as bytes; 0 where there is none. */
uint64_t proc_bytes(const char *path, const char *key);

/* Of so many bytes, those that the engine's allowance for its caller does not cover. */
uint64_t beyond_allowance(uint64_t bytes);

#endif
