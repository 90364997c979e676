/* test_stage.c - staging from inside, and the manifest of a slice: what is taken, what is refused.
 *
 *     test_stage DEMO_DIR
 *
 * tier_server.c is included: a box without a model is talked to over socket pairs, frame by frame,
 * without its loop and threads. Experts come from a second server that has the demo.
 */
#define TIER_SERVER_TEST
#include "../tier_server.c"
#include "test.h"

static server src, sv; /* src has the model; sv is the box under test */
static uint8_t expert[65536];
static uint64_t expert_sum;
static uint8_t frame[TIER_HEAD_BYTES + (1 << 20) + 64], *const out = frame + TIER_HEAD_BYTES;
static uint8_t back[1 << 20];
static size_t n_back;

/* ---- A box and connections to it ---- */

static void open_source(const char *dir) {
    src.o = (options){.model_dir = dir, .ram = 1u << 30, .clients = 1, .threads = 1};
    pthread_mutex_init(&src.st.lock, NULL);
    pthread_cond_init(&src.st.work, NULL);
    CHECK_EQ_INT(sources_open(&src), DONE);
}

static void open_box(uint64_t ram) {
    memset(&sv, 0, sizeof sv);
    sv.o = (options){.ram = ram, .clients = 2, .threads = 1};
    sv.o.listen[sv.o.n_listen++] = "unix:"; /* so that staging is allowed */
    sv.wake_fd = -1;
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(sources_open(&sv), DONE);
}

typedef struct {
    conn *c;
    int fd;
} line;

static line dial_in(uint32_t i) {
    int fds[2];
    conn *c = &sv.conns[i];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    CHECK(conn_room(c, TIER_HEAD_BYTES + 2 * TIER_MAX_EARLY, 4096));
    c->fd = fds[0];
    c->state = C_HELLO;
    c->since_ns = clock_ns();
    return (line){c, fds[1]};
}

static void hang_up(line l) {
    if (l.c->state != C_FREE) conn_close(&sv, l.c, NULL);
    close(l.fd);
}

static bool is_open(line l) { return l.c->state != C_FREE; }

/* Send a frame with n bytes of payload from `out`, let the box handle it, and read its answer. */
static void say_frame(line l, enum tier_type type, size_t n) {
    size_t all = tier_seal(frame, type, 7, (uint32_t)n);
    if (send(l.fd, frame, all, MSG_NOSIGNAL) != (ssize_t)all) CHECK(!is_open(l));
    for (int i = 0; i < 100 && is_open(l); i++) {
        if (!l.c->has_frame && l.c->n_out == 0 && !conn_fill(&sv, l.c)) break;
        if (!l.c->has_frame && l.c->n_in == 0) break;
        if (l.c->has_frame && (!conn_act(&sv, l.c) || !conn_look(&sv, l.c))) break;
    }
    ssize_t got = recv(l.fd, back, sizeof back, MSG_DONTWAIT);
    n_back = got > 0 ? (size_t)got : 0;
}

/* Take the first frame that came, if it has this type. Returns its payload. */
static const uint8_t *heard(enum tier_type type, uint32_t *n) {
    static uint8_t payload[1 << 20];
    tier_head h;
    if (n_back < TIER_HEAD_BYTES || tier_head_parse(back, &h) || h.type != type ||
        n_back < TIER_HEAD_BYTES + (size_t)h.n || tier_sum(back, h.n) != h.sum)
        return NULL;
    memcpy(payload, back + TIER_HEAD_BYTES, h.n);
    payload[h.n] = 0;
    *n = h.n;
    n_back -= TIER_HEAD_BYTES + (size_t)h.n;
    memmove(back, back + TIER_HEAD_BYTES + h.n, n_back);
    return payload;
}

static bool is_refused(const char *why) {
    uint32_t n;
    const uint8_t *p = heard(TIER_REFUSE, &n);
    bool is = p && strstr((const char *)p, why);
    if (!is) printf("    not refused with '%s': %s\n", why, p ? (const char *)p : "nothing");
    return is;
}

static void hello_as(line l, const tier_model *m, uint8_t role) {
    static const uint8_t nonce[TIER_NONCE_BYTES] = {1};
    tier_hello_pack(out, m, role, nonce);
    say_frame(l, TIER_HELLO, TIER_HELLO_BYTES);
}

static void begin_as(line l, float beta, float linear_beta, uint64_t n_bytes) {
    memcpy(out, &beta, 4);
    memcpy(out + 4, &linear_beta, 4);
    tier_put64(out + 8, n_bytes);
    say_frame(l, TIER_BEGIN, TIER_BEGIN_BYTES);
}

