/* fake_gpu.c - gpu_tier.h on the CPU, to test what the server does with a GPU where there is none.
 * Sums are those of the reference kernels.
 *
 *   FAKE_GPU_SLOTS=N        room for N experts (default 64)
 *   FAKE_GPU_BEGIN=N        the Nth gpu_begin fails, and every call after it
 *   FAKE_GPU_END=N          the Nth gpu_end fails, and every call after it
 *   FAKE_GPU_UPLOAD=N       the Nth gpu_upload fails, and every call after it
 *   FAKE_GPU_UPLOAD_US=N    each upload takes N microseconds
 *   FAKE_GPU_BAD=N          the Nth request says that its first expert is out of range
 */
#include "../experts.h"
#include "../gpu_bench.h"
#include "../gpu_tier.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct gpu {
    gpu_options o;
    uint32_t n_slots;
    uint8_t *bytes;
    uint64_t one, part[6];
    expert_math math;
    const float *z, *w;
    const uint32_t *row;
    uint32_t n_rows, n_items;
    gpu_item *items;
    uint64_t n_begun, n_ended, n_uploaded;
};

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* Count one more call. Returns true, with a line in `why`, when it is the call that fails or a
 * later one. */
static bool fails(const char *name, uint64_t *n, char *why, size_t n_why) {
    uint64_t at = setting(name, 0);
    if (at == 0 || ++*n < at) return false;
    snprintf(why, n_why, "gpu: %s: the device fell off the bus", name);
    return true;
}

uint64_t gpu_slot_bytes(uint32_t latent, uint32_t inter) {
    return 3ull * ((uint64_t)latent * inter / 2 + (uint64_t)latent * inter / 32);
}

int gpu_open(gpu **out, const gpu_options *o, char *why, size_t n_why) {
    gpu *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g) {
        snprintf(why, n_why, "gpu: out of memory");
        return -1;
    }
    g->o = *o;
    g->one = gpu_slot_bytes(o->latent, o->inter);
    for (int k = 0; k < 6; k++) g->part[k] = (uint64_t)o->latent * o->inter / (k % 2 ? 32 : 2);
    g->n_slots = (uint32_t)(o->vram_bytes ? o->vram_bytes / g->one : setting("FAKE_GPU_SLOTS", 64));
    if (g->n_slots > o->max_slots) g->n_slots = o->max_slots;
    g->bytes = malloc(g->n_slots * g->one + 1);
    g->items = calloc(o->max_items, sizeof *g->items);
    g->math = (expert_math){&k3_kernels_ref, o->latent, o->inter, o->beta, o->linear_beta};
    if (!g->bytes || !g->items || g->n_slots == 0) {
        snprintf(why, n_why, "gpu: no room");
        gpu_close(g);
        return -1;
    }
    *out = g;
    return 0;
}

void gpu_close(gpu *g) {
    if (!g) return;
    free(g->bytes);
    free(g->items);
    free(g);
}

void gpu_info_get(const gpu *g, gpu_info *out) {
    *out = (gpu_info){.name = "a CPU that plays GPU",
                      .n_slots = g->n_slots,
                      .slot_bytes = g->one,
                      .vram_bytes = g->n_slots * g->one};
}

int gpu_upload(gpu *g, uint32_t slot, const uint8_t *const p[6], char *why, size_t n_why) {
    uint8_t *to = g->bytes + slot * g->one;
    uint64_t us = setting("FAKE_GPU_UPLOAD_US", 0);
    nanosleep(&(struct timespec){.tv_nsec = (long)us * 1000}, NULL);
    if (slot >= g->n_slots || fails("FAKE_GPU_UPLOAD", &g->n_uploaded, why, n_why)) return -1;
    for (int k = 0; k < 6; to += g->part[k++]) memcpy(to, p[k], g->part[k]);
    return 0;
}

int gpu_begin(gpu *g, const float *z, uint32_t n_rows, const gpu_item *items, uint32_t n_items,
              const uint32_t *row, const float *w, uint32_t n_pairs, char *why, size_t n_why) {
    (void)n_pairs;
    if (fails("FAKE_GPU_BEGIN", &g->n_begun, why, n_why)) return -1;
    memcpy(g->items, items, n_items * sizeof *items);
    g->z = z;
    g->w = w;
    g->row = row;
    g->n_rows = n_rows;
    g->n_items = n_items;
    return 0;
}

static void compute(gpu *g, const gpu_item *it, int64_t *Q, uint8_t *is_bad) {
    size_t lat = g->o.latent;
    float *scratch = aligned_alloc(64, (expert_one_floats(&g->math) * 4 + 63) / 64 * 64);
    expert_view x;
    const uint8_t *p = g->bytes + it->slot * g->one;
    for (int k = 0; k < 6; p += g->part[k++]) x.p[k] = p;
    for (uint32_t j = it->first; j < it->first + it->n; j++)
        if (!expert_one(&g->math, &x, g->z + g->row[j] * lat, g->w[j], Q + g->row[j] * lat, scratch))
            *is_bad = 1;
    free(scratch);
}

int gpu_end(gpu *g, int64_t *Q, uint8_t *is_bad, uint64_t *took_ns, char *why, size_t n_why) {
    size_t n = g->n_rows * (size_t)g->o.latent;
    int64_t *sum = calloc(n, sizeof *sum);
    static uint64_t n_bad_at;
    int n_bad = 0;
    if (!sum || fails("FAKE_GPU_END", &g->n_ended, why, n_why)) {
        free(sum);
        return -1;
    }
    memset(is_bad, 0, g->n_items);
    if (took_ns) *took_ns = 30000 + 5000ull * g->n_items;
    for (uint32_t x = 0; x < g->n_items; x++) compute(g, &g->items[x], sum, &is_bad[x]);
    if (++n_bad_at == setting("FAKE_GPU_BAD", 0)) is_bad[0] = 1;
    for (uint32_t x = 0; x < g->n_items; x++) n_bad += is_bad[x];
    for (size_t i = 0; n_bad == 0 && i < n; i++) Q[i] += sum[i];
    free(sum);
    return n_bad;
}

int gpu_bench(uint32_t latent, uint32_t inter, int device, uint64_t vram, char *why,
              size_t n_why) {
    (void)latent, (void)inter, (void)device, (void)vram;
    snprintf(why, n_why, "gpu: this one only plays GPU");
    return -1;
}
