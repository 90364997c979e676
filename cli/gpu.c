/* gpu.c - `k3 run --gpu`: a k3-tier of this machine that serves from VRAM, started or joined.
 *
 * One such box serves everybody of this user who runs the same model: its socket lies in the user's
 * runtime directory under a name made from the model's path, from which files lie there, and from the
 * key, so that a model that was replaced gets a box of its own. It ends when it was alone for ten
 * minutes, and nothing that happens to who started it ends it sooner. Like any far box it may only
 * help: where it cannot be had, one line says why and the run goes on without it.
 */
#include "cli/gpu.h"

#include "cli/console.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GPU_LINGER "600"    /* seconds                                             */
#define GPU_START_S 120     /* so long a box may take to start                     */
#define GPU_START_TICK_MS 50

static bool fails(char *why, size_t n_why, const char *what, const char *how) {
    snprintf(why, n_why, "--gpu: %s: %s", what, how);
    return false;
}

/* A directory that is this user's alone, made if it is not there. */
static bool is_own_dir(const char *dir, char *why, size_t n_why) {
    struct stat st;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST) return fails(why, n_why, dir, strerror(errno));
    if (lstat(dir, &st) != 0) return fails(why, n_why, dir, strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != getuid() || st.st_mode & 022 ||
        access(dir, W_OK | X_OK) != 0)
        return fails(why, n_why, dir, "not a directory that you and only you can write to");
    return true;
}

/* XDG_RUNTIME_DIR, where that is of use (after `su` it is somebody else's), or one in /tmp. */
static bool runtime_dir(char *dir, size_t cap, char *why, size_t n_why) {
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    if (xdg && xdg[0] == '/' && strlen(xdg) < cap) {
        snprintf(dir, cap, "%s", xdg);
        if (is_own_dir(dir, why, n_why)) return true;
    }
    snprintf(dir, cap, "/tmp/k3-%u", (unsigned)getuid());
    return is_own_dir(dir, why, n_why);
}

static uint64_t fnv_add(uint64_t h, const void *p, size_t n) {
    for (const unsigned char *c = p; n-- > 0; c++) h = (h ^ *c) * 0x100000001b3u;
    return h;
}

/* Which file this is: another one in its place counts as another. */
static uint64_t fnv_add_file(uint64_t h, const char *dir, const char *name) {
    char path[PATH_MAX + 64];
    struct stat st;
    snprintf(path, sizeof path, "%s%s", dir, name);
    if (stat(path, &st) != 0) return h;
    const uint64_t v[] = {(uint64_t)st.st_dev, (uint64_t)st.st_ino, (uint64_t)st.st_size,
                          (uint64_t)st.st_mtim.tv_sec, (uint64_t)st.st_mtim.tv_nsec};
    return fnv_add(h, v, sizeof v);
}

/* What a box is started with: whole paths, since it is at home elsewhere. "": not given. */
typedef struct {
    char model[PATH_MAX], pins[PATH_MAX], key[PATH_MAX];
} paths;

static bool path_whole(char *to, const char *from, char *why, size_t n_why) {
    to[0] = 0;
    return !from || realpath(from, to) || fails(why, n_why, from, strerror(errno));
}

/* Where the box of this model listens. */
static bool socket_path(const paths *p, struct sockaddr_un *sa, char *why, size_t n_why) {
    char dir[sizeof sa->sun_path - sizeof "/k3-gpu-0123456789abcdef.sock" + 1];
    uint64_t h = fnv_add(0xcbf29ce484222325u, p->model, strlen(p->model));
    h = fnv_add_file(h, p->model, "/config.json");
    h = fnv_add_file(h, p->model, "/model.safetensors.index.json");
    if (p->key[0]) h = fnv_add_file(fnv_add(h, p->key, strlen(p->key)), p->key, "");
    if (!runtime_dir(dir, sizeof dir, why, n_why)) return false;
    sa->sun_family = AF_UNIX;
    snprintf(sa->sun_path, sizeof sa->sun_path, "%s/k3-gpu-%016llx.sock", dir,
             (unsigned long long)h);
    return true;
}

/* Also one that is too busy to take another: it is not waited for here. */
static bool is_listening(const struct sockaddr_un *sa) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool is_there =
        fd >= 0 && (connect(fd, (const struct sockaddr *)sa, sizeof *sa) == 0 || errno == EAGAIN);
    if (fd >= 0) close(fd);
    return is_there;
}

/* PATH_MAX bytes: the k3-tier that K3_TIER names, or beside this program, or else the first in PATH. */
static void tier_program(char *path, size_t cap) {
    const char *named = getenv("K3_TIER");
    ssize_t n = readlink("/proc/self/exe", path, cap - sizeof "k3-tier");
    path[n > 0 ? n : 0] = 0;
    char *slash = n > 0 ? strrchr(path, '/') : NULL;
    if (slash) strcpy(slash + 1, "k3-tier");
    if (named && (!strchr(named, '/') || !realpath(named, path)))
        snprintf(path, cap, "%s", named);
    else if (!named && (!slash || access(path, X_OK) != 0))
        snprintf(path, cap, "k3-tier");
}

