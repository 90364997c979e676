/* fuzz_config.c - config.json from memory, for libFuzzer or a replay of tests/corpus/config.
 *
 * A refusal must say why in one line; a shape that is accepted must keep what the rest of the
 * engine relies on. Includes k3.c; do not link it.
 */
#include "../k3.c"

#include "../k3_model.c"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_refused(int rc, const k3_error *err) {
    must(rc == K3_EMODEL, "a refusal that is no K3_EMODEL");
    must(strncmp(err->text, "config.json: ", 13) == 0, "a refusal that does not name the file");
    must_be_line(err->text);
}

static void check_shape(const k3_shape *sh) {
    const float f[] = {sh->rms_eps, sh->gate_lower_bound, sh->situ_beta, sh->situ_linear_beta,
                       sh->routed_scale};
    uint64_t dims[N_DIMS];
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) must(isfinite(f[i]), "a float");
    must(sh->rms_eps > 0 && sh->situ_beta > 0 && sh->situ_linear_beta > 0, "an eps or beta");
    must(sh->n_layers >= 1 && sh->n_layers <= K3_MAX_LAYERS && sh->n_dense <= sh->n_layers, "layers");
    must(sh->top_k >= 1 && sh->top_k <= K3_MAX_TOP_K && sh->top_k <= sh->n_experts, "top_k");
    must(sh->n_experts <= 65535 && sh->conv_width == 4 && sh->eos_id < sh->vocab_size, "numbers");
    must(sh->latent % K3_GROUP == 0 && sh->expert_inter % K3_GROUP == 0, "groups");
    for (uint32_t il = 0; il < K3_MAX_LAYERS; il++)
        must(sh->is_mla[il] <= (il < sh->n_layers), "a layer of no kind");
    shape_dims(sh, dims);
    for (int i = 0; i < N_DIMS; i++) must(dims[i] >= 1 && dims[i] <= MAX_DIM + 65535u, "a dimension");
    for (int t = 0; t < N_TENSORS; t++)
        must(tensor_elements(dims, (enum tensor)t) <= (uint64_t)1 << 49, "a tensor");
    must(sh->trunk_bytes < (uint64_t)1 << 63 && sh->expert_bytes < (uint64_t)1 << 52, "bytes");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    k3_error err = {""};
    k3_shape sh;
    if (size > CONFIG_MAX_BYTES) return 0;
    json_object *top = json_parse((const char *)data, size, 32, "config.json", &err);
    int rc = top ? shape_from_json(&sh, top, 1e-6f, &err) : K3_EMODEL;
    json_object_put(top);
    if (rc == 0)
        check_shape(&sh);
    else
        check_refused(rc, &err);
    return 0;
}
