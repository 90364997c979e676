/* forecast.h - what a prompt costs before its first token: bytes read, arithmetic, seconds. `k3 plan`.
 *
 * Everything follows from the geometry and the plan, but for two rates: the disk's (given, or measured by
 * `k3 plan --reader`) and the cores' (given, or one of them measured here in half a second).
 */
#ifndef K3_FORECAST_H
#define K3_FORECAST_H

#include "k3.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Distinct experts of one layer's n_experts that n_pos positions choose, at most:
 *
 *     E (1 - (1 - k / E)^n)         E experts, k for each position, n positions
 *
 * as if every position chose anew, evenly and independently. Real routers prefer some experts, and
 * neighbours choose alike: the recorded prompt of docs/LAB.md had 0.80 of this at 5 positions and 0.62 at
 * 12, so what is printed is an upper bound. */
double forecast_distinct(uint32_t n_experts, uint32_t top_k, uint64_t n_pos);

/* Bytes that a prompt of n_pos ids reads, on an engine that was just opened: the streamed trunk once for
 * each part of each pass (the head once), and of each pass's distinct experts those that no slot
 * holds. Slots hold what earlier passes chose, up to the quota; pinned experts are there from the start. */
uint64_t forecast_bytes(const k3_shape *sh, const k3_plan *p, uint64_t n_pos);

/* Bytes that opening reads: trunk that stays, vectors, pinned experts. */
uint64_t forecast_open_bytes(const k3_shape *sh, const k3_plan *p);

/* Floating-point operations of a prompt, a multiply-add counted as two: *trunk for bf16 matrices and
 * attention, *experts for MXFP4. Norms, convolutions and the KDA recurrence, some 2 %, are left out. */
void forecast_flops(const k3_shape *sh, uint64_t n_pos, double *trunk, double *experts);

typedef struct {
    const k3_shape *sh;
    const k3_plan *p;
    const double *disk; /* bytes per second, one to three rates */
    size_t n_disk;
    int n_threads;
    double core_flops;   /* a second, of one thread; 0: to be measured */
    uint64_t n_chat;     /* ids of the chat template; 0: not known    */
    bool is_pinned_chat; /* n_chat is the released tokenizer's, not counted here */
} forecast;

/* The table, to stdout. K3_OK; K3_ENOMEM, K3_EUSAGE: the cores could not be measured, and it is printed
 * without computing. */
int forecast_print(const forecast *f);

#endif
