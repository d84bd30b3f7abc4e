"""Random checkpoints of any size in the real on-disk format, for measurements and tests where no real one is at hand.

Every tensor is drawn from a generator of its own, seeded by the seed and its name: a layer is the same whatever the
number of layers. Linears keep the variance of their input, norms are near 1: activations stay tame in a deep stack.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Callable, Iterator

import numpy as np

from .checkpoint import DTYPES, INDEX, TensorInfo
from .config import Dspark, ModelConfig, Yarn
from .engine import model_directory
from .errors import CapacityError, ConfigError
from .files import replacing
from .formats import bf16_encode, e4m3_encode
from .weights import Expected, expected

PUBLISHED = ModelConfig(
    vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512,
    qk_rope_head_dim=64, q_lora_rank=1024, o_lora_rank=1024, o_groups=8, sliding_window=128,
    max_position_embeddings=1 << 20, index_n_heads=64, index_head_dim=128, index_topk=512, n_routed_experts=256,
    num_experts_per_tok=6, moe_intermediate_size=2048, hc_mult=4, hc_sinkhorn_iters=20, routed_scaling_factor=1.5,
    swiglu_limit=10.0, hc_eps=1e-6, rms_norm_eps=1e-6, num_hash_layers=3, compress_ratios=(0, 0, *(4, 128) * 20, 4),
    rope_theta=10000.0, compress_rope_theta=160000.0, yarn=Yarn(16.0, 65536, 32.0, 1.0), bos_token_id=0,
    eos_token_ids=(1,), dspark=Dspark(5, 128799, (40, 41, 42), 256),
)  # fmt: skip
STAGES = 3
_ONLY_VALUES = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_act": "silu",
    "topk_method": "noaux_tc", "num_key_value_heads": 1, "attention_bias": False, "tie_word_embeddings": False,
    "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "expert_dtype": "fp4",
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
}  # fmt: skip
_BLOCK = 1 << 22  # bytes drawn at a time
_FP8_SPREAD, _FP4_SPREAD = 64.0, 2.926  # standard deviation of the codes drawn: of _e4m3_normal, of all e2m1 alike
_SPARE = 64 << 20  # bytes to leave on the disk: headers, index


@dataclass(frozen=True)
class Recipe:
    """What to write: the sizes, the draft stages and the seed."""

    config: ModelConfig
    stages: int
    seed: int

    @classmethod
    def of(
        cls,
        config: ModelConfig = PUBLISHED,
        *,
        layers: int | None = None,
        experts: int | None = None,
        ratios: tuple[int, ...] | None = None,
        stages: int | None = None,
        seed: int = 0,
    ) -> Recipe:
        """A model like `config` with other numbers of layers, experts and draft stages.

        ratios: compression by layer, repeated as often as there are layers; None: the config's first ones.
        Raises ConfigError where the result is no valid model.
        """
        stages = (STAGES if config.dspark else 0) if stages is None else stages
        layers = (len(ratios) if ratios else config.num_hidden_layers) if layers is None else layers
        experts = config.n_routed_experts if experts is None else experts
        if layers < 1 or stages < 0 or seed < 0:
            raise ConfigError(f"synth: expected layers >= 1, stages and seed >= 0; found {layers}, {stages}, {seed}")
        if stages and not config.dspark:
            raise ConfigError(f"synth: expected no draft stages, as the config has no dspark_* keys; found {stages}")
        cycle = ratios or config.compress_ratios
        cut = replace(
            config,
            num_hidden_layers=layers,
            compress_ratios=tuple(cycle[i % len(cycle)] for i in range(layers)),
            num_hash_layers=min(config.num_hash_layers, layers),
            n_routed_experts=experts,
            dspark=_clamped(config.dspark, layers) if stages else None,
        )
        return cls(ModelConfig.from_dict(as_json(cut, stages), "synth"), stages, seed)

    def shards(self) -> dict[str, dict[str, Expected]]:
        """Tensors by shard file: what belongs to no layer first, then a file a layer and draft stage.

        Within a file those of wide items come first, so that all lie at multiples of their item size.
        """
        groups: dict[tuple[str, ...], dict[str, Expected]] = {}
        for name, tensor in expected(self.config, (self.config.n_routed_experts,) * self.stages).items():
            root = tuple(name.split(".")[:2])
            groups.setdefault(root if root[-1].isdigit() else (), {})[name] = tensor
        width = lambda item: -np.dtype(DTYPES[item[1].dtype]).itemsize  # noqa: E731
        return {
            f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": dict(sorted(group.items(), key=width))
            for i, group in enumerate(groups.values())
        }

    def total_bytes(self) -> int:
        return sum(_nbytes(tensor) for shard in self.shards().values() for tensor in shard.values())


def read_config(like: str) -> ModelConfig:
    """ "real", "nano", a config.json or a directory with one. Raises ConfigError."""
    if like == "real":
        return PUBLISHED
    path = model_directory(like)
    if path.is_dir():
        return ModelConfig.load(path)
    try:
        return ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{like}: expected real, nano, a config.json or a directory with one; {error}") from None


def as_json(config: ModelConfig, stages: int) -> dict:
    """config.json in the published spelling: compress_ratios has an entry, 0, for every draft stage too."""
    found = asdict(config)
    yarn, dspark = found.pop("yarn"), found.pop("dspark")
    ends = list(found.pop("eos_token_ids"))
    found["compress_ratios"] = list(config.compress_ratios) + [0] * stages
    found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    found["rope_scaling"] = {"type": "yarn", **yarn}
    for key, value in (dspark or {}).items():
        found[f"dspark_{key}"] = list(value) if isinstance(value, tuple) else value
    return _ONLY_VALUES | found


def _clamped(dspark: Dspark, layers: int) -> Dspark:
    """The draft reads layers that exist: those of the config, or else the last ones."""
    targets = dspark.target_layer_ids
    if targets[-1] >= layers:
        targets = tuple(range(max(0, layers - len(targets)), layers))
    return replace(dspark, target_layer_ids=targets)


# ---------------------------------------------------------------------- writing
def write(directory: Path, recipe: Recipe, *, force: bool = False, progress: Callable | None = None) -> None:
    """Write the checkpoint, a file at a time, the index last; a file appears when it is complete.

    force: take the place of a checkpoint that is there. progress(stage, done, total) in bytes.
    Raises ConfigError for a directory in use, CapacityError where the disk lacks the space.
    """
    shards, total = recipe.shards(), recipe.total_bytes()
    _make_room(directory, total, force)
    done = 0
    for file, tensors in shards.items():
        with replacing(directory / file) as out:
            out.write(_header(tensors))
            for name, tensor in tensors.items():
                for block in draw(name, tensor, recipe.seed):
                    out.write(block)
                    done += len(block)
                    if progress:
                        progress("write", done, total)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    for file, content in (
        ("config.json", as_json(recipe.config, recipe.stages)),
        (INDEX, {"metadata": {"total_size": total}, "weight_map": index}),
    ):
        with replacing(directory / file) as out:
            out.write(json.dumps(content, indent=1).encode())


def _make_room(directory: Path, total: int, force: bool) -> None:
    """Have an empty directory; of a checkpoint that is replaced the index goes first."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: expected a directory, found a file")
    held = list(directory.iterdir()) if directory.exists() else []
    if held and not force:
        raise ConfigError(f"{directory}: expected a new or empty directory, found {len(held)} entries in it; use --force "
                          "to put the checkpoint in place of one that is there")  # fmt: skip
    old = [path for path in held if path.name == INDEX or path.suffix == ".safetensors"]
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + sum(path.stat().st_size for path in old)
    if total + _SPARE > free:
        raise CapacityError(f"{directory}: expected {(total + _SPARE) / 1e9:.2f} GB of free disk, found {free / 1e9:.2f} GB; "
                            "ask for fewer layers or experts")  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(old, key=lambda path: path.name != INDEX):
        path.unlink()


