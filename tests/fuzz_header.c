/* fuzz_header.c - a shard's header, for libFuzzer or a replay of tests/corpus/header.
 *
 * The input is the JSON text of a header, put into a file of the right length with 4 MiB of data
 * behind it; when it begins with '!', what follows is the file itself, length field and all. The
 * shape is demo's: run from the top of the source tree. What is accepted must lie inside the file;
 * the same header in a second shard must then be refused. Includes k3.c; do not link it.
 */
#include "../k3.c"

#include "../k3_model.c"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define DATA_BYTES (4u << 20)

static k3_shape sh;
static k3_options opt;
static ledger mem = {.limit = 64u << 20};
static model m;
static uint64_t n_notes, n_places;

static void note_check(void *user, const char *line) {
    (void)user;
    must_be_line(line);
    must(++n_notes <= 8, "too many notes");
}

static void setup(void) {
    k3_error err = {""};
    FILE *f = tmpfile();
    must(f && shape_read(&sh, "demo", 1e-6f, &err) == 0, "demo/config.json");
    opt.note = note_check;
    m.dir = "fuzz";
    m.opt = &opt;
    m.mem = &mem;
    m.at_bytes = sh.n_layers * sizeof *m.at;
    m.experts_bytes = (uint64_t)(sh.n_layers - sh.n_dense) * sh.n_experts * sizeof *m.experts;
    m.at = ledger_take(&mem, m.at_bytes, "table", &err);
    m.experts = ledger_take(&mem, m.experts_bytes, "table", &err);
    must(m.at && m.experts && shard_add(&m, "one", &err) == 0 && shard_add(&m, "two", &err) == 1, "memory");
    m.shards[0].fd[0] = m.shards[1].fd[0] = fileno(f); /* kept open: `f` owns the descriptor */
    shape_dims(&sh, m.dims);
}

/* A place that was taken must lie in the file, behind the header. */
static int place_check(void *user, const name_id *id) {
    uint64_t size = *(uint64_t *)user, n, offset;
    uint16_t i_shard;
    if (id->expert_tensor >= 0) {
        const expert_place *e = model_expert(&m, &sh, id->il, id->ie);
        i_shard = e->shard[id->expert_tensor];
        offset = e->offset[id->expert_tensor];
        n = expert_tensor_bytes(&sh, id->expert_tensor);
    } else {
        const place *p = model_place(&m, id);
        i_shard = p->shard;
        offset = p->offset;
        n = tensor_bytes(m.dims, id->tensor);
    }
    if (i_shard == NO_SHARD) return 0;
    n_places++;
    must(i_shard == 0 && offset >= 8 && offset <= size && n <= size - offset, "a place outside the file");
    return 0;
}

/* Write the file that this input describes. Returns its size. */
static uint64_t file_write(const uint8_t *data, size_t size) {
    int fd = m.shards[0].fd[0];
    uint8_t len[8];
    bool is_raw = size > 0 && data[0] == '!';
    uint64_t all = is_raw ? size - 1 : 8 + size + DATA_BYTES;
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)((uint64_t)size >> 8 * i);
    must(ftruncate(fd, 0) == 0 && ftruncate(fd, (off_t)all) == 0, "ftruncate");
    if (is_raw)
        must(pwrite(fd, data + 1, size - 1, 0) == (ssize_t)size - 1, "pwrite");
    else
        must(pwrite(fd, len, 8, 0) == 8 && pwrite(fd, data, size, 8) == (ssize_t)size, "pwrite");
    return all;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    k3_error err = {""};
    if (!m.at) setup();
    uint64_t all = file_write(data, size);
    memset(m.at_model, 0xff, sizeof m.at_model);
    memset(m.at, 0xff, m.at_bytes);
    memset(m.experts, 0xff, m.experts_bytes);
    m.n_unknown = n_notes = n_places = 0;
    m.shards[0].size = m.shards[1].size = all;
    int rc = header_read(&m, &sh, 0, &err);
    if (rc < 0) {
        must(rc == K3_EMODEL, "a refusal that is no K3_EMODEL");
        must_be_line(err.text);
        return 0;
    }
    model_expect(&sh, place_check, &all);
    rc = header_read(&m, &sh, 1, &err);
    must(n_places > 0 ? rc == K3_EMODEL : rc == 0, "the same tensors in a second shard");
    return 0;
}
