/* http.c - libmicrohttpd's callbacks, the queue between the two threads, and the clock of pings. */
#include "cli/http.h"

#include "cli/console.h"
#include "cli/output.h"
#include "k3_common.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static uint64_t now_ms(void) { return clock_ns() / 1000000; }

/* ---- Jobs ---- */

static void job_free(http_job *j) {
    pthread_mutex_lock(&j->server->lock);
    j->server->body_bytes -= j->body.n;
    pthread_mutex_unlock(&j->server->lock);
    j->server->forget(j);
    json_object_put(j->request);
    buf_free(&j->body);
    buf_free(&j->out);
    free(j);
}

/* Under the lock: let the HTTP thread look at the job again. */
static void job_wake(http_job *j) {
    if (!j->is_suspended) return;
    j->is_suspended = false;
    MHD_resume_connection(j->connection);
}

void http_error(http_job *j, unsigned status, const char *type, const char *code, const char *message) {
    json_object *o = json_object_new_object(), *e = json_object_new_object();
    json_put(e, "message", json_object_new_string(message));
    json_put(e, "type", json_object_new_string(type));
    json_put(e, "param", NULL);
    json_put(e, "code", code ? json_object_new_string(code) : NULL);
    json_put(o, "error", e);
    buf_clear(&j->out);
    buf_puts(&j->out, json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
    json_object_put(o);
    j->status = status;
}

bool http_queue(http_job *j, bool is_stream) {
    http_server *s = j->server;
    pthread_mutex_lock(&s->lock);
    bool fits = s->n_waiting < s->most_waiting && !s->is_closing;
    if (fits) {
        j->is_stream = is_stream;
        j->is_queued = true;
        j->sent_ms = now_ms();
        j->next = NULL;
        if (s->last)
            s->last->next = j;
        else
            s->first = j;
        s->last = j;
        s->n_waiting++;
        pthread_cond_signal(&s->has_job);
    } else {
        s->n_refused++;
    }
    pthread_mutex_unlock(&s->lock);
    return fits;
}

http_job *http_next(http_server *s, volatile const int *stop) {
    http_job *j = NULL;
    struct timespec until;
    pthread_mutex_lock(&s->lock);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    if (!s->first && !*stop) pthread_cond_timedwait(&s->has_job, &s->lock, &until);
    if (s->first && !*stop) {
        j = s->first;
        s->first = j->next;
        if (!s->first) s->last = NULL;
        s->n_waiting--;
        j->is_queued = false;
        j->is_running = true;
    }
    pthread_mutex_unlock(&s->lock);
    return j;
}

void http_add(http_job *j, const char *p, size_t n) {
    pthread_mutex_lock(&j->server->lock);
    buf_add(&j->out, p, n);
    j->sent_ms = now_ms();
    job_wake(j);
    pthread_mutex_unlock(&j->server->lock);
}

void http_finish(http_job *j, unsigned status) {
    http_server *s = j->server;
    pthread_mutex_lock(&s->lock);
    j->is_done = true;
    j->is_running = false;
    j->status = status;
    bool is_over = j->is_sent; /* its connection is gone */
    job_wake(j);
    pthread_mutex_unlock(&s->lock);
    if (is_over) job_free(j);
}

bool http_is_left(http_job *j) {
    pthread_mutex_lock(&j->server->lock);
    bool is_left = j->is_left;
    pthread_mutex_unlock(&j->server->lock);
    return is_left;
}

/* ---- The clock: pings, and clients that went away ---- */

static bool peer_is_gone(http_connection *c) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct pollfd fd = {info ? info->connect_fd : -1, POLLRDHUP, 0};
    return info && poll(&fd, 1, 0) == 1 && (fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

static void *clock_main(void *user) {
    http_server *s = user;
    for (;;) {
        struct timespec pause = {0, HTTP_LOOK_MS * 1000000l};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&s->lock);
        bool is_over = s->is_closing && !s->all;
        for (http_job *j = s->all; j; j = j->next_all) {
            if (j->is_sent || !(j->is_queued || j->is_running)) continue;
            if (!j->is_left && peer_is_gone(j->connection)) j->is_left = true;
            if (!j->is_stream || now_ms() - j->sent_ms < HTTP_PING_MS) continue;
            buf_puts(&j->out, ": ping\n\n");
            j->sent_ms = now_ms();
            job_wake(j);
        }
        pthread_mutex_unlock(&s->lock);
        if (is_over || !s->has_clock) return NULL;
    }
}

/* ---- libmicrohttpd's side ---- */

/* Bytes of a stream; 0 and a suspended connection while there are none. */
static ssize_t stream_read(void *user, uint64_t pos, char *to, size_t most) {
    http_job *j = user;
    http_server *s = j->server;
    ssize_t n = 0;
    (void)pos;
    pthread_mutex_lock(&s->lock);
    if (j->out.n > j->n_sent) {
        n = (ssize_t)(j->out.n - j->n_sent < most ? j->out.n - j->n_sent : most);
        memcpy(to, j->out.p + j->n_sent, (size_t)n);
        j->n_sent += (size_t)n;
        if (j->n_sent == j->out.n) {
            buf_clear(&j->out);
            j->n_sent = 0;
        }
    } else if (j->is_done) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        j->is_suspended = true;
        MHD_suspend_connection(j->connection);
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

static enum MHD_Result send_response(http_job *j, struct MHD_Response *r, unsigned status, const char *type) {
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "X-Accel-Buffering", "no");
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "X-Frame-Options", "DENY");
    if (status == 503) MHD_add_response_header(r, "Retry-After", "10");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status >= 500 && status != 503) MHD_add_response_header(r, "x-should-retry", "false");
    enum MHD_Result rc = MHD_queue_response(j->connection, status, r);
    MHD_destroy_response(r);
    return rc;
}