/* A connection that has begun to stage and may offer. */
static line stager(uint32_t i) {
    uint32_t n;
    line l = dial_in(i);
    hello_as(l, &src.m, TIER_STAGES);
    CHECK(heard(TIER_WELCOME, &n) && n == TIER_WELCOME_BYTES);
    begin_as(l, src.math.beta, src.math.linear_beta, src.expert_bytes);
    CHECK(heard(TIER_WELCOME, &n) && n == TIER_WELCOME_BYTES);
    CHECK(heard(TIER_RESIDENT, &n) && n == tier_resident_bytes(&src.m, src.n_moe));
    CHECK_EQ_INT(n_back, 0);
    return l;
}

static void fetch(uint32_t il, uint32_t ie) {
    static uint8_t *room;
    expert_view x;
    k3_error err;
    uint64_t n[N_EXPERT_TENSORS], at = 0;
    if (!room && posix_memalign((void **)&room, 4096, k3_expert_room(src.e)) != 0) abort();
    CHECK_EQ_INT(k3_expert_read(src.e, il, ie, room, &x, &err), 0);
    expert_lengths(src.m.latent, src.m.inter, n);
    for (int k = 0; k < N_EXPERT_TENSORS; at += n[k++]) memcpy(expert + at, x.p[k], n[k]);
    CHECK_EQ_INT(at, src.expert_bytes);
    expert_sum = XXH3_64bits(expert, at);
}

static int offer(line l, uint32_t il, uint32_t ie) {
    uint32_t n;
    memset(out, 0, TIER_OFFER_BYTES);
    tier_put16(out, il);
    tier_put16(out + 2, ie);
    tier_put64(out + 8, src.expert_bytes);
    tier_put64(out + 16, expert_sum);
    say_frame(l, TIER_OFFER, TIER_OFFER_BYTES);
    const uint8_t *p = heard(TIER_VERDICT, &n);
    return p && n == TIER_VERDICT_BYTES && tier_get16(p) == il && tier_get16(p + 2) == ie ? p[4]
                                                                                          : -1;
}

static void piece(line l, uint64_t at, size_t n) {
    tier_put64(out, at);
    memcpy(out + 8, expert + (at < sizeof expert ? at : 0), n);
    say_frame(l, TIER_PIECE, 8 + n);
}

static void pieces(line l, size_t step) {
    for (uint64_t at = 0; at < src.expert_bytes; at += step)
        piece(l, at, src.expert_bytes - at < step ? (size_t)(src.expert_bytes - at) : step);
}

static int commit(line l, uint32_t il, uint32_t ie, uint64_t sum) {
    uint32_t n;
    memset(out, 0, TIER_COMMIT_BYTES);
    tier_put16(out, il);
    tier_put16(out + 2, ie);
    tier_put64(out + 8, sum);
    say_frame(l, TIER_COMMIT, TIER_COMMIT_BYTES);
    const uint8_t *p = heard(TIER_VERDICT, &n);
    return p && n == TIER_VERDICT_BYTES ? p[4] : -1;
}

/* Check that nothing is on its way, and that every slot is held or free. */
static void check_idle(void) {
    uint32_t n = 0;
    for (size_t i = 0; i < (size_t)sv.n_moe * sv.m.n_experts; i++) n += sv.st.is_coming[i];
    CHECK_EQ_INT(n, 0);
    CHECK_EQ_INT(sv.st.n_free + sv.st.n_held, sv.st.n_slots);
}

/* ---- Parts ---- */

/* What a box without a model says to clients, and which models it takes. */
static void test_hello(void) {
    tier_model odd[8];
    open_box(1u << 30);
    line l = dial_in(0);
    hello_as(l, &src.m, TIER_ASKS);
    CHECK(is_refused("no experts yet"));
    CHECK(!is_open(l));
    hang_up(l);
    l = dial_in(0);
    hello_as(l, &src.m, 3);
    CHECK(is_refused("no known role"));
    hang_up(l);
    for (size_t i = 0; i < COUNT(odd); i++) odd[i] = src.m;
    odd[0].latent = 97;
    odd[1].inter = 0;
    odd[2].inter = 1u << 20;
    odd[3].n_experts = TIER_MAX_EXPERTS + 1;
    odd[4].n_layers = TIER_MAX_LAYERS + 1;
    odd[5].n_dense = odd[5].n_layers;
    odd[6].top_k = 33;
    odd[7].numerics = "k3-f32-dot16-q41";
    for (size_t i = 0; i < COUNT(odd); i++) {
        l = dial_in(0);
        hello_as(l, &odd[i], TIER_STAGES);
        CHECK(is_refused(i < 7 ? "a geometry that none has" : "another model: numerics"));
        hang_up(l);
    }
    CHECK(!sv.has_model && sv.n_stagers == 0);
    server_close(&sv);
}

