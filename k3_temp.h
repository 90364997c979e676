/* k3_temp.h - a file while it is being written, for both programs.
 *
 * It has a name of its own beside its final one, and its writer holds a lock (flock) on it, which the
 * system drops with the process. Who can take the lock of such a file knows that its writer is gone, and
 * may go on with the file. No process number is believed.
 *
 * The place may be a directory that others write to as well. So a file that is there already is taken
 * over only when nobody else can have put it there or look into it: it is a regular file, with one name,
 * of this user, with no more rights for others than it would be made with. No link is followed.
 *
 * Some file systems have no locks (ENOLCK, EOPNOTSUPP, ...). A file that was made by this very call is
 * safe without: whoever comes later finds it, cannot lock it either, and leaves it alone. A file that was
 * found is left alone then: nobody can say whether its writer is gone.
 */
#ifndef K3_TEMP_H
#define K3_TEMP_H

#include "k3.h"

#define K3_TEMP_PRIVATE 0600u /* states: conversations           */
#define K3_TEMP_PUBLIC  0644u /* sums, slices: copies of weights */

/* Make or take over `path` (its writer is gone) for reading and writing, with what is in it.
 * Returns 0: *fd, locked, or made just now where there are no locks; 1: another process is writing it,
 *         *fd is -1 and err says so
 * Errors  K3_EIO: what is there is not to be taken over, or the system's reason; nothing was changed */
int k3_temp_open(const char *path, unsigned mode, int *fd, k3_error *err);

/* Give the file its name. `fd` stays open. Errors  K3_EIO: also when somebody replaced it meanwhile */
int k3_temp_rename(int fd, const char *temp, const char *path, k3_error *err);

/* Remove `path` if its writer is gone. Where that cannot be known it stays. */
void k3_temp_sweep(const char *path);

#endif
