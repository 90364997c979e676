/* chat_commands.c - the commands of `k3 chat`: /help lists them.
 *
 * A bad one says what is wrong and the conversation goes on. Whatever a command cannot do for
 * free it says the price of first.
 */
#include "cli/chat_commands.h"

#include "cli/console.h"
#include "cli/json.h"
#include "cli/messages.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/show.h"
#include "cli/talk.h"
#include "cli/xtml.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int help_commands(chat *c, const char *arg);

static int command_reset(chat *c, const char *arg) {
    (void)arg;
    chat_reset(c);
    tell(c, "(a new conversation%s)", c->system.n ? ", with the same system message" : "");
    return DONE;
}

static int command_system(chat *c, const char *arg) {
    if (!*arg) {
        tell(c, c->system.n ? "system message: %s" : "(no system message)%s", buf_text(&c->system));
        return DONE;
    }
    buf text = {0};
    buf_add_valid(&text, arg, strlen(arg));
    if (c->n_turn == 0) {
        buf_free(&c->system);
        c->system = text;
        tell(c, "(stands before the first turn)");
        return DONE;
    }
    json_object *m = json_object_new_object();
    json_put(m, "role", json_object_new_string("system"));
    json_put(m, "content", json_text(&text));
    if (!c->queue) c->queue = json_object_new_array();
    json_object_array_add(c->queue, m);
    buf_free(&text);
    tell(c, "(goes with your next message; the conversation so far stays as it is)");
    return DONE;
}

/* The header as the settings now have it. It stands before everything else, so all of it must be
 * read again, unless it is the one that was there. When it cannot be made, all is as before. */
static int chat_new_header(chat *c) {
    size_t n_old = c->n_header, n_all = c->n;
    uint32_t *old = malloc((n_all + 1) * sizeof *old);
    if (!old) return complain(c, FAIL_IO, "no memory for %zu ids", n_all);
    memcpy(old, c->id, n_all * sizeof *old);
    c->n = 0;
    int rc = chat_header(c);
    size_t n_new = c->n;
    if (rc == DONE) rc = chat_append(c, old + n_old, n_all - n_old);
    bool is_same = n_new == n_old && memcmp(old, c->id, n_old * sizeof *old) == 0;
    if (rc != DONE) {
        memcpy(c->id, old, n_all * sizeof *old);
        c->n = n_all;
        c->n_header = n_old;
    }
    free(old);
    if (rc != DONE || is_same) return rc;
    for (size_t i = 1; i < c->n_turn; i++) c->turns[i].start += n_new - n_old;
    chat_drop_snapshots(c);
    k3_session_reset(c->s);
    return rc;
}

void chat_own_settings(chat *c) {
    c->own_thinks = c->render.thinks;
    c->own_effort = c->render.effort;
}

const char *effort_name(const chat *c) { return c->render.effort ? c->render.effort : "none"; }

int chat_set_render(chat *c, bool thought, const char *before) {
    int rc = c->n_turn && c->render.thinks ? chat_new_header(c) : DONE;
    if (rc != DONE) {
        c->render.thinks = thought;
        c->render.effort = before;
    }
    return rc;
}

void tell_again(chat *c) {
    if (c->n_turn && chat_pos(c) == 0)
        tell(c,
             "(the message about effort stands before the conversation, so your next turn reads "
             "%zu positions again)",
             c->n);
}

static int command_think(chat *c, const char *arg) {
    static const char *const word[] = {"on", "off", "show", "hide"};
    bool before = c->render.thinks;
    size_t i = 0;
    while (i < COUNT(word) && strcmp(word[i], arg) != 0) i++;
    if (*arg && i == COUNT(word))
        return complain(c, FAIL_USAGE, "/think '%.*s': not on, off, show or hide",
                        text_cut(arg, 40), arg);
    if (i < 2) c->render.thinks = i == 0;
    if (i == 2 || i == 3) c->out.hides_think = i == 3;
    int rc =
        i < 2 && before != c->render.thinks ? chat_set_render(c, before, c->render.effort) : DONE;
    if (rc != DONE) return rc;
    if (i < 2) chat_own_settings(c);
    tell(c, "(thinking is %s, and %s%s)", c->render.thinks ? "on" : "off",
         c->out.hides_think ? "hidden" : "shown",
         i < 2 && c->n_turn ? "; earlier turns stay as they were" : "");
    if (i == 0) tell_again(c);
    return DONE;
}

