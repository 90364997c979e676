/* test_vram.c - experts in slots, in VRAM, in both: nothing is lost, counted twice or told wrongly.
 *
 *     test_vram DEMO_DIR [N_STEPS]
 *
 * tier_server.c is included and fake_gpu.c plays the device. Requests, wishes, reads that end later,
 * uploads, staging and a device that fails come in random order; after each step the store is held
 * against what must be true of it, and sums against a computation that knows nothing of slots.
 */
#define TIER_SERVER_TEST
#include "../tier_server.c"
#include "test.h"

#define N_ROWS 3
#define N_ITEMS 12
#define N_COMING 3
#define N_LAYERS 2 /* layers that requests are of: most experts they ask for are then held */

static server sv;
static uint8_t *bytes; /* [n_all][expert_bytes]: every expert, read once */
static size_t n_all;
static uint64_t seed = 3;

static uint32_t below(uint64_t n) { return (uint32_t)(test_random(&seed) % n); }

/* ---- A box with a number of slots of either kind ---- */

static void open_server(const char *dir, uint32_t n_slots, uint32_t n_vram) {
    memset(&sv, 0, sizeof sv);
    sv.o =
        (options){.model_dir = dir, .ram = 2ull << 30, .clients = 1, .threads = 1, .has_gpu = true};
    sv.wake_fd = -1;
    is_quiet = true;
    pthread_mutex_init(&sv.st.lock, NULL);
    pthread_cond_init(&sv.st.work, NULL);
    CHECK_EQ_INT(model_open(&sv), DONE);
    sv.o.vram = n_vram * gpu_slot_bytes(sv.m.latent, sv.m.inter);
    CHECK_EQ_INT(memory_open(&sv), DONE);
    CHECK_EQ_INT(sv.st.n_vram, n_vram);
    sv.st.n_slots = sv.st.n_free = n_slots;
    for (uint32_t i = 0; i < n_slots; i++) sv.st.free[i] = i;
    n_all = (size_t)sv.n_moe * sv.m.n_experts;
    for (size_t i = 0; i < n_all; i++) /* these can only be staged */
        if (i % 5 == 0 || i >= N_LAYERS * sv.m.n_experts) sv.st.heat[i] = -1.0f;
}

static void end_server(void) {
    server_close(&sv);
    gpu_close(sv.gpu); /* the server leaves a lost device open: closing a real one might hang */
}

static void read_all(const char *dir) {
    uint8_t *room;
    expert_view x;
    k3_error err = {{0}};
    uint64_t n[N_EXPERT_TENSORS];
    open_server(dir, 1, 1);
    expert_lengths(sv.m.latent, sv.m.inter, n);
    bytes = malloc(n_all * sv.expert_bytes);
    if (!bytes || posix_memalign((void **)&room, 4096, k3_expert_room(sv.e)) != 0) abort();
    for (size_t i = 0; i < n_all; i++) {
        uint8_t *to = bytes + i * sv.expert_bytes;
        CHECK_EQ_INT(k3_expert_read(sv.e, sv.m.n_dense + (uint32_t)(i / sv.m.n_experts),
                                    (uint32_t)(i % sv.m.n_experts), room, &x, &err),
                     0);
        for (int k = 0; k < N_EXPERT_TENSORS; to += n[k++]) memcpy(to, x.p[k], n[k]);
    }
    free(room);
    end_server();
}

static expert_view view_at(const uint8_t *p) {
    expert_view x;
    uint64_t n[N_EXPERT_TENSORS];
    expert_lengths(sv.m.latent, sv.m.inter, n);
    for (int k = 0; k < N_EXPERT_TENSORS; p += n[k++]) x.p[k] = p;
    return x;
}

/* ---- What must be true ---- */

typedef struct {
    size_t i;
    int32_t i_slot;
    bool is_staged;
} coming;

static coming on_its_way[N_COMING];
static uint32_t n_coming;
static item pinned[N_ITEMS]; /* items of a request that is still running */
static uint32_t n_pinned, il_pinned;

