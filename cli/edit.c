/* edit.c - lines in: the terminal, pipes, history.
 *
 * All input goes through one reader of bytes, so that what is typed ahead while a reply is made, or
 * pasted, waits here and not in the terminal's line of 4096. On a terminal libedit edits on top of
 * it; a bracketed paste comes in as one piece, newlines and all. While a reply is made the terminal
 * echoes nothing.
 */
#include "cli/edit.h"

#include "cli/chat_commands.h"
#include "cli/complete.h"
#include "cli/console.h"
#include "cli/json.h"
#include "cli/show.h"
#include "cli/talk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

size_t line_most(const chat *c) {
    uint64_t part = k3_engine_plan(c->e)->ram_bytes / 256;
    if (c->a->json || part < LEAST_LINE) return LEAST_LINE;
    return part < MOST_LINE ? (size_t)part : MOST_LINE;
}

volatile sig_atomic_t terminated;
static volatile sig_atomic_t resized, resumed;
struct termios *termios_at_exit;     /* what a killing signal puts back */
static struct termios termios_reply; /* while a reply is made */
static volatile sig_atomic_t is_replying;
static pthread_t main_thread; /* the one that waits for input */

/* Ctrl-C: the first stops the reply, the second gives its step up, the third kills. */
static void on_chat_signal(int number) {
    interrupted++;
    if (number != SIGINT) {
        interrupted += interrupted < 2;
        terminated = 1;
    }
    if (interrupted < 3) return;
    if (termios_at_exit) tcsetattr(STDIN_FILENO, TCSANOW, termios_at_exit);
    signal(number, SIG_DFL);
    raise(number);
}

static void on_resize(int number) {
    (void)number;
    resized = 1;
}

/* Ctrl-Z and fg: a shell leaves the terminal as it had it itself. */
static void on_resume(int number) {
    int error = errno;
    resumed = 1;
    if (!pthread_equal(pthread_self(), main_thread)) { /* all were stopped: any may wake first */
        pthread_kill(main_thread, number);
        return;
    }
    if (is_replying && tcgetpgrp(STDIN_FILENO) == getpgrp())
        tcsetattr(STDIN_FILENO, TCSANOW, &termios_reply);
    errno = error;
}

void chat_signals(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    main_thread = pthread_self();
    action.sa_handler = on_chat_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    action.sa_handler = on_resize;
    sigaction(SIGWINCH, &action, NULL);
    action.sa_handler = on_resume;
    sigaction(SIGCONT, &action, NULL);
}

/* After a signal: the line being edited takes the terminal's new size, or takes the terminal again
 * and is drawn anew. */
static void edit_resize(edit_state *in) {
#ifdef K3_HAVE_libedit
    if (resumed && in->el) {
        el_set(in->el, EL_PREP_TERM, 0);
        el_set(in->el, EL_PREP_TERM, 1);
        fputs("\n", stderr);
        el_set(in->el, EL_REFRESH, NULL);
    }
    if (resized && in->el) el_resize(in->el);
#else
    (void)in;
#endif
    resized = resumed = 0;
}

/* Wait for input. False when a signal that stops came first, however close: between looking at
 * `interrupted` and sleeping it is held back. */
static bool edit_await(edit_state *in) {
    static const int number[] = {SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGCONT};
    struct pollfd fd = {STDIN_FILENO, POLLIN, 0};
    sigset_t held, was;
    bool is_there = false;
    sigemptyset(&held);
    for (size_t i = 0; i < COUNT(number); i++) sigaddset(&held, number[i]);
    sigprocmask(SIG_BLOCK, &held, &was);
    while (!interrupted && !is_there) {
        edit_resize(in);
        int rc = ppoll(&fd, 1, NULL, &was);
        if (resumed) continue; /* a change of the terminal's mode looks like input */
        is_there = rc > 0 || (rc < 0 && errno != EINTR); /* read() says what is wrong */
    }
    sigprocmask(SIG_SETMASK, &was, NULL);
    return !interrupted;
}

