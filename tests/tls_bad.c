/* tls_bad.c - speaks TLS badly on purpose, as a box or as a client.
 *
 *     tls_bad box PORT CERT KEY TARGET_PATH MODE     a box, or a proxy before the one at TARGET_PATH
 *     tls_bad client PORT MODE                       many clients of the box at PORT
 *
 * Everything that is said is valid TLS, and frames are sealed: only how much of it there is, when it
 * comes and in which pieces is wrong. Ends on SIGTERM; a box has one child for each client.
 *
 *   box     early-update  after the handshake one key update after another
 *           early-bytes   after the handshake news without end, a byte a record
 *   The others pass the hello and all frames, and begin with the first request:
 *           update        one key update after another
 *           bytes         news without end, a byte a record
 *           flip          whole frames of news that take each other back, without end
 *           empty         whole frames of no news, without end
 *           late          each answer comes at nine tenths of its time, and serves nothing
 *           endless       a frame that is a byte longer every 10 ms
 *   client  update        key updates before any hello
 *           bytes         a hello, then figures asked for, a byte a record
 *           looks         key updates after the welcome of one who looks
 *           cut           a ClientHello of 60 KB, a byte a record, over and over
 */
#define TIER_WIRE
#include "../tier.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

enum { ROOM = 1 << 22, CLIENTS = 6 };

static const char *mode;

static bool is_mode(const char *name) { return strcmp(mode, name) == 0; }

static int die(const char *what) {
    perror(what);
    return 1;
}

static void sleep_us(uint64_t us) {
    struct timespec ts = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000 * 1000)};
    nanosleep(&ts, NULL);
}

static int tcp_socket(int port, bool listens) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    int rc = listens ? bind(fd, (struct sockaddr *)&sa, sizeof sa) || listen(fd, 16)
                     : connect(fd, (struct sockaddr *)&sa, sizeof sa);
    if (rc == 0) return fd;
    close(fd);
    return -1;
}

static int unix_connect(const char *path) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(sa.sun_path, path, sizeof sa.sun_path - 1);
    return connect(fd, (struct sockaddr *)&sa, sizeof sa) == 0 ? fd : -1;
}

/* Write all n bytes; when the connection ends, the process ends. */
static void tls_write(SSL *s, const void *p, size_t n) {
    if (SSL_write(s, p, (int)n) != (int)n) _exit(0);
}

/* ---- What the modes do ---- */

static void updates(SSL *s) {
    while (SSL_key_update(s, SSL_KEY_UPDATE_NOT_REQUESTED) == 1 && SSL_do_handshake(s) == 1) {
    }
    _exit(0);
}

/* Make a resident frame for layer 1 of a model of 32 experts: all of them, or none. */
static size_t news(uint8_t *f, bool is_full) {
    memset(f + TIER_HEAD_BYTES, 0, 8);
    tier_put16(f + TIER_HEAD_BYTES, 1);
    memset(f + TIER_HEAD_BYTES + 4, is_full ? 0xff : 0, 4);
    return tier_seal(f, TIER_RESIDENT, 0, 8);
}

static void bytes(SSL *s, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) tls_write(s, p + i, 1);
}

static void news_bytes(SSL *s) {
    uint8_t f[64];
    for (bool is_full = false;; is_full = !is_full) bytes(s, f, news(f, is_full));
}

static void floods(SSL *s, bool is_empty) {
    static uint8_t many[256 * 40];
    size_t n = 0;
    for (int i = 0; i < 256; i++)
        n += is_empty ? tier_seal(many + n, TIER_RESIDENT, 0, 0) : news(many + n, i & 1);
    for (;;) tls_write(s, many, n);
}

