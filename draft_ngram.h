/* draft_ngram.h - drafts copied from the text itself: what followed the last time that the text ended like this.
 *
 * No weights. A draft only proposes ids; the model's own draw decides which of them become text, so nothing here can
 * change what is printed. Memory is the caller's and its size is known beforehand.
 */
#ifndef K3_DRAFT_NGRAM_H
#define K3_DRAFT_NGRAM_H

#include <stddef.h>
#include <stdint.h>

enum {
    NGRAM_LEAST = 5, /* ids that must match, if the last two occurrences agree on what follows */
    NGRAM_SURE = 8,  /* ids that must match otherwise                                          */
    NGRAM_MOST = 16  /* ids proposed at once                                                   */
};

typedef struct {
    uint32_t *id;    /* [cap] the text                                                         */
    uint32_t *prev;  /* [cap] the occurrence before of the NGRAM_LEAST ids that end here, + 1  */
    uint32_t *last;  /* [n_table] their last occurrence, + 1; 0: none                          */
    size_t n, cap, n_table, n_indexed;
} draft_ngram;

/* Bytes for a text of at most `cap` ids. */
size_t draft_ngram_bytes(size_t cap);

/* mem: draft_ngram_bytes(cap) bytes, 8-aligned. The text is empty. */
void draft_ngram_init(draft_ngram *g, void *mem, size_t cap);

/* The text is now ids[0, n), n <= cap. What it shares with the text before is not indexed again. */
void draft_ngram_sync(draft_ngram *g, const uint32_t *ids, size_t n);

/* One more id at its end. */
void draft_ngram_add(draft_ngram *g, uint32_t id);

/* Propose what follows the text: at most `most` ids to out. *match: how many ids at its end were found again.
 * Returns how many ids were proposed; 0: none. */
size_t draft_ngram_propose(const draft_ngram *g, uint32_t *out, size_t most, size_t *match);

#endif
