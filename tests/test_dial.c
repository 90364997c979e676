/* test_dial.c - links to far boxes: whole streams through full buffers, dials that are given up.
 *
 *     test_dial
 *
 * The other end is a thread that sends back what comes, over a bare socket or over tier_tls.c, which
 * is included. Both ends have small socket buffers, so that hardly a call takes all it is given, and
 * sleep only where the rules of the table allow it: bytes that are held back where poll does not see
 * them end a test as "asleep". The certificate is made here.
 */
#include "../tier_tls.c"
#include "test.h"

#include <openssl/x509v3.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <time.h>

enum { STREAM = 3 << 20, FEW = 15000, WAIT_MS = 3000, MANY = 8, UPDATES = 100 };

static char dir[64], cert[96], key[96];
static tier_trust trust, server_trust;
static tier_tls *tls;

static uint64_t clock_ms(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

/* ---- A certificate that signs itself, for localhost ---- */

static bool certificate_write(void) {
    EVP_PKEY *k = EVP_EC_gen("P-256");
    X509 *x = X509_new();
    X509_NAME *name = X509_get_subject_name(x);
    X509_EXTENSION *names =
        X509V3_EXT_conf_nid(NULL, NULL, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
    FILE *f = NULL;
    ASN1_INTEGER_set(X509_get_serialNumber(x), 1);
    X509_set_version(x, 2);
    X509_gmtime_adj(X509_getm_notBefore(x), -3600);
    X509_gmtime_adj(X509_getm_notAfter(x), 86400);
    X509_set_pubkey(x, k);
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const uint8_t *)"box", -1, -1, 0);
    X509_set_issuer_name(x, name);
    X509_add_ext(x, names, -1);
    bool is_ok = X509_sign(x, k, EVP_sha256()) > 0 && (f = fopen(cert, "w")) != NULL &&
                 PEM_write_X509(f, x) == 1 && fclose(f) == 0;
    umask(077);
    is_ok = is_ok && (f = fopen(key, "w")) != NULL &&
            PEM_write_PrivateKey(f, k, NULL, NULL, 0, NULL, NULL) == 1 && fclose(f) == 0;
    X509_EXTENSION_free(names);
    X509_free(x);
    EVP_PKEY_free(k);
    return is_ok;
}

/* ---- The other end ---- */

typedef struct {
    int ear, n_conns;
    bool is_tls, is_short; /* is_short: closes after its first bytes */
    char port[8];
    pthread_t thread;
} far_end;

typedef struct {
    int fd;
    bool is_tls, is_short;
} far_conn;

static void socket_shrink(int fd) {
    int room = 65536; /* with less TCP on loopback waits for its timers */
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
}

static ssize_t far_move(tier_tls_conn *c, int fd, uint8_t *p, size_t n, bool is_out) {
    if (c) return is_out ? tier_tls_send(c, p, n) : tier_tls_recv(c, p, n);
    ssize_t k = is_out ? send(fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, p, n, MSG_DONTWAIT);
    if (k < 0 && errno == EAGAIN) return 0;
    return k > 0 ? k : -1;
}

/* The far end: send back what comes, and read only when poll() or tier_tls_holds() says so. Now and
 * then it changes its keys. Both ends change theirs only where the near end has sent all that it
 * wants to: OpenSSL 3.0 answers a request for new keys inside its SSL_read, and when a write is
 * half done it takes that answer for a wrong retry ("bad length"). */
