/* test_tier.c - the far box from inside: the wire's limits, exact sums, honest bitmaps.
 *
 *     test_tier DEMO_DIR
 *
 * tier_server.c is included, so that requests can be computed and experts come and go without
 * sockets and threads. Sums are compared with a scalar computation written from docs/NUMERICS.md 2
 * to 5; proofs with values of Python's hmac module.
 */
#define TIER_SERVER_TEST
#include "../tier_server.c"
#include "test.h"

#define N_ROWS 3

static server sv;
static float z[N_ROWS * 4096];

/* ---- A request, packed by hand ---- */

typedef struct {
    uint32_t ie, n, row[N_ROWS];
    float w[N_ROWS];
} want;

static size_t request_pack(uint8_t *p, uint32_t il, uint32_t n_rows, const want *x, uint32_t n) {
    uint8_t *to = p + TIER_FIXED_BYTES;
    uint32_t n_pairs = 0;
    for (uint32_t i = 0; i < n; i++) n_pairs += x[i].n;
    memset(p, 0, TIER_FIXED_BYTES);
    tier_put16(p, il);
    tier_put16(p + 2, n_rows);
    tier_put16(p + 4, n);
    tier_put32(p + 8, n_pairs);
    tier_put32(p + 12, 1000000);
    memcpy(to, z, n_rows * sv.m.latent * 4);
    to += n_rows * sv.m.latent * 4;
    for (uint32_t i = 0; i < n; i++, to += 4) {
        tier_put16(to, x[i].ie);
        tier_put16(to + 2, x[i].n);
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < x[i].n; j++, to += 4) memcpy(to, &x[i].w[j], 4);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < x[i].n; j++, to += 2) tier_put16(to, x[i].row[j]);
    return (size_t)(to - p);
}

/* ---- The scalar definition ---- */

static float weight(const uint8_t *q, const uint8_t *s, size_t n, size_t row, size_t i) {
    uint8_t byte = q[row * (n / 2) + i / 2];
    return k3_e2m1(i % 2 ? byte >> 4 : byte & 15) * k3_e8m0(s[row * (n / 32) + i / 32]);
}

static float dot16(const uint8_t *q, const uint8_t *s, size_t n, size_t row, const float *x) {
    float acc[16] = {0};
    for (size_t g = 0; g < n; g += 32) {
        for (size_t l = 0; l < 16; l++)
            acc[l] = fmaf(weight(q, s, n, row, g + 2 * l), x[g + 2 * l], acc[l]);
        for (size_t l = 0; l < 16; l++)
            acc[l] = fmaf(weight(q, s, n, row, g + 2 * l + 1), x[g + 2 * l + 1], acc[l]);
    }
    for (size_t k = 8; k > 0; k /= 2)
        for (size_t l = 0; l < k; l++) acc[l] = acc[l] + acc[l + k];
    return acc[0] + 0.0f;
}

/* Q += q40(w * expert(z)) for one expert and row. */
static void expert_scalar(uint32_t il, uint32_t ie, const float *x, float w, int64_t *Q) {
    const slot *sl = &sv.st.slots[sv.st.slot_of[index_of(&sv, il, ie)]];
    const uint8_t *const *p = sl->view.p;
    float h[4096];
    for (size_t i = 0; i < sv.m.inter; i++)
        h[i] = k3_situ(dot16(p[W1_PACKED], p[W1_SCALE], sv.m.latent, i, x),
                       dot16(p[W3_PACKED], p[W3_SCALE], sv.m.latent, i, x), sv.math.beta,
                       sv.math.linear_beta);
    for (size_t i = 0; i < sv.m.latent; i++)
        Q[i] += k3_q40(w * dot16(p[W2_PACKED], p[W2_SCALE], sv.m.inter, i, h));
}

/* ---- Parts ---- */

