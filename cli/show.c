/* show.c - a reply, shown as it is made.
 *
 * A terminal gets thinking dimmed, then the answer, as they are made, and never a control character
 * of the model's. A pipe gets the answer alone. --json gets one line when all is said, or deltas as
 * well if the request has "stream": true.
 */
#include "cli/show.h"

#include "cli/calls.h"
#include "cli/console.h"
#include "cli/json.h"
#include "cli/output.h"
#include "cli/inputs.h"
#include "cli/talk.h"
#include "cli/xtml.h"

#include <stdio.h>
#include <string.h>

void put_terminal(buf *out, const char *p, size_t n) {
    const unsigned char *s = (const unsigned char *)p;
    for (size_t i = 0; i < n; i++) {
        bool is_c1 = s[i] == 0xc2 && i + 1 < n && s[i + 1] < 0xa0;
        if ((s[i] < 0x20 && s[i] != '\n' && s[i] != '\t') || s[i] == 0x7f)
            buf_printf(out, "^%c", s[i] ^ 0x40);
        else if (is_c1)
            buf_printf(out, "<%02x>", s[++i]);
        else
            buf_add(out, p + i, 1);
    }
}

static const char DIM[] = "\033[2m", PLAIN[] = "\033[0m";

/* Text of one kind to stdout. */
static void show_text(chat *c, int kind, const char *p, size_t n) {
    buf out = {0};
    if (n == 0) return;
    console_clear(&c->con);
    if (c->out.is_screen && kind != (int)c->out.shown) {
        if (c->out.shown == SHOW_THINK) buf_puts(&out, c->out.has_color ? PLAIN : "");
        if (c->out.shown == SHOW_THINK) buf_puts(&out, "\n\n");
        if (kind == SHOW_THINK) buf_puts(&out, c->out.has_color ? DIM : "(thinking) ");
    }
    c->out.shown = kind;
    if (c->out.is_screen)
        put_terminal(&out, p, n);
    else
        for (size_t i = 0; i < n; i++) /* with --null a NUL ends the reply, and nothing else */
            if (p[i] || !c->a->chat.null_ends)
                buf_add(&out, p + i, 1);
            else
                buf_puts(&out, "\xef\xbf\xbd");
    out_write(buf_text(&out), out.n);
    if (c->out.is_screen && c->con.is_tty) c->con.hides_compute = true;
    if (kind == SHOW_ANSWER && p[n - 1] == '\n') say_notes(c);
    buf_free(&out);
}

static void show_delta(const char *key, const char *p, size_t n) {
    buf line = {0};
    if (n == 0) return;
    buf_printf(&line, "{\"delta\":{\"%s\":", key);
    json_write_string(&line, p, n);
    buf_puts(&line, "}}\n");
    out_write(buf_text(&line), line.n);
    buf_free(&line);
}

/* What is new in the tool calls, in the shape of OpenAI's chunks; one thing a line. */
static void show_call_deltas(reply *r) {
    json_object *part;
    while ((part = calls_delta(&r->call)) != NULL) {
        json_object *line = json_object_new_object(), *delta = json_object_new_object();
        json_object *parts = json_object_new_array();
        json_object_array_add(parts, part);
        json_put(delta, "tool_calls", parts);
        json_put(line, "delta", delta);
        out_json_line(line);
    }
}

typedef struct {
    const char *p;
    size_t n;
} text_part;

static void show_sink(chat *c, reply *r, text_part think, text_part answer) {
    json_object *call;
    bool goes_on = think.n == 0 || c->out.sink->text(c->out.sink_user, true, think.p, think.n);
    if (answer.n) goes_on = c->out.sink->text(c->out.sink_user, false, answer.p, answer.n) && goes_on;
    while ((call = calls_delta(&r->call)) != NULL) {
        c->out.sink->call(c->out.sink_user, call);
        json_object_put(call);
    }
    if (!goes_on) c->out.is_enough = true;
}

void show_reply(chat *c, reply *r) {
    const char *think = buf_text(&r->think) + c->out.n_think_out;
    const char *answer = buf_text(&r->answer) + c->out.n_answer_out;
    size_t n_think = r->think.n - c->out.n_think_out, n_answer = r->answer.n - c->out.n_answer_out;
    c->out.n_think_out = r->think.n;
    c->out.n_answer_out = r->answer.n;
    if (c->out.sink) {
        show_sink(c, r, (text_part){think, n_think}, (text_part){answer, n_answer});
        return;
    }
    if (c->a->json) {
        if (c->out.streams) show_delta("reasoning_content", think, n_think);
        if (c->out.streams) show_delta("content", answer, n_answer);
        if (c->out.streams) show_call_deltas(r);
        return;
    }
    if (c->is_terminal && c->out.is_screen && !c->out.hides_think) show_text(c, SHOW_THINK, think, n_think);
    show_text(c, SHOW_ANSWER, answer, n_answer);
}

