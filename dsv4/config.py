"""ModelConfig, read and checked from a checkpoint's config.json, and RunConfig, how to run it.

An unknown value of a key that selects an algorithm is an error: this engine computes one model exactly and guesses
nothing. This is the only module that reads environment variables.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError, suggest
from .sizes import parse_size

# key → (accepted values, whether it must be there): keys that select an algorithm
_CHOICES = {
    "model_type": (("deepseek_v4",), False),
    "hidden_act": (("silu",), False),
    "topk_method": (("noaux_tc",), False),
    "num_key_value_heads": ((1,), False),
    "attention_bias": ((False,), False),
    "tie_word_embeddings": ((False,), False),
    "n_shared_experts": ((1,), True),
    "scoring_func": (("sqrtsoftplus",), True),
    "norm_topk_prob": ((True,), True),
    "expert_dtype": (("fp4",), True),
}
_QUANT_CHOICES = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([128, 128],),
}
_INTEGERS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups sliding_window max_position_embeddings index_n_heads index_head_dim index_topk n_routed_experts "
    "num_experts_per_tok moe_intermediate_size hc_mult hc_sinkhorn_iters"
).split()
_NUMBERS = ("routed_scaling_factor", "hc_eps", "rms_norm_eps")
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_ROPE_EXTRAS = {"rope_theta", "type", "rope_type", "partial_rotary_factor", "attention_factor", "truncate"}
_DRAFT_KEYS = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
CONTEXT = 32768  # most tokens of a session where max_context is not set
COUNTS = (1, 2, 4, 8)  # equal slices that a sum over ranks may be cut into, and so numbers of ranks
INDEXED_RATIO = 4  # this ratio pools overlapping blocks and has an indexer


@dataclass(frozen=True)
class Yarn:
    """Rotary scaling of the layers with compression."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Dspark:
    """What the draft module needs beyond the main model's sizes."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]  # ascending
    markov_rank: int


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and constants of a model, named as in config.json. compress_ratios: one per main layer."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_eps: float
    rms_norm_eps: float
    num_hash_layers: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    dspark: Dspark | None

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Read DIRECTORY/config.json. Raises ConfigError."""
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError.no_checkpoint(path.parent) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Check a parsed config.json, older and newer spellings alike. Raises ConfigError naming key and value."""
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        read = _Reader(raw, where)
        read.require(_INTEGERS, _NUMBERS, ("swiglu_limit", "bos_token_id", "eos_token_id", "quantization_config"),
                     [key for key, (_, needed) in _CHOICES.items() if needed])
        for key, (accepted, _) in _CHOICES.items():
            read.choice(key, accepted)
        quant = read.inner("quantization_config")
        quant.require(_QUANT_CHOICES)
        for key, accepted in _QUANT_CHOICES.items():
            quant.choice(key, accepted)
        values: dict[str, Any] = {key: read.integer(key, 1) for key in _INTEGERS}
        values.update({key: read.number(key) for key in _NUMBERS})
        values["swiglu_limit"] = read.number("swiglu_limit", zero=True)
        layers = values["num_hidden_layers"]
        values["compress_ratios"] = _compress_ratios(read, layers)
        values["num_hash_layers"] = _hash_layers(read, layers)
        values["rope_theta"], values["compress_rope_theta"], values["yarn"] = _rope(read, values)
        values["bos_token_id"] = read.integer("bos_token_id", 0)
        values["eos_token_ids"] = read.integers("eos_token_id", one=True)
        values["dspark"] = _dspark(read)
        config = cls(**values)
        _check_shapes(config, read)
        return config

    @property
    def attention_slices(self) -> int:
        """How many fixed slices wo_b's sum is cut into: whole o_groups of whole 128-blocks, at most 8."""
        width = self.o_groups * self.o_lora_rank
        return max(n for n in COUNTS if n == 1 or (self.o_groups % n == 0 and width % (n * 128) == 0))

    @property
    def moe_slices(self) -> int:
        """How many fixed slices the experts' w2 sum is cut into: whole 128-blocks, at most 8."""
        return max(n for n in COUNTS if n == 1 or self.moe_intermediate_size % (n * 128) == 0)

    @property
    def main_hidden_size(self) -> int:
        """Width of the row that the draft reads from the main model; 0 without a draft."""
        return len(self.dspark.target_layer_ids) * self.hidden_size if self.dspark else 0


