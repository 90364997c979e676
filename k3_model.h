/* k3_model.h - what a model directory holds: config.json, shard headers, the index. Believes no file.
 *
 * One table, TENSOR, says which tensors the trunk of each kind of layer has, with dtype and shape; experts are
 * six tensors in a fixed order (experts.h). Opening compares every header with it. What stays in memory is a
 * place (shard, offset) for each trunk tensor and 64 bytes for each expert: 5.3 MB for the release's 497,220
 * tensors. Internal to the engine.
 */
#ifndef K3_MODEL_H
#define K3_MODEL_H

#include "experts.h"
#include "k3_common.h"
#include "k3_ledger.h"

enum dim {
    D_1,
    D_CONV,
    D_VOCAB,
    D_HIDDEN,
    D_KDA,
    D_KDA_DIM,
    D_KDA_HEADS,
    D_Q_LORA,
    D_Q,
    D_KV_LORA,
    D_KV_A,
    D_KV_B,
    D_O,
    D_DENSE,
    D_EXPERTS,
    D_LATENT,
    D_SHARED,
    N_DIMS
};

enum dtype { BF16, F32, U8 };

/* The layers that have a tensor: the model once, every layer, KDA, MLA, dense or expert layers only. */
enum part { IN_MODEL, IN_LAYER, IN_KDA, IN_MLA, IN_DENSE, IN_MOE };

enum tensor {
    T_EMBED,
    T_LM_HEAD,
    T_NORM,
    T_OUT_RES_NORM,
    T_OUT_RES_PROJ, /* IN_MODEL */
    T_IN_NORM,
    T_POST_NORM,
    T_ATT_RES_NORM,
    T_ATT_RES_PROJ,
    T_MLP_RES_NORM,
    T_MLP_RES_PROJ,
    T_KDA_Q,
    T_KDA_K,
    T_KDA_V,
    T_KDA_G,
    T_KDA_O,
    T_CONV_Q,
    T_CONV_K,
    T_CONV_V,
    T_F_A,
    T_F_B,
    T_B,
    T_A_LOG,
    T_DT_BIAS,
    T_O_NORM,
    T_Q_A,
    T_Q_A_NORM,
    T_Q_B,
    T_KV_A,
    T_KV_A_NORM,
    T_KV_B,
    T_MLA_G,
    T_MLA_O,
    T_GATE,
    T_UP,
    T_DOWN,
    T_ROUTER,
    T_ROUTER_BIAS,
    T_LAT_DOWN,
    T_LAT_NORM,
    T_LAT_UP,
    T_SH_GATE,
    T_SH_UP,
    T_SH_DOWN,
    N_TENSORS,
    N_MODEL_TENSORS = T_IN_NORM
};

/* A row of TENSOR (K3-SPEC 2.2). `name` follows "model.layers.L.", except for tensors of IN_MODEL. */
typedef struct {
    const char *name;
    enum part part;
    enum dtype dtype;
    int n_dims;
    enum dim dims[3];
} tensor_def;

extern const tensor_def TENSOR[N_TENSORS];
extern const uint64_t DTYPE_BYTES[];

/* How this engine's experts are stored (experts.h), and what their tensors are called. */
static const expert_format *const FORMAT = &expert_mxfp4;
#define EXPERT_TENSOR (FORMAT->tensor)

#define NO_SHARD UINT16_MAX
STATIC_ASSERT(no_shard_is_none, K3_MAX_SHARDS <= NO_SHARD);

typedef struct {
    uint64_t offset; /* from the start of the file */
    uint16_t shard;  /* NO_SHARD: not seen yet     */
} place;

typedef struct {
    uint64_t offset[N_EXPERT_TENSORS];
    uint16_t shard[N_EXPERT_TENSORS];
} expert_place;

typedef struct {
    char *name;
    int fd[K3_MAX_COPIES]; /* the model's own, then the mirrors'; -1: not there */
    int fd_direct[K3_MAX_COPIES];
    uint64_t size;
    bool is_needed; /* holds text tensors, or there is no index */
    bool is_sparse; /* its metadata says that the trunk was left empty on purpose */
} shard;

