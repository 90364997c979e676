/* http.h - the server's side of HTTP, over libmicrohttpd: connections, limits, keys, bodies in, bytes out.
 *
 * A request becomes a job. The HTTP thread reads and checks it, and either answers at once or queues it for the thread
 * that computes, which adds bytes to the job while the HTTP thread sends them. Between two pieces of a stream the
 * client gets a comment line every five seconds by the clock, whatever the computing thread does; a client that
 * went away is noticed within half a second.
 */
#ifndef K3_CLI_HTTP_H
#define K3_CLI_HTTP_H

#include "cli/json.h"

#include <json-c/json.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    HTTP_MOST_BODY = 32 << 20,  /* of one request, and of all that are here together */
    HTTP_CONNECTIONS = 256,
    HTTP_CONNECTION_BYTES = 32 << 10, /* of each, for heads and answers */
    HTTP_PING_MS = 5000,
    HTTP_LOOK_MS = 250,
    HTTP_MOST_KEYS = 64
};

typedef struct http_server http_server;
typedef struct MHD_Connection http_connection;

/* One request, from its first byte to the last byte of its answer. Fields behind `lock` are shared by both threads. */
typedef struct http_job {
    http_server *server;
    http_connection *connection;
    const char *method, *path;
    buf body;
    bool is_large, is_full, is_begun; /* is_full: no room beside the bodies of others */
    json_object *request;  /* its JSON                                             */
    void *work;            /* of who answers it; freed by http_server.forget       */
    /* under http_server.lock */
    bool is_stream;        /* the status is out; bytes are sent as they come       */
    bool is_done, is_left, is_suspended, is_queued, is_running, is_sent;
    unsigned status;
    buf out;
    size_t n_sent;
    uint64_t sent_ms;      /* when bytes were last there to send                    */
    struct http_job *next, *next_all;
} http_job;

struct http_server {
    pthread_mutex_t lock;
    pthread_cond_t has_job;
    http_job *first, *last; /* waiting for the computing thread                       */
    http_job *all;
    size_t n_waiting, most_waiting, body_bytes;
    bool is_closing;
    uint64_t n_requests, n_refused;
    char *key[HTTP_MOST_KEYS]; /* none: nobody is asked for one                       */
    size_t n_keys;
    char host[256];            /* as listened to                                      */
    /* A whole request is there. Fill out and status and return true: it is answered; or return false: it was queued
     * with http_queue(). On the HTTP thread. */
    bool (*answer)(http_server *s, http_job *j);
    void (*forget)(http_job *j);
    void *user;
    struct MHD_Daemon *daemon;
    pthread_t clock;
    bool has_clock;
};

/* Listen at ADDR:PORT. Returns an exit code whose reason is said. */
int http_open(http_server *s, const char *listen, const char *keys_file, size_t most_waiting);
void http_close(http_server *s);

/* Hand a job to the computing thread. False: the queue is full, and nothing changed. */
bool http_queue(http_job *j, bool is_stream);

/* The computing thread's side. The next job, or NULL after a while or when `*stop` is set. */
http_job *http_next(http_server *s, volatile const int *stop);

/* More bytes of a stream's answer; the whole answer with its status; the end. */
void http_add(http_job *j, const char *p, size_t n);
void http_finish(http_job *j, unsigned status);
bool http_is_left(http_job *j);

/* OpenAI's form of an error into j->out. */
void http_error(http_job *j, unsigned status, const char *type, const char *code, const char *message);

#endif
