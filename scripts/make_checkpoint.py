#!/usr/bin/env python3
"""Random checkpoints in the official format, of any geometry, as fast as the disk takes them.

`reference.py make` draws every weight and is for models of a few MB.  This is for the
real sizes: matrices are cut from one pool of normal noise, so a byte costs a copy.

    make_checkpoint.py DIR --layers 3 --experts 16 --top-k 4       true K3 dimensions, 5 GB
    make_checkpoint.py DIR --layers 93 --experts 896 --top-k 16 --vocab 163840 --check
    make_checkpoint.py DIR --layers 8 --experts 12 --top-k 3 --hidden 64 --latent 32 --inter 32 \\
        --heads 2 --kda-dim 16 --q-lora 48 --kv-lora 32 --nope 24 --rope 8 --v-dim 24 --dense-inter 96

What a reader may rely on
  * A tensor's bytes depend on --seed, its name, its shape and, for A_log and MXFP4 scales, on the
    dimensions.  So --split-experts, --shard-size and --layer-per-shard write the same model.
  * No two rows of a matrix start at the same place of the pool, and no two experts are equal.
  * Activations stay finite and small; the last 8 ids (bos, eos and pad are among them) have
    logits near 0, so greedy decoding never meets them.
  * In a shard F32 comes first, then BF16, then the experts (U8), shuffled.  Offsets have no
    alignment beyond that of the dtype.  There is no tokenizer and no vision part.
  * config.json and the index are written last: a directory without them was interrupted.

Exit: 0 done, 1 no space or a bad file, 2 misuse, 77 no numpy.
"""

import argparse
import concurrent.futures
import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import sys
import time

sys.dont_write_bytecode = True
import reference as ref  # noqa: E402  exits 77 without numpy

np = ref.np

# option, field of config.json, default
DIMS = [("hidden", "hidden_size", 7168), ("latent", "routed_expert_hidden_size", 3584),
        ("inter", "moe_intermediate_size", 3072), ("shared", "num_shared_experts", 2),
        ("dense-inter", "intermediate_size", 33792), ("heads", "num_attention_heads", 96),
        ("kda-heads", "kda_heads", None), ("kda-dim", "kda_dim", 128), ("q-lora", "q_lora_rank", 1536),
        ("kv-lora", "kv_lora_rank", 512), ("nope", "qk_nope_head_dim", 128), ("rope", "qk_rope_head_dim", 64),
        ("v-dim", "v_head_dim", 128), ("vocab", "vocab_size", 4096), ("dense", "first_k_dense_replace", 1),
        ("block", "attn_res_block_size", 12)]


# ---------------------------------------------------------------------------
# 1 Bytes
#
# One pool of normal noise; a BF16 copy of it for every standard deviation, and an
# MXFP4 copy with a scale table for every power of two.  A matrix is a few long
# pieces of a pool, cut at places that a hash of its name chooses.

POOL = 1 << 22  # weights: 8 MiB as BF16, 2 MiB as MXFP4, so the copies come from the cache
GAIN = dict(lm_head=3, gate=1.5, o_proj=2, q_b_proj=2)  # as in reference.py; the rest 1.2


