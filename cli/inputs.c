/* inputs.c - prompts, ids, model directories, and the engine's opening.
 *
 * A prompt is any bytes, NUL and invalid UTF-8 included. Without --model and K3_MODEL the bundled model is
 * the one that is opened.
 */
#include "cli/inputs.h"

#include "cli/drafts.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/gpu.h"
#include "cli/place.h"
#include "experts.h"
#include "k3_machine.h"
#include "k3_common.h"
#include "slice.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

int blob_read(blob *b, const char *path, size_t most) {
    bool is_stdin = strcmp(path, "-") == 0;
    const char *name = is_stdin ? "stdin" : path;
    FILE *f = is_stdin ? stdin : fopen(path, "rb");
    size_t cap = 0;
    int rc = DONE;
    if (!f) return fail(FAIL_IO, "%s: %s", name, strerror(errno));
    for (;;) {
        if (b->n == cap) {
            char *grown = realloc(b->p, cap = cap ? cap * 2 : 65536);
            if (!grown) {
                rc = fail_memory(name, cap);
                break;
            }
            b->p = grown;
        }
        size_t got = fread(b->p + b->n, 1, cap - b->n, f);
        b->n += got;
        if (b->n > most)
            rc = fail(FAIL_IO,
                      "%s: more than %zu bytes: no text of that length fits --context and --ram",
                      name, most);
        if (got == 0 || rc != DONE) break;
    }
    if (rc == DONE && ferror(f)) rc = fail(FAIL_IO, "%s: %s", name, strerror(errno));
    if (!is_stdin) fclose(f);
    return rc;
}

int ids_parse(id_list *out, const char *text, size_t n_bytes, const char *what) {
    out->n = 0;
    out->id = malloc((n_bytes / 2 + 1) * sizeof *out->id);
    if (!out->id) return fail_memory(what, n_bytes * 2);
    for (size_t i = 0;; i++) {
        uint64_t value;
        size_t end;
        while (i < n_bytes && text[i] == ' ') i++;
        for (end = i; end < n_bytes && text[end] != ','; end++) continue;
        size_t n = end - i;
        while (n && isspace((unsigned char)text[i + n - 1])) n--;
        if (n == 0)
            return fail(FAIL_USAGE, "%s: number %zu is empty (write 1,2,3)", what, out->n + 1);
        if (!parse_u64(text + i, n, &value) || value > UINT32_MAX)
            return fail(FAIL_USAGE, "%s: number %zu, '%.*s', is not a token id", what, out->n + 1,
                        (int)(n < 40 ? n : 40), text + i);
        out->id[out->n++] = (uint32_t)value;
        i = end;
        if (end == n_bytes) return DONE;
    }
}

int ids_encode(id_list *out, k3_tokenizer *t, const char *text, size_t n_bytes, bool control) {
    k3_error err = {{0}};
    out->id = malloc((n_bytes + 1) * sizeof *out->id); /* one id per byte always suffices */
    if (!out->id) return fail_memory("the prompt's ids", n_bytes * sizeof *out->id);
    int64_t n = k3_encode(t, text, n_bytes, control ? K3_CONTROL : K3_TEXT, out->id, n_bytes, &err);
    if (n < 0) return fail_status((int)n, &err);
    out->n = (size_t)n;
    return DONE;
}

/* Somebody feeds us: stdin is a pipe, a socket or a file. A terminal, or /dev/null, is none. */
static bool stdin_is_fed(void) {
    struct stat st;
    return fstat(STDIN_FILENO, &st) == 0 &&
           (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode) || S_ISREG(st.st_mode));
}

static int prompt_sources(const cli_args *a) {
    return (a->words.arg != NULL) + (a->prompt.file != NULL) + (a->prompt.ids != NULL);
}

int prompt_check(const cli_args *a, const char *command) {
    int n_source = prompt_sources(a);
    if (n_source == 0 && stdin_is_fed()) {
        if (!a->quiet) say("reading the prompt from stdin");
        return DONE;
    }
    if (n_source == 0)
        return fail(FAIL_USAGE,
                    "%s needs a prompt: text, --prompt-file FILE, --ids N,N or - for stdin",
                    command);
    if (n_source > 1)
        return fail(FAIL_USAGE,
                    "%s takes one prompt: text, --prompt-file or --ids, not two of them", command);
    return DONE;
}

int audit_check_save(const cli_args *a) {
    if (!a->save || a->engine.tier_audit <= 1) return DONE;
    return fail(FAIL_USAGE,
                "--save needs every answer of far boxes compared, or none: --tier-audit 1/1, or leave it out");
}

