/* k3_temp.c - see k3_temp.h. */
#include "k3_temp.h"

#include "k3_error.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMP_TRIES 100 /* attempts: its owner may rename it between open and lock */
enum { TEMP_TAKEN = 1, TEMP_AGAIN = 2 };

/* Is the open file the one that now has this name? */
static bool temp_is_at(int fd, const char *path) {
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

/* Why a file that was there already must not be taken over; NULL: it may be. */
static const char *temp_fault(const struct stat *st, unsigned mode, char *text, size_t cap) {
    if (!S_ISREG(st->st_mode)) return "no regular file";
    if (st->st_uid != geteuid())
        snprintf(text, cap, "it belongs to user %lu", (unsigned long)st->st_uid);
    else if (st->st_nlink != 1)
        snprintf(text, cap, "it has %lu names", (unsigned long)st->st_nlink);
    else if (st->st_mode & 077 & ~mode)
        snprintf(text, cap, "its mode %04o gives rights to others",
                 (unsigned)(st->st_mode & 07777));
    else
        return NULL;
    return text;
}

/* Lock the file that was opened. Returns 0: it is this process's; TEMP_TAKEN: another process has the
 * lock; TEMP_AGAIN: the name is another file's by now; K3_EIO: the file must not be taken over. */
static int temp_take(int fd, const char *path, unsigned mode, bool is_new, k3_error *err) {
    struct stat st;
    char text[96];
    if (fstat(fd, &st) != 0) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
    const char *fault = is_new ? NULL : temp_fault(&st, mode, text, sizeof text);
    if (fault)
        return fail(err, K3_EIO, "%s: is in the way: %s; move it, or name another place", path,
                    fault);
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return temp_is_at(fd, path) ? 0 : TEMP_AGAIN;
    int why = errno;
    if (why == EINTR) return TEMP_AGAIN;
    if (why == EWOULDBLOCK) {
        fail(err, 0, "%s: another process is writing it", path);
        return TEMP_TAKEN;
    }
    if (is_new) return temp_is_at(fd, path) ? 0 : TEMP_AGAIN; /* safe without a lock, see k3_temp.h */
    return fail(err, K3_EIO,
                "%s: was left by another process, or is being written: this place has no locks "
                "to tell (%s); remove it if nobody writes it",
                path, strerror(why));
}

int k3_temp_open(const char *path, unsigned mode, int *fd, k3_error *err) {
    for (int i = 0; i < TEMP_TRIES; i++) {
        *fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, (mode_t)mode);
        bool is_new = *fd >= 0;
        if (*fd < 0 && errno == EEXIST) {
            *fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
            if (*fd < 0 && errno == ENOENT) continue; /* its owner renamed it meanwhile */
            if (*fd < 0)
                return fail(err, K3_EIO, "%s: is in the way: %s; move it, or name another place",
                            path, errno == ELOOP ? "it is a link" : strerror(errno));
        }
        if (*fd < 0) return fail(err, K3_EIO, "%s: %s", path, strerror(errno));
        int rc = temp_take(*fd, path, mode, is_new, err);
        if (rc == 0) return 0;
        close(*fd);
        *fd = -1;
        if (rc != TEMP_AGAIN) return rc;
    }
    return fail(err, K3_EIO, "%s: comes and goes", path);
}

int k3_temp_rename(int fd, const char *temp, const char *path, k3_error *err) {
    if (!temp_is_at(fd, temp))
        return fail(err, K3_EIO, "%s: was replaced or removed while it was written", temp);
    return rename(temp, path) == 0 ? 0
                                   : fail(err, K3_EIO, "%s: rename: %s", path, strerror(errno));
}

void k3_temp_sweep(const char *path) {
    struct stat st;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
        flock(fd, LOCK_EX | LOCK_NB) == 0 && temp_is_at(fd, path))
        unlink(path);
    close(fd);
}
