/* test_options.c - the option parser on a table of its own, and what the table of `k3` promises the parser. */
#include "cli/args.h"
#include "cli/console.h"
#include "test.h"

#include <unistd.h>

typedef struct {
    option_words words;
    uint32_t before, narrow, after; /* neighbours of a field of 4 bytes */
    uint64_t wide, part, size, hash;
    k3_switch choice;
    float real;
    bool flag;
    const char *text, *file;
    text_list list;
} values;

enum { ONE = 1, OTHER = 2 };

#define AT(field) offsetof(values, field), sizeof((values *)0)->field

static const option_row ROW[] = {
    {"--narrow", "N", KIND_COUNT, AT(narrow), ONE, 0, "7", 1, UINT32_MAX, ""},
    {"--wide", "N", KIND_COUNT, AT(wide), ONE, 0, NULL, 0, UINT64_MAX, ""},
    {"--wide", "N", KIND_COUNT, AT(wide), OTHER, 0, "9", 0, 9, ""},
    {"--part", "1/N", KIND_PART, AT(part), ONE, 0, NULL, 1, 100, ""},
    {"--size", "SIZE", KIND_SIZE, AT(size), ONE, 0, NULL, 2, 0, ""},
    {"--hash", "FNV", KIND_HASH, AT(hash), ONE, 0, NULL, 0, 0, ""},
    {"--choice", "a|on|off", KIND_CHOICE, AT(choice), ONE, 0, "off", 0, 0, ""},
    {"--real", "X", KIND_REAL, AT(real), ONE, 0, "0.5", 0, 1, ""},
    {"--flag", NULL, KIND_FLAG, AT(flag), ONE, 0, NULL, 0, 0, ""},
    {"--text", "TEXT", KIND_TEXT, AT(text), ONE, 0, NULL, 0, 0, ""},
    {"--file", "[=FILE]", KIND_OPTIONAL, AT(file), ONE, 0, NULL, 0, 0, ""},
    {"--list", "DIR", KIND_DIRS, AT(list), ONE, 0, NULL, 0, 2, ""},
};

/* The taker's doubt: it refuses a size of 3 bytes. */
static int doubt(const option_row *o, const char *text, uint64_t n_bytes) {
    (void)o;
    (void)text;
    return n_bytes == 3 ? FAIL_CHECK : DONE;
}

static const option_table TABLE = {ROW, COUNT(ROW), ONE | OTHER, doubt};

/* Parse words that blanks separate; *v gets their values. */
static int parse(values *v, const option_taker *taker, const char *words, bool *wants_help) {
    static char text[512];
    char *argv[32];
    int argc = 0;
    memset(v, 0, sizeof *v);
    v->before = v->after = 5;
    *wants_help = false;
    snprintf(text, sizeof text, "%s", words);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return options_parse(&TABLE, taker, &v->words, v, argc, argv, wants_help);
}

static const option_taker TAKER = {"one", ONE, "A B"};

static void test_values(void) {
    values v;
    bool help;
    CHECK_EQ_INT(parse(&v, &TAKER, "", &help), DONE);
    CHECK_EQ_INT(v.narrow, 7);
    CHECK_EQ_INT(v.choice, K3_OFF);
    CHECK(v.real == 0.5f);
    CHECK(!v.words.given[0]); /* a default is not given */
    CHECK_EQ_INT(parse(&v, &TAKER,
                       "--narrow 4294967295 --wide=18446744073709551615 --part 1/100 --size 1.5GiB "
                       "--hash 0x00000000000000ff --choice on --real 1 --flag --text=--x --file",
                       &help),
                 DONE);
    CHECK(v.narrow == UINT32_MAX && v.before == 5 && v.after == 5);
    CHECK(v.wide == UINT64_MAX && v.part == 100 && v.size == 3ull << 29 && v.hash == 255);
    CHECK(v.choice == K3_ON && v.real == 1.0f && v.flag);
    CHECK_EQ_STR(v.text, "--x");
    CHECK_EQ_STR(v.file, "");
    CHECK(v.words.given[0] && v.words.given[1] && !v.words.given[2]);
    CHECK_EQ_INT(parse(&v, &TAKER, "--list x --list y --text 1 --text 2 -- --flag -h", &help),
                 DONE);
    CHECK(v.list.n == 2 && !v.list.text[2] && !help && !v.flag);
    CHECK_EQ_STR(v.list.text[1], "y");
    CHECK_EQ_STR(v.text, "2"); /* the last of two wins */
    CHECK_EQ_STR(v.words.arg, "--flag");
    CHECK_EQ_STR(v.words.arg2, "-h");
    const option_taker other = {"other", OTHER, NULL};
    CHECK_EQ_INT(parse(&v, &other, "", &help), DONE);
    CHECK_EQ_INT(v.wide, 9);
    CHECK_EQ_INT(parse(&v, &other, "-h --nonsense", &help), DONE);
    CHECK(help);
}

