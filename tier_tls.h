/* tier_tls.h - TLS as `k3-tier` speaks it: OpenSSL over sockets that never wait. */
#ifndef K3_TIER_TLS_H
#define K3_TIER_TLS_H

#include "tier.h"

#include <sys/types.h>

/* Memory of a connection: OpenSSL's buffers, both ends' certificates, the hash of the handshake. */
#define TIER_TLS_BYTES (128u << 10)

/* Certificates and rules, for all connections. */
typedef struct tier_tls tier_tls;

/* TLS 1.3 and nothing older. With `trust->ca`, clients must show a certificate that it signed, or
 * that it is. Returns 0; -1 and one line in `why`: a file that will not do. */
int tier_tls_open(tier_tls **out, const tier_trust *trust, char *why, size_t n_why);
void tier_tls_close(tier_tls *t);

/* One connection. It begins with the first call of recv, which shakes hands as far as it can. */
typedef struct tier_tls_conn tier_tls_conn;

/* NULL: no memory. The socket, which does not block, stays the caller's. */
tier_tls_conn *tier_tls_accept(tier_tls *t, int fd);

/* How many bytes went or came; 0, none now; -1, the connection is over. One call takes at most one
 * record and reads the socket a bounded number of times, whatever comes: poll says if there is more. Of an end that was no good,
 * tier_tls_why tells in a few words; NULL: none. What send did not take must be given to it again. */
ssize_t tier_tls_send(tier_tls_conn *c, const void *p, size_t n);
ssize_t tier_tls_recv(tier_tls_conn *c, void *p, size_t n);
const char *tier_tls_why(const tier_tls_conn *c);

/* After the handshake: what proofs of a key over this connection are bound to, the exporter's channel
 * binding (RFC 9266). False: OpenSSL gives none. */
bool tier_tls_binding(const tier_tls_conn *c, uint8_t out[TIER_BINDING_BYTES]);

/* After the handshake: has the client shown a certificate, checked, whose one common name is this? */
bool tier_tls_is_named(const tier_tls_conn *c, const char *name);

/* Does somebody who has not heard of TLS say hello? To be asked before the first recv. */
bool tier_tls_is_plain(const tier_tls_conn *c);

/* Does recv have to be called without asking poll? Bytes are here already. */
bool tier_tls_holds(const tier_tls_conn *c);

/* Did the last recv read the socket, and gave nothing for it? A handshake does, a record that is not all
 * here, and one without data. */
bool tier_tls_was_vain(const tier_tls_conn *c);

/* POLLOUT while recv waits for room to send in, as in a handshake; else 0. */
short tier_tls_wants(const tier_tls_conn *c);

/* Says goodbye if the socket has room for it, and frees. */
void tier_tls_end(tier_tls_conn *c);

#endif
