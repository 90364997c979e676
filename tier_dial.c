/* tier_dial.c - the way to a far box: dialling, and a table of calls for what was dialled.
 *
 *   1 Plain sockets               3 libcurl: names, proxies, TLS
 *   2 Certificates and keys       4 Without it
 *
 * What holds everywhere:
 *   - nothing is printed, no signal is raised, no call but tier_dial and tier_link_wait waits;
 *   - a tls: address is TLS 1.3 with the box's certificate and name checked, or it is no connection.
 */
#include "tier_dial.h"

#include <limits.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <strings.h>
#include <time.h>

enum {
    STOP_MS = 100,     /* how soon a wait sees a stop          */
    TLS_PIECE = 65536, /* most bytes of one call that encrypts */
    MAX_PEM = 1 << 20  /* bytes of a file of certificates      */
};

/* Say why, in one printable line, since some of it may come from strangers. Returns -1. */
__attribute__((format(printf, 2, 3))) static int link_fail(tier_link *l, const char *fmt, ...) {
    char text[sizeof l->why];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    tier_text(l->why, sizeof l->why, (const uint8_t *)text, strlen(text));
    return -1;
}

/* ==== 1. Plain sockets =============================================================== */

static ssize_t plain_send(tier_link *l, const void *p, size_t n) {
    for (;;) {
        ssize_t put = send(l->fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (put >= 0) return put;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
        if (errno != EINTR) return link_fail(l, "the connection broke: %s", strerror(errno));
    }
}

static ssize_t plain_recv(tier_link *l, void *p, size_t n) {
    for (;;) {
        ssize_t got = recv(l->fd, p, n, MSG_DONTWAIT);
        if (got > 0) return got;
        if (got == 0) return link_fail(l, "closed the connection");
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
        if (errno != EINTR) return link_fail(l, "%s", strerror(errno));
    }
}

static void plain_close(tier_link *l) { close(l->fd); }

static const tier_transport PLAIN = {plain_send, plain_recv, plain_close};

void tier_link_plain(tier_link *l, int fd) {
    memset(l, 0, sizeof *l);
    l->by = &PLAIN;
    l->fd = fd;
}

const char *tier_link_binding(const tier_link *l, uint8_t out[TIER_BINDING_BYTES]) {
    memset(out, 0, TIER_BINDING_BYTES);
    if (l->is_tls && !l->is_bound)
        return "the key cannot be tied to this TLS connection: OpenSSL gives no exporter for it";
    if (l->is_tls) memcpy(out, l->binding, TIER_BINDING_BYTES);
    return NULL;
}

static int fd_wait(int fd, short events, uint64_t until_ns, tier_stop_fn stops, void *user) {
    for (;;) {
        uint64_t now = clock_ns();
        if (now >= until_ns || (stops && stops(user))) return 0;
        uint64_t ms = (until_ns - now) / 1000000u + 1;
        struct pollfd p = {.fd = fd, .events = events};
        if (poll(&p, 1, ms < STOP_MS ? (int)ms : STOP_MS) > 0) return 1;
    }
}

int tier_link_wait(const tier_link *l, short events, uint64_t until_ns, tier_stop_fn stops,
                   void *user) {
    if (l->holds && (events & POLLIN)) return clock_ns() < until_ns && !(stops && stops(user));
    return fd_wait(l->fd, events, until_ns, stops, user);
}

/* ==== 2. Certificates and keys =======================================================
 *
 * Looked at when the program starts, so that a wrong file is an error then and not a box that is
 * away. Who uses them reads them again: certificates are renewed while programs run. */

/* A key under a passphrase: nobody is here to be asked for it. */
static int no_passphrase(char *text, int size, int is_writing, void *user) {
    (void)text, (void)size, (void)is_writing, (void)user;
    return -1;
}

/* A regular file of at most MAX_PEM bytes, in memory; NULL, or why not. */
static BIO *pem_read(const char *path, struct stat *st, const char **why) {
    BIO *bio = NULL;
    char *bytes = NULL;
    ssize_t got = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    *why = strerror(errno);
    if (fd < 0) return NULL;
    if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode))
        *why = "not a regular file";
    else if (st->st_size > MAX_PEM)
        *why = "longer than 1 MiB";
    else if ((bytes = malloc(MAX_PEM)) == NULL || (got = read(fd, bytes, MAX_PEM)) < 0)
        *why = strerror(errno);
    else if ((bio = BIO_new(BIO_s_mem())) == NULL ||
             (got > 0 && BIO_write(bio, bytes, (int)got) != got))
        *why = "no memory";
    if (got > 0) OPENSSL_cleanse(bytes, (size_t)got);
    free(bytes);
    close(fd);
    return bio;
}

