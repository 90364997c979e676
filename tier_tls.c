/* tier_tls.c - TLS as `k3-tier` speaks it: OpenSSL over sockets that never wait.
 *
 * Much is left out: nothing older than TLS 1.3, no session tickets, no resumption, no early data. A
 * connection costs one handshake and then lasts for hours; what is not there cannot be wrong.
 */
#include "tier_dial.h"
#include "tier_tls.h"

#include <limits.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>

#define MAX_CHAIN_BYTES (32u << 10) /* of a client's certificates */
#define READS_AT_ONCE 64            /* of the socket, in one call of recv or send */

struct tier_tls {
    SSL_CTX *ctx;
    BIO_METHOD *meter;
};

struct tier_tls_conn {
    SSL *ssl;
    int fd, n_reads; /* since the call began */
    bool was_vain;   /* the last recv        */
    short wants;
    bool is_up;   /* the handshake was whole, before whatever came then */
    bool is_over; /* after a fault OpenSSL is not called again */
    char why[160];
};

/* ---- Certificates and rules ---- */

/* OpenSSL's own words for what just failed. */
static void ssl_words(char *to, size_t cap) {
    unsigned long e = ERR_get_error();
    const char *reason = e ? ERR_reason_error_string(e) : NULL;
    snprintf(to, cap, "%s", reason ? reason : "no reason given");
    ERR_clear_error();
}

/* ---- Few reads a call ----
 *
 * OpenSSL reads on until it has data, or a whole message of the handshake. A stranger can cut a
 * message of 128 KiB into records of one byte, and send records that have no data without end. So
 * OpenSSL reads the socket through this: after READS_AT_ONCE it is told that nothing more is there,
 * and others have their turn. poll still says that there is more. */

static int meter_read(BIO *bio, char *to, size_t n, size_t *n_got) {
    tier_tls_conn *c = BIO_get_data(bio);
    *n_got = 0;
    BIO_clear_retry_flags(bio);
    if (c->n_reads++ >= READS_AT_ONCE) {
        BIO_set_retry_read(bio);
        return 0;
    }
    ssize_t got = recv(c->fd, to, n, MSG_DONTWAIT);
    if (got > 0) *n_got = (size_t)got;
    if (got == 0) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_read(bio);
    return got > 0;
}

static int meter_write(BIO *bio, const char *from, size_t n, size_t *n_put) {
    tier_tls_conn *c = BIO_get_data(bio);
    ssize_t put = send(c->fd, from, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    *n_put = put > 0 ? (size_t)put : 0;
    BIO_clear_retry_flags(bio);
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        BIO_set_retry_write(bio);
    return put > 0;
}

static long meter_ctrl(BIO *bio, int what, long number, void *p) {
    (void)number, (void)p;
    if (what == BIO_CTRL_EOF) return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0;
    return what == BIO_CTRL_FLUSH;
}

static BIO_METHOD *meter_new(void) {
    BIO_METHOD *m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "k3-tier socket");
    if (m && BIO_meth_set_read_ex(m, meter_read) && BIO_meth_set_write_ex(m, meter_write) &&
        BIO_meth_set_ctrl(m, meter_ctrl))
        return m;
    BIO_meth_free(m);
    return NULL;
}

/* NULL, or the file that will not do; its option in *which. */
static const char *tls_load(SSL_CTX *ctx, const tier_trust *t, const char **which) {
    STACK_OF(X509_NAME) * names;
    *which = "cert";
    if (SSL_CTX_use_certificate_chain_file(ctx, t->cert) != 1) return t->cert;
    if (t->key) *which = "key";
    if (SSL_CTX_use_PrivateKey_file(ctx, t->key ? t->key : t->cert, SSL_FILETYPE_PEM) != 1)
        return t->key ? t->key : t->cert;
    if (!t->ca) return NULL;
    *which = "ca";
    if (SSL_CTX_load_verify_file(ctx, t->ca) != 1 || !(names = SSL_load_client_CA_file(t->ca)))
        return t->ca;
    SSL_CTX_set_client_CA_list(ctx, names);
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(ctx), X509_V_FLAG_PARTIAL_CHAIN);
    return NULL;
}