/* Answer request `f` at nine tenths of the time that it gives, with no expert in the answer. */
static void late(SSL *s, const uint8_t *f) {
    uint8_t reply[256] = {0}, *p = reply + TIER_HEAD_BYTES;
    const uint8_t *q = f + TIER_HEAD_BYTES;
    size_t n = TIER_FIXED_BYTES + tier_served_bytes(tier_get16(q + 4));
    tier_put16(p, tier_get16(q));
    tier_put16(p + 4, tier_get16(q + 4));
    sleep_us(tier_get32(q + 12) * 9ull / 10);
    tls_write(s, reply, tier_seal(reply, TIER_REPLY, tier_get64(f + 16), (uint32_t)n));
}

static void endless(SSL *s) {
    uint8_t f[TIER_HEAD_BYTES + 4096] = {0};
    tier_seal(f, TIER_RESIDENT, 0, 56); /* seven layers, the longest of the demo */
    for (size_t i = 0; i < TIER_HEAD_BYTES + 55; i++) {
        tls_write(s, f + i, 1);
        sleep_us(10000);
    }
    for (;;) sleep_us(1000000);
}

/* ---- A box ---- */

static void on_request(SSL *s, const uint8_t *f) {
    if (is_mode("late")) late(s, f);
    if (is_mode("update")) updates(s);
    if (is_mode("bytes")) news_bytes(s);
    if (is_mode("flip") || is_mode("empty")) floods(s, is_mode("empty"));
    if (is_mode("endless")) endless(s);
}

/* Handle frames of the client: requests are answered here, other frames go to the box. Returns how
 * many of the n bytes are left. */
static size_t from_client(SSL *s, int box, uint8_t *p, size_t n) {
    while (n >= TIER_HEAD_BYTES) {
        size_t all = TIER_HEAD_BYTES + tier_get32(p + 8);
        if (n < all) break;
        if (p[4] == TIER_REQUEST)
            on_request(s, p);
        else if (send(box, p, all, MSG_NOSIGNAL) != (ssize_t)all)
            _exit(0);
        memmove(p, p + all, n -= all);
    }
    return n;
}

static void proxy(SSL *s, int client, int box) {
    static uint8_t in[ROOM], out[ROOM];
    size_t n_in = 0;
    while (box >= 0) {
        struct pollfd p[2] = {{.fd = client, .events = POLLIN}, {.fd = box, .events = POLLIN}};
        if (!SSL_pending(s) && poll(p, 2, -1) < 0) return;
        if (SSL_pending(s) || p[0].revents) {
            int n = SSL_read(s, in + n_in, (int)(ROOM - n_in));
            if (n <= 0) return;
            n_in = from_client(s, box, in, n_in + (size_t)n);
        }
        if (p[1].revents) {
            ssize_t n = recv(box, out, sizeof out, 0);
            if (n <= 0) return;
            tls_write(s, out, (size_t)n);
        }
    }
}

static void box_client(SSL_CTX *ctx, int fd, const char *target) {
    SSL *s = SSL_new(ctx);
    SSL_set_fd(s, fd);
    if (SSL_accept(s) != 1) return;
    if (is_mode("early-update")) updates(s);
    if (is_mode("early-bytes")) news_bytes(s);
    proxy(s, fd, unix_connect(target));
}

static int box_main(char **argv) {
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    int ear = tcp_socket(atoi(argv[2]), true);
    mode = argv[6];
    if (ear < 0) return die("listen");
    if (SSL_CTX_use_certificate_chain_file(ctx, argv[3]) != 1 ||
        SSL_CTX_use_PrivateKey_file(ctx, argv[4], SSL_FILETYPE_PEM) != 1)
        return die(argv[3]);
    for (;;) {
        int one = 1, fd = accept(ear, NULL, NULL);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0) return die("accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (fork() == 0) {
            box_client(ctx, fd, argv[5]);
            _exit(0);
        }
        close(fd);
    }
}

/* ---- Clients ---- */

