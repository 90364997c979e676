/* complete.h - what Tab adds to a word of a line that is being typed. */
#ifndef K3_COMPLETE_H
#define K3_COMPLETE_H

#include <stddef.h>

typedef struct {
    char *add;   /* text to insert behind the word: what all that fit go on with; "": nothing */
    char **word; /* all that fit, whole                                                        */
    size_t n;
} completion;

/* Words of the NULL-ended list that begin with `typed`; one alone gets a blank behind it.
 * Returns a completion with n 0 when none fits, or when there is no memory. */
completion complete_word(const char *typed, const char *const *list);

/* Names of files that begin with `typed`; ~/ is the user's directory. A directory gets a / and no
 * blank, a file that is alone nothing: a name may have blanks, and ends with the line. Names that
 * begin with a dot are found when the dot is typed. */
completion complete_path(const char *typed);

void completion_free(completion *c);

#endif
