"""config.json: both spellings, every wrong value named; settings from the environment; rotation frequencies."""

import copy
import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors import safe_open

from dsv4.config import VARIABLES, ModelConfig, RunConfig, Yarn
from dsv4.errors import ConfigError
from dsv4.rope import correction_dims, rope_thetas
from tools.make_tiny import CONFIGS, hf_config
from variants import REAL, Files, drop_draft, spell_newer


@pytest.fixture
def raw():
    return copy.deepcopy(hf_config("tiny-a"))


@pytest.fixture(scope="module")
def real():
    return ModelConfig.load(REAL)


def test_real_release(real):
    assert (real.num_hidden_layers, len(real.compress_ratios)) == (43, 43)
    assert real.compress_ratios[:5] == (0, 0, 4, 128, 4)
    assert real.yarn == Yarn(16, 65536, 32, 1)
    assert real.dspark.target_layer_ids == (40, 41, 42)
    assert (real.eos_token_ids, real.n_routed_experts, real.main_hidden_size) == ((1,), 160, 3 * 4096)


@pytest.mark.parametrize("name, attention, experts", [
    ("tiny-m", 1, 1), ("tiny-tp", 8, 8), ("tiny-a", 2, 1), ("tiny-b", 4, 2),
])  # fmt: skip
def test_slices(name, attention, experts):
    config = ModelConfig.from_dict(hf_config(name))
    assert (config.attention_slices, config.moe_slices) == (attention, experts)


@pytest.mark.parametrize("groups, rank, slices", [
    (2, 512, 2), (1, 1024, 1), (4, 32, 1), (4, 64, 2), (4, 96, 1), (2, 96, 1),
])  # fmt: skip
def test_attention_slices_are_whole_groups_of_whole_blocks(raw, groups, rank, slices):
    assert ModelConfig.from_dict(raw | {"o_groups": groups, "o_lora_rank": rank}).attention_slices == slices


def test_slices_of_nano_and_real(nano_dir, real):
    nano = ModelConfig.load(nano_dir)
    assert (nano.attention_slices, nano.moe_slices) == (2, 1)
    assert (real.attention_slices, real.moe_slices) == (8, 8)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("by_type", [True, False])
def test_newer_spelling_is_the_same_config(name, nested, by_type):
    files = Files(copy.deepcopy(hf_config(name)), {})
    plain = ModelConfig.from_dict(files.config)
    newer = files.copy()
    spell_newer(newer, nested, by_type)
    assert "compress_ratios" not in newer.config and "rope_scaling" not in newer.config
    assert ModelConfig.from_dict(newer.config) == plain
    both = files.config | newer.config
    assert ModelConfig.from_dict(both) == plain


def test_draftless_and_lists(raw):
    files = Files(raw | {"eos_token_id": [1, 7], "dspark_target_layer_ids": [7, 5, 6]}, {})
    config = ModelConfig.from_dict(files.config)
    assert (config.eos_token_ids, config.dspark.target_layer_ids) == ((1, 7), (5, 6, 7))
    drop_draft(files)
    assert ModelConfig.from_dict(files.config).dspark is None


OPTIONAL = {"architectures", "attention_bias", "attention_dropout", "hidden_act", "initializer_range", "model_type",
            "num_key_value_heads", "num_nextn_predict_layers", "tie_word_embeddings", "topk_method", "torch_dtype",
            "transformers_version", "use_cache"}  # fmt: skip


def test_every_missing_key_is_named(raw):
    def keys(block, path=()):
        for key, value in block.items():
            yield (*path, key)
            if isinstance(value, dict):
                yield from keys(value, (*path, key))

    needed = [path for path in keys(raw) if path[0] not in OPTIONAL]
    assert len(needed) > 40
    for path in needed:
        broken = copy.deepcopy(raw)
        block = broken
        for key in path[:-1]:
            block = block[key]
        del block[path[-1]]
        with pytest.raises(ConfigError, match=rf"missing .*\b{path[-1]}\b"):
            ModelConfig.from_dict(broken)
    for key in OPTIONAL:
        ModelConfig.from_dict({k: v for k, v in raw.items() if k != key})