/* The next byte of stdin; LINE_END, or LINE_STOPPED when a signal came first. */
static int edit_byte(edit_state *in, unsigned char *byte) {
    while (in->at == in->n) {
        if (!edit_await(in)) return LINE_STOPPED;
        ssize_t got = read(STDIN_FILENO, in->bytes, sizeof in->bytes);
        edit_resize(in);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return LINE_END;
        in->at = 0;
        in->n = (size_t)got;
    }
    *byte = in->bytes[in->at++];
    return LINE_TAKEN;
}

/* One line as it is, without its newline. */
static int edit_plain_line(edit_state *in, buf *line) {
    unsigned char byte;
    for (;;) {
        int rc = edit_byte(in, &byte);
        if (rc == LINE_END && line->n) return LINE_TAKEN;
        if (rc != LINE_TAKEN) return rc;
        if (byte == '\n') break;
        if (line->n < in->most) buf_add(line, (const char *)&byte, 1);
    }
    if (line->n && line->p[line->n - 1] == '\r') line->p[--line->n] = '\0';
    return LINE_TAKEN;
}

void edit_echo(edit_state *in, bool is_on) {
    struct termios now = in->was;
    if (!in->has_termios) return;
    is_replying = 0;
    if (!is_on) {
        now.c_lflag &= ~(tcflag_t)(ECHO | ICANON);
        now.c_cc[VMIN] = 1;
        now.c_cc[VTIME] = 0;
    } else { /* typed ahead: out of the terminal before its mode changes */
        struct pollfd fd = {STDIN_FILENO, POLLIN, 0};
        memmove(in->bytes, in->bytes + in->at, in->n - in->at);
        in->n -= in->at;
        in->at = 0;
        while (in->n < sizeof in->bytes && poll(&fd, 1, 0) > 0) {
            ssize_t got = read(STDIN_FILENO, in->bytes + in->n, sizeof in->bytes - in->n);
            if (got <= 0) break;
            in->n += (size_t)got;
        }
    }
    tcsetattr(STDIN_FILENO, TCSADRAIN, &now);
    termios_reply = now;
    is_replying = !is_on;
}

#ifdef K3_HAVE_libedit

static edit_state *edit_of(EditLine *el) {
    void *data = NULL;
    el_get(el, EL_CLIENTDATA, &data);
    return data;
}

static char *edit_prompt(EditLine *el) { return (char *)(uintptr_t)edit_of(el)->prompt; }

/* One character for libedit; bytes that are no UTF-8 become U+FFFD. */
static int edit_character(EditLine *el, wchar_t *out) {
    edit_state *in = edit_of(el);
    unsigned char byte;
    int rc = edit_byte(in, &byte);
    if (rc != LINE_TAKEN) return rc == LINE_END ? 0 : -1;
    uint32_t width = byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    uint32_t point = width == 1 ? byte : byte & (0x7fu >> width);
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    bool is_bad = (byte >= 0x80 && byte < 0xc2) || byte > 0xf4;
    for (uint32_t i = 1; i < width && !is_bad; i++) {
        rc = edit_byte(in, &byte);
        if (rc != LINE_TAKEN) return rc == LINE_END ? 0 : -1;
        is_bad = (byte & 0xc0) != 0x80;
        if (is_bad) in->at--; /* it may begin the next one */
        point = point << 6 | (byte & 0x3f);
    }
    is_bad =
        is_bad || point < least[width] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000);
    *out = is_bad ? 0xfffd : (wchar_t)point;
    return 1;
}

static unsigned char edit_newline(EditLine *el, int key) {
    (void)key;
    return el_insertstr(el, "\n") == 0 ? CC_REFRESH : CC_ERROR;
}

