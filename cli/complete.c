/* complete.c - see complete.h. */
#include "cli/complete.h"

#include <glob.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Bytes that all words share, no half character at the end. */
static size_t shared_bytes(char *const *word, size_t n) {
    size_t most = n ? strlen(word[0]) : 0;
    for (size_t i = 1; i < n; i++) {
        size_t same = 0;
        while (same < most && word[i][same] == word[0][same]) same++;
        most = same;
    }
    while (most > 0 && ((unsigned char)word[0][most] & 0xc0) == 0x80) most--;
    return most;
}

static bool completion_push(completion *c, const char *word) {
    char **grown = realloc(c->word, (c->n + 1) * sizeof *grown);
    if (!grown) return false;
    c->word = grown;
    c->word[c->n] = strdup(word);
    if (!c->word[c->n]) return false;
    c->n++;
    return true;
}

/* The text to add, once all words that fit are there. `n_typed`: bytes of them that are typed. */
static completion completion_end(completion c, bool ok, size_t n_typed, const char *behind) {
    size_t n = shared_bytes(c.word, c.n), n_behind = c.n == 1 ? strlen(behind) : 0;
    size_t n_add = n > n_typed ? n - n_typed : 0;
    c.add = ok ? malloc(n_add + n_behind + 1) : NULL;
    if (!c.add) {
        completion_free(&c);
        return c;
    }
    if (n_add) memcpy(c.add, c.word[0] + n_typed, n_add);
    memcpy(c.add + n_add, behind, n_behind);
    c.add[n_add + n_behind] = '\0';
    return c;
}

completion complete_word(const char *typed, const char *const *list) {
    completion c = {NULL, NULL, 0};
    size_t n_typed = strlen(typed);
    bool ok = true;
    for (size_t i = 0; list[i] && ok; i++)
        if (strncmp(list[i], typed, n_typed) == 0) ok = completion_push(&c, list[i]);
    return completion_end(c, ok, n_typed, " ");
}

/* `typed` as a pattern in which only a * at the end is one. */
static char *path_pattern(const char *typed) {
    size_t n = 0;
    char *pattern = malloc(2 * strlen(typed) + 2);
    if (!pattern) return NULL;
    for (const char *p = typed; *p; p++) {
        if (strchr("*?[]\\", *p) || (p == typed && *p == '~' && p[1] != '/')) pattern[n++] = '\\';
        pattern[n++] = *p;
    }
    pattern[n++] = '*';
    pattern[n] = '\0';
    return pattern;
}

completion complete_path(const char *typed) {
    completion c = {NULL, NULL, 0};
    const char *slash = strrchr(typed, '/'), *name = slash ? slash + 1 : typed;
    char *pattern = path_pattern(typed);
    glob_t found;
    bool ok = pattern != NULL;
    int rc = ok ? glob(pattern, GLOB_TILDE | GLOB_MARK, NULL, &found) : GLOB_NOSPACE;
    free(pattern);
    for (size_t i = 0; rc == 0 && ok && i < found.gl_pathc; i++) {
        const char *path = found.gl_pathv[i], *last = path + strlen(path);
        while (last > path && (last[-1] != '/' || !last[0])) last--; /* the / of GLOB_MARK stays */
        ok = completion_push(&c, last);
    }
    if (rc == 0) globfree(&found);
    return completion_end(c, ok && (rc == 0 || rc == GLOB_NOMATCH), strlen(name), "");
}

void completion_free(completion *c) {
    for (size_t i = 0; i < c->n; i++) free(c->word[i]);
    free(c->word);
    free(c->add);
    *c = (completion){NULL, NULL, 0};
}
