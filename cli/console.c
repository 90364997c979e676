/* console.c - messages, exit codes, progress and Ctrl-C of the `k3` program.
 *
 * Ctrl-C reaches a step that would take minutes through the same callback as progress: the first one asks,
 * the second one kills.
 */
#include "cli/console.h"

#include "cli/screen.h"
#include "k3_common.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int exit_code(int status) {
    switch (status) {
    case K3_EUSAGE: return FAIL_USAGE;
    case K3_EMODEL: return FAIL_MODEL;
    case K3_EBUDGET: return FAIL_BUDGET;
    case K3_ECHECK: return FAIL_CHECK;
    case K3_ECANCEL: return INTERRUPTED; /* only a signal cancels here */
    default: return status < 0 ? FAIL_IO : DONE;
    }
}

static void say_args(const char *format, va_list args) {
    screen_release();
    fputs("k3: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_args(format, args);
    va_end(args);
}

int fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_args(format, args);
    va_end(args);
    return code;
}

int fail_memory(const char *what, size_t n_bytes) {
    return fail(FAIL_IO, "no memory for %s (%zu bytes)", what, n_bytes);
}
static uint64_t bytes_typed; /* --ram, if it was that; 0: it was not */

void unit_doubt(uint64_t n_bytes) { bytes_typed = n_bytes; }

void unit_ask(void) {
    unsigned long long n = bytes_typed;
    if (n) say("--ram %llu was read as %llu bytes: did you mean --ram %lluG?", n, n, n);
}

int fail_status(int status, const k3_error *err) {
    if (status == K3_ECANCEL) return fail(INTERRUPTED, "interrupted");
    say("%s", err->text[0] ? err->text : k3_status_name(status));
    if (status == K3_ENUMERIC)
        say("`k3 verify --model DIR` tells damaged files from a fault of the engine");
    if (status == K3_ENOMEM) say("a smaller --context or --chunk needs less memory");
    if (status == K3_EBUDGET) unit_ask();
    return exit_code(status);
}

const char *fmt_bytes(char text[32], uint64_t n_bytes) {
    static const char *const unit[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)n_bytes / 1024.0;
    size_t i = 0;
    for (; i + 1 < COUNT(unit) && value >= 1024.0; i++) value /= 1024.0;
    if (n_bytes < 1024)
        snprintf(text, 32, "%u B", (unsigned)n_bytes);
    else
        snprintf(text, 32, i < 1 ? "%.1f %s" : "%.2f %s", value, unit[i]);
    return text;
}

double per_second(uint64_t n, uint64_t ns) { return ns ? (double)n * 1e9 / (double)ns : 0.0; }

volatile sig_atomic_t interrupted;

static void on_signal(int number) {
    if (interrupted) {
        signal(number, SIG_DFL);
        raise(number);
    }
    interrupted = 1;
}

void signals_catch(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

void console_init(console *c, bool is_quiet) {
    memset(c, 0, sizeof *c);
    c->is_quiet = is_quiet;
    c->is_tty = isatty(STDERR_FILENO) == 1;
    c->start_ns = c->last_ns = clock_ns(); /* work that is done at once shows no line */
}

void console_clear(console *c) {
    if (c->is_shown) screen_wipe(c->is_below);
    c->is_shown = false;
}

void console_note(void *user, const char *line) {
    console *c = user;
    console_clear(c);
    if (!c->is_quiet) screen_note(line);
}

void console_answer(console *c, uint64_t n_said, uint64_t n_want) {
    c->step_ns = clock_ns();
    c->step_read_bytes = c->seen_bytes;
    if (n_said <= 1) c->said_ns = c->step_ns;
    c->n_said = n_said;
    c->n_want = n_want;
}

void line_add(char *line, size_t cap, const char *format, ...) {
    size_t n = strlen(line);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, cap - n, format, args);
    va_end(args);
}

static void line_add_left(char *line, size_t cap, const char *what, double seconds) {
    if (seconds < 120)
        line_add(line, cap, ", %s%.0f s left", what, seconds);
    else if (seconds < 7200)
        line_add(line, cap, ", %s%.0f min left", what, seconds / 60);
    else
        line_add(line, cap, ", %s%.1f h left", what, seconds / 3600);
}

/* "loading: layer 12, 1.20 GiB of 8.00 GiB, 2.10 GB/s, 3 s left". */
static void console_bytes(char *line, size_t cap, const console *c, const k3_progress *p,
                          double seconds) {
    char done[32], total[32];
    line_add(line, cap, ", %s", fmt_bytes(done, p->done));
    if (p->total) line_add(line, cap, " of %s", fmt_bytes(total, p->total));
    line_add(line, cap, ", %.2f GB/s", c->read_speed * 1e-9);
    if (p->total > p->done && p->done > c->start_done)
        line_add_left(line, cap, "",
                      seconds * (double)(p->total - p->done) / (double)(p->done - c->start_done));
}