/* A box with too little memory says so, and stays as it was. */
static void test_small_box(void) {
    uint32_t n;
    open_box(50u << 20);
    is_quiet = true;
    line l = dial_in(0);
    hello_as(l, &src.m, TIER_STAGES);
    CHECK(heard(TIER_WELCOME, &n) != NULL);
    begin_as(l, src.math.beta, src.math.linear_beta, src.expert_bytes);
    CHECK(is_refused("more --ram"));
    CHECK(!sv.has_model && sv.n_stagers == 0 && sv.st.n_slots == 0);
    hang_up(l);
    sv.o.ram = 1u << 30;
    l = stager(0);
    CHECK(sv.has_model && sv.st.n_slots == sv.n_moe * sv.m.n_experts);
    hang_up(l);
    server_close(&sv);
}

/* Stage one expert after another, in pieces of several lengths: the box holds the same bytes and
 * tells clients. */
static void test_good(void) {
    static const size_t step[] = {1, 100, 1000, 65536};
    uint64_t n[N_EXPERT_TENSORS];
    uint32_t len;
    open_box(1u << 30);
    line l = stager(0), client = dial_in(1);
    hello_as(client, &src.m, TIER_ASKS);
    CHECK(heard(TIER_WELCOME, &len) && heard(TIER_RESIDENT, &len));
    expert_lengths(sv.m.latent, sv.m.inter, n);
    for (uint32_t i = 0; i < COUNT(step); i++) {
        uint32_t il = sv.m.n_dense + i, ie = 5 * i;
        fetch(il, ie);
        CHECK_EQ_INT(offer(l, il, ie), TIER_WANTS);
        CHECK_EQ_INT(sv.st.n_held, i);
        pieces(l, step[i]);
        CHECK_EQ_INT(commit(l, il, ie, expert_sum), TIER_HAS);
        CHECK_EQ_INT(offer(l, il, ie), TIER_HAS);
        int32_t at = sv.st.slot_of[index_of(&sv, il, ie)];
        CHECK(at != NONE && sv.st.slots[at].is_kept);
        for (uint64_t k = 0, from = 0; k < N_EXPERT_TENSORS; from += n[k++])
            CHECK_EQ_MEM(sv.st.slots[at].view.p[k], expert + from, n[k]);
        CHECK_EQ_INT(sv.st.n_held, i + 1);
        conn_tell(&sv, client.c);
        ssize_t got = recv(client.fd, back, sizeof back, MSG_DONTWAIT);
        n_back = got > 0 ? (size_t)got : 0;
        const uint8_t *p = heard(TIER_RESIDENT, &len);
        CHECK(p && tier_get16(p) == il && (p[4 + ie / 8] >> ie % 8 & 1));
        check_idle();
    }
    hang_up(client);
    hang_up(l);
    CHECK(sv.n_stagers == 0 && sv.n_clients == 0);
    CHECK_EQ_INT(sv.st.n_held, COUNT(step)); /* experts stay when the stager leaves */
    server_close(&sv);
}

/* Every wrong frame ends the connection, and the slot is free again. */
static void test_lies(void) {
    uint64_t n[N_EXPERT_TENSORS];
    uint32_t il = src.m.n_dense + 2, ie = 9;
    open_box(1u << 30);
    hang_up(stager(0));
    expert_lengths(sv.m.latent, sv.m.inter, n);
    for (int lie = 0; lie < 14; lie++) {
        line l = lie < 3 ? dial_in(0) : stager(0);
        fetch(il, ie);
        if (lie < 3) hello_as(l, &src.m, TIER_STAGES);
        n_back = 0;
        if (lie == 0) begin_as(l, NAN, src.math.linear_beta, src.expert_bytes);
        if (lie == 1) begin_as(l, src.math.beta, src.math.linear_beta, src.expert_bytes + 1);
        if (lie == 2) offer(l, il, ie); /* before it said begin */
        if (lie == 3)
            begin_as(l, src.math.beta, src.math.linear_beta, src.expert_bytes); /* twice */
        if (lie == 4) offer(l, il, src.m.n_experts);
        if (lie == 5) offer(l, src.m.n_dense - 1, ie);
        if (lie == 6) piece(l, 0, 100); /* a piece of no expert */
        if (lie == 7) commit(l, il, ie, expert_sum);
        if (lie > 7) CHECK_EQ_INT(offer(l, il, ie), TIER_WANTS);
        if (lie == 8) offer(l, il, ie + 1); /* while another expert is on its way */
        if (lie == 9) piece(l, 1, 100);
        if (lie == 10) piece(l, 0, src.expert_bytes + 1);
        if (lie == 11) commit(l, il, ie, expert_sum); /* too early */
        if (lie == 12) {
            pieces(l, 5000);
            commit(l, il, ie + 1, expert_sum);
        }
        if (lie == 13) say_frame(l, TIER_REQUEST, 16);
        CHECK(!is_open(l));
        if (is_open(l)) printf("    lie %d\n", lie);
        hang_up(l);
        check_idle();
    }
    CHECK_EQ_INT(sv.st.n_held, 0);
    CHECK_EQ_INT(sv.n_stagers, 0);
    for (int lie = 0; lie < 3; lie++) { /* refused with a reason */
        line l = stager(0);
        fetch(il, ie);
        uint64_t sum = expert_sum;
        if (lie == 2) { /* a scale code above 252, with the right sum */
            expert[n[W1_PACKED] + 3] = 253;
            sum = expert_sum = XXH3_64bits(expert, src.expert_bytes);
        }
        CHECK_EQ_INT(offer(l, il, ie), TIER_WANTS);
        if (lie == 0) expert[src.expert_bytes - 1] ^= 1;
        pieces(l, 4096);
        CHECK_EQ_INT(commit(l, il, ie, lie == 1 ? sum ^ 1 : sum), -1);
        CHECK(is_refused(lie < 2 ? "does not match its sum" : "scale code above 252"));
        CHECK(!is_open(l));
        hang_up(l);
        check_idle();
    }
    CHECK_EQ_INT(sv.st.n_held, 0);
    CHECK(sv.stats[TIER_STAT_BAD] >= 17);
    server_close(&sv);
}

