"""mma.cuh, on the CPU its twins, against plain arithmetic, in both forms (m16n8k16, and m16n8k8 twice as on sm_75)."""

import numpy as np
import pytest
from compare import rel_l2, same_bits
from cuda_ops import launch
from emulation.launcher import REVERSE, EmulatedLauncher

FORMS = [None, {"DSV4_MMA_K8": 1}]


def multiply(launcher, a, b, c, form=None):
    """a [n, 16, 16], b [n, 16, 8] float16, c [n, 16, 8] float32 through the tensor core, or its twin."""
    d = np.full(c.shape, np.nan, np.float32)
    kernel = launcher.compile("check.cu", form).kernel("mma_check")
    launch(launcher, kernel, (len(a),), (32,), (a.view(np.uint16), b.view(np.uint16), c, d))
    return d


@pytest.fixture
def launcher(device_ops):
    return device_ops.launcher


@pytest.mark.parametrize("form", FORMS, ids=["k16", "k8"])
def test_every_element_is_in_its_place(form, launcher):
    a, b = np.zeros((256, 16, 16), np.float16), np.zeros((256, 16, 8), np.float16)
    for i in range(256):
        a[i, i // 16, i % 16] = 1 + i
    b[:] = 1 + np.arange(128).reshape(16, 8)
    c = np.arange(128, dtype=np.float32).reshape(1, 16, 8).repeat(256, 0)
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    others = [EmulatedLauncher(order) for order in (REVERSE, 5)] if launcher.name == "emulated" else []
    for each in (launcher, *others):
        same_bits(multiply(each, a, b, c, form), expected)


@pytest.mark.parametrize("form", FORMS, ids=["k16", "k8"])
def test_sums(form, launcher):
    rng = np.random.default_rng(1)
    a = (rng.standard_normal((40, 16, 16)) * np.exp2(rng.integers(-14, 8, (40, 16, 16)))).astype(np.float16)
    b = (rng.standard_normal((40, 16, 8)) * np.exp2(rng.integers(-14, 8, (40, 16, 8)))).astype(np.float16)
    c = rng.standard_normal((40, 16, 8)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    assert rel_l2(multiply(launcher, a, b, c, form), exact) <= 1e-7
    alone = multiply(launcher, a[:, :1].repeat(16, 1), b[:, :, :1].repeat(8, 2), c[:, :1, :1].repeat(16, 1).repeat(8, 2), form)
    same_bits(alone[:, 5, 3], multiply(launcher, a, b, c, form)[:, 0, 0], "an element depends on its row and column alone")


def test_subnormals_and_nans(launcher):
    a, b, c = np.zeros((1, 16, 16), np.float16), np.zeros((1, 16, 8), np.float16), np.zeros((1, 16, 8), np.float32)
    a[0, 3, 7], b[0, 7, 2] = 2.0**-24, 2.0**-24
    assert multiply(launcher, a, b, c)[0, 3, 2] == 2.0**-48
    a[0, 5, 1] = np.nan
    found = np.isnan(multiply(launcher, a, b, c))
    assert found[0, 5].all() and not np.delete(found[0], 5, axis=0).any()