static int command_effort(chat *c, const char *arg) {
    k3_error err = {{0}};
    const char *before = c->render.effort;
    if (*arg) {
        json_object *word = json_object_new_string(arg);
        int status = effort_read(&c->render, word, "/effort", &err);
        json_object_put(word);
        if (status < 0) {
            c->render.effort = before;
            return complain_status(c, status, &err);
        }
        int rc = before == c->render.effort ? DONE : chat_set_render(c, c->render.thinks, before);
        if (rc != DONE) return rc;
        chat_own_settings(c);
    }
    tell(c, "(effort is %s%s)", effort_name(c),
         c->render.thinks ? "" : "; it counts while thinking is on, and it is off");
    if (*arg && before != c->render.effort && c->render.thinks) tell_again(c);
    return DONE;
}

static int complain_number(chat *c, const char *name, const char *arg, const char *range) {
    return complain(c, FAIL_USAGE, "%s '%.*s': not %s", name, text_cut(arg, 40), arg, range);
}

static int command_real(chat *c, const char *name, const char *arg, float *value, double most) {
    double given;
    char *end;
    if (*arg && (!parse_real(arg, &end, &given) || *end || given > most))
        return complain_number(c, name, arg,
                               most > 1 ? "a number from 0 to 100" : "a number from 0 to 1");
    if (*arg) *value = (float)given;
    tell(c, "(temperature %g, top-p %g, top-k %u, seed %llu)", (double)c->sampler.temperature,
         (double)c->sampler.top_p, (unsigned)c->sampler.top_k, (unsigned long long)c->sampler.seed);
    return DONE;
}

static int command_temp(chat *c, const char *arg) {
    return command_real(c, "/temp", arg, &c->sampler.temperature, 100);
}

static int command_top_p(chat *c, const char *arg) {
    return command_real(c, "/top-p", arg, &c->sampler.top_p, 1);
}

static int command_top_k(chat *c, const char *arg) {
    uint64_t value = c->sampler.top_k;
    if (*arg && (!parse_u64(arg, strlen(arg), &value) || value > UINT32_MAX))
        return complain_number(c, "/top-k", arg, "a whole number; 0 is off");
    c->sampler.top_k = (uint32_t)value;
    return command_real(c, "/top-k", "", NULL, 0);
}

static int command_seed(chat *c, const char *arg) {
    if (*arg && !parse_u64(arg, strlen(arg), &c->sampler.seed))
        return complain_number(c, "/seed", arg, "a whole number");
    return command_real(c, "/seed", "", NULL, 0);
}

static int command_tokens(chat *c, const char *arg) {
    uint64_t value = c->most;
    if (*arg && (!parse_u64(arg, strlen(arg), &value) || value > UINT32_MAX))
        return complain_number(c, "/tokens", arg, "a whole number; 0: all that the context holds");
    c->most = value;
    tell(c,
         value ? "(at most %llu ids of a reply, thinking included)"
               : "(a reply is as long as the context holds)%.0llu",
         (unsigned long long)value);
    return DONE;
}

/* What a state file needs besides the session to go on with the conversation. */
static json_object *chat_notes(const chat *c) {
    json_object *o = json_object_new_object(), *wait = json_object_new_array();
    json_object *starts = json_object_new_array(), *before = json_object_new_array();
    char seed[24];
    for (size_t i = chat_pos(c); i < c->n; i++)
        json_object_array_add(wait, json_object_new_int64(c->id[i]));
    for (size_t i = 0; i < c->n_turn; i++) {
        json_object *one = json_object_new_object();
        json_put_count(one, "n_call", c->turns[i].n_call);
        json_put_count(one, "n_tool", c->turns[i].n_tool);
        json_put(one, "calls", json_object_get(c->turns[i].calls));
        json_object_array_add(before, one);
        json_object_array_add(starts, json_object_new_int64((int64_t)c->turns[i].start));
    }
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)c->sampler.seed);
    json_put_count(o, "k3_chat", 1);
    json_put(o, "waiting", wait);
    json_put(o, "turns", starts);
    json_put(o, "before", before);
    json_put_count(o, "n_header", c->n_header);
    json_put_count(o, "n_call", c->n_call);
    json_put_count(o, "n_tool", c->render.n_tool);
    json_put(o, "calls", json_object_get(c->render.calls));
    json_put(o, "queue", json_object_get(c->queue));
    json_put(o, "tools", json_object_get(c->tools));
    json_put(o, "system", json_text(&c->system));
    json_put(o, "thinking", json_object_new_boolean(c->render.thinks));
    json_put(o, "effort", json_object_new_string(effort_name(c)));
    json_put(o, "temperature", json_object_new_double((double)c->sampler.temperature));
    json_put(o, "top_p", json_object_new_double((double)c->sampler.top_p));
    json_put_count(o, "top_k", c->sampler.top_k);
    json_put(o, "seed", json_object_new_string(seed));
    return o;
}