/* A stager with another model than the first one's, one with other betas, and one too many. */
static void test_others(void) {
    tier_model other = src.m;
    line l[MAX_STAGERS + 1];
    uint32_t n;
    open_box(1u << 30);
    l[0] = stager(0);
    other.sampled++;
    l[1] = dial_in(1);
    hello_as(l[1], &other, TIER_STAGES);
    CHECK(is_refused("another model: fingerprint"));
    hang_up(l[1]);
    l[1] = dial_in(1);
    hello_as(l[1], &src.m, TIER_STAGES);
    CHECK(heard(TIER_WELCOME, &n) != NULL);
    begin_as(l[1], src.math.beta + 1, src.math.linear_beta, src.expert_bytes);
    CHECK(is_refused("SiTU"));
    hang_up(l[1]);
    for (uint32_t i = 1; i < MAX_STAGERS; i++) l[i] = stager(i);
    l[MAX_STAGERS] = dial_in(MAX_STAGERS);
    hello_as(l[MAX_STAGERS], &src.m, TIER_STAGES);
    CHECK(is_refused("four are staging"));
    for (uint32_t i = 0; i <= MAX_STAGERS; i++) hang_up(l[i]);
    CHECK_EQ_INT(sv.n_stagers, 0);
    server_close(&sv);
}

/* Two stagers bring the same expert; one stops in the middle; the box is full. */
static void test_busy(void) {
    uint32_t il = src.m.n_dense;
    open_box(1u << 30);
    line a = stager(0), b = stager(1);
    sv.st.n_slots = sv.st.n_free = 3;
    for (uint32_t i = 0; i < 3; i++) sv.st.free[i] = i;
    fetch(il, 4);
    CHECK_EQ_INT(offer(a, il, 4), TIER_WANTS);
    CHECK_EQ_INT(offer(b, il, 4), TIER_BUSY);
    piece(a, 0, 1000);
    conn_check_time(&sv, a.c, clock_ns() + 20000000000u);
    CHECK(is_open(a));
    conn_check_time(&sv, b.c, clock_ns() + 40000000000u); /* it owes no frame */
    CHECK(is_open(b));
    conn_check_time(&sv, a.c, clock_ns() + 40000000000u);
    CHECK(!is_open(a));
    hang_up(a);
    CHECK_EQ_INT(offer(b, il, 4), TIER_WANTS);
    pieces(b, 9000);
    CHECK_EQ_INT(commit(b, il, 4, expert_sum), TIER_HAS);
    for (uint32_t ie = 5; ie < 7; ie++) {
        fetch(il, ie);
        CHECK_EQ_INT(offer(b, il, ie), TIER_WANTS);
        pieces(b, 9000);
        CHECK_EQ_INT(commit(b, il, ie, expert_sum), TIER_HAS);
    }
    fetch(il, 7);
    CHECK_EQ_INT(offer(b, il, 7), TIER_FULL); /* staged experts are not evicted */
    fetch(il, 4);
    CHECK_EQ_INT(offer(b, il, 4), TIER_HAS);
    CHECK_EQ_INT(sv.st.n_evicted, 0);
    check_idle();
    hang_up(b);
    server_close(&sv);
}

