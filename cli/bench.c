/* bench.c - `k3 bench`: prompts run and measured.
 *
 * A table for a spreadsheet and for the next machine: speeds with the hashes that prove
 * the same work was done. The `# total` row hashes the logits_fnv of all rows, in order,
 * as little-endian u64: that is the number --expect takes.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/bench_sessions.h"
#include "cli/console.h"
#include "cli/generate.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "cli/reader.h"
#include "cli/where.h"
#include "experts.h"
#include "k3_common.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    const cli_args *a;
    const char *dir;
    console con;
    k3_engine *e;
    k3_tokenizer *t;
    k3_shape shape;
    timeline line;
    id_list *prompt;
    size_t n_prompt;
    reader reader;
    where where;
    double run_s, stall_s; /* of all runs together */
    uint64_t run_bytes;
} bench_state;

typedef struct {
    size_t n_in, n_out;
    double in_s, out_s; /* medians; out_s is for n_out - 1 steps              */
    uint64_t ids_fnv, logits_fnv;
    uint64_t read_bytes, wasted_bytes; /* these: means over the repeats       */
    double stall_s;
    uint64_t expert_uses, expert_hits, guesses, guess_hits;
} bench_result;

static const char *const BENCH_PROMPT[] = {
    "The capital of France is", "The chemical symbol of gold is", "12 + 30 =", "Once upon a time",
    "Monday, Tuesday,",
};

/* One line of a prompts file, or a built-in prompt. */
static int bench_add(bench_state *b, const char *line, size_t n, size_t i_line) {
    char what[64];
    id_list *grown = realloc(b->prompt, (b->n_prompt + 1) * sizeof *grown);
    if (!grown) return fail_memory("the prompts", (b->n_prompt + 1) * sizeof *grown);
    b->prompt = grown;
    id_list *ids = &b->prompt[b->n_prompt++];
    *ids = (id_list){NULL, 0};
    snprintf(what, sizeof what, "--prompts, line %zu", i_line);
    bool is_ids = n >= 4 && memcmp(line, "ids:", 4) == 0;
    if (!is_ids && !b->t)
        return fail(FAIL_USAGE, "%s: a model without tiktoken.model takes ids: lines", what);
    int rc = is_ids ? ids_parse(ids, line + 4, n - 4, what)
                    : ids_encode(ids, b->t, line, n, b->a->prompt.control);
    for (size_t i = 0; rc == DONE && i < ids->n; i++)
        if (ids->id[i] >= b->shape.vocab_size)
            rc = fail(FAIL_USAGE, "%s: number %zu, %u, is not below the vocabulary of %u", what,
                      i + 1, (unsigned)ids->id[i], (unsigned)b->shape.vocab_size);
    if (rc == DONE && ids->n + b->a->tokens > b->shape.max_position)
        rc = fail(exit_code(K3_EFULL), "%s: %zu ids and --tokens %llu, and this model holds %u",
                  what, ids->n, (unsigned long long)b->a->tokens, (unsigned)b->shape.max_position);
    return rc;
}

static int bench_prompts(bench_state *b) {
    blob file = {NULL, 0};
    int rc = DONE;
    if (!b->a->bench.prompts) {
        for (size_t i = 0; i < COUNT(BENCH_PROMPT) && rc == DONE; i++)
            rc = bench_add(b, BENCH_PROMPT[i], strlen(BENCH_PROMPT[i]), i + 1);
        return rc;
    }
    rc = blob_read(&file, b->a->bench.prompts,
                   b->a->engine.ram_bytes ? (size_t)(b->a->engine.ram_bytes / 8) : SIZE_MAX);
    for (size_t at = 0, i_line = 1; at < file.n && rc == DONE; i_line++) {
        const char *end = memchr(file.p + at, '\n', file.n - at);
        size_t n = end ? (size_t)(end - (file.p + at)) : file.n - at;
        if (n) rc = bench_add(b, file.p + at, n, i_line); /* an empty line is no prompt */
        at += n + 1;
    }
    free(file.p);
    if (rc == DONE && b->n_prompt == 0)
        rc = fail(FAIL_USAGE, "%s: no prompt in it", b->a->bench.prompts);
    return rc;
}

