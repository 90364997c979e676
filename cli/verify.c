/* verify.c - `k3 verify`: read every byte that will ever be computed with, before a long run does.
 *
 * --golden ties the real weights to other people's programs: an engine can agree with itself
 * everywhere and still be wrong.
 */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/generate.h"
#include "cli/inputs.h"
#include "cli/output.h"
#include "cli/resume.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

/* What comes after a model that is whole: text needs its tokenizer, a long run wants sums and a plan. */
static void verify_say_next(const cli_args *a, const char *dir, bool has_sums) {
    char path[4352];
    if (a->quiet) return;
    snprintf(path, sizeof path, "%s/tiktoken.model", dir);
    if (access(path, R_OK) != 0)
        say("note: %s is absent: ids only, no text; download it as well", path);
    if (!has_sums && !a->verify.write_sums)
        say("next: `k3 verify --write-sums --model %s` keeps checksums, and every later read is "
            "compared with them",
            dir);
    else
        say("next: `k3 plan --model %s` says what a token and a prompt take here, `k3 chat --model "
            "%s` begins",
            dir, dir);
}

int cmd_verify(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    k3_error err = {{0}};
    char experts[32], trunk[32];
    console_init(&con, a->quiet);
    int rc = model_find(a, &dir);
    if (rc != DONE) return rc;
    char resume[4400];
    bool has_place = resume_place(a, dir, resume, sizeof resume);
    if (!has_place && !a->quiet)
        say("note: there is no place to keep how far this comes: %s", resume);
    if (has_place && a->verify.anew) remove(resume);
    signals_catch();
    rc = engine_open_headers(&e, a, dir, &con, true, has_place ? resume : NULL);
    if (rc != DONE) goto done;
    const k3_shape *s = k3_engine_shape(e);
    if (a->verify.golden && (s->vocab_size != GOLDEN_VOCAB || s->n_layers != GOLDEN_LAYERS)) {
        rc = fail(
            FAIL_USAGE,
            "--golden: its values belong to the released weights (%d layers, vocabulary %d); this "
            "model has %u and %u",
            GOLDEN_LAYERS, GOLDEN_VOCAB, (unsigned)s->n_layers, (unsigned)s->vocab_size);
        goto done;
    }
    int64_t n = a->verify.write_sums ? k3_engine_write_sums(e, a->engine.no_check, &err)
                                     : k3_engine_verify(e, &err);
    console_clear(&con);
    if (n < 0) {
        rc = fail_status((int)n, &err);
        if (has_place && !a->quiet && access(resume, F_OK) == 0)
            say("the same command goes on from here; --anew begins again");
        goto done;
    }
    printf(
        "%s: headers, %lld of %llu experts (%s) and the trunk (%s) read and checked%s: no fault\n",
        dir, (long long)n, (unsigned long long)expert_count(s),
        fmt_bytes(experts, (uint64_t)n * s->expert_bytes), fmt_bytes(trunk, s->trunk_bytes),
        k3_engine_plan(e)->has_sums ? ", sums too"
        : a->verify.write_sums      ? ", sums written"
                                    : "");
    if (fflush(stdout) != 0) rc = fail_stdout(errno);
    if (rc == DONE && a->verify.golden) rc = verify_golden(a, dir, &con);
    if (rc == DONE) verify_say_next(a, dir, k3_engine_plan(e)->has_sums);
done:
    k3_engine_close(e);
    return rc;
}