/* Read the experts that warm_next() names, without threads. Returns how many. */
static uint32_t warm_all(void) {
    uint32_t n = 0;
    size_t i;
    int32_t i_slot;
    while (warm_next(&sv, &i, &i_slot)) {
        expert_view x;
        k3_error err = {{0}};
        int rc = k3_expert_read(sv.e, sv.m.n_dense + (uint32_t)(i / sv.m.n_experts),
                                (uint32_t)(i % sv.m.n_experts),
                                sv.st.bytes + (uint64_t)i_slot * sv.st.slot_bytes, &x, &err);
        CHECK_EQ_INT(rc, 0);
        warm_done(&sv, i, i_slot, rc, &x);
        n++;
    }
    return n;
}

static void open_server(const char *dir, uint64_t ram) {
    memset(&sv, 0, sizeof sv);
    sv.o = (options){.model_dir = dir, .ram = ram, .clients = 1, .threads = 2};
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(model_open(&sv), DONE);
    CHECK_EQ_INT(memory_open(&sv), DONE);
    sv.st.is_filling = true;
}

/* Three rows, five experts with several pairs each: the bits of the scalar definition. */
static void test_sums(void) {
    static uint8_t in[65536], out[65536];
    static int64_t Q[N_ROWS][4096];
    want x[5] = {{0, 1, {1}, {0.5f}},
                 {3, 3, {0, 1, 2}, {0.25f, 1.0f, 2.0f}},
                 {7, 2, {0, 2}, {0.125f, 0.3f}},
                 {30, 1, {2}, {0.7f}},
                 {31, 1, {0}, {1.5f}}};
    uint64_t seed = 5;
    uint32_t il = sv.m.n_dense + 1;
    tier_request r;
    tier_reply a;
    for (size_t i = 0; i < N_ROWS * sv.m.latent; i++)
        z[i] = (float)((int64_t)(test_random(&seed) % 2000) - 1000) * 0x1p-8f;
    for (int round = 0; round < 3; round++) {
        uint32_t n_rows = round == 2 ? 1 : N_ROWS, n = round == 2 ? 1 : 5;
        if (round == 1) x[1].w[2] = 1e30f; /* out of range (NUMERICS 5): all of expert 3 is missing */
        if (round == 2) x[0].row[0] = 0;
        size_t len = request_pack(in, il, n_rows, x, n);
        CHECK(tier_request_parse(&sv.m, TIER_MAX_ROWS, in, len, &r) == NULL);
        len = compute_request(&sv, &r, (const float *)(const void *)r.z, false, out);
        CHECK(tier_reply_parse(&sv.m, out, len, &a) == NULL);
        CHECK_EQ_INT(a.il, il);
        CHECK_EQ_INT(a.n_rows, n_rows);
        CHECK_EQ_INT(a.served[0], round == 0 ? 31 : round == 1 ? 31 - 2 : 1);
        memset(Q, 0, sizeof Q);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < x[i].n && (round != 1 || i != 1); j++)
                expert_scalar(il, x[i].ie, z + x[i].row[j] * sv.m.latent, x[i].w[j],
                              Q[x[i].row[j]]);
        for (uint32_t t = 0; t < n_rows; t++)
            CHECK_EQ_MEM(a.sums + t * sv.m.latent * 8, Q[t], sv.m.latent * 8);
    }
    size_t len = request_pack(in, il, N_ROWS, x, 5);
    CHECK(tier_request_parse(&sv.m, TIER_MAX_ROWS, in, len, &r) == NULL);
    len = compute_request(&sv, &r, (const float *)(const void *)r.z, true, out); /* too late */
    CHECK(tier_reply_parse(&sv.m, out, len, &a) == NULL);
    CHECK_EQ_INT(a.n_rows, 0);
    CHECK_EQ_INT(a.served[0], 0);
    for (uint32_t i = 0; i < sv.st.n_slots; i++)
        if (sv.st.slots[i].pins != 0) CHECK_EQ_INT(sv.st.slots[i].pins, 0);
}