static void test_refused(void) {
    static const char *const WRONG[] = {"--narrow 0",   "--narrow 4294967296",
                                        "--narrow -1",  "--narrow 1x",
                                        "--wide",       "--wide --flag",
                                        "--part 2/3",   "--part 1/0",
                                        "--part 1/101", "--size 1",
                                        "--size x",     "--hash ff",
                                        "--choice aa",  "--choice a|on",
                                        "--real 1.5",   "--real 0.5x",
                                        "--flag=1",     "--text",
                                        "--list=",      "--list a --list b --list c",
                                        "--nonsense",   "--narro 1",
                                        "a b c",        "--size 18446744073709551616"};
    values v;
    bool help;
    for (size_t i = 0; i < COUNT(WRONG); i++)
        if (!CHECK(parse(&v, &TAKER, WRONG[i], &help) == FAIL_USAGE)) printf("    %s\n", WRONG[i]);
    CHECK_EQ_INT(parse(&v, &TAKER, "--size 3", &help), FAIL_CHECK);
    const option_taker none = {"none", ONE, NULL}, other = {"other", OTHER, "A"};
    CHECK_EQ_INT(parse(&v, &none, "a", &help), FAIL_USAGE);
    CHECK_EQ_INT(parse(&v, &other, "a b", &help), FAIL_USAGE);
    CHECK_EQ_INT(parse(&v, &other, "--narrow 1", &help), FAIL_USAGE); /* an option of another command */
    CHECK_EQ_INT(parse(&v, &other, "--wide 10", &help), FAIL_USAGE);  /* out of this row's range */
}

/* What options.h asks of a row: a field of the kind's size, and a range that the field holds. */
static bool row_is_sound(const option_row *o) {
    bool is_list = o->kind == KIND_STOPS || o->kind == KIND_DIRS || o->kind == KIND_BOXES;
    bool is_integer = o->kind == KIND_PART || o->kind == KIND_CHOICE || o->kind == KIND_COUNT;
    bool is_text = o->kind == KIND_TEXT || o->kind == KIND_READ || o->kind == KIND_WRITE ||
                   o->kind == KIND_OPTIONAL;
    if (o->at + o->n_bytes > sizeof(cli_args) || !o->who || (o->who & ~(unsigned)ANY)) return false;
    if ((o->kind == KIND_FLAG) != (o->value == NULL) || o->group >= N_GROUP) return false;
    if (is_list) return o->n_bytes == sizeof(text_list) && o->hi > 0 && o->hi <= OPTION_MAX_TEXTS;
    if (is_text) return o->n_bytes == sizeof(char *);
    if (o->kind == KIND_FLAG) return o->n_bytes == sizeof(bool);
    if (o->kind == KIND_REAL) return o->n_bytes == sizeof(float);
    if (!is_integer) return o->n_bytes == sizeof(uint64_t);
    return o->n_bytes == sizeof(uint64_t) ||
           (o->n_bytes == sizeof(uint32_t) && o->hi <= UINT32_MAX);
}

static void test_table(void) {
    const option_table *t = &CLI_OPTIONS;
    for (size_t i = 0; i < t->n; i++) {
        if (!CHECK(row_is_sound(&t->row[i]))) printf("    %s\n", t->row[i].name);
        for (size_t k = 0; k < i; k++) /* no command takes two rows of one name */
            CHECK(strcmp(t->row[i].name, t->row[k].name) != 0 || !(t->row[i].who & t->row[k].who));
    }
}

/* What the command line says is what the engine is opened with. */
static void test_engine_options(void) {
    static char w[][20] = {
        "--threads",  "3",   "--ram",   "8G",         "--io=uring", "--direct", "off",
        "--lora-eps", "0.5", "--tier",  "unix:/a",    "--chunk",    "77",       "--policy=lru",
        "--mirror",   "d",   "--top-k", "4294967295", "x"};
    char *argv[COUNT(w)];
    cli_args a;
    bool help = false;
    const option_taker run = {"run", RUN, "PROMPT"}, info = {"info", INFO, NULL};
    k3_options o;
    for (size_t i = 0; i < COUNT(w); i++) argv[i] = w[i];
    CHECK_EQ_INT(args_parse(&a, &run, COUNT(w), argv, &help), DONE);
    CHECK(a.engine.n_threads == 3 && a.engine.chunk == 77 && a.engine.ram_bytes == 8ull << 30);
    CHECK(a.engine.io == K3_IO_URING && a.engine.direct == K3_OFF &&
          a.engine.policy == K3_POLICY_LRU);
    CHECK(a.engine.eps_lora == 0.5f && a.sampler.top_k == UINT32_MAX);
    CHECK(a.engine.tiers[0] == w[10] && !a.engine.tiers[1] && a.engine.mirrors[0] == w[15] &&
          !a.engine.mirrors[1]);
    CHECK_EQ_INT(args_parse(&a, &info, 0, NULL, &help), DONE);
    k3_options_default(&o);
    o.mirrors = a.mirror.text;
    o.tiers = a.tier.text;
    CHECK_EQ_MEM(&a.engine, &o, sizeof o); /* untouched by options that info does not take */
}

int main(void) {
    if (!freopen("/dev/null", "w", stderr)) return 1; /* test_cli.sh checks the messages */
    test_begin("options");
    test_values();
    test_refused();
    test_table();
    test_engine_options();
    return test_finish();
}