/* Whatever this process was given by its own parent is not the box's to hold open. */
static void close_others(void) {
#ifdef SYS_close_range
    if (syscall(SYS_close_range, 3u, ~0u, 0u) == 0) return;
#endif
    for (int fd = 3; fd < 4096; fd++) close(fd);
}

/* In the child: a session and a place of its own, its words in a file. */
static void tier_exec(const char *program, const paths *p, const char *address, const char *log) {
    static const int number[] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE};
    char ram[24];
    snprintf(ram, sizeof ram, "%llu", GPU_RAM_BYTES);
    const char *argv[16] = {program,    "--model", p->model,   "--gpu",    "--ram",    ram,
                            "--listen", address,   "--linger", GPU_LINGER, "--no-fill"};
    int n = 11;
    sigset_t none;
    if (p->pins[0]) argv[n++] = "--pins", argv[n++] = p->pins;
    if (p->key[0]) argv[n++] = "--psk-file", argv[n++] = p->key;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) signal(number[i], SIG_DFL);
    setsid();
    int in = open("/dev/null", O_RDONLY), out = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0) _exit(126);
    close_others();
    if (chdir("/") != 0) _exit(126); /* hold on to no directory of the user's */
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

static void pause_ms(long ms) { nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL); }

/* Start it and wait until it listens. */
static bool tier_start(const struct sockaddr_un *sa, const paths *p, char *why, size_t n_why) {
    char program[PATH_MAX], address[sizeof sa->sun_path + 8], log[sizeof sa->sun_path + 8],
        line[512];
    const struct sigaction reaped = {.sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT};
    tier_program(program, sizeof program);
    snprintf(address, sizeof address, "unix:%s", sa->sun_path);
    snprintf(log, sizeof log, "%s.log", sa->sun_path);
    pid_t pid = fork();
    if (pid < 0) return fails(why, n_why, "fork", strerror(errno));
    if (pid == 0) tier_exec(program, p, address, log);
    for (int ms = 0; ms < GPU_START_S * 1000; ms += GPU_START_TICK_MS) {
        pause_ms(GPU_START_TICK_MS);
        bool is_over = waitpid(pid, NULL, WNOHANG) == pid;
        if (is_listening(sa)) {
            sigaction(SIGCHLD, &reaped, NULL); /* whenever it ends, it is no zombie of ours */
            return true;
        }
        if (is_over) {
            last_line(log, line, sizeof line);
            unlink(log);
            return fails(why, n_why, "no box", line);
        }
        if (interrupted) return fails(why, n_why, program, "interrupted while it starts");
    }
    kill(pid, SIGTERM);
    return fails(why, n_why, program, "does not start; its words are beside its socket");
}

/* One of us starts it: the descriptor that is the lock, or -1. Whoever holds it needs no longer than a box
 * may take to start. */
static int lock_take(const struct sockaddr_un *sa, char *why, size_t n_why) {
    char lock[sizeof sa->sun_path + 8];
    snprintf(lock, sizeof lock, "%s.lock", sa->sun_path);
    for (int ms = 0;; ms += GPU_START_TICK_MS) {
        struct stat a, b;
        const char *fault = NULL;
        int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        bool is_locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
        if (!is_locked && errno != EWOULDBLOCK && errno != EINTR) fault = strerror(errno);
        if (is_locked && fstat(fd, &a) == 0 && stat(lock, &b) == 0 && a.st_ino == b.st_ino)
            return fd; /* else lock_drop took its name: another is the lock now */
        if (fd >= 0) close(fd);
        if (ms > (GPU_START_S + 10) * 1000)
            fault = "is held by another k3, and no box came of it; is that k3 stopped?";
        if (interrupted) fault = "interrupted";
        if (fault) {
            fails(why, n_why, lock, fault);
            return -1;
        }
        pause_ms(GPU_START_TICK_MS);
    }
}

/* Nothing came of it: nothing is left behind. Who waits for the lock starts what comes after. */
static void lock_drop(const struct sockaddr_un *sa) {
    char lock[sizeof sa->sun_path + 8];
    snprintf(lock, sizeof lock, "%s.lock", sa->sun_path);
    unlink(lock);
}

bool gpu_join(const char *model_dir, const char *pins, const char *key_file, char *address,
              size_t cap, bool *is_new, char *why, size_t n_why) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    static paths p;
    if (!path_whole(p.model, model_dir, why, n_why) || !path_whole(p.pins, pins, why, n_why) ||
        !path_whole(p.key, key_file, why, n_why) || !socket_path(&p, &sa, why, n_why))
        return false;
    snprintf(address, cap, "unix:%s", sa.sun_path);
    if (is_listening(&sa)) return true;
    int fd = lock_take(&sa, why, n_why);
    if (fd < 0) return false;
    bool is_up = is_listening(&sa) || (*is_new = tier_start(&sa, &p, why, n_why));
    if (!is_up) lock_drop(&sa);
    close(fd);
    return is_up;
}