/* A ClientHello of 60 KB as records of a byte; whoever reads it must read 60,000 of them. */
static void cut(SSL_CTX *ctx, int fd) {
    static uint8_t names[60000], record[70000], small[6 * 70000];
    SSL *s = SSL_new(ctx);
    BIO *to = BIO_new(BIO_s_mem());
    for (size_t i = 0; i < sizeof names; i += 250) {
        names[i] = 249;
        memset(names + i + 1, 'x', 249);
    }
    SSL_set_alpn_protos(s, names, sizeof names);
    SSL_set_bio(s, BIO_new(BIO_s_mem()), to);
    SSL_connect(s);
    int n = BIO_read(to, record, sizeof record);
    size_t n_small = 0;
    for (int at = 0; at + 5 <= n;) { /* each record's payload, apart */
        int len = record[at + 3] << 8 | record[at + 4];
        for (int i = at + 5; i < at + 5 + len && i < n; i++, n_small += 6)
            memcpy(small + n_small, (uint8_t[6]){0x16, 3, 1, 0, 1, record[i]}, 6);
        at += 5 + len;
    }
    SSL_free(s);
    for (size_t at = 0; at < n_small;) {
        ssize_t put = send(fd, small + at, n_small - at, MSG_NOSIGNAL);
        if (put <= 0) return;
        at += (size_t)put;
    }
    sleep_us(20000);
}

static size_t look(uint8_t *f) {
    const tier_model none = {.numerics = ""};
    uint8_t nonce[TIER_NONCE_BYTES] = {0};
    tier_hello_pack(f + TIER_HEAD_BYTES, &none, TIER_LOOKS, nonce);
    return tier_seal(f, TIER_HELLO, 0, TIER_HELLO_BYTES);
}

static void client(SSL_CTX *ctx, int fd) {
    uint8_t f[TIER_HEAD_BYTES + TIER_HELLO_BYTES], back[256];
    if (is_mode("cut")) {
        cut(ctx, fd);
        return;
    }
    SSL *s = SSL_new(ctx);
    SSL_set_fd(s, fd);
    if (SSL_connect(s) != 1) return;
    if (is_mode("update")) updates(s);
    tls_write(s, f, look(f));
    if (SSL_read(s, back, sizeof back) <= 0) return;
    if (is_mode("looks")) updates(s);
    size_t n = tier_seal(f, TIER_STATS, 0, 0);
    for (;;) { /* the answers are read, so that the box goes on */
        bytes(s, f, n);
        while (SSL_has_pending(s) || poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 0) > 0)
            if (SSL_read(s, back, sizeof back) <= 0) return;
    }
}

static int client_main(char **argv) {
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    mode = argv[3];
    for (int i = 0; i < CLIENTS; i++)
        if (fork() == 0) {
            for (;;) {
                if (getppid() == 1) _exit(0);
                int fd = tcp_socket(atoi(argv[2]), false);
                pid_t pid = fd < 0 ? -1 : fork();
                if (pid == 0) {
                    client(ctx, fd);
                    _exit(0);
                }
                if (pid > 0) waitpid(pid, NULL, 0);
                if (fd >= 0) close(fd);
                sleep_us(fd < 0 ? 50000 : 1000);
            }
        }
    for (;;) pause();
}

static void on_term(int number) {
    (void)number;
    kill(0, SIGKILL);
}

int main(int argc, char **argv) {
    bool is_box = argc == 7 && strcmp(argv[1], "box") == 0,
         is_client = argc == 4 && strcmp(argv[1], "client") == 0;
    if (!is_box && !is_client) {
        fprintf(stderr, "usage: tls_bad box PORT CERT KEY TARGET_PATH MODE | client PORT MODE\n");
        return 2;
    }
    setpgid(0, 0); /* its children end with it */
    signal(SIGTERM, on_term);
    signal(SIGPIPE, SIG_IGN);
    if (is_box) signal(SIGCHLD, SIG_IGN);
    return is_box ? box_main(argv) : client_main(argv);
}
