/* guard.c - run one test program for a bounded time, and end every process that it leaves behind.
 *
 *     guard SECONDS TIMES COMMAND [ARGUMENT ...]
 *
 * The command gets a session of its own without a terminal, /dev/null as its stdin and every signal
 * at its default, whatever the shell or nohup ignored. The guard is the subreaper of all processes
 * that the command starts, so that also a box that began a session of its own is found. When the
 * command is done, such processes have GRACE_S seconds to end; then the guard kills them.
 *
 * TIMES gets one line: seconds of wall clock, seconds of user and system CPU, both with all that the
 * command started.
 *
 * Exit: the command's status; 124 after SECONDS; 125 where the command said 0 and left processes
 * behind, which stderr names; 126 when the guard itself fails; 128 + N when signal N ended either.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GRACE_S = 5, KILL_S = 10 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The signals that end a run, and SIGCHLD. All are blocked in the guard, which waits for them. */
static void signals_watched(sigset_t *set) {
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGHUP);
}

static void become(char **command) {
    sigset_t none;
    for (int n = 1; n < 32; n++) signal(n, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    int fd = open("/dev/null", O_RDONLY);
    if (fd > 0) dup2(fd, 0), close(fd);
    execvp(command[0], command);
    fprintf(stderr, "guard: %s: %s\n", command[0], strerror(errno));
    _exit(127);
}

/* Wait for a watched signal, at most until `until`. Returns its number, or 0. */
static int await_signal(const sigset_t *set, double until) {
    double left = until - now();
    struct timespec t = {0, 0};
    if (left > 0) t.tv_sec = (time_t)left, t.tv_nsec = (long)(1e9 * (left - (double)(time_t)left));
    int n = sigtimedwait(set, NULL, &t);
    return n > 0 ? n : 0;
}

/* Reap every child that has ended. Returns true while `pid` runs, or for pid 0 while any child
 * does. */
static bool is_running(pid_t pid, int *status) {
    static int ended = 0;
    static bool has_ended;
    for (;;) {
        int s;
        pid_t got = waitpid(-1, &s, WNOHANG);
        if (got > 0 && got == pid) ended = s, has_ended = true;
        if (got > 0 || (got < 0 && errno == EINTR)) continue;
        if (has_ended && status) *status = ended;
        return pid ? !has_ended && got == 0 : got == 0;
    }
}

/* Find the parent of a process, and write its name to `name`. Returns 0 when there is no such
 * process. */
static pid_t parent_of(const char *pid, char name[64]) {
    char path[300], line[512];
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = 0;
    char *open = strchr(line, '('), *close = strrchr(line, ')'); /* "PID (NAME) STATE PARENT ..." */
    if (!open || !close || sscanf(close + 1, " %*c %d", &parent) != 1) return 0;
    snprintf(name, 64, "%.*s", (int)(close - open - 1), open + 1);
    return parent;
}

/* Send `number` to every child of this process, and name each on stderr where `is_told`. */
static void signal_children(int number, bool is_told) {
    char name[64];
    DIR *proc = opendir("/proc");
    if (!proc) return;
    for (struct dirent *e; (e = readdir(proc));) {
        if (!isdigit((unsigned char)e->d_name[0]) || parent_of(e->d_name, name) != getpid()) continue;
        if (is_told) fprintf(stderr, "guard: left behind: process %s (%s)\n", e->d_name, name);
        kill((pid_t)atol(e->d_name), number);
    }
    closedir(proc);
}

/* Kill all children. Their children become ours, so this goes on until none is left, or for KILL_S
 * seconds. */
static void kill_children(void) {
    const double until = now() + KILL_S;
    while (is_running(0, NULL) && now() < until) {
        signal_children(SIGKILL, false);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
}

/* Wait for the command. Returns its exit status, or why it was ended. */
static int await_command(pid_t pid, const char *name, double seconds, const sigset_t *set) {
    const double until = now() + seconds;
    int status = 0, stop = 0;
    while (is_running(pid, &status) && !stop && now() < until) {
        int n = await_signal(set, until);
        if (n != SIGCHLD) stop = n;
    }
    if (!is_running(pid, &status))
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (!stop) fprintf(stderr, "guard: %s: still running after %.0f seconds, ended\n", name, seconds);
    kill(-pid, SIGTERM); /* tests remove their files on SIGTERM */
    for (double end = now() + GRACE_S; is_running(pid, NULL) && now() < end;) await_signal(set, end);
    return stop ? 128 + stop : 124;
}

/* After a command that ended by itself: is any process of it left after GRACE_S seconds? */
static bool has_left(const sigset_t *set) {
    for (double end = now() + GRACE_S; is_running(0, NULL) && now() < end;) await_signal(set, end);
    if (!is_running(0, NULL)) return false;
    signal_children(SIGTERM, true);
    return true;
}

static void write_times(const char *path, double start) {
    struct rusage u;
    FILE *f = fopen(path, "we");
    getrusage(RUSAGE_CHILDREN, &u);
    if (!f) return;
    fprintf(f, "%.0f %.0f\n", now() - start,
            (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec));
    fclose(f);
}

int main(int argc, char **argv) {
    sigset_t set;
    const double start = now(), seconds = argc > 3 ? atof(argv[1]) : 0;
    if (seconds <= 0) return fprintf(stderr, "usage: guard SECONDS TIMES COMMAND [ARGUMENT ...]\n"), 126;
    const bool is_nohup = signal(SIGHUP, SIG_DFL) == SIG_IGN;
    signal(SIGINT, SIG_DFL); /* a shell's background jobs ignore it */
    signal(SIGCHLD, SIG_DFL);
    signals_watched(&set);
    if (is_nohup) sigdelset(&set, SIGHUP), signal(SIGHUP, SIG_IGN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return perror("guard: subreaper"), 126;
    pid_t pid = fork();
    if (pid < 0) return perror("guard: fork"), 126;
    if (pid == 0) become(argv + 3);
    int rc = await_command(pid, argv[3], seconds, &set);
    if (rc < 124 && has_left(&set) && rc == 0) rc = 125;
    kill_children();
    write_times(argv[2], start);
    return rc;
}