/* ESC [ 200 ~ was read: everything up to ESC [ 201 ~ is text. */
static unsigned char edit_paste(EditLine *el, int key) {
    static const wchar_t end[] = L"\033[201~";
    enum { N_END = 6 };
    wchar_t *text = NULL;
    size_t n = 0, cap = 0;
    unsigned char result = CC_ERROR;
    (void)key;
    for (;;) {
        wchar_t one;
        if (n + 2 > cap) {
            wchar_t *grown = realloc(text, (cap = cap * 2 + 256) * sizeof *grown);
            if (!grown) goto done;
            text = grown;
        }
        if (edit_character(el, &one) != 1) goto done;
        if (one == L'\r') one = L'\n';
        if (one == 0) continue;
        text[n++] = one;
        if (n >= N_END && memcmp(text + n - N_END, end, N_END * sizeof *end) == 0) break;
        if (n >= MOST_LINE) goto done;
    }
    text[n - N_END] = 0;
    result = n == N_END || el_winsertstr(el, text) == 0 ? CC_REFRESH : CC_ERROR;
done:
    free(text);
    return result;
}

/* What Tab completes: the name of a command behind a / that begins the line, then the file or the
 * words that its row in CHAT_COMMAND names. Anything else is a message, where Tab has nothing to add. */
static completion edit_complete(const char *line) {
    const char *arg = line + strcspn(line, " \t");
    const char *word[N_CHAT_COMMAND + 1] = {NULL};
    char words[64], *rest = words;
    size_t n = 0, i = 0;
    if (line[0] != '/') return (completion){NULL, NULL, 0};
    if (!*arg) {
        for (; i < N_CHAT_COMMAND; i++) word[n++] = CHAT_COMMAND[i].name;
        return complete_word(line, word);
    }
    while (i < N_CHAT_COMMAND && (strncmp(CHAT_COMMAND[i].name, line, (size_t)(arg - line)) != 0 ||
                                  CHAT_COMMAND[i].name[arg - line]))
        i++;
    arg += strspn(arg, " \t");
    if (i == N_CHAT_COMMAND) return (completion){NULL, NULL, 0};
    if (strcmp(CHAT_COMMAND[i].arg, "FILE") == 0) return complete_path(arg);
    snprintf(words, sizeof words, "%s", CHAT_COMMAND[i].arg); /* "[on|off]", "[TEXT]" */
    while (n < N_CHAT_COMMAND && (word[n] = strsep(&rest, "[|]")) != NULL)
        if (word[n][0] >= 'a' && word[n][0] <= 'z') n++;
    word[n] = NULL;
    return complete_word(arg, word);
}

/* Tab: what is certain is added; where more than one fits they are listed and the line stays. */
static unsigned char edit_tab(EditLine *el, int key) {
    const LineInfo *info = el_line(el);
    buf line = {0}, list = {0};
    enum { MOST_LISTED = 100 };
    (void)key;
    buf_add(&line, info->buffer, (size_t)(info->cursor - info->buffer));
    completion c = edit_complete(buf_text(&line));
    buf_free(&line);
    bool is_added = c.n && c.add[0] && el_insertstr(el, c.add) == 0;
    if (c.n > 1 && !is_added) {
        for (size_t i = 0; i < c.n && i < MOST_LISTED; i++) {
            buf name = {0};
            buf_add_valid(&name, c.word[i], strlen(c.word[i]));
            buf_puts(&list, i ? "  " : "");
            put_terminal(&list, buf_text(&name), name.n);
            buf_free(&name);
        }
        if (c.n > MOST_LISTED) buf_printf(&list, "  and %zu more", c.n - MOST_LISTED);
        fprintf(stderr, "\n%s\n", buf_text(&list));
    }
    unsigned char result = is_added ? CC_REFRESH : c.n > 1 ? CC_REDISPLAY : CC_REFRESH_BEEP;
    buf_free(&list);
    completion_free(&c);
    return result;
}

