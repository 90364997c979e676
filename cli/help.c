/* help.c - `k3 help`: made of the table of commands and the table of options. */
#include "cli/help.h"

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/manual.h"
#include "cli/options.h"

#include <stdio.h>
#include <string.h>

int fail_unknown_command(const char *name) {
    const char *best = strcmp(name, "help") == 0 ? name : NULL;
    const cli_command *c;
    size_t distance = 4;
    for (size_t i = 0; (c = command_at(i)); i++) nearest(name, c->name, &best, &distance);
    nearest(name, "help", &best, &distance);
    if (best) return fail(FAIL_USAGE, "unknown command '%s': did you mean %s?", name, best);
    return fail(FAIL_USAGE, "unknown command '%s': see `k3 help`", name);
}

/* One row of the table, its help broken where the table breaks it. */
static void help_option(const option_row *o) {
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

int help_command(const cli_command *cmd) {
    printf("usage: %s\n\n%s", cmd->usage, cmd->about);
    for (int g = 0; g < N_GROUP; g++) {
        bool has_title = false;
        for (size_t i = 0; i < CLI_OPTIONS.n; i++) {
            if (!(CLI_OPTIONS.row[i].who & cmd->bit) || (int)CLI_OPTIONS.row[i].group != g)
                continue;
            if (!has_title) printf("\n%s\n", GROUP_TITLE[g]);
            has_title = true;
            help_option(&CLI_OPTIONS.row[i]);
        }
    }
    printf("\nExamples\n%s", cmd->examples);
    return DONE;
}

bool command_get(size_t i, command_view *out) {
    const cli_command *c = command_at(i);
    if (!c) return false;
    *out = (command_view){c->name, c->summary, c->usage, c->about, c->examples};
    return true;
}

bool section_get(const char *command, size_t i, option_section *out) {
    const cli_command *cmd = command_find(command);
    if (!cmd || i >= N_GROUP) return false;
    out->title = GROUP_TITLE[i];
    out->n = 0;
    for (size_t k = 0; k < CLI_OPTIONS.n && out->n < COUNT(out->option); k++) {
        const option_row *o = &CLI_OPTIONS.row[k];
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

static const char *const TASK_TITLE[N_TASK] = {[TASK_TEXT] = "Make text",
                                               [TASK_KNOW] = "Know the model and this machine",
                                               [TASK_MEASURE] = "Measure",
                                               [TASK_KEEP] = "Keep what was computed",
                                               [TASK_BRING] =
                                                   "Bring experts to other machines (k3-tier)"};

int help_all(void) {
    const cli_command *c;
    puts("k3 " K3_VERSION " - run Kimi K3, exact, on a machine that holds a few percent of it\n\n"
         "usage: k3 COMMAND [options]       k3 help COMMAND: every option, with its default\n"
         "\n"
         "Begin with\n"
         "  k3 run \"The capital of France is\"   a small bundled model answers, at once\n"
         "  k3 plan --released --ram 64G         what the real one would take here, before a "
         "download\n"
         "  k3 chat --model DIR                  talk with the model in DIR (or set K3_MODEL=DIR)");
    for (int t = 0; t < N_TASK; t++) {
        printf("\n%s\n", TASK_TITLE[t]);
        for (size_t i = 0; (c = command_at(i)); i++)
            if ((int)c->task == t) printf("  %-10s %s\n", c->name, c->summary);
    }
    printf("\n%s\nExit codes\n%s", HELP_COMMON, HELP_EXITS);
    return DONE;
}

/* For packages: names, man pages, completion. */
static int help_generate(const char *what, const char *name) {
    const cli_command *c;
    if (strcmp(what, "--list") == 0)
        for (size_t i = 0; (c = command_at(i)); i++) puts(c->name);
    else if (strcmp(what, "--completion") == 0)
        completion_print();
    else if (!manual_print(name))
        return fail_unknown_command(name);
    return DONE;
}

int cmd_help(int argc, char **argv) {
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

int fail_no_command(const char *arg) {
    size_t n = strcspn(arg, "=");
    const option_row *o = option_find(&CLI_OPTIONS, arg, n, ANY);
    const char *best = NULL;
    size_t distance = 4;
    if (o)
        return fail(FAIL_USAGE, "%s comes after a command, such as `k3 run %s ...`", o->name, arg);
    nearest(arg, "--help", &best, &distance);
    nearest(arg, "--version", &best, &distance);
    if (best) return fail(FAIL_USAGE, "unknown option %s: did you mean %s?", arg, best);
    return fail(FAIL_USAGE, "unknown option %s: see `k3 help`", arg);
}
