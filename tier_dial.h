/* tier_dial.h - the way to a far box: dialling, and a table of calls for what was dialled.
 *
 * libcurl dials: names, IPv4 and IPv6, proxies, unix sockets, TLS. A plain connection is then a bare
 * socket that libcurl has forgotten, so that nothing stands between a request and send(). A TLS
 * connection stays libcurl's. Built without it (make CURL=0) there are plain connections only.
 */
#ifndef K3_TIER_DIAL_H
#define K3_TIER_DIAL_H

#include "k3_common.h"

#define TIER_WIRE
#include "tier.h"

#include <sys/types.h>

/* ---- A connection ------------------------------------------------------------------
 *
 * Owned by one thread at a time; it may change hands under a lock, but not its address. */
typedef struct tier_link tier_link;

/* send and recv never wait. They return how many bytes went or came; 0, none now; -1, the connection
 * is over and `why` says what ended it. What send did not take must be given to it again, the same
 * bytes at the same address, before anything else is sent. close may be called on any open link. */
typedef struct {
    ssize_t (*send)(tier_link *l, const void *p, size_t n);
    ssize_t (*recv)(tier_link *l, void *p, size_t n);
    void (*close)(tier_link *l);
} tier_transport;

struct tier_link {
    const tier_transport *by;
    int fd;             /* to poll; only `by` reads and writes                        */
    bool holds;         /* bytes may be here that poll does not see: recv before a sleep */
    const char *flag;   /* of tier_trust                                             */
    bool was_there;     /* after a failed dial: somebody answered, and it would not do */
    bool is_tls, is_bound;               /* to the box itself; and its binding is known */
    uint8_t binding[TIER_BINDING_BYTES]; /* of this TLS connection: see tier_link_binding */
    void *curl, *curls; /* TLS: CURL and CURLM                                       */
    char why[256];      /* one printable line                                        */
    char detail[256];   /* libcurl's own words, CURL_ERROR_SIZE                      */
};

/* Asked every 100 ms or sooner: shall a wait be given up? */
typedef bool (*tier_stop_fn)(void *user);

/* Dial, with TLS where the address says so, within `ms`. Any number of threads may.
 * Returns 0; -1 and `why` in the link, which is then not open. */
int tier_dial(tier_link *l, const tier_addr *a, const tier_trust *trust, uint32_t ms,
              tier_stop_fn stops, void *user);

/* A link of a connected socket, which becomes the link's. */
void tier_link_plain(tier_link *l, int fd);

/* What proofs of a key over this link are bound to: of TLS the exporter's channel binding (RFC 9266),
 * which nobody in between can have with both ends; of a plain link zeros. NULL; or why there is none. */
const char *tier_link_binding(const tier_link *l, uint8_t out[TIER_BINDING_BYTES]);

/* Wait for POLLIN or POLLOUT: 1; 0, it is `until_ns` of CLOCK_MONOTONIC, or `stops` (NULL: never)
 * says so. */
int tier_link_wait(const tier_link *l, short events, uint64_t until_ns, tier_stop_fn stops,
                   void *user);

/* Can this build dial tls: addresses? */
bool tier_dial_has_tls(void);

/* Are the files there, PEM, and of one pair, and is the key for its owner only? Returns 0; -1 and one
 * line in `why` that begins with the option, for example "--tier-key FILE: others may read it". */
int tier_trust_check(const tier_trust *trust, char *why, size_t n_why);

#endif