/* "prompt: layer 12, 3.20 GB/s, 37 %, 322 positions left, 8.1 tok/s, 42 s left", then
 * "answer: layer 12, 3.20 GB/s, 8 ids, this one 2.41 GiB, 0.4 tok/s, at most 42 s left". */
static void console_compute(char *line, size_t cap, const console *c, const k3_progress *p,
                            uint64_t now) {
    double seconds = (double)(now - (c->n_said ? c->said_ns : c->start_ns)) * 1e-9;
    if (c->read_speed >= 5e6) line_add(line, cap, ", %.2f GB/s", c->read_speed * 1e-9);
    if (c->n_said) {
        double rate = seconds > 0 ? (double)(c->n_said - 1) / seconds : 0;
        uint64_t n_read = p->read_bytes - c->step_read_bytes;
        char read[32];
        line_add(line, cap, ", %llu ids", (unsigned long long)c->n_said);
        if (n_read >= 1u << 20) line_add(line, cap, ", this one %s", fmt_bytes(read, n_read));
        if (rate <= 0) return;
        line_add(line, cap, ", %.1f tok/s", rate);
        line_add_left(line, cap, "at most ", (double)(c->n_want - c->n_said) / rate);
        return;
    }
    if (!p->total || !c->n_layers) return;
    uint64_t left = p->total > p->done ? p->total - p->done : 0;
    line_add(line, cap, ", %.0f %%, %llu positions left",
             100.0 * (double)p->done / (double)p->total,
             (unsigned long long)((left + c->n_layers - 1) / c->n_layers));
    double rate = seconds > 0 ? (double)p->done / seconds : 0;
    if (rate <= 0) return;
    line_add(line, cap, ", %.1f tok/s", rate / c->n_layers);
    line_add_left(line, cap, "", (double)left / rate);
}

/* What the disk gives, from two readings of what was read. */
static void console_speed(console *c, const k3_progress *p, uint64_t now) {
    uint64_t n = p->read_bytes > c->read_bytes ? p->read_bytes - c->read_bytes : 0;
    double speed = per_second(n, now - c->last_ns);
    c->read_speed = c->read_speed > 0 ? 0.7 * c->read_speed + 0.3 * speed : speed;
    c->read_bytes = p->read_bytes;
}

/* Ctrl-C was pressed and the step goes on to its end: after a second, say so, once. */
static void console_wait(console *c, uint64_t now) {
    if (!c->asked_ns) c->asked_ns = now;
    if (!c->is_tty || c->has_said_wait || now - c->asked_ns < 1000000000u) return;
    console_clear(c);
    fputs("\nk3: this step ends first; Ctrl-C again gives it up, and what it costs to make good\n",
          stderr);
    c->has_said_wait = true;
}

/* A token that takes longer than this has its status shown below the text. */
#define SLOW_NS 1000000000u

int console_progress(void *user, const k3_progress *p) {
    static const char *const phase[] = {"headers", "loading", "prompt", "checking"};
    console *c = user;
    uint64_t now = clock_ns();
    char line[160];
    if (interrupted > c->n_grace) return 1;
    if (interrupted) console_wait(c, now);
    if (p->phase != c->phase || p->done < c->done) {
        c->start_ns = now;
        c->start_done = p->phase == K3_PHASE_VERIFY ? p->done : 0;
    }
    c->phase = p->phase;
    c->done = p->done;
    c->seen_bytes = p->read_bytes;
    if (!c->is_tty || now - c->last_ns < 100000000u) return 0;
    console_speed(c, p, now);
    c->last_ns = now;
    c->is_below = p->phase == K3_PHASE_COMPUTE && c->hides_compute;
    if (c->is_below && now - c->step_ns < SLOW_NS) return 0; /* the text itself shows the way */
    bool is_answer = p->phase == K3_PHASE_COMPUTE && c->n_said;
    const char *verb = c->verb && p->phase == K3_PHASE_LOAD ? c->verb : phase[p->phase];
    snprintf(line, sizeof line, "%s:", is_answer ? "answer" : verb);
    if (p->layer >= 0) line_add(line, sizeof line, ", layer %d", p->layer);
    if (p->phase == K3_PHASE_OPEN)
        line_add(line, sizeof line, ", %llu of %llu", (unsigned long long)p->done,
                 (unsigned long long)p->total);
    else if (p->phase == K3_PHASE_COMPUTE)
        console_compute(line, sizeof line, c, p, now);
    else
        console_bytes(line, sizeof line, c, p, (double)(now - c->start_ns) * 1e-9);
    char *comma = strchr(line, ',');
    if (comma) memmove(comma, comma + 1, strlen(comma)); /* "prompt:, layer 3" */
    c->is_shown = screen_draw(line, c->is_below);
    return 0;
}

double percent(uint64_t part, uint64_t whole) {
    return whole ? 100.0 * (double)part / (double)whole : 0.0;
}

double share(uint64_t part, uint64_t whole) { return whole ? (double)part / (double)whole : 0.0; }
