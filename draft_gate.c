/* draft_gate.c - the choice of a width. */
#include "draft_gate.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* Acceptance before anything was seen, worth PRIOR_TRIALS trials. */
static const double PRIOR[GATE_CLASSES] = {0.6, 0.75, 0.85, 0.92};
#define PRIOR_TRIALS 4.0
#define DECAY        0.98 /* of trials, for each one of the same class and place */
#define TIME_DECAY   0.8  /* of the mean of seconds                              */
#define LEAST_GAIN   1.05
#define ENOUGH_TIMED 3    /* measurements of a width before it is believed       */

void draft_gate_init(draft_gate *g) { memset(g, 0, sizeof *g); }

int draft_gate_class(size_t match) { return match < 8 ? 0 : match < 12 ? 1 : match < 24 ? 2 : 3; }

/* Seconds of a pass of width w. One that was not measured costs (w / u)^p times the next narrower one, of width u: p is
 * what was measured between widths 1 and u, at first 0.74, by which w rows of a text need more experts than one; and no
 * more than a wider one that was measured. */
static double cost(const draft_gate *g, size_t w) {
    size_t u = w, v = w;
    while (u > 1 && g->n_timed[u] < ENOUGH_TIMED) u--;
    while (v <= GATE_DRAFTS && g->n_timed[v] < ENOUGH_TIMED) v++;
    double p = u > 1 && g->seconds[u] > g->seconds[1] ? log(g->seconds[u] / g->seconds[1]) / log((double)u) : u > 1 ? 0 : 0.74;
    double seconds = g->seconds[u] * pow((double)w / (double)u, p);
    bool is_wider = v <= GATE_DRAFTS + 1 && g->n_timed[v] >= ENOUGH_TIMED && g->seconds[v] < seconds;
    return is_wider ? g->seconds[v] : seconds;
}

/* The chance that draft k is right if those before were; what was seen of the one before stands for a few trials. */
static double acceptance(const draft_gate *g, int class, size_t k, double before) {
    return (g->hits[class][k] + PRIOR_TRIALS * before) / (g->trials[class][k] + PRIOR_TRIALS);
}

size_t draft_gate_choose(draft_gate *g, int class, size_t n) {
    size_t best = 0;
    double base, most, expected = 1, chance = 1, least = 0, a = PRIOR[class];
    if (n > GATE_DRAFTS) n = GATE_DRAFTS;
    if (g->n_paused > 0 || g->n_timed[1] < ENOUGH_TIMED) return 0;
    base = most = 1 / cost(g, 1);
    for (size_t k = 0; k < n; k++) {
        a = acceptance(g, class, k, a);
        chance *= a;
        expected += chance;
        double c = cost(g, k + 2);
        least = c > least ? c : least; /* a wider pass costs no less */
        if (expected / least > most && expected / least > LEAST_GAIN * base) {
            most = expected / least;
            best = k + 1;
        }
    }
    if (best == 0 && n > 0 && ++g->n_declined >= GATE_TEST) best = 1;
    if (best > 0) g->n_declined = 0;
    return best;
}

/* Were the last ids slower than they would have been without drafts? Then there are none for as long. */
static void window_count(draft_gate *g, size_t n_ids, double seconds) {
    g->n_paused -= g->n_paused < n_ids ? g->n_paused : (uint32_t)n_ids;
    g->window_ids += (uint32_t)n_ids;
    g->window_s += seconds;
    if (g->window_ids < GATE_WINDOW) return;
    if (g->window_s / g->window_ids > LEAST_GAIN * g->seconds[1]) g->n_paused = GATE_WINDOW;
    g->window_ids = 0;
    g->window_s = 0;
}

void draft_gate_count(draft_gate *g, int class, size_t n_drafts, size_t n_right, double seconds) {
    size_t w = n_drafts + 1;
    if (w > GATE_DRAFTS + 1) return;
    g->seconds[w] = g->n_timed[w] > 0 ? TIME_DECAY * g->seconds[w] + (1 - TIME_DECAY) * seconds : seconds;
    g->n_timed[w]++;
    for (size_t k = 0; k < n_drafts && k <= n_right; k++) { /* up to the first that was wrong */
        g->trials[class][k] = DECAY * g->trials[class][k] + 1;
        g->hits[class][k] = DECAY * g->hits[class][k] + (k < n_right);
    }
    window_count(g, n_right + 1, seconds);
}
