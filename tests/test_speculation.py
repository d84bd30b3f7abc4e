"""Speculation never changes a token: every way of drafting and verifying gives plain decoding's tokens, logits and state."""

import numpy as np
import pytest
from compare import same_bits, same_state, state_of
from variants import Files, drop_draft

from dsv4 import Engine, dspark
from dsv4.dspark import Ask
from dsv4.errors import CapacityError, ConfigError, Dsv4Error, InputError, StateError
from dsv4.gate import GateSettings, make_rule
from dsv4.model import Model
from dsv4.rows import Span
from dsv4.session import draft_all
from dsv4.speculate import Speculator, greedy, margin

KINDS = ("repeat", "code", "math", "prose")
SETTINGS = {"threads": 2, "chunk": 130, "max_sessions": 3, "max_context": 512}
RANDOM = {"tiny-m": [1, 2, 3, 5, 15, 16, 17, 33, 66, 130], "tiny-a": [4, 31, 32, 33, 70]}  # prompt lengths


def open_rule(name):
    return make_rule(name, 5)


def run(engine, prompt, speculator, n):
    """n tokens after a prompt → tokens, the logits [n, V] they were chosen from, the state they leave."""
    with engine.session() as session:
        logits = session.prefill(prompt)
        tokens, rows = [speculator.choose(logits, session.position)], [logits]
        while len(tokens) < n:
            step = session.speculative_step(tokens[-1], speculator, logits=rows[-1], room=n - len(tokens))
            tokens += step.tokens
            rows += list(step.logits)
        assert len(tokens) == n and session.tokens == [*prompt, *tokens[:-1]]
        return tokens, np.stack(rows), state_of(session)


def same_run(found, expected, what):
    assert found[0] == expected[0], what
    same_bits(found[1], expected[1], f"{what} logits")
    same_state(found[2], expected[2], what)


# ---------------------------------------------------------------------- plain = always-k = gated = sequential = batched
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_speculate_on_text(engine, prompts, kind):
    nano = engine("nano", **SETTINGS)
    for prompt in prompts[kind][:2]:
        plain = run(nano, prompt, Speculator(), 100)
        for rule in ("fixed:1", "fixed:2", "fixed:3", "fixed:4", "fixed:5", "bucket", "calibrated"):
            for mode in ("batched", "sequential"):
                speculator = Speculator(open_rule(rule), mode=mode)
                same_run(run(nano, prompt, speculator, 100), plain, f"{kind} {rule} {mode}")
                assert speculator.counters.rounds and (rule == "calibrated" or speculator.counters.drafted)


@pytest.mark.parametrize("name", RANDOM)
def test_every_way_to_speculate_on_noise(engine, name):
    """Little is accepted here: nearly every round takes rows back, before and past the window and block limits."""
    small = engine(name, **SETTINGS)
    for length in RANDOM[name]:
        prompt = np.random.default_rng(length).integers(0, small.config.vocab_size, length).tolist()
        plain = run(small, prompt, Speculator(), 40)
        for rule in ("fixed:1", "fixed:3", "fixed:5", "calibrated"):
            same_run(run(small, prompt, Speculator(open_rule(rule)), 40), plain, f"{name} {length} {rule}")


def test_long_contexts(engine, prompts):
    """Far past the window, with a prompt cut into chunks, the top-k choosing among many entries."""
    nano = engine("nano", **SETTINGS)
    prompt = (prompts["prose"][0] + prompts["code"][0] + prompts["repeat"][0]) * 3
    prompt = prompt[:400]
    plain = run(nano, prompt, Speculator(), 60)
    for rule in ("fixed:5", "fixed:2", "calibrated"):
        same_run(run(nano, prompt, Speculator(open_rule(rule)), 60), plain, rule)


# ---------------------------------------------------------------------- perfect and wrong drafts, rejected tails
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_perfect_drafts_are_wholly_accepted(engine, prompts, n):
    nano = engine("nano", **SETTINGS)
    for kind in KINDS:
        prompt = prompts[kind][0]
        tokens, logits, state = run(nano, prompt, Speculator(), 91)
        with nano.session() as session:
            session.prefill(prompt)
            at = 0
            while at + n + 1 < 91:
                verified = session.verify(tokens[at : at + n + 1])
                assert verified.accepted == n and verified.tokens == tokens[at + 1 : at + n + 2]
                same_bits(verified.logits, logits[at + 1 : at + n + 2], f"{kind} at {at}")
                at += n + 1
            for token in tokens[at:90]:
                session.decode(token)
            same_state(state_of(session), state, kind)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_wrong_drafts_are_wholly_rejected(engine, prompts, n, mode):
    nano = engine("nano", **SETTINGS)
    prompt = prompts["math"][0]
    tokens, logits, state = run(nano, prompt, Speculator(), 41)
    with nano.session() as session:
        session.prefill(prompt)
        for at in range(40):
            wrong = [(tokens[at + 1] + 1 + i) % 640 for i in range(n)]
            verified = session.verify([tokens[at], *wrong], mode)
            assert verified.accepted == 0 and verified.tokens == [tokens[at + 1]]
            same_bits(verified.logits[0], logits[at + 1])
        same_state(state_of(session), state)


