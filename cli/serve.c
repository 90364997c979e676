/* serve.c - `k3 serve`: OpenAI's chat completions over HTTP.
 *
 * The HTTP thread (http.h) checks a request whole: its JSON, its fields, its length in ids. The main thread computes one
 * answer after another with the conversation of `k3 chat` (talk.h), whose reply sink writes OpenAI's chunks here. The
 * session keeps what the new conversation has in common with the last one; the state cache keeps more.
 */
#include "cli/calls.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/generate.h"
#include "cli/http.h"
#include "cli/inputs.h"
#include "cli/messages.h"
#include "cli/output.h"
#include "cli/page.h"
#include "cli/show.h"
#include "cli/talk.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { MOST_STOPS = 16 };

/* What a request asks for, checked. */
typedef struct {
    json_object *clean;    /* messages, tools and what the chat format knows            */
    json_object *messages; /* of it                                                     */
    const char *model;
    k3_sampler sampler;
    uint64_t most;
    const char *stop[MOST_STOPS];
    size_t n_stop;
    bool is_stream, wants_usage;
    size_t n_prompt;
    /* the answer */
    http_job *job;
    char id[40];
    time_t created;
    buf think, answer;
    size_t n_out; /* bytes of `answer` that were sent */
    bool is_met;  /* a stop text was                  */
    json_object *calls;
} work;

typedef struct {
    http_server http;
    chat chat;
    k3_tokenizer *t; /* of the HTTP thread */
    char model[256], print[64];
    work *work; /* being answered */
    uint64_t n_in, n_gen, n_answers, started_s;
    uint64_t most; /* ids of an answer by default; 0: as many as fit */
    pthread_mutex_t lock; /* of the counts */
} server;

/* ---- JSON ---- */

