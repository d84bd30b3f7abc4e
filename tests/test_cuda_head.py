"""The CUDA backend's heads, run on the CPU: best token and its lead; logits, markov and confidence heads as bf16 linears."""

import numpy as np
import ops_cases as make
import pytest
from compare import rel_l2, same_bits
from cpu_cases import inputs, weights
from cuda_ops import HostOps, emulated
from emulation.launcher import REVERSE
from test_ops_backends import mistakes

from dsv4.ops.reference import ReferenceOps

SHAPES = [(1, 1), (2, 2), (1, 31), (3, 512), (2, 513), (5, 1297), (130, 640), (1, 9000)]


@pytest.mark.parametrize("kind", ["any", "ties", "wide"])
@pytest.mark.parametrize("t, vocab", SHAPES)
def test_best(cuda, t, vocab, kind):
    case = make.best(t, vocab, kind)
    assert not mistakes(case, case(cuda), case(ReferenceOps()))


@pytest.mark.emulated
@pytest.mark.parametrize("t, vocab", [(3, 513), (2, 9000)])
def test_best_in_other_orders(t, vocab):
    case = make.best(t, vocab, "ties")
    for order in (REVERSE, 9):
        assert not mistakes(case, case(HostOps(emulated(order=order))), case(ReferenceOps()))


def test_zeros_of_either_sign_are_equal(cuda):
    logits = np.full((2, 700), -1, np.float32)
    logits[0, [5, 600]] = -0.0, 0.0
    logits[1] = np.float32(-3e38)
    assert (cuda.best(logits)[0] == [5, 0]).all()


def test_each_place_of_the_best_and_the_second(cuda):
    vocab = 1100
    logits = np.zeros((vocab, vocab), np.float32)
    first, second = np.arange(vocab), (np.arange(vocab) * 7 + 1) % vocab
    second[second == first] = (second[second == first] + 1) % vocab
    logits[first, second] = 2
    logits[first, first] = 5
    ids, margin = cuda.best(logits)
    assert (ids == first).all() and (margin == 3).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 333, 8999])
def test_the_lead_is_nan_where_a_logit_is_not_finite(cuda, bad, at):
    logits = make.best(3, 9000, "any").inputs["logits"].copy()
    logits[1, at] = bad
    ids, lead = cuda.best(logits)
    assert np.isnan(lead).tolist() == [False, True, False] and 0 <= ids[1] < 9000
    ids, lead = cuda.best(np.full((1, 3), bad, np.float32))
    assert np.isnan(lead[0]) and 0 <= ids[0] < 3


@pytest.mark.parametrize("n, k", [(1, 288), (640, 32), (641, 256)], ids=["confidence", "markov", "head"])
def test_heads(cuda, n, k):
    w, x = weights("bf16", n, k), inputs(9, k)
    whole = cuda.linear(x, cuda.matrix(*w))
    assert rel_l2(whole, ReferenceOps().linear(x, ReferenceOps().matrix(*w))) <= 3e-7
    for t in range(9):
        same_bits(cuda.linear(x[t : t + 1], cuda.matrix(*w)), whole[t : t + 1], f"row {t}")


def test_no_rows(cuda):
    ids, margin = cuda.best(inputs(0, 10))
    assert ids.shape == margin.shape == (0,)
