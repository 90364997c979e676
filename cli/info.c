/* info.c - `k3 info`: what a model is: geometry, sizes, kernels, memory. Reads no weight. */
#include "cli/commands.h"

#include "cli/args.h"
#include "cli/console.h"
#include "cli/inputs.h"
#include "cli/place.h"

#include "k3_machine.h"
#include <stdio.h>

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

int cmd_info(const cli_args *a) {
    k3_engine *e = NULL;
    console con;
    const char *dir;
    if (a->kernels_list) return info_kernels_list();
    console_init(&con, a->quiet);
    int rc = model_find(a, &dir);
    if (rc == DONE) rc = engine_open_headers(&e, a, dir, &con, false, NULL);
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
