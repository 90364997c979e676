/* bench_tier.c - what a hop to a far box costs, part by part.
 *
 *     bench_tier MODEL_DIR [-n N] [-e] [-c CA] ADDR...    one table for each address, TSV on stdout
 *
 * For requests of 0, 1, 2, 3 and 16 experts of one row, and for a chain of three dependent requests
 * of one expert each: 200 to warm up, then N (default 10000), their p50, p95 and p99, and of the
 * medians what is spent packing, queued, computing, joining and on the way. The first row is the
 * yardstick: a bare ping-pong of the same bytes as the empty request, both ends spinning,
 * TCP_NODELAY on loopback. Ends with the number of requests in vain.
 * CA is who signed the certificates of tls: addresses; -e: empty requests and nothing else.
 * Includes the client; link k3.c and tier_dial.c.
 */
#include "../experts.h"

#include "../tier_client.c"

#include <sys/wait.h>

enum { WARM_UP = 200, MOST = 1000000 };

typedef struct {
    double total, pack, queue, compute, join;
} sample;

static sample *samples;
static size_t n_wanted = 10000;
static uint64_t last_queue, last_compute;
static tier *far;

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The q-quantile of one field. */
static double quantile(size_t field, double q) {
    static double v[MOST];
    for (size_t i = 0; i < n_wanted; i++)
        memcpy(&v[i], (const char *)&samples[i] + field, sizeof v[i]);
    qsort(v, n_wanted, sizeof *v, compare);
    size_t at = (size_t)(q * (double)n_wanted);
    return v[at < n_wanted ? at : n_wanted - 1] * 1e-3;
}

static void row_print(const char *addr, const char *what) {
    double mid[5];
    const size_t field[5] = {offsetof(sample, total), offsetof(sample, pack),
                             offsetof(sample, queue), offsetof(sample, compute),
                             offsetof(sample, join)};
    for (int i = 0; i < 5; i++) mid[i] = quantile(field[i], 0.5);
    printf("%s\t%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\n", addr, what, mid[0],
           quantile(0, 0.95), quantile(0, 0.99), mid[1], mid[2], mid[3], mid[4], mid[0] - mid[3]);
    fflush(stdout);
}

/* ---- The yardstick ---- */

static void spin_read(int fd, uint8_t *p, size_t n) {
    while (n > 0) {
        ssize_t got = recv(fd, p, n, MSG_DONTWAIT);
        if (got == 0) _exit(0);
        if (got < 0) continue;
        p += got;
        n -= (size_t)got;
    }
}

static int ping_pong(size_t n_out, size_t n_back) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof sa;
    static uint8_t buf[65536];
    int ear = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(ear, (struct sockaddr *)&sa, sizeof sa) != 0 || listen(ear, 1) != 0 ||
        getsockname(ear, (struct sockaddr *)&sa, &len) != 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        close(fd); /* or it would never see the end */
        int peer = accept(ear, NULL, NULL);
        tier_socket_tune(peer);
        for (;;) {
            spin_read(peer, buf, n_out);
            if (send(peer, buf, n_back, MSG_NOSIGNAL) < 0) _exit(0);
        }
    }
    if (connect(fd, (struct sockaddr *)&sa, sizeof sa) != 0) return -1;
    tier_socket_tune(fd);
    for (size_t i = 0; i < WARM_UP + n_wanted; i++) {
        uint64_t start = clock_ns();
        if (send(fd, buf, n_out, MSG_NOSIGNAL) < 0) return -1;
        spin_read(fd, buf, n_back);
        if (i >= WARM_UP) samples[i - WARM_UP] = (sample){.total = (double)(clock_ns() - start)};
    }
    close(fd);
    close(ear);
    waitpid(child, NULL, 0);
    return 0;
}

/* ---- The box ---- */

static void on_settled(void *user, uint32_t ie, bool is_served) {
    (void)ie;
    *(uint32_t *)user += !is_served;
}

/* One request of n experts; 0 asks for nothing and is answered all the same. */
static bool request(uint32_t il, uint32_t n, const float *z, int64_t *Q, sample *s) {
    static const uint32_t row[1] = {0};
    static const float w[1] = {0.25f};
    box *b = &far->boxes[0];
    uint32_t n_missing = 0, stride = far->m.n_experts / (n ? n : 1);
    uint64_t start = clock_ns(), sent;
    tier_begin(far);
    for (uint32_t i = 0; i < n; i++)
        if (!tier_ask(far, il, i * stride, 1, row, w)) return false;
    if (n > 0) {
        tier_send(far, z, start + 2000000000u);
    } else {
        if (!b->is_mine) return false;
        memset(b->place, 0xff, far->max_rows * sizeof *b->place);
        b->il = il;
        b->id = far->next_id++;
        b->is_out = true;
        far->deadline_ns = start + 2000000000u;
        box_begin_frame(b, TIER_REQUEST, b->id, box_write_request(b, z, 1000000));
    }
    sent = clock_ns();
    if (n > 0)
        tier_join(far, true, Q, on_settled, &n_missing);
    else
        while (b->is_out && b->is_mine && clock_ns() < far->deadline_ns) box_pump(b, Q, NULL, NULL);
    uint64_t end = clock_ns();
    tier_stats st;
    tier_stats_get(far, &st);
    last_queue = st.queue_ns;
    last_compute = st.compute_ns;
    *s = (sample){(double)(end - start), (double)(sent - start), (double)last_queue,
                  (double)last_compute, (double)(end - sent)};
    return n_missing == 0 && b->is_mine;
}

