/* k3_cli.c - the `k3` program: one option parser, the commands without a file of their own, no arithmetic.
 *
 *   1 Exit codes and messages     6 One answer: run
 *   2 Options: the table          7 Text and ids: tokenize
 *   3 Options: the parser         8 Measure: bench
 *   4 Terminal: notes, progress   9 Trust: verify, plan, info, cache
 *   5 Prompts, models, files     10 Help and main
 *
 * What holds everywhere: stdout carries the answer and nothing else; every message starts
 * with "k3: " and goes to stderr; a function that returns an exit code has already said
 * why; nothing here changes a bit of the output, the engine behind k3.h does all of that.
 */
#include "cli/where.h"
#include "cli/forecast.h"
#include "cli/manual.h"
#include "cli/place.h"
#include "cli/screen.h"
#include "experts.h"
#include "k3_cli.h"
#include "k3_machine.h"
#include "slice.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Hashes and dumps are little-endian, and are taken straight from memory. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "k3 reads model files in place and needs a little-endian machine"
#endif

/* ==== 1. Exit codes and messages =====================================================
 *
 * One list of exit codes, one way to complain. A usage error is one line; it names the
 * option, what was wrong with it and, when that can be known, what was meant.
 */
int exit_code(int status) {
    switch (status) {
    case K3_EUSAGE: return FAIL_USAGE;
    case K3_EMODEL: return FAIL_MODEL;
    case K3_EBUDGET: return FAIL_BUDGET;
    case K3_ECHECK:
    case K3_EREDO: return FAIL_CHECK;
    case K3_ECANCEL: return INTERRUPTED; /* only a signal cancels here */
    default: return status < 0 ? FAIL_IO : DONE;
    }
}