/* The first certificate of a file; NULL, or why not. */
static X509 *pem_cert(const char *path, const char **why) {
    struct stat st;
    BIO *bio = pem_read(path, &st, why);
    X509 *x = bio ? PEM_read_bio_X509(bio, NULL, no_passphrase, NULL) : NULL;
    if (bio && !x) *why = "no certificate in PEM";
    BIO_free(bio);
    return x;
}

static const char no_key[] = "no private key in PEM without a passphrase";

/* The key of a file that only its owner may read. */
static EVP_PKEY *pem_key(const char *path, const char **why) {
    struct stat st;
    BIO *bio = pem_read(path, &st, why);
    EVP_PKEY *k = bio ? PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL) : NULL;
    if (bio && !k) *why = no_key;
    BIO_free(bio);
    if (!k || !(st.st_mode & 077)) return k;
    *why = "a key, and others may read it; chmod 600";
    EVP_PKEY_free(k);
    return NULL;
}

int tier_trust_check(const tier_trust *t, char *why, size_t n_why) {
    const char *fault = NULL, *key_path = t->key ? t->key : t->cert;
    X509 *ca = NULL, *cert = NULL;
    EVP_PKEY *key = NULL;
    int rc = -1;
    if (t->key && !t->cert)
        snprintf(why, n_why, "%s-key %s: give its certificate too, with %s-cert", t->flag, t->key,
                 t->flag);
    else if (t->ca && !(ca = pem_cert(t->ca, &fault)))
        snprintf(why, n_why, "%s-ca %s: %s", t->flag, t->ca, fault);
    else if (t->cert && !(cert = pem_cert(t->cert, &fault)))
        snprintf(why, n_why, "%s-cert %s: %s", t->flag, t->cert, fault);
    else if (t->cert && !(key = pem_key(key_path, &fault)))
        snprintf(why, n_why, "%s-%s %s: %s%s", t->flag, t->key ? "key" : "cert", key_path, fault,
                 fault == no_key && !t->key ? "; if it is elsewhere, give that file as well" : "");
    else if (t->cert && X509_check_private_key(cert, key) != 1)
        snprintf(why, n_why, "%s-key %s: not the key of the certificate in %s", t->flag, key_path,
                 t->cert);
    else
        rc = 0;
    X509_free(ca);
    X509_free(cert);
    EVP_PKEY_free(key);
    ERR_clear_error();
    return rc;
}

#ifdef K3_CURL
/* ==== 3. libcurl =====================================================================
 *
 * CURLOPT_CONNECT_ONLY: libcurl resolves, connects, asks the proxy for a tunnel, shakes hands, and
 * stops there. The multi interface, so that a dial is given up when the client closes.
 */
#ifdef __has_include
#if !__has_include(<curl/curl.h>)
#error "libcurl is missing: scripts/deps.sh build; or make CURL=0, without TLS and proxies"
#endif
#endif
#include <curl/curl.h>

bool tier_dial_has_tls(void) { return true; }

/* ---- SIGPIPE: libcurl's TLS writes with write() ---- */

static void pipe_block(sigset_t *old) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, old);
}

/* With `is_bad` a signal may have come, and was ours. */
static void pipe_unblock(const sigset_t *old, bool is_bad) {
    const struct timespec none = {0, 0};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    if (is_bad && !sigismember(old, SIGPIPE))
        while (sigtimedwait(&set, NULL, &none) < 0 && errno == EINTR) {
        }
    pthread_sigmask(SIG_SETMASK, old, NULL);
}

/* ---- The table for TLS ---- */

/* Why an open connection ended. TLS 1.3 tells a client only now that its certificate will not do. */
static int tls_over(tier_link *l) {
    static const struct {
        const char *said, *means;
    } alert[] = {{"certificate required", "the box wants a certificate of ours: give"},
                 {"unknown ca", "the box does not know who signed our certificate: give another"},
                 {"certificate expired", "our certificate has expired: renew the one given with"},
                 {"alert bad certificate", "the box will not have our certificate: give another"}};
    for (size_t i = 0; i < sizeof alert / sizeof *alert; i++)
        if (strstr(l->detail, alert[i].said))
            return link_fail(l, "%s %s-cert", alert[i].means, l->flag);
    return link_fail(l, "the connection broke: %s", l->detail[0] ? l->detail : "no reason given");
}