/* Where lines are kept: --history, or k3/history in the user's state directory. */
static char *history_find(const char *given) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char path[4096], *slash;
    if (given) return *given ? strdup(given) : NULL;
    if (state && *state == '/')
        snprintf(path, sizeof path, "%s/k3/history", state);
    else if (home && *home == '/')
        snprintf(path, sizeof path, "%s/.local/state/k3/history", home);
    else
        return NULL;
    for (slash = path; (slash = strchr(slash + 1, '/')) != NULL; *slash = '/') {
        *slash = '\0';
        mkdir(path, 0700); /* there already, or the history is not written */
    }
    return strdup(path);
}

/* A new list of at most 1000 lines, with those of the file: false when it is no history. */
static History *history_read(const char *path, bool *is_history) {
    HistEvent event;
    struct stat st;
    History *h = history_init();
    *is_history = true;
    if (!h) return NULL;
    history(h, &event, H_SETSIZE, 1000);
    history(h, &event, H_SETUNIQUE, 1);
    if (!path || stat(path, &st) != 0 || (S_ISREG(st.st_mode) && st.st_size == 0)) return h;
    *is_history = S_ISREG(st.st_mode) && history(h, &event, H_LOAD, path) >= 0;
    return h;
}

/* What is there is read first: a file that is something else is never written. */
static void history_begin(chat *c) {
    edit_state *in = c->edit;
    struct stat st;
    bool is_history, is_mine;
    in->history = history_read(in->history_path, &is_history);
    in->mine = history_read(NULL, &is_mine);
    if (is_history) return;
    if (stat(in->history_path, &st) == 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)))
        complain(c, DONE, "--history %s: is no history; it is left alone, and lines are not kept",
                 in->history_path);
    free(in->history_path);
    in->history_path = NULL;
}

#define HISTORY_TRIES 100 /* to lock it, 50 ms apart while another chat writes */

/* The file at `path`, made if absent, locked until it is closed. Others write it by rename: a lock
 * of a file that is no longer there is not the one. -1, and errno: EWOULDBLOCK is another chat that does not
 * let go, anything else is the system's reason. A file without a line is then not left behind. */