static void check_store(const char *after) {
    const store *st = &sv.st;
    static uint8_t is_used[4096];
    uint32_t n_held = 0, n_twice = 0, n_vram = 0, n_slots = 0, wrong = 0, n_pins = 0;
    memset(is_used, 0, sizeof is_used);
    for (size_t i = 0; i < n_all; i++) {
        uint32_t l = (uint32_t)(i / sv.m.n_experts), ie = (uint32_t)(i % sv.m.n_experts);
        int32_t a = st->slot_of[i], b = st->vram_of[i];
        bool told = st->held[l * tier_map_bytes(sv.m.n_experts) + ie / 8] >> ie % 8 & 1;
        n_held += a != NONE || b != NONE;
        n_twice += a != NONE && b != NONE;
        n_vram += b != NONE;
        n_slots += a != NONE;
        wrong += told != (a != NONE || b != NONE);
        if (a != NONE) {
            const slot *x = &st->slots[a];
            wrong += a < 0 || a >= (int32_t)st->n_slots || is_used[a]++ > 0;
            wrong += index_of(&sv, x->il, x->ie) != i;
            wrong += memcmp(x->view.p[0], bytes + i * sv.expert_bytes, 64) != 0;
        }
        if (b != NONE)
            wrong += b < 0 || b >= (int32_t)st->n_vram || !st->vram[b].is_full ||
                     st->vram[b].index != i || !st->has_vram;
        if (a != NONE) wrong += st->is_coming[i];
    }
    for (uint32_t k = 0; k < st->n_free; k++) wrong += is_used[st->free[k]]++ > 0;
    for (uint32_t k = 0; k < n_coming; k++) wrong += is_used[on_its_way[k].i_slot]++ > 0;
    for (uint32_t v = 0; v < st->n_vram; v++) {
        n_pins += st->vram[v].pins;
        wrong += st->vram[v].is_full && st->vram_of[st->vram[v].index] != (int32_t)v;
    }
    for (uint32_t a = 0; a < st->n_slots; a++) n_pins += st->slots[a].pins;
    for (uint32_t k = 0; k < n_pinned; k++) { /* items in use stay where they are */
        const item *it = &pinned[k];
        size_t i = index_of(&sv, il_pinned, it->ie);
        n_pins -= (it->i_slot != NONE) + (it->i_vram != NONE);
        wrong += it->i_slot != NONE && st->slot_of[i] != it->i_slot;
        wrong += it->i_vram != NONE && st->has_vram && st->vram_of[i] != it->i_vram;
    }
    wrong += n_held != st->n_held || n_twice != st->n_twice || n_vram != st->n_in_vram;
    wrong +=
        n_slots + st->n_free + n_coming != st->n_slots || n_held > capacity(&sv) || n_pins != 0;
    if (wrong) printf("    after %s:\n", after);
    CHECK_EQ_INT(wrong, 0);
}

/* ---- A request and its sums ---- */

/* Q += the terms of one expert, none when one of them is out of range. */
static bool add_expert(int64_t *Q, size_t i, const float *z, const uint32_t *row, const float *w,
                       uint32_t n) {
    size_t lat = sv.m.latent;
    int64_t *sum = calloc(N_ROWS * lat, 8);
    expert_math m = sv.math;
    expert_view x = view_at(bytes + i * sv.expert_bytes);
    float *scratch = aligned_alloc(64, (expert_one_floats(&m) * 4 + 63) / 64 * 64);
    bool is_good = true;
    m.k = &k3_kernels_ref;
    for (uint32_t j = 0; j < n; j++)
        is_good = expert_one(&m, &x, z + row[j] * lat, w[j], sum + row[j] * lat, scratch) && is_good;
    for (size_t k = 0; is_good && k < N_ROWS * lat; k++) Q[k] += sum[k];
    free(scratch);
    free(sum);
    return is_good;
}

/* Choose n different experts of a layer, in ascending order. */
static uint32_t some_experts(uint32_t *ie, uint32_t n) {
    uint32_t got = 0;
    for (uint32_t e = 0; e < sv.m.n_experts && got < n; e++)
        if (below(sv.m.n_experts - e) < n - got) ie[got++] = e;
    return got;
}

