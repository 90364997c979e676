#!/usr/bin/env python3
"""The independent reference: Kimi K3's text path in numpy, float64.

Written from K3-SPEC (sections 1, 2, 3) and from nothing else, so that the C
engine has something to disagree with.  One function per formula, each with its
shapes and its section; heads, experts and positions are loops.  KDA runs as the
plain recurrence and MLA expands every key and value, so neither shares a
shortcut with an engine that works in chunks or in the latent.  Slow on purpose.

    reference.py make  DIR --preset NAME      write a random checkpoint, official format
    reference.py run   DIR --ids 1,2,3 --tokens 8 --out trace.bin
    reference.py check DIR --ids 1,2,3 --logits engine.f32
    reference.py golden DIR [FILE]            compare with someone else's golden.json

Exit: 0 agreement, 1 disagreement or a bad checkpoint, 2 misuse, 77 no numpy.


The trace (`run --out`)
-----------------------
One binary file, little-endian, no padding, u32 and f32 only.  A position is an id
that was fed: n_pos = n_prompt + max(n_gen, 1) - 1 (the last generated id is not fed).

    char magic[4] = "K3RT"
    u32  version = 1, n_pos, n_layers, hidden, vocab, n_prompt, n_gen
    u32  ids[n_prompt + n_gen]              prompt, then every generated id
    f32  margins[n_gen]                     logit of the chosen id minus the runner-up's
    f32  logits[n_pos][vocab]               row p follows id p; ids[p+1] = argmax for p >= n_prompt-1
    n_layers times, in order:
        u32  n_blocks                       AttnRes blocks BEFORE the layer (K3-SPEC 3.0)
        f32  blocks[n_blocks][n_pos][hidden]
        f32  P_in[n_pos][hidden]            prefix sum before the layer
        f32  P_out[n_pos][hidden]           prefix sum after it
    the head, same inputs as a layer:
        u32  n_blocks
        f32  blocks[n_blocks][n_pos][hidden]
        f32  P_in[n_pos][hidden]
        f32  head_logits[n_pos][vocab]
    the routers, in layer order:
        u32  n_moe, top_k
        n_moe times:
            u32  il                         0-based layer
            u32  experts[n_pos][top_k]      ascending ids
            f32  weights[n_pos][top_k]      same order, after renormalisation
            f32  margin[n_pos]              last selection score chosen minus the best one left out

A layer's blocks and P_in are the float64 stream rounded to f32; P_out, head_logits and
the routers are computed in float64 FROM those rounded values, all positions from an
empty state.  So a test may feed a layer exactly these inputs and own every difference.
`logits`, `ids` and `margins` come from the unrounded stream.
"""

import argparse
import json
import os
import struct
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are tiny
try:
    import numpy as np
except ImportError:
    print("SKIP: reference.py needs numpy (Debian: python3-numpy)", file=sys.stderr)
    sys.exit(77)


class Bad(Exception):
    """A checkpoint, a dump or a request that cannot be right."""


# ---------------------------------------------------------------------------
# 1 Shape
#
# A field that is silently defaulted gives fluent wrong output, so every one that
# the formulas read must be present, and every switch must have the only value
# that the formulas below implement.

