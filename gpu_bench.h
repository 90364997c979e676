/* gpu_bench.h - `k3-tier bench --gpu`. */
#ifndef K3_GPU_BENCH_H
#define K3_GPU_BENCH_H

#include <stddef.h>
#include <stdint.h>

/* Print the table on stdout. `vram` 0: all that is free. Returns 0; -1 and one line in `why`. */
int gpu_bench(uint32_t latent, uint32_t inter, int device, uint64_t vram, char *why, size_t n_why);

#endif