@pytest.mark.parametrize("name", ["nano", "tiny-m"])
def test_a_rejected_tail_leaves_no_trace(engine, name):
    """For each accepted length two blocks that differ in their tails only: the same state, drafts and continuation."""
    small = engine(name, **SETTINGS)
    vocab = small.config.vocab_size
    prompt = np.random.default_rng(3).integers(0, vocab, 150).tolist()
    for start in (1, 3, 14, 15, 16, 17, 30, 31, 32, 61, 62, 63, 64, 65, 66, 79, 80, 125):
        with small.session() as base:
            for i in range(0, start, 100):
                logits = base.forward(prompt[i : min(i + 100, start)]).logits[0]
            token = greedy(logits, 0)
            tokens = [token]
            with base.fork() as plain:
                for _ in range(8):
                    tokens.append(greedy(plain.decode(tokens[-1]), 0))
            for accepted in range(6):
                results = []
                for shift in (1, 2):
                    tail = [(tokens[accepted + 1] + shift + i) % vocab for i in range(6 - accepted)]
                    with base.fork() as session:
                        verified = session.verify([*tokens[: accepted + 1], *tail])
                        assert verified.accepted == accepted and verified.tokens == tokens[1 : accepted + 2]
                        drafted = session.draft(verified.tokens[-1])
                        state = state_of(session)
                        results.append((state, drafted, session.forward(tokens[accepted + 1 :], "all").logits))
                same_state(results[0][0], results[1][0], f"{start}, {accepted} accepted")
                same_bits(results[0][1].logits, results[1][1].logits, f"draft at {start}, {accepted} accepted")
                same_bits(results[0][2], results[1][2], f"{start}, {accepted} accepted")


def test_verify_is_checked(engine, prompts):
    nano = engine("nano", **SETTINGS)
    with nano.session() as session:
        session.prefill(prompts["code"][0])
        before = state_of(session)
        with pytest.raises(InputError, match="expected one of batched, sequential; found 'parallel'"):
            session.verify([1, 2], "parallel")
        with pytest.raises(InputError, match="expected ids within"):
            session.verify([1, 640])
        same_state(state_of(session), before)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_a_verify_that_fails_is_undone(engine, prompts, mode):
    nano = engine("nano", threads=1, chunk=16, max_sessions=1, max_context=64)
    with nano.session() as session:
        session.prefill(prompts["code"][0])
        session.verify([5, 6, 7], mode)
        tokens, before = list(session.tokens), state_of(session)

        def refuse(logits, position):
            raise ValueError("no")

        for call, error in [
            (lambda: session.verify([5, 9, 8], mode, refuse), ValueError),
            (lambda: session.verify([], mode), InputError),
            (lambda: session.verify([1, -1], mode), InputError),
            (lambda: session.verify([1] * (65 - len(tokens)), mode), (InputError, CapacityError)),
        ]:
            with pytest.raises(error):
                call()
            assert session.tokens == tokens
            same_state(state_of(session), before)


def test_greedy_choices_are_those_of_the_forward(engine, prompts, monkeypatch):
    """Equal logits: the lowest id. What is not finite is nobody's choice: greedy is asked, and says what is wrong."""
    nano, head = engine("nano", **SETTINGS), Model.logits

    def spoilt(self, x):
        logits = head(self, x)
        logits[:, [5, 9]] = 99.0
        logits[3, 7], logits[4, 8] = np.nan, -np.inf
        return logits

    with nano.session() as session:
        output = session.forward(prompts["code"][0][:20], "all")
        assert output.best == [greedy(row, 0) for row in output.logits]
        monkeypatch.setattr(Model, "logits", spoilt)
        assert session.forward([1, 2, 3, 4, 5, 6], "all").best == [5, 5, 5, -1, -1, 5]
        session.rewind(20)
        assert session.verify([1, 5, 6, 5, 5, 5]).tokens == [5, 5]
        session.rewind(20)
        assert session.verify([1, 5, 5, 5, 5, 5]).tokens == [5, 5, 5] and session.position == 23
        logits = session.forward([1, 2, 3, 4, 5, 6], "all").logits
        with pytest.raises(Dsv4Error, match="the first nan at token 7"):
            greedy(logits[3], 0)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
