"""Where experts are changes no bit: mapped, packed, staged through caches of every size; ranks, threads, speculation."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compare import same_bits, same_state, state_of
from rank_threads import crew_of, same_trace, trace

from dsv4 import Engine, SamplingParams
from dsv4.bench.machine import own_memory
from dsv4.cli import main
from dsv4.errors import CapacityError, CheckpointError, ConfigError
from dsv4.experts.packed import pack
from dsv4.generate import complete
from dsv4.plan import check_plan
from dsv4.synth import PUBLISHED, Recipe, write

TEXT = list(range(5, 45))


@pytest.fixture(scope="session")
def packed(checkpoint_dir, tmp_path_factory):
    """packed(name, ranks): a packed copy, made once."""
    made, root = {}, tmp_path_factory.mktemp("packed")

    def get(name, ranks=1):
        if (name, ranks) not in made:
            made[name, ranks] = root / f"{name}-{ranks}.bin"
            pack(checkpoint_dir(name), made[name, ranks], ranks, threads=2)
        return str(made[name, ranks])

    return get


@pytest.fixture(scope="session")
def mapped_trace(checkpoint_dir):
    """mapped_trace(name): everything that could change, with the experts where the checkpoint is mapped, one rank."""
    made = {}

    def get(name):
        if name not in made:
            with Engine.load(checkpoint_dir(name), threads=1) as engine:
                made[name] = trace(engine)
        return made[name]

    return get


def expert_bytes(directory, size=1):
    """Of one expert on a rank, and how many a row chooses."""
    with crew_of(directory, size, expert_cache=1 << 40, threads=1) as engine:
        store = engine.model.weights.store
        return store._source.layout.nbytes, engine.config.num_experts_per_tok, store.slots


CASES = [
    ("nano", 1, 1, 1), ("nano", 1, 2, 1.5), ("nano", 1, 2, 4), ("nano", 1, 1, None), ("nano", 2, 1, 2),
    ("tiny-tp", 1, 1, 1), ("tiny-tp", 1, 2, 3), ("tiny-tp", 2, 1, 1), ("tiny-tp", 2, 2, 2), ("tiny-tp", 2, 1, None),
    ("tiny-b", 1, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("source", ["checkpoint", "packed"])
@pytest.mark.parametrize("name, size, threads, rows", CASES, ids=lambda v: str(v))
def test_every_cache_gives_the_bits_of_the_mapped_file(checkpoint_dir, mapped_trace, packed, source, name, size, threads, rows):
    """rows: the cache holds so many rows' experts (1: exactly one row's), None: all there are."""
    directory = checkpoint_dir(name)
    nbytes, k, _ = expert_bytes(directory, size)
    settings = {"expert_cache": 1 << 40 if rows is None else int(rows * k) * nbytes, "threads": threads}
    if source == "packed":
        settings["packed"] = packed(name, size)
    with crew_of(directory, size, **settings) as engine:
        assert engine.plan.expert_cache % nbytes == 0 and engine.plan.staging == 2 * nbytes
        same_trace(trace(engine), mapped_trace(name), f"{name} {settings}")
        counted = engine.experts
        assert counted["misses"] and counted["bytes_staged"] >= counted["misses"] * nbytes
        if rows is None:
            assert counted["bytes_staged"] <= engine.plan.expert_cache and counted["hits"] > counted["misses"]


@pytest.mark.parametrize("name, size", [("nano", 1), ("nano", 2), ("tiny-tp", 1), ("tiny-tp", 2)])
def test_a_packed_copy_gives_the_bits_of_the_mapped_file(checkpoint_dir, mapped_trace, packed, name, size):
    with crew_of(checkpoint_dir(name), size, packed=packed(name, size), threads=1) as engine:
        assert engine.experts is None and engine.plan.expert_cache == engine.plan.staging == 0
        same_trace(trace(engine), mapped_trace(name), name)


def test_the_reference_backend_stages_too(checkpoint_dir):
    directory = checkpoint_dir("tiny-b")
    nbytes, k, _ = expert_bytes(directory)
    logits = [
        Engine.load(directory, backend="reference", expert_cache=cache).session().prefill(TEXT[:12])
        for cache in (None, k * nbytes, 3 * k * nbytes)
    ]
    same_bits(logits[1], logits[0])
    same_bits(logits[2], logits[0])


def test_prompts_longer_than_the_cache_and_speculation(checkpoint_dir, engine):
    """Chunks that need more experts than fit; then rounds of speculation, always the whole block."""
    plain, params = engine("nano"), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    nbytes, k, _ = expert_bytes(checkpoint_dir("nano"))
    prompt = np.random.default_rng(0).integers(0, 600, 700).tolist()
    expected = complete(plain, prompt, params, spec="off").tokens
    with plain.session() as session:
        session.prefill(prompt)
        state = state_of(session)
    for slots in (k, 2 * k + 1, 10):
        staged = Engine.load("nano", expert_cache=slots * nbytes, chunk=300)
        assert complete(staged, prompt, params, spec="always").tokens == expected
        with staged.session() as session:
            session.prefill(prompt)
            same_state(state_of(session), state)


# ---------------------------------------------------------------------- settings, plan, record
@pytest.mark.parametrize("value", [0, -1, 1.5, "2GiB", True])
def test_a_budget_that_is_no_number_of_bytes(value):
    with pytest.raises(ConfigError, match="expert_cache: expected an integer >= 1, found"):
        Engine.load("nano", expert_cache=value)


@pytest.mark.parametrize("text", ["0", "-1GiB", "0.2", "lots", "2GiB!", "1e9", "", "inf", "9" * 400 + "GB"])
def test_a_budget_that_is_no_size(capsys, monkeypatch, text):
    assert main(["generate", "--tokens", "1", f"--expert-cache={text}"]) == 2
    expected = f"expected a size in bytes above 0, such as 2GiB or 500MB; found {text!r}\n"
    assert capsys.readouterr().err == f"dsv4: error: --expert-cache: {expected}"
    monkeypatch.setenv("DSV4_EXPERT_CACHE", text)
    assert main(["generate", "--tokens", "1"]) == 2
    assert capsys.readouterr().err == f"dsv4: error: DSV4_EXPERT_CACHE: {expected}"


def test_a_budget_below_one_rows_experts_says_the_least_that_works(checkpoint_dir, capsys):
    nbytes, k, _ = expert_bytes(checkpoint_dir("nano"))
    least = k * nbytes
    assert main(["generate", "--tokens", "1", f"--expert-cache={least - 1}"]) == 2
    assert capsys.readouterr().err == (
        f"dsv4: error: expert cache: expected at least {least} bytes, the {k} experts of one row at {nbytes} bytes each on "
        f"this rank; found {least - 1}\n"
    )
    assert main(["generate", "--tokens", "1", "--max-tokens", "1", f"--expert-cache={least}"]) == 0


def test_the_plan_counts_the_cache(checkpoint_dir):
    nbytes, _, experts = expert_bytes(checkpoint_dir("nano"))
    plain, plan = Engine.load("nano").plan, Engine.load("nano", expert_cache=20 * nbytes + 5).plan
    assert (plan.expert_cache, plan.staging, plan.state) == (20 * nbytes, 2 * nbytes, plain.state)
    assert plain.needed == plain.state and plan.needed == plan.state + 22 * nbytes
    assert Engine.load("nano", expert_cache=1 << 40).plan.expert_cache == experts * nbytes
    small = replace(plan, available=plan.state + 21 * nbytes)
    with pytest.raises(CapacityError, match=r"for experts beside .* \(set a smaller expert cache\)"):
        check_plan(small, lambda context: small)
    check_plan(replace(plan, available=plan.needed), lambda context: plan)


def test_the_record_counts(capsys, monkeypatch):
    command = ["generate", "--tokens", "1,2,3", "--temperature", "0", "--max-tokens", "9", "--json"]
    assert main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("DSV4_EXPERT_CACHE", "1 MB")
    assert main(command) == 0
    staged = json.loads(capsys.readouterr().out)
    assert staged["tokens"] == plain["tokens"] and "experts" not in plain
    assert set(staged["experts"]) == {"hits", "misses", "prefetched", "bytes_staged", "stall_s"}
    assert staged["experts"]["misses"] > 0 and staged["experts"]["bytes_staged"] > 0


MEMORY = """
import sys, numpy as np, dsv4
from dsv4.bench.machine import OwnPeak
with OwnPeak() as own:
    engine = dsv4.Engine.load(sys.argv[1], max_context=200, max_sessions=1, threads=2, expert_cache=int(sys.argv[2]))
    session = engine.session()
    session.prefill(np.random.default_rng(0).integers(0, 600, 190).tolist())
    session.decode(5)
