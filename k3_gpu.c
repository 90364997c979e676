/* k3_gpu.c - `k3 run --gpu`: a k3-tier of this machine that serves from VRAM, started or joined.
 *
 * One such box serves everybody of this user who runs the same model: its socket lies in the user's
 * runtime directory under a name made from the model's path. It ends when it was alone for ten
 * minutes. Like any far box it may only help: where it cannot be had, one line says why and the run
 * goes on without it.
 */
#include "k3_cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GPU_RAM "2G"        /* what the box may take of this machine's memory      */
#define GPU_LINGER "600"    /* seconds                                             */
#define GPU_START_S 120     /* so long a box may take to start                     */
#define GPU_START_TICK_MS 50

static bool fails(char *why, size_t n_why, const char *what, const char *how) {
    snprintf(why, n_why, "--gpu: %s: %s", what, how);
    return false;
}

/* A directory that is this user's alone. */
static bool runtime_dir(char *dir, size_t cap, char *why, size_t n_why) {
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    struct stat st;
    if (xdg && xdg[0] == '/')
        snprintf(dir, cap, "%s", xdg);
    else
        snprintf(dir, cap, "/tmp/k3-%u", (unsigned)getuid());
    if (mkdir(dir, 0700) != 0 && errno != EEXIST) return fails(why, n_why, dir, strerror(errno));
    if (lstat(dir, &st) != 0) return fails(why, n_why, dir, strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != getuid() || st.st_mode & 022)
        return fails(why, n_why, dir, "not a directory that only you can write to");
    return true;
}

/* Where the box of this model listens. */
static bool socket_path(const char *model_dir, struct sockaddr_un *sa, char *why, size_t n_why) {
    char dir[64], *real = realpath(model_dir, NULL);
    uint64_t h = 0xcbf29ce484222325u;
    if (!real) return fails(why, n_why, model_dir, strerror(errno));
    for (const char *p = real; *p; p++) h = (h ^ (unsigned char)*p) * 0x100000001b3u;
    free(real);
    if (!runtime_dir(dir, sizeof dir, why, n_why)) return false;
    sa->sun_family = AF_UNIX;
    int n = snprintf(sa->sun_path, sizeof sa->sun_path, "%s/k3-gpu-%016llx.sock", dir,
                     (unsigned long long)h);
    return (size_t)n < sizeof sa->sun_path || fails(why, n_why, dir, "too long a name");
}

static bool is_listening(const struct sockaddr_un *sa) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is = fd >= 0 && connect(fd, (const struct sockaddr *)sa, sizeof *sa) == 0;
    if (fd >= 0) close(fd);
    return is;
}

/* The k3-tier beside this program, or else the first in PATH. */
static void tier_program(char *path, size_t cap) {
    const char *named = getenv("K3_TIER");
    ssize_t n = readlink("/proc/self/exe", path, cap - sizeof "k3-tier");
    snprintf(path + (n > 0 ? n : 0), cap - (size_t)(n > 0 ? n : 0), "%s", "");
    char *slash = n > 0 ? strrchr(path, '/') : NULL;
    if (slash) strcpy(slash + 1, "k3-tier");
    if (named)
        snprintf(path, cap, "%s", named);
    else if (!slash || access(path, X_OK) != 0)
        snprintf(path, cap, "k3-tier");
}

/* In the child: a session of its own, its words in a file. */
static void tier_exec(const char *program, const char *model_dir, const char *pins,
                      const char *address, const char *log) {
    const char *argv[] = {program, "--model",  model_dir, "--gpu",    "--ram",  GPU_RAM, "--listen",
                          address, "--linger", GPU_LINGER, "--no-fill", NULL,    NULL,    NULL};
    if (pins) {
        argv[11] = "--pins";
        argv[12] = pins;
    }
    setsid();
    int in = open("/dev/null", O_RDONLY), out = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(126);
    execvp(program, (char *const *)argv);
    dprintf(2, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

/* The last line of what the box said. */
static void last_line(const char *log, char *line, size_t cap) {
    char text[512];
    FILE *f = fopen(log, "re");
    snprintf(line, cap, "it ended");
    while (f && fgets(text, sizeof text, f)) {
        text[strcspn(text, "\n")] = 0;
        if (text[0]) snprintf(line, cap, "%s", text);
    }
    if (f) fclose(f);
}

/* Start it and wait until it listens. */
static bool tier_start(const struct sockaddr_un *sa, const char *model_dir, const char *pins,
                       char *why, size_t n_why) {
    char program[4096], address[sizeof sa->sun_path + 8], log[sizeof sa->sun_path + 8], line[512];
    tier_program(program, sizeof program);
    snprintf(address, sizeof address, "unix:%s", sa->sun_path);
    snprintf(log, sizeof log, "%s.log", sa->sun_path);
    pid_t pid = fork();
    if (pid < 0) return fails(why, n_why, "fork", strerror(errno));
    if (pid == 0) tier_exec(program, model_dir, pins, address, log);
    for (int ms = 0; ms < GPU_START_S * 1000; ms += GPU_START_TICK_MS) {
        nanosleep(&(struct timespec){.tv_nsec = GPU_START_TICK_MS * 1000000}, NULL);
        if (is_listening(sa)) return true;
        if (waitpid(pid, NULL, WNOHANG) != pid) continue;
        last_line(log, line, sizeof line);
        return fails(why, n_why, "no box", line);
    }
    kill(pid, SIGTERM);
    return fails(why, n_why, program, "does not start; its words are beside its socket");
}

bool gpu_join(const char *model_dir, const char *pins, char *address, size_t cap, char *why,
              size_t n_why) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    char lock[sizeof sa.sun_path + 8];
    if (!socket_path(model_dir, &sa, why, n_why)) return false;
    snprintf(address, cap, "unix:%s", sa.sun_path);
    if (is_listening(&sa)) return true;
    snprintf(lock, sizeof lock, "%s.lock", sa.sun_path); /* one of us starts it */
    int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) != 0) {
        if (fd >= 0) close(fd);
        return fails(why, n_why, lock, strerror(errno));
    }
    bool is_up = is_listening(&sa) || tier_start(&sa, model_dir, pins, why, n_why);
    close(fd);
    return is_up;
}
