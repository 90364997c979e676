/* console.h - exit codes, messages and progress: all that the `k3` program says on stderr.
 *
 * Every message is one line that begins with "k3: ". A usage error names the option, what was wrong with
 * it and, where that can be known, what was meant. Long work shows a progress line, on a terminal only, at
 * most ten times a second, and wipes that line at its end.
 */
#ifndef K3_CLI_CONSOLE_H
#define K3_CLI_CONSOLE_H

#include "k3.h"
#include "k3_common.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Exit codes and messages ---- */

enum {
    DONE = 0,
    FAIL_IO = 1,
    FAIL_USAGE = 2,
    FAIL_MODEL = 3,
    FAIL_BUDGET = 4,
    FAIL_CHECK = 5,
    INTERRUPTED = 130 /* as a shell reports SIGINT */
};

/* The exit code for a k3_status. */
int exit_code(int status);

/* One line on stderr. */
PRINTF_LIKE(1, 2) void say(const char *format, ...);

/* One line on stderr; returns `code`, so that `return fail(...)` reads well. */
PRINTF_LIKE(2, 3) int fail(int code, const char *format, ...);
int fail_memory(const char *what, size_t n_bytes);

/* The engine's own words for a status, then what to do next where that is known; returns its exit code. */
int fail_status(int status, const k3_error *err);

/* --ram was typed as a number of bytes, without a unit and so small that a unit was meant. A message about
 * too small a budget is then followed by one that asks (unit_ask). */
void unit_doubt(uint64_t n_bytes);
void unit_ask(void);

/* ---- Numbers in messages ---- */

/* "1.50 GiB", "8.72 MiB", "512 B"; `text` is the caller's. */
const char *fmt_bytes(char text[32], uint64_t n_bytes);

/* Of 0 ns, and of an empty whole, these are 0. */
double per_second(uint64_t n, uint64_t ns);
double percent(uint64_t part, uint64_t whole);
double share(uint64_t part, uint64_t whole); /* 0..1 */

/* Append to a line of at most `cap` bytes with its NUL; what has no room is dropped. */
PRINTF_LIKE(3, 4) void line_add(char *line, size_t cap, const char *format, ...);

/* ---- Notes, progress, Ctrl-C ---- */

extern volatile sig_atomic_t interrupted; /* how often Ctrl-C asked */

/* Count SIGINT and SIGTERM in `interrupted`; a second one kills. */
void signals_catch(void);

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
    const char *verb; /* what loading is called, if not that                    */
    k3_phase phase;
    uint64_t done, start_ns, last_ns;
    uint64_t start_done; /* what was done already when this phase was first heard of  */
    uint64_t read_bytes; /* at the last line                                          */
    double read_speed;   /* bytes per second, smoothed over lines                     */
    uint32_t n_layers;   /* 0 until the model is open                                 */
} console;

void console_init(console *c, bool is_quiet);

/* Wipe the progress line, if one is shown. */
void console_clear(console *c);

/* The answer's n_said-th id of at most n_want is to be run; n_said 0: a prompt is. */
void console_answer(console *c, uint64_t n_said, uint64_t n_want);

/* k3_options.note and .progress; `user` is the console. */
void console_note(void *user, const char *line);
int console_progress(void *user, const k3_progress *p);

#endif