static uint64_t measure(const char *addr, uint32_t n, int n_chain, const float *z, int64_t *Q) {
    char what[32];
    uint64_t n_bad = 0;
    for (size_t i = 0; i < WARM_UP + n_wanted; i++) {
        sample sum = {0}, one = {0};
        for (int k = 0; k < n_chain; k++) {
            n_bad += !request(far->m.n_dense + (uint32_t)k % (far->m.n_layers - far->m.n_dense), n,
                              z, Q, &one);
            sum.total += one.total;
            sum.pack += one.pack;
            sum.queue += one.queue;
            sum.compute += one.compute;
            sum.join += one.join;
        }
        if (i >= WARM_UP) samples[i - WARM_UP] = sum;
    }
    snprintf(what, sizeof what, n_chain > 1 ? "%u experts, 3 in a chain" : "%u experts", n);
    row_print(addr, what);
    return n_bad;
}

int main(int argc, char **argv) {
    k3_options o;
    k3_engine *e;
    k3_error err;
    char why[400];
    tier_trust trust = {.flag = "--tier"};
    const char *ca = NULL;
    bool is_empty = false;
    int first = 2;
    for (; first + 1 < argc && argv[first][0] == '-'; first++) {
        if (strcmp(argv[first], "-e") == 0)
            is_empty = true;
        else if (strcmp(argv[first], "-n") == 0)
            n_wanted = strtoull(argv[++first], NULL, 10);
        else if (strcmp(argv[first], "-c") == 0)
            ca = argv[++first];
        else
            argc = 0;
    }
    if (argc <= first || n_wanted < 1 || n_wanted > MOST) {
        fprintf(stderr, "usage: bench_tier MODEL_DIR [-n N] [-e] [-c CA] ADDR...\n");
        return 2;
    }
    k3_options_default(&o);
    o.model_dir = argv[1];
    o.headers_only = true;
    if (k3_engine_open(&e, &o, &err) < 0) {
        fprintf(stderr, "bench_tier: %s\n", err.text);
        return 3;
    }
    const k3_shape *sh = k3_engine_shape(e);
    tier_model m = {K3_NUMERICS_ID, 0,          sh->n_layers,     sh->n_dense,
                    sh->n_experts,  sh->latent, sh->expert_inter, sh->top_k};
    if (k3_expert_fingerprint(e, &m.fingerprint, &err) < 0) return 1;
    samples = calloc(n_wanted, sizeof *samples);
    float *z = calloc(sh->latent, sizeof *z);
    int64_t *Q = calloc(sh->latent, sizeof *Q);
    for (uint32_t i = 0; i < sh->latent; i++) z[i] = (float)(i % 17) * 0.03125f - 0.25f;
    printf(
        "address\trequest\tp50_us\tp95_us\tp99_us\tpack\tqueue\tcompute\tjoin\tbeyond_compute\n");
    if (!is_empty &&
        ping_pong(TIER_HEAD_BYTES + TIER_FIXED_BYTES, TIER_HEAD_BYTES + TIER_FIXED_BYTES) == 0)
        row_print("loopback", "bare ping-pong");
    for (int i = first; i < argc; i++) {
        const char *boxes[2] = {argv[i], NULL};
        trust.ca = strncmp(argv[i], "tls:", 4) == 0 ? ca : NULL;
        tier_options to = {.boxes = boxes, .spin_us = 1000, .max_rows = 1, .trust = trust};
        void *block = calloc(1, tier_bytes(&m, &to));
        if (tier_open(&far, &m, &to, block, why, sizeof why) < 0) {
            fprintf(stderr, "bench_tier: %s\n", why);
            return 2;
        }
        for (int k = 0; k < 200 && !far->boxes[0].is_mine; k++) {
            usleep(10000);
            tier_begin(far);
        }
        uint64_t n_bad = 0;
        const uint32_t n_experts[] = {0, 1, 2, 3, 16};
        for (size_t k = 0; k < (is_empty ? 1 : sizeof n_experts / sizeof *n_experts); k++)
            if (n_experts[k] <= m.top_k) n_bad += measure(argv[i], n_experts[k], 1, z, Q);
        if (!is_empty) n_bad += measure(argv[i], 1, 3, z, Q);
        printf("# %s: %llu requests in vain\n", argv[i], (unsigned long long)n_bad);
        tier_close(far);
        free(block);
    }
    k3_engine_close(e);
    return 0;
}
