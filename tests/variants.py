"""Checkpoints made wrong, or unusual, on purpose: read a tiny one, change it, write it elsewhere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsv4.checkpoint import DTYPES, INDEX, Checkpoint

REAL = Path(__file__).resolve().parent / "data" / "real_checkpoint"


class Tensor(NamedTuple):
    """A tensor as stored. data None: zeros that take no disk space."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)

    def holding(self, array: np.ndarray) -> Tensor:
        """The same dtype with other values, perhaps another shape."""
        return Tensor(self.dtype, array.shape, np.ascontiguousarray(array, DTYPES[self.dtype]).tobytes())


class Files:
    """A checkpoint in memory: config and, per shard file, tensors by name."""

    def __init__(self, config: dict[str, Any], shards: dict[str, dict[str, Tensor]]):
        self.config, self.shards = config, shards

    @classmethod
    def read(cls, directory: Path, data: bool = True) -> Files:
        """data False: names, dtypes and shapes only."""
        config = json.loads((directory / "config.json").read_text())
        shards: dict[str, dict[str, Tensor]] = {}
        with Checkpoint(directory) as checkpoint:
            for name in sorted(checkpoint.names(), key=lambda n: checkpoint.info(n)[2:]):
                info = checkpoint.info(name)
                raw = checkpoint.view(name).tobytes() if data else None
                shards.setdefault(info.shard, {})[name] = Tensor(info.dtype, info.shape, raw)
        return cls(config, shards)

    def copy(self) -> Files:
        return Files(copy.deepcopy(self.config), {shard: dict(held) for shard, held in self.shards.items()})

    def write(self, directory: Path, shift: int = 0) -> Path:
        """Write all; shift: bytes by which the data of every shard leaves 8-byte alignment."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        for shard, held in self.shards.items():
            write_shard(directory / shard, held, shift)
        self.write_index(directory)
        return directory

    def write_index(self, directory: Path) -> None:
        names = {name: shard for shard, held in self.shards.items() for name in held}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))

    def shard_of(self, name: str) -> str:
        return next(shard for shard, held in self.shards.items() if name in held)

    def names(self) -> list[str]:
        return [name for held in self.shards.values() for name in held]

    def get(self, name: str) -> Tensor:
        return self.shards[self.shard_of(name)][name]

    def put(self, name: str, tensor: Tensor, shard: str | None = None) -> None:
        self.shards[shard or self.shard_of(name)][name] = tensor

    def delete(self, name: str) -> None:
        del self.shards[self.shard_of(name)][name]

    def rename(self, old: str, new: str) -> None:
        held = self.shards[self.shard_of(old)]
        held[new] = held.pop(old)


def write_shard(path: Path, tensors: dict[str, Tensor], shift: int = 0) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.data is None:
                file.seek(tensor.nbytes, 1)
            else:
                file.write(tensor.data)
        file.truncate(8 + len(text) + at)


def real_release() -> Files:
    """Names, dtypes and shapes of the published 160-expert release, in 48 shards; no data."""
    config = json.loads((REAL / "config.json").read_text())
    names: dict[str, Tensor] = {}
    for line in (REAL / "manifest.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for i in _numbers(entry.get("i")):
            for e in _numbers(entry.get("e")):
                name = entry["name"].replace("{i}", str(i)).replace("{e}", str(e))
                names[name] = Tensor(entry["dtype"], tuple(entry["shape"]))
    first = {"embed": 0, "layers": 1, "mtp": 44}
    shards: dict[str, dict[str, Tensor]] = {f"model-{n:05d}-of-00048.safetensors": {} for n in range(1, 49)}
    files = list(shards.values())
    for name, tensor in names.items():
        root, number = (name.split(".") + [""])[:2]
        files[first.get(root, 47) + (int(number) if number.isdigit() else 0)][name] = tensor
    return Files(config, shards)


def _numbers(spec: Any) -> list[Any]:
    """The manifest's "2-42", "2", [2, 4] or nothing."""
    if not isinstance(spec, str):
        return spec or [None]
    first, _, last = spec.partition("-")
    return list(range(int(first), int(last or first) + 1))


# ---------------------------------------------------------------------- variants that load
def drop_draft(files: Files, keys: bool = True) -> None:
    """No mtp.* tensors and, with `keys`, no dspark_* settings."""
    for name in files.names():
        if name.startswith("mtp."):
            files.delete(name)
    files.shards = {shard: held for shard, held in files.shards.items() if held}
    if keys:
        files.config = {key: value for key, value in files.config.items() if not key.startswith("dspark_")}