def pooled_blocks(ratio: int) -> int:
    """Blocks of `ratio` positions that a compressed entry pools: its own, and in indexed layers the one before too."""
    return 2 if ratio == INDEXED_RATIO else 1


def _expected(where: str, key: str, expected: str, found: Any) -> ConfigError:
    return ConfigError(f"{where}: {key}: expected {expected}, found {found!r}")


class _Reader:
    """Typed reads from a JSON object; null counts as absent."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw = {key: value for key, value in raw.items() if value is not None}
        self.where = where

    def require(self, *groups: Any) -> None:
        missing = [key for group in groups for key in group if key not in self.raw]
        if missing:
            raise ConfigError(f"{self.where}: missing {', '.join(missing)}")

    def error(self, key: str, expected: str) -> ConfigError:
        return _expected(self.where, key, expected, self.raw.get(key))

    def choice(self, key: str, accepted: tuple[Any, ...]) -> None:
        """The key, where present, has one of the accepted values (1 is not True)."""
        value = self.raw.get(key, accepted[0])
        if not any(value == known and type(value) is type(known) for known in accepted):
            raise self.error(key, " or ".join(repr(known) for known in accepted))

    def integer(self, key: str, low: int) -> int:
        value = self.raw[key]
        if type(value) is not int or value < low:
            raise self.error(key, f"an integer >= {low}")
        return value

    def number(self, key: str, zero: bool = False) -> float:
        value = self.raw[key]
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self.error(key, "a number >= 0" if zero else "a number > 0")
        return float(value)

    def integers(self, key: str, one: bool = False) -> tuple[int, ...]:
        """A list of integers >= 0, not empty; with `one` also a bare integer."""
        value = self.raw[key]
        values = [value] if one and type(value) is int else value
        if not isinstance(values, list) or not values or any(type(v) is not int or v < 0 for v in values):
            raise self.error(key, "an integer >= 0 or a list of them" if one else "a list of integers >= 0")
        return tuple(values)

    def inner(self, key: str) -> _Reader:
        value = self.raw[key]
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return _Reader(value, f"{self.where}: {key}")

    def per_layer(self, key: str, layers: int, rest: Any) -> list[Any]:
        """A list's first entries, one per main layer; entries beyond belong to draft stages and must be `rest`."""
        value = self.raw[key]
        if not isinstance(value, list) or len(value) < layers:
            found = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise ConfigError(f"{self.where}: {key}: expected a list of at least {layers} entries, found {found}")
        if any(entry != rest for entry in value[layers:]):
            raise ConfigError(f"{self.where}: {key}: expected {rest!r} after entry {layers}, found {value[layers:]}")
        return value[:layers]


def _agreed(where: str, name: str, spelled: dict[str, Any]) -> Any:
    """The one value that all spellings of a setting give."""
    spelled = {source: value for source, value in spelled.items() if value is not None}
    if not spelled:
        raise ConfigError(f"{where}: missing {name}")
    (first, value), *others = spelled.items()
    for source, other in others:
        if other != value:
            raise ConfigError(f"{where}: {source} gives {other} but {first} gives {value}: they must agree")
    return value


def _kind(ratio: int) -> str:
    return SLIDING if ratio == 0 else SPARSE if ratio == INDEXED_RATIO else HEAVY


