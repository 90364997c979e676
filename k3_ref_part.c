/* ==== 4. Reference kernels ===========================================================
 *
 * The definition of the bits: each function is its formula in NUMERICS.md, one element at
 * a time, with no thought for speed. The SIMD files are tested against these, and the
 * engine works with none of them linked.
 */

/* The fold of dot16: 16 lanes to one, then + (+0) so that the result is never -0. */
static float ref_fold(float acc[16]) {
    for (int s = 8; s >= 1; s /= 2)
        for (int l = 0; l < s; l++) acc[l] = acc[l] + acc[l + s];
    return acc[0] + 0.0f;
}

/* One group of 32: evens, then odds. */
static void ref_group(float acc[16], const float w[32], const float *x_even, const float *x_odd) {
    for (int l = 0; l < 16; l++) acc[l] = k3_fma(w[2 * l], x_even[l], acc[l]);
    for (int l = 0; l < 16; l++) acc[l] = k3_fma(w[2 * l + 1], x_odd[l], acc[l]);
}

static float ref_dot(const float *a, const float *b, size_t n) {
    float acc[16] = {0};
    for (size_t i = 0; i < n; i += K3_GROUP) {
        float wa[K3_GROUP] = {0}, even[16] = {0}, odd[16] = {0};
        for (size_t k = 0; k < K3_GROUP && i + k < n; k++) {
            wa[k] = a[i + k];
            (k & 1 ? odd : even)[k >> 1] = b[i + k];
        }
        ref_group(acc, wa, even, odd);
    }
    return ref_fold(acc);
}

static void ref_matmul_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_rows,
                            size_t n, const float *xp, size_t batch) {
    size_t npad = k3_pad(n);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t i = 0; i < n; i += K3_GROUP) {
                const float *x = xp + k3_xp_group(npad, batch, t, i / K3_GROUP);
                float wf[K3_GROUP] = {0};
                for (size_t k = 0; k < K3_GROUP && i + k < n; k++)
                    wf[k] = k3_bf16_f32(w[r * ldw + i + k]);
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_matmul_f32(float *y, size_t ldy, const float *w, size_t n_rows, size_t n,
                           const float *xp, size_t batch) {
    size_t npad = k3_pad(n);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t i = 0; i < npad; i += K3_GROUP) {
                const float *x = xp + k3_xp_group(npad, batch, t, i / K3_GROUP);
                const float *packed = w + r * npad + i;
                float wf[K3_GROUP];
                for (size_t k = 0; k < K3_GROUP; k++) wf[k] = packed[k3_xp_lane(k)];
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_matmul_mxfp4(float *y, size_t ldy, const uint8_t *q, const uint8_t *s,
                             size_t n_rows, size_t n, const float *xp, size_t batch) {
    size_t n_group = n / K3_GROUP;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t t = 0; t < batch; t++) {
            float acc[16] = {0};
            for (size_t g = 0; g < n_group; g++) {
                const float *x = xp + k3_xp_group(n, batch, t, g);
                const uint8_t *nib = q + r * (n / 2) + g * (K3_GROUP / 2);
                float scale = k3_e8m0(s[r * n_group + g]), wf[K3_GROUP];
                for (size_t k = 0; k < K3_GROUP; k += 2) {
                    wf[k] = k3_e2m1(nib[k / 2] & 15) * scale;
                    wf[k + 1] = k3_e2m1(nib[k / 2] >> 4) * scale;
                }
                ref_group(acc, wf, x, x + 16);
            }
            y[t * ldy + r] = ref_fold(acc);
        }
}

static void ref_chain_bf16(float *y, size_t ldy, const uint16_t *w, size_t ldw, size_t n_i,
                           size_t n_j, const float *c, size_t ldc, size_t batch) {
    for (size_t t = 0; t < batch; t++)
        for (size_t j = 0; j < n_j; j++) {
            float sum = 0.0f;
            for (size_t i = 0; i < n_i; i++)
                sum = k3_fma(k3_bf16_f32(w[i * ldw + j]), c[t * ldc + i], sum);
            y[t * ldy + j] = sum;
        }
}

static void ref_chain_f32(float *y, size_t ldy, const float *w, size_t ldw, size_t n_i, size_t n_j,
                          const float *c, size_t ldc, size_t batch) {
    for (size_t t = 0; t < batch; t++)
        for (size_t j = 0; j < n_j; j++) {
            float sum = 0.0f;
            for (size_t i = 0; i < n_i; i++)
                sum = k3_fma(w[i * ldw + j], c[t * ldc + i], sum);
            y[t * ldy + j] = sum;
        }
}

/* Decay, read, delta write, read: the four lines of K3-SPEC 3.3 step 6. */
static void ref_kda(float *S, size_t d, size_t n_tok, const float *a, const float *k,
                    const float *q, const float *val, size_t ldv, const float *beta, size_t ldb,
                    float *o, size_t ldo) {
    for (size_t t = 0; t < n_tok; t++, a += d, k += d, q += d)
        for (size_t v = 0; v < d; v++) {
            float u = 0.0f, sum = 0.0f;
            for (size_t i = 0; i < d; i++) {
                S[i * d + v] = S[i * d + v] * a[i];
                u = k3_fma(S[i * d + v], k[i], u);
            }
            float delta = beta[t * ldb] * (val[t * ldv + v] - u);
            for (size_t i = 0; i < d; i++) {
                S[i * d + v] = k3_fma(k[i], delta, S[i * d + v]);
                sum = k3_fma(S[i * d + v], q[i], sum);
            }
            o[t * ldo + v] = sum;
        }
}

static uint64_t ref_read_stream(const void *p, size_t n_bytes) {
    const uint64_t *w = p;
    uint64_t sum = 0;
    for (size_t i = 0; i < n_bytes / sizeof *w; i++) sum += w[i];
    return sum;
}

static float ref_peak_fma(uint64_t n, uint64_t *flops) {
    float acc[8] = {0};
    for (uint64_t i = 0; i < n; i++)
        for (int l = 0; l < 8; l++) acc[l] = k3_fma(acc[l], 0.5f, 1.0f);
    *flops = n * 8 * 2;
    return ref_fold((float[16]){acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7]});
}

static bool ref_is_supported(void) { return true; }

const k3_kernels k3_kernels_ref = {
    .name = "ref",
    .is_supported = ref_is_supported,
    .matmul_bf16 = ref_matmul_bf16,
    .matmul_f32 = ref_matmul_f32,
    .matmul_mxfp4 = ref_matmul_mxfp4,
    .chain_bf16 = ref_chain_bf16,
    .chain_f32 = ref_chain_f32,
    .kda = ref_kda,
    .dot = ref_dot,
    K3_ELEMENTWISE_KERNELS,
    .read_stream = ref_read_stream,
    .peak_fma = ref_peak_fma,
};