static enum MHD_Result send_whole(http_job *j) {
    bool is_page = strcmp(j->path, "/") == 0 && j->status == 200;
    const char *type = strcmp(j->path, "/metrics") == 0 ? "text/plain; version=0.0.4"
                       : is_page                         ? "text/html; charset=utf-8"
                                                         : "application/json";
    struct MHD_Response *r = MHD_create_response_from_buffer(j->out.n, (void *)(uintptr_t)buf_text(&j->out), MHD_RESPMEM_MUST_COPY);
    return send_response(j, r, j->status, type);
}

static enum MHD_Result send_stream(http_job *j) {
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, stream_read, j, NULL);
    return send_response(j, r, 200, "text/event-stream");
}

/* Equal, in a time that does not depend on where they differ. */
static bool same_key(const char *a, const char *b) {
    size_t n_a = strlen(a), n_b = strlen(b);
    unsigned differ = n_a != n_b;
    for (size_t i = 0; i < n_b; i++) differ |= (unsigned char)a[i < n_a ? i : 0] ^ (unsigned char)b[i];
    return n_b > 0 && differ == 0;
}

static bool has_key(const http_server *s, http_connection *c) {
    const char *bearer = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization");
    const char *key = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "x-api-key");
    bool is_known = s->n_keys == 0;
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0) key = bearer + 7;
    for (size_t i = 0; i < s->n_keys; i++) is_known = (key && same_key(key, s->key[i])) || is_known;
    return is_known;
}

/* Host names this machine, so no page of another site that a browser was led to can ask; and a page that asks is one
 * of this server's. */
static bool is_own_host(const http_server *s, http_connection *c) {
    const char *host = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Host");
    const char *origin = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Origin");
    char name[256];
    if (!host) return false;
    if (origin && (strncmp(origin, "http://", 7) != 0 || strcmp(origin + 7, host) != 0)) return false;
    snprintf(name, sizeof name, "%s", host);
    char *colon = strrchr(name, ':');
    if (colon && !strchr(colon, ']')) *colon = 0;
    unsigned char address[16];
    if (strcmp(name, "localhost") == 0 || strcmp(name, s->host) == 0 || name[0] == '[') return true;
    return inet_pton(AF_INET, name, address) == 1; /* a number cannot be led elsewhere by DNS */
}

static http_job *job_new(http_server *s, http_connection *c, const char *path, const char *method) {
    http_job *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    *j = (http_job){.server = s, .connection = c, .path = path, .method = method};
    pthread_mutex_lock(&s->lock);
    j->next_all = s->all;
    s->all = j;
    s->n_requests++;
    pthread_mutex_unlock(&s->lock);
    return j;
}