SIZES = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim attn_res_block_size
    intermediate_size first_k_dense_replace num_experts num_experts_per_token
    num_shared_experts moe_intermediate_size routed_expert_hidden_size""".split()
SCALARS = ["activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps", "routed_scaling_factor"]
SWITCHES = dict(hidden_act="situ", mla_use_nope=True, mla_use_output_gate=True, latent_moe_use_norm=True,
                moe_router_activation_func="sigmoid", moe_renormalize=True, num_expert_group=1,
                topk_group=1, moe_layer_freq=1, tie_word_embeddings=False, num_nextn_predict_layers=0)


class Shape:
    """The text configuration: every field of K3-SPEC 1 as an attribute of the same name,
    plus kda_heads, kda_dim, conv_k, gate_lower_bound and full_attn (a set of 0-based layers)."""

    def __init__(self, config):
        text = config.get("text_config", config)
        lin = text.get("linear_attn_config", {})
        for key in SIZES + SCALARS:
            if key not in text:
                raise Bad(f"config.json: {key} is missing")
            setattr(self, key, text[key])
        for key, want in SWITCHES.items():
            if text.get(key) != want:
                raise Bad(f"config.json: {key} is {text.get(key)!r}, only {want!r} is implemented")
        for key in ("num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound",
                    "full_attn_layers", "kda_layers"):
            if key not in lin:
                raise Bad(f"config.json: linear_attn_config.{key} is missing")
        if lin.get("use_full_rank_gate") is not True:
            raise Bad("config.json: only use_full_rank_gate true is implemented")
        n = self.num_hidden_layers
        if sorted(lin["full_attn_layers"] + lin["kda_layers"]) != list(range(1, n + 1)):
            raise Bad(f"config.json: full_attn_layers and kda_layers do not partition 1..{n}")
        self.kda_heads, self.kda_dim = lin["num_heads"], lin["head_dim"]
        self.conv_k, self.gate_lower_bound = lin["short_conv_kernel_size"], float(lin["gate_lower_bound"])
        self.full_attn = {i - 1 for i in lin["full_attn_layers"]}  # the lists are 1-based

    def is_moe(self, il):
        return il >= self.first_k_dense_replace


# K3-SPEC 2.2: where, dtype, shape, names.  `layer` rows are in every layer.
TENSORS = """
head   BF16  V,E      lm_head.weight model.embed_tokens.weight
head   BF16  E        model.norm.weight model.output_attn_res_norm.weight
head   BF16  1,E      model.output_attn_res_proj.weight
kda    F32   A        self_attn.A_log
kda    F32   HD       self_attn.dt_bias
kda    F32   D        self_attn.o_norm.weight
kda    F32   HD,1,K   self_attn.q_conv1d.weight self_attn.k_conv1d.weight self_attn.v_conv1d.weight
moe    F32   X        block_sparse_moe.gate.e_score_correction_bias
kda    BF16  HD,E     self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight
kda    BF16  HD,E     self_attn.g_proj.weight
kda    BF16  E,HD     self_attn.o_proj.weight
kda    BF16  D,E      self_attn.f_a_proj.weight
kda    BF16  HD,D     self_attn.f_b_proj.weight
kda    BF16  H,E      self_attn.b_proj.weight
mla    BF16  Q,E      self_attn.q_a_proj.weight
mla    BF16  Q        self_attn.q_a_layernorm.weight
mla    BF16  QB,Q     self_attn.q_b_proj.weight
mla    BF16  CR,E     self_attn.kv_a_proj_with_mqa.weight
mla    BF16  C        self_attn.kv_a_layernorm.weight
mla    BF16  KVB,C    self_attn.kv_b_proj.weight
mla    BF16  HV,E     self_attn.g_proj.weight
mla    BF16  E,HV     self_attn.o_proj.weight
dense  BF16  F,E      mlp.gate_proj.weight mlp.up_proj.weight
dense  BF16  E,F      mlp.down_proj.weight
moe    BF16  X,E      block_sparse_moe.gate.weight
moe    BF16  L,E      block_sparse_moe.routed_expert_down_proj.weight
moe    BF16  L        block_sparse_moe.routed_expert_norm.weight
moe    BF16  E,L      block_sparse_moe.routed_expert_up_proj.weight
moe    BF16  SH,E     block_sparse_moe.shared_experts.gate_proj.weight
moe    BF16  SH,E     block_sparse_moe.shared_experts.up_proj.weight
moe    BF16  E,SH     block_sparse_moe.shared_experts.down_proj.weight
layer  BF16  E        input_layernorm.weight post_attention_layernorm.weight
layer  BF16  E        self_attention_res_norm.weight mlp_res_norm.weight
layer  BF16  1,E      self_attention_res_proj.weight mlp_res_proj.weight
"""


def tensors(c, il=None):
    """Layer `il`'s tensors without its routed experts, or the global ones, as {name: (dtype, shape)}."""
    Ha, dn, dr, dv = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    size = {"1": 1, "V": c.vocab_size, "E": c.hidden_size, "F": c.intermediate_size, "X": c.num_experts,
            "H": c.kda_heads, "D": c.kda_dim, "HD": c.kda_heads * c.kda_dim, "K": c.conv_k,
            "A": max(c.kda_heads, c.kda_dim), "Q": c.q_lora_rank, "C": c.kv_lora_rank, "CR": c.kv_lora_rank + dr,
            "QB": Ha * (dn + dr), "KVB": Ha * (dn + dv), "HV": Ha * dv, "L": c.routed_expert_hidden_size,
            "SH": c.num_shared_experts * c.moe_intermediate_size}
    where, prefix = {"head"}, ""
    if il is not None:
        where = {"layer", "mla" if il in c.full_attn else "kda", "moe" if c.is_moe(il) else "dense"}
        prefix = f"model.layers.{il}."
    rows = (line.split() for line in TENSORS.strip().splitlines())
    return {prefix + name: (row[1], [size[d] for d in row[2].split(",")])
            for row in rows if row[0] in where for name in row[3:]}


def expert_matrices(c):
    """One routed expert's three matrices as {name: (out, in)}: w1 gate, w2 down, w3 up (K3-SPEC 2.3)."""
    lat, mid = c.routed_expert_hidden_size, c.moe_intermediate_size
    return {"w1": (mid, lat), "w2": (lat, mid), "w3": (mid, lat)}


# ---------------------------------------------------------------------------
# 2 Model files
#
# safetensors by hand: u64 header length, JSON header, raw little-endian data.
# Every decode here is exact, in float32 as in float64.

