"""Snapshots, forks, slots and pages: whatever happened to a sequence's state in between, it goes on bit for bit."""

import os

import numpy as np
import pytest
from compare import same_bits, same_state, state_of
from safetensors.numpy import load_file, save_file

from dsv4 import Snapshot
from dsv4.errors import CapacityError, InputError, StateError
from dsv4.rows import Rows, Span

N = 90


@pytest.fixture(scope="module", params=["tiny-m", "nano"])
def small(request, engine):
    return engine(request.param, threads=2, chunk=64, max_sessions=3, max_context=300)


@pytest.fixture(scope="module")
def tokens(small):
    return np.random.default_rng(1).integers(0, small.config.vocab_size, N).astype(np.int32)


@pytest.fixture(scope="module")
def cold(small, tokens):
    """logits [N, V] of an undisturbed run, and its last state."""
    with small.session() as session:
        logits = np.concatenate([session.forward(part, "all").logits for part in np.split(tokens, [50])])
        return logits, state_of(session)


def disturb(engine):
    """Another sequence runs over the freed slot's rings and pages."""
    with engine.session() as other:
        other.prefill([7] * 200)


# ---------------------------------------------------------------------- snapshots
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "file"])
def test_restore_at_every_split_point(small, tokens, cold, on_disk, tmp_path):
    """Prefill, save, serve another sequence, restore, go on: equal to the cold run."""
    logits, last = cold
    for split in [*range(1, 40), 63, 64, 65, 67, 68, 72, 80, N - 1]:
        with small.session() as session:
            session.prefill(tokens[:split])
            snapshot = session.snapshot()
        if on_disk:
            snapshot.save(tmp_path / "s")
            snapshot = Snapshot.load(tmp_path / "s")
        disturb(small)
        with small.session() as session:
            session.restore(snapshot)
            assert session.tokens == tokens[:split].tolist()
            for start in range(split, N, 64):
                part = session.forward(tokens[start : start + 64], "all").logits
                same_bits(part, logits[start : start + 64], f"restored at {split}")
            same_state(state_of(session), last, f"restored at {split}")


def test_empty_snapshot(small, tokens, cold):
    with small.session() as session:
        empty = session.snapshot()
        session.prefill(tokens[:20])
        session.restore(empty)
        assert session.position == 0
        same_bits(session.forward(tokens[:30], "all").logits, cold[0][:30])


def test_restore_fits_engines_of_other_chunk_and_context(small, tokens, cold, engine):
    other = engine("nano" if small.config.vocab_size == 640 else "tiny-m", threads=1, chunk=7, max_sessions=1, max_context=128)
    with small.session() as session:
        session.prefill(tokens[:60])
        snapshot = session.snapshot()
    with other.session() as session:
        session.restore(snapshot)
        same_bits(session.forward(tokens[60:67], "all").logits, cold[0][60:67], "restored into another pool")


def test_rewind_after_restore_is_bounded(small, tokens):
    with small.session() as session:
        session.prefill(tokens[:60])
        snapshot = session.snapshot()
        session.restore(snapshot)
        with pytest.raises(StateError, match="at least 60, found 59"):
            session.rewind(59)
        session.decode(1)
        session.rewind(60)


