/* tokenize.c - `k3 tokenize`: text to ids and back.
 *
 * One line for each id: the id, a tab, its bytes. What is not printable UTF-8 is escaped as
 * in C, so that a line is a line. --decode goes the other way and is byte exact.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/inputs.h"
#include "cli/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static int tokenize_decode(k3_tokenizer *t, const id_list *ids) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t n = 0;
        const char *bytes = k3_id_bytes(t, ids->id[i], &n);
        if (!bytes)
            return fail(FAIL_USAGE, "--ids: number %zu, %u, stands for no text in this model",
                        i + 1, (unsigned)ids->id[i]);
        fwrite(bytes, 1, n, stdout);
    }
    return DONE;
}

static void tokenize_list(k3_tokenizer *t, const id_list *ids, bool ids_only) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t n = 0;
        printf(ids_only && i ? ",%u" : "%u", (unsigned)ids->id[i]);
        if (ids_only) continue;
        const char *bytes = k3_id_bytes(t, ids->id[i], &n);
        putchar('\t');
        if (bytes) put_escaped(bytes, n);
        putchar('\n');
    }
    if (ids_only) putchar('\n');
}

int cmd_tokenize(const cli_args *a) {
    blob text = {NULL, 0};
    id_list ids = {NULL, 0};
    k3_tokenizer *t = NULL;
    const char *dir;
    k3_error err = {{0}};
    if (a->prompt.decode && !a->prompt.ids)
        return fail(FAIL_USAGE, "tokenize --decode needs --ids N,N,...");
    int rc = prompt_check(a, "tokenize");
    if (rc == DONE) rc = prompt_read(a, &text, SIZE_MAX, &ids, "tokenize");
    if (rc == DONE) rc = model_find(a, &dir);
    if (rc != DONE) goto done;
    int status = k3_tokenizer_open(&t, dir, &err);
    rc = status < 0 ? fail_status(status, &err) : DONE;
    if (rc == DONE && !a->prompt.ids) rc = ids_encode(&ids, t, text.p, text.n, a->prompt.control);
    if (rc != DONE) goto done;
    if (a->prompt.decode)
        rc = tokenize_decode(t, &ids);
    else
        tokenize_list(t, &ids, a->ids_only);
    if (fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && !a->quiet && !a->prompt.decode) say("%zu ids", ids.n);
done:
    k3_tokenizer_close(t);
    free(text.p);
    free(ids.id);
    return rc;
}