/* The file with the prompt, "-" for stdin; NULL: it is on the command line. */
static const char *prompt_path(const cli_args *a) {
    if (prompt_sources(a) == 0) return stdin_is_fed() ? "-" : NULL;
    if (a->prompt.file) return a->prompt.file;
    return a->words.arg && strcmp(a->words.arg, "-") == 0 ? a->words.arg : NULL;
}

size_t prompt_most(const cli_args *a, const char *dir, const k3_tokenizer *t) {
    k3_shape sh;
    size_t longest = 1, n;
    if (!prompt_path(a) || !t || k3_config_read(&sh, dir, NULL) < 0) return SIZE_MAX;
    for (uint32_t id = 0; id < sh.vocab_size; id++)
        if (k3_id_bytes(t, id, &n) && n > longest) longest = n;
    uint64_t positions = a->engine.context ? a->engine.context : sh.max_position;
    size_t most = (size_t)(positions * longest), part = (size_t)(a->engine.ram_bytes / 8);
    return part > 0 && part < most ? part : most;
}

int prompt_read(const cli_args *a, blob *text, size_t most, id_list *ids, const char *command) {
    const char *path = prompt_path(a);
    int rc = DONE;
    if (a->prompt.ids) return ids_parse(ids, a->prompt.ids, strlen(a->prompt.ids), "--ids");
    if (path) {
        rc = blob_read(text, path, most);
    } else {
        text->n = strlen(a->words.arg);
        text->p = malloc(text->n + 1);
        if (!text->p) return fail_memory("the prompt", text->n);
        memcpy(text->p, a->words.arg, text->n + 1);
    }
    if (rc == DONE && text->n == 0 && prompt_sources(a) == 0)
        rc = fail(
            FAIL_USAGE,
            "%s needs a prompt, and stdin is empty: give text, --prompt-file FILE or --ids N,N",
            command);
    else if (rc == DONE && text->n == 0)
        rc = fail(FAIL_USAGE, "%s: the prompt is empty, there is nothing to go on from", command);
    return rc;
}

static bool is_model_dir(const char *dir) {
    char path[4096];
    return snprintf(path, sizeof path, "%s/config.json", dir) < (int)sizeof path &&
           access(path, R_OK) == 0;
}

/* What `k3 slice` made. */
static bool is_slice(const char *dir) {
    char path[4096];
    return snprintf(path, sizeof path, "%s/" SLICE_NAME, dir) < (int)sizeof path &&
           access(path, F_OK) == 0;
}

int dir_check(const char *option, const char *dir, const char *holds) {
    struct stat st;
    if (stat(dir, &st) != 0) return fail(FAIL_MODEL, "%s %s: %s", option, dir, strerror(errno));
    if (S_ISDIR(st.st_mode)) return DONE;
    size_t n = strlen(dir);
    if (n > 5 && strcasecmp(dir + n - 5, ".gguf") == 0)
        return fail(FAIL_MODEL,
                    "%s %s: not a directory: k3 reads the released safetensors as downloaded, not "
                    "GGUF files",
                    option, dir);
    return fail(FAIL_MODEL, "%s %s: not a directory (give the one that holds %s)", option, dir,
                holds);
}

/* What a model directory holds, where it is none. */
static int fail_no_model(const cli_args *a) {
    char path[4200];
    struct stat st;
    snprintf(path, sizeof path, "%s/snapshots", a->engine.model_dir);
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return fail(FAIL_MODEL,
                    "%s %s: no readable config.json there; this is a download cache: name the "
                    "directory inside its snapshots/",
                    a->model_by, a->engine.model_dir);
    return fail(FAIL_MODEL,
                "%s %s: no readable config.json there, so no model; the directory of a download "
                "holds config.json, tiktoken.model, tokenizer_config.json and model-*.safetensors",
                a->model_by, a->engine.model_dir);
}