static int history_lock(const char *path) {
    int why = EWOULDBLOCK;
    for (int tries = 0; tries < HISTORY_TRIES; tries++) {
        struct stat a, b;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) return -1;
        bool is_locked = flock(fd, LOCK_EX | LOCK_NB) == 0;
        why = is_locked ? EWOULDBLOCK : errno;
        bool is_same = fstat(fd, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev &&
                       a.st_ino == b.st_ino;
        if (is_locked && is_same) return fd;
        bool is_over = why != EWOULDBLOCK && why != EINTR;
        if (is_over && is_same && S_ISREG(a.st_mode) && a.st_size == 0) unlink(path);
        close(fd);
        if (is_over) break;
        if (!is_locked) nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    errno = why;
    return -1;
}

/* This session's lines behind what the file now has, which another terminal may have written;
 * whole or not at all. */
static void history_write(edit_state *in) {
    HistEvent event;
    char path[PATH_MAX], temporary[PATH_MAX + 8];
    bool is_history = false;
    int fd = history_lock(in->history_path);
    if (fd < 0)
        say("--history %s: cannot be locked (%s); the lines of this session are not kept",
            in->history_path, errno == EWOULDBLOCK ? "another chat is writing it" : strerror(errno));
    if (fd < 0 || !realpath(in->history_path, path)) goto done;
    History *all = history_read(path, &is_history);
    for (int rc = history(in->mine, &event, H_LAST); all && rc >= 0;
         rc = history(in->mine, &event, H_PREV)) {
        HistEvent ignored;
        history(all, &ignored, H_ENTER, event.str);
    }
    snprintf(temporary, sizeof temporary, "%s.k3tmp", path);
    if (all && is_history) {
        mode_t mask = umask(077);
        unlink(temporary); /* under the lock it is nobody's */
        if (history(all, &event, H_SAVE, temporary) < 0 || rename(temporary, path) != 0)
            unlink(temporary);
        umask(mask);
    }
    if (all) history_end(all);
done:
    if (fd >= 0) close(fd);
}

void edit_open(chat *c) {
    edit_state *in = c->edit;
    in->el =
        el_init("k3", stdin, c->con.is_tty && !isatty(STDOUT_FILENO) ? stderr : stdout, stderr);
    if (!in->el) return;
    el_set(in->el, EL_CLIENTDATA, in);
    el_set(in->el, EL_PROMPT, edit_prompt);
    el_set(in->el, EL_EDITOR, "emacs");
    el_set(in->el, EL_SIGNAL, 0);
    el_wset(in->el, EL_GETCFN, edit_character);
    el_wset(in->el, EL_ADDFN, L"k3-newline", L"insert a newline", edit_newline);
    el_wset(in->el, EL_ADDFN, L"k3-paste", L"insert pasted text", edit_paste);
    el_set(in->el, EL_BIND, "\\e\r", "k3-newline", NULL);
    el_set(in->el, EL_BIND, "\\e\n", "k3-newline", NULL);
    el_set(in->el, EL_BIND, "\\e[200~", "k3-paste", NULL);
    el_wset(in->el, EL_ADDFN, L"k3-complete", L"complete commands and files", edit_tab);
    el_set(in->el, EL_BIND, "\t", "k3-complete", NULL);
    el_set(in->el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    in->history_path = history_find(c->a->chat.history);
    history_begin(c);
    if (in->history) el_set(in->el, EL_HIST, history, in->history);
    el_source(in->el, NULL);
}

void edit_close(edit_state *in) {
    HistEvent event;
    if (in->mine && in->history_path && history(in->mine, &event, H_FIRST) >= 0) history_write(in);
    if (in->el) el_end(in->el);
    if (in->history) history_end(in->history);
    if (in->mine) history_end(in->mine);
    free(in->history_path);
}

/* One line by libedit. */
static int edit_terminal_line(chat *c, buf *line) {
    edit_state *in = c->edit;
    int n = 0;
    const char *text;
    if (!in->el) {
        fputs(in->prompt, stderr);
        return edit_plain_line(in, line);
    }
    edit_resize(in);
    if (c->out.has_color) fputs("\033[?2004h", stderr); /* pastes come in brackets */
    text = el_gets(in->el, &n);
    if (c->out.has_color) fputs("\033[?2004l", stderr);
    if (interrupted) {
        el_reset(in->el);
        return LINE_STOPPED;
    }
    if (!text || n <= 0) return LINE_END;
    buf_add(line, text, (size_t)n);
    if (line->n && line->p[line->n - 1] == '\n') line->p[--line->n] = '\0';
    return LINE_TAKEN;
}

static void edit_remember(chat *c, const buf *line) {
    HistEvent event;
    if (line->n == 0 || line->n >= 65536) return;
    if (c->edit->history) history(c->edit->history, &event, H_ENTER, line->p);
    if (c->edit->mine) history(c->edit->mine, &event, H_ENTER, line->p);
}

#else

void edit_open(chat *c) { (void)c; }
void edit_close(edit_state *in) { (void)in; }
static void edit_remember(chat *c, const buf *line) { (void)c, (void)line; }

static int edit_terminal_line(chat *c, buf *line) {
    fputs(c->edit->prompt, stderr);
    return edit_plain_line(c->edit, line);
}

#endif

int edit_line(chat *c, buf *line) {
    buf_clear(line);
    if (!c->is_terminal) return edit_plain_line(c->edit, line);
    c->edit->prompt = "> ";
    edit_echo(c->edit, true);
    int rc;
    for (;;) {
        buf part = {0};
        rc = edit_terminal_line(c, &part);
        buf_add(line, buf_text(&part), part.n);
        buf_free(&part);
        if (rc != LINE_TAKEN || line->n == 0 || line->p[line->n - 1] != '\\') break;
        line->p[line->n - 1] = '\n';
        c->edit->prompt = ". ";
    }
    if (rc == LINE_TAKEN) edit_remember(c, line);
    edit_echo(c->edit, false);
    return rc;
}