/* Every broken request is refused, and every shorter one. */
static void test_limits(void) {
    static uint8_t in[65536], bad[65536];
    want x[2] = {{1, 2, {0, 1}, {0.5f, 1.0f}}, {4, 1, {1}, {0.25f}}};
    tier_request r;
    uint32_t il = sv.m.n_dense;
    size_t len = request_pack(in, il, 2, x, 2), lat = sv.m.latent * 8, e = TIER_FIXED_BYTES + lat;
    CHECK(tier_request_parse(&sv.m, TIER_MAX_ROWS, in, len, &r) == NULL);
    for (size_t n = 0; n < len; n++)
        if (!tier_request_parse(&sv.m, TIER_MAX_ROWS, in, n, &r)) CHECK(!"a short request");
    CHECK(tier_request_parse(&sv.m, TIER_MAX_ROWS, in, len + 1, &r) != NULL);
    CHECK(tier_request_parse(&sv.m, 1, in, len, &r) != NULL);
    const struct {
        size_t at;
        uint16_t v;
    } fault[] = {{0, (uint16_t)(il - 1)},
                 {0, (uint16_t)sv.m.n_layers},
                 {2, 513},
                 {4, 60000},
                 {6, 1},
                 {8, 65535},
                 {10, 1},
                 {e, 4},
                 {e, 5},
                 {e + 4, 32},
                 {e + 2, 0},
                 {e + 2, 3},
                 {e + 6, 0},
                 {e + 6, 2},
                 {e + 20, 1},
                 {e + 22, 0},
                 {e + 24, 2},
                 {TIER_FIXED_BYTES + 2, 0x7f80},
                 {e + 10, 0xff80},
                 {e + 10, 0x7fc0}};
    for (size_t i = 0; i < COUNT(fault); i++) {
        memcpy(bad, in, len);
        tier_put16(bad + fault[i].at, fault[i].v);
        if (!tier_request_parse(&sv.m, TIER_MAX_ROWS, bad, len, &r)) {
            printf("fault %zu\n", i);
            CHECK(!"a faulty request was taken");
        }
    }
    tier_reply a;
    memset(bad, 0, 24);
    tier_put16(bad + 4, 3);
    CHECK(tier_reply_parse(&sv.m, bad, 24, &a) == NULL);
    bad[16] = 8; /* expert 3 of 3 */
    CHECK(tier_reply_parse(&sv.m, bad, 24, &a) != NULL);
    bad[16] = 0;
    CHECK(tier_reply_parse(&sv.m, bad, 23, &a) != NULL);
    tier_put16(bad + 2, 1);
    CHECK(tier_reply_parse(&sv.m, bad, 24, &a) != NULL);
}

static void test_frames(void) {
    uint8_t f[TIER_HEAD_BYTES + 8] = {0};
    tier_head h;
    memcpy(f + TIER_HEAD_BYTES, "payload", 8);
    CHECK_EQ_INT(tier_seal(f, TIER_WISH, 0x1122334455667788u, 8), TIER_HEAD_BYTES + 8);
    CHECK_EQ_MEM(f, "K3T\2\x9\0\0\0\x8\0\0\0\0\0\0\0\x88\x77\x66\x55\x44\x33\x22\x11", 24);
    CHECK(tier_head_parse(f, &h) == NULL && h.sum == tier_sum(f, 8) && h.n == 8);
    for (size_t i = 0; i < sizeof f; i++) { /* a flipped bit in any byte is found */
        f[i] ^= 0x10;
        bool is_seen = tier_head_parse(f, &h) != NULL || h.n != 8 || tier_sum(f, 8) != h.sum;
        if (!is_seen) CHECK_EQ_INT(i, -1);
        f[i] ^= 0x10;
    }
    tier_put32(f + 8, TIER_MAX_FRAME + 1);
    CHECK(tier_head_parse(f, &h) != NULL);
}

/* Values of Python: hmac.new(bytes(range(32)), who + hello + nonce + binding, 'sha256'), the hello being
 * bytes (7 i) % 256, the nonce bytes 200 + i, the binding bytes 100 + i. */
