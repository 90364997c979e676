/* options.c - the options of `k3`: one table, one parser.
 *
 * Every option of every command is one row: name, what its value is called and how it is
 * read, where it is kept, who takes it, its default (read by the same parser), its range.
 * The parser, the help text and "did you mean" all come from here, so they cannot drift
 * apart. The same name may have two rows when two commands want different defaults.
 *
 * The parser is strict: a number is the whole string or an error, an option that a command does not
 * take is an error, the last of two wins. `--name=VALUE` and `--name VALUE` are the same; `--`
 * ends options. All of it is checked before any file is opened.
 */
#include "cli/options.h"

#include "cli/console.h"
#include "cli/reader.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const GROUP_TITLE[N_GROUP] = {
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

#define AT(field) offsetof(cli_args, field)

const cli_option OPTION[] = {
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
    {"--anew", NULL, KIND_FLAG, AT(anew), VERIFY, G_MEASURE, NULL, 0, 0,
     "begin at the beginning. Without it a check goes on where the last one was\n"
     "stopped: how far it came is kept in k3.verify beside the checksums, or\n"
     "else under XDG_CACHE_HOME/k3"},
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

const size_t N_OPTION = COUNT(OPTION);

/* `given` has a place for each row. */
STATIC_ASSERT(options_suffice, COUNT(OPTION) <= MAX_OPTION);
STATIC_ASSERT(default_context_is_one, DEFAULT_CONTEXT <= MAX_CONTEXT);

const cli_option *option_find(const char *name, size_t n, unsigned who) {
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

/* A number of bytes below this, without a unit, was hardly meant as bytes. */
#define LEAST_BYTES ((uint64_t)1 << 20)

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
    if (o->at == AT(ram) && value < LEAST_BYTES) unit_doubt(value);
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

int args_parse(cli_args *a, const cli_command *cmd, int argc, char **argv, bool *wants_help) {
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

void args_from_environment(cli_args *a, const cli_command *cmd) {
    const char *model = getenv("K3_MODEL");
    bool takes_model = option_find("--model", strlen("--model"), cmd->bit) != NULL;
    a->model_by = "--model";
    if (a->model || !takes_model || a->released || !model || !model[0]) return;
    a->model = model;
    a->model_by = "K3_MODEL";
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

int args_for_files(const cli_args *a) {
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

int args_for_boxes(const cli_args *a) {
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
