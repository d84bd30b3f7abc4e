"""Rank invariance: 1, 2, 4 and 8 ranks give the same bits. Ranks are threads here; test_mpi.py starts processes."""

import numpy as np
import pytest
from compare import same_bits, same_state, state_of
from rank_threads import crew_of, same_trace, trace

from dsv4 import Engine, Snapshot
from dsv4.errors import CapacityError, InputError, StateError

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


def test_a_snapshot_moves_between_numbers_of_ranks(checkpoint_dir, engine, tmp_path):
    """Saved at 4 ranks and restored at 1, saved at 1 and restored at 4: state, drafts and what follows, as bits."""
    path, tokens = checkpoint_dir("tiny-tp"), list(range(90))
    one = engine("tiny-tp", **SETTINGS)
    with one.session() as whole, crew_of(path, 4, **SETTINGS) as four:
        whole.prefill(tokens)
        whole.snapshot().save(tmp_path / "one")
        with four.session() as session:
            session.prefill(tokens)
            session.snapshot().save(tmp_path / "four")
        assert Snapshot.load(tmp_path / "one").checksum() == Snapshot.load(tmp_path / "four").checksum()
        for target, file in ((one, "four"), (four, "one")):
            with target.session() as session:
                session.prefill(tokens[::-1])  # something else where the state will lie
                session.restore(Snapshot.load(tmp_path / file))
                same_state(state_of(session), state_of(whole))
                same_bits(session.draft(3).logits, whole.draft(3).logits, "draft")
                same_bits(session.forward(tokens[:7], "all").logits, whole.forward(tokens[:7], "all").logits, "next")
            whole.rewind(90)


def test_sessions_come_and_go(checkpoint_dir, engine):
    """Slots and pages are taken, copied and given back on all ranks in the same order; a refusal changes nothing."""
    one, tokens = engine("tiny-tp", **SETTINGS), np.random.default_rng(1).integers(0, 512, 200)
    expected = [one.session() for _ in range(4)]
    for i, session in enumerate(expected):
        session.forward(tokens[i : i + 100])
    with crew_of(checkpoint_dir("tiny-tp"), 2, **SETTINGS) as two:
        for _ in range(3):
            sessions = [two.session() for _ in range(4)]
            with pytest.raises(CapacityError):
                two.session()
            for i, session in enumerate(sessions):
                session.forward(tokens[i : i + 100])
            sessions[1].close()
            with pytest.raises(InputError):
                sessions[0].forward([-1])
            fork = sessions[2].fork()
            for session, other in ((fork, expected[2]), (sessions[3], expected[3]), (sessions[0], expected[0])):
                same_bits(session.decode(7), other.decode(7), "after comings and goings")
                other.rewind(100)
            for session in (*sessions, fork):
                session.close()
    for session in expected:
        session.close()


def test_a_closed_engine_refuses(checkpoint_dir):
    """The others are gone: a wait for them would have no end. The same on one rank."""
    for size in (1, 2):
        with crew_of(checkpoint_dir("tiny-tp"), size, **SETTINGS) as engine:
            session = engine.session()
            session.prefill([1, 2, 3])
        for use in (lambda: session.decode(4), lambda: session.draft(4), engine.traffic):
            with pytest.raises(StateError, match="engine: expected an open one, found a closed one"):
                use()
        session.close()
        engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_a_forward_reaches_everyone(checkpoint_dir, monkeypatch, rank):
    """The rank's own exception on that rank; on the others the news that the job is over, not a wait without end."""
    from dsv4.comm import RankError
    from dsv4.model import Model

    forward = Model.forward

    def broken(self, step, pool):
        if self.comm.rank == rank:
            raise FloatingPointError("broken")
        return forward(self, step, pool)

    monkeypatch.setattr(Model, "forward", broken)
    with pytest.raises((FloatingPointError, RankError, AssertionError), match="broken"):
        with crew_of(checkpoint_dir("tiny-tp"), 2, **SETTINGS) as two, two.session() as session:
            session.forward([1, 2, 3])