def test_null_is_absent(raw):
    newer = Files(copy.deepcopy(raw), {})
    spell_newer(newer)
    nulls = dict.fromkeys(set(raw) - set(newer.config))  # the older spellings
    assert ModelConfig.from_dict(newer.config | nulls | {"topk_method": None}) == ModelConfig.from_dict(raw)
    with pytest.raises(ConfigError, match="missing hc_mult"):
        ModelConfig.from_dict(raw | {"hc_mult": None})


WRONG = [
    ("scoring_func", "softmax"), ("expert_dtype", "fp8"), ("hidden_act", "gelu"), ("topk_method", "greedy"),
    ("model_type", "deepseek_v3"), ("n_shared_experts", 2), ("norm_topk_prob", False), ("norm_topk_prob", 1),
    ("tie_word_embeddings", True), ("num_key_value_heads", 4), ("attention_bias", True), ("vocab_size", 0),
    ("vocab_size", "512"), ("vocab_size", True), ("hidden_size", 256.0), ("hidden_size", 272), ("head_dim", 96),
    ("head_dim", 64), ("qk_rope_head_dim", 63), ("index_head_dim", 96), ("index_head_dim", 16), ("index_head_dim", 32),
    ("moe_intermediate_size", 100), ("o_groups", 3), ("num_experts_per_tok", 17), ("num_hash_layers", 9),
    ("num_hash_layers", -1), ("hc_eps", 0), ("rms_norm_eps", float("nan")), ("swiglu_limit", -1), ("hc_mult", 0),
    ("hc_sinkhorn_iters", 0), ("rope_theta", "1e4"), ("eos_token_id", []), ("eos_token_id", 512), ("bos_token_id", -1),
    ("compress_ratios", [0, 4]), ("compress_ratios", [0, 0, 4, 16, 4, 16, 4, 2]), ("compress_ratios", 4),
    ("compress_ratios", [0, 0, 4, 16, 4, 16, 4, 0, 4]), ("compress_ratios", [0, 0, 4, 16, 4, 16, 4, -4]),
    ("dspark_noise_token_id", 512), ("dspark_target_layer_ids", [5, 8]), ("dspark_target_layer_ids", [5, 5]),
    ("dspark_target_layer_ids", []), ("dspark_block_size", 0), ("quantization_config", "fp8"),
    ("rope_scaling", "yarn"),
]  # fmt: skip


@pytest.mark.parametrize("key, value", WRONG)
def test_wrong_value_is_named(raw, key, value):
    with pytest.raises(ConfigError, match=key) as caught:
        ModelConfig.from_dict(raw | {key: value}, "some/config.json")
    text = str(caught.value)
    assert text.startswith("some/config.json: ") and "expected" in text and "found" in text and "\n" not in text


@pytest.mark.parametrize("block, key, value", [
    ("quantization_config", "quant_method", "awq"), ("quantization_config", "fmt", "e5m2"),
    ("quantization_config", "scale_fmt", "float"), ("quantization_config", "weight_block_size", [64, 64]),
    ("quantization_config", "activation_scheme", "static"), ("rope_scaling", "type", "linear"),
    ("rope_scaling", "factor", 0), ("rope_scaling", "beta_fast", "32"), ("rope_scaling", "mscale", 1.0),
    ("rope_scaling", "attention_factor", 1.2), ("rope_scaling", "truncate", False),
    ("rope_scaling", "partial_rotary_factor", 1.0), ("rope_scaling", "original_max_position_embeddings", 64.5),
])  # fmt: skip
def test_wrong_inner_value_is_named(raw, block, key, value):
    with pytest.raises(ConfigError, match=f"{block}: {key}"):
        ModelConfig.from_dict(raw | {block: raw[block] | {key: value}})