/* Read what waits, so that it need not wait again when the state is loaded. */
static int chat_feed_waiting(chat *c) {
    k3_error err = {{0}};
    size_t pos = chat_pos(c), context = (size_t)k3_session_context(c->s);
    size_t most = c->n < context ? c->n : context;
    if (most <= pos) return DONE;
    c->con.start_ns = c->con.last_ns = clock_ns();
    console_answer(&c->con, 0, 0);
    int status = k3_session_feed(c->s, c->id + pos, most - pos, K3_ROWS_NONE, NULL, &err);
    console_clear(&c->con);
    c->is_stored = false;
    if (status >= 0) return DONE;
    chat_recover_last(c);
    return complain_status(c, status, &err);
}

/* ~/ is the user's directory, as in a shell. */
static void path_home(buf *path, const char *arg) {
    const char *home = getenv("HOME");
    bool is_home = arg[0] == '~' && arg[1] == '/' && home && *home;
    if (is_home) buf_puts(path, home);
    buf_puts(path, arg + (is_home ? 1 : 0));
}

static int save_to(chat *c, const char *arg) {
    k3_error err = {{0}};
    k3_state_info info;
    char size[32];
    int status = K3_ENOMEM, rc = DONE;
    if (c->n_turn == 0) return complain(c, FAIL_USAGE, "/save: nothing was said yet");
    if (chat_pos(c) == 0 || c->n > chat_pos(c) + MANY_AGAIN) rc = chat_feed_waiting(c);
    if (rc != DONE) return rc;
    json_object *notes = chat_notes(c);
    size_t n = 0;
    const char *text = json_object_to_json_string_length(notes, JSON_C_TO_STRING_PLAIN, &n);
    if (text && n > K3_STATE_APP_MAX)
        rc = complain(c, FAIL_USAGE,
                      "%s: not saved: turns, tools and messages that wait take %zu bytes beside "
                      "the state, and a state file has room for %u",
                      arg, n, K3_STATE_APP_MAX);
    else if (text && json_count_values(text, n) > MOST_VALUES)
        rc = complain(c, FAIL_USAGE,
                      "%s: not saved: turns, tools and messages that wait have more than %d values",
                      arg, MOST_VALUES);
    else if (text)
        status = k3_session_save(c->s, arg, text, n, &info, &err);
    json_object_put(notes);
    if (rc != DONE) return rc;
    if (status < 0) return complain_status(c, status, &err);
    tell(c, "(saved %zu turns, %zu positions: %s, %s, %.1f s)", c->n_turn, c->n, arg,
         fmt_bytes(size, info.file_bytes), info.seconds);
    return DONE;
}

/* A command that takes the name of a file. */
static int command_file(chat *c, const char *name, const char *arg,
                        int (*run)(chat *c, const char *path)) {
    buf path = {0};
    if (!*arg) return complain(c, FAIL_USAGE, "%s needs a file name", name);
    path_home(&path, arg);
    int rc = run(c, buf_text(&path));
    buf_free(&path);
    return rc;
}

static int command_save(chat *c, const char *arg) { return command_file(c, "/save", arg, save_to); }

/* Notes come from a file that nobody vouches for: everything the code relies on is checked here.
 * Each of these sets *bad to the first key whose value will not do. */