def _compress_ratios(read: _Reader, layers: int) -> tuple[int, ...]:
    """compress_ratios, or compress_rates (a list, or by layer type) with layer_types."""
    raw, spelled = read.raw, {}
    types = read.per_layer("layer_types", layers, SLIDING) if "layer_types" in raw else None
    for i, name in enumerate(types or ()):
        if name not in (SLIDING, SPARSE, HEAVY):
            raise _expected(read.where, f"layer_types[{i}]", f"{SLIDING}, {SPARSE} or {HEAVY}", name)
    if "compress_ratios" in raw:
        spelled["compress_ratios"] = tuple(read.per_layer("compress_ratios", layers, 0))
    rates = raw.get("compress_rates")
    if isinstance(rates, dict):
        if types is None:
            raise ConfigError(f"{read.where}: missing layer_types, which compress_rates by layer type needs")
        used = {name for name in types if name != SLIDING}
        if used - set(rates):
            raise _expected(read.where, "compress_rates", f"an entry for {', '.join(sorted(used - set(rates)))}", rates)
        spelled["compress_rates"] = tuple(0 if name == SLIDING else rates[name] for name in types)
    elif rates is not None:
        spelled["compress_rates"] = tuple(read.per_layer("compress_rates", layers, 0))
    ratios = _agreed(read.where, "compress_ratios (or compress_rates with layer_types)", spelled)
    for i, ratio in enumerate(ratios):
        if type(ratio) is not int or ratio < 0 or 0 < ratio < INDEXED_RATIO:
            raise _expected(read.where, f"{next(iter(spelled))}, layer {i}", "0, 4 or an integer above 4", ratio)
        if types is not None and types[i] != _kind(ratio):
            raise _expected(read.where, f"layer_types[{i}]", f"{_kind(ratio)} for ratio {ratio}", types[i])
    return ratios


def _hash_layers(read: _Reader, layers: int) -> int:
    """num_hash_layers, or the leading "hash_moe" entries of mlp_layer_types."""
    spelled: dict[str, Any] = {}
    if "num_hash_layers" in read.raw:
        spelled["num_hash_layers"] = read.integer("num_hash_layers", 0)
    if "mlp_layer_types" in read.raw:
        types = read.per_layer("mlp_layer_types", layers, "moe")
        count = sum(name == "hash_moe" for name in types)
        if types != ["hash_moe"] * count + ["moe"] * (layers - count):
            raise read.error("mlp_layer_types", '"hash_moe" for the first layers and "moe" for the rest')
        spelled["mlp_layer_types"] = count
    count = _agreed(read.where, "num_hash_layers (or mlp_layer_types)", spelled)
    if count > layers:
        raise read.error("num_hash_layers", f"at most num_hidden_layers = {layers}")
    return count


def _rope(read: _Reader, sizes: dict[str, Any]) -> tuple[float, float, Yarn]:
    """(rope_theta, compress_rope_theta, yarn) from rope_scaling, or rope_parameters, flat or as main and compress."""
    thetas = {key: {key: read.number(key)} if key in read.raw else {} for key in ("rope_theta", "compress_rope_theta")}
    yarns = {}
    for name in ("rope_scaling", "rope_parameters"):
        if name not in read.raw:
            continue
        block = read.inner(name)
        parts = {"rope_theta": block, "yarn": block}
        if "main" in block.raw or "compress" in block.raw:
            block.require(("main", "compress"))
            main, compress = block.inner("main"), block.inner("compress")
            _check_rope_block(main, ("default",), sizes)
            parts = {"rope_theta": main, "compress_rope_theta": compress, "yarn": compress}
        yarns[name] = _yarn(parts.pop("yarn"), sizes)
        for key, part in parts.items():
            if "rope_theta" in part.raw:
                thetas[key][part.where.removeprefix(f"{read.where}: ")] = part.number("rope_theta")
    plain, compressed = (_agreed(read.where, key, found) for key, found in thetas.items())
    return plain, compressed, _agreed(read.where, "rope_scaling (or rope_parameters)", yarns)