/* Addresses that say nothing of the model: a browser brings no key to the page, a watcher none to its question. */
static bool is_open(const char *path) { return strcmp(path, "/") == 0 || strcmp(path, "/health") == 0; }

static bool check_request(http_server *s, http_job *j) {
    if (!is_own_host(s, j->connection))
        http_error(j, 403, "invalid_request_error", "host", "Host or Origin is not this server's");
    else if (!is_open(j->path) && !has_key(s, j->connection))
        http_error(j, 401, "invalid_request_error", "invalid_api_key", "this server wants an API key it knows");
    else if (j->is_large)
        http_error(j, 413, "invalid_request_error", NULL, "the body is larger than 32 MiB");
    else if (j->is_full || j->body.is_short)
        http_error(j, 503, "server_error", NULL, "no room for this body beside those of others; try again later");
    else
        return true;
    return false;
}

/* More of a body, within what all bodies may take together. */
static void body_add(http_job *j, const char *data, size_t n) {
    http_server *s = j->server;
    j->is_large = j->is_large || j->body.n + n > HTTP_MOST_BODY;
    pthread_mutex_lock(&s->lock);
    j->is_full = j->is_full || s->body_bytes + n > HTTP_MOST_BODY;
    if (!j->is_large && !j->is_full) s->body_bytes += n;
    pthread_mutex_unlock(&s->lock);
    if (!j->is_large && !j->is_full) buf_add(&j->body, data, n);
}

/* The whole answer, once it is there; until then the connection is suspended. */
static enum MHD_Result wait_or_send(http_job *j) {
    pthread_mutex_lock(&j->server->lock);
    bool is_done = j->is_done;
    if (!is_done) {
        j->is_suspended = true;
        MHD_suspend_connection(j->connection);
    }
    pthread_mutex_unlock(&j->server->lock);
    return is_done ? send_whole(j) : MHD_YES;
}

static enum MHD_Result on_request(void *user, http_connection *c, const char *path, const char *method,
                                  const char *version, const char *data, size_t *n_data, void **of) {
    http_server *s = user;
    http_job *j = *of;
    (void)version;
    if (!j) return (*of = job_new(s, c, path, method)) ? MHD_YES : MHD_NO;
    j->path = path;
    j->method = method;
    if (*n_data > 0) {
        body_add(j, data, *n_data);
        *n_data = 0;
        return MHD_YES;
    }
    pthread_mutex_lock(&s->lock);
    bool is_begun = j->is_begun;
    j->is_begun = true;
    pthread_mutex_unlock(&s->lock);
    if (!is_begun && (!check_request(s, j) || s->answer(s, j))) return send_whole(j);
    return j->is_stream ? send_stream(j) : wait_or_send(j);
}

/* The connection is done with the job: answered, or gone. */
static void on_end(void *user, http_connection *c, void **of, enum MHD_RequestTerminationCode why) {
    http_server *s = user;
    http_job *j = *of;
    (void)c;
    (void)why;
    if (!j) return;
    pthread_mutex_lock(&s->lock);
    for (http_job **at = &s->all; *at; at = &(*at)->next_all)
        if (*at == j) {
            *at = j->next_all;
            break;
        }
    j->is_sent = j->is_left = true;
    bool is_mine = !j->is_running && !j->is_queued;
    pthread_mutex_unlock(&s->lock);
    if (is_mine) job_free(j); /* else the computing thread frees it */
}

/* ---- Opening ---- */

static int keys_read(http_server *s, const char *path) {
    char line[1024], name[256], key[512];
    FILE *f = fopen(path, "r");
    int rc = DONE, n = 0;
    if (!f) return fail(FAIL_IO, "--api-keys: %s: %s", path, strerror(errno));
    while (rc == DONE && fgets(line, sizeof line, f)) {
        n++;
        if (line[strspn(line, " \t\r\n")] == 0 || line[0] == '#') continue;
        if (sscanf(line, "%255s %511s", name, key) != 2 || strlen(key) < 16)
            rc = fail(FAIL_USAGE, "--api-keys: %s, line %d: not a name, a blank and a key of 16 characters or more", path, n);
        else if (s->n_keys == HTTP_MOST_KEYS || !(s->key[s->n_keys++] = strdup(key)))
            rc = fail(FAIL_USAGE, "--api-keys: %s: more than %d keys", path, HTTP_MOST_KEYS);
    }
    fclose(f);
    if (rc == DONE && s->n_keys == 0) rc = fail(FAIL_USAGE, "--api-keys: %s names no key", path);
    return rc;
}

