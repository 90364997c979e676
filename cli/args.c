/* args.c - every option of `k3`, as one table, and what must hold between options.
 *
 * A row says: name, what its value is called and how it is read, where it is kept, who takes it, its
 * default (read by the same parser), its range. The parser, the help text and "did you mean" all come
 * from here, so they cannot drift apart. The same name may have two rows when two commands want
 * different defaults. To add an option, add a field to cli_args and a row.
 */
#include "cli/args.h"

#include "cli/drafts.h"

#include "cli/console.h"
#include "k3_common.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define AT(field) offsetof(cli_args, field), sizeof((cli_args *)0)->field

const char *const GROUP_TITLE[N_GROUP] = {
    "Prompt",                         /* G_PROMPT  */
    "Generation",                     /* G_TEXT    */
    "Sampling",                       /* G_SAMPLE  */
    "State",                          /* G_STATE   */
    "Measuring",                      /* G_MEASURE */
    "Output",                         /* G_OUTPUT  */
    "Model and machine",              /* G_MODEL   */
    "Disk, where weights do not fit", /* G_DISK   */
    "Far boxes (k3-tier)",            /* G_TIER    */
    "Serving"                         /* G_SERVE   */
};

static const option_row OPTION[] = {
    {"--prompt-file", "FILE", KIND_READ, AT(prompt.file), RUN | TOKENIZE, G_PROMPT, NULL, 0, 0,
     "every byte of FILE, the last newline too; - is stdin"},
    {"--ids", "N,N,...", KIND_TEXT, AT(prompt.ids), RUN | TOKENIZE, G_PROMPT, NULL, 0, 0,
     "token ids instead of text"},
    {"--control", NULL, KIND_FLAG, AT(prompt.control), RUN | TOKENIZE | BENCH, G_PROMPT, NULL, 0, 0,
     "spellings such as <|open|> become control tokens; without it they are\n"
     "ordinary text, which is what text from elsewhere must be"},
    {"--system", "TEXT", KIND_TEXT, AT(chat.system), CHAT, G_PROMPT, NULL, 0, 0,
     "a system message before the first turn"},
    {"--render", "FILE", KIND_READ, AT(chat.render), CHAT, G_PROMPT, NULL, 0, 0,
     "print ids and segments of the conversation in FILE (JSON as OpenAI's API\n"
     "takes it: messages, tools; - is stdin) and run nothing"},
    {"--decode", NULL, KIND_FLAG, AT(prompt.decode), TOKENIZE, G_PROMPT, NULL, 0, 0,
     "print the bytes that --ids stand for, and nothing else"},

    {"--tokens", "N", KIND_COUNT, AT(tokens), RUN, G_TEXT, "256", 0, 1u << 31,
     "most ids to generate; 0 runs the prompt and says nothing"},
    {"--effort", "low|medium|high|max|none", KIND_CHOICE, AT(chat.effort), CHAT | SERVE, G_TEXT, "max", 0,
     0,
     "how much to think; none\n"
     "leaves the message that says so away"},
    {"--no-think", NULL, KIND_FLAG, AT(chat.no_think), CHAT | SERVE, G_TEXT, NULL, 0, 0,
     "answer at once, without a thinking channel"},
    {"--tokens", "N", KIND_COUNT, AT(tokens), CHAT | SERVE, G_TEXT, "0", 0, 1u << 31,
     "most ids of one reply, thinking included; 0: as many as the context\n"
     "holds"},
    {"--undo", "N", KIND_COUNT, AT(chat.undo), CHAT, G_TEXT, "1", 0, 64,
     "turns to keep room for in memory, so that /undo takes no time; more are\n"
     "kept where memory is left"},
    {"--stop", "TEXT", KIND_STOPS, AT(stop), RUN, G_TEXT, NULL, 0, MAX_STOP,
     "end where the answer contains TEXT, which is not printed (repeatable)"},
    {"--no-stop", NULL, KIND_FLAG, AT(no_stop), RUN, G_TEXT, NULL, 0, 0,
     "go on past the model's end of message, for hashes"},

    {"--temperature", "T", KIND_REAL, AT(sampler.temperature), RUN, G_SAMPLE, "0", 0, 100,
     "0 is greedy: always the likeliest id"},
    {"--temperature", "T", KIND_REAL, AT(sampler.temperature), CHAT | SERVE, G_SAMPLE, "1", 0, 100,
     "0 is greedy: always the likeliest id"},
    {"--top-k", "N", KIND_COUNT, AT(sampler.top_k), RUN | CHAT | SERVE, G_SAMPLE, "0", 0, UINT32_MAX,
     "draw among the N likeliest; 0 is off"},
    {"--top-p", "P", KIND_REAL, AT(sampler.top_p), RUN, G_SAMPLE, "1", 0, 1,
     "draw among the likeliest that together hold P; 1 is off"},
    {"--top-p", "P", KIND_REAL, AT(sampler.top_p), CHAT | SERVE, G_SAMPLE, "0.95", 0, 1,
     "draw among the likeliest that together hold P; 1 is off"},
    {"--draft", "off|auto|1|2|3|4|5|6|7", KIND_CHOICE, AT(draft), RUN | CHAT | SERVE, G_SAMPLE, "auto", 0, 0,
     "run ids ahead that repeat what the text said before, several in one pass\n"
     "over the weights; the text stays the same to the last bit. auto: as many as\n"
     "pay by what passes cost here and how often such ids were right; a number:\n"
     "always so many"},
    {"--draft", "off|auto|1|2|3|4|5|6|7", KIND_CHOICE, AT(draft), BENCH, G_SAMPLE, "off", 0, 0,
     "the same for the bench, where none is made unless asked for"},
    {"--seed", "N", KIND_COUNT, AT(sampler.seed), RUN | CHAT, G_SAMPLE, "0", 0, UINT64_MAX,
     "the same seed gives the same answer"},

    {"--load", "FILE", KIND_READ, AT(load), RUN, G_STATE, NULL, 0, 0,
     "go on from a saved state: the prompt continues its ids"},
    {"--load", "FILE", KIND_READ, AT(load), CHAT, G_STATE, NULL, 0, 0,
     "go on from a conversation that /save wrote, with its settings"},
    {"--save", "FILE", KIND_WRITE, AT(save), RUN, G_STATE, NULL, 0, 0,
     "keep the state at the end, every id of the answer included, also the one\n"
     "that ended it, and also when Ctrl-C ends it: the token at work is then\n"
     "finished first; FILE is whole or as it was"},
    {"--cache", "DIR", KIND_TEXT, AT(cache), RUN | CHAT | SERVE, G_STATE, NULL, 0, 0,
     "keep states of prompts and answers there, and skip what a prompt has in\n"
     "common with one of them; may be shared by any number of processes"},
    {"--cache-size", "SIZE", KIND_SIZE, AT(cache_size), RUN | CHAT | SERVE, G_STATE, "20G", 1, 0,
     "most that --cache keeps; the least recently used go first"},
    {"--cache-size", "SIZE", KIND_SIZE, AT(cache_size), CACHE, G_STATE, "0", 0, 0,
     "what `rm` leaves: the most recently used, no more than this"},

    {"--prompts", "FILE", KIND_READ, AT(bench.prompts), BENCH, G_MEASURE, NULL, 0, 0,
     "one prompt a line, `ids:1,2,3` for ids (default: five built in)"},
    {"--tokens", "N", KIND_COUNT, AT(tokens), BENCH, G_MEASURE, "32", 0, 1u << 31,
     "ids for each prompt, going on past the end of message"},
    {"--repeats", "N", KIND_COUNT, AT(bench.repeats), BENCH, G_MEASURE, "1", 1, MAX_REPEAT,
     "speeds are the median of N; hashes must agree, else exit 5"},
    {"--expect", "FNV", KIND_HASH, AT(bench.expect), BENCH, G_MEASURE, NULL, 0, 0,
     "exit 5 unless this is the logits_fnv of the `# total` row"},
    {"--kernels-only", NULL, KIND_FLAG, AT(bench.kernels_only), BENCH, G_MEASURE, NULL, 0, 0,
     "no model: every kernel set at K3's dimensions, against this machine's\n"
     "own read bandwidth and multiply-add peak; --threads is the most tried"},
    {"--sessions", "N", KIND_COUNT, AT(bench.sessions), BENCH, G_MEASURE, "0", 0, 32,
     "after the rows: N conversations in one pass for each token, against one\n"
     "alone, in paired rounds"},
    {"--hop", "ADDR", KIND_BOXES, AT(bench.hop), BENCH, G_MEASURE, NULL, 0, MAX_TIER,
     "no weights loaded: what a request to this k3-tier takes, part by part,\n"
     "and whether its sums are right; exit 5 if not, if a request has no\n"
     "answer, or if the box's memory grows (repeatable)"},
    {"--requests", "N", KIND_COUNT, AT(bench.requests), BENCH, G_MEASURE, "10000", 1, 1000000,
     "--hop: requests of each row, after 200 to warm up"},
    {"--sustain", "SECONDS", KIND_COUNT, AT(bench.sustain), BENCH, G_MEASURE, "60", 0, 86400,
     "--hop: then requests for so long, and the box's memory before and\n"
     "after"},
    {"--where", NULL, KIND_FLAG, AT(engine.is_timed), BENCH, G_MEASURE, NULL, 0, 0,
     "then also what the time went to, for prompts and for decoded tokens: the\n"
     "trunk's matrices, attention, experts, rows, the disk, serial steps, with how\n"
     "many threads were busy and how near to memory's speed weights went by"},
    {"--reader", NULL, KIND_FLAG, AT(reader), BENCH, G_MEASURE, NULL, 0, 0,
     "before and after, read whole experts at random with O_DIRECT as fast as\n"
     "the disk gives them; the last line compares with what the runs read"},
    {"--reader", NULL, KIND_FLAG, AT(reader), PLAN, G_MEASURE, NULL, 0, 0,
     "seconds for this disk: read whole experts at random, past the page\n"
     "cache, for some ten seconds"},
    {"--replay", "FILE", KIND_READ, AT(bench.replay), BENCH, G_MEASURE, NULL, 0, 0,
     "no model: what each policy would have had in memory of a routing trace\n"
     "(`k3 run --trace`), for slots from 1 a layer up"},
    {"--write-pins", "FILE", KIND_WRITE, AT(bench.write_pins), BENCH, G_MEASURE, NULL, 0, 0,
     "with --replay: the experts of the trace by weight, as --pins takes them"},
    {"--golden", NULL, KIND_FLAG, AT(verify.golden), VERIFY, G_MEASURE, NULL, 0, 0,
     "after the check, run ids 3 4 5 6 7 with --lora-eps 1e-5 and compare with\n"
     "the published logits of the real weights; says how far, exit 5 if too far"},
    {"--disk", "GB/S", KIND_REAL, AT(plan.disk), PLAN, G_MEASURE, NULL, 0, 1000,
     "seconds for a disk of this speed (default: for 3, 7 and 14)"},
    {"--disk-rate", "GB/S", KIND_REAL, AT(plan.disk), PLAN, G_MEASURE, NULL, 0, 1000,
     "the same as --disk"},
    {"--gflops", "N", KIND_REAL, AT(plan.gflops), PLAN, G_MEASURE, NULL, 0, 100000,
     "seconds to the first token for cores of so many GFLOP/s each, of which\n"
     "--threads says how many (default: as one of this machine is measured)"},
    {"--released", NULL, KIND_FLAG, AT(plan.released), PLAN, G_MODEL, NULL, 0, 0,
     "the released Kimi K3, by the config.json that comes with k3: before its\n"
     "1.56 TB are here"},
    {"--write-sums", NULL, KIND_FLAG, AT(verify.write_sums), VERIFY, G_MEASURE, NULL, 0, 0,
     "keep a checksum of everything that was read, beside the model or as\n"
     "--sums says; later runs compare every read with it. Checksums that are\n"
     "there must agree, unless --no-check"},
    {"--anew", NULL, KIND_FLAG, AT(verify.anew), VERIFY, G_MEASURE, NULL, 0, 0,
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
    {"--null", NULL, KIND_FLAG, AT(chat.null_ends), CHAT, G_OUTPUT, NULL, 0, 0,
     "not on a terminal: NUL instead of a newline ends each reply"},
    {"--hide-think", NULL, KIND_FLAG, AT(chat.hide_think), CHAT, G_OUTPUT, NULL, 0, 0,
     "think, but show only the answer (always so when not on a terminal)"},
    {"--history", "FILE", KIND_TEXT, AT(chat.history), CHAT, G_OUTPUT, NULL, 0, 0,
     "lines typed before, readable by you only; an empty name keeps none\n"
     "(default: k3/history under XDG_STATE_HOME, ~/.local/state)"},
    {"--ids-only", NULL, KIND_FLAG, AT(ids_only), TOKENIZE | CHAT, G_OUTPUT, NULL, 0, 0,
     "one line, comma separated, as --ids takes them"},
    {"--out", "DIR", KIND_TEXT, AT(slice.out), SLICE, G_OUTPUT, NULL, 0, 0,
     "the directory to write, made if absent; empty, or an unfinished slice of\n"
     "the same experts, which is gone on with"},
    {"--size", "SIZE", KIND_SIZE, AT(slice.size), SLICE, G_OUTPUT, NULL, 1, 0,
     "most bytes to write: 58G, 512M, 1.5GiB; whole experts, the hottest first,\n"
     "as many as fit"},
    {"--size", "SIZE", KIND_SIZE, AT(slice.size), STAGE, G_OUTPUT, NULL, 1, 0,
     "experts to bring, the hottest first, as many as fit in it (default: as\n"
     "many as the box has room for)"},
    {"--shard", "SIZE", KIND_SIZE, AT(slice.shard_size), SLICE, G_OUTPUT, "4GB", 1, 0,
     "most bytes of experts in one file; at least one expert"},
    {"--to", "ADDR", KIND_TEXT, AT(slice.to), STAGE, G_OUTPUT, NULL, 0, 0,
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
    {"-v", NULL, KIND_FLAG, AT(verbose), RUN | CHAT | SERVE, G_OUTPUT, NULL, 0, 0,
     "say more: settings, memory, experts read"},

    {"--model", "DIR", KIND_TEXT, AT(engine.model_dir), ANY & ~CACHE, G_MODEL, NULL, 0, 0,
     "a model directory as downloaded (default: K3_MODEL of the environment, else\n"
     "the small bundled model)"},
    {"--context", "N", KIND_COUNT, AT(engine.context), RUN | CHAT | SERVE | BENCH | PLAN | INFO, G_MODEL,
     NULL, 1, MAX_CONTEXT,
     "positions to hold, prompt and answer together (default: 4096, or the\n"
     "model's maximum if that is smaller; what it needs, for bench and for a\n"
     "longer prompt)"},
    {"--ram", "SIZE", KIND_SIZE, AT(engine.ram_bytes), RUN | CHAT | SERVE | BENCH | VERIFY | PLAN, G_MODEL,
     NULL, 1, 0,
     "bound for the whole process: 8G, 512M, 1.5GiB; without a unit, bytes;\n"
     "`k3 plan` shows what it buys (default: what is free, less 1/16)"},
    {"--threads", "N", KIND_COUNT, AT(engine.n_threads), RUN | CHAT | SERVE | BENCH | VERIFY | PLAN,
     G_MODEL, "0", 0, 1024, "0 is one for each core this process may use, within its CPU quota"},
    {"--chunk", "N", KIND_COUNT, AT(engine.chunk), RUN | CHAT | SERVE | BENCH | PLAN, G_MODEL, "0", 0, 4096,
     "most prompt positions computed together; 0 is 512, more where the trunk or\n"
     "experts are streamed and memory allows (up to 4096), or less where\n"
     "memory is scarce"},
    {"--kernels", "NAME", KIND_TEXT, AT(engine.kernels), RUN | CHAT | SERVE | BENCH | VERIFY, G_MODEL, NULL,
     0, 0,
     "ref, avx2, avx512 or neon: same bits, other speed (default: the best\n"
     "this CPU has; `k3 info` lists them)"},
    {"--lora-eps", "X", KIND_REAL, AT(engine.eps_lora), RUN | CHAT | SERVE | BENCH, G_MODEL, "1e-6", 0, 1,
     "epsilon of the two low-rank norms of attention; other engines and the\n"
     "published logits use 1e-5"},

    {"--mirror", "DIR", KIND_DIRS, AT(mirror), RUN | CHAT | SERVE | BENCH | VERIFY | SLICE | STAGE, G_DISK,
     NULL, 0, K3_MAX_COPIES - 1,
     "copies of some or all shards, on another drive, read as well; one that\n"
     "fails is dropped (repeatable)"},
    {"--io", "auto|pool|uring", KIND_CHOICE, AT(engine.io), RUN | CHAT | SERVE | BENCH | VERIFY, G_DISK,
     "auto", 0, 0, "threads in pread, or io_uring; auto: a short probe says"},
    {"--direct", "auto|on|off", KIND_CHOICE, AT(engine.direct), RUN | CHAT | SERVE | BENCH | VERIFY, G_DISK,
     "auto", 0, 0, "past the page cache (O_DIRECT); auto: if a probe says it is faster"},
    {"--io-depth", "N", KIND_COUNT, AT(engine.io_depth), RUN | CHAT | SERVE | BENCH | VERIFY, G_DISK, "0",
     0, 64, "reads in flight; 0: as the probe says"},
    {"--policy", "rank|lru", KIND_CHOICE, AT(engine.policy), RUN | CHAT | SERVE | BENCH, G_DISK, "rank", 0,
     0, "which expert makes room: least router weight or least recently used"},
    {"--no-look-ahead", NULL, KIND_FLAG, AT(engine.no_look_ahead), RUN | CHAT | SERVE | BENCH, G_DISK, NULL,
     0, 0, "do not read the next layer's likely experts"},
    {"--pins", "FILE", KIND_READ, AT(engine.pins), RUN | CHAT | SERVE | BENCH | PLAN, G_DISK, NULL, 0, 0,
     "experts to read at the start and keep, `layer expert` a line, the most\n"
     "wanted first"},
    {"--pins", "FILE", KIND_READ, AT(engine.pins), SLICE | STAGE, G_DISK, NULL, 0, 0,
     "which experts, `layer expert` a line, the hottest first: `k3 run --trace T`\n"
     "and `k3 bench --replay T --write-pins FILE` make it (stage, default: all)"},
    {"--sums", "FILE", KIND_READ, AT(engine.sums),
     RUN | CHAT | SERVE | BENCH | VERIFY | PLAN | SLICE | STAGE, G_DISK, NULL, 0, 0,
     "checksums made by `k3 verify --write-sums` (default: k3.sums in the\n"
     "model directory, if it is there)"},
    {"--no-check", NULL, KIND_FLAG, AT(engine.no_check),
     RUN | CHAT | SERVE | BENCH | VERIFY | PLAN | SLICE | STAGE, G_DISK, NULL, 0, 0,
     "do not compare what is read with checksums"},

    {"--tier", "ADDR", KIND_BOXES, AT(tier), RUN | CHAT | SERVE | BENCH, G_TIER, NULL, 0, MAX_TIER,
     "a box that holds experts in memory: HOST:PORT, [V6]:PORT, tls:HOST:PORT\n"
     "or unix:PATH; asked for what would be read from disk here (repeatable)"},
    {"--gpu", NULL, KIND_FLAG, AT(gpu), RUN | CHAT | SERVE | BENCH, G_TIER, NULL, 0, 0,
     "a box of our own: a k3-tier on this machine that holds experts in the\n"
     "GPU's memory (`make gpu`), started or joined; it takes 2 GiB of RAM\n"
     "beside --ram, serves others of yours too and ends ten minutes after them;\n"
     "the k3-tier beside k3, or in PATH, unless K3_TIER names another"},
    {"--psk-file", "FILE", KIND_READ, AT(engine.tier_key), RUN | CHAT | SERVE | BENCH | STAGE, G_TIER, NULL,
     0, 0,
     "the key that boxes ask for, and must themselves know, 32 random bytes or\n"
     "more: (umask 077; openssl rand -base64 32 >FILE); with stage the key of a\n"
     "box's --stage-psk-file"},
    {"--tier-ca", "FILE", KIND_READ, AT(engine.tier_ca), RUN | CHAT | SERVE | BENCH | STAGE, G_TIER, NULL,
     0, 0,
     "trust tls: boxes whose certificate this one signed, or is (default: the\n"
     "system's authorities)"},
    {"--tier-cert", "FILE", KIND_READ, AT(engine.tier_cert), RUN | CHAT | SERVE | BENCH | STAGE, G_TIER,
     NULL, 0, 0, "our certificate, for tls: boxes that want to know their clients"},
    {"--tier-key", "FILE", KIND_READ, AT(engine.tier_cert_key), RUN | CHAT | SERVE | BENCH | STAGE, G_TIER,
     NULL, 0, 0, "its private key (default: in the same file)"},
    {"--spin-us", "N", KIND_COUNT, AT(engine.spin_us), RUN | CHAT | SERVE | BENCH, G_TIER, "50", 0, 1000000,
     "a wait for a box spins so many microseconds before it sleeps"},
    {"--tier-wait", "N", KIND_COUNT, AT(engine.tier_wait_us), RUN | CHAT | SERVE | BENCH, G_TIER, "0", 0,
     60000000,
     "wait at least so many microseconds for an answer; 0: no longer than it\n"
     "would take to read and compute here"},
    {"--tier-hedge", NULL, KIND_FLAG, AT(engine.tier_hedge), RUN | CHAT | SERVE | BENCH, G_TIER, NULL, 0, 0,
     "a box that takes twice its usual time: ask another that holds the same\n"
     "as well; the first answer counts"},
    {"--tier-audit", "1/N", KIND_PART, AT(engine.tier_audit), RUN | CHAT | SERVE | BENCH, G_TIER, NULL, 1,
     1u << 30,
     "compute one layer in N here as well; a box whose sums differ is never\n"
     "asked again. With 1/1 no answer is used unseen. Else a lie ends the run\n"
     "with exit 5, unless nothing unseen was used before, and --save and\n"
     "--cache keep nothing that boxes had a part in"},

    {"--listen", "ADDR:PORT", KIND_TEXT, AT(serve.listen), SERVE, G_SERVE, "127.0.0.1:8080", 0, 0,
     "where to listen; another address than this machine's own needs --api-keys"},
    {"--api-keys", "FILE", KIND_READ, AT(serve.keys), SERVE, G_SERVE, NULL, 0, 0,
     "who may ask: a line for each key, a name, a blank and the key; clients send it\n"
     "as `Authorization: Bearer KEY`. Keys are made as for --psk-file"},
    {"--queue", "N", KIND_COUNT, AT(serve.queue), SERVE, G_SERVE, "64", 1, 1000,
     "requests that may wait; more get 503"},
};

/* `given` has a place for each row. */
STATIC_ASSERT(options_suffice, COUNT(OPTION) <= MAX_OPTION);
STATIC_ASSERT(default_context_is_one, DEFAULT_CONTEXT <= MAX_CONTEXT);
STATIC_ASSERT(lists_have_room,
              (int)MAX_STOP <= (int)OPTION_MAX_TEXTS && (int)MAX_TIER <= (int)OPTION_MAX_TEXTS);

/* A number of bytes below this, without a unit, was hardly meant as bytes. */
#define LEAST_BYTES ((uint64_t)1 << 20)

/* A small number without a unit: bytes were hardly meant. A budget that is too small is refused later, with
 * its floor, and this is said then; a cache of so few bytes would be emptied. */
static int check_unit(const option_row *o, const char *text, uint64_t value) {
    if (strspn(text, "0123456789") != strlen(text) || value == 0) return DONE;
    if (o->at == offsetof(cli_args, engine.ram_bytes) && value < LEAST_BYTES) unit_doubt(value);
    if (o->at == offsetof(cli_args, cache_size) && value < 1024)
        return fail(FAIL_USAGE, "%s: %s is %s bytes: did you mean %sG? (%sB if not)", o->name, text,
                    text, text, text);
    return DONE;
}

const option_table CLI_OPTIONS = {OPTION, COUNT(OPTION), ANY, check_unit};

int args_draft(const cli_args *a) {
    if (a->trace || a->routing || a->dump_logits || a->draft == 0) return 0;
    return a->draft == 1 ? DRAFT_AUTO : (int)a->draft - 1;
}

bool is_given(const cli_args *a, const char *name) {
    for (size_t i = 0; i < COUNT(OPTION); i++)
        if (a->words.given[i] && strcmp(OPTION[i].name, name) == 0) return true;
    return false;
}

int args_parse(cli_args *a, const option_taker *taker, int argc, char **argv, bool *wants_help) {
    memset(a, 0, sizeof *a);
    k3_options_default(&a->engine);
    int rc = options_parse(&CLI_OPTIONS, taker, &a->words, a, argc, argv, wants_help);
    a->engine.mirrors = a->mirror.text;
    a->engine.tiers = a->tier.text;
    return rc;
}

void args_from_environment(cli_args *a, unsigned who) {
    const char *model = getenv("K3_MODEL");
    bool takes_model = option_find(&CLI_OPTIONS, "--model", strlen("--model"), who) != NULL;
    a->model_by = "--model";
    if (a->engine.model_dir || !takes_model || a->plan.released || !model || !model[0]) return;
    a->engine.model_dir = model;
    a->model_by = "K3_MODEL";
}

/* ---- Files that are named ---- */

/* The file that row i of the table was given; NULL: none. */
static const char *file_given(const cli_args *a, size_t i) {
    const option_row *o = &OPTION[i];
    if (!a->words.given[i] ||
        (o->kind != KIND_READ && o->kind != KIND_WRITE && o->kind != KIND_OPTIONAL))
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
    size_t n = a->tier.n + a->gpu;
    if (is_given(a, "--tier-hedge") && n == 1)
        return fail(FAIL_USAGE,
                    "--tier-hedge: there is one box, and no second to ask; give two --tier");
    for (size_t i = 0; i < COUNT(name) && n + a->bench.hop.n == 0 && !a->slice.to; i++)
        if (is_given(a, name[i]))
            return fail(FAIL_USAGE, "%s: of which box? give --tier ADDR as well", name[i]);
    return DONE;
}
