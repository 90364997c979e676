/* k3_model.c - config.json, shard headers and the index: parses what it does not trust.
 *
 *   1 Shape: config.json, nothing defaulted      2 Tensors and names
 *   3 A JSON scanner that keeps nothing          4 Headers, index, everything together
 */
#include "k3_model.h"

#include "k3_error.h"
#include "k3_json.h"
#include "slice.h"
#include "tier.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <json-c/json.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ==== 1. Shape =======================================================================
 *
 * config.json, nested (text_config) or flat. A missing field is refused, never defaulted:
 * engines that default "all layers KDA" or an eps answer fluently and wrongly. Decimals
 * become the nearest f32 straight from their text.
 */
typedef struct {
    json_object *top, *text; /* text: text_config, or top when flat */
    const char *prefix;      /* "text_config." or ""                */
    k3_error *err;
} config;

/* One required field; a dotted name goes one object deeper. NULL and `err` when absent. */
static json_object *config_field(const config *c, const char *name, json_type type) {
    json_object *at = c->text, *v = NULL;
    const char *dot = strchr(name, '.'), *leaf = name;
    if (dot) {
        char outer[64];
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - name), name);
        if (!json_object_object_get_ex(at, outer, &at) ||
            !json_object_is_type(at, json_type_object)) {
            fail(c->err, K3_EMODEL, "config.json: %s%s is missing or not an object", c->prefix,
                 outer);
            return NULL;
        }
        leaf = dot + 1;
    }
    if (!json_object_object_get_ex(at, leaf, &v)) {
        fail(c->err, K3_EMODEL,
             "config.json: field %s%s is missing; use the config.json released with the weights",
             c->prefix, name);
        return NULL;
    }
    bool is_number = type == json_type_double && json_object_is_type(v, json_type_int);
    if (!json_object_is_type(v, type) && !is_number) {
        fail(c->err, K3_EMODEL, "config.json: %s%s is %s, not of type %s", c->prefix, name,
             json_object_to_json_string(v), json_type_to_name(type));
        return NULL;
    }
    return v;
}

static int config_u32(const config *c, const char *name, uint32_t lo, uint32_t hi, uint32_t *out) {
    json_object *v = config_field(c, name, json_type_int);
    if (!v) return K3_EMODEL;
    int64_t n = json_object_get_int64(v);
    if (n < lo || n > hi)
        return fail(c->err, K3_EMODEL, "config.json: %s%s is %lld, outside %u..%u", c->prefix, name,
                    (long long)n, lo, hi);
    *out = (uint32_t)n;
    return 0;
}

static int config_f32(const config *c, const char *name, float *out) {
    json_object *v = config_field(c, name, json_type_double);
    if (!v) return K3_EMODEL;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!plain) return fail(c->err, K3_ENOMEM, "config.json: no C locale");
    *out = strtof_l(json_object_get_string(v), NULL, plain);
    freelocale(plain);
    if (!isfinite(*out))
        return fail(c->err, K3_EMODEL, "config.json: %s%s is %s, not a finite number", c->prefix,
                    name, json_object_get_string(v));
    return 0;
}

/* Refuse the field unless it has the one value that this engine computes. */
static int config_is(const config *c, const char *name, const char *want) {
    bool is_bool = strcmp(want, "true") == 0 || strcmp(want, "false") == 0;
    bool is_int = want[0] >= '0' && want[0] <= '9';
    json_object *v = config_field(c, name,
                                  is_bool  ? json_type_boolean
                                  : is_int ? json_type_int
                                           : json_type_string);
    if (!v) return K3_EMODEL;
    if (strcmp(json_object_get_string(v), want) != 0)
        return fail(c->err, K3_EMODEL, "config.json: %s%s is %s; this engine computes only %s",
                    c->prefix, name, json_object_get_string(v), want);
    return 0;
}

/* Mark the 1-based layers of one list; each layer belongs to exactly one list. */
static int config_layer_list(const config *c, const char *name, uint8_t mark, uint32_t n_layers,
                             uint8_t *kind) {
    json_object *list = config_field(c, name, json_type_array);
    if (!list) return K3_EMODEL;
    for (size_t i = 0; i < json_object_array_length(list); i++) {
        json_object *v = json_object_array_get_idx(list, i);
        int64_t n = json_object_is_type(v, json_type_int) ? json_object_get_int64(v) : 0;
        if (n < 1 || n > n_layers)
            return fail(c->err, K3_EMODEL, "config.json: %s%s[%zu] is %s, not a layer of 1..%u",
                        c->prefix, name, i, json_object_to_json_string(v), n_layers);
        if (kind[n - 1] != 0xff)
            return fail(c->err, K3_EMODEL, "config.json: layer %lld is listed twice (%s%s)",
                        (long long)n, c->prefix, name);
        kind[n - 1] = mark;
    }
    return 0;
}

static int config_layers(const config *c, k3_shape *sh) {
    int rc;
    memset(sh->is_mla, 0xff, sizeof sh->is_mla);
    if ((rc = config_layer_list(c, "linear_attn_config.full_attn_layers", 1, sh->n_layers,
                                sh->is_mla)) < 0 ||
        (rc = config_layer_list(c, "linear_attn_config.kda_layers", 0, sh->n_layers, sh->is_mla)) <
            0)
        return rc;
    for (uint32_t il = 0; il < sh->n_layers; il++)
        if (sh->is_mla[il] == 0xff)
            return fail(c->err, K3_EMODEL,
                        "config.json: layer %u of %u is in neither full_attn_layers nor kda_layers",
                        il + 1, sh->n_layers);
    memset(sh->is_mla + sh->n_layers, 0, sizeof sh->is_mla - sh->n_layers);
    return 0;
}

/* Check the fields that must have one value for the formulas of K3-SPEC 3 to apply. */
static int config_fixed(const config *c) {
    static const char *const fixed[][2] = {
        {"hidden_act", "situ"},
        {"mla_use_nope", "true"},
        {"mla_use_output_gate", "true"},
        {"linear_attn_config.use_full_rank_gate", "true"},
        {"linear_attn_config.short_conv_kernel_size", "4"},
        {"moe_router_activation_func", "sigmoid"},
        {"moe_renormalize", "true"},
        {"moe_layer_freq", "1"},
        {"num_expert_group", "1"},
        {"topk_group", "1"},
        {"topk_method", "noaux_tc"},
        {"latent_moe_use_norm", "true"},
        {"tie_word_embeddings", "false"},
    };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        int rc = config_is(c, fixed[i][0], fixed[i][1]);
        if (rc < 0) return rc;
    }
    return 0;
}

/* Check how experts are packed, where the config states it (in text_config, else at top level). */
static int config_quantization(const config *c) {
    json_object *q = NULL, *v = NULL;
    if (!json_object_object_get_ex(c->text, "quantization_config", &q) &&
        !json_object_object_get_ex(c->top, "quantization_config", &q))
        return 0; /* not stated: the headers decide, which must have weight_packed and weight_scale */
    if (!json_object_object_get_ex(q, "format", &v) || !json_object_get_string(v) ||
        strcmp(json_object_get_string(v), "mxfp4-pack-quantized") != 0)
        return fail(c->err, K3_EMODEL,
                    "config.json: quantization_config.format is %s; this engine reads "
                    "mxfp4-pack-quantized, the format of the official release",
                    v ? json_object_get_string(v) : "missing");
    return 0;
}

#define MAX_DIM (1u << 24)
#define MAX_ELEMENTS (1ull << 48) /* elements of one tensor */
STATIC_ASSERT(every_matrix_passes_the_header_check, (uint64_t)MAX_DIM * MAX_DIM <= MAX_ELEMENTS);
STATIC_ASSERT(mxfp4_group_is_a_packed_group, K3_GROUP == 32);
STATIC_ASSERT(layers_fit_the_wire, K3_MAX_LAYERS <= TIER_MAX_LAYERS);
STATIC_ASSERT(choices_fit_the_wire, K3_MAX_TOP_K <= TIER_MAX_TOP_K);
STATIC_ASSERT(slices_keep_to_the_wire,
              SLICE_MAX_LAYERS == TIER_MAX_LAYERS && SLICE_MAX_EXPERTS == TIER_MAX_EXPERTS);