/* Read all experts that are wanted, without threads. */
static void warm_all(void) {
    size_t i;
    int32_t i_slot;
    while (warm_next(&sv, &i, &i_slot)) {
        expert_view x;
        int rc = warm_read(&sv, sv.m.n_dense + (uint32_t)(i / sv.m.n_experts),
                           (uint32_t)(i % sv.m.n_experts),
                           sv.st.bytes + (uint64_t)i_slot * sv.st.slot_bytes, &x);
        warm_done(&sv, i, i_slot, rc, &x);
    }
}

/* A box with the model takes no bytes of it: it reads what is offered, evicts what hardly anybody
 * wants to make room, and says who offers another expert than its own. */
static void test_with_model(const char *dir) {
    uint32_t il = src.m.n_dense;
    uint8_t wish[4];
    uint64_t n[N_EXPERT_TENSORS];
    open_box(1u << 30);
    server_close(&sv);
    memset(&sv, 0, sizeof sv);
    sv.o = (options){.model_dir = dir, .ram = 1u << 30, .clients = 2, .threads = 1};
    sv.wake_fd = -1;
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(sources_open(&sv), DONE);
    sv.st.n_slots = sv.st.n_free = 2;
    for (uint32_t i = 0; i < 2; i++) sv.st.free[i] = i;
    tier_put16(wish, il);
    tier_put16(wish + 2, 1);
    for (int i = 0; i < 50; i++) store_wish(&sv, wish, 4); /* expert 1 is hot */
    line l = stager(0);
    for (uint32_t ie = 1; ie < 4; ie++) {
        if (ie == 3) sv.st.heat[index_of(&sv, il, 2)] = 0; /* offered, and not wanted since */
        fetch(il, ie);
        CHECK_EQ_INT(offer(l, il, ie), TIER_BUSY);
        warm_all();
        CHECK_EQ_INT(offer(l, il, ie), TIER_HAS);
        int32_t at = sv.st.slot_of[index_of(&sv, il, ie)];
        expert_lengths(sv.m.latent, sv.m.inter, n);
        for (uint64_t k = 0, from = 0; at != NONE && k < N_EXPERT_TENSORS; from += n[k++])
            CHECK_EQ_MEM(sv.st.slots[at].view.p[k], expert + from, n[k]);
    }
    CHECK_EQ_INT(sv.stats[TIER_STAT_STAGED], 0);
    CHECK(sv.st.slot_of[index_of(&sv, il, 1)] != NONE);
    CHECK(sv.st.slot_of[index_of(&sv, il, 2)] == NONE);
    CHECK(sv.st.slot_of[index_of(&sv, il, 3)] != NONE);
    CHECK_EQ_INT(sv.st.n_evicted, 1);
    CHECK(!sv.st.slots[0].is_kept && !sv.st.slots[1].is_kept);
    fetch(il, 3);
    expert_sum ^= 1; /* the same model by its fingerprint, another expert by its sum */
    CHECK_EQ_INT(offer(l, il, 3), -1);
    CHECK(is_refused("another model: expert 3 of layer"));
    CHECK(!is_open(l));
    hang_up(l);
    check_idle();
    l = stager(0);
    sv.st.heat[index_of(&sv, il, 4)] = -1.0f; /* its read has failed: staged bytes are taken ... */
    for (uint32_t i = 0; i < 2; i++) {
        sv.st.heat[index_of(&sv, il, i == 0 ? 1 : 3)] = 0;
        fetch(il, 4);
        CHECK_EQ_INT(offer(l, il, 4), TIER_FULL); /* ... but no other expert is evicted for them */
    }
    CHECK_EQ_INT(sv.st.n_evicted, 1);
    hang_up(l);
    server_close(&sv);
}

/* The first expert staged in a place stays: an offer of another one there ends the connection. */
static void test_another(void) {
    uint32_t il = src.m.n_dense;
    open_box(1u << 30);
    line l = stager(0);
    fetch(il, 4);
    CHECK_EQ_INT(offer(l, il, 4), TIER_WANTS);
    pieces(l, 9000);
    CHECK_EQ_INT(commit(l, il, 4, expert_sum), TIER_HAS);
    expert_sum ^= 1;
    CHECK_EQ_INT(offer(l, il, 4), -1);
    CHECK(is_refused("another model: expert 4 of layer"));
    hang_up(l);
    server_close(&sv);
}

/* ---- Rights ---- */

/* As dial_in(), but over TCP, where the peer is unknown. */
static line dial_in_tcp(uint32_t i) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof sa;
    line l = dial_in(i);
    int ear = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(ear, (void *)&sa, sizeof sa) == 0 && listen(ear, 1) == 0);
    CHECK(getsockname(ear, (void *)&sa, &n) == 0 && connect(fd, (void *)&sa, sizeof sa) == 0);
    close(l.fd);
    close(l.c->fd);
    l.c->fd = accept(ear, NULL, NULL);
    l.fd = fd;
    close(ear);
    return l;
}

