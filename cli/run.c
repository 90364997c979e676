/* run.c - `k3 run`: one answer.
 *
 * Around a timeline (generate.h), run keeps the text: made printable (no half UTF-8 sequence),
 * searched for stop texts (held back while it could still become one), written at once.
 * Whatever ends the answer, what was said so far has been printed.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/generate.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "cli/place.h"
#include "experts.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    const cli_args *a;
    const char *dir;
    console con;
    k3_engine *e;
    k3_tokenizer *t; /* NULL: no text                                         */
    timeline line;
    blob prompt;
    id_list prompt_ids, said; /* said: generated ids                          */
    size_t cap_said;
    blob text;              /* all text so far                                */
    size_t cap_text, n_out; /* of which n_out bytes were written              */
    k3_utf8 utf8;
    outfile dump, trace, routing;
    uint64_t trace_fnv;
    uint64_t load_ns, prompt_ns, gen_ns; /* gen: n_step ids run after the prompt */
    uint64_t n_step;
    k3_cache *cache;
    uint64_t n_loaded, n_restored; /* positions from --load; of the prompt, from --cache */
    const char *why;               /* "eos" "stop" "tokens" "context" "interrupt"           */
    bool says_disk;                /* plan and statistics of the disk                       */
} run_state;

/* The first line of a routing trace: layers, experts, top_k, bytes of one expert. */
#define REPLAY_HEAD "k3-routing 1 %u %u %u %llu\n"

/* The hash of one position and layer, to the trace and into trace_fnv. */
static void run_trace(void *user, uint64_t pos, uint32_t layer, uint64_t fnv) {
    run_state *r = user;
    r->trace_fnv = k3_fnv1a(r->trace_fnv, &fnv, sizeof fnv);
    if (!r->trace.f) console_clear(&r->con);
    fprintf(r->trace.f ? r->trace.f : stderr, "trace %llu %u %016llx\n", (unsigned long long)pos,
            (unsigned)layer, (unsigned long long)fnv);
}

/* What a router chose, to the routing trace: position, layer, id:weight ... */
static void run_route(void *user, uint64_t pos, uint32_t layer, uint32_t n, const uint32_t *ids,
                      const float *weights) {
    FILE *f = ((run_state *)user)->routing.f;
    fprintf(f, "%llu %u", (unsigned long long)pos, (unsigned)layer);
    for (uint32_t i = 0; i < n; i++) fprintf(f, " %u:%.6g", (unsigned)ids[i], (double)weights[i]);
    putc('\n', f);
}

static void run_route_head(const run_state *r) {
    const k3_shape *sh = k3_engine_shape(r->e);
    fprintf(r->routing.f, REPLAY_HEAD, (unsigned)sh->n_layers, (unsigned)sh->n_experts,
            (unsigned)sh->top_k, (unsigned long long)sh->expert_bytes);
}


/* Write what may be written of the text. Returns DONE, an exit code, or -1 when a stop text
 * was met: the text then ends before it. `is_end`: nothing more will come. */
static int run_write(run_state *r, bool is_end) {
    char *from = r->text.p + r->n_out;
    size_t n = r->text.n - r->n_out;
    bool is_met = false;
    size_t n_now = stop_before(from, n, r->a->stop.text, r->a->stop.n, is_end, &is_met);
    int rc = n_now == 0 || r->a->json ? DONE : out_write(from, n_now);
    r->n_out += n_now;
    if (is_met) r->text.n = r->n_out;
    return rc != DONE ? rc : is_met ? -1 : DONE;
}

/* Add bytes to the text and write it; n_bytes 0 flushes at the end. Returns as run_write. */
static int run_text(run_state *r, const char *bytes, size_t n_bytes) {
    size_t need = r->text.n + 3 * (n_bytes + 3);
    if (need > r->cap_text) {
        char *grown = realloc(r->text.p, need * 2);
        if (!grown) return fail_memory("the text", need * 2);
        r->text.p = grown;
        r->cap_text = need * 2;
    }
    r->text.n += k3_utf8_push(&r->utf8, bytes, n_bytes, r->text.p + r->text.n);
    return run_write(r, n_bytes == 0);
}