static uint64_t note_count(json_object *o, const char *key, uint64_t most, const char **bad) {
    json_object *value = json_field(o, key);
    int64_t n = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
    if ((n < 0 || (uint64_t)n > most) && !*bad) *bad = key;
    return n < 0 ? 0 : (uint64_t)n;
}

static float note_real(json_object *o, const char *key, double most, const char **bad) {
    json_object *field = json_field(o, key);
    bool is_number = json_is(field, json_type_double) || json_is(field, json_type_int);
    double value = is_number ? json_object_get_double(field) : -1;
    if (!(value >= 0 && value <= most) && !*bad) *bad = key;
    return (float)value;
}

static const char *note_text(json_object *o, const char *key, const char **bad) {
    const char *text = json_string(o, key);
    if (!text && !*bad) *bad = key;
    return text ? text : "";
}

/* An array; of objects, if asked for. NULL is an array of none where there may be none. */
static json_object *note_array(json_object *o, const char *key, bool of_objects, bool may_lack,
                               const char **bad) {
    json_object *value = json_field(o, key);
    bool is_right = value ? json_is(value, json_type_array) : may_lack;
    for (size_t i = 0; is_right && value && of_objects && i < json_object_array_length(value); i++)
        is_right = json_is(json_object_array_get_idx(value, i), json_type_object);
    if (!is_right && !*bad) *bad = key;
    return is_right ? value : NULL;
}

static int notes_take_ids(chat *c, json_object *o, const char **bad) {
    json_object *wait = note_array(o, "waiting", false, false, bad);
    size_t n_run = 0;
    const uint32_t *run = k3_session_ids(c->s, &n_run);
    int rc = chat_append(c, run, n_run);
    for (size_t i = 0; rc == DONE && wait && i < json_object_array_length(wait); i++) {
        json_object *value = json_object_array_get_idx(wait, i);
        int64_t id = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
        uint32_t one = (uint32_t)id;
        if (id < 0 || (uint64_t)id >= c->n_vocab) {
            if (!*bad) *bad = "waiting";
            return rc;
        }
        rc = chat_append(c, &one, 1);
    }
    return rc;
}

/* The first turn begins at 0, each later one behind the one before, all of them among the ids. */
static int notes_take_turns(chat *c, json_object *o, const char **bad) {
    json_object *starts = note_array(o, "turns", false, false, bad);
    json_object *before = note_array(o, "before", true, true, bad);
    size_t n = starts ? json_object_array_length(starts) : 0;
    if (n == 0 && !*bad) *bad = "turns";
    if (before && json_object_array_length(before) != n && !*bad) *bad = "before";
    for (size_t i = 0; i < n && !*bad; i++) {
        json_object *value = json_object_array_get_idx(starts, i);
        int64_t at = json_is(value, json_type_int) ? json_object_get_int64(value) : -1;
        bool is_next = i == 0 ? at == 0 : at > (int64_t)c->turns[i - 1].start;
        if (!is_next || (uint64_t)at >= c->n) {
            *bad = "turns";
            return DONE;
        }
        int rc = turn_reserve(c);
        if (rc != DONE) return rc;
        turn u = {.start = (size_t)at};
        if (before) {
            json_object *one = json_object_array_get_idx(before, i);
            u.n_call = note_count(one, "n_call", INT64_MAX / 2, bad);
            u.n_tool = (unsigned)note_count(one, "n_tool", UINT32_MAX / 2, bad);
            u.calls = json_object_get(note_array(one, "calls", true, true, bad));
        }
        c->turns[c->n_turn++] = u;
    }
    c->n_header = (size_t)note_count(o, "n_header", c->n_turn > 1 ? c->turns[1].start : c->n, bad);
    return DONE;
}

/* Messages that wait must be such as a turn can be made of. */
static void notes_take_queue(chat *c, json_object *o, const char **bad) {
    json_object *queue = note_array(o, "queue", true, true, bad);
    k3_error err = {{0}};
    for (size_t i = 0; queue && i < json_object_array_length(queue); i++) {
        json_object *m = json_object_array_get_idx(queue, i);
        xtml x = {0};
        if (!json_equals(json_field(m, "role"), "system") ||
            render_system(&x, m, "queue", &err) < 0)
            if (!*bad) *bad = "queue";
        xtml_free(&x);
    }
    c->queue = json_object_get(queue);
}