static const tier_key ASK[2] = {{"an asker's, of thirty-two bytes.", 32},
                                {"another asker's, of 32 bytes too", 32}},
                      STAGE = {"a stager's, of thirty-two bytes.", 32};

/* As say_frame(), over a socket on which the frame and its answer come later; waits up to 0.2 s. */
static void say_slowly(line l, enum tier_type type, size_t n) {
    say_frame(l, type, n);
    for (int i = 0; i < 200 && n_back == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        if (is_open(l) && !l.c->has_frame && conn_fill(&sv, l.c) && l.c->has_frame)
            conn_act(&sv, l.c);
        ssize_t got = recv(l.fd, back, sizeof back, MSG_DONTWAIT);
        n_back = got > 0 ? (size_t)got : 0;
    }
}

/* Say hello in a role, with a key (NULL: none). The proof is bound to this connection, or, where
 * `lies`, to another. Returns true when the box says welcome. */
static bool is_let_in(line l, uint8_t role, const tier_key *key, bool lies) {
    uint32_t n;
    tier_talk talk = {.binding = {lies}};
    tier_hello_pack(talk.hello, &src.m, role, talk.nonce);
    memcpy(out, talk.hello, sizeof talk.hello);
    say_slowly(l, TIER_HELLO, sizeof talk.hello);
    const uint8_t *p = heard(TIER_CHALLENGE, &n);
    if (p && key) {
        CHECK_EQ_INT(n, TIER_CHALLENGE_BYTES);
        CHECK(tier_answer(key, &talk, p, n, out) == NULL);
        say_slowly(l, TIER_PROOF, TIER_PROOF_BYTES);
        p = heard(TIER_PROOF, &n);
        CHECK(!p || tier_believe(key, &talk, p, n) == NULL);
        if (!p) return false;
    } else if (p) {
        return false;
    }
    return heard(TIER_WELCOME, &n) != NULL;
}

/* Who may ask, who may stage, who may look. */
static void test_rights(const char *dir) {
    static const tier_key *const key[] = {NULL, &ASK[0], &ASK[1], &STAGE};
    static const struct {
        const char *why;
        uint32_t n_ask, n_stage;
        bool is_unix;
        const char *in[TIER_N_ROLES]; /* per role: for each of the keys above, is one let in */
    } box[] = {{"nothing given, TCP", 0, 0, false, {"yyyy", "yyyy", "nnnn"}},
               {"nothing given, unix", 0, 0, true, {"yyyy", "yyyy", "yyyy"}},
               {"a key, TCP", 1, 0, false, {"nynn", "nynn", "nnnn"}},
               {"two keys, TCP", 2, 0, false, {"nyyn", "nyyn", "nnnn"}},
               {"a key, unix", 1, 0, true, {"nynn", "nynn", "nynn"}},
               {"a key to stage, TCP", 0, 1, false, {"yyyy", "yyyy", "nnny"}},
               {"a key to stage, unix", 0, 1, true, {"yyyy", "yyyy", "nnny"}},
               {"keys for both, TCP", 2, 1, false, {"nyyn", "nyyy", "nnny"}},
               {"keys for both, unix", 2, 1, true, {"nyyn", "nyyy", "nnny"}}};
    memset(&sv, 0, sizeof sv);
    sv.o = (options){.model_dir = dir, .ram = 1u << 30, .clients = 2, .threads = 1};
    sv.wake_fd = -1;
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(sources_open(&sv), DONE);
    sv.key[KEY_ASKS][0] = ASK[0];
    sv.key[KEY_ASKS][1] = ASK[1];
    sv.key[KEY_STAGES][0] = STAGE;
    for (size_t i = 0; i < COUNT(box); i++)
        for (uint8_t role = 0; role < TIER_N_ROLES; role++)
            for (int k = 0; k < 4; k++) {
                sv.o.n_keys[KEY_ASKS] = box[i].n_ask;
                sv.o.n_keys[KEY_STAGES] = box[i].n_stage;
                line l = box[i].is_unix ? dial_in(0) : dial_in_tcp(0);
                bool is_in = is_let_in(l, role, key[k], false);
                if (is_in != (box[i].in[role][k] == 'y'))
                    printf("    %s, role %d, key %d\n", box[i].why, role, k);
                CHECK(is_in == (box[i].in[role][k] == 'y'));
                hang_up(l);
                l = dial_in(0);
                if (box[i].n_ask > 0) CHECK(!is_let_in(l, role, key[k], true));
                hang_up(l);
            }
    CHECK(sv.n_clients == 0 && sv.n_stagers == 0);
    sv.o.n_keys[KEY_ASKS] = sv.o.n_keys[KEY_STAGES] = 0;
    sv.o.stage_name = "somebody"; /* then nobody may stage without TLS, not even this user */
    line l = dial_in(0);
    CHECK(!is_let_in(l, TIER_STAGES, NULL, false));
    hang_up(l);
    server_close(&sv);
}