int tier_tls_open(tier_tls **out, const tier_trust *trust, char *why, size_t n_why) {
    const char *bad = NULL, *which = "cert";
    *out = NULL;
    if (tier_trust_check(trust, why, n_why) < 0) return -1;
    tier_tls *t = calloc(1, sizeof *t);
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    BIO_METHOD *meter = meter_new();
    bool is_ok = t && ctx && meter && SSL_CTX_set_min_proto_version(ctx, TLS1_3_VERSION) == 1;
    if (is_ok) {
        SSL_CTX_set_num_tickets(ctx, 0);
        SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_max_early_data(ctx, 0);
        SSL_CTX_set_options(ctx, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
        SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
        SSL_CTX_clear_mode(ctx, SSL_MODE_AUTO_RETRY); /* one record a call, also without data */
        SSL_CTX_set_max_cert_list(ctx, MAX_CHAIN_BYTES);
        SSL_CTX_set_verify_depth(ctx, 4);
        bad = tls_load(ctx, trust, &which);
        is_ok = !bad;
    }
    if (is_ok) {
        t->ctx = ctx;
        t->meter = meter;
        *out = t;
        return 0;
    }
    char words[120];
    ssl_words(words, sizeof words);
    snprintf(why, n_why, "%s-%s %s: %s; is every certificate in it whole?", trust->flag, which,
             bad ? bad : trust->cert, words);
    SSL_CTX_free(ctx);
    BIO_meth_free(meter);
    free(t);
    return -1;
}

void tier_tls_close(tier_tls *t) {
    if (!t) return;
    SSL_CTX_free(t->ctx);
    BIO_meth_free(t->meter);
    free(t);
}

/* ---- One connection ---- */

tier_tls_conn *tier_tls_accept(tier_tls *t, int fd) {
    tier_tls_conn *c = calloc(1, sizeof *c);
    BIO *bio = c ? BIO_new(t->meter) : NULL;
    if (bio && (c->ssl = SSL_new(t->ctx)) != NULL) {
        c->fd = fd;
        BIO_set_data(bio, c);
        BIO_set_init(bio, 1);
        SSL_set_bio(c->ssl, bio, bio); /* the BIO goes with the SSL; the socket does not */
        SSL_set_accept_state(c->ssl);
        return c;
    }
    BIO_free(bio);
    free(c);
    ERR_clear_error();
    return NULL;
}

/* Nothing unread may be left when the socket is closed, or a reset overtakes our last words. */
static void conn_drain(const tier_tls_conn *c) {
    uint8_t away[4096];
    for (int i = 0; i < 16 && recv(c->fd, away, sizeof away, MSG_DONTWAIT) > 0; i++) {
    }
}

/* What a call that gave nothing means. */
static ssize_t conn_result(tier_tls_conn *c, int rc) {
    int e = SSL_get_error(c->ssl, rc);
    char words[120];
    c->wants = e == SSL_ERROR_WANT_WRITE ? POLLOUT : 0;
    if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE) return 0;
    c->is_over = true;
    conn_drain(c);
    if (e != SSL_ERROR_SSL) return -1; /* a goodbye, or the socket broke */
    ssl_words(words, sizeof words);
    if (c->is_up && strstr(words, "unexpected eof")) return -1;
    long v = SSL_get_verify_result(c->ssl);
    if (v == X509_V_OK)
        snprintf(c->why, sizeof c->why, "TLS: %s", words);
    else
        snprintf(c->why, sizeof c->why, "TLS: its certificate: %s",
                 X509_verify_cert_error_string(v));
    return -1;
}

ssize_t tier_tls_recv(tier_tls_conn *c, void *p, size_t n) {
    if (c->is_over) return -1;
    ERR_clear_error();
    c->n_reads = 0;
    int got = SSL_read(c->ssl, p, n < INT_MAX ? (int)n : INT_MAX);
    c->is_up = c->is_up || SSL_is_init_finished(c->ssl);
    c->was_vain = got <= 0 && c->n_reads > 1; /* the last one found nothing, or was not made */
    if (got <= 0) return conn_result(c, got);
    c->wants = 0;
    return got;
}

ssize_t tier_tls_send(tier_tls_conn *c, const void *p, size_t n) {
    if (c->is_over) return -1;
    ERR_clear_error();
    c->n_reads = 0;
    short wants = c->wants;
    int put = SSL_write(c->ssl, p, n < INT_MAX ? (int)n : INT_MAX);
    if (put > 0) return put;
    ssize_t rc = conn_result(c, put);
    c->wants = wants; /* recv's */
    return rc;
}

bool tier_tls_is_plain(const tier_tls_conn *c) {
    uint8_t p[3];
    return SSL_in_before(c->ssl) &&
           recv(c->fd, p, sizeof p, MSG_PEEK | MSG_DONTWAIT) == (ssize_t)sizeof p &&
           memcmp(p, "K3T", sizeof p) == 0;
}

bool tier_tls_binding(const tier_tls_conn *c, uint8_t out[TIER_BINDING_BYTES]) {
    bool is_ok = SSL_is_init_finished(c->ssl) &&
                 SSL_export_keying_material(c->ssl, out, TIER_BINDING_BYTES, TIER_BINDING,
                                            strlen(TIER_BINDING), NULL, 0, 0) == 1;
    ERR_clear_error();
    return is_ok;
}

bool tier_tls_is_named(const tier_tls_conn *c, const char *name) {
    X509 *x = SSL_is_init_finished(c->ssl) && SSL_get_verify_result(c->ssl) == X509_V_OK
                  ? SSL_get1_peer_certificate(c->ssl)
                  : NULL;
    X509_NAME *subject = x ? X509_get_subject_name(x) : NULL;
    int i = subject ? X509_NAME_get_index_by_NID(subject, NID_commonName, -1) : -1;
    bool is_named = false;
    if (i >= 0 && X509_NAME_get_index_by_NID(subject, NID_commonName, i) < 0) {
        unsigned char *text = NULL;
        int n = ASN1_STRING_to_UTF8(&text, X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, i)));
        is_named = n >= 0 && (size_t)n == strlen(name) && memcmp(text, name, (size_t)n) == 0;
        OPENSSL_free(text);
    }
    X509_free(x);
    ERR_clear_error();
    return is_named;
}

const char *tier_tls_why(const tier_tls_conn *c) { return c->why[0] ? c->why : NULL; }

bool tier_tls_holds(const tier_tls_conn *c) { return !c->is_over && SSL_pending(c->ssl) > 0; }

bool tier_tls_was_vain(const tier_tls_conn *c) { return c->was_vain; }

short tier_tls_wants(const tier_tls_conn *c) { return c->wants; }

void tier_tls_end(tier_tls_conn *c) {
    ERR_clear_error();
    c->n_reads = 0;
    if (!c->is_over && SSL_is_init_finished(c->ssl)) SSL_shutdown(c->ssl);
    SSL_free(c->ssl);
    ERR_clear_error();
    free(c);
}
