/* k3_text.h - text to ids and back, with or without an engine. k3.h includes it, and its conventions
 * hold here.
 */
#ifndef K3_TEXT_H
#define K3_TEXT_H

#include "k3.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Text (K3-SPEC 4.1-4.3) ----------------------------------------------------- */

typedef struct k3_tokenizer k3_tokenizer;

/* Read tiktoken.model and, where there is one, the special names of tokenizer_config.json; without one
 * specials have the built-in names of K3, after the last rank. */
int k3_tokenizer_open(k3_tokenizer **out, const char *model_dir, k3_error *err);
void k3_tokenizer_close(k3_tokenizer *t);
uint32_t k3_tokenizer_size(const k3_tokenizer *t); /* ranks plus specials */

typedef enum {
    K3_TEXT,   /* special spellings are ordinary bytes    */
    K3_CONTROL /* special spellings become their ids      */
} k3_text_mode;

/* Encode any bytes; invalid UTF-8 is encoded byte by byte. One thread at a time for each tokenizer.
 * Returns the number of ids and writes at most `cap` of them: call with cap 0 to size a buffer, or pass
 * one id per byte, which always suffices. */
int64_t k3_encode(k3_tokenizer *t, const char *text, size_t n_bytes, k3_text_mode mode,
                  uint32_t *ids, size_t cap, k3_error *err);

/* The bytes of one id, borrowed from the tokenizer; NULL when the id has none.
 * Specials give their name. */
const char *k3_id_bytes(const k3_tokenizer *t, uint32_t id, size_t *n_bytes);
bool k3_id_is_special(const k3_tokenizer *t, uint32_t id);

/* Streaming decode that never emits half a UTF-8 sequence: feed it a token's bytes,
 * get what is complete; invalid bytes become U+FFFD. Returns bytes written to `out`,
 * which must hold 3 * (n_bytes + 3). At the end call with n_bytes 0 to flush. */
typedef struct {
    uint8_t held[4];
    uint8_t n_held;
} k3_utf8;
size_t k3_utf8_push(k3_utf8 *u, const char *bytes, size_t n_bytes, char *out);

#ifdef __cplusplus
}
#endif
#endif
