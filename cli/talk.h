/* talk.h - the conversation of `k3 chat`: ids, turns, undo, and one turn. */
#ifndef K3_CLI_TALK_H
#define K3_CLI_TALK_H

#include "cli/args.h"
#include "cli/console.h"
#include "cli/drafts.h"
#include "cli/json.h"
#include "cli/messages.h"
#include "cli/sink.h"
#include "cli/xtml.h"
#include "k3.h"

#include <stdarg.h>
#include <json-c/json.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    size_t start;       /* index of its first id; 0 for the first turn           */
    k3_snapshot *snap;  /* at `snap_pos`, at or before its start; NULL: none kept */
    k3_snapshot *after; /* at `after_pos`, behind its prompt; NULL: none kept    */
    float *row;         /* f32[n_vocab], the row there; NULL: none kept          */
    size_t snap_pos, after_pos;
    size_t n_cached;    /* positions of its start the cache had; 0: none         */
    json_object *calls; /* render_state as it was                                */
    unsigned n_tool;
    uint64_t n_call;
} turn;

typedef struct edit_state edit_state;

/* The last reply. */
typedef struct {
    const char *why; /* "eos" "stop" "tokens" "context" "interrupt"                 */
    uint64_t prompt_ns, gen_ns, n_prompt, n_cached, n_gen, n_step; /* n_cached: not run again */
    size_t first_said, n_said; /* its ids                                          */
} chat_reply;

/* Where replies go. */
typedef struct {
    bool is_screen; /* stdout is a terminal                                         */
    bool has_color, hides_think, streams;
    uint64_t looked_ns; /* when it was last looked at                               */
    bool is_left;       /* nobody reads it any more                                 */
    bool has_told_silent;   /* that no far box was of use                           */
    const reply_sink *sink; /* who gets the reply; NULL: stdout                     */
    void *sink_user;
    bool is_enough;         /* the sink has all that it wants                       */
    enum { SHOW_NOTHING, SHOW_THINK, SHOW_ANSWER } shown;
    size_t n_think_out, n_answer_out;
} chat_out;

typedef struct {
    const cli_args *a;
    const char *dir;
    console con;
    k3_engine *e;
    k3_tokenizer *t;
    k3_session *s;
    k3_cache *cache; /* NULL: none                                                 */
    uint64_t more_bytes; /* of --ram that somebody else here takes: a server's bodies   */
    chat_marks marks;
    size_t n_vocab;
    float *row;    /* f32[n_vocab]                                                 */
    void *scratch; /* for k3_sample                                                */
    k3_sampler sampler;
    drafts d;      /* settled but while a reply is made                            */
    render_state render;    /* of the conversation as it is                           */
    bool own_thinks;        /* what the command line and commands asked for: a whole  */
    const char *own_effort; /* conversation begins with it                         */
    bool is_whole;          /* the turn at work is a whole conversation               */
    bool has_row;           /* `row` is that of its last id, which need not be run    */
    buf system;             /* the message before the first turn; empty: none          */
    json_object *queue;     /* system messages that go with the next turn              */
    json_object *tools;     /* declared before the first turn                          */
    uint32_t *id;
    size_t n, cap, n_header;
    turn *turns;
    size_t n_turn, cap_turn;
    uint64_t n_reply;
    uint64_t n_call; /* tool calls so far, for their ids                           */
    bool is_stored;  /* the cache has the session's present state                  */
    chat_reply last;
    uint64_t most;             /* ids of one reply; 0: all that fit                */
    /* in and out */
    bool is_terminal; /* stdin is one, and is edited                               */
    bool is_over;
    chat_out out;
    edit_state *edit;
    buf notes;          /* the engine's, which wait for the line of text to end    */
    uint64_t n_left;    /* notes that found no room there                          */
    int (*progress)(void *user, const k3_progress *p);
    buf told;  /* what a command said, for --json                                   */
    int worst; /* exit code of the first turn that failed                           */
} chat;

enum { MANY_AGAIN = 64 }; /* positions to read again that are worth a word */

/* What no line of --json takes along. */
void say_told(chat *c);
PRINTF_LIKE(2, 3) void tell(chat *c, const char *format, ...);

/* Something did not go as asked; said with -q too. Returns `code`. */
PRINTF_LIKE(3, 4) int complain(chat *c, int code, const char *format, ...);
int complain_status(chat *c, int status, const k3_error *err);

/* A note of the engine's: not into the middle of a word of the reply. */
void chat_note(void *user, const char *line);

/* The line of text has ended: what waited for it. */
void say_notes(chat *c);

/* Work that nobody waits for any more is given up, four times a second at the latest. */
int chat_progress(void *user, const k3_progress *p);
size_t chat_pos(const chat *c);
int chat_append(chat *c, const uint32_t *id, size_t n);
void turn_drop_snapshot(turn *u);
void chat_drop_snapshots(chat *c);

/* Forget the last turn and its ids; the session is not touched. */
void chat_cut_turn(chat *c);

/* Put a session that lost its state, or whose ids were cut, where the ids still hold: at `u`'s
 * snapshot, at what the cache has, else at the start. */
void chat_recover(chat *c, const turn *u);

/* A step failed or was given up: back to the last snapshot that the session can go to, all ids
 * kept. */
void chat_recover_last(chat *c);

/* Whether the last turn can be taken back with nothing to be read again. */
bool turn_is_free(const chat *c, const turn *u);
int turn_reserve(chat *c);
void chat_reset(chat *c);

/* Free all that is the conversation's, and forget it; the session is not touched. */
void chat_forget(chat *c);

/* What stands before the first turn: tools, effort, the system message. */
int chat_header(chat *c);

/* One turn: messages in, a reply shown. After it the turn is there, closed, or all is as before. */
int chat_turn(chat *c, json_object *messages);

/* A whole conversation in place of the one that is there; what both begin with is not run again. After
 * it a reply was shown, or all is as before. Its ids follow from the request, the command line and
 * the commands given, and from no request before. */
int chat_whole(chat *c, json_object *messages, json_object *request);

/* ---- The command's frame, for those that bring their own loop ---- */

/* What the command line asked for, into a chat that is all zeros. */
void chat_settings(chat *c, const cli_args *a);

/* Engine, session, cache, drafts; c->dir, t and marks are there. Returns an exit code whose reason is said. */
int chat_open(chat *c);
void chat_close(chat *c);

#endif
