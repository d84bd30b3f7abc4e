"""Rank invariance: 1, 2, 4 and 8 ranks give the same bits. Ranks are threads here; test_mpi.py starts processes."""

import pytest
from rank_threads import crew_of, same_trace, trace

from dsv4 import Engine

SETTINGS = {"threads": 1, "max_sessions": 4, "max_context": 256, "chunk": 128}
# What a model can be divided over: tiny-tp all of it by 8; nano its attention by 2 and its experts not at all.
COUNTS = [("tiny-tp", 2), ("tiny-tp", 4), ("tiny-tp", 8), ("nano", 2)]


@pytest.fixture(scope="module")
def single(checkpoint_dir):
    """single(name, backend): the trace on one rank."""
    known = {}

    def get(name, backend, length):
        if (name, backend) not in known:
            engine = Engine.load(checkpoint_dir(name), backend=backend, **SETTINGS)
            known[name, backend] = trace(engine, length)
        return known[name, backend]

    return get


@pytest.mark.parametrize("name, size", COUNTS)
@pytest.mark.parametrize("backend, length", [("cpu", 100), ("reference", 40)])
def test_ranks_give_the_same_bits(checkpoint_dir, single, name, size, backend, length):
    with crew_of(checkpoint_dir(name), size, backend=backend, **SETTINGS) as engine:
        same_trace(trace(engine, length), single(name, backend, length), f"{name}, {size} ranks, {backend}")