DTYPES = {"BF16": "<u2", "F32": "<f4", "U8": "u1"}
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def bf16_decode(bits):
    """u16 bfloat16 bits -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def mxfp4_decode(packed, scale):
    """K3-SPEC 2.5.  packed u8[out][in/2], low nibble = even column; scale u8[out][in/32] -> f64[out][in]."""
    if (scale == 255).any():
        raise Bad("expert scale code 255 (NaN)")
    nib = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    nib[:, 0::2], nib[:, 1::2] = packed & 15, packed >> 4
    return np.ldexp(E2M1[nib], np.repeat(scale.astype(int) - 127, 32, axis=1))


class Model:
    """A checkpoint directory: its Shape (`c`), and decoded tensors by official name, on demand."""

    def __init__(self, path, dtype="float64", lora_eps=1e-6):
        with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
            self.c = Shape(json.load(f))
        self.dtype, self.lora_eps = np.dtype(dtype), lora_eps
        self.entries, self.cache = {}, {}
        index = os.path.join(path, "model.safetensors.index.json")
        files = ["model.safetensors"]
        if os.path.exists(index):
            with open(index, encoding="utf-8") as f:
                files = sorted(set(json.load(f)["weight_map"].values()))
        for name in files:
            self._open(os.path.join(path, name))
        self._check_all()

    def _open(self, path):
        with open(path, "rb") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(n))
        data = np.memmap(path, np.uint8, "r", offset=8 + n)
        for name, e in header.items():
            if name != "__metadata__":
                a, b = e["data_offsets"]
                self.entries[name.removeprefix("language_model.")] = (e["dtype"], e["shape"], data[a:b])

    def _check_all(self):
        """Every tensor that the shape calls for is there with its shape (A_log may be longer)."""
        c, want = self.c, tensors(self.c)
        for il in range(c.num_hidden_layers):
            want.update(tensors(c, il))
            for ie in range(c.num_experts if c.is_moe(il) else 0):
                for w, (o, i) in expert_matrices(c).items():
                    base = f"model.layers.{il}.block_sparse_moe.experts.{ie}.{w}.weight_"
                    want[base + "packed"], want[base + "scale"] = ("U8", [o, i // 2]), ("U8", [o, i // 32])
        for name, (_, shape) in want.items():
            if name not in self.entries:
                raise Bad(f"tensor {name} is missing")
            got = self.entries[name][1]
            ok = len(got) == 1 and got[0] >= c.kda_heads if name.endswith("A_log") else got == shape
            if not ok:
                raise Bad(f"tensor {name} is {got}, not {shape}")

    def _raw(self, name):
        dtype, shape, data = self.entries[name]
        if dtype not in DTYPES:
            raise Bad(f"tensor {name}: dtype {dtype}")
        return dtype, np.frombuffer(data.tobytes(), DTYPES[dtype]).reshape(shape)

    def get(self, name):
        """The tensor `name`, decoded.  `X.weight` is MXFP4 iff `X.weight_packed` exists."""
        if name not in self.cache:
            if name + "_packed" in self.entries:
                w = mxfp4_decode(self._raw(name + "_packed")[1], self._raw(name + "_scale")[1])
            else:
                dtype, w = self._raw(name)
                w = bf16_decode(w) if dtype == "BF16" else w
            self.cache[name] = np.ascontiguousarray(w, self.dtype)
        return self.cache[name]

    def linear(self, name, x):
        """y = W x.  W [out][in], x [in] -> [out]."""
        return self.get(name + ".weight") @ x


# ---------------------------------------------------------------------------
# 3 Formulas
#
# One token at a time.  x is a vector; a mixer's `state` is its own dict and is
# the only thing that survives from one token to the next.

KDA_L2_EPS = 1e-6  # K3-SPEC 3.6: not the model's epsilon


def rms(x, w, eps):
    """w * x / sqrt(mean(x^2) + eps).  x, w [n] -> [n].  K3-SPEC, conventions."""
    return w * (x / np.sqrt(np.mean(x * x) + eps))


def sigmoid(x):
    """1 / (1 + e^-x), any shape, no overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softmax(s):
    """[n] -> [n]."""
    e = np.exp(s - s.max())
    return e / e.sum()


def attn_res_mix(m, blocks, P, name):
    """AttnRes.  blocks: list of [E], P [E] is the last source -> [E].  K3-SPEC 3.1.

    s_j = (V_j . u) / sqrt(mean V_j^2 + eps);  out = sum_j softmax(s)_j V_j   (raw V_j)"""
    u = m.get(name + "_norm.weight") * m.get(name + "_proj.weight")[0]
    sources = blocks + [P]
    s = np.array([v @ u / np.sqrt(np.mean(v * v) + m.c.rms_norm_eps) for v in sources], m.dtype)
    out = np.zeros_like(P)
    for p, v in zip(softmax(s), sources):
        out += p * v
    return out


def situ(c, g, u):
    """SiTU-GLU, elementwise: b tanh(g/b) sigmoid(g) * l tanh(u/l).  [n], [n] -> [n].  K3-SPEC 3.2."""
    b, l = c.activation_situ_beta, c.activation_situ_linear_beta
    return b * np.tanh(g / b) * sigmoid(g) * (l * np.tanh(u / l))


def short_conv(w, history, r):
    """Causal depthwise convolution, then SiLU.  w [ch][1][K], r [ch] this token's raw projection,
    history: list of the K-1 raw projections before it, oldest first (updated) -> [ch].  K3-SPEC 3.3.2"""
    window = history + [r]
    c = sum(w[:, 0, j] * window[j] for j in range(len(window)))
    history[:] = window[1:]
    return c * sigmoid(c)


