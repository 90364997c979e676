/* k3_line.h - text from elsewhere, made fit for one line of a terminal. */
#ifndef K3_LINE_H
#define K3_LINE_H

#include <stddef.h>

/* Bytes of the character at p, 1 to 4, as UTF-8 has it in its shortest form; 0: none begins here. The
 * text ends with a zero, so nothing behind it is read. */
static inline size_t utf8_length(const unsigned char *p) {
    size_t n = *p < 0x80 ? 1 : *p < 0xc2 ? 0 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : *p < 0xf5 ? 4 : 0;
    for (size_t i = 1; i < n; i++)
        if (p[i] < 0x80 || p[i] > 0xbf) return 0;
    if ((*p == 0xe0 && p[1] < 0xa0) || (*p == 0xf0 && p[1] < 0x90)) return 0;
    return n;
}

/* Control characters move a terminal's cursor: U+0000 to U+001F, U+007F, and U+0080 to U+009F, which a
 * terminal of another encoding also takes as single bytes. They become '?', and what is no UTF-8 as well. */
static inline void one_line(char *s) {
    for (unsigned char *p = (unsigned char *)s; *p;) {
        size_t n = utf8_length(p);
        if (n == 0 || *p < 0x20 || *p == 0x7f || (*p == 0xc2 && p[1] < 0xa0))
            *p++ = '?';
        else
            p += n;
    }
}

#endif
