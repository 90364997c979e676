/* gpu_none.h - the functions of gpu_tier.h and gpu_bench.h for a k3-tier without the GPU arm: it
 * cannot be opened, and the rest is never called. */
#ifndef K3_GPU_NONE_H
#define K3_GPU_NONE_H

#include <stdio.h>

static inline int gpu_absent(char *why, size_t n_why) {
    snprintf(why, n_why, "gpu: this k3-tier was built without it; `make gpu` needs nvcc");
    return -1;
}

static inline int gpu_none_open(gpu **out, char *why, size_t n_why) {
    *out = NULL;
    return gpu_absent(why, n_why);
}

#define gpu_open(out, options, why, n) ((void)(options), gpu_none_open(out, why, n))
#define gpu_close(g) ((void)(g))
#define gpu_info_get(g, info) ((void)(g), *(info) = (gpu_info){.n_slots = 0})
#define gpu_upload(g, slot, p, why, n) ((void)(g), (void)(slot), (void)(p), gpu_absent(why, n))
#define gpu_begin(g, z, n_rows, items, n_items, row, w, n_pairs, why, n) \
    ((void)(g), (void)(z), (void)(items), gpu_absent(why, n))
#define gpu_end(g, Q, is_bad, took_ns, why, n)                                                     \
    ((void)(g), (void)(Q), *(took_ns) = 0, gpu_absent(why, n))
#define gpu_bench(latent, inter, device, vram, why, n) gpu_absent(why, n)

#endif