def kda(m, il, x, state):
    """Kimi Delta Attention, one token.  x [E] normed -> [E].  K3-SPEC 3.3.

    state["S"] [H][k][v], state["conv"] {q,k,v: K-1 raw projections}."""
    c, at = m.c, f"model.layers.{il}.self_attn."
    H, d = c.kda_heads, c.kda_dim
    if not state:
        state["S"] = np.zeros((H, d, d), m.dtype)
        state["conv"] = {n: [np.zeros(H * d, m.dtype)] * (c.conv_k - 1) for n in "qkv"}
    q, k, v = (short_conv(m.get(f"{at}{n}_conv1d.weight"), state["conv"][n], m.linear(f"{at}{n}_proj", x))
               for n in "qkv")
    f = m.linear(at + "f_b_proj", m.linear(at + "f_a_proj", x))
    beta = sigmoid(m.linear(at + "b_proj", x))
    gate = sigmoid(m.linear(at + "g_proj", x))
    A_log, dt_bias, o_norm = m.get(at + "A_log"), m.get(at + "dt_bias"), m.get(at + "o_norm.weight")
    out = np.empty(H * d, m.dtype)
    for h in range(H):
        i = slice(h * d, (h + 1) * d)
        qh = q[i] / np.sqrt(np.sum(q[i] * q[i]) + KDA_L2_EPS) * d ** -0.5
        kh = k[i] / np.sqrt(np.sum(k[i] * k[i]) + KDA_L2_EPS)
        decay = np.exp(c.gate_lower_bound * sigmoid(np.exp(A_log[h]) * (f[i] + dt_bias[i])))
        S = state["S"][h]
        S *= decay[:, None]                            # decay every row k
        u = kh @ S                                     # read with the decayed state
        S += beta[h] * np.outer(kh, v[i] - u)          # delta write
        o = qh @ S                                     # read the updated state
        out[i] = rms(o, o_norm, c.rms_norm_eps) * gate[i]
    return m.linear(at + "o_proj", out)


def mla(m, il, x, state):
    """Gated NoPE latent attention, one token, keys and values expanded.  x [E] normed -> [E].  K3-SPEC 3.4.

    state["k"], ["v"]: per past position [H][nope], [H][v];  state["pe"]: per past position [rope]."""
    c, at = m.c, f"model.layers.{il}.self_attn."
    H, dn, dr, dv, n_kv = (c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
                           c.kv_lora_rank)
    if not state:
        state.update(k=[], v=[], pe=[])
    cq = rms(m.linear(at + "q_a_proj", x), m.get(at + "q_a_layernorm.weight"), m.lora_eps)
    q = m.linear(at + "q_b_proj", cq).reshape(H, dn + dr)
    t = m.linear(at + "kv_a_proj_with_mqa", x)
    kv = m.linear(at + "kv_b_proj", rms(t[:n_kv], m.get(at + "kv_a_layernorm.weight"), m.lora_eps))
    kv = kv.reshape(H, dn + dv)
    state["k"].append(kv[:, :dn])
    state["v"].append(kv[:, dn:])
    state["pe"].append(t[n_kv:])                       # shared by the heads, neither normed nor rotated
    out = np.empty((H, dv), m.dtype)
    for h in range(H):
        s = np.array([q[h, :dn] @ k[h] + q[h, dn:] @ pe for k, pe in zip(state["k"], state["pe"])], m.dtype)
        p = softmax(s * (dn + dr) ** -0.5)
        out[h] = p @ np.array([v[h] for v in state["v"]], m.dtype)
    return m.linear(at + "o_proj", out.reshape(-1) * sigmoid(m.linear(at + "g_proj", x)))


def glu(m, at, x, names=("gate_proj", "up_proj", "down_proj")):
    """down( SiTU(gate x, up x) ): dense layer, shared expert, routed expert.  K3-SPEC 3.5, 3.7."""
    g, u, dn = (at + n for n in names)
    return m.linear(dn, situ(m.c, m.linear(g, x), m.linear(u, x)))


def route(m, il, x):
    """x [E] -> (experts [k] ascending, weights [k], margin).  K3-SPEC 3.5.

    The bias selects and does not weigh.  Ties go to the lower id.  margin = the last
    selection score chosen minus the best one left out."""
    c, at = m.c, f"model.layers.{il}.block_sparse_moe.gate"
    k = c.num_experts_per_token
    s = sigmoid(m.linear(at, x))
    sel = s + m.get(at + ".e_score_correction_bias")
    order = np.argsort(-sel, kind="stable")
    chosen = np.sort(order[:k])
    w = s[chosen] / (s[chosen].sum() + 1e-20) * c.routed_scaling_factor
    return chosen, w, sel[order[k - 1]] - sel[order[k]] if k < c.num_experts else np.inf


def moe(m, il, x, routed):
    """Stable LatentMoE.  x [E] -> [E]; appends the routing to `routed`.  K3-SPEC 3.5."""
    at = f"model.layers.{il}.block_sparse_moe."
    chosen, weights, margin = route(m, il, x)
    routed.append((chosen, weights, margin))
    z = m.linear(at + "routed_expert_down_proj", x)
    r = np.zeros_like(z)
    for ie, w in zip(chosen, weights):
        r += w * glu(m, f"{at}experts.{ie}.", z, ("w1", "w3", "w2"))
    r = rms(r, m.get(at + "routed_expert_norm.weight"), m.c.rms_norm_eps)
    return m.linear(at + "routed_expert_up_proj", r) + glu(m, at + "shared_experts.", x)


def layer(m, il, P, blocks, state, routed):
    """One token through layer `il`.  P [E], blocks: list of [E] -> (P, blocks) after it.  K3-SPEC 3.0."""
    c, at = m.c, f"model.layers.{il}."
    x = attn_res_mix(m, blocks, P, at + "self_attention_res") if blocks else P
    starts_block = il % c.attn_res_block_size == 0
    if starts_block:
        blocks = blocks + [P]                          # the RAW prefix, not x
    mixer = mla if il in c.full_attn else kda
    a = mixer(m, il, rms(x, m.get(at + "input_layernorm.weight"), c.rms_norm_eps), state)
    P = a if starts_block else P + a
    y = attn_res_mix(m, blocks, P, at + "mlp_res")
    y = rms(y, m.get(at + "post_attention_layernorm.weight"), c.rms_norm_eps)
    return P + (moe(m, il, y, routed) if c.is_moe(il) else glu(m, at + "mlp.", y)), blocks


