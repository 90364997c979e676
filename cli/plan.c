/* plan.c - `k3 plan`: where a memory budget goes, and what a token and a prompt then read. Reads no weight. */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/forecast.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "cli/place.h"
#include "cli/reader.h"

#include <errno.h>
#include <stdio.h>

static void plan_row(const char *name, uint64_t n_bytes, const char *note) {
    char text[32];
    printf("%-20s %12s %18llu%s%s\n", name, fmt_bytes(text, n_bytes), (unsigned long long)n_bytes,
           note[0] ? "  " : "", note);
}

/* The split. `p` is a plan that works: at the floor when what was asked is below it. */
static void plan_split(const k3_plan *p, const k3_shape *s, uint64_t asked, bool is_default) {
    char cache[64], scratch[64], slots[128];
    uint64_t n_streamed = p->streamed_bytes, slots_bytes = p->slot_bytes * p->n_slots;
    uint64_t sum = p->session_bytes + p->snapshot_bytes + p->vector_bytes + p->scratch_bytes +
                   p->resident_bytes + p->ring_bytes + slots_bytes;
    snprintf(cache, sizeof cache, "%llu positions, with their ids", (unsigned long long)p->context);
    if (p->part < p->chunk)
        snprintf(scratch, sizeof scratch, "passes of %u positions, %u computed together", (unsigned)p->chunk,
                 (unsigned)p->part);
    else
        snprintf(scratch, sizeof scratch, "%u positions computed together", (unsigned)p->chunk);
    int n = snprintf(slots, sizeof slots, "%u of %llu experts, %u for each of %llu layers",
                     (unsigned)p->n_slots, (unsigned long long)expert_count(s), (unsigned)p->quota,
                     (unsigned long long)moe_layers(s));
    if (p->n_pinned)
        snprintf(slots + n, sizeof slots - (size_t)n, ", %u pinned", (unsigned)p->n_pinned);
    plan_row("budget", asked, is_default ? "what is free, less 1/16" : "--ram");
    plan_row("floor", p->floor_bytes, "the least that this context can run in");
    if (asked < p->floor_bytes) puts("\nat the floor");
    plan_row("  state", p->state_bytes, "of the KDA layers");
    plan_row("  latent cache", p->session_bytes - p->state_bytes, cache);
    if (p->snapshot_bytes) plan_row("  snapshots", p->snapshot_bytes, "to undo turns");
    plan_row("  scratch", p->scratch_bytes, scratch);
    plan_row("  vectors", p->vector_bytes, "norms, biases and the like, kept");
    plan_row("  trunk kept", p->resident_bytes, n_streamed ? "" : "all of it");
    plan_row("  trunk ring", p->ring_bytes, n_streamed ? "the rest passes through" : "");
    plan_row("  expert slots", slots_bytes, slots);
    plan_row("  rest", p->ram_bytes > sum ? p->ram_bytes - sum : 0,
             "program, tables, and what nothing here can use");
}

/* GB a token less for one GB of budget more: all of it while trunk is streamed; of the first GB
 * of slots about two thirds is saved (docs/PERFORMANCE.md). */
static void plan_next_gb(const k3_plan *p, const k3_shape *s) {
    const double per_slot_gb = 0.67;
    double trunk = (double)p->streamed_bytes * 1e-9;
    uint64_t n_left = p->quota < s->n_experts ? (s->n_experts - p->quota) * moe_layers(s) : 0;
    if (trunk + (double)(n_left * s->expert_bytes) * 1e-9 <= 1)
        puts(trunk > 0 || n_left ? "the next GB          everything is in memory then"
                                 : "the next GB          buys nothing: everything is in memory");
    else if (trunk >= 1)
        puts("the next GB          1.00 GB of trunk less for each token");
    else
        printf("the next GB          about %.2f GB less for each token%s\n",
               trunk + (1 - trunk) * per_slot_gb, p->quota ? ", and less as slots fill" : "");
}

/* Bytes per second to plan for: the one that was given or measured, or three usual ones. */
static size_t plan_rates(float gb_per_s, double rate[3]) {
    static const double usual[] = {3e9, 7e9, 14e9};
    for (size_t i = 0; i < COUNT(usual); i++) rate[i] = usual[i];
    if (gb_per_s > 0) rate[0] = (double)gb_per_s * 1e9;
    return gb_per_s > 0 ? 1 : COUNT(usual);
}

/* What one token reads, and how long that takes. */
static void plan_reads(const k3_plan *p, const k3_shape *s, float disk) {
    char note[96];
    bool is_all = moe_layers(s) == 0 || p->quota == s->n_experts;
    uint64_t n_experts = is_all ? 0 : moe_layers(s) * s->top_k;
    uint64_t n_bytes = p->streamed_bytes + n_experts * s->expert_bytes;
    double rate[3];
    size_t n_rate = plan_rates(disk, rate);
    puts("");
    uint32_t n_parts = (p->chunk + p->part - 1) / p->part;
    snprintf(note, sizeof note, "of trunk; a chunk of a prompt is at most %u positions%s", (unsigned)p->chunk,
             n_parts > 1 ? ", in parts" : "");
    plan_row("a chunk reads", p->streamed_bytes * n_parts, note);
    if (is_all)
        snprintf(note, sizeof note, "once each expert was used");
    else
        snprintf(note, sizeof note,
                 "trunk and %llu experts, none of them in a slot; guesses may add to it",
                 (unsigned long long)n_experts);
    plan_row("a token reads", n_bytes, note);
    for (size_t i = 0; n_bytes && i < n_rate; i++)
        printf("  at %.3g GB/s %18.3f s a token, where the disk is what takes time\n",
               rate[i] * 1e-9, (double)n_bytes / rate[i]);
    plan_next_gb(p, s);
}

