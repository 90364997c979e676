/* options.c - the parser of command lines (options.h). */
#include "cli/options.h"

#include "cli/console.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const option_row *option_find(const option_table *t, const char *name, size_t n, unsigned who) {
    for (size_t i = 0; i < t->n; i++)
        if ((t->row[i].who & who) && strlen(t->row[i].name) == n &&
            memcmp(t->row[i].name, name, n) == 0)
            return &t->row[i];
    return NULL;
}

/* ---- Values ---- */

static bool parse_hash(const char *text, uint64_t *out) {
    if (text[0] == '0' && text[1] == 'x') text += 2;
    if (strlen(text) != 16 || strspn(text, "0123456789abcdefABCDEF") != 16) return false;
    *out = strtoull(text, NULL, 16);
    return true;
}

/* An integer of the field's size; that it fits is the table's promise. */
static void option_store(const option_row *o, void *field, uint64_t value) {
    uint32_t low = (uint32_t)value;
    if (o->n_bytes == sizeof low)
        memcpy(field, &low, sizeof low);
    else
        memcpy(field, &value, sizeof value);
}

static int option_set_count(const option_row *o, void *field, const char *text) {
    uint64_t value;
    if (!parse_u64(text, strlen(text), &value) || value < o->lo || value > o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a whole number from %llu to %llu", o->name, text,
                    (unsigned long long)o->lo, (unsigned long long)o->hi);
    option_store(o, field, value);
    return DONE;
}

static int option_set_real(const option_row *o, void *field, const char *text) {
    double value;
    char *end;
    if (!parse_real(text, &end, &value) || *end || value < (double)o->lo || value > (double)o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a number from %llu to %llu", o->name, text,
                    (unsigned long long)o->lo, (unsigned long long)o->hi);
    float single = (float)value;
    memcpy(field, &single, sizeof single);
    return DONE;
}

/* One of the words of `value`: their order is that of the enum. */
static int option_set_choice(const option_row *o, void *field, const char *text) {
    uint64_t i = 0;
    for (const char *word = o->value;; word++, i++) {
        size_t n = strcspn(word, "|");
        if (strlen(text) == n && memcmp(word, text, n) == 0) break;
        word += n;
        if (!*word) return fail(FAIL_USAGE, "%s: '%s' is not %s", o->name, text, o->value);
    }
    option_store(o, field, i);
    return DONE;
}