json_object *json_text(const buf *b) { return json_object_new_string_len(buf_text(b), (int)b->n); }

static int show_json(chat *c, const reply *r) {
    json_object *o = json_object_new_object(), *ids = json_object_new_array();
    for (size_t i = c->last.first_said; i < c->last.first_said + c->last.n_said; i++)
        json_object_array_add(ids, json_object_new_int64(c->id[i]));
    json_put(o, "role", json_object_new_string("assistant"));
    json_put(o, "content", json_text(&r->answer));
    if (c->render.thinks) json_put(o, "reasoning_content", json_text(&r->think));
    if (r->call.finished) json_put(o, "tool_calls", json_object_get(r->call.finished));
    if (r->call.is_open) json_put(o, "unfinished_call", calls_unfinished(&r->call));
    json_put(o, "stop_reason", json_object_new_string(c->last.why));
    json_put(o, "ids", ids);
    json_put_count(o, "n_prompt", c->last.n_prompt);
    json_put_count(o, "n_kept", c->last.first_said - c->last.n_prompt);
    json_put_count(o, "n_cached", c->last.n_cached);
    json_put_count(o, "n_gen", c->last.n_gen);
    json_put_count(o, "n_context", c->n);
    json_put_hash(o, "context_fnv", k3_fnv1a(K3_FNV_BASIS, c->id, c->n * sizeof *c->id));
    json_put_real(o, "prompt_s", (double)c->last.prompt_ns * 1e-9);
    json_put_real(o, "gen_s", (double)c->last.gen_ns * 1e-9);
    return out_json_line(o);
}

/* Tool calls, one a line: name and arguments. */
static void show_calls(chat *c, const reply *r) {
    buf out = {0};
    for (size_t i = 0; i < r->call.n_finished; i++) {
        json_object *call = json_field(json_object_array_get_idx(r->call.finished, i), "function");
        buf line = {0};
        buf_puts(&line, i || c->out.shown == SHOW_ANSWER ? "\n" : "");
        buf_puts(&line, json_string(call, "name"));
        buf_puts(&line, " ");
        buf_puts(&line, json_string(call, "arguments"));
        buf_add(&out, line.p, line.n);
        buf_free(&line);
    }
    show_text(c, SHOW_ANSWER, buf_text(&out), out.n);
    buf_free(&out);
}

static void tell_silent_boxes(chat *c) {
    k3_stats st;
    if (c->out.has_told_silent) return;
    k3_session_stats(c->s, &st);
    c->out.has_told_silent = tiers_say_silent(c->a, &st);
}

void tell_rates(chat *c) {
    tell(c, "prompt %llu ids, %.1f tok/s; reply %llu ids, %.1f tok/s (%s); context %zu of %llu",
         (unsigned long long)c->last.n_prompt, per_second(c->last.n_prompt, c->last.prompt_ns),
         (unsigned long long)c->last.n_gen, per_second(c->last.n_step, c->last.gen_ns), c->last.why, c->n,
         (unsigned long long)k3_session_context(c->s));
}

int show_end(chat *c, reply *r) {
    int rc = DONE;
    show_reply(c, r);
    if (c->out.sink) {
        c->out.sink->end(c->out.sink_user, c->last.why, r->call.finished);
    } else if (c->a->json) {
        rc = show_json(c, r);
    } else {
        show_calls(c, r);
        if (c->out.shown == SHOW_THINK && c->out.has_color) rc = out_write(PLAIN, strlen(PLAIN));
        if (rc == DONE) rc = out_write(c->a->chat.null_ends && !c->is_terminal ? "\0" : "\n", 1);
    }
    if (ferror(stdout)) rc = FAIL_IO;
    c->out.n_think_out = c->out.n_answer_out = 0;
    c->out.shown = SHOW_NOTHING;
    c->con.hides_compute = false;
    say_notes(c);
    if (rc == DONE) tell_silent_boxes(c);
    if (rc != DONE || c->a->json) return rc;
    if (strcmp(c->last.why, "interrupt") == 0 && !c->a->quiet)
        tell(c, "(stopped; what was said is kept)");
    if (strcmp(c->last.why, "context") == 0)
        complain(c, DONE,
                 "context full: the reply ends here; /undo or /reset make room, or start "
                 "with a larger --context");
    if (strcmp(c->last.why, "tokens") == 0 && !c->a->quiet)
        tell(c, "(stopped after %llu ids: /tokens N or --tokens N allows more, 0 all that fit)",
             (unsigned long long)c->most);
    if (c->n - chat_pos(c) > MANY_AGAIN && !c->a->quiet)
        tell(c, "(that step was given up: your next turn reads %zu positions again)",
             c->n - chat_pos(c));
    if (c->a->verbose) tell_rates(c);
    return rc;
}