static int run_keep_id(run_state *r, uint32_t id) {
    if (r->said.n == r->cap_said) {
        size_t cap = r->cap_said ? r->cap_said * 2 : 256;
        uint32_t *grown = realloc(r->said.id, cap * sizeof *grown);
        if (!grown) return fail_memory("the answer's ids", cap * sizeof *grown);
        r->said.id = grown;
        r->cap_said = cap;
    }
    r->said.id[r->said.n++] = id;
    return DONE;
}

/* Asked before the weights are loaded, which may take minutes, and again when the model has
 * said what it can hold. */
static int run_check_context(const run_state *r, uint64_t context) {
    char loaded[64] = "";
    if (r->n_loaded + r->prompt_ids.n <= context) return DONE;
    if (r->n_loaded)
        snprintf(loaded, sizeof loaded, " after %llu of --load", (unsigned long long)r->n_loaded);
    k3_shape sh;
    uint64_t most = k3_config_read(&sh, r->dir, NULL) < 0 ? UINT64_MAX : sh.max_position;
    if (r->n_loaded + r->prompt_ids.n > most)
        return fail(exit_code(K3_EFULL),
                    "the prompt is %zu ids%s and this model holds %llu, whatever --context says: "
                    "shorten it",
                    r->prompt_ids.n, loaded, (unsigned long long)most);
    return fail(
        exit_code(K3_EFULL),
        "the prompt is %zu ids%s and the context holds %llu: raise --context to %llu or more",
        r->prompt_ids.n, loaded, (unsigned long long)context,
        (unsigned long long)(r->n_loaded + r->prompt_ids.n));
}

/* Positions to plan for: --context, else 0 (the engine's default), unless the prompt alone is
 * longer than that: then prompt and answer, as far as the model goes. */
static int run_context(run_state *r, uint64_t *context) {
    k3_engine *e = NULL;
    uint64_t n = r->n_loaded + r->prompt_ids.n;
    *context = r->a->engine.context;
    if (*context) return run_check_context(r, *context);
    if (n <= DEFAULT_CONTEXT) return DONE;
    k3_options o = engine_options(r->a, r->dir, &r->con);
    o.headers_only = true;
    o.note = NULL; /* said when it is opened to run */
    int rc = engine_open(&e, &o);
    if (rc != DONE) return rc;
    uint64_t most = k3_engine_shape(e)->max_position;
    k3_engine_close(e);
    if (n > most)
        return fail(exit_code(K3_EFULL),
                    "the prompt is %llu ids and this model holds %llu: shorten it",
                    (unsigned long long)n, (unsigned long long)most);
    *context = r->a->tokens < most - n ? n + r->a->tokens : most;
    return DONE;
}

/* ---- State: --load, --save, --cache ---- */

/* The positions that the timeline can reach. */
static uint64_t run_most(const run_state *r, const k3_shape *sh) {
    uint64_t n = r->n_loaded + r->prompt_ids.n, most = r->a->engine.context;
    if (!most) most = n <= DEFAULT_CONTEXT ? DEFAULT_CONTEXT : UINT64_MAX;
    if (most > sh->max_position) most = sh->max_position;
    return n >= most || r->a->tokens >= most - n ? most : n + r->a->tokens;
}

/* --save: a place that can be written to, with room for what it may come to. */
static int run_save_ahead(const run_state *r) {
    k3_error err = {{0}};
    k3_shape sh;
    bool is_known = k3_config_read(&sh, r->dir, NULL) == 0; /* else opening says why */
    int status =
        k3_state_can_save(r->a->save, is_known ? &sh : NULL, is_known ? run_most(r, &sh) : 0, &err);
    return status < 0 ? fail(exit_code(status), "--save: %s", err.text) : DONE;
}

/* What can be refused before the weights are read; how long the loaded timeline is. */
static int run_state_ahead(run_state *r) {
    const cli_args *a = r->a;
    k3_state_head head;
    k3_error err = {{0}};
    if (is_given(a, "--cache-size") && !a->cache)
        return fail(FAIL_USAGE, "--cache-size: of which cache? give --cache DIR as well");
    if (a->load) {
        int status = k3_state_check(a->load, false, &head, &err);
        if (status < 0) return fail_status(status, &err);
        r->n_loaded = head.n_pos;
    }
    return a->save ? run_save_ahead(r) : DONE;
}

