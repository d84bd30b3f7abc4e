"""The whole engine on the CUDA backend, its kernels run on the CPU: goldens, text, and the promises as bits."""

import json

import numpy as np
import pytest
from compare import decoded_alone, rel_l2_rows, same_bits, same_state, state_of
from cuda_ops import emulated, only_emulated
from emulation.launcher import REVERSE
from fake_nccl import cupy_with_nccl
from rank_threads import crew_of
from test_golden_e2e import CLEAN, STEADY, expected, golden, open_model, open_pool

import dsv4
from dsv4 import loading
from dsv4.comm import Nccl
from dsv4.errors import Dsv4Error
from dsv4.rows import Rows
from dsv4.sampling import SamplingParams, greedy
from dsv4.session import draft_all, forward_all, prime_all
from dsv4.step import Step

TOKENS = 40  # of the promises' baseline: past tiny-m's window of 16, two blocks of ratio 16 and where its top-k binds


def load(directory, ops, **settings):
    """An engine whose backend `cuda` is these ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_ops", lambda name, **_: ops)
        return dsv4.Engine.load(directory, backend="cuda", max_context=256, **settings)


@pytest.fixture(scope="module")
def engine(checkpoint_dir, device_ops):
    """engine(name, order=…, **settings), on the CPU in this order; the same for the same arguments."""
    made = {}

    def get(name, order=0, **settings):
        key = (name, order, *sorted(settings.items()))
        if key not in made:
            made[key] = load(checkpoint_dir(name), emulated(order=order) if order else device_ops, **{"chunk": 64, "max_sessions": 3} | settings)
        return made[key]

    return get


# ---------------------------------------------------------------------- goldens
def forced(model, case, steps) -> np.ndarray:
    """Prefill and forced decode → logits [steps, vocab]."""
    prompt, tokens = case["prompt"], case["tokens"][:steps]
    pool = open_pool(model, len(prompt) + len(tokens), headroom=len(prompt))
    rows = [Rows.of(0, 0, prompt), *(Rows.of(0, len(prompt) + i, [token]) for i, token in enumerate(tokens[:-1]))]
    return np.concatenate([model.forward(Step(model.ops, pool, part), pool).logits for part in rows])


@pytest.mark.parametrize(
    "name, prompts, steps",
    [("tiny-m", 2, 45), ("nano", 1, 20), ("tiny-tp", 1, 10), ("tiny-a", 1, 10), ("tiny-b", 1, 4)],
)
def test_golden(name, prompts, steps, checkpoint_dir, golden_dir, device_ops):
    """Forced tokens; the shortest prompts, the first steps. What a flipped code does is in test_golden_e2e.py."""
    stats = json.loads((golden_dir / f"stats.{name}.json").read_text())
    cases = golden(golden_dir, name, "fp32")
    model = open_model(checkpoint_dir(name), device_ops)
    errors, agree, margins = [], [], []
    for length in sorted(cases)[:prompts]:
        logits, _, _ = expected(cases[length])
        found, logits = forced(model, cases[length], steps), logits[:steps]
        errors.append(rel_l2_rows(found, logits))
        agree.append(found.argmax(1) == logits.argmax(1))
        margins.append(cases[length]["margins"][:steps])
    errors, agree, margins = map(np.concatenate, (errors, agree, margins))
    if name in STEADY:
        assert np.median(errors) <= 3 * max(stats["fp32_acc64"]["step_median"], 1e-6)
    assert (errors <= CLEAN).any()
    assert errors.max() <= 3 * stats["bf16"]["step_max"]
    clear = margins > (stats["bf16"]["largest_margin_flipped"] or 0.3)
    assert clear.any() and agree[clear].all()


@pytest.mark.parametrize("kind, spec", [("repeat", "always"), ("math", "off")])
def test_nano_writes_the_golden_text(engine, continuations, kind, spec):
    case = continuations[kind][0]
    wanted = case["greedy_ids"][:12]
    steps = engine("nano").generate(case["prompt"], SamplingParams(temperature=0, max_tokens=len(wanted)), spec=spec)
    assert [step.token for step in steps] == wanted


@only_emulated
def test_a_step_waits_for_the_device_at_its_end(engine):
    """For the logits, and for the best of each row and its lead."""
    ops = engine("tiny-m").model.ops
    with engine("tiny-m").session() as session:
        session.forward([1, 2, 3])
        before = ops.launcher.synchronisations
        session.forward([4])
        assert ops.launcher.synchronisations - before == 3


@only_emulated
def test_a_step_uploads_what_is_known_of_its_rows_alone(engine, monkeypatch):
    """A few numbers a row: places of keys and entries are worked out on the device."""
    small, sizes = engine("tiny-m"), []
    launcher = small.model.ops.launcher
    upload = launcher.upload
    with small.session() as session:
        session.forward([5] * 50)
        monkeypatch.setattr(launcher, "upload", lambda array: sizes.append(array.nbytes) or upload(array))
        session.forward([7] * 40)
    assert max(sizes) <= 4 * 40 and sum(sizes) <= 9 * 4 * 40


def drafts(engine, *chooses):
    """A block for each of so many sequences, drafted together, with how often the host waited for the device."""
    launcher = engine.model.ops.launcher
    sessions = [engine.session() for _ in chooses]
    for i, session in enumerate(sessions):
        session.forward([5, 9, 11 + i])
    prime_all(sessions)
    before = launcher.synchronisations
    found = draft_all([(session, 7, choose) for session, choose in zip(sessions, chooses)])
    waits = launcher.synchronisations - before
    for session in sessions:
        session.close()
    return found, waits


def as_greedy(logits, position):
    """The same choice, of which the engine does not know that it is greedy: each token is chosen on the host."""
    return greedy(logits, position)


@only_emulated
def test_a_greedy_draft_waits_for_the_device_at_its_end(engine):
    """For ids, leads and confidence. A choose of another kind must see each place's logits, its own sequence's only."""
    nano = engine("nano")
    alone, waits = drafts(nano, greedy, greedy)
    assert waits == 3
    hosted, waits = drafts(nano, as_greedy, greedy)
    assert waits == 3 + nano.config.dspark.block_size
    for one, other in zip(alone, hosted):
        same_bits(one.ids, other.ids)
        same_bits(one.confidence, other.confidence)
        assert one.logits is other.logits is None


@only_emulated
def test_logits_of_a_draft_that_are_not_finite(engine, monkeypatch):
    """What greedy says of them, and to the sequence alone whose they are."""
    nano = engine("nano")
    clean, _ = drafts(nano, greedy, greedy)
    ops = nano.model.ops
    linear, markov = ops.linear, nano.model.weights.draft.markov_w2

    def broken(x, w, slices=1):
        y = linear(x, w, slices)
        if w is markov:
            y[0, 3] = np.float32(np.nan)
        return y

    monkeypatch.setattr(ops, "linear", broken)
    for choose in (greedy, as_greedy):
        (error, other), _ = drafts(nano, choose, greedy)
        assert isinstance(error, Dsv4Error) and "1 of 640 that are not, the first nan at token 3" in str(error)
        same_bits(other.ids, clean[1].ids)
    with nano.session() as session:
        session.forward([5, 9, 11])
        with pytest.raises(Dsv4Error, match="logits: expected finite numbers"):
            session.draft(7)


# ---------------------------------------------------------------------- the promises, as bits
@pytest.fixture(scope="module")
def small(engine):
    return engine("tiny-m")


@pytest.fixture(scope="module")
def one_by_one(small):
    """Tokens decoded alone → tokens, logits, main hidden, and the state after every one."""
    tokens = np.random.default_rng(0).integers(0, small.config.vocab_size, TOKENS).astype(np.int32)
    with small.session() as session:
        return decoded_alone(session, tokens)


@only_emulated
@pytest.mark.parametrize("order", [REVERSE, 11])
def test_orders_of_threads_do_not_show(engine, one_by_one, order):
    tokens, logits, hidden, states = one_by_one
    with engine("tiny-m", order=order).session() as session:
        output = session.forward(tokens, "all")
        same_bits(output.logits, logits, "logits")
        same_bits(session.engine.model.ops.to_host(output.main_hidden), hidden, "main hidden")
        same_state(state_of(session), states[TOKENS])


@pytest.mark.parametrize("rows", [2, 8, 9, 17, 33, 40])
def test_any_number_of_rows(small, one_by_one, rows):
    tokens, logits, hidden, states = one_by_one
    with small.session() as session:
        output = session.forward(tokens[:rows], "all")
        same_bits(output.logits, logits[:rows], "logits")
        same_bits(small.model.ops.to_host(output.main_hidden), hidden[:rows], "main hidden")
        same_state(state_of(session), states[rows])


@pytest.mark.parametrize("cuts", [[1, 2], [4, 16, 20], [15, 18, 33]])
def test_any_cutting_of_a_prompt(small, one_by_one, cuts):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        for part in np.split(tokens, cuts):
            last = session.forward(part)
        same_bits(last.logits[0], logits[-1], f"cuts {cuts}")
        same_state(state_of(session), states[TOKENS])


def test_neighbours_of_other_sequences(small, one_by_one):
    tokens, logits, _, states = one_by_one
    with small.session() as a, small.session() as b:
        a.forward(tokens[:17])
        _, output = forward_all([(b, tokens[5:14], "all"), (a, tokens[17:24], "all")])
        same_bits(output.logits, logits[17:24], "behind another sequence")
        same_state(state_of(a), states[24])


@pytest.mark.parametrize("start, over", [(2, 1), (7, 3), (15, 8), (17, 5), (31, 8), (32, 4)])
def test_rewind_leaves_nothing_behind(small, one_by_one, start, over):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        session.forward(tokens[:start])
        session.forward((tokens[:over] + 7) % small.config.vocab_size, "all")
        session.rewind(start)
        same_bits(session.forward(tokens[start : start + 5], "all").logits, logits[start : start + 5], "after the rewind")
        same_state(state_of(session), states[start + 5])


@pytest.mark.parametrize("name, specs", [("tiny-m", ["always"]), ("nano", ["gate", "fixed:2"])])
def test_speculation_never_changes_a_bit(engine, name, specs):
    loaded = engine(name)
    prompt = [5, 9, 11, 9, 11, 9, 11, 9]

    def run(spec):
        steps = list(loaded.generate(prompt, SamplingParams(temperature=0, max_tokens=10, logprobs=3), spec=spec))
        return [(s.token, s.logprob, s.top_logprobs) for s in steps]

    plain = run("off")
    for spec in specs:
        assert run(spec) == plain, spec


def test_a_snapshot_goes_on_with_the_same_bits(small, one_by_one):
    tokens, logits, _, states = one_by_one
    with small.session() as session:
        session.forward(tokens[:19])
        saved = session.snapshot()
        session.forward((tokens[:9] + 3) % small.config.vocab_size)
    with small.session() as other:
        other.restore(saved)
        same_bits(other.forward(tokens[19:30], "all").logits, logits[19:30], "after a restore")
        same_state(state_of(other), states[30])


@pytest.mark.parametrize("held", [4, 9])
def test_staged_experts_give_the_same_bits(engine, one_by_one, held):
    """Slots for few experts: copies on the copy stream, made as late as somebody waits for them."""
    tokens, logits, _, states = one_by_one
    nbytes = expert_bytes(engine("tiny-m").config)
    staged = engine("tiny-m", expert_cache=held * nbytes)
    with staged.session() as session:
        first, second = session.forward(tokens[:9], "all"), session.forward(tokens[9:12], "all")
        same_bits(np.concatenate([first.logits, second.logits]), logits[:12], "logits")
        same_state(state_of(session), states[12])
    assert staged.model.weights.store.counters.misses > 0


@only_emulated
def test_ranks_with_a_device_each(engine, checkpoint_dir, monkeypatch):
    """The same bits as one rank, arrays by NCCL (a stand-in that carries them by memory), every rank on its own device."""
    devices = []

    def open_ops(name, *, threads, device):
        devices.append(device)
        return emulated(threads=1)

    def nccl(control):
        cupy = cupy_with_nccl(control, [])
        cupy.empty = emulated().launcher.empty
        return Nccl(control, cupy)

    monkeypatch.setattr(loading, "open_ops", open_ops)
    monkeypatch.setattr(loading, "Nccl", nccl)
    tokens = list(range(40, 58))
    with engine("tiny-tp").session() as session:
        expected = [session.forward(tokens, "all").logits, session.decode(7)]
    with crew_of(checkpoint_dir("tiny-tp"), 2, backend="cuda", max_context=256, chunk=64, max_sessions=3) as two:
        with two.session() as session:
            found = [session.forward(tokens, "all").logits, session.decode(7)]
        assert two.model.comm.traffic.sums > 0
    for name, a, b in zip(("prompt", "decode"), found, expected):
        same_bits(a, b, name)
    assert sorted(devices) == [0, 1]


def expert_bytes(config) -> int:
    """Of one expert's slot; every part begins at a multiple of 256."""
    inner, d = config.moe_intermediate_size, config.hidden_size
    parts = [n * k // 2 for n, k in ((inner, d), (d, inner), (inner, d))] + [n * k // 32 for n, k in ((inner, d), (d, inner), (inner, d))]
    return sum(-(-part // 256) * 256 for part in parts)
