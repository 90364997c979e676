/* options.h - a parser of command lines that takes a table. It knows no option and no program.
 *
 * Strict: a number is the whole string or an error, an option that a command does not take is an error,
 * the last of two wins. `--name=VALUE` and `--name VALUE` are the same; `--` ends options. A function that
 * returns an exit code has already said why.
 */
#ifndef K3_CLI_OPTIONS_H
#define K3_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_OPTION = 128, OPTION_MAX_TEXTS = 32 };

/* Values of an option that may be given again and again; NULL-ended. */
typedef struct {
    const char *text[OPTION_MAX_TEXTS + 1];
    size_t n;
} text_list;

typedef enum {
    KIND_FLAG,     /* bool, takes no value                                    */
    KIND_TEXT,     /* const char *                                            */
    KIND_READ,     /* the same: a file that is read                           */
    KIND_WRITE,    /* the same: a file that is written                        */
    KIND_OPTIONAL, /* the same, "" unless given as --name=FILE                */
    KIND_STOPS,    /* appended to a text_list of at most `hi`                 */
    KIND_DIRS,     /* the same: directories                                   */
    KIND_BOXES,    /* the same: addresses                                     */
    KIND_PART,     /* integer: N of 1/N, in [lo, hi]                          */
    KIND_CHOICE,   /* integer: which of the words in `value`, from 0          */
    KIND_COUNT,    /* integer in [lo, hi]                                     */
    KIND_REAL,     /* float in [lo, hi]                                       */
    KIND_SIZE,     /* uint64_t bytes, at least `lo`: 8G, 512M, 1.5GiB         */
    KIND_HASH      /* uint64_t from 16 hex digits                             */
} option_kind;

/* One option. The value goes to the field at byte `at` of the program's struct. An integer may be any of 4
 * or 8 bytes (an enum, an int, a uint64_t); for one of 4 `hi` is at most what the field holds. */
typedef struct {
    const char *name, *value; /* value: what help calls it, NULL for a flag   */
    option_kind kind;
    size_t at, n_bytes; /* the field: its offset, its size                    */
    unsigned who;       /* bits of the commands that take it                  */
    unsigned group;     /* its heading in help                                */
    const char *start;  /* default, as it would be typed; NULL: off or 0      */
    uint64_t lo, hi;
    const char *help; /* lines break at \n                                    */
} option_row;

typedef struct {
    const option_row *row;
    size_t n;     /* at most MAX_OPTION     */
    unsigned any; /* the bits of all commands */
    /* Is a KIND_SIZE as typed to be doubted? DONE, or an exit code whose reason is said. NULL: never. */
    int (*check_size)(const option_row *o, const char *text, uint64_t n_bytes);
} option_table;

/* Who parses: a command's name, its bit, and what help calls its argument: NULL, one word, or two words for
 * two arguments. */
typedef struct {
    const char *name;
    unsigned bit;
    const char *arg;
} option_taker;

/* What else was there. */
typedef struct {
    const char *arg, *arg2; /* arguments                                          */
    bool given[MAX_OPTION]; /* row i of the table was on the command line         */
} option_words;

/* Fill `values` and `words`, both cleared before, from the words after the command: first with the table's
 * defaults. Texts are borrowed from argv. *wants_help: -h or --help was met, and the rest is not read. */
int options_parse(const option_table *t, const option_taker *taker, option_words *words,
                  void *values, int argc, char **argv, bool *wants_help);

/* The row of an option that a command in `who` takes; NULL: none does. */
const option_row *option_find(const option_table *t, const char *name, size_t n, unsigned who);

/* Keep `name` in *best when it is nearer to `typed` than what is there; *distance starts at the least that is
 * too far. */
void nearest(const char *typed, const char *name, const char **best, size_t *distance);

#endif
