"""Norms and hyper-connections of cuda/norm.cu, run on the CPU."""

import numpy as np
import pytest
from emulation.launcher import FORWARD, REVERSE, EmulatedLauncher

from dsv4.ops.reference import ReferenceOps

pytestmark = pytest.mark.emulated


def rmsnorm(launcher, x, w, eps=1e-6):
    y = np.full(x.shape, np.nan, np.float32)
    kernel = launcher.compile("norm.cu").kernel("rmsnorm")
    kernel((len(x),), (256,), (x, w, y, np.int32(x.shape[1]), np.float32(eps)))
    return y


@pytest.mark.parametrize("rows, k", [(1, 1), (1, 64), (3, 257), (7, 1000), (130, 4096)])
def test_rmsnorm_is_the_formula(rows, k):
    rng = np.random.default_rng([rows, k])
    x, w = rng.standard_normal((rows, k), np.float32), rng.standard_normal(k, np.float32)
    y = rmsnorm(EmulatedLauncher(), x, w)
    expected = ReferenceOps().rmsnorm(x, w, 1e-6)
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)
    for order in (REVERSE, 7):
        assert rmsnorm(EmulatedLauncher(order), x, w).tobytes() == y.tobytes()
    assert rmsnorm(EmulatedLauncher(FORWARD), x[-1:], w).tobytes() == y[-1:].tobytes()
