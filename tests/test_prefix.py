"""Prefix reuse: a request that goes on from a kept state gives what it gives from nothing, drafts included."""

import dataclasses
import warnings

import numpy as np
import pytest
from compare import same_bits, same_state, state_of

from dsv4 import SamplingParams
from dsv4.errors import StateError
from dsv4.prefix import PrefixStore
from dsv4.scheduler import Request, Scheduler
from dsv4.snapshot import Snapshot

SETTINGS = {"threads": 2, "chunk": 24, "max_sessions": 6, "max_context": 512}
WAIT = 60
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def nano(engine):
    return engine("nano", **SETTINGS)


@pytest.fixture(scope="module")
def text(prompts):
    return [prompts[kind][0] for kind in ("prose", "code", "math", "repeat")]


def ask(scheduler, tokens, params=GREEDY):
    """(what the request gives, rounds included; tokens it had not to run)."""
    steps = list(scheduler.submit(Request(tokens, params, "always")))
    return [(s.token, s.text, s.logprob, s.top_logprobs, s.round, s.finish_reason) for s in steps], steps[-1].usage["cached_tokens"]


def cold(nano, tokens, params=GREEDY):
    with Scheduler(nano) as scheduler:
        found, cached = ask(scheduler, tokens, params)
    assert cached == 0
    return found


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_follows_a_kept_state_is_what_follows_a_cold_run(nano, text, params):
    """Same prompt; the next turn; a prompt that parts from others inside. Far past the window, and at odd lengths."""
    system = (text[0] + text[1]) * 3
    first, second, third = (system[:200] + text[i][1:n] for i, n in ((2, 21), (3, 17), (1, 30)))
    found = cold(nano, first, params)
    turn = [*first, *(step[0] for step in found), *text[3][:9]]
    said = len(first) + len(found) - 1  # the last token chosen was not consumed
    asked = [  # in this order; how much of each need not run
        (first, 0), (first, len(first)), (turn, said), (second, 0),  # nobody knew that they would part there
        (third, 200), (first[:150], 0),
    ]  # fmt: skip
    expected = [(cold(nano, tokens, params), cached) for tokens, cached in asked]
    with Scheduler(nano, prefix_bytes=64 << 20) as scheduler:
        assert [ask(scheduler, tokens, params) for tokens, _ in asked] == expected
        stats = scheduler.stats()
    assert (stats["prefix_hits"], stats["prefix_misses"]) == (3, 3)
    assert stats["prefix_tokens"] == len(first) + said + 200


def test_what_a_stop_cut_off_is_no_part_of_a_state(nano, text):
    """An answer that ends inside a block: the next turn goes on right after it."""
    prompt = text[1]
    tokens = [step[0] for step in cold(nano, prompt)]
    ends = [at for at in range(2, 12) if tokens[at] not in tokens[:at]][:4]
    assert len(ends) == 4
    for at in ends:
        with Scheduler(nano, prefix_bytes=64 << 20) as scheduler:
            found, _ = ask(scheduler, prompt, dataclasses.replace(GREEDY, stop_ids=(tokens[at],)))
            assert [step[0] for step in found] == tokens[: at + 1]
            assert ask(scheduler, [*prompt, *tokens[: at + 1], 9])[1] == len(prompt) + at


def test_a_restored_session_is_the_same_to_the_last_bit(nano, text):
    store = PrefixStore(nano, 64 << 20)
    tokens = (text[0] * 9)[:230]
    with nano.session() as session, nano.session() as other:
        logits = session.prefill(tokens)
        store.keep(session)
        assert store.restore(other, [*tokens, 5]) == store.restore(other, tokens) == 230
        same_bits(other.logits, logits)
        assert other.tokens == tokens
        same_state(state_of(other), state_of(session))
        one, two = session.draft(), other.draft()
        for a, b in zip(one, two):
            same_bits(a, b)
        other.logits[:] = 0  # the kept ones are not touched by what is done with these
        assert store.restore(other, tokens[:229]) == 0 and store.restore(other, [*tokens[:229], 639]) == 0
        other.rewind(0)
        store.restore(other, tokens)
        same_bits(other.logits, logits)


def test_a_state_without_logits_serves_longer_prompts_alone(nano, text):
    store = PrefixStore(nano, 64 << 20)
    with nano.session() as session:
        session.forward(text[0][:20], "none")
        store.keep(session)
        session.rewind(0)
        assert store.restore(session, text[0][:20]) == 0
        assert store.restore(session, text[0][:21]) == 20 and session.logits is None


def test_short_prefixes_are_not_kept(nano, text):
    store = PrefixStore(nano, 64 << 20)
    with nano.session() as session:
        session.prefill(text[0][:15])
        store.keep(session)
    assert len(store) == store.bytes == 0
    assert store.shared(text[0]) == 0 and store.shared(text[0]) == len(text[0]) - 1
    assert store.shared(text[0][:15] + [600] * 20) == 0 and store.shared(text[0][:16] + [600] * 20) == 16


def fill(nano, store, prompts):
    for tokens in prompts:
        with nano.session() as session:
            session.prefill(tokens)
            store.keep(session)


def kept(nano, store, prompts) -> list[bool]:
    found = []
    for tokens in prompts:
        with nano.session() as session:
            found.append(store.restore(session, tokens) == len(tokens))
    return found


