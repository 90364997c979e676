/* fuzz_tier.c - frames from strangers, for libFuzzer or a replay of tests/corpus/tier.
 *
 * The first byte says who is attacked, and how:
 *
 *   bit 0   0: a server, 1: a client
 *   bit 1   1: frames are sealed here, so that mutations reach what lies behind the checksum;
 *           0: bytes go as they are
 *   bit 2   the server knows the sender as a client
 *   bit 3   the server knows the sender as one who stages
 *   bit 4   the server has no model
 *   bit 5   the server has keys for asking and staging, which the sender does not know
 *
 * Sealed input is a row of frames: u8 type, u16 length, u8 id, payload. The model is demo's: run
 * from the top of the source tree. Whatever comes, the server must go on serving and the client
 * must leave its sums within their range. Includes both ends; link k3.c.
 */
#define TIER_SERVER_TEST
#include "../tier_server.c"
#include "../tier_client.c"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { ROOM = 1 << 20, ROWS = 4 };

static server sv, empty;
static uint8_t stream[ROOM], block[1 << 22];
static int64_t sums[TIER_MAX_ROWS * 256];

static void setup(void) {
    is_quiet = true;
    sv.o = (options){.model_dir = "demo", .ram = 1u << 30, .clients = 2, .threads = 1};
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    must(model_open(&sv) == DONE && memory_open(&sv) == DONE, "demo");
    sv.st.is_filling = true;
    sv.wake_fd = -1;
    size_t i;
    int32_t i_slot;
    for (int n = 0; n < 64 && warm_next(&sv, &i, &i_slot); n++) {
        expert_view x;
        k3_error err;
        int rc = k3_expert_read(sv.e, sv.m.n_dense + (uint32_t)(i / sv.m.n_experts),
                                (uint32_t)(i % sv.m.n_experts),
                                sv.st.bytes + (uint64_t)i_slot * sv.st.slot_bytes, &x, &err);
        must(rc == 0, "an expert of demo");
        warm_done(&sv, i, i_slot, rc, &x);
    }
    for (uint32_t ie = sv.m.n_experts / 2; ie < sv.m.n_experts; ie++) /* these can only be staged */
        sv.st.heat[index_of(&sv, sv.m.n_layers - 1, ie)] = -1.0f;
    for (int use = 0; use < N_KEY_USES; use++) {
        sv.key[use][0].n = TIER_MIN_KEY;
        memset(sv.key[use][0].bytes, 'k' + use, TIER_MIN_KEY);
    }
}

/* Write the stream of bytes that the input stands for. Returns how many. */
static size_t stream_make(const uint8_t *p, size_t n, bool is_sealed) {
    size_t at = 0;
    if (!is_sealed) {
        memcpy(stream, p, n < ROOM ? n : ROOM);
        return n < ROOM ? n : ROOM;
    }
    while (n >= 4) {
        size_t len = tier_get16(p + 1);
        if (len > n - 4) len = n - 4;
        if (at + TIER_HEAD_BYTES + len > ROOM) break;
        memcpy(stream + at + TIER_HEAD_BYTES, p + 4, len);
        at += tier_seal(stream + at, (enum tier_type)p[0], p[3], (uint32_t)len);
        p += 4 + len;
        n -= 4 + len;
    }
    return at;
}

/* Write to the socket as much as it takes, and throw away what comes back. */
static size_t push(int fd, const uint8_t *p, size_t n) {
    static uint8_t away[65536];
    ssize_t put = n > 0 ? send(fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    while (recv(fd, away, sizeof away, MSG_DONTWAIT) > 0) {
    }
    return put > 0 ? (size_t)put : 0;
}

/* Check the store at rest: no expert is on its way; every slot is held or free, and unpinned. */
static void check_store(const server *s) {
    for (size_t i = 0; i < (size_t)s->n_moe * s->m.n_experts; i++)
        must(!s->st.is_coming[i], "an expert still on its way");
    must(s->st.n_free + s->st.n_held == s->st.n_slots, "a slot lost");
    for (uint32_t i = 0; i < s->st.n_slots; i++) must(s->st.slots[i].pins == 0, "a pin was left");
    for (size_t i = 0; i < (size_t)s->n_moe * s->m.n_experts; i++)
        must(s->st.heat[i] < 0 || s->st.slot_of[i] == NONE ||
                 !s->st.slots[s->st.slot_of[i]].is_kept,
             "an expert was taken that can be read here");
}

static void attack_server(server *s, size_t n, int role, bool has_keys) {
    int fds[2];
    conn *c = &s->conns[0];
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "socketpair");
    must(conn_room(c, TIER_HEAD_BYTES + 2 * TIER_MAX_EARLY, 4096), "memory");
    c->fd = fds[0];
    c->state = C_HELLO;
    c->since_ns = clock_ns();
    s->o.n_keys[KEY_ASKS] = s->o.n_keys[KEY_STAGES] = has_keys;
    if (role >= 0) {
        uint8_t nonce[TIER_NONCE_BYTES] = {0}, hello[TIER_HELLO_BYTES];
        tier_hello_pack(hello, &s->m, (uint8_t)role, nonce);
        must(conn_hello(s, c, hello, sizeof hello), "a good hello");
        must(c->state == (role == TIER_ASKS ? C_UP : C_STAGE), "a good hello");
    }
    for (size_t at = 0, idle = 0; c->state != C_FREE && idle < 3; idle++) {
        size_t put = push(fds[1], stream + at, n - at);
        at += put;
        if (put > 0) idle = 0;
        if (!c->has_frame && c->n_out == 0 && c->state != C_CLOSING && !conn_fill(s, c)) break;
        must(!has_keys || (c->state != C_UP && c->state != C_STATUS && c->state != C_STAGE),
             "let in without a key");
        for (int k = 0; k < 64 && c->state != C_FREE && c->has_frame && c->n_out == 0; k++)
            if (!conn_act(s, c) || !conn_look(s, c)) break;
        if (c->state != C_FREE && c->n_out > 0) conn_flush(s, c);
    }
    if (c->state != C_FREE) conn_close(s, c, NULL);
    close(fds[1]);
    must(s->n_clients == 0 && s->n_stagers == 0, "a client too many or too few");
    check_store(s);
}