int model_locate(const cli_args *a, const char **dir) {
    static char bundled[4200];
    int rc = DONE;
    for (size_t i = 0; i < a->mirror.n && rc == DONE; i++)
        rc = dir_check("--mirror", a->mirror.text[i], "shards");
    if (rc == DONE && a->engine.model_dir)
        rc = dir_check(a->model_by, a->engine.model_dir, "config.json");
    *dir = a->engine.model_dir;
    if (rc != DONE) return rc;
    if (a->engine.model_dir) {
        if (!is_model_dir(a->engine.model_dir)) return fail_no_model(a);
        return is_slice(a->engine.model_dir)
                   ? fail(FAIL_MODEL,
                          "%s %s: a slice: some experts and nothing else; "
                          "`k3-tier --slice` serves it",
                          a->model_by, a->engine.model_dir)
                   : DONE;
    }
    if (!place_find(PLACE_DEMO, bundled, sizeof bundled))
        return fail(FAIL_USAGE,
                    "no --model DIR given, and the bundled model is not at %s: give --model, set "
                    "K3_MODEL, or `make install`",
                    bundled);
    *dir = bundled;
    return DONE;
}

void model_say(const cli_args *a, const char *dir) {
    if (a->quiet || (a->engine.model_dir && strcmp(a->model_by, "K3_MODEL") != 0)) return;
    if (a->engine.model_dir)
        say("model: %s (from K3_MODEL)", dir);
    else
        say("no --model given: using the small bundled model, %s; `k3 plan --released` says "
            "what the real one needs",
            dir);
}

int model_find(const cli_args *a, const char **dir) {
    int rc = model_locate(a, dir);
    if (rc == DONE) model_say(a, *dir);
    return rc;
}

uint64_t proc_bytes(const char *path, const char *key) {
    unsigned long long kib = 0;
    char line[128];
    size_t n = strlen(key);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) == 0 && sscanf(line + n, ": %llu", &kib) == 1) break;
    if (f) fclose(f);
    return (uint64_t)kib * 1024;
}

void engine_gpu(const cli_args *a, k3_options *o) {
    static const char *tiers[MAX_TIER + 2]; /* the boxes that were named, and our own */
    static char address[160];
    char why[700];
    bool is_new = false;
    if (!a->gpu) return;
    memcpy(tiers, a->tier.text, a->tier.n * sizeof *tiers);
    tiers[a->tier.n] = tiers[a->tier.n + 1] = NULL;
    if (a->tier.n == MAX_TIER) {
        snprintf(why, sizeof why, "--gpu: %d boxes are named, and no more can be had", MAX_TIER);
    } else if (gpu_join(o->model_dir, a->engine.pins, a->engine.tier_key, address, sizeof address,
                        &is_new, why, sizeof why)) {
        tiers[a->tier.n] = address;
        o->tiers = tiers;
        o->others_bytes = is_new ? GPU_RAM_BYTES : 0; /* else it has what it takes */
        return;
    }
    console_clear(o->user);
    say("%s; going on without", why); /* also with -q: it was asked for */
}

k3_options engine_options(const cli_args *a, const char *dir, console *con) {
    k3_options o = a->engine;
    o.model_dir = dir;
    o.no_check =
        o.no_check || a->verify.write_sums; /* what is being written is not yet to be believed */
    if (a->verify.golden) o.eps_lora = 1e-5f;
    o.note = console_note;
    o.progress = console_progress;
    o.user = con;
    return o;
}

void threads_say(const console *con, const k3_engine *e, const k3_options *o) {
    const char *wanted = getenv("OMP_NUM_THREADS");
    if (con->is_quiet || o->headers_only || o->config_only || o->n_threads || !wanted) return;
    if (strtol(wanted, NULL, 10) == k3_engine_threads(e)) return;
    say("note: OMP_NUM_THREADS=%.40s is not read; %d threads, and --threads N sets another number",
        wanted, k3_engine_threads(e));
}

/* --ram is more than this machine or its control group has left. Before the engine takes any of it. */
void ram_say(const console *con, const k3_options *o) {
    char text[320];
    if (con->is_quiet || !o->ram_bytes) return;
    if (machine_ram_is_above("", o->ram_bytes, o->others_bytes, text, sizeof text))
        say("note: %s", text);
}

/* What drafts need of memory holds no weights. Do they take at most 1/32 of what is above the floor? Asked of plans that
 * read nothing but config.json. */
static bool drafts_are_cheap(const k3_options *without, const k3_options *with) {
    k3_options o[2] = {*without, *with};
    uint64_t taken[2] = {0, 0}, above = 0;
    for (int i = 0; i < 2; i++) {
        k3_engine *e;
        k3_error err;
        o[i].config_only = true;
        o[i].note = NULL;
        o[i].tiers = NULL;
        if (i == 0) o[i].revocable = 0;
        if (k3_engine_open(&e, &o[i], &err) < 0) return false;
        const k3_plan *p = k3_engine_plan(e);
        taken[i] = p->session_bytes + o[i].caller_bytes;
        if (i == 0) above = p->ram_bytes > p->floor_bytes ? p->ram_bytes - p->floor_bytes : 0;
        k3_engine_close(e);
    }
    return taken[1] - taken[0] <= above / 32;
}