def test_the_budget_is_kept_and_the_longest_unused_goes(nano, text):
    prompts = [[n, *text[0][:29]] for n in range(3, 9)]
    store = PrefixStore(nano, 1 << 30)
    fill(nano, store, prompts[:1])
    one = store.bytes
    store = PrefixStore(nano, 3 * one + 10)
    fill(nano, store, prompts[:3])
    assert len(store) == 3 and store.bytes == 3 * one
    assert kept(nano, store, prompts[:1]) == [True]  # used again: the second is the longest unused now
    fill(nano, store, prompts[3:4])
    assert len(store) == 3 and store.bytes == 3 * one
    assert kept(nano, store, prompts[:4]) == [True, False, True, True]
    fill(nano, store, prompts[:1])  # known: used, not kept twice
    fill(nano, store, prompts[4:6])
    assert kept(nano, store, prompts) == [True, False, False, False, True, True]
    held = next(iter(store._entries.values())).snapshot
    assert one == held.tokens.nbytes + sum(array.nbytes for array in held.arrays.values())
    small = PrefixStore(nano, one - 1)
    fill(nano, small, prompts)
    assert len(small) == small.bytes == 0


def test_files_outlive_the_process(nano, text, tmp_path):
    directory = tmp_path / "a" / "states"
    tokens = (text[0] * 9)[:180]
    with Scheduler(nano, prefix_bytes=64 << 20, prefix_dir=directory) as scheduler:
        found, _ = ask(scheduler, tokens)
    files = sorted(directory.iterdir())
    assert len(files) == 2 and all(path.suffix == ".prefix" for path in files)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turn = [*tokens, *(step[0] for step in found), 7]
        expected = cold(nano, turn)
        with Scheduler(nano, prefix_bytes=64 << 20, prefix_dir=directory) as scheduler:
            assert scheduler.stats()["prefix_entries"] == 2
            assert ask(scheduler, tokens) == (found, 180)
            assert ask(scheduler, turn) == (expected, 199)


def test_what_goes_from_memory_goes_from_disk(nano, text, tmp_path):
    prompts = [[n, *text[0][:29]] for n in range(3, 9)]
    fill(nano, probe := PrefixStore(nano, 1 << 30), prompts[:1])
    store = PrefixStore(nano, 2 * probe.bytes, tmp_path)
    fill(nano, store, prompts)
    store.close()
    assert len(list(tmp_path.iterdir())) == len(store) == 2
    smaller = PrefixStore(nano, max(path.stat().st_size for path in tmp_path.iterdir()), tmp_path)
    smaller.close()
    assert len(list(tmp_path.iterdir())) == len(smaller) == 1
    assert kept(nano, smaller, prompts[-1:]) == [True]


def test_damaged_files_are_removed_with_one_warning(nano, text, tmp_path):
    prompts = [[n, *text[0][:29]] for n in range(3, 8)]
    store = PrefixStore(nano, 64 << 20, tmp_path)
    fill(nano, store, prompts)
    store.close()
    paths = [store._entries[key].path for key in store._entries]
    data = paths[0].read_bytes()
    paths[0].write_bytes(data[: len(data) // 2])  # found at once
    paths[1].write_bytes(b"")
    paths[2].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])  # of other tokens: not what its name says
    spoilt = bytearray(paths[3].read_bytes())
    spoilt[-40] ^= 1  # found when it is read
    paths[3].write_bytes(spoilt)
    foreign = tmp_path / ("0" * 32 + ".prefix")
    (tmp_path / "mine.prefix").write_bytes(b"a file of somebody else")
    snapshot = Snapshot.load(paths[4])
    Snapshot("another", snapshot.tokens, snapshot.arrays).save(foreign)
    with pytest.warns(RuntimeWarning, match="damaged file was removed") as caught:
        again = PrefixStore(nano, 64 << 20, tmp_path)
        assert len(again) == 2
        assert kept(nano, again, prompts) == [False, False, False, False, True]
        assert len(again) == 1
    assert len(caught) == 1
    assert not paths[0].exists() and not paths[1].exists() and not paths[3].exists()
    assert foreign.exists() and paths[4].exists() and (tmp_path / "mine.prefix").exists()
    again.close()


def test_whole_files_of_another_layout_are_removed(nano, text, tmp_path):
    tokens = (text[0] * 9)[:60]
    with Scheduler(nano, prefix_bytes=64 << 20, prefix_dir=tmp_path) as scheduler:
        expected, _ = ask(scheduler, tokens)
    for path in tmp_path.iterdir():
        found = Snapshot.load(path)
        Snapshot(found.identity, found.tokens, {**found.arrays, "layer.0.window.codes": np.zeros(3, np.uint8)}).save(path)
    with pytest.warns(RuntimeWarning, match="damaged file was removed"):
        with Scheduler(nano, prefix_bytes=64 << 20, prefix_dir=tmp_path) as scheduler:
            assert ask(scheduler, tokens) == (expected, 0)
            assert ask(scheduler, tokens) == (expected, 60)


def test_what_is_no_file_is_passed_over(nano, text, tmp_path):
    (tmp_path / "a.prefix").mkdir()
    (tmp_path / "b.prefix").symlink_to(tmp_path / "gone")
    store = PrefixStore(nano, 64 << 20, tmp_path)
    fill(nano, store, text[:1])
    store.close()
    again = PrefixStore(nano, 64 << 20, tmp_path)
    again.close()
    assert len(again) == 1 and (tmp_path / "a.prefix").is_dir()


def test_places_that_cannot_be_written(nano, text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="prefix_dir .*expected a directory"):
        PrefixStore(nano, 1 << 20, tmp_path / "file" / "below")
    store = PrefixStore(nano, 64 << 20, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.warns(RuntimeWarning, match="kept in memory alone") as caught:
        fill(nano, store, [text[0], text[1]])
        store.close()
    assert len(caught) == 1 and kept(nano, store, text[:2]) == [True, True]