def test_a_row_that_fails_comes_after_the_same_tokens_as_in_plain_decoding(engine, prompts, mode):
    nano, prompt = engine("nano", **SETTINGS), prompts["code"][0]
    tokens, _, _ = run(nano, prompt, Speculator(), 7)
    for settled in range(1, 6):

        def refuse(logits, position):
            if position == len(prompt) + 1 + settled:
                raise ValueError("no")
            return greedy(logits, position)

        with nano.session() as session, nano.session() as plain:
            session.prefill(prompt), plain.prefill(prompt)
            assert session.verify(tokens[:6], mode, refuse).tokens == tokens[1 : settled + 1]
            for token in tokens[:settled]:
                plain.decode(token)
            with pytest.raises(ValueError, match="no"):
                session.verify(tokens[settled:], mode, refuse)
            assert session.tokens == plain.tokens
            same_state(state_of(session), state_of(plain), f"{settled} settled")


def test_steps_by_themselves(engine, prompts):
    """draft(), speculative_step() without arguments go on greedily from the last logits."""
    nano = engine("nano", **SETTINGS)
    prompt = prompts["repeat"][0]
    plain = run(nano, prompt, Speculator(), 40)[0]
    with nano.session() as session:
        with pytest.raises(StateError, match="expected the last token's logits"):
            session.speculative_step()
        session.prefill(prompt)
        assert session.draft().ids[0] == plain[1]
        tokens = [plain[0]]
        while len(tokens) < 40:
            tokens += session.speculative_step().tokens
        assert tokens[:40] == plain and session.tokens == [*prompt, *tokens[:-1]]
        with pytest.raises(InputError, match="room: expected at least 1"):
            session.speculative_step(room=0)


@pytest.mark.parametrize("gated", [True, False])
def test_a_step_at_the_end_of_the_context_is_refused(gated):
    with Engine.load("nano", threads=1, max_context=16) as engine, engine.session() as session:
        logits = session.prefill(range(16))
        speculator = None if gated else Speculator()
        with pytest.raises(CapacityError, match="expected at most 16 positions, found 16 used and 1 more"):
            session.speculative_step(speculator=speculator)
        assert session.position == 16
        same_bits(session.logits, logits, "the last row's logits")


# ---------------------------------------------------------------------- the draft and what it depends on
def test_no_pass_of_a_draft_has_more_rows_than_the_headroom(engine, prompts, monkeypatch):
    """Blocks of many sequences, and their priming, in turns: those of an engine with room for all."""
    passes, made = [], dspark.Step.__init__
    monkeypatch.setattr(dspark.Step, "__init__", lambda self, ops, pool, rows: passes.append(len(rows)) or made(self, ops, pool, rows))
    found = []
    for chunk, longest in ((130, 66), (12, 12)):
        nano = engine("nano", **SETTINGS | {"chunk": chunk})
        sessions = [nano.session() for _ in range(3)]
        for n, session in enumerate(sessions):
            session.prefill(prompts["prose"][0][: 21 + n])
        del passes[:]
        found.append(draft_all([(session, 7, greedy) for session in sessions], logits=True))
        assert max(passes) == longest, passes
        for session in sessions:
            session.close()
    for one, other in zip(*found):
        same_bits(one.ids, other.ids)
        same_bits(one.logits, other.logits)
        same_bits(one.confidence, other.confidence)


def test_a_draft_leaves_the_session_as_it_was(engine, prompts):
    nano = engine("nano", **SETTINGS)
    with nano.session() as session:
        session.prefill(prompts["prose"][0])
        before = state_of(session)
        first, second = session.draft(5), session.draft(5)
        same_bits(first.logits, second.logits, "drafted twice")
        same_state(state_of(session), before)
        assert session.tokens == prompts["prose"][0]


