/* reader.h - the yardstick of `--reader`: files read at random in blocks, past the page cache, by a program
 * that does nothing else.
 */
#ifndef K3_CLI_READER_H
#define K3_CLI_READER_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int *fd;
    uint64_t *n_block; /* blocks of each file */
    size_t n_file, block;
    uint64_t n_all;
    int best_depth;
    double before, after; /* bytes per second */
} reader;

/* All shards of `dir`, for blocks of `block` bytes. An exit code; reader_close() in any case. */
int reader_open(reader *r, const char *dir, uint64_t block);
void reader_close(reader *r);

/* The best depth and its speed, with blocks of at most `ram` bytes in flight (0: any). An exit code. */
int reader_find(reader *r, uint64_t ram);

/* Bytes per second at this depth, 0 when a read fails. */
double reader_measure(const reader *r, int depth);

#endif