static int run_state_open(run_state *r) {
    const cli_args *a = r->a;
    k3_state_info info;
    k3_error err = {{0}};
    char size[32];
    int status = a->cache ? k3_cache_open(&r->cache, r->e, a->cache, a->cache_size, &err) : 0;
    if (status < 0) return fail_status(status, &err);
    if (!a->load) return DONE;
    status = k3_session_load(r->line.s, a->load, NULL, NULL, &info, &err);
    if (status < 0) return fail_status(status, &err);
    if (!a->quiet)
        say("%s: %llu positions, %s read in %.2f s", a->load, (unsigned long long)info.n_pos,
            fmt_bytes(size, info.file_bytes), info.seconds);
    return DONE;
}

/* A cache that fails costs speed, not the answer. */
static void run_cache_store(run_state *r) {
    k3_error err = {{0}};
    if (r->cache && k3_cache_store(r->cache, r->line.s, &err) < 0 && !r->a->quiet)
        say("note: not kept: %s", err.text);
}

/* Where the cache can bring the prompt. At least one id is left to run: its row is wanted. Rows
 * and traces of all positions need all of them computed. */
static void run_cache_restore(run_state *r) {
    k3_error err = {{0}};
    if (!r->cache || r->a->load || r->dump.f || r->a->trace || r->a->routing) return;
    uint64_t start = clock_ns();
    int64_t n = k3_cache_restore(r->cache, r->line.s, r->prompt_ids.id, r->prompt_ids.n - 1, &err);
    if (n < 0 && !r->a->quiet) say("note: %s", err.text);
    if (n <= 0) return;
    r->n_restored = (uint64_t)n;
    if (!r->a->quiet)
        say("cache: %lld of the prompt's %zu positions in %.2f s", (long long)n, r->prompt_ids.n,
            (double)(clock_ns() - start) * 1e-9);
}

/* Is a state worth its bytes? Yes when running the ids again takes longer than twice what reading it
 * takes from a slow drive. A state of K3 has 465 MB, 1.9 s: less than one id takes that is streamed. Of a
 * model that is all in memory a short prompt is not worth it. */
#define CACHE_READ_PER_S 500e6
static bool run_is_worth(const run_state *r, size_t n, double seconds) {
    const k3_shape *sh = k3_engine_shape(r->e);
    uint64_t bytes = sh->state_bytes + k3_session_pos(r->line.s) * sh->pos_bytes;
    bool is_worth = seconds > 2 * (double)bytes / CACHE_READ_PER_S;
    char size[32];
    if (r->a->verbose)
        say("cache: %zu positions of the prompt took %.3g s; their state of %s is %s", n, seconds,
            fmt_bytes(size, bytes),
            is_worth ? "kept: reading it is faster" : "not kept: running them again is as fast");
    return is_worth;
}

/* Run the prompt and keep all of it but its last id: the same prompt again then runs one id. Where no row can be taken
 * back the last id is a pass of its own. */
static int run_prompt_ahead(run_state *r, k3_error *err) {
    const uint32_t *ids = r->prompt_ids.id + r->n_restored;
    size_t n = r->prompt_ids.n - (size_t)r->n_restored;
    bool is_kept = r->cache && n > 1, is_one = k3_engine_plan(r->e)->revocable > 0;
    uint64_t start = clock_ns(), pos = k3_session_pos(r->line.s) + n - 1;
    if (!is_kept) return timeline_feed(&r->line, ids, n, err);
    int status = is_one ? timeline_feed_ahead(&r->line, ids, n, err)
                        : k3_session_feed(r->line.s, ids, n - 1, K3_ROWS_NONE, NULL, err);
    if (status < 0) return status;
    if (run_is_worth(r, n - 1, (double)(clock_ns() - start) * 1e-9)) {
        k3_error why = {{0}};
        status = k3_cache_store_at(r->cache, r->line.s, pos, &why);
        if (status < 0 && !r->a->quiet) say("note: not kept: %s", why.text);
    }
    return is_one ? 0 : timeline_feed(&r->line, ids + n - 1, 1, err);
}