def test_foreign_and_damaged_files_are_refused(small, tokens, engine, tmp_path):
    path = tmp_path / "s"
    with small.session() as session:
        session.prefill(tokens[:40])
        session.snapshot().save(path)
    data = path.read_bytes()

    foreign = engine("tiny-a", threads=2, chunk=130, max_sessions=4, max_context=512)
    with foreign.session() as session, pytest.raises(StateError, match="expected one of checkpoint"):
        session.restore(Snapshot.load(path))

    for cut in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(StateError, match="damaged|readable"):
            Snapshot.load(path)
    for at in (len(data) - 1, len(data) * 2 // 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StateError, match="damaged content"):
            Snapshot.load(path)
    path.write_bytes(data.replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(StateError, match="expected format version 1, found '2'"):
        Snapshot.load(path)
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(StateError, match="expected a file of format dsv4-snapshot, found None"):
        Snapshot.load(path)
    with pytest.raises(StateError, match="expected a readable file"):
        Snapshot.load(tmp_path / "absent")


def test_every_array_of_a_snapshot_matters(small, tokens, tmp_path):
    """A snapshot that lost a part would be noticed: without it the continuation differs, or it is still covered."""
    with small.session() as session:
        session.prefill(tokens[:70])
        session.snapshot().save(tmp_path / "s")
        names = set(load_file(tmp_path / "s"))
        assert names == {"tokens", *state_of(session)}
        snapshot = session.snapshot()
        expected = session.draft(7).logits, session.forward(tokens[70:], "all").logits
        for name, array in snapshot.arrays.items():
            broken = dict(snapshot.arrays)
            broken[name] = np.roll(array, 1, axis=0)  # the right values at the wrong positions
            if np.array_equal(broken[name], array):
                continue
            session.restore(Snapshot(snapshot.identity, snapshot.tokens, broken))
            found = session.draft(7).logits, session.forward(tokens[70:], "all").logits
            assert not all(map(np.array_equal, found, expected)), name


def test_a_snapshot_that_does_not_fit_changes_nothing(small, tokens):
    with small.session() as session:
        session.prefill(tokens[:70])
        snapshot = session.snapshot()
        before = state_of(session)
        last = list(snapshot.arrays)[-1]
        cases = [
            ({n: a for n, a in snapshot.arrays.items() if n != last}, snapshot.tokens, f"{last}: expected .* found none"),
            ({**snapshot.arrays, last: snapshot.arrays[last][1:]}, snapshot.tokens, f"{last}: expected .* found uint"),
            (snapshot.arrays, snapshot.tokens[:9], "expected .* for 9 positions"),
            (snapshot.arrays, snapshot.tokens + 10_000, "expected ids within"),
        ]
        for arrays, ids, message in cases:
            with pytest.raises((StateError, InputError), match=message):
                session.restore(Snapshot(snapshot.identity, ids, arrays))
            same_state(state_of(session), before)


def test_closed_sessions_are_refused(small, tokens):
    session = small.session()
    session.prefill(tokens[:5])
    snapshot = session.snapshot()
    session.close()
    for call in (session.fork, session.snapshot, session.prime, lambda: session.restore(snapshot), lambda: session.rewind(1),
                 lambda: session.draft(1), lambda: session.decode(1), lambda: session.speculative_step(1)):  # fmt: skip
        with pytest.raises(StateError, match="expected an open session"):
            call()
    for other in [small.session() for _ in range(3)]:
        other.close()  # none of the refused calls kept a slot


def test_rows_that_cannot_be_are_refused(small):
    with small.session() as session:
        session.prefill([1] * 10)
        slot, vocab = session.slot, small.config.vocab_size
        free = next(s for s in range(3) if s != slot)
        for rows, message in [
            (Rows.of(slot, 10, [vocab]), "token ids"),
            (Rows.of(slot, 10, [-1]), "token ids"),
            (Rows.of(free, 0, [1]), "slot in use"),
            (Rows.of(-1, 0, [1]), "slot in use"),
            (Rows.of(9, 0, [1]), "slot in use"),
            (Rows.of(slot, -5, [1]), "pages reserved"),
            (Rows.of(slot, 290, [1] * 20), "pages reserved|positions"),
            (Rows.of(slot, 10, [1] * 65), "1 to 64 positions"),
            (Rows.of(slot, 10, []), "at least one"),
        ]:
            with pytest.raises(InputError, match=message):
                small.forward(rows)
        with small.session() as second:
            second.prefill([1] * 20)
            small.pool.reserve(slot, 20), small.pool.reserve(second.slot, 30)
            for spans, message in [
                ([Span(slot, 10, 12), Span(second.slot, 20, 22)], "a token for each of 4 positions, found 5"),
                ([Span(slot, 10, 14), Span(second.slot, 20, 22)], "a token for each of 6 positions, found 5"),
                ([Span(slot, 10, 15), Span(second.slot, 20, 20)], "1 to 64 positions in slot"),
                ([Span(slot, 10, 12), Span(slot, 12, 15)], "each slot once"),
            ]:
                with pytest.raises(InputError, match=message):
                    small.forward(Rows(np.ones(5, np.int32), spans, range(5)))
        with pytest.raises(InputError, match="token id within"):
            session.draft(1, lambda logits, position: vocab)
        session.decode(1)


def test_a_full_disk_keeps_the_old_file(small, tokens, tmp_path, monkeypatch):
    path = tmp_path / "s"
    with small.session() as session:
        session.prefill(tokens[:10])
        session.snapshot().save(path)
        before = path.read_bytes()
        session.prefill(tokens[10:20])

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="No space left on device"):
            session.snapshot().save(path)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["s"]
    with pytest.raises(StateError, match="No such file or directory"):
        Snapshot.load(path).save(tmp_path / "no" / "such" / "place")


# ---------------------------------------------------------------------- forks
def test_forks_go_their_own_ways(small, tokens, cold):
    logits, last = cold
    for split in (1, 5, 17, 64, 70):
        with small.session() as session:
            session.prefill(tokens[:split])
            with session.fork() as other:
                other.prefill([3] * 25)
                rest = np.concatenate(
                    [session.forward(p, "all").logits for p in np.array_split(tokens[split:], 2) if len(p)]
                )
                same_bits(rest, logits[split:], f"original, forked at {split}")
                other.rewind(split)
                rest = np.concatenate(
                    [other.forward(p, "all").logits for p in np.array_split(tokens[split:], 2) if len(p)]
                )
                same_bits(rest, logits[split:], f"fork of {split}")
                same_state(state_of(other), last)
                same_state(state_of(session), last)


# ---------------------------------------------------------------------- slots, pages, limits
def test_slots_are_counted_and_given_back(small):
    sessions = [small.session() for _ in range(3)]
    with pytest.raises(CapacityError, match="at most 3 open at once"):
        small.session()
    with pytest.raises(CapacityError, match="at most 3 open at once"):
        sessions[0].fork()
    sessions[1].close()
    sessions[1].close()
    again = small.session()
    for session in (*sessions, again):
        session.close()
    with pytest.raises(StateError, match="expected an open session"):
        sessions[0].forward([1])


def test_a_used_slot_leaves_no_trace(small, tokens, cold):
    """Sequences come and go; pages return in another order; the next sequence is as the first ever."""
    for n in (300, 10, 130):
        sessions = [small.session() for _ in range(3)]
        for i, session in enumerate(sessions):
            session.prefill([i + 1] * (n - i))
        for i in (1, 0, 2):
            sessions[i].close()
    with small.session() as session:
        found = np.concatenate([session.forward(part, "all").logits for part in np.split(tokens, [50])])
        same_bits(found, cold[0], "after others")
        same_state(state_of(session), cold[1])


def test_context_limit_exactly(small):
    with small.session() as session:
        session.prefill([1] * 299)
        session.decode(2)
        assert session.position == 300
        with pytest.raises(CapacityError, match="expected at most 300 positions, found 300 used and 1 more"):
            session.decode(2)
        session.rewind(299)
        with pytest.raises(CapacityError, match="found 299 used and 2 more"):
            session.forward([1, 2])
        session.decode(2)
    with small.session() as session, pytest.raises(CapacityError, match="expected at most 300 tokens"):
        session.prefill([1] * 301)


def test_bad_tokens_change_nothing(small, tokens, cold):
    with small.session() as session:
        session.prefill(tokens[:10])
        before = state_of(session)
        vocab = small.config.vocab_size
        for bad, message in [
            ([vocab], rf"ids within 0\.\.{vocab - 1}, found {vocab}"),
            ([1, -1], "found -1"),
            ([], "found 0"),
            ([1.5], "flat list of token ids"),
            ([[1, 2]], "flat list of token ids"),
            ([1] * 65, r"1\.\.64 tokens at once, found 65"),
        ]:
            with pytest.raises(InputError, match=message):
                session.forward(bad)
        with pytest.raises(InputError, match="at least one token"):
            session.prefill([])
        with pytest.raises(InputError, match="expected ascending row numbers"):
            session.forward([1, 2], [1, 0])
        for wrong in (1, None, [0.5], np.array([0.0])):
            with pytest.raises(InputError, match="expected last, all, none or row numbers; found"):
                session.forward([1, 2], wrong)
        with pytest.raises(InputError, match="expected last, all, none"):
            session.forward([1, 2], "first")
        same_state(state_of(session), before)
        same_bits(session.forward(tokens[10:20], "all").logits, cold[0][10:20], "after errors")


def test_an_interrupted_forward_changes_nothing(small, tokens, cold, monkeypatch):
    """Ctrl-C between two layers: the length did not move, so the same rows run again as if for the first time."""
    with small.session() as session:
        session.prefill(tokens[:20])
        calls = []
        moe = type(small.model).moe

        def interrupted(self, *args):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return moe(self, *args)

        monkeypatch.setattr(type(small.model), "moe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.forward(tokens[20:40])
        monkeypatch.undo()
        assert session.position == 20
        same_bits(session.forward(tokens[20:50], "all").logits, cold[0][20:50], "after an interruption")