@pytest.mark.parametrize("change, message", [
    (lambda c: c.update(num_hash_layers=1), "num_hash_layers gives 1|gives 2 but num_hash_layers"),
    (lambda c: c.update(compress_ratios=[0] * 8), "compress_rates gives"),
    (lambda c: c["layer_types"].__setitem__(0, "full_attention"), r"layer_types\[0\].*full_attention"),
    (lambda c: c["layer_types"].pop(), "layer_types: expected a list of at least 8"),
    (lambda c: c.pop("layer_types"), "missing layer_types"),
    (lambda c: c["compress_rates"].pop("heavily_compressed_attention"), "compress_rates.*heavily"),
    (lambda c: c["compress_rates"].update(compressed_sparse_attention=8), r"layer_types\[2\].*ratio 8"),
    (lambda c: c["compress_rates"].update(heavily_compressed_attention="16"), "layer 3: expected 0, 4"),
    (lambda c: c["mlp_layer_types"].__setitem__(0, "moe"), "mlp_layer_types: expected"),
    (lambda c: c["mlp_layer_types"].__setitem__(7, "dense"), "mlp_layer_types: expected"),
    (lambda c: c["rope_parameters"].pop("main"), "missing main"),
    (lambda c: c["rope_parameters"]["main"].update(rope_type="yarn"), "main: rope_type.*'default'"),
    (lambda c: c["rope_parameters"]["compress"].pop("rope_type"), "compress: missing type"),
    (lambda c: c["rope_parameters"]["main"].pop("rope_theta"), "missing rope_theta"),
    (lambda c: c.update(rope_theta=5), "rope_theta gives|gives 10000.0 but"),
    (lambda c: c.update(compress_rope_theta=5), "compress.*160000"),
    (lambda c: c.update(rope_scaling=c["rope_parameters"]["compress"] | {"factor": 2}), "must agree"),
])  # fmt: skip
def test_newer_spelling_that_contradicts_itself(raw, change, message):
    files = Files(raw, {})
    spell_newer(files)
    change(files.config)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(files.config)


@pytest.mark.parametrize("name, message", [
    ("none", "not found; expected a checkpoint directory, or nano, the embedded model"),
    ("file", "is a file; expected a checkpoint directory"), ("file/below", "not found; expected a checkpoint directory"),
    ("empty", "holds no config.json; expected a checkpoint directory"),
])  # fmt: skip
def test_no_checkpoint(tmp_path, name, message):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"/{name}: {message}"):
        ModelConfig.load(tmp_path / name)