/* The end: the cache gets what was run, --save all that was said. */
static int run_state_keep(run_state *r) {
    const cli_args *a = r->a;
    k3_session *s = r->line.s;
    k3_state_info info;
    k3_error err = {{0}};
    char size[32];
    int status = 0;
    timeline_settle(&r->line);
    run_cache_store(r);
    if (!a->save) return DONE;
    k3_session_trace(s, NULL, NULL); /* what follows is not the run's */
    k3_session_on_route(s, NULL, NULL);
    if (r->said.n && k3_session_pos(s) < k3_session_context(s)) /* the last one was not run */
        status = k3_session_feed(s, r->said.id + r->said.n - 1, 1, K3_ROWS_NONE, NULL, &err);
    else if (r->said.n && !a->quiet)
        say("note: the context is full: %s lacks the answer's last id", a->save);
    console_clear(&r->con);
    if (status >= 0) status = k3_session_save(s, a->save, NULL, 0, &info, &err);
    if (status < 0) return fail_status(status, &err);
    if (!a->quiet)
        say("%s: %llu positions, %s written in %.2f s", a->save, (unsigned long long)info.n_pos,
            fmt_bytes(size, info.file_bytes), info.seconds);
    return DONE;
}

/* What this program holds beside the engine, where it may be more than the allowance for it: text,
 * ids and, with --json, an object for each id. */
static uint64_t run_bytes(const run_state *r, uint64_t context) {
    uint64_t most = context ? context : DEFAULT_CONTEXT, n = r->prompt_ids.n;
    uint64_t n_said = r->a->tokens < most ? r->a->tokens : most;
    uint64_t bytes = r->prompt.n + (r->prompt.n + n) * sizeof(uint32_t) + n_said * 16;
    if (r->a->json) bytes += n_said * 128;
    return beyond_allowance(bytes);
}

static int run_open(run_state *r) {
    const cli_args *a = r->a;
    uint64_t context = 0;
    int rc = prompt_check(a, "run");
    if (rc == DONE) rc = audit_check_save(a);
    if (rc == DONE) rc = model_locate(a, &r->dir);
    if (rc == DONE) rc = tokenizer_open(&r->t, a, r->dir);
    if (rc == DONE)
        rc = prompt_read(a, &r->prompt, prompt_most(a, r->dir, r->t), &r->prompt_ids, "run");
    if (rc == DONE) model_say(a, r->dir);
    if (rc == DONE && !a->prompt.ids)
        rc = ids_encode(&r->prompt_ids, r->t, r->prompt.p, r->prompt.n, a->prompt.control);
    if (rc != DONE) return rc;
    if (!a->quiet && r->prompt.n && r->prompt.p[r->prompt.n - 1] == '\n')
        say("note: the prompt ends with a newline, which is part of it");
    if (!a->quiet && a->sampler.temperature <= 0 && (a->sampler.top_k || a->sampler.top_p < 1))
        say("note: --top-k and --top-p change nothing at --temperature 0");
    rc = run_state_ahead(r);
    if (rc == DONE) rc = run_context(r, &context);
    if (rc == DONE && a->dump_logits) rc = outfile_open(&r->dump, a->dump_logits);
    if (rc == DONE && a->trace && a->trace[0]) rc = outfile_open(&r->trace, a->trace);
    if (rc == DONE && a->routing) rc = outfile_open(&r->routing, a->routing);
    if (rc == DONE) rc = outfile_differ(&r->dump, &r->trace);
    if (rc == DONE) rc = outfile_differ(&r->dump, &r->routing);
    if (rc == DONE) rc = outfile_differ(&r->trace, &r->routing);
    if (rc != DONE) return rc;
    signals_catch();
    uint64_t start = clock_ns();
    k3_options o = engine_options(a, r->dir, &r->con);
    engine_gpu(a, &o);
    o.context = context;
    o.caller_bytes = run_bytes(r, context);
    o.revocable = drafts_revocable(args_draft(a));
    rc = engine_open(&r->e, &o);
    r->load_ns = clock_ns() - start;
    if (rc == DONE) rc = timeline_open(&r->line, r->e, a);
    if (rc != DONE) return rc;
    context = k3_session_context(r->line.s);
    rc = run_check_context(r, context);
    if (rc == DONE) rc = run_state_open(r);
    if (rc == DONE) rc = outfile_begin(&r->dump);
    if (rc == DONE) rc = outfile_begin(&r->trace);
    if (rc == DONE) rc = outfile_begin(&r->routing);
    if (rc != DONE) return rc;
    if (a->verbose)
        say("kernels %s, threads %d, chunk %d, context %llu, numerics %s", k3_engine_kernels(r->e),
            k3_engine_threads(r->e), k3_engine_chunk(r->e), (unsigned long long)context,
            K3_NUMERICS_ID);
    r->says_disk = a->verbose || (is_streaming(r->e) && !a->quiet);
    if (r->says_disk) plan_say(r->e);
    if (a->trace) k3_session_trace(r->line.s, run_trace, r);
    if (a->routing) {
        run_route_head(r);
        k3_session_on_route(r->line.s, run_route, r);
    }
    r->trace_fnv = K3_FNV_BASIS;
    return rc;
}