static ssize_t tls_send(tier_link *l, const void *p, size_t n) {
    size_t put = 0;
    sigset_t old;
    pipe_block(&old);
    CURLcode rc = curl_easy_send(l->curl, p, n < TLS_PIECE ? n : TLS_PIECE, &put);
    pipe_unblock(&old, rc != CURLE_OK);
    if (rc == CURLE_OK) return (ssize_t)put;
    return rc == CURLE_AGAIN ? 0 : tls_over(l);
}

/* While nothing is held back, a look at the socket is all that an idle call costs. One call decrypts
 * one record (on_ssl_ctx); of a record without data it says AGAIN, and more may lie behind. */
static ssize_t tls_recv(tier_link *l, void *p, size_t n) {
    size_t got = 0;
    uint8_t first;
    sigset_t old;
    bool is_there = recv(l->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 ||
                    (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    if (!l->holds && !is_there) return 0;
    pipe_block(&old);
    CURLcode rc = curl_easy_recv(l->curl, p, n, &got);
    pipe_unblock(&old, rc != CURLE_OK);
    l->holds = rc == CURLE_OK ? got > 0 : rc == CURLE_AGAIN && is_there;
    if (got > 0) return (ssize_t)got;
    if (rc == CURLE_OK) return link_fail(l, "closed the connection");
    return rc == CURLE_AGAIN ? 0 : tls_over(l);
}

static void curl_free_both(tier_link *l) {
    sigset_t old;
    pipe_block(&old);
    if (l->curls && l->curl) curl_multi_remove_handle(l->curls, l->curl);
    curl_easy_cleanup(l->curl);
    if (l->curls) curl_multi_cleanup(l->curls);
    pipe_unblock(&old, true);
    l->curl = l->curls = NULL;
}

/* Shut first: then libcurl finds nobody to say a long goodbye to. */
static void tls_close(tier_link *l) {
    shutdown(l->fd, SHUT_RDWR);
    curl_free_both(l);
}

static const tier_transport TLS = {tls_send, tls_recv, tls_close};

/* ---- Dialling ---- */

static int i_link = -1; /* OpenSSL's number for the link of an SSL_CTX; set once, before any dial */

static void curl_start(void) {
    curl_global_init(CURL_GLOBAL_DEFAULT);
    i_link = SSL_CTX_get_ex_new_index(0, NULL, NULL, NULL, NULL);
}

/* A handshake is over. Of two, with a proxy that speaks TLS, the box's comes last. */
static void on_handshake(const SSL *ssl, int where, int value) {
    tier_link *l = SSL_CTX_get_ex_data(SSL_get_SSL_CTX(ssl), i_link);
    (void)value;
    if (!(where & SSL_CB_HANDSHAKE_DONE) || !l || l->by) return; /* by: dialled, and known */
    l->is_bound = SSL_export_keying_material((SSL *)(uintptr_t)ssl, l->binding, sizeof l->binding,
                                             TIER_BINDING, strlen(TIER_BINDING), NULL, 0, 0) == 1;
}

static int on_socket(void *user, curl_socket_t fd, curlsocktype purpose) {
    (void)user, (void)purpose;
    tier_socket_tune(fd);
    return CURL_SOCKOPT_OK;
}

/* What a proxy says besides the tunnel is nobody's business. */
static size_t on_bytes(char *p, size_t size, size_t n, void *user) {
    (void)p, (void)user;
    return size * n;
}

/* May a proxy be spoken to over TLS? Then a plain connection through it is libcurl's to encrypt. */
static bool has_tls_proxy(void) {
    static const char *const name[] = {"http_proxy", "all_proxy", "ALL_PROXY"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *v = getenv(name[i]);
        if (v && strncasecmp(v, "https:", 6) == 0) return true;
    }
    return false;
}

/* Whom to dial and through whom. False: libcurl will not, and must not dial another. */
static bool curl_set_place(CURL *h, const tier_addr *a) {
    char url[sizeof a->host + 64], host[sizeof a->host + 8];
    const char *zone = strchr(a->host, '%');
    if (a->is_unix)
        return curl_easy_setopt(h, CURLOPT_UNIX_SOCKET_PATH, a->path) == CURLE_OK &&
               curl_easy_setopt(h, CURLOPT_URL, "http://localhost/") == CURLE_OK &&
               curl_easy_setopt(h, CURLOPT_PROXY, "") == CURLE_OK;
    snprintf(host, sizeof host, "%.*s%s%s", zone ? (int)(zone - a->host) : INT_MAX, a->host,
             zone ? "%25" : "", zone ? zone + 1 : "");
    snprintf(url, sizeof url, strchr(host, ':') ? "%s://[%s]:%s/" : "%s://%s:%s/",
             a->is_tls ? "https" : "http", host, a->port);
    return curl_easy_setopt(h, CURLOPT_URL, url) == CURLE_OK &&
           curl_easy_setopt(h, CURLOPT_HTTPPROXYTUNNEL, 1L) == CURLE_OK &&
           curl_easy_setopt(h, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L) == CURLE_OK &&
           (!tier_addr_is_loopback(a) || curl_easy_setopt(h, CURLOPT_PROXY, "") == CURLE_OK);
}

/* By default OpenSSL goes on reading after a record that has no data for us, such as a key update: who
 * sends one after another keeps SSL_read, and with it the thread, for ever. Without that mode each
 * call takes one record. */
static CURLcode on_ssl_ctx(CURL *h, void *ctx, void *user) {
    (void)h;
    SSL_CTX_clear_mode(ctx, SSL_MODE_AUTO_RETRY);
    if (SSL_CTX_set_ex_data(ctx, i_link, user) == 1) SSL_CTX_set_info_callback(ctx, on_handshake);
    return CURLE_OK;
}

/* Is libcurl's TLS the OpenSSL that we are linked with too? Only then on_ssl_ctx gets an SSL_CTX. */
static bool curl_has_openssl(void) {
    const curl_version_info_data *v = curl_version_info(CURLVERSION_NOW);
    return v->ssl_version && strncmp(v->ssl_version, "OpenSSL/", 8) == 0;
}

/* False: what was to be asked of the other end would not be. */
static bool curl_set_trust(CURL *h, const tier_trust *t) {
    if (!curl_has_openssl() ||
        curl_easy_setopt(h, CURLOPT_SSL_CTX_FUNCTION, on_ssl_ctx) != CURLE_OK)
        return false;
    curl_easy_setopt(h, CURLOPT_SSL_ENABLE_ALPN, 0L);
    curl_easy_setopt(h, CURLOPT_SSL_SESSIONID_CACHE, 0L);
    if (curl_easy_setopt(h, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_3) != CURLE_OK ||
        curl_easy_setopt(h, CURLOPT_SSL_VERIFYPEER, 1L) != CURLE_OK ||
        curl_easy_setopt(h, CURLOPT_SSL_VERIFYHOST, 2L) != CURLE_OK)
        return false;
    /* The path is none, or the system's would count as well. */
    if (t->ca && (curl_easy_setopt(h, CURLOPT_CAINFO, t->ca) != CURLE_OK ||
                  curl_easy_setopt(h, CURLOPT_CAPATH, NULL) != CURLE_OK))
        return false;
    return !t->cert ||
           (curl_easy_setopt(h, CURLOPT_SSLCERT, t->cert) == CURLE_OK &&
            curl_easy_setopt(h, CURLOPT_SSLKEY, t->key ? t->key : t->cert) == CURLE_OK &&
            curl_easy_setopt(h, CURLOPT_KEYPASSWD, "") == CURLE_OK); /* never ask the terminal */
}

/* Until it is connected: CURLE_OK, or what libcurl says; -1 when `stops` does. */
static int curl_drive(const tier_link *l, uint64_t until_ns, tier_stop_fn stops, void *user) {
    int n_running = 1, n_left;
    for (;;) {
        if (curl_multi_perform(l->curls, &n_running) != CURLM_OK) return CURLE_FAILED_INIT;
        if (n_running == 0) break;
        uint64_t now = clock_ns();
        if (stops && stops(user)) return -1;
        if (now >= until_ns) return CURLE_OPERATION_TIMEDOUT;
        uint64_t ms = (until_ns - now) / 1000000u + 1;
        curl_multi_poll(l->curls, NULL, 0, ms < STOP_MS ? (int)ms : STOP_MS, NULL);
    }
    const CURLMsg *msg = curl_multi_info_read(l->curls, &n_left);
    return msg && msg->msg == CURLMSG_DONE ? (int)msg->data.result : CURLE_FAILED_INIT;
}

/* The box's certificate was refused: what can be done about it. */
static int dial_distrust(tier_link *l, const tier_addr *a) {
    long v = 0;
    curl_easy_getinfo(l->curl, CURLINFO_SSL_VERIFYRESULT, &v);
    if (v == X509_V_ERR_CERT_HAS_EXPIRED)
        return link_fail(l, "the box's certificate has expired: renew it there");
    if (v == X509_V_OK || v == X509_V_ERR_UNSPECIFIED || v == X509_V_ERR_HOSTNAME_MISMATCH ||
        v == X509_V_ERR_IP_ADDRESS_MISMATCH)
        return link_fail(l, "the box's certificate is not for %s: dial it by a name it has",
                         a->host);
    return link_fail(l, "no trust in the box's certificate (%s): give who signed it with %s-ca",
                     X509_verify_cert_error_string(v), l->flag);
}

/* The variable whose proxy is asked for this address, where there is one. */
static const char *proxy_name(const tier_addr *a) {
    static const char *const name[2][4] = {
        {"http_proxy", "all_proxy", "ALL_PROXY", NULL},
        {"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"}};
    for (int i = 0; i < 4 && name[a->is_tls][i] && !tier_addr_is_loopback(a); i++) {
        const char *v = getenv(name[a->is_tls][i]);
        if (v && *v) return name[a->is_tls][i];
    }
    return NULL;
}

/* Why a dial failed, in its own words; with a proxy set it may be the proxy that says so. */
static int dial_said(tier_link *l, const tier_addr *a, const char *said) {
    const char *proxy = proxy_name(a);
    return link_fail(l, "%s%s%s%s", said, proxy ? " (a proxy is set: see " : "", proxy ? proxy : "",
                     proxy ? " and no_proxy)" : "");
}

static int dial_fail(tier_link *l, const tier_addr *a, int rc) {
    static const char own[] = "Failed to connect to ";
    const char *said = l->detail[0] ? l->detail : curl_easy_strerror((CURLcode)rc);
    char no_tls[sizeof l->detail + 32];
    long number = 0;
    curl_easy_getinfo(l->curl, CURLINFO_OS_ERRNO, &number);
    l->was_there = rc == CURLE_PEER_FAILED_VERIFICATION || rc == CURLE_SSL_CONNECT_ERROR ||
                   rc == CURLE_SSL_CACERT_BADFILE;
    switch (rc) {
    case -1: return link_fail(l, "given up");
    case CURLE_OPERATION_TIMEDOUT: return dial_said(l, a, "no answer to the dial");
    case CURLE_PEER_FAILED_VERIFICATION: return dial_distrust(l, a);
    case CURLE_SSL_CACERT_BADFILE: /* a minimal system has no authorities of its own */
        return link_fail(l,
                         "no trust in the box's certificate (%s): give who signed it with %s-ca, "
                         "or install ca-certificates",
                         said, l->flag);
    case CURLE_SSL_CONNECT_ERROR:
        snprintf(no_tls, sizeof no_tls, "no TLS 1.3 there: %s", said);
        return dial_said(l, a, no_tls);
    case CURLE_COULDNT_CONNECT:
        said += strncmp(said, own, sizeof own - 1) == 0 ? sizeof own - 1 : 0;
        if (number != 0 && (a->is_unix || strncmp(said, a->host, strlen(a->host)) == 0))
            return link_fail(l, "%s", strerror((int)number));
        return dial_said(l, a, l->detail[0] ? l->detail : said);
    default: return dial_said(l, a, said);
    }
}

/* Connected: a bare socket stays, or the connection with its TLS. */
static int dial_done(tier_link *l, bool is_encrypted) {
    curl_socket_t fd = CURL_SOCKET_BAD;
    curl_easy_getinfo(l->curl, CURLINFO_ACTIVESOCKET, &fd);
    if (fd == CURL_SOCKET_BAD) return link_fail(l, "no socket");
    l->fd = is_encrypted ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (l->fd < 0) return link_fail(l, "%s", strerror(errno));
    l->by = is_encrypted ? &TLS : &PLAIN;
    l->holds = is_encrypted;
    l->detail[0] = 0;
    if (!is_encrypted) curl_free_both(l); /* closes its own descriptor of the socket */
    return 0;
}

int tier_dial(tier_link *l, const tier_addr *a, const tier_trust *trust, uint32_t ms,
              tier_stop_fn stops, void *user) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint64_t until = clock_ns() + ms * 1000000ull;
    sigset_t old;
    pthread_once(&once, curl_start);
    *l = (tier_link){
        .fd = -1, .flag = trust->flag, .is_tls = a->is_tls, .curl = curl_easy_init()};
    l->curls = curl_multi_init();
    if (!l->curl || !l->curls) {
        curl_free_both(l);
        return link_fail(l, "no memory to dial");
    }
    if (!curl_set_place(l->curl, a) || (a->is_tls && !curl_set_trust(l->curl, trust)) ||
        curl_easy_setopt(l->curl, CURLOPT_CONNECT_ONLY, 1L) != CURLE_OK) {
        curl_free_both(l);
        return link_fail(l, "this libcurl cannot be told where to dial and whom to trust; TLS needs one "
                            "that is built with OpenSSL");
    }
    curl_easy_setopt(l->curl, CURLOPT_SSL_CTX_DATA, l); /* on_ssl_ctx */
    curl_easy_setopt(l->curl, CURLOPT_CONNECTTIMEOUT_MS, (long)ms);
    curl_easy_setopt(l->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(l->curl, CURLOPT_ERRORBUFFER, l->detail);
    curl_easy_setopt(l->curl, CURLOPT_SOCKOPTFUNCTION, on_socket);
    curl_easy_setopt(l->curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(l->curl, CURLOPT_HEADERFUNCTION, on_bytes);
    pipe_block(&old);
    int rc = curl_multi_add_handle(l->curls, l->curl) == CURLM_OK
                 ? curl_drive(l, until, stops, user)
                 : CURLE_FAILED_INIT;
    pipe_unblock(&old, true);
    if (rc == CURLE_OK)
        rc = dial_done(l, a->is_tls || (!a->is_unix && has_tls_proxy()));
    else
        dial_fail(l, a, rc);
    if (rc == CURLE_OK) return 0;
#if CURL_AT_LEAST_VERSION(7, 87, 0)
    curl_easy_setopt(l->curl, CURLOPT_QUICK_EXIT, 1L); /* a resolver that hangs is not waited for */
#endif
    curl_free_both(l);
    return -1;
}

#else
/* ==== 4. Without libcurl ============================================================= */

bool tier_dial_has_tls(void) { return false; }

/* A connected socket, or -1 and why not. */
static int dial_one(tier_link *l, const struct sockaddr *sa, socklen_t n, uint32_t ms,
                    tier_stop_fn stops, void *user) {
    int error = 0;
    socklen_t len = sizeof error;
    int fd = socket(sa->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return link_fail(l, "%s", strerror(errno));
    tier_socket_tune(fd);
    if (connect(fd, sa, n) == 0) return fd;
    if (errno != EINPROGRESS)
        link_fail(l, "%s", strerror(errno));
    else if (!fd_wait(fd, POLLOUT, clock_ns() + ms * 1000000ull, stops, user))
        link_fail(l, "no answer to the dial");
    else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0)
        return fd;
    else
        link_fail(l, "%s", strerror(error));
    close(fd);
    return -1;
}

int tier_dial(tier_link *l, const tier_addr *a, const tier_trust *trust, uint32_t ms,
              tier_stop_fn stops, void *user) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    int fd = -1;
    (void)trust;
    *l = (tier_link){.fd = -1};
    if (a->is_tls) return link_fail(l, "built without libcurl (make CURL=0), so without TLS");
    if (a->is_unix) {
        struct sockaddr_un sa = {.sun_family = AF_UNIX};
        strcpy(sa.sun_path, a->path);
        fd = dial_one(l, (struct sockaddr *)&sa, sizeof sa, ms, stops, user);
    } else {
        int rc = getaddrinfo(a->host, a->port, &hints, &list);
        if (rc != 0) return link_fail(l, "%s", gai_strerror(rc));
        for (struct addrinfo *i = list; i && fd < 0 && !(stops && stops(user)); i = i->ai_next)
            fd = dial_one(l, i->ai_addr, i->ai_addrlen, ms, stops, user);
        freeaddrinfo(list);
    }
    if (fd < 0) return -1;
    tier_link_plain(l, fd);
    return 0;
}
#endif
