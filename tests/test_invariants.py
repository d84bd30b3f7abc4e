"""The promises: run, row, chunk and rewind leave the same bits. Nothing here has a tolerance."""

import numpy as np
import pytest
from compare import decoded_alone, same_bits, same_state, state_of

from dsv4.errors import StateError
from dsv4.rows import Rows
from dsv4.session import forward_all
from dsv4.state import Pool
from dsv4.step import Step

# tiny-m: window 16, index top-k 4 (binds from position 19 on), ratios 4 and 16. tiny-a: window 32, ratios 4 and 16.
# nano: window 64, top-k 16 (binds from position 67 on). All have hash layers.
MODELS = ["nano", "tiny-m", "tiny-a"]
ROWS = 130


def tokens_for(engine, n, seed=0):
    """n random token ids, int32."""
    ids = np.random.default_rng(seed).integers(0, engine.config.vocab_size, n)
    return ids.astype(np.int32)


@pytest.fixture(scope="module", params=MODELS)
def small(request, engine):
    return engine(request.param, threads=2, chunk=ROWS, max_sessions=4, max_context=512)


@pytest.fixture(scope="module")
def one_by_one(small):
    """The baseline: 130 tokens decoded alone → tokens, outputs and the state after every one."""
    with small.session() as session:
        return decoded_alone(session, tokens_for(small, ROWS))


def same_outputs(output, logits, hidden, what):
    same_bits(output.logits, logits, f"{what} logits")
    same_bits(output.main_hidden, hidden, f"{what} main hidden")


# ---------------------------------------------------------------------- 1: run
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_repeated_runs_and_thread_counts(name, threads, engine):
    tokens = tokens_for(engine(name, threads=2, chunk=ROWS, max_sessions=4, max_context=512), ROWS)
    results = []
    for count in (2, threads, threads):
        with engine(name, threads=count, chunk=ROWS, max_sessions=4, max_context=512).session() as session:
            output = session.forward(tokens, "all")
            results.append((output.logits, output.main_hidden, session.decode(int(tokens[0])), state_of(session)))
    for one in results[1:]:
        for found, expected, what in zip(one, results[0], ("logits", "main hidden", "decode")):
            same_bits(found, expected, f"{threads} threads {what}")
        same_state(one[3], results[0][3])


# ---------------------------------------------------------------------- 2: row
def test_any_number_of_rows(small, one_by_one):
    tokens, logits, hidden, states = one_by_one
    for n in range(1, ROWS + 1):
        with small.session() as session:
            same_outputs(session.forward(tokens[:n], "all"), logits[:n], hidden[:n], f"{n} rows")
            same_state(state_of(session), states[n], f"{n} rows")


@pytest.mark.parametrize("width", [1, 2, 3, 6, 17])
@pytest.mark.parametrize("start", [3, 15, 40, 66, 100])
def test_rows_in_the_middle(small, one_by_one, start, width):
    tokens, logits, hidden, states = one_by_one
    with small.session() as session:
        session.forward(tokens[:start])
        same_outputs(session.forward(tokens[start : start + width], "all"), logits[start : start + width],
                     hidden[start : start + width], f"rows {start}+{width}")  # fmt: skip
        same_state(state_of(session), states[start + width])


def test_neighbours_of_other_sequences(small, one_by_one):
    tokens, logits, hidden, states = one_by_one
    with small.session() as a, small.session() as b, small.session() as c:
        a.forward(tokens[:61])
        b.forward(tokens_for(small, 30, seed=1))
        others = forward_all([(b, tokens_for(small, 5, seed=2), "all"), (a, tokens[61:68], "all"), (c, tokens[:40], "all")])[1:]
        same_bits(others[0].logits, logits[61:68], "in the middle")
        same_outputs(others[1], logits[:40], hidden[:40], "last")
        same_state(state_of(a), states[68])
        same_state(state_of(c), states[40])


def test_unwanted_rows_change_nothing(small, one_by_one):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        same_bits(session.forward(tokens[:80], [3, 17, 79]).logits, logits[[3, 17, 79]], "three wanted")
        assert session.forward(tokens[80:90], "none").logits.shape == (0, small.config.vocab_size)
        same_state(state_of(session), states[90])


# ---------------------------------------------------------------------- 3: chunk
def test_every_two_chunks_of_short_prompts(small, one_by_one):
    """All lengths to past two blocks of ratio 16, cut at every point."""
    tokens, logits, _, states = one_by_one
    for n in range(2, 36):
        for cut in range(1, n):
            with small.session() as session:
                session.forward(tokens[:cut])
                same_bits(session.forward(tokens[cut:n]).logits[0], logits[n - 1], f"{cut} + {n - cut}")
                same_state(state_of(session), states[n], f"{cut} + {n - cut}")


