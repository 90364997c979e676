/* chat.c - `k3 chat`: a conversation on a terminal or through pipes.
 *
 * What holds everywhere: a conversation is one row of ids that only grows at its end. Rendered
 * messages and generated ids are appended and never made anew, so nothing is tokenised twice and a
 * turn computes its new ids only. Text is encoded apart from control tokens (K3-SPEC 4.4): no text,
 * whoever wrote it, becomes one. The ids past the session's position are waiting to be run; that
 * is how a reply that was stopped is closed, and how anything that cost the session its state (a
 * step given up, an undo without a snapshot) is made good with the next turn.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/chat_commands.h"
#include "cli/console.h"
#include "cli/edit.h"
#include "cli/inputs.h"
#include "cli/json.h"
#include "cli/messages.h"
#include "cli/output.h"
#include "cli/show.h"
#include "cli/talk.h"
#include "cli/xtml.h"

#include <errno.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

/* --render: a line of ids and a line for each segment; --ids-only the first, --json all in one. */
static int render_print(const cli_args *a, const xtml *x) {
    json_object *o = json_object_new_object(), *ids = json_object_new_array();
    json_object *segments = json_object_new_array();
    int rc = DONE;
    for (size_t i = 0; i < x->n_id && a->json; i++)
        json_object_array_add(ids, json_object_new_int64(x->id[i]));
    for (size_t i = 0; i < x->n_id && !a->json; i++)
        printf("%s%u", i ? "," : "", (unsigned)x->id[i]);
    if (!a->json) puts("");
    for (size_t i = 0; i < x->n_segment && !a->ids_only; i++) {
        const xtml_segment *s = &x->segment[i];
        const char *mode = s->is_control ? "control" : "text";
        if (a->json) {
            json_object *one = json_object_new_object(), *of = json_object_new_array();
            for (size_t j = 0; j < s->n_ids; j++)
                json_object_array_add(of, json_object_new_int64(x->id[s->first_id + j]));
            json_put(one, "mode", json_object_new_string(mode));
            json_put(one, "text", json_object_new_string_len(x->text.p + s->at, (int)s->n));
            json_put(one, "ids", of);
            json_object_array_add(segments, one);
            continue;
        }
        printf("%s\t", mode);
        for (size_t j = 0; j < s->n_ids; j++)
            printf("%s%u", j ? "," : "", (unsigned)x->id[s->first_id + j]);
        putchar('\t');
        put_escaped(x->text.p + s->at, s->n);
        puts("");
    }
    json_put(o, "ids", ids);
    if (!a->ids_only) json_put(o, "segments", json_object_get(segments));
    json_object_put(segments);
    if (a->json)
        rc = out_json_line(o);
    else
        json_object_put(o);
    return rc != DONE ? rc : fflush(stdout) != 0 ? fail_stdout(errno) : DONE;
}

/* Line and column of an error in JSON. */
static int fail_json(const char *name, const char *p, size_t at, const char *why) {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        column = p[i] == '\n' ? 1 : column + 1;
        line += p[i] == '\n';
    }
    return fail(FAIL_USAGE, "%s: line %zu, column %zu: %s", name, line, column, why);
}

static int render_file(const cli_args *a, k3_tokenizer *t) {
    const char *name = strcmp(a->chat.render, "-") == 0 ? "stdin" : a->chat.render, *why = NULL;
    render_state s = {.thinks = !a->chat.no_think, .effort = EFFORT[a->chat.effort]};
    blob file = {0};
    xtml x = {0};
    k3_error err = {{0}};
    buf text = {0};
    size_t at = 0;
    int rc = blob_read(&file, a->chat.render, SIZE_MAX), status = K3_OK;
    buf_add(&text, file.p, file.n); /* with a NUL behind */
    free(file.p);
    if (rc == DONE && text.is_short) rc = fail_memory(name, file.n);
    json_object *root = rc == DONE ? json_read(text.p, text.n, &at, &why) : NULL;
    if (why) rc = fail_json(name, text.p, at, why);
    if (rc == DONE) status = render_request(&x, root, &s, &err);
    if (rc == DONE && status >= 0) status = xtml_encode(&x, t, &err);
    if (status < 0) rc = fail(exit_code(status), "%s: %s", name, err.text);
    if (rc == DONE) rc = render_print(a, &x);
    json_object_put(root);
    json_object_put(s.calls);
    xtml_free(&x);
    buf_free(&text);
    return rc;
}