static void say_args(const char *format, va_list args) {
    screen_release();
    fputs("k3: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

/* One line on stderr. */
void say(const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_args(format, args);
    va_end(args);
}

/* One line on stderr; returns `code`, so that `return fail(...)` reads well. */
int fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_args(format, args);
    va_end(args);
    return code;
}

int fail_memory(const char *what, size_t n_bytes) {
    return fail(FAIL_IO, "no memory for %s (%zu bytes)", what, n_bytes);
}

/* --ram without a unit, and so small that a unit was meant; 0: it was not. */
#define LEAST_BYTES ((uint64_t)1 << 20)
static uint64_t bytes_typed;

static void say_unit(void) {
    unsigned long long n = bytes_typed;
    say("--ram %llu was read as %llu bytes: did you mean --ram %lluG?", n, n, n);
}

/* A status of the engine with its own words, then what to do next where that is known. */
int fail_status(int status, const k3_error *err) {
    if (status == K3_ECANCEL) return fail(INTERRUPTED, "interrupted");
    say("%s", err->text[0] ? err->text : k3_status_name(status));
    if (status == K3_ENUMERIC)
        say("`k3 verify --model DIR` tells damaged files from a fault of the engine");
    if (status == K3_ENOMEM) say("a smaller --context or --chunk needs less memory");
    if (status == K3_EBUDGET && bytes_typed) say_unit();
    return exit_code(status);
}

/* A reader that left (`k3 ... | head`) or was never there (`>&-`) wants no message. */
int fail_stdout(int error) {
    if (error != EPIPE && error != EBADF) say("stdout: %s", strerror(error));
    return FAIL_IO;
}

/* Write to stdout now, so that text appears as it is made. */
int out_write(const char *p, size_t n_bytes) {
    int error = screen_write(p, n_bytes);
    return error ? fail_stdout(error) : DONE;
}

int out_json_line(struct json_object *o) {
    size_t n = 0;
    const char *text = json_object_to_json_string_length(
        o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE, &n);
    int rc = text ? out_write(text, n) : fail_memory("a line of JSON", n);
    if (rc == DONE) rc = out_write("\n", 1);
    json_object_put(o);
    return rc;
}

/* "1.50 GiB", "8.72 MiB", "512 B"; `text` is the caller's. */
const char *fmt_bytes(char text[32], uint64_t n_bytes) {
    static const char *const unit[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)n_bytes / 1024.0;
    size_t i = 0;
    for (; i + 1 < COUNT(unit) && value >= 1024.0; i++) value /= 1024.0;
    if (n_bytes < 1024)
        snprintf(text, 32, "%u B", (unsigned)n_bytes);
    else
        snprintf(text, 32, i < 1 ? "%.1f %s" : "%.2f %s", value, unit[i]);
    return text;
}

double per_second(uint64_t n, uint64_t ns) { return ns ? (double)n * 1e9 / (double)ns : 0.0; }

/* ==== 2. Options: the table ==========================================================
 *
 * Every option of every command is one row: name, what its value is called and how it is
 * read, where it is kept, who takes it, its default (read by the same parser), its range.
 * The parser, the help text and "did you mean" all come from here, so they cannot drift
 * apart. The same name may have two rows when two commands want different defaults.
 */
typedef enum {
    KIND_FLAG,     /* bool, takes no value                                    */
    KIND_TEXT,     /* const char *                                            */
    KIND_READ,     /* the same: a file that is read                           */
    KIND_WRITE,    /* the same: a file that is written                        */
    KIND_STOP,     /* appended to stop[]                                      */
    KIND_MIRROR,   /* appended to mirror[]                                    */
    KIND_TIER,     /* appended to tier[]                                      */
    KIND_HOP,      /* appended to hop[]                                       */
    KIND_PART,     /* uint64_t: N of 1/N                                      */
    KIND_CHOICE,   /* uint64_t: which of the words in `value`, from 0         */
    KIND_OPTIONAL, /* the same, "" unless given as --name=FILE                */
    KIND_COUNT,    /* uint64_t in [lo, hi]                                    */
    KIND_REAL,     /* float in [lo, hi]                                       */
    KIND_SIZE,     /* uint64_t bytes: 8G, 512M, 1.5GiB                        */
    KIND_HASH      /* uint64_t from 16 hex digits                             */
} option_kind;

enum {
    RUN = 1,
    TOKENIZE = 2,
    BENCH = 4,
    VERIFY = 8,
    INFO = 16,
    PLAN = 32,
    CACHE = 64,
    CHAT = 128,
    SLICE = 256,
    STAGE = 512,
    ANY = 1023
};

typedef enum {
    G_PROMPT,
    G_TEXT,
    G_SAMPLE,
    G_STATE,
    G_MEASURE,
    G_OUTPUT,
    G_MODEL,
    G_DISK,
    G_TIER,
    N_GROUP
} option_group;

static const char *const GROUP_TITLE[N_GROUP] = {
    "Prompt",                         /* G_PROMPT  */
    "Generation",                     /* G_TEXT    */
    "Sampling",                       /* G_SAMPLE  */
    "State",                          /* G_STATE   */
    "Measuring",                      /* G_MEASURE */
    "Output",                         /* G_OUTPUT  */
    "Model and machine",              /* G_MODEL   */
    "Disk, where weights do not fit", /* G_DISK   */
    "Far boxes (k3-tier)"             /* G_TIER    */
};

typedef struct {
    const char *name, *value; /* value: what help calls it, NULL for a flag   */
    option_kind kind;
    size_t at; /* offset in cli_args                                          */
    unsigned who;
    option_group group;
    const char *start; /* default, as it would be typed; NULL: off or 0       */
    uint64_t lo, hi;
    const char *help; /* lines break at \n                                    */
} cli_option;

#define AT(field) offsetof(cli_args, field)

static const cli_option OPTION[] = {
    {"--prompt-file", "FILE", KIND_READ, AT(prompt_file), RUN | TOKENIZE, G_PROMPT, NULL, 0, 0,
     "every byte of FILE, the last newline too; - is stdin"},
    {"--ids", "N,N,...", KIND_TEXT, AT(ids), RUN | TOKENIZE, G_PROMPT, NULL, 0, 0,
     "token ids instead of text"},
    {"--control", NULL, KIND_FLAG, AT(control), RUN | TOKENIZE | BENCH, G_PROMPT, NULL, 0, 0,
     "spellings such as <|open|> become control tokens; without it they are\n"
     "ordinary text, which is what text from elsewhere must be"},
    {"--system", "TEXT", KIND_TEXT, AT(system), CHAT, G_PROMPT, NULL, 0, 0,
     "a system message before the first turn"},
    {"--render", "FILE", KIND_READ, AT(render), CHAT, G_PROMPT, NULL, 0, 0,
     "print ids and segments of the conversation in FILE (JSON as OpenAI's API\n"
     "takes it: messages, tools; - is stdin) and run nothing"},
    {"--decode", NULL, KIND_FLAG, AT(decode), TOKENIZE, G_PROMPT, NULL, 0, 0,
     "print the bytes that --ids stand for, and nothing else"},

    {"--tokens", "N", KIND_COUNT, AT(tokens), RUN, G_TEXT, "256", 0, 1u << 31,
     "most ids to generate; 0 runs the prompt and says nothing"},
    {"--effort", "low|medium|high|max|none", KIND_CHOICE, AT(effort), CHAT, G_TEXT, "max", 0, 0,
     "how much to think; none\n"
     "leaves the message that says so away"},
    {"--no-think", NULL, KIND_FLAG, AT(no_think), CHAT, G_TEXT, NULL, 0, 0,
     "answer at once, without a thinking channel"},
    {"--tokens", "N", KIND_COUNT, AT(tokens), CHAT, G_TEXT, "0", 0, 1u << 31,
     "most ids of one reply, thinking included; 0: as many as the context\n"
     "holds"},
    {"--undo", "N", KIND_COUNT, AT(undo), CHAT, G_TEXT, "1", 0, 64,
     "turns to keep room for in memory, so that /undo takes no time; more are\n"
     "kept where memory is left"},
    {"--stop", "TEXT", KIND_STOP, 0, RUN, G_TEXT, NULL, 0, 0,
     "end where the answer contains TEXT, which is not printed (repeatable)"},
    {"--no-stop", NULL, KIND_FLAG, AT(no_stop), RUN, G_TEXT, NULL, 0, 0,
     "go on past the model's end of message, for hashes"},

    {"--temperature", "T", KIND_REAL, AT(temperature), RUN, G_SAMPLE, "0", 0, 100,
     "0 is greedy: always the likeliest id"},
    {"--temperature", "T", KIND_REAL, AT(temperature), CHAT, G_SAMPLE, "1", 0, 100,
     "0 is greedy: always the likeliest id"},
    {"--top-k", "N", KIND_COUNT, AT(top_k), RUN | CHAT, G_SAMPLE, "0", 0, UINT32_MAX,
     "draw among the N likeliest; 0 is off"},
    {"--top-p", "P", KIND_REAL, AT(top_p), RUN, G_SAMPLE, "1", 0, 1,
     "draw among the likeliest that together hold P; 1 is off"},
    {"--top-p", "P", KIND_REAL, AT(top_p), CHAT, G_SAMPLE, "0.95", 0, 1,
     "draw among the likeliest that together hold P; 1 is off"},
    {"--seed", "N", KIND_COUNT, AT(seed), RUN | CHAT, G_SAMPLE, "0", 0, UINT64_MAX,
     "the same seed gives the same answer"},

    {"--load", "FILE", KIND_READ, AT(load), RUN, G_STATE, NULL, 0, 0,
     "go on from a saved state: the prompt continues its ids"},
    {"--load", "FILE", KIND_READ, AT(load), CHAT, G_STATE, NULL, 0, 0,
     "go on from a conversation that /save wrote, with its settings"},
    {"--save", "FILE", KIND_WRITE, AT(save), RUN, G_STATE, NULL, 0, 0,
     "keep the state at the end, every id of the answer included, also the one\n"
     "that ended it, and also when Ctrl-C ends it: the token at work is then\n"
     "finished first; FILE is whole or as it was"},
    {"--cache", "DIR", KIND_TEXT, AT(cache), RUN | CHAT, G_STATE, NULL, 0, 0,
     "keep states of prompts and answers there, and skip what a prompt has in\n"
     "common with one of them; may be shared by any number of processes"},
    {"--cache-size", "SIZE", KIND_SIZE, AT(cache_size), RUN | CHAT, G_STATE, "20G", 1, 0,
     "most that --cache keeps; the least recently used go first"},
    {"--cache-size", "SIZE", KIND_SIZE, AT(cache_size), CACHE, G_STATE, "0", 0, 0,
     "what `rm` leaves: the most recently used, no more than this"},

    {"--prompts", "FILE", KIND_READ, AT(prompts), BENCH, G_MEASURE, NULL, 0, 0,
     "one prompt a line, `ids:1,2,3` for ids (default: five built in)"},
    {"--tokens", "N", KIND_COUNT, AT(tokens), BENCH, G_MEASURE, "32", 0, 1u << 31,
     "ids for each prompt, going on past the end of message"},
    {"--repeats", "N", KIND_COUNT, AT(repeats), BENCH, G_MEASURE, "1", 1, MAX_REPEAT,
     "speeds are the median of N; hashes must agree, else exit 5"},
    {"--expect", "FNV", KIND_HASH, AT(expect), BENCH, G_MEASURE, NULL, 0, 0,
     "exit 5 unless this is the logits_fnv of the `# total` row"},
    {"--kernels-only", NULL, KIND_FLAG, AT(kernels_only), BENCH, G_MEASURE, NULL, 0, 0,
     "no model: every kernel set at K3's dimensions, against this machine's\n"
     "own read bandwidth and multiply-add peak; --threads is the most tried"},
    {"--hop", "ADDR", KIND_HOP, 0, BENCH, G_MEASURE, NULL, 0, 0,
     "no weights loaded: what a request to this k3-tier takes, part by part,\n"
     "and whether its sums are right; exit 5 if not, if a request has no\n"
     "answer, or if the box's memory grows (repeatable)"},
    {"--requests", "N", KIND_COUNT, AT(requests), BENCH, G_MEASURE, "10000", 1, 1000000,
     "--hop: requests of each row, after 200 to warm up"},
    {"--sustain", "SECONDS", KIND_COUNT, AT(sustain), BENCH, G_MEASURE, "60", 0, 86400,
     "--hop: then requests for so long, and the box's memory before and\n"
     "after"},
    {"--where", NULL, KIND_FLAG, AT(where), BENCH, G_MEASURE, NULL, 0, 0,
     "then also what the time went to, for prompts and for decoded tokens: the\n"
     "trunk's matrices, attention, experts, rows, the disk, serial steps, with how\n"
     "many threads were busy and how near to memory's speed weights went by"},
    {"--reader", NULL, KIND_FLAG, AT(reader), BENCH, G_MEASURE, NULL, 0, 0,
     "before and after, read whole experts at random with O_DIRECT as fast as\n"
     "the disk gives them; the last line compares with what the runs read"},
    {"--reader", NULL, KIND_FLAG, AT(reader), PLAN, G_MEASURE, NULL, 0, 0,
     "seconds for this disk: read whole experts at random, past the page\n"
     "cache, for some ten seconds"},
    {"--replay", "FILE", KIND_READ, AT(replay), BENCH, G_MEASURE, NULL, 0, 0,
     "no model: what each policy would have had in memory of a routing trace\n"
     "(`k3 run --trace`), for slots from 1 a layer up"},
    {"--write-pins", "FILE", KIND_WRITE, AT(write_pins), BENCH, G_MEASURE, NULL, 0, 0,
     "with --replay: the experts of the trace by weight, as --pins takes them"},
    {"--golden", NULL, KIND_FLAG, AT(golden), VERIFY, G_MEASURE, NULL, 0, 0,
     "after the check, run ids 3 4 5 6 7 with --lora-eps 1e-5 and compare with\n"
     "the published logits of the real weights; says how far, exit 5 if too far"},
    {"--disk", "GB/S", KIND_REAL, AT(disk), PLAN, G_MEASURE, NULL, 0, 1000,
     "seconds for a disk of this speed (default: for 3, 7 and 14)"},
    {"--disk-rate", "GB/S", KIND_REAL, AT(disk), PLAN, G_MEASURE, NULL, 0, 1000,
     "the same as --disk"},
    {"--gflops", "N", KIND_REAL, AT(gflops), PLAN, G_MEASURE, NULL, 0, 100000,
     "seconds to the first token for cores of so many GFLOP/s each, of which\n"
     "--threads says how many (default: as one of this machine is measured)"},
    {"--released", NULL, KIND_FLAG, AT(released), PLAN, G_MODEL, NULL, 0, 0,
     "the released Kimi K3, by the config.json that comes with k3: before its\n"
     "1.56 TB are here"},
    {"--write-sums", NULL, KIND_FLAG, AT(write_sums), VERIFY, G_MEASURE, NULL, 0, 0,
     "keep a checksum of everything that was read, beside the model or as\n"
     "--sums says; later runs compare every read with it. Checksums that are\n"
     "there must agree, unless --no-check"},
    {"--kernels-list", NULL, KIND_FLAG, AT(kernels_list), INFO, G_MEASURE, NULL, 0, 0,
     "only the names of the kernel sets that this CPU can run, best last"},

    {"--json", NULL, KIND_FLAG, AT(json), RUN, G_OUTPUT, NULL, 0, 0,
     "one JSON object at the end: text, ids, hashes, timings, settings"},
    {"--json", NULL, KIND_FLAG, AT(json), CHAT, G_OUTPUT, NULL, 0, 0,
     "JSON lines in both directions: a message, or {\"messages\": [...]}, in; an\n"
     "assistant message with ids and timings out; with --render one object"},
    {"--null", NULL, KIND_FLAG, AT(null_ends), CHAT, G_OUTPUT, NULL, 0, 0,
     "not on a terminal: NUL instead of a newline ends each reply"},
    {"--hide-think", NULL, KIND_FLAG, AT(hide_think), CHAT, G_OUTPUT, NULL, 0, 0,
     "think, but show only the answer (always so when not on a terminal)"},
    {"--history", "FILE", KIND_TEXT, AT(history), CHAT, G_OUTPUT, NULL, 0, 0,
     "lines typed before, readable by you only; an empty name keeps none\n"
     "(default: k3/history under XDG_STATE_HOME, ~/.local/state)"},
    {"--ids-only", NULL, KIND_FLAG, AT(ids_only), TOKENIZE | CHAT, G_OUTPUT, NULL, 0, 0,
     "one line, comma separated, as --ids takes them"},
    {"--out", "DIR", KIND_TEXT, AT(out), SLICE, G_OUTPUT, NULL, 0, 0,
     "the directory to write, made if absent; empty, or an unfinished slice of\n"
     "the same experts, which is gone on with"},
    {"--size", "SIZE", KIND_SIZE, AT(size), SLICE, G_OUTPUT, NULL, 1, 0,
     "most bytes to write: 58G, 512M, 1.5GiB; whole experts, the hottest first,\n"
     "as many as fit"},
    {"--size", "SIZE", KIND_SIZE, AT(size), STAGE, G_OUTPUT, NULL, 1, 0,
     "experts to bring, the hottest first, as many as fit in it (default: as\n"
     "many as the box has room for)"},
    {"--shard", "SIZE", KIND_SIZE, AT(shard_size), SLICE, G_OUTPUT, "4GB", 1, 0,
     "most bytes of experts in one file; at least one expert"},
    {"--to", "ADDR", KIND_TEXT, AT(to), STAGE, G_OUTPUT, NULL, 0, 0,
     "the box: HOST:PORT, [V6]:PORT, tls:HOST:PORT or unix:PATH"},
    {"--dump-logits", "FILE", KIND_WRITE, AT(dump_logits), RUN, G_OUTPUT, NULL, 0, 0,
     "raw little-endian f32: a row of vocab_size for each prompt position,\n"
     "then one for each generated id but the last"},
    {"--trace-hash", "[=FILE]", KIND_OPTIONAL, AT(trace), RUN, G_OUTPUT, NULL, 0, 0,
     "a hash for each position and layer (docs/NUMERICS.md 7) to stderr or\n"
     "FILE, to find the first layer in which two runs differ"},
    {"--trace", "FILE", KIND_WRITE, AT(routing), RUN, G_OUTPUT, NULL, 0, 0,
     "what the routers choose: a line for each position and layer, with ids\n"
     "and weights; for `k3 bench --replay`"},
    {"-q", NULL, KIND_FLAG, AT(quiet), ANY, G_OUTPUT, NULL, 0, 0,
     "no notes, no statistics; errors still speak"},
    {"-v", NULL, KIND_FLAG, AT(verbose), RUN | CHAT, G_OUTPUT, NULL, 0, 0,
     "say more: settings, memory, experts read"},

    {"--model", "DIR", KIND_TEXT, AT(model), ANY & ~CACHE, G_MODEL, NULL, 0, 0,
     "a model directory as downloaded (default: K3_MODEL of the environment, else\n"
     "the small bundled model)"},
    {"--context", "N", KIND_COUNT, AT(context), RUN | CHAT | BENCH | PLAN | INFO, G_MODEL, NULL, 1,
     MAX_CONTEXT,
     "positions to hold, prompt and answer together (default: 4096, or the\n"
     "model's maximum if that is smaller; what it needs, for bench and for a\n"
     "longer prompt)"},
    {"--ram", "SIZE", KIND_SIZE, AT(ram), RUN | CHAT | BENCH | VERIFY | PLAN, G_MODEL, NULL, 1, 0,
     "bound for the whole process: 8G, 512M, 1.5GiB; without a unit, bytes;\n"
     "`k3 plan` shows what it buys (default: what is free, less 1/16)"},
    {"--threads", "N", KIND_COUNT, AT(threads), RUN | CHAT | BENCH | VERIFY | PLAN, G_MODEL, "0", 0,
     1024, "0 is one for each core this process may use, within its CPU quota"},
    {"--chunk", "N", KIND_COUNT, AT(chunk), RUN | CHAT | BENCH | PLAN, G_MODEL, "0", 0, 4096,
     "most prompt positions computed together; 0 is 512, more where the trunk or\n"
     "experts are streamed and memory allows (up to 4096), or less where\n"
     "memory is scarce"},
    {"--kernels", "NAME", KIND_TEXT, AT(kernels), RUN | CHAT | BENCH | VERIFY, G_MODEL, NULL, 0, 0,
     "ref, avx2, avx512 or neon: same bits, other speed (default: the best\n"
     "this CPU has; `k3 info` lists them)"},
    {"--lora-eps", "X", KIND_REAL, AT(lora_eps), RUN | CHAT | BENCH, G_MODEL, "1e-6", 0, 1,
     "epsilon of the two low-rank norms of attention; other engines and the\n"
     "published logits use 1e-5"},

    {"--mirror", "DIR", KIND_MIRROR, 0, RUN | CHAT | BENCH | VERIFY | SLICE | STAGE, G_DISK, NULL,
     0, 0,
     "copies of some or all shards, on another drive, read as well; one that\n"
     "fails is dropped (repeatable)"},
    {"--io", "auto|pool|uring", KIND_CHOICE, AT(io), RUN | CHAT | BENCH | VERIFY, G_DISK, "auto", 0,
     0, "threads in pread, or io_uring; auto: a short probe says"},
    {"--direct", "auto|on|off", KIND_CHOICE, AT(direct), RUN | CHAT | BENCH | VERIFY, G_DISK,
     "auto", 0, 0, "past the page cache (O_DIRECT); auto: if a probe says it is faster"},
    {"--io-depth", "N", KIND_COUNT, AT(io_depth), RUN | CHAT | BENCH | VERIFY, G_DISK, "0", 0, 64,
     "reads in flight; 0: as the probe says"},
    {"--policy", "rank|lru", KIND_CHOICE, AT(policy), RUN | CHAT | BENCH, G_DISK, "rank", 0, 0,
     "which expert makes room: least router weight or least recently used"},
    {"--no-look-ahead", NULL, KIND_FLAG, AT(no_look_ahead), RUN | CHAT | BENCH, G_DISK, NULL, 0, 0,
     "do not read the next layer's likely experts"},
    {"--pins", "FILE", KIND_READ, AT(pins), RUN | CHAT | BENCH | PLAN, G_DISK, NULL, 0, 0,
     "experts to read at the start and keep, `layer expert` a line, the most\n"
     "wanted first"},
    {"--pins", "FILE", KIND_READ, AT(pins), SLICE | STAGE, G_DISK, NULL, 0, 0,
     "which experts, `layer expert` a line, the hottest first: `k3 run --trace T`\n"
     "and `k3 bench --replay T --write-pins FILE` make it (stage, default: all)"},
    {"--sums", "FILE", KIND_READ, AT(sums), RUN | CHAT | BENCH | VERIFY | PLAN | SLICE | STAGE,
     G_DISK, NULL, 0, 0,
     "checksums made by `k3 verify --write-sums` (default: k3.sums in the\n"
     "model directory, if it is there)"},
    {"--no-check", NULL, KIND_FLAG, AT(no_check),
     RUN | CHAT | BENCH | VERIFY | PLAN | SLICE | STAGE, G_DISK, NULL, 0, 0,
     "do not compare what is read with checksums"},

    {"--tier", "ADDR", KIND_TIER, 0, RUN | CHAT | BENCH, G_TIER, NULL, 0, 0,
     "a box that holds experts in memory: HOST:PORT, [V6]:PORT, tls:HOST:PORT\n"
     "or unix:PATH; asked for what would be read from disk here (repeatable)"},
    {"--gpu", NULL, KIND_FLAG, AT(gpu), RUN | CHAT | BENCH, G_TIER, NULL, 0, 0,
     "a box of our own: a k3-tier on this machine that holds experts in the\n"
     "GPU's memory (`make gpu`), started or joined; it takes 2 GiB of RAM\n"
     "beside --ram, serves others of yours too and ends ten minutes after them;\n"
     "the k3-tier beside k3, or in PATH, unless K3_TIER names another"},
    {"--psk-file", "FILE", KIND_READ, AT(psk_file), RUN | CHAT | BENCH | STAGE, G_TIER, NULL, 0, 0,
     "the key that boxes ask for, and must themselves know, 32 random bytes or\n"
     "more: (umask 077; openssl rand -base64 32 >FILE); with stage the key of a\n"
     "box's --stage-psk-file"},
    {"--tier-ca", "FILE", KIND_READ, AT(tier_ca), RUN | CHAT | BENCH | STAGE, G_TIER, NULL, 0, 0,
     "trust tls: boxes whose certificate this one signed, or is (default: the\n"
     "system's authorities)"},
    {"--tier-cert", "FILE", KIND_READ, AT(tier_cert), RUN | CHAT | BENCH | STAGE, G_TIER, NULL, 0,
     0, "our certificate, for tls: boxes that want to know their clients"},
    {"--tier-key", "FILE", KIND_READ, AT(tier_key), RUN | CHAT | BENCH | STAGE, G_TIER, NULL, 0, 0,
     "its private key (default: in the same file)"},
    {"--spin-us", "N", KIND_COUNT, AT(spin_us), RUN | CHAT | BENCH, G_TIER, "50", 0, 1000000,
     "a wait for a box spins so many microseconds before it sleeps"},
    {"--tier-wait", "N", KIND_COUNT, AT(tier_wait), RUN | CHAT | BENCH, G_TIER, "0", 0, 60000000,
     "wait at least so many microseconds for an answer; 0: no longer than it\n"
     "would take to read and compute here"},
    {"--tier-hedge", NULL, KIND_FLAG, AT(tier_hedge), RUN | CHAT | BENCH, G_TIER, NULL, 0, 0,
     "a box that takes twice its usual time: ask another that holds the same\n"
     "as well; the first answer counts"},
    {"--tier-audit", "1/N", KIND_PART, AT(tier_audit), RUN | CHAT | BENCH, G_TIER, NULL, 1,
     1u << 30,
     "compute one layer in N here as well; a box whose sums differ is never\n"
     "asked again. With 1/1 no answer is used unseen. Else the answer begins\n"
     "again without the box: what it ends with is right, and if text that is\n"
     "already out turns out wrong the run stops with exit 5. --cache then\n"
     "keeps nothing that boxes had a part in"},
};

/* `given` has a place for each row. */
typedef char options_suffice[COUNT(OPTION) <= MAX_OPTION ? 1 : -1];

typedef struct {
    const char *name;
    unsigned bit;
    const char *arg; /* the positional argument, or two words for two; or NULL */
    int (*run)(const cli_args *a);
    const char *summary, *usage, *about, *examples;
} cli_command;

static const cli_option *option_find(const char *name, size_t n, unsigned who) {
    for (size_t i = 0; i < COUNT(OPTION); i++)
        if ((OPTION[i].who & who) && strlen(OPTION[i].name) == n &&
            memcmp(OPTION[i].name, name, n) == 0)
            return &OPTION[i];
    return NULL;
}

bool is_given(const cli_args *a, const char *name) {
    for (size_t i = 0; i < COUNT(OPTION); i++)
        if (a->given[i] && strcmp(OPTION[i].name, name) == 0) return true;
    return false;
}

/* ==== 3. Options: the parser =========================================================
 *
 * Strict: a number is the whole string or an error, an option that a command does not take
 * is an error, the last of two wins. `--name=VALUE` and `--name VALUE` are the same; `--`
 * ends options. All of it is checked before any file is opened.
 */

static bool parse_hash(const char *text, uint64_t *out) {
    if (text[0] == '0' && text[1] == 'x') text += 2;
    if (strlen(text) != 16 || strspn(text, "0123456789abcdefABCDEF") != 16) return false;
    *out = strtoull(text, NULL, 16);
    return true;
}

static int option_set_count(const cli_option *o, cli_args *a, const char *text) {
    uint64_t value;
    if (!parse_u64(text, strlen(text), &value) || value < o->lo || value > o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a whole number from %llu to %llu", o->name, text,
                    (unsigned long long)o->lo, (unsigned long long)o->hi);
    memcpy((char *)a + o->at, &value, sizeof value);
    return DONE;
}

static int option_set_real(const cli_option *o, cli_args *a, const char *text) {
    double value;
    char *end;
    if (!parse_real(text, &end, &value) || *end || value < (double)o->lo || value > (double)o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a number from %llu to %llu", o->name, text,
                    (unsigned long long)o->lo, (unsigned long long)o->hi);
    float single = (float)value;
    memcpy((char *)a + o->at, &single, sizeof single);
    return DONE;
}

/* One of the words of `value`: their order is that of the enum in k3.h. */
static int option_set_choice(const cli_option *o, cli_args *a, const char *text) {
    uint64_t i = 0;
    for (const char *word = o->value;; word++, i++) {
        size_t n = strcspn(word, "|");
        if (strlen(text) == n && memcmp(word, text, n) == 0) break;
        word += n;
        if (!*word) return fail(FAIL_USAGE, "%s: '%s' is not %s", o->name, text, o->value);
    }
    memcpy((char *)a + o->at, &i, sizeof i);
    return DONE;
}

static int option_add_mirror(cli_args *a, const char *text) {
    if (!text[0]) return fail(FAIL_USAGE, "--mirror: an empty name is no directory");
    if (a->n_mirror == K3_MAX_COPIES - 1)
        return fail(FAIL_USAGE, "--mirror: at most %d directories", K3_MAX_COPIES - 1);
    a->mirror[a->n_mirror++] = text;
    return DONE;
}

static int option_set_part(const cli_option *o, cli_args *a, const char *text) {
    uint64_t n;
    if (strncmp(text, "1/", 2) != 0 || !parse_u64(text + 2, strlen(text + 2), &n) || n < o->lo ||
        n > o->hi)
        return fail(FAIL_USAGE, "%s: '%s' is not a part such as 1/100", o->name, text);
    memcpy((char *)a + o->at, &n, sizeof n);
    return DONE;
}

static int option_add_box(const char *name, const char **box, size_t *n, const char *text) {
    if (!text[0]) return fail(FAIL_USAGE, "%s: an empty text is no address", name);
    if (*n == MAX_TIER) return fail(FAIL_USAGE, "%s: at most %d boxes", name, MAX_TIER);
    box[(*n)++] = text;
    return DONE;
}

/* A small number without a unit: bytes were hardly meant. A budget that is too small is refused later, with
 * its floor, and this is said then; a cache of so few bytes would be emptied. */
static int option_check_unit(const cli_option *o, const char *text, uint64_t value) {
    if (strspn(text, "0123456789") != strlen(text) || value == 0) return DONE;
    if (o->at == AT(ram) && value < LEAST_BYTES) bytes_typed = value;
    if (o->at == AT(cache_size) && value < 1024)
        return fail(FAIL_USAGE, "%s: %s is %s bytes: did you mean %sG? (%sB if not)", o->name, text,
                    text, text, text);
    return DONE;
}

/* Store one value, checked. */
static int option_set(const cli_option *o, cli_args *a, const char *text) {
    void *field = (char *)a + o->at;
    switch (o->kind) {
    case KIND_FLAG: *(bool *)field = true; return DONE;
    case KIND_TEXT:
    case KIND_READ:
    case KIND_WRITE:
    case KIND_OPTIONAL: *(const char **)field = text; return DONE;
    case KIND_STOP:
        if (!text[0]) return fail(FAIL_USAGE, "--stop: an empty text would stop at once");
        if (a->n_stop == MAX_STOP) return fail(FAIL_USAGE, "--stop: at most %d texts", MAX_STOP);
        a->stop[a->n_stop++] = text;
        return DONE;
    case KIND_MIRROR: return option_add_mirror(a, text);
    case KIND_TIER: return option_add_box(o->name, a->tier, &a->n_tier, text);
    case KIND_HOP: return option_add_box(o->name, a->hop, &a->n_hop, text);
    case KIND_PART: return option_set_part(o, a, text);
    case KIND_CHOICE: return option_set_choice(o, a, text);
    case KIND_COUNT: return option_set_count(o, a, text);
    case KIND_REAL: return option_set_real(o, a, text);
    case KIND_SIZE:
        if (parse_size(text, field) && *(uint64_t *)field >= o->lo)
            return option_check_unit(o, text, *(uint64_t *)field);
        return fail(FAIL_USAGE, "%s: '%s' is not a size such as 8G, 512M or 1.5GiB", o->name, text);
    case KIND_HASH:
        if (parse_hash(text, field)) return DONE;
        return fail(FAIL_USAGE, "%s: '%s' is not a hash of 16 hex digits", o->name, text);
    }
    return DONE;
}

/* Letters to insert, drop, change or swap until `a` is `b` (at most 31 letters each). */
static size_t edit_distance(const char *a, const char *b) {
    size_t n = strlen(a), m = strlen(b), row[3][32];
    if (n > 31 || m > 31) return 99;
    for (size_t j = 0; j <= m; j++) row[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *now = row[i % 3], *up = row[(i + 2) % 3], *upper = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = up[j - 1] + (a[i - 1] != b[j - 1]);
            if (up[j] + 1 < best) best = up[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                upper[j - 2] + 1 < best)
                best = upper[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

/* Keep `name` in *best when it is nearer to `typed` than what is there. */
void nearest(const char *typed, const char *name, const char **best, size_t *distance) {
    size_t n = strlen(typed), d = edit_distance(typed, name);
    if (n >= 4 && strncmp(typed, name, n) == 0) d = 0; /* cut short */
    if (d < *distance && d * 2 < strlen(name + strspn(name, "-"))) {
        *distance = d;
        *best = name;
    }
}

static int fail_unknown_option(const cli_command *cmd, const char *arg, size_t n_name) {
    char typed[32];
    const char *best = NULL;
    size_t distance = 4;
    snprintf(typed, sizeof typed, "%.*s", (int)(n_name < 31 ? n_name : 31), arg);
    for (size_t i = 0; i < COUNT(OPTION); i++)
        if (OPTION[i].who & cmd->bit) nearest(typed, OPTION[i].name, &best, &distance);
    if (best)
        return fail(FAIL_USAGE, "%s: unknown option %.*s: did you mean %s?", cmd->name, (int)n_name,
                    arg, best);
    const char *why = option_find(arg, n_name, ANY) ? "does not take" : "has no option";
    return fail(FAIL_USAGE, "%s %s %.*s: see `k3 help %s`", cmd->name, why, (int)n_name, arg,
                cmd->name);
}

/* One option with its value; *i moves past a value that was the next word. */
static int option_take(const cli_command *cmd, cli_args *a, int argc, char **argv, int *i) {
    const char *arg = argv[*i], *equals = arg[1] == '-' ? strchr(arg, '=') : NULL;
    size_t n_name = equals ? (size_t)(equals - arg) : strlen(arg);
    const cli_option *o = option_find(arg, n_name, cmd->bit);
    if (!o) return fail_unknown_option(cmd, arg, n_name);
    const char *value = equals ? equals + 1 : NULL;
    if (o->kind == KIND_FLAG && value)
        return fail(FAIL_USAGE, "%s takes no value, '%s' was given", o->name, value);
    if (o->kind == KIND_OPTIONAL && !value) value = "";
    if (o->kind != KIND_FLAG && !value) {
        if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0)
            return fail(FAIL_USAGE,
                        "%s needs a value: %s %s (one that starts with -- goes in %s=...)", o->name,
                        o->name, o->value, o->name);
        value = argv[++*i];
    }
    a->given[o - OPTION] = true;
    return option_set(o, a, value);
}

/* Fill `a` from the words after the command. *wants_help: -h or --help was met. */
static int args_parse(cli_args *a, const cli_command *cmd, int argc, char **argv,
                      bool *wants_help) {
    bool is_over = false;
    int rc = DONE;
    memset(a, 0, sizeof *a);
    for (size_t i = 0; i < COUNT(OPTION); i++)
        if ((OPTION[i].who & cmd->bit) && OPTION[i].start)
            option_set(&OPTION[i], a, OPTION[i].start);
    for (int i = 0; i < argc && rc == DONE; i++) {
        const char *arg = argv[i];
        if (!is_over && strcmp(arg, "--") == 0) {
            is_over = true;
        } else if (!is_over && (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0)) {
            *wants_help = true;
            return DONE;
        } else if (!is_over && arg[0] == '-' && arg[1]) {
            rc = option_take(cmd, a, argc, argv, &i);
        } else if (!cmd->arg) {
            rc = fail(FAIL_USAGE, "%s takes no argument, '%s' was given", cmd->name, arg);
        } else if (a->arg && !a->arg2 && strchr(cmd->arg, ' ')) {
            a->arg2 = arg;
        } else if (a->arg2) {
            rc = fail(FAIL_USAGE, "%s takes %s; '%s' is one more", cmd->name, cmd->arg, arg);
        } else if (a->arg) {
            rc = fail(FAIL_USAGE, "%s takes one %s; '%s' is a second one: quote the text",
                      cmd->name, cmd->arg, arg);
        } else {
            a->arg = arg;
        }
    }
    return rc;
}

/* K3_MODEL stands for a --model that was not given; empty it is none. No other variable says what is
 * computed. */
static void args_from_environment(cli_args *a, const cli_command *cmd) {
    const char *model = getenv("K3_MODEL");
    bool takes_model = option_find("--model", strlen("--model"), cmd->bit) != NULL;
    a->model_by = "--model";
    if (a->model || !takes_model || a->released || !model || !model[0]) return;
    a->model = model;
    a->model_by = "K3_MODEL";
}

/* ==== 4. Terminal: notes, progress, Ctrl-C ===========================================
 *
 * Long work says where it is, on a terminal only, at most ten times a second, and wipes
 * its line when it is done; a log file never sees it. The same callback is how Ctrl-C
 * reaches a step that would take minutes. The first Ctrl-C asks, the second one kills.
 */
volatile sig_atomic_t interrupted;

static void on_signal(int number) {
    if (interrupted) {
        signal(number, SIG_DFL);
        raise(number);
    }
    interrupted = 1;
}

void signals_catch(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

void console_init(console *c, const cli_args *a) {
    memset(c, 0, sizeof *c);
    c->is_quiet = a->quiet;
    c->is_tty = isatty(STDERR_FILENO) == 1;
    c->start_ns = c->last_ns = clock_ns(); /* work that is done at once shows no line */
}

void console_clear(console *c) {
    if (c->is_shown) screen_wipe(c->is_below);
    c->is_shown = false;
}

void console_note(void *user, const char *line) {
    console *c = user;
    console_clear(c);
    if (!c->is_quiet) screen_note(line);
}

/* The answer's n_said-th id of at most n_want is to be run; n_said 0: a prompt is. */
void console_answer(console *c, uint64_t n_said, uint64_t n_want) {
    c->step_ns = clock_ns();
    c->step_read_bytes = c->seen_bytes;
    if (n_said <= 1) c->said_ns = c->step_ns;
    c->n_said = n_said;
    c->n_want = n_want;
}

/* Add ", 42 s left" and the like to a line; the rest of a full line is dropped. */
PRINTF_LIKE(3, 4) static void line_add(char *line, size_t cap, const char *format, ...) {
    size_t n = strlen(line);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, cap - n, format, args);
    va_end(args);
}

static void line_add_left(char *line, size_t cap, const char *what, double seconds) {
    if (seconds < 120)
        line_add(line, cap, ", %s%.0f s left", what, seconds);
    else if (seconds < 7200)
        line_add(line, cap, ", %s%.0f min left", what, seconds / 60);
    else
        line_add(line, cap, ", %s%.1f h left", what, seconds / 3600);
}

/* "loading: layer 12, 1.20 GiB of 8.00 GiB, 2.10 GB/s, 3 s left". */
static void console_bytes(char *line, size_t cap, const console *c, const k3_progress *p,
                          double seconds) {
    char done[32], total[32];
    line_add(line, cap, ", %s", fmt_bytes(done, p->done));
    if (p->total) line_add(line, cap, " of %s", fmt_bytes(total, p->total));
    line_add(line, cap, ", %.2f GB/s", c->read_speed * 1e-9);
    if (p->total > p->done && p->done > 0)
        line_add_left(line, cap, "", seconds * (double)(p->total - p->done) / (double)p->done);
}

/* "prompt: layer 12, 3.20 GB/s, 37 %, 322 positions left, 8.1 tok/s, 42 s left", then
 * "answer: layer 12, 3.20 GB/s, 8 ids, this one 2.41 GiB, 0.4 tok/s, at most 42 s left". */
static void console_compute(char *line, size_t cap, const console *c, const k3_progress *p,
                            uint64_t now) {
    double seconds = (double)(now - (c->n_said ? c->said_ns : c->start_ns)) * 1e-9;
    if (c->read_speed >= 5e6) line_add(line, cap, ", %.2f GB/s", c->read_speed * 1e-9);
    if (c->n_said) {
        double rate = seconds > 0 ? (double)(c->n_said - 1) / seconds : 0;
        uint64_t n_read = p->read_bytes - c->step_read_bytes;
        char read[32];
        line_add(line, cap, ", %llu ids", (unsigned long long)c->n_said);
        if (n_read >= 1u << 20) line_add(line, cap, ", this one %s", fmt_bytes(read, n_read));
        if (rate <= 0) return;
        line_add(line, cap, ", %.1f tok/s", rate);
        line_add_left(line, cap, "at most ", (double)(c->n_want - c->n_said) / rate);
        return;
    }
    if (!p->total || !c->n_layers) return;
    uint64_t left = p->total > p->done ? p->total - p->done : 0;
    line_add(line, cap, ", %.0f %%, %llu positions left",
             100.0 * (double)p->done / (double)p->total,
             (unsigned long long)((left + c->n_layers - 1) / c->n_layers));
    double rate = seconds > 0 ? (double)p->done / seconds : 0;
    if (rate <= 0) return;
    line_add(line, cap, ", %.1f tok/s", rate / c->n_layers);
    line_add_left(line, cap, "", (double)left / rate);
}

/* What the disk gives, from two readings of what was read. */
static void console_speed(console *c, const k3_progress *p, uint64_t now) {
    uint64_t n = p->read_bytes > c->read_bytes ? p->read_bytes - c->read_bytes : 0;
    double speed = per_second(n, now - c->last_ns);
    c->read_speed = c->read_speed > 0 ? 0.7 * c->read_speed + 0.3 * speed : speed;
    c->read_bytes = p->read_bytes;
}

/* Ctrl-C was pressed and the step goes on to its end: after a second, say so, once. */
static void console_wait(console *c, uint64_t now) {
    if (!c->asked_ns) c->asked_ns = now;
    if (!c->is_tty || c->has_said_wait || now - c->asked_ns < 1000000000u) return;
    console_clear(c);
    fputs("\nk3: this step ends first; Ctrl-C again gives it up, and what it costs to make good\n",
          stderr);
    c->has_said_wait = true;
}

/* A token that takes longer than this has its status shown below the text. */
#define SLOW_NS 1000000000u

static int console_progress(void *user, const k3_progress *p) {
    static const char *const phase[] = {"headers", "loading", "prompt", "checking"};
    console *c = user;
    uint64_t now = clock_ns();
    char line[160];
    if (interrupted > c->n_grace) return 1;
    if (interrupted) console_wait(c, now);
    if (p->phase != c->phase || p->done < c->done) c->start_ns = now;
    c->phase = p->phase;
    c->done = p->done;
    c->seen_bytes = p->read_bytes;
    if (!c->is_tty || now - c->last_ns < 100000000u) return 0;
    console_speed(c, p, now);
    c->last_ns = now;
    c->is_below = p->phase == K3_PHASE_COMPUTE && c->hides_compute;
    if (c->is_below && now - c->step_ns < SLOW_NS) return 0; /* the text itself shows the way */
    bool is_answer = p->phase == K3_PHASE_COMPUTE && c->n_said;
    const char *verb = c->verb && p->phase == K3_PHASE_LOAD ? c->verb : phase[p->phase];
    snprintf(line, sizeof line, "%s:", is_answer ? "answer" : verb);
    if (p->layer >= 0) line_add(line, sizeof line, ", layer %d", p->layer);
    if (p->phase == K3_PHASE_OPEN)
        line_add(line, sizeof line, ", %llu of %llu", (unsigned long long)p->done,
                 (unsigned long long)p->total);
    else if (p->phase == K3_PHASE_COMPUTE)
        console_compute(line, sizeof line, c, p, now);
    else
        console_bytes(line, sizeof line, c, p, (double)(now - c->start_ns) * 1e-9);
    char *comma = strchr(line, ',');
    if (comma) memmove(comma, comma + 1, strlen(comma)); /* "prompt:, layer 3" */
    c->is_shown = screen_draw(line, c->is_below);
    return 0;
}

/* ==== 5. Prompts, models, files ======================================================
 *
 * What the commands share: bytes of a prompt (any bytes, NUL and invalid UTF-8 included),
 * lists of ids, the model directory with the bundled model as the default, and output files
 * that are whole or absent.
 */
/* The whole of a file, of at most so many bytes; "-" is stdin. */
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

/* "1,2,3", blanks around a number allowed. `what` names the source in a message. */
static int ids_parse(id_list *out, const char *text, size_t n_bytes, const char *what) {
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

static int ids_encode(id_list *out, k3_tokenizer *t, const char *text, size_t n_bytes,
                      bool control) {
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
    return (a->arg != NULL) + (a->prompt_file != NULL) + (a->ids != NULL);
}

/* One prompt, and not two? */
static int prompt_check(const cli_args *a, const char *command) {
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

/* The file with the prompt, "-" for stdin; NULL: it is on the command line. */
static const char *prompt_path(const cli_args *a) {
    if (prompt_sources(a) == 0) return stdin_is_fed() ? "-" : NULL;
    return a->prompt_file ? a->prompt_file : a->arg && strcmp(a->arg, "-") == 0 ? a->arg : NULL;
}

/* Bytes that a file may have before it is known how many ids they are: as many as the longest ids for
 * all positions, and with its ids in a part of --ram. What config.json lacks is said later. */
static size_t prompt_most(const cli_args *a, const char *dir, const k3_tokenizer *t) {
    k3_shape sh;
    size_t longest = 1, n;
    if (!prompt_path(a) || !t || k3_config_read(&sh, dir, NULL) < 0) return SIZE_MAX;
    for (uint32_t id = 0; id < sh.vocab_size; id++)
        if (k3_id_bytes(t, id, &n) && n > longest) longest = n;
    uint64_t positions = a->context ? a->context : sh.max_position;
    size_t most = (size_t)(positions * longest), part = (size_t)(a->ram / 8);
    return part > 0 && part < most ? part : most;
}

/* The prompt as given: exactly one of the argument, --prompt-file and --ids. Text goes to
 * `text`; with --ids `text` stays empty and `ids` is filled. */
static int prompt_read(const cli_args *a, blob *text, size_t most, id_list *ids,
                       const char *command) {
    const char *path = prompt_path(a);
    int rc = DONE;
    if (a->ids) return ids_parse(ids, a->ids, strlen(a->ids), "--ids");
    if (path) {
        rc = blob_read(text, path, most);
    } else {
        text->n = strlen(a->arg);
        text->p = malloc(text->n + 1);
        if (!text->p) return fail_memory("the prompt", text->n);
        memcpy(text->p, a->arg, text->n + 1);
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
    snprintf(path, sizeof path, "%s/snapshots", a->model);
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return fail(FAIL_MODEL,
                    "%s %s: no readable config.json there; this is a download cache: name the "
                    "directory inside its snapshots/",
                    a->model_by, a->model);
    return fail(FAIL_MODEL,
                "%s %s: no readable config.json there, so no model; the directory of a download "
                "holds config.json, tiktoken.model, tokenizer_config.json and model-*.safetensors",
                a->model_by, a->model);
}

/* The directory to open: --model, K3_MODEL, or the bundled model. */
static int model_locate(const cli_args *a, const char **dir) {
    static char bundled[4200];
    int rc = DONE;
    for (size_t i = 0; i < a->n_mirror && rc == DONE; i++)
        rc = dir_check("--mirror", a->mirror[i], "shards");
    if (rc == DONE && a->model) rc = dir_check(a->model_by, a->model, "config.json");
    *dir = a->model;
    if (rc != DONE) return rc;
    if (a->model) {
        if (!is_model_dir(a->model)) return fail_no_model(a);
        return is_slice(a->model) ? fail(FAIL_MODEL,
                                         "%s %s: a slice: some experts and nothing else; "
                                         "`k3-tier --slice` serves it",
                                         a->model_by, a->model)
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

/* Which model, where the command line does not say; with the bundled one, what comes after it. */
static void model_say(const cli_args *a, const char *dir) {
    if (a->quiet || (a->model && strcmp(a->model_by, "K3_MODEL") != 0)) return;
    if (a->model)
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

/* A line such as "VmHWM:  1234 kB" of a file in /proc, as bytes; 0 where there is none. */
static uint64_t proc_bytes(const char *path, const char *key) {
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
    memcpy(tiers, a->tier, a->n_tier * sizeof *tiers);
    tiers[a->n_tier] = tiers[a->n_tier + 1] = NULL;
    if (a->n_tier == MAX_TIER) {
        snprintf(why, sizeof why, "--gpu: %d boxes are named, and no more can be had", MAX_TIER);
    } else if (gpu_join(o->model_dir, a->pins, a->psk_file, address, sizeof address, &is_new, why,
                        sizeof why)) {
        tiers[a->n_tier] = address;
        o->tiers = tiers;
        o->others_bytes = is_new ? GPU_RAM_BYTES : 0; /* else it has what it takes */
        return;
    }
    console_clear(o->user);
    say("%s; going on without", why); /* also with -q: it was asked for */
}

/* The engine's options as the command line has them; notes and progress go to `con`. */
k3_options engine_options(const cli_args *a, const char *dir, console *con) {
    k3_options o;
    k3_options_default(&o);
    o.model_dir = dir;
    o.kernels = a->kernels;
    o.n_threads = (int)a->threads;
    o.chunk = (int)a->chunk;
    o.ram_bytes = a->ram;
    o.context = a->context;
    o.mirrors = a->mirror;
    o.io = (k3_io)a->io;
    o.direct = (k3_switch)a->direct;
    o.io_depth = (int)a->io_depth;
    o.policy = (k3_policy)a->policy;
    o.no_look_ahead = a->no_look_ahead;
    o.is_timed = a->where;
    o.sums = a->sums;
    o.pins = a->pins;
    o.no_check = a->no_check || a->write_sums;
    o.tiers = a->tier;
    o.tier_key = a->psk_file;
    o.tier_ca = a->tier_ca;
    o.tier_cert = a->tier_cert;
    o.tier_cert_key = a->tier_key;
    o.spin_us = (uint32_t)a->spin_us;
    o.tier_wait_us = (uint32_t)a->tier_wait;
    o.tier_audit = (uint32_t)a->tier_audit;
    o.tier_hedge = a->tier_hedge;
    if (is_given(a, "--lora-eps")) o.eps_lora = a->lora_eps;
    if (a->golden) o.eps_lora = 1e-5f;
    o.note = console_note;
    o.progress = console_progress;
    o.user = con;
    return o;
}

/* OMP_NUM_THREADS says another number than what is used, and --threads none. */
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

int engine_open(k3_engine **e, const k3_options *o) {
    console *con = o->user;
    k3_error err = {{0}};
    if (!o->headers_only && !o->config_only) ram_say(con, o);
    int status = k3_engine_open(e, o, &err);
    console_clear(con);
    if (status < 0) return fail_status(status, &err);
    threads_say(con, *e, o);
    con->n_layers = k3_engine_shape(*e)->n_layers;
    return DONE;
}

static uint64_t moe_layers(const k3_shape *s) { return s->n_layers - s->n_dense; }

/* Weights are read again and again: not all of them have a place in memory. */
bool is_streaming(const k3_engine *e) {
    const k3_plan *p = k3_engine_plan(e);
    const k3_shape *s = k3_engine_shape(e);
    return p->streamed_bytes > 0 || (moe_layers(s) > 0 && p->quota < s->n_experts);
}

/* The plan of `k3 plan` in two lines. */
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

/* Open the tokenizer. Ids can do without one (checkpoints made for tests have none): then
 * *t stays NULL, which is noted, and the answer has ids but no text. */
static int tokenizer_open(k3_tokenizer **t, const cli_args *a, const char *dir) {
    char path[4096];
    k3_error err = {{0}};
    snprintf(path, sizeof path, "%s/tiktoken.model", dir);
    if (a->ids && access(path, F_OK) != 0 && errno == ENOENT) {
        if (!a->quiet) say("note: %s is absent: ids only, no text", path);
        return DONE;
    }
    int status = k3_tokenizer_open(t, dir, &err);
    return status < 0 ? fail_status(status, &err) : DONE;
}

/* An output file that is whole, or as it was before: opened early, so that hours of work do not end
 * in a place that cannot be written; emptied when there is something to write. Devices and pipes
 * are never removed. */
typedef struct {
    FILE *f;
    const char *path;
    bool is_new, is_begun;
} outfile;

static int outfile_open(outfile *o, const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    o->path = path;
    o->is_begun = false;
    o->is_new = fd >= 0;
    if (fd < 0 && errno == EEXIST) fd = open(path, O_WRONLY | O_CLOEXEC);
    o->f = fd >= 0 ? fdopen(fd, "wb") : NULL;
    return o->f ? DONE : fail(FAIL_IO, "%s: %s", path, strerror(errno));
}

/* The run has begun: what was in the file is given up. */
static int outfile_begin(outfile *o) {
    struct stat st;
    if (!o->f) return DONE;
    o->is_begun = true;
    if (fstat(fileno(o->f), &st) != 0 || !S_ISREG(st.st_mode)) return DONE;
    return ftruncate(fileno(o->f), 0) == 0 ? DONE
                                           : fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
}

/* Two outputs in one file, through links perhaps, would be neither. */
static int outfile_differ(const outfile *a, const outfile *b) {
    struct stat x, y;
    if (!a->f || !b->f || fstat(fileno(a->f), &x) != 0 || fstat(fileno(b->f), &y) != 0 ||
        !S_ISREG(x.st_mode) || x.st_dev != y.st_dev || x.st_ino != y.st_ino)
        return DONE;
    return fail(FAIL_USAGE, "%s and %s are one file; two outputs need two", a->path, b->path);
}

static int outfile_write(outfile *o, const void *p, size_t n_bytes) {
    if (fwrite(p, 1, n_bytes, o->f) == n_bytes) return DONE;
    return fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
}

/* Close; `keep` false, or a failure to write the rest, removes what was begun. */
static int outfile_close(outfile *o, bool keep) {
    struct stat st;
    int rc = DONE;
    if (!o->f) return DONE;
    bool is_file = fstat(fileno(o->f), &st) == 0 && S_ISREG(st.st_mode);
    bool had_error = ferror(o->f) != 0;
    if (fclose(o->f) != 0 && keep && !had_error)
        rc = fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
    else if (had_error)
        rc = keep ? fail(FAIL_IO, "%s: write error; is the disk full?", o->path) : FAIL_IO;
    if ((rc != DONE || !keep) && is_file && (o->is_new || o->is_begun)) remove(o->path);
    o->f = NULL;
    return rc;
}

/* ==== 6. One answer: run =============================================================
 *
 * A timeline (below) is a session with its row of logits and its two running hashes; run
 * and bench both drive one. Around it, run keeps the text: made printable (no half UTF-8
 * sequence), searched for stop texts (held back while it could still become one), written
 * at once. Whatever ends the answer, what was said so far has been printed.
 */
typedef struct {
    k3_session *s;
    size_t n_vocab;
    float *row;    /* f32[n_vocab], logits after the last position run       */
    void *scratch; /* for k3_sample                                          */
    k3_sampler sampler;
    uint64_t ids_fnv, logits_fnv;
    k3_stats before; /* when the session was new: what opening read           */
} timeline;

/* A session with room for the context that the engine planned for. */
static int timeline_open(timeline *t, k3_engine *e, const cli_args *a) {
    k3_error err = {{0}};
    t->n_vocab = k3_engine_shape(e)->vocab_size;
    t->sampler = (k3_sampler){a->temperature, a->top_p, (uint32_t)a->top_k, a->seed};
    t->ids_fnv = t->logits_fnv = K3_FNV_BASIS;
    t->row = malloc(t->n_vocab * sizeof *t->row);
    t->scratch = malloc(k3_sample_scratch(t->n_vocab) + 1);
    if (!t->row || !t->scratch) return fail_memory("a row of logits", t->n_vocab * sizeof *t->row);
    int status = k3_session_new(&t->s, e, 0, &err);
    if (status < 0) return fail_status(status, &err);
    k3_session_stats(t->s, &t->before);
    return DONE;
}

static void timeline_close(timeline *t) {
    k3_session_free(t->s);
    free(t->row);
    free(t->scratch);
}

/* What was counted since `from`; n_pos and resident_bytes are as they are now. */
static k3_stats timeline_stats(const timeline *t, const k3_stats *from) {
    k3_stats st;
    k3_session_stats(t->s, &st);
    st.compute_ns -= from->compute_ns;
    st.stall_ns -= from->stall_ns;
    st.expert_uses -= from->expert_uses;
    st.expert_hits -= from->expert_hits;
    st.expert_loads -= from->expert_loads;
    st.guesses -= from->guesses;
    st.guess_hits -= from->guess_hits;
    st.wasted_bytes -= from->wasted_bytes;
    st.read_bytes -= from->read_bytes;
    return st;
}

static void timeline_hash_row(timeline *t) {
    t->logits_fnv = k3_fnv1a(t->logits_fnv, t->row, t->n_vocab * sizeof *t->row);
}

/* Run ids and hash the row of the last one. A negative return is a k3_status. */
static int timeline_feed(timeline *t, const uint32_t *ids, size_t n, k3_error *err) {
    int status = k3_session_feed(t->s, ids, n, K3_ROWS_LAST, t->row, err);
    if (status >= 0) timeline_hash_row(t);
    return status;
}

/* The id that follows the row at hand; not yet run. */
static uint32_t timeline_draw(timeline *t) {
    uint64_t pos = k3_session_pos(t->s) - 1;
    uint32_t id = k3_sample(&t->sampler, t->row, t->n_vocab, pos, t->scratch);
    t->ids_fnv = k3_fnv1a(t->ids_fnv, &id, sizeof id);
    return id;
}

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
    char *shown;    /* begun again: what was written the first time ...       */
    size_t n_shown; /* ... must come out the same                     */
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

/* Bytes at the end of p[0, n) that could be the start of `stop`. */
static size_t stop_prefix(const char *p, size_t n, const char *stop) {
    size_t most = strlen(stop) - 1;
    for (size_t k = n < most ? n : most; k > 0; k--)
        if (memcmp(p + n - k, stop, k) == 0) return k;
    return 0;
}

/* Write the next n bytes of the text; what was shown before is compared instead. */
static int run_put(const run_state *r, const char *p, size_t n) {
    size_t again = r->n_out < r->n_shown ? r->n_shown - r->n_out : 0;
    if (r->a->json) return DONE;
    if (again > n) again = n;
    if (again && memcmp(r->shown + r->n_out, p, again) != 0)
        return fail(FAIL_CHECK, "the text above is wrong: a far box lied; run again without it");
    return again < n ? out_write(p + again, n - again) : DONE;
}

/* Write what may be written of the text. Returns DONE, an exit code, or -1 when a stop text
 * was met: the text then ends before it. `is_end`: nothing more will come. */
static int run_write(run_state *r, bool is_end) {
    char *from = r->text.p + r->n_out;
    size_t n = r->text.n - r->n_out, n_held = 0;
    bool is_met = false;
    for (size_t i = 0; i < r->a->n_stop; i++) {
        const char *hit = memmem(from, n, r->a->stop[i], strlen(r->a->stop[i]));
        if (!hit) continue;
        n = (size_t)(hit - from); /* later ones must come earlier still */
        is_met = true;
    }
    for (size_t i = 0; i < r->a->n_stop && !is_end && !is_met; i++) {
        size_t k = stop_prefix(from, n, r->a->stop[i]);
        if (k > n_held) n_held = k;
    }
    int rc = n == n_held ? DONE : run_put(r, from, n - n_held);
    r->n_out += n - n_held;
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
    *context = r->a->context;
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
    uint64_t n = r->n_loaded + r->prompt_ids.n, most = r->a->context;
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

/* Run the prompt but for its last id and keep that: the same prompt again then runs one id. */
static int run_prompt_ahead(run_state *r, k3_error *err) {
    size_t n = r->prompt_ids.n - 1 - (size_t)r->n_restored;
    if (!r->cache || n == 0) return 0;
    uint64_t start = clock_ns();
    int status =
        k3_session_feed(r->line.s, r->prompt_ids.id + r->n_restored, n, K3_ROWS_NONE, NULL, err);
    if (status < 0) return status;
    if (run_is_worth(r, n, (double)(clock_ns() - start) * 1e-9)) run_cache_store(r);
    return (int)n;
}

/* The end: the cache gets what was run, --save all that was said. */
static int run_state_keep(run_state *r) {
    const cli_args *a = r->a;
    k3_session *s = r->line.s;
    k3_state_info info;
    k3_error err = {{0}};
    char size[32];
    int status = 0;
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

/* ---- Begun again: a far box lied, and had been believed ---- */

enum { REDO = -2 }; /* beside exit codes: K3_EREDO, said as a note */

static int run_fail_status(const run_state *r, int status, const k3_error *err) {
    if (status != K3_EREDO) return fail_status(status, err);
    if (!r->a->quiet) say("note: %s", err->text);
    return REDO;
}

/* What was written to a file is given up; a pipe does not give anything back. */
static int outfile_again(outfile *o) {
    struct stat st;
    if (!o->f) return DONE;
    if (fflush(o->f) != 0 || fstat(fileno(o->f), &st) != 0)
        return fail(FAIL_IO, "%s: %s", o->path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return fail(FAIL_CHECK,
                    "%s: what was written is wrong: a far box lied; run again without it", o->path);
    rewind(o->f);
    return outfile_begin(o);
}

/* Back to the state from before any far box was asked, with the box that lied out of the way: all
 * ids are run and drawn again, and text that is out must come out the same. */
static int run_again(run_state *r) {
    k3_error err = {{0}};
    if (!r->a->json && r->n_out > r->n_shown) {
        char *grown = realloc(r->shown, r->n_out);
        if (!grown) return fail_memory("the text", r->n_out);
        memcpy(grown, r->text.p, r->n_out);
        r->shown = grown;
        r->n_shown = r->n_out;
    }
    r->text.n = r->n_out = r->said.n = 0;
    r->utf8 = (k3_utf8){{0}, 0};
    r->line.ids_fnv = r->line.logits_fnv = r->trace_fnv = K3_FNV_BASIS;
    r->n_restored = r->n_step = r->gen_ns = 0;
    int rc = outfile_again(&r->dump);
    if (rc == DONE) rc = outfile_again(&r->trace);
    if (rc == DONE) rc = outfile_again(&r->routing);
    if (rc == DONE && r->a->routing) run_route_head(r);
    if (rc != DONE) return rc;
    k3_session_reset(r->line.s);
    int status = r->a->load ? k3_session_load(r->line.s, r->a->load, NULL, NULL, NULL, &err) : 0;
    return status < 0 ? fail_status(status, &err) : DONE;
}

/* Of so many bytes, those that the engine's allowance for its caller does not cover. */
static uint64_t beyond_allowance(uint64_t bytes) {
    const uint64_t covered = 4u << 20;
    return bytes > covered ? bytes - covered : 0;
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
    if (rc == DONE) rc = model_locate(a, &r->dir);
    if (rc == DONE) rc = tokenizer_open(&r->t, a, r->dir);
    if (rc == DONE)
        rc = prompt_read(a, &r->prompt, prompt_most(a, r->dir, r->t), &r->prompt_ids, "run");
    if (rc == DONE) model_say(a, r->dir);
    if (rc == DONE && !a->ids)
        rc = ids_encode(&r->prompt_ids, r->t, r->prompt.p, r->prompt.n, a->control);
    if (rc != DONE) return rc;
    if (!a->quiet && r->prompt.n && r->prompt.p[r->prompt.n - 1] == '\n')
        say("note: the prompt ends with a newline, which is part of it");
    if (!a->quiet && a->temperature <= 0 && (a->top_k || a->top_p < 1))
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
    if (status < 0) return run_fail_status(r, status, &err);
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
        size_t n_run = (size_t)r->n_restored + (size_t)(status > 0 ? status : 0);
        if (status >= 0)
            status =
                timeline_feed(&r->line, r->prompt_ids.id + n_run, r->prompt_ids.n - n_run, &err);
        console_clear(&r->con);
        if (status < 0) rc = run_fail_status(r, status, &err);
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
    int status = timeline_feed(&r->line, &id, 1, &err);
    console_clear(&r->con);
    r->gen_ns += clock_ns() - start;
    if (status == K3_ECANCEL) return INTERRUPTED;
    if (status < 0) return run_fail_status(r, status, &err);
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
        if (k3_session_pos(r->line.s) == k3_session_context(r->line.s)) {
            r->why = "context";
            break;
        }
        rc = interrupted ? INTERRUPTED : run_step(r, id);
    }
    if (rc == INTERRUPTED) r->why = "interrupt";
    if (rc == REDO || ferror(stdout)) return rc;
    int end = run_text(r, "", 0); /* what was held back */
    if (end == -1) r->why = "stop";
    return end > 0 && rc == DONE ? end : rc;
}

void json_put(json_object *o, const char *key, json_object *value) {
    json_object_object_add(o, key, value);
}

void json_put_hash(json_object *o, const char *key, uint64_t fnv) {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fnv);
    json_put(o, key, json_object_new_string(text));
}

void json_put_real(json_object *o, const char *key, double value) {
    char text[64];
    snprintf(text, sizeof text, "%.6f", value);
    json_put(o, key, json_object_new_double_s(value, text));
}

/* A path may hold any bytes; JSON may not. */
static void json_put_path(json_object *o, const char *key, const char *path) {
    size_t n_bytes = strlen(path);
    char *text = malloc(3 * (n_bytes + 3) + 9);
    k3_utf8 utf8 = {{0}, 0};
    if (!text) return;
    size_t n = k3_utf8_push(&utf8, path, n_bytes, text);
    n += k3_utf8_push(&utf8, "", 0, text + n);
    json_put(o, key, json_object_new_string_len(text, (int)n));
    free(text);
}

/* A count; JSON integers end at 2^63. */
void json_put_count(json_object *o, const char *key, uint64_t n) {
    json_put(o, key, json_object_new_int64((int64_t)n));
}

/* Where the bytes came from; read_bytes and all below it without what opening read. */
static void json_put_disk(json_object *o, const run_state *r) {
    k3_stats st = timeline_stats(&r->line, &r->line.before);
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
    if (!r->a->n_tier && !r->a->gpu) return;
    json_put_count(o, "far_asked", st.far_asked);
    json_put_count(o, "far_served", st.far_served);
    json_put_count(o, "far_late", st.far_late);
    json_put_count(o, "far_hedged", st.far_hedged);
    json_put_count(o, "far_audits", st.far_audits);
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

double percent(uint64_t part, uint64_t whole) {
    return whole ? 100.0 * (double)part / (double)whole : 0.0;
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

bool tiers_say_silent(const cli_args *a, const k3_stats *st) {
    char names[256] = "";
    if (a->quiet || a->n_tier == 0 || a->gpu || st->far_asked > 0 || st->expert_loads == 0)
        return false;
    for (size_t i = 0; i < a->n_tier; i++)
        line_add(names, sizeof names, "%s%s", i ? ", " : "", a->tier[i]);
    say("note: no box was of use (%s): none was there in time, or none held what was wanted; all "
        "was read and computed here; `k3-tier status ADDR` says what a box does",
        names);
    return true;
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
    if ((r->a->n_tier || r->a->gpu) && !r->a->quiet) run_say_tier(r);
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
    free(r->shown);
}

/* The answer, begun again as often as a far box is found to lie; each of them lies once. */
static int run_answer(run_state *r, bool *has_answer) {
    int rc;
    do {
        r->con.n_grace = 0;
        rc = run_prompt(r);
        *has_answer = rc == DONE;
        r->con.n_grace = r->a->save ? 1 : 0; /* a step given up costs the state: it ends first */
        if (rc == DONE) rc = run_generate(r);
    } while (rc == REDO && (rc = run_again(r)) == DONE);
    if (!r->a->json && r->n_out < r->n_shown) /* also when the second try did not come to its end */
        rc = fail(FAIL_CHECK, "the text above is wrong: a far box lied; run again without it");
    return rc;
}

static int cmd_run(const cli_args *a) {
    run_state r;
    memset(&r, 0, sizeof r);
    r.a = a;
    console_init(&r.con, a);
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

/* ==== 7. Text and ids: tokenize ======================================================
 *
 * One line for each id: the id, a tab, its bytes. What is not printable UTF-8 is escaped as
 * in C, so that a line is a line. --decode goes the other way and is byte exact.
 */

/* Length of the valid UTF-8 sequence at p, 0 when there is none. */
static size_t utf8_length(const unsigned char *p, size_t n) {
    unsigned char lo = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80; /* of the second byte */
    unsigned char hi = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    size_t len = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if ((p[0] >= 0x80 && p[0] < 0xc2) || p[0] > 0xf4 || len > n) return 0;
    for (size_t i = 1; i < len; i++) {
        if (p[i] < lo || p[i] > hi) return 0;
        lo = 0x80;
        hi = 0xbf;
    }
    return len;
}

void put_escaped(const char *bytes, size_t n) {
    static const char plain[] = "\n\t\r\\", letter[] = "ntr\\";
    const unsigned char *p = (const unsigned char *)bytes;
    for (size_t i = 0; i < n;) {
        size_t len = utf8_length(p + i, n - i);
        const char *known = p[i] ? strchr(plain, p[i]) : NULL;
        if (known)
            printf("\\%c", letter[known - plain]);
        else if (len == 0 || p[i] < 0x20 || p[i] == 0x7f)
            printf("\\x%02x", p[i]);
        else
            fwrite(p + i, 1, len, stdout);
        i += len ? len : 1;
    }
}

static int tokenize_decode(k3_tokenizer *t, const id_list *ids) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t n = 0;
        const char *bytes = k3_id_bytes(t, ids->id[i], &n);
        if (!bytes)
            return fail(FAIL_USAGE, "--ids: number %zu, %u, stands for no text in this model",
                        i + 1, (unsigned)ids->id[i]);
        fwrite(bytes, 1, n, stdout);
    }
    return DONE;
}

static void tokenize_list(k3_tokenizer *t, const id_list *ids, bool ids_only) {
    for (size_t i = 0; i < ids->n; i++) {
        size_t n = 0;
        printf(ids_only && i ? ",%u" : "%u", (unsigned)ids->id[i]);
        if (ids_only) continue;
        const char *bytes = k3_id_bytes(t, ids->id[i], &n);
        putchar('\t');
        if (bytes) put_escaped(bytes, n);
        putchar('\n');
    }
    if (ids_only) putchar('\n');
}

static int cmd_tokenize(const cli_args *a) {
    blob text = {NULL, 0};
    id_list ids = {NULL, 0};
    k3_tokenizer *t = NULL;
    const char *dir;
    k3_error err = {{0}};
    if (a->decode && !a->ids) return fail(FAIL_USAGE, "tokenize --decode needs --ids N,N,...");
    int rc = prompt_check(a, "tokenize");
    if (rc == DONE) rc = prompt_read(a, &text, SIZE_MAX, &ids, "tokenize");
    if (rc == DONE) rc = model_find(a, &dir);
    if (rc != DONE) goto done;
    int status = k3_tokenizer_open(&t, dir, &err);
    rc = status < 0 ? fail_status(status, &err) : DONE;
    if (rc == DONE && !a->ids) rc = ids_encode(&ids, t, text.p, text.n, a->control);
    if (rc != DONE) goto done;
    if (a->decode)
        rc = tokenize_decode(t, &ids);
    else
        tokenize_list(t, &ids, a->ids_only);
    if (fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && !a->quiet && !a->decode) say("%zu ids", ids.n);
done:
    k3_tokenizer_close(t);
    free(text.p);
    free(ids.id);
    return rc;
}

/* ==== 8. Measure: bench ==============================================================
 *
 * A table for a spreadsheet and for the next machine: speeds with the hashes that prove
 * the same work was done. The `# total` row hashes the logits_fnv of all rows, in order,
 * as little-endian u64: that is the number --expect takes.
 */
/* Files read at random in blocks: the yardstick of --reader. */
typedef struct {
    int *fd;
    uint64_t *n_block; /* blocks of each file */
    size_t n_file, block;
    uint64_t n_all;
    int best_depth;
    double before, after; /* bytes per second */
} reader;

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
                    : ids_encode(ids, b->t, line, n, b->a->control);
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
    if (!b->a->prompts) {
        for (size_t i = 0; i < COUNT(BENCH_PROMPT) && rc == DONE; i++)
            rc = bench_add(b, BENCH_PROMPT[i], strlen(BENCH_PROMPT[i]), i + 1);
        return rc;
    }
    rc = blob_read(&file, b->a->prompts, b->a->ram ? (size_t)(b->a->ram / 8) : SIZE_MAX);
    for (size_t at = 0, i_line = 1; at < file.n && rc == DONE; i_line++) {
        const char *end = memchr(file.p + at, '\n', file.n - at);
        size_t n = end ? (size_t)(end - (file.p + at)) : file.n - at;
        if (n) rc = bench_add(b, file.p + at, n, i_line); /* an empty line is no prompt */
        at += n + 1;
    }
    free(file.p);
    if (rc == DONE && b->n_prompt == 0) rc = fail(FAIL_USAGE, "%s: no prompt in it", b->a->prompts);
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
    if (!a->prompts || access(path, F_OK) == 0) {
        int status = k3_tokenizer_open(&b->t, b->dir, &err);
        if (status < 0) return fail_status(status, &err);
    }
    rc = bench_prompts(b);
    if (rc != DONE) return rc;
    for (size_t i = 0; i < b->n_prompt; i++)
        if (b->prompt[i].n + a->tokens > most) most = b->prompt[i].n + a->tokens;
    if (a->context && a->context < most)
        return fail(exit_code(K3_EFULL), "--context holds %llu positions, the prompts need %llu",
                    (unsigned long long)a->context, (unsigned long long)most);
    signals_catch();
    k3_options o = engine_options(a, b->dir, &b->con);
    engine_gpu(a, &o);
    if (!o.context) o.context = most;
    for (size_t i = 0; i < b->n_prompt; i++)
        bytes += sizeof(id_list) * 2 + 32 + b->prompt[i].n * 4 * sizeof(uint32_t);
    o.caller_bytes = beyond_allowance(bytes);
    rc = engine_open(&b->e, &o);
    if (rc == DONE && !a->quiet && is_streaming(b->e)) plan_say(b->e);
    return rc == DONE ? timeline_open(&b->line, b->e, a) : rc;
}

/* One prompt, once; the two times go to *in_s and *out_s. A k3_status. */
static int bench_try(bench_state *b, const id_list *prompt, double *in_s, double *out_s,
                     k3_error *err) {
    timeline *line = &b->line;
    k3_session_reset(line->s);
    console_answer(&b->con, 0, 0);
    line->ids_fnv = line->logits_fnv = K3_FNV_BASIS;
    k3_stats before, between, after;
    k3_session_stats(line->s, &before);
    uint64_t start = clock_ns();
    int status = timeline_feed(line, prompt->id, prompt->n, err);
    uint64_t middle = clock_ns();
    k3_session_stats(line->s, &between);
    for (uint64_t i = 0; i < b->a->tokens && status >= 0; i++) {
        uint32_t id = timeline_draw(line);
        console_answer(&b->con, i + 1, b->a->tokens);
        if (i + 1 < b->a->tokens) status = timeline_feed(line, &id, 1, err);
    }
    k3_session_stats(line->s, &after);
    where_add(&b->where.prompt, &before, &between);
    where_add(&b->where.decode, &between, &after);
    *in_s = (double)(middle - start) * 1e-9;
    *out_s = (double)(clock_ns() - middle) * 1e-9;
    console_clear(&b->con);
    return status;
}

/* Again, and timed anew, when a far box is found to lie. */
static int bench_once(bench_state *b, const id_list *prompt, double *in_s, double *out_s) {
    k3_error err = {{0}};
    int status;
    while ((status = bench_try(b, prompt, in_s, out_s, &err)) == K3_EREDO)
        if (!b->a->quiet) say("note: %s", err.text);
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
    uint64_t n = b->a->repeats;
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
    size_t n = b->a->repeats;
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

static double share(uint64_t part, uint64_t whole) {
    return whole ? (double)part / (double)whole : 0.0;
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
        if (rc == DONE && i > 0 && b->a->tier_audit > 1 && bench_lies(b) > n_lies)
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

/* ---- a routing trace, replayed ----
 *
 * `k3 bench --replay FILE`: hits of the two slot policies on recorded choices, line by line, each
 * layer on its own, as the engine's store does in decode: what was chosen is in memory or is
 * read; at the end of the layer what is over the quota goes, the coldest first. */
#define REPLAY_DECAY 0.9f /* as in the engine's store */

typedef struct {
    uint32_t pos, layer, n;
    uint32_t id[K3_MAX_TOP_K];
    float w[K3_MAX_TOP_K];
} replay_line;

typedef struct {
    unsigned n_layers, n_experts, top_k;
    unsigned long long expert_bytes;
    replay_line *line;
    size_t n;
} replay_trace;

static int replay_parse(replay_trace *t, const char *path, char *text, size_t i_line) {
    replay_line *l = &t->line[t->n];
    unsigned long long v[2];
    char *at = text;
    for (int i = 0; i < 2; i++) {
        char *from = at;
        v[i] = strtoull(from, &at, 10);
        if (at == from)
            return fail(FAIL_USAGE, "%s: line %zu: no position and layer", path, i_line);
    }
    if (v[1] >= t->n_layers)
        return fail(FAIL_USAGE, "%s: line %zu: layer %llu", path, i_line, v[1]);
    *l = (replay_line){.pos = (uint32_t)v[0], .layer = (uint32_t)v[1]};
    while (*at == ' ' && l->n < t->top_k) {
        char *from = at, *colon;
        unsigned long long id = strtoull(from, &colon, 10);
        float w = *colon == ':' ? strtof(colon + 1, &at) : -1.0f;
        if (colon == from || at == colon + 1 || !(w >= 0.0f && w < INFINITY) ||
            id >= t->n_experts || (l->n > 0 && id <= l->id[l->n - 1]))
            return fail(FAIL_USAGE, "%s: line %zu: not expert:weight, ids ascending", path, i_line);
        l->id[l->n] = (uint32_t)id;
        l->w[l->n++] = w;
    }
    if (l->n != t->top_k || *at)
        return fail(FAIL_USAGE, "%s: line %zu: not %u experts", path, i_line, t->top_k);
    t->n++;
    return DONE;
}

static int replay_read(replay_trace *t, const char *path) {
    blob file = {NULL, 0};
    int rc = blob_read(&file, path, SIZE_MAX), n_head = 0;
    size_t n_line = 0;
    if (rc != DONE) return rc;
    for (size_t i = 0; i < file.n; i++) n_line += file.p[i] == '\n';
    char *end = file.n ? memchr(file.p, '\n', file.n) : NULL;
    if (end) *end = 0;
    if (!end ||
        sscanf(file.p, "k3-routing 1 %4u %5u %2u %15llu%n", &t->n_layers, &t->n_experts, &t->top_k,
               &t->expert_bytes, &n_head) != 4 ||
        file.p[n_head] || t->n_layers > K3_MAX_LAYERS || t->n_experts > 65535 || t->top_k == 0 ||
        t->top_k > K3_MAX_TOP_K || t->top_k > t->n_experts) {
        rc = fail(FAIL_USAGE, "%s: no routing trace; make one with `k3 run --trace FILE`", path);
    } else if (!(t->line = malloc((n_line + 1) * sizeof *t->line))) {
        rc = fail_memory("the trace", (n_line + 1) * sizeof *t->line);
    }
    for (size_t i_line = 2; rc == DONE && end && end + 1 < file.p + file.n; i_line++) {
        char *from = end + 1;
        end = memchr(from, '\n', (size_t)(file.p + file.n - from));
        if (!end)
            rc = fail(FAIL_USAGE, "%s: line %zu is cut short", path, i_line);
        else if ((*end = 0, *from))
            rc = replay_parse(t, path, from, i_line);
    }
    if (rc == DONE && t->n == 0) rc = fail(FAIL_USAGE, "%s: no choices in it", path);
    free(file.p);
    return rc;
}

/* One expert of one layer. */
typedef struct {
    float heat;
    uint32_t tick;
    bool is_held;
} replay_slot;

/* Hits with `quota` slots a layer. `slot` is [n_layers][n_experts], cleared here. */
static uint64_t replay_hits(const replay_trace *t, k3_policy policy, uint32_t quota,
                            replay_slot *slot) {
    uint64_t n_hit = 0;
    memset(slot, 0, (size_t)t->n_layers * t->n_experts * sizeof *slot);
    for (size_t i = 0; i < t->n; i++) {
        const replay_line *l = &t->line[i];
        replay_slot *s = slot + (size_t)l->layer * t->n_experts;
        uint32_t n_held = 0;
        for (uint32_t ie = 0; ie < t->n_experts; ie++)
            s[ie].heat = s[ie].is_held ? s[ie].heat * REPLAY_DECAY : 0.0f;
        for (uint32_t k = 0; k < l->n; k++) {
            n_hit += s[l->id[k]].is_held;
            s[l->id[k]].is_held = true;
            s[l->id[k]].heat += l->w[k];
            s[l->id[k]].tick = (uint32_t)i + 1;
        }
        for (uint32_t ie = 0; ie < t->n_experts; ie++) n_held += s[ie].is_held;
        for (; n_held > quota; n_held--) {
            replay_slot *cold = NULL;
            for (uint32_t ie = 0; ie < t->n_experts; ie++)
                if (s[ie].is_held && (!cold || (policy == K3_POLICY_LRU ? s[ie].tick < cold->tick
                                                                        : s[ie].heat < cold->heat)))
                    cold = &s[ie];
            cold->is_held = false;
        }
    }
    return n_hit;
}

/* Experts by the sum of their weights, those never chosen left out. */
typedef struct {
    uint32_t layer, ie;
    double weight;
} replay_pin;

static int compare_pins(const void *a, const void *b) {
    const replay_pin *x = a, *y = b;
    if (x->weight != y->weight) return x->weight < y->weight ? 1 : -1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->ie < y->ie ? -1 : x->ie > y->ie;
}

static int replay_write_pins(const replay_trace *t, const char *path) {
    size_t n = (size_t)t->n_layers * t->n_experts;
    outfile out = {0};
    replay_pin *pin = calloc(n, sizeof *pin);
    if (!pin) return fail_memory("the pins", n * sizeof *pin);
    for (size_t i = 0; i < n; i++) {
        pin[i].layer = (uint32_t)(i / t->n_experts);
        pin[i].ie = (uint32_t)(i % t->n_experts);
    }
    for (size_t i = 0; i < t->n; i++)
        for (uint32_t k = 0; k < t->line[i].n; k++)
            pin[(size_t)t->line[i].layer * t->n_experts + t->line[i].id[k]].weight +=
                (double)t->line[i].w[k];
    qsort(pin, n, sizeof *pin, compare_pins);
    int rc = outfile_open(&out, path);
    if (rc == DONE) rc = outfile_begin(&out);
    for (size_t i = 0; rc == DONE && i < n && pin[i].weight > 0; i++)
        fprintf(out.f, "%u %u %.6g\n", (unsigned)pin[i].layer, (unsigned)pin[i].ie, pin[i].weight);
    free(pin);
    if (rc != DONE) return rc;
    if (ferror(out.f)) rc = fail(FAIL_IO, "%s: write error", path);
    int closed = outfile_close(&out, rc == DONE);
    return rc != DONE ? rc : closed;
}

static int bench_replay(const cli_args *a) {
    replay_trace t = {0};
    uint64_t n_use = 0;
    bool is_seen[K3_MAX_LAYERS] = {false};
    uint32_t n_moe = 0;
    int rc = replay_read(&t, a->replay);
    replay_slot *slot = rc == DONE ? malloc((size_t)t.n_layers * t.n_experts * sizeof *slot) : NULL;
    if (rc == DONE && !slot) rc = fail_memory("the slots", (size_t)t.n_layers * t.n_experts);
    for (size_t i = 0; rc == DONE && i < t.n; i++) {
        n_use += t.line[i].n;
        n_moe += !is_seen[t.line[i].layer];
        is_seen[t.line[i].layer] = true;
    }
    if (rc == DONE)
        puts("slots_per_layer\tbytes\tof_token\tuses\trank_hits\tlru_hits\trank_rate\tlru_rate");
    for (uint32_t q = 1; rc == DONE && q <= t.n_experts; q += q < 4 ? 1 : q / 2) {
        uint64_t rank = replay_hits(&t, K3_POLICY_RANK, q, slot);
        uint64_t lru = replay_hits(&t, K3_POLICY_LRU, q, slot);
        printf("%u\t%llu\t%.3f\t%llu\t%llu\t%llu\t%.4f\t%.4f\n", (unsigned)q,
               (unsigned long long)q * n_moe * t.expert_bytes, (double)q / t.top_k,
               (unsigned long long)n_use, (unsigned long long)rank, (unsigned long long)lru,
               share(rank, n_use), share(lru, n_use));
    }
    if (rc == DONE && fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && a->write_pins) rc = replay_write_pins(&t, a->write_pins);
    free(slot);
    free(t.line);
    return rc;
}

/* ---- a plain reader ----
 *
 * `k3 bench --reader`: what the disk gives to a program that does nothing else. Threads read blocks
 * of one expert's size at random places of the shards, past the page cache. The best depth is
 * looked for first; it is measured again when the runs are over. */
#define READER_SECONDS 2.0
#define READER_DEPTH 32

typedef struct {
    const reader *r;
    uint64_t seed, bytes, end_ns;
    int why;
} reader_thread;

static void *reader_main(void *arg) {
    reader_thread *t = arg;
    const reader *r = t->r;
    void *buf = NULL;
    if (posix_memalign(&buf, 4096, r->block) != 0) {
        t->why = ENOMEM;
        return NULL;
    }
    while (clock_ns() < t->end_ns && t->why == 0) {
        t->seed = t->seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t at = (t->seed >> 20) % r->n_all;
        size_t i = 0;
        for (; at >= r->n_block[i]; i++) at -= r->n_block[i];
        ssize_t got = pread(r->fd[i], buf, r->block, (off_t)(at * r->block));
        if (got < 0 && errno != EINTR) t->why = errno;
        if (got > 0) t->bytes += (uint64_t)got;
    }
    free(buf);
    return NULL;
}

/* Bytes per second at this depth, 0 when a read fails. */
static double reader_measure(const reader *r, int depth) {
    pthread_t id[READER_DEPTH];
    reader_thread t[READER_DEPTH];
    uint64_t start = clock_ns(), bytes = 0;
    int n = 0;
    bool is_bad = false;
    for (; n < depth; n++) {
        t[n] = (reader_thread){r, start + (uint64_t)n * 7919, 0, 0, 0};
        t[n].end_ns = start + (uint64_t)(READER_SECONDS * 1e9);
        if (pthread_create(&id[n], NULL, reader_main, &t[n]) != 0) break;
    }
    for (int i = 0; i < n; i++) {
        pthread_join(id[i], NULL);
        bytes += t[i].bytes;
        is_bad = is_bad || t[i].why != 0;
    }
    return is_bad || n < depth ? 0 : 1e9 * (double)bytes / (double)(clock_ns() - start);
}

static void reader_close(reader *r) {
    for (size_t i = 0; i < r->n_file; i++) close(r->fd[i]);
    free(r->fd);
    free(r->n_block);
}

/* All shards of `dir`, for blocks of `block` bytes. */
static int reader_open(reader *r, const char *dir, uint64_t block) {
    char path[4352];
    struct dirent *d;
    DIR *list = opendir(dir);
    if (!list) return fail(FAIL_IO, "%s: %s", dir, strerror(errno));
    r->block = (size_t)(block + 4095) / 4096 * 4096;
    while ((d = readdir(list))) {
        size_t n = strlen(d->d_name);
        struct stat st;
        if (n < 12 || strcmp(d->d_name + n - 12, ".safetensors") != 0) continue;
        snprintf(path, sizeof path, "%s/%s", dir, d->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
        int *more = realloc(r->fd, (r->n_file + 1) * sizeof *more);
        if (more) r->fd = more;
        uint64_t *counts = realloc(r->n_block, (r->n_file + 1) * sizeof *counts);
        if (counts) r->n_block = counts;
        if (fd < 0 || !more || !counts || fstat(fd, &st) != 0) {
            closedir(list);
            return fail(FAIL_IO, "--reader: %s: %s", path, strerror(errno));
        }
        r->fd[r->n_file] = fd;
        r->n_block[r->n_file] = (uint64_t)st.st_size / r->block;
        r->n_all += r->n_block[r->n_file++];
    }
    closedir(list);
    return r->n_all ? DONE
                    : fail(FAIL_USAGE, "--reader: %s has no block of %zu bytes", dir, r->block);
}

/* The best depth and its speed, with blocks of at most `ram` bytes in flight (0: any). */
static int reader_find(reader *r, uint64_t ram) {
    for (int depth = 1; depth <= READER_DEPTH; depth *= 2) {
        if (ram && depth > 1 && (uint64_t)depth * r->block > ram / 2) break;
        double speed = reader_measure(r, depth);
        if (speed <= r->before) continue;
        r->before = speed;
        r->best_depth = depth;
    }
    return r->before > 0 ? DONE : fail(FAIL_IO, "--reader: this file system has no direct reads");
}

/* ---- kernels only ----
 *
 * `k3 bench --kernels-only`: what each kernel set makes of the machine. A matvec reads each
 * weight once, so its measure is the memory bandwidth; a batch reuses weights, so its
 * measure is the peak of fused multiply-adds at the set's own vector width. Both yardsticks
 * are taken by the same set, on the same number of threads, between the runs they judge.
 * All lines of one batch size take turns in rounds, and each figure, the yardsticks' too, is
 * its best over the rounds (as STREAM reports): what another tenant of the cores takes away
 * from one round it seldom takes from all. The hash of the outputs must be the same in every
 * set. */

#define BENCH_ROUNDS 12
#define BENCH_REF_ROUNDS 2
#define BENCH_MAX_LINES 64
#define BENCH_MAX_POOLS 12             /* 1, 2, 4, ... POOL_MAX_THREADS threads */
#define BENCH_TILE 96                  /* rows of one kernel call, as in the engine          */
#define BENCH_HASH_ROWS 256            /* rows under the hash; all that "ref" runs           */
#define BENCH_POOL_BYTES (1400u << 20) /* weights: several times the largest cache           */
#define BENCH_READ_BYTES ((size_t)128 << 20)

typedef struct {
    const char *name;
    bool is_mxfp4;
    size_t rows, cols;
    size_t w_bytes, s_bytes; /* one matrix: weights, scale codes */
} bench_shape;

/* The weights of one shape, n_mat matrices one after another, and what they meet. */
typedef struct {
    bench_shape shape;
    uint8_t *w, *s;
    size_t n_mat, pool_bytes;
    float *xp, *y; /* packed f32[batch][cols]; f32[matrices of a run][batch][rows] */
    size_t batch;
} bench_data;

/* In seconds. */
static double bench_now(void) { return (double)clock_ns() * 1e-9; }

/* splitmix64 of an index: the same weights at the same place for every pool size. */
static uint64_t bench_mix(uint64_t i) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

#define BENCH_FILL 16384 /* words that a thread fills at a time */

static void bench_fill_part(void *ctx, size_t part, int i_thread) {
    const bench_data *d = ctx;
    uint64_t *w = (uint64_t *)(void *)d->w;
    const size_t end = d->pool_bytes / 8;
    (void)i_thread;
    for (size_t i = part * BENCH_FILL; i < end && i < (part + 1) * BENCH_FILL; i++) {
        uint64_t r = bench_mix(i);
        w[i] = d->shape.is_mxfp4 ? r : (r & 0x81ff81ff81ff81ffu) | 0x3c003c003c003c00u;
    }
}

/* Random nibbles and scale codes 118..124, or bf16 of magnitude 2^-7..2^-3. */
static void bench_fill(bench_data *d, k3_pool *pool) {
    const size_t n_code = d->n_mat * d->shape.s_bytes;
    pool_run(pool, (d->pool_bytes / 8 + BENCH_FILL - 1) / BENCH_FILL, 50000, bench_fill_part, d);
    for (size_t i = 0; i < n_code; i++) d->s[i] = (uint8_t)(118 + bench_mix(i) % 7);
}

/* x in [-1, 1). */
static int bench_fill_x(bench_data *d, size_t batch) {
    const size_t n = d->shape.cols;
    float *x = malloc(n * sizeof *x);
    if (!x) return K3_ENOMEM;
    for (size_t t = 0; t < batch; t++) {
        for (size_t i = 0; i < n; i++)
            x[i] = (float)((int32_t)(bench_mix(t * n + i) >> 40) - 0x800000) * 0x1p-23f;
        k3_kernels_ref.pack(d->xp, batch, t, x, n);
    }
    d->batch = batch;
    free(x);
    return K3_OK;
}

/* One measurement: what its threads read, or run. */
typedef struct {
    const k3_kernels *k;
    const bench_data *d;
    size_t first, rows; /* matrix that it starts at; rows of each */
    const uint8_t *at;  /* part i of a read begins at at + i * part */
    size_t part;
    uint64_t n_round;
    uint64_t sum[POOL_MAX_THREADS]; /* of each thread; kept, so that no read is left out */
    uint64_t flops[POOL_MAX_THREADS];
} bench_loop;

static void bench_read_part(void *ctx, size_t i, int i_thread) {
    bench_loop *l = ctx;
    l->sum[i_thread] += l->k->read_stream(l->at + i * l->part, l->part);
}

/* Bytes per second of a read of BENCH_READ_BYTES, the i-th window of the pool. */
static double bench_read(const k3_kernels *k, const bench_data *d, int i, k3_pool *pool) {
    size_t bytes = d->pool_bytes < BENCH_READ_BYTES ? d->pool_bytes : BENCH_READ_BYTES;
    size_t n_window = d->pool_bytes / bytes;
    bench_loop l = {.k = k, .d = d, .part = bytes / 64 & ~(size_t)4095};
    l.at = d->w + ((size_t)i * 3 + 1) % n_window * bytes;
    double t0 = bench_now();
    pool_run(pool, 64, l.part / 10, bench_read_part, &l);
    return (double)(l.part * 64) / (bench_now() - t0);
}

static void bench_peak_part(void *ctx, size_t i, int i_thread) {
    bench_loop *l = ctx;
    uint64_t n = 0;
    (void)i;
    l->sum[i_thread] += l->k->peak_fma(l->n_round, &n) != 0;
    l->flops[i_thread] += n;
}

/* Flops per second of independent multiply-adds. */
static double bench_peak(const k3_kernels *k, int n_threads, k3_pool *pool) {
    bench_loop l = {.k = k, .n_round = k == &k3_kernels_ref ? 25000 : 250000};
    uint64_t flops = 0;
    double t0 = bench_now();
    pool_run(pool, 4 * (size_t)n_threads, 1000000, bench_peak_part, &l);
    double seconds = bench_now() - t0;
    for (int i = 0; i < n_threads; i++) flops += l.flops[i];
    return (double)flops / seconds;
}

static void bench_run_tile(void *ctx, size_t i, int i_thread) {
    const bench_loop *l = ctx;
    const bench_data *d = l->d;
    const bench_shape *s = &d->shape;
    const size_t n_tile = (l->rows + BENCH_TILE - 1) / BENCH_TILE, n = s->cols;
    size_t mat = (l->first + i / n_tile) % d->n_mat, r = i % n_tile * BENCH_TILE;
    size_t n_row = l->rows - r < BENCH_TILE ? l->rows - r : BENCH_TILE;
    float *y = d->y + i / n_tile * s->rows * d->batch + r;
    const uint8_t *w = d->w + mat * s->w_bytes;
    (void)i_thread;
    if (s->is_mxfp4)
        l->k->matmul_mxfp4(y, s->rows, w + r * n / 2, d->s + mat * s->s_bytes + r * n / 32, n_row, n,
                           d->xp, d->batch);
    else
        l->k->matmul_bf16(y, s->rows, (const uint16_t *)(const void *)w + r * n, n, n_row, n, d->xp,
                          d->batch);
}

/* n_mat matrices from `first` on, the first `rows` rows of each, in tiles over threads. */
static void bench_run(const k3_kernels *k, const bench_data *d, size_t first, size_t n_mat,
                      size_t rows, k3_pool *pool) {
    bench_loop l = {.k = k, .d = d, .first = first, .rows = rows};
    size_t tile_bytes = BENCH_TILE * d->shape.w_bytes / d->shape.rows;
    pool_run(pool, n_mat * ((rows + BENCH_TILE - 1) / BENCH_TILE), tile_bytes / 10, bench_run_tile,
             &l);
}

/* FNV-1a over y[t][0..255] of matrix 0. */
static uint64_t bench_hash(const k3_kernels *k, const bench_data *d, k3_pool *pool) {
    uint64_t h = K3_FNV_BASIS;
    bench_run(k, d, 0, 1, BENCH_HASH_ROWS, pool);
    for (size_t t = 0; t < d->batch; t++)
        h = k3_fnv1a(h, d->y + t * d->shape.rows, BENCH_HASH_ROWS * sizeof(float));
    return h;
}

/* Matrices per run: about 100 MB for one vector, less when compute takes longer. */
static size_t bench_n_mat(const bench_data *d, size_t batch) {
    size_t n = ((size_t)100 << 20) / d->shape.w_bytes / (batch < 4 ? 1 : batch < 16 ? 2 : 8);
    n = n < d->n_mat ? n : d->n_mat;
    return n ? n : 1;
}

/* One line of the table: a kernel set on so many threads, and its best rates so far. */
typedef struct {
    const k3_kernels *k;
    int n_threads;
    k3_pool *pool;       /* of n_threads */
    size_t rows, n_mat;  /* "ref" runs BENCH_HASH_ROWS rows of one matrix, and says so */
    size_t first;        /* matrix that the next round starts at */
    double weight, read; /* bytes per second */
    double flop, peak;   /* flops per second */
    uint64_t hash;
} bench_line;

/* One round of one line: read, kernel, peak, kernel, read. */
static void bench_round(bench_line *l, const bench_data *d, int round) {
    const bench_shape *s = &d->shape;
    const double n_row = (double)(l->rows * l->n_mat);
    const double bytes = (double)(s->w_bytes + s->s_bytes) / (double)s->rows * n_row;
    const double flops = 2.0 * n_row * (double)(s->cols * d->batch);
    for (int half = 0; half < 2; half++) {
        double read = 0, peak = 0, seconds, t0;
        if (half == 0) read = bench_read(l->k, d, 2 * round, l->pool);
        t0 = bench_now();
        bench_run(l->k, d, l->first, l->n_mat, l->rows, l->pool);
        seconds = bench_now() - t0;
        l->first = (l->first + l->n_mat) % d->n_mat;
        if (half == 0) peak = bench_peak(l->k, l->n_threads, l->pool);
        if (half == 1) read = bench_read(l->k, d, 2 * round + 1, l->pool);
        if (bytes / seconds > l->weight) l->weight = bytes / seconds;
        if (flops / seconds > l->flop) l->flop = flops / seconds;
        if (read > l->read) l->read = read;
        if (peak > l->peak) l->peak = peak;
    }
}

static void bench_print(const bench_line *l, const bench_data *d, FILE *out) {
    fprintf(out, "%s\t%s\t%zu\t%zu\t%zu\t%d\t", l->k->name, d->shape.name, l->rows, d->shape.cols,
            d->batch, l->n_threads);
    fprintf(out, "%.2f\t%.2f\t%.3f\t%.1f\t%.1f\t%.3f\t%016llx\n", l->weight / 1e9, l->read / 1e9,
            l->weight / l->read, l->flop / 1e9, l->peak / 1e9, l->flop / l->peak,
            (unsigned long long)l->hash);
    fflush(out);
}

/* Every supported set at 1, 2, 4, ... max_threads threads. Returns the number of lines. */
static size_t bench_lines(bench_line *line, const bench_data *d, int max_threads,
                          k3_pool *const *pool, const char *only) {
    size_t n = 0;
    for (const char *const *name = k3_kernels_linked(); *name; name++) {
        const k3_kernels *k = k3_kernels_find(*name);
        const bool is_ref = k == &k3_kernels_ref;
        if (!k || !k3_kernels_is_supported(*name) || (only && strcmp(only, *name))) continue;
        int i_pool = 0;
        for (int t = 1;; t = t * 2 < max_threads ? t * 2 : max_threads, i_pool++) {
            line[n++] = (bench_line){.k = k,
                                     .n_threads = t,
                                     .pool = pool[i_pool],
                                     .rows = is_ref ? BENCH_HASH_ROWS : d->shape.rows,
                                     .n_mat = is_ref ? 1 : bench_n_mat(d, d->batch),
                                     .hash = bench_hash(k, d, pool[i_pool])};
            if (t == max_threads || n == BENCH_MAX_LINES) break;
        }
    }
    return n;
}

/* All sets, batches and thread counts over one shape's weights. */
static int bench_one_shape(const bench_shape *shape, int max_threads, k3_pool *const *pool,
                           const char *only, FILE *out) {
    static const size_t batches[] = {1, 4, 16, 64};
    bench_line line[BENCH_MAX_LINES];
    bench_data d = {.shape = *shape};
    uint64_t want = machine_memory_left("").left / 2;
    void *w = NULL, *xp = NULL;
    int rc = K3_ENOMEM;

    if (want > BENCH_POOL_BYTES) want = BENCH_POOL_BYTES;
    d.n_mat = (size_t)(want / (shape->w_bytes + shape->s_bytes));
    if (d.n_mat == 0) d.n_mat = 1;
    d.pool_bytes = d.n_mat * shape->w_bytes;
    if (posix_memalign(&w, 4096, d.pool_bytes)) w = NULL;
    if (posix_memalign(&xp, 64, 64 * shape->cols * sizeof(float))) xp = NULL;
    d.w = w;
    d.xp = xp;
    d.s = malloc(d.n_mat * shape->s_bytes + 1);
    d.y = malloc((bench_n_mat(&d, 1) + 64 * bench_n_mat(&d, 16)) * shape->rows * sizeof(float));
    if (!d.w || !d.xp || !d.s || !d.y) goto done;
    bench_fill(&d, pool[0]);
    fprintf(out, "# %s %zu x %zu: %zu matrices, %.0f MB\n", shape->name, shape->rows, shape->cols,
            d.n_mat, (double)(d.n_mat * (shape->w_bytes + shape->s_bytes)) / 1e6);

    for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
        if ((rc = bench_fill_x(&d, batches[b])) < 0) goto done;
        const size_t n_line = bench_lines(line, &d, max_threads, pool, only);
        for (int round = 0; round < BENCH_ROUNDS; round++)
            for (size_t i = 0; i < n_line; i++)
                if (line[i].k != &k3_kernels_ref || round < BENCH_REF_ROUNDS)
                    bench_round(&line[i], &d, round);
        for (size_t i = 0; i < n_line; i++) bench_print(&line[i], &d, out);
    }
    rc = K3_OK;
done:
    free(w);
    free(xp);
    free(d.s);
    free(d.y);
    return rc;
}

/* The TSV table for thread counts 1, 2, 4, ... max_threads; `only` names one kernel set or is
 * NULL for all that are linked and supported; that it can run here is known.
 * Returns K3_OK or K3_ENOMEM. */
static int bench_kernels(int max_threads, const char *only, FILE *out) {
    static const bench_shape shapes[] = {
        {"bf16", false, 12288, 7168, (size_t)12288 * 7168 * 2, 0},
        {"mxfp4", true, 3072, 3584, 3072 * 3584 / 2, 3072 * 3584 / 32},
        {"mxfp4", true, 3584, 3072, 3584 * 3072 / 2, 3584 * 3072 / 32},
    };
    fprintf(out,
            "kernels\tkernel\trows\tcols\tbatch\tthreads\tweight_GB/s\tread_GB/s\tof_read\t"
            "GFLOP/s\tpeak_GFLOP/s\tof_peak\tfnv_%d_rows\n",
            BENCH_HASH_ROWS);
    k3_pool *pool[BENCH_MAX_POOLS] = {NULL};
    int rc = K3_OK, n = 0;
    for (int t = 1; rc == K3_OK; t = t * 2 < max_threads ? t * 2 : max_threads) {
        if (!(pool[n++] = pool_open(t))) rc = K3_ENOMEM;
        if (t == max_threads) break;
    }
    for (size_t i = 0; rc == K3_OK && i < sizeof shapes / sizeof *shapes; i++)
        rc = bench_one_shape(&shapes[i], max_threads, pool, only, out);
    for (int i = 0; i < n; i++) pool_close(pool[i]);
    return rc;
}

static int engine_open_headers(k3_engine **e, const cli_args *a, const char *dir, console *con,
                               bool has_use_for_sums);

/* The reader before the engine is there: its buffers are gone then. */
static int bench_reader(bench_state *b) {
    k3_engine *e = NULL;
    int rc = model_find(b->a, &b->dir);
    if (rc == DONE) rc = engine_open_headers(&e, b->a, b->dir, &b->con, false);
    if (rc != DONE) return rc;
    uint64_t block = k3_engine_shape(e)->expert_bytes;
    k3_engine_close(e);
    rc = reader_open(&b->reader, b->dir, block ? block : 1 << 20);
    return rc == DONE ? reader_find(&b->reader, b->a->ram) : rc;
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

static int cmd_bench(const cli_args *a) {
    bench_state b;
    uint64_t logits_fnv = 0;
    if (a->kernels_only + (a->replay != NULL) + (a->n_hop > 0) > 1)
        return fail(FAIL_USAGE, "bench: --kernels-only, --replay and --hop are one thing each");
    if (a->kernels_only) {
        k3_error err = {{0}};
        int most;
        if (!k3_machine_table(a->kernels, (int)a->threads, &most, &err))
            return fail_status(K3_EUSAGE, &err);
        int status = bench_kernels(most, a->kernels, stdout);
        return status == K3_OK ? DONE
                               : fail(exit_code(status), "bench --kernels-only: out of memory");
    }
    if (a->n_hop) return bench_hop(a);
    if (is_given(a, "--requests") || is_given(a, "--sustain"))
        return fail(FAIL_USAGE, "--requests and --sustain need --hop ADDR");
    if (a->replay) return bench_replay(a);
    if (a->write_pins) return fail(FAIL_USAGE, "--write-pins needs --replay FILE");
    memset(&b, 0, sizeof b);
    b.a = a;
    console_init(&b.con, a);
    int rc = a->reader ? bench_reader(&b) : DONE;
    if (rc == DONE) rc = bench_open(&b);
    if (rc == DONE) rc = bench_all(&b, &logits_fnv);
    if (rc == DONE && a->where) rc = where_print(&b.where, b.e);
    if (rc == DONE && a->reader) rc = bench_reader_row(&b);
    if (rc == DONE && is_given(a, "--expect") && logits_fnv != a->expect)
        rc = fail(FAIL_CHECK, "--expect: logits_fnv is %016llx, not %016llx",
                  (unsigned long long)logits_fnv, (unsigned long long)a->expect);
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

/* ==== 9. Trust: verify, plan, info =========================================================
 *
 * verify reads every byte that will ever be computed with, before a long run does. The
 * golden values tie the real weights to other people's programs: an engine can agree with
 * itself everywhere and still be wrong. plan says where a budget goes and what a token then
 * reads, info what the model is; neither reads a weight.
 */

/* Logits of the last of ids 3 4 5 6 7 through all 93 layers of the released weights, f32
 * activations, every eps 1e-5: the ten largest and the mean over the vocabulary, as
 * published with kimi-k3-in-c (tests/fixtures/golden, Apache-2.0), where a torch and a C
 * program agree to 7.9e-6 (K3-SPEC 8). */
static const struct {
    uint32_t id;
    float logit;
} GOLDEN[10] = {{2494, 15.02195f}, {220, 12.80881f},   {15, 12.72964f},  {382, 12.63853f},
                {16, 12.29995f},   {19081, 12.09914f}, {397, 12.06660f}, {17, 12.00401f},
                {87, 11.97334f},   {701, 11.82532f}};
static const double GOLDEN_MEAN = -0.46254;
static const double GOLDEN_LIMIT = 1e-3;
static const uint32_t GOLDEN_IDS[] = {3, 4, 5, 6, 7};
enum { GOLDEN_VOCAB = 163840, GOLDEN_LAYERS = 93 };

/* Print how far a row is from the golden values; FAIL_CHECK when that is too far. */
static int golden_compare(const float *row, size_t n_vocab) {
    double worst = 0, mean = 0, last = INFINITY;
    size_t n_same = 0, i_last = n_vocab;
    for (size_t i = 0; i < n_vocab; i++) mean += row[i];
    mean /= (double)n_vocab;
    printf("rank\tid\tlogit\tgolden_id\tgolden_logit\tdiff\n");
    for (size_t rank = 0; rank < COUNT(GOLDEN); rank++) {
        size_t best = n_vocab;
        for (size_t i = 0; i < n_vocab; i++) /* the largest after the last one, lowest id first */
            if ((row[i] < last || (row[i] == last && i > i_last)) &&
                (best == n_vocab || row[i] > row[best]))
                best = i;
        if (best == n_vocab) return fail(FAIL_CHECK, "fewer than ten finite logits");
        last = row[best];
        i_last = best;
        double diff = (double)row[GOLDEN[rank].id] - (double)GOLDEN[rank].logit;
        if (fabs(diff) > worst) worst = fabs(diff);
        n_same += best == GOLDEN[rank].id;
        printf("%zu\t%zu\t%.5f\t%u\t%.5f\t%+.1e\n", rank + 1, best, (double)row[best],
               (unsigned)GOLDEN[rank].id, (double)GOLDEN[rank].logit, diff);
    }
    printf("golden: %zu of 10 ranks agree, largest difference %.1e, mean %.5f (golden %.5f)\n",
           n_same, worst, mean, GOLDEN_MEAN);
    if (n_same == COUNT(GOLDEN) && worst <= GOLDEN_LIMIT &&
        fabs(mean - GOLDEN_MEAN) <= GOLDEN_LIMIT)
        return DONE;
    return fail(FAIL_CHECK,
                "the golden logits are not reproduced (limit %.0e, same ten ids in order)",
                GOLDEN_LIMIT);
}

static int verify_golden(const cli_args *a, const char *dir, console *con) {
    k3_engine *e = NULL;
    timeline line;
    k3_error err = {{0}};
    memset(&line, 0, sizeof line);
    k3_options o = engine_options(a, dir, con);
    o.context = 16;
    int rc = engine_open(&e, &o);
    if (rc == DONE) rc = timeline_open(&line, e, a);
    if (rc == DONE) {
        int status = timeline_feed(&line, GOLDEN_IDS, COUNT(GOLDEN_IDS), &err);
        console_clear(con);
        rc = status < 0 ? fail_status(status, &err) : golden_compare(line.row, line.n_vocab);
    }
    timeline_close(&line);
    k3_engine_close(e);
    return rc;
}

static uint64_t expert_count(const k3_shape *s) { return moe_layers(s) * s->n_experts; }

/* Open for questions: headers only. */
static int engine_open_headers(k3_engine **e, const cli_args *a, const char *dir, console *con,
                               bool has_use_for_sums) {
    k3_options o = engine_options(a, dir, con);
    o.headers_only = true;
    o.no_check = o.no_check || !has_use_for_sums;
    return engine_open(e, &o);
}

/* What comes after a model that is whole: text needs its tokenizer, a long run wants sums and a plan. */
static void verify_say_next(const cli_args *a, const char *dir, bool has_sums) {
    char path[4352];
    if (a->quiet) return;
    snprintf(path, sizeof path, "%s/tiktoken.model", dir);
    if (access(path, R_OK) != 0)
        say("note: %s is absent: ids only, no text; download it as well", path);
    if (!has_sums && !a->write_sums)
        say("next: `k3 verify --write-sums --model %s` keeps checksums, and every later read is "
            "compared with them",
            dir);
    else
        say("next: `k3 plan --model %s` says what a token and a prompt take here, `k3 chat --model "
            "%s` begins",
            dir, dir);
}

static int cmd_verify(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    k3_error err = {{0}};
    char experts[32], trunk[32];
    console_init(&con, a);
    int rc = model_find(a, &dir);
    if (rc != DONE) return rc;
    signals_catch();
    rc = engine_open_headers(&e, a, dir, &con, true);
    if (rc != DONE) goto done;
    const k3_shape *s = k3_engine_shape(e);
    if (a->golden && (s->vocab_size != GOLDEN_VOCAB || s->n_layers != GOLDEN_LAYERS)) {
        rc = fail(
            FAIL_USAGE,
            "--golden: its values belong to the released weights (%d layers, vocabulary %d); this "
            "model has %u and %u",
            GOLDEN_LAYERS, GOLDEN_VOCAB, (unsigned)s->n_layers, (unsigned)s->vocab_size);
        goto done;
    }
    int64_t n =
        a->write_sums ? k3_engine_write_sums(e, a->no_check, &err) : k3_engine_verify(e, &err);
    console_clear(&con);
    if (n < 0) {
        rc = fail_status((int)n, &err);
        goto done;
    }
    printf(
        "%s: headers, %lld of %llu experts (%s) and the trunk (%s) read and checked%s: no fault\n",
        dir, (long long)n, (unsigned long long)expert_count(s),
        fmt_bytes(experts, (uint64_t)n * s->expert_bytes), fmt_bytes(trunk, s->trunk_bytes),
        k3_engine_plan(e)->has_sums ? ", sums too"
        : a->write_sums             ? ", sums written"
                                    : "");
    if (fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && a->golden) rc = verify_golden(a, dir, &con);
    if (rc == DONE) verify_say_next(a, dir, k3_engine_plan(e)->has_sums);
done:
    k3_engine_close(e);
    return rc;
}

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
    snprintf(note, sizeof note, "of trunk; a chunk of a prompt is at most %u positions",
             (unsigned)p->chunk);
    plan_row("a chunk reads", p->streamed_bytes, note);
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
    f.core_flops = (double)a->gflops * 1e9;
    f.is_pinned_chat = a->released;
    f.n_chat = a->released ? RELEASED_CHAT_IDS : 0;
    if (!a->released && k3_tokenizer_open(&t, dir, NULL) >= 0) f.n_chat = chat_template_ids(t);
    k3_tokenizer_close(t);
    fflush(stdout);
    if (forecast_print(&f) < 0 && !a->quiet)
        say("note: these cores could not be measured; --gflops N says how fast they are");
}

/* The way on from a plan. */
static void plan_say_next(const cli_args *a, const char *dir) {
    if (a->quiet) return;
    if (a->released)
        say("next: `hf download moonshotai/Kimi-K3 --local-dir DIR` (of `pip install -U "
            "huggingface_hub`; 1.56 TB), then `k3 verify --model DIR`");
    else if (a->model)
        say("next: `k3 chat --model %s` or `k3 run --model %s PROMPT`, with the same --ram and "
            "--context%s",
            dir, dir, a->reader || a->disk > 0 ? "" : "; `k3 plan --reader` measures this disk");
    else
        say("next: `k3 plan --released` plans for the real model");
}

/* The directory to plan for; with --released, one that holds a config.json and nothing else. */
static int plan_locate(const cli_args *a, const char **dir) {
    static char released[4200];
    if (!a->released) return model_find(a, dir);
    if (a->model || a->pins || a->reader)
        return fail(FAIL_USAGE, "--released is a plan without files: not with %s",
                    a->model  ? "--model"
                    : a->pins ? "--pins"
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
    const uint64_t plenty = (uint64_t)1 << 50;
    k3_options o = engine_options(a, dir, con);
    k3_error err = {{0}};
    o.headers_only = true;
    o.config_only = a->released;
    ram_say(con, &o);
    int status = k3_engine_open(e, &o, &err);
    *asked = a->ram;
    if (status == K3_EBUDGET) { /* not even the tables fit */
        o.ram_bytes = plenty;
        status = k3_engine_open(e, &o, &err);
    } else if (status >= 0) {
        *asked = k3_engine_plan(*e)->ram_bytes;
    }
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

static int cmd_plan(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    uint64_t asked = 0;
    if ((is_given(a, "--disk") || is_given(a, "--disk-rate")) && !(a->disk > 0))
        return fail(FAIL_USAGE, "--disk: a disk of 0 GB/s reads nothing");
    console_init(&con, a);
    int rc = plan_locate(a, &dir);
    if (rc == DONE) rc = plan_open(&e, a, dir, &con, &asked);
    if (rc != DONE) return rc;
    const k3_plan *p = k3_engine_plan(e);
    plan_split(p, k3_engine_shape(e), asked, !a->ram);
    float disk = a->disk;
    if (a->reader) rc = plan_measure(dir, k3_engine_shape(e)->expert_bytes, a->ram, &disk);
    plan_reads(p, k3_engine_shape(e), disk);
    if (rc == DONE) plan_prompts(a, e, dir, disk);
    if (fflush(stdout) != 0 && rc == DONE) rc = fail_stdout(errno);
    if (rc == DONE && asked < p->floor_bytes)
        rc = fail(FAIL_BUDGET,
                  "a budget of %llu bytes is below the floor of this model with a context of %llu: "
                  "give at least %llu bytes (%.2f GiB) with --ram, or a smaller --context",
                  (unsigned long long)asked, (unsigned long long)p->context,
                  (unsigned long long)p->floor_bytes, (double)p->floor_bytes / 0x1p30);
    if (rc == FAIL_BUDGET && bytes_typed) say_unit();
    if (rc == DONE) plan_say_next(a, dir);
    k3_engine_close(e);
    return rc;
}

static void info_geometry(const k3_shape *s) {
    unsigned n_mla = 0;
    for (uint32_t il = 0; il < s->n_layers; il++) n_mla += s->is_mla[il];
    printf("layers       %u: %u KDA, %u MLA; %u dense, %u with experts; AttnRes block %u\n",
           (unsigned)s->n_layers, (unsigned)s->n_layers - n_mla, n_mla, (unsigned)s->n_dense,
           (unsigned)(s->n_layers - s->n_dense), (unsigned)s->block_size);
    printf("hidden       %u, vocabulary %u, end of message %u, positions up to %u\n",
           (unsigned)s->hidden, (unsigned)s->vocab_size, (unsigned)s->eos_id,
           (unsigned)s->max_position);
    printf("KDA          %u heads x %u, convolution %u\n", (unsigned)s->kda_heads,
           (unsigned)s->kda_dim, (unsigned)s->conv_width);
    printf("MLA          %u heads, q_lora %u, kv_lora %u, nope %u, rope %u, v %u\n",
           (unsigned)s->n_heads, (unsigned)s->q_lora, (unsigned)s->kv_lora, (unsigned)s->nope_dim,
           (unsigned)s->rope_dim, (unsigned)s->v_dim);
    printf("experts      %u a layer, top %u, latent %u, inter %u; shared %u; dense inter %u\n",
           (unsigned)s->n_experts, (unsigned)s->top_k, (unsigned)s->latent,
           (unsigned)s->expert_inter, (unsigned)s->n_shared, (unsigned)s->dense_inter);
}

/* Sizes, and the least memory that runs one context. */
static void info_memory(const k3_shape *s, const k3_plan *p) {
    char one[32], all[32], trunk[32], state[32], cache[32], least[32];
    printf("experts      %llu x %s = %s\n", (unsigned long long)expert_count(s),
           fmt_bytes(one, s->expert_bytes), fmt_bytes(all, s->expert_bytes * expert_count(s)));
    printf("trunk        %s\n", fmt_bytes(trunk, s->trunk_bytes));
    printf("one context  %s of state + %llu positions x %llu B = %s of cache\n",
           fmt_bytes(state, s->state_bytes), (unsigned long long)p->context,
           (unsigned long long)s->pos_bytes, fmt_bytes(cache, s->pos_bytes * p->context));
    printf("needs        %s at least; `k3 plan` says what more is good for\n",
           fmt_bytes(least, p->floor_bytes));
}

/* How many threads compute without --threads, and why so many. */
static void info_threads(const k3_engine *e) {
    char why[96];
    machine_cpus_say(machine_cpus_here(), why, sizeof why);
    printf("threads      %d: %s\n", k3_engine_threads(e), why);
}

/* The names alone, for scripts. */
static int info_kernels_list(void) {
    bool is_first = true;
    for (const char *const *name = k3_kernels_linked(); *name; name++) {
        if (!k3_kernels_is_supported(*name)) continue;
        printf("%s%s", is_first ? "" : " ", *name);
        is_first = false;
    }
    puts("");
    return DONE;
}

static int cmd_info(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    if (a->kernels_list) return info_kernels_list();
    console_init(&con, a);
    int rc = model_find(a, &dir);
    if (rc == DONE) rc = engine_open_headers(&e, a, dir, &con, false);
    if (rc != DONE) return rc;
    printf("model        %s\n", dir);
    info_geometry(k3_engine_shape(e));
    info_memory(k3_engine_shape(e), k3_engine_plan(e));
    printf("kernels      ");
    for (const char *const *name = k3_kernels_linked(); *name; name++)
        printf("%s%s ", *name, k3_kernels_is_supported(*name) ? "" : " (not on this CPU)");
    printf("- best: %s\n", k3_engine_kernels(e));
    info_threads(e);
    printf("numerics     %s\n", K3_NUMERICS_ID);
    printf("version      %s%s%s\n", K3_VERSION, version_commit()[0] ? ", commit " : "",
           version_commit());
    k3_engine_close(e);
    return DONE;
}

/* ---- cache ---- */

typedef struct {
    uint64_t n, n_bytes, n_bad, n_closed; /* damaged; not to be opened */
    bool checks; /* every byte */
} cache_walk;

static int cache_visit(void *user, const char *path, const k3_state_head *head, int rc,
                       const k3_error *why) {
    cache_walk *w = user;
    k3_state_head again;
    k3_error err = *why;
    const char *slash = strrchr(path, '/');
    char size[32], used[32] = "?";
    time_t at = (time_t)head->used_s;
    struct tm tm;
    if (interrupted) return K3_ECANCEL;
    if (rc >= 0 && w->checks) rc = k3_state_check(path, true, &again, &err);
    if (rc == K3_EIO && access(path, F_OK) != 0) return 0; /* evicted meanwhile: no fault */
    w->n++;
    w->n_bytes += head->file_bytes;
    w->n_bad += rc < 0 && rc != K3_EIO;
    w->n_closed += rc == K3_EIO;
    if (rc < 0) {
        say("%s", err.text);
    } else if (!w->checks) {
        if (localtime_r(&at, &tm)) strftime(used, sizeof used, "%Y-%m-%d %H:%M:%S", &tm);
        printf("%10llu positions %12s  %s  model %016llx  %s%s\n", (unsigned long long)head->n_pos,
               fmt_bytes(size, head->file_bytes), used, (unsigned long long)head->print.sampled,
               slash ? slash + 1 : path,
               head->n_doubtful > 0 ? "  with far answers that nobody compared" : "");
    }
    return 0;
}

static int cache_remove(const cli_args *a) {
    k3_error err = {{0}};
    uint64_t bytes = 0;
    char size[32];
    int64_t n = k3_cache_trim(a->arg2, a->cache_size, &bytes, &err);
    if (n < 0) return fail_status((int)n, &err);
    printf("%lld removed, %s\n", (long long)n, fmt_bytes(size, bytes));
    return DONE;
}

static int cmd_cache(const cli_args *a) {
    static const char *const verb[] = {"ls", "rm", "verify"};
    cache_walk w = {.n = 0};
    k3_error err = {{0}};
    char size[32];
    size_t i = 0;
    while (i < COUNT(verb) && (!a->arg || strcmp(a->arg, verb[i]) != 0)) i++;
    if (i == COUNT(verb) || !a->arg2)
        return fail(FAIL_USAGE, "cache takes ls, rm or verify, and a directory: `k3 cache ls DIR`");
    if (is_given(a, "--cache-size") && i != 1)
        return fail(FAIL_USAGE, "--cache-size goes with `k3 cache rm`");
    if (i == 1) return cache_remove(a);
    signals_catch();
    w.checks = i == 2;
    int64_t n = k3_cache_list(a->arg2, cache_visit, &w, &err);
    if (n < 0) return fail_status((int)n, &err);
    printf("%llu entries, %s%s\n", (unsigned long long)w.n, fmt_bytes(size, w.n_bytes),
           w.checks && !w.n_bad && !w.n_closed ? ", every byte checked: no fault" : "");
    if (w.n_closed && !w.n_bad)
        return fail(FAIL_IO, "%llu cannot be read", (unsigned long long)w.n_closed);
    if (w.n_bad)
        return fail(FAIL_CHECK, "%llu damaged; the next run that wants one removes it",
                    (unsigned long long)w.n_bad);
    return DONE;
}

/* ==== 10. Help and main ==============================================================
 *
 * The help of a command is its row here and its options from the table.
 */
static const cli_command COMMAND[] = {
    {"run", RUN, "PROMPT", cmd_run, "continue a prompt, text streamed as it is made",
     "k3 run [options] PROMPT | -",
     "Runs the prompt and prints what follows it. The prompt is taken as it is: no chat markup is\n"
     "added, and what looks like markup is text unless --control is given. stdout gets the\n"
     "answer, stderr the rest, with the two hashes that must be the same on every machine.\n"
     "Ctrl-C ends the answer cleanly, a second one kills.\n",
     "  k3 run \"The capital of France is\"\n"
     "  k3 run --model /data/Kimi-K3 --ram 64G --tokens 40 --prompt-file question.txt\n"
     "  k3 run --json --tokens 0 --dump-logits rows.f32 --ids 3,4,5,6,7\n"
     "  k3 run --save talk.k3s --prompt-file a.txt && k3 run --load talk.k3s \" And then\"\n"},
    {"chat", CHAT, NULL, cmd_chat, "talk with the model; on a terminal or through pipes",
     "k3 chat [options]",
     "On a terminal: line editing and history; /help lists the commands. Ctrl-C stops a reply and\n"
     "keeps what was said, Ctrl-D leaves. Otherwise each line of stdin is one turn, or a command\n"
     "if it starts with / (// for a message that does); blank lines are passed over. Text that\n"
     "looks like markup is text. A turn computes its new ids only.\n",
     "  k3 chat --effort low\n"
     "  k3 chat --model /data/Kimi-K3 --ram 64G --context 32768 --cache /data/k3-cache\n"
     "  echo \"What is the capital of France?\" | k3 chat --temperature 0\n"
     "  echo '{\"role\":\"user\",\"content\":\"Hello!\"}' | k3 chat --json\n"
     "  k3 chat --render conversation.json\n"},
    {"tokenize", TOKENIZE, "TEXT", cmd_tokenize, "text to ids and back",
     "k3 tokenize [options] TEXT | -",
     "One line for each id: the id, a tab, its bytes, escaped as in C where they are not\n"
     "printable UTF-8.\n",
     "  k3 tokenize \"12 + 30 =\"\n"
     "  k3 tokenize --ids-only --prompt-file a.txt\n"
     "  k3 tokenize --decode --ids 343,336,327,444,1489,311\n"},
    {"bench", BENCH, NULL, cmd_bench, "speeds and hashes as a table (TSV)", "k3 bench [options]",
     "Runs each prompt from an empty context and prints a row: ids a second in and out, ids_fnv,\n"
     "logits_fnv, settings; then, a mean of the repeats, bytes read and seconds waited for them,\n"
     "the share of experts in memory when wanted and of guesses used, bytes read in vain. Slots\n"
     "stay filled between prompts. The `# total` row hashes the logits_fnv of all rows.\n",
     "  k3 bench --threads 4 --repeats 3\n"
     "  k3 bench --expect $(k3 bench -q --kernels ref | awk -F'\\t' '/^# total/ {print $7}')\n"
     "  k3 bench --kernels-only --threads 8\n"
     "  k3 bench --model /data/Kimi-K3 --hop 10.0.0.7:7383 --psk-file key\n"},
    {"verify", VERIFY, NULL, cmd_verify, "read and check every weight of a model",
     "k3 verify [options]",
     "Checks all headers, then reads every tensor of the text model once: lengths, scale codes,\n"
     "finite values. Worth its time after a download.\n",
     "  k3 verify --model /data/Kimi-K3\n"
     "  k3 verify --model /data/Kimi-K3 --golden\n"},
    {"plan", PLAN, NULL, cmd_plan, "where a memory budget goes, what a token then reads",
     "k3 plan [options]",
     "Reads headers only, and with --released not even those. Divides --ram as run and bench do,\n"
     "and says what is read for each token and for prompts of 100, 1,000 and 10,000 ids, and how "
     "long\n"
     "that takes. A budget below the floor exits 4 and shows the split at the floor;\n"
     "the floor grows with --context, --threads and, when it is given, --chunk.\n",
     "  k3 plan --released --ram 64G --threads 16 --gflops 40\n"
     "  k3 plan --model /data/Kimi-K3 --ram 64G --context 32768\n"
     "  k3 plan --model /data/Kimi-K3 --ram 8G --disk 6.3\n"},
    {"info", INFO, NULL, cmd_info, "geometry, sizes, kernels, memory a context needs",
     "k3 info [options]", "Reads headers only, no weights.\n",
     "  k3 info --model /data/Kimi-K3 --context 131072\n"},
    {"cache", CACHE, "ls|rm|verify DIR", cmd_cache, "what `run --cache` keeps: list, remove, check",
     "k3 cache ls|rm|verify DIR",
     "ls: an entry a line, most recently used first. rm: all of them, or down to --cache-size; a\n"
     "running process loses nothing but speed. verify: reads every byte, exit 5 if one is wrong.\n"
     "Only files that `run --cache` could have written are looked at.\n",
     "  k3 cache ls /data/k3-cache\n"
     "  k3 cache rm --cache-size 5G /data/k3-cache\n"},
    {"slice", SLICE, NULL, cmd_slice, "write the hottest experts into a directory of their own",
     "k3 slice --pins FILE --size SIZE --out DIR [options]",
     "The slice has config.json, shards in the official format with those experts byte for byte,\n"
     "an index, and k3.slice: which model they are of, and a checksum of each. `k3-tier --slice`\n"
     "serves it on a machine that has nothing else of the model. Killed or interrupted it leaves\n"
     "no k3.slice; the same command goes on behind the last whole shard.\n",
     "  k3 run --model /data/Kimi-K3 --trace trace --prompt-file a.txt\n"
     "  k3 bench --replay trace --write-pins pins\n"
     "  k3 slice --model /data/Kimi-K3 --pins pins --size 58G --out /mnt/usb/hot\n"},
    {"stage", STAGE, NULL, cmd_stage, "bring experts to a box that has no files",
     "k3 stage --to ADDR [options]",
     "Sends experts to a running k3-tier, which needs no files: the first who stages says which model\n"
     "they are of. The box must let us: by the key of its --stage-psk-file, a certificate of the name in\n"
     "its --stage-name, or its unix: socket and the same user. Each expert is checked there before it\n"
     "counts; what the box can read for itself it reads, and only compares with ours.\n"
     "What the box has is not sent twice, so after a broken connection just start it again.\n"
     "Exit 3: the box has another model; 4: no room for one expert; 5: one came there damaged.\n",
     "  k3 stage --model /data/Kimi-K3 --to 10.0.0.7:7383 --psk-file stage-key\n"
     "  k3 stage --model /data/Kimi-K3 --to tls:box:7383 --tier-ca ca.pem --tier-cert me.pem\n"
     "  k3 stage --model /data/Kimi-K3 --to unix:/run/k3.sock --pins pins --size 20G\n"},
};

static const cli_command *command_find(const char *name) {
    for (size_t i = 0; i < COUNT(COMMAND); i++)
        if (strcmp(COMMAND[i].name, name) == 0) return &COMMAND[i];
    return NULL;
}

static int fail_unknown_command(const char *name) {
    const char *best = strcmp(name, "help") == 0 ? name : NULL;
    size_t distance = 4;
    for (size_t i = 0; i < COUNT(COMMAND); i++) nearest(name, COMMAND[i].name, &best, &distance);
    nearest(name, "help", &best, &distance);
    if (best) return fail(FAIL_USAGE, "unknown command '%s': did you mean %s?", name, best);
    return fail(FAIL_USAGE, "unknown command '%s': see `k3 help`", name);
}

/* One row of the table, its help broken where the table breaks it. */
static void help_option(const cli_option *o) {
    char left[40];
    const char *line = o->help;
    bool joins = o->value && o->value[0] == '[';
    snprintf(left, sizeof left, "%s%s%s", o->name, o->value && !joins ? " " : "",
             o->value ? o->value : "");
    printf("  %-22s ", left);
    for (const char *end; (end = strchr(line, '\n')) != NULL; line = end + 1)
        printf("%.*s\n%25s", (int)(end - line), line, "");
    if (o->start)
        printf("%s (default: %s)\n", line, o->start);
    else
        printf("%s\n", line);
}

static int help_command(const cli_command *cmd) {
    printf("usage: %s\n\n%s", cmd->usage, cmd->about);
    for (int g = 0; g < N_GROUP; g++) {
        bool has_title = false;
        for (size_t i = 0; i < COUNT(OPTION); i++) {
            if (!(OPTION[i].who & cmd->bit) || (int)OPTION[i].group != g) continue;
            if (!has_title) printf("\n%s\n", GROUP_TITLE[g]);
            has_title = true;
            help_option(&OPTION[i]);
        }
    }
    printf("\nExamples\n%s", cmd->examples);
    return DONE;
}

/* ---- What manual.c sees of the tables ---- */

bool command_get(size_t i, command_view *out) {
    if (i >= COUNT(COMMAND)) return false;
    const cli_command *c = &COMMAND[i];
    *out = (command_view){c->name, c->summary, c->usage, c->about, c->examples};
    return true;
}

bool section_get(const char *command, size_t i, option_section *out) {
    const cli_command *cmd = command_find(command);
    if (!cmd || i >= N_GROUP) return false;
    out->title = GROUP_TITLE[i];
    out->n = 0;
    for (size_t k = 0; k < COUNT(OPTION) && out->n < COUNT(out->option); k++) {
        const cli_option *o = &OPTION[k];
        if (!(o->who & cmd->bit) || o->group != i) continue;
        out->option[out->n++] =
            (option_view){o->name, o->value, o->start, o->help, o->kind == KIND_CHOICE};
    }
    return true;
}

const char HELP_COMMON[] =
    "Without --model and K3_MODEL every command uses the small bundled model. --option VALUE\n"
    "and --option=VALUE are the same, -- ends options, -h and -V are --help and --version.\n"
    "stdout carries the answer and nothing else. No option and no environment variable changes\n"
    "the bits, except those that must: model (K3_MODEL too), prompt, sampling, --lora-eps.\n";

const char HELP_EXITS[] = "  0  done                            3  the model is refused\n"
                          "  1  a file, memory, a full context  4  the memory bound is too small\n"
                          "  2  wrong usage                     5  a hash or check does not match\n"
                          "  130  interrupted; what was said so far was printed\n";

/* The commands by what one wants to do. */
static const struct {
    const char *title;
    unsigned who;
} TASK[] = {{"Make text", RUN | CHAT | TOKENIZE},
            {"Know the model and this machine", PLAN | INFO | VERIFY},
            {"Measure", BENCH},
            {"Keep what was computed", CACHE},
            {"Bring experts to other machines (k3-tier)", SLICE | STAGE}};

typedef char tasks_name_every_command[(RUN | CHAT | TOKENIZE | PLAN | INFO | VERIFY | BENCH |
                                       CACHE | SLICE | STAGE) == ANY
                                          ? 1
                                          : -1];

static int help_all(void) {
    puts("k3 " K3_VERSION " - run Kimi K3, exact, on a machine that holds a few percent of it\n\n"
         "usage: k3 COMMAND [options]       k3 help COMMAND: every option, with its default\n"
         "\n"
         "Begin with\n"
         "  k3 run \"The capital of France is\"   a small bundled model answers, at once\n"
         "  k3 plan --released --ram 64G         what the real one would take here, before a "
         "download\n"
         "  k3 chat --model DIR                  talk with the model in DIR (or set K3_MODEL=DIR)");
    for (size_t t = 0; t < COUNT(TASK); t++) {
        printf("\n%s\n", TASK[t].title);
        for (size_t i = 0; i < COUNT(COMMAND); i++)
            if (COMMAND[i].bit & TASK[t].who)
                printf("  %-10s %s\n", COMMAND[i].name, COMMAND[i].summary);
    }
    printf("\n%s\nExit codes\n%s", HELP_COMMON, HELP_EXITS);
    return DONE;
}

/* For packages: names, man pages, completion. */
static int help_generate(const char *what, const char *name) {
    if (strcmp(what, "--list") == 0)
        for (size_t i = 0; i < COUNT(COMMAND); i++) puts(COMMAND[i].name);
    else if (strcmp(what, "--completion") == 0)
        completion_print();
    else if (!manual_print(name))
        return fail_unknown_command(name);
    return DONE;
}

static int cmd_help(int argc, char **argv) {
    if (argc == 0 || strcmp(argv[0], "--help") == 0 || strcmp(argv[0], "-h") == 0)
        return help_all();
    bool is_man = strcmp(argv[0], "--man") == 0;
    if (argc > 1 + is_man)
        return fail(FAIL_USAGE, "help takes one command, '%s' is a second one", argv[1 + is_man]);
    if (is_man || strcmp(argv[0], "--list") == 0 || strcmp(argv[0], "--completion") == 0)
        return help_generate(argv[0], argc > 1 ? argv[1] : NULL);
    const cli_command *cmd = command_find(argv[0]);
    if (cmd) return help_command(cmd);
    return strcmp(argv[0], "help") == 0 ? help_all() : fail_unknown_command(argv[0]);
}

/* An option where the command should be. */
static int fail_no_command(const char *arg) {
    size_t n = strcspn(arg, "=");
    const cli_option *o = option_find(arg, n, ANY);
    const char *best = NULL;
    size_t distance = 4;
    if (o)
        return fail(FAIL_USAGE, "%s comes after a command, such as `k3 run %s ...`", o->name, arg);
    nearest(arg, "--help", &best, &distance);
    nearest(arg, "--version", &best, &distance);
    if (best) return fail(FAIL_USAGE, "unknown option %s: did you mean %s?", arg, best);
    return fail(FAIL_USAGE, "unknown option %s: see `k3 help`", arg);
}

/* ---- Files that are named ---- */

/* The file that row i of the table was given; NULL: none. */
static const char *file_given(const cli_args *a, size_t i) {
    const cli_option *o = &OPTION[i];
    if (!a->given[i] || (o->kind != KIND_READ && o->kind != KIND_WRITE && o->kind != KIND_OPTIONAL))
        return NULL;
    const char *path = *(const char *const *)(const void *)((const char *)a + o->at);
    return o->kind == KIND_OPTIONAL && !path[0] ? NULL : path;
}

/* The same file, or the same name of one that is not there yet. */
static bool is_same_file(const char *a, const char *b) {
    struct stat x, y;
    bool has_a = stat(a, &x) == 0, has_b = stat(b, &y) == 0;
    if (has_a != has_b) return false;
    if (has_a) return S_ISREG(x.st_mode) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
    const char *leaf_a = strrchr(a, '/'), *leaf_b = strrchr(b, '/');
    leaf_a = leaf_a ? leaf_a + 1 : a;
    leaf_b = leaf_b ? leaf_b + 1 : b;
    if (strcmp(leaf_a, leaf_b) != 0) return false;
    char dir_a[4096], dir_b[4096];
    snprintf(dir_a, sizeof dir_a, "%.*s.", (int)(leaf_a - a), a);
    snprintf(dir_b, sizeof dir_b, "%.*s.", (int)(leaf_b - b), b);
    return stat(dir_a, &x) == 0 && stat(dir_b, &y) == 0 && x.st_dev == y.st_dev &&
           x.st_ino == y.st_ino;
}

/* What is written is written over: it must be nothing that is read, nor what another option writes. A
 * state may go on in place. */
static int args_for_files(const cli_args *a) {
    for (size_t i = 0; i < COUNT(OPTION); i++) {
        const char *path = file_given(a, i), *name = OPTION[i].name, *other;
        if (!path) continue;
        if (!path[0]) return fail(FAIL_USAGE, "%s: an empty name; give a file's", name);
        if (OPTION[i].kind == KIND_READ) continue;
        if (strcmp(path, "-") == 0)
            return fail(FAIL_USAGE, "%s -: stdout is for the answer; give a file's name", name);
        for (size_t k = 0; k < COUNT(OPTION); k++) {
            if (k == i || !(other = file_given(a, k)) || !is_same_file(path, other)) continue;
            if (path == a->save && other == a->load) continue;
            return fail(FAIL_USAGE, "%s %s and %s %s are one file; %s", name, path, OPTION[k].name,
                        other,
                        OPTION[k].kind == KIND_READ ? "what is read would be written over"
                                                    : "two outputs need two");
        }
    }
    return DONE;
}

/* Options about boxes, and no box: a slip, and what it was to protect is not. How long a box is waited
 * for may be said without one: nothing is lost. */
static int args_for_boxes(const cli_args *a) {
    static const char *const name[] = {"--psk-file", "--tier-ca",    "--tier-cert",
                                       "--tier-key", "--tier-audit", "--tier-hedge"};
    size_t n = a->n_tier + a->gpu;
    if (is_given(a, "--tier-hedge") && n == 1)
        return fail(FAIL_USAGE,
                    "--tier-hedge: there is one box, and no second to ask; give two --tier");
    for (size_t i = 0; i < COUNT(name) && n + a->n_hop == 0 && !a->to; i++)
        if (is_given(a, name[i]))
            return fail(FAIL_USAGE, "%s: of which box? give --tier ADDR as well", name[i]);
    return DONE;
}

static int dispatch(int argc, char **argv) {
    cli_args a;
    bool wants_help = false;
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) {
        fputs("usage: k3 run | chat | tokenize | bench | verify | plan | info | cache | slice |\n"
              "          stage | help [options]\n"
              "try:   k3 run \"The capital of France is\"     or: k3 help\n",
              stderr);
        return FAIL_USAGE;
    }
    if (strcmp(name, "-V") == 0 || strcmp(name, "--version") == 0)
        return puts(version_text()) < 0 ? FAIL_IO : DONE;
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) return help_all();
    if (strcmp(name, "help") == 0) return cmd_help(argc - 2, argv + 2);
    if (name[0] == '-') return fail_no_command(name);
    const cli_command *cmd = command_find(name);
    if (!cmd) return fail_unknown_command(name);
    int rc = args_parse(&a, cmd, argc - 2, argv + 2, &wants_help);
    if (wants_help) return help_command(cmd);
    args_from_environment(&a, cmd);
    if (rc == DONE) rc = args_for_boxes(&a);
    if (rc == DONE) rc = args_for_files(&a);
    return rc != DONE ? rc : cmd->run(&a);
}

/* Each shard of each copy is open twice: as many files as the system lets this process have. */
static void files_allow(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur == r.rlim_max) return;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r); /* if not, opening says which file was one too many */
}

int main(int argc, char **argv) {
    stdio_guard();
    files_allow();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a write that says so is better */
    int rc = dispatch(argc, argv);
    if (fflush(stdout) != 0 && rc == DONE) rc = fail_stdout(errno);
    return rc;
}