static void notes_take_settings(chat *c, json_object *o, const char **bad) {
    json_object *thinking = json_field(o, "thinking");
    k3_error err = {{0}};
    const char *seed = note_text(o, "seed", bad);
    if (!json_is(thinking, json_type_boolean) && !*bad) *bad = "thinking";
    c->render.thinks = json_object_get_boolean(thinking);
    note_text(o, "effort", bad);
    if (effort_read(&c->render, json_field(o, "effort"), "effort", &err) < 0 && !*bad)
        *bad = "effort";
    c->sampler.temperature = note_real(o, "temperature", 100, bad);
    c->sampler.top_p = note_real(o, "top_p", 1, bad);
    c->sampler.top_k = (uint32_t)note_count(o, "top_k", UINT32_MAX, bad);
    if (!parse_u64(seed, strlen(seed), &c->sampler.seed) && !*bad) *bad = "seed";
}

/* Ids, turns and settings from the notes to `c`, which has none; the session is loaded. */
static int notes_take(chat *c, json_object *o, const char **bad) {
    json_object *system = json_field(o, "system");
    if (note_count(o, "k3_chat", INT64_MAX, bad) != 1 && !*bad) *bad = "k3_chat";
    int rc = notes_take_ids(c, o, bad);
    if (rc == DONE) rc = notes_take_turns(c, o, bad);
    if (rc != DONE) return rc;
    c->n_call = note_count(o, "n_call", INT64_MAX / 2, bad);
    c->render.n_tool = (unsigned)note_count(o, "n_tool", UINT32_MAX / 2, bad);
    c->render.calls = json_object_get(note_array(o, "calls", true, true, bad));
    c->tools = json_object_get(note_array(o, "tools", false, true, bad));
    notes_take_queue(c, o, bad);
    note_text(o, "system", bad);
    if (!*bad)
        buf_add_valid(&c->system, json_object_get_string(system),
                      (size_t)json_object_get_string_len(system));
    notes_take_settings(c, o, bad);
    return DONE;
}

/* What can be said of a file while this conversation still has its state. */
static int load_check(chat *c, const char *path) {
    k3_error err = {{0}};
    k3_state_head head;
    uint64_t context = k3_session_context(c->s);
    int status = k3_state_check(path, true, &head, &err);
    if (status < 0) return complain_status(c, status, &err);
    if (head.n_app == 0)
        return complain(c, FAIL_CHECK, "%s: a state, but of no conversation of `k3 chat`", path);
    if (head.n_pos > context)
        return complain(c, FAIL_IO,
                        "%s: holds %llu positions, and the context %llu; start with a "
                        "larger --context",
                        path, (unsigned long long)head.n_pos, (unsigned long long)context);
    return DONE;
}

/* The session was loaded with something else, or with nothing: the ids are still there. */
static void chat_keep(chat *c) {
    chat_drop_snapshots(c);
    k3_session_reset(c->s);
    if (c->n > MANY_AGAIN)
        tell(c, "(the conversation is kept; your next turn reads %zu positions again)", c->n);
}

int load_from(chat *c, const char *arg) {
    k3_error err = {{0}};
    void *notes = NULL;
    size_t n_notes = 0, at;
    const char *why = "empty", *bad = NULL;
    buf text = {0};
    int rc = load_check(c, arg);
    if (rc != DONE) return rc;
    int status = k3_session_load(c->s, arg, &notes, &n_notes, NULL, &err);
    buf_add(&text, notes, notes ? n_notes : 0); /* with a NUL behind */
    free(notes);
    json_object *o = NULL;
    if (status >= 0 && text.p) o = json_parse_strict(text.p, text.n, NOTES_DEPTH, &at, &why);
    chat fresh = *c;
    fresh.queue = fresh.tools = fresh.render.calls = NULL;
    fresh.id = NULL;
    fresh.turns = NULL;
    fresh.n = fresh.cap = fresh.n_header = fresh.n_turn = fresh.cap_turn = 0;
    fresh.system = (buf){0};
    fresh.is_stored = false;
    if (status < 0)
        rc = complain_status(&fresh, status, &err);
    else if (why)
        rc = complain(&fresh, FAIL_CHECK, "%s: the notes of the conversation: %s", arg, why);
    else
        rc = notes_take(&fresh, o, &bad);
    if (rc == DONE && bad)
        rc = complain(&fresh, FAIL_CHECK,
                      "%s: no conversation of `k3 chat`: the notes' `%s` is missing or wrong", arg,
                      bad);
    json_object_put(o);
    buf_free(&text);
    c->told = fresh.told; /* what was said meanwhile is of both */
    fresh.con = c->con;
    fresh.notes = c->notes;
    chat_forget(rc == DONE ? c : &fresh);
    if (rc == DONE)
        *c = fresh;
    else
        chat_keep(c);
    if (rc == DONE) chat_own_settings(c);
    if (rc == DONE) tell(c, "(loaded %zu turns, %zu positions)", c->n_turn, c->n);
    return rc;
}