uint64_t chat_template_ids(k3_tokenizer *t) {
    render_state s = {.thinks = true, .effort = EFFORT[EFFORT_MAX]};
    chat_marks marks;
    xtml x = {0};
    k3_error err = {{0}};
    uint64_t n = 0;
    const char *text = "[{\"role\":\"user\",\"content\":\"\"}]", *why = NULL;
    size_t at = 0;
    json_object *root = json_read(text, strlen(text), &at, &why);
    if (!why && marks_find(&marks, t, &err) >= 0 && render_request(&x, root, &s, &err) >= 0 &&
        xtml_encode(&x, t, &err) >= 0)
        n = x.n_id;
    json_object_put(root);
    json_object_put(s.calls);
    xtml_free(&x);
    return n;
}

/* A system message of --json waits for the next turn. */
static int chat_json_system(chat *c, json_object *m) {
    k3_error err = {{0}};
    xtml x = {0};
    int status = message_check(m, "system", "message", &err);
    if (status >= 0)
        status = render_system(&x, m, "message", &err); /* now, so that the turn cannot fail */
    xtml_free(&x);
    if (status < 0) return complain_status(c, status, &err);
    if (!c->queue) c->queue = json_object_new_array();
    json_object_array_add(c->queue, json_object_get(m));
    tell(c, "(goes with your next message)");
    return DONE;
}

/* A whole conversation, whose max_tokens bounds this reply alone. */
static int chat_request(chat *c, json_object *messages, json_object *request) {
    json_object *most = json_field(request, "max_completion_tokens");
    uint64_t before = c->most;
    if (!most) most = json_field(request, "max_tokens");
    if (most && ((!json_is(most, json_type_int) && !json_is(most, json_type_double)) || json_object_get_int64(most) < 1))
        return complain(c, FAIL_USAGE, "max_tokens is not a number of 1 or more");
    if (most) c->most = (uint64_t)json_object_get_int64(most);
    int rc = chat_whole(c, messages, request);
    c->most = before;
    return rc;
}

/* A line of --json. An object with `messages` is a whole conversation, as OpenAI's API means it; a
 * text, a message or an array of messages is an addition to the one that is there, whatever made it.
 * An object with `command` is a command. */
static int chat_json(chat *c, const buf *line) {
    k3_error err = {{0}};
    const char *why;
    size_t at;
    json_object *root = json_read(buf_text(line), line->n, &at, &why), *messages = NULL;
    if (why) return complain(c, FAIL_USAGE, "this line is no JSON: column %zu: %s", at + 1, why);
    const char *command = json_string(root, "command");
    int rc = DONE, status = K3_OK;
    c->out.streams = false;
    if (command && json_object_object_length(root) == 1) {
        rc = chat_command_run(c, command);
    } else if (json_equals(json_field(root, "role"), "system")) {
        rc = chat_json_system(c, root);
    } else if ((status = request_messages(root, &messages, &err)) < 0) {
        rc = complain_status(c, status, &err);
    } else if (is_request(root)) {
        c->out.streams = json_object_get_boolean(json_field(root, "stream"));
        rc = chat_request(c, messages, root);
    } else {
        rc = chat_turn(c, messages);
    }
    json_object_put(messages);
    json_object_put(root);
    return rc;
}