class Source:
    """The bytes of every tensor, as lists of memoryviews."""

    def __init__(self, c, seed, sparse):
        self.c, self.seed, self.sparse, self.pools = c, seed, sparse, {}
        self.noise = np.random.RandomState(seed).standard_normal(POOL)
        self.packed, self.scale = ref.mxfp4_encode(self.noise)

    def hash(self, what):
        """u64, the same for the same seed and `what` on every machine."""
        text = f"{self.seed} {what}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def pool(self, key, build):
        if key not in self.pools:
            self.pools[key] = memoryview(np.ascontiguousarray(build())).cast("B")
        return self.pools[key]

    def cut(self, name, pool, unit, n, row):
        """n units of `unit` bytes, `row` to a row, from at most half the pool each.  Piece k's place
        is random, then moved so that the rows of no two pieces are in step."""
        n_pool, phase, out = len(pool) // unit, self.hash(name), []
        for k, at in enumerate(range(0, n, n_pool // 2)):
            size = min(n_pool // 2, n - at)
            o = self.hash(f"{name} {k}") % (n_pool - size - row + 1)
            o += (phase + k + at - o) % row
            out.append(pool[o * unit:(o + size) * unit])
        return out

    def bf16(self, name, std, shape):
        pool = self.pool(std, lambda: ref.bf16_encode(self.noise * std))
        return self.cut(name, pool, 2, shape[0] * shape[1], shape[1])

    def tensor(self, name, dtype, shape):
        """One tensor; an int stands for so many bytes of zeros."""
        if name.endswith("_packed"):
            return self.cut(name, self.pool("packed", lambda: self.packed), 16, shape[0] * shape[1] // 16,
                            shape[1] // 16)
        if name.endswith("_scale"):  # RMS 1.5 / sqrt(fan in), to a power of two: codes 120..122 for K3
            shift = round(float(np.log2(1.5 / np.sqrt(32 * shape[1]))))
            pool = self.pool(f"scale {shift}", lambda: (self.scale.astype(np.int64) + shift).astype(np.uint8))
            return self.cut(name.replace("_scale", "_packed"), pool, 1, shape[0] * shape[1], shape[1])
        if dtype == "F32" or len(shape) == 1:
            rng = np.random.RandomState(self.hash(name) & 0xffffffff)
            return [memoryview(ref.draw(rng, self.c, name, dtype, shape, False))]
        if self.sparse and any(x in name for x in (".self_attn.", ".mlp.", ".shared_experts.")):
            return [2 * shape[0] * shape[1]]
        last = name.removesuffix(".weight").rsplit(".", 1)[-1]
        std = 1.0 if last == "embed_tokens" else GAIN.get(last, 1.2) / shape[1] ** 0.5
        if last == "lm_head":
            return self.bf16(name, std, (shape[0] - 8, shape[1])) + self.bf16(name + " 8", std / 100, (8, shape[1]))
        return self.bf16(name, std, shape)


# ---------------------------------------------------------------------------
# 2 Plan: which tensor is in which shard, and where
#
# A unit is what a shard boundary may not cut: an expert's six tensors, or a tensor.

ITEM = {"F32": 4, "BF16": 2, "U8": 1}


def layer_units(c, source, il, split):
    """Layer il (None: the head) as a list of units [(name, dtype, shape)]."""
    units = [[(name, *t)] for name, t in ref.tensors(c, il).items()]
    if il is None or not c.is_moe(il):
        return units
    kinds = [(w + ".weight_" + kind, [o, i // per]) for w, (o, i) in ref.expert_matrices(c).items()
             for kind, per in (("packed", 2), ("scale", 32))]
    order = sorted(range(c.num_experts), key=lambda ie: source.hash(f"order {il} {ie}"))
    base = f"model.layers.{il}.block_sparse_moe.experts."
    experts = [[(f"{base}{ie}.{kind}", "U8", shape) for kind, shape in kinds] for ie in order]
    return units + ([[x[k]] for k in range(6) for x in experts] if split else experts)


def n_bytes(t):
    return math.prod(t[2]) * ITEM[t[1]]


def plan(c, source, a):
    """The shards, each a list of (name, dtype, shape) in file order.  Released: layer L wholly in
    shard L+1, the head in the last."""
    shards, room = [], 0
    for il in [*range(c.num_hidden_layers), None]:
        units = layer_units(c, source, il, a.split_experts)
        if not a.shard_size:
            shards.append([t for u in units for t in u])
            continue
        for u in units:
            need = sum(map(n_bytes, u))
            if not shards or need > room:
                shards.append([])
                room = a.shard_size
            shards[-1] += u
            room -= need
    return [sorted(s, key=lambda t: -ITEM[t[1]]) for s in shards]  # stable; so every offset is aligned


def header(shard, sparse):
    """A shard's first bytes: u64 length, JSON.  `k3_sparse` says that zeros in the trunk are meant."""
    at, entries = 0, {"__metadata__": {"format": "pt", **({"k3_sparse": "trunk"} if sparse else {})}}
    for t in shard:
        entries["language_model." + t[0]] = dict(dtype=t[1], shape=t[2], data_offsets=[at, at + n_bytes(t)])
        at += n_bytes(t)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# ---------------------------------------------------------------------------
# 3 Writing
#
# Past the page cache where the system allows it: several times faster for files
# larger than memory, and a reader's first look is honest.  The disk has
# three buffers while the fourth is filled.

CHUNK, N_BUF, BLOCK = 16 << 20, 4, 4096


class Writer:
    """One file, front to back.  put(x): bytes, a memoryview, or an int for zeros (holes if large)."""

    def __init__(self, path, workers, bufs):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError:
            self.fd = os.open(path, flags, 0o644)
        self.workers, self.bufs, self.busy = workers, bufs, [None] * N_BUF
        self.i, self.fill, self.at = 0, 0, 0  # current buffer, bytes in it, its place in the file

    def put(self, x):
        done, n = 0, x if isinstance(x, int) else len(x)
        while done < n:
            take = min(n - done, CHUNK - self.fill)
            if take == CHUNK and isinstance(x, int):
                self.at += CHUNK
            else:
                part = bytes(take) if isinstance(x, int) else x[done:done + take]
                self.bufs[self.i][self.fill:self.fill + take] = part
                self.fill += take
                if self.fill == CHUNK:
                    self._flush(CHUNK)
            done += take

    def _flush(self, n):
        self.busy[self.i] = self.workers.submit(self._write, self.bufs[self.i], n, self.at)
        self.i, self.fill, self.at = (self.i + 1) % N_BUF, 0, self.at + n
        if self.busy[self.i]:
            self.busy[self.i].result()

    def _write(self, buf, n, at):
        done = 0
        with memoryview(buf) as v:
            while done < n:
                done += os.pwrite(self.fd, v[done:n], at + done)

    def close(self):
        size = self.at + self.fill
        if self.fill:
            self._flush(-(-self.fill // BLOCK) * BLOCK)
        for future in filter(None, self.busy):
            future.result()
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)
        os.close(self.fd)


def write(path, source, shards, total):
    """All shards, with a line on stderr if that is a terminal -> (seconds, {tensor: file})."""
    where, done, shown, t0 = {}, 0, 0, time.time()
    bufs = [mmap.mmap(-1, CHUNK) for _ in range(N_BUF)]  # page-aligned, as O_DIRECT wants
    with concurrent.futures.ThreadPoolExecutor(N_BUF - 1) as workers:
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors"
            out = Writer(os.path.join(path, name), workers, bufs)
            out.put(header(shard, source.sparse))
            for t in shard:
                for x in source.tensor(*t):
                    out.put(x)
                where["language_model." + t[0]] = name
                done, now = done + n_bytes(t), time.time()
                if sys.stderr.isatty() and now > shown + 0.1:
                    shown = now
                    sys.stderr.write(f"\r\033[K{100 * done / total:5.1f}% of {total / 2**30:.1f} GiB  "
                                     f"{done / (now - t0 + 1e-9) / 1e9:.2f} GB/s  {name}")
            out.close()
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    return time.time() - t0, where


# ---------------------------------------------------------------------------
# 4 Command

PARTS = [(".experts.", "routed experts"), (".self_attn.", "attention"), (".block_sparse_moe.", "MoE trunk"),
         (".mlp.", "dense MLP"), (".layers.", "norms, AttnRes"), ("", "embedding, head")]


def report(c, shards, sparse):
    parts, files = {label: 0 for _, label in PARTS}, []
    for shard in shards:
        files.append(len(header(shard, sparse)) + sum(map(n_bytes, shard)))
        for t in shard:
            parts[next(label for mark, label in PARTS if mark in t[0])] += n_bytes(t)
    expert = sum(o * i * 17 // 32 for o, i in ref.expert_matrices(c).values())
    for label, n in [*parts.items(), ("headers", sum(files) - sum(parts.values())), ("all", sum(files)),
                     ("largest shard", max(files)), ("one expert", expert)]:
        print(f"{label:16} {n:>20,} B {n / 2**30:10.3f} GiB")
    print(f"{'tensors, shards':16} {sum(map(len, shards)):>20,} in {len(shards)}")


def size(text):
    unit = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:].upper())
    n = int(text[:-1]) << unit if unit else int(text)
    if n <= 0:
        raise ValueError
    return n


def parse(argv):
    p = ref.Parser(prog="make_checkpoint.py", description=__doc__,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir", metavar="DIR", help="directory to make; must be empty if it is there")
    for name in ("layers", "experts", "top-k"):
        p.add_argument("--" + name, type=size, required=True, metavar="N")
    for name, field, default in DIMS:
        p.add_argument("--" + name, type=size, default=default, metavar="N", dest=field,
                       help=f"{field} (default {default or 'as --heads'})")
    p.add_argument("--mla", type=ref.id_list, metavar="N,N,..", help="MLA layers, 1-based "
                   "(default every 4th and the last, as K3)")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--layer-per-shard", action="store_true", help="as released (default)")
    how.add_argument("--shard-size", type=size, metavar="SIZE", help="most bytes of tensors in a shard, as 4G; "
                     "a larger tensor is alone in its shard")
    p.add_argument("--split-experts", action="store_true", help="an expert's six tensors not back to back")
    p.add_argument("--sparse-trunk", choices=["no", "yes"], default="no", help="attention, dense and shared "
                   "matrices are zeros (holes), for many experts on a small disk (default no)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")
    p.add_argument("--check", action="store_true", help="print the sizes, write nothing")
    a = p.parse_args(argv)
    a.kda_heads = a.kda_heads or a.num_attention_heads
    a.mla = sorted(set(a.mla or [*range(4, a.layers + 1, 4), a.layers]))
    for bad, why in ((not 0 <= a.seed < 1 << 32, "--seed is outside 0..2^32-1"), (a.vocab_size < 16, "--vocab < 16"),
                     (a.top_k > a.experts, "--top-k is more than --experts"), (a.top_k > 32, "--top-k is more than 32"),
                     (a.first_k_dense_replace > a.layers, "--dense is more than --layers"),
                     (a.routed_expert_hidden_size % 32, "--latent is not a multiple of 32"),
                     (a.moe_intermediate_size % 32, "--inter is not a multiple of 32"),
                     (a.mla[0] < 1 or a.mla[-1] > a.layers, "--mla names a layer that is not there")):
        if bad:
            p.error(why)
    return a


def run(a):
    g = {field: getattr(a, field) for _, field, _ in DIMS}
    config = ref.make_config(dict(g, num_hidden_layers=a.layers, num_experts=a.experts, full_attn=a.mla,
                                  num_experts_per_token=a.top_k))
    config["text_config"]["max_position_embeddings"] = 1048576
    c = ref.Shape(config)
    source = Source(c, a.seed, a.sparse_trunk == "yes")
    shards = plan(c, source, a)
    total = sum(n_bytes(t) for s in shards for t in s)
    if a.check:
        report(c, shards, source.sparse)
        return 0
    os.makedirs(a.dir, exist_ok=True)
    if os.listdir(a.dir):
        raise ref.Bad(f"{a.dir} is not empty")
    free = shutil.disk_usage(a.dir).free
    if total > free and not source.sparse:
        raise ref.Bad(f"{a.dir}: needs {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    seconds, where = write(a.dir, source, shards, total)
    for name, value in (("model.safetensors.index.json", dict(metadata=dict(total_size=total), weight_map=where)),
                        ("generation_config.json", dict(max_length=1048576, eos_token_id=config["eos_token_id"])),
                        ("config.json", config)):
        ref.json_write(os.path.join(a.dir, name), value)
    print(json.dumps(dict(seed=a.seed, shards=len(shards), tensors=sum(map(len, shards)), tensor_bytes=total,
                          seconds=round(seconds, 2), gb_per_s=round(total / seconds / 1e9, 3))))
    return 0


def main(argv=None):
    a = parse(argv)
    try:
        return run(a)
    except (ref.Bad, OSError) as e:
        print(f"make_checkpoint.py: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
