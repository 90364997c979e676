/* gpu_tier.h - the GPU arm of the tier server: packed experts in VRAM, the CPU's bits.
 *
 * gpu_tier.cu is built only where nvcc is (`make gpu`); tier_server.c calls it through the
 * functions below and is complete without it. They keep three promises:
 *   - the sums of a request are those of experts.h, bit for bit (NUMERICS 1 to 5);
 *   - nothing is allocated after open, but with gpu_timing one CUDA graph for each shape of request;
 *   - an error of the device is returned with a line that says which call failed, and so is a device
 *     that hangs for five seconds; the caller then goes on without the arm. It does not close it:
 *     that might never end.
 *
 * Threads: gpu_begin and gpu_end belong to the thread that computes, gpu_upload to one other. A
 * slot that is being uploaded must not be in a request, nor the other way round.
 */
#ifndef K3_GPU_TIER_H
#define K3_GPU_TIER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_MAX_SHAPES 256

typedef struct gpu gpu;

typedef struct {
    uint32_t latent, inter;      /* multiples of 32                                      */
    uint32_t max_rows, max_items; /* of one request                                      */
    uint32_t max_pairs;
    float beta, linear_beta;     /* of SiTU                                              */
    int device;                  /* index, as CUDA counts                                */
    uint64_t vram_bytes;         /* for experts; 0: what is free, less GPU_MARGIN_BYTES; half of
                                  * that where it is this machine's own memory */
    uint32_t max_slots;          /* never room for more experts */
} gpu_options;

#define GPU_MARGIN_BYTES (1ull << 30)

typedef struct {
    char name[64];               /* the device                  */
    int sm_major, sm_minor, n_sm;
    uint32_t n_slots;            /* experts there is room for   */
    uint64_t slot_bytes, vram_bytes;
    int is_shared; /* VRAM is this machine's memory */
} gpu_info;

/* One expert of a request: pairs [first, first + n) go through what lies in `slot`. */
typedef struct {
    uint32_t slot, first, n;
} gpu_item;

/* Take the device, VRAM for slots, and buffers for the largest request. Returns 0; -1 and one line
 * in `why`: no device, a driver too old, not enough memory. */
int gpu_open(gpu **out, const gpu_options *o, char *why, size_t n_why);
void gpu_close(gpu *g);
void gpu_info_get(const gpu *g, gpu_info *out);

/* VRAM that nobody has taken, of this device; 0 when it cannot say. */
uint64_t gpu_free_bytes(const gpu *g);

/* Bytes of VRAM that one expert takes. */
uint64_t gpu_slot_bytes(uint32_t latent, uint32_t inter);

/* Put an expert into a slot, repacked. Blocks until it is there.
 * Shapes  p: the six tensors of expert_view (experts.h), as on disk
 * Returns 0; -1 and one line in `why` */
int gpu_upload(gpu *g, uint32_t slot, const uint8_t *const p[6], char *why, size_t n_why);

/* Start a request; the caller computes something else meanwhile.
 * Shapes  z: f32[n_rows][latent]   row: u32[n_pairs], below n_rows   w: f32[n_pairs]
 * Returns 0; -1 and one line in `why` */
int gpu_begin(gpu *g, const float *z, uint32_t n_rows, const gpu_item *items, uint32_t n_items,
              const uint32_t *row, const float *w, uint32_t n_pairs, char *why, size_t n_why);

/* Wait for it. is_bad[x] is set where a term of item x was not below 2^17 in size (NUMERICS 5);
 * when any is, nothing is added, else Q += the sums.
 * *took_ns, unless NULL: how long the device was at it, however late it is asked.
 * Shapes  Q: i64[n_rows][latent]   is_bad: u8[n_items]
 * Returns how many are bad; -1 and one line in `why` */
int gpu_end(gpu *g, int64_t *Q, uint8_t *is_bad, uint64_t *took_ns, char *why, size_t n_why);

/* For `k3-tier bench --gpu`: with timing on, the device notes how long each part of a request took,
 * nanoseconds: host to device, kernels, device to host. */
typedef struct {
    uint64_t in_ns, kernel_ns, out_ns;
} gpu_times;
void gpu_timing(gpu *g, int is_on);
int gpu_times_get(gpu *g, gpu_times *out, char *why, size_t n_why);

/* The device's own pace: bytes a second that a kernel can read, and that a copy moves (read and
 * written both counted). Overwrites slots: before the first upload. */
int gpu_bandwidth(gpu *g, double *read, double *copy, char *why, size_t n_why);

#ifdef __cplusplus
}
#endif

#ifndef K3_HAVE_GPU
#include "gpu_none.h"
#endif
#endif