static int config_numbers(const config *c, k3_shape *sh) {
    uint32_t kv_heads = 0;
    const struct {
        const char *name;
        uint32_t lo, hi, *to;
    } u[] = {
        {"vocab_size", 1, MAX_DIM, &sh->vocab_size},
        {"hidden_size", 1, MAX_DIM, &sh->hidden},
        {"num_hidden_layers", 1, K3_MAX_LAYERS, &sh->n_layers},
        {"num_attention_heads", 1, 65535, &sh->n_heads},
        {"num_key_value_heads", 1, 65535, &kv_heads},
        {"q_lora_rank", 1, MAX_DIM, &sh->q_lora},
        {"kv_lora_rank", 1, MAX_DIM, &sh->kv_lora},
        {"qk_nope_head_dim", 1, 65535, &sh->nope_dim},
        {"qk_rope_head_dim", 1, 65535, &sh->rope_dim},
        {"v_head_dim", 1, 65535, &sh->v_dim},
        {"linear_attn_config.num_heads", 1, 65535, &sh->kda_heads},
        {"linear_attn_config.head_dim", 1, 65535, &sh->kda_dim},
        {"linear_attn_config.short_conv_kernel_size", 1, 64, &sh->conv_width},
        {"attn_res_block_size", 1, 65535, &sh->block_size},
        {"intermediate_size", 1, MAX_DIM, &sh->dense_inter},
        {"first_k_dense_replace", 0, K3_MAX_LAYERS, &sh->n_dense},
        {"num_experts", 1, 65535, &sh->n_experts},
        {"num_experts_per_token", 1, K3_MAX_TOP_K, &sh->top_k},
        {"num_shared_experts", 1, 1024, &sh->n_shared},
        {"moe_intermediate_size", 1, MAX_DIM, &sh->expert_inter},
        {"routed_expert_hidden_size", 1, MAX_DIM, &sh->latent},
        {"max_position_embeddings", 1, 1u << 30, &sh->max_position},
    };
    const struct {
        const char *name;
        float *to;
    } f[] = {
        {"rms_norm_eps", &sh->rms_eps},
        {"linear_attn_config.gate_lower_bound", &sh->gate_lower_bound},
        {"activation_situ_beta", &sh->situ_beta},
        {"activation_situ_linear_beta", &sh->situ_linear_beta},
        {"routed_scaling_factor", &sh->routed_scale},
    };
    int rc;
    for (size_t i = 0; i < sizeof u / sizeof *u; i++)
        if ((rc = config_u32(c, u[i].name, u[i].lo, u[i].hi, u[i].to)) < 0) return rc;
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if ((rc = config_f32(c, f[i].name, f[i].to)) < 0) return rc;
    if (kv_heads != sh->n_heads)
        return fail(c->err, K3_EMODEL,
                    "config.json: %snum_key_value_heads is %u but num_attention_heads is %u; they "
                    "must agree",
                    c->prefix, kv_heads, sh->n_heads);
    config top = {c->top, c->top, "", c->err};
    return config_u32(&top, "eos_token_id", 0, sh->vocab_size - 1, &sh->eos_id);
}

/* Check the dimensions against each other. */
static int config_consistent(const config *c, const k3_shape *sh) {
    const struct {
        const char *name;
        uint64_t v;
    } wide[] = {
        {"num_attention_heads x (qk_nope + qk_rope)",
         (uint64_t)sh->n_heads * (sh->nope_dim + sh->rope_dim)},
        {"num_attention_heads x (qk_nope + v)", (uint64_t)sh->n_heads * (sh->nope_dim + sh->v_dim)},
        {"linear_attn_config.num_heads x head_dim", (uint64_t)sh->kda_heads * sh->kda_dim},
        {"num_shared_experts x moe_intermediate_size", (uint64_t)sh->n_shared * sh->expert_inter},
    };
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (wide[i].v > MAX_DIM)
            return fail(c->err, K3_EMODEL, "config.json: %s is %llu, more than %u", wide[i].name,
                        (unsigned long long)wide[i].v, MAX_DIM);
    if (sh->top_k > sh->n_experts)
        return fail(c->err, K3_EMODEL,
                    "config.json: num_experts_per_token %u exceeds num_experts %u", sh->top_k,
                    sh->n_experts);
    if (sh->latent % K3_GROUP || sh->expert_inter % K3_GROUP)
        return fail(
            c->err, K3_EMODEL,
            "config.json: routed_expert_hidden_size %u and moe_intermediate_size %u must be "
            "multiples of 32, the MXFP4 group",
            sh->latent, sh->expert_inter);
    if (sh->n_dense > sh->n_layers)
        return fail(c->err, K3_EMODEL,
                    "config.json: first_k_dense_replace %u exceeds num_hidden_layers %u",
                    sh->n_dense, sh->n_layers);
    const struct {
        const char *name;
        float v;
        bool is_below;
    } sign[] = {
        {"rms_norm_eps", sh->rms_eps, false},
        {"activation_situ_beta", sh->situ_beta, false},
        {"activation_situ_linear_beta", sh->situ_linear_beta, false},
        {"linear_attn_config.gate_lower_bound", sh->gate_lower_bound, true}, /* decay <= 1 */
    };
    for (size_t i = 0; i < sizeof sign / sizeof *sign; i++)
        if (!(sign[i].is_below ? sign[i].v < 0 : sign[i].v > 0))
            return fail(c->err, K3_EMODEL, "config.json: %s%s is %g; it must be %s 0", c->prefix,
                        sign[i].name, (double)sign[i].v, sign[i].is_below ? "below" : "above");
    return 0;
}

void shape_sizes(k3_shape *sh);

/* The name that a config gives its model, for a message: printable, at most 48 bytes; "" without one. */
static void config_label(json_object *v, char out[49]) {
    if (json_object_is_type(v, json_type_array)) v = json_object_array_get_idx(v, 0);
    const char *text = json_object_is_type(v, json_type_string) ? json_object_get_string(v) : "";
    size_t n = strnlen(text, 48);
    for (size_t i = 0; i < n; i++) out[i] = text[i] > ' ' && text[i] < 0x7f ? text[i] : '?';
    out[n] = 0;
}

/* Word the message for a config.json that was refused with `rc`. If it names another model, the message
 * says so first, and then why it was refused. If it names none, or kimi_k3, the message stays. */
static int config_stranger(json_object *top, int rc, k3_error *err) {
    json_object *v = NULL;
    char type[49] = "", name[49] = "", why[sizeof err->text] = "";
    if (json_object_object_get_ex(top, "model_type", &v)) config_label(v, type);
    if (json_object_object_get_ex(top, "architectures", &v)) config_label(v, name);
    bool is_ours = type[0] ? strcmp(type, "kimi_k3") == 0
                           : !name[0] || strncmp(name, "KimiK3", strlen("KimiK3")) == 0;
    if (is_ours || !err) return rc;
    snprintf(why, sizeof why, "%s", err->text);
    return fail(err, rc,
                "config.json: this model is %s%s%s%s; k3 runs Kimi K3 (model_type kimi_k3) and no "
                "other architecture; name another directory with --model (%.300s)",
                name[0] ? name : "of another type", type[0] ? " (model_type " : "", type,
                type[0] ? ")" : "", why);
}

/* Fill the shape from parsed JSON (borrowed). */
static int shape_from_json(k3_shape *sh, json_object *top, float eps_lora, k3_error *err) {
    config c = {top, top, "", err};
    memset(sh, 0, sizeof *sh);
    if (!json_object_is_type(top, json_type_object))
        return fail(err, K3_EMODEL, "config.json: not a JSON object");
    json_object *nested;
    if (json_object_object_get_ex(top, "text_config", &nested)) {
        if (!json_object_is_type(nested, json_type_object))
            return fail(err, K3_EMODEL, "config.json: text_config is not an object");
        c.text = nested;
        c.prefix = "text_config.";
    }
    int rc;
    if ((rc = config_fixed(&c)) < 0 || (rc = config_numbers(&c, sh)) < 0 ||
        (rc = config_consistent(&c, sh)) < 0 || (rc = config_layers(&c, sh)) < 0 ||
        (rc = config_quantization(&c)) < 0)
        return rc == K3_EMODEL ? config_stranger(top, rc, err) : rc;
    sh->shared_inter = sh->n_shared * sh->expert_inter;
    sh->eps_lora = eps_lora;
    shape_sizes(sh);
    return 0;
}

/* Parse exactly `n` bytes as one JSON value. `what` names the file in errors. */
static json_object *json_parse(const char *text, size_t n, int depth, const char *what,
                               k3_error *err) {
    if (n == 0 || n > INT32_MAX) {
        fail(err, K3_EMODEL, "%s: %s", what, n ? "too large for JSON" : "empty");
        return NULL;
    }
    json_tokener *tok = json_tokener_new_ex(depth);
    if (!tok) {
        fail(err, K3_ENOMEM, "%s: out of memory", what);
        return NULL;
    }
    json_object *v = json_tokener_parse_ex(tok, text, (int)n);
    enum json_tokener_error e = json_tokener_get_error(tok);
    size_t end = json_tokener_get_parse_end(tok);
    while (e == json_tokener_success && end < n && strchr(" \t\r\n", text[end]) && text[end]) end++;
    const char *lie = e == json_tokener_success ? json_fault(text, end, v) : NULL;
    if (e != json_tokener_success || end < n || lie) {
        const char *why = e == json_tokener_continue  ? "ends too early"
                          : e != json_tokener_success ? json_tokener_error_desc(e)
                          : lie                       ? lie
                                                      : "has text after its end";
        fail(err, K3_EMODEL, "%s: not valid JSON: %s at byte %zu; download the file again", what,
             why, end);
        json_object_put(v);
        v = NULL;
    }
    json_tokener_free(tok);
    return v;
}