static void step_request(void) {
    static uint8_t in[1 << 16], out[1 << 16];
    static int64_t Q[N_ROWS * 4096];
    size_t lat = sv.m.latent;
    uint32_t n_rows = 1 + below(N_ROWS), l = below(N_LAYERS), ie[N_ITEMS], n_pairs = 0, n_sure = 0;
    uint32_t n =
        some_experts(ie, 1 + below(n_rows * sv.m.top_k < N_ITEMS ? n_rows * sv.m.top_k : N_ITEMS));
    uint32_t count[N_ITEMS], row[N_ITEMS][N_ROWS];
    float w[N_ITEMS][N_ROWS], *z = (float *)(void *)(in + TIER_FIXED_BYTES);
    bool here[N_ITEMS];
    tier_request r;
    tier_reply a = {.n_rows = 0};
    for (uint32_t x = 0; x < n; x++) {
        count[x] = n * n_rows <= n_rows * sv.m.top_k ? 1 + below(n_rows) : 1;
        for (uint32_t j = 0; j < count[x]; j++) {
            row[x][j] = j;
            w[x][j] = below(40) ? (float)below(1000) * 0x1p-10f : 1e30f; /* some are out of range (NUMERICS 5) */
        }
        n_pairs += count[x];
        here[x] = store_has(&sv.st, l * sv.m.n_experts + ie[x]);
        n_sure += here[x];
    }
    memset(in, 0, TIER_FIXED_BYTES);
    tier_put16(in, sv.m.n_dense + l);
    tier_put16(in + 2, n_rows);
    tier_put16(in + 4, n);
    tier_put32(in + 8, n_pairs);
    for (size_t i = 0; i < n_rows * lat; i++) z[i] = (float)((int)below(2000) - 1000) * 0x1p-8f;
    uint8_t *to = in + TIER_FIXED_BYTES + n_rows * lat * 4;
    for (uint32_t x = 0; x < n; x++, to += 4) tier_put16(to, ie[x]), tier_put16(to + 2, count[x]);
    for (uint32_t x = 0; x < n; x++)
        for (uint32_t j = 0; j < count[x]; j++, to += 4) memcpy(to, &w[x][j], 4);
    for (uint32_t x = 0; x < n; x++)
        for (uint32_t j = 0; j < count[x]; j++, to += 2) tier_put16(to, row[x][j]);
    const char *why = tier_request_parse(&sv.m, TIER_MAX_ROWS, in, (size_t)(to - in), &r);
    CHECK_EQ_STR(why ? why : "", "");
    if (why) return;
    bool had_vram = sv.st.has_vram;
    sv.cpu_ns = (float)below(3); /* so that CPU and GPU share the work in different ways */
    sv.gpu_time = (trend){.n = (float)below(2), .x = 1, .y = (float)below(3)};
    size_t len = compute_request(&sv, &r, (const float *)(const void *)r.z, false, out);
    CHECK(tier_reply_parse(&sv.m, out, len, &a) == NULL);
    memset(Q, 0, sizeof Q);
    for (uint32_t x = 0; x < n; x++) {
        size_t i = l * sv.m.n_experts + ie[x];
        bool is_in = a.served[x / 8] >> x % 8 & 1;
        bool is_good = is_in ? add_expert(Q, i, z, row[x], w[x], count[x]) : true;
        CHECK(is_good && (here[x] || !is_in));
        if (here[x] && !is_in &&
            !getenv("FAKE_GPU_BAD")) { /* out of range, or lost with the device */
            static int64_t none[N_ROWS * 4096];
            bool is_lost = had_vram && !sv.st.has_vram && sv.st.slot_of[i] == NONE;
            CHECK(is_lost || !add_expert(none, i, z, row[x], w[x], count[x]));
        }
    }
    if (a.n_rows > 0)
        CHECK_EQ_MEM(a.sums, Q, n_rows * lat * 8);
    else
        CHECK(n_sure < n || n_sure > 0);
}

/* ---- Steps ---- */

static void step_pin(void) {
    uint32_t ie[N_ITEMS];
    if (n_pinned > 0) {
        store_unpin(&sv, pinned, n_pinned);
        n_pinned = 0;
        return;
    }
    n_pinned = some_experts(ie, 1 + below(N_ITEMS));
    il_pinned = sv.m.n_dense + below(N_LAYERS);
    for (uint32_t k = 0; k < n_pinned; k++) {
        pinned[k] = (item){.ie = ie[k], .task.n = 1 + below(40)};
        store_pin(&sv, il_pinned, &pinned[k]);
    }
}

static void step_wish(void) {
    uint8_t wish[4];
    tier_put16(wish, sv.m.n_dense + below(N_LAYERS));
    tier_put16(wish + 2, below(sv.m.n_experts));
    for (uint32_t k = 1 + below(30); k-- > 0;) store_wish(&sv, wish, 4);
}