def test_cuts_around_every_limit(small, one_by_one):
    """Cuts beside the window, the block boundaries and the length at which the top-k begins to choose."""
    tokens, logits, _, states = one_by_one
    c = small.config
    limits = {c.sliding_window, 2 * c.sliding_window, 4 * c.index_topk, 4 * c.index_topk + 4, 16, 32, 64}
    cuts = sorted({limit + d for limit in limits for d in range(-2, 3) if 0 < limit + d < ROWS})
    for cut in cuts:
        with small.session() as session:
            session.forward(tokens[:cut])
            same_bits(session.forward(tokens[cut:]).logits[0], logits[-1], f"cut at {cut}")
            same_state(state_of(session), states[ROWS], f"cut at {cut}")


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16, 31, 64, 129])
def test_equal_chunks(small, one_by_one, chunk):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        for start in range(0, ROWS, chunk):
            last = session.forward(tokens[start : start + chunk])
        same_bits(last.logits[0], logits[-1], f"chunks of {chunk}")
        same_state(state_of(session), states[ROWS], f"chunks of {chunk}")


def test_random_chunks(small, one_by_one):
    tokens, logits, _, states = one_by_one
    rng = np.random.default_rng(5)
    for _ in range(20):
        cuts = np.unique(rng.integers(1, ROWS, rng.integers(1, 12)))
        with small.session() as session:
            for part in np.split(tokens, cuts):
                last = session.forward(part)
            same_bits(last.logits[0], logits[-1], f"cuts {cuts}")
            same_state(state_of(session), states[ROWS], f"cuts {cuts}")


# ---------------------------------------------------------------------- 4: rewind
def overshoot_and_return(session, tokens, start, over):
    """Run to `start`, then `over` foreign tokens, take them back and run 12 more of the right ones."""
    session.forward(tokens[:start])
    session.forward(tokens_for(session.engine, over, seed=start + over), "all")
    session.rewind(start)
    return session.forward(tokens[start : start + 6], "all").logits, session.forward(tokens[start + 6 : start + 12])


@pytest.mark.parametrize("over", range(1, 9))
def test_rewind_leaves_nothing_behind(small, one_by_one, over):
    """Starts over two blocks of each ratio, before and after the window fills and the top-k binds."""
    tokens, logits, _, states = one_by_one
    for start in [*range(1, 34), 47, 48, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 95, 96, 97, 111, 112, 113]:
        with small.session() as session:
            first, second = overshoot_and_return(session, tokens, start, over)
            same_bits(first, logits[start : start + 6], f"{start} + {over}")
            same_bits(second.logits[0], logits[start + 11], f"{start} + {over}")
            same_state(state_of(session), states[start + 12], f"{start} + {over}")


def test_rewind_again_and_again(small, one_by_one):
    tokens, logits, _, states = one_by_one
    rng = np.random.default_rng(7)
    with small.session() as session:
        while session.position < ROWS:
            at = session.position
            session.forward(tokens_for(small, int(rng.integers(1, 9)), seed=at))
            session.rewind(at)
            n = int(rng.integers(1, 4))
            same_bits(session.forward(tokens[at : at + n]).logits[0], logits[min(at + n, ROWS) - 1], f"at {at}")
        same_state(state_of(session), states[ROWS])


def test_rewind_to_the_start(small, one_by_one):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        session.forward(tokens_for(small, 100, seed=3))
        session.rewind(0)
        same_bits(session.forward(tokens[:50], "all").logits, logits[:50], "after a rewind to 0")
        same_state(state_of(session), states[50])


def test_control_without_head_room_the_rewind_test_fails(small, one_by_one):
    """Rings of exactly the window: the overshoot overwrites keys still in sight, and the test above must see it."""
    tokens, logits, _, _ = one_by_one
    start = small.config.sliding_window + 5
    model = small.model
    pool = Pool(model.ops, model.config, slots=1, max_context=512, headroom=0, stages=len(small.pool.stages))
    pool.reserve(pool.take_slot(), ROWS)

    def decode(position, token):
        return model.forward(Step(model.ops, pool, Rows.of(0, position, [token])), pool).logits[0]

    for position in range(start):
        same_bits(decode(position, tokens[position]), logits[position], "undisturbed")
    for i, token in enumerate(tokens_for(small, 3, seed=9)):
        decode(start + i, token)
    with pytest.raises(AssertionError, match="differ"):
        same_bits(decode(start, tokens[start]), logits[start], "without head-room")


def test_rewind_beyond_the_head_room_is_refused(engine):
    small = engine("tiny-m", threads=1, chunk=8, max_sessions=2, max_context=256)
    tokens = tokens_for(small, 60)
    with small.session() as session:
        session.prefill(tokens)
        with pytest.raises(StateError, match="expected 0 or a position of at least 52, found 51"):
            session.rewind(51)
        with pytest.raises(StateError, match=r"expected a position within 0\.\.60, found 61"):
            session.rewind(61)
        session.rewind(52)
        with pytest.raises(StateError, match="at least 52"):
            session.rewind(50)
        session.rewind(0)
        session.prefill(tokens)