static void test_proof(void) {
    static const uint8_t server_want[32] = {0xf7, 0x13, 0x32, 0xe4, 0x72, 0xb1, 0x5e, 0x82,
                                            0x02, 0xd1, 0x58, 0x59, 0x0e, 0x50, 0xd6, 0xf0,
                                            0x0b, 0x5e, 0xf7, 0x0f, 0xf9, 0xde, 0xfe, 0x6d,
                                            0x84, 0x64, 0xe1, 0x01, 0xf6, 0xf3, 0xa1, 0xd5},
                         client_want[32] = {0xb9, 0x09, 0x98, 0x93, 0x85, 0x80, 0x4a, 0xa6,
                                            0x9a, 0x3d, 0x13, 0x11, 0x1a, 0x0b, 0x04, 0x39,
                                            0xe3, 0x6a, 0xca, 0x9d, 0xe8, 0x1a, 0xde, 0x8e,
                                            0x69, 0x65, 0x06, 0xa6, 0xfa, 0x13, 0xa8, 0x58};
    tier_key key = {.n = 32};
    uint8_t got[32];
    tier_talk t;
    for (int i = 0; i < 32; i++) key.bytes[i] = (uint8_t)i;
    for (size_t i = 0; i < sizeof t.hello; i++) t.hello[i] = (uint8_t)(7 * i);
    for (size_t i = 0; i < sizeof t.nonce; i++) t.nonce[i] = (uint8_t)(200 + i);
    for (size_t i = 0; i < sizeof t.binding; i++) t.binding[i] = (uint8_t)(100 + i);
    CHECK(tier_proof(&key, TIER_SERVER, &t, got));
    CHECK_EQ_MEM(got, server_want, 32);
    CHECK(tier_believe(&key, &t, server_want, 32) == NULL);
    CHECK(tier_believe(&key, &t, client_want, 32) != NULL); /* this end's own proof, sent back */
    CHECK(tier_believe(&key, &t, server_want, 31) != NULL);
    CHECK(tier_proof(&key, TIER_CLIENT, &t, got));
    CHECK_EQ_MEM(got, client_want, 32);
    t.binding[31]++; /* the proof of another connection */
    CHECK(tier_believe(&key, &t, server_want, 32) != NULL);
}

/* Keys that can be guessed are refused. */
static void test_keys(void) {
    static const struct {
        const char *text, *why;
    } file[] = {{"0123456789abcdef0123456789abcde\n", "shorter than 32 bytes"},
                {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "not random"},
                {"0101010101010101010101010101010123456\n", "not random"},
                {"3yqLrNrCS5sEq0tCkDyqvS6Ly2Zp1C0wUqJ4v8z1H9E=\n", NULL},
                {"6f1b3c9d8e7a20451122334455667788\r\n", NULL}};
    char path[] = "/tmp/k3-key-XXXXXX";
    int fd = mkstemp(path);
    tier_key key;
    for (size_t i = 0; i < COUNT(file); i++) {
        size_t n = strlen(file[i].text);
        CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, file[i].text, n, 0) == (ssize_t)n);
        const char *why = tier_key_read(path, &key);
        CHECK(file[i].why ? why && strstr(why, file[i].why) && strstr(why, "openssl rand -base64 32")
                          : !why && key.n == strcspn(file[i].text, "\r\n"));
    }
    close(fd);
    unlink(path);
}

/* Compared is the better fingerprint that both ends have: sums, or else samples. */
static void test_prints(void) {
    char text[TIER_MAX_TEXT];
    tier_model a = sv.m, b = sv.m;
    CHECK(a.sampled != 0 && a.by_sums == 0); /* the demo has no sums */
    CHECK(tier_model_differs(&a, &b, text, sizeof text) == NULL);
    b.by_sums = 7;
    CHECK(tier_model_differs(&a, &b, text, sizeof text) == NULL);
    a.by_sums = 8;
    CHECK_EQ_STR(tier_model_differs(&a, &b, text, sizeof text),
                 "another model: fingerprint by sums 0000000000000008 here, 0000000000000007 there");
    a.by_sums = 7;
    a.sampled++;
    CHECK(tier_model_differs(&a, &b, text, sizeof text) == NULL);
    a.by_sums = 0;
    CHECK(strstr(tier_model_differs(&a, &b, text, sizeof text), "another model: fingerprint "));
}