static void step_read(void) {
    if (n_coming == N_COMING) return;
    coming *c = &on_its_way[n_coming];
    pthread_mutex_lock(&sv.st.lock);
    if (warm_next(&sv, &c->i, &c->i_slot)) {
        CHECK(!store_has(&sv.st, c->i) && sv.st.heat[c->i] >= 0);
        c->is_staged = false;
        n_coming++;
    }
    pthread_mutex_unlock(&sv.st.lock);
}

/* Offer expert i with its own sum; *i_slot is its slot. */
static enum tier_verdict room_for(size_t i, int32_t *i_slot) {
    enum tier_verdict v;
    uint64_t sum = XXH3_64bits(bytes + i * sv.expert_bytes, sv.expert_bytes);
    CHECK(stage_room(&sv, i, sum, i_slot, &v));
    return v;
}

static void step_offer(void) {
    if (n_coming == N_COMING) return;
    coming *c = &on_its_way[n_coming];
    c->i = below(N_LAYERS * sv.m.n_experts);
    if (room_for(c->i, &c->i_slot) != TIER_WANTS) return;
    CHECK(sv.st.heat[c->i] < 0); /* experts that this box can read are never taken from others */
    c->is_staged = true;
    n_coming++;
}

/* End one of the reads on their way: the expert arrives, or the read fails. */
static void step_arrive(void) {
    if (n_coming == 0) return;
    uint32_t k = below(n_coming);
    coming c = on_its_way[k];
    on_its_way[k] = on_its_way[--n_coming];
    uint8_t *room = sv.st.bytes + (uint64_t)c.i_slot * sv.st.slot_bytes;
    bool is_good = below(20) > 0;
    if (is_good) memcpy(room, bytes + c.i * sv.expert_bytes, sv.expert_bytes);
    expert_view x = view_at(room);
    conn dropped = {.stage = {.is_taking = true, .expert = c.i, .i_slot = c.i_slot}};
    if (!c.is_staged) {
        pthread_mutex_lock(&sv.st.lock);
        warm_done(&sv, c.i, c.i_slot, is_good ? 0 : -1, &x);
        pthread_mutex_unlock(&sv.st.lock);
    } else if (is_good) {
        stage_done(&sv, c.i, c.i_slot, &x, 0);
    } else {
        stage_drop(&sv, &dropped);
    }
}

static void step_upload(void) {
    uint32_t i_slot, i_vram;
    pthread_mutex_lock(&sv.st.lock);
    if (sv.st.has_vram && vram_next(&sv, &i_slot, &i_vram))
        vram_fill(&sv, &sv.st.slots[i_slot], i_vram);
    pthread_mutex_unlock(&sv.st.lock);
}

static void step_pins(void) {
    if (sv.st.n_pins == 0) {
        for (uint32_t k = 0; k < 4; k++)
            sv.st.pins[k] = 1 + below(4) + 5 * below(N_LAYERS * sv.m.n_experts / 5 - 1);
        sv.st.n_pins = 4;
    }
    if (below(50) == 0) sv.st.i_pin = sv.st.n_pins = 0;
}

static void test_steps(const char *dir, uint32_t n_slots, uint32_t n_vram, uint64_t n_steps) {
    static const struct {
        void (*run)(void);
        const char *name;
        uint32_t weight;
    } step[] = {{step_request, "a request", 5}, {step_pin, "pins", 4},
                {step_wish, "a wish", 4},       {step_read, "a read", 8},
                {step_offer, "an offer", 2},    {step_arrive, "an arrival", 9},
                {step_upload, "an upload", 6},  {step_pins, "--pins", 1}};
    uint32_t total = 0, n_lost = 0;
    for (size_t k = 0; k < COUNT(step); k++) total += step[k].weight;
    open_server(dir, n_slots, n_vram);
    sv.st.is_filling = n_steps % 2;
    for (uint64_t t = 0; t < n_steps; t++) {
        uint32_t at = below(total);
        size_t k = 0;
        for (; at >= step[k].weight; k++) at -= step[k].weight;
        step[k].run();
        check_store(step[k].name);
        if (below(500) == 0) store_cool(&sv);
        n_lost += !sv.st.has_vram;
    }
    CHECK(n_lost < n_steps || !getenv("FAKE_GPU_BAD"));
    if (n_pinned > 0) step_pin();
    while (n_coming > 0) step_arrive();
    check_store("the end");
    CHECK(sv.stats[TIER_STAT_SERVED] > 0 && sv.stats[TIER_STAT_GPU_SERVED] > 0);
    end_server();
}

