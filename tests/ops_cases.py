"""What the tests of the ops share: the golden file, inputs by seed, cases per op, and ops without quantisers."""

from __future__ import annotations

import json

import numpy as np

from dsv4 import formats
from dsv4.ops import IndexCache, KeyCache
from dsv4.ops.reference import ReferenceOps

DTYPES = {
    "F32": np.float32, "U8": np.uint8, "I8": np.uint8, "I32": np.int32, "I64": np.int64,
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


def read_tensors(path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file; bf16 as uint16 bits, the 8-bit formats and I8 as uint8."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        first, last = info["data_offsets"]
        array = np.frombuffer(data[start + first : start + last], DTYPES[info["dtype"]])
        tensors[name] = array.reshape(info["shape"])
    return tensors


class NoQuantOps(ReferenceOps):
    """The reference with its quantisers of activations, keys and index keys replaced by identity."""

    def act_quant(self, x):
        return x

    def key_cache(self, n, dim, rope_dim):
        plain = np.zeros((n, dim - rope_dim), np.float32)
        return KeyCache(plain, np.zeros((n, 1), np.uint8), np.zeros((n, rope_dim), np.float32))

    def encode_keys(self, k, cache, where):
        plain = cache.codes.shape[1]
        cache.codes[where], cache.rope[where] = k[:, :plain], k[:, plain:]

    def decode_keys(self, cache, where):
        return np.concatenate([cache.codes[where], cache.rope[where]], axis=1)

    def index_cache(self, n, dim):
        return IndexCache(np.zeros((n, dim), np.float32), np.zeros((n, 1), np.uint8))

    def index_query(self, q, rope):
        return formats.hadamard(self.rotate(q.copy(), rope))

    def encode_index(self, k, cache, where):
        cache.codes[where] = formats.hadamard(k)

    def decode_index(self, cache, where):
        return cache.codes[where]