/* With --json every line in gets a line out: a reply wrote its own. */
static int chat_json_answer(chat *c, int rc, bool is_command) {
    if (rc == DONE && !is_command) return DONE;
    json_object *o = json_object_new_object(), *error = json_object_new_object();
    if (rc == DONE) {
        json_put(o, "done", json_text(&c->told));
    } else {
        json_put(error, "message", json_text(&c->told));
        json_put(error, "code", json_object_new_int(rc));
        json_put(o, "error", json_object_get(error));
    }
    json_object_put(error);
    return out_json_line(o);
}

static int chat_text_turn(chat *c, const char *p, size_t n) {
    json_object *messages = json_object_new_array(), *m = json_object_new_object();
    json_put(m, "role", json_object_new_string("user"));
    json_put(m, "content", json_object_new_string_len(p, (int)n));
    json_object_array_add(messages, m);
    int rc = chat_turn(c, messages);
    json_object_put(messages);
    return rc;
}

/* Why a line cannot be taken at all. */
static int line_check(chat *c, const buf *line) {
    if (line->is_short) return complain(c, FAIL_IO, "no memory for this line");
    if (line->n < c->edit->most) return DONE;
    return complain(c, FAIL_USAGE, "a line of %zu KiB or more is no message%s", c->edit->most >> 10,
                    c->a->json ? "" : " with this --ram");
}

/* Whatever becomes of a line: with --json it gets a line, and on a pipe a turn its end. */
static int chat_line(chat *c, const buf *line) {
    const char *p = buf_text(line);
    uint64_t n_before = c->n_reply;
    int rc = line_check(c, line);
    if (c->a->json) {
        if (rc == DONE) rc = chat_json(c, line);
        int answered = chat_json_answer(c, rc, c->n_reply == n_before);
        if (rc != DONE || c->n_reply == n_before) buf_clear(&c->told);
        say_told(c);
        return answered != DONE ? answered : rc;
    }
    if (p[0] == '/' && p[1] != '/') return rc == DONE ? chat_command_run(c, p) : rc;
    size_t skip = p[0] == '/' ? 1 : 0;
    if (rc == DONE) rc = chat_text_turn(c, p + skip, line->n - skip);
    if (c->n_reply == n_before && !c->is_terminal) {
        int ended = out_write(c->a->chat.null_ends ? "\0" : "\n", 1);
        if (rc == DONE) rc = ended;
    }
    return rc;
}

static bool is_blank(const buf *line) {
    for (size_t i = 0; i < line->n; i++)
        if (!strchr(" \t\r\n", line->p[i]) || !line->p[i]) return false;
    return true;
}

/* Lines until there are no more. The exit code: that of the first that failed, on a pipe. */
static int chat_loop(chat *c) {
    buf line = {0};
    int rc = DONE;
    while (!c->is_over && !terminated && !ferror(stdout)) {
        if (c->is_terminal) interrupted = 0; /* on a pipe it ends everything, whenever it came */
        int got = interrupted ? LINE_STOPPED : edit_line(c, &line);
        if (got == LINE_STOPPED && c->is_terminal && !terminated) {
            fputs("\n(Ctrl-D or /quit leaves)\n", stderr);
            continue;
        }
        if (got == LINE_STOPPED) terminated = 1;
        if (got == LINE_END && c->is_terminal) fputs("\n", stderr);
        if (got != LINE_TAKEN) break;
        if (!line.is_short && is_blank(&line)) continue;
        int failed = chat_line(c, &line);
        if (line.is_short) buf_free(&line);
        if (failed != DONE && c->worst == DONE) c->worst = failed;
    }
    buf_free(&line);
    if (terminated) rc = INTERRUPTED;
    if (rc == DONE && !c->is_terminal) rc = c->worst;
    return ferror(stdout) ? FAIL_IO : rc;
}