def test_drafts_do_not_depend_on_how_the_windows_were_primed(engine, prompts):
    """Prefill in chunks, token by token, after rejected blocks, forked, restored: the same draft."""
    nano = engine("nano", **SETTINGS)
    tokens = (prompts["prose"][0] * 3)[:120]
    with nano.session() as session:
        session.prefill(tokens)
        expected = session.draft(7)
        snapshot = session.snapshot()
        with session.fork() as fork:
            same_bits(fork.draft(7).logits, expected.logits, "forked")
    with nano.session() as session:
        session.restore(snapshot)
        same_bits(session.draft(7).logits, expected.logits, "restored")
    with nano.session() as session:
        for i, token in enumerate(tokens):
            session.decode(token)
            if i % 7 == 3:
                session.draft(9)  # primes on the way
            if i % 11 == 5:
                position = session.position
                session.verify([1, 2, 3, 4])
                session.rewind(position)
        same_bits(session.draft(7).logits, expected.logits, "token by token, with rejected blocks")
        same_bits(session.draft(7).confidence, expected.confidence)


def test_a_draft_depends_on_each_of_its_inputs(engine, prompts):
    nano = engine("nano", **SETTINGS)
    prompt = (prompts["prose"][0] * 2)[:80]
    pool = nano.pool
    with nano.session() as session:
        session.prefill(prompt)
        slot, position = session.slot, session.position
        expected = session.draft(7).logits

        def differs(logits):
            return not np.array_equal(logits, expected)

        assert differs(session.draft(8).logits), "committed token"
        assert differs(nano.draft.draft(pool, [Ask(slot, position - 1, 7, greedy, logits=True)])[0].logits), "position"
        for back in (1, 2, nano.config.sliding_window):  # the seed's hidden, the one before, the window's oldest
            place = pool.window_place(np.int32(slot), np.int32(position - back))
            kept = pool.hidden[place].copy()
            pool.hidden[place] += np.float32(0.5) * np.abs(kept).mean()
            nano.draft.prime(pool, [Span(slot, position - back, position - back + 1)])
            assert differs(session.draft(7).logits), f"main hidden {back} back"
            pool.hidden[place] = kept
            nano.draft.prime(pool, [Span(slot, position - back, position - back + 1)])
        same_bits(session.draft(7).logits, expected, "restored")
        for stage in pool.stages:  # a window that was not primed
            kept = stage.window.codes.copy()
            stage.window.codes[:] = 0
            assert differs(session.draft(7).logits), "stage window"
            stage.window.codes[:] = kept
        outside = pool.window_place(np.int32(slot), np.int32(position - nano.config.sliding_window - 1))
        pool.stages[0].window.codes[outside] ^= 1
        same_bits(session.draft(7).logits, expected, "a key beyond the window")


def test_drafts_guess_well_on_text_the_model_knows(engine, prompts):
    """Absolute acceptance: a block misaligned by one, or an unprimed window, reads as almost none."""
    nano = engine("nano", **SETTINGS)
    rates = {}
    for kind in KINDS:
        counters = []
        for prompt in prompts[kind]:
            speculator = Speculator(open_rule("fixed:5"))
            run(nano, prompt, speculator, 100)
            counters.append(speculator.counters)
        rates[kind] = sum(c.accepted for c in counters) / sum(c.drafted for c in counters)
    expected = {"repeat": 0.91, "code": 1.0, "math": 0.68, "prose": 0.98}  # an independent implementation's
    for kind in KINDS:
        assert abs(rates[kind] - expected[kind]) < 0.08, rates


@pytest.mark.parametrize("on, rule", [(True, "Calibrated"), (False, "Fixed")])
def test_a_session_speculates_as_the_settings_say(engine, on, rule, monkeypatch):
    nano = engine("nano", **SETTINGS)
    monkeypatch.setattr(nano, "gate", GateSettings(on=on))
    assert type(Speculator.default(nano).gate).__name__ == rule


def test_sessions_without_a_draft(engine, tmp_path, checkpoint_dir):
    nano = engine("nano", **SETTINGS)
    with nano.session() as session:
        with pytest.raises(StateError, match="at least one token consumed"):
            session.draft(1)
    files = Files.read(checkpoint_dir("tiny-m"))
    drop_draft(files)
    plain = Engine.load(files.write(tmp_path / "plain"), threads=1, chunk=16, max_sessions=1, max_context=64)
    with plain.session() as session:
        logits = session.prefill([1, 2, 3])
        with pytest.raises(ConfigError, match="without a draft module"):
            session.draft(1)
        assert session.verify([5, 6, 7]).tokens
        assert session.forward([1]).main_hidden is None
        step = session.speculative_step(greedy(logits, 0), Speculator())
        assert step.accepted == 0 and len(step.tokens) == 1


def test_margin_is_the_gap_between_the_two_largest():
    assert margin(np.array([1.0, 5.0, 4.5], np.float32)) == 0.5
    assert margin(np.array([2.0, 2.0, 1.0], np.float32)) == 0.0