/* A client of another version is told what to do, in a frame of its own version. */
static void test_version(void) {
    open_box(1u << 30);
    for (int version = 0; version < 256; version += 1 + 84 * (version > 2)) {
        line l = dial_in(0);
        size_t n = tier_seal(frame, TIER_HELLO, 0, 104);
        frame[3] = (uint8_t)version;
        tier_put64(frame + 24, tier_sum(frame, 104));
        CHECK(send(l.fd, frame, n, MSG_NOSIGNAL) == (ssize_t)n);
        conn_fill(&sv, l.c);
        ssize_t got = recv(l.fd, back, sizeof back, MSG_DONTWAIT);
        if (version != TIER_VERSION) {
            CHECK(got > (ssize_t)TIER_HEAD_BYTES && back[3] == version && back[4] == TIER_REFUSE);
            CHECK(got == TIER_HEAD_BYTES + (ssize_t)tier_get32(back + 8));
            CHECK(tier_get64(back + 24) == tier_sum(back, tier_get32(back + 8)));
            CHECK(memmem(back, (size_t)got, "install the same release", 24) != NULL);
        }
        CHECK(version == TIER_VERSION || !is_open(l));
        hang_up(l);
    }
    server_close(&sv);
}

/* A box that keeps what comes wants a config.json that fits. */
static void test_keep(const char *dir) {
    char keep[] = "/tmp/k3-keep-XXXXXX", path[512];
    size_t n = 0;
    uint32_t len;
    snprintf(path, sizeof path, "%s/config.json", dir);
    char *config = slice_file_read(path, TIER_MAX_CONFIG, &n);
    CHECK(config && mkdtemp(keep));
    open_box(1u << 30);
    sv.o.keep_dir = keep;
    for (int i = 0; i < 5; i++) { /* config.json: none, cut short, other layers, other betas, right */
        char text[65536];
        size_t n_text = i == 0 ? 0 : i == 1 ? n / 2 : n;
        memcpy(text, config, n + 1);
        if (i == 2) memcpy(strstr(text, "\"num_hidden_layers\": 9") + 21, "8", 1);
        if (i == 3) memcpy(strstr(text, "\"activation_situ_beta\": 4.0") + 24, "5", 1);
        line l = dial_in(0);
        hello_as(l, &src.m, TIER_STAGES);
        CHECK(heard(TIER_WELCOME, &len) != NULL);
        memcpy(out, &src.math.beta, 4);
        memcpy(out + 4, &src.math.linear_beta, 4);
        tier_put64(out + 8, src.expert_bytes);
        memcpy(out + TIER_BEGIN_BYTES, text, n_text);
        say_frame(l, TIER_BEGIN, TIER_BEGIN_BYTES + n_text);
        if (i < 4)
            CHECK(is_refused(i ? "describes another than it brings" : "no config.json came"));
        snprintf(path, sizeof path, "%s/config.json", keep);
        CHECK_EQ_INT(access(path, F_OK), i < 4 ? -1 : 0);
        CHECK_EQ_INT(sv.has_model, i == 4);
        hang_up(l);
    }
    line l = stager(0);
    for (uint32_t ie = 0; ie < 5; ie++) {
        fetch(src.m.n_dense, ie);
        CHECK_EQ_INT(offer(l, src.m.n_dense, ie), TIER_WANTS);
        pieces(l, 9000);
        CHECK_EQ_INT(commit(l, src.m.n_dense, ie, expert_sum), TIER_HAS);
    }
    hang_up(l);
    server_close(&sv); /* writes what is left */
    memset(&sv, 0, sizeof sv);
    sv.o = (options){.keep_dir = keep, .stage_name = "somebody", .ram = 1u << 30, .clients = 1, .threads = 1};
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(sources_open(&sv), DONE);
    CHECK_EQ_INT(sv.st.n_readable, 5);
    CHECK(sv.m.sampled == src.m.sampled && sv.m.by_sums == src.m.by_sums && sv.list.n == 5);
    server_close(&sv);
    snprintf(path, sizeof path, "rm -r %s", keep);
    CHECK_EQ_INT(system(path), 0);
    free(config);
}

/* ---- The manifest ---- */