#define CONFIG_MAX_BYTES (256u << 10) /* the release has 7 KB; json-c grows it up to 260-fold */
STATIC_ASSERT(every_config_can_be_staged, CONFIG_MAX_BYTES <= TIER_MAX_CONFIG);

/* Open a regular file for reading; a FIFO is refused, not waited for. Returns the descriptor
 * or a status with errno set (0: not a regular file). */
int file_open(const char *path, uint64_t *size, k3_error *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int why = errno;
        fail(err, K3_EIO, "%s: %s", path, strerror(why));
        errno = why;
        return K3_EIO;
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        errno = 0;
        return fail(err, K3_EIO, "%s: not a regular file", path);
    }
    *size = (uint64_t)st.st_size;
    return fd;
}

/* Read a whole small file into malloc'd memory. */
static int read_whole(const char *path, size_t max_bytes, char **out, size_t *n, k3_error *err) {
    uint64_t size = 0;
    int fd = file_open(path, &size, err), rc = 0;
    if (fd < 0) return fd;
    FILE *f = size <= max_bytes ? fdopen(fd, "rb") : NULL;
    char *buf = f ? malloc((size_t)size + 1) : NULL;
    *out = NULL;
    if (size > max_bytes) {
        rc = fail(err, K3_EMODEL, "%s: %llu bytes, more than the %zu this file can sensibly have",
                  path, (unsigned long long)size, max_bytes);
    } else if (!buf) {
        rc = fail(err, K3_ENOMEM, "%s: out of memory", path);
    } else if ((*n = fread(buf, 1, (size_t)size, f)) != size) {
        rc = fail(err, K3_EIO, "%s: read %zu of %llu bytes", path, *n, (unsigned long long)size);
    } else {
        *out = buf;
        buf = NULL;
    }
    free(buf);
    if (f)
        fclose(f);
    else
        close(fd);
    return rc;
}

int shape_read(k3_shape *sh, const char *dir, float eps_lora, k3_error *err) {
    char path[4096];
    struct stat st;
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode))
        return fail(err, K3_EMODEL, "%s: no such model directory; name one with --model", dir);
    if (stat(path, &st) != 0)
        return fail(err, K3_EMODEL,
                    "%s: no config.json; a model directory holds config.json, tiktoken.model, "
                    "tokenizer_config.json and model-*.safetensors, as downloaded",
                    dir);
    size_t n = 0;
    char *text = NULL;
    int rc = read_whole(path, CONFIG_MAX_BYTES, &text, &n, err);
    if (rc < 0) return rc;
    json_object *top = json_parse(text, n, 32, "config.json", err);
    rc = top ? shape_from_json(sh, top, eps_lora, err) : K3_EMODEL;
    json_object_put(top);
    free(text);
    return rc;
}

/* ==== 2. Tensors and names ===========================================================
 *
 * One table says which tensors the trunk of each kind of layer has, with dtype and shape; an expert is
 * six tensors in a fixed order. Every shard's header is checked against it: bounds, overlaps, dtype,
 * shape, duplicates, and at the end that nothing expected is missing. What stays in memory is a place
 * (shard, offset) for each trunk tensor and 64 bytes for each expert: 5.3 MB for the release's 497,220
 * tensors.
 */
static const char *const DTYPE_NAME[] = {"BF16", "F32", "U8"};
const uint64_t DTYPE_BYTES[] = {2, 4, 1};

const tensor_def TENSOR[N_TENSORS] = {
    [T_EMBED] = {"model.embed_tokens.weight", IN_MODEL, BF16, 2, {D_VOCAB, D_HIDDEN}},
    [T_LM_HEAD] = {"lm_head.weight", IN_MODEL, BF16, 2, {D_VOCAB, D_HIDDEN}},
    [T_NORM] = {"model.norm.weight", IN_MODEL, BF16, 1, {D_HIDDEN}},
    [T_OUT_RES_NORM] = {"model.output_attn_res_norm.weight", IN_MODEL, BF16, 1, {D_HIDDEN}},
    [T_OUT_RES_PROJ] = {"model.output_attn_res_proj.weight", IN_MODEL, BF16, 2, {D_1, D_HIDDEN}},

    [T_IN_NORM] = {"input_layernorm.weight", IN_LAYER, BF16, 1, {D_HIDDEN}},
    [T_POST_NORM] = {"post_attention_layernorm.weight", IN_LAYER, BF16, 1, {D_HIDDEN}},
    [T_ATT_RES_NORM] = {"self_attention_res_norm.weight", IN_LAYER, BF16, 1, {D_HIDDEN}},
    [T_ATT_RES_PROJ] = {"self_attention_res_proj.weight", IN_LAYER, BF16, 2, {D_1, D_HIDDEN}},
    [T_MLP_RES_NORM] = {"mlp_res_norm.weight", IN_LAYER, BF16, 1, {D_HIDDEN}},
    [T_MLP_RES_PROJ] = {"mlp_res_proj.weight", IN_LAYER, BF16, 2, {D_1, D_HIDDEN}},

    [T_KDA_Q] = {"self_attn.q_proj.weight", IN_KDA, BF16, 2, {D_KDA, D_HIDDEN}},
    [T_KDA_K] = {"self_attn.k_proj.weight", IN_KDA, BF16, 2, {D_KDA, D_HIDDEN}},
    [T_KDA_V] = {"self_attn.v_proj.weight", IN_KDA, BF16, 2, {D_KDA, D_HIDDEN}},
    [T_KDA_G] = {"self_attn.g_proj.weight", IN_KDA, BF16, 2, {D_KDA, D_HIDDEN}},
    [T_KDA_O] = {"self_attn.o_proj.weight", IN_KDA, BF16, 2, {D_HIDDEN, D_KDA}},
    [T_CONV_Q] = {"self_attn.q_conv1d.weight", IN_KDA, F32, 3, {D_KDA, D_1, D_CONV}},
    [T_CONV_K] = {"self_attn.k_conv1d.weight", IN_KDA, F32, 3, {D_KDA, D_1, D_CONV}},
    [T_CONV_V] = {"self_attn.v_conv1d.weight", IN_KDA, F32, 3, {D_KDA, D_1, D_CONV}},
    [T_F_A] = {"self_attn.f_a_proj.weight", IN_KDA, BF16, 2, {D_KDA_DIM, D_HIDDEN}},
    [T_F_B] = {"self_attn.f_b_proj.weight", IN_KDA, BF16, 2, {D_KDA, D_KDA_DIM}},
    [T_B] = {"self_attn.b_proj.weight", IN_KDA, BF16, 2, {D_KDA_HEADS, D_HIDDEN}},
    [T_A_LOG] = {"self_attn.A_log", IN_KDA, F32, 1, {D_KDA_HEADS}}, /* may be padded in the file */
    [T_DT_BIAS] = {"self_attn.dt_bias", IN_KDA, F32, 1, {D_KDA}},
    [T_O_NORM] = {"self_attn.o_norm.weight", IN_KDA, F32, 1, {D_KDA_DIM}},

    [T_Q_A] = {"self_attn.q_a_proj.weight", IN_MLA, BF16, 2, {D_Q_LORA, D_HIDDEN}},
    [T_Q_A_NORM] = {"self_attn.q_a_layernorm.weight", IN_MLA, BF16, 1, {D_Q_LORA}},
    [T_Q_B] = {"self_attn.q_b_proj.weight", IN_MLA, BF16, 2, {D_Q, D_Q_LORA}},
    [T_KV_A] = {"self_attn.kv_a_proj_with_mqa.weight", IN_MLA, BF16, 2, {D_KV_A, D_HIDDEN}},
    [T_KV_A_NORM] = {"self_attn.kv_a_layernorm.weight", IN_MLA, BF16, 1, {D_KV_LORA}},
    [T_KV_B] = {"self_attn.kv_b_proj.weight", IN_MLA, BF16, 2, {D_KV_B, D_KV_LORA}},
    [T_MLA_G] = {"self_attn.g_proj.weight", IN_MLA, BF16, 2, {D_O, D_HIDDEN}},
    [T_MLA_O] = {"self_attn.o_proj.weight", IN_MLA, BF16, 2, {D_HIDDEN, D_O}},

    [T_GATE] = {"mlp.gate_proj.weight", IN_DENSE, BF16, 2, {D_DENSE, D_HIDDEN}},
    [T_UP] = {"mlp.up_proj.weight", IN_DENSE, BF16, 2, {D_DENSE, D_HIDDEN}},
    [T_DOWN] = {"mlp.down_proj.weight", IN_DENSE, BF16, 2, {D_HIDDEN, D_DENSE}},

#define MOE "block_sparse_moe."
    [T_ROUTER] = {MOE "gate.weight", IN_MOE, BF16, 2, {D_EXPERTS, D_HIDDEN}},
    [T_ROUTER_BIAS] = {MOE "gate.e_score_correction_bias", IN_MOE, F32, 1, {D_EXPERTS}},
    [T_LAT_DOWN] = {MOE "routed_expert_down_proj.weight", IN_MOE, BF16, 2, {D_LATENT, D_HIDDEN}},
    [T_LAT_NORM] = {MOE "routed_expert_norm.weight", IN_MOE, BF16, 1, {D_LATENT}},
    [T_LAT_UP] = {MOE "routed_expert_up_proj.weight", IN_MOE, BF16, 2, {D_HIDDEN, D_LATENT}},
    [T_SH_GATE] = {MOE "shared_experts.gate_proj.weight", IN_MOE, BF16, 2, {D_SHARED, D_HIDDEN}},
    [T_SH_UP] = {MOE "shared_experts.up_proj.weight", IN_MOE, BF16, 2, {D_SHARED, D_HIDDEN}},
    [T_SH_DOWN] = {MOE "shared_experts.down_proj.weight", IN_MOE, BF16, 2, {D_HIDDEN, D_SHARED}},
};