/* ADDR:PORT to an address. */
static int address_of(const char *listen, struct addrinfo **out, char host[256]) {
    const struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICHOST, .ai_socktype = SOCK_STREAM};
    char text[256];
    snprintf(text, sizeof text, "%s", listen);
    char *colon = strrchr(text, ':'), *name = text;
    if (!colon || colon == text || !colon[1])
        return fail(FAIL_USAGE, "--listen: '%s' is not ADDR:PORT, as 127.0.0.1:8080 or [::1]:8080", listen);
    *colon = 0;
    if (name[0] == '[' && colon[-1] == ']') {
        colon[-1] = 0;
        name++;
    }
    if (strcmp(name, "localhost") == 0) name = "127.0.0.1";
    snprintf(host, 256, "%s", name);
    int rc = getaddrinfo(name, colon + 1, &hints, out);
    return rc ? fail(FAIL_USAGE, "--listen: %s: %s", listen, gai_strerror(rc)) : DONE;
}

static bool is_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET) return (ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24) == 127;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

int http_open(http_server *s, const char *listen, const char *keys_file, size_t most_waiting) {
    struct addrinfo *at = NULL;
    pthread_mutex_init(&s->lock, NULL);
    clock_cond_init(&s->has_job);
    s->most_waiting = most_waiting;
    int rc = keys_file ? keys_read(s, keys_file) : DONE;
    if (rc == DONE) rc = address_of(listen, &at, s->host);
    if (rc == DONE && !is_loopback(at->ai_addr) && s->n_keys == 0)
        rc = fail(FAIL_USAGE, "--listen %s: others could ask; give them keys with --api-keys FILE, or listen on 127.0.0.1", listen);
    if (rc == DONE) {
        unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC;
        if (at->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
        s->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_request, s, MHD_OPTION_SOCK_ADDR, at->ai_addr,
                                     MHD_OPTION_NOTIFY_COMPLETED, on_end, s, MHD_OPTION_CONNECTION_LIMIT,
                                     (unsigned)HTTP_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT, 60u,
                                     MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONNECTION_BYTES, MHD_OPTION_END);
        if (!s->daemon) rc = fail(FAIL_IO, "--listen %s: cannot listen there: %s", listen, strerror(errno));
    }
    if (at) freeaddrinfo(at);
    if (rc != DONE) return rc;
    s->has_clock = true;
    if (pthread_create(&s->clock, NULL, clock_main, s) != 0) {
        s->has_clock = false;
        return fail(FAIL_IO, "no thread for the server's clock");
    }
    return DONE;
}

void http_close(http_server *s) {
    pthread_mutex_lock(&s->lock);
    s->is_closing = true;
    while (s->first) { /* nobody will compute these */
        http_job *j = s->first;
        s->first = j->next;
        j->is_queued = false;
        j->is_done = true;
        if (!j->is_stream) http_error(j, 503, "server_error", NULL, "the server is shutting down");
        job_wake(j);
    }
    s->last = NULL;
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < 20; i++) { /* what is answered goes out: two seconds at most */
        struct timespec pause = {0, 100000000};
        pthread_mutex_lock(&s->lock);
        bool is_quiet = s->all == NULL;
        pthread_mutex_unlock(&s->lock);
        if (is_quiet) break;
        nanosleep(&pause, NULL);
    }
    bool had_clock = s->has_clock;
    s->has_clock = false;
    if (had_clock) pthread_join(s->clock, NULL);
    if (s->daemon) MHD_stop_daemon(s->daemon);
    for (size_t i = 0; i < s->n_keys; i++) free(s->key[i]);
    pthread_mutex_destroy(&s->lock);
}
