/* manual.c - prints man pages (roff, man macros) and a bash completion (manual.h). */
#include "cli/manual.h"

#include "k3.h"

#include <stdio.h>
#include <string.h>

/* ---- roff ---- */

/* Text for roff: backslashes and hyphens are escaped, and a line never begins with a control character. */
static void roff(const char *text) {
    bool is_start = true;
    for (const char *p = text; *p; p++) {
        if (is_start && (*p == '.' || *p == '\'')) fputs("\\&", stdout);
        if (*p == '\\')
            fputs("\\e", stdout);
        else if (*p == '-')
            fputs("\\-", stdout);
        else
            putchar(*p);
        is_start = *p == '\n';
    }
}

static void roff_line(const char *text) {
    roff(text);
    if (!text[0] || text[strlen(text) - 1] != '\n') putchar('\n');
}

static void roff_section(const char *title) { printf(".SH %s\n", title); }

/* As it stands: examples, tables. */
static void roff_plain(const char *text) {
    puts(".nf");
    roff_line(text);
    puts(".fi");
}

static void roff_title(const char *name, const char *upper) {
    printf(".TH \"%s\" 1 \"\" \"k3 " K3_VERSION "\" \"User Commands\"\n", upper);
    roff_section("NAME");
    roff(name);
    fputs(" \\- ", stdout);
}

static void roff_option(const option_view *o) {
    puts(".TP");
    fputs("\\fB", stdout);
    roff(o->name);
    fputs("\\fR", stdout);
    if (o->value) {
        fputs(o->value[0] == '[' ? "\\fI" : " \\fI", stdout);
        roff(o->value);
        fputs("\\fR", stdout);
    }
    putchar('\n');
    roff(o->help);
    if (o->start) {
        fputs(" (default: ", stdout);
        roff(o->start);
        putchar(')');
    }
    putchar('\n');
}

static void upper(char *out, size_t cap, const char *name) {
    snprintf(out, cap, "%s", name);
    for (char *p = out; *p; p++)
        if (*p >= 'a' && *p <= 'z') *p = (char)(*p - 'a' + 'A');
}

static void manual_environment(void) {
    roff_section("ENVIRONMENT");
    puts(".TP\n\\fBK3_MODEL\\fR\nThe model directory where no \\-\\-model is given; empty it is "
         "none.");
    puts(".TP\n\\fBK3_TIER\\fR\nThe k3\\-tier program that \\-\\-gpu starts.");
    puts(".TP\n\\fBOMP_NUM_THREADS\\fR\nIs not read: \\-\\-threads N.");
}

static void manual_see_also(const char *but) {
    command_view c;
    roff_section("SEE ALSO");
    if (but) puts(".BR k3 (1),");
    for (size_t i = 0; command_get(i, &c); i++)
        if (!but || strcmp(but, c.name) != 0) printf(".BR k3\\-%s (1),\n", c.name);
    puts(".BR k3\\-tier (1)");
}

/* k3(1): all commands. */
static void manual_all(void) {
    command_view c;
    roff_title("k3", "K3");
    roff_line("run Kimi K3, exact, on a machine that holds a few percent of it");
    roff_section("SYNOPSIS");
    puts(".B k3\n.I COMMAND\n[options]");
    roff_section("COMMANDS");
    for (size_t i = 0; command_get(i, &c); i++) {
        printf(".TP\n.BR k3\\-%s (1)\n", c.name);
        roff_line(c.summary);
    }
    roff_section("DESCRIPTION");
    roff_plain(HELP_COMMON);
    manual_environment();
    roff_section("EXIT STATUS");
    roff_plain(HELP_EXITS);
    manual_see_also(NULL);
}

bool manual_print(const char *command) {
    command_view c;
    option_section s;
    char name[40], title[40];
    if (!command) return manual_all(), true;
    size_t i = 0;
    while (command_get(i, &c) && strcmp(c.name, command) != 0) i++;
    if (!command_get(i, &c)) return false;
    snprintf(name, sizeof name, "k3-%s", command);
    upper(title, sizeof title, name);
    roff_title(name, title);
    roff_line(c.summary);
    roff_section("SYNOPSIS");
    roff_line(c.usage);
    roff_section("DESCRIPTION");
    roff_line(c.about);
    roff_section("OPTIONS");
    for (size_t g = 0; section_get(command, g, &s); g++) {
        if (s.n) printf(".SS \"%s\"\n", s.title);
        for (size_t k = 0; k < s.n; k++) roff_option(&s.option[k]);
    }
    manual_environment();
    roff_section("EXIT STATUS");
    roff_plain(HELP_EXITS);
    roff_section("EXAMPLES");
    roff_plain(c.examples);
    manual_see_also(command);
    return true;
}

/* ---- bash ---- */

/* What completes the value of an option: files, directories, its words; nothing for a number. */
static void completion_value(const option_view *o) {
    printf("        %s) ", o->name);
    if (o->is_choice) {
        fputs("_k3_words '", stdout);
        for (const char *p = o->value; *p; p++) putchar(*p == '|' ? ' ' : *p);
        fputs("'; ", stdout);
    } else if (strcmp(o->value, "DIR") == 0) {
        fputs("_k3_files -d; ", stdout);
    } else if (strstr(o->value, "FILE")) {
        fputs("_k3_files -f; ", stdout);
    }
    puts("return ;;");
}

static void completion_command(const command_view *c) {
    option_section s;
    printf("    %s)\n        case $before in\n", c->name);
    for (size_t g = 0; section_get(c->name, g, &s); g++)
        for (size_t k = 0; k < s.n; k++)
            if (s.option[k].value && s.option[k].value[0] != '[') completion_value(&s.option[k]);
    printf("        esac\n        options='--help");
    for (size_t g = 0; section_get(c->name, g, &s); g++)
        for (size_t k = 0; k < s.n; k++) printf(" %s", s.option[k].name);
    puts("' ;;");
}

void completion_print(void) {
    command_view c;
    puts("# bash completion of k3, printed by `k3 help --completion`\n"
         "_k3_words() { COMPREPLY=($(compgen -W \"$1\" -- \"$word\")); }\n"
         "_k3_files() {\n"
         "    local IFS=$'\\n'\n"
         "    compopt -o filenames 2>/dev/null\n"
         "    COMPREPLY=($(compgen \"$1\" -- \"$word\"))\n"
         "}\n"
         "_k3() {\n"
         "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options=\n"
         "    [ \"$word\" = = ] && word=\n"
         "    [ \"$before\" = = ] && before=${COMP_WORDS[COMP_CWORD-2]}\n"
         "    [ \"${COMP_WORDS[COMP_CWORD]}\" = = ] && before=${COMP_WORDS[COMP_CWORD-1]}\n"
         "    COMPREPLY=()");
    fputs("    local commands='", stdout);
    for (size_t i = 0; command_get(i, &c); i++) printf("%s ", c.name);
    puts("help'\n"
         "    if [ \"$COMP_CWORD\" = 1 ]; then _k3_words \"$commands --help --version\"; return; "
         "fi\n"
         "    case ${COMP_WORDS[1]} in\n"
         "    help) _k3_words \"$commands\"; return ;;");
    for (size_t i = 0; command_get(i, &c); i++) completion_command(&c);
    puts("    esac\n"
         "    case $word in -*) _k3_words \"$options\" ;; *) _k3_files -f ;; esac\n"
         "}\n"
         "complete -F _k3 k3");
}