/* ---- Who waits is woken ---- */

/* Put expert i into a slot. */
static void put(size_t i) {
    expert_view x;
    int32_t i_slot;
    bool is_own = sv.st.heat[i] >= 0;
    if (is_own) i_slot = warm_slot(&sv, sv.st.heat[i] = STAGE_HEAT);
    if (!is_own) CHECK_EQ_INT(room_for(i, &i_slot), TIER_WANTS);
    uint8_t *room = sv.st.bytes + (uint64_t)i_slot * sv.st.slot_bytes;
    memcpy(room, bytes + i * sv.expert_bytes, sv.expert_bytes);
    x = view_at(room);
    if (is_own) {
        sv.st.slots[i_slot].is_kept = false;
        warm_done(&sv, i, i_slot, 0, &x);
    } else {
        stage_done(&sv, i, i_slot, &x, 0);
    }
}

static bool is_true(bool (*is)(void)) {
    for (int k = 0; k < 400; k++) {
        pthread_mutex_lock(&sv.st.lock);
        bool now = is();
        pthread_mutex_unlock(&sv.st.lock);
        if (now) return true;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return false;
}

static bool is_vram_full(void) { return sv.st.n_in_vram == sv.st.n_vram; }
static bool is_1_in_vram(void) { return sv.st.vram_of[1] != NONE; }
static bool is_2_in_slot(void) { return sv.st.slot_of[2] != NONE; }

static void stop(pthread_t thread) {
    pthread_mutex_lock(&sv.st.lock);
    sv.st.is_stopping = true;
    pthread_cond_broadcast(&sv.st.work);
    pthread_mutex_unlock(&sv.st.lock);
    pthread_join(thread, NULL);
    end_server();
}

/* An expert in a slot that is asked for again and again moves into VRAM, though none is missing. */
static void test_hits(const char *dir) {
    pthread_t thread;
    open_server(dir, 8, 2);
    for (uint32_t i = 0; i < 8; i++) sv.st.heat[i] = 0.0f;
    for (uint32_t i = 0; i < 8; i++) put(i);
    CHECK(pthread_create(&thread, NULL, vram_main, &sv) == 0);
    CHECK(is_true(is_vram_full));
    CHECK(!is_1_in_vram());
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL); /* until the thread sleeps */
    for (int k = 0; k < 60; k++) {
        item it = {.ie = 1, .task.n = 3};
        CHECK(store_pin(&sv, sv.m.n_dense, &it));
        store_unpin(&sv, &it, 1);
    }
    CHECK(is_true(is_1_in_vram));
    stop(thread);
}

/* A read that waits for the only slot, which is in use, comes as soon as the slot is free. */
static void test_unpin(const char *dir) {
    pthread_t thread;
    item it = {.ie = 1, .task.n = 1};
    uint8_t wish[4];
    open_server(dir, 1, 1);
    put(1);
    CHECK(store_pin(&sv, sv.m.n_dense, &it));
    tier_put16(wish, sv.m.n_dense);
    tier_put16(wish + 2, 2);
    for (int k = 0; k < 100; k++) store_wish(&sv, wish, 4);
    CHECK(pthread_create(&thread, NULL, warm_main, &sv) == 0);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    CHECK_EQ_INT(sv.st.slot_of[2], NONE);
    store_unpin(&sv, &it, 1);
    CHECK(is_true(is_2_in_slot));
    stop(thread);
}

/* Experts that --pins names are read again after the device was lost, and take the slots of others. */
static void test_pins(const char *dir) {
    size_t i;
    int32_t i_slot;
    open_server(dir, 1, 1);
    sv.st.pins[0] = 7;
    sv.st.n_pins = 1;
    CHECK(warm_next(&sv, &i, &i_slot) && i == 7);
    uint8_t *room = sv.st.bytes + (uint64_t)i_slot * sv.st.slot_bytes;
    memcpy(room, bytes + i * sv.expert_bytes, sv.expert_bytes);
    expert_view x = view_at(room);
    warm_done(&sv, i, i_slot, 0, &x);
    step_upload();
    CHECK(sv.st.vram_of[7] != NONE);
    put(3);
    CHECK(sv.st.slot_of[7] == NONE && sv.st.slot_of[3] != NONE);
    CHECK(!warm_next(&sv, &i, &i_slot));
    vram_off(&sv, "lost");
    CHECK(warm_next(&sv, &i, &i_slot) && i == 7);
    CHECK(sv.st.slot_of[3] == NONE);
    end_server();
}