static void *far_echo(void *arg) {
    far_conn *f = arg;
    uint8_t buf[5003];
    size_t have = 0, done = 0, all = 0, next_keys = 100000;
    tier_tls_conn *c = f->is_tls ? tier_tls_accept(tls, f->fd) : NULL;
    socket_shrink(f->fd);
    for (;;) {
        ssize_t n = have > 0 ? far_move(c, f->fd, buf + done, have - done, true)
                             : far_move(c, f->fd, buf, sizeof buf, false);
        if (n < 0 || (n > 0 && f->is_short)) break;
        if (have == 0) {
            have = (size_t)n;
        } else if ((done += (size_t)n) == have) {
            all += have;
            have = done = 0;
        }
        if (have > 0 && n > 0) continue;
        if (c && have == 0 && all > next_keys) {
            SSL_key_update(c->ssl,
                           all >= STREAM ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED);
            next_keys = all < STREAM / 2 ? 2 * all : all + STREAM / 64;
        }
        if (c && have == 0 && tier_tls_holds(c)) continue;
        struct pollfd p = {f->fd, have > 0 ? POLLOUT : (short)(POLLIN | (c ? c->wants : 0)), 0};
        if (poll(&p, 1, 4 * WAIT_MS) <= 0) break; /* longer than the near end waits */
    }
    if (c) tier_tls_end(c);
    close(f->fd);
    free(f);
    return NULL;
}

/* The far end's thread ignores SIGPIPE, as k3-tier does; in the near end's threads SIGPIPE has its
 * default. */
static void *far_main(void *arg) {
    far_end *e = arg;
    pthread_t threads[MANY];
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    for (int i = 0; i < e->n_conns; i++) {
        far_conn *f = malloc(sizeof *f);
        *f = (far_conn){accept4(e->ear, NULL, NULL, SOCK_NONBLOCK), e->is_tls, e->is_short};
        pthread_create(&threads[i], NULL, far_echo, f);
    }
    for (int i = 0; i < e->n_conns; i++) pthread_join(threads[i], NULL);
    return NULL;
}

/* Start a far end that serves n_conns connections. With 0 it listens and never accepts. */
static void far_start(far_end *e, bool is_tls, int n_conns) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof sa;
    bool is_short = e->is_short;
    *e = (far_end){.ear = socket(AF_INET, SOCK_STREAM, 0), .n_conns = n_conns, .is_tls = is_tls};
    e->is_short = is_short;
    CHECK(bind(e->ear, (struct sockaddr *)&sa, n) == 0 && listen(e->ear, MANY) == 0 &&
          getsockname(e->ear, (struct sockaddr *)&sa, &n) == 0);
    snprintf(e->port, sizeof e->port, "%d", ntohs(sa.sin_port));
    pthread_create(&e->thread, NULL, far_main, e);
}

static void far_stop(far_end *e) {
    pthread_join(e->thread, NULL);
    close(e->ear);
}

static tier_addr address(const far_end *e) {
    tier_addr a = {.is_tls = e->is_tls, .host = "localhost"};
    memcpy(a.port, e->port, sizeof e->port);
    return a;
}

/* ---- Streams ---- */

static uint8_t pattern(size_t i) { return (uint8_t)(i * 2654435761u >> 13 ^ i >> 16); }

/* Send `total` bytes while they come back. Returns NULL, or what went wrong. Up to FEW bytes go in
 * one piece. */
static const char *stream_run(tier_link *l, size_t total) {
    static __thread uint8_t out[70000], in[5001];
    size_t n_out = 0, at = 0, len = 0, n_in = 0;
    uint64_t seed = 9;
    while (n_in < total) {
        if (at == len && n_out < total) { /* the next piece, of any size */
            len = total <= FEW ? total : 1 + test_random(&seed) % sizeof out % (total - n_out);
            n_out += len;
            for (size_t i = at = 0; i < len; i++) out[i] = pattern(n_out - len + i);
        }
        ssize_t put = at < len ? l->by->send(l, out + at, len - at) : 0;
        if (put < 0) return l->why;
        at += (size_t)put;
        ssize_t got = l->by->recv(l, in, 1 + test_random(&seed) % sizeof in);
        if (got < 0) return l->why;
        for (ssize_t i = 0; i < got; i++)
            if (in[i] != pattern(n_in++)) return "another byte came back";
        if (put > 0 || got > 0) continue;
        uint64_t until = (clock_ms() + WAIT_MS) * 1000000u;
        if (!tier_link_wait(l, POLLIN | (at < len ? POLLOUT : 0), until, NULL, NULL))
            return "asleep";
    }
    return l->by->recv(l, in, sizeof in) == 0 ? NULL : "more than was sent";
}

