/* edit.h - lines in: the terminal, pipes, history. */
#ifndef K3_CLI_EDIT_H
#define K3_CLI_EDIT_H

#include "cli/json.h"
#include "cli/talk.h"
#include "k3.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <termios.h>
#ifdef K3_HAVE_libedit
#include <histedit.h>
#endif

/* What edit_line() returns; the least and the most bytes that a line may have at most. */
enum { LINE_END = 0, LINE_TAKEN = 1, LINE_STOPPED = -1, LEAST_LINE = 1 << 20, MOST_LINE = 8 << 20 };

/* The reader of lines. Its size depends on K3_HAVE_libedit: the Makefile gives that to edit.c and chat.c alike. */
struct edit_state {
    unsigned char bytes[4096];
    size_t at, n;
    size_t most;        /* bytes kept of a line; one that has so many is refused */
    struct termios was; /* the terminal as it was found */
    bool has_termios;
    const char *prompt;
#ifdef K3_HAVE_libedit
    EditLine *el;
    History *history, *mine; /* all lines; those of this session                     */
    char *history_path;      /* NULL: not written                                    */
#endif
};

/* Text on its way to ids takes some ten times its size, which --ram does not count. */
size_t line_most(const chat *c);

extern volatile sig_atomic_t terminated; /* SIGTERM or SIGHUP came: the conversation ends */
extern struct termios *termios_at_exit;  /* what a killing signal puts back; NULL: nothing */

/* Reads at the prompt end when a signal comes; reads of weights go on. */
void chat_signals(void);

/* Whether the terminal shows what is typed. Nothing typed is lost either way. */
void edit_echo(edit_state *in, bool is_on);
void edit_open(chat *c);
void edit_close(edit_state *in);

/* What is one turn or command: on a terminal a \ at a line's end goes on with the next. */
int edit_line(chat *c, buf *line);

#endif