def head(m, P, blocks):
    """P [E], blocks -> logits [vocab].  K3-SPEC 3.0, 3.8."""
    z = attn_res_mix(m, blocks, P, "model.output_attn_res")
    return m.linear("lm_head", rms(z, m.get("model.norm.weight"), m.c.rms_norm_eps))


# ---------------------------------------------------------------------------
# 4 What one sequence does

class Sequence:
    """A stream of tokens.  `inputs[il]` collects (P, blocks) before layer il for every position
    (il = n_layers: before the head), `routed[il]` the router's answers."""

    def __init__(self, m):
        n = m.c.num_hidden_layers
        self.m, self.states = m, [{} for _ in range(n)]
        self.inputs, self.routed = [[] for _ in range(n + 1)], [[] for _ in range(n)]

    def step(self, token):
        """Feed one id -> logits [vocab]."""
        m, blocks = self.m, []
        if not 0 <= token < m.c.vocab_size:
            raise Bad(f"id {token} is not below vocab_size {m.c.vocab_size}")
        P = m.get("model.embed_tokens.weight")[token]
        for il, state in enumerate(self.states):
            self.inputs[il].append((P, blocks))
            P, blocks = layer(m, il, P, blocks, state, self.routed[il])
        self.inputs[-1].append((P, blocks))
        return head(m, P, blocks)


def generate(m, prompt, n_gen, given=None):
    """Greedy (or `given`) continuation -> (sequence, ids, margins [n_gen], logits [n_pos][vocab])."""
    seq, ids, margins, rows = Sequence(m), list(prompt), [], []
    for t in range(len(prompt) + max(n_gen, 1) - 1):
        rows.append(seq.step(ids[t]))
        if len(prompt) - 1 <= t < len(prompt) - 1 + n_gen:
            best, second = np.argsort(-rows[t], kind="stable")[:2]
            margins.append(float(rows[t][best] - rows[t][second]))
            ids.append(int(best) if given is None else given[len(ids) - len(prompt)])
    return seq, ids, margins, np.array(rows)


def rounded(m, inputs):
    """A layer's inputs, rounded to f32 as the trace holds them."""
    def round32(v):
        return v.astype(np.float32).astype(m.dtype)
    return [(round32(P), [round32(b) for b in blocks]) for P, blocks in inputs]


def trace_write(path, seq, ids, n_prompt, margins, logits):
    """The file that the top of this program describes."""
    m, c, n_gen = seq.m, seq.m.c, len(margins)
    n_pos, n_layers = len(logits), c.num_hidden_layers
    with open(path, "wb") as f:
        def u32(*values):
            f.write(np.array(values).astype("<u4").tobytes())

        def f32(values):
            f.write(np.asarray(values).astype("<f4").tobytes())

        def put_inputs(inputs):
            u32(len(inputs[0][1]))
            for j in range(len(inputs[0][1])):
                f32([blocks[j] for _, blocks in inputs])
            f32([P for P, _ in inputs])

        f.write(b"K3RT")
        u32(1, n_pos, n_layers, c.hidden_size, c.vocab_size, n_prompt, n_gen)
        u32(*ids)
        f32(margins)
        f32(logits)
        routers = {}
        for il in range(n_layers):
            inputs, state, routed = rounded(m, seq.inputs[il]), {}, []
            put_inputs(inputs)
            f32([layer(m, il, P, blocks, state, routed)[0] for P, blocks in inputs])
            if c.is_moe(il):
                routers[il] = routed
        inputs = rounded(m, seq.inputs[-1])
        put_inputs(inputs)
        f32([head(m, P, blocks) for P, blocks in inputs])
        u32(len(routers), c.num_experts_per_token)
        for il, routed in routers.items():
            u32(il)
            u32(*(ie for chosen, _, _ in routed for ie in chosen))
            f32([w for _, w, _ in routed])
            f32([margin for _, _, margin in routed])


# ---------------------------------------------------------------------------
# 5 Random checkpoints
#
# Small models whose geometry is awkward on purpose.  Weights are scaled so that
# activations stay O(1), the router spreads and greedy ids vary.  RandomState's
# stream is frozen by numpy's own promise, so a preset and a seed name one model.

BASE = dict(vocab_size=320, hidden_size=64, intermediate_size=160, num_attention_heads=4, q_lora_rank=48,
            kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=24, num_shared_experts=2,
            routed_expert_hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_token=2,
            first_k_dense_replace=1, kda_heads=3, kda_dim=16, n_shards=3)