/* The prompt, with every row to the dump: in blocks of at most 16 MiB, which the budget's
 * allowance for the program covers. */
static int run_prompt_rows(run_state *r) {
    size_t n_vocab = r->line.n_vocab, n_block = (size_t)k3_engine_chunk(r->e);
    size_t n_most = ((size_t)16 << 20) / (n_vocab * sizeof(float));
    k3_error err = {{0}};
    int rc = DONE, status = 0;
    if (n_block > n_most) n_block = n_most ? n_most : 1;
    float *rows = malloc(n_block * n_vocab * sizeof *rows);
    if (!rows) return fail_memory("rows of logits", n_block * n_vocab * sizeof *rows);
    for (size_t i = 0, n; i < r->prompt_ids.n && rc == DONE; i += n) {
        n = r->prompt_ids.n - i < n_block ? r->prompt_ids.n - i : n_block;
        status = k3_session_feed(r->line.s, r->prompt_ids.id + i, n, K3_ROWS_ALL, rows, &err);
        console_clear(&r->con);
        if (status < 0) break;
        rc = outfile_write(&r->dump, rows, n * n_vocab * sizeof *rows);
        memcpy(r->line.row, rows + (n - 1) * n_vocab, n_vocab * sizeof *rows);
    }
    free(rows);
    if (status < 0) return fail_status(status, &err);
    timeline_hash_row(&r->line);
    return rc;
}

static int run_prompt(run_state *r) {
    uint64_t start = clock_ns();
    k3_error err = {{0}};
    int rc = DONE;
    if (r->dump.f) {
        rc = run_prompt_rows(r);
    } else {
        run_cache_restore(r);
        int status = run_prompt_ahead(r, &err);
        console_clear(&r->con);
        if (status < 0) rc = fail_status(status, &err);
    }
    r->prompt_ns = clock_ns() - start;
    if (r->con.is_tty && isatty(STDOUT_FILENO) == 1) r->con.hides_compute = true;
    return rc;
}

/* Run the id just drawn, which gives the row for the next. INTERRUPTED is not yet said. */
static int run_step(run_state *r, uint32_t id) {
    k3_error err = {{0}};
    uint64_t start = clock_ns();
    console_answer(&r->con, r->said.n, r->a->tokens);
    int status = timeline_run(&r->line, id, &err);
    console_clear(&r->con);
    r->gen_ns += clock_ns() - start;
    if (status == K3_ECANCEL) return INTERRUPTED;
    if (status < 0) return fail_status(status, &err);
    r->n_step++;
    if (r->trace.f && ferror(r->trace.f))
        return fail(FAIL_IO, "%s: write error; is the disk full?", r->trace.path);
    if (r->routing.f && ferror(r->routing.f))
        return fail(FAIL_IO, "%s: write error; is the disk full?", r->routing.path);
    return r->dump.f ? outfile_write(&r->dump, r->line.row, r->line.n_vocab * sizeof(float)) : DONE;
}

/* Draw, print, run, until something ends it; `why` says what. */
static int run_generate(run_state *r) {
    const cli_args *a = r->a;
    uint32_t eos = k3_engine_shape(r->e)->eos_id;
    int rc = DONE;
    r->why = "tokens";
    while (r->said.n < a->tokens && rc == DONE) {
        uint32_t id = timeline_draw(&r->line);
        rc = run_keep_id(r, id);
        if (rc != DONE) break;
        if (id == eos && !a->no_stop) {
            r->why = "eos";
            break;
        }
        size_t n_bytes = 0;
        const char *bytes = r->t ? k3_id_bytes(r->t, id, &n_bytes) : NULL;
        if (bytes && n_bytes) rc = run_text(r, bytes, n_bytes);
        if (rc == -1) {
            r->why = "stop";
            return DONE;
        }
        if (rc != DONE || r->said.n == a->tokens) break;
        if (timeline_pos(&r->line) == k3_session_context(r->line.s)) {
            r->why = "context";
            break;
        }
        rc = interrupted ? INTERRUPTED : run_step(r, id);
    }
    if (rc == INTERRUPTED) r->why = "interrupt";
    if (ferror(stdout)) return rc;
    int end = run_text(r, "", 0); /* what was held back */
    if (end == -1) r->why = "stop";
    return end > 0 && rc == DONE ? end : rc;
}

