/* talk.c - the conversation of `k3 chat`: ids, turns, undo, and one turn.
 *
 * Ids [0, n) are the conversation, the session has run the first k3_session_pos of them. A turn
 * remembers where it began, and a snapshot of the session there while memory has room for one; the
 * prefix cache on disk is asked next. Without either the ids are still there, to be read again.
 */
#include "cli/talk.h"

#include "cli/console.h"
#include "cli/json.h"
#include "cli/messages.h"
#include "cli/show.h"
#include "cli/xtml.h"
#include "k3_common.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A line for the user, whole, valid UTF-8 and printable whoever wrote what it quotes: stderr, or
 * with --json part of the answer to the command. */
static void tell_args(chat *c, bool is_fault, const char *format, va_list args) {
    va_list again;
    buf valid = {0}, line = {0};
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *text = n >= 0 ? malloc((size_t)n + 1) : NULL;
    if (text) vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    buf_add_valid(&valid, text ? text : format, text ? (size_t)n : strlen(format));
    free(text);
    console_clear(&c->con);
    if (c->a->json) {
        if (c->told.n) buf_puts(&c->told, "\n");
        buf_add(&c->told, buf_text(&valid), valid.n);
    } else {
        put_terminal(&line, buf_text(&valid), valid.n);
        fprintf(stderr, "%s%s\n", is_fault ? "k3: " : "", buf_text(&line));
    }
    buf_free(&valid);
    buf_free(&line);
}

void say_told(chat *c) {
    buf line = {0};
    put_terminal(&line, buf_text(&c->told), c->told.n);
    if (line.n) say("%s", line.p);
    buf_free(&line);
    buf_clear(&c->told);
}

void tell(chat *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_args(c, false, format, args);
    va_end(args);
}

int complain(chat *c, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_args(c, true, format, args);
    va_end(args);
    return code;
}

int complain_status(chat *c, int status, const k3_error *err) {
    if (status == K3_ECANCEL && c->out.is_left)
        return complain(c, FAIL_IO, "stdout: nobody reads it any more, so the work was given up");
    if (status == K3_ECANCEL) return complain(c, INTERRUPTED, "interrupted");
    const char *text = err->text[0] ? err->text : k3_status_name(status);
    return complain(c, exit_code(status), "%.*s", text_whole(text), text);
}

/* The conversation that a console belongs to, which is all that the engine's callbacks get. */
static chat *chat_of(void *user) { return (chat *)(void *)((char *)user - offsetof(chat, con)); }

enum { MOST_NOTES = 16384 };

void chat_note(void *user, const char *line) {
    chat *c = chat_of(user);
    if (!c->con.hides_compute || c->con.is_quiet)
        console_note(user, line);
    else if (c->notes.n + strlen(line) > MOST_NOTES)
        c->n_left++;
    else {
        buf_puts(&c->notes, c->notes.n ? "\nk3: note: " : "note: ");
        buf_puts(&c->notes, line);
    }
}

void say_notes(chat *c) {
    if (c->notes.n) say("%s", buf_text(&c->notes));
    if (c->n_left) say("note: %llu more that are not shown", (unsigned long long)c->n_left);
    c->n_left = 0;
    buf_clear(&c->notes);
}