def _check_rope_block(block: _Reader, types: tuple[str, ...], sizes: dict[str, Any]) -> None:
    """The rotation's type and keys are ones whose meaning is known here."""
    unknown = sorted(set(block.raw) - _ROPE_EXTRAS - set(_YARN))
    if unknown:
        raise ConfigError(f"{block.where}: {unknown[0]}: unknown key, found {block.raw[unknown[0]]!r}")
    for key in ("type", "rope_type"):
        block.choice(key, types)
    block.choice("truncate", (True,))
    if block.raw.get("attention_factor", 1) != 1:
        raise block.error("attention_factor", "1")
    share = sizes["qk_rope_head_dim"] / sizes["head_dim"]
    if block.raw.get("partial_rotary_factor", share) != share:
        raise block.error("partial_rotary_factor", f"qk_rope_head_dim / head_dim = {share}")


def _yarn(block: _Reader, sizes: dict[str, Any]) -> Yarn:
    if "type" not in block.raw and "rope_type" not in block.raw:
        raise ConfigError(f"{block.where}: missing type")
    _check_rope_block(block, ("yarn",), sizes)
    block.require(_YARN)
    original = block.integer("original_max_position_embeddings", 1)
    return Yarn(block.number("factor"), original, block.number("beta_fast"), block.number("beta_slow"))


def _dspark(read: _Reader) -> Dspark | None:
    """The draft module's settings; None where the config has none of them."""
    if not any(key in read.raw for key in _DRAFT_KEYS):
        return None
    read.require(_DRAFT_KEYS)
    targets = read.integers("dspark_target_layer_ids")
    if len(set(targets)) < len(targets):
        raise read.error("dspark_target_layer_ids", "different layers")
    return Dspark(read.integer("dspark_block_size", 1), read.integer("dspark_noise_token_id", 0),
                  tuple(sorted(targets)), read.integer("dspark_markov_rank", 1))


def _check_shapes(config: ModelConfig, read: _Reader) -> None:
    """Sizes that cannot work together."""
    c = config
    tokens = {"bos_token_id": (c.bos_token_id,), "eos_token_id": c.eos_token_ids}
    draft = c.dspark
    if draft:
        tokens["dspark_noise_token_id"] = (draft.noise_token_id,)
    last = draft.target_layer_ids[-1] if draft else 0
    rope, dim = c.qk_rope_head_dim, c.index_head_dim
    rules = [
        ("qk_rope_head_dim", rope % 2 == 0, "an even number"),
        ("head_dim", c.head_dim > rope and (c.head_dim - rope) % 64 == 0, f"{rope} + a multiple of 64"),
        ("index_head_dim", dim & (dim - 1) == 0 and dim >= max(32, rope), f"a power of two >= {max(32, rope)}"),
        ("hidden_size", c.hidden_size % 32 == 0, "a multiple of 32"),
        ("moe_intermediate_size", c.moe_intermediate_size % 32 == 0, "a multiple of 32"),
        ("num_attention_heads", c.num_attention_heads % c.o_groups == 0, f"a multiple of o_groups = {c.o_groups}"),
        ("num_experts_per_tok", c.num_experts_per_tok <= c.n_routed_experts, f"at most {c.n_routed_experts} experts"),
        ("dspark_target_layer_ids", last < c.num_hidden_layers, f"layers below {c.num_hidden_layers}"),
    ]
    rules += [(key, max(ids) < c.vocab_size, f"below vocab_size = {c.vocab_size}") for key, ids in tokens.items()]
    for key, holds, expected in rules:
        if not holds:
            raise read.error(key, expected)


def default_threads(sharing: int = 1) -> int:
    """OMP_NUM_THREADS where set, else the cores this process may use, divided among the `sharing` ranks on them."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if text:
        return _parse_count("OMP_NUM_THREADS", text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // sharing)


def _parse_count(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: expected an integer >= 1, found {text!r}")
    return int(text)


def _parse_flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{name}: expected 0 or 1, found {text!r}")
    return text == "1"


def environment(prefix: str) -> dict[str, str]:
    """The environment's variables whose names start so, for settings that other modules define."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefix)}


