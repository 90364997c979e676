/* screen.h - one terminal for the answer (stdout) and for messages (stderr): who may write when.
 *
 * While an answer streams to a terminal that stderr writes to as well, a message in between would cut a
 * word in two. A note therefore waits until a word of the answer ends; an error does not wait, but begins
 * a line of its own. The status of a slow token stands on the row below the answer and is wiped before the
 * answer goes on. When stdout and stderr are not both terminals, nothing waits.
 *
 * One thread uses these functions: the one that writes the answer.
 */
#ifndef K3_SCREEN_H
#define K3_SCREEN_H

#include <stdbool.h>
#include <stddef.h>

/* Write n bytes of the answer to stdout at once, held notes before them or where the first of their words
 * ends. Returns 0 or an errno. */
int screen_write(const char *p, size_t n);

/* Show a note, now or when the present word of the answer ends. At most SCREEN_HELD notes wait; the rest
 * are counted. */
#define SCREEN_HELD 16
void screen_note(const char *line);

/* Before anything is written to stderr: print what is held, and leave the answer's line. */
void screen_release(void);

/* Columns of stderr's terminal as it is now, so that a window that was resized counts; 80 where the
 * terminal does not say. */
size_t screen_columns(void);

/* Draw one line of progress in place, cut to the width. `is_below`: on the row below the answer, whose
 * cursor comes back to where it was; false, and nothing drawn, where the terminal cannot do that. */
bool screen_draw(const char *line, bool is_below);
void screen_wipe(bool is_below);

#endif