/* Ids that K3's chat format adds to a first message at the default effort, by the released tokenizer: the 99
 * of "user_turn" in tests/data/tokenizer_pins.json, less the 11 of its text. */
enum { RELEASED_CHAT_IDS = 88 };

/* Bytes and seconds to the first token. */
static void plan_prompts(const cli_args *a, const k3_engine *e, const char *dir, float disk) {
    double rate[3];
    k3_tokenizer *t = NULL;
    forecast f = {.sh = k3_engine_shape(e), .p = k3_engine_plan(e), .disk = rate};
    f.n_disk = plan_rates(disk, rate);
    f.n_threads = k3_engine_threads(e);
    f.core_flops = (double)a->plan.gflops * 1e9;
    f.is_pinned_chat = a->plan.released;
    f.n_chat = a->plan.released ? RELEASED_CHAT_IDS : 0;
    if (!a->plan.released && k3_tokenizer_open(&t, dir, NULL) >= 0) f.n_chat = chat_template_ids(t);
    k3_tokenizer_close(t);
    fflush(stdout);
    if (forecast_print(&f) < 0 && !a->quiet)
        say("note: these cores could not be measured; --gflops N says how fast they are");
}

/* The way on from a plan. */
static void plan_say_next(const cli_args *a, const char *dir) {
    if (a->quiet) return;
    if (a->plan.released)
        say("next: `hf download moonshotai/Kimi-K3 --local-dir DIR` (of `pip install -U "
            "huggingface_hub`; 1.56 TB), then `k3 verify --model DIR`");
    else if (a->engine.model_dir)
        say("next: `k3 chat --model %s` or `k3 run --model %s PROMPT`, with the same --ram and "
            "--context%s",
            dir, dir,
            a->reader || a->plan.disk > 0 ? "" : "; `k3 plan --reader` measures this disk");
    else
        say("next: `k3 plan --released` plans for the real model");
}

/* The directory to plan for; with --released, one that holds a config.json and nothing else. */
static int plan_locate(const cli_args *a, const char **dir) {
    static char released[4200];
    if (!a->plan.released) return model_find(a, dir);
    if (a->engine.model_dir || a->engine.pins || a->reader)
        return fail(FAIL_USAGE, "--released is a plan without files: not with %s",
                    a->engine.model_dir ? "--model"
                    : a->engine.pins    ? "--pins"
                                        : "--reader");
    *dir = released;
    if (place_find(PLACE_RELEASED, released, sizeof released)) return DONE;
    return fail(FAIL_MODEL, "--released: no config.json in %s: `make install` puts it there",
                released);
}

/* Open headers only, for the plan. Below the floor it is opened again, at the floor, and
 * *asked is what it was to be; otherwise *asked is the budget. */
static int plan_open(k3_engine **e, const cli_args *a, const char *dir, console *con,
                     uint64_t *asked) {
    k3_options o = engine_options(a, dir, con);
    k3_error err = {{0}};
    o.headers_only = true;
    o.config_only = a->plan.released;
    ram_say(con, &o);
    int status = k3_engine_open(e, &o, &err);
    *asked = a->engine.ram_bytes;
    if (status >= 0) *asked = k3_engine_plan(*e)->ram_bytes;
    if (status >= 0 && *asked < k3_engine_plan(*e)->floor_bytes) {
        o.ram_bytes = k3_engine_plan(*e)->floor_bytes;
        k3_engine_close(*e);
        status = k3_engine_open(e, &o, &err);
    }
    console_clear(con);
    return status < 0 ? fail_status(status, &err) : DONE;
}

/* The disk's own speed, for --reader. */
static int plan_measure(const char *dir, uint64_t expert_bytes, uint64_t ram, float *gb_per_s) {
    reader r = {0};
    int rc = reader_open(&r, dir, expert_bytes ? expert_bytes : 1 << 20);
    if (rc == DONE) rc = reader_find(&r, ram);
    if (rc == DONE) {
        printf("\nthis disk            %.2f GB/s, %d reads in flight\n", r.before * 1e-9,
               r.best_depth);
        *gb_per_s = (float)(r.before * 1e-9);
    }
    reader_close(&r);
    return rc;
}

int cmd_plan(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    uint64_t asked = 0;
    if ((is_given(a, "--disk") || is_given(a, "--disk-rate")) && !(a->plan.disk > 0))
        return fail(FAIL_USAGE, "--disk: a disk of 0 GB/s reads nothing");
    console_init(&con, a->quiet);
    int rc = plan_locate(a, &dir);
    if (rc == DONE) rc = plan_open(&e, a, dir, &con, &asked);
    if (rc != DONE) return rc;
    const k3_plan *p = k3_engine_plan(e);
    plan_split(p, k3_engine_shape(e), asked, !a->engine.ram_bytes);
    float disk = a->plan.disk;
    if (a->reader)
        rc = plan_measure(dir, k3_engine_shape(e)->expert_bytes, a->engine.ram_bytes, &disk);
    plan_reads(p, k3_engine_shape(e), disk);
    if (rc == DONE) plan_prompts(a, e, dir, disk);
    if (fflush(stdout) != 0 && rc == DONE) rc = fail_stdout(errno);
    if (rc == DONE && asked < p->floor_bytes)
        rc = fail(FAIL_BUDGET,
                  "a budget of %llu bytes is below the floor of this model with a context of %llu: "
                  "give at least %llu bytes (%.2f GiB) with --ram, or a smaller --context",
                  (unsigned long long)asked, (unsigned long long)p->context,
                  (unsigned long long)p->floor_bytes, (double)p->floor_bytes / 0x1p30);
    if (rc == FAIL_BUDGET) unit_ask();
    if (rc == DONE) plan_say_next(a, dir);
    k3_engine_close(e);
    return rc;
}
