"""What an engine holds beyond the mapped weights: the planned state, and a little more while a chunk runs."""

import mmap
import platform
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from dsv4.bench.machine import OwnPeak, own_memory
from dsv4.config import ModelConfig
from dsv4.plan import make_plan
from dsv4.synth import PUBLISHED, Recipe, write
from variants import REAL

BEYOND = 300e6  # bytes, Python itself included
PROMPT = """
import sys, numpy as np, dsv4
from dsv4.bench.machine import OwnPeak
with OwnPeak() as own:
    engine = dsv4.Engine.load(sys.argv[1], max_context=int(sys.argv[2]), max_sessions=int(sys.argv[3]), threads=2)
    for _ in range(int(sys.argv[3])):
        session = engine.session()
        session.prefill(np.random.default_rng(0).integers(0, 600, int(sys.argv[2]) - 8).tolist())
        session.decode(5)
print(own.bytes, engine.plan.state, engine.plan.weights)
"""
STEPS = """
import resource, numpy as np
from dsv4.ops import open_ops
ops, x = open_ops("cpu"), np.ones((48, 1024), np.float32)
def step():
    for _ in range(4):
        arrays = [ops.act_quant(x) for _ in range(6)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HOLES = """
import numpy as np
from dsv4._cpu import lines
from dsv4.bench.machine import own_memory
lines((5 << 20, 1))  # once such a one was freed, glibc takes arrays of 1 MB from its heap
before = own_memory()
held = [(lines((1 << 18, 1)), np.empty(64)) for _ in range(100)]
for large, _ in held:
    large.fill(1)
small = [small for _, small in held]
del held, large
print(own_memory() - before)
"""
SCARCE = """
import resource
from pathlib import Path
from dsv4._cpu import lines, spare_memory
held = [lines((1 << 18, 1)) for _ in range(16)]
held.clear()
assert spare_memory() >= 15 << 20
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 20),) * 2)
print(lines((2 << 20, 1)).nbytes)
"""
linux = pytest.mark.skipif(own_memory() is None, reason="the system does not tell what is mapped")


def measured(model, context: int, sessions: int) -> list[int]:
    """(own peak, planned state, weights) of a process of its own that fills every session."""
    arguments = [sys.executable, "-c", PROMPT, str(model), str(context), str(sessions)]
    return list(map(int, subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()))


@linux
def test_own_memory_counts_what_is_written_and_not_what_is_mapped(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(bytes(64 << 20))
    before = own_memory()
    mapped = np.memmap(file, np.uint8, "r")
    assert int(mapped.sum()) == 0 and own_memory() - before < 16 << 20
    with OwnPeak() as own:
        # From the system: the heap may have room that earlier tests wrote to.
        written = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        written.write(b"1" * (64 << 20))
        deadline = time.monotonic() + 30  # a busy machine lets the watching thread wait
        while own.bytes - before < 60 << 20 and time.monotonic() < deadline:
            time.sleep(0.002)
        written.close()
    assert 60 << 20 < own.bytes - before and own_memory() - before < 16 << 20


@linux
def test_nano_stays_within_its_plan():
    own, state, _ = measured("nano", 8000, 8)
    assert state > 50e6 and own < state + BEYOND


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what the C library does with freed memory is its own business")
def test_arrays_of_a_step_are_made_from_what_the_last_one_freed():
    faults = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True).stdout
    assert int(faults) < 1000, f"{faults} page faults in 100 steps"


@linux
def test_large_arrays_leave_no_holes_among_small_ones():
    grown = int(subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True).stdout)
    assert grown < 18 << 20, f"{grown / 2**20:.1f} MB held, expected 16 MB of spare blocks"


@linux
def test_spare_memory_is_given_up_for_an_array_that_needs_it():
    run = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, check=False)
    assert run.stdout == "8388608\n", run.stderr


@linux
def test_a_layer_of_the_real_size_stays_within_its_plan(tmp_path):
    """Chunks of 512 rows as wide as the real ones; the weights are mapped and not counted."""
    write(tmp_path, Recipe.of(replace(PUBLISHED, vocab_size=4096, dspark=None), layers=1, ratios=(4,), experts=6))
    own, state, weights = measured(tmp_path, 1100, 1)
    assert weights > 250e6 and own < state + BEYOND


def test_a_million_positions_can_be_planned():
    """By hand: a key is 448 codes, 7 scales and 64 bf16; an index key 64 bytes of codes, 4 scales; pages are of 256."""
    config = ModelConfig.load(REAL)
    plan = make_plan(config, weights=0, max_context=1_000_000, max_sessions=1, headroom=512, available=0, stages=3)
    key, index, tokens = 448 + 7 + 2 * 64, 64 + 4, -(-1_000_000 // 256) * 256
    assert plan.entries == 21 * tokens // 4 * key + 20 * tokens // 128 * key
    assert plan.index_keys == 21 * tokens // 4 * index
    assert plan.windows == 43 * (128 + 512) * key
    assert plan.draft == (128 + 512) * (3 * key + 3 * 4096 * 4) + 5 * key  # and the block
    assert plan.compressor_rows == 21 * (8 + 512) * 2 * (512 + 128) * 8 + 20 * (128 + 512) * 512 * 8
    assert 3.5e9 < plan.state < 3.9e9