static void out_json(http_job *j, json_object *o) {
    buf_clear(&j->out);
    buf_puts(&j->out, json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
    json_object_put(o);
    j->status = 200;
}

static json_object *text_of(const char *s) { return json_object_new_string(s); }

static bool refuse(http_job *j, const char *code, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    http_error(j, 400, "invalid_request_error", code, text);
    return false;
}

/* A number of the request, or what it was. */
static bool read_number(http_job *j, const char *key, double lo, double hi, double *value) {
    json_object *o = json_field(j->request, key);
    if (!o) return true;
    double x = json_object_get_double(o);
    if (!(json_is(o, json_type_int) || json_is(o, json_type_double)) || !(x >= lo && x <= hi))
        return refuse(j, NULL, "%s is not a number from %g to %g", key, lo, hi);
    *value = x;
    return true;
}

/* ---- Checking a request ---- */

/* Fields that would change the answer and cannot be honoured. */
static bool check_unsupported(http_job *j) {
    static const char *const number[] = {"frequency_penalty", "presence_penalty", "min_p"};
    double n = 1;
    for (size_t i = 0; i < COUNT(number); i++) {
        double x = 0;
        if (!read_number(j, number[i], -2, 2, &x)) return false;
        if (x != 0) return refuse(j, NULL, "%s is not supported; leave it out or 0", number[i]);
    }
    if (!read_number(j, "n", 1, 1, &n)) return refuse(j, NULL, "n is not supported beyond 1");
    if (json_field(j->request, "logit_bias") && json_object_object_length(json_field(j->request, "logit_bias")) > 0)
        return refuse(j, NULL, "logit_bias is not supported");
    if (json_object_get_boolean(json_field(j->request, "logprobs"))) return refuse(j, NULL, "logprobs are not supported");
    const char *format = json_string(json_field(j->request, "response_format"), "type");
    if (format && strcmp(format, "text") != 0)
        return refuse(j, NULL, "response_format %s is not enforced here; ask for it in the message", format);
    return true;
}

static bool read_stops(http_job *j, work *w) {
    json_object *stop = json_field(j->request, "stop");
    size_t n = json_is(stop, json_type_array) ? json_object_array_length(stop) : stop ? 1 : 0;
    if (n > MOST_STOPS) return refuse(j, NULL, "stop has more than %d texts", MOST_STOPS);
    for (size_t i = 0; i < n; i++) {
        json_object *one = json_is(stop, json_type_array) ? json_object_array_get_idx(stop, i) : stop;
        if (!json_is(one, json_type_string) || json_object_get_string_len(one) == 0)
            return refuse(j, NULL, "stop is not a text or a list of texts");
        w->stop[w->n_stop++] = json_object_get_string(one);
    }
    return true;
}

static bool read_settings(const server *s, http_job *j, work *w) {
    double t = w->sampler.temperature, p = w->sampler.top_p, k = w->sampler.top_k, most = 0, seed = -1;
    uint64_t drawn = 0;
    const char *limit = json_field(j->request, "max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
    (void)s;
    if (!read_number(j, "temperature", 0, 100, &t) || !read_number(j, "top_p", 0, 1, &p) ||
        !read_number(j, "top_k", 0, 4294967295.0, &k) || !read_number(j, limit, 1, 2147483647, &most) ||
        !read_number(j, "seed", -9e15, 9e15, &seed))
        return false;
    if (getrandom(&drawn, sizeof drawn, 0) != (ssize_t)sizeof drawn) drawn = clock_ns();
    w->sampler = (k3_sampler){.temperature = (float)t, .top_p = p > 0 ? (float)p : 1, .top_k = (uint32_t)k};
    w->sampler.seed = json_field(j->request, "seed") ? (uint64_t)(int64_t)seed : drawn >> 12; /* a double holds it */
    if (most > 0) w->most = (uint64_t)most;
    w->is_stream = json_object_get_boolean(json_field(j->request, "stream"));
    w->wants_usage = json_object_get_boolean(json_field(json_field(j->request, "stream_options"), "include_usage"));
    w->model = json_string(j->request, "model");
    return true;
}

/* The messages with the fields that the chat format knows; clients send others. */
static json_object *clean_messages(json_object *messages) {
    static const char *const key[] = {"content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "tools"};
    json_object *out = json_object_new_array();
    for (size_t i = 0; i < json_object_array_length(messages); i++) {
        json_object *m = json_object_array_get_idx(messages, i), *c = json_object_new_object();
        const char *role = json_string(m, "role");
        bool is_tool = role && strcmp(role, "tool") == 0, is_reply = role && strcmp(role, "assistant") == 0;
        if (role) json_put(c, "role", text_of(strcmp(role, "developer") == 0 ? "system" : role));
        for (size_t k = 0; k < COUNT(key); k++) {
            json_object *v = json_field(m, key[k]);
            bool fits = k < 2 || (k == 3 ? is_tool : k == 6 ? !is_tool && !is_reply : is_reply);
            if (v && fits) json_put(c, key[k], json_object_get(v));
        }
        if (!json_field(c, "content")) json_put(c, "content", text_of(""));
        json_object_array_add(out, c);
    }
    return out;
}

static void read_clean(http_job *j, work *w) {
    static const char *const key[] = {"tools", "tool_choice", "reasoning_effort", "thinking"};
    w->clean = json_object_new_object();
    w->messages = clean_messages(json_field(j->request, "messages"));
    json_put(w->clean, "messages", w->messages);
    for (size_t i = 0; i < COUNT(key); i++)
        if (json_field(j->request, key[i])) json_put(w->clean, key[i], json_object_get(json_field(j->request, key[i])));
}

/* The prompt's length in ids, by the text that the chat format makes of it. */
static bool check_length(server *s, http_job *j, work *w) {
    render_state r = {.thinks = s->chat.own_thinks, .effort = s->chat.own_effort};
    uint64_t context = k3_session_context(s->chat.s);
    k3_error err = {{0}};
    xtml x = {0};
    int status = render_request(&x, w->clean, &r, &err);
    if (status >= 0) status = xtml_encode(&x, s->t, &err);
    w->n_prompt = x.n_id;
    xtml_free(&x);
    json_object_put(r.calls);
    if (status < 0) return refuse(j, NULL, "%s", err.text);
    if (w->n_prompt < context) return true;
    return refuse(j, "context_length_exceeded", "the conversation has %zu ids and the context holds %llu, the answer included",
                  w->n_prompt, (unsigned long long)context);
}

static bool post_chat(server *s, http_job *j) {
    if (!json_is(json_field(j->request, "messages"), json_type_array)) return refuse(j, NULL, "messages is not a list") || true;
    work *w = j->work = calloc(1, sizeof *w);
    if (!w) return refuse(j, NULL, "no memory for this request") || true;
    *w = (work){.job = j, .sampler = s->chat.a->sampler, .most = s->most, .created = time(NULL)};
    if (!check_unsupported(j) || !read_stops(j, w) || !read_settings(s, j, w)) return true;
    read_clean(j, w);
    if (!check_length(s, j, w)) return true;
    uint64_t name[2] = {clock_ns(), 0};
    if (getrandom(name, sizeof name, 0) < 0) name[1] = (uint64_t)(uintptr_t)w;
    snprintf(w->id, sizeof w->id, "chatcmpl-%016llx%08x", (unsigned long long)name[0], (unsigned)name[1]);
    if (http_queue(j, w->is_stream)) return false;
    http_error(j, 503, "server_error", "queue_full", "too many requests are waiting; try again later");
    return true;
}

/* ---- Small answers ---- */

static json_object *model_object(const server *s) {
    json_object *o = json_object_new_object();
    json_put(o, "id", text_of(s->model));
    json_put(o, "object", text_of("model"));
    json_put_count(o, "created", s->started_s);
    json_put(o, "owned_by", text_of("k3"));
    return o;
}

static void get_models(const server *s, http_job *j) {
    json_object *o = json_object_new_object(), *list = json_object_new_array();
    json_object_array_add(list, model_object(s));
    json_put(o, "object", text_of("list"));
    json_put(o, "data", list);
    out_json(j, o);
}

static void get_props(server *s, http_job *j) {
    json_object *o = json_object_new_object();
    json_put(o, "model", text_of(s->model));
    json_put(o, "system_fingerprint", text_of(s->print));
    json_put_count(o, "n_ctx", k3_session_context(s->chat.s));
    json_put_count(o, "default_max_tokens", s->most);
    json_put(o, "default_effort", s->chat.own_effort ? text_of(s->chat.own_effort) : NULL);
    json_put(o, "thinks", json_object_new_boolean(s->chat.own_thinks));
    json_put(o, "version", text_of(K3_VERSION));
    out_json(j, o);
}

static void get_metrics(server *s, http_job *j) {
    pthread_mutex_lock(&s->lock);
    uint64_t in = s->n_in, gen = s->n_gen, answers = s->n_answers;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&s->http.lock);
    uint64_t requests = s->http.n_requests, refused = s->http.n_refused, waiting = s->http.n_waiting;
    pthread_mutex_unlock(&s->http.lock);
    buf_clear(&j->out);
    const struct {
        const char *name, *type;
        uint64_t value;
    } m[] = {{"k3_requests_total", "counter", requests},      {"k3_requests_refused_total", "counter", refused},
             {"k3_requests_waiting", "gauge", waiting},       {"k3_answers_total", "counter", answers},
             {"k3_prompt_tokens_total", "counter", in},       {"k3_generated_tokens_total", "counter", gen}};
    for (size_t i = 0; i < COUNT(m); i++)
        buf_printf(&j->out, "# TYPE %s %s\n%s %llu\n", m[i].name, m[i].type, m[i].name, (unsigned long long)m[i].value);
    j->status = 200;
}

static void post_tokenize(server *s, http_job *j) {
    const char *text = json_string(j->request, "content");
    if (!text) text = json_string(j->request, "prompt");
    if (!text) {
        refuse(j, NULL, "content is not a text");
        return;
    }
    size_t n = strlen(text);
    uint32_t *ids = malloc((n + 1) * sizeof *ids);
    k3_error err = {{0}};
    int64_t n_ids = ids ? k3_encode(s->t, text, n, K3_TEXT, ids, n, &err) : -1;
    json_object *o = json_object_new_object(), *list = json_object_new_array();
    for (int64_t i = 0; i < n_ids; i++) json_object_array_add(list, json_object_new_int64(ids[i]));
    json_put(o, "tokens", list);
    free(ids);
    out_json(j, o);
}

static void post_detokenize(server *s, http_job *j) {
    json_object *list = json_field(j->request, "tokens");
    buf text = {0}, valid = {0};
    if (!json_is(list, json_type_array)) {
        refuse(j, NULL, "tokens is not a list of ids");
        return;
    }
    for (size_t i = 0; i < json_object_array_length(list); i++) {
        size_t n = 0;
        int64_t id = json_object_get_int64(json_object_array_get_idx(list, i));
        const char *p = id >= 0 && id < UINT32_MAX ? k3_id_bytes(s->t, (uint32_t)id, &n) : NULL;
        if (p) buf_add(&text, p, n);
    }
    buf_add_valid(&valid, buf_text(&text), text.n);
    json_object *o = json_object_new_object();
    json_put(o, "content", json_object_new_string_len(buf_text(&valid), (int)valid.n));
    buf_free(&text);
    buf_free(&valid);
    out_json(j, o);
}

/* ---- Routes ---- */

static bool route_get(server *s, http_job *j) {
    if (strcmp(j->path, "/") == 0) {
        buf_clear(&j->out);
        for (size_t i = 0; PAGE[i]; i++) buf_puts(&j->out, PAGE[i]);
        j->status = 200;
    } else if (strcmp(j->path, "/health") == 0) {
        json_object *o = json_object_new_object();
        json_put(o, "status", text_of("ok"));
        out_json(j, o);
    } else if (strcmp(j->path, "/v1/models") == 0) {
        get_models(s, j);
    } else if (strncmp(j->path, "/v1/models/", 11) == 0 && strcmp(j->path + 11, s->model) == 0) {
        out_json(j, model_object(s));
    } else if (strcmp(j->path, "/props") == 0) {
        get_props(s, j);
    } else if (strcmp(j->path, "/metrics") == 0) {
        get_metrics(s, j);
    } else {
        return false;
    }
    return true;
}

static bool read_body(http_job *j) {
    const char *why = NULL;
    size_t at = 0;
    j->request = json_read(buf_text(&j->body), j->body.n, &at, &why);
    if (why) return refuse(j, NULL, "the body is no JSON: byte %zu: %s", at + 1, why);
    if (!json_is(j->request, json_type_object)) return refuse(j, NULL, "the body is no JSON object");
    return true;
}

/* On the HTTP thread: true when the answer is in j->out. */
static bool serve_answer(http_server *h, http_job *j) {
    server *s = h->user;
    static const char *const post[] = {"/v1/chat/completions", "/tokenize", "/detokenize"};
    size_t i = 0;
    if (strcmp(j->method, "GET") == 0 && route_get(s, j)) return true;
    while (i < COUNT(post) && strcmp(j->path, post[i]) != 0) i++;
    if (i == COUNT(post)) {
        http_error(j, 404, "invalid_request_error", "not_found", "no such address here; GET /v1/models, POST /v1/chat/completions");
        return true;
    }
    if (strcmp(j->method, "POST") != 0) {
        http_error(j, 405, "invalid_request_error", NULL, "this address takes POST");
        return true;
    }
    if (!read_body(j)) return true;
    if (i == 0) return post_chat(s, j);
    if (i == 1) post_tokenize(s, j);
    if (i == 2) post_detokenize(s, j);
    return true;
}

static void serve_forget(http_job *j) {
    work *w = j->work;
    if (!w) return;
    json_object_put(w->clean);
    json_object_put(w->calls);
    buf_free(&w->think);
    buf_free(&w->answer);
    free(w);
}

/* ---- Answers, on the main thread ---- */

static json_object *frame(const server *s, const work *w, const char *object) {
    json_object *o = json_object_new_object();
    json_put(o, "id", text_of(w->id));
    json_put(o, "object", text_of(object));
    json_put_count(o, "created", (uint64_t)w->created);
    json_put(o, "model", text_of(w->model ? w->model : s->model));
    json_put(o, "system_fingerprint", text_of(s->print));
    return o;
}

static void send_event(work *w, json_object *o) {
    buf line = {0};
    buf_puts(&line, "data: ");
    buf_puts(&line, json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
    buf_puts(&line, "\n\n");
    http_add(w->job, buf_text(&line), line.n);
    buf_free(&line);
    json_object_put(o);
}

/* A chunk with one choice; `delta` becomes the chunk's. */
static void send_delta(const server *s, work *w, json_object *delta, const char *finish) {
    json_object *o = frame(s, w, "chat.completion.chunk"), *choice = json_object_new_object(), *list = json_object_new_array();
    json_put_count(choice, "index", 0);
    json_put(choice, "delta", delta);
    json_put(choice, "finish_reason", finish ? text_of(finish) : NULL);
    json_object_array_add(list, choice);
    json_put(o, "choices", list);
    send_event(w, o);
}

static void send_text(const server *s, work *w, const char *key, const char *p, size_t n) {
    json_object *delta = json_object_new_object();
    json_put(delta, key, json_object_new_string_len(p, (int)n));
    send_delta(s, w, delta, NULL);
}

static json_object *usage(const server *s, const work *w) {
    const chat *c = &s->chat;
    json_object *o = json_object_new_object(), *in = json_object_new_object();
    json_put_count(o, "prompt_tokens", w->n_prompt);
    json_put_count(o, "completion_tokens", c->last.n_gen);
    json_put_count(o, "total_tokens", w->n_prompt + c->last.n_gen);
    json_put_count(in, "cached_tokens", w->n_prompt > c->last.n_prompt ? w->n_prompt - c->last.n_prompt : 0);
    json_put(o, "prompt_tokens_details", in);
    return o;
}

/* What may be sent of the answer: not what may be the beginning of a stop text. */
static bool answer_send(server *s, work *w, bool is_end) {
    const char *from = buf_text(&w->answer) + w->n_out;
    bool is_met = false;
    size_t n = stop_before(from, w->answer.n - w->n_out, w->stop, w->n_stop, is_end, &is_met);
    if (n && w->is_stream) send_text(s, w, "content", from, n);
    w->n_out += n;
    w->is_met = w->is_met || is_met;
    return !w->is_met;
}

static bool on_text(void *user, bool is_thinking, const char *p, size_t n) {
    server *s = user;
    work *w = s->work;
    buf_add(is_thinking ? &w->think : &w->answer, p, n);
    if (is_thinking) {
        if (w->is_stream) send_text(s, w, "reasoning_content", p, n);
        return true;
    }
    return answer_send(s, w, false);
}

static void on_call(void *user, json_object *part) {
    server *s = user;
    if (!s->work->is_stream) return;
    json_object *delta = json_object_new_object(), *list = json_object_new_array();
    json_object_array_add(list, json_object_get(part));
    json_put(delta, "tool_calls", list);
    send_delta(s, s->work, delta, NULL);
}

static const char *finish_of(const work *w, const char *why) {
    if (w->calls) return "tool_calls";
    return w->is_met || strcmp(why, "eos") == 0 || strcmp(why, "stop") == 0 ? "stop" : "length";
}

/* The end of a stream: the last chunk, usage, [DONE]. */
static void end_stream(const server *s, work *w, const char *why) {
    send_delta(s, w, json_object_new_object(), finish_of(w, why));
    if (w->wants_usage) {
        json_object *o = frame(s, w, "chat.completion.chunk");
        json_put(o, "choices", json_object_new_array());
        json_put(o, "usage", usage(s, w));
        send_event(w, o);
    }
    http_add(w->job, "data: [DONE]\n\n", 14);
}

static void end_whole(const server *s, work *w, const char *why) {
    json_object *o = frame(s, w, "chat.completion"), *choice = json_object_new_object(), *m = json_object_new_object();
    json_object *list = json_object_new_array();
    json_put(m, "role", text_of("assistant"));
    bool has_text = w->n_out > 0 || !w->calls;
    json_put(m, "content", has_text ? json_object_new_string_len(buf_text(&w->answer), (int)w->n_out) : NULL);
    if (w->think.n) json_put(m, "reasoning_content", json_text(&w->think));
    if (w->calls) json_put(m, "tool_calls", json_object_get(w->calls));
    json_put_count(choice, "index", 0);
    json_put(choice, "message", m);
    json_put(choice, "finish_reason", text_of(finish_of(w, why)));
    json_object_array_add(list, choice);
    json_put(o, "choices", list);
    json_put(o, "usage", usage(s, w));
    json_put_count(o, "seed", w->sampler.seed);
    buf text = {0};
    buf_puts(&text, json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE));
    http_add(w->job, buf_text(&text), text.n);
    buf_free(&text);
    json_object_put(o);
}

static void on_reply_end(void *user, const char *why, json_object *calls) {
    server *s = user;
    work *w = s->work;
    answer_send(s, w, true);
    w->calls = json_object_get(calls);
    if (w->is_stream)
        end_stream(s, w, why);
    else
        end_whole(s, w, why);
}

static bool on_left(void *user) { return http_is_left(((server *)user)->work->job); }

static const reply_sink SINK = {on_text, on_call, on_reply_end, on_left};

/* An answer that failed: as an event where the status is out, else as the whole answer. */
static unsigned serve_failed(server *s, work *w, int rc) {
    http_job *j = w->job;
    const char *why = s->chat.told.n ? buf_text(&s->chat.told) : "the answer could not be made";
    bool is_theirs = rc == FAIL_USAGE;
    if (!w->is_stream) {
        http_error(j, is_theirs ? 400 : 500, is_theirs ? "invalid_request_error" : "server_error", NULL, why);
        return is_theirs ? 400 : 500;
    }
    json_object *o = json_object_new_object(), *e = json_object_new_object();
    json_put(e, "message", text_of(why));
    json_put(e, "type", text_of(is_theirs ? "invalid_request_error" : "server_error"));
    json_put(o, "error", e);
    send_event(w, o);
    return 200;
}

static void serve_job(server *s, http_job *j) {
    work *w = s->work = j->work;
    chat *c = &s->chat;
    unsigned status = 200;
    if (http_is_left(j)) {
        http_finish(j, 200);
        return;
    }
    buf_clear(&c->told);
    c->out.is_left = false;
    c->sampler = w->sampler;
    c->most = w->most;
    uint64_t n_before = c->n_reply;
    if (w->is_stream) {
        json_object *delta = json_object_new_object();
        json_put(delta, "role", text_of("assistant"));
        json_put(delta, "content", text_of(""));
        send_delta(s, w, delta, NULL);
    }
    int rc = chat_whole(c, w->messages, w->clean);
    if (rc != DONE && (c->n_reply == n_before || c->told.n)) status = serve_failed(s, w, rc);
    pthread_mutex_lock(&s->lock);
    s->n_answers++;
    s->n_in += c->last.n_prompt;
    s->n_gen += c->last.n_gen;
    pthread_mutex_unlock(&s->lock);
    buf_clear(&c->told);
    s->work = NULL;
    http_finish(j, status);
}

/* ---- The command ---- */

/* The directory's last name, and the fingerprint that answers carry. */
static int serve_names(server *s) {
    k3_fingerprints print;
    k3_error err = {{0}};
    char path[4096];
    snprintf(path, sizeof path, "%s", s->chat.dir);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
    const char *slash = strrchr(path, '/');
    snprintf(s->model, sizeof s->model, "%.200s", slash ? slash + 1 : path);
    int status = k3_engine_fingerprints(s->chat.e, &print, &err);
    if (status < 0) return fail_status(status, &err);
    snprintf(s->print, sizeof s->print, "%s-%016llx", K3_NUMERICS_ID,
             (unsigned long long)(print.by_sums ? print.by_sums : print.sampled));
    s->started_s = (uint64_t)time(NULL);
    return DONE;
}

static int serve_open(server *s, const cli_args *a) {
    k3_error err = {{0}};
    chat *c = &s->chat;
    chat_settings(c, a);
    c->is_terminal = c->out.is_screen = false;
    c->more_bytes = 2ull * HTTP_MOST_BODY + HTTP_CONNECTIONS * HTTP_CONNECTION_BYTES; /* bodies, and their JSON */
    int rc = model_find(a, &c->dir);
    int status = rc == DONE ? k3_tokenizer_open(&c->t, c->dir, &err) : 0;
    if (rc == DONE && status >= 0) status = k3_tokenizer_open(&s->t, c->dir, &err);
    if (rc == DONE && status >= 0) status = marks_find(&c->marks, c->t, &err);
    if (status < 0) rc = fail_status(status, &err);
    signals_catch();
    if (rc == DONE) rc = chat_open(c);
    if (rc == DONE) rc = serve_names(s);
    s->most = c->most;
    c->out.sink = &SINK;
    c->out.sink_user = s;
    s->http.answer = serve_answer;
    s->http.forget = serve_forget;
    s->http.user = s;
    return rc == DONE ? http_open(&s->http, a->serve.listen, a->serve.keys, (size_t)a->serve.queue) : rc;
}

int cmd_serve(const cli_args *given) {
    static server s;
    cli_args a = *given;
    a.json = true; /* what a chat would say goes to its caller */
    pthread_mutex_init(&s.lock, NULL);
    int rc = serve_open(&s, &a);
    if (rc == DONE && !a.quiet)
        say("listening on http://%s: %s, context %llu, effort %s, %s%llu ids an answer; Ctrl-C ends", a.serve.listen, s.model,
            (unsigned long long)k3_session_context(s.chat.s), s.chat.own_effort ? s.chat.own_effort : "none",
            s.chat.most ? "at most " : "as the context holds, ", (unsigned long long)s.chat.most);
    while (rc == DONE && !interrupted) {
        http_job *j = http_next(&s.http, &interrupted);
        if (j) serve_job(&s, j);
    }
    if (s.http.answer) http_close(&s.http);
    chat_close(&s.chat);
    k3_tokenizer_close(s.t);
    return rc;
}