/* The engine with room for snapshots, or, where the budget has none for them, without. */
static int chat_engine(chat *c) {
    k3_options o = engine_options(c->a, c->dir, &c->con);
    c->progress = o.progress;
    o.progress = chat_progress;
    o.note = chat_note;
    k3_error err = {{0}};
    engine_gpu(c->a, &o);
    o.snapshots = (uint32_t)c->a->chat.undo;
    o.caller_bytes += c->more_bytes;
    o.revocable = drafts_revocable(args_draft(c->a));
    ram_say(&c->con, &o);
    int status = engine_open_drafts(&c->e, &o, &err);
    console_clear(&c->con);
    if (status == K3_EBUDGET && o.snapshots && !is_given(c->a, "--undo")) {
        o.snapshots = 0;
        status = engine_open_drafts(&c->e, &o, &err);
        console_clear(&c->con);
        if (status >= 0 && !c->a->quiet)
            say("note: --ram has no room for a snapshot: /undo has to read again%s",
                c->a->cache ? " what the cache does not have" : ", or needs --cache DIR");
    }
    if (status < 0) return fail_status(status, &err);
    c->con.n_layers = k3_engine_shape(c->e)->n_layers;
    threads_say(&c->con, c->e, &o);
    return DONE;
}

static int chat_check_vocabulary(const chat *c) {
    const uint32_t id[] = {c->marks.open, c->marks.close, c->marks.sep, c->marks.end};
    for (size_t i = 0; i < COUNT(id); i++)
        if (id[i] >= c->n_vocab)
            return fail(FAIL_MODEL,
                        "the chat format needs id %u, and this model's vocabulary has "
                        "%zu: it was not made for chat; `k3 run` continues a text",
                        (unsigned)id[i], c->n_vocab);
    return DONE;
}

/* What was asked for on the command line wins over what --load brought. */
static int chat_apply_given(chat *c) {
    const cli_args *a = c->a;
    bool thought = c->render.thinks;
    const char *before = c->render.effort;
    if (is_given(a, "--temperature")) c->sampler.temperature = a->sampler.temperature;
    if (is_given(a, "--top-p")) c->sampler.top_p = a->sampler.top_p;
    if (is_given(a, "--top-k")) c->sampler.top_k = (uint32_t)a->sampler.top_k;
    if (is_given(a, "--seed")) c->sampler.seed = a->sampler.seed;
    if (is_given(a, "--no-think")) c->render.thinks = !a->chat.no_think;
    if (is_given(a, "--effort")) c->render.effort = EFFORT[a->chat.effort];
    if (before == c->render.effort) return DONE;
    int rc = chat_set_render(c, thought, before);
    if (rc == DONE) tell_again(c);
    return rc;
}

/* Defaults that follow from the model alone, never from the machine: the same command says the same
 * everywhere. A model of this size is read from disk again for each id, and what suits a small one
 * (all the thinking it wants, no limit) would be hours. */
#define LARGE_MODEL_BYTES (64ull << 30)
enum { LARGE_MODEL_TOKENS = 2048 };

static bool is_large_model(const k3_shape *s) {
    uint64_t n_experts = (uint64_t)(s->n_layers - s->n_dense) * s->n_experts;
    return s->trunk_bytes + n_experts * s->expert_bytes >= LARGE_MODEL_BYTES;
}

static void chat_defaults(chat *c) {
    bool is_large = is_large_model(k3_engine_shape(c->e));
    c->most = c->a->tokens;
    if (is_large && !is_given(c->a, "--tokens")) c->most = LARGE_MODEL_TOKENS;
    if (is_large && !is_given(c->a, "--effort")) c->render.effort = EFFORT[EFFORT_LOW];
    chat_own_settings(c);
}

/* Bytes read from disk for one id of a reply, by the plan. Experts are taken to be wanted evenly: hot
 * ones that stay in memory make it less, checks and far boxes are not counted. */
static double reply_id_bytes(const k3_shape *s, const k3_plan *p) {
    double wanted = (double)(s->n_layers - s->n_dense) * s->top_k * (double)s->expert_bytes;
    double kept = s->n_experts && p->quota < s->n_experts ? (double)p->quota / s->n_experts : 1;
    return (double)p->streamed_bytes + wanted * (1 - kept);
}