static int option_set_part(const option_row *o, void *field, const char *text) {
    uint64_t n;
    if (strncmp(text, "1/", 2) != 0 || !parse_u64(text + 2, strlen(text + 2), &n) || n < o->lo ||
        n > o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a part such as 1/100", o->name, text);
    option_store(o, field, n);
    return DONE;
}

/* One more text of a list. */
static int option_add(const option_row *o, text_list *list, const char *text) {
    static const struct {
        const char *empty, *noun;
    } SAYS[] = {[KIND_STOPS] = {"an empty text would stop at once", "texts"},
                [KIND_DIRS] = {"an empty name is no directory", "directories"},
                [KIND_BOXES] = {"an empty text is no address", "boxes"}};
    if (!text[0]) return fail(FAIL_USAGE, "%s: %s", o->name, SAYS[o->kind].empty);
    if (list->n == o->hi)
        return fail(FAIL_USAGE, "%s: at most %d %s", o->name, (int)o->hi, SAYS[o->kind].noun);
    list->text[list->n++] = text;
    return DONE;
}

/* Store one value, checked. */
static int option_set(const option_table *t, const option_row *o, void *values, const char *text) {
    void *field = (char *)values + o->at;
    switch (o->kind) {
    case KIND_FLAG: *(bool *)field = true; return DONE;
    case KIND_TEXT:
    case KIND_READ:
    case KIND_WRITE:
    case KIND_OPTIONAL: *(const char **)field = text; return DONE;
    case KIND_STOPS:
    case KIND_DIRS:
    case KIND_BOXES: return option_add(o, field, text);
    case KIND_PART: return option_set_part(o, field, text);
    case KIND_CHOICE: return option_set_choice(o, field, text);
    case KIND_COUNT: return option_set_count(o, field, text);
    case KIND_REAL: return option_set_real(o, field, text);
    case KIND_SIZE:
        if (parse_size(text, field) && *(uint64_t *)field >= o->lo)
            return t->check_size ? t->check_size(o, text, *(uint64_t *)field) : DONE;
        return fail(FAIL_USAGE, "%s: '%s' is not a size such as 8G, 512M or 1.5GiB", o->name, text);
    case KIND_HASH:
        if (parse_hash(text, field)) return DONE;
        return fail(FAIL_USAGE, "%s: '%s' is not a hash of 16 hex digits", o->name, text);
    }
    return DONE;
}

/* ---- Words ---- */

/* Letters to insert, drop, change or swap until `a` is `b` (at most 31 letters each). */
static size_t edit_distance(const char *a, const char *b) {
    size_t n = strlen(a), m = strlen(b), row[3][32];
    if (n > 31 || m > 31) return 99;
    for (size_t j = 0; j <= m; j++) row[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *now = row[i % 3], *up = row[(i + 2) % 3], *upper = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = up[j - 1] + (a[i - 1] != b[j - 1]);
            if (up[j] + 1 < best) best = up[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                upper[j - 2] + 1 < best)
                best = upper[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

void nearest(const char *typed, const char *name, const char **best, size_t *distance) {
    size_t n = strlen(typed), d = edit_distance(typed, name);
    if (n >= 4 && strncmp(typed, name, n) == 0) d = 0; /* cut short */
    if (d < *distance && d * 2 < strlen(name + strspn(name, "-"))) {
        *distance = d;
        *best = name;
    }
}

static int fail_unknown_option(const option_table *t, const option_taker *taker, const char *arg,
                               size_t n_name) {
    char typed[32];
    const char *best = NULL;
    size_t distance = 4;
    snprintf(typed, sizeof typed, "%.*s", (int)(n_name < 31 ? n_name : 31), arg);
    for (size_t i = 0; i < t->n; i++)
        if (t->row[i].who & taker->bit) nearest(typed, t->row[i].name, &best, &distance);
    if (best)
        return fail(FAIL_USAGE, "%s: unknown option %.*s: did you mean %s?", taker->name,
                    (int)n_name, arg, best);
    const char *why = option_find(t, arg, n_name, t->any) ? "does not take" : "has no option";
    return fail(FAIL_USAGE, "%s %s %.*s: see `k3 help %s`", taker->name, why, (int)n_name, arg,
                taker->name);
}

/* One option with its value; *i moves past a value that was the next word. */
static int option_take(const option_table *t, const option_taker *taker, option_words *words,
                       void *values, int argc, char **argv, int *i) {
    const char *arg = argv[*i], *equals = arg[1] == '-' ? strchr(arg, '=') : NULL;
    size_t n_name = equals ? (size_t)(equals - arg) : strlen(arg);
    const option_row *o = option_find(t, arg, n_name, taker->bit);
    if (!o) return fail_unknown_option(t, taker, arg, n_name);
    const char *value = equals ? equals + 1 : NULL;
    if (o->kind == KIND_FLAG && value)
        return fail(FAIL_USAGE, "%s takes no value, '%s' was given", o->name, value);
    if (o->kind == KIND_OPTIONAL && !value) value = "";
    if (o->kind != KIND_FLAG && !value) {
        if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0)
            return fail(FAIL_USAGE,
                        "%s needs a value: %s %s (one that starts with -- goes in %s=...)", o->name,
                        o->name, o->value, o->name);
        value = argv[++*i];
    }
    words->given[o - t->row] = true;
    return option_set(t, o, values, value);
}

/* A word that is no option. */
static int word_take(const option_taker *taker, option_words *words, const char *word) {
    const char *name = taker->name, *takes = taker->arg;
    if (!takes) return fail(FAIL_USAGE, "%s takes no argument, '%s' was given", name, word);
    if (!words->arg) {
        words->arg = word;
    } else if (!words->arg2 && strchr(takes, ' ')) {
        words->arg2 = word;
    } else if (words->arg2) {
        return fail(FAIL_USAGE, "%s takes %s; '%s' is one more", name, takes, word);
    } else {
        return fail(FAIL_USAGE, "%s takes one %s; '%s' is a second one: quote the text", name,
                    takes, word);
    }
    return DONE;
}

int options_parse(const option_table *t, const option_taker *taker, option_words *words,
                  void *values, int argc, char **argv, bool *wants_help) {
    bool is_over = false;
    int rc = DONE;
    for (size_t i = 0; i < t->n; i++)
        if ((t->row[i].who & taker->bit) && t->row[i].start)
            option_set(t, &t->row[i], values, t->row[i].start);
    for (int i = 0; i < argc && rc == DONE; i++) {
        const char *arg = argv[i];
        if (!is_over && strcmp(arg, "--") == 0) {
            is_over = true;
        } else if (!is_over && (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0)) {
            *wants_help = true;
            return DONE;
        } else if (!is_over && arg[0] == '-' && arg[1]) {
            rc = option_take(t, taker, words, values, argc, argv, &i);
        } else {
            rc = word_take(taker, words, arg);
        }
    }
    return rc;
}
