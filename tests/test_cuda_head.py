"""The CUDA backend's heads, run on the CPU: best token and margin; logits, markov and confidence heads as bf16 linears."""

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cpu_cases import inputs, weights
from cuda_ops import HostOps, emulated
from emulation.launcher import REVERSE

from dsv4.ops.reference import ReferenceOps


def expected_best(logits):
    order = np.sort(logits, axis=1)
    margin = order[:, -1] - order[:, -2] if logits.shape[1] > 1 else np.full(len(logits), np.inf, np.float32)
    return logits.argmax(axis=1).astype(np.int32), margin.astype(np.float32)


def is_best(ops, logits):
    for found, expected in zip(ops.best(logits), expected_best(logits)):
        same_bits(found, expected)


@pytest.mark.parametrize("t, vocab", [(1, 1), (2, 2), (1, 31), (3, 512), (2, 513), (5, 1297), (130, 640)])
def test_best(cuda, t, vocab):
    is_best(cuda, inputs(t, vocab))


@pytest.mark.emulated
@pytest.mark.parametrize("t, vocab", [(3, 513), (5, 1297)])
def test_best_in_other_orders(t, vocab):
    for order in (REVERSE, 9):
        is_best(HostOps(emulated(order=order)), inputs(t, vocab))


def test_equal_logits_go_to_the_lower_token(cuda):
    logits = np.round(inputs(40, 1500))
    ids, margin = cuda.best(logits)
    assert (expected_best(logits)[1] == 0).any()
    same_bits(ids, expected_best(logits)[0])
    same_bits(margin, expected_best(logits)[1])
    logits = np.full((3, 700), -np.inf, np.float32)
    logits[1, [5, 600]] = -0.0, 0.0
    logits[2] = np.float32(-3e38)
    assert (cuda.best(logits)[0] == [0, 5, 0]).all()


def test_each_place_of_the_best_and_the_second(cuda):
    vocab = 1100
    logits = np.zeros((vocab, vocab), np.float32)
    first, second = np.arange(vocab), (np.arange(vocab) * 7 + 1) % vocab
    second[second == first] = (second[second == first] + 1) % vocab
    logits[first, second] = 2
    logits[first, first] = 5
    ids, margin = cuda.best(logits)
    assert (ids == first).all() and (margin == 3).all()


def test_a_nan_is_never_best(cuda):
    logits = inputs(2, 900)
    logits[0, 333] = np.nan
    ids, margin = cuda.best(logits)
    clean = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    same_bits(ids, expected_best(clean)[0])
    same_bits(margin, expected_best(clean)[1])


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