static const char *fmt_time(char text[32], double seconds) {
    if (seconds < 120)
        snprintf(text, 32, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
    else if (seconds < 7200)
        snprintf(text, 32, "%.0f min", seconds / 60);
    else
        snprintf(text, 32, seconds < 360000 ? "%.1f h" : "%.0f h", seconds / 3600);
    return text;
}

/* What a reply may take, said before the first one: a line about the settings and, where weights are
 * read again and again, one about bytes and time. */
static void replies_describe(buf *out, const chat *c, const k3_shape *s, const k3_plan *p) {
    enum { SHORT_REPLY = 200 };
    char id[32], some[32], all[32], bytes[32];
    uint64_t most = c->most && c->most < p->context ? c->most : p->context;
    double n_bytes = reply_id_bytes(s, p);
    buf_printf(out, "replies: thinking %s, effort %s, ", c->render.thinks ? "on" : "off",
               effort_name(c));
    if (c->most)
        buf_printf(out, "at most %llu ids, thinking included", (unsigned long long)c->most);
    buf_puts(out, c->most ? "" : "as long as the context holds");
    buf_puts(out, " (--effort, --no-think, --tokens; /effort, /think, /tokens)");
    if (n_bytes <= 0) return;
    buf_printf(out, "\nk3: time: %s read for each id of a reply",
               fmt_bytes(bytes, (uint64_t)n_bytes));
    if (p->disk_bytes_per_s <= 0) {
        buf_puts(out, "; how fast the disk gives them was not measured (--io auto measures)");
        return;
    }
    double seconds = n_bytes / p->disk_bytes_per_s;
    buf_printf(out,
               ", about %s: a reply of %d ids %s, the longest of %llu %s; less where experts "
               "stay in memory, and the prompt comes first (`k3 plan`)",
               fmt_time(id, seconds), SHORT_REPLY, fmt_time(some, seconds * SHORT_REPLY),
               (unsigned long long)most, fmt_time(all, seconds * (double)most));
}

static void chat_say_replies(const chat *c) {
    buf text = {0};
    if (c->a->quiet || !(c->is_terminal || c->a->verbose || is_streaming(c->e))) return;
    replies_describe(&text, c, k3_engine_shape(c->e), k3_engine_plan(c->e));
    say("%s", buf_text(&text));
    buf_free(&text);
}

int chat_open(chat *c) {
    const cli_args *a = c->a;
    k3_error err = {{0}};
    int rc = chat_engine(c);
    if (rc != DONE) return rc;
    c->n_vocab = k3_engine_shape(c->e)->vocab_size;
    c->marks.stop[3] = k3_engine_shape(c->e)->eos_id;
    rc = chat_check_vocabulary(c);
    if (rc != DONE) return rc;
    c->row = malloc(c->n_vocab * sizeof *c->row);
    c->scratch = malloc(k3_sample_scratch(c->n_vocab) + 1);
    if (!c->row || !c->scratch) return fail_memory("a row of logits", c->n_vocab * sizeof *c->row);
    int status = k3_session_new(&c->s, c->e, 0, &err);
    if (status >= 0 && a->cache)
        status = k3_cache_open(&c->cache, c->e, a->cache, a->cache_size, &err);
    if (status < 0) return fail_status(status, &err);
    if ((rc = drafts_open(&c->d, c->s, args_draft(a), c->n_vocab)) != DONE) return rc;
    if (a->verbose || (is_streaming(c->e) && !a->quiet)) plan_say(c->e);
    chat_defaults(c);
    if (a->load) {
        rc = load_from(c, a->load);
        if (rc == DONE) rc = chat_apply_given(c);
        chat_own_settings(c);
        if (rc == DONE && a->quiet) buf_clear(&c->told);
        say_told(c);
    }
    if (rc == DONE) chat_say_replies(c);
    return rc;
}

void chat_close(chat *c) {
    if (c->s && c->e) {
        chat_forget(c);
        k3_cache_close(c->cache);
        drafts_close(&c->d);
        k3_session_free(c->s);
    }
    k3_engine_close(c->e);
    k3_tokenizer_close(c->t);
    chat_forget(c);
    buf_free(&c->told);
    buf_free(&c->notes);
    free(c->row);
    free(c->scratch);
}

void chat_settings(chat *c, const cli_args *a) {
    const char *terminal = getenv("TERM");
    c->a = a;
    c->render = (render_state){.thinks = !a->chat.no_think, .effort = EFFORT[a->chat.effort]};
    chat_own_settings(c);
    c->sampler = (k3_sampler){a->sampler.temperature, a->sampler.top_p, (uint32_t)a->sampler.top_k,
                              a->sampler.seed};
    if (a->chat.system) buf_add_valid(&c->system, a->chat.system, strlen(a->chat.system));
    c->is_terminal = !a->json && isatty(STDIN_FILENO) == 1 &&
                     (isatty(STDOUT_FILENO) == 1 || isatty(STDERR_FILENO) == 1);
    c->out.is_screen = !a->json && isatty(STDOUT_FILENO) == 1;
    c->out.has_color =
        c->is_terminal && c->out.is_screen && terminal && *terminal && strcmp(terminal, "dumb") != 0;
    c->out.hides_think = a->chat.hide_think;
    console_init(&c->con, a->quiet);
}

/* Locale for libedit: its characters are UTF-8 wherever the user is. Numbers stay in C's. */
static void chat_locale(void) {
    const char *set = setlocale(LC_CTYPE, "");
    if (!set || (!strstr(set, "UTF-8") && !strstr(set, "utf8"))) setlocale(LC_CTYPE, "C.UTF-8");
}

static int chat_run(chat *c) {
    edit_state in;
    memset(&in, 0, sizeof in);
    c->edit = &in;
    chat_signals();
    int rc = chat_open(c);
    if (rc != DONE) return interrupted ? INTERRUPTED : rc;
    if (c->is_terminal) {
        chat_locale();
        in.has_termios = tcgetattr(STDIN_FILENO, &in.was) == 0;
        if (in.has_termios) termios_at_exit = &in.was;
        edit_open(c);
        if (!c->a->quiet)
            fprintf(stderr, "k3 %s: /help lists the commands, Ctrl-D leaves\n", K3_VERSION);
    }
    in.most = line_most(c);
    rc = chat_loop(c);
    if (c->is_terminal) {
        edit_echo(&in, true);
        edit_close(&in);
        if (in.has_termios) tcsetattr(STDIN_FILENO, TCSADRAIN, &in.was);
        termios_at_exit = NULL;
    }
    return rc;
}

int cmd_chat(const cli_args *a) {
    chat c;
    k3_error err = {{0}};
    memset(&c, 0, sizeof c);
    chat_settings(&c, a);
    int rc = DONE;
    c.dir = a->engine.model_dir;
    if (a->chat.null_ends && a->json)
        rc = fail(FAIL_USAGE, "--null and --json: a line ends each reply");
    if (a->load && a->chat.system && !a->chat.render)
        rc = fail(FAIL_USAGE, "--system and --load: a conversation that is loaded has its own; "
                              "/system adds to it");
    if (a->ids_only && !a->chat.render) rc = fail(FAIL_USAGE, "--ids-only goes with --render");
    if (rc == DONE && a->chat.render &&
        a->engine.model_dir) /* the tokenizer is all that it needs */
        rc = dir_check("--model", a->engine.model_dir, "tiktoken.model");
    else if (rc == DONE)
        rc = model_find(a, &c.dir);
    int status = rc == DONE ? k3_tokenizer_open(&c.t, c.dir, &err) : K3_OK;
    if (rc == DONE && status >= 0) status = marks_find(&c.marks, c.t, &err);
    if (status < 0)
        rc = fail_status(status, &err);
    else if (rc == DONE)
        rc = a->chat.render ? render_file(a, c.t) : chat_run(&c);
    chat_close(&c);
    return rc;
}