/* Floats that a session keeps of a KDA layer: the matrix S of each head, and the last three inputs of
 * the convolutions of q, k and v, which are four wide. */
static uint64_t kda_floats(const k3_shape *sh) {
    uint64_t n = (uint64_t)sh->kda_heads * sh->kda_dim;
    return n * sh->kda_dim + 3 * 3 * n;
}

/* Floats that a session keeps of layer il for n_pos positions. */
uint64_t layer_floats(const k3_shape *sh, uint32_t il, uint64_t n_pos) {
    return sh->is_mla[il] ? n_pos * k3_pad(sh->kv_lora + sh->rope_dim) : kda_floats(sh);
}

void shape_dims(const k3_shape *sh, uint64_t dims[N_DIMS]) {
    dims[D_1] = 1;
    dims[D_CONV] = sh->conv_width;
    dims[D_VOCAB] = sh->vocab_size;
    dims[D_HIDDEN] = sh->hidden;
    dims[D_KDA] = (uint64_t)sh->kda_heads * sh->kda_dim;
    dims[D_KDA_DIM] = sh->kda_dim;
    dims[D_KDA_HEADS] = sh->kda_heads;
    dims[D_Q_LORA] = sh->q_lora;
    dims[D_Q] = (uint64_t)sh->n_heads * (sh->nope_dim + sh->rope_dim);
    dims[D_KV_LORA] = sh->kv_lora;
    dims[D_KV_A] = sh->kv_lora + sh->rope_dim;
    dims[D_KV_B] = (uint64_t)sh->n_heads * (sh->nope_dim + sh->v_dim);
    dims[D_O] = (uint64_t)sh->n_heads * sh->v_dim;
    dims[D_DENSE] = sh->dense_inter;
    dims[D_EXPERTS] = sh->n_experts;
    dims[D_LATENT] = sh->latent;
    dims[D_SHARED] = sh->shared_inter;
}

bool layer_has(const k3_shape *sh, uint32_t il, enum part part) {
    switch (part) {
    case IN_LAYER: return true;
    case IN_KDA: return !sh->is_mla[il];
    case IN_MLA: return sh->is_mla[il];
    case IN_DENSE: return il < sh->n_dense;
    case IN_MOE: return il >= sh->n_dense;
    default: return false;
    }
}

uint64_t tensor_elements(const uint64_t dims[N_DIMS], enum tensor t) {
    uint64_t n = 1;
    for (int i = 0; i < TENSOR[t].n_dims; i++) n *= dims[TENSOR[t].dims[i]];
    return n;
}

uint64_t tensor_bytes(const uint64_t dims[N_DIMS], enum tensor t) {
    return tensor_elements(dims, t) * DTYPE_BYTES[TENSOR[t].dtype];
}

/* Rows and bytes-per-row of one expert tensor: w1, w3 [inter][latent], w2 [latent][inter]. */
static void expert_dims(const k3_shape *sh, int k, uint64_t *rows, uint64_t *row_bytes) {
    bool is_w2 = k >= W2_PACKED;
    uint64_t n = is_w2 ? sh->expert_inter : sh->latent;
    *rows = is_w2 ? sh->latent : sh->expert_inter;
    *row_bytes = k % 2 ? n / K3_GROUP : n / 2;
}

uint64_t expert_tensor_bytes(const k3_shape *sh, int k) {
    uint64_t rows, row_bytes;
    expert_dims(sh, k, &rows, &row_bytes);
    return rows * row_bytes;
}

void shape_sizes(k3_shape *sh) {
    uint64_t dims[N_DIMS];
    shape_dims(sh, dims);
    sh->expert_bytes = 0;
    for (int k = 0; k < N_EXPERT_TENSORS; k++) sh->expert_bytes += expert_tensor_bytes(sh, k);
    sh->trunk_bytes = sh->state_bytes = sh->pos_bytes = 0;
    for (int t = 0; t < N_MODEL_TENSORS; t++) sh->trunk_bytes += tensor_bytes(dims, t);
    for (uint32_t il = 0; il < sh->n_layers; il++) {
        for (int t = N_MODEL_TENSORS; t < N_TENSORS; t++)
            if (layer_has(sh, il, TENSOR[t].part)) sh->trunk_bytes += tensor_bytes(dims, t);
        if (sh->is_mla[il])
            sh->pos_bytes += k3_pad(dims[D_KV_A]) * sizeof(float);
        else
            sh->state_bytes += kda_floats(sh) * sizeof(float);
    }
}

/* ---- Names ---- */

static bool skip_prefix(const char **s, const char *prefix) {
    size_t n = strlen(prefix);
    if (strncmp(*s, prefix, n) != 0) return false;
    *s += n;
    return true;
}

/* Read a decimal below `limit` and the dot behind it, and step over both. */
static bool skip_number(const char **s, uint32_t limit, uint32_t *out) {
    const char *p = *s;
    uint64_t v = 0;
    if (*p < '0' || *p > '9' || (*p == '0' && p[1] != '.')) return false;
    for (; *p >= '0' && *p <= '9' && v < limit; p++) v = v * 10 + (uint64_t)(*p - '0');
    if (*p != '.' || v >= limit) return false;
    *out = (uint32_t)v;
    *s = p + 1;
    return true;
}

static bool is_vision(const char *name) {
    return skip_prefix(&name, "vision_tower.") || skip_prefix(&name, "mm_projector.");
}


static bool name_parse(const k3_shape *sh, const char *name, name_id *id) {
    skip_prefix(&name, "language_model.");
    memset(id, 0, sizeof *id);
    id->expert_tensor = -1;
    if (!skip_prefix(&name, "model.layers.")) {
        for (int t = 0; t < N_MODEL_TENSORS; t++)
            if (strcmp(name, TENSOR[t].name) == 0) return id->tensor = (enum tensor)t, true;
        return false;
    }
    if (!skip_number(&name, sh->n_layers, &id->il)) return false;
    if (id->il >= sh->n_dense && skip_prefix(&name, MOE "experts.")) {
        if (!skip_number(&name, sh->n_experts, &id->ie)) return false;
        for (int k = 0; k < N_EXPERT_TENSORS; k++)
            if (strcmp(name, EXPERT_TENSOR[k]) == 0) return id->expert_tensor = k, true;
        return false;
    }
    for (int t = N_MODEL_TENSORS; t < N_TENSORS; t++)
        if (layer_has(sh, id->il, TENSOR[t].part) && strcmp(name, TENSOR[t].name) == 0)
            return id->tensor = (enum tensor)t, true;
    return false;
}

/* Write the official name of a tensor. */
void name_write(const name_id *id, char *out, size_t cap) {
    if (id->expert_tensor >= 0)
        snprintf(out, cap, "language_model.model.layers.%u." MOE "experts.%u.%s", id->il, id->ie,
                 EXPERT_TENSOR[id->expert_tensor]);
    else if (TENSOR[id->tensor].part == IN_MODEL)
        snprintf(out, cap, "language_model.%s", TENSOR[id->tensor].name);
    else
        snprintf(out, cap, "language_model.model.layers.%u.%s", id->il, TENSOR[id->tensor].name);
}

expert_place *model_expert(const model *m, const k3_shape *sh, uint32_t il, uint32_t ie) {
    return &m->experts[(size_t)(il - sh->n_dense) * sh->n_experts + ie];
}