static void test_addresses(void) {
    static const char *const good[][3] = {{"box", "box", TIER_PORT},
                                          {"box:1", "box", "1"},
                                          {":80", "127.0.0.1", "80"},
                                          {"[::1]:9", "::1", "9"},
                                          {"[fe80::1%eth0]", "fe80::1%eth0", TIER_PORT}};
    static const char *const bad[] = {"box:",  "box:x",     "box:70000", "::1",       "[::1",
                                      "unix:", "[::1]junk", "a:1:2",     "box:123456"};
    tier_addr a;
    for (size_t i = 0; i < COUNT(good); i++) {
        CHECK(tier_addr_parse(good[i][0], &a));
        CHECK_EQ_STR(a.host, good[i][1]);
        CHECK_EQ_STR(a.port, good[i][2]);
    }
    for (size_t i = 0; i < COUNT(bad); i++)
        if (tier_addr_parse(bad[i], &a)) CHECK_EQ_STR(bad[i], "refused");
    CHECK(tier_addr_parse("unix:/run/k3", &a) && a.is_unix);
    CHECK_EQ_STR(a.path, "/run/k3");
    char path[5 + 109] = "unix:"; /* 107 bytes and a NUL are what the system takes */
    memset(path + 5, 'a', 108);
    CHECK(!tier_addr_parse(path, &a));
    CHECK_EQ_STR(tier_addr_advice(path), "the path of a socket has at most 107 bytes");
    path[5 + 107] = 0;
    CHECK(tier_addr_parse(path, &a));
}

static bool is_held(uint32_t il, uint32_t ie) {
    const uint8_t *map = sv.st.held + (il - sv.m.n_dense) * tier_map_bytes(sv.m.n_experts);
    bool is = map[ie / 8] >> ie % 8 & 1;
    CHECK_EQ_INT(is, sv.st.slot_of[index_of(&sv, il, ie)] != NONE);
    return is;
}

/* A store of three slots: wanted experts come, the coldest goes, one in use stays. */
static void test_store(const char *dir) {
    uint8_t wish[4 * 40];
    item five = {.ie = 5}, six = {.ie = 6, .task.n = 1};
    uint32_t il = sv.m.n_dense;
    server_close(&sv);
    open_server(dir, 1u << 30);
    sv.st.is_filling = false;
    sv.st.n_slots = sv.st.n_free = 3;
    for (uint32_t i = 0; i < 3; i++) sv.st.free[i] = i;
    CHECK_EQ_INT(warm_all(), 0);
    for (int k = 0; k < 3; k++) { /* experts 5, 6, 7: wanted 10, 12 and 14 times */
        for (int i = 0; i < 10 + 2 * k; i++) {
            tier_put16(wish + 4 * i, il);
            tier_put16(wish + 4 * i + 2, 5 + (uint32_t)k);
        }
        store_wish(&sv, wish, 4 * (10 + 2 * (size_t)k));
    }
    CHECK_EQ_INT(warm_all(), 3);
    CHECK(is_held(il, 5) && is_held(il, 6) && is_held(il, 7));
    tier_put16(wish + 2, 9);
    store_wish(&sv, wish, 4);
    CHECK_EQ_INT(warm_all(), 0); /* wanted too little to evict another */
    for (int i = 0; i < 40; i++) {
        tier_put16(wish + 4 * i, il);
        tier_put16(wish + 4 * i + 2, 9);
    }
    CHECK(store_pin(&sv, il, &five));
    CHECK(five.i_slot != NONE && five.i_vram == NONE);
    store_wish(&sv, wish, 4 * 40);
    uint32_t version = sv.st.version[0];
    CHECK_EQ_INT(warm_all(), 1);
    CHECK(is_held(il, 5)); /* the coldest, but in use */
    CHECK(!is_held(il, 6) && is_held(il, 7) && is_held(il, 9));
    CHECK_EQ_INT(sv.st.version[0], version + 2);
    CHECK(!store_pin(&sv, il, &six));
    CHECK_EQ_INT(sv.st.n_evicted, 1);
}