/* A long stream, then turns, in each of which one record is read in many pieces. */
static const char *streams_run(tier_link *l) {
    const char *why = stream_run(l, STREAM);
    for (int i = 0; i < 20 && !why; i++) why = stream_run(l, FEW);
    return why;
}

static void test_stream(bool is_tls) {
    far_end e = {.is_short = false};
    tier_link l;
    far_start(&e, is_tls, 1);
    tier_addr a = address(&e);
    if (CHECK_EQ_INT(tier_dial(&l, &a, &trust, WAIT_MS, NULL, NULL), 0)) {
        socket_shrink(l.fd);
        const char *why = streams_run(&l);
        CHECK_EQ_STR(why ? why : "", "");
        l.by->close(&l);
    } else {
        printf("    %s\n", l.why);
    }
    far_stop(&e);
}

static void *many_main(void *arg) {
    tier_link l;
    const char *why = tier_dial(&l, arg, &trust, WAIT_MS, NULL, NULL) < 0 ? l.why : streams_run(&l);
    if (why) printf("    %s\n", why);
    if (l.by) l.by->close(&l);
    return why ? "" : NULL;
}

/* Many streams at once, each in a thread of its own. */
static void test_many(bool is_tls) {
    far_end e = {.is_short = false};
    pthread_t threads[MANY];
    far_start(&e, is_tls, MANY);
    tier_addr a = address(&e);
    for (int i = 0; i < MANY; i++) pthread_create(&threads[i], NULL, many_main, &a);
    for (int i = 0; i < MANY; i++) {
        void *bad = NULL;
        pthread_join(threads[i], &bad);
        CHECK(!bad);
    }
    far_stop(&e);
}

/* The far end closes while the near end sends: that is the end of the link and raises no signal.
 * SIGPIPE has its default here. */
static void test_gone(bool is_tls) {
    static uint8_t bytes[4096];
    far_end e = {.is_short = true};
    tier_link l;
    sigset_t pending;
    far_start(&e, is_tls, 1);
    tier_addr a = address(&e);
    CHECK_EQ_INT(tier_dial(&l, &a, &trust, WAIT_MS, NULL, NULL), 0);
    ssize_t n = 0;
    for (uint64_t end = clock_ms() + WAIT_MS; n >= 0 && clock_ms() < end;) {
        n = l.by->send(&l, bytes, sizeof bytes);
        usleep(1000);
    }
    CHECK_EQ_INT(n, -1);
    CHECK(l.why[0] != 0);
    l.by->close(&l);
    CHECK(sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE));
    far_stop(&e);
}

/* Send one key update after another, then a byte: a server that otherwise says nothing. */
static void *updates_main(void *arg) {
    far_end *e = arg;
    uint8_t byte;
    int fd = accept(e->ear, NULL, NULL);
    tier_tls_conn *c = tier_tls_accept(tls, fd);
    for (int i = 0; i < 2 * WAIT_MS && tier_tls_recv(c, &byte, 1) == 0; i++) usleep(500);
    for (int i = 0; i < UPDATES; i++) {
        SSL_key_update(c->ssl, SSL_KEY_UPDATE_NOT_REQUESTED);
        SSL_do_handshake(c->ssl);
    }
    tier_tls_send(c, &byte, 1);
    for (int i = 0; i < 2 * WAIT_MS && tier_tls_recv(c, &byte, 1) == 0; i++) usleep(500);
    tier_tls_end(c);
    close(fd);
    return NULL;
}

/* A call takes one record, also one without data. Otherwise a peer that sends such records without
 * end would keep the call for ever. */