PRESETS = {
    "short": ("fewer layers than one AttnRes block",
              dict(num_hidden_layers=3, attn_res_block_size=12, full_attn=[2], num_shared_experts=1)),
    "odd": ("odd head counts, no trunk dimension a multiple of 32",
            dict(num_hidden_layers=6, attn_res_block_size=3, full_attn=[3, 6], vocab_size=301, hidden_size=100,
                 intermediate_size=75, num_attention_heads=5, q_lora_rank=40, kv_lora_rank=36, n_shards=4,
                 qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=28, kda_heads=3, kda_dim=24,
                 routed_expert_hidden_size=96, num_shared_experts=3, num_experts=10, num_experts_per_token=3)),
    "wide": ("896 experts, top 16, one layer a shard",
             dict(num_hidden_layers=4, attn_res_block_size=2, full_attn=[4], vocab_size=384, n_shards=5,
                  kda_heads=5, routed_expert_hidden_size=32, num_experts=896, num_experts_per_token=16)),
    "pad": ("padded A_log, three blocks, two trailing MLA layers",
            dict(num_hidden_layers=8, attn_res_block_size=3, full_attn=[4, 7, 8], vocab_size=512, hidden_size=224,
                 intermediate_size=384, num_attention_heads=6, q_lora_rank=96, kv_lora_rank=64, n_shards=4,
                 qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kda_heads=6, kda_dim=32,
                 routed_expert_hidden_size=96, moe_intermediate_size=64, num_experts=16,
                 num_experts_per_token=4)),
    "heavy": ("heavy tails, subnormals, -0, wide scale codes: for bit-equality between kernels",
              dict(num_hidden_layers=5, attn_res_block_size=2, full_attn=[3, 5], vocab_size=256, hidden_size=96,
                   kda_dim=32, routed_expert_hidden_size=96, moe_intermediate_size=64, num_experts=12,
                   num_experts_per_token=4, n_shards=2, heavy=True)),
    "flat": ("flat config.json, no name prefix, one file without an index; A_log not padded",
             dict(num_hidden_layers=5, attn_res_block_size=2, full_attn=[2, 4], kda_heads=10, kda_dim=8,
                  vocab_size=288, n_shards=1, flat=True)),
}


def make_config(g):
    """Geometry -> config.json as a dict, nested as released or flat."""
    n, V = g["num_hidden_layers"], g["vocab_size"]
    special = dict(bos_token_id=V - 8, eos_token_id=V - 6, pad_token_id=V - 1)
    text = {k: g[k] for k in SIZES if k in g}
    text.update(SWITCHES, num_key_value_heads=g["num_attention_heads"], activation_situ_beta=4.0,
                activation_situ_linear_beta=25.0, rms_norm_eps=1e-5, routed_scaling_factor=1.0,
                use_grouped_topk=True, topk_method="noaux_tc", max_position_embeddings=4096,
                initializer_range=0.02, use_cache=True, dtype="bfloat16", model_type="kimi_linear",
                architectures=["KimiLinearForCausalLM"], max_length=20, temperature=1.0, top_k=50, top_p=1.0,
                do_sample=False, attn_res_block_size=g["attn_res_block_size"], **special)
    text["linear_attn_config"] = dict(
        full_attn_layers=g["full_attn"], kda_layers=[i for i in range(1, n + 1) if i not in g["full_attn"]],
        gate_lower_bound=-5.0, head_dim=g["kda_dim"], num_heads=g["kda_heads"], short_conv_kernel_size=4,
        use_full_rank_gate=True)
    weights = dict(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True,
                   scale_dtype="torch.uint8", dynamic=False)
    text["quantization_config"] = dict(
        quant_method="compressed-tensors", format="mxfp4-pack-quantized", quantization_status="compressed",
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=None,
                                        output_activations=None, format="mxfp4-pack-quantized")),
        ignore=["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"])
    if g.get("flat"):
        return text
    return dict(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k3", dtype="bfloat16",
                ignore_index=-100, image_placeholder="<|kimi_image_placeholder|>",
                media_placeholder_token_id=V - 3, tie_word_embeddings=False, text_config=text,
                vision_config=dict(mm_hidden_size=32, text_hidden_size=g["hidden_size"], patch_size=14), **special)


def bf16_encode(x):
    """float -> bfloat16 bits, round to nearest even."""
    b = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype("<u2")


def mxfp4_encode(w):
    """f64[..][out][in] -> (packed u8[..][out][in/2], scale u8[..][out][in/32]): each group's scale
    puts its largest magnitude in [4, 8), elements go to the nearest E2M1 value."""
    g = w.reshape(*w.shape[:-1], -1, 32)
    e = np.floor(np.log2(np.abs(g).max(-1))).astype(int) - 2
    mag = np.abs(np.ldexp(g, -e[..., None]))
    edges = (E2M1[:7] + E2M1[1:8]) / 2
    nib = (np.searchsorted(edges, mag) | np.where(np.signbit(g), 8, 0)).astype(np.uint8).reshape(w.shape)
    return nib[..., 0::2] | (nib[..., 1::2] << 4), (e + 127).astype(np.uint8)


def noise(rng, shape, heavy):
    """Unit noise: normal, or Student's t with 2 degrees of freedom, cut at 60."""
    return np.clip(rng.standard_t(2, shape), -60, 60) if heavy else rng.standard_normal(shape)


