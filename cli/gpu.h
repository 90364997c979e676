/* gpu.h - `--gpu`: a k3-tier of this machine that holds experts in the GPU's memory. */
#ifndef K3_CLI_GPU_H
#define K3_CLI_GPU_H

#include <stdbool.h>
#include <stddef.h>

#define GPU_RAM_BYTES (2ull << 30) /* what that box may take of this machine's memory */

/* The address of a k3-tier on this machine that serves this model from VRAM, started if there is none:
 * *is_new. False and one line in `why` when it cannot be had. */
bool gpu_join(const char *model_dir, const char *pins, const char *key_file, char *address,
              size_t cap, bool *is_new, char *why, size_t n_why);

#endif