/* Attack a server without a model, a new one each time. */
static void attack_empty(size_t n) {
    memset(&empty, 0, sizeof empty);
    empty.o = (options){.ram = 128u << 20, .clients = 1, .threads = 1};
    empty.wake_fd = -1;
    pthread_mutex_init(&empty.st.lock, NULL);
    pthread_cond_init(&empty.st.work, NULL);
    empty.math.k = sv.math.k;
    empty.n_threads = 1;
    attack_server(&empty, n, -1, false);
    must(empty.has_model || empty.st.n_slots == 0, "memory without a model");
    memory_close(&empty);
    pool_close(empty.pool);
}

static void on_settled(void *user, uint32_t ie, int by) {
    (void)ie;
    (void)by;
    ++*(uint32_t *)user;
}

static void attack_client(size_t n) {
    static const char *const none[] = {"unix:/nowhere", NULL};
    static const uint32_t row[ROWS] = {0, 1, 2, 3};
    static const float w[ROWS] = {1, 1, 1, 1};
    static float z[ROWS * 256];
    tier_options o = {.boxes = none, .max_rows = ROWS};
    uint64_t used = 0;
    uint32_t n_settled = 0;
    int fds[2];
    must(tier_bytes(&sv.m, &o) <= sizeof block, "a block too small");
    memset(block, 0, sizeof block);
    tier *t = carve(block, &used, 1, sizeof *t);
    box *b = &t->boxes[0];
    t->m = sv.m;
    t->max_rows = ROWS;
    t->next_id = 1;
    t->n_boxes = 1;
    b->t = t;
    strcpy(b->name, none[0]);
    b->max_rows = ROWS;
    box_carve(b, block, &used, &sv.m, ROWS);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "socketpair");
    tier_link_plain(&b->link, fds[0]);
    b->is_up = b->is_mine = true;
    memset(b->held, 0xff, (sv.m.n_layers - sv.m.n_dense) * tier_map_bytes(sv.m.n_experts));
    memset(sums, 0, sizeof sums);
    must(tier_ask(t, 2, 3, 2, row, w) && tier_ask(t, 2, 7, 4, row, w), "asking");
    tier_send(t, z, clock_ns() + 1000000000u);
    for (size_t at = 0, idle = 0; idle < 3 && b->is_mine; idle++) {
        size_t put = push(fds[1], stream + at, n - at);
        at += put;
        if (put > 0) idle = 0;
        tier_join(t, false, sums, 0, on_settled, &n_settled);
    }
    t->deadline_ns = 0;
    must(tier_join(t, true, sums, 0, on_settled, &n_settled) == 0 && n_settled == 2,
         "not all settled");
    for (size_t i = 0; i < ROWS * sv.m.latent; i++)
        must(sums[i] <= 2ll << 57 && sums[i] >= -(2ll << 57), "a sum out of range");
    if (b->is_mine) b->link.by->close(&b->link);
    close(fds[1]);
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->changed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!sv.e) setup();
    if (size == 0) return 0;
    size_t n = stream_make(data + 1, size - 1, data[0] & 2);
    if (data[0] & 1)
        attack_client(n);
    else if (data[0] & 16)
        attack_empty(n);
    else
        attack_server(&sv, n,
                      data[0] & 32  ? -1
                      : data[0] & 4 ? TIER_ASKS
                      : data[0] & 8 ? TIER_STAGES
                                    : -1,
                      data[0] & 32);
    return 0;
}