print(own.bytes, engine.plan.needed, engine.plan.expert_cache, engine.plan.staging)
"""


@pytest.mark.skipif(own_memory() is None, reason="the system does not tell what is mapped")
def test_memory_stays_within_the_plan(tmp_path):
    """Experts of the real size, 9 of them through room for 8."""
    recipe = Recipe.of(replace(PUBLISHED, vocab_size=1024, dspark=None), layers=1, ratios=(4,), experts=9)
    write(tmp_path, recipe)
    nbytes = 3 * 4096 * 2048 * 17 // 32
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(8 * nbytes + 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own, needed, cache, staging = map(int, done.stdout.split())
    assert (cache, staging) == (8 * nbytes, 2 * nbytes)
    assert cache < own < needed + 300e6


# ---------------------------------------------------------------------- files that shrink while they are in use
@pytest.mark.parametrize("cache, copy", [(None, False), (None, True), (300_000, False), (300_000, True)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_shrinks_is_one_clear_line(checkpoint_dir, packed, tmp_path, cache, copy, threads):
    """Mapped or staged: an error and no dead process; when the file is whole again, so is the engine."""
    directory = Path(shutil.copytree(checkpoint_dir("nano"), tmp_path / "nano"))
    settings = {"packed": shutil.copy(packed("nano"), tmp_path / "experts.bin")} if copy else {}
    engine = Engine.load(directory, expert_cache=cache, threads=threads, **settings)
    files = [Path(settings["packed"])] if copy else sorted(directory.glob("*.safetensors"))
    expected = engine.session().prefill(TEXT)
    for path in files:
        whole = path.read_bytes()
        with open(path, "r+b") as file:
            file.truncate(len(whole) // 4)
            for _ in range(2):
                with pytest.raises(CheckpointError, match=f"{path.name}: .*expected .*; found .*cut short while in use") as caught:
                    engine.session().prefill(TEXT)
                assert "\n" not in str(caught.value)
            file.write(whole)
        same_bits(engine.session().prefill(TEXT), expected)
