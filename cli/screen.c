/* screen.c - the rules of screen.h, with VT100 sequences that every terminal of today has. */
#include "cli/screen.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static struct {
    bool is_known, is_shared, is_vt100; /* asked once                                  */
    bool is_mid_line;                   /* the answer's cursor is not in column 0      */
    bool is_mid_word;                   /* its last byte belongs to a word             */
    char *held[SCREEN_HELD];
    size_t n_held, n_more;
} screen;

static void screen_ask(void) {
    const char *terminal = getenv("TERM");
    if (screen.is_known) return;
    screen.is_known = true;
    screen.is_shared = isatty(STDOUT_FILENO) == 1 && isatty(STDERR_FILENO) == 1;
    screen.is_vt100 = terminal && terminal[0] && strcmp(terminal, "dumb") != 0;
}

static int screen_put(const char *p, size_t n) {
    if (n == 0) return 0;
    if (fwrite(p, 1, n, stdout) != n || fflush(stdout) != 0) return errno ? errno : EIO;
    screen.is_mid_line = screen.is_shared && p[n - 1] != '\n';
    screen.is_mid_word = screen.is_mid_line && p[n - 1] != ' ';
    return 0;
}

/* How many bytes of p[0, n) come before the notes that wait: up to a blank, or up to and with the end of a
 * line. More than n: no word ends here. */
static size_t screen_break(const char *p, size_t n) {
    if (screen.n_held == 0) return n + 1;
    if (!screen.is_mid_word) return 0;
    for (size_t i = 0; i < n; i++)
        if (p[i] == ' ' || p[i] == '\n') return p[i] == '\n' ? i + 1 : i;
    return n + 1;
}

int screen_write(const char *p, size_t n) {
    screen_ask();
    size_t at = screen_break(p, n);
    if (at > n) return screen_put(p, n);
    int rc = screen_put(p, at);
    screen_release();
    return rc ? rc : screen_put(p + at, n - at);
}

void screen_release(void) {
    if (screen.is_mid_line) fputc('\n', stderr);
    screen.is_mid_line = screen.is_mid_word = false;
    for (size_t i = 0; i < screen.n_held; i++) {
        fprintf(stderr, "k3: note: %s\n", screen.held[i]);
        free(screen.held[i]);
    }
    if (screen.n_more) fprintf(stderr, "k3: note: and %zu more notes\n", screen.n_more);
    screen.n_held = screen.n_more = 0;
}

void screen_note(const char *line) {
    screen_ask();
    if (!screen.is_mid_word) {
        screen_release();
        fprintf(stderr, "k3: note: %s\n", line);
    } else if (screen.n_held == SCREEN_HELD || !(screen.held[screen.n_held] = strdup(line))) {
        screen.n_more++;
    } else {
        screen.n_held++;
    }
}

size_t screen_columns(void) {
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
    return size.ws_col;
}

/* The last column stays free: a terminal that wraps there would leave a row behind. ESC D and ESC M go a
 * row down and up again, which makes room below the last row; ESC 7 and ESC 8 keep the cursor. */
bool screen_draw(const char *line, bool is_below) {
    int n = (int)screen_columns() - 1;
    screen_ask();
    if (is_below && !screen.is_vt100) return false;
    if (is_below)
        fprintf(stderr, "\033D\033M\0337\033D\r\033[K%.*s\0338", n, line);
    else
        fprintf(stderr, "\r\033[K%.*s", n, line);
    return true;
}

void screen_wipe(bool is_below) {
    fputs(is_below ? "\0337\033D\r\033[K\0338" : "\r\033[K", stderr);
}