/* ---- Experts in both memories: does CPU or GPU compute them? ---- */

/* Of 16 experts that lie in both memories, how many does the CPU take? */
static uint32_t shared_out(void) {
    item items[16];
    uint32_t n = 0;
    for (int x = 0; x < 16; x++) items[x] = (item){.task.n = 1, .i_slot = x, .i_vram = x};
    sv.mem.items = items;
    vram_share(&sv, 16);
    for (int x = 0; x < 16; x++) n += !items[x].on_gpu;
    sv.mem.items = NULL;
    return n;
}

/* Add to the averages a GPU that takes 30 us and 5 us for each of n_gpu experts. */
static void measure(uint32_t n_gpu) {
    trend_add(&sv.gpu_time, (float)n_gpu, 30000.0f + 5000.0f * (float)n_gpu);
}

static void test_share(void) {
    memset(&sv, 0, sizeof sv);
    CHECK_EQ_INT(shared_out(), 0); /* no time was measured yet */
    sv.cpu_ns = 45000.0f;
    measure(16);
    CHECK_EQ_INT(shared_out(), 2); /* 90 us against 96, if only experts took time */
    for (int i = 0; i < 60; i++) measure(16 - shared_out());
    CHECK_EQ_INT(shared_out(), 2); /* 90 against 100; 3 would be 135 against 95 */
    sv.cpu_ns = 60000.0f;
    CHECK_EQ_INT(shared_out(), 1);
    trend_add(&sv.gpu_time, 16, 2e6f); /* one slow request: the CPU must take more, and not for long */
    CHECK(shared_out() > 2);
    for (int i = 0; i < 150; i++) measure(16 - shared_out());
    CHECK_EQ_INT(shared_out(), 1);
    sv.cpu_ns = 1.0f; /* a CPU that is faster takes all but one, for else the GPU were never measured */
    CHECK_EQ_INT(shared_out(), 15);
    sv.cpu_ns = 1e6f;
    CHECK_EQ_INT(shared_out(), 0);
    memset(&sv, 0, sizeof sv);
}

/* Slots full of experts that VRAM is about to take are no reason to refuse an offer. */
static void test_staging(const char *dir) {
    conn c = {.state = C_STAGE, .stage = {.has_begun = true}};
    uint8_t in[TIER_HEAD_BYTES] = {[4] = TIER_OFFER};
    int32_t i_slot;
    c.in = in;
    open_server(dir, 1, 2);
    CHECK(!stage_must_wait(&sv, &c));
    put(0);
    CHECK(stage_must_wait(&sv, &c));
    step_upload();
    CHECK(!stage_must_wait(&sv, &c));
    put(5);
    CHECK(stage_must_wait(&sv, &c));
    step_upload();
    put(10);
    CHECK(!stage_must_wait(&sv, &c)); /* no room in VRAM or slots */
    CHECK_EQ_INT(room_for(15, &i_slot), TIER_FULL);
    CHECK_EQ_INT(sv.st.n_held, 3);
    end_server();
}

int main(int argc, char **argv) {
    const char *dir = argc > 1 ? argv[1] : "demo";
    uint64_t n = argc > 2 ? strtoull(argv[2], NULL, 10) : 3000;
    static const char *const fault[] = {NULL, "FAKE_GPU_END", "FAKE_GPU_BEGIN", "FAKE_GPU_UPLOAD",
                                        "FAKE_GPU_BAD"};
    test_begin("tier_vram");
    read_all(dir);
    for (size_t k = 0; k < COUNT(fault); k++) {
        if (fault[k]) setenv(fault[k], "40", 1);
        test_steps(dir, 10, 20, n + k);
        test_steps(dir, 12, 9, n + k + 1);
        if (fault[k]) unsetenv(fault[k]);
    }
    test_steps(dir, 1, 1, n + 1);
    test_hits(dir);
    test_unpin(dir);
    test_pins(dir);
    test_staging(dir);
    test_share();
    free(bytes);
    return test_finish();
}