def draw(rng, c, name, dtype, shape, heavy):
    """One trunk tensor's bytes."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last.endswith("norm"):
        x = 1 + 0.2 * rng.standard_normal(shape)
    elif last == "A_log":                              # per head; the padding is exactly 0
        x = np.zeros(shape)
        x[:c.kda_heads] = 0.5 * rng.standard_normal(c.kda_heads)
    elif last == "dt_bias":
        x = rng.uniform(-5, 1, shape)
    elif last == "e_score_correction_bias":
        x = 0.05 * rng.standard_normal(shape)
    elif last.endswith("conv1d"):
        x = 0.4 * noise(rng, shape, heavy) + np.array([0, 0, 0, 0.6])
    else:                                              # a matrix: gain / sqrt(fan in)
        gain = {"embed_tokens": np.sqrt(shape[-1]), "lm_head": 3, "gate": 1.5, "o_proj": 2, "q_b_proj": 2}
        x = gain.get(last, 1.2) / np.sqrt(shape[-1]) * noise(rng, shape, heavy)
    if last == "lm_head":
        x[-8:] *= 0.01                                 # greedy never meets bos, eos, pad
    if dtype == "F32":
        return x.astype("<f4").tobytes()
    bits = bf16_encode(x)
    if heavy and len(shape) == 2:                      # +0, -0 and subnormals of both signs
        pick = rng.uniform(size=shape)
        tiny = (rng.randint(0, 128, shape) | rng.randint(0, 2, shape) << 15).astype("<u2")
        bits = np.where(pick < 0.02, tiny, np.where(pick < 0.03, 0x8000, bits)).astype("<u2")
    return bits.tobytes()


def draw_experts(rng, c, il, heavy):
    """The routed experts of layer il as [(name, dtype, shape, bytes)]: an expert's six tensors
    back to back, the experts in no particular order."""
    parts = {}
    for w, (o, i) in expert_matrices(c).items():
        x = noise(rng, (c.num_experts, o, i), heavy) * 1.5 / np.sqrt(i)
        if heavy:                                      # a factor 2^-9..2^2 for every group of 32
            x *= np.repeat(np.exp2(rng.randint(-9, 3, (c.num_experts, o, i // 32))), 32, axis=-1)
        parts[w] = mxfp4_encode(x)
    out = []
    for ie in rng.permutation(c.num_experts):
        for w, pair in parts.items():
            for kind, a in zip(("packed", "scale"), pair):
                out.append((f"model.layers.{il}.block_sparse_moe.experts.{ie}.{w}.weight_{kind}", "U8",
                            list(a[ie].shape), a[ie].tobytes()))
    return out


def safetensors_write(path, stored, prefix):
    """stored: [(name, dtype, shape, bytes)], kept in this order -> bytes of data."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, data in stored:
        assert at % np.dtype(DTYPES[dtype]).itemsize == 0, name
        header[prefix + name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(data for _, _, _, data in stored)
    return at


def json_write(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=2)


def make(path, preset, seed):
    """Write the preset's checkpoint into `path`: layer L wholly in one shard, the head in the last."""
    g = dict(BASE, **PRESETS[preset][1])
    config, heavy, n_shards = make_config(g), g.get("heavy", False), g["n_shards"]
    c, rng = Shape(config), np.random.RandomState(seed)
    prefix = "" if g.get("flat") else "language_model."
    shards = [[] for _ in range(n_shards)]
    for il in range(c.num_hidden_layers):
        shard = shards[il * max(n_shards - 1, 1) // c.num_hidden_layers]
        for name, (dtype, shape) in tensors(c, il).items():
            shard.append((name, dtype, shape, draw(rng, c, name, dtype, shape, heavy)))
        if c.is_moe(il):
            shard += draw_experts(rng, c, il, heavy)
    for name, (dtype, shape) in tensors(c).items():
        shards[-1].append((name, dtype, shape, draw(rng, c, name, dtype, shape, heavy)))

    os.makedirs(path, exist_ok=True)
    json_write(os.path.join(path, "config.json"), config)
    json_write(os.path.join(path, "generation_config.json"),
               dict(max_length=4096, eos_token_id=c.vocab_size - 6))
    if n_shards == 1:
        return safetensors_write(os.path.join(path, "model.safetensors"), shards[0], prefix)
    total, where = 0, {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{n_shards:06d}.safetensors"
        total += safetensors_write(os.path.join(path, name), shard, prefix)
        where.update({prefix + t[0]: name for t in shard})
    json_write(os.path.join(path, "model.safetensors.index.json"),
               dict(metadata=dict(total_size=total), weight_map=where))
    return total


# ---------------------------------------------------------------------------
# 6 Commands

def cmd_make(a):
    total = make(a.dir, a.preset, a.seed)
    print(json.dumps(dict(preset=a.preset, seed=a.seed, tensor_bytes=total)))
    return 0


def cmd_run(a):
    t0, m = time.time(), Model(a.dir, a.dtype, a.lora_eps)
    seq, ids, margins, logits = generate(m, a.ids, a.tokens)
    if a.out:
        trace_write(a.out, seq, ids, len(a.ids), margins, logits)
    routed = [r for layer_routed in seq.routed for r in layer_routed]
    finite = bool(np.isfinite(logits).all())
    print(json.dumps(dict(
        ids=ids[len(a.ids):], margins=[round(x, 6) for x in margins], finite=finite,
        router_margin_min=float(min((r[2] for r in routed), default=0)),
        logits_min=float(logits.min()), logits_max=float(logits.max()),
        max_abs_P=[float(max(np.abs(P).max() for P, _ in pos)) for pos in seq.inputs[1:]],
        seconds=round(time.time() - t0, 2))))
    return 0 if finite else 1


def cmd_check(a):
    """Rows are compared up to the first id on which the two disagree: behind it the contexts differ."""
    m = Model(a.dir, "float64", a.lora_eps)
    V, n = m.c.vocab_size, len(a.ids)
    got = np.fromfile(a.logits, "<f4")
    if got.size % V or got.size < n * V:
        raise Bad(f"{a.logits}: {got.size} floats are not {n} or more rows of {V}")
    got = got.reshape(-1, V).astype(np.float64)
    _, ids, margins, want = generate(m, a.ids, len(got) - n + 1)
    mine, theirs = ids[n:], [int(r.argmax()) for r in got[n - 1:]]
    first = next((i for i, (x, y) in enumerate(zip(mine, theirs)) if x != y), None)
    rows = len(got) if first is None else n + first
    span = float(want.max() - want.min())
    diff = np.abs(got[:rows] - want[:rows])
    worst = float(diff.max()) if np.isfinite(diff).all() else float("inf")
    ok = first is None and worst <= a.tol * span
    print(json.dumps(dict(
        ok=ok, rows_compared=rows, rows=len(got), max_abs_diff=worst, range=span, relative=worst / span,
        tol=a.tol, worst_row=int(diff.max(1).argmax()), ids_agree=first is None, reference_ids=mine,
        engine_ids=theirs, first_difference=first, margin_there=None if first is None else margins[first])))
    return 0 if ok else 1


def cmd_golden(a):
    """Teacher-forced: feed the golden's own ids, compare every argmax and the logits it recorded."""
    m = Model(a.dir, a.dtype, a.lora_eps)
    with open(a.file or os.path.join(a.dir, "golden.json"), encoding="utf-8") as f:
        cases = json.load(f)["cases"]
    n_bad = n_ids = 0
    worst, worst_margin, n_logits = 0.0, 0.0, 0
    for case in cases:
        prompt, greedy = case["prompt_ids"], case["greedy_ids"]
        _, _, margins, rows = generate(m, prompt, len(greedy), greedy)
        n_ids += len(greedy)
        n_bad += sum(int(r.argmax()) != g for r, g in zip(rows[len(prompt) - 1:], greedy))
        worst_margin = max(worst_margin, np.abs(np.subtract(margins, case["margins"])).max())
        if "last_prompt_logits" in case:
            n_logits += 1
            worst = max(worst, np.abs(rows[len(prompt) - 1] - case["last_prompt_logits"]).max())
    ok = bool(n_bad == 0 and worst <= a.tol)
    print(json.dumps(dict(ok=ok, prompts=len(cases), ids=n_ids, ids_differing=n_bad, logits_compared=n_logits,
                          logits_max_abs_diff=float(worst), margins_max_abs_diff=float(worst_margin), tol=a.tol)))
    return 0 if ok else 1


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def id_list(text):
    ids = [int(x) for x in text.split(",")]
    if min(ids) < 0:
        raise ValueError
    return ids


def parse(argv):
    raw = argparse.RawDescriptionHelpFormatter
    p = Parser(prog="reference.py", description=__doc__, formatter_class=raw)
    sub = p.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name, run, what, text="", options=""):
        s = sub.add_parser(name, help=what, description=what + "\n\n" + text, formatter_class=raw)
        s.set_defaults(run=run)
        s.add_argument("dir", help="checkpoint directory")
        if "ids" in options:
            s.add_argument("--ids", type=id_list, required=True, metavar="N,N,..", help="prompt ids")
        if "eps" in options:
            s.add_argument("--lora-eps", type=float, default=1e-6, metavar="X",
                           help="epsilon of the q_a and kv_a norms (default 1e-6)")
        if "dtype" in options:
            s.add_argument("--dtype", choices=["float64", "float32"], default="float64", help="default float64")
        return s

    s = command("make", cmd_make, "write a random checkpoint in the official format",
                "presets:\n" + "\n".join(f"  {k:6} {v[0]}" for k, v in PRESETS.items()))
    s.add_argument("--preset", choices=PRESETS, required=True)
    s.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")

    s = command("run", cmd_run, "forward a prompt, continue greedily, print JSON, write a trace",
                "The trace's layout: reference.py --help.", "ids eps dtype")
    s.add_argument("--tokens", type=int, default=0, metavar="N", help="ids to generate (default 0)")
    s.add_argument("--out", metavar="FILE", help="trace to write")

    s = command("check", cmd_check, "compare an engine's logits with the reference; exit 1 if they differ",
                "The dump is raw little-endian f32 [rows][vocab]: a row for every prompt id, then one for\n"
                "every generated id but the last.", "ids eps")
    s.add_argument("--logits", required=True, metavar="FILE", help="the engine's dump")
    s.add_argument("--tol", type=float, default=2e-4, metavar="X",
                   help="largest difference, as a fraction of the logits' range (default 2e-4)")

    s = command("golden", cmd_golden, "compare the reference with a golden.json made by another implementation",
                "cases[]: prompt_ids, greedy_ids, margins and, in some, last_prompt_logits.", "eps dtype")
    s.add_argument("file", nargs="?", help="default DIR/golden.json")
    s.add_argument("--tol", type=float, default=2e-5, metavar="X", help="largest logit difference (default 2e-5)")

    a = p.parse_args(argv)
    if getattr(a, "tokens", 0) < 0 or not 0 <= getattr(a, "seed", 0) < 2 ** 32:
        p.error("--tokens and --seed must not be negative")
    return a


def main(argv=None):
    a = parse(argv)
    try:
        return a.run(a)
    except (Bad, OSError, ValueError, KeyError) as e:
        print(f"reference.py: {type(e).__name__}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