/* Whoever reads stdout went away: a pipe's other end was closed, a terminal hung up. */
static bool out_is_left(void) {
    struct pollfd fd = {STDOUT_FILENO, 0, 0};
    return poll(&fd, 1, 0) == 1 && (fd.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
}

enum { LOOK_NS = 250000000 };

int chat_progress(void *user, const k3_progress *p) {
    chat *c = chat_of(user);
    uint64_t now = clock_ns();
    if (p->phase == K3_PHASE_COMPUTE && now - c->out.looked_ns > LOOK_NS) {
        c->out.looked_ns = now;
        c->out.is_left = c->out.sink ? c->out.sink->is_left(c->out.sink_user) : out_is_left();
    }
    return c->out.is_left ? 1 : c->progress(user, p);
}

size_t chat_pos(const chat *c) { return (size_t)drafts_pos(&c->d); }

static int chat_reserve(chat *c, size_t n) {
    if (c->cap - c->n >= n) return DONE;
    size_t cap = c->cap * 2 + n + 256;
    uint32_t *grown = realloc(c->id, cap * sizeof *grown);
    if (!grown) return complain(c, FAIL_IO, "no memory for %zu ids", cap);
    c->id = grown;
    c->cap = cap;
    return DONE;
}

int chat_append(chat *c, const uint32_t *id, size_t n) {
    int rc = chat_reserve(c, n);
    if (rc == DONE && n) memcpy(c->id + c->n, id, n * sizeof *id);
    if (rc == DONE) c->n += n;
    return rc;
}

void turn_drop_snapshot(turn *u) {
    k3_snapshot_free(u->snap);
    k3_snapshot_free(u->after);
    free(u->row);
    u->snap = u->after = NULL;
    u->row = NULL;
}

void chat_drop_snapshots(chat *c) {
    c->is_stored = false;
    for (size_t i = 0; i < c->n_turn; i++) {
        turn_drop_snapshot(&c->turns[i]);
        c->turns[i].n_cached = 0;
    }
}

/* Tools are declared with the first turn, and go with it. */
static void chat_drop_tools(chat *c) {
    json_object_put(c->tools);
    c->tools = NULL;
}

void chat_cut_turn(chat *c) {
    turn *u = &c->turns[--c->n_turn];
    c->n = u->start;
    if (c->n < c->n_header) c->n_header = 0;
    json_object_put(c->render.calls);
    c->render.calls = u->calls;
    c->render.n_tool = u->n_tool;
    c->n_call = u->n_call;
    turn_drop_snapshot(u);
    if (c->n_turn == 0) chat_drop_tools(c);
}

void chat_recover(chat *c, const turn *u) {
    k3_error err = {{0}};
    if (u && u->snap && k3_session_restore(c->s, u->snap, &err) >= 0) return;
    k3_session_reset(c->s);
    if (c->cache && c->n > 0) {
        int64_t got = k3_cache_restore(c->cache, c->s, c->id, c->n, &err);
        if (got < 0) complain_status(c, (int)got, &err);
    }
}

typedef struct {
    k3_snapshot *snap; /* NULL: none                       */
    size_t pos;        /* 0: none                          */
    const float *row;  /* the row there; NULL: not kept    */
} place;

/* The snapshot with the most of the first `most` positions, or one with its row at n_row. */
static place chat_best_place(const chat *c, size_t most, size_t n_row) {
    place best = {NULL, 0, NULL};
    for (size_t i = 0; i < c->n_turn; i++) {
        const turn *u = &c->turns[i];
        const place one[] = {{u->snap, u->snap_pos, NULL}, {u->after, u->after_pos, u->row}};
        for (size_t j = 0; j < COUNT(one); j++)
            if (one[j].snap && one[j].pos > best.pos &&
                (one[j].pos <= most || (one[j].row && one[j].pos == n_row)))
                best = one[j];
    }
    return best;
}

void chat_recover_last(chat *c) {
    k3_error err = {{0}};
    place best;
    for (size_t most = c->n; (best = chat_best_place(c, most, 0)).snap; most = best.pos - 1)
        if (k3_session_restore(c->s, best.snap, &err) >= 0) return;
    chat_recover(c, NULL);
}

/* After a step that failed with `status`: was it because a far box lied? Then states since its first answer may be
 * wrong, and are dropped; the conversation is read again with every answer compared. */
static bool chat_distrust(chat *c, int status) {
    k3_stats st;
    k3_session_stats(c->s, &st);
    if (status != K3_ECHECK || st.far_lies == 0) return false;
    chat_drop_snapshots(c);
    c->has_row = false;
    k3_session_reset(c->s);
    return true;
}

/* A snapshot of the session as it is; older ones make room. NULL: there is none even so. */
static k3_snapshot *chat_snapshot(chat *c) {
    k3_error err = {{0}};
    k3_snapshot *snap = NULL;
    for (size_t i = 0; k3_session_snapshot(c->s, &snap, &err) < 0; i++) {
        snap = NULL;
        while (i < c->n_turn && !c->turns[i].snap && !c->turns[i].after) i++;
        if (i >= c->n_turn) return NULL;
        turn_drop_snapshot(&c->turns[i]);
    }
    return snap;
}

/* Keep the session's state for /undo. */
static void turn_snapshot(chat *c, turn *u) {
    if (chat_pos(c) == 0 || u->start > chat_pos(c) + MANY_AGAIN) return; /* chat_feed will */
    u->snap = chat_snapshot(c);
    u->snap_pos = chat_pos(c);
}

/* Keep it behind the prompt of a whole conversation, with the row that the reply begins from: the
 * next one, where it is the same or says what the model did not, goes on from here. */
static void turn_snapshot_after(chat *c) {
    size_t i = c->n_turn - 1;
    k3_snapshot *snap = chat_snapshot(c);
    if (!snap) return;
    turn_drop_snapshot(&c->turns[i]);
    c->turns[i].after = snap;
    c->turns[i].after_pos = chat_pos(c);
    c->turns[i].row = malloc(c->n_vocab * sizeof *c->row);
    if (c->turns[i].row) memcpy(c->turns[i].row, c->row, c->n_vocab * sizeof *c->row);
}

/* Whether the directory now has the state of the first n_pos ids: what was kept may be evicted, and
 * what was too large was not kept. */
static bool cache_has(const chat *c, size_t n_pos) {
    return c->cache && k3_cache_has(c->cache, c->id, n_pos);
}

bool turn_is_free(const chat *c, const turn *u) {
    return u->start == 0 || u->snap || cache_has(c, u->n_cached);
}

int turn_reserve(chat *c) {
    if (c->n_turn < c->cap_turn) return DONE;
    size_t cap = c->cap_turn * 2 + 16;
    turn *grown = realloc(c->turns, cap * sizeof *grown);
    if (!grown) return complain(c, FAIL_IO, "no memory for another turn");
    c->turns = grown;
    c->cap_turn = cap;
    return DONE;
}

static int turn_push(chat *c) {
    int rc = turn_reserve(c);
    if (rc != DONE) return rc;
    turn u = {.start = c->n, .calls = json_object_get(c->render.calls)};
    u.n_tool = c->render.n_tool;
    u.n_call = c->n_call;
    turn_snapshot(c, &u);
    if (c->is_stored) u.n_cached = chat_pos(c);
    c->turns[c->n_turn++] = u;
    return DONE;
}

void chat_reset(chat *c) {
    while (c->n_turn) chat_cut_turn(c);
    chat_drop_tools(c);
    json_object_put(c->queue);
    c->queue = NULL;
    c->n = c->n_header = 0;
    c->is_stored = false;
    c->render.thinks = c->own_thinks;
    c->render.effort = c->own_effort;
    k3_session_reset(c->s);
}

void chat_forget(chat *c) {
    while (c->n_turn) chat_cut_turn(c);
    chat_drop_tools(c);
    json_object_put(c->queue);
    json_object_put(c->render.calls);
    buf_free(&c->system);
    free(c->turns);
    free(c->id);
    c->queue = c->render.calls = NULL;
    c->turns = NULL;
    c->id = NULL;
    c->n = c->cap = c->n_header = c->cap_turn = 0;
    c->is_stored = false;
}

/* ---- One turn ----
 *
 * Messages to ids, ids through the session, ids drawn until something ends the reply, and the
 * closing of a reply that did not end itself. A turn whose messages could not be read leaves
 * everything as it was before.
 */

static int chat_append_xtml(chat *c, xtml *x) {
    k3_error err = {{0}};
    int status = xtml_encode(x, c->t, &err);
    return status < 0 ? complain_status(c, status, &err) : chat_append(c, x->id, x->n_id);
}

int chat_header(chat *c) {
    xtml x = {0};
    render_header(&x, c->tools, &c->render);
    if (c->system.n) {
        xtml_begin(&x, "message");
        xtml_attribute_text(&x, "role", "system");
        xtml_sep(&x);
        xtml_text(&x, c->system.p, c->system.n);
        xtml_end_message(&x);
    }
    int rc = chat_append_xtml(c, &x);
    c->n_header = c->n;
    xtml_free(&x);
    return rc;
}

/* Queued system messages, the turn's messages, the request's choices, the prompt. */
static int turn_render(chat *c, json_object *messages, json_object *request) {
    xtml x = {0};
    k3_error err = {{0}};
    int status = K3_OK;
    if (c->queue) status = render_messages(&x, c->queue, &c->render, &err);
    if (status >= 0) status = render_messages(&x, messages, &c->render, &err);
    if (status >= 0 && request) status = render_choices(&x, request, &err);
    xtml_prompt(&x, c->render.thinks);
    int rc = status < 0 ? complain_status(c, status, &err) : chat_append_xtml(c, &x);
    xtml_free(&x);
    return rc;
}

static int turn_check_context(chat *c) {
    uint64_t context = k3_session_context(c->s);
    size_t start = c->turns[c->n_turn - 1].start;
    if (c->n < context) return DONE; /* one position is left for the reply */
    return complain(c, FAIL_IO,
                    "context full: %zu positions are taken, this turn needs %zu more, and the "
                    "context holds %llu; /undo or /reset make room, or start with a larger "
                    "--context (the model's maximum is %u)",
                    start, c->n - start, (unsigned long long)context,
                    (unsigned)k3_engine_shape(c->e)->max_position);
}

static void chat_store(chat *c) {
    k3_error err = {{0}};
    k3_cache_stats before, after;
    c->is_stored = false;
    if (!c->cache) return;
    k3_cache_get_stats(c->cache, &before);
    int status = k3_cache_store(c->cache, c->s, &err);
    console_clear(&c->con);
    if (status < 0) complain_status(c, status, &err);
    k3_cache_get_stats(c->cache, &after);
    c->is_stored = status >= 0 && (after.stored > before.stored || cache_has(c, chat_pos(c)));
}

enum { HEADER_WORTH = 32 }; /* positions from which on a header gets a cache entry of its own */

/* Run all ids that wait, so that `row` is that of the last. */
static int chat_feed(chat *c, k3_error *err) {
    int status = K3_OK;
    turn *u = &c->turns[c->n_turn - 1];
    if (c->cache && chat_pos(c) == 0 && c->n > 1) {
        int64_t got = k3_cache_restore(c->cache, c->s, c->id, c->n - 1, err);
        if (got < 0) complain_status(c, (int)got, err);
        if (got > 0) c->last.n_cached = (uint64_t)got;
    }
    size_t pos = chat_pos(c);
    if (c->has_row && pos == c->n) return K3_OK;
    if (c->cache && pos < c->n_header && c->n_header >= HEADER_WORTH) {
        status = k3_session_feed(c->s, c->id + pos, c->n_header - pos, K3_ROWS_NONE, NULL, err);
        if (status < 0) return status;
        chat_store(c);
    }
    pos = chat_pos(c);
    if (u->start > pos + MANY_AGAIN &&
        !c->is_whole) { /* the state was lost: now it is there to keep */
        status = k3_session_feed(c->s, c->id + pos, u->start - pos, K3_ROWS_NONE, NULL, err);
        if (status < 0) return status;
        turn_snapshot(c, u);
    }
    pos = chat_pos(c);
    status = k3_session_feed(c->s, c->id + pos, c->n - pos, K3_ROWS_LAST, c->row, err);
    if (status >= 0) c->is_stored = false;
    return status;
}

/* The prompt of the turn; what becomes of it when it cannot be run is the caller's. */
static int turn_prompt(chat *c) {
    k3_error err = {{0}};
    turn *u = &c->turns[c->n_turn - 1];
    uint64_t start = clock_ns();
    c->con.hides_compute = false;
    c->con.asked_ns = 0;
    c->con.has_said_wait = false;
    c->con.n_grace = u->snap || chat_pos(c) == 0 ? 0 : 1;
    console_answer(&c->con, 0, 0);
    c->con.start_ns = c->con.last_ns = start;
    c->last.n_prompt = c->n - chat_pos(c);
    int status = chat_feed(c, &err);
    console_clear(&c->con);
    c->last.prompt_ns = clock_ns() - start;
    c->last.n_prompt -= c->last.n_cached;
    if (status >= 0) return DONE;
    if (status == K3_ECANCEL && !c->out.is_left) {
        c->last.why = "interrupt";
        return complain(c, INTERRUPTED,
                        "stopped before the reply began; your message was taken "
                        "back");
    }
    chat_distrust(c, status);
    return complain_status(c, status, &err);
}

/* Run the id just drawn. DONE, INTERRUPTED (not yet said) or an exit code. */
static int turn_step(chat *c) {
    k3_error err = {{0}};
    uint64_t start = clock_ns();
    uint64_t most = c->most ? c->most : k3_session_context(c->s) - chat_pos(c) + c->last.n_gen;
    c->con.n_grace = 1; /* a step given up costs the state: the first Ctrl-C lets it end */
    console_answer(&c->con, c->last.n_gen, most);
    int status = drafts_run(&c->d, c->id[chat_pos(c)], c->row, &err);
    console_clear(&c->con);
    c->last.gen_ns += clock_ns() - start;
    if (status >= 0) {
        c->last.n_step++;
        return DONE;
    }
    if (!chat_distrust(c, status) && k3_session_has_ended(c->s)) chat_recover_last(c);
    return status == K3_ECANCEL && !c->out.is_left ? INTERRUPTED : complain_status(c, status, &err);
}

static int turn_generate(chat *c, reply *r) {
    int rc = DONE;
    c->last.why = "tokens";
    while (rc == DONE && (c->last.n_gen < c->most || c->most == 0)) {
        if (interrupted) {
            rc = INTERRUPTED;
            break;
        }
        uint32_t id = k3_sample(c->e, &c->sampler, c->row, c->n_vocab, chat_pos(c) - 1, c->scratch);
        bool is_stop = mark_is_stop(&c->marks, id);
        c->last.n_gen++;
        if (is_stop) c->last.why = "eos";
        if (is_stop && id != c->marks.end) break; /* what it ends is closed properly instead */
        rc = chat_append(c, &id, 1);
        if (rc != DONE) break;
        reply_push(r, id);
        c->last.n_said++;
        if (reply_is_short(r)) rc = complain(c, FAIL_IO, "no memory for the text of this reply");
        if (is_stop || rc != DONE) break;
        show_reply(c, r);
        if (ferror(stdout)) rc = FAIL_IO;
        if (c->out.is_enough) {
            c->last.why = "stop";
            break;
        }
        if (rc == DONE && chat_pos(c) == k3_session_context(c->s)) {
            c->last.why = "context";
            break;
        }
        if (rc == DONE) rc = turn_step(c);
    }
    drafts_settle(&c->d);
    if (rc == INTERRUPTED) {
        c->last.why = "interrupt";
        rc = DONE;
    }
    return rc;
}

/* Close the message; what that takes is run with the next turn. */
static int turn_close(chat *c, reply *r) {
    xtml x = {0};
    reply_flush(r);
    reply_close(r, &x);
    int rc = chat_append_xtml(c, &x);
    xtml_free(&x);
    json_object_put(c->render.calls);
    c->render.calls = json_object_get(r->call.finished);
    c->render.n_tool = 0;
    c->n_call += r->call.n_finished + r->call.is_open; /* no id is used twice */
    return rc;
}

/* The turn's prompt was run: the reply, shown and closed. */
static int turn_reply(chat *c) {
    reply r;
    c->last.first_said = c->n;
    c->n_reply++;
    reply_init(&r, &c->marks, c->t, c->render.thinks, c->n_call);
    int rc = turn_generate(c, &r);
    int closed = turn_close(c, &r);
    if (rc == DONE) rc = closed;
    if (rc == DONE || !ferror(stdout)) {
        int shown = show_end(c, &r);
        if (rc == DONE) rc = shown;
    }
    reply_free(&r);
    if (rc == DONE) chat_store(c);
    return rc;
}

static void turn_begin(chat *c, bool is_whole) {
    c->last.why = "";
    c->last.n_gen = c->last.n_step = c->last.n_cached = c->last.n_said = c->last.gen_ns = c->last.n_prompt = c->last.prompt_ns = 0;
    c->is_whole = is_whole;
    c->has_row = c->out.is_enough = false;
}

int chat_turn(chat *c, json_object *messages) {
    turn_begin(c, false);
    int rc = turn_push(c);
    if (rc != DONE) return rc;
    if (c->n == 0) rc = chat_header(c);
    if (rc == DONE) rc = turn_render(c, messages, NULL);
    if (rc == DONE) rc = turn_check_context(c);
    if (rc == DONE && (rc = turn_prompt(c)) != DONE) {
        turn *u = &c->turns[c->n_turn - 1];
        c->n = u->start; /* so that the cache is not asked for more */
        chat_recover(c, u);
    }
    if (rc != DONE) {
        chat_cut_turn(c);
        return rc;
    }
    json_object_put(c->queue);
    c->queue = NULL;
    return turn_reply(c);
}

/* What a whole conversation puts aside, to be there again if no reply begins. */
typedef struct {
    uint32_t *id;
    size_t n, cap, n_header;
    turn *cut; /* turns that are not part of the new one */
    size_t n_cut;
    json_object *tools;
    render_state render;
    uint64_t n_call;
    bool is_stored;
} conversation;

/* How many ids both begin with. */
static size_t ids_shared(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b) {
    size_t n = n_a < n_b ? n_a : n_b, i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* Tool calls in a conversation's messages, so that the ids of new ones follow from it alone. */
static uint64_t messages_count_calls(json_object *messages) {
    uint64_t n = 0;
    for (size_t i = 0; i < json_object_array_length(messages); i++) {
        json_object *calls = json_field(json_object_array_get_idx(messages, i), "tool_calls");
        if (has_tools(calls)) n += json_object_array_length(calls);
    }
    return n;
}

/* The conversation of a request, rendered in place of the one that is there. */
static int whole_render(chat *c, conversation *was, json_object *messages, json_object *request) {
    k3_error err = {{0}};
    *was = (conversation){.id = c->id, .n = c->n, .cap = c->cap, .n_header = c->n_header};
    was->tools = c->tools;
    was->render = c->render;
    was->n_call = c->n_call;
    was->is_stored = c->is_stored;
    c->id = NULL;
    c->n = c->cap = c->n_header = 0;
    c->tools = json_object_get(json_field(request, "tools"));
    c->render = (render_state){.thinks = c->own_thinks, .effort = c->own_effort};
    c->n_call = messages_count_calls(messages);
    int status = render_settings(&c->render, request, &err);
    if (status < 0) return complain_status(c, status, &err);
    int rc = chat_header(c);
    if (rc == DONE) rc = turn_render(c, messages, request);
    uint64_t context = k3_session_context(c->s);
    if (rc != DONE || c->n < context) return rc;
    return complain(
        c, FAIL_IO,
        "context full: this conversation needs %zu positions and one for the reply, and "
        "the context holds %llu; send less of it, or start with a larger --context (the "
        "model's maximum is %u)",
        c->n, (unsigned long long)context, (unsigned)k3_engine_shape(c->e)->max_position);
}

/* The session at the most that it has of the new conversation's ids: where it is, at a snapshot, or
 * reset, where the cache has more. `n_shared`: ids that both conversations begin with. One id is
 * left to be run, unless its row was kept. */
static void whole_place(chat *c, size_t n_shared) {
    k3_error err = {{0}};
    size_t pos = chat_pos(c), n_cached = 0;
    size_t most = n_shared < c->n ? n_shared : c->n - 1;
    place best = chat_best_place(c, most, n_shared == c->n ? c->n : 0);
    if (pos <= most && pos >= best.pos) return;
    for (size_t i = 0; i < c->n_turn; i++) {
        size_t n = c->turns[i].n_cached;
        if (n > n_cached && n <= most && cache_has(c, n)) n_cached = n;
    }
    c->is_stored = false;
    if (n_cached > best.pos || !best.snap || k3_session_restore(c->s, best.snap, &err) < 0)
        k3_session_reset(c->s);
    c->has_row = chat_pos(c) == c->n;
    if (c->has_row) memcpy(c->row, best.row, c->n_vocab * sizeof *c->row);
}

/* Turns that both conversations have stay; those behind are put aside, and a turn for the rest
 * begins. */
static int whole_turns(chat *c, conversation *was, size_t n_shared) {
    size_t n_keep = c->n_turn;
    int rc = turn_reserve(c);
    turn *cut = malloc((c->n_turn + 1) * sizeof *cut);
    if (rc == DONE && !cut) rc = complain(c, FAIL_IO, "no memory for %zu turns", c->n_turn);
    if (rc != DONE) {
        free(cut);
        return rc;
    }
    whole_place(c, n_shared);
    turn u = {.start = was->n, .calls = was->render.calls, .n_tool = was->render.n_tool};
    u.n_call = was->n_call;
    while (n_keep > 0 && (u.start > n_shared || u.start >= c->n)) u = c->turns[--n_keep];
    was->cut = cut;
    was->n_cut = c->n_turn - n_keep;
    memcpy(cut, c->turns + n_keep, was->n_cut * sizeof *cut);
    u = (turn){.start = u.start,
               .calls = json_object_get(u.calls),
               .n_tool = u.n_tool,
               .n_call = u.n_call};
    if (c->is_stored && chat_pos(c) <= u.start) u.n_cached = chat_pos(c);
    c->turns[n_keep] = u;
    c->n_turn = n_keep + 1;
    return DONE;
}

/* No reply began: the conversation that was there is there again, to be read again where the session
 * has lost it. */
static void whole_back(chat *c, conversation *was) {
    bool is_touched = was->cut != NULL;
    if (is_touched) {
        turn *u = &c->turns[--c->n_turn];
        json_object_put(u->calls);
        turn_drop_snapshot(u);
        memcpy(u, was->cut, was->n_cut * sizeof *u);
        c->n_turn += was->n_cut;
    }
    free(was->cut);
    free(c->id);
    json_object_put(c->tools);
    json_object_put(c->render.calls);
    c->id = was->id;
    c->n = was->n;
    c->cap = was->cap;
    c->n_header = was->n_header;
    c->tools = was->tools;
    c->render = was->render;
    c->n_call = was->n_call;
    if (!is_touched) return;
    c->is_stored = false;
    chat_recover_last(c);
}

static void whole_forget(conversation *was) {
    for (size_t i = 0; i < was->n_cut; i++) {
        json_object_put(was->cut[i].calls);
        turn_drop_snapshot(&was->cut[i]);
    }
    free(was->cut);
    free(was->id);
    json_object_put(was->tools);
    json_object_put(was->render.calls);
}

int chat_whole(chat *c, json_object *messages, json_object *request) {
    conversation was;
    if (c->queue)
        return complain(c, FAIL_USAGE,
                        "messages are the whole conversation, and a system message waits for the "
                        "next single one: put it into messages, and let {\"command\":\"/reset\"} "
                        "drop the one that waits");
    turn_begin(c, true);
    int rc = whole_render(c, &was, messages, request);
    if (rc == DONE) rc = whole_turns(c, &was, ids_shared(was.id, was.n, c->id, c->n));
    if (rc == DONE) rc = turn_prompt(c);
    if (rc != DONE) {
        whole_back(c, &was);
        return rc;
    }
    whole_forget(&was);
    turn_snapshot_after(c);
    return turn_reply(c);
}
