/* place.h - where the files lie that k3 brings along: the bundled model and the released config. */
#ifndef K3_PLACE_H
#define K3_PLACE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    PLACE_DEMO,    /* the bundled model                                        */
    PLACE_RELEASED /* config.json of the released weights, and no weights      */
} place_kind;

/* The directory, with a config.json, into `path`. An installed program looks beside itself
 * (BIN/../share/k3), then under the PREFIX it was built for; one that lies where it was built looks in the
 * source tree. False: in none of them, and `path` names the place that was tried first. */
bool place_find(place_kind kind, char *path, size_t cap);

/* "k3 0.1.0 (k3-f32-dot16-q40), commit 0123456789ab"; without the commit where the source tree was no git
 * checkout when it was built. */
const char *version_text(void);
const char *version_commit(void); /* "" where it is not known */

#endif