static place *model_place(model *m, const name_id *id) {
    return TENSOR[id->tensor].part == IN_MODEL ? &m->at_model[id->tensor]
                                               : &m->at[id->il][id->tensor];
}

/* Call fn for every tensor that the shape expects, in layer order. */
int model_expect(const k3_shape *sh, expect_fn fn, void *user) {
    name_id id = {0, -1, 0, 0};
    int rc;
    for (int t = 0; t < N_MODEL_TENSORS; t++) {
        id.tensor = (enum tensor)t;
        if ((rc = fn(user, &id)) != 0) return rc;
    }
    for (id.il = 0; id.il < sh->n_layers; id.il++) {
        id.expert_tensor = -1;
        for (int t = N_MODEL_TENSORS; t < N_TENSORS; t++) {
            id.tensor = (enum tensor)t;
            if (layer_has(sh, id.il, TENSOR[t].part) && (rc = fn(user, &id)) != 0) return rc;
        }
        if (id.il < sh->n_dense) continue;
        for (id.ie = 0; id.ie < sh->n_experts; id.ie++)
            for (id.expert_tensor = 0; id.expert_tensor < N_EXPERT_TENSORS; id.expert_tensor++)
                if ((rc = fn(user, &id)) != 0) return rc;
    }
    return 0;
}

/* ==== 3. A JSON scanner that keeps nothing ===========================================
 *
 * Headers and the index are 136 MB of JSON of one fixed form. Trees of it would take kilobytes for each
 * tensor, and a hostile one 250 times its size; so both are read as they pass by.
 */
typedef struct {
    FILE *f;                  /* the index, or NULL and  */
    const char *p, *end;      /* a header in memory      */
    uint64_t n;               /* characters taken        */
    int c;                    /* the current one, or EOF */
} scan;

static void scan_next(scan *s) {
    s->c = s->f ? getc_unlocked(s->f) : s->p < s->end ? (unsigned char)*s->p++ : EOF;
    s->n++;
}

static void scan_space(scan *s) {
    while (s->c == ' ' || s->c == '\n' || s->c == '\r' || s->c == '\t') scan_next(s);
}

/* Read a JSON string into out, or skip it where out is NULL. Returns false when it is no string, is too
 * long, or never ends. */
static bool scan_string(scan *s, char *out, size_t cap) {
    size_t n = 0;
    scan_space(s);
    if (s->c != '"') return false;
    for (scan_next(s); s->c != '"'; scan_next(s)) {
        if (s->c == '\\') scan_next(s); /* names have no \u escapes: they would not match */
        if (s->c == EOF || s->c == 0 || (out && n + 1 >= cap)) return false;
        if (out) out[n++] = (char)s->c;
    }
    if (out) out[n] = 0;
    scan_next(s);
    return true;
}

static bool scan_char(scan *s, int c) {
    scan_space(s);
    if (s->c != c) return false;
    scan_next(s);
    return true;
}

/* Skip any value, up to the ',' or bracket that follows it. Returns false when there is none. */
static bool scan_value(scan *s) {
    for (int depth = 0;;) {
        scan_space(s);
        if (s->c == EOF || depth > 64) return false;
        if (s->c == '"') {
            if (!scan_string(s, NULL, 0)) return false;
            continue;
        }
        bool is_open = s->c == '{' || s->c == '[', is_close = s->c == '}' || s->c == ']';
        if (depth == 0 && (is_close || s->c == ',')) return true;
        depth += is_open - is_close;
        scan_next(s);
    }
}

static bool scan_u64(scan *s, uint64_t *out) {
    uint64_t v = 0;
    scan_space(s);
    if (s->c < '0' || s->c > '9') return false;
    for (; s->c >= '0' && s->c <= '9'; scan_next(s)) {
        uint64_t digit = (uint64_t)(s->c - '0');
        if (v > (UINT64_MAX - digit) / 10) return false;
        v = 10 * v + digit;
    }
    *out = v;
    return true;
}

/* Read a list of at most `cap` numbers. Returns how many, or -1. */
static int scan_list(scan *s, uint64_t *out, int cap) {
    int n = 0;
    if (!scan_char(s, '[')) return -1;
    if (scan_char(s, ']')) return 0;
    do {
        if (n == cap || !scan_u64(s, &out[n])) return -1;
        n++;
    } while (scan_char(s, ','));
    return scan_char(s, ']') ? n : -1;
}

/* ==== 4. Headers, index, everything together ========================================= */

typedef struct {
    uint64_t begin, end;
    const char *name; /* in the header's text, escapes and all */
    int n_name;
} span;

