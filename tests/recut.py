"""recut.py SOURCE TARGET - the same checkpoint in other shards, each expert in pieces.

Tensors go to the shards in turn, in descending order of their names, so that no two of an expert lie
together. Nothing but config.json is copied besides: enough for an engine that is opened headers_only.
"""
import json
import os
import shutil
import struct
import sys

N_SHARDS = 5
source, target = sys.argv[1:]
os.makedirs(target)
shutil.copy(os.path.join(source, "config.json"), target)
with open(os.path.join(source, "model.safetensors.index.json"), encoding="utf-8") as f:
    index = json.load(f)
tensors = {}
for shard in sorted(set(index["weight_map"].values())):
    with open(os.path.join(source, shard), "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    for name, at in json.loads(data[8 : 8 + n]).items():
        if name != "__metadata__":
            first, end = at["data_offsets"]
            tensors[name] = (at, data[8 + n + first : 8 + n + end])
names = sorted(tensors, reverse=True)
for i in range(N_SHARDS):
    shard = f"model-{i + 1:05}-of-{N_SHARDS:06}.safetensors"
    header, parts, offset = {}, [], 0
    for name in names[i::N_SHARDS]:
        at, part = tensors[name]
        header[name] = dict(at, data_offsets=[offset, offset + len(part)])
        parts.append(part)
        offset += len(part)
        index["weight_map"][name] = shard
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(target, shard), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
with open(os.path.join(target, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
    json.dump(index, f)