@pytest.mark.parametrize("content, message", [("{", "not JSON"), ("[]", "JSON object")])
def test_unreadable_file(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        ModelConfig.load(tmp_path)


def test_draft_stage_entries_of_compress_ratios(raw):
    cut = raw | {"compress_ratios": raw["compress_ratios"][:8]}
    assert ModelConfig.from_dict(cut) == ModelConfig.from_dict(raw)


# ---------------------------------------------------------------------- rotation
def test_correction_dims_of_the_real_config(real):
    assert correction_dims(real) == (15, 25)


@pytest.mark.parametrize("name, base, yarn", [
    ("plain", 10000, Yarn(16, 65536, 32, 1)), ("yarn_real", 160000, Yarn(16, 65536, 32, 1)),
    ("yarn_tiny", 160000, Yarn(16, 64, 32, 1)), ("yarn_d", 40000, Yarn(8, 128, 32, 1)),
])  # fmt: skip
def test_rope_thetas_against_goldens(real, golden_dir, name, base, yarn):
    config = dataclasses.replace(real, rope_theta=float(base), compress_rope_theta=float(base), yarn=yarn)
    theta = rope_thetas(config)[0 if name == "plain" else 1]
    assert theta.dtype == np.float32
    with safe_open(golden_dir / "ops.safetensors", "numpy") as golden:
        angles = golden.get_tensor("rope.pos").astype(np.float32)[:, None] * theta
        for function in (np.cos, np.sin):
            expected = golden.get_tensor(f"rope.{name}.{function.__name__}")
            # the angle reaches 100,000: one ulp of theta would show as 6e-3
            assert np.abs(function(angles.astype(np.float64)) - expected).max() < 1e-7


def test_thetas_of_the_two_kinds_of_layer_differ(real):
    plain, compressed = rope_thetas(real)
    assert plain[0] == compressed[0] == 1 and (plain[1:] > compressed[1:]).all()


# ---------------------------------------------------------------------- run settings
@pytest.fixture
def clean(monkeypatch):
    import os

    for name in [n for n in os.environ if n.startswith("DSV4_")] + ["OMP_NUM_THREADS"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_defaults_environment_overrides(clean):
    run = RunConfig.from_env()
    assert (run.backend, run.max_context, run.max_sessions, run.chunk, run.debug) == ("cpu", None, 8, 512, False)
    for name, value in {"BACKEND": "reference", "THREADS": "3", "MAX_CONTEXT": "99", "MAX_SESSIONS": "2", "CHUNK": "7",
                        "DEBUG": "1"}.items():  # fmt: skip
        clean.setenv(f"DSV4_{name}", value)
    assert RunConfig.from_env() == RunConfig("reference", 3, 99, 2, 7, True)
    assert RunConfig.from_env(threads=5, chunk=None) == RunConfig("reference", 5, 99, 2, 7, True)


def test_threads(clean):
    import os

    assert RunConfig().threads == len(os.sched_getaffinity(0))
    clean.setenv("OMP_NUM_THREADS", "6,2")
    assert RunConfig().threads == 6
    clean.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS.*'many'"):
        RunConfig.from_env()
    assert RunConfig.from_env(threads=2).threads == 2


@pytest.mark.parametrize("name, value", [
    ("DSV4_THREADS", "two"), ("DSV4_MAX_CONTEXT", "0"), ("DSV4_CHUNK", "-1"), ("DSV4_MAX_SESSIONS", ""),
    ("DSV4_DEBUG", "yes"), ("DSV4_TREADS", "1"),
])  # fmt: skip
def test_environment_errors_name_the_variable(clean, name, value):
    clean.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        RunConfig.from_env()


def test_every_variable_is_known_and_an_unknown_one_is_refused_with_their_names(clean):
    for name in VARIABLES:
        clean.setenv(name, "cpu" if name == "DSV4_BACKEND" else "1")
    RunConfig.from_env()
    clean.setenv("DSV4_MODEL", "nano")
    with pytest.raises(ConfigError) as error:
        RunConfig.from_env()
    assert all(name in str(error.value) for name in ("DSV4_MODEL", *VARIABLES))


@pytest.mark.parametrize("name, meant", [
    ("DSV4_TREADS", "DSV4_THREADS"), ("DSV4_CONTEXT", "DSV4_MAX_CONTEXT"), ("DSV4_API_KEYS", "DSV4_API_KEY"),
])  # fmt: skip
def test_a_misspelt_variable_is_told_the_right_one_alone(clean, name, meant):
    clean.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"^{name}: unknown variable; did you mean {meant}\?$"):
        RunConfig.from_env()


@pytest.mark.parametrize("settings", [{"threads": 0}, {"chunk": 1.5}, {"max_context": -1}, {"max_sessions": True}])
def test_wrong_settings(clean, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RunConfig.from_env(**settings)


def test_unknown_setting(clean):
    with pytest.raises(ConfigError, match="unknown argument speed; expected one of backend, .*, threads$"):
        RunConfig.from_env(speed=1, threads=2)


def test_context(clean, real, raw):
    assert RunConfig().context(real) == 32768
    small = ModelConfig.from_dict(raw)
    assert RunConfig().context(small) == 1024
    assert RunConfig(max_context=1024).context(small) == 1024
    with pytest.raises(ConfigError, match="max_context.*1024.*1025"):
        RunConfig(max_context=1025).context(small)


def test_config_is_plain_json(real):
    text = json.dumps(dataclasses.asdict(real))
    assert re.search('"n_routed_experts": 160', text)