static size_t manifest(char *text, uint32_t version, uint32_t n) {
    slice s = {.version = version,
               .numerics = K3_NUMERICS_ID,
               .sampled = 0x0123456789abcdef,
               .by_sums = version > 1 ? 0xfedcba9876543210 : 0,
               .config_sum = 5,
               .n_layers = 9,
               .n_dense = 1,
               .n_experts = 32,
               .latent = 96,
               .inter = 64,
               .top_k = 4,
               .beta_bits = 0x40800000,
               .linear_beta_bits = 0x41c80000,
               .n = n};
    size_t at = slice_head_write(&s, text);
    for (uint32_t i = 0; i < n; i++)
        at += slice_expert_write(&(slice_expert){1 + i % 8, i / 8, 1000 + i}, text + at);
    return at + slice_end_write(text, at, text + at);
}

/* Make the manifest's end line right again after a change. Returns the new length. */
static size_t reseal(char *text, size_t n) {
    n -= 21; /* "end ", 16 digits, newline */
    return n + slice_end_write(text, n, text + n);
}

static bool is_taken(const char *text, size_t n, bool is_part) {
    slice s;
    size_t n_good = 0;
    char *copy = malloc(n + 1); /* its exact size, for the address sanitizer */
    if (!copy) return false;
    memcpy(copy, text, n);
    bool is = slice_parse(copy, n, is_part, &s, &n_good) == NULL;
    if (is && is_part) is = n_good <= n && s.n_done <= s.n;
    free(s.list);
    free(copy);
    return is;
}

static void test_manifest(void) {
    static char text[8192], bad[8192];
    char end[SLICE_LINE];
    slice s;
    size_t n = manifest(text, 2, 40);
    CHECK_EQ_INT(slice_end_write(text, 0, end), 21);
    CHECK_EQ_STR(end, "end 2d06800538d394c2\n"); /* XXH3-64 of nothing, as published */
    CHECK(slice_parse(text, n, false, &s, NULL) == NULL);
    CHECK(s.n == 40 && s.n_done == 40 && s.list[39].il == 8 && s.list[39].ie == 4 &&
          s.list[39].sum == 1039 && s.sampled == 0x0123456789abcdef &&
          s.by_sums == 0xfedcba9876543210);
    free(s.list);
    for (size_t i = 0; i < n; i++) { /* every shorter text, every changed byte */
        if (is_taken(text, i, false)) CHECK(!"a manifest cut short");
        memcpy(bad, text, n);
        bad[i] ^= 1;
        if (is_taken(bad, n, false)) CHECK(!"a damaged manifest");
    }
    memcpy(bad, text, n);
    bad[n] = '\n';
    CHECK(!is_taken(bad, n + 1, false));
    static const struct {
        const char *from, *to;
    } change[] = {{"k3-slice 2", "k3-slice 1"},       {"k3-slice 2", "k3-slice 3"},
                  {"cdef fed", "cdef Fed"},           {"cdef fed", "cdef\nfed"},
                  {"geometry 9 1 32", "geometry 9 9 32"},
                  {"experts 40", "experts 41"},       {"experts 40", "experts 00"},
                  {"\n1 0 000", "\n0 0 000"},         {"\n1 0 000", "\n9 0 000"},
                  {"\n1 0 000", "\n2 0 000"},         {"\n1 0 000", "\n+ 0 000"},
                  {"situ 40800000", "situ 4080000A"}, {"geometry 9", "geometry  "}};
    for (size_t i = 0; i < COUNT(change); i++) {
        memcpy(bad, text, n + 1);
        memcpy(strstr(bad, change[i].from), change[i].to, strlen(change[i].to));
        if (is_taken(bad, reseal(bad, n), false)) CHECK_EQ_STR(change[i].to, "refused");
    }
    size_t n_taken = 0; /* an unfinished manifest is good up to its last whole line */
    for (size_t i = 0; i < n - 21; i++) n_taken += is_taken(text, i, true);
    CHECK_EQ_INT(n_taken, n - 21 - (size_t)(strstr(text, "\n1 0 000") + 1 - text));
    n = manifest(text, 1, 40); /* as releases before wrote it */
    CHECK(slice_parse(text, n, false, &s, NULL) == NULL);
    CHECK(s.version == 1 && s.n == 40 && s.sampled == 0x0123456789abcdef && s.by_sums == 0);
    free(s.list);
    memcpy(strstr(text, "k3-slice 1"), "k3-slice 2", 10);
    CHECK(!is_taken(text, reseal(text, n), false));
}

int main(int argc, char **argv) {
    const char *dir = argc > 1 ? argv[1] : "demo";
    test_begin("stage");
    is_quiet = true;
    open_source(dir);
    test_hello();
    test_small_box();
    test_good();
    test_lies();
    test_others();
    test_busy();
    test_with_model(dir);
    test_another();
    test_rights(dir);
    test_version();
    test_keep(dir);
    test_manifest();
    server_close(&src);
    return test_finish();
}