static int bench_open(bench_state *b) {
    const cli_args *a = b->a;
    char path[4096];
    k3_error err = {{0}};
    uint64_t most = 0, bytes = 0;
    int rc = model_find(a, &b->dir);
    if (rc != DONE) return rc;
    int read = k3_config_read(&b->shape, b->dir, &err);
    if (read < 0) return fail_status(read, &err);
    snprintf(path, sizeof path, "%s/tiktoken.model", b->dir);
    if (!a->bench.prompts || access(path, F_OK) == 0) {
        int status = k3_tokenizer_open(&b->t, b->dir, &err);
        if (status < 0) return fail_status(status, &err);
    }
    rc = bench_prompts(b);
    if (rc != DONE) return rc;
    for (size_t i = 0; i < b->n_prompt; i++)
        if (b->prompt[i].n + a->tokens > most) most = b->prompt[i].n + a->tokens;
    if (a->engine.context && a->engine.context < most)
        return fail(exit_code(K3_EFULL), "--context holds %llu positions, the prompts need %llu",
                    (unsigned long long)a->engine.context, (unsigned long long)most);
    signals_catch();
    k3_options o = engine_options(a, b->dir, &b->con);
    engine_gpu(a, &o);
    if (!o.context) o.context = most;
    for (size_t i = 0; i < b->n_prompt; i++)
        bytes += sizeof(id_list) * 2 + 32 + b->prompt[i].n * 4 * sizeof(uint32_t);
    o.caller_bytes = beyond_allowance(bytes);
    o.revocable = drafts_revocable(args_draft(a));
    o.sessions = (uint32_t)a->bench.sessions;
    rc = engine_open(&b->e, &o);
    if (rc == DONE && !a->quiet && is_streaming(b->e)) plan_say(b->e);
    return rc == DONE ? timeline_open(&b->line, b->e, a) : rc;
}

/* One prompt, once; the two times go to *in_s and *out_s. */
static int bench_once(bench_state *b, const id_list *prompt, double *in_s, double *out_s) {
    timeline *line = &b->line;
    k3_error err = {{0}};
    timeline_reset(line);
    console_answer(&b->con, 0, 0);
    k3_stats before, between, after;
    k3_session_stats(line->s, &before);
    uint64_t start = clock_ns();
    int status = timeline_feed(line, prompt->id, prompt->n, &err);
    uint64_t middle = clock_ns();
    k3_session_stats(line->s, &between);
    for (uint64_t i = 0; i < b->a->tokens && status >= 0; i++) {
        uint32_t id = timeline_draw(line);
        console_answer(&b->con, i + 1, b->a->tokens);
        if (i + 1 < b->a->tokens) status = timeline_run(line, id, &err);
    }
    k3_session_stats(line->s, &after);
    where_add(&b->where.prompt, &before, &between);
    where_add(&b->where.decode, &between, &after);
    *in_s = (double)(middle - start) * 1e-9;
    *out_s = (double)(clock_ns() - middle) * 1e-9;
    console_clear(&b->con);
    return status < 0 ? fail_status(status, &err) : DONE;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *value, size_t n) {
    qsort(value, n, sizeof *value, compare_doubles);
    return (value[(n - 1) / 2] + value[n / 2]) / 2;
}

/* What the disk did since `from`, divided by the repeats. */
static void bench_count(const bench_state *b, const k3_stats *from, bench_result *out) {
    k3_stats st = timeline_stats(&b->line, from);
    uint64_t n = b->a->bench.repeats;
    out->read_bytes = st.read_bytes / n;
    out->wasted_bytes = st.wasted_bytes / n;
    out->stall_s = (double)st.stall_ns * 1e-9 / (double)n;
    out->expert_uses = st.expert_uses;
    out->expert_hits = st.expert_hits;
    out->guesses = st.guesses;
    out->guess_hits = st.guess_hits;
}

