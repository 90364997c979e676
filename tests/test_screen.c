/* test_screen.c - an answer with notes in the middle of its words; tests/test_screen.py looks at the terminal. */
#include "cli/screen.h"

#include <stdio.h>

int main(void) {
    screen_write("The capi", 8);
    screen_note("first");
    screen_note("second");
    screen_write("tal of", 6);
    screen_write(" France\n", 8);
    screen_note("at once");
    screen_write("is Par", 6);
    screen_release();
    fputs("k3: an error\n", stderr);
    screen_write("is.\n", 4);
    return 0;
}