def _nbytes(tensor: Expected) -> int:
    return math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize


def _header(tensors: dict[str, Expected]) -> bytes:
    entries, at = {}, 0
    for name, tensor in tensors.items():
        end = at + _nbytes(tensor)
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---------------------------------------------------------------------- values
@lru_cache
def _normal(count: int) -> np.ndarray:
    """`count` equally likely values of a standard normal variable, float32."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / count) for i in range(count)], np.float32)


@lru_cache
def _e4m3_normal() -> bytes:
    return e4m3_encode(_normal(256) * np.float32(_FP8_SPREAD)).tobytes()


@lru_cache
def _scales(centre: int) -> bytes:
    """256 e8m0 codes: half 2^centre, a quarter each of the powers beside it."""
    return bytes(127 + centre + (-1, 0, 0, 1)[i % 4] for i in range(256))


def _spread(tensor: Expected) -> float:
    """The standard deviation that makes the linear keep the variance of its input: K^-½ with K inputs."""
    return tensor.shape[-1] ** -0.5


def draw(name: str, tensor: Expected, seed: int) -> Iterator[bytes]:
    """The tensor's stored bytes, a block at a time."""
    source = np.random.SFC64([seed, zlib.crc32(name.encode())])
    item = np.dtype(DTYPES[tensor.dtype]).itemsize
    left = math.prod(tensor.shape)
    step = _BLOCK // item
    if tensor.dtype == "I64":
        step = max(1, step // tensor.shape[1]) * tensor.shape[1]  # whole rows
    while left:
        count = min(step, left)
        block = _values(source, tensor, count)
        yield block
        left -= count


def _values(source: np.random.SFC64, tensor: Expected, count: int) -> bytes:
    """The next `count` items, as bytes."""
    if tensor.dtype in ("I8", "F8_E4M3", "F8_E8M0"):
        return _bytes(source, tensor, count)
    if tensor.dtype == "BF16":
        return _bf16(tensor)[_raw(source, 2 * count).view(np.uint16)].tobytes()
    rng = np.random.Generator(source)
    if tensor.dtype == "I64":
        return _choices(rng, count, tensor.shape[1], tensor.experts).tobytes()
    values = rng.standard_normal(count, np.float32)
    kind = tensor.row.form.split()[1]
    if kind == "matrix":
        return (values * np.float32(_spread(tensor))).tobytes()
    return (1 + 0.05 * values if tensor.row.field.endswith(".scale") else 0.1 * values).astype(np.float32).tobytes()


def _raw(source: np.random.SFC64, count: int) -> np.ndarray:
    """`count` random bytes."""
    return source.random_raw(-(-count // 8)).view(np.uint8)[:count]


def _bytes(source: np.random.SFC64, tensor: Expected, count: int) -> bytes:
    """Codes and scales of quantised linears. All fp4 bytes are valid; of fp8 those of a normal variable are drawn."""
    raw = _raw(source, count).tobytes()
    if tensor.dtype == "I8":
        return raw
    if tensor.dtype == "F8_E4M3":
        return raw.translate(_e4m3_normal())
    group, spread = (32, _FP4_SPREAD) if tensor.row.format == "fp4" else (128, _FP8_SPREAD)
    return raw.translate(_scales(round(-math.log2(spread * math.sqrt(tensor.shape[1] * group)))))


def _bf16(tensor: Expected) -> np.ndarray:
    """65,536 equally likely values: of a norm near 1, of a table 1 wide, of a linear's weights."""
    kind = tensor.row.form.split()[1]
    return _bf16_normal(*(1.0, 0.05) if kind == "vector" else (0.0, 1.0 if kind == "table" else _spread(tensor)))


@lru_cache
def _bf16_normal(mean: float, spread: float) -> np.ndarray:
    return bf16_encode(np.float32(mean) + np.float32(spread) * _normal(1 << 16))


def _choices(rng: np.random.Generator, count: int, k: int, experts: int) -> np.ndarray:
    """count / k rows of k different expert ids: one from each of k equal parts of them."""
    bounds = np.arange(k + 1) * experts // k
    low, high = np.broadcast_arrays(bounds[:-1], bounds[1:])
    return rng.integers(low, high, (count // k, k), dtype=np.int64)


# ---------------------------------------------------------------------- without files
class Drawn:
    """The recipe's checkpoint in memory, a tensor drawn when it is asked for: what load_weights needs of a Checkpoint."""

    def __init__(self, recipe: Recipe):
        self.directory, self._seed = "synth", recipe.seed
        self._tensors = {name: tensor for shard in recipe.shards().values() for name, tensor in shard.items()}
        self.total_bytes = recipe.total_bytes()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        return TensorInfo(tensor.dtype, tensor.shape, "memory", 0, _nbytes(tensor))

    def view(self, name: str, part: tuple[slice, ...] = ()) -> np.ndarray:
        tensor = self._tensors[name]
        data = np.empty(_nbytes(tensor), np.uint8)
        at = 0
        for block in draw(name, tensor, self._seed):
            data[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        return data.view(DTYPES[tensor.dtype]).reshape(tensor.shape)[part]

    def check_values(self, name: str, below: int = 0, part: tuple[slice, ...] | None = None) -> None:
        """Nothing to find: what is drawn is valid."""