/* Where the bytes came from; read_bytes and all below it without what opening read. */
static void json_put_disk(json_object *o, const run_state *r) {
    k3_stats st = timeline_stats(&r->line, &r->line.before);
    json_put_count(o, "passes", r->line.d.passes);
    json_put_count(o, "drafted", r->line.d.drafted);
    json_put_count(o, "accepted", r->line.d.accepted);
    json_put_count(o, "ram_bytes", k3_engine_plan(r->e)->ram_bytes);
    json_put_count(o, "peak_bytes", proc_bytes("/proc/self/status", "VmHWM"));
    json_put_count(o, "resident_bytes", st.resident_bytes);
    json_put_count(o, "load_bytes", r->line.before.read_bytes);
    json_put_count(o, "read_bytes", st.read_bytes);
    json_put_real(o, "stall_s", (double)st.stall_ns * 1e-9);
    json_put_count(o, "expert_uses", st.expert_uses);
    json_put_count(o, "expert_loads", st.expert_loads);
    json_put_count(o, "expert_hits", st.expert_hits);
    json_put_count(o, "guesses", st.guesses);
    json_put_count(o, "guess_hits", st.guess_hits);
    json_put_count(o, "wasted_bytes", st.wasted_bytes);
    if (!r->a->tier.n && !r->a->gpu) return;
    json_put_count(o, "far_asked", st.far_asked);
    json_put_count(o, "far_served", st.far_served);
    json_put_count(o, "far_late", st.far_late);
    json_put_count(o, "far_hedged", st.far_hedged);
    json_put_count(o, "far_audits", st.far_audits);
    json_put_count(o, "far_lies", st.far_lies);
}

/* The --json object, complete, in one write. */
static int run_json(const run_state *r) {
    json_object *o = json_object_new_object(), *ids = json_object_new_array();
    for (size_t i = 0; i < r->said.n; i++)
        json_object_array_add(ids, json_object_new_int64(r->said.id[i]));
    json_put(o, "text", json_object_new_string_len(r->text.p ? r->text.p : "", (int)r->text.n));
    json_put(o, "ids", ids);
    json_put(o, "n_prompt", json_object_new_int64((int64_t)r->prompt_ids.n));
    json_put_count(o, "n_loaded", r->n_loaded);
    json_put_count(o, "n_restored", r->n_restored);
    json_put(o, "n_gen", json_object_new_int64((int64_t)r->said.n));
    json_put(o, "stop_reason", json_object_new_string(r->why));
    json_put_hash(o, "ids_fnv", r->line.ids_fnv);
    json_put_hash(o, "logits_fnv", r->line.logits_fnv);
    if (r->a->trace) json_put_hash(o, "trace_fnv", r->trace_fnv);
    json_put_real(o, "load_s", (double)r->load_ns * 1e-9);
    json_put_real(o, "prompt_s", (double)r->prompt_ns * 1e-9);
    json_put_real(o, "gen_s", (double)r->gen_ns * 1e-9);
    json_put_real(o, "prompt_tok_s", per_second(r->prompt_ids.n - r->n_restored, r->prompt_ns));
    json_put_real(o, "gen_tok_s", per_second(r->n_step, r->gen_ns));
    json_put_disk(o, r);
    json_put_path(o, "model", r->dir);
    json_put(o, "kernels", json_object_new_string(k3_engine_kernels(r->e)));
    json_put(o, "threads", json_object_new_int(k3_engine_threads(r->e)));
    json_put(o, "chunk", json_object_new_int(k3_engine_chunk(r->e)));
    json_put(o, "numerics", json_object_new_string(K3_NUMERICS_ID));
    json_put(o, "version", json_object_new_string(K3_VERSION));
    if (version_commit()[0]) json_put(o, "commit", json_object_new_string(version_commit()));
    return out_json_line(o);
}