/* Make connection i of the server; *other is its far end. */
static conn *conn_of(int i, enum conn_state state, uint8_t from, int *other) {
    conn *c = &sv.conns[i];
    int fd[2];
    CHECK_EQ_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    memset(c, 0, sizeof *c);
    CHECK(conn_room(c, 4096, 4096));
    c->fd = fd[0];
    c->state = state;
    c->since_ns = c->sent_ns = clock_ns();
    c->from[0] = from;
    *other = fd[1];
    return c;
}

/* A wrong key is refused, counted and told. Few places are for lookers: the peer that has most of
 * them loses one; the same for peers that said no hello. */
static void test_places(void) {
    const uint8_t wrong[TIER_PROOF_BYTES] = {0};
    uint64_t refused = sv.stats[TIER_STAT_REFUSED], bad = sv.stats[TIER_STAT_BAD];
    int other[8];
    conn *c = conn_of(0, C_PROOF, 0, &other[0]);
    sv.key[KEY_ASKS][0].n = TIER_MIN_KEY, sv.o.n_keys[KEY_ASKS] = 1;
    CHECK(!conn_proof(&sv, c, wrong, sizeof wrong));
    sv.key[KEY_ASKS][0].n = 0, sv.o.n_keys[KEY_ASKS] = 0;
    CHECK_EQ_INT(sv.stats[TIER_STAT_REFUSED], refused + 1);
    CHECK_EQ_INT(sv.stats[TIER_STAT_BAD], bad + 1);
    close(other[0]);
    conn *mine = conn_of(1, C_STATUS, 1, &other[1]), *theirs = conn_of(2, C_STATUS, 2, &other[2]);
    conn_of(3, C_STATUS, 2, &other[3]);
    mine->since_ns -= 1000000; /* silent for longest, but the only one of its address */
    lookers_thin(&sv);
    CHECK(mine->state == C_STATUS && theirs->state == C_FREE);
    for (int i = 1; i < 4; i++) {
        if (sv.conns[i].state != C_FREE) conn_close(&sv, &sv.conns[i], NULL);
        close(other[i]);
    }
    for (int i = 0; i < 5; i++) conn_of(i, C_HELLO, i < 4 ? 7 : 8, &other[i]);
    CHECK(conn_greedy(&sv, (uint8_t[8]){9}) == &sv.conns[0]);
    CHECK(conn_greedy(&sv, (uint8_t[8]){7}) == NULL);
    log_gate gate = {.since_ns = clock_ns()};
    for (int i = 0; i < LOG_LINES; i++) CHECK(log_may(&gate, "tests"));
    CHECK(!log_may(&gate, "tests"));
    gate.since_ns -= 3000000000u;
    CHECK(log_may(&gate, "tests"));
    for (int i = 0; i < 5; i++) {
        conn_close(&sv, &sv.conns[i], NULL);
        close(other[i]);
    }
}

