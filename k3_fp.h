/* k3_fp.h - the floating-point state of a thread: what the bits need, and the caller's own given back. */
#ifndef K3_FP_H
#define K3_FP_H

#include "experts.h" /* fp_default */

/* The caller's own state, given back when a public function returns. */
static inline uint64_t fp_save(void) {
#if defined(__SSE2__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t v;
    __asm__ volatile("mrs %0, fpcr" : "=r"(v));
    return v;
#else
    return 0;
#endif
}

static inline void fp_restore(uint64_t saved) {
#if defined(__SSE2__)
    _mm_setcsr((unsigned)saved);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
#else
    (void)saved;
#endif
}

#endif