/* What the disk did for this answer, in two lines. */
static void run_say_disk(const run_state *r) {
    char read[32], opening[32], wasted[32], held[32], ram[32];
    k3_stats st = timeline_stats(&r->line, &r->line.before);
    say("disk: %s read while computing, %.2f GB/s, %.0f %% of the time spent waiting; %s read to "
        "open",
        fmt_bytes(read, st.read_bytes), per_second(st.read_bytes, st.compute_ns) * 1e-9,
        percent(st.stall_ns, st.compute_ns), fmt_bytes(opening, r->line.before.read_bytes));
    say("experts: %llu uses, %.0f %% in memory when wanted; %llu read ahead, %.0f %% of them used, "
        "%s in vain; %s of %s taken",
        (unsigned long long)st.expert_uses, percent(st.expert_hits, st.expert_uses),
        (unsigned long long)st.guesses, percent(st.guess_hits, st.guesses),
        fmt_bytes(wasted, st.wasted_bytes), fmt_bytes(held, st.resident_bytes),
        fmt_bytes(ram, k3_engine_plan(r->e)->ram_bytes));
}

static void run_say_tier(const run_state *r) {
    k3_stats st = timeline_stats(&r->line, &r->line.before);
    tiers_say_silent(r->a, &st);
    say("tier: %llu experts asked for, %.0f %% of them served; %llu answers too late",
        (unsigned long long)st.far_asked, percent(st.far_served, st.far_asked),
        (unsigned long long)st.far_late);
}

/* The end: JSON or the last newline to stdout, statistics to stderr. */
static int run_report(const run_state *r) {
    int rc = r->a->json ? run_json(r) : r->n_out ? out_write("\n", 1) : DONE;
    if (r->a->trace)
        fprintf(r->trace.f ? r->trace.f : stderr, "trace_fnv %016llx\n",
                (unsigned long long)r->trace_fnv);
    if (r->says_disk) run_say_disk(r);
    if ((r->a->tier.n || r->a->gpu) && !r->a->quiet) run_say_tier(r);
    if (!r->a->quiet)
        say("prompt %zu ids, %.1f tok/s; answer %zu ids, %.1f tok/s (%s); "
            "ids_fnv %016llx logits_fnv %016llx",
            r->prompt_ids.n, per_second(r->prompt_ids.n - r->n_restored, r->prompt_ns), r->said.n,
            per_second(r->n_step, r->gen_ns), r->why, (unsigned long long)r->line.ids_fnv,
            (unsigned long long)r->line.logits_fnv);
    return rc;
}

static void run_close(run_state *r) {
    k3_cache_close(r->cache);
    timeline_close(&r->line);
    k3_engine_close(r->e);
    k3_tokenizer_close(r->t);
    free(r->prompt.p);
    free(r->prompt_ids.id);
    free(r->said.id);
    free(r->text.p);
}

static int run_answer(run_state *r, bool *has_answer) {
    r->con.n_grace = 0;
    int rc = run_prompt(r);
    *has_answer = rc == DONE;
    r->con.n_grace = r->a->save ? 1 : 0; /* a step given up costs the state: it ends first */
    return rc == DONE ? run_generate(r) : rc;
}

int cmd_run(const cli_args *a) {
    run_state r;
    memset(&r, 0, sizeof r);
    r.a = a;
    console_init(&r.con, a->quiet);
    bool has_answer = false;
    int rc = run_open(&r);
    if (rc == DONE) rc = run_answer(&r, &has_answer);
    if (has_answer && (rc == DONE || rc == INTERRUPTED)) {
        int said = run_report(&r);
        if (said != DONE) rc = said;
    }
    bool keep = has_answer && (rc == DONE || rc == INTERRUPTED);
    if (keep && (rc == DONE || a->save)) {
        int kept = run_state_keep(&r);
        if (kept != DONE) rc = kept;
    }
    int dumped = outfile_close(&r.dump, keep), traced = outfile_close(&r.trace, keep);
    int routed = outfile_close(&r.routing, keep);
    run_close(&r);
    return rc != DONE ? rc : dumped != DONE ? dumped : traced != DONE ? traced : routed;
}
