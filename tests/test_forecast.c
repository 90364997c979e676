/* test_forecast.c - what `k3 plan` says of prompts: bytes and operations, against counting and hand-made sums. */
#include "cli/forecast.h"
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define E 896
#define K 16

/* Distinct experts when each of n positions draws K of E, evenly and without repetition: counted. */
static double counted(uint64_t n_pos) {
    static uint8_t is_seen[E];
    static uint32_t card[E];
    double sum = 0;
    uint64_t seed = 1;
    const int n_trial = 50;
    for (int trial = 0; trial < n_trial; trial++) {
        memset(is_seen, 0, sizeof is_seen);
        for (uint32_t i = 0; i < E; i++) card[i] = i;
        for (uint64_t p = 0; p < n_pos; p++)
            for (uint32_t k = 0; k < K; k++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                uint32_t j = k + (uint32_t)((seed >> 33) % (E - k)), c = card[j];
                card[j] = card[k];
                card[k] = c;
                is_seen[c] = 1;
            }
        for (uint32_t i = 0; i < E; i++) sum += is_seen[i];
    }
    return sum / n_trial;
}

static bool is_near(double a, double b, double part) { return fabs(a - b) <= part * fabs(b); }

static void test_distinct(void) {
    static const uint64_t n[] = {1, 2, 12, 100, 512};
    for (size_t i = 0; i < sizeof n / sizeof *n; i++)
        CHECK(is_near(forecast_distinct(E, K, n[i]), counted(n[i]), 0.01));
    CHECK(forecast_distinct(E, K, 0) == 0);
    CHECK(is_near(forecast_distinct(E, K, 100) / E, 0.835, 0.001));
    CHECK(forecast_distinct(0, 1, 5) == 0);
    CHECK(is_near(forecast_distinct(32, 32, 1), 32, 1e-12));
}

static void test_bytes(void) {
    k3_shape sh = {.n_layers = 5, .n_dense = 1, .n_experts = E, .top_k = K, .expert_bytes = 1000};
    k3_plan p = {.chunk = 10, .streamed_bytes = 70000};
    sh.vocab_size = 100; /* the head: 100 x 10 x 2 bytes */
    sh.hidden = 10;
    uint64_t trunk = 3 * 70000 - 2 * 2000;
    double none = 4000 * (2 * forecast_distinct(E, K, 10) + forecast_distinct(E, K, 5));
    CHECK(is_near((double)(forecast_bytes(&sh, &p, 25) - trunk), none, 1e-4));
    p.quota = E; /* what was read once stays: the union of all chunks */
    CHECK(is_near((double)(forecast_bytes(&sh, &p, 25) - trunk), 4000 * counted(25), 0.01));
    p.quota = 0;
    p.n_pinned = 4 * E / 2; /* half of all are there from the start */
    CHECK(is_near((double)(forecast_bytes(&sh, &p, 25) - trunk), none / 2, 1e-4));
    CHECK(forecast_open_bytes(&sh, &p) == 4 * E / 2 * 1000);
    p.streamed_bytes = 0;
    p.n_pinned = 4 * E;
    CHECK(forecast_bytes(&sh, &p, 25) == 0);
    sh.n_dense = 5; /* no experts at all */
    p.streamed_bytes = 7;
    p.n_pinned = 0;
    CHECK(forecast_bytes(&sh, &p, 10) == 7);
    p.chunk = 0;
    CHECK(forecast_bytes(&sh, &p, 1) == 7);
}

static void test_flops(void) {
    k3_options o;
    k3_error err;
    k3_engine *e = NULL;
    double trunk, experts, attention;
    k3_options_default(&o);
    o.model_dir = "share/Kimi-K3";
    o.config_only = true;
    o.ram_bytes = (uint64_t)8 << 30;
    if (!CHECK(k3_engine_open(&e, &o, &err) == 0)) return;
    const k3_shape *sh = k3_engine_shape(e);
    forecast_flops(sh, 1, &trunk, &experts);
    CHECK(experts == 2.0 * 16 * 92 * 3 * 3584 * 3072);
    /* 111.2 GB of bf16 are multiplied for one token, the head with them (docs/PERFORMANCE.md) */
    CHECK(is_near(trunk, 111.2e9, 0.003));
    forecast_flops(sh, 1000, &attention, &experts);
    CHECK(experts == 1000 * 2.0 * 16 * 92 * 3 * 3584 * 3072);
    CHECK(attention > 1000 * 108e9 && attention < 1000 * 113e9);
    k3_engine_close(e);
}

int main(void) {
    test_begin("forecast");
    test_distinct();
    test_bytes();
    test_flops();
    return test_finish();
}