def _allowed(files: Files, name: str, keep: list[int]) -> None:
    """tid2eid: every id becomes one of `keep`, all different in a row."""
    table = files.get(name)
    order = np.array(keep)[(table.array[:, :1] + np.arange(table.shape[1])) % len(keep)]
    files.put(name, table.holding(order))


def mute_experts(files: Files, keep: list[int], root: str = "layers") -> None:
    """Full size, but only the experts in `keep` are ever chosen: what prune_experts must equal."""
    for name in files.names():
        if name.startswith(root) and name.endswith("ffn.gate.bias"):
            bias = files.get(name).array.copy()
            bias[[e for e in range(len(bias)) if e not in keep]] = -1e30
            files.put(name, files.get(name).holding(bias))
        elif name.startswith(root) and name.endswith("ffn.gate.tid2eid"):
            _allowed(files, name, keep)


def prune_experts(files: Files, keep: list[int], root: str = "layers") -> None:
    """Only the experts in `keep` (ascending), renumbered from 0; root "mtp": the draft's, not the main layers'."""
    for name in files.names():
        if not name.startswith(root):
            continue
        if name.endswith(("ffn.gate.bias", "ffn.gate.weight")):
            files.put(name, files.get(name).holding(files.get(name).array[keep]))
        elif name.endswith("ffn.gate.tid2eid"):
            _allowed(files, name, keep)
            files.put(name, files.get(name).holding(np.searchsorted(keep, files.get(name).array)))
        elif ".ffn.experts." in name:
            before, _, after = name.partition(".ffn.experts.")
            number, _, rest = after.partition(".")
            shard, tensor = files.shard_of(name), files.get(name)
            files.delete(name)
            if int(number) in keep:  # ascending, so the new name is free
                files.put(f"{before}.ffn.experts.{keep.index(int(number))}.{rest}", tensor, shard)
    if root == "layers":
        files.config["n_routed_experts"] = len(keep)


def spell_newer(files: Files, nested: bool = True, by_type: bool = True) -> None:
    """The config as newer exports write it: layer types, rates, rope parameters."""
    config, layers = files.config, files.config["num_hidden_layers"]
    ratios = config.pop("compress_ratios")[:layers]
    names = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    config["layer_types"] = [names.get(ratio, "heavily_compressed_attention") for ratio in ratios]
    config["compress_rates"] = {kind: r for kind, r in zip(config["layer_types"], ratios) if r} if by_type else ratios
    hashed = config.pop("num_hash_layers")
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    rope = config.pop("rope_scaling")
    rope["rope_type"] = rope.pop("type")
    if nested:
        main = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        rope["rope_theta"] = config.pop("compress_rope_theta")
        config["rope_parameters"] = {"main": main, "compress": rope}
    else:
        config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta")}
    config["eos_token_id"] = [config["eos_token_id"]]


def scatter(files: Files) -> None:
    """Deal the tensors out over the shards one by one: those of an expert lie in different files."""
    tensors = {name: files.get(name) for name in files.names()}
    shards = list(files.shards)
    files.shards = {shard: {} for shard in shards}
    for i, (name, tensor) in enumerate(tensors.items()):
        files.shards[shards[i % len(shards)]][name] = tensor


# ---------------------------------------------------------------------- variants that must not
def poison(files: Files, name: str, value: float = np.nan) -> None:
    """One NaN (of a float32 tensor: `value`) in the middle of a tensor, or an expert id that does not exist."""
    tensor = files.get(name)
    flat = tensor.array.copy().reshape(-1)
    bad = {"BF16": 0x7FC0, "F8_E8M0": 0xFF, "F8_E4M3": 0x7F, "F32": value, "I64": 1 << 40}
    flat[flat.size // 2] = bad[tensor.dtype]
    files.put(name, tensor.holding(flat.reshape(tensor.shape)))


class RecordingOps:
    """Stands in for a backend: keeps what it is given."""

    def matrix(self, fmt, weight, scale=None):
        return ("matrix", fmt, weight, scale)

    def vector(self, array):
        return ("vector", array)

    def table(self, array):
        return ("table", array)

    def bank(self, experts, shared):
        return ("bank", experts, shared)