static int span_order(const void *a, const void *b) {
    const span *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* One entry of a header, as the file states it. */
typedef struct {
    char dtype[16];
    int n_dims;
    uint64_t dims[8], n_elements, begin, end;
} header_entry;

/* Read the fields of {"dtype","shape","data_offsets"} in any order. Returns NULL, or what is wrong. */
static const char *header_entry_fields(scan *s, header_entry *h) {
    char key[64];
    uint64_t off[2];
    bool has_dtype = false, has_shape = false, has_offsets = false, is_twice = false;
    if (!scan_char(s, '{')) return "is not an object";
    if (!scan_char(s, '}')) {
        do {
            if (!scan_string(s, key, sizeof key) || !scan_char(s, ':'))
                return "has a malformed field";
            if (strcmp(key, "dtype") == 0) {
                is_twice |= has_dtype;
                if (!(has_dtype = scan_string(s, h->dtype, sizeof h->dtype)))
                    return "has an impossible dtype";
            } else if (strcmp(key, "shape") == 0) {
                is_twice |= has_shape;
                has_shape = (h->n_dims = scan_list(s, h->dims, 8)) >= 0;
                if (!has_shape) return "has an impossible shape: at most 8 sizes";
            } else if (strcmp(key, "data_offsets") == 0) {
                is_twice |= has_offsets;
                if (!(has_offsets = scan_list(s, off, 2) == 2))
                    return "has impossible data_offsets";
            } else if (!scan_value(s)) {
                return "has a malformed field";
            }
        } while (scan_char(s, ','));
        if (!scan_char(s, '}')) return "has a malformed field";
    }
    if (!has_dtype || !has_shape || !has_offsets) return "has no dtype, shape or data_offsets";
    if (is_twice) return "has dtype, shape or data_offsets twice";
    h->begin = off[0];
    h->end = off[1];
    return NULL;
}

static const char *header_entry_parse(scan *s, header_entry *h) {
    const char *why = header_entry_fields(s, h);
    if (why) return why;
    h->n_elements = 1;
    for (int i = 0; i < h->n_dims; i++) {
        if (h->dims[i] && h->n_elements > MAX_ELEMENTS / h->dims[i])
            return "has an impossible shape";
        h->n_elements *= h->dims[i];
    }
    return h->begin <= h->end ? NULL : "has impossible data_offsets";
}

static void shape_text(const uint64_t *dims, int n_dims, char *out, size_t cap) {
    size_t n = (size_t)snprintf(out, cap, "[");
    for (int i = 0; i < n_dims && n < cap; i++)
        n +=
            (size_t)snprintf(out + n, cap - n, "%s%llu", i ? "," : "", (unsigned long long)dims[i]);
    if (n < cap) snprintf(out + n, cap - n, "]");
}

/* Does the entry have the dtype and shape that the model wants of `id`? */
static int header_entry_check(const model *m, const k3_shape *sh, const name_id *id,
                              const header_entry *h, const char *name, const char *file,
                              k3_error *err) {
    uint64_t want[3];
    int n_dims = 2;
    enum dtype dtype = U8;
    if (id->expert_tensor >= 0) {
        expert_dims(sh, id->expert_tensor, &want[0], &want[1]);
    } else {
        const tensor_def *d = &TENSOR[id->tensor];
        dtype = d->dtype;
        n_dims = d->n_dims;
        for (int i = 0; i < n_dims; i++) want[i] = m->dims[d->dims[i]];
        if (id->tensor == T_A_LOG && h->n_dims == 1 && h->dims[0] > want[0])
            want[0] = h->dims[0]; /* padded: num_heads entries count */
    }
    if (strcmp(h->dtype, DTYPE_NAME[dtype]) != 0)
        return fail(err, K3_EMODEL, "%s in %s: dtype %s, expected %s", name, file, h->dtype,
                    DTYPE_NAME[dtype]);
    if (h->n_dims != n_dims || memcmp(h->dims, want, (size_t)n_dims * sizeof *want) != 0) {
        char has[200], wants[80];
        shape_text(h->dims, h->n_dims, has, sizeof has);
        shape_text(want, n_dims, wants, sizeof wants);
        return fail(err, K3_EMODEL, "%s in %s: shape %s, but config.json asks for %s", name, file,
                    has, wants);
    }
    if (h->end - h->begin != h->n_elements * DTYPE_BYTES[dtype])
        return fail(err, K3_EMODEL, "%s in %s: data_offsets span %llu bytes, its shape needs %llu",
                    name, file, (unsigned long long)(h->end - h->begin),
                    (unsigned long long)(h->n_elements * DTYPE_BYTES[dtype]));
    return 0;
}

/* Remember where a known tensor lies; refuse a second one. */
static int model_put(model *m, const k3_shape *sh, const name_id *id, uint64_t offset,
                     uint16_t i_shard, const char *name, k3_error *err) {
    uint16_t *at_shard;
    uint64_t *at_offset;
    if (id->expert_tensor >= 0) {
        expert_place *e = model_expert(m, sh, id->il, id->ie);
        at_shard = &e->shard[id->expert_tensor];
        at_offset = &e->offset[id->expert_tensor];
    } else {
        place *p = model_place(m, id);
        at_shard = &p->shard;
        at_offset = &p->offset;
    }
    if (*at_shard == i_shard)
        return fail(err, K3_EMODEL, "%s is twice in %s; download it again", name,
                    m->shards[i_shard].name);
    if (*at_shard != NO_SHARD)
        return fail(err, K3_EMODEL,
                    "%s is in both %s and %s; remove the file that is not part of the release",
                    name, m->shards[*at_shard].name, m->shards[i_shard].name);
    *at_shard = i_shard;
    *at_offset = offset;
    return 0;
}

static void model_note_unknown(model *m, const char *name, const char *file) {
    char line[1000];
    if (!m->opt->note || m->n_unknown++ >= 8) return;
    snprintf(line, sizeof line, "tensor %.300s in %s is not part of the text model: ignored%s",
             name, file, m->n_unknown == 8 ? " (and no more are named)" : "");
    one_line(line);
    m->opt->note(m->opt->user, line);
}

/* Check one entry and put it in the table. `data` is the offset in the file at which data begins. */
static int header_take(model *m, const k3_shape *sh, uint16_t i_shard, const char *name, scan *text,
                       uint64_t data, span *sp, k3_error *err) {
    const shard *s = &m->shards[i_shard];
    header_entry h;
    const char *why = header_entry_parse(text, &h);
    if (why)
        return fail(err, K3_EMODEL, "%s in %s: %s (header byte %llu); download it again", name,
                    s->name, why, (unsigned long long)text->n - 1);
    if (h.end > s->size - data)
        return fail(err, K3_EMODEL,
                    "%s: truncated: %s ends at byte %llu but the file has %llu; download it again",
                    s->name, name, (unsigned long long)(data + h.end), (unsigned long long)s->size);
    sp->begin = h.begin;
    sp->end = h.end;
    name_id id;
    if (is_vision(name)) return 0;
    if (!name_parse(sh, name, &id)) {
        model_note_unknown(m, name, s->name);
        return 0;
    }
    if (id.expert_tensor >= 0) m->is_flat = strncmp(name, "language_model.", 15) != 0;
    int rc = header_entry_check(m, sh, &id, &h, name, s->name, err);
    return rc < 0 ? rc : model_put(m, sh, &id, data + h.begin, i_shard, name, err);
}

static int header_overlaps(span *spans, size_t n, const char *file, k3_error *err) {
    qsort(spans, n, sizeof *spans, span_order);
    for (size_t i = 1; i < n; i++)
        if (spans[i].begin < spans[i - 1].end)
            return fail(err, K3_EMODEL, "%s: %.*s and %.*s overlap at data offset %llu", file,
                        spans[i - 1].n_name, spans[i - 1].name, spans[i].n_name, spans[i].name,
                        (unsigned long long)spans[i].begin);
    return 0;
}

/* Does the metadata say, as scripts/make_checkpoint.py --sparse-trunk writes it, that matrices of the
 * trunk are holes on purpose? */
static bool header_is_sparse(const char *metadata, size_t n) {
    static const char mark[] = "\"k3_sparse\"";
    return memmem(metadata, n, mark, sizeof mark - 1) != NULL;
}

/* Check all entries of a header of n bytes. `spans` has room for every entry that n bytes can hold. */
static int header_scan(model *m, const k3_shape *sh, uint16_t i_shard, const char *text, size_t n,
                       span *spans, k3_error *err) {
    const char *file = m->shards[i_shard].name;
    scan s = {NULL, text, text + n, 0, 0};
    char name[1024];
    size_t n_spans = 0;
    scan_next(&s);
    bool is_good = scan_char(&s, '{');
    if (is_good && !scan_char(&s, '}')) {
        do {
            scan_space(&s);
            span *sp = &spans[n_spans];
            sp->name = s.p;
            is_good = scan_string(&s, name, sizeof name) && scan_char(&s, ':');
            if (!is_good) break;
            if (strcmp(name, "__metadata__") == 0) {
                const char *from = s.p;
                if (!(is_good = scan_value(&s))) break;
                m->shards[i_shard].is_sparse = header_is_sparse(from, (size_t)(s.p - from));
                continue;
            }
            sp->n_name = (int)strcspn(sp->name, "\"");
            int rc = header_take(m, sh, i_shard, name, &s, 8 + n, sp, err);
            if (rc < 0) return rc;
            n_spans++;
        } while (scan_char(&s, ','));
        is_good = is_good && scan_char(&s, '}');
    }
    scan_space(&s);
    if (!is_good || s.c != EOF)
        return fail(err, K3_EMODEL, "%s: its header is malformed at byte %llu; download it again",
                    file, (unsigned long long)s.n - 1);
    return header_overlaps(spans, n_spans, file, err);
}

#define ENTRY_MIN_BYTES 40 /* "":{"dtype":"","shape":[],"data_offsets":[0,0]} has 47 */

/* Check all entries of a header of n bytes of text. Each entry has a brace of its own, so as many spans
 * are made as the text has braces. */
static int header_entries(model *m, const k3_shape *sh, uint16_t i_shard, const char *text,
                          size_t n, k3_error *err) {
    uint64_t n_spans = 1, most = n / ENTRY_MIN_BYTES + 1;
    for (size_t i = 0; i < n; i++) n_spans += text[i] == '{';
    uint64_t bytes = (n_spans < most ? n_spans : most) * sizeof(span);
    span *spans = ledger_take(m->mem, bytes, "its header's entries", err);
    if (!spans) return fail_in(err, m->mem->why, "%s", m->shards[i_shard].name);
    int rc = header_scan(m, sh, i_shard, text, n, spans, err);
    ledger_give(m->mem, spans, bytes);
    return rc;
}

#define HEADER_MAX_BYTES 100000000u /* the safetensors format's own limit */

/* Read exactly n bytes of one copy. Interrupted and partial reads go on; the end of the file is an
 * error. */
int read_copy(const shard *s, int copy, void *to, uint64_t n, uint64_t offset,
                     k3_error *err) {
    uint8_t *p = to;
    while (n > 0) {
        size_t part_bytes = n < (1u << 30) ? (size_t)n : 1u << 30;
        ssize_t got = pread(s->fd[copy], p, part_bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(err, K3_EIO, "%s: read of %llu bytes at offset 0x%llx: %s", s->name,
                        (unsigned long long)n, (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return fail(err, K3_EIO, "%s: short by %llu bytes at offset 0x%llx; did it shrink?",
                        s->name, (unsigned long long)n, (unsigned long long)offset);
        p += got;
        n -= (uint64_t)got;
        offset += (uint64_t)got;
    }
    return 0;
}

/* Read exactly n bytes from the first copy that can; each is asked twice. */
int read_exact(const shard *s, void *to, uint64_t n, uint64_t offset, k3_error *err) {
    int rc = K3_EIO;
    for (int i = 0; rc < 0 && i < 2 * K3_MAX_COPIES; i++)
        if (s->fd[i / 2] >= 0) rc = read_copy(s, i / 2, to, n, offset, err);
    return rc;
}

/* Read a header's length. An impossible one is an error, and *length is then 0. */
static int header_length(const shard *s, uint64_t *length, k3_error *err) {
    uint8_t len8[8];
    *length = 0;
    if (s->size < 8)
        return fail(err, K3_EMODEL, "%s: %llu bytes is no safetensors file; download it again",
                    s->name, (unsigned long long)s->size);
    int rc = read_exact(s, len8, 8, 0, err);
    if (rc < 0) return rc;
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | len8[i];
    if (n > s->size - 8)
        return fail(
            err, K3_EMODEL,
            "%s: its header of %llu bytes is larger than the file (%llu); download it again",
            s->name, (unsigned long long)n, (unsigned long long)s->size);
    if (n > HEADER_MAX_BYTES)
        return fail(err, K3_EMODEL, "%s: header of %llu bytes, more than the format's limit of %u",
                    s->name, (unsigned long long)n, HEADER_MAX_BYTES);
    *length = n;
    return 0;
}

static int header_read(model *m, const k3_shape *sh, uint16_t i_shard, k3_error *err) {
    const shard *s = &m->shards[i_shard];
    uint64_t n;
    int rc = header_length(s, &n, err);
    if (rc < 0) return rc;
    char *text = ledger_take(m->mem, n + 1, "its header", err);
    if (!text) return fail_in(err, m->mem->why, "%s", s->name);
    if (n > m->header_bytes) m->header_bytes = n;
    rc = read_exact(s, text, n, 8, err);
    if (rc == 0) rc = header_entries(m, sh, i_shard, text, (size_t)n, err);
    ledger_give(m->mem, text, n + 1);
    return rc;
}

/* ---- Counts ----
 *
 * config.json says how many experts there are, and a table is made for all of them. Before a large one is made the
 * headers are looked at: no memory is taken for tensors that no header names. A header is counted in pieces, and only
 * as far as it is text: the holes of a sparse file name nothing. */

static uint64_t count_text(const char *text, size_t n, const char *word) {
    uint64_t count = 0;
    size_t n_word = strlen(word);
    for (const char *p = text, *end = text + n; (p = memmem(p, (size_t)(end - p), word, n_word));) {
        p += n_word;
        count++;
    }
    return count;
}

/* The most tensors that a shard's header can name; 0 where it has none, which header_read() will
 * report. */
static uint64_t header_count(const shard *s) {
    static const char word[] = "\"data_offsets\"";
    enum { STEP = 1 << 16, OVERLAP = sizeof word - 2 };
    char buf[OVERLAP + STEP];
    uint64_t n, n_found = 0;
    if (header_length(s, &n, NULL) < 0) return 0;
    size_t kept = 0;
    for (uint64_t at = 0, part_bytes; at < n; at += part_bytes) {
        part_bytes = n - at < STEP ? n - at : STEP;
        if (read_exact(s, buf + kept, part_bytes, 8 + at, NULL) < 0 || memchr(buf, 0, kept + part_bytes)) break;
        n_found += count_text(buf, kept + part_bytes, word);
        size_t all = kept + part_bytes;
        kept = all < OVERLAP ? all : OVERLAP;
        memmove(buf, buf + all - kept, kept);
    }
    return n_found;
}

static uint64_t model_tensors(const k3_shape *sh) {
    uint64_t n = N_MODEL_TENSORS;
    for (uint32_t il = 0; il < sh->n_layers; il++)
        for (int t = N_MODEL_TENSORS; t < N_TENSORS; t++) n += layer_has(sh, il, TENSOR[t].part);
    return n + (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts * N_EXPERT_TENSORS;
}

/* Do the headers name as many tensors as config.json asks for? They are counted only where tables are
 * large, and not in a slice, which may hold any number of experts: there the budget is the bound. */
static int model_counts(const model *m, const k3_shape *sh, k3_error *err) {
    uint64_t n_want = model_tensors(sh), n_named = 0;
    uint32_t n_shards = 0;
    if (m->experts_bytes <= SMALL_TABLES || m->opt->config_only || m->opt->experts_only) return 0;
    for (uint32_t i = 0; i < m->n_shards && n_named < n_want; i++) {
        if (!m->shards[i].is_needed) continue;
        n_named += header_count(&m->shards[i]);
        n_shards++;
    }
    if (n_named >= n_want) return 0;
    return fail(err, K3_EMODEL,
                "config.json: %u layers, %u of them with %u experts each, are %llu tensors, but "
                "the headers of %u shards name at most %llu; is the download complete, and this its config.json?",
                sh->n_layers, sh->n_layers - sh->n_dense, sh->n_experts, (unsigned long long)n_want,
                n_shards, (unsigned long long)n_named);
}

/* ---- The index, streamed: only to learn which shards must be there ---- */

static int shard_find(const model *m, const char *name) {
    for (uint32_t i = 0; i < m->n_shards; i++)
        if (strcmp(m->shards[i].name, name) == 0) return (int)i;
    return -1;
}

static int shard_add(model *m, const char *name, k3_error *err) {
    if (m->n_shards == K3_MAX_SHARDS)
        return fail(err, K3_EMODEL, "%s: more than %d shards", m->dir, K3_MAX_SHARDS);
    shard *grown = realloc(m->shards, (m->n_shards + 1) * sizeof *grown);
    char *copy = strdup(name);
    if (grown) m->shards = grown;
    if (!grown || !copy) {
        free(copy);
        return fail(err, K3_ENOMEM, "%s: out of memory for shard names", m->dir);
    }
    shard *s = &m->shards[m->n_shards];
    *s = (shard){.name = copy};
    for (int i = 0; i < K3_MAX_COPIES; i++) s->fd[i] = s->fd_direct[i] = -1;
    return (int)m->n_shards++;
}

/* Read the pairs of weight_map, after its opening brace. */
static int index_pairs(model *m, scan *s, k3_error *err) {
    char name[1024], file[512];
    int i = -1;
    if (scan_char(s, '}')) return 0;
    do {
        if (!scan_string(s, name, sizeof name) || !scan_char(s, ':') ||
            !scan_string(s, file, sizeof file))
            return fail(err, K3_EMODEL,
                        "model.safetensors.index.json: weight_map is malformed at byte %llu; "
                        "download it again",
                        (unsigned long long)s->n - 1);
        if (strchr(file, '/') || file[0] == '.' || file[0] == 0)
            return fail(err, K3_EMODEL,
                        "model.safetensors.index.json: %s: shard %s is not a plain file name", name,
                        file);
        if (i < 0 || strcmp(m->shards[i].name, file) != 0) i = shard_find(m, file);
        if (i < 0 && (i = shard_add(m, file, err)) < 0) return i;
        if (!is_vision(name)) m->shards[i].is_needed = true;
    } while (scan_char(s, ','));
    if (!scan_char(s, '}'))
        return fail(err, K3_EMODEL,
                    "model.safetensors.index.json: ends too early; download it again");
    return 0;
}

/* Read the top level of the index, up to weight_map and through it. */
static int index_scan(model *m, FILE *f, k3_error *err) {
    scan s = {f, NULL, NULL, 0, 0};
    char key[1024];
    bool is_found = false;
    scan_next(&s);
    if (!scan_char(&s, '{')) goto bad;
    do {
        if (!scan_string(&s, key, sizeof key) || !scan_char(&s, ':')) goto bad;
        bool is_map = strcmp(key, "weight_map") == 0;
        if (is_map && is_found)
            return fail(err, K3_EMODEL,
                        "model.safetensors.index.json: weight_map is there twice; download it again");
        if (is_map && scan_char(&s, '{')) {
            int rc = index_pairs(m, &s, err);
            if (rc < 0) return rc;
            is_found = true;
        } else if (!scan_value(&s)) {
            goto bad;
        }
    } while (scan_char(&s, ','));
    if (is_found && scan_char(&s, '}')) return 0;
bad:
    return fail(err, K3_EMODEL,
                "model.safetensors.index.json: not an index with a weight_map; download it again");
}

/* Without an index: take every *.safetensors of the directory. */
static int shards_from_dir(model *m, k3_error *err) {
    DIR *d = opendir(m->dir);
    if (!d) return fail(err, K3_EIO, "%s: %s", m->dir, strerror(errno));
    int i = 0;
    for (struct dirent *e; i >= 0 && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (n > 12 && strcmp(e->d_name + n - 12, ".safetensors") == 0 && e->d_name[0] != '.') {
            i = shard_add(m, e->d_name, err);
            if (i >= 0) m->shards[i].is_needed = true;
        }
    }
    closedir(d);
    if (i >= 0 && m->n_shards == 0)
        return fail(err, K3_EMODEL, "%s: no *.safetensors files; is the download complete?",
                    m->dir);
    return i < 0 ? i : 0;
}

/* Names of shards for one message, which gives the first, a few more, and the number of the rest. */
#define NAMED_MOST 6

typedef struct {
    uint32_t n;
    const char *first;
    char others[256];
} shard_names;

static void shard_names_add(shard_names *w, const char *name) {
    size_t n = strlen(w->others);
    if (w->n++ == 0)
        w->first = name;
    else if (w->n <= NAMED_MOST && n + strlen(name) + 3 < sizeof w->others)
        snprintf(w->others + n, sizeof w->others - n, "%s%s", n ? ", " : "", name);
    else if (w->n == NAMED_MOST + 1 && n + 6 < sizeof w->others)
        snprintf(w->others + n, sizeof w->others - n, "%s...", n ? ", " : "");
}

/* Open a shard. Where there is no such file, its name is added to `absent` and that is no error. */
static int shard_open(model *m, shard *s, shard_names *absent, k3_error *err) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", m->dir, s->name);
    s->fd[0] = file_open(path, &s->size, err);
    if (s->fd[0] >= 0) return 0;
    if (errno != ENOENT) return s->fd[0];
    shard_names_add(absent, s->name);
    return 0;
}

/* Refuse an incomplete download, in one message for all shards that are absent. */
static int shards_absent(const model *m, const shard_names *w, k3_error *err) {
    const char *why = m->has_index ? "named by the index but not in" : "a dangling link in";
    uint32_t n_needed = 0;
    if (w->n == 0) return 0;
    if (w->n == 1) return fail(err, K3_EMODEL, "%s: %s %s; download it", w->first, why, m->dir);
    for (uint32_t i = 0; i < m->n_shards; i++) n_needed += m->shards[i].is_needed;
    char more[32] = "is one more";
    if (w->n > 2) snprintf(more, sizeof more, "are %u others", w->n - 1);
    return fail(err, K3_EMODEL,
                "%s: %s %.120s, nor %s (%s): %u of %u shards are there; the same download command "
                "goes on where it stopped",
                w->first, why, m->dir, more, w->others, n_needed - w->n, n_needed);
}

static int name_order(const void *a, const void *b) {
    return strcmp(((const shard *)a)->name, ((const shard *)b)->name);
}

static int model_shards(model *m, k3_error *err) {
    char path[4096];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", m->dir);
    uint64_t size;
    int fd = file_open(path, &size, err);
    if (fd < 0 && errno != ENOENT) return fd;
    m->has_index = fd >= 0;
    FILE *f = fd >= 0 ? fdopen(fd, "rb") : NULL;
    if (fd >= 0 && !f) {
        close(fd);
        return fail(err, K3_ENOMEM, "%s: out of memory", path);
    }
    int rc = f ? index_scan(m, f, err) : shards_from_dir(m, err);
    if (f) fclose(f);
    if (rc < 0) return rc;
    if (m->n_shards > 0) qsort(m->shards, m->n_shards, sizeof *m->shards, name_order);
    shard_names absent = {.n = 0};
    for (uint32_t i = 0; i < m->n_shards; i++)
        if (m->shards[i].is_needed && (rc = shard_open(m, &m->shards[i], &absent, err)) < 0)
            return rc;
    return shards_absent(m, &absent, err);
}

/* Shard i_first was refused because its download had stopped. Check the headers of the shards behind it
 * too, so that one message names all of that kind; it begins with the message of the first. */
static int shards_damaged(model *m, const k3_shape *sh, uint32_t i_first, int rc, k3_error *err) {
    shard_names w = {.n = 0};
    k3_error other;
    char why[sizeof other.text];
    if (rc != K3_EMODEL || !err) return rc;
    snprintf(why, sizeof why, "%s", err->text);
    for (uint32_t i = i_first; i < m->n_shards; i++)
        if (m->shards[i].is_needed &&
            (i == i_first || header_read(m, sh, (uint16_t)i, &other) == K3_EMODEL))
            shard_names_add(&w, m->shards[i].name);
    if (w.n == 1) return fail(err, rc, "%s", why);
    if (w.n == 2) return fail(err, rc, "%.220s; one more shard is refused too: %s", why, w.others);
    return fail(err, rc, "%.220s; %u more shards are refused too: %s", why, w.n - 1, w.others);
}

/* ---- Everything together ---- */

typedef struct {
    model *m;
    const k3_shape *sh;
    name_id first;
    uint64_t n_missing;
} missing;

static int missing_visit(void *user, const name_id *id) {
    missing *w = user;
    uint16_t i_shard = id->expert_tensor >= 0
                           ? model_expert(w->m, w->sh, id->il, id->ie)->shard[id->expert_tensor]
                           : model_place(w->m, id)->shard;
    if (i_shard == NO_SHARD && w->n_missing++ == 0) w->first = *id;
    return 0;
}

bool expert_is_here(const expert_place *at) { return at->shard[0] != NO_SHARD; }

/* Check a slice: each expert has all six tensors or none, and at least one expert is there. */
static int model_partial(const model *m, const k3_shape *sh, k3_error *err) {
    uint64_t n_here = 0;
    for (uint32_t il = sh->n_dense; il < sh->n_layers; il++)
        for (uint32_t ie = 0; ie < sh->n_experts; ie++) {
            const expert_place *at = model_expert(m, sh, il, ie);
            int n = 0;
            for (int k = 0; k < N_EXPERT_TENSORS; k++) n += at->shard[k] != NO_SHARD;
            n_here += n == N_EXPERT_TENSORS;
            if (n > 0 && n < N_EXPERT_TENSORS)
                return fail(err, K3_EMODEL,
                            "%s: expert %u of layer %u has %d of its six tensors; copy the slice "
                            "again",
                            m->dir, ie, il, n);
        }
    return n_here > 0 ? 0 : fail(err, K3_EMODEL, "%s: no experts in its shards", m->dir);
}

static int model_complete(model *m, const k3_shape *sh, k3_error *err) {
    missing w = {m, sh, {0, -1, 0, 0}, 0};
    char name[256];
    if (m->opt->experts_only) return model_partial(m, sh, err);
    model_expect(sh, missing_visit, &w);
    if (w.n_missing == 0) return 0;
    name_write(&w.first, name, sizeof name);
    char others[64] = "";
    if (w.n_missing > 1)
        snprintf(others, sizeof others, ", nor are %llu others",
                 (unsigned long long)(w.n_missing - 1));
    return fail(err, K3_EMODEL,
                "%s: %s is in no shard%s; is the download complete, and this its config.json?",
                m->dir, name, others);
}

void model_close(model *m) {
    for (uint32_t i = 0; i < m->n_shards; i++) {
        for (int c = 0; c < K3_MAX_COPIES; c++) {
            if (m->shards[i].fd[c] >= 0) close(m->shards[i].fd[c]);
            if (m->shards[i].fd_direct[c] >= 0) close(m->shards[i].fd_direct[c]);
        }
        free(m->shards[i].name);
    }
    free(m->shards);
    ledger_give(m->mem, m->at, m->at_bytes);
    ledger_give(m->mem, m->experts, m->experts_bytes);
    memset(m, 0, sizeof *m);
}

static void model_note_sparse(const model *m) {
    char line[700];
    for (uint32_t i = 0; i < m->n_shards; i++) {
        if (!m->shards[i].is_sparse || !m->opt->note) continue;
        snprintf(line, sizeof line,
                 "%.500s: its trunk was left empty on purpose (k3_sparse): good for measuring, not "
                 "for text",
                 m->shards[i].name);
        one_line(line);
        m->opt->note(m->opt->user, line);
        return; /* one note for all such shards */
    }
}

/* Make the tables of places. No tensor has been seen yet: every place has NO_SHARD. */
static int model_tables(model *m, const k3_shape *sh, k3_error *err) {
    m->at = ledger_take(m->mem, m->at_bytes, "tensor table", err);
    if (!m->at) return m->mem->why;
    m->experts = ledger_take(m->mem, m->experts_bytes, "expert table", err);
    if (!m->experts)
        return fail_in(err, m->mem->why, "config.json: %u layers with %u experts each",
                       sh->n_layers - sh->n_dense, sh->n_experts);
    memset(m->at_model, 0xff, sizeof m->at_model); /* NO_SHARD in every place */
    memset(m->at, 0xff, m->at_bytes);
    memset(m->experts, 0xff, m->experts_bytes);
    return 0;
}

int model_open(model *m, const k3_shape *sh, const k3_options *o, ledger *mem,
                      k3_error *err) {
    m->dir = o->model_dir;
    m->opt = o;
    m->mem = mem;
    m->at_bytes = sh->n_layers * sizeof *m->at;
    m->experts_bytes = (uint64_t)(sh->n_layers - sh->n_dense) * sh->n_experts * sizeof *m->experts;
    shape_dims(sh, m->dims);
    int rc = o->config_only ? 0 : model_shards(m, err);
    if (rc == 0) rc = model_counts(m, sh, err);
    if (rc == 0) rc = model_tables(m, sh, err);
    if (rc < 0 || o->config_only) return rc;
    for (uint32_t i = 0; rc == 0 && i < m->n_shards; i++) {
        if (!m->shards[i].is_needed) continue;
        k3_progress p = {K3_PHASE_OPEN, i, m->n_shards, -1, 0};
        if (o->progress && o->progress(o->user, &p))
            return fail(err, K3_ECANCEL, "cancelled while opening %s", m->shards[i].name);
        rc = header_read(m, sh, (uint16_t)i, err);
        if (rc < 0) return shards_damaged(m, sh, i, rc, err);
    }
    if (rc == 0) model_note_sparse(m);
    return rc < 0 ? rc : model_complete(m, sh, err);
}
