/* main.c - the `k3` program: the table of its commands, and the way to one of them.
 *
 * What holds in all of cli/: stdout carries the answer and nothing else; every message starts
 * with "k3: " and goes to stderr; a function that returns an exit code has already said why;
 * nothing here changes a bit of the output, the engine behind k3.h does all of that.
 */
#include "cli/args.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/help.h"
#include "cli/output.h"
#include "cli/place.h"
#include "cli/screen.h"
#include "k3_common.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

/* Hashes and dumps are little-endian, and are taken straight from memory. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "k3 reads model files in place and needs a little-endian machine"
#endif

static const cli_command COMMAND[] = {
    {"run", RUN, TASK_TEXT, "PROMPT", cmd_run, "continue a prompt, text streamed as it is made",
     "k3 run [options] PROMPT | -",
     "Runs the prompt and prints what follows it. The prompt is taken as it is: no chat markup is\n"
     "added, and what looks like markup is text unless --control is given. stdout gets the\n"
     "answer, stderr the rest, with the two hashes that must be the same on every machine.\n"
     "Ctrl-C ends the answer cleanly, a second one kills.\n",
     "  k3 run \"The capital of France is\"\n"
     "  k3 run --model /data/Kimi-K3 --ram 64G --tokens 40 --prompt-file question.txt\n"
     "  k3 run --json --tokens 0 --dump-logits rows.f32 --ids 3,4,5,6,7\n"
     "  k3 run --save talk.k3s --prompt-file a.txt && k3 run --load talk.k3s \" And then\"\n"},
    {"chat", CHAT, TASK_TEXT, NULL, cmd_chat, "talk with the model; on a terminal or through pipes",
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
#ifdef K3_HTTP
    {"serve", SERVE, TASK_TEXT, NULL, cmd_serve, "an HTTP server that OpenAI's clients can use",
     "k3 serve [options]",
     "Answers /v1/chat/completions, streamed or not, /v1/models, /tokenize, /detokenize, /health,\n"
     "/props and /metrics. Requests wait in a queue and are answered one after another; a conversation\n"
     "that goes on is not read again. While a client waits it gets a comment every five seconds.\n"
     "Listens on this machine only, unless --api-keys is given. docs/SERVER.md has the rest.\n",
     "  k3 serve\n"
     "  k3 serve --model /data/Kimi-K3 --ram 64G --context 32768 --cache /data/k3-cache\n"
     "  curl -N http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello!\"}]}'\n"},
#endif
    {"tokenize", TOKENIZE, TASK_TEXT, "TEXT", cmd_tokenize, "text to ids and back",
     "k3 tokenize [options] TEXT | -",
     "One line for each id: the id, a tab, its bytes, escaped as in C where they are not\n"
     "printable UTF-8.\n",
     "  k3 tokenize \"12 + 30 =\"\n"
     "  k3 tokenize --ids-only --prompt-file a.txt\n"
     "  k3 tokenize --decode --ids 343,336,327,444,1489,311\n"},
    {"bench", BENCH, TASK_MEASURE, NULL, cmd_bench, "speeds and hashes as a table (TSV)",
     "k3 bench [options]",
     "Runs each prompt from an empty context and prints a row: ids a second in and out, ids_fnv,\n"
     "logits_fnv, settings; then, a mean of the repeats, bytes read and seconds waited for them,\n"
     "the share of experts in memory when wanted and of guesses used, bytes read in vain. Slots\n"
     "stay filled between prompts. The `# total` row hashes the logits_fnv of all rows.\n",
     "  k3 bench --threads 4 --repeats 3\n"
     "  k3 bench --expect $(k3 bench -q --kernels ref | awk -F'\\t' '/^# total/ {print $7}')\n"
     "  k3 bench --kernels-only --threads 8\n"
     "  k3 bench --model /data/Kimi-K3 --hop 10.0.0.7:7383 --psk-file key\n"},
    {"verify", VERIFY, TASK_KNOW, NULL, cmd_verify, "read and check every weight of a model",
     "k3 verify [options]",
     "Checks all headers, then reads every tensor of the text model once: lengths, scale codes,\n"
     "finite values. Worth its time after a download.\n",
     "  k3 verify --model /data/Kimi-K3\n"
     "  k3 verify --model /data/Kimi-K3 --golden\n"},
    {"plan", PLAN, TASK_KNOW, NULL, cmd_plan, "where a memory budget goes, what a token then reads",
     "k3 plan [options]",
     "Reads headers only, and with --released not even those. Divides --ram as run and bench do,\n"
     "and says what is read for each token and for prompts of 100, 1,000 and 10,000 ids, and how "
     "long\n"
     "that takes. A budget below the floor exits 4 and shows the split at the floor;\n"
     "the floor grows with --context, --threads and, when it is given, --chunk.\n",
     "  k3 plan --released --ram 64G --threads 16 --gflops 40\n"
     "  k3 plan --model /data/Kimi-K3 --ram 64G --context 32768\n"
     "  k3 plan --model /data/Kimi-K3 --ram 8G --disk 6.3\n"},
    {"info", INFO, TASK_KNOW, NULL, cmd_info, "geometry, sizes, kernels, memory a context needs",
     "k3 info [options]", "Reads headers only, no weights.\n",
     "  k3 info --model /data/Kimi-K3 --context 131072\n"},
    {"cache", CACHE, TASK_KEEP, "ls|rm|verify DIR", cmd_cache,
     "what `run --cache` keeps: list, remove, check", "k3 cache ls|rm|verify DIR",
     "ls: an entry a line, most recently used first. rm: all of them, or down to --cache-size; a\n"
     "running process loses nothing but speed. verify: reads every byte, exit 5 if one is wrong.\n"
     "Only files that `run --cache` could have written are looked at.\n",
     "  k3 cache ls /data/k3-cache\n"
     "  k3 cache rm --cache-size 5G /data/k3-cache\n"},
    {"slice", SLICE, TASK_BRING, NULL, cmd_slice,
     "write the hottest experts into a directory of their own",
     "k3 slice --pins FILE --size SIZE --out DIR [options]",
     "The slice has config.json, shards in the official format with those experts byte for byte,\n"
     "an index, and k3.slice: which model they are of, and a checksum of each. `k3-tier --slice`\n"
     "serves it on a machine that has nothing else of the model. Killed or interrupted it leaves\n"
     "no k3.slice; the same command goes on behind the last whole shard.\n",
     "  k3 run --model /data/Kimi-K3 --trace trace --prompt-file a.txt\n"
     "  k3 bench --replay trace --write-pins pins\n"
     "  k3 slice --model /data/Kimi-K3 --pins pins --size 58G --out /mnt/usb/hot\n"},
    {"stage", STAGE, TASK_BRING, NULL, cmd_stage, "bring experts to a box that has no files",
     "k3 stage --to ADDR [options]",
     "Sends experts to a running k3-tier, which needs no files: the first who stages says which "
     "model\n"
     "they are of. The box must let us: by the key of its --stage-psk-file, a certificate of the "
     "name in\n"
     "its --stage-name, or its unix: socket and the same user. Each expert is checked there before "
     "it\n"
     "counts; what the box can read for itself it reads, and only compares with ours.\n"
     "What the box has is not sent twice, so after a broken connection just start it again.\n"
     "Exit 3: the box has another model; 4: no room for one expert; 5: one came there damaged.\n",
     "  k3 stage --model /data/Kimi-K3 --to 10.0.0.7:7383 --psk-file stage-key\n"
     "  k3 stage --model /data/Kimi-K3 --to tls:box:7383 --tier-ca ca.pem --tier-cert me.pem\n"
     "  k3 stage --model /data/Kimi-K3 --to unix:/run/k3.sock --pins pins --size 20G\n"},
};

const cli_command *command_at(size_t i) { return i < COUNT(COMMAND) ? &COMMAND[i] : NULL; }

const cli_command *command_find(const char *name) {
    for (size_t i = 0; i < COUNT(COMMAND); i++)
        if (strcmp(COMMAND[i].name, name) == 0) return &COMMAND[i];
    return NULL;
}

/* Without a command: which there are, in lines of 80 columns. */
static void usage_say(void) {
    size_t column = strlen("usage: k3");
    fputs("usage: k3", stderr);
    for (size_t i = 0; i < COUNT(COMMAND); i++) {
        size_t n = strlen(COMMAND[i].name) + strlen("  |");
        if (column + n > 80) {
            fprintf(stderr, "\n%9s", "");
            column = 9;
        }
        fprintf(stderr, " %s |", COMMAND[i].name);
        column += n;
    }
    fputs(" help [options]\n"
          "try:   k3 run \"The capital of France is\"     or: k3 help\n",
          stderr);
}

static int dispatch(int argc, char **argv) {
    cli_args a;
    bool wants_help = false;
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) {
        usage_say();
        return FAIL_USAGE;
    }
    if (strcmp(name, "-V") == 0 || strcmp(name, "--version") == 0)
        return puts(version_text()) < 0 ? FAIL_IO : DONE;
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) return help_all();
    if (strcmp(name, "help") == 0) return cmd_help(argc - 2, argv + 2);
    if (name[0] == '-') return fail_no_command(name);
    const cli_command *cmd = command_find(name);
    if (!cmd) return fail_unknown_command(name);
    option_taker taker = {cmd->name, cmd->bit, cmd->arg};
    int rc = args_parse(&a, &taker, argc - 2, argv + 2, &wants_help);
    if (wants_help) return help_command(cmd);
    args_from_environment(&a, cmd->bit);
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