int engine_open_drafts(k3_engine **e, const k3_options *o, k3_error *err) {
    k3_options with = *o, without = *o;
    k3_shape sh;
    without.revocable = 0;
    if (o->revocable == 0 || k3_config_read(&sh, o->model_dir, NULL) < 0) return k3_engine_open(e, &without, err);
    with.caller_bytes += drafts_bytes(DRAFT_AUTO, o->context ? o->context : DEFAULT_CONTEXT, sh.vocab_size);
    return k3_engine_open(e, drafts_are_cheap(o, &with) ? &with : &without, err);
}

int engine_open(k3_engine **e, const k3_options *o) {
    console *con = o->user;
    k3_error err = {{0}};
    if (!o->headers_only && !o->config_only) ram_say(con, o);
    int status = engine_open_drafts(e, o, &err);
    console_clear(con);
    if (status < 0) return fail_status(status, &err);
    threads_say(con, *e, o);
    con->n_layers = k3_engine_shape(*e)->n_layers;
    return DONE;
}

uint64_t moe_layers(const k3_shape *s) { return s->n_layers - s->n_dense; }

bool is_streaming(const k3_engine *e) {
    const k3_plan *p = k3_engine_plan(e);
    const k3_shape *s = k3_engine_shape(e);
    return p->streamed_bytes > 0 || (moe_layers(s) > 0 && p->quota < s->n_experts);
}

void plan_say(const k3_engine *e) {
    const k3_plan *p = k3_engine_plan(e);
    char ram[32], kept[32], streamed[32], slots[32], speed[48] = "not probed";
    if (p->disk_bytes_per_s > 0)
        snprintf(speed, sizeof speed, "%.2f GB/s by the probe", p->disk_bytes_per_s * 1e-9);
    say("plan: %s; trunk %s kept, %s read for each chunk of %u; %u expert slots, %s, %u for each "
        "layer",
        fmt_bytes(ram, p->ram_bytes), fmt_bytes(kept, p->resident_bytes),
        fmt_bytes(streamed, p->streamed_bytes), (unsigned)p->chunk, (unsigned)p->n_slots,
        fmt_bytes(slots, p->slot_bytes * p->n_slots), (unsigned)p->quota);
    say("disk: %s%s, depth %d, %s%s", p->is_uring ? "io_uring" : "pread pool",
        p->is_direct ? ", direct" : "", p->io_depth, speed,
        p->has_sums ? ", every read checked" : "");
}

int tokenizer_open(k3_tokenizer **t, const cli_args *a, const char *dir) {
    char path[4096];
    k3_error err = {{0}};
    snprintf(path, sizeof path, "%s/tiktoken.model", dir);
    if (a->prompt.ids && access(path, F_OK) != 0 && errno == ENOENT) {
        if (!a->quiet) say("note: %s is absent: ids only, no text", path);
        return DONE;
    }
    int status = k3_tokenizer_open(t, dir, &err);
    return status < 0 ? fail_status(status, &err) : DONE;
}

uint64_t beyond_allowance(uint64_t bytes) {
    const uint64_t covered = 4u << 20;
    return bytes > covered ? bytes - covered : 0;
}

bool tiers_say_silent(const cli_args *a, const k3_stats *st) {
    char names[256] = "";
    if (a->quiet || a->tier.n == 0 || a->gpu || st->far_asked > 0 || st->expert_loads == 0)
        return false;
    for (size_t i = 0; i < a->tier.n; i++)
        line_add(names, sizeof names, "%s%s", i ? ", " : "", a->tier.text[i]);
    say("note: no box was of use (%s): none was there in time, or none held what was wanted; all "
        "was read and computed here; `k3-tier status ADDR` says what a box does",
        names);
    return true;
}

uint64_t expert_count(const k3_shape *s) { return moe_layers(s) * s->n_experts; }

int engine_open_headers(k3_engine **e, const cli_args *a, const char *dir, console *con,
                        bool has_use_for_sums, const char *resume) {
    k3_options o = engine_options(a, dir, con);
    o.headers_only = true;
    o.no_check = o.no_check || !has_use_for_sums;
    o.resume = resume;
    return engine_open(e, &o);
}