@dataclass(frozen=True)
class World:
    """The processes that a launcher (mpirun, mpiexec, srun) started together with this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this host

    @classmethod
    def from_env(cls) -> World:
        """What the launcher says: Open MPI, MPICH and its kin (Hydra), or Slurm with PMIx; else one process."""
        for names in _LAUNCHERS:
            if names[0] in os.environ and names[1] in os.environ:
                return cls(*(int(os.environ.get(name, 0)) for name in names))
        return cls()


# rank, size, rank on the host
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
INIT_TIMEOUT = "DSV4_INIT_TIMEOUT"
API_KEY = "DSV4_API_KEY"  # what clients of the server must show


def init_timeout() -> int:
    """Seconds that ranks wait for each other at the start."""
    return _parse_count(INIT_TIMEOUT, os.environ.get(INIT_TIMEOUT, "600"))


_ENVIRONMENT = {
    "DSV4_BACKEND": ("backend", lambda name, text: text),
    "DSV4_THREADS": ("threads", _parse_count),
    "DSV4_MAX_CONTEXT": ("max_context", _parse_count),
    "DSV4_MAX_SESSIONS": ("max_sessions", _parse_count),
    "DSV4_CHUNK": ("chunk", _parse_count),
    "DSV4_DEBUG": ("debug", _parse_flag),
    "DSV4_EXPERT_CACHE": ("expert_cache", parse_size),
    "DSV4_PACKED": ("packed", lambda name, text: text),
}
VARIABLES = (*_ENVIRONMENT, INIT_TIMEOUT, API_KEY)


@dataclass(frozen=True)
class RunConfig:
    """How to run a model: which backend, how much of the machine, how long a context."""

    backend: str = "cpu"
    threads: int = field(default_factory=default_threads)
    max_context: int | None = None  # tokens of one session; None: see context()
    max_sessions: int = 8
    chunk: int = 512  # rows of one prefill forward
    debug: bool = False  # name the layer of the first non-finite value
    expert_cache: int | None = None  # bytes of resident experts; None: all are used where the file is mapped
    packed: str | None = None  # a file that `pack` made from the same checkpoint, to read experts from

    def __post_init__(self) -> None:
        for name in ("threads", "max_context", "max_sessions", "chunk", "expert_cache"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name in ("max_context", "expert_cache") and value is None):
                raise _expected("run settings", name, "an integer >= 1", value)
        if type(self.debug) is not bool:
            raise _expected("run settings", "debug", "true or false", self.debug)

    @classmethod
    def from_env(cls, sharing: int = 1, **overrides: Any) -> RunConfig:
        """Defaults, then DSV4_* variables, then overrides that are not None. Raises ConfigError.

        sharing: how many ranks share this one's cores, for the default number of threads.
        """
        settings = {f.name for f in fields(cls)}
        if unknown := sorted(set(overrides) - settings):
            raise ConfigError(f"run settings: unknown argument {unknown[0]}; {suggest(unknown[0], sorted(settings))}")
        if unknown := [name for name in environment("DSV4_") if name not in VARIABLES]:
            raise ConfigError(f"{unknown[0]}: unknown variable; {suggest(unknown[0], VARIABLES)}")
        init_timeout()
        values = {f: parse(name, os.environ[name]) for name, (f, parse) in _ENVIRONMENT.items() if name in os.environ}
        values.update({key: value for key, value in overrides.items() if value is not None})
        if "threads" not in values:
            values["threads"] = default_threads(sharing)
        return cls(**values)

    def context(self, config: ModelConfig) -> int:
        """Tokens a session may hold: max_context, else the model's limit or CONTEXT, whichever is less."""
        limit = config.max_position_embeddings
        if self.max_context is None:
            return min(limit, CONTEXT)
        if self.max_context > limit:
            found = self.max_context
            raise ConfigError(f"run settings: max_context: expected at most the model's {limit} positions, found {found}")
        return self.max_context