/* A looker or stager that says nothing loses its place. A stager keeps the box from being alone. */
static void test_idle(void) {
    for (enum conn_state state = C_UP; state <= C_STAGE; state++) {
        conn *c = &sv.conns[0];
        int fd[2];
        CHECK_EQ_INT(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
        memset(c, 0, sizeof *c);
        CHECK(conn_room(c, 4096, 4096));
        c->fd = fd[0];
        c->state = state;
        uint64_t now = clock_ns();
        c->since_ns = c->sent_ns = now;
        sv.n_clients += state == C_UP;
        sv.n_stagers += state == C_STAGE;
        conn_check_time(&sv, c, now + 60 * 1000000000ull);
        CHECK(c->state == state);
        conn_check_time(&sv, c, now + 3600 * 1000000000ull);
        CHECK_EQ_INT(c->state, state == C_UP ? C_UP : C_FREE);
        CHECK_EQ_INT(sv.n_stagers, 0);
        if (c->state != C_FREE) conn_close(&sv, c, NULL);
        close(fd[1]);
    }
    sv.o.linger_s = 1;
    sv.client_ns = 0;
    sv.n_stagers = 1;
    CHECK(!is_lonely(&sv, 9000000000u));
    sv.n_stagers = 0;
    CHECK(!is_lonely(&sv, 9900000000u));
    CHECK(is_lonely(&sv, 10100000000u));
    sv.o.linger_s = 600;
    CHECK(!is_lonely(&sv, 10100000000u));
    sv.st.vram_is_lost = true; /* its device is gone: not joined any longer, */
    CHECK(!is_lonely(&sv, 10100000000u));
    sv.o.no_fill = true; /* unless it holds what nobody could read again */
    CHECK(is_lonely(&sv, 10100000000u));
    sv.n_clients = 1;
    CHECK(!is_lonely(&sv, 10200000000u));
    sv.n_clients = 0;
    sv.st.vram_is_lost = sv.o.no_fill = false;
    sv.o.linger_s = 0;
}

/* Strangers hold every place: the next one to come gets the place that was silent for longest. */
static void test_strangers(void) {
    char path[] = "/tmp/k3-places-XXXXXX";
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    enum { N = 1 + MAX_STATUS };
    int fd[N + 2], n = N;
    uint64_t n_bad = sv.stats[TIER_STAT_BAD];
    close(mkstemp(path));
    unlink(path);
    strcpy(sa.sun_path, path);
    sv.listen[0].fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(bind(sv.listen[0].fd, (void *)&sa, sizeof sa) == 0 && listen(sv.listen[0].fd, 64) == 0);
    for (int i = 0; i < n + 2; i++) {
        fd[i] = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK(connect(fd[i], (void *)&sa, sizeof sa) == 0);
        if (i < n) conn_accept(&sv, 0);
    }
    for (int i = 0; i < n; i++) CHECK_EQ_INT(sv.conns[i].state, C_HELLO);
    conn_accept(&sv, 0); /* all of them have just come */
    CHECK_EQ_INT(sv.stats[TIER_STAT_BAD], n_bad + 1);
    CHECK_EQ_INT(recv(fd[n], path, 1, MSG_DONTWAIT), 0);
    for (int i = 0; i < n; i++) sv.conns[i].since_ns -= (TIER_HASTE_MS + 1) * 1000000ull;
    sv.conns[2].since_ns -= 1000000;
    sv.conns[1].since_ns -= 2000000;
    sv.conns[1].state = C_STATUS; /* welcome: it stays */
    uint64_t number = sv.conns[2].number;
    conn_accept(&sv, 0);
    CHECK(sv.conns[2].state == C_HELLO && sv.conns[2].number > number);
    for (int i = 0; i < n; i++)
        if (sv.conns[i].state != C_FREE) conn_close(&sv, &sv.conns[i], NULL);
    for (int i = 0; i < n + 2; i++) close(fd[i]);
    close(sv.listen[0].fd);
    unlink(sa.sun_path);
}

int main(int argc, char **argv) {
    const char *dir = argc > 1 ? argv[1] : "demo";
    test_begin("tier_box");
    open_server(dir, 1u << 30);
    CHECK_EQ_INT(warm_all(), (int64_t)sv.n_moe * sv.m.n_experts);
    test_sums();
    test_limits();
    test_frames();
    test_proof();
    test_keys();
    test_prints();
    test_addresses();
    test_store(dir);
    test_idle();
    test_places();
    test_strangers();
    server_close(&sv);
    return test_finish();
}
