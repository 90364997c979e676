/* fuzz_index.c - model.safetensors.index.json from memory, for libFuzzer or a replay of
 * tests/corpus/index. Shard names that come out are plain file names. Includes k3.c; do not
 * link it.
 */
#include "../k3.c"

#include "../k3_model.c"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_shards(const model *m) {
    for (uint32_t i = 0; i < m->n_shards; i++) {
        const shard *s = &m->shards[i];
        must(s->fd[0] == -1 && s->name[0] && s->name[0] != '.' && !strchr(s->name, '/'), "a shard's name");
        must(shard_find(m, s->name) == (int)i, "a shard twice");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    k3_error err = {""};
    ledger mem = {.limit = 1u << 20};
    model m = {.dir = "fuzz", .mem = &mem};
    uint8_t *copy = malloc(size + 1);
    FILE *f = copy && size ? fmemopen(copy, size, "r") : NULL;
    if (f) {
        memcpy(copy, data, size);
        int rc = index_scan(&m, f, &err);
        if (rc == 0)
            check_shards(&m);
        else
            must_be_line(err.text);
        must(rc == 0 || rc == K3_EMODEL, "a refusal that is no K3_EMODEL");
        fclose(f);
    }
    model_close(&m);
    free(copy);
    return 0;
}