typedef struct {
    const char *dir;
    shard *shards;
    uint32_t n_shards;
    uint64_t header_bytes; /* length of the longest header; opening holds that one whole */
    uint64_t dims[N_DIMS];
    place at_model[N_MODEL_TENSORS];
    place (*at)[N_TENSORS];   /* [n_layers]; a layer uses the entries of its own parts */
    expert_place *experts;    /* [n_layers - n_dense][n_experts] */
    bool has_index, is_flat;  /* is_flat: names of experts do not begin with language_model. */
    uint64_t n_unknown;
    ledger *mem;
    uint64_t at_bytes, experts_bytes;
    const k3_options *opt;
} model;

/* Where a name belongs: a trunk tensor (expert_tensor < 0) or one of an expert's six. */
typedef struct {
    enum tensor tensor;
    int expert_tensor;
    uint32_t il, ie;
} name_id;

/* Called for each tensor of a visit. A return value other than 0 ends the visit. */
typedef int (*expect_fn)(void *user, const name_id *id);

#define SMALL_TABLES (16u << 20) /* bytes; smaller tables are made before any header is counted */

/* ---- config.json ---- */

/* Read DIR/config.json into *sh, sizes in bytes included. Nothing is defaulted.
 * Errors  K3_EMODEL names the field; K3_EIO; K3_ENOMEM */
int shape_read(k3_shape *sh, const char *dir, float eps_lora, k3_error *err);

/* Fill expert_bytes, trunk_bytes, state_bytes and pos_bytes from the rest of the shape. */
void shape_sizes(k3_shape *sh);

/* Write the size that each D_ dimension has in this model. */
void shape_dims(const k3_shape *sh, uint64_t dims[N_DIMS]);

/* Does layer il have tensors of this part? */
bool layer_has(const k3_shape *sh, uint32_t il, enum part part);

/* Floats that a session keeps of layer il for n_pos positions. */
uint64_t layer_floats(const k3_shape *sh, uint32_t il, uint64_t n_pos);

/* ---- Tensors and names ---- */

uint64_t tensor_elements(const uint64_t dims[N_DIMS], enum tensor t);
uint64_t tensor_bytes(const uint64_t dims[N_DIMS], enum tensor t);
uint64_t expert_tensor_bytes(const k3_shape *sh, int k); /* k: W1_PACKED .. W2_SCALE */

/* The official name of a tensor, cut to cap - 1 characters. */
void name_write(const name_id *id, char *out, size_t cap);

/* Call fn for every tensor that the shape expects, in layer order. Returns fn's last return value. */
int model_expect(const k3_shape *sh, expect_fn fn, void *user);

/* ---- Files ---- */

/* Open the directory o->model_dir: find its shards, read and check every header, and see that nothing
 * expected is missing. Tables are taken from `mem`. *m is all zeros before. What was opened is closed by
 * model_close(), also after an error.
 * Errors  K3_EMODEL names file and tensor; K3_EBUDGET, K3_ENOMEM; K3_EIO; K3_ECANCEL */
int model_open(model *m, const k3_shape *sh, const k3_options *o, ledger *mem, k3_error *err);
void model_close(model *m);

/* Where expert ie of layer il lies; whether all six of its tensors are there. */
expert_place *model_expert(const model *m, const k3_shape *sh, uint32_t il, uint32_t ie);
bool expert_is_here(const expert_place *at);

/* Open a regular file for reading; a FIFO is refused, not waited for. Returns the descriptor, or a
 * status with errno set (0: not a regular file). */
int file_open(const char *path, uint64_t *size, k3_error *err);

/* Read exactly n bytes of a shard; interrupted and partial reads go on, the end of the file is an error
 * (K3_EIO). read_copy reads from one copy. read_exact asks the copies in their order, each twice, until
 * one can. */
int read_copy(const shard *s, int copy, void *to, uint64_t n, uint64_t offset, k3_error *err);
int read_exact(const shard *s, void *to, uint64_t n, uint64_t offset, k3_error *err);

#endif