static int bench_prompt(bench_state *b, size_t i_prompt, bench_result *out) {
    double in_s[MAX_REPEAT], out_s[MAX_REPEAT];
    k3_stats from;
    const id_list *prompt = &b->prompt[i_prompt];
    size_t n = b->a->bench.repeats;
    k3_session_stats(b->line.s, &from);
    for (size_t i = 0; i < n; i++) {
        int rc = bench_once(b, prompt, &in_s[i], &out_s[i]);
        if (rc != DONE) return rc;
        if (i && (b->line.ids_fnv != out->ids_fnv || b->line.logits_fnv != out->logits_fnv))
            return fail(FAIL_CHECK,
                        "prompt %zu: repeat %zu has logits_fnv %016llx, the first %016llx",
                        i_prompt, i + 1, (unsigned long long)b->line.logits_fnv,
                        (unsigned long long)out->logits_fnv);
        out->ids_fnv = b->line.ids_fnv;
        out->logits_fnv = b->line.logits_fnv;
    }
    bench_count(b, &from, out);
    out->n_in = prompt->n;
    out->n_out = b->a->tokens;
    out->in_s = median(in_s, n);
    out->out_s = median(out_s, n);
    return DONE;
}

static int bench_row(const bench_state *b, const char *name, const bench_result *r, size_t n_step) {
    printf("%s\t%zu\t%zu\t%.2f\t%.2f\t%016llx\t%016llx\t%s\t%d\t%d\t%s", name, r->n_in, r->n_out,
           r->in_s > 0 ? (double)r->n_in / r->in_s : 0,
           r->out_s > 0 ? (double)n_step / r->out_s : 0, (unsigned long long)r->ids_fnv,
           (unsigned long long)r->logits_fnv, k3_engine_kernels(b->e), k3_engine_threads(b->e),
           k3_engine_chunk(b->e), K3_NUMERICS_ID);
    printf("\t%llu\t%.6f\t%.3f\t%.3f\t%llu\n", (unsigned long long)r->read_bytes, r->stall_s,
           share(r->expert_hits, r->expert_uses), share(r->guess_hits, r->guesses),
           (unsigned long long)r->wasted_bytes);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

static void bench_add_up(bench_result *total, const bench_result *r) {
    total->n_in += r->n_in;
    total->n_out += r->n_out;
    total->in_s += r->in_s;
    total->out_s += r->out_s;
    total->ids_fnv = k3_fnv1a(total->ids_fnv, &r->ids_fnv, sizeof r->ids_fnv);
    total->logits_fnv = k3_fnv1a(total->logits_fnv, &r->logits_fnv, sizeof r->logits_fnv);
    total->read_bytes += r->read_bytes;
    total->wasted_bytes += r->wasted_bytes;
    total->stall_s += r->stall_s;
    total->expert_uses += r->expert_uses;
    total->expert_hits += r->expert_hits;
    total->guesses += r->guesses;
    total->guess_hits += r->guess_hits;
}

static uint64_t bench_lies(const bench_state *b) {
    k3_stats st;
    k3_session_stats(b->line.s, &st);
    return st.far_lies;
}

static int bench_all(bench_state *b, uint64_t *logits_fnv) {
    bench_result total = {.ids_fnv = K3_FNV_BASIS, .logits_fnv = K3_FNV_BASIS};
    size_t n_step = 0;
    puts("prompt\tn_prompt\tn_gen\tin_tok_s\tout_tok_s\tids_fnv\tlogits_fnv\t"
         "kernels\tthreads\tchunk\tnumerics\t"
         "read_bytes\tstall_s\texpert_hit_rate\tguess_hit_rate\twasted_bytes");
    for (size_t i = 0; i < b->n_prompt; i++) {
        bench_result r = {0};
        char name[24];
        uint64_t n_lies = bench_lies(b);
        int rc = bench_prompt(b, i, &r);
        size_t steps = r.n_out ? r.n_out - 1 : 0;
        if (rc == DONE && i > 0 && b->a->engine.tier_audit > 1 && bench_lies(b) > n_lies)
            return fail(FAIL_CHECK, "a far box lied: the rows above may be wrong; run again "
                                    "without it, or with --tier-audit 1/1");
        snprintf(name, sizeof name, "%zu", i);
        if (rc == DONE) rc = bench_row(b, name, &r, steps);
        if (rc != DONE) return rc;
        bench_add_up(&total, &r);
        n_step += steps;
    }
    *logits_fnv = total.logits_fnv;
    b->run_s = total.in_s + total.out_s;
    b->stall_s = total.stall_s;
    b->run_bytes = total.read_bytes;
    return bench_row(b, "# total", &total, n_step);
}

/* The reader before the engine is there: its buffers are gone then. */
static int bench_reader(bench_state *b) {
    k3_engine *e = NULL;
    int rc = model_find(b->a, &b->dir);
    if (rc == DONE) rc = engine_open_headers(&e, b->a, b->dir, &b->con, false, NULL);
    if (rc != DONE) return rc;
    uint64_t block = k3_engine_shape(e)->expert_bytes;
    k3_engine_close(e);
    rc = reader_open(&b->reader, b->dir, block ? block : 1 << 20);
    return rc == DONE ? reader_find(&b->reader, b->a->engine.ram_bytes) : rc;
}

/* And after the runs; the mean of both is what they are compared with. */
static int bench_reader_row(bench_state *b) {
    reader *r = &b->reader;
    double runs = b->run_s > 0 ? (double)b->run_bytes / b->run_s : 0;
    timeline_close(&b->line);
    k3_engine_close(b->e);
    b->e = NULL;
    memset(&b->line, 0, sizeof b->line);
    r->after = reader_measure(r, r->best_depth);
    printf("# reader: depth %d, %.3f GB/s before, %.3f after; the runs read %.3f GB/s, %.3f of it; "
           "stalled %.3f of their time\n",
           r->best_depth, r->before * 1e-9, r->after * 1e-9, runs * 1e-9,
           runs / ((r->before + r->after) / 2), b->run_s > 0 ? b->stall_s / b->run_s : 0);
    return fflush(stdout) == 0 ? DONE : fail_stdout(errno);
}

int cmd_bench(const cli_args *a) {
    bench_state b;
    uint64_t logits_fnv = 0;
    if (a->bench.kernels_only + (a->bench.replay != NULL) + (a->bench.hop.n > 0) > 1)
        return fail(FAIL_USAGE, "bench: --kernels-only, --replay and --hop are one thing each");
    if (a->bench.kernels_only) {
        k3_error err = {{0}};
        int most;
        if (!k3_machine_table(a->engine.kernels, (int)a->engine.n_threads, &most, &err))
            return fail_status(K3_EUSAGE, &err);
        int status = bench_kernels(most, a->engine.kernels, stdout);
        return status == K3_OK ? DONE
                               : fail(exit_code(status), "bench --kernels-only: out of memory");
    }
    if (a->bench.hop.n) return bench_hop(a);
    if (is_given(a, "--requests") || is_given(a, "--sustain"))
        return fail(FAIL_USAGE, "--requests and --sustain need --hop ADDR");
    if (a->bench.replay) return bench_replay(a);
    if (a->bench.write_pins) return fail(FAIL_USAGE, "--write-pins needs --replay FILE");
    memset(&b, 0, sizeof b);
    b.a = a;
    console_init(&b.con, a->quiet);
    int rc = a->reader ? bench_reader(&b) : DONE;
    if (rc == DONE) rc = bench_open(&b);
    if (rc == DONE) rc = bench_all(&b, &logits_fnv);
    if (rc == DONE && a->engine.is_timed) rc = where_print(&b.where, b.e);
    if (rc == DONE && a->bench.sessions > 1)
        rc = bench_sessions(b.e, (size_t)a->bench.sessions, b.prompt, b.n_prompt, a->tokens);
    if (rc == DONE && a->reader) rc = bench_reader_row(&b);
    if (rc == DONE && is_given(a, "--expect") && logits_fnv != a->bench.expect)
        rc = fail(FAIL_CHECK, "--expect: logits_fnv is %016llx, not %016llx",
                  (unsigned long long)logits_fnv, (unsigned long long)a->bench.expect);
    if (rc == DONE && b.line.s) {
        k3_stats st = timeline_stats(&b.line, &b.line.before);
        tiers_say_silent(a, &st);
    }
    timeline_close(&b.line);
    k3_engine_close(b.e);
    k3_tokenizer_close(b.t);
    for (size_t i = 0; i < b.n_prompt; i++) free(b.prompt[i].id);
    free(b.prompt);
    reader_close(&b.reader);
    return rc;
}