static int command_load(chat *c, const char *arg) {
    return command_file(c, "/load", arg, load_from);
}

static int command_undo(chat *c, const char *arg) {
    bool is_anyway = strcmp(arg, "anyway") == 0;
    if (*arg && !is_anyway)
        return complain(c, FAIL_USAGE, "/undo '%.*s': not `anyway`", text_cut(arg, 40), arg);
    if (c->n_turn == 0) return complain(c, FAIL_USAGE, "/undo: there is no turn to take back");
    turn u = c->turns[c->n_turn - 1];
    bool is_free = turn_is_free(c, &u);
    if (!is_free && !is_anyway)
        return complain(c, FAIL_BUDGET,
                        "/undo: no snapshot of that turn's start is in memory%s; `/undo anyway` "
                        "takes it back, and your next turn then reads %zu positions again",
                        c->cache ? " or in the cache"
                                 : " (--undo keeps more, --cache DIR keeps "
                                   "them on disk)",
                        u.start);
    turn *last = &c->turns[c->n_turn - 1];
    last->snap = last->after = NULL; /* needed a moment longer */
    last->row = NULL;
    chat_cut_turn(c);
    chat_recover(c, &u);
    turn_drop_snapshot(&u);
    c->is_stored = u.n_cached && chat_pos(c) == u.n_cached;
    size_t n_again = c->n > chat_pos(c) ? c->n - chat_pos(c) : 0;
    tell(c, "(taken back; %zu turns, %zu positions left%s)", c->n_turn, c->n,
         n_again > MANY_AGAIN ? ", to be read again with your next turn" : "");
    return DONE;
}

static int command_stats(chat *c, const char *arg) {
    k3_stats st;
    char held[32], ram[32], read[32], size[32];
    size_t n_free = 0;
    (void)arg;
    k3_session_stats(c->s, &st);
    while (n_free < c->n_turn && turn_is_free(c, &c->turns[c->n_turn - 1 - n_free])) n_free++;
    tell(c, "context   %zu of %llu positions, %zu turns; %zu can be undone at once", c->n,
         (unsigned long long)k3_session_context(c->s), c->n_turn, n_free);
    if (c->last.why && *c->last.why) tell_rates(c);
    tell(c, "experts   %llu used, %.1f %% in memory when wanted",
         (unsigned long long)st.expert_uses, percent(st.expert_hits, st.expert_uses));
    tell(c, "disk      %s read since the start; %.1f s of %.1f s computing spent waiting for it",
         fmt_bytes(read, st.read_bytes), (double)st.stall_ns * 1e-9, (double)st.compute_ns * 1e-9);
    tell(c, "memory    %s of %s", fmt_bytes(held, st.resident_bytes),
         fmt_bytes(ram, k3_engine_plan(c->e)->ram_bytes));
    if (c->cache) {
        k3_cache_stats cs;
        k3_cache_get_stats(c->cache, &cs);
        tell(c, "cache     %llu entries, %s; %llu hits, %llu misses, %llu positions not read again",
             (unsigned long long)cs.n_entries, fmt_bytes(size, cs.bytes),
             (unsigned long long)cs.hits, (unsigned long long)cs.misses,
             (unsigned long long)cs.restored_pos);
    } else {
        tell(c, "cache     off (--cache DIR)");
    }
    tell(c, "context_fnv %016llx",
         (unsigned long long)k3_fnv1a(K3_FNV_BASIS, c->id, c->n * sizeof *c->id));
    return DONE;
}

