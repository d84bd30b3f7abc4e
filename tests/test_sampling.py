"""Sampling parameters, distributions, draws and log-probabilities."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import Dsv4Error, InputError
from dsv4.sampling import SamplingParams, generator, probabilities, sample, token_logprobs

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5], np.float32)
small = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


def softmax(logits):
    p = np.exp(np.float64(logits) - np.max(logits))
    return p / p.sum()


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", None),
        ("min_p", -0.5),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 7),
        ("stop_ids", (-1,)),
        ("stop_ids", ("a",)),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_wrong_parameter_is_named(field, value):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}: expected ") and "; found " in message and "\n" not in message


def test_parameters_accept_what_they_say():
    params = SamplingParams(max_tokens=np.int64(3), stop="end", stop_ids=[4, 5], temperature=0, seed=2**64 - 1)
    assert params.stop == ("end",) and params.stop_ids == (4, 5)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_temperature_divides_the_logits():
    np.testing.assert_allclose(
        probabilities(LOGITS, SamplingParams(temperature=0.5)), softmax(LOGITS / 0.5), rtol=1e-12
    )
    np.testing.assert_allclose(probabilities(LOGITS, SamplingParams()), softmax(LOGITS), rtol=1e-12)


def test_temperature_zero_is_the_argmax_and_the_lower_index_wins():
    assert np.flatnonzero(probabilities(LOGITS, SamplingParams(temperature=0))).tolist() == [1]
    assert sample(LOGITS, SamplingParams(temperature=0), 0) == 1


def test_a_vanishing_temperature_leaves_only_the_best():
    assert probabilities(LOGITS, SamplingParams(temperature=1e-300)).tolist() == [0, 0.5, 0, 0.5, 0, 0]


@pytest.mark.parametrize(
    "k, kept", [(1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (6, [0, 1, 2, 3, 4, 5]), (99, [0, 1, 2, 3, 4, 5])]
)
def test_top_k_keeps_the_k_largest_lower_index_first(k, kept):
    p = probabilities(LOGITS, SamplingParams(top_k=k))
    assert np.flatnonzero(p).tolist() == kept
    np.testing.assert_allclose(p[kept], softmax(LOGITS[kept]), rtol=1e-12)


@pytest.mark.parametrize(
    "top_p, kept", [(1e-9, [0]), (0.49, [0]), (0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    assert np.flatnonzero(probabilities(logits, SamplingParams(top_p=top_p))).tolist() == kept


def test_top_p_takes_equal_probabilities_from_the_lower_index():
    assert np.flatnonzero(probabilities(np.zeros(8), SamplingParams(top_p=0.3))).tolist() == [0, 1, 2]


@pytest.mark.parametrize("min_p, kept", [(0.0, [0, 1, 2]), (0.24, [0, 1, 2]), (0.3, [0, 1]), (0.51, [0]), (1.0, [0])])
def test_min_p_is_relative_to_the_most_likely(min_p, kept):
    logits = np.log(np.array([0.8, 0.4, 0.2]) / 1.4)
    assert np.flatnonzero(probabilities(logits, SamplingParams(min_p=min_p))).tolist() == kept


def test_filters_apply_in_order_each_on_what_is_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # top-k 3 leaves 4/9, 3/9, 2/9: the first two reach 0.75 only then
    assert np.flatnonzero(probabilities(logits, SamplingParams(top_k=3, top_p=0.75))).tolist() == [0, 1]
    assert np.flatnonzero(probabilities(logits, SamplingParams(top_p=0.75))).tolist() == [0, 1, 2]


@settings(max_examples=200, deadline=None)
@given(
    small,
    st.floats(0.05, 5),
    st.integers(0, 50),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)
def test_every_draw_has_positive_probability(logits, temperature, top_k, top_p, min_p, seed, position):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = np.array(logits, np.float32)
    p = probabilities(logits, params)
    assert p.dtype == np.float64 and p.sum() == pytest.approx(1, abs=1e-12)
    assert p[logits > logits.max() - 1e-6].any()  # one of the most likely stays
    assert p[sample(logits, params, position)] > 0


def test_a_draw_depends_on_seed_and_position_only():
    params = SamplingParams(seed=11)
    logits = np.zeros(1000)
    forward = [sample(logits, params, position) for position in range(50)]
    backward = [sample(logits, params, position) for position in reversed(range(50))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 40  # positions differ
    assert forward != [sample(logits, SamplingParams(seed=12), position) for position in range(50)]


def test_a_filter_that_leaves_the_winner_leaves_the_draw():
    logits = np.random.default_rng(3).standard_normal(50)
    best = set(np.argsort(-logits)[:10].tolist())
    plain = [sample(logits, SamplingParams(seed=11), position) for position in range(200)]
    cut = [sample(logits, SamplingParams(seed=11, top_k=10), position) for position in range(200)]
    assert 20 < sum(token in best for token in plain) < 180
    assert all(a == b for a, b in zip(plain, cut) if a in best)


def test_many_draws_at_one_position_do_not_reach_into_the_next():
    first = generator(5, 3).random(100_000)
    assert not np.isin(generator(5, 4).random(1000), first).any()


@pytest.mark.parametrize("draw", [0.0, 5e-324, 45.0])
def test_the_ends_of_the_draw_fall_on_possible_tokens(monkeypatch, draw):
    stub = SimpleNamespace(standard_exponential=lambda size: np.full(size, draw))
    monkeypatch.setattr("dsv4.sampling.generator", lambda *_: stub)
    logits = np.array([0.0, 0.0, 5.0, 0.0, 5.0, 0.0])
    assert sample(logits, SamplingParams(top_k=2, seed=0), 0) == 2


def test_hardly_possible_tokens_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sample(np.array([-743.0, 0.0]), SamplingParams(seed=0), 0) == 1


def test_without_a_seed_each_request_gets_its_own():
    assert SamplingParams().seeded().seed != SamplingParams().seeded().seed
    assert SamplingParams(seed=0).seeded().seed == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.6, "top_k": 5, "top_p": 0.95},
    ],
)
def test_draws_follow_the_distribution(options):
    """Chi-square over 20,000 positions, fixed seeds: beyond the 99.9% quantile the sampler is wrong."""
    logits = np.random.default_rng(0).standard_normal(8) * 1.5
    params = SamplingParams(seed=123, **options)
    p = probabilities(logits, params)
    n = 20_000
    counts = np.bincount([sample(logits, params, position) for position in range(n)], minlength=8)
    used = p > 0
    assert counts[~used].sum() == 0
    statistic = (((counts - n * p) ** 2)[used] / (n * p)[used]).sum()
    quantile = {3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}
    assert statistic < quantile[max(3, np.count_nonzero(used) - 1)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(value):
    logits = LOGITS.copy()
    logits[2] = value
    for call in (
        lambda: sample(logits, SamplingParams(temperature=0), 0),
        lambda: sample(logits, SamplingParams(), 0),
        lambda: token_logprobs(logits, 1, 2),
    ):
        with pytest.raises(Dsv4Error, match="expected finite numbers; found 1 of 6 .* at token 2"):
            call()


def test_logprobs_are_the_models_own_best_first():
    logprob, top = token_logprobs(LOGITS, 2, 3)
    expected = np.log(softmax(LOGITS))
    assert logprob == pytest.approx(expected[2], rel=1e-12)
    assert [token for token, _ in top] == [1, 3, 2]
    assert [value for _, value in top] == pytest.approx(expected[[1, 3, 2]].tolist(), rel=1e-12)
    assert token_logprobs(LOGITS, 2, 0) == (logprob, ())
    assert len(token_logprobs(LOGITS, 2, 20)[1]) == 6