static void test_updates(void) {
    far_end e = {.is_short = false};
    tier_link l;
    uint8_t byte = 7;
    int n_calls = 0, n_here = 0, n_before = -1;
    far_start(&e, true, 0);
    pthread_join(e.thread, NULL);
    pthread_create(&e.thread, NULL, updates_main, &e);
    tier_addr a = address(&e);
    if (CHECK_EQ_INT(tier_dial(&l, &a, &trust, WAIT_MS, NULL, NULL), 0)) {
        CHECK_EQ_INT(l.by->send(&l, &byte, 1), 1);
        for (int i = 0; i < 50 && (n_here == 0 || n_here > n_before); i++) { /* until no more comes */
            n_before = n_here;
            usleep(100000);
            CHECK(ioctl(l.fd, FIONREAD, &n_here) == 0);
        }
        for (; l.by->recv(&l, &byte, 1) == 0 && n_calls < 5000; n_calls++)
            if (n_calls > UPDATES) usleep(1000);
        CHECK(n_calls >= UPDATES && n_calls < 5000);
        l.by->close(&l);
    }
    far_stop(&e);
}

/* ---- Dials that come to nothing ---- */

static bool stops_after(void *user) { return clock_ms() > *(uint64_t *)user; }

static void test_stop(void) {
    far_end e = {.is_short = false};
    tier_link l;
    far_start(&e, true, 0);
    tier_addr a = address(&e);
    uint64_t start = clock_ms(), until = start + 50;
    CHECK_EQ_INT(tier_dial(&l, &a, &trust, 20000, stops_after, &until), -1);
    CHECK(clock_ms() - start < 1000);
    start = clock_ms();
    CHECK_EQ_INT(tier_dial(&l, &a, &trust, 200, NULL, NULL), -1);
    CHECK(clock_ms() - start >= 150 && clock_ms() - start < 1500);
    CHECK_EQ_STR(l.why, "no answer to the dial");
    far_stop(&e);
    CHECK_EQ_INT(tier_dial(&l, &a, &trust, WAIT_MS, NULL, NULL), -1);
    CHECK_EQ_STR(l.why, "Connection refused");
    CHECK(!l.was_there);
    a = (tier_addr){.is_unix = true, .path = "/nowhere/at all"};
    CHECK_EQ_INT(tier_dial(&l, &a, &trust, WAIT_MS, NULL, NULL), -1);
    CHECK_EQ_STR(l.why, "No such file or directory");
}

static int count_fds(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* A far end with another certificate is refused. */
static void test_distrust(void) {
    far_end e = {.is_short = false};
    tier_link l;
    tier_trust other = trust;
    other.ca = NULL; /* the system's authorities */
    far_start(&e, true, 1);
    tier_addr a = address(&e);
    CHECK_EQ_INT(tier_dial(&l, &a, &other, WAIT_MS, NULL, NULL), -1);
    CHECK(l.was_there && strstr(l.why, "give who signed it with --tier-ca"));
    far_stop(&e);
}

int main(void) {
    char why[400];
    test_begin("dial");
    snprintf(dir, sizeof dir, "%s/k3-dial-XXXXXX", P_tmpdir);
    if (!CHECK(mkdtemp(dir) != NULL)) return test_finish();
    snprintf(cert, sizeof cert, "%s/cert.pem", dir);
    snprintf(key, sizeof key, "%s/key.pem", dir);
    CHECK(certificate_write());
    trust = (tier_trust){.ca = cert, .flag = "--tier"};
    server_trust = (tier_trust){.cert = cert, .key = key, .flag = "--tls"};
    CHECK_EQ_INT(tier_tls_open(&tls, &server_trust, why, sizeof why), 0);
    test_stream(false); /* from here on everything that libraries open once is open */
    int before = count_fds();
    test_many(false);
    test_gone(false);
    if (tier_dial_has_tls()) {
        test_stream(true);
        before = count_fds();
        test_many(true);
        test_gone(true);
        test_updates();
        test_stop();
        test_distrust();
    } else {
        SKIP("TLS: built without libcurl");
    }
    CHECK_EQ_INT(count_fds(), before);
    tier_tls_close(tls);
    unlink(cert);
    unlink(key);
    rmdir(dir);
    return test_finish();
}