static int command_quit(chat *c, const char *arg) {
    (void)arg;
    c->is_over = true;
    return DONE;
}

const chat_command CHAT_COMMAND[] = {
    {"/help", "", "this list", help_commands},
    {"/reset", "", "a new conversation", command_reset},
    {"/system", "[TEXT]", "a system message: before the first turn, or with your next one",
     command_system},
    {"/think", "[on|off|show|hide]", "think before answering; show it", command_think},
    {"/effort", "[low|medium|high|max|none]", "how much to think", command_effort},
    {"/temp", "[T]", "temperature; 0 is greedy", command_temp},
    {"/top-p", "[P]", "draw among the likeliest that hold P; 1 is off", command_top_p},
    {"/top-k", "[N]", "draw among the N likeliest; 0 is off", command_top_k},
    {"/seed", "[N]", "the same seed gives the same reply", command_seed},
    {"/tokens", "[N]", "most ids of a reply, thinking included; 0: all that fit", command_tokens},
    {"/save", "FILE", "write the conversation with its state", command_save},
    {"/load", "FILE", "go on from there", command_load},
    {"/undo", "[anyway]", "take the last turn back", command_undo},
    {"/stats", "", "context, speed, experts, disk, memory, cache", command_stats},
    {"/quit", "", "leave, as Ctrl-D does", command_quit},
};

static int help_commands(chat *c, const char *arg) {
    (void)arg;
    for (size_t i = 0; i < N_CHAT_COMMAND; i++) {
        char left[48];
        snprintf(left, sizeof left, "%s %s", CHAT_COMMAND[i].name, CHAT_COMMAND[i].arg);
        tell(c, "  %-34s %s", left, CHAT_COMMAND[i].help);
    }
    if (c->is_terminal)
        tell(c, "  Tab completes commands and files. Ctrl-C stops a reply and keeps what was said. "
                "Alt-Enter, or \\ at the end of a "
                "line,\n  goes on with another line; pasted text may have many. // starts a "
                "message with /.");
    else if (!c->a->json)
        tell(c, "  On a pipe each line is a turn, and a newline on stdout (--null: a NUL) ends it, "
                "also\n  one that fails; commands write to stderr only. // starts a message with "
                "/.");
    return DONE;
}

static int chat_command_line(chat *c, const char *line) {
    char name[32];
    const char *best = NULL, *arg = line + strcspn(line, " \t");
    size_t distance = 4;
    int most = arg - line < 31 ? (int)(arg - line) : 31;
    snprintf(name, sizeof name, "%.*s", text_cut(line, most), line);
    arg += strspn(arg, " \t");
    for (size_t i = 0; i < N_CHAT_COMMAND; i++) {
        if (strcmp(CHAT_COMMAND[i].name, name) != 0) continue;
        if (*arg && !*CHAT_COMMAND[i].arg)
            return complain(c, FAIL_USAGE, "%s takes nothing more, '%.*s' was given", name,
                            text_cut(arg, 40), arg);
        return CHAT_COMMAND[i].run(c, arg);
    }
    if (strcmp(name, "/exit") == 0 || strcmp(name, "/bye") == 0) return command_quit(c, "");
    if (strchr(line + 1, '/'))
        return complain(c, FAIL_USAGE,
                        "no command %s: a line that begins with / is one; // starts a message "
                        "with /",
                        name);
    for (size_t i = 0; i < N_CHAT_COMMAND; i++)
        nearest(name, CHAT_COMMAND[i].name, &best, &distance);
    if (best) return complain(c, FAIL_USAGE, "no command %s: did you mean %s?", name, best);
    return complain(c, FAIL_USAGE, "no command %s: /help lists them, // starts a message with /",
                    name);
}

int chat_command_run(chat *c, const char *line) {
    buf trimmed = {0};
    size_t n = strlen(line);
    while (n > 0 && strchr(" \t\r\n", line[n - 1])) n--;
    buf_add(&trimmed, line, n);
    int rc = trimmed.is_short ? complain(c, FAIL_IO, "no memory for this line")
                              : chat_command_line(c, buf_text(&trimmed));
    buf_free(&trimmed);
    return rc;
}
